"""The table of a forward: literal shapes and FLOPs, the shapes that devices really hold, and XLA's own counts."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
import tiny
from jax.sharding import AbstractMesh, Mesh

import jaxformer as jf
from examples import hybrid
from jaxformer.config.components import Component
from jaxformer.cost import command
from jaxformer.nn.dense import dense
from jaxformer.parallel.sharding import MeshConfig
from jaxformer.training import run

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = Path(__file__).parents[2]
PRESETS = {name: f() for name, f in jf.presets.WITH_SIZES.items()}


def by_name(found):
    return {row.name: row for row in found.rows}


# Literal values

WALK = [
    ("embedding", "", "BTD", [1, 4, 8], 0),
    ("decoder.in", "", "BTD", [1, 4, 8], 0),
    ("decoder.layer.attention.query", "BTD,DKGH->BKGTH", "BKGTH", [1, 2, 1, 4, 4], 512),
    ("decoder.layer.attention.key", "BSD,DKH->BKSH", "BKSH", [1, 2, 4, 4], 512),
    ("decoder.layer.attention.value", "BSD,DKH->BKSH", "BKSH", [1, 2, 4, 4], 512),
    ("decoder.layer.attention.scores", "BKGTH,BKSH->BKGTS", "BKGTS", [1, 2, 1, 4, 4], 256),
    ("decoder.layer.attention.weights", "", "BKGTS", [1, 2, 1, 4, 4], 0),
    ("decoder.layer.attention.mixed", "BKGTS,BKSH->BKGTH", "BKGTH", [1, 2, 1, 4, 4], 256),
    ("decoder.layer.attention.out", "BKGTH,KGHD->BTD", "BTD", [1, 4, 8], 512),
    ("decoder.layer.mlp.up", "BTD,DF->BTF", "BTF", [1, 4, 32], 2048),
    ("decoder.layer.mlp.hidden", "", "BTF", [1, 4, 32], 0),
    ("decoder.layer.mlp.down", "BTF,FD->BTD", "BTD", [1, 4, 8], 2048),
    ("decoder.layer.mlp.out", "", "BTD", [1, 4, 8], 0),
    ("decoder.layer.out", "", "BTD", [1, 4, 8], 0),
    ("head", "BTD,DV->BTV", "BTV", [1, 4, 3], 192),
    ("logits", "", "BTV", [1, 4, 3], 0),
]


def test_the_shape_walk():
    """B 1, T 4, D 8, 2 heads of width 4, as it is printed, line by line."""
    cfg = jf.ModelConfig(vocab_size=3, d_model=8, n_layers=1, n_heads=2, mlp="relu")
    found = jf.explain(cfg, 1, 4)
    assert [(row.name, row.formula, row.letters, list(row.shape), row.flops) for row in found.rows] == WALK
    lines = str(found).splitlines()
    assert lines[0] == "B 1 · T 4"
    for line, (name, formula, letters, shape, flops) in zip(lines[3:], WALK, strict=False):
        expected = [name, formula, letters, str(shape), "float32", f"{4 * math.prod(shape)} B".replace(",", "")]
        assert line.split("  ")[0].strip() == name
        assert all(text in line for text in expected) and (f"{flops:,}" in line) == (flops > 0)
    assert found.forward_flops == 6848 and found.training_flops == 20544
    assert sum(row.share for row in found.rows) == pytest.approx(1)


def test_the_flops_of_gpt2():
    """2 · weights · tokens, and 4·T·T·D a layer and row for scores and mixing."""
    found = jf.explain(jf.presets.gpt2(), 8, 1024)
    assert found.forward_flops == 2 * (12 * 12 * 768**2 + 50_257 * 768) * 8 * 1024 + 12 * 8 * 4 * 1024**2 * 768
    assert found.parameters == 124_439_808 and found.parameter_bytes == 4 * 124_439_808
    assert by_name(found)["decoder.layer.attention.scores"].times == 12
    assert str(found).count("decoder.layer.mlp.up") == 1


def test_the_flops_of_llama2_7b():
    found = jf.explain(jf.presets.llama2_7b(), 2, 4096)
    weights = 6_738_415_616 - 32_000 * 4096 - 65 * 4096  # without the embedding, which is looked up, and the norms
    assert found.forward_flops == 2 * weights * 2 * 4096 + 32 * 2 * 4 * 4096**2 * 4096


def test_the_flops_and_the_cache_of_deepseek_v3():
    """Experts by what a token goes to; scores of heads of 128 + 64, values of 128; 512 + 64 numbers of a token and layer."""
    cfg = jf.presets.deepseek_v3()
    found = jf.explain(cfg, 1, 4096)
    elementwise = 129_280 * 7168 + 61 * (2 * 7168 + 1536 + 512) + 7168 + 58 * 256  # embedding, norms, selection biases
    products = 2 * (37_552_297_472 - elementwise) * 4096
    attention, combining = 61 * 2 * 4096**2 * 128 * (192 + 128), 58 * 2 * 4096 * 8 * 7168
    assert found.active_parameters == 37_552_297_472
    assert found.forward_flops == products + attention + combining
    rows = by_name(found)
    assert (rows["decoder.layer[0-2].mlp.up"].times, rows["decoder.layer[3-60].moe.up"].times) == (3, 58)
    assert rows["decoder.layer[3-60].moe.up"].shape == (8 * 4096, 2048)
    (kept,) = found.cache
    assert (kept.numbers, kept.bytes, kept.layers) == (512 + 64, 2 * 576, 61)
    assert found.cache_bytes == 70_272
    other = found.cache_multi_head
    assert (other.numbers, other.bytes, other.layers) == (2 * 128 * 128, 65_536, 61)
    assert "576 numbers" in str(found) and "32,768 numbers" in str(found)


def test_the_token_after_the_next_is_of_training_alone():
    cfg = tiny.PRESETS["deepseek"]
    alone, more = jf.explain(cfg, 2, 8), jf.explain(dataclasses.replace(cfg, mtp=True), 2, 8)
    assert alone.forward_flops == more.forward_flops and alone.training_flops == 3 * alone.forward_flops
    own = {row.name: row.flops for row in more.rows if row.name.startswith("mtp.")}
    last = {row.name: row.flops for row in alone.rows if row.name.startswith("decoder.layer[1-2].") and row.flops}
    joined = {"mtp.join_token": 2 * 16 * 32**2, "mtp.join_hidden": 2 * 16 * 32**2, "mtp.head": 2 * 16 * 32 * 67}
    expected = {name.replace("decoder.layer[1-2]", "mtp"): flops for name, flops in last.items()} | joined
    assert {name: flops for name, flops in own.items() if flops} == expected
    assert more.training_flops - alone.training_flops == 3 * sum(expected.values())


def test_layers_of_one_kind_are_one_and_windows_bound_the_cache():
    found = jf.explain(tiny.PRESETS["mixed_windows"], 1, 8)
    assert {name.split(".attention")[0]: row.times for name, row in by_name(found).items() if name.endswith("query")} == {
        "decoder.layer[1]": 1,
        "decoder.layer[0,2]": 2,
    }
    assert {kept.name: (kept.numbers, kept.layers, kept.window) for kept in found.cache} == {
        "decoder.layer[1]": (64, 1, None),
        "decoder.layer[0,2]": (64, 2, 4),
    }


def test_layers_of_other_components_have_their_own_rows_and_cache():
    """Three layers of a recurrence to one of attention: its two products run for every token, its state is one per row."""
    cfg = hybrid.cfg
    found = jf.explain(cfg, 2, 8)
    rows = by_name(found)
    state, read = rows["decoder.layer[0-2,4-6].attention.write"], rows["decoder.layer[0-2,4-6].attention.read"]
    assert (state.times, state.flops, read.flops) == (6, 2 * 2 * 8 * 2 * 16 * 32, 2 * 2 * 8 * 4 * 16 * 32)
    assert (rows["decoder.layer[3,7].attention.scores"].times, rows["decoder.layer[3,7].mlp.up"].times) == (2, 2)
    assert {(kept.name, kept.numbers, kept.bytes, kept.layers, kept.per) for kept in found.cache} == {
        ("decoder.layer[0-2,4-6]", 2 * 16 * 32, 4 * 2 * 16 * 32, 6, "row"),
        ("decoder.layer[3,7]", 2 * 2 * 16, 4 * 2 * 2 * 16, 2, "token"),
    }
    assert found.cache_bytes == 2 * 4 * 2 * 2 * 16 and "4,096 B per row in each of 6 layers" in str(found)


def test_an_encoder_and_cross_attention():
    found = jf.explain(tiny.PRESETS["transformer_base"], 2, 8)
    rows = by_name(found)
    assert [rows[f"{stack}.layer.attention.query"].times for stack in ("encoder", "decoder")] == [3, 3]
    assert rows["decoder.layer.cross_attention.key"].flops == 2 * 2 * 8 * 32 * 32
    assert (found.cache_source.numbers, found.cache_source.layers) == (2 * 32, 3)
    assert list(rows).index("encoder.layer.out") < list(rows).index("decoder.in")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset(name):
    """Each weight meets each token that its stack reads, an expert's those that go to it; an embedding is looked up."""
    cfg = PRESETS[name]
    batch, length = 2, min(512, cfg.max_length)
    found = jf.explain(cfg, batch, length)
    free = sum(row.flops * row.times for row in found.rows if row.name.rsplit(".")[-1] in ("scores", "mixed", "combined"))
    met = cfg.vocab_size * cfg.d_model * cfg.tied_head
    for path, param in jf.spec.walk(jf.model.spec(cfg)):
        if param.decay and not path.startswith("embedding") and ".position." not in path:
            is_expert = "E" in param.dims and not path.endswith("router")
            part = (cfg.experts.per_token, cfg.experts.n_experts) if is_expert else (1, 1)
            met += math.prod(param.shape(cfg)) * part[0] // part[1]
    assert found.forward_flops == 2 * met * batch * length + free
    assert free > 0 and found.parameters == jf.spec.count(jf.model.spec(cfg), cfg)
    assert len(str(found).splitlines()) > len(found.rows)


# What the compiler says


def multiplied(program: str) -> int:
    """FLOPs of the products in a program's text."""
    total = 0
    for line in filter(lambda line: "stablehlo.dot_general" in line, program.splitlines()):
        contracted = [int(axis) for axis in re.findall(r"\d+", re.search(r"contracting_dims = \[([^]]*)\]", line)[1])]
        left, out = re.search(r": \(tensor<([^>]*)>, tensor<[^>]*>\) -> tensor<([^>]*)>", line).groups()
        sizes = [int(size) for size in left.split("x")[:-1]]
        total += 2 * math.prod(int(size) for size in out.split("x")[:-1]) * math.prod(sizes[axis] for axis in contracted)
    return total


@pytest.mark.parametrize("name", [*tiny.PRESETS, *(pytest.param(n, marks=pytest.mark.slow) for n in published.NAMES)])
def test_products_are_those_of_the_whole_program(name):
    """Exactly: of all its layers, as it is given to XLA. (So few pairs of tokens and experts are not filled up to blocks.)"""
    cfg = tiny.PRESETS[name] if name in tiny.PRESETS else published.model(name)[0]
    params, given = jf.spec.abstract(jf.model.spec(cfg), cfg), tiny.inputs(cfg)

    def forward(params, tokens):
        if cfg.has_head:
            return jf.forward(params, tokens, cfg, **given)
        return jf.model.pooled(params, jf.hidden(params, tokens, cfg), cfg)

    lowered = jax.jit(forward).lower(params, tiny.tokens(cfg, 2, 7))
    found = jf.explain(cfg, 2, 7)
    assert multiplied(lowered.as_text()) == found.forward_flops > 0
    assert len({row.name for row in found.rows}) == len(found.rows)


SMALL = {"vocab_size": 512, "d_model": 128, "n_layers": 2, "n_heads": 4, "max_length": 64}
XLA = {
    "gpt2": jf.presets.gpt2(**SMALL),
    "llama": jf.presets.llama(**SMALL, n_kv_heads=2),
    "transformer_base": jf.presets.transformer_base(**SMALL),
}


@pytest.mark.parametrize("name", XLA)
def test_flops_and_bytes_are_those_of_xla(name):
    """XLA counts what is done to elements too, and so has more: a share that falls as 1/D, and is below 3% at D = 128."""
    cfg = XLA[name]
    assert not cfg.execution.scan  # XLA counts the body of a loop once
    found = jf.explain(cfg, 2, 64)
    ids = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    params = jf.spec.abstract(jf.model.spec(cfg), cfg)
    given = {"source": ids} if cfg.encoder_layers else {}
    compiled = jax.jit(lambda p, ids, given: jf.forward(p, ids, cfg, **given)).lower(params, ids, given).compile()
    assert 0 < compiled.cost_analysis()["flops"] / found.forward_flops - 1 < 0.03
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == found.parameter_bytes + 2 * 64 * 4 * (1 + len(given))
    assert memory.output_size_in_bytes == by_name(found)["logits"].bytes


# On a mesh


def test_shapes_of_a_device_are_those_it_really_holds():
    cfg, config = tiny.PRESETS["llama_gqa"], MeshConfig(data=2, fsdp=2, tensor=2)
    mesh = config.make()
    found = by_name(jf.explain(cfg, 4, 8, mesh))
    assert found == by_name(jf.explain(cfg, 4, 8, config)) == by_name(jf.explain(cfg, 4, 8, mesh.abstract_mesh))
    with jax.set_mesh(mesh):
        _, seen = jax.jit(jf.capture(lambda p, t: jf.forward(p, t, cfg)))(tiny.drawn(cfg), tiny.tokens(cfg, 4, 8))
    held = {name: (x.shape, x.sharding.shard_shape(x.shape)) for name, x in seen.items()}
    assert len(held) == 3 + 11 * cfg.n_layers
    for name, (whole, own) in held.items():
        row = found[".".join("layer" if part.isdigit() else part for part in name.split("."))]
        assert (row.shape, row.device_shape) == (whole, own), name
        assert own != whole
    assert found["decoder.layer.attention.query"].device_shape == (1, 1, 2, 8, 8)
    assert found["logits"].device_shape == (1, 8, 67)  # the vocabulary does not divide


def test_a_mesh_that_is_set_changes_nothing():
    cfg = tiny.PRESETS["deepseek"]
    with jax.set_mesh(MeshConfig(fsdp=2, tensor=2).make()):
        inside = jf.explain(cfg, 4, 8)
    assert inside == jf.explain(cfg, 4, 8)


def test_parameters_of_a_device():
    found = jf.explain(jf.presets.llama2_7b(), 64, 128, MeshConfig(fsdp=8, tensor=8))
    assert found.devices == 64
    # all that is large is spread over all devices; a norm's gain over the 8 of fsdp
    assert found.parameter_bytes_device == (found.parameter_bytes - 65 * 4096 * 4) // 64 + 65 * 4096 * 4 // 8
    assert "per device of 64" in str(found)


# What is refused, and what nobody told of

LLAMA = tiny.PRESETS["llama_gqa"]


@pytest.mark.parametrize(
    ("cfg", "given", "message"),
    [
        (LLAMA, (0, 8), "batch=0 must be an integer of at least 1"),
        (LLAMA, (2, 8.0), "length=8.0 must be an integer"),
        (LLAMA, (6, 8, MeshConfig(fsdp=4)), "batch_size=6 is not divisible by 4 devices; the nearest is 8"),
        (LLAMA, (4, 7, MeshConfig(context=2)), "length=7 is not divisible by 2 devices"),
        (LLAMA, (4, 8, "fsdp"), "mesh must be a MeshConfig or a mesh of JAX, not str"),
        (LLAMA, (4, 8, AbstractMesh((2,), ("x",))), "mesh has the axes x; it must have data, fsdp"),
        (LLAMA, (4, 8, Mesh(np.array(jax.devices()[:2]), ("rows",))), "mesh has the axes rows"),
        (tiny.PRESETS["gpt2"], (1, 25), "length 25 goes past the learned table of max_length=24"),
    ],
)
def test_what_does_not_fit_is_refused(cfg, given, message):
    with pytest.raises(ValueError, match=message):
        jf.explain(cfg, *given)


def _spec(cfg):
    return {"up": jf.weight(cfg, "D", "F"), "down": jf.weight(cfg, "F", "D")}


def _einsums(params, x_BTD, cfg):
    return jnp.einsum("BTF,FD->BTD", jax.nn.relu(jnp.einsum("BTD,DF->BTF", x_BTD, params["up"])), params["down"])


_linear = jax.jit(lambda x, kernel: dense("BTD,DF->BTF", x, kernel))


def _jitted(params, x_BTD, cfg):
    """Of two products alike, of which one is traced; and a loop."""
    double = _linear(x_BTD, params["up"]) + _linear(x_BTD, params["up"])
    step = lambda total, row: (total + row @ params["down"], None)
    return jax.lax.scan(step, jnp.zeros_like(x_BTD), jnp.stack([jax.nn.relu(double)] * 3))[0]


def test_products_that_nobody_told_of_are_found():
    """In a component of one's own, which may multiply as it likes."""
    plain = dataclasses.replace(LLAMA, mlp="relu", d_ff=48)
    up = 2 * 2 * 8 * 32 * 48
    for _ in range(2):  # programs that are kept from the first time are counted as before
        for apply, products in ((_einsums, 2), (_jitted, 5)):
            found = jf.explain(dataclasses.replace(plain, mlp=Component(_spec, apply)), 2, 8)
            own = [row for row in found.rows if row.name.startswith("decoder.layer.mlp") and row.formula]
            assert sum(row.flops for row in own) == products * up and {row.times for row in own} == {3}
            others = [row.name.split(".")[2] for row in found.rows if row.name.startswith("decoder.layer.")]
            assert others.index("mlp") > others.index("attention") and others[-1] == "out"
            if apply is _einsums:
                assert [row.formula for row in own] == ["BTD,DF->BTF", "BTF,FD->BTD"]


def test_a_loop_of_unknown_length_is_refused():
    def apply(params, x_BTD, cfg):
        again = lambda x: jax.nn.relu(x @ params["up"]) @ params["down"]
        return jax.lax.while_loop(lambda x: x.sum() > 0, again, x_BTD)

    with pytest.raises(ValueError, match="decoder/0/mlp.*inside a while"):
        jf.explain(dataclasses.replace(LLAMA, mlp=Component(_spec, apply)), 2, 8)


# The command


def test_the_command_reads_config_files_and_presets():
    path = ROOT / "configs" / "dates.py"
    config, _ = run.read_config(path)
    options = command.parse_explain([str(path), "--model.n-layers", "1", "--mesh.fsdp", "2"])
    assert options.model == dataclasses.replace(config.model, n_layers=1) and options.mesh == MeshConfig(fsdp=2)
    assert (options.batch, options.length) == (config.data.batch_size, config.data.length)
    assert command.parse_explain(["gpt2", "--batch", "3"]) == command.ExplainOptions(
        model=jf.presets.gpt2(), batch=3, length=1024
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt3"], "no config file or preset gpt3; did you mean 'gpt2'"),
        (["--batch", "3"], "the first argument must be a config file or a preset; presets: decoder_2017"),
        (["llama"], "no config file or preset llama; did you mean"),
        (["gpt2", "--batch", "0"], "batch=0 must be at least 1"),
        (["gpt2", "--json", "--markdown"], "give either --markdown or --json"),
        (["gpt2", "--model.n-layer", "3"], "--model.n-layers"),
    ],
)
def test_wrong_arguments_say_why(arguments, message, capfd):
    with pytest.raises((ValueError, SystemExit)) as error:
        command.parse_explain(arguments)
    told = re.sub(r"[│\s]+", " ", capfd.readouterr().err) if error.type is SystemExit else str(error.value)
    assert message in told


def test_the_command_writes_json_and_markdown(capsys):
    command.explain_command(["gpt2", "--json", "--batch", "1"])
    found = json.loads(capsys.readouterr().out)
    assert found["forward_flops"] == jf.explain(jf.presets.gpt2(), 1, 1024).forward_flops
    command.explain_command(["gpt2", "--markdown", "--batch", "1", "--mesh.tensor", "4"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + len(found["rows"]) + 2 + 5
    assert {line.count("|") for line in lines[: 2 + len(found["rows"])]} == {11}


def test_the_command_as_a_program():
    asked = [sys.executable, "-m", "jaxformer.explain", "deepseek_v3", "--batch", "1", "--length", "4096"]
    done = subprocess.run([*asked, "--mesh.expert", "1"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == str(jf.explain(PRESETS["deepseek_v3"], 1, 4096))
    wrong = subprocess.run([*asked, "--mesh.data", "2"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: batch_size=1 is not divisible by 2 devices")
