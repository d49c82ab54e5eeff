"""Measuring a model: metrics over a validation split, exact match on pairs, a sample of text."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.config.strict import check_seed
from jaxformer.decode.generate import generate
from jaxformer.decode.sampling import GREEDY, Sampling, only_below
from jaxformer.parallel import multihost
from jaxformer.training.objective import Objective, call, mean_metrics


def make_evaluate(objective: Objective) -> Callable[[Any, dict], dict[str, jax.Array]]:
    """``evaluate(params, batch)``: the sums of the objective of validation, without dropout."""
    judge = getattr(objective, "validation", objective)
    return lambda params, batch: call(judge, params, batch, None)[1]


def validation(
    objective: Objective, evaluate: Callable, params: Any, batches: Iterable[dict], text_bytes: int = 0
) -> dict[str, float]:
    """The objective's metrics over a split, such as loss (nats per token) and accuracy, and bits_per_byte where the split's
    size in bytes is known. Empty for a split without batches.

    evaluate: the compiled ``make_evaluate(objective)``; it must fit the placement of the batches.
    """
    sums: dict[str, Any] = {}
    for batch in batches:
        for name, value in evaluate(params, batch).items():
            sums[name] = sums.get(name, 0.0) + np.asarray(value, np.float64)
    if not sums:
        return {}
    means = mean_metrics(getattr(objective, "validation", objective), sums)
    metrics = {name: float(value) for name, value in means.items() if name != "weight"}
    if text_bytes and "nll" in sums:
        metrics["bits_per_byte"] = float(sums["nll"]) / text_bytes / math.log(2)
    return metrics


def translate(params: Any, cfg: ModelConfig, tok: Any, sources: Sequence[str], length: int, batch_size: int = 250) -> list[str]:
    """The greedy outputs of an encoder–decoder for ``sources``, of at most ``length`` tokens each."""
    encoded = [tok.encode_prompt(text) for text in sources]
    width = max(map(len, encoded), default=0)
    ids = np.array([ids + [tok.pad_id] * (width - len(ids)) for ids in encoded], np.int32)
    valid = np.arange(width) < np.array([len(ids) for ids in encoded])[:, None]
    outputs, sampling = [], only_below(GREEDY, tok.vocab_size, cfg.vocab_size)
    for start in range(0, len(sources), batch_size):
        rows = slice(start, start + batch_size)
        out = generate(
            params,
            None,
            cfg,
            max_new_tokens=length,
            sampling=sampling,
            eos=(tok.eos_id,),
            pad=tok.pad_id,
            source=ids[rows],
            source_valid=valid[rows],
        )
        rows_and_lengths = zip(multihost.to_numpy(out.tokens), multihost.to_numpy(out.lengths), strict=True)
        outputs += [_text(tok, row, length) for row, length in rows_and_lengths]
    return outputs


def exact_match(params: Any, cfg: ModelConfig, tok: Any, pairs: Sequence[tuple[str, str]], length: int) -> float:
    """The share of pairs whose greedy output equals the target, character for character."""
    outputs = translate(params, cfg, tok, [source for source, _ in pairs], length)
    return sum(out == target for out, (_, target) in zip(outputs, pairs, strict=True)) / len(pairs)


def continuation(params: Any, cfg: ModelConfig, tok: Any, prompt: str, tokens: int, temperature: float, seed: int = 0) -> str:
    """``prompt`` with the model's continuation, up to an end token or ``tokens`` tokens.

    Past ``cfg.max_length`` the model continues from the last half of that length: it never sees a position that it was not
    made for.
    """
    check_seed("seed", seed)
    sampling = only_below(Sampling(temperature=temperature) if temperature else GREEDY, tok.vocab_size, cfg.vocab_size)
    ends = (tok.eos_id,) if tok.eos_id >= 0 else ()
    text, key = tok.encode_prompt(prompt) or [*ends, tok.pad_id][:1], jax.random.key(seed)
    goal = len(text) + tokens
    while len(text) < goal:
        read = text if len(text) < cfg.max_length else text[-max(1, cfg.max_length // 2) :]
        room = min(goal - len(text), cfg.max_length - len(read))
        key, part_key = jax.random.split(key)
        out = generate(params, [read], cfg, max_new_tokens=room, sampling=sampling, key=part_key, eos=ends, pad=tok.pad_id)
        text = text + multihost.to_numpy(out.tokens)[0, : int(multihost.to_numpy(out.lengths)[0])].tolist()
        if text[-1] in ends:
            break
    return tok.decode(text)


def _text(tok, row, length) -> str:
    ids = row[:length].tolist()
    return tok.decode(ids[:-1] if ids and ids[-1] == tok.eos_id else ids)
