"""``check_invariants``: what has to hold of every model, tried on one, with small random inputs.

Each check compares two ways to the same numbers, after it has seen that they would differ if the model were wrong.
"""

import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.config.components import nearest
from jaxformer.cost.table import Table
from jaxformer.nn import cache_spec, model
from jaxformer.nn.mistakes import answers_mistakes
from jaxformer.parallel.sharding import ACTIVATIONS, MeshConfig, partition_spec, shardings
from jaxformer.training.objective import NextToken

Difference = tuple[float, str]
"""The largest difference, relative to the largest number, and where it is."""
ROUNDINGS = 64
"""Roundings of the last bit that float32 results of one layer may be apart: sums of up to some hundred terms in another order,
which the next layers amplify."""


QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of XLA for CPUs: small programs compile far longer than they run."""


class _Failed(Exception):
    """What a check found in place of a difference."""


class _NotApplicable(Exception):
    """Why a check says nothing of this model."""


@dataclass(frozen=True)
class Invariant:
    """One row of the table."""

    name: str
    claim: str
    """What was compared."""
    difference: float | None
    """The largest one, relative to the largest number it was compared with; None where nothing could be compared."""
    tolerance: float
    reason: str
    """Why the tolerance is what it is."""
    result: str
    """"ok", "FAILED" or "not applicable"."""
    note: str = ""
    """Of a failure, where it is and what usually causes it; else why the check does not apply."""


@dataclass(frozen=True)
class Invariants:
    """What ``check_invariants`` returns: rows, and true if none of them failed. ``str`` gives a plain table."""

    title: str
    rows: tuple[Invariant, ...]

    def __bool__(self) -> bool:
        return all(row.result != "FAILED" for row in self.rows)

    def __iter__(self) -> Iterator[Invariant]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(row.name for row in self.rows if row.result == "FAILED")

    def __str__(self) -> str:
        cells = [
            (
                row.name,
                row.claim,
                "" if row.difference is None else f"{row.difference:.1e}",
                f"{row.tolerance:.1e}, {row.reason}",
                f"{row.result}: {row.note}" if row.result == "not applicable" else row.result,
            )
            for row in self.rows
        ]
        failures = [f"{row.name}: {row.note}" for row in self.rows if row.result == "FAILED"]
        table = Table(("check", "compares", "difference", "tolerance", "result"), cells)
        return "\n\n".join([self.title, table.text(), *failures])


class _Trial:
    """A model in float32, inputs for it, and its programs, compiled once."""

    def __init__(self, cfg: ModelConfig, params: Any, key: jax.Array, batch: int, length: int):
        self.cfg = cfg.with_execution(dtype="float32", attention_kernel="auto", remat="none", remat_save=())
        self.given = cfg
        self.params = params
        self.rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
        self.half = length // 2
        self.tokens = self.ids(batch, length)
        self.source = {"source": self.ids(batch, length)} if cfg.encoder_layers else {}
        depth = 1 + cfg.n_layers + cfg.encoder_layers
        self.tolerance = ROUNDINGS * float(np.finfo(np.float32).eps) * depth
        self.tolerances = {
            "exact": (0.0, "the same or not"),
            "float32": (self.tolerance, f"{ROUNDINGS} roundings of float32 a layer"),
            "bfloat16": (4 * 2**-8 * depth**0.5, "4 roundings of bfloat16, √ layers"),
        }
        # Made anew for each trial: programs of components that have been edited since are never used again.
        self.jit = functools.partial(jax.jit, compiler_options=QUICK if jax.default_backend() == "cpu" else None)
        run = lambda params, tokens, rows, cfg: output(params, tokens, cfg, **rows)
        self.run_program = self.jit(run, static_argnums=3)
        self.gradient = self.jit(jax.value_and_grad(_loss), static_argnums=2)
        self.whole = self.run(self.tokens)
        self._plain: list[np.ndarray] = []

    def ids(self, batch: int, length: int) -> np.ndarray:
        return self.rng.integers(0, self.cfg.vocab_size, (batch, length), dtype=np.int32)

    def run(self, tokens, *, cfg: ModelConfig | None = None, cache=None, **rows) -> Any:
        """Logits (hidden states of a model without a head), and with a cache the next one."""
        rows = self.source | rows if cache is None else {"cache": cache, **rows}
        logits, cache = self.run_program(self.params, tokens, rows, cfg or self.cfg)
        return np.asarray(logits) if cache is None else (np.asarray(logits), cache)

    def plain(self, number: int) -> np.ndarray:
        """The same without ``jit``: the first time, the second."""
        while len(self._plain) <= number:
            self._plain.append(np.asarray(output(self.params, self.tokens, self.cfg, **self.source)[0]))
        return self._plain[number]

    def batch(self, rows: int) -> dict[str, np.ndarray]:
        """A training batch of so many rows."""
        entries = {"tokens": self.tokens, "targets": np.roll(self.tokens, -1, 1), **self.source}
        entries["weights"] = np.ones(self.tokens.shape, np.float32)
        return {name: np.resize(entry, (rows, *entry.shape[1:])) for name, entry in entries.items()}

    def apart(self, left: Any, right: Any) -> Difference:
        """How far two arrays [B, T, ...] are apart."""
        left, right = np.asarray(left, np.float32), np.asarray(right, np.float32)
        size = np.abs(right).max() or 1.0
        by_token = np.nan_to_num(np.abs(left - right).max(-1) / size, nan=np.inf)
        row, column = np.unravel_index(by_token.argmax(), by_token.shape)
        return float(by_token.max()), f"row {row}, position {column}"

    def must_differ(self, left: Any, right: Any, what: str) -> None:
        """Raises ``_Failed`` where two results agree that a check needs to be different."""
        if self.apart(left, right)[0] <= 8 * self.tolerance:
            raise _Failed(f"the check shows nothing, because {what}")


def output(params, tokens, cfg: ModelConfig, **rows) -> tuple[jax.Array, Any]:
    """Logits, or hidden states of a model without a head; and the cache."""
    out = model.apply(params, tokens, cfg, **rows)
    return model.head(params, out.hidden, cfg) if cfg.has_head else out.hidden, out.cache


def _loss(params, batch, cfg: ModelConfig) -> jax.Array:
    """A scalar that depends on every parameter: the loss of training; of what no loss reads, random sums."""
    total = jnp.zeros(())
    inputs = {name: batch[name] for name in ("source",) if name in batch}
    if cfg.has_head:
        total, sums = NextToken(cfg, training=False)(params, batch, None)
        total = total / sums["weight"]
    if cfg.pooler or not cfg.has_head:
        hidden_BTD = model.hidden(params, batch["tokens"], cfg, **inputs)
        results = [hidden_BTD] * (not cfg.has_head) + [model.pooled(params, hidden_BTD, cfg)] * cfg.pooler
        total += sum((x * jax.random.normal(jax.random.key(0), x.shape)).mean() for x in results)
    return total


# The checks. Each returns the difference that it found.


def _influence(t: _Trial) -> np.ndarray:
    """[T, T]: the largest gradient of each position's output by each position's input."""
    weights = t.rng.standard_normal(t.whole.shape[-1]).astype(np.float32)
    source = {name: ids[:1] for name, ids in t.source.items()}

    def outputs(x_BTD):
        return output(t.params, None, t.cfg, embeddings=x_BTD, **source)[0][0] @ weights

    x_BTD = jnp.asarray(t.params["embedding"]["token"], jnp.float32)[t.tokens[:1]]
    return np.abs(np.asarray(t.jit(jax.jacrev(outputs))(x_BTD))).max(-1)[:, 0]


def _causal(t: _Trial) -> Difference:
    seen = _influence(t)
    if not t.cfg.causal:
        blind = [
            i
            for i in range(len(seen))
            if not (seen[i, i + 1 :].any() or i + 1 == len(seen)) or not (seen[i, :i].any() or not i)
        ]
        return len(blind) / len(seen), f"positions {blind} see one side only"
    if not np.tril(seen, -1).any():
        raise _Failed("the check shows nothing, because no output depends on an earlier token")
    ahead = np.triu(seen, 1)
    reader, read = np.unravel_index(ahead.argmax(), ahead.shape)
    return float(ahead.max()), f"the output at position {reader} depends on the token at {read}"


def _future(t: _Trial) -> Difference:
    if not t.cfg.causal:
        raise _NotApplicable("causal=False")
    changed = np.where(np.arange(t.tokens.shape[1]) < t.half, t.tokens, (t.tokens + 1) % t.cfg.vocab_size)
    logits = t.run(changed)
    t.must_differ(logits[:, t.half :], t.whole[:, t.half :], "other tokens give the same outputs")
    return t.apart(logits[:, : t.half], t.whole[:, : t.half])


def _cached(t: _Trial) -> Difference:
    if not cache_spec.can_decode(t.cfg):
        raise _NotApplicable("causal=False" if not t.cfg.causal else "attention has no cache(cfg)")
    batch, length = t.tokens.shape
    empty = cache_spec.init_cache(t.cfg, batch, length)
    last, _ = t.run(t.tokens[:, -1:], cache=empty, **t.source)
    t.must_differ(last, t.whole[:, -1:], "the last token gives the same output without what came before")
    cache, steps = empty, []
    for i in range(length):
        logits, cache = t.run(t.tokens[:, i : i + 1], cache=cache, **(t.source if i == 0 else {}))
        steps.append(logits)
    lengths = np.maximum(1, t.half - np.arange(batch) % 2)[:, None]
    valid, row = np.arange(t.half) < lengths, np.arange(batch)[:, None]
    prompts, cache = t.run(t.tokens[:, : t.half], cache=empty, valid=valid, **t.source)
    after = lengths + np.arange(t.half)
    chunk, _ = t.run(t.tokens[row, after], cache=cache, valid=np.ones_like(valid))
    read = t.apart(np.where(valid[..., None], prompts, t.whole[:, : t.half]), t.whole[:, : t.half])
    return max(t.apart(np.concatenate(steps, 1), t.whole), read, t.apart(chunk, t.whole[row, after]))


def _batched(t: _Trial) -> Difference:
    t.must_differ(t.whole[:1], t.whole[1:2], "rows of different tokens give the same outputs")
    rows = [slice(i, i + 1) for i in range(len(t.tokens))]
    alone = [t.run(t.tokens[row], **{name: ids[row] for name, ids in t.source.items()}) for row in rows]
    return t.apart(np.concatenate(alone), t.whole)


def _padded(t: _Trial, side: slice, may_agree: bool) -> Difference:
    """All rows but the last are padded, with tokens that may not be read, up to the length of the last."""
    valid = np.zeros(t.tokens.shape, bool)
    valid[:, side], valid[-1] = True, True
    alone = t.run(t.tokens[:, side])
    if not may_agree:
        t.must_differ(t.whole[:-1, side], alone[:-1], "padding that is read changes no output")
    logits = t.run(t.tokens, valid=valid)
    return max(t.apart(logits[:-1, side], alone[:-1]), t.apart(logits[-1:], t.whole[-1:]))


def _source(t: _Trial) -> Difference:
    if not t.source:
        raise _NotApplicable("no encoder")
    found = []
    for side in (slice(None, t.half), slice(t.half, None)):
        valid = np.zeros(t.tokens.shape, bool)
        valid[:, side] = True
        alone = t.run(t.tokens, source=t.source["source"][:, side])
        t.must_differ(t.whole, alone, "the source changes no output")
        found.append(t.apart(t.run(t.tokens, source_valid=valid), alone))
    return max(found)


def _packed(t: _Trial) -> Difference:
    batch, length = t.tokens.shape
    segments = np.broadcast_to(np.repeat([1, 2], t.half), (batch, length))
    positions = np.broadcast_to(np.tile(np.arange(t.half), 2), (batch, length))
    alone = np.concatenate([t.run(t.tokens[:, : t.half]), t.run(t.tokens[:, t.half :])], 1)
    joined = t.run(t.tokens, segments=np.ones_like(segments), positions=positions)
    t.must_differ(joined, alone, "one segment or two give the same outputs")
    return t.apart(t.run(t.tokens, segments=segments, positions=positions), alone)


def _positions(t: _Trial) -> Difference:
    places = np.broadcast_to(np.arange(t.tokens.shape[1]), t.tokens.shape)
    if t.apart(t.run(t.tokens, positions=places[:, ::-1]), t.whole)[0] <= 8 * t.tolerance:
        raise _NotApplicable("no component reads the positions")
    return t.apart(t.run(t.tokens, positions=places), t.whole)


def _embeddings(t: _Trial) -> Difference:
    rows = jnp.asarray(t.params["embedding"]["token"], jnp.float32)[t.tokens]
    t.must_differ(t.run(None, embeddings=rows[:, ::-1]), t.whole, "other embeddings give the same outputs")
    return t.apart(t.run(None, embeddings=rows), t.whole)


def _repeatable(t: _Trial) -> Difference:
    return max(t.apart(t.run(t.tokens), t.whole), t.apart(t.plain(1), t.plain(0)))


def _jit(t: _Trial) -> Difference:
    return t.apart(t.plain(0), t.whole)


def _scanned(t: _Trial) -> Difference:
    other = t.cfg.with_execution(scan=not t.cfg.execution.scan)
    _other_programs(*(t.run_program.trace(t.params, t.tokens, t.source, cfg) for cfg in (t.cfg, other)))
    return t.apart(t.run(t.tokens, cfg=other), t.whole)


def _other_programs(*traces: Any) -> None:
    if len({str(trace.jaxpr) for trace in traces}) < len(traces):
        raise _Failed("the check shows nothing, because both ways are one program")


def _of_gradients(left: Any, right: Any) -> Difference:
    """The largest difference of two trees, of each tensor relative to its largest number or a thousandth of the largest of all:
    some gradients, such as those of biases of keys, are nothing but rounding."""
    pairs = [
        (path, np.asarray(x), np.asarray(y)) for (path, x), (_, y) in zip(specs.walk(left), specs.walk(right), strict=True)
    ]
    least = 1e-3 * max(np.abs(y).max() for _, _, y in pairs)
    apart = [(float(np.abs(x - y).max() / max(np.abs(y).max(), least)), path) for path, x, y in pairs]
    return max((np.inf if np.isnan(value) else value, path) for value, path in apart)


def _remat(t: _Trial) -> Difference:
    given = t.given.execution
    how = {"remat": "full"} if given.remat == "none" else {"remat": given.remat, "remat_save": given.remat_save}
    other, batch = t.cfg.with_execution(**how), t.batch(len(t.tokens))
    _other_programs(*(t.gradient.trace(t.params, batch, cfg) for cfg in (t.cfg, other)))
    return _of_gradients(t.gradient(t.params, batch, other)[1], t.gradient(t.params, batch, t.cfg)[1])


def _gradients(t: _Trial) -> Difference:
    """The share of tensors, by layer, that training could not change, or would change to what is no number."""
    number, wrong = 0, []
    for path, leaf in specs.walk(t.gradient(t.params, t.batch(len(t.tokens)), t.cfg)[1]):
        if path.endswith("moe.bias"):  # the balance of experts moves it, not a gradient
            continue
        for layer, x in enumerate(np.asarray(leaf) if ".layers." in path else [np.asarray(leaf)]):
            number += 1
            if not (np.isfinite(x).all() and x.any()):
                at = f" of its layer {layer}" if ".layers." in path else ""
                wrong.append(f"the gradient of {path}{at} is {'0' if np.isfinite(x).all() else 'not finite'}")
    return len(wrong) / number, "; ".join(wrong[:3])


def _sharded(t: _Trial) -> Difference:
    devices = jax.local_devices()
    if len(devices) == 1:
        raise _NotApplicable("one device; XLA_FLAGS=--xla_force_host_platform_device_count=8 simulates 8 on a CPU")
    axes, left = {}, len(devices)
    for axis in ("tensor", "fsdp", "expert" if t.cfg.experts.n_experts % 2 == 0 < t.cfg.experts.n_experts else "context"):
        if left % 2 == 0:
            axes[axis], left = 2, left // 2
    mesh = MeshConfig(**axes).make(devices)
    rows = left * axes.get("fsdp", 1) * axes.get("expert", 1)
    batch = t.batch(-(-len(t.tokens) // rows) * rows)
    expected = t.gradient(t.params, batch, t.cfg)
    spread = {
        name: jax.device_put(x, NamedSharding(mesh, partition_spec("BT", x.shape, ACTIVATIONS, mesh)))
        for name, x in batch.items()
    }
    params = jax.device_put(t.params, shardings(model.spec(t.cfg), t.cfg, mesh))
    if all(x.sharding.is_fully_replicated for x in jax.tree.leaves((spread, params))):
        raise _Failed("the check shows nothing, because every device holds everything")
    with jax.set_mesh(mesh):
        found = t.gradient(params, spread, t.cfg)
    return _of_gradients({"loss": found[0], **found[1]}, {"loss": expected[0], **expected[1]})


def _bfloat16(t: _Trial) -> Difference:
    """Root mean squares by token; of models with experts, that of the median token: a router's near ties go either way."""
    low = t.cfg.with_execution(dtype="bfloat16")
    hidden = jax.eval_shape(lambda: model.hidden(t.params, t.tokens, low, **t.source))
    if hidden.dtype != jnp.bfloat16:
        raise _Failed(f"the hidden states of a bfloat16 model are {hidden.dtype}")
    logits = t.run(t.tokens, cfg=low)
    error = np.sqrt(np.square(logits.astype(np.float32) - t.whole).mean(-1) / np.square(t.whole).mean())
    if not error.any():
        raise _Failed("the check shows nothing, because both dtypes give the same numbers")
    value = np.median(error) if t.cfg.experts.n_experts else error.max()
    return float(np.nan_to_num(value, nan=np.inf)), "of the root mean square"


@dataclass(frozen=True)
class _Check:
    """A check, and what a user has to know of it."""

    run: Callable[[_Trial], Difference]
    claim: str
    cause: str
    """What usually makes it fail."""
    kind: str = "float32"
    """What its tolerance comes from: "exact", "float32" or "bfloat16"."""
    may_refuse: bool = False
    """Whether a component may say by a ValueError that it does not do this."""


_PADDING = (
    "a token of padding is read: attention has to hide what info.valid marks, and a recurrence to leave its state as it is"
)
CHECKS: dict[str, _Check] = {
    "causal": _Check(
        _causal,
        "gradients: no output depends on a later input; without causality, on both sides",
        "tokens are mixed without the mask: use jf.mask.visible(info, key_info, causal=cfg.causal, ...), and nothing but "
        "attention may mix positions",
        "exact",
    ),
    "future": _Check(_future, "outputs before tokens that change = unchanged", "a choice or statistic reads the whole row"),
    "cached": _Check(
        _cached,
        "with a cache, by token and in chunks = without",
        "a step takes its place from the chunk, not from info.position and the key_info of cache.extend; or the mask, or a "
        "state that padding changes, forgets what came before",
    ),
    "batched": _Check(_batched, "a batch = each row alone", "a mean, norm or other statistic is taken over the batch"),
    "padded right": _Check(
        lambda t: _padded(t, slice(None, t.half), t.cfg.causal), "rows padded on the right = alone", _PADDING, may_refuse=True
    ),
    "padded left": _Check(
        lambda t: _padded(t, slice(t.half, None), False), "rows padded on the left = alone", _PADDING, may_refuse=True
    ),
    "packed": _Check(
        _packed,
        "two segments in a row = each alone",
        "the component mixes tokens of different segments: read info.segment, as jf.mask.visible does; a recurrence has to "
        "start anew, or to raise a ValueError",
        may_refuse=True,
    ),
    "source": _Check(_source, "sources padded on either side = alone", f"in the encoder or in cross-attention, {_PADDING}"),
    "positions": _Check(_positions, "positions 0, 1, 2, … = none given", "positions are counted, not read from info.position"),
    "embeddings": _Check(
        _embeddings, "rows of the embedding table = their tokens", "something but the embedding depends on the ids"
    ),
    "repeatable": _Check(
        _repeatable,
        "the same call twice = once",
        "a component draws random numbers without rng, or keeps a state in Python between calls",
        "exact",
    ),
    "jit": _Check(
        _jit, "without jit = with", "values depend on Python state, or are read at trace time: numpy, float(x), if x > 0"
    ),
    "scanned": _Check(
        _scanned,
        "layers as a scan = unrolled",
        "a layer knows its number, or Python state counts the calls: a scan traces once",
    ),
    "remat": _Check(
        _remat, "gradients, recomputed = kept", "the backward pass computes something else: Python state, or a custom_vjp"
    ),
    "gradients": _Check(
        _gradients,
        "finite and not 0, for every parameter of every layer",
        "a parameter is not used, is behind stop_gradient or a rounding, or behind another that starts at 0; what is not "
        "finite is often the gradient of a branch that jnp.where does not take (sqrt, log, division at 0)",
        "exact",
    ),
    "sharded": _Check(
        _sharded,
        "gradients on a mesh = on one device",
        "inside shard_map a sum over the mesh is missing (jax.lax.psum), or something depends on the number of devices",
    ),
    "bfloat16": _Check(
        _bfloat16,
        "outputs in bfloat16 near float32",
        "an array of another dtype joins (cast to x.dtype), or a sum, softmax, norm, angle or state is not float32",
        "bfloat16",
    ),
}
"""The checks by name, in the order of the table."""


def _row(name: str, check: _Check, t: _Trial) -> Invariant:
    tolerance, reason = t.tolerances[check.kind]
    row = Invariant(name, check.claim, None, tolerance, reason, "FAILED")
    try:
        difference, where = check.run(t)
    except _NotApplicable as error:
        return dataclasses.replace(row, result="not applicable", note=str(error))
    except _Failed as error:
        return dataclasses.replace(row, note=f"{error}. Usually, {check.cause}.")
    except Exception as error:
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        if check.may_refuse and _is_refusal(error):
            return dataclasses.replace(row, result="not applicable", note=f"refused with {first}")
        return dataclasses.replace(row, note=f"it raised {first}. Usually, {check.cause}.")
    row = dataclasses.replace(row, difference=difference)
    if difference <= tolerance:
        return dataclasses.replace(row, result="ok")
    return dataclasses.replace(row, note=f"{where}. Usually, {check.cause}.")


def _is_refusal(error: Exception) -> bool:
    """Whether a component raised the error on purpose, by a raise statement of its own and not inside JAX."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    inside = any(f"/{package}/" in frame.filename for package in ("jax", "jaxlib", "numpy"))
    return isinstance(error, ValueError | NotImplementedError) and not inside and (frame.line or "").startswith("raise ")


@answers_mistakes
def check_invariants(
    cfg: ModelConfig,
    params: Any = None,
    *,
    checks: str | Sequence[str] | None = None,
    key: jax.Array | None = None,
    batch: int = 4,
    length: int = 8,
) -> Invariants:
    """Whether a model, with components of your own say, keeps what every model has to: a table, true if nothing failed.

    The model is run as it is, in float32 and by plain XLA (for one check, in bfloat16), without dropout: shrink a large one
    first. params: of ``cfg``, stacked as ``jf.init`` gives them; fresh ones of a size that shows what is wrong unless given.
    checks: names of ``jaxformer.prove.invariants.CHECKS``; all unless given. key: where tokens and parameters come from;
    ``jax.random.key(0)`` unless given. batch: rows, at least 2. length: tokens of a row, even and at least 4.

    Raises ValueError for unknown checks, sizes that are too small, parameters that are not the config's, and what the model
    itself raises when it is called.
    """
    names = list(CHECKS) if checks is None else [checks] if isinstance(checks, str) else list(checks)
    for name in names:
        if name not in CHECKS:
            raise ValueError(f"unknown check {name!r}{nearest(name, CHECKS)}")
    if batch < 2 or length < 4 or length % 2:
        raise ValueError(f"batch={batch} must be at least 2, and length={length} even and at least 4")
    key = jax.random.key(0) if key is None else key
    params = _fresh(cfg, key) if params is None else params
    specs.check(params, model.spec(cfg), cfg)
    trial = _Trial(cfg, params, key, batch, length)
    rows = tuple(_row(name, CHECKS[name], trial) for name in names)
    layers = f"{cfg.encoder_layers} + {cfg.n_layers}" if cfg.encoder_layers else f"{cfg.n_layers}"
    size = f"{specs.count(model.spec(cfg), cfg):,} parameters in {layers} layers"
    result = f"{sum(row.result == 'FAILED' for row in rows)} of {len(rows)} checks failed"
    return Invariants(f"{size}, {batch} rows of {length} tokens: {result}", rows)


def _fresh(cfg: ModelConfig, key: jax.Array) -> Any:
    """Parameters with which no part is without effect: weights of variance 1/inputs whatever ``cfg.init``, embeddings of 1, and
    noise on what is constant at first (gains, biases, weights of 0)."""
    params = model.init(dataclasses.replace(cfg, init="fan_in", init_std=1.0, scale_residual_init=False), key)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())

    def with_noise(x):
        constant = jnp.issubdtype(x.dtype, jnp.floating) and bool(x.min() == x.max())
        return x + 0.1 * rng.standard_normal(x.shape).astype(x.dtype) if constant else x

    return jax.tree.map(with_noise, params)
