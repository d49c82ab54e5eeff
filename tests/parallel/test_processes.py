"""Real processes that train together on loopback: the same numbers as one, each with its own rows, and one end for all."""

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jaxformer.parallel.exit_codes import STOPPED
from jaxformer.parallel.multihost import DistributedConfig, joined
from jaxformer.parallel.sharding import MeshConfig
from jaxformer.training import run
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.records import TIMINGS
from tests.kills import FIELDS, write_text

ROOT = Path(__file__).parents[2]
STEPS = 6
TINY = FIELDS | {"train.steps": STEPS, "train.sample-tokens": 0}

# Runs train.py in a process that keeps which rows it made, and does something to itself after the update of one step.
DRIVER = """
import os, signal, sys, time
import numpy as np
from jaxformer.cli import train
from jaxformer.data import packing
step_at, action, folder, process = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
report, iterate, windows, used, made = train.Report.train, train.data.iterate, packing.windows, [], []

def hooked(self, step, metrics):
    report(self, step, metrics)
    if step == step_at and action == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
    elif step == step_at and action:
        while not os.path.exists(f"{self.directory}/checkpoints/3"):  # still being written when step 4 began
            time.sleep(0.01)
        os.kill(os.getpid(), getattr(signal, action))

def kept(*args):
    for batch in iterate(*args):
        used.append(batch["tokens"])
        yield batch

def counted(stream, starts_B, *args):
    made.append(len(starts_B))
    return windows(stream, starts_B, *args)

train.Report.train, train.data.iterate, packing.windows = hooked, kept, counted

def main(config, trust, main=train.main):
    code = main(config, trust)
    np.savez(f"{folder}/{process}.npz", used=np.array(used), made=np.array(made))
    return code

train.main = main
train.launch(sys.argv[5:])
"""


class Ended(NamedTuple):
    """A process that has ended, and when."""

    code: int
    out: str
    errors: str
    at: float


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


class Runs:
    """Starts train.py in processes of one run, some devices each."""

    def __init__(self, folder: Path):
        self.folder, self.text = folder, write_text(folder)

    def start(self, name: str, processes: int, devices: int = 1, does=(None, 0, ""), each=None, **changes) -> list[Ended]:
        """does: which process something happens to, the step after whose update it does, and what. each: fields of one."""
        fields = TINY | {"data.path": self.text, "run-dir": self.folder / name} | changes
        environment = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PYTHONPATH": str(ROOT),
        }
        port, started = free_port(), []
        for number in range(processes):
            happens = does[1:] if number == does[0] else (0, "")
            hook = [str(part) for part in (*happens, self.folder, f"{name}-{number}")]
            joins = ["--distributed.coordinator", f"localhost:{port}", "--distributed.num-processes", str(processes)]
            joins += ["--distributed.process-id", str(number), "--distributed.heartbeat-timeout", "10"]
            own = fields | (each or {}).get(number, {})
            flags = [str(part) for field, value in own.items() for part in (f"--{field}", value)]
            command = [sys.executable, "-c", DRIVER, *hook, "configs/quickstart.py", *flags, *(joins if processes > 1 else [])]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))

        def wait(process):
            try:
                out, errors = process.communicate(timeout=200)
            except subprocess.TimeoutExpired:  # what hangs fails its test, and is not left behind
                process.kill()
                out, errors = process.communicate()
            return Ended(process.returncode, out, errors, time.monotonic())

        with ThreadPoolExecutor(processes) as pool:
            ended = [pool.submit(wait, process) for process in started]
            if does[2] == "SIGSTOP":  # it would wait for ever
                [result.result() for number, result in enumerate(ended) if number != does[0]]
                started[does[0]].kill()
            return [result.result() for result in ended]

    def records(self, name: str) -> list[dict]:
        lines = map(json.loads, (self.folder / name / "metrics.jsonl").read_text().splitlines())
        return [{key: value for key, value in record.items() if key not in TIMINGS} for record in lines]

    def state(self, name: str) -> dict[str, np.ndarray]:
        """All that the last checkpoint holds, by path."""
        config = run.read_run(self.folder / name)
        checkpoints = Checkpoints(self.folder / name / "checkpoints")
        state = checkpoints.restore(jax.eval_shape(functools.partial(run.initial_state, config)))
        checkpoints.close()
        state = state.replace(rng=jax.random.key_data(state.rng))
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}

    def rows(self, name: str, process: int) -> dict[str, np.ndarray]:
        """used: the tokens of each training batch that the process was given; made: how many rows it made, each time."""
        return dict(np.load(self.folder / f"{name}-{process}.npz"))

    @functools.cached_property
    def one(self) -> list[Ended]:
        """One process with two devices, all steps."""
        return self.start("one", 1, devices=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("processes"))


def all_ended(ended: list[Ended], code: int = 0) -> None:
    assert [process.code for process in ended] == [code] * len(ended), [p.errors[-3000:] for p in ended]


def assert_same(runs: Runs, found: str, expected: str, rtol: float = 0.0) -> None:
    """Records and last checkpoint; bit for bit unless ``rtol`` is given."""
    a, b = runs.state(found), runs.state(expected)
    assert list(a) == list(b)
    for path in b:
        np.testing.assert_allclose(a[path], b[path], rtol=rtol, atol=rtol / 100, err_msg=path)
    assert runs.records(expected)
    for a_, b_ in zip(runs.records(found), runs.records(expected), strict=True):
        assert a_.pop("kind") == b_.pop("kind") and a_ == (pytest.approx(b_, rel=rtol) if rtol else b_)


def lost(process: Ended) -> bool:
    """Whether it says that another was lost, and what to do, as its last line."""
    last = process.errors.splitlines()[-1]
    return process.code == 1 and last.startswith("error: another process was lost (") and "same command resumes" in last


# The same numbers


def test_two_processes_are_one_with_two_devices_and_each_makes_its_own_rows(runs):
    all_ended(runs.one)
    two = runs.start("two", 2)
    all_ended(two)
    assert_same(runs, "two", "one")
    whole, *parts = runs.rows("one", 0), runs.rows("two", 0), runs.rows("two", 1)
    assert whole["used"].shape == (STEPS, 8, 16) and (parts[0]["used"] != parts[1]["used"]).any()
    np.testing.assert_array_equal(np.concatenate([part["used"] for part in parts], axis=1), whole["used"])
    for part in parts:  # the first time, the bytes of all that is validated on are counted
        assert part["made"][0] == 8 and set(part["made"][1:]) == {4}
    assert set(whole["made"]) == {8}
    assert "validation loss" in two[0].out and "loss" not in two[1].out
    assert [len(list((runs.folder / name / "tensorboard").iterdir())) for name in ("one", "two")] == [1, 1]


def test_tensors_over_two_processes(runs):
    """Heads and vocabulary lie apart: each process needs all rows, and both write the sample together."""
    given = {"mesh.tensor": 2, "train.sample-tokens": 4, "train.steps": 3}
    alone, both = runs.start("tensor alone", 1, devices=2, **given), runs.start("tensor", 2, **given)
    all_ended([*alone, *both])
    assert_same(runs, "tensor", "tensor alone")
    assert set(runs.rows("tensor", 1)["made"]) == {8}
    sample = [process[0].out.split("sample, temperature")[1].split("Results")[0] for process in (alone, both)]
    assert "def " in sample[0] and sample[0] == sample[1]


# How they end


def test_asked_to_stop_one_all_stop_at_the_same_step_and_one_process_goes_on(runs):
    all_ended(runs.one)
    stopped = runs.start("stopped", 2, does=(1, 3, "stop"))
    all_ended(stopped, STOPPED)
    assert "Stopped after step 4, saved" in stopped[0].out  # the answer to a step's question comes with the next
    went_on = runs.start("stopped", 1, devices=2)
    all_ended(went_on)
    assert "resuming from step 4" in went_on[0].out and "differs" not in went_on[0].out
    assert_same(runs, "stopped", "one")


def test_one_is_killed_and_the_other_says_so(runs):
    other, killed = runs.start("killed", 2, does=(1, 4, "SIGKILL"))
    assert killed.code == -9 and lost(other), other.errors
    assert other.at - killed.at < 30  # seconds, three times distributed.heartbeat_timeout


@pytest.mark.slow
def test_one_of_four_is_killed_and_two_go_on(runs):
    """From the same checkpoint, as one process does that was never stopped; and as two that were there from the start, up to
    sums of four parts in place of two."""
    four = runs.start("four", 4, does=(2, 5, "SIGKILL"))
    assert four[2].code == -9 and all(lost(process) for process in (*four[:2], four[3])), [p.errors for p in four]
    assert max(process.at for process in four) - four[2].at < 30
    for name in ("config.json", "tokenizer.model", "metrics.jsonl", "checkpoints/3"):
        kept, copy = runs.folder / "four" / name, runs.folder / "from 3" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(kept, copy) if kept.is_dir() else shutil.copy(kept, copy)
    assert [record["step"] for record in runs.records("four")][-1] > 3, "some of what was recorded is undone"
    two, one = runs.start("four", 2), runs.start("from 3", 1, devices=2)
    all_ended([*two, *one])
    assert "resuming from step 3" in two[0].out and "resuming from step 3" in one[0].out
    assert_same(runs, "four", "from 3")
    all_ended(runs.one)
    assert_same(runs, "four", "one", rtol=1e-4)
    assert not list((runs.folder / "four" / "checkpoints").glob("*tmp*"))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "action"), [(1, "SIGSTOP"), (0, "SIGKILL")])
def test_no_sign_of_life_and_no_coordinator(runs, number, action):
    ended = runs.start(f"{action} {number}", 2, does=(number, 4, action))
    assert lost(ended[1 - number]), ended[1 - number].errors


@pytest.mark.slow
def test_a_mesh_of_two_axes_over_two_processes_of_two_devices(runs):
    given = {"mesh.fsdp": 2, "mesh.tensor": 2}
    all_ended([*runs.start("square alone", 1, devices=4, **given), *runs.start("square", 2, devices=2, **given)])
    assert_same(runs, "square", "square alone")
    assert set(runs.rows("square", 1)["made"][1:]) == {4}


# What is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coordinator": "a:1"}, "also give distributed.num_processes and distributed.process_id"),
        ({"process_id": 0}, "also give distributed.coordinator and distributed.num_processes"),
        ({"coordinator": "a:1", "auto": True}, "distributed.auto finds coordinator"),
        ({"coordinator": "a", "num_processes": 2, "process_id": 0}, "distributed.coordinator='a' must be host:port"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "process_id=2 must be below distributed.num_processes=2"),
        ({"coordinator": "a:1", "num_processes": 0, "process_id": 0}, "num_processes=0 must be at least 1"),
        ({"heartbeat_timeout": 0}, "heartbeat_timeout=0 must be at least 1"),
    ],
)
def test_fields_that_contradict_each_other(fields, message):
    with pytest.raises(ValueError, match=message):
        DistributedConfig(**fields)


def test_the_command_line_says_what_is_missing_before_any_work(tmp_path, capsys):
    config, flags = ROOT / "configs" / "quickstart.py", ["--distributed.coordinator", "localhost:1"]
    all_three = [*flags, "--distributed.num-processes", "2", "--distributed.process-id", "1"]
    assert run.parse([*all_three, "--run-dir", str(tmp_path)], config).config.distributed.on
    wrong = {
        "also give distributed.num_processes and distributed.process_id": flags,
        "pmap' runs in one process": [*all_three, "--train.parallel", "pmap"],
    }
    for message, given in wrong.items():
        with pytest.raises(SystemExit, match="2"):
            run.parse(given, config)
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_step_of_slurm_with_several_tasks_does_not_train_several_times(monkeypatch):
    for name, value in {"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(ValueError, match="Slurm runs 4 copies of this program; give --distributed.auto"),
        joined(DistributedConfig()),
    ):
        pass


@pytest.mark.slow
def test_processes_of_different_commands_are_refused_by_name(runs):
    ended = runs.start("different", 2, each={1: {"optim.lr": 0.5}})
    all_ended(ended, 1)
    assert all("error: process 1 has another configuration than process 0" in process.errors for process in ended)
    assert not (runs.folder / "different").exists()


# Slices


@dataclass(frozen=True)
class Chip:
    """As much of a device as a mesh looks at."""

    id: int
    slice_index: int
    process_index: int
    coords: tuple
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    core_on_chip: int = 0


def chips(slices: int, rows: int = 2, columns: int = 4, platform: str = "tpu") -> list[Chip]:
    """Slices of a grid, a process each, in no good order."""
    info = [(s, (x, y, 0)) for y in range(rows) for x in range(columns) for s in range(slices)]
    return [Chip(number, s, s, at, platform) for number, (s, at) in enumerate(info)]


def test_slices_lie_outermost_along_data_and_neighbours_together():
    mesh = MeshConfig(slices=2, fsdp=4, tensor=2).make(chips(2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "expert": 1, "context": 1, "tensor": 2}
    assert [{chip.slice_index for chip in part.flat} for part in mesh.devices] == [{0}, {1}]
    for part in mesh.devices:
        for pair in part.reshape(4, 2):
            assert sum(abs(a - b) for a, b in zip(pair[0].coords, pair[1].coords, strict=True)) == 1
    one = MeshConfig(fsdp=8).make(chips(1))
    steps = zip(one.devices.flat, [*one.devices.flat[1:], one.devices.flat[0]], strict=True)
    assert all(sum(abs(i - j) for i, j in zip(a.coords, b.coords, strict=True)) == 1 for a, b in steps), "no ring"
    assert [chip.id for chip in one.devices.flat] != list(range(8)), "the order given is no ring"
    four = MeshConfig(slices=2, tensor=2).make(chips(4, 1, 2, "cpu"))  # of CPUs by process, two in each slice
    assert [{chip.process_index for chip in part.flat} for part in np.split(four.devices, 2)] == [{0, 1}, {2, 3}]


def test_slices_that_do_not_fit():
    with pytest.raises(ValueError, match="mesh.data=3 is not a multiple of mesh.slices=2; the nearest is 4"):
        MeshConfig(data=3, slices=2)
    with pytest.raises(ValueError, match="1 devices along data cannot be split into mesh.slices=2 equal groups"):
        MeshConfig(slices=2, fsdp=16).make(chips(2))
    with pytest.raises(ValueError, match="belong to 2 slices; set mesh.slices=2, not 1"):
        MeshConfig(fsdp=8).make(chips(2))
    with pytest.raises(ValueError, match="mesh.slices needs equal slices, but they have 8, 4 devices"):
        MeshConfig(slices=2, tensor=2).make([chip for chip in chips(2) if chip.slice_index == 0 or chip.coords[1] == 0])
    with pytest.raises(ValueError, match="mesh.slices=2 does not fit devices of 1 processes"):
        MeshConfig(slices=2).make()
