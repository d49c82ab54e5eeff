"""What every tokenizer has."""

import functools
import hashlib
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.tokenizers import disk_cache


class Tokenizer:
    """What every tokenizer has. Ids are 0 to ``vocab_size - 1``; bos_id or eos_id is -1 where the model has none."""

    kind: str
    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int
    exact: bool = True
    """decode(encode(text)) == text for every text, and text may be cut anywhere and encoded in parts."""
    file: str = "tokenizer.json"
    """Name of the file that ``save`` writes."""

    def encode(self, text: str, bos: bool = False, eos: bool = False, special: bool = False) -> list[int]:
        """Ids of ``text``, between bos and eos where asked. special: control text, such as ``"<s>"``, becomes control ids;
        only the tokenizers of published models know any. Raises ValueError for text that has no ids."""
        if not isinstance(text, str):
            raise ValueError(f"encode takes a str, not {type(text).__name__}")
        for name, wanted in (("bos", bos), ("eos", eos)):
            if wanted and getattr(self, f"{name}_id") < 0:
                raise ValueError(f"this {self.kind} tokenizer has no {name} id")
        ids = self._with_controls(text) if special else self.encode_batch([text])[0]
        return [self.bos_id] * bos + ids + [self.eos_id] * eos

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of ``text`` as the model expects a prompt: with the bos or the end that a published tokenizer's own rule
        puts there. Text that looks like a control token is text."""
        return self.encode(text)

    def _with_controls(self, text: str) -> list[int]:
        raise ValueError(f"this {self.kind} tokenizer takes no text for control ids")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of every text, without bos and eos."""
        raise NotImplementedError

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """A conversation as the text its model expects. messages: such as ``{"role": "user", "content": "Hello"}``.
        add_generation_prompt: go on to where the answer begins. tools: JSON schemas of functions. template: another than the
        model's own, or the name of one of several. variables: further values that the template takes.

        Raises ValueError where there is no template, and where the template refuses or fails.
        """
        raise ValueError(f"this {self.kind} tokenizer has no chat template")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        *,
        allow_special: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Ids of the text of ``chat``, whose arguments these are. Control text in them would become control ids, with which
        whoever wrote it could end a message and begin another: it is refused, by ValueError, unless allow_special."""
        raise ValueError(f"this {self.kind} tokenizer has no chat template")

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; pad, bos and eos are skipped. Raises ValueError for an id outside the vocabulary."""
        ids = [operator.index(i) for i in ids]
        for at, i in enumerate(ids):
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i} at index {at} is outside the vocabulary of {self.vocab_size} ids")
        skipped = self._skipped
        return self._decode([i for i in ids if i not in skipped])

    @property
    def _skipped(self) -> tuple[int, ...]:
        return self.pad_id, self.bos_id, self.eos_id

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError

    @property
    def token_bytes(self) -> np.ndarray:
        """[V] int32: UTF-8 bytes that each id stands for; 0 for control and unknown ids."""
        raise NotImplementedError

    def serialized(self) -> bytes:
        """Content of the file that ``save`` writes."""
        raise NotImplementedError

    @functools.cached_property
    def content_hash(self) -> str:
        """Hex hash of all that decides how text is encoded."""
        return hashlib.sha256(self.serialized()).hexdigest()

    def save(self, directory: str | os.PathLike) -> Path:
        """Writes tokenizer.model or tokenizer.json into ``directory`` and returns its path, which ``load`` takes."""
        path = Path(directory) / self.file
        disk_cache.write(path, self.serialized())
        return path

    def export(self, directory: str | os.PathLike) -> Path:
        """Writes the tokenizer in a form that other libraries read, with the same ids, and returns its path, which ``load``
        takes too."""
        return self.save(directory)
