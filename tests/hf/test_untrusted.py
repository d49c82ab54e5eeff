"""Files that were made to do harm: each is refused by ValueError that names it, in two seconds of computing and 500 MB."""

import io
import json
import os
import struct
import threading

import numpy as np
import pytest
import sentencepiece
from flax.serialization import msgpack_serialize
from safetensors.numpy import save

from jaxformer.cli import sample
from jaxformer.hf import safetensors_files
from jaxformer.tokenizers import chat, checks, json_files, limited, tokenizer
from tests import fuzzing
from tests import published_tokenizers as made

DEEP = b"[" * 100_000 + b"]" * 100_000


def refused(read, files, folder):
    """The message of the refusal."""
    error = fuzzing.outcome(fuzzing.Reader({}, read), files, folder)
    assert isinstance(error, ValueError), error
    return str(error)


def folder_of(**changes):
    """The files of a "qwen" with these fields of its tokenizer.json."""
    values = json.loads(made.content("qwen"))
    return {"tokenizer.json": json.dumps(values | changes).encode()}


# JSON


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"],
)
def test_json_that_is_nested_deep(tmp_path, name):
    files = {"tokenizer.json": made.content("qwen").encode(), "tokenizer_config.json": b"{}"} | {name: b'{"a":' + DEEP + b"}"}
    assert f"{name}: it is nested more than 64 deep" in refused(tokenizer.load, files, tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 66 + b"]" * 66, "nested more than 64 deep"),
        (b'{"a": 1, "b": 2, "a": 1}', "'a' occurs twice"),
        (b'{"a": {"b": NaN}}', "NaN is not allowed as a number"),
        (b"[-Infinity]", "-Infinity is not allowed as a number"),
        (b"[1e999]", "1e999 is not allowed as a number"),
        (b"[" + b"9" * 400 + b"]", "an integer of 400 digits"),
        (b"[" + b"[]," * 1_300_000 + b"0]", "it has about 2,600,001 values"),
        (b"\xff", "not JSON"),
        (b"{", "not JSON"),
    ],
)
def test_json_that_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        json_files.parse(data)


def test_json_that_is_read():
    values = {"a": [1, -2.5, 1e300, 10**30, None, True, "é\u2581"], "b": {"c": {}}}
    text = json.dumps(values).encode()
    assert json_files.parse(text) == values and json_files.parse(b"\xef\xbb\xbf" + text) == values
    deepest = b"[" * 64 + b"]" * 64
    assert json_files.parse(deepest) == json.loads(deepest)


def test_files_that_have_no_end(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"config\.json cannot be read: .* is a named pipe"):
        json_files.read_json(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError, match=r"there is no .*b\.json"):
        json_files.read_json(tmp_path / "b.json")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 40)  # takes no room
    with pytest.raises(ValueError, match=r"large\.json cannot be read: it has 1,099,511,627,776 bytes"):
        json_files.read_json(tmp_path / "large.json")


def test_a_line_of_answers_that_is_nested_deep(tmp_path):
    (tmp_path / "out.jsonl").write_bytes(DEEP + b"\n")
    with pytest.raises(ValueError, match="line 1, does not belong to the prompts of --file"):
        sample._written(tmp_path / "out.jsonl", ["a"], "")


# tokenizer.json

SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
DOUBLE = {"type": "Replace", "pattern": {"String": "q"}, "content": "qq"}


PARTS = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 90,
    "pair": [],
    "special_tokens": {},
}


def model(**changes):
    return json.loads(made.content("qwen"))["model"] | changes


GROWING = [
    ({"model": model(vocab={"a": 0, "b": 300_000_000}, merges=[])}, "has the id 300,000,000 but only 2 tokens"),
    ({"model": model(vocab={"a": 0, "b": -1}, merges=[])}, "has the negative id -1"),
    ({"model": model(vocab={"a": 0, "b": 0}, merges=[])}, "its tokens 'a' and 'b' have the same id"),
    ({"model": model(vocab={"a": 0, "b" * 9000: 1}, merges=[])}, "has 9,000 characters, more than 8,192"),
    ({"model": model(type="WordPiece", max_input_chars_per_word=10**9)}, "max_input_chars_per_word=1000000000 is more than"),
    ({"model": model(end_of_word_suffix="x" * 2000)}, "end_of_word_suffix has 2,000 characters"),
    ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 9}}, "its normalizer turns one character into up to 512"),
    (
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 33}},
        "turns one character into up to 8,589,934,592",
    ),
    ({"normalizer": {"type": "Prepend", "prepend": "x" * 10_000_000}}, "prepend of its normalizer has 10,000,000 characters"),
    (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "q?"}, "content": "x" * 1000}},
        "turns one character into up to 1,000",
    ),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAQAAAAA"}}, "its table of characters is incomplete"),
    (
        {"decoder": {"type": "Replace", "pattern": {"String": "t"}, "content": "x" * 300}},
        "its decoder turns one character into up to 300",
    ),
    ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 65}}, "its decoder has more than 64 steps"),
    ({"post_processor": PARTS}, "joins 90 parts"),
    ({"normalizer": {"pattern": {"String": "a"}, "content": "b"}}, "a step without a type"),
]


@pytest.mark.parametrize(("changes", "message"), GROWING, ids=[message for _, message in GROWING])
def test_a_tokenizer_that_would_not_end(tmp_path, changes, message):
    """By its rules, and by the process that reads it first, whichever is first."""
    files = folder_of(**changes)
    assert str(tmp_path / "tokenizer.json") in refused(tokenizer.load, files, tmp_path)
    with pytest.raises(ValueError, match=message):
        checks.check(json.loads(files["tokenizer.json"]))


def test_a_regular_expression_without_end(tmp_path):
    """The library panics, which is no Exception in Python."""
    assert "the tokenizers library crashed: Onig: Regex search" in refused(
        tokenizer.load, folder_of(pre_tokenizer=SPLIT), tmp_path
    )


def test_a_normalizer_that_makes_gigabytes_of_a_word(tmp_path, monkeypatch):
    """Where its rules would not be known, the other process ends."""
    monkeypatch.setattr(checks, "check", lambda file: None)
    steps = [DOUBLE | {"pattern": {"String": "e"}, "content": "ee"}] * 40
    said = refused(tokenizer.load, folder_of(normalizer={"type": "Sequence", "normalizers": steps}), tmp_path)
    assert "of memory" in said or "of computing" in said


def test_a_rule_that_only_some_text_meets_is_an_error_of_that_text(tmp_path):
    """A panic of the library, which is no Exception in Python."""
    pattern = {"Regex": "ꙮ(ꙮ+)+$"}
    made.folder(tmp_path, "qwen", lambda values: values.update(pre_tokenizer=SPLIT | {"pattern": pattern}))
    tok = tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="text without ids: Onig"):
        tok.encode("ꙮ" * 40 + "!")
    assert tok.decode(tok.encode("The")) == "The"


def test_what_was_read_once_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))
    made.folder(tmp_path / "tok", "qwen")
    tokenizer.load(tmp_path / "tok")
    monkeypatch.setattr(limited, "call", lambda *_, **__: pytest.fail("it was"))
    tokenizer.load(tmp_path / "tok")


# Beside it


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"eos_token": 2**40}, f"eos_token is {2**40}"),
        ({"additional_special_tokens": 3}, "additional_special_tokens"),
        ({"added_tokens_decoder": {"335": {"content": "<x>", "lstrip": "no"}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"9" * 39: {"content": "<x>"}}}, "'<x>' should have id 9999"),
    ],
)
def test_a_config_with_strange_values(tmp_path, values, message):
    files = folder_of() | {"tokenizer_config.json": json.dumps(values).encode()}
    assert message in refused(tokenizer.load, files, tmp_path)


# SentencePiece


def sentencepiece_model(**options):
    model = io.BytesIO()
    lines = ["the quick brown fox jumps over the lazy dog"] * 20
    options = {"vocab_size": 40, "hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **options)
    return model.getvalue()


@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf"])
def test_models_with_each_table_of_characters_are_read(tmp_path, rule):
    data = sentencepiece_model(normalization_rule_name=rule)
    (tmp_path / "tokenizer.model").write_bytes(data)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    text = "The Quick ﬁne ﷺ"
    assert tokenizer.load(tmp_path).encode(text) == theirs.encode(text)


# safetensors, msgpack


def header(values, data=b""):
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    return struct.pack("<Q", len(text)) + text + data


def f32(start, stop, shape):
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


EMPTY = ", ".join(f'"t{i}": {{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}' for i in range(1_000_000))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(b"{" + EMPTY.encode() + b"}"), "its header has 66,888,890"),
        (struct.pack("<Q", 1 << 60) + b"{}", "its header says it is 1152921504606846976 bytes long; the file has 10"),
        (header(b'{"a": ' + DEEP + b"}"), "nested more than 64 deep"),
        (header({"a": f32(0, 8, [2]), "b": f32(4, 12, [2])}, bytes(12)), "is not a complete safetensors file"),
        (header({"a": f32(0, 8, [2]), "b": f32(0, 8, [2])}, bytes(8)), "is not a complete safetensors file"),
        (header({"a": f32(0, 8, [2]), "b": f32(12, 20, [2])}, bytes(20)), "is not a complete safetensors file"),
        (header({"a": f32(0, 80, [20])}, bytes(8)), "is not a complete safetensors file"),
        (header({"a": f32(8, 0, [2])}, bytes(8)), "is not a complete safetensors file"),
        (header({"a": f32(-8, 0, [2])}, bytes(8)), "is not a complete safetensors file"),
        (header({"a": f32(0, 8, [2**62, 2**62])}, bytes(8)), "is not a complete safetensors file"),
        (header({"a": f32(0, 8, [3])}, bytes(8)), "is not a complete safetensors file"),
        (header(b'{"a": %b, "a": %b}' % ((json.dumps(f32(0, 8, [2])).encode(),) * 2), bytes(8)), "'a' occurs twice"),
        (header([1]), "its header is not an object"),
    ],
)
def test_headers_that_lie(tmp_path, data, message):
    said = refused(safetensors_files.find, {"model.safetensors": data}, tmp_path)
    assert message in said and str(tmp_path / "model.safetensors") in said


def test_an_index_that_lies(tmp_path):
    one = save({"a": np.ones(2, np.float32)})
    for weight_map, message in (
        ({"a": "../x.safetensors"}, "names files outside its folder"),
        ({"a": ["x"]}, "names files outside its folder"),
        ({"a": "x.safetensors", "b": "x.safetensors"}, "missing     b"),
        ({"a": "y.safetensors"}, "names files that do not exist"),
        ([], "has no weight_map"),
    ):
        index = json.dumps({"weight_map": weight_map}).encode()
        assert message in refused(safetensors_files.find, {"x.safetensors": one, safetensors_files.INDEX: index}, tmp_path)
    files = {"x.safetensors": one, safetensors_files.INDEX: b'{"weight_map": ' + DEEP + b"}"}
    assert "nested more than 64 deep" in refused(safetensors_files.find, files, tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xdd\x00\x0f\xff\xff" * 400_000, "not a complete msgpack file"),  # lists that say they are long, one in another
        (b"\x91" * 100_000, "not a complete msgpack file"),
        (b"\xdf\x00\x03\x00\x00" + b"".join(b"\xa5%05x\x80" % i for i in range(0x30000)), "more than 200,000 parts"),
        (b"\x82\xa1a\x01\xa1a\x01", "occurs twice"),
        (b"\x81\xa1a\x01", "a is not an array"),
        (msgpack_serialize({"a": {"embedding": np.ones(2), "weight": np.ones(2)}}), "two arrays of the same name"),
        (msgpack_serialize({}), "holds no parameters"),
    ],
)
def test_msgpack_that_lies(tmp_path, data, message):
    said = refused(safetensors_files.find, {"flax_model.msgpack": data}, tmp_path)
    assert message in said and "flax_model.msgpack" in said


# Chat templates

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
MACRO = "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(90) }}"
QUICK = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{{ (1, 2) * 10**10 }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x'.zfill(10**10) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:9999999999}'.format(1) }}",
    "{{ 'a\nb' | indent(10**10) }}",
    "{{ 'a' | indent('x' * 10**10) }}",
    "{{ [1] | tojson(indent=10**10) }}",
    "{{ range(99999) | batch(10**10, 'x') | list }}",
    DOUBLING + "{{ ns.x }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{{ 'ab' * 20000000 }}",
]
SLOW = [
    LOOPS,
    "{{ lipsum(n=10**9) }}",
    MACRO,
    "{{ 9 ** (9 ** 9) }}",
    "{{ range(99999) | map('string') | map('center', 99999) | list | length }}",
]


@pytest.mark.parametrize("template", QUICK)
def test_a_template_that_would_not_end(tmp_path, monkeypatch, template):
    monkeypatch.setattr(limited, "SECONDS", 0.4)  # of computing, which is what most of these end by much earlier
    said = refused(lambda _: chat.render(template, [made.user("x")], None, False, {}), {}, tmp_path)
    assert said.startswith("the chat template")


@pytest.mark.parametrize("template", SLOW)
def test_a_template_that_computes_without_end(tmp_path, monkeypatch, template):
    test_a_template_that_would_not_end(tmp_path, monkeypatch, template)


def test_the_limit_of_time(tmp_path):
    """That of every call, in the time of the other process: on a machine that does nothing else, of the clock."""
    began = os.times().children_user
    said = refused(lambda _: chat.render(SLOW[0], [made.user("x")], None, False, {}), {}, tmp_path)
    assert said == "the chat template: it takes more than 1.5 s of computing"
    assert os.times().children_user - began < 2


def test_the_next_conversation_is_rendered_in_a_new_process(monkeypatch):
    said = []
    monkeypatch.setattr(limited, "SECONDS", 0.4)
    for template in ("{{ 1 }}", LOOPS, "{{ 2 }}", "{{ 'x' * 10**10 }}", "{{ 3 }}"):
        try:
            said.append(chat.render(template, [made.user("x")], None, False, {}))
        except ValueError as error:
            said.append(str(error).partition(" more than")[0])
    assert said == ["1", "the chat template: it takes", "2", "the chat template: it takes", "3"]


def test_threads_get_their_own_answers():
    found = {}

    def run(number):
        found[number] = [
            chat.render("{{ messages[0].content }}", [made.user(f"{number}.{i}")], None, False, {}) for i in range(50)
        ]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [f"{number}.{i}" for i in range(50)] for number in range(4)}


def test_values_reach_the_template_as_they_are():
    values = {"n": float("inf"), "keys": {1: "a", None: "b"}, "half": "\ud800", "big": 10**30}
    text = chat.render("{{ n }} {{ keys[1] }}{{ keys[none] }} {{ half }} {{ big }}", [made.user("x")], None, False, values)
    assert text == f"inf ab \ud800 {10**30}"


def test_a_table_of_characters_that_points_out_of_itself():
    units = np.zeros(256, "<u4")
    whole = struct.pack("<I", 1024) + units.tobytes() + b"abc\0"
    assert checks.check_character_map(whole) == 3
    for at, unit in ((0, 1 << 10 << 8), (7, 0xFFFFFFFF), (9, 0x80000004)):
        broken = units.copy()
        broken[at] = unit
        with pytest.raises(ValueError, match="has an index outside itself"):
            checks.check_character_map(struct.pack("<I", 1024) + broken.tobytes() + b"abc\0")
    for cut in (whole[:-1], whole[:3], whole[:1000], struct.pack("<I", 2**31) + whole[4:]):
        with pytest.raises(ValueError, match="its table of characters is incomplete"):
            checks.check_character_map(cut)
