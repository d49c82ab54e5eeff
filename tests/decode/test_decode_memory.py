"""Decoding writes its cache in place: read from compiled programs for CPUs, with optimisation."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
import tiny

import jaxformer as jf
from jaxformer.decode import sampling
from jaxformer.decode.generate import _generate
from jaxformer.decode.request import Inputs, Request
from jaxformer.nn import cache as layer_cache
from jaxformer.nn import cache_spec as caches

SLOTS, WINDOW = 1024, 320
NAMES = ("llama_gqa", "mistral")


def long(name):
    """A config of one layer whose cache is larger than all else."""
    window = WINDOW if tiny.PRESETS[name].window else None
    cfg = dataclasses.replace(tiny.PRESETS[name], n_layers=1, max_length=SLOTS, window=window)
    return cfg, jf.model.unstack(tiny.drawn(cfg), cfg)


# One step


def step_memory(name, batch, also=lambda before: (), donated=True):
    """Bytes of a layer's cache, and what a compiled step needs; ``also``: what it returns of the cache it was given."""
    cfg, params = long(name)
    cache = jf.init_cache(cfg, batch, SLOTS)
    step = lambda params, token, cache: (jf.forward_cached(params, token, cfg, cache), also(cache))
    run = jax.jit(step, donate_argnums=2 if donated else ())
    memory = run.lower(params, jnp.ones((batch, 1), jnp.int32), cache).compile().memory_analysis()
    return caches.size(cache), memory.alias_size_in_bytes, memory.temp_size_in_bytes


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_updates_a_donated_cache_in_place(name, batch):
    layer, aliased, temporary = step_memory(name, batch)
    assert aliased == layer and temporary < layer


def test_what_is_not_in_place_is_seen(monkeypatch):
    assert step_memory("llama_gqa", 1, donated=False)[1] == 0
    # To read the old values last, every layer's must be copied first
    layer, _, temporary = step_memory("llama_gqa", 8, lambda before: [x.sum() for x in jax.tree.leaves(before)])
    assert temporary >= layer
    monkeypatch.setattr(layer_cache, "_write", by_update)
    layer, _, temporary = step_memory("llama_gqa", 1)
    assert temporary >= layer


# The loop of generation

IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "scatter", "fusion"}
"""Operations that give an array of the cache's shape without passing over it; those inside a fusion are listed themselves."""


def loop_operations(text, shape):
    """Names of the operations with a result of that shape, in what the loops of a compiled program call."""
    bodies, name = {}, None
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = start[1]
        bodies.setdefault(name, []).append(line)
    called = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
    inside = set()
    todo = [body for lines in bodies.values() for line in lines for body in re.findall(r" while\(.*body=%?([\w.\-]+)", line)]
    while todo:
        if (name := todo.pop()) not in inside:
            inside.add(name)
            todo += [other for line in bodies[name] for other in called.findall(line)]
    result = re.compile(rf" = {re.escape(shape)}\S* ([\w\-]+)\(")
    return {found[1] for name in inside for line in bodies[name] if (found := result.search(line))}


def operations(name, batch):
    """On arrays of the cache's shape, in the loop of a generation of 40 tokens."""
    cfg, params = long(name)
    methods, values = sampling.compile_sampling(sampling.GREEDY, batch, cfg.vocab_size)
    request = Request(cfg, max_new_tokens=40, cache_length=SLOTS, eos=(3,), methods=methods)
    inputs = Inputs(jnp.ones((batch, 16), jnp.int32), jnp.full(batch, 3, jnp.int32), jax.random.key(0), values, {})
    text = _generate.lower(params, inputs, request=request).compile().as_text()
    sizes = [batch, cfg.n_kv_heads, WINDOW if cfg.window else SLOTS, cfg.head_dim]
    return loop_operations(text, f"f32[{','.join(map(str, sizes))}]")


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_the_loop_never_passes_over_the_whole_cache_to_write(name, batch):
    found = operations(name, batch)
    assert "scatter" in found and found <= IN_PLACE


def by_where(old, new, slot, axis):
    """As a comparison with every slot: right, but for every slot."""
    slots = jnp.arange(old.shape[axis])
    for t in range(new.shape[axis]):
        here = jnp.expand_dims(slots == slot[:, t, None], [a for a in range(1, old.ndim) if a != axis])
        old = jnp.where(here, jax.lax.slice_in_dim(new, t, t + 1, axis=axis), old)
    return old


def by_update(old, new, slot, axis):
    """A scatter to a single slot, which XLA makes an update that is fused into its readers."""
    row = lambda old, new, slot: old.at[*[slice(None)] * (axis - 1), slot].set(new, mode="drop", unique_indices=True)
    return jax.vmap(row)(old, new, slot)


@pytest.mark.parametrize(("write", "batch", "operation"), [(by_where, 8, "select"), (by_update, 1, "copy")])
def test_other_ways_to_write_are_seen(write, batch, operation, monkeypatch):
    monkeypatch.setattr(layer_cache, "_write", write)
    _generate.clear_cache()
    try:
        assert operation in operations("llama_gqa", batch) - IN_PLACE
    finally:
        _generate.clear_cache()
