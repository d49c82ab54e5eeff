"""A published folder as our config and parameters: every field honoured, every tensor used, or refused by name."""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.config.components import nearest
from jaxformer.config.spec import Param
from jaxformer.config.strict import dtype_name
from jaxformer.hf import safetensors_files
from jaxformer.hf.config_reader import ConfigReader
from jaxformer.hf.families import FAMILIES
from jaxformer.hf.family import Family
from jaxformer.hf.hub import locate
from jaxformer.hf.layout import Source
from jaxformer.hf.tensor_reader import Sources, TensorReader, blocks, sizes_of
from jaxformer.nn import model
from jaxformer.nn.stack import holds
from jaxformer.tokenizers.json_files import read_json

SLACK = 100
"""A folder that lacks fewer tensors than this is answered with their names."""

FEW = 1000
"""Layers or experts of which a config may speak, however few tensors its file has."""


def load(
    folder: str | Path,
    dtype: Any = None,
    ignore: Sequence[str] = (),
    *,
    revision: str | None = None,
    config: dict[str, Any] | None = None,
    shardings: Any = None,
) -> tuple[ModelConfig, dict]:
    """``cfg, params`` of a Hugging Face folder: config.json and safetensors (one file or shards), or flax_model.msgpack.

    folder: its path, or the id that a hub has it under; revision then pins a branch, tag or commit.
    dtype: of the parameters and of the computation; the file's unless given.
    ignore: patterns (re) of tensors that may be there without being used.
    config: the fields to use, in place of config.json.
    shardings: a tree of ``NamedSharding`` like the parameters; each parameter is read, block by block, straight to its shards.

    Raises FileNotFoundError where something is missing; ValueError, before any tensor is read, for a config field that
    would not be honoured, and with a list for tensors that are missing, not used, or of another shape.
    """
    cfg, read = prepare(folder, dtype, ignore, revision=revision, config=config)
    return cfg, read(shardings)


def prepare(
    folder: str | Path,
    dtype: Any = None,
    ignore: Sequence[str] = (),
    *,
    revision: str | None = None,
    config: dict[str, Any] | None = None,
) -> tuple[ModelConfig, Callable[..., dict]]:
    """The first half of ``load``, with its arguments and errors: the config, and a function of ``shardings`` that reads."""
    if isinstance(ignore, str) or not isinstance(config, dict | None):
        raise ValueError(f"ignore={ignore!r} must be a list of patterns, and config the fields of a config.json, a dict")
    if dtype is not None:
        dtype = dtype_name("dtype", dtype)
    folder = locate(folder, revision)
    values = read_json(folder / "config.json") if config is None else config
    tensors = safetensors_files.find(folder)
    family, cfg = read_config(values, tensors.entries.keys())
    sources = resolve(family, cfg, tensors, ignore)
    if dtype is None:
        free = [path for path, param in specs.walk(model.spec(cfg)) if param.dtype is None]
        dtype = _dtype({tensors.entries[source.name].dtype for path in free for _, source in sources[path]})
    cfg = dataclasses.replace(cfg.with_execution(dtype=dtype), param_dtype=dtype)

    def read(shardings: Any = None) -> dict:
        by_path = {} if shardings is None else dict(specs.walk(shardings))
        params = specs.walk(model.spec(cfg))
        with TensorReader(tensors, cfg) as reader:
            arrays = {path: reader.array(sources[path], param, by_path.get(path)) for path, param in params}
        return unflatten_dict(arrays, sep=".")

    return cfg, read


def read_config(values: dict[str, Any], names: Collection[str]) -> tuple[Family, ModelConfig]:
    """The family and our config of a config.json, beside which a file has tensors of these ``names``."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"config.json: model_type={kind!r} is not supported{nearest(str(kind), FAMILIES)}")
    _check_counts(values, len(names))
    try:
        return FAMILIES[kind], FAMILIES[kind].read(ConfigReader(values, names))
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # rows compute with whatever a file holds
        raise ValueError(f"config.json: a field has a value of the wrong kind: {error}") from error


def _check_counts(values: dict[str, Any], tensors: int) -> None:
    """Raises ValueError for numbers of layers or experts that the file cannot have, before anything is made for each."""
    for name, value in values.items():
        if re.search("layer|expert", name) and isinstance(value, int) and value > max(tensors, FEW):
            raise ValueError(f"config.json: {name}={value}, but the folder has only {tensors} tensors")


def _dtype(dtypes: set[str]) -> str:
    if len(dtypes) > 1:
        raise ValueError(f"the tensors have several dtypes, {', '.join(sorted(dtypes))}; choose one by dtype=")
    return next(iter(dtypes), "float32")


def sources_of(path: str, param: Param, source: Source, cfg: ModelConfig) -> Sources:
    """``(index into our tensor, source)`` for each tensor of a file that ours is made of: one per layer and expert, or one."""
    names: dict[tuple[int, ...], str] = {(): source.name}
    if param.dims.startswith("L"):
        stack, _, name = path.split(".")[:3]
        layers = (cfg.encoder if stack == "encoder" else cfg).layers
        kinds = {layer: holds(tuple(dict.fromkeys(layers)), layer, name) for layer in dict.fromkeys(layers)}
        numbers = [number for number, layer in enumerate(layers) if kinds[layer]]
        names = {(row,): source.name.replace("{i}", str(number)) for row, number in enumerate(numbers)}
    if "{e}" in source.name:
        experts = range(cfg.experts.n_experts)
        names = {(*row, expert): name.replace("{e}", str(expert)) for row, name in names.items() for expert in experts}
    return [(row, source._replace(name=name)) for row, name in names.items()]


def resolve(family: Family, cfg: ModelConfig, tensors: safetensors_files.Tensors, ignore: Sequence[str]) -> dict[str, Sources]:
    """``our path -> sources``, under the names that the file uses. Raises ValueError with all that differs."""
    table, entries = family.tensors(cfg), tensors.entries
    experts = sum(layer.experts.n_experts for layer in cfg.layers)
    if experts > len(entries) + SLACK:
        raise ValueError(f"config.json: {experts} experts in all layers, but the folder has only {len(entries)} tensors")
    spec = dict(specs.walk(model.spec(cfg)))
    expected: dict[str, tuple[int, ...]] = {}
    sources: dict[str, Sources] = {}
    for path, param in spec.items():
        counted = "LE" if "{e}" in table[path].name else "L"
        sizes = zip(param.dims, param.shape(cfg), strict=True)
        if (count := math.prod(size for letter, size in sizes if letter in counted)) > max(len(entries), FEW):
            raise ValueError(
                f"config.json asks for {count} tensors {table[path].name}, but the folder has only {len(entries)} tensors"
            )
        named = [(row, s._replace(name=_name(s.name, family, entries))) for row, s in sources_of(path, param, table[path], cfg)]
        expected |= {source.name: source.shape(sizes_of(param, cfg)) for _, source in named}
        sources[path] = named
    left = {name: (name, family.prefix + name) for name in entries.keys() - expected.keys()}
    copies = {name.format(n_layers=cfg.n_layers): path for name, path in family.copies.items()}
    repeated = {name: copies[form] for name, forms in left.items() for form in forms if copies.get(form) in spec}
    patterns = re.compile("|".join(f"(?:{p})" for p in (*family.buffers, *ignore, r"[^\s\S]")))
    unused = {name for name, forms in left.items() if name not in repeated and not any(map(patterns.fullmatch, forms))}
    lines = specs.diff(expected, {name: entries[name].shape for name in entries if name in expected or name in unused})
    if lines:
        hint = "\n(name tensors that are not needed by ignore=)" if unused else ""
        raise ValueError(f"the tensors are not those of a {family.architecture} with this config:\n" + "\n".join(lines) + hint)
    supported = safetensors_files.DTYPES
    strange = [f"{name} ({entries[name].dtype})" for name in expected if entries[name].dtype not in supported.values()]
    if strange:
        raise ValueError(f"dtypes that are not supported: {', '.join(strange)}; supported: {', '.join(supported)}")
    for name, path in sorted(repeated.items()):
        _check_copy(name, sources[path][0][1].name, tensors)
    for name in sorted(left.keys() - repeated.keys() - unused):
        if family.constant and not _is_constant(tensors.read(name), family, cfg):
            raise ValueError(f"{name} differs from the table that the model computes, so it would be ignored")
    return sources


def _is_constant(array: np.ndarray, family: Family, cfg: ModelConfig) -> bool:
    """Whether it is the family's table of sines, which others may have computed."""
    return array.shape == (cfg.max_length, cfg.d_model) and np.allclose(array, family.constant(cfg), atol=1e-4)  # type: ignore[misc]


def _name(name: str, family: Family, entries: Collection[str]) -> str:
    """The name that a file has a tensor under: with its prefix or without, in its newer spelling or an older one."""
    older = [name.replace(new, old) for new, old in family.older if name.endswith(new)]
    forms = [form for full in (name, *older) for form in (full, full.removeprefix(family.prefix))]
    return next((form for form in forms if form in entries), name)


def _check_copy(name: str, other: str, tensors: safetensors_files.Tensors) -> None:
    a, b = tensors.read(name), tensors.read(other)
    if a.shape != b.shape or not all(np.array_equal(a[at], b[at]) for at in blocks(a)):
        raise ValueError(f"the config ties {name} to {other}, but the two tensors differ")
