"""What a model is made of and what it costs, found by tracing it: ``jf.explain``, and ``python -m jaxformer.explain``."""

from jaxformer.explain.costs import explain
from jaxformer.explain.explanation import Explanation, Kept, Row

__all__ = ["Explanation", "Kept", "Row", "explain"]
