"""Statistics of membership inference: against counting, closed forms, and simulations with known answers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest, norm, ttest_ind

from epsilons import Budgets, Recipe, SampledGaussian, plan
from epsilons.accounting.profile import Profile
from epsilons.auditing.membership import outcomes
from epsilons.auditing.membership.analysis import _welch, _widened, randomisation_test, record_gaps
from epsilons.auditing.membership.outcomes import (
    FEWEST_ALARMS,
    RATES,
    certified,
    clopper_pearson,
    dominating,
    over_targets,
    roc,
    target_auc,
)


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng([7, *seed])


def coins(shadows: int, records: int, seed: int = 0) -> np.ndarray:
    return rng(seed).random((shadows, records)) < 0.5


def gaussian(member: np.ndarray, shift: float, seed: int = 1) -> np.ndarray:
    return (rng(seed).standard_normal(member.shape) + shift * member).astype(np.float32)


# -- AUC -----------------------------------------------------------------------------------------------------------


def auc_of_pairs(scores: np.ndarray, member: np.ndarray) -> float:
    """By definition: the share of pairs in which the member has the higher score, ties counting one half."""
    gaps = scores[member][:, None] - scores[~member][None]
    return float(np.mean((gaps > 0) + 0.5 * (gaps == 0)))


@pytest.mark.parametrize("values", [2, 5, 1000])
def test_auc_of_each_target_equals_counting_all_pairs(values):
    member, group = coins(6, 40), np.arange(40) % 2
    scores = rng(2).integers(0, values, (6, 40)).astype(np.float32)
    counted = [[auc_of_pairs(scores[k, group == g], member[k, group == g]) for g in (1, 0)] for k in range(6)]
    np.testing.assert_allclose(target_auc(scores, member, group, [1, 0]), counted, rtol=1e-12)


def test_auc_does_not_depend_on_how_many_targets_are_ranked_at_once(monkeypatch):
    member, group = coins(7, 30), np.zeros(30, dtype=np.int64)
    scores = gaussian(member, 1.0)
    at_once = target_auc(scores, member, group, [0])
    monkeypatch.setattr(outcomes, "_AT_ONCE", 61)
    np.testing.assert_array_equal(target_auc(scores, member, group, [0]), at_once)


def test_a_target_with_members_only_has_no_auc_and_is_left_out_of_the_mean():
    member, group = np.array([[True, True, True], [True, False, True]]), np.zeros(3, dtype=np.int64)
    auc = target_auc(np.float32([[1, 2, 3], [1, 2, 3]]), member, group, [0])[:, 0]
    assert np.isnan(auc[0])
    assert over_targets(auc).value == auc[1] == 0.5


def test_auc_and_rates_of_a_gaussian_shift_are_those_of_the_closed_form():
    member = coins(60, 1000)
    scores = gaussian(member, 0.8)
    auc = over_targets(target_auc(scores, member, np.zeros(1000, dtype=np.int64), [0])[:, 0])
    error = (auc.high - auc.value) / 2
    assert abs(auc.value - norm.cdf(0.8 / np.sqrt(2))) < 4 * error
    assert error < 0.003
    for rate in (0.1, 0.01, 0.001):
        found = roc(scores, member, rng(3)).at(rate)
        expected = norm.cdf(0.8 - norm.isf(rate))
        assert abs(found.value - expected) < 2 * (found.high - found.low)
        assert found.value == pytest.approx(expected, rel=0.15)


def test_without_any_signal_auc_and_roc_are_those_of_guessing():
    member = coins(64, 500)
    scores = gaussian(member, 0.0)
    auc = over_targets(target_auc(scores, member, np.zeros(500, dtype=np.int64), [0])[:, 0])
    assert abs(auc.value - 0.5) < 2 * (auc.high - auc.value)
    curve = roc(scores, member, rng(3))
    assert (curve.band <= curve.rate).all()
    assert ((curve.low <= curve.rate) & (curve.rate <= curve.high)).mean() > 0.8


# -- ROC -----------------------------------------------------------------------------------------------------------


def best_rate(scores: np.ndarray, member: np.ndarray, rate: float) -> tuple[float, int]:
    """By definition: over all thresholds, the largest true-positive rate with at most this false-positive rate."""
    outside, inside = scores[~member], scores[member]
    allowed = [t for t in np.unique(scores) if (outside > t).sum() <= rate * len(outside) + 1e-9]
    return max((float((inside > t).mean()), int((outside > t).sum())) for t in allowed)


@pytest.mark.parametrize("values", [4, 30, 100_000])
def test_true_positive_rates_equal_counting_at_every_threshold(values):
    member = coins(9, 60)
    scores = (rng(2).integers(0, values, member.shape) + values // 3 * member).astype(np.float32)
    curve = roc(scores, member, rng(3))
    counted = {rate: best_rate(scores, member, rate) for rate in RATES}
    shown = [rate for rate, (_, alarms) in counted.items() if alarms >= FEWEST_ALARMS]
    assert 0 < len(shown) < len(RATES)
    np.testing.assert_array_equal(curve.rate, shown)
    np.testing.assert_allclose(curve.found, [counted[rate][0] for rate in shown], rtol=1e-12)
    np.testing.assert_array_equal(curve.false_alarms, [counted[rate][1] for rate in shown])


def test_no_rate_is_given_with_fewer_than_ten_false_alarms():
    member = np.tile(np.arange(40) % 2 == 0, (50, 1))  # 1,000 non-members
    scores = gaussian(member, 1.0)
    assert roc(scores, member, rng(3)).at(0.01).value > 0.01
    assert roc(scores[:49], member[:49], rng(3)).at(0.01) is None  # 9 of 980
    tied = np.minimum(scores, np.sort(scores[~member])[-11])  # the 11 highest are equal, and 11 would be too many
    assert roc(tied, member, rng(3)).at(0.01) is None


def test_intervals_contain_the_value_and_are_never_narrower_than_clopper_pearson():
    member = coins(30, 80)
    curve = roc(gaussian(member, 0.7), member, rng(3))
    low, high = clopper_pearson(np.rint(curve.found * member.sum()), member.sum())
    assert (curve.low <= low).all()
    assert (curve.high >= high).all()
    assert (curve.band <= curve.found).all()


def test_one_target_alone_has_the_interval_of_clopper_and_pearson():
    member = coins(1, 2000)
    curve = roc(gaussian(member, 1.0), member, rng(3))
    low, high = clopper_pearson(np.rint(curve.found * member.sum()), member.sum())
    np.testing.assert_allclose([curve.low, curve.high], [low, high], rtol=1e-12)
    assert np.isnan(over_targets([0.6]).low)


def test_clopper_pearson_is_that_of_scipy():
    for hits, trials in ((0, 7), (3, 7), (7, 7), (40, 900)):
        reference = binomtest(hits, trials).proportion_ci(0.95, method="exact")
        np.testing.assert_allclose(clopper_pearson(hits, trials), (reference.low, reference.high), atol=1e-12)


def test_a_roc_repeats_to_the_bit():
    member = coins(20, 50)
    first, second = (roc(gaussian(member, 1.0), member, rng(3)) for _ in range(2))
    for name in ("found", "low", "high", "band"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert first.auc_variance == second.auc_variance > 0


# -- coverage ------------------------------------------------------------------------------------------------------

#: Shadows, records, and standard deviations of: shadows, records, gain by record, gain by shadow.
SIMULATED = [
    (48, 150, 0.1, 0.3, 0.4, 0.1),
    (48, 150, 0.0, 0.0, 0.0, 0.0),
    (16, 60, 0.2, 0.3, 0.5, 0.2),
    (64, 100, 0.0, 0.2, 1.0, 0.0),
]


def coverage(setting: tuple[float, ...], repetitions: int, shift: float = 0.4) -> dict[str, float]:
    """How often the nominal 95 % intervals contain the values of the distribution that made the scores."""
    shadows, records, of_shadow, of_record, gain, gain_of_shadow = setting
    scale_out = np.sqrt(1 + of_shadow**2 + of_record**2)
    scale_in = np.sqrt(scale_out**2 + gain**2 + gain_of_shadow**2)
    true_auc = norm.cdf(shift / np.sqrt(2 * (1 + of_record**2) + gain**2 + gain_of_shadow**2))
    true_found = norm.cdf((shift - norm.isf(RATES) * scale_out) / scale_in)
    held: dict[str, list[bool]] = {"auc": [], "found": [], "band": []}
    for repetition in range(repetitions):
        draw = rng(11, repetition)
        member = draw.random((int(shadows), int(records))) < 0.5
        effects = of_shadow * draw.standard_normal((len(member), 1)) + of_record * draw.standard_normal(int(records))
        gains = gain * draw.standard_normal(int(records)) + gain_of_shadow * draw.standard_normal((len(member), 1))
        scores = (effects + member * (shift + gains) + draw.standard_normal(member.shape)).astype(np.float32)
        curve = roc(scores, member, rng(3))
        over = over_targets(target_auc(scores, member, np.zeros(int(records), dtype=np.int64), [0])[:, 0])
        auc, found = _widened(over, curve.auc_variance, len(member)), curve.at(0.1)
        held["auc"].append(auc.low <= true_auc <= auc.high)
        held["found"].append(found.low <= true_found[np.isclose(RATES, 0.1)][0] <= found.high)
        held["band"].append(bool((curve.band <= true_found[np.isin(RATES, curve.rate)]).all()))
    return {name: float(np.mean(values)) for name, values in held.items()}


def test_intervals_cover_when_records_differ_in_exposure():
    """Without the variance due to records, the AUC is covered in about 40 of 100."""
    covered = coverage(SIMULATED[-1], 60)
    assert all(share > 0.85 for share in covered.values()), covered


@pytest.mark.slow
@pytest.mark.parametrize("setting", SIMULATED)
def test_nominal_95_percent_intervals_cover_in_90_to_99_percent(setting):
    covered = coverage(setting, 600)
    assert 0.9 <= covered["auc"] <= 0.99
    assert 0.9 <= covered["found"] <= 0.99
    assert covered["band"] >= 0.94  # one-sided and simultaneous: Bonferroni is on the safe side


# -- tests of whether groups differ --------------------------------------------------------------------------------


def test_the_randomisation_test_agrees_with_all_relabelings():
    values = np.array([0.3, 0.1, 0.5, 0.9, 1.4, 0.8, 0.2, 1.1])
    labels = np.array([False] * 5 + [True] * 3)

    def welch(chosen: tuple[int, ...]) -> float:
        inside = np.isin(np.arange(8), chosen)
        return abs(ttest_ind(values[inside], values[~inside], equal_var=False).statistic)

    every = [welch(chosen) for chosen in itertools.combinations(range(8), 3)]
    exact = np.mean(np.array(every) >= welch((5, 6, 7)) * (1 - 1e-9))
    p_value = randomisation_test(values[None], labels, rng(0), 20_000)[0]
    assert abs(p_value - exact) < 4 * np.sqrt(exact * (1 - exact) / 20_000)


def test_the_statistic_of_the_randomisation_test_is_welchs():
    values, labels = rng(4).standard_exponential((2, 31)), np.arange(31) % 4 == 0
    expected = ttest_ind(values[:, labels], values[:, ~labels], axis=1, equal_var=False).statistic
    np.testing.assert_allclose(_welch(labels[None], values)[0], expected, rtol=1e-9)


def test_the_randomisation_test_rejects_true_hypotheses_as_rarely_as_it_says():
    p_values = [
        randomisation_test(rng(5, i).standard_exponential((1, 30)), np.arange(30) < 8, rng(i), 99) for i in range(400)
    ]
    for level in (0.05, 0.25):
        assert abs(np.mean(np.array(p_values) <= level) - level) < 4 * np.sqrt(level * (1 - level) / 400)


def test_the_smallest_p_value_is_one_in_as_many_as_relabelings_and_the_data():
    values = np.where(np.arange(200) < 100, 0.0, 3.0) + rng(1).standard_normal(200)
    both = np.stack([values, rng(2).standard_normal(200)])
    p_values = randomisation_test(both, np.arange(200) >= 100, rng(0), 999)
    assert p_values[0] == 1 / 1000
    assert p_values[1] > 0.01


def test_records_that_were_never_members_are_left_out_of_the_randomisation_test():
    member = coins(12, 60)
    member[:, 7] = False
    scores = gaussian(member, 1.0)
    gaps = record_gaps(scores, member)
    assert np.flatnonzero(np.isnan(gaps)).tolist() == [7]
    by_hand = [scores[member[:, i], i].mean() - scores[~member[:, i], i].mean() for i in range(7)]
    np.testing.assert_allclose(gaps[:7], by_hand, rtol=1e-5)
    kept, is_looser = np.arange(60) != 7, np.arange(60) >= 30
    without = randomisation_test(gaps[None, kept], is_looser[kept], rng(0), 99)
    np.testing.assert_array_equal(randomisation_test(gaps[None], is_looser, rng(0), 99), without)


def test_groups_too_small_to_compare_have_no_p_value():
    assert np.isnan(randomisation_test(np.ones((2, 5)), np.arange(5) > 3, rng(0), 9)).all()


def test_groups_that_differ_without_any_membership_signal_are_not_told_apart():
    """Members and non-members of one group have higher scores, and nothing depends on the coins."""
    member, group = coins(40, 400), np.arange(400) % 2
    scores = gaussian(member, 0.0) + np.float32(0.6) * group.astype(np.float32)
    assert ttest_ind(scores[0][group == 1], scores[0][group == 0]).pvalue < 1e-4
    assert randomisation_test(record_gaps(scores, member)[None], group == 1, rng(0), 999)[0] > 0.01


# -- the certified curve -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_budgets():
    budgets = Budgets.from_shares({1.0: 0.25, 2.0: 0.25, 4.0: 0.25, 8.0: 0.25}, records=400, delta=1e-5, seed=0)
    options = {"sample": {}, "scale": {}, "exclude": {"threshold": 3.0}}
    return {name: plan(budgets, Recipe(20, 40, 1.0), name, "rdp", **option) for name, option in options.items()}


def one_group(steps: int, noise: float):
    """A plan of one group that takes part in every step; its curve is that of a Gaussian mechanism."""
    budgets = Budgets.from_shares({50.0: 1.0}, records=100, delta=1e-5)
    made = plan(budgets, Recipe(steps, 100, 1.0), "uniform", "rdp")
    phase = replace(made.phases[0], sample_rate=np.ones(1), noise_std=noise * float(made.clip_norm[0]))
    return replace(made, phases=(phase,))


@pytest.mark.parametrize(("steps", "noise"), [(1, 0.7), (1, 2.0), (16, 4.0)])
def test_the_certified_area_of_a_gaussian_mechanism_is_its_closed_form_from_above(steps, noise):
    """µ = √steps / σ, and the area under Φ(Φ⁻¹(a) + µ) is Φ(µ/√2)."""
    bound = certified(one_group(steps, noise), np.array([0]))
    mu = np.sqrt(steps) / noise
    assert norm.cdf(mu / np.sqrt(2)) <= bound.area <= norm.cdf(mu / np.sqrt(2)) + 1e-3
    closed = norm.cdf(norm.ppf(RATES) + mu)
    assert (bound.power >= closed - 1e-12).all()
    assert (bound.power <= closed + 1e-3).all()


def test_a_looser_budget_certifies_less(four_budgets):
    for name in ("sample", "scale"):
        bounds = [certified(four_budgets[name], np.array([group])) for group in range(4)]
        for strict, loose in itertools.pairwise(bounds):
            assert strict.area < loose.area
            assert (strict.power <= loose.power).all()
        assert (np.diff(bounds[0].power) >= 0).all()


def test_the_bound_of_a_merged_row_is_that_of_its_loosest_member_and_of_nobody_less(four_budgets):
    for name, made in four_budgets.items():
        merged = certified(made, np.arange(4))
        for group in range(4):
            assert (merged.power >= certified(made, np.array([group])).power).all(), name
        np.testing.assert_array_equal(merged.power, certified(made, np.array([3])).power)


def test_one_group_keeps_its_own_history(four_budgets):
    made = four_budgets["scale"]
    assert dominating(made, np.array([2])) == (made.phases[0].history(2),)


def test_a_group_that_is_never_drawn_allows_no_attack(four_budgets):
    made = four_budgets["exclude"]
    silent = np.flatnonzero(made.phases[0].sample_rate == 0)
    assert len(silent)
    bound = certified(made, silent[:1])
    assert 0.5 <= bound.area < 0.5005
    np.testing.assert_allclose(bound.power, RATES, rtol=1e-9)


def test_the_certified_curve_is_that_of_the_profile(four_budgets):
    made = four_budgets["sample"]
    history = (SampledGaussian(float(made.sample_rate[1]), float(made.noise_multiplier[1]), made.steps),)
    np.testing.assert_array_equal(certified(made, np.array([1])).power, Profile(history).power(RATES))
