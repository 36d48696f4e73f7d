"""Where the records of a chunk come from: tensors cut by index, or any map-style data set through a DataLoader.

Both turn a sequence of addresses into (address, batch on the model's device), in order. A record is always
asked for by its own index, so its budget stays with it through shuffling, workers and chunks.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ..errors import DataError
from .batches import moved
from .randomness import Randomness

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Address:
    """One physical chunk: which draw it belongs to, and whom it holds.

    phase, step  the draw
    number, of   this chunk's place among the draw's chunks
    indices      (chunk,) data-set indices; empty only for an empty draw
    """

    phase: int
    step: int
    number: int
    of: int
    indices: npt.NDArray[np.int64]

    @property
    def is_last(self) -> bool:
        return self.number == self.of - 1


class Records(Protocol):
    """A data set that can be read chunk by chunk."""

    def __len__(self) -> int: ...

    def stream(
        self, addresses: Iterable[Address], device: torch.device, randomness: Randomness
    ) -> Iterator[tuple[Address, Any]]:
        """(address, batch) for each, in order; the batch of an empty chunk is None."""

    def fingerprint(self) -> str:
        """A name that changes when the data do, as far as that can be seen without reading a data set through."""


class TensorRecords:
    """A tuple of tensors with one row per record: the fast path."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        if any(t.ndim == 0 for t in tensors):
            raise DataError("A data set's tensors need one row per record; a single number arrived.")
        lengths = {len(t) for t in tensors}
        if len(lengths) != 1:
            raise DataError(f"The tensors of a data set must have one row per record each; rows: {sorted(lengths)}.")
        self._tensors = tuple(tensors)

    def __len__(self) -> int:
        return len(self._tensors[0])

    def stream(
        self, addresses: Iterable[Address], device: torch.device, randomness: Randomness
    ) -> Iterator[tuple[Address, Any]]:
        for address in addresses:
            if len(address.indices) == 0:
                yield address, None
                continue
            rows = torch.from_numpy(address.indices)
            yield address, tuple(t[rows.to(t.device)].to(device) for t in self._tensors)

    def fingerprint(self) -> str:
        """Of every value."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in self._tensors:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            for part in torch.split(tensor.detach(), 4096):
                digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class LoadedRecords:
    """Any map-style data set, through a DataLoader with workers.

    The global generators (torch, NumPy, random) are seeded before each record is read, by the record and the
    step, so that random augmentation is the same when a step is replayed, whatever worker does it.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        workers: int,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self._dataset, self._workers, self._collate = dataset, workers, collate

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # map-style: checked by `records`

    def stream(
        self, addresses: Iterable[Address], device: torch.device, randomness: Randomness
    ) -> Iterator[tuple[Address, Any]]:
        empties: deque[Address] = deque()  # met on the way to a chunk that the loader was told about
        told: deque[tuple[list[Address], Address]] = deque()

        def chunks() -> Iterator[list[tuple[int, int, int]]]:
            for address in addresses:
                if len(address.indices) == 0:
                    empties.append(address)
                    continue
                told.append((list(empties), address))
                empties.clear()
                yield [(address.phase, address.step, int(i)) for i in address.indices]

        loader: DataLoader[Any] = DataLoader(
            _Addressed(self._dataset, randomness),
            batch_sampler=chunks(),  # any iterable of lists will do
            # No more workers than chunks: each is a process that starts, and reads the data set's files anew.
            num_workers=min(self._workers, len(addresses)) if isinstance(addresses, Sequence) else self._workers,
            collate_fn=self._collate,
            generator=torch.Generator().manual_seed(0),  # its draw is not used: records are seeded one by one
        )
        for batch in loader:
            before, address = told.popleft()
            yield from ((empty, None) for empty in before)
            yield address, moved(batch, device)
        yield from ((empty, None) for empty in empties)

    def fingerprint(self) -> str:
        """Of its kind and length: reading it through may take hours, and may not come out twice the same."""
        return f"{type(self._dataset).__qualname__}, {len(self):,} records"


class _Addressed(Dataset[Any]):
    """The data set, asked by (phase, step, index)."""

    def __init__(self, dataset: Dataset[Any], randomness: Randomness) -> None:
        self._dataset, self._randomness = dataset, randomness

    def __getitem__(self, address: tuple[int, int, int]) -> Any:
        seed = self._randomness.seed("record", *address)
        seed_torch(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return self._dataset[address[2]]


def seed_torch(seed: int, device: torch.device = _CPU) -> None:
    """What torch.manual_seed does to the generators that are in use: the CPU's, and those of accelerators.

    torch.manual_seed also queues the seed for accelerators that may be used later, and formats a stack trace for each:
    0.1 to 0.5 ms a call. A process that first uses CUDA while a record is read begins with CUDA's own seed there.
    """
    if device.type not in ("cpu", "cuda", "mps", "xpu"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    if torch.xpu.is_initialized():  # type: ignore[no-untyped-call]
        torch.xpu.manual_seed_all(seed)
    if torch.backends.mps.is_available() and not torch.mps._is_in_bad_fork():
        torch.mps.manual_seed(seed)


def columns(data: Sequence[Any]) -> tuple[Tensor, ...]:
    """Tensors as they are, and arrays as tensors. Raises DataError for an array that torch has no tensor for."""
    try:
        return tuple(t if isinstance(t, Tensor) else torch.from_numpy(_own(t)) for t in data)
    except (TypeError, ValueError) as e:
        kinds = ", ".join(str(t.dtype) for t in data)
        raise DataError(
            f"Arrays of these types arrived, and not all of them can be tensors: {kinds}. Turn them into numbers "
            "first, e.g. array.astype(numpy.float32)."
        ) from e


def are_columns(data: object) -> bool:
    """Whether these are tensors or arrays with one row per record; a list of arrays is a data set, one record each."""
    kinds = (Tensor, np.ndarray) if isinstance(data, tuple) else Tensor
    return isinstance(data, tuple | list) and len(data) > 0 and all(isinstance(t, kinds) for t in data)


def refuse_tables(data: object) -> None:
    """Refuse tables and dicts of columns, which are read by column, where records are to be read by index.

    Raises DataError.
    """
    parts = data if isinstance(data, tuple | list) and len(data) < 10 else ()
    for part in (data, *parts):
        is_frame = hasattr(part, "columns") and hasattr(part, "to_numpy")  # of pandas, polars, modin, cudf
        if is_frame or type(part).__module__.partition(".")[0] == "pyarrow":
            raise DataError(
                f"A {type(part).__module__.partition('.')[0]} {type(part).__name__} arrived, which is read by column. "
                "Pass its columns as arrays, (frame[features].to_numpy(), frame[target].to_numpy()), or train on the "
                "table itself by a config: epsilons init."
            )
    if isinstance(data, Mapping) and set(data) != set(range(len(data))):
        names = ", ".join(repr(name) for name in list(data)[:4]) + (", …" if len(data) > 4 else "")
        raise DataError(
            f"A {type(data).__name__} of {len(data)} columns arrived ({names}). Pass the columns as a tuple of tensors "
            "or arrays, or a data set of which each record is a dict."
        )


def _own(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array in a form that a tensor may share: a copy of what is read-only or runs backwards."""
    return np.require(array, requirements=["C", "W"])


def records(
    dataset: object,
    workers: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Records:
    """The data set as Records. Raises DataError for what cannot be drawn record by record."""
    if isinstance(dataset, TensorDataset):
        return TensorRecords(dataset.tensors)
    refuse_tables(dataset)
    if are_columns(dataset):
        return TensorRecords(columns(dataset))  # type: ignore[arg-type]  # a tuple or list, as was just seen
    if isinstance(dataset, Tensor):
        return TensorRecords((dataset,))
    if isinstance(dataset, DataLoader):
        raise DataError(
            "A DataLoader arrived. Draws are made here, record by record, each at its own rate: pass the data set "
            "itself (loader.dataset), and workers= and collate_fn= if you need them."
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"A {type(dataset).__name__} cannot be read by index. Each record must be drawn by its own coin, which "
            "needs a map-style data set, with __len__ and __getitem__."
        )
    return LoadedRecords(dataset, workers, collate)  # type: ignore[arg-type]  # map-style, checked above
