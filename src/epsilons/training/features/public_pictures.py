"""Constants from public pictures: two photographs that scikit-learn ships, in 1,200 crops.

From the logarithms of their scattering coefficients: mean and deviation of each coefficient, and the matrix
(C + 0.1 I)^(-1/4), where C is the covariance of the standardised coefficients. It shrinks the directions in which
photographs vary most, half as far as whitening does.

The same machine computes the same bits. Other versions of the JPEG decoder, of the linear algebra or of torch round
differently, so a trained model keeps its constants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from io import BytesIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import InputError

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
def constants(channels: int, coefficients: Coefficients) -> dict[str, Tensor]:
    """matrix (c, c) and offset (c,): matrix @ log(|S| + 0.001) + offset is standardised and half-whitened.

    channels  1 (the mean of the colours) or 3
    """
    scattered = [coefficients(block) for block in torch.split(crops(channels), 25)]
    samples = torch.cat([torch.log(s.abs() + FLOOR) for s in scattered]).double()  # (crops, c, 8, 8)
    rows = samples.permute(0, 2, 3, 1).flatten(0, 2).numpy()  # (crops·64, c)
    mean, deviation = rows.mean(0), rows.std(0)
    matrix = _half_whitening((rows - mean) / deviation) / deviation
    return {"matrix": torch.from_numpy(matrix).float(), "offset": torch.from_numpy(-matrix @ mean).float()}


def _half_whitening(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(c, c): (C + 0.1 I)^(-1/4) of standardised rows (n, c)."""
    values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    roots = (np.maximum(values, 0) + RIDGE) ** -0.25
    whitening: npt.NDArray[np.float64] = (vectors * roots) @ vectors.T
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
    from PIL import Image

    content = files("sklearn.datasets.images").joinpath(name).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != PICTURES[name]:
        raise InputError(
            f"scikit-learn's picture {name} must have the SHA-256 {PICTURES[name]}, got {digest}. Install another "
            'version of scikit-learn, or use normalisation = "groups", which needs no pictures.'
        )
    return np.asarray(Image.open(BytesIO(content)).convert("RGB"))
