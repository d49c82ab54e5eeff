"""What stops a run before it saves what it should not: updates that are not finite, and copies of parameters that differ."""

import logging
import math
from collections.abc import Callable
from typing import Any

import jax

from jaxformer.training.config import TrainConfig
from jaxformer.training.digest import drifted, names

log = logging.getLogger(__name__)


class Guard:
    """Watches the updates of a run. params: the parameters or their shapes, for their names. get_metrics: the metrics of
    ``training.make_update`` as floats. newest: says which checkpoint the run can go on from."""

    def __init__(
        self, train: TrainConfig, params: Any, get_metrics: Callable[[Any], dict[str, float]], newest: Callable[[], str]
    ):
        self._train, self._names, self._get_metrics, self._newest = train, names(params), get_metrics, newest
        self._in_a_row = self._skipped = 0

    def fetch(self, step: int, metrics: Any) -> dict[str, float]:
        """The metrics of update ``step`` as floats; with ``skipped``, how many updates have been left out, once there are some.

        Raises FloatingPointError where the gradient is not finite for more than ``train.max_skipped`` updates in a row, and
        where the loss alone is not.
        """
        values = self._get_metrics(metrics)
        if number := int(values.pop("nonfinite", 0)):
            self._skip(step, f"gradient of {self._names[number - 1]} is {values['grad_norm']} at step {step}")
        else:
            self._in_a_row = 0
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(
                    f"the loss is {values['loss']} at step {step}; {self._newest()}. Lower optim.lr, or check the data"
                )
        return values | ({"skipped": self._skipped} if self._skipped else {})

    def _skip(self, step: int, what: str) -> None:
        self._in_a_row, self._skipped = self._in_a_row + 1, self._skipped + 1
        if self._in_a_row > self._train.max_skipped:
            raise FloatingPointError(f"{what}; {self._advice()}")
        log.warning("%s: this update is skipped (%d in a row, of at most %d)", what, self._in_a_row, self._train.max_skipped)

    def _advice(self) -> str:
        return f"{self._newest()}. Lower optim.lr, check the data, or let such updates be skipped by train.max_skipped"

    def compare(self, step: int, params: Any) -> None:
        """Every ``train.agree_every`` steps, compares the copies of ``params`` on all devices. All processes must call it.

        Raises FloatingPointError where one differs.
        """
        every = self._train.agree_every
        if not every or step % every or jax.device_count() == 1:
            return
        if processes := drifted(params, self._train.parallel == "pmap"):
            which = ", ".join(map(str, processes))
            raise FloatingPointError(
                f"copies of the parameters differ at step {step}, on a device of process {which}: the device is faulty, or the "
                f"process runs different code; {self._newest()}, from which the same command resumes"
            )
