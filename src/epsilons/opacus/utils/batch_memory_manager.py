"""BatchMemoryManager: a draw is computed in physical batches of at most so many records."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ...errors import InputError
from ..loader import PrivateLoader


class BatchMemoryManager:
    """Within the `with` block, the loop gets a draw in physical batches; the update follows the last of them.

    data_loader              the one that make_private returned
    max_physical_batch_size  number of records in a physical batch, at most
    optimizer                the one that make_private returned; it needs no signal and is not changed

    Raises InputError for another data loader.
    """

    def __init__(self, *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: Optimizer) -> None:
        if not isinstance(data_loader, PrivateLoader):
            raise InputError(
                f"BatchMemoryManager needs the data loader that make_private returned, got a "
                f"{type(data_loader).__name__}."
            )
        self._loader, self._largest = data_loader, max_physical_batch_size
        self._before = data_loader.private.max_physical_batch

    def __enter__(self) -> PrivateLoader:
        self._before = self._loader.private.max_physical_batch
        self._loader.private.max_physical_batch = self._largest
        return self._loader

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._loader.private.max_physical_batch = self._before
