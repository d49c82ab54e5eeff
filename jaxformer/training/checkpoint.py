"""Checkpoints by Orbax: written in the background, whole or not at all; restored whole or refused.

A step holds two items, ``params`` and ``rest`` (step, optimizer state, key), so that a model can be loaded without its
optimizer. Steps lie in ``<run>/checkpoints/<step>``.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax

from jaxformer.spec import diff
from jaxformer.training.step import TrainState

log = logging.getLogger(__name__)
ITEMS = ("params", "rest")


class Checkpoints:
    """The checkpoints of one directory. Keeps the newest ``keep`` and the one of lowest validation loss. ``read_only``:
    changes nothing on disk, whatever it finds; the directory must exist (FileNotFoundError)."""

    def __init__(self, directory: Path | str, keep: int = 2, read_only: bool = False):
        import orbax.checkpoint as ocp
        from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file it opens
        best = BestN(get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=1, keep_checkpoints_without_metrics=False)
        self._ocp = ocp
        self.directory = Path(directory).resolve()
        if read_only and not self.directory.is_dir():
            raise FileNotFoundError(f"no checkpoint in {self.directory}: there is no such directory")
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_handlers={name: ocp.StandardCheckpointHandler() for name in ITEMS},
            options=ocp.CheckpointManagerOptions(
                preservation_policy=AnyPreservationPolicy([LatestN(n=keep), best]),
                best_fn=lambda metrics: metrics["loss"],  # without it the policy sees no metrics
                best_mode="min",
                cleanup_tmp_directories=not read_only,
                read_only=read_only,
                create=not read_only,
            ),
        )

    def steps(self) -> list[int]:
        """Steps that have a directory, in order; whether each is whole only ``restore`` can tell."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, validation_loss: float | None = None) -> None:
        """Starts to write ``state`` under its step; returns once the arrays are copied. A step that exists is left as it is."""
        step = int(state.step)
        if step in self.steps():
            return
        args = self._ocp.args
        self._manager.save(
            step,
            args=args.Composite(**{name: args.StandardSave(item) for name, item in _split(state).items()}),
            metrics=None if validation_loss is None else {"loss": validation_loss},
            force=True,
        )

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest whole state, None if there is none. ``like``: arrays or ``jax.ShapeDtypeStruct`` of the tree expected.

        Steps that cannot be read are skipped with a warning that names each, and renamed ``<step>.broken``, so that training
        can come to that step again. Raises ValueError with a tree diff, and reads nothing, if what was saved is another tree,
        shape or dtype.
        """
        items = self._newest(_split(like), set_aside=True)
        if items is None:
            return None
        rest = items["rest"]
        return dataclasses.replace(like, params=items["params"], **(rest | {"key": _wrap(rest["key"], like.key)}))

    def restore_params(self, like: Any) -> Any:
        """Only the newest whole parameters. Raises FileNotFoundError if there are none, else as ``restore``."""
        items = self._newest({"params": like})
        if items is None:
            raise FileNotFoundError(f"no checkpoint in {self.directory}")
        return items["params"]

    def best_step(self) -> int | None:
        """The kept step of lowest validation loss."""
        return self._manager.best_step()

    def wait(self) -> None:
        """Until everything saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def _newest(self, like: dict[str, Any], set_aside: bool = False) -> dict[str, Any] | None:
        for step in reversed(self.steps()):
            try:
                found = self._manager.item_metadata(step)
                if absent := [name for name in like if name not in found or found[name] is None]:
                    raise OSError(f"it lacks {' and '.join(absent)}")
                self._refuse_another(step, like, found)
                args = self._ocp.args
                wanted = args.Composite(**{name: args.StandardRestore(item) for name, item in like.items()})
                return dict(self._manager.restore(step, args=wanted).items())
            except AnotherTree:
                raise
            except Exception as error:  # Orbax and TensorStore raise many kinds for truncated and missing files
                path = self.directory / str(step)
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                log.warning("skipping the incomplete checkpoint %s: %s", path, reason)
                if set_aside:
                    path.rename(path.with_name(f"{step}.broken"))
                    self._manager.reload()
        return None

    def _refuse_another(self, step: int, like: dict[str, Any], found: Any) -> None:
        for name, item in like.items():
            if lines := diff(_leaves(item), _leaves(found[name].tree)):
                where = self.directory / str(step)
                raise AnotherTree(f"checkpoint {where} holds other {name} than this run's:\n" + "\n".join(lines))


class AnotherTree(ValueError):
    """A checkpoint of another architecture, shape or dtype; the message is a tree diff."""


def _split(state: TrainState) -> dict[str, Any]:
    """The two items, of arrays or of their shapes; the key as the integers it is made of."""
    abstract = isinstance(state.key, jax.ShapeDtypeStruct)
    key = jax.eval_shape(jax.random.key_data, state.key) if abstract else jax.random.key_data(state.key)
    return {"params": state.params, "rest": {"step": state.step, "opt_state": state.opt_state, "key": key}}


def _wrap(data: jax.Array, like: Any) -> jax.Array:
    """The typed key, of the kind of ``like`` (a key or its shape), that ``data`` is the content of."""
    impls = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(data, impl=impls[0])


def _leaves(tree: Any) -> dict[str, str]:
    """``path -> "dtype[shape]"``, paths as Orbax writes them whatever the node types."""

    def text(leaf):
        dtype = getattr(leaf, "dtype", None)
        return f"{dtype}[{', '.join(map(str, leaf.shape))}]"

    def name(entry):
        return str(next(getattr(entry, a) for a in ("key", "name", "idx") if hasattr(entry, a)))

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(name(entry) for entry in path): text(leaf) for path, leaf in leaves}
