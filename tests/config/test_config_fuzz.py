"""Damaged config.json and generation_config.json: read, or refused by ValueError, in little time and memory."""

import copy
import json
import resource
import time

import numpy as np
import published
import pytest
import tiny
from golden import weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.cli import pretrained
from jaxformer.config import spec as specs
from jaxformer.config.strict import from_dict, to_dict
from jaxformer.hf.load import prepare, read_config
from jaxformer.tokenizers import tokenizer
from jaxformer.training import run

WORDS = (
    "x",
    "evil:",
    "rope",
    "latent",
    "relative",
    "none",
    "yarn",
    "llama3",
    "float16",
    "f4,f4",
    "sliding_attention",
    "\ud800",
)
NUMBERS = (0, 1, -1, 2, 7, 2**31, 2**63, 10**9, 10**400, 0.5, 1e-300, 1e308, float("nan"), float("inf"))
ODD = st.sampled_from([None, True, False, *WORDS, *NUMBERS]) | st.integers() | st.floats() | st.text(max_size=3)
NAMES = st.sampled_from(["component", "factor", "rope_theta", "rope_type", "full_attention", "x"])
VALUES = st.recursive(ODD, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=5)
RAW = st.sampled_from([b"", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"\xff", b'"\\ud800"', b"1e999", b"}"])


def places(value, above=()):
    """The path of every value inside a value."""
    for step, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*above, step)
        yield from places(inner, (*above, step))


@st.composite
def damaged(draw, bases):
    """The name of one of the ``bases``, and the bytes of its file with a few values replaced, removed, or put elsewhere."""
    name = draw(st.sampled_from(sorted(bases)))
    values = copy.deepcopy(bases[name])
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from(list(places(values)) or [("x",)]))
        parent = values
        for step in above:
            parent = parent[step]
        other = draw(st.sampled_from(sorted(bases)))
        how = draw(st.sampled_from(["other", "elsewhere", "new", "new"])) if isinstance(parent, dict) else "new"
        if how == "elsewhere":
            parent[draw(st.sampled_from(sorted(bases[other])))] = parent.pop(last, None)
        else:
            parent[last] = copy.deepcopy(bases[other].get(last)) if how == "other" else copy.deepcopy(draw(VALUES))
    text = json.dumps(values).encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(RAW) + text[at + draw(st.integers(0, 9)) :]
    return name, text


def attempt(read, bases, examples):
    """Calls ``read(name, text)`` with so many damaged files."""
    refused = 0

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(damaged(bases))
    def one(case):
        nonlocal refused
        began, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            read(*case)
        except (ValueError, FileNotFoundError):  # anything else fails the test
            refused += 1
        assert time.process_time() - began < 2
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 500 * 1024  # in KiB, as Linux counts

    one()
    assert refused > examples / 4


@pytest.mark.parametrize("examples", [60, 2000])
def test_of_a_run(examples, tmp_path):
    def read(name, text):
        (tmp_path / "config.json").write_bytes(text)
        cfg = run.read_run(tmp_path).model
        specs.abstract(jf.model.spec(cfg), cfg)

    attempt(read, {name: to_dict(jf.Config(model=cfg)) for name, cfg in tiny.PRESETS.items()}, examples)


@pytest.mark.parametrize("examples", [60, 2000])
def test_of_a_published_folder(examples, tmp_path):
    def read(name, text):
        if not (tmp_path / name).exists():
            published.folder(tmp_path / name, name)
        (tmp_path / name / "config.json").write_bytes(text)
        prepare(tmp_path / name)

    attempt(read, {name: weights.load(name)[0] for name in published.NAMES}, examples)


@pytest.mark.parametrize("examples", [60, 2000])
def test_of_how_outputs_end(examples, tmp_path):
    def read(name, text):
        (tmp_path / "generation_config.json").write_bytes(text)
        ends = pretrained.ends(tmp_path, tokenizer.Bytes())
        assert all(type(i) is int and 0 <= i < 2**31 for i in ends)

    attempt(read, {"one": {"eos_token_id": 1}, "several": {"eos_token_id": [1, 2], "do_sample": True}}, examples)


PUBLISHED = [
    ("qwen2_window", {"max_window_layers": "x"}, "max_window_layers='x' must be an integer"),
    ("qwen2_window", {"use_sliding_window": "false"}, "use_sliding_window='false' must be true or false"),
    ("qwen3_moe", {"mlp_only_layers": [[0]]}, "wrong kind: unhashable"),
    ("gemma3_text", {"sliding_window_pattern": 0.0, "_sliding_window_pattern": None, "sliding_window": [1]}, "wrong kind"),
    ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": 3}}, "wrong kind"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, but the folder has only"),
    ("qwen3_moe", {"num_experts": 10**9, "num_local_experts": None}, "num_experts=1000000000, but the folder has only"),
    ("llama", {"hidden_size": 2**63}, "d_model=9223372036854775808 must be an integer of at most 64 bits"),
    ("llama", {"rms_norm_eps": 1e300}, "norm_eps=1e.300 must be between"),
    ("t5_v11", {"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or false"),
]


@pytest.mark.parametrize(("name", "fields", "message"), PUBLISHED, ids=[f"{n}-{next(iter(f))}" for n, f, _ in PUBLISHED])
def test_what_a_published_folder_was_found_to_stumble_over(name, fields, message, tmp_path):
    published.folder(tmp_path, name, config=weights.load(name)[0] | fields)
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path)


def test_a_table_of_sines_is_not_computed_before_its_shape_is_known(tmp_path):
    config, tensors, _ = weights.load("marian")
    table = {"model.encoder.embed_positions.weight": np.zeros((8, config["d_model"]), np.float32)}
    published.folder(tmp_path, "marian", config | {"max_position_embeddings": 10**9}, tensors | table)
    with pytest.raises(ValueError, match=r"embed_positions\.weight differs from the table that the model computes"):
        prepare(tmp_path)


def test_a_list_of_layers_is_not_made_before_its_length_is_known():
    config = {"model_type": "gpt_neo", "vocab_size": 8, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
    config |= {"max_position_embeddings": 8, "attention_types": [[["global"], 10**12]]}
    with pytest.raises(ValueError, match="do not fit num_layers=2"):
        read_config(config, ())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layers": 10**9}, "n_layers=1000000000 must be at least 1 and below 1025"),
        ({"encoder_layers": 10**9}, "encoder_layers=1000000000 must be at least 0 and below 1025"),
        ({"d_model": 2**63}, "d_model=9223372036854775808 must be an integer of at most 64 bits"),
        ({"norm_eps": 10**400}, "norm_eps=1000.* must be between"),
    ],
)
def test_numbers_that_no_machine_holds_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        from_dict(jf.ModelConfig, to_dict(tiny.PRESETS["llama_mha"]) | fields)


@pytest.mark.parametrize("value", ["2", [2, "3"], 1.5, True, [[1]], {"a": 1}, 2**40, -(2**70)])
def test_ends_of_outputs_that_are_no_ids_are_refused(value, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ValueError, match="eos_token_id=.* is not the id of a token"):
        pretrained.ends(tmp_path, tokenizer.Bytes())
