"""The ways that the paper's appendix rejects: exact epsilons against slow ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm

import epsilons
from epsilons import SampledGaussian
from epsilons.accounting import pld
from experiments import alternatives
from experiments.settings import Settings
from runs import run_cell


def slow_epsilon(delta: float, noise: float, rate: float, count: int) -> float:
    """Of one step for binomially many copies, by sums over a fine grid, in the worse direction."""
    x = np.linspace(-12 * noise, count + 12 * noise, 20_001)
    without = norm.pdf(x, 0, noise)
    present = sum(p * norm.pdf(x, k, noise) for k, p in enumerate(binom.pmf(range(count + 1), count, rate)))

    def excess(epsilon: float) -> float:
        pairs = ((present, without), (without, present))
        return max(float(np.maximum(a - math.exp(epsilon) * b, 0).sum() * (x[1] - x[0])) for a, b in pairs) - delta

    return float(brentq(excess, 1e-3, 20))


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 3))])
def test_copies_cost_what_a_slow_sum_over_the_mixture_says(count):
    exact = slow_epsilon(1e-3, 3.0, 0.4, count)
    found = alternatives.copies(3.0, 0.4, steps=1, delta=1e-3, count=count)
    assert exact * (1 - 1e-4) <= found <= exact * 1.02


def test_copies_cost_more_than_a_higher_rate_and_less_than_a_larger_weight():
    for n in (2, 3):
        exact = alternatives.copies(4.0, 0.1, 50, 1e-5, n)
        assert pld.epsilon([SampledGaussian(n * 0.1, 4.0, 50)], 1e-5) < exact * 1.001
        assert exact < pld.epsilon([SampledGaussian(0.1, 4.0 / n, 50)], 1e-5)
        assert exact < alternatives.as_argued(4.0, 0.1, 50, 1e-5, n)


def test_a_cell_uses_up_the_budgets_of_every_way(monkeypatch):
    monkeypatch.setattr(alternatives, "COPIES", (1,))
    settings = Settings(
        kind="alternatives", dataset="digits", steps=400, batch_size=64, clip_norm=1.0, strategy="uniform",
        accountant="pld", shares={"1": 0.5, "3": 0.5},
    )  # fmt: skip
    line = run_cell(settings)
    ratio, noise, steps = line["ratio"], line["noise_multiplier"], round(400 * line["longer"])
    assert ratio["larger batch"] > ratio["sample"] > ratio["uniform"] == 1 > ratio["one record a step"]
    rate, budgets = 64 / 1437, epsilons.Budgets.from_shares({1.0: 0.5, 3.0: 0.5}, records=1437, delta=1e-5)
    assert alternatives.larger_batch(budgets, noise, steps) == pytest.approx(rate, rel=0.02)
    assert alternatives.larger_batch(budgets, noise, 400) > rate
    assert line["copies"]["1"] == pytest.approx(1, rel=2e-3)
