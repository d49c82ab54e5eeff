"""The forward of every transformer: embed, encode where there is an encoder, decode, head. Training, prefill and decoding
steps all go through here."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxformer import spec as specs
from jaxformer.component import nearest
from jaxformer.config import ModelConfig
from jaxformer.nn import block, inputs, mlp, mtp, norm, stack
from jaxformer.nn.dense import child, dense
from jaxformer.nn.mask import Places
from jaxformer.nn.moe import Routed
from jaxformer.nn.named import labels, multiply, named, scope
from jaxformer.sharding import gathered
from jaxformer.spec import Param, bias, kernel, normal


@functools.cache
def spec(cfg: ModelConfig) -> dict:
    """Every parameter of the model, as a tree of ``Param``, layers stacked."""
    std = cfg.d_model**-0.5 if cfg.scale_embedding else cfg.init_std
    parts: dict = {"embedding": {"token": Param("VD", normal(std))}}
    if cfg.token_types:
        parts["embedding"]["type"] = Param("PD", normal(std), sizes=(("P", cfg.token_types),))
    if cfg.encoder_layers:
        parts["encoder"] = specs.bound(stack.spec(cfg.encoder), cfg.encoder)
    parts["decoder"] = stack.spec(cfg, crossing=cfg.encoder_layers > 0)
    if cfg.pooler:
        parts["pooler"] = _square(cfg)
    if cfg.mtp:
        parts["mtp"] = mtp.spec(cfg)
    return parts | ({"head": head} if (head := _head_spec(cfg)) else {})


def _head_spec(cfg: ModelConfig) -> dict:
    if not cfg.has_head:
        return {}
    head: dict = {} if cfg.tied_head else {"kernel": kernel(cfg, "D", "V")}
    if cfg.head_bias:
        head["bias"] = bias("V")
    if cfg.head_transform:
        head["transform"] = _square(cfg) | {"norm": norm.spec(cfg)}
    return head


def _square(cfg: ModelConfig) -> dict:
    """A map from D to D; the letter F stands for the result."""
    sizes = (("F", cfg.d_model),)
    own = dataclasses.replace(cfg, d_ff=cfg.d_model)
    return {
        "kernel": dataclasses.replace(kernel(own, "D", "F"), sizes=sizes),
        "bias": dataclasses.replace(bias("F"), sizes=sizes),
    }


def unstack(params: dict, cfg: ModelConfig) -> dict:
    """The same parameters with one tree a layer, under "0", "1", … Every function here takes them too; optimizers, checkpoints
    and files take stacked ones. Decoding reads each layer's weights from memory of their own, and ``generate`` would have to
    copy stacked ones at every call."""

    def apart(part, own):
        if stack.is_unstacked(part["layers"]):
            return part
        return part | {"layers": {str(i): layer for i, layer in enumerate(stack.unstack(part["layers"], own.layers))}}

    stacks = {"decoder": cfg} | ({"encoder": cfg.encoder} if cfg.encoder_layers else {})
    return params | {name: apart(params[name], own) for name, own in stacks.items()}


def init(cfg: ModelConfig, key: jax.Array) -> dict:
    """Initial parameters: a nested dict of arrays in ``cfg.param_dtype``."""
    return _init(cfg, key)


@functools.partial(jax.jit, static_argnums=0)
def _init(cfg, key):
    return specs.init(spec(cfg), cfg, key)


def forward(params: dict, tokens, cfg: ModelConfig, *, cache=None, **given):
    """Next-token logits [B, T, V], float32. Keywords as ``hidden``'s; with a cache, the pair (logits, cache)."""
    _require_head(cfg)
    out = hidden(params, tokens, cfg, cache=cache, **given)
    if cache is None:
        return head(params, out, cfg)
    hidden_BTD, cache = out
    return head(params, hidden_BTD, cfg), cache


def hidden(
    params: dict,
    tokens,
    cfg: ModelConfig,
    *,
    positions=None,
    segments=None,
    valid=None,
    source=None,
    source_valid=None,
    token_types=None,
    key: jax.Array | None = None,
    cache=None,
    routed: Routed | None = None,
):
    """What the head reads, [B, T, D]: after the final norm. With a cache (``jf.init_cache``), the pair (hidden, cache).

    tokens [B, T] integers. positions [B, T]: where each stands (counted from the other arguments unless given). segments
    [B, T]: packed documents, each sees only itself. valid [B, T] bool: False for padding, left or right. source [B, S] and
    source_valid [B, S]: what an encoder–decoder reads. token_types [B, T]: kinds of tokens, for a model that tells them
    apart (0 unless given). key: turns dropout on. routed: a ``Routed``, which is told what the layers of experts did.

    Raises ValueError for ids outside the vocabulary, positions outside a learned table, shapes that do not fit, parameters
    that are not the config's. Inside ``jit``, where values are not known, such an id or position makes its whole row NaN.
    """
    check(params, cfg)
    tokens = inputs.tokens("tokens", tokens, cfg)
    with _precision(cfg), _saves(cfg):
        memory = None
        if source is not None or source_valid is not None or (cfg.encoder_layers and cache is None):
            memory = _encode(params, source, source_valid, len(tokens), cfg, key)
        if cache is None:
            places = inputs.places("", tokens.shape, cfg, positions, segments, valid)
        elif segments is not None:
            raise ValueError("segments cannot be combined with a cache: decode each document by itself")
        else:
            places, cache = cache.advance(tokens.shape, cfg, positions, valid)
        x_BTD = embed(params, tokens, cfg, inputs.token_types(token_types, tokens.shape, cfg))
        with scope("decoder"):
            given = {"places": places, "memory": memory, "cache": cache, "key": child(key, "decoder"), "routed": routed}
            return stack.apply(params["decoder"], x_BTD, cfg, **given)


def after_next(
    params: dict,
    hidden_BTD: jax.Array,
    tokens,
    cfg: ModelConfig,
    *,
    positions=None,
    segments=None,
    valid=None,
    key: jax.Array | None = None,
    cache=None,
    routed: Routed | None = None,
):
    """What the head reads to predict the token after the next, [B, T, D] (``mtp``), of what it read to predict the next,
    ``hidden``, and of the next tokens [B, T] themselves. Keywords and errors as ``hidden``'s, for the tokens before them; the
    cache is of ``mtp.config(cfg)``, and with one the result is a pair."""
    if not cfg.mtp:
        raise ValueError("the model has no block for the token after the next (mtp=False)")
    check(params, cfg)
    tokens = inputs.tokens("tokens", tokens, cfg)
    if hidden_BTD.shape != (*tokens.shape, cfg.d_model):
        raise ValueError(
            f"hidden has shape {hidden_BTD.shape}; for tokens {tokens.shape} it must be {(*tokens.shape, cfg.d_model)}"
        )
    with _precision(cfg), scope("mtp"):
        token_BTD = embed(params, tokens, cfg)
        if cache is None:
            places = inputs.places("", tokens.shape, cfg, positions, segments, valid)
            return mtp.apply(params["mtp"], token_BTD, hidden_BTD, cfg, places=places, key=key, routed=routed)
        own = mtp.config(cfg)
        places, cache = cache.advance(tokens.shape, own, positions, valid)
        writer = cache.writer(0, own, places)
        x_BTD = mtp.apply(params["mtp"], token_BTD, hidden_BTD, cfg, places=places, extend=writer.extend, routed=routed)
        return cache.guard(x_BTD), cache.replace(layers=(writer.entry,))


def embed(params: dict, tokens: jax.Array, cfg: ModelConfig, types: jax.Array | None = None) -> jax.Array:
    """Rows of the embedding table, times sqrt(D) if the config says so, plus those of their types: [B, T, D] in the compute
    dtype."""

    def rows(name, ids):
        table = gathered(jnp.asarray(params["embedding"][name], cfg.dtype), "VD" if name == "token" else "PD")
        return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)

    x_BTD = rows("token", tokens)
    if cfg.scale_embedding:
        x_BTD = x_BTD * jnp.asarray(cfg.d_model**0.5, x_BTD.dtype)
    if types is not None:
        x_BTD = x_BTD + rows("type", types)
    return named(x_BTD, "embedding", "BTD", cfg)


def head(params: dict, x_BTD: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Logits [B, T, V] in float32, soft-capped if the config says so."""
    _require_head(cfg)
    if cfg.scale_head:
        x_BTD = x_BTD * jnp.asarray(cfg.d_model**-0.5, x_BTD.dtype)
    with _precision(cfg):
        if cfg.head_transform:
            x_BTD = _transformed(params["head"]["transform"], x_BTD, cfg)
        if cfg.tied_head:
            kernel_VD = gathered(params["embedding"]["token"].astype(x_BTD.dtype), "VD")
            logits = multiply("BTD,VD->BTV", x_BTD, kernel_VD, name="head", preferred_element_type=jnp.float32)
        else:
            kernel_DV = gathered(params["head"]["kernel"].astype(x_BTD.dtype), "DV")
            logits = multiply("BTD,DV->BTV", x_BTD, kernel_DV, name="head", preferred_element_type=jnp.float32)
    if cfg.head_bias:
        logits = logits + params["head"]["bias"].astype(jnp.float32)
    if cfg.logit_softcap is not None:
        logits = cfg.logit_softcap * jnp.tanh(logits / cfg.logit_softcap)
    return named(logits, "logits", "BTV", cfg)


def _require_head(cfg: ModelConfig) -> None:
    if not cfg.has_head:
        raise ValueError("the model has no head (has_head=False), and so no logits: use hidden")


def _transformed(params: dict, x_BTD: jax.Array, cfg: ModelConfig) -> jax.Array:
    y_BTF = mlp.ACTIVATIONS[cfg.mlp](dense("BTD,DF->BTF", x_BTD, params["kernel"], params["bias"]))
    return norm.apply(params["norm"], y_BTF, cfg)


def pooled(params: dict, x_BTD: jax.Array, cfg: ModelConfig) -> jax.Array:
    """What a model with a ``pooler`` makes of its hidden states: tanh of a linear map of the first token's, [B, D]."""
    if not cfg.pooler:
        raise ValueError("the model has no pooler (pooler=False)")
    with _precision(cfg):
        return jnp.tanh(dense("BTD,DF->BTF", x_BTD[:, :1], params["pooler"]["kernel"], params["pooler"]["bias"]))[:, 0]


def _encode(params, source, source_valid, rows, cfg, key) -> tuple[jax.Array, Places]:
    """The encoder's output [B, S, D] and where it stands."""
    source, places = inputs.source(source, source_valid, rows, cfg)
    with scope("encoder"):
        x_BSD = embed(params, source, cfg)
        x_BSD = stack.apply(params["encoder"], x_BSD, cfg.encoder, places=places, key=child(key, "encoder"))
    return x_BSD, places


def check(params: dict, cfg: ModelConfig) -> None:
    """Raises ValueError with a tree diff where ``params``, stacked or not, are not those of the config."""
    decoder = params.get("decoder") if isinstance(params, dict) else None
    unstacked = isinstance(decoder, dict) and isinstance(decoder.get("layers"), dict) and stack.is_unstacked(decoder["layers"])
    specs.check(params, _unstacked_spec(cfg) if unstacked else spec(cfg), cfg)


@functools.cache
def _unstacked_spec(cfg: ModelConfig) -> dict:
    stacks = {"decoder": (cfg, cfg.encoder_layers > 0)} | ({"encoder": (cfg.encoder, False)} if cfg.encoder_layers else {})
    parts = dict(spec(cfg))
    for name, (own, crossing) in stacks.items():
        layers = {str(i): specs.bound(block.spec(layer, crossing), own) for i, layer in enumerate(own.layers)}
        parts[name] = parts[name] | {"layers": layers}
    return parts


@contextlib.contextmanager
def _saves(cfg: ModelConfig) -> Iterator[None]:
    """Raises ValueError at the end if ``cfg.save`` names what no layer has given."""
    with labels() as given:
        yield
    for name in cfg.save:
        if name not in given:
            raise ValueError(f"save={name!r} names no activation of a layer{nearest(name, given)}")


def _precision(cfg: ModelConfig):
    # A float32 model means float32 products: TPUs and GPUs would otherwise use bfloat16 or TF32 passes without saying so.
    return jax.default_matmul_precision("highest" if cfg.dtype == "float32" else "default")
