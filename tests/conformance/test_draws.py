"""Promise: each record is drawn independently, at the rate of its group, with fresh randomness at every step.

The sum itself shows who is in it. Each test fails by chance for one seed in a million.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from .adapters import Inexpressible, Table, Trainer, record
from .probes import ALMOST_NO_NOISE, FALSE_ALARM, Echo, drawn_in, losses_of_echo, mixed, recorded

RECORDS, UPDATES = 300, 1_000


@pytest.fixture(scope="module")
def drawn(trainer: Trainer, seeded: Callable[[str], int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(updates, records) how often each record is in each sum, (records,) its rate, (records,) its group."""
    asked = Table(UPDATES, mixed(RECORDS, 3), (0.02, 0.1, 0.25), (0.5, 1.0, 2.0), ALMOST_NO_NOISE, 37.0)
    table = trainer.express(asked)
    sums = recorded(trainer, asked, seed=seeded("draws")).stacked()
    return drawn_in(sums, table), table.rates, np.array(table.group)


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
        members = group == g
        share = FALSE_ALARM / 4 / len(np.unique(group))
        low, high = stats.binom.ppf([share, 1 - share], UPDATES * members.sum(), rate[members][0])
        assert low <= counts[members].sum() <= high, f"group {g}"


def test_the_counts_of_records_spread_as_independent_steps_make_them(drawn: Drawn):
    """Epochs that give every record once have no spread at all."""
    table, rate, _ = drawn
    spread = (((table.sum(0) - UPDATES * rate) ** 2) / (UPDATES * rate * (1 - rate))).sum()
    low, high = stats.chi2.ppf(FALSE_ALARM / 4, len(rate)), stats.chi2.isf(FALSE_ALARM / 4, len(rate)) * 1.05
    assert low <= spread <= high


def test_the_size_of_a_draw_varies_as_independent_draws_make_it(drawn: Drawn):
    """A batch of fixed size, or a shuffle, has the right rates and the wrong variance: it should be Σ q(1 − q)."""
    table, rate, _ = drawn
    sizes, variance = table.sum(1), (rate * (1 - rate)).sum()
    spread = ((sizes - rate.sum()) ** 2).sum() / variance
    assert stats.chi2.ppf(FALSE_ALARM / 4, UPDATES) <= spread <= stats.chi2.isf(FALSE_ALARM / 4, UPDATES) * 1.01
    assert abs(sizes.mean() - rate.sum()) <= stats.norm.isf(FALSE_ALARM / 4) * (variance / UPDATES) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 7])
def test_a_draw_is_independent_of_the_next_ones(drawn: Drawn, lag: int):
    """Each record's correlation with itself `lag` steps later, with its neighbour then, and of the sizes of draws."""
    table, rate, _ = drawn
    values = standardised(table, rate)
    limit = stats.norm.isf(FALSE_ALARM / 8)
    for later in (values, np.roll(values, 1, axis=1)):
        product = values[:-lag] * later[lag:]
        assert abs(product.mean()) * product.size**0.5 <= limit
    sizes = values.sum(1) / len(rate) ** 0.5
    assert abs((sizes[:-lag] * sizes[lag:]).sum()) <= limit * 1.02 * (UPDATES - lag) ** 0.5


def test_no_two_records_are_drawn_together_more_or_less_than_by_chance(drawn: Drawn, seed: int):
    """The largest correlation of any pair, and all of them compared with those of independent coins."""
    table, rate, _ = drawn
    common = rate >= 0.05  # drawn often enough for a normal limit
    ideal = np.random.default_rng(seed).random(table.shape) < rate
    together, apart = (
        (values.T @ values)[np.triu_indices(values.shape[1], 1)] / UPDATES**0.5
        for values in (standardised(t[:, common], rate[common]) for t in (table, ideal))
    )
    assert np.abs(together).max() <= stats.norm.isf(FALSE_ALARM / together.size / 4) * 1.1
    assert stats.ks_2samp(together, apart).pvalue > FALSE_ALARM / 4


def test_a_rate_of_0_is_never_drawn_and_a_rate_of_1_always(trainer: Trainer, seed: int):
    asked = Table(50, mixed(60, 3), (0.0, 0.5, 1.0), (0.5, 1.0, 2.0), ALMOST_NO_NOISE, 30.0)
    table = trainer.express(asked)
    if table != asked:
        raise Inexpressible("a rate per group")
    is_drawn = drawn_in(recorded(trainer, asked, seed=seed).stacked(), table)
    group = np.array(table.group)
    assert not is_drawn[:, group == 0].any()
    assert (is_drawn[:, group == 2] == 1).all()


def test_a_rate_beyond_single_precision_is_kept(trainer: Trainer, seed: int):
    """At 2**-34 0.01 of two hundred million coins come up on average.

    A uniform number of 24 bits is 0 once in 2**24, so a comparison in single precision would draw about twelve. Three
    or more happen by chance for one seed in four million.
    """
    records, updates, rate = 1_000_000, 200, 2.0**-34
    table = trainer.express(Table(updates, (0,) * records, (rate,), (1.0,), ALMOST_NO_NOISE, 1.0))
    x = torch.full((records, 1), 5.0, dtype=torch.float64)
    trace = record(trainer, Echo(1), (x,), losses_of_echo, table, seed=seed)
    assert len(trace.sums) == updates
    assert round(trace.stacked().sum()) <= 2


def test_a_new_phase_makes_new_draws(trainer: Trainer, seed: int):
    """All draws of two phases alike come about by chance once in 2**60 or less."""
    asked = Table(10, mixed(60, 2), (0.5, 0.5), (1.0, 1.0), ALMOST_NO_NOISE, 30.0, phases=2)
    is_drawn = drawn_in(recorded(trainer, asked, seed=seed).stacked(), trainer.express(asked))
    assert not (is_drawn[:5] == is_drawn[5:]).all()


def test_runs_without_a_seed_draw_other_records(trainer: Trainer):
    """Two runs with the same draws for every step come about by chance once in 2**60 or less."""
    asked = Table(5, mixed(60, 2), (0.5, 0.5), (1.0, 1.0), ALMOST_NO_NOISE, 30.0)
    runs = [drawn_in(recorded(trainer, asked, seed=None).stacked(), trainer.express(asked)) for _ in range(3)]
    assert len({run.tobytes() for run in runs}) == 3
