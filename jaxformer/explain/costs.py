"""What a model costs: its steps with their share of the FLOPs, its parameters, and what it keeps of a token while decoding."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxformer.config import Latent, ModelConfig
from jaxformer.config import spec as specs
from jaxformer.config.spec import Param
from jaxformer.explain.explanation import TRAINING, Explanation, Kept, Row
from jaxformer.explain.trace import Step, distinct, label, steps
from jaxformer.nn import attention, mask, model
from jaxformer.nn.cache_spec import can_decode, layer_spec
from jaxformer.parallel.mesh import check_batch
from jaxformer.parallel.sharding import ACTIVATIONS, AXES, PARAMETERS, MeshConfig, partition_spec

AnyMesh = MeshConfig | Mesh | AbstractMesh


def explain(cfg: ModelConfig, batch: int, length: int, mesh: AnyMesh | None = None) -> Explanation:
    """A table of the forward of ``batch`` rows of ``length`` tokens each (an encoder's source is as long), by tracing it on
    shapes: of a model of any size, in seconds, without its memory.

    mesh: shows each tensor's shape on one of its devices too, which need not exist; of a ``MeshConfig``, data=0 is one.

    FLOPs are those of the products, 2 a multiplication with its addition; what norms, softmax and activations do to elements
    is left out. A training step is three forwards. With experts only those that a token goes to are counted.

    Raises ValueError for a batch that does not divide over the mesh, positions outside a learned table, and a component whose
    products cannot be counted.
    """
    for name, number in (("batch", batch), ("length", length)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r} must be an integer of at least 1")
    abstract = None if mesh is None else _abstract(mesh)
    if abstract is not None:
        check_batch({"tokens": jax.ShapeDtypeStruct((batch, length), jnp.int32)}, abstract)
    found = steps(cfg, batch, length)
    total = sum(step.flops * step.times for step in found)
    ahead = sum(step.flops * step.times for step in found if step.name.startswith("mtp."))
    spec = model.spec(cfg)
    sizes = [_bytes(param, cfg, abstract) for _, param in specs.walk(spec)]
    sides = {"B": batch, "T": length} | {name: abstract.shape[name] for name in AXES if abstract and abstract.shape[name] > 1}
    return Explanation(
        title=" · ".join(f"{name} {number:,}" for name, number in sides.items()),
        rows=tuple(_row(step, total, abstract) for step in found),
        devices=None if abstract is None else abstract.size,
        parameters=specs.count(spec, cfg),
        active_parameters=specs.active(spec, cfg),
        parameter_bytes=sum(whole for whole, _ in sizes),
        parameter_bytes_device=sum(own for _, own in sizes),
        forward_flops=total - ahead,
        training_flops=TRAINING * total,
        cache=_cache(cfg),
        cache_source=_cache_source(cfg),
        cache_multi_head=_cache_multi_head(cfg),
    )


def _abstract(mesh: Any) -> AbstractMesh:
    if isinstance(mesh, MeshConfig):
        sizes = tuple(max(1, getattr(mesh, name)) for name in AXES)
        return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh must be a MeshConfig or a mesh of JAX, not {type(mesh).__name__}")
    if set(mesh.axis_names) != set(AXES):
        raise ValueError(f"mesh has the axes {', '.join(mesh.axis_names)}; it must have {', '.join(AXES)}")
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def _row(step: Step, total: int, mesh: AbstractMesh | None) -> Row:
    own = step.shape if mesh is None or not step.letters else _on_device(step.letters, step.shape, ACTIVATIONS, mesh)
    share = step.flops * step.times / total if total else 0.0
    size = math.prod(step.shape) * jnp.dtype(step.dtype).itemsize
    fields = (step.name, step.formula, step.letters, step.shape, own, step.dtype, size, step.flops, step.times)
    return Row(*fields, share=share)


def _on_device(letters: str, shape: tuple[int, ...], rules: dict, mesh: AbstractMesh) -> tuple[int, ...]:
    placed = partition_spec(letters, shape, rules, mesh)
    axes = [(entry,) if isinstance(entry, str) else entry or () for entry in placed]
    return tuple(size // math.prod(mesh.shape[name] for name in own) for size, own in zip(shape, axes, strict=True))


def _bytes(param: Param, cfg: ModelConfig, mesh: AbstractMesh | None) -> tuple[int, int]:
    """Of all of a parameter, and of what one device has of it."""
    shape, item = param.shape(cfg), jnp.dtype(param.dtype or cfg.param_dtype).itemsize
    own = shape if mesh is None else _on_device(param.dims, shape, PARAMETERS, mesh)
    return math.prod(shape) * item, math.prod(own) * item


# What a layer keeps


def _kept(name: str, layer: ModelConfig, layers: int) -> Kept:
    tensors = layer_spec(layer)
    numbers, size = 0, 0
    for param in tensors.values():
        one = dataclasses.replace(param, sizes=(*param.sizes, ("B", 1), ("S", 1)))
        count = math.prod(one.shape(layer))
        numbers, size = numbers + count, size + count * jnp.dtype(param.dtype or layer.execution.dtype).itemsize
    described = ", ".join(f"{name} {param.dims}" for name, param in tensors.items())
    return Kept(name, described, numbers, size, layers, layer.window if isinstance(layer.window, int) else None)


def _cache(cfg: ModelConfig) -> tuple[Kept, ...]:
    if not can_decode(cfg):
        return ()
    groups = distinct(cfg)[1]["decoder"]
    kinds = [_kept(label("decoder", numbers, len(groups)), cfg.layers[numbers[0]], len(numbers)) for numbers in groups]
    if len({dataclasses.replace(kind, name="", layers=0) for kind in kinds}) == 1:  # they differ in something else
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
    return Kept(
        "cross_attention", "key, value", numbers, sum(math.prod(x.shape) * x.dtype.itemsize for x in kept), cfg.n_layers
    )


def _cache_multi_head(cfg: ModelConfig) -> Kept | None:
    if cfg.attention != "latent" or not can_decode(cfg):
        return None
    plain = dataclasses.replace(cfg, attention="grouped", latent=Latent())
    return _kept("decoder.layer", plain.layers[0], cfg.n_layers)
