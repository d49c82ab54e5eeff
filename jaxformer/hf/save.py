"""Our config and parameters as a folder that transformers, before version 5 and since, reads with ``from_pretrained``."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.config.spec import Param
from jaxformer.hf.destination import check_same, destination, staged, try_writing
from jaxformer.hf.families import FAMILIES
from jaxformer.hf.family import Family
from jaxformer.hf.hub import GENERATION, generation_config, locate
from jaxformer.hf.layout import Source
from jaxformer.hf.load import read_config, sources_of
from jaxformer.hf.safetensors_files import INDEX
from jaxformer.hf.tensor_reader import sizes_of
from jaxformer.nn import model, rope
from jaxformer.tokenizers.json_files import read_json

NOT_COMPARED = ("execution", "param_dtype", "init", "init_std", "scale_residual_init")
"""Fields that the numbers of a model with given parameters do not depend on."""
TOKENS = ("bos", "eos", "pad")


def save(
    folder: str | Path,
    cfg: ModelConfig,
    params: dict,
    family: str | None = None,
    *,
    tok: Any = None,
    generation: dict[str, Any] | None = None,
    source: str | Path | None = None,
    overwrite: bool = False,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json and safetensors, in shards of at most ``shard_bytes`` with an index where there is more than one.

    family: the ``model_type`` to write, where several fit (the first of them unless given).
    tok: the tokenizer, which is written too; config.json then has its bos, eos and pad, and otherwise says that they are not
    known.
    generation: the fields of generation_config.json, such as several ids that end an output, ``{"eos_token_id": [1, 2]}``; no
    such file is written without any.
    source: the folder or hub's id that the model was loaded from, which the config does not know. Its bos, eos and pad are then
    written where there is no ``tok``, and its generation_config.json where there is no ``generation``.
    overwrite: replace the model that the folder holds: its weights in whatever form, its index, and the files of the same names
    as those that are written. Anything else in the folder stays.

    ``folder`` may exist; without ``overwrite`` it may hold anything but weights and other contents of the files that are
    written. All files are written to a temporary folder beside their place and moved there when they are complete, config.json
    last; an error leaves nothing behind. A program that is to save what it trains for hours calls ``check_save`` first.

    Adjacent rotary pairs are rearranged to the halves that published checkpoints have (but for DeepSeek's).

    Raises ValueError, before any tensor is written, for a model that no family can express, with what stands in the way, and
    for a folder that holds such files; OSError, with the folder's path, where it cannot be written.
    """
    folder = destination(folder, overwrite)
    specs.check(params, model.spec(cfg), cfg)
    if _adjacent_pairs(cfg):
        cfg, params = rope.to_halves(cfg, params)
    chosen, values = describe(cfg, family)
    if source is not None:
        known = read_json((loaded := locate(source)) / "config.json")
        values |= {name: known[name] for name in (f"{token}_token_id" for token in TOKENS) if name in known}
        generation = generation_config(loaded) if generation is None else generation
    if tok is not None:
        _check_tokenizer(tok, cfg)
        values |= {f"{name}_token_id": i if (i := getattr(tok, f"{name}_id")) >= 0 else None for name in TOKENS}
    with staged(folder, overwrite) as partial:
        for name, fields in (("config.json", values), (GENERATION, generation)):
            if fields:
                (partial / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        if tok is not None:
            tok.export(partial)
        if not overwrite:
            check_same(folder, partial, tok)
        _write_tensors(partial, chosen, cfg, params, shard_bytes)


def check_save(
    folder: str | Path, cfg: ModelConfig, family: str | None = None, *, tok: Any = None, overwrite: bool = False
) -> None:
    """Raises what ``save`` would raise for this folder, config and tokenizer, without parameters: for the start of a program
    that saves at its end. Arguments as of ``save``."""
    target = destination(folder, overwrite)
    describe(dataclasses.replace(cfg, rope_layout="half") if _adjacent_pairs(cfg) else cfg, family)
    if tok is not None:
        _check_tokenizer(tok, cfg)
    try_writing(target)


def _adjacent_pairs(cfg: ModelConfig) -> bool:
    """Whether the queries and keys have to be rearranged to the halves of published checkpoints."""
    return cfg.position == "rope" and cfg.rope_layout == "interleaved" and cfg.attention == "grouped"


def _check_tokenizer(tok: Any, cfg: ModelConfig) -> None:
    if tok.vocab_size > cfg.vocab_size:
        raise ValueError(f"tok has {tok.vocab_size} ids, but the model has rows for {cfg.vocab_size}")


def describe(cfg: ModelConfig, family: str | None = None) -> tuple[Family, dict[str, Any]]:
    """The family of a model, and its config.json: the first family that reads this very config from what it writes."""
    if family is not None and family not in FAMILIES:
        raise ValueError(f"family={family!r} is not one of: {', '.join(FAMILIES)}")
    reasons = []
    for kind in FAMILIES if family is None else (family,):
        candidate = FAMILIES[kind]
        try:
            values, back = _write_and_read(kind, candidate, cfg)
        except ValueError as error:
            reasons.append(f"  {kind}: {error}")
            continue
        ours, theirs = _comparable(cfg), _comparable(back)
        if ours == theirs:
            return candidate, values
        differ = [f"{n}={ours[n]!r} (it has {theirs[n]!r})" for n in ours if n in theirs and ours[n] != theirs[n]]
        reasons.append(f"  {kind}: {', '.join(differ)}")
    raise ValueError("no published family has this config:\n" + "\n".join(reasons))


def _write_and_read(kind: str, family: Family, cfg: ModelConfig) -> tuple[dict[str, Any], ModelConfig]:
    values: dict[str, Any] = {f"{name}_token_id": None for name in TOKENS}  # classes have defaults, of other vocabularies
    values |= family.write(cfg) | {"model_type": kind, "architectures": [family.architecture if cfg.has_head else family.bare]}
    values |= {"dtype": cfg.param_dtype, "torch_dtype": cfg.param_dtype}
    table = family.tensors(cfg)
    paths = [path for path, _ in specs.walk(model.spec(cfg))]
    if missing := [path for path in paths if path not in table]:
        raise ValueError(f"it has no {', '.join(missing)}")
    return values, read_config(values, {table[path].name for path in paths})[1]


def _comparable(cfg: ModelConfig) -> dict[str, Any]:
    """The fields that a model's numbers depend on at inference, each in one form of several that mean the same."""
    unused = set(NOT_COMPARED)
    if cfg.position != "rope":
        unused |= {"rope_theta", "rope_layout", "rope_fraction", "rope_scaling", "rope_local_theta"}
    if cfg.position != "relative":
        unused |= {"relative_buckets", "relative_distance"}
    values = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.name not in unused}
    sparse = tuple(number for number, layer in enumerate(cfg.layers) if layer.experts.n_experts)
    values["experts"] = dataclasses.replace(cfg.experts, layers=sparse or None)
    if len(sparse) == cfg.n_layers:
        values["d_ff"] = None  # no layer has such a feed-forward
    standard = (cfg.head_dim + cfg.latent.rope_dim if cfg.attention == "latent" else cfg.head_dim) ** -0.5
    values["attention_scale"] = standard if cfg.attention_scale is None else cfg.attention_scale
    values["window"] = tuple(layer.window for layer in cfg.layers)
    if "rope_local_theta" in values and (cfg.rope_local_theta is None or not any(values["window"])):
        values["rope_local_theta"] = cfg.rope_theta if any(values["window"]) else None
    return values


class Slice(NamedTuple):
    """What a tensor of a file takes from our parameters."""

    source: Source
    path: str
    param: Param
    at: tuple[int, ...]
    """The index into our tensor."""


class Stored(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]
    slices: list[Slice]


def stored_tensors(family: Family, cfg: ModelConfig) -> dict[str, Stored]:
    """All tensors of a family's file, by their names there."""
    stored: dict[str, Stored] = {}
    table = family.tensors(cfg)
    for path, param in specs.walk(model.spec(cfg)):
        for at, source in sources_of(path, param, table[path], cfg):
            tensor = stored.setdefault(source.name, Stored(source.shape(sizes_of(param, cfg)), []))
            tensor.slices.append(Slice(source, path, param, at))
    if not cfg.has_head:  # the bare model's names
        stored = {name.removeprefix(family.prefix): tensor for name, tensor in stored.items()}
    return stored


def assemble(stored: Stored, arrays: dict, cfg: ModelConfig) -> np.ndarray:
    """The tensor of a file, from our arrays by path."""
    tensor = np.zeros(stored.shape, jax.numpy.dtype(stored.slices[0].param.dtype or cfg.param_dtype))
    written: dict[int, np.ndarray] = {}
    for source, path, param, at in stored.slices:
        ours = np.asarray(arrays[path][at])
        if source.number in written and not np.array_equal(written[source.number], ours):
            raise ValueError(f"{path} has no tensor of its own in this family, and differs from the one it would share")
        written[source.number] = ours
        source.put(tensor, ours, param.dims[len(at) :], sizes_of(param, cfg))
    return tensor


def _write_tensors(folder: Path, family: Family, cfg: ModelConfig, params: dict, shard_bytes: int) -> None:
    """Writes shards, of which memory holds one at a time."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    stored = stored_tensors(family, cfg)
    arrays = dict(specs.walk(params))
    itemsize = np.dtype(jax.numpy.dtype(cfg.param_dtype)).itemsize
    shards: list[list[str]] = [[]]
    size = 0
    for name, (shape, _) in stored.items():
        more = int(np.prod(shape)) * itemsize
        if shards[-1] and size + more > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += more
    file_of: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: assemble(stored[name], arrays, cfg) for name in names}
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, too
            raise OSError(str(error)) from error
        file_of |= dict.fromkeys(names, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
