"""Feed-forwards of experts: the router, and the way of tokens to their experts and back."""
