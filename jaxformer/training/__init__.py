"""Objectives, optimizers, one pure update, placements on devices, checkpoints, metrics: what a training loop is made of."""

from jaxformer.parallel.placement import Placement, jit, mesh, over_devices, pmap
from jaxformer.training.checkpoints import Checkpoints
from jaxformer.training.ema import ema_params, with_ema
from jaxformer.training.evaluate import make_evaluate
from jaxformer.training.master import with_master
from jaxformer.training.objective import NextToken, Objective, next_token
from jaxformer.training.optim import OptimConfig, Scheduled, from_rule, initial_params, learning_rate, optimizer
from jaxformer.training.update import TrainState, init_state, make_update, param_shardings

__all__ = [
    "Checkpoints",
    "NextToken",
    "Objective",
    "OptimConfig",
    "Placement",
    "Scheduled",
    "TrainState",
    "ema_params",
    "from_rule",
    "init_state",
    "initial_params",
    "jit",
    "learning_rate",
    "make_evaluate",
    "make_update",
    "mesh",
    "next_token",
    "optimizer",
    "over_devices",
    "param_shardings",
    "pmap",
    "with_ema",
    "with_master",
]
