"""The attacks of membership inference: what each keeps, slow twins, and mistakes that statistics would show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.special import digamma, polygamma
from scipy.stats import norm, rankdata

from epsilons.auditing.membership import ATTACKS, DEFAULT_ATTACKS, POPULATION_ATTACKS, Signals
from epsilons.auditing.membership.attacks import leave_one_out, read_signals, shrink
from epsilons.auditing.membership.shadows import ShadowSetting
from epsilons.errors import InputError

BoolArray = npt.NDArray[np.bool_]

#: A generator of coins: (shadows, records), generator -> which records each shadow has.
Coins = Callable[[tuple[int, int], np.random.Generator], BoolArray]


def fair_coins(shape: tuple[int, int], rng: np.random.Generator) -> BoolArray:
    """Independent fair coins, as the shadows have them."""
    return rng.random(shape) < 0.5


def balanced_halves(shape: tuple[int, int], rng: np.random.Generator) -> BoolArray:
    """A mistake: every record is in exactly half of the shadows."""
    return np.argsort(rng.random(shape), axis=0) < shape[0] // 2


def signals_of(margin: npt.ArrayLike, member: BoolArray, population: npt.ArrayLike) -> Signals:
    """Signals of two classes with these margins, (shadows, records); population (shadows, population) margins, too."""
    margin = np.asarray(margin, np.float32)
    return Signals(member, margin, margin / 2 + 1, _log_p(margin), _log_p(np.asarray(population, np.float32)))


def made_up(
    shadows: int, records: int, shift: float = 0.0, population: int = 50, seed: int = 0, coins: Coins = fair_coins
) -> Signals:
    """Normal margins about a level of each record, and larger by `shift` standard deviations where the record is in."""
    rng = np.random.default_rng(seed)
    member = coins((shadows, records), rng)
    margin = rng.normal(0.5, 0.5, records) + rng.normal(size=member.shape) + shift * member
    return signals_of(margin, member, rng.normal(0.5, 0.5, population) + rng.normal(size=(shadows, population)))


def target_auc(scores: npt.NDArray[np.float32], member: BoolArray) -> FloatArray:
    """The AUC of each target, (shadows,), by ranks; ties count one half."""
    ranks = rankdata(scores, axis=1)
    ins, outs = member.sum(axis=1), (~member).sum(axis=1)
    return ((ranks * member).sum(axis=1) - ins * (ins + 1) / 2) / (ins * outs)


def null_deviation(scores: npt.NDArray[np.float32], member: BoolArray) -> float:
    """How many standard errors the mean AUC lies from one half, if scores are independent of the coins."""
    ins, outs = member.sum(axis=1), (~member).sum(axis=1)
    error = np.sqrt(((ins + outs + 1) / (12 * ins * outs)).sum()) / len(member)
    return float(abs(target_auc(scores, member).mean() - 0.5) / error)


def _log_p(margin: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return (-np.logaddexp(0, -margin.astype(np.float64))).astype(np.float32)


# ==== The attacks of membership inference against slow twins, and the mistakes that their statistics would show.


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


def slow_offline(signals: Signals) -> FloatArray:
    """The distance from the references out."""
    records = range(signals.member.shape[1])

    def score(target: int, record: int) -> float:
        out = [references(signals.margin, signals.member, target, i)[1] for i in records]
        return float((signals.margin[target, record] - out[record].mean()) / math.sqrt(pooled_variance(out)))

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


def test_references_that_are_equal_have_no_variance_whatever_the_target_is() -> None:
    margin = np.full((9, 2), 0.1, np.float32)
    margin[0] = 1e4
    _, inside, outside = next(leave_one_out(margin, fair_coins((9, 2), np.random.default_rng(0))))
    assert not inside.variance.any()
    assert not outside.variance.any()


@pytest.mark.parametrize(
    ("attack", "make", "slow"),
    [
        ("lira-fixed", enough, lambda signals: slow_lira(signals, False)),
        ("lira-raw", enough, lambda signals: slow_lira(swapped(signals), True)),
        ("lira-offline", enough, slow_offline),
        ("lira-shrunk", enough, lambda signals: [slow_shrunk(signals, target) for target in range(14)]),
        ("lira-shrunk", one_kind, lambda signals: [slow_shrunk(signals, target) for target in range(14)]),
    ],
)
def test_lira_equals_its_definition(attack: str, make: Callable[..., Signals], slow: Callable[..., Any]) -> None:
    """Shrunk LiRA also for records with references of one kind: they have the mean shift."""
    signals = make(14, 8)
    np.testing.assert_allclose(ATTACKS[attack](signals), slow(signals), rtol=1e-6, atol=1e-6)


def swapped(signals: Signals) -> Signals:
    """With the raw logits in place of the margins."""
    return Signals(signals.member, signals.raw, signals.margin, signals.log_p, signals.population)


def test_lira_has_own_variances_from_512_shadows_and_fixed_ones_below() -> None:
    signals = made_up(512, 3, shift=1)
    np.testing.assert_array_equal(ATTACKS["lira"](signals), ATTACKS["lira-raw"](swapped(signals)))
    fewer = made_up(511, 3, shift=1)
    np.testing.assert_array_equal(ATTACKS["lira"](fewer), ATTACKS["lira-fixed"](fewer))


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


# ==== What every attack in the table of membership inference keeps.


each_attack = pytest.mark.parametrize("attack", ATTACKS)


def taken(signals: Signals, shadows: object = slice(None), records: object = slice(None)) -> Signals:
    """Some shadows and records of the signals, in any order."""
    per_record = {name: getattr(signals, name)[shadows][:, records] for name in ("member", "margin", "raw", "log_p")}
    return Signals(**per_record, population=signals.population[shadows])


@each_attack
def test_every_target_gets_a_finite_32_bit_score_for_each_record(attack: str) -> None:
    scores = ATTACKS[attack](made_up(12, 30, shift=1))
    assert scores.shape == (12, 30)
    assert scores.dtype == np.float32
    assert np.isfinite(scores).all()


@each_attack
def test_a_planted_signal_is_found(attack: str) -> None:
    signals = made_up(64, 400, shift=1)
    assert target_auc(ATTACKS[attack](signals), signals.member).mean() > 0.6


@each_attack
@pytest.mark.parametrize("shadows", [2, 3, 4, 8, 16, 64])
def test_without_a_signal_the_auc_is_one_half(attack: str, shadows: int) -> None:
    signals = made_up(shadows, 64_000 // shadows)
    assert null_deviation(ATTACKS[attack](signals), signals.member) < 4


@each_attack
def test_a_targets_scores_do_not_depend_on_its_own_coins(attack: str) -> None:
    signals = made_up(9, 200, shift=1)  # some records are in all other shadows, or in none
    before = ATTACKS[attack](signals)
    for target in range(9):
        member = signals.member.copy()
        member[target] = fair_coins((1, 200), np.random.default_rng(target))[0]
        after = ATTACKS[attack](replace(signals, member=member))
        np.testing.assert_array_equal(after[target], before[target])


@each_attack
def test_equal_signals_are_not_ordered_by_rounding_that_depends_on_the_coins(attack: str) -> None:
    rng = np.random.default_rng(0)
    member = fair_coins((5, 20_000), rng)
    margin = np.where(rng.random(member.shape) < 0.1, 5.0, 0.1)  # most records have the same margin in 4 or 5 shadows
    scores = ATTACKS[attack](signals_of(margin, member, margin[:, :50]))
    assert null_deviation(scores, member) < 4


@each_attack
def test_the_order_of_records_and_shadows_does_not_matter(attack: str) -> None:
    signals, rng = made_up(12, 40, shift=1), np.random.default_rng(1)
    shadows, records = rng.permutation(12), rng.permutation(40)
    moved = ATTACKS[attack](taken(signals, shadows, records))
    np.testing.assert_allclose(moved, ATTACKS[attack](signals)[shadows][:, records], rtol=2e-6, atol=2e-6)


@each_attack
def test_the_signals_are_only_read(attack: str) -> None:
    signals = made_up(8, 20, shift=1)
    arrays = {field.name: getattr(signals, field.name) for field in fields(signals)}
    copies = {name: array.copy() for name, array in arrays.items()}
    scores = ATTACKS[attack](signals)
    scores += 1  # the caller may do that: the scores are no view of the signals
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, copies[name])


@each_attack
@pytest.mark.parametrize("shadows", [2, 3, 20])
def test_signals_that_are_equal_in_all_shadows_get_equal_scores(attack: str, shadows: int) -> None:
    member = fair_coins((shadows, 500), np.random.default_rng(0))
    scores = ATTACKS[attack](signals_of(np.full(member.shape, 3.3), member, np.full((shadows, 5), 2.2)))
    assert (scores == scores[0, 0]).all()


@each_attack
@pytest.mark.parametrize("shadows", [2, 3, 20])
def test_saturated_records_leave_all_scores_finite(attack: str, shadows: int) -> None:
    signals = made_up(shadows, 60, shift=1)
    margin = signals.margin.copy()
    margin[:, :10], margin[:, 10:20], margin[0, 20:30] = 3e38, -3e38, 3e38  # p is 1, or 0, in 32 bits
    scores = ATTACKS[attack](signals_of(margin, signals.member, margin[:, 5:25]))
    assert np.isfinite(scores).all()


@each_attack
@pytest.mark.parametrize("everywhere", [True, False])
def test_records_that_are_in_all_shadows_or_in_none_get_finite_scores(attack: str, everywhere: bool) -> None:
    signals = made_up(6, 30)
    member = signals.member.copy()
    member[:, :15] = everywhere
    for coins in (member, np.full_like(member, everywhere)):
        assert np.isfinite(ATTACKS[attack](replace(signals, member=coins))).all()


@each_attack
def test_one_shadow_is_refused(attack: str) -> None:
    with pytest.raises(InputError, match="2 or more; got 1"):
        ATTACKS[attack](made_up(1, 20))


@each_attack
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_shadows_that_diverged_are_counted_and_refused(attack: str, value: float) -> None:
    signals = made_up(6, 20)
    for name in ("margin", "raw", "log_p"):
        getattr(signals, name)[[2, 5], 3] = value
    with pytest.raises(InputError, match="2 of 6 shadows"):
        ATTACKS[attack](signals)


@each_attack
def test_only_attacks_that_need_a_population_refuse_to_go_without(attack: str) -> None:
    signals = made_up(6, 20, population=0)
    if attack in POPULATION_ATTACKS:
        with pytest.raises(InputError, match="got no population"):
            ATTACKS[attack](signals)
    else:
        assert ATTACKS[attack](signals).shape == (6, 20)


@each_attack
def test_the_default_attacks_are_in_the_table(attack: str) -> None:
    assert set(DEFAULT_ATTACKS) <= set(ATTACKS)
