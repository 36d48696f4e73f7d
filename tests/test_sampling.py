"""Sampling: each record by its own coin, independent of everyone else's and of its own at other steps.

Statistical checks run under fixed keys, so they never flicker; each says how often it would fail under a fresh one.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import epsilons
from epsilons.training.randomness import SOURCES, Randomness
from epsilons.training.sampling import Draws, physical_batches

#: How often each statistical check below would fail by chance, under a fresh key.
FALSE_ALARM = 1e-6

RATES = (0.0, 0.003, 0.05, 0.3, 0.7, 1.0)
EACH = 40  # records per group
STEPS = 3_000


def draws(rates: tuple[float, ...] = RATES, source: str = "philox", phases: int = 1, key: bytes = bytes(32)) -> Draws:
    """A group per rate; the groups' records lie mixed among each other."""
    count = len(rates)
    budgets = epsilons.Budgets(np.resize(np.arange(1, count + 1) * 1e4, EACH * count))

    def tabled(budgets, recipe, accountant):
        one = np.ones(count)
        phase = epsilons.Phase(
            steps=STEPS, sample_rate=rates, clip_norm=one, weight=one, noise_std=3.0, expected_batch=50.0
        )
        return epsilons.Plan.of(budgets, recipe, accountant, *[phase] * phases, strategy="tabled")

    recipe = epsilons.Recipe(steps=STEPS * phases, batch_size=50, clip_norm=1.0)
    plan = epsilons.plan(budgets, recipe, strategy=tabled, accountant="rdp")
    return Draws(plan, budgets.group, Randomness(key, source))


#: The two ways to one law.
METHODS = ("by_coins", "by_gaps")
BOTH = pytest.mark.parametrize("method", METHODS)


@cache
def drawn(source: str, method: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, records) who was drawn, and (records,) at which rate."""
    ours = getattr(draws(source=source), method)
    rate = np.array(RATES)[draws().group]
    table = np.zeros((STEPS, len(rate)), dtype=bool)
    for step in range(STEPS):
        table[step, ours(0, step)] = True
    return table, rate


def standardised(table: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Mean 0 and variance 1 where the rate is neither 0 nor 1; only those records."""
    random = (rate > 0) & (rate < 1)
    return (table[:, random] - rate[random]) / np.sqrt(rate[random] * (1 - rate[random]))


@BOTH
@pytest.mark.parametrize("source", SOURCES)
def test_every_record_is_drawn_at_its_own_rate(source, method):
    """A binomial count per record and per group; over all of them together one key in a million fails."""
    table, rate = drawn(source, method)
    counts = table.sum(0)
    level = FALSE_ALARM / len(rate) / 2
    assert (counts >= stats.binom.ppf(level, STEPS, rate)).all()
    assert (counts <= stats.binom.isf(level, STEPS, rate)).all()
    for q in RATES:
        trials = STEPS * EACH
        low, high = stats.binom.ppf([FALSE_ALARM / 10, 1 - FALSE_ALARM / 10], trials, q)
        assert low <= counts[rate == q].sum() <= high


@BOTH
@pytest.mark.parametrize("source", SOURCES)
def test_a_rate_of_zero_is_never_drawn_and_a_rate_of_one_always(source, method):
    table, rate = drawn(source, method)
    assert not table[:, rate == 0].any()
    assert table[:, rate == 1].all()


@BOTH
@pytest.mark.parametrize("source", SOURCES)
def test_the_size_of_a_draw_varies_as_independent_coins_make_it_vary(source, method):
    """A fixed-size batch or a shuffle has the right rates and the wrong variance, sum of q(1 − q)."""
    table, rate = drawn(source, method)
    sizes = table.sum(1)
    variance = (rate * (1 - rate)).sum()
    spread = ((sizes - rate.sum()) ** 2).sum() / variance  # chi-squared with STEPS degrees, nearly
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], STEPS)
    assert low <= spread <= high
    assert abs(sizes.mean() - rate.sum()) <= stats.norm.isf(FALSE_ALARM / 2) * (variance / STEPS) ** 0.5


@BOTH
@pytest.mark.parametrize("source", SOURCES)
def test_no_two_records_are_drawn_together_more_or_less_often_than_chance(source, method):
    """The largest correlation of any pair, but for the rarest group, whose counts are too small for a normal limit."""
    table, rate = drawn(source, method)
    common = rate >= 0.05
    values = standardised(table[:, common], rate[common])
    pairs = np.triu_indices(values.shape[1], 1)
    together = (values.T @ values)[pairs] / STEPS**0.5
    assert np.abs(together).max() <= stats.norm.isf(FALSE_ALARM / len(together) / 2) * 1.05
    assert stats.kstest(together, "norm").pvalue > FALSE_ALARM


@BOTH
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_having_been_drawn_says_nothing_about_the_next_steps(source, method, lag):
    """The mean over records of each one's correlation with itself `lag` steps later, and with its neighbour."""
    table, rate = drawn(source, method)
    values = standardised(table, rate)
    for later in (values, np.roll(values, 1, axis=1)):
        product = (values[:-lag] * later[lag:]).mean()
        count = (STEPS - lag) * values.shape[1]
        assert abs(product) * count**0.5 <= stats.norm.isf(FALSE_ALARM / 4)


@BOTH
@pytest.mark.parametrize("source", SOURCES)
def test_a_draw_is_a_function_of_key_phase_and_step(source, method):
    ours, again = draws(source=source, phases=2), draws(source=source, phases=2)
    other = draws(source=source, phases=2, key=b"\1" + bytes(31))
    for step in (0, 1, 2_999):
        assert (getattr(ours, method)(0, step) == getattr(again, method)(0, step)).all()
        assert not np.array_equal(getattr(ours, method)(0, step), getattr(ours, method)(1, step))
        assert not np.array_equal(getattr(ours, method)(0, step), getattr(ours, method)(0, step + 1))
        assert not np.array_equal(getattr(ours, method)(0, step), getattr(other, method)(0, step))


@BOTH
def test_a_draw_is_in_ascending_order_and_names_nobody_twice(method):
    for step in range(50):
        found = getattr(draws(), method)(0, step)
        assert (np.diff(found) > 0).all()
        assert found.dtype == np.int64


def test_a_larger_rate_under_the_same_coins_draws_the_same_records_and_more():
    few, many = draws(rates=(0.2, 0.4)), draws(rates=(0.3, 0.4))
    for step in range(50):
        assert np.isin(few.at(0, step), many.at(0, step)).all()


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_a_rare_record_is_not_drawn_too_often(source):
    """A hundred million coins at q = 1e-4: the count is within chance, but for one key in a million."""
    randomness, count, steps, q = Randomness(bytes(32), source), 1_000_000, 100, 1e-4
    limit = np.uint64(int(q * 2**53))
    found = sum(int((randomness.coins(0, step, count) < limit).sum()) for step in range(steps))
    low, high = stats.binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], count * steps, q)
    assert low <= found <= high


@given(st.integers(0, 500), st.integers(1, 60))
def test_chunks_are_the_draw_in_order_in_pieces_of_nearly_one_size(count, largest):
    draw = np.arange(count) * 3
    pieces = physical_batches(draw, largest)
    assert [i for piece in pieces for i in piece] == draw.tolist()
    sizes = [len(piece) for piece in pieces]
    assert all(1 <= size <= largest for size in sizes)
    assert len(pieces) == -(-count // largest)
    assert not sizes or max(sizes) - min(sizes) <= 1
