"""A plan as a person reads it: tables of the terminal, or Markdown."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from jaxformer.plan.record import Plan, ProgramPlan
from jaxformer.plan.topology import GIB

Rows = Sequence[tuple[str, ...]]


def show(plan: Plan, console: Console) -> None:
    """Prints tables."""

    def table(title: str, head: tuple[str, ...], rows: Rows) -> None:
        shown = Table(title=title, title_justify="left", show_header=any(head))
        for number, name in enumerate(head):
            shown.add_column(name, justify="left" if number == 0 or not _numeric(rows, number) else "right")
        for row in rows:
            shown.add_row(*row)
        console.print(shown)

    _tell(plan, console.print, table)


def markdown(plan: Plan) -> str:
    """The same as Markdown."""
    lines: list[str] = []

    def table(title: str, head: tuple[str, ...], rows: Rows) -> None:
        align = ["---" if number == 0 or not _numeric(rows, number) else "--:" for number in range(len(head))]
        lines.extend(["", f"| {title} | " + " | ".join(head[1:]) + " |", "|" + "|".join(align) + "|"])
        lines.extend("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)

    def text(line: str) -> None:
        lines.extend(["", line])

    _tell(plan, text, table)
    return "\n".join(lines).strip() + "\n"


def _numeric(rows: Rows, column: int) -> bool:
    return all(not row[column] or row[column].lstrip("-")[:1].isdigit() for row in rows)


def _tell(plan: Plan, text: Callable[[str], None], table: Callable[[str, tuple[str, ...], Rows], None]) -> None:
    axes = " · ".join(f"{name} {size}" for name, size in plan.mesh.items() if size > 1) or "no axis of the mesh"
    text(f"{plan.config}, {plan.parameters:,} parameters, on {plan.devices} × {plan.chip} ({plan.topology}): {axes}")
    for line in plan.stated:
        text(f"- {line}")
    for program in plan.programs:
        verdict = "fits" if program.fits else "does not fit"
        text(
            f"{program.name}: {verdict}, {_gib(program.needed_bytes)} of {_gib(program.available_bytes)} GiB a device; "
            f"{_bound(plan, program)}"
        )
        _tables(plan, program, table)
        for note in program.notes:
            text(f"note: {note}")
    if plan.trials:
        rows = [
            (" ".join(t.flags), "fits" if t.fits else "does not", _gib(t.needed_bytes), f"{t.seconds:.0f}") for t in plan.trials
        ]
        table("tried", ("", "", "GiB a device", "s"), rows)
        fitting = next((trial for trial in plan.trials if trial.fits), None)
        text(f"smallest change that fits: {' '.join(fitting.flags)}" if fitting else "none of these fits")


def _bound(plan: Plan, program: ProgramPlan) -> str:
    time = program.time
    if not program.fits or not time.estimate:
        return "no time is estimated for what does not run"
    said = "estimated" if plan.by == "compiler" else "at best"
    return (
        f"{said} {time.estimate:.4g} s, bound by {time.bound}, MFU {time.mfu:.1%}, "
        f"{time.tokens_per_second_per_chip:,.0f} tokens/s a chip ({'an estimate' if said == 'estimated' else 'a bound'}, "
        "no measurement)"
    )


def _tables(plan: Plan, program: ProgramPlan, table: Callable[[str, tuple[str, ...], Rows], None]) -> None:
    kinds = [(kind, _gib(size)) for kind, size in program.memory.items() if size]
    if kinds:
        table("memory a device, when most is needed", ("", "GiB"), [*kinds, ("all", _gib(program.needed_bytes))])
    if plan.by == "compiler" and program.largest:
        rows = [(b.name, b.kind, b.shape, f"{b.bytes / 2**20:,.1f}") for b in program.largest]
        table("largest buffers", ("", "what", "shape", "MiB"), rows)
    time = program.time
    share = f"{program.hardware_flops / program.model_flops:.2f} of the model's" if program.model_flops else ""
    work: Rows = [
        ("model FLOPs", f"{program.model_flops / 1e12:,.4g} T", f"{program.attention_flops / 1e12:,.3g} T of them attention"),
        ("FLOPs of the program", f"{program.hardware_flops / 1e12:,.4g} T", share),
        ("memory traffic", f"{program.traffic_bytes / 1e9:,.4g} GB", ""),
        ("compute", f"{time.compute:.4g} s", f"MFU {time.compute_mfu:.1%} if nothing else took time"),
        ("memory", f"{time.memory:.4g} s", ""),
        ("network", f"{time.network:.4g} s", f"{time.exposed_network:.4g} s with nothing beside it"),
    ]
    if program.hardware_flops:
        table("a run of it, a device", ("", "", ""), work)
    if program.collectives:
        beside = plan.by == "compiler"
        collected = [
            (
                c.kind,
                f"{c.count}",
                f"{c.runs:,.0f}",
                f"{c.bytes / 1e9:,.3g}",
                f"{c.seconds:.3g}",
                f"{c.overlapped_runs:,.0f}" if beside else "",
            )
            for c in program.collectives
        ]
        table("collectives", ("", "in the program", "runs", "GB", "s", "beside products"), collected)
    if plan.by == "compiler":
        compiled = f"{program.compile_seconds:.0f} s", f"{program.host_bytes / GIB:.2g} GiB"
        table("compiling took", ("", "time", "memory of this machine"), [("", *compiled)])


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"
