"""ModelConfig: derived fields, refused values, files."""

import copy
import dataclasses
import functools
import inspect
import json
import pickle
import pydoc
import re
import sys

import example_components
import jax
import jax.numpy as jnp
import pytest
import tiny

import jaxformer as jf
from jaxformer.config.strict import from_dict, to_json
from jaxformer.tokenizers import tokenizer
from jaxformer.training.run import write_run

CFG = tiny.PRESETS["llama_gqa"]
SIZES = {"vocab_size": 11, "d_model": 8, "n_layers": 2, "n_heads": 4}
FULL_SIZE = ["transformer_base", "transformer_big", "decoder_2017", "gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl"]
FULL_SIZE += ["llama2_7b", "llama2_70b", "llama3_8b", "llama3_1_8b", "llama3_1_70b", "llama3_2_1b"]
FULL_SIZE += ["qwen2_5_0_5b", "qwen3_0_6b", "mistral_7b"]
NARROW = ("float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")
"""Dtypes that JAX has a name for and no arithmetic of: some end the process, others give wrong numbers."""
NO_SEEDS = (-1, 2**32, 2**32 + 1, 2**64)


def test_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CFG.n_layers = 4
    same, other = dataclasses.replace(CFG), dataclasses.replace(CFG, norm_eps=1e-3)
    assert same is not CFG and {CFG: 1}[same] == 1
    assert other != CFG and other not in {CFG: 1}


def test_equal_configs_share_a_compilation():
    traced = []
    f = jax.jit(lambda cfg, x: traced.append(cfg) or x * cfg.d_model, static_argnums=0)
    f(CFG, 1.0), f(dataclasses.replace(CFG), 1.0)
    assert len(traced) == 1
    f(dataclasses.replace(CFG, norm_eps=1e-3), 1.0)
    assert len(traced) == 2


def test_defaults_of_derived_fields():
    cfg = jf.ModelConfig(**SIZES)
    assert (cfg.n_kv_heads, cfg.head_dim, cfg.d_ff) == (4, 2, 32)
    assert cfg.sizes == {"D": 8, "L": 2, "K": 4, "G": 1, "H": 2, "F": 32, "V": 11, "P": 2048, "O": 8}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"d_model": 16}, {"head_dim": 4, "d_ff": 64, "n_kv_heads": 4}),
        ({"n_heads": 2}, {"head_dim": 4, "d_ff": 32, "n_kv_heads": 2}),
        ({"d_model": 16, "head_dim": 6}, {"head_dim": 6, "d_ff": 64, "n_kv_heads": 4}),
    ],
)
def test_replace_works_derived_fields_out_again(change, expected):
    cfg = dataclasses.replace(jf.ModelConfig(**SIZES), **change)
    assert {name: getattr(cfg, name) for name in expected} == expected
    again = dataclasses.replace(cfg, n_layers=5)
    assert {name: getattr(again, name) for name in expected} == expected


SMALL_SIZES = {"vocab_size": 11, "d_model": 64, "n_layers": 2, "n_heads": 8}


@pytest.mark.parametrize("change", [{"d_model": 128}, {"n_heads": 16}, {"n_layers": 1}, {"d_model": 128, "d_ff": 20}])
@pytest.mark.parametrize("name", ["llama", "transformer_base", "decoder_2017", "gpt2", "qwen3_0_6b"])
def test_what_a_preset_derives_follows_a_change(name, change):
    """Widths and depths that a preset works out are those of the preset with the change, however it is made."""
    preset = getattr(jf.presets, name)
    before, asked = preset(**SMALL_SIZES), preset(**SMALL_SIZES | change)
    assert before != asked
    assert dataclasses.replace(before, **change) == asked
    assert dataclasses.replace(copy.deepcopy(pickle.loads(pickle.dumps(before))), **change) == asked


def test_what_a_preset_derives_is_written_as_a_number():
    cfg = jf.presets.llama(**SMALL_SIZES)
    assert cfg.d_ff == 176 != 4 * cfg.d_model
    assert json.loads(to_json(cfg))["d_ff"] == 176
    paired = jf.presets.transformer_base(**SMALL_SIZES)
    assert (paired.encoder_layers, round_trip(paired)) == (2, paired)


@pytest.mark.parametrize("explicit", [{"n_kv_heads": 2}, {"head_dim": 4}, {"d_ff": 20}, {"n_kv_heads": 4}, {"d_ff": 32}])
def test_replace_keeps_what_was_given(explicit):
    """Also where what was given is what would have been derived."""
    derived = dataclasses.replace(jf.ModelConfig(**SIZES), d_model=64, n_heads=8)
    kept = dataclasses.replace(jf.ModelConfig(**SIZES, **explicit), d_model=64, n_heads=8)
    for name in ("n_kv_heads", "head_dim", "d_ff"):
        assert getattr(kept, name) == explicit.get(name, getattr(derived, name))
        assert name not in explicit or explicit[name] != getattr(derived, name)


WRONG = [
    ({"n_heads": 3, "head_dim": 8}, "n_heads=3 is not divisible by n_kv_heads=2"),
    ({"n_kv_heads": 3}, "n_heads=4 is not divisible by n_kv_heads=3"),
    ({"n_heads": 5, "n_kv_heads": 5}, "d_model=32 is not divisible by n_heads=5"),
    ({"head_dim": 7}, "head_dim=7 is odd"),
    ({"d_model": 33, "head_dim": 8, "position": "sinusoidal"}, "d_model=33 is odd"),
    ({"n_layers": 0}, "n_layers=0 must be at least 1"),
    ({"n_layers": 2.0}, "n_layers=2.0 must be an integer"),
    ({"n_layers": True}, "n_layers=True must be an integer"),
    ({"d_model": "32"}, "d_model='32' must be an integer"),
    ({"n_kv_heads": 0}, "n_kv_heads=0"),
    ({"d_ff": -1}, "d_ff=-1"),
    ({"encoder_layers": -1}, "encoder_layers=-1"),
    ({"window": (4, 4)}, "window has 2 entries, but n_layers=3"),
    ({"window": 0}, "window=0"),
    ({"window": (4, None, 0)}, "window=0"),
    ({"window": 2.5}, "window=2.5"),
    ({"d_model": 33, "head_dim": 8, "position": "sinusoidal_half"}, "d_model=33 is odd"),
    ({"encoder_layers": 1, "encoder_heads": 0}, "encoder_heads=0 must be at least 1"),
    ({"encoder_layers": 1, "encoder_heads": 2.0}, "encoder_heads=2.0 must be an integer"),
    ({"encoder_layers": 1, "encoder_heads": 3, "n_kv_heads": 1}, "d_model=32 is not divisible by encoder_heads=3"),
    ({"encoder_layers": 1, "encoder_heads": 1}, "encoder_heads=1 is not divisible by n_kv_heads=2"),
    ({"encoder_layers": 1, "encoder_heads": 32}, "head_dim=1 is odd"),
    ({"encoder_layers": 1, "encoder_d_ff": 0}, "encoder_d_ff=0 must be at least 1"),
    ({"encoder_layers": 1, "encoder_d_ff": "8"}, "encoder_d_ff='8' must be an integer"),
    ({"attention_scale": 0.0}, "attention_scale=0.0 must be above 0"),
    ({"attention_scale": float("nan")}, "attention_scale=nan must be a finite number"),
    ({"head_bias": 1}, "head_bias=1 must be True or False"),
    ({"scale_head": "yes"}, "scale_head='yes' must be True or False"),
    ({"embedding_norm": None}, "embedding_norm=None must be True or False"),
    ({"relative_buckets": 1}, "relative_buckets=1"),
    ({"relative_buckets": 8.0}, "relative_buckets=8.0 must be an integer"),
    ({"relative_distance": 1}, "relative_distance=1"),
    # half of the buckets hold one distance each: the rest must have distances left
    ({"position": "relative", "relative_distance": 16}, "relative_distance=16.*relative_buckets=32"),
    ({"position": "relative", "relative_buckets": 3, "causal": False}, "relative_buckets=3"),
    ({"position": "relative", "relative_buckets": 2, "encoder_layers": 1}, "relative_buckets=2"),
    ({"start_token": 67}, "start_token=67 must be at least 0 and below 67"),
    ({"start_token": 1.5}, "start_token=1.5"),
    ({"attention_dropout": 1.0}, "attention_dropout=1.0"),
    ({"residual_dropout": -0.1}, "residual_dropout=-0.1"),
    ({"embedding_dropout": float("nan")}, "embedding_dropout=nan"),
    ({"attention_dropout": "0.1"}, "attention_dropout='0.1'"),
    ({"norm_eps": 0.0}, "norm_eps=0.0"),
    ({"norm_eps": "1e-5"}, "norm_eps='1e-5'"),
    ({"norm_eps": None}, "norm_eps=None"),
    ({"norm_eps": 1e-60}, "norm_eps=1e-60 must be between 1.18e-38 and 3.4e.38 in absolute value"),
    ({"norm_eps": 1e-40}, "norm_eps=1e-40 must be between 1.18e-38"),  # devices make 0 of what is below the normal numbers
    ({"rope_theta": 10**60}, "rope_theta=10{60} must be between"),
    ({"rope_theta": 10**400}, "rope_theta=10.* must be between"),
    ({"attention_scale": -1e60}, "attention_scale=-1e.60 must be between"),
    ({"attention_dropout": 1 - 1e-12}, "attention_dropout=0.9.* must be at least 0 and below 1 .it is 1 in float32"),
    ({"rope_theta": float("inf")}, "rope_theta=inf"),
    ({"rope_theta": None}, "rope_theta=None"),
    ({"init_std": None}, "init_std=None"),
    ({"logit_softcap": -1.0}, "logit_softcap=-1.0"),
    ({"residual": "prenorm"}, "residual.*'pre'"),
    ({"rope_layout": "halves"}, "rope_layout.*'half'"),
    ({"init": "xavjer"}, "init.*did you mean 'xavier'"),
    ({"remat": "dot"}, "remat.*did you mean 'dots'"),
    ({"dtype": "float31"}, "dtype='float31' is not a dtype"),
    ({"dtype": "int32"}, "dtype='int32' must be a floating dtype"),
    ({"dtype": None}, "dtype=None"),
    *(
        ({field: name}, f"{field}='{name}' must be a floating dtype: f")
        for name in NARROW
        for field in ("dtype", "param_dtype")
    ),
    ({"param_dtype": "b"}, "param_dtype='b'"),
    ({"mlp": "swigl"}, "mlp 'swigl'; did you mean 'swiglu'"),
    ({"mlp": ""}, "mlp ''"),
    ({"norm": "rmsnorm"}, "norm 'rmsnorm'.*'?rms"),
    ({"position": "rotary"}, "position 'rotary'.*rope"),
    ({"attention": "group"}, "did you mean 'grouped'"),
    ({"mlp": "no_such_module:thing"}, "mlp='no_such_module:thing': cannot import 'no_such_module'"),
    ({"mlp": "example_components:SquaredRelo"}, "mlp=.*did you mean 'SquaredRelu'"),
    ({"mlp": ".relative:thing"}, "mlp='.relative:thing'"),
    ({"mlp": ":thing"}, "mlp=':thing'"),
    ({"mlp": "json"}, "mlp 'json'"),
    ({"mlp": "json:dumps"}, "mlp='json:dumps': a component needs both spec"),
    ({"mlp": None}, "mlp=None: a component needs both spec"),
    ({"mlp": jf.mlp}, "mlp"),
    ({"n_layer": 2}, "no field 'n_layer'; did you mean 'n_layers'"),
    ({"causl": True}, "did you mean 'causal'"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_fits_no_model_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CFG, **change)


@pytest.mark.parametrize("name", FULL_SIZE)
def test_presets_refuse_unknown_fields(name):
    with pytest.raises(ValueError, match="no field 'n_layer'; did you mean 'n_layers'"):
        getattr(jf.presets, name)(n_layer=2)


def test_errors_of_constructors():
    with pytest.raises(ValueError, match="no field 'vocabsize'; did you mean 'vocab_size'"):
        jf.ModelConfig(vocabsize=11, d_model=8, n_layers=2, n_heads=4)
    with pytest.raises(ValueError, match="llama needs vocab_size.*'vocabsize'; did you mean 'vocab_size'"):
        jf.presets.llama(vocabsize=11, d_model=8, n_layers=2, n_heads=4)
    with pytest.raises(ValueError, match="no field 'n_kv_head'; did you mean 'n_kv_heads'"):
        jf.presets.llama(**SIZES, n_kv_head=2)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")])
def test_dtypes_are_kept_by_name(dtype):
    cfg = dataclasses.replace(CFG, dtype=dtype, param_dtype=dtype)
    assert (cfg.execution.dtype, cfg.param_dtype) == ("bfloat16", "bfloat16")


def test_configs_of_layers_and_encoder():
    cfg = tiny.PRESETS["mixed_windows"]
    assert [layer.window for layer in cfg.layers] == [4, None, 4]
    assert {dataclasses.replace(layer, window=cfg.window) for layer in cfg.layers} == {cfg}
    whole = dataclasses.replace(tiny.PRESETS["transformer_base"], encoder_layers=2)
    assert (whole.encoder.n_layers, whole.encoder.encoder_layers, whole.encoder.causal) == (2, 0, False)
    own = dataclasses.replace(whole, encoder_heads=8, encoder_d_ff=20)
    assert [(c.n_heads, c.n_kv_heads, c.head_dim, c.d_ff) for c in (own, own.encoder)] == [(4, 4, 8, 48), (8, 8, 4, 20)]


# The configs of a run


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jf.TrainConfig(steps=0), "steps=0"),
        (lambda: jf.TrainConfig(steps=2.5), "steps=2.5"),
        (lambda: jf.TrainConfig(microbatches=0), "microbatches=0"),
        (lambda: jf.TrainConfig(parallel="pmp"), "parallel.*did you mean 'pmap'"),
        (lambda: jf.TrainConfig(temperature=-1.0), "temperature=-1.0"),
        (lambda: jf.TrainConfig(sample_tokens=-1), "sample_tokens=-1"),
        (lambda: jf.TrainConfig(label_smoothing=1.0), "label_smoothing=1.0"),
        (lambda: jf.TrainConfig(loss_chunk=0), "loss_chunk=0"),
        *((functools.partial(jf.TrainConfig, seed=seed), f"seed={seed} must be an integer") for seed in NO_SEEDS),
        *((functools.partial(jf.DataConfig, seed=seed), f"seed={seed} must be") for seed in NO_SEEDS),
        (lambda: jf.TrainConfig(step=3), "no field 'step'; did you mean 'steps'"),
        (lambda: jf.OptimConfig(schedule="cosin"), "schedule 'cosin'; did you mean 'cosine'"),
        (lambda: jf.OptimConfig(lr=0.0), "lr=0.0"),
        (lambda: jf.OptimConfig(lr=float("nan")), "lr=nan"),
        (lambda: jf.OptimConfig(beta1=1.0), "beta1=1.0"),
        (lambda: jf.OptimConfig(beta2=1 - 1e-12), "optim.beta2=0.9.* below 1 .it is 1 in float32"),
        (lambda: jf.OptimConfig(eps=1e-60), "eps=1e-60 must be between"),
        (lambda: jf.OptimConfig(warmup_steps=-1), "warmup_steps=-1"),
        (lambda: jf.Config(model=CFG, dat=None), "no field 'dat'; did you mean 'data'"),
    ],
)
def test_wrong_fields_of_the_other_configs_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Files


def round_trip(cfg):
    return from_dict(type(cfg), json.loads(to_json(cfg)), trust=True)


CONFIGS = tiny.PRESETS | {name: getattr(jf.presets, name)() for name in FULL_SIZE}
CONFIGS["component"] = dataclasses.replace(CFG, mlp=example_components, position=example_components.alibi)
CONFIGS["paired"] = dataclasses.replace(
    tiny.PRESETS["transformer_base"],
    encoder_heads=8,
    encoder_d_ff=20,
    attention_scale=0.5,
    head_bias=True,
    scale_head=True,
    embedding_norm=True,
    position="relative",
    relative_buckets=8,
    relative_distance=20,
)
CONFIGS["dtypes"] = dataclasses.replace(CFG, dtype=jnp.bfloat16, window=3, attention_softcap=30.0)


@pytest.mark.parametrize("name", CONFIGS)
def test_json_gives_the_config_back(name):
    cfg = CONFIGS[name]
    again = round_trip(cfg)
    assert again == cfg and hash(again) == hash(cfg) and type(again.window) is type(cfg.window)


def test_json_gives_a_run_back():
    config = jf.Config(
        model=CONFIGS["mixed_windows"],
        data=jf.DataConfig(length=7),
        optim=jf.OptimConfig(lr=0.5, schedule="wsd"),
        train=jf.TrainConfig(steps=3, loss_chunk=5),
        run_dir="somewhere",
    )
    assert round_trip(config) == config
    with pytest.raises(ValueError, match="TrainConfig has no field 'step'; did you mean 'steps'"):
        from_dict(jf.Config, json.loads(to_json(config).replace('"steps"', '"step"')))


@pytest.mark.parametrize("prompt", ['if __name__ == "__main__":', "__main__", '"'])
def test_any_prompt_can_be_written(prompt):
    config = jf.Config(model=CFG, train=jf.TrainConfig(prompt=prompt))
    assert round_trip(config) == config


def local_component():
    class Local(example_components.SquaredRelu):
        pass

    return Local


def test_a_component_that_cannot_be_imported_works_but_is_not_written(tmp_path):
    cfg = dataclasses.replace(CFG, mlp=local_component())
    assert {cfg: 1}[dataclasses.replace(cfg)] == 1
    params = jax.eval_shape(lambda: jf.init(cfg, jax.random.key(0)))
    assert jax.eval_shape(lambda params: jf.forward(params, tiny.tokens(cfg), cfg), params).shape == (2, 9, 67)
    for write in (to_json, lambda cfg: write_run(tmp_path / "run", jf.Config(model=cfg), tokenizer.Bytes())):
        with pytest.raises(ValueError, match="mlp.*Local.*cannot be written.*top level of an importable module"):
            write(cfg)
    assert not (tmp_path / "run").exists()


def test_a_component_of_the_running_script_is_not_written(monkeypatch):
    local = local_component()
    monkeypatch.setattr(local, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Local", local, raising=False)
    with pytest.raises(ValueError, match=re.escape("the script that runs")):
        to_json(dataclasses.replace(CFG, mlp=local))


@pytest.mark.parametrize("name", [n for n in jf.__all__ if n.endswith("Config")] + ["Execution", "Experts", "Sampling"])
def test_help_of_a_config_explains_every_field(name):
    """In words, each with its default; the signature has no types and no defaults of several lines."""
    record = getattr(jf, name)
    text = pydoc.plain(pydoc.render_doc(record))
    explained = re.sub(r"\n \|\s+", " ", text)
    for field in dataclasses.fields(record):
        assert re.search(rf" {field.name}(?: \(.*? by default\))?: \S.{{15,}}", explained), field.name
    assert "typing." not in text.split("Attributes:")[0]
    assert str(inspect.signature(record)).count("=") <= len(dataclasses.fields(record))
