"""Integers and floats of few bits: targets of every integer dtype, gradients that are summed, 64 bits where they are on."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
import tiny
from test_loss import lookup, table

import jaxformer as jf

pytestmark = pytest.mark.usefixtures("quick_compilation")

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def of_dtype(dtype, targets):
    targets = np.array([targets], dtype)
    return {"tokens": np.array([[1, 5, 7, 9]], dtype), "targets": targets, "weights": np.ones((1, 4), np.float32)}


@pytest.mark.parametrize(("x64", "chunk"), [(False, None), (False, 3), (True, None)])
def test_targets_may_have_any_integer_dtype(x64, chunk):
    """156 is −100 in uint8, 65,436 in uint16: an id like others. −100 is not trained, whatever the dtype that has it."""
    cfg = lookup(200)
    params = table(np.random.default_rng(0).standard_normal((200, 200)))
    loss = functools.partial(jf.loss, params, cfg=cfg, chunk=chunk)
    jitted = jax.jit(loss)
    with jax.enable_x64(x64):
        expected = float(loss(of_dtype("int32", [126, 7, 5, 7]))[0])
        ignoring = float(loss(of_dtype("int32", [126, 7, -100, 7]))[0])
        assert abs(expected - ignoring) > 0.1
        for dtype in INTEGERS:
            for f in (loss, jitted) if dtype in ("uint8", "int64") else (jitted,):
                found, metrics = f(of_dtype(dtype, [126, 7, 5, 7]))
                assert metrics["weight"] == 4 and float(found) == pytest.approx(expected, rel=1e-6), dtype
                if np.iinfo(dtype).min < 0:
                    found, metrics = f(of_dtype(dtype, [126, 7, -100, 7]))
                    assert metrics["weight"] == 3 and float(found) == pytest.approx(ignoring, rel=1e-6), dtype
        found, metrics = loss(of_dtype("uint8", [156, 156, 156, 7]))
        assert metrics["weight"] == 4
        assert float(found) == pytest.approx(float(loss(of_dtype("int32", [156, 156, 156, 7]))[0]), rel=1e-6)


def test_what_was_100_below_zero_is_refused_where_it_is_no_id():
    cfg, params = lookup(50), table(np.zeros((50, 50)))
    for dtype in ("uint8", "uint16", "uint32", "uint64"):
        wrapped = int(np.array(-100).astype(dtype))
        message = rf"targets\[0, 1\] = {wrapped} is outside the vocabulary of 50; −100, .* does not fit {dtype}"
        with pytest.raises(ValueError, match=message):
            jf.loss(params, of_dtype(dtype, [1, wrapped, 2, 3]), cfg)
        if dtype != "uint64":  # jit itself makes uint32 of it
            assert np.isnan(jax.jit(jf.loss, static_argnums=2)(params, of_dtype(dtype, [1, wrapped, 2, 3]), cfg)[0])
    for wide in (2**32 + 5, -(2**32) + 5, 2**32 - 100):  # what 32 bits would make an id, or −100, of
        batch = of_dtype("int64", [1, wide, 2, 3])
        with pytest.raises(ValueError, match="outside the vocabulary of 50"):
            jf.loss(params, batch, cfg)
        traced = jax.jit(lambda weights, batch=batch: jf.loss(params, batch | {"weights": weights}, cfg)[0])
        assert np.isnan(traced(batch["weights"]))


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_in_bfloat16_are_summed_in_float32(tied):
    """512 equal positions: added up in bfloat16, the sum stops growing at some 256 times a chunk's gradient."""
    cfg = dataclasses.replace(lookup(16), tied_head=tied, param_dtype="bfloat16")
    params = table(np.random.default_rng(0).standard_normal((16, 16)))
    params = jax.tree.map(lambda p: p.astype("bfloat16"), {n: p for n, p in params.items() if n != "head" or not tied})
    ids = np.full((1, 512), 5, np.int32)
    batch = {"tokens": ids, "targets": ids - 2, "weights": np.ones(ids.shape, np.float32)}

    def norms(f, chunks):
        grads = [jax.jit(jax.grad(f), static_argnums=1)(params, chunk) for chunk in chunks]
        grads = [x["embedding"]["token"] if tied else x["head"]["kernel"] for x in grads]
        assert {x.dtype.name for x in grads} == {"bfloat16"}
        return [np.linalg.norm(np.asarray(x, np.float64)) for x in grads]

    whole, by_one = norms(lambda params, chunk: jf.loss(params, batch, cfg, chunk=chunk)[0], (None, 1))
    np.testing.assert_allclose(by_one, whole, rtol=2**-7)  # each chunk's is rounded to bfloat16, and their sum
    whole, by_one = norms(lambda params, chunk: jf.logprobs(params, ids, cfg, chunk=chunk).sum(), (512, 1))
    np.testing.assert_allclose(by_one, whole, rtol=2**-7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_microbatches_are_summed_in_float32(dtype):
    """512 rows whose gradients are 1,000 each: float16 does not hold their sum, 512,000, and bfloat16 would stop at 256,000."""

    def objective(params, batch, rng):
        return (params["p"].astype("float32") * batch["x"]).sum(), {"weight": jax.numpy.float32(len(batch["x"]))}

    optimizer = jf.training.with_master(optax.sgd(1e-3))
    state = jf.training.init_state({"p": jax.numpy.zeros((), dtype)}, optimizer, jax.random.key(0))
    update = jf.training.make_update(objective, optimizer, microbatches=512)
    state, metrics = jax.jit(update)(state, {"x": np.full(512, 1000, np.float32)})
    assert float(metrics["grad_norm"]) == 1000 and float(state.params["p"]) == -1


# 64 bits where they are on


@functools.cache
def small(name):
    cfg = tiny.PRESETS["llama_gqa" if name == "mtp" else name]
    cfg = dataclasses.replace(cfg, mtp=name == "mtp", n_layers=1, encoder_layers=min(1, cfg.encoder_layers))
    return cfg, tiny.drawn(cfg)


SAMPLING = jf.Sampling(top_k=9, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.5)


def drafts():
    cfg, params = small("llama_gqa")
    return {"lookup": jf.PromptLookup(2), "model": jf.DraftModel(params, cfg, ahead=2)}


def generated(name, **given):
    cfg, params = small(name)
    key = None if "sampling" not in given else jax.random.key(3)
    out = jf.generate(params, [[5, 9, 11], [9, 11, 5, 9, 11]], cfg, max_new_tokens=6, key=key, **given, **tiny.inputs(cfg))
    return out.tokens, out.lengths, out.logprobs


def searched(name):
    cfg, params = small(name)
    out = jf.beam_search(params, [[5, 9, 11], [7, 3]], cfg, max_new_tokens=5, num_beams=3, eos=[2], **tiny.inputs(cfg))
    return out.tokens, out.lengths, out.scores


def as_arrays(name):
    cfg, params = small(name)

    @jax.jit
    def f(prompts, lengths, temperature):
        sampling = {"temperature": temperature, "top_p": 0.9}
        given = {"sampling": sampling, "key": jax.random.key(3), **tiny.inputs(cfg)}
        return jf.decode.generate_arrays(params, prompts, lengths, cfg, max_new_tokens=4, **given).tokens

    return f(np.array([[5, 9, 11, 0], [7, 3, 20, 41]]), np.array([3, 4]), 1.0)


def trained(name):
    cfg, params = small(name)
    cfg = tiny.with_dropout(cfg)
    optimizer = jf.training.optimizer(jf.OptimConfig(ema=0.9), cfg, 10)
    state = jf.training.init_state(params, optimizer, jax.random.key(0))
    update = jax.jit(jf.training.make_update(jf.training.next_token(cfg, loss_chunk=4), optimizer, microbatches=2))
    batch = {entry: x.astype(np.int64) if x.dtype == np.int32 else x for entry, x in tiny.batch(cfg).items()}
    state, _ = update(state, batch)
    state, metrics = update(state, batch)  # what comes out goes in again
    return metrics["loss"], metrics["grad_norm"], state.params, state.opt_state


WAYS = {
    "greedy": generated,
    "sampled": functools.partial(generated, sampling=SAMPLING, eos=(2, 4)),
    "lookup": lambda name: generated(name, draft=drafts()["lookup"]),
    "lookup, sampled": lambda name: generated(name, draft=drafts()["lookup"], sampling=SAMPLING),
    "draft model": lambda name: generated(name, draft=drafts()["model"], eos=(2, 4)),
    "draft model, sampled": lambda name: generated(name, draft=drafts()["model"], sampling=SAMPLING),
    "mtp": lambda name: generated(name, draft=jf.MultiToken()),
    "beams": searched,
    "arrays": as_arrays,
    "update": trained,
}
CASES = [("llama_gqa", way) for way in WAYS if way != "mtp"] + [("mtp", "mtp")]
CASES += [(name, way) for name in ("transformer_base", "deepseek", "gpt2", "mistral") for way in ("lookup", "beams", "update")]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_64_bits_change_nothing(name, way):
    """Every method gives the tokens, and every array the dtype, that it has without them."""
    expected = jax.tree.map(np.asarray, WAYS[way](name))
    with jax.enable_x64(True):
        found = jax.tree.map(np.asarray, WAYS[way](name))

    def same(found, expected):
        assert found.dtype == expected.dtype
        # float32 sums in another order, through two updates
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 if found.dtype.kind == "f" else 0)

    jax.tree.map(same, found, expected)
