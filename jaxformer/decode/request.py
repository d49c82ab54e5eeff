"""What a generation is compiled for, ``Request``, and the arrays that it reads, ``Inputs``; checked before any work is done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxformer.config import ModelConfig
from jaxformer.config.strict import dtype_name
from jaxformer.decode.drafts import Draft, DraftModel, MultiToken, PromptLookup
from jaxformer.decode.sampling import GREEDY, Methods, Sampling, compile_sampling, out_of_range
from jaxformer.nn import inputs as checks
from jaxformer.nn import model, rope
from jaxformer.nn.embedding import require_config

LEAST_BUCKET = 16

Stopping = Literal["never"] | bool


@dataclass(frozen=True)
class Search:
    """Options of beam search that are compiled in."""

    length_penalty: float
    early_stopping: Stopping


@dataclass(frozen=True)
class Request:
    """What one generation is compiled for."""

    cfg: ModelConfig
    max_new_tokens: int
    cache_length: int
    """Tokens that each row of the cache has room for."""
    methods: Methods = Methods(frozenset(), ())
    eos: tuple[int, ...] = ()
    pad: int = 0
    copies: int = 1
    """Rows that continue each prompt: outputs, or hypotheses of beam search."""
    top_logprobs: int = 0
    """Most probable tokens to report at each step."""
    prefill_chunk: int = 512
    """Prompt tokens read at a time."""
    cache_dtype: str | None = None
    draft: Draft | None = None
    """What guesses tokens; without parameters."""
    search: Search | None = None

    @property
    def ahead(self) -> int:
        """Tokens that the cache may have to take back."""
        return 0 if self.draft is None else self.draft.ahead


@struct.dataclass
class Inputs:
    """The arrays that one generation reads, beside the model's parameters."""

    prompts: Any
    """int32 [B, T], padded on the right."""
    lengths: Any
    """int32 [B]: tokens of each prompt."""
    key: Any
    """One random key, or one per row, [B·copies]."""
    values: Any
    """Values of the sampling methods, as ``compile_sampling`` gives them, one row per output."""
    source: Any
    """Keywords of the forward: ``source`` and ``source_valid`` [B, S], or nothing."""
    draft_params: Any = None
    """Parameters of a draft model."""
    wrong: Any = None
    """bool [B]: prompts whose results are to be NaN; None where everything has been checked."""


def prepare(
    params: dict,
    cfg: ModelConfig,
    prompts: Any,
    lengths: Any,
    source: dict[str, jax.Array],
    *,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] | Mapping[str, Any] = GREEDY,
    key: Any = None,
    eos: int | Sequence[int] | None = None,
    pad: int = 0,
    num_return: int | None = None,
    top_logprobs: int = 0,
    prefill_chunk: int = 512,
    cache_dtype: Any = None,
    draft: Draft | None = None,
    search: Search | None = None,
    wrong: jax.Array | None = None,
) -> tuple[Request, Inputs]:
    """The request and the inputs of a generation from prompts [B, T] of ``lengths`` [B], both checked. The other keywords are
    those of ``generate``, and are checked here: ValueError for anything wrong in them."""
    model.check(params, cfg)
    copies = 1 if num_return is None else num_return
    for name, number in (("prefill_chunk", prefill_chunk), ("num_return", copies)):
        positive(name, number)
    if isinstance(top_logprobs, bool) or not isinstance(top_logprobs, int) or not 0 <= top_logprobs <= cfg.vocab_size:
        raise ValueError(f"top_logprobs={top_logprobs!r} must be between 0 and the vocabulary's {cfg.vocab_size}")
    longest = prompts.shape[1] if isinstance(lengths, jax.core.Tracer) else int(np.max(lengths))
    _check_draft(draft, cfg, longest, max_new_tokens)
    end_ids = ends(eos, pad, cfg)
    methods, values = compile_sampling(sampling, len(prompts), cfg.vocab_size, end_ids)
    if not methods.greedy and key is None:
        raise ValueError("sampling needs key=jax.random.key(seed); only temperature=0, which is greedy, does without")
    if (outside := out_of_range(values)) is not None:
        wrong = jnp.broadcast_to(outside, len(prompts)) | (False if wrong is None else wrong)
    values = {name: value if len(value) == 1 else value.repeat(copies, 0) for name, value in values.items()}
    request = Request(
        cfg=cfg,
        max_new_tokens=max_new_tokens,
        cache_length=room(cfg, longest, max_new_tokens, 0 if draft is None else draft.ahead),
        methods=methods,
        eos=end_ids,
        pad=int(pad),
        copies=copies,
        top_logprobs=top_logprobs,
        prefill_chunk=prefill_chunk,
        cache_dtype=None if cache_dtype is None else dtype_name("cache_dtype", cache_dtype),
        # compiled programs are kept by their request, which must not hold on to parameters
        draft=replace(draft, params={}) if isinstance(draft, DraftModel) else draft,
        search=search,
    )
    key = jax.random.key(0) if key is None else random_key(key, len(prompts) * copies)
    draft_params = draft.params if isinstance(draft, DraftModel) else None
    return request, Inputs(prompts, lengths, key, values, source, draft_params, wrong)


def _check_draft(draft: Any, cfg: ModelConfig, longest: int, max_new_tokens: int) -> None:
    if not isinstance(draft, PromptLookup | DraftModel | MultiToken | None):
        raise ValueError(f"draft must be a DraftModel, a PromptLookup or a MultiToken, not {type(draft).__name__}")
    if isinstance(draft, MultiToken) and not cfg.mtp:
        raise ValueError("draft=MultiToken() needs a model with mtp=True, which predicts the token after the next one")
    if isinstance(draft, DraftModel):
        if draft.cfg.vocab_size != cfg.vocab_size:
            raise ValueError(f"the draft model has a vocabulary of {draft.cfg.vocab_size}, but the model has {cfg.vocab_size}")
        if draft.cfg.encoder_layers and not cfg.encoder_layers:
            raise ValueError("the draft model has an encoder, but the model has none")
        model.check(draft.params, draft.cfg)
        room(draft.cfg, longest, max_new_tokens)


def bucket(length: int) -> int:
    """The least size of at least ``length`` among 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, …: four per octave, so that few
    sizes are compiled for, and at most a fifth of a size is padding (a quarter of the length)."""
    octave = 1 << (max(length, LEAST_BUCKET + 1) - 1).bit_length() - 1  # the power of two below
    step = octave // 4
    return max(LEAST_BUCKET, -(-length // step) * step)


def room(cfg: ModelConfig, longest: int, max_new_tokens: int, ahead: int = 0) -> int:
    """Length of a cache for prompts of up to ``longest`` tokens, and ``ahead`` tokens that may be taken back, rounded up to a
    bucket.

    Raises ValueError where the last token that is read would stand past a learned table.
    """
    positive("max_new_tokens", max_new_tokens)
    needed = longest + max_new_tokens - 1
    if needed > cfg.max_length and "learned" in cfg.positions:
        raise ValueError(
            f"a prompt of {longest} and {max_new_tokens} new tokens go past the learned table of "
            f"max_length={cfg.max_length} positions"
        )
    rope.check_cache(cfg, needed)
    return bucket(needed + ahead)


def positive(name: str, number: Any) -> None:
    """Raises ValueError for anything but an integer of at least 1."""
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
        raise ValueError(f"{name}={number!r} must be an integer of at least 1")


def ends(eos: int | Sequence[int] | None, pad: int, cfg: ModelConfig) -> tuple[int, ...]:
    """The ids that end a row, checked together with ``pad``."""
    ids = np.zeros(0, int) if eos is None or (isinstance(eos, tuple | list) and not eos) else np.atleast_1d(np.asarray(eos))
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"eos={eos!r} must be one id or several")
    if isinstance(pad, bool) or not isinstance(pad, int | np.integer):
        raise ValueError(f"pad={pad!r} must be an id")
    end_ids = tuple(int(i) for i in ids)
    for name, token in (*(("eos", i) for i in end_ids), ("pad", pad)):
        if not 0 <= token < cfg.vocab_size:
            raise ValueError(f"{name} id {token} is outside the vocabulary of {cfg.vocab_size}")
    return end_ids


def random_key(key: Any, rows: int) -> jax.Array:
    """``key`` as typed keys: one, [], or one per output, [rows]. Raises ValueError for anything else."""
    if isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32 and key.shape[-1:] == (2,):
        key = jax.random.wrap_key_data(jnp.asarray(key))
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or (key.shape and key.size != rows):
        raise ValueError(
            f"key={key!r:.80} must be one random key, as jax.random.key(seed) gives it, or one per output ({rows})"
        )
    return key if key.shape == () else key.reshape(-1)


def padded(prompts: Any, valid: Any, cfg: ModelConfig, source: Any) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as int32 [B, T], padded on the right to a bucket, and their lengths [B].

    prompts: a list of token lists, [B, T] with ``valid``, or None for an encoder–decoder that has a start token.
    """
    require_config(cfg)
    if any(isinstance(x, jax.core.Tracer) for x in (prompts, valid, source)):
        raise ValueError(
            "traced prompts cannot be checked; inside jit, use jf.decode.generate_arrays(params, prompts, lengths, cfg)"
        )
    if prompts is None:
        if valid is not None:
            raise ValueError("valid has no effect without prompts, which are None")
        if cfg.start_token is None or source is None:
            raise ValueError("prompts may be None only for an encoder–decoder with a start_token, given source=")
        prompts, valid = np.full((len(source), 1), cfg.start_token), None
    rows = _rows(prompts, valid)
    lengths = np.array([len(row) for row in rows], np.int32)
    ids = np.zeros((len(rows), int(lengths.max())), np.result_type(*rows))
    ids[np.arange(ids.shape[1]) < lengths[:, None]] = np.concatenate(rows)
    checks.tokens("prompts", ids, cfg)
    return np.pad(ids, ((0, 0), (0, bucket(ids.shape[1]) - ids.shape[1]))).astype(np.int32), lengths


def checked_arrays(prompts: Any, lengths: Any, cfg: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Prompts as int32 [B, T] with zeros after the ``lengths`` [B], and the lengths. Ids and lengths that are out of range are
    a ValueError; where they are traced, the third result says which rows are wrong, [B]."""
    traced = isinstance(prompts, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer)
    ids, counts = (_widened(name, x) for name, x in (("prompts", prompts), ("lengths", lengths)))
    if ids.ndim != 2 or not ids.size or counts.shape != ids.shape[:1]:
        raise ValueError(f"prompts must have the shape [batch, length] and lengths [batch], not {ids.shape} and {counts.shape}")
    width = ids.shape[1]
    ids, counts = ids.clip(-1, cfg.vocab_size).astype(np.int32), counts.clip(0, width + 1).astype(np.int32)
    here = np.arange(width) < counts[:, None]
    wrong = (counts < 1) | (counts > width) | (here & ((ids < 0) | (ids == cfg.vocab_size))).any(1)
    if not traced and wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"row {row} of prompts is wrong: its length {lengths[row]} must be from 1 to {width}, its ids must be inside the "
            f"vocabulary of {cfg.vocab_size}"
        )
    return jnp.where(here, ids, 0), jnp.asarray(counts), jnp.asarray(wrong) if traced else None


def _widened(name: str, values: Any) -> Any:
    """Integers of 32 bits or more, which no bound is too large for."""
    values = values if isinstance(values, jax.core.Tracer) else np.asarray(values)  # constants are checked, in jit too
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, not {values.dtype}")
    return values.astype(
        np.int64 if isinstance(values, np.ndarray) else jnp.int32 if values.dtype.itemsize < 8 else values.dtype
    )


def _rows(prompts: Any, valid: Any) -> list[np.ndarray]:
    """One array of ids per row, without padding."""
    if isinstance(prompts, str) or (isinstance(prompts, list | tuple) and any(isinstance(prompt, str) for prompt in prompts)):
        raise ValueError("prompts must be token ids, not text; encode each: prompts=[tok.encode(text)]")
    if valid is None and isinstance(prompts, list | tuple):
        rows = [np.asarray(prompt) for prompt in prompts]
        for row, prompt in enumerate(rows):
            if prompt.ndim != 1:
                raise ValueError(f"prompts must be lists of token ids, one per row; prompt {row} is {prompts[row]!r}")
            if prompt.size == 0:
                raise ValueError(f"prompt {row} is empty; give at least one token, such as BOS")
        if not rows:
            raise ValueError("prompts is empty; give at least one row")
        return rows
    ids = np.asarray(prompts)
    if ids.ndim != 2 or not ids.size:
        raise ValueError(f"prompts must have the shape [batch, length], not {ids.shape}")
    if valid is None:
        return list(ids)
    valid = np.asarray(valid)
    if valid.shape != ids.shape or valid.dtype != bool:
        raise ValueError(f"valid must be boolean with the prompts' shape {ids.shape}, not {valid.dtype}{valid.shape}")
    if not valid.any(1).all():
        raise ValueError(f"prompt {int(valid.any(1).argmin())} has no valid token")
    return [row[here] for row, here in zip(ids, valid, strict=True)]


def read_source(source: Any, source_valid: Any, rows: int, cfg: ModelConfig) -> dict[str, jax.Array]:
    """``source`` and ``source_valid`` [B, S], padded on the right to a bucket; neither for a model without an encoder."""
    if not cfg.encoder_layers and source is None and source_valid is None:
        return {}
    ids, info = checks.source(source, source_valid, rows, cfg)
    valid = jnp.ones(ids.shape, bool) if info.valid is None else jnp.broadcast_to(info.valid, ids.shape)
    length = ids.shape[1]
    size = bucket(length)
    if "learned" in cfg.positions:
        size = min(size, cfg.max_length)
    pad = ((0, 0), (0, size - length))
    return {"source": jnp.pad(ids, pad), "source_valid": jnp.pad(valid, pad)}
