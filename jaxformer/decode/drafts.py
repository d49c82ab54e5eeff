"""What may guess tokens for speculative decoding: the text so far, a smaller model, or the model's block of ``nn.mtp``."""

import dataclasses
import math
from dataclasses import dataclass

from jaxformer.config import ModelConfig
from jaxformer.config.strict import Strict, within


@dataclass(frozen=True)
class PromptLookup(Strict):
    """Guesses what followed the last occurrence of the text's last tokens: good where output repeats input."""

    ahead: int = 8
    """Tokens guessed at a time."""
    ngram: int = 3
    """Tokens that are compared at most; the longest match wins, then the latest."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 1, math.inf, "ahead", "ngram")


@dataclass(frozen=True)
class DraftModel(Strict):
    """Guesses with another model of the same vocabulary."""

    params: dict = dataclasses.field(compare=False)
    cfg: ModelConfig
    ahead: int = 4
    """Tokens guessed at a time."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 1, math.inf, "ahead")


@dataclass(frozen=True)
class MultiToken(Strict):
    """Guesses with the block of a model with ``mtp``; several tokens by reading the block's output in place of its input."""

    ahead: int = 1
    """Tokens guessed at a time."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 1, math.inf, "ahead")


Draft = PromptLookup | DraftModel | MultiToken
