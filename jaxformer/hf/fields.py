"""config.json of a published model, read so that nothing in it is passed over: a field is used, is known to have no effect on
the results, or is refused by name. Both spellings of rotary positions are read, those before transformers 5 and after."""

import json
import logging
import math
from pathlib import Path
from typing import Any

from jaxformer.config import RopeScaling
from jaxformer.config.components import nearest

log = logging.getLogger(__name__)
WITHOUT_EFFECT = frozenset(
    [
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "_num_labels",
        "architectures",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classif_dropout",
        "classifier_dropout",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "init_std",
        "initializer_factor",
        "initializer_range",
        "label2id",
        "length_penalty",
        "max_length",
        "max_sequence_length",
        "min_length",
        "model_max_length",
        "model_type",
        "n_special",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_scores",
        "pad_token_id",
        "prefix",
        "predict_special_tokens",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "save_step",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    ]
)
MISSING: Any = object()


class Fields:
    """The fields of a config.json that are still to be asked for."""

    def __init__(self, values: dict[str, Any]):
        self.values = values
        self._asked: set[str] = set(WITHOUT_EFFECT)

    def __call__(self, name: str, default: Any = MISSING) -> Any:
        """A field's value. Raises ValueError where it is missing and has no default."""
        self._asked.add(name)
        value = self.values.get(name, default)
        if value is MISSING:
            raise ValueError(f"config.json has no {name!r}{nearest(name, self.values) if self.values else ''}")
        return value

    def choice(self, name: str, choices: dict[Any, Any], default: Any = MISSING) -> Any:
        """What a field's value stands for. Raises ValueError for one that stands for nothing here."""
        value = self(name, default)
        if isinstance(value, list | dict) or value not in choices:
            raise ValueError(f"config.json: {name}={value!r} is not supported; supported: {', '.join(map(repr, choices))}")
        return choices[value]

    def only(self, **allowed: Any) -> None:
        """Fields that may be missing, null, or have one value: any other would change the results."""
        for name, value in allowed.items():
            if self(name, None) not in (None, value):
                raise ValueError(f"config.json: {name}={self(name)!r} is not supported; supported: None, {value!r}")

    def number(self, name: str, default: Any = MISSING) -> float:
        """A number."""
        return _number(name, self(name, default))

    def training(self, *names: str) -> None:
        """Rates of randomness that only training has, of kinds that are not applied here: said, not refused."""
        for name in names:
            if value := self(name, None):
                log.warning("config.json: %s=%r is not applied when the model is trained further", name, value)

    def finish(self) -> None:
        """Raises ValueError for fields that nobody has asked for."""
        left = sorted(name for name in self.values.keys() - self._asked if self.values[name] is not None)
        if left:
            shown = ", ".join(f"{name}={self.values[name]!r}" for name in left)
            raise ValueError(f"config.json has fields that would not be honoured: {shown}")

    def rope(
        self,
        positions: int,
        *,
        share: str | None = None,
        fraction: float = 1.0,
        base: str = "rope_theta",
        kind: str | None = None,
    ) -> dict[str, Any]:
        """``rope_theta``, ``rope_fraction`` and ``rope_scaling`` of our config, of either spelling, or of both if they agree.

        share: the family's name for the part of a head that is rotated, by default ``fraction``; None: it rotates all. base:
        its older name for the base. kind: of the layers whose positions are to be read, where each kind has its own.
        """
        new, old = self._object("rope_parameters"), self._object("rope_scaling")
        top = {"rope_theta": self(base, None), "partial_rotary_factor": self(share, None) if share else None}
        found, also = [], {}
        if new is not None:
            if any(isinstance(value, dict) for value in new.values()) != (kind is not None):
                wanted = "by kind of attention" if kind else "of one kind"
                raise ValueError(f"config.json: rope_parameters={new} must be {wanted} in this family")
            given = dict(new if kind is None else new.get(kind) or {})
            if given.get("rope_theta") is None:
                raise ValueError("config.json: rope_parameters has no rope_theta")
            also = {name: given[name] for name in top if name in given}
            found.append(self._rope(given, top if kind != "sliding_attention" else {}, positions, share, fraction))
        if new is None or (old is not None and kind != "sliding_attention"):
            found.append(self._rope(also | (old or {}), top, positions, share, fraction))
        if found[0] != found[-1]:
            raise ValueError(f"config.json: rope_parameters and rope_scaling differ: {found[0]} and {found[-1]}")
        return found[0]

    def _rope(self, rope: dict[str, Any], top: dict[str, Any], positions: int, share: str | None, fraction: float) -> dict:
        """One spelling's; ``top`` are the fields beside it, which must say the same where both say something."""
        for name, value in top.items():
            if value is not None and rope.get(name) not in (None, value):
                raise ValueError(f"config.json: {name} is {rope[name]!r} in one place and {value!r} in another")
        theta, part = (
            top.get(name) if rope.get(name) is None else rope[name] for name in ("rope_theta", "partial_rotary_factor")
        )
        rope.pop("rope_theta", None)
        rope.pop("partial_rotary_factor", None)
        if share is None and part not in (None, 1, 1.0):
            raise ValueError(
                f"config.json: partial_rotary_factor={part!r} would not be honoured: this family rotates whole heads"
            )
        return {
            "rope_theta": _number("rope_theta", self._old_theta() if theta is None else theta),
            "rope_fraction": _number("partial_rotary_factor", fraction if part is None else part),
            "rope_scaling": _scaling(rope, positions, self.values),
        }

    def _object(self, name: str) -> dict[str, Any] | None:
        value = self(name, None)
        if not isinstance(value, dict | None):
            raise ValueError(f"config.json: {name}={value!r} must be an object")
        return value

    def _old_theta(self) -> float:
        # The field is younger than the first published models of some families, all of which have 10,000.
        version = str(self.values.get("transformers_version", "0")).split(".")
        if [int(part) if part.isdigit() else 0 for part in version[:2]] >= [4, 36]:
            raise ValueError(
                "config.json has neither rope_theta nor rope_parameters: the base of the rotary positions is not known"
            )
        return 10_000.0


def _scaling(rope: dict[str, Any], positions: int, values: dict[str, Any]) -> RopeScaling:
    kinds = [rope.pop(name) for name in ("rope_type", "type") if name in rope]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(f"config.json: rotary positions of two types at once, {kinds[0]!r} and {kinds[1]!r}")
    kind = kinds[0] if kinds else "default"
    known = {"default": (), "linear": (), "dynamic": (), "llama3": ("low_freq_factor", "high_freq_factor"), "yarn": YARN}
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"config.json: rope type {kind!r} is not supported{nearest(str(kind), known)}")
    original = rope.pop("original_max_position_embeddings", None)
    if kind == "default":
        if rope:
            raise ValueError(f"config.json: rope type 'default' with {rope}")
        return RopeScaling()
    if kind == "dynamic" and original not in (None, positions):
        raise ValueError(
            f"config.json: original_max_position_embeddings={original} would not be honoured by rope type 'dynamic'"
        )
    if original is None:
        original = values.get("original_max_position_embeddings") or positions
    fields: dict[str, Any] = {"kind": kind, "factor": _number("factor", rope.pop("factor")) if "factor" in rope else MISSING}
    if fields["factor"] is MISSING:
        raise ValueError(f"config.json: rope type {kind!r} has no factor")
    names = {"low_freq_factor": "low_frequency", "high_freq_factor": "high_frequency"}
    if kind == "yarn":
        own, all_dim = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
        if own and all_dim and rope.get("attention_factor") is None:
            rope["attention_factor"] = mscale(fields["factor"], own) / mscale(fields["factor"], all_dim)
    for name in known[kind]:
        if (value := rope.pop(name, None)) is not None:
            fields[names.get(name, name)] = value if isinstance(value, bool) else _number(name, value)
        elif kind == "llama3":
            raise ValueError(f"config.json: rope type 'llama3' has no {name}")
    if left := {name: value for name, value in rope.items() if value is not None}:
        raise ValueError(f"config.json: rope type {kind!r} with {left}, which would not be honoured")
    return RopeScaling(original_length=None if kind == "linear" else int(original), **fields)


YARN = ("beta_fast", "beta_slow", "attention_factor", "truncate")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: {name}={value!r} must be a number")
    return float(value)


def mscale(factor: float, number: float) -> float:
    """What yarn multiplies by, as a function of its factor."""
    return 0.1 * number * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_rope(scaling: RopeScaling) -> dict[str, Any] | None:
    """``rope_scaling`` as every version of transformers reads it."""
    if scaling.kind == "none":
        return None
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": scaling.low_frequency, "high_freq_factor": scaling.high_frequency}
    if scaling.kind == "yarn":
        values |= {name: getattr(scaling, name) for name in YARN if getattr(scaling, name) is not None}
    return values


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object without repeated keys, NaN or infinity. Raises ValueError that names the file."""

    def unique(pairs):
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"{name!r} occurs twice")
            found[name] = value
        return found

    def number(text):
        raise ValueError(f"{text} is no number of a config")

    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique, parse_constant=number)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no {path}") from error
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds {type(values).__name__}, not an object")
    return values
