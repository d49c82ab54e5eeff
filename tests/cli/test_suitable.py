"""Runs whose model, data, objective and memory do not go together are refused before anything is written."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.cli import suitable
from jaxformer.cli.train import main
from jaxformer.cost import memory
from jaxformer.data import DataConfig, load
from jaxformer.parallel.sharding import MeshConfig
from jaxformer.training import run

ROOT = Path(__file__).parents[2]
SIZES = {"vocab_size": 300, "d_model": 16, "n_layers": 1, "n_heads": 2}
LEARNED = {"position": "learned", "max_length": 8}


def config(tmp_path, model=(), data=(), **train):
    (tmp_path / "a.txt").write_text("one two three, " * 60)
    (tmp_path / "pairs.tsv").write_text("".join(f"one{number}\ttwo{number}\n" for number in range(20)))
    path = str(tmp_path / ("pairs.tsv" if "task" in dict(data) else "a.txt"))
    return jf.Config(
        model=jf.presets.llama(**SIZES | dict(model)),
        data=DataConfig(**{"path": path, "tokenizer": "byte", "length": 16, "batch_size": 8} | dict(data)),
        train=jf.TrainConfig(steps=1, sample_tokens=0, **train),
        run_dir=str(tmp_path / "run"),
    )


# Models that next-token training makes no sense of

PAIRS = {"task": "pairs", "source_length": 8}
UNSUITABLE = [
    ({"causal": False}, {}, "model.causal=False"),
    ({"token_types": 2}, {}, "model.token_types=2"),
    ({"has_head": False}, {}, "model.has_head=False"),
    ({"pooler": True}, {}, "model.pooler=True"),
    ({"encoder_layers": 1}, {}, "has no source for an encoder"),
    ({}, PAIRS, "data.task='pairs' has source sequences, which only an encoder reads"),
    ({"encoder_layers": 1, "causal": False}, PAIRS, "model.causal=False"),
]


@pytest.mark.parametrize(("model", "data", "message"), UNSUITABLE)
def test_a_model_that_next_token_training_makes_no_sense_of_is_refused(model, data, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        main(config(tmp_path, model, data))
    assert not (tmp_path / "run").exists()


def test_objectives_and_data_of_ones_own_are_free(tmp_path):
    own = {"task": "example_training:Pairs"}
    for model, data, _ in UNSUITABLE:
        asked = config(tmp_path, model, data, objective="example_training:contrastive")
        suitable.check(asked, asked.mesh.make())
        asked = dataclasses.replace(asked, data=DataConfig(**own), train=jf.TrainConfig())
        suitable.check(asked, asked.mesh.make())


# Rows that are longer than a learned table


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (
            {},
            {"length": 80},
            r"training rows have up to 80 positions \(data.length=80\).*raise model.max_length to 80",
        ),
        ({}, {"segment_documents": False}, r"training rows have up to 16 positions \(data.length=16\)"),
        ({"encoder_layers": 1}, PAIRS | {"length": 8, "source_length": 9}, r"sources have up to 9 .*data.source_length=9"),
        ({"encoder_layers": 1}, PAIRS | {"length": 9}, r"targets have up to 9 positions \(data.length=9\)"),
        ({"encoder_layers": 1}, {"task": "dates", "path": None, "source_length": 64}, "sources have up to 64 positions"),
    ],
)
def test_rows_beyond_a_learned_table_are_refused(model, data, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        main(config(tmp_path, LEARNED | model, data))
    assert not (tmp_path / "run").exists()


def test_only_a_validation_document_beyond_a_learned_table(tmp_path):
    (tmp_path / "short.jsonl").write_text('{"text": "a word"}\n' * 50)  # 7 tokens each, with their end
    (tmp_path / "long.jsonl").write_text('{"text": "a word"}\n{"text": "12 characters"}\n')
    data = {"path": str(tmp_path / "short.jsonl"), "validation_path": str(tmp_path / "long.jsonl")}
    # the row of 16 ends within the document of 14
    with pytest.raises(ValueError, match=r"validation rows have up to 9 positions .*raise model.max_length to 9"):
        main(config(tmp_path, LEARNED, data))
    assert not (tmp_path / "run").exists()
    held = config(tmp_path, LEARNED, data | {"validation_path": data["path"]})
    suitable.check_lengths(held, load(held.data))
    fits = config(tmp_path, LEARNED | {"max_length": 9}, data)
    suitable.check_lengths(fits, load(fits.data))
    rotary = config(tmp_path, {"max_length": 8}, data)
    suitable.check_lengths(rotary, load(rotary.data))


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("lengths", [(3, 9, 2), (40,), (5,), (1, 1, 1, 1, 14), (15, 1), (16, 17)])
def test_the_positions_of_rows_are_those_that_batches_have(lengths, separate, tmp_path):
    lines = ['{"text": "' + "x" * length + '"}\n' for length in lengths]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "b.jsonl").write_text("".join(lines[::-1]))
    data = DataConfig(
        path=str(tmp_path / "a.jsonl"),
        validation_path=str(tmp_path / "b.jsonl"),
        tokenizer="byte",
        length=16,
        batch_size=4,
        segment_documents=separate,
    )
    corpus = load(data)

    def most(batches):
        found = [b["positions"] if separate else np.arange(b["tokens"].shape[1]) for b in batches]
        return 1 + max(int(positions.max()) for positions in found)

    expected = {"training rows": most(corpus.train[step] for step in range(30)), "validation rows": most(corpus.validation)}
    assert {name: number for name, (_, number) in corpus.positions().items()} == expected


# Samples during training


@dataclasses.dataclass(frozen=True)
class OneToken:
    """An attention that keeps nothing of a sequence, or says it wrongly."""

    kept: tuple = ()

    def __post_init__(self):
        if self.kept:
            object.__setattr__(self, "cache", lambda cfg: dict(self.kept))

    def spec(self, cfg):
        return {"out": jf.weight(cfg, "D", "D")}

    def apply(self, params, x_BTD, cfg, *, cache=None, **where):
        return jf.dense("BTD,DO->BTO", x_BTD, params["out"]), cache


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ((), r"needs cache\(cfg\), what it keeps"),
        ((("key", "BKSH"),), r"must give a dict of jf\.Param, .* not \{'key': 'BKSH'\}"),
    ],
)
def test_an_attention_that_cannot_decode_is_refused_where_samples_are_asked_for(kept, message, tmp_path):
    asked = config(tmp_path)
    asked = dataclasses.replace(asked, model=dataclasses.replace(asked.model, attention=OneToken(kept)))
    mesh = asked.mesh.make()
    suitable.check(asked, mesh)
    asked = dataclasses.replace(asked, train=dataclasses.replace(asked.train, sample_tokens=5))
    with pytest.raises(ValueError, match=f"{message}.* To train without samples, set train.sample_tokens=0"):
        suitable.check(asked, mesh)


# Memory


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ({"d_model": 1_000_000, "n_heads": 8}, {}, r"parameters [\d,]{5,}\.\d GiB, optimizer .*mlp.\w+, of shape \[1, 2666672"),
        ({"n_layers": 1000, "d_model": 65_536}, {}, r"parameters [\d,]{5,}"),
        ({"vocab_size": 2_000_000_000, "d_model": 4096}, {}, r"embedding.token, of shape \[2000000000, 4096\]"),
        (LEARNED | {"max_length": 2_000_000_000, "d_model": 4096}, {}, r"decoder.position.table, of shape \[2000000000"),
        ({}, {"batch_size": 1_000_000_000}, r"batch [\d,]+\.\d GiB.*lower data.length or data.batch_size"),
        ({}, {"length": 1_000_000}, r"attention scores [\d,]{5,}\.\d GiB.*lower data.length or data.batch_size, or raise"),
    ],
)
def test_sizes_that_cannot_be_are_refused(model, data, message, tmp_path):
    with pytest.raises(ValueError, match="this run cannot fit into memory: .*" + message):
        main(config(tmp_path, model, data))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("optim", "dtype"), [({"name": "adafactor"}, "float32"), ({"ema": 0.9}, "bfloat16")])
def test_what_is_needed_is_what_a_state_holds(optim, dtype, tmp_path):
    asked = config(tmp_path, {"param_dtype": dtype})
    asked = dataclasses.replace(asked, optim=jf.OptimConfig(**optim))
    state = run.initial_state(asked)
    held = {
        "parameters": sum(x.nbytes for x in jax.tree.leaves(state.params)),
        "optimizer state": sum(x.nbytes for x in jax.tree.leaves(state.opt_state)),
        "batch": sum(x.nbytes for x in load(asked.data).train[0].values()),
        "attention scores": 8 * 2 * 16 * 16 * 4,
    }
    assert memory.needed(asked, asked.mesh.make()) == held
    # eight devices of one process share its memory, however the state is spread over them
    spread = dataclasses.replace(asked, mesh=MeshConfig(fsdp=8))
    assert memory.needed(spread, spread.mesh.make()) == held


def test_only_what_cannot_fit_is_refused(tmp_path, monkeypatch):
    asked = config(tmp_path)
    mesh = asked.mesh.make()
    needed = sum(memory.needed(asked, mesh).values())
    for has in (needed, None):  # None: not known
        monkeypatch.setattr(memory, "host_bytes", lambda has=has: has)
        memory.check(asked, mesh)
    monkeypatch.setattr(memory, "host_bytes", lambda: needed - 1)
    with pytest.raises(ValueError, match="this run cannot fit"):
        memory.check(asked, mesh)


def test_the_limit_of_a_control_group_counts(tmp_path, monkeypatch):
    before = memory.host_bytes()
    assert before > 2**28
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("max\n")
    unlimited = memory.host_bytes()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1048576\n")
    assert memory.host_bytes() - 2**20 < unlimited - 2**28, "its limit, and swap"


@pytest.mark.parametrize("limit", [10**6, 10**3, None])
def test_the_memory_of_an_accelerator_is_its_own_limit(limit, tmp_path):
    asked = config(tmp_path)
    stats = None if limit is None else {"bytes_limit": limit}
    device = SimpleNamespace(platform="gpu", device_kind="H200", memory_stats=lambda: stats)
    mesh = SimpleNamespace(local_devices=[device], size=1)
    assert 10**3 < sum(memory.needed(asked, mesh).values()) < 10**6
    if limit == 10**3:
        with pytest.raises(ValueError, match=r"each H200 has 0.0 GiB; lower the sizes of the model.*mesh.fsdp"):
            memory.check(asked, mesh)
    else:
        memory.check(asked, mesh)


@pytest.mark.parametrize("size, said", [(2048, True), (300, False)])
def test_rows_of_the_table_that_no_token_uses_are_said(size, said, tmp_path, caplog):
    asked = config(tmp_path, {"vocab_size": size})
    corpus = load(asked.data)
    suitable.check_data(asked, corpus)
    used = corpus.tokenizer.vocab_size
    expected = f"{size - used} rows of the token table are never used, and the first loss is near ln {size}"
    assert (expected in caplog.text) == said
