"""Where the records of a chunk come from: tensors cut by index, or any map-style data set through a DataLoader.

Both turn a sequence of addresses into (address, batch on the model's device), in order. A record is always
asked for by its own index, so its budget stays with it through shuffling, workers and chunks.
"""

from __future__ import annotations

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
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ..errors import DataError
from ..runs import KEY_BYTES
from . import checkpoints, fingerprints
from .randomness import Randomness

#: So many of a map-style data set's records at most are in its fingerprint.
SAMPLED = 10


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
            yield address, tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
        yield from ((empty, None) for empty in empties)

    def fingerprint(self) -> str:
        """Of its kind, its length and a few records: reading it through may take hours.

        Each of these records is read twice, under the same generators. If they come out different, or one cannot be
        read, their values are left out: the first draw will meet the error at the place where it belongs.
        """
        name = f"{type(self._dataset).__qualname__}, {len(self):,} records"
        chosen = _sampled(len(self))
        generators = checkpoints.of_generators()
        try:
            found = list(self._hashes([*chosen, *chosen]))
        except Exception:  # a data set of somebody else's may raise anything
            return name
        finally:
            checkpoints.into_generators(generators)
        once, again = found[: len(chosen)], found[len(chosen) :]
        return f"{name}, {fingerprints.of(once)}" if once == again else name

    def _hashes(self, indices: list[int]) -> Iterator[str]:
        """Of these records, read as the loop will read them: a file that workers open is not opened here before."""
        loader: DataLoader[Any] = DataLoader(
            _Hashed(_Addressed(self._dataset, Randomness(bytes(KEY_BYTES)))),
            batch_sampler=[[(0, 0, index)] for index in indices],  # any iterable of lists will do
            num_workers=min(self._workers, 1),
            collate_fn=_only,
            generator=torch.Generator().manual_seed(0),
        )
        return iter(loader)


class _Hashed(Dataset[str]):
    """Fingerprints of a data set's records, made where they are read."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, address: tuple[int, int, int]) -> str:
        return fingerprints.of(self._dataset[address])


def _only(values: list[str]) -> str:
    (value,) = values
    return value


def _sampled(records: int) -> list[int]:
    """The first and the last index and a few between, always the same for so many records."""
    if records == 0:
        return []
    digest = hashlib.blake2b(f"{records}".encode(), digest_size=8 * (SAMPLED - 2)).digest()
    between = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") % records for i in range(SAMPLED - 2)]
    return sorted({0, *between, records - 1})


class _Addressed(Dataset[Any]):
    """The data set, asked by (phase, step, index)."""

    def __init__(self, dataset: Dataset[Any], randomness: Randomness) -> None:
        self._dataset, self._randomness = dataset, randomness

    def __getitem__(self, address: tuple[int, int, int]) -> Any:
        seed = self._randomness.seed("record", *address)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return self._dataset[address[2]]


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
