"""``check_invariants``: all presets pass, and a component that is wrong fails what it breaks, and nothing else."""

import dataclasses
import itertools
import re
from pathlib import Path

import example_components as example
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

import jaxformer as jf
from examples import hybrid
from jaxformer.parallel.sharding import AXES, current
from jaxformer.prove import invariants
from jaxformer.prove.checks import CHECKS

pytestmark = pytest.mark.usefixtures("quick_compilation")
CFG = jf.presets.llama(vocab_size=67, d_model=16, n_layers=1, n_heads=2, max_length=16)
MIXING = ["causal", "future", "cached", "batched", "padded right", "padded left", "packed"]
"""The checks of what reaches what, which take the least time."""


def shallow(cfg):
    """One layer, or one of each kind."""
    if isinstance(cfg.window, tuple):
        return dataclasses.replace(cfg, n_layers=2, window=cfg.window[:2])
    return dataclasses.replace(cfg, n_layers=1, encoder_layers=min(1, cfg.encoder_layers))


def checked(cfg, checks):
    return jf.check_invariants(cfg, tiny.drawn(cfg), checks=checks, batch=2, length=4)


def results(table):
    return {row.name: row.result for row in table}


# What is right passes


@pytest.mark.parametrize("name", tiny.PRESETS)
def test_presets_pass_every_check(name):
    cfg = shallow(tiny.PRESETS[name])
    table = jf.check_invariants(cfg)
    assert table, str(table)
    skipped = {row.name for row in table if row.result == "not applicable"}
    assert skipped == (set() if cfg.encoder_layers else {"source"})
    assert [row.name for row in table] == list(CHECKS)


BIDIRECTIONAL = {
    "causal": False,
    "position": "learned",
    "residual": "post",
    "token_types": 2,
    "pooler": True,
    "has_head": False,
    "embedding_norm": True,
}


def test_a_model_that_sees_both_sides_passes():
    table = checked(dataclasses.replace(CFG, **BIDIRECTIONAL), [*MIXING, "gradients"])
    assert table, str(table)
    assert [row.name for row in table if row.result != "ok"] == ["future", "cached"]


@pytest.mark.parametrize(
    ("fields", "not_applicable"),
    [
        ({"mlp": example.squared_relu, "position": example.alibi}, []),
        ({"norm": example.ScaleNorm, "attention": example.MeanAttention}, []),
        ({"attention": hybrid.Retention(), "n_layers": 2, "window": None}, ["packed"]),
    ],
    ids=["squared ReLU, ALiBi", "ScaleNorm, mean attention", "a recurrence that refuses segments"],
)
def test_components_of_users_pass(fields, not_applicable):
    table = checked(dataclasses.replace(CFG, **fields), MIXING)
    assert table, str(table)
    assert [row.name for row in table if row.result == "not applicable"] == not_applicable


# What is wrong fails


def attention(change=lambda info: info, **fields):
    """The library's attention, with a change of where its tokens stand, or of the config that it reads."""

    def apply(params, x_BTD, cfg, *, info=None, cross_attention_kv=None, **rest):
        if cross_attention_kv is not None:
            k_BKSH, v_BKSH, key_info = cross_attention_kv
            cross_attention_kv = k_BKSH, v_BKSH, change(key_info)
        changed = dataclasses.replace(cfg, **fields)
        where = {"info": change(info), "cross_attention_kv": cross_attention_kv}
        return jf.attention.grouped_apply(params, x_BTD, changed, **where, **rest)

    spec, cache, key_value = jf.attention.grouped_spec, jf.attention.grouped_cache, jf.attention.key_value
    return jf.Component(spec, apply, cache=cache, key_value=key_value)


def norm(axis):
    """Root mean squares over another axis than the features."""

    def apply(params, x, cfg):
        return x * jax.lax.rsqrt(jnp.square(x).mean(axis, keepdims=True) + cfg.norm_eps) * params["gain"]

    return jf.Component(spec=lambda cfg, dim="D": {"gain": jf.gain(dim)}, apply=apply)


def mlp(change):
    """``change`` of the library's feed-forward, which it gets as a function of x, and of its parameters and x."""
    plain = jf.mlp.CHOICES["swiglu"]
    apply = lambda params, x_BTD, cfg: change(lambda x: plain.apply(params, x, cfg), params, x_BTD)
    return jf.Component(spec=plain.spec, apply=apply)


def without_psum(f, params, x_BTD):
    """Each device adds up its own part of F, and nobody adds up the parts."""
    if current() is None:
        return f(x_BTD)
    weights = {"gate": P(None, "tensor"), "up": P(None, "tensor"), "down": P("tensor")}
    mapped = lambda params, x: jf.mlp.CHOICES["swiglu"].apply(params, x, CFG)
    return jax.shard_map(mapped, in_specs=(weights, P()), out_specs=P(), axis_names=set(AXES), check_vma=False)(params, x_BTD)


def counting():
    """A feed-forward that knows how often it has been called."""
    calls = itertools.count(1)
    return mlp(lambda f, params, x: f(x) * (1 + 0.1 * next(calls)))


class LowAngles:
    """RoPE with angles in the dtype of the model."""

    site = "heads"
    spec = staticmethod(lambda cfg: {})

    @staticmethod
    def apply(params, x, positions, cfg):
        return jf.position.CHOICES["rope"].apply(params, x, positions.astype(x.dtype), cfg)


MIXES_TIME = ["causal", "future", "cached", "padded right", "padded left", "packed"]
NOTHING = jf.Component(  # attention that reads no token
    spec=lambda cfg: {"out": jf.weight(cfg, "D", "O")},
    cache=lambda cfg: {},
    apply=lambda params, x, cfg, *, cache=None, **rest: (jf.dense("BTD,DO->BTO", x, params["out"]), cache),
)
WRONG = {
    "sees the future": ({"attention": attention(causal=False)}, ["causal", "future", "cached"]),
    "ignores segments": ({"attention": attention(lambda info: info.replace(segment=None))}, ["packed"]),
    "ignores padding": ({"attention": attention(lambda info: info.replace(valid=None))}, ["padded right", "padded left"]),
    "counts positions from 0 in a chunk": (
        {"attention": attention(lambda info: info.replace(position=jnp.arange(info.position.shape[1])[None]))},
        ["cached"],
    ),
    "is causal where it must not be": ({"attention": attention(causal=True), "causal": False}, ["causal", "padded right"]),
    "normalises over the batch": ({"norm": norm(0)}, ["cached", "batched", "padded right", "padded left"]),
    "normalises over time": ({"norm": norm(1)}, MIXES_TIME),
    "mixes positions outside attention": ({"mlp": mlp(lambda f, params, x: f(x) + x.mean(1, keepdims=True))}, MIXES_TIME),
    "a recurrence that goes on": ({"attention": example.MovingAverage(0.5)}, ["packed"]),
    "reads no other token": ({"attention": NOTHING}, ["causal", "cached", "padded left", "packed"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_mixes_wrongly_fails_what_it_breaks(name):
    fields, failing = WRONG[name]
    table = checked(dataclasses.replace(CFG, **fields), MIXING)
    assert list(table.failed) == failing, str(table)
    assert not table
    for row in table:
        if row.result == "FAILED":
            assert f"{row.name}: {row.note}" in str(table) and CHECKS[row.name].cause in row.note


ELSEWHERE = {
    "python state": ({"mlp": counting()}, ["repeatable", "jit"], ["causal"]),
    "randomness at trace time": (
        {"mlp": mlp(lambda f, params, x: f(x) * np.random.default_rng().uniform(1, 2))},
        ["repeatable", "jit"],
        ["causal"],
    ),
    "no sum over the mesh": ({"mlp": mlp(without_psum)}, ["sharded"], ["batched"]),
    "float32 in bfloat16": ({"mlp": mlp(lambda f, params, x: f(x).astype("float32"))}, ["bfloat16"], ["batched"]),
    "angles in bfloat16": ({"position": LowAngles}, ["bfloat16"], ["positions"]),
    "no gradient": ({"mlp": mlp(lambda f, params, x: jax.lax.stop_gradient(f(x)))}, ["gradients"], ["batched"]),
    "no finite gradient": (
        {"mlp": mlp(lambda f, params, x: f(x) + jnp.where(x > 0, jnp.sqrt(x), 0.0))},
        ["gradients"],
        ["batched"],
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_wrong_elsewhere_fails_what_it_breaks(name):
    fields, failing, holding = ELSEWHERE[name]
    table = checked(dataclasses.replace(CFG, **fields), [*failing, *holding])
    assert list(table.failed) == failing, str(table)


def test_a_scan_that_hides_python_state_and_what_is_recomputed():
    """A state that differs by layer is one for all in a scan, and another one when it is traced again."""
    cfg = dataclasses.replace(CFG, n_layers=2, mlp=counting())
    assert jf.check_invariants(cfg, checks=["scanned", "remat"]).failed == ("scanned", "remat")


def test_padding_of_a_source_that_is_read():
    pairs = dataclasses.replace(CFG, encoder_layers=1)
    assert jf.check_invariants(pairs, checks="source")
    wrong = dataclasses.replace(pairs, attention=attention(lambda info: info and info.replace(valid=None)))
    assert jf.check_invariants(wrong, checks="source").failed == ("source",)


def test_embeddings_that_are_not_what_tokens_are(monkeypatch):
    embed = jf.model.embed
    doubled = lambda params, tokens, *rest: embed(params, tokens, *rest) * (1 if tokens is None else 2)
    monkeypatch.setattr(jf.model, "embed", doubled)
    assert jf.check_invariants(CFG, checks=["embeddings", "batched"]).failed == ("embeddings",)


# The report


def test_errors_of_a_component_are_failures_and_refusals_are_not():
    def apply(params, x_BTD, cfg, *, info=None, cache=None, **rest):
        if info.segment is not None:
            raise ValueError("no segments here")
        if info.valid is not None:
            x_BTD = x_BTD + jnp.ones((3, 3, 3))  # an error of JAX's
        if cache is not None:
            raise ValueError("no cache, although there is cache(cfg)")
        return jf.attention.grouped_apply(params, x_BTD, cfg, info=info, **rest)

    component = jf.Component(spec=jf.attention.grouped_spec, cache=jf.attention.grouped_cache, apply=apply)
    table = checked(dataclasses.replace(CFG, attention=component), MIXING)
    assert list(table.failed) == ["cached", "padded right", "padded left"]
    notes = {row.name: row.note for row in table}
    assert notes["packed"] == "refused, ValueError: no segments here" and results(table)["packed"] == "not applicable"
    assert "no cache, although" in notes["cached"] and "ncompatible shapes" in notes["padded left"]


def test_the_table_says_what_was_found(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [jax.devices()[0]])
    table = jf.check_invariants(CFG, checks=["sharded", "batched", "future"], key=jax.random.key(3), batch=2, length=4)
    text = str(table)
    assert text.startswith("0 of 3 checks failed (layers: 1, parameters: ") and "2 × 4" in text
    assert "--xla_force_host_platform_device_count=8" in text and results(table)["sharded"] == "not applicable"
    row = list(table)[1]
    assert row.name == "batched" and row.difference <= row.tolerance == pytest.approx(2**-17 * 2) and "roundings" in row.reason
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.result = "ok"


def test_what_is_asked_for_is_checked_first():
    with pytest.raises(ValueError, match="unknown check 'packd'; did you mean 'packed'"):
        jf.check_invariants(CFG, checks=["packd"])
    for wrong in ({"batch": 1}, {"length": 3}, {"length": 2}):
        with pytest.raises(ValueError, match="at least 2, and length=.* at least 4"):
            jf.check_invariants(CFG, **wrong)
    with pytest.raises(ValueError, match="parameters do not fit the config"):
        jf.check_invariants(CFG, {"embedding": {}})
    with pytest.raises(TypeError, match="takes no keyword 'seed'.*key=jax.random.key"):
        jf.check_invariants(CFG, seed=3)


def test_given_parameters_are_used():
    """A weight of 0 in front of another leaves it without a gradient; fresh parameters have none."""
    params = tiny.drawn(CFG)
    down = params["decoder"]["layers"]["mlp"]["down"]
    params["decoder"]["layers"]["mlp"]["down"] = jnp.zeros_like(down)
    table = jf.check_invariants(CFG, params, checks="gradients")
    assert table.failed == ("gradients",)
    assert "the gradient of decoder.layers.mlp.gate in layer 0 is 0; the gradient of decoder.layers.mlp.up" in str(table)


# The page


@pytest.mark.parametrize("number", [2, len(CHECKS)])
def test_the_example_of_the_page_runs(number, capsys, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    section = page.split("## Check a model\n")[1].split("\n## ")[0]
    assert dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)) == {n: c.claim for n, c in CHECKS.items()}
    monkeypatch.setattr(invariants, "CHECKS", dict(list(CHECKS.items())[:number]))
    names: dict = {}
    for block in (page, section):
        exec(re.search(r"```python\n(.*?)```", block, re.DOTALL)[1], names)
    assert names["cfg"].mlp == names["LeakyMlp"](0.1)
    assert capsys.readouterr().out.startswith(f"0 of {number} checks failed")
