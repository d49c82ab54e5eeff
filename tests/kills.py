"""Kills train.py at random moments, starts it again until it finishes, and compares the end with that of an undisturbed run:

    python -m tests.kills --kills 200

Every run is killed several times: just after it has begun to write, at a step, while a checkpoint is being written, during an
evaluation, while it exits. The runs take turns between jit, pmap, a mesh of 2 x 2 devices, and two processes. What is compared:
every parameter, every number of the optimizer's state, the key, the step, and every record of metrics.jsonl.
"""

import argparse
import collections
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxformer.training.records import TIMINGS

ROOT = Path(__file__).parent.parent
STEPS = 12
FIELDS = {
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
WAYS: dict[str, dict[str, Any]] = {
    "jit": {},
    "pmap": {"train.parallel": "pmap"},
    "mesh": {"mesh.data": 2, "mesh.fsdp": 2},
    "two processes": {"mesh.data": 2},
}
MOMENTS = ("any time", "first files", "step", "save", "evaluation", "exit")


def write_text(folder: Path) -> Path:
    rng = random.Random(0)
    words = ["def", "return", "if", "else", "for", "while", "in", "not", "self", "value", "name", "list", "index", "range"]
    text = folder / "text.txt"
    text.write_text("\n".join(" ".join(rng.choices(words, k=8)) for _ in range(200)))
    return text


def begin(way: str, directory: Path, text: Path) -> list[subprocess.Popen]:
    """The processes of one run, started."""
    fields = FIELDS | WAYS[way] | {"run-dir": directory, "data.path": text}
    devices, ports = {"jit": 1, "pmap": 2, "mesh": 4, "two processes": 1}[way], [""]
    if way == "two processes":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports = [f"127.0.0.1:{free.getsockname()[1]}"] * 2
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
        "JAX_COMPILATION_CACHE_DIR": str(text.parent / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAXFORMER_CACHE": str(text.parent / "data"),
    }
    processes = []
    for number, port in enumerate(ports):
        more = (
            {"distributed.coordinator": port, "distributed.num-processes": 2, "distributed.process-id": number} if port else {}
        )
        flags = [str(word) for name, value in (fields | more).items() for word in (f"--{name}", value)]
        command = [sys.executable, "train.py", "configs/quickstart.py", *flags]
        with (directory.parent / f"{directory.name}.{number}.log").open("a") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        processes.append(process)
    return processes


def reached(moment: str, directory: Path, count: int) -> bool:
    """Whether the files of a run show that the moment has come."""
    if moment == "first files":
        return directory.exists()
    if moment == "save":
        return any((directory / "checkpoints").glob("*tmp*"))
    metrics = directory / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    if moment == "evaluation":
        return sum('"validation"' in line for line in lines) > count
    if moment == "exit":
        return (directory / "checkpoints" / str(STEPS)).exists()
    return len(lines) > count


def kill_at(moment: str, processes: list[subprocess.Popen], directory: Path, rng: random.Random) -> bool:
    """Kills a process of the run at that moment, and the others with it. False if the run ended before."""
    metrics = directory / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    count = len(lines) + rng.randrange(4) if moment == "step" else sum('"validation"' in line for line in lines)
    until = time.monotonic() + (rng.uniform(0, 8) if moment == "any time" else 120)
    while time.monotonic() < until and not (moment != "any time" and reached(moment, directory, count)):
        if all(process.poll() is not None for process in processes):
            return False
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.08))
    victim = rng.choice(processes)
    hit = victim.poll() is None
    victim.send_signal(signal.SIGKILL)
    for process in processes:
        try:
            process.wait(5 if process is not victim else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return hit


def finish(processes: list[subprocess.Popen]) -> list[int]:
    return [process.wait(300) for process in processes]


def state_of(directory: Path) -> dict[str, bytes]:
    """Every number of the last checkpoint, by path, and the records."""
    import jax
    import numpy as np

    from jaxformer.training import run
    from jaxformer.training.checkpoints import Checkpoints

    config = run.read_run(directory)
    checkpoints = Checkpoints(directory / "checkpoints")
    state = checkpoints.restore(jax.eval_shape(functools.partial(run.initial_state, config)))
    checkpoints.close()
    assert state is not None and int(state.step) == STEPS, f"{directory} ended at step {state and int(state.step)}"
    plain = state.replace(rng=jax.random.key_data(state.rng))
    leaves = jax.tree_util.tree_flatten_with_path(plain)[0]
    content = {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    records = [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines]
    return content | {"records": json.dumps(records).encode()}


def disturbed(way: str, moments: list[str], directory: Path, text: Path, seed: int) -> collections.Counter:
    """A run that is killed at each of ``moments`` and then finishes. Counts the kills that met it alive."""
    rng, kills = random.Random(seed), collections.Counter()
    for moment in moments:
        kills[moment] += kill_at(moment, begin(way, directory, text), directory, rng)
    codes = finish(begin(way, directory, text))
    assert not any(codes), f"{way}, seed {seed}: exit codes {codes}, see {directory}.*.log"
    return kills


def tries(way: str, number: int, kills: int, folder: Path, text: Path, seed: int) -> tuple[str, collections.Counter, list[str]]:
    """A disturbed run, and what of it differs from the undisturbed one."""
    rng = random.Random(f"{seed} {way} {number}")
    directory = folder / f"{way.replace(' ', '-')}-{number}"
    counted = disturbed(way, rng.choices(MOMENTS, k=kills), directory, text, rng.randrange(2**30))
    found, expected = state_of(directory), state_of(folder / f"whole-{way.replace(' ', '-')}")
    return way, counted, [name for name in expected if found.get(name) != expected[name]]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="kills in all that meet a living process")
    parser.add_argument("--minutes", type=float, default=120.0, help="no run is begun after so long")
    parser.add_argument("--per-run", type=int, default=5, help="kills of one run")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    text = write_text(folder)
    for way in options.ways:
        assert not any(finish(begin(way, folder / f"whole-{way.replace(' ', '-')}", text)))
    total: dict[str, collections.Counter] = {way: collections.Counter() for way in options.ways}
    runs: collections.Counter = collections.Counter()
    wrong = []
    number = 0
    with ThreadPoolExecutor(2) as pool:
        until = time.monotonic() + 60 * options.minutes
        while sum(counter.total() for counter in total.values()) < options.kills and time.monotonic() < until:
            jobs = [(way, number + i) for i, way in enumerate(options.ways)]
            number += len(jobs)
            work = [pool.submit(tries, way, n, options.per_run, folder, text, options.seed) for way, n in jobs]
            for way, counted, different in (job.result() for job in work):
                total[way] += counted
                runs[way] += 1
                wrong += [(way, number, name) for name in different]
            print({way: dict(counter) for way, counter in total.items()}, flush=True)
    print(f"| runs | {' | '.join(MOMENTS)} | kills | ended in other bits |\n|{'---|' * (len(MOMENTS) + 3)}")
    for way, counter in total.items():
        cells = [str(counter[moment]) for moment in MOMENTS]
        bad = len({n for w, n, _ in wrong if w == way})
        print(f"| {way}, {runs[way]} | {' | '.join(cells)} | {counter.total()} | {bad} |")
    for way, n, name in wrong:
        print(f"differs: {way} {n}: {name}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
