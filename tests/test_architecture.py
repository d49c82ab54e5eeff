"""The architecture page says what is: its drawing, its order of rooms, and its two walks through the code."""

import importlib.util
import re
import sys
import threading
from pathlib import Path

import jax
import pytest

import jaxformer as jf
from jaxformer.cli import sample, train

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def module(path):
    loader = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(loaded)
    return loaded


rooms = module(ROOT / "docs" / "rooms.py")


def section(title):
    """The text below a heading, up to the next one."""
    return re.split(r"^#+ .*$", PAGE.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def hops(title):
    """``(file, function)`` of the rows of a walk's table."""
    rows = re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", section(title), re.MULTILINE)
    assert len(rows) > 10
    return rows


CONSULTED = set(re.findall(r"^\| `([^`]+)` \|", section("Consulted on the way"), re.MULTILINE))


def test_the_drawing_is_made_from_the_imports():
    assert rooms.drawing() == PAGE.split(rooms.BEGIN)[1].split(rooms.END)[0], "run python docs/rooms.py"


def test_rooms_are_listed_in_the_order_of_imports():
    assert tuple(re.findall(r"^\| `(\w+)/` \|", section("Rooms"), re.MULTILINE)) == rooms.ORDER


class Trace:
    """The functions of the project that are called inside, in the order of their first calls, and who calls them."""

    def __init__(self):
        self.calls: dict[tuple[str, str], None] = {}
        self.pairs: set[tuple[str, str]] = set()

    def _seen(self, frame, event, _):
        if event != "call":
            return
        file = self._file(frame)
        if file is not None:
            self.calls.setdefault((file, frame.f_code.co_name))
            caller = frame.f_back
            while caller is not None and self._file(caller) == "nn/mistakes.py":  # a decorator of public functions
                caller = caller.f_back
            if caller is not None and (calling := self._file(caller)) is not None:
                self.pairs.add((calling, file))

    @staticmethod
    def _file(frame):
        name = frame.f_code.co_filename
        if not name.startswith(f"{ROOT}/jaxformer/"):
            return None
        return name.removeprefix(f"{ROOT}/").removeprefix("jaxformer/")

    def __enter__(self):
        jax.clear_caches()  # what has been traced before would not be called
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """The traces of a short training run and of a prompt that its model continues."""
    folder = tmp_path_factory.mktemp("walk")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("JAXFORMER_CACHE", str(folder / "cache"))  # so that text is encoded, and not read from disk
    text = folder / "text.txt"
    text.write_text("The same words again and again, until a model knows them by heart.\n" * 60)
    config = jf.Config(
        model=jf.presets.llama(vocab_size=64, d_model=16, n_layers=2, n_heads=2, max_length=32),
        data=jf.DataConfig(path=str(text), tokenizer="byte", length=16, batch_size=8),
        train=jf.TrainConfig(steps=1, eval_every=1, sample_tokens=0),
        run_dir=str(folder / "run"),
    )
    with Trace() as training:
        train.main(config)
    with Trace() as prompt:
        sample.main([str(folder / "run"), "The same", "--max-new-tokens", "4"])
    monkeypatch.undo()
    return {"From a text to the loss": training, "From a prompt to its text": prompt}


@pytest.mark.parametrize("title", ["From a text to the loss", "From a prompt to its text"])
def test_walks_are_what_happens(walks, title, capsys):
    listed, trace = hops(title), walks[title]
    files = list(dict.fromkeys(file for file, _ in listed))
    assert len(files) <= 18
    order = list(trace.calls)
    missing = [hop for hop in listed if hop not in order]
    assert not missing, f"these are not called: {missing}"
    at = [order.index(hop) for hop in listed]
    assert at == sorted(at), f"the order of the first calls is {sorted(listed, key=order.index)}"
    between = {file for file, _ in order[at[0] : at[-1] + 1]}
    unlisted = {file for file in between - set(files) if not any(file.startswith(entry) for entry in CONSULTED)}
    assert not unlisted, f"neither in the walk nor among what is consulted: {sorted(unlisted)}"


def test_nn_calls_nothing_of_decode(walks):
    for trace in walks.values():
        assert {caller.split("/")[0] for caller, file in trace.pairs if file.startswith("decode/")} <= {
            "decode",
            "cli",
            "training",
        }
