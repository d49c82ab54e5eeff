"""What generation starts from, checked before any work: prompts, ends, room, and shapes from a small set of sizes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.config.strict import dtype_name
from jaxformer.nn import inputs, model, rope

LEAST_BUCKET = 16


class Start(NamedTuple):
    """What a generation starts from, all of it checked."""

    ids: np.ndarray
    """int32 [B, T], padded on the right to a bucket."""
    lengths: np.ndarray
    """int32 [B]"""
    slots: int
    """Length of the cache."""
    max_new_tokens: int
    eos: tuple[int, ...]
    pad: int
    chunk: int
    """Prompt tokens read at a time."""
    cache_dtype: str | None
    ahead: int
    """Tokens that may be taken back."""
    source: dict[str, jax.Array]
    """Keywords of the forward: ``source`` and ``source_valid``, or nothing."""


def begin(
    params: dict,
    prompts: Any,
    cfg: ModelConfig,
    *,
    max_new_tokens: int,
    valid: Any,
    source: Any,
    source_valid: Any,
    eos: int | Sequence[int],
    pad: int,
    prefill_chunk: int,
    cache_dtype: Any,
    ahead: int = 0,
) -> Start:
    """The start of a generation, with the arguments of ``generate``. Raises ValueError for anything wrong in them."""
    model.check(params, cfg)
    positive("prefill_chunk", prefill_chunk)
    ids, lengths = padded(prompts, valid, cfg, source)
    return Start(
        ids=ids,
        lengths=lengths,
        slots=room(cfg, int(lengths.max()), max_new_tokens, ahead),
        max_new_tokens=max_new_tokens,
        eos=ends(eos, pad, cfg),
        pad=int(pad),
        chunk=prefill_chunk,
        ahead=ahead,
        cache_dtype=None if cache_dtype is None else dtype_name("cache_dtype", cache_dtype),
        source=read_source(source, source_valid, len(ids), cfg),
    )


def bucket(length: int) -> int:
    """The least size of at least ``length`` among 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, …: four an octave, so that what
    is compiled for sizes is seldom compiled, and at most a fifth of it is padding (a quarter of the length)."""
    octave = 1 << (max(length, LEAST_BUCKET + 1) - 1).bit_length() - 1  # the power of two below
    step = octave // 4
    return max(LEAST_BUCKET, -(-length // step) * step)


def padded(prompts: Any, valid: Any, cfg: ModelConfig, source: Any) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as int32 [B, T], padded on the right to a bucket, and their lengths [B].

    prompts: a list of token lists, [B, T] with ``valid``, or None for an encoder–decoder that has a start token.
    """
    if any(isinstance(x, jax.core.Tracer) for x in (prompts, valid, source)):
        raise ValueError("generation looks at its prompts, and compiles itself: call it outside jit (inside, use forward)")
    if prompts is None:
        if valid is not None:
            raise ValueError("valid goes with prompts, which are None")
        if cfg.start_token is None or source is None:
            raise ValueError("prompts may be None only for an encoder–decoder with a start_token, given source=")
        prompts, valid = np.full((len(source), 1), cfg.start_token), None
    rows = _rows(prompts, valid)
    lengths = np.array([len(row) for row in rows], np.int32)
    ids = np.zeros((len(rows), int(lengths.max())), np.result_type(*rows))
    filled = np.arange(ids.shape[1]) < lengths[:, None]
    ids[filled] = np.concatenate(rows)
    inputs.tokens("prompts", ids, cfg)
    return np.pad(ids, ((0, 0), (0, bucket(ids.shape[1]) - ids.shape[1]))).astype(np.int32), lengths


def _rows(prompts: Any, valid: Any) -> list[np.ndarray]:
    """One array of ids a row, without padding."""
    if valid is None and isinstance(prompts, list | tuple):
        rows = [np.asarray(prompt) for prompt in prompts]
        for row, prompt in enumerate(rows):
            if prompt.ndim != 1:
                raise ValueError(f"prompts must be lists of token ids, one a row; prompt {row} is {prompts[row]!r}")
            if prompt.size == 0:
                raise ValueError(f"prompt {row} is empty: give at least one token (a BOS, say)")
        if not rows:
            raise ValueError("prompts is empty: give at least one row")
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


def room(cfg: ModelConfig, longest: int, max_new_tokens: int, ahead: int = 0) -> int:
    """Slots that a cache needs for prompts of up to ``longest`` tokens, and ``ahead`` that may be taken back, rounded up to a
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
    """Raises ValueError for what is no integer of at least 1."""
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
        raise ValueError(f"{name}={number!r} must be an integer of at least 1")


def ends(eos: int | Sequence[int], pad: int, cfg: ModelConfig) -> tuple[int, ...]:
    """The ids that end a row, checked together with ``pad``."""
    ids = np.atleast_1d(np.asarray(eos)) if not isinstance(eos, tuple | list) or eos else np.zeros(0, int)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"eos={eos!r} must be one id or several")
    if isinstance(pad, bool) or not isinstance(pad, int | np.integer):
        raise ValueError(f"pad={pad!r} must be an id")
    found = tuple(int(i) for i in ids)
    for name, token in (*(("eos", i) for i in found), ("pad", pad)):
        if not 0 <= token < cfg.vocab_size:
            raise ValueError(f"{name} id {token} is outside the vocabulary of {cfg.vocab_size}")
    return found


def random_key(key: Any) -> jax.Array:
    """``key``, if it is one."""
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
    raw = isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32 and key.shape == (2,)
    if not typed and not raw:
        raise ValueError(f"key={key!r:.80} must be one random key, as jax.random.key(seed) gives it")
    return key


def read_source(source: Any, source_valid: Any, rows: int, cfg: ModelConfig) -> dict[str, jax.Array]:
    """``source`` and ``source_valid`` [B, S], padded on the right to a bucket; neither for a model without an encoder."""
    if not cfg.encoder_layers and source is None and source_valid is None:
        return {}
    ids, info = inputs.source(source, source_valid, rows, cfg)
    valid = jnp.ones(ids.shape, bool) if info.valid is None else jnp.broadcast_to(info.valid, ids.shape)
    length = ids.shape[1]
    wanted = bucket(length)
    if "learned" in cfg.positions:
        wanted = min(wanted, cfg.max_length)
    pad = ((0, 0), (0, wanted - length))
    return {"source": jnp.pad(ids, pad), "source_valid": jnp.pad(valid, pad)}
