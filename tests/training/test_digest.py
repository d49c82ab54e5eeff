"""Arrays are loaded as they were saved or not at all: digests, damage to every file of a step, numbers that are not finite."""

import dataclasses
import gc
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxformer as jf
from jaxformer.training import run
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.config import TrainConfig
from jaxformer.training.digest import digest, drifted, summaries
from jaxformer.training.guard import Guard
from jaxformer.training.records import keep_until
from jaxformer.training.update import init_state, make_update
from tests.states import CFG, OPTIM, STEPS, assert_equal, at, fresh, like, listing, params_of, restore, save

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax abandons other reads


@pytest.fixture(autouse=True)
def collected():
    """What is left of reads that Orbax abandons is collected here, and warns in no other test."""
    yield
    gc.collect()


def by_hand(x) -> int:
    """The digest of an array, one Python integer for each element."""
    raw = np.asarray(x)
    size = {1: "u1", 2: "u2", 4: "u4", 8: "u4"}[raw.dtype.itemsize]
    total = 0
    for index, bits in enumerate(np.frombuffer(raw.tobytes(), size).tolist()):
        h = (bits + index * 0x9E3779B9) % 2**32
        h = ((h ^ h >> 16) * 0x7FEB352D) % 2**32
        h = ((h ^ h >> 15) * 0x846CA68B) % 2**32
        total += h ^ h >> 16
    return total % 2**32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
def test_the_digest_is_that_of_every_element_by_hand(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 7)) * 3).astype(dtype)
    assert int(digest(x)) == by_hand(x)


def test_the_digest_is_the_same_on_every_mesh_and_sees_every_bit_and_place():
    x = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
    plain = int(digest(x))
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    for spec in (PartitionSpec(), PartitionSpec("a"), PartitionSpec("a", "b"), PartitionSpec(None, "b")):
        assert int(digest(jax.device_put(x, NamedSharding(mesh, spec)))) == plain
    for bit in range(32):
        other = x.view(np.uint32).copy()
        other[3, 4] ^= np.uint32(1 << bit)
        assert int(digest(other.view(np.float32))) != plain
    assert int(digest(x[::-1])) != plain
    assert int(digest(np.where(x == x[0, 0], -0.0, x))) != int(digest(np.where(x == x[0, 0], 0.0, x)))


def test_a_summary_says_what_is_not_finite():
    tree = {"a": jnp.ones(3), "b": {"c": jnp.array([1.0, jnp.inf])}, "d": jnp.array([jnp.nan, jnp.inf]), "n": jnp.arange(3)}
    assert {name: s.numbers for name, s in summaries(tree).items()} == {"a": "finite", "b.c": "inf", "d": "nan", "n": "finite"}
    assert summaries({"best": jnp.float32(jnp.inf)})["best"].numbers == "finite"  # a scalar of an optimizer's


# Damage to every file


def truncate(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path, other: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip(share: float):
    """One bit, at that share of the file."""

    def damage(path: Path, other: Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(int(share * len(data)), len(data) - 1)] ^= 4
        path.write_bytes(data)

    return damage


def remove(path: Path, other: Path) -> None:
    path.unlink()


def swap(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


DAMAGES = {"truncated": truncate, "zeroed": zero, "removed": remove, "another step's": swap}
DAMAGES |= {f"one bit at {share}": flip(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)}
KINDS = {
    "float32": (CFG, OPTIM),
    "mean of the parameters": (CFG, dataclasses.replace(OPTIM, ema=0.9)),
    "Muon": (CFG, dataclasses.replace(OPTIM, name="muon")),
}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("digests")
    save(directory, at(3), at(6), losses=[2.0, 1.0])
    return directory


@pytest.fixture(scope="module")
def steps_of_each_kind(two_steps, tmp_path_factory) -> dict[str, Path]:
    folders = {"float32": two_steps}
    for kind in ("mean of the parameters", "Muon"):
        folders[kind] = tmp_path_factory.mktemp("digests")
        state = fresh(*KINDS[kind])
        save(folders[kind], at(3, state), at(6, state), losses=[2.0, 1.0])
    return folders


def files(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size)


def counterpart(path: Path, copy: Path) -> Path:
    """The file of step 3 that has the role of ``path`` in step 6; files with arrays have names of their own in every step."""
    folder = copy / "3" / path.parent.relative_to(copy / "6")
    if (folder / path.name).exists():
        return folder / path.name
    by_size = lambda folder: sorted(folder.iterdir(), key=lambda file: (file.stat().st_size, file.name))
    return by_size(folder)[min(by_size(path.parent).index(path), len(by_size(folder)) - 1)]


def outcome(copy: Path, kind: str = "float32") -> str:
    """What reading the parameters and restoring give: the step of the state, which must be exactly that step's."""
    cfg, optim = KINDS[kind]
    state = fresh(cfg, optim)
    try:
        params = params_of(copy, cfg)
        found = restore(copy, like(cfg, optim))
    except ValueError as error:
        assert "can be read" in str(error)
        return "refused"
    step = int(found.step)
    assert_equal(found, at(step, state))
    known = [at(number, state).params for number in (3, 6)]
    same = [all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (params, other)), strict=True)) for other in known]
    assert any(same), "parameters of no step"
    return f"step {step}"


def test_one_bit_in_the_largest_file_of_arrays_is_noticed_by_every_reader(two_steps, tmp_path, caplog):
    copy = shutil.copytree(two_steps, tmp_path / "checkpoints")
    largest = max(files(copy / "6" / "params"), key=lambda path: path.stat().st_size)
    flip(0.5)(largest, largest)
    jax.tree.map(np.testing.assert_array_equal, params_of(copy), at(3).params)
    assert "differs from what was saved (digest" in caplog.text or "skipping the damaged checkpoint" in caplog.text
    assert outcome(copy) == "step 3"
    assert "6.broken" in listing(copy)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_damage_to_any_file_loads_another_number(steps_of_each_kind, tmp_path, kind, damage):
    outcomes, directory = [], steps_of_each_kind[kind]
    for path in files(directory / "6"):
        copy = shutil.copytree(directory, tmp_path / "checkpoints")
        damaged = copy / path.relative_to(directory)
        DAMAGES[damage](damaged, counterpart(damaged, copy))
        outcomes.append(outcome(copy, kind))
        shutil.rmtree(copy)
    print(f"{len(outcomes)} files, {kind}, {damage}: {outcomes}")
    assert len(outcomes) >= 10 and "step 3" in outcomes  # some damage must matter, and all of it is noticed or harmless


def test_an_item_of_another_step_is_noticed(two_steps, tmp_path, caplog):
    copy = shutil.copytree(two_steps, tmp_path / "checkpoints")
    for item in ("params", "rest", "digests"):
        shutil.rmtree(copy / "6" / item)
        shutil.copytree(copy / "3" / item, copy / "6" / item)
        assert outcome(copy) == "step 3"
        shutil.rmtree(copy / "6.broken")
        shutil.copytree(two_steps / "6", copy / "6")
    shutil.rmtree(copy / "6")
    shutil.copytree(copy / "3", copy / "6")
    assert outcome(copy) == "step 3" and "it is a copy of step 3" in caplog.text


def test_lost_digests_are_noticed_and_those_of_former_versions_are_not_missed(two_steps, tmp_path, caplog):
    copy = shutil.copytree(two_steps, tmp_path / "checkpoints")
    shutil.rmtree(copy / "6" / "digests")
    assert outcome(copy) == "step 3" and "its digests are missing" in caplog.text
    contents = copy / "3" / "_CHECKPOINT_METADATA"
    handlers = json.loads(contents.read_text())
    del handlers["item_handlers"]["digests"]
    contents.write_text(json.dumps(handlers))
    shutil.rmtree(copy / "3" / "digests")
    assert outcome(copy) == "step 3"


# Numbers that are not finite


def spoilt(step: int, value: float = float("nan")):
    state = at(step)
    params = jax.tree.map(lambda x: x, state.params)
    params["decoder"]["layers"]["mlp"]["down"] = params["decoder"]["layers"]["mlp"]["down"].at[0, 0, 0].set(value)
    return dataclasses.replace(state, params=params)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, value):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        with pytest.raises(
            FloatingPointError, match=f"decoder.layers.mlp.down is {value} after step 3.* no step has been saved"
        ):
            checkpoints.save(spoilt(3, float(value)))
        checkpoints.save(at(3))
        with pytest.raises(FloatingPointError, match="the newest good checkpoint is step 3"):
            checkpoints.save(spoilt(6, float(value)))
        moments = jax.tree.map(
            lambda x: jnp.full_like(x, float(value)) if x.ndim and x.dtype == jnp.float32 else x, at(6).opt_state
        )
        with pytest.raises(FloatingPointError, match=f"opt_state.* is {value} after step 6"):
            checkpoints.save(dataclasses.replace(at(6), opt_state=moments))
    assert_equal(restore(tmp_path), at(3))


def test_a_step_that_a_former_version_saved_with_nan_is_passed_over(tmp_path, monkeypatch, caplog):
    save(tmp_path, at(3))
    with monkeypatch.context() as patch:
        patch.setattr("jaxformer.training.stored.nonfinite", lambda known: "")
        save(tmp_path, spoilt(6))
    jax.tree.map(np.testing.assert_array_equal, params_of(tmp_path), at(3).params)
    assert_equal(restore(tmp_path), at(3))
    assert "6: decoder.layers.mlp.down is nan" in caplog.text


def objective(params, batch, rng):
    total = (params["w"] * batch["x"]).sum() + (jnp.sqrt(params["v"]) * batch["x"]).sum()
    return total, {"weight": jnp.float32(batch["x"].size)}


@pytest.mark.parametrize("optimizer", [optax.adam(0.1), optax.sgd(0.1, momentum=0.9)], ids=["adam", "sgd"])
def test_an_update_whose_gradient_is_not_finite_leaves_the_state_as_it_was(optimizer):
    params = {"v": jnp.ones(4), "w": jnp.ones(4)}
    update = jax.jit(make_update(objective, optimizer))
    state, metrics = update(init_state(params, optimizer, jax.random.key(0)), {"x": jnp.ones((2, 4))})
    assert float(metrics["nonfinite"]) == 0 and not np.array_equal(state.params["w"], params["w"])
    for x, expected in ((jnp.nan, 1), (jnp.inf, 1), (3e38, 1)):
        after, metrics = update(state, {"x": jnp.full((2, 4), x)})
        assert float(metrics["nonfinite"]) == expected and not np.isfinite(metrics["grad_norm"])
        assert int(after.step) == int(state.step) + 1
        jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (state.params, state.opt_state))
    broken = dataclasses.replace(state, params=state.params | {"v": jnp.zeros(4)})  # the slope of a root at 0
    assert float(update(broken, {"x": jnp.ones((2, 4))})[1]["nonfinite"]) == 1


def test_a_run_stops_at_the_first_update_that_is_not_finite_or_after_as_many_as_it_may_skip(caplog):
    good = {"loss": 1.0, "grad_norm": 2.0, "nonfinite": 0.0}
    bad = {"loss": float("nan"), "grad_norm": float("nan"), "nonfinite": 2.0}

    def guard(most):
        train = TrainConfig(max_skipped=most, agree_every=7)
        return Guard(train, {"a": 0, "b": {"c": 0}}, dict, lambda: "newest good step 10")

    with pytest.raises(FloatingPointError, match="gradient of b.c is nan at step 20; newest good step 10"):
        guard(0).fetch(20, bad)
    patient = guard(2)
    assert patient.fetch(1, good) == {"loss": 1.0, "grad_norm": 2.0}
    for step in (2, 3):
        assert patient.fetch(step, bad)["skipped"] == step - 1
    assert patient.fetch(4, good)["skipped"] == 2
    assert patient.fetch(5, bad)["skipped"] == 3 and patient.fetch(6, bad)["skipped"] == 4
    assert "step 6: this update is skipped (2 in a row, of at most 2)" in caplog.text
    with pytest.raises(FloatingPointError, match="at step 7"):
        patient.fetch(7, bad)
    with pytest.raises(FloatingPointError, match="the loss is inf at step 3; newest good step 10"):
        guard(2).fetch(3, good | {"loss": float("inf")})


# Copies that differ


def test_a_device_whose_copy_differs_is_found():
    mesh = jax.make_mesh((8,), ("a",))
    replicated, sharded = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("a"))
    x = np.arange(16.0, dtype=np.float32)
    parts = [jax.device_put(x + (number == 5), device) for number, device in enumerate(mesh.devices.flat)]
    differing = jax.make_array_from_single_device_arrays(x.shape, replicated, parts)
    assert drifted({"w": jax.device_put(x, replicated), "s": jax.device_put(x, sharded)}) == []
    assert drifted({"w": jax.device_put(x, replicated), "d": differing}) == [0]
    guard = Guard(TrainConfig(agree_every=7), {}, dict, lambda: "newest good step 5")
    guard.compare(6, {"d": differing})
    with pytest.raises(
        FloatingPointError, match="copies of the parameters differ at step 7, on a device of process 0: .*newest good step 5"
    ):
        guard.compare(7, {"d": differing})


# Places


@pytest.mark.parametrize("name", ["a[1]", "[!x]", "a\\b"])
def test_a_place_that_orbax_could_not_read_again_is_refused_before_anything_is_written(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="checkpoints cannot be kept in .* make a link"):
        Checkpoints(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / name)
    save(tmp_path / "link", at(3))
    assert_equal(restore(tmp_path / "link"), at(3))


@pytest.mark.parametrize("name", ["a*b", "a?b", "~x", "a b", "ünï文", "a{b}", "50%", "a#b", "a'b\"", "a\nb", "x" * 255, "a]"])
def test_other_odd_names_are_saved_to_and_read_from(name, tmp_path):
    save(tmp_path / name, at(3))
    assert_equal(restore(tmp_path / name), at(3))


def test_a_step_that_cannot_be_read_back_is_an_error(tmp_path, monkeypatch):
    def fail(path, names):
        raise OSError("it lacks rest")

    monkeypatch.setattr("jaxformer.training.stored.check", fail)
    with pytest.raises(OSError, match="was written, but cannot be read back: it lacks rest"):
        save(tmp_path, at(3))


# The small files of a run


@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("small") / "run"
    config = jf.Config(model=CFG, optim=OPTIM, train=jf.TrainConfig(steps=STEPS))
    run.write_run(directory, config, jf.tokenizer.train("char", ["all sorts of text"], 0))
    save(directory / "checkpoints", at(3))
    return directory


def positions(size: int) -> list[int]:
    return sorted({size * i // 25 for i in range(25)} | {size - 1})


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_one_bit_anywhere_in_a_small_file_of_a_run_loads_nothing_else(small_run, tmp_path, name):
    cfg, _, tok = jf.load(small_run)
    copy = shutil.copytree(small_run, tmp_path / "run")
    data, refused = (copy / name).read_bytes(), 0
    for position in positions(len(data)):
        for bit in (0, 2, 5):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            (copy / name).write_bytes(changed)
            try:
                found = jf.load(copy)
            except (ValueError, FileNotFoundError):
                refused += 1
                continue
            assert found[0] == cfg and found[2].content_hash == tok.content_hash, (position, bit)
    assert refused > 40


def test_an_edited_config_is_taken_once_it_says_that_it_is_meant(small_run, tmp_path):
    copy = shutil.copytree(small_run, tmp_path / "run")
    values = json.loads((copy / "config.json").read_text())
    values["model"]["norm_eps"] = 0.5
    (copy / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="config.json has changed since it was written.* delete 'checksums'"):
        jf.load(copy)
    assert jf.load(copy, trust=True)[0].norm_eps == 0.5
    del values["checksums"]
    (copy / "config.json").write_text(json.dumps(values))
    assert jf.load(copy)[0].norm_eps == 0.5


def test_copies_that_pmap_stacks_are_compared_too():
    devices = jax.devices()
    by_device = NamedSharding(jax.make_mesh((8,), ("a",)), PartitionSpec("a"))
    x = np.arange(16.0, dtype=np.float32)
    parts = [jax.device_put(x[None] + (number == 3), device) for number, device in enumerate(devices)]
    stacked = jax.make_array_from_single_device_arrays((8, 16), by_device, parts)
    assert drifted({"w": stacked}, stacked=True) == [0] and drifted({"w": stacked}) == []
    assert drifted({"w": jax.device_put(np.stack([x] * 8), by_device)}, stacked=True) == []


# What an attack found


@pytest.mark.parametrize(
    "content", ['{"other": 1}', "{}", '{"loss": 1' + "0" * 400 + "}", "[" * 100_000, '{"loss": -5.0}', '{"loss": true}']
)
def test_a_validation_loss_that_is_not_what_was_saved_counts_no_more(content, two_steps, tmp_path, caplog):
    copy = shutil.copytree(two_steps, tmp_path / "checkpoints")
    (copy / "3" / "metrics" / "metrics").write_text(content)
    assert_equal(restore(copy), at(6))
    assert "the validation loss of step 3 cannot be used" in caplog.text
    with Checkpoints(copy) as checkpoints:
        assert checkpoints.best_step() == 6


def test_only_numbers_as_they_are_written_are_steps(two_steps, tmp_path):
    copy = shutil.copytree(two_steps, tmp_path / "checkpoints")
    for name in ("9²", "012", "9٣", "0015", "+7", "1_0"):
        (copy / name).mkdir()
    assert Checkpoints(copy).steps() == [3, 6]
    assert_equal(restore(copy), at(6))


def test_a_place_whose_name_is_not_utf8_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the name is not UTF-8"):
        Checkpoints(tmp_path / "bad\udcffname")


def test_a_run_whose_checkpoints_cannot_be_reached_is_refused_and_its_records_stay(small_run, tmp_path, caplog):
    copy = shutil.copytree(small_run, tmp_path / "run")
    config = dataclasses.replace(run.read_run(copy), run_dir=str(copy))
    assert run.open_run(config)[0] == copy
    values = json.loads((copy / "config.json").read_text())
    values["optim"]["lr"] = 0.5
    (copy / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="config.json has changed since it was written"):
        run.open_run(config)
    shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints").symlink_to(tmp_path / "not mounted")
    with pytest.raises(ValueError, match="cannot be reached; is its disk mounted"):
        run.open_run(config)
    records = b'{"step": 3, "kind": "train", "loss": 1.0}\n{"step": 3, "kind": "validation", "loss": 1.0}\n'
    (copy / "metrics.jsonl").write_bytes(records)
    keep_until(copy / "metrics.jsonl", 0)
    assert (copy / "metrics.jsonl").read_bytes() == b"" and (copy / "metrics.jsonl.before").read_bytes() == records
    assert "training begins at step 0" in caplog.text
