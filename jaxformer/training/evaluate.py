"""What a model has learned: loss over a validation split, exact match on pairs, a sample of text."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.decode.generate import generate
from jaxformer.decode.sampling import GREEDY, Sampling, only_below
from jaxformer.parallel import multihost
from jaxformer.training.objective import means


def validation(evaluate: Callable, params: Any, batches: Iterable[dict], text_bytes: int = 0) -> dict[str, float]:
    """loss (nats a token), accuracy and, where the split's size in bytes is known, bits_per_byte.

    evaluate: the compiled ``make_evaluate(cfg)``, with the batch's placement. Of no batches: nothing.
    """
    sums: dict[str, Any] = {}
    for batch in batches:
        for name, value in evaluate(params, batch).items():
            sums[name] = sums.get(name, 0.0) + np.asarray(value, np.float64)
    if not sums:
        return {}
    metrics = {name: float(value) for name, value in means(sums).items() if name != "weight"}
    if text_bytes:
        metrics["bits_per_byte"] = float(sums["nll"]) / text_bytes / math.log(2)
    return metrics


def translate(params: Any, cfg: ModelConfig, tok: Any, sources: Sequence[str], length: int, batch_size: int = 250) -> list[str]:
    """Greedy outputs of an encoder–decoder, at most ``length`` tokens each."""
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
        found = zip(multihost.whole(out.tokens), multihost.whole(out.lengths), strict=True)
        outputs += [_text(tok, row, count) for row, count in found]
    return outputs


def exact_match(params: Any, cfg: ModelConfig, tok: Any, pairs: Sequence[tuple[str, str]], length: int) -> float:
    """Share of pairs whose greedy output is the target, character for character."""
    outputs = translate(params, cfg, tok, [source for source, _ in pairs], length)
    return sum(out == target for out, (_, target) in zip(outputs, pairs, strict=True)) / len(pairs)


def continuation(params: Any, cfg: ModelConfig, tok: Any, prompt: str, tokens: int, temperature: float, seed: int = 0) -> str:
    """``prompt`` and what the model writes after it, up to an end token or ``tokens`` tokens.

    Beyond ``cfg.max_length`` the model goes on from the last half of that: no position is used that it was not made for.
    """
    sampling = only_below(Sampling(temperature=temperature) if temperature else GREEDY, tok.vocab_size, cfg.vocab_size)
    ends = (tok.eos_id,) if tok.eos_id >= 0 else ()
    text, key = tok.encode_prompt(prompt) or [*ends, tok.pad_id][:1], jax.random.key(seed)
    goal = len(text) + tokens
    while len(text) < goal:
        read = text if len(text) < cfg.max_length else text[-max(1, cfg.max_length // 2) :]
        room = min(goal - len(text), cfg.max_length - len(read))
        key, own = jax.random.split(key)
        out = generate(params, [read], cfg, max_new_tokens=room, sampling=sampling, key=own, eos=ends, pad=tok.pad_id)
        text = text + multihost.whole(out.tokens)[0, : int(multihost.whole(out.lengths)[0])].tolist()
        if text[-1] in ends:
            break
    return tok.decode(text)


def _text(tok, row, count) -> str:
    ids = row[:count].tolist()
    return tok.decode(ids[:-1] if ids and ids[-1] == tok.eos_id else ids)
