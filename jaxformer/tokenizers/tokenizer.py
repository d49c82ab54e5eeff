"""Text to ids and back: SentencePiece models, characters, bytes.

A tokenizer does what its model says and nothing else: no space is added or stripped, text that looks like a control
token (``"<s>"``) is text, and an empty string has no ids unless bos or eos is asked for. Tokenizers trained here give
back every text exactly. (SentencePiece itself writes a space as U+2581 and so reads U+2581 as a space; models with byte
fallback that leave spaces alone spell that one character by its bytes here.)
"""

import itertools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config.components import nearest
from jaxformer.config.textfile import require_regular
from jaxformer.tokenizers import disk_cache, export, json_files, limited, train_sentencepiece
from jaxformer.tokenizers.base import Tokenizer
from jaxformer.tokenizers.hf_tokenizer import Published

KINDS = ("bpe", "unigram", "char", "byte")
_SPACE = "\u2581"


class Characters(Tokenizer):
    """One id a character: 0 pad, 1 bos, 2 eos, then the characters in code point order."""

    kind = "char"
    pad_id, bos_id, eos_id = 0, 1, 2

    def __init__(self, characters: str):
        self.characters = "".join(sorted(set(characters)))
        self.vocab_size = 3 + len(self.characters)
        self._ids = {c: i for i, c in enumerate(self.characters, start=3)}

    def encode_batch(self, texts):
        try:
            return [[self._ids[c] for c in text] for text in texts]
        except KeyError:
            text, at, c = next((t, i, c) for t in texts for i, c in enumerate(t) if c not in self._ids)
            near = text[max(0, at - 10) : at + 10]
            raise ValueError(f"character {c!r} at index {at} (in {near!r}) is not in the tokenizer's table") from None

    def _decode(self, ids):
        return "".join(self.characters[i - 3] for i in ids)

    @property
    def token_bytes(self):
        return np.array([0, 0, 0] + [len(c.encode()) for c in self.characters], np.int32)

    def serialized(self):
        return json.dumps({"kind": self.kind, "characters": self.characters}).encode()

    def export(self, directory):
        controls = {"pad": self.pad_id, "bos": self.bos_id, "eos": self.eos_id}
        vocab = {f"<{name}>": i for name, i in controls.items()} | self._ids
        return export.write(Path(directory), export.characters(vocab), controls)


class Bytes(Tokenizer):
    """UTF-8 bytes, then 256 pad, 257 bos, 258 eos. Bytes that are not UTF-8 decode to U+FFFD."""

    kind = "byte"
    vocab_size = 259
    pad_id, bos_id, eos_id = 256, 257, 258

    def encode_batch(self, texts):
        return [list(text.encode("utf-8")) for text in texts]

    def _decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")

    @property
    def token_bytes(self):
        return np.array([1] * 256 + [0, 0, 0], np.int32)

    def serialized(self):
        return json.dumps({"kind": self.kind}).encode()

    def export(self, directory):
        controls = {"pad": self.pad_id, "bos": self.bos_id, "eos": self.eos_id}
        return export.write(Path(directory), export.utf8_bytes(), controls)


class SentencePiece(Tokenizer):
    """A SentencePiece model, from the bytes of its .model file. Where it has no pad, padding is eos, or id 0."""

    kind = "sentencepiece"
    file = "tokenizer.model"

    def __init__(self, model: bytes):
        import sentencepiece

        train_sentencepiece.check(model)
        try:
            self._model: Any = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(f"it is not a SentencePiece model: {error}") from error
        self._bytes = model
        self.vocab_size = self._model.vocab_size()
        self.bos_id, self.eos_id = self._model.bos_id(), self._model.eos_id()
        self.pad_id = next((i for i in (self._model.pad_id(), self.eos_id) if i >= 0), 0)
        self._space = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]
        probe = "  A  \ufb01\n "
        keeps_text = self._model.normalize(probe) == probe.replace(" ", _SPACE)
        self.exact = keeps_text and all(self._model.is_byte(i) for i in self._space)

    def encode_batch(self, texts):
        groups = [re.split(f"({_SPACE})", text) if self.exact else [text] for text in texts]
        spans = [span for group in groups for span in group]
        encoded = self._model.encode([span.encode() for span in spans], num_threads=min(8, os.cpu_count() or 1))
        pairs = zip(spans, encoded, strict=True)
        ids = (self._space if self.exact and span == _SPACE else encoded for span, encoded in pairs)
        return [list(itertools.chain.from_iterable(itertools.islice(ids, len(group)))) for group in groups]

    def _decode(self, ids):
        return self._model.decode(ids)

    @property
    def token_bytes(self):
        return np.array([self._piece_bytes(i) for i in range(self.vocab_size)], np.int32)

    def _piece_bytes(self, i: int) -> int:
        if self._model.is_control(i) or self._model.is_unknown(i):
            return 0
        return 1 if self._model.is_byte(i) else len(self._model.id_to_piece(i).replace(_SPACE, " ").encode())

    def serialized(self):
        return self._bytes


def load(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer in ``path``: a SentencePiece .model, the tokenizer.json of a published model (the files that belong to
    it are read from its folder), what ``save`` wrote, a folder that holds one of these, or "byte".

    Files may come from anywhere: a first reading of one, in another process, must end in 1.5 s of computing (and 0.1 s per MB)
    and 500 MB (and 16 times its size), and its rules must not let texts grow; ``checks`` says what is not bounded.

    Raises ValueError where there is none, or where the file is damaged, of another kind, or beyond these bounds.
    """
    if str(path) == "byte":
        return Bytes()
    file = Path(path).expanduser()
    require_regular(file)
    if str(path) in KINDS and not file.exists():
        raise ValueError(f"a {path} tokenizer is learned from text; use train({str(path)!r}, texts), or load a saved one")
    if file.is_dir():
        # The models that have both were made with the .model; tokenizer.json is what transformers uses.
        names = [name for name in (Tokenizer.file, SentencePiece.file) if (file / name).is_file()]
        if not names:
            raise ValueError(f"folder {path} holds neither {SentencePiece.file} nor {Tokenizer.file}")
        file = file / names[0]
    if not file.is_file():
        siblings = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
        hint = nearest(file.name, [*KINDS, *siblings])
        raise ValueError(f"tokenizer {path!s} does not exist{hint if 'did you mean' in hint else ''}")
    try:
        data = json_files.content(file)
        if file.suffix == ".json":
            return _from_json(data, file.parent)
        train_sentencepiece.check(data)
        limited.check("check_sentencepiece", "sentencepiece", data)
        return SentencePiece(data)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def train(kind: str, texts: Sequence[str], vocab_size: int = 4096) -> Tokenizer:
    """A tokenizer made from ``texts``. bpe and unigram have ``vocab_size`` ids and learn from an even sample of the
    text; char and byte have as many as they have.

    Raises ValueError for an unknown kind, and where the text has too little, or too much, for ``vocab_size``.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown tokenizer {kind!r}{nearest(kind, KINDS)}")
    if kind == "byte":
        return Bytes()
    if isinstance(texts, str):
        raise ValueError("train takes a list of texts, not one str; pass [text]")
    if not any(texts):
        raise ValueError(f"a {kind} tokenizer needs text to learn from, but the texts are empty")
    if kind == "char":
        return Characters("".join(set().union(*texts)))
    sample = list(train_sentencepiece.sampled(texts))
    from sentencepiece import __version__

    name = disk_cache.key(kind, vocab_size, __version__, sample)
    return SentencePiece(disk_cache.cached("tokenizer", name, lambda: train_sentencepiece.train(kind, sample, vocab_size)))


def _from_json(data: bytes, folder: Path) -> Tokenizer:
    saved = json_files.parse(data)
    kind = saved.get("kind") if isinstance(saved, dict) else None
    if kind == "byte":
        return Bytes()
    if kind == "char" and isinstance(saved.get("characters"), str):
        return Characters(saved["characters"])
    if isinstance(saved, dict) and isinstance(saved.get("model"), dict):
        return Published.from_folder(data, saved, folder)
    raise ValueError("it is not a saved tokenizer: its kind is neither 'char' nor 'byte'")
