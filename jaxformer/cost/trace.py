"""The steps of a forward, found by tracing the model's own code on shapes: nothing is computed, and nothing described twice.

``nn.named`` tells a watcher of every activation and product. The traced program is then searched for products that were not
told of, as a component from outside may have, so that none is left out.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, use_abstract_mesh

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.config.checks import BY_LAYER
from jaxformer.nn import model
from jaxformer.nn.named import scope, watch


@dataclass(frozen=True)
class Step:
    """A step of the forward: a product, or a named activation. Letters, shape, dtype and bytes are those of its result; bytes
    and FLOPs those of one layer."""

    name: str
    formula: str
    """The einsum; empty for a named activation, which results from elementwise operations."""
    letters: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    flops: int
    """2 per multiply-add of a product."""
    times: int = 1
    """How many layers do it."""
    share: float = 0.0
    """The share of all FLOPs that this step has in all ``times`` layers."""
    device_shape: tuple[int, ...] = ()
    """The shape on one device, by the table ``sharding.ACTIVATIONS``. Named activations are constrained to it; where XLA leaves
    the result of a product is its own choice."""


def steps(cfg: ModelConfig, batch: int, length: int) -> list[Step]:
    """The steps for ``batch`` rows of ``length`` tokens (an encoder reads as many), in the order in which they run. Layers that
    are alike are one. What ``mtp`` adds in training comes last. Raises ValueError as ``jf.forward`` does."""
    # A kernel that never holds the scores computes the same products, which plain attention shows.
    small, groups = distinct(cfg.with_execution(attention_kernel="xla"))
    abstract = specs.abstract(model.spec(small), small)
    params = jax.eval_shape(functools.partial(model.unstack, cfg=small), abstract)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    notes = _Notes()
    with use_abstract_mesh(AbstractMesh((), ())):  # a mesh that is set would constrain parameters before they are used
        program = jax.make_jaxpr(functools.partial(_run, notes, small))(params, ids)
    untold: dict[int, list[Step]] = {}
    runs: dict[int, int] = {}
    last = -1
    for product in _Search(notes.mark).products(program.jaxpr, ""):
        if isinstance(product, Step):
            untold.setdefault(last, []).append(product)
        else:
            last, runs[product[0]] = product
    ordered = untold.get(-1, [])
    for number, step in enumerate(notes.steps):
        ordered += [dataclasses.replace(step, flops=step.flops * runs.get(number, 1)), *untold.get(number, [])]
    grouped = [_grouped(step, groups) for step in ordered]
    products = {(step.name, step.shape) for step in grouped if step.formula}
    # The result of a product has one row, its name or not.
    return [step for step in grouped if step.formula or (step.name, step.shape) not in products]


def _run(notes: "_Notes", cfg: ModelConfig, params: dict, ids: jax.Array) -> Any:
    """What a training step computes of a batch, up to its logits (or to the hidden states of a model without a head)."""
    notes.learn(params)
    with watch(notes):
        hidden_BTD = model.hidden(params, ids, cfg, source=ids if cfg.encoder_layers else None)
        if not cfg.has_head:
            return model.pooled(params, hidden_BTD, cfg) if cfg.pooler else hidden_BTD
        out = [model.head(params, hidden_BTD, cfg)]
        if cfg.mtp:
            next_BTD = model.after_next(params, hidden_BTD, ids, cfg).hidden
            with scope("mtp"):
                out.append(model.head(params, next_BTD, cfg))
        return out


class _Notes:
    """A ``Watcher`` that keeps everything it is told."""

    runs = itertools.count()

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.mark = f"product {next(self.runs)}."
        """Begins the scope of a product in the traced program; the product's number follows. Every object has its own, because
        jax.jit keeps programs with the marks in them."""
        self._params: Any = None
        self._paths: dict[int, str] = {}

    def learn(self, params: Any) -> None:
        """Which array is which parameter: a product is named after the parameter in it."""
        self._params = params  # nothing else gets their ids as long as they live
        self._paths = {id(leaf): path for path, leaf in specs.walk(params)}

    def activation(self, name: str, dims: str, x: jax.Array) -> None:
        self.steps.append(_step(name, "", dims, x, 0))

    def product(self, name: str, equation: str, x: jax.Array, y: jax.Array, by: Callable) -> jax.Array:
        with jax.named_scope(f"{self.mark}{len(self.steps)}"):
            out = by(x, y)
        if not name or name.endswith("."):
            name = self._paths.get(id(y)) or self._paths.get(id(x)) or f"{name}product"
        operands, letters = equation.split("->")
        dims = operands.split(",")
        # If rows choose among several weights, the rows' letter stands on the weights' axis too, and counts rows.
        sizes = dict(zip(dims[1], y.shape, strict=True)) | dict(zip(dims[0], x.shape, strict=True))
        sizes |= dict(zip(letters, out.shape, strict=True))
        self.steps.append(_step(name, equation, letters, out, 2 * math.prod(sizes.values())))
        return out


# Products that nobody told of


PLAIN = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat", "scan")
"""Equations that run each of their programs once, or ``length`` times."""


class _Search:
    """A search for products in a traced program."""

    def __init__(self, mark: str):
        self._mark, self._met = re.compile(re.escape(mark) + r"(\d+)"), set[int]()

    def products(self, jaxpr: Any, at: str, times: int = 1, again: bool = False) -> Iterator[tuple[int, int] | Step]:
        """In order, each product that was told of as its number and how often it runs, and a step for each other. ``again``:
        the program is one that jax.jit traced once and runs once more, which was told of once."""
        for equation in jaxpr.eqns:
            where = "/".join(filter(None, (at, str(equation.source_info.name_stack))))
            if (mark := self._mark.search(where)) and not again:
                yield int(mark[1]), times
            elif equation.primitive.name in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
                yield _untold(equation, where, times)
            else:
                yield from self._inside(equation, where, times, again)

    def _inside(self, equation: Any, where: str, times: int, again: bool) -> Iterator[tuple[int, int] | Step]:
        """The products of the programs inside an equation."""
        is_program = lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")
        inner = [leaf for leaf in jax.tree.leaves(equation.params, is_leaf=is_program) if is_program(leaf)]
        kind = equation.primitive.name
        if kind == "scan":
            times *= equation.params["length"]
        products = []
        for program in (getattr(leaf, "jaxpr", leaf) for leaf in inner):
            products += list(self.products(program, where, times, again or id(program) in self._met))
            self._met.add(id(program))
        if kind not in PLAIN and products:
            raise ValueError(f"{where}: how often the products inside a {kind} run is not known; use nn.named.multiply")
        yield from products


def _untold(equation: Any, where: str, times: int) -> Step:
    kind, (x, y) = equation.primitive.name, (value.aval for value in equation.invars[:2])
    if kind != "dot_general":
        raise ValueError(f"{where}: the FLOPs of a {kind} are not known; use nn.named.multiply")
    (contracted, _), _ = equation.params["dimension_numbers"]
    out = equation.outvars[0].aval
    flops = 2 * math.prod(out.shape) * math.prod(x.shape[axis] for axis in contracted) * times
    names = [name for name in where.split("/") if not name.startswith("product ")]
    formula = next((name for name in reversed(names) if "->" in name), f"{list(x.shape)} · {list(y.shape)}")
    name = ".".join(name for name in names if "->" not in name)
    letters = formula.split("->")[-1] if "->" in formula else ""
    letters = letters if len(letters) == len(out.shape) else ""  # an einsum may split axes, or reorder them
    return _step(f"{name}.product" if name else "product", formula, letters, out, flops)


def _step(name: str, formula: str, letters: str, result: Any, flops: int) -> Step:
    size = math.prod(result.shape) * result.dtype.itemsize
    return Step(name, formula, letters, result.shape, result.dtype.name, size, flops)


# Layers that are alike


def distinct(cfg: ModelConfig) -> tuple[ModelConfig, dict[str, list[list[int]]]]:
    """A config with one layer of each kind, and for each stack the numbers of the layers of each kind."""
    kinds: dict[ModelConfig, list[int]] = {}
    for number, layer in enumerate(cfg.layers):
        kinds.setdefault(layer, []).append(number)
    groups = sorted(kinds.values(), key=max)  # the last is of the last layer's kind, which mtp's block shares
    chosen = [numbers[-1] for numbers in groups]
    fields: dict[str, Any] = {"n_layers": len(chosen)}
    for name in BY_LAYER:
        if type(value := getattr(cfg, name)) is tuple:
            fields[name] = tuple(value[number] for number in chosen)
    if cfg.experts.layers is not None:
        having = tuple(at for at, number in enumerate(chosen) if number in cfg.experts.layers)
        fields["experts"] = dataclasses.replace(cfg.experts, layers=having)
    stacks = {"decoder": groups}
    if cfg.encoder_layers:
        fields["encoder_layers"] = 1
        stacks["encoder"] = [list(range(cfg.encoder_layers))]
    return dataclasses.replace(cfg, **fields), stacks


def label(stack: str, numbers: list[int], kinds: int) -> str:
    """The name of the layers with those numbers, in a stack of so many kinds of layers."""
    if kinds == 1:
        return f"{stack}.layer"
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    runs = [f"{a}-{b}" if b > a else f"{a}" for a, b in zip(starts, ends, strict=True)]
    return f"{stack}.layer[{','.join(runs if len(runs) < 4 else [*runs[:2], '…'])}]"


def _grouped(step: Step, groups: dict[str, list[list[int]]]) -> Step:
    """The step under the name of all the layers that do the same."""
    layer = re.match(r"(encoder|decoder)\.(?:layers\.)?(\d+)\.", step.name)
    if not layer:
        return dataclasses.replace(step, name=step.name.replace("mtp.layer.", "mtp."))
    numbers = groups[layer[1]][int(layer[2])]
    name = f"{label(layer[1], numbers, len(groups[layer[1]]))}.{step.name[layer.end() :]}"
    return dataclasses.replace(step, name=name, times=len(numbers))
