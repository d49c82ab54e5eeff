"""AdamW with a learning-rate schedule, by optax."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.config.strict import Strict, within
from jaxformer.nn import model


@dataclass(frozen=True)
class OptimConfig(Strict):
    """The optimizer: AdamW (Loshchilov & Hutter 2019)."""

    lr: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "inverse_sqrt", "constant"] = "cosine"
    """After the warm-up: cosine, down to final_lr at the last step; wsd, stable, then linear down to final_lr;
    inverse_sqrt, lr·sqrt(warmup/step), which is the 2017 schedule for lr = (d_model·warmup)^-0.5; constant."""
    warmup_steps: int = 100
    """Steps of linear warm-up from 0."""
    final_lr: float = 0.1
    """Learning rate at the end, as a fraction of the peak (cosine, wsd)."""
    decay_steps: float = 0.2
    """Share of all steps in which wsd decays."""
    beta1: float = 0.9
    """Decay of the gradient's running mean."""
    beta2: float = 0.95
    """Decay of the squared gradient's running mean."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of all parameters but norms and biases."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0: no clipping."""

    def __post_init__(self):
        super().__post_init__()
        within(self, 0, math.inf, "lr", "eps", open_low=True, prefix="optim.")
        within(self, 0, math.inf, "warmup_steps", "final_lr", "weight_decay", "clip_norm", prefix="optim.")
        within(self, 0, 1, "beta1", "beta2", "decay_steps", prefix="optim.")


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


class Scheduled(optax.GradientTransformation):
    """A gradient transformation that tells its learning rate: ``learning_rate(step)``, which an update reports as ``lr``."""

    learning_rate: Callable[[jax.Array], jax.Array]


def optimizer(optim: OptimConfig, cfg: ModelConfig, steps: int) -> Scheduled:
    """Clipping by global norm, then AdamW, for a run of ``steps`` updates; decay goes where the model's specs say."""
    schedule = functools.partial(learning_rate, optim, steps=steps)
    adamw = optax.adamw(
        schedule,
        b1=optim.beta1,
        b2=optim.beta2,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        mask=specs.decay_mask(model.spec(cfg)),
    )
    chain = optax.chain(optax.clip_by_global_norm(optim.clip_norm), adamw) if optim.clip_norm else adamw
    scheduled = Scheduled(chain.init, chain.update)
    scheduled.learning_rate = schedule
    return scheduled
