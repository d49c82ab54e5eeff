"""What a program says of an error: one line, and of code that is not the library's also where it stands."""

import subprocess
import sys

import pytest

import jaxformer as jf
from jaxformer.cli import launch

COMPONENT = """
from dataclasses import dataclass
import jax
import jaxformer as jf


@dataclass(frozen=True)
class Mlp:
    def spec(self, cfg):
        return {"up": jf.weight(cfg, "D", "D")}

    def apply(self, params, x_BTD, cfg):
        return jax.numpy.where(x_BTD[..., :5] > 0, x_BTD, 0)  # a mistake


def objective(params, batch, rng):
    raise ValueError("nothing to learn")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(COMPONENT)
    (tmp_path / "text.txt").write_text("one two three, " * 60)
    return tmp_path


SMALL = ["--data.path", "text.txt", "--data.tokenizer", "byte", "--data.length", "8", "--data.batch-size", "8"]
SMALL += ["--model.d-model", "12", "--model.vocab-size", "259", "--train.steps", "2", "--train.sample-tokens", "0"]


@pytest.mark.parametrize(
    ("flags", "place", "line"),
    [
        (
            ["--model.mlp", "mine:Mlp()"],
            "apply",
            "return jax.numpy.where(x_BTD[..., :5] > 0, x_BTD, 0)  # a mistake",
        ),
        (["--train.objective", "mine:objective"], "objective", 'raise ValueError("nothing to learn")'),
    ],
)
def test_an_error_in_code_of_ones_own_is_shown_with_its_line(folder, flags, place, line):
    number = COMPONENT.split("\n").index("    " * (1 + (place == "apply")) + line) + 1
    program = "from jaxformer.cli.train import launch; import sys; launch(sys.argv[1:])"
    command = [sys.executable, "-c", program, "quickstart", *SMALL, *flags, "--run-dir", "run"]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert process.returncode == 1 and "Traceback" not in process.stderr
    assert process.stderr.endswith(f"\n  in {folder / 'mine.py'}, line {number}, {place}: {line}\n")


def test_an_error_of_the_library_alone_has_no_place():
    with pytest.raises(ValueError, match="n_heads") as caught:
        jf.presets.gpt2(n_heads=5, d_model=12)
    assert launch.described(caught.value) == str(caught.value)  # the line of this test is not one that the library calls
