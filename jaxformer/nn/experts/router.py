"""A feed-forward of experts: each token goes to the few that a router chooses (Shazeer et al. 2017), and to the shared ones.

The router and the shared experts are here; how tokens get to the chosen ones, and back, is in ``dispatch``.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import Experts, ModelConfig
from jaxformer.config.spec import Param, bound, weight, zeros
from jaxformer.nn import mlp
from jaxformer.nn.experts import dispatch
from jaxformer.nn.named import multiply, scope
from jaxformer.parallel.sharding import constrain

Sums = dict[str, jax.Array]


class Routing(NamedTuple):
    """Where each token goes."""

    expert: jax.Array
    """int32 [B, T, J]: experts, the best first."""
    weight: jax.Array
    """float32 [B, T, J]: what their results are multiplied by."""
    logits: jax.Array
    """float32 [B, T, E]."""


def spec(cfg: ModelConfig) -> dict:
    """Parameters of the router, of E experts, and of the shared ones as one feed-forward."""
    sizes = {"F": cfg.experts.d_ff}
    params: dict[str, Any] = {
        "router": weight(cfg, "D", "E"),
        "gate": weight(cfg, "D", "F", batch="E", sizes=sizes),
        "up": weight(cfg, "D", "F", batch="E", sizes=sizes),
        "down": weight(cfg, "F", "D", batch="E", sizes=sizes, residual=True),
    }
    if cfg.experts.selection_bias:
        params["bias"] = Param("E", zeros, decay=False, dtype="float32")
    if cfg.experts.shared:
        shared = _as_mlp(cfg)
        params["shared"] = bound(mlp.spec(shared), shared)
    return params


def _as_mlp(cfg: ModelConfig) -> ModelConfig:
    """The config of the shared experts as one feed-forward."""
    return dataclasses.replace(cfg, d_ff=cfg.experts.shared * cfg.experts.d_ff, experts=Experts())


def apply(
    params: dict, x_BTD: jax.Array, cfg: ModelConfig, *, valid: Any = None, counted: Any = None, training: bool = False
) -> tuple[jax.Array, Sums | None]:
    """[B, T, D] -> [B, T, D], and ``sums`` over the tokens that ``counted`` names (None without it).

    valid [1 or B, T] bool: False for padding, which takes no capacity. counted: bool [1 or B, T], or True for all tokens that
    are no padding. training: whether ``expert_dispatch="capacity"`` lets tokens skip their experts, as it never does otherwise:
    a token's result would depend on the tokens that it is computed with.
    """
    routing = route(params, x_BTD, cfg.experts)
    valid_BT = jnp.broadcast_to(True if valid is None else valid, x_BTD.shape[:2])
    limited = cfg.execution.expert_dispatch == "capacity" and training
    y_BTD, kept_BTJ = dispatch.apply(params, x_BTD, routing.expert, routing.weight, valid_BT, cfg, limited)
    totals = None
    if counted is not None:
        counted_BT = valid_BT if counted is True else jnp.broadcast_to(counted, x_BTD.shape[:2])
        totals = sums(routing, kept_BTJ, counted_BT, cfg.experts)
    if "shared" in params:
        with scope("shared"):
            y_BTD = y_BTD + mlp.apply(params["shared"], x_BTD, _as_mlp(cfg))
    return y_BTD, totals


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


def sums(routing: Routing, kept_BTJ: jax.Array, counted_BT: jax.Array, experts: Experts) -> Sums:
    """Sums over the counted tokens, float32: load [E], choices by expert; probability [E], of the router's whole distribution;
    log_z2, squared logsumexps; tokens; dropped, choices whose expert had no room."""
    scores = jax.nn.softmax(routing.logits)
    if experts.score == "sigmoid":
        scores = jax.nn.sigmoid(routing.logits)
        scores = scores / (scores.sum(-1, keepdims=True) + 1e-20)
    counted = counted_BT.astype(jnp.float32)
    over = functools.partial(jnp.tensordot, counted, axes=2, precision="highest")
    chosen_BTE = (routing.expert[..., None] == jnp.arange(experts.n_experts)).sum(-2).astype(jnp.float32)
    return {
        "load": over(chosen_BTE),
        "probability": over(scores),
        "log_z2": over(jax.nn.logsumexp(routing.logits, axis=-1) ** 2),
        "tokens": counted.sum(),
        "dropped": over((~kept_BTJ).sum(-1).astype(jnp.float32)),
    }
