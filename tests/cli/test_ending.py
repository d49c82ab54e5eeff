"""How train.py ends: signals and exit codes, a closed or narrow console, a full disk; in real processes at the end."""

import functools
import io
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.cli import train
from jaxformer.cli.launch import open_output
from jaxformer.parallel import ending, exit_codes
from jaxformer.training import directory as directories
from jaxformer.training import run
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.console import RunConsole
from jaxformer.training.records import TIMINGS
from jaxformer.training.report import results

ROOT = Path(__file__).parents[2]
STEPS = 6


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("one two three, " * 60)
    return str(path)


def config(directory, text, steps=2, **model):
    cfg = jf.presets.llama(vocab_size=259, d_model=16, n_layers=1, n_heads=2, **model)
    data = jf.DataConfig(path=text, tokenizer="byte", length=8, batch_size=8, segment_documents=False)
    settings = jf.TrainConfig(steps=steps, eval_every=2, log_every=1, prompt="one", sample_tokens=0)
    return jf.Config(model=cfg, data=data, train=settings, run_dir=str(directory))


def everything(directory):
    return {str(path.relative_to(directory)): path.is_file() and path.read_bytes() for path in directory.rglob("*")}


# Signals


@pytest.mark.parametrize("name", ending.SIGNALS)
def test_a_signal_asks_to_stop_and_what_was_there_is_restored(name, capfd):
    number = getattr(signal, name)
    if name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored here, as under nohup, and stays so")
    before = signal.getsignal(number)
    with ending.stopping() as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop()
    assert signal.getsignal(number) is before
    assert ("Press Ctrl-C again to stop at once" in capfd.readouterr().err) == (name == "SIGINT")


def test_a_second_ctrl_c_stops_at_once_and_no_other_signal_counts_as_one():
    with pytest.raises(KeyboardInterrupt), ending.stopping() as stop:
        for name in ("SIGTERM", "SIGINT", "SIGTERM", "SIGTERM", "SIGHUP", "SIGHUP"):
            signal.raise_signal(getattr(signal, name))
        assert stop(), "none of these"
        signal.raise_signal(signal.SIGINT)


def test_under_nohup_a_hangup_is_ignored():
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending.stopping() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, old)


def test_a_run_that_is_stopped_saves_and_goes_on(text, tmp_path, monkeypatch, capsys, quick_compilation):
    shown = train.Report.train

    def ask(self, step, metrics):
        shown(self, step, metrics)
        for _ in range(2 * (step == 1)):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(train.Report, "train", ask)
    assert train.main(config(tmp_path / "run", text)) == exit_codes.STOPPED
    assert f"Stopped after step 1, saved in {tmp_path / 'run'}. The same command resumes" in capsys.readouterr().out
    monkeypatch.undo()
    assert train.main(config(tmp_path / "run", text)) == exit_codes.FINISHED
    assert "resuming from step 1" in capsys.readouterr().out
    assert directories.saved_steps(tmp_path / "run") == [1, 2]


def test_the_help_has_the_exit_codes(capsys):
    with pytest.raises(SystemExit):
        run.parse(["--help"], ROOT / "configs" / "dates.py")
    codes = (exit_codes.FINISHED, exit_codes.FAILED, exit_codes.USAGE, exit_codes.STOPPED, exit_codes.INTERRUPTED)
    described = " ".join(capsys.readouterr().out.replace("│", " ").split()).split("Exit codes: ")[1]
    assert all(f"{code}, " in described for code in codes)


# Directories


def test_nothing_is_written_before_the_first_update_has_been_traced(text, tmp_path, quick_compilation):
    with pytest.raises(ValueError, match="source"):  # pairs are needed, which only tracing finds out
        train.main(config(tmp_path / "deep" / "run", text, encoder_layers=1))
    assert not (tmp_path / "deep").exists()


def test_a_finished_run_is_shown_again_where_nothing_can_be_written(text, tmp_path, monkeypatch, capsys, quick_compilation):
    directory, opened = tmp_path / "run", os.open
    assert train.main(config(directory, text)) == exit_codes.FINISHED
    (loss,) = [row for row in capsys.readouterr().out.splitlines() if "│ validation loss" in row]

    def refuse(path, flags, *rest, **options):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(directory)):
            raise OSError(30, "Read-only file system", str(path))
        return opened(path, flags, *rest, **options)

    before = everything(directory)
    monkeypatch.setattr(os, "open", refuse)
    assert train.main(config(directory, text)) == exit_codes.FINISHED
    assert loss in capsys.readouterr().out.splitlines()
    with pytest.raises(OSError, match="could not continue: .*Read-only file system; the last saved step is 2, from which"):
        train.main(config(directory, text, steps=4))
    assert everything(directory) == before


def test_a_directory_in_use_is_neither_read_nor_written(text, tmp_path):
    (tmp_path / "config.json").write_text("not read")
    with directories.locked(str(tmp_path)):
        before = everything(tmp_path)
        with pytest.raises(ValueError, match=f"is in use by process {os.getpid()} on "):
            train.main(config(tmp_path, text))
        assert everything(tmp_path) == before


# Consoles

TEXTS = ["[/INST] hi", "[bold]x", ":smile:", "run[red]s", "[/x]", "a\\[b]"]


@pytest.mark.parametrize("given", TEXTS)
def test_texts_are_shown_as_they_are(given, text, tmp_path, capsys):
    console = RunConsole()
    asked = config(f"r/{given}", text)
    train.announce(console, asked, asked.mesh.make(), {given: 3}, [f"train.prompt: one -> {given}"], 2)
    results(console, asked, Path(given), {given: 1.0}, 2, 1.0)
    with train.Report(tmp_path, 0, 2, 1, lambda step, metrics: dict(metrics)) as report:
        report.train(1, {"loss": 1.0, "weight": 1.0})
        report.validation(1, {given: 1.0})
        report.sample(1, given, given)
    logging.getLogger("jaxformer.test").warning("skipping %s", given)
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if given in line]
    assert [line for line in lines if line.startswith(("resuming", "changed"))] == [
        f"resuming from step 2 in r/{given}",
        f"changed since the run began: train.prompt: one -> {given}",
    ]
    # data, resuming, changed, score, curves, records, load it, validation, title, sample, log
    assert len(shown) >= 10 + (given in repr(given)), lines
    assert any(line.startswith(f"step 1  validation {given} 1.0000") for line in lines)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_character_that_the_console_does_not_have_is_replaced(encoding, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    open_output()
    console = RunConsole()
    console.print("a → b, 日本 \udcff")
    results(console, jf.Config(model=jf.presets.gpt2()), Path("run"), {"loss": 1.0}, 2, 1.0)
    shown = written.getvalue().decode(encoding)
    assert "a ? b, ?? ?" in shown and "loss" in shown
    sys.stdout.detach()


@pytest.mark.parametrize("kind", ["pipe", "full"])
def test_a_console_that_is_gone_is_noticed_and_no_error(kind, monkeypatch):
    if kind == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    elif not os.path.exists("/dev/full"):
        pytest.skip("no device that is always full")
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        console = RunConsole()
        assert not console.is_lost
        console.print("once")
        assert console.is_lost
        console.print("twice")
        with ending.stopping(lambda: console.is_lost) as stop:
            assert stop()
    monkeypatch.undo()


# Real processes

# Runs train.py and does something to itself, or to its standard output, after the update of a step has been dispatched.
DRIVER = """
import os, resource, signal, sys, time
from jaxformer.cli import train
step_at, action = int(sys.argv[1]), sys.argv[2]

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))

if action.startswith("limit") and step_at == 0:
    limit(action.split()[1])
shown = train.Report.train

def hooked(self, step, metrics):
    shown(self, step, metrics)
    if step == step_at and action == "wait":
        print("waits", file=sys.stderr, flush=True)
        sys.stdin.read()
    elif step == step_at and action.startswith("limit"):
        while not (self.directory / "checkpoints" / "2").exists():  # still being written
            time.sleep(0.01)
        limit(action.split()[1])
    elif step == step_at:
        for name in action.split():
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(0.1)

train.Report.train = hooked
train.launch(sys.argv[3:])
"""


class Runs:
    """Processes of train.py in a folder."""

    def __init__(self, folder: Path, text: str):
        self.folder = folder
        fields = {"data.path": text, "data.tokenizer": "byte", "data.length": 16, "data.batch-size": 4}
        fields |= {"model.vocab-size": 259, "model.d-model": 16, "model.n-layers": 1, "model.n-heads": 2, "model.d-ff": 32}
        fields |= {"model.n-kv-heads": 1, "train.steps": STEPS, "train.eval-every": 2, "train.log-every": 1}
        self.flags = [str(part) for name, value in fields.items() for part in (f"--{name}", value)]

    def start(self, name, at=0, action="", prompt="one", **options) -> subprocess.Popen:
        environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        environment |= options.pop("env", {})
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | {"text": True}
        flags = [*self.flags, "--train.sample-tokens", "4", "--train.prompt", prompt, "--run-dir", str(self.folder / name)]
        command = [sys.executable, "-c", DRIVER, str(at), action, *flags]
        return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes, **options)

    def ended(self, process: subprocess.Popen, code: int = 0) -> tuple[str, str]:
        out, errors = process.communicate(timeout=200)
        assert process.returncode == code, out[-2000:] + errors[-4000:]
        assert "Traceback" not in errors and "Exception" not in errors, errors
        return out, errors

    @functools.cached_property
    def whole(self) -> str:
        """A run that nothing happened to."""
        self.ended(self.start("whole"))
        return "whole"

    def assert_goes_on_to_the_same_end(self, name: str) -> None:
        """Bit for bit, and record for record."""
        out, _ = self.ended(self.start(name))
        assert "Results after 6 steps" in out
        (a, a_records), (b, b_records) = self.end_of(name), self.end_of(self.whole)
        assert len(a) == len(b) > 10 and len(b_records) == STEPS + STEPS // 2
        jax.tree.map(np.testing.assert_array_equal, a, b)
        assert a_records == b_records

    def end_of(self, name):
        directory = self.folder / name
        checkpoints = Checkpoints(directory / "checkpoints")
        state = checkpoints.restore(jax.eval_shape(functools.partial(run.initial_state, run.read_run(directory))))
        checkpoints.close()
        assert int(state.step) == STEPS
        lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        kept = [{key: value for key, value in record.items() if key not in TIMINGS} for record in lines]
        return jax.tree.leaves(state.replace(rng=jax.random.key_data(state.rng))), kept


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text):
    return Runs(tmp_path_factory.mktemp("runs"), text)


@pytest.mark.parametrize("actions", ["SIGTERM SIGTERM", "SIGHUP SIGTERM SIGINT"])
def test_a_process_that_is_asked_to_stop_saves_and_goes_on_to_the_same_bits(actions, runs):
    out, _ = runs.ended(runs.start(actions, 3, actions), exit_codes.STOPPED)
    assert "Stopped after step 3, saved in" in out
    runs.assert_goes_on_to_the_same_end(actions)


def test_two_ctrl_c_end_a_process_at_once(runs):
    runs.ended(runs.start("twice", 3, "SIGINT SIGINT"), exit_codes.INTERRUPTED)
    runs.assert_goes_on_to_the_same_end("twice")


def test_a_pipe_that_is_closed_stops_and_saves(runs):
    process = runs.start("pipe", 1, "wait")
    assert "parameters; devices" in process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, errors = runs.ended(process, exit_codes.STOPPED)
    assert errors == "waits\n" and directories.saved_steps(runs.folder / "pipe") in ([1], [2])
    runs.assert_goes_on_to_the_same_end("pipe")


@pytest.mark.parametrize(
    ("at", "size", "safe"),
    [
        (0, 1 << 10, "no step has been saved yet;"),  # too small for config.json
        (0, 5 << 10, "no step has been saved yet;"),  # too small for a checkpoint
        (3, 1 << 10, "the last saved step is 2, from which"),
    ],
)
def test_files_that_may_not_grow_fail_in_one_line_and_the_same_command_goes_on(at, size, safe, runs):
    """Stands in for a full disk: the kernel refuses every byte after ``size`` of a file, to whoever writes."""
    name = f"full {at} {size}"
    process = runs.start(name, at, f"limit {size}", env={"JAX_ENABLE_COMPILATION_CACHE": "0"})
    _, errors = runs.ended(process, exit_codes.FAILED)
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert errors.splitlines()[-1] == line and "File too large" in line and f"{safe} the same command resumes" in line
    runs.assert_goes_on_to_the_same_end(name)


def test_a_second_process_is_refused_by_name_and_readers_are_not(runs):
    first = runs.start("used", 3, "wait")
    assert first.stderr.readline() == "waits\n"
    _, errors = runs.ended(runs.start("used"), exit_codes.FAILED)
    assert errors.startswith("error: ") and f"used is in use by process {first.pid} on " in errors
    assert jf.load(runs.folder / "used")
    runs.ended(first)
    assert not (runs.folder / "used" / directories.LOCK).exists()


def test_an_ascii_console_and_markup_end_nothing(runs):
    for prompt in ("[INST] \u00e9 [/INST] [bold]x :smile:", "[/INST] \u65e5"):
        out, _ = runs.ended(runs.start("ascii", prompt=prompt, env={"PYTHONIOENCODING": "ascii"}))
    assert "[INST] ? [/INST] [bold]x :smile: -> [/INST] ?" in " ".join(out.split())
