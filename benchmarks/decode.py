"""Greedy decoding of a GPT-2-shaped model, interleaved with Hugging Face ``generate`` on torch: ratios of wall times.

    pip install torch==2.13.0 transformers && python benchmarks/decode.py

4 layers of 768, V 50,304, prompt 32, 128 new tokens, float32, every core, the same weights. Each round times one call of
each, in turn: ours, and Hugging Face with its dynamic cache, its static cache, and the static cache with a compiled forward.
Printed are the medians of the rounds and of their ratios, and how near a step of ours comes to the time that memory takes to
deliver its weights and cache, by the bandwidth of a copy measured in the same run.
"""

import argparse
import statistics
import threading
import time

import jax
import numpy as np

import jaxformer as jf
from jaxformer.nn import cache

LAYERS, WIDTH, HEADS, VOCAB, PROMPT, NEW = 4, 768, 12, 50_304, 32, 128


def hugging_face():
    """A GPT-2 of random weights on torch."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": 1024, "vocab_size": VOCAB}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)).eval()


def ours(model) -> tuple[jf.ModelConfig, dict]:
    """The same model here."""
    cfg = jf.presets.gpt2(vocab_size=VOCAB, n_layers=LAYERS, d_model=WIDTH, n_heads=HEADS)
    w = {name.removeprefix("transformer."): p.detach().numpy() for name, p in model.named_parameters()}
    head = WIDTH // HEADS

    def norm(name):
        return {"gain": w[f"{name}.weight"], "bias": w[f"{name}.bias"]}

    def layer(at):
        kernels = np.split(w[f"{at}.attn.c_attn.weight"], 3, axis=1)
        biases = np.split(w[f"{at}.attn.c_attn.bias"], 3)
        shapes = ((WIDTH, HEADS, 1, head), (WIDTH, HEADS, head), (WIDTH, HEADS, head))
        attention = {
            "out": w[f"{at}.attn.c_proj.weight"].reshape(HEADS, 1, head, WIDTH),
            "out_bias": w[f"{at}.attn.c_proj.bias"],
        }
        for name, kernel, bias, shape in zip(("query", "key", "value"), kernels, biases, shapes, strict=True):
            attention |= {name: kernel.reshape(shape), f"{name}_bias": bias.reshape(shape[1:])}
        mlp = {"up": "c_fc.weight", "up_bias": "c_fc.bias", "down": "c_proj.weight", "down_bias": "c_proj.bias"}
        return {
            "attention": attention,
            "attention_norm": norm(f"{at}.ln_1"),
            "mlp": {name: w[f"{at}.mlp.{there}"] for name, there in mlp.items()},
            "mlp_norm": norm(f"{at}.ln_2"),
        }

    layers = jax.tree.map(lambda *x: np.stack(x), *[layer(f"h.{i}") for i in range(LAYERS)])
    decoder = {"layers": layers, "norm": norm("ln_f"), "position": {"table": w["wpe.weight"]}}
    params = {"embedding": {"token": w["wte.weight"]}, "decoder": decoder}
    return cfg, jax.jit(jf.model.unstack, static_argnums=1)(params, cfg)


def contestants(model, cfg: jf.ModelConfig, params: dict, prompts: np.ndarray) -> dict:
    """``name -> function`` that gives the new tokens."""
    import torch
    from transformers import CompileConfig

    ids = torch.tensor(prompts.astype(np.int64))
    compiled = CompileConfig(fullgraph=False, dynamic=False, mode="default")
    compiled._compile_all_devices = True  # it compiles for accelerators alone otherwise

    def there(**options):
        settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **options)
        return out[:, PROMPT:].numpy()

    return {
        "jaxformer": lambda: np.asarray(jf.generate(params, prompts, cfg, max_new_tokens=NEW).tokens),
        "HF dynamic": lambda: there(),
        "HF static": lambda: there(cache_implementation="static", disable_compile=True),
        "HF static, compiled": lambda: there(cache_implementation="static", compile_config=compiled),
    }


def copy_bandwidth() -> float:
    """Bytes per second that every core together reads and writes in copies of 256 MiB: the best of ten."""
    import os

    cores = os.cpu_count() or 1
    pairs = [(np.ones(2**25, np.float64), np.zeros(2**25, np.float64)) for _ in range(cores)]

    def once() -> float:
        threads = [threading.Thread(target=np.copyto, args=(b, a)) for a, b in pairs]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 2 * sum(a.nbytes for a, _ in pairs) / (time.perf_counter() - start)

    return max(once() for _ in range(10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    model = hugging_face()
    cfg, params = ours(model)
    weights = sum(p.nbytes for p in jax.tree.leaves(params)) - params["decoder"]["position"]["table"].nbytes
    for batch in options.batch:
        prompts = np.random.default_rng(0).integers(0, VOCAB, (batch, PROMPT), dtype=np.int32)
        calls = contestants(model, cfg, params, prompts)
        first = {name: call() for name, call in calls.items()}
        calls["HF static, compiled"]()  # compiles its prefill and its step one after the other
        same = {name: bool((tokens == first["jaxformer"]).all()) for name, tokens in first.items()}
        print(f"batch {batch}; the same tokens: {same}", flush=True)
        times: dict[str, list[float]] = {name: [] for name in calls}
        bandwidth = []
        for _ in range(options.rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
            bandwidth.append(copy_bandwidth())
        for name, values in times.items():
            ratios = sorted(a / b for a, b in zip(values, times["HF dynamic"], strict=True))
            print(
                f"  {name:20} {statistics.median(values):.3f} s; of HF dynamic: median {statistics.median(ratios):.2f}, "
                f"{ratios[0]:.2f} to {ratios[-1]:.2f} over {options.rounds} rounds"
            )
        kept = cache.size(jf.spec.abstract(cache.spec(cfg, batch, PROMPT + NEW), cfg))
        bound = (weights + kept) / statistics.median(bandwidth)
        step = statistics.median(times["jaxformer"]) / NEW
        print(
            f"  a step of ours {step * 1e3:.2f} ms; {(weights + kept) / 1e6:.0f} MB of weights and cache at "
            f"{statistics.median(bandwidth) / 1e9:.1f} GB/s of copying take {bound * 1e3:.2f} ms: {bound / step:.0%} of that"
        )


if __name__ == "__main__":
    main()
