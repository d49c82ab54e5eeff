"""Answers to the keywords of other libraries: what the argument is called here, and how to convert its value."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from jaxformer.config.components import nearest

P = ParamSpec("P")
R = TypeVar("R")

_SAMPLING = "temperature top_k top_p min_p typical_p repetition_penalty presence_penalty frequency_penalty logit_bias"
ANSWERS: tuple[tuple[str, str, str], ...] = (
    ("input_ids inputs ids decoder_input_ids", "tokens", "tokens, the ids [B, T]"),
    ("input_ids inputs ids decoder_input_ids tokens", "prompts", "prompts, lists of ids or [B, T], the second argument"),
    ("encoder_input_ids source_ids", "source", "source=, the ids [B, S] that the encoder reads"),
    ("attention_mask padding_mask mask", "valid", "valid={}.astype(bool), True for a real token; causality needs no mask"),
    ("source_mask encoder_attention_mask", "source_valid", "source_valid={}.astype(bool), True for a real token"),
    ("position_ids", "positions", "positions={}, or nothing: tokens are counted"),
    ("segment_ids", "segments", "segments={}"),
    ("token_type_ids", "token_types", "token_types={}"),
    ("inputs_embeds input_embeds", "embeddings", "embeddings={} [B, T, D], with tokens=None"),
    ("labels target_ids", "targets", "targets, the token after each position, already shifted; -100 is not trained"),
    ("labels targets", "", 'jf.loss(params, {{"tokens": ..., "targets": ..., "weights": ...}}, cfg) computes a loss'),
    ("past_key_values kv_cache use_cache", "cache", "a cache of jf.init_cache(cfg, batch, max_len)"),
    (
        "cache past_key_values kv_cache use_cache",
        "",
        "logits, cache = jf.forward_cached(params, tokens, cfg, cache) goes on from a cache; jf.generate makes its own",
    ),
    ("config", "cfg", "cfg, a jf.ModelConfig"),
    ("dtype", "", 'dataclasses.replace(cfg, dtype="bfloat16") is a config that computes in another dtype'),
    ("train training is_training", "key", "key=jax.random.key(seed) for dropout, and no key without dropout"),
    ("deterministic", "key", "key=jax.random.key(seed) for dropout, and no key for deterministic=True"),
    ("rng rngs dropout_rng prng_key random_key seed", "key", "key=jax.random.key(seed)"),
    ("routed", "", "jf.apply(params, tokens, cfg, counted=True).routing has the sums of the experts"),
    ("output_hidden_states", "", 'jf.capture(f, "*.out") also returns the output of every layer'),
    ("output_attentions", "", 'jf.capture(f, "*attention.weights") also returns the weights of every layer'),
    ("max_tokens max_length max_len max_decode_length", "max_new_tokens", "max_new_tokens=, counted without the prompt"),
    ("max_length max_seq_len max_seq_length", "max_len", "max_len=, the most tokens that a row may have"),
    ("batch_size", "batch", "batch, the number of rows"),
    ("do_sample", "sampling", "sampling=jf.Sampling() and key=jax.random.key(seed); greedy unless given"),
    (_SAMPLING, "sampling", "sampling=jf.Sampling({}=...) and, unless it is greedy, key=jax.random.key(seed)"),
    (f"{_SAMPLING} sampling do_sample", "", "jf.generate(..., sampling=jf.Sampling(...), key=jax.random.key(seed)) samples"),
    ("num_return_sequences", "num_return", "num_return=, the number of outputs per prompt"),
    ("beam_size beam_width", "num_beams", "num_beams=, the number of hypotheses per prompt"),
    ("num_beams beam_size length_penalty", "", "jf.beam_search(params, prompts, cfg, max_new_tokens=..., num_beams=...)"),
    ("eos_token_id eos_id", "eos", "eos=, one id or several"),
    ("pad_token_id pad_id", "pad", "pad=, an id"),
    ("stop_strings stop_sequences", "stop", "stop=, a list of strings"),
    ("stop stop_strings stop_sequences", "", "jf.stream(params, prompts, cfg, tok, stop=[...]) ends a row at a text"),
    ("tokenizer", "tok", "tok, the fourth argument"),
    ("assistant_model draft_model", "draft", "draft=jf.DraftModel(params, cfg)"),
)
"""Keywords that a function may not take, the argument it takes instead (or none), and what to do; {} is the keyword."""


def answers_mistakes(function: Callable[P, R], entries: Sequence[str] = ()) -> Callable[P, R]:
    """``function``, with a TypeError that names the right keyword where it is called with one that it does not take.

    entries: what its argument ``batch`` may hold."""
    known = inspect.signature(function).parameters
    names = frozenset(known)
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in known.values())

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kwargs.keys() <= names:
            wrong = next(name for name in kwargs if name not in names)
            raise TypeError(f"{function.__name__}() takes no keyword {wrong!r}{_answer(wrong, names, entries)}")
        return function(*args, **kwargs)

    return checked


def _answer(wrong: str, names: frozenset[str], entries: Sequence[str]) -> str:
    if wrong in entries:
        return f": put it into the batch, as {wrong!r}"
    for words, right, text in ANSWERS:
        if wrong in words.split() and (not right or right in names or right in entries):
            how = "" if not right else ": in the batch, use " if right in entries else ": use "
            return f"{how or ': '}{text.format(wrong)}"
    return nearest(wrong, names)
