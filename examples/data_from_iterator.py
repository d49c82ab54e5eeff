"""A data set from a plain Python iterator, trained on by train.py through ``data.task``.

    uv run python examples/data_from_iterator.py

The iterator gives sums such as "17+25=42" for ever. The data set takes 16 lines, and no line of the library changed. A run that
is continued makes and drops the batches before its step, and continues exactly because the iterator always begins with the same
seed. The command line takes the data set too: ``python train.py --data.task examples.data_from_iterator:Sums``.
"""

import numpy as np

import jaxformer as jf


class Sums:
    """A data set: ``train[step]`` from an iterator, two fixed batches for validation, and a tokenizer."""

    def __init__(self, cfg: jf.DataConfig):
        self.tokenizer = jf.tokenizer.train("byte", [])
        self.train = jf.data.FromIterator(lambda: self.batches(cfg, seed=0))
        held_out = self.batches(cfg, seed=1)
        self.validation = [next(held_out) for _ in range(2)]

    def batches(self, cfg: jf.DataConfig, seed: int):
        rng = np.random.default_rng(seed)
        while True:
            pairs = rng.integers(0, 50, (cfg.batch_size, 2))
            rows = np.array(
                [self.tokenizer.encode(f"{a:2}+{b:2}={a + b:2};".ljust(cfg.length + 1)) for a, b in pairs], np.int32
            )
            weights = (np.arange(cfg.length) < 8) & np.ones((cfg.batch_size, 1), bool)
            yield {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights.astype(np.float32)}


config = jf.Config(
    model=jf.presets.llama(vocab_size=1, d_model=64, n_layers=2, n_heads=4, max_length=16),
    data=jf.DataConfig(task="examples.data_from_iterator:Sums", tokenizer="byte", length=12, batch_size=32),
    optim=jf.OptimConfig(lr=5e-3, warmup_steps=20),
    train=jf.TrainConfig(steps=200, eval_every=100, prompt="12+34=", sample_tokens=3, temperature=0.0),
    run_dir="runs/data_from_iterator",
)

if __name__ == "__main__":
    from jaxformer.cli.train import main

    main(config)
