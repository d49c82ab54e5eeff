"""Tokenizers of characters and bytes as the tokenizer.json that the packages ``tokenizers`` and ``transformers`` read.

Every text has the same ids, except that ``"<bos>"``, ``"<eos>"`` and ``"<pad>"`` in a text become control ids there.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformer.tokenizers import disk_cache, tokenizer_config

VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
"""Bytes that byte-level vocabularies write as the character of that number; the others are, in turn, those from 256 on
(bytes_to_unicode of https://github.com/openai/gpt-2)."""


def write(directory: Path, file: Mapping[str, Any], controls: Mapping[str, int]) -> Path:
    """Writes tokenizer.json, with added tokens of these names ("bos" and so on) and ids, and tokenizer_config.json. Returns the
    path of the first."""
    flags = dict.fromkeys(tokenizer_config.FLAGS, False)
    ordered = sorted(controls.items(), key=lambda item: item[1])
    added = [{"id": i, "content": f"<{name}>", **flags, "special": True} for name, i in ordered]
    nothing = {"truncation": None, "padding": None, "normalizer": None, "post_processor": None}
    content = {"version": "1.0", "added_tokens": added, **nothing, **file}
    config = {f"{name}_token": f"<{name}>" for name in controls} | {"clean_up_tokenization_spaces": False}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name, values in (("tokenizer.json", content), (tokenizer_config.CONFIG, config)):
        disk_cache.write(directory / name, json.dumps(values, indent=1).encode())
    return directory / "tokenizer.json"


def characters(ids: Mapping[str, int]) -> dict[str, Any]:
    """A vocabulary of single characters. A character that it does not have is an error, as it is here."""
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": dict(ids), "unk_token": "<unk>"}
    return {"pre_tokenizer": split, "decoder": {"type": "Fuse"}, "model": model}


def utf8_bytes() -> dict[str, Any]:
    """A vocabulary of 256 bytes, each with its value as id."""
    hidden = [byte for byte in range(256) if byte not in VISIBLE]
    letters = {byte: chr(byte) for byte in VISIBLE} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []}
    return {"pre_tokenizer": level, "decoder": level, "model": model}
