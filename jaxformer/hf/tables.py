"""What the tables of families are made of."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.hf.fields import Fields
from jaxformer.hf.layout import Source

Table = dict[str, Source]
GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
PLAIN = {"relu": "relu", "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu"} | dict.fromkeys(
    GELU_TANH, "gelu_tanh"
)
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"} | dict.fromkeys(GELU_TANH, "geglu_tanh")
SHARED_TABLE = {f"{stack}.embed_tokens.weight": "embedding.token" for stack in ("encoder", "decoder")}
"""What files of encoder–decoders may repeat."""


@dataclass(frozen=True)
class Family:
    """One published architecture: its config and its tensors, and ours."""

    model_type: str
    architecture: str
    """The class of transformers that is written into an exported config."""
    read: Callable[[Fields, Collection[str]], dict[str, Any]]
    """Fields of config.json, and the names of the file's tensors, to fields of ``ModelConfig``."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Back: fields of config.json. What does not come back from ``read`` cannot be exported."""
    tensors: Callable[[ModelConfig], Table]
    """``our path -> Source``; paths that the model lacks may be there too."""
    prefix: str = ""
    """With which a file's names may begin or not."""
    same: dict[str, str] | Callable[[ModelConfig], dict[str, str]] = field(default_factory=dict)
    """Names of tensors that a file may repeat, and our path of the one they must be equal to."""
    buffers: tuple[str, ...] = ()
    """Patterns (re) of names that hold nothing trained, and are computed here."""
    constant: Callable[[ModelConfig, str], np.ndarray] | None = None
    """What such a tensor must hold, where transformers would read another."""
    older: tuple[tuple[str, str], ...] = ()
    """Ends of names, and what they are in older files."""

    @property
    def bare(self) -> str:
        """The class without a head."""
        stem = re.sub(r"(For[A-Z]\w+|LMHeadModel|MTModel)$", "", self.architecture)
        return ("Gemma3Text" if stem == "Gemma3" else stem) + "Model"


def linear(path: str, name: str, out: str, into: str) -> Table:
    """A map that is stored as (out, in), and its bias."""
    return {path: Source(f"{name}.weight", out + into), f"{path}_bias": Source(f"{name}.bias", out)}


def normed(path: str, name: str, dims: str = "D") -> Table:
    """A norm's gain and bias."""
    return {f"{path}.gain": Source(f"{name}.weight", dims), f"{path}.bias": Source(f"{name}.bias", dims)}


def attention(path: str, name: str, q: str = "q_proj", k: str = "k_proj", v: str = "v_proj", o: str = "o_proj") -> Table:
    """Four separate projections."""
    return {
        **linear(f"{path}.query", f"{name}.{q}", "(KGH)", "D"),
        **linear(f"{path}.key", f"{name}.{k}", "(KH)", "D"),
        **linear(f"{path}.value", f"{name}.{v}", "(KH)", "D"),
        **linear(f"{path}.out", f"{name}.{o}", "D", "(KGH)"),
    }


def layers(stack: str, name: str, table: Table) -> Table:
    """The table of one layer, for a whole stack."""
    return {f"{stack}.layers.{path}": source._replace(name=f"{name}.{{i}}.{source.name}") for path, source in table.items()}


def inverse(choices: dict[str, str], ours: str) -> str:
    """Their name for one of our choices. Raises ValueError where they have none."""
    names = [name for name, value in choices.items() if value == ours]
    if not names:
        raise ValueError(f"it has no {ours!r}, only: {', '.join(sorted(set(choices.values())))}")
    return names[0]


def sized(fields: Fields, **own: Any) -> dict[str, Any]:
    """The fields that nearly all decoders spell alike."""
    names = {
        "vocab_size": "vocab_size",
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "max_length": "max_position_embeddings",
    }
    return {ours: fields(theirs) for ours, theirs in names.items()} | own


def write_sized(cfg: ModelConfig) -> dict[str, Any]:
    """Back from ``sized``."""
    return {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "intermediate_size": cfg.d_ff,
        "max_position_embeddings": cfg.max_length,
    }
