"""The batch-independence check where physical batches show little: equal rows, a single row, and after empty draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import epsilons
from epsilons.doors.foreign_loop import ForeignLoop
from epsilons.errors import BatchDependenceError
from epsilons.training import Private
from epsilons.training.microbatches import POOR_CHECKS
from options import make_flat

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDS = 24
EPSILON = 1.0

#: Factors of the losses that depend on the number of records; of (inputs, how many a batch holds).
FACTORS: dict[str, Callable[[Tensor, int], float]] = {
    "a power": lambda x, full: (full / len(x)) ** 6,
    "a mean": lambda x, full: 1 / len(x),
    "a root": lambda x, full: len(x) ** 0.5,
    "a parity": lambda x, full: 1.0 + len(x) % 2,
    "a threshold": lambda x, full: 1.0 if len(x) > full // 2 + 1 else 2.0,
    "one less than all": lambda x, full: 1.0 if len(x) >= full else 2.0,
    "shape": lambda x, full: 1 / x.shape[0],
    "numel": lambda x, full: 4 / x.numel(),
    "a sum of ones": lambda x, full: 1 / float(torch.ones(len(x)).sum()),
}


class Divided(nn.Module):
    """Divides by the number of records inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / x.shape[0]


class Centred(Divided):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) - 0.5 * self.layer(x).mean(0)


def equal(records: int = RECORDS) -> Tensor:
    return torch.full((records, 4), 0.3)


def opened(
    x: Tensor, model: nn.Module | None = None, steps: int = 1, rate: float = 1.0, physical: int = RECORDS, **options
) -> Private:
    torch.manual_seed(0)
    units = options.pop("units", len(x))
    budgets = options.pop("budgets", None) or epsilons.Budgets([EPSILON] * len(x), delta=1e-5)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps, units * rate, 1.0), accountant="rdp")
    model = model or nn.Linear(4, 1)
    return make_flat(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (x, torch.ones(len(x))),
        plan,
        budgets=budgets,
        key=options.pop("key", bytes(32)),
        performance=epsilons.Performance(max_physical_batch=physical),
        **options,
    )


def squares(private: Private, x: Tensor, y: Tensor) -> Tensor:
    return (private.model(x).squeeze(1) - y) ** 2


def train(private: Private, losses_of: Callable[[Tensor, Tensor], Tensor]) -> list[int]:
    """The updates before which each batch was only checked."""
    checked = []
    with private:
        for x, y in private.batches:
            checked += [private.updates] * private.is_check
            private.backward(losses_of(x, y))
            private.step()
    return checked


@pytest.mark.parametrize("rows", ["equal", "equal, in two batches", "repeated", "one different"])
@pytest.mark.parametrize("name", FACTORS)
def test_losses_that_depend_on_the_number_of_records_are_refused(name, rows):
    x = equal()
    if rows == "repeated":
        x = torch.arange(RECORDS)[:, None].repeat(1, 4).float() // 8
    elif rows == "one different":
        x[-1] = 1.0
    full = RECORDS // 2 if "two" in rows else RECORDS
    private = opened(x, physical=full)
    with pytest.raises(BatchDependenceError):
        train(private, lambda x, y: squares(private, x, y) * FACTORS[name](x, full))


@pytest.mark.parametrize("model", [Divided, Centred])
@pytest.mark.parametrize("records", [2, 3, RECORDS])
def test_models_that_depend_on_the_number_of_records_are_refused_on_equal_rows(model, records):
    private = opened(equal(records), model(), physical=RECORDS)
    with pytest.raises(BatchDependenceError):
        train(private, lambda x, y: squares(private, x, y))


def test_a_foreign_loop_is_checked_on_equal_rows():
    private = opened(equal(), Divided())
    loop = ForeignLoop(private)

    def run() -> None:
        for x, y in loop.batches:
            squares(private, x, y).mean().backward()
            loop.step()

    with pytest.raises(BatchDependenceError), loop:
        run()


def test_a_single_record_is_checked_with_copies_of_itself():
    private = opened(equal(12), steps=99, rate=0.01)
    sizes = []

    def losses(x: Tensor, y: Tensor) -> Tensor:
        sizes.append(len(x))
        return squares(private, x, y) / len(x)

    with pytest.raises(BatchDependenceError, match="Adding copies of the only record"):
        train(private, losses)
    assert sizes == [1, 1, 2]


def test_a_person_with_several_equal_rows_is_checked():
    ids = [i // 4 for i in range(RECORDS)]
    budgets = epsilons.Budgets.by_person([EPSILON] * RECORDS, ids, delta=1e-5)
    private = opened(equal(), budgets=budgets, units=6, rows_per_person=4)
    with pytest.raises(BatchDependenceError):
        train(private, lambda x, y: squares(private, x, y) / len(x))


def test_a_check_stays_due_until_several_different_rows_were_checked():
    """Rows are equal in all draws but those in which the last record was drawn."""
    x = equal(60)
    x[-1] = 1.0
    private = opened(x, steps=60, rate=0.1, physical=60)
    seen: list[tuple[int, bool, bool]] = []

    def losses(x: Tensor, y: Tensor) -> Tensor:
        seen.append((private.updates, private.is_check, bool((x != x[0]).any())))
        return squares(private, x, y)

    train(private, losses)
    mixed = [update for update, is_check, differs in seen if differs and not is_check]
    checked = {update for update, is_check, _ in seen if is_check}
    assert 1 < mixed[0] < 60
    assert mixed[0] in checked  # though no step of its own made a check due there
    assert len(checked - {mixed[0]}) <= 3 * POOR_CHECKS  # at steps 0, 1 and 10, and not at every batch


def test_a_data_set_of_equal_rows_is_not_checked_at_every_draw():
    private = opened(equal(), steps=40, rate=0.9)
    checked = set(train(private, lambda x, y: squares(private, x, y)))
    assert checked == {0, 1, 2, 3, 10, 11, 12}


@pytest.mark.parametrize("name", ["a power", "a mean", "a parity"])
def test_losses_are_checked_at_the_first_batch_after_empty_draws(name):
    private = opened(equal(12), steps=99, rate=0.01, key=bytes(31) + b"\1")
    empty = []
    private.on_update(lambda private: empty.append(private.updates))
    with pytest.raises(BatchDependenceError):
        train(private, lambda x, y: squares(private, x, y) * FACTORS[name](x, 12))
    assert empty  # draws before the first batch
