"""What a reader returns: inputs and targets, one row per record; with them, what else stood in the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Arrays(NamedTuple):
    """inputs (records, …) 32-bit floats; targets (records,) class indices, or 32-bit floats for a number."""

    inputs: npt.NDArray[np.float32]
    targets: npt.NDArray[Any]

    def subset(self, indices: npt.NDArray[np.int64]) -> Arrays:
        """These records, in this order."""
        return Arrays(self.inputs[indices], self.targets[indices])


@dataclass(frozen=True, eq=False)
class Source:
    """A file's records, ready for training.

    arrays   inputs and targets
    classes  names of the classes, in the order of their indices; None where the target is a number
    table    the pyarrow.Table they came from, for a column of budgets; None where there is none
    """

    arrays: Arrays
    classes: tuple[str, ...] | None
    table: Any = None

    def __len__(self) -> int:
        return len(self.arrays.targets)
