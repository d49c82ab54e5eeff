"""Parameters declared once: a tree of ``Param``, from which come initial values, shapes, decay mask, counts and checks.

The letters of ``Param.dims`` are the dimension key of the package docstring; their sizes come from the config.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxformer.config.architecture import ModelConfig
from jaxformer.config.components import nearest

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
Tree = Any


@dataclasses.dataclass(frozen=True)
class Param:
    """One tensor of parameters."""

    dims: str
    """A letter per axis."""
    init: Initializer
    """``init(key, shape, dtype)``"""
    decay: bool = True
    """Whether weight decay applies."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Sizes of letters that are this tensor's alone, such as ``(("F", 64),)``; those of all other letters are the config's."""
    dtype: str | None = None
    """Its own dtype; None: ``cfg.param_dtype``."""
    inputs: str = ""
    """Of a weight, the letters that it contracts; the letters of ``dims`` that are neither inputs nor outputs (stacked layers,
    experts) number independent weights."""
    outputs: str = ""
    """Of a weight, the letters that it contracts them into."""

    def shape(self, cfg: ModelConfig) -> tuple[int, ...]:
        return _shape(self.dims, cfg.sizes | dict(self.sizes), f"Param({self.dims!r})")


def _shape(letters: str, sizes: dict[str, int], what: str) -> tuple[int, ...]:
    for letter in letters:
        if letter not in sizes:
            hint = "; write the N query heads as KG" if letter == "N" else nearest(letter, sizes)
            raise ValueError(f"{what}: the size of dimension {letter!r} is not known{hint}")
    return tuple(sizes[letter] for letter in letters)


def normal(std: float) -> Initializer:
    """Independent normal values of standard deviation ``std``."""
    return lambda key, shape, dtype: std * jax.random.normal(key, shape, dtype)


def uniform(edge: float) -> Initializer:
    """Independent values, uniform between −edge and edge."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -edge, edge)


def zeros(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The initialiser of biases."""
    return jnp.zeros(shape, dtype)


def ones(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The initialiser of gains."""
    return jnp.ones(shape, dtype)


def weight(
    cfg: ModelConfig,
    inputs: str,
    outputs: str,
    *,
    residual: bool = False,
    batch: str = "",
    sizes: dict[str, int] | None = None,
) -> Param:
    """A weight that contracts the axes ``inputs`` into ``outputs``, initialised as ``cfg.init`` says.

    residual: it writes into the residual stream (see ``cfg.scale_residual_init``). batch: leading letters that number
    independent weights, such as "E". sizes: of letters whose size here is not the config's.
    """
    known = cfg.sizes | (sizes or {})
    what = f"weight({inputs!r}, {outputs!r})"
    fan_in, fan_out = (math.prod(_shape(letters, known, what)) for letters in (inputs, outputs))
    std = {"fan_in": fan_in**-0.5, "xavier": (2 / (fan_in + fan_out)) ** 0.5, "normal": cfg.init_std}[cfg.init]
    if residual and cfg.scale_residual_init:
        std /= (2 * cfg.n_layers) ** 0.5
    edge = std * 3**0.5  # a uniform on (−edge, edge) has this standard deviation
    init = uniform(edge) if cfg.init == "xavier" else normal(std)
    return Param(batch + inputs + outputs, init, sizes=tuple((sizes or {}).items()), inputs=inputs, outputs=outputs)


def bias(dims: str) -> Param:
    """A bias: starts at 0, without weight decay."""
    return Param(dims, zeros, decay=False)


def gain(dims: str) -> Param:
    """A norm's gain: starts at 1, without weight decay."""
    return Param(dims, ones, decay=False)


def stack(spec: Tree, layers: int) -> Tree:
    """The spec of ``layers`` such trees, stacked on a leading axis L."""
    return _map(lambda p: dataclasses.replace(p, dims="L" + p.dims, sizes=(*p.sizes, ("L", layers))), spec)


def bound(spec: Tree, cfg: ModelConfig) -> Tree:
    """``spec`` with the sizes of ``cfg`` written into each tensor, for use inside a model of another config."""

    def sized(p: Param) -> Param:
        sizes = {letter: cfg.sizes[letter] for letter in p.dims if letter in cfg.sizes} | dict(p.sizes)
        return dataclasses.replace(p, sizes=tuple(sizes.items()))

    return _map(sized, spec)


def with_sizes(spec: Tree, sizes: dict[str, int]) -> Tree:
    """``spec`` with ``sizes`` written into the tensors that use those letters."""

    def sized(p: Param) -> Param:
        known = dict(p.sizes)
        more = tuple((letter, size) for letter, size in sizes.items() if letter in p.dims and letter not in known)
        return dataclasses.replace(p, sizes=(*p.sizes, *more)) if more else p

    return _map(sized, spec)


def init(spec: Tree, cfg: ModelConfig, key: jax.Array) -> Tree:
    """Initial values, in ``cfg.param_dtype``. Each tensor's randomness comes from its path (and layer) alone, so adding or
    removing one changes no other."""

    def initial(keys: tuple, param: Param) -> jax.Array:
        path = ".".join(entry.key for entry in keys)
        rng = jax.random.fold_in(key, zlib.crc32(path.encode()))
        shape, dtype = param.shape(cfg), jnp.dtype(param.dtype or cfg.param_dtype)
        if not param.dims.startswith("L"):
            return param.init(rng, shape, dtype)
        by_layer = jax.vmap(lambda layer: jax.random.fold_in(rng, layer))(jnp.arange(shape[0]))
        return jax.vmap(lambda k: param.init(k, shape[1:], dtype))(by_layer)

    return jax.tree_util.tree_map_with_path(initial, spec, is_leaf=_is_param)


def abstract(spec: Tree, cfg: ModelConfig) -> Tree:
    """The tree of ``jax.ShapeDtypeStruct`` that ``init`` would fill: no memory, any size."""
    return _map(lambda p: jax.ShapeDtypeStruct(p.shape(cfg), jnp.dtype(p.dtype or cfg.param_dtype)), spec)


def decay_mask(spec: Tree) -> Tree:
    """True where weight decay applies: not on norms and biases."""
    return _map(lambda p: p.decay, spec)


def count(spec: Tree, cfg: ModelConfig) -> int:
    """Number of parameters."""
    return sum(math.prod(param.shape(cfg)) for _, param in walk(spec))


def active(spec: Tree, cfg: ModelConfig) -> int:
    """Number of parameters that a token meets: of E experts those that it goes to, of all else everything."""

    def met(param: Param) -> int:
        number, rest = math.prod(param.shape(cfg)), param.dims.removeprefix("L")
        is_expert = rest.startswith("E") and len(rest) > 1
        return number // cfg.experts.n_experts * cfg.experts.per_token if is_expert else number

    return sum(met(param) for _, param in walk(spec))


def check(params: Tree, spec: Tree, cfg: ModelConfig) -> None:
    """Raises ValueError with a tree diff (missing, unexpected, shape) where ``params`` is not what ``spec`` declares."""
    if not isinstance(params, dict):
        raise ValueError(f"parameters must be a nested dict of arrays, as jf.init returns, not {type(params).__name__}")
    actual = {path: tuple(jnp.shape(leaf)) for path, leaf in walk(params)}
    expected = {path: param.shape(cfg) for path, param in walk(spec)}
    if lines := diff(expected, actual):
        raise ValueError("parameters do not fit the config:\n" + "\n".join(lines))


def diff(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """Lines that tell what differs between two flat trees ``path -> description``; empty if nothing does."""
    lines = [f"  missing     {path}  {_text(expected[path])}" for path in sorted(expected.keys() - actual.keys())]
    lines += [f"  unexpected  {path}  {_text(actual[path])}" for path in sorted(actual.keys() - expected.keys())]
    lines += [
        f"  differs     {path}  expected {_text(expected[path])}, found {_text(actual[path])}"
        for path in sorted(expected.keys() & actual.keys())
        if expected[path] != actual[path]
    ]
    return lines


def walk(tree: Tree) -> Iterator[tuple[str, Any]]:
    """``(path, leaf)`` for every leaf of a nested dict, paths joined with dots."""
    yield from flatten_dict(tree, sep=".").items()


def _text(description: Any) -> str:
    if isinstance(description, tuple) and all(isinstance(n, int) for n in description):
        return "[" + ", ".join(map(str, description)) + "]"
    return str(description)


def _is_param(leaf: Any) -> bool:
    return isinstance(leaf, Param)


def _map(f: Callable[[Param], Any], spec: Tree) -> Tree:
    return jax.tree.map(f, spec, is_leaf=_is_param)
