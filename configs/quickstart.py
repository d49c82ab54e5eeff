"""A small LLaMA on the source code of the Python standard library, with a BPE of 2,048 pieces trained on it first.

    python train.py

2.0M parameters, 400 steps of 8 × 256 tokens. On 2 CPU cores 1 min 15 s to 3 min without installation. With Python 3.11.7
the validation loss is 4.34 nats per token (1.99 bits per byte); another Python has another library. Samples look like Python.
"""

import jaxformer as jf

config = jf.Config(
    model=jf.presets.llama(vocab_size=2048, d_model=192, n_layers=4, n_heads=6, n_kv_heads=2, max_length=256, tied_head=True),
    data=jf.DataConfig(vocab_size=2048, length=256, batch_size=8, validation_rows=64),
    optim=jf.OptimConfig(lr=4e-3, warmup_steps=40),
    train=jf.TrainConfig(steps=400, eval_every=200),
)
