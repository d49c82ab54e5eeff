"""Experts on 8 simulated devices: the numbers of one device, and what goes between devices."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxformer as jf
from jaxformer.config import Experts
from jaxformer.nn.experts import dispatch, ragged, router
from jaxformer.parallel.sharding import ROWS, MeshConfig, shardings
from jaxformer.training.objective import NextToken

pytestmark = pytest.mark.usefixtures("quick_compilation")
BASE = Experts(n_experts=8, per_token=2, d_ff=12)
MESHES = {
    "expert": MeshConfig(expert=4),
    "fsdp": MeshConfig(expert=2, fsdp=2),
    "tensor": MeshConfig(expert=2, tensor=2),
    "context": MeshConfig(expert=4, context=2),
    "no expert": MeshConfig(fsdp=4),
}
LOADS = {"even": 0.0, "one has all": 3.0, "one has none": -3.0}


def model(experts, **fields):
    sizes = {"vocab_size": 40, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_length": 32}
    return jf.presets.llama(**sizes | fields, experts=experts)


def layer(cfg, rows=8, length=6):
    rng = np.random.default_rng(0)
    shapes = {path: param.shape(cfg) for path, param in jf.spec.walk(router.spec(cfg))}
    params = {path: jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32) for path, shape in shapes.items()}
    # Positive, so that a column of the router decides how many tokens an expert has.
    return params, jnp.asarray(np.abs(rng.normal(size=(rows, length, cfg.d_model))), jnp.float32)


def everything(cfg):
    """A function of parameters and tokens: results, gradients, and what the layer did."""

    def weighed(params, x_BTD):
        counted = jnp.arange(x_BTD.shape[1]) > 0
        y_BTD, did = router.apply(params, x_BTD, cfg, counted=counted, training=True)
        total = (y_BTD * jnp.cos(jnp.arange(y_BTD.size)).reshape(y_BTD.shape)).sum()
        return total + 0.1 * (did["probability"] ** 2).sum() + 0.1 * did["log_z2"], (y_BTD, did)

    return jax.jit(jax.grad(weighed, (0, 1), has_aux=True))


def close(found, expected):
    # float32 keeps 7 digits; these are sums of up to some hundred terms, in another order.
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * max(1.0, float(np.abs(b).max())))


CASES = [("dropless", mesh) for mesh in ("expert", "fsdp", "tensor")] + [("rounds", "context"), ("capacity", "context")]
SLOW = [("dropless", "context"), ("dropless", "no expert"), ("rounds", "expert"), ("rounds", "fsdp"), ("rounds", "tensor")]
SLOW += [("capacity", mesh) for mesh in ("expert", "fsdp", "tensor", "no expert")]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize(("how", "mesh"), CASES)
def test_a_layer_is_that_of_one_device(how, mesh, monkeypatch):
    # 4 even shares: two choices of 8 experts fill at most these.
    cfg = model(BASE, **({"expert_dispatch": "capacity", "expert_capacity": 4.0} if how == "capacity" else {}))
    if how == "rounds":  # of 5 rows at a time
        monkeypatch.setattr(dispatch, "room", lambda rows, most: min(most, 5))
    params, x_BTD = layer(cfg)
    alone, spread = everything(cfg), everything(cfg)
    mesh = MESHES[mesh].make()
    divides, asked = dispatch.divides, []
    monkeypatch.setattr(dispatch, "divides", lambda *given: asked.append(divides(*given)) or asked[-1])
    for load, column in LOADS.items():
        params["router"] = params["router"] if column == 0 else params["router"].at[:, 2].set(column)
        expected = alone(params, x_BTD)
        with jax.set_mesh(mesh):
            found = spread(params, x_BTD)
        close(found, expected)
        counted = x_BTD.shape[0] * (x_BTD.shape[1] - 1)
        got = float(found[1][1]["load"][2])
        assert got == counted if column > 0 else got == 0 if column < 0 else 0 < got < counted, load
        assert found[1][1]["dropped"] == 0
    assert asked == [True], "it was spread"


def test_rooms_are_for_a_devices_own_tokens():
    """With too few of them: every device's tokens are as if they were alone, and what is dropped is added up."""
    cfg = model(BASE, expert_dispatch="capacity", expert_capacity=1.0)
    params, x_BTD = layer(cfg, rows=8, length=6)

    def run(params, x_BTD):
        return router.apply(params, x_BTD, cfg, counted=True, training=True)

    with jax.set_mesh(MeshConfig(expert=4).make()):
        found, did = jax.jit(run)(params, x_BTD)
    one = jax.jit(run)
    expected, dids = zip(*(one(params, x_BTD[i : i + 1]) for i in range(8)), strict=True)
    close(found, jnp.concatenate(expected))
    close(did, jax.tree.map(lambda *x: sum(x), *dids))
    together = one(params, x_BTD)[1]["dropped"]
    assert did["dropped"] > 0 and did["dropped"] != together, "on one device other tokens find room"


def test_what_does_not_divide_is_the_same_too():
    """As in decoding: a token a row, fewer rows than devices."""
    cfg = model(BASE)
    params, x_BTD = layer(cfg, rows=3, length=1)
    expected = jax.jit(lambda p, x: router.apply(p, x, cfg)[0])(params, x_BTD)
    mesh = MeshConfig(expert=4).make()
    with jax.set_mesh(mesh):
        assert not dispatch.divides(x_BTD, BASE, mesh)
        assert not dispatch.divides(jnp.zeros((8, 1, 16)), Experts(n_experts=6, d_ff=12), mesh)
        close(jax.jit(lambda p, x: router.apply(p, x, cfg)[0])(params, x_BTD), expected)


# In a model

SMALL = {"vocab_size": 67, "d_model": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "max_length": 24}


def smaller(cfg, **fields):
    """The preset's own choices, with few and small experts."""
    return dataclasses.replace(cfg, experts=dataclasses.replace(cfg.experts, d_ff=12, **fields))


MODELS = {
    "mixtral": smaller(jf.presets.mixtral_8x7b(**SMALL)),
    "qwen3_moe": smaller(jf.presets.qwen3_moe_30b_a3b(**SMALL | {"head_dim": 16}), n_experts=16, per_token=4),
    "deepseek_v3": dataclasses.replace(
        tiny.PRESETS["deepseek"],
        mtp=True,
        balance_loss=0.1,
        experts=dataclasses.replace(tiny.PRESETS["deepseek"].experts, n_experts=8, groups=4, groups_per_token=2),
    ),
}
HOW = {
    "scanned": {"scan": True, "remat": "full"},
    "unrolled": {"scan": False, "remat": "dots"},
}
IN_A_MODEL = [("mixtral", "expert", "scanned", "dropless")]
IN_A_MODEL += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
        ("mixtral", "tensor", "unrolled", "capacity"),
        ("qwen3_moe", "expert", "unrolled", "dropless"),
        ("qwen3_moe", "fsdp", "scanned", "dropless"),
        ("qwen3_moe", "context", "scanned", "capacity"),
        ("deepseek_v3", "tensor", "scanned", "dropless"),
        ("deepseek_v3", "context", "unrolled", "dropless"),
        ("deepseek_v3", "fsdp", "scanned", "capacity"),
    )
]


@pytest.mark.parametrize(("name", "mesh", "how", "kind"), IN_A_MODEL)
def test_a_models_loss_and_gradients_are_those_of_one_device(name, mesh, how, kind):
    cfg = MODELS[name]
    capacity = cfg.experts.n_experts / cfg.experts.per_token
    rooms = {} if kind == "dropless" else {"expert_dispatch": kind, "expert_capacity": capacity}
    cfg = dataclasses.replace(cfg, **HOW[how], **rooms)
    params, batch = tiny.drawn(cfg), tiny.batch(cfg, 8, length=8)
    mesh = MESHES[mesh].make()
    placed = shardings(jf.model.spec(cfg), cfg, mesh)
    run = lambda: jax.jit(jax.grad(NextToken(cfg), has_aux=True))
    expected = run()(params, batch)
    assert min(float(np.abs(g).max()) for g in jax.tree.leaves(expected[0]["decoder"]["layers"]["moe"]["up"])) > 1e-3
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P(ROWS, "context"))
        found = run()(jax.device_put(params, placed), jax.device_put(batch, rows))
    assert float(found[1]["dropped"].sum()) == 0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # Through three layers: rounding of the sums that follow one another. Of gradients, up to some thousand terms each.
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * max(1.0, float(np.abs(b).max())))


# What goes between devices


def collectives(text, kind):
    """Shapes of what the collectives of one kind give, in a compiled program."""
    lines = [line for line in text.splitlines() if re.search(rf" {kind}(-start)?\(", line)]
    lines = [line for line in lines if "replica_groups={{0},{1}" not in line]  # of each device with itself
    return [
        tuple(map(int, shape.split(",")))
        for line in lines
        for shape in re.findall(r"\w+\[([\d,]+)\]", re.split(rf" {kind}(-start)?\(", line)[0])
    ]


def compiled(cfg, mesh, rows=8, length=32):
    params = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
        jf.spec.abstract(router.spec(cfg), cfg),
        shardings(router.spec(cfg), cfg, mesh),
    )
    at = NamedSharding(mesh, P(ROWS, "context"))
    x_BTD = jax.ShapeDtypeStruct((rows, length, cfg.d_model), cfg.execution.dtype, sharding=at)

    def loss(params, x_BTD):
        y_BTD, did = router.apply(params, x_BTD, cfg, counted=True, training=True)
        return (y_BTD**2).sum(), did

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
        return program.lower(params, x_BTD).compile().as_text()


@pytest.mark.parametrize("how", ["dropless", "capacity"])
def test_tokens_go_by_all_to_all_and_nothing_large_is_gathered(how, monkeypatch):
    cfg = model(dataclasses.replace(BASE, d_ff=20), d_model=24, expert_dispatch=how)
    mesh = MeshConfig(expert=4, data=2).make()
    largest = 24 * BASE.n_experts  # the router's weights, which all need whole

    def gathered(text):
        found = [shape for kind in ("all-gather", "collective-permute") for shape in collectives(text, kind)]
        # XLA's CPU backend gathers by summing, too; a gradient of the device's own kernels is summed over data alone.
        found += [shape for shape in collectives(text, "all-reduce") if shape not in ((2, 24, 20), (2, 20, 24))]
        return [shape for shape in found if np.prod(shape) > largest]

    text = compiled(cfg, mesh)
    sent = collectives(text, "all-to-all")
    assert len([shape for shape in sent if shape[-1] == 24]) >= 4, "there and back, and their gradients"
    assert not gathered(text)
    monkeypatch.setattr(dispatch, "divides", lambda *_: False)
    assert gathered(compiled(cfg, mesh)), "XLA by itself gathers"


@pytest.mark.slow
def test_tpus_send_ragged_rows_and_multiply_by_the_kernel(monkeypatch):
    """Compiled for a topology, by a process that has CPUs alone."""
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = list(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)
    experts = Experts(n_experts=4, per_token=2, d_ff=256)
    cfg = model(experts, d_model=128, dtype="bfloat16")
    text = compiled(cfg, MeshConfig(expert=4).make(devices), length=128)
    assert text.count(" ragged-all-to-all") + text.count('custom_call_target="ragged') >= 4
    assert len(re.findall(r'custom-call\(.*custom_call_target="tpu_custom_call"', text)) >= 9, "3 products, 2 gradients each"
    room = 4 * 128 * 1  # of 4 senders with 128 tokens each, as a token has one choice at most of a device's one expert
    assert f"bf16[{room},2,128]" in text
    assert not [shape for shape in collectives(text, "all-gather") if np.prod(shape) > 4 * 128]


def test_rows_after_the_last_group_are_not_read():
    rng = np.random.default_rng(0)
    x_MD, weight_EDF = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((256, 128), (3, 128, 128)))
    sizes, many = jnp.array([60, 0, 90], jnp.int32), 150
    filled = jnp.where(jnp.arange(256)[:, None] < many, x_MD, jnp.nan)

    def run(product, x_MD):
        y_MF, back = jax.vjp(lambda x, k: product(x, k, sizes), x_MD, weight_EDF)
        found = back(jnp.where(jnp.arange(256)[:, None] < many, jnp.ones_like(y_MF), jnp.nan))
        return y_MF[:many], found[0][:many], found[1]

    expected = run(ragged._by_blocks, x_MD)
    for product in (ragged._by_blocks, lambda *given: ragged._by_kernel(*given, interpret=True)):
        for found, wanted in zip(run(product, filled), expected, strict=True):
            found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
            # bfloat16 keeps 8 bits: sums of 128 products are rounded differently in the last one or two.
            np.testing.assert_allclose(found, wanted, atol=2**-6 * np.abs(wanted).max())
