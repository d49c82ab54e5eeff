"""Sizes in config.json that no file has: refused from names and shapes, before anything of that size is made."""

import dataclasses
import json
import resource
import time

import jax
import numpy as np
import published
import pytest
from golden import weights

import jaxformer as jf
from jaxformer.hf import load
from jaxformer.hf.load import read_config
from jaxformer.training import run
from jaxformer.training.checkpoints import Checkpoints

SECONDS, BYTES = 2.0, 300 * 2**20
"""Bounds of the time that a refusal takes on a busy machine (a second on an idle one), and of the memory. Without the checks
each case takes minutes, or gigabytes."""


def refused(read, message):
    """``read`` raises a ValueError that matches, at once, without much memory."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ValueError, match=message):
        read()
    assert time.process_time() - began < SECONDS
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < BYTES


PUBLISHED = [
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, but the folder has only .* tensors"),
    ("llama", {"num_hidden_layers": 900}, "missing     model.layers.899."),
    ("gpt2", {"n_layer": 10**9}, "n_layer=1000000000, but"),
    ("bart", {"encoder_layers": 10**9, "num_hidden_layers": 10**9}, "encoder_layers=1000000000, but"),
    ("t5_v10", {"num_decoder_layers": 10**9}, "num_decoder_layers=1000000000, but"),
    ("mixtral", {"num_local_experts": 10**9, "num_experts": None}, "num_local_experts=1000000000, but"),
    ("mixtral", {"num_local_experts": 900, "num_experts": None}, "1800 experts in all layers, but the folder has only"),
    ("deepseek_v3", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, but"),
    ("llama", {"vocab_size": 10**12}, "vocab_size=1000000000000 must be at least 1 and below"),
    ("llama", {"vocab_size": 10**9}, r"model.embed_tokens.weight  expected \[1000000000, "),
    ("llama", {"hidden_size": 10**9, "head_dim": 8}, "differs .*expected .*1000000000"),
    ("llama", {"intermediate_size": 10**9}, "differs .*expected .*1000000000"),
    ("gpt2", {"n_positions": 10**9}, r"wpe.weight  expected \[1000000000, "),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}}, "401 digits"),
    ("llama", {"rms_norm_eps": 10**400}, "401 digits"),
    ("llama", {"num_attention_heads": 10**9, "num_key_value_heads": 10**9, "head_dim": 8}, "differs .*expected .*8000000000"),
]


@pytest.mark.parametrize(("name", "fields", "message"), PUBLISHED)
def test_published_folders(name, fields, message, tmp_path):
    config = weights.load(name)[0] | fields
    published.folder(tmp_path, name, config)
    refused(lambda: load(tmp_path), message)


NEO = {"model_type": "gpt_neo", "hidden_size": 8, "num_heads": 2, "vocab_size": 11, "max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 10**9}, "num_layers=1000000000, but the folder has only 1 tensors"),
        (
            {"num_layers": 2, "attention_types": [[["global", "local"], 10**9]]},
            "attention_types=.*000.* do not fit num_layers=2",
        ),
    ],
)
def test_layers_of_gpt_neo(fields, message):
    refused(lambda: read_config(NEO | fields, ["wte.weight"]), message)


def test_a_table_of_sines_is_compared_by_its_shape_first(tmp_path):
    config, tensors, _ = weights.load("marian")
    name, table = "model.encoder.embed_positions.weight", np.zeros((4, config["d_model"]), np.float32)
    published.folder(tmp_path, "marian", config | {"max_position_embeddings": 10**9}, tensors | {name: table})
    refused(lambda: load(tmp_path), "embed_positions.weight differs from the table that the model computes")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run, with a checkpoint."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    cfg = jf.presets.llama(vocab_size=259, d_model=16, n_layers=1, n_heads=2)
    config = jf.Config(model=cfg, data=jf.DataConfig(tokenizer="byte"))
    run.write_run(directory, config, jf.tokenizer.train("byte", []))
    with Checkpoints(directory / "checkpoints") as checkpoints:
        checkpoints.save(run.initial_state(config))
    return directory


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layers": 10**9}, "n_layers=1000000000 must be at least 1 and below"),
        ({"n_layers": 1000}, r"\[1000, "),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000 must be"),
        ({"vocab_size": 2 * 10**9}, r"\[2000000000, "),
        ({"d_model": 2 * 10**9}, "2000000000"),
        ({"d_ff": 2 * 10**9}, "2000000000"),
        ({"encoder_layers": 10**9}, "encoder_layers=1000000000 must be"),
        ({"window": 10**400, "norm_eps": 10**400}, "norm_eps=.* must be between|401 digits"),
    ],
)
def test_runs(fields, message, trained, tmp_path):
    values = json.loads((trained / "config.json").read_text())
    del values["checksums"]
    values["model"] |= fields
    for name in ("checkpoints", "tokenizer.json"):
        (tmp_path / name).symlink_to(trained / name)
    (tmp_path / "config.json").write_text(json.dumps(values))
    refused(lambda: jf.load(tmp_path), message)


def test_the_most_layers_are_quick_to_describe():
    cfg = jf.presets.llama(vocab_size=67, d_model=16, n_layers=1024, n_heads=2)
    experts = jf.Experts(n_experts=4, d_ff=8, layers=tuple(range(0, 1024, 2)))
    for deep in (cfg, dataclasses.replace(cfg, experts=experts), dataclasses.replace(cfg, window=(4, None, 5, 6) * 256)):
        began = time.process_time()
        spec = jf.model.spec(deep)
        assert time.process_time() - began < SECONDS
        shapes = [param.shape(deep) for param in jax.tree.leaves(spec, is_leaf=lambda leaf: isinstance(leaf, jf.Param))]
        assert any(shape[0] == 1024 for shape in shapes)
