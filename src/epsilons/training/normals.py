"""Standard normal values from uniform 64-bit words, by the transform of Box and Muller, vectorised.

Box and Muller (Ann. Math. Statist. 29(2), 1958): with u uniform in (0, 1] and an angle uniform on the circle,
√(−2 ln u)·cos(angle) and √(−2 ln u)·sin(angle) are independent standard normal values. One word gives u, with 63 bits
rounded to a 64-bit float; another gives the angle, as one of 1,024 sectors and a position in it of 53 bits. Cosine and
sine of the sector's middle come from a table, those of the position from Taylor's series, and the angle's from both
by the sum formula. Besides additions and products this takes NumPy's logarithm and square root.

The largest value that can occur is √(126 ln 2) = 9.345: u is at least 2⁻⁶³. A normal value is beyond it with
probability 9·10⁻²¹. For the guarantee this is a property of 64-bit floating-point noise, as the gaps between its
values are: proofs are about real numbers. It is also far below any δ. If one record moves coordinate j of the sum by
Δ_j noise standard deviations, an output that only one of two data sets allows needs noise beyond 9.345 − |Δ_j| in some
coordinate j. For a noise multiplier of 1 that has probability below 10⁻¹⁶ per step if one coordinate takes all of the
record's norm, and below 10⁻¹⁵ if a million share it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: The values that are made together: few enough for the cache, and enough to hide what a call costs.
BLOCK = 2**16
SECTORS = 1024

Words = npt.NDArray[np.uint64]
Values = npt.NDArray[np.float64]


def _table() -> tuple[Values, Values]:
    """(SECTORS,) cosine and sine of the middle of each sector, from a quarter of the wave: exact on the axes."""
    quarter = np.sin(2 * np.pi / SECTORS * np.arange(SECTORS // 4 + 1))
    half = np.concatenate([quarter[:-1], quarter[:0:-1]])
    sine = np.concatenate([half, -half])
    return np.roll(sine, -SECTORS // 4), sine


_COSINE, _SINE = _table()


def fill(words: Words, values: Values) -> None:
    """Fill `values` (count,) with standard normal values from words (2 · pairs,), with pairs = ⌈count / 2⌉.

    words  uniform and independent; they are overwritten
    """
    pairs = len(words) // 2
    radius, angle, square, cosine, sine, turned = np.empty((6, pairs))
    sector = np.empty(pairs, dtype=np.int64)
    first, second = values[:pairs], values[pairs:]
    _radius(words[:pairs], radius)
    np.bitwise_and(words[pairs:], np.uint64(SECTORS - 1), out=sector.view(np.uint64))
    _position(words[pairs:], angle)
    # The middle of the sector, at the radius.
    x, y = np.take(_COSINE, sector), np.take(_SINE, sector)
    x *= radius
    y *= radius
    _cosine_and_sine(angle, square, cosine, sine)
    # Both turned by the position in the sector.
    np.multiply(x, cosine, out=first)
    np.multiply(y, sine, out=turned)
    first -= turned
    y *= cosine
    x *= sine
    y += x
    second[:] = y[: len(second)]


def _radius(words: Words, radius: Values) -> None:
    """√(−2 ln u), u = (the first 63 bits of the word + 1)·2⁻⁶³."""
    np.right_shift(words, np.uint64(1), out=words)
    radius[:] = words.view(np.int64)
    radius += 1.0
    radius *= 2.0**-63
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)


def _position(words: Words, angle: Values) -> None:
    """The angle from the middle of a sector, from the first 53 bits of the word as a signed number."""
    signed = words.view(np.int64)
    np.right_shift(signed, 11, out=signed)
    angle[:] = signed
    angle *= 2 * np.pi / SECTORS * 2.0**-53


def _cosine_and_sine(angle: Values, square: Values, cosine: Values, sine: Values) -> None:
    """Taylor's series to the fifth order: for angles up to π/1024 the rest is below 2·10⁻¹⁸."""
    np.multiply(angle, angle, out=square)
    np.multiply(square, 1 / 24, out=cosine)
    cosine -= 1 / 2
    cosine *= square
    cosine += 1.0
    np.multiply(square, 1 / 120, out=sine)
    sine -= 1 / 6
    sine *= square
    sine += 1.0
    sine *= angle
