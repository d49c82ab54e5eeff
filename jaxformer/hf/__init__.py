"""Published checkpoints: one table a family, no forward of its own."""

from jaxformer.hf.load import load
from jaxformer.hf.save import save

__all__ = ["load", "save"]
