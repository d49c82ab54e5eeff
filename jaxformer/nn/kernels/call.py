"""A call of attention, as far as kernels differ in whether they can serve it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionCall:
    """What a call of attention asks for."""

    queries: int
    keys: int
    key_width: int
    value_width: int
    dtype: str
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    bias: bool = False
    """Whether something is added to the scores."""
    dropout: bool = False
    padding: bool = False
    segments: bool = False
    ordered: bool = True
    """Whether queries and keys stand in the order of their indices, as all do but those of a cache."""
    shards: int = 1
    """Devices that the queries are spread over."""
    heads_apart: bool = False
    """Whether query heads are spread over devices, and the key heads that they share are not."""
    unplaced: bool = False
    """Whether there are several devices, and no mesh that says which part is whose."""

    def padded_window(self) -> str | None:
        """Kernels count tokens by index; windows count those that are no padding."""
        return "counts padding as places in a window" if self.window is not None and self.padding else None
