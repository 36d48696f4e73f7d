"""Where the records of a chunk come from: tensors cut by index, or any map-style data set through a DataLoader.

Both turn a sequence of addresses into (address, batch on the model's device), in order. A record is always
asked for by its own index, so its budget stays with it through shuffling, workers and chunks.
"""

from __future__ import annotations

import copy
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
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from ..errors import DataError
from ..run_folder import KEY_BYTES
from . import checkpoints, fingerprints
from .batches import leaves, mapped, moved
from .independence.fixed_draws import FixedDraws
from .randomness import Randomness

#: So many of a map-style data set's records at most are in its fingerprint.
SAMPLED = 10
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
    calm     the same, with random operators of a collate function that draw nothing
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
        calm: Callable[[Sequence[int]], Any] | None = None,
    ) -> None:
        self.batch, self.records, self.name, self.collate = batch, records, name, collate
        self.calm = calm or batch

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
        num_workers: int,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self._dataset, self._workers, self._collate = dataset, num_workers, collate
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
            yield address, moved(batch, device)
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
            return moved(found, device)

        def batch(places: Sequence[int]) -> Any:
            return collated([_copy(read[i][1]) for i in places])

        if self._collate is None:
            return Gathered(batch, [record for _, record in read])

        def calm(places: Sequence[int]) -> Any:
            with FixedDraws():  # type: ignore[no-untyped-call]
                return batch(places)

        name = getattr(self._collate, "__qualname__", None) or type(self._collate).__name__
        return Gathered(batch, [record for _, record in read], name, collated, calm)

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
            batch_sampler=[[(0, 0, 0, index)] for index in indices],  # any iterable of lists will do
            num_workers=min(self._workers, 1),
            collate_fn=_only,
            generator=torch.Generator().manual_seed(0),
        )
        return iter(loader)


class _Hashed(Dataset[str]):
    """Fingerprints of a data set's records, made where they are read."""

    def __init__(self, dataset: _Addressed) -> None:
        self._dataset = dataset

    def __getitem__(self, place: Place) -> str:
        return fingerprints.of(self._dataset[place][1])


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

    return [sum(size(leaf) for leaf in leaves(record)) for record in records]


def _copy(record: Any) -> Any:
    """A tensor's copy holds its own values alone: deepcopy would take along the whole table that it is a row of."""
    return mapped(record, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf))


def _seed(seed: int) -> None:
    """All global generators of this process."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


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
    num_workers: int = 0,
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
            "itself (loader.dataset), and num_workers= and collate_fn= if you need them."
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"A {type(dataset).__name__} cannot be read by index. Each record must be drawn by its own coin, which "
            "needs a map-style data set, with __len__ and __getitem__."
        )
    return LoadedRecords(dataset, num_workers, collate)  # type: ignore[arg-type]  # map-style, checked above
