"""Folders as they are published, made from the reference fixtures."""

import json
import tempfile
from pathlib import Path

import numpy as np
from golden import weights
from safetensors.numpy import save_file

import jaxformer as jf

NAMES = sorted(path.stem for path in weights.FOLDER.glob("*.npz"))


def folder(directory: Path, name: str, config=None, tensors=None) -> dict[str, np.ndarray]:
    """Writes config.json and model.safetensors of a fixture, or other ones, and gives its reference."""
    own_config, own_tensors, reference = weights.load(name)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(own_config if config is None else config), encoding="utf-8")
    save_file(own_tensors if tensors is None else tensors, directory / "model.safetensors")
    return reference


def model(name: str, tensors=None) -> tuple[jf.ModelConfig, dict]:
    """A fixture's config and parameters, or those that other tensors make."""
    with tempfile.TemporaryDirectory() as directory:
        folder(Path(directory), name, tensors=tensors)
        return jf.hf.load(directory)


def legacy(config: dict) -> dict:
    """The same config as transformers before version 5 wrote it."""
    config = dict(config)
    rope = config.pop("rope_parameters", None)
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "gemma3_text":
        full, local = rope["full_attention"], rope["sliding_attention"]
        config |= {"rope_theta": full["rope_theta"], "rope_local_base_freq": local["rope_theta"]}
        rope = {key: value for key, value in full.items() if key != "rope_theta"}
    elif rope is not None:
        rope = dict(rope)
        config["rope_theta"] = rope.pop("rope_theta")
        share = rope.pop("partial_rotary_factor", None)
        if config["model_type"] == "gpt_neox":
            config |= {"rotary_emb_base": config.pop("rope_theta"), "rotary_pct": share}
        elif share is not None:
            config["partial_rotary_factor"] = share
    if rope is not None:
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return config
