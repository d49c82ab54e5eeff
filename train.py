"""Train a transformer: ``python train.py [CONFIG.py] [--field value ...]``. ``--help`` explains every field.

The same command with the same run directory continues from the last checkpoint, exactly.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxformer import data, training
from jaxformer.cli import pretrained, suitable
from jaxformer.config import spec as specs
from jaxformer.nn import model
from jaxformer.parallel import multihost
from jaxformer.parallel.placement import PLACEMENTS, Placement, check_batch, own_rows
from jaxformer.parallel.sharding import MeshConfig, table
from jaxformer.training import evaluate, run
from jaxformer.training.guard import Guard
from jaxformer.training.report import Report, placements, results, show_log

DEFAULT = Path(__file__).parent / "configs" / "quickstart.py"


def main(config: run.Config, trust: bool = False) -> None:
    config, pretrained_tok, read = pretrained.begin(config, trust)
    directory, tok, changes = run.open_run(config, trust)
    suitable.check(config, mesh := config.mesh.make())
    corpus = data.load(config.data, tok or pretrained_tok, own_rows(mesh, config.data.batch_size))
    changes += suitable.check_data(config, corpus)
    cfg = run.fit_tokenizer(config.model, tok := corpus.tokenizer)
    config = dataclasses.replace(config, model=cfg, data=dataclasses.replace(config.data, accept_change=False))
    train = config.train
    agree(config, corpus, mesh)
    objective = run.make_objective(config)
    fresh = functools.partial(run.initial_state, config)
    placement = make_placement(config, mesh, objective, abstract := jax.eval_shape(fresh))
    checkpoints = training.Checkpoints(directory / "checkpoints", train.keep_checkpoints)
    restored = checkpoints.restore(placement.like(abstract))
    start = 0 if restored is None else int(restored.step)
    if start > train.steps:
        raise ValueError(f"{directory} is at step {start} already, past train.steps={train.steps}")
    pretrained.write_run(directory, config, corpus)  # from here on nothing is refused
    state = begin(placement, abstract, fresh, restored, read)

    began = time.perf_counter()
    evaluation = placement.compile(training.make_evaluate(objective))
    score: dict[str, float] = {}
    guard = Guard(train, abstract.params, placement.get_metrics, checkpoints.newest)
    report = Report(directory, start, train.steps, train.log_every, guard.fetch)
    with checkpoints, report, multihost.stopping() as stop, placement.within():
        announce(report.console, config, mesh, corpus.summary, changes, start)
        batches = data.iterate(corpus.train, start)
        for step in range(start + 1, train.steps + 1):
            state, metrics = placement.step(state, placement.put_batch(next(batches)))
            report.train(step, metrics)
            guard.compare(step, state.params)
            if step % train.eval_every == 0 or step == train.steps:
                current = placement.get_state(state)
                params = training.ema_params(current.opt_state, current.params)
                held_out = map(placement.put_evaluation, corpus.validation)
                score = evaluate.validation(objective, evaluation, params, held_out, corpus.validation_bytes)
                report.validation(step, score)
                checkpoints.save(current, score.get("loss"))
                if train.sample_tokens:
                    report.sample(step, *sample(params, config, corpus))
            if stop():
                break
        report.settle()  # an update that failed is not saved
        current = placement.get_state(state)
        checkpoints.save(current)  # does nothing unless training stopped between evaluations
        checkpoints.wait()
        is_done = int(current.step) == train.steps
        if is_done and corpus.test_pairs:
            params = training.ema_params(current.opt_state, current.params)
            score["exact match"] = evaluate.exact_match(params, cfg, tok, corpus.test_pairs, config.data.length)
        best = checkpoints.best_step()
    if is_done:
        results(report.console, train.steps, directory, score, best, time.perf_counter() - began)
    else:
        report.console.print(
            f"Stopped after step {int(current.step)}, saved in {directory}. The same command resumes from there."
        )


def agree(config: run.Config, corpus: data.Data, mesh: Mesh) -> None:
    """Raises ValueError where processes differ in what they train on, and where the batch does not divide by the devices."""
    multihost.agree("text or tokenizer", (corpus.tokenizer.content_hash, corpus.content_hash))
    multihost.agree("configuration", config)
    batch = {"tokens": jax.ShapeDtypeStruct((config.data.batch_size, config.data.length), int)}
    check_batch(batch, mesh, config.train.microbatches)


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
    console.print(f"[bold]{specs.count(model.spec(cfg), cfg):,}[/] parameters; devices: {', '.join(map(str, jax.devices()))}")
    if config.mesh != MeshConfig():
        placements(console, table(model.spec(cfg), cfg, mesh))
    if corpus:
        console.print("data: " + ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in corpus.items()))
    if start:
        console.print(f"resuming from step {start} in {config.run_dir}")
    for change in changes:
        console.print(f"[yellow]differs from how the run began[/]: {change}")


def launch(arguments: list[str]) -> None:
    """The program: parses ``arguments`` and trains, together with the other processes if there are any."""
    try:
        command = run.parse(arguments, DEFAULT)
        with multihost.joined(command.config.distributed):
            config = dataclasses.replace(command.config, distributed=multihost.DistributedConfig())
            main(config, command.trust)  # one run, whatever the number of processes
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    launch(sys.argv[1:])
