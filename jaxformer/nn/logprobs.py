"""Log-probabilities of tokens that are there already, in chunks of positions: the logits of all positions never exist."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.nn import inputs, model
from jaxformer.nn.embedding import head, in_float32, require_head
from jaxformer.nn.mistakes import answers_mistakes
from jaxformer.nn.named import listening


@answers_mistakes
def logprobs(
    params: dict,
    tokens: Any,
    cfg: ModelConfig,
    *,
    positions: Any = None,
    segments: Any = None,
    valid: Any = None,
    source: Any = None,
    source_valid: Any = None,
    token_types: Any = None,
    embeddings: Any = None,
    embeddings_mask: Any = None,
    key: jax.Array | None = None,
    chunk: int = 128,
) -> jax.Array:
    """The model's log-probability of every token given those before it, float32 [B, T], in nats.

    Entry t is log p(tokens[t] | tokens before t); 0 at padding, at an embedding, and at a token with nothing before it: the
    first of a row, of a packed document, and after padding on the left. tokens [B, T] are the decoder's in an encoder–decoder,
    the start token first. The other arguments and the errors are those of ``forward``. chunk: positions whose logits
    [B, chunk, V] exist at a time; the backward pass computes them again.

    >>> rewards_B = (jf.logprobs(params, tokens, cfg) - jf.logprobs(reference, tokens, cfg)).sum(1)
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk={chunk!r} must be an integer of at least 1 position")
    if not cfg.causal:
        raise ValueError("the model is not causal (causal=False), so its prediction at a token depends on later tokens")
    require_head(cfg)
    ids = inputs.tokens("tokens", tokens, cfg)
    rows: dict[str, Any] = {"positions": positions, "segments": segments, "valid": valid, "token_types": token_types}
    rows |= {"source": source, "source_valid": source_valid, "embeddings": embeddings, "embeddings_mask": embeddings_mask}
    hidden_BTD = model.hidden(params, ids, cfg, **rows, key=key)
    before_BT, after_BT, scored_BT = _neighbours(ids.shape, segments, valid)
    if embeddings_mask is not None:
        scored_BT &= ~jnp.asarray(embeddings_mask)
    targets_BT = jnp.take_along_axis(ids, after_BT, axis=1)

    wide, narrowed = in_float32(params, cfg)

    def of_chunk(hidden_BTD, targets_BT):
        logits = jax.nn.log_softmax(head(narrowed(wide), hidden_BTD, cfg))
        # By comparison, not by index: the vocabulary may be sharded, and the gradient needs no scatter.
        is_target = targets_BT[..., None] == jnp.arange(cfg.vocab_size, dtype=jnp.int32)
        return jnp.where(is_target.any(-1), jnp.where(is_target, logits, 0.0).sum(-1), jnp.nan)

    predicted_BT = by_chunks(of_chunk, chunk, hidden_BTD, targets_BT)
    return jnp.where(scored_BT, jnp.take_along_axis(predicted_BT, before_BT, axis=1), 0.0)


def by_chunks(f: Callable[..., jax.Array], chunk: int, *arrays: jax.Array) -> jax.Array:
    """``f(*arrays)`` [B, T, …] of arrays [B, T, …], computed for ``chunk`` positions at a time, one chunk after another; the
    backward pass computes each again. All at once where there is one chunk, or someone listens: values could not leave."""
    batch, length = arrays[0].shape[:2]
    if length <= chunk or listening():
        return f(*arrays)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, -length % chunk)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

    step = jax.checkpoint(f, prevent_cse=False)
    chunks = jax.lax.scan(lambda _, chunks: (None, step(*chunks)), None, tuple(map(split, arrays)))[1]
    joined = jnp.moveaxis(chunks, 0, 1)
    return joined.reshape(batch, -1, *joined.shape[3:])[:, :length]


def _neighbours(shape: tuple[int, ...], segments: Any, valid: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[B, T] each: the indices of the valid tokens before and after each token (one of the row, where there is none), and
    whether the token is valid and one of its document stands before it."""
    index_BT = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    valid_BT = jnp.ones(shape, bool) if valid is None else jnp.broadcast_to(jnp.asarray(valid), shape)
    last_BT = jax.lax.cummax(jnp.where(valid_BT, index_BT, -1), axis=1)
    next_BT = jax.lax.cummin(jnp.where(valid_BT, index_BT, shape[1] - 1), axis=1, reverse=True)
    before_BT = jnp.pad(last_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    after_BT = jnp.pad(next_BT[:, 1:], ((0, 0), (0, 1)), constant_values=shape[1] - 1)
    scored_BT, before_BT = valid_BT & (before_BT >= 0), jnp.maximum(before_BT, 0)
    if segments is not None:
        segments_BT = jnp.broadcast_to(jnp.asarray(segments), shape)
        scored_BT &= segments_BT == jnp.take_along_axis(segments_BT, before_BT, axis=1)
    return before_BT, after_BT, scored_BT
