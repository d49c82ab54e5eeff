"""Muon on stacked and many-lettered tensors equals a loop over single matrices with optax's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

import jaxformer as jf
from jaxformer.training import matrices
from jaxformer.training.optim import optimizer
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = {"vocab_size": 11, "d_model": 8, "n_layers": 2, "n_heads": 4}
MODELS = {
    "llama": jf.presets.llama(**SMALL, n_kv_heads=2, head_dim=6, d_ff=10),
    "gpt2": jf.presets.gpt2(**SMALL, d_ff=10, max_length=6),
    "moe": jf.presets.llama(**SMALL, n_kv_heads=2, d_ff=10, experts=jf.Experts(n_experts=3, per_token=2, d_ff=6, shared=1)),
    "latent": jf.presets.deepseek_v3(
        **SMALL,
        head_dim=4,
        d_ff=10,
        latent=jf.Latent(rank=5, query_rank=6, rope_dim=2, value_dim=3),
        experts=jf.Experts(n_experts=4, per_token=2, d_ff=6, layers=(1,), shared=1),
        balance_rate=0.0,
        mtp=True,
        dtype="float32",
        param_dtype="float32",
    ),
}
LR, DECAY = 0.05, 0.3


def matrices_of(path: str, leaf: np.ndarray) -> np.ndarray | None:
    """[number, inputs, outputs] of what Muon is for, by names: all of these but ``out`` contract their first axis."""
    name = path.split(".")[-1]
    if name in ("gain", "table", "token") or name.endswith("bias") or path == "head.kernel":
        return None
    batch = ("layers" in path) + (".moe." in path and "shared" not in path and name != "router")
    flat = leaf.reshape(-1, *leaf.shape[batch:])
    return flat.reshape(len(flat), -1, leaf.shape[-1]) if name == "out" else flat.reshape(*flat.shape[:2], -1)


def gradients(params, step):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), params)


def trained(transform, params, steps=2):
    state, update = transform.init(params), jax.jit(transform.update)
    for step in range(steps):
        updates, state = update(gradients(params, step), state, params)
        params = optax.apply_updates(params, updates)
    return flatten_dict(params, sep=".")


@pytest.mark.parametrize("rms", [0.2, 0.0])
@pytest.mark.parametrize("name", MODELS)
def test_muon_equals_a_loop_over_matrices(name, rms):
    cfg = MODELS[name]
    common = {"lr": LR, "schedule": "constant", "warmup_steps": 0, "weight_decay": DECAY, "clip_norm": 0.0}
    params = tiny.drawn(cfg)
    found = trained(optimizer(jf.OptimConfig(name="muon", muon_beta=0.9, muon_rms=rms, **common), cfg, 10), params)
    by_adamw = trained(optimizer(jf.OptimConfig(**common), cfg, 10), params)

    own = optax.contrib.muon(LR, beta=0.9, weight_decay=DECAY, consistent_rms=rms or None)
    update, number = jax.jit(own.update), 0
    for path, leaf in flatten_dict(params, sep=".").items():
        first = matrices_of(path, np.asarray(leaf))
        if first is None:
            np.testing.assert_array_equal(found[path], by_adamw[path], err_msg=path)
            continue
        assert not np.allclose(found[path], by_adamw[path], atol=1e-3), path
        grads = [matrices_of(path, np.asarray(flatten_dict(gradients(params, step), sep=".")[path])) for step in range(2)]
        for index, matrix in enumerate(first):
            state = own.init(jnp.asarray(matrix))
            for grad in grads:
                moved, state = update(jnp.asarray(grad[index]), state, matrix)
                matrix = optax.apply_updates(matrix, moved)
            number += 1
            # float32: five products of products, in another order
            expected = matrices_of(path, np.asarray(found[path]))[index]
            np.testing.assert_allclose(expected, matrix, rtol=1e-4, atol=1e-5, err_msg=f"{path} {index}")
    assert number > cfg.n_layers * 5


@pytest.mark.parametrize("name", tiny.PRESETS)
def test_splitting_into_matrices_can_be_undone(name):
    cfg = tiny.PRESETS[name]
    params = tiny.drawn(cfg)
    parts = matrices.over(matrices.split, jf.model.spec(cfg), params)
    back = matrices.over(lambda param, part, leaf: matrices.joined(param, part, leaf.shape), jf.model.spec(cfg), parts, params)
    assert jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), back, params)).count(False) == 0
    query = jax.tree.leaves(parts["decoder"]["layers"]["attention"]["query"])[0]
    assert query.ndim == 3 and len(query) == cfg.n_layers


def test_axes_may_stand_in_any_order():
    """A component may declare a weight with its outputs first."""
    param = jf.Param("LFD", jf.spec.zeros, inputs="D", outputs="F")
    x = jnp.arange(2 * 3 * 4.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(matrices.split(param, x), np.asarray(x).transpose(0, 2, 1))
    np.testing.assert_array_equal(matrices.joined(param, matrices.split(param, x), x.shape), x)
