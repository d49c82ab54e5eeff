"""GPT-2 small (124M) from scratch, with nanoGPT's budget: 480 × 1,024 tokens a step.

    python train.py configs/gpt2_small.py --data.path 'openwebtext/*.jsonl'

Made for 8 accelerators. 124,439,808 parameters; trains its own 50,257-piece BPE on the text it is given. Not measured.
"""

import jaxformer as jf

config = jf.Config(
    model=jf.presets.gpt2(
        attention_dropout=0.0,
        residual_dropout=0.0,
        embedding_dropout=0.0,
        dtype="bfloat16",
        scan=True,
        remat="dots",
    ),
    data=jf.DataConfig(vocab_size=50_257, length=1024, batch_size=480, validation_fraction=0.01, validation_rows=480),
    optim=jf.OptimConfig(lr=6e-4, warmup_steps=2000),
    train=jf.TrainConfig(steps=600_000, eval_every=1000, microbatches=5, loss_chunk=256),
)
