"""Embeddings as input: in place of the table's rows, treated as those are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf

pytestmark = pytest.mark.usefixtures("quick_compilation")
LLAMA = dataclasses.replace(tiny.PRESETS["llama_gqa"], n_layers=1)
MODELS = {
    "llama": LLAMA,
    "gpt2": dataclasses.replace(tiny.PRESETS["gpt2"], n_layers=1),
    "scaled": dataclasses.replace(LLAMA, scale_embedding=True, tied_head=True),
    "types and norm": dataclasses.replace(LLAMA, token_types=2, embedding_norm=True),
    "encoder-decoder": dataclasses.replace(tiny.PRESETS["transformer_base"], n_layers=1, encoder_layers=1),
    "bfloat16": dataclasses.replace(LLAMA, dtype="bfloat16"),
}
MASK = np.array([[True, False, True], [False, False, True]])
params_of = functools.cache(tiny.drawn)


def rows_of(cfg, ids):
    return params_of(cfg)["embedding"]["token"][ids]


def given(cfg):
    return tiny.inputs(cfg) | ({"token_types": np.array([[0, 1, 1]])} if cfg.token_types else {})


def dropped(cfg, **inputs):
    """The hidden states in training."""
    cfg = dataclasses.replace(cfg, embedding_dropout=0.5)
    return jf.hidden(
        params_of(cfg), None if "embeddings" in inputs else inputs.pop("tokens"), cfg, key=jax.random.key(0), **inputs
    )


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_the_table_give_what_their_tokens_give(name):
    cfg = MODELS[name]
    params, ids, more = params_of(cfg), tiny.tokens(cfg, 2, 3), given(cfg)
    rows, others = rows_of(cfg, ids), rows_of(cfg, tiny.tokens(cfg, 2, 3, seed=1))
    logits = jf.forward(params, ids, cfg, **more)
    np.testing.assert_array_equal(jf.forward(params, None, cfg, embeddings=rows, **more), logits)
    mixed = jnp.where(MASK[..., None], rows, jnp.nan)  # what the mask leaves out is not read
    np.testing.assert_array_equal(
        jf.forward(params, np.where(MASK, 0, ids), cfg, embeddings=mixed, embeddings_mask=MASK, **more), logits
    )
    assert np.abs(jf.forward(params, None, cfg, embeddings=others, **more) - logits).max() > 0.1
    np.testing.assert_array_equal(dropped(cfg, embeddings=rows, **more), dropped(cfg, tokens=ids, **more))


@pytest.mark.parametrize("name", ["llama", "encoder-decoder"])
def test_a_cache_reads_embeddings(name):
    cfg = MODELS[name]
    params, ids, more = params_of(cfg), tiny.tokens(cfg, 2, 5), given(cfg)
    rows = rows_of(cfg, ids)
    logits, cache = jf.forward_cached(params, ids[:, :3], cfg, jf.init_cache(cfg, 2, 5), **more)
    soft, soft_cache = jf.forward_cached(params, None, cfg, jf.init_cache(cfg, 2, 5), embeddings=rows[:, :3], **more)
    np.testing.assert_array_equal(soft, logits)
    mixed = {"embeddings": rows[:, 3:], "embeddings_mask": MASK[:, :2]}
    np.testing.assert_array_equal(
        jf.forward_cached(params, ids[:, 3:], cfg, soft_cache, **mixed)[0], jf.forward_cached(params, ids[:, 3:], cfg, cache)[0]
    )


def test_gradients_by_embedding_are_those_by_the_table():
    """Of rows that stand once each; a soft prompt learns by these."""
    params, ids = params_of(LLAMA), np.array([[5, 9, 7]])

    def by(rows):
        return jf.hidden(params, None, LLAMA, embeddings=rows)[:, -1].sum()

    def by_table(table):
        return jf.hidden(params | {"embedding": {"token": table}}, ids, LLAMA)[:, -1].sum()

    gradient = jax.jit(jax.grad(by))(rows_of(LLAMA, ids))
    expected = jax.jit(jax.grad(by_table))(params["embedding"]["token"])[ids]
    assert (np.abs(expected).max(-1) > 1e-3).all()
    np.testing.assert_allclose(gradient, expected, atol=1e-5)  # float32 sums in another order


def test_gradients_stop_where_the_mask_has_tokens():
    batch = tiny.batch(LLAMA, 2, 3)
    rows = rows_of(LLAMA, batch["tokens"]) + 1

    def loss(rows):
        return jf.loss(params_of(LLAMA), batch | {"embeddings": rows, "embeddings_mask": MASK}, LLAMA)[0]

    moved = np.abs(jax.jit(jax.grad(loss))(rows)).max(-1) > 0
    counted = np.cumsum(batch["weights"][:, ::-1], axis=1)[:, ::-1] > 0  # a target at or after the token
    np.testing.assert_array_equal(moved, MASK & counted)
    assert loss(rows) != jf.loss(params_of(LLAMA), batch, LLAMA)[0]


T = [[5, 6, 7], [8, 9, 10]]
E = np.zeros((2, 3, 32), np.float32)
WRONG = [
    (None, {}, r"there are no tokens; give tokens \[B, T\], or embeddings= \[B, T, D\]"),
    (T, {"embeddings": E}, "tokens and embeddings: give embeddings_mask=.*or tokens=None"),
    (None, {"embeddings": E, "embeddings_mask": MASK}, "embeddings_mask chooses between tokens and embeddings"),
    (T, {"embeddings_mask": MASK}, "embeddings_mask has no effect without embeddings"),
    (None, {"embeddings": E.astype(int)}, "embeddings must be of a floating dtype, not int"),
    (None, {"embeddings": E[..., :31]}, r"embeddings have shape \(2, 3, 31\).*d_model=32"),
    (None, {"embeddings": E[0]}, r"embeddings have shape \(3, 32\)"),
    (None, {"embeddings": E[:, :0]}, r"embeddings have shape \(2, 0, 32\)"),
    (T, {"embeddings": E[:, :2], "embeddings_mask": MASK}, r"embeddings has shape \(2, 2, 32\), but tokens have \(2, 3\)"),
    (T, {"embeddings": E, "embeddings_mask": MASK[:, :2]}, r"embeddings_mask has shape \(2, 2\), but tokens have \(2, 3\)"),
    (T, {"embeddings": E, "embeddings_mask": MASK.astype(int)}, "embeddings_mask must be boolean.*not int"),
    ([[5, 6, 67]] * 2, {"embeddings": E, "embeddings_mask": MASK}, r"tokens\[0, 2\] = 67 is outside the vocabulary"),
    (None, {"embeddings": E, "valid": np.ones((2, 2), bool)}, r"valid has shape \(2, 2\)"),
]


@pytest.mark.parametrize(("tokens", "inputs", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_embeddings_are_refused(tokens, inputs, message):
    with pytest.raises(ValueError, match=message):
        jf.forward(params_of(LLAMA), tokens, LLAMA, **inputs)
