"""Config files and the command line of train.py."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxformer as jf
from jaxformer.nn import model
from jaxformer.training import run

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_config_file_loads(path):
    found, description = run.read_config(path)
    assert description and isinstance(found, jf.Config)
    assert model.spec(found.model) and jf.spec.count(model.spec(found.model), found.model) > 0
    assert found.data.length <= found.model.max_length or found.model.position == "rope"
    assert found.data.batch_size % found.train.microbatches == 0


def test_a_config_file_that_is_not_there(tmp_path, monkeypatch):
    (tmp_path / "small.py").write_text("")
    with pytest.raises(ValueError, match="no config file .*smal.py; did you mean '.*small.py'"):
        run.read_config(tmp_path / "smal.py")
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match="did you mean 'configs/quickstart.py'"):
        run.read_config(Path("configs/quikstart.py"))


@pytest.mark.parametrize("content", ["", "config = 3", "config = dict(model=None)"])
def test_a_file_without_a_config(content, tmp_path):
    (tmp_path / "c.py").write_text(content)
    with pytest.raises(ValueError, match=r"c\.py must define config = jaxformer\.Config\(\.\.\.\), not "):
        run.read_config(tmp_path / "c.py")


def test_the_command_line_changes_fields_and_derives_the_rest():
    path = ROOT / "configs" / "dates.py"
    before, _ = run.read_config(path)
    found = run.parse([str(path), "--model.d-model", "64", "--optim.lr", "0.5", "--train.steps", "7"], FILES[0]).config
    assert (found.model.d_model, found.optim.lr, found.train.steps, found.run_dir) == (64, 0.5, 7, "runs/dates")
    assert before.model.d_model != 64 and found.model == dataclasses.replace(before.model, d_model=64)
    assert run.parse(["--run-dir", "here"], path).config.run_dir == "here"


def test_widths_that_a_preset_derived_follow_the_command_line():
    path = ROOT / "configs" / "quickstart.py"
    found = run.parse([str(path), "--model.d-model", "384"], path).config.model
    assert (found.d_ff, found.head_dim, found.n_kv_heads) == (1024, 64, 2)
    assert run.parse([str(path), "--model.d-model", "384", "--model.d-ff", "512"], path).config.model.d_ff == 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.d-modle", "64"], "--model.d-model"),
        (["--optim.learning", "64"], "--optim"),
        (["--model.n-heads", "7"], "d_model=128 is not divisible by n_heads=7"),
        (["--model.mlp", "swigl"], "did you mean 'swiglu'"),
        (["--optim.lr", "-1"], "optim.lr=-1.0 must be above 0"),
        (["--train.steps", "many"], "--train.steps"),
        (["--train.parallel", "pmp"], "pmap"),
    ],
)
def test_wrong_arguments_exit_and_say_why(arguments, message, capfd):
    with pytest.raises(SystemExit) as stopped:
        run.parse(arguments, ROOT / "configs" / "dates.py")
    assert stopped.value.code not in (0, None)
    shown = re.sub(r"[│\s]+", " ", capfd.readouterr().err)
    assert message in shown


def test_help_explains_every_field():
    environment = os.environ | {"COLUMNS": "100", "TERM": "dumb"}  # one column of options
    command = [sys.executable, "train.py", "--help"]
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    lines = [line.strip("│ \n") for line in out.splitlines()]
    for prefix, cls in (
        ("model.", jf.ModelConfig),
        ("model.", jf.Execution),
        ("model.rope-scaling.", jf.RopeScaling),
        ("data.", jf.DataConfig),
        ("optim.", jf.OptimConfig),
        ("train.", jf.TrainConfig),
    ):
        for field in dataclasses.fields(cls):
            if dataclasses.is_dataclass(field.type) or field.name == "execution":
                continue  # its own fields are in the table above
            flag = f"--{prefix}{field.name.replace('_', '-')}"
            at = next((i for i, line in enumerate(lines) if re.match(rf"{flag}[ ,]|{flag}$", line)), None)
            assert at is not None, f"{flag} is not in the help"
            assert re.match(r"[^-(].{4}", lines[at + 1]), f"{flag} has no help: {lines[at + 1]!r}"
