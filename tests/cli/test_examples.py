"""The examples run as their docstrings say, and show what they claim. Nothing in the library knows of them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, folder: Path, *command: str) -> str:
    """What ``python examples/NAME.py`` (or another command) prints; what it writes goes below ``folder``."""
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    command = (sys.executable, *(command or (str(ROOT / "examples" / f"{name}.py"),)))
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


def test_generate_in_scan_learns_what_is_rewarded(tmp_path):
    out = run("generate_in_scan", tmp_path)
    rewards = numbers(r"mean reward ([\d.]+)", out)
    assert len(rewards) == 4 and rewards[-1] > 0.95 > rewards[0]
    greedy = [int(number) for number in numbers(r"\d+", out.splitlines()[-1].partition(":")[2])]
    assert sum(after == (before + 1) % 12 for before, after in zip([3, *greedy], greedy, strict=False)) >= 7


def test_hybrid_decodes_with_its_caches(tmp_path):
    out = run("hybrid", tmp_path)
    difference, largest = map(float, re.search(r"differ by at most (\S+), of (\S+)", out).groups())
    assert 0 < difference < 1e-4 < 1 < largest
    assert "state BKHU" in out and "key BKSH" in out


def test_sigmoid_attention_is_trained_saved_loaded_and_sampled(tmp_path):
    small = [
        "--train.steps",
        "6",
        "--train.eval-every",
        "6",
        "--train.sample-tokens",
        "4",
        "--model.attention.temperature",
        "0.5",
    ]
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 200)
    small += ["--data.path", str(text), "--data.tokenizer", "byte", "--data.length", "32", "--run-dir", "run"]
    run("sigmoid_attention", tmp_path, str(ROOT / "train.py"), str(ROOT / "examples" / "sigmoid_attention.py"), *small)
    component = json.loads((tmp_path / "run" / "config.json").read_text())["model"]["attention"]
    assert component == {"component": "examples.sigmoid_attention:SigmoidAttention", "temperature": 0.5}
    sampled = run(
        "", tmp_path, "-m", "jaxformer.sample", "run", "def ", "--trust", "--max-new-tokens", "8", "--temperature", "0"
    )
    assert sampled.startswith("def ") and len(sampled.strip()) > 5


EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_short_and_say_that_nothing_changed(name):
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert f"examples/{name}.py" in text
    assert "no line of the library changed" in " ".join(text.split('"""')[1].split())
    assert len(text.splitlines()) <= {"own_loop": 40, "hybrid": 95, "sigmoid_attention": 80, "generate_in_scan": 70}.get(
        name, 60
    )


def test_the_library_knows_nothing_of_the_examples():
    assert not [path for path in (ROOT / "jaxformer").rglob("*.py") if re.search(r"\bexamples[./]\w+", path.read_text())]
