"""Generation: prompts to tokens in one compiled function, prefill and a token loop that is a ``lax.scan``."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config import ModelConfig
from jaxformer.decode import loop
from jaxformer.decode import prompts as starts
from jaxformer.decode.multitoken import MultiToken
from jaxformer.decode.sampling import GREEDY, Sampling, compile_sampling
from jaxformer.decode.speculative import DraftModel, Guessing, PromptLookup, speculate
from jaxformer.nn import model
from jaxformer.nn.mistakes import answers_mistakes


@struct.dataclass
class Generated:
    """What ``generate`` gives. With ``num_return=n``, every array has an axis n after B."""

    tokens: jax.Array
    """int32 [B, max_new_tokens]: what was generated; after an end token, padding."""
    lengths: jax.Array
    """int32 [B]: tokens generated, the end token included."""
    logprobs: jax.Array
    """float32 [B, max_new_tokens]: what the model itself gave each token (no temperature, no truncation); 0 after the end."""
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
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    key: jax.Array | None = None,
    eos: int | Sequence[int] = (),
    pad: int = 0,
    valid: Any = None,
    source: Any = None,
    source_valid: Any = None,
    num_return: int | None = None,
    top_logprobs: int = 0,
    prefill_chunk: int = 512,
    cache_dtype: Any = None,
    draft: DraftModel | PromptLookup | MultiToken | None = None,
) -> Generated:
    """Continues ``prompts``: a list of token lists of any lengths, or [B, T] with ``valid`` [B, T] (padding left or right).

    An encoder–decoder reads ``source`` [B, S] (``source_valid`` [B, S]); its prompts may be None: ``cfg.start_token`` then
    begins every row. sampling: for all rows, or one a row. key: needed unless all of it is greedy; each row draws from
    its own key, whatever the other rows are. eos: ids that end a row (none unless given), which then emits ``pad``.
    num_return: outputs for each prompt, which is read once. top_logprobs: how many of the most probable tokens to report.
    prefill_chunk: prompt tokens read at a time. draft: speculative decoding, by a smaller model, by looking up in the text or
    by the model's own block; the output is the same (greedy), or of the same distribution (sampled), only sooner.

    Prompts and cache are padded to a small set of sizes, so that few calls compile (``compilations``). Stacked layers are taken
    apart at every call; ``jf.model.unstack(params, cfg)`` does that once for many.

    Raises ValueError, before any work, for an empty prompt, ids outside the vocabulary, and lengths past a learned table.
    """
    if not isinstance(draft, DraftModel | PromptLookup | MultiToken | None):
        raise ValueError(f"draft must be a DraftModel, a PromptLookup or a MultiToken, not {type(draft).__name__}")
    given = {"valid": valid, "source": source, "source_valid": source_valid, "eos": eos, "pad": pad}
    given |= {"prefill_chunk": prefill_chunk, "cache_dtype": cache_dtype, "ahead": 0 if draft is None else draft.ahead}
    start = starts.begin(params, prompts, cfg, max_new_tokens=max_new_tokens, **given)
    plan, arguments = prepare(start, cfg, sampling, key, copies=1 if num_return is None else num_return, top=top_logprobs)
    if draft is None:
        return _shaped(_generate(params, *arguments, plan=plan), plan, num_return)
    guessing, draft_params = _guessing(draft, cfg, int(start.lengths.max()), max_new_tokens)
    out, offered, accepted = speculate(params, draft_params, *arguments, plan=plan, guessing=guessing)
    acceptance = accepted / jnp.maximum(offered, 1)
    acceptance = acceptance if num_return is None else acceptance.reshape(-1, num_return)
    return dataclasses.replace(_shaped(out, plan, num_return), acceptance=acceptance)


def prepare(
    start: starts.Start, cfg: ModelConfig, sampling: Any, key: Any, copies: int, top: int = 0
) -> tuple[loop.Plan, tuple]:
    """The ``loop.Plan`` to compile, and what it is called with: prompts, lengths, key, values of sampling, source."""
    starts.positive("num_return", copies)
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= cfg.vocab_size:
        raise ValueError(f"top_logprobs={top!r} must be between 0 and the vocabulary's {cfg.vocab_size}")
    methods, values = compile_sampling(sampling, len(start.ids), cfg.vocab_size, start.eos)
    if not methods.greedy and key is None:
        raise ValueError("sampling needs key=jax.random.key(seed); temperature=0 is greedy and needs none")
    plan = loop.Plan(
        cfg=cfg,
        max_new_tokens=start.max_new_tokens,
        eos=start.eos,
        pad=start.pad,
        methods=methods,
        slots=start.slots,
        chunk=start.chunk,
        copies=copies,
        top=top,
        cache_dtype=start.cache_dtype,
        ahead=start.ahead,
    )
    values = {name: value if len(value) == 1 else value.repeat(copies, 0) for name, value in values.items()}
    key = jax.random.key(0) if key is None else starts.random_key(key)
    return plan, (start.ids, start.lengths, key, values, start.source)


def _guessing(
    draft: DraftModel | PromptLookup | MultiToken, cfg: ModelConfig, longest: int, max_new_tokens: int
) -> tuple[Guessing, Any]:
    if isinstance(draft, PromptLookup):
        return Guessing(draft.ahead, ngram=draft.ngram), None
    if isinstance(draft, MultiToken):
        if not cfg.mtp:
            raise ValueError("draft=MultiToken() needs a model with mtp, a block for the token after the next")
        return Guessing(draft.ahead, own=True), None
    if draft.cfg.vocab_size != cfg.vocab_size:
        raise ValueError(f"the draft model has a vocabulary of {draft.cfg.vocab_size}, the model one of {cfg.vocab_size}")
    if draft.cfg.encoder_layers and not cfg.encoder_layers:
        raise ValueError("the draft model has an encoder, the model has none")
    model.check(draft.params, draft.cfg)
    starts.room(draft.cfg, longest, max_new_tokens)
    return Guessing(draft.ahead, cfg=draft.cfg), draft.params


@functools.partial(jax.jit, static_argnames="plan")
def _generate(params, prompts, lengths, key, values, source, *, plan: loop.Plan) -> loop.Emitted:
    params = model.unstack(params, plan.cfg)  # once: in the loop, it would copy every weight at every step
    state, first = loop.start(params, prompts, lengths, key, values, plan, **source)
    return loop.run(params, state, first, values, plan)


def _shaped(out: loop.Emitted, plan: loop.Plan, num_return: int | None) -> Generated:
    """[T, B·n, …] to [B, (n,) T, …]."""

    def rows_first(x):
        x = jnp.swapaxes(x, 0, 1)
        return x if num_return is None else x.reshape(-1, plan.copies, *x.shape[1:])

    tops = (rows_first(out.top_tokens), rows_first(out.top_logprobs)) if plan.top else (None, None)
    alive = rows_first(out.alive)
    return Generated(rows_first(out.token), alive.sum(-1, dtype=jnp.int32), rows_first(out.logprob), *tops)
