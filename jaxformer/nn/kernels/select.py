"""Chooses the program that computes attention: plain XLA anywhere, the splash kernel on TPUs, cuDNN on GPUs. All give the same
numbers; a kernel that cannot serve a call says why while the model is traced.

``attention_kernel="auto"`` takes the platform's own where it can, and plain XLA elsewhere; a kernel that is named is used or
refused. What reads a cache, where only the run knows which key stands where, is computed by plain XLA. ``table`` lists what
each kernel can do.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable

from jaxformer.config import ModelConfig
from jaxformer.nn.kernels import cudnn, splash
from jaxformer.nn.kernels.call import AttentionCall
from jaxformer.nn.named import listening
from jaxformer.parallel.sharding import platform

log = logging.getLogger(__name__)


LIMITS: dict[str, Callable[[AttentionCall], str | None]] = {
    "xla": lambda call: None,
    "splash": splash.limit,
    "cudnn": cudnn.limit,
}
"""Of each kernel, why it cannot serve a call, or None where it can."""
OF_PLATFORM = {"tpu": "splash", "gpu": "cudnn"}


TYPICAL = AttentionCall(queries=4096, keys=4096, key_width=128, value_width=128, dtype="bfloat16")
FEATURES: dict[str, dict] = {
    "causal; MHA, GQA, MQA": {},
    "not causal": {"causal": False},
    "cross-attention": {"causal": False, "keys": 1024},
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
    "odd lengths, and padding or segments": {"queries": 999, "keys": 999, "padding": True},
    "a sequence over 4 devices": {"shards": 4},
    "query heads over devices, and not their keys (MQA)": {"heads_apart": True},
}
"""What ``table`` tells of: changes of a typical call."""


def table() -> str:
    """What each kernel can do, in Markdown; where one cannot, "auto" computes by plain XLA."""
    kernels = [name for name in LIMITS if name != "xla"]
    rows = [f"| | {' | '.join(kernels)} |", "|---" * (len(kernels) + 1) + "|"]
    for feature, changed in FEATURES.items():
        whys = (LIMITS[name](dataclasses.replace(TYPICAL, **changed)) for name in kernels)
        rows.append(f"| {feature} | {' | '.join(f'no: {why}' if why else 'yes' for why in whys)} |")
    return "\n".join(rows)


def choose(cfg: ModelConfig, call: AttentionCall) -> str:
    """The kernel for a call: plain XLA for those that read a cache. Raises ValueError where the one that
    ``cfg.execution.attention_kernel`` names cannot serve it."""
    named = cfg.execution.attention_kernel
    if not call.ordered:
        return "xla"
    if named != "auto":
        if why := LIMITS[named](call):
            raise ValueError(f"attention_kernel={named!r} {why}; 'auto' computes this with plain XLA")
        return named
    kernel = OF_PLATFORM.get(platform(), "xla")
    if kernel == "xla" or listening():  # whoever listens may want the weights, which only plain XLA makes
        return "xla"
    why = LIMITS[kernel](call)
    _tell(kernel, why)
    return "xla" if why else kernel


@functools.cache
def _tell(kernel: str, why: str | None) -> None:
    """Says once what "auto" takes, and why not the device's own."""
    if why is None:
        log.info("attention is computed by %s", kernel)
    else:
        log.warning("attention is computed by plain XLA, which is slower, because %s %s", kernel, why)
