"""Files of others run no code: what a config.json names beside the library's own is refused before it is imported."""

import importlib
import json
import sys

import numpy as np
import published
import pytest
import tiny
from golden import weights

import jaxformer as jf
from jaxformer.cli import pretrained, sample
from jaxformer.config.strict import Strict, import_paths, to_dict
from jaxformer.hf import __main__ as commands
from jaxformer.hf import safetensors_files
from jaxformer.hf.load import read_config
from jaxformer.tokenizers import tokenizer
from jaxformer.training import run
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.run import InitConfig
from jaxformer.training.update import TrainState

MODULE = """
import dataclasses, pathlib
import jaxformer as jf

pathlib.Path({marker!r}).write_text("imported")

@dataclasses.dataclass(frozen=True)
class Name:
    x: int = 1

    def spec(self, cfg):
        return {{"up": jf.weight(cfg, "D", "F"), "down": jf.weight(cfg, "F", "D")}}

    def apply(self, params, x_BTD, cfg):
        return jf.dense("BTF,FD->BTD", jf.dense("BTD,DF->BTF", x_BTD, params["up"]), params["down"])

def spec(cfg):
    return Name().spec(cfg)

def apply(params, x_BTD, cfg):
    return Name().apply(params, x_BTD, cfg)
"""
FIELDS = [*(("model", kind) for kind in jf.ModelConfig.NAMES), ("train", "objective"), ("optim", "name"), ("data", "task")]
PATHS = [
    "evil:",
    "evil:Name",
    "evil:Name(x=2)",
    "evil:Name(x=__import__('evil'))",
    "evil:(",
    "evil(:",
    "evil.part",
    "evil.part:Name.spec",
    " evil:",
    "evil :",
    "evil:\n",
    "\tevil:Name",
    "\uff45vil:Name",  # a full-width e, which Python's own parser reads as e
    "evil\uff1aName",  # a full-width colon
    "evil:\u200b",
    "evil:\x00",
    ".evil:",
    "evil..:",
    ":evil",
    "os:system",
    "builtins:exec",
    "jaxformer.config.components:importlib.import_module",
    "jaxformer.nn.mlp:",
    "swiglu:",
    "next_token.evil:",
]
FORMS = {
    "alone": lambda path: path,
    "by layer": lambda path: [path],
    "in a list of lists": lambda path: [["gelu", [path]]],
    "beside another": lambda path: ["gelu", path],
    "with fields": lambda path: {"component": path, "x": 2},
    "with fields, by layer": lambda path: [{"component": path}],
    "in a field": lambda path: {"component": {"component": path}},
    "as a key": lambda path: {path: 1},
}


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A module on the path, whose import leaves a file; the function says whether anything has imported it."""
    marker = tmp_path / "marker"
    package = tmp_path / "modules" / "evil"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(MODULE.format(marker=str(marker)))
    (package / "part.py").write_text("")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.chdir(package.parent)
    jf.config.components.imported.cache_clear()
    asked = []
    import_module = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name, *rest: asked.append(name) or import_module(name, *rest))
    yield lambda: marker.exists() or "evil" in sys.modules or any("evil" in name or name == "os" for name in asked)
    for name in [name for name in sys.modules if name.partition(".")[0] == "evil"]:
        del sys.modules[name]
    jf.config.components.imported.cache_clear()


def written(directory, record="model", field="norm", value="layer", init=None):
    """A run with one checkpoint, whose config.json then says ``value``."""
    cfg = jf.ModelConfig(vocab_size=259, d_model=16, n_layers=1, n_heads=2)
    config = jf.Config(model=cfg, init=InitConfig(folder=init), run_dir=str(directory))
    run.write_run(directory, config, tokenizer.Bytes())
    checkpoints = Checkpoints(directory / "checkpoints")
    checkpoints.save(TrainState(np.zeros((), np.int32), tiny.drawn(cfg), opt_state=(), rng=tiny.jax.random.key(0)))
    checkpoints.close()
    changed(directory, record, field, value)
    return config


def changed(directory, record, field, value):
    values = json.loads((directory / "config.json").read_text())
    values.pop("checksums", None)
    values[record][field] = value
    (directory / "config.json").write_text(json.dumps(values))


def test_every_import_path_is_among_the_fields_that_are_looked_at():
    def fields(record):
        for field in jf.config.strict.dataclasses.fields(record):
            value = getattr(record, field.name)
            assert field.name not in record.UNCHECKED or field.name in record.NAMES
            if isinstance(value, Strict):
                yield from ((field.name, name) for name in value.NAMES)
                yield from fields(value)

    config = jf.Config(model=jf.presets.gpt2())
    assert sorted(fields(config)) == sorted(FIELDS)
    assert import_paths(jf.Config, to_dict(config)) == {}


@pytest.mark.parametrize(("record", "field"), FIELDS, ids=lambda name: name)
def test_no_spelling_of_an_import_path_is_followed(record, field, evil, tmp_path):
    config = jf.Config(model=jf.ModelConfig(vocab_size=259, d_model=16, n_layers=1, n_heads=2), run_dir=str(tmp_path / "run"))
    run.write_run(tmp_path / "run", config, tokenizer.Bytes())
    for path in PATHS:
        for form in FORMS.values():
            changed(tmp_path / "run", record, field, form(path))
            with pytest.raises(ValueError, match=r"config\.json cannot be read"):
                run.read_run(tmp_path / "run")
            assert not evil(), (path, form)


READERS = {
    "jf.load": lambda run_, *_: jf.load(run_),
    "pretrained.load": lambda run_, *_: pretrained.load(run_),
    "sample": lambda run_, *_: sample.main([str(run_), "x", "--max-new-tokens", "1"]),
    "hf export": lambda run_, out, _: commands.export(run_, out),
    "train.py --init.from": lambda run_, out, _: pretrained.begin(
        jf.Config(model=jf.presets.gpt2(), init=InitConfig(folder=str(run_)), run_dir=str(out))
    ),
    "the same, continued": lambda run_, _, config: pretrained.begin(config),
}
TRUSTING = {
    "jf.load": lambda run_, *_: jf.load(run_, trust=True),
    "pretrained.load": lambda run_, *_: pretrained.load(run_, trust=True),
    "sample": lambda run_, *_: sample.main([str(run_), "x", "--max-new-tokens", "1", "--trust"]),
    "train.py --init.from": lambda run_, out, _: pretrained.begin(
        jf.Config(model=jf.presets.gpt2(), init=InitConfig(folder=str(run_)), run_dir=str(out)), trust=True
    ),
    "the same, continued": lambda run_, _, config: pretrained.begin(config, trust=True),
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_refuse_code_until_they_are_told_to_trust_it(reader, evil, tmp_path, capsys):
    config = written(tmp_path / "run", "model", "mlp", {"component": "evil:Name", "x": 3}, init="elsewhere")
    with pytest.raises(ValueError, match="config.json cannot be read: .*model.mlp='evil:Name'.* would run that code.*--trust"):
        READERS[reader](tmp_path / "run", tmp_path / "out", config)
    assert not evil() and not (tmp_path / "out").exists()
    if reader in TRUSTING:
        TRUSTING[reader](tmp_path / "run", tmp_path / "out", config)
    else:  # no published family has this component
        with pytest.raises(ValueError, match="no published family has this config"):
            commands.export(tmp_path / "run", tmp_path / "out", trust=True)
    assert evil()


@pytest.mark.parametrize(("record", "field"), FIELDS[4:], ids=lambda name: name)
def test_objectives_optimizers_and_data_sets_are_never_followed_by_loading(record, field, evil, tmp_path):
    written(tmp_path / "run", record, field, "evil:Name")
    with pytest.raises(ValueError, match=f"{record}.{field}='evil:Name'"):
        jf.load(tmp_path / "run")
    jf.load(tmp_path / "run", trust=True)
    assert not evil()


def test_a_run_that_is_continued_may_name_what_the_command_names(evil, tmp_path):
    plain = written(tmp_path / "run", "model", "mlp", "evil:")
    with pytest.raises(ValueError, match=r"another architecture(.|\n)*model.mlp: evil: there, gelu now"):
        run.open_run(plain)
    assert not evil()
    with pytest.raises(ValueError, match="another architecture"):  # the command is what the user wants, trusted or not
        run.open_run(plain, trust=True)
    assert not evil()
    same = jf.Config(model=tiny.dataclasses.replace(plain.model, mlp="evil:"), run_dir=plain.run_dir)
    assert run.open_run(same)[2] == [] and evil()


def test_another_objective_than_the_run_began_with_is_compared_alone(evil, tmp_path):
    config = written(tmp_path / "run", "train", "objective", "evil:objective")
    assert run.open_run(config)[2] == ["train.objective: evil:objective -> next_token"]
    changed(tmp_path / "run", "model", "mlp", "evil:objective")  # trusted nowhere, though it stands in two fields
    with pytest.raises(ValueError, match="another architecture"):
        run.open_run(config)
    assert not evil()


def test_the_command_of_the_user_is_trusted_and_its_flag_is_kept_nowhere(evil, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import jaxformer as jf\nconfig = jf.Config(model=jf.presets.gpt2())\n")
    command = run.parse([str(file), "--model.mlp", "evil:Name(x=2)", "--train.objective", "evil:Name"], file)
    assert evil() and not command.trust and not command.check and command.config.model.mlp.x == 2
    trusting = run.parse([str(file), "--trust"], file)
    assert trusting.trust and "trust" not in json.dumps(to_dict(trusting.config))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "bert", "bart", "t5_v11", "deepseek_v3", "gpt_neox"])
def test_no_field_of_a_published_config_is_followed(name, evil):
    """An import path in place of any value is refused, or has no effect."""
    values, tensors, _ = weights.load(name)
    plain = read_config(values, tensors.keys())[1]
    refused = 0
    for field in values:
        for value in ("evil:", ["evil:"], {"component": "evil:Name"}):
            try:
                assert read_config(values | {field: value}, tensors.keys())[1] == plain
            except ValueError:
                refused += 1
    more = {"auto_map": {"AutoModel": "evil.part--Name"}, "tokenizer_class": "evil:Name", "architectures": ["evil:Name"]}
    assert read_config(values | more, tensors.keys())[1] == plain
    assert refused > 20 and not evil()


def test_pickles_are_not_read(tmp_path):
    published.folder(tmp_path, "llama")
    np.savez(tmp_path / "reference.npz", input_ids=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        commands._reference(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin may run any code and is not read"):
        safetensors_files.find(tmp_path)


def test_arrays_of_objects_in_msgpack_are_refused(tmp_path):
    import msgpack

    array = msgpack.packb(((1,), "O", b"\0" * 8))
    (tmp_path / "flax_model.msgpack").write_bytes(msgpack.packb({"params": {"kernel": msgpack.ExtType(1, array)}}))
    with pytest.raises(ValueError, match="is not a complete msgpack file: .*OBJECT"):
        safetensors_files.find(tmp_path)
