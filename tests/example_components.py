"""Components from outside the library, written as a user would write them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

import jaxformer as jf
from jaxformer.config.components import Component
from jaxformer.nn.dense import dense

# A feed-forward: this module is itself a component, and so are an object and a class of the same two functions.


def spec(cfg):
    return {"up": jf.weight(cfg, "D", "F"), "down": jf.weight(cfg, "F", "D", residual=True)}


def apply(params, x_BTD, cfg):
    """Squared ReLU (So et al. 2021)."""
    hidden_BTF = jnp.square(jax.nn.relu(dense("BTD,DF->BTF", x_BTD, params["up"])))
    return dense("BTF,FD->BTD", jf.named(hidden_BTF, "hidden", "BTF", cfg), params["down"])


squared_relu = Component(spec, apply)


class SquaredRelu:
    spec = staticmethod(spec)
    apply = staticmethod(apply)


tanh_mlp = jf.mlp.choice(jnp.tanh, gated=False)
"""Made by the library's own helper."""


def slopes(heads: int) -> list[float]:
    """One slope a head (Press et al. 2022, and their code for a number of heads that is no power of two)."""
    power = 2 ** (heads.bit_length() - 1)
    own = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return own if power == heads else own + slopes(2 * power)[::2][: heads - power]


class Alibi:
    """Attention with linear biases: a score falls with the distance, at each head's own slope."""

    site = "scores"

    @staticmethod
    def spec(cfg):
        return {}

    @staticmethod
    def apply(params, positions, cfg):
        query_BT, key_BS = positions
        distance_BTS = jnp.abs(query_BT[:, :, None] - key_BS[:, None, :])
        slopes_KG = jnp.array(slopes(cfg.n_heads)).reshape(cfg.n_kv_heads, -1)
        return -slopes_KG[:, :, None, None] * distance_BTS[:, None, None]


alibi = Component(Alibi.spec, Alibi.apply, site="scores")


class TableBias:
    """A bias for every head, whatever the positions."""

    site = "scores"

    @staticmethod
    def spec(cfg):
        return {"bias": jf.bias("KG")}

    @staticmethod
    def apply(params, positions, cfg):
        return params["bias"][:, :, None, None]


class ScaleNorm:
    """One gain over the whole length of the vector (Nguyen & Salazar 2019)."""

    @staticmethod
    def spec(cfg, dim="D"):
        return {"gain": jf.gain("")}

    @staticmethod
    def apply(params, x, cfg):
        return params["gain"] * x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + cfg.norm_eps)


class PlainNorm:
    """RMSNorm that has no parameters at all."""

    @staticmethod
    def spec(cfg, dim="D"):
        return {}

    @staticmethod
    def apply(params, x, cfg):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + cfg.norm_eps)


class MeanAttention:
    """Attention without queries: every position reads the mean of the values it may see, and keeps only those."""

    @staticmethod
    def cache(cfg):
        return {"value": jf.Param("BKSH", jf.spec.zeros)}

    @staticmethod
    def spec(cfg):
        return {"value": jf.weight(cfg, "D", "KH"), "out": jf.weight(cfg, "KH", "D", residual=True)}

    @staticmethod
    def apply(params, x_BTD, cfg, *, info=None, position_params=None, cross_attention_kv=None, cache=None, rng=None):
        info = jf.mask.arange(x_BTD.shape[1]) if info is None else info
        v_BKSH = dense("BSD,DKH->BKSH", x_BTD, params["value"])
        v_BKSH, key_info = (v_BKSH, info) if cross_attention_kv is None else cross_attention_kv[1:]
        if cache is not None:
            kept, key_info, cache = cache.extend({"value": v_BKSH})
            v_BKSH = kept["value"]
        mask_BTS = jf.mask.visible(info, key_info, causal=cfg.causal, window=cfg.window).astype(v_BKSH.dtype)
        weights_BTS = mask_BTS / jnp.maximum(mask_BTS.sum(-1, keepdims=True), 1)
        mixed_BKTH = jnp.einsum("BTS,BKSH->BKTH", jnp.broadcast_to(weights_BTS, (len(x_BTD), *mask_BTS.shape[1:])), v_BKSH)
        return dense("BKTH,KHD->BTD", mixed_BKTH, params["out"]), cache


@dataclass(frozen=True)
class NarrowMlp:
    """A feed-forward through a width of its own, with hyperparameters."""

    width: int = 6
    """[U] hidden width."""
    temperature: float = 1.0
    """Divides what the tanh is taken of."""
    powers: tuple[tuple[int, ...], ...] = ((1,),)
    """Powers of the hidden values, of which the sums are multiplied."""

    def letters(self, cfg):
        return {"U": self.width}

    def spec(self, cfg):
        return {"up": jf.weight(cfg, "D", "U"), "down": jf.weight(cfg, "U", "D", residual=True)}

    def apply(self, params, x_BTD, cfg):
        hidden_BTU = jnp.tanh(dense("BTD,DU->BTU", x_BTD, params["up"]) / self.temperature)
        powered_BTU = jnp.ones_like(hidden_BTU)
        for powers in self.powers:
            powered_BTU = powered_BTU * sum(hidden_BTU**power for power in powers)
        return dense("BTU,UD->BTD", jf.named(powered_BTU, "hidden", "BTU", cfg), params["down"])


@dataclass(frozen=True)
class MovingAverage:
    """Attention without queries and keys: a moving average of the values, which is all that its cache keeps."""

    decay: float
    """How much of the average a token leaves."""

    def spec(self, cfg):
        return {"value": jf.weight(cfg, "D", "KH"), "out": jf.weight(cfg, "KH", "D", residual=True)}

    def cache(self, cfg):
        return {"average": jf.Param("BKH", jf.spec.zeros, dtype="float32")}

    def apply(self, params, x_BTD, cfg, *, info=None, position_params=None, cross_attention_kv=None, cache=None, rng=None):
        v_TBKH = jnp.moveaxis(dense("BTD,DKH->BTKH", x_BTD, params["value"]), 1, 0).astype(jnp.float32)
        valid_BT = jnp.broadcast_to(True if info is None or info.valid is None else info.valid, x_BTD.shape[:2])

        def step(average_BKH, token):
            v_BKH, valid_B = token
            new_BKH = self.decay * average_BKH + (1 - self.decay) * v_BKH
            average_BKH = jnp.where(valid_B[:, None, None], new_BKH, average_BKH)
            return average_BKH, average_BKH

        start_BKH = jnp.zeros(v_TBKH.shape[1:]) if cache is None else cache.entries["average"]
        last_BKH, averages_TBKH = jax.lax.scan(step, start_BKH, (v_TBKH, valid_BT.T))
        cache = None if cache is None else cache.put({"average": last_BKH})
        return dense("BTKH,KHD->BTD", jnp.moveaxis(averages_TBKH, 0, 1).astype(x_BTD.dtype), params["out"]), cache
