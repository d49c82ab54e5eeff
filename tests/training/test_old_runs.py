"""Runs that were written before fields of execution had a record of their own: they load, sample and continue as they did.

``tests/runs_before.tar.xz`` holds a small run of every shipped config at step 4 of 8, the data that they read, and the
config.json of every config at its full size; with what the code of that time made of the runs: parameters and greedy texts at
step 4, parameters and records at step 8 on eight simulated devices.
"""

import json
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.cli import train
from jaxformer.config import spec as specs
from jaxformer.config.strict import from_dict
from jaxformer.training import run
from jaxformer.training.migrate import migrated
from jaxformer.training.records import TIMINGS

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
FAST = ("dates", "moe_quickstart", "quickstart")
RENAMED = {"model.experts.number": "model.experts.n-experts"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    unpacked = tmp_path_factory.mktemp("runs_before")
    with tarfile.open(ROOT / "tests" / "runs_before.tar.xz") as archive:
        known = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4 and later
        archive.extractall(unpacked, **known)
    return unpacked


def expected(folder, name):
    return json.loads((folder / "expected" / f"{name}.json").read_text())


def arrays(folder, name, step):
    with np.load(folder / "expected" / f"{name}_{step}.npz") as file:
        return dict(file)


def about():
    """The processor and the versions that decide the last bits of a result."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return [cpu, jax.__version__, jax.lib.__version__]


def assert_same(folder, found, name, step):
    """Bit for bit as they were saved; after four more updates up to the rounding of float32, as sums are in another order since
    the update waits for the gradient's norm and CPUs multiply matrices."""
    before = arrays(folder, name, step)
    assert found.keys() == before.keys()
    is_same_machine = json.loads((folder / "expected" / "about.json").read_text()) == about()
    # 5 roundings of float32 (6e-7) as measured; from another machine as in test_mesh.
    later = {"rtol": 1e-5, "atol": 1e-8} if is_same_machine else {"rtol": 1e-3, "atol": 1e-5}
    for path, array in before.items():
        tolerance = {"rtol": 0, "atol": 0} if step == 4 else later
        np.testing.assert_allclose(np.asarray(found[path]), array, **tolerance, err_msg=path)


@pytest.mark.parametrize("name", NAMES)
def test_the_config_of_a_run_at_full_size_is_todays(folder, name):
    path = ROOT / "configs" / f"{name}.py"
    values = json.loads((folder / "full_config_json" / f"{name}.json").read_text())
    with pytest.raises(ValueError, match="ModelConfig has no field 'save'|ModelConfig has no field|Experts has no field"):
        from_dict(run.Config, values)
    assert from_dict(run.Config, migrated(values)) == run.parse([str(path)], path).config
    assert migrated(migrated(values)) == migrated(values)


@pytest.mark.parametrize("name", NAMES)
def test_an_old_run_loads_and_continues_a_prompt_as_it_did(folder, name):
    cfg, params, tok = jf.load(folder / name)
    assert_same(folder, dict(specs.walk(params)), name, 4)
    before = expected(folder, name)["at_4"]
    source = {"source": np.array([tok.encode(before["source"])], np.int32)} if before["source"] else {}
    prompts = None if source else [tok.encode(before["prompt"])]
    out = jf.generate(params, prompts, cfg, max_new_tokens=16, **source)
    assert np.asarray(out.tokens)[0].tolist() == before["greedy_tokens"]
    assert tok.decode(before["greedy_tokens"]) == before["greedy_text"]


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_an_old_run_goes_on_to_where_it_would_have_come(folder, name, monkeypatch):
    monkeypatch.chdir(folder)
    before = expected(folder, name)
    flags = [str(word) for field, value in before["flags"].items() for word in (f"--{RENAMED.get(field, field)}", value)]
    train.main(run.parse([str(ROOT / "configs" / f"{name}.py"), *flags, "--run-dir", name], train.DEFAULT).config)
    found = dict(specs.walk(jf.load(name)[1]))
    changed = [np.abs(found[path] - array).max() for path, array in arrays(folder, name, 4).items()]
    assert max(changed) > 1e-4, "it was trained further"
    assert_same(folder, found, name, 8)
    records = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    for record, old in zip([r for r in records if r["step"] > 4], before["at_8"]["records"], strict=True):
        [record.pop(name, None) for name in TIMINGS]
        assert record.pop("kind") == old.pop("kind") and record == pytest.approx(old, rel=1e-4)
