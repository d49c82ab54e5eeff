"""Next-token cross-entropy: the sum of weighted negative log-likelihoods over the sum of weights, of the whole step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.config.components import nearest
from jaxformer.nn import model
from jaxformer.nn.dense import child
from jaxformer.nn.named import scope
from jaxformer.training import balance

IGNORE = -100
"""A target that is not trained, whatever its weight."""
REQUIRED = ("tokens", "targets", "weights")
OPTIONAL = ("segments", "positions", "valid", "source", "source_valid")

Batch = dict[str, Any]


def loss(
    params: dict,
    batch: Batch,
    cfg: ModelConfig,
    key: jax.Array | None = None,
    *,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
    mtp_weight: float = 0.3,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy in nats, and metrics: loss (without smoothing), accuracy, weight (tokens that count). With experts,
    plus their ``balance_loss`` and ``z_loss``, and the metrics of ``balance.metrics``.

    batch: tokens [B, T], targets [B, T] (the token after each; −100: not trained), weights [B, T]; optional segments,
    positions, valid, source, source_valid as ``jf.hidden`` takes them. key: turns dropout on. label_smoothing ε trains on
    (1 − ε) target + ε uniform (Szegedy et al. 2016). chunk: positions whose logits exist at a time, for large vocabularies.
    mtp_weight: of the loss of the token after the next, in a model that predicts it (metric mtp_loss).

    Raises ValueError for missing or unknown entries, shapes that differ, and trained targets outside the vocabulary (inside
    ``jit`` the last makes the loss NaN).
    """
    total, sums = loss_sum(params, batch, cfg, key, label_smoothing=label_smoothing, chunk=chunk, mtp_weight=mtp_weight)
    return total / _counted(sums["weight"]), means(sums)


def loss_sum(
    params: dict,
    batch: Batch,
    cfg: ModelConfig,
    key: jax.Array | None = None,
    *,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
    mtp_weight: float = 0.3,
    axis_name: str | None = None,
    training: bool = True,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The numerator of ``loss``, and sums (nll, correct, weight; of experts, what ``balance`` goes by) that may be added over
    microbatches and over the devices of ``axis_name``. training: see ``nn.model.apply``."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing} is outside [0, 1)")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 position, or None for all")
    check(batch, cfg)
    given = {name: batch[name] for name in OPTIONAL if name in batch}
    targets, weights = jnp.asarray(batch["targets"]), counted_weights(batch)
    counted = given.get("valid", weights != 0) if cfg.experts.n_experts else None
    out = model.apply(params, batch["tokens"], cfg, key=key, counted=counted, training=training, **given)
    hidden_BTD, routing = out.hidden, out.routing
    whole = functools.partial(_chunk_sum, params, cfg, label_smoothing)
    if chunk is not None and chunk < hidden_BTD.shape[1]:
        whole = functools.partial(_by_chunks, whole, chunk)
    total, sums = whole(hidden_BTD, targets, weights)
    if cfg.mtp:
        with scope("mtp"):
            later, later_targets, later_weights = _after_next(
                params, hidden_BTD, batch["tokens"], targets, weights, cfg, given, key, training
            )
            more, ahead = whole(later.hidden, later_targets, later_weights)
        routing += later.routing
        total, sums = total + mtp_weight * more, sums | {"mtp_nll": ahead["nll"], "mtp_weight": ahead["weight"]}
    if not routing:
        return total, sums
    did = balance.collect(routing)
    # Divided by the weight of all, as the cross-entropy will be, this is the penalty itself.
    weight = sums["weight"] if axis_name is None else jax.lax.psum(sums["weight"], axis_name)
    return total + weight * balance.penalty(did, cfg.execution, axis_name), sums | did


def _after_next(params, hidden_BTD, tokens, targets, weights, cfg, given, key, training):
    """What the head reads to predict the targets after the targets; those, the last of which is not there; and their weights:
    a token counts where it and the one before it do, and belong together."""

    def shifted(x, last=0):
        return jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=last)

    together = weights != 0.0
    if "segments" in given:
        segments = jnp.asarray(given["segments"])
        together = together & (segments == shifted(segments, -1))
    later_weights = jnp.where(together, shifted(weights), 0.0)
    # The block reads what follows, whether it is trained or not: where there is no target, the text itself says what that is.
    known = jnp.where((targets >= 0) & (targets < cfg.vocab_size), targets, shifted(jnp.asarray(tokens)))
    where = {name: given[name] for name in ("positions", "segments", "valid") if name in given}
    counted = later_weights != 0 if cfg.experts.n_experts else None
    rng = child(key, "mtp")
    later = model.after_next(params, hidden_BTD, known, cfg, **where, key=rng, counted=counted, training=training)
    return later, shifted(targets), later_weights


def counted_weights(batch: Batch) -> jax.Array:
    """[B, T] float32: the weights, 0 where the target is not to be trained."""
    return jnp.where(jnp.asarray(batch["targets"]) == IGNORE, 0.0, jnp.asarray(batch["weights"], jnp.float32))


def means(sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Metrics from summed ones."""
    count = _counted(sums["weight"])
    found = {"loss": sums["nll"] / count, "accuracy": sums["correct"] / count, "weight": sums["weight"]}
    if "mtp_nll" in sums:
        found["mtp_loss"] = sums["mtp_nll"] / _counted(sums["mtp_weight"])
    return found | (balance.metrics(sums) if "load" in sums else {})


def _counted(weight):
    return jnp.where(weight == 0.0, 1.0, weight)  # nothing to learn from: a loss of 0, not 0 / 0


def _chunk_sum(params, cfg, label_smoothing, hidden_BTD, targets_BT, weights_BT):
    logits = model.head(params, hidden_BTD, cfg)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # The target's logit by comparison rather than by index: an ignored target never indexes, a vocabulary may be sharded,
    # and the gradient needs no scatter.
    is_target = targets_BT[..., None] == jnp.arange(cfg.vocab_size)
    nll = log_z - jnp.where(is_target, logits, 0.0).sum(-1)
    smooth = (1 - label_smoothing) * nll + label_smoothing * (log_z - logits.mean(-1)) if label_smoothing else nll
    correct = (logits.argmax(-1) == targets_BT).astype(jnp.float32)
    inside = (targets_BT >= 0) & (targets_BT < cfg.vocab_size)

    def weighted(values):
        counted = jnp.where(inside, values, jnp.nan)
        return jnp.sum(jnp.where(weights_BT == 0.0, 0.0, counted) * weights_BT)

    return weighted(smooth), {"nll": weighted(nll), "correct": weighted(correct), "weight": weights_BT.sum()}


def _by_chunks(whole, chunk, hidden_BTD, targets_BT, weights_BT):
    """``whole`` over chunks of T, one after another; the backward pass makes each chunk's logits again."""
    batch, length = targets_BT.shape
    padding = -length % chunk
    parts = []
    for x in (hidden_BTD, targets_BT, weights_BT):
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        parts.append(jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0))
    step = jax.checkpoint(lambda part: whole(*part))
    zero = jax.eval_shape(step, jax.tree.map(lambda x: x[0], tuple(parts)))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zero)
    return jax.lax.scan(lambda sums, part: (jax.tree.map(jnp.add, sums, step(part)), None), zero, tuple(parts))[0]


def check(batch: Batch, cfg: ModelConfig) -> None:
    """Raises ValueError for what ``loss`` cannot be computed from."""
    known = (*REQUIRED, *OPTIONAL)
    for name in batch:
        if name not in known:
            raise ValueError(f"batch has an unknown entry {name!r}{nearest(name, known)}")
    required = (*REQUIRED, "source") if cfg.encoder_layers else REQUIRED
    if missing := [name for name in required if name not in batch]:
        raise ValueError(f"batch lacks {', '.join(missing)}; it has {', '.join(batch) or 'nothing'}")
    shape = jnp.shape(batch["tokens"])
    for name in ("targets", "weights"):
        if jnp.shape(batch[name]) != shape:
            raise ValueError(f"batch entry {name!r} has shape {jnp.shape(batch[name])}, tokens have {shape}")
    targets, weights = batch["targets"], batch["weights"]
    if not jnp.issubdtype(jnp.asarray(targets).dtype, jnp.integer):
        raise ValueError(f"batch entry 'targets' must be integers, not {jnp.asarray(targets).dtype}")
    if isinstance(targets, jax.core.Tracer) or isinstance(weights, jax.core.Tracer):
        return
    targets, weights = np.asarray(targets), np.asarray(weights)
    outside = (weights != 0) & (targets != IGNORE) & ((targets < 0) | (targets >= cfg.vocab_size))
    if outside.any():
        row, column = map(int, np.argwhere(outside)[0])
        raise ValueError(f"targets[{row}, {column}] = {targets[row, column]} is outside the vocabulary of {cfg.vocab_size}")
