"""A feed-forward of experts: each token goes to the few that a router chooses (Shazeer et al. 2017), and to the shared ones.

The router and the shared experts are here; how tokens get to the chosen ones, and back, is in ``dispatch``.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.nn import dispatch, mlp
from jaxformer.nn.named import multiply, scope
from jaxformer.parts import Experts
from jaxformer.sharding import constrain
from jaxformer.spec import Param, kernel, zeros


class Routing(NamedTuple):
    """Where each token goes."""

    expert: jax.Array
    """int32 [B, T, J]: experts, the best first."""
    weight: jax.Array
    """float32 [B, T, J]: what their results are multiplied by."""
    logits: jax.Array
    """float32 [B, T, E]."""


class Routed:
    """What the layers of experts did in one forward: given to ``hidden``, which fills ``layers`` with a dict a layer.

    counted [B, T] bool: tokens that count in the sums; None: all that are no padding. training: whether ``dispatch="capacity"``
    leaves tokens out, as it never does otherwise: what a token gets would depend on those it is computed with.
    """

    def __init__(self, counted: Any = None, training: bool = False):
        self.counted, self.training, self.layers = counted, training, list[dict[str, jax.Array]]()


def spec(cfg: ModelConfig) -> dict:
    """Parameters of the router, of E experts, and of the shared ones as one feed-forward."""
    experts, sizes = _wide(cfg, cfg.experts.d_ff), (("F", cfg.experts.d_ff),)

    def stacked(inputs: str, outputs: str, residual: bool = False) -> Param:
        one = kernel(experts, inputs, outputs, residual=residual)  # the fan-in of one expert
        return dataclasses.replace(one, dims="E" + one.dims, sizes=sizes)

    params: dict[str, Any] = {
        "router": kernel(cfg, "D", "E"),
        "gate": stacked("D", "F"),
        "up": stacked("D", "F"),
        "down": stacked("F", "D", residual=True),
    }
    if cfg.experts.selection_bias:
        params["bias"] = Param("E", zeros, decay=False, dtype="float32")
    if cfg.experts.shared:
        own = _wide(cfg, cfg.experts.shared * cfg.experts.d_ff)
        shared = {name: dataclasses.replace(p, sizes=(("F", own.d_ff),)) for name, p in mlp.spec(own).items()}
        params["shared"] = shared
    return params


def _wide(cfg: ModelConfig, d_ff: int) -> ModelConfig:
    return dataclasses.replace(cfg, d_ff=d_ff, experts=Experts())


def apply(params: dict, x_BTD: jax.Array, cfg: ModelConfig, *, valid: Any = None, routed: Routed | None = None) -> jax.Array:
    """[B, T, D] -> [B, T, D]. valid [1 or B, T] bool: False for padding, which takes no room. routed: is told of it."""
    routing = route(params, x_BTD, cfg.experts)
    valid_BT = jnp.broadcast_to(True if valid is None else valid, x_BTD.shape[:2])
    limited = cfg.experts.dispatch == "capacity" and routed is not None and routed.training
    y_BTD, kept_BTJ = dispatch.apply(params, x_BTD, routing.expert, routing.weight, valid_BT, cfg, limited)
    if routed is not None:
        counted_BT = valid_BT if routed.counted is None else jnp.broadcast_to(routed.counted, x_BTD.shape[:2])
        routed.layers.append(sums(routing, kept_BTJ, counted_BT, cfg.experts))
    if "shared" in params:
        own = _wide(cfg, cfg.experts.shared * cfg.experts.d_ff)
        with scope("shared"):
            y_BTD = y_BTD + mlp.apply(params["shared"], x_BTD, own)
    return y_BTD


def route(params: dict, x_BTD: jax.Array, experts: Experts) -> Routing:
    """Chooses experts, in float32. Ties go to the lower number (as in ``jax.lax.top_k``)."""
    x, router = x_BTD.astype(jnp.float32), params["router"].astype(jnp.float32)
    # A token's logits stay with it: all devices take the whole router, and not XLA's choice.
    logits_BTE = constrain(multiply("BTD,DE->BTE", x, router, name="router", precision="highest"), "BTE")
    scores_BTE = jax.nn.softmax(logits_BTE) if experts.score == "softmax" else jax.nn.sigmoid(logits_BTE)
    choice_BTE = jax.lax.stop_gradient(scores_BTE)  # a choice has no gradient; the weights of what is chosen do
    if "bias" in params:
        choice_BTE = choice_BTE + jax.lax.stop_gradient(params["bias"])
    expert_BTJ = dispatch.by_token(functools.partial(_chosen, experts=experts), choice_BTE)
    weight_BTJ = jnp.take_along_axis(scores_BTE, expert_BTJ, axis=-1)
    if experts.normalize:
        weight_BTJ = weight_BTJ / (weight_BTJ.sum(-1, keepdims=True) + 1e-20)  # sigmoids may all be 0
    return Routing(expert_BTJ, weight_BTJ * experts.scale, logits_BTE)


def _chosen(choice_BTE: jax.Array, experts: Experts) -> jax.Array:
    if experts.groups > 1:
        choice_BTE = _best_groups(choice_BTE, experts)
    return jax.lax.top_k(choice_BTE, experts.per_token)[1]


def _best_groups(choice_BTE: jax.Array, experts: Experts) -> jax.Array:
    """−inf outside the groups whose two best have the highest sum (DeepSeek-AI 2024, section 2.1.2)."""
    grouped = choice_BTE.reshape(*choice_BTE.shape[:-1], experts.groups, -1)
    two_best = jax.lax.top_k(grouped, 2)[0].sum(-1)
    _, best = jax.lax.top_k(two_best, experts.groups_per_token)
    inside = (best[..., None] == jnp.arange(experts.groups)).any(-2)
    return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(choice_BTE.shape)


def sums(routing: Routing, kept_BTJ: jax.Array, counted_BT: jax.Array, experts: Experts) -> dict[str, jax.Array]:
    """Of the counted tokens, float32: load [E], choices by expert; probability [E], of the router's whole distribution;
    log_z2, squared logsumexps; tokens; dropped, choices whose expert had no room."""
    scores = jax.nn.softmax(routing.logits)
    if experts.score == "sigmoid":
        scores = jax.nn.sigmoid(routing.logits)
        scores = scores / (scores.sum(-1, keepdims=True) + 1e-20)
    counted = counted_BT.astype(jnp.float32)
    over = functools.partial(jnp.tensordot, counted, axes=2, precision="highest")
    chosen_BTE = (routing.expert[..., None] == jnp.arange(experts.number)).sum(-2).astype(jnp.float32)
    return {
        "load": over(chosen_BTE),
        "probability": over(scores),
        "log_z2": over(jax.nn.logsumexp(routing.logits, axis=-1) ** 2),
        "tokens": counted.sum(),
        "dropped": over((~kept_BTJ).sum(-1).astype(jnp.float32)),
    }
