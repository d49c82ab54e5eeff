"""Rows that are sorted by group, each times its own group's matrix."""

import jax
import jax.numpy as jnp

from jaxformer.nn.named import multiply
from jaxformer.parallel.sharding import partitioned, platform


def ragged_dot(x_MD: jax.Array, weight_EDF: jax.Array, sizes: jax.Array, name: str = "") -> jax.Array:
    """[M, F]: the first ``sizes[0]`` rows times kernel 0, the next ``sizes[1]`` times kernel 1, and so on. Rows after those
    may hold anything, in the result and in the gradient of x.

    ``jax.lax.ragged_dot`` multiplies every row with every kernel on CPUs and (JAX 0.10) on TPUs. A TPU takes JAX's own Pallas
    kernel, in bfloat16, where it runs a program of its own (``sharding.partitioned``): XLA cannot spread that over several.
    CPUs lay the rows out in blocks of one group each, and multiply blocks with copies of their kernels, which are some 5 for
    each: too many for the memory of accelerators.
    """
    # A row has one of the E kernels for its own: as an equation, a kernel per row.
    return multiply("MD,MDF->MF", x_MD, weight_EDF, name=name, by=lambda x_MD, weight_EDF: _ragged_dot(x_MD, weight_EDF, sizes))


def _ragged_dot(x_MD, weight_EDF, sizes):
    weight_EDF = weight_EDF.astype(x_MD.dtype)
    sizes = sizes.astype(jnp.int32)
    # What the program is lowered for decides. Every branch is traced, and ragged_dot knows no vmap: it stays out of programs
    # that are for CPUs as far as is known.
    other = _by_blocks if platform() == "cpu" else jax.lax.ragged_dot
    tpu = _by_kernel if _fits_kernel(x_MD, weight_EDF) and not partitioned() else other
    return jax.lax.platform_dependent(x_MD, weight_EDF, sizes, cpu=_by_blocks, tpu=tpu, default=other)


TILE = 128


def _fits_kernel(x_MD: jax.Array, weight_EDF: jax.Array) -> bool:
    return x_MD.dtype == jnp.bfloat16 and not any(size % TILE for size in (*x_MD.shape, weight_EDF.shape[-1]))


def _by_kernel(x_MD, weight_EDF, sizes_E, interpret: bool = False):
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    tiling = tuple(max(t for t in (128, 256, 512) if size % t == 0) for size in (*x_MD.shape, weight_EDF.shape[-1]))
    return gmm(x_MD, weight_EDF, sizes_E, preferred_element_type=x_MD.dtype, tiling=tiling, interpret=interpret)


def block_rows(rows: int, groups: int) -> int:
    """Rows of a block: a power of two, such that what fills up the groups' last blocks is some 12% of all. Smaller blocks would
    need more copies of kernels, which take longer than the products of what fills up larger ones."""
    return 1 << max(0, min(7, (rows // (4 * groups)).bit_length() - 1))


def _by_blocks(x_MD, weight_EDF, sizes_E):
    rows, groups = len(x_MD), len(weight_EDF)
    size = block_rows(rows, groups)
    blocks = rows if size == 1 else rows // size + groups  # enough for any sizes
    count_E = -(-sizes_E // size)
    last_E = jnp.cumsum(count_E)
    group_B = jnp.searchsorted(
        last_E, jnp.arange(blocks), side="right", method="compare_all"
    )  # past the last group where a block is not needed
    group_B = jnp.minimum(group_B, groups - 1)
    group_M = jnp.searchsorted(jnp.cumsum(sizes_E), jnp.arange(rows), side="right", method="compare_all")
    first_E = jnp.cumsum(sizes_E) - sizes_E
    at_M = (last_E - count_E)[group_M] * size + jnp.arange(rows) - first_E[group_M]
    at_M = jnp.where(group_M < groups, at_M, blocks * size + jnp.arange(rows))  # outside: rows of no group
    spread = jnp.zeros((blocks * size, x_MD.shape[1]), x_MD.dtype).at[at_M].set(x_MD, unique_indices=True, mode="drop")
    blocked = spread.reshape(blocks, size, -1)
    y = jnp.einsum("BTD,BDF->BTF", blocked, weight_EDF[group_B]).reshape(blocks * size, -1)
    return y.at[at_M].get(mode="fill", fill_value=0)
