"""A small mixture of experts on the source code of the Python standard library.

    python train.py configs/moe_quickstart.py

The quickstart's LLaMA with 8 experts of half its feed-forward's width in every layer, 2 per token: as many active parameters,
and four times as many in the feed-forwards; 5.5M parameters, 2.0M active. The validation loss is 4.28 to 4.32,
depending on rounding (the dense model's: 4.34). It takes 1 min 55 s to 5 min on 2 CPU cores.
"""

import dataclasses

import jaxformer as jf

balance = {"balance_loss": 0.02, "router_z_loss": 0.001}
base = jf.presets.llama(
    vocab_size=2048, d_model=192, n_layers=4, n_heads=6, n_kv_heads=2, max_length=256, tied_head=True, **balance
)
experts = jf.Experts(n_experts=8, per_token=2, d_ff=base.d_ff // 2)

config = jf.Config(
    model=dataclasses.replace(base, experts=experts),
    data=jf.DataConfig(vocab_size=2048, length=256, batch_size=8, validation_rows=64),
    optim=jf.OptimConfig(lr=4e-3, warmup_steps=40),
    train=jf.TrainConfig(steps=400, eval_every=200),
)
