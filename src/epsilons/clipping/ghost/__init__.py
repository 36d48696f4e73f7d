"""The engine ghost: one forward pass, one backward pass, and per-record norms and sums from what both computed."""
