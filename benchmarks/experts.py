"""A mixture of experts against the dense model of as many active parameters: loss, load, and the time of a step.

    python benchmarks/experts.py [--seeds 3]

configs/moe_quickstart.py and configs/quickstart.py, which differ in the feed-forward alone, are trained in turn on the same
tokens, for several seeds of parameters and data. Printed are validation losses, the loads of the least and the most loaded
expert of any layer at the end (over the validation split, relative to the mean), and the ratio of the steps' times.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import jaxformer as jf

ROOT = Path(__file__).parent.parent
MODELS = {"experts": "moe_quickstart", "dense": "quickstart"}


def train(name: str, seed: int, folder: Path) -> dict[str, float]:
    """The last validation of a run, and its speed."""
    directory = folder / f"{name}-{seed}"
    seeds = ["--train.seed", str(seed), "--data.seed", str(seed), "--train.sample-tokens", "0"]
    command = [sys.executable, ROOT / "train.py", ROOT / "configs" / f"{name}.py", "--run-dir", directory, *seeds]
    subprocess.run(command, check=True, capture_output=True)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    found = [record for record in records if record["kind"] == "validation"][-1]
    speeds = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
    model = jf.load(directory)[0]
    return found | {"speed": speeds[-1], "active": jf.spec.active(jf.model.spec(model), model)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    results: dict[str, list[dict[str, float]]] = {kind: [] for kind in MODELS}
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for kind, name in MODELS.items():
                found = train(name, seed, Path(folder))
                results[kind].append(found)
                load = f", load {found['load_min']:.2f} to {found['load_max']:.2f}" if "load_min" in found else ""
                print(f"seed {seed}, {kind}: {found['active']:,} active, validation loss {found['loss']:.4f}{load}", flush=True)
    gaps = [dense["loss"] - experts["loss"] for experts, dense in zip(results["experts"], results["dense"], strict=True)]
    ratios = [dense["speed"] / experts["speed"] for experts, dense in zip(results["experts"], results["dense"], strict=True)]
    print(f"experts are better by {', '.join(f'{gap:.4f}' for gap in gaps)}")
    print(f"time of a step, experts / dense: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
