"""An objective and a data set from outside the library, for the tests of runs: embeddings of pairs, from a Python iterator."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxformer as jf


def contrastive(cfg, train):
    """Each first half must be nearest to its own second half; the scale is an option of the run's."""

    def objective(params, batch, rng):
        first, second = (jf.hidden(params, batch[name], cfg).mean(1) for name in ("first", "second"))
        scores = first @ second.T / (1.0 + train.temperature)
        return -jnp.diagonal(jax.nn.log_softmax(scores)).sum(), {"weight": jnp.float32(len(scores))}

    return objective


def itself(params, batch, rng):
    return jnp.float32(0), {"weight": jnp.float32(1)}


def of_the_model(cfg):
    return itself


number = 3


def no_objective(cfg, train):
    return "nothing"


class Pairs:
    """Tokens, and the same tokens reversed."""

    summary = {"vocabulary": 64}

    def __init__(self, cfg, tokenizer):
        self.tokenizer = tokenizer or jf.tokenizer.train("byte", [])
        self.train = jf.data.FromIterator(lambda: self.batches(cfg, 0))
        self.validation = [next(self.batches(cfg, 1))]

    @staticmethod
    def batches(cfg, seed):
        rng = np.random.default_rng(seed)
        while True:
            first = rng.integers(0, 64, (cfg.batch_size, cfg.length), dtype=np.int32)
            yield {"first": first, "second": first[:, ::-1].copy()}
