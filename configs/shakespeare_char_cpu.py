"""nanoGPT's CPU setting of tinyshakespeare by characters: 4 layers of 128, 2,000 steps of 12 × 64 characters.

    python train.py configs/shakespeare_char_cpu.py --data.path tinyshakespeare.txt

0.81M parameters. On 2 CPU cores about 2 min 20 s; loss over the whole validation split 1.639, 1.634 and 1.624 for seeds 0, 1
and 2 (--train.seed and --data.seed). nanoGPT's README reports 1.88 for this budget.
"""

import jaxformer as jf

config = jf.Config(
    model=jf.presets.llama(vocab_size=65, d_model=128, n_layers=4, n_heads=4, d_ff=344, max_length=64),
    data=jf.DataConfig(tokenizer="char", length=64, batch_size=12, segment_documents=False),
    optim=jf.OptimConfig(lr=3e-3, warmup_steps=100),
    train=jf.TrainConfig(steps=2000, eval_every=500, prompt="\n", sample_tokens=300),
)
