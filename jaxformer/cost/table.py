"""Reports: lines of text and tables, as plain text, as Markdown, or in the width and colors of a terminal."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

_NUMBER = re.compile(r"×?-?[\d,.]+(e[-+]\d+)?%?( [A-Za-z]+)?|")


@dataclass(frozen=True)
class Table:
    """Cells under the names of their columns; the name of the first column may serve as a title. No names: no header."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    faint: list[bool] = field(default_factory=list)
    """Which rows a terminal shows dimmed."""

    def right(self) -> list[bool]:
        """Whether each column holds numbers, which are aligned to the right."""
        return [number > 0 and all(map(_NUMBER.fullmatch, cells)) for number, cells in enumerate(zip(*self.rows, strict=True))]

    def text(self) -> str:
        """Columns aligned by spaces."""
        rows = [self.columns, *self.rows] if any(self.columns) else self.rows
        aligned = [
            [cell.rjust(width) if right else cell.ljust(width) for cell in cells]
            for cells, right in zip(zip(*rows, strict=True), self.right(), strict=True)
            for width in [max(map(len, cells))]
        ]
        return "\n".join("  ".join(cells).rstrip() for cells in zip(*aligned, strict=True))

    def markdown(self) -> str:
        """A table of Markdown."""
        rule = tuple("---:" if right else "---" for right in self.right())
        escaped = [tuple(cell.replace("|", "\\|") for cell in cells) for cells in self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in [self.columns, rule, *escaped])

    def rich(self) -> RichTable:
        """The same for a terminal: cells are folded to its width."""
        plain: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
        table = RichTable(show_header=any(self.columns), **plain)
        for name, right in zip(self.columns, self.right(), strict=True):
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for number, cells in enumerate(self.rows):
            table.add_row(*cells, style="dim" if self.faint and self.faint[number] else None)
        return table


Report = list[str | Table]


def text(report: Report) -> str:
    """A report as plain text, its tables between empty lines."""
    return "\n\n".join(section.text() if isinstance(section, Table) else section for section in report)


def markdown(report: Report) -> str:
    """A report as Markdown."""
    return "\n\n".join(section.markdown() if isinstance(section, Table) else section for section in report)


def show(report: Report) -> None:
    """Prints a report: in a terminal as wide as that, else as plain text."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        print(text(report))
        return
    for number, section in enumerate(report):
        console.print(*[""] * (number > 0), section.rich() if isinstance(section, Table) else section, sep="\n")
