"""Every kernel gives plain XLA's values and gradients, or says why it cannot. TPU kernels are interpreted here; of cuDNN, what
is tested is the call, which JAX computes by XLA where there is no GPU."""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec

import jaxformer as jf
from jaxformer.cost import topology
from jaxformer.cost.compile import not_cached
from jaxformer.nn import inputs
from jaxformer.nn.kernels import cudnn, select, splash
from jaxformer.nn.kernels.call import AttentionCall
from jaxformer.nn.mask import TokenInfo
from jaxformer.parallel.sharding import MeshConfig

CFG = jf.presets.llama(vocab_size=17, d_model=64, n_layers=1, n_heads=4)
LENGTH = 256
SHAPES = {"mha": (4, 1, 16, 16), "gqa": (2, 2, 16, 16), "mqa": (1, 4, 16, 16), "uneven": (2, 1, 24, 16)}
SHAPES |= {"64": (2, 1, 64, 64), "80": (1, 1, 80, 80), "256": (1, 1, 256, 256), "192, 128": (1, 1, 192, 128)}
PADDING = {"right": (0, 200), "left": (57, None), "holes": None}
CASES = {
    "causal": {},
    "whole": {"causal": False},
    "window": {"window": 100},
    "window of both sides": {"window": 100, "causal": False},
    "softcap": {"softcap": 2.0},
    "segments": {"segments": True},
    "segments and window": {"segments": True, "window": 40},
    "padded right": {"padding": "right"},
    "padded left": {"padding": "left"},
    "padded with holes": {"padding": "holes"},
    "padded, whole": {"padding": "left", "causal": False},
    "crossing, padded": {"padding": "right", "crossing": True},
    "crossing": {"crossing": True},
    "crossing to a shorter source": {"crossing": True, "padding": "right", "keys": 128},
}


def info(case, length, rows=2):
    rng = np.random.default_rng(1)
    segments = np.sort(rng.integers(0, 4, (rows, length)), axis=1) if case.get("segments") else None
    valid = None
    if padding := case.get("padding"):
        first, last = PADDING[padding] or (0, None)
        valid = (np.arange(length) >= first) & (np.arange(length) < (last or length)) & np.ones((rows, 1), bool)
        if padding == "holes":
            valid &= rng.random(valid.shape) < 0.5
        valid[1] = True  # a row of its own without padding
    return inputs.token_info("", (rows, length), CFG, segments=segments, valid=valid)


def tensors(shape, dtype, queries, keys, rows=2):
    k, g, width, value = SHAPES[shape]
    rng = np.random.default_rng(0)
    draw = lambda *sizes: jnp.asarray(rng.standard_normal(sizes), dtype)
    return draw(rows, k, g, queries, width), draw(rows, k, keys, width), draw(rows, k, keys, value)


def both(kernel, case, shape="gqa", dtype="float32"):
    """Value and gradients by plain XLA, and by the kernel."""
    own = {name: case[name] for name in ("causal", "window") if name in case}
    cfg = dataclasses.replace(CFG, attention_softcap=case.get("softcap"), **own)
    keys = case.get("keys", LENGTH)
    at = info(case, keys)
    query_at = info({}, LENGTH) if case.get("crossing") else at
    q, k, v = tensors(shape, dtype, LENGTH, keys)
    weight = jnp.asarray(np.random.default_rng(2).standard_normal((*q.shape[:-1], v.shape[-1])), jnp.float32)

    def run(name):
        named = dataclasses.replace(cfg, attention_kernel=name)
        mix = functools.partial(jf.mix, info=query_at, key_info=at, cfg=named, crossing=case.get("crossing", False))
        value, back = jax.vjp(lambda q, k, v: mix(q, k, v).astype(jnp.float32) * weight, q, k, v)
        return value, *back(jnp.ones_like(weight))

    return run("xla"), run(kernel)


def check(plain, own, dtype):
    assert float(jnp.abs(plain[0]).max()) > 0.1
    # Sums of 256 terms in another order; in bfloat16, weights and scaled queries that are rounded or not (8 bits).
    bound = 2e-5 if dtype == "float32" else 4e-2
    for a, b in zip(plain, own, strict=True):
        assert bool(jnp.isfinite(b.astype(jnp.float32)).all())
        scale = float(jnp.abs(a.astype(jnp.float32)).max())
        np.testing.assert_allclose(np.asarray(b, np.float32), np.asarray(a, np.float32), atol=bound * scale)


@pytest.mark.parametrize("case", CASES)
def test_splash_equals_plain(case):
    plain, own = both("splash", CASES[case])
    check(plain, own, "float32")
    assert not np.array_equal(plain[0], own[0])  # or one program would be compared with itself


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "gqa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_splash_of_every_shape(shape, dtype):
    check(*both("splash", {}, shape, dtype), dtype)


CUDNN = {name: case for name, case in CASES.items() if name not in ("softcap", "window of both sides")}
CUDNN["segments and padding"] = {"segments": True, "padding": "holes"}


@pytest.mark.parametrize("case", CUDNN)
def test_the_call_of_cudnn_equals_plain(case):
    check(*both("cudnn", CUDNN[case], dtype="bfloat16"), "bfloat16")


@pytest.mark.parametrize("shape", ["mha", "mqa", "64", "80"])
def test_the_call_of_cudnn_of_every_shape(shape):
    check(*both("cudnn", {}, shape, "bfloat16"), "bfloat16")


def test_the_call_of_cudnn_for_other_lengths_and_float16(monkeypatch):
    monkeypatch.setitem(globals(), "LENGTH", 99)
    check(*both("cudnn", {"window": 40}, dtype="float16"), "float16")


MESHES = {
    "tensor": ("gqa", MeshConfig(tensor=2, data=2, context=2)),
    "groups": ("mqa", MeshConfig(tensor=4, fsdp=2)),
    "context": ("gqa", MeshConfig(context=4, data=2)),
}


ON_MESHES = [("context", "causal"), ("groups", "causal")]
ON_MESHES += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (("tensor", "causal"), *(("context", name) for name in ("segments", "window", "padded with holes", "whole")))
]


@pytest.mark.parametrize(("mesh", "case"), ON_MESHES)
def test_splash_on_a_mesh_equals_plain(mesh, case, monkeypatch):
    """Each device computes the part that is its own; what is causal is folded over the sequence's devices."""
    monkeypatch.setitem(globals(), "LENGTH", 512)
    shape, config = MESHES[mesh]
    folded = []
    monkeypatch.setattr(splash, "_fold", lambda *args, f=splash._fold, **given: folded.append(1) or f(*args, **given))
    with jax.set_mesh(config.make()):
        plain, own = jax.jit(lambda: both("splash", CASES[case], shape))()
    assert bool(folded) == (config.context > 1 and case != "whole")
    check(plain, own, "float32")


def test_folding_shares_causal_work_out_evenly():
    length, shards = 1024, 4
    order = splash._folded(length, shards).reshape(shards, -1)
    assert sorted(order.reshape(-1)) == list(range(length))
    work = (order + 1).sum(1)  # keys that each device's queries see
    assert work.max() == work.min()
    straight = (np.arange(length).reshape(shards, -1) + 1).sum(1)
    assert straight.max() > 1.7 * straight.mean()  # 7/4, less a half key each: or there would be nothing to share out


REFUSED = {
    "splash": {
        "relative positions": ({"bias": True}, "bias"),
        "dropout": ({"dropout": True}, "dropout"),
        "packed and padded": ({"segments": True, "padding": True}, "segments or padding"),
        "odd length": ({"queries": 100}, "divide by 128, not 100 queries"),
        "odd source": ({"keys": 1000}, "1000 keys"),
        "short parts": ({"shards": 4}, "divide by 128 on each of 4 devices"),
        "half": ({"dtype": "float16"}, "not float16"),
        "padded window": ({"window": 4, "padding": True}, "window"),
        "devices without a mesh": ({"unplaced": True}, "jax.set_mesh"),
    },
    "cudnn": {
        "relative positions": ({"bias": True}, "bias"),
        "softcap": ({"softcap": 30.0}, "caps none"),
        "dropout": ({"dropout": True}, "dropout"),
        "float32": ({"dtype": "float32"}, "not float32"),
        "value width": ({"value_width": 64}, "one width, not 128 and 64"),
        "wide": ({"key_width": 192, "value_width": 192}, "at most 128, not 192"),
        "window of both sides": ({"window": 4, "causal": False}, "causal attention alone"),
        "padded window": ({"window": 4, "padding": True}, "window"),
        "spread": ({"shards": 2}, "2 devices"),
        "odd and masked": ({"queries": 255, "segments": True}, "even lengths where there is a mask, not 255 queries"),
        "odd source": ({"keys": 255, "padding": True}, "and 255 keys"),
        "keys of all heads on each device": ({"heads_apart": True}, "spread over devices as their queries are"),
    },
}
GOOD = AttentionCall(queries=256, keys=256, key_width=128, value_width=128, dtype="bfloat16")


@pytest.mark.parametrize("kernel,what", [(kernel, what) for kernel, cases in REFUSED.items() for what in cases])
def test_what_a_kernel_cannot_do_is_refused_when_named_and_plain_by_itself(kernel, what, monkeypatch):
    fields, words = REFUSED[kernel][what]
    call = dataclasses.replace(GOOD, **fields)
    named = dataclasses.replace(CFG, attention_kernel=kernel)
    assert select.choose(named, GOOD) == kernel
    with pytest.raises(ValueError, match=words) as error:
        select.choose(named, call)
    assert "'auto'" in str(error.value)
    platform = {own: name for name, own in select.OF_PLATFORM.items()}[kernel]
    monkeypatch.setattr(select, "platform", lambda: platform)
    assert select.choose(CFG, GOOD) == kernel
    assert select.choose(CFG, call) == "xla"


def test_caches_are_read_by_plain_xla_whatever_is_named(monkeypatch):
    cached = dataclasses.replace(GOOD, ordered=False)
    assert {select.choose(dataclasses.replace(CFG, attention_kernel=name), cached) for name in select.LIMITS} == {"xla"}
    cfg = dataclasses.replace(tiny.PRESETS["llama_gqa"], attention_kernel="splash", n_layers=1)
    out = jf.generate(tiny.drawn(cfg), tiny.tokens(cfg, 2, 5), cfg, max_new_tokens=2)
    assert out.tokens.shape == (2, 2)


def test_gpus_of_others_have_no_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "platform", lambda: "gpu")
    device = SimpleNamespace(client=SimpleNamespace(platform_version="PJRT C API\nrocm 60300"))
    monkeypatch.setattr(cudnn.jax, "devices", lambda: [device])
    assert "NVIDIA" in cudnn.limit(GOOD)
    device.client.platform_version = "PJRT C API\ncuda 12090"
    assert cudnn.limit(GOOD) is None


def test_auto_says_what_it_takes(monkeypatch, caplog):
    monkeypatch.setattr(select, "platform", lambda: "tpu")
    select._tell.cache_clear()
    caplog.set_level("INFO")
    for call in (GOOD, dataclasses.replace(GOOD, ordered=False), dataclasses.replace(GOOD, dropout=True), GOOD):
        select.choose(CFG, call)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "attention is computed by splash"),
        (
            "WARNING",
            "attention is computed by plain XLA, which is slower, because splash makes no weights that dropout could act on",
        ),
    ]


def test_a_cpu_computes_by_plain_xla():
    assert select.choose(CFG, GOOD) == "xla"


def test_whoever_listens_gets_the_weights(monkeypatch):
    cfg = dataclasses.replace(CFG, n_layers=1)
    ids, params = np.ones((1, 128), np.int32), jf.spec.abstract(jf.model.spec(cfg), cfg)
    monkeypatch.setattr(select, "platform", lambda: "tpu")
    _, seen = jax.eval_shape(jf.capture(lambda p: jf.forward(p, ids, cfg), "*weights"), params)
    assert list(seen) == ["decoder.0.attention.weights"]


@pytest.mark.parametrize("form", ["grouped", "latent"])
def test_whole_models_by_splash(form):
    cfg = dataclasses.replace(tiny.PRESETS["deepseek" if form == "latent" else "llama_gqa"], max_length=128)
    params, batch = tiny.drawn(cfg), tiny.batch(cfg, rows=2, length=128)
    grads = {}
    for kernel in ("xla", "splash"):
        own = dataclasses.replace(cfg, attention_kernel=kernel)
        grads[kernel] = jax.jit(jax.grad(lambda p, own=own: jf.loss(p, batch, own)[0]))(params)
    assert not jax.tree.all(jax.tree.map(np.array_equal, *grads.values()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * max(1e-2, float(np.abs(a).max()))), *grads.values())


def test_the_page_has_the_table():
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    assert select.table() in page


def _can(call):
    return select.LIMITS["splash"](call) is None


COMPILED = [name for name, fields in select.FEATURES.items() if _can(dataclasses.replace(select.TYPICAL, **fields))]


@pytest.mark.slow
@pytest.mark.parametrize("feature", COMPILED)
def test_splash_compiles_for_tpus(feature):
    """Everything that the table says of it, forward and backward, for four chips."""
    pytest.importorskip("libtpu")
    call = dataclasses.replace(select.TYPICAL, **select.FEATURES[feature])
    queries, keys = call.queries // 4, call.keys // 4
    config = MeshConfig(context=4) if call.shards == 4 else MeshConfig(tensor=2, fsdp=2)
    mesh = config.make(topology.devices(topology.parse("v5e:2x2")))
    cfg = dataclasses.replace(CFG, window=call.window, causal=call.causal, attention_softcap=call.softcap)
    ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    draw = lambda *shape: jax.ShapeDtypeStruct(shape, call.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    q, k = draw(2, 2, 2, queries, call.key_width), draw(2, 2, keys, call.key_width)
    v = draw(2, 2, keys, call.value_width)

    def loss(q, k, v, ids):
        def at(length):
            order, own = jnp.arange(length)[None], ids[:, :length]
            return TokenInfo(order, order, own if call.segments else None, own > 0 if call.padding else None, ordered=True)

        return jf.mix(q, k, v, at(queries), at(keys), cfg, crossing=keys != queries).astype(jnp.float32).sum()

    with jax.set_mesh(mesh), not_cached():
        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v, ids).compile()
    assert program.as_text().count("tpu_custom_call") >= 3, "forward, and two of the backward pass"
