"""A training loop of one's own: 22 lines, no line of the library changed.

    uv run python examples/own_loop.py

A model learns to count in steps of 1 to 5. Run again, it continues from its last checkpoint.
"""

import jax
import numpy as np

import jaxformer as jf

STEPS, LENGTH = 120, 12
cfg = jf.presets.llama(vocab_size=64, d_model=32, n_layers=2, n_heads=2, max_length=32)
objective = jf.training.next_token(cfg, label_smoothing=0.01)
optimizer = jf.training.optimizer(jf.OptimConfig(lr=1e-2, warmup_steps=10), cfg, STEPS)
placement = jf.training.jit(jf.training.make_update(objective, optimizer, microbatches=2))


def batch(step: int) -> dict[str, np.ndarray]:
    start, stride = np.random.default_rng(step).integers([1, 1], [9, 6], (16, 2)).T
    counts = start[:, None] + stride[:, None] * np.arange(LENGTH + 1)
    return {"tokens": counts[:, :-1] % 64, "targets": counts[:, 1:] % 64, "weights": np.ones((16, LENGTH), np.float32)}


def fresh():
    return jf.training.init_state(jf.init(cfg, jax.random.key(0)), optimizer, jax.random.key(1))


with jf.training.Checkpoints("runs/own_loop") as checkpoints, placement.within():
    restored = checkpoints.restore(placement.like(jax.eval_shape(fresh)))
    state = placement.begin(fresh) if restored is None else placement.put_state(restored)
    for step in range(int(placement.get_state(state).step), STEPS):
        state, metrics = placement.step(state, placement.put_batch(batch(step)))
        if (step + 1) % 40 == 0:
            checkpoints.save(placement.get_state(state))
            print(f"step {step + 1}  loss {placement.get_metrics(metrics)['loss']:.3f}")
