"""Normalisation over the features of one token: LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019).

Statistics are float32 whatever the input; the result has the input's dtype. No statistic crosses tokens or rows.
"""

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.config.components import Component, resolve
from jaxformer.config.spec import Param, bias, gain, zeros


def spec(cfg: ModelConfig, dim: str = "D") -> dict:
    """Parameters of ``cfg.norm`` over an axis of letter ``dim``."""
    return resolve("norm", cfg.norm, CHOICES).spec(cfg, dim)


def apply(params: dict, x: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Normalises the last axis of ``x`` [..., D]."""
    return resolve("norm", cfg.norm, CHOICES).apply(params, x, cfg)


def _layer_spec(cfg, dim="D"):
    return {"gain": gain(dim), "bias": bias(dim)}


def _layer_apply(params, x, cfg):
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + cfg.norm_eps) * params["gain"].astype(jnp.float32)
    return (y + params["bias"].astype(jnp.float32)).astype(x.dtype)


def _rms_spec(cfg, dim="D"):
    return {"gain": gain(dim)}


def _rms(x, cfg):
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + cfg.norm_eps)


def _rms_apply(params, x, cfg):
    return _rms(x, cfg).astype(x.dtype) * params["gain"].astype(x.dtype)  # after the cast, as LLaMA does


def _rms_plus_spec(cfg, dim="D"):
    return {"gain": Param(dim, zeros, decay=False)}


def _rms_plus_apply(params, x, cfg):
    return (_rms(x, cfg) * (1.0 + params["gain"].astype(jnp.float32))).astype(x.dtype)  # before the cast, as Gemma does


CHOICES = {
    "layer": Component(_layer_spec, _layer_apply),
    "rms": Component(_rms_spec, _rms_apply),
    "rms_plus": Component(_rms_plus_spec, _rms_plus_apply),
}
