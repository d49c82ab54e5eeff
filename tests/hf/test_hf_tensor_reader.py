"""From a file's bytes to arrays on devices: the same values in every way, and no memory beside them."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
from golden import weights
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.config import spec as specs
from jaxformer.hf import FAMILIES, load, safetensors_files, tensor_reader
from jaxformer.hf.load import read_config, resolve
from jaxformer.hf.save import stored_tensors
from jaxformer.nn import model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    published.folder(folder, "llama_gqa_tied")
    return folder


def shardings(cfg, mesh):
    """Every tensor on its widest axis that divides, over both axes of the mesh."""

    def one(param):
        shape = param.shape(cfg)
        axis = max((a for a in range(len(shape)) if shape[a] % mesh.size == 0), key=lambda a: shape[a], default=None)
        return NamedSharding(mesh, PartitionSpec(*[("a", "b") if a == axis else None for a in range(len(shape))]))

    return jax.tree.map(one, model.spec(cfg), is_leaf=lambda leaf: isinstance(leaf, specs.Param))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_are_born_on_their_shards(llama, dtype):
    cfg, params = load(llama, dtype=dtype)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    wanted = shardings(cfg, mesh)
    _, spread = load(llama, dtype=dtype, shardings=wanted)
    assert any(not s.is_fully_replicated for s in jax.tree.leaves(wanted))
    jax.tree.map(np.testing.assert_array_equal, spread, params)
    jax.tree.map(lambda array, sharding: (array.sharding == sharding) or pytest.fail(str(sharding)), spread, wanted)


@pytest.mark.parametrize("spread", [False, True])
def test_layer_by_layer_as_on_accelerators_is_the_same(llama, spread):
    cfg, params = load(llama)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tensors = safetensors_files.find(llama)
    sources = resolve(FAMILIES["llama"], cfg, tensors, ())
    by_path = dict(specs.walk(shardings(cfg, mesh)))
    with tensor_reader.TensorReader(tensors, cfg) as reader:
        for path, param in specs.walk(model.spec(cfg)):
            if param.dims.startswith("L"):
                array = reader.by_layer(sources[path], param, by_path[path] if spread else None)
                np.testing.assert_array_equal(array, dict(specs.walk(params))[path], err_msg=path)


@pytest.mark.parametrize("shape", [(5, 7), (3, 2, 4), (1, 9), (6,), ()])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_blocks_cover_an_array_once(shape, turned, dtype, monkeypatch):
    monkeypatch.setattr(tensor_reader, "BLOCK", 8)
    values = np.arange(np.prod(shape), dtype=np.float64).reshape(shape).astype(jnp.dtype(dtype))
    view = values.T if turned else values
    counts = np.zeros(view.shape, int)
    out = np.full(view.shape, np.nan, np.float32)
    for at in tensor_reader.blocks(view):
        counts[at] += 1
        tensor_reader._copy_block(out, view, at)
    assert (counts == 1).all()
    if view.ndim > 1:
        assert len(tensor_reader.blocks(view)) > 1
    np.testing.assert_array_equal(out, view.astype(np.float32))


MEASURE = """
import sys
import jax, jax.numpy as jnp
import jaxformer as jf
def resident(line):
    return next(int(text.split()[1]) * 1024 for text in open("/proc/self/status") if text.startswith(line))
jf.hf.load(sys.argv[1])  # compiles and imports, which is not measured
jnp.zeros(1).block_until_ready()
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the highest size is counted from here
_, params = jf.hf.load(sys.argv[2])
print(resident("VmHWM") - before - sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux does")
def test_memory_holds_the_arrays_and_little_else(tmp_path):
    """Less than 1.3 of the largest tensor above the arrays: a copy of the largest, or a second one of all, is more."""
    config, _, _ = weights.load("llama")
    small, large = tmp_path / "small", tmp_path / "large"
    published.folder(small, "llama")
    sizes = {"vocab_size": 64_000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = config | sizes | heads
    family, cfg = read_config(config, {"lm_head.weight"})
    tensors = {name: np.ones(shape, np.float32) for name, (shape, _) in stored_tensors(family, cfg).items()}
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert sum(tensor.nbytes for tensor in tensors.values()) > 3 * largest
    published.folder(large, "llama", config=config, tensors=tensors)
    del tensors
    out = subprocess.run([sys.executable, "-c", MEASURE, small, large], capture_output=True, text=True, check=True)
    assert 0 < int(out.stdout) < 1.3 * largest
