"""Mistral 7B's architecture from scratch: GQA, sliding window of 4,096; 512 × 8,192 tokens a step.

    python train.py configs/mistral_7b.py --data.path 'corpus/*.jsonl'

7,241,732,096 parameters: with AdamW 86.9 GB in float32 on every device, as data parallelism copies them. Not measured.
"""

import jaxformer as jf

config = jf.Config(
    model=jf.presets.mistral_7b(dtype="bfloat16", scan=True, remat="full"),
    data=jf.DataConfig(vocab_size=32_000, length=8192, batch_size=512, validation_fraction=0.01, validation_rows=128),
    optim=jf.OptimConfig(lr=3e-4, warmup_steps=2000, schedule="wsd"),
    train=jf.TrainConfig(steps=50_000, eval_every=1000, microbatches=64, loss_chunk=256),
)
