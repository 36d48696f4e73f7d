"""The attacks of membership inference against slow twins, and the mistakes that their statistics would show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.special import digamma, polygamma
from scipy.stats import norm

from epsilons.auditing.membership import ATTACKS, Signals
from epsilons.auditing.membership.attacks import leave_one_out, shrink
from epsilons.auditing.membership.shadows import ShadowSetting
from epsilons.auditing.membership.signals import read_signals
from epsilons.errors import InputError
from tests.made_up_signals import Coins, balanced_halves, fair_coins, made_up, null_deviation, target_auc

FloatArray = npt.NDArray[np.float64]


def shadow_coins(shape: tuple[int, int], rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """The coins of real shadows."""
    setting: Any = SimpleNamespace(seed=int(rng.integers(1 << 30)), records=shape[1])
    return np.array([ShadowSetting.member(setting, shadow) for shadow in range(shape[0])])


def leaking(coins: Coins) -> list[str]:
    """The attacks with a mean AUC 4 standard errors or more from one half, under 8 shadows without any signal."""
    signals = made_up(8, 20_000, coins=coins)
    return [name for name, attack in ATTACKS.items() if null_deviation(attack(signals), signals.member) >= 4]


def references(values: npt.ArrayLike, member: npt.ArrayLike, target: int, record: int) -> tuple[FloatArray, FloatArray]:
    """The values of the other shadows that have the record, and of those that do not, one by one."""
    values, member = np.asarray(values, np.float64), np.asarray(member)
    others = [k for k in range(len(values)) if k != target]
    inside = [values[k, record] for k in others if member[k, record]]
    return np.array(inside), np.array([values[k, record] for k in others if not member[k, record]])


def every(signals: Signals, score: Callable[[int, int], float]) -> FloatArray:
    """`score` of each target and record, one by one."""
    shadows, records = signals.member.shape
    return np.array([[score(target, record) for record in range(records)] for target in range(shadows)])


def pooled_variance(samples: Sequence[FloatArray]) -> float:
    """The variance about the mean of each sample."""
    return sum(((x - x.mean()) ** 2).sum() for x in samples) / sum(len(x) - 1 for x in samples)


def slow_lira(signals: Signals, own_variance: bool) -> FloatArray:
    def score(target: int, record: int) -> float:
        every_record = [references(signals.margin, signals.member, target, i) for i in range(signals.member.shape[1])]
        logs = []
        for kind in (0, 1):
            sample = every_record[record][kind]
            variance = sample.var(ddof=1) if own_variance else pooled_variance([pair[kind] for pair in every_record])
            logs.append(norm.logpdf(signals.margin[target, record], sample.mean(), math.sqrt(variance)))
        return float(logs[0] - logs[1])

    return every(signals, score)


def slow_shrink(estimates: list[tuple[float, float] | None]) -> list[float]:
    """Of (estimate, its variance), or None where there is none."""
    known = [pair for pair in estimates if pair is not None]
    mean = sum(x for x, _ in known) / len(known)
    spread = max(0.0, sum((x - mean) ** 2 - noise for x, noise in known) / len(known))
    return [mean + (pair[0] - mean) * spread / (spread + pair[1]) if pair else mean for pair in estimates]


def slow_shrunk(signals: Signals, target: int) -> list[float]:
    pairs = [references(signals.margin, signals.member, target, i) for i in range(signals.member.shape[1])]
    logs: list[tuple[float, float] | None] = []
    for pair in pairs:
        samples = [sample for sample in pair if len(sample)]
        half = sum(len(sample) - 1 for sample in samples) / 2
        logs.append((math.log(pooled_variance(samples)) - digamma(half) + math.log(half), float(polygamma(1, half))))
    scales = [math.exp(x / 2) for x in slow_shrink(logs)]
    distances = [
        ((inside.mean() - outside.mean()) / scale, 1 / len(inside) + 1 / len(outside))
        if len(inside) and len(outside)
        else None
        for (inside, outside), scale in zip(pairs, scales, strict=True)
    ]
    shifts = slow_shrink(distances)
    scores = []
    for own, (inside, outside), scale, shift in zip(signals.margin[target], pairs, scales, shifts, strict=True):
        share = len(inside) / (len(inside) + len(outside))
        x = (own - np.concatenate([inside, outside]).mean()) / scale
        scores.append(norm.logpdf(x, (1 - share) * shift) - norm.logpdf(x, -share * shift))
    return scores


def slow_ratio(signals: Signals, target: int, record: int) -> float:
    """p/p̄ of one record under online RMIA."""
    inside, outside = references(np.exp(signals.log_p.astype(float)), signals.member, target, record)
    return float(np.exp(float(signals.log_p[target, record])) / ((inside.mean() + outside.mean()) / 2))


def slow_population_ratios(signals: Signals, target: int) -> FloatArray:
    p = np.exp(signals.population.astype(float))
    return p[target] / np.delete(p, target, axis=0).mean(axis=0)


def enough(shadows: int, records: int, population: int = 40, shift: float = 1) -> Signals:
    """Signals with 2 or more references of either kind for every target and record."""
    signals = made_up(shadows, records, shift, population)
    assert min(signals.member.sum(axis=0).min(), (~signals.member).sum(axis=0).min()) >= 3
    return signals


def one_kind(shadows: int, records: int, shift: float = 1) -> Signals:
    """Record 0 is in all shadows, record 1 in none; the others have references of both kinds."""
    signals = enough(shadows, records, shift=shift)
    signals.member[:, 0], signals.member[:, 1] = True, False
    return signals


def test_balanced_halves_leak_the_coins_and_those_of_shadows_do_not() -> None:
    assert not leaking(shadow_coins)
    assert {"lira", "lira-fixed", "lira-raw"} <= set(leaking(balanced_halves))


def test_references_equal_brute_force() -> None:
    signals = enough(24, 7)
    for target, (own, inside, outside) in enumerate(leave_one_out(signals.margin, signals.member)):
        np.testing.assert_array_equal(own, signals.margin[target])
        for record in range(7):
            samples = references(signals.margin, signals.member, target, record)
            for moments, sample in zip((inside, outside), samples, strict=True):
                assert moments.count[record] == len(sample)
                assert moments.mean[record] == pytest.approx(sample.mean(), rel=0, abs=1e-9)
                assert moments.variance[record] == pytest.approx(sample.var(ddof=1), rel=0, abs=1e-9)


def test_references_do_not_depend_on_the_targets_coins_to_the_last_bit() -> None:
    signals = made_up(9, 500)
    for target in range(9):
        flipped = signals.member.copy()
        flipped[target] = ~flipped[target]
        (_, *before), (_, *after) = (
            list(leave_one_out(signals.margin, member))[target] for member in (signals.member, flipped)
        )
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one.count, other.count)
            np.testing.assert_array_equal(one.mean, other.mean)
            np.testing.assert_array_equal(one.variance, other.variance)


def test_references_that_are_equal_have_no_variance_whatever_the_target_is() -> None:
    margin = np.full((9, 2), 0.1, np.float32)
    margin[0] = 1e4
    _, inside, outside = next(leave_one_out(margin, fair_coins((9, 2), np.random.default_rng(0))))
    assert not inside.variance.any()
    assert not outside.variance.any()


def test_lira_with_fixed_variances_equals_its_definition() -> None:
    signals = enough(14, 8)
    np.testing.assert_allclose(ATTACKS["lira-fixed"](signals), slow_lira(signals, False), rtol=1e-6, atol=1e-6)


def test_lira_on_raw_logits_equals_its_definition_with_own_variances() -> None:
    signals = enough(14, 8)
    swapped = Signals(signals.member, signals.raw, signals.margin, signals.log_p, signals.population)
    np.testing.assert_allclose(ATTACKS["lira-raw"](swapped), slow_lira(signals, True), rtol=1e-6, atol=1e-6)


def test_lira_has_own_variances_from_512_shadows_and_fixed_ones_below() -> None:
    signals = made_up(512, 3, shift=1)
    swapped = Signals(signals.member, signals.raw, signals.margin, signals.log_p, signals.population)
    np.testing.assert_array_equal(ATTACKS["lira"](signals), ATTACKS["lira-raw"](swapped))
    fewer = made_up(511, 3, shift=1)
    np.testing.assert_array_equal(ATTACKS["lira"](fewer), ATTACKS["lira-fixed"](fewer))


def test_offline_lira_is_the_distance_from_the_references_out() -> None:
    signals = enough(14, 8)

    def score(target: int, record: int) -> float:
        out = [references(signals.margin, signals.member, target, i)[1] for i in range(8)]
        return float((signals.margin[target, record] - out[record].mean()) / math.sqrt(pooled_variance(out)))

    np.testing.assert_allclose(ATTACKS["lira-offline"](signals), every(signals, score), rtol=1e-6, atol=1e-6)


def test_shrunk_lira_equals_its_definition() -> None:
    signals = enough(14, 8)
    expected = [slow_shrunk(signals, target) for target in range(14)]
    np.testing.assert_allclose(ATTACKS["lira-shrunk"](signals), expected, rtol=1e-6, atol=1e-6)


def test_shrunk_lira_gives_records_with_references_of_one_kind_the_mean_shift() -> None:
    signals = one_kind(14, 8)
    expected = [slow_shrunk(signals, target) for target in range(14)]
    np.testing.assert_allclose(ATTACKS["lira-shrunk"](signals), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("attack", ["lira", "lira-fixed", "lira-raw"])
def test_lira_gives_records_with_references_of_one_kind_the_score_0(attack: str) -> None:
    scores = ATTACKS[attack](one_kind(14, 8))
    assert not scores[:, :2].any()
    assert scores[:, 2:].all()


def test_offline_lira_gives_records_without_references_out_the_score_0() -> None:
    scores = ATTACKS["lira-offline"](one_kind(14, 8))
    assert not scores[:, 0].any()
    assert scores[:, 1:].all()


def test_shrinking_is_better_than_fixed_variances_where_records_differ() -> None:
    rng = np.random.default_rng(3)
    signals = made_up(16, 2_000)
    margin = signals.margin * rng.lognormal(0, 0.7, 2_000) + rng.uniform(0, 1, 2_000) * signals.member
    signals = Signals(signals.member, margin.astype(np.float32), signals.raw, signals.log_p, signals.population)
    shrunk, fixed = (
        target_auc(ATTACKS[name](signals), signals.member).mean() for name in ("lira-shrunk", "lira-fixed")
    )
    assert shrunk > fixed + 0.02


def test_shrinking_keeps_exact_estimates_and_averages_noise() -> None:
    rng = np.random.default_rng(0)
    truth, everywhere = rng.normal(3, 2, 20_000), np.ones(20_000, np.bool_)
    np.testing.assert_allclose(shrink(truth, np.full(20_000, 1e-9), everywhere), truth, atol=1e-6)
    noise = rng.normal(3, 2, 20_000)
    assert np.std(shrink(noise, np.full(20_000, 4.0), everywhere)) < 0.1
    half = shrink(truth + rng.normal(0, 2, 20_000), np.full(20_000, 4.0), everywhere)  # as much noise as truth
    assert np.mean((half - truth) ** 2) == pytest.approx(2, rel=0.05)  # the least that is possible


def test_the_scale_of_shrunk_lira_is_not_biased_with_few_references() -> None:
    rng = np.random.default_rng(0)
    member = np.repeat([[True], [False]], 3, axis=0).repeat(20_000, axis=1)
    margin = rng.normal(0, 2, member.shape) + 8.0 * member  # 3 in, 3 out: 3 degrees of freedom
    signals = Signals(member, *(3 * [margin.astype(np.float32)]), population=np.zeros((6, 1), np.float32))
    scores = ATTACKS["lira-shrunk"](signals)
    # With location and shift exact the score has slope δ/σ = 8/2/2 in the margin, over records.
    slope = np.cov(scores[0], margin[0])[0, 1] / margin[0].var()
    assert slope == pytest.approx(2, rel=0.02)


def test_rmia_is_the_share_of_the_population_with_a_smaller_ratio() -> None:
    signals = enough(14, 8)
    scores = ATTACKS["rmia"](signals)
    for target in range(14):
        smaller = slow_population_ratios(signals, target)
        for record in range(8):
            share = np.mean(slow_ratio(signals, target, record) >= smaller)
            assert share - 1e-6 <= np.clip(scores[target, record], 0, 1) <= share + 1 / 40 + 1e-6


def test_rmia_breaks_ties_by_the_ratio_itself() -> None:
    signals = enough(24, 30, 2)
    scores = ATTACKS["rmia"](signals)
    for target in range(24):
        ratios = [slow_ratio(signals, target, record) for record in range(30)]
        np.testing.assert_array_equal(np.argsort(scores[target]), np.argsort(ratios))


def test_rmia_interpolates_between_the_populations_ratios_and_continues_beyond() -> None:
    signals = enough(14, 8, 5)

    def score(target: int, record: int) -> float:
        ratio = math.log(slow_ratio(signals, target, record))
        population = sorted(math.log(x) for x in slow_population_ratios(signals, target))
        if ratio < population[0]:
            return 1 / 5 + ratio - population[0]
        if ratio >= population[-1]:
            return 1 + ratio - population[-1]
        below = max(j for j in range(5) if population[j] <= ratio)
        return (below + 1 + (ratio - population[below]) / (population[below + 1] - population[below])) / 5

    np.testing.assert_allclose(ATTACKS["rmia"](signals), every(signals, score), rtol=1e-6, atol=1e-6)


def test_offline_rmia_finds_its_constant_from_the_other_shadows() -> None:
    signals = enough(14, 8)
    p, z = np.exp(signals.log_p.astype(float)), np.exp(signals.population.astype(float))
    scores = ATTACKS["rmia-offline"](signals)
    for target in range(14):
        pairs = [references(p, signals.member, target, record) for record in range(8)]
        a = sum(1 - inside.mean() for inside, _ in pairs) / sum(1 - outside.mean() for _, outside in pairs)
        assert 0 < a < 1
        mean = np.array([((1 + a) * outside.mean() + 1 - a) / 2 for _, outside in pairs])
        mean_z = ((1 + a) * np.delete(z, target, axis=0).mean(axis=0) + 1 - a) / 2
        share = np.array([np.mean(ratio >= z[target] / mean_z) for ratio in p[target] / mean])
        clipped = np.clip(scores[target], 0, 1)
        assert (share - 1e-6 <= clipped).all()
        assert (clipped <= share + 1 / 40 + 1e-6).all()
        np.testing.assert_array_equal(np.argsort(scores[target]), np.argsort(p[target] / mean))


@pytest.mark.parametrize("attack", ["rmia", "rmia-offline"])
def test_rmia_takes_one_kind_of_reference_for_both_where_the_other_is_missing(attack: str) -> None:
    signals = one_kind(24, 30, shift=-1)  # members have smaller p, so that the offline constant is 1
    p = np.exp(signals.log_p.astype(float))
    scores = ATTACKS[attack](signals)
    for target in range(24):
        means = []
        for record in range(30):
            inside, outside = (x.mean() if len(x) else None for x in references(p, signals.member, target, record))
            mean_in, mean_out = (inside or outside, outside or inside)
            means.append((mean_in + mean_out) / 2 if attack == "rmia" else mean_out)
        np.testing.assert_array_equal(np.argsort(scores[target]), np.argsort(p[target] / means))


def test_the_loss_attack_scores_by_the_negative_loss() -> None:
    signals = made_up(3, 5)
    np.testing.assert_array_equal(ATTACKS["loss"](signals), signals.log_p)


def test_signals_equal_their_definitions_in_64_bits() -> None:
    logits, targets = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0, 1])
    p = torch.softmax(logits.double(), -1)[:, range(6), targets].numpy()
    signals = read_signals(logits.requires_grad_(), targets)
    np.testing.assert_allclose(signals["margin"], np.log(p / (1 - p)), rtol=1e-5)
    np.testing.assert_allclose(signals["log_p"], np.log(p), rtol=1e-5)
    np.testing.assert_array_equal(signals["raw"], logits.detach()[:, range(6), targets].numpy())


def test_a_saturated_probability_loses_no_bits() -> None:
    logits = torch.tensor([[60.0, 0.0, 0.0], [-60.0, 0.0, 0.0]])  # p is exactly 1 in a softmax of 32 bits
    signals = read_signals(logits, torch.tensor([0, 0]))
    np.testing.assert_allclose(signals["margin"], [60 - math.log(2), -60 - math.log(2)], rtol=1e-7)
    np.testing.assert_allclose(signals["log_p"], [-2 * math.exp(-60), -60 - math.log(2)], rtol=1e-6)


def test_logits_of_one_class_are_refused() -> None:
    with pytest.raises(InputError, match="2 or more classes, got 1"):
        read_signals(torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("member", np.zeros((3, 4)), "of type bool; got shape"),
        ("raw", np.zeros((3, 5), np.float32), r"shape of member, \(3, 4\); got \(3, 5\)"),
        ("population", np.zeros((2, 7), np.float32), r"so 3 rows; got shape \(2, 7\)"),
    ],
)
def test_signals_of_different_shapes_are_refused(name: str, array: npt.NDArray[np.generic], message: str) -> None:
    good = made_up(3, 4)
    arrays = {key: getattr(good, key) for key in ("member", "margin", "raw", "log_p", "population")}
    with pytest.raises(InputError, match=message):
        Signals(**{**arrays, name: array})
