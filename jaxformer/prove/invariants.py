"""``check_invariants``: what has to hold of every model, tried on one, with small random inputs."""

import dataclasses
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.config.components import nearest
from jaxformer.cost.table import Table
from jaxformer.nn import model
from jaxformer.nn.mistakes import answers_mistakes
from jaxformer.prove.checks import CHECKS, Check
from jaxformer.prove.trial import Failed, NotApplicable, Trial, jit


@dataclass(frozen=True)
class Invariant:
    """One row of the table."""

    name: str
    claim: str
    """What was compared."""
    difference: float | None
    """The largest one, relative to the largest number it was compared with; None where nothing could be compared."""
    tolerance: float
    reason: str
    """Where the tolerance comes from."""
    result: str
    """"ok", "FAILED" or "not applicable"."""
    note: str = ""
    """Of a failure, what it is and what usually causes it; else why the check does not apply."""


@dataclass(frozen=True)
class Invariants:
    """What ``check_invariants`` returns: rows to iterate over; true if none of them failed; a plain table as ``str``."""

    title: str
    rows: tuple[Invariant, ...]

    def __bool__(self) -> bool:
        return not self.failed

    def __iter__(self) -> Iterator[Invariant]:
        return iter(self.rows)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(row.name for row in self.rows if row.result == "FAILED")

    def __str__(self) -> str:
        def cells(row: Invariant) -> tuple[str, ...]:
            difference = "" if row.difference is None else f"{row.difference:.1e}"
            result = f"{row.result}: {row.note}" if row.result == "not applicable" else row.result
            return row.name, row.claim, difference, f"{row.tolerance:.1e} ({row.reason})", result

        table = Table(("check", "compares", "difference", "tolerance", "result"), [*map(cells, self.rows)])
        return "\n\n".join(
            [self.title, table.text(), *(f"{row.name}: {row.note}" for row in self.rows if row.name in self.failed)]
        )


@answers_mistakes
def check_invariants(
    cfg: ModelConfig,
    params: Any = None,
    *,
    checks: str | Sequence[str] | None = None,
    key: jax.Array | None = None,
    batch: int = 4,
    length: int = 8,
) -> Invariants:
    """Whether a model, of components of your own perhaps, keeps what every model has to: a table, true if no check failed.

    The model is used as it is (shrink a large one yourself), without dropout and by plain XLA, in float32 but for the check of
    bfloat16. params: as ``jf.init`` gives them; unless given, fresh ones in which no tensor is without effect. checks: names of
    ``jaxformer.prove.checks.CHECKS``; all unless given. key: what parameters and tokens are drawn from;
    ``jax.random.key(0)`` unless given. batch: rows, at least 2. length: tokens of a row, an even number of at least 4.

    Raises ValueError for other checks and sizes and for parameters that are not the config's, and what the model itself raises
    for a batch of tokens.
    """
    names = list(CHECKS) if checks is None else [checks] if isinstance(checks, str) else list(checks)
    for name in names:
        if name not in CHECKS:
            raise ValueError(f"unknown check {name!r}{nearest(name, CHECKS)}")
    if batch < 2 or length < 4 or length % 2:
        raise ValueError(f"batch={batch} must be at least 2, and length={length} an even number of at least 4")
    key = jax.random.key(0) if key is None else key
    params = _fresh(cfg, key) if params is None else params
    specs.check(params, model.spec(cfg), cfg)
    trial = Trial(cfg, params, key, batch, length)
    rows = tuple(_row(name, CHECKS[name], trial) for name in names)
    layers = f"{cfg.encoder_layers} + {cfg.n_layers}" if cfg.encoder_layers else str(cfg.n_layers)
    size = f"layers: {layers}, parameters: {specs.count(model.spec(cfg), cfg):,}, tokens: {batch} × {length}"
    return Invariants(f"{sum(row.result == 'FAILED' for row in rows)} of {len(rows)} checks failed ({size})", rows)


def _fresh(cfg: ModelConfig, key: jax.Array) -> Any:
    """Weights of variance 1/inputs whatever ``cfg.init``, so that attention is not flat, and noise on what is constant at first
    (gains, biases, weights of 0)."""
    spread = dataclasses.replace(cfg, init="fan_in", init_std=0.1, scale_residual_init=False)
    params = jit(lambda key: model.init(spread, key))(key)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())

    def with_noise(x):
        return x + jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype) if np.ptp(np.asarray(x, np.float32)) == 0 else x

    return jax.tree.map(with_noise, params)


def _row(name: str, check: Check, trial: Trial) -> Invariant:
    tolerance, reason = trial.tolerances[check.tolerance]
    row = Invariant(name, check.claim, None, tolerance, reason, "FAILED")
    try:
        difference, what = check.run(trial)
    except NotApplicable as error:
        return dataclasses.replace(row, result="not applicable", note=str(error))
    except Failed as error:
        return dataclasses.replace(row, note=f"{error}. Usual cause: {check.cause}.")
    except Exception as error:  # of the user's component: the other checks go on
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        if check.may_refuse and _is_refusal(error):
            return dataclasses.replace(row, result="not applicable", note=f"refused, {first}")
        return dataclasses.replace(row, note=f"{first}. Usual cause: {check.cause}.")
    if difference <= tolerance:
        return dataclasses.replace(row, difference=difference, result="ok")
    return dataclasses.replace(row, difference=difference, note=f"{what}. Usual cause: {check.cause}.")


def _is_refusal(error: Exception) -> bool:
    """Whether somebody's own ``raise ValueError`` raised it, and not JAX or NumPy."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    inside = any(f"/{package}/" in frame.filename.replace("\\", "/") for package in ("jax", "jaxlib", "numpy"))
    return isinstance(error, ValueError) and not inside and (frame.line or "").startswith("raise ")
