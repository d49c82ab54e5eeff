"""What a model costs, before it runs: ``explain`` traces its forward, ``jaxformer plan`` its programs on devices."""

from jaxformer.cost.explanation import Explanation, Kept, explain
from jaxformer.cost.trace import Step

__all__ = ["Explanation", "Kept", "Step", "explain"]
