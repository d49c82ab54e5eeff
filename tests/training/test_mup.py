"""mu-P: rates and initial values by hand, what is refused, and that activations do not grow with the width."""

import dataclasses

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.cli import mup as program
from jaxformer.training import mup
from jaxformer.training.optim import initial_params, optimizer
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

MOE = jf.presets.llama(
    vocab_size=16, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, experts=jf.Experts(n_experts=3, per_token=2, d_ff=6)
)
LLAMA = jf.presets.llama(vocab_size=32, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, init_std=1.0)


def test_rates_and_initial_values_by_hand():
    found = dict(jf.spec.walk(mup.rates(MOE, 8)))
    narrow = {path for path, rate in found.items() if rate == 0.25}
    assert narrow == {
        *(f"decoder.layers.attention.{name}" for name in ("query", "key", "value", "out")),
        *(f"decoder.layers.moe.{name}" for name in ("router", "gate", "up", "down")),
        "head.kernel",
    }
    assert {found[path] for path in found.keys() - narrow} == {1.0}
    assert {"embedding.token", "decoder.norm.gain"} <= found.keys() - narrow

    key = jax.random.key(0)
    plain = dict(jf.spec.walk(jf.init(MOE, key)))
    for path, leaf in jf.spec.walk(initial_params(jf.OptimConfig(mup_base=8), MOE, key)):
        factor = 0.5 if path in ("head.kernel", "decoder.layers.moe.router") else 1.0
        np.testing.assert_array_equal(leaf, factor * plain[path], err_msg=path)


def test_the_update_is_multiplied_and_the_decay_is_not():
    """AdamW's first update is the gradient's sign."""
    optim = jf.OptimConfig(lr=0.1, schedule="constant", warmup_steps=0, weight_decay=0.5, clip_norm=0.0)
    params = tiny.drawn(MOE)
    grads = jax.tree.map(lambda p: 1.0 + 0 * p, params)
    transform = optimizer(dataclasses.replace(optim, mup_base=8), MOE, 10)
    updates = dict(jf.spec.walk(transform.update(grads, transform.init(params), params)[0]))
    flat = dict(jf.spec.walk(params))
    for path, rate in (("decoder.layers.attention.query", 0.25), ("embedding.token", 1.0)):
        np.testing.assert_allclose(updates[path], -0.1 * (rate + 0.5 * flat[path]), rtol=1e-5)


def test_at_the_base_nothing_changes():
    params, key = tiny.drawn(LLAMA), jax.random.key(1)
    plain, scaled = jf.OptimConfig(), jf.OptimConfig(mup_base=LLAMA.d_model)
    jax.tree.map(np.testing.assert_array_equal, initial_params(plain, LLAMA, key), initial_params(scaled, LLAMA, key))
    both = [optimizer(optim, LLAMA, 10) for optim in (plain, scaled)]
    jax.tree.map(np.testing.assert_array_equal, *(t.update(params, t.init(params), params)[0] for t in both))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tied_head": True}, "tied_head"),
        ({"scale_embedding": True}, "scale_embedding"),
        ({"scale_head": True}, "scale_head"),
        ({"init": "normal"}, "init='fan_in', .*, not 'normal'"),
        ({"d_model": 36, "head_dim": 8}, "4 heads of d_model=36 are 1.77778 of 16"),
    ],
)
def test_what_does_not_carry_over_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        optimizer(jf.OptimConfig(mup_base=16), dataclasses.replace(LLAMA, **fields), 10)


def test_letters_that_may_or_may_not_grow_are_refused():
    latent = dataclasses.replace(tiny.PRESETS["deepseek"])
    with pytest.raises(ValueError, match=r"'Q' of decoder.layers.attention.query\w* \[LDQ\]|'[QR]' of decoder"):
        optimizer(jf.OptimConfig(mup_base=16), latent, 10)


def test_a_given_scale_of_attention_allows_any_heads():
    cfg = dataclasses.replace(LLAMA, d_model=36, head_dim=8, attention_scale=0.1)
    optimizer(jf.OptimConfig(mup_base=16), cfg, 10)


# The coordinate check


@pytest.fixture(scope="module")
def growth():
    """Slopes of the activations' sizes, after 4 updates, with mu-P and without."""
    options = program.Options(program.Path("any.py"))
    models = [program.widened(LLAMA, factor) for factor in (1, 2, 4)]
    found = []
    for base in (32, None):
        optim = jf.OptimConfig(lr=0.03, schedule="constant", warmup_steps=0, mup_base=base)
        sizes = [program.measure(cfg, optim, program.random_batch(cfg, options), 4) for cfg in models]
        found.append((program.slopes([cfg.d_model for cfg in models], sizes), sizes))
    return found


def test_with_mup_no_activation_grows_and_without_it_they_do(growth):
    (with_, _), (without, _) = growth
    print({name: (round(with_[name], 2), round(without[name], 2)) for name in with_})
    assert max(with_.values()) < 0.1
    inside = [name for name in with_ if name.startswith("decoder") and name not in ("decoder.in", "decoder.attention.weights")]
    assert len(inside) == 10
    assert min(with_[name] for name in inside) > -0.2
    assert min(without[name] for name in inside) > 0.2
    assert without["decoder.out"] > 0.8


def test_sizes_begin_alike_but_for_the_logits(growth):
    (_, with_), (_, without) = growth
    for a, b, width in zip(with_, without, (32, 64, 128), strict=True):
        for name in a:
            factor = (32 / width) ** 0.5 if name == "logits" else 1.0
            np.testing.assert_allclose(a[name][0], factor * b[name][0], rtol=1e-4, err_msg=name)


def test_wider_models_keep_their_heads_width():
    wide = program.widened(LLAMA, 4)
    assert (wide.d_model, wide.n_heads, wide.n_kv_heads, wide.head_dim, wide.d_ff) == (128, 16, 8, 8, 192)
    narrow = program.widened(LLAMA, 0.25)
    assert (narrow.n_heads, narrow.n_kv_heads, narrow.head_dim) == (1, 1, 8)
    with pytest.raises(ValueError, match="n_heads=4 times 0.125"):
        program.widened(LLAMA, 0.125)


def test_the_program_prints_slopes_and_draws(tmp_path, capsys):
    config = tmp_path / "small.py"
    config.write_text(
        '"""A small model."""\nimport jaxformer as jf\n'
        "model = jf.presets.llama(vocab_size=16, d_model=8, n_layers=1, n_heads=2, d_ff=16)\n"
        "config = jf.Config(model=model, optim=jf.OptimConfig(lr=0.01))\n"
    )
    out = tmp_path / "check.png"
    program.main([str(config), "--widths", "1", "2", "--steps", "1", "--rows", "1", "--length", "4", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "decoder.mlp.hidden" in printed and "d_model 8, 16; base 8" in printed
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_program_refuses_what_mup_is_not_for(tmp_path):
    config = tmp_path / "tied.py"
    config.write_text(
        "import jaxformer as jf\n"
        "config = jf.Config(jf.presets.llama(vocab_size=16, d_model=8, n_layers=1, n_heads=2, d_ff=16, tied_head=True))\n"
    )
    with pytest.raises(ValueError, match="tied_head"):
        program.main([str(config), "--out", str(tmp_path / "check.png")])
    assert not (tmp_path / "check.png").exists()
    with pytest.raises(ValueError, match="two or more different"):
        program.Options(config, widths=(1.0, 1.0))
