"""How rotary positions are stretched: a record of the config."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxformer.record import Strict, within


@dataclass(frozen=True)
class RopeScaling(Strict):
    """How rotary frequencies change for sequences longer than a model was first trained on (``nn.position.frequencies``)."""

    kind: Literal["none", "linear", "dynamic", "llama3", "yarn"] = "none"
    """linear: positions divided (Chen et al. 2023); dynamic: the base grows with the length; llama3: low frequencies are
    divided; yarn: low frequencies are divided and scores sharpened (Peng et al. 2023); none: nothing changes."""
    factor: float = 1.0
    """How many times longer."""
    original_length: int | None = None
    """Positions of the first training; dynamic, llama3 and yarn need it."""
    low_frequency: float = 1.0
    """llama3: frequencies with fewer turns than this in the original length are divided by the factor."""
    high_frequency: float = 4.0
    """llama3: frequencies with more turns are kept."""
    beta_fast: float = 32.0
    """yarn: pairs with more turns in the original length are kept."""
    beta_slow: float = 1.0
    """yarn: pairs with fewer turns are divided by the factor."""
    truncate: bool = True
    """yarn: round the pairs between which it blends outwards to whole numbers."""
    attention_factor: float | None = None
    """yarn: multiplies queries and keys; 0.1·ln(factor) + 1 unless given."""

    def __post_init__(self):
        super().__post_init__()
        positive = (
            "factor",
            "original_length",
            "low_frequency",
            "high_frequency",
            "beta_fast",
            "beta_slow",
            "attention_factor",
        )
        within(self, 0, math.inf, *positive, open_low=True, prefix="rope_scaling.")
        if self.kind == "none" and self.factor != 1.0:
            raise ValueError(f"rope_scaling.factor={self.factor} has no effect with kind 'none'")
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow} must be below beta_fast={self.beta_fast}")
        if self.kind not in ("none", "linear") and self.original_length is None:
            raise ValueError(f"rope_scaling of kind {self.kind!r} needs original_length")
        if self.low_frequency >= self.high_frequency:
            raise ValueError(f"low_frequency={self.low_frequency} must be below high_frequency={self.high_frequency}")
