"""The statistical tests fail by chance no more often than they say.

Each gets ideal draws or ideal noise from NumPy many times, at a level at which failures can be counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
import torch
from scipy import stats

from . import test_draws, test_noise
from .adapters import Trace
from .probes import mixed

LEVEL, RUNS = 0.02, 300


@pytest.fixture(autouse=True)
def _only_ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.config.getoption("--trainer") != "epsilons":
        pytest.skip("no library is examined here")
    for module in (test_draws, test_noise):
        monkeypatch.setattr(module, "FALSE_ALARM", LEVEL)


def of_draws(rate: np.ndarray, group: np.ndarray, dice: np.random.Generator) -> Iterator[tuple[str, Callable]]:
    table = (dice.random((test_draws.UPDATES, len(rate))) < rate).astype(int)
    drawn = (table, rate, group)
    yield "rate", lambda: test_draws.test_every_record_is_drawn_at_its_own_rate(drawn)
    yield "spread", lambda: test_draws.test_the_counts_of_records_spread_as_independent_steps_make_them(drawn)
    yield "size", lambda: test_draws.test_the_size_of_a_draw_varies_as_independent_draws_make_it(drawn)
    for lag in (1, 2, 7):
        yield (
            f"lag {lag}",
            lambda lag=lag: test_draws.test_a_draw_is_independent_of_the_next_ones(drawn, lag),
        )
    seed = int(dice.integers(2**32))
    yield (
        "pairs",
        lambda: test_draws.test_no_two_records_are_drawn_together_more_or_less_than_by_chance(drawn, seed),
    )


def of_noise(dice: np.random.Generator) -> Iterator[tuple[str, Callable]]:
    sums = [
        [torch.from_numpy(test_noise.STD * dice.standard_normal(width)) for width in test_noise.WIDTHS]
        for _ in range(test_noise.UPDATES)
    ]
    name = "whole draws"
    traces = {name: Trace(sums, [], [])}
    yield "deviation", lambda: test_noise.test_the_noise_of_every_tensor_is_as_large_as_stated(traces, name)
    yield "shape", lambda: test_noise.test_the_noise_is_gaussian_around_0(traces, name)
    yield "updates", lambda: test_noise.test_the_noise_of_an_update_is_independent_of_other_updates(traces, name)
    yield "tensors", lambda: test_noise.test_the_noise_of_a_tensor_is_independent_of_other_tensors(traces, name)


def alarms(make: Callable[[], Iterator[tuple[str, Callable]]], runs: int) -> Counter[str]:
    raised: Counter[str] = Counter()
    for _ in range(runs):
        for name, test in make():
            raised[name] += 1
            with suppress(AssertionError):
                test()
                raised[name] -= 1
    return raised


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(0.02, 0.1, 0.25), (1 / 9,)], ids=["three rates", "one rate"])
def test_tests_of_draws_raise_alarm_no_more_often_than_they_say(rates: tuple[float, ...], seed: int):
    """One of ten thousand such counts goes beyond its limit by chance."""
    group, dice = np.array(mixed(test_draws.RECORDS, len(rates))), np.random.default_rng(seed)
    raised = alarms(lambda: of_draws(np.array(rates)[group], group, dice), RUNS)
    print({name: f"{count} of {RUNS}" for name, count in raised.items()})
    assert max(raised.values()) <= stats.binom.isf(1e-5, RUNS, LEVEL)


@pytest.mark.slow
def test_tests_of_noise_raise_alarm_no_more_often_than_they_say(seed: int):
    """One of ten thousand such counts goes beyond its limit by chance."""
    dice = np.random.default_rng(seed)
    raised = alarms(lambda: of_noise(dice), RUNS)
    print({name: f"{count} of {RUNS}" for name, count in raised.items()})
    assert max(raised.values()) <= stats.binom.isf(1e-5, RUNS, LEVEL)
