"""The table that ``explain`` gives, and its text."""

from collections.abc import Sequence
from dataclasses import dataclass

TRAINING = 3
"""Products of a training step for each of the forward: a product's gradient is a product of the same size for each of its two
operands."""


@dataclass(frozen=True)
class Row:
    """A step of the forward: a product, or a named activation. Bytes and FLOPs are those of one layer."""

    name: str
    formula: str
    """The einsum; empty for a named activation, which is the result of operations on elements."""
    letters: str
    shape: tuple[int, ...]
    device_shape: tuple[int, ...]
    """Of one device, by the table ``sharding.ACTIVATIONS``. Named activations are put there; where XLA leaves the result of a
    product is its own choice."""
    dtype: str
    bytes: int
    flops: int
    times: int
    """Layers that do it."""
    share: float
    """Of all FLOPs, with those of all ``times`` layers."""


@dataclass(frozen=True)
class Kept:
    """What each layer of a kind keeps of a token while decoding."""

    name: str
    tensors: str
    numbers: int
    bytes: int
    layers: int
    window: int | None = None
    """Tokens that are kept at most; None: all."""

    def __str__(self) -> str:
        window = f", of the last {self.window:,} tokens" if self.window else ""
        layers = f"{self.layers} layers" if self.layers > 1 else "1 layer"
        return f"{self.numbers:,} numbers ({self.tensors}), {scaled(self.bytes, 'B')} a token in each of {layers}{window}"


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found. ``str`` gives a plain table, ``markdown()`` one for documents."""

    title: str
    rows: tuple[Row, ...]
    devices: int | None
    """None without a mesh."""
    parameters: int
    active_parameters: int
    """Those that a token meets: of experts, the ones that it goes to."""
    parameter_bytes: int
    parameter_bytes_device: int
    """On the device of a mesh, by ``sharding.PARAMETERS``."""
    forward_flops: int
    """Of all products in ``jf.forward``, 2 for a multiplication with its addition. Operations on elements are left out."""
    training_flops: int
    """Three times those of the rows, which with ``mtp`` are more than the forward's. Recomputation (``remat``) is left out."""
    cache: tuple[Kept, ...]
    """Of a token, by kind of layer; empty for a model that does not decode with a cache."""
    cache_source: Kept | None
    """Of a token of the source, in an encoder–decoder."""
    cache_multi_head: Kept | None
    """With latent attention: what the same model with multi-head attention would keep."""

    @property
    def cache_bytes(self) -> int:
        """Of a token, in all layers, as long as no window is full."""
        return sum(kept.bytes * kept.layers for kept in self.cache)

    def __str__(self) -> str:
        return "\n".join([self.title, "", *_aligned([self.columns(), *self.cells()]), "", *_aligned(self.totals())])

    def markdown(self) -> str:
        """Two tables in Markdown: the rows, and what they add up to."""
        return "\n\n".join([self.title, _markdown(self.columns(), self.cells()), _markdown(["", ""], self.totals())])

    def _repr_markdown_(self) -> str:  # in notebooks
        return self.markdown()

    def columns(self) -> list[str]:
        """Names of the columns."""
        device = [] if self.devices is None else ["a device"]
        return ["name", "layers", "formula", "letters", "shape", *device, "dtype", "bytes", "FLOPs", "share"]

    def cells(self) -> list[list[str]]:
        """The rows, as text."""

        def one(row: Row) -> list[str]:
            shape = [_shape(row.shape)] if self.devices is None else [_shape(row.shape), _shape(row.device_shape)]
            flops = [scaled(row.flops), f"{row.share:.1%}"] if row.formula else ["", ""]
            times = f"×{row.times}" if row.times > 1 else ""
            return [row.name, times, row.formula, row.letters, *shape, row.dtype, scaled(row.bytes, "B"), *flops]

        return [one(row) for row in self.rows]

    def totals(self) -> list[list[str]]:
        """What the rows add up to, and memory, as pairs of a name and a text."""
        active = f"; a token meets {self.active_parameters:,}" if self.active_parameters != self.parameters else ""
        device = "" if self.devices is None else f"; {scaled(self.parameter_bytes_device, 'B')} a device of {self.devices}"
        more = ", mtp with it" if self.training_flops != TRAINING * self.forward_flops else ""
        lines = [
            ["parameters", f"{self.parameters:,}, {scaled(self.parameter_bytes, 'B')}{device}{active}"],
            ["forward", scaled(self.forward_flops, "FLOPs")],
            ["training step", f"{scaled(self.training_flops, 'FLOPs')}: {TRAINING} × forward{more}"],
        ]
        lines += [[f"cache, {kept.name}", str(kept)] for kept in self.cache]
        if self.cache:
            lines.append(["cache, all layers", f"{scaled(self.cache_bytes, 'B')} a token"])
        if self.cache_multi_head:
            lines.append(["were it multi-head", str(self.cache_multi_head)])
        if self.cache_source:
            lines.append(["cache, of the source", str(self.cache_source)])
        return lines


def scaled(number: int, unit: str = "") -> str:
    """A number with four digits and a decimal prefix; below 10,000 the number itself."""
    if number < 10_000:
        return f"{number:,} {unit}".rstrip()
    size, prefix = float(number), ""
    for prefix in "kMGTPEZ":  # noqa: B007
        size /= 1000
        if size < 999.95:
            break
    return f"{size:#.4g} {prefix}{unit}"


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


RIGHT = ("bytes", "FLOPs", "share", "layers")
"""Columns of numbers."""


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numeric = [name in RIGHT for name in rows[0]]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    ]


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    rule = ["---:" if name in RIGHT else "---" for name in columns]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [columns, rule, *rows])
