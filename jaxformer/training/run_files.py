"""The first files of a run: config.json with the checksums of itself and of the tokenizer, and the tokenizer."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxformer.config.strict import from_dict, to_json
from jaxformer.tokenizers import disk_cache, json_files, tokenizer
from jaxformer.training.config import Config
from jaxformer.training.migrate import migrated

CHECKSUMS = "checksums"
"""The entry of config.json by which it and the tokenizer are known to be what was written."""
_EDITED = f"If that is intended, delete {CHECKSUMS!r} from config.json"


def write_run(directory: Path, config: Config, tok: Any) -> None:
    """Writes config.json and the tokenizer; from then on the run can be loaded and continued."""
    values = json.loads(to_json(config))  # refuses before anything is written
    values[CHECKSUMS] = {"config": _checksum(values), "tokenizer": tok.content_hash}
    directory.mkdir(parents=True, exist_ok=True)
    disk_cache.write(directory / "config.json", json.dumps(values, indent=2).encode())
    tok.save(directory)


def read_run(directory: Path, trust: bool = False) -> Config:
    """The config of a run, whatever version of the library wrote it (``training.migrate``). trust: whether the import paths in
    it may be followed, which runs code. Raises ValueError or FileNotFoundError that says what is wrong with it."""
    values = plain(directory)[0]
    with named(directory):
        return from_dict(Config, values, trust)


def verify_config(directory: Path) -> None:
    """Raises ValueError where config.json is not as it was written. One without checksums, of an earlier version, is taken."""
    values, sums = _stored(directory)
    if sums and sums.get("config") != _checksum(values):
        raise ValueError(
            f"{directory / 'config.json'} has changed since it was written; it is damaged or has been edited. {_EDITED}"
        )


def read_tokenizer(directory: Path) -> Any:
    """The tokenizer of a run. Raises ValueError where it is not the one that was written with its config.json."""
    tok = tokenizer.load(directory)
    known = plain(directory)[1].get("tokenizer", tok.content_hash)
    if known != tok.content_hash:
        raise ValueError(f"the tokenizer in {directory} has changed since it was written; it is damaged or replaced. {_EDITED}")
    return tok


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def plain(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of a run's config.json, under today's names, and its checksums ({} of an earlier version)."""
    values, sums = _stored(directory)
    with named(directory):
        return migrated(values), sums


def _stored(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same under the names that it was written with."""
    path = directory / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{directory} is not a run directory, as it has no config.json")
    with named(directory):
        values = json_files.parse(json_files.content(path))
        if not isinstance(values, dict):
            raise ValueError(f"it holds {type(values).__name__}, not the fields of a run")
        sums = values.pop(CHECKSUMS, {})
        if not isinstance(sums, dict):
            raise ValueError(f"its {CHECKSUMS} are {type(sums).__name__}, not an object")
        return values, sums


@contextlib.contextmanager
def named(directory: Path) -> Iterator[None]:
    """Errors as ValueErrors that name the config.json: not UTF-8, not JSON, nested too deep, unknown or missing fields."""
    try:
        yield
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{directory / 'config.json'} cannot be read: {error}") from error
