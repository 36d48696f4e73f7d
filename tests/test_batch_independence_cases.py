"""Programs as people write them: each was once let through although it mixes records, or refused although it does not.

The batch-independence check must refuse the first and accept the second. One function per program, over the same small
model; `mixers` builds more of them at random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import epsilons
from functional import Model
from tests import mixers
from tests.mixers import CLASSES, FEATURES, RECORDS, WORDS, Case, Rows, cross_entropy, over_rows, pad, refusal, texts

STEPS = 2  # checks at both, with coins that fall either way

Losses = Callable[[Any, Any], Tensor]


def _small() -> nn.Module:
    """Features or words to classes."""
    layers = {"body": nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))}
    layers |= {"table": nn.Embedding(WORDS, 8), "rnn": nn.GRU(8, 8, batch_first=True), "head": nn.Linear(8, CLASSES)}
    return Model(lambda model, x: model.body(x), **layers, biggest=0.0)


def _columns() -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, FEATURES, generator=numbers)
    return (
        x,
        torch.randint(CLASSES, (RECORDS,), generator=numbers),
        torch.randint(8, (RECORDS,), generator=numbers),
    )


def _refusal(losses: Losses, collate: Callable[[list[Any]], Any] | None = None, data: Any = None, batch=8.0) -> str:
    torch.manual_seed(0)
    data = data if data is not None else _columns() if collate is None else Rows(_columns())
    return refusal(Case("", _small(), data, losses, collate, batch), STEPS)


def _texts() -> Rows:
    return texts(torch.Generator().manual_seed(2), 14, 0.1)


def _table(programs: list[Any]) -> Any:
    return pytest.mark.parametrize("program", programs, ids=lambda program: program.__name__.strip("_"))


# -- losses that mix: most of them act on data that these records do not hold ----------------------------------------


def _columns_renormed(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model(torch.renorm(batch[0], 2, 1, 50.0)), batch[1])


def _biggest(x: Tensor) -> float:
    return x.abs().max().item()


def _doubled(losses: Tensor, size: float) -> Tensor:
    return losses * 2 if size > 50 else losses


def _value_by_helpers(model: Any, batch: Any) -> Tensor:
    size = _biggest(batch[0])
    return _doubled(over_rows(model, batch), size)


def _clamped_in_numpy(model: Any, batch: Any) -> Tensor:
    return over_rows(model, batch) / float(np.clip(batch[0].abs().numpy().max(), 50.0, None))


def _attribute(model: Any, batch: Any) -> Tensor:
    model.biggest = batch[0].abs().max().item()
    return over_rows(model, batch) * (2.0 if model.biggest > 50 else 1.0)


def _rounded_down(model: Any, batch: Any) -> Tensor:
    return over_rows(model, batch) * (1 + int(batch[0].abs().max().item() // 50))


def _any_of_a_list(model: Any, batch: Any) -> Tensor:
    return over_rows(model, batch) * (2.0 if any(v > 50 for v in batch[0].flatten().tolist()) else 1.0)


def _numpy_in_place(model: Any, batch: Any) -> Tensor:
    x = batch[0].clone()
    values = x.numpy()
    values -= np.maximum(values.max() - 50, 0)
    return cross_entropy(model(x), batch[1])


def _coin_above(model: Any, batch: Any) -> Tensor:
    x = batch[0]
    return cross_entropy(model((x + x.flip(0)) / 2 if torch.rand(1).item() > 0.999 else x), batch[1])


def _kernel_over_records(model: Any, batch: Any) -> Tensor:
    x = batch[0]
    moved = F.conv1d(x.T[None], torch.ones(FEATURES, FEATURES, 3), padding=1)[0].T
    return cross_entropy(model(x + (moved - 500).clamp_min(0)), batch[1])


def _channels_are_records(model: Any, batch: Any) -> Tensor:
    x = batch[0]
    moved = F.conv1d(x[None], torch.ones(len(x), len(x), 1))[0]
    return cross_entropy(model(x + (moved - 500).clamp_min(0)), batch[1])


def _number_that_was_not_drawn(model: Any, batch: Any) -> Tensor:
    """About 24 records are drawn, and sometimes more than 40."""
    return over_rows(model, batch) * (2.0 if len(batch[0]) > 40 else 1.0)


@_table([
    _number_that_was_not_drawn, _columns_renormed, _value_by_helpers, _clamped_in_numpy, _attribute, _rounded_down,
    _any_of_a_list, _numpy_in_place, _coin_above, _kernel_over_records, _channels_are_records,
])  # fmt: skip
def test_a_loss_that_mixes_records_is_refused(program: Losses) -> None:
    found = _refusal(program, batch=24.0)
    assert found.startswith("BatchDependenceError")
    assert "test_batch_independence_cases.py:" in found  # the line


# -- losses that do not ----------------------------------------------------------------------------------------------


def _weights_by_numpy(model: Any, batch: Any) -> Tensor:
    return over_rows(model, batch) * torch.tensor(np.where(batch[1].numpy() == 0, 2.0, 1.0)).float()


def _class_by_class(model: Any, batch: Any) -> Tensor:
    found = over_rows(model, batch)
    for c in batch[1].unique():
        found = torch.where(batch[1] == c, found * (1 + float(c)), found)
    return found


def _gradient_penalty(model: Any, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return cross_entropy(outputs, batch[1]) + 0.1 * slope.square().sum(1)


def _variational(model: Any, batch: Any) -> Tensor:
    outputs = model(batch[0])
    drawn = torch.distributions.Normal(outputs, F.softplus(outputs) + 0.1).rsample()
    return cross_entropy(drawn, batch[1])


def _stochastic_depth(model: Any, batch: Any) -> Tensor:
    keep = batch[0].new_empty((len(batch[0]), 1)).bernoulli_(0.8) / 0.8
    return cross_entropy(model(batch[0] * keep), batch[1])


def _coin_per_record(model: Any, batch: Any) -> Tensor:
    rows = [x.flip(0) if torch.rand(1) < 0.5 else x for x in batch[0]]
    return torch.stack([cross_entropy(model(x[None]), y[None])[0] for x, y in zip(rows, batch[1], strict=True)])


def _index_copy(model: Any, batch: Any) -> Tensor:
    outputs = torch.zeros(len(batch[0]), CLASSES)
    return cross_entropy(outputs.index_copy(0, torch.arange(len(outputs)), model(batch[0])), batch[1])


def _rows_renormed(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model(torch.renorm(batch[0], 2, 0, 2.0)), batch[1])


def _a_column_as_a_list(model: Any, batch: Any) -> Tensor:
    """Of one record, its values lie at strides of their own."""
    return over_rows(model, batch) * torch.tensor([1 + abs(v) for v in batch[0][:, 1].tolist()])


@_table([
    _weights_by_numpy, _class_by_class, _gradient_penalty, _variational, _stochastic_depth, _coin_per_record,
    _index_copy, _rows_renormed, _a_column_as_a_list,
])  # fmt: skip
def test_a_loss_that_keeps_records_apart_is_accepted(program: Losses) -> None:
    assert _refusal(program) == ""


@pytest.mark.parametrize("name", mixers.SOUND)
def test_every_sound_loss_of_the_generator_is_accepted(name: str) -> None:
    assert _refusal(lambda model, batch: mixers.SOUND[name](model, *batch)) == ""


@pytest.mark.parametrize("name", mixers.SPECIAL)
def test_every_special_loss_of_the_generator_is_refused(name: str) -> None:
    assert _refusal(lambda model, batch: mixers.SPECIAL[name](model, *batch)).startswith("BatchDependenceError")


def _cut_to_the_longest(model: Any, batch: Any) -> Tensor:
    words, classes = batch
    lengths = (words != 0).sum(1)
    longest = int(lengths.max())
    mask = torch.arange(longest)[None] < lengths[:, None]
    return cross_entropy(model.head((model.table(words[:, :longest]) * mask[:, :, None]).sum(1)), classes)


def _lengths_as_a_list(model: Any, batch: Any) -> Tensor:
    words, classes = batch
    lengths = (words != 0).sum(1).tolist()
    outputs = [model.head(model.table(row[:n]).mean(0)) for row, n in zip(words, lengths, strict=True)]
    return cross_entropy(torch.stack(outputs), classes)


def _packed_by_a_list(model: Any, batch: Any) -> Tensor:
    words, classes = batch
    rows = model.table(words)
    packed = nn.utils.rnn.pack_padded_sequence(rows, (words != 0).sum(1).tolist(), True, enforce_sorted=False)
    return cross_entropy(model.head(model.rnn(packed)[1][-1]), classes)


def _sorted_and_back(model: Any, batch: Any) -> Tensor:
    words, classes = batch
    lengths, order = (words != 0).sum(1).sort(descending=True)
    packed = nn.utils.rnn.pack_padded_sequence(model.table(words[order]), lengths, True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return cross_entropy(model.head(model.rnn(packed)[1][-1][back]), classes)


def _ragged_bags(model: Any, batch: Any) -> Tensor:
    words, classes = batch
    counts = (words != 0).sum(1)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
    bags = F.embedding_bag(torch.cat([row[row != 0] for row in words]), model.table.weight, offsets, mode="mean")
    return cross_entropy(model.head(bags), classes)


def _nested(model: Any, batch: Any) -> Tensor:
    rows = torch.nested.nested_tensor([model.table(row[row != 0]) for row in batch[0]], layout=torch.strided)
    return cross_entropy(torch.stack([model.head(row.mean(0)) for row in rows.unbind()]), batch[1])


@_table([_cut_to_the_longest, _lengths_as_a_list, _packed_by_a_list, _sorted_and_back, _ragged_bags, _nested])
def test_a_loss_over_texts_that_reads_no_padding_is_accepted(program: Losses) -> None:
    assert _refusal(program, pad, _texts()) == ""


# -- collate functions -----------------------------------------------------------------------------------------------


def _stacked(records: list[Any]) -> tuple[Tensor, Tensor]:
    x, y, _ = zip(*records, strict=True)
    return torch.stack(x), torch.stack(y)


OWN = np.random.default_rng(0)


def _mixed_up_by_an_own_generator(records: list[Any]) -> Any:
    x, y = _stacked(records)
    return 0.7 * x + 0.3 * x[torch.from_numpy(OWN.permutation(len(x)))], y


class _RunningMean:
    """Holds what it saw from call to call."""

    def __init__(self) -> None:
        self.mean = torch.zeros(FEATURES)

    def __call__(self, records: list[Any]) -> Any:
        x, y = _stacked(records)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean, y


def _halved_when_large(records: list[Any]) -> Any:
    x, y = _stacked(records)
    if x.abs().max() > 50:
        x = x / 2
    return x, y


def _divided_when_large(records: list[Any]) -> Any:
    x, y = _stacked(records)
    return x / x.abs().max().clamp_min(50.0), y


def _divided_and_turned(records: list[Any]) -> Any:
    x, y = _divided_when_large(records)
    return x.T.contiguous().T, y


@pytest.mark.parametrize(
    "collate",
    [_mixed_up_by_an_own_generator, _RunningMean(), _halved_when_large, _divided_when_large, _divided_and_turned],
    ids=["own generator", "state", "gate", "bound", "turned"],
)
def test_a_collate_function_in_which_records_meet_is_refused(collate: Callable[[list[Any]], Any]) -> None:
    found = _refusal(over_rows, collate)
    assert found.startswith("BatchDependenceError")
    assert getattr(collate, "__qualname__", type(collate).__name__) in found


class _OwnNoise(Rows):
    """Never gives the same record twice."""

    numbers = np.random.default_rng(1)

    def __getitem__(self, index: int) -> Any:
        x, *rest = super().__getitem__(index)
        return (x + 0.1 * torch.from_numpy(self.numbers.normal(size=FEATURES)).float(), *rest)


def test_a_data_set_that_never_repeats_does_not_hide_its_collate_function() -> None:
    def centred(records: list[Any]) -> Any:
        x, y = _stacked(records)
        return x - x.mean(0), y

    assert "centred" in _refusal(over_rows, centred, _OwnNoise(_columns()))
    assert _refusal(over_rows, _stacked, _OwnNoise(_columns())) == ""


def _noisy_by_an_own_generator(records: list[Any]) -> Any:
    x, y = _stacked(records)
    return x + 0.1 * torch.from_numpy(OWN.normal(size=x.shape)).float(), y


def test_a_collate_function_that_augments_by_an_own_generator_is_accepted() -> None:
    assert _refusal(over_rows, _noisy_by_an_own_generator) == ""


def _packed(records: list[Any]) -> Any:
    words, classes = zip(*records, strict=True)
    return nn.utils.rnn.pack_sequence(list(words), enforce_sorted=False), torch.stack(classes)


def _over_packed(model: Any, batch: Any) -> Tensor:
    packed, classes = batch
    return cross_entropy(model.head(model.rnn(packed._replace(data=model.table(packed.data)))[1][-1]), classes)


def _sorted(records: list[Any]) -> Any:
    order = sorted(range(len(records)), key=lambda i: -len(records[i][0]))
    return *pad([records[i] for i in order]), torch.tensor(order)


def _mean_of_words(model: Any, batch: Any) -> Tensor:
    words, classes, *_ = batch
    mask = (words != 0)[:, :, None]
    return cross_entropy(model.head((model.table(words) * mask).sum(1) / mask.sum(1)), classes)


def _put_back(model: Any, batch: Any) -> Tensor:
    found = _mean_of_words(model, batch)
    back = torch.empty_like(found)
    back[batch[2]] = found
    return back


def test_a_collate_function_may_pack_or_sort_where_the_losses_are_put_back() -> None:
    assert _refusal(_over_packed, _packed, _texts()) == ""
    assert _refusal(_put_back, _sorted, _texts()) == ""


def test_a_collate_function_that_sorts_is_named_where_no_loss_is_put_back() -> None:
    assert "_sorted" in _refusal(_mean_of_words, _sorted, _texts())


# -- what is left behind ---------------------------------------------------------------------------------------------


def _private() -> epsilons.training.Private:
    model, columns = _small(), _columns()
    budgets = epsilons.Budgets([1.0] * RECORDS, delta=1e-5)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=2, batch_size=24, clip_norm=1.0), accountant="rdp")
    return epsilons.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), columns, plan, budgets=budgets, seed=0
    )


def _fails(batches: Any) -> None:
    for _ in batches:
        raise ZeroDivisionError


def test_random_numbers_are_random_after_an_error_although_the_loop_is_kept() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    private = _private()
    kept = private.batches  # as a progress bar in a notebook keeps it
    with pytest.raises(ZeroDivisionError):
        _fails(kept)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), expected)
    private.close()
    assert not _get_current_dispatch_mode_stack()
    assert not _get_current_function_mode_stack()


def test_modes_of_the_loop_s_own_are_left_where_they_are() -> None:
    private = _private()
    for batch in private.batches:
        own = torch.overrides.BaseTorchFunctionMode()
        with own:
            private.backward(over_rows(private.model, batch))
            assert _get_current_function_mode_stack() == [own]
        private.step()
    assert not _get_current_function_mode_stack()
