"""What a model's forward costs: a table of its steps with their shapes, bytes and FLOPs, its parameters and its cache."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxformer.config import Latent, ModelConfig
from jaxformer.config import spec as specs
from jaxformer.cost import table
from jaxformer.cost.device import AnyMesh, abstract_mesh, device_bytes, device_shape, spread
from jaxformer.cost.table import Report, Table
from jaxformer.cost.trace import Step, distinct, label, steps
from jaxformer.nn import attention, mask, model
from jaxformer.nn.cache_spec import can_decode, layer_spec
from jaxformer.parallel.placement import check_batch
from jaxformer.parallel.sharding import ACTIVATIONS, AXES

TRAINING = 3
"""Products of a training step per product of the forward: the gradient of each of its two operands is a product of the same
size."""


@dataclass(frozen=True)
class Kept:
    """What each layer of one kind caches while decoding: per token, or per row what does not grow with its tokens."""

    name: str
    tensors: str
    numbers: int
    bytes: int
    layers: int
    window: int | None = None
    """How many of the last tokens are kept; None: all tokens."""
    per: str = "token"

    def __str__(self) -> str:
        window = f", of the last {self.window:,} tokens" if self.window else ""
        layers = f"{self.layers} layers" if self.layers > 1 else "1 layer"
        return (
            f"{self.numbers:,} numbers ({self.tensors}), {scaled(self.bytes, 'B')} per {self.per} in each of {layers}{window}"
        )


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` returns. ``str`` gives plain tables, ``markdown()`` tables for documents."""

    title: str
    rows: tuple[Step, ...]
    devices: int | None
    """None without a mesh."""
    parameters: int
    active_parameters: int
    """The parameters that a token meets: of experts, those that it goes to."""
    parameter_bytes: int
    parameter_bytes_device: int
    """Bytes on one device of the mesh, by ``sharding.PARAMETERS``."""
    forward_flops: int
    """All products of ``jf.forward``, 2 per multiply-add. Elementwise operations are left out."""
    training_flops: int
    """Three times the FLOPs of the rows, which with ``mtp`` are more than the forward's. Recomputation is left out."""
    cache: tuple[Kept, ...]
    """The cache by kind of layer; empty for a model that does not decode with a cache."""
    cache_source: Kept | None
    """The cache per token of the source, in an encoder–decoder."""
    cache_multi_head: Kept | None
    """With latent attention: what the same model with multi-head attention would cache."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache per token, in all layers, as long as no window is full."""
        return sum(kept.bytes * kept.layers for kept in self.cache if kept.per == "token")

    def __str__(self) -> str:
        return table.text(self.report())

    def markdown(self) -> str:
        """The tables in Markdown."""
        return table.markdown(self.report())

    def _repr_markdown_(self) -> str:  # in notebooks
        return self.markdown()

    def values(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return dataclasses.asdict(self)

    def report(self) -> Report:
        """Two tables: the rows, and their totals."""
        device = [] if self.devices is None else ["per device"]
        columns = ("name", "layers", "formula", "letters", "shape", *device, "dtype", "bytes", "FLOPs", "share")
        faint = [not row.formula for row in self.rows]
        return [self.title, Table(columns, list(map(self._cells, self.rows)), faint), Table(("", ""), self._totals())]

    def _cells(self, row: Step) -> tuple[str, ...]:
        shapes = [row.shape] if self.devices is None else [row.shape, row.device_shape]
        flops = [scaled(row.flops), f"{row.share:.1%}"] if row.formula else ["", ""]
        times = f"×{row.times}" if row.times > 1 else ""
        return (row.name, times, row.formula, row.letters, *map(_listed, shapes), row.dtype, scaled(row.bytes, "B"), *flops)

    def _totals(self) -> list[tuple[str, ...]]:
        active = f"; a token meets {self.active_parameters:,}" if self.active_parameters != self.parameters else ""
        device = "" if self.devices is None else f"; {scaled(self.parameter_bytes_device, 'B')} per device of {self.devices}"
        ahead = ", with mtp" if self.training_flops != TRAINING * self.forward_flops else ""
        lines: list[tuple[str, ...]] = [
            ("parameters", f"{self.parameters:,}, {scaled(self.parameter_bytes, 'B')}{device}{active}"),
            ("forward", scaled(self.forward_flops, "FLOPs")),
            ("training step", f"{scaled(self.training_flops, 'FLOPs')}: {TRAINING} × forward{ahead}"),
        ]
        lines += [(f"cache, {kept.name}", str(kept)) for kept in self.cache]
        if self.cache_bytes:
            lines.append(("cache, all layers", f"{scaled(self.cache_bytes, 'B')} per token"))
        if self.cache_multi_head:
            lines.append(("with multi-head attention", str(self.cache_multi_head)))
        if self.cache_source:
            lines.append(("cache of the source", str(self.cache_source)))
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


def _listed(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def explain(cfg: ModelConfig, batch: int, length: int, mesh: AnyMesh | None = None) -> Explanation:
    """A table of the forward of ``batch`` rows of ``length`` tokens each (an encoder's source is as long), found by tracing it
    on shapes: for a model of any size, in seconds, without its memory.

    mesh: adds each tensor's shape on one of its devices, which need not exist; in a ``MeshConfig``, data=0 is 1.

    FLOPs are those of products, 2 per multiply-add; the elementwise work of norms, softmax and activations is left out. A
    training step is three forwards. Of experts only those that a token goes to are counted.

    Raises ValueError for a batch that does not divide over the mesh, positions outside a learned table, and a component whose
    products cannot be counted.
    """
    for name, number in (("batch", batch), ("length", length)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r} must be an integer of at least 1")
    devices = abstract_mesh(mesh)
    check_batch({"tokens": jax.ShapeDtypeStruct((batch, length), jnp.int32)}, devices)
    forward = steps(cfg, batch, length)
    total = sum(step.flops * step.times for step in forward)
    ahead = sum(step.flops * step.times for step in forward if step.name.startswith("mtp."))
    spec = model.spec(cfg)
    sides = {"B": batch, "T": length} | {name: devices.shape[name] for name in AXES if devices.shape[name] > 1}
    return Explanation(
        title=" · ".join(f"{name} {number:,}" for name, number in sides.items()),
        rows=tuple(_on_devices(step, total, devices) for step in forward),
        devices=None if mesh is None else devices.size,
        parameters=specs.count(spec, cfg),
        active_parameters=specs.active(spec, cfg),
        parameter_bytes=device_bytes(specs.abstract(spec, cfg)),
        parameter_bytes_device=device_bytes(spread(spec, cfg, devices)),
        forward_flops=total - ahead,
        training_flops=TRAINING * total,
        cache=_cache(cfg),
        cache_source=_cache_source(cfg),
        cache_multi_head=_cache_multi_head(cfg),
    )


def _on_devices(step: Step, total: int, devices: AbstractMesh) -> Step:
    local = device_shape(step.letters, step.shape, ACTIVATIONS, devices) if step.letters else step.shape
    return dataclasses.replace(step, share=step.flops * step.times / total if total else 0.0, device_shape=local)


def _kept(name: str, layer: ModelConfig, layers: int) -> list[Kept]:
    """What one layer caches of one token, and of one row."""
    cached = specs.with_sizes(layer_spec(layer), {"B": 1, "S": 1})
    kinds = []
    for per, grows in (("token", True), ("row", False)):
        if tensors := {name: param for name, param in cached.items() if ("S" in param.dims) == grows}:
            described = ", ".join(f"{name} {param.dims}" for name, param in tensors.items())
            size = device_bytes(spread(tensors, layer, abstract_mesh(None), ACTIVATIONS, layer.execution.dtype))
            window = layer.window if isinstance(layer.window, int) and grows else None
            kinds.append(Kept(name, described, specs.count(tensors, layer), size, layers, window, per))
    return kinds


def _cache(cfg: ModelConfig) -> tuple[Kept, ...]:
    if not can_decode(cfg):
        return ()
    groups = distinct(cfg)[1]["decoder"]
    kinds = [kept for at in groups for kept in _kept(label("decoder", at, len(groups)), cfg.layers[at[0]], len(at))]
    if len({dataclasses.replace(kind, name="", layers=0) for kind in kinds}) == 1:  # the layers differ in something else
        kinds = [dataclasses.replace(kinds[0], name="decoder.layer", layers=cfg.n_layers)]
    return tuple(kinds)


def _cache_source(cfg: ModelConfig) -> Kept | None:
    if not cfg.encoder_layers or not can_decode(cfg):
        return None
    params = specs.abstract(attention.spec(cfg), cfg)
    x_BSD = jax.ShapeDtypeStruct((1, 1, cfg.d_model), cfg.execution.dtype)
    run = lambda params, x_BSD: attention.source_key_value(params, x_BSD, mask.arange(1), cfg)[:2]
    kept = jax.eval_shape(run, params, x_BSD)
    numbers = sum(math.prod(x.shape) for x in kept)
    return Kept("cross_attention", "key, value", numbers, device_bytes(kept), cfg.n_layers)


def _cache_multi_head(cfg: ModelConfig) -> Kept | None:
    if cfg.attention != "latent" or not can_decode(cfg):
        return None
    plain = dataclasses.replace(cfg, attention="grouped", latent=Latent())
    return _kept("decoder.layer", plain.layers[0], cfg.n_layers)[0]
