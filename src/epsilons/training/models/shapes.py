"""What a model can take."""

from __future__ import annotations

from ...errors import InputError

#: More are refused: each layer takes time to build, whatever its size.
MOST_LAYERS, MOST_UNITS = 1_000, 2**31


def expect(name: str, shape: tuple[int, ...], expected: str, fits: bool) -> None:
    """Raise InputError unless the data's records have a shape that this model can take."""
    if not fits:
        raise InputError(
            f"The model {name!r} expects records of shape {expected}; these data have {shape}. Choose another model."
        )
