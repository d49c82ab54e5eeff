"""A feed-forward of experts: each token goes to the few that a router chooses (Shazeer et al. 2017), and to the shared ones.

Tokens are taken together, [T, D] for all rows; M stands for T·J. Two dispatches give the same numbers: dropless, a product of
sorted tokens with the experts' weights that knows where each expert's tokens end; and capacity, fixed rooms, where a token
whose expert is full passes by.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.nn import mlp
from jaxformer.nn.named import multiply, scope
from jaxformer.nn.ragged import ragged_dot
from jaxformer.parts import Experts
from jaxformer.sharding import gathered
from jaxformer.spec import Param, kernel, zeros


class Routing(NamedTuple):
    """Where each token goes."""

    expert: jax.Array
    """int32 [T, J]: experts, the best first."""
    weight: jax.Array
    """float32 [T, J]: what their results are multiplied by."""
    logits: jax.Array
    """float32 [T, E]."""


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
    x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
    routing = route(params, x_TD, cfg.experts)
    valid_T = jnp.ones(len(x_TD), bool) if valid is None else jnp.broadcast_to(valid, x_BTD.shape[:2]).reshape(-1)
    limited = cfg.experts.dispatch == "capacity" and routed is not None and routed.training
    y_TD, kept_TJ = (_capacity if limited else _dropless)(params, x_TD, routing, valid_T, cfg)
    if routed is not None:
        counted_T = valid_T if routed.counted is None else jnp.broadcast_to(routed.counted, x_BTD.shape[:2]).reshape(-1)
        routed.layers.append(sums(routing, kept_TJ, counted_T, cfg.experts))
    y_BTD = y_TD.reshape(x_BTD.shape)
    if "shared" in params:
        own = _wide(cfg, cfg.experts.shared * cfg.experts.d_ff)
        with scope("shared"):
            y_BTD = y_BTD + mlp.apply(params["shared"], x_BTD, own)
    return y_BTD


def route(params: dict, x_TD: jax.Array, experts: Experts) -> Routing:
    """Chooses experts, in float32. Ties go to the lower number (as in ``jax.lax.top_k``)."""
    x, router = x_TD.astype(jnp.float32), params["router"].astype(jnp.float32)
    logits_TE = multiply("TD,DE->TE", x, router, name="router", precision="highest")
    scores_TE = jax.nn.softmax(logits_TE) if experts.score == "softmax" else jax.nn.sigmoid(logits_TE)
    choice_TE = jax.lax.stop_gradient(scores_TE)  # a choice has no gradient; the weights of what is chosen do
    if "bias" in params:
        choice_TE = choice_TE + jax.lax.stop_gradient(params["bias"])
    if experts.groups > 1:
        choice_TE = _best_groups(choice_TE, experts)
    _, expert_TJ = jax.lax.top_k(choice_TE, experts.per_token)
    weight_TJ = jnp.take_along_axis(scores_TE, expert_TJ, axis=-1)
    if experts.normalize:
        weight_TJ = weight_TJ / (weight_TJ.sum(-1, keepdims=True) + 1e-20)  # sigmoids may all be 0
    return Routing(expert_TJ, weight_TJ * experts.scale, logits_TE)


def _best_groups(choice_TE: jax.Array, experts: Experts) -> jax.Array:
    """−inf outside the groups whose two best have the highest sum (DeepSeek-AI 2024, section 2.1.2)."""
    grouped = choice_TE.reshape(len(choice_TE), experts.groups, -1)
    two_best = jax.lax.top_k(grouped, 2)[0].sum(-1)
    _, best = jax.lax.top_k(two_best, experts.groups_per_token)
    inside = (best[..., None] == jnp.arange(experts.groups)).any(1)
    return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(choice_TE.shape)


def _dropless(params, x_TD, routing, valid_T, cfg):
    number, choices = cfg.experts.number, cfg.experts.per_token
    expert_M = routing.expert.reshape(-1)
    order_M = jnp.argsort(expert_M, stable=True)
    sizes_E = jnp.bincount(expert_M, length=number)
    y_MD = _experts(params, x_TD[order_M // choices], functools.partial(ragged_dot, sizes=sizes_E), cfg)
    back_M = jnp.argsort(order_M)
    return _combine(y_MD[back_M], routing.weight, x_TD), jnp.ones(routing.expert.shape, bool)


def _capacity(params, x_TD, routing, valid_T, cfg):
    experts = cfg.experts
    tokens, choices = routing.expert.shape
    room = max(1, -int(-experts.capacity * tokens * choices // experts.number))
    # First choices of all tokens come first, then second ones: who is late is less wanted.
    expert_JT = routing.expert.T
    is_mine = (expert_JT[..., None] == jnp.arange(experts.number)) & valid_T[:, None]
    before = jnp.cumsum(is_mine.reshape(-1, experts.number), axis=0, dtype=jnp.int32).reshape(is_mine.shape) - is_mine
    place_JT = jnp.take_along_axis(before, expert_JT[..., None], axis=-1)[..., 0]
    kept_JT = (place_JT < room) & valid_T
    slot_M = jnp.where(kept_JT, expert_JT * room + place_JT, experts.number * room).reshape(-1)
    token_M = jnp.tile(jnp.arange(tokens), choices)
    rooms = jnp.zeros((experts.number * room, x_TD.shape[-1]), x_TD.dtype).at[slot_M].set(x_TD[token_M], mode="drop")

    def product(x, kernel):
        by_expert = x.reshape(experts.number, room, -1)
        by = lambda rooms, kernel: jnp.einsum("ECD,EDF->ECF", rooms, kernel.astype(x.dtype))
        return multiply("ECD,EDF->ECF", by_expert, kernel, by=by).reshape(-1, kernel.shape[-1])

    y = _experts(params, rooms, product, cfg)
    y_MD = y.at[slot_M].get(mode="fill", fill_value=0)
    y_MD = jnp.swapaxes(y_MD.reshape(choices, tokens, -1), 0, 1).reshape(tokens * choices, -1)
    return _combine(y_MD, routing.weight, x_TD), kept_JT.T


def _experts(params, x_MD, product, cfg):
    """Every row by its own expert; ``product(rows, kernels)`` knows which that is."""
    gate, up, down = (gathered(params[name], dims) for name, dims in (("gate", "EDF"), ("up", "EDF"), ("down", "EFD")))
    return product(mlp.GATES[cfg.mlp](product(x_MD, gate)) * product(x_MD, up), down)


def _combine(y_MD, weight_TJ, x_TD):
    y_TJD = y_MD.reshape(*weight_TJ.shape, -1)
    asked = {"name": "combined", "preferred_element_type": jnp.float32}
    return multiply("TJD,TJ->TD", y_TJD, weight_TJ, **asked).astype(x_TD.dtype)


def sums(routing: Routing, kept_TJ: jax.Array, counted_T: jax.Array, experts: Experts) -> dict[str, jax.Array]:
    """Of the counted tokens, float32: load [E], choices by expert; probability [E], of the router's whole distribution;
    log_z2, squared logsumexps; tokens; dropped, choices whose expert had no room."""
    scores = jax.nn.softmax(routing.logits)
    if experts.score == "sigmoid":
        scores = jax.nn.sigmoid(routing.logits)
        scores = scores / (scores.sum(-1, keepdims=True) + 1e-20)
    counted = counted_T.astype(jnp.float32)
    chosen_TE = (routing.expert[..., None] == jnp.arange(experts.number)).sum(1).astype(jnp.float32)
    return {
        "load": _over(counted, chosen_TE),
        "probability": _over(counted, scores),
        "log_z2": _over(counted, jax.nn.logsumexp(routing.logits, axis=-1) ** 2),
        "tokens": counted.sum(),
        "dropped": _over(counted, (~kept_TJ).sum(-1).astype(jnp.float32)),
    }


def _over(counted_T: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.matmul(counted_T, x, precision="highest")
