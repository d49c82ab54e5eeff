"""Training that begins from a model that is there already, and the way back."""

import dataclasses
import functools
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import published
import pytest
from golden import weights

import jaxformer as jf
from jaxformer.cli import pretrained, train
from jaxformer.parallel.sharding import MeshConfig
from jaxformer.tokenizers import tokenizer
from jaxformer.training import run
from jaxformer.training.run import InitConfig

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = Path(__file__).parents[2]
TEXT = "one two three, " * 60


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def folder(tmp_path):
    """A published LLaMA with a tokenizer."""
    published.folder(tmp_path / "published", "llama")
    tokenizer.train("char", [TEXT]).save(tmp_path / "published")
    return tmp_path / "published"


def config(directory, text, init, steps=2, **model):
    return jf.Config(
        model=dataclasses.replace(jf.presets.llama(vocab_size=3, d_model=16, n_layers=1, n_heads=2), **model),
        data=jf.DataConfig(path=text, tokenizer="char", length=8, batch_size=8, segment_documents=False),
        optim=jf.OptimConfig(lr=1e-3, warmup_steps=0),
        train=jf.TrainConfig(steps=steps, eval_every=2, log_every=1, prompt="one", sample_tokens=2),
        init=InitConfig(folder=str(init)),
        run_dir=str(directory),
    )


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, a, b)))


def test_a_published_model_is_trained_further_and_goes_back(folder, text, tmp_path):
    cfg, before = jf.hf.load(folder)
    asked = config(tmp_path / "run", text, folder)
    assert asked.model != cfg
    adopted, _, read = pretrained.begin(asked)
    assert adopted.model == cfg and same(read(), before), "what training begins from is what the folder holds"

    train.main(asked)
    now, params, tok = jf.load(tmp_path / "run")
    assert now == cfg and tok.encode("one") and not same(params, before)
    largest = max(float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (params, before)), strict=True))
    assert largest < 0.01, "two steps of 1e-3 away, not drawn anew"

    subprocess.run(
        [sys.executable, "-m", "jaxformer.hf", "export", tmp_path / "run", tmp_path / "back"], check=True, capture_output=True
    )
    again, back = jf.hf.load(tmp_path / "back")
    assert again == cfg and same(back, params)


def test_a_run_goes_on_without_the_folder_it_began_from(folder, text, tmp_path, monkeypatch):
    train.main(config(tmp_path / "run", text, folder))
    _, first, _ = jf.load(tmp_path / "run")
    folder.rename(tmp_path / "elsewhere")
    train.main(config(tmp_path / "run", text, folder, steps=4))
    assert not same(jf.load(tmp_path / "run")[1], first)


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_from_the_folder_again(folder, text, tmp_path):
    train.main(config(tmp_path / "run", text, folder))
    _, once, _ = jf.load(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train.main(config(tmp_path / "run", text, folder))
    assert same(jf.load(tmp_path / "run")[1], once)


def test_a_run_may_begin_from_a_run_in_another_dtype(folder, text, tmp_path):
    train.main(config(tmp_path / "first", text, folder))
    cfg, params, _ = jf.load(tmp_path / "first")
    adopted, tok, read = pretrained.begin(config(tmp_path / "second", text, tmp_path / "first", param_dtype="bfloat16"))
    assert adopted.model == dataclasses.replace(cfg, param_dtype="bfloat16")
    assert tok.encode("one") == tokenizer.load(tmp_path / "first").encode("one")
    assert same(read(), jax.tree.map(lambda array: array.astype("bfloat16"), params))


@pytest.mark.parametrize("kind", ["published", "run"])
def test_on_a_mesh_it_is_read_to_its_shards(kind, folder, text, tmp_path):
    mesh = MeshConfig(fsdp=8)
    if kind == "run":
        train.main(config(tmp_path / "first", text, folder))
        folder = tmp_path / "first"
    asked = dataclasses.replace(config(tmp_path / "run", text, folder), mesh=mesh)
    adopted, _, read = pretrained.begin(asked)
    fresh = functools.partial(run.initial_state, adopted)
    placement = train.make_placement(adopted, mesh.make(), run.make_objective(adopted), abstract := jax.eval_shape(fresh))
    like = placement.like(abstract)
    params = read(like.params)
    assert same(params, jf.load(folder)[1] if kind == "run" else jf.hf.load(folder)[1])
    info = [leaf.sharding for leaf in jax.tree.leaves(params)]
    assert info == [shape.sharding for shape in jax.tree.leaves(like.params)] and not all(p.is_fully_replicated for p in info)
    state = train.begin(placement, abstract, fresh, None, lambda like: params)
    assert same(state.params, params)
    train.main(asked)


def test_a_run_that_does_not_exist_is_not_looked_for_on_the_hub(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = r"^there is no run in runs/dates\. To train it: uv run train\.py configs/dates\.py$"
    with pytest.raises(FileNotFoundError, match=missing):
        pretrained.load("runs/dates")
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "config.json").write_text("{}")
    missing = r"there is no run in runs/dates\. Runs that exist: runs/quickstart\. To train it"
    with pytest.raises(FileNotFoundError, match=missing):
        pretrained.load("runs/dates")
    with pytest.raises(FileNotFoundError, match=missing):
        train.main(config(tmp_path / "run", text, "runs/dates"))
    with pytest.raises(FileNotFoundError, match="there is no folder quickstart; did you mean runs/quickstart?"):
        pretrained.load("quickstart")


def test_what_cannot_be_had_together_is_refused(folder, text, tmp_path):
    tokenizer.train("char", ["".join(map(chr, range(40, 2000)))]).save(folder)
    with pytest.raises(ValueError, match="has 1963 ids, but the model of .* rows"):
        train.main(config(tmp_path / "run", text, folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="holds neither"):
        train.main(config(tmp_path / "run", text, folder))
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        train.main(config(tmp_path / "run", text, "./nowhere"))
    assert not (tmp_path / "run").exists(), "nothing is left behind"


def test_a_run_that_began_elsewhere_is_refused(folder, text, tmp_path):
    train.main(config(tmp_path / "run", text, folder))
    other = dataclasses.replace(config(tmp_path / "run", text, folder), init=InitConfig())
    with pytest.raises(ValueError, match="began from .*published, not from fresh parameters; choose another --run-dir"):
        train.main(other)


def test_the_command_line_decides_nothing_that_the_folder_does(tmp_path):
    file = ROOT / "configs" / "quickstart.py"
    with pytest.raises(ValueError, match="--model.n-layers would have no effect with --init.from"):
        run.parse(["--init.from", "x", "--model.n-layers", "2"], file)
    parsed = run.parse(["--init.from", "x", "--model.dtype", "bfloat16"], file).config
    assert (parsed.init.folder, parsed.model.execution.dtype) == ("x", "bfloat16")
    with pytest.raises(ValueError, match="init.revision has no effect without init.from"):
        InitConfig(revision="main")


def test_a_published_encoder_decoder_starts_its_targets_as_it_learned_to(text, tmp_path):
    published.folder(tmp_path / "t5", "t5_v10")
    tokenizer.train("char", [TEXT]).save(tmp_path / "t5")
    assert weights.load("t5_v10")[0]["decoder_start_token_id"] == 0
    with pytest.raises(ValueError, match="its targets start with id 0, and those of the data would with .* bos, 1"):
        pretrained.begin(config(tmp_path / "run", text, tmp_path / "t5"))
