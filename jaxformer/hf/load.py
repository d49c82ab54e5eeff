"""A published folder as our config and parameters: every field honoured, every tensor used, or refused by name."""

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxformer import spec as specs
from jaxformer.component import nearest
from jaxformer.config import ModelConfig
from jaxformer.hf import encoders, files, gemma, gpt, llama
from jaxformer.hf.fields import Fields, read_json
from jaxformer.hf.hub import locate
from jaxformer.hf.layout import Source
from jaxformer.hf.place import Placer, blocks
from jaxformer.hf.tables import Family
from jaxformer.nn import model
from jaxformer.spec import Param

FAMILIES = {family.model_type: family for family in (*llama.FAMILIES, *gemma.FAMILIES, *gpt.FAMILIES, *encoders.FAMILIES)}


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
    folder = locate(folder, revision)
    values = read_json(folder / "config.json") if config is None else config
    tensors = files.find(folder)
    family, cfg = read_config(values, tensors.entries.keys())
    kept = _dtype(tensors) if dtype is None else jnp.dtype(dtype).name
    cfg = dataclasses.replace(cfg, dtype=kept, param_dtype=kept)
    sources = resolve(family, cfg, tensors, ignore)

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
    if kind not in FAMILIES:
        raise ValueError(f"config.json: model_type={kind!r} is not supported{nearest(str(kind), FAMILIES)}")
    fields = Fields(dict(values))
    read = FAMILIES[kind].read(fields, names)
    fields.finish()
    return FAMILIES[kind], ModelConfig(**read)


def _dtype(tensors: files.Tensors) -> str:
    found = {entry.dtype for entry in tensors.entries.values() if entry.dtype in files.DTYPES.values()}
    if len(found) > 1:
        raise ValueError(f"the file's tensors are of several dtypes, {', '.join(sorted(found))}: choose one by dtype=")
    return found.pop() if found else "float32"


def numbered(param: Param, source: Source) -> list[Source]:
    """One source a layer, or one."""
    if not param.dims.startswith("L"):
        return [source]
    number = dict(param.sizes)["L"]
    return [source._replace(name=source.name.replace("{i}", str(i))) for i in range(number)]


def sizes_of(param: Param, cfg: ModelConfig) -> dict[str, int]:
    """Sizes of all letters, those of the tensor's own stack first."""
    return cfg.sizes | dict(param.sizes)


def resolve(family: Family, cfg: ModelConfig, tensors: files.Tensors, ignore: Sequence[str]) -> dict[str, list[Source]]:
    """``our path -> sources``, one a layer, under the names that the file uses. Raises ValueError with all that differs."""
    table = family.tensors(cfg)
    entries = tensors.entries
    spec = dict(specs.walk(model.spec(cfg)))
    expected: dict[str, tuple[int, ...]] = {}
    found: dict[str, list[Source]] = {}
    for path, param in spec.items():
        found[path] = []
        for source in numbered(param, table[path]):
            short = source.name.removeprefix(family.prefix)
            name = short if source.name not in entries and short in entries else source.name
            expected[name] = source.shape(sizes_of(param, cfg))
            found[path].append(source._replace(name=name))
    left = entries.keys() - expected.keys()
    repeated = {name for name in left if family.same.get(name) in spec}
    patterns = re.compile("|".join(f"(?:{p})" for p in (*family.buffers, *ignore))) if family.buffers or ignore else None
    unused = {name for name in left - repeated if patterns is None or not patterns.fullmatch(name)}
    lines = specs.diff(expected, {name: entries[name].shape for name in entries if name in expected or name in unused})
    if lines:
        raise ValueError(f"the tensors are not those of this {family.model_type} config:\n" + "\n".join(lines))
    for name in sorted(repeated):
        _check_same(name, found[family.same[name]][0].name, tensors)
    return found


def _check_same(name: str, other: str, tensors: files.Tensors) -> None:
    a, b = tensors.read(name), tensors.read(other)
    if a.shape != b.shape or not all(np.array_equal(a[at], b[at]) for at in blocks(a)):
        raise ValueError(f"{name} must be the same as {other}, to which the config ties it; it is another tensor")
