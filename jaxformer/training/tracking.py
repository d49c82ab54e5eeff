"""A run's records in an experiment tracker: Weights & Biases, Trackio or MLflow.

``metrics.jsonl`` in the run's directory remains the record of a run. A tracker that fails is warned of once, and training
continues without it.
"""

import importlib.util
import json
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from jaxformer.config.strict import to_dict
from jaxformer.parallel import multihost
from jaxformer.tokenizers import disk_cache
from jaxformer.training.records import last_steps

log = logging.getLogger(__name__)
Name = Literal["none", "wandb", "trackio", "mlflow"]
PROJECT = "jaxformer"
"""The project or experiment, unless the tracker's own environment variable names one."""
FILE = "tracker.json"
"""In a run's directory: the tracker and the id of the run there, which a resumed run continues."""


class Run(Protocol):
    """A run in a tracker."""

    id: str

    def log(self, step: int, values: dict[str, float]) -> None:
        """Adds the values of a step, by name."""

    def finish(self, succeeded: bool) -> None:
        """Sends what is left and ends the run."""


class Wandb:
    """https://docs.wandb.ai"""

    def __init__(self, directory: Path, run_id: str | None, config: dict[str, Any]):
        import wandb

        self.id = run_id or secrets.token_hex(8)
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = wandb.init(
            project=project, name=directory.name, id=self.id, resume="allow", dir=str(directory), config=config
        )
        self._run.define_metric("*", step_metric="step")  # its own counter refuses steps that a crash has undone

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step} | values)

    def finish(self, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


class Trackio:
    """https://huggingface.co/docs/trackio"""

    def __init__(self, directory: Path, run_id: str | None, config: dict[str, Any]):
        import trackio

        self.id = run_id or f"{directory.name}-{secrets.token_hex(3)}"  # a run is found again by its name
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=self.id, resume="allow", config=config
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def finish(self, succeeded: bool) -> None:
        self._run.finish()


class Mlflow:
    """https://mlflow.org/docs"""

    def __init__(self, directory: Path, run_id: str | None, config: dict[str, Any]):
        import mlflow

        self._mlflow = mlflow
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & set(os.environ):
            mlflow.set_experiment(PROJECT)
        self.id = mlflow.start_run(run_id=run_id, run_name=directory.name).info.run_id
        if run_id is None:  # parameters cannot be changed later
            values = list(config.items())
            for first in range(0, len(values), 100):  # no more at a time
                mlflow.log_params(dict(values[first : first + 100]))

    def log(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step=step)

    def finish(self, succeeded: bool) -> None:
        self._mlflow.end_run("FINISHED" if succeeded else "FAILED")


RUNS: dict[str, Callable[[Path, str | None, dict[str, Any]], Run]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}


def check(name: Name) -> None:
    """Raises ValueError where the tracker is not installed."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise ValueError(
            f"train.track={name!r} needs the package {name}: pip install 'jaxformer[{name}]' (uv run --extra {name} ...)"
        )


class Tracker:
    """Sends the records of the run in ``directory`` to the tracker ``name``, from the first process alone. ``start``: the step
    that the run continues from; at 0 a new run is made there."""

    def __init__(self, name: Name, directory: Path, start: int, config: Any = None):
        self._name, self._directory, self._start, self._config = name, directory, start, config
        self._run: Run | None = None
        self._sent: dict[str, int] = {}

    def open(self) -> None:
        """Begins the run, or continues it. Raises ValueError where the tracker refuses, for lack of a login say."""
        if self._name == "none" or not multihost.first():
            return
        try:
            self._run = RUNS[self._name](self._directory, self._known(), _flat(to_dict(self._config)))
        except Exception as error:  # whatever a tracker raises
            raise ValueError(f"train.track={self._name!r} could not be started: {error}") from error

    def keep(self) -> None:
        """Keeps the run's id in the directory, before the first record. Records that an earlier process has sent, and whose
        updates a crash has undone, are not sent again: the updates are the same bit for bit."""
        if self._run is not None:
            self._sent = last_steps(self._directory / "metrics.jsonl") if self._start else {}
            disk_cache.write(self._directory / FILE, json.dumps({"tracker": self._name, "id": self._run.id}).encode())

    def record(self, step: int, kind: str, metrics: dict[str, float]) -> None:
        """Sends one record of metrics.jsonl."""
        if step > self._sent.get(kind, 0):
            self._try(lambda run: run.log(step, {f"{kind}/{name}": value for name, value in metrics.items()}))

    def close(self, succeeded: bool) -> None:
        """Ends the run."""
        self._try(lambda run: run.finish(succeeded))
        self._run = None

    def _try(self, action: Callable[[Run], None]) -> None:
        try:
            if self._run is not None:
                action(self._run)
        except Exception as error:  # whatever a tracker raises: none of it is worth a run
            log.warning("nothing is sent to %s from here on: %s", self._name, error)
            self._run = None

    def _known(self) -> str | None:
        """The id of the run to continue."""
        try:
            values = json.loads((self._directory / FILE).read_bytes())
            return values["id"] if self._start and values["tracker"] == self._name else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"model.d_model": 64, ...}`` of a nested config."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
