"""Models and data sets that are one function each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset


class Model(nn.Module):
    """A function (model, *inputs) of layers and parameters, which are attributes of the model by their names."""

    def __init__(self, compute: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Tensor:
        return self.compute(self, *inputs)


class Records(Dataset[Any]):
    """A map-style data set of so many records: a function of the index."""

    def __init__(self, read: Callable[[int], Any], count: int) -> None:
        self.read, self.count = read, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.read(index)
