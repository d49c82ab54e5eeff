"""Attention on TPUs: JAX's splash kernel (block-sparse flash attention, Dao 2023), which never holds the scores, on every shard
of a mesh by itself."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.nn.kernels.call import AttentionCall
from jaxformer.nn.mask import TokenInfo
from jaxformer.nn.named import label
from jaxformer.parallel.sharding import ACTIVATIONS, current, partition_spec, platform

LANES = 128
"""Lengths are multiples of it."""
BLOCK = 1024
"""Queries and keys that the kernel takes at a time, at most."""


def limit(call: AttentionCall) -> str | None:
    """Why the kernel cannot serve a call; None where it can."""
    if call.bias:
        return "adds no bias to the scores"
    if call.dropout:
        return "makes no weights that dropout could act on"
    if call.padding and call.segments:
        return "takes segments or padding, not both"
    if call.queries % (LANES * call.shards) or call.keys % LANES:
        each = f" on each of {call.shards} devices" if call.shards > 1 else ""
        return f"needs lengths that divide by {LANES}{each}, not {call.queries} queries and {call.keys} keys"
    if call.unplaced:
        return "needs a mesh (jax.set_mesh) where there are several devices"
    if call.dtype not in ("bfloat16", "float32"):
        return f"computes in bfloat16 and float32, not {call.dtype}"
    return call.padded_window()


def apply(q_BKGTH, k_BKSH, v_BKSH, info: TokenInfo, key_info: TokenInfo, call: AttentionCall, scale: float) -> jax.Array:
    """[B, K, G, T, H], of a call within the kernel's limits.

    On a mesh, rows, heads and queries stay where they are; keys and values come together over ``context``. Queries are
    multiplied by the scale in float32 and rounded to their dtype.
    """
    query_ids, key_ids, blind_BT = _ids(q_BKGTH, k_BKSH, info, key_info, call)
    q_BKGTH = (q_BKGTH.astype(jnp.float32) * scale).astype(q_BKGTH.dtype)
    mesh = current()
    if mesh is None:
        out = _rows(_kernel(call, q_BKGTH.shape[1] * q_BKGTH.shape[2], 1), q_BKGTH, k_BKSH, v_BKSH, query_ids, key_ids)
    else:
        out = _on_mesh(mesh, q_BKGTH, k_BKSH, v_BKSH, query_ids, key_ids, call)
    return out if blind_BT is None else jnp.where(blind_BT[:, None, None, :, None], 0, out)


def _ids(q_BKGTH, k_BKSH, info, key_info, call):
    """Numbers of queries and keys, of which equal ones see each other; and the queries that see no key.

    The kernel gives such a query NaN or the mean of hidden values. So it is let to see padding, as its result is then dropped.
    """
    shape_BT, shape_BS = (q_BKGTH.shape[0], call.queries), (k_BKSH.shape[0], call.keys)
    if call.segments:
        return jnp.broadcast_to(info.segment, shape_BT), jnp.broadcast_to(key_info.segment, shape_BS), None
    if not call.padding:
        return None, None, None
    valid_BS = jnp.broadcast_to(key_info.valid, shape_BS)
    sees_BT = jax.lax.cummax(valid_BS.astype(jnp.int32), axis=1) if call.causal else valid_BS.any(1, keepdims=True)
    sees_BT = jnp.broadcast_to(sees_BT, shape_BT).astype(bool)
    return sees_BT.astype(jnp.int32), valid_BS.astype(jnp.int32), ~sees_BT


def _on_mesh(mesh, q_BKGTH, k_BKSH, v_BKSH, query_ids, key_ids, call):
    q_spec, k_spec = (
        partition_spec("BKGTH", q_BKGTH.shape, ACTIVATIONS, mesh),
        partition_spec("BKSH", k_BKSH.shape, ACTIVATIONS, mesh),
    )
    rows, kv_axis, group_axis, time_axis, _ = q_spec
    shards = call.shards
    heads = math.prod(q_BKGTH.shape[1:3]) // math.prod(mesh.shape[axis] for axis in (kv_axis, group_axis) if axis)
    # A causal query near the end has more to do: each device takes one half of its queries from the front, one from the back.
    balanced = shards > 1 and call.causal and call.queries % (2 * shards) == 0
    if call.causal or call.window is not None:
        kernel = _kernel(call, heads, shards, _folded(call.queries, shards) if balanced else None)
        kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, time_axis)))
    else:  # the same for every part, which the library cannot split
        kernel = _kernel(dataclasses.replace(call, queries=call.queries // shards), heads, 1)
        kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, None)))

    def on_shard(kernel, q, k, v, *ids):
        if not balanced:
            return _rows(kernel, q, k, v, *(ids or (None, None)))
        fold = functools.partial(_fold, axis=time_axis, shards=shards)
        query_ids, key_ids = (fold(ids[0], 1), ids[1]) if ids else (None, None)
        return fold(_rows(kernel, fold(q, 3), k, v, query_ids, key_ids), 3, back=True)

    ids = () if query_ids is None else (query_ids, key_ids)
    id_specs = (PartitionSpec(rows, time_axis), PartitionSpec(rows, None))[: len(ids)]
    run = jax.shard_map(on_shard, in_specs=(kernel_spec, q_spec, k_spec, k_spec, *id_specs), out_specs=q_spec, check_vma=False)
    return run(kernel, q_BKGTH, k_BKSH, v_BKSH, *ids)


def _folded(length: int, shards: int) -> np.ndarray:
    """[T]: indices of a sequence that is folded over ``shards`` devices: device d has halves d and 2·shards − 1 − d."""
    halves = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
    return np.stack([halves[:shards], halves[::-1][:shards]], axis=1).reshape(-1)


def _fold(x: jax.Array, axis_of_x: int, back: bool = False, *, axis: str, shards: int) -> jax.Array:
    """A device's part of what lies in order along ``axis_of_x``, for its part of the folded order; or back."""
    # Half h lies at h // 2, and is computed at h or 2·shards − 1 − h. Even halves, and odd ones, go to different devices each.
    computed = [h if h < shards else 2 * shards - 1 - h for h in range(2 * shards)]
    moves = [[(h // 2, computed[h]) for h in range(first, 2 * shards, 2)] for first in (0, 1)]
    # Of device d's two, half d comes first: the even one where d is even.
    is_odd = jax.lax.axis_index(axis) % 2 == 1

    def ordered(a, b):
        return jnp.where(is_odd, b, a), jnp.where(is_odd, a, b)

    a, b = jnp.split(x, 2, axis=axis_of_x)
    if back:
        a, b = ordered(a, b)
        moves = [[(to, at) for at, to in pairs] for pairs in moves]
    a, b = (jax.lax.ppermute(half, axis, pairs) for half, pairs in zip((a, b), moves, strict=True))
    a, b = (a, b) if back else ordered(a, b)
    return jnp.concatenate([a, b], axis=axis_of_x)


def _rows(kernel, q_BKGTH, k_BKSH, v_BKSH, query_ids, key_ids):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library

    heads = q_BKGTH.reshape(q_BKGTH.shape[0], -1, *q_BKGTH.shape[3:])
    ids = None if query_ids is None else library.SegmentIds(query_ids, key_ids)
    return jax.vmap(kernel)(heads, k_BKSH, v_BKSH, ids).reshape(*q_BKGTH.shape[:-1], v_BKSH.shape[-1])


def _kernel(call, heads: int, shards: int, order: Any = None):
    """The library's kernel for ``heads`` query heads; order [T]: the query's place in the sequence of each row of the queries,
    of which each of ``shards`` devices has its part."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (call.queries, call.keys)
    mask: Any = masks.CausalMask(shape) if call.causal else masks.FullMask(shape)
    if call.window is not None:
        mask = masks.LocalMask(shape, (call.window - 1, 0 if call.causal else call.window - 1), offset=0)
    if order is not None:
        mask.q_sequence = order
    queries, keys = (max(b for b in (128, 256, 512, BLOCK) if n % b == 0) for n in (call.queries // shards, call.keys))
    sizes: dict[str, Any] = dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), queries)
    for name in ("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute", "block_kv_dq"):
        sizes[name] = keys
    return library.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=library.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=shards,
        attn_logits_soft_cap=call.softcap,
        residual_checkpoint_name=label("mixed"),
        interpret=platform() != "tpu",
    )
