"""The tokenizer.json of a published model, read by the package ``tokenizers``."""

import codecs
import functools
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.tokenizers import chat, checks, disk_cache, limited, tokenizer_config
from jaxformer.tokenizers.base import Tokenizer
from jaxformer.tokenizers.checks import steps


class Published(Tokenizer):
    """A Hugging Face tokenizer: the bytes of its tokenizer.json, the values that they hold, and those of the files beside it,
    which ``tokenizer_config.read`` reads.

    Control ids are those of the tokens that the files call special. Added tokens that are not, such as Qwen3's ``"<think>"``,
    are ordinary text that has one id. Where the model has no pad, padding is eos, or id 0.
    """

    kind = "published"

    def __init__(self, data: bytes, file: Mapping[str, Any], config: Mapping[str, Any]):
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError("a Hugging Face tokenizer needs the package tokenizers; install jaxformer[hf]") from error
        with _said("not a complete Hugging Face tokenizer"):
            self._tok: Any = tokenizers.Tokenizer.from_buffer(data)
        self._tok.no_truncation()  # both are settings of whoever saved the file, not of the tokenizer
        self._tok.no_padding()
        self._lock = threading.Lock()
        self._data, self._config = data, dict(config)
        self._add(file.get("added_tokens") or (), tokenizers.AddedToken)
        self._name()
        self.vocab_size = max(self._tok.get_vocab(with_added_tokens=True).values()) + 1
        added = self._tok.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self._controls = frozenset(self._special) - {self._tok.token_to_id(unknown(file["model"]) or "")}
        kinds = {step["type"] for step in steps(file.get("decoder"))}
        self._alphabet = frozenset(tokenizers.pre_tokenizers.ByteLevel.alphabet() if "ByteLevel" in kinds else ())
        spelled = {self._tok.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256 if "ByteFallback" in kinds else 0)}
        self._byte_ids = {i: byte for i, byte in spelled.items() if i is not None}
        ordinary = [token for token in added.values() if not token.special]
        self.exact = keeps_text(file, self._alphabet) and not any(
            # the first two take spaces with them; characters that stand for bytes would be decoded as those
            token.lstrip or token.rstrip or not token.content.isascii()
            for token in ordinary
        )

    @classmethod
    def from_folder(cls, data: bytes, file: Mapping[str, Any], folder: Path) -> "Published":
        """A tokenizer.json, which holds ``file``, with what stands beside it in ``folder``. Raises ValueError for one that
        ``limited`` or ``checks`` refuses."""
        config = tokenizer_config.read(folder)
        data = data.removeprefix(codecs.BOM_UTF8)
        limited.check("check_tokenizer", "tokenizers", data)
        checks.check(file)
        return cls(data, file, config)

    def _add(self, listed: Iterable[Mapping[str, Any]], kind: Any) -> None:
        """Adds the tokens that only the config has, and makes special what it names as bos and the like."""
        decoder = self._config.get("added_tokens_decoder") or {}
        wanted = [(token["id"], token) for token in listed] + [(int(i), decoder[i]) for i in sorted(decoder, key=int)]
        missing = {token["content"]: token for _, token in wanted if self._tok.token_to_id(token["content"]) is None}
        flags = [{flag: token[flag] for flag in tokenizer_config.FLAGS if flag in token} for token in missing.values()]
        self._tok.add_tokens([kind(name, **of_token) for name, of_token in zip(missing, flags, strict=True)])
        for i, token in wanted:
            name = token["content"]
            given_id = self._tok.token_to_id(name)
            if given_id != i:  # tokenizers gives the next free id, whatever the file says
                raise ValueError(f"the added token {name!r} should have id {i}, but the tokenizers library gives it {given_id}")
        added = {token.content: token for token in self._tok.get_added_tokens_decoder().values()}
        names = [
            name for name in sorted(tokenizer_config.control_names(self._config)) if self._tok.token_to_id(name) is not None
        ]
        before = [added.get(name, kind(name, normalized=False)) for name in names]
        controls = [
            kind(old.content, special=True, **{flag: getattr(old, flag) for flag in tokenizer_config.FLAGS}) for old in before
        ]
        self._tok.add_special_tokens(controls)  # at once: each call builds all that finds them anew

    def _name(self) -> None:
        """Sets the ids of bos, eos and pad."""
        ids = {}
        for name in tokenizer_config.NAMED:
            token = self._config[name]
            if isinstance(token, int):
                i, token = token, self._tok.id_to_token(token) if 0 <= token < 2**32 else None
                self._config[name] = token
            else:
                i = -1 if token is None else self._tok.token_to_id(token)
            if i is None or (token is None and i != -1):
                raise ValueError(f"{name} is {token or i!r}, which the tokenizer does not have")
            ids[name] = i
        self.bos_id, self.eos_id, pad = (ids[name] for name in tokenizer_config.NAMED)
        self.pad_id = next((i for i in (pad, self.eos_id) if i >= 0), 0)
        self._silent = (self.bos_id, self.eos_id, pad)

    @property
    def _skipped(self):
        return self._silent  # without id 0 where there is nothing to pad with: it is text

    def encode_batch(self, texts):
        encoded = self._encode(texts, split_special=True)
        for text, ids in zip(texts, encoded, strict=True):
            if not self._controls.isdisjoint(ids):
                name = next(self._special[i] for i in ids if i in self._controls)
                raise ValueError(f"this tokenizer turns plain text into the control id of {name!r}, in {text[:80]!r}")
        return encoded

    def encode_prompt(self, text):
        self.encode(text)  # refuses what is not text, or would become control ids
        return self._encode([text], split_special=True, post_process=True)[0]

    def _with_controls(self, text):
        return self._encode([text], split_special=False)[0]

    def _encode(self, texts: Sequence[str], split_special: bool, post_process: bool = False) -> list[list[int]]:
        for text in texts:
            text.encode()  # half a surrogate pair has no ids; said as everywhere
        with self._lock:  # it is a state of the tokenizer: another thread's text must not get this one's
            self._tok.encode_special_tokens = split_special
            with _said("text without ids"):  # such as a character that a vocabulary without an unknown token does not have
                return [encoding.ids for encoding in self._tok.encode_batch_fast(texts, add_special_tokens=post_process)]

    def _decode(self, ids):
        with _said("ids without text"):
            return self._text(ids)

    def _text(self, ids: list[int]) -> str:
        lost = self._lost(ids)
        if not lost:
            return self._tok.decode(ids, skip_special_tokens=False)
        tokens = ["\ufffd" if at in lost else self._tok.id_to_token(i) for at, i in enumerate(ids)]
        return self._tok.decoder.decode([token for token in tokens if token is not None])

    def _lost(self, ids: Sequence[int]) -> set[int]:
        """Indices of the byte tokens that belong to no character. tokenizers would give up the intact characters beside them
        too, and what has been streamed would not be what is decoded in the end; SentencePiece does as we do."""
        lost: set[int] = set()
        if self._byte_ids.keys().isdisjoint(ids):
            return lost
        run = bytearray()
        for at, i in enumerate([*ids, -1]):
            if i in self._byte_ids:
                run.append(self._byte_ids[i])
            elif run:
                lost.update(at - len(run) + n for n in _stray(bytes(run)))
                run.clear()
        return lost

    @property
    def token_bytes(self):
        return np.array([self._token_bytes(i) for i in range(self.vocab_size)], np.int32)

    def _token_bytes(self, i: int) -> int:
        token = self._tok.id_to_token(i)
        if token is None or i in self._special:
            return 0
        if not self._tok.decoder:
            return len(token.encode())
        if self._alphabet:  # a character a byte
            return len(token) if self._alphabet.issuperset(token) else len(token.encode())
        if i in self._byte_ids:
            return 1
        alone, after = (len(self._tok.decoder.decode(["a", *more]).encode()) for more in ([], [token]))
        return max(0, after - alone)  # at the beginning, a space may be taken from it

    def chat(self, messages, add_generation_prompt=False, tools=None, template=None, **variables):
        tokens = {name: text for name, text in self._config.items() if name.endswith("_token") and isinstance(text, str)}
        chosen = chat.choose(self._config.get("chat_template"), template, tools)
        return chat.render(chosen, messages, tools, add_generation_prompt, {**tokens, **variables})

    def encode_chat(
        self, messages, add_generation_prompt=False, tools=None, template=None, *, allow_special=False, **variables
    ):
        text = self.chat(messages, add_generation_prompt, tools, template, **variables)
        for where, text_of_chat in chat.strings({"messages": messages, "tools": tools, **variables}, "the chat"):
            if not allow_special and (name := self._control_in(text_of_chat)):
                raise ValueError(
                    f"{where} holds {name!r}, which would become a control id of the conversation; "
                    "pass allow_special=True if that is intended"
                )
        return self.encode(text, special=True)

    def _control_in(self, text: str) -> str | None:
        """A control token that this text has in it, as it stands or as the tokenizer reads it (normalized)."""
        read = (self._special[i] for i in self._with_controls(text) if i in self._controls)
        return next((name for name in self._special.values() if name in text), None) or next(read, None)

    def serialized(self):
        return self._data

    def _config_bytes(self) -> bytes:
        return json.dumps(self._config, ensure_ascii=False, indent=2, sort_keys=True).encode()

    @functools.cached_property
    def content_hash(self):
        return hashlib.sha256(b"%d:%b%b" % (len(self._data), self._data, self._config_bytes())).hexdigest()

    def save(self, directory: str | os.PathLike) -> Path:
        """Writes tokenizer.json and tokenizer_config.json into ``directory`` and returns the path of the first."""
        disk_cache.write(Path(directory) / tokenizer_config.CONFIG, self._config_bytes())
        return super().save(directory)


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Raises ValueError for whatever ``tokenizers`` raises. Where Rust panics, as it does for a regular expression that takes
    too many steps, that is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from error


def unknown(model: dict[str, Any]) -> str | None:
    """The token of a model for what it does not know: ordinary text can have it."""
    return model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else model.get("unk_token")


def keeps_text(file: Mapping[str, Any], alphabet: frozenset[str]) -> bool:
    """Whether the ids of any text hold its bytes, all and no others: BPE over bytes, nothing done to the text before."""
    model, before = file["model"], list(steps(file.get("pre_tokenizer")))
    bytes_, splits = ([step for step in before if (step["type"] == "ByteLevel") is is_bytes] for is_bytes in (True, False))
    return (
        not list(steps(file.get("normalizer")))
        and [step["type"] for step in steps(file.get("decoder"))] == ["ByteLevel"]
        and len(bytes_) == 1
        and not bytes_[0].get("add_prefix_space", True)
        and all(step["type"] in ("Split", "Digits", "Punctuation") and step.get("behavior") != "Removed" for step in splits)
        and model["type"] == "BPE"
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and alphabet <= model["vocab"].keys()
    )


def _stray(data: bytes) -> Iterable[int]:
    """Indices of the bytes that are part of no UTF-8 character."""
    at = 0
    for character in data.decode("utf-8", errors="surrogateescape"):
        if "\udc80" <= character <= "\udcff":
            yield at
            at += 1
        else:
            at += len(character.encode())
