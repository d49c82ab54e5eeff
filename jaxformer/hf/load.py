"""A published folder as our config and parameters: every field honoured, every tensor used, or refused by name."""

import dataclasses
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
from jaxformer.hf import encoders, experts, files, gemma, gpt, llama, t5
from jaxformer.hf.fields import Fields, read_json
from jaxformer.hf.hub import locate
from jaxformer.hf.layout import Source
from jaxformer.hf.place import Placer, blocks, sizes_of
from jaxformer.hf.tables import Family
from jaxformer.nn import block, model

ROOMS = (llama, gemma, gpt, encoders, t5, experts)
FAMILIES = {family.model_type: family for room in ROOMS for family in room.FAMILIES}


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

    folder: its path, or a hub's id of it; revision then pins a branch, tag or commit. dtype: that the parameters get and the
    model computes in; the file's unless given. ignore: patterns (re) of tensors that may be there without being used.
    config: the fields to go by, in place of config.json. shardings: a tree of ``NamedSharding`` like the parameters; each is
    read, block by block, straight to its shards.

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
    tensors = files.find(folder)
    family, cfg = read_config(values, tensors.entries.keys())
    sources = resolve(family, cfg, tensors, ignore)
    if dtype is None:
        free = [path for path, param in specs.walk(model.spec(cfg)) if param.dtype is None]
        dtype = _dtype({tensors.entries[source.name].dtype for path in free for _, source in sources[path]})
    cfg = dataclasses.replace(cfg.with_execution(dtype=dtype), param_dtype=dtype)

    def read(shardings: Any = None) -> dict:
        placed = {} if shardings is None else dict(specs.walk(shardings))
        params = specs.walk(model.spec(cfg))
        with Placer(tensors, cfg) as placer:
            arrays = {path: placer.array(sources[path], param, placed.get(path)) for path, param in params}
        return unflatten_dict(arrays, sep=".")

    return cfg, read


def read_config(values: dict[str, Any], names: Collection[str]) -> tuple[Family, ModelConfig]:
    """The family and our config of a config.json, whose tensors have ``names``."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"config.json: model_type={kind!r} is not supported{nearest(str(kind), FAMILIES)}")
    fields = Fields(dict(values))
    read = FAMILIES[kind].read(fields, names)
    fields.finish()
    return FAMILIES[kind], ModelConfig(**read)


def _dtype(found: set[str]) -> str:
    if len(found) > 1:
        raise ValueError(f"the file's tensors are of several dtypes, {', '.join(sorted(found))}: choose one by dtype=")
    return next(iter(found), "float32")


Numbered = list[tuple[tuple[int, ...], Source]]


def numbered(path: str, param: Param, source: Source, cfg: ModelConfig) -> Numbered:
    """``(rows of ours, source)``: one a layer, one an expert of each, or one in all."""
    names: dict[tuple[int, ...], str] = {(): source.name}
    if param.dims.startswith("L"):
        stack, _, part = path.split(".")[:3]
        layers = (cfg.encoder if stack == "encoder" else cfg).layers
        own = [number for number, layer in enumerate(layers) if block.has(layer, part)]
        names = {(row,): source.name.replace("{i}", str(number)) for row, number in enumerate(own)}
    if "{e}" in source.name:
        experts = range(cfg.experts.n_experts)
        names = {(*rows, e): name.replace("{e}", str(e)) for rows, name in names.items() for e in experts}
    return [(rows, source._replace(name=name)) for rows, name in names.items()]


def resolve(family: Family, cfg: ModelConfig, tensors: files.Tensors, ignore: Sequence[str]) -> dict[str, Numbered]:
    """``our path -> sources``, under the names that the file uses. Raises ValueError with all that differs."""
    table = family.tensors(cfg)
    entries = tensors.entries
    spec = dict(specs.walk(model.spec(cfg)))
    expected: dict[str, tuple[int, ...]] = {}
    found: dict[str, Numbered] = {}
    for path, param in spec.items():
        found[path] = []
        for rows, source in numbered(path, param, table[path], cfg):
            name = _name(source.name, family, entries)
            expected[name] = source.shape(sizes_of(param, cfg))
            found[path].append((rows, source._replace(name=name)))
    left = {name: (name, family.prefix + name) for name in entries.keys() - expected.keys()}
    same = family.same(cfg) if callable(family.same) else family.same
    repeated = {name: same[f] for name, forms in left.items() for f in forms if same.get(f) in spec}
    patterns = re.compile("|".join(f"(?:{p})" for p in (*family.buffers, *ignore, r"[^\s\S]")))
    unused = {name for name, forms in left.items() if name not in repeated and not any(map(patterns.fullmatch, forms))}
    lines = specs.diff(expected, {name: entries[name].shape for name in entries if name in expected or name in unused})
    if lines:
        hint = "\n(ignore= names what is there and not needed)" if unused else ""
        raise ValueError(f"the tensors are not those of this {family.model_type} config:\n" + "\n".join(lines) + hint)
    strange = [f"{name} ({entries[name].dtype})" for name in expected if entries[name].dtype not in files.DTYPES.values()]
    if strange:
        raise ValueError(f"dtypes that are not supported: {', '.join(strange)}; supported: {', '.join(files.DTYPES)}")
    for name, path in sorted(repeated.items()):
        _check_same(name, found[path][0][1].name, tensors)
    for name in sorted(left.keys() - repeated.keys() - unused):
        if family.constant and not np.allclose(tensors.read(name), family.constant(cfg, name), atol=1e-4):  # others' sines
            raise ValueError(f"{name} is another table than the one that is computed: it would not be honoured")
    return found


def _name(name: str, family: Family, entries: Collection[str]) -> str:
    """The name that a file has a tensor under: with its prefix or without, in its newer spelling or an older one."""
    older = [name.replace(new, old) for new, old in family.older if name.endswith(new)]
    known = [form for full in (name, *older) for form in (full, full.removeprefix(family.prefix))]
    return next((form for form in known if form in entries), name)


def _check_same(name: str, other: str, tensors: files.Tensors) -> None:
    a, b = tensors.read(name), tensors.read(other)
    if a.shape != b.shape or not all(np.array_equal(a[at], b[at]) for at in blocks(a)):
        raise ValueError(f"{name} must be the same as {other}, to which the config ties it; it is another tensor")
