"""Folders by their id on a hub, such as ``Qwen/Qwen3-0.6B``: downloaded once, then read from the local cache."""

import os
import re
from pathlib import Path

from jaxformer.tokenizers import disk_cache

GENERATION = "generation_config.json"
REST = ("config.json", GENERATION, "tokenizer*", "special_tokens_map.json", "chat_template.jinja", "*.model")
WEIGHTS = (("model*.safetensors", "model.safetensors.index.json"), ("flax_model.msgpack",))  # the first that a hub has
ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def locate(path_or_id: str | os.PathLike, revision: str | None = None) -> Path:
    """The folder at a path, or of a hub's id. revision: branch, tag or commit; only a commit pins the files for good.

    Only configs, tokenizers, safetensors and msgpack are downloaded, never pickles or code.

    Raises FileNotFoundError where there is neither; where the hub cannot be reached, it says what to download.
    """
    folder = Path(path_or_id)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision={revision!r} goes with the id of a hub; {folder} is a folder")
        return folder
    name = os.fspath(path_or_id)
    if not ID.fullmatch(name):
        raise FileNotFoundError(f"{folder} is not a folder")
    return _download(name, revision)


def copy_generation_config(source: Path, target: Path) -> None:
    """Copies generation_config.json, where there is one, from one folder of a model to another: no config of ours holds it."""
    if (source / GENERATION).is_file():
        disk_cache.write(target / GENERATION, (source / GENERATION).read_bytes())


def _download(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise FileNotFoundError(f"{name} is not a folder; to download it from a hub, install jaxformer[hf]") from error
    missing = f"{name} is neither a folder nor"
    try:
        for weights in WEIGHTS:
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*REST, *weights], ignore_patterns="*/*"))
            if any(path.suffix in (".safetensors", ".msgpack") for path in folder.iterdir()):
                break
    except LocalEntryNotFoundError as error:
        at = f" --revision {revision}" if revision else ""
        raise FileNotFoundError(
            f"{missing} downloaded already, and the hub cannot be reached. Where there is a network: hf download {name}{at} "
            f"config.json 'model*.safetensors*' 'tokenizer*' --local-dir FOLDER; then give FOLDER"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = f" with a revision {revision!r}" if revision else ""
        raise FileNotFoundError(f"{missing} a model{at} that the hub would show: {error}") from error
    except HfHubHTTPError as error:
        raise FileNotFoundError(f"{missing} to be had from the hub: {error}") from error
    return folder
