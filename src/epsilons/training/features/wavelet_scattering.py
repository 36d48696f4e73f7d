"""Wavelet scattering of order 2 by plain convolutions, normalised for each record.

    |x * wavelet_1| * low,  ||x * wavelet_1| * wavelet_2| * low

Bruna and Mallat, "Invariant Scattering Convolution Networks", arXiv 1203.1513v2, section 2, with 2 scales and 8
orientations. Normalised in groups of channels, as in Tramèr and Boneh, "Differentially Private Learning Needs Better
Features", arXiv 2011.11660v3, "Group Normalization"; or by constants from public pictures (`public_pictures`), in the
place of their "Data Normalization", which costs privacy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import InputError, app_packages, named
from .fixed import Features, blocks

# -- Constants from public pictures: two photographs that scikit-learn ships, in 1,200 crops
#
# From the logarithms of their scattering coefficients: mean and deviation of each coefficient, and the matrix (C + 0.1
# I)^(-1/4), where C is the covariance of the standardised coefficients. It shrinks the directions in which photographs
# vary most, half as far as whitening does.
#
# The same machine computes the same bits. Other versions of the JPEG decoder, of the linear algebra or of torch round
# differently, so a trained model keeps its constants.

#: SHA-256 of the files in scikit-learn's datasets/images.
PICTURES = {
    "china.jpg": "8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29",
    "flower.jpg": "a77f6ec41e353afdf8bdff2ea981b2955535d8d83294f8cfa49cf4e423dd5638",
}
ORIGIN = (
    "normalised by constants from two public photographs that scikit-learn ships ("
    + ", ".join(f"{name} with SHA-256 {digest[:16]}" for name, digest in PICTURES.items())
    + ")"
)
#: Each picture is shrunk by these factors, and CROPS squares are cut from each size.
SHRINKS, CROPS, SIDE = (2, 3, 4, 6), 150, 32
#: Added to a coefficient before the logarithm, and to the covariance before its root.
FLOOR, RIDGE = 1e-3, 0.1

#: (records, channels, height, width) -> coefficients (records, channels·81, …).
Coefficients = Callable[[Tensor], Tensor]


@cache
def public_constants(channels: int, coefficients: Coefficients) -> dict[str, Tensor]:
    """matrix (c, c) and offset (c,): matrix @ log(|S| + 0.001) + offset is standardised and half-whitened.

    channels  1 (the mean of the colours) or 3
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the sums are those of one thread, however many there are
    try:
        return _constants_of_pictures(crops(channels), coefficients)
    finally:
        torch.set_num_threads(threads)


def _constants_of_pictures(images: Tensor, coefficients: Coefficients) -> dict[str, Tensor]:
    scattered = [coefficients(block) for block in torch.split(images, 25)]
    samples = torch.cat([torch.log(s.abs() + FLOOR) for s in scattered]).double()  # (crops, c, 8, 8)
    rows = samples.permute(0, 2, 3, 1).flatten(0, 2)  # (crops·64, c)
    mean, deviation = rows.mean(0), rows.std(0, correction=0)
    matrix = _half_whitening((rows - mean) / deviation) / deviation
    return {"matrix": matrix.float(), "offset": (-matrix @ mean).float()}


def _half_whitening(rows: Tensor) -> Tensor:
    """(c, c): (C + 0.1 I)^(-1/4) of standardised rows (n, c), 64-bit."""
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    whitening: Tensor = (vectors * (values.clamp_min(0) + RIDGE) ** -0.25) @ vectors.T
    return whitening


def crops(channels: int) -> Tensor:
    """(1200, channels, 32, 32) crops of the photographs, pixels in [0, 1]."""
    places = np.random.default_rng(0)
    found = [
        picture[:, top : top + SIDE, left : left + SIDE]
        for picture in (_shrunk(name, factor, channels) for name in PICTURES for factor in SHRINKS)
        for top, left in ([places.integers(0, side - SIDE + 1) for side in picture.shape[1:]] for _ in range(CROPS))
    ]
    return torch.from_numpy(np.stack(found))


def _shrunk(name: str, factor: int, channels: int) -> npt.NDArray[np.float32]:
    """(channels, height, width): means of squares of pixels. The sums are whole numbers, so they are exact."""
    pixels = _photograph(name)
    height, width = (side // factor * factor for side in pixels.shape[:2])
    squares = pixels[:height, :width].reshape(height // factor, factor, width // factor, factor, 3)
    sums = squares.sum((1, 3), dtype=np.int64).transpose(2, 0, 1)  # (3, …)
    total = sums if channels == 3 else sums.sum(0, keepdims=True)
    means: npt.NDArray[np.float32] = (total / (255 * factor**2 * (3 // channels))).astype(np.float32)
    return means


def _photograph(name: str) -> npt.NDArray[np.uint8]:
    """(height, width, 3). Raises InputError if the file is not the one that the constants are named after."""
    with app_packages():
        from PIL import Image

    content = files("sklearn.datasets.images").joinpath(name).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != PICTURES[name]:
        raise InputError(
            f"scikit-learn's picture {name} must have the SHA-256 {PICTURES[name]}, got {digest}. Install another "
            'version of scikit-learn, or use normalisation = "groups", which needs no pictures.'
        )
    return np.asarray(Image.open(BytesIO(content)).convert("RGB"))


# -- Wavelet scattering of order 2 by plain convolutions, normalised for each record

SCALES, ORIENTATIONS = 2, 8
#: Side of the grid on which the low-pass filter samples, in pixels; twice that is the border added by reflection.
STRIDE = 2**SCALES
BORDER = 2 * STRIDE
#: Groups of the normalisation. A channel has 1 + 16 + 64 = 81 coefficients, so there are 27 groups for any image.
GROUPS = 27
#: Images are transformed in blocks of this size, the last one filled up by zeros: the sums do not depend on how many
#: images there are.
BLOCK = 8
#: Default of `pooled` for each normalisation, at most: 3,888 features for CIFAR10 and 3,969 for MNIST.
POOLED = {"public": 4, "groups": 7}


@torch.no_grad()
def scattering(
    images: Tensor,
    normalisation: str | None = None,
    pooled: int | None = None,
    unit: bool = False,
    constants: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """(records, 81·channels·pooled²) features, 32-bit: 3,888 for images of 3 channels, 3,969 for MNIST.

    images         (records, channels, height, width), pixels in [0, 1]; the sides are multiples of 4 and at least 12
    normalisation  "public": logarithms, half-whitened by constants of public photographs, then of mean 0 and variance 1
                   over a record's coefficients and places; for 1 or 3 channels. "groups": of mean 0 and variance 1 in
                   27 groups of coefficients, without constants. Default: "public" for 3 channels, else "groups"
    pooled         side of the grid on which the coefficients are averaged, at most a quarter of the shorter side.
                   Default: 4 for "public", 7 for "groups", or less for small images
    unit           divide by the square root of the number of features, so that no record's norm is above 1
    constants      those of "public" that are stored with a model. Default: computed

    A record's features depend on no other record: they have the same bits whatever the other images are. Raises
    InputError for images of another shape or range, and for an option that does not fit them.

    >>> scattering(torch.rand(5, 1, 28, 28)).shape
    torch.Size([5, 3969])
    """
    _check_images(images)
    chosen = normalisation or _default(images.shape[1])
    normalise = named(NORMALISATIONS, chosen, "normalisation")
    largest = min(images.shape[2:]) // STRIDE
    side = min(POOLED[chosen], largest) if pooled is None else pooled
    if not isinstance(side, int) or not 1 <= side <= largest:
        raise InputError(f"pooled must be from 1 to {largest} for these images, got {pooled!r}.")
    features = torch.empty(len(images), 81 * images.shape[1] * side**2)
    for rows in blocks(len(images), BLOCK):
        block = images[rows].float()
        whole = F.pad(block, (0, 0, 0, 0, 0, 0, 0, BLOCK - len(block)))
        normal = F.adaptive_avg_pool2d(normalise(whole, constants), side).flatten(1)
        features[rows] = normal[: len(block)]
    return features / math.sqrt(features.shape[1]) if unit else features


def _default(channels: int = 0) -> str:
    return "public" if channels == 3 else "groups"


def _check_images(images: Tensor) -> None:
    shape = tuple(getattr(images, "shape", ()))
    if len(shape) != 4 or not shape[0] or any(side % STRIDE or side <= BORDER for side in shape[2:]):
        got = shape or type(images).__name__
        raise InputError(
            f"scattering takes images (records, channels, height, width) whose sides are multiples of {STRIDE} and at "
            f"least {BORDER + STRIDE}; got {got}."
        )
    if not (images.amin() >= 0 and images.amax() <= 1):
        raise InputError("scattering takes pixels from 0 to 1, got others. Divide 8-bit pixels by 255.")


# -- normalisations: (BLOCK, channels, height, width) and constants -> (BLOCK, 81·channels, height / 4, width / 4) ----


def _groups(images: Tensor, constants: Mapping[str, Tensor] | None) -> Tensor:
    return F.group_norm(_coefficients(2 * images - 1), GROUPS)  # grey is 0: the mean has a sign, as waves do


def _public(images: Tensor, constants: Mapping[str, Tensor] | None) -> Tensor:
    channels = images.shape[1]
    if channels not in (1, 3):
        raise InputError(
            f'normalisation = "public" is for images of 1 or 3 channels, got {channels}. Use normalisation = "groups".'
        )
    found = constants or public_constants(channels, _coefficients)
    logarithms = torch.log(_coefficients(images).abs() + FLOOR)
    return F.group_norm(F.conv2d(logarithms, found["matrix"][..., None, None], found["offset"]), 1)


NORMALISATIONS = {"public": _public, "groups": _groups}


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


# -- what the guarantee and a stored model need -----------------------------------------------------------------------


def _origin(shape: tuple[int, ...], normalisation: str | None = None, **_: Any) -> str:
    way = normalisation or _default(*shape[:1])
    source = ORIGIN if way == "public" else "with constants that come from no data"
    return f"wavelet scattering of each record's image, {source}"


def _constants(shape: tuple[int, ...], normalisation: str | None = None, **_: Any) -> dict[str, Tensor]:
    if (normalisation or _default(*shape[:1])) != "public" or shape[:1] not in ((1,), (3,)):
        return {}
    return public_constants(shape[0], _coefficients)


SCATTERING = Features(scattering, _origin, _constants)
