"""A small LLaMA on the source of the Python standard library."""

import jaxformer as jf

config = jf.Config(
    model=jf.presets.llama(vocab_size=2048, d_model=192, n_layers=4, n_heads=6, n_kv_heads=2, max_length=256, tied_head=True),
    data=jf.DataConfig(vocab_size=2048, length=256, batch_size=16, validation_rows=256),
    optim=jf.OptimConfig(lr=3e-3, warmup_steps=50),
    train=jf.TrainConfig(steps=300, eval_every=100, prompt="def "),
)
