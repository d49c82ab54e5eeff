"""Dates"""

import jaxformer as jf

config = jf.Config(
    model=jf.presets.transformer_base(vocab_size=64, d_model=128, n_layers=2, n_heads=4, max_length=64),
    data=jf.DataConfig(task="dates", tokenizer="char", length=12, source_length=40, batch_size=64),
    optim=jf.OptimConfig(lr=1e-3, warmup_steps=200, schedule="inverse_sqrt"),
    train=jf.TrainConfig(steps=3000, eval_every=500),
)
