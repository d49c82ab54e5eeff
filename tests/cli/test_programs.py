"""How programs end: one line and a documented exit status, whatever the console, the path of a file or the end of a pipe."""

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer.cli import mup
from jaxformer.cli.launch import launch
from jaxformer.cost import command, table
from jaxformer.tokenizers import disk_cache, tokenizer

ROOT = Path(__file__).parents[2]
CONFIG = """
import jaxformer as jf
model = jf.presets.llama(vocab_size=64, d_model=16, n_layers=1, n_heads=2, max_length=32)
config = jf.Config(model=model, data=jf.DataConfig(length=8, batch_size=2))
"""


def ended(program):
    """The status or the line that a program exits with."""
    with pytest.raises(SystemExit) as stopped:
        launch(program)
    return stopped.value.code


def raises(error):
    def program():
        raise error

    return program


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("lr=-1 must be above 0"), "error: lr=-1 must be above 0"),
        (FloatingPointError("the loss is nan"), "error: the loss is nan"),
        (FileNotFoundError("x is not a folder"), "error: x is not a folder"),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), "error: a/b: Permission denied"),
        (OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b"), "error: a -> b: Invalid cross-device link"),
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device"),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
        (SystemExit(2), 2),
    ],
)
def test_what_a_user_can_mend_is_one_line(error, code):
    assert ended(raises(error)) == code


def test_a_fault_of_the_code_keeps_its_traceback():
    with pytest.raises(KeyError):
        launch(raises(KeyError("x")))


def test_a_pipe_that_rich_finds_closed_has_the_same_status():
    def program():
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904 - as rich does

    assert ended(program) == 141


SHELL = """
run() {{ {python} -c "
import runpy  # the file alone: nothing of jax, which takes seconds
launch = runpy.run_path('jaxformer/cli/launch.py')['launch']
launch(lambda: [print('ü' * 99) for _ in range(9999)])"; }}
(run | head -1 >&3; echo "${{PIPESTATUS[0]}}") 3>/dev/null
run > /dev/full; echo "$?"
PYTHONIOENCODING=ascii run | sort -u; echo "${{PIPESTATUS[0]}}"
run >&-; echo "$?"
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_standard_output_that_is_closed_full_or_ascii():
    script = SHELL.format(python=sys.executable)
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.stdout.split() == ["141", "1", "?" * 99, "0", "0"]
    assert done.stderr == "error: No space left on device\n"


def test_help_documents_the_exit_status(capsys):
    for program in (mup.main, command.explain_command, command.plan_command):
        with pytest.raises(SystemExit):
            program(["--help"])
        assert "Exit codes: 0, done" in " ".join(capsys.readouterr().out.replace("│", " ").split())


# Files that a program writes


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config file whose path would be markup, in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c[red].py"
    path.write_text(CONFIG)
    (tmp_path / "file").write_text("precious")
    return path.name


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (".", ". is a folder; give the path of a file"),
        ("file/x.png", "file/x.png cannot be written: file is not a folder"),
        ("nowhere/x.png", "nowhere/x.png cannot be written: nowhere is not a folder"),
        ("x" * 300 + ".png", "File name too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_work(config, target, message, monkeypatch):
    never = lambda *_, **__: pytest.fail("work was begun")
    for module, name in ((mup, "measure"), (command, "explain"), (command, "make")):
        monkeypatch.setattr(module, name, never)
    for program, flags in (
        (mup.main, ["--out", target]),
        (command.explain_command, ["--json", target]),
        (command.plan_command, ["--topology", "gpu:8xH100", "--json", target]),
    ):
        code = ended(lambda program=program, flags=flags: program([config, *flags]))
        assert code.startswith("error: ") and message in code and "\n" not in code
    assert Path("file").read_text() == "precious"


def test_a_drawing_of_no_known_format_is_refused_before_work(config, monkeypatch):
    monkeypatch.setattr(mup, "measure", lambda *_: pytest.fail("work was begun"))
    assert "must end with the suffix of a plot format: " in ended(lambda: mup.main([config, "--out", "x.xyz"]))


def test_home_is_expanded(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JAXFORMER_CACHE", "~/cache")
    command.explain_command([f"~/{config}", "--json", "~/out.json"])
    assert json.loads((tmp_path / "out.json").read_text())
    assert disk_cache.folder() == tmp_path / "cache"
    tok = tokenizer.train("char", ["abc"])
    tok.save(tmp_path)
    assert tokenizer.load("~").content_hash == tokenizer.load("~/tokenizer.json").content_hash == tok.content_hash
    assert {path.name for path in tmp_path.iterdir()} == {config, "file", "out.json", "tokenizer.json"}, "no folder ~"


def test_a_report_is_shown_as_it_is(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    table.show(["c[red].py [/x] :smile:", table.Table(("name",), [("[/INST]",)])])
    out = capsys.readouterr().out
    assert "c[red].py [/x] :smile:" in out and "[/INST]" in out


def test_a_report_on_an_ascii_console(config, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    launch(lambda: command.explain_command([config]))
    assert b"3 ? forward" in written.getvalue(), "the multiplication sign is replaced"


def test_a_link_is_followed_and_a_device_written_to(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    disk_cache.write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    disk_cache.write(tmp_path / "pipe", b"bytes")
    assert os.read(reader, 9) == b"bytes" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    longest = tmp_path / ("x" * 255)
    disk_cache.write(longest, b"whole")
    assert longest.read_bytes() == b"whole"
    with pytest.raises(OSError, match="File name too long: .*x{256}'"):
        disk_cache.write(tmp_path / ("x" * 256), b"whole")
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link", "pipe", longest.name}, "nothing temporary is left"
