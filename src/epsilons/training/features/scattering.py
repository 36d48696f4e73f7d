"""Wavelet scattering of order 2 by plain convolutions, normalised for each record.

    |x * wavelet_1| * low,  ||x * wavelet_1| * wavelet_2| * low

Bruna and Mallat, "Invariant Scattering Convolution Networks", arXiv 1203.1513v2, section 2, with 2 scales and 8
orientations; normalised in groups of channels, as in Tramèr and Boneh, "Differentially Private Learning Needs Better
Features", arXiv 2011.11660v3, "Group Normalization". There are no constants from data.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import InputError

SCALES, ORIENTATIONS = 2, 8
#: Side of the grid on which the low-pass filter samples, in pixels; twice that is the border added by reflection.
STRIDE = 2**SCALES
BORDER = 2 * STRIDE
#: Groups of the normalisation. A channel has 1 + 16 + 64 = 81 coefficients, so there are 27 groups for any image.
GROUPS = 27
#: Images are transformed in blocks of this size, the last one filled up by zeros: the sums do not depend on how many
#: images there are.
BLOCK = 32


@torch.no_grad()
def scattering(images: Tensor, pooled: int = 2) -> Tensor:
    """(records, 81·channels·pooled²) features of at most norm 1, 32-bit: 972 for images of 3 channels.

    images  (records, channels, height, width), pixels in [0, 1]; the sides are multiples of 4 and at least 12
    pooled  side of the grid on which the coefficients are averaged, at most a quarter of the shorter side

    A record's features depend on no other record: they have the same bits whatever the other images are. Raises
    InputError for images of another shape.

    >>> scattering(torch.rand(5, 3, 32, 32)).shape
    torch.Size([5, 972])
    """
    _check(images, pooled)
    blocks = torch.split(images.float(), BLOCK)
    return torch.cat([_block(block, pooled) for block in blocks])


def _check(images: Tensor, pooled: int) -> None:
    sides = tuple(images.shape[2:])
    if images.ndim != 4 or not len(images) or any(side % STRIDE or side <= BORDER for side in sides):
        raise InputError(
            f"scattering takes images (records, channels, height, width) whose sides are multiples of {STRIDE} and at "
            f"least {BORDER + STRIDE}; got {tuple(images.shape)}."
        )
    if not 1 <= pooled <= min(sides) // STRIDE:
        raise InputError(f"pooled must be from 1 to {min(sides) // STRIDE} for these images, got {pooled}.")


def _block(images: Tensor, pooled: int) -> Tensor:
    count = len(images)
    whole = F.pad(2 * images - 1, (0, 0, 0, 0, 0, 0, 0, BLOCK - count))  # grey is 0: the mean has a sign, as waves do
    normal = F.group_norm(_coefficients(whole), GROUPS)  # over 3·channels coefficients and their places
    features = F.adaptive_avg_pool2d(normal, pooled).flatten(1)
    return features[:count] / math.sqrt(features.shape[1])


def _coefficients(images: Tensor) -> Tensor:
    """(records, channels·81, height / 4, width / 4): of each channel the mean, then orders 1 and 2."""
    records, channels, height, width = images.shape
    x = F.pad(images, [BORDER] * 4, mode="reflect").flatten(0, 1)[:, None]  # (records·channels, 1, …)
    fine = _modulus(x, scale=0, stride=1)
    parts = (_low(x, 0), _low(fine, 0), _low(_modulus(x, 1, 2), 1), _low(_modulus(fine, 1, 2), 1))
    grid = parts[0].shape[-2:]
    joined = torch.cat([part.reshape(records * channels, -1, *grid) for part in parts], 1)
    edge = BORDER // STRIDE
    return joined[..., edge:-edge, edge:-edge].reshape(records, -1, height // STRIDE, width // STRIDE)


def _modulus(x: Tensor, scale: int, stride: int) -> Tensor:
    """|x * wavelet| for every orientation: (m, 1, h, w) -> (m·8, 1, h / stride, w / stride)."""
    filters = _wavelets(scale)
    waves = F.conv2d(x, filters, stride=stride, padding=filters.shape[-1] // 2)
    real, imaginary = waves.square().chunk(2, dim=1)
    return (real + imaginary).sqrt().flatten(0, 1)[:, None]


def _low(x: Tensor, halvings: int) -> Tensor:
    """The low-pass filter, sampled every 4 pixels of the image; x is the image's size halved so many times."""
    kernel = _low_pass(halvings)
    return F.conv2d(x, kernel, stride=STRIDE >> halvings, padding=kernel.shape[-1] // 2)


@cache
def _wavelets(scale: int) -> Tensor:
    """(16, 1, side, side): the real parts of the Morlet wavelets of 8 orientations, then the imaginary parts.

    Envelope 0.8·2^scale, frequency 3π/4·2^-scale, slant 4/8, as in Kymatio (Andreux et al., arXiv 1812.11214v3).
    """
    sigma, reach, slant = 0.8 * 2**scale, 4 * 2**scale, 4 / ORIENTATIONS
    y, x = torch.meshgrid(*2 * [torch.arange(-reach, reach + 1).double()], indexing="ij")
    angle = (torch.arange(ORIENTATIONS).double() * math.pi / ORIENTATIONS)[:, None, None]
    along, across = angle.cos() * x + angle.sin() * y, angle.cos() * y - angle.sin() * x
    envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2)) * slant / (2 * math.pi * sigma**2)
    wave = envelope * torch.exp(0.75j * math.pi / 2**scale * along)
    wave = wave - envelope * (wave.sum((1, 2), keepdim=True) / envelope.sum((1, 2), keepdim=True))  # mean zero
    return torch.cat([wave.real, wave.imag])[:, None].float()


@cache
def _low_pass(halvings: int) -> Tensor:
    """(1, 1, side, side): a Gaussian of 1.6 pixels of the image, on the grid of an image halved so many times."""
    sigma = 0.8 * 2 ** (SCALES - 1 - halvings)
    reach = math.ceil(3.5 * sigma)
    line = torch.exp(-(torch.arange(-reach, reach + 1).double() ** 2) / (2 * sigma**2))
    kernel = torch.outer(line, line)
    return (kernel / kernel.sum())[None, None].float()
