"""One step of a run on disk: what it holds, how it is read, and how it is known to be what was saved."""

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jaxformer.config.spec import diff
from jaxformer.training.digest import FINITE, Summary, path_name, summaries
from jaxformer.training.update import TrainState

log = logging.getLogger(__name__)
ITEMS = ("params", "rest")
"""The items with arrays: a model can be loaded without its optimizer."""
DIGESTS = "digests"
"""The item with the digest of each array."""


class AnotherTree(ValueError):
    """A checkpoint of another architecture, shape or dtype; the message is a tree diff."""


def split(state: TrainState) -> dict[str, Any]:
    """The two items of a step, as arrays or shapes. ``state.rng`` is kept under "key" as its integers, by the key's kind."""
    abstract = isinstance(state.rng, jax.ShapeDtypeStruct)
    key = _data(state.rng) if abstract else jax.random.key_data(state.rng)
    return {"params": state.params, "rest": {"step": state.step, "opt_state": state.opt_state, "key": {_kind(state.rng): key}}}


def joined(items: dict[str, Any], like: TrainState) -> TrainState:
    """The state whose ``split`` is ``items``."""
    rest = items["rest"]
    rng = _wrap(rest["key"], like.rng)
    return dataclasses.replace(like, params=items["params"], step=rest["step"], opt_state=rest["opt_state"], rng=rng)


def digests(step: int, known: dict[str, dict[str, Summary]], metrics: dict[str, float] | None) -> dict[str, Any]:
    """The item ``DIGESTS`` of a step, from the summaries of its items and its validation loss."""
    return {"step": step, "metrics": metrics} | {
        name: {path: s.digest for path, s in item.items()} for name, item in known.items()
    }


def nonfinite(known: dict[str, dict[str, Summary]]) -> str:
    """The first array of some items that is not finite, in words; "" if all are."""
    summaries_by_path = (pair for item in known.values() for pair in item.items())
    return next((f"{path} is {s.numbers}" for path, s in summaries_by_path if s.numbers != FINITE), "")


def read(path: Path, like: dict[str, Any], partial: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The items of ``like`` in the step at ``path``, and its digests ({} where a former version of the library wrote it).

    Raises AnotherTree, and many kinds of errors, for truncated and missing files.
    """
    saved = check(path, like)
    expected = _read_digests(path)
    _refuse_another(path, like, saved, partial)
    with _reader() as reader:
        read_item = functools.partial(_read_part, _alone()) if partial else reader.restore
        return {name: read_item(path / name, _with_sharding(item)) for name, item in like.items()}, expected


def check(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """The metadata of items of a step. Raises OSError where they are not there or cannot be read."""
    if absent := [name for name in names if not (path / name / "_METADATA").exists()]:
        raise OSError(f"it lacks {' and '.join(absent)}")
    with _reader() as reader:
        saved = {name: reader.metadata(path / name).item_metadata for name in names}
    if unreadable := [name for name in names if saved[name] is None]:
        raise OSError(f"its {' and '.join(unreadable)} cannot be read")
    return saved


def mismatch(items: dict[str, Any], expected: dict[str, Any]) -> str:
    """What is wrong with arrays that were read, given the digests that were saved with them; "" if nothing is."""
    known = {name: summaries(item) for name, item in items.items()}
    for name, item in known.items() if expected else ():
        for path, summary in item.items():
            if summary.digest != expected[name].get(path):
                return f"{path} differs from what was saved (digest {summary.digest}, saved as {expected[name].get(path)})"
    return nonfinite(known)


def check_loss(metrics: dict[str, float], path: Path) -> None:
    """Raises an error where ``metrics``, as read from the step at ``path``, is not the validation loss that was saved there."""
    loss = metrics["loss"]
    if isinstance(loss, bool) or not math.isfinite(loss):
        raise ValueError(f"it is {loss}")
    if (file := path / DIGESTS / "metadata").exists() and json.loads(file.read_text(encoding="utf-8"))["metrics"] != metrics:
        raise ValueError("it differs from what was saved")


def _read_digests(path: Path) -> dict[str, Any]:
    """Raises OSError where they are lost, ValueError where they cannot be read or are another step's."""
    file = path / DIGESTS / "metadata"
    if not file.exists():
        contents = path / "_CHECKPOINT_METADATA"
        if file.parent.exists() or (contents.exists() and DIGESTS in contents.read_text(encoding="utf-8", errors="replace")):
            raise OSError("its digests are missing")
        log.warning("%s was written by an earlier version, without digests, so its numbers cannot be verified", path)
        return {}
    saved = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(saved, dict) or not all(isinstance(saved.get(name), dict) for name in ITEMS):
        raise ValueError("its digests cannot be read")
    if str(saved.get("step")) != path.name:
        raise ValueError(f"it is a copy of step {saved.get('step')}")
    return saved


def _refuse_another(path: Path, like: dict[str, Any], saved: dict[str, Any], partial: bool) -> None:
    for name, item in like.items():
        expected, actual = _leaves(item), _leaves(saved[name].tree)
        if partial:
            actual = {path: text for path, text in actual.items() if path in expected}
        if lines := diff(expected, actual):
            raise AnotherTree(f"checkpoint {path} does not fit this run; its {name} differ:\n" + "\n".join(lines))


def _alone() -> Any:
    """Options to read without waiting for other processes, which may fail: each reads what its devices hold."""
    import orbax.checkpoint as ocp

    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"{index}")


def _reader() -> Any:
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer(multiprocessing_options=_alone())


def _read_part(options: Any, path: Path, like: Any) -> Any:
    """The tensors of ``like`` from an item that may hold more."""
    import orbax.checkpoint as ocp

    arguments = ocp.checkpoint_utils.construct_restore_args(like)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    with ocp.Checkpointer(handler, multiprocessing_options=options) as reader:
        return reader.restore(path, args=ocp.args.PyTreeRestore(item=like, restore_args=arguments, partial_restore=True))


def _with_sharding(like: Any) -> Any:
    """``like`` as shapes with shardings: those that it has, else one device, whatever devices it was saved on."""
    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def shape(x):
        abstract = isinstance(x, jax.ShapeDtypeStruct) and x.sharding is not None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if abstract else one_device)

    return jax.tree.map(shape, like)


def _data(key: Any) -> jax.ShapeDtypeStruct:
    data = jax.eval_shape(jax.random.key_data, key)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=key.sharding)  # replicated, whatever its shape


def _wrap(data: dict[str, jax.Array], like: Any) -> jax.Array:
    """The typed key with the content ``data``, of the kind of ``like`` (a key or its shape)."""
    return jax.random.wrap_key_data(data[_kind(like)], impl=_kind(like))


def _kind(key: Any) -> str:
    kinds: list[str] = []
    jax.eval_shape(lambda key: kinds.append(str(jax.random.key_impl(key))), key)
    return kinds[0]


def _leaves(tree: Any) -> dict[str, str]:
    """``path -> "dtype[shape]"``."""

    def text(leaf):
        dtype = getattr(leaf, "dtype", None)
        return f"{dtype}[{', '.join(map(str, leaf.shape))}]"

    return {path_name(path): text(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
