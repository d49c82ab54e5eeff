"""Generation on the same forward as training."""
