"""What a model costs: ``python -m jaxformer.explain CONFIG [--model.field value ...]``. ``--help`` explains every option.

CONFIG is a config file of train.py, or the name of a preset. Nothing is computed, and no device is needed.
"""

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from jaxformer.config import ModelConfig, presets
from jaxformer.config.components import nearest
from jaxformer.config.strict import Strict, within
from jaxformer.explain.costs import explain
from jaxformer.explain.explanation import RIGHT, Explanation
from jaxformer.parallel.sharding import MeshConfig
from jaxformer.training import run


@dataclass(frozen=True)
class Options(Strict):
    """A model, and what it is to read."""

    model: ModelConfig
    """What the model is."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Devices, which need not be there; data=0 is one."""
    batch: int = 8
    """[B] rows."""
    length: int = 1024
    """[T] tokens of a row; an encoder reads as many."""
    markdown: bool = False
    """Write Markdown."""
    json: bool = False
    """Write JSON."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 1, math.inf, "batch", "length")
        if self.markdown and self.json:
            raise ValueError("give one of --markdown, --json")


def parse(arguments: list[str]) -> Options:
    """``CONFIG [--field value ...]`` as options. Batch and length of a config file are those of its data unless given."""
    if not arguments or arguments[0].startswith("-"):
        name, default, rest = "CONFIG", Options(presets.gpt2()), arguments
        if not {"-h", "--help"} & set(arguments):
            raise ValueError(f"give a config file or a preset first; presets: {', '.join(sorted(presets.WITH_SIZES))}")
    else:
        name, *rest = arguments
        default = _default(name)
    return tyro.cli(Options, default=default, args=rest, prog=f"python -m jaxformer.explain {name}", description=__doc__)


def _default(name: str) -> Options:
    if name in presets.WITH_SIZES:
        cfg = presets.WITH_SIZES[name]()
        return Options(cfg, length=min(Options.length, cfg.max_length))
    if not Path(name).is_file():
        known = [*presets.WITH_SIZES, *(str(path) for path in Path("configs").glob("*.py"))]
        raise ValueError(f"no config file or preset {name}{nearest(name, known)}")
    config, _ = run.read_config(Path(name))
    return Options(config.model, config.mesh, config.data.batch_size, config.data.length)


def show(found: Explanation) -> None:
    """The tables, as wide as the terminal; plain where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        print(found)
        return
    plain: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}  # such tables are wide enough
    steps = Table(title=f"{found.title}\n", title_justify="left", **plain)
    for name in found.columns():
        steps.add_column(name, justify="right" if name in RIGHT else "left", overflow="fold")
    for cells in found.cells():
        steps.add_row(*cells, style=None if cells[-1] else "dim")
    totals = Table(show_header=False, **plain)
    for cells in found.totals():
        totals.add_row(*cells)
    console.print(steps, "", totals, sep="\n")


def main(arguments: list[str]) -> None:
    """The command."""
    options = parse(arguments)
    mesh = None if options.mesh == MeshConfig() else options.mesh
    found = explain(options.model, options.batch, options.length, mesh)
    if options.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    elif options.markdown:
        print(found.markdown())
    else:
        show(found)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
