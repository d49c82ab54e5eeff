"""A hybrid decoder: three layers of retention (Sun et al. 2023), which keep a state of fixed size, to one of attention.

    uv run python examples/hybrid.py

The components differ by layer, and each layer's cache is what its component declares. The script shows that decoding with the
cache, token by token, gives the logits of the whole sequence. The component takes 45 lines, and no line of the library changed.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import jaxformer as jf


@dataclass(frozen=True)
class Retention:
    """A recurrence in place of attention: state ← decay · state + key ⊗ value; the result is query · state."""

    decay: float = 0.9
    """How much of the state is left after a token."""

    def letters(self, cfg):
        """U: width of a value, a dimension that is this component's own."""
        return {"U": 2 * cfg.head_dim}

    def spec(self, cfg):
        """Parameters: the four projections."""
        return {
            "query": jf.weight(cfg, "D", "KGH"),
            "key": jf.weight(cfg, "D", "KH"),
            "value": jf.weight(cfg, "D", "KU"),
            "out": jf.weight(cfg, "KGU", "D", residual=True),
        }

    def cache(self, cfg):
        """The state is all that is kept, however many tokens there were."""
        return {"state": jf.Param("BKHU", jf.spec.zeros, dtype="float32")}

    def apply(self, params, x_BTD, cfg, *, info=None, position_params=None, cross_attention_kv=None, cache=None, rng=None):
        """[B, T, D] -> [B, T, D], and the cache."""
        if info is not None and info.segment is not None:
            raise ValueError("Retention does not know packed documents: set data.segment_documents=False")
        q_TBKGH = jnp.moveaxis(jf.dense("BTD,DKGH->BTKGH", x_BTD, params["query"]), 1, 0)
        k_TBKH = jnp.moveaxis(jf.dense("BTD,DKH->BTKH", x_BTD, params["key"]), 1, 0)
        v_TBKU = jnp.moveaxis(jf.dense("BTD,DKU->BTKU", x_BTD, params["value"]), 1, 0)
        valid_BT = jnp.broadcast_to(True if info is None or info.valid is None else info.valid, x_BTD.shape[:2])

        def step(state_BKHU, token):
            q_BKGH, k_BKH, v_BKU, valid_B = token
            new_BKHU = self.decay * state_BKHU + jf.multiply("BKH,BKU->BKHU", k_BKH, v_BKU, name="write")
            state_BKHU = jnp.where(valid_B[:, None, None, None], new_BKHU, state_BKHU)  # padding changes nothing
            return state_BKHU, jf.multiply("BKGH,BKHU->BKGU", q_BKGH, state_BKHU, name="read")

        zeros = jnp.zeros((len(x_BTD), *k_TBKH.shape[2:], v_TBKU.shape[-1]))
        state_BKHU = zeros if cache is None else cache.entries["state"]
        state_BKHU, y_TBKGU = jax.lax.scan(step, state_BKHU, (q_TBKGH, k_TBKH, v_TBKU, valid_BT.T))
        y_BTKGU = jnp.moveaxis(y_TBKGU, 0, 1).astype(x_BTD.dtype)
        cache = None if cache is None else cache.put({"state": state_BKHU})
        return jf.dense("BTKGU,KGUD->BTD", y_BTKGU, params["out"]), cache


cfg = jf.presets.llama(
    vocab_size=256,
    d_model=64,
    n_layers=8,
    n_heads=4,
    n_kv_heads=2,
    max_length=64,
    attention=(Retention(0.9), Retention(0.9), Retention(0.9), "grouped") * 2,
    scan=True,  # by the period of four layers
)


def main() -> None:
    """Compares decoding with the cache with the forward of the whole sequence."""
    params = jf.init(cfg, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 24))
    whole = jf.forward(params, tokens, cfg)
    cache, steps = jf.init_cache(cfg, batch=2, max_len=24), []
    for t in range(tokens.shape[1]):
        logits, cache = jf.forward_cached(params, tokens[:, t : t + 1], cfg, cache)
        steps.append(logits)
    difference = float(jnp.abs(jnp.concatenate(steps, axis=1) - whole).max())
    print(jf.explain(cfg, 2, 24))
    print(f"cached and whole logits differ by at most {difference:.1e}, of {float(jnp.abs(whole).max()):.1f}")
    print("generated:", jf.generate(params, [[1, 2, 3]], cfg, max_new_tokens=12).tokens[0].tolist())
    assert difference < 1e-4


if __name__ == "__main__":
    main()
