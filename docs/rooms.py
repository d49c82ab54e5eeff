"""Draws the rooms of the package from its imports: ``python docs/rooms.py`` rewrites the drawing in docs/architecture.md.

An arrow goes from a room to one that it imports; an import that a chain of other arrows implies is not drawn.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxformer"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: begin -->\n", "<!-- rooms: end -->\n"
ORDER = ("config", "parallel", "nn", "decode", "tokenizers", "data", "training", "interop", "hf", "cost", "prove", "cli")
"""Rooms in the order in which they may be imported: each from those before it alone."""


def room(module: str) -> str | None:
    """The room of a module, such as "nn" of "jaxformer.nn.mlp"; None for what is in no room."""
    parts = module.split(".")
    return parts[1] if parts[0] == "jaxformer" and len(parts) > 1 and parts[1] in ORDER else None


def imported(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(name: str) -> list[Path]:
    """The Python files of a room."""
    return sorted((PACKAGE / name).rglob("*.py"))


def edges() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = {}
    for name in ORDER:
        targets = {room(module) for path in files(name) for module in imported(path)}
        found[name] = {target for target in targets if target is not None and target != name}
    return found


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """``graph``, of rooms in order, without the edges that chains of others imply."""
    reachable: dict[str, set[str]] = {}
    kept = {}
    for name, targets in graph.items():
        beyond = {target: reachable.get(target, set()) for target in targets}
        reachable[name] = targets.union(*beyond.values())
        kept[name] = {t for t in targets if not any(t in beyond[other] for other in targets - {t})}
    return kept


def drawing() -> str:
    """The rooms as a Mermaid graph."""
    lines = ["```mermaid", "graph BT"]
    for name, targets in reduced(edges()).items():
        lines += [f"  {name} --> {target}" for target in sorted(targets, key=ORDER.index)]
    return "\n".join([*lines, "```"]) + "\n"


def main() -> None:
    """Rewrites the drawing in the architecture page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + drawing() + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
