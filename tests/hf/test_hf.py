"""Published folders: the reference's numbers, bit for bit back again, and refusals."""

import dataclasses
import json
import struct

import jax
import ml_dtypes
import numpy as np
import published
import pytest
import tiny
from golden import weights
from safetensors.numpy import load_file, save_file

import jaxformer as jf
from jaxformer.hf import load, save
from jaxformer.hf.verify import compare

pytestmark = pytest.mark.usefixtures("quick_compilation")
# Float32 sums in another order, measured at 1e-5 and less; a wrong activation, base or window is 3e-4 and more.
TOLERANCE = 5e-5


# One of each kind of block; the rest are slow, not other.
QUICK = ["bert_mlm", "deepseek_v3", "gemma3_text", "gpt2", "gpt_neox", "llama_gqa_tied", "llama_rope_yarn", "marian", "mixtral"]
QUICK += ["olmo2", "phi3", "qwen2_window", "t5_v11"]
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in published.NAMES]


@pytest.mark.parametrize("name", ALL)
def test_everything_is_as_in_the_reference(name, tmp_path):
    reference = published.folder(tmp_path, name)
    reference = {key: value for key, value in reference.items() if not key.startswith("beam")}  # in test_golden_decoding
    config = json.loads((tmp_path / "config.json").read_text())
    cfg, params = load(tmp_path)
    rows = list(
        compare(cfg, params, config["model_type"], reference, config.get("eos_token_id"), config.get("pad_token_id") or 0)
    )
    assert {row.quantity for row in rows} >= {"loss", "gradient norms", "gradient probes"}
    assert len(rows) >= 7 and all(row.scale > 0 for row in rows)
    far = [row for row in rows if row.relative > TOLERANCE]
    assert not far, far


@pytest.mark.parametrize("name", published.NAMES)
def test_the_older_spelling_of_the_config_is_the_same_model(name, tmp_path):
    config, _, _ = weights.load(name)
    published.folder(tmp_path / "new", name)
    published.folder(tmp_path / "old", name, config=published.legacy(config))
    assert load(tmp_path / "new")[0] == load(tmp_path / "old")[0]


@pytest.mark.parametrize("name", published.NAMES)
def test_saved_again_it_is_bit_for_bit_the_same(name, tmp_path):
    published.folder(tmp_path / "theirs", name)
    cfg, params = load(tmp_path / "theirs")
    save(tmp_path / "ours", cfg, params, shard_bytes=60_000)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists(), "several shards"
    again, back = load(tmp_path / "ours")
    assert again == cfg
    jax.tree.map(np.testing.assert_array_equal, back, params)
    save(tmp_path / "whole", cfg, params)
    theirs, ours = (load_file(tmp_path / which / "model.safetensors") for which in ("theirs", "whole"))
    assert theirs.keys() == ours.keys()
    for tensor in theirs:
        np.testing.assert_array_equal(ours[tensor], theirs[tensor], err_msg=tensor)


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa", "qwen2_5", "qwen3", "mistral", "llama_mha"])
def test_models_of_our_own_can_be_published(name, tmp_path):
    """Adjacent rotary pairs become halves, biases and norms with them: the same function."""
    cfg = tiny.PRESETS[name]
    params, tokens = tiny.drawn(cfg), tiny.tokens(cfg)
    save(tmp_path / "x", cfg, params)
    again, back = load(tmp_path / "x")
    expected = np.asarray(jf.forward(params, tokens, cfg))
    if cfg.position == "rope":
        assert cfg.rope_layout == "interleaved" and again.rope_layout == "half"
        wrong = jf.forward(params, tokens, dataclasses.replace(cfg, rope_layout="half"))
        assert np.abs(np.asarray(wrong) - expected).max() > 1e-2 * np.abs(expected).max(), "the layout matters"
    found = np.asarray(jf.forward(back, tokens, again))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())  # products in another order


def test_a_model_that_no_family_has_is_refused_with_reasons(tmp_path):
    cfg = dataclasses.replace(tiny.PRESETS["llama_gqa"], attention_softcap=5.0, qkv_bias=True)
    with pytest.raises(ValueError, match="(?s)no published family has this config.*llama: .*softcap=5.0"):
        save(tmp_path / "x", cfg, tiny.drawn(cfg))
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_dtypes_are_kept_or_chosen(tmp_path):
    config, tensors, _ = weights.load("llama")
    half = {name: t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()}
    published.folder(tmp_path, "llama", tensors=half)
    cfg, params = load(tmp_path)
    assert cfg.execution.dtype == cfg.param_dtype == "bfloat16" and {p.dtype.name for p in jax.tree.leaves(params)} == {
        "bfloat16"
    }
    np.testing.assert_array_equal(params["embedding"]["token"], half["model.embed_tokens.weight"])
    cfg, params = load(tmp_path, dtype="float32")
    assert cfg.execution.dtype == "float32" and {p.dtype.name for p in jax.tree.leaves(params)} == {"float32"}


# What is refused


def changed(config, **fields):
    return {**config, **fields}


def without(values, *names):
    return {name: value for name, value in values.items() if name not in names}


@pytest.mark.parametrize(
    ("fixture", "change", "message"),
    [
        ("llama", lambda c: changed(c, hidden_act="quick_gelu"), "hidden_act='quick_gelu' is not supported; supported"),
        ("llama", lambda c: changed(c, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), "rope type 'longrope'"),
        ("llama", lambda c: changed(c, rope_parameters={"rope_type": "default"}), "no rope_theta"),
        ("llama", lambda c: without(c, "rope_parameters"), "base of (its|the rotary) positions is not known"),
        ("llama", lambda c: changed(c, attention_chunk_size=4), "would not be honoured: attention_chunk_size=4"),
        ("llama", lambda c: without(c, "hidden_size"), "no 'hidden_size'"),
        ("llama", lambda c: changed(c, model_type="lama"), "model_type='lama' is not supported; did you mean 'llama'"),
        ("llama", lambda c: changed(c, rms_norm_eps=0.0), "norm_eps=0.0 must be above 0"),
        ("gpt2", lambda c: changed(c, scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
        ("gemma2", lambda c: changed(c, layer_types=["full_attention"]), "layer_types"),
        ("llama_rope_yarn", lambda c: changed(c, rope_parameters=c["rope_parameters"] | {"beta": 1}), "beta"),
    ],
)
def test_config_fields_are_honoured_or_refused(fixture, change, message, tmp_path):
    config, _, _ = weights.load(fixture)
    published.folder(tmp_path, fixture, config=change(config))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("text", ['{"model_type": "llama", "model_type": "gpt2"}', '{"rms_norm_eps": NaN}', "[1]", "{", ""])
def test_a_config_that_is_no_config(text, tmp_path):
    published.folder(tmp_path, "llama")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json"):
        load(tmp_path)


def test_tensors_are_all_used_and_all_there(tmp_path):
    _, tensors, _ = weights.load("llama")
    wrong = dict(tensors)
    wrong["model.extra.weight"] = np.ones((2, 2), np.float32)
    del wrong["model.norm.weight"]
    wrong["lm_head.weight"] = wrong["lm_head.weight"][:-1].copy()
    published.folder(tmp_path, "llama", tensors=wrong)
    with pytest.raises(ValueError) as stopped:
        load(tmp_path)
    for line in ("missing     model.norm.weight", "unexpected  model.extra.weight", "differs     lm_head.weight"):
        assert line in str(stopped.value)
    del wrong["model.extra.weight"]
    published.folder(tmp_path, "llama", tensors=tensors | {"model.extra.weight": np.ones(3, np.float32)})
    load(tmp_path, ignore=[r"model\.extra\..*"])


def test_a_tied_head_is_absent_or_equal(tmp_path):
    _, tensors, _ = weights.load("llama_gqa_tied")
    table = tensors["model.embed_tokens.weight"]
    published.folder(tmp_path, "llama_gqa_tied", tensors=tensors | {"lm_head.weight": table.copy()})
    load(tmp_path)
    published.folder(tmp_path, "llama_gqa_tied", tensors=tensors | {"lm_head.weight": table + 1})
    with pytest.raises(ValueError, match="the config ties lm_head.weight to model.embed_tokens.weight"):
        load(tmp_path)
    _, untied, _ = weights.load("llama")
    published.folder(tmp_path, "llama", tensors=without(untied, "lm_head.weight"))
    with pytest.raises(ValueError, match="missing     lm_head.weight"):
        load(tmp_path)


def header(path, change):
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    values = change(json.loads(content[8 : 8 + length]))
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def overlap(values):
    first, second = [name for name in values if name != "__metadata__"][:2]
    values[second]["data_offsets"] = values[first]["data_offsets"]
    return values


def twice(values):
    name = next(name for name in values if name != "__metadata__")
    return json.dumps(values).encode()[:-1] + b', "' + name.encode() + b'": ' + json.dumps(values[name]).encode() + b"}"


FAULTS = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "a header of 2^63 bytes": lambda path: path.write_bytes(struct.pack("<Q", 2**63) + b"{}"),
    "a header that is no JSON": lambda path: header(path, lambda values: b"nonsense"),
    "overlapping offsets": lambda path: header(path, overlap),
    "a repeated key": lambda path: header(path, twice),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_files_are_named(fault, tmp_path):
    published.folder(tmp_path, "llama")
    FAULTS[fault](tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors"):
        load(tmp_path)


def test_shards_and_their_index(tmp_path):
    published.folder(tmp_path / "theirs", "llama")
    cfg, params = load(tmp_path / "theirs")
    save(tmp_path / "x", cfg, params, shard_bytes=30_000)
    index = tmp_path / "x" / "model.safetensors.index.json"
    text = index.read_text()
    first = sorted((tmp_path / "x").glob("*.safetensors"))[0]
    index.write_text(text.replace(first.name, "../" + first.name))
    with pytest.raises(ValueError, match="names files outside its folder"):
        load(tmp_path / "x")
    index.write_text(text.replace("model.norm.weight", "model.norm.other"))
    with pytest.raises(ValueError, match="(?s)missing     model.norm.other.*unexpected  model.norm.weight"):
        load(tmp_path / "x")
    index.write_text(text)
    first.unlink()
    with pytest.raises(ValueError, match=f"do not exist: {first.name}"):
        load(tmp_path / "x")


def test_a_folder_without_weights_says_what_it_has(tmp_path):
    published.folder(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin may run any code"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="not a folder|config.json"):
        load(tmp_path / "nowhere")


def test_folders_of_the_removed_flax_classes(tmp_path):
    """flax_model.msgpack: kernels are (in, out), norms have scales, tables are embeddings."""
    from flax.serialization import msgpack_serialize
    from flax.traverse_util import unflatten_dict

    published.folder(tmp_path / "new", "gpt2")
    cfg, params = load(tmp_path / "new")
    flat = {}
    for name, tensor in load_file(tmp_path / "new" / "model.safetensors").items():
        *path, last = name.split(".")
        kind = "embedding" if path[-1] in ("wte", "wpe") else "scale" if path[-1].startswith("ln") else "kernel"
        leaf = kind if last == "weight" else last
        flat[(*path, leaf)] = tensor.T if leaf == "kernel" else tensor
    (tmp_path / "new" / "model.safetensors").unlink()
    (tmp_path / "new" / "flax_model.msgpack").write_bytes(msgpack_serialize(unflatten_dict(flat)))
    again, back = load(tmp_path / "new")
    assert again == cfg
    jax.tree.map(np.testing.assert_array_equal, back, params)
    (tmp_path / "new" / "flax_model.msgpack").write_bytes(b"\x93nonsense")
    with pytest.raises(ValueError, match="flax_model.msgpack"):
        load(tmp_path / "new")


def test_several_files_without_an_index(tmp_path):
    published.folder(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({"x": np.ones(2, np.float32)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="2 safetensors files and no"):
        load(tmp_path)
