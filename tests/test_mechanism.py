"""SampledGaussian: only numbers that describe a mechanism become one."""

from __future__ import annotations

import dataclasses
import math

import pytest

from epsilons import SampledGaussian
from epsilons.errors import PlanError


def test_a_mechanism_is_a_value_that_can_be_compared_and_kept_in_sets():
    mechanism = SampledGaussian(sample_rate=0.01, noise_multiplier=1.1, steps=1000)
    assert mechanism == SampledGaussian(0.01, 1.1, 1000)
    assert len({mechanism, SampledGaussian(0.01, 1.1, 1000), SampledGaussian(0.01, 1.1, 999)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.steps = 5


@pytest.mark.parametrize("sample_rate", [-1e-9, 1 + 1e-9, math.nan, math.inf])
def test_a_rate_that_is_no_probability_is_refused(sample_rate):
    with pytest.raises(PlanError, match="between 0 and 1"):
        SampledGaussian(sample_rate, 1.0, 1)


@pytest.mark.parametrize("noise_multiplier", [0.0, -1.0, math.nan])
def test_no_noise_is_refused(noise_multiplier):
    with pytest.raises(PlanError, match="positive"):
        SampledGaussian(0.1, noise_multiplier, 1)


@pytest.mark.parametrize("steps", [-1, 0.5, math.nan, math.inf])
def test_a_number_of_steps_that_is_not_whole_is_refused(steps):
    with pytest.raises(PlanError, match="whole number"):
        SampledGaussian(0.1, 1.0, steps)


@pytest.mark.parametrize(
    ("mechanism", "silent"),
    [
        (SampledGaussian(0.0, 1.0, 10), True),
        (SampledGaussian(0.1, 1.0, 0), True),
        (SampledGaussian(0.1, math.inf, 10), True),
        (SampledGaussian(1e-9, 1e6, 1), False),
        (SampledGaussian(1.0, 1.0, 1), False),
    ],
)
def test_only_a_record_that_never_takes_part_is_silent(mechanism, silent):
    assert mechanism.is_silent is silent
