"""Convert IDX files, the format of MNIST and Fashion-MNIST, to the Parquet files that EPSILONS_DATA holds.

    python -m experiments.idx FOLDER fashion-mnist OUT

FOLDER has train-images-idx3-ubyte.gz and the three files that belong to it, as in Debian's package
dataset-fashion-mnist (under /usr/share/datasets/fashion-mnist). OUT gets fashion-mnist-train.parquet and
fashion-mnist-test.parquet.
"""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from epsilons.errors import DataError, EpsilonsError

STEMS = {"train": "train", "test": "t10k"}


def convert(folder: Path, name: str, out: Path) -> list[Path]:
    """Write both splits; returns the files. Raises DataError for a file that is not IDX of bytes."""
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for split, stem in STEMS.items():
        images = read_idx(folder / f"{stem}-images-idx3-ubyte.gz", 3)
        labels = read_idx(folder / f"{stem}-labels-idx1-ubyte.gz", 1)
        if len(images) != len(labels):
            raise DataError(f"{len(images):,} images of {name} {split} have {len(labels):,} labels.")
        files.append(out / f"{name}-{split}.parquet")
        parquet.write_table(pa.table({"image": [_png(image) for image in images], "label": labels}), files[-1])
    return files


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """The array of one gzipped file: 0, 0, 8 (for bytes), the number of dimensions, each in 4 bytes, the values."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from None
    shape = np.frombuffer(content, ">u4", dimensions, offset=4).astype(int) if len(content) > 4 * dimensions + 4 else ()
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) != 4 * dimensions + 4 + np.prod(shape):
        raise DataError(f"{path} is not a complete IDX file of bytes in {dimensions} dimensions.")
    return np.frombuffer(content, np.uint8, offset=4 * dimensions + 4).reshape(shape)


def _png(image: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    try:
        source, name, target = sys.argv[1:]
        print(*convert(Path(source), name, Path(target)), sep="\n")
    except ValueError:
        sys.exit(__doc__)
    except EpsilonsError as error:
        sys.exit(f"experiments.idx: {error}")
