"""A proof that a run can be killed: ``jaxformer prove-resume CONFIG [--steps N] [--field value ...]``.

A process of train.py makes 2N updates in one go. Another is killed by SIGKILL once it has saved N, and a third makes N more in
the same run directory. Parameters, optimizer state, key and step at the end are compared leaf by leaf, and all metrics.
"""

import functools
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console

from jaxformer.config.strict import Strict, within
from jaxformer.parallel import exit_codes, multihost
from jaxformer.parallel.sharding import MeshConfig
from jaxformer.prove import states
from jaxformer.training import records, run
from jaxformer.training.checkpoints import Checkpoints

ABOUT = """Compares a run of CONFIG that is killed (kill -9) and resumed with one that is not. They must be bit for bit equal;
otherwise the first array that differs is printed. Further --field value pairs are passed on to train.py. All files are written
to a temporary directory."""
EXITS = exit_codes.described("the runs are equal", "the runs differ, or there was an error")
NEAR = 1e-3
"""Largest relative difference of a loss where the second half has its sums in another order: some 1e-7 in each update, which
further updates amplify."""
RESTORED = "import sys; from jaxformer.prove.resume import write_restored; write_restored(*sys.argv[1:])"


@dataclass(frozen=True)
class Options(Strict):
    """What is proved."""

    steps: int = 10
    """Number of updates before the kill, and again after it."""
    script: Path | None = None
    """Training script of your own to run in place of the command jaxformer train."""
    then_mesh: MeshConfig = field(default_factory=MeshConfig)
    """Mesh of the second half, if it is to differ from that of --mesh."""
    then_processes: int = 1
    """Number of processes in the second half. Above 1, all runs are on the CPU."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 1, float("inf"), "steps", "then_processes")

    @property
    def elsewhere(self) -> bool:
        """Whether the second half is placed otherwise than the first."""
        return self.then_mesh != MeshConfig() or self.then_processes > 1


@dataclass(frozen=True)
class Trainer:
    """How train.py is started."""

    program: tuple[str, ...]
    """The words after the name of the Python interpreter: the command ``jaxformer train``, or a script."""
    config: str
    """The config file."""
    flags: tuple[str, ...]
    environment: dict[str, str]

    def arguments(self, directory: Path, *more: str) -> list[str]:
        """Those of train.py, for a run in ``directory``. What comes last counts."""
        return [self.config, *self.flags, *more, "--run-dir", str(directory)]

    def start(self, *command: str, log: Path) -> subprocess.Popen:
        """A process of this Python, whose output goes to ``log``."""
        with log.open("wb") as out:
            return subprocess.Popen([sys.executable, *command], stdout=out, stderr=subprocess.STDOUT, env=self.environment)


def program(arguments: list[str]) -> None:
    """The program."""
    jax.config.update("jax_platforms", "cpu")  # this process only compares; the devices are for those that train
    sys.exit(main(arguments))


def parse(arguments: list[str]) -> tuple[Options, Trainer]:
    """The options, and how train.py is to be started with all others, which are checked as train.py checks them."""
    is_named = bool(arguments) and not arguments[0].startswith("-")
    if not is_named and not {"-h", "--help"} & set(arguments):
        raise ValueError("the first argument must be a config file of train.py")
    prog, rest = "jaxformer prove-resume CONFIG", arguments[1:] if is_named else arguments
    options, flags = tyro.cli(Options, args=rest, prog=prog, description=f"{ABOUT}\n\n{EXITS}", return_unknown_args=True)
    config = run.parse([arguments[0], *flags], Path()).config
    if config.distributed.on:
        raise ValueError(
            "leave out the --distributed.* flags: the first half is one process, and --then-processes sets the second"
        )
    steps = {"train.steps": 2 * options.steps, "train.eval-every": options.steps}
    fixed = steps | {"train.log-every": 1, "train.sample-tokens": 0}
    environment = os.environ | {"COLUMNS": "1000"} | ({"JAX_PLATFORMS": "cpu"} if options.then_processes > 1 else {})
    every = (*flags, *(str(word) for name, value in fixed.items() for word in (f"--{name}", value)))
    if options.script and not options.script.is_file():
        raise FileNotFoundError(f"there is no file {options.script}; give the script that trains this config as --script")
    program = (str(options.script.absolute()),) if options.script else ("-m", "jaxformer", "train")
    return options, Trainer(program, arguments[0], every, environment)


def main(arguments: list[str]) -> int:
    """Runs and compares; the exit code."""
    options, trainer = parse(arguments)
    console, folder = Console(highlight=False, soft_wrap=True), Path(tempfile.mkdtemp(prefix="jaxformer-resume-"))
    undisturbed, killed = folder / "whole", folder / "killed"
    is_proved = False
    try:
        console.print(f"{2 * options.steps} updates without a kill ...")
        _ended(
            trainer,
            trainer.start(*trainer.program, *trainer.arguments(undisturbed), log=folder / "whole.log"),
            "whole",
            folder,
        )
        console.print(f"{options.steps} updates, then kill -9 ...")
        saved = _kill(trainer, killed, options.steps, folder)
        is_kept = _restored_elsewhere(options, trainer, killed, saved, folder, console) if options.elsewhere else True
        console.print(f"restored, and {options.steps} updates more ...")
        _resume(options, trainer, killed, folder)
        is_proved = _compare(options, undisturbed, killed, console) and is_kept
    finally:
        if is_proved:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            console.print(f"both runs and their output are kept in {folder}", markup=False)
    return int(not is_proved)


def _ended(trainer: Trainer, process: subprocess.Popen, name: str, folder: Path) -> str:
    """The output of a process that must end well."""
    try:
        code = process.wait()
    except BaseException:  # such as Ctrl-C
        process.kill()
        raise
    out = (folder / f"{name}.log").read_text(errors="replace")
    if code:
        raise ValueError(f"{' '.join(trainer.program)} ended with exit code {code}:\n{out[-2000:].strip()}")
    return out


def _kill(trainer: Trainer, directory: Path, steps: int, folder: Path) -> dict[str, np.ndarray]:
    """Kills a run once it has saved ``steps`` updates; what it saved."""
    process = trainer.start(*trainer.program, *trainer.arguments(directory), log=folder / "killed.log")
    path = directory / "checkpoints"
    while not (path / str(steps)).exists() and process.poll() is None:
        time.sleep(0.002)
    if process.poll() is not None:
        _ended(trainer, process, "killed", folder)
    process.send_signal(signal.SIGKILL)
    code = process.wait()
    if code != -signal.SIGKILL or (path / str(2 * steps)).exists():
        raise ValueError(f"the run ended before it could be killed; give more --steps than {steps}")
    return state_of(directory, steps)


def state_of(directory: Path, step: int) -> dict[str, np.ndarray]:
    """The leaves of the newest checkpoint of a run. Raises ValueError unless it is that of ``step``."""
    abstract = jax.eval_shape(functools.partial(run.initial_state, run.read_run(directory, trust=True)))
    with Checkpoints(directory / "checkpoints") as checkpoints:
        state = checkpoints.restore(abstract)
    if state is None or int(state.step) != step:
        raise ValueError(f"{directory} has no readable checkpoint of step {step}")
    return states.leaves(state)


def _resume(options: Options, trainer: Trainer, directory: Path, folder: Path) -> None:
    """The second half. Raises ValueError unless it begins from the first."""
    outputs = _second_half(options, trainer, directory, folder, "resumed", *trainer.program)
    if f"resuming from step {options.steps} " not in " ".join(outputs[0].split()):
        raise ValueError(f"the run did not resume from step {options.steps}:\n{outputs[0][-2000:].strip()}")


def _second_half(options: Options, trainer: Trainer, directory: Path, folder: Path, name: str, *command: str) -> list[str]:
    """The outputs of all processes of the second half, placed as it is to be."""
    mesh, defaults = options.then_mesh, MeshConfig()
    changed = {f: value for f, value in vars(mesh).items() if value != getattr(defaults, f)}
    more = [str(word) for f, value in changed.items() for word in _flag(f"mesh.{f}", value)]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port, count = free.getsockname()[1], options.then_processes
    processes = []
    for number in range(count):
        joins = ("coordinator", f"localhost:{port}"), ("num-processes", count), ("process-id", number)
        joined = [str(word) for f, value in joins for word in _flag(f"distributed.{f}", value)] if count > 1 else []
        arguments = trainer.arguments(directory, *more, *joined)
        processes.append(trainer.start(*command, *arguments, log=folder / f"{name}{number}.log"))
    return [_ended(trainer, process, f"{name}{number}", folder) for number, process in enumerate(processes)]


def _flag(name: str, value: Any) -> tuple[Any, ...]:
    return (f"--{name}",) if value is True else (f"--{name}", value)


def _restored_elsewhere(
    options: Options, trainer: Trainer, directory: Path, saved: dict, folder: Path, console: Console
) -> bool:
    """Whether the state that was saved is, to the bit, the one that the devices of the second half begin with."""
    out = folder / "restored.json"
    _second_half(options, trainer, directory, folder, "restored", "-c", RESTORED, str(options.script or ""), str(out))
    restored = json.loads(out.read_text())
    wrong = [name for name, array in saved.items() if restored.get(name) != states.digest(array)]
    if wrong:
        console.print(f"restored on the other devices: {wrong[0]} differs from what was saved", markup=False)
    else:
        console.print(f"restored on the other devices: bit for bit equal to what was saved ({states.size(saved)})")
    return not wrong


def write_restored(script: str, out: str, *arguments: str) -> None:
    """In a process of its own: writes the digest of every leaf of the state that train.py would begin with."""
    train = _module(script) if script else importlib.import_module("jaxformer.cli.train")  # what the command runs
    asked = run.parse(list(arguments), train.DEFAULT).config
    with multihost.joined(asked.distributed):
        directory = Path(asked.run_dir)
        config = replace(run.read_run(directory, trust=True), mesh=asked.mesh)
        abstract = jax.eval_shape(functools.partial(run.initial_state, config))
        placement = train.make_placement(config, config.mesh.make(), run.make_objective(config), abstract)
        state = Checkpoints(directory / "checkpoints").restore(placement.like(abstract))
        with placement.within():
            leaves = states.leaves(placement.get_state(placement.put_state(state)))
        if multihost.first():
            Path(out).write_text(json.dumps({name: states.digest(array) for name, array in leaves.items()}))


def _module(script: str) -> ModuleType:
    loader = importlib.util.spec_from_file_location("train", script)
    assert loader and loader.loader
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


def _compare(options: Options, undisturbed: Path, killed: Path, console: Console) -> bool:
    """Prints how the two runs ended; whether that is as it must be."""
    expected, actual = (state_of(directory, 2 * options.steps) for directory in (undisturbed, killed))
    different = states.differing(expected, actual)
    logged = [_records(directory) for directory in (undisturbed, killed)]
    if not different and logged[0] == logged[1]:
        what = "parameters, optimizer state, key and step"
        console.print(f"[green]bit for bit equal[/]: {states.size(expected)} ({what}), {len(logged[0])} records of metrics")
        return True
    losses = [np.array([record["loss"] for record in records]) for records in logged]
    if len(losses[0]) != len(losses[1]):
        console.print(f"[red]{len(losses[0])} records of metrics without the kill, {len(losses[1])} with it[/]")
        return False
    largest = float(np.max(np.abs(losses[0] - losses[1]) / np.abs(losses[0])))
    near = f"losses are at most {largest:.1g} apart (relative)"
    if different:
        name = different[0]
        apart = states.apart(expected[name], actual[name])
        near += f"; {len(different)} of {len(expected)} leaves differ, first {name}, by up to {apart:.3g}"
    if options.elsewhere and largest <= NEAR:
        console.print(f"at the end, with sums in another order on the other devices: {near}", markup=False)
        return True
    console.print(f"not equal: {near}", markup=False, style="red")
    return False


def _records(directory: Path) -> list[dict[str, Any]]:
    every = records.records(directory / "metrics.jsonl")
    return [{name: value for name, value in record.items() if name not in records.TIMINGS} for record in every]
