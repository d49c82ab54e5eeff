"""Optimizers by name, built of optax: every one is a function ``(optim, cfg, steps) -> optax.GradientTransformation``.

The built-in ones differ in their rule alone: ``from_rule`` puts clipping before it, and weight decay and the learning-rate
schedule after it. A user's own function is named by its import path, and is all of the transformation.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.config.components import imported, nearest, required
from jaxformer.config.strict import Strict, within
from jaxformer.nn import model
from jaxformer.training import matrices, mup
from jaxformer.training.ema import with_ema
from jaxformer.training.master import Following, follower, with_master

USES: dict[str, tuple[str, ...]] = {
    "adamw": ("beta1", "beta2", "eps", "mup_base"),
    "lion": ("beta1", "beta2", "mup_base"),
    "adafactor": (),
    "sgd": ("beta1",),
    "muon": ("beta1", "beta2", "eps", "muon_beta", "muon_rms"),
}
"""Of each built-in optimizer, the fields that not all of them use."""


@dataclass(frozen=True)
class OptimConfig(Strict):
    """The optimizer, its learning-rate schedule, and what is kept beside the parameters.

    A field that the named optimizer does not use must have its default value.
    """

    NAMES = {"name": tuple(USES)}

    name: str = "adamw"
    """adamw (Loshchilov & Hutter 2019); lion (Chen et al. 2023); adafactor (Shazeer & Stern 2018), without momentum; sgd, with
    momentum; muon (Jordan et al. 2024) for matrices, with AdamW for embeddings, the head and everything else; or
    'package.module:name', a function (optim, cfg, steps) -> optax.GradientTransformation."""
    lr: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "inverse_sqrt", "constant"] = "cosine"
    """Learning rate after the warm-up: cosine, down to final_lr at the last step; wsd, stable, then linear down to final_lr;
    inverse_sqrt, lr·sqrt(warmup/step), which is the 2017 schedule for lr = (d_model·warmup)^-0.5; constant."""
    warmup_steps: int = 100
    """Number of steps over which the learning rate rises linearly from 0."""
    final_lr: float = 0.1
    """Learning rate at the last step, as a fraction of lr (cosine, wsd)."""
    decay_steps: float = 0.2
    """Share of all steps, at the end, over which wsd decays."""
    beta1: float = 0.9
    """Decay of the gradient's running mean (adamw, muon's AdamW); share of it in the update (lion); momentum (sgd)."""
    beta2: float = 0.95
    """Decay of the squared gradient's running mean (adamw, muon's AdamW); of the gradient's (lion)."""
    eps: float = 1e-8
    """Adam's epsilon (adamw, muon's AdamW)."""
    muon_beta: float = 0.95
    """Decay of the gradient's running mean that Muon orthogonalises."""
    muon_rms: float = 0.2
    """Muon's update times muon_rms·sqrt(max(inputs, outputs)), which makes its root mean square about muon_rms whatever the
    shape: 0.2 is AdamW's, whose learning rate then fits both (Liu et al. 2025). 0: times sqrt(max(1, outputs / inputs))
    instead (Jordan et al. 2024)."""
    weight_decay: float = 0.1
    """Decoupled weight decay of all parameters except norms and biases."""
    clip_norm: float = 1.0
    """Global norm that gradients are clipped to. 0: no clipping."""
    mup_base: int | None = None
    """Width d_model at which lr was tuned: it is then carried over to this model's by mu-P (Yang et al. 2022), for adamw and
    lion. The two models have the same head_dim, and heads and d_ff in proportion to d_model; a head_dim that grows too needs
    attention_scale = sqrt(head_dim of the base)/head_dim. None: one rate for all parameters."""
    ema: float = 0.0
    """Decay of a running mean of the parameters, which is evaluated, sampled from and loaded in their place; 0: none."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 0, math.inf, "lr", "eps", open_low=True, prefix="optim.")
        within(self, 0, math.inf, "warmup_steps", "final_lr", "weight_decay", "clip_norm", "muon_rms", prefix="optim.")
        within(self, 0, 1, "beta1", "beta2", "decay_steps", "muon_beta", "ema", prefix="optim.")
        within(self, 1, math.inf, "mup_base", prefix="optim.")
        if self.name not in USES and ":" not in self.name:
            raise ValueError(f"unknown optim.name {self.name!r}{nearest(self.name, USES)} (or give 'package.module:name')")
        self._refuse_unused()

    def _refuse_unused(self):
        by_name = {name for uses in USES.values() for name in uses}
        if self.name not in USES:
            by_name = {"mup_base"}  # only the function itself knows which of the others it uses
        for field in fields(self):
            unused = field.name in by_name and field.name not in USES.get(self.name, ())
            if unused and getattr(self, field.name) != field.default:
                users = ", ".join(name for name, uses in USES.items() if field.name in uses)
                value = f"optim.{field.name}={getattr(self, field.name)}"
                raise ValueError(f"{value} has no effect with optim.name={self.name!r}; it is used by {users}")


def _cosine(cfg, step, steps):
    progress = (step - cfg.warmup_steps) / max(1, steps - cfg.warmup_steps)
    return cfg.final_lr + (1 - cfg.final_lr) * 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(progress, 0, 1)))


def _wsd(cfg, step, steps):
    decay = max(1.0, cfg.decay_steps * steps)
    return 1 - (1 - cfg.final_lr) * jnp.clip((step - (steps - decay)) / decay, 0, 1)


def _inverse_sqrt(cfg, step, steps):
    return jnp.sqrt(max(1, cfg.warmup_steps) / jnp.maximum(step, 1))


SCHEDULES = {"cosine": _cosine, "wsd": _wsd, "inverse_sqrt": _inverse_sqrt, "constant": lambda cfg, step, steps: 1.0}


def learning_rate(cfg: OptimConfig, step: jax.Array, steps: int) -> jax.Array:
    """The rate of update number ``step`` (0 is the first) in a run of ``steps`` updates: float32 []."""
    step = step + 1.0  # the first update already moves
    warm = jnp.minimum(1.0, step / max(1, cfg.warmup_steps))
    return jnp.asarray(cfg.lr * jnp.where(warm < 1, warm, SCHEDULES[cfg.schedule](cfg, step, steps)), jnp.float32)


class Scheduled(Following):
    """A gradient transformation that gives its learning rate: ``learning_rate(step)``, which an update reports as ``lr``."""

    learning_rate: Callable[[jax.Array], jax.Array]


def _scheduled(transform: optax.GradientTransformation, rate: Callable[[jax.Array], jax.Array]) -> Scheduled:
    scheduled = Scheduled(transform.init, transform.update)
    scheduled.learning_rate, scheduled.follow = rate, follower(transform)
    return scheduled


def from_rule(rule: optax.GradientTransformation, optim: OptimConfig, cfg: ModelConfig, steps: int) -> Scheduled:
    """A whole optimizer made of a rule such as ``optax.scale_by_adam()``: the gradient clipped by its global norm, the rule,
    mu-P's rates if ``optim.mup_base`` is given, weight decay of the parameters that decay, the learning rate with its sign.

    mu-P's rates come before the decay, so that lr · weight_decay is the same at every width.
    """
    schedule = functools.partial(learning_rate, optim, steps=steps)
    parts = [rule]
    if optim.mup_base is not None:
        parts.append(matrices.scaled(mup.rates(cfg, optim.mup_base)))
    parts += [
        optax.add_decayed_weights(optim.weight_decay, specs.decay_mask(model.spec(cfg))),
        optax.scale_by_learning_rate(schedule),
    ]
    ruled = optax.chain(*parts)
    clipped = optax.chain(optax.clip_by_global_norm(optim.clip_norm), ruled) if optim.clip_norm else ruled
    return _scheduled(clipped, schedule)


def _adam(optim: OptimConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=optim.beta1, b2=optim.beta2, eps=optim.eps)


def _muon(optim: OptimConfig, cfg: ModelConfig) -> optax.GradientTransformation:
    return matrices.muon(model.spec(cfg), cfg, _adam(optim), beta=optim.muon_beta, eps=optim.eps, rms=optim.muon_rms)


RULES: dict[str, Callable[[OptimConfig, ModelConfig], optax.GradientTransformation]] = {
    "adamw": lambda optim, cfg: _adam(optim),
    "lion": lambda optim, cfg: optax.scale_by_lion(b1=optim.beta1, b2=optim.beta2),
    "adafactor": lambda optim, cfg: matrices.adafactor(model.spec(cfg)),
    "sgd": lambda optim, cfg: optax.trace(decay=optim.beta1),
    "muon": _muon,
}


def optimizer(optim: OptimConfig, cfg: ModelConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run of ``steps`` updates. ``optax.apply_updates`` makes new parameters of its updates.

    It is ``Scheduled`` where it is known to follow the schedule: not of a user's function that does not say so.

    Parameters below float32 are trained in float32, of which they are the rounding (``master.with_master``); with
    ``optim.ema`` the state holds their running mean (``ema.ema_params``).

    Raises ValueError for an ``optim.name`` that leads to no such function, and for a model that mu-P is not defined for.
    """
    if optim.name in RULES:
        transform: optax.GradientTransformation = from_rule(RULES[optim.name](optim, cfg), optim, cfg, steps)
    else:
        transform = _users(optim, cfg, steps)
    rate = getattr(transform, "learning_rate", None)
    dtypes = {jnp.dtype(param.dtype or cfg.param_dtype) for _, param in specs.walk(model.spec(cfg))}
    if any(dtype.itemsize < 4 for dtype in dtypes):
        transform = with_master(transform)
    if optim.ema:
        transform = with_ema(transform, optim.ema)
    return transform if rate is None else _scheduled(transform, rate)


def _users(optim: OptimConfig, cfg: ModelConfig, steps: int) -> optax.GradientTransformation:
    function = imported("optim.name", optim.name)
    if not callable(function):
        raise ValueError(f"optim.name={optim.name!r} must be a function (optim, cfg, steps), not {type(function).__name__}")
    transform: Any = function(*(optim, cfg, steps)[: required(function)])
    if not isinstance(transform, optax.GradientTransformation):
        raise ValueError(f"optim.name={optim.name!r} gave {type(transform).__name__}, not an optax.GradientTransformation")
    return transform


def initial_params(optim: OptimConfig, cfg: ModelConfig, key: jax.Array) -> dict:
    """``jf.init``, with the initial values of mu-P if ``optim.mup_base`` is given."""
    params = model.init(cfg, key)
    return params if optim.mup_base is None else mup.initial(params, cfg, optim.mup_base)
