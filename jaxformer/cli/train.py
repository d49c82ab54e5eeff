"""Train a transformer: ``python train.py [CONFIG.py] [--field value ...] [--check]``. ``--help`` explains every field.

The same command with the same run directory continues from the last checkpoint, exactly.

The exit codes are those of ``parallel.exit_codes``.
"""

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.text import Text

from jaxformer import data, training
from jaxformer.cli import accelerators, pretrained, program_cache, suitable
from jaxformer.cli.launch import described, open_output
from jaxformer.config import spec as specs
from jaxformer.cost import model_flops
from jaxformer.cost.topology import peak_of
from jaxformer.nn import model
from jaxformer.parallel import exit_codes, host_memory, multihost
from jaxformer.parallel.ending import stopping
from jaxformer.parallel.placement import PLACEMENTS, Placement, check_batch, own_rows
from jaxformer.parallel.sharding import MeshConfig, table
from jaxformer.prove import preflight
from jaxformer.prove.reference import watch
from jaxformer.training import evaluate, run, shipped
from jaxformer.training.console import RunConsole, show_log
from jaxformer.training.directory import Lock, locked
from jaxformer.training.failures import during, ignore_abandoned_saves
from jaxformer.training.guard import Guard
from jaxformer.training.records import validation_at
from jaxformer.training.report import Report, placements, results, stopped
from jaxformer.training.saving import due, profiled
from jaxformer.training.tracking import Tracker

DEFAULT = shipped.FOLDER / "quickstart.py"


def main(config: run.Config, trust: bool = False) -> int:
    """Trains, or shows the results of a run that is finished. Gives the exit code."""
    config = run.at_home(config)
    show_log(RunConsole(quiet=not multihost.first()))
    with locked(config.run_dir) as lock, during("could not continue", lock.directory, OSError):
        return train_run(config, lock, trust)


def train_run(config: run.Config, lock: Lock, trust: bool) -> int:
    """Trains in a directory that no other process writes to."""
    config, pretrained_tok, read = pretrained.begin(config, trust)
    directory, tok, changes = run.open_run(config, trust)
    suitable.check(config, mesh := config.mesh.make())
    corpus = data.load(config.data, tok or pretrained_tok, own_rows(mesh, config.data.batch_size))
    changes += suitable.check_data(config, corpus)
    config = agreed(config, corpus, mesh)
    train, objective = config.train, run.make_objective(config)
    fresh = functools.partial(run.initial_state, config)
    placement = make_placement(config, mesh, objective, abstract := jax.eval_shape(fresh))
    checkpoints = training.Checkpoints(directory / "checkpoints", train.keep_checkpoints)
    restored = checkpoints.restore(placement.like(abstract))
    start = first_step(lock, restored, train.steps)
    state = begin(placement, abstract, fresh, restored, read)

    began = time.perf_counter()
    validate = make_validate(placement, objective, corpus)
    score = validation_at(directory / "metrics.jsonl", start) if start == train.steps else {}
    guard = Guard(train, abstract.params, placement.get_metrics, checkpoints.newest)
    report = make_report(config, corpus, directory, start, guard.fetch)
    saving = during("could not save", directory)  # around all, as closing the checkpoints waits for a save, which may fail
    stopped_by = stopping(lambda: report.console.is_lost)
    with saving, checkpoints, report, stopped_by as stop, profiled(train, report) as trace, placement.within():
        announce(report.console, config, mesh, corpus.summary, changes, start)
        batches, is_due = report.waiting(data.iterate(corpus.train, start)), due(train)
        for step in report.timed(range(start + 1, train.steps + 1)):
            trace(step)
            state, metrics = placement.step(state, placement.put_batch(next(batches)))
            host_memory.after_step(metrics)
            if step == start + 1:  # it has been traced and compiled: from here on nothing is refused
                pretrained.write_run(directory, config, corpus)
            report.train(step, metrics)
            guard.compare(step, state.params)
            if step % train.eval_every == 0 or step == train.steps:
                report.pause()
                current = placement.get_state(state)
                params, score = validate(current)
                report.validation(step, score)
                save(checkpoints, current, score.get("loss"))
                report.draw()
                if train.sample_tokens:
                    report.sample(step, *sample(params, config, corpus))
            elif is_due(step):
                report.settle()  # an update that failed is not saved
                save(checkpoints, placement.get_state(state))
            if stop():
                break
        report.settle()  # an update that failed is not saved
        current = placement.get_state(state)
        save(checkpoints, current)  # does nothing unless training stopped between evaluations
        checkpoints.wait()
        if is_done := int(current.step) == train.steps:
            score |= exact_match(current, config, corpus)
        best = checkpoints.best_step()
    if not is_done:
        stopped(report.console, int(current.step), directory)
        return exit_codes.STOPPED
    results(report.console, config, directory, score, best, time.perf_counter() - began if start < train.steps else None)
    return exit_codes.FINISHED


def make_report(config: run.Config, corpus: data.Data, directory: Path, start: int, fetch: Callable) -> Report:
    """What tells of the run: on the screen, in its files and, where there is training to do, in an experiment tracker."""
    train, first_losses = config.train, watch(config, corpus, start)
    tracker = Tracker(train.track if start < train.steps else "none", directory, start, config)
    return Report(directory, start, train.steps, train.log_every, fetch, first_losses, peak_seconds(config), tracker)


def make_validate(placement: Placement, objective: training.Objective, corpus: data.Data) -> Callable:
    """A function of a state: the parameters that stand for it (their running mean, where there is one), and their metrics over
    the validation split."""
    evaluation = placement.compile(training.make_evaluate(objective))

    def validate(state: training.TrainState) -> tuple[Any, dict[str, float]]:
        params = training.ema_params(state.opt_state, state.params)
        held_out = map(placement.put_evaluation, corpus.validation)
        return params, evaluate.validation(objective, evaluation, params, held_out, corpus.validation_bytes)

    return validate


def save(checkpoints: training.Checkpoints, state: training.TrainState, loss: float | None = None) -> None:
    """Saves a state. What the operating system refuses is said in one line, with the step that was to be saved."""
    with during(f"could not save step {int(state.step)}", checkpoints.directory.parent):
        checkpoints.save(state, loss)


def peak_seconds(config: run.Config) -> float | None:
    """Seconds that an update's model FLOPs take at the peak of all devices; None where their peak is unknown."""
    if (peak := peak_of(jax.devices()[0].device_kind)) is None:
        return None
    source = config.data.source_length if config.model.encoder_layers else 0
    flops = model_flops.training(config.model, config.data.batch_size, config.data.length, source).total
    return flops / peak / jax.device_count()


def first_step(lock: Lock, restored: Any, steps: int) -> int:
    """The step that training goes on from. Raises where it is past ``steps``, or nothing can be written and there is training
    to do."""
    start = 0 if restored is None else int(restored.step)
    if start > steps:
        raise ValueError(f"{lock.directory} is already at step {start}, past train.steps={steps}; raise train.steps")
    if start < steps:
        lock.require()
    return start


def agreed(config: run.Config, corpus: data.Data, mesh: Mesh) -> run.Config:
    """``config`` with a model that fits the tokenizer. Raises ValueError where processes differ in what they train on, and
    where the batch does not divide by the devices."""
    cfg = run.fit_tokenizer(config.model, corpus.tokenizer)
    config = dataclasses.replace(config, model=cfg, data=dataclasses.replace(config.data, accept_change=False))
    multihost.agree("text or tokenizer", (corpus.tokenizer.content_hash, corpus.content_hash))
    multihost.agree("configuration", config)
    batch = {"tokens": jax.ShapeDtypeStruct((config.data.batch_size, config.data.length), int)}
    check_batch(batch, mesh, config.train.microbatches)
    return config


def begin(placement: Placement, abstract: Any, fresh: Callable, restored: Any, read: Callable | None) -> Any:
    """The state to train from: a checkpoint's, one with the parameters that ``read`` reads, or a fresh one."""
    if restored is not None:
        return placement.put_state(restored)
    return placement.begin(fresh, read(placement.like(abstract).params)) if read else placement.begin(fresh)


def make_placement(config: run.Config, mesh: Mesh, objective: training.Objective, abstract: Any) -> Placement:
    """The update, compiled for the devices."""
    update = run.make_update(config, objective)
    if config.mesh == MeshConfig():
        return PLACEMENTS[config.train.parallel](update)
    where, letters = training.param_shardings(config.model, mesh), getattr(objective, "letters", {})
    return training.mesh(update, abstract, where, letters=letters, offload=config.mesh.offload)


def exact_match(state: training.TrainState, config: run.Config, corpus: data.Data) -> dict[str, float]:
    """The share of the test pairs that a model translates exactly, where there are some."""
    if not corpus.test_pairs:
        return {}
    params = training.ema_params(state.opt_state, state.params)
    share = evaluate.exact_match(params, config.model, corpus.tokenizer, corpus.test_pairs, config.data.length)
    return {"exact match": share}


def sample(params: Any, config: run.Config, corpus: data.Data) -> tuple[str, str]:
    """A title and a text: the model's outputs for held-out sources, or its continuation of the prompt."""
    cfg, tok, train = config.model, corpus.tokenizer, config.train
    if cfg.encoder_layers:
        pairs = corpus.test_pairs[:5]
        outputs = evaluate.translate(params, cfg, tok, [source for source, _ in pairs], config.data.length)
        lines = [f"{s} -> {out}" + ("" if out == t else f"   (right: {t})") for (s, t), out in zip(pairs, outputs, strict=True)]
        return "held-out pairs", "\n".join(lines)
    text = evaluate.continuation(params, cfg, tok, train.prompt, train.sample_tokens, train.temperature, train.seed)
    return f"sample, temperature {train.temperature}", text


def announce(console, config: run.Config, mesh: Mesh, corpus: dict[str, int], changes: list[str], start: int) -> None:
    """Prints what is about to be trained, on which devices and data."""
    cfg = config.model
    show_log(console)
    count = (f"{specs.count(model.spec(cfg), cfg):,}", "bold")
    console.print(Text.assemble(count, f" parameters; devices: {', '.join(map(str, jax.devices()))}"))
    if warning := accelerators.missing_extra("train.py"):
        console.print(warning, soft_wrap=True, markup=False)
    if config.mesh != MeshConfig():
        placements(console, table(model.spec(cfg), cfg, mesh))
    if corpus:
        console.print("data: " + ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in corpus.items()))
    if host_memory.is_kept():
        console.print(f"freed memory stays in the process, which makes CPUs faster ({host_memory.OFF}=0 turns this off)")
    if peak_of(jax.devices()[0].device_kind) is None:
        console.print(f"MFU is not shown: unknown peak FLOP/s of {jax.devices()[0].device_kind}")
    if start:
        console.print(f"resuming from step {start} in {config.run_dir}", soft_wrap=True)
    elif config.init.folder is not None:
        console.print(f"starting from the parameters of {config.init.folder}", soft_wrap=True)
    for change in changes:
        console.print(Text.assemble(("changed since the run began", "yellow"), f": {change}"), soft_wrap=True)


def launch(arguments: list[str]) -> None:
    """The program: parses ``arguments`` and trains, together with the other processes if there are any."""
    open_output()
    ignore_abandoned_saves()
    try:
        command = run.parse(arguments, DEFAULT)
        program_cache.enable()
        accelerators.keep_memory()
        with multihost.joined(command.config.distributed):
            config = dataclasses.replace(command.config, distributed=multihost.DistributedConfig())  # one run for all
            if command.check:
                asked = pretrained.begin(run.at_home(config), command.trust)
                suits = suitable.check, suitable.check_data
                sys.exit(preflight.main(*asked, make_placement, suits, command.trust))
            code = main(config, command.trust)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: steps after the last checkpoint are not saved; the same command resumes from it\n")
        os._exit(exit_codes.INTERRUPTED)  # Python's own exit would wait for threads that save
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"error: {described(error)}")
    sys.exit(code)
