"""Config files by path, or by the name of one that comes with the library, such as ``quickstart``."""

import difflib
import os
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
FOLDER = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
"""Those that come with the library: inside an installed package, at the top level of a checkout."""


def names() -> list[str]:
    """Names of the shipped configs."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def find(path: str | os.PathLike) -> Path:
    """The file that ``path`` is, else the shipped config of that name. Raises ValueError, with the nearest file or name, where
    there is neither."""
    file = Path(os.path.expanduser(path))
    if file.is_file():
        return file
    if str(path) in names():
        return FOLDER / f"{path}.py"
    local = [str(other) for folder in {file.parent, Path("configs")} for other in folder.glob("*.py")]
    close = difflib.get_close_matches(str(path), [*local, *names()], n=1)
    said = f"; did you mean {close[0]!r}?" if close else "."
    by_likeness = difflib.get_close_matches(file.stem, names(), n=len(names()), cutoff=0.0)
    raise ValueError(f"no config file {path}{said} Shipped configs: {', '.join(by_likeness)}")
