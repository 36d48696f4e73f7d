"""Promise: each record is drawn by its own independent coin, at its own group's rate, afresh at every step.

Who is in a sum is read off the sum itself. Each test fails by chance for one seed in a million.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from .adapters import Inexpressible, Table, Trainer, record
from .probes import FALSE_ALARM, NEXT_TO_NONE, Echo, losses_of_echo, mixed, one_hot, who

RECORDS, UPDATES = 300, 1_000


@pytest.fixture(scope="module")
def drawn(trainer: Trainer, seeded: Callable[[str], int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(updates, records) who is in each sum, (records,) at which rate, (records,) of which group."""
    asked = Table(UPDATES, mixed(RECORDS, 3), (0.02, 0.1, 0.25), (0.5, 1.0, 2.0), NEXT_TO_NONE, 37.0)
    table = trainer.express(asked)
    trace = record(trainer, Echo(RECORDS), one_hot(RECORDS), losses_of_echo, table, seed=seeded("draws"))
    return who(trace.stacked(), table), table.rates, np.array(table.group)


Drawn = tuple[np.ndarray, np.ndarray, np.ndarray]


def standardised(table: np.ndarray, rate: np.ndarray) -> np.ndarray:
    return (table - rate) / np.sqrt(rate * (1 - rate))


def test_every_record_is_drawn_at_its_own_rate(drawn: Drawn):
    """A binomial count for each record, and one for each group, which resolves 3 % of its rate or better."""
    table, rate, group = drawn
    counts = table.sum(0)
    level = FALSE_ALARM / 4 / len(rate)
    assert (counts >= stats.binom.ppf(level, UPDATES, rate)).all()
    assert (counts <= stats.binom.isf(level, UPDATES, rate)).all()
    for g in np.unique(group):
        own = group == g
        share = FALSE_ALARM / 4 / len(np.unique(group))
        low, high = stats.binom.ppf([share, 1 - share], UPDATES * own.sum(), rate[own][0])
        assert low <= counts[own].sum() <= high, f"group {g}"


def test_the_counts_of_records_spread_as_independent_steps_make_them(drawn: Drawn):
    """An epoch that deals out every record once leaves no spread at all."""
    table, rate, _ = drawn
    spread = (((table.sum(0) - UPDATES * rate) ** 2) / (UPDATES * rate * (1 - rate))).sum()
    low, high = stats.chi2.ppf(FALSE_ALARM / 4, len(rate)), stats.chi2.isf(FALSE_ALARM / 4, len(rate)) * 1.05
    assert low <= spread <= high


def test_the_size_of_a_draw_varies_as_independent_coins_make_it(drawn: Drawn):
    """A batch of fixed size, or a shuffle, has the right rates and the wrong variance: it should be Σ q(1 − q)."""
    table, rate, _ = drawn
    sizes, variance = table.sum(1), (rate * (1 - rate)).sum()
    spread = ((sizes - rate.sum()) ** 2).sum() / variance
    assert stats.chi2.ppf(FALSE_ALARM / 4, UPDATES) <= spread <= stats.chi2.isf(FALSE_ALARM / 4, UPDATES) * 1.01
    assert abs(sizes.mean() - rate.sum()) <= stats.norm.isf(FALSE_ALARM / 4) * (variance / UPDATES) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 7])
def test_having_been_drawn_says_nothing_about_the_next_steps(drawn: Drawn, lag: int):
    """Each record's correlation with itself `lag` steps later, with its neighbour then, and of the sizes of draws."""
    table, rate, _ = drawn
    values = standardised(table, rate)
    limit = stats.norm.isf(FALSE_ALARM / 8)
    for later in (values, np.roll(values, 1, axis=1)):
        product = values[:-lag] * later[lag:]
        assert abs(product.mean()) * product.size**0.5 <= limit
    sizes = values.sum(1) / len(rate) ** 0.5
    assert abs((sizes[:-lag] * sizes[lag:]).sum()) <= limit * 1.02 * (UPDATES - lag) ** 0.5


def test_no_two_records_are_drawn_together_more_or_less_often_than_chance(drawn: Drawn, seed: int):
    """The largest correlation of any pair, and all of them beside those of coins known to be independent."""
    table, rate, _ = drawn
    common = rate >= 0.05  # drawn often enough for a normal limit
    ideal = np.random.default_rng(seed).random(table.shape) < rate
    together, apart = (
        (values.T @ values)[np.triu_indices(values.shape[1], 1)] / UPDATES**0.5
        for values in (standardised(t[:, common], rate[common]) for t in (table, ideal))
    )
    assert np.abs(together).max() <= stats.norm.isf(FALSE_ALARM / together.size / 4) * 1.1
    assert stats.ks_2samp(together, apart).pvalue > FALSE_ALARM / 4


def test_a_rate_of_nothing_is_never_drawn_and_a_rate_of_one_always(trainer: Trainer, seed: int):
    asked = Table(50, mixed(60, 3), (0.0, 0.5, 1.0), (0.5, 1.0, 2.0), NEXT_TO_NONE, 30.0)
    table = trainer.express(asked)
    if table != asked:
        raise Inexpressible("a rate per group")
    trace = record(trainer, Echo(60), one_hot(60), losses_of_echo, table, seed=seed)
    found = who(trace.stacked(), table)
    group = np.array(table.group)
    assert not found[:, group == 0].any()
    assert (found[:, group == 2] == 1).all()


def test_a_rate_beyond_single_precision_is_kept(trainer: Trainer, seed: int):
    """At 2**-34 hardly one of two hundred million coins comes up, 0.01 of them on average.

    A uniform number of 24 bits is 0 once in 2**24, so a comparison in single precision would draw about twelve. Three
    or more happen by chance for one seed in four million.
    """
    records, updates, rate = 1_000_000, 200, 2.0**-34
    table = trainer.express(Table(updates, (0,) * records, (rate,), (1.0,), NEXT_TO_NONE, 1.0))
    x = torch.full((records, 1), 5.0, dtype=torch.float64)
    trace = record(trainer, Echo(1), (x,), losses_of_echo, table, seed=seed)
    assert len(trace.sums) == updates
    assert round(trace.stacked().sum()) <= 2


def test_a_new_phase_draws_anew(trainer: Trainer, seed: int):
    """All draws of two phases alike come about by chance once in 2**60 or less."""
    table = trainer.express(Table(10, mixed(60, 2), (0.5, 0.5), (1.0, 1.0), NEXT_TO_NONE, 30.0, phases=2))
    found = who(record(trainer, Echo(60), one_hot(60), losses_of_echo, table, seed=seed).stacked(), table)
    assert not (found[:5] == found[5:]).all()


def test_runs_without_a_seed_draw_others(trainer: Trainer):
    """Two runs with the same draws for every step come about by chance once in 2**60 or less."""
    table = trainer.express(Table(5, mixed(60, 2), (0.5, 0.5), (1.0, 1.0), NEXT_TO_NONE, 30.0))
    runs = [
        who(record(trainer, Echo(60), one_hot(60), losses_of_echo, table, seed=None).stacked(), table) for _ in "123"
    ]
    assert not (runs[0] == runs[1]).all()
    assert not (runs[1] == runs[2]).all()
    assert not (runs[0] == runs[2]).all()
