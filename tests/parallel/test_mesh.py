"""Meshes of 8 simulated devices: where tensors lie, and the same numbers as on one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

import jaxformer as jf
from jaxformer.cli import train
from jaxformer.parallel import placement as placements
from jaxformer.parallel import sharding
from jaxformer.parallel.placement import check_batch, state_shardings
from jaxformer.parallel.sharding import ACTIVATIONS, PARAMETERS, MeshConfig, partition_spec
from jaxformer.training.update import param_shardings
from tests.states import initial, update

pytestmark = pytest.mark.usefixtures("quick_compilation")
STEPS = 5
# An epsilon near the gradients' size: Adam is then smooth in them and sees their scale (as in test_step).
OPTIM = jf.OptimConfig(lr=0.03, schedule="constant", warmup_steps=2, eps=1e-2, clip_norm=0.5)


# Where tensors lie


@pytest.mark.parametrize(
    ("letters", "shape", "rules", "expected"),
    [
        ("DKGH", (32, 4, 2, 8), PARAMETERS, P("fsdp", "tensor", None, None)),
        ("DKGH", (32, 1, 4, 8), PARAMETERS, P("fsdp", None, "tensor", None)),  # one key head: its queries are spread
        ("VD", (67, 32), PARAMETERS, P(None, "fsdp")),  # 67 does not divide
        ("LEDF", (3, 4, 32, 12), PARAMETERS, P(None, None, "fsdp", "tensor")),  # expert has one device
        ("D", (31,), PARAMETERS, P(None)),
        ("BTD", (8, 6, 32), ACTIVATIONS, P(("data", "fsdp"), None, None)),
        ("BTD", (2, 6, 32), ACTIVATIONS, P("data", None, None)),
        ("BKGTS", (4, 2, 1, 6, 6), ACTIVATIONS, P(("data", "fsdp"), "tensor", None, None, None)),
    ],
)
def test_a_letter_goes_where_it_divides_and_an_axis_is_used_once(letters, shape, rules, expected):
    mesh = MeshConfig(data=2, fsdp=2, tensor=2).make()
    assert partition_spec(letters, shape, rules, mesh) == expected


def test_meshes_and_batches_that_do_not_fit():
    assert dict(MeshConfig(fsdp=4).make().shape) == {"data": 2, "fsdp": 4, "expert": 1, "context": 1, "tensor": 1}
    with pytest.raises(ValueError, match=r"a mesh of fsdp 3 · tensor 2 does not fit 8 devices; XLA_FLAGS=--xla\S+=6 simulates"):
        MeshConfig(fsdp=3, tensor=2).make()
    with pytest.raises(ValueError, match="mesh.tensor=0 must be at least 1"):
        MeshConfig(tensor=0)
    mesh = MeshConfig(fsdp=4, context=2).make()
    with pytest.raises(ValueError, match="batch_size=6 is not divisible by 4 devices; the nearest is 8"):
        check_batch({"tokens": np.zeros((6, 8))}, mesh)
    with pytest.raises(ValueError, match="length=7 is not divisible by 2 devices along context; the nearest is 8"):
        check_batch({"tokens": np.zeros((8, 7))}, mesh)
    check_batch({"tokens": np.zeros((8, 8))}, mesh, 2)
    with pytest.raises(ValueError, match="batch_size=12 in 2 microbatches is not divisible by 4 devices; the nearest is 16"):
        check_batch({"tokens": np.zeros((12, 8))}, mesh, 2)


def test_the_table_names_what_is_replicated():
    cfg = tiny.PRESETS["llama_gqa"]
    rows = sharding.table(jf.model.spec(cfg), cfg, MeshConfig(tensor=8).make())
    placed = {path: where for path, _, _, where in rows}
    assert placed["decoder.layers.mlp.up"] == "F: tensor" and placed["embedding.token"] == "replicated"
    assert [where for *_, where in rows].index("replicated") == sum(where != "replicated" for *_, where in rows)


# The same numbers


def fresh(cfg):
    return initial(cfg, OPTIM, STEPS)


def on_mesh(cfg, mesh, **options):
    abstract = jax.eval_shape(functools.partial(fresh, cfg))
    return placements.mesh(update(cfg, OPTIM, STEPS), abstract, param_shardings(cfg, mesh), **options)


def model(name):
    """A preset with one layer where all are alike; of experts with everything that balances them, and the block for the token
    after the next."""
    cfg = tiny.PRESETS[name]
    if not isinstance(cfg.window, tuple):
        cfg = dataclasses.replace(cfg, n_layers=1, encoder_layers=min(1, cfg.encoder_layers))
    if not cfg.experts.n_experts:
        return cfg
    experts = dataclasses.replace(cfg.experts, groups=2, groups_per_token=1)
    return dataclasses.replace(cfg, experts=experts, balance_loss=0.1, router_z_loss=0.01, balance_rate=0.01, mtp=True)


@functools.cache
def alone(name):
    """Five updates on one device."""
    cfg = model(name)
    state, run, metrics = jax.jit(lambda: fresh(cfg))(), jax.jit(update(cfg, OPTIM, STEPS)), []
    for seed in range(STEPS):
        state, step = run(state, tiny.batch(cfg, 8, length=8, seed=seed))
        metrics.append({name: float(value) for name, value in step.items()})
    return state, metrics


MESHES = {
    "data": MeshConfig(),
    "fsdp": MeshConfig(fsdp=8),
    "tensor": MeshConfig(tensor=2),
    "context": MeshConfig(context=4),
    "three at once": MeshConfig(fsdp=2, tensor=2, context=2),
    "experts": MeshConfig(expert=4, tensor=2),
    "experts and more": MeshConfig(expert=2, fsdp=2, data=2),
}
CASES = [("llama_gqa", mesh) for mesh in ("fsdp", "tensor", "context")]
CASES += [(name, "three at once") for name in tiny.PRESETS] + [("deepseek", "experts and more")]
SLOW = [(name, mesh) for name in tiny.PRESETS for mesh in ("data", "fsdp", "tensor", "context") if (name, mesh) not in CASES]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in (*SLOW, ("deepseek", "experts"))]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_five_updates_are_those_of_one_device(name, mesh):
    cfg, config = model(name), MESHES[mesh]
    make = functools.partial(fresh, cfg)
    placement = on_mesh(cfg, config.make())
    state = placement.begin(make)
    expected, expected_metrics = alone(name)
    if mesh != "data":
        spread = [leaf for leaf in jax.tree.leaves(state.params) if not leaf.sharding.is_fully_replicated]
        assert mesh == "context" or len(spread) > 3, "something lies in parts"
    for seed, wanted in enumerate(expected_metrics):
        state, metrics = placement.step(state, placement.put_batch(tiny.batch(cfg, 8, length=8, seed=seed)))
        found = placement.get_metrics(metrics)
        # Sums of some hundred terms in another order, through up to five updates.
        np.testing.assert_allclose([found[key] for key in wanted], list(wanted.values()), rtol=1e-4)
    before = jax.jit(make)().params
    moved = [float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (before, expected.params)), strict=True)]
    assert max(moved) > 0.01 and np.median(moved) > 1e-3, "the updates are no rounding"
    for a, b in zip(*(jax.tree.leaves((s.params, s.opt_state)) for s in (state, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_states_are_born_and_restored_on_their_shards():
    cfg, mesh = tiny.PRESETS["llama_gqa"], MeshConfig(fsdp=8).make()
    make = functools.partial(fresh, cfg)
    abstract = jax.eval_shape(make)
    placement = on_mesh(cfg, mesh)
    where = state_shardings(abstract, param_shardings(cfg, mesh))
    state = placement.begin(make)
    jax.tree.map(lambda x, at: x.sharding.is_equivalent_to(at, x.ndim) or pytest.fail(f"{x.sharding} {at}"), state, where)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 1]
    assert moments and not any(leaf.sharding.is_fully_replicated for leaf in moments)
    jax.tree.map(np.testing.assert_array_equal, state.params, jax.jit(make)().params)
    like = placement.like(abstract)
    assert like.params["embedding"]["token"].sharding == where.params["embedding"]["token"]


def test_an_optimizer_state_in_the_hosts_memory_is_the_same():
    cfg, config = model("llama_gqa"), MESHES["fsdp"]
    make = functools.partial(fresh, cfg)
    near, far = on_mesh(cfg, config.make()), on_mesh(cfg, config.make(), offload=True)
    states = [placement.begin(make) for placement in (near, far)]
    for seed in range(2):
        batch = tiny.batch(cfg, 8, length=8, seed=seed)
        states = [p.step(state, p.put_batch(batch))[0] for p, state in zip((near, far), states, strict=True)]
        kinds = [{leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim} for state in states]
        assert kinds == [{"device"}, {"pinned_host"}]
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(states[1].params)} == {"device"}
    jax.tree.map(np.testing.assert_array_equal, *((s.params, s.opt_state) for s in states))


# Generating


@pytest.mark.parametrize(
    "name", ["llama_gqa", *(pytest.param(n, marks=pytest.mark.slow) for n in ("deepseek", "transformer_base", "mixed_windows"))]
)
def test_generating_on_a_mesh_gives_what_one_device_gives(name):
    cfg, mesh = model(name), MeshConfig(data=2, fsdp=2, tensor=2).make()
    params, prompts, given = tiny.drawn(cfg), tiny.tokens(cfg, 4, 5), tiny.inputs(cfg, 4)
    sampling = [jf.Sampling(temperature=0.0), jf.Sampling(temperature=1.0, top_k=20)] * 2
    run = lambda params: jf.generate(params, prompts, cfg, max_new_tokens=8, sampling=sampling, key=jax.random.key(3), **given)
    alone = run(params)
    spread = jax.device_put(params, sharding.shardings(jf.model.spec(cfg), cfg, mesh))
    assert sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(spread)) > 3
    with jax.set_mesh(mesh):
        found = run(spread)
        cache = jax.jit(lambda: jf.init_cache(cfg, 4, 16))()
    held = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(cache.layers)]
    rows, heads = 4 // 4, max(1, cfg.n_kv_heads // 2)
    assert all(shape[0] == rows and (len(shape) < 4 or shape[1] == heads) for shape in held), "born in parts"
    np.testing.assert_array_equal(found.tokens, alone.tokens)
    assert len({tuple(row) for row in np.asarray(alone.tokens)}) == 4
    # sums of some hundred terms in another order
    np.testing.assert_allclose(found.logprobs, alone.logprobs, atol=1e-4)


# In a run


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three, " * 60)

    def config(directory, steps, mesh):
        return jf.Config(
            model=jf.presets.llama(vocab_size=16, d_model=16, n_layers=1, n_heads=2),
            data=jf.DataConfig(path=str(text), tokenizer="char", length=8, batch_size=8, segment_documents=False),
            optim=OPTIM,
            train=jf.TrainConfig(steps=steps, eval_every=2, log_every=1, prompt="one", sample_tokens=2),
            mesh=mesh,
            run_dir=str(tmp_path / directory),
        )

    for steps, mesh in ((2, MeshConfig(fsdp=4)), (4, MeshConfig(tensor=2, context=2))):
        train.main(config("spread", steps, mesh))
    for steps in (2, 4):
        train.main(config("plain", steps, MeshConfig()))
    (cfg, spread, _), (_, plain, _) = jf.load(tmp_path / "spread"), jf.load(tmp_path / "plain")
    start = jax.jit(jf.init, static_argnums=0)(cfg, jax.random.key(0))
    assert max(float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (plain, start)), strict=True)) > 0.01
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), spread, plain)
    with pytest.raises(ValueError, match="cannot be combined with mesh"):
        dataclasses.replace(config("x", 2, MeshConfig(fsdp=2)), train=jf.TrainConfig(parallel="pmap"))
