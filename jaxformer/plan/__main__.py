"""What a run would need and take: ``python -m jaxformer.plan CONFIG --topology v5e:4x4 [--field value ...]``.

CONFIG is a config file or the name of a preset. The real training step, or with --decode the real programs of generation, are
compiled for TPUs that are not there; gpu:8xH200 and its kind go by arithmetic. ``--help`` explains every field.
"""

import dataclasses
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxformer.config import presets
from jaxformer.config import spec as specs
from jaxformer.config.components import nearest
from jaxformer.config.strict import within
from jaxformer.data import DataConfig
from jaxformer.nn import model
from jaxformer.parallel.sharding import AXES, MeshConfig
from jaxformer.plan import advise, arithmetic, compile, programs, report, topology
from jaxformer.plan.record import Plan, ProgramPlan, to_json
from jaxformer.training import run

ROWS_A_DEVICE = 4
"""Of a preset, unless data.batch_size is given."""
LONGEST = 4096
"""Tokens a row of a preset, unless data.length is given or the model's max_length is less."""


@dataclass(frozen=True)
class Asked(run.Config):
    """A run, and where it is to be."""

    topology: str = ""
    """Chips: v5e:4x4, v5p:4x4x4, v6e:16x16 are compiled for; gpu:8xH100, H200, A100, B200 go by arithmetic."""
    decode: bool = False
    """Plan generation in place of training: data.batch_size prompts, data.length tokens of each in the cache."""
    json: str = ""
    """Where the plan goes as JSON; - (or nothing after --json) is standard output."""
    markdown: bool = False
    """Print Markdown in place of tables."""
    budget: float = 900.0
    """Seconds for trying what would fit, where the plan does not; 0: nothing is tried."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 0, math.inf, "budget")


def main(arguments: list[str]) -> Plan:
    """Prints the plan that is asked for."""
    jax.config.update("jax_platforms", "cpu")  # whatever this machine has, nothing of it is used
    name, asked, stated = parse(arguments)
    where = topology.parse(asked.topology)
    console = Console(highlight=False)
    told = Console(stderr=True, highlight=False)
    plan = make(name, asked, where, stated, told)
    if asked.json and asked.json != "-":
        Path(asked.json).write_text(to_json(plan) + "\n", encoding="utf-8")
    if asked.json == "-":
        print(to_json(plan))
    elif asked.markdown:
        print(report.markdown(plan), end="")
    else:
        report.show(plan, console)
    return plan


def parse(arguments: list[str]) -> tuple[str, Asked, tuple[str, ...]]:
    """The config's name, what is asked for, and what was assumed where nothing was said."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        raise ValueError("the first argument is a config file or the name of a preset")
    arguments = [
        word if word != "--json" or (following and not following.startswith("--")) else "--json=-"
        for word, following in zip(arguments, [*arguments[1:], ""], strict=True)
    ]
    chips = _given(arguments, "--topology")
    count = topology.parse(chips).count if chips else 1
    if arguments[0] in ("-h", "--help"):
        arguments = ["gpt2", "--help"]
    name, rest = arguments[0], arguments[1:]
    stated: tuple[str, ...] = ()
    if name.endswith(".py") or "/" in name:
        default, _ = run.read_config(Path(name))
    else:
        default, stated = _preset(name, count, arguments)
    fields = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
    asked = tyro.cli(Asked, default=Asked(**fields), args=rest, description=__doc__, prog="python -m jaxformer.plan CONFIG")
    if not asked.topology:
        raise ValueError("give --topology, such as v5e:4x4, v5p:4x4x4 or gpu:8xH200")
    return name, asked, stated


def _given(arguments: list[str], flag: str) -> str:
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == flag or word.startswith(flag + "="):
            return following if word == flag else word.partition("=")[2]
    return ""


def _preset(name: str, count: int, arguments: list[str]) -> tuple[run.Config, tuple[str, ...]]:
    """A run of a preset, as one would train it on ``count`` devices."""
    if name not in presets.WITH_SIZES:
        files = [str(path) for path in Path("configs").glob("*.py")]
        raise ValueError(f"no preset {name!r}{nearest(name, [*presets.WITH_SIZES, *files])}")
    no_dropout = {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}
    cfg = presets.WITH_SIZES[name](dtype="bfloat16", scan=True, remat="dots", **no_dropout)
    on_mesh = any(re.match(rf"--mesh\.({'|'.join(AXES)})\b", word) for word in arguments)
    config = run.Config(
        model=cfg,
        data=DataConfig(length=min(cfg.max_length, LONGEST), batch_size=ROWS_A_DEVICE * count, segment_documents=False),
        train=run.TrainConfig(loss_chunk=512),
        mesh=MeshConfig() if on_mesh else MeshConfig(fsdp=count),
    )
    stated = (
        f"of the preset, unless told otherwise: {cfg.param_dtype} parameters, bfloat16 compute, scanned layers, remat='dots', "
        f"no dropout, {ROWS_A_DEVICE} rows a device of one stream of tokens, loss in chunks of 512"
        + ("" if on_mesh else ", fsdp over all devices"),
    )
    return config, stated


class _StandIn:
    """A device as far as a mesh has to know of it, before any topology is asked for."""

    platform, process_index, device_kind = "", 0, ""


def make(name: str, asked: Asked, where: topology.Topology, stated: tuple[str, ...], told: Console) -> Plan:
    """The plan. Raises ValueError before compiling for a mesh or a batch that does not fit the devices."""
    config = run.Config(**{field.name: getattr(asked, field.name) for field in dataclasses.fields(run.Config)})
    stand_ins: list = [_StandIn() for _ in range(where.count)]
    mesh = config.mesh.make(stand_ins)
    programs.check(config, mesh, asked.decode)
    devices = topology.devices(where) if where.is_tpu else stand_ins
    plan_one = lambda config: _plans(config, asked.decode, where, devices, told)
    found = plan_one(config)
    sides = {axis: int(size) for axis, size in mesh.shape.items()}
    failing = [program for program in found if not program.fits]
    trials = advise.search(config, sides, failing, plan_one, asked.budget, told.print) if failing and asked.budget else ()
    if where.is_tpu:
        stated = (*stated, "sizes are the compiler's, times are estimates from its program, no measurement")
    return Plan(
        config=name,
        topology=where.text,
        chip=where.chip.name,
        devices=where.count,
        mesh=sides,
        by="compiler" if where.is_tpu else "arithmetic",
        parameters=specs.count(model.spec(config.model), config.model),
        stated=stated if where.is_tpu else (*stated, *arithmetic.STATED),
        programs=tuple(found),
        trials=trials,
    )


def _plans(config: run.Config, decode: bool, where: topology.Topology, devices: list, told: Console) -> list[ProgramPlan]:
    mesh = config.mesh.make(devices)
    programs.check(config, mesh, decode)
    if not where.is_tpu:
        return arithmetic.generation(config, mesh, where) if decode else [arithmetic.training_step(config, mesh, where)]
    wanted = programs.generation(config, mesh, "tpu") if decode else [programs.training_step(config, mesh, "tpu")]
    found = []
    for program in wanted:
        with Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=told, transient=True
        ) as bar:
            if not told.is_terminal:
                told.print(f"compiling: {program.name}")
            bar.add_task(f"compiling: {program.name}", total=None)
            found.append(compile.compiled(program, where, devices))
        if not found[-1].fits:
            break
    return found


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    except jax.errors.JaxRuntimeError as error:
        sys.exit(f"error: the compiler refuses: {str(error).splitlines()[0]}")
