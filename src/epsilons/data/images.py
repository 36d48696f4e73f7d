"""Image sets of the paper, from local Parquet files or by name from the hub.

Inputs are scaled to 0..1 and normalised with the constants of the authors' code. Those are statistics of the
training data that nobody privatised; they are kept because the paper's numbers depend on them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .arrays import Arrays


@dataclass(frozen=True)
class ImageSet:
    """name: of local files; hub: repository and configuration; column: where its images are; mean, std: per channel."""

    name: str
    hub: tuple[str, ...]
    column: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


MNIST = ImageSet("mnist", ("ylecun/mnist",), "image", (0.1307,), (0.3081,))
SVHN = ImageSet(
    "svhn",
    ("ufldl-stanford/svhn", "cropped_digits"),
    "image",
    (0.43768212, 0.44376972, 0.47280444),
    (0.19803013, 0.20101563, 0.19703615),
)
CIFAR10 = ImageSet("cifar10", ("uoft-cs/cifar10",), "img", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def images(which: ImageSet, split: str) -> Arrays:
    """inputs (records, channels, height, width), normalised. Raises DataError if the data are not to be had."""
    folder = os.environ.get("EPSILONS_DATA")
    file = Path(folder) / f"{which.name}-{split}.parquet" if folder else None
    if file and file.is_file():
        pictures, labels = _from_parquet(file, which.column)
    else:
        pictures, labels = _from_hub(which, split)
    inputs = pictures.astype(np.float32) / 255
    inputs = inputs[:, None] if inputs.ndim == 3 else inputs.transpose(0, 3, 1, 2)
    shape = (1, -1, 1, 1)
    mean, std = (np.array(constant, dtype=np.float32).reshape(shape) for constant in (which.mean, which.std))
    return Arrays(np.ascontiguousarray((inputs - mean) / std), labels)


def _from_parquet(file: Path, column: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    from pyarrow import parquet

    table = parquet.read_table(file, columns=[column, "label"])
    cells = table.column(column).combine_chunks().field("bytes")
    return _decoded(cell.as_py() for cell in cells), table.column("label").to_numpy().astype(np.int64)


def _from_hub(which: ImageSet, split: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{which.name} is not on this machine. Set EPSILONS_DATA to a folder with {which.name}-{split}.parquet, or "
            'install the hub reader: pip install "epsilons[hub]".'
        ) from None
    try:
        table = datasets.load_dataset(*which.hub, split=split).cast_column(which.column, datasets.Image(decode=False))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{which.name} could not be loaded from the hub ({reason}). Set EPSILONS_DATA instead."
        ) from None
    return _decoded(cell["bytes"] for cell in table[which.column]), np.array(table["label"], dtype=np.int64)


def _decoded(files: Iterable[bytes]) -> npt.NDArray[np.uint8]:
    from PIL import Image

    return np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files])
