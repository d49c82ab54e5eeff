"""The project's own conventions, read from its source."""

import ast
import re
import runpy
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

import jaxformer

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxformer"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [*MODULES, ROOT / "train.py", *sorted((ROOT / "configs").glob("*.py"))]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}

ORDER = runpy.run_path(str(ROOT / "docs" / "rooms.py"))["ORDER"]
"""The rooms; a file imports only from rooms before its own, or from its own."""
PROGRAMS = ("sample", "plan", "explain", "mup", "prove_resume", "api")
"""What ``python -m jaxformer.sample`` and the like run, and what users call; they import from any room."""
ROOM = {room: level for level, room in enumerate(ORDER)} | dict.fromkeys(PROGRAMS, len(ORDER))
HEAVY = ("orbax", "sentencepiece", "grain", "matplotlib", "tensorboardX", "tensorstore", "tokenizers", "safetensors")
HEAVY += ("huggingface_hub", "transformers", "torch", "tensorflow", "jinja2", "pandas")


def name(path):
    return str(path.relative_to(ROOT))


def where(path, node):
    return f"{name(path)}:{node.lineno}"


def text_of(node):
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def nodes(kind, paths=SOURCES):
    return [(path, node) for path in paths for node in ast.walk(TREES[path]) if isinstance(node, kind)]


# The dimension key


def letters():
    """Those of the table in the package docstring: a letter, then what it counts."""
    table = [line for line in jaxformer.__doc__.splitlines() if line.startswith("    ")]
    return set(re.findall(r"(?<!\S)([A-Z]) (?=[a-z(])", "\n".join(table)))


LETTERS = letters()


PRODUCTS = ("einsum", "multiply", "dense")


def called(call):
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def test_the_key_is_read():
    assert set("BTSDVLKGHFP") <= LETTERS


def test_einsums_use_the_letters_of_the_key():
    equations = [(p, c, text_of(c.args[0])) for p, c in nodes(ast.Call, MODULES) if called(c) in PRODUCTS and c.args]
    equations = [(path, call, equation) for path, call, equation in equations if equation is not None]
    assert len(equations) >= 10
    for path, call, equation in equations:
        assert re.fullmatch(r"[A-Z]+(,[A-Z]+)*->[A-Z]+", equation), f"{where(path, call)}: {equation}"
        assert set(equation) - set(",->") <= LETTERS, f"{where(path, call)}: {equation}"
    free = [c for _, c in nodes(ast.Call, MODULES) if called(c) in ("einsum", "multiply") and text_of(c.args[0]) is None]
    assert len(free) <= 1, "an einsum whose equation is not written where it stands (nn.dense has the only one)"


def test_parameters_and_activations_use_the_letters_of_the_key():
    dims = {"Param": slice(0, 1), "bias": slice(0, 1), "gain": slice(0, 1), "weight": slice(1, 3), "named": slice(2, 3)}
    found = 0
    for path, call in nodes(ast.Call, MODULES):
        for value in filter(None, map(text_of, call.args[dims.get(called(call), slice(0))])):
            found += 1
            assert value and set(value) <= LETTERS, f"{where(path, call)}: {value}"
    assert found >= 25


def test_suffixes_of_variables_use_the_letters_of_the_key():
    """x_BTD, k_BKSH; a 1 stands for an axis of one, or for one more (BT1)."""
    found = {}
    for path in SOURCES:
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                suffix = re.fullmatch(r"[a-z]\w*_([A-Z][A-Z0-9]*)", token.string) if token.type == tokenize.NAME else None
                if suffix:
                    found[f"{name(path)}:{token.start[0]}: {token.string}"] = suffix[1]
    assert len(found) > 100
    assert not [place for place, suffix in found.items() if not set(suffix) <= LETTERS | {"1"}]


# Imports


def room(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "jaxformer" else None


def imports(path):
    """``(line, module)`` for every import of the package, inside functions too."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "jaxformer")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxformer":
            assert node.level == 0
            for alias in node.names:
                inner = PACKAGE.joinpath(*node.module.split(".")[1:], alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield node.lineno, f"{node.module}.{alias.name}" if is_module else node.module


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", [path for path in MODULES if path != PACKAGE / "__init__.py"], ids=name)
def test_imports_go_one_way(path):
    own = "sample" if path.name == "__main__.py" else room(module_of(path))  # a program imports from any room
    assert own in ROOM, f"{name(path)} belongs to no room of docs/rooms.py"
    for line, module in imports(path):
        assert room(module) is not None, f"{name(path)}:{line} imports the package itself"
        assert ROOM[room(module)] < ROOM[own] or room(module) == own, f"{name(path)}:{line} imports {module} from below"


def test_the_architecture_page_lists_the_rooms_in_that_order():
    section = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Rooms")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)/` \|", section, re.MULTILINE)) == ORDER


def test_no_circles():
    graph = {module_of(path): {module for _, module in imports(path)} for path in MODULES}
    while free := [module for module, needs in graph.items() if not needs & graph.keys()]:
        for module in free:
            del graph[module]
    assert not graph, f"circles among {sorted(graph)}"


def loaded(script):
    """All modules that a process has loaded after ``script``."""
    command = [sys.executable, "-c", f"{script}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_imports_nothing_but_itself():
    found = loaded("import jaxformer; jaxformer.__version__")
    assert "jaxformer" in found
    assert not {"jax", "numpy", "flax", "jaxformer.api"} & found


def test_the_first_name_that_is_asked_for_imports_nothing_heavy():
    found = loaded("import jaxformer; jaxformer.forward")
    assert {"jax", "jaxformer.api", "jaxformer.nn.model"} <= found
    assert not {"jaxformer.interop.flax", "jaxformer.cli", *HEAVY} & found


def test_the_package_shows_what_users_call_and_nothing_else():
    from jaxformer import api

    assert dir(jaxformer) == sorted([*api.__all__, "__version__"])
    assert sorted(api.__all__) == sorted(set(api.__all__))
    assert all(getattr(jaxformer, name) is not None for name in dir(jaxformer))
    for name in ("os", "importlib", "nothing", "__wrapped__"):
        assert name not in dir(jaxformer)
    with pytest.raises(AttributeError, match="module 'jaxformer' has no attribute 'nothing'"):
        _ = jaxformer.nothing
    given = {}
    exec("from jaxformer import *", given)
    assert {"forward", "flax", "Config"} <= set(given)


def test_the_version_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "jaxformer/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", jaxformer.__version__)


# Size and docstrings


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_every_file_has_a_docstring(path):
    assert ast.get_docstring(TREES[path])


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_public_functions_and_classes_have_docstrings(path):
    public = [node for node in TREES[path].body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"]
    bare = [f"{where(path, node)} {node.name}" for node in public if not ast.get_docstring(node)]
    assert not bare, bare


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_files_and_functions_stay_small(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300
    long = [
        f"{where(path, node)} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > 60
    ]
    assert not long, long


# What must not stand in any file

TEXTS = [
    path
    for path in ROOT.rglob("*")
    if path.suffix in {".py", ".md", ".toml", ".yml", ".yaml", ".cfg", ".txt", ".lock", ".sh"}
    and not any(
        part.startswith(".") or part in {"runs", "build", "dist", "shared"} for part in path.relative_to(ROOT).parts[:-1]
    )
]
FORBIDDEN = {
    "a package index": r"(?i)index-url|extra-index|trusted-host|artifactory|devpi|(?<!pypi\.org)/simple/?(?![\w/-])",
    "a host of some network": r"https?://(\d+\.\d+|localhost|[\w-]+[:/]|[\w.-]+\.(internal|local|corp|lan)\b)",
    "an absolute path": r"(?<![\w.:/~>}])/(work|tmp|home|root|Users|mnt|srv|opt|var|private)/\w",
}


def test_the_patterns_find_what_they_should():
    samples = {
        "a package index": ["index" + "-url = x", "https://mirror.example.org/simple" + "/ "],
        "a host of some network": ["http:/" + "/10.0.0.1/x", "https:/" + "/mirror/x", "http:/" + "/a.b.internal/"],
        "an absolute path": ["open('/" + "tmp/x')", " /" + "home/me"],
    }
    for kind, texts in samples.items():
        assert all(re.search(FORBIDDEN[kind], text) for text in texts), kind
        assert not re.search(
            FORBIDDEN[kind], 'registry = "https://pypi.org/simple" https://arxiv.org/abs/1706.03762 runs/home/x'
        )


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_no_address_or_path_of_some_machine(path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for kind, pattern in FORBIDDEN.items():
            assert path == Path(__file__) or not re.search(pattern, line), f"{name(path)}:{number}: {kind}: {line.strip()}"
