"""Text as it comes: whole characters (rule 38), stop strings, the same tokens as ``generate``."""

import functools

import jax
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.decode.stream import Decoder, Stop
from jaxformer.tokenizers import tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")
TEXT = "def main():\n    return 'na\u00efve caf\u00e9 \u2713 \U0001f600'\n" * 30 + "The quick brown fox. " * 30


@functools.cache
def tok(kind):
    return tokenizer.load("byte") if kind == "byte" else tokenizer.train(kind, [TEXT], 330)


SAMPLES = ["def f", " two  spaces", "\u00e9\u00e8", "a\U0001f600b", "\u2713\u2713", "\u65e5\u672c\u8a9e", "\n\n  x", "\ufffd"]


@pytest.mark.parametrize("kind", ["byte", "bpe", "char"])
@pytest.mark.parametrize("text", SAMPLES)
def test_pieces_joined_are_the_text_and_every_piece_is_whole(kind, text):
    made = tokenizer.train("char", [TEXT, "x = 1 ", *SAMPLES]) if kind == "char" else tok(kind)
    ids = made.encode(text)
    for before in ([], made.encode("x = 1 ")):
        decoder = Decoder(made, before)
        pieces = [decoder.add([i], last=n == len(ids) - 1) for n, i in enumerate(ids)]
        assert "".join(pieces) == text
        if text != "\ufffd":
            assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte():
    decoder = Decoder(tok("byte"))
    assert [decoder.add([i]) for i in "\u2713a".encode()] == ["", "", "\u2713", "a"]


def test_bytes_that_never_become_a_character_are_given_at_the_end():
    decoder = Decoder(tok("byte"))
    assert [decoder.add([0xE2]), decoder.add([0x9C])] == ["", ""]
    assert decoder.add([], last=True) == bytes([0xE2, 0x9C]).decode(errors="replace")


def test_a_first_space_depends_on_what_stands_before():
    """A model that adds a space before every text takes it away again; in the middle of a text it is one."""
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog"] * 50),
        model_writer=model,
        vocab_size=30,
        minloglevel=2,
    )
    theirs = tokenizer.SentencePiece(model.getvalue())
    prompt, rest = theirs.encode("the"), theirs.encode("the fox")[len(theirs.encode("the")) :]
    assert theirs.decode(rest) == "fox", "by itself, the space is lost"
    decoder = Decoder(theirs, prompt)
    assert "".join(decoder.add([i]) for i in rest) == " fox"


@pytest.mark.parametrize(
    ("stops", "feeds", "given"),
    [
        (["end"], ["abc", "de", "nf"], [("abc", False), ("d", False), ("enf", False)]),
        (["end"], ["abc e", "nd xyz"], [("abc ", False), ("", True)]),
        (["\n\n", "}"], ["a}\n\nb"], [("a", True)]),  # the earliest, not the first of the list
        (["aab"], ["aa", "ab"], [("", False), ("a", True)]),
        ([], ["x"], [("x", False)]),
        (["abcd", "bc"], ["abc", "d"], [("", False), ("", True)]),  # the one that begins first, however the text is cut
        (["abcd", "bc"], ["abc", "x"], [("", False), ("a", True)]),
    ],
)
def test_stop_strings(stops, feeds, given):
    stop = Stop(stops)
    assert [stop.feed(text) for text in feeds] == given


def test_what_was_held_back_comes_at_the_end():
    stop = Stop(["end"])
    assert stop.feed("the e") == ("the ", False)
    assert stop.feed("n", last=True) == ("en", False)


@functools.cache
def model():
    made = tok("byte")
    cfg = jf.presets.llama(vocab_size=made.vocab_size, d_model=32, n_layers=2, n_heads=4, max_length=96)
    return cfg, tiny.drawn(cfg), made


def gathered(pieces, rows):
    texts, tokens, finish = [""] * rows, [[] for _ in range(rows)], [""] * rows
    for piece in pieces:
        assert not finish[piece.row], "nothing comes after the last piece"
        texts[piece.row] += piece.text
        tokens[piece.row] += piece.tokens
        finish[piece.row] = piece.finish
    return texts, tokens, finish


@pytest.mark.parametrize("block", [1, 3, 50])
def test_the_tokens_are_those_of_generate(block):
    cfg, params, made = model()
    prompts, key = [made.encode("def"), made.encode("return x")], jax.random.key(3)
    sampling = jf.Sampling(temperature=0.9, top_k=200)
    kept = jf.generate(params, prompts, cfg, max_new_tokens=20, sampling=sampling, key=key, num_return=2, eos=made.eos_id)
    pieces = jf.stream(params, prompts, cfg, made, max_new_tokens=20, sampling=sampling, key=key, num_return=2, block=block)
    texts, tokens, finish = gathered(pieces, 4)
    for row, (expected, length) in enumerate(
        zip(np.asarray(kept.tokens).reshape(4, -1), np.asarray(kept.lengths).reshape(-1), strict=True)
    ):
        ids = expected[:length].tolist()
        assert tokens[row] == ids
        assert texts[row] == made.decode(ids)
        assert finish[row] == ("eos" if ids[-1] == made.eos_id else "length")


def test_a_stop_string_ends_its_row_alone():
    cfg, params, made = model()
    prompts = [made.encode("def"), made.encode("return x")]
    texts, _, _ = gathered(jf.stream(params, prompts, cfg, made, max_new_tokens=24), 2)
    stop = texts[0][4:6]
    assert stop not in texts[1] and len(stop) == 2
    stopped, tokens, finish = gathered(jf.stream(params, prompts, cfg, made, max_new_tokens=24, stop=[stop]), 2)
    assert finish == ["stop", "length"]
    assert stopped == [texts[0][: texts[0].index(stop)], texts[1]]
    assert len(tokens[0]) < 24


def test_end_tokens_end_a_row_and_are_no_text():
    cfg, params, made = model()
    prompt = [made.encode("def")]
    _, tokens, _ = gathered(jf.stream(params, prompt, cfg, made, max_new_tokens=12), 1)
    end = tokens[0][5]
    at = tokens[0].index(end)
    texts, found, finish = gathered(jf.stream(params, prompt, cfg, made, max_new_tokens=12, eos=end), 1)
    assert found == [tokens[0][: at + 1]] and finish == ["eos"]
    assert texts[0] == made.decode(tokens[0][:at])


def test_padded_prompts_are_the_lists():
    cfg, params, made = model()
    prompts = [made.encode("def"), made.encode("return x")]
    width = max(map(len, prompts))
    padded = np.array([[5] * (width - len(row)) + row for row in prompts])
    valid = np.arange(width)[::-1] < np.array([len(row) for row in prompts])[:, None]
    expected = gathered(jf.stream(params, prompts, cfg, made, max_new_tokens=12), 2)
    assert gathered(jf.stream(params, padded, cfg, made, max_new_tokens=12), 2) != expected, "padding would be seen"
    assert gathered(jf.stream(params, padded, cfg, made, max_new_tokens=12, valid=valid), 2) == expected


def test_a_listener_is_heard_where_the_stream_is_read_and_forgotten_after():
    """Before and after it, the same calls give what the model says, and the listener's programs are not used again."""
    cfg, params, made = model()
    read = lambda: gathered(jf.stream(params, [made.encode("def")], cfg, made, max_new_tokens=8, block=3), 1)
    plain = read()
    with jf.listen({"decoder.1.mlp.out": lambda x: -3 * x}):
        patched = read()
    assert patched != plain == read()
    with jf.listen({"decoder.1.mlp.out": lambda x: -3 * x}):
        assert read() == patched


def test_wrong_input_is_refused_before_the_first_piece():
    cfg, params, made = model()
    for stop in ([""], "END"):
        with pytest.raises(ValueError, match="stop"):
            jf.stream(params, [[5]], cfg, made, max_new_tokens=3, stop=stop)
    with pytest.raises(ValueError, match="block=0"):
        jf.stream(params, [[5]], cfg, made, max_new_tokens=3, block=0)
    with pytest.raises(ValueError, match="sampling needs key"):
        jf.stream(params, [[5]], cfg, made, max_new_tokens=3, sampling=jf.Sampling())
    with pytest.raises(ValueError, match="outside the vocabulary"):
        jf.stream(params, [[5, 259]], cfg, made, max_new_tokens=3)


def test_an_encoder_decoder_streams_from_its_start_token():
    cfg = tiny.PRESETS["transformer_base"]
    params, given = tiny.drawn(cfg), tiny.inputs(cfg)
    made = tokenizer.train("char", ["abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-"])
    assert made.vocab_size == cfg.vocab_size
    kept = jf.generate(params, None, cfg, max_new_tokens=6, eos=made.eos_id, **given)
    texts, _, _ = gathered(jf.stream(params, None, cfg, made, max_new_tokens=6, **given), 2)
    lengths = np.asarray(kept.lengths)
    assert texts == [made.decode(row[:n].tolist()) for row, n in zip(np.asarray(kept.tokens), lengths, strict=True)]
