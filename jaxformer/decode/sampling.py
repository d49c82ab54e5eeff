"""How tokens are to be chosen: every method is a field of ``Sampling``, per row; ``choose`` applies them inside jit."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config.components import nearest
from jaxformer.config.strict import Strict, within


@dataclass(frozen=True)
class Sampling(Strict):
    """How tokens are chosen. Only ``transform`` and which fields are in use decide what is compiled, not their values."""

    UNCHECKED = ("transform",)

    temperature: float = 1.0
    """Sampling temperature, which divides the logits. 0 always takes the most probable token (greedy)."""
    top_k: int = 0
    """Keep the k most probable tokens, lowest id first among equals; 0 keeps all (Fan et al. 2018)."""
    top_p: float = 1.0
    """Nucleus sampling: keep the most probable tokens until their total probability reaches p (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Keep the tokens whose probability is at least min_p times that of the most probable one (Nguyen et al. 2024)."""
    typical_p: float = 1.0
    """Keep the tokens whose information is nearest to the entropy, up to total probability p (Meister et al. 2022)."""
    repetition_penalty: float = 1.0
    """Divides the positive, and multiplies the negative, logits of tokens seen so far, prompt included (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that has been generated."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that it has been generated."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and a number that is added to its logit."""
    banned: tuple[int, ...] = ()
    """Token ids that are never chosen."""
    min_new_tokens: int = 0
    """Minimum number of tokens before an end token may be chosen."""
    transform: Callable[[jax.Array], jax.Array] | None = None
    """The user's function, logits [B, V] -> logits [B, V], pure. It is given neither the step nor the tokens so far."""

    def __post_init__(self):
        if isinstance(self.logit_bias, dict):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        super().__post_init__()
        within(self, 0, math.inf, "temperature", "top_k", "min_new_tokens")
        within(self, 0, math.inf, "repetition_penalty", open_low=True)
        for name in ("top_p", "min_p", "typical_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1")
        if self.transform is not None and not callable(self.transform):
            raise ValueError(f"transform={self.transform!r} must be a function of logits [B, V]")


GREEDY = Sampling(temperature=0.0)


def only_below(sampling: Any, size: int, vocab: int) -> Any:
    """``sampling`` that never chooses an id from ``size`` on: a model may have more rows, ``vocab``, than its tokenizer ids."""
    if size >= vocab:
        return sampling
    if isinstance(sampling, Mapping):
        bias = jnp.where(jnp.arange(vocab) < size, 0.0, -jnp.inf)
        return {**sampling, "logit_bias": sampling.get("logit_bias", 0.0) + bias}

    def banning(row: Any) -> Any:
        is_sampling = isinstance(row, Sampling)
        return dataclasses.replace(row, banned=(*row.banned, *range(size, vocab))) if is_sampling else row

    return banning(sampling) if isinstance(sampling, Sampling) else [banning(row) for row in sampling]


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NARROWING = ("top_k", "top_p", "min_p", "typical_p")
NUMBERS = ("temperature", *NARROWING, *PENALTIES, "min_new_tokens")
INTEGERS = ("top_k", "min_new_tokens")
_FROM_0 = dict.fromkeys(("temperature", "repetition_penalty", *INTEGERS), (0.0, math.inf))
LIMITS = _FROM_0 | dict.fromkeys(("top_p", "min_p", "typical_p"), (0.0, 1.0))
"""Least and greatest value of the methods that have any; a repetition penalty is above its least."""


class Methods(NamedTuple):
    """Which methods of ``Sampling`` are in use: what decides what is compiled."""

    names: frozenset[str]
    transforms: tuple[Callable, ...]

    @property
    def greedy(self) -> bool:
        return "temperature" not in self.names

    @property
    def remembers(self) -> bool:
        """Whether what was generated matters."""
        return bool(self.names.intersection(PENALTIES))


def compile_sampling(
    sampling: Sampling | Sequence[Sampling] | Mapping[str, Any], rows: int, vocab: int, eos: tuple[int, ...] = ()
) -> tuple[Methods, dict[str, Any]]:
    """The methods in use, and their values: [1 or B, 1] each, ``bias`` [1 or B, V], ``transform`` [1 or B, 1] (which, or −1).
    Of a mapping, see ``generate_arrays``, the methods whose values are traced are in use.

    Raises ValueError for ids outside the vocabulary, for bans that leave nothing, and where there is one ``Sampling`` per row
    but not for every row.
    """
    if isinstance(sampling, Mapping):
        values, transforms = _from_mapping(sampling, rows, vocab)
    else:
        values, transforms = _from_records(sampling, rows, vocab, eos)
    used = {name for name in NUMBERS if _traced(values[name]) or (np.asarray(values[name]) != getattr(GREEDY, name)).any()}
    # A greedy row takes the largest logit, which no narrowing removes and no temperature moves.
    if "temperature" not in used:
        used -= {*NARROWING}
    return Methods(frozenset(used | ({"bias"} & values.keys())), transforms), values


def _from_records(sampling: Any, rows: int, vocab: int, eos: tuple[int, ...]) -> tuple[dict[str, Any], tuple[Callable, ...]]:
    each = [sampling] if isinstance(sampling, Sampling) else sampling
    is_list = isinstance(each, list | tuple) and all(isinstance(row, Sampling) for row in each)
    if not is_list or len(each) != (1 if isinstance(sampling, Sampling) else rows):
        raise ValueError(f"sampling must be a Sampling, or a list of {rows}, one per row; it is {sampling!r:.200}")
    transforms = tuple(dict.fromkeys(row.transform for row in each if row.transform is not None))
    values = {name: np.array([[getattr(row, name)] for row in each], np.float32) for name in NUMBERS}
    values["transform"] = np.array([[transforms.index(row.transform) if row.transform else -1] for row in each], np.int32)
    if any(row.logit_bias or row.banned for row in each):
        values["bias"] = np.stack([_bias(row, vocab, eos) for row in each])
    return values, transforms


def _from_mapping(sampling: Mapping, rows: int, vocab: int) -> tuple[dict[str, Any], tuple[Callable, ...]]:
    known = (*NUMBERS, "logit_bias", "transform")
    for name in sampling:
        if name not in known:
            raise ValueError(f"sampling has an unknown entry {name!r}{nearest(name, known)}")
    default, values = Sampling(), {}
    for name in NUMBERS:
        number = sampling.get(name, getattr(default, name))
        number = number if _traced(number) else np.asarray(number)  # constants are checked, in jit too
        kind = jnp.integer if name in INTEGERS else jnp.number
        if number.shape not in ((), (1,), (rows,)) or not jnp.issubdtype(number.dtype, kind):
            what = "integers" if name in INTEGERS else "numbers"
            raise ValueError(
                f"sampling's {name} must be {what} of shape [] or [{rows}], not {number.dtype}{list(number.shape)}"
            )
        values[name] = number.reshape(-1, 1).astype(np.float32)
        if not _traced(number) and _outside(name, values[name]).any():
            raise ValueError(f"sampling's {name}={number} is out of range")
    transform = sampling.get("transform")
    values["transform"] = np.array([[-1 if transform is None else 0]], np.int32)
    if "logit_bias" in sampling:
        bias = jnp.asarray(sampling["logit_bias"], jnp.float32)
        if bias.shape not in ((vocab,), (1, vocab), (rows, vocab)):
            raise ValueError(
                f"sampling's logit_bias must have the shape [{vocab}] or [{rows}, {vocab}], not {list(bias.shape)}"
            )
        values["bias"] = bias.reshape(-1, vocab)
    return values, () if transform is None else (transform,)


def _traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _outside(name: str, value: Any) -> Any:
    """Which values a ``Sampling`` would refuse, infinite and NaN too."""
    low, high = LIMITS.get(name, (-math.inf, math.inf))
    least = low < value if name == "repetition_penalty" else low <= value
    return ~(least & (value <= high) & (abs(value) < math.inf))


def out_of_range(values: dict[str, Any]) -> jax.Array | None:
    """Which rows, [1 or B], have a traced value that a ``Sampling`` would refuse; None where no value is traced."""
    outside = [_outside(name, values[name]) for name in NUMBERS if _traced(values[name])]
    return functools.reduce(jnp.logical_or, outside)[:, 0] if outside else None


def _bias(sampling: Sampling, vocab: int, eos: tuple[int, ...]) -> np.ndarray:
    bias = np.zeros(vocab, np.float32)
    for name, ids in (("logit_bias", [i for i, _ in sampling.logit_bias]), ("banned", sampling.banned)):
        for i in ids:
            if not 0 <= i < vocab:
                raise ValueError(f"{name} id {i} is outside the vocabulary of {vocab}")
    for i, number in sampling.logit_bias:
        bias[i] += number
    bias[list(sampling.banned)] = -np.inf
    if not np.isfinite(bias).any():
        raise ValueError("every token is banned, so none can be chosen")
    if sampling.min_new_tokens and not np.isfinite(np.delete(bias, list(eos))).any():
        raise ValueError(
            f"every token except those of eos={eos} is banned, and min_new_tokens={sampling.min_new_tokens} bans those too"
        )
    return bias
