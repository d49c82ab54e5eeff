"""The command ``jaxformer``: it starts the program that is asked for, and finds the configs that come with the library."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import jaxformer as jf
from jaxformer.cli import program
from jaxformer.training import run, shipped

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["jaxformer", *arguments])
    program.main()


def test_help_names_every_program_and_does_not_import_jax():
    script = "import sys; from jaxformer.cli import program; sys.argv = ['jaxformer', '--help']; program.main(); "
    script += "print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    *said, has_jax = done.stdout.splitlines()
    assert has_jax == "False"
    listed = [line.split()[0] for line in said if line.startswith("  ")]
    assert listed == ["train", "sample", "evaluate", "hf", "plan", "explain", "mup", "prove-resume"]


@pytest.mark.parametrize("name", [*program.PROGRAMS, "prove_resume"])
def test_every_program_shows_its_help(name, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, name, "--help")
    assert stopped.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["xyz"], "unknown command 'xyz'; known: evaluate, explain"),
        ([], "no command; known: train, sample"),
    ],
)
def test_an_unknown_command_exits_with_2(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, *arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_version(monkeypatch, capsys):
    call(monkeypatch, "--version")
    assert capsys.readouterr().out == f"jaxformer {jf.__version__}\n"


def test_the_script_is_the_program():
    assert PROJECT["project"]["scripts"] == {"jaxformer": "jaxformer.cli.program:main"}


def test_a_shipped_config_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run.parse(["dates"], Path("none")).config.run_dir == "runs/dates"
    for name in shipped.names():
        assert run.read_config(Path(name))[0] == run.read_config(ROOT / "configs" / f"{name}.py")[0]
    assert set(shipped.names()) == {path.stem for path in (ROOT / "configs").glob("*.py")}


def test_a_file_wins_over_a_shipped_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "configs" / "dates.py", tmp_path / "quickstart")
    assert shipped.find("quickstart") == Path("quickstart")


def test_an_unknown_config_lists_the_shipped_ones_the_nearest_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match="no config file quikstart; did you mean 'quickstart'. Shipped configs: quickstart, "
    ) as e:
        shipped.find("quikstart")
    assert all(name in str(e.value) for name in shipped.names())
    with pytest.raises(ValueError, match=r"no config file zzz\. Shipped configs: "):
        shipped.find("zzz")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """What the wheel holds, and nothing else of the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "jaxformer", folder / "jaxformer", ignore=ignored)
    for source, target in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].items():
        shutil.copytree(ROOT / source, folder / target, ignore=ignored)
    return folder


def started(installed, folder, *arguments):
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "jaxformer", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_an_installed_package_finds_its_own_configs(installed, tmp_path):
    done = started(installed, tmp_path, "explain", "quickstart", "--batch", "1", "--length", "8")
    assert done.returncode == 0, done.stderr
    assert (installed / "jaxformer" / "configs" / "quickstart.py").is_file()


def test_the_quickstart_from_an_empty_folder(installed, tmp_path):
    sizes = {"d-model": 16, "n-layers": 1, "n-heads": 2, "n-kv-heads": 1}
    flags = [word for name, size in sizes.items() for word in (f"--model.{name}", str(size))]
    flags += ["--train.steps", "2", "--train.eval-every", "2", "--train.sample-tokens", "4"]
    flags += ["--data.length", "16", "--data.validation-rows", "8"]
    done = started(installed, tmp_path, "train", "quickstart", *flags)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    done = started(installed, tmp_path, "sample", "runs/quickstart", "def ", "--max-new-tokens", "4")
    assert done.returncode == 0 and done.stdout.startswith("def "), done.stderr
