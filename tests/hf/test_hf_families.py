"""Families of published models that a user adds."""

import dataclasses
import json

import jax
import numpy as np
import published
import pytest
from golden import weights

import jaxformer as jf
from jaxformer.hf import load, save
from jaxformer.hf.__main__ import info
from jaxformer.hf.verify import compare

TOLERANCE = 5e-5  # as in test_hf


def test_a_family_can_be_added_from_outside(tmp_path, monkeypatch, capsys):
    """LLaMA with another name for an epsilon and for a tensor, and a field of its own that says how wide windows are."""

    def tensors(cfg):
        table = llama.tensors(cfg)
        return table | {"decoder.norm.gain": table["decoder.norm.gain"]._replace(name="model.last_norm.weight")}

    llama = jf.hf.FAMILIES["llama"]
    fields = {"norm_eps": jf.hf.Field("norm_epsilon", 1e-6), "window": jf.hf.Field("reach", None)}
    acme = dataclasses.replace(
        llama,
        architecture="AcmeForCausalLM",
        fields=llama.fields | fields,
        tensors=tensors,
        only=llama.only | {"twisted": False},
    )
    config, stored, reference = weights.load("llama")
    config = config | {"model_type": "acme", "norm_epsilon": config["rms_norm_eps"]}
    del config["rms_norm_eps"]
    stored["model.last_norm.weight"] = stored.pop("model.norm.weight")
    published.folder(tmp_path / "acme", "llama", config=config, tensors=stored)
    with pytest.raises(ValueError, match="model_type='acme' is not supported"):
        load(tmp_path / "acme")

    monkeypatch.setitem(jf.hf.FAMILIES, "acme", acme)
    cfg, params = load(tmp_path / "acme")
    rows = list(compare(cfg, params, "acme", only_forward(reference), 2, 0))
    assert len(rows) == 2 and all(row.relative < TOLERANCE for row in rows)
    info(str(tmp_path / "acme"))
    assert capsys.readouterr().out.startswith("acme: ")
    with pytest.raises(ValueError, match="twisted=True is not supported"):
        load(tmp_path / "acme", config=config | {"twisted": True})

    cfg = dataclasses.replace(cfg, window=3)
    save(tmp_path / "saved", cfg, params, "acme")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (written["reach"], written["architectures"]) == (3, ["AcmeForCausalLM"]) and "rms_norm_eps" not in written
    again, back = load(tmp_path / "saved")
    assert again == cfg
    jax.tree.map(np.testing.assert_array_equal, back, params)
    with pytest.raises(ValueError, match=r"acme: scale_embedding=True \(it has False\)"):
        save(tmp_path / "other", dataclasses.replace(cfg, scale_embedding=True), params, "acme")


def test_layers_of_a_second_component_are_read_from_their_own_files(tmp_path, monkeypatch):
    llama = jf.hf.FAMILIES["llama"]

    def tensors(cfg):
        table = dict(llama.tensors(cfg))
        return table | {path.replace(".mlp.", ".mlp_2."): source for path, source in table.items() if ".mlp." in path}

    fields = llama.fields | {"mlp": jf.hf.Rule(lambda reader: (reader("hidden_act", "silu"), ("swiglu", "geglu"))[1])}
    cfg = jf.presets.llama(vocab_size=16, d_model=16, n_layers=2, n_heads=2, max_length=32, rope_layout="half")
    params = jf.init(cfg, jax.random.key(0))
    jf.hf.save(tmp_path / "acme", cfg, params)
    path = tmp_path / "acme" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "acme"}))
    monkeypatch.setitem(jf.hf.FAMILIES, "acme", dataclasses.replace(llama, fields=fields, tensors=tensors))
    layers = load(tmp_path / "acme")[1]["decoder"]["layers"]
    expected = params["decoder"]["layers"]["mlp"]["up"]
    assert (expected[0] != expected[1]).any()
    np.testing.assert_array_equal(layers["mlp"]["up"], expected[:1])
    np.testing.assert_array_equal(layers["mlp_2"]["up"], expected[1:])


def only_forward(reference):
    names = ("input_ids", "attention_mask", "logits_unpadded", "logits_padded", "unpadded_rows")
    return {name: reference[name] for name in names}
