"""What a model costs, before it runs: ``explain`` traces its forward, ``python -m jaxformer.plan`` its programs on devices."""

from jaxformer.cost.explanation import Explanation, Kept, Row, explain

__all__ = ["Explanation", "Kept", "Row", "explain"]
