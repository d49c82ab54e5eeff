"""Runs: directories, what is written to them, and how it is loaded again."""

import dataclasses
import shutil
from pathlib import Path

import example_components
import example_training
import jax
import numpy as np
import pytest
import tiny

import jaxformer as jf
from jaxformer.cli.train import main
from jaxformer.tokenizers import tokenizer
from jaxformer.training import evaluate, run
from jaxformer.training.records import TIMINGS, records

ROOT = Path(__file__).parents[2]
MODEL = jf.presets.llama(vocab_size=3, d_model=16, n_layers=1, n_heads=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("one two three, " * 60)
    return str(path)


def config(directory, text="", train=(), **data):
    data = {"path": text, "tokenizer": "char", "length": 8, "batch_size": 8, "segment_documents": False} | data
    train = {"steps": 2, "eval_every": 2, "log_every": 1, "prompt": "one", "sample_tokens": 2} | dict(train)
    return jf.Config(model=MODEL, data=jf.DataConfig(**data), train=jf.TrainConfig(**train), run_dir=str(directory))


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory, quick_compilation):
    directory = tmp_path_factory.mktemp("runs") / "first"
    main(config(directory, text))
    return directory


def everything(directory):
    return {str(path.relative_to(directory)): path.is_file() and path.read_bytes() for path in directory.rglob("*")}


# A whole run


def test_a_run_leaves_its_files_and_loads_again(trained, text):
    assert {path.name for path in trained.iterdir()} >= {
        "config.json",
        "tokenizer.json",
        "metrics.jsonl",
        "loss.png",
        "checkpoints",
    }
    cfg, params, tok = jf.load(trained)
    assert tok.decode(tok.encode("one two")) == "one two"
    assert cfg == dataclasses.replace(MODEL, vocab_size=tok.vocab_size) and tok.vocab_size > MODEL.vocab_size
    fresh = jax.jit(lambda: jf.init(cfg, jax.random.key(0)))()
    assert jax.tree.structure(params) == jax.tree.structure(fresh)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), params, fresh)
    assert all(jax.tree.leaves(changed)), "what was trained is loaded"
    assert run.read_run(trained) == dataclasses.replace(config(trained, text), model=cfg)


def test_the_records_of_a_run(trained):
    found = list(records(trained / "metrics.jsonl"))
    assert [(r["step"], r["kind"]) for r in found] == [(1, "train"), (2, "train"), (2, "validation")]
    assert found[-1].keys() == {"step", "kind", "loss", "accuracy", "bits_per_byte"}
    assert all(np.isfinite([value for value in r.values() if not isinstance(value, str)]).all() for r in found)


def test_no_sample_is_written_for_sample_tokens_0(text, tmp_path, quick_compilation):
    main(config(tmp_path / "run", text, {"sample_tokens": 0}))
    assert jf.load(tmp_path / "run")


def test_a_prompt_without_ids_is_refused_before_training(text, tmp_path, quick_compilation):
    with pytest.raises(ValueError, match="character '@'"):
        main(config(tmp_path / "run", text, {"prompt": "@"}))
    assert not list(records(tmp_path / "run" / "metrics.jsonl"))


def test_a_batch_that_does_not_fit_the_devices_is_refused_before_anything_is_written(text, tmp_path):
    with pytest.raises(ValueError, match="batch_size=12 in 2 microbatches is not divisible by 8 devices; the nearest is 16"):
        main(config(tmp_path / "run", text, {"microbatches": 2}, batch_size=12))
    assert not (tmp_path / "run").exists()


def test_a_failing_sample_loses_nothing(text, tmp_path, monkeypatch, quick_compilation):
    def fail(*_):
        raise ZeroDivisionError("sample")

    monkeypatch.setattr(evaluate, "continuation", fail)
    with pytest.raises(ZeroDivisionError, match="sample"):
        main(config(tmp_path / "run", text))
    assert list((tmp_path / "run" / "checkpoints").glob("*/params/_METADATA"))


def test_no_validation_data_is_refused_before_training_or_no_matter(text, tmp_path, quick_compilation):
    directory = tmp_path / "run"
    try:
        main(config(directory, text, validation_fraction=0.0))
    except ValueError as error:
        assert "validation" in str(error)
        assert not list(records(directory / "metrics.jsonl"))
    else:
        assert jf.load(directory)


# What is not the library's


def contrastive_config(directory, steps, **train):
    options = {"objective": "example_training:contrastive", "eval_every": 2, "log_every": 1, "sample_tokens": 0} | train
    return jf.Config(
        model=jf.ModelConfig(vocab_size=3, d_model=16, n_layers=1, n_heads=2, causal=False, has_head=False),
        data=jf.DataConfig(task="example_training:Pairs", tokenizer="byte", length=8, batch_size=8),
        optim=jf.OptimConfig(schedule="constant", warmup_steps=0),
        train=jf.TrainConfig(steps=steps, **options),
        run_dir=str(directory),
    )


def test_an_objective_and_data_of_ones_own_train_and_continue_exactly(tmp_path, quick_compilation):
    for directory, steps in (("whole", 4), ("stopped", 2), ("stopped", 4)):
        main(contrastive_config(tmp_path / directory, steps))
    loaded = [jf.load(tmp_path / directory, trust=True)[1] for directory in ("whole", "stopped")]
    jax.tree.map(np.testing.assert_array_equal, *loaded)
    fresh = run.initial_state(run.read_run(tmp_path / "whole", trust=True)).params
    assert max(float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (loaded[0], fresh)), strict=True)) > 1e-3
    found = [record for record in records(tmp_path / "whole" / "metrics.jsonl") if record["step"] == 4]
    assert [record.keys() - {*TIMINGS} for record in found] == [
        {"step", "kind", "loss", "weight", "grad_norm", "lr"},
        {"step", "kind", "loss"},
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("next_tokem", r"unknown train.objective 'next_tokem'; did you mean 'next_token'\? \(or give 'package.module:name'\)"),
        ("example_training:contrastiv", "has no 'contrastiv'; did you mean 'contrastive'"),
        ("example_training:no_objective", r"made 'nothing', not a function \(params, batch, rng\)"),
    ],
)
def test_an_objective_that_is_none_is_refused_before_anything_is_written(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        main(contrastive_config(tmp_path / "run", 2, objective=name))
    assert not (tmp_path / "run").exists()


def test_an_objective_may_be_named_itself_and_a_function_takes_what_it_needs():
    def made(name):
        model = jf.presets.llama(vocab_size=16, d_model=8, n_layers=1, n_heads=2)
        return run.make_objective(jf.Config(model=model, train=jf.TrainConfig(objective=f"example_training:{name}")))

    assert made("itself") is example_training.itself
    assert made("of_the_model") is example_training.itself
    with pytest.raises(ValueError, match="must be a function, not int"):
        made("number")


# Directories


def test_a_foreign_directory_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists but is not a run, as it has no config.json; choose another --run-dir"):
        run.open_run(config(tmp_path))
    with pytest.raises(ValueError, match="notes.txt"):
        run.open_run(config(tmp_path / "notes.txt"))
    assert everything(tmp_path) == {"notes.txt": b"mine"}
    for new in (tmp_path / "new", tmp_path / "new" / "deeper"):
        assert run.open_run(config(new)) == (new, None, [])


def test_a_run_of_another_architecture_is_refused(trained, text):
    same = config(trained, text)
    other = dataclasses.replace(same, model=dataclasses.replace(MODEL, n_layers=2, mlp="gelu"))
    with pytest.raises(ValueError, match="holds a run of another architecture") as raised:
        run.open_run(other)
    raised.match("model.n_layers: 1 there, 2 now")
    raised.match("model.mlp: swiglu there, gelu now")
    raised.match(r"unexpected  decoder\.layers\.mlp\.gate  \[1, 16, 48\]")
    raised.match(r"differs     decoder\.layers\.mlp\.up  expected \[2, 16, 48\], found \[1, 16, 48\]")


def test_a_run_goes_on_and_tells_what_differs(trained, text):
    same = config(trained, text)
    directory, tok, notes = run.open_run(same)
    assert (directory, notes) == (trained, []) and tok.kind == "char"
    changed = dataclasses.replace(
        same,
        model=dataclasses.replace(MODEL, residual_dropout=0.1),
        train=dataclasses.replace(same.train, steps=9),
    )
    assert run.open_run(changed)[2] == ["model.execution.residual_dropout: 0.0 -> 0.1", "train.steps: 2 -> 9"]


def test_loading_what_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent is not a run directory, as it has no config.json"):
        jf.load(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="is not a run directory"):
        jf.load(str(tmp_path))
    assert not everything(tmp_path)


def without_checkpoints(tmp_path):
    directory = tmp_path / "run"
    run.write_run(directory, config(directory), tokenizer.Bytes())
    return directory


def test_loading_a_run_without_checkpoints_leaves_no_trace(tmp_path):
    directory = without_checkpoints(tmp_path)
    before = everything(directory)
    with pytest.raises(FileNotFoundError, match="no checkpoint in .*run.checkpoints"):
        jf.load(directory)
    assert everything(directory) == before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b'{"model": 3}',
        b'{"model": {"vocab_size": 0}}',
        b'{"modle": {}}',
        b"\xff\xfe",
        None,
    ],
)
def test_a_config_that_is_broken_is_named(content, tmp_path):
    directory = without_checkpoints(tmp_path)
    path = directory / "config.json"
    path.write_bytes(path.read_bytes()[:-30] if content is None else content)
    with pytest.raises(ValueError, match=r"config\.json"):
        jf.load(directory)


def test_a_config_of_unknown_fields_names_the_nearest(tmp_path):
    directory = without_checkpoints(tmp_path)
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"n_layers"', '"n_layer"'))
    with pytest.raises(ValueError, match="no field 'n_layer'; did you mean 'n_layers'"):
        jf.load(directory)


def test_parameters_that_do_not_fit_the_config_are_not_loaded(trained, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(trained, directory)
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"d_ff": 48', '"d_ff": 32'))
    with pytest.raises(ValueError, match=r"decoder\.layers\.mlp\.up .*\[1, 16, 32\].*\[1, 16, 48\]"):
        jf.load(directory)


def test_loading_changes_nothing_not_even_a_checkpoint_that_is_being_written(trained, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(trained, directory)
    for name in ("9.orbax-checkpoint-tmp", "9.orbax-checkpoint-tmp-1"):
        (directory / "checkpoints" / name).mkdir()
        (directory / "checkpoints" / name / "part").write_text("still being written")
    before = everything(directory)
    jf.load(directory)
    assert everything(directory) == before


def test_a_failed_write_leaves_the_run_as_it_was(trained, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(trained, directory)
    before = everything(directory)
    with pytest.raises(ValueError, match="cannot be written"):
        run.write_run(directory, jf.Config(model=dataclasses.replace(MODEL, mlp=local_component())), tokenizer.Bytes())
    assert everything(directory) == before


def local_component():
    class Local(example_components.SquaredRelu):
        pass

    return Local


def test_the_start_token_and_vocabulary_are_the_tokenizers():
    tok = tokenizer.Bytes()
    pairs = run.fit_tokenizer(dataclasses.replace(tiny.PRESETS["transformer_base"], start_token=None), tok)
    assert (pairs.vocab_size, pairs.start_token) == (259, tok.bos_id)
    larger = dataclasses.replace(MODEL, vocab_size=512)
    assert run.fit_tokenizer(larger, tok) == larger
    assert run.fit_tokenizer(MODEL, tok) == dataclasses.replace(MODEL, vocab_size=259)
