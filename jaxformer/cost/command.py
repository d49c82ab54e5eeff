"""The two programs of this room: ``jaxformer explain CONFIG`` and ``jaxformer plan CONFIG``.

Both take the name of a preset or a config file of train.py, then flags, and print a report, Markdown or JSON.
"""

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jax
import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxformer.config import ModelConfig, presets
from jaxformer.config import spec as specs
from jaxformer.config.components import nearest
from jaxformer.config.execution import DROPOUTS
from jaxformer.config.strict import Strict, within
from jaxformer.cost import advise, analytic, compile, programs, table, topology
from jaxformer.cost.budget import Budget
from jaxformer.cost.explanation import Explanation, explain
from jaxformer.cost.plan import Plan, ProgramPlan, Trial
from jaxformer.data import DataConfig
from jaxformer.nn import model
from jaxformer.parallel import exit_codes
from jaxformer.parallel.sharding import AXES, MeshConfig
from jaxformer.tokenizers.disk_cache import target, write
from jaxformer.training import run, shipped

EXPLAIN = """Shows what a model's forward pass costs, step by step. CONFIG is the name of a preset or a config file of train.py.
The model is only traced: nothing is computed, and no device is needed."""
PLAN = """Finds out how much memory and time a run takes, before it runs. CONFIG is the name of a preset or a config file of
train.py. For TPUs the real training step, or with --decode the real programs of generation, are compiled without the chips; for
GPUs the plan is computed."""
ROWS_PER_DEVICE = 4
"""Rows per device for a preset, unless data.batch_size is given."""
LONGEST = 4096
"""Tokens per row for a preset, unless data.length is given or the model's max_length is less."""


@dataclass(frozen=True, kw_only=True)
class Output(Strict):
    """How the report is written."""

    json: str = ""
    """File to write the report to as JSON; - (or --json without a value) is standard output."""
    markdown: bool = False
    """Print Markdown instead of plain tables."""

    def __post_init__(self):
        super().__post_init__()
        if self.markdown and self.json == "-":
            raise ValueError("give either --markdown or --json, not both")

    def check(self) -> None:
        """Raises ValueError where the file cannot be written."""
        if self.json not in ("", "-"):
            target(self.json)

    def write(self, result: Explanation | Plan) -> None:
        """Writes a report as these options say."""
        values = json.dumps(result.values(), indent=2)
        if self.json not in ("", "-"):
            write(target(self.json), f"{values}\n".encode())
        if self.json == "-":
            print(values)
        elif self.markdown:
            print(table.markdown(result.report()))
        else:
            table.show(result.report())


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(Output):
    """A model, and what it reads."""

    model: ModelConfig
    """What the model is."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Devices, which need not exist; data=0 is 1."""
    batch: int = 8
    """[B] rows."""
    length: int = 1024
    """[T] tokens per row; an encoder reads as many."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 1, math.inf, "batch", "length")


@dataclass(frozen=True)
class PlanOptions(run.Config, Output):
    """A run, and the devices it is planned for."""

    topology: str = ""
    """Chips. Compiled for: v5e:4x4, v5p:4x4x4, v6e:16x16; computed: gpu:8xH100, H200, A100, B200."""
    decode: bool = False
    """Plan generation instead of training: data.batch_size prompts, each with data.length tokens in the cache."""
    budget: float = 900.0
    """Seconds that the plan may take: compiling the run as it is, then trying changes if it does not fit. 0: no limit, and no
    changes are tried."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 0, math.inf, "budget")


Options = TypeVar("Options", bound=Output)


def parse(arguments: list[str], program: str, description: str, defaults: Callable[[str], Options]) -> Options:
    """``CONFIG [--field value ...]`` as options. defaults: the options of a CONFIG before its flags are read."""
    if not arguments or arguments[0].startswith("-"):
        if not {"-h", "--help"} & set(arguments):
            known = ", ".join(sorted(presets.WITH_SIZES))
            raise ValueError(f"the first argument must be a config file or a preset; presets: {known}")
        arguments = ["gpt2", "--help"]
    name, *flags = arguments
    # --json may stand without a value, which tyro does not know.
    pairs = zip(flags, [*flags[1:], "--"], strict=False)
    flags = ["--json=-" if flag == "--json" and following.startswith("--") else flag for flag, following in pairs]
    prog = f"jaxformer {program} CONFIG"
    default = defaults(name)
    return tyro.cli(type(default), default=default, args=flags, prog=prog, description=description)


def read(name: str) -> ModelConfig | run.Config:
    """A preset's model, or the run of a config file or of a shipped config."""
    if name in presets.WITH_SIZES:
        return presets.WITH_SIZES[name]()
    file = Path(os.path.expanduser(name))
    if not file.is_file() and name not in shipped.names():
        known = [*presets.WITH_SIZES, *shipped.names(), *(str(path) for path in Path("configs").glob("*.py"))]
        raise ValueError(f"there is no config file or preset {name}{nearest(name, known)}")
    return run.read_config(file)[0]


# explain


def explain_command(arguments: list[str]) -> None:
    """``jaxformer explain``."""
    jax.config.update("jax_platforms", "cpu")  # shapes need no other device
    options = parse_explain(arguments)
    options.check()
    mesh = None if options.mesh == MeshConfig() else options.mesh
    options.write(explain(options.model, options.batch, options.length, mesh))


def parse_explain(arguments: list[str]) -> ExplainOptions:
    """The options; batch and length of a config file are those of its data unless given."""

    def defaults(name: str) -> ExplainOptions:
        config = read(name)
        if isinstance(config, ModelConfig):
            return ExplainOptions(model=config, length=min(ExplainOptions.length, config.max_length))
        return ExplainOptions(model=config.model, mesh=config.mesh, batch=config.data.batch_size, length=config.data.length)

    return parse(arguments, "explain", f"{EXPLAIN}\n\n{exit_codes.described()}", defaults)


# plan


def plan_command(arguments: list[str]) -> Plan:
    """``jaxformer plan``. Raises ValueError with the first line of what the compiler says, where it refuses."""
    jax.config.update("jax_platforms", "cpu")  # nothing of this machine's accelerators is used
    options, stated = parse_plan(arguments)
    options.check()
    try:
        plan = make(arguments[0], options, stated)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the compiler cannot compile this program: {str(error).splitlines()[0]}") from error
    options.write(plan)
    return plan


def parse_plan(arguments: list[str]) -> tuple[PlanOptions, tuple[str, ...]]:
    """The options, and what was assumed where they say nothing."""
    chips = re.search(r"--topology[ =](\S+)", " ".join(arguments))
    count = topology.parse(chips[1]).count if chips else 1
    on_mesh = any(re.match(rf"--mesh\.({'|'.join(AXES)})\b", word) for word in arguments)
    stated: list[str] = []

    def defaults(name: str) -> PlanOptions:
        config = read(name)
        if isinstance(config, ModelConfig):
            stated.append(
                f"assumed for the preset unless given: {config.param_dtype} parameters, bfloat16 compute, scanned layers, "
                f"remat='dots', no dropout, {ROWS_PER_DEVICE} rows per device of one stream of tokens, loss in chunks of 512"
                + ("" if on_mesh else ", fsdp over all devices")
            )
            config = _preset_run(config, count, MeshConfig() if on_mesh else MeshConfig(fsdp=count))
        return PlanOptions(**{field.name: getattr(config, field.name) for field in dataclasses.fields(run.Config)})

    options = parse(arguments, "plan", f"{PLAN}\n\n{exit_codes.described('done, whether or not the run fits')}", defaults)
    if not options.topology:
        raise ValueError("give --topology to say which chips to plan for: v5e:4x4, v5p:4x4x4 or gpu:8xH200, for example")
    return options, tuple(stated)


def _preset_run(cfg: ModelConfig, count: int, mesh: MeshConfig) -> run.Config:
    """A run of a preset, as one would train it on ``count`` devices."""
    cfg = cfg.with_execution(dtype="bfloat16", scan=True, remat="dots", **dict.fromkeys(DROPOUTS, 0.0))
    length, rows = min(cfg.max_length, LONGEST), ROWS_PER_DEVICE * count
    data = DataConfig(length=length, batch_size=rows, segment_documents=False)
    return run.Config(model=cfg, data=data, train=run.TrainConfig(loss_chunk=512), mesh=mesh)


class _StandIn:
    """What a mesh has to know of a device that does not exist."""

    platform, process_index, device_kind = "", 0, ""


def make(name: str, options: PlanOptions, stated: tuple[str, ...]) -> Plan:
    """The plan. Raises ValueError before compiling for a mesh or a batch that does not fit the devices."""
    where = topology.parse(options.topology)
    stand_ins: list = [_StandIn() for _ in range(where.count)]
    mesh = options.mesh.make(stand_ins)
    programs.check(options, mesh, options.decode)
    devices = topology.devices(where) if where.is_tpu else stand_ins
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    budget = Budget(options.budget)
    plan_run = lambda config: _program_plans(config, options.decode, where, devices, console, budget)
    plans = plan_run(options)
    sides = {axis: int(size) for axis, size in mesh.shape.items()}
    failing = [program for program in plans if not program.fits]
    trials: tuple[Trial, ...] = ()
    if failing and options.budget:
        console.print(failing[0].verdict)  # at once: trials may take long
        trials = advise.search(options, sides, failing, plan_run, budget, console.print)
    compiled = ("sizes are the compiler's; times are estimates from its program, not measurements",)
    return Plan(
        config=name,
        topology=where.text,
        chip=where.chip.name,
        devices=where.count,
        mesh=sides,
        by="compiler" if where.is_tpu else "arithmetic",
        parameters=specs.count(model.spec(options.model), options.model),
        stated=(*stated, *(compiled if where.is_tpu else analytic.STATED)),
        programs=tuple(plans),
        trials=trials,
    )


def _program_plans(
    config: run.Config, decode: bool, where: topology.Topology, devices: list, console: Console, budget: Budget
) -> list[ProgramPlan]:
    mesh = config.mesh.make(devices)
    programs.check(config, mesh, decode)
    if not where.is_tpu:
        return analytic.generation(config, mesh, where) if decode else [analytic.training_step(config, mesh, where)]
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    plans: list[ProgramPlan] = []
    for program in programs.generation(config, mesh) if decode else [programs.training_step(config, mesh)]:
        with Progress(*columns, console=console, transient=True) as bar:
            if not console.is_terminal:
                console.print(f"compiling: {program.name}")
            bar.add_task(f"compiling: {program.name}", total=None)
            plans.append(budget.run(functools.partial(compile.compiled, program, where, devices), program.name))
        if not plans[-1].fits:
            break
    return plans
