"""experiments/pate: what a changed record does to the votes, by brute force, and the cost as published."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy.stats import norm

import epsilons
from epsilons import Budgets, Plan, SampledGaussian
from epsilons.accounting import noise_for, pld, rdp
from epsilons.errors import PlanError
from experiments import cells
from experiments.individual_accounting.gaussian import epsilon_of
from experiments.pate import cells as kind
from experiments.pate import costs, data_dependent, published, teachers, votes
from experiments.pate.teachers import Data, Part
from experiments.settings import PateSettings
from runs import run_cell

CLASSES, VOTES = 3, 24
SHARES = {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}
COPIES = (1, 2, 3)


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """Who trains on which records, and the plan of the votes."""

    budgets: Budgets
    parts: list[Part]
    plan: Plan
    copies: tuple[int, ...]
    count: Callable[..., Any] = votes.planned_counts

    @property
    def own(self) -> np.ndarray:
        return np.repeat([part.group for part in self.parts], [len(part.rows) for part in self.parts])


def ensemble(strategy: str, shares: dict[float, float] = SHARES, number: int = VOTES, seed: int = 0) -> Ensemble:
    budgets = Budgets.from_shares(shares, records=100, delta=1e-5, seed=seed)
    copies = COPIES if strategy == "upsampling" else (1,) * len(shares)
    parts = teachers.partition(budgets.group, 20, list(copies), seed)
    return Ensemble(budgets, parts, costs.vote_plan(budgets, number, strategy, copies=copies), copies)


def worst_spends(system: Ensemble) -> np.ndarray:
    """(groups,) by brute force: the largest epsilon of a record, over all votes that its teachers can change.

    No formula for the cost of a vote: the counts are computed twice, and their distance over the noise is measured.
    """
    members = [set(rows.tolist()) for part in system.parts for rows in part.rows]
    teachers_of = [tuple(t for t, rows in enumerate(members) if record in rows) for record in range(100)]
    spent = {who: epsilon_of(float(np.linalg.norm(distances(system, who))), 1e-5)[0] for who in set(teachers_of)}
    worst = np.zeros(len(system.budgets.epsilons))
    np.maximum.at(worst, system.budgets.group, [spent[who] for who in teachers_of])
    return worst


def distances(system: Ensemble, touched: tuple[int, ...]) -> np.ndarray:
    """(votes,) the largest distance of two tables of counts, over the noise, if these teachers change their classes."""
    largest = np.zeros(system.plan.steps)
    for before, after in itertools.permutations(range(CLASSES), 2):
        tables = []
        for klass in (before, after):
            said = np.zeros((len(system.own), system.plan.steps), dtype=np.int64)
            said[list(touched)] = klass
            counted, noise = system.count(said, system.own, system.plan, system.copies, CLASSES)
            tables.append(counted)
        largest = np.maximum(largest, np.linalg.norm(tables[1] - tables[0], axis=1) / noise)
    return largest


STRATEGIES = ("uniform", "scale", "upsampling", "vanishing")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_record_can_change_the_votes_by_more_than_its_budget_pays_for(strategy):
    for shares, number, seed in ((SHARES, VOTES, 0), ({1.0: 0.3, 4.0: 0.5, 6.0: 0.2}, 40, 1)):
        system = ensemble(strategy, shares, number, seed)
        worst = worst_spends(system)
        assert (worst <= system.budgets.epsilons).all(), worst
        assert worst == pytest.approx(system.plan.epsilon_spent(), rel=1e-3)
        if strategy == "scale":
            assert worst == pytest.approx(system.budgets.epsilons, rel=1e-3)
        if strategy == "upsampling":  # copies cost what a weight of their number does
            assert costs.weights(system.plan.phases[0]) == pytest.approx(COPIES)


# -- wrong programs that the brute force refuses -----------------------------------------------------------------------


def changed(system: Ensemble, **phase: Any) -> Ensemble:
    """The same ensemble with another weight or noise."""
    (before,) = system.plan.phases
    plan = dataclasses.replace(system.plan, phases=(dataclasses.replace(before, **phase),))
    return dataclasses.replace(system, plan=plan)


def sensitivity_1(patch: pytest.MonkeyPatch) -> Ensemble:
    patch.setattr(costs, "SENSITIVITY", 1.0)
    return ensemble("scale")


def swapped(patch: pytest.MonkeyPatch) -> Ensemble:
    def count(said, own, *given):
        return votes.planned_counts(said, 2 - own, *given)

    return dataclasses.replace(ensemble("scale"), count=count)


def cost_of_the_mean(patch: pytest.MonkeyPatch) -> Ensemble:
    """Weights of Scale under noise for a record of the mean weight and the mean budget."""
    system = ensemble("scale")
    level = float(system.budgets.shares @ system.budgets.epsilons)
    return changed(system, noise_std=math.sqrt(2) * noise_for(level, 1.0, VOTES, 1e-5, pld.epsilon))


def weights_by_epsilon(patch: pytest.MonkeyPatch) -> Ensemble:
    system = ensemble("scale")
    weight = system.budgets.epsilons / float(system.budgets.shares @ system.budgets.epsilons)
    return changed(system, clip_norm=math.sqrt(2) * weight)


def weights_of_the_code(patch: pytest.MonkeyPatch) -> Ensemble:
    system = ensemble("scale", {1.0: 0.54, 2.0: 0.37, 3.0: 0.09})
    voted, charged = published.code_weights(system.budgets)
    needed = [noise_for(float(e), 1.0, VOTES, 1e-5, pld.epsilon) for e in system.budgets.epsilons]
    return changed(system, clip_norm=math.sqrt(2) * voted, noise_std=math.sqrt(2) * float((charged * needed).max()))


def copies_charged_once(patch: pytest.MonkeyPatch) -> Ensemble:
    system = ensemble("upsampling")
    plan = costs.vote_plan(system.budgets, VOTES, "upsampling", copies=(1, 1, 1))
    return dataclasses.replace(system, plan=plan, copies=(1, 1, 1))


def copies_of_full_weight(patch: pytest.MonkeyPatch) -> Ensemble:
    """Each of the k teachers of a record votes with weight k."""
    return dataclasses.replace(ensemble("upsampling"), copies=(1, 1, 1))


def nobody_vanishes(patch: pytest.MonkeyPatch) -> Ensemble:
    patch.setattr(votes, "weights", lambda phase: phase.clip_norm / math.sqrt(2))
    return ensemble("vanishing")


def mixed_teachers(patch: pytest.MonkeyPatch) -> Ensemble:
    """Records sorted by group and cut into equal pieces, weighted by the group of most: borders are mixed."""
    system = ensemble("scale")
    rows = torch.from_numpy(np.argsort(system.budgets.group, kind="stable")).reshape(20, 5)
    own = [int(np.bincount(system.budgets.group[row]).argmax()) for row in rows.numpy()]
    return dataclasses.replace(system, parts=[Part(g, row[None]) for g, row in zip(own, rows, strict=True)])


def a_record_of_two_teachers(patch: pytest.MonkeyPatch) -> Ensemble:
    system = ensemble("scale")
    first, *others = system.parts
    rows = first.rows.clone()
    rows[1, 0] = rows[0, 0]
    return dataclasses.replace(system, parts=[Part(first.group, rows), *others])


def less_noise_later(patch: pytest.MonkeyPatch) -> Ensemble:
    def count(*given):
        counted, noise = votes.planned_counts(*given)
        return counted, np.where(np.arange(len(noise)) < VOTES // 2, noise, noise / 2)

    return dataclasses.replace(ensemble("scale"), count=count)


MUTANTS = (
    sensitivity_1, swapped, cost_of_the_mean, weights_by_epsilon, weights_of_the_code, copies_charged_once,
    copies_of_full_weight, nobody_vanishes, mixed_teachers, a_record_of_two_teachers, less_noise_later,
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_program_overspends_and_is_refused(mutant, monkeypatch):
    system = mutant(monkeypatch)
    assert (worst_spends(system) > system.budgets.epsilons * 1.005).any()


# -- plans -------------------------------------------------------------------------------------------------------------


def test_weighting_is_the_scale_plan_to_the_bit():
    budgets = Budgets.from_shares(SHARES, records=1_000, delta=1e-5)
    recipe = epsilons.Recipe(steps=50, batch_size=1_000, clip_norm=math.sqrt(2))
    ours, theirs = costs.vote_plan(budgets, 50, "scale"), epsilons.plan(budgets, recipe, "scale")
    assert ours.digest == theirs.digest
    weight = costs.weights(ours.phases[0])
    np.testing.assert_array_equal(weight, theirs.clip_norm / math.sqrt(2))
    assert float(budgets.shares @ weight) == pytest.approx(1, abs=1e-12)
    few, many = (costs.weights(costs.vote_plan(budgets, number, "scale").phases[0]) for number in (1, 400))
    assert few == pytest.approx(many, rel=5e-4)
    assert many.round(3).tolist() == [0.568, 1.062, 1.523]


def test_a_vanishing_teacher_takes_part_as_long_as_its_budget_allows():
    budgets = Budgets.from_shares(SHARES, records=100, delta=1e-5)
    plan = costs.vote_plan(budgets, 200, "vanishing")
    present = [sum(phase.steps for phase in plan.phases if phase.sample_rate[p] > 0) for p in range(3)]
    noise = plan.phases[0].noise_std / math.sqrt(2)
    assert present[2] == plan.steps == 200
    for number, epsilon in zip(present[:2], (1.0, 2.0), strict=True):
        assert pld.epsilon([SampledGaussian(1.0, noise, number)], 1e-5) <= epsilon
        assert pld.epsilon([SampledGaussian(1.0, noise, number + 1)], 1e-5) > epsilon
    for earlier, later in itertools.pairwise(plan.phases):
        assert (earlier.sample_rate >= later.sample_rate).all()
        assert earlier.noise_std == later.noise_std


@pytest.mark.parametrize("copies", [(1, 2), (1, 2, 0), (1, 2, 1.5), (1, 2, math.nan)])
def test_copies_have_to_be_whole_numbers_for_each_group(copies):
    budgets = Budgets.from_shares(SHARES, records=100, delta=1e-5)
    with pytest.raises(PlanError, match="whole number of copies"):
        costs.vote_plan(budgets, 5, "upsampling", copies=copies)


# -- teachers and votes ------------------------------------------------------------------------------------------------


def test_a_part_has_each_record_of_its_group_at_most_once():
    group = np.random.default_rng(1).integers(0, 3, 500)
    parts = teachers.partition(group, 40, [1, 2, 3], seed=3)
    assert sum(len(part.rows) for part in parts) == 40
    assert [part.group for part in parts] == [0, 1, 1, 2, 2, 2]
    for part in parts:
        rows = part.rows.flatten().numpy()
        assert len(set(rows.tolist())) == len(rows) > (group == part.group).sum() - len(part.rows)
        assert (group[rows] == part.group).all()


def test_teachers_are_shared_out_by_largest_remainders():
    assert teachers.shared_out(250, np.array([17_000, 21_500, 11_500])) == [85, 108, 57]
    assert teachers.shared_out(10, np.array([1, 1, 998])) == [1, 1, 9]


def test_counts_are_those_of_a_loop_over_teachers():
    coins = np.random.default_rng(0)
    said, weight = coins.integers(0, CLASSES, (9, 5)), coins.uniform(0, 2, 9)
    slow = np.zeros((5, CLASSES))
    for teacher, vote in itertools.product(range(9), range(5)):
        slow[vote, said[teacher, vote]] += weight[teacher]
    np.testing.assert_allclose(votes.counts(said, weight, CLASSES), slow)


def test_a_released_label_is_as_often_right_as_its_noise_says():
    counted = np.tile([30.0, 20.0], (20_000, 1))
    found = votes.released_labels(counted, np.full(20_000, 15.0), np.random.default_rng(0))
    right = norm.cdf(10 / (math.sqrt(2) * 15))  # both counts have noise of their own
    assert (found == 0).mean() == pytest.approx(right, abs=5 * math.sqrt(right * (1 - right) / 20_000))


def test_many_regressions_are_fitted_as_each_one_alone():
    coins = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(3, 30, 4, generator=coins), torch.randint(0, 10, (3, 30), generator=coins)
    together = teachers.fit(inputs, targets)
    for i in range(3):
        alone = teachers.fit(inputs[i : i + 1], targets[i : i + 1])[0]
        torch.testing.assert_close(together[i], alone, atol=1e-5, rtol=1e-4)
        loss = torch.nn.functional.cross_entropy(inputs[i] @ alone, targets[i])
        assert loss < math.log(10) - 0.2


# -- the cost as published ---------------------------------------------------------------------------------------------


def slow_theorem_6(log_q: float, noise: float, order: float) -> float:
    """arXiv 1802.08908v1, Theorem 6 and Proposition 10, word by word in 50 digits."""
    with mpmath.workdps(50):
        q = mpmath.e ** mpmath.mpf(log_q)
        independent = order / mpmath.mpf(noise) ** 2
        mu2 = noise * mpmath.sqrt(mpmath.log(1 / q))
        mu1 = mu2 + 1
        e1, e2 = mu1 / mpmath.mpf(noise) ** 2, mu2 / mpmath.mpf(noise) ** 2
        if mu2 <= 1 or order > mu1 or q >= 1:
            return float(independent)
        if q > mpmath.e ** ((mu2 - 1) * e2) / (mu1 / (mu1 - 1) * mu2 / (mu2 - 1)) ** mu2 or q * mpmath.e**e2 >= 1:
            return float(independent)
        a = (1 - q) / (1 - (q * mpmath.e**e2) ** ((mu2 - 1) / mu2))
        b = mpmath.e**e1 / q ** (1 / (mu1 - 1))
        bound = mpmath.log((1 - q) * a ** (order - 1) + q * b ** (order - 1)) / (order - 1)
        return float(min(bound, independent))


def test_the_data_dependent_divergence_is_theorem_6_in_fifty_digits():
    seen = set()
    for log_q, noise, order in itertools.product((-0.1, -2.0, -9.0, -60.0), (1.5, 8.0, 26.0, 70.0), (2.0, 9.0, 100.0)):
        found = data_dependent.divergences(np.array([log_q]), noise, np.array([order]))[0, 0]
        assert found == pytest.approx(slow_theorem_6(log_q, noise, order), rel=1e-7)
        seen.add(found < order / noise**2)
    assert seen == {True, False}  # the bound matters for some of them


def outcome(counted: np.ndarray, noise: float) -> np.ndarray:
    """(classes,) probability of each class, by sums over a fine grid."""
    found = []
    for j, count in enumerate(counted):
        x = count + noise * np.linspace(-10, 10, 4_001)
        others = norm.cdf(x[:, None], np.delete(counted, j), noise).prod(axis=1)
        found.append(float((norm.pdf(x, count, noise) * others).sum() * (x[1] - x[0])))
    return np.array(found)


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("counted", [(60, 10, 4), (40, 30, 4), (50, 20, 20), (25, 24, 25)])
def test_the_data_dependent_bound_is_above_the_true_divergence(counted, weight):
    noise, orders = 10.0, np.array([2.0, 3.0, 6.0, 12.0])
    counted = np.array(counted, dtype=float)
    here = outcome(counted, noise)
    log_q = data_dependent.log_other(counted[None], noise)
    assert math.exp(log_q[0]) >= 1 - here.max() - 1e-12
    bound = data_dependent.divergences(log_q, noise / weight, orders)[0]
    for loses, gains in itertools.permutations(range(CLASSES), 2):
        changed = counted.copy()
        changed[loses] -= weight
        changed[gains] += weight
        there = outcome(changed, noise)
        for order, limit in zip(orders, bound, strict=True):
            true = math.log((here**order * there ** (1 - order)).sum()) / (order - 1)
            assert true <= limit * (1 + 1e-6)


def test_the_probability_of_another_class_is_exact_for_two():
    counted = np.array([[30.0, 18.0]])
    found = data_dependent.log_other(counted, 10.0)
    assert math.exp(found[0]) == pytest.approx(1 - outcome(counted[0], 10.0).max(), rel=1e-9)


def test_clear_votes_cost_less_and_unclear_ones_what_they_always_cost():
    clear, unclear = [240.0, 5, 5], [84.0, 83, 83]
    weight, deltas = np.array([0.5, 1.0, 2.0]), np.full(3, 1e-5)
    tables = [np.tile(counted, (50, 1)) for counted in (clear, unclear)]
    spent = [data_dependent.spent_after(table, 40.0, weight, deltas)[-1] for table in tables]
    for w, little, full in zip(weight, *spent, strict=True):
        always = rdp.epsilon([SampledGaussian(1.0, 40 / (math.sqrt(2) * w), 50)], 1e-5, orders=data_dependent.ORDERS)
        assert full == pytest.approx(always, rel=1e-9)
        assert little < 0.6 * always


def test_votes_stop_before_the_first_one_that_is_above_a_budget():
    spent = np.array([[0.2, 0.1], [0.6, 0.9], [1.0, 1.5], [1.2, 1.6]])
    for budgets, affordable in (([1.0, 2.0], 3), ([1.0, 1.4], 2), ([9.0, 9.0], 4), ([0.1, 9.0], 0)):
        assert data_dependent.affordable(spent, np.array(budgets)) == affordable


def test_the_weights_of_the_published_code_go_to_other_groups_when_charged():
    """Computed by hand from the code's rule: share × ε, over the mean; sorted for the charges."""
    for shares, voted, charged in (
        ({1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, [0.528, 1.335, 1.071], [0.528, 1.071, 1.335]),
        ({1.0: 0.54, 2.0: 0.37, 3.0: 0.09}, [0.916, 1.255, 0.458], [0.458, 0.916, 1.255]),
    ):
        budgets = Budgets.from_shares(shares, records=1_000, delta=1e-5)
        found = published.code_weights(budgets)
        assert [weight.round(3).tolist() for weight in found] == [voted, charged]
        assert (published.spends_of(found[1], found[1], budgets, 50) <= budgets.epsilons).all()
        assert (published.spends_of(found[0], found[1], budgets, 50) > budgets.epsilons).any()


# -- cells -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Ten clusters in the place of MNIST: 600 private, 300 public, 200 test records."""
    coins = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(10, 12, generator=coins)

    def data(records: int) -> Data:
        targets = torch.randint(0, 10, (records,), generator=coins)
        inputs = centres[targets] + torch.randn(records, 12, generator=coins)
        return Data(torch.cat([inputs, torch.ones(records, 1)], dim=1), targets)

    three = (data(600), data(300), data(200))
    monkeypatch.setattr(kind, "splits_of", lambda dataset, private: three)
    kind._ensemble.cache_clear()
    yield
    kind._ensemble.cache_clear()


def settings(**other: Any) -> PateSettings:
    shares = {"1": 0.34, "2": 0.43, "3": 0.23}
    base = {"dataset": "mnist", "accountant": "pld", "shares": shares, "private": 600, "teachers": 30, "steps": 60}
    return PateSettings(**{**base, "strategy": "scale", **other})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cell_keeps_every_budget_and_decides_its_votes_beforehand(strategy, small):
    chosen = settings(strategy=strategy, options={"copies": [1, 2, 3]} if strategy == "upsampling" else {})
    line, again = run_cell(chosen), run_cell(chosen)
    assert (line["steps"], line["teachers"]) == (60, 30)
    assert 0.99 < line["largest_part"] <= 1
    assert 0.1 < line["labels_right"] <= 1
    assert line == again | {key: line[key] for key in ("finished", "wall_seconds")}


def test_each_seed_has_teachers_of_its_own_only_if_it_is_asked_for(small):
    same, own = (
        [run_cell(settings(own_teachers=own), seed)["teachers_right"] for seed in (0, 1)] for own in (False, True)
    )
    assert same[0] == same[1] == own[0] != own[1]


@pytest.mark.parametrize("code_weights", [False, True])
def test_votes_as_published_stop_at_a_budget_by_a_cost_that_is_no_promise(code_weights, small):
    line = run_cell(settings(noise_std=5.0, code_weights=code_weights))
    assert 0 < line["steps"] < 300
    assert all(used <= level for used, level in zip(line["data_dependent"], (1, 2, 3), strict=True))
    assert max(exact / level for exact, level in zip(line["exact"], (1, 2, 3), strict=True)) > 1
    assert (line["weights"]["voted"] != line["weights"]["charged"]) == code_weights
    assert (line["with_voted_weights"] != line["data_dependent"]) == code_weights


def test_too_little_noise_for_a_single_vote_is_an_error_that_says_what_to_do(small):
    assert "Raise noise_std" in cells.run("x", "y", settings(noise_std=0.01), 0)["error"]


def test_the_same_records_train_by_the_librarys_own_fit(small):
    line = run_cell(settings(kind="pate-sgd", batch_size=60, clip_norm=1.0, steps=30, lr=4.0, momentum=0.5))
    assert line["charged"] == 30
    assert all(0.99 * level < spent <= level for spent, level in zip(line["spent"], (1, 2, 3), strict=True))
    assert line["accuracy"] > 0.3
