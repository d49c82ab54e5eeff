"""Multi-token prediction: its block and its loss by hand, and its guesses in decoding."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_speculative as speculative
import tiny

import jaxformer as jf
from jaxformer.nn import block, mtp, norm
from jaxformer.nn import cache_spec as caches
from jaxformer.training.objective import NextToken
from tests.states import initial, update

pytestmark = pytest.mark.usefixtures("quick_compilation")
BASES = ["llama_gqa", "mistral", "deepseek"]
NEW = 12
hidden_of = jax.jit(jf.hidden, static_argnums=2)
after_next = jax.jit(jf.model.after_next, static_argnums=3)


def model(name="llama_gqa", **fields):
    cfg = dataclasses.replace(tiny.PRESETS[name], mtp=True, **fields)
    return cfg, tiny.drawn(cfg)


def test_the_block_is_what_the_paper_says():
    cfg, params = model()
    tokens = tiny.tokens(cfg)
    hidden = jf.hidden(params, tokens[:, :-1], cfg)
    own = params["mtp"]
    embedded = params["embedding"]["token"][tokens[:, 1:]]
    both = jnp.concatenate([norm.apply(own["token_norm"], embedded, cfg), norm.apply(own["hidden_norm"], hidden, cfg)], -1)
    x = both @ jnp.concatenate([own["join_token"], own["join_hidden"]])
    expected = norm.apply(own["norm"], block.apply(own["layer"], x, cfg.layers[-1]).x_BTD, cfg)
    found = jf.model.after_next(params, hidden, tokens[:, 1:], cfg).hidden
    np.testing.assert_allclose(found, expected, atol=1e-4)  # sums in another order, of values up to 10
    with pytest.raises(ValueError, match="mtp=False"):
        jf.model.after_next(params, hidden, tokens[:, 1:], tiny.PRESETS["llama_gqa"])


@pytest.mark.parametrize("name", BASES)
def test_with_a_cache_it_is_the_same(name):
    cfg, params = model(name)
    tokens = tiny.tokens(cfg)
    hidden = hidden_of(params, tokens[:, :-1], cfg)
    whole = np.asarray(after_next(params, hidden, tokens[:, 1:], cfg).hidden)
    cache, out = jf.init_cache(mtp.config(cfg), 2, 16), []
    for start, stop in ((0, 3), (3, 4), (4, 8)):
        piece, cache, _ = after_next(params, hidden[:, start:stop], tokens[:, 1:][:, start:stop], cfg, cache=cache)
        out.append(piece)
    np.testing.assert_allclose(np.concatenate(out, 1), whole, atol=1e-4)
    assert caches.size(cache) < caches.size(jf.init_cache(cfg, 2, 16)), "one layer"


def test_its_loss_by_hand():
    """Documents keep apart, and what does not count does not count for the token before it either."""
    cfg, params = model()
    tokens = tiny.tokens(cfg, batch=2, length=9)
    weights = np.ones((2, 8), np.float32)
    weights[0, 1], weights[1, 6:] = 0, 0  # within a document: what is not trained is read all the same
    segments = np.repeat([[0, 0, 0, 0, 1, 1, 1, 1]], 2, 0)
    data = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights, "segments": segments}
    data["targets"] = np.where(weights == 0, -100, data["targets"])
    total, sums = jax.jit(NextToken(cfg))(params, data)
    plain = dataclasses.replace(cfg, mtp=False)
    without = {name: part for name, part in params.items() if name != "mtp"}
    nll = NextToken(plain)(without, data)[0]

    hidden = jf.hidden(params, data["tokens"], cfg, segments=segments)
    later = jf.model.after_next(params, hidden, tokens[:, 1:], cfg, segments=segments).hidden
    logits = jf.model.head(params, later, cfg)
    counts = [
        (row, at)
        for row in range(2)
        for at in range(7)
        if weights[row, at] and weights[row, at + 1] and segments[row, at] == segments[row, at + 1]
    ]
    assert float(sums["mtp_weight"]) == len(counts) == 1 + 3 + 3 + 1
    each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 2:])
    by_hand = sum(float(each[row, at]) for row, at in counts)
    np.testing.assert_allclose(sums["mtp_nll"], by_hand, rtol=1e-5)
    np.testing.assert_allclose(total, nll + 0.3 * by_hand, rtol=1e-5)
    chunked = NextToken(cfg, loss_chunk=3, mtp_weight=0.5)(params, data)[0]
    np.testing.assert_allclose(chunked, nll + 0.5 * by_hand, rtol=1e-5)
    _, metrics = jf.loss(params, data, cfg)
    assert float(metrics["mtp_loss"]) == pytest.approx(by_hand / len(counts), rel=1e-5)


# As a draft


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("name", BASES)
def test_greedy_is_plain_greedy(name, ahead):
    """Ragged prompts, in chunks; rings that take tokens back; experts; a latent cache."""
    cfg, params = model(name)
    given = {"max_new_tokens": NEW, "top_logprobs": 2, "prefill_chunk": 4}
    expected = jf.generate(params, speculative.PROMPTS, cfg, **given)
    out = jf.generate(params, speculative.PROMPTS, cfg, **given, draft=jf.MultiToken(ahead=ahead))
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_array_equal(out.top_tokens, expected.top_tokens)
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-4)  # as in test_speculative


def test_what_it_has_learned_it_guesses():
    """Trained on one cycle, it knows the token after the next: nearly all of its guesses are right, the first too, for which
    it must have read the prompt."""
    cfg = jf.presets.llama(vocab_size=20, d_model=32, n_layers=1, n_heads=2, max_length=64, mtp=True)
    cycle = np.tile([3, 7, 5, 11, 2, 13], 6)
    tokens = np.stack([cycle[i : i + 25] for i in range(6)])
    data = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((6, 24), np.float32)}
    params, adam = tiny.drawn(cfg), optax.adam(1e-2)

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            gradient = jax.grad(lambda params: jf.loss(params, data, cfg)[0])(params)
            updates, state = adam.update(gradient, state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, adam.init(params)), None, length=60)[0][0]

    params = train(params)
    prompts = [cycle[:9].tolist(), cycle[3:8].tolist()]
    expected = jf.generate(params, prompts, cfg, max_new_tokens=16)
    for ahead in (1, 2):
        out = jf.generate(params, prompts, cfg, max_new_tokens=16, num_return=2, draft=jf.MultiToken(ahead=ahead))
        np.testing.assert_array_equal(out.tokens[:, 0], expected.tokens)
        np.testing.assert_array_equal(out.tokens[:, 1], expected.tokens)
        assert float(out.acceptance.min()) == 1.0 if ahead == 1 else float(out.acceptance.min()) > 0.4


def test_samples_have_the_distribution_of_plain_sampling():
    cfg = jf.presets.llama(vocab_size=6, d_model=16, n_layers=1, n_heads=2, max_length=32, mtp=True)
    params = tiny.drawn(cfg)
    sampling = jf.Sampling(temperature=1.3, top_p=0.9)
    expected = speculative.exact(params, cfg, sampling)
    counts, acceptance = speculative.cells(params, cfg, sampling, jax.random.key(1), jf.MultiToken(ahead=2))
    assert 0.05 < float(acceptance.mean()) < 0.95, "both branches of the rule are taken"
    assert isinstance(counts, collections.Counter) and set(counts) <= set(expected)
    assert speculative.chi_square_excess(counts, expected, speculative.DRAWS) < 5  # as in test_speculative
    other = speculative.exact(params, cfg, dataclasses.replace(sampling, temperature=1.1))
    assert speculative.chi_square_excess(counts, other, speculative.DRAWS) > 5


def test_its_experts_are_balanced_with_the_others():
    cfg, params = model("deepseek")
    experts = dataclasses.replace(cfg.experts, layers=(2,))
    cfg = dataclasses.replace(cfg, experts=experts, balance_rate=0.01, balance_loss=0.1)
    params, data = tiny.drawn(cfg), tiny.batch(cfg, 4)
    sums = jax.jit(NextToken(cfg))(params, data)[1]
    assert sums["load"].shape == (2, 4), "one layer of the decoder, and the block"
    assert 0 < float(sums["tokens"][1]) == float(sums["mtp_weight"]) < float(sums["tokens"][0])
    state = initial(cfg, jf.OptimConfig(warmup_steps=0), 10)
    load = NextToken(cfg)(state.params, data)[1]["load"]
    after = jax.jit(update(cfg, jf.OptimConfig(warmup_steps=0), 10))(state, data)[0].params
    biases = [after["decoder"]["layers"]["moe"]["bias"][0], after["mtp"]["layer"]["moe"]["bias"]]
    np.testing.assert_allclose(biases, 0.01 * np.sign(load.mean(-1, keepdims=True) - load), atol=1e-7)
    assert all(np.asarray(bias).any() for bias in biases)


def test_what_cannot_be():
    cfg = tiny.PRESETS["llama_gqa"]
    with pytest.raises(ValueError, match="needs a model with mtp"):
        jf.generate(tiny.drawn(cfg), [[1]], cfg, max_new_tokens=2, draft=jf.MultiToken())
    with pytest.raises(ValueError, match="ahead=0 must be at least 1"):
        jf.MultiToken(ahead=0)
    for wrong in (jf.presets.gpt2, jf.presets.transformer_base):
        with pytest.raises(ValueError, match="mtp=True needs a decoder-only causal model"):
            wrong(mtp=True)
