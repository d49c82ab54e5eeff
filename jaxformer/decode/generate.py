"""Generation: prompts to tokens in one compiled program, or as a pure function inside the user's own."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config import ModelConfig
from jaxformer.decode import loop, speculative
from jaxformer.decode.drafts import Draft
from jaxformer.decode.request import Inputs, Request, checked_arrays, padded, prepare, read_source
from jaxformer.decode.sampling import GREEDY, Sampling
from jaxformer.nn import model
from jaxformer.nn.mistakes import answers_mistakes


@struct.dataclass
class Generated:
    """The result of ``generate``. With ``num_return=n``, every array has an axis n after B."""

    tokens: jax.Array
    """int32 [B, max_new_tokens]: what was generated; after an end token, padding."""
    lengths: jax.Array
    """int32 [B]: tokens generated, the end token included."""
    logprobs: jax.Array
    """float32 [B, max_new_tokens]: the model's own log-probability of each token (no temperature, no truncation); 0 after the
    end. NaN where the model, or what was done to its logits, left no token to choose."""
    top_tokens: jax.Array | None = None
    """int32 [B, max_new_tokens, top_logprobs]: the most probable tokens at each step, by the model itself, best first."""
    top_logprobs: jax.Array | None = None
    """float32, like top_tokens."""
    acceptance: jax.Array | None = None
    """float32 [B]: with ``draft``, the share of its guesses that were right."""


@answers_mistakes
def generate(
    params: dict,
    prompts: Any,
    cfg: ModelConfig,
    *,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] | Mapping[str, Any] = GREEDY,
    key: jax.Array | None = None,
    eos: int | Sequence[int] | None = None,
    pad: int = 0,
    valid: Any = None,
    source: Any = None,
    source_valid: Any = None,
    num_return: int | None = None,
    top_logprobs: int = 0,
    prefill_chunk: int = 512,
    cache_dtype: Any = None,
    draft: Draft | None = None,
) -> Generated:
    """Continues ``prompts``: a list of token lists of any lengths, or [B, T] with ``valid`` [B, T] (padding left or right).

    An encoder–decoder reads ``source`` [B, S] (``source_valid`` [B, S]); its prompts may be None: ``cfg.start_token`` then
    begins every row. sampling: for all rows, one per row, or a mapping of arrays (``generate_arrays``). key: needed unless
    all of it is greedy; each row draws from its own key, whatever the other rows are (one key per output is taken too). eos:
    ids that end a row (none unless given), which then emits ``pad``. num_return: outputs for each prompt, which is read once.
    top_logprobs: how many of the most probable tokens to report. prefill_chunk: prompt tokens read at a time. cache_dtype: of
    the cache; the compute dtype unless given. draft: speculative decoding, by a smaller model, by looking up in the text or by
    the model's own block; the output is the same (greedy), or of the same distribution (sampled), only faster.

    Prompts and cache are padded to a small set of sizes, so that few calls compile (``compilations``). Stacked layers are
    unstacked at every call; ``jf.model.unstack(params, cfg)`` does that once for many.

    Raises ValueError, before any work, for an empty prompt, ids outside the vocabulary, and lengths past a learned table.
    """
    ids, lengths = padded(prompts, valid, cfg, source)
    request, inputs = prepare(
        params,
        cfg,
        ids,
        lengths,
        read_source(source, source_valid, len(ids), cfg),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        key=key,
        eos=eos,
        pad=pad,
        num_return=num_return,
        top_logprobs=top_logprobs,
        prefill_chunk=prefill_chunk,
        cache_dtype=cache_dtype,
        draft=draft,
    )
    return _per_prompt(_generate(params, inputs, request=request), num_return)


@answers_mistakes
def generate_arrays(
    params: dict,
    prompts_BT: jax.Array,
    lengths_B: jax.Array,
    cfg: ModelConfig,
    *,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] | Mapping[str, Any] = GREEDY,
    key: jax.Array | None = None,
    eos: int | Sequence[int] | None = None,
    pad: int = 0,
    source: Any = None,
    source_valid: Any = None,
    num_return: int | None = None,
    top_logprobs: int = 0,
    prefill_chunk: int = 512,
    cache_dtype: Any = None,
    draft: Draft | None = None,
) -> Generated:
    """``generate`` as a pure function of arrays, for the user's own programs: inside ``jit``, ``vmap``, ``scan``, ``shard_map``
    and on a mesh. Tokens and keywords are those of ``generate``.

    prompts_BT: integers [B, T], row b's tokens first and then whatever fills the row; lengths_B: integers [B], from 1 to T.
    All arrays may be traced: parameters, prompts, lengths, source, key, and the values of ``sampling`` given as a mapping from
    ``Sampling``'s field names to numbers or arrays, [] or [B], such as ``{"temperature": t, "top_p": 0.9}``; ``logit_bias`` is
    then an array [V] or [B, V] (−inf bans an id), and ``banned`` is not taken. Which fields the mapping has decides what is
    compiled. key: one, or one per output, [B] (with num_return=n [B, n]), which makes rows the same wherever they are computed:
    a single key is split by the number of the row in this call. The cache has room for T + max_new_tokens − 1 tokens.

    Raises ValueError as ``generate`` does for what is known while tracing. Where a length, an id or a value of ``sampling`` is
    traced and out of its range, all log-probabilities of its row are NaN.
    """
    prompts, lengths, wrong = checked_arrays(prompts_BT, lengths_B, cfg)
    request, inputs = prepare(
        params,
        cfg,
        prompts,
        lengths,
        read_source(source, source_valid, len(prompts), cfg),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        key=key,
        eos=eos,
        pad=pad,
        num_return=num_return,
        top_logprobs=top_logprobs,
        prefill_chunk=prefill_chunk,
        cache_dtype=cache_dtype,
        draft=draft,
        wrong=wrong,
    )
    return _per_prompt(_run(params, inputs, request), num_return)


@functools.partial(jax.jit, static_argnames="request")
def _generate(params, inputs: Inputs, *, request: Request) -> Generated:
    return _run(params, inputs, request)


def _run(params: dict, inputs: Inputs, request: Request) -> Generated:
    """The generation, one row per output: [B·copies, max_new_tokens] each."""
    params = model.unstack(params, request.cfg)  # once: in the loop, it would copy every weight at every step
    acceptance = None
    if request.draft is None:
        state, first = loop.start(params, inputs, request)
        steps = loop.run(params, state, first, inputs.values, request)
        out = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), steps)
    else:
        out, acceptance = speculative.run(params, inputs, request)
    logprobs, top_logprobs = out.logprob, out.top_logprobs
    if inputs.wrong is not None:
        wrong = inputs.wrong[loop.copied(len(inputs.prompts), request), None]
        logprobs, top_logprobs = jnp.where(wrong, jnp.nan, logprobs), jnp.where(wrong[..., None], jnp.nan, top_logprobs)
    generated = Generated(out.token, out.alive.sum(-1, dtype=jnp.int32), logprobs, acceptance=acceptance)
    if not request.top_logprobs:
        return generated
    return dataclasses.replace(generated, top_tokens=out.top_tokens, top_logprobs=top_logprobs)


def _per_prompt(out: Generated, num_return: int | None) -> Generated:
    """[B·n, …] to [B, n, …]."""
    return out if num_return is None else jax.tree.map(lambda x: x.reshape(-1, num_return, *x.shape[1:]), out)
