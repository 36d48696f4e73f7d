"""experiments/individual_accounting: filters keep every own budget, and seven unsound variants are refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import epsilons
from epsilons import Plan, SampledGaussian
from epsilons.accounting import pld, rdp
from epsilons.errors import PlanError
from epsilons.models import build
from experiments import cells
from experiments.individual_accounting import cells as kind
from experiments.individual_accounting import filters, gaussian, loop
from experiments.individual_accounting.filters import CERTIFIED_BY
from experiments.individual_accounting.histories import MEASURES, parts_of
from experiments.individual_accounting.loop import Recipe, Records, Step
from experiments.individual_accounting.network import Network
from experiments.settings import Settings
from runs import run_cell

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
    batch, clip = records * coins.uniform(0.02, 1.0), 10.0 ** coins.uniform(-1, 1)
    plan, group = planned(name, shares, records, nominal, batch, clip)
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


@pytest.mark.parametrize("runs", [18, pytest.param(500, marks=pytest.mark.slow)])
def test_own_histories_of_random_runs_are_within_their_own_budgets(runs):
    stopped = dict.fromkeys(MEASURES, 0)
    for run in map(random_run, range(runs)):
        assert faults(run) == set(), (run.seed, run.name)
        stopped[run.name] += bool((spent(run) > 0.9 * run.plan.epsilons[run.group]).any())
    assert min(stopped.values()) >= runs // 9  # budgets are used up often enough for this to mean something


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


@cache
def epsilon_by_pld(history: tuple[SampledGaussian, ...], delta: float) -> float:
    return pld.epsilon(history, delta, points=2e4)


class StopsOnItsOwnPLD(filters.RenyiFilter):
    """2: stops once PLD of what happened reaches the budget."""

    taken: np.ndarray | None = None

    def spent(self, record: int, taken: np.ndarray) -> float:
        phase, p = self.plan.phases[0], int(self.group[record])
        noises = phase.noise_multiplier[p] / self.ladder.numpy()
        steps = [
            SampledGaussian(float(phase.sample_rate[p]), float(noises[k]), int(taken[k])) for k in taken.nonzero()[0]
        ]
        return epsilon_by_pld(tuple(steps), float(self.plan.delta[p]))

    def bounds(self, sizes: Tensor) -> Tensor:
        taken = np.zeros((len(sizes), len(self.ladder))) if self.taken is None else self.taken
        rung = self.rung(sizes)
        after = taken + np.eye(len(self.ladder))[rung]
        spent = np.array([self.spent(record, after[record]) for record in range(len(sizes))])
        fits = spent <= self.plan.epsilons[self.group]
        self.taken = np.where(fits[:, None], after, taken)
        return torch.where(torch.from_numpy(fits), self.clip_norm * self.ladder[rung], 0.0)


class ChoosesTheOrderAfterwards(filters.RenyiFilter):
    """3: converts at the order that is best for what happened."""

    total: Any = 0.0

    def bounds(self, sizes: Tensor) -> Tensor:
        phase, alpha = self.plan.phases[0], np.array(rdp.OPACUS_ORDERS)
        rung, p = self.rung(sizes), self.group.numpy()
        noise = phase.noise_multiplier[p] / self.ladder[rung].numpy()
        after = self.total + rdp.divergences(phase.sample_rate[p], noise, alpha)
        fits = rdp.converted(after, self.plan.delta[p], alpha) <= self.plan.epsilons[p]
        self.total = np.where(fits[:, None], after, self.total)
        return torch.where(torch.from_numpy(fits), self.clip_norm * self.ladder[rung], 0.0)


class RoundedDown(filters.RenyiFilter):
    """6: costs rounded down to whole units."""

    def up(self, part: Tensor) -> Tensor:
        return torch.floor(part * self.units).long()


def trained(run: Run, meter: Any, phase: Any = None) -> Run:
    steps = loop.train(run.data, phase or run.plan.phases[0], meter, run.recipe, run.seed)
    return dataclasses.replace(run, steps=list(steps))


def charged_if_drawn(run: Run, patch: pytest.MonkeyPatch) -> Run:
    """1: pays the price back to records that were not drawn."""
    meter, sound = filters.RenyiFilter(run.plan, run.group), loop.clipped_sum
    pay, paid = meter.pay, torch.zeros_like(meter.left)

    def keep(price: Tensor) -> Tensor:
        fits = pay(price)
        paid.copy_(torch.where(fits, price, 0))
        return fits

    def clipped_sum(data: Records, weights: Tensor, bounds: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        paid[rows] = 0
        meter.left += paid
        return sound(data, weights, bounds, rows)

    patch.setattr(meter, "pay", keep)
    patch.setattr(loop, "clipped_sum", clipped_sum)
    return trained(run, meter)


def not_clipped_again(run: Run, patch: pytest.MonkeyPatch) -> Run:
    meter, sound = filters.RenyiFilter(run.plan, run.group), loop.clipped_sum
    patch.setattr(loop, "clipped_sum", lambda data, weights, bounds, rows: sound(data, weights, meter.clip_norm, rows))
    return trained(run, meter)


def stops_with_the_last(run: Run, patch: pytest.MonkeyPatch) -> Run:
    steps = trained(run, filters.RenyiFilter(run.plan, run.group)).steps
    return dataclasses.replace(run, steps=list(itertools.takewhile(lambda step: bool(step.bounds.any()), steps)))


def follows(key: str, value: Callable[[float, float], float]) -> Callable[[Run, pytest.MonkeyPatch], Run]:
    """4: a divisor or a noise that follows the share of active records."""

    def mutant(run: Run, patch: pytest.MonkeyPatch) -> Run:
        meter, phase = filters.RenyiFilter(run.plan, run.group), run.plan.phases[0]

        class Following:
            def __getattr__(self, name: str) -> Any:
                found = getattr(phase, name)
                return value(found, float((meter.left > 0).double().mean())) if name == key else found

        return trained(run, meter, Following())

    return mutant


def filtered_by(meter: Callable[..., Any], **options: Any) -> Callable[[Run, pytest.MonkeyPatch], Run]:
    return lambda run, patch: trained(run, meter(run.plan, run.group, **options))


MUTANTS: dict[str, tuple[Callable[[Run, pytest.MonkeyPatch], Run], set[str]]] = {
    "1 charge only if drawn": (charged_if_drawn, {OVER}),
    "2 stop on the own PLD": (filtered_by(StopsOnItsOwnPLD), {OVER}),
    "3 order chosen afterwards": (filtered_by(ChoosesTheOrderAfterwards), {OVER}),
    "4 divisor from the active": (follows("expected_batch", lambda value, share: value * max(share, 0.01)), {UPDATE}),
    "4 noise from the active": (follows("noise_std", lambda value, share: value * (0.5 + share / 2)), {SUM}),
    "5 stop when none is left": (stops_with_the_last, {LENGTH}),
    "6 costs rounded down": (filtered_by(RoundedDown, units=16), {OVER}),
    "7 bounds not applied again": (not_clipped_again, {SUM}),
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


SLOW = "2 stop on the own PLD"


@pytest.mark.parametrize("mutant", [*sorted(MUTANTS.keys() - {SLOW}), pytest.param(SLOW, marks=pytest.mark.slow)])
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
    whole = float(plan.phases[0].clip_norm[0])
    uncut = [step._replace(bounds=torch.where(step.bounds > 0, whole, 0.0)) for step in run.steps]
    assert (spent(dataclasses.replace(run, steps=uncut)) > 1).any()


def pictures(records: int, seed: int) -> Records:
    coins = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.linspace(-2, 1, records)
    images = scale[:, None, None, None] * torch.randn(records, 1, 28, 28, generator=coins)
    return Records.of(images, torch.randint(0, 10, (records,), generator=coins))


def test_a_network_s_sum_under_a_filter_is_that_of_gradients_within_the_charged_bounds():
    """The oracle is one call of autograd per record, at the weights before the step."""
    torch.manual_seed(0)
    model, data, twin = (
        Network(build("mnist-cnn", (1, 28, 28), 10)),
        pictures(12, 0),
        build("mnist-cnn", (1, 28, 28), 10),
    )
    plan, group = planned("gdp", {1.0: 0.5, 2.0: 0.5}, 12, nominal=2, batch=12.0, clip=0.5)
    weights, noise = model.start(), torch.Generator().manual_seed(1)
    recipe = Recipe(6, lr=0.5, momentum=0.0, refresh=1)
    steps = list(loop.train(data, plan.phases[0], filters.GdpFilter(plan, group), recipe, 0, model))
    for step in steps:
        torch.nn.utils.vector_to_parameters(weights, twin.parameters())
        total = plan.phases[0].noise_std * torch.randn(weights.shape, generator=noise)
        for record, bound in enumerate(step.bounds):
            loss = F.cross_entropy(twin(data.inputs[record : record + 1]), data.targets[record : record + 1])
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(twin.parameters()))])
            total += gradient * min(1.0, float(bound / gradient.norm()))
        assert torch.allclose(step.released, total, rtol=1e-4, atol=1e-5)
        weights = step.weights
    own = parts_of(plan, group, [step.bounds for step in steps])
    used = MEASURES["gdp"](plan, group.numpy(), own) / plan.epsilons[group]
    assert 0.99 < used.max() <= 1 + 1e-9
    assert not steps[-1].bounds.all()
    with torch.no_grad():
        right = (twin(data.inputs).argmax(1) == data.targets).double().mean()  # twin has the weights before the last
    assert model.accuracy(data, steps[-2].weights) == pytest.approx(float(right))


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


# -- the kind of cell ------------------------------------------------------------------------------------------------

CELL = {
    "kind": "individual-accounting", "dataset": "digits", "steps": 12, "batch_size": 1437, "clip_norm": 1.0,
    "lr": 0.5, "strategy": "scale", "accountant": "gdp", "shares": {"0.3": 0.5, "0.31": 0.5},
}  # fmt: skip


@pytest.fixture
def _tiny(monkeypatch):
    monkeypatch.setattr(kind, "features", lambda name: (synthetic(1437, 0), synthetic(50, 1)))


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize("name", MEASURES)
def test_a_cell_holds_counts_and_quantiles_and_no_record(name):
    options = {"filter": name, "nominal": 6, "refresh": 1}
    batch = 1437 if name == "gdp" else 300
    line = run_cell(Settings(**CELL | {"options": options, "accountant": CERTIFIED_BY[name], "batch_size": batch}))
    assert 0.9 < line["largest_part"] <= 1
    active = np.array(line["active"])
    assert active.shape == (12, 2)
    assert (np.diff(active, axis=0) <= 0).all()
    assert active[-1].sum() < 1437
    assert max(len(value) for value in line.values() if isinstance(value, list)) < 20


def test_a_cell_with_a_network_trains_it_on_the_images(monkeypatch):
    monkeypatch.setattr(kind, "images", lambda name: (pictures(1437, 0), pictures(50, 1)))
    line = run_cell(Settings(**CELL | {"options": {"filter": "gdp", "nominal": 1}, "steps": 2, "model": "mnist-cnn"}))
    assert 0.9 < line["largest_part"] <= 1
    assert 50 * line["accuracy"] == pytest.approx(round(50 * line["accuracy"]))


@pytest.mark.usefixtures("_tiny")
def test_two_models_share_one_meter():
    one = run_cell(Settings(**CELL | {"options": {"filter": "gdp", "runs": 2, "nominal": 12}}))
    split = run_cell(Settings(**CELL | {"options": {"runs": 2, "nominal": 24}}))
    assert len(one["accuracies"]) == len(split["accuracies"]) == 2
    assert one["largest_part"] <= 1


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
    assert error in cells.run("table", "cell", Settings(**CELL | settings), 0)["error"]
