"""A layer of experts on a mesh: tokens sent to the owners of their experts, against what XLA makes of the same layer by itself.

    uv run python benchmarks/experts_mesh.py          # times on 8 simulated devices, in turn
    uv run --extra plan python benchmarks/experts_mesh.py --tpu     # bytes on 8 v5e chips, compiled and not run

Prints the ratio of times by round, and of the TPU's programs the bytes of intermediate results on a device.
"""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

import jaxformer as jf
from jaxformer.cost import topology
from jaxformer.nn.experts import dispatch, router
from jaxformer.parallel.sharding import ACTIVATIONS, MeshConfig, partition_spec, shardings


def layer(cfg: jf.ModelConfig, mesh: Mesh, rows: int, length: int) -> tuple[Callable, dict, jax.ShapeDtypeStruct]:
    """The gradient of a layer's sum of squares by its parameters, with abstract parameters and input that lie on the mesh."""

    def loss(params, x):
        return (router.apply(params, x, cfg, training=True)[0].astype(jnp.float32) ** 2).sum()

    spec = router.spec(cfg)
    abstract = jf.spec.abstract(spec, cfg)
    params = jax.tree.map(
        lambda p, at: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=at), abstract, shardings(spec, cfg, mesh)
    )
    shape = (rows, length, cfg.d_model)
    at = NamedSharding(mesh, partition_spec("BTD", shape, ACTIVATIONS, mesh))
    return jax.grad(loss), params, jax.ShapeDtypeStruct(shape, cfg.execution.dtype, sharding=at)


def by_partitioner(f: Callable) -> Callable:
    """``f`` as it is traced where nothing divides, and XLA is left to spread it."""

    def run(*given):
        own = dispatch.divides
        dispatch.divides = lambda *_: False
        try:
            return f(*given)
        finally:
            dispatch.divides = own

    return run


def times(rounds: int) -> None:
    """Interleaved, on 8 simulated devices."""
    experts = jf.Experts(n_experts=8, per_token=2, d_ff=512)
    cfg = jf.presets.llama(vocab_size=8, d_model=256, n_layers=1, n_heads=4, experts=experts)
    mesh = MeshConfig(expert=8).make()
    grad, params, x = layer(cfg, mesh, 8, 256)
    draw = lambda a: jax.device_put(0.1 * jax.random.normal(jax.random.key(a.size), a.shape, a.dtype), a.sharding)
    given = jax.tree.map(draw, (params, x))
    with jax.set_mesh(mesh):
        runs = {"dispatch": jax.jit(grad), "partitioner": jax.jit(by_partitioner(grad))}
        for run in runs.values():
            jax.block_until_ready(run(*given))
        ratios = []
        for _ in range(rounds):
            took = {}
            for name, run in runs.items():
                start = time.perf_counter()
                jax.block_until_ready(run(*given))
                took[name] = time.perf_counter() - start
            ratios.append(took["dispatch"] / took["partitioner"])
    print(f"dispatch / partitioner: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


def sizes() -> None:
    """Of Qwen3-30B-A3B's layer on 8 v5e chips, 4,096 tokens each."""
    cfg = jf.presets.qwen3_moe_30b_a3b(dtype="bfloat16", n_layers=1)
    mesh = MeshConfig(expert=8).make(topology.devices(topology.parse("v5e:2x4")))
    for name, how in (("dropless", "dropless"), ("capacity", "capacity"), ("partitioner", "dropless")):
        own = dataclasses.replace(cfg, expert_dispatch=how)
        grad, params, x = layer(own, mesh, 8, 4096)
        with jax.set_mesh(mesh):
            program = jax.jit(by_partitioner(grad) if name == "partitioner" else grad).lower(params, x).compile()
        print(f"{name}: {program.memory_analysis().temp_size_in_bytes / 1e9:.2f} GB of intermediate results a device")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tpu", action="store_true", help="compile for 8 v5e chips instead")
    given = parser.parse_args()
    sizes() if given.tpu else times(given.rounds)
