"""Fingerprints of values and data sets, and checksums of a model: equal contents show as equal, any other as other."""

from __future__ import annotations

import copy
import functools
import os
import random
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from epsilons.core import checksums
from epsilons.core.checksums import COLUMNS, WORDS, CheckSums, tree_hash
from epsilons.core.modules import named_modules, names_of, tensors_of
from epsilons.draws import fingerprints
from epsilons.training import checkpoints
from epsilons.training.datasets import SAMPLED, DataLoaderSource, _sampled, data_source

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Sample:
    image: Any
    label: Any


# -- of values ------------------------------------------------------------------------------------------------------


def image(pixels: np.ndarray) -> Any:
    return pytest.importorskip("PIL.Image").fromarray(pixels)


def leaf(chance: random.Random) -> Any:
    torch_numbers = torch.Generator().manual_seed(chance.randrange(2**32))
    numbers = np.random.default_rng(chance.randrange(2**32))
    shape = [chance.randint(1, 3) for _ in range(chance.randint(0, 3))]
    tensor = torch.randn(shape, generator=torch_numbers)
    return chance.choice(
        [tensor, tensor.bfloat16(), tensor * (1 + 1j), numbers.random(shape), chance.randbytes(chance.randint(1, 5)),
         "".join(chance.choices("aä\ud800\n", k=4)), chance.randrange(10**6), chance.random(), None,
         chance.random() < 0.5, image(numbers.integers(0, 255, (4, 4, 3), dtype=np.uint8))]
    )  # fmt: skip


def objects(parts: list[Any]) -> np.ndarray:
    array = np.empty(len(parts), dtype=object)
    for place, part in enumerate(parts):
        array[place] = part
    return array


def nested(chance: random.Random, depth: int = 3) -> Any:
    if depth == 0 or chance.random() < 0.3:
        return leaf(chance)
    parts = [nested(chance, depth - 1) for _ in range(chance.randint(1, 3))]
    named = {f"{i}": part for i, part in enumerate(parts)}
    kinds = [list, tuple, lambda _: named, lambda _: UserDict(named), lambda p: Pair(p[0], p[-1]),
             lambda p: Sample(p[0], p[-1]), objects]  # fmt: skip
    return chance.choice(kinds)(parts)


def with_another_leaf(value: Any) -> Iterator[Any]:
    """Copies, each of which has one other leaf."""
    if isinstance(value, Sample):
        yield from (Sample(*pair) for pair in with_another_leaf((value.image, value.label)))
    elif isinstance(value, dict | UserDict):
        parts = with_another_leaf(tuple(value.values()))
        yield from (type(value)(zip(value, part, strict=True)) for part in parts)
    elif isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        make = {Pair: lambda parts: Pair(*parts), np.ndarray: objects}.get(type(value), type(value))
        for place in range(len(value)):
            for part in with_another_leaf(value[place]):
                yield make([*value[:place], part, *value[place + 1 :]])
    else:
        yield another(value)


def another(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        other = copy.deepcopy(value)
        other.reshape(-1)[-1] += 1
        return other
    if isinstance(value, bytes):
        return value[:-1] + bytes([value[-1] ^ 1])
    if isinstance(value, str):
        return value[:-1] + "b"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return 0 if value is None else image(np.array(value) ^ np.eye(4, dtype=np.uint8)[:, :, None])


@pytest.mark.parametrize("seed", range(0, 150, 3))
def test_equal_contents_have_equal_names_and_any_other_leaf_another(seed):
    value, twin = nested(random.Random(seed)), nested(random.Random(seed))
    name = fingerprints.of(value)
    assert fingerprints.of(twin) == fingerprints.of(copy.deepcopy(value)) == name
    for other in with_another_leaf(value):
        assert fingerprints.of(other) != name


def test_other_kinds_shapes_and_groupings_have_other_names():
    values = [
        1, 1.0, True, "1", b"1", [1], (1,), {1: 1}, {1}, [[1]], [1, 1], [[1], 1], [1, [1]], None, [], (), "", b"",
        torch.tensor(1), torch.tensor(1.0), torch.tensor([1]), torch.tensor([[1]]), np.array(1), np.array([1]),
        torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(6), torch.zeros(2, 3).half(), torch.zeros(0),
        torch.zeros(0, 2),
        ["ab", "c"], ["a", "bc"], ["abc"], OrderedDict(a=1), {"a": 1}, {"b": 1}, np.float64(1), np.float32(1), 1j,
        nn.Linear, nn.Conv2d, torch.relu, torch.tanh, functools.partial(torch.relu, 1),
        functools.partial(torch.relu, 2),
    ]  # fmt: skip
    names = [fingerprints.of(value) for value in values]
    assert len(set(names)) == len(values)


def test_memory_format_and_strides_do_not_count():
    images = torch.randn(2, 3, 4, 5)
    assert fingerprints.of(images.to(memory_format=torch.channels_last)) == fingerprints.of(images)
    assert fingerprints.of(images.transpose(0, 1).contiguous().transpose(0, 1)) == fingerprints.of(images)


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_what_is_unknown_or_broken_counts_by_its_type_and_raises_nothing():
    held: list[Any] = [1]
    held.append(held)
    deep: Any = 1
    for _ in range(10_000):
        deep = [deep]
    for value in (
        Odd(),
        object(),
        held,
        deep,
        torch.zeros(2).to_sparse(),
        torch.empty(2, device="meta"),
        [Odd()],
        10**6000,
    ):
        assert fingerprints.of(value) == fingerprints.of(value)
    assert fingerprints.of(Odd()) == fingerprints.of(Odd())


def made(constant: float, default: float = 0.0) -> Any:
    def function(x: Tensor, y: float = default) -> Tensor:
        return x * constant + y

    return function


def test_functions_are_told_apart_by_code_default_and_what_they_hold():
    functions = [made(1.0), made(2.0), made(1.0, 1.0), lambda x: x, lambda x: x + 1, lambda x: -x, lambda y: abs(y)]
    assert len({fingerprints.of(f) for f in functions}) == len(functions)
    assert fingerprints.of(made(1.0)) == fingerprints.of(made(1.0))
    model = nn.Linear(2, 2)
    assert fingerprints.of(model.forward) == fingerprints.of(copy.deepcopy(model).forward)
    assert fingerprints.of(model.forward) != fingerprints.of(nn.Linear(2, 2).forward)


# -- of data sets ---------------------------------------------------------------------------------------------------


class Listed(Dataset[Any]):
    def __init__(self, rows: Tensor, how: str = "plain") -> None:
        self.rows, self.how, self.asked, self.reader = rows, how, 0, os.getpid()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        if self.how == "own generator":
            return self.rows[index] + np.random.default_rng().random()
        if self.how == "augmented":
            return self.rows[index] + torch.randn(3) + random.random() + np.random.rand()
        if self.how == "broken":
            raise OSError("gone")
        if self.how == "workers only":
            assert os.getpid() != self.reader, "read outside a worker"
        return {"x": self.rows[index], "name": f"record {index}"}


def rows(count: int = 200) -> Tensor:
    return torch.arange(3.0 * count).reshape(count, 3)


@pytest.mark.parametrize("count", [1, 2, 3, 9, 10, 11, 60_000, 10**9])
def test_a_few_places_are_read_the_first_and_the_last_among_them(count):
    places = _sampled(count)
    assert places == _sampled(count)
    assert {0, count - 1} <= set(places)
    assert len(places) <= SAMPLED
    assert all(0 <= place < count for place in places)
    assert _sampled(0) == []
    if count > 10**4:
        assert len(places) == SAMPLED
        assert places != _sampled(count + 1)


@pytest.mark.parametrize("how", ["plain", "augmented"])
def test_a_change_of_a_record_that_is_read_changes_the_name(how):
    name = DataLoaderSource(Listed(rows(), how), 0, None).fingerprint()
    assert DataLoaderSource(Listed(rows(), how), 0, None).fingerprint() == name
    assert "200 records, " in name
    for place in {*range(0, 200, 11), *_sampled(200)[:4]}:
        other = rows()
        other[place, 1] += 1
        changed = DataLoaderSource(Listed(other, how), 0, None).fingerprint() != name
        assert changed == (place in _sampled(200))
    assert DataLoaderSource(Listed(rows(199), how), 0, None).fingerprint() != name


@pytest.mark.parametrize("how", ["own generator", "broken"])
def test_records_that_never_repeat_or_cannot_be_read_leave_the_name_as_it_was(how):
    names = {DataLoaderSource(Listed(rows(), how), 0, None).fingerprint() for _ in range(3)}
    assert names == {"Listed, 200 records"}


def test_looking_costs_few_reads_and_leaves_the_global_generators():
    data = Listed(rows(), "augmented")
    before = checkpoints.of_generators()
    DataLoaderSource(data, 0, None).fingerprint()
    assert 2 <= data.asked <= 2 * SAMPLED
    after = checkpoints.of_generators()
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"] == after["python"]
    assert torch.equal(before["numpy"]["state"]["key"], after["numpy"]["state"]["key"])


def test_where_workers_read_nothing_is_read_outside_of_them():
    """A file that each worker opens for itself must not be open before it is forked."""
    data = Listed(rows(), "workers only")
    name = DataLoaderSource(data, 2, None).fingerprint()
    assert data.asked == 0
    assert name == DataLoaderSource(Listed(rows()), 0, None).fingerprint()


def test_an_empty_data_set_has_a_name():
    assert "0 records" in DataLoaderSource(Listed(rows(0)), 0, None).fingerprint()
    assert data_source(Listed(rows())).fingerprint() != data_source((rows(),)).fingerprint()


# -- checksums of a model ---------------------------------------------------------------------------------------------

SIZES = [1, 2, 3, 7, 8, 1_000, 2 * COLUMNS, 5 * COLUMNS + 3, 17 * COLUMNS + 5]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]


def sums(tensor: Tensor) -> tuple[int, ...]:
    return CheckSums.of([tensor], [tensor]).sums


def filled(size: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(size)
    return torch.randint(-99, 99, (size,)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_changed_bit_of_the_first_and_the_last_values_shows(size, dtype):
    tensor = filled(size, dtype)
    before = sums(tensor)
    assert sums(tensor.clone()) == before
    for place in {0, size // 2, size - 1}:
        bits = tensor[place : place + 1].view(torch.uint8)
        for byte in range(len(bits)):
            for bit in range(1 if dtype == torch.bool else 8):
                bits[byte] ^= 1 << bit
                assert sums(tensor) != before
                bits[byte] ^= 1 << bit
    assert sums(tensor) == before


@pytest.mark.parametrize("size", SIZES[1:])
def test_exchanged_and_negated_values_show(size):
    """A sum of weighted words would miss a sign at an even place, and a plain sum any exchange."""
    torch.manual_seed(0)
    tensor = torch.randn(size)
    before = sums(tensor)
    for a, b in [(0, 1), (0, size - 1), (size // 2 - 1, size - 1)]:
        if a != b:
            other = tensor.clone()
            other[[a, b]] = tensor[[b, a]]
            assert sums(other) != before
            other = tensor.clone()
            other[[a, b]] *= -1
            assert sums(other) != before


def test_exchanged_rows_of_a_table_show():
    torch.manual_seed(0)
    table = torch.randn(5_000, 16)
    before = sums(table)
    for row in (1, 2, 64, 4_096, 4_999):
        other = table.clone()
        other[[0, row]] = table[[row, 0]]
        assert sums(other) != before


@pytest.mark.parametrize("size", SIZES)
def test_the_memory_of_a_tensor_may_begin_anywhere_and_have_any_order(size):
    whole = filled(size + 3, torch.float32)
    for start in range(3):
        view = whole[start : start + size]
        assert sums(view) == sums(view.clone())
    image = torch.randn(2, 3, 4, 4)
    assert sums(image.to(memory_format=torch.channels_last)) == sums(image)
    assert sums(torch.tensor(2.0)) != sums(torch.tensor(-2.0))


def test_what_is_rarely_read_is_known_by_storage_and_version():
    """Writes that change no version show where it is read; all others, and other storage, at once."""
    frozen, trained = torch.arange(20.0 * COLUMNS), torch.arange(20.0 * COLUMNS)
    held = [frozen, trained]
    before = CheckSums.of(held, [trained])
    assert before.changed(CheckSums.of(held, [trained], before)) == []
    assert before.changed(CheckSums.of([frozen], [trained])) is None
    frozen.data[3] += 1
    assert before.changed(CheckSums.of(held, [trained], before)) == []
    assert before.changed(CheckSums.of(held, [trained])) == [0]
    frozen.data[3] -= 1
    trained.data[3] += 1
    assert before.changed(CheckSums.of(held, [trained], before)) == [1]
    trained.data[3] -= 1
    frozen[3] += 1
    assert before.changed(CheckSums.of(held, [trained], before)) == [0]
    frozen[3] -= 1
    assert before.changed(CheckSums.of(held, [trained], before)) == []
    frozen.data = frozen.data + 1
    assert before.changed(CheckSums.of(held, [trained], before)) == [0]
    part = trained[1:]  # shares memory with what is written to, without a version if the optimizer is fused
    before = CheckSums.of([trained, part], [trained])
    trained.data[5] += 1
    assert before.changed(CheckSums.of([trained, part], [trained], before)) == [0, 1]


def test_memory_that_was_freed_is_not_taken_for_the_same_tensor():
    frozen = torch.zeros(20 * COLUMNS)
    before = CheckSums.of([frozen], [])
    for value in range(1, 20):
        del frozen
        frozen = torch.full((20 * COLUMNS,), float(value))  # usually in the same place, and never written to
        assert before.changed(CheckSums.of([frozen], [], before)) == [0]


# -- the hash of an update ------------------------------------------------------------------------------------------


def slowly(tensor: Tensor) -> list[int]:
    """Σ weight·word of each block, in Python's integers."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    raw += bytes(-len(raw) % 4)
    words = np.frombuffer(raw, "<u4").tolist()
    weights = [int(w) | 1 for w in np.random.Philox(key=[0, 0]).random_raw(WORDS)]
    return [
        sum(w * x for w, x in zip(weights, words[at : at + WORDS], strict=False)) % 2**64
        for at in range(0, len(words), WORDS)
    ]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 3, WORDS, WORDS + 1, 3 * WORDS + 7])
def test_block_sums_are_the_definitions(size, dtype, threads, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCKS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    tensor = filled(size, dtype)
    assert [int(n) % 2**64 for n in checksums._block_sums(tensor)] == slowly(tensor)
    bits = checksums.as_integers(tensor)
    if len(bits) * bits.element_size() % 4 == 0:
        assert torch.equal(checksums._block_sums_by_torch(bits), checksums._block_sums(tensor))


@pytest.mark.parametrize("size", [5, 10 * COLUMNS, 20 * COLUMNS, 200_000])
def test_a_hash_moves_with_every_bit_and_every_order(size):
    torch.manual_seed(size)
    tensor = torch.randn(size)
    one = tree_hash([tensor])
    assert one == tree_hash([tensor.clone()]) != tree_hash([tensor, tensor])
    assert tree_hash([tensor.view(-1, 1)]) != one
    for place in {0, size // 2, size - 1}:
        for bit in range(32):
            tensor.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(2**31)
            assert tree_hash([tensor]) != one
            tensor.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(2**31)
    for a, b in [(0, 1), (0, size - 1), (1, size // 2)]:
        other = tensor.clone()
        other[[a, b]] = tensor[[b, a]]
        assert tree_hash([other]) != one
        other = tensor.clone()
        other[[a, b]] *= -1
        assert tree_hash([other]) != one
    if size >= 2 * WORDS:
        other = torch.cat([tensor[WORDS : 2 * WORDS], tensor[:WORDS], tensor[2 * WORDS :]])
        assert tree_hash([other]) != one


def test_walks_find_what_torch_finds_each_once_by_a_name_that_it_has():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(
        shared, nn.BatchNorm1d(3), nn.Sequential(shared, nn.LSTM(3, 2)), nn.ParameterList([torch.ones(2)])
    )
    model.register_module("nothing", None)
    model.register_parameter("tied", shared.weight)
    model.register_buffer("absent", None)
    found, names = tensors_of(model), names_of(model)
    assert {id(t) for t in found} == {id(t) for t in (*model.parameters(), *model.buffers())}
    assert len(found) == len(names) == len(set(map(id, found)))
    all_names = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    assert {(name, id(t)) for name, t in zip(names, found, strict=True)} <= {(name, id(t)) for name, t in all_names}
    walked = [(name.removesuffix("."), module) for name, module in named_modules(model)]
    assert sorted(walked, key=lambda pair: pair[0]) == sorted(model.named_modules(), key=lambda pair: pair[0])


def test_a_scripted_model_is_walked():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    assert len(tensors_of(scripted)) == 4
    assert names_of(scripted)[0] == "0.weight"
