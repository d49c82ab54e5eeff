"""An attention of one's own, with a hyperparameter: sigmoid attention (Ramapuram et al. 2024) with a temperature.

    uv run train.py examples/sigmoid_attention.py --model.attention.temperature 0.5
    uv run jaxformer sample --trust runs/sigmoid_attention "def "

Training, checkpoints, the file of the config, the command line, decoding with a cache and ``jaxformer explain``
take it as they take the built-in ones. The component takes 41 lines, and no line of the library changed.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

import jaxformer as jf


@dataclass(frozen=True)
class SigmoidAttention:
    """Weights are sigmoids of the scores, each by itself, instead of a softmax over the keys."""

    temperature: float = 1.0
    """Divides the scores."""

    def spec(self, cfg):
        """Parameters: the four projections, and a bias per query head that is added to the scores."""
        return {
            "query": jf.weight(cfg, "D", "KGH"),
            "key": jf.weight(cfg, "D", "KH"),
            "value": jf.weight(cfg, "D", "KH"),
            "out": jf.weight(cfg, "KGH", "D", residual=True),
            "score_bias": jf.Param(
                "KG", lambda key, shape, dtype: jnp.full(shape, -jnp.log(cfg.max_length), dtype), decay=False
            ),
        }

    def cache(self, cfg):
        """Keys and values are kept of every token while decoding."""
        return {"key": jf.Param("BKSH", jf.spec.zeros), "value": jf.Param("BKSH", jf.spec.zeros)}

    def apply(self, params, x_BTD, cfg, *, info=None, position_params=None, cross_attention_kv=None, cache=None, rng=None):
        """[B, T, D] -> [B, T, D], and the cache."""
        info = key_info = jf.mask.arange(x_BTD.shape[1]) if info is None else info
        q_BKGTH = jf.dense("BTD,DKGH->BKGTH", x_BTD, params["query"])
        k_BKSH = jf.dense("BSD,DKH->BKSH", x_BTD, params["key"])
        v_BKSH = jf.dense("BSD,DKH->BKSH", x_BTD, params["value"])
        q_BKGTH, k_BKSH = (jf.position.apply(position_params or {}, x, info.position, cfg) for x in (q_BKGTH, k_BKSH))
        if cache is not None:
            kept, key_info, cache = cache.extend({"key": k_BKSH, "value": v_BKSH})
            k_BKSH, v_BKSH = kept["key"], kept["value"]
        scores = jf.multiply("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH, name="scores") / (self.temperature * cfg.head_dim**0.5)
        weights_BKGTS = jax.nn.sigmoid(scores + params["score_bias"][..., None, None].astype(scores.dtype))
        visible_BTS = jf.mask.visible(info, key_info, causal=cfg.causal, window=cfg.window)
        if visible_BTS is not None:
            weights_BKGTS = jnp.where(visible_BTS[:, None, None], weights_BKGTS, 0)
        weights_BKGTS = jf.named(weights_BKGTS, "weights", "BKGTS", cfg)
        mixed_BKGTH = jf.multiply("BKGTS,BKSH->BKGTH", weights_BKGTS, v_BKSH, name="mixed")
        return jf.dense("BKGTH,KGHD->BTD", mixed_BKGTH, params["out"]), cache


config = jf.Config(
    model=jf.presets.llama(
        vocab_size=512,
        d_model=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        max_length=128,
        attention="examples.sigmoid_attention:SigmoidAttention(temperature=2.0)",
    ),
    data=jf.DataConfig(vocab_size=512, length=128, batch_size=8, validation_rows=16),
    optim=jf.OptimConfig(lr=4e-3, warmup_steps=10),
    train=jf.TrainConfig(steps=60, eval_every=30, sample_tokens=40),
)
