"""Random models, data and settings against the slow twin (tests/fuzzing), and bugs that its rule must notice."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from epsilons.clipping.engine import Persons, clip_factors
from epsilons.clipping.ghost.ghost import squared_norms, weighted_sums
from epsilons.clipping.loop import record_gradient
from fuzzing.families import CLASSES, Drawn
from fuzzing.running import FIXED, run
from fuzzing.trials import LARGEST, SHORTER, Twin, clipped, draw_trial, twin_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def test_sums_of_random_models_are_the_slow_twins():
    found = run(range(FIXED))
    assert found.findings == [], found.table()
    assert found.counts["auto", "accepted"] >= 0.9 * FIXED


@pytest.mark.slow
def test_sums_of_new_random_models_are_the_slow_twins():
    first = secrets.randbelow(10**9) * 10_000
    found = run(range(first, first + 300))
    assert found.findings == [], found.table()


# -- the rule notices bugs ---------------------------------------------------------------------------------------------


def _matrices_too_long(grads: Any, factor: Tensor, parameters: Any) -> list[Tensor]:
    return [total * 1.005 if total.ndim == 2 else total for total in weighted_sums(grads, factor, parameters)]


def _one_parameter_without_norm(grads: Any, like: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    squared, total = squared_norms(grads, like)
    return squared, total - squared[min(squared)] if len(squared) > 1 else total


def _of_the_next(losses: Tensor, record: int, *options: Any, **more: Any) -> list[Tensor | None]:
    return record_gradient(losses, (record + 1) % len(losses), *options, **more)


def _by_the_largest_norm(squared_norm: Tensor, clip_norm: Tensor, weight: Tensor, *more: Any) -> Tensor:
    return clip_factors(squared_norm.max().expand_as(squared_norm), clip_norm, weight, *more)


def _shorter_beside_an_even_number(squared_norm: Tensor, clip_norm: Tensor, weight: Tensor, *more: Any) -> Tensor:
    """By 0.1 %, which the twin allows; the neighbour's bound does not."""
    return clip_factors(squared_norm, clip_norm, weight, *more) * (1.0 if len(clip_norm) % 2 else 1 - SHORTER / 2)


def _clip_norm_of_the_next(squared_norm: Tensor, clip_norm: Tensor, weight: Tensor, *more: Any) -> Tensor:
    return clip_factors(squared_norm, clip_norm.roll(1), weight, *more)


def _summed_rows(persons: Persons, losses: Tensor) -> Tensor:
    return torch.ones_like(losses)


#: What is planted: in place of what, the engine, and what the finding says.
PLANTED: dict[str, tuple[Callable[..., Any], Callable[..., Any], str, str]] = {
    "the parts of matrices are 0.5 % too long": (weighted_sums, _matrices_too_long, "auto", "twin"),
    "one parameter is left out of the norm": (squared_norms, _one_parameter_without_norm, "auto", "of the bound"),
    "a record's gradient is given to its neighbour": (record_gradient, _of_the_next, "loop", "twin"),
    "a person's rows are summed": (Persons.shares, _summed_rows, "auto", "twin"),
    "the largest norm clips all records": (clip_factors, _by_the_largest_norm, "vmap", "twin"),
    "one record more makes others 0.1 % shorter": (
        clip_factors,
        _shorter_beside_an_even_number,
        "auto",
        "of the bound",
    ),
    "a record is clipped by its neighbour's clip norm": (clip_factors, _clip_norm_of_the_next, "auto", "of the bound"),
}


def _plant(monkeypatch: pytest.MonkeyPatch, original: Callable[..., Any], bug: Callable[..., Any]) -> None:
    """In every module and class of the library that has the function."""
    places = [module for name, module in [*sys.modules.items()] if name.startswith("epsilons")]
    for place in [*places, Persons]:
        for name, value in [*vars(place).items()]:
            if value is original:
                monkeypatch.setattr(place, name, bug)


def _findings(which: str) -> Iterator[str]:
    for seed in range(FIXED):
        yield from run([seed], {which: which}, tell=lambda line: None).findings


@pytest.mark.parametrize("bug", PLANTED)
def test_the_rule_notices_a_planted_bug(bug: str, monkeypatch: pytest.MonkeyPatch):
    original, wrong, which, words = PLANTED[bug]
    _plant(monkeypatch, original, wrong)
    assert any(words in finding for finding in _findings(which))


@pytest.mark.parametrize(
    ("first", "second", "is_right"),
    [(1, 1, True), (0.999, 1, True), (1, 0.9985, True), (0.997, 1, False), (1, 1.00001, False), (0, 1, False)],
)
def test_a_contribution_may_be_two_thousandths_shorter_and_no_longer(first: float, second: float, is_right: bool):
    """The second may also be left out; the last number is rounding, in part of what is allowed."""
    contributions = np.array([[3.0, 0.0, 0.0], [0.0, 0.01, 0.0]])
    twin = Twin(contributions, rounding=np.array([1e-9, 1e-9]), is_open=np.array([False, True]))
    for rounding in (0.0, 1e-9):
        found = first * contributions[0] + second * contributions[1] + [0.0, 0.0, rounding]
        assert (twin.distance(found) <= 1) == is_right
    assert twin.distance(contributions[0]) <= 1 < twin.distance(contributions[0] + [0.0, 0.0, 1e-8])


def test_the_twin_clips_weights_and_leaves_out_what_is_too_long():
    gradient = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert clipped(gradient, 10.0, 0.5).tolist() == [1.5, 2.0]
    assert clipped(gradient, 1.0, 0.5).tolist() == pytest.approx([0.3, 0.4])
    for too_long in (gradient * LARGEST, gradient * math.inf, gradient * math.nan):
        assert clipped(too_long, 1.0, 1.0).tolist() == [0.0, 0.0]


def test_the_twin_takes_the_mean_of_a_persons_rows():
    """A linear layer on squares, with its gradient written out."""
    drawn = Drawn(nn.Sequential(nn.Linear(2, CLASSES)), "flat", (2,), "squares")
    trial = next(t for t in map(draw_trial, range(100)) if t.is_by_person and len(set(t.unit)) < len(t.unit))
    inputs = torch.randn(len(trial.unit), 2)
    trial = replace(trial, drawn=drawn, inputs=inputs)
    with torch.no_grad():
        error = 2 / CLASSES * (drawn.model(inputs) - F.one_hot(trial.targets, CLASSES)).double()
    for unit, contribution in enumerate(twin_of(trial).contributions):
        rows = torch.from_numpy(trial.unit == unit)
        by_weight = error[rows].mT @ inputs[rows].double() / rows.sum()
        gradient = torch.cat([by_weight.flatten(), error[rows].mean(0)])
        right = clipped(gradient, float(trial.clip_norm[unit]), float(trial.weight[unit]))
        assert contribution == pytest.approx(right.numpy(), rel=1e-5, abs=1e-9)
