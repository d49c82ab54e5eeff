"""Settings that contradict each other, or of which one has no effect: each field may be right, and the run still not what was
meant. What no run can be made of is refused by the records themselves."""

from collections.abc import Iterator

from jaxformer.training.config import NEXT_TOKEN, Config

SPARE_IDS = 127
"""Rows of the embedding beyond the tokenizer's that are taken for padding to a round number."""


def contradictions(config: Config) -> Iterator[str]:
    """A sentence for each, with the names and values of the fields."""
    yield from _steps(config)
    yield from _objective(config)
    yield from _rows(config)


def _steps(config: Config) -> Iterator[str]:
    optim, train = config.optim, config.train
    if optim.warmup_steps >= train.steps:
        yield (
            f"optim.warmup_steps={optim.warmup_steps} is not below train.steps={train.steps}: the run ends before the learning "
            f"rate reaches optim.lr={optim.lr:g}"
        )
    elif optim.schedule == "wsd" and optim.warmup_steps > (1 - optim.decay_steps) * train.steps:
        yield (
            f"optim.warmup_steps={optim.warmup_steps} reaches into the decay, the last optim.decay_steps="
            f"{optim.decay_steps:g} of train.steps={train.steps}: the learning rate never stays at optim.lr={optim.lr:g}"
        )
    if optim.schedule in ("cosine", "wsd") and optim.final_lr > 1:
        yield f"optim.final_lr={optim.final_lr:g} is a fraction of optim.lr: above 1 the learning rate grows towards the end"
    if optim.schedule == "inverse_sqrt" and not optim.warmup_steps:
        yield "optim.schedule='inverse_sqrt' with optim.warmup_steps=0 falls from the first update on: lr / sqrt(step)"
    if train.eval_every > train.steps:
        yield (
            f"train.eval_every={train.eval_every} is above train.steps={train.steps}: nothing is evaluated or saved before the "
            "end, and a run that is killed starts again from 0"
        )
    if train.log_every > train.steps:
        yield f"train.log_every={train.log_every} is above train.steps={train.steps}: no training loss is recorded"
    if optim.ema and 1 / (1 - optim.ema) > train.steps:
        yield (
            f"optim.ema={optim.ema:g} is a mean over some {1 / (1 - optim.ema):,.0f} updates, of a run of "
            f"train.steps={train.steps}: the early parameters weigh as much as the last"
        )


def _objective(config: Config) -> Iterator[str]:
    cfg, train = config.model, config.train
    if train.objective != NEXT_TOKEN:
        read_by_it = [name for name in ("label_smoothing", "loss_chunk", "z_loss") if getattr(train, name)]
        if read_by_it:
            names = " and ".join(f"train.{name}" for name in read_by_it)
            yield f"{names}: train.objective={train.objective!r} has to read it itself; next_token does"
        return
    if train.label_smoothing > 0.5:
        yield f"train.label_smoothing={train.label_smoothing:g} gives wrong tokens more target probability than the right one"
    if train.loss_chunk is not None and train.loss_chunk >= config.data.length:
        yield f"train.loss_chunk={train.loss_chunk} is not below data.length={config.data.length}: it saves no memory"
    if cfg.experts.n_experts and not (cfg.execution.balance_loss or cfg.execution.balance_rate):
        yield (
            f"model.experts.n_experts={cfg.experts.n_experts} with balance_loss=0 and balance_rate=0: nothing keeps all "
            "experts in use"
        )


def _rows(config: Config) -> Iterator[str]:
    cfg, data = config.model, config.data
    if data.length > cfg.max_length:
        yield f"data.length={data.length} is more than model.max_length={cfg.max_length}, the length that the model is made for"
    elif cfg.position == "learned" and data.length < cfg.max_length and not cfg.encoder_layers:
        yield (
            f"data.length={data.length} is below model.max_length={cfg.max_length}: the table of positions is never trained "
            f"from row {data.length} on"
        )
    if not data.validation_fraction and data.validation_path is None and data.task in ("text", "pairs"):
        yield "data.validation_fraction=0 without data.validation_path: nothing is evaluated, and no checkpoint is the best one"
