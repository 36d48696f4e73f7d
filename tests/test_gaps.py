"""Gaps: the law of one coin per record, exactly, without a look at everyone.

Oracles: exact fractions, a walk that reads one number at a time, and the geometric law. Statistical checks run under
fixed keys, so they never flicker; each says how often it would fail under a fresh one. What a draw as a whole looks
like (rates, variance, pairs, lags) is examined in test_sampling, the same for coins and gaps.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import epsilons
from epsilons.training import gaps, sampling
from epsilons.training.gaps import candidates, gap_lengths, halved
from epsilons.training.randomness import SOURCES, Randomness, thresholds
from epsilons.training.sampling import MOST_COINS, Draws
from options import split

FALSE_ALARM = 1e-6
WHOLE = 2**53


class Read:
    """Given words first, then those of a stream."""

    def __init__(self, first, seed: int = 0) -> None:
        self._first = list(first)
        self._rest = Randomness(bytes(32)).stream("test", seed)

    def integers(self, count: int):
        own, self._first = self._first[:count], self._first[count:]
        return np.concatenate([np.array(own, dtype=np.uint64), self._rest.integers(count - len(own))])


def further(number: int):
    return Randomness(bytes(32)).stream("further", number)


def true_gap(word: int, halvings: int, most: int, number: int) -> int:
    """The largest k with U >= 1 − (1 − p)^k, by fractions, with 53 + 5·64 bits of U."""
    u = word
    for extra in further(number).integers(5):
        u = u << 64 | int(extra)
    u, stay = Fraction(u, 2 ** (53 + 5 * 64)), 1 - Fraction(1, 2**halvings)
    k, passed = 0, stay
    while k < most and u >= 1 - passed:
        k, passed = k + 1, passed * stay
    return k


def edges(halvings: int, most: int) -> list[int]:
    """Words at which a gap's length changes, and those beside them."""
    stay, passed, found = 1 - Fraction(1, 2**halvings), Fraction(1), {0, 1, WHOLE - 2, WHOLE - 1}
    for _ in range(most):
        passed *= stay
        here = (1 - passed) * WHOLE
        found |= {int(here) + d for d in (-1, 0, 1)}
    return sorted(w for w in found if 0 <= w < WHOLE)


@pytest.mark.parametrize("halvings", [1, 2, 3, 7, 20, 40, 51, 52, 53])
def test_a_gap_is_that_of_a_uniform_number_of_endless_bits_even_beside_every_edge(halvings):
    most = 40
    words = edges(halvings, most)
    found = gap_lengths(np.array(words, dtype=np.uint64), halvings, most, further)
    assert found.tolist() == [true_gap(w, halvings, most, i) for i, w in enumerate(words)]


@pytest.mark.parametrize("halvings", [1, 5, 11])
def test_logarithms_and_whole_numbers_tell_the_same_gaps(halvings, monkeypatch):
    words = Randomness(bytes(32)).stream("words").integers(3_000) >> np.uint64(11)
    by_logarithms = gap_lengths(words, halvings, 10**6, lambda i: pytest.fail("2^-28 of all gaps are in doubt"))
    monkeypatch.setattr(gaps, "DOUBT", 0.5)
    assert (gap_lengths(words, halvings, 10**6, further) == by_logarithms).all()


def test_more_bits_are_read_where_the_first_leave_it_open():
    """At p = 2^-53 and U in [1/2, 1/2 + 2^-53) some 2 lengths are possible; the next bits decide between them."""
    read = []

    def more(number):
        read.append(number)
        return Read([0 if number == 0 else 2**64 - 1])

    lengths = gap_lengths(np.array([WHOLE // 2] * 2, dtype=np.uint64), 53, 2**62, more)
    assert read == [0, 1]
    assert 1 <= lengths[1] - lengths[0] <= 3
    assert abs(lengths[0] / (WHOLE * np.log(2)) - 1) < 1e-12


@pytest.mark.parametrize("halvings", [0, 1, 2, 6, 30, 53])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 300])
def test_candidates_are_found_as_by_a_walk_that_reads_one_number_at_a_time(halvings, count):
    """Also where buffers end, and with the bits that belong to each gap: words beside edges come first."""
    first = [w << 11 for w in edges(halvings, 5)[::3]] if halvings else []
    found = candidates(count, halvings, Read(first), further)
    words, place, number, expected = Read(first), 0, 0, []
    while halvings and place < count:
        place += true_gap(int(words.integers(1)[0]) >> 11, halvings, count - place, number)
        expected += [place] if place < count else []
        place, number = place + 1, number + 1
    assert found.tolist() == (expected if halvings else list(range(count)))


@given(
    st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0, 2.0**-53, 1 - 2.0**-53, 1e-300])), min_size=1)
)
def test_halvings_and_coins_together_are_the_threshold_exactly(rates):
    """No rounding: 2^-h times the coin's chance is the threshold, which is the rate rounded down."""
    limits, group = thresholds(rates), np.arange(len(rates))
    parts = halved(limits, group)
    seen = [int(i) for part in parts for i in part.members]
    assert sorted(seen) == [i for i, limit in enumerate(limits) if limit]
    for part in parts:
        for i in part.members:
            assert Fraction(int(part.limits[i]), WHOLE) / 2**part.halvings == Fraction(int(limits[i]), WHOLE)
            assert WHOLE // 2 < part.limits[i] <= WHOLE


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("halvings", [1, 4, 10])
def test_gaps_are_geometric_and_each_is_independent_of_the_next(source, halvings):
    """Chi-squared of 40 classes of equal chance, and of neighbours' ranks; each fails one key in a million."""
    stream, p = Randomness(bytes(32), source).stream("gaps", halvings), 2.0**-halvings
    found = gap_lengths(stream.integers(200_000) >> np.uint64(11), halvings, 10**9, further)
    cuts = np.unique(stats.geom.ppf(np.linspace(0, 1, 41)[1:-1], p) - 1)
    counts = np.bincount(np.searchsorted(cuts, found), minlength=len(cuts) + 1)
    chances = np.diff([0, *stats.geom.cdf(cuts + 1, p), 1])
    assert stats.chisquare(counts, chances * len(found)).pvalue > FALSE_ALARM
    above = found > stats.geom.median(p) - 1
    together = np.array([[(above[:-1] == a) & (above[1:] == b) for b in (0, 1)] for a in (0, 1)]).sum(2)
    assert stats.chi2_contingency(together).pvalue > FALSE_ALARM


def plan_for(records: int, rates=(1e-4, 3e-3, 0.6)) -> epsilons.Plan:
    budgets = epsilons.Budgets(np.resize([1e4, 2e4, 3e4], records), delta=1e-7)

    def tabled(budgets, recipe, accountant):
        one = np.ones(3)
        phase = epsilons.Phase(3, np.array(rates), one, one, noise_std=9.0, expected_batch=50.0)
        return epsilons.Plan.of(budgets, recipe, accountant, phase, strategy="tabled")

    return epsilons.plan(budgets, epsilons.Recipe(3, 50, 1.0), tabled, "rdp")


def test_the_plans_number_of_records_alone_chooses_the_method():
    for records, method in [(MOST_COINS, "coins"), (MOST_COINS + 1, "gaps")]:
        plan = plan_for(records, (1e-5, 2e-5, 4e-5))
        group = np.resize([0, 1, 2], records)
        ours = Draws(plan, group, Randomness(bytes(32)))
        assert ours.method == method
        assert (ours.at(0, 1) == getattr(ours, f"by_{method}")(0, 1)).all()
        few = Draws(plan, group[:60], Randomness(bytes(32)))  # what the data hold does not matter
        assert few.method == method


@pytest.mark.parametrize("largest", [3, 1000])
def test_a_run_hands_out_those_records_whatever_the_chunks(largest, monkeypatch):
    monkeypatch.setattr(sampling, "MOST_COINS", 10)
    budgets = epsilons.Budgets(np.resize([1e4, 2e4, 3e4], 300), delta=1e-7)
    plan, model = plan_for(300), torch.nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.arange(300.0)[:, None], torch.zeros(300, dtype=torch.long)
    private = epsilons.make_private(
        model,
        optimizer,
        (x, y),
        plan,
        budgets=budgets,
        key=bytes(32),
        **split({"max_physical_batch": largest, "engine": "loop"}),
    )
    seen: list[list[int]] = [[], [], []]
    with private:
        for inputs, targets in private.batches:
            if private._issued.variant is None:
                seen[private._position.step] += inputs[:, 0].long().tolist()
            private.backward(torch.nn.functional.cross_entropy(model(inputs / 300), targets, reduction="none"))
            private.step()
    ours = Draws(plan, budgets.group, Randomness(bytes(32)))
    assert seen == [ours.by_gaps(0, step).tolist() for step in range(3)]
    assert seen[0] != ours.by_coins(0, 0).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("rate", [1e-6, 1e-4, 2.0**-10, 2.0**-10 + 2.0**-40, 0.0501])
def test_rare_records_are_drawn_at_their_rate_wherever_they_lie(source, rate):
    """Some million draws or ten thousand, in all and by place; each fails one key in a million."""
    count, steps = 2_000_000, 1_000 if rate < 0.01 else 20
    (part,) = halved(thresholds([rate]), np.zeros(count, dtype=np.int64))
    ours, group = Randomness(bytes(32), source), np.zeros(count, dtype=np.int64)
    places = np.zeros(200, dtype=np.int64)
    for step in range(steps):
        stream = [ours.stream(name, 0, step) for name in ("gaps", "thinning")]
        places += np.bincount(part.drawn(group, *stream, further) // (count // 200), minlength=200)
    trials = count // 200 * steps
    low, high = stats.binom.ppf([FALSE_ALARM / 400, 1 - FALSE_ALARM / 400], trials, rate)
    assert ((places >= low) & (places <= high)).all()
    low, high = stats.binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], trials * 200, rate)
    assert low <= places.sum() <= high
