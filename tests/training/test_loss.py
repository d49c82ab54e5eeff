"""The training loss: what it averages over, what it refuses, and its chunked form for large vocabularies."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxformer as jf
from jaxformer.config.components import Component
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

NO_NORM = Component(lambda cfg, dim="D": {}, lambda params, x, cfg: x)
NO_ATTENTION = Component(lambda cfg: {}, lambda params, x_BTD, cfg, **where: (jnp.zeros_like(x_BTD), None))
NO_MLP = Component(lambda cfg: {}, lambda params, x_BTD, cfg: jnp.zeros_like(x_BTD))


def lookup(vocab_size: int) -> jf.ModelConfig:
    """A model whose logits after token i are row i of its embedding table, so that a test can choose them."""
    parts = {"attention": NO_ATTENTION, "mlp": NO_MLP, "norm": NO_NORM, "position": "none"}
    return jf.ModelConfig(vocab_size=vocab_size, d_model=vocab_size, n_layers=1, n_heads=1, **parts)


def table(logits_VV) -> dict:
    """Parameters of ``lookup`` that give these logits."""
    logits_VV = jnp.asarray(logits_VV, jnp.float32)
    layers = {name: {} for name in ("attention", "attention_norm", "mlp", "mlp_norm")}
    decoder = {"layers": layers, "norm": {}}
    return {"embedding": {"token": logits_VV}, "decoder": decoder, "head": {"kernel": jnp.eye(len(logits_VV))}}


def batch_of(tokens, targets, weights=None) -> dict:
    targets = np.asarray(targets, np.int32)
    weights = np.ones(targets.shape, np.float32) if weights is None else np.asarray(weights, np.float32)
    return {"tokens": np.asarray(tokens, np.int32), "targets": targets, "weights": weights}


def shallow(name: str) -> jf.ModelConfig:
    """A preset with one layer a stack: depth is not the loss's concern."""
    cfg = tiny.PRESETS[name]
    return dataclasses.replace(cfg, n_layers=1, encoder_layers=min(1, cfg.encoder_layers))


def with_ignored(cfg: jf.ModelConfig) -> dict:
    """A batch in which a target with a weight is −100."""
    batch = tiny.batch(cfg)
    batch["targets"] = batch["targets"].copy()  # not the array that tokens are a view of
    batch["targets"][2, 1] = -100
    assert batch["weights"][2, 1] > 0
    return batch


def test_lookup_model_gives_the_logits_of_its_table():
    logits = np.random.default_rng(0).standard_normal((5, 5)).astype(np.float32)
    found = jf.forward(table(logits), np.array([[3, 0, 4]]), lookup(5))
    np.testing.assert_array_equal(found[0], logits[[3, 0, 4]])  # products with 0 and 1 alone: exact


def test_mean_over_all_tokens_of_the_step():
    """nll 4 once and 0.5 seven times: 7.5 / 8, not the mean 2.25 of the rows' means."""
    other = np.log(np.expm1([4.0, 0.5]))  # of two logits (0, x), the first has nll log(1 + e^x)
    params = table([[0.0, other[0]], [0.0, other[1]]])
    tokens = np.ones((2, 7), np.int32)
    tokens[0, 0] = 0
    weights = np.ones((2, 7))
    weights[0, 1:] = 0.0
    loss, metrics = jf.loss(params, batch_of(tokens, np.zeros((2, 7)), weights), lookup(2))
    # 1e-6: eight float32 logarithms, rounded at about 1e-7 each
    np.testing.assert_allclose(loss, 0.9375, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], 0.9375, rtol=1e-6)
    assert metrics["weight"] == 8.0
    rows = [jf.loss(params, batch_of(tokens[r : r + 1], np.zeros((1, 7)), weights[r : r + 1]), lookup(2))[0] for r in (0, 1)]
    np.testing.assert_allclose(sum(rows) / 2, 2.25, rtol=1e-6)  # the two means differ: the test could fail


@pytest.mark.parametrize("vocab_size", [8, 200])
def test_an_ignored_target_never_indexes(vocab_size):
    """−100 is a valid index from the end for V = 200, and a clamped one for V = 8: neither may be read."""
    logits = np.random.default_rng(1).standard_normal((vocab_size, vocab_size)).astype(np.float32)
    batch = batch_of([[1, 2]], [[3, -100]])
    total = lambda params: jf.loss(params, batch, lookup(vocab_size))[0]
    loss, grads = jax.value_and_grad(total)(table(logits))
    expected = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits[1]), jnp.asarray(3))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)  # one float32 logsumexp, in another order of additions
    rows = np.asarray(grads["embedding"]["token"])  # row i: the gradient with respect to the logits after token i
    assert np.abs(rows[1]).max() > 0.01
    assert not rows[2].any()


def test_agrees_with_optax_on_a_transformer():
    cfg = shallow("llama_gqa")
    params, batch = tiny.drawn(cfg), with_ignored(cfg)
    counted = batch["weights"] * (batch["targets"] >= 0)
    assert 0 < counted.sum() < batch["weights"].sum() < counted.size

    def reference(params):
        logits = jf.forward(params, batch["tokens"], cfg)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, np.maximum(batch["targets"], 0))
        return (nll * counted).sum() / counted.sum(), logits

    (expected, logits), expected_grads = jax.jit(jax.value_and_grad(reference, has_aux=True))(params)
    (loss, metrics), grads = jax.jit(jax.value_and_grad(lambda p: jf.loss(p, batch, cfg), has_aux=True))(params)
    assert np.isfinite(expected)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)  # sums of about 20 float32 numbers
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), grads, expected_grads)  # the same sums
    hits = (np.argmax(logits, -1) == batch["targets"]) * counted
    np.testing.assert_allclose(metrics["accuracy"], hits.sum() / counted.sum(), rtol=1e-6)


def test_fractional_weights_are_a_weighted_mean():
    logits = np.random.default_rng(2).standard_normal((6, 6)).astype(np.float32)
    tokens, targets, weights = np.array([[0, 1, 2, 3]]), np.array([[5, 4, 3, 2]]), np.array([[0.25, 2.0, 0.0, 1.5]])
    nll = np.log(np.exp(logits).sum(1))[tokens[0]] - logits[tokens[0], targets[0]]
    loss, metrics = jf.loss(table(logits), batch_of(tokens, targets, weights), lookup(6))
    assert abs(nll.mean() - np.average(nll, weights=weights[0])) > 0.01
    np.testing.assert_allclose(loss, np.average(nll, weights=weights[0]), rtol=1e-6)  # four float32 terms
    assert metrics["weight"] == 3.75


def test_label_smoothing_is_cross_entropy_with_the_smoothed_target():
    """−Σ q log p with q = (1 − ε)·one-hot + ε / V (Szegedy et al. 2016); the metric stays the plain loss."""
    size, epsilon = 7, 0.2
    logits = np.random.default_rng(3).standard_normal((size, size))
    tokens, targets = np.array([[0, 1], [2, 3]]), np.array([[4, 6], [0, 3]])
    weights = np.array([[1.0, 1.0], [0.0, 1.0]])
    log_p = (logits - np.log(np.exp(logits).sum(1, keepdims=True)))[tokens]
    smoothed = (1 - epsilon) * np.eye(size)[targets] + epsilon / size
    expected, plain = (-(q * log_p).sum(-1) * weights for q in (smoothed, np.eye(size)[targets]))
    loss, metrics = jf.loss(table(logits), batch_of(tokens, targets, weights), lookup(size), label_smoothing=epsilon)
    assert abs(expected.sum() - plain.sum()) > 0.01
    np.testing.assert_allclose(loss, expected.sum() / 3, rtol=1e-6)  # three float32 terms
    np.testing.assert_allclose(metrics["loss"], plain.sum() / 3, rtol=1e-6)


def z_loss_by_hand(logits, weights):
    return (np.log(np.exp(np.float64(logits)).sum(-1)) ** 2 * weights).sum()


@pytest.mark.parametrize("loss_chunk", [None, 3])
def test_z_loss_is_the_squared_logsumexp_of_what_counts(loss_chunk):
    """Chowdhery et al. 2022, section 5: the weight times the mean of (log Z)², over counted tokens alone, in chunks too."""
    cfg = shallow("llama_gqa")
    params, batch = tiny.drawn(cfg), with_ignored(cfg)
    weights = batch["weights"] * (batch["targets"] >= 0)
    by_hand = z_loss_by_hand(jf.forward(params, batch["tokens"], cfg), weights)
    assert abs(by_hand - z_loss_by_hand(jf.forward(params, batch["tokens"], cfg), batch["weights"])) > 1, "what is not counted"
    objective = jf.training.next_token(cfg, z_loss=0.1, loss_chunk=loss_chunk)
    total, sums = jax.jit(objective)(params, batch)
    plain, _ = jax.jit(jf.training.next_token(cfg, loss_chunk=loss_chunk))(params, batch)
    np.testing.assert_allclose(total - plain, 0.1 * by_hand, rtol=1e-5)  # a difference of sums of some 20 float32 terms
    metrics = objective.metrics(sums)
    np.testing.assert_allclose(metrics["z_loss"], by_hand / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], plain / weights.sum(), rtol=1e-6)
    assert "z_loss" not in objective.validation(params, batch, None)[1]
    with pytest.raises(ValueError, match="z_loss=-1.0 must be at least 0"):
        jf.training.next_token(cfg, z_loss=-1.0)


@pytest.mark.parametrize("chunk", [None, 2])
def test_nothing_to_learn_is_zero_with_zero_gradients(chunk):
    cfg = shallow("gpt2")
    batch = tiny.batch(cfg) | {"weights": np.zeros((4, 8), np.float32)}
    total = lambda params: jf.loss(params, batch, cfg, chunk=chunk)
    (loss, metrics), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(tiny.drawn(cfg))
    assert loss == 0.0 and metrics["loss"] == 0.0 and metrics["weight"] == 0.0
    assert all((np.asarray(leaf) == 0.0).all() for leaf in jax.tree.leaves(grads))  # NaN would not be


def test_encoder_decoder_reads_its_source_but_not_the_padding():
    cfg = shallow("transformer_base")
    params, batch = tiny.drawn(cfg), tiny.batch(cfg)
    loss = jax.jit(lambda batch: jf.loss(params, batch, cfg)[0])
    other, padding = (dict(batch, source=batch["source"].copy()) for _ in range(2))
    other["source"][0, 0] += 1
    padding["source"][~batch["source_valid"]] += 1
    assert (padding["source"] != batch["source"]).any()
    assert loss(other) != loss(batch)
    assert loss(padding) == loss(batch)


# Chunks


@pytest.mark.parametrize(("name", "label_smoothing"), [("llama_gqa", 0.1), ("gpt2", 0.0), ("transformer_base", 0.1)])
def test_chunked_equals_dense(name, label_smoothing):
    cfg = shallow(name)
    params, batch = tiny.drawn(cfg), with_ignored(cfg)  # T = 8, of which 3 is no divisor

    def total(params, chunk):
        return jf.loss(params, batch, cfg, label_smoothing=label_smoothing, chunk=chunk)

    gradient = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=1)
    dense, chunked = gradient(params, None), gradient(params, 3)
    assert np.isfinite(dense[0][0]) and dense[0][1]["weight"] > 0
    # float32 sums over at most 32 positions in another order
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), chunked, dense)


def float32_sizes(program: str) -> list[int]:
    """Numbers of elements of all float32 arrays in a StableHLO or HLO text."""
    shapes = re.findall(r"tensor<((?:\d+x)+)f32>", program) + re.findall(r"\bf32\[([\d,]+)\]", program)
    return [int(np.prod([int(n) for n in re.split("[x,]", shape) if n])) for shape in shapes]


@pytest.fixture
def full_compilation(quick_compilation):
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def test_chunked_program_holds_no_logits_of_the_whole_sequence(full_compilation):
    rows, length, vocab_size = 2, 23, 97
    cfg = jf.presets.llama(vocab_size=vocab_size, d_model=8, n_layers=1, n_heads=1, d_ff=16, tied_head=True)
    params, batch = tiny.drawn(cfg), tiny.batch(cfg, rows, length)

    def sizes(chunk):
        lowered = jax.jit(jax.grad(lambda p, b: jf.loss(p, b, cfg, chunk=chunk)[0])).lower(params, batch)
        return float32_sizes(lowered.as_text()), float32_sizes(lowered.compile().as_text())

    for dense, chunked in zip(sizes(None), sizes(5), strict=True):
        assert max(dense) >= rows * length * vocab_size  # they are seen where they exist
        assert rows * 5 * vocab_size in chunked  # a chunk's logits are too
        assert max(chunked) < length * vocab_size  # no array of any shape is as large as one row's


# What is refused


@pytest.mark.parametrize("bad", [8, 100, -1, -99])
def test_a_target_outside_the_vocabulary_raises(bad):
    targets = np.array([[1, 2, 3], [4, bad, 5]])
    with pytest.raises(ValueError, match=rf"targets\[1, 1\] = {bad} is outside the vocabulary of 8"):
        jf.loss(table(np.zeros((8, 8))), batch_of(np.zeros((2, 3)), targets), lookup(8))


@pytest.mark.parametrize("bad", [8, -1, -100])
@pytest.mark.parametrize("entry", ["tokens", "source"])
def test_an_id_outside_the_vocabulary_raises(entry, bad):
    cfg = jf.presets.transformer_base(vocab_size=8, d_model=4, n_layers=1, n_heads=1)
    batch = batch_of(np.ones((2, 3)), np.ones((2, 3))) | {"source": np.ones((2, 3), np.int32)}
    batch[entry][1, 2] = bad
    with pytest.raises(ValueError, match=rf"{entry}\[1, 2\] = {bad} is outside the vocabulary of 8"):
        jf.loss(tiny.drawn(cfg), batch, cfg)


@pytest.mark.parametrize(("entry", "bad"), [("targets", 8), ("targets", -1), ("tokens", 8), ("tokens", -1)])
def test_inside_jit_an_id_outside_the_vocabulary_is_nan_not_clamped(entry, bad):
    batch = batch_of([[1, 2, 3]], [[2, 3, 4]])
    loss = jax.jit(lambda batch: jf.loss(table(np.eye(8)), batch, lookup(8))[0])
    assert np.isfinite(loss(batch))
    batch[entry][0, 1] = bad
    assert np.isnan(loss(batch))


def test_an_untrained_target_may_be_outside_the_vocabulary():
    batch = batch_of([[1, 2]], [[3, 999]], [[1.0, 0.0]])
    loss = lambda batch: jf.loss(table(np.eye(8)), batch, lookup(8))[0]
    expected = np.log(np.e + 7)  # logits of token 1: one 1, and seven 0, among them the target's
    np.testing.assert_allclose(loss(batch), expected, rtol=1e-6)  # one float32 logsumexp
    np.testing.assert_allclose(jax.jit(loss)(batch), expected, rtol=1e-6)


@pytest.mark.parametrize("entry", ["tokens", "targets", "weights"])
def test_a_missing_entry_is_named(entry):
    batch = batch_of([[1]], [[2]])
    del batch[entry]
    with pytest.raises(ValueError, match=f"lacks {entry}"):
        jf.loss(table(np.eye(8)), batch, lookup(8))


def test_a_missing_source_is_named():
    cfg = tiny.PRESETS["transformer_base"]
    batch = tiny.batch(cfg)
    del batch["source"]
    with pytest.raises(ValueError, match="lacks source"):
        jf.loss(tiny.drawn(cfg), batch, cfg)


@pytest.mark.parametrize(("entry", "near"), [("segment_ids", "segments"), ("target", "targets"), ("source_mask", "source")])
def test_an_unknown_entry_names_the_nearest(entry, near):
    with pytest.raises(ValueError, match=f"unknown entry '{entry}'; did you mean '{near}"):
        jf.loss(table(np.eye(8)), batch_of([[1]], [[2]]) | {entry: np.ones((1, 1), np.int32)}, lookup(8))


@pytest.mark.parametrize("entry", ["targets", "weights"])
def test_shapes_that_differ_are_named(entry):
    batch = batch_of([[1, 2]], [[2, 3]])
    batch[entry] = batch[entry][:, :1]  # would broadcast
    with pytest.raises(ValueError, match=rf"'{entry}' has shape \(1, 1\), but tokens have \(1, 2\)"):
        jf.loss(table(np.eye(8)), batch, lookup(8))


def test_targets_must_be_integers():
    with pytest.raises(ValueError, match="'targets' must be integers, not float32"):
        jf.loss(table(np.eye(8)), batch_of([[1]], [[2]]) | {"targets": np.ones((1, 1), np.float32)}, lookup(8))


@pytest.mark.parametrize("chunk", [0, -3])
def test_a_chunk_below_one_raises(chunk):
    with pytest.raises(ValueError, match="chunk"):
        jf.loss(table(np.eye(8)), batch_of([[1]], [[2]]), lookup(8), chunk=chunk)


@pytest.mark.parametrize("label_smoothing", [-0.1, 1.0])
def test_a_share_of_smoothing_outside_its_range_raises(label_smoothing):
    with pytest.raises(ValueError, match="label_smoothing"):
        jf.loss(table(np.eye(8)), batch_of([[1]], [[2]]), lookup(8), label_smoothing=label_smoothing)
