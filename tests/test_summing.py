"""Sums of products on every path: each record's part once, by its own factor, wherever groups and rows are split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from epsilons.clipping import summing
from epsilons.clipping.summing import ROWS_AT_ONCE

pytestmark = pytest.mark.usefixtures("one_thread")

K, P = 17, 19
#: So many records are in a group of `_in_groups`, and in a part of `_in_64_bits` with 5 rows each.
GROUP = 4
SIZES = [1, 2, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP, 2 * GROUP + 1, 3 * GROUP - 1]
TIMES = [5, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 2 * ROWS_AT_ONCE + 7]

PATHS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "in 64 bits": summing._in_64_bits,
    "in groups": summing._in_groups,
    "one by one": summing._one_by_one,
}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(summing.VALUES_AT_ONCE, "cpu", GROUP * K * P)


def sides(records: int, time: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(100 * records + time)
    left, right = torch.randn(records, time, K), torch.randn(records, time, P)
    return left, right, torch.linspace(0.5, 2.0, records, dtype=torch.float64)


def skip_without_onednn(path: str) -> None:
    if path == "one by one" and summing.INNER_PRODUCT is None:
        pytest.skip("needs oneDNN's inner product")


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("records", SIZES)
@pytest.mark.parametrize("path", PATHS)
def test_a_sum_of_products_has_every_record_once(path, records, time):
    """Against one product in 64 bits. A part more or less would be at least a hundredth of the sum."""
    skip_without_onednn(path)
    left, right, factor = sides(records, time)
    expected = torch.einsum("r,rtk,rtp->kp", factor, left.double(), right.double())
    got = PATHS[path](left, right, factor)
    assert got.dtype == torch.float64
    assert got.shape == (K, P)
    assert distance(got, expected) < 1e-6


@pytest.mark.parametrize("broken", [0, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP])
@pytest.mark.parametrize("path", ["in groups", "one by one"])
def test_a_record_of_factor_0_adds_nothing_though_its_product_overflows(path, broken):
    """In whatever group it is, and it takes the place of no other."""
    skip_without_onednn(path)
    left, right, factor = sides(2 * GROUP + 1, 5)
    left[broken], right[broken], factor[broken] = 3e38, 3e38, 0.0
    others = [place for place in range(len(left)) if place != broken]
    expected = torch.einsum("r,rtk,rtp->kp", factor[others], left[others].double(), right[others].double())
    assert distance(PATHS[path](left, right, factor), expected) < 1e-6


@pytest.mark.parametrize("entries", [1, 7, 1_000, 5_000])
@pytest.mark.parametrize("records", SIZES)
def test_a_sum_of_rows_has_every_record_once(records, entries):
    torch.manual_seed(records)
    rows, factor = torch.randn(records, entries), torch.linspace(0.5, 2.0, records, dtype=torch.float64)
    assert distance(summing.added(rows, factor), factor @ rows.double()) < 1e-12


@pytest.mark.parametrize("records", [1, 2, 5])
def test_products_of_all_are_each_records_own(records, monkeypatch):
    """By oneDNN and in one batch."""
    left, right, _ = sides(records, 40)
    expected = torch.einsum("rtk,rtp->rkp", left.double(), right.double())
    for single in (1, 2**60):
        monkeypatch.setattr(summing, "SINGLE", single)
        for record in range(records):
            assert distance(summing.products_of_all(left, right)[record], expected[record]) < 1e-6
