"""What a forward does, step by step: found by tracing the model itself on shapes, so that nothing is computed or described
twice.

``nn.named`` tells of every activation and product. The traced program is then searched for products that were not told of,
as a component of one's own may have: none is left out.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, use_abstract_mesh

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.nn import model
from jaxformer.nn.named import scope, watch


class Step(NamedTuple):
    """A named activation, or a product: its equation (no equation: an activation) and FLOPs, 2 a multiplication and addition;
    and the result's letters, shape and dtype."""

    name: str
    formula: str
    letters: str
    shape: tuple[int, ...]
    dtype: str
    flops: int
    times: int = 1
    """Layers that do it."""


def steps(cfg: ModelConfig, batch: int, length: int) -> list[Step]:
    """Those of ``batch`` rows of ``length`` tokens (an encoder reads as many), in the order in which they are done. Layers that
    are alike are one. What ``mtp`` adds in training comes last. Raises ValueError as ``jf.forward`` does."""
    # A kernel that never holds the scores computes the same products, which plain attention shows.
    small, alike = distinct(cfg.with_execution(attention_kernel="xla"))
    abstract = specs.abstract(model.spec(small), small)
    params = jax.eval_shape(functools.partial(model.unstack, cfg=small), abstract)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    notes = _Notes()
    with use_abstract_mesh(AbstractMesh((), ())):  # on one that is set, parameters would be constrained before they are used
        program = jax.make_jaxpr(lambda *given: _run(notes, small, *given))(params, ids)
    untold: dict[int, list[Step]] = {}
    last = -1
    for number, step in _Search(notes.mark).products(program.jaxpr, ""):
        if step is None:
            last = number
        else:
            untold.setdefault(last, []).append(step)
    ordered = untold.get(-1, [])
    for number, step in enumerate(notes.steps):
        ordered += [step, *untold.get(number, [])]
    placed = [_placed(step, alike) for step in ordered]
    made = {(step.name, step.shape) for step in placed if step.formula}
    return [step for step in placed if step.formula or (step.name, step.shape) not in made]  # of what a product makes, one row


def _run(notes: "_Notes", cfg: ModelConfig, params: dict, ids: jax.Array) -> Any:
    """All that a step of training computes of a batch, up to its logits (or hidden states, of a model without a head)."""
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
    """A ``Watcher`` that keeps all that it is told."""

    runs = itertools.count()

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.mark = f"product {next(self.runs)}."
        """Begins the scope of a product in the traced program; its number follows. It is this object's own, because jax.jit
        keeps programs, and marks in them."""
        self._params: Any = None
        self._paths: dict[int, str] = {}

    def learn(self, params: Any) -> None:
        """Which array is which parameter: a product is called like the one in it."""
        self._params = params  # as long as they live, nothing else has their ids
        self._paths = {id(leaf): path for path, leaf in specs.walk(params)}

    def activation(self, name: str, dims: str, x: jax.Array) -> None:
        self.steps.append(Step(name, "", dims, x.shape, x.dtype.name, 0))

    def product(self, name: str, equation: str, x: jax.Array, y: jax.Array, by: Callable) -> jax.Array:
        with jax.named_scope(f"{self.mark}{len(self.steps)}"):
            out = by(x, y)
        if not name or name.endswith("."):
            name = self._paths.get(id(y)) or self._paths.get(id(x)) or f"{name}product"
        operands, letters = equation.split("->")
        dims = operands.split(",")
        # Of several kernels a row has one: the row's letter stands on the kernel's axis for all of them, and counts rows.
        sizes = dict(zip(dims[1], y.shape, strict=True)) | dict(zip(dims[0], x.shape, strict=True))
        sizes |= dict(zip(letters, out.shape, strict=True))
        self.steps.append(Step(name, equation, letters, out.shape, out.dtype.name, 2 * math.prod(sizes.values())))
        return out


# Products that nobody told of


PLAIN = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat", "scan")
"""Equations that run each of their programs once, or ``length`` times."""


class _Search:
    """For products, in a traced program."""

    def __init__(self, mark: str):
        self._mark, self._met = re.compile(re.escape(mark) + r"(\d+)"), set[int]()

    def products(self, jaxpr: Any, at: str, times: int = 1, again: bool = False) -> Iterator[tuple[int, Step | None]]:
        """The number of each product that was told of, and a step for each other one, in order. ``again``: of a program that
        jax.jit traced once and runs once more, which was told of once."""
        for equation in jaxpr.eqns:
            where = "/".join(filter(None, (at, str(equation.source_info.name_stack))))
            if (mark := self._mark.search(where)) and not again:
                yield int(mark[1]), None
            elif equation.primitive.name in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
                yield -1, _untold(equation, where, times)
            else:
                yield from self._inside(equation, where, times, again)

    def _inside(self, equation: Any, where: str, times: int, again: bool) -> Iterator[tuple[int, Step | None]]:
        """Of the programs that are part of an equation."""
        is_program = lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")
        inner = [leaf for leaf in jax.tree.leaves(equation.params, is_leaf=is_program) if is_program(leaf)]
        kind = equation.primitive.name
        if kind == "scan":
            times *= equation.params["length"]
        found = []
        for program in (getattr(leaf, "jaxpr", leaf) for leaf in inner):
            found += list(self.products(program, where, times, again or id(program) in self._met))
            self._met.add(id(program))
        if kind not in PLAIN and found:
            raise ValueError(
                f"{where}: how often the products inside a {kind} are made is not known; let nn.named.multiply have them"
            )
        yield from found


def _untold(equation: Any, where: str, times: int) -> Step:
    kind, (x, y) = equation.primitive.name, (value.aval for value in equation.invars[:2])
    if kind != "dot_general":
        raise ValueError(f"{where}: there is a {kind}, whose FLOPs are not known; let nn.named.multiply have it")
    (contracted, _), _ = equation.params["dimension_numbers"]
    out = equation.outvars[0].aval
    flops = 2 * math.prod(out.shape) * math.prod(x.shape[axis] for axis in contracted) * times
    names = [name for name in where.split("/") if not name.startswith("product ")]
    formula = next((name for name in reversed(names) if "->" in name), f"{list(x.shape)} · {list(y.shape)}")
    name = ".".join(name for name in names if "->" not in name)
    letters = formula.split("->")[-1] if "->" in formula else ""
    letters = letters if len(letters) == len(out.shape) else ""  # an einsum may take axes apart, or in another order
    return Step(f"{name}.product" if name else "product", formula, letters, out.shape, out.dtype.name, flops)


# Layers that are alike


def distinct(cfg: ModelConfig) -> tuple[ModelConfig, dict[str, list[list[int]]]]:
    """The config with one layer of each kind, and the numbers of the layers of each kind by stack."""
    kinds: dict[ModelConfig, list[int]] = {}
    for number, layer in enumerate(cfg.layers):
        kinds.setdefault(layer, []).append(number)
    groups = sorted(kinds.values(), key=max)  # the last is of the last layer's kind, which mtp goes by
    chosen = [numbers[-1] for numbers in groups]
    fields: dict[str, Any] = {"n_layers": len(chosen)}
    if isinstance(cfg.window, tuple):
        fields["window"] = tuple(cfg.window[number] for number in chosen)
    if cfg.experts.layers is not None:
        having = tuple(at for at, number in enumerate(chosen) if number in cfg.experts.layers)
        fields["experts"] = dataclasses.replace(cfg.experts, layers=having)
    alike = {"decoder": groups}
    if cfg.encoder_layers:
        fields["encoder_layers"] = 1
        alike["encoder"] = [list(range(cfg.encoder_layers))]
    return dataclasses.replace(cfg, **fields), alike


def label(stack: str, numbers: list[int], kinds: int) -> str:
    """What the layers of those numbers are called, where the stack has so many kinds of them."""
    if kinds == 1:
        return f"{stack}.layer"
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    runs = [f"{a}-{b}" if b > a else f"{a}" for a, b in zip(starts, ends, strict=True)]
    return f"{stack}.layer[{','.join(runs if len(runs) < 4 else [*runs[:2], '…'])}]"


def _placed(step: Step, alike: dict[str, list[list[int]]]) -> Step:
    """Under the name of all the layers that do the same."""
    found = re.match(r"(encoder|decoder)\.(?:layers\.)?(\d+)\.", step.name)
    if not found:
        return step._replace(name=step.name.replace("mtp.layer.", "mtp."))
    groups = alike[found[1]]
    numbers = groups[int(found[2])]
    name = f"{label(found[1], numbers, len(groups))}.{step.name[found.end() :]}"
    return step._replace(name=name, times=len(numbers))
