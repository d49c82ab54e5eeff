"""Post-LN against Pre-LN at initialisation: the gradient norm of each decoder layer's feed-forward (Xiong et al. 2020, fig. 3).

    python benchmarks/norm_placement.py --image benchmarks/figures/norm_placement.png

As in the paper an encoder–decoder with Xavier initialisation, here with 12 layers a side; the mean over seeds. Post-LN's
gradients grow towards the output layer, which is why it needs a warm-up; Pre-LN's do not.
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxformer as jf

LAYERS, SEEDS = 12, 8


def gradient_norms(residual: str) -> np.ndarray:
    """[seeds, layers]: norm of the loss's gradient with respect to each layer's second feed-forward matrix."""
    cfg = jf.presets.transformer_base(vocab_size=1000, d_model=128, n_layers=LAYERS, n_heads=4, residual=residual)
    cfg = dataclasses.replace(cfg, attention_dropout=0.0, residual_dropout=0.0, embedding_dropout=0.0)
    source, ids = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 8, 33))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": np.ones((8, 32), np.float32), "source": source}

    @jax.jit
    def norms(key):
        grads = jax.grad(lambda params: jf.loss(params, batch, cfg)[0])(jf.init(cfg, key))
        return jnp.linalg.norm(grads["decoder"]["layers"]["mlp"]["down"].reshape(LAYERS, -1), axis=1)

    return np.stack([norms(jax.random.key(seed)) for seed in range(SEEDS)])


def main() -> None:
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=Path, required=True)
    image = parser.parse_args().image
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="decoder layer", ylabel="gradient norm of the feed-forward's W₂", yscale="log")
    for residual, label in (("post", "Post-LN"), ("pre", "Pre-LN")):
        norms = gradient_norms(residual)
        mean, spread = norms.mean(0), norms.std(0)
        axes.errorbar(np.arange(1, LAYERS + 1), mean, spread, marker="o", capsize=3, label=label)
        print(f"{label}: " + " ".join(f"{value:.4f}" for value in mean) + f"; last / first {mean[-1] / mean[0]:.2f}")
    axes.set_title(f"Gradients at initialisation, {LAYERS} + {LAYERS} layers, {SEEDS} seeds")
    axes.grid(alpha=0.3)
    axes.legend()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=120)


if __name__ == "__main__":
    main()
