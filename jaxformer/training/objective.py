"""Objectives, the functions that training minimises, and the one of language models: next-token cross-entropy.

An objective is any function ``(params, batch, rng) -> (total, sums)`` (see ``Objective``). ``next_token(cfg)`` is one.
"""

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.config.components import nearest
from jaxformer.nn import embedding, model
from jaxformer.nn.dense import child
from jaxformer.nn.inputs import int32
from jaxformer.nn.mistakes import answers_mistakes
from jaxformer.nn.named import scope
from jaxformer.parallel.placement import over_devices
from jaxformer.training import balance

IGNORE = -100
"""A target that is not trained, whatever its weight."""
REQUIRED = ("tokens", "targets", "weights")
OPTIONAL = ("segments", "positions", "valid", "source", "source_valid", "embeddings", "embeddings_mask")

Batch = dict[str, Any]
Sums = dict[str, jax.Array]


class Objective(Protocol):
    """What training minimises: ``total / sums["weight"]``, both summed over all rows of a step.

    ``batch`` is a dict of arrays whose first axis is the rows; a call may see only some of the step's rows (one microbatch, one
    device). ``rng`` is a key for dropout, different in every call, or None in validation. ``total`` is a scalar. ``sums`` is a
    dict of arrays that add up over rows, with the scalar ``"weight"``: how many tokens, pairs or rows were counted. Arrays that
    the function closes over, such as a frozen model, are constants: they are not trained, and every device has a copy.

    Attributes that an objective may also have:

    * ``metrics(sums)``: the metrics to report, a dict of scalars with ``"loss"``. Without it, every scalar of ``sums`` divided
      by the weight, the weight itself, and ``loss``, which is ``total / weight`` unless ``sums`` has an entry of that name.
    * ``validation``: the objective to validate with, if it is another.
    * ``weight(batch)``: the value of ``sums["weight"]``, for an objective that knows it from the batch alone.
    * ``after_update(params, sums)``: the parameters to continue with, after the optimizer has changed them.
    * ``letters``: the dimensions of batch entries, such as ``{"chosen": "BT"}``: on a mesh, T is spread over ``context``
      (``parallel.placement.LETTERS`` has those of the library's own entries). All others are spread by rows alone.
    """

    def __call__(self, params: Any, batch: Any, rng: Any, /) -> tuple[jax.Array, Sums]:
        """``(total, sums)``."""


def mean_metrics(objective: Objective, sums: Any) -> dict[str, Any]:
    """The metrics of ``objective`` from sums over a whole step or split, its ``total`` among them as ``"loss"``, with the
    weight. Raises ValueError for an objective whose own metrics have no ``"loss"``."""
    if metrics := getattr(objective, "metrics", None):
        means = {"weight": sums["weight"]} | metrics(sums)
        if "loss" not in means:
            raise ValueError(f"metrics(sums) of an objective must include 'loss'; it has {', '.join(means)}")
        return means
    count = balance.nonzero(sums["weight"])
    means = {name: value / count for name, value in sums.items() if jnp.ndim(value) == 0}
    return means | {"weight": sums["weight"]}


def call(objective: Objective, params: Any, batch: Any, rng: jax.Array | None) -> tuple[jax.Array, Sums]:
    """``(total, sums)`` of ``objective``, with ``total`` in ``sums`` as ``"loss"`` unless there is one. Raises ValueError for
    results that training cannot use."""
    result = objective(params, batch, rng)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ValueError(f"an objective must return (total, sums), a scalar and a dict, not {type(result).__name__}")
    total, sums = result
    for name, value in (("total", total), ('sums["weight"]', sums.get("weight"))):
        if value is None or jnp.ndim(value):
            wrong = "is missing" if value is None else f"has shape {jnp.shape(value)}"
            raise ValueError(f"an objective must return (total, sums) with a scalar {name}, which {wrong}")
    return total, {"loss": total} | sums


@dataclass(frozen=True)
class NextToken:
    """Next-token cross-entropy in nats, summed over the tokens that count; see ``next_token`` and ``loss``."""

    cfg: ModelConfig
    label_smoothing: float = 0.0
    loss_chunk: int | None = None
    mtp_weight: float = 0.3
    z_loss: float = 0.0
    training: bool = True
    """Whether ``expert_dispatch="capacity"`` limits the experts."""

    def __post_init__(self):
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} is outside [0, 1)")
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise ValueError(f"loss_chunk={self.loss_chunk} must be at least 1 position, or None for all")
        if not self.z_loss >= 0:
            raise ValueError(f"z_loss={self.z_loss} must be at least 0")

    def __call__(self, params: Any, batch: Batch, rng: jax.Array | None = None) -> tuple[jax.Array, Sums]:
        """``(total, sums)``: sums of nll, correct, weight; with experts, those that ``balance`` needs."""
        cfg = self.cfg
        check(batch, cfg)
        if cfg.mtp and "embeddings" in batch:
            raise ValueError("a batch with embeddings cannot be used with mtp, whose block reads the next tokens by their ids")
        rng = rng if cfg.execution.has_dropout else None
        inputs = {name: batch[name] for name in OPTIONAL if name in batch}
        targets, weights = int32(batch["targets"]), counted_weights(batch)
        routed = inputs.get("valid", weights != 0) if cfg.experts.n_experts else None
        out = model.apply(params, batch["tokens"], cfg, key=rng, counted=routed, training=self.training, **inputs)
        routing = out.routing
        total, sums = self._cross_entropy(params, out.hidden, targets, weights)
        if cfg.mtp:
            with scope("mtp"):
                later, *ahead = _after_next(params, out.hidden, batch, targets, weights, self, inputs, rng)
                more, ahead_sums = self._cross_entropy(params, later.hidden, *ahead)
            routing += later.routing
            total = total + self.mtp_weight * more
            sums |= {"mtp_nll": ahead_sums["nll"], "mtp_weight": ahead_sums["weight"]}
        if not routing:
            return total, sums
        experts = balance.collect(routing)
        # Divided by the weight of all devices, as the cross-entropy will be, this is the penalty itself.
        return total + over_devices(sums["weight"]) * balance.penalty(experts, cfg.execution), sums | experts

    def _cross_entropy(self, params, hidden_BTD, targets_BT, weights_BT):
        chunk = self.loss_chunk
        if chunk is None or chunk >= hidden_BTD.shape[1]:
            return _chunk_sum(self, params, hidden_BTD, targets_BT, weights_BT)
        return _by_chunks(functools.partial(_chunk_sum, self), params, self.cfg, chunk, hidden_BTD, targets_BT, weights_BT)

    def weight(self, batch: Batch) -> jax.Array:
        """The sum of the weights of the targets that are trained."""
        check(batch, self.cfg)
        return counted_weights(batch).sum()

    def metrics(self, sums: Sums) -> Sums:
        """loss (without label smoothing and penalties), accuracy, weight (tokens that count); mtp_loss of a model with mtp,
        z_loss (the mean squared logsumexp) where it has a weight; with experts, those of ``balance.metrics``."""
        count = balance.nonzero(sums["weight"])
        means = {"loss": sums["nll"] / count, "accuracy": sums["correct"] / count, "weight": sums["weight"]}
        if "mtp_nll" in sums:
            means["mtp_loss"] = sums["mtp_nll"] / balance.nonzero(sums["mtp_weight"])
        if "z_loss" in sums:
            means["z_loss"] = sums["z_loss"] / count
        return means | (balance.metrics(sums) if "load" in sums else {})

    def after_update(self, params: Any, sums: Sums) -> Any:
        """``params`` with the experts' selection biases moved, where the model's balance_rate says so."""
        rate = self.cfg.execution.balance_rate
        return balance.move_bias(params, sums["load"], rate) if rate else params

    @property
    def validation(self) -> "NextToken":
        """The cross-entropy itself, without smoothing and penalties on the logits, and experts without a limit."""
        return NextToken(self.cfg, loss_chunk=self.loss_chunk, mtp_weight=self.mtp_weight, training=False)


def next_token(
    cfg: ModelConfig,
    *,
    label_smoothing: float = 0.0,
    loss_chunk: int | None = None,
    mtp_weight: float = 0.3,
    z_loss: float = 0.0,
) -> NextToken:
    """The objective of language models: cross-entropy with the token after each, averaged over all tokens of the step that
    count. Batches are those of ``loss``.

    label_smoothing ε trains on (1 − ε) target + ε uniform (Szegedy et al. 2016). loss_chunk: positions whose logits exist at a
    time, for large vocabularies. mtp_weight: weight of the loss of the token after the next, in a model that predicts it.
    z_loss: weight of the mean squared logsumexp of the logits (Chowdhery et al. 2022, section 5: 1e-4).

    Raises ValueError for values outside their range, and for experts whose router could not learn.
    """
    experts = cfg.experts
    if experts.n_experts and experts.per_token == 1 and experts.normalize:
        raise ValueError("experts with per_token=1 need normalize=False, or their router would learn nothing")
    return NextToken(cfg, label_smoothing, loss_chunk, mtp_weight, z_loss)


@functools.partial(answers_mistakes, entries=(*REQUIRED, *OPTIONAL))
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
    """Mean cross-entropy in nats, and the metrics of ``NextToken.metrics``. With experts, plus their ``balance_loss`` and
    ``router_z_loss``.

    batch: tokens [B, T], targets [B, T] of any integer dtype (the token after each; −100, which unsigned ones do not have: not
    trained), weights [B, T]; optional segments, positions, valid, source, source_valid as ``jf.hidden`` takes them. key: turns
    dropout on. chunk: ``loss_chunk`` of ``next_token``, which describes the other options.

    Raises ValueError for missing or unknown entries, shapes that differ, and trained targets outside the vocabulary (inside
    ``jit`` the last makes the loss NaN).
    """
    objective = NextToken(cfg, label_smoothing, chunk, mtp_weight)
    total, sums = objective(params, batch, key)
    return total / balance.nonzero(sums["weight"]), objective.metrics(sums)


def _after_next(params, hidden_BTD, batch, targets, weights, objective, inputs, rng):
    """What the head reads to predict the targets after the targets; those, the last of which is not there; and their weights:
    a token counts where it and the one before it do, and belong together."""
    cfg = objective.cfg

    def shifted(x, last=0):
        return jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=last)

    together = weights != 0.0
    if "segments" in inputs:
        segments = jnp.asarray(inputs["segments"])
        together = together & (segments == shifted(segments, -1))
    later_weights = jnp.where(together, shifted(weights), 0.0)
    # The block reads what follows, whether it is trained or not: where there is no target, the text itself says what that is.
    known = jnp.where((targets >= 0) & (targets < cfg.vocab_size), targets, shifted(jnp.asarray(batch["tokens"])))
    where = {name: inputs[name] for name in ("positions", "segments", "valid") if name in inputs}
    routed = later_weights != 0 if cfg.experts.n_experts else None
    how: dict[str, Any] = {"key": child(rng, "mtp"), "counted": routed, "training": objective.training}
    later = model.after_next(params, hidden_BTD, known, cfg, **where, **how)
    return later, shifted(targets), later_weights


def counted_weights(batch: Batch) -> jax.Array:
    """[B, T] float32: the weights, 0 where the target is not to be trained."""
    return jnp.where(int32(batch["targets"]) == IGNORE, 0.0, jnp.asarray(batch["weights"], jnp.float32))


def _chunk_sum(objective, params, hidden_BTD, targets_BT, weights_BT):
    cfg, label_smoothing = objective.cfg, objective.label_smoothing
    logits = model.head(params, hidden_BTD, cfg)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # The target's logit by comparison rather than by index: an ignored target never indexes, a vocabulary may be sharded,
    # and the gradient needs no scatter.
    is_target = targets_BT[..., None] == jnp.arange(cfg.vocab_size, dtype=jnp.int32)
    nll = log_z - jnp.where(is_target, logits, 0.0).sum(-1)
    smooth = (1 - label_smoothing) * nll + label_smoothing * (log_z - logits.mean(-1)) if label_smoothing else nll
    correct = (logits.argmax(-1) == targets_BT).astype(jnp.float32)
    inside = (targets_BT >= 0) & (targets_BT < cfg.vocab_size)

    def weighted(values):
        known = jnp.where(inside, values, jnp.nan)
        return jnp.sum(jnp.where(weights_BT == 0.0, 0.0, known) * weights_BT)

    total, sums = weighted(smooth), {"nll": weighted(nll), "correct": weighted(correct), "weight": weights_BT.sum()}
    if objective.z_loss:
        sums["z_loss"] = weighted(log_z**2)
        total = total + objective.z_loss * sums["z_loss"]
    return total, sums


def _by_chunks(sum_of, params, cfg, chunk, hidden_BTD, targets_BT, weights_BT):
    """``sum_of(params, …)`` over chunks of T; the backward pass makes the logits again, and adds gradients in float32."""
    batch, length = targets_BT.shape
    padding = -length % chunk
    parts = []
    for x in (hidden_BTD, targets_BT, weights_BT):
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        parts.append(jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0))
    wide, narrowed = embedding.in_float32(params, cfg)
    step = jax.checkpoint(lambda piece: sum_of(narrowed(wide), *piece))
    sums = jax.eval_shape(step, jax.tree.map(lambda x: x[0], tuple(parts)))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    return jax.lax.scan(lambda sums, piece: (jax.tree.map(jnp.add, sums, step(piece)), None), zero, tuple(parts))[0]


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
            raise ValueError(f"batch entry {name!r} has shape {jnp.shape(batch[name])}, but tokens have {shape}")
    targets, weights = batch["targets"], batch["weights"]
    if not jnp.issubdtype(jnp.asarray(targets).dtype, jnp.integer):
        raise ValueError(f"batch entry 'targets' must be integers, not {jnp.asarray(targets).dtype}")
    if isinstance(targets, jax.core.Tracer) or isinstance(weights, jax.core.Tracer):
        return
    targets, weights = np.asarray(targets), np.asarray(weights)
    outside = (weights != 0) & (targets != IGNORE) & ((targets < 0) | (targets >= cfg.vocab_size))
    if outside.any():
        row, column = map(int, np.argwhere(outside)[0])
        target, wrapped = int(targets[row, column]), int(np.array(IGNORE).astype(targets.dtype))
        why = f"; −100, for a target that is not trained, does not fit {targets.dtype}" if target == wrapped else ""
        raise ValueError(f"targets[{row}, {column}] = {target} is outside the vocabulary of {cfg.vocab_size}{why}")
