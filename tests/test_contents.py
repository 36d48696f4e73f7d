"""Checksums of a model's contents: every changed bit shows, exchanged values show, and layouts are no obstacle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from epsilons.core.modules import named_modules, names_of, tensors_of
from epsilons.errors import ModelError
from epsilons.training.noisy_update import COLUMNS, Contents

SIZES = [1, 2, 3, 7, 8, 1_000, 2 * COLUMNS, 5 * COLUMNS + 3, 17 * COLUMNS + 5]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]


def model_of(tensor: Tensor) -> nn.Module:
    model = nn.Module()
    model.register_buffer("values", tensor)
    return model


def sums(tensor: Tensor) -> Contents:
    return Contents.of(model_of(tensor), [])


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
                with pytest.raises(ModelError, match="values changed between two updates"):
                    before.check(model_of(tensor), [])
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


def test_an_added_a_removed_and_an_outside_tensor_show():
    model, outside = nn.Linear(3, 2), nn.Parameter(torch.randn(4))
    before = Contents.of(model, [outside])
    with torch.no_grad():
        outside.data[2] += 1
    with pytest.raises(ModelError, match="a parameter outside the model changed"):
        before.check(model, [outside])
    with pytest.raises(ModelError, match="a tensor that was added or removed"):
        Contents.of(nn.Linear(3, 2, bias=False), []).check(nn.Module(), [])
    assert Contents.of(nn.Module(), []) == Contents(())


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
