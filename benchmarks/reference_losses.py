"""Measures the reference losses of configs on this machine's CPU and writes them into the package (jaxformer.prove.reference).

    python benchmarks/reference_losses.py configs/quickstart.py configs/dates.py configs/moe_quickstart.py

A reference of the same config, text and version of jax is replaced; all others stay.
"""

import json
import os
import platform
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from jaxformer.prove import reference
from jaxformer.training import run


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        config = run.read_config(path)[0]
        began = time.perf_counter()
        key, losses = reference.measure(config)
        seconds = time.perf_counter() - began
        text = f"standard library of Python {platform.python_version()}" if config.data.task == "text" else config.data.task
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        new = reference.Reference(path.stem, key, text, jax.__version__, machine, tuple(losses))
        print(f"{path.stem}: {losses[0]:.6f} to {losses[-1]:.6f} in {seconds:.1f} s")
        old = [r for r in reference.references() if (r.key, r.jax) != (key, jax.__version__)]
        if any(replace(r, losses=()) == replace(new, losses=()) and r.losses != new.losses for r in reference.references()):
            print("  these differ from the ones that were there")
        records = [asdict(r) for r in sorted([*old, new], key=lambda r: (r.config, r.text, r.jax))]
        reference.FILE.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        reference.references.cache_clear()


if __name__ == "__main__":
    main(sys.argv[1:])
