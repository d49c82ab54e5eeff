"""Real processes of train.py: killed and gone on with, stopped by Ctrl-C, started again, refused."""

import dataclasses
import functools
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jaxformer.parallel.exit_codes import STOPPED
from jaxformer.training import run
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.records import TIMINGS
from jaxformer.training.run_files import read_tokenizer, write_run

ROOT = Path(__file__).parents[2]
STEPS = 6
CONFIGS = ("quickstart", "dates")
KINDS = ("jit", "pmap")
TINY = {
    "model.d-model": 16,
    "model.n-layers": 1,
    "model.n-heads": 2,
    "model.d-ff": 32,
    "model.residual-dropout": 0.1,
    "data.batch-size": 4,
    "data.validation-rows": 4,
    "train.steps": STEPS,
    "train.eval-every": 3,
    "train.log-every": 1,
}
ONLY = {
    "quickstart": {
        "model.vocab-size": 300,
        "model.n-kv-heads": 1,
        "data.vocab-size": 300,
        "data.length": 16,
        "train.sample-tokens": 8,
    },
    "dates": {"model.encoder-layers": 1},
}

# Runs train.py's main with a hook after the update of one step has been dispatched.
DRIVER = """
import os, signal, sys, time
from jaxformer.cli import train
step_at, action = int(sys.argv[1]), sys.argv[2]
report = train.Report.train

def hooked(self, step, metrics):
    report(self, step, metrics)
    if step == step_at and action == "kill":
        while not (self.directory / "checkpoints" / "3").exists():  # still being written when step 4 began
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    elif step == step_at:
        os.kill(os.getpid(), signal.SIGINT)

train.Report.train = hooked
train.launch(sys.argv[3:])
"""


class Run(NamedTuple):
    """A run directory and the processes that have worked in it."""

    directory: Path
    processes: list


def start(arguments: list[str]) -> subprocess.CompletedProcess:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


class Trainer:
    """Starts train.py, two processes at a time."""

    def __init__(self, folder: Path):
        self.folder, self.text = folder, folder / "text.txt"
        rng = random.Random(0)
        words = [
            "def",
            "return",
            "if",
            "else",
            "for",
            "while",
            "in",
            "not",
            "self",
            "value",
            "name",
            "list",
            "dict",
            "index",
            "range",
            "print",
        ]
        self.text.write_text("\n".join(" ".join(rng.choices(words, k=8)) for _ in range(200)))
        self.pool = ThreadPoolExecutor(2)
        self.whole = {(c, k): self.submit([None], c, k) for c in CONFIGS for k in KINDS}
        self.killed = {(c, k): self.submit([(5, "kill"), None], c, k) for c in CONFIGS for k in KINDS}
        self.stopped = {
            3: self.submit([(3, "stop"), None], "dates", "jit"),
            4: self.submit([(4, "stop"), None], "quickstart", "jit"),
        }

    def arguments(self, directory: Path, config: str, kind: str, **changes) -> list[str]:
        fields = TINY | ONLY[config] | {"train.parallel": kind, "run-dir": directory}
        if config == "quickstart":
            fields["data.path"] = self.text
        flags = [str(part) for name, value in (fields | changes).items() for part in (f"--{name}", value)]
        return [f"configs/{config}.py", *flags]

    def submit(self, interruptions: list, config: str, kind: str) -> Future:
        """A process for each of ``interruptions``, one after another in the same run directory; None: the plain command."""
        name = "-".join([config, kind, *(f"{i[1]}{i[0]}" for i in interruptions if i)])
        arguments = self.arguments(self.folder / name, config, kind)

        def work():
            prefixes = [["-c", DRIVER, *map(str, i)] if i else ["train.py"] for i in interruptions]
            return Run(self.folder / name, [start(prefix + arguments) for prefix in prefixes])

        return self.pool.submit(work)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    trainer = Trainer(tmp_path_factory.mktemp("runs"))
    yield trainer
    trainer.pool.shutdown(cancel_futures=True)


def ended(process: subprocess.CompletedProcess, code: int = 0) -> str:
    assert process.returncode == code, process.stdout[-2000:] + process.stderr[-4000:]
    return process.stdout


def final_state(directory: Path) -> dict[str, np.ndarray]:
    """Parameters, optimizer state, key and step of the last checkpoint, by path."""
    config = run.read_run(directory)
    checkpoints = Checkpoints(directory / "checkpoints")
    state = checkpoints.restore(jax.eval_shape(functools.partial(run.initial_state, config)))
    checkpoints.close()
    assert int(state.step) == STEPS
    state = state.replace(rng=jax.random.key_data(state.rng))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}


def records(directory: Path) -> list[dict]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in TIMINGS} for line in lines]


def files(directory: Path) -> dict[str, str]:
    """Digest of every file."""
    found = {p.relative_to(directory): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    return {str(path): hashlib.sha256(data).hexdigest() for path, data in sorted(found.items())}


def assert_same_end(found: Path, expected: Path) -> None:
    """Bit for bit."""
    a, b = final_state(found), final_state(expected)
    assert list(a) == list(b)
    for path in b:
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)
    assert records(found) == records(expected)


CASES = [(config, kind) for config in CONFIGS for kind in KINDS]


@pytest.mark.parametrize(("config", "kind"), CASES)
def test_every_step_and_evaluation_is_recorded(trainer, config, kind):
    whole = trainer.whole[config, kind].result()
    ended(whole.processes[0])
    steps = [(record["kind"], record["step"]) for record in records(whole.directory)]
    assert [step for kind, step in steps if kind == "train"] == list(range(1, STEPS + 1))
    assert [step for kind, step in steps if kind == "validation"] == [3, 6]


@pytest.mark.parametrize(("config", "kind"), CASES)
def test_killed_and_gone_on_with_equals_uninterrupted(trainer, config, kind):
    whole = trainer.whole[config, kind].result()
    ended(whole.processes[0])
    killed = trainer.killed[config, kind].result()
    ended(killed.processes[0], -signal.SIGKILL)
    assert "resuming from step 3" in ended(killed.processes[1])
    assert_same_end(killed.directory, whole.directory)


@pytest.mark.parametrize(("config", "step"), [("dates", 3), ("quickstart", 4)])  # with an evaluation due, and without
def test_stopped_and_gone_on_with_equals_uninterrupted(trainer, config, step):
    whole = trainer.whole[config, "jit"].result()
    stopped = trainer.stopped[step].result()
    out = " ".join(ended(stopped.processes[0], STOPPED).split())
    assert f"Stopped after step {step}" in out
    assert str(stopped.directory) in out.replace(" ", "") and "same command resumes" in out
    assert f"resuming from step {step}" in ended(stopped.processes[1])
    assert_same_end(stopped.directory, whole.directory)


def test_jit_and_pmap_train_on_the_same_data(trainer):
    """Their dropout differs, and so do their losses."""
    jit, pmap = (records(trainer.whole["dates", kind].result().directory) for kind in KINDS)
    assert [(r["step"], r.get("weight")) for r in jit] == [(r["step"], r.get("weight")) for r in pmap]
    assert [r["loss"] for r in jit] != [r["loss"] for r in pmap]


def differences(out: str) -> list[str]:
    return re.findall(r"changed since the run began: (.*)", out)


@pytest.mark.parametrize("config", CONFIGS)
def test_going_on_unchanged_reports_no_difference(trainer, config):
    assert differences(trainer.killed[config, "jit"].result().processes[1].stdout) == []


@pytest.fixture
def finished(trainer, tmp_path) -> Path:
    """A copy of a finished run, as if it had been made where it lies."""
    original = trainer.whole["quickstart", "jit"].result().directory
    directory = shutil.copytree(original, tmp_path / "run")
    config = run.read_run(directory)
    assert config.run_dir == str(original)
    write_run(directory, dataclasses.replace(config, run_dir=str(directory)), read_tokenizer(directory))
    return directory


def test_starting_again_when_finished_changes_nothing(trainer, finished):
    before = files(finished)
    ended(start(["train.py", *trainer.arguments(finished, "quickstart", "jit")]))
    after = files(finished)
    changed = [name for name in before if after.get(name) != before[name]]
    assert not [name for name in changed if not name.startswith("tensorboard")]
    assert not [name for name in after.keys() - before.keys() if not name.startswith("tensorboard")]


REFUSED = {
    "shapes": (
        {"model.d-ff": 48},
        ["model.d_ff: 32 there, 48 now", "decoder.layers.mlp.up  expected [1, 16, 48], found [1, 16, 32]"],
    ),
    "no shape": ({"model.rope-theta": 5000.0}, ["model.rope_theta: 10000.0 there, 5000.0 now"]),
    "optimizer": ({"optim.clip-norm": 0.0}, ["opt_state"]),
}


def test_a_change_that_does_not_fit_is_refused_and_overwrites_nothing(trainer, finished):
    before = files(finished)
    attempts = {
        name: trainer.pool.submit(start, ["train.py", *trainer.arguments(finished, "quickstart", "jit", **changes)])
        for name, (changes, _) in REFUSED.items()
    }
    for name, attempt in attempts.items():
        errors = attempt.result().stderr
        assert attempt.result().returncode == 1, f"{name}: {errors}"
        assert errors.startswith("error: ") and "Traceback" not in errors, f"{name}: {errors}"
        for message in REFUSED[name][1]:
            assert message in errors, name
    assert files(finished) == before
