"""Generation on the same forward as training."""

from jaxformer.decode.generate import generate_arrays

__all__ = ["generate_arrays"]
