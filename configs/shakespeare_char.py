"""nanoGPT's GPU setting of tinyshakespeare by characters: 6 layers of 384, 5,000 steps of 64 × 256 characters.

    python train.py configs/shakespeare_char.py --data.path tinyshakespeare.txt

Made for one GPU; nanoGPT's README reports a validation loss of 1.47 with its model. Not measured with this one yet.
"""

import jaxformer as jf

config = jf.Config(
    model=jf.presets.llama(
        vocab_size=65,
        d_model=384,
        n_layers=6,
        n_heads=6,
        d_ff=1024,
        max_length=256,
        attention_dropout=0.2,
        residual_dropout=0.2,
        embedding_dropout=0.2,
        scan=True,
    ),
    data=jf.DataConfig(tokenizer="char", length=256, batch_size=64, segment_documents=False),
    optim=jf.OptimConfig(lr=1e-3, warmup_steps=100, beta2=0.99),
    train=jf.TrainConfig(steps=5000, eval_every=250, prompt="\n", sample_tokens=500),
)
