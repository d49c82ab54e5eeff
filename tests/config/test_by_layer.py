"""Components by layer: each layer is the block of its own config, whatever stacks, scans, caches and meshes do with them."""

import dataclasses
import functools

import example_components as example
import jax
import numpy as np
import pytest
import tiny
from example_components import MovingAverage
from jax.sharding import NamedSharding, PartitionSpec

import jaxformer as jf
from jaxformer.config.strict import from_dict, to_dict
from jaxformer.nn import cache_spec, inputs
from jaxformer.parallel.sharding import MeshConfig, shardings

pytestmark = pytest.mark.usefixtures("quick_compilation")
forward = jax.jit(jf.forward, static_argnums=2)
BASE = dataclasses.replace(tiny.PRESETS["llama_gqa"], n_layers=4)
LATENT = jf.Latent(rank=12, query_rank=10, rope_dim=4, value_dim=6)
HALF = MovingAverage(0.5)
CASES = {  # name -> what is chosen by layer, and what else differs from BASE
    "recurrence": ({"attention": ("grouped", HALF, "grouped", HALF)}, {}),
    "recurrence alone": ({"attention": (HALF, MovingAverage(0.9)) * 2}, {}),
    "three kinds": ({"attention": (HALF, "grouped", MovingAverage(0.9), "grouped")}, {}),
    "latent": (
        {"attention": ("latent", "grouped") * 2, "position": ("rope", "none") * 2},
        {"latent": LATENT, "n_kv_heads": 4},
    ),
    "feed-forwards": ({"mlp": ("swiglu", "gelu", example.NarrowMlp(5), example.NarrowMlp(3))}, {}),
    "positions": ({"position": ("rope", "none", "relative", "example_components:alibi")}, {}),
    "residuals": ({"residual": ("pre", "sandwich", "parallel", "branch")}, {}),
    "post at the end": ({"residual": ("pre", "pre", "pre", "post")}, {}),
    "everything": (
        {
            "attention": ("grouped", HALF) * 2,
            "mlp": ("swiglu", "gelu") * 2,
            "position": ("rope", "none") * 2,
            "residual": ("pre", "post") * 2,
            "window": (3, None) * 2,
        },
        {},
    ),
}
OTHER = {  # name -> another choice by layer, which the same parameters fit
    "recurrence": {"attention": ("grouped", MovingAverage(0.9)) * 2},
    "recurrence alone": {"attention": (MovingAverage(0.9), HALF) * 2},
    "three kinds": {"attention": (HALF, "grouped", MovingAverage(0.8), "grouped")},
    "latent": {"position": ("rope",) * 4},
    "feed-forwards": {"mlp": ("swiglu", "relu", example.NarrowMlp(5), example.NarrowMlp(3))},
    "positions": {"position": ("rope", "none", "relative", "none")},
    "residuals": {"residual": ("pre", "sandwich", "branch", "parallel")},
    "post at the end": {"residual": ("pre", "branch", "pre", "post")},
    "everything": {"window": (3, None, None, None)},
}
STACKED = {  # name -> where each layer's attention and feed-forward are: the name that they are stacked under, and the row
    "recurrence": (
        [("attention", 0), ("attention_2", 0), ("attention", 1), ("attention_2", 1)],
        [("mlp", 0), ("mlp", 1), ("mlp", 2), ("mlp", 3)],
    ),
    "recurrence alone": (
        [("attention", 0), ("attention_2", 0), ("attention", 1), ("attention_2", 1)],
        [("mlp", 0), ("mlp", 1), ("mlp", 2), ("mlp", 3)],
    ),
    "three kinds": (
        [("attention", 0), ("attention_2", 0), ("attention_3", 0), ("attention_2", 1)],
        [("mlp", 0), ("mlp", 1), ("mlp", 2), ("mlp", 3)],
    ),
    "feed-forwards": (
        [("attention", 0), ("attention", 1), ("attention", 2), ("attention", 3)],
        [("mlp", 0), ("mlp_2", 0), ("mlp_3", 0), ("mlp_4", 0)],
    ),
    "everything": (
        [("attention", 0), ("attention_2", 0), ("attention", 1), ("attention_2", 1)],
        [("mlp", 0), ("mlp_2", 0), ("mlp", 1), ("mlp_2", 1)],
    ),
}


def config(name, **fields):
    by_layer, others = CASES[name]
    return dataclasses.replace(BASE, **by_layer, **others, **fields)


def single(name, layer, **changed):
    """The config of one layer, written out."""
    by_layer, others = CASES[name]
    own = {field: values[layer] for field, values in (by_layer | changed).items()}
    if own.get("attention", "latent") != "latent":
        others = {field: value for field, value in others.items() if field != "latent"}
    return dataclasses.replace(BASE, **others, **own)


def close(found, expected):
    # float32 sums in another order, through four layers: some hundred roundings of the largest number
    assert np.abs(np.asarray(found) - expected).max() <= 1e-5 * np.abs(expected).max()


def far(found, expected):
    return np.abs(np.asarray(found) - expected).max() > 1e-2 * np.abs(expected).max()


# Parameters


@pytest.mark.parametrize("name", STACKED)
def test_parameters_are_stacked_by_kind(name):
    layers = jf.model.spec(config(name))["decoder"]["layers"]
    for part, places in zip(("attention", "mlp"), STACKED[name], strict=True):
        assert {stacked for stacked in layers if stacked.partition("_")[0] == part and "norm" not in stacked} == {
            stacked for stacked, _ in places
        }
        for layer, (stacked, row) in enumerate(places):
            spec = getattr(jf, part).spec(single(name, layer))
            rows = 1 + max(r for s, r in places if s == stacked)
            shapes = {path: param.shape(config(name)) for path, param in jf.spec.walk(layers[stacked])}
            assert shapes == {path: (rows, *param.shape(single(name, layer))) for path, param in jf.spec.walk(spec)}
            assert 0 <= row < rows


@pytest.mark.parametrize("name", CASES)
def test_the_count_is_that_of_the_layers(name):
    count = lambda cfg, spec: jf.spec.count(spec, cfg)
    cfg = config(name)
    spec = jf.model.spec(cfg)
    blocks = sum(count(single(name, i), jf.block.spec(single(name, i))) for i in range(4))
    assert count(cfg, spec["decoder"]["layers"]) == blocks
    drawn = jax.eval_shape(lambda: jf.init(cfg, jax.random.key(0)))
    assert jax.tree.map(lambda p: p.shape, drawn) == jax.tree.map(lambda p: p.shape, jf.spec.abstract(spec, cfg))


def test_initial_values_are_those_of_each_kind():
    """A layer's values depend on the path and the row alone; a kind's spread is its own."""
    cfg = config("feed-forwards")
    layers = jax.jit(lambda key: jf.init(cfg, key))(jax.random.key(0))["decoder"]["layers"]
    for stacked, inputs_ in (("mlp", 48), ("mlp_2", 48), ("mlp_3", 5), ("mlp_4", 3)):
        assert abs(float(layers[stacked]["down"].std()) * inputs_**0.5 - 1) < 0.25, stacked  # of 96 numbers and more


# What it computes


def by_parts(name, params, ids, valid=None):
    """The blocks of the layers' own configs, one after the other, with parameters taken from the stacks by hand."""
    cfg, decoder = config(name), params["decoder"]
    info = inputs.token_info("", ids.shape, single(name, 0), valid=valid)
    attention, mlp = STACKED.get(name, ([("attention", i) for i in range(4)], [("mlp", i) for i in range(4)]))
    if name == "latent":
        attention = STACKED["recurrence"][0]
    x_BTD = jf.model.embed(params, ids, cfg)
    for layer in range(4):
        own = single(name, layer)
        stacks = {"attention": attention[layer], "mlp": mlp[layer], "attention_norm": ("attention_norm", layer)}
        stacks["mlp_norm"] = ("mlp_norm", layer)
        if own.residual == "sandwich":  # of one layer
            stacks |= {part: (part, 0) for part in ("attention_out_norm", "mlp_out_norm")}
        block = {part: jax.tree.map(lambda p: p[row], decoder["layers"][stack]) for part, (stack, row) in stacks.items()}  # noqa: B023
        x_BTD = jf.block.apply(block, x_BTD, own, info=info, position_params=decoder.get("position")).x_BTD
    if single(name, 3).residual != "post":
        x_BTD = jf.norm.apply(decoder["norm"], x_BTD, cfg)
    return jf.model.head(params, x_BTD, cfg)


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_its_layers_one_after_the_other(name):
    cfg = config(name)
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg)
    expected = np.asarray(jax.jit(functools.partial(by_parts, name))(params, ids))
    close(forward(params, ids, cfg), expected)
    assert far(forward(params, ids, dataclasses.replace(cfg, **OTHER[name])), expected), "the choice matters"


def test_layers_without_positions_do_not_see_them():
    """NoPE in some layers: their weights are the same wherever the tokens stand, the others' are not."""
    ids, positions = tiny.tokens(BASE), 3 * np.arange(9)[None]
    params = tiny.drawn(dataclasses.replace(BASE, n_layers=2))

    def weights(cfg, ids, positions):
        run = jf.capture(lambda ids, positions: jf.forward(params, ids, cfg, positions=positions), "*attention.weights")
        return jax.jit(run)(ids, positions)[1]

    for choice, sees in ((("none", "rope"), False), (("rope", "none"), True)):
        cfg = dataclasses.replace(BASE, n_layers=2, position=choice)
        plain, moved = (weights(cfg, ids, where) for where in (np.arange(9)[None], positions))
        first = "decoder.0.attention.weights"
        assert np.array_equal(plain[first], moved[first]) != sees
        assert far(moved["decoder.1.attention.weights"], plain["decoder.1.attention.weights"]), "of what comes before, too"


def loss_and_gradients(cfg):
    batch = tiny.batch(cfg, rows=2, length=6)
    return jax.jit(jax.value_and_grad(lambda params: jf.loss(params, batch, cfg)[0]))(tiny.drawn(cfg))


def scans(cfg):
    """Lengths of the scans in the loss's program."""
    batch = tiny.batch(cfg, rows=2, length=6)
    jaxpr = jax.make_jaxpr(lambda params: jf.loss(params, batch, cfg)[0])(tiny.drawn(cfg))
    lengths = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan":
                lengths.append(eqn.params["length"])
            for inner in jax.core.jaxprs_in_params(eqn.params):
                visit(inner)

    visit(jaxpr.jaxpr)
    return lengths


@pytest.mark.parametrize(
    ("name", "fields"),
    [("recurrence", {}), ("latent", {"remat": "full"}), ("everything", {"remat": "dots"}), ("three kinds", {})],
)
def test_scanned_is_unrolled(name, fields):
    cfg = config(name)
    scanned = dataclasses.replace(cfg, scan=True, **fields)
    if name != "three kinds":
        assert 2 in scans(scanned) and 2 not in scans(cfg), "two periods of two layers"
    (value, gradients), (expected, unrolled) = loss_and_gradients(scanned), loss_and_gradients(cfg)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for path, leaf in jax.tree.leaves_with_path(unrolled["decoder"]):
        assert np.abs(leaf).max() > 1e-4, path
    # float32 sums in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradients, unrolled)


@pytest.mark.parametrize("name", CASES)
def test_unstacked_parameters_are_the_layers_own(name):
    cfg = config(name)
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg)
    unstacked = jf.model.unstack(params, cfg)
    layers = unstacked["decoder"]["layers"]
    assert list(layers) == ["0", "1", "2", "3"]
    for layer in range(4):
        spec = jf.spec.abstract(jf.block.spec(single(name, layer)), single(name, layer))
        assert jax.tree.map(lambda p: p.shape, layers[str(layer)]) == jax.tree.map(lambda p: p.shape, spec)
    np.testing.assert_array_equal(forward(unstacked, ids, cfg), forward(params, ids, cfg))
    if name in ("three kinds", "feed-forwards"):
        wrong = unstacked | {"decoder": unstacked["decoder"] | {"layers": layers | {"1": layers["2"]}}}
        with pytest.raises(ValueError, match=r"decoder\.layers\.1\."):
            jf.forward(wrong, ids, cfg)


# The cache

CHUNKS = (4, 1, 1, 4, 1, 1)
LENGTH = sum(CHUNKS)


def padded():
    """Rows without padding, padded on the left with a hole later, and padded on the right."""
    valid = np.ones((3, LENGTH), bool)
    valid[1, [0, 1, 6]] = False
    valid[2, 9:] = False
    return valid


@pytest.mark.parametrize("name", CASES)
def test_chunks_through_the_cache_are_the_whole(name):
    cfg, valid = config(name), padded()
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg, 3, LENGTH)
    whole = np.asarray(forward(params, ids, cfg, valid=valid))
    assert far(forward(params, ids, cfg, valid=np.ones_like(valid))[1], whole[1]), (
        "padding is seen where nothing says that it is padding"
    )
    cache, start, parts = jf.init_cache(cfg, 3, LENGTH), 0, []
    for width in CHUNKS:
        at = slice(start, start + width)
        logits, cache = tiny.forward_cached(params, ids[:, at], cfg, cache, valid=valid[:, at])
        parts.append(logits)
        start += width
    close(np.concatenate(parts, axis=1)[valid], whole[valid])
    assert cache.used.tolist() == valid.sum(1).tolist()
    if "recurrence" in name:  # of others, test_visibility says so
        close(whole[1, valid[1]], np.asarray(forward(params, ids[1:2, valid[1]], cfg))[0])


def test_each_layer_keeps_what_its_component_declares():
    cfg = config("three kinds")
    kept = jf.init_cache(cfg, 2, 9)
    keys = {"key": (2, 2, 9, 8), "value": (2, 2, 9, 8)}
    shapes = [{name: entry.shape for name, entry in layer.items()} for layer in kept.layers]
    assert shapes == [{"average": (2, 2, 8)}, keys, {"average": (2, 2, 8)}, keys]
    positions = jf.init_cache(config("positions"), 2, 9)
    assert ["position" in layer for layer in positions.layers] == [False, False, True, True], "of those that bias scores"
    everything = jf.init_cache(config("everything"), 2, 9)
    assert [layer["key"].shape[2] for layer in everything.layers if "key" in layer] == [3, 3], "rings"


def test_a_state_does_not_grow_with_the_context():
    sizes = [
        cache_spec.size(jax.eval_shape(lambda: jf.init_cache(config("recurrence alone"), 1, length)))  # noqa: B023
        for length in (8, 100_000)
    ]
    assert sizes == [4 * 2 * 8 * 4 + 8] * 2  # layers, K, H, float32; and how many tokens so far, and at most


def test_a_recurrence_cannot_go_back():
    cfg = config("recurrence")
    with pytest.raises(
        ValueError, match="attention=MovingAverage.* keeps a recurrent state, from which tokens cannot be removed"
    ):
        jf.init_cache(cfg, 1, 8, ahead=1)
    params, ids = tiny.drawn(cfg), tiny.tokens(cfg, 1, 4)
    _, cache = tiny.forward_cached(params, ids, cfg, jf.init_cache(cfg, 1, 8))
    cache.rewind(np.array([4]))
    with pytest.raises(ValueError, match="rewind to"):
        cache.rewind(np.array([3]))


def test_rows_take_their_state_along():
    cfg, ids = config("recurrence"), tiny.tokens(BASE, 2, 6)
    params, next_, rows = tiny.drawn(cfg), tiny.tokens(BASE, 2, 2, seed=1), np.array([1, 1, 0])
    _, cache = tiny.forward_cached(params, ids, cfg, jf.init_cache(cfg, 2, 8))
    expected, _ = tiny.forward_cached(params, next_, cfg, cache)
    assert far(expected[0], np.asarray(expected[1]))
    found, _ = tiny.forward_cached(params, next_[rows], cfg, cache.take(rows))
    close(found, np.asarray(expected)[rows])


@pytest.mark.parametrize(
    ("mine", "other"), [("recurrence", BASE), ("recurrence", "three kinds"), ("three kinds", "recurrence")]
)
def test_a_cache_of_other_layers_is_refused(mine, other):
    cfg, other = config(mine), other if isinstance(other, jf.ModelConfig) else config(other)
    with pytest.raises(ValueError, match="the cache was made for a different config: layer [01]"):
        jf.forward_cached(tiny.drawn(cfg), tiny.tokens(cfg, 1, 2), cfg, jf.init_cache(other, 1, 8))


def test_generation_is_the_forward_again_and_again():
    cfg, prompts = config("recurrence"), [[5, 9, 11], [7, 3, 20, 41, 13]]
    params = tiny.drawn(cfg)
    out = jf.generate(params, prompts, cfg, max_new_tokens=4)
    for row, prompt in enumerate(prompts):
        ids = list(prompt)
        for _ in range(4):
            logits = np.asarray(forward(params, np.array([ids + [4] * (9 - len(ids))]), cfg))[0, len(ids) - 1]
            best, second = np.sort(logits)[::-1][:2]
            assert best - second > 1e-3, "a near tie would make the comparison meaningless"
            ids.append(int(logits.argmax()))
        assert out.tokens[row].tolist() == ids[len(prompt) :]


@dataclasses.dataclass(frozen=True)
class WrongState(MovingAverage):
    """Puts a state that it has not declared."""

    entry: str = "average"
    shape: tuple[int, ...] = ()

    def apply(self, params, x_BTD, cfg, *, cache=None, **where):
        return x_BTD, None if cache is None else cache.put({self.entry: np.zeros(self.shape)})


@dataclasses.dataclass(frozen=True)
class WrongCache(MovingAverage):
    """Declares a state whose rows are not first."""

    def cache(self, cfg):
        return {"average": jf.Param("KBH", jf.spec.zeros)}


@pytest.mark.parametrize(("entry", "shape"), [("avreage", (1, 2, 8)), ("average", (1, 2, 7)), ("average", (2, 2, 8))])
def test_a_state_that_was_not_declared_is_refused(entry, shape):
    cfg = dataclasses.replace(BASE, attention=WrongState(0.5, entry, shape))
    with pytest.raises(ValueError, match=rf"'{entry}' of shape \(.*\) does not belong to this layer's cache, .*\(1, 2, 8\)"):
        jf.forward_cached(tiny.drawn(cfg), [[5]], cfg, jf.init_cache(cfg, 1, 8))
    with pytest.raises(ValueError, match="its cache entry 'average' is 'KBH'; B must come first"):
        jf.init_cache(dataclasses.replace(BASE, attention=WrongCache(0.5)), 1, 8)


# Devices


def test_a_hybrid_on_a_mesh_is_that_of_one_device():
    cfg = config("everything", scan=True)
    params, batch = tiny.drawn(cfg), tiny.batch(cfg, 8)
    program = lambda: jax.jit(jax.value_and_grad(lambda params, batch: jf.loss(params, batch, cfg)[0]))
    expected = program()(params, batch)
    mesh = MeshConfig(fsdp=2, tensor=2, data=2).make()
    placed = shardings(jf.model.spec(cfg), cfg, mesh)
    assert placed["decoder"]["layers"]["attention_2"]["value"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        found = program()(jax.device_put(params, placed), jax.device_put(batch, rows))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)  # through four layers, float32 sums in another order


# Configs


def test_files_hold_every_layer():
    for name in CASES:
        cfg = config(name)
        assert from_dict(jf.ModelConfig, to_dict(cfg), trust=True) == cfg
    again = from_dict(jf.ModelConfig, to_dict(config("three kinds")), trust=True)
    assert again.attention == (HALF, "grouped", MovingAverage(0.9), "grouped") and type(again.attention) is tuple


def test_layers_are_scalar_configs():
    layers = config("everything").layers
    assert [layer.attention for layer in layers] == ["grouped", HALF] * 2
    assert [(layer.mlp, layer.position, layer.residual, layer.window) for layer in layers[:2]] == [
        ("swiglu", "rope", "pre", 3),
        ("gelu", "none", "post", None),
    ]
    assert layers[0] is layers[2] and layers[0] != layers[1]


WRONG = [
    ({"attention": ("grouped",) * 3}, "attention has 3 entries, but n_layers=4"),
    ({"mlp": ("swiglu",) * 5}, "mlp has 5 entries, but n_layers=4"),
    ({"mlp": ()}, "mlp has 0 entries, but n_layers=4"),
    ({"position": ("rope",)}, "position has 1 entries, but n_layers=4"),
    ({"residual": ("pre", "post")}, "residual has 2 entries, but n_layers=4"),
    ({"window": (4,) * 3}, "window has 3 entries, but n_layers=4"),
    ({"mlp": ("swiglu", "swigl", "swiglu", "swiglu")}, "unknown mlp 'swigl'; did you mean 'swiglu'"),
    ({"residual": ("pre", "prenorm", "pre", "pre")}, "unknown residual 'prenorm'; did you mean 'pre'"),
    ({"mlp": ("swiglu", object(), "swiglu", "swiglu")}, "mlp=.* a component needs both spec"),
    ({"norm": ("rms",) * 4}, "norm=.* cannot be chosen by layer; only attention, mlp, position, residual, window can"),
    ({"attention": ("grouped", "latent") * 2}, "layer 1: attention='latent' needs latent.rank"),
    ({"position": ("none", "sinusoidal", "none", "none"), "d_model": 33, "head_dim": 8}, "layer 1: d_model=33 is odd"),
    ({"position": ("none", "rope", "none", "none"), "head_dim": 7}, "layer 1: head_dim=7 is odd"),
    (
        {"mlp": ("swiglu", "gelu") * 2, "experts": jf.Experts(n_experts=4, d_ff=8, layers=(0, 1))},
        "layer 1: experts are gated: mlp='gelu'",
    ),
    ({"encoder_layers": 1, "attention": ("grouped",) * 4}, "attention cannot be chosen by layer in an encoder–decoder"),
    ({"encoder_layers": 1, "mlp": ("swiglu",) * 4}, "mlp cannot be chosen by layer in an encoder–decoder"),
    ({"encoder_layers": 1, "position": ("rope",) * 4}, "position cannot be chosen by layer in an encoder–decoder"),
    ({"encoder_layers": 1, "residual": ("pre",) * 4}, "residual cannot be chosen by layer in an encoder–decoder"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_fits_no_layers_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **fields)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (
            ("learned", "none", "none", "none"),
            "position='learned' acts on the input of the first layer, and cannot be chosen by layer",
        ),
        (("none", "sinusoidal", "none", "none"), "position='sinusoidal' acts on the input of the first layer"),
        (("relative", "example_components:TableBias") * 2, "position by layer may name one component with parameters"),
    ],
)
def test_positions_that_layers_cannot_have_of_their_own_are_refused(position, message):
    with pytest.raises(ValueError, match=message):
        jf.model.spec(dataclasses.replace(BASE, position=position))


def test_the_same_in_every_layer_is_a_choice_too():
    """A tuple of one kind computes what the name alone does."""
    same = dataclasses.replace(BASE, attention=("grouped",) * 4, mlp=("swiglu",) * 4, position=("rope",) * 4)
    params, ids = tiny.drawn(BASE), tiny.tokens(BASE)
    assert jax.tree.structure(params) == jax.tree.structure(tiny.drawn(same)) and set(same.layers) == {BASE}
    np.testing.assert_array_equal(forward(params, ids, same), forward(params, ids, BASE))
