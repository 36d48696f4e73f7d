"""Where the records of a chunk come from: tensors cut by index, or any map-style data set through a DataLoader.

Both turn a sequence of addresses into (address, batch on the model's device), in order. A record is always
asked for by its own index, so its budget stays with it through shuffling, workers and chunks.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from ..errors import DataError
from .randomness import Randomness


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
    """A data set that can be read by physical batches.

    varies   whether the records of the batch last given were of different sizes, and a function of the caller's own
             collated them: it may have padded them
    """

    varies: bool

    def __len__(self) -> int: ...

    def stream(
        self, addresses: Iterable[Address], device: torch.device, randomness: Randomness
    ) -> Iterator[tuple[Address, Any]]:
        """(address, batch) for each, in order; the batch of an empty chunk is None."""

    def gather(self, address: Address, device: torch.device, randomness: Randomness) -> Gathered:
        """The records of one physical batch, read anew."""

    def fingerprint(self) -> str:
        """A name that changes when the data do, as far as that can be seen without reading a data set through."""


class Gathered:
    """The records of one physical batch, to be put together in other ways.

    batch    places -> a batch of the records that stand there, in that order
    records  each by itself, as it came from a map-style data set; None where a batch is cut, and nothing is collated
    name     of the collate function, if it is the caller's own
    collate  copies of records -> a batch of them
    """

    def __init__(
        self,
        batch: Callable[[Sequence[int]], Any],
        records: Sequence[Any] | None = None,
        name: str | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.batch, self.records, self.name, self.collate = batch, records, name, collate

    def copies(self) -> list[Any]:
        """Of all records, by themselves."""
        assert self.records is not None
        return [_copy(record) for record in self.records]


class TensorRecords:
    """A tuple of tensors with one row per record: the fast path."""

    varies = False

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

    def gather(self, address: Address, device: torch.device, randomness: Randomness) -> Gathered:
        def batch(places: Sequence[int]) -> tuple[Tensor, ...]:
            rows = torch.from_numpy(address.indices[list(places)])
            return tuple(t[rows.to(t.device)].to(device) for t in self._tensors)

        return Gathered(batch)

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
    step, and before records are collated, by the physical batch. So random augmentation is the same when a step is
    replayed, whatever worker does it.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        workers: int,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self._dataset, self._workers, self._collate = dataset, workers, collate
        self.varies = False

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # map-style: checked by `records`

    def stream(
        self, addresses: Iterable[Address], device: torch.device, randomness: Randomness
    ) -> Iterator[tuple[Address, Any]]:
        empties: deque[Address] = deque()  # met on the way to a chunk that the loader was told about
        told: deque[tuple[list[Address], Address]] = deque()

        def chunks() -> Iterator[list[tuple[int, int, int, int]]]:
            for address in addresses:
                if len(address.indices) == 0:
                    empties.append(address)
                    continue
                told.append((list(empties), address))
                empties.clear()
                yield _places(address)

        loader: DataLoader[Any] = DataLoader(
            _Addressed(self._dataset, randomness),
            batch_sampler=chunks(),  # any iterable of lists will do
            # No more workers than chunks: each is a process that starts, and reads the data set's files anew.
            num_workers=min(self._workers, len(addresses)) if isinstance(addresses, Sequence) else self._workers,
            collate_fn=_Collating(self._collate, randomness),
            generator=torch.Generator().manual_seed(0),  # its draw is not used: records are seeded one by one
        )
        for varies, batch in loader:
            before, address = told.popleft()
            self.varies = varies
            yield from ((empty, None) for empty in before)
            yield address, _moved(batch, device)
        yield from ((empty, None) for empty in empties)

    def gather(self, address: Address, device: torch.device, randomness: Randomness) -> Gathered:
        """Reads every record once; each batch is collated from copies."""
        loader: DataLoader[Any] = DataLoader(
            _Addressed(self._dataset, randomness),
            batch_sampler=[_places(address)],
            num_workers=min(self._workers, 1),
            collate_fn=list,
            generator=torch.Generator().manual_seed(0),
        )
        (read,) = loader
        collate = _Collating(self._collate, randomness)

        def collated(records: list[Any]) -> Any:
            (place, _), *_ = read
            _, found = collate([(place, record) for record in records])
            return _moved(found, device)

        def batch(places: Sequence[int]) -> Any:
            return collated([_copy(read[i][1]) for i in places])

        name = None
        if self._collate is not None:
            name = getattr(self._collate, "__qualname__", None) or type(self._collate).__name__
        return Gathered(batch, [record for _, record in read], name, collated)

    def fingerprint(self) -> str:
        """Of its kind and length: reading it through may take hours, and may not come out twice the same."""
        return f"{type(self._dataset).__qualname__}, {len(self):,} records"


Place = tuple[int, int, int, int]  # phase, step, number of the physical batch, index of the record


def _places(address: Address) -> list[Place]:
    return [(address.phase, address.step, address.number, int(i)) for i in address.indices]


class _Addressed(Dataset[Any]):
    """The data set, asked by a place; gives (place, record)."""

    def __init__(self, dataset: Dataset[Any], randomness: Randomness) -> None:
        self._dataset, self._randomness = dataset, randomness

    def __getitem__(self, place: Place) -> tuple[Place, Any]:
        phase, step, _, index = place
        _seed(self._randomness.seed("record", phase, step, index))
        return place, self._dataset[index]


class _Collating:
    """A collate function, seeded by the physical batch: (whether it may have padded records, the batch)."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None, randomness: Randomness) -> None:
        self._collate, self._randomness = collate, randomness

    def __call__(self, read: list[tuple[Place, Any]]) -> tuple[bool, Any]:
        (phase, step, number, _), _ = read[0]
        records = [record for _, record in read]
        _seed(self._randomness.seed("collate", phase, step, number))
        if self._collate is None:
            return False, default_collate(records)
        varies = len(set(sizes_of(records))) > 1  # before they are collated, which may change them
        return varies, self._collate(records)


def sizes_of(records: Sequence[Any]) -> list[int]:
    """How much each record holds: numbers of values and lengths of texts."""

    def size(leaf: Any) -> int:
        if isinstance(leaf, Tensor):
            return leaf.numel()
        if isinstance(leaf, np.ndarray):
            return int(leaf.size)
        return len(leaf) if isinstance(leaf, str | bytes) else 1

    return [sum(size(leaf) for leaf in tree_flatten(record)[0]) for record in records]


def _copy(record: Any) -> Any:
    """A tensor's copy holds its own values alone: deepcopy would take along the whole table that it is a row of."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf), record)


def _seed(seed: int) -> None:
    """All global generators of this process."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _moved(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


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
