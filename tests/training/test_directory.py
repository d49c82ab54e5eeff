"""Who may write to a run's directory, what lies in it, and what an operating system's refusal is told as."""

import errno
import os
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

import jaxformer as jf
from jaxformer.cli import pretrained
from jaxformer.tokenizers import tokenizer
from jaxformer.training import directory as directories
from jaxformer.training import run
from jaxformer.training.directory import LOCK, expanded, locked
from jaxformer.training.failures import Failed, during

ROOT = Path(__file__).parents[2]
MODEL = jf.presets.llama(vocab_size=259, d_model=16, n_layers=1, n_heads=2)


def config(directory, **model):
    cfg = jf.presets.llama(vocab_size=259, n_heads=2, **{"d_model": 16, "n_layers": 1} | model)
    return jf.Config(model=cfg, run_dir=str(directory))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# The lock


def test_a_directory_in_use_is_refused_by_name_and_free_again(tmp_path):
    run_dir = tmp_path / "deep" / "run"
    with locked(str(run_dir)):
        about = (run_dir / LOCK).read_bytes()
        holder = rf"run is in use by process {os.getpid()} on {socket.gethostname()}, since \d{{4}}-\d\d-\d\d "
        for _ in range(2):
            with pytest.raises(ValueError, match=holder), locked(str(run_dir)):
                pass
        assert (run_dir / LOCK).read_bytes() == about and names(run_dir) == [LOCK]
        (run_dir / "kept").touch()
    assert names(run_dir) == ["kept"]
    with locked(str(run_dir)):
        pass


def test_what_nothing_was_written_to_is_removed(tmp_path):
    with locked(str(tmp_path / "deep" / "run")):
        pass
    (tmp_path / "empty").mkdir()
    with locked(str(tmp_path / "empty")):
        pass
    assert names(tmp_path) == ["empty"] and names(tmp_path / "empty") == []


def test_a_killed_process_leaves_no_lock(tmp_path):
    script = "import sys, os; from jaxformer.training.directory import locked; lock = locked(sys.argv[1]); lock.__enter__(); "
    script += "os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert names(tmp_path / "run") == [LOCK]
    assert run.open_run(config(tmp_path / "run"))[1:] == (None, [])
    with locked(str(tmp_path / "run")):
        pass


def test_a_lock_that_was_removed_while_it_was_waited_for_is_taken_anew(tmp_path, monkeypatch):
    flock, removed = directories.fcntl.flock, []

    def remove_first(file, how):
        if not removed:
            removed.append((tmp_path / LOCK).unlink())
        flock(file, how)

    monkeypatch.setattr(directories.fcntl, "flock", remove_first)
    with locked(str(tmp_path)):
        monkeypatch.undo()
        with pytest.raises(ValueError, match="is in use by"), locked(str(tmp_path)):
            pass


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(directories.fcntl, "flock", refuse)
    with locked(str(tmp_path)) as lock:
        lock.require()
    assert "cannot be locked (No locks available); make sure that no other train.py uses" in caplog.text


def test_where_nothing_can_be_written_only_writing_is_refused(tmp_path, monkeypatch):
    opened = os.open

    def refuse(path, flags, *rest):
        if Path(path).name == LOCK:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with locked(str(tmp_path)) as lock, pytest.raises(OSError, match="Read-only file system"):
        lock.require()


# Paths


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file/run", "file is a file"),
        ("file", "file is a file"),
        ("dangling", "dangling is a link to nowhere, which does not exist"),
        ("dangling/run", "dangling is a link to nowhere, which does not exist"),
        ("a" * 300, "File name too long"),
        ("new/" + "a" * 300, "File name too long"),
    ],
)
def test_a_path_that_cannot_be_a_directory_is_one_line_and_leaves_nothing(path, message, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(ValueError, match=f"--run-dir .* cannot be used: .*{message}") as raised, locked(str(tmp_path / path)):
        pass
    assert "\n" not in str(raised.value) and names(tmp_path) == ["dangling", "file"]


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    given = jf.Config(
        model=MODEL,
        data=jf.DataConfig(path="~/text", tokenizer="byte"),
        init=run.InitConfig(folder="~/first"),
        run_dir="~/run",
    )
    found = run.at_home(given)
    assert (found.run_dir, found.data.path, found.init.folder) == tuple(
        f"{tmp_path}/home/{n}" for n in ("run", "text", "first")
    )
    assert [expanded(path) for path in ("./~/run", "a~", "runs/~")] == ["./~/run", "a~", "runs/~"]
    with pytest.raises(ValueError, match=r"~nobody-of-that-name has no home directory; write \./~nobody-of-that-name/run for"):
        expanded("~nobody-of-that-name/run")
    run.write_run(Path("~/run"), given, tokenizer.Bytes())  # as an earlier version did
    with pytest.raises(
        ValueError, match=r"means .*home/run, but there is a run in \./~/run; move that run there, or give \./~/run"
    ):
        expanded("~/run")


# What lies in a directory


LEFT = {
    "nothing": [],
    "the lock": [LOCK],
    "a tokenizer": [LOCK, "tokenizer.json"],
    "half of a file": [f".tokenizer.model.{'0a' * 16}", "config.json.tmp"],
    "folders": ["checkpoints/", "tensorboard/"],
    "an unfinished checkpoint": ["checkpoints/", "checkpoints/2.orbax-checkpoint-tmp/"],
}


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
def test_what_a_start_leaves_that_was_killed_at_once_is_no_run(left, tmp_path):
    for name in left:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_text("{")
    assert run.open_run(config(tmp_path)) == (tmp_path, None, [])
    for name in ("notes.txt", "checkpoints/3"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match="exists but is not a run, as it has no config.json"):
            run.open_run(config(tmp_path))
        (tmp_path / name).unlink()


def corpus(tok):
    """A data set as far as a run's first files need it."""
    return types.SimpleNamespace(tokenizer=tok, split_hashes={}, content_hash="")


def test_a_run_that_has_saved_nothing_begins_anew_as_another(tmp_path):
    pretrained.write_run(tmp_path, config(tmp_path, n_layers=2), corpus(tokenizer.train("char", ["abc"], 0)))
    (tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir(parents=True)
    assert run.open_run(config(tmp_path)) == (tmp_path, None, [])
    pretrained.write_run(tmp_path, config(tmp_path), corpus(tokenizer.Bytes()))
    assert run.read_run(tmp_path) == config(tmp_path) and tokenizer.load(tmp_path).kind == "byte"
    (tmp_path / "checkpoints" / "3").mkdir()
    with pytest.raises(ValueError, match="another architecture"):
        run.open_run(config(tmp_path, n_layers=2))


def test_a_tokenizer_that_is_in_the_way_of_a_beginning_is_kept(tmp_path):
    (tmp_path / "tokenizer.model").write_text("somebody's")
    for _ in range(2):
        pretrained.write_run(tmp_path, config(tmp_path), corpus(tokenizer.Bytes()))
    assert names(tmp_path) == ["config.json", "data.json", "tokenizer.json", "tokenizer.model.before"]
    assert (tmp_path / "tokenizer.model.before").read_text() == "somebody's"
    assert tokenizer.load(tmp_path).kind == "byte"


def test_a_published_folder_is_no_run_that_may_begin_anew(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        run.open_run(config(tmp_path))


def test_a_folder_in_the_place_of_the_records_is_refused(tmp_path):
    pretrained.write_run(tmp_path, config(tmp_path), corpus(tokenizer.Bytes()))
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"metrics\.jsonl is a folder; a run needs a file of that name for its metrics"):
        run.open_run(config(tmp_path))


# What is refused on the way


def caused():
    error = RuntimeError("a checkpoint failed")
    error.__cause__ = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/d/f")
    return error


REFUSALS = {
    "with a path": (OSError(errno.ENOSPC, "No space left on device", "a file"), "a file: No space left on device"),
    "without": (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    "of TensorStore": (
        ValueError(
            "RESOURCE_EXHAUSTED: Error writing local file \"/d/3/x\": Failed to write: File too large [os_error_code='27']"
        ),
        "/d/3/x: File too large",
    ),
    "a cause": (caused(), "/d/f: Disk quota exceeded"),
    "one of several": (
        ExceptionGroup("two", [ValueError("x"), PermissionError(13, "Permission denied", "f")]),
        "f: Permission",
    ),
}


@pytest.mark.parametrize(("error", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_says_what_was_done_where_and_what_is_safe(error, message, tmp_path):
    begin = "could not save step 20: " + message
    for safe in ("no step has been saved yet; the same command", "the last saved step is 10, from which the same command"):
        with pytest.raises(Failed) as raised, during("outer", tmp_path, OSError), during("could not save step 20", tmp_path):
            raise error
        assert str(raised.value).startswith(begin) and safe in str(raised.value) and "\n" not in str(raised.value)
        for name in ("9", "10", "20.orbax-checkpoint-tmp", "30.broken"):
            (tmp_path / "checkpoints" / name).mkdir(parents=True, exist_ok=True)


def test_the_first_failure_is_told_not_that_of_closing_what_had_failed(tmp_path):
    with pytest.raises(Failed, match="^could not write: No space left on device; no step"), during("could not save", tmp_path):
        try:
            with during("could not write", tmp_path):
                raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise ValueError("File too large")


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), ValueError("a shape"), FloatingPointError("nan"), OSError("a word")])
def test_other_errors_pass(error, tmp_path):
    with pytest.raises(type(error)) as raised, during("could not save", tmp_path):
        raise error
    assert raised.value is error


@pytest.mark.parametrize("path", ["gs://bucket/run", "s3://bucket/run", "gs:/bucket/run", "memory://run"])
def test_a_remote_run_directory_is_refused_before_anything_is_written(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run.parse([str(Path(__file__).parents[2] / "configs" / "quickstart.py"), f"--run-dir={path}"], Path("unused.py"))
    assert f"error: --run-dir {path}: a run is written to a local directory" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
