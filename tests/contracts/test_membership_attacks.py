"""What every attack in the table of membership inference keeps."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from epsilons.auditing.membership import ATTACKS, DEFAULT_ATTACKS, POPULATION_ATTACKS, Signals
from epsilons.errors import InputError
from tests.made_up_signals import (
    fair_coins,
    made_up,
    null_deviation,
    signals_of,
    target_auc,
)

pytestmark = pytest.mark.parametrize("attack", ATTACKS)


def taken(signals: Signals, shadows: object = slice(None), records: object = slice(None)) -> Signals:
    """Some shadows and records of the signals, in any order."""
    per_record = {name: getattr(signals, name)[shadows][:, records] for name in ("member", "margin", "raw", "log_p")}
    return Signals(**per_record, population=signals.population[shadows])


def test_every_target_gets_a_finite_32_bit_score_for_each_record(attack: str) -> None:
    scores = ATTACKS[attack](made_up(12, 30, shift=1))
    assert scores.shape == (12, 30)
    assert scores.dtype == np.float32
    assert np.isfinite(scores).all()


def test_a_planted_signal_is_found(attack: str) -> None:
    signals = made_up(64, 400, shift=1)
    assert target_auc(ATTACKS[attack](signals), signals.member).mean() > 0.6


@pytest.mark.parametrize("shadows", [2, 3, 4, 8, 16, 64])
def test_without_a_signal_the_auc_is_one_half(attack: str, shadows: int) -> None:
    signals = made_up(shadows, 64_000 // shadows)
    assert null_deviation(ATTACKS[attack](signals), signals.member) < 4


def test_a_targets_scores_do_not_depend_on_its_own_coins(attack: str) -> None:
    signals = made_up(9, 200, shift=1)  # some records are in all other shadows, or in none
    before = ATTACKS[attack](signals)
    for target in range(9):
        member = signals.member.copy()
        member[target] = fair_coins((1, 200), np.random.default_rng(target))[0]
        after = ATTACKS[attack](replace(signals, member=member))
        np.testing.assert_array_equal(after[target], before[target])


def test_equal_signals_are_not_ordered_by_rounding_that_depends_on_the_coins(attack: str) -> None:
    rng = np.random.default_rng(0)
    member = fair_coins((5, 20_000), rng)
    margin = np.where(rng.random(member.shape) < 0.1, 5.0, 0.1)  # most records have the same margin in 4 or 5 shadows
    scores = ATTACKS[attack](signals_of(margin, member, margin[:, :50]))
    assert null_deviation(scores, member) < 4


def test_the_order_of_records_and_shadows_does_not_matter(attack: str) -> None:
    signals, rng = made_up(12, 40, shift=1), np.random.default_rng(1)
    shadows, records = rng.permutation(12), rng.permutation(40)
    moved = ATTACKS[attack](taken(signals, shadows, records))
    np.testing.assert_allclose(moved, ATTACKS[attack](signals)[shadows][:, records], rtol=2e-6, atol=2e-6)


def test_the_signals_are_only_read(attack: str) -> None:
    signals = made_up(8, 20, shift=1)
    arrays = {field.name: getattr(signals, field.name) for field in fields(signals)}
    copies = {name: array.copy() for name, array in arrays.items()}
    scores = ATTACKS[attack](signals)
    scores += 1  # the caller may do that: the scores are no view of the signals
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, copies[name])


@pytest.mark.parametrize("shadows", [2, 3, 20])
def test_signals_that_are_equal_in_all_shadows_get_equal_scores(attack: str, shadows: int) -> None:
    member = fair_coins((shadows, 500), np.random.default_rng(0))
    scores = ATTACKS[attack](signals_of(np.full(member.shape, 3.3), member, np.full((shadows, 5), 2.2)))
    assert (scores == scores[0, 0]).all()


@pytest.mark.parametrize("shadows", [2, 3, 20])
def test_saturated_records_leave_all_scores_finite(attack: str, shadows: int) -> None:
    signals = made_up(shadows, 60, shift=1)
    margin = signals.margin.copy()
    margin[:, :10], margin[:, 10:20], margin[0, 20:30] = 3e38, -3e38, 3e38  # p is 1, or 0, in 32 bits
    scores = ATTACKS[attack](signals_of(margin, signals.member, margin[:, 5:25]))
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("everywhere", [True, False])
def test_records_that_are_in_all_shadows_or_in_none_get_finite_scores(attack: str, everywhere: bool) -> None:
    signals = made_up(6, 30)
    member = signals.member.copy()
    member[:, :15] = everywhere
    for coins in (member, np.full_like(member, everywhere)):
        assert np.isfinite(ATTACKS[attack](replace(signals, member=coins))).all()


def test_one_shadow_is_refused(attack: str) -> None:
    with pytest.raises(InputError, match="2 or more; got 1"):
        ATTACKS[attack](made_up(1, 20))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_shadows_that_diverged_are_counted_and_refused(attack: str, value: float) -> None:
    signals = made_up(6, 20)
    for name in ("margin", "raw", "log_p"):
        getattr(signals, name)[[2, 5], 3] = value
    with pytest.raises(InputError, match="2 of 6 shadows"):
        ATTACKS[attack](signals)


def test_only_attacks_that_need_a_population_refuse_to_go_without(attack: str) -> None:
    signals = made_up(6, 20, population=0)
    if attack in POPULATION_ATTACKS:
        with pytest.raises(InputError, match="got no population"):
            ATTACKS[attack](signals)
    else:
        assert ATTACKS[attack](signals).shape == (6, 20)


def test_the_default_attacks_are_in_the_table(attack: str) -> None:
    assert set(DEFAULT_ATTACKS) <= set(ATTACKS)
