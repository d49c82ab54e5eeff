"""jaxformer: every transformer is a config, every component a pure function of explicit parameters, every result exact or
refused.

The dimension key, one letter per dimension, in shapes, einsums and the suffixes of variables:

    B batch              T target (query) positions    S source (key, cache) positions
    D model width        L stacked layers              V vocabulary
    K key/value heads    G query heads per K head      H head width      (N = K·G query heads)
    F feed-forward width P rows of a position table    O model width, as the result of a map from D
    E experts            J experts per token           M (token, chosen expert) pairs
    C expert capacity    R latent of keys and values   Q latent of queries

What users call stands in ``jaxformer.api``. It is imported, and JAX with it, when the first name is asked for: a program that
only prints its help does not wait for it.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxformer.api import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":  # what Python itself looks for in a module
        raise AttributeError(f"module 'jaxformer' has no attribute {name!r}")
    # A room: a file of the package that imports it needs no more than that room.
    if os.path.isdir(os.path.join(os.path.dirname(__file__), name)):
        return importlib.import_module(f"jaxformer.{name}")
    return getattr(importlib.import_module("jaxformer.api"), name)


def __dir__() -> list[str]:
    return [*importlib.import_module("jaxformer.api").__all__, "__version__"]
