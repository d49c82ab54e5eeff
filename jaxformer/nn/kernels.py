"""Which program computes attention: plain XLA anywhere, the splash kernel on TPUs, cuDNN on GPUs. All give the same numbers;
where one cannot, it says so while the model is traced.

``attention_kernel="auto"`` takes the platform's own where it can, and plain XLA elsewhere; a kernel that is named is used or
refused. ``table`` is the whole of what each can.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxformer.config import ModelConfig
from jaxformer.nn import cudnn, splash
from jaxformer.nn.attend import attend
from jaxformer.nn.mask import Places, visible
from jaxformer.nn.named import label, listening
from jaxformer.sharding import current, partitioned, platform

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Site:
    """What a call of attention asks for."""

    queries: int
    keys: int
    key_width: int
    value_width: int
    dtype: str
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    bias: bool = False
    """Whether something is added to the scores."""
    dropout: bool = False
    padding: bool = False
    segments: bool = False
    ordered: bool = True
    """Whether queries and keys stand in the order of their indices, as all do but those of a cache."""
    shards: int = 1
    """Devices that the queries are spread over."""
    unplaced: bool = False
    """Whether there are several devices, and no mesh that says which part is whose."""


def _splash(site: Site) -> str | None:
    if not site.ordered:
        return "cannot read a cache, whose keys stand where only the run knows"
    if site.bias:
        return "adds no bias to the scores"
    if site.dropout:
        return "makes no weights that dropout could act on"
    if site.padding and site.segments:
        return "takes segments or padding, not both"
    if site.queries % (splash.LANES * site.shards) or site.keys % splash.LANES:
        each = f" on each of {site.shards} devices" if site.shards > 1 else ""
        return f"needs lengths that divide by {splash.LANES}{each}, not {site.queries} queries and {site.keys} keys"
    if site.unplaced:
        return "needs a mesh (jax.set_mesh) where there are several devices"
    if site.dtype not in ("bfloat16", "float32"):
        return f"computes in bfloat16 and float32, not {site.dtype}"
    return _window(site)


def _cudnn(site: Site) -> str | None:
    if not site.ordered:
        return "cannot read a cache, whose keys stand where only the run knows"
    if site.bias or site.softcap is not None:
        return "adds no bias to the scores and caps none"
    if site.dropout:
        return "draws dropout of its own, which no other device could repeat"
    if site.dtype not in ("bfloat16", "float16"):
        return f"computes in bfloat16 and float16, not {site.dtype}"
    if site.key_width != site.value_width:
        return f"needs keys and values of one width, not {site.key_width} and {site.value_width}"
    if site.key_width % 8 or site.key_width > 128:
        return f"needs heads whose width divides by 8 and is at most 128, not {site.key_width}"
    if site.shards > 1:
        return f"has no part of a sequence on each of {site.shards} devices"
    if site.window is not None and not site.causal:
        return "knows windows of causal attention alone"
    return _window(site)


def _window(site: Site) -> str | None:
    if site.window is not None and site.padding:
        return "counts padding as places in a window"
    return None


LIMITS: dict[str, Callable[[Site], str | None]] = {"xla": lambda site: None, "splash": _splash, "cudnn": _cudnn}
"""Of each kernel, why it cannot serve a call, or None where it can."""
OF_PLATFORM = {"tpu": "splash", "gpu": "cudnn"}


TYPICAL = Site(queries=4096, keys=4096, key_width=128, value_width=128, dtype="bfloat16")
FEATURES: dict[str, dict] = {
    "causal; MHA, GQA, MQA": {},
    "not causal": {"causal": False},
    "cross-attention": {"causal": False, "keys": 1024},
    "cached decoding and prefill": {"ordered": False},
    "padding": {"padding": True},
    "segments (packed documents)": {"segments": True},
    "segments and padding": {"segments": True, "padding": True},
    "window": {"window": 1024},
    "window on both sides": {"window": 1024, "causal": False},
    "window and padding": {"window": 1024, "padding": True},
    "soft-cap": {"softcap": 50.0},
    "bias on the scores (relative positions)": {"bias": True},
    "dropout on the weights": {"dropout": True},
    "heads of width 64": {"key_width": 64, "value_width": 64},
    "heads of width 80": {"key_width": 80, "value_width": 80},
    "heads of width 256": {"key_width": 256, "value_width": 256},
    "keys of width 192, values of 128": {"key_width": 192},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "lengths that do not divide by 128": {"queries": 1000, "keys": 1000},
    "a sequence over 4 devices": {"shards": 4},
}
"""What ``table`` tells of: changes of a typical call."""


def table() -> str:
    """What each kernel can do, in Markdown; where one cannot, "auto" computes by plain XLA."""
    own = [name for name in LIMITS if name != "xla"]
    rows = [f"| | {' | '.join(own)} |", "|---" * (len(own) + 1) + "|"]
    for feature, changed in FEATURES.items():
        whys = (LIMITS[name](dataclasses.replace(TYPICAL, **changed)) for name in own)
        rows.append(f"| {feature} | {' | '.join(f'no: {why}' if why else 'yes' for why in whys)} |")
    return "\n".join(rows)


def choose(cfg: ModelConfig, site: Site) -> str:
    """The kernel for a call. Raises ValueError where the one that ``cfg.attention_kernel`` names cannot serve it."""
    named = cfg.attention_kernel
    if named != "auto":
        if why := LIMITS[named](site):
            raise ValueError(f"attention_kernel={named!r} {why}; 'auto' computes this with plain XLA")
        return named
    own = OF_PLATFORM.get(platform(), "xla")
    why = LIMITS[own](site)
    if own != "xla" and site.ordered:  # that caches are read by plain XLA is no news
        _tell(own, why)
    # Whoever listens may want the weights, which only plain XLA makes.
    return "xla" if listening() or why else own


@functools.cache
def _tell(kernel: str, why: str | None) -> None:
    """Says once what "auto" takes, and why not the device's own."""
    if why is None:
        log.info("attention: %s", kernel)
    else:
        log.warning("attention: plain XLA, which is slower: %s %s", kernel, why)


def mix(
    q_BKGTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    places: Places,
    key_places: Places,
    cfg: ModelConfig,
    *,
    crossing: bool = False,
    scale: float | None = None,
    bias: jax.Array | None = None,
    dropout: bool = False,
    observe: Callable[[jax.Array], jax.Array] = lambda weights: weights,
) -> jax.Array:
    """``attend`` for queries and keys at their places, by the kernel that ``choose`` gives: [B, K, G, T, H], which
    rematerialisation knows as "mixed".

    crossing: all keys are visible, but padding. dropout: whether ``observe``, which sees the weights, is to drop some.
    """
    causal, window = (False, None) if crossing else (cfg.causal, cfg.window)
    assert not isinstance(window, tuple)  # a layer's own
    site = Site(
        q_BKGTH.shape[3],
        k_BKSH.shape[2],
        k_BKSH.shape[3],
        v_BKSH.shape[3],
        q_BKGTH.dtype.name,
        causal,
        window,
        cfg.attention_softcap,
        bias=bias is not None,
        dropout=dropout,
        padding=key_places.valid is not None,
        segments=places.segment is not None and key_places.segment is not None,
        ordered=places.ordered and key_places.ordered,
        shards=splash.shards(q_BKGTH),
        unplaced=platform() == "tpu" and current() is None and partitioned(),
    )
    kernel = choose(cfg, site)
    if kernel == "xla":
        mask_BTS = visible(places, key_places, causal=causal, window=window)
        softcap = cfg.attention_softcap
        mixed = attend(q_BKGTH, k_BKSH, v_BKSH, mask_BTS, scale=scale, softcap=softcap, bias=bias, observe=observe)
        return checkpoint_name(mixed, label("mixed"))
    scale = q_BKGTH.shape[-1] ** -0.5 if scale is None else scale
    if kernel == "cudnn":
        return checkpoint_name(cudnn.apply(q_BKGTH, k_BKSH, v_BKSH, places, key_places, site, scale), label("mixed"))
    return splash.apply(q_BKGTH, k_BKSH, v_BKSH, places, key_places, site, scale)  # which labels what it keeps itself
