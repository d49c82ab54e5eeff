"""Components from outside, by object, module, class and name; every component of the library used by itself."""

import dataclasses
import functools

import example_components as example
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

import jaxformer as jf
from jaxformer.config.strict import to_json
from jaxformer.tokenizers import tokenizer
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.run import write_run
from tests.states import initial, update

pytestmark = pytest.mark.usefixtures("quick_compilation")
CFG = dataclasses.replace(tiny.PRESETS["llama_gqa"], n_layers=1)
FORMS = {
    "mlp": {
        "example_components:squared_relu": example.squared_relu,
        "example_components:SquaredRelu": example.SquaredRelu,
        "example_components:tanh_mlp": example.tanh_mlp,
    },
    "position": {"example_components:alibi": example.alibi, "example_components:Alibi": example.Alibi},
    "norm": {"example_components:ScaleNorm": example.ScaleNorm, "example_components:PlainNorm": example.PlainNorm},
    "attention": {"example_components:MeanAttention": example.MeanAttention},
}
forward = jax.jit(jf.forward, static_argnums=2)


def swapped(**fields):
    return dataclasses.replace(CFG, **fields)


# Forms


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, forms in FORMS.items() for name in forms])
def test_an_object_is_kept_by_the_name_that_leads_to_it(kind, name):
    by_object, by_name = swapped(**{kind: FORMS[kind][name]}), swapped(**{kind: name})
    assert getattr(by_object, kind) == name and by_object == by_name and by_object != CFG
    assert to_json(by_object) == to_json(by_name)


def test_a_module_is_a_component():
    cfg = swapped(mlp=example)
    again = dataclasses.replace(cfg, norm_eps=1e-6)  # reads the name that the module is kept by
    assert jf.mlp.spec(again).keys() == {"up", "down"} and "example_components" in to_json(again)


def test_all_forms_of_one_component_compute_the_same():
    params = tiny.drawn(swapped(mlp="example_components:squared_relu"))
    assert jax.tree.structure(params) != jax.tree.structure(tiny.drawn(CFG))
    tokens = tiny.tokens(CFG)
    outs = [forward(params, tokens, swapped(mlp=form)) for form in (example.squared_relu, example.SquaredRelu, local_copy())]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


def local_copy():
    class Local(example.SquaredRelu):
        pass

    return Local


@pytest.mark.parametrize("kind", FORMS)
def test_an_object_without_spec_or_apply_is_refused(kind):
    class OnlySpec:
        spec = staticmethod(lambda cfg: {})

    for wrong in (OnlySpec, object(), 3, jnp.tanh):
        with pytest.raises(ValueError, match=f"{kind}=.*needs both spec.* and apply"):
            swapped(**{kind: wrong})


# Training, saving, loading


@pytest.mark.parametrize(
    "fields",
    [
        {"mlp": example.squared_relu, "position": example.alibi},
        {"norm": example.ScaleNorm, "attention": example.MeanAttention},
        {"norm": example.PlainNorm},
        {"n_layers": 2, "mlp": example.NarrowMlp(20, 0.5), "attention": ("grouped", example.MovingAverage(0.5))},
    ],
    ids=["squared ReLU, ALiBi", "ScaleNorm, mean attention", "norm without parameters", "hyperparameters, by layer"],
)
def test_trains_and_loads_again(fields, tmp_path):
    cfg = swapped(**fields)
    optim, steps = jf.OptimConfig(lr=3e-2, warmup_steps=1), 8
    batch, state, losses = tiny.batch(cfg), jax.jit(lambda: initial(cfg, optim, steps))(), []
    step = jax.jit(update(cfg, optim, steps))
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5
    write_run(tmp_path, jf.Config(model=cfg, optim=optim), tokenizer.Bytes())
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(state, losses[-1])
    checkpoints.close()
    loaded_cfg, loaded, tok = jf.load(tmp_path, trust=True)
    assert loaded_cfg == cfg and tok.kind == "byte"
    tokens = tiny.tokens(cfg)
    np.testing.assert_array_equal(forward(loaded, tokens, loaded_cfg), forward(state.params, tokens, cfg))


@pytest.mark.parametrize("fields", [{"position": example.Alibi}, {"attention": example.MeanAttention}], ids=["ALiBi", "mean"])
def test_decodes_through_the_cache(fields):
    cfg = swapped(**fields)
    params, tokens = tiny.drawn(cfg), tiny.tokens(cfg, 1, 6)
    whole = np.asarray(forward(params, tokens, cfg))
    start, cache = tiny.forward_cached(params, tokens[:, :4], cfg, jf.init_cache(cfg, 1, 8))
    rest, _ = tiny.forward_cached(params, tokens[:, 4:], cfg, cache)
    # float32 sums in another order
    np.testing.assert_allclose(np.concatenate([start, rest], axis=1), whole, atol=1e-5 * np.abs(whole).max(), rtol=0)


# ALiBi against the paper


def test_slopes_of_the_paper():
    assert example.slopes(8) == [1 / 2**i for i in range(1, 9)]
    assert example.slopes(4) == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    assert example.slopes(6) == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]


def softmax(scores):
    unscaled = np.exp(scores - scores.max())
    return unscaled / unscaled.sum()


def test_alibi_is_the_papers_formula():
    """softmax(q_i·K / sqrt(H) + m·[−(i−1), …, −1, 0]) for each head's own m, here of 4 heads on 2 key heads."""
    cfg = swapped(position=example.Alibi)
    params, x_BTD = alone(jf.attention, cfg)
    query, key, value, out = (np.asarray(params[name], np.float64) for name in ("query", "key", "value", "out"))
    expected = np.zeros((5, cfg.d_model))
    for head, slope in enumerate([1 / 4, 1 / 16, 1 / 64, 1 / 256]):
        k, g = divmod(head, 2)
        q_TH, k_TH, v_TH = x_BTD[0] @ query[:, k, g], x_BTD[0] @ key[:, k], x_BTD[0] @ value[:, k]
        for i in range(5):
            scores = [q_TH[i] @ k_TH[j] / cfg.head_dim**0.5 + slope * (j - i) for j in range(i + 1)]
            expected[i] += softmax(np.array(scores)) @ v_TH[: i + 1] @ out[k, g]
    found, _ = jax.jit(jf.attention.apply, static_argnums=2)(params, x_BTD, cfg)
    plain, _ = jax.jit(jf.attention.apply, static_argnums=2)(params, x_BTD, swapped(position="none"))
    assert np.abs(plain[0] - expected).max() > 0.01, "the bias matters"
    np.testing.assert_allclose(found[0], expected, atol=1e-5)  # float32 against float64, of size 1


# Each component alone: spec and apply, and nothing else


def alone(component, cfg):
    rng = np.random.default_rng(0)
    shapes = jf.spec.abstract(component.spec(cfg), cfg)
    params = jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.standard_normal(leaf.shape), leaf.dtype), shapes)
    return params, rng.standard_normal((2, 5, cfg.d_model)).astype(np.float32)


near = functools.partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4)  # float32 against float64, sums of 48 products


def test_norm_alone():
    params, x_BTD = alone(jf.norm, swapped(norm="layer"))
    x = x_BTD.astype(np.float64)
    scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    near(jf.norm.apply(params, x_BTD, swapped(norm="layer")), scaled * params["gain"] + params["bias"])


def test_mlp_alone():
    params, x_BTD = alone(jf.mlp, CFG)
    gate, up, down = (np.asarray(params[name], np.float64) for name in ("gate", "up", "down"))
    near(jf.mlp.apply(params, x_BTD, CFG), ((x_BTD @ gate) / (1 + np.exp(-(x_BTD @ gate))) * (x_BTD @ up)) @ down)


def test_attention_alone():
    params, x_BTD = alone(jf.attention, CFG)
    out, cache = jax.jit(jf.attention.apply, static_argnums=2)(params, x_BTD, CFG)
    first = np.einsum("BD,DKH->BKH", x_BTD[:, 0].astype(np.float64), params["value"])  # sees only itself
    near(out[:, 0], np.einsum("BKH,KGHD->BD", first, params["out"]))
    assert out.shape == x_BTD.shape and cache is None


def test_position_alone():
    cfg = swapped(position="learned")
    params, x_BTD = alone(jf.position, cfg)
    positions = np.array([[4, 3, 2, 1, 0]])
    np.testing.assert_array_equal(jf.position.apply(params, x_BTD, positions, cfg), x_BTD + params["table"][positions])
    q_BKGTH = np.random.default_rng(0).standard_normal((1, 2, 2, 5, 8)).astype(np.float32)
    turned = np.asarray(jf.position.apply({}, q_BKGTH, positions, CFG))  # RoPE: a rotation, and none at position 0
    near(np.square(turned).sum(-1), np.square(q_BKGTH).sum(-1))
    near(turned[..., 4, :], q_BKGTH[..., 4, :])
    assert np.abs(turned - q_BKGTH)[..., :4, :].max() > 0.1


@pytest.mark.parametrize("residual", ["pre", "post"])
def test_block_alone(residual):
    cfg = swapped(residual=residual)
    params, x_BTD = alone(jf.block, cfg)

    def by_parts(params, x_BTD):
        attention = lambda x: jf.attention.apply(params["attention"], x, cfg)[0]
        mlp = lambda x: jf.mlp.apply(params["mlp"], x, cfg)
        for name, f in (("attention", attention), ("mlp", mlp)):
            norm = functools.partial(jf.norm.apply, params[f"{name}_norm"], cfg=cfg)
            x_BTD = x_BTD + f(norm(x_BTD)) if residual == "pre" else norm(x_BTD + f(x_BTD))
        return x_BTD

    out = jax.jit(jf.block.apply, static_argnums=2)(params, x_BTD, cfg)
    near(out.x_BTD, jax.jit(by_parts)(params, x_BTD))
    assert out.cache is None and out.routing is None


def test_stack_alone():
    cfg = swapped(n_layers=2)
    params, x_BTD = alone(jf.stack, cfg)

    def by_parts(params, x_BTD):
        for layer in range(2):
            x_BTD = jf.block.apply(jax.tree.map(lambda leaf: leaf[layer], params["layers"]), x_BTD, cfg).x_BTD  # noqa: B023
        return jf.norm.apply(params["norm"], x_BTD, cfg)

    found = jax.jit(lambda params, x_BTD: jf.stack.apply(params, x_BTD, cfg, info=jf.mask.arange(5)))(params, x_BTD).x_BTD
    near(found, jax.jit(by_parts)(params, x_BTD))


def test_components_fit_a_users_own_loop():
    """A component's specs initialise, count, mask and update like the model's own."""
    cfg = swapped(mlp=example.squared_relu)
    tree = {"first": jf.mlp.spec(cfg), "norm": jf.norm.spec(cfg)}
    params = jax.jit(lambda: jf.spec.init(tree, cfg, jax.random.key(0)))()
    assert jf.spec.count(tree, cfg) == 2 * 32 * 48 + 32
    assert jf.spec.decay_mask(tree) == {"first": {"up": True, "down": True}, "norm": {"gain": False}}
    transform = optax.sgd(1e-3)
    x_BTD = jnp.ones((1, 2, 32))

    def objective(params):
        return jnp.square(jf.norm.apply(params["norm"], jf.mlp.apply(params["first"], x_BTD, cfg), cfg)).sum()

    @jax.jit
    def update(params):
        loss, grads = jax.value_and_grad(objective)(params)
        updates, _ = transform.update(grads, transform.init(params))
        return loss, optax.apply_updates(params, updates)

    before, params = update(params)
    assert update(params)[0] < before
