"""Beam search as its rules are written, in plain Python over the forward without a cache, for the tests to compare with."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import tiny

import jaxformer as jf

EOS, PAD = 1, 0
LENGTH = 12  # of a prompt and all that is generated
BATCH = 8
FILLER = 2  # behind a sequence, where causality hides it

forward = jax.jit(jf.forward, static_argnums=2)

_SIZES: dict[str, Any] = {"vocab_size": 7, "d_model": 8, "n_heads": 2, "n_layers": 1, "d_ff": 12, "max_length": LENGTH}
CONFIGS = {
    "llama": jf.presets.llama(**_SIZES),
    "windowed": jf.presets.mistral_7b(**_SIZES | {"n_layers": 2}, n_kv_heads=1, window=3),
    "paired": jf.presets.transformer_base(**_SIZES, encoder_layers=1, tied_head=False, start_token=PAD),
}
WEIGHTS = 3.0
SEEDS = {"llama": 218, "windowed": 17, "paired": 1}  # hypotheses of many lengths; what each setting changes is asserted
PROMPTS = [[3], [4, 5, 6], [2, 2], [6, 3, 5, 2, 4], [5], [3, 6], [4, 4, 2], [6]]
SOURCES = [[3, 4], [5, 2, 6], [2], [6, 6, 3, 5], [4, 3, 2], [5, 5], [3, 3, 3, 4], [2, 6]]


@functools.cache
def model(name) -> tuple[jf.ModelConfig, dict]:
    """Config and parameters, weights large enough that probabilities are far from equal and depend on the whole prefix."""
    params = tiny.drawn(CONFIGS[name], SEEDS[name])
    return CONFIGS[name], jax.tree.map(lambda p: WEIGHTS * p if p.ndim > 1 else p, params)


class Scorer:
    """Log-probabilities of what may follow a prompt, by running the whole forward."""

    def __init__(self, cfg: jf.ModelConfig, params: dict, prompt, source=None):
        self.cfg, self.params, self.prompt = cfg, params, tuple(prompt)
        self.given = {} if source is None else {"source": np.repeat([source], BATCH, axis=0)}
        self.known: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, several: list[tuple[int, ...]]) -> list[np.ndarray]:
        new = [tokens for tokens in several if tokens not in self.known]
        for start in range(0, len(new), BATCH):
            part = [self.prompt + tokens for tokens in new[start : start + BATCH]]
            ids = np.full((BATCH, LENGTH), FILLER)
            for row, tokens in enumerate(part):
                ids[row, : len(tokens)] = tokens
            logits = np.asarray(forward(self.params, ids, self.cfg, **self.given), np.float64)
            logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            self.known |= {tokens[len(self.prompt) :]: logp[row, len(tokens) - 1] for row, tokens in enumerate(part)}
        return [self.known[tokens] for tokens in several]


@functools.cache
def scorer(name, row, **changes) -> Scorer:
    cfg, params = model(name)
    cfg = dataclasses.replace(cfg, **changes)
    return Scorer(cfg, params, [PAD], SOURCES[row]) if cfg.encoder_layers else Scorer(cfg, params, PROMPTS[row])


@dataclass(frozen=True)
class Rules:
    """The settings of a search."""

    num_beams: int = 3
    max_new_tokens: int = 6
    eos: tuple[int, ...] = (EOS,)
    length_penalty: float = 1.0
    early_stopping: Any = False
    banned: tuple[int, ...] = ()


@dataclass(frozen=True)
class Found:
    tokens: tuple[tuple[int, ...], ...]
    """Best first."""
    scores: tuple[float, ...]
    moved: bool
    """Whether a beam was given up and another continued twice."""


def search(scorer: Scorer, rules: Rules, noise: float = 0.0) -> Found:
    """The finished hypotheses of one row."""
    n, rng = rules.num_beams, np.random.default_rng(0)
    running, finished, moved = [(0.0, ())], [], False
    allowed = [token for token in range(scorer.cfg.vocab_size) if token not in rules.banned]
    for length in range(1, rules.max_new_tokens + 1):
        candidates = []
        for parent, logp in enumerate(scorer([tokens for _, tokens in running])):
            total, tokens = running[parent]
            logp = logp + noise * rng.standard_normal(len(logp))
            candidates += [(total + logp[token], (*tokens, token), parent) for token in allowed]
        candidates.sort(reverse=True)
        over = lambda tokens: tokens[-1] in rules.eos or length == rules.max_new_tokens  # noqa: B023
        # what ends counts if it is among the n best of all, going on or not
        ended = [(total / length**rules.length_penalty, tokens) for total, tokens, _ in candidates[:n] if over(tokens)]
        finished = sorted(finished + ended, reverse=True)[:n]
        going = [candidate for candidate in candidates if not over(candidate[1])][:n]
        running = [(total, tokens) for total, tokens, _ in going]
        moved |= length > 1 and len({parent for *_, parent in going}) < len(going)
        if running and len(finished) == n and not may_improve(running[0][0], finished[-1][0], length, rules):
            break
    return Found(tuple(tokens for _, tokens in finished), tuple(float(score) for score, _ in finished), moved)


def may_improve(best: float, worst: float, length: int, rules: Rules) -> bool:
    """Whether a search with n finished hypotheses goes on: by the sum of the best running one, and the worst finished score."""
    if rules.early_stopping is True:
        return False
    at = rules.max_new_tokens if rules.early_stopping == "never" and rules.length_penalty > 0 else length
    return best / at**rules.length_penalty > worst


@functools.cache
def expected(name: str, rules: Rules, **changes) -> list[Found]:
    """Of every row; no decision is so close that rounding could make it otherwise."""
    rows = [scorer(name, row, **changes) for row in range(len(PROMPTS))]
    found = [search(row, rules) for row in rows]
    noisy = [search(row, rules, noise=1e-5) for row in rows]
    assert [f.tokens for f in noisy] == [f.tokens for f in found]
    return found
