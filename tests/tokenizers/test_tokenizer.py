"""Tokenizers: exact round trips, control ids, foreign models, errors (rules 36 and 37)."""

import argparse
import inspect
import io
import json
import subprocess
import sys

import numpy as np
import pytest
import sentencepiece

from jaxformer.tokenizers import tokenizer, train_sentencepiece

NASTY = [
    "a",
    " ",
    "   leading and trailing   ",
    "\n",
    "\n\n\r\n\t\tif x:\n        return 'y'\n",
    "tab\tand  runs   of    spaces",
    "emoji 😀👩‍👩‍👧 and e\u0301 and \u00e9",
    "\u2581",
    "a\u2581b \u2581\u2581 c",
    "\u2585 \ufeff \u2028 \x85 \xa0 \u3000",
    "nul\0inside",
    "ﬁ ligature, Ａ wide, ① circled",
    "中文和日本語 العربية",
    "<s> </s> <pad> <unk> <0x41>",
    "".join(map(chr, range(0x250))),
]
CONTROLS = ["<s>", "</s>", "<pad>", "<unk>", "<0x41>", "<s>a</s>"]


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXFORMER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def source():
    return inspect.getsource(argparse)[:40_000]


@pytest.fixture(scope="module")
def toks(source):
    trained = {kind: tokenizer.train(kind, [source], size) for kind, size in (("bpe", 700), ("unigram", 400))}
    return {**trained, "char": tokenizer.train("char", [source, *NASTY, *CONTROLS]), "byte": tokenizer.load("byte")}


def foreign(text="the quick brown fox jumps over the lazy dog " * 20, **options):
    """A model trained by SentencePiece alone, with its own defaults: a dummy prefix, and spaces that are merged."""
    model = io.BytesIO()
    options = {"vocab_size": 40, "model_type": "bpe", "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter([text]), model_writer=model, **options)
    return model.getvalue()


@pytest.mark.parametrize("kind", tokenizer.KINDS)
def test_every_text_comes_back(toks, source, kind):
    tok = toks[kind]
    for text in [*NASTY, source, source[7:900]]:
        ids = tok.encode(text)
        assert tok.decode(ids) == text
        assert all(0 <= i < tok.vocab_size for i in ids)
        assert tok.token_bytes.shape == (tok.vocab_size,)
        assert tok.token_bytes[ids].sum() == len(text.encode())
    assert tok.exact


def test_sentencepiece_is_trained_as_asked(toks, source):
    for kind, size in (("bpe", 700), ("unigram", 400)):
        tok = toks[kind]
        assert tok.vocab_size == size
        assert len(tok.encode(source)) < len(source) / 1.5
        assert len({tok.pad_id, tok.bos_id, tok.eos_id}) == 3
        pieces = [tok.decode([i]) for i in range(tok.vocab_size)]
        assert any("\n" in piece and len(piece) > 1 for piece in pieces)
        assert any(piece.isspace() and len(piece) >= 4 for piece in pieces)
    assert toks["bpe"].encode(source) != toks["unigram"].encode(source)


def test_literal_ids():
    chars = tokenizer.train("char", ["cab", "b d"])
    assert (chars.pad_id, chars.bos_id, chars.eos_id, chars.vocab_size) == (0, 1, 2, 8)
    assert chars.encode("abcd ", bos=True, eos=True) == [1, 4, 5, 6, 7, 3, 2]
    byte = tokenizer.load("byte")
    assert (byte.pad_id, byte.bos_id, byte.eos_id, byte.vocab_size) == (256, 257, 258, 259)
    assert byte.encode("é\n", bos=True, eos=True) == [257, 0xC3, 0xA9, 10, 258]
    assert byte.decode([0xC3]) == "\ufffd"


@pytest.mark.parametrize("kind", tokenizer.KINDS)
def test_control_text_is_text_and_controls_are_asked_for(toks, kind):
    tok = toks[kind]
    controls = {tok.pad_id, tok.bos_id, tok.eos_id}
    for text in CONTROLS:
        assert not controls & set(tok.encode(text))
        assert tok.decode(tok.encode(text)) == text
    assert tok.encode("") == []
    assert tok.encode("", bos=True) == [tok.bos_id]
    assert tok.encode("", bos=True, eos=True) == [tok.bos_id, tok.eos_id]
    assert tok.encode("ab", bos=True, eos=True) == [tok.bos_id, *tok.encode("ab"), tok.eos_id]
    assert tok.decode(np.array([tok.bos_id, *tok.encode("a b"), tok.eos_id, tok.pad_id], np.int32)) == "a b"


def test_a_foreign_model_decides_about_spaces():
    model = foreign(add_dummy_prefix=True)
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=model), tokenizer.SentencePiece(model)
    plain = tokenizer.SentencePiece(foreign(add_dummy_prefix=False, remove_extra_whitespaces=False))
    assert theirs.encode("the fox", out_type=str) != plain._model.encode("the fox", out_type=str)  # the prefix shows
    for text in ("the fox", " the fox", "the  fox ", "", " ", "the\u2581fox", "<s>", "the\nfox"):
        assert ours.encode(text) == theirs.encode(text)
        assert plain.encode(text) == plain._model.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.decode(ours.encode("the  fox ")) == "the fox"  # merged by the model, not by us
    assert plain.decode(plain.encode(" the  fox ")) == " the  fox "
    assert not ours.exact and not plain.exact  # no byte fallback: what it does not know, it cannot spell


def test_a_model_without_control_ids():
    tok = tokenizer.SentencePiece(foreign(bos_id=-1, eos_id=-1, pad_id=-1, unk_id=0))
    assert (tok.bos_id, tok.eos_id, tok.pad_id) == (-1, -1, 0)
    for name in ("bos", "eos"):
        with pytest.raises(ValueError, match=f"no {name} id"):
            tok.encode("fox", **{name: True})
    assert tokenizer.SentencePiece(foreign(pad_id=-1)).pad_id == 2  # eos


@pytest.mark.parametrize("kind", tokenizer.KINDS)
def test_saved_and_loaded(toks, tmp_path, kind):
    path = toks[kind].save(tmp_path / "new")
    assert path.name == ("tokenizer.model" if kind in ("bpe", "unigram") else "tokenizer.json")
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    for place in (path, str(path), tmp_path / "new"):
        loaded = tokenizer.load(place)
        assert loaded.content_hash == toks[kind].content_hash
        assert [loaded.encode(text) for text in NASTY] == [toks[kind].encode(text) for text in NASTY]


def test_content_hashes_differ(toks):
    other = tokenizer.train("char", ["xyz"])
    assert len({tok.content_hash for tok in [*toks.values(), other]}) == 5


def test_training_is_deterministic(source, monkeypatch, tmp_path):
    made = []
    for folder in "ab":
        monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / folder))
        made.append(tokenizer.train("unigram", [source[:9000]], 420).serialized())
    assert (tmp_path / "b").exists() and made[0] == made[1]


def test_training_samples_evenly(monkeypatch):
    monkeypatch.setattr(train_sentencepiece, "_SAMPLE", 1000)
    monkeypatch.setattr(train_sentencepiece, "_CHUNK", 10)
    texts = [f"{i:04d}" * 5 for i in range(300)]
    sample = list(train_sentencepiece.sampled(texts))
    owners = [int(chunk[:4] if chunk[:4] in chunk[4:] else chunk[-4:]) for chunk in sample]
    assert 900 <= sum(map(len, sample)) <= 1000
    assert owners[0] < 6 and owners[-1] > 293 and max(np.diff(owners)) <= 6
    assert list(train_sentencepiece.sampled(texts[:20])) == [part for t in texts[:20] for part in (t[:10], t[10:])]


def test_vocabulary_that_the_text_cannot_fill():
    texts = ["hello world\n" * 3, "the quick brown fox jumps over"]
    with pytest.raises(ValueError, match=r"vocab_size=4096 is too large for this text; it can be at most (\d+)") as error:
        tokenizer.train("bpe", texts, 4096)
    most = int(str(error.value).split()[-1])
    assert tokenizer.train("bpe", texts, most).vocab_size == most
    with pytest.raises(ValueError, match="vocab_size=200 is too small for this text; it must be at least 284"):
        tokenizer.train("unigram", texts, 200)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tokenizer.train("bpee", ["a"]), "unknown tokenizer 'bpee'; did you mean 'bpe'"),
        (lambda: tokenizer.train("bpe", []), "needs text to learn from"),
        (lambda: tokenizer.train("char", ["", ""]), "needs text to learn from"),
        (lambda: tokenizer.train("char", "abc"), "a list of texts, not one str"),
        (lambda: tokenizer.load("bpe"), "learned from text"),
        (lambda: tokenizer.load("bytes"), "'?bytes'? does not exist; did you mean 'byte'"),
        (lambda: tokenizer.load("no/such/folder/x.model"), "no/such/folder/x.model does not exist"),
        (lambda: tokenizer.Bytes().encode(b"abc"), "takes a str, not bytes"),
        (lambda: tokenizer.Bytes().encode("a\ud800"), "surrogates not allowed"),
        (lambda: tokenizer.Bytes().decode([65, 259]), "id 259 at index 1 is outside the vocabulary of 259"),
        (lambda: tokenizer.Characters("ab").decode([-1]), "id -1 at index 0 is outside"),
        (lambda: tokenizer.Characters("ab").encode("abcab"), "character 'c' at index 2 .*not in the tokenizer's table"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_sentencepiece_errors(toks):
    with pytest.raises(ValueError, match="id 700 at index 1 is outside"):
        toks["bpe"].decode([5, 700])
    with pytest.raises(ValueError, match="surrogates"):
        toks["bpe"].encode("a\ud800")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokenizer.model", b"", "tokenizer.model: not a complete SentencePiece model"),
        ("tokenizer.model", b"<!doctype html>" * 50, "not a complete SentencePiece model"),
        ("tokenizer.json", b"{", "tokenizer.json: it is not JSON"),
        ("tokenizer.json", b"[1]", "not a saved tokenizer"),
        ("tokenizer.json", b'{"kind": "words"}', "not a saved tokenizer"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "Hugging Face"),
        ("readme.txt", b"", "holds neither tokenizer.model nor tokenizer.json"),
    ],
)
def test_damaged_files(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        tokenizer.load(tmp_path)


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_other_libraries_read_what_is_exported(tmp_path, kind):
    """transformers' AutoTokenizer reads the file by this package, as an object of that class."""
    tokenizers = pytest.importorskip("tokenizers")
    text = "the quick  fox\n\t日é😀 x\u2581\xa0 '\"\\ \x00\x7f\xad"
    tok = tokenizer.train(kind, [text])
    path = tok.export(tmp_path / kind)
    theirs = tokenizers.Tokenizer.from_file(str(path))
    again = tokenizer.load(tmp_path / kind)
    for part in (text, "", *text):
        assert theirs.encode(part).ids == again.encode(part) == tok.encode(part)
        assert theirs.decode(tok.encode(part)) == again.decode(tok.encode(part)) == part
    assert [theirs.token_to_id(f"<{name}>") for name in ("pad", "bos", "eos")] == [tok.pad_id, tok.bos_id, tok.eos_id]
    assert (again.pad_id, again.bos_id, again.eos_id) == (tok.pad_id, tok.bos_id, tok.eos_id)
    assert again.token_bytes.tolist() == tok.token_bytes.tolist()
    config = json.loads((tmp_path / kind / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast" and config["eos_token"] == "<eos>"
    if kind == "char":
        for other in (theirs.encode, again.encode, tok.encode):
            with pytest.raises(Exception, match="WordLevel error|not in the tokenizer's table"):
                other("Ж")


def test_nearest_file_is_named(tmp_path, toks):
    toks["byte"].save(tmp_path)
    with pytest.raises(ValueError, match="did you mean 'tokenizer.json'"):
        tokenizer.load(tmp_path / "tokenizer.jsn")


def test_truncated_models(tmp_path):
    model, path = foreign(normalization_rule_name="identity"), tmp_path / "tokenizer.model"
    accepted = 0
    for size in range(1, len(model)):
        try:
            sentencepiece.SentencePieceProcessor(model_proto=model[:size])
            accepted += 1
        except RuntimeError:
            pass
        path.write_bytes(model[:size])
        with pytest.raises(ValueError, match="SentencePiece model"):
            tokenizer.load(path)
    assert accepted  # SentencePiece alone takes some of them
    path.write_bytes(model)
    assert tokenizer.load(path).vocab_size == 40


def test_import_is_light():
    code = "import sys, jaxformer.tokenizers.tokenizer; print([m for m in ('sentencepiece', 'grain') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
