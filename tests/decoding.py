"""Models and references that the tests of decoding share."""

import dataclasses
import functools

import jax
import numpy as np
import tiny

import jaxformer as jf

PROMPTS = [[5, 9, 11], [7, 3, 20, 41, 13, 8, 30]]
NEW = 5
LENGTH = 12
PADS = (0, 66)
"""Ids that stand where padding does: 0 is what ``generate`` pads with itself. Neither is ever chosen."""
GREEDY = jf.Sampling(temperature=0.0, banned=PADS, presence_penalty=1000.0)
"""Greedy, no token twice: small models repeat themselves, and rows that say one thing only could not be told apart."""

DEPTHS = {"gpt2": 2, "qwen3": 2, "mistral": 2, "mixed_windows": 2}
"""One layer is enough of the others, which compile twice as fast then."""

forward = jax.jit(jf.forward, static_argnums=2)


@functools.cache
def model(name, layers=None, **fields):
    """A preset with few layers (by ``DEPTHS`` unless given), and parameters."""
    cfg, layers = tiny.PRESETS[name], layers or DEPTHS.get(name, 1)
    window = cfg.window[:layers] if isinstance(cfg.window, tuple) else cfg.window
    cfg = dataclasses.replace(cfg, n_layers=layers, encoder_layers=min(cfg.encoder_layers, layers), window=window)
    return dataclasses.replace(cfg, **fields), tiny.drawn(cfg)


def loud(params):
    """Embeddings of 1,000 for the padding: the smallest weight on it would show."""
    table = params["embedding"]["token"].at[np.array(PADS)].set(1000.0)
    return params | {"embedding": {"token": table}}


def inputs(cfg, rows=2):
    """The source of an encoder–decoder, padded with ``PADS``."""
    given = tiny.inputs(cfg, rows)
    if given:
        given["source"] = np.where(given["source_valid"], given["source"], PADS[1])
    return given


def row_inputs(cfg, row):
    """The source of one row, without its padding."""
    given = inputs(cfg)
    return {"source": given["source"][row : row + 1][:, given["source_valid"][row]]} if given else {}


def next_logits(params, cfg, ids, given):
    """What follows ``ids``, by the forward without a cache; the row is filled up with what causality hides."""
    row = np.array([list(ids) + [4] * (LENGTH - len(ids))])
    return np.asarray(forward(params, row, cfg, **given))[0, len(ids) - 1]


def argmax(logits):
    """The best id, by far enough for float32 in any order of sums."""
    best, second = np.sort(logits)[::-1][:2]
    assert best - second > 1e-3, "a near tie would make the comparison of tokens meaningless"
    return int(logits.argmax())


@functools.cache
def alone(name):
    """Tokens [2, NEW] and their log-probabilities, by running the forward again for every token of every row."""
    cfg, params = model(name)
    tokens, logprobs = [], []
    for row, prompt in enumerate(PROMPTS):
        ids = list(prompt)
        for _ in range(NEW):
            logits = next_logits(params, cfg, ids, row_inputs(cfg, row))
            left_out = np.isin(np.arange(cfg.vocab_size), [*PADS, *ids[len(prompt) :]])
            ids.append(argmax(np.where(left_out, -np.inf, logits)))
            logprobs.append(float(jax.nn.log_softmax(logits)[ids[-1]]))
        tokens.append(ids[len(prompt) :])
    return np.array(tokens), np.array(logprobs).reshape(2, NEW)


def padded(side):
    """``PROMPTS`` as one array, and which of it is valid."""
    width = max(map(len, PROMPTS))
    ids, valid = np.full((2, width), PADS[1]), np.zeros((2, width), bool)
    for row, prompt in enumerate(PROMPTS):
        at = slice(len(prompt)) if side == "right" else slice(width - len(prompt), None)
        ids[row, at], valid[row, at] = prompt, True
    return ids, valid


def close(found, expected, roundings=1e-5):
    """As close as float32 sums in another order are: some hundred roundings of the largest logit, in two layers."""
    assert np.abs(np.asarray(found) - expected).max() <= roundings * np.abs(expected).max()


def widths(monkeypatch):
    """A list that takes up the shape [B, T] of the tokens of every forward that decoding traces."""
    seen, apply = [], jf.model.apply

    def watched(params, tokens, *rest, **given):
        seen.append(tuple(tokens.shape))
        return apply(params, tokens, *rest, **given)

    monkeypatch.setattr(jf.model, "apply", watched)
    return seen
