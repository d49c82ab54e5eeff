"""Folders by their id on a hub, such as ``Qwen/Qwen3-0.6B``: downloaded once, then read from the local cache."""

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

from jaxformer.tokenizers.disk_cache import write
from jaxformer.tokenizers.json_files import read_json

GENERATION = "generation_config.json"
IDS = tuple(f"{name}_token_id" for name in ("bos", "eos", "pad", "decoder_start", "forced_bos", "forced_eos"))
"""Fields of generation_config.json that older models have in config.json instead."""
REST = ("config.json", GENERATION, "tokenizer*", "special_tokens_map.json", "chat_template.jinja", "*.model")
WEIGHTS = (("model*.safetensors", "model.safetensors.index.json"), ("flax_model.msgpack",))  # the first that a hub has
ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def locate(path_or_id: str | os.PathLike, revision: str | None = None) -> Path:
    """The folder at a path (``~`` is expanded), or of a hub's id. revision: branch, tag or commit; only a commit pins the
    files for good.

    Only configs, tokenizers, safetensors and msgpack are downloaded, never pickles or code.

    What looks like a path is never asked for at a hub: it begins with ``/``, ``./``, ``../`` or ``~``, has more than one slash,
    or the part before its slash is a folder here.

    Raises FileNotFoundError where there is neither; where the hub cannot be reached, it says what to download.
    """
    name = os.path.expanduser(path_or_id)
    folder = Path(name)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision={revision!r} needs a Hub id, but {folder} is a local folder")
        return folder
    if folder.exists() or not ID.fullmatch(name) or ("/" in name and folder.parent.is_dir()):
        raise FileNotFoundError(no_folder(folder))
    return _download(name, revision)


def no_folder(path: Path) -> str:
    """What to say of a path that is no folder, with the most similar name beside it."""
    close = _similar(path)
    return f"{path} is not a folder" + (" but a file" if path.exists() else f"; did you mean {close}?" if close else "")


def _similar(path: Path) -> Path | None:
    """The folder beside ``path`` whose name is most similar, if any is."""
    siblings = [sibling.name for sibling in path.parent.iterdir() if sibling.is_dir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return path.parent / close[0] if close else None


def generation_config(folder: Path) -> dict[str, Any]:
    """The fields of a model's generation_config.json. The ids that end an output, where it has none, are those of config.json;
    without the file, all ids that generation uses are. Raises ValueError for a file that cannot be read."""
    path = folder / GENERATION
    values = read_json(path) if path.is_file() else {}
    missing = [name for name in (("eos_token_id",) if path.is_file() else IDS) if values.get(name) is None]
    model = read_json(folder / "config.json") if missing and (folder / "config.json").is_file() else {}
    return values | {name: model[name] for name in missing if model.get(name) is not None}


def copy_generation_config(source: Path, target: Path) -> None:
    """Writes the fields of ``generation_config(source)``, if there are any, into another folder: no config of ours has them."""
    if values := generation_config(source):
        write(target / GENERATION, json.dumps(values, indent=2).encode())


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
        raise FileNotFoundError(f"{no_folder(Path(name))}; to download it from the Hub, install jaxformer[hf]") from error
    close = _similar(Path(name))
    absent = f"{name} is not a folder{f' (did you mean {close}?)' if close else ''}"
    try:
        for weights in WEIGHTS:
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*REST, *weights], ignore_patterns="*/*"))
            if any(path.suffix in (".safetensors", ".msgpack") for path in folder.iterdir()):
                break
    except LocalEntryNotFoundError as error:
        at = f" --revision {revision}" if revision else ""
        raise FileNotFoundError(
            f"{absent}, has not been downloaded yet, and the Hugging Face Hub cannot be reached. Where there is a network: "
            f"hf download {name}{at} config.json 'model*.safetensors*' 'tokenizer*' --local-dir FOLDER. Then give FOLDER"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = f" with a revision {revision!r}" if revision else ""
        raise FileNotFoundError(
            f"{absent}, and the Hugging Face Hub has no model{at} of that name, or none that you may read: {error}"
        ) from error
    except HfHubHTTPError as error:
        raise FileNotFoundError(f"{absent}, and the Hugging Face Hub did not deliver a model of that name: {error}") from error
    return folder
