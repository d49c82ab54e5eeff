"""Our config and parameters as a folder that transformers, before version 5 and since, reads with ``from_pretrained``."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.config import spec as specs
from jaxformer.config.spec import Param
from jaxformer.hf import files
from jaxformer.hf.layout import Source
from jaxformer.hf.load import FAMILIES, numbered, read_config
from jaxformer.hf.place import sizes_of
from jaxformer.hf.tables import Family
from jaxformer.nn import model, rope

# What a file does not say, and the model's numbers do not depend on
UNUSED = ("param_dtype", "execution", "init", "init_std", "scale_residual_init")
TOKENS = ("bos", "eos", "pad")


def save(
    folder: str | Path,
    cfg: ModelConfig,
    params: dict,
    family: str | None = None,
    *,
    tok: Any = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json and safetensors, in shards of at most ``shard_bytes`` with an index where there is more than one.

    family: the ``model_type`` to write, where several fit (the first of them unless given). tok: the tokenizer, which is
    written too; config.json then has its bos, eos and pad, and otherwise says that they are not known. Adjacent rotary pairs
    are rearranged to the halves that published checkpoints have (but for DeepSeek's).

    Raises ValueError, before anything is written, for a model that no family can express, with what stands in the way, and
    for a folder that has other files of weights.
    """
    folder = Path(folder)
    specs.check(params, model.spec(cfg), cfg)
    if cfg.position == "rope" and cfg.rope_layout == "interleaved" and cfg.attention == "grouped":
        cfg, params = rope.to_halves(cfg, params)
    chosen, values = describe(cfg, family)
    if tok is not None:
        if tok.vocab_size > cfg.vocab_size:
            raise ValueError(f"tok has {tok.vocab_size} ids, the model rows for {cfg.vocab_size}")
        values |= {f"{name}_token_id": i if (i := getattr(tok, f"{name}_id")) >= 0 else None for name in TOKENS}
    if folder.exists() and any(p.suffix in (".safetensors", ".msgpack", ".bin") for p in folder.iterdir()):
        raise ValueError(f"{folder} holds weights already; choose another folder")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_tensors(partial, chosen, cfg, params, shard_bytes)
    if tok is not None:
        tok.save(partial)
    (partial / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if folder.exists():  # a tokenizer may be there already
        for file in partial.iterdir():
            os.replace(file, folder / file.name)
        partial.rmdir()
    else:
        os.replace(partial, folder)


def describe(cfg: ModelConfig, family: str | None = None) -> tuple[Family, dict[str, Any]]:
    """The family that a model is of, and its config.json: the one whose reading of what it writes is this very config."""
    if family is not None and family not in FAMILIES:
        raise ValueError(f"family={family!r} is not one of: {', '.join(FAMILIES)}")
    reasons = []
    for kind in FAMILIES if family is None else (family,):
        one = FAMILIES[kind]
        try:
            values = one.write(cfg) | {"model_type": kind, "architectures": [one.architecture if cfg.has_head else one.bare]}
            values |= {"dtype": cfg.param_dtype, "torch_dtype": cfg.param_dtype}
            values = {f"{name}_token_id": None for name in TOKENS} | values  # else classes have defaults, of other vocabularies
            table = one.tensors(cfg)
            paths = [path for path, _ in specs.walk(model.spec(cfg))]
            if missing := [path for path in paths if path not in table]:
                raise ValueError(f"it has no {', '.join(missing)}")
            _, back = read_config(values, {table[path].name for path in paths})
        except ValueError as error:
            reasons.append(f"  {kind}: {error}")
            continue
        ours, theirs = (_plain(c) for c in (cfg, back))
        if ours == theirs:
            return one, values
        differ = [f"{n}={ours[n]!r} (it has {theirs[n]!r})" for n in ours if n in theirs and ours[n] != theirs[n]]
        reasons.append(f"  {kind}: {', '.join(differ)}")
    raise ValueError("no published family has this config:\n" + "\n".join(reasons))


def _plain(cfg: ModelConfig) -> dict[str, Any]:
    """All that the numbers depend on, at inference."""
    unused = set(UNUSED)
    if cfg.position != "rope":
        unused |= {"rope_theta", "rope_layout", "rope_fraction", "rope_scaling", "rope_local_theta"}
    if cfg.position != "relative":
        unused |= {"relative_buckets", "relative_distance"}
    values = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.name not in unused}
    sparse = [number for number, layer in enumerate(cfg.layers) if layer.experts.n_experts]
    values["experts"] = dataclasses.replace(cfg.experts, layers=tuple(sparse) if sparse else None)
    if len(sparse) == cfg.n_layers:
        values["d_ff"] = None  # no layer has such a feed-forward
    standard = (cfg.head_dim + cfg.latent.rope_dim if cfg.attention == "latent" else cfg.head_dim) ** -0.5
    values["attention_scale"] = standard if cfg.attention_scale is None else cfg.attention_scale
    values["window"] = tuple(layer.window for layer in cfg.layers)
    if "rope_local_theta" in values and (cfg.rope_local_theta is None or not any(values["window"])):
        values["rope_local_theta"] = cfg.rope_theta if any(values["window"]) else None
    return values


def _write_tensors(folder: Path, family: Family, cfg: ModelConfig, params: dict, shard_bytes: int) -> None:
    """One shard in memory at a time."""
    from safetensors.numpy import save_file

    parts = plan(family, cfg)
    arrays = dict(specs.walk(params))
    itemsize = np.dtype(jax.numpy.dtype(cfg.param_dtype)).itemsize
    shards: list[list[str]] = [[]]
    size = 0
    for name, (shape, _) in parts.items():
        more = int(np.prod(shape)) * itemsize
        if shards[-1] and size + more > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += more
    where: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: assemble(*parts[name], arrays, cfg) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
        total += sum(t.nbytes for t in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / files.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


Part = tuple[Source, str, Param, tuple[int, ...]]


def plan(family: Family, cfg: ModelConfig) -> dict[str, tuple[tuple[int, ...], list[Part]]]:
    """``their name -> shape, our parts of it``."""
    found: dict[str, tuple[tuple[int, ...], list[Part]]] = {}
    table = family.tensors(cfg)
    for path, param in specs.walk(model.spec(cfg)):
        for rows, source in numbered(path, param, table[path], cfg):
            _, parts = found.setdefault(source.name, (source.shape(sizes_of(param, cfg)), []))
            parts.append((source, path, param, rows))
    if not cfg.has_head:  # the bare model's names
        found = {name.removeprefix(family.prefix): parts for name, parts in found.items()}
    return found


def assemble(shape: tuple[int, ...], parts: list[Part], arrays: dict, cfg: ModelConfig) -> np.ndarray:
    """Their tensor, from our arrays by path."""
    tensor = np.zeros(shape, jax.numpy.dtype(parts[0][2].dtype or cfg.param_dtype))
    written: dict[int, np.ndarray] = {}
    for source, path, param, rows in parts:
        ours = np.asarray(arrays[path][rows])
        if source.part in written and not np.array_equal(written[source.part], ours):
            raise ValueError(f"{path} has no tensor of its own in this family, and differs from the one it would share")
        written[source.part] = ours
        source.put(tensor, ours, param.dims[len(rows) :], sizes_of(param, cfg))
    return tensor
