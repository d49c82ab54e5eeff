"""What a family of published models is: a table of its config's fields, read and written by the same rows, and a table of its
tensors."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import unflatten_dict

from jaxformer.config import Execution, Experts, Latent, ModelConfig
from jaxformer.hf.config_reader import MISSING, ConfigReader
from jaxformer.hf.layout import Table


@dataclass(frozen=True)
class Field:
    """A field of config.json whose value is that of one field of ``ModelConfig``.

    name: in config.json. aliases: other names that are read; all that are there must agree.
    default: what transformers takes where config.json leaves the field out; a field without a default is required.
    choices: their values -> ours, where the two differ. Any other value is refused.
    """

    name: str
    default: Any = MISSING
    choices: dict[Any, Any] | None = None
    aliases: tuple[str, ...] = ()

    def read(self, reader: ConfigReader) -> Any:
        """Our value. Raises ValueError for a value that is missing, not among the choices, or contradicted by an alias."""
        if self.aliases:
            return reader.agreed((self.name, *self.aliases), self.default)
        if self.choices is None:
            return reader(self.name, self.default)
        return reader.choice(self.name, self.choices, self.default)

    def write(self, ours: str, value: Any) -> dict[str, Any]:
        """The field of config.json, of our value. Raises ValueError for a value of our field that the family does not have."""
        if self.choices is None:
            return {self.name: value}
        for theirs, choice in self.choices.items():
            if choice == value:
                return {self.name: theirs}
        raise ValueError(
            f"it does not support {ours}={value!r}, only: {', '.join(sorted(filter(None, set(self.choices.values()))))}"
        )


class Rule(NamedTuple):
    """A field of ``ModelConfig``, or several, that more than a value of config.json decides: how it is read, and written."""

    read: Callable[[ConfigReader], Any]
    write: Callable[[ModelConfig], dict[str, Any]] = lambda cfg: {}


Fields = dict[Any, Any]
"""A table of a config's fields, see ``Family.fields``."""


@dataclass(frozen=True)
class Family:
    """One published architecture, by its tables.

    Example: a family like LLaMA, but with another name for the epsilon and norms of queries and keys.

        llama = jf.hf.FAMILIES["llama"]
        jf.hf.FAMILIES["acme"] = dataclasses.replace(
            llama,
            architecture="AcmeForCausalLM",
            fields=llama.fields | {"norm_eps": jf.hf.Field("norm_epsilon", 1e-6), "qk_norm": "head"},
        )
        cfg, params = jf.hf.load("a/folder/whose/model_type/is/acme")
    """

    architecture: str
    """The class of transformers that is written into an exported config."""
    fields: Fields
    """A field of ``ModelConfig`` (``experts.d_ff`` for one of a record in it), or several as a tuple -> the ``Field`` or the
    ``Rule`` that reads and writes it, or the one value that all models of the family have. Of rows that write the same name the
    first does."""
    tensors: Callable[[ModelConfig], Table]
    """``our path -> Source``; paths that the model lacks may be there too."""
    only: dict[str, Any] = field(default_factory=dict)
    """Fields of config.json that must have this value (a ``Field``: that field's), be null or missing."""
    ignored: tuple[str, ...] = ()
    """Patterns (re) of fields of config.json without effect, in addition to those of all families."""
    not_applied: tuple[str, ...] = ()
    """Rates of randomness in training that are not applied: they are warned of, not refused."""
    written: dict[str, Any] = field(default_factory=dict)
    """Fields of config.json that are always written so."""
    prefix: str = ""
    """A file's names may begin with it or not."""
    copies: dict[str, str] = field(default_factory=dict)
    """Tensors that a file may repeat -> our path of the one each must be equal to. ``{n_layers}`` stands for the number."""
    buffers: tuple[str, ...] = ()
    """Patterns (re) of names that hold nothing trained and are computed here."""
    constant: Callable[[ModelConfig], np.ndarray] | None = None
    """What such a tensor, of shape [max_length, d_model], must hold, where transformers would use the file's."""
    older: tuple[tuple[str, str], ...] = ()
    """Ends of names, and what they are in older files."""

    def read(self, reader: ConfigReader) -> ModelConfig:
        """The config of a config.json. Raises ValueError for a field that would not be honoured."""
        for name, value in self.only.items():
            reader.only(name, value.read(reader) if isinstance(value, Field) else value)
        reader.warn(self.not_applied)
        ours: dict[str, Any] = {}
        for names, row in self.fields.items():
            value = row.read(reader) if isinstance(row, Field | Rule) else row
            ours |= {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))
        reader.finish(self.ignored)
        records = {"experts": Experts, "latent": Latent, "execution": Execution}
        nested = unflatten_dict(ours, sep=".").items()
        return ModelConfig(**{name: records[name](**value) if name in records else value for name, value in nested})

    def write(self, cfg: ModelConfig) -> dict[str, Any]:
        """The fields of config.json. What ``read`` does not give back, the family cannot express."""
        values: dict[str, Any] = {}
        for names, row in self.fields.items():
            if isinstance(row, Field | Rule):
                written = row.write(names, attrgetter(names)(cfg)) if isinstance(row, Field) else row.write(cfg)
                values |= {name: value for name, value in written.items() if name not in values}
        return values | self.written

    @property
    def bare(self) -> str:
        """The class without a head."""
        stem = re.sub(r"(For[A-Z]\w+|LMHeadModel|MTModel)$", "", self.architecture)
        return ("Gemma3Text" if stem == "Gemma3" else stem) + "Model"
