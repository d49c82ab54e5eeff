"""The command that samples from a run: prompts from everywhere, streamed, in files, refused."""

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.cli import pretrained, sample
from jaxformer.cli.launch import launch
from jaxformer.tokenizers import tokenizer
from jaxformer.training import run
from jaxformer.training.checkpoints import Checkpoints
from tests import states

ROOT = Path(__file__).parents[2]
LETTERS = "abcdefghijklmnopqrstuvwxyz .,"


def written(directory: Path, cfg: jf.ModelConfig, tok) -> dict:
    """A run directory with drawn parameters, as training leaves it."""
    run.write_run(directory, jf.Config(model=cfg, run_dir=str(directory)), tok)
    checkpoints = Checkpoints(directory / "checkpoints")
    state = states.fresh(cfg)
    checkpoints.save(state)
    checkpoints.close()
    return state.params


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    tok = tokenizer.train("char", [LETTERS])
    cfg = jf.presets.llama(vocab_size=tok.vocab_size, d_model=32, n_layers=2, n_heads=4, max_length=96)
    directory = tmp_path_factory.mktemp("decoder") / "run"
    return directory, cfg, written(directory, cfg, tok), tok


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    tok = tokenizer.train("char", [LETTERS])
    cfg = dataclasses.replace(tiny.PRESETS["transformer_base"], vocab_size=tok.vocab_size, start_token=tok.bos_id)
    directory = tmp_path_factory.mktemp("translator") / "run"
    return directory, cfg, written(directory, cfg, tok), tok


def call(capsys, *arguments) -> str:
    sample.main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def test_a_prompt_is_continued_greedily(decoder, capsys):
    directory, cfg, params, tok = decoder
    out = call(capsys, directory, "hello", "--temperature", 0, "--max-new-tokens", 12)
    expected = jf.generate(params, [tok.encode("hello")], cfg, max_new_tokens=12, eos=tok.eos_id)
    ids = np.asarray(expected.tokens)[0, : int(expected.lengths[0])].tolist()
    assert out == "hello" + tok.decode(ids) + "\n"


def test_a_seed_decides_what_is_drawn(decoder, capsys):
    directory = decoder[0]
    outs = [call(capsys, directory, "hello", "--max-new-tokens", 20, "--seed", seed) for seed in (1, 1, 2)]
    assert outs[0] == outs[1] != outs[2]


def test_a_published_folder_is_sampled_from_like_a_run(tmp_path, capsys):
    """config.json, model.safetensors and the family's tokenizer.model."""
    import sentencepiece

    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog"] * 50),
        model_writer=trained,
        vocab_size=30,
        minloglevel=2,
    )
    tok = tokenizer.SentencePiece(trained.getvalue())
    cfg = jf.presets.llama(vocab_size=tok.vocab_size, d_model=32, n_layers=2, n_heads=4, max_length=96, rope_layout="half")
    params = tiny.drawn(cfg)
    jf.hf.save(tmp_path, cfg, params)
    tok.save(tmp_path)
    out = call(capsys, tmp_path, "the fox", "--temperature", 0, "--max-new-tokens", 8)
    prompt = tok.encode("the fox")
    expected = jf.generate(params, [prompt], cfg, max_new_tokens=8, eos=tok.eos_id)
    ids = np.asarray(expected.tokens)[0, : int(expected.lengths[0])].tolist()
    assert out == tok.decode(prompt + ids) + "\n"
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(ValueError, match="holds neither tokenizer.model"):
        sample.main([str(tmp_path), "the fox"])


def test_several_outputs_differ_and_say_why_they_ended(decoder, capsys):
    out = call(capsys, decoder[0], "hello", "--n", 3, "--max-new-tokens", 10)
    parts = out.split("--- ")[1:]
    assert len(parts) == 3 and len({part.split("\n", 1)[1] for part in parts}) == 3
    assert all(part.startswith(f"{n} of 3 (") for n, part in enumerate(parts, 1))


def test_an_encoder_decoder_translates_by_beam_search(translator, capsys):
    directory, cfg, params, tok = translator
    source = np.array([tok.encode("a line.")])
    out = call(capsys, directory, "a line.", "--max-new-tokens", 8)
    best = jf.beam_search(params, None, cfg, source=source, num_beams=4, max_new_tokens=8, eos=tok.eos_id)
    ids = np.asarray(best.tokens)[0, 0, : int(best.lengths[0, 0])]
    assert out == tok.decode(ids[ids != tok.eos_id].tolist()) + "\n"
    greedy = call(capsys, directory, "a line.", "--max-new-tokens", 8, "--num-beams", 0, "--temperature", 0)
    kept = jf.generate(params, None, cfg, source=source, max_new_tokens=8, eos=tok.eos_id)
    assert greedy == tok.decode(np.asarray(kept.tokens)[0, : int(kept.lengths[0])].tolist()) + "\n"


@pytest.mark.parametrize("which", ["decoder", "translator"])
def test_a_file_of_prompts_gives_json_lines_and_is_gone_on_with(which, request, tmp_path, capsys):
    directory = request.getfixturevalue(which)[0]
    file, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts = ["one", "", "three words here", "four", "five"]
    file.write_text("\n".join(prompts) + "\n", encoding="utf-8")
    arguments = [directory, "--file", file, "--batch-size", 2, "--max-new-tokens", 6]
    if which == "decoder":
        arguments += ["--temperature", 0]
    lines = [json.loads(line) for line in call(capsys, *arguments).splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    for line in lines:
        (one,) = line["outputs"]
        assert one["finish"] in ("eos", "length") and isinstance(one["text"], str) and 1 <= one["tokens"] <= 6
    # broken off in the middle of the fourth line: three are kept, two are made, and no more
    whole = [json.dumps(line, ensure_ascii=False) + "\n" for line in lines]
    out.write_text("".join(whole[:3]) + whole[3][:9], encoding="utf-8")
    sample.main([str(argument) for argument in (*arguments, "--out", out)])
    assert "3 of 5 prompts are already in" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == "".join(whole)


@pytest.mark.parametrize("which", ["decoder", "translator"])
def test_ids_without_a_token_are_never_chosen(which, tmp_path, capsys):
    """By beams as by sampling: a model may have more ids than its tokenizer."""
    tok = tokenizer.train("char", [LETTERS])
    base = tiny.PRESETS["transformer_base" if which == "translator" else "llama_mha"]
    more = {"start_token": tok.bos_id} if which == "translator" else {}
    cfg = dataclasses.replace(base, vocab_size=tok.vocab_size + 200, n_layers=1, max_length=32, **more)
    params = written(tmp_path / "run", cfg, tok)
    prompt = {"source": [tok.encode("a line.")]} if which == "translator" else {"prompts": [tok.encode("a line.")]}
    free = jf.beam_search(params, cfg=cfg, max_new_tokens=8, **{"prompts": None} | prompt)
    assert (np.asarray(free.tokens) >= tok.vocab_size).any(), "the model would choose them"
    allowed = {"banned": range(tok.vocab_size, cfg.vocab_size), "eos": tok.eos_id}
    best = jf.beam_search(params, cfg=cfg, max_new_tokens=8, **{"prompts": None} | prompt | allowed)
    ids = np.asarray(best.tokens)[0, 0, : int(best.lengths[0, 0])]
    assert (ids < tok.vocab_size).all()
    text = tok.decode(ids[ids != tok.eos_id].tolist())
    before = "" if which == "translator" else "a line."
    assert call(capsys, tmp_path / "run", "a line.", "--max-new-tokens", 8, "--num-beams", 4) == f"{before}{text}\n"
    call(capsys, tmp_path / "run", "a line.", "--max-new-tokens", 8, "--num-beams", 0)  # an id without a token would raise


def test_outputs_of_other_prompts_are_not_overwritten(decoder, tmp_path):
    file, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("one\ntwo\n")
    sample.main([str(decoder[0]), "--file", str(file), "--out", str(out), "--max-new-tokens", "3"])
    with pytest.raises(ValueError, match="other options"):
        sample.main([str(decoder[0]), "--file", str(file), "--out", str(out), "--max-new-tokens", "4"])
    out.write_text('{"prompt": "something else"}\n')
    with pytest.raises(ValueError, match="line 1, does not belong to the prompts of --file"):
        sample.main([str(decoder[0]), "--file", str(file), "--out", str(out)])
    assert out.read_text() == '{"prompt": "something else"}\n'


def test_outputs_of_a_model_that_was_trained_on_are_not_mixed(decoder, tmp_path, capsys):
    """The same command after the run went on: refused. The same model at another path is continued."""
    directory, cfg, params, tok = decoder
    file, out, elsewhere = tmp_path / "prompts.txt", tmp_path / "out.jsonl", tmp_path / "elsewhere"
    file.write_text("one\ntwo\n")
    arguments = ["--file", file, "--out", out, "--max-new-tokens", 4, "--batch-size", 1, "--temperature", 0]
    call(capsys, directory, *arguments)
    whole = out.read_text()
    out.write_text(whole.splitlines(keepends=True)[0])
    shutil.copytree(directory, elsewhere)
    call(capsys, elsewhere, *arguments)
    assert out.read_text() == whole
    out.write_text(whole.splitlines(keepends=True)[0])
    state = states.fresh(cfg)
    further = dataclasses.replace(state, step=state.step + 1, params=_nudged(params))
    with Checkpoints(elsewhere / "checkpoints") as checkpoints:
        checkpoints.save(further)
    with pytest.raises(ValueError, match="begun with another model"):
        call(capsys, elsewhere, *arguments)
    assert out.read_text() == whole.splitlines(keepends=True)[0]


def _nudged(params, index=0):
    """The parameters with the lowest bit of one number of the first tensor flipped."""
    leaves, tree = jax.tree.flatten(params)
    flat = np.array(leaves[0]).ravel()
    flat.view({2: np.uint16, 4: np.uint32}[flat.itemsize])[index] ^= 1
    return jax.tree.unflatten(tree, [jnp.asarray(flat.reshape(leaves[0].shape)), *leaves[1:]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_digest_is_of_every_bit(decoder, dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), decoder[2])
    first = jax.tree.leaves(params)[0].size
    digests = [pretrained.digest(params), *(pretrained.digest(_nudged(params, i)) for i in (0, first // 2, first - 1))]
    assert len(set(digests)) == 4 and digests[0] == pretrained.digest(jax.tree.map(jnp.copy, params))
    swapped = jax.tree.map(lambda x: x[::-1], params)
    assert pretrained.digest(swapped) != digests[0], "the same numbers in another order"


@pytest.mark.parametrize("content", ["my notes", '{"prompt": "two"', '{"prompt": "one", "outputs": []}\n{"prompt": "on'])
def test_a_file_of_something_else_is_left_alone(decoder, tmp_path, content):
    file, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("one\n")
    out.write_text(content)
    with pytest.raises(ValueError, match="choose another --out"):
        sample.main([str(decoder[0]), "--file", str(file), "--out", str(out)])
    assert out.read_text() == content


def test_files_that_cannot_be_read_or_written_are_said_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("prompts.txt").write_text("one\n")
    for flags, message in (
        (["--file", "nothing"], "error: there is no file nothing"),
        (["--file", "."], "error: . is a folder; --file takes a file"),
        (["--file", "~/prompts.txt", "--out", "."], "error: . is a folder; give the path of a file"),
        (["--file", "prompts.txt", "--out", "prompts.txt/x"], "prompts.txt/x cannot be written: prompts.txt is not a folder"),
        (["--file", "prompts.txt", "--out", "x" * 300], "File name too long"),
        (["--file", "~/prompts.txt", "--out", "~/out.jsonl"], "error: no/model/here is not a folder"),
    ):
        with pytest.raises(SystemExit) as stopped:
            launch(lambda flags=flags: sample.main(["no/model/here", *flags]))
        assert message in stopped.value.code


def test_a_disk_that_is_full_is_one_line_with_the_file(decoder, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n")
    arguments = [
        decoder[0],
        "--file",
        tmp_path / "prompts.txt",
        "--out",
        "/dev/full",
        "--max-new-tokens",
        4,
        "--temperature",
        0,
    ]
    with pytest.raises(SystemExit) as stopped:
        launch(lambda: sample.main([*map(str, arguments)]))
    assert stopped.value.code == "error: /dev/full cannot be written: No space left on device"


def test_text_that_looks_like_markup_and_an_ascii_console(tmp_path, monkeypatch, capsys):
    tok = tokenizer.Bytes()
    cfg = jf.presets.llama(vocab_size=tok.vocab_size, d_model=16, n_layers=1, n_heads=2, d_ff=32, max_length=64)
    written(tmp_path / "run", cfg, tok)
    prompt = "[/INST] [bold]é :smile:"
    (tmp_path / "[red]q.txt").write_text(f"\ufeff{prompt}\n", encoding="utf-8")  # some editors begin a file with this mark
    options = [tmp_path / "run", "--max-new-tokens", 2, "--temperature", 0]
    assert call(capsys, *options, prompt).startswith(prompt)
    for more, text in (([prompt], prompt.replace("é", "?")), (["--file", tmp_path / "[red]q.txt"], '{"prompt": ')):
        console = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(console, encoding="ascii"))
        launch(lambda more=more: sample.main([str(argument) for argument in (*options, *more)]))
        assert console.getvalue().decode("ascii").startswith(text)
    assert json.loads(console.getvalue())["prompt"] == prompt, "data is spelled in another way, never replaced"
    capsys.readouterr()
    again = [str(argument) for argument in (*options, "--file", tmp_path / "[red]q.txt", "--out", tmp_path / "[red]o.jsonl")]
    sample.main(again)
    sample.main(again)
    assert "1 of 1 prompts are already in " + str(tmp_path / "[red]o.jsonl") in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a[1]", "a*?", "two words", "ünï😀", "~"])
def test_a_model_at_any_path(decoder, tmp_path, monkeypatch, capsys, name):
    directory, cfg, params, tok = decoder
    expected = call(capsys, directory, "hello", "--temperature", 0, "--max-new-tokens", 4)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(directory, tmp_path / "runs" / name)
    jf.hf.save(Path("published") / name, dataclasses.replace(cfg, rope_layout="half"), params, tok=tok)
    Path("link").symlink_to(tmp_path / "runs" / name)
    for path in (f"runs/{name}", f"./runs/{name}/", "link"):
        if "[" in path:  # Orbax takes it for a pattern
            with pytest.raises(ValueError, match="because of the '\\[' in it"):
                call(capsys, path, "hello")
        else:
            assert call(capsys, path, "hello", "--temperature", 0, "--max-new-tokens", 4) == expected
    assert jf.hf.load(f"published/{name}/")[0].d_model == cfg.d_model
    assert call(capsys, f"published/{name}", "hello", "--temperature", 0, "--max-new-tokens", 4).startswith("hello")


def test_a_line_that_cannot_be_encoded_is_named_before_work(decoder, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("fine\nÜ\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2: character 'Ü'"):
        sample.main([str(decoder[0]), "--file", str(file)])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temprature", "1"], "--temperature"),
        (["--temperature", "-1"], "temperature=-1.0 must be at least 0"),
        (["--interactive"], "give only one of"),
        (["--n", "0"], "n=0 must be at least 1"),
        (["--out", "x"], "--out has no effect without --file"),
    ],
)
def test_wrong_arguments_exit_and_say_why(decoder, arguments, message, capfd):
    with pytest.raises(SystemExit) as stopped:
        sample.main([str(decoder[0]), "hello", *arguments])
    assert stopped.value.code not in (0, None)
    assert message in " ".join(capfd.readouterr().err.replace("│", " ").split())


def test_sampling_options_have_no_part_in_beam_search(translator):
    with pytest.raises(ValueError, match="--num-beams 0"):
        sample.main([str(translator[0]), "a", "--temperature", "0.5"])
    with pytest.raises(ValueError, match="--n 5 is more than --num-beams 4"):
        sample.main([str(translator[0]), "a", "--n", "5"])


def test_as_a_command_prompts_come_from_standard_input_and_interactively(decoder):
    command = [sys.executable, "-m", "jaxformer.sample", str(decoder[0]), "--temperature", "0", "--max-new-tokens", "5"]

    def communicate(text, *more):
        done = subprocess.run([*command, *more], cwd=ROOT, env=os.environ, input=text, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    code, out, err = communicate("hello\n")
    assert code == 0, err
    assert out.startswith("hello") and len(out) > len("hello\n")
    code, shown, err = communicate("hello\nÜ\nhello\n", "--interactive")
    assert code == 0, err
    assert shown.count(out) == 2 and "character 'Ü'" in err, "a prompt that cannot be had ends nothing"


def test_what_is_no_run_is_said():
    done = subprocess.run(
        [sys.executable, "-m", "jaxformer.sample", "tests", "x"], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )
    assert (
        done.returncode != 0
        and done.stderr.startswith("error: tests is not a run directory")
        and "Traceback" not in done.stderr
    )


def test_texts_are_drawn_anew_for_every_prompt_of_a_session(decoder):
    writer = sample.Writer(sample.Options(run=decoder[0], max_new_tokens=20))
    first, second = (writer.outputs(["hello"])[0][0]["text"] for _ in range(2))
    assert first != second
