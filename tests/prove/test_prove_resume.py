"""``python -m jaxformer.prove_resume``: what it says of a run that resumes exactly, and of one that does not."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxformer as jf
from jaxformer.cli import train
from jaxformer.prove import resume, states
from jaxformer.training import run
from jaxformer.training.checkpoints import Checkpoints

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "quickstart.py")
TINY = {
    "model.vocab-size": 300,
    "model.d-model": 16,
    "model.n-layers": 1,
    "model.n-heads": 2,
    "model.n-kv-heads": 1,
    "model.d-ff": 32,
    "model.residual-dropout": 0.1,
    "data.tokenizer": "byte",
    "data.length": 16,
    "data.batch-size": 4,
    "data.validation-rows": 4,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("def one(two): return three\n" * 100)
    return path


# The command line


def test_flags_that_are_not_its_own_go_to_train():
    flags = ["--optim.lr", "0.5", "--steps", "7", "--model.d-model", "96", "--then-mesh.fsdp", "2"]
    options, trainer = resume.parse([CONFIG, *flags])
    assert options.steps == 7 and options.then_mesh.fsdp == 2 and options.elsewhere
    assert trainer.program == ("-m", "jaxformer", "train")
    asked = run.parse(trainer.arguments(Path("here")), Path()).config
    assert (asked.optim.lr, asked.model.d_model, asked.run_dir) == (0.5, 96, "here")
    assert (asked.train.steps, asked.train.eval_every, asked.train.log_every) == (14, 7, 1)


def test_what_comes_last_counts():
    _, trainer = resume.parse([CONFIG, "--train.steps", "3", "--run-dir", "there"])
    asked = run.parse(trainer.arguments(Path("here"), "--mesh.fsdp", "2"), Path()).config
    assert (asked.train.steps, asked.run_dir, asked.mesh.fsdp) == (20, "here", 2)


def test_several_processes_are_on_the_cpu():
    assert resume.parse([CONFIG, "--then-processes", "2"])[1].environment["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the first argument must be a config file"),
        (["--steps", "2"], "the first argument must be a config file"),
        (["quikstart.py"], "no config file quikstart.py"),
        ([CONFIG, "--steps", "0"], "steps=0 must be at least 1"),
        ([CONFIG, "--script", "nowhere.py"], "there is no file nowhere.py; give the script"),
        ([CONFIG, "--distributed.auto"], "leave out the --distributed.* flags"),
    ],
)
def test_what_cannot_be_proved_is_refused(arguments, message, capfd):
    with pytest.raises((ValueError, FileNotFoundError, SystemExit)) as refused:
        resume.parse(arguments)
    assert message in str(refused.value) + re.sub(r"[│\s]+", " ", capfd.readouterr().err)


# What it says, of two runs made here


@pytest.fixture(scope="module")
def ended(text, tmp_path_factory, quick_compilation):
    """A run of 4 updates."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    train.main(
        jf.Config(
            model=jf.presets.llama(vocab_size=259, d_model=16, n_layers=1, n_heads=2),
            data=jf.DataConfig(path=str(text), tokenizer="byte", length=8, batch_size=8, validation_rows=8),
            train=jf.TrainConfig(steps=4, eval_every=2, log_every=1, sample_tokens=0),
            run_dir=str(directory),
        )
    )
    return directory


def compared(ended, other, capsys, **options):
    is_equal = resume._compare(resume.Options(steps=2, **options), ended, other, resume.Console(soft_wrap=True))
    return is_equal, capsys.readouterr().out


def changed(ended, folder, edit):
    """A copy of a run whose last state is ``edit`` of what it was."""
    copy = shutil.copytree(ended, folder / "copy")
    like = jax.eval_shape(lambda: run.initial_state(run.read_run(copy)))
    with Checkpoints(copy / "checkpoints") as checkpoints:
        state = checkpoints.restore(like)
    shutil.rmtree(copy / "checkpoints")
    with Checkpoints(copy / "checkpoints") as checkpoints:
        checkpoints.save(edit(state))
    return copy


def test_equal_runs_are_equal_to_the_bit(ended, tmp_path, capsys):
    is_equal, out = compared(ended, shutil.copytree(ended, tmp_path / "copy"), capsys)
    count = len(states.leaves(run.initial_state(run.read_run(ended))))
    assert is_equal and f"bit for bit equal: {count} leaves, " in out and "6 records of metrics" in out


def test_the_first_leaf_that_differs_is_named(ended, tmp_path, capsys):
    def edit(state):
        norm = {"gain": state.params["decoder"]["norm"]["gain"].at[3].add(0.25)}
        return state.replace(params=state.params | {"decoder": state.params["decoder"] | {"norm": norm}})

    is_equal, out = compared(ended, changed(ended, tmp_path, edit), capsys)
    assert not is_equal and "1 of " in out and "leaves differ, first params.decoder.norm.gain, by up to 0.25" in out


def test_another_key_differs(ended, tmp_path, capsys):
    is_equal, out = compared(ended, changed(ended, tmp_path, lambda s: s.replace(rng=jax.random.key(9))), capsys)
    assert not is_equal and "first rng" in out


@pytest.mark.parametrize(("factor", "is_near"), [(1 + 1e-6, True), (1.01, False)])
def test_other_losses_are_near_enough_on_another_mesh_only(ended, tmp_path, capsys, factor, is_near):
    copy = shutil.copytree(ended, tmp_path / "copy")
    records = (copy / "metrics.jsonl").read_text()
    other = re.sub(r'"loss": ([\d.]+)', lambda match: f'"loss": {float(match[1]) * factor}', records)
    assert other != records
    (copy / "metrics.jsonl").write_text(other)
    is_equal, out = compared(ended, copy, capsys)
    assert not is_equal and "not equal: losses are at most" in out
    is_equal, out = compared(ended, copy, capsys, then_processes=2)
    assert is_equal == is_near and ("sums in another order" in out) == is_near


def test_a_run_that_is_not_at_that_step_is_no_proof(ended):
    with pytest.raises(ValueError, match="no readable checkpoint of step 6"):
        resume.state_of(ended, 6)


# Real processes


def proved(text, *arguments, devices=1):
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(ROOT),
    }
    flags = [str(part) for name, value in (TINY | {"data.path": text}).items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "jaxformer.prove_resume", CONFIG, *flags, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


def test_a_run_that_is_killed_ends_in_the_same_bits(text):
    process = proved(text, "--steps", "4")
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r"bit for bit equal: \d+ leaves, [\d,]+ bytes .*, 10 records of metrics", process.stdout)


def test_on_another_mesh_what_is_restored_is_equal_to_the_bit(text):
    process = proved(text, "--steps", "4", "--then-mesh.fsdp", "2", devices=2)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "restored on the other devices: bit for bit equal to what was saved" in process.stdout
    assert "with sums in another order on the other devices" in process.stdout or "bit for bit equal:" in process.stdout


def test_in_two_processes_what_is_restored_is_equal_to_the_bit(text):
    process = proved(text, "--steps", "4", "--then-processes", "2")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "restored on the other devices: bit for bit equal to what was saved" in process.stdout


def test_a_train_that_forgets_its_optimizer_is_found_out(text, tmp_path):
    """A train.py that resumes with fresh optimizer state."""
    script = inspect.getsource(train) + "\n\nlaunch(sys.argv[1:]) if __name__ == '__main__' else None\n"
    line = "        return placement.put_state(restored)\n"
    assert line in script
    fresh = "        restored = dataclasses.replace(restored, opt_state=fresh().opt_state)\n"
    (tmp_path / "train.py").write_text(script.replace(line, fresh + line))
    process = proved(text, "--steps", "4", "--script", str(tmp_path / "train.py"))
    assert process.returncode == 1, process.stdout + process.stderr
    assert re.search(r"not equal: .*leaves differ, first params\.", process.stdout)
    shutil.rmtree(re.search(r"kept in (\S+)", process.stdout)[1])
