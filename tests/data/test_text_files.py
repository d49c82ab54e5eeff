"""Files of text that cannot be read, are no files, or begin with a byte order mark; and runs whose text has changed."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

import jaxformer as jf
from jaxformer.cli import sample, texts
from jaxformer.cli.train import main
from jaxformer.config.textfile import read_bytes, read_text
from jaxformer.data import Data, DataConfig, load
from jaxformer.data.folder import files
from jaxformer.tokenizers import disk_cache, tokenizer
from jaxformer.tokenizers.json_files import read_json
from jaxformer.training import run

ROOT = Path(__file__).parents[2]
MARK = b"\xef\xbb\xbf"


def config(directory, path, steps=1, **data):
    data = {"path": str(path), "tokenizer": "byte", "length": 8, "batch_size": 8} | data
    train = {"steps": steps, "eval_every": 2, "log_every": 1, "sample_tokens": 0}
    model = jf.presets.llama(vocab_size=67, d_model=16, n_layers=1, n_heads=2)
    return jf.Config(model=model, data=jf.DataConfig(**data), train=jf.TrainConfig(**train), run_dir=str(directory))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, quick_compilation):
    """The directory of a run, and the path of its text."""
    folder = tmp_path_factory.mktemp("trained")
    folder_with(folder, a="one two three, " * 60)
    main(config(folder / "run", folder / "a.txt"))
    return folder / "run", folder / "a.txt"


def everything(directory):
    return {str(path.relative_to(directory)): path.is_file() and path.read_bytes() for path in directory.rglob("*")}


def folder_with(tmp_path, **texts):
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


# What is no file, or cannot be read


def unreadable(monkeypatch, denied):
    """Denies the listing and opening of a path, also where the tests run as root."""

    def refusing(real):
        def call(path, *args, **kwargs):
            if Path(path) == denied:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *args, **kwargs)

        return call

    monkeypatch.setattr(os, "listdir", refusing(os.listdir))
    monkeypatch.setattr(os, "scandir", refusing(os.scandir))
    monkeypatch.setattr("jaxformer.data.text.read_bytes", refusing(read_bytes))


@pytest.mark.parametrize("pattern", ["", "/**", "/**/*.txt", "/*/*.txt"])
def test_a_folder_that_cannot_be_read_is_named(pattern, tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    folder_with(tmp_path / "locked", b="two")
    folder_with(tmp_path, a="one")
    assert "locked/b.txt" in files(f"{tmp_path}{pattern}")
    unreadable(monkeypatch, tmp_path / "locked")
    with pytest.raises(ValueError, match=r"folder \S*/locked cannot be read: Permission denied"):
        files(f"{tmp_path}{pattern}")


def test_a_folder_that_is_not_read_may_be_locked(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "locked").mkdir()
    folder_with(tmp_path, a="one")
    unreadable(monkeypatch, tmp_path / ".git")
    assert list(files(str(tmp_path))) == ["a.txt"]
    unreadable(monkeypatch, tmp_path / "locked")
    assert list(files(f"{tmp_path}/*")) == ["a.txt"]


@pytest.mark.parametrize("task", ["text", "pairs"])
def test_a_file_that_cannot_be_read_is_named(task, tmp_path, monkeypatch):
    folder_with(tmp_path, a="one\ttwo\n", b="three\tfour\n")
    unreadable(monkeypatch, tmp_path / "b.txt")
    path = tmp_path if task == "text" else tmp_path / "b.txt"
    with pytest.raises(ValueError, match=r"\S*/b.txt cannot be read: Permission denied"):
        load(DataConfig(path=str(path), tokenizer="byte", task=task))


def test_links_are_followed_and_none_leads_nowhere(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "other").mkdir()
    folder_with(tmp_path / "other", b="two")
    (tmp_path / "text" / "more").symlink_to(tmp_path / "other")
    (tmp_path / "text" / "c.txt").symlink_to(tmp_path / "other" / "b.txt")
    for pattern in ("", "/**"):
        assert list(files(f"{tmp_path / 'text'}{pattern}")) == ["c.txt", "more/b.txt"]
    (tmp_path / "text" / "gone.txt").symlink_to(tmp_path / "nothing")
    for pattern in ("", "/*.txt", "/gone.txt"):
        with pytest.raises(ValueError, match=r"gone.txt is a link to \S*/nothing, which does not exist"):
            files(f"{tmp_path / 'text'}{pattern}")


def test_a_link_to_a_folder_above_is_refused(tmp_path):
    folder_with(tmp_path, a="one")
    (tmp_path / "again").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="again is a link to .*a folder that contains the link itself"):
        files(str(tmp_path))


@pytest.fixture(params=["pipe", "socket", "device"])
def special(request, tmp_path, monkeypatch):
    """The path of something that is not a file, and what it is called."""
    (tmp_path / "text").mkdir()
    monkeypatch.chdir(tmp_path / "text")  # the path of a socket has a small limit
    path = Path("special")
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("special")
    else:
        path.symlink_to("/dev/zero")
    return path.absolute(), {"pipe": "a named pipe", "socket": "a socket", "device": "a device"}[request.param]


def test_what_is_no_file_is_refused_by_name_wherever_a_file_is_read(special, tmp_path):
    path, kind = special
    folder_with(path.parent, a="one")
    reads = [
        lambda: files(str(path)),
        lambda: files(str(path.parent)),
        lambda: files(f"{path.parent}/*"),
        lambda: load(DataConfig(task="pairs", path=str(path))),
        lambda: load(DataConfig(task="pairs", path=str(path.parent / "a.txt"), target_path=str(path))),
        lambda: tokenizer.load(path),
        lambda: read_json(path),
        lambda: read_text(path),
    ]
    for read in reads:
        with pytest.raises(ValueError, match=f"special is {kind}, not a regular file"):
            read()
    for name, read in {"config.json": jf.load, "model.safetensors": jf.hf.load}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(path)
        with pytest.raises(ValueError, match=f"is {kind}, not a regular file"):
            read(folder)


# Byte order marks


def test_a_byte_order_mark_is_no_character_of_a_text(tmp_path):
    def ids(name, data, **fields):
        (tmp_path / name).write_bytes(data)
        corpus = load(DataConfig(path=str(tmp_path / name), tokenizer="byte", length=8, batch_size=1, **fields))
        return corpus.content_hash, corpus.train[0]["tokens"].tolist(), corpus.test_pairs

    lines = "".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(9)).encode()
    pairs = "".join(f"a{number}\tb{number}\n" for number in range(9)).encode()
    for name, data, fields in (
        ("text.txt", b"some words, " * 9, {}),
        ("lines.jsonl", lines, {}),
        ("pairs.tsv", pairs, {"task": "pairs", "validation_fraction": 0.9}),
    ):
        assert ids(name, MARK + data, **fields) == ids(name, data, **fields)
    assert ids("text.txt", MARK + "x\ufeffy".encode() * 9) == ids("text.txt", "x\ufeffy".encode() * 9), "one, at the start"


def test_a_byte_order_mark_is_no_character_of_any_other_file(trained, tmp_path, capsys):
    directory = tmp_path / "run"
    shutil.copytree(trained[0], directory)
    cfg, _, tok = jf.load(directory)
    for name in ("config.json", "tokenizer.json", "data.json"):
        path = directory / name
        path.write_bytes(MARK + path.read_bytes())
    marked, _, marked_tok = jf.load(directory)
    assert (marked, marked_tok.content_hash) == (cfg, tok.content_hash)
    before = config(directory, trained[1]).data
    assert not texts.changes(directory, before, load(before))
    (tmp_path / "prompts.txt").write_bytes(MARK + b"one\r\ntwo\n")
    sample.main([str(directory), "--file", str(tmp_path / "prompts.txt"), "--max-new-tokens", "1"])
    prompts = [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert prompts == ["one", "two"]


def test_a_byte_order_mark_is_no_character_of_a_published_file(tmp_path):
    (tmp_path / "config.json").write_bytes(MARK + b'{"model_type": "llama"}')
    assert read_json(tmp_path / "config.json") == {"model_type": "llama"}
    (tmp_path / "tokenizer.json").write_bytes(MARK + b'{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}')
    (tmp_path / "tokenizer_config.json").write_bytes(MARK + b'{"eos_token": "a"}')
    tok = tokenizer.load(tmp_path)
    assert (tok.vocab_size, tok.eos_id) == (1, 0)


# ~


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder_with(tmp_path, a="one two", b="three four", pairs="a\tb\nc\td\n")
    assert list(files("~")) == list(files("~/*.txt")) == ["a.txt", "b.txt", "pairs.txt"]
    assert (
        load(DataConfig(path="~/a.txt", validation_path="~/b.txt", tokenizer="byte", length=4)).summary["train_documents"] == 1
    )
    assert load(DataConfig(task="pairs", path="~/pairs.txt", tokenizer="byte")).summary["train_pairs"] == 1
    tokenizer.train("char", ["one two"]).save(tmp_path)
    assert tokenizer.load("~/tokenizer.json").kind == tokenizer.load("~").kind == "char"
    for variable, expected in (("XDG_CACHE_HOME", tmp_path / "c" / "jaxformer"), ("JAXFORMER_CACHE", tmp_path / "c")):
        monkeypatch.delenv("JAXFORMER_CACHE", raising=False)
        monkeypatch.setenv(variable, "~/c")
        assert disk_cache.folder() == expected


# A text that changes


def test_which_text_has_changed(tmp_path):
    folder, held, directory = tmp_path / "text", tmp_path / "held.txt", tmp_path / "run"
    folder.mkdir()
    folder_with(folder, a="one two three, " * 30, b="four five six, " * 30)
    held.write_text("seven eight nine, " * 9)

    def change(cfg=None, **fields):
        cfg = cfg or config(directory, folder, validation_path=str(held), **fields).data
        return texts.changes(directory, cfg, load(cfg))

    assert change() == []
    cfg = config(directory, folder, validation_path=str(held)).data
    texts.write(directory, cfg, load(cfg))
    kept = everything(directory)
    assert list(kept) == ["data.json"]
    assert change() == change(length=16, batch_size=4, seed=3) == []
    held.write_text("seven eight ten!, " * 9)
    with pytest.raises(ValueError, match=r"the validation text of data.path='\S*/text' and data.validation_path='\S*' is not"):
        change()
    folder_with(folder, a="one two threE, " * 30)
    with pytest.raises(
        ValueError, match=r"the train and the validation text of .*/run has been trained .*--data.accept-change"
    ):
        change()
    (told,) = change(accept_change=True)
    assert told.endswith("has changed")
    assert change(jf.DataConfig(path=str(held), tokenizer="byte")) == [], "another text was asked for"
    assert everything(directory) == kept
    (directory / "data.json").write_text("[]")
    with pytest.raises(ValueError, match=r"data.json cannot be read"):
        change()
    (directory / "data.json").unlink()  # as runs of earlier versions are
    assert change() == []


def test_dates_and_the_standard_library_have_names_too(tmp_path):
    for cfg, name in (
        (DataConfig(task="dates", tokenizer="byte"), "data.task='dates'"),
        (DataConfig(), "this Python's standard"),
    ):
        texts.write(tmp_path, cfg, Data(None, None, [], 0, [], {}, "hash", {"train": "a"}))
        with pytest.raises(ValueError, match=f"the train text of {name}"):
            texts.changes(tmp_path, cfg, Data(None, None, [], 0, [], {}, "hash", {"train": "b"}))
        assert not texts.changes(tmp_path, cfg, Data(None, None, [], 0, [], {}, ""))


def test_a_run_whose_text_has_changed_is_refused_unless_asked_for(trained, tmp_path, capsys):
    directory, path = tmp_path / "run", tmp_path / "a.txt"
    shutil.copytree(trained[0], directory)
    saved = json.loads((directory / "data.json").read_text())
    saved["chosen"]["path"] = str(path)  # the text of this run, at a path of its own
    (directory / "data.json").write_text(json.dumps(saved))
    path.write_text("one two threw, " * 60)
    before = everything(directory)
    with pytest.raises(ValueError, match=r"the train and the validation text of data.path='\S*a.txt' is not the one"):
        main(config(directory, path, 2))
    assert everything(directory) == before
    capsys.readouterr()
    main(config(directory, path, 2, accept_change=True))
    assert "validation text of data.path=" in " ".join(capsys.readouterr().out.split())
    assert json.loads((directory / "data.json").read_text())["hashes"] != saved["hashes"]
    assert not run.read_run(directory).data.accept_change


def test_a_text_of_less_than_one_row_warns(tmp_path, caplog):
    folder_with(tmp_path, a="x" * 19)  # and the end of the document
    read = lambda length: load(DataConfig(path=str(tmp_path), tokenizer="byte", length=length, validation_fraction=0.0))
    read(19)
    assert not caplog.records
    read(20)
    assert "the training split has 20 tokens, fewer than one row" in caplog.text
