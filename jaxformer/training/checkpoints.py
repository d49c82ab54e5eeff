"""Checkpoints by Orbax: written in the background and restored, either completely or not at all. With several processes, each
writes and reads what its devices hold, and all continue from the same step.

A step holds two items, ``params`` and ``rest`` (step, optimizer state, key), so that a model can be loaded without its
optimizer. Steps are in ``<run>/checkpoints/<step>``.
"""

import dataclasses
import functools
import itertools
import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import jax

from jaxformer.config.spec import diff
from jaxformer.parallel import multihost
from jaxformer.training.update import TrainState

log = logging.getLogger(__name__)
ITEMS = ("params", "rest")


class Checkpoints:
    """The checkpoints of one directory; a context manager. Keeps the newest ``keep`` and the one of lowest validation loss.
    Only ``save`` and ``restore`` write: reading parameters does not disturb another process that saves."""

    def __init__(self, directory: Path | str, keep: int = 2):
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file it opens
        self.directory, self._keep = Path(directory).resolve(), keep

    @functools.cached_property
    def _manager(self):
        import orbax.checkpoint as ocp
        from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

        best = BestN(get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=1, keep_checkpoints_without_metrics=False)
        return ocp.CheckpointManager(
            self.directory,
            item_handlers={name: ocp.StandardCheckpointHandler() for name in ITEMS},
            options=ocp.CheckpointManagerOptions(
                preservation_policy=AnyPreservationPolicy([LatestN(n=self._keep), best]),
                best_fn=lambda metrics: metrics["loss"],  # without it the policy sees no metrics
                best_mode="min",
            ),
        )

    def steps(self) -> list[int]:
        """Steps that have a directory, in order; only ``restore`` can tell whether each is complete."""
        return sorted(int(path.name) for path in self.directory.glob("[0-9]*") if path.name.isdigit())

    def save(self, state: TrainState, validation_loss: float | None = None) -> None:
        """Starts writing ``state`` under its step, and returns once its arrays are copied. A step that exists is not written
        again."""
        import orbax.checkpoint as ocp

        step = int(state.step)
        self.wait()
        if multihost.from_first(step in self.steps()):
            return
        known = validation_loss is not None and math.isfinite(validation_loss)
        self._manager.save(
            step,
            args=ocp.args.Composite(**{name: ocp.args.StandardSave(item) for name, item in _split(state).items()}),
            metrics={"loss": validation_loss} if known else None,
            force=True,
        )

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest complete state, None if there is none. ``like``: the expected tree, of arrays or ``jax.ShapeDtypeStruct``
        (``placement.like``).

        Steps that cannot be read are skipped with a warning that names each, and renamed ``<step>.broken``, so that training
        can reach that step again. Raises ValueError with a tree diff, and reads nothing, if another tree, shape or dtype was
        saved.
        """
        if multihost.first():
            self._tidy()
        multihost.everywhere(True)  # no process lists the steps before
        items = self._newest(_split(like), set_aside=True)
        return None if items is None else _joined(items, like)

    def restore_params(self, like: Any, ema: bool = False) -> Any:
        """The parameters alone, from the newest complete step; ema: their running mean (``training.ema``), in their dtypes.
        Raises FileNotFoundError if there is none, else as ``restore``."""
        wanted = {"params": like}
        if ema:
            mean = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "float32", sharding=x.sharding), like)
            wanted = {"rest": {"opt_state": {"ema": mean}}}
        items = self._newest(wanted, partial=ema)
        if items is None:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        if not ema:
            return items["params"]
        return jax.tree.map(lambda x, param: x.astype(param.dtype), items["rest"]["opt_state"]["ema"], like)

    def best_step(self) -> int | None:
        """The kept step of lowest validation loss."""
        return self._manager.best_step()

    def wait(self) -> None:
        """Waits until everything saved is on disk."""
        if "_manager" in self.__dict__:
            self._manager.wait_until_finished()

    def close(self) -> None:
        if "_manager" in self.__dict__:
            self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Waits for what is being saved; not after an error in one of several processes, as the others may be gone."""
        if error is None or jax.process_count() == 1:
            self.close()

    def _tidy(self) -> None:
        """Removes checkpoints that were never finished, and sets aside those that Orbax could not open."""
        for path in sorted(self.directory.glob("*.orbax-checkpoint-tmp*")):
            log.warning("removing the unfinished checkpoint %s", path)
            shutil.rmtree(path)
        for step in self.steps():
            metrics = self.directory / str(step) / "metrics" / "metrics"
            try:
                json.loads(metrics.read_text() if metrics.exists() else "{}")
            except ValueError as error:
                self._set_aside(step, str(error))

    def _newest(self, like: dict[str, Any], set_aside: bool = False, partial: bool = False) -> dict[str, Any] | None:
        """The items of ``like`` from the newest complete step. partial: an item may hold more tensors, which are not read."""
        import orbax.checkpoint as ocp

        index = jax.process_index()  # each process reads what its devices hold, without waiting for another that may fail
        alone = ocp.options.MultiprocessingOptions(
            primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"{index}"
        )
        multihost.agree(f"list of checkpoints in {self.directory}", steps := self.steps())
        for step in reversed(steps):
            path, items, reason = self.directory / str(step), None, "another process cannot read it"
            with ocp.StandardCheckpointer(multiprocessing_options=alone) as reader:
                try:
                    if absent := [name for name in like if not (path / name / "_METADATA").exists()]:
                        raise OSError(f"it lacks {' and '.join(absent)}")
                    saved = {name: reader.metadata(path / name).item_metadata for name in like}
                    if unreadable := [name for name in like if saved[name] is None]:
                        raise OSError(f"its {' and '.join(unreadable)} cannot be read")
                    self._refuse_another(step, like, saved, partial)
                    read = functools.partial(_read_part, alone) if partial else reader.restore
                    items = {name: read(path / name, _with_sharding(item)) for name, item in like.items()}
                except (AnotherTree, MemoryError, PermissionError):
                    raise  # the files may be intact
                except Exception as error:  # Orbax and TensorStore raise many kinds for truncated and missing files
                    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if multihost.everywhere(items is not None):
                return items
            if set_aside:
                self._set_aside(step, reason)
            else:
                self._skip(step, reason)
        return None

    def _skip(self, step: int, reason: str) -> None:
        log.warning("skipping the incomplete checkpoint %s: %s", self.directory / str(step), reason)

    def _set_aside(self, step: int, reason: str) -> None:
        self._skip(step, reason)
        if not multihost.first():
            return
        path = self.directory / str(step)
        names = (path.with_name(f"{step}.broken{n or ''}") for n in itertools.count())
        path.rename(next(name for name in names if not name.exists()))

    def _refuse_another(self, step: int, like: dict[str, Any], saved: Any, partial: bool) -> None:
        for name, item in like.items():
            expected, actual = _leaves(item), _leaves(saved[name].tree)
            if partial:
                actual = {path: text for path, text in actual.items() if path in expected}
            if lines := diff(expected, actual):
                where = self.directory / str(step)
                raise AnotherTree(f"checkpoint {where} holds other {name} than this run's:\n" + "\n".join(lines))


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


class AnotherTree(ValueError):
    """A checkpoint of another architecture, shape or dtype; the message is a tree diff."""


def _joined(items: dict[str, Any], like: TrainState) -> TrainState:
    """The state whose ``_split`` is ``items``."""
    rest = items["rest"]
    rng = _wrap(rest["key"], like.rng)
    return dataclasses.replace(like, params=items["params"], step=rest["step"], opt_state=rest["opt_state"], rng=rng)


def _split(state: TrainState) -> dict[str, Any]:
    """The two items of a step, as arrays or shapes. ``state.rng`` is kept under "key" as its integers, by the key's kind."""
    abstract = isinstance(state.rng, jax.ShapeDtypeStruct)
    key = _data(state.rng) if abstract else jax.random.key_data(state.rng)
    return {"params": state.params, "rest": {"step": state.step, "opt_state": state.opt_state, "key": {_kind(state.rng): key}}}


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
    """``path -> "dtype[shape]"``, paths as Orbax writes them whatever the node types."""

    def text(leaf):
        dtype = getattr(leaf, "dtype", None)
        return f"{dtype}[{', '.join(map(str, leaf.shape))}]"

    def name(entry):
        return str(next(getattr(entry, a) for a in ("key", "name", "idx") if hasattr(entry, a)))

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(name(entry) for entry in path): text(leaf) for path, leaf in leaves}
