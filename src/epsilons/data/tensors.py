"""A folder of tensors: `inputs` and `targets`, each as .npy, .safetensors or .pt, one row per record.

8-bit unsigned integers are scaled to 0..1; other numbers are used unchanged. torch is imported for .pt files only, with
weights_only=True, so that loading runs no code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .arrays import Arrays, Source, check_class_indices

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
