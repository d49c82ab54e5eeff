"""Plans of programs that libtpu compiles: skipped where it is not installed."""

import json
import re

import pytest

import jaxformer as jf
from jaxformer.cost import command, hlo, model_flops
from jaxformer.cost.topology import GIB

pytest.importorskip("libtpu")

SMALL = [
    "--model.d-model",
    "256",
    "--model.n-heads",
    "2",
    "--model.head-dim",
    "128",
    "--model.d-ff",
    "512",
    "--model.n-layers",
    "4",
]
SMALL += ["--model.n-kv-heads", "2", "--model.vocab-size", "1024", "--data.length", "256", "--data.batch-size", "8"]


def plan(*arguments, capsys):
    made = command.plan_command(["llama2_7b", "--topology", "v5e:2x2", *SMALL, *arguments, "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(made.values()))
    return made


def test_a_training_step_for_four_chips(capsys):
    plain = ["--model.attention-kernel", "xla", "--model.position", "none"]  # rotary pairs cost products on TPUs
    found = plan("--model.remat", "full", *plain, capsys=capsys)
    (step,) = found.programs
    assert found.by == "compiler" and found.fits and found.devices == 4
    assert sum(step.memory.values()) == step.needed_bytes < step.available_bytes
    local = found.parameters * 4 / 4
    assert step.memory["parameters"] == pytest.approx(local, rel=0.05)  # 5%: norms are padded to whole tiles
    assert step.memory["optimizer"] == pytest.approx(2 * step.memory["parameters"], rel=0.01)
    of_parameters = {
        b.name.removeprefix("mu.").removeprefix("nu.") for b in step.largest if b.kind in ("parameters", "optimizer")
    }
    assert of_parameters and of_parameters <= {path for path, _ in jf.spec.walk(jf.model.spec(_model()))}
    weights, attention = step.model_flops - step.attention_flops, 2 * step.attention_flops  # masked scores are computed too
    head = 6 * step.tokens / 4 * 1024 * 256
    # Recomputed in the backward pass: blocks, but for their last product. 2e-3: norms are in N, and multiply nothing.
    last = 2 * step.tokens / 4 * 4 * 512 * 256
    assert step.hardware_flops == pytest.approx(weights + attention + (weights - head + attention) / 3 - last, rel=2e-3)
    gathers = next(c for c in step.collectives if c.kind == "all-gather")
    assert gathers.runs > gathers.count, "some are in the loop over layers"
    assert step.time.compute > 0 and step.time.estimate >= step.time.compute
    assert 0 < step.time.mfu <= step.time.compute_mfu < 1


def test_a_tpu_gets_its_kernel(capsys):
    (step,) = plan("--model.remat", "full", "--model.remat-save", "attention.mixed", capsys=capsys).programs
    assert any("splash_mha_fwd" in note and "splash_mha_dq" in note for note in step.notes)
    # Of the half that is not masked: 2 products forward, 7 backward in two kernels.
    assert step.kernel_flops == pytest.approx(step.attention_flops / 6 * 9, rel=0.01)


def test_generation_for_four_chips(capsys):
    found = plan("--decode", "--mesh.tensor", "2", "--mesh.fsdp", "2", capsys=capsys)
    reading, steps = found.programs
    cache = 2 * 4 * 8 * 256 * 2 * 128 * 2 / 4  # keys and values of 4 layers: rows over fsdp, heads over tensor
    assert steps.memory["cache"] == pytest.approx(cache, rel=0.01)
    assert reading.fits and steps.fits and steps.tokens == 16 * 8
    assert reading.model_flops * 4 == model_flops.prefill(_model(), 8, 256).total


def test_text_that_is_not_understood_leaves_the_compilers_totals(capsys, monkeypatch):
    plain = ["--model.attention-kernel", "xla", "--model.n-layers", "1"]
    (whole,) = plan(*plain, capsys=capsys).programs
    monkeypatch.setattr(hlo, "_text", lambda folder, stage, text=hlo._text: text(folder, stage).replace("ENTRY", "MAIN"))
    (step,) = plan(*plain, capsys=capsys).programs
    assert whole.largest and not step.largest and not step.collectives
    assert not any("not understood" in note for note in whole.notes) and "not understood" in step.notes[0]
    known = whole.memory["parameters"] + whole.memory["optimizer"] + whole.memory["batch"]
    assert step.memory["arguments"] == pytest.approx(known, rel=0.01) and step.fits
    assert step.hardware_flops > 0 and step.model_flops == whole.model_flops and step.time.estimate > 0


def _model():
    return command.parse_plan(["llama2_7b", "--topology", "v5e:2x2", *SMALL])[0].model


@pytest.mark.slow
def test_what_does_not_fit_is_told_and_changed(capsys):
    """Scores of 6 × 8,192 × 8,192 a head and device, kept for every layer."""
    big = ["--model.max-length", "8192", "--data.length", "8192", "--data.batch-size", "24", "--model.remat", "none"]
    found = plan(*big, "--model.attention-kernel", "xla", capsys=capsys)  # splash would never hold the scores
    (step,) = found.programs
    assert not found.fits and step.needed_bytes > step.available_bytes == int(15.75 * GIB)
    assert re.search("attention", step.largest[0].name) and step.largest[0].kind == "activations"
    assert found.trials and found.trials[-1].fits and "--model.remat" in found.trials[-1].flags
