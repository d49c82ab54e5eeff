"""``python -m jaxformer.hf``: info, import, export, verify."""

import json
import subprocess
import sys

import jax
import numpy as np
import published
import pytest
from golden import weights

import jaxformer as jf
from jaxformer.tokenizers import tokenizer


def command(*arguments, fails=False):
    done = subprocess.run([sys.executable, "-m", "jaxformer.hf", *map(str, arguments)], capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def llama(tmp_path):
    reference = published.folder(tmp_path / "llama", "llama")
    tokenizer.train("char", ["some text"]).save(tmp_path / "llama")
    np.savez(tmp_path / "llama" / "reference.npz", **reference)
    (tmp_path / "llama" / "config_legacy.json").write_text(json.dumps(published.legacy(weights.load("llama")[0])))
    return tmp_path / "llama"


def test_info_reads_headers_alone(llama):
    out = command("info", llama)
    cfg, params = jf.hf.load(llama)
    count = sum(array.size for array in jax.tree.leaves(params))
    assert f"llama: {count:,} parameters in float32" in out and f"n_layers={cfg.n_layers}" in out
    assert "is not a folder" in command("info", llama / "nothing", fails=True)


def test_import_and_export_are_each_other_s_inverse(llama, tmp_path):
    command("import", llama, tmp_path / "run")
    cfg, params, tok = jf.load(tmp_path / "run")
    expected = jf.hf.load(llama)
    assert cfg == expected[0] and tok.encode("some")
    jax.tree.map(np.testing.assert_array_equal, params, expected[1])
    command("export", tmp_path / "run", tmp_path / "back")
    again, back = jf.hf.load(tmp_path / "back")
    assert again == cfg
    jax.tree.map(np.testing.assert_array_equal, back, params)
    assert "exists; choose another directory" in command("import", llama, tmp_path / "run", fails=True)
    assert "holds weights already" in command("export", tmp_path / "run", tmp_path / "back", fails=True)
    command("export", tmp_path / "run", tmp_path / "back", "--overwrite")
    assert "is no run of train.py but a published folder already" in command("export", llama, tmp_path / "new", fails=True)


def test_verify_names_the_first_layer_that_is_off(llama):
    out = command("verify", llama)
    _, tensors, _ = weights.load("llama")
    layers = max(int(name.split(".")[2]) for name in tensors if ".layers." in name) + 1
    assert all(f"decoder layer {i} " in out for i in range(layers)) and out.split("first above 0.0002")[1].strip() == "none"
    last = f"model.layers.{layers - 1}.mlp.up_proj.weight"
    published.folder(llama, "llama", tensors=tensors | {last: tensors[last] * 1.01})
    out = command("verify", llama, fails=True)
    assert out.split("first above 0.0002")[1].strip() == f"decoder layer {layers - 1}"
    assert out.index("above the tolerance") > out.index(f"decoder layer {layers - 1}"), "layers before it are as they were"


def test_verify_as_a_table(llama):
    lines = command("verify", "--markdown", llama).splitlines()
    assert lines[0].startswith("| folder | unpadded | padded | hidden states | loss | gradients | greedy |")
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells[0] == "llama" and all(float(cell) < 1e-4 for cell in cells[1:-1]) and cells[-1] == "same"
    other = json.loads((llama / "config_legacy.json").read_text()) | {"rope_theta": 5.0}
    (llama / "config_legacy.json").write_text(json.dumps(other))
    assert command("verify", "--markdown", llama, fails=True).splitlines()[2].endswith("| differs |")
