"""Data sets by name, as numpy arrays. No torch in here.

To add one: a function `split -> Arrays` and a line in DATASETS. Real data are never part of this package but for
the embedded default, scikit-learn's handwritten digits; the others are read from the folder EPSILONS_DATA or,
without it, by name from the hub (extra `hub`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..errors import DataError
from .arrays import Arrays, Source
from .digits import digits
from .images import CIFAR10, FASHION_MNIST, MNIST, SVHN, images

DATASETS: dict[str, Callable[[str], Arrays]] = {
    "digits": digits,
    "mnist": partial(images, MNIST),
    "svhn": partial(images, SVHN),
    "cifar10": partial(images, CIFAR10),
    "fashion-mnist": partial(images, FASHION_MNIST),
}


def load(name: str, split: str) -> Arrays:
    """The "train" or "test" split of a data set. Raises DataError for unknown names and for data that are not there."""
    if name not in DATASETS:
        raise DataError(f"No data set is called {name!r}; there are: {', '.join(DATASETS)}.")
    if split not in ("train", "test"):
        raise DataError(f'A data set has the splits "train" and "test"; {split!r} was asked for.')
    return DATASETS[name](split)


__all__ = ["DATASETS", "Arrays", "Source", "load"]
