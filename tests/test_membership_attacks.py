"""The attacks of membership inference against slow twins, and the mistakes that their statistics would show."""

from __future__ import annotations

import numpy as np
import pytest

from epsilons.auditing.membership import ATTACKS
from epsilons.auditing.membership.references import leave_one_out
from tests.made_up_signals import Coins, balanced_halves, fair_coins, made_up, null_deviation


def leaking(coins: Coins) -> list[str]:
    """The attacks whose mean AUC under 8 shadows lies 4 standard errors or more from one half, without any signal."""
    signals = made_up(8, 20_000, coins=coins)
    return [name for name, attack in ATTACKS.items() if null_deviation(attack(signals), signals.member) >= 4]


def test_balanced_halves_leak_the_coins_and_fair_coins_do_not() -> None:
    assert not leaking(fair_coins)
    assert {"lira", "lira-fixed", "lira-raw"} <= set(leaking(balanced_halves))


def test_references_equal_brute_force() -> None:
    signals = made_up(24, 7, shift=1)
    for target, (own, inside, outside) in enumerate(leave_one_out(signals.margin, signals.member)):
        np.testing.assert_array_equal(own, signals.margin[target])
        others = np.arange(24) != target
        for moments, kind in ((inside, signals.member), (outside, ~signals.member)):
            for record in range(7):
                references = signals.margin[others & kind[:, record], record].astype(np.float64)
                assert moments.count[record] == len(references)
                assert moments.mean[record] == pytest.approx(references.mean(), rel=0, abs=1e-9)
                assert moments.variance[record] == pytest.approx(references.var(ddof=1), rel=0, abs=1e-9)
