"""Rows that are sorted by group, each times its own group's matrix."""

import jax
import jax.numpy as jnp

from jaxformer.nn.named import multiply


def ragged_dot(x_MD: jax.Array, kernel_EDF: jax.Array, sizes: jax.Array) -> jax.Array:
    """[M, F]: the first ``sizes[0]`` rows times kernel 0, the next ``sizes[1]`` times kernel 1, and so on.

    ``jax.lax.ragged_dot`` multiplies every row with every kernel on CPUs and (JAX 0.10) on TPUs. A single TPU takes JAX's own
    Pallas kernel, in bfloat16; XLA cannot spread that over several. CPUs lay the rows out in blocks of one group each, and
    multiply blocks with copies of their kernels, which are some 17 for each: too many for the memory of accelerators.
    """
    # A row has one of the E kernels for its own: as an equation, a kernel a row.
    return multiply("MD,MDF->MF", x_MD, kernel_EDF, by=lambda x_MD, kernel_EDF: _ragged_dot(x_MD, kernel_EDF, sizes))


def _ragged_dot(x_MD, kernel_EDF, sizes):
    kernel_EDF = kernel_EDF.astype(x_MD.dtype)
    sizes = sizes.astype(jnp.int32)
    # Every branch is traced, and ragged_dot knows no vmap: it stays out of programs that are made where there are CPUs alone.
    other = _by_blocks if jax.default_backend() == "cpu" else jax.lax.ragged_dot
    tpu = _by_kernel if _fits_kernel(x_MD, kernel_EDF) and jax.device_count() == 1 else other
    return jax.lax.platform_dependent(x_MD, kernel_EDF, sizes, cpu=_by_blocks, tpu=tpu, default=other)


TILE = 128


def _fits_kernel(x_MD: jax.Array, kernel_EDF: jax.Array) -> bool:
    return x_MD.dtype == jnp.bfloat16 and not any(size % TILE for size in (*x_MD.shape, kernel_EDF.shape[-1]))


def _by_kernel(x_MD, kernel_EDF, sizes_E, interpret: bool = False):
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    tiling = tuple(max(t for t in (128, 256, 512) if size % t == 0) for size in (*x_MD.shape, kernel_EDF.shape[-1]))
    return gmm(x_MD, kernel_EDF, sizes_E, preferred_element_type=x_MD.dtype, tiling=tiling, interpret=interpret)


def block_rows(rows: int, groups: int) -> int:
    """Rows of a block: a power of two, such that what fills up the groups' last blocks is some 6% of all."""
    return 1 << max(0, min(7, (rows // (16 * groups)).bit_length() - 1))


def _by_blocks(x_MD, kernel_EDF, sizes_E):
    rows, groups = len(x_MD), len(kernel_EDF)
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
    spread = jnp.zeros((blocks * size, x_MD.shape[1]), x_MD.dtype).at[at_M].set(x_MD, unique_indices=True)
    blocked = spread.reshape(blocks, size, -1)
    return jnp.einsum("BTD,BDF->BTF", blocked, kernel_EDF[group_B]).reshape(blocks * size, -1)[at_M]
