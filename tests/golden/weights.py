"""The weights of the reference fixtures, drawn again by NumPy wherever they are needed, and the fixtures themselves."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent


def draw(shapes: dict[str, tuple[int, ...]], seed: int, gain: float = 1.0, embedding: float = 0.3) -> dict[str, np.ndarray]:
    """A float32 tensor for every name, from the name, its shape and ``seed`` alone.

    Norms' weights lie around ``gain``, embeddings have the standard deviation ``embedding``.
    """
    tensors = {}
    for name, shape in shapes.items():
        # RandomState, not default_rng: NumPy froze its stream of normals, for every later version and machine.
        normal = np.random.RandomState(zlib.crc32(name.encode()) ^ seed).standard_normal(tuple(shape))
        offset, scale = spread(name, tuple(shape), gain, embedding)
        tensors[name] = (offset + scale * normal).astype(np.float32)
    return tensors


def spread(name: str, shape: tuple[int, ...], gain: float, embedding: float) -> tuple[float, float]:
    """Mean and standard deviation: no activation vanishes or explodes, no softmax is flat or saturated."""
    if name.endswith("bias"):
        return 0.0, 0.2
    if len(shape) == 1:  # every other vector of these families is a norm's gain
        return gain, 0.2
    if "relative_attention_bias" in name or name == "shared.weight":  # T5: scores; what enters T5 or leaves it is not scaled up
        return 0.0, 1.0
    if re.search(r"embed|shared|wte|wpe", name):
        return 0.0, embedding
    fan_in = shape[0] if re.search(r"\.c_(attn|proj|fc)\.", name) else shape[-1]  # GPT-2 keeps (in, out), all others (out, in)
    narrow = 0.3 if name.endswith(".q.weight") else 1.0  # T5 does not divide its scores by sqrt(head width)
    return 0.0, 1.5 * narrow / fan_in**0.5


def load(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Config, tensors and reference arrays of the fixture ``name``."""
    with np.load(FOLDER / f"{name}.npz") as stored:
        arrays = dict(stored)
    tensors = draw(json.loads(str(arrays["shapes"])), int(arrays["seed"]), float(arrays["gain"]), float(arrays["embedding"]))
    return json.loads(str(arrays["config"])), tensors, arrays
