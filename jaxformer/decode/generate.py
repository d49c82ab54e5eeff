"""Generation: one compiled function, prefill then a ``lax.scan`` of single-token steps over a preallocated cache."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxformer.config import ModelConfig
from jaxformer.decode.cache import init_cache
from jaxformer.nn import inputs, model
from jaxformer.record import Strict, within


@dataclass(frozen=True)
class Sampling(Strict):
    """How a token is drawn from logits: temperature first, then top-k, then top-p, on what is left."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token (greedy)."""
    top_k: int = 0
    """Keep the k most probable tokens, lowest id first among equals; 0 keeps all."""
    top_p: float = 1.0
    """Keep a token iff the probability of those before it is below p, and always the most probable (Holtzman et al. 2020)."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 0, math.inf, "temperature", "top_k")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is outside [0, 1]")


GREEDY = Sampling(temperature=0.0)


@struct.dataclass
class Generated:
    """What ``generate`` gives."""

    tokens: jax.Array
    """int32 [B, max_new_tokens]: what was generated; after an end token, padding."""
    lengths: jax.Array
    """int32 [B]: tokens generated, the end token included."""
    logprobs: jax.Array
    """float32 [B, max_new_tokens]: what the model itself gave each token (no temperature, no truncation); 0 after the end."""


def generate(
    params: dict,
    prompts: Any,
    cfg: ModelConfig,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    key: jax.Array | None = None,
    eos: Sequence[int] = (),
    pad: int = 0,
    valid: Any = None,
    source: Any = None,
    source_valid: Any = None,
) -> Generated:
    """Continues ``prompts``: a list of token lists of any lengths, or [B, T] with ``valid`` [B, T] (padding left or right).

    An encoder–decoder reads ``source`` [B, S] (``source_valid`` [B, S]); its prompts may be None: ``cfg.start_token`` then
    begins every row. eos: ids that end a row, which then emits ``pad``. key: needed unless sampling is greedy.

    Raises ValueError, before any work, for an empty prompt, ids outside the vocabulary, and lengths past a learned table.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if sampling.temperature > 0 and key is None:
        raise ValueError("sampling needs key=jax.random.key(seed); temperature=0 is greedy and needs none")
    prompts, valid = _prompts(prompts, valid, cfg, source)
    if (prompts.shape[1] + max_new_tokens - 1) > cfg.max_length and cfg.position == "learned":
        raise ValueError(
            f"a prompt of {prompts.shape[1]} and {max_new_tokens} new tokens go past the learned table of "
            f"max_length={cfg.max_length} positions"
        )
    for token in (*eos, pad):
        if not 0 <= token < cfg.vocab_size:
            raise ValueError(f"eos or pad id {token} is outside the vocabulary of {cfg.vocab_size}")
    if cfg.encoder_layers or source is not None or source_valid is not None:
        source, places = inputs.source(source, source_valid, len(prompts), cfg)  # inside jit nothing could be refused
        source_valid = places.valid
    key = jax.random.key(0) if key is None else key
    return _generate(params, prompts, valid, source, source_valid, key, cfg, max_new_tokens, sampling, tuple(eos), pad)


def _prompts(prompts, valid, cfg, source) -> tuple[jax.Array, jax.Array]:
    """Prompts [B, T], and which of their tokens are real."""
    if prompts is None:
        if cfg.start_token is None or source is None:
            raise ValueError("prompts may be None only for an encoder–decoder with a start_token, given source=")
        prompts = [[cfg.start_token]] * len(source)
    if isinstance(prompts, list | tuple) and valid is None:
        prompts, valid = _padded(prompts)
    prompts = inputs.tokens("prompts", prompts, cfg)
    valid = jnp.ones(prompts.shape, bool) if valid is None else jnp.asarray(valid)
    if valid.shape != prompts.shape or valid.dtype != bool:
        raise ValueError(f"valid must be boolean with the prompts' shape {prompts.shape}, not {valid.dtype}{valid.shape}")
    if not bool(valid.any(1).all()):
        raise ValueError(f"prompt {int(valid.any(1).argmin())} has no valid token")
    return prompts, valid


def _padded(prompts: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of any lengths as [B, T], padded on the right, and which of their tokens are real."""
    rows = [np.asarray(prompt) for prompt in prompts]
    for row, prompt in enumerate(rows):
        if prompt.ndim != 1:
            raise ValueError(f"prompts must be lists of token ids, one a row; prompt {row} is {prompts[row]!r}")
        if prompt.size == 0:
            raise ValueError(f"prompt {row} is empty: give at least one token (a BOS, say)")
    if not rows:
        raise ValueError("prompts is empty: give at least one row")
    lengths = np.array([len(prompt) for prompt in rows])
    valid = np.arange(lengths.max()) < lengths[:, None]
    padded = np.zeros(valid.shape, np.result_type(*rows))
    padded[valid] = np.concatenate(rows)
    return padded, valid


@functools.partial(jax.jit, static_argnums=(6, 7, 8, 9, 10))
def _generate(params, prompts, valid, source, source_valid, key, cfg, max_new_tokens, sampling, eos, pad):
    batch, length = prompts.shape
    cache = init_cache(cfg, batch, length + max_new_tokens - 1)
    given = {} if source is None else {"source": source, "source_valid": source_valid}
    hidden_BTD, cache = model.hidden(params, prompts, cfg, valid=valid, cache=cache, **given)
    last = length - 1 - jnp.argmax(valid[:, ::-1], axis=1)  # of each row's real tokens
    hidden_B1D = jnp.take_along_axis(hidden_BTD, last[:, None, None], axis=1)

    def choose(hidden_B1D, done, step):
        logits = model.head(params, hidden_B1D, cfg)[:, 0]
        token = jnp.where(done, pad, sample(logits, sampling, jax.random.fold_in(key, step)))
        logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]
        return token, jnp.where(done, 0.0, logprob), done | jnp.isin(token, jnp.array(eos, jnp.int32))

    def step(carry, index):
        token, done, cache = carry
        hidden_B1D, cache = model.hidden(params, token[:, None], cfg, cache=cache)
        token, logprob, ended = choose(hidden_B1D, done, index)
        return (token, ended, cache), (token, logprob, ~done)

    none_done = jnp.zeros(batch, bool)
    token, logprob, done = choose(hidden_B1D, none_done, 0)
    _, rest = jax.lax.scan(step, (token, done, cache), jnp.arange(1, max_new_tokens))
    first = (token, logprob, ~none_done)
    tokens, logprobs, alive = (jnp.concatenate([a[None], b]).T for a, b in zip(first, rest, strict=True))
    return Generated(tokens, alive.sum(1, dtype=jnp.int32), logprobs)


def sample(logits: jax.Array, sampling: Sampling, key: jax.Array) -> jax.Array:
    """Token ids [B] drawn from logits [B, V]."""
    if sampling.temperature == 0.0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, truncate(logits / sampling.temperature, sampling), axis=-1).astype(jnp.int32)


def truncate(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits [B, V] with −inf where top-k and top-p leave a token out."""
    vocab = logits.shape[-1]
    top_k = min(sampling.top_k or vocab, vocab)
    if top_k == vocab and sampling.top_p >= 1.0:
        return logits
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(vocab)
    ranked = jnp.where(rank < top_k, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # p = 1 keeps everything: rounding of the running sum must not drop the tail
    keep = (rank < top_k) & ((before < sampling.top_p) | (rank == 0) | (sampling.top_p >= 1.0))
    restore = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(keep, restore, axis=-1), logits, -jnp.inf)
