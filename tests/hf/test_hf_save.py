"""Folders that are written: whole or not at all, where nothing of the user's is lost, and with the ids that end an output."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import published
import pytest
import tiny
from golden import weights

import jaxformer as jf
from jaxformer.cli import pretrained
from jaxformer.hf import __main__ as commands
from jaxformer.tokenizers import tokenizer
from jaxformer.training import run

CFG = jf.presets.llama(vocab_size=67, d_model=16, n_layers=1, n_heads=2, d_ff=32, rope_layout="half")
PARAMS = tiny.drawn(CFG)
FILES = {"config.json", "model.safetensors"}


def names(folder):
    return {path.name for path in Path(folder).iterdir()}


def content(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The current folder, and the home of ``~``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("target", ["x", "x.partial", "new/x", "~/x", ".", "x" * 255, "a[1]", "a*?", "two words", "ünï😀"])
def test_a_model_is_saved_anywhere(target, here):
    """Also beside a folder of the user's that has the name that a former version took for its own."""
    for name in ("x.partial", "x.partial.partial"):
        Path(name).mkdir()
        (Path(name) / "mine").write_text("precious")
    before = names(here)
    jf.hf.save(target, CFG, PARAMS)
    folder = Path(os.path.expanduser(target))
    loaded = jf.hf.load(target)
    assert loaded[0].d_model == CFG.d_model
    jax.tree.map(np.testing.assert_array_equal, loaded[1], PARAMS)
    assert (Path("x.partial") / "mine").read_text() == (Path("x.partial.partial") / "mine").read_text() == "precious"
    top = folder.relative_to(here) if folder.is_absolute() else folder
    assert names(here) - before == (FILES if target == "." else {top.parts[0]} - before), "nothing temporary is left"
    Path("ordinary").mkdir()
    assert target == "." or folder.stat().st_mode == Path("ordinary").stat().st_mode, "others may read it as any folder"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/", "/ is not a folder for one model; give a named folder"),
        ("..", ".. is not a folder for one model; give a named folder, such as ../model"),
        ("inner/..", "is not a folder for one model"),
        ("file", "file is a file; choose another folder"),
        ("file/x", "file/x cannot be written: file is a file"),
        ("x" * 300, "File name too long"),
        ("weights", "weights holds weights already"),
        ("run", "run holds another config.json already"),
        ("toked", "toked holds another tokenizer.json already"),
    ],
)
def test_a_place_that_cannot_be_is_refused_and_left_as_it_was(target, message, here, monkeypatch):
    Path("file").write_text("precious")
    for name, file in (("weights", "pytorch_model.bin"), ("run", "config.json"), ("toked", "tokenizer.json"), ("inner", "x")):
        Path(name).mkdir()
        (Path(name) / file).write_text("{}")
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    monkeypatch.setattr("safetensors.numpy.save_file", lambda *_, **__: pytest.fail("work was begun"))
    with pytest.raises((ValueError, OSError), match=message.replace("..", r"\.\.").replace("?", r"\?")):
        jf.hf.save(target, CFG, PARAMS, tok=tokenizer.train("char", ["abc"]))
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("target", "message"), [("weights", "overwrite=True"), ("file/x", "file is a file"), ("file", "is a file")]
)
def test_a_program_that_trains_asks_before_it_begins(target, message, here):
    Path("file").write_text("precious")
    Path("weights").mkdir()
    Path("weights/pytorch_model.bin").write_text("precious")
    with pytest.raises((ValueError, OSError), match=message):
        jf.hf.check_save(target, CFG)
    jf.hf.check_save("weights", CFG, overwrite=True)
    jf.hf.check_save("new/x", CFG, tok=tokenizer.train("char", ["abc"]))
    with pytest.raises(ValueError, match="no published family"):
        jf.hf.check_save("new", dataclasses.replace(CFG, position="learned"))
    with pytest.raises(ValueError, match="rows for 67"):
        jf.hf.check_save("new", CFG, tok=tokenizer.train("byte", ["abc"]))
    assert names(here) == {"file", "weights"} and names("weights") == {"pytorch_model.bin"}


def test_overwriting_replaces_one_model_by_another_and_nothing_else():
    """The first has shards, an index, ids that end an output and a tokenizer in another form, none of which may stay."""
    jf.hf.save("out", CFG, PARAMS, shard_bytes=4000, generation={"eos_token_id": [1, 2]})
    former = tokenizer.train("bpe", ["some text of a few words, and some more words"] * 9, vocab_size=280)
    former.save("out")
    for name in ("README.md", "training_args.bin"):
        (Path("out") / name).write_text("precious")
    assert len(names("out")) > 6
    other, tok = tiny.drawn(CFG, seed=1), tokenizer.train("char", ["abc"])
    with pytest.raises(ValueError, match="overwrite=True"):
        jf.hf.save("out", CFG, other, tok=tok)
    jf.hf.save("out", CFG, other, tok=tok, overwrite=True)
    jax.tree.map(np.testing.assert_array_equal, jf.hf.load("out")[1], other)
    jf.hf.save("fresh", CFG, other, tok=tok)
    assert tokenizer.load("out").content_hash == tokenizer.load("fresh").content_hash
    assert names("out") == names("fresh") | {"README.md", "training_args.bin"}


def test_overwriting_that_fails_leaves_the_model_that_was_there(monkeypatch):
    jf.hf.save("out", CFG, PARAMS)
    before = content("out")

    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", fails)
    with pytest.raises(OSError, match="No space left"):
        jf.hf.save("out", CFG, tiny.drawn(CFG, seed=1), overwrite=True)
    assert content("out") == before


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_half_way_leaves_nothing(exists, error, monkeypatch, here):
    if exists:
        tokenizer.train("char", ["abc"]).save("out")
    before = content("out") if exists else None

    def fails(tensors, path, metadata):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr("safetensors.numpy.save_file", fails)
    expected, message = (
        (OSError, "^.Errno 28. out cannot be written: No space") if isinstance(error, OSError) else (KeyboardInterrupt, "^$")
    )
    with pytest.raises(expected, match=message):
        jf.hf.save("out", CFG, PARAMS, tok=tokenizer.train("char", ["abc"]))
    assert names(here) == ({"out"} if exists else set())
    assert before is None or content("out") == before and names("out") == {"tokenizer.json"}


def test_config_json_comes_last_into_a_folder_that_exists(monkeypatch):
    """A folder that has its config.json has all of the model."""
    Path("out").mkdir()
    moved, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (moved.append(Path(b).name), replace(a, b)))
    jf.hf.save("out", CFG, PARAMS, tok=tokenizer.train("char", ["abc"]), shard_bytes=4000, generation={"eos_token_id": [1, 2]})
    in_place = moved[-len(names("out")) :]
    assert in_place[-1] == "config.json" and set(in_place) == names("out") and len(in_place) > 5
    assert all(name.endswith(".safetensors") for name in in_place[: len([n for n in in_place if n.endswith(".safetensors")])])


def test_a_disk_that_is_full_for_an_export(here):
    """Files limited to 4 kB, in a process of its own: the tensors have 10 kB."""
    script = """
import resource, jaxformer as jf, tiny
from jaxformer.cli.launch import launch
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
cfg = jf.presets.llama(vocab_size=67, d_model=16, n_layers=1, n_heads=2, d_ff=32, rope_layout="half")
launch(lambda: jf.hf.save("out", cfg, tiny.drawn(cfg)))
"""
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root.parent), str(root)])
    variables = os.environ | {"PYTHONPATH": path, "JAX_ENABLE_COMPILATION_CACHE": "0"}
    done = subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True, env=variables)
    assert done.returncode == 1 and done.stderr.startswith("error: out cannot be written: ") and done.stderr.count("\n") == 1
    assert names(here) == set()


# The ids that end an output


def corpus(tok):
    """Data with a tokenizer and no text."""
    return jf.data.Data(tok, None, [], 0, [], {}, "")


@pytest.fixture
def folder(here):
    """A published LLaMA whose config.json has two ids that end an output."""
    config = weights.load("llama")[0] | {"eos_token_id": [4, 5], "pad_token_id": 3, "forced_eos_token_id": 7}
    config.pop("bos_token_id", None)
    published.folder(here / "published", "llama", config=config)
    tokenizer.train("char", ["some text"]).save(here / "published")
    return here / "published"


@pytest.mark.parametrize("generation", [None, {}, {"temperature": 0.5}, {"eos_token_id": None}])
def test_ends_are_those_of_config_json_where_no_other_file_has_any(folder, generation, capsys):
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    tok = tokenizer.load(folder)
    assert pretrained.ends(folder, tok) == (2, 4, 5)
    ids = {"eos_token_id": [4, 5]} | ({"pad_token_id": 3, "forced_eos_token_id": 7} if generation is None else {})
    expected = {name: value for name, value in (generation or {}).items() if value is not None} | ids

    commands.import_(str(folder), Path("imported"))
    commands.export(Path("imported"), Path("back"))
    init = run.InitConfig(folder=str(folder))
    began = jf.Config(model=dataclasses.replace(CFG), init=init, run_dir="begun")
    pretrained.write_run(Path("begun"), began, corpus(tok))
    for place in ("imported", "back", "begun"):
        assert pretrained.ends(place, tok) == (2, 4, 5), place
        kept = json.loads((Path(place) / "generation_config.json").read_text())
        assert {name: value for name, value in kept.items() if value is not None} == expected, place


def test_ends_of_generation_config_json_go_first(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 6}))
    assert pretrained.ends(folder, tokenizer.load(folder)) == (2, 6)


@pytest.mark.parametrize("value", ["</s>", [True], [[4]], 1.5])
def test_what_is_no_id_is_refused(folder, value):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ValueError, match="eos_token_id=.* is not the id of a token"):
        pretrained.ends(folder, tokenizer.load(folder))


def test_ids_that_no_token_has_end_nothing(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 5, 50256]}))
    assert pretrained.ends(folder, tokenizer.load(folder)) == (2, 5)


def test_ends_that_were_missed_are_written_when_a_run_goes_on(folder):
    """A run that was stopped between its config.json and the ids; and one whose folder is gone by then."""
    tok = tokenizer.load(folder)
    config = jf.Config(model=CFG, init=run.InitConfig(folder=str(folder)), run_dir="begun")
    run.write_run(Path("begun"), config, tok)
    assert pretrained.ends("begun", tok) == (2,)
    pretrained.write_run(Path("begun"), config, corpus(tok))
    assert pretrained.ends("begun", tok) == (2, 4, 5)
    (Path("begun") / "generation_config.json").unlink()
    folder.rename("gone")
    pretrained.write_run(Path("begun"), config, corpus(tok))


def test_an_import_that_fails_leaves_no_run(folder, here, monkeypatch):
    monkeypatch.setattr(
        "jaxformer.training.checkpoints.Checkpoints.save", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    before = names(here)
    with pytest.raises(OSError, match="imported cannot be written: full"):
        commands.import_(str(folder), Path("imported"))
    assert names(here) == before


def test_what_a_folder_says_of_its_ids_is_written_again_on_request(tmp_path):
    config, tensors, _ = weights.load("llama")
    published.folder(
        tmp_path / "source", "llama", config=config | {"bos_token_id": 7, "eos_token_id": [8, 9], "pad_token_id": 6}
    )
    (tmp_path / "source" / "generation_config.json").write_text('{"eos_token_id": [8, 9], "top_k": 5}')
    cfg, params = jf.hf.load(tmp_path / "source")
    for name, options in (("plain", {}), ("same", {"source": tmp_path / "source"})):
        jf.hf.save(tmp_path / name, cfg, params, **options)
    read = lambda name, file="config.json": json.loads((tmp_path / name / file).read_text())
    ids = lambda name: [read(name)[f"{token}_token_id"] for token in ("bos", "eos", "pad")]
    assert ids("plain") == [None] * 3 and not (tmp_path / "plain" / "generation_config.json").exists()
    assert ids("same") == [7, [8, 9], 6] and read("same", "generation_config.json") == {"eos_token_id": [8, 9], "top_k": 5}
