"""Training and decoding on one GPU: MFU, cuDNN's attention against plain XLA in values and time, and decoding's share of the
memory's bandwidth.

    benchmarks/gpu.sh

MFU is model FLOPs, by ``jf.explain``'s formula, over the peak of the device (dense bfloat16). GPT-2 of 124M parameters and
LLaMA 3.2 1B are trained in bfloat16 with float32 parameters and AdamW, on random tokens. Decoding is that LLaMA in bfloat16;
its bandwidth is the bytes of weights and cache that a step must read over the time of a step. ``--tiny`` tries the program
itself on any device.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxformer as jf
from jaxformer.cost import model_flops
from jaxformer.cost.topology import GPUS, peak_of

STEPS = 5
TINY = {"vocab_size": 512, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 128}
MODELS = {"gpt2 124M": (jf.presets.gpt2, {"max_length": 4096}, 16_384), "llama3.2 1B": (jf.presets.llama3_2_1b, {}, 8192)}
"""Name -> preset, fields, tokens of a batch."""


def config(name: str, is_tiny: bool, **fields: Any) -> jf.ModelConfig:
    """The model of that name, without dropout."""
    preset, more, _ = MODELS[name]
    off = {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0}
    return preset(**{**more, **off, **(TINY if is_tiny else {}), "dtype": "bfloat16", **fields})


def timed(step: Callable[[], Any], steps: int = STEPS) -> float:
    """Median seconds of a call, after two that compile it and warm it up."""
    seconds = []
    for _ in range(2 + steps):
        start = time.perf_counter()
        jax.block_until_ready(step())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def training(name: str, length: int, kernel: str, is_tiny: bool) -> dict:
    """Seconds of an update, and MFU."""
    cfg = config(name, is_tiny, attention_kernel=kernel)
    rows = 1 if is_tiny else MODELS[name][2] // length
    optimizer = jf.training.optimizer(jf.OptimConfig(lr=1e-4), cfg, 1000)
    objective = jf.training.next_token(cfg, loss_chunk=min(length, 1024))
    update = jax.jit(jf.training.make_update(objective, optimizer), donate_argnums=0)
    state = [jf.training.init_state(jf.init(cfg, jax.random.key(0)), optimizer, jax.random.key(1))]
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (rows, length + 1), dtype=np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((rows, length), np.float32)}

    def step() -> jax.Array:
        state[0], metrics = update(state[0], batch)
        return metrics["loss"]

    seconds, peak = timed(step), peak_of(jax.devices()[0].device_kind)
    flops = model_flops.training(cfg, rows, length).total
    mfu = None if peak is None else flops / seconds / peak
    return {"work": f"train {name}", "length": length, "rows": rows, "attention": kernel, "seconds": seconds, "mfu": mfu}


def values(is_tiny: bool) -> dict:
    """How far logits and gradients in bfloat16 are from plain XLA's in float32, by each kernel: relative root mean square."""
    kernels = ("xla",) if jax.default_backend() != "gpu" else ("xla", "cudnn")
    sizes = {} if is_tiny else {"n_layers": 4}
    exact_cfg = config("llama3.2 1B", is_tiny, **{**sizes, "dtype": "float32", "attention_kernel": "xla"})
    params = jf.init(exact_cfg, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (1, 1024), 0, exact_cfg.vocab_size)

    @jax.jit
    def both(params: dict, cfg: jf.ModelConfig) -> list[jax.Array]:
        def loss(params):
            logits = jf.forward(params, tokens, cfg)
            return (jax.nn.logsumexp(logits, -1) - logits[..., 0]).mean(), logits

        gradient, logits = jax.grad(loss, has_aux=True)(params)
        return [logits, gradient["decoder"]["layers"]["attention"]["query"]]

    exact = both(params, exact_cfg)
    result: dict = {"work": "values against float32"}
    for kernel in kernels:
        others = both(params, config("llama3.2 1B", is_tiny, **{**sizes, "attention_kernel": kernel}))
        for what, a, b in zip(("logits", "gradient"), others, exact, strict=True):
            result[f"{kernel} {what}"] = float(jax.numpy.sqrt(((a - b) ** 2).mean() / (b**2).mean()))
    return result


def decoding(rows: int, is_tiny: bool) -> dict:
    """Seconds of a step of decoding, and the share of the memory's bandwidth."""
    cfg = config("llama3.2 1B", is_tiny, param_dtype="bfloat16")
    params = jax.jit(jf.model.unstack, static_argnums=1)(jf.init(cfg, jax.random.key(0)), cfg)
    prompts = np.ones((rows, 128), np.int32)
    few, many = (8, 24) if is_tiny else (32, 160)
    times = [timed(lambda n=n: jf.generate(params, prompts, cfg, max_new_tokens=n).tokens, 3) for n in (few, many)]
    seconds = (times[1] - times[0]) / (many - few)
    cache = jf.init_cache(cfg, rows, prompts.shape[1] + (few + many) // 2)
    read = sum(x.nbytes for x in jax.tree.leaves((params, cache.layers)))
    words = jax.devices()[0].device_kind.split()
    bandwidth = next((chip.bandwidth for name, chip in GPUS.items() if name in words), None)
    share = None if bandwidth is None else read / seconds / bandwidth
    return {"work": "decode llama3.2 1B", "rows": rows, "seconds": seconds, "gigabytes": read / 1e9, "bandwidth": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file to write all figures to")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the program itself")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    kernels = ("cudnn", "xla") if jax.default_backend() == "gpu" else ("xla",)
    todo: list[Callable[[], dict]] = [lambda: values(options.tiny)]
    todo += [lambda rows=rows: decoding(rows, options.tiny) for rows in (1, 8, 64)]
    for length in (1024, 4096) if not options.tiny else (64,):
        for name in MODELS:
            todo += [lambda *, n=name, t=length, k=kernel: training(n, t, k, options.tiny) for kernel in kernels]
    results = []
    for measure in todo:
        try:
            result = measure()
        except Exception as error:  # a model that does not fit: the other figures are still wanted
            result = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        results.append(result)
        print(
            " | ".join(f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in result.items()), flush=True
        )
        if options.json:
            options.json.write_text(json.dumps({"device": jax.devices()[0].device_kind, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
