"""Opacus' `utils`, as far as training loops use it."""
