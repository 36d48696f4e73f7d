"""The inputs of a large table as a tensor whose rows are made when they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...data.arrays import Encoded

aten = torch.ops.aten
#: Operators that take some rows of a tensor. All others get the whole one.
_OF_ROWS = (aten.select.int, aten.slice.Tensor, aten.index_select.default)


class EncodedTensor(Tensor):
    """(records, features) 32-bit floats. Indexed by records it is a plain tensor of them."""

    @staticmethod
    def __new__(cls, encoded: Encoded) -> EncodedTensor:
        return Tensor._make_wrapper_subclass(cls, encoded.shape, dtype=torch.float32)

    def __init__(self, encoded: Encoded) -> None:
        self._encoded = encoded
        self._rows = torch.from_numpy(encoded.places)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # as torch calls it
        return f"EncodedTensor({tuple(self.shape)})"

    def made(self, rows: Tensor) -> Tensor:
        """(…, features) the inputs at these rows of the table."""
        found = np.asarray(self._encoded.at(rows.reshape(-1).numpy()))
        return torch.from_numpy(found).reshape(*rows.shape, self.shape[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares one that takes no class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own, *others = args if args and isinstance(args[0], cls) else (None,)
        if own is not None and func is aten.detach.default:
            return cls(own._encoded)
        is_of_rows = func in _OF_ROWS and others[:1] in ([], [0])
        if own is not None and (is_of_rows or (func is aten.index.Tensor and len(others[0]) == 1)):
            return own.made(func(own._rows, *others))
        args, kwargs = tree_map_only(EncodedTensor, lambda one: one.made(one._rows), (args, kwargs or {}))
        return func(*args, **kwargs)


def as_tensor(array: npt.NDArray[Any] | Encoded) -> Tensor:
    """Inputs or targets as a tensor that shares their memory."""
    return EncodedTensor(array) if isinstance(array, Encoded) else torch.from_numpy(array)
