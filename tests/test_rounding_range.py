"""The range in which the rounding of sums in 64 bits is covered: where it ends, and the warning beyond it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import epsilons
from epsilons.clipping.engine import SHRINK, is_covered
from epsilons.errors import EpsilonsWarning
from small_runs import of_phases, private_over

BUDGETS = epsilons.Budgets([500.0, 1000.0] * 6, delta=1e-3)


@pytest.mark.parametrize("ratio", [1.0, 3.0])
@pytest.mark.parametrize("physical_batch", [1, 16, 256, 4096, 10**9])
def test_the_errors_of_all_additions_stay_below_half_of_what_is_covered(physical_batch, ratio):
    """Each addition is wrong by 2⁻⁵³ of the sum so far: here all are, in both of two neighbouring sums."""
    for records in (1_000, 20_000, 65_000, 10**6, 10**7):
        batch = min(physical_batch, records)
        within = torch.arange(1, batch + 1, dtype=torch.float64).sum() * records / batch
        across = torch.arange(1, records // batch + 1, dtype=torch.float64).sum() * batch
        error = 2 * float(within + across) * 2.0**-53 * ratio
        if is_covered(records, batch, ratio):
            assert error <= (1 - SHRINK) / 2 * (1 + 2 / records**0.5)
        else:
            assert error >= (1 - SHRINK) / 2 * (1 - 2 / records**0.5)


def test_sums_of_65_535_records_are_covered_in_physical_batches_of_any_size():
    assert all(is_covered(65_535, physical_batch) for physical_batch in range(1, 65_536))
    assert not is_covered(65_536, 65_536)


def warned(*expected_batches: float, clip_norm: tuple[float, float] = (1.0, 1.0), **performance: int) -> list[str]:
    shared = {"steps": 1, "sample_rate": [1.0, 1.0], "clip_norm": clip_norm}
    plan = of_phases(*(shared | {"expected_batch": expected} for expected in expected_batches), budgets=BUDGETS)
    model, data = nn.Linear(3, 2), (torch.zeros(12, 3), torch.zeros(12, dtype=torch.long))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        private_over(model, data, plan, budgets=BUDGETS, **performance)
    return [str(w.message) for w in caught if issubclass(w.category, EpsilonsWarning)]


def test_make_private_warns_once_if_draws_may_be_too_large():
    (message,) = warned(12.0, 2e6, 3e6)
    assert message.startswith("With draws of about 2,000,000 records in physical batches of 256, rounding in 64 bits")
    assert "use a smaller batch_size (the range is widest with max_physical_batch=1414). See " in message


@pytest.mark.parametrize(
    ("expected_batch", "options"),
    [(12.0, {}), (60_000.0, {}), (9e5, {}), (9e5, {"max_physical_batch": 1024}), (1.5e6, {"max_physical_batch": 1225})],
)
def test_make_private_does_not_warn_of_draws_that_are_covered(expected_batch, options):
    assert warned(expected_batch, **options) == []


def test_bounds_that_differ_between_groups_make_the_range_smaller():
    assert warned(60_000.0, max_physical_batch=60_000) == []
    assert len(warned(60_000.0, max_physical_batch=60_000, clip_norm=(0.5, 1.0))) == 1
