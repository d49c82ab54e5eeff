"""config.json of a published model, read so that nothing in it is passed over: a field is used, is known to have no effect on
the results, or is refused by name."""

import logging
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jaxformer.config.components import nearest

log = logging.getLogger(__name__)
WITHOUT_EFFECT = (
    # where a model comes from, and which class and dtype it was saved from
    "_commit_hash _name_or_path architectures auto_map dtype finetuning_task model_type tokenizer_class torch_dtype "
    "transformers_version unsloth_version "
    # how it is run, and what else is returned
    "_attn_implementation attn_implementation chunk_size_feed_forward gradient_checkpointing output_attentions "
    "output_hidden_states output_past output_scores return_dict return_dict_in_generate tf_legacy_loss torchscript "
    "use_bfloat16 use_cache "
    # initial weights, training and heads that are not loaded
    "_num_labels classif_dropout classifier_dropout id2label init_std initializer_factor initializer_range label2id n_special "
    "predict_special_tokens problem_type save_step task_specific_params "
    # lengths of the tokenizer, and ids that only generation uses
    "bos_token_id eos_token_id forced_bos_token_id forced_eos_token_id max_sequence_length model_max_length pad_token_id "
    "prefix sep_token_id "
    # generation
    "bad_words_ids begin_suppress_tokens cache_implementation diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty length_penalty max_length min_length no_repeat_ngram_size "
    "num_beam_groups num_beams num_return_sequences remove_invalid_values repetition_penalty suppress_tokens temperature "
    "top_k top_p typical_p"
)
"""Fields that change none of the numbers of a model, of any family."""
MISSING: Any = object()


class ConfigReader:
    """The fields of a config.json, each marked as used when it is asked for. ``tensors``: names of the file's tensors."""

    def __init__(self, values: dict[str, Any], tensors: Collection[str] = ()):
        self.values, self.tensors = values, tensors
        self._used: set[str] = set()

    def __call__(self, name: str, default: Any = MISSING) -> Any:
        """A field's value. Raises ValueError where it is missing and has no default."""
        self._used.add(name)
        value = self.values.get(name, default)
        if value is MISSING:
            raise ValueError(f"config.json has no {name!r}{nearest(name, self.values) if self.values else ''}")
        return value

    def choice(self, name: str, choices: dict[Any, Any], default: Any = MISSING) -> Any:
        """What a field's value stands for. Raises ValueError for a value that is not among ``choices``."""
        value = self(name, default)
        if isinstance(value, list | dict) or value not in choices:
            raise ValueError(f"config.json: {name}={value!r} is not supported; supported: {', '.join(map(repr, choices))}")
        return choices[value]

    def agreed(self, names: Sequence[str], default: Any = MISSING) -> Any:
        """The value of a field that has several names. Raises ValueError where two differ, or without a value and default."""
        values = {name: value for name in names if (value := self(name, None)) is not None}
        if any(value != values[name] for value in values.values() for name in values):
            raise ValueError(f"config.json: {values} give different values for the same thing")
        if not values and default is MISSING:
            raise ValueError(f"config.json has none of {', '.join(names)}")
        return next(iter(values.values()), default)

    def only(self, name: str, value: Any) -> None:
        """Raises ValueError where a field has any value but this one or null: it would change the results."""
        if self(name, None) not in (None, value):
            raise ValueError(f"config.json: {name}={self(name)!r} is not supported; supported: None, {value!r}")

    def number(self, name: str, default: Any = MISSING) -> float:
        """A field's value, which must be a number."""
        return number(name, self(name, default))

    def integer(self, name: str, default: Any = MISSING) -> int:
        """A field's value, which must be an integer."""
        value = self(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"config.json: {name}={value!r} must be an integer")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """A field's value, which must be true, false or null, which is false."""
        value = self(name, default)
        if not isinstance(value, bool | None):
            raise ValueError(f"config.json: {name}={value!r} must be true or false")
        return bool(value)

    def object(self, name: str) -> dict[str, Any] | None:
        """A field's value, which must be an object, null or missing."""
        value = self(name, None)
        if not isinstance(value, dict | None):
            raise ValueError(f"config.json: {name}={value!r} must be an object")
        return value

    def warn(self, names: Iterable[str]) -> None:
        """Warns of rates of randomness in training that are not applied here; they do not change the loaded model."""
        for name in names:
            if value := self(name, None):
                log.warning("config.json: %s=%r is ignored if the model is trained further", name, value)

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Raises ValueError for fields that were not asked for. ignored: patterns (re) of a family's fields without effect."""
        pattern = re.compile("|".join(ignored) or r"[^\s\S]")
        unused = self.values.keys() - self._used - set(WITHOUT_EFFECT.split())
        unused = {name for name in unused if self.values[name] is not None and not pattern.fullmatch(name)}
        if unused:
            shown = ", ".join(f"{name}={self.values[name]!r}" for name in sorted(unused))
            raise ValueError(f"config.json has fields that would not be honoured: {shown}")


def number(name: str, value: Any) -> float:
    """``value`` as a float. Raises ValueError, naming the field, for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"config.json: {name}={value!r} must be a number")
    return float(value)
