"""LLaMA-3.2 1B's architecture from scratch: 512 × 2,048 tokens a step.

    python train.py configs/llama_1b.py --data.path 'corpus/*.jsonl'

Made for accelerators with 80 GB or more: parameters and AdamW take 14.8 GB in float32. 1,235,814,400 parameters. Not measured.
"""

import jaxformer as jf

config = jf.Config(
    model=jf.presets.llama3_2_1b(dtype="bfloat16", scan=True, remat="dots"),
    data=jf.DataConfig(vocab_size=32_000, length=2048, batch_size=512, validation_fraction=0.01, validation_rows=512),
    optim=jf.OptimConfig(lr=4e-4, warmup_steps=2000, schedule="wsd"),
    train=jf.TrainConfig(steps=50_000, eval_every=1000, microbatches=32, loss_chunk=256),
)
