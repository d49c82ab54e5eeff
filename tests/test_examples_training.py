"""The examples about training run as their docstrings say, and show what they claim."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(name: str, folder: Path) -> str:
    """What ``python examples/NAME.py`` prints; what it writes goes below ``folder``."""
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def test_own_loop_learns_and_continues(tmp_path):
    losses = numbers(r"loss ([\d.]+)", run("own_loop", tmp_path))
    assert len(losses) == 3 and losses[-1] < 0.3
    assert run("own_loop", tmp_path) == "", "it was at its last step already"


def test_contrastive_finds_unseen_pairs(tmp_path):
    out = run("contrastive", tmp_path)
    before, after = numbers(r"loss ([\d.]+)", out)
    assert before > 3 and after < 1
    assert numbers(r"(\d+)% of unseen", out)[1] > 80


def test_data_from_iterator_trains_by_the_training_program(tmp_path):
    out = run("data_from_iterator", tmp_path)
    losses = numbers(r"validation loss ([\d.]+)", out)
    assert len(losses) == 2 and losses[-1] < 1.5 and (tmp_path / "runs" / "data_from_iterator" / "config.json").exists()


def test_muon_trains_by_a_flag_and_a_users_optimizer_by_its_name(tmp_path):
    out = run("muon", tmp_path)
    assert re.findall(r"--optim.name (\S+)", out) == ["muon", "examples.muon:normalized"]
    first, second = numbers(r"validation loss ([\d.]+)", out)
    assert first != second and max(first, second) < 4.5  # log(259) is 5.6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["own_loop", "contrastive", "data_from_iterator", "muon"])
def test_examples_are_short_and_say_that_nothing_changed(name):
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert f"python examples/{name}.py" in text
    assert "no line of the library changed" in " ".join(text.split('"""')[1].split())
    assert len(text.splitlines()) <= {"own_loop": 40}.get(name, 60)
