"""experiments/individual_accounting: filters keep every own budget, and seven unsound variants are refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import epsilons
from epsilons import Plan, SampledGaussian
from epsilons.accounting import pld, rdp
from experiments import cells
from experiments.individual_accounting import cells as kind
from experiments.individual_accounting import filters, gaussian, loop
from experiments.individual_accounting.histories import MEASURES, parts_of
from experiments.individual_accounting.loop import Recipe, Records, Step
from experiments.settings import Settings, tables

CERTIFYING = {"gdp": gaussian.epsilon, "renyi": rdp.epsilon, "count": pld.epsilon}
REFRESH = {"gdp": 1, "renyi": 3, "count": 3}


@dataclass(frozen=True, eq=False)
class Run:
    """One run from the outside: what went in, and the steps that came out."""

    name: str
    data: Records
    plan: Plan
    group: Tensor
    recipe: Recipe
    seed: int
    steps: list[Step]


def synthetic(records: int, seed: int) -> Records:
    """Records of very different norms, so that some run out of budget early and others never."""
    coins = np.random.default_rng(seed)
    scale = 10.0 ** coins.uniform(-2, 1, (records, 1))
    inputs = np.concatenate([scale * coins.normal(size=(records, 4)), np.ones((records, 1))], axis=1)
    return Records.of(torch.from_numpy(inputs).float(), torch.from_numpy(coins.integers(0, 10, records)))


def planned(name: str, shares: dict[float, float], records: int, nominal: int, batch: float, clip: float = 1.0):
    budgets = epsilons.Budgets.from_shares(shares, records=records, delta=1e-5, seed=records)
    recipe = epsilons.Recipe(steps=nominal, batch_size=records if name == "gdp" else batch, clip_norm=clip)
    return epsilons.plan(budgets, recipe, "scale", CERTIFYING[name]), torch.from_numpy(budgets.group.copy())


def run_of(name: str, data: Records, plan: Plan, group: Tensor, recipe: Recipe, seed: int, **options: Any) -> Run:
    meter = filters.FILTERS[name](plan, group, **options)
    steps = list(loop.train(data, plan.phases[0], meter, recipe, seed))
    return Run(name, data, plan, group, recipe, seed, steps)


def random_run(seed: int) -> Run:
    """A filter, budgets, rates, clip norms, lengths and data, all at random."""
    coins = np.random.default_rng([7, seed])
    name, records = list(MEASURES)[seed % 3], int(coins.integers(20, 60))
    shares = dict(zip(np.sort(coins.uniform(0.2, 6.0, 3)).tolist(), (0.4, 0.3, 0.3), strict=True))
    steps = int(coins.integers(4, 40))
    nominal = max(1, round(steps / coins.choice([1.0, 1.1, 1.5, 3.0, 8.0])))
    plan, group = planned(
        name, shares, records, nominal, records * coins.uniform(0.02, 1.0), 10.0 ** coins.uniform(-1, 1)
    )
    recipe = Recipe(steps, lr=10.0 ** coins.uniform(-2, 1), momentum=coins.choice([0.0, 0.9]), refresh=REFRESH[name])
    return run_of(name, synthetic(records, seed), plan, group, recipe, seed)


def spent(run: Run) -> np.ndarray:
    """(records,) epsilon of the own history, by the measure of the filter."""
    parts = parts_of(run.plan, run.group, [step.bounds for step in run.steps])
    return MEASURES[run.name](run.plan, run.group.numpy(), parts)


def twin_sum(data: Records, weights: Tensor, bounds: Tensor, drawn: Tensor) -> Tensor:
    """Sum of clipped gradients from whole gradients (records, features, classes) of autograd's formula."""
    inputs, targets = data.inputs.double(), data.targets
    errors = (inputs @ weights.double()).softmax(1) - torch.eye(10)[targets]
    gradients = inputs[:, :, None] * errors[:, None, :]
    norms = gradients.flatten(1).norm(dim=1)
    factor = torch.where(drawn, (bounds / norms.clamp_min(1e-300)).clamp_max(1.0), 0.0)
    return (gradients * factor[:, None, None]).sum(0)


OVER = "a history is over its budget"
SUM = "a released sum is not that of gradients within the charged bounds, with the plan's noise"
UPDATE = "an update does not divide by the plan's expected batch"
LENGTH = "the number of steps is not the plan's"


def faults(run: Run) -> set[str]:
    """What is unsound in this run, from the plan, the coins and the noise of its seed, and what it charged."""
    found, phase = set(), run.plan.phases[0]
    if (spent(run) > run.plan.epsilons[run.group] * (1 + 1e-9)).any():
        found.add(OVER)
    if len(run.steps) != run.recipe.steps:
        found.add(LENGTH)
    coins, noise = (torch.Generator().manual_seed(2 * run.seed + i) for i in range(2))
    weights = torch.zeros(run.data.inputs.shape[1], 10)
    velocity = torch.zeros_like(weights)
    for step in run.steps:
        drawn = torch.rand(len(run.group), generator=coins, dtype=torch.float64) < float(phase.sample_rate[0])
        planned_noise = phase.noise_std * torch.randn(weights.shape, generator=noise)
        total = twin_sum(run.data, weights, step.bounds, drawn)
        if not torch.allclose(step.released - planned_noise, total.float(), rtol=1e-4, atol=1e-4 * phase.noise_std):
            found.add(SUM)
        velocity = run.recipe.momentum * velocity + step.released / phase.expected_batch
        if not torch.allclose(step.weights, weights - run.recipe.lr * velocity, rtol=1e-5, atol=1e-6):
            found.add(UPDATE)
        weights = step.weights
    return found


def check_random_runs(seeds: range) -> None:
    stopped = dict.fromkeys(MEASURES, 0)
    for seed in seeds:
        run = random_run(seed)
        assert faults(run) == set(), (seed, run.name)
        stopped[run.name] += bool((spent(run) > 0.9 * run.plan.epsilons[run.group]).any())
    assert min(stopped.values()) >= len(seeds) // 9  # budgets are used up often enough for this to mean something


def test_own_histories_of_random_runs_are_within_their_own_budgets():
    check_random_runs(range(36))


@pytest.mark.slow
def test_own_histories_of_500_random_runs_are_within_their_own_budgets():
    check_random_runs(range(500))


@pytest.mark.parametrize("name", MEASURES)
def test_a_plan_for_all_steps_trains_as_without_a_filter_to_the_last_bit(name):
    data, shares = synthetic(50, 1), {0.5: 0.5, 2.0: 0.5}
    plan, group = planned(name, shares, 50, nominal=20, batch=10.0)
    recipe = Recipe(20, 0.5, 0.9, refresh=1 if name == "gdp" else 0)
    ours, plain = (run_of(which, data, plan, group, recipe, seed=3) for which in (name, "none"))
    assert all(torch.equal(a.weights, b.weights) for a, b in zip(ours.steps, plain.steps, strict=True))
    shorter, _ = planned(name, shares, 50, nominal=19, batch=10.0)
    last = run_of(name, data, shorter, group, recipe, seed=3).steps[-1]
    assert name == "gdp" or not last.bounds.any()  # 19 paid steps: nothing is left for the 20th


# -- the seven unsound variants --------------------------------------------------------------------------------------


class ChargedIfDrawn(filters.RenyiFilter):
    """1: pays the price back to records that were not drawn."""

    def bounds(self, sizes: Tensor) -> Tensor:
        before = self.left.clone()
        found = super().bounds(sizes)
        self.paid = before - self.left
        return found

    def pay_back(self, rows: Tensor) -> None:
        self.paid[rows] = 0
        self.left += self.paid


class StopsOnItsOwnPLD(filters.RenyiFilter):
    """2: stops once PLD of what happened reaches the budget."""

    def spent_with(self, record: int, rung: int) -> float:
        phase, p = self.plan.phases[0], int(self.group[record])
        history = [
            SampledGaussian(float(phase.sample_rate[p]), float(phase.noise_multiplier[p] / self.ladder[k]), int(n))
            for k, n in enumerate(self.taken[record] + np.eye(len(self.ladder))[rung])
            if n
        ]
        return pld.epsilon(history, float(self.plan.delta[p]), points=2e4)

    def bounds(self, sizes: Tensor) -> Tensor:
        if not hasattr(self, "taken"):
            self.taken = np.zeros((len(sizes), len(self.ladder)))
        rung, fits = self.rung(sizes), torch.zeros(len(sizes), dtype=torch.bool)
        for record in range(len(sizes)):
            budget = float(self.plan.epsilons[self.group[record]])
            fits[record] = self.spent_with(record, int(rung[record])) <= budget
            self.taken[record, rung[record]] += float(fits[record])
        return torch.where(fits, self.clip_norm * self.ladder[rung], 0.0)


class ChoosesTheOrderAfterwards(filters.RenyiFilter):
    """3: converts at the order that is best for what happened."""

    def bounds(self, sizes: Tensor) -> Tensor:
        phase, alpha = self.plan.phases[0], np.array(rdp.OPACUS_ORDERS)
        rung, p = self.rung(sizes), self.group.numpy()
        noise = phase.noise_multiplier[p] / self.ladder[rung].numpy()
        after = getattr(self, "total", 0.0) + rdp.divergences(phase.sample_rate[p], noise, alpha)
        fits = rdp.converted(after, self.plan.delta[p], alpha) <= self.plan.epsilons[p]
        self.total = getattr(self, "total", 0.0) + np.where(fits[:, None], after - getattr(self, "total", 0.0), 0.0)
        return torch.where(torch.from_numpy(fits), self.clip_norm * self.ladder[rung], 0.0)


class RoundedDown(filters.RenyiFilter):
    """6: costs rounded down to whole units."""

    def up(self, part: Tensor) -> Tensor:
        return torch.floor(part * self.units).long()


def _phase_from_active(run: Run, meter: Any, **changed: Callable[[Any, float], float]) -> Any:
    """4: a phase with a divisor or a noise that follows the number of active records."""

    class Following(SimpleNamespace):
        def __getattribute__(self, key: str) -> Any:
            value = object.__getattribute__(self, key)
            return changed[key](value, float((meter.left > 0).double().mean())) if key in changed else value

    phase = run.plan.phases[0]
    return Following(**{field.name: getattr(phase, field.name) for field in dataclasses.fields(phase)})


def _trained(run: Run, meter: Any, phase: Any = None) -> Run:
    steps = loop.train(run.data, phase or run.plan.phases[0], meter, run.recipe, run.seed)
    return dataclasses.replace(run, steps=list(steps))


def _charged_if_drawn(run: Run, patch: pytest.MonkeyPatch) -> Run:
    meter, original = ChargedIfDrawn(run.plan, run.group), loop.clipped_sum

    def clipped_sum(data: Records, weights: Tensor, bounds: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        meter.pay_back(rows)
        return original(data, weights, bounds, rows)

    patch.setattr(loop, "clipped_sum", clipped_sum)
    return _trained(run, meter)


def _not_clipped_again(run: Run, patch: pytest.MonkeyPatch) -> Run:
    meter, original = filters.RenyiFilter(run.plan, run.group), loop.clipped_sum
    patch.setattr(loop, "clipped_sum", lambda d, w, bounds, rows: original(d, w, meter.clip_norm, rows))
    return _trained(run, meter)


def _stops_with_the_last(run: Run, patch: pytest.MonkeyPatch) -> Run:
    meter = filters.RenyiFilter(run.plan, run.group)
    steps = loop.train(run.data, run.plan.phases[0], meter, run.recipe, run.seed)
    return dataclasses.replace(run, steps=list(itertools.takewhile(lambda step: bool(step.bounds.any()), steps)))


def _following(**changed: Callable[[Any, float], float]) -> Callable[[Run, pytest.MonkeyPatch], Run]:
    def mutant(run: Run, patch: pytest.MonkeyPatch) -> Run:
        meter = filters.RenyiFilter(run.plan, run.group)
        return _trained(run, meter, _phase_from_active(run, meter, **changed))

    return mutant


def _with(meter: Callable[..., Any], **options: Any) -> Callable[[Run, pytest.MonkeyPatch], Run]:
    return lambda run, patch: _trained(run, meter(run.plan, run.group, **options))


MUTANTS: dict[str, tuple[Callable[[Run, pytest.MonkeyPatch], Run], set[str]]] = {
    "1 charge only if drawn": (_charged_if_drawn, {OVER}),
    "2 stop on the own PLD": (_with(StopsOnItsOwnPLD), {OVER}),
    "3 order chosen afterwards": (_with(ChoosesTheOrderAfterwards), {OVER}),
    "4 divisor from the active": (_following(expected_batch=lambda value, share: value * max(share, 0.01)), {UPDATE}),
    "4 noise from the active": (_following(noise_std=lambda value, share: value * (0.5 + share / 2)), {SUM}),
    "5 stop when none is left": (_stops_with_the_last, {LENGTH}),
    "6 costs rounded down": (_with(RoundedDown, units=16), {OVER}),
    "7 bounds not applied again": (_not_clipped_again, {SUM}),
}


@pytest.fixture(scope="module")
def examined() -> Run:
    """A sound Rényi run in which all records run out, at different times."""
    data = synthetic(8, 2)
    plan, group = planned("renyi", {1.0: 0.5, 3.0: 0.5}, 8, nominal=6, batch=2.0, clip=2.0)
    return run_of("renyi", data, plan, group, Recipe(150, 0.3, 0.0, refresh=20), seed=0)


def test_the_run_that_the_mutants_are_made_from_is_sound(examined):
    assert faults(examined) == set()
    stops = {int(step.bounds.count_nonzero()) for step in examined.steps}
    assert 0 in stops
    assert len(stops) > 2


@pytest.mark.parametrize("mutant", MUTANTS)
def test_an_unsound_variant_is_refused(mutant, examined, monkeypatch):
    make, expected = MUTANTS[mutant]
    assert faults(make(examined, monkeypatch)) == expected


def test_a_last_contribution_of_full_batches_is_cut_to_what_is_left():
    data = synthetic(30, 5)
    plan, group = planned("gdp", {1.0: 1.0}, 30, nominal=3, batch=30.0)
    run = run_of("gdp", data, plan, group, Recipe(30, 0.5, 0.0, refresh=1), seed=0)
    used = spent(run)
    assert (used > 0.99999).sum() > 5
    assert (used <= 1).all()
    uncut = [torch.where(step.bounds > 0, plan.phases[0].clip_norm[0], 0.0) for step in run.steps]
    assert (
        spent(dataclasses.replace(run, steps=[s._replace(bounds=b) for s, b in zip(run.steps, uncut, strict=True)])) > 1
    ).any()


# -- measures --------------------------------------------------------------------------------------------------------


def test_the_fixed_order_is_the_one_that_certifies_the_plan():
    plan, _ = planned("renyi", {0.3: 0.5, 3.0: 0.5}, 1_000, nominal=200, batch=100.0)
    phase = plan.phases[0]
    for p, order in enumerate(filters.fixed_orders(plan)):
        history = [SampledGaussian(float(phase.sample_rate[p]), float(phase.noise_multiplier[p]), 200)]
        assert rdp.epsilon(history, 1e-5, orders=[order]) == rdp.epsilon(history, 1e-5) <= plan.epsilons[p]


def test_a_price_is_never_below_the_cost_and_a_full_step_costs_exactly_its_units():
    plan, group = planned("renyi", {0.3: 0.5, 3.0: 0.5}, 1_000, nominal=200, batch=100.0)
    for units in (10, 1000, filters.UNITS):
        meter = filters.RenyiFilter(plan, group, units=units)
        costs = filters.relative_costs(plan, meter.ladder.numpy())
        assert (meter.price[:, 0] == units).all()
        assert (meter.price.numpy() >= costs * units).all()
        assert (meter.price.numpy() <= costs * units + 1).all()


# -- the kind of cell ------------------------------------------------------------------------------------------------

CELL = {
    "kind": "individual-accounting", "dataset": "digits", "steps": 12, "batch_size": 1437, "clip_norm": 1.0,
    "lr": 0.5, "strategy": "scale", "accountant": "gdp", "shares": {"0.3": 0.5, "0.31": 0.5},
}  # fmt: skip


@pytest.fixture
def _tiny(monkeypatch):
    monkeypatch.setattr(kind, "features", lambda name: (synthetic(1437, 0), synthetic(50, 1)))


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize(("name", "accountant"), [("gdp", "gdp"), ("renyi", "rdp"), ("count", "pld")])
def test_a_cell_holds_counts_and_quantiles_and_no_record(name, accountant):
    batch = 1437 if name == "gdp" else 300
    options = {"filter": name, "nominal": 6, "refresh": 1}
    line = cells.run(
        "x", "y", Settings(**CELL | {"options": options, "accountant": accountant, "batch_size": batch}), 0
    )
    assert "error" not in line, line
    assert 0.9 < line["largest_part"] <= 1
    active = np.array(line["active"])
    assert active.shape == (12, 2)
    assert (np.diff(active, axis=0) <= 0).all()
    assert active[-1].sum() < 1437
    assert max(len(value) for value in line.values() if isinstance(value, list)) < 20


@pytest.mark.usefixtures("_tiny")
def test_two_models_share_one_meter():
    one = cells.run("x", "y", Settings(**CELL | {"options": {"filter": "gdp", "runs": 2, "nominal": 12}}), 0)
    assert len(one["accuracies"]) == 2
    assert one["largest_part"] <= 1
    split = cells.run("x", "y", Settings(**CELL | {"options": {"runs": 2, "nominal": 24}}), 0)
    assert len(split["accuracies"]) == 2


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"options": {"nominal": 11}}, "budgets for 11 steps do not pay for 12"),
        ({"options": {"runs": 2}}, "budgets for 12 steps do not pay for 24"),
        ({"options": {"filter": "renyi"}}, "needs 'rdp', got 'gdp'"),
        ({"options": {"filter": "count"}, "accountant": "rdp"}, "needs 'pld', got 'rdp'"),
    ],
)
def test_a_cell_without_a_sound_promise_is_refused(settings, error):
    assert error in cells.run("x", "y", Settings(**CELL | settings), 0)["error"]


@pytest.mark.slow
@pytest.mark.skipif("EPSILONS_DATA" not in os.environ, reason="needs the real data")
def test_a_cell_of_the_table_runs_on_the_real_data():
    settings = tables()["individual_accounting"].by_name["full-filter"].settings
    line = cells.run("x", "y", settings.model_copy(update={"steps": 3, "options": {"filter": "gdp", "nominal": 2}}), 0)
    assert line["accuracy"] > 0.5
    assert math.isclose(line["largest_part"], 1, rel_tol=1e-4)
