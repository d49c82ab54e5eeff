"""Rotary positions in a config.json, in both spellings: ``rope_parameters`` of transformers 5, and before it ``rope_scaling``
with the base and the rotated fraction of a head beside it."""

import functools
import math
from typing import Any

from jaxformer.config import ModelConfig, RopeScaling
from jaxformer.config.components import nearest
from jaxformer.hf.config_reader import ConfigReader, number
from jaxformer.hf.family import Rule

ROPE = ("rope_theta", "rope_fraction", "rope_scaling")
"""The fields of ``ModelConfig`` that a family's row ``ROPE: rope(...)`` fills."""
PARAMETERS = {
    "default": {},
    "linear": {},
    "dynamic": {},
    "llama3": {"low_freq_factor": "low_frequency", "high_freq_factor": "high_frequency"},
    "yarn": {name: name for name in ("beta_fast", "beta_slow", "attention_factor", "truncate")},
}
"""Rope type -> its parameters other than the factor: their name -> our field of ``RopeScaling``."""
Values = tuple[float, float, RopeScaling]


def rope(**settings: Any) -> Rule:
    """A family's row for its rotary positions. settings: keywords of ``read_rope``."""
    names = {name: settings[name] for name in ("base", "share") if name in settings}
    return Rule(functools.partial(read_rope, **settings), functools.partial(write_rope, **names))


def read_rope(
    reader: ConfigReader,
    *,
    base: str = "rope_theta",
    theta: float | None = None,
    share: str | None = None,
    fraction: float = 1.0,
    kind: str | None = None,
) -> Values:
    """``rope_theta``, ``rope_fraction`` and ``rope_scaling``, from either spelling, or from both if they agree.

    base: the family's name for the base in the older spelling. theta: the base where config.json has none. share: the
    family's name for the fraction of a head that is rotated, ``fraction`` where config.json has none; None: all of it is.
    kind: where each kind of layer has its own positions, the kind to read.
    """
    new, old = reader.object("rope_parameters"), reader.object("rope_scaling")
    beside = {"rope_theta": reader(base, None), "partial_rotary_factor": reader(share, None) if share else None}
    if kind == "sliding_attention":  # the older spelling is of the other layers
        old, beside = None, {}
    spellings, shared = [], {}
    if new is not None:
        if any(isinstance(value, dict) for value in new.values()) != (kind is not None):
            wanted = "by kind of attention" if kind else "of one kind"
            raise ValueError(f"config.json: rope_parameters={new} must be {wanted} in this family")
        new = new if kind is None else new.get(kind) or {}
        if new.get("rope_theta") is None:
            raise ValueError("config.json: rope_parameters has no rope_theta")
        shared = {name: new[name] for name in beside if name in new}
        spellings.append(new)
    if new is None or old is not None:
        spellings.append(shared | (old or {}))
    values = [_read_spelling(reader, spelling, beside, theta, fraction, bool(share)) for spelling in spellings]
    if values[0] != values[-1]:
        names = [dict(zip(ROPE, value, strict=True)) for value in values]
        raise ValueError(f"config.json: rope_parameters and rope_scaling differ: {names[0]} and {names[-1]}")
    return values[0]


def _read_spelling(
    reader: ConfigReader, rope: dict[str, Any], beside: dict[str, Any], theta: float | None, fraction: float, partial: bool
) -> Values:
    """``beside``: the fields outside the object ``rope``, which must agree with it."""
    rope = dict(rope)
    for name, value in beside.items():
        if rope.get(name) is None:
            rope[name] = value
        elif value not in (None, rope[name]):
            raise ValueError(f"config.json: {name} is {rope[name]!r} in one place and {value!r} in another")
    base, rotated = rope.pop("rope_theta", None), rope.pop("partial_rotary_factor", None)
    if not partial and rotated not in (None, 1, 1.0):
        raise ValueError(
            f"config.json: partial_rotary_factor={rotated!r} would not be honoured: this family rotates whole heads"
        )
    if base is None:
        base = _default_theta(reader) if theta is None else theta
    rotated = fraction if rotated is None else rotated
    return number("rope_theta", base), number("partial_rotary_factor", rotated), _read_scaling(reader, rope)


def _default_theta(reader: ConfigReader) -> float:
    # The field is younger than the first published models of some families, all of which have 10,000.
    version = str(reader.values.get("transformers_version", "0")).split(".")
    if [int(digits) if digits.isdigit() else 0 for digits in version[:2]] >= [4, 36]:
        raise ValueError(
            "config.json has neither rope_theta nor rope_parameters, so the base of the rotary positions is not known"
        )
    return 10_000.0


def _read_scaling(reader: ConfigReader, rope: dict[str, Any]) -> RopeScaling:
    types = [rope.pop(name) for name in ("rope_type", "type") if name in rope]
    if any(other != types[0] for other in types):
        raise ValueError(f"config.json: rotary positions have two types at once, {types[0]!r} and {types[1]!r}")
    kind = types[0] if types else "default"
    if not isinstance(kind, str) or kind not in PARAMETERS:
        raise ValueError(f"config.json: rope type {kind!r} is not supported{nearest(str(kind), PARAMETERS)}")
    positions = reader.integer("max_position_embeddings")
    original = rope.pop("original_max_position_embeddings", None)
    if kind == "default":
        if rope:
            raise ValueError(f"config.json: rope type 'default' with {rope}, which would not be honoured")
        return RopeScaling()
    if kind == "dynamic" and original not in (None, positions):
        raise ValueError(
            f"config.json: original_max_position_embeddings={original} would not be honoured by rope type 'dynamic'"
        )
    if original is None:
        original = reader.values.get("original_max_position_embeddings") or positions
    if "factor" not in rope:
        raise ValueError(f"config.json: rope type {kind!r} has no factor")
    fields: dict[str, Any] = {"kind": kind, "factor": number("factor", rope.pop("factor"))}
    if kind == "yarn":
        scale, scale_all = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
        if scale and scale_all and rope.get("attention_factor") is None:
            rope["attention_factor"] = mscale(fields["factor"], scale) / mscale(fields["factor"], scale_all)
    for theirs, ours in PARAMETERS[kind].items():
        if (value := rope.pop(theirs, None)) is not None:
            fields[ours] = value if isinstance(value, bool) else number(theirs, value)
        elif kind == "llama3":
            raise ValueError(f"config.json: rope type 'llama3' has no {theirs}")
    if unused := {name: value for name, value in rope.items() if value is not None}:
        raise ValueError(f"config.json: rope type {kind!r} with {unused}, which would not be honoured")
    return RopeScaling(original_length=None if kind == "linear" else int(original), **fields)


def mscale(factor: float, weight: float) -> float:
    """By how much YaRN sharpens scores for sequences ``factor`` times longer (Peng et al. 2023, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_rope(cfg: ModelConfig, *, base: str = "rope_theta", share: str | None = None) -> dict[str, Any]:
    """The older spelling, which every version of transformers reads."""
    rotated = {share: cfg.rope_fraction} if share else {}
    return {base: cfg.rope_theta, "rope_scaling": _write_scaling(cfg.rope_scaling)} | rotated


def _write_scaling(scaling: RopeScaling) -> dict[str, Any] | None:
    if scaling.kind == "none":
        return None
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = scaling.original_length
    parameters = {theirs: getattr(scaling, ours) for theirs, ours in PARAMETERS[scaling.kind].items()}
    return values | {name: value for name, value in parameters.items() if value is not None}
