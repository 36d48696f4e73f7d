"""Data sets, by name: those that mix records, and sound ones.

MIXING   (features, targets) -> Case: a record holds, or depends on, data of others
SOUND    the same: a record is a function of its index and its seed, however it is read
UNSEEN   name of a mixing one that no check finds -> how far a record moves the others' clipped sum, in clip norms
"""

from __future__ import annotations

import collections
import functools
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info

RECORDS, FEATURES = 32, 4
#: Overlapping windows: each number is in so many records.
LENGTH = 8


@dataclass
class Case:
    """options: of make_private; losses: how the features become (batch, FEATURES)"""

    data: Any
    features: Callable[[Any], tuple[Tensor, Tensor]] = lambda batch: (batch[0], batch[1])
    collate: Callable[[list[Any]], Any] | None = None
    workers: int = 0
    options: dict[str, Any] = field(default_factory=dict)


Build = Callable[[Tensor, Tensor], Any]
MIXING: dict[str, Build] = {}
SOUND: dict[str, Build] = {}
UNSEEN = {
    "mixup_of_rows_in_one_file": 2.3,
    "mixup_of_closures": 2.8,
    "windows_copied_before": 4.0,
    "standardised_before": 4.4,
    "ranks_among_all": 0.2,
    "nearest_neighbour_as_a_feature": 0.6,
    "mean_target_as_a_feature": 6.8,
    "index_modulo": 1.0,
}


def mixing(build: Build) -> Build:
    MIXING[build.__name__.removeprefix("_")] = build
    return build


def sound(build: Build) -> Build:
    SOUND[build.__name__.removeprefix("_")] = build
    return build


class Rows(Dataset[Any]):
    """Reads a record by `read(self, index)`; the rest are attributes."""

    def __init__(self, x: Tensor, y: Tensor, read: Callable[[Any, int], Any], **state: Any) -> None:
        self.x, self.y, self.read = x, y, read
        vars(self).update(state)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.read(self, index)


# -- shared buffers ---------------------------------------------------------------------------------------------------


@mixing
def _buffer_of_torch(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: (s.buffer.copy_(s.x[i]), s.y[i]), buffer=torch.zeros(FEATURES))


@mixing
def _buffer_of_numpy(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        s.buffer[:] = s.x[i].numpy()
        return s.buffer, s.y[i]

    return Rows(x, y, read, buffer=np.zeros(FEATURES, dtype=np.float32))


def _stacked(records: list[Any]) -> Any:
    return torch.stack([torch.as_tensor(r[0]) for r in records]), torch.stack([torch.as_tensor(r[1]) for r in records])


@mixing
def _buffer_that_is_a_list(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        s.buffer[:] = s.x[i].tolist()
        return s.buffer, s.y[i]

    return Case(Rows(x, y, read, buffer=[0.0] * FEATURES), collate=_stacked)


@mixing
def _buffer_that_is_a_dict(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        if i % 5 == 0:
            return {"x": s.x[i], "y": s.y[i]}
        s.record.update(x=s.x[i], y=s.y[i])
        return s.record

    return Case(Rows(x, y, read, record={}), lambda b: (b["x"], b["y"]))


class Example:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def _of_examples(records: list[Any]) -> Any:
    return torch.stack([r.x for r in records]), torch.stack([r.y for r in records])


@mixing
def _buffer_in_an_object(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        s.buffer.copy_(s.x[i])
        return Example(s.buffer, s.y[i])

    return Case(Rows(x, y, read, buffer=torch.zeros(FEATURES)), collate=_of_examples)


@mixing
def _ring_of_buffers(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        s.at = (s.at + 1) % 4
        return s.ring[s.at].copy_(s.x[i]), s.y[i]

    return Rows(x, y, read, ring=torch.zeros(4, FEATURES), at=0)


@mixing
def _batch_buffer_of_collate(x: Tensor, y: Tensor) -> Any:
    buffer = torch.zeros(200, FEATURES)

    def collate(records: list[Any]) -> Any:
        for row, record in zip(buffer, records, strict=False):
            row.copy_(record[0])
        return buffer[: len(records)], torch.stack([record[1] for record in records])

    return Case(TensorDataset(x, y), collate=collate)


# -- state ------------------------------------------------------------------------------------------------------------


@mixing
def _running_mean(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        s.count += 1
        s.mean = s.mean + (s.x[i] - s.mean) / s.count
        return s.x[i] - s.mean, s.y[i]

    return Rows(x, y, read, mean=torch.zeros(FEATURES), count=0)


@mixing
def _curriculum_by_a_counter(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        s.count += 1
        return s.x[i] * (1 + s.count / 20), s.y[i]

    return Rows(x, y, read, count=0)


@mixing
def _counter_of_the_class(x: Tensor, y: Tensor) -> Any:
    class Counting(Rows):
        count = 0

        def __getitem__(self, index: int) -> Any:
            type(self).count += 1
            return self.x[index] + (type(self).count % 3), self.y[index]

    return Counting(x, y, lambda s, i: None)


@mixing
def _mixup_with_what_was_read_before(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        s.memory.append(s.x[i])
        return (s.x[i] + s.memory[int(torch.randint(len(s.memory), ()))]) / 2, s.y[i]

    return Rows(x, y, read, memory=[])


@mixing
def _small_cache_with_a_wrong_key(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        if i % 5 not in s.cache:
            s.cache[i % 5] = s.x[i]
        if len(s.cache) > 3:
            s.cache.popitem(last=False)
        return s.cache.get(i % 5, s.x[i]), s.y[i]

    return Rows(x, y, read, cache=collections.OrderedDict())


@mixing
def _iterator(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: next(s.rows), rows=itertools.cycle(list(zip(x, y, strict=True))))


@mixing
def _file_read_on(x: Tensor, y: Tensor) -> Any:
    file = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the data set
    file.write(x.numpy().tobytes())
    file.seek(0)

    def read(s: Any, i: int) -> Any:
        found = file.read(4 * FEATURES)
        if len(found) < 4 * FEATURES:
            file.seek(0)
            found = file.read(4 * FEATURES)
        return np.frombuffer(found, dtype=np.float32).copy(), s.y[i]

    return Rows(x, y, read)


@mixing
def _order_of_reading_in_a_generator_of_the_system(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: (s.x[i] + s.draw.gauss(0, 1), s.y[i]), draw=random.SystemRandom())


@mixing
def _time(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: (s.x[i] * (1 + time.perf_counter_ns() % 1000 / 1000), s.y[i]))


@mixing
def _state_in_two_workers(x: Tensor, y: Tensor) -> Any:
    return Case(_running_mean(x, y), workers=2)


@mixing
def _buffer_in_a_worker(x: Tensor, y: Tensor) -> Any:
    return Case(_buffer_of_torch(x, y), workers=2)


@mixing
def _other_numbers_in_other_workers(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        info = get_worker_info()
        return s.x[i] * (1 + (info.id if info else 0)), s.y[i]

    return Case(Rows(x, y, read), workers=2)


@mixing
def _state_behind_wrappers(x: Tensor, y: Tensor) -> Any:
    whole = ConcatDataset([_running_mean(x[:9], y[:9]), _running_mean(x[9:], y[9:])])
    return Subset(whole, list(range(len(x))))


@mixing
def _state_of_a_transform(x: Tensor, y: Tensor) -> Any:
    class Standardise:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def __call__(self, row: Tensor) -> Tensor:
            self.seen.append(row)
            return row - torch.stack(self.seen).mean(0)

    return Rows(x, y, lambda s, i: (s.transform(s.x[i]), s.y[i]), transform=Standardise())


@mixing
def _state_of_a_collate_function(x: Tensor, y: Tensor) -> Any:
    class Collate:
        mean = torch.zeros(FEATURES)

        def __call__(self, records: list[Any]) -> Any:
            rows, targets = _stacked(records)
            self.mean = 0.9 * self.mean + 0.1 * rows.mean(0)
            return rows - self.mean, targets

    return Case(TensorDataset(x, y), collate=Collate())


# -- the index is ignored ---------------------------------------------------------------------------------------------


@mixing
def _index_ignored(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        j = random.randrange(len(s.x))
        return s.x[j], s.y[j]

    return Rows(x, y, read)


@mixing
def _siamese_by_parity(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        j = int(torch.randint(len(s.x), ()))
        k = j if i % 2 else int(torch.randint(len(s.x), ()))
        return s.x[j] + s.x[k], torch.tensor(float(i % 2))

    return Rows(x, y, read)


@mixing
def _crop_of_a_random_file(x: Tensor, y: Tensor) -> Any:
    folder = Path(tempfile.mkdtemp())
    for i, row in enumerate(x):
        np.save(folder / f"{i}.npy", row.numpy())

    def read(s: Any, i: int) -> Any:
        row = np.load(s.choose.choice(s.files))
        return np.roll(row, s.choose.randrange(FEATURES)), np.float32(0)

    return Rows(x, y, read, files=sorted(folder.glob("*.npy")), choose=random.Random(3))


# -- memory that overlaps ---------------------------------------------------------------------------------------------


def _series(x: Tensor) -> Tensor:
    """Each record adds FEATURES numbers; windows hold LENGTH records."""
    return torch.cat([torch.zeros(LENGTH - 1, FEATURES), x])


@mixing
def _windows_of_a_tensor(x: Tensor, y: Tensor) -> Any:
    return Case(
        Rows(x, y, lambda s, i: (s.series[i : i + LENGTH], s.y[i]), series=_series(x)), lambda b: (b[0].mean(1), b[1])
    )


@mixing
def _windows_of_an_array(x: Tensor, y: Tensor) -> Any:
    windows = np.lib.stride_tricks.sliding_window_view(_series(x).numpy(), LENGTH, axis=0)
    return Case(Rows(x, y, lambda s, i: (windows[i], s.y[i])), lambda b: (b[0].mean(2), b[1]))


@mixing
def _windows_unfolded(x: Tensor, y: Tensor) -> Any:
    return Case((_series(x).unfold(0, LENGTH, 1), y), lambda b: (b[0].mean(2), b[1]))


@mixing
def _windows_in_halves_of_16_bits(x: Tensor, y: Tensor) -> Any:
    series = _series(x).bfloat16()
    return Case(
        Rows(x, y, lambda s, i: (s.series[i : i + LENGTH], s.y[i]), series=series),
        lambda b: (b[0].float().mean(1), b[1]),
    )


@mixing
def _rare_windows_of_a_long_series(x: Tensor, y: Tensor) -> Any:
    """Few are drawn, and none of them overlap."""
    return Case(
        Rows(x, y, lambda s, i: (s.series[i : i + LENGTH], s.y[i]), series=_series(x)),
        lambda b: (b[0].mean(1), b[1]),
        options={"rate": 2 / RECORDS},
    )


@mixing
def _pairs_of_rows_of_one_table(x: Tensor, y: Tensor) -> Any:
    return Case(Rows(x, y, lambda s, i: (s.x[i], s.x[(i + 1) % len(s.x)], s.y[i])), lambda b: (b[0] - b[1], b[2]))


@mixing
def _next_row_as_the_target(x: Tensor, y: Tensor) -> Any:
    return Case((x[:-1], x[1:]), lambda b: (b[0], b[1].sum(1)), options={"records": len(x) - 1})


@mixing
def _history_up_to_now(x: Tensor, y: Tensor) -> Any:
    def collate(records: list[Any]) -> Any:
        return torch.stack([r[0].sum(0) / 10 for r in records]), torch.stack([r[1] for r in records])

    return Case(Rows(x, y, lambda s, i: (s.x[: i + 1], s.y[i])), collate=collate)


# -- several rows ------------------------------------------------------------------------------------------------------


@mixing
def _pair_computed(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: (s.x[i] - s.x[(i + 1) % len(s.x)], s.y[i]))


@mixing
def _mixup(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        j = int(torch.randint(len(s.x), ()))
        return (s.x[i] + s.x[j]) / 2, (s.y[i] + s.y[j]) / 2

    return Rows(x, y, read)


@mixing
def _windows_copied(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: (s.series[i : i + LENGTH].mean(0), s.y[i]), series=_series(x))


@mixing
def _windows_copied_before(x: Tensor, y: Tensor) -> Any:
    return TensorDataset(_series(x).unfold(0, LENGTH, 1).mean(2), y)


@mixing
def _windows_of_a_list(x: Tensor, y: Tensor) -> Any:
    tokens = _series(x)[:, 0].tolist()
    return Rows(x, y, lambda s, i: (torch.tensor(s.tokens[i : i + FEATURES]), s.y[i]), tokens=tokens)


@mixing
def _mean_of_all(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: (s.x[i] - s.x.mean(0), s.y[i]))


@mixing
def _mixup_around_a_data_set(x: Tensor, y: Tensor) -> Any:
    class MixUp(Dataset[Any]):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __len__(self) -> int:
            return len(self.inner)

        def __getitem__(self, index: int) -> Any:
            (a, b), (c, d) = self.inner[index], self.inner[random.randrange(len(self.inner))]
            return (a + c) / 2, (b + d) / 2

    return MixUp(Subset(TensorDataset(x, y), list(range(len(x)))[::-1]))


@mixing
def _pair_of_files(x: Tensor, y: Tensor) -> Any:
    folder = Path(tempfile.mkdtemp())
    for i, row in enumerate(x):
        np.save(folder / f"{i:03}.npy", row.numpy())

    def read(s: Any, i: int) -> Any:
        return np.load(s.files[i]) - np.load(s.files[i - 1]), s.y[i]

    return Case(Rows(x, y, read, files=sorted(folder.glob("*.npy"))), workers=1)


@mixing
def _mixup_of_closures(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: ((x[i] + x[int(torch.randint(len(x), ()))]) / 2, y[i]))


@mixing
def _mixup_of_rows_in_one_file(x: Tensor, y: Tensor) -> Any:
    file = Path(tempfile.mkdtemp()) / "x.npy"
    np.save(file, x.numpy())
    table = np.load(file, mmap_mode="r")
    return Rows(x, y, lambda s, i: ((s.table[i] + s.table[random.randrange(len(s.table))]) / 2, s.y[i]), table=table)


@mixing
def _ranks_among_all(x: Tensor, y: Tensor) -> Any:
    return TensorDataset(x.argsort(0).argsort(0) / len(x) - 0.5, y)


@mixing
def _standardised_before(x: Tensor, y: Tensor) -> Any:
    return TensorDataset((x - x.mean(0)) / x.std(0), y)


@mixing
def _nearest_neighbour_as_a_feature(x: Tensor, y: Tensor) -> Any:
    nearest = (torch.cdist(x, x) + 1e9 * torch.eye(len(x))).argmin(1)
    return TensorDataset(x - x[nearest], y)


@mixing
def _mean_target_as_a_feature(x: Tensor, y: Tensor) -> Any:
    kinds = x[:, 0] > 0
    mean = torch.stack([y[~kinds].mean(), y[kinds].mean()])[kinds.long()]
    return TensorDataset(torch.cat([x[:, :3], mean[:, None]], 1), y)


@mixing
def _index_modulo(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: (s.x[i % 20], s.y[i % 20]))


@mixing
def _cache_with_a_wrong_key(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: (s.cache.setdefault(i % 7, s.x[i]), s.y[i]), cache={})


# -- sound: augmentation ----------------------------------------------------------------------------------------------


@sound
def _augmented_by_all_global_generators(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        return s.x[i] + torch.randn(FEATURES) + np.random.rand() + random.random(), s.y[i]

    return Rows(x, y, read)


class Jitter:
    """A transform with a generator of its own."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __call__(self, row: Tensor) -> Tensor:
        return row + self.draw()


def _jittered(x: Tensor, y: Tensor, draw: Callable[[], float], **state: Any) -> Any:
    return Rows(x, y, lambda s, i: (s.transform(s.x[i]), s.y[i]), transform=Jitter(draw), **state)


@sound
def _own_generator_of_numpy(x: Tensor, y: Tensor) -> Any:
    return _jittered(x, y, np.random.default_rng(1).normal)


@sound
def _own_random_state_of_numpy(x: Tensor, y: Tensor) -> Any:
    return _jittered(x, y, np.random.RandomState(1).normal)


@sound
def _own_random_state_over_other_bits(x: Tensor, y: Tensor) -> Any:
    return _jittered(x, y, np.random.RandomState(np.random.PCG64(1)).normal)  # type: ignore[arg-type]


@sound
def _own_generator_of_python(x: Tensor, y: Tensor) -> Any:
    return _jittered(x, y, functools.partial(random.Random(1).gauss, 0.0, 1.0))


@sound
def _own_generator_of_torch(x: Tensor, y: Tensor) -> Any:
    own = torch.Generator().manual_seed(1)
    return Rows(x, y, lambda s, i: (s.x[i] + torch.randn(FEATURES, generator=s.own), s.y[i]), own=own)


@sound
def _own_generator_in_a_closure(x: Tensor, y: Tensor) -> Any:
    own = np.random.default_rng()
    return Rows(x, y, lambda s, i: (s.x[i] + own.random(), s.y[i]))


GLOBAL = np.random.default_rng()


def _through_the_module(row: Tensor) -> Tensor:
    return row * GLOBAL.uniform(0.5, 1.5)


@sound
def _own_generator_of_the_module(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: (_through_the_module(s.x[i]), s.y[i]))


class Shared:
    numbers = np.random.RandomState(3)


@sound
def _own_generator_of_the_class(x: Tensor, y: Tensor) -> Any:
    class Cropped(Rows):
        tools = Shared()

        def __getitem__(self, index: int) -> Any:
            return self.x[index] * self.tools.numbers.rand(), self.y[index]

    return Cropped(x, y, lambda s, i: None)


class Slotted:
    __slots__ = ("numbers",)

    def __init__(self) -> None:
        self.numbers = random.Random()


@sound
def _own_generator_in_a_slot_of_nested_transforms(x: Tensor, y: Tensor) -> Any:
    tool = Slotted()
    steps = {"all": [(lambda row: row + tool.numbers.random()), torch.nn.Identity()]}

    def read(s: Any, i: int) -> Any:
        row = s.x[i]
        for step in s.steps["all"]:
            row = step(row)
        return row, s.y[i]

    return Rows(x, y, read, steps=steps)


@sound
def _own_generator_made_when_first_read(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        if s.numbers is None:
            s.numbers = np.random.default_rng()
        return s.x[i] + s.numbers.normal(), s.y[i]

    return Rows(x, y, read, numbers=None)


@sound
def _own_generator_made_by_each_worker(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        if s.numbers is None:
            info = get_worker_info()
            s.numbers = random.Random(info.seed if info else 0)
        return s.x[i] + s.numbers.random(), s.y[i]

    return Case(Rows(x, y, read, numbers=None), workers=2)


@sound
def _own_generator_behind_wrappers(x: Tensor, y: Tensor) -> Any:
    parts = [_own_generator_of_numpy(x[:9], y[:9]), _own_generator_of_python(x[9:], y[9:])]
    return Subset(ConcatDataset(parts), list(range(len(x))))


@sound
def _several_own_generators_read_by_two_workers(x: Tensor, y: Tensor) -> Any:
    numbers, coins = np.random.default_rng(1), random.Random(1)
    return Case(
        Rows(x, y, lambda s, i: (s.x[i] + s.numbers.normal() + s.coins.random(), s.y[i]), numbers=numbers, coins=coins),
        workers=2,
    )


@sound
def _generator_by_the_index(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: (s.x[i] + np.random.default_rng(i).random(), s.y[i]))


@sound
def _noise_returned_beside_the_record(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: (s.x[i] + 0.1 * torch.randn(FEATURES), s.y[i], torch.randn(FEATURES)))


# -- sound: files and caches ------------------------------------------------------------------------------------------


def _folder(x: Tensor) -> Path:
    folder = Path(tempfile.mkdtemp())
    np.save(folder / "x.npy", x.numpy())
    (folder / "x.bin").write_bytes(x.numpy().tobytes())
    return folder


def _from_an_open_file(s: Any, i: int) -> Any:
    if s.file is None:  # each process opens its own
        s.file = (s.folder / "x.bin").open("rb")
    s.file.seek(4 * FEATURES * i)
    return np.frombuffer(s.file.read(4 * FEATURES), dtype=np.float32).copy(), s.y[i]


@sound
def _file_opened_when_first_read(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, _from_an_open_file, file=None, folder=_folder(x))


@sound
def _file_opened_by_each_worker(x: Tensor, y: Tensor) -> Any:
    return Case(Rows(x, y, _from_an_open_file, file=None, folder=_folder(x)), workers=2)


@sound
def _memory_map(x: Tensor, y: Tensor) -> Any:
    table = np.load(_folder(x) / "x.npy", mmap_mode="r")
    return Rows(x, y, lambda s, i: (np.array(s.table[i]), s.y[i]), table=table)


@sound
def _memory_map_without_copies(x: Tensor, y: Tensor) -> Any:
    table = np.load(_folder(x) / "x.npy", mmap_mode="r+")
    return Rows(x, y, lambda s, i: (s.table[i], s.y[i]), table=table)


@sound
def _columns_of_one_table(x: Tensor, y: Tensor) -> Any:
    """Records lie beside one another, and their bounds overlap."""
    return Rows(x, y, lambda s, i: (s.table[:, i], s.y[i]), table=x.T.contiguous())


@sound
def _cache_by_the_index(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: (s.cache.setdefault(i, s.x[i].clone()), s.y[i]), cache={})


@sound
def _small_cache_by_the_index(x: Tensor, y: Tensor) -> Any:
    @functools.lru_cache(maxsize=5)
    def load(i: int) -> Tensor:
        return x[i].clone()

    return Rows(x, y, lambda s, i: (load(i), s.y[i]))


@sound
def _statistics_that_no_record_shows(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        s.reads[i] += 1
        s.total = s.total + s.x[i]
        return s.x[i], s.y[i]

    return Rows(x, y, read, reads=collections.Counter(), total=torch.zeros(FEATURES))


# -- sound: shapes of records -----------------------------------------------------------------------------------------


@sound
def _one_constant_in_every_record(x: Tensor, y: Tensor) -> Any:
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
    return Case(Rows(x, y, lambda s, i: (s.x[i], s.y[i], mask)), lambda b: (b[0] * b[2], b[1]))


@sound
def _one_constant_of_each_class(x: Tensor, y: Tensor) -> Any:
    prompts = torch.eye(FEATURES)
    return Case(Rows(x, y, lambda s, i: (s.x[i], s.y[i], prompts[i % 4])), lambda b: (b[0] + b[2], b[1]))


@sound
def _one_placeholder_in_any_place(x: Tensor, y: Tensor) -> Any:
    nothing = torch.zeros(FEATURES)

    def read(s: Any, i: int) -> Any:
        return (s.x[i], nothing, s.y[i]) if i % 2 else (nothing, s.x[i], s.y[i])

    return Case(Rows(x, y, read), lambda b: (b[0] - b[1], b[2]))


def _padded(records: list[Any]) -> Any:
    rows = torch.nn.utils.rnn.pad_sequence([r[0] for r in records], batch_first=True)
    return rows, torch.stack([r[1] for r in records])


@sound
def _records_of_different_sizes(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        return s.x[i].repeat(1 + i % 3), s.y[i]

    return Case(Rows(x, y, read), lambda b: (b[0][:, :FEATURES], b[1]), collate=_padded)


@dataclass(frozen=True)
class Visit:
    x: Tensor
    y: Tensor


@sound
def _dataclasses(x: Tensor, y: Tensor) -> Any:
    return Case(Rows(x, y, lambda s, i: Visit(s.x[i], s.y[i])), collate=_of_examples)


@sound
def _objects_with_attributes(x: Tensor, y: Tensor) -> Any:
    return Case(Rows(x, y, lambda s, i: Example(s.x[i].clone(), s.y[i])), collate=_of_examples)


@sound
def _dicts(x: Tensor, y: Tensor) -> Any:
    return Case(Rows(x, y, lambda s, i: {"x": s.x[i], "y": s.y[i]}), lambda b: (b["x"], b["y"]))


@sound
def _user_dicts(x: Tensor, y: Tensor) -> Any:
    def collate(records: list[Any]) -> Any:
        return {name: torch.stack([r[name] for r in records]) for name in ("x", "y")}

    data = Rows(x, y, lambda s, i: collections.UserDict(x=s.x[i], y=s.y[i]))
    return Case(data, lambda b: (b["x"], b["y"]), collate=collate)


@sound
def _pictures(x: Tensor, y: Tensor) -> Any:
    folder = Path(tempfile.mkdtemp())
    for i, row in enumerate(x.clamp(-3, 3)):
        Image.fromarray((40 * (row.numpy() + 3)).astype(np.uint8).reshape(2, 2)).save(folder / f"{i}.png")

    def collate(records: list[Any]) -> Any:
        pixels = [torch.from_numpy(np.array(r[0], dtype=np.float32) / 255).flatten() for r in records]
        return torch.stack(pixels), torch.stack([r[1] for r in records])

    return Case(Rows(x, y, lambda s, i: (Image.open(folder / f"{i}.png"), s.y[i])), collate=collate)


@sound
def _texts_numbers_and_nothing(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        return {"text": f"record {i}", "x": s.x[i], "y": np.float32(s.y[i]), "n": i, "none": None if i % 2 else "a"}

    def collate(records: list[Any]) -> Any:
        x, y = [r["x"] for r in records], [torch.tensor(r["y"]) for r in records]
        return torch.stack(x), torch.stack(y), [r["text"] for r in records], [r["none"] for r in records]

    return Case(Rows(x, y, read), collate=collate)


@sound
def _scalars_of_numpy(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: (s.x[i].numpy(), np.float32(s.y[i])))


@sound
def _not_a_number(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        return torch.where(s.x[i] > 2, torch.nan, s.x[i]), s.y[i]

    return Case(Rows(x, y, read), lambda b: (b[0].nan_to_num(0.0), b[1]))


@sound
def _sparse_rows(x: Tensor, y: Tensor) -> Any:
    def collate(records: list[Any]) -> Any:
        return torch.stack([r[0].to_dense() for r in records]), torch.stack([r[1] for r in records])

    return Case(Rows(x, y, lambda s, i: (s.x[i].to_sparse(), s.y[i])), collate=collate)


# -- sound: wrappers, persons, equal records --------------------------------------------------------------------------


@sound
def _tensors(x: Tensor, y: Tensor) -> Any:
    return TensorDataset(x, y)


@sound
def _tensors_that_repeat_one_row(x: Tensor, y: Tensor) -> Any:
    return x[:1].expand(len(x), FEATURES), y


@sound
def _permuted_subset(x: Tensor, y: Tensor) -> Any:
    return Subset(Rows(x, y, lambda s, i: (s.x[i], s.y[i])), torch.randperm(len(x)).tolist())


@sound
def _subset_of_a_subset_of_two(x: Tensor, y: Tensor) -> Any:
    whole = ConcatDataset([TensorDataset(x, y), TensorDataset(x + 1, y)])
    return Subset(Subset(whole, list(range(0, 2 * len(x), 2))), list(range(len(x)))[::-1])


class ByLists(Dataset[Any]):
    """Columns of Python numbers, read by one index or by several, as the library datasets does."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.columns = {"x": x.tolist(), "y": y.tolist()}

    def __len__(self) -> int:
        return len(self.columns["y"])

    def __getitem__(self, index: int) -> Any:
        return {name: torch.tensor(column[index]) for name, column in self.columns.items()}

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return [self[i] for i in indices]


@sound
def _columns_of_lists(x: Tensor, y: Tensor) -> Any:
    return Case(ByLists(x, y), lambda b: (b["x"], b["y"]))


@sound
def _a_list_of_tuples(x: Tensor, y: Tensor) -> Any:
    return Case([(a, b) for a, b in zip(x.clone(), y, strict=True)])


@sound
def _repeated_records(x: Tensor, y: Tensor) -> Any:
    some = [(a, b) for a, b in zip(x[:8], y[:8], strict=True)]
    return Case(some * (len(x) // 8) + some[: len(x) % 8])


@sound
def _records_that_are_all_equal(x: Tensor, y: Tensor) -> Any:
    return Rows(x, y, lambda s, i: (torch.ones(FEATURES), torch.tensor(1.0)))


@sound
def _files_in_which_each_person_has_windows(x: Tensor, y: Tensor) -> Any:
    series = _series(x)
    data = Rows(x, y, lambda s, i: (series[i : i + LENGTH], s.y[i]))
    options = {"persons": [0] * len(x), "rows_per_person": 4}
    return Case(data, lambda b: (b[0].mean(1), b[1]), options=options)


@sound
def _persons_with_four_rows(x: Tensor, y: Tensor) -> Any:
    return Case(
        Rows(x, y, lambda s, i: (s.x[i] + torch.randn(FEATURES), s.y[i])),
        options={"persons": [i // 4 for i in range(len(x))], "rows_per_person": 3},
    )


@sound
def _rows_by_a_permutation(x: Tensor, y: Tensor) -> Any:
    order = torch.randperm(len(x))
    return Rows(x, y, lambda s, i: (s.x[s.order[i]], s.y[s.order[i]]), order=order)


@sound
def _parts_of_one_file_by_offsets(x: Tensor, y: Tensor) -> Any:
    """Offsets of records of several numbers; the next record's offset is the end."""
    offsets = np.arange(len(x) + 1) * FEATURES

    def read(s: Any, i: int) -> Any:
        return s.flat[s.offsets[i] : s.offsets[i + 1]].clone(), s.y[i]

    return Rows(x, y, read, flat=x.flatten(), offsets=offsets)


@sound
def _lists_of_words(x: Tensor, y: Tensor) -> Any:
    words = [(4 * row).round().int().tolist() for row in x]
    return Rows(x, y, lambda s, i: (torch.tensor(s.words[i]), s.y[i]), words=words)


@sound
def _columns_in_a_dict(x: Tensor, y: Tensor) -> Any:
    columns = {"x": x.numpy(), "y": y.numpy(), "names": [f"record {i}" for i in range(len(x))]}
    data = Rows(x, y, lambda s, i: {name: column[i] for name, column in s.columns.items()}, columns=columns)
    return Case(data, lambda b: (b["x"], b["y"]))


@sound
def _pairs_of_one_person(x: Tensor, y: Tensor) -> Any:
    rows = torch.cat([x, x + torch.randn_like(x)])
    return Rows(x, y, lambda s, i: (s.rows[2 * i] - s.rows[2 * i + 1], s.y[i]), rows=rows)


@sound
def _mixup_within_persons(x: Tensor, y: Tensor) -> Any:
    def read(s: Any, i: int) -> Any:
        return (s.x[i] + s.x[i - i % 4 + random.randrange(4)]) / 2, s.y[i]

    return Case(Rows(x, y, read), options={"persons": [i // 4 for i in range(len(x))], "rows_per_person": 3})


@sound
def _mixup_with_public_data(x: Tensor, y: Tensor) -> Any:
    public = torch.randn(100, FEATURES)
    return Rows(x, y, lambda s, i: (s.x[i] + s.public[int(torch.randint(100, ()))], s.y[i]), public=public)


@sound
def _two_views_of_each_record(x: Tensor, y: Tensor) -> Any:
    return Case(Rows(x, y, lambda s, i: (s.x[i] + torch.randn(FEATURES), s.y[i])), options={"views": 2})


@sound
def _one_worker(x: Tensor, y: Tensor) -> Any:
    return Case(_augmented_by_all_global_generators(x, y), workers=1)


@sound
def _two_workers(x: Tensor, y: Tensor) -> Any:
    return Case(_augmented_by_all_global_generators(x, y), workers=2)


@sound
def _collate_with_a_generator_of_its_own(x: Tensor, y: Tensor) -> Any:
    own = np.random.default_rng()

    def collate(records: list[Any]) -> Any:
        rows, targets = _stacked(records)
        return rows + torch.from_numpy(own.normal(size=rows.shape)).float(), targets

    return Case(TensorDataset(x, y), collate=collate)


@sound
def _collate_that_returns_a_constant(x: Tensor, y: Tensor) -> Any:
    scale = torch.tensor([1.0, 2.0, 1.0, 0.5])
    return Case(TensorDataset(x, y), lambda b: (b[0] * b[2], b[1]), collate=lambda records: (*_stacked(records), scale))
