"""Image sets: those of the paper, by name, and a user's own Parquet file.

Pixels are scaled to 0..1, then normalised. The paper's sets use the constants of the authors' code. These constants are
statistics of the training data and are not private; they are kept because the paper's numbers depend on them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DataError, Package, app_packages
from ..tabular import column_of, is_parquet, numbers, read_table
from ..tabular.table_files import parquet, pyarrow, types
from .arrays import Arrays, Source, check_class_indices
from .tables import is_bytes

IMAGE_COLUMNS = ("image", "img")

#: Normalisation without statistics of the data: the middle and half the range of a pixel.
PLAIN_MEAN, PLAIN_STD = (0.5,), (0.5,)
#: No normalisation: pixels from 0 to 1.
UNCHANGED_MEAN, UNCHANGED_STD = (0.0,), (1.0,)

#: Pillow modes that can be read: 8 bits, black and white, palettes, and 16-bit grey; with the value of white.
AS_THEY_ARE, CONVERTED, GREY_16 = ("L", "RGB", "RGBA"), {"1": "L", "P": "RGB"}, ("I;16", "I;16B", "I;16L")
WHITE_8, WHITE_16 = 255, 65535


@dataclass(frozen=True)
class ImageSet:
    """name: of local files; hub: repository and configuration; mean, std: one per channel, of pixels in 0..1."""

    name: str
    hub: tuple[str, ...]
    mean: tuple[float, ...] = PLAIN_MEAN
    std: tuple[float, ...] = PLAIN_STD


MNIST = ImageSet("mnist", ("ylecun/mnist",), (0.1307,), (0.3081,))
SVHN = ImageSet(
    "svhn",
    ("ufldl-stanford/svhn", "cropped_digits"),
    (0.43768212, 0.44376972, 0.47280444),
    (0.19803013, 0.20101563, 0.19703615),
)
FASHION_MNIST = ImageSet("fashion-mnist", ("zalando-datasets/fashion_mnist",))
CIFAR10 = ImageSet("cifar10", ("uoft-cs/cifar10",), (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


IMAGE_SETS = {"mnist": MNIST, "svhn": SVHN, "cifar10": CIFAR10, "fashion-mnist": FASHION_MNIST}


def images(which: ImageSet, split: str, pixels: bool = False) -> Arrays:
    """Inputs (records, channels, height, width), normalised (with `pixels`: from 0 to 1), and class indices.

    Reads `NAME-SPLIT.parquet` in the folder EPSILONS_DATA, or else the hub. Raises DataError if neither has the data.
    """
    folder = os.environ.get("EPSILONS_DATA")
    file = Path(folder) / f"{which.name}-{split}.parquet" if folder else None
    if file and file.is_file():
        table = read_table(file, f"{which.name} {split}", DataError)
        cells = _cells(table, file, _image_column(table.column_names, str(file)))
        labels = _labels(table, file)
    else:
        table = _from_hub(which, split)
        cells = (cell["bytes"] for cell in table["image"])
        labels = np.array(table["label"], dtype=np.int64)
    mean, std = (UNCHANGED_MEAN, UNCHANGED_STD) if pixels else (which.mean, which.std)
    return Arrays(_normalised(_decoded(cells, which.name), mean, std), labels)


def image_table(path: Path, what: str, classes: tuple[str, ...] | None, pixels: bool = False) -> Source:
    """A user's image set: a .parquet file with a column `image` or `img` (encoded files) and `label` (class indices).

    pixels  scaled to 0..1 in place of -1..1

    Raises DataError if a column is missing, an image cannot be decoded or has another size, or a class is unknown.
    """
    table = read_table(path, what, DataError)
    column = _image_column(table.column_names, str(path))
    labels = _labels(table, path)
    names = check_class_indices(labels, classes, f"labels in {path}")
    mean, std = (UNCHANGED_MEAN, UNCHANGED_STD) if pixels else (PLAIN_MEAN, PLAIN_STD)
    inputs = image_inputs(table, path, mean, std)
    return Source(Arrays(inputs, labels), names, table.drop_columns([column]))


def image_inputs(table: Any, path: Path, mean: tuple[float, ...], std: tuple[float, ...]) -> npt.NDArray[np.float32]:
    """(records, channels, height, width), normalised, of a table with a column `image` or `img` of encoded images.

    path  the table's file, for messages

    Raises DataError if there is no such column, or an image cannot be decoded or has another size.
    """
    column = _image_column(table.column_names, str(path))
    return _normalised(_decoded(_cells(table, path, column), str(path)), mean, std)


def image_labels(path: Path) -> npt.NDArray[np.int64]:
    """(records,) class indices in a user's image set; no image is decoded."""
    return _labels(read_table(path, "training data", DataError), path)


def is_image_table(path: Path) -> bool:
    """True for a Parquet file with a column of encoded images."""
    if not is_parquet(path) or not path.is_file():
        return False
    try:
        schema = parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError, ValueError):  # ValueError: names that are no UTF-8
        return False
    return any(_holds_images(schema.field(name).type) for name in IMAGE_COLUMNS if name in schema.names)


def _holds_images(kind: Any) -> bool:
    return bool(kind.get_field_index("bytes") >= 0) if types.is_struct(kind) else is_bytes(kind)


def _image_column(names: Collection[str], where: str) -> str:
    column = next((name for name in IMAGE_COLUMNS if name in names), None)
    if column is None:
        raise DataError(f"{where} has no column of images: expected {' or '.join(map(repr, IMAGE_COLUMNS))}.")
    return column


def _cells(table: Any, path: Path, column: str) -> Iterable[bytes]:
    cells = column_of(table, column, path, DataError)
    if not _holds_images(cells.type):
        raise DataError(f"Column {column!r} of {path} must hold encoded images (bytes), got {cells.type}.")
    parts = (part.field("bytes") if hasattr(part, "field") else part for part in cells.chunks)
    return (cell.as_py() for part in parts for cell in part)


def _labels(table: Any, path: Path) -> npt.NDArray[np.int64]:
    values = numbers(column_of(table, "label", path, DataError), "label", path, DataError)
    if not len(values) or not (np.isfinite(values) & (values == np.floor(values))).all():
        raise DataError(f"Column 'label' of {path} must hold a class index in every row.")
    return values.astype(np.int64)


def _from_hub(which: ImageSet, split: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{which.name} is not on this machine. Set EPSILONS_DATA to a folder with {which.name}-{split}.parquet, or "
            'install the hub reader: pip install "datasets>=2.19".'
        ) from None
    try:
        table = datasets.load_dataset(*which.hub, split=split)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{which.name} could not be loaded from the hub ({reason}). Set EPSILONS_DATA instead."
        ) from None
    column = _image_column(table.column_names, which.name)
    return table.rename_column(column, "image").cast_column("image", datasets.Image(decode=False))


def _decoded(files: Iterable[bytes], name: str) -> npt.NDArray[Any]:
    """(records, height, width) or (records, height, width, channels), integers. All images must be of one size."""
    with app_packages():
        from PIL import Image

    images = []
    for row, file in enumerate(files):
        try:
            images.append(_pixels(Image.open(io.BytesIO(file)), row, name))
        except DataError:
            raise
        except (OSError, TypeError, ValueError, Image.DecompressionBombError):
            raise DataError(f"The image in row {row:,} of {name}, counted from 0, cannot be decoded.") from None
        first, last = images[0], images[-1]
        if (last.shape, last.dtype) != (first.shape, first.dtype):
            raise DataError(
                f"The images of {name} must have one size and type, got {first.shape} of {first.dtype} in row 0 and "
                f"{last.shape} of {last.dtype} in row {row:,}. Convert them first."
            )
    return np.stack(images)


def _normalised(pixels: npt.NDArray[Any], mean: tuple[float, ...], std: tuple[float, ...]) -> npt.NDArray[np.float32]:
    """(records, channels, height, width), 32-bit floats."""
    inputs = pixels.astype(np.float32) / (WHITE_16 if pixels.dtype.itemsize == 2 else WHITE_8)
    inputs = inputs[:, None] if inputs.ndim == 3 else inputs.transpose(0, 3, 1, 2)
    if len({inputs.shape[1], len(mean), len(std)} - {1}) > 1:
        raise DataError(f"The images have {inputs.shape[1]} channels, and mean and std are of {len(mean)}.")
    shape = (1, -1, 1, 1)
    centre, spread = (np.array(constant, dtype=np.float32).reshape(shape) for constant in (mean, std))
    return np.ascontiguousarray((inputs - centre) / spread)


def _pixels(image: Any, row: int, name: str) -> npt.NDArray[Any]:
    """(height, width) or (height, width, channels), 8 or 16 bits each."""
    if image.mode in GREY_16:
        return np.asarray(image)
    if image.mode not in (*AS_THEY_ARE, *CONVERTED):
        raise DataError(
            f"The image in row {row:,} of {name}, counted from 0, has the pixel mode {image.mode!r}. Convert all "
            f"images to one of: {', '.join((*AS_THEY_ARE, *CONVERTED, GREY_16[0]))}."
        )
    return np.asarray(image.convert(CONVERTED.get(image.mode, image.mode)))


# -- The handwritten digits of scikit-learn: 1,797 real 8x8 images (UCI, Alpaydin and Kaynak 1998)

#: The test split: 360 of the 1,797 images, chosen by a fixed permutation.
TEST_RECORDS = 360
_SPLIT_SEED = 0


def digits(split: str) -> Arrays:
    """Pixels scaled from 0..16 to 0..1, flattened to 64; "train" has 1,437 records, "test" 360.

    >>> digits("train").inputs.shape, digits("test").inputs.shape
    ((1437, 64), (360, 64))
    """
    pixels, labels = Package("sklearn.datasets").load_digits(return_X_y=True)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    chosen = order[:TEST_RECORDS] if split == "test" else order[TEST_RECORDS:]
    return Arrays((pixels[chosen] / 16).astype(np.float32), labels[chosen].astype(np.int64))
