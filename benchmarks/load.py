"""Loading a published folder of 3 GB, in turn with Hugging Face transformers: the ratio of their times, and peak memory.

    pip install torch==2.13.0 transformers safetensors && python benchmarks/load.py

A LLaMA of 1.5 billion bfloat16 parameters in four files, written to a temporary folder (3 GB) that is in the page cache when
the rounds begin. Each load is a process of its own; timed is the call, without imports, until every page of every weight has
been read once: transformers maps the file and reads nothing before that, unless another dtype is asked for. Peak memory is
the process's highest resident size (VmHWM) less what it had before the call.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

WIDTH, FFN, VOCAB, LAYERS, HEADS, KV_HEADS = 2048, 8192, 128_256, 16, 32, 8


def write(folder: Path) -> None:
    """The folder: random weights, LLaMA 3.2 1B's sizes with a head of its own."""
    import ml_dtypes
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(1 << 24) * 0.02).astype(ml_dtypes.bfloat16)

    def drawn(*shape: int) -> np.ndarray:
        return np.resize(np.roll(noise, int(rng.integers(1 << 20))), shape)

    def layer(i: int) -> dict[str, np.ndarray]:
        kv = WIDTH // HEADS * KV_HEADS
        sizes = {"q_proj": (WIDTH, WIDTH), "k_proj": (kv, WIDTH), "v_proj": (kv, WIDTH), "o_proj": (WIDTH, WIDTH)}
        found = {f"self_attn.{name}": drawn(*shape) for name, shape in sizes.items()}
        found |= {f"mlp.{name}_proj": drawn(FFN, WIDTH) for name in ("gate", "up")} | {"mlp.down_proj": drawn(WIDTH, FFN)}
        found |= {f"{name}_layernorm": drawn(WIDTH) for name in ("input", "post_attention")}
        return {f"model.layers.{i}.{name}.weight": tensor for name, tensor in found.items()}

    shards = [{"model.embed_tokens.weight": drawn(VOCAB, WIDTH)}, {}, {}, {}]
    for i in range(LAYERS):
        shards[1 + 2 * i // LAYERS] |= layer(i)
    shards[3] = {"model.norm.weight": drawn(WIDTH), "lm_head.weight": drawn(VOCAB, WIDTH)}
    where = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "intermediate_size": FFN}
    config |= {"vocab_size": VOCAB, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_act": "silu"}
    config |= {"num_key_value_heads": KV_HEADS, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}))


def resident(line: str) -> int:
    """Bytes, of a line of /proc/self/status."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(line):
            return int(text.split()[1]) * 1024
    raise ValueError(line)


PAGE = 2048  # of 4 KiB, counted in the smaller dtype's numbers


def ours(folder: str, dtype: str) -> dict[str, float]:
    """One load by jaxformer."""
    import jax

    import jaxformer as jf

    jax.block_until_ready(jax.numpy.zeros(1))
    before, start = resident("VmRSS"), time.perf_counter()
    _, params = jf.hf.load(folder, dtype=dtype)
    for array in jax.tree.leaves(params):
        np.asarray(array).reshape(-1)[::PAGE].astype(np.float32).sum()
    seconds = time.perf_counter() - start
    holds = sum(array.nbytes for array in jax.tree.leaves(params))
    return {"seconds": seconds, "over": resident("VmHWM") - before - holds}


def theirs(folder: str, dtype: str) -> dict[str, float]:
    """One load by transformers."""
    import torch
    from transformers import LlamaForCausalLM

    before, start = resident("VmRSS"), time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    for tensor in model.parameters():
        tensor.detach().view(-1)[::PAGE].float().sum()
    seconds = time.perf_counter() - start
    holds = sum(tensor.nbytes for tensor in model.parameters())
    return {"seconds": seconds, "over": resident("VmHWM") - before - holds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="of the loaded weights")
    parser.add_argument("--one", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sides = {"jaxformer": ours, "transformers": theirs}
    if options.one:
        print(json.dumps(sides[options.one[0]](options.one[1], options.dtype)))
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        for number in range(options.rounds + 1):
            for side, results in found.items():
                command = [sys.executable, __file__, "--dtype", options.dtype, "--one", side, folder]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                if number:  # the first brings files and memory into the machine
                    results.append(json.loads(out.splitlines()[-1]))
    largest = VOCAB * WIDTH * 2
    for side, results in found.items():
        times = [one["seconds"] for one in results]
        over = max(one["over"] for one in results) / largest
        print(f"{side}: median {statistics.median(times):.2f} s, {min(times):.2f} to {max(times):.2f};", end=" ")
        print(f"at most {over:.2f} of the largest tensor ({largest / 1e6:.0f} MB) above what the model holds")
    pairs = zip(*([one["seconds"] for one in results] for results in found.values()), strict=True)
    ratios = sorted(a / b for a, b in pairs)
    print(f"to {options.dtype}: ratio of times, jaxformer / transformers: median {statistics.median(ratios):.2f}", end=", ")
    print(f"{ratios[0]:.2f} to {ratios[-1]:.2f} over {options.rounds} rounds")


if __name__ == "__main__":
    main()
