"""``train.py --check``: what can be known of a run in under a minute, before it takes hours.

Trains a few updates on one batch, which are thrown away. Nothing is written into the run directory: the checkpoint that is
written and read back lies in a temporary directory beside it.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from rich.text import Text

from jaxformer import data
from jaxformer.config.execution import DROPOUTS
from jaxformer.parallel.placement import Placement, check_batch, own_rows
from jaxformer.prove import gradients, resources, settings, states, tokens
from jaxformer.prove.findings import FAILED, OK, WARNING, Finding
from jaxformer.prove.show_batch import shown
from jaxformer.training import run
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.config import NEXT_TOKEN
from jaxformer.training.console import RunConsole

UPDATES, SECONDS = 30, 20.0
"""Updates on one batch, and after how many seconds no more are begun."""
WARMUP = 5
"""Their warm-up, after which they have the run's highest learning rate."""
FALL = 0.1
"""Share of its loss that a batch loses in these updates, at the least, if a model learns."""
START = 1.0
"""Nats that the loss of fresh parameters may be away from ln V: logits of variance 1 give ln V + 1/2."""
REFUSALS = (ValueError, OSError, FloatingPointError, jax.errors.JaxRuntimeError)
T = TypeVar("T")


class Stopped(Exception):
    """A check that failed in a way that leaves nothing for the others to work on."""


def main(
    config: run.Config,
    tok: Any,
    read: Callable | None,
    make_placement: Callable[..., Placement],
    suits: tuple[Callable, Callable],
    trust: bool,
) -> int:
    """Prints a line for each check; the exit code: 0, or 1 if one failed. config, tok, read: of ``pretrained.begin``.
    make_placement: that of train.py. suits: its refusals, of a config on a mesh and of a config with its data; the latter gives
    what has changed. trust: as of ``open_run``. Raises ValueError in one of several processes."""
    if jax.process_count() > 1:
        raise ValueError("--check runs in one process; leave out the --distributed.* flags")
    console, verdicts = RunConsole(), []
    for finding in _until_stopped(findings(config, tok, read, make_placement, suits, trust)):
        console.print(finding if isinstance(finding, Text) else finding.text(), soft_wrap=True)
        if isinstance(finding, Finding):
            verdicts.append(finding.verdict)
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in (OK, WARNING, FAILED) if verdict in verdicts)
    console.print(Text.assemble((f"{len(verdicts)} checks", "bold"), f": {counts}"))
    return int(FAILED in verdicts)


def _until_stopped(items: Iterator[Finding | Text]) -> Iterator[Finding | Text]:
    try:
        yield from items
    except Stopped as stopped:
        yield Finding(FAILED, *stopped.args)


def attempt(subject: str, function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)``, whose refusal is a failure of the check ``subject`` and the end of the others."""
    try:
        return function(*arguments)
    except REFUSALS as error:
        raise Stopped(subject, str(error) or type(error).__name__) from error


def findings(
    config: run.Config, tok: Any, read: Callable | None, make_placement: Callable, suits: tuple[Callable, Callable], trust: bool
) -> Iterator[Finding | Text]:
    """The checks in order, each as it is done, and lines that show a batch."""
    contradictions = list(settings.contradictions(config))
    yield from (Finding(WARNING, "settings", text) for text in contradictions)
    if not contradictions:
        yield Finding(OK, "settings", "no setting contradicts another")
    directory, run_tok, changes = attempt("run directory", run.open_run, config, trust)
    mesh = attempt("mesh", config.mesh.make)
    attempt("model", suits[0], config, mesh)
    rows = attempt("mesh", own_rows, mesh, config.data.batch_size)
    corpus = attempt("data", data.load, config.data, run_tok or tok, rows)
    changes += attempt("data", suits[1], config, corpus)
    yield resources.directory(directory, changes)
    batch = attempt("data", lambda: corpus.train[0])
    yield from tokens.findings(config, corpus, batch)
    yield from shown(batch, corpus.tokenizer)
    config = replace(config, model=run.fit_tokenizer(config.model, corpus.tokenizer))
    attempt("batch", check_batch, batch, mesh, config.train.microbatches)
    yield (room := attempt("memory", resources.in_memory, config, mesh))
    if room.verdict == FAILED:
        raise Stopped("updates", "not tried, because there is not enough memory")
    yield from _trained(config, mesh, batch, read, make_placement)


def _trained(config: run.Config, mesh: Any, batch: Any, read: Callable | None, make_placement: Callable) -> Iterator[Finding]:
    """What needs parameters: loss, gradients, updates, a checkpoint."""
    trial = trial_of(config)
    objective = attempt("objective", run.make_objective, trial)
    fresh = partial(run.initial_state, trial)
    placement = attempt("placement", make_placement, trial, mesh, objective, abstract := jax.eval_shape(fresh))
    like = placement.like(abstract)
    with placement.within():
        began = attempt("parameters", lambda: placement.begin(fresh, *([read(like.params)] if read else [])))
        measure = placement.compile(gradients.measure(objective, config.model))
        on_devices = attempt("batch", placement.put_evaluation, batch)
        look = lambda state: jax.device_get(measure(placement.get_state(state).params, on_devices))
        loss, first = attempt("loss at the start", look, began)
        yield start(config, float(loss))
        state, losses, seconds = attempt("updates", overfit, placement, began, batch)
        later = first if gradients.complete(first) else look(state)[1]
        yield gradients.finding(config, first, later)
        yield updates(config, losses, seconds)
        yield from saved(config, placement.get_state(state), like)


def trial_of(config: run.Config) -> run.Config:
    """The config of the updates on one batch: the run's highest learning rate after a short warm-up, no dropout."""
    optim = replace(config.optim, schedule="constant", warmup_steps=min(WARMUP, config.optim.warmup_steps))
    return replace(config, optim=optim, model=config.model.with_execution(**dict.fromkeys(DROPOUTS, 0.0)))


def start(config: run.Config, loss: float) -> Finding:
    """The loss of the first batch before any update."""
    subject, chance = "loss at the start", math.log(config.model.vocab_size)
    if not math.isfinite(loss):
        return Finding(FAILED, subject, f"it is {loss}")
    if config.train.objective != NEXT_TOKEN:
        return Finding(OK, subject, f"{loss:.3f}; the expected value is known only for the objective next_token")
    known = f"{loss:.3f} nats per token; ln V is {chance:.3f}"
    if config.init.folder is not None:
        is_better = loss < chance
        why = "" if is_better else f": {config.init.folder} does no better than chance on this text; does the tokenizer fit?"
        return Finding(OK if is_better else WARNING, subject, known + why)
    if abs(loss - chance) <= START:
        return Finding(OK, subject, f"{known}, and the loss may differ from it by {START:g}")
    why = "the initial logits are large" if loss > chance else "the model may see the tokens that it has to predict"
    return Finding(WARNING, subject, f"{known}, and the loss should differ from it by at most {START:g}: {why}")


def overfit(placement: Placement, state: Any, batch: Any) -> tuple[Any, list[float], float]:
    """The state after updates on one batch, the loss before each of them, and the seconds that one took."""
    losses: list[float] = []
    times: list[float] = []
    while len(losses) < UPDATES and (len(losses) < 2 or times[-1] - times[0] < SECONDS):  # the first one compiles
        state, metrics = placement.step(state, placement.put_batch(batch))
        losses.append(placement.get_metrics(metrics)["loss"])
        times.append(time.perf_counter())
    return state, losses, float(np.median(np.diff(times)))


def updates(config: run.Config, losses: list[float], seconds: float) -> Finding:
    """Whether the loss of the batch fell."""
    first, last, steps = losses[0], losses[-1], config.train.steps
    said = f"{len(losses)} on one batch: loss {first:.3f} to {last:.3f}; {_time(seconds * steps)} for all {steps}"
    if not all(map(math.isfinite, losses)):
        number = next(number for number, loss in enumerate(losses) if not math.isfinite(loss))
        return Finding(
            FAILED, "updates", f"{said}; the loss is {losses[number]} after {number}: lower optim.lr={config.optim.lr:g}"
        )
    if last >= first:
        return Finding(FAILED, "updates", f"{said}, but the loss should fall; try another optim.lr than {config.optim.lr:g}")
    if first - last < FALL * abs(first):
        why = f"optim.lr={config.optim.lr:g} may be low" if len(losses) == UPDATES else f"there was no time for {UPDATES}"
        return Finding(WARNING, "updates", f"{said}: the loss fell by less than {FALL:.0%}; {why}")
    return Finding(OK, "updates", said)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def saved(config: run.Config, state: Any, like: Any) -> Iterator[Finding]:
    """A checkpoint, written and read back; and the room for those that the run will keep."""
    parent = resources.existing(Path(config.run_dir))
    with _temporary(parent) as folder:
        path = Path(folder) / "checkpoints"
        with Checkpoints(path) as checkpoints:
            attempt("checkpoint", checkpoints.save, state)
            attempt("checkpoint", checkpoints.wait)
            restored = attempt("checkpoint", checkpoints.restore, like)
        written = resources.disk_bytes(path)
        if restored is None:
            raise Stopped("checkpoint", "what was written cannot be read back")
        before, after = states.leaves(state), states.leaves(restored)
        if different := states.differing(before, after):
            yield Finding(FAILED, "checkpoint", f"{different[0]} reads back as another value than was written")
        else:
            where = "" if Path(folder).parent == parent else f", in {Path(folder).parent}"
            yield Finding(OK, "checkpoint", f"written and read back bit for bit equal: {states.size(before)}{where}")
        arrays = sum(array.nbytes for array in before.values())  # zeros of a few updates take less on disk than what follows
        yield resources.on_disk(config, max(written, arrays))


def _temporary(parent: Path) -> AbstractContextManager[str]:
    try:
        return tempfile.TemporaryDirectory(prefix=".jaxformer-check-", dir=parent, ignore_cleanup_errors=True)
    except OSError:  # which the check of the run directory has said
        return tempfile.TemporaryDirectory(prefix="jaxformer-check-")
