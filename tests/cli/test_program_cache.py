"""Compiled programs on disk: where, for which CPU, shared by processes, switched off; and they change no bit of a run."""

import os
import subprocess
import sys
from pathlib import Path

import filelock
import jax
import pytest

from jaxformer.cli import program_cache

ROOT = Path(__file__).parents[2]
NAMES = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def unset(tmp_path, monkeypatch):
    """JAX as it is where nobody has said anything about its cache."""
    before = {name: jax.config.values[name] for name in (*NAMES, "jax_enable_compilation_cache")}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)


def directory():
    return jax.config.values["jax_compilation_cache_dir"]


def test_programs_are_kept_in_the_user_s_cache_under_this_cpu(unset):
    program_cache.enable()
    assert Path(directory()) == unset / "programs" / program_cache.host()
    assert jax.config.values["jax_compilation_cache_max_size"] == program_cache.LARGEST
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == program_cache.SHORTEST


def test_a_folder_that_jax_was_given_is_left(unset, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "other"))
    program_cache.enable()
    assert directory() is None
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "another"))
    program_cache.enable()
    assert directory() == str(tmp_path / "another") and not unset.exists()


def test_it_can_be_switched_off(unset):
    jax.config.update("jax_enable_compilation_cache", False)
    program_cache.enable()
    assert directory() is None and not unset.exists()


def test_a_folder_that_cannot_be_made_only_warns(unset):
    unset.write_text("a file")
    with pytest.warns(UserWarning, match="cannot cache compiled programs: .*JAX_ENABLE_COMPILATION_CACHE=0"):
        program_cache.enable()
    assert directory() is None


def test_each_kind_of_cpu_has_a_folder_of_its_own(tmp_path):
    def host(mhz, flags):
        path = tmp_path / "cpuinfo"
        path.write_text("".join(f"processor\t: {i}\ncpu MHz\t\t: {mhz + i}\nflags\t\t: {flags}\n\n" for i in range(2)))
        return program_cache.host(path)

    assert host(2000, "sse avx2") == host(3100, "sse avx2") != host(2000, "sse avx2 avx512f")
    assert program_cache.host(tmp_path / "none") not in ("", host(2000, "sse"))


def test_what_a_killed_process_left_is_removed_and_nothing_else(unset):
    program_cache.enable()
    folder = Path(directory())
    for name in ("whole-cache", "whole-atime", "cut-cache"):
        (folder / name).write_bytes(b"x")
    jax.config.update("jax_compilation_cache_dir", None)
    program_cache.enable()
    assert {path.name for path in folder.glob("*-*")} == {"whole-cache", "whole-atime"}


def test_a_folder_that_another_process_holds_only_warns(unset, monkeypatch):
    folder = unset / "programs" / program_cache.host()
    folder.mkdir(parents=True)
    with filelock.FileLock(folder / ".lockfile"):
        monkeypatch.setattr(program_cache, "WAIT", 0.01)
        with pytest.warns(UserWarning, match="cannot cache compiled programs"):
            program_cache.enable()


def trained(folder, name, environment):
    """The bytes of the last checkpoint's parameters, and the metrics, of a run in a process of its own."""
    (folder / "text.txt").write_text("The same words again and again, until a model knows them.\n" * 60)
    flags = ["--data.path", "text.txt", "--data.tokenizer", "byte", "--data.length", "16", "--train.sample-tokens", "0"]
    flags += ["--train.steps", "3", "--train.eval-every", "3", "--model.d-model", "16", "--model.n-layers", "1"]
    flags += ["--model.n-heads", "2", "--model.n-kv-heads", "1", "--run-dir", name, "--train.log-every", "1"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))}
    environment = kept | {"PYTHONPATH": str(ROOT), "JAXFORMER_CACHE": str(folder / "cache")} | environment
    command = [sys.executable, "-m", "jaxformer", "train", "quickstart", *flags]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    script = f"import jaxformer as jf; from jaxformer.training.digest import summaries; print(summaries(jf.load({name!r})[1]))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return loaded.stdout


def test_no_bit_of_a_run_depends_on_it(tmp_path):
    without = trained(tmp_path, "without", {"JAX_ENABLE_COMPILATION_CACHE": "0"})
    assert not (tmp_path / "cache" / "programs").exists()
    all_of_them = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # whether one took long enough differs between runs
    first = trained(tmp_path, "first", all_of_them)
    programs = set((tmp_path / "cache" / "programs").rglob("*-cache"))
    assert programs
    second = trained(tmp_path, "second", all_of_them)
    assert set((tmp_path / "cache" / "programs").rglob("*-cache")) == programs, "a program was compiled again"
    assert without == first == second
