"""The position-wise feed-forward: φ(x W_up + b) W_down + b, or gated, (φ(x W_gate) · x W_up) W_down (Shazeer 2020)."""

import functools
from collections.abc import Callable

import jax

from jaxformer.config import ModelConfig
from jaxformer.config.components import Component, resolve
from jaxformer.config.spec import bias, weight
from jaxformer.nn.dense import dense
from jaxformer.nn.named import named


def spec(cfg: ModelConfig) -> dict:
    """Parameters of ``cfg.mlp``."""
    return resolve("mlp", cfg.mlp, CHOICES).spec(cfg)


def apply(params: dict, x_BTD: jax.Array, cfg: ModelConfig) -> jax.Array:
    """[B, T, D] -> [B, T, D], every position by itself."""
    return resolve("mlp", cfg.mlp, CHOICES).apply(params, x_BTD, cfg)


def _spec(cfg, gated):
    names = ("gate", "up") if gated else ("up",)
    params = {name: weight(cfg, "D", "F") for name in names} | {"down": weight(cfg, "F", "D", residual=True)}
    if cfg.mlp_bias:
        params |= {f"{name}_bias": bias("F") for name in names} | {"down_bias": bias("D")}
    return params


def _apply(params, x_BTD, cfg, activation, gated):
    up_BTF = named(dense("BTD,DF->BTF", x_BTD, params["up"], params.get("up_bias")), "up", "BTF", cfg)
    if gated:
        gate_BTF = named(dense("BTD,DF->BTF", x_BTD, params["gate"], params.get("gate_bias")), "gate", "BTF", cfg)
        hidden_BTF = activation(gate_BTF) * up_BTF
    else:
        hidden_BTF = activation(up_BTF)
    hidden_BTF = named(hidden_BTF, "hidden", "BTF", cfg)
    return dense("BTF,FD->BTD", hidden_BTF, params["down"], params.get("down_bias"))


def choice(activation, gated: bool) -> Component:
    """A feed-forward of this shape with any elementwise ``activation``."""
    return Component(functools.partial(_spec, gated=gated), functools.partial(_apply, activation=activation, gated=gated))


gelu_exact = functools.partial(jax.nn.gelu, approximate=False)
gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)

Activation = Callable[[jax.Array], jax.Array]
ACTIVATIONS: dict[str, Activation] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": gelu_exact,
    "gelu_tanh": gelu_tanh,
}
GATES: dict[str, Activation] = {"swiglu": jax.nn.silu, "geglu": gelu_exact, "geglu_tanh": gelu_tanh}

CHOICES = {
    **{name: choice(activation, gated=False) for name, activation in ACTIVATIONS.items()},
    **{name: choice(activation, gated=True) for name, activation in GATES.items()},
}
