"""Loss, optimizer, one pure update, checkpoints, metrics."""

from jaxformer.training.ema import ema_params
from jaxformer.training.optim import OptimConfig, from_rule, initial_params, learning_rate, optimizer

__all__ = ["OptimConfig", "ema_params", "from_rule", "initial_params", "learning_rate", "optimizer"]
