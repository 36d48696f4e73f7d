"""Sampling: each record by its own coin, independent of everyone else's and of its own at other steps.

Statistical checks run under fixed keys, so they never flicker; each says how often it would fail under a fresh one.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import epsilons
from epsilons.draws import persons_rows
from epsilons.draws.persons_rows import MOST_COINS, Draws, evenly, heads, rate_classes, subset, successes
from epsilons.draws.randomness import SOURCES, Randomness, thresholds
from options import split
from small_runs import of_phases

#: How often each statistical check below would fail by chance, under a fresh key.
FALSE_ALARM = 1e-6

RATES = (0.0, 0.003, 0.05, 0.3, 0.7, 1.0)
EACH = 40  # records per group
STEPS = 3_000


def even(groups: int) -> dict[str, np.ndarray]:
    return {"clip_norm": np.ones(groups), "weight": np.ones(groups)}


def draws(rates: tuple[float, ...] = RATES, source: str = "philox", phases: int = 1, key: bytes = bytes(32)) -> Draws:
    """A group per rate; the groups' records lie mixed among each other."""
    count = len(rates)
    budgets = epsilons.Budgets(np.resize(np.arange(1, count + 1) * 1e4, EACH * count))
    table = {"steps": STEPS, "sample_rate": rates, **even(count), "noise_std": 3.0, "expected_batch": 50.0}
    plan = of_phases(*[table] * phases, budgets=budgets)
    return Draws(plan, budgets.group, Randomness(key, source))


#: The two ways to one distribution.
METHODS = ("by_coins", "by_counts")
every_method = pytest.mark.parametrize("method", METHODS)
every_source = pytest.mark.parametrize("source", SOURCES)
every_source_and_method = pytest.mark.parametrize(("source", "method"), list(product(SOURCES, METHODS)))


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


@every_source_and_method
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


@every_source_and_method
def test_a_rate_of_zero_is_never_drawn_and_a_rate_of_one_always(source, method):
    table, rate = drawn(source, method)
    assert not table[:, rate == 0].any()
    assert table[:, rate == 1].all()


@every_source_and_method
def test_the_size_of_a_draw_varies_as_independent_coins_make_it_vary(source, method):
    """A fixed-size batch or a shuffle has the right rates and the wrong variance, sum of q(1 − q)."""
    table, rate = drawn(source, method)
    sizes = table.sum(1)
    variance = (rate * (1 - rate)).sum()
    spread = ((sizes - rate.sum()) ** 2).sum() / variance  # chi-squared with STEPS degrees, nearly
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], STEPS)
    assert low <= spread <= high
    assert abs(sizes.mean() - rate.sum()) <= stats.norm.isf(FALSE_ALARM / 2) * (variance / STEPS) ** 0.5


@every_source_and_method
def test_no_two_records_are_drawn_together_more_or_less_often_than_chance(source, method):
    """The largest correlation of any pair, but for the rarest group, whose counts are too small for a normal limit."""
    table, rate = drawn(source, method)
    common = rate >= 0.05
    values = standardised(table[:, common], rate[common])
    pairs = np.triu_indices(values.shape[1], 1)
    together = (values.T @ values)[pairs] / STEPS**0.5
    assert np.abs(together).max() <= stats.norm.isf(FALSE_ALARM / len(together) / 2) * 1.05
    assert stats.kstest(together, "norm").pvalue > FALSE_ALARM


@every_source_and_method
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_having_been_drawn_says_nothing_about_the_next_steps(source, method, lag):
    """The mean over records of each one's correlation with itself `lag` steps later, and with its neighbour."""
    table, rate = drawn(source, method)
    values = standardised(table, rate)
    for later in (values, np.roll(values, 1, axis=1)):
        product = (values[:-lag] * later[lag:]).mean()
        count = (STEPS - lag) * values.shape[1]
        assert abs(product) * count**0.5 <= stats.norm.isf(FALSE_ALARM / 4)


@every_source_and_method
def test_a_draw_is_a_function_of_key_phase_and_step(source, method):
    ours, again = draws(source=source, phases=2), draws(source=source, phases=2)
    other = draws(source=source, phases=2, key=b"\1" + bytes(31))
    for step in (0, 1, 2_999):
        assert (getattr(ours, method)(0, step) == getattr(again, method)(0, step)).all()
        assert not np.array_equal(getattr(ours, method)(0, step), getattr(ours, method)(1, step))
        assert not np.array_equal(getattr(ours, method)(0, step), getattr(ours, method)(0, step + 1))
        assert not np.array_equal(getattr(ours, method)(0, step), getattr(other, method)(0, step))


@every_method
def test_a_draw_is_in_ascending_order_and_names_no_record_twice(method):
    for step in range(50):
        found = getattr(draws(), method)(0, step)
        assert (np.diff(found) > 0).all()
        assert found.dtype == np.int64


def test_a_larger_rate_under_the_same_coins_draws_the_same_records_and_more():
    few, many = draws(rates=(0.2, 0.4)), draws(rates=(0.3, 0.4))
    for step in range(50):
        assert np.isin(few.at(0, step), many.at(0, step)).all()


@given(
    st.lists(st.sampled_from([0.0, 2.0**-53, 0.01, 0.3, 1 - 2.0**-53, 1.0]), min_size=1, max_size=4), st.integers(0, 9)
)
def test_a_record_is_drawn_if_and_only_if_its_coin_is_below_its_limit(rates, seed):
    """The definition, record by record, for coins at and beside the limits and anywhere."""
    group = np.resize(np.arange(len(rates)), 40)
    limits = [int(rate * 2**53) for rate in np.array(rates)[group]]
    chance = np.random.default_rng(seed)
    near = [min(max(limit + int(chance.integers(-1, 2)), 0), 2**53 - 1) for limit in limits]
    coins = np.where(
        chance.random(40) < 0.5, np.array(near, dtype=np.uint64), chance.integers(2**53, size=40, dtype=np.uint64)
    )
    plan = SimpleNamespace(records=40, phases=[SimpleNamespace(sample_rate=np.array(rates))])
    ours = Draws(plan, group, SimpleNamespace(coins=lambda phase, step, records: coins))
    expected = [i for i, (coin, limit) in enumerate(zip(coins.tolist(), limits, strict=True)) if coin < limit]
    assert ours.by_coins(0, 0).tolist() == expected


@pytest.mark.slow
@every_source
def test_a_rare_record_is_not_drawn_too_often(source):
    """A hundred million coins at q = 1e-4: the count is within chance, but for one key in a million."""
    randomness, count, steps, q = Randomness(bytes(32), source), 1_000_000, 100, 1e-4
    limit = np.uint64(int(q * 2**53))
    found = sum(int((randomness.coins(0, step, count) < limit).sum()) for step in range(steps))
    low, high = stats.binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], count * steps, q)
    assert low <= found <= high


@given(st.integers(0, 500), st.integers(1, 60))
def test_physical_batches_are_the_draw_in_order_in_nearly_equal_pieces(count, largest):
    """numpy.array_split is the definition."""
    bounds, parts = evenly(count, largest), -(-count // largest)
    assert (len(bounds), bounds[0], bounds[-1]) == (parts + 1, 0, count)
    assert all(1 <= last - first <= largest for first, last in pairwise(bounds))
    if parts:
        assert np.diff(bounds).tolist() == [len(part) for part in np.array_split(np.arange(count), parts)]


# -- counts and subsets ----------------------------------------------------------------------------------------------


@given(
    st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0, 2.0**-53, 1 - 2.0**-53, 1e-300])), min_size=1)
)
def test_halvings_and_coins_together_are_the_threshold_exactly(rates):
    """No rounding: 2^-h times the coin's probability is the threshold, which is the rate rounded down."""
    limits, whole = thresholds(rates), 2**53
    parts = rate_classes(limits, np.arange(len(rates)))
    assert sorted(int(i) for part in parts for i in part.members) == np.flatnonzero(limits).tolist()
    for part in parts:
        for i in part.members:
            assert Fraction(int(part.limits[i]), whole) / 2**part.halvings == Fraction(int(limits[i]), whole)
            assert whole // 2 < part.limits[i] <= whole


@pytest.mark.parametrize("coins", [0, 1, 63, 64, 65, 128, 300])
@pytest.mark.parametrize("at_once", [1, 2, 2**20])
def test_heads_are_the_ones_among_exactly_so_many_bits(coins, at_once, monkeypatch):
    monkeypatch.setattr(persons_rows, "WORDS_AT_ONCE", at_once)
    bits, left, words = 0, coins, Randomness(bytes(32)).stream("coins")
    while left > 0:
        word = int(words.integers(1)[0])
        bits += (word >> max(64 - left, 0)).bit_count()
        left -= 64
    assert heads(coins, Randomness(bytes(32)).stream("coins")) == bits


@every_source
@pytest.mark.parametrize(("trials", "halvings"), [(40, 1), (200, 3), (5_000, 7)])
def test_successes_are_binomial(source, trials, halvings):
    """Chi-squared over 20 classes of about equal probability; it fails one key in a million."""
    stream = Randomness(bytes(32), source).stream("test", trials)
    assert successes(trials, 0, stream) == trials
    counts = [successes(trials, halvings, stream) for _ in range(2_000)]
    cuts = np.unique(stats.binom.ppf(np.linspace(0, 1, 21)[1:-1], trials, 2.0**-halvings))
    chances = np.diff([0, *stats.binom.cdf(cuts, trials, 2.0**-halvings), 1])
    seen = np.bincount(np.searchsorted(cuts, counts), minlength=len(cuts) + 1)
    assert stats.chisquare(seen[chances > 0], chances[chances > 0] * len(counts)).pvalue > FALSE_ALARM
    assert seen[chances == 0].sum() == 0


@pytest.mark.parametrize("size", range(6))
def test_every_subset_is_equally_likely(size):
    """Chi-squared over all subsets of 5; it fails one key in a million."""
    stream = Randomness(bytes(32)).stream("test", size)
    found = [tuple(subset(size, 5, stream).tolist()) for _ in range(3_000)]
    names, counts = np.unique([" ".join(map(str, one)) for one in found], return_counts=True)
    assert all(list(one) == sorted({*one}) and {*one} <= {*range(5)} and len(one) == size for one in found)
    assert len(names) == [1, 5, 10, 10, 5, 1][size]
    assert len(names) == 1 or stats.chisquare(counts).pvalue > FALSE_ALARM


@pytest.mark.parametrize(("size", "count"), [(0, 0), (0, 1), (1, 1), (3, 2**33), (900, 1_000), (1_000, 1_000)])
def test_a_subset_is_ascending_and_has_its_size(size, count):
    found = subset(size, count, Randomness(bytes(32)).stream("test"))
    assert len(found) == size
    assert (np.diff(found) > 0).all()
    assert not size or 0 <= found[0] <= found[-1] < count


def plan_for(records: int, rates=(1e-4, 3e-3, 0.6)) -> epsilons.Plan:
    budgets = epsilons.Budgets(np.resize([1e4, 2e4, 3e4], records), delta=1e-7)
    table = {"steps": 3, "sample_rate": rates, **even(3), "noise_std": 9.0, "expected_batch": 50.0}
    return of_phases(table, budgets=budgets)


def test_the_plans_number_of_records_alone_chooses_the_method():
    for records, method in [(MOST_COINS, "coins"), (MOST_COINS + 1, "counts")]:
        plan = plan_for(records, (1e-5, 2e-5, 4e-5))
        group = np.resize([0, 1, 2], records)
        ours = Draws(plan, group, Randomness(bytes(32)))
        assert ours.method == method
        assert (ours.at(0, 1) == getattr(ours, f"by_{method}")(0, 1)).all()
        few = Draws(plan, group[:60], Randomness(bytes(32)))  # the number of records in the data does not matter
        assert few.method == method


@pytest.mark.parametrize("largest", [3, 1000])
def test_a_run_hands_out_those_records_whatever_the_physical_batches(largest, monkeypatch):
    monkeypatch.setattr(persons_rows, "MOST_COINS", 10)
    budgets = epsilons.Budgets(np.resize([1e4, 2e4, 3e4], 300), delta=1e-7)
    plan, model = plan_for(300), torch.nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.arange(300.0)[:, None], torch.zeros(300, dtype=torch.long)
    options = {"budgets": budgets, "key": bytes(32), "max_physical_batch": largest, "engine": "loop"}
    private = epsilons.make_private(model, optimizer, (x, y), plan, **split(options))
    seen: list[list[int]] = [[], [], []]
    with private:
        for inputs, targets in private.batches:
            if not private.is_check:
                seen[private._position.step] += inputs[:, 0].long().tolist()
            private.backward(torch.nn.functional.cross_entropy(model(inputs / 300), targets, reduction="none"))
            private.step()
    ours = Draws(plan, budgets.group, Randomness(bytes(32)))
    assert seen == [ours.by_counts(0, step).tolist() for step in range(3)]
    assert seen[0] != ours.by_coins(0, 0).tolist()


@pytest.mark.slow
@every_source
@pytest.mark.parametrize("rate", [1e-6, 1e-4, 2.0**-10, 2.0**-10 + 2.0**-40, 0.0501])
def test_rare_records_are_drawn_at_their_rate_wherever_they_lie(source, rate):
    """Some ten thousand draws or a million, in all and by place; each fails one key in a million."""
    count, steps = 2_000_000, 200 if rate < 0.01 else 20
    ours = Draws(plan_for(count, (rate,) * 3), np.resize([0, 1, 2], count), Randomness(bytes(32), source))
    places = np.zeros(200, dtype=np.int64)
    for step in range(steps):
        places += np.bincount(ours.by_counts(0, step) // (count // 200), minlength=200)
    low, high = stats.binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], count * steps, rate)
    assert low <= places.sum() <= high
    assert stats.chisquare(places).pvalue > FALSE_ALARM
