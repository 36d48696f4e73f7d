"""What a reader returns: inputs and targets, one row per record."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Arrays(NamedTuple):
    """inputs (records, …) 32-bit floats; targets (records,) class indices."""

    inputs: npt.NDArray[np.float32]
    targets: npt.NDArray[np.int64]
