"""What transformers would read in another way, said twice and differently, or not at all: refused by name."""

import json

import jax
import numpy as np
import published
import pytest
from golden import weights
from safetensors.numpy import save_file

from jaxformer.hf import load, save
from jaxformer.hf.verify import compare
from jaxformer.tokenizers import tokenizer

ROPE = {"rope_type": "default", "rope_theta": 5000.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
KINDS = {"full_attention": ROPE, "sliding_attention": ROPE}
REFUSED = [
    ("llama", {"rope_parameters": ROPE, "rope_scaling": YARN}, "rope_parameters and rope_scaling differ"),
    ("llama", {"rope_parameters": ROPE, "rope_theta": 77.0}, "rope_theta is 5000.0 in one place and 77.0 in another"),
    (
        "llama",
        {"rope_parameters": None, "rope_theta": 77.0, "rope_scaling": YARN | {"rope_theta": 5.0}},
        "rope_theta is 5.0 in",
    ),
    ("llama", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 would not be honoured"),
    ("llama", {"partial_rotary_factor": 0.5}, "would not be honoured: partial_rotary_factor=0.5"),
    ("llama", {"rotary_emb_base": 77.0}, "would not be honoured: rotary_emb_base=77.0"),
    ("llama", {"rope_parameters": KINDS}, "must be of one kind"),
    ("llama", {"rope_parameters": [1]}, r"rope_parameters=\[1\] must be an object"),
    ("llama", {"rope_parameters": ROPE | {"rope_theta": "x"}}, "rope_theta='x' must be a number"),
    ("llama", {"rope_parameters": ROPE | {"rope_type": ["linear"]}}, r"rope type \['linear'\] is not supported"),
    ("llama", {"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] is not supported"),
    ("llama", {"model_type": ["llama"]}, r"model_type=\['llama'\] is not supported"),
    ("llama", {"num_key_value_heads": 4, "is_encoder_decoder": True}, "is_encoder_decoder=True"),
    ("llama_rope_dynamic", {"original": 8}, "original_max_position_embeddings=8 would not be honoured by rope type 'dynamic'"),
    ("gpt_neox", {"rope_theta": 77.0}, "would not be honoured: rope_theta=77.0"),
    ("gpt_neox", {"rotary_pct": 0.25}, "partial_rotary_factor is 0.5 in one place and 0.25 in another"),
    ("gemma", {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}, "hidden_act='silu' and hidden_activation="),
    ("gemma2", {"hidden_activation": None, "hidden_act": "silu"}, "hidden_act='silu' and hidden_activation="),
    ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar=None must be a number"),
    ("gemma3_text", {"rope_parameters": ROPE}, "must be by kind of attention"),
    ("gemma3_text", {"layer_types": None, "_sliding_window_pattern": 3}, "_sliding_window_pattern would not be honoured"),
    (
        "phi3",
        {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}},
        "rope type 'linear' is not one of this family's",
    ),
    ("t5_v10", {"feed_forward_proj": "gated-gelu"}, "dense_act_fn='relu' is not supported"),
    ("bart", {"num_hidden_layers": 7}, "num_hidden_layers=7 is not supported"),
    ("mistral", {"attention_bias": True}, "attention_bias=True is not supported"),
    ("qwen2", {"use_mrope": True}, "use_mrope=True is not supported"),
    ("mixtral", {"num_experts": 7}, "give different values for the same thing"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "would not be honoured: quantization_config"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED, ids=[f"{n}-{'-'.join(f)}" for n, f, _ in REFUSED])
def test_a_config_that_would_be_read_otherwise(name, fields, message, tmp_path):
    config = weights.load(name)[0]
    if "original" in fields:
        rope = config["rope_parameters"] | {"original_max_position_embeddings": fields["original"]}
        fields = {"rope_parameters": rope}
    published.folder(tmp_path, name, config=config | fields)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


HARMLESS = {"_num_labels": 3, "use_mrope": False, "cache_implementation": "hybrid", "pruned_heads": {}, "auto_map": {"a": "b"}}


@pytest.mark.parametrize(
    ("name", "fields"), [("qwen2", HARMLESS), ("bart", {"activation_dropout": 0.1, "classif_dropout": 0.0})]
)
def test_fields_without_effect_are_let_through(name, fields, tmp_path, caplog):
    config = weights.load(name)[0]
    fields = {key: value for key, value in fields.items() if name == "qwen2" or key not in HARMLESS}
    published.folder(tmp_path / "a", name)
    published.folder(tmp_path / "b", name, config=config | fields)
    assert load(tmp_path / "a")[0] == load(tmp_path / "b")[0]
    assert ("activation_dropout=0.1 is ignored if" in caplog.text) == (name == "bart")


def test_both_spellings_may_stand_there_if_they_agree(tmp_path):
    config = weights.load("llama_rope_yarn")[0]
    rope = config["rope_parameters"]
    both = config | {"rope_theta": rope["rope_theta"], "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"}}
    published.folder(tmp_path / "a", "llama_rope_yarn")
    published.folder(tmp_path / "b", "llama_rope_yarn", config=both)
    assert load(tmp_path / "a")[0] == load(tmp_path / "b")[0]


def test_neo_goes_by_its_list_of_layers(tmp_path):
    from jaxformer.hf.load import read_config

    config = {"model_type": "gpt_neo", "vocab_size": 8, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
    config |= {"max_position_embeddings": 8, "window_size": 3, "attention_layers": ["local", "global"]}
    assert [layer.window for layer in read_config(config, ())[1].layers] == [3, None]
    with pytest.raises(ValueError, match="attention_layers=.* are not those of attention_types"):
        read_config(config | {"attention_types": [[["global", "local"], 1]]}, ())


def test_a_swish_that_is_not_gated(tmp_path):
    config = weights.load("marian")[0]
    published.folder(tmp_path, "marian", config=config | {"activation_function": "swish"})
    assert load(tmp_path)[0].mlp == "silu"


# Files


def test_marian_s_own_sines_are_those_that_are_computed(tmp_path):
    config, tensors, _ = weights.load("marian")
    width, rows = config["d_model"], config["max_position_embeddings"]
    angle = np.arange(rows)[:, None] / 10_000.0 ** (np.arange(0, width, 2) / width)
    table = np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)
    name = "model.encoder.embed_positions.weight"
    published.folder(tmp_path, "marian", tensors=tensors | {name: table})
    load(tmp_path)
    published.folder(tmp_path, "marian", tensors=tensors | {name: table + 0.1})
    with pytest.raises(ValueError, match="embed_positions.weight differs from the table that the model computes"):
        load(tmp_path)


def test_bare_and_older_names(tmp_path):
    """BartModel's files have no prefix and no bias of the logits; early BERTs say gamma and beta."""
    _, tensors, _ = weights.load("bart")
    bare = {n.removeprefix("model."): t for n, t in tensors.items() if n != "final_logits_bias"}
    published.folder(tmp_path / "bart", "bart", tensors=bare)
    cfg, params = load(tmp_path / "bart")
    assert not cfg.head_bias
    np.testing.assert_array_equal(params["embedding"]["token"], tensors["model.shared.weight"])
    _, tensors, _ = weights.load("bert_mlm")
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    older = {}
    for name, tensor in tensors.items():
        end = ".".join(name.split(".")[-2:])
        older[name.replace(end, names.get(end, end))] = tensor
    assert older.keys() != tensors.keys()
    published.folder(tmp_path / "new", "bert_mlm")
    published.folder(tmp_path / "old", "bert_mlm", tensors=older)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "new")[1], load(tmp_path / "old")[1])


def test_what_stands_in_two_places_is_refused(tmp_path):
    cfg, params = published.model("llama")
    save(tmp_path / "x", cfg, params, shard_bytes=30_000)
    shards = sorted((tmp_path / "x").glob("*.safetensors"))
    published.folder(tmp_path / "y", "llama")
    (tmp_path / "y" / "model.safetensors").rename(tmp_path / "x" / "model.safetensors")
    with pytest.raises(ValueError, match="has both model.safetensors and model.safetensors.index.json"):
        load(tmp_path / "x")
    (tmp_path / "x" / "model.safetensors").unlink()
    shards[0].write_bytes(shards[1].read_bytes())
    with pytest.raises(ValueError, match=f"is in {shards[0].name} and in {shards[1].name}"):
        load(tmp_path / "x")


def test_weights_that_are_no_floats(tmp_path):
    _, tensors, _ = weights.load("llama")
    name = "model.norm.weight"
    published.folder(tmp_path, "llama", tensors=tensors | {name: tensors[name].astype(np.int64)})
    with pytest.raises(ValueError, match=r"dtypes that are not supported: model.norm.weight \(I64\)"):
        load(tmp_path)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.int16)}
    published.folder(tmp_path, "llama", tensors=tensors | buffer)
    load(tmp_path)


def test_quantised_flax_kernels(tmp_path):
    from flax.serialization import msgpack_serialize

    config, _, _ = weights.load("gpt2")
    kernel = np.ones((2, 2), np.int8)
    tree = {"transformer": {"wte": {"embedding": kernel}}}
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    tmp_path.joinpath("flax_model.msgpack").write_bytes(msgpack_serialize(tree))
    with pytest.raises(ValueError, match="missing     transformer.h.0"):
        load(tmp_path)
    (tmp_path / "flax_model.msgpack").rename(tmp_path / "flax_model-00001-of-00002.msgpack")
    with pytest.raises(FileNotFoundError, match="has its flax_model.msgpack in 1 parts"):
        load(tmp_path)


# Arguments


def test_arguments_are_checked(tmp_path):
    published.folder(tmp_path, "llama")
    for wrong, message in (({"dtype": "bf16"}, "dtype='bf16' is not a dtype"), ({"ignore": "x"}, "must be a list of patterns")):
        with pytest.raises(ValueError, match=message):
            load(tmp_path, **wrong)
    with pytest.raises(ValueError, match="a dict"):
        load(tmp_path, config="config.json")
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*config\.json"):
        load(tmp_path)


def test_a_tokenizer_has_no_more_ids_than_the_model_rows(tmp_path):
    cfg, params = published.model("llama")
    with pytest.raises(ValueError, match="tok has 259 ids, but the model has rows for 61"):
        save(tmp_path / "x", cfg, params, tok=tokenizer.load("byte"))
    tok = tokenizer.train("char", ["abc"])
    save(tmp_path / "x", cfg, params, tok=tok)
    ids = {
        name: value for name, value in json.loads((tmp_path / "x/config.json").read_text()).items() if name.endswith("token_id")
    }
    assert ids == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    assert tokenizer.load(tmp_path / "x").encode("abc") == tok.encode("abc")


def test_a_reference_with_nothing_to_compare_is_no_pass():
    cfg, params = published.model("llama")
    with pytest.raises(ValueError, match="holds nothing that can be compared, only: input_ids, result"):
        list(compare(cfg, params, "llama", {"input_ids": np.zeros((1, 2), int), "result": np.zeros(1)}, None, None))


def test_an_unindexed_file_beside_is_not_read(tmp_path):
    published.folder(tmp_path, "llama")
    save_file({"x": np.ones(2, np.float32)}, tmp_path / "consolidated.safetensors")
    load(tmp_path)
