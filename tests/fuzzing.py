"""Small files of every kind that is read, changes of them that a hypothesis strategy draws, and what reading them gives."""

import contextlib
import functools
import io
import json
import os
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece
from flax.serialization import msgpack_serialize
from hypothesis import strategies as st
from safetensors.numpy import save

from jaxformer.data import packing
from jaxformer.decode.stream import Decoder
from jaxformer.hf import safetensors_files
from jaxformer.tokenizers import chat, tokenizer
from tests import published_tokenizers as made

SECONDS, BYTES = 2.0, 500 << 20
REFUSALS = (ValueError, FileNotFoundError)
Files = dict[str, bytes]


class Reader(NamedTuple):
    """files: those of an intact folder. read: of a folder. keeps: a changed folder gives the intact one's value or none."""

    files: Files
    read: Callable[[Path], object]
    keeps: bool = False


# What is read


def _use(tok):
    ids = tok.encode("the quick  fox\n日é")
    assert all(0 <= i < tok.vocab_size for i in ids)
    assert len(tok.token_bytes) == tok.vocab_size and tok.decode(ids) is not None
    decoder, some = Decoder(tok), [i % tok.vocab_size for i in (*ids[:20], 3, 200, 255, 256, 9)]
    pieces = [decoder.add([i], last=n == len(some) - 1) for n, i in enumerate(some)]
    assert "".join(pieces) == tok.decode(some)
    return ids


def _published(folder):
    tok = tokenizer.load(folder)
    with contextlib.suppress(ValueError):
        tok.chat([made.user("hi")], add_generation_prompt=True)
    with contextlib.suppress(ValueError):
        tok.encode_prompt("hi")
    return _use(tok)


def _tensors(folder):
    tensors = safetensors_files.find(folder)
    return {name: tensors.read(name).tobytes() for name in tensors.entries}


def _template(folder):
    return chat.render((folder / "t.jinja").read_bytes().decode("utf-8", "replace"), [made.user("hi")], None, True, {})


@contextlib.contextmanager
def cache_at(folder):
    before = os.environ["JAXFORMER_CACHE"]
    os.environ["JAXFORMER_CACHE"] = str(folder)
    try:
        yield
    finally:
        os.environ["JAXFORMER_CACHE"] = before


CORPUS = ["one two", "three"]


def _stream(folder):
    with cache_at(folder):
        stream = packing.encode(tokenizer.Bytes(), CORPUS, eos=True)
        return stream.tokens.tolist(), stream.bounds.tolist()


def _trained(folder):
    with cache_at(folder):
        return tokenizer.train("bpe", ["the quick brown fox " * 50], 290).encode("the fox")


def _model(**options):
    model = io.BytesIO()
    lines = ["the quick brown fox jumps", "over the lazy dog"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=40, hard_vocab_limit=False, minloglevel=2, **options
    )
    return model.getvalue()


@functools.cache
def readers(folder: Path) -> dict[str, Reader]:
    """All of them. folder: an empty one, for what is made on the way."""
    weights = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16)}
    shards = {"x.safetensors": save({"a": weights["b"]}), "y.safetensors": save({"b": weights["b"]})}
    index = {"metadata": {"total_size": 16}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    tree = {"params": {"layer": {"kernel": weights["a.weight"], "bias": weights["b"]}, "embedding": weights["b"]}}
    config = {**made.CONFIGS["qwen"], "chat_template": made.TURNS, "additional_special_tokens": ["<think>"]}
    decoder = {"added_tokens_decoder": {"335": {"content": "<x>", "special": True}}}
    qwen, small = made.content("qwen").encode(), {"kind": "char", "characters": " 日éabc\nthequickfox"}
    beside = {
        "tokenizer_config.json": {**config, **decoder},
        "special_tokens_map.json": {"unk_token": {"content": "<think>"}},
        "generation_config.json": {"bos_token_id": [330], "eos_token_id": 331},
        "config.json": {"pad_token_id": 332},
    }
    beside_files = {name: json.dumps(values).encode() for name, values in beside.items()}
    found = {
        "tokenizer.json, byte-level": Reader({"tokenizer.json": qwen}, _published),
        "tokenizer.json, byte fallback": Reader({"tokenizer.json": made.content("llama").encode()}, _published),
        "beside a tokenizer.json": Reader(beside_files | {"tokenizer.json": qwen, "chat_template.jinja": b"x"}, _published),
        "chat template": Reader({"t.jinja": made.TURNS.encode()}, _template),
        "SentencePiece": Reader(
            {"tokenizer.model": _model(normalization_rule_name="identity")}, lambda f: _use(tokenizer.load(f))
        ),
        "SentencePiece, NFKC": Reader({"tokenizer.model": _model()}, lambda f: _use(tokenizer.load(f))),
        "char": Reader({"tokenizer.json": json.dumps(small).encode()}, lambda f: _use(tokenizer.load(f))),
        "safetensors": Reader({"model.safetensors": save(weights)}, _tensors),
        "safetensors, sharded": Reader(shards | {safetensors_files.INDEX: json.dumps(index).encode()}, _tensors),
        "msgpack": Reader({"flax_model.msgpack": msgpack_serialize(tree)}, _tensors),
    }
    for name, read in (("cached tokens", _stream), ("cached tokenizer", _trained)):
        read(folder / name)
        files = {path.name: path.read_bytes() for path in (folder / name).iterdir()}
        found[name] = Reader(files, read, keeps=True)
    return found


# How it is changed

ATOMS = ["null", "true", "-1", "0", "3e8", "300000000", "1e999", "NaN", '""', '"\\ud800"', '"x"', "[]", "{}", "[[]]", "1" * 50]
STRINGS = ["Sequence", "Replace", "Prepend", "ByteLevel", "Regex", "(a+)+$", "x" * 5000, "<think>", "{{", "日", "</s>", "F64"]
STEPS = [
    {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 900},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
    {"type": "Replace", "pattern": {"String": ""}, "content": "bb"},
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 20},
    {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 30},
    {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}] * 40},
    {"type": "Prepend", "prepend": "x" * 9999},
    {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "Removed", "invert": True},
    {"type": "FixedLength", "length": 0},
    {"type": "CharDelimiterSplit", "delimiter": "a"},
    {"type": "Metaspace", "replacement": "e", "prepend_scheme": "always", "split": True},
    {"type": "WordPiece", "prefix": "", "cleanup": True},
    {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
    {"type": "Strip", "content": " ", "start": 2**60, "stop": 2**60},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1e300]], "unk_id": 0, "byte_fallback": True},
    {"type": "WordLevel", "vocab": {"a": 0, "b": 300000000}, "unk_token": "a"},
    {
        "type": "WordPiece",
        "vocab": {"a": 0},
        "unk_token": "z",
        "continuing_subword_prefix": "",
        "max_input_chars_per_word": 2**40,
    },
    {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": []},
    {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 90, "pair": [], "special_tokens": {}},
    {"type": "BertProcessing", "sep": ["x", 2**31], "cls": ["y", 1]},
    {"type": "RobertaProcessing", "sep": ["x", 1], "cls": ["y", 2], "trim_offsets": True, "add_prefix_space": True},
    {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
    {"type": "Precompiled", "precompiled_charsmap": "AAQAAAAA"},
    *({"type": name} for name in ("Nmt", "NFKC", "Whitespace", "UnicodeScripts", "ByteFallback", "Fuse", "Lowercase")),
    {"pattern": {"String": "a"}, "content": "b"},
]
_atoms = st.sampled_from(ATOMS) | st.sampled_from([json.dumps(value) for value in (*STRINGS, *STEPS)])
PIECES = [
    b"\0",
    b"\xff" * 8,
    b"{",
    b"[" * 3000,
    b"}",
    b'"',
    b",",
    b"\x80",
    b"\xdd\xff\xff\xff\xff",
    b"\xc1",
    b"\n",
    b"{% for i in range(9999) %}",
]
TAGS = ["{{ 'x' * 10**10 }}", "{% endfor %}", "{{ messages | tojson(indent=10**9) }}", "{{ 'a'|center(10**9) }}", "{{ self }}"]
_bytes = st.sampled_from([*PIECES, *(tag.encode() for tag in TAGS)]) | st.binary(max_size=12)
_place = st.floats(0, 1, exclude_max=True)
_byte_change = st.tuples(st.sampled_from(["flip", "flip", "over", "insert", "remove", "repeat", "cut"]), _place, _place, _bytes)
_json_change = st.tuples(st.sampled_from(["value", "drop", "twice", "wrap", "move"]), _place, _place, _atoms)
changes = st.one_of(st.lists(st.tuples(_place, change), min_size=1, max_size=2) for change in (_byte_change, _json_change))


def changed(files: Files, drawn: list) -> Files:
    """``files`` after the changes that a strategy drew, each of one of them."""
    files = dict(files)
    for which, (kind, at, other, more) in drawn:
        name = list(files)[int(which * len(files))]
        change = _change_json if isinstance(more, str) else _change_bytes
        files[name] = change(files[name], kind, at, other, more)
    return files


def _change_bytes(data: bytes, kind: str, at: float, other: float, more: bytes) -> bytes:
    start = int(at * len(data))
    stop = min(len(data), start + 1 + int(other * 16))
    if kind == "flip" and data:
        return data[:start] + bytes([data[start] ^ (1 << int(other * 8))]) + data[start + 1 :]
    if kind == "over":  # in the same length
        return data[:start] + more[: len(data) - start] + data[start + len(more) :]
    middle = {"insert": more + data[start:stop], "replace": more, "repeat": data[start:stop] * 2}.get(kind, b"")
    return data[:start] + middle + (b"" if kind == "cut" else data[stop:])


def _change_json(data: bytes, kind: str, at: float, other: float, atom: str) -> bytes:
    """Changes the JSON in ``data``: all of it, or the header of a safetensors file, whose length then fits."""
    is_header = len(data) > 8 and data[8:9] == b"{" and struct.unpack("<Q", data[:8])[0] <= len(data) - 8
    start = 8 + struct.unpack("<Q", data[:8])[0] if is_header else len(data)
    try:
        value = json.loads(data[8 * is_header : start])
    except ValueError:
        return _change_bytes(data, "replace", at, other, atom.encode())
    spots = list(_spots(value))
    if not spots:
        return data
    parent, key = spots[int(at * len(spots))]
    marker = "\u241f changed"
    before = parent[key]
    if kind == "drop":
        del parent[key]
    elif kind == "move":
        source, inner = spots[int(other * len(spots))]
        parent[key] = (
            json.loads(json.dumps(source[inner]))
            if inner in (source if isinstance(source, dict) else range(len(source)))
            else 0
        )
    elif kind == "twice" and isinstance(parent, dict):
        parent[marker] = before
    else:
        parent[key] = marker
    text = json.dumps(value)
    inner_text = f"[{json.dumps(before)}]" if kind == "wrap" else json.dumps(key) if kind == "twice" else atom
    text = text.replace(json.dumps(marker), inner_text).encode()
    return struct.pack("<Q", len(text)) + text + data[start:] if is_header else text


def _spots(value, most=400):
    """``(container, key)`` of the values in a JSON value, those near the top first."""
    level = [value]
    while level and most > 0:
        deeper = []
        for outer in level:
            keys = list(outer) if isinstance(outer, dict) else range(len(outer)) if isinstance(outer, list) else ()
            for key in list(keys)[: 40 if len(keys) < 40 else 4]:
                most -= 1
                yield outer, key
                deeper.append(outer[key])
        level = deeper


# What comes of it


def outcome(reader: Reader, files: Files, folder: Path) -> object:
    """The value that reading gives, or the refusal: any other error is raised. Raises AssertionError where it takes too long or
    too much memory."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    peak, began = _peak(), _seconds()
    try:
        value = reader.read(folder)
    except REFUSALS as error:
        value = error
    assert _seconds() - began < SECONDS, f"{_seconds() - began:.1f} s of computing"
    assert _peak() - peak < BYTES, f"{(_peak() - peak) >> 20} MB"
    return value


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _seconds() -> float:
    return time.process_time()
