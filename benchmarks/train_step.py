"""A training step of a GPT-2-shaped model, interleaved with Hugging Face GPT-2 on torch: the ratio of their wall times.

    pip install torch==2.13.0 transformers && python benchmarks/train_step.py

4 layers of 768, T 512, B 2, V 50,304, float32, AdamW, no dropout, every core. Both do the same updates on the same
tokens: each round times one step of either, in turn; printed are the medians of the rounds and of their ratios.
"""

import argparse
import statistics
import time

import jax
import numpy as np

import jaxformer as jf

LAYERS, WIDTH, HEADS, LENGTH, BATCH, VOCAB = 4, 768, 12, 512, 2, 50_304


def ours(tokens: np.ndarray):
    """A function that does one step and waits for it."""
    cfg = jf.presets.gpt2(
        vocab_size=VOCAB,
        n_layers=LAYERS,
        d_model=WIDTH,
        n_heads=HEADS,
        max_length=LENGTH,
        attention_dropout=0.0,
        residual_dropout=0.0,
        embedding_dropout=0.0,
    )
    optim = jf.OptimConfig(lr=1e-4, schedule="constant", warmup_steps=0, beta2=0.999, clip_norm=0.0)
    optimizer = jf.training.optimizer(optim, cfg, 1000)
    update = jax.jit(jf.training.make_update(jf.training.next_token(cfg), optimizer), donate_argnums=0)
    state = [jf.training.init_state(jf.init(cfg, jax.random.key(0)), optimizer, jax.random.key(1))]
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((BATCH, LENGTH), np.float32)}

    def step() -> float:
        state[0], metrics = update(state[0], batch)
        return float(metrics["loss"])

    return step


def hugging_face(tokens: np.ndarray):
    """The same on torch, eager."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": LENGTH, "vocab_size": VOCAB}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    inputs, targets = torch.tensor(tokens[:, :-1].astype(np.int64)), torch.tensor(tokens[:, 1:].astype(np.int64))

    def step() -> float:
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH + 1), dtype=np.int32)
    steps = {"jaxformer": ours(tokens), "Hugging Face": hugging_face(tokens)}
    for name, step in steps.items():
        print(f"{name}: first losses {step():.3f}, {step():.3f}")
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    for name, values in times.items():
        print(f"{name}: median {statistics.median(values):.3f} s, {min(values):.3f} to {max(values):.3f}")
    ratios = sorted(a / b for a, b in zip(times["jaxformer"], times["Hugging Face"], strict=True))
    print(f"ratio of wall times, jaxformer / Hugging Face: median {statistics.median(ratios):.2f}", end=", ")
    print(f"{ratios[0]:.2f} to {ratios[-1]:.2f} over {rounds} rounds")


if __name__ == "__main__":
    main()
