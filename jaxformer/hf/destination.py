"""The folder that a model is written to: nothing of the user's is lost in it, and it never holds parts of two models."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxformer.hf.hub import GENERATION
from jaxformer.tokenizers import tokenizer

WEIGHTS = (".safetensors", ".msgpack", ".bin")
CONFIG = "config.json"
MODEL_FILES = (CONFIG, GENERATION, "*.safetensors", "*.safetensors.index.json", "flax_model*", "pytorch_model*", "tf_model*.h5")
TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
)
ELSEWHERE = "choose another folder, or replace the model in it with overwrite=True (--overwrite)"


def destination(path: str | Path, overwrite: bool) -> Path:
    """The folder to write, with ``~`` expanded. Raises ValueError where there is something that it would take the place of."""
    folder = Path(os.path.expanduser(path))
    if folder.name in ("", "..") and folder != Path():
        raise ValueError(f"{folder} is not a folder for one model; give a named folder, such as {folder / 'model'}")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose another folder")
    if folder.exists() and not overwrite and any(file.suffix in WEIGHTS for file in folder.iterdir()):
        raise ValueError(f"{folder} holds weights already; {ELSEWHERE}")
    return folder


@contextlib.contextmanager
def staged(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """A new folder to write files into, which are those of ``folder`` when the block ends; after an error inside, nothing is
    left of it. Where ``folder`` exists, each file is moved into it, weights first and config.json last. overwrite: the model
    that was there is removed first, beginning with its config.json, without which nobody reads the others. Raises OSError that
    names ``folder`` where it cannot be written."""
    with named(folder):
        exists = folder.is_dir()
        around = folder if exists else folder.parent
        around.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".jaxformer-", dir=around) as name:
            partial = Path(name) / "new"  # mkdtemp's own is closed to others, and would remain so
            partial.mkdir()
            yield partial
            if not exists:
                os.rename(partial, folder)
                return
            files = sorted(partial.iterdir(), key=lambda file: (file.name == CONFIG, file.suffix not in WEIGHTS))
            if overwrite:
                _remove(folder, MODEL_FILES)
                if any(file.match(pattern) for file in files for pattern in TOKENIZER_FILES):
                    _remove(folder, TOKENIZER_FILES)  # a reader might prefer another form of the one before
            for file in files:
                os.replace(file, folder / file.name)


def try_writing(folder: Path) -> None:
    """Raises what ``staged`` raises where nothing can be written at ``folder``; leaves nothing behind."""
    with named(folder):
        tempfile.TemporaryDirectory(
            dir=next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
        ).cleanup()


@contextlib.contextmanager
def named(folder: Path) -> Iterator[None]:
    """Errors of writing inside the block name the folder."""
    if file := next((parent for parent in folder.parents if parent.is_file()), None):
        raise ValueError(f"{folder} cannot be written: {file} is a file")
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{folder} cannot be written: {error.strerror or error}") from error


def _remove(folder: Path, patterns: tuple[str, ...]) -> None:
    """Removes the files of these names, in the order of the names."""
    for pattern in patterns:
        for file in list(folder.glob(pattern)):
            if file.is_file():
                file.unlink()


def check_same(folder: Path, partial: Path, tok: Any) -> None:
    """Raises ValueError where ``folder`` holds other contents of a file in ``partial``."""
    same = tok is not None and _holds(folder, tok)
    for file in partial.iterdir():
        free = same and file.name not in (CONFIG, GENERATION)  # the tokenizer is there in another form
        if not free and (there := folder / file.name).exists() and there.read_bytes() != file.read_bytes():
            raise ValueError(f"{folder} holds another {file.name} already; {ELSEWHERE}")


def _holds(folder: Path, tok: Any) -> bool:
    """Whether the tokenizer of a folder is ``tok``, in whatever form its files have."""
    try:
        return tokenizer.load(folder).content_hash == tok.content_hash
    except (ValueError, OSError):
        return False
