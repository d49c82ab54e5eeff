"""The library's functions with one mistake each, for ``test_mistakes``. A mutation is a list of (module, name, replacement)."""

import jax
import jax.numpy as jnp

from jaxformer.data import packing
from jaxformer.nn import attend as attend_module
from jaxformer.nn import attention, block, mlp, model, norm, position, rope, stack

_key_value, _dense, _visible, _attend = attention.key_value, attention.dense, attend_module.visible, attend_module.attend
_norm, _position, _mlp, _block, _stack = (module.apply for module in (norm, position, mlp, block, stack))
_rope_angles = rope.angles
_unstack, _embed, _angles, _next_token = stack.unstack, model.embed, position.angles, packing.next_token


# Attention: the formula, with a softmax to choose


def attend_with(softmax, dtype=jnp.float32, finish=lambda out, seen: out):
    def attend(q, k, v, mask, *, scale=None, softcap=None, bias=None, observe=lambda weights: weights, cached=False):
        scores = jnp.einsum("BKGTH,BKSH->BKGTS", q, k, preferred_element_type=dtype or q.dtype) / q.shape[-1] ** 0.5
        seen = jnp.ones(scores.shape[-2:], bool) if mask is None else mask[:, None, None]
        return finish(jnp.einsum("BKGTS,BKSH->BKGTH", observe(softmax(scores, seen).astype(v.dtype)), v), seen)

    return [(attend_module, "attend", attend)]


def masked(scores, seen, axis=-1):
    """Right for all rows: this one is no mistake."""
    top = jnp.where(seen, scores, -jnp.inf).max(axis, keepdims=True)
    exp = jnp.where(seen, jnp.exp(jnp.where(seen, scores - jnp.where(seen.any(axis, keepdims=True), top, 0), 0)), 0)
    total = exp.sum(axis, keepdims=True)
    return exp / jnp.where(total == 0, 1, total)


def over_heads(scores, seen):
    return masked(scores, jnp.broadcast_to(seen, scores.shape), axis=1)


def infinity(scores, seen):
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))


def minimum(scores, seen):
    return jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min))


def zeroed(out, seen):
    return jnp.where(seen.any(-1, keepdims=True), out, 0)


def no_maximum(scores, seen):
    exp = jnp.where(seen, jnp.exp(scores), 0)
    total = exp.sum(-1, keepdims=True)
    return exp / jnp.where(total == 0, 1, total)


def scale_by(width):
    return [(attend_module, "attend", lambda q, *rest, **given: _attend(q * (q.shape[-1] / width) ** 0.5, *rest, **given))]


def _interleaved_groups(q, k, v, *rest, **given):
    """Query head h reads key/value head h % K."""
    b, kv, g, t, h = q.shape
    out = _attend(q.reshape(b, g, kv, t, h).swapaxes(1, 2), k, v, *rest, **given)
    return out.swapaxes(1, 2).reshape(q.shape[:-1] + v.shape[-1:])


def _concatenated(equation, x, weight, bias=None):
    if x.ndim == 5:  # heads, to be mixed: left side by side
        return jnp.moveaxis(x, 3, 1).reshape(x.shape[0], x.shape[3], -1)
    return _dense(equation, x, weight, bias)


def _turned_values(params, x, cfg, info):
    k, v, info = _key_value(params, x, cfg, info)
    return k, _position({}, v, info.position, cfg), info


GROUPS = [(attend_module, "attend", _interleaved_groups)]
CONCAT = [(attention, "dense", _concatenated)]
TURNED_VALUES = [(attention, "key_value", _turned_values)]


# Masks


def see_with(rule):
    """``rule(distance)`` in place of causality; distance is the query's place minus the key's."""

    def visible(query, key, **given):
        seen = _visible(query, key, causal=False, window=given.get("window"))
        distance = query.order[:, :, None] - key.order[:, None, :]
        return rule(distance) if seen is None else seen & rule(distance)

    return [(attend_module, "visible", visible)]


def _one_length(query, key, **given):
    """As if queries and keys were one sequence: query i is key i."""
    return jnp.tril(jnp.ones((1, query.order.shape[1], key.order.shape[1]), bool))


def _seen_padding(query, key, **given):
    return _visible(query, key.replace(valid=None), **given)


ONE_LENGTH = [(attend_module, "visible", _one_length)]
SEEN_PADDING = [(attend_module, "visible", _seen_padding)]


# Residual, layers


def block_with(residual):
    """``residual(x, normed, f)``; the right one is x + f(normed)."""

    def apply(params, x, cfg, *, info=None, position_params=None, **given):
        attend = lambda y: attention.apply(params["attention"], y, cfg, info=info, position_params=position_params)[0]
        x = residual(x, _norm(params["attention_norm"], x, cfg), attend)
        x = residual(x, _norm(params["mlp_norm"], x, cfg), lambda y: _mlp(params["mlp"], y, cfg))
        return block.BlockOutput(x, None, None)

    return [(block, "apply", apply)]


def reused_key_value():
    """The first layer's keys and values for all layers."""
    kept = []

    def apply(*args, **given):
        kept.clear()
        return _stack(*args, **given)

    def key_value(*args):
        kept[:] = kept or [_key_value(*args)]
        return kept[0]

    return [(stack, "apply", apply), (attention, "key_value", key_value)]


REUSED_PARAMETERS = [(stack, "unstack", lambda params, layers, *period: [_unstack(params, layers, *period)[0]] * len(layers))]
NO_FINAL_NORM = [
    (stack, "apply", lambda params, *rest, **given: _stack({k: v for k, v in params.items() if k != "norm"}, *rest, **given))
]


# Norms


def norm_with(statistics_of=lambda x: x, axis=-1, ddof=0, root=lambda variance, eps: jnp.sqrt(variance + eps)):
    def apply(params, x, cfg):
        y = statistics_of(x)
        if cfg.norm == "layer":
            y = y - y.mean(axis, keepdims=True)
        count = y.size // y.mean(axis, keepdims=True).size
        variance = (y * y).sum(axis, keepdims=True) / (count - ddof)
        return (y / root(variance, cfg.norm_eps) * params["gain"] + params.get("bias", 0)).astype(x.dtype)

    return [(norm, "apply", apply)]


# Positions


def _embed_with_positions(params, tokens, cfg, types=None, embeddings=None):
    return _position(params["decoder"].get("position", {}), _embed(params, tokens, cfg), jnp.arange(tokens.shape[1])[None], cfg)


def _block_with_positions(params, x, cfg, *, info, position_params, **given):
    x = _position(position_params, x, info.position, cfg)
    return _block(params, x, cfg, info=info, position_params=position_params, **given)


def _twice(params, x, *rest):
    return _position(params, _position(params, x, *rest), *rest)


def _clamped(params, x, positions, cfg):
    return x + params["table"][jnp.clip(positions, 0, len(params["table"]) - 1)]


IN_THE_EMBEDDING_TOO = [(model, "embed", _embed_with_positions)]
IN_EVERY_BLOCK = [(block, "apply", _block_with_positions)]
TWICE = [(position, "apply", _twice)]
CLAMPED = [(position, "apply", _clamped)]
BFLOAT16_POSITIONS = [
    (position, "angles", lambda p, *rest: _angles(p.astype(jnp.bfloat16), *rest)),
    (rope, "angles", lambda p, *rest: _rope_angles(p.astype(jnp.bfloat16), *rest)),
]


# Feed-forward, targets


MIXED_POSITIONS = [(mlp, "apply", lambda params, x, cfg: _mlp(params, (x + x.mean(1, keepdims=True)) / 2, cfg))]
AFFINE = [
    (mlp, "apply", lambda params, x, cfg: mlp.choice(lambda hidden: hidden, gated=False).apply(params, x, cfg)),
]
CURRENT_TOKEN = [(packing, "next_token", lambda ids, valid: _next_token(ids, valid) | {"targets": ids[:, :-1]})]
