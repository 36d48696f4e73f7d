"""Sources of physical batches: tensors indexed by row, or any map-style data set through a DataLoader.

Both turn a sequence of physical batches (which rows) into pairs with the batch on the model's device, in order. A row
is always read by its index, so that its budget stays with it, whatever workers and physical batches there are.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from ..core.mechanism import IntArray
from ..draws import fingerprints
from ..draws.batches import Gathered, copied, moved, sizes_of
from ..draws.persons_rows import Persons, Readings
from ..draws.randomness import Randomness
from ..errors import DataError
from ..independence import data_sets
from ..independence.fixed_draws import FixedDraws
from ..ledger.run_folder import KEY_BYTES
from . import checkpoints
from .validation import are_columns, columns, named_columns, refuse_tables

#: So many of a map-style data set's records at most are in its fingerprint.
SAMPLED = 10
#: Of tensors with more bytes than these, so many bytes of some rows are in the fingerprint. Reading all may take hours.
LARGE, READ = 1 << 30, 1 << 19
#: So many rows are read at once for a fingerprint of all.
BLOCK = 4096
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class PhysicalBatch:
    """Which rows of which draw are computed at once.

    phase, step  the draw
    number, of   position among the physical batches of the draw, and how many there are
    readings     of whole persons; none only for an empty draw
    is_filler    True if it is computed so that all ranks compute as many, and adds nothing
    """

    phase: int
    step: int
    number: int
    of: int
    readings: Readings
    is_filler: bool = False

    @property
    def indices(self) -> npt.NDArray[np.int64]:
        """(batch,) data-set index of each row."""
        return self.readings.rows

    @property
    def is_last(self) -> bool:
        return self.number == self.of - 1


class TensorSource:
    """Tensors with one row per record: the fast path. Batches are tuples, or dicts if the tensors have names."""

    varies, name = False, "tensors"

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[Any] | None = None) -> None:
        if any(t.ndim == 0 for t in tensors):
            raise DataError("The tensors of a data set need one row per record, got a single number.")
        lengths = {len(t) for t in tensors}
        if len(lengths) != 1:
            raise DataError(f"The tensors of a data set need one row per record each, got {sorted(lengths)} rows.")
        self._tensors, self._names = tuple(tensors), names

    def __len__(self) -> int:
        return len(self._tensors[0])

    def stream(
        self, batches: Iterable[PhysicalBatch], device: torch.device, randomness: Randomness
    ) -> Iterator[tuple[PhysicalBatch, Any]]:
        """(physical batch, its data) for each, in order; the data of an empty one are None."""
        for physical in batches:
            yield physical, self._rows(physical.indices, device) if len(physical.indices) else None

    def gather(self, physical: PhysicalBatch, device: torch.device, randomness: Randomness) -> Gathered:
        """The records of one physical batch, read again."""
        return Gathered(lambda positions: self._rows(physical.indices[list(positions)], device))

    def inspect(self, physical: PhysicalBatch, randomness: Randomness, person: IntArray | None) -> str | None:
        """A cause of `records.refusal` if rows of two persons overlap in memory, such as windows of one series.

        person   (rows,) each row's person; None if each row is one person
        """
        rows = [*physical.indices.tolist(), (int(physical.indices[0]) + 1) % len(self)]
        overlap = data_sets.overlap([tuple(t[row] for t in self._tensors) for row in rows], rows, person)
        return "overlap" if overlap else None

    def _rows(self, indices: npt.NDArray[np.int64], device: torch.device) -> tuple[Tensor, ...] | dict[Any, Tensor]:
        rows = torch.from_numpy(indices)
        cut = tuple(_rows_of(t, rows.to(t.device)).to(device) for t in self._tensors)
        return cut if self._names is None else dict(zip(self._names, cut, strict=True))

    def fingerprint(self, whole: bool = False) -> str:
        """A hash of every value; of large tensors, of a few rows, unless it is to be of the whole.

        If others differ when a run is resumed, an update that is made again differs from the ledger's: a new key.
        """
        digest = hashlib.blake2b(digest_size=16)
        if self._names is not None:
            digest.update(repr(list(self._names)).encode())
        is_large = sum(t.numel() * t.element_size() for t in self._tensors) > LARGE and not whole
        for tensor in map(Tensor.detach, self._tensors):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            some = READ // (SAMPLED * len(self._tensors) * tensor.element_size())
            blocks = (tensor[first : first + BLOCK] for first in range(0, len(self), BLOCK))
            rows = (tensor[row].reshape(-1)[:some] for row in _sampled(len(self)))
            for part in rows if is_large else blocks:
                digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class DataLoaderSource:
    """Any map-style data set, through a DataLoader with workers.

    The global generators (torch, NumPy, random) and those that the data set holds are seeded before each row is read,
    from its person, its number among the person's readings and the step; the global ones also before rows are collated,
    from the physical batch. So random augmentation is the same when a step is replayed, whichever worker reads the row.

    varies   True if the records of the latest batch had different sizes and a custom function collated them; it may
             have padded them
    """

    def __init__(self, dataset: Dataset[Any], num_workers: int, collate: Callable[[list[Any]], Any] | None) -> None:
        self._dataset, self._workers, self._collate = dataset, num_workers, collate
        self.varies, self.name = False, type(dataset).__name__

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # map-style: checked by data_source

    def stream(
        self, batches: Iterable[PhysicalBatch], device: torch.device, randomness: Randomness
    ) -> Iterator[tuple[PhysicalBatch, Any]]:
        pending: deque[PhysicalBatch] = deque()

        def requests() -> Iterator[PhysicalBatch]:
            for physical in batches:
                pending.append(physical)
                if len(physical.indices):
                    yield physical

        # At most one worker per batch: each is a process that starts and opens the data set's files.
        num_workers = min(self._workers, len(batches)) if isinstance(batches, Sequence) else self._workers
        collate = _Collating(self._collate, randomness)
        for varies, batch in _loader(_Read(self._dataset, randomness), requests(), num_workers, collate):
            self.varies = varies
            while len(pending[0].indices) == 0:
                yield pending.popleft(), None
            yield pending.popleft(), moved(batch, device)
        yield from ((empty, None) for empty in pending)

    def gather(self, physical: PhysicalBatch, device: torch.device, randomness: Randomness) -> Gathered:
        """Reads every record once; each batch is collated from copies."""
        ((_, read),) = _loader(_Read(self._dataset, randomness), [physical], min(self._workers, 1), tuple)
        collate = _Collating(self._collate, randomness)

        def collated(copies: list[Any]) -> Any:
            _, batch = collate((physical, copies))
            return moved(batch, device)

        def batch(positions: Sequence[int]) -> Any:
            return collated([copied(read[i]) for i in positions])

        if self._collate is None:
            return Gathered(batch, read)

        def calm(positions: Sequence[int]) -> Any:
            with FixedDraws():  # type: ignore[no-untyped-call]
                return batch(positions)

        name = getattr(self._collate, "__qualname__", None) or type(self._collate).__name__
        return Gathered(batch, read, name, collated, calm)

    def inspect(self, physical: PhysicalBatch, randomness: Randomness, person: IntArray | None) -> str | None:
        """A cause of `records.refusal` if a record depends on others, or on what was read before it."""
        inspecting = _Inspect(self._dataset, randomness, person)
        ((cause,),) = _loader(inspecting, [physical], min(self._workers, 1), tuple)
        return cause  # type: ignore[no-any-return]

    def fingerprint(self, whole: bool = False) -> str:
        """A hash of the type, the length and a few records: reading all of them may take hours.

        Each of these records is read twice, under the same generators. If the two differ, or one cannot be read, their
        values are left out, and the first draw raises the error.
        """
        name = f"{type(self._dataset).__qualname__}, {len(self):,} records"
        sampled = _sampled(len(self))
        try:
            with checkpoints.same_generators():
                hashes = self._hashes([*sampled, *sampled])
        except Exception:  # a custom data set may raise anything
            return name
        first, second = hashes[: len(sampled)], hashes[len(sampled) :]
        return f"{name}, {fingerprints.of(first)}" if first == second else name

    def _hashes(self, indices: list[int]) -> list[str]:
        """Hashes of these records, read as the loop reads them: files that workers open are not opened here."""
        batches = [_alone(index) for index in indices]
        read = _Read(self._dataset, Randomness(bytes(KEY_BYTES)))
        return list(_loader(read, batches, min(self._workers, 1), _hash_of_record))


def _alone(row: int) -> PhysicalBatch:
    """A physical batch of one record."""
    index, one = np.array([row]), np.array([1])
    return PhysicalBatch(0, 0, 0, 1, Readings(index, one, index, np.array([0])))


def _hash_of_record(read: Records) -> str:
    """The fingerprint of a single record, computed by the worker that reads it."""
    return fingerprints.of(read[1][0])


def _sampled(records: int) -> list[int]:
    """The first and the last index and a few between, always the same for one number of records."""
    if records == 0:
        return []
    digest = hashlib.blake2b(f"{records}".encode(), digest_size=8 * (SAMPLED - 2)).digest()
    between = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") % records for i in range(SAMPLED - 2)]
    return sorted({0, *between, records - 1})


def _rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    """`tensor[rows]`, in the tensor's own memory format.

    Where the numbers of a row are neighbours in memory, rows are copied whole: 5 to 20 times as fast.
    """
    is_copied = tensor.ndim > 1 and tensor.layout is torch.strided and tensor.is_contiguous()
    return tensor.index_select(0, rows) if is_copied else tensor[rows]


Records = tuple[PhysicalBatch, list[Any]]  # a physical batch and its records, in order


def _loader(
    dataset: Dataset[Any], batches: Iterable[PhysicalBatch], num_workers: int, collate: Callable[[Any], Any]
) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_sampler=batches,  # type: ignore[arg-type]  # each goes to __getitems__ as it is
        num_workers=num_workers,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(0),  # its draw is not used: records are seeded one by one
    )


class _Read(Dataset[Any]):
    """The data set, read by physical batches: each record under a seed of its own."""

    def __init__(self, dataset: Dataset[Any], randomness: Randomness) -> None:
        self._dataset, self._randomness = dataset, randomness
        self._own: list[fingerprints.Own] | None = None  # looked for by the process that reads

    def __getitems__(self, physical: PhysicalBatch) -> Any:
        """(the physical batch, its records). A DataLoader calls this in place of __getitem__."""
        return physical, [self._read(row, seed) for row, seed in self._seeded(physical)]

    def _seeded(self, physical: PhysicalBatch) -> list[tuple[int, int]]:
        """(index, seed) of each reading."""
        seeds = self._randomness.seeds("record", physical.phase, physical.step, endings=_who(physical.readings))
        return list(zip(physical.indices.tolist(), seeds, strict=True))

    def _read(self, row: int, seed: int) -> Any:
        is_first = self._own is None
        own = self._own = fingerprints.generators(self._dataset) if self._own is None else self._own
        _seed(seed)
        for number, generator in enumerate(own, 1):
            fingerprints.seed(generator, seed + number)
        record = self._dataset[row]
        if is_first and len(made := fingerprints.generators(self._dataset)) > len(own):  # when it was first read
            self._own = made
            return self._read(row, seed)
        return record


class _Inspect(_Read):
    """The same, read in several orders: (what is wrong with the records,)."""

    def __init__(self, dataset: Dataset[Any], randomness: Randomness, person: IntArray | None) -> None:
        super().__init__(dataset, randomness)
        self._person = person

    def __getitems__(self, physical: PhysicalBatch) -> Any:
        def reader(dataset: Dataset[Any]) -> Callable[[int, int], Any]:
            return _Read(dataset, self._randomness)._read

        return (data_sets.cause_in(self._dataset, reader, self._seeded(physical), self._person),)


def _who(readings: Readings) -> list[str]:
    """The person and the number of each reading: not the row's index, which other persons' rows would change."""
    persons = np.repeat(readings.persons, readings.sizes).tolist()
    return [f"{p}/{n}" if n else f"{p}" for p, n in zip(persons, readings.numbers.tolist(), strict=True)]


class _Collating:
    """A collate function, seeded by the physical batch: (True if it may have padded records, the batch)."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None, randomness: Randomness) -> None:
        self._collate, self._randomness = collate, randomness

    def __call__(self, read: Records) -> tuple[bool, Any]:
        physical, records = read
        _seed(self._randomness.seed("collate", physical.phase, physical.step, physical.number))
        if self._collate is None:
            return False, default_collate(records)
        varies = len(set(sizes_of(records))) > 1  # before they are collated, which may change them
        return varies, self._collate(records)


def _seed(seed: int) -> None:
    """Seed all global generators of this process."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_torch(seed: int, device: torch.device = _CPU) -> None:
    """Seed the generators that are in use, as torch.manual_seed does: the CPU's, and those of accelerators.

    torch.manual_seed also queues the seed for accelerators that may be used later, and formats a stack trace for each,
    which takes 0.1 to 0.5 ms a call. If a process first uses CUDA while it reads a record, CUDA has its default seed.
    """
    if device.type not in ("cpu", "cuda", "mps", "xpu"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    if torch.xpu.is_initialized():  # type: ignore[no-untyped-call]
        torch.xpu.manual_seed_all(seed)
    if _has_mps() and not torch.mps._is_in_bad_fork():
        torch.mps.manual_seed(seed)


@cache
def _has_mps() -> bool:
    return torch.backends.mps.is_available()


#: A data set that can be read by physical batches.
Source = TensorSource | DataLoaderSource


def first_record(source: Source) -> Any:
    """A batch of two copies of the first row; None if it cannot be read. The generators are as before."""
    if len(source) == 0:
        return None
    randomness = Randomness(bytes(KEY_BYTES))
    readings = Persons(len(source)).readings(np.zeros(1, dtype=np.int64), randomness, 0, 0)
    try:
        with checkpoints.same_generators():
            return source.gather(PhysicalBatch(0, 0, 0, 1, readings), _CPU, randomness).batch([0, 0])
    except Exception:  # a custom data set may raise anything; the first draw raises it again
        return None


def data_source(dataset: object, num_workers: int = 0, collate: Callable[[list[Any]], Any] | None = None) -> Source:
    """The source that reads this data set. Raises DataError for data that cannot be read record by record."""
    if isinstance(dataset, TensorDataset) and collate is None:
        return TensorSource(dataset.tensors)
    refuse_tables(dataset)
    if are_columns(dataset):
        return TensorSource(columns(dataset))  # type: ignore[arg-type]  # a tuple or list, by are_columns
    if (named := named_columns(dataset)) is not None:
        if collate is not None:
            raise DataError(
                f"collate_fn needs single records, got a {type(dataset).__name__} of columns. Leave out collate_fn: "
                "batches are dicts with the names of the columns."
            )
        return TensorSource(tuple(named.values()), tuple(named))
    if isinstance(dataset, Tensor):
        return TensorSource((dataset,))
    if isinstance(dataset, DataLoader):
        raise DataError(
            "Got a DataLoader. Records are drawn here, each at its own rate: pass the data set itself "
            "(loader.dataset), and Performance(num_workers=…) and Records(…, collate_fn=…) if you need them."
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"A {type(dataset).__name__} cannot be read by index. Each record is drawn by its own coin, which needs a "
            "map-style data set, with __len__ and __getitem__. A stream, shuffled in chunks or in a buffer, is no "
            "sample that the proof covers: which records meet depends on where they lie."
        )
    return DataLoaderSource(dataset, num_workers, collate)  # type: ignore[arg-type]  # map-style, checked above


# -- Whether an evaluation is of training records


#: So many records of each data set are compared, at most. Of two copies of 100,000 records, 10 are then found.
COMPARED = 1000


def shares_records(one: Any, other: Any, without: Sequence[str] = ()) -> bool:
    """Whether two map-style data sets seem to have records in common: a copy, a part of it, or a shuffled copy.

    without  names of columns that do not count, as do columns that one of the two lacks

    Records are compared by fingerprints of a random sample of each, at the same places of two data sets of one length.
    Not seen are shuffled copies and parts of more than about 100,000 records, records that are read differently each
    time, and a few records among many others. False for data sets that cannot be read, and for tables of so few values
    that strangers are equal.
    """
    before = checkpoints.of_generators()
    try:
        names = _names(one), _names(other)
        kept = None if None in names else set.intersection(*names) - set(without)  # type: ignore[arg-type]  # None
        first, second = (_hashes(data, kept) for data in (one, other))
        largest = max(len(one), len(other))
    except Exception:  # whatever a foreign data set raises
        return False
    finally:
        checkpoints.into_generators(before)
    if not first or not second:
        return False
    found = sum(first[record] * second[record] for record in first.keys() & second.keys())
    # Equal records within the first sample show how many would be equal by chance.
    by_chance = sum(n * (n - 1) for n in first.values()) / first.total() * second.total()
    of_a_copy = min(first.total() * second.total() / largest, second.total())
    return found >= max(3, of_a_copy / 4) + 3 * by_chance


def _names(dataset: Any) -> set[str] | None:
    """Of the columns; None for records that are no mappings."""
    return set(dataset[0]) if isinstance(dataset[0], Mapping) else None


def _hashes(dataset: Any, names: set[str] | None) -> Counter[str]:
    count = len(dataset)
    found: Counter[str] = Counter()
    for i in random.Random(count).sample(range(count), min(count, COMPARED)):
        record = dataset[i]
        found[fingerprints.of(record if names is None else {name: record[name] for name in sorted(names)})] += 1
    return found
