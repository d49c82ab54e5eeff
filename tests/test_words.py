"""One word has one meaning (docs/glossary.md): names in the code, by what they may stand for and where."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxformer"
FILES = sorted(PACKAGE.rglob("*.py")) + [ROOT / "train.py"]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

FILLERS = ("found", "own", "given", "part", "whole", "one", "thing", "stuff")
"""They say nothing of what a variable holds."""

ONLY_IN = {
    r"(?i)place[sdr]?": (),
    r"kernels?": ("nn/kernels/", "nn/attend.py", "nn/experts/ragged.py", "cost/"),
    r"(?i)memory": ("cost/", "cli/", "parallel/placement.py"),
    r"sites?": ("config/components.py", "nn/position.py", "nn/attention.py"),
    r"plans?": ("cost/", "cli/plan.py", "plan.py"),
}
"""Names, and where they may be given; the glossary says what they mean there."""


def given_names(tree):
    """``(line, name)`` of every variable, parameter, function and class that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def name_of(path):
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_names_say_what_they_hold(path):
    fillers = [f"{name_of(path)}:{line}: {name}" for line, name in given_names(TREES[path]) if name in FILLERS]
    assert not fillers, fillers


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_words_of_the_glossary_keep_their_meaning(path):
    for pattern, allowed in ONLY_IN.items():
        if name_of(path).startswith(allowed or "none"):
            continue
        wrong = [f"{name_of(path)}:{line}: {name}" for line, name in given_names(TREES[path]) if re.fullmatch(pattern, name)]
        assert not wrong, wrong


def test_the_glossary_has_the_words_that_are_enforced():
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert {"kernel", "memory", "placement", "plan", "site"} <= set(
        re.findall(r"^\| \*\*(\w+)\*\* ✓ \|", glossary, re.MULTILINE)
    )
