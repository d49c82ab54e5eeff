"""mu-P, the maximal update parametrisation (Yang et al. 2022, table 3, for Adam): learning rates and initial values with which
what is best at one width is best at any.

A letter of the dimension key grows with the width of a model, or is finite. With a base width W and a width D, of a weight:

    inputs  outputs     learning rate  initial values
    grow    grow        W / D          1 / sqrt(inputs)
    grow    are finite  W / D          1 / sqrt(inputs), times sqrt(W / D): the head, the routers of experts
    finite  grow        1              1 / sqrt(inputs)

Every other tensor (embeddings, tables of positions, gains, biases) has a rate of 1 and initial values that do not depend on the
width. At D = W nothing changes.
"""

from typing import Any

import jax

from jaxformer.config import ModelConfig
from jaxformer.config.spec import Param, walk
from jaxformer.nn import model
from jaxformer.training.matrices import over

Tree = Any
GROWING = frozenset("DOFKGH")
"""Letters that grow with the width: that of the residual stream, of the feed-forward, of all heads together."""
FINITE = frozenset("VE")
UNFIT = {
    "tied_head": "an embedding and a head have different rates",
    "scale_embedding": "its embeddings shrink with the width, and are multiplied by it",
    "scale_head": "it divides what the head reads by a power of the width that is not mu-P's",
}
"""Fields of a config, and why mu-P is not for models that have them."""


def rates(cfg: ModelConfig, base: int) -> Tree:
    """What each parameter's learning rate is multiplied by. Raises ValueError for a model that mu-P is not defined for here."""
    check(cfg, base)
    return over(lambda param: base / cfg.d_model if _grows(param.inputs) else 1.0, model.spec(cfg))


def initial(params: dict, cfg: ModelConfig, base: int) -> dict:
    """What ``jf.init`` gave, with the initial values of mu-P. Raises ValueError as ``rates`` does."""
    check(cfg, base)

    def scaled(param: Param, x: jax.Array) -> jax.Array:
        is_output = _grows(param.inputs) and not _grows(param.outputs)
        return (x * (base / cfg.d_model) ** 0.5).astype(x.dtype) if is_output else x

    return over(scaled, model.spec(cfg), params)


def check(cfg: ModelConfig, base: int) -> None:
    """Raises ValueError for what would not carry over from one width to another."""
    for name, why in UNFIT.items():
        if getattr(cfg, name):
            raise ValueError(f"optim.mup_base does not support a model with {name}: {why}")
    if cfg.init != "fan_in":
        raise ValueError(f"optim.mup_base needs init='fan_in', whose initial values shrink with the width, not {cfg.init!r}")
    if cfg.attention_scale is None and cfg.n_heads * base % cfg.d_model:
        heads = f"{cfg.n_heads} heads of d_model={cfg.d_model} are {cfg.n_heads * base / cfg.d_model:g} of {base}"
        raise ValueError(f"optim.mup_base={base}: {heads}; widths have heads of one width, or attention_scale is given")
    for path, param in walk(model.spec(cfg)):
        for letter in param.inputs + param.outputs:
            if letter not in GROWING | FINITE:
                raise ValueError(
                    f"optim.mup_base: whether {letter!r} of {path} [{param.dims}] grows with the width is not known"
                )


def _grows(letters: str) -> bool:
    return not GROWING.isdisjoint(letters)
