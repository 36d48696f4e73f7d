"""A folder of tensors: `inputs` and `targets`, each as .npy, .safetensors or .pt, one row per record.

Integers in 0..255 of 8 bits are scaled to 0..1; everything else is taken as it is. torch loads only for .pt files,
and runs nothing that is in them (weights_only).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .arrays import Arrays, Source

KINDS = (".npy", ".safetensors", ".pt")


def tensors(folder: Path, what: str, classes: tuple[str, ...] | None) -> Source:
    """The records of a folder. classes: names in order of the target's indices, or None to count them from 0.

    Targets are class indices if they are integers, numbers if they are floats.
    Raises DataError if a file is missing, unreadable, or of another length.
    """
    inputs, targets = _read(folder, "inputs", what), _targets(folder, what)
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets) or len(inputs) == 0:
        raise DataError(
            f"{folder} holds inputs of shape {inputs.shape} and targets of shape {targets.shape}; expected one row per "
            "record in both, and at least one."
        )
    if inputs.dtype.kind not in "biuf":
        raise DataError(f"The inputs in {folder} are of type {inputs.dtype}; expected integers or floats.")
    inputs = inputs.astype(np.float32) / np.float32(255 if inputs.dtype == np.uint8 else 1)
    if not np.isfinite(inputs).all():
        raise DataError(f"The inputs in {folder} hold values that are not finite. Replace them before training.")
    if np.issubdtype(targets.dtype, np.floating):
        if classes is not None:
            raise DataError(f"The targets in {folder} are floats, but classes are named. Save them as class indices.")
        if not np.isfinite(targets).all():
            raise DataError(f"The targets in {folder} hold values that are not finite. Replace them before training.")
        return Source(Arrays(inputs, targets.astype(np.float32)), None)
    targets = targets.astype(np.int64)
    known = len(classes) if classes is not None else int(targets.max()) + 1
    bad = (targets < 0) | (targets >= known)
    if bad.any():
        raise DataError(
            f"{bad.sum():,} of {bad.size:,} targets in {folder} are not class indices from 0 to {known - 1}. Add the "
            "class to data.classes, or mend them."
        )
    return Source(Arrays(inputs, targets), classes or tuple(map(str, range(known))))


def classes_in(folder: Path) -> int | None:
    """How many classes occur in a folder's targets, for a draft; None where they are numbers."""
    targets = _targets(folder, "training data")
    is_number = np.issubdtype(targets.dtype, np.floating) or targets.size == 0
    return None if is_number else max(2, int(targets.max()) + 1)


def is_folder_of_tensors(path: Path) -> bool:
    """True where a folder holds `inputs` in one of the formats."""
    return path.is_dir() and any((path / f"inputs{kind}").is_file() for kind in KINDS)


def _targets(folder: Path, what: str) -> npt.NDArray[Any]:
    """(records,) also where they were saved as a column."""
    targets = _read(folder, "targets", what)
    if targets.dtype.kind not in "biuf":
        raise DataError(f"The targets in {folder} are of type {targets.dtype}; expected class indices, or floats.")
    is_column = targets.ndim == 2 and targets.shape[1] == 1 and targets.dtype.kind != "f"
    return targets[:, 0] if is_column else targets


def _read(folder: Path, name: str, what: str) -> npt.NDArray[Any]:
    for kind in KINDS:
        file = folder / f"{name}{kind}"
        if file.is_file():
            try:
                return _load(file)
            except Exception as error:  # each format has its own exceptions for a file that is not one
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

    return np.asarray(torch.load(file, weights_only=True, map_location="cpu").numpy())
