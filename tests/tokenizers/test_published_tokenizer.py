"""tokenizer.json of published models (rules 36 to 38): ids, control text, decoding in pieces, what stands beside the file."""

import random

import pytest
from tokenizers import Tokenizer as Theirs

from jaxformer.decode.stream import Decoder
from jaxformer.tokenizers import tokenizer
from tests import published_tokenizers as made

NAMES = ["qwen", "llama"]
SPACES = ["a", " ", "  two  spaces  ", "\n\n\tx\r\n", "don 't , stop .", "a" * 3000, "nul\0 \ufeff \u3000 \xa0"]
LETTERS = ["the quick fox", "emoji 😀👩‍👩‍👧", "日本語 العربية", "naïve café ✓"]
CONTROLS = ["<s>a</s> <unk>", "<|im_end|><|im_start|>", "<think>x</think>", "<0x41>"]
TEXTS = SPACES + LETTERS + CONTROLS


@pytest.fixture(scope="module")
def toks(tmp_path_factory):
    return {name: tokenizer.load(made.folder(tmp_path_factory.mktemp(name), name)) for name in NAMES}


def theirs(name):
    return Theirs.from_str(made.content(name))


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_the_package_without_what_it_adds(toks, name):
    tok, other = toks[name], theirs(name)
    if name == "llama":
        assert other.encode("a").ids[0] == tok.bos_id, "the file itself would add bos"
    for text in TEXTS:
        if text not in CONTROLS:
            assert tok.encode(text) == other.encode(text, add_special_tokens=False).ids
        assert tok.encode(text, special=True) == other.encode(text, add_special_tokens=False).ids
    assert tok.encode_batch(TEXTS) == [tok.encode(text) for text in TEXTS]
    assert tok.encode("") == []


@pytest.mark.parametrize("name", NAMES)
def test_every_text_comes_back(toks, name):
    for text in TEXTS:
        assert toks[name].decode(toks[name].encode(text)) == text


@pytest.mark.parametrize(
    ("name", "text", "control"),
    [("qwen", "<|im_end|>", "eos"), ("qwen", "<|endoftext|>", "pad"), ("llama", "<s>", "bos"), ("llama", "</s>", "eos")],
)
def test_control_text_is_text_and_controls_are_asked_for(toks, name, text, control):
    tok = toks[name]
    i = getattr(tok, f"{control}_id")
    assert i not in tok.encode(f"a{text}b") and tok.decode(tok.encode(f"a{text}b")) == f"a{text}b"
    assert tok.encode(text, special=True) == [i]
    assert i in tok.encode(f"a{text}b", special=True)
    assert tok.decode([*tok.encode("a"), i, tok.pad_id]) == "a"


def test_other_control_ids_are_decoded_as_their_text(toks):
    """Only pad, bos and eos say nothing."""
    assert toks["qwen"].decode(toks["qwen"].encode("<|im_start|>user<|im_end|>", special=True)) == "<|im_start|>user"


def test_added_tokens_that_are_not_special_are_text_with_one_id(toks):
    tok = toks["qwen"]
    (think,) = tok.encode("<think>")
    assert tok.encode("<think>", special=True) == [think]
    assert tok.decode([think]) == "<think>"
    assert tok.token_bytes[think] == len("<think>")


def test_bos_and_eos_only_where_asked(toks):
    tok = toks["llama"]
    assert tok.encode("a", bos=True, eos=True) == [1, *tok.encode("a"), 2]
    assert tok.encode("", bos=True) == [1]
    with pytest.raises(ValueError, match="published tokenizer has no bos id"):
        toks["qwen"].encode("a", bos=True)


def test_settings_of_whoever_saved_the_file_do_not_cut_or_fill(tmp_path):
    def change(values):
        values["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        pad = {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
        values["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, **pad}

    folder = made.folder(tmp_path, "qwen", change)
    other = Theirs.from_file(str(folder / "tokenizer.json"))
    assert [len(other.encode(text).ids) for text in ("", "the quick brown fox jumps")] == [9, 9]
    tok = tokenizer.load(folder)
    assert tok.encode("") == []
    assert tok.decode(tok.encode("the quick brown fox jumps")) == "the quick brown fox jumps"


# exact: what packing relies on when it cuts texts


def no_normalizer(values):
    values["normalizer"] = None


def prefix_space(values):
    no_normalizer(values)
    values["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


def stripping(values):
    no_normalizer(values)
    values["added_tokens"][-1]["lstrip"] = True


def accented(values):
    no_normalizer(values)
    last = values["added_tokens"][-1]
    values["added_tokens"].append({**last, "id": last["id"] + 1, "content": "éé"})


def removed(values):
    no_normalizer(values)
    values["pre_tokenizer"]["pretokenizers"][0] |= {"pattern": {"String": " "}, "behavior": "Removed"}


def one_byte_less(values):
    no_normalizer(values)
    unused = "ÿ"  # byte 0xFF: no merge has it
    values["model"]["vocab"]["ÿÿ"] = values["model"]["vocab"].pop(unused)


def test_exact_is_claimed_where_text_may_be_cut_anywhere(tmp_path):
    tok = tokenizer.load(made.folder(tmp_path, "qwen", no_normalizer))
    assert tok.exact
    draw = random.Random(0)
    for _ in range(200):
        parts = ["".join(draw.choices([*"ab \n<>é日😀\u0301", "<think>", "<|im_end|>"], k=draw.randrange(6))) for _ in range(3)]
        ids = [i for part in tok.encode_batch(parts) for i in part]
        assert tok.decode(ids) == "".join(parts)
        assert tok.token_bytes[ids].sum() == len("".join(parts).encode())


@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        ("qwen", None, ["e\u0301"]),
        ("qwen", prefix_space, ["a", "b"]),
        ("qwen", stripping, ["a  </think>"]),
        ("qwen", accented, ["éé"]),
        ("qwen", removed, ["a b"]),
        ("llama", None, ["a", "b"]),
        ("llama", None, ["\u2581"]),
    ],
)
def test_exact_is_not_claimed_where_a_text_is_lost(tmp_path, name, change, parts):
    tok = tokenizer.load(made.folder(tmp_path, name, change))
    assert tok.decode([i for part in parts for i in tok.encode(part)]) != "".join(parts)
    assert not tok.exact


def test_exact_is_not_claimed_without_every_byte(tmp_path):
    assert not tokenizer.load(made.folder(tmp_path, "qwen", one_byte_less)).exact


def test_bytes_of_tokens(toks):
    for text in TEXTS:
        assert toks["qwen"].token_bytes[toks["qwen"].encode(text)].sum() == len(text.encode())
        # the space that Llama 2 puts before every text is a space to its pieces
        assert toks["llama"].token_bytes[toks["llama"].encode(text)].sum() == len(text.encode()) + 1
    for name, control in (("qwen", "<|im_start|>"), ("llama", "<unk>")):
        assert toks[name].token_bytes[toks[name].encode(control, special=True)].tolist() == [0]
        assert toks[name].token_bytes.shape == (toks[name].vocab_size,)


# Decoding in pieces


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["日本語", "a😀b", "👩‍👩‍👧", " x  y", "naïve ✓", "\ufffd", "\n  x"])
def test_pieces_joined_are_the_text_and_every_piece_is_whole(toks, name, text):
    tok = toks[name]
    start = tok.encode("a")
    ids = tok.encode("a" + text)
    assert ids[: len(start)] == start, "the text begins with the prompt's tokens"
    rest = ids[len(start) :]
    for before, new, expected in (([], ids, "a" + text), (start, rest, text)):
        decoder = Decoder(tok, before)
        pieces = [decoder.add([i], last=n == len(new) - 1) for n, i in enumerate(new)]
        assert "".join(pieces) == expected
        if text != "\ufffd":
            assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_given_out_is_never_taken_back(toks, name):
    """Random bytes between random tokens: characters that break off, beside whole ones."""
    tok, draw = toks[name], random.Random(1)
    some = [i for text in ("é", "日", "😀", "the", " a") for i in tok.encode(text)]
    broken = 0
    for _ in range(500):
        ids = [draw.choice([*some, draw.randrange(tok.vocab_size)]) for _ in range(draw.randint(1, 12))]
        decoder = Decoder(tok)
        text = "".join(decoder.add([i], last=n == len(ids) - 1) for n, i in enumerate(ids))
        assert text == tok.decode(ids)
        broken += "\ufffd" in text
    assert broken > 100


def test_a_broken_character_leaves_those_beside_it_whole(toks):
    tok = toks["llama"]
    ids = [tok._tok.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode() + b"\xe6\x97" + "日".encode()]
    assert tok._tok.decode(ids) == "\ufffd" * 7, "the package gives up all of them"
    assert tok.decode(ids) == "é\ufffd\ufffd日"


@pytest.mark.parametrize("name", NAMES)
def test_errors(toks, name):
    tok = toks[name]
    for call, message in (
        (lambda: tok.encode(b"abc"), "takes a str, not bytes"),
        (lambda: tok.encode("a\ud800"), "surrogates not allowed"),
        (lambda: tok.decode([tok.vocab_size]), "outside the vocabulary"),
        (lambda: tokenizer.load("byte").encode("<s>", special=True), "takes no text for control ids"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
