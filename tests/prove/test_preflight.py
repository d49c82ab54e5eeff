"""``train.py --check``: what it finds in a run that is right, and in each that is not."""

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxformer as jf
from jaxformer.cli import suitable, train
from jaxformer.prove import gradients, preflight, resources, settings, states, tokens
from jaxformer.prove.findings import FAILED, OK, WARNING
from jaxformer.prove.show_batch import shown
from jaxformer.training import run
from jaxformer.training.checkpoints import Checkpoints

ROOT = Path(__file__).parents[2]
MODEL = jf.presets.llama(vocab_size=3, d_model=16, n_layers=2, n_heads=2, max_length=16)
TEXT = "one two three, " * 60

SUITS = suitable.check, suitable.check_data


@pytest.fixture
def text(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(9):
        (tmp_path / "texts" / f"{number}.txt").write_text(TEXT[: 100 + number])
    return str(tmp_path / "texts")


def config(text="", model=MODEL, optim=(), train=(), **data):
    data = {"path": text, "tokenizer": "byte", "length": 16, "batch_size": 8} | data
    optim = {"lr": 1e-2, "warmup_steps": 1} | dict(optim)
    train = {"steps": 100, "eval_every": 50, "prompt": "one"} | dict(train)
    return jf.Config(
        model=model,
        data=jf.DataConfig(**data),
        optim=jf.OptimConfig(**optim),
        train=jf.TrainConfig(**train),
        run_dir="run",
    )


def check(config, capsys):
    """The exit code, and ``subject -> (verdict, why)`` of all lines."""
    code = preflight.main(config, None, None, train.make_placement, SUITS, False)
    lines = re.findall(r"^(OK|WARNING|FAILED) +(.{18}) (.*)$", capsys.readouterr().out, re.MULTILINE)
    return code, {subject.strip(): (verdict, why) for verdict, subject, why in lines}


def everything(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


SUBJECTS = {
    "settings",
    "run directory",
    "data",
    "vocabulary",
    "ids",
    "weights",
    "end of text",
    "prompt",
    "memory",
    "loss at the start",
    "gradients",
    "updates",
    "checkpoint",
    "disk",
}


def test_a_run_that_is_right_passes_and_writes_nothing(text, tmp_path, monkeypatch, capsys, quick_compilation):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.py").write_text(
        "import jaxformer as jf\n"
        f"config = jf.Config(model=jf.presets.llama({', '.join(f'{n}={getattr(MODEL, n)}' for n in SIZES)}),\n"
        f"    data=jf.DataConfig(path={text!r}, tokenizer='byte', length=16, batch_size=8),\n"
        "    optim=jf.OptimConfig(lr=1e-2, warmup_steps=1),\n"
        "    train=jf.TrainConfig(steps=100, eval_every=50, prompt='one'))\n"
    )
    before = everything(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        train.launch(["c.py", "--check"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0, out
    lines = re.findall(r"^(OK|WARNING|FAILED) +(.{18}) ", out, re.MULTILINE)
    assert {subject.strip() for _, subject in lines} == SUBJECTS and {verdict for verdict, _ in lines} == {OK}, out
    first, last = map(float, re.search(r"loss ([\d.]+) to ([\d.]+);", out).groups())
    assert last < 0.7 * first and abs(first - math.log(259)) < 1
    assert "one two three" in out, "a batch is shown as text"
    assert everything(tmp_path) == before


SIZES = ("vocab_size", "d_model", "n_layers", "n_heads", "max_length")


def test_a_text_that_is_not_there_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, lines = check(config(str(tmp_path / "nothing")), capsys)
    assert code == 1 and lines["data"][0] == FAILED and "nothing does not exist" in lines["data"][1]


# Settings


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_no_shipped_config_contradicts_itself(path):
    assert list(settings.contradictions(run.read_config(path)[0])) == []


EXPERTS = dataclasses.replace(MODEL, experts=jf.Experts(n_experts=4, per_token=2, d_ff=8))
CONTRADICTIONS = {
    "optim.warmup_steps=100 is not below train.steps=100": {"optim": {"warmup_steps": 100}},
    "optim.warmup_steps=90 reaches into the decay": {"optim": {"warmup_steps": 90, "schedule": "wsd"}},
    "optim.final_lr=2 is a fraction": {"optim": {"final_lr": 2.0}},
    "optim.warmup_steps=0 falls from the first update": {"optim": {"schedule": "inverse_sqrt", "warmup_steps": 0}},
    "train.eval_every=101 is above train.steps=100": {"train": {"eval_every": 101}},
    "train.log_every=101 is above train.steps=100": {"train": {"log_every": 101}},
    "optim.ema=0.999 is a mean over some 1,000 updates": {"optim": {"ema": 0.999}},
    "train.z_loss: train.objective='a:b'": {"train": {"objective": "a:b", "z_loss": 1e-4}},
    "train.label_smoothing=0.6 gives": {"train": {"label_smoothing": 0.6}},
    "train.loss_chunk=16 is not below data.length=16": {"train": {"loss_chunk": 16}},
    "nothing keeps all experts in use": {"model": EXPERTS},
    "data.length=32 is more than model.max_length=16": {"length": 32},
    "data.length=8 is below model.max_length=16": {"model": dataclasses.replace(MODEL, position="learned"), "length": 8},
    "data.validation_fraction=0 without": {"validation_fraction": 0.0},
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_contradictions_are_named(message):
    assert list(settings.contradictions(config())) == []
    (line,) = settings.contradictions(config(**CONTRADICTIONS[message]))
    assert message in line


# Tokenizer and data


def corpus(batch, **fields):
    fields = {"tokenizer": jf.tokenizer.train("byte", []), "summary": {}, "validation": [batch]} | fields
    return SimpleNamespace(train=[batch] * tokens.SEARCHED, **fields)


def verdicts(config, batch, **fields):
    return {f.subject: (f.verdict, f.why) for f in tokens.findings(config, corpus(batch, **fields), batch)}


def batch(**changes):
    ids = np.arange(8 * 17, dtype=np.int32).reshape(8, 17) + 3
    ids[:, 9] = jf.tokenizer.train("byte", []).eos_id
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((8, 16), np.float32)} | changes


def test_a_batch_that_is_right():
    assert {verdict for verdict, _ in verdicts(config(), batch()).values()} == {OK}


IDS = batch()["tokens"]
WRONG = {
    "ids outside": ("ids", FAILED, {"tokens": IDS + 200}, "tokens contain 458, which is outside the vocabulary of 259"),
    "negative": ("ids", FAILED, {"targets": IDS - 4}, "targets contain -1"),
    "targets that are the tokens": ("ids", FAILED, {"targets": IDS}, "the targets are the tokens themselves"),
    "nothing counts": ("weights", FAILED, {"weights": np.zeros((8, 16))}, "nothing to learn"),
    "a row of padding": ("weights", WARNING, {"weights": np.arange(8)[:, None] * np.ones(16)}, "none in 1 of the rows"),
    "padding": ("weights", WARNING, {"weights": np.arange(16) * np.ones((8, 1)) >= 14}, "most of the computation"),
    "no end": ("end of text", WARNING, {"targets": np.full((8, 16), 7, np.int32)}, "will not learn to end a text"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_batch_that_is_wrong(case):
    subject, verdict, changes, message = WRONG[case]
    result = verdicts(config(), batch(**changes))[subject]
    assert result[0] == verdict and message in result[1]


def test_targets_that_are_ignored_may_hold_anything():
    targets = batch()["targets"].copy()
    targets[0, 0] = -100
    assert verdicts(config(), batch(targets=targets))["ids"][0] == OK


def test_a_vocabulary_that_the_tokenizer_does_not_fill_and_a_prompt_without_ids():
    wide = dataclasses.replace(MODEL, vocab_size=1000)
    assert "741 rows of the embedding are never used" in verdicts(config(model=wide), batch())["vocabulary"][1]
    tok = jf.tokenizer.train("char", ["one"])
    assert verdicts(config(train={"prompt": "@"}), batch(), tokenizer=tok)["prompt"][0] == FAILED


def test_data_smaller_than_a_batch():
    result = verdicts(config(), batch(), summary={"train_tokens": 100})["data"]
    assert result[0] == WARNING and "this is less than one batch of 8 × 16" in result[1]


def test_a_batch_is_shown_with_its_segments_and_what_does_not_count():
    tok = jf.tokenizer.train("byte", [])
    ids = np.array([tok.encode("abcd\nefgh"), tok.encode("ijklmnopq")], np.int32)
    weights = np.ones((2, 9), np.float32)
    weights[1, 4:6] = 0
    segments = np.array([[1] * 9, [1] * 5 + [2] * 4])
    lines = [line.plain for line in shown({"tokens": ids, "targets": ids, "weights": weights, "segments": segments}, tok)]
    assert lines == [
        "row 1: segments of 5 + 4 tokens, 7 of 9 targets count, not at 4–5",
        "       1  ijklm",
        "       2  nopq",
        "row 0: segments of 9 tokens, 9 of 9 targets count",
        "       1  abcd\\nefgh",
    ]
    assert "first float32[2, 3]" in next(shown({"first": np.zeros((2, 3), np.float32)}, tok)).plain


# Loss, gradients, updates


def test_the_loss_at_the_start():
    chance = math.log(MODEL.vocab_size)
    started = lambda loss, **changes: preflight.start(config(**changes), loss)
    assert started(chance + 0.5).verdict == OK
    assert started(math.nan).verdict == FAILED
    assert "initial logits are large" in started(chance + 2).why and started(chance + 2).verdict == WARNING
    assert "may see the tokens" in started(chance - 1.05).why
    assert started(50.0, train={"objective": "a:b"}).verdict == OK
    pretrained = lambda loss: preflight.start(dataclasses.replace(config(), init=run.InitConfig(folder="x")), loss)
    assert pretrained(chance - 0.5).verdict == OK and pretrained(chance + 0.5).verdict == WARNING


class HalfDead:
    """A feed-forward with a tensor that its result does not depend on."""

    @staticmethod
    def spec(cfg):
        return {"used": jf.weight(cfg, "D", "O"), "unused": jf.weight(cfg, "D", "F")}

    @staticmethod
    def apply(params, x, cfg, **_):
        return jf.dense("BTD,DO->BTO", x, params["used"])


def test_tensors_without_a_gradient_are_named(quick_compilation):
    cfg = dataclasses.replace(MODEL, vocab_size=259, mlp=HalfDead())
    of_run = config(model=cfg)
    measured = jax.jit(gradients.measure(run.make_objective(of_run), cfg))
    loss, largest = measured(jf.init(cfg, jax.random.key(0)), {n: jnp.asarray(x) for n, x in batch().items()})
    assert abs(loss - math.log(259)) < 1
    result = gradients.finding(of_run, largest, largest)
    unused = [f"decoder.layers.mlp.unused, layer {layer}" for layer in range(2)]
    assert result.verdict == FAILED and result.why == f"there is none for {unused[0]}, {unused[1]}: it would never be trained"


def test_gradients_that_come_later_are_there_and_none_may_be_nan():
    params = {"a": np.float32(1), "b": np.array([0, 2.0])}
    result = gradients.finding(config(), params, params | {"b": np.ones(2)})
    assert result.verdict == OK and "1 of them only after the first updates" in result.why
    assert gradients.finding(config(), params, params).why.startswith("there is none for b, layer 0:")
    assert gradients.finding(config(train={"objective": "a:b"}), params, params).verdict == WARNING
    result = gradients.finding(config(), {"a": np.float32(np.nan), "b": np.array([1, np.inf])}, params)
    assert result.verdict == FAILED and result.why == "not finite: a, b, layer 1"


def test_the_selection_bias_of_experts_needs_no_gradient():
    cfg = dataclasses.replace(MODEL, experts=jf.Experts(n_experts=4, per_token=2, d_ff=8, selection_bias=True))
    measured = {path: np.ones(()) for path, _ in jf.spec.walk(jf.model.spec(cfg))}
    biases = {path: np.zeros(()) for path in measured if path.endswith("bias")}
    assert biases
    assert gradients.finding(config(model=cfg), measured | biases, measured | biases).verdict == OK


@pytest.mark.parametrize(
    ("losses", "verdict", "message"),
    [
        ([5.0] * 29 + [2.0], OK, "loss 5.000 to 2.000"),
        ([5.0] * 29 + [4.9], WARNING, "less than 10%; optim.lr=0.01 may be low"),
        ([5.0, 4.9], WARNING, "there was no time for 30"),
        ([5.0, 5.0], FAILED, "the loss should fall"),
        ([5.0, math.nan, 3.0], FAILED, "the loss is nan after 1: lower optim.lr=0.01"),
    ],
)
def test_updates_on_one_batch(losses, verdict, message):
    result = preflight.updates(config(), losses, 0.5)
    assert result.verdict == verdict and message in result.why and "50 s for all 100" in result.why


def test_the_trial_has_the_highest_rate_and_no_dropout():
    cfg = MODEL.with_execution(residual_dropout=0.5)
    trial = preflight.trial_of(config(model=cfg, optim={"warmup_steps": 50}))
    assert trial.optim.schedule == "constant" and trial.optim.warmup_steps == preflight.WARMUP
    assert not trial.model.execution.has_dropout


# Checkpoint, memory, disk


@pytest.fixture
def state():
    params = {"a": jnp.arange(6.0), "b": jnp.ones(3)}
    return jf.training.init_state(params, optax.adam(1e-3), jax.random.key(0))


def test_a_checkpoint_that_reads_back_otherwise_fails(state, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    like = jax.eval_shape(lambda: state)
    (written, room) = preflight.saved(config(), state, like)
    assert (written.verdict, room.verdict) == (OK, OK) and "9 leaves" in written.why
    restore = Checkpoints.restore

    def damaged(self, like):
        state = restore(self, like)
        return state.replace(params=state.params | {"b": jnp.array([1, 1, jnp.nextafter(1.0, 2.0)])})

    monkeypatch.setattr(Checkpoints, "restore", damaged)
    (written, _) = preflight.saved(config(), state, like)
    assert written.verdict == FAILED and written.why.startswith("params.b reads back as another value")
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_stops_before_anything_is_allocated(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resources, "limit", lambda: (10_000, 1))
    code, lines = check(config(text), capsys)
    assert code == 1 and lines["memory"][0] == FAILED and "not enough memory" in lines["updates"][1]
    assert "gradients" not in lines


def test_activations_alone_only_warn(monkeypatch):
    fitted = config(model=dataclasses.replace(MODEL, vocab_size=259))
    mesh = fitted.mesh.make(jax.devices()[:1])
    exact = sum(resources.analytic.training_bytes(fitted, mesh)[kind] for kind in resources.EXACT)
    monkeypatch.setattr(resources, "limit", lambda: (exact, 1))
    assert resources.in_memory(fitted, mesh).verdict == WARNING
    monkeypatch.setattr(resources, "limit", lambda: (exact - 1, 1))
    assert resources.in_memory(fitted, mesh).verdict == FAILED


def test_too_little_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: SimpleNamespace(free=2500))
    assert resources.on_disk(config(), 1000).verdict == OK  # evaluated twice, so that it keeps two
    assert resources.on_disk(config(train={"eval_every": 10}), 1000).verdict == FAILED  # two, the best, and a new one


def test_a_run_that_is_there_and_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    assert "a new run will be written" in resources.directory(tmp_path, []).why
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    assert "will be continued" in resources.directory(tmp_path, []).why
    assert resources.directory(tmp_path, ["optim.lr: 1 -> 2"]).verdict == WARNING
    monkeypatch.setattr(resources.os, "access", lambda *_: False)
    assert "cannot be written" in resources.directory(tmp_path / "new" / "run", []).why


def test_states_that_differ_in_one_bit(state):
    leaves = states.leaves(state)
    assert {"params.a", "step", "rng"} <= leaves.keys() and states.differing(leaves, dict(leaves)) == []
    changed = leaves | {"params.a": np.copysign(leaves["params.a"], -1.0)}  # 0 and -0 are equal numbers
    assert states.differing({"params.a": np.zeros(2)}, {"params.a": -np.zeros(2)}) == ["params.a"]
    assert states.differing(leaves, changed) == ["params.a"] and states.apart(leaves["params.a"], changed["params.a"]) == 10
    assert states.differing({"a": np.full(2, np.nan)}, {"a": np.full(2, np.nan)}) == []


def test_one_process_only(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="--check runs in one process"):
        preflight.main(config(), None, None, None, SUITS, False)
