"""Scoring text files: every token once, as a plain loop over tokens scores it; windows, and what is refused."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.cli import evaluate
from jaxformer.tokenizers import tokenizer
from jaxformer.training import run
from jaxformer.training.checkpoints import Checkpoints
from tests import states

pytestmark = pytest.mark.usefixtures("quick_compilation")
LETTERS = "abcdefghijklmnopqrstuvwxyz .,é"
TEXT = "the same words again and again, until a model knows them by heart. é"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run directory with drawn parameters, its config and tokenizer."""
    tok = tokenizer.train("char", [LETTERS])
    cfg = jf.presets.llama(vocab_size=tok.vocab_size, d_model=16, n_layers=1, n_heads=2, max_length=24)
    directory = tmp_path_factory.mktemp("scored") / "run"
    run.write_run(directory, jf.Config(model=cfg, run_dir=str(directory)), tok)
    checkpoints = Checkpoints(directory / "checkpoints")
    state = states.fresh(cfg)
    checkpoints.save(dataclasses.replace(state, params=tiny.drawn(cfg)))
    checkpoints.close()
    return directory, cfg, tiny.drawn(cfg), tok


@pytest.mark.parametrize("count", [2, 3, 9, 10, 11, 40])
@pytest.mark.parametrize(("length", "stride"), [(2, 1), (10, 1), (10, 4), (10, 9)])
def test_every_id_but_the_first_is_scored_once_with_enough_before_it(count, length, stride):
    scored = []
    for start, first, end in evaluate.windows(count, length, stride):
        assert end - start <= length and start < first
        scored += range(first, end)
        assert start == 0 or first - start >= length - stride
    assert scored == list(range(1, count))


def by_hand(params, cfg, ids, length, stride):
    """The log-probability of each token but the first: one forward pass for each, over the tokens that it sees."""
    forward, found = jax.jit(lambda ids: jax.nn.log_softmax(jf.forward(params, ids[None], cfg)[0].astype("float32"))), []
    for at in range(1, len(ids)):
        start = 0 if at < length else -(-(at + 1 - length) // stride) * stride  # the first window that holds it
        seen = np.zeros(length, np.int32)
        seen[: at - start] = ids[start:at]  # what follows is not seen by a causal model
        found.append(float(forward(seen)[at - start - 1, ids[at]]))
    return np.array(found)


@pytest.mark.parametrize(("length", "stride", "batch_size"), [(24, 12, 8), (24, 23, 2), (7, 1, 8), (2, 1, 8)])
def test_scores_are_those_of_a_plain_loop(trained, length, stride, batch_size):
    _, cfg, params, tok = trained
    ids = [tok.bos_id if tok.bos_id >= 0 else tok.eos_id, *tok.encode(TEXT)]
    expected = by_hand(params, cfg, ids, length, stride)
    found = evaluate.score(params, cfg, ids, length, stride, batch_size)
    assert np.std(expected) > 0.1 and found[0] == 0
    np.testing.assert_allclose(found[1:], expected, atol=2e-5)  # float32 sums in another order


def test_less_context_is_another_score(trained):
    _, cfg, params, tok = trained
    ids = [tok.eos_id, *tok.encode(TEXT)]
    assert abs((evaluate.score(params, cfg, ids, 24, 12) - evaluate.score(params, cfg, ids, 2, 1)).sum()) > 0.1


def test_the_command(trained, tmp_path, capsys):
    directory, cfg, params, tok = trained
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "b.txt").write_text("a", encoding="utf-8")
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    evaluate.main([str(directory), *files, "--stride", "5", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["length"], found["stride"]) == (24, 5)
    begins = next(i for i in (tok.bos_id, tok.eos_id, tok.pad_id, 0) if i >= 0)
    both = 0.0
    for file, text in zip(files, (TEXT, "a"), strict=True):
        nll = -by_hand(params, cfg, [begins, *tok.encode(text)], 24, 5).sum()
        row, both = found["files"][file], both + nll
        assert (row["tokens"], row["bytes"]) == (len(text), len(text.encode()))
        assert row["loss"] == pytest.approx(nll / len(text), abs=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(nll / len(text)), rel=1e-5)
        assert row["bits_per_byte"] == pytest.approx(nll / math.log(2) / len(text.encode()), abs=1e-5)
    assert found["files"]["all files"]["loss"] == pytest.approx(both / (len(TEXT) + 1), abs=1e-5)
    evaluate.main([str(directory), files[0]])
    shown = capsys.readouterr().out
    assert "bits per byte" in shown and "windows of 24 tokens, 12 apart" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--length", "25"], "--length 25 is more than the model's max_length, 24"),
        (["--length", "8", "--stride", "8"], "--stride 8 must be below the length of a window, 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(trained, tmp_path, flags, message):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        evaluate.main([str(trained[0]), str(tmp_path / "a.txt"), *flags])


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"\xff\xfe", "is not UTF-8")])
def test_files_without_text_are_refused_before_the_model_is_read(tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"a.txt {message}"):
        evaluate.main([str(tmp_path / "no run"), str(tmp_path / "a.txt")])
