"""Who may see whom: a function of order, segments and validity. Masks are booleans, combined as booleans."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class TokenInfo:
    """Where the tokens of a sequence stand. Leading axes of 1 broadcast over the batch.

    order [1 or B, T]: place in the sequence, which causality and windows compare; it grows along the sequence.
    position [1 or B, T]: what the position component encodes (padding does not count; restarts in each packed document).
    segment [B, T] or None: tokens see only their own segment.
    valid [B, T] or None: False for padding, which nobody sees.
    ordered: whether ``order`` is known to be the index, less the padding before it.
    """

    order: Any
    position: Any
    segment: Any = None
    valid: Any = None
    ordered: bool = struct.field(pytree_node=False, default=False)


def arange(length: int) -> TokenInfo:
    """Positions 0 … length − 1, nothing masked."""
    order = jnp.arange(length, dtype=jnp.int32)[None]
    return TokenInfo(order, order, ordered=True)


def visible(query: TokenInfo, key: TokenInfo, *, causal: bool, window: Any = None) -> jax.Array | None:
    """[1 or B, T, S], True where the query may see the key; None where every query sees every key.

    ``window`` W (an integer or None): the W keys up to and including the query's own place; without causality, those
    on either side.
    """
    terms = []
    if causal or window is not None:
        distance = query.order[:, :, None] - key.order[:, None, :]
        if causal:
            terms.append(distance >= 0)
        if window is not None:
            terms.append(jnp.abs(distance) < window)
    if query.segment is not None and key.segment is not None:
        terms.append(query.segment[:, :, None] == key.segment[:, None, :])
    if key.valid is not None:
        terms.append(key.valid[:, None, :])
    if not terms:
        return None
    mask = terms[0]
    for term in terms[1:]:
        mask = mask & term
    return mask
