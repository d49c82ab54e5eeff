"""What stands beside a published tokenizer.json: which of its tokens mean what, and how conversations are written."""

from pathlib import Path
from typing import Any

from jaxformer.config.textfile import read_text, require_regular
from jaxformer.tokenizers import json_files

CONFIG = "tokenizer_config.json"
NAMED = ("bos_token", "eos_token", "pad_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
"""How an added token is found in a text."""
TEMPLATE = "chat_template.jinja"


def read(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, completed: by special_tokens_map.json; by the ids of generation_config.json and config.json (as
    ints) for the bos, eos and pad that no other file knows; and by the template files, which go before its own.

    Raises ValueError that names the file with something wrong.
    """
    tokenizer_config = _object(folder / CONFIG)
    config = {**_object(folder / "special_tokens_map.json"), **tokenizer_config}
    for name in NAMED:
        if name not in config:  # null means that there is none, whatever ids the model's config may hold
            config[name] = _id(folder, f"{name}_id")
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_token"):
            config[name] = value.get("content")
        if name in NAMED and (not isinstance(config[name], str | int | None) or isinstance(value, bool)):
            raise ValueError(f"{CONFIG}: {name}={value!r} is not a token")
    table = config.get("added_tokens_decoder") or {}
    if not isinstance(table, dict) or not all(key.isdecimal() and _is_token(value) for key, value in table.items()):
        raise ValueError(f"{CONFIG}: added_tokens_decoder is not an object of tokens by their ids")
    for name in LISTS:
        if not isinstance(config.get(name), list | dict | None):
            raise ValueError(f"{CONFIG}: {name} is not a list of tokens")
    files = {"default": folder / TEMPLATE} if (folder / TEMPLATE).is_file() else {}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if files:
        templates = [{"name": name, "template": _text(path)} for name, path in files.items()]
        config["chat_template"] = templates[0]["template"] if files.keys() == {"default"} else templates
    template = config.get("chat_template")
    entries = template if isinstance(template, list) else [{"name": "default", "template": template or ""}]
    if not all(isinstance(entry, dict) and _is_text(entry.get("name"), entry.get("template")) for entry in entries):
        raise ValueError(f"{CONFIG}: chat_template must be a string, or a list of objects with name and template")
    return config


def control_names(config: dict[str, Any]) -> set[str]:
    """The tokens that a config calls special: as bos_token and the like, in lists of more, in its table of added ones."""
    named = [value for name, value in config.items() if name.endswith("_token")]
    for name in LISTS:
        more = config.get(name) or ()
        named += more.values() if isinstance(more, dict) else more
    named += [token for token in (config.get("added_tokens_decoder") or {}).values() if token.get("special")]
    texts = [value.get("content") if isinstance(value, dict) else value for value in named]
    return {text for text in texts if isinstance(text, str)}


def _is_text(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_token(value: Any) -> bool:
    flags = all(isinstance(value.get(flag, False), bool) for flag in FLAGS) if isinstance(value, dict) else False
    return flags and isinstance(value.get("content"), str)


def _text(path: Path) -> str:
    try:
        json_files.check(path)
        return read_text(path)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def _object(path: Path) -> dict[str, Any]:
    require_regular(path)
    if not path.is_file():
        return {}
    try:
        values = json_files.parse(json_files.content(path))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} holds a JSON {type(values).__name__}, not an object")
    return values


def _id(folder: Path, name: str) -> int | None:
    """The id of that name, of several the first."""
    for file in ("generation_config.json", "config.json"):
        value = _object(folder / file).get(name)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:  # −1 has been written for none
            return value
    return None
