"""The 2017 base model on parallel text, with the paper's schedule: 100,000 steps of about 25,000 target tokens.

    python train.py configs/transformer_base.py --data.path train.en --data.target-path train.de

Made for 8 accelerators (the paper: 12 hours on 8 P100). 63,045,632 parameters with the paper's 37,000 pieces. Not measured.
"""

import jaxformer as jf

config = jf.Config(
    model=jf.presets.transformer_base(scan=True, dtype="bfloat16"),
    data=jf.DataConfig(task="pairs", vocab_size=37_000, length=128, source_length=128, batch_size=512),
    optim=jf.OptimConfig(
        lr=(512 * 4000) ** -0.5,
        schedule="inverse_sqrt",
        warmup_steps=4000,
        beta2=0.98,
        eps=1e-9,
        weight_decay=0.0,
        clip_norm=0.0,
    ),
    train=jf.TrainConfig(steps=100_000, eval_every=2000, label_smoothing=0.1),
)
