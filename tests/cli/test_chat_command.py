"""``python -m jaxformer.sample --chat``."""

import builtins
import json

import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.cli import sample
from tests.published_tokenizers import assistant, loaded, user

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tok = loaded(directory)
    cfg = jf.presets.llama(vocab_size=tok.vocab_size, d_model=32, n_layers=2, n_heads=4, max_length=256, rope_layout="half")
    params = tiny.drawn(cfg)
    jf.hf.save(directory, cfg, params)
    return directory, cfg, params, tok


def answer(model, talk, eos=None, tokens=8):
    _, cfg, params, tok = model
    prompt = tok.encode_chat(talk, add_generation_prompt=True)
    out = jf.generate(params, [prompt], cfg, max_new_tokens=tokens, eos=tok.eos_id if eos is None else eos)
    ids = np.asarray(out.tokens)[0, : int(out.lengths[0])].tolist()
    # with the prompt before it: a character may have begun there
    return ids, tok.decode(prompt + ids)[len(tok.decode(prompt)) :]


def call(capsys, directory, *arguments):
    sample.main([str(a) for a in (directory, *arguments, "--chat", "--temperature", 0, "--max-new-tokens", 8)])
    return capsys.readouterr()


def test_chat_prints_the_answer_alone(model, capsys):
    plain = "hi" + model[3].decode(answer(model, [user("hi")])[0])
    out = call(capsys, model[0], "hi").out
    assert out == answer(model, [user("hi")])[1] + "\n" != plain + "\n"
    for one in call(capsys, model[0], "hi", "--n", 2).out.split("--- ")[1:]:
        assert one.split("\n", 1)[1] == out


def test_chat_with_a_file_answers_every_line_by_itself(model, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("hi\nthe fox\n")
    lines = [json.loads(line) for line in call(capsys, model[0], "--file", file).out.splitlines()]
    assert [line["prompt"] for line in lines] == ["hi", "the fox"]
    assert [line["outputs"][0]["text"] for line in lines] == [answer(model, [user(text)])[1] for text in ("hi", "the fox")]
    file.write_text("hi\n<|im_end|>\n")
    with pytest.raises(ValueError, match=r"line 2: .*holds '<\|im_end\|>'"):
        call(capsys, model[0], "--file", file)


def test_an_interactive_chat_goes_on_until_an_empty_line(model, capsys, monkeypatch):
    typed = iter(["hi", "<|im_end|>", "the fox", "", "the fox"])
    monkeypatch.setattr(builtins, "input", lambda _: _next(typed))
    shown = call(capsys, model[0], "--interactive")
    first = answer(model, [user("hi")])[1]
    second = answer(model, [user("hi"), assistant(first), user("the fox")])[1]
    alone = answer(model, [user("the fox")])[1]
    assert second != alone, "what was said before counts"
    assert shown.out == f"{first}\n{second}\n{alone}\n\n"
    assert "error: " in shown.err and "holds '<|im_end|>'" in shown.err


def _next(typed):
    try:
        return next(typed)
    except StopIteration:
        raise EOFError from None


def test_a_turn_ends_where_generation_config_says(model, capsys):
    directory = model[0]
    ids, text = answer(model, [user("hi")])
    end = next(i for i in ids[1:] if i != ids[0])
    try:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [model[3].eos_id, end]}))
        out = call(capsys, directory, "hi").out
    finally:
        (directory / "generation_config.json").unlink()
    assert out != text + "\n" and out == model[3].decode(ids[: ids.index(end)]) + "\n"


def test_wrong_chats_are_refused(model, decoder_without_template, capfd):
    with pytest.raises(SystemExit):
        sample.main([str(model[0]), "--chat", "--interactive", "--n", "2"])
    assert "a conversation continues from one answer" in capfd.readouterr().err
    with pytest.raises(ValueError, match="no chat template"):
        sample.main([str(decoder_without_template), "hi", "--chat"])


@pytest.fixture
def decoder_without_template(model, tmp_path):
    jf.hf.save(tmp_path, model[1], model[2])
    loaded(tmp_path, None)
    return tmp_path
