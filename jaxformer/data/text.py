"""Documents of a text corpus, and which of them are held out."""

import hashlib
import json
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jaxformer.config.textfile import MARK, read_bytes
from jaxformer.data import folder
from jaxformer.data.config import DataConfig

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Documents(NamedTuple):
    """The two splits of a corpus, each in a fixed order, without empty documents."""

    train: list[str]
    validation: list[str]
    cut: bool
    """One document was cut in two, so that neither half ends where the document does."""


def documents(cfg: DataConfig) -> Documents:
    """Reads the documents of ``cfg``: a file is a document, a line of a .jsonl file is one.

    Held out are the files of ``validation_path``; else whole files, by a hash of their path below the folder; else, of
    a single file, the last documents; else, of a single document, its last characters. Raises ValueError for a path
    that is absent or empty, and for text that is not UTF-8 or not JSON lines, naming the file and the place.
    """
    files = _read(cfg.path) if cfg.path else _standard_library()
    everything = [text for texts in files.values() for text in texts]
    if not everything:
        raise ValueError(f"data.path={cfg.path!r} holds no text")
    if cfg.validation_path:
        held = [text for texts in _read(cfg.validation_path).values() for text in texts]
        if not held:
            raise ValueError(f"data.validation_path={cfg.validation_path!r} holds no text")
        return Documents(everything, held, cut=False)
    if len(everything) == 1 and cfg.validation_fraction:
        text = everything[0]
        at = round(len(text) * (1 - cfg.validation_fraction))
        return Documents([text[:at]], [text[at:]] if text[at:] else [], cut=True)
    if len(files) == 1:
        return Documents(*_split_end(everything, cfg.validation_fraction), cut=False)
    held_names = held_out(files, cfg.validation_fraction)
    train = [text for name, texts in files.items() if name not in held_names for text in texts]
    return Documents(train, [text for name, texts in files.items() if name in held_names for text in texts], cut=False)


def held_out(names: Iterable[str], fraction: float) -> set[str]:
    """About ``fraction`` of the names, by their hash: a name's side does not depend on the others. Of two names or more
    at least one falls on either side (none is held out for fraction 0)."""
    ordered = sorted(set(names), key=unit_hash)
    if not fraction or len(ordered) < 2:
        return set()
    count = sum(unit_hash(name) < fraction for name in ordered)
    return set(ordered[: min(max(count, 1), len(ordered) - 1)])


def unit_hash(name: str) -> float:
    """A number in [0, 1) that depends on the name alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def read(path: Path) -> str:
    """UTF-8 text without a byte order mark, line ends as they are. Raises ValueError naming the file: with the first byte that
    is not UTF-8, or for a file that cannot be read."""
    data = _content(path)
    try:
        return data.decode("utf-8").removeprefix(MARK)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}: byte {error.start} is not UTF-8; convert the file, or exclude it by a glob in data.path"
        ) from None


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _split_end(texts: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """Whole documents from the end until they make up ``fraction`` of the characters; at least one stays in front."""
    left, at = sum(map(len, texts)) * fraction, len(texts)
    while left > 0 and at > 1:
        at -= 1
        left -= len(texts[at])
    return texts[:at], texts[at:]


def _read(pattern: str) -> dict[str, list[str]]:
    """Documents by file, without files that hold none; names as of ``folder.files``."""
    return {name: texts for name, path in folder.files(pattern).items() if (texts := _documents_of(path))}


def _documents_of(path: Path) -> list[str]:
    text = read(path)
    if path.suffix != ".jsonl":
        return [text] if text else []
    texts = [_json_text(f"{path}, line {n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [text for text in texts if text]


def _json_text(where: str, line: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        has = f"has {', '.join(map(repr, record))}" if isinstance(record, dict) else f"is a {type(record).__name__}"
        raise ValueError(f'{where}: a line must be an object with a string "text"; this one {has}')
    try:
        record["text"].encode()
    except UnicodeEncodeError as error:
        raise ValueError(f'{where}: "text" holds half of a surrogate pair at index {error.start}') from None
    return record["text"]


def _standard_library() -> dict[str, list[str]]:
    """Python source of the running interpreter, without tests, installed packages, what depends on the build, and
    copies of a file (one could be held out while the other trains)."""
    root = Path(sysconfig.get_path("stdlib"))
    names: dict[str, str] = {}
    for path in sorted(root.rglob("*.py"), reverse=True):
        parts = path.relative_to(root).parts
        if _NOT_LIBRARY & set(parts) or parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        try:
            text = _content(path).decode("utf-8").removeprefix(MARK)
        except UnicodeDecodeError:
            continue
        if text:
            names[text] = "/".join(parts)
    return {name: [text] for text, name in sorted(names.items(), key=lambda item: item[1])}
