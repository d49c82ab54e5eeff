"""Experts: against a plain loop over them, in both dispatches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.config import Experts
from jaxformer.nn.experts import ragged, router

pytestmark = pytest.mark.usefixtures("quick_compilation")
BASE = Experts(n_experts=4, per_token=2, d_ff=12)
SCORES = {
    "softmax": BASE,
    "as they are": dataclasses.replace(BASE, normalize=False, per_token=1),
    "sigmoid": dataclasses.replace(BASE, score="sigmoid", scale=2.5, selection_bias=True, shared=2),
    "groups": dataclasses.replace(BASE, n_experts=6, groups=3, groups_per_token=2, per_token=3, score="sigmoid"),
}


def model(experts, **fields):
    sizes = {"vocab_size": 40, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_length": 32}
    return jf.presets.llama(**sizes | fields, experts=experts)


def layer(cfg, seed=0, tokens=11):
    """Parameters of one layer's experts, and rows to put through it."""
    rng = np.random.default_rng(seed)
    shapes = {path: param.shape(cfg) for path, param in jf.spec.walk(router.spec(cfg))}
    flat = {path: jnp.asarray(rng.normal(size=shape) / shape[-1] ** 0.5, jnp.float32) for path, shape in shapes.items()}
    params = {name: value for name, value in flat.items() if "." not in name}
    if "shared.up" in flat:
        params["shared"] = {path.split(".")[1]: value for path, value in flat.items() if "." in path}
    return params, jnp.asarray(rng.normal(size=(1, tokens, cfg.d_model)), jnp.float32)


def chosen_by_hand(params, x_BTD, experts, room=None):
    """Each token's experts, the best first, and which of them have room for it, first choices first."""
    logits = np.asarray(x_BTD[0] @ params["router"])
    scores = np.asarray(jax.nn.softmax(logits)) if experts.score == "softmax" else 1 / (1 + np.exp(-logits))
    chosen = []
    for row in scores + np.asarray(params.get("bias", 0.0)):
        allowed = list(range(experts.n_experts))
        if experts.groups > 1:
            size = experts.n_experts // experts.groups
            groups = [sorted(row[g * size : (g + 1) * size])[-2:] for g in range(experts.groups)]
            best = sorted(range(experts.groups), key=lambda g: -sum(groups[g]))[: experts.groups_per_token]
            allowed = [e for e in allowed if e // size in best]
        chosen.append(sorted(allowed, key=lambda e: (-row[e], e))[: experts.per_token])
    used = dict.fromkeys(range(experts.n_experts), 0)
    kept = np.zeros((len(chosen), experts.per_token), bool)
    for j in range(experts.per_token):
        for t, mine in enumerate(chosen):
            kept[t, j] = room is None or used[mine[j]] < room
            used[mine[j]] += 1
    return chosen, kept


def by_hand(params, x_BTD, experts, chosen, kept):
    """Token by token and expert by expert."""
    x, out = x_BTD[0], []
    logits = x @ params["router"]
    scores = jax.nn.softmax(logits) if experts.score == "softmax" else 1 / (1 + jnp.exp(-logits))
    for t, mine in enumerate(chosen):
        weight = jnp.stack([scores[t, e] for e in mine])
        weight = (weight / weight.sum() if experts.normalize else weight) * experts.scale
        total = jnp.zeros(x.shape[1])
        for j, e in enumerate(mine):
            hidden = jax.nn.silu(x[t] @ params["gate"][e]) * (x[t] @ params["up"][e])
            total = total + (weight[j] * (hidden @ params["down"][e]) if kept[t, j] else 0.0)
        if "shared" in params:
            own = params["shared"]
            total = total + (jax.nn.silu(x[t] @ own["gate"]) * (x[t] @ own["up"])) @ own["down"]
        out.append(total)
    return jnp.stack(out)[None]


def close(a, b):
    # Sums of some dozen products of order 1, in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), a, b)


def compared(experts, params, x_BTD, room=None, **execution):
    cfg, (chosen, kept) = model(experts, **execution), chosen_by_hand(params, x_BTD, experts, room)
    weights = jnp.cos(jnp.arange(x_BTD.size)).reshape(x_BTD.shape)

    def apply(params, x):
        return router.apply(params, x, cfg, training=True)[0]

    def ours(params, x):
        return (apply(params, x) * weights).sum()

    def theirs(params, x):
        return (by_hand(params, x, experts, chosen, kept) * weights).sum()

    hand = jax.jit(lambda params, x: by_hand(params, x, experts, chosen, kept))
    close(apply(params, x_BTD), hand(params, x_BTD))
    found, expected = (jax.jit(jax.grad(f, (0, 1)))(params, x_BTD) for f in (ours, theirs))
    close(found, expected)
    return found


@pytest.mark.parametrize("name", SCORES)
def test_dropless_is_a_loop_over_experts(name):
    experts = SCORES[name]
    params, x_BTD = layer(model(experts))
    gradient = compared(experts, params, x_BTD)[0]
    assert float(np.abs(gradient["router"]).max()) > 1e-3, "the router learns"
    assert "bias" not in gradient or not np.asarray(gradient["bias"]).any()
    chosen = {tuple(row) for row in chosen_by_hand(params, x_BTD, experts)[0]}
    assert len(chosen) > 1, "tokens differ"


@pytest.mark.parametrize("loads", ["one has all", "one has none"])
def test_uneven_loads(loads):
    params, x_BTD = layer(model(BASE))
    x_BTD = jnp.abs(x_BTD)  # so that a column of the router decides
    column = {"one has all": 3.0, "one has none": -3.0}[loads]
    params["router"] = params["router"].at[:, 2].set(column)
    _, sums = router.apply(params, x_BTD, model(BASE), counted=True)
    assert sums["load"][2] == (11 if column > 0 else 0)
    compared(BASE, params, x_BTD)


def test_capacity_with_room_is_dropless():
    roomy = {"expert_dispatch": "capacity", "expert_capacity": 4.0}
    params, x_BTD = layer(model(BASE))
    limited, _ = router.apply(params, x_BTD, model(BASE, **roomy), training=True)
    close(limited, router.apply(params, x_BTD, model(BASE))[0])
    compared(BASE, params, x_BTD, **roomy)


def test_what_has_no_room_passes_by_and_is_counted():
    tight = {"expert_dispatch": "capacity", "expert_capacity": 0.3}
    room = 2  # of 11 · 2 choices, 0.3 of the even share of 4 experts: 1.65, rounded up
    params, x_BTD = layer(model(BASE), tokens=11)
    y_BTD, sums = router.apply(params, x_BTD, model(BASE, **tight), counted=True, training=True)
    chosen, kept = chosen_by_hand(params, x_BTD, BASE, room)
    close(y_BTD, by_hand(params, x_BTD, BASE, chosen, kept))
    assert not kept.all() and sums["dropped"] == (~kept).sum()
    lost = ~kept.any(1)
    assert lost.any() and not np.asarray(y_BTD)[0, lost].any(), "nothing is added to the residual"
    compared(BASE, params, x_BTD, room, **tight)
    for counted in (None, True):  # outside training, what a token gets must not depend on those it is computed with
        outside, _ = router.apply(params, x_BTD, model(BASE, **tight), counted=counted)
        close(outside, router.apply(params, x_BTD, model(BASE))[0])


def test_padding_takes_no_room_and_does_not_count():
    tight = model(BASE, expert_dispatch="capacity", expert_capacity=1.0)
    params, x_BTD = layer(model(BASE), tokens=8)
    padded = jnp.concatenate([jnp.full((1, 8, 16), 100.0), x_BTD], axis=1)
    valid = jnp.arange(16)[None] >= 8
    looser = dataclasses.replace(tight, expert_capacity=0.5)  # of twice as many tokens: the same room
    expected, alone = router.apply(params, x_BTD, tight, counted=True, training=True)
    found, together = router.apply(params, padded, looser, valid=valid, counted=True, training=True)
    close(found[:, 8:], expected)
    assert not np.asarray(found[:, :8]).any()
    close(together, alone)
    assert alone["tokens"] == 8


# The product


@pytest.mark.parametrize("sizes", [(5, 0, 9, 2), (0, 0, 0, 16), (16, 0, 0, 0), (4, 4, 4, 4), (1, 1, 1, 13)])
@pytest.mark.parametrize("rows", [1, 2, 4, 16])
def test_rows_by_their_own_matrix(sizes, rows, monkeypatch):
    monkeypatch.setattr(ragged, "block_rows", lambda *_: rows)
    rng = np.random.default_rng(0)
    x_MD, weight_EDF = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((16, 3), (4, 3, 5)))
    group = np.repeat(np.arange(4), sizes)
    expected = np.stack([x_MD[i] @ weight_EDF[g] for i, g in enumerate(group)])
    sizes = jnp.asarray(sizes)
    close(jax.jit(ragged.ragged_dot)(x_MD, weight_EDF, sizes), expected)
    close(jax.lax.ragged_dot(x_MD, weight_EDF, sizes), expected)  # what accelerators take

    def gradients(product):
        return jax.jit(jax.grad(lambda x, k: (product(x, k, sizes) ** 2).sum(), (0, 1)))(x_MD, weight_EDF)

    for found, wanted in zip(gradients(ragged.ragged_dot), gradients(jax.lax.ragged_dot), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_kernel_of_tpus_is_the_same_product():
    """Interpreted. bfloat16 keeps 8 bits: the two round sums of 100 products differently in the last one or two."""
    rng = np.random.default_rng(0)
    x_MD, weight_EDF = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((256, 128), (4, 128, 256)))
    sizes = jnp.array([100, 0, 56, 100], jnp.int32)
    assert ragged._fits_kernel(x_MD, weight_EDF) and not ragged._fits_kernel(x_MD[:100], weight_EDF)
    kernel = functools.partial(ragged._by_kernel, interpret=True)

    def run(product):
        loss = lambda x, k: (product(x, k, sizes).astype(jnp.float32) ** 2).sum()
        return product(x_MD, weight_EDF, sizes), *jax.grad(loss, (0, 1))(x_MD, weight_EDF)

    for found, expected in zip(run(kernel), run(ragged._by_blocks), strict=True):
        found, expected = (np.asarray(x, np.float32) for x in (found, expected))
        np.testing.assert_allclose(found, expected, atol=2**-6 * np.abs(expected).max())


def test_a_token_costs_what_its_own_experts_cost():
    """XLA's count against 2·T·(k·3·D·F + D·E), which is what is active: of 8 experts with 2 a token, 4 times less than all."""
    cfg = jf.presets.llama(vocab_size=8, d_model=64, n_layers=1, n_heads=1, experts=Experts(n_experts=8, per_token=2, d_ff=128))
    params = jf.spec.abstract(router.spec(cfg), cfg)
    tokens = 2048
    x_BTD = jax.ShapeDtypeStruct((1, tokens, 64), jnp.float32)
    counted = jax.jit(lambda p, x: router.apply(p, x, cfg)[0]).lower(params, x_BTD).compile().cost_analysis()["flops"]
    active = 2 * tokens * (2 * 3 * 64 * 128 + 64 * 8)
    # 4,096 rows are 32 blocks of 128, and each of 8 experts may have one that is not full: 40 / 32; and 2% of sums and sorting
    assert 1 <= counted / active < 1.28


def test_blocks_are_few_and_small():
    """No more than 25% of rows are padding, for any number of rows and experts, and a step of decoding has none."""
    for rows in (1, 8, 64, 4096, 1 << 16):
        for groups in (4, 8, 128):
            size = ragged.block_rows(rows, groups)
            assert size == 1 or size * groups <= 0.25 * rows
    assert ragged.block_rows(16, 8) == 1 and ragged.block_rows(1 << 16, 8) == 128


# In a model


MIXED = dataclasses.replace(BASE, layers=(1, 2), shared=1)


def test_layers_with_and_without_scanned_and_unrolled():
    cfg = model(MIXED, n_layers=4)
    params, tokens = tiny.drawn(cfg), tiny.tokens(cfg)
    rows = {name: part["up"].shape[0] for name, part in params["decoder"]["layers"].items() if "up" in part}
    assert rows == {"mlp": 2, "moe": 2}

    def run(cfg, params):
        out = jf.apply(params, tokens, cfg, counted=True)
        return out.hidden, out.routing

    plain = jax.jit(run, static_argnums=0)(cfg, params)
    assert len(plain[1]) == 2 and float(plain[1][0]["load"].sum()) == 2 * tokens.size
    for other in ({"scan": True}, {"remat": "full"}, {"scan": True, "remat": "dots"}):
        found = jax.jit(run, static_argnums=0)(dataclasses.replace(cfg, **other), params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, plain)
    close(jax.jit(run, static_argnums=0)(cfg, jf.model.unstack(params, cfg)), plain)


def test_rooms_of_layers_are_for_training_alone():
    cfg = model(BASE, expert_dispatch="capacity", expert_capacity=0.3)
    params, tokens = tiny.drawn(cfg), tiny.tokens(cfg)
    trained, read = (jf.apply(params, tokens, cfg, counted=True, training=training).routing for training in (True, False))
    assert [bool(layer["dropped"] > 0) for layer in (*trained, *read)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_experts": 4}, "experts.d_ff must be given; it is the hidden width"),
        ({"d_ff": 4}, "experts.d_ff has no effect with experts.n_experts=0"),
        ({"n_experts": 2, "d_ff": 4, "per_token": 3}, "per_token=3 is more than experts.n_experts=2"),
        ({"n_experts": 4, "d_ff": 4, "groups": 4}, "cannot be split into 4 equal groups of two or more"),
        (
            {"n_experts": 8, "d_ff": 4, "groups": 4, "groups_per_token": 1, "per_token": 3},
            "more than the 2 experts in a token's",
        ),
        ({"n_experts": 4, "d_ff": 4, "layers": (5,)}, "must name one or more of the layers 0 to 1"),
        ({"n_experts": 4, "d_ff": 4, "layers": ()}, "must name one or more of the layers"),
    ],
)
def test_experts_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        model(Experts(**fields))


def test_a_rate_needs_the_bias_that_it_moves():
    with pytest.raises(
        ValueError, match="balance_rate adjusts the selection bias of experts, so it needs experts.selection_bias=True"
    ):
        model(BASE, balance_rate=0.1)
    model(dataclasses.replace(BASE, selection_bias=True), balance_rate=0.1)


def test_a_router_that_cannot_learn_is_refused_where_it_would_have_to():
    one = dataclasses.replace(BASE, per_token=1)
    with pytest.raises(ValueError, match="or their router would learn nothing"):
        jf.training.next_token(model(one))
    jf.training.next_token(model(dataclasses.replace(one, normalize=False)))


def test_what_layers_did_is_told_with_a_cache_too():
    cfg = model(BASE)
    params, tokens = tiny.drawn(cfg), tiny.tokens(cfg)
    whole = jf.apply(params, tokens, cfg, counted=True)
    cached = jf.apply(params, tokens, cfg, cache=jf.init_cache(cfg, 2, 16), counted=True)
    assert len(whole.routing) == 2 and all(sums["load"].sum() == 2 * tokens.size for sums in whole.routing)
    close(cached.routing, whole.routing)


def test_experts_are_gated():
    with pytest.raises(ValueError, match="mlp='gelu_tanh' must be one of swiglu"):
        jf.presets.gpt2(experts=BASE)
