"""What a tokenizer's file may ask for: ids that arrays can be indexed with, and texts that do not grow without bounds.

A probe of some texts (``limited``) cannot show what a rule does to others; these bounds hold for all. Not bounded is the time
of a regular expression on a text that it was made for: a match of more than 10^7 steps, a tenth of a second, ends in an error,
but a text may have many matches of slightly fewer.
"""

import base64
import itertools
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

LONGEST_TOKEN = 8192
"""Characters. Unigram models try every token at every character."""
LONGEST_STRING = 1024
"""Characters of what a rule adds."""
LARGEST_GROWTH = 256.0
"""Characters that all rules of a stage may make of one."""
MOST_STEPS = 64
SPARE_IDS = 65_536
"""Ids without a token may be as many as those with one, and these."""
NOT_ADDED = ("pattern", "precompiled_charsmap", "type")
"""Strings of a rule that are not put into a text."""


def steps(stage: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer, post-processor or decoder, with those of its sequences one by one. Raises
    ValueError for a step without a type, which ``tokenizers`` would guess."""
    if stage is None:
        return
    if not isinstance(stage, dict) or not isinstance(stage.get("type"), str):
        raise ValueError(f"it has a step without a type: {stage!r:.80}")
    for name in ("normalizers", "pretokenizers", "processors", "decoders"):
        if stage["type"] == "Sequence" and name in stage:
            for inner in stage[name]:
                yield from steps(inner)
    if stage["type"] != "Sequence":
        yield stage


def check(file: Mapping[str, Any]) -> None:
    """Raises ValueError for a tokenizer.json, of a form that ``tokenizers`` reads, with what no tokenizer needs."""
    _check_vocabulary(file["model"])
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        stage = list(itertools.islice(steps(file.get(name)), MOST_STEPS + 1))
        if len(stage) > MOST_STEPS:
            raise ValueError(f"its {name} has more than {MOST_STEPS} steps")
        for step in stage:
            for key, value in step.items():
                if isinstance(value, str) and key not in NOT_ADDED:
                    _check_length(f"{key} of its {name}", value)
                if key in ("single", "pair") and isinstance(value, list) and len(value) > MOST_STEPS:
                    raise ValueError(f"its {name} joins {len(value):,} parts, more than {MOST_STEPS}")
        growth = math.prod(_growth(step) for step in stage)
        if growth > LARGEST_GROWTH:
            raise ValueError(f"its {name} turns one character into up to {growth:,.0f}, more than {LARGEST_GROWTH:.0f}")


def _check_vocabulary(model: Mapping[str, Any]) -> None:
    vocab = model.get("vocab") or {}
    tokens = list(vocab) if isinstance(vocab, dict) else [entry[0] for entry in vocab]
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(tokens)))
    if ids and min(ids) < 0:
        raise ValueError(f"its vocabulary has the negative id {min(ids)}")
    if ids and max(ids) >= 2 * len(ids) + SPARE_IDS:
        raise ValueError(f"its vocabulary has the id {max(ids):,} but only {len(ids):,} tokens")
    if len(set(ids)) < len(ids):
        owner: dict[int, str] = {}
        first, second = next(
            (owner[i], token) for token, i in zip(tokens, ids, strict=True) if owner.setdefault(i, token) != token
        )
        raise ValueError(f"its tokens {first!r:.80} and {second!r:.80} have the same id")
    if longest := max(map(len, tokens), default=0) > LONGEST_TOKEN and max(tokens, key=len):
        raise ValueError(f"its token {longest!r:.40} has {len(longest):,} characters, more than {LONGEST_TOKEN:,}")
    for name, value in model.items():
        if isinstance(value, str):
            _check_length(name, value)
    if (most := model.get("max_input_chars_per_word") or 0) > LONGEST_TOKEN:
        raise ValueError(f"its max_input_chars_per_word={most} is more than {LONGEST_TOKEN:,}")


def _check_length(name: str, text: str) -> None:
    if len(text) > LONGEST_STRING:
        raise ValueError(f"{name} has {len(text):,} characters, more than {LONGEST_STRING:,}")


def _growth(step: Mapping[str, Any]) -> float:
    """How many characters a step makes of one, at most, apart from what it adds once. The normal forms of Unicode, which make
    up to 18 of a few characters, do so once."""
    if step["type"] == "Replace":
        pattern = step["pattern"]
        replaced = len(pattern["String"]) if isinstance(pattern, dict) and "String" in pattern else 1
        return max(1.0, len(step["content"]) / max(1, replaced))
    if step["type"] == "ByteLevel":
        return 2.0
    if step["type"] == "Precompiled" and (table := step.get("precompiled_charsmap")):
        return check_character_map(base64.b64decode(table))
    return 1.0


def check_character_map(data: bytes) -> float:
    """The most characters that a SentencePiece normalizer's table of characters makes of one. The table is a double-array trie
    (https://github.com/s-yata/darts-clone), in which each unit says where the next ones are, and texts that end with NUL.

    Raises ValueError where a unit points out of the table: SentencePiece follows it.
    """
    if not data:
        return 1.0
    (size,) = struct.unpack("<I", data[:4]) if len(data) >= 4 else (0,)
    texts = data[4 + size :]
    if not size or size % 1024 or size > len(data) - 4 or not texts.endswith(b"\0"):
        raise ValueError("its table of characters is incomplete")
    units = np.frombuffer(data, "<u4", size // 4, offset=4).astype(np.int64)
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    is_value = units >> 31 == 1
    inner = (np.arange(len(units)) ^ offsets)[~is_value]
    if np.any(inner | 0xFF >= len(units)) or np.any((units & 0x7FFFFFFF)[is_value] >= len(texts)):
        raise ValueError("its table of characters has an index outside itself")
    return float(max(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0")))
