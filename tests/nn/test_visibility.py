"""Over all presets, what reaches what: causality and packing by exactly zero gradients, padding that changes nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf

pytestmark = pytest.mark.usefixtures("quick_compilation")
T, A = 7, 3  # a row, and its first document when it is packed: A(3) + B(4)
CFG = {name: dataclasses.replace(cfg, scan=True) for name, cfg in tiny.PRESETS.items()}
DECODERS = [name for name, cfg in CFG.items() if not cfg.encoder_layers]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # float32 sums over other lengths


@functools.cache
def parameters(name):
    return tiny.drawn(CFG[name])


def ids(cfg, rows=1):
    """Rows without a repeated token, so that a row of the embedding table stands for one position."""
    rng = np.random.default_rng(0)
    return np.array([3 + rng.permutation(cfg.vocab_size - 3)[:T] for _ in range(rows)], np.int32)


def given(cfg, rows=1, but=()):
    """The source of an encoder–decoder, without the tokens ``but``."""
    inputs = tiny.inputs(cfg, rows)
    if inputs:
        others = np.setdiff1d(np.arange(3, cfg.vocab_size), but)
        inputs["source"] = np.random.default_rng(1).choice(others, inputs["source"].shape).astype(np.int32)
    return inputs


@functools.cache
def influence(name):
    """The compiled function (params, ids, segments) -> [T, T]: how much each position's logits move with each embedding."""
    cfg = CFG[name]
    weights_V = np.random.default_rng(2).standard_normal(cfg.vocab_size).astype(np.float32)

    @jax.jit
    def run(params, ids, segments):
        def logits(table):
            read = params | {"embedding": {"token": table}}
            hidden = jf.hidden(read, ids, cfg, segments=segments, **given(cfg, but=ids_of_row))
            return jf.model.head(params, hidden, cfg)[0] @ weights_V  # the head may share the table: that use stays fixed

        ids_of_row = globals()["ids"](cfg)[0]
        jacobian_TVD = jax.jacrev(logits)(params["embedding"]["token"])
        return jnp.abs(jacobian_TVD[:, ids[0]]).max(-1)

    return run


@pytest.mark.parametrize("name", CFG)
def test_no_logit_moves_with_a_later_embedding(name):
    found = influence(name)(parameters(name), ids(CFG[name]), np.ones((1, T), np.int32))
    assert (np.asarray(found > 0) == np.tril(np.ones((T, T), bool))).all()


@pytest.mark.parametrize("name", DECODERS)
def test_a_packed_document_moves_with_its_own_embeddings_only(name):
    segments = np.array([[1] * A + [2] * (T - A)])
    found = np.asarray(influence(name)(parameters(name), ids(CFG[name]), segments) > 0)
    expected = np.tril(np.ones((T, T), bool)) & (segments[0][:, None] == segments[0])
    assert (found == expected).all()


def test_an_encoder_that_is_not_causal_sees_everything():
    cfg = dataclasses.replace(CFG["llama_gqa"], causal=False, n_layers=1)
    params, row = tiny.drawn(cfg), ids(cfg)
    moved = jax.jit(lambda row: jf.forward(params, row, cfg))(np.where(np.arange(T) == T - 1, 3 + (row - 2) % 60, row))
    plain = jax.jit(lambda row: jf.forward(params, row, cfg))(row)
    assert (np.abs(moved - plain).max(-1) > 1e-3).all()


@functools.cache
def forward(name):
    cfg = CFG[name]
    return jax.jit(lambda params, ids, given: jf.forward(params, ids, cfg, **given))


@pytest.mark.parametrize("name", DECODERS)
def test_packed_logits_are_those_of_each_document_alone(name):
    run, params, row = forward(name), parameters(name), ids(CFG[name])
    segments, restarting = np.array([[1] * A + [2] * (T - A)]), np.array([[*range(A), *range(T - A)]])
    packed = run(params, row, {"segments": segments, "positions": restarting})
    alone = [run(params, row[:, :A], {}), run(params, row[:, A:], {})]
    np.testing.assert_allclose(packed, np.concatenate(alone, 1), **CLOSE)
    # Restarting the positions is not enough: without segments the second document sees the first
    open_ = run(params, row, {"segments": np.ones_like(segments), "positions": restarting})
    assert np.abs(open_ - packed)[:, A:].max() > 0.01
    if CFG[name].position in ("learned", "sinusoidal"):
        kept_on = run(params, row, {"segments": segments, "positions": np.arange(T)[None]})
        assert np.abs(kept_on - packed)[:, A:].max() > 0.01


def test_positions_restart_with_every_segment_unless_given():
    segments = np.array([[1] * A + [2] * (T - A), [5, 5, 6, 7, 7, 7, 7]])
    info = jf.model.inputs.token_info("", segments.shape, CFG["gpt2"], segments=segments)
    assert info.position.tolist() == [[*range(A), *range(T - A)], [0, 1, 0, 0, 1, 2, 3]]


LENGTHS = np.array([3, 4, 4, 3])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", CFG)
def test_padded_rows_are_each_row_alone(name, side):
    """Padding of id 0, whose embedding is 1,000 in the padded run, so that the smallest weight on it would show."""
    cfg, run, params = CFG[name], forward(name), parameters(name)
    rows, source = ids(cfg, len(LENGTHS)), given(cfg, len(LENGTHS))
    valid = np.arange(T) < LENGTHS[:, None]
    valid = valid[:, ::-1] if side == "left" else valid
    padded = np.zeros_like(rows)
    padded[valid] = np.concatenate([row[:n] for row, n in zip(rows, LENGTHS, strict=True)])
    loud = params | {"embedding": {"token": params["embedding"]["token"].at[0].set(1000.0)}}
    logits = np.asarray(run(loud, padded, {"valid": valid, **source}))
    seen = np.asarray(run(loud, padded, {"valid": np.ones_like(valid), **source}))
    # unmasked, padding on the left shows; causality alone hides it on the right
    assert (np.abs(seen - logits)[0, valid[0], 1:].max() > 0.1) == (side == "left")
    for i, n in enumerate(LENGTHS):
        alone = run(params, rows[i : i + 1, :n], {k: v[i : i + 1] for k, v in source.items()})
        # column 0 of a tied head is the padding's own embedding
        np.testing.assert_allclose(logits[i, valid[i], 1:], alone[0, :, 1:], **CLOSE)
