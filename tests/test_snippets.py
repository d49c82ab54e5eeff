"""What README and docs show is run: every block of Python, and every line that begins with ``uv run``.

The blocks of a page run in their order, in a folder of their own, Python in one namespace. A comment directly before a block
says otherwise: ``<!-- snippet: skip, REASON -->``; ``<!-- snippet: smaller, --train.steps 2 -->``, flags (or a name of
``FLAGS``) that are added to its commands; ``<!-- snippet: replace, OLD with NEW -->``, where NEW may be a name of ``FOLDERS``.
"""

import ast
import dataclasses
import os
import re
import shlex
import string
import subprocess
import sys
import types
from pathlib import Path

import pytest

import jaxformer as jf
from tests import published

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FOLDERS = {"TINY_GPT2": "gpt2", "TINY_LLAMA": "llama"}
"""Published folders, made small, by the name of their reference."""
FLAGS = {
    "TINY": "--model.d-model 48 --model.n-layers 1 --model.vocab-size 259 --data.tokenizer byte --data.path examples/hybrid.py "
    "--data.length 32 --data.batch-size 2 --data.validation-rows 2 --train.steps 2 --train.sample-tokens 4"
}
"""Flags by a name that stands for them: those that make the quickstart take seconds."""
DIRECTIVE = re.compile(r"<!-- snippet: (skip|smaller|replace), (.+) -->")
SHELL = ("bash", "sh", "shell", "console")


@dataclasses.dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    where: str
    language: str
    code: str
    directives: tuple[tuple[str, str], ...]

    def all(self, kind: str) -> list[str]:
        return [text for found, text in self.directives if found == kind]

    @property
    def is_run(self) -> bool:
        return not self.all("skip")

    @property
    def commands(self) -> list[str]:
        """Its lines that begin with ``uv run``, after variables of the environment or the installation of uv."""
        lines = self.code.replace("\\\n", " ").splitlines() if self.language in SHELL else []
        lines = [line.removeprefix("pip install uv && ").strip() for line in lines]
        return [line for line in lines if re.match(r"(\w+=\S+ )*uv run ", line)]


def blocks(page: Path) -> list[Block]:
    name, text = page.relative_to(ROOT), page.read_text(encoding="utf-8")
    found, used = [], 0
    for match in re.finditer(r"((?:^<!-- snippet.*\n)*)^```(\w*).*\n((?:.*\n)*?)^```$", text, re.MULTILINE):
        where = f"{name}:{text[: match.start(2)].count(chr(10)) + 1}"
        directives = [DIRECTIVE.fullmatch(line) for line in match[1].splitlines()]
        assert all(directives), f"{where}: these are not the directives that there are: {match[1]}"
        used += len(directives)
        found.append(Block(where, match[2], match[3], tuple((d[1], d[2]) for d in directives if d)))
    assert used == text.count("<!-- snippet"), f"{name}: a directive must stand directly before a block, alone on its line"
    return found


BLOCKS = {name: blocks(page) for name, page in zip(NAMES, PAGES, strict=True)}
ALL = [block for found in BLOCKS.values() for block in found]


def test_there_is_something_to_run():
    assert sum(block.language == "python" for block in ALL) >= 12
    assert sum(len(block.commands) for block in ALL) >= 12


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "python"], ids=lambda block: block.where)
def test_python_is_python(block):
    ast.parse(block.code)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_for_an_accelerator_names_its_extra(name):
    for block in BLOCKS[name]:
        for line in block.commands:
            if (
                re.search(r"\b(TPU|GPU|cuda|libtpu)s?\b|train\.py .*--distributed\.auto", line)
                and "JAX_PLATFORMS=cpu" not in line
            ):
                assert re.search(r"--extra (tpu|cuda|plan)", line), f"{block.where}: {line}"


def replaced(block: Block, code: str, folders: dict[str, str]) -> str:
    for text in block.all("replace"):
        old, _, new = text.partition(" with ")
        assert old in code, f"{block.where}: there is no {old!r} to replace"
        code = code.replace(old, folders.get(new, new))
    return code


def command(block: Block, line: str) -> tuple[dict[str, str], list[str]]:
    """Variables of the environment, and the program that ``uv run`` would start."""
    smaller = [FLAGS.get(flags, flags) for flags in block.all("smaller")]
    words = [word for text in (line, *smaller) for word in shlex.split(text, comments=True)]
    environment = {}
    while "=" in words[0]:
        name, _, environment[name] = words.pop(0).partition("=")
    assert words[:2] == ["uv", "run"], f"{block.where}: {line}"
    words = words[2:]
    while words[0] == "--extra":
        words = words[2:]
    if words[0] == "jaxformer":
        words = ["-m", *words]
    assert words[0] in ("python", "-m") or words[0].endswith(".py"), f"{block.where}: how is {words[0]} to be run?"
    return environment, [sys.executable, *words[words[0] == "python" :]]


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, str]:
    made = {}
    for name, reference in FOLDERS.items():
        made[name] = str(tmp_path_factory.mktemp("published") / reference)
        published.folder(Path(made[name]), reference)
        jf.tokenizer.train("char", [string.ascii_letters + " ."]).save(Path(made[name]))
    return made


@pytest.mark.parametrize("name", [name for name in NAMES if any(b.language == "python" or b.commands for b in BLOCKS[name])])
def test_a_page_runs(name, folders, tmp_path, monkeypatch):
    for link in ("train.py", "configs", "examples", "benchmarks"):
        (tmp_path / link).symlink_to(ROOT / link)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = types.ModuleType("snippets")
    monkeypatch.setitem(sys.modules, "snippets", module)  # where dataclasses look for the names of their annotations
    for block in filter(lambda block: block.is_run, BLOCKS[name]):
        if block.language == "python":
            code = "\n" * int(block.where.rpartition(":")[2]) + replaced(block, block.code, folders)
            exec(compile(code, name, "exec"), module.__dict__)
        for line in block.commands:
            environment, words = command(block, replaced(block, line, folders))
            inherited = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "XLA_FLAGS": ""}
            process = subprocess.run(words, capture_output=True, text=True, env=inherited | environment, timeout=300)
            assert process.returncode == 0, (
                f"{block.where}: {shlex.join(words)}\n{process.stdout[-2000:]}{process.stderr[-3000:]}"
            )
