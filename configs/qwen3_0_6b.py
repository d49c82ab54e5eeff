"""Qwen3 0.6B's architecture from scratch: QK-norm, heads of 128, tied head; 256 × 2,048 tokens a step.

    python train.py configs/qwen3_0_6b.py --data.path 'corpus/*.jsonl'

Made for accelerators with 40 GB or more: parameters and AdamW take 7.2 GB in float32. 596,049,920 parameters. Not measured.
"""

import jaxformer as jf

config = jf.Config(
    model=jf.presets.qwen3_0_6b(dtype="bfloat16", scan=True, remat="dots"),
    data=jf.DataConfig(vocab_size=32_000, length=2048, batch_size=256, validation_fraction=0.01, validation_rows=256),
    optim=jf.OptimConfig(lr=6e-4, warmup_steps=2000, schedule="wsd"),
    train=jf.TrainConfig(steps=50_000, eval_every=1000, microbatches=16, loss_chunk=256),
)
