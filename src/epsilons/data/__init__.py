"""Data sets by name, as numpy arrays. Nothing here imports torch.

To add a data set: a function `split -> Arrays`, and a line in DATASETS. The package contains one data set, the
handwritten digits of scikit-learn. The others are read from the folder EPSILONS_DATA, or else by name from the hub
(extra `hub`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..errors import DataError, named
from .arrays import Arrays, Source
from .images import IMAGE_SETS, digits, images
from .texts import Windows, windows

DATASETS: dict[str, Callable[[str], Arrays]] = {
    "digits": digits,
    **{name: partial(images, which) for name, which in IMAGE_SETS.items()},
}


def load(name: str, split: str, pixels: bool = False) -> Arrays:
    """One split of a data set: inputs (records, …) 32-bit floats, and targets (records,) class indices.

    name    one of DATASETS
    split   "train" or "test"
    pixels  of an image set: pixels from 0 to 1, in place of normalised ones. Fixed features take these

    Raises DataError for an unknown name or split, and if the data are not available.

    >>> train = load("digits", "train")
    >>> train.inputs.shape, train.targets.shape
    ((1437, 64), (1437,))
    """
    read = named(DATASETS, name, "data set", DataError)
    if split not in ("train", "test"):
        raise DataError(f'split must be "train" or "test", got {split!r}.')
    return images(IMAGE_SETS[name], split, pixels=True) if pixels and name in IMAGE_SETS else read(split)


__all__ = ["DATASETS", "Arrays", "Source", "Windows", "load", "windows"]
