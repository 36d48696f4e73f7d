"""Scattering as its definition says, in 64 bits with numpy and SciPy alone: slow, and independent of the library.

Kymatio's filters (Andreux et al., arXiv 1812.11214v3): Morlet wavelets of envelope 0.8·2^j, frequency 3π/4·2^-j and
slant 1/2; a Gaussian of 0.8·2^(J-1) pixels. Each convolution is of the whole grid, of which every second or fourth
place is kept. Pictures are extended by 8 pixels by reflection, and by zeros beyond.
"""

from __future__ import annotations

import cmath
import math
from typing import Any

import numpy as np
from scipy.signal import convolve2d

Array = np.ndarray[Any, Any]

BORDER = 8


def morlet(scale: int, orientation: int) -> Array:
    """(2·reach + 1, 2·reach + 1), complex, with sum 0."""
    sigma, frequency, reach = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4 * 2**scale
    angle, places = orientation * math.pi / 8, range(-reach, reach + 1)
    envelope, wave = (np.zeros((2 * reach + 1, 2 * reach + 1), dtype=complex) for _ in range(2))
    for row, y in enumerate(places):
        for column, x in enumerate(places):
            along = math.cos(angle) * x + math.sin(angle) * y
            across = math.cos(angle) * y - math.sin(angle) * x
            height = math.exp(-(along**2 + across**2 / 4) / (2 * sigma**2)) / (4 * math.pi * sigma**2)
            envelope[row, column] = height
            wave[row, column] = height * cmath.exp(1j * frequency * along)
    return wave - envelope * (wave.sum() / envelope.sum())


def gaussian(sigma: float) -> Array:
    """Cut at 3.5 sigma, with sum 1."""
    reach = math.ceil(3.5 * sigma)
    values = [
        [math.exp(-(x * x + y * y) / (2 * sigma**2)) for x in range(-reach, reach + 1)]
        for y in range(-reach, reach + 1)
    ]
    return np.array(values) / np.sum(values)


def coefficients(channel: Array) -> Array:
    """(81, height / 4, width / 4) of one channel (height, width): order 0, 16 of order 1, 64 of order 2."""
    x = np.pad(channel, BORDER, mode="reflect")

    def modulus(grid: Array, scale: int, orientation: int, stride: int) -> Array:
        return np.abs(convolve2d(grid, morlet(scale, orientation), "same"))[::stride, ::stride]

    def low(grid: Array, halvings: int) -> Array:
        stride, edge = 4 >> halvings, BORDER // 4
        return convolve2d(grid, gaussian(1.6 / 2**halvings), "same")[::stride, ::stride][edge:-edge, edge:-edge]

    fine = [modulus(x, 0, i, 1) for i in range(8)]
    coarse = [modulus(x, 1, i, 2) for i in range(8)]
    second = [modulus(grid, 1, i, 2) for grid in fine for i in range(8)]
    return np.stack([low(x, 0), *(low(g, 0) for g in fine), *(low(g, 1) for g in coarse), *(low(g, 1) for g in second)])


def pooled(values: Array, side: int) -> Array:
    """(channels·side²,) means over squares of the grid, whose sides `side` divides."""
    channels, height, width = values.shape
    squares = values.reshape(channels, side, height // side, side, width // side)
    return squares.mean((2, 4)).ravel()


def standard(values: Array, groups: int) -> Array:
    """Mean 0 and variance 1 in each group of channels, with torch's 1e-5 in the root."""
    parts = values.reshape(groups, -1)
    centred = parts - parts.mean(1, keepdims=True)
    return (centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)).reshape(values.shape)


def in_groups(image: Array, side: int) -> Array:
    """Features of an image (channels, height, width) with normalisation "groups"."""
    return pooled(standard(np.concatenate([coefficients(2 * channel - 1) for channel in image]), 27), side)


def by_public_constants(image: Array, side: int, matrix: Array, offset: Array) -> Array:
    """Features with normalisation "public", for these constants."""
    logarithms = np.log(np.concatenate([coefficients(channel) for channel in image]) + 1e-3)
    return pooled(standard(np.einsum("dc,chw->dhw", matrix, logarithms) + offset[:, None, None], 1), side)
