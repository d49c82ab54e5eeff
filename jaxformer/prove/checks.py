"""The checks of ``check_invariants``. Each returns the difference between two ways to the same numbers, once it has seen that
what it compares matters to them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxformer.config import spec as specs
from jaxformer.nn import cache_spec, model
from jaxformer.parallel.sharding import ACTIVATIONS, MeshConfig, partition_spec, shardings
from jaxformer.prove.trial import Difference, Failed, NotApplicable, Trial, apart, jit, output, trees_apart


@dataclass(frozen=True)
class Check:
    """A check, and what a user has to know about it."""

    run: Callable[[Trial], Difference]
    claim: str
    cause: str
    """What usually makes it fail."""
    tolerance: str = "float32"
    """Which of ``Trial.tolerances`` it has."""
    may_refuse: bool = False
    """Whether a component may say, by raising a ValueError, that it does not do this."""


CHECKS: dict[str, Check] = {}
"""The checks by name, in the order of the table."""
PADDING = "attention reads what info.valid marks as padding, or a recurrence does not leave its state as it is there"


def check(name: str, claim: str, cause: str, tolerance: str = "float32", may_refuse: bool = False) -> Callable:
    """Enters a function into ``CHECKS``."""

    def enter(run: Callable[[Trial], Difference]) -> Callable[[Trial], Difference]:
        CHECKS[name] = Check(run, claim, cause, tolerance, may_refuse)
        return run

    return enter


@check(
    "causal",
    "gradients of each output by later inputs are 0 (causal=False: are not)",
    "positions are mixed outside the mask that jf.mask.visible(info, key_info, causal=cfg.causal, window=cfg.window) gives",
    "exact",
)
def _causal(t: Trial) -> Difference:
    weights = np.asarray(t.rng.standard_normal(t.expected.shape[-1]), np.float32)
    source = {name: ids[:1] for name, ids in t.source.items()}
    outputs = lambda x_BTD: output(t.params, None, t.cfg, embeddings=x_BTD, **source)[0][0] @ weights
    gradients = jit(jax.jacrev(outputs))(t.params["embedding"]["token"][t.tokens[:1]])
    seen = np.abs(np.asarray(gradients)).max(-1)[:, 0]  # [T, T]: output, input
    length = len(seen)
    if not t.cfg.causal:
        blind = [i for i in range(length) if (i > 0) != seen[i, :i].any() or (i + 1 < length) != seen[i, i + 1 :].any()]
        return len(blind) / length, f"positions {blind} do not see both sides"
    if not np.tril(seen, -1).any():
        raise Failed("the check shows nothing: no output depends on an earlier token")
    ahead = np.nan_to_num(np.triu(seen, 1), nan=np.inf)
    reader, read = np.unravel_index(ahead.argmax(), ahead.shape)
    return float(ahead.max()), f"the output at position {reader} depends on the token at {read}"


@check("future", "outputs before tokens that change = unchanged", "a choice or a statistic is made over the sequence")
def _future(t: Trial) -> Difference:
    if not t.cfg.causal:
        raise NotApplicable("causal=False")
    changed = np.where(np.arange(2 * t.half) < t.half, t.tokens, (t.tokens + 1) % t.cfg.vocab_size)
    logits = t.run(changed)
    t.must_differ(logits[:, t.half :], t.expected[:, t.half :], "other tokens give the same outputs")
    return apart(logits[:, : t.half], t.expected[:, : t.half])


@check(
    "cached",
    "with a cache, by token and in chunks = without",
    "a chunk counts its positions from 0 and not by info.position, ignores the key_info that cache.extend gives, or starts "
    "from an empty state; or padding changes the state",
)
def _cached(t: Trial) -> Difference:
    if not cache_spec.can_decode(t.cfg):
        raise NotApplicable("attention has no cache(cfg)" if t.cfg.causal else "causal=False")
    batch, length = t.tokens.shape
    empty = cache_spec.init_cache(t.cfg, batch, length)
    last, _ = t.step(t.tokens[:, -1:], empty, **t.source)
    t.must_differ(last, t.expected[:, -1:], "the last token's output is the same without a cache of those before it")
    cache, steps = empty, []
    for i in range(length):
        logits, cache = t.step(t.tokens[:, i : i + 1], cache, **(t.source if i == 0 else {}))
        steps.append(logits)
    lengths, row = t.half - np.arange(batch)[:, None] % 2, np.arange(batch)[:, None]
    valid, after = np.arange(t.half) < lengths, lengths + np.arange(t.half)
    prompts, cache = t.step(t.tokens[:, : t.half], empty, valid=valid, **t.source)
    chunk, _ = t.step(t.tokens[row, after], cache, valid=np.ones_like(valid))
    prompts = np.where(valid[..., None], prompts, t.expected[:, : t.half])
    parts = [(np.concatenate(steps, 1), t.expected), (prompts, t.expected[:, : t.half]), (chunk, t.expected[row, after])]
    return max(apart(*pair) for pair in parts)


@check("batched", "a batch = each row alone", "a mean, a norm or another statistic is taken over the batch")
def _batched(t: Trial) -> Difference:
    t.must_differ(t.expected[:1], t.expected[1:2], "rows of different tokens give the same outputs")
    rows = [slice(i, i + 1) for i in range(len(t.tokens))]
    alone = [t.run(t.tokens[row], **{name: ids[row] for name, ids in t.source.items()}) for row in rows]
    return apart(np.concatenate(alone), t.expected)


@check("padded right", "rows padded on the right = alone", PADDING, may_refuse=True)
def _padded_right(t: Trial) -> Difference:
    return _padded(t, slice(None, t.half), shows=not t.cfg.causal)


@check("padded left", "rows padded on the left = alone", PADDING, may_refuse=True)
def _padded_left(t: Trial) -> Difference:
    return _padded(t, slice(t.half, None), shows=True)


def _padded(t: Trial, side: slice, shows: bool) -> Difference:
    """Of all rows but the last, only one side is valid. ``shows``: whether outputs differ where the other side is read."""
    valid = np.zeros(t.tokens.shape, bool)
    valid[:, side], valid[-1] = True, True
    alone = t.run(t.tokens[:, side])
    if shows:
        t.must_differ(t.expected[:-1, side], alone[:-1], "padding that is read changes no output")
    logits = t.run(t.tokens, valid=valid)
    return max(apart(logits[:-1, side], alone[:-1]), apart(logits[-1:], t.expected[-1:]))


@check(
    "packed",
    "two segments in a row = each alone",
    "the component mixes tokens of different segments: read info.segment, as jf.mask.visible does; a recurrence starts anew "
    "with each segment, or refuses them by raising a ValueError",
    may_refuse=True,
)
def _packed(t: Trial) -> Difference:
    segments, positions = np.repeat([[1, 2]], t.half, 1), np.tile(np.arange(t.half), 2)[None]
    rows: dict[str, Any] = {"positions": np.broadcast_to(positions, t.tokens.shape)}
    alone = np.concatenate([t.run(t.tokens[:, : t.half]), t.run(t.tokens[:, t.half :])], 1)
    joined = t.run(t.tokens, segments=np.ones_like(t.tokens), **rows)
    t.must_differ(joined, alone, "one segment or two give the same outputs")
    return apart(t.run(t.tokens, segments=np.broadcast_to(segments, t.tokens.shape), **rows), alone)


@check("source", "a source padded on either side = alone", f"in the encoder or in cross-attention, {PADDING}")
def _source(t: Trial) -> Difference:
    if not t.source:
        raise NotApplicable("no encoder")
    differences = []
    for side in (slice(None, t.half), slice(t.half, None)):
        valid = np.zeros(t.tokens.shape, bool)
        valid[:, side] = True
        alone = t.run(t.tokens, source=t.source["source"][:, side])
        t.must_differ(t.expected, alone, "the source changes no output")
        differences.append(apart(t.run(t.tokens, source_valid=valid), alone))
    return max(differences)


@check("positions", "positions 0, 1, 2, … = none given", "the component counts positions, and does not read info.position")
def _positions(t: Trial) -> Difference:
    counted = np.broadcast_to(np.arange(2 * t.half), t.tokens.shape)
    if apart(t.run(t.tokens, positions=counted[:, ::-1]), t.expected)[0] <= 8 * t.tolerance:
        raise NotApplicable("no component reads info.position")
    return apart(t.run(t.tokens, positions=counted), t.expected)


@check("embeddings", "rows of the embedding table = their tokens", "something beside the embedding depends on ids")
def _embeddings(t: Trial) -> Difference:
    rows_BTD = t.params["embedding"]["token"][t.tokens]
    t.must_differ(t.run(None, embeddings=rows_BTD[:, ::-1]), t.expected, "other embeddings give the same outputs")
    return apart(t.run(None, embeddings=rows_BTD), t.expected)


@check(
    "repeatable",
    "the same call twice = once",
    "a component draws random numbers without its rng, or keeps a state in Python from one call to the next",
    "exact",
)
def _repeatable(t: Trial) -> Difference:
    return max(apart(t.run(t.tokens), t.expected), apart(*t.eager))


@check("jit", "without jit = with", "Python state or randomness, which jit reads once, when it traces the function")
def _jit(t: Trial) -> Difference:
    return apart(t.eager[0], t.expected)


@check("scanned", "layers as a scan = unrolled", "Python state that counts layers or calls: a scan traces a layer once for all")
def _scanned(t: Trial) -> Difference:
    other = t.cfg.with_execution(scan=not t.cfg.execution.scan)
    _must_be_two(*(t.program.trace(t.params, t.tokens, t.source, cfg) for cfg in (t.cfg, other)))
    return apart(t.run(t.tokens, other), t.expected)


@check("remat", "gradients, recomputed = kept", "what is recomputed differs: Python state or randomness, or a custom_vjp")
def _remat(t: Trial) -> Difference:
    how = {"remat": t.execution.remat, "remat_save": t.execution.remat_save}
    other = t.cfg.with_execution(**(how if t.execution.remat != "none" else {"remat": "full"}))
    batch = t.batch(len(t.tokens))
    _must_be_two(*(t.gradient.trace(t.params, batch, cfg) for cfg in (t.cfg, other)))
    return trees_apart(*(t.gradient(t.params, batch, cfg)[1] for cfg in (other, t.cfg)))


def _must_be_two(left: Any, right: Any) -> None:
    if str(left.jaxpr) == str(right.jaxpr):
        raise Failed("the check shows nothing: both ways are the same program")


@check(
    "gradients",
    "finite and not 0, for every parameter of every layer",
    "of a gradient of 0, the parameter is not used, or behind stop_gradient, a rounding, or another that starts at 0; of one "
    "that is not finite, a branch that jnp.where does not take (a sqrt, log or division at 0)",
    "exact",
)
def _gradients(t: Trial) -> Difference:
    count, wrong = 0, []
    for path, leaf in specs.walk(t.gradient(t.params, t.batch(len(t.tokens)), t.cfg)[1]):
        if path.endswith("moe.bias"):  # what experts are chosen by: the balance moves it, not a gradient
            continue
        for layer, x in enumerate(np.asarray(leaf) if ".layers." in path else [np.asarray(leaf)]):
            count += 1
            if not (np.isfinite(x).all() and x.any()):
                where = f" in layer {layer}" if ".layers." in path else ""
                wrong.append(f"the gradient of {path}{where} is {'0' if np.isfinite(x).all() else 'not finite'}")
    return len(wrong) / count, "; ".join(wrong[:3])


@check("sharded", "gradients on a mesh = on one device", "a sum over the mesh is missing in a shard_map (jax.lax.psum)")
def _sharded(t: Trial) -> Difference:
    devices = jax.local_devices()
    if len(devices) == 1:
        raise NotApplicable("one device; XLA_FLAGS=--xla_force_host_platform_device_count=8 simulates 8 on a CPU")
    axes: dict[str, Any] = {}
    others, experts = len(devices), t.cfg.experts.n_experts
    for axis in ("tensor", "fsdp", "expert" if experts and experts % 2 == 0 else "context"):
        if others % 2 == 0:
            axes[axis], others = 2, others // 2
    mesh = MeshConfig(**axes).make(devices)
    shards = others * axes.get("fsdp", 1) * axes.get("expert", 1)
    batch = t.batch(-(-len(t.tokens) // shards) * shards)
    on_mesh = lambda x: jax.device_put(x, NamedSharding(mesh, partition_spec("BT", x.shape, ACTIVATIONS, mesh)))
    params = jax.device_put(t.params, shardings(model.spec(t.cfg), t.cfg, mesh))
    spread = jax.tree.map(on_mesh, batch)
    if all(x.sharding.is_fully_replicated for x in jax.tree.leaves((spread, params))):
        raise Failed("the check shows nothing: every device holds everything")
    with jax.set_mesh(mesh):
        on_many = t.gradient(params, spread, t.cfg)
    return trees_apart(*({"loss": loss, **gradients} for loss, gradients in (on_many, t.gradient(t.params, batch, t.cfg))))


@check(
    "bfloat16",
    "outputs in bfloat16 near float32 (root mean squares)",
    "an array is not cast to x.dtype, or positions, angles, sums, a softmax or a norm are computed in bfloat16",
    "bfloat16",
)
def _bfloat16(t: Trial) -> Difference:
    low = t.cfg.with_execution(dtype="bfloat16")
    hidden = jax.eval_shape(lambda: model.hidden(t.params, t.tokens, low, **t.source))
    if hidden.dtype != jnp.bfloat16:
        raise Failed(f"the hidden states of a bfloat16 model are {hidden.dtype}")
    first = 0 if "learned" in t.cfg.positions else 1001  # from 256 on, bfloat16 does not have every integer
    positions = np.broadcast_to(np.arange(first, first + 2 * t.half), t.tokens.shape)
    exact, rounded = (t.run(t.tokens, cfg, positions=positions) for cfg in (t.cfg, low))
    error = np.square(rounded - exact).mean(-1) / np.square(exact).mean()  # by token
    if not error.any():
        raise Failed("the check shows nothing: both dtypes give the same numbers")
    # Some tokens' experts are chosen by next to nothing, and become others: there the median token counts.
    value = np.sqrt(np.median(error) if t.cfg.experts.n_experts else error.mean())
    return float(np.nan_to_num(value, nan=np.inf)), "the outputs differ by more than the dtype explains"
