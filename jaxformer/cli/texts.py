"""Whether a run that is continued still has the text that it began with: ``data.json`` in its directory keeps a hash of it."""

import json
from pathlib import Path
from typing import Any

from jaxformer.data import Data, DataConfig
from jaxformer.tokenizers import disk_cache, json_files

FILE = "data.json"
CHOOSING = ("task", "path", "validation_path", "target_path", "validation_fraction")
"""The fields of a DataConfig that choose a text. Where they have changed, another text was asked for."""


def changes(directory: Path, cfg: DataConfig, corpus: Data) -> list[str]:
    """What to say about a text that is no longer that of the run in ``directory``: nothing where it is the same, or where none
    is known (a new run, one of an earlier version, a data set without a hash).

    Raises ValueError where the text has changed under the same name, unless ``cfg.accept_change``.
    """
    path = directory / FILE
    now = _record(cfg, corpus)
    if not path.exists() or not now["hashes"]:
        return []
    try:
        before = json_files.parse(json_files.content(path))
        chosen, hashes = dict(before["chosen"]), dict(before["hashes"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}; delete it to continue without comparing the text") from error
    names = [name for name, value in now["hashes"].items() if hashes and hashes.get(name) != value]
    if not names:
        return []
    what = f"the {' and the '.join(names)} text of {_named(cfg)}"
    if chosen != now["chosen"]:
        return []  # said already, as fields that differ
    if not cfg.accept_change:
        raise ValueError(
            f"{what} is not the one that {directory} has been trained on; restore it, choose another --run-dir, or continue "
            f"with the text as it is now by --data.accept-change"
        )
    return [f"{what} has changed"]


def write(directory: Path, cfg: DataConfig, corpus: Data) -> None:
    """Keeps what ``changes`` compares with: the whole file or, where writing is interrupted, the one before."""
    disk_cache.write(directory / FILE, json.dumps(_record(cfg, corpus), indent=2).encode())


def _record(cfg: DataConfig, corpus: Data) -> dict[str, Any]:
    hashes = corpus.split_hashes or ({"whole": corpus.content_hash} if corpus.content_hash else {})
    return {"chosen": {name: getattr(cfg, name) for name in CHOOSING}, "hashes": hashes}


def _named(cfg: DataConfig) -> str:
    """Where the text comes from, in the words of the command line."""
    paths = [f"data.{name}={value!r}" for name in CHOOSING[1:4] if (value := getattr(cfg, name)) is not None]
    if paths:
        return " and ".join(paths)
    return "this Python's standard library" if cfg.task == "text" else f"data.task={cfg.task!r}"
