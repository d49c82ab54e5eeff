"""The forward of every transformer: embed, encode where there is an encoder, decode, head. Training, prefill and decoding
steps all go through here."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.config.components import nearest
from jaxformer.config.spec import Param, normal
from jaxformer.nn import block, cache_spec, inputs, mtp, stack
from jaxformer.nn.cache import Cache
from jaxformer.nn.dense import child, precision
from jaxformer.nn.embedding import embed, head, head_spec, require_config, require_head, square
from jaxformer.nn.embedding import pooled as pooled
from jaxformer.nn.mask import TokenInfo
from jaxformer.nn.mistakes import answers_mistakes
from jaxformer.nn.named import labels, scope
from jaxformer.parallel.sharding import platform


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
        parts["pooler"] = square(cfg)
    if cfg.mtp:
        parts["mtp"] = mtp.spec(cfg)
    return parts | ({"head": head_parts} if (head_parts := head_spec(cfg)) else {})


def unstack(params: dict, cfg: ModelConfig) -> dict:
    """The same parameters with one tree per layer, under "0", "1", … All functions take them too; optimizers, checkpoints
    and files take stacked ones. Decoding reads each layer's weights from memory of their own, and ``generate`` would have to
    copy stacked ones at every call."""

    def apart(tree, stack_cfg):
        if stack.is_unstacked(tree["layers"]):
            return tree
        layers = stack.unstack(tree["layers"], stack_cfg.layers)
        return tree | {"layers": {str(i): layer for i, layer in enumerate(layers)}}

    stacks = {"decoder": cfg} | ({"encoder": cfg.encoder} if cfg.encoder_layers else {})
    return params | {name: apart(params[name], stack_cfg) for name, stack_cfg in stacks.items()}


@answers_mistakes
def init(cfg: ModelConfig, key: jax.Array) -> dict:
    """Initial parameters: a nested dict of arrays in ``cfg.param_dtype``."""
    is_traced = isinstance(jnp.zeros(()), jax.core.Tracer)  # as everything inside a program that is being compiled
    return (_init if is_traced or platform() != "cpu" else _init_on_cpu)(cfg, key)


@functools.partial(jax.jit, static_argnums=0)
def _init(cfg, key):
    return specs.init(spec(cfg), cfg, key)


# A program that runs once, and would be compiled for longer than all else before the first step.
_init_on_cpu = jax.jit(_init, static_argnums=0, compiler_options={"xla_backend_optimization_level": 1})


class Output(NamedTuple):
    """What ``apply`` gives."""

    hidden: jax.Array
    """What the head reads, [B, T, D]: after the final norm."""
    cache: Cache | None
    """The cache, which has seen the tokens; None without one."""
    routing: tuple[dict[str, jax.Array], ...]
    """Of each layer with experts, sums over the counted tokens (``nn.experts.router.sums``): load [E], probability [E],
    log_z2, tokens, dropped."""


@answers_mistakes
def forward(
    params: dict,
    tokens: Any,
    cfg: ModelConfig,
    *,
    positions: Any = None,
    segments: Any = None,
    valid: Any = None,
    source: Any = None,
    source_valid: Any = None,
    token_types: Any = None,
    embeddings: Any = None,
    embeddings_mask: Any = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Next-token logits [B, T, V], float32. Arguments and errors as of ``apply``."""
    require_head(cfg)
    rows: dict[str, Any] = {"positions": positions, "segments": segments, "valid": valid, "token_types": token_types}
    rows |= {"source": source, "source_valid": source_valid, "embeddings": embeddings, "embeddings_mask": embeddings_mask}
    return head(params, hidden(params, tokens, cfg, **rows, key=key), cfg)


@answers_mistakes
def forward_cached(
    params: dict,
    tokens: Any,
    cfg: ModelConfig,
    cache: Cache,
    *,
    positions: Any = None,
    valid: Any = None,
    source: Any = None,
    source_valid: Any = None,
    embeddings: Any = None,
    embeddings_mask: Any = None,
) -> tuple[jax.Array, Cache]:
    """Logits [B, T, V] of the tokens that come after those in ``cache`` (``jf.init_cache``), in chunks of any length, and the
    cache that holds these too. Arguments and errors as of ``apply``."""
    require_head(cfg)
    rows = {"positions": positions, "valid": valid, "source": source, "source_valid": source_valid}
    rows |= {"embeddings": embeddings, "embeddings_mask": embeddings_mask}
    out = apply(params, tokens, cfg, cache=cache, **rows)
    assert out.cache is not None
    return head(params, out.hidden, cfg), out.cache


@answers_mistakes
def hidden(
    params: dict,
    tokens: Any,
    cfg: ModelConfig,
    *,
    positions: Any = None,
    segments: Any = None,
    valid: Any = None,
    source: Any = None,
    source_valid: Any = None,
    token_types: Any = None,
    embeddings: Any = None,
    embeddings_mask: Any = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """What the head reads, [B, T, D]: after the final norm. Arguments and errors as of ``apply``."""
    rows: dict[str, Any] = {"positions": positions, "segments": segments, "valid": valid, "token_types": token_types}
    rows |= {"source": source, "source_valid": source_valid, "embeddings": embeddings, "embeddings_mask": embeddings_mask}
    return apply(params, tokens, cfg, **rows, key=key).hidden


@answers_mistakes
def apply(
    params: dict,
    tokens: Any,
    cfg: ModelConfig,
    *,
    positions: Any = None,
    segments: Any = None,
    valid: Any = None,
    source: Any = None,
    source_valid: Any = None,
    token_types: Any = None,
    embeddings: Any = None,
    embeddings_mask: Any = None,
    key: jax.Array | None = None,
    cache: Cache | None = None,
    counted: Any = None,
    training: bool = False,
) -> Output:
    """The forward of every model, without its head.

    tokens [B, T] integers. positions [B, T]: where each stands (counted from the other arguments unless given). segments
    [B, T]: packed documents, each of which sees only itself. valid [B, T] bool: False for padding, left or right. source
    [B, S] and source_valid [B, S]: what an encoder–decoder reads. token_types [B, T]: types of the tokens, for a model that
    tells them apart (0 unless given). embeddings [B, T, D]: vectors in place of rows of the embedding table, for all tokens
    (tokens=None) or where embeddings_mask [B, T] is True; the model treats them as it does rows, scale_embedding included.
    key: turns dropout on. cache: what the layers have kept of the tokens before. counted, bool [B, T] or True: the tokens
    over which ``Output.routing`` sums what experts did (None: it is empty). training: whether
    ``expert_dispatch="capacity"`` limits the experts.

    Raises ValueError for ids outside the vocabulary, positions outside a learned table, shapes that do not fit, parameters
    that are not the config's. Inside ``jit``, where values are not known, such an id or position makes its whole row NaN.
    """
    check(params, cfg)
    tokens, replaced, shape = inputs.tokens_or_embeddings(tokens, embeddings, embeddings_mask, cfg)
    with precision(cfg), _labels_are_known(cfg):
        encoded = None
        if source is not None or source_valid is not None or (cfg.encoder_layers and cache is None):
            encoded = _encode(params, source, source_valid, shape[0], cfg, key)
        if cache is None:
            info = inputs.token_info("", shape, cfg, positions, segments, valid)
        elif segments is not None:
            raise ValueError("segments cannot be combined with a cache; decode each document in a row of its own")
        else:
            cache_spec.check(cache, cfg)
            info, cache = cache.advance(shape, cfg, positions, valid)
        replaced = inputs.without_padding(replaced, info)
        x_BTD = embed(params, tokens, cfg, inputs.token_types(token_types, shape, cfg), replaced)
        with scope("decoder"):
            rng = child(key, "decoder")
            how: dict[str, Any] = {"rng": rng, "counted": counted, "training": training}
            return Output(*stack.apply(params["decoder"], x_BTD, cfg, info=info, source=encoded, cache=cache, **how))


@answers_mistakes
def after_next(
    params: dict,
    hidden_BTD: jax.Array,
    tokens: Any,
    cfg: ModelConfig,
    *,
    positions: Any = None,
    segments: Any = None,
    valid: Any = None,
    key: jax.Array | None = None,
    cache: Cache | None = None,
    counted: Any = None,
    training: bool = False,
) -> Output:
    """What the head reads to predict the token after the next, [B, T, D] (``mtp``), from what it read to predict the next one
    and from the next tokens [B, T] themselves. Keywords and errors as of ``apply``, for the tokens before them; the cache is
    one of ``mtp.config(cfg)``."""
    if not cfg.mtp:
        raise ValueError("the model has no block that predicts the token after the next one (mtp=False)")
    check(params, cfg)
    tokens = inputs.tokens("tokens", tokens, cfg)
    if hidden_BTD.shape != (*tokens.shape, cfg.d_model):
        raise ValueError(
            f"hidden has shape {hidden_BTD.shape}; for tokens {tokens.shape} it must be {(*tokens.shape, cfg.d_model)}"
        )
    with precision(cfg), scope("mtp"):
        token_BTD = embed(params, tokens, cfg)
        how: dict[str, Any] = {"rng": key, "counted": counted, "training": training}
        layer_cache = None
        if cache is None:
            info = inputs.token_info("", tokens.shape, cfg, positions, segments, valid)
        else:
            block_cfg = mtp.config(cfg)
            cache_spec.check(cache, block_cfg)
            info, cache = cache.advance(tokens.shape, block_cfg, positions, valid)
            layer_cache = cache.layer(0, block_cfg, info)
        x_BTD, layer_cache, sums = mtp.apply(params["mtp"], token_BTD, hidden_BTD, cfg, info=info, cache=layer_cache, **how)
        if cache is not None and layer_cache is not None:
            x_BTD, cache = cache.guard(x_BTD), dataclasses.replace(cache, layers=(layer_cache.entries,))
        return Output(x_BTD, cache, () if sums is None else (sums,))


def _encode(params, source, source_valid, rows, cfg, key) -> tuple[jax.Array, TokenInfo]:
    """The encoder's output [B, S, D] and where its tokens stand."""
    source, info = inputs.source(source, source_valid, rows, cfg)
    with scope("encoder"):
        x_BSD = embed(params, source, cfg)
        out = stack.apply(params["encoder"], x_BSD, cfg.encoder, info=info, rng=child(key, "encoder"))
    return out.x_BTD, info


def check(params: dict, cfg: ModelConfig) -> None:
    """Raises ValueError with a tree diff where ``params``, stacked or not, are not those of the config."""
    require_config(cfg)
    decoder = params.get("decoder") if isinstance(params, dict) else None
    unstacked = isinstance(decoder, dict) and isinstance(decoder.get("layers"), dict) and stack.is_unstacked(decoder["layers"])
    specs.check(params, _unstacked_spec(cfg) if unstacked else spec(cfg), cfg)


@functools.cache
def _unstacked_spec(cfg: ModelConfig) -> dict:
    stacks = {"decoder": (cfg, cfg.encoder_layers > 0)} | ({"encoder": (cfg.encoder, False)} if cfg.encoder_layers else {})
    parts = dict(spec(cfg))
    for name, (stack_cfg, crossing) in stacks.items():
        layers = {str(i): specs.bound(block.spec(layer, crossing), stack_cfg) for i, layer in enumerate(stack_cfg.layers)}
        parts[name] = parts[name] | {"layers": layers}
    return parts


@contextlib.contextmanager
def _labels_are_known(cfg: ModelConfig) -> Iterator[None]:
    """Raises ValueError at the end if ``cfg.execution.remat_save`` has a name that no layer gives to an activation."""
    with labels() as known:
        yield
    for name in cfg.execution.remat_save:
        if name not in known:
            raise ValueError(f"remat_save={name!r} names no activation of a layer{nearest(name, known)}")
