"""experiments/individual_accounting/gaussian.py: the accountant of full batches."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from epsilons import SampledGaussian
from epsilons.accounting import pld
from epsilons.errors import PlanError
from experiments.individual_accounting import gaussian


@pytest.mark.parametrize("mu", [0.05, 0.3, 1.0, 4.0])
def test_the_gaussian_profile_is_below_pld_s_bound_and_close_to_it(mu):
    exact = float(gaussian.epsilon_of(mu, 1e-5)[0])
    bound = pld.epsilon([SampledGaussian(1.0, 2 / mu, 4)], 1e-5)
    assert exact <= bound <= exact * 1.005 + 1e-4
    assert gaussian.delta_of(exact, mu) <= 1e-5 <= gaussian.delta_of(exact * (1 - 1e-9), mu)
    assert gaussian.epsilon([SampledGaussian(1.0, 2 / mu, 4)], 1e-5) == pytest.approx(exact, rel=1e-12)


def test_the_gaussian_profile_is_for_full_batches_only():
    with pytest.raises(PlanError, match="full batches only"):
        gaussian.epsilon([SampledGaussian(0.5, 1.0, 1)], 1e-5)
