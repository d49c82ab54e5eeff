"""Muon by a flag, and an optimizer of one's own by its import path: 5 lines, no line of the library changed.

    python examples/muon.py

trains one small model twice through ``train.py``, as these two commands would:

    python train.py examples/muon.py --optim.name muon
    python train.py examples/muon.py --optim.name examples.muon:normalized
"""

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxformer as jf
from jaxformer.cli import train
from jaxformer.training import run

ROOT = Path(__file__).parent.parent


def normalized(optim: jf.OptimConfig, cfg: jf.ModelConfig, steps: int) -> optax.GradientTransformation:
    """Every tensor's momentum divided by its root mean square; clipping, weight decay and schedule as of the built-in ones."""

    def divide(updates, state, params=None):
        return jax.tree.map(lambda x: x / (jnp.sqrt(jnp.mean(x * x)) + optim.eps), updates), state

    rule = optax.chain(optax.ema(optim.beta1), optax.GradientTransformation(lambda params: optax.EmptyState(), divide))
    return jf.training.from_rule(rule, optim, cfg, steps)


config = jf.Config(
    model=jf.presets.llama(vocab_size=256, d_model=64, n_layers=2, n_heads=4, max_length=64),
    data=jf.DataConfig(path=__file__, tokenizer="byte", length=32, batch_size=8, validation_fraction=0.2),
    optim=jf.OptimConfig(lr=5e-3, warmup_steps=10),
    train=jf.TrainConfig(steps=60, eval_every=60, log_every=20, sample_tokens=0),
)


def main() -> None:
    """Trains with both, in directories that are removed afterwards."""
    sys.path.insert(0, str(ROOT))  # from where examples.muon is imported
    with tempfile.TemporaryDirectory() as folder:
        for name in ("muon", "examples.muon:normalized"):
            print(f"--optim.name {name}")
            flags = ["--optim.name", name, "--run-dir", f"{folder}/{name.rpartition(':')[2]}"]
            train.main(run.parse([__file__, *flags], train.DEFAULT).config)


if __name__ == "__main__":
    main()
