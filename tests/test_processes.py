"""Real processes that train together on loopback: the same numbers as one, each with its own rows, and one end for all."""

import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jaxformer import run
from jaxformer.parallel.data import own_rows
from jaxformer.processes import DistributedConfig
from jaxformer.sharding import MeshConfig
from jaxformer.training.checkpoint import Checkpoints
from jaxformer.training.step import init_state

ROOT = Path(__file__).parent.parent
STEPS = 6
TINY = {
    "model.vocab-size": 300,
    "model.d-model": 16,
    "model.n-layers": 1,
    "model.n-heads": 4,
    "model.n-kv-heads": 2,
    "model.d-ff": 32,
    "model.residual-dropout": 0.1,
    "data.vocab-size": 300,
    "data.length": 16,
    "data.batch-size": 8,
    "data.validation-rows": 8,
    "train.steps": STEPS,
    "train.eval-every": 3,
    "train.log-every": 1,
    "train.sample-tokens": 4,
}

# Runs train.py in a process that keeps which rows it made, and does something to itself after the update of one step.
DRIVER = """
import os, signal, sys, time
import numpy as np
import train
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

def main(config, main=train.main):
    main(config)
    np.savez(f"{folder}/{process}.npz", used=np.array(used), made=np.array(made))

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
        self.folder, self.text = folder, folder / "text.txt"
        rng, words = random.Random(0), "def return if else for while in not self value name list dict index".split()
        self.text.write_text("\n".join(" ".join(rng.choices(words, k=8)) for _ in range(200)))

    def start(self, name: str, processes: int, devices: int = 1, does: dict | None = None, **changes) -> list[Ended]:
        """does: of a process, the step after whose update something happens to it, and what."""
        fields = TINY | {"data.path": self.text, "run-dir": self.folder / name} | changes
        flags = [str(part) for field, value in fields.items() for part in (f"--{field.replace('_', '.')}", value)]
        environment = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PYTHONPATH": str(ROOT),
        }
        port, started = free_port(), []
        for number in range(processes):
            hook = [str(part) for part in (*(does or {}).get(number, (0, "")), self.folder, f"{name}-{number}")]
            joins = ["--distributed.coordinator", f"localhost:{port}", "--distributed.num-processes", str(processes)]
            joins += ["--distributed.process-id", str(number), "--distributed.heartbeat-timeout", "10"]
            command = [sys.executable, "-c", DRIVER, *hook, "configs/quickstart.py", *flags, *(joins if processes > 1 else [])]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))

        def wait(process):
            out, errors = process.communicate(timeout=200)
            return Ended(process.returncode, out, errors, time.monotonic())

        with ThreadPoolExecutor(processes) as pool:
            frozen = [process for number, process in enumerate(started) if (does or {}).get(number, (0, ""))[1] == "SIGSTOP"]
            ended = [pool.submit(wait, process) for process in started]
            for result in [e for e, process in zip(ended, started, strict=True) if process not in frozen]:
                result.result()
            for process in frozen:
                process.kill()
            return [result.result() for result in ended]

    def records(self, name: str) -> list[dict]:
        lines = map(json.loads, (self.folder / name / "metrics.jsonl").read_text().splitlines())
        return [{key: value for key, value in record.items() if key != "tokens_per_second"} for record in lines]

    def state(self, name: str) -> dict[str, np.ndarray]:
        """All that the last checkpoint holds, by path."""
        config = run.read_run(self.folder / name)
        checkpoints = Checkpoints(self.folder / name / "checkpoints")
        state = checkpoints.restore(jax.eval_shape(functools.partial(init_state, config.model, config.optim, STEPS, 0)))
        checkpoints.close()
        assert int(state.step) == STEPS
        state = state.replace(key=jax.random.key_data(state.key))
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}

    def rows(self, name: str, process: int) -> dict[str, np.ndarray]:
        return dict(np.load(self.folder / f"{name}-{process}.npz"))
