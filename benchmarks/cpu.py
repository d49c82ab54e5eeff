"""Training steps and forward passes on CPUs, against the same models on torch: the ratios of their wall times.

    uv run python benchmarks/cpu.py [--rows W1 W2] [--rounds 9] [--json FILE]

Every side is a process of its own, and torch is installed in an environment of its own (by uv, unless --peer-python names a
Python that has torch 2.13 and transformers). In every round each side does some steps, in turn; printed are the medians over
the rounds, with the range. A row is not printed when other processes of the machine used more than 0.2 of a core meanwhile.

W1 to W4 are GPT-2 with learned positions and a tied head, W6 is a LLaMA; float32, AdamW, no dropout, every core.
"""

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from worker import WORK, Work, serve

PEERS = {"W6": ("hugging-face",)}
"""Row -> sides besides jaxformer's, of which the first is the reference."""
USUAL = ("torch", "torch-fused", "hugging-face")
FORWARD = ("torch", "hugging-face")
NAMES = {
    "torch": "torch, eager",
    "torch-fused": "torch, fused AdamW",
    "hugging-face": "transformers",
    "jaxformer": "jaxformer",
    "plain": "jaxformer, allocator as it is",
}
BUSY = 0.2
"""Cores that other processes may use during a row."""
SECONDS = 1.0
"""Of one side in one round, about: short steps are repeated."""


def ours(work: Work, keep_memory: bool) -> None:
    """jaxformer's side."""
    import jax
    import numpy as np

    import jaxformer as jf
    from jaxformer.parallel.host_memory import after_step

    if keep_memory:
        jf.keep_memory()
    sizes = {"vocab_size": work.vocab, "n_layers": work.layers, "d_model": work.width, "n_heads": work.heads}
    sizes |= {"d_ff": work.hidden, "max_length": work.length}
    if work.kv_heads == work.heads:
        off = {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}
        cfg = jf.presets.gpt2(**sizes, **off)
    else:
        cfg = jf.presets.llama(**sizes, n_kv_heads=work.kv_heads)
    if work.does == "forward":
        forward = functools.partial(jax.jit(jf.forward), jf.init(cfg, jax.random.key(0)))
        serve(work, lambda tokens: float(jax.block_until_ready(forward(tokens[:, :-1], cfg))[0, 0, 0]))
        return
    optim = jf.OptimConfig(lr=1e-4, schedule="constant", warmup_steps=0, beta2=0.999, clip_norm=0.0)
    optimizer = jf.training.optimizer(optim, cfg, 10_000)
    update = jax.jit(jf.training.make_update(jf.training.next_token(cfg), optimizer), donate_argnums=0)
    state = [jf.training.init_state(jf.init(cfg, jax.random.key(0)), optimizer, jax.random.key(1))]

    def step(tokens: np.ndarray) -> float:
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((work.batch, work.length), np.float32)}
        state[0], metrics = update(state[0], batch)
        after_step(metrics)
        return float(metrics["loss"])

    serve(work, step)


class Side:
    """A process that does steps when asked."""

    def __init__(self, command: list[str]):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
        )

    def steps(self, number: int) -> dict:
        """What ``worker.serve`` answers after ``number`` steps."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{' '.join(map(str, self.process.args))} ended with exit code {self.process.wait()}")

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def commands(row: str, sides: tuple[str, ...], peer_python: list[str]) -> dict[str, list[str]]:
    """Side -> the command that starts it."""
    started = {}
    for side in sides:
        is_ours = side in ("jaxformer", "plain")
        started[side] = (
            [sys.executable, "cpu.py", "--side", row, side] if is_ours else [*peer_python, "cpu_peers.py", row, side]
        )
    return started


def busy() -> float:
    """Seconds of processor time that all processes of the machine have used."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure(row: str, rounds: int, peer_python: list[str]) -> dict:
    """The row: of every side its seconds a step, its ratios to the reference, its first loss and its memory."""
    peers = PEERS.get(row, USUAL if WORK[row].does == "train" else FORWARD)
    sides = {name: Side(command) for name, command in commands(row, (*peers, "jaxformer", "plain"), peer_python).items()}
    first = {name: side.steps(1) for name, side in sides.items()}
    number = {name: max(1, round(SECONDS / side.steps(3)["seconds"][-1])) for name, side in sides.items()}
    answers: dict[str, list[dict]] = {name: [] for name in sides}
    began, used = time.perf_counter(), busy() - sum(side.steps(0)["cpu"] for side in sides.values())
    for _ in range(rounds):
        for name, side in sides.items():
            answers[name].append(side.steps(number[name]))
    elapsed = time.perf_counter() - began
    used = busy() - sum(side.steps(0)["cpu"] for side in sides.values()) - used
    for side in sides.values():
        side.close()
    medians = {name: [statistics.median(answer["seconds"]) for answer in several] for name, several in answers.items()}
    reference = medians[peers[0]]
    result: dict = {"row": row, "work": WORK[row]._asdict(), "foreign_cores": used / elapsed, "sides": {}}
    for name, seconds in medians.items():
        ratios = sorted(a / b for a, b in zip(seconds, reference, strict=True))
        result["sides"][name] = {
            "seconds": statistics.median(seconds),
            "ratio": statistics.median(ratios),
            "range": [ratios[0], ratios[-1]],
            "mb": answers[name][-1]["mb"],
            "first": first[name]["value"],
        }
    return result


def show(result: dict) -> None:
    """Prints a row as lines of a Markdown table."""
    for name, side in result["sides"].items():
        low, high = side["range"]
        print(f"| {result['row']} | {NAMES[name]} | {1000 * side['seconds']:,.0f} ms", end=" | ")
        print(f"{side['ratio']:.2f} ({low:.2f} to {high:.2f}) | {side['mb']:,} MB |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="a file to write all figures to")
    parser.add_argument("--peer-python", help="a Python with torch and transformers, in place of the environment that uv makes")
    parser.add_argument("--even-if-busy", action="store_true", help="print rows that other processes have disturbed, too")
    parser.add_argument("--side", nargs=2, metavar=("ROW", "SIDE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        ours(WORK[options.side[0]], keep_memory=options.side[1] == "jaxformer")
        return
    uv = ["uv", "run", "--no-project", "--with", "torch==2.13.0", "--with", "transformers", "--with", "numpy", "python"]
    peer_python = [options.peer_python] if options.peer_python else uv
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print("| Work | Side | Time per step | Of the first side's time | Peak memory |\n|---|---|---|---|---|", flush=True)
    results = []
    for row in options.rows:
        results.append(result := measure(row, options.rounds, peer_python))
        if result["foreign_cores"] > BUSY and not options.even_if_busy:
            print(f"{row} is not shown: other processes used {result['foreign_cores']:.2f} cores", flush=True)
        else:
            show(result)
    if options.json:
        about = {"date": datetime.date.today().isoformat(), "rounds": options.rounds, "results": results}
        options.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
