"""From IDX files, as MNIST and Fashion-MNIST are handed out, to the Parquet files that EPSILONS_DATA holds.

    python -m experiments.idx FOLDER fashion-mnist OUT

FOLDER has train-images-idx3-ubyte.gz and its three companions, as in Debian's package dataset-fashion-mnist (under
/usr/share/datasets/fashion-mnist); OUT gets fashion-mnist-train.parquet and fashion-mnist-test.parquet.
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


def convert(folder: Path, name: str, run_dir: Path) -> list[Path]:
    """Write both splits; returns the files. Raises DataError for what is not IDX of bytes."""
    run_dir.mkdir(parents=True, exist_ok=True)
    made = []
    for split, stem in STEMS.items():
        pictures, labels = (
            read(folder / f"{stem}-images-idx3-ubyte.gz", 3),
            read(folder / f"{stem}-labels-idx1-ubyte.gz", 1),
        )
        if len(pictures) != len(labels):
            raise DataError(f"{len(pictures):,} images of {name} {split} have {len(labels):,} labels.")
        made.append(run_dir / f"{name}-{split}.parquet")
        parquet.write_table(pa.table({"image": [_png(picture) for picture in pictures], "label": labels}), made[-1])
    return made


def read(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """The array of one gzipped file: 0, 0, 8 (for bytes), the number of dimensions, each in 4 bytes, the values."""
    try:
        whole = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from None
    shape = np.frombuffer(whole, ">u4", dimensions, offset=4).astype(int) if len(whole) > 4 * dimensions + 4 else ()
    if whole[:4] != bytes((0, 0, 8, dimensions)) or len(whole) != 4 * dimensions + 4 + np.prod(shape):
        raise DataError(f"{path} is not a whole IDX file of bytes in {dimensions} dimensions.")
    return np.frombuffer(whole, np.uint8, offset=4 * dimensions + 4).reshape(shape)


def _png(picture: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    try:
        source, name, target = sys.argv[1:]
        print(*convert(Path(source), name, Path(target)), sep="\n")
    except ValueError:
        sys.exit(__doc__)
    except EpsilonsError as error:
        sys.exit(f"experiments.idx: {error}")
