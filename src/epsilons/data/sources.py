"""The records that a config's [data] names: a data set with a name, an image file, a folder of tensors, or a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from ..tabular import is_table
from . import DATASETS, load
from .arrays import Arrays, Source, check_class_indices
from .images import ImageSet, image_table, images, is_image_table
from .tables import Columns, table

# -- A folder of tensors: `inputs` and `targets`, each as .npy, .safetensors or .pt, one row per record
#
# 8-bit unsigned integers are scaled to 0..1; other numbers are used unchanged. torch is imported for .pt files only,
# with weights_only=True, so that loading runs no code.

KINDS = (".npy", ".safetensors", ".pt")


def tensors(folder: Path, what: str, classes: tuple[str, ...] | None) -> Source:
    """The records of a folder.

    what     "training data" or "test data", for messages
    classes  names in the order of the target's indices; None to call them "0", "1", …

    Integer targets are class indices, floats are numbers to predict.
    Raises DataError if a file is missing, unreadable, or of another length.
    """
    inputs, targets = _read(folder, "inputs", what), tensor_targets(folder, what)
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets) or len(inputs) == 0:
        raise DataError(
            f"inputs and targets need one row per record, and at least one record; got shapes {inputs.shape} and "
            f"{targets.shape} in {folder}."
        )
    inputs = array_inputs(inputs, f"inputs in {folder}")
    if np.issubdtype(targets.dtype, np.floating):
        if classes is not None:
            raise DataError(f"The targets in {folder} are floats, but classes are named. Save them as class indices.")
        _check_finite(targets, f"targets in {folder}")
        return Source(Arrays(inputs, targets.astype(np.float32)), None)
    targets = targets.astype(np.int64)
    return Source(Arrays(inputs, targets), check_class_indices(targets, classes, f"targets in {folder}"))


def array_inputs(inputs: npt.NDArray[Any], what: str) -> npt.NDArray[np.float32]:
    """(records, …) as 32-bit floats; 8-bit unsigned integers scaled to 0..1. Raises DataError unless all are finite."""
    if inputs.dtype.kind not in "biuf":
        raise DataError(f"The {what} must be integers or floats, got {inputs.dtype}.")
    scaled = inputs.astype(np.float32) / np.float32(255 if inputs.dtype == np.uint8 else 1)
    _check_finite(scaled, what)
    return np.asarray(scaled)


def tensor_inputs(folder: Path, what: str) -> npt.NDArray[Any]:
    """The inputs in a folder as they are saved. Raises DataError if they cannot be read."""
    return _read(folder, "inputs", what)


def is_folder_of_tensors(path: Path) -> bool:
    """True if a folder holds `inputs` in one of the formats."""
    return path.is_dir() and any((path / f"inputs{kind}").is_file() for kind in KINDS)


def tensor_targets(folder: Path, what: str) -> npt.NDArray[Any]:
    """The targets as they are saved; class indices in a column, (records, 1), become (records,)."""
    targets = _read(folder, "targets", what)
    if targets.dtype.kind not in "biuf":
        raise DataError(f"The targets in {folder} must be class indices or floats, got {targets.dtype}.")
    is_column = targets.ndim == 2 and targets.shape[1] == 1 and targets.dtype.kind != "f"
    return targets[:, 0] if is_column else targets


def _check_finite(values: npt.NDArray[Any], what: str) -> None:
    if not np.isfinite(values).all():
        raise DataError(f"The {what} must be finite, got NaN or infinity. Replace them before training.")


def _read(folder: Path, name: str, what: str) -> npt.NDArray[Any]:
    for kind in KINDS:
        file = folder / f"{name}{kind}"
        if file.is_file():
            try:
                return _load(file)
            except Exception as error:  # each format raises its own errors for a damaged file
                raise DataError(f"{file} cannot be read as an array ({type(error).__name__}).") from None
    raise DataError(f"The {what} folder {folder} has no {name}: expected one of {', '.join(name + k for k in KINDS)}.")


def _load(file: Path) -> npt.NDArray[Any]:
    if file.suffix == ".npy":
        return np.asarray(np.load(file, allow_pickle=False))
    if file.suffix == ".safetensors":
        from safetensors.numpy import load_file

        (array,) = load_file(file).values()
        return array
    import torch

    tensor = torch.load(file, weights_only=True, map_location="cpu")
    if tensor.nbytes > file.stat().st_size:
        raise ValueError("a tensor that repeats its values")
    return np.asarray(tensor.numpy())


# -- The records that a config's [data] names: a data set with a name, an image file, a folder of tensors, or a
# table

#: The classes of the named data sets, ten each. They are public.
_DIGITS = tuple(map(str, range(10)))


def is_named(where: str, folder: Path) -> bool:
    """True for a data set with a name. It has its own train and test splits."""
    return where in DATASETS or _is_on_the_hub(where, folder)


def read_source(
    where: str,
    split: str,
    folder: Path,
    *,
    classes: Sequence[str] | None = None,
    number: bool = False,
    pixels: bool = False,
    columns: Columns | None = None,
) -> Source:
    """The records of a file, a folder or a named data set.

    where    a path, taken from `folder`, or a name
    split    "train" or "test": of a named data set; for files it is used in messages only
    classes  names of the classes, in order
    number   True if the target is a number, and not a class
    pixels   images have pixels from 0 to 1, and are not normalised
    columns  what the columns of a table are

    Raises DataError if there are no such data, or they cannot be used.
    """
    path, kind, what = folder / where, kind_of(where, folder), "training data" if split == "train" else "test data"
    names = tuple(classes) if classes is not None else None
    is_undeclared = names is None and not number
    if is_undeclared and kind in ("images", "table", "hub"):
        raise _undeclared(where if kind == "hub" else str(path))
    if kind == "name":
        return _named(load(where, split, pixels), names or _DIGITS, where)
    if kind in ("tensors", "folder"):
        return _of_tensors(path, what, names, number)
    if kind == "images":
        return image_table(path, what, names, pixels)
    if kind == "table":
        return table(path, what, None if number else names, columns or Columns())
    if kind == "hub":
        return _named(images(ImageSet(where, (where,)), split, pixels), names, where)
    raise DataError(
        f"The {what} {where!r} is neither a file or folder in {folder.resolve()} nor a data set with a name "
        f"({', '.join(DATASETS)}, or a hub name owner/name)."
    )


def _of_tensors(path: Path, what: str, names: tuple[str, ...] | None, number: bool) -> Source:
    if not is_folder_of_tensors(path):
        raise DataError(f"The {what} folder {path} holds no inputs.npy, inputs.safetensors or inputs.pt.")
    source = tensors(path, what, names)
    if source.classes is not None and names is None and not number:  # float targets need no classes
        raise _undeclared(str(path))
    return source


def kind_of(where: str, folder: Path) -> Literal["name", "tensors", "folder", "images", "table", "hub", "none"]:
    """What a config names as its data: by the name alone, but for the kind of a folder and of a Parquet file."""
    path = folder / where
    if where in DATASETS:
        return "name"
    if path.is_dir():
        return "tensors" if is_folder_of_tensors(path) else "folder"
    if is_image_table(path):
        return "images"
    if is_table(path):
        return "table"
    return "hub" if _is_on_the_hub(where, folder) else "none"


def _undeclared(what: str) -> DataError:
    return DataError(
        f"The classes of {what} are not named: write them in data.classes, in order, or how many there are. They are "
        "not read off the data, because the set of classes that occur is an output of the data. (`epsilons init` "
        "drafts the line.)"
    )


def _is_on_the_hub(where: str, folder: Path) -> bool:
    return where.count("/") == 1 and not Path(where).suffix and not (folder / where).exists()


def _named(arrays: Arrays, classes: tuple[str, ...] | None, where: str) -> Source:
    """A named data set, with a name for every class."""
    return Source(arrays, check_class_indices(arrays.targets, classes, f"labels of {where}"))
