"""Float32 training of parameters that are stored in less (Micikevicius et al. 2018): the optimizer's state holds a float32 copy
of them, and they are its rounding."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = Any


class Following(optax.GradientTransformation):
    """A gradient transformation whose state holds values of the parameters: ``follow(state, before, after)`` is the state for
    parameters that an objective's ``after_update`` has changed from what the update made, ``before``, to ``after``."""

    follow: Callable[[Any, Tree, Tree], Any]


def following(transform: optax.GradientTransformation, follow: Callable[[Any, Tree, Tree], Any]) -> Following:
    """``transform`` with that function."""
    result = Following(transform.init, transform.update)
    result.follow = follow
    return result


def follower(transform: optax.GradientTransformation) -> Callable[[Any, Tree, Tree], Any]:
    """The ``follow`` of a transformation; for one without, a function that leaves the state as it is."""
    return getattr(transform, "follow", lambda state, before, after: state)


class MasterState(NamedTuple):
    """The state of ``with_master``."""

    master: Tree
    """float32 copies of the parameters below float32; ``optax.MaskedNode()`` in the place of the others."""
    inner: Any
    """The state of the optimizer of the float32 parameters."""


def with_master(inner: optax.GradientTransformation) -> Following:
    """``inner`` in float32: its moments, and the parameters and gradients that it is given. Its updates move the master copies,
    and ``optax.apply_updates`` of what comes out makes parameters that are exactly their rounding.

    An update is float32, the difference u of the new master copy and the parameter p. p + u in float32 may differ from the new
    copy by float32's rounding, where p has moved by more than its own half: what is kept is p + u, which rounds to the
    parameter that ``optax.apply_updates`` makes, for every value.
    """

    def init(params):
        master = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32) if _is_low(p) else optax.MaskedNode(), params)
        return MasterState(master, inner.init(_float32(master, params)))

    def update(updates, state, params):
        before = _float32(state.master, params)
        grads = jax.tree.map(lambda g, p: g.astype(jnp.float32) if _is_low(p) else g, updates, params)
        updates, inner_state = inner.update(grads, state.inner, before)

        def difference(p, x, u):
            return (x + u.astype(x.dtype)) - p.astype(x.dtype) if _is_low(p) else u

        updates = jax.tree.map(difference, params, before, updates)
        kept = lambda p, u: p.astype(jnp.float32) + u if _is_low(p) else optax.MaskedNode()
        return updates, MasterState(jax.tree.map(kept, params, updates), inner_state)

    def follow(state, before, after):
        changed = lambda p, q, x: jnp.where(p == q, x, q.astype(jnp.float32)) if _is_low(p) else x
        return MasterState(jax.tree.map(changed, before, after, state.master), follower(inner)(state.inner, before, after))

    return following(optax.GradientTransformation(init, update), follow)


def keeps_master(opt_state: Any) -> bool:
    """Whether an optimizer's state has float32 copies of parameters."""
    is_master = lambda state: isinstance(state, MasterState)
    return any(map(is_master, jax.tree.leaves(opt_state, is_leaf=is_master)))


def _is_low(param: jax.Array) -> bool:
    return jnp.dtype(param.dtype).itemsize < 4


def _float32(master: Tree, params: Tree) -> Tree:
    """The parameters, those that have a master copy by that."""
    return jax.tree.map(lambda p, x: x if _is_low(p) else p, params, master)
