"""The first losses of shipped configs: committed, found again, and compared by a run that is like them."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import jaxformer as jf
from jaxformer.prove import reference
from jaxformer.training import run
from jaxformer.training.report import Report

ROOT = Path(__file__).parents[2]
CORPUS = SimpleNamespace(tokenizer=SimpleNamespace(content_hash="t"), content_hash="c")
MODEL = jf.presets.llama(vocab_size=67, d_model=16, n_layers=1, n_heads=2)
LOSSES = tuple(5.0 - 0.1 * number for number in range(reference.STEPS))


def config(**train):
    return jf.Config(model=MODEL, data=jf.DataConfig(length=8, batch_size=8), train=jf.TrainConfig(**train))


def made(losses=LOSSES, version=jax.__version__):
    return reference.Reference("tiny", reference.key(config(), CORPUS), "text", version, "x86_64", tuple(losses))


def watched(monkeypatch, losses, references, start=0, of=None):
    """Lines that a run with these losses would print."""
    monkeypatch.setattr(reference, "references", lambda: tuple(references))
    watch = reference.watch(of or config(), CORPUS, start)
    return [line for step, loss in enumerate(losses, start + 1) if (line := watch(step, loss))]


def test_a_run_like_the_reference_is_told_once(monkeypatch):
    (line,) = watched(monkeypatch, [*LOSSES, 3.0, 2.0], [made()])
    assert line == f"The first 20 losses match the reference losses of jax {jax.__version__}, to the bit."


def test_how_far_off_and_from_where(monkeypatch):
    near = [loss * (1 + 4e-7 * (number == 12)) for number, loss in enumerate(LOSSES)]
    (line,) = watched(monkeypatch, near, [made()])
    assert "match" in line and "up to rounding (at most 4e-07 apart, at step 13, relative)" in line
    far = [loss * (1 + 1e-4 * (number - 14) * (number >= 15)) for number, loss in enumerate(LOSSES)]
    (line,) = watched(monkeypatch, far, [made()])
    assert "differ from the reference" in line and "more than 1e-05 from step 16 on" in line
    assert "at most 0.0005 apart, at step 20" in line and "match" not in line


def test_the_version_of_jax_is_said_where_it_is_another(monkeypatch):
    (line,) = watched(monkeypatch, LOSSES, [made(version="0.1.0"), made(version="0.2.0")])
    assert f"the reference losses of jax 0.2.0 (this is jax {jax.__version__})" in line
    (line,) = watched(monkeypatch, LOSSES, [made(), made([9.0] * 20, "99.0.0")])
    assert "to the bit" in line


def test_nothing_is_said_without_a_reference(monkeypatch):
    assert watched(monkeypatch, LOSSES, []) == []
    assert watched(monkeypatch, LOSSES, [made()], of=config(seed=1)) == []
    assert watched(monkeypatch, LOSSES, [made()], start=5) == [], "a run that is continued"
    assert watched(monkeypatch, LOSSES[:19], [made()]) == []


def test_what_the_key_is_made_of():
    key = reference.key(config(), CORPUS)
    same = dataclasses.replace(config(log_every=1, eval_every=7, prompt="x"), run_dir="elsewhere")
    assert reference.key(same, CORPUS) == key
    different = [
        config(steps=999),
        config(seed=1),
        dataclasses.replace(config(), optim=jf.OptimConfig(lr=2e-3)),
        dataclasses.replace(config(), model=dataclasses.replace(MODEL, norm_eps=1e-3)),
    ]
    assert all(reference.key(other, CORPUS) != key for other in different)
    for name in ("tokenizer", "content_hash"):
        other = SimpleNamespace(content_hash="other")
        assert reference.key(config(), SimpleNamespace(**vars(CORPUS) | {name: other if name == "tokenizer" else "d"})) != key


def test_a_field_that_is_new_changes_no_key(monkeypatch):
    before, to_dict = reference.key(config(), CORPUS), reference.to_dict
    monkeypatch.setattr(reference, "to_dict", lambda record: to_dict(record) | {"new": {"field": 0}})
    assert reference.key(config(), CORPUS) == before


@pytest.mark.parametrize("name", ["quickstart", "dates", "moe_quickstart"])
def test_every_small_config_has_references(name):
    mine = [r for r in reference.references() if r.config == name]
    assert mine and all(len(r.losses) == reference.STEPS and r.losses[-1] < r.losses[0] for r in mine)


def test_the_reference_of_generated_data_belongs_to_the_config_as_it_is():
    """Its data is the same everywhere, so that the key can be worked out here."""
    dates = run.read_config(ROOT / "configs" / "dates.py")[0]
    corpus = jf.data.load(dates.data)
    fitted = dataclasses.replace(dates, model=run.fit_tokenizer(dates.model, corpus.tokenizer))
    assert reference.key(fitted, corpus) in {r.key for r in reference.references() if r.config == "dates"}


def test_the_first_losses_of_dates_match_on_this_machine():
    """On the 8 devices of the tests, whose sums are in another order."""
    key, losses = reference.measure(run.read_config(ROOT / "configs" / "dates.py")[0], 3)
    (expected,) = {r.losses[:3] for r in reference.references() if r.key == key and r.jax == jax.__version__} or {()}
    if not expected:
        pytest.skip(f"no reference of jax {jax.__version__}")
    assert losses == pytest.approx(expected, rel=reference.NEAR)


def test_the_report_prints_what_the_watch_says(tmp_path, capsys):
    seen = []
    watch = lambda step, loss: seen.append((step, loss)) or ("as it should be" if step == 2 else "")
    with Report(tmp_path, 0, 3, 10, lambda step, metrics: metrics, watch) as report:
        for step in (1, 2, 3):
            report.train(step, {"loss": float(step), "weight": 1.0})
    assert seen == [(1, 1.0), (2, 2.0), (3, 3.0)] and capsys.readouterr().out.count("as it should be") == 1


def test_the_references_are_part_of_the_package():
    assert reference.FILE.is_relative_to(ROOT / "jaxformer") and json.loads(reference.FILE.read_text())
