"""Checks that reject an invalid ModelConfig when it is made."""

import math
import re
from typing import Any

from jaxformer.config.components import BUILT_IN, has_fields
from jaxformer.config.strict import within

BY_LAYER = ("attention", "mlp", "position", "residual", "window")
"""Fields that may be a tuple with one value per layer."""
MOST_LAYERS = 1024
"""A config with more blocks is a mistake, or was made to take up memory: each has a config of its own."""
KEY = frozenset("BTSDLVKGNHFPEJMCRQO")
"""The letters of the dimension key; components may declare others."""


def check(cfg: Any) -> None:
    """Raises ValueError, naming the field, for a ModelConfig that fits no model."""
    within(cfg, 1, 2**31, "n_kv_heads", "head_dim", "d_ff", "encoder_heads", "encoder_d_ff")
    within(cfg, 0, 2**31, "token_types", "position_offset")
    within(cfg, 0, MOST_LAYERS + 1, "encoder_layers")
    positive = ["norm_eps", "rope_theta", "rope_local_theta", "init_std", "attention_scale", "attention_softcap"]
    within(cfg, 0, math.inf, *positive, "logit_softcap", open_low=True)
    within(cfg, 2, 2**31, "relative_buckets", "relative_distance")
    within(cfg, 0, cfg.vocab_size, "start_token")
    if cfg.n_heads % cfg.n_kv_heads:
        raise ValueError(f"n_heads={cfg.n_heads} is not divisible by n_kv_heads={cfg.n_kv_heads}")
    for name in BY_LAYER:
        value = getattr(cfg, name)
        if type(value) is tuple and len(value) != cfg.n_layers:
            raise ValueError(f"{name} has {len(value)} entries, but n_layers={cfg.n_layers}: give one entry per layer")
    for width in cfg.window if isinstance(cfg.window, tuple) else (cfg.window,):
        if width is not None and width < 1:
            raise ValueError(f"window={width} must be at least 1, because a query always sees its own key")
    if not 0 < cfg.rope_fraction <= 1:
        raise ValueError(f"rope_fraction={cfg.rope_fraction} must be above 0 and at most 1")
    if cfg.position == "rope" and (cfg.rotary_dim % 2 or not cfg.rotary_dim):
        share = f"rope_fraction={cfg.rope_fraction} of " if cfg.rope_fraction < 1 else ""
        raise ValueError(f"{share}head_dim={cfg.head_dim} is odd, but RoPE rotates pairs of dimensions; choose an even size")
    if cfg.head_transform and cfg.mlp not in ("relu", "silu", "gelu", "gelu_tanh"):
        raise ValueError(
            f"head_transform uses the activation of mlp, which must be relu, silu, gelu or gelu_tanh, not {cfg.mlp!r}"
        )
    if cfg.position in ("sinusoidal", "sinusoidal_half") and cfg.d_model % 2:
        raise ValueError(
            f"d_model={cfg.d_model} is odd, but sinusoidal positions are pairs of sine and cosine; choose an even size"
        )
    if cfg.position == "rope" and cfg.rope_scaling.kind == "dynamic" and cfg.rotary_dim < 4:
        raise ValueError(f"head_dim={cfg.head_dim} is too small: dynamic rope_scaling needs at least two rotated pairs")
    if "rope" not in cfg.positions and cfg.rope_scaling.kind != "none":
        raise ValueError(f"rope_scaling of kind {cfg.rope_scaling.kind!r} has no effect with position={cfg.position!r}")
    if "relative" in cfg.positions:
        _check_relative(cfg)
    if cfg.execution.balance_rate and cfg.experts.n_experts and not cfg.experts.selection_bias:
        raise ValueError("balance_rate adjusts the selection bias of experts, so it needs experts.selection_bias=True")
    cfg.experts.check(cfg)
    cfg.latent.check(cfg)
    _check_letters(cfg)
    _check_by_layer(cfg)
    _check_encoder(cfg)


def _check_letters(cfg):
    declared: dict[str, tuple[str, int]] = {}
    for kind in BUILT_IN:
        for letter, size in letters(getattr(cfg, kind), cfg).items():
            if not (isinstance(letter, str) and len(letter) == 1 and letter.isascii() and letter.isupper()):
                raise ValueError(f"{kind} declares the dimension {letter!r}; it must be one letter from A to Z")
            if letter in KEY:
                raise ValueError(f"{kind} declares {letter!r}, a letter of the dimension key; choose one that is free")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{kind} declares {letter!r} with size {size!r}, which must be an integer of at least 1")
            other, known = declared.setdefault(letter, (kind, size))
            if known != size:
                raise ValueError(
                    f"{kind} declares {letter!r} with size {size}, but {other} with size {known}; rename one of them"
                )


def _check_by_layer(cfg):
    chosen = [name for name in BY_LAYER if type(getattr(cfg, name)) is tuple and name != "window"]
    if chosen and cfg.encoder_layers:
        raise ValueError(f"{chosen[0]} cannot be chosen by layer in an encoder–decoder (encoder_layers above 0)")
    if chosen:
        _ = cfg.layers  # each is checked as a config of its own


def _check_relative(cfg):
    both_ways = bool(cfg.encoder_layers) or not cfg.causal
    exact = cfg.relative_buckets // (4 if both_ways else 2)
    if exact < 1:
        raise ValueError(f"relative_buckets={cfg.relative_buckets} must be at least {4 if both_ways else 2} for this model")
    if cfg.relative_distance <= cfg.relative_buckets // 2:
        half = f"half of relative_buckets={cfg.relative_buckets}"
        raise ValueError(f"relative_distance={cfg.relative_distance} must be more than {half}")


def _check_encoder(cfg):
    fits = cfg.causal and cfg.has_head and not cfg.token_types and cfg.positions <= {"rope", "none"}
    if cfg.mtp and (cfg.encoder_layers or not fits):
        raise ValueError(
            "mtp=True needs a decoder-only causal model with a head, no token types, and position='rope' or 'none'"
        )
    if cfg.encoder_layers and cfg.residual == "parallel":
        raise ValueError("residual='parallel' is not defined for a decoder with cross-attention (encoder_layers above 0)")
    if cfg.encoder_layers:
        try:
            _ = cfg.encoder
        except ValueError as error:  # its n_heads is our encoder_heads
            raise ValueError("the encoder: " + re.sub(r"\bn_heads=", "encoder_heads=", str(error))) from error
    elif cfg.encoder_heads is not None or cfg.encoder_d_ff is not None:
        raise ValueError(
            "encoder_heads and encoder_d_ff have no effect without an encoder; set encoder_layers, or leave them out"
        )


def letters(component: Any, cfg: Any) -> dict[str, int]:
    """The dimensions that a component declares in addition to the key's: ``component.letters(cfg)``, sizes by letter."""
    return component.letters(cfg) if has_fields(component) and hasattr(component, "letters") else {}
