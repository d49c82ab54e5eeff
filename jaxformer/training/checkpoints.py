"""Checkpoints by Orbax: written in the background and restored, either completely or not at all. With several processes, each
writes and reads what its devices hold, and all continue from the same step.

A step holds two items, ``params`` and ``rest`` (step, optimizer state, key), so that a model can be loaded without its
optimizer, and ``digests``, by which each array is known to be the one that was saved (``training.digest``). Only finite numbers
are saved. Steps are in ``<run>/checkpoints/<step>``.
"""

import functools
import json
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any

import jax

from jaxformer.parallel import multihost
from jaxformer.training import stored
from jaxformer.training.digest import summaries
from jaxformer.training.directory import saved_steps, set_aside
from jaxformer.training.stored import DIGESTS, ITEMS, AnotherTree
from jaxformer.training.update import TrainState

log = logging.getLogger(__name__)
UNREADABLE = "[\\"
"""Characters that Orbax takes for a pattern: it could not read what it has saved below a folder with one of them."""


class Checkpoints:
    """The checkpoints of one directory; a context manager. Keeps the newest ``keep`` and the one of lowest validation loss.
    Only ``save`` and ``restore`` write: reading parameters does not disturb another process that saves."""

    def __init__(self, directory: Path | str, keep: int = 2):
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file it opens
        self.directory, self._keep = Path(os.path.abspath(directory)), keep
        self._unconfirmed: Path | None = None
        if wrong := [c for c in UNREADABLE if c in str(self.directory)]:
            how = "choose another, or make a link to it that has none and give that"
            raise ValueError(f"checkpoints cannot be kept in {self.directory}, because of the {wrong[0]!r} in it: {how}")
        try:
            str(self.directory).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"checkpoints cannot be kept in {str(self.directory)!r}: the name is not UTF-8") from error

    @functools.cached_property
    def _manager(self):
        import orbax.checkpoint as ocp
        from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

        best = BestN(get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=1, keep_checkpoints_without_metrics=False)
        return ocp.CheckpointManager(
            self.directory,
            item_handlers={name: ocp.StandardCheckpointHandler() for name in ITEMS} | {DIGESTS: ocp.JsonCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(
                preservation_policy=AnyPreservationPolicy([LatestN(n=self._keep), best]),
                best_fn=lambda metrics: metrics["loss"],  # without it the policy sees no metrics
                best_mode="min",
            ),
        )

    def steps(self) -> list[int]:
        """Steps that have a directory, in order; only ``restore`` can tell whether each is complete."""
        return saved_steps(self.directory.parent, self.directory.name)

    def save(self, state: TrainState, validation_loss: float | None = None) -> None:
        """Starts writing ``state`` under its step, and returns once its arrays are copied. A step that exists is not written
        again.

        Raises FloatingPointError, and writes nothing, where a number of ``state`` is not finite; OSError where the step before
        could not be written.
        """
        import orbax.checkpoint as ocp

        step = int(state.step)
        self.wait()
        if multihost.from_first(step in self.steps()):
            return
        items = stored.split(state)
        known = {name: summaries(item) for name, item in items.items()}
        if wrong := stored.nonfinite(known):
            raise FloatingPointError(f"{wrong} after step {step}, which is therefore not saved; {self.newest()}")
        arguments = {name: ocp.args.StandardSave(item) for name, item in items.items()}
        is_number = validation_loss is not None and math.isfinite(validation_loss)
        metrics: dict[str, Any] | None = {"loss": validation_loss} if is_number else None
        arguments[DIGESTS] = ocp.args.JsonSave(stored.digests(step, known, metrics))
        self._manager.save(step, args=ocp.args.Composite(**arguments), metrics=metrics, force=True)
        self._unconfirmed = self.directory / str(step)

    def newest(self) -> str:
        """The newest step in words, for messages."""
        steps = self.steps()
        return f"the newest good checkpoint is step {steps[-1]}" if steps else "no step has been saved yet"

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest complete state, None if nothing has been saved. ``like``: the expected tree, of arrays or
        ``jax.ShapeDtypeStruct`` (``placement.like``).

        A step that cannot be read, whose arrays are not those that were saved, or that holds numbers that are not finite, is
        skipped with a warning that says why, and renamed ``<step>.broken``, so that training can reach that step again.

        Raises ValueError where there are steps and none of them can be read, renaming none; and, with a tree diff and before
        anything is read, if another tree, shape or dtype was saved.
        """
        if multihost.first():
            self._tidy()
        multihost.everywhere(True)  # no process lists the steps before
        broken: list[int] = []
        items = self._newest(stored.split(like), broken)
        if items is None:
            if aside := sorted(path.name for path in self.directory.glob("*.broken*")):
                how = "move them elsewhere to train from the start"
                raise ValueError(f"{self.directory} holds only steps that could not be read ({', '.join(aside)}); {how}")
            return None
        for step in broken:
            self._set_aside(step)
        return stored.joined(items, like)

    def restore_params(self, like: Any, ema: bool = False) -> Any:
        """The parameters alone, from the newest complete step; ema: their running mean (``training.ema``), in their dtypes.
        Raises FileNotFoundError if nothing has been saved, else as ``restore``."""
        wanted = {"params": like}
        if ema:
            mean = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "float32", sharding=x.sharding), like)
            wanted = {"rest": {"opt_state": {"ema": mean}}}
        items = self._newest(wanted, [], partial=ema)
        if items is None:
            raise FileNotFoundError(f"there is no checkpoint in {self.directory}")
        if not ema:
            return items["params"]
        return jax.tree.map(lambda x, param: x.astype(param.dtype), items["rest"]["opt_state"]["ema"], like)

    def best_step(self) -> int | None:
        """The kept step of lowest validation loss."""
        return self._manager.best_step()

    def wait(self) -> None:
        """Waits until everything saved is on disk. Raises OSError where it cannot be read back."""
        if "_manager" not in self.__dict__:
            return
        self._manager.wait_until_finished()
        saved, self._unconfirmed = self._unconfirmed, None
        if saved is not None:
            try:
                stored.check(saved, ITEMS)
            except Exception as error:
                raise OSError(f"checkpoint {saved} was written, but cannot be read back: {error}") from error

    def close(self) -> None:
        if "_manager" in self.__dict__:
            self.wait()
            self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Waits for what is being saved; not after an error in one of several processes, as the others may be gone, nor where
        somebody wants to stop at once."""
        if error is None:
            self.close()
        elif jax.process_count() == 1 and not isinstance(error, KeyboardInterrupt):
            try:
                self.close()
            except Exception as another:  # the first error is what is to be reported
                log.warning("the newest checkpoint of %s could not be written: %s", self.directory, another)

    def _tidy(self) -> None:
        """Removes checkpoints that were never finished, and validation losses that Orbax could not open."""
        for path in sorted(self.directory.glob("*.orbax-checkpoint-tmp*")):
            log.warning("removing the unfinished checkpoint %s", path)
            shutil.rmtree(path)
        for step in self.steps():
            metrics = self.directory / str(step) / "metrics"
            if not metrics.exists():
                continue
            try:
                stored.check_loss(json.loads((metrics / "metrics").read_text()), self.directory / str(step))
            except Exception as error:  # whatever it holds, Orbax would not open the other steps because of it
                message = "the validation loss of step %s cannot be used (%r), so the step no longer counts as the best"
                log.warning(message, step, error)
                shutil.rmtree(metrics) if metrics.is_dir() else metrics.unlink()

    def _newest(self, like: dict[str, Any], broken: list[int], partial: bool = False) -> dict[str, Any] | None:
        """The items of ``like`` from the newest step that is as it was saved; the newer ones are added to ``broken``. partial:
        an item may hold more tensors, which are not read. Raises ValueError where there are steps and all are broken."""
        multihost.agree(f"list of checkpoints in {self.directory}", steps := self.steps())
        reasons = []
        for step in reversed(steps):
            items, expected, reason = self._read(step, like, partial)
            if multihost.everywhere(items is not None):  # from here on all have read the same arrays, and compare them together
                reason = stored.mismatch(items, expected)
                if multihost.everywhere(not reason):
                    return items
            reason = reason or "another process cannot read it"
            log.warning("skipping the damaged checkpoint %s: %s", self.directory / str(step), reason)
            broken.append(step)
            reasons.append(f"  {step}: {reason}")
        if reasons:
            none = f"none of the checkpoints in {self.directory} can be read"
            raise ValueError("\n".join([f"{none}; move them elsewhere to train from the start:", *reasons]))
        return None

    def _read(self, step: int, like: dict[str, Any], partial: bool) -> tuple[Any, dict[str, Any], str]:
        """The items of ``like`` in a step, and its digests; or None, {} and the reason."""
        try:
            return *stored.read(self.directory / str(step), like, partial), ""
        except (AnotherTree, MemoryError, PermissionError):
            raise  # the files may be intact
        except Exception as error:  # Orbax and TensorStore raise many kinds for truncated and missing files
            return None, {}, str(error).splitlines()[0] if str(error) else type(error).__name__

    def _set_aside(self, step: int) -> None:
        if multihost.first():
            set_aside(self.directory / str(step), "broken")
