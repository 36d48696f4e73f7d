"""Every strategy keeps every budget, by its own accountant and by others; what STRATEGIES lists is examined here.

Options are left at their defaults. Independent oracles: Opacus' RDP and PRV accountants, and the exact Gaussian where
everyone is in every batch.
"""

from __future__ import annotations

import functools
import re
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import epsilons
import oracles
from epsilons import Budgets, Plan, Recipe
from epsilons.accounting import ACCOUNTANTS
from epsilons.errors import EpsilonsWarning, InfeasibleBudgetError
from epsilons.planning import STRATEGIES
from epsilons.planning.strategies import REFUSING
from shares import examples, share

#: Opacus' fractional orders are off by up to 2e-6; PRV's estimate by up to 2e-5 (against the exact Gaussian).
OPACUS_RDP_ERROR = 3e-6
PRV_ERROR = 3e-5


@dataclass(frozen=True)
class Case:
    """A roster and a recipe: one (epsilon, delta, records) per group."""

    groups: tuple[tuple[float, float, int], ...]
    recipe: Recipe

    @property
    def budgets(self) -> Budgets:
        epsilon, delta, records = zip(*self.groups, strict=True)
        order = np.random.default_rng(0).permutation(sum(records))
        return Budgets(np.repeat(epsilon, records)[order], np.repeat(delta, records)[order])


CASES = {
    "three tiers": Case(((1.0, 1e-5, 2040), (2.0, 1e-5, 2580), (3.0, 1e-5, 1380)), Recipe(300, 300, 0.2)),
    "half of the data": Case(((1.0, 1e-5, 340), (2.0, 1e-5, 430), (3.0, 1e-5, 230)), Recipe(50, 500, 0.2)),
    "all of the data": Case(((1.0, 1e-5, 340), (2.0, 1e-5, 430), (3.0, 1e-5, 230)), Recipe(20, 1000, 0.2)),
    "loose ones always drawn": Case(((0.5, 1e-5, 500), (20.0, 1e-5, 500)), Recipe(50, 550, 1.0)),
    "a delta each": Case(((1.0, 1e-6, 300), (1.0, 1e-4, 200), (2.0, 1e-7, 500)), Recipe(100, 50.5, 1.0)),
    "one among many": Case(((1.0, 1e-5, 1), (2.0, 1e-5, 998), (6.0, 1e-5, 1)), Recipe(100, 60, 3.0)),
}

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
every_accountant = pytest.mark.parametrize("accountant", ACCOUNTANTS)
every_case = pytest.mark.parametrize("case", CASES)
some_cases = pytest.mark.parametrize("case", share(CASES, 2))


@functools.cache
def made(strategy: str, accountant: str, case: str) -> Plan:
    return epsilons.plan(CASES[case].budgets, CASES[case].recipe, strategy, accountant)


def histories(plan: Plan) -> list[tuple[tuple[float, float, int], ...]]:
    """(sample_rate, noise_multiplier, steps) of each phase a group takes part in, for each group."""
    return [
        tuple(
            (float(p.sample_rate[g]), float(p.noise_std / (p.weight[g] * p.clip_norm[g])), p.steps) for p in plan.phases
        )
        for g in range(len(plan.epsilons))
    ]


@every_case
@every_accountant
@every_strategy
def test_no_group_spends_more_than_it_offered(strategy, accountant, case):
    plan = made(strategy, accountant, case)
    budgets = CASES[case].budgets
    np.testing.assert_array_equal(plan.epsilons, budgets.epsilons)
    np.testing.assert_array_equal(plan.delta, budgets.delta)
    assert (plan.epsilon_spent() <= budgets.epsilons).all()
    # Not by the plan's word alone: each row of the table, accounted again from its numbers.
    for group, history in enumerate(histories(plan)):
        again = ACCOUNTANTS[accountant]([epsilons.SampledGaussian(*step) for step in history], plan.delta[group])
        assert again <= budgets.epsilons[group]
        assert again == pytest.approx(plan.epsilon_spent()[group], rel=1e-9)


def drawn(plan: Plan) -> list[tuple[tuple[tuple[float, float, int], ...], float, float]]:
    """(history without phases in which the group is not drawn, epsilon, delta) of each group that is drawn."""
    rows = zip(histories(plan), plan.epsilons, plan.delta, strict=True)
    taking_part = [(tuple(step for step in history if step[0] > 0), *promise) for history, *promise in rows]
    return [row for row in taking_part if row[0]]


def check_by_opacus_rdp(plan: Plan) -> None:
    for history, level, delta in drawn(plan):
        assert oracles.opacus_rdp(history, delta) <= level * (1 + OPACUS_RDP_ERROR)


@some_cases
@every_strategy
def test_no_group_of_an_rdp_plan_overspends_by_opacus_own_rdp_accountant(strategy, case):
    check_by_opacus_rdp(made(strategy, "rdp", case))


@some_cases
@every_accountant
@every_strategy
def test_no_group_overspends_by_opacus_prv_accountant(strategy, accountant, case):
    for history, level, delta in drawn(made(strategy, accountant, case)):
        lower, estimate, _ = oracles.prv(history, delta, error=0.02)
        assert lower <= level
        assert estimate <= level * (1 + PRV_ERROR)


@every_accountant
@every_strategy
def test_no_group_that_is_always_drawn_overspends_by_the_exact_gaussian(strategy, accountant):
    for case in ("all of the data", "loose ones always drawn"):
        plan = made(strategy, accountant, case)
        for history, level, delta in zip(histories(plan), plan.epsilons, plan.delta, strict=True):
            if all(rate == 1 for rate, _, _ in history):
                together = 1 / np.sqrt(sum(steps / noise**2 for _, noise, steps in history))
                assert oracles.gaussian(float(together), 1, float(delta)) <= level


@every_case
@every_accountant
@every_strategy
def test_the_expected_batch_is_the_recipe_s_and_the_divisor_is_the_expected_batch(strategy, accountant, case):
    plan = made(strategy, accountant, case)
    for phase in plan.phases:
        mean = float(plan.counts @ phase.sample_rate)
        takes_part = int(plan.counts[phase.sample_rate > 0].sum())  # all of them, where one phase is for everybody
        assert mean == pytest.approx(min(CASES[case].recipe.batch_size, takes_part), rel=1e-4)
        assert phase.expected_batch == pytest.approx(mean, rel=1e-12)
    assert plan.steps == CASES[case].recipe.steps


@every_accountant
@pytest.mark.parametrize("case", ["three tiers", "half of the data", "all of the data", "one among many"])
@every_strategy
def test_a_looser_budget_never_gets_less_influence(strategy, accountant, case):
    plan = made(strategy, accountant, case)
    # Groups that come out alike may differ by what a search leaves over.
    assert (np.diff(plan.influence) >= -1e-4 * plan.influence[:-1]).all()


rosters = st.lists(
    st.tuples(st.sampled_from([0.3, 0.5, 0.9, 1.0, 1.7, 3.0, 5.0, 8.0, 15.0]), st.integers(1, 500)),
    min_size=2,
    max_size=5,
    unique_by=lambda group: group[0],
)


@every_strategy
@examples(3, 12)
@given(rosters, st.floats(0.01, 0.6), st.sampled_from([1, 30, 500]))
def test_any_roster_s_budgets_are_kept_in_full_batches_and_in_order(strategy, roster, part, steps):
    groups = tuple((epsilon, 1e-5, records) for epsilon, records in roster)
    case = Case(groups, Recipe(steps, max(part * sum(n for _, n in roster), 0.5), 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EpsilonsWarning)  # a roster may be so small that delta is warned about
        try:
            plan = epsilons.plan(case.budgets, case.recipe, strategy, "rdp")
        except REFUSING.get(strategy, ()):
            assert strategy != "sequential" or steps < len(roster)
            return
    assert (plan.epsilon_spent() <= plan.epsilons).all()
    check_by_opacus_rdp(plan)
    asked = sum(min(case.recipe.batch_size, plan.counts[p.sample_rate > 0].sum()) * p.steps for p in plan.phases)
    assert sum(plan.counts @ p.sample_rate * p.steps for p in plan.phases) == pytest.approx(asked, rel=1e-4)
    if len(plan.phases) == 1:  # a phase of one's own also depends on how many share it
        assert (np.diff(plan.influence) >= -1e-4 * plan.influence[:-1]).all()


@every_accountant
@every_strategy
def test_one_level_gives_exactly_uniform_s_table_to_the_last_bit(strategy, accountant):
    for level in (0.7, 1.0, 3.1):
        budgets = Budgets([level] * 1000, delta=1e-5)
        recipe = Recipe(steps=100, batch_size=33.3, clip_norm=0.3)
        alone = epsilons.plan(budgets, recipe, strategy, accountant)
        plain = epsilons.plan(budgets, recipe, "uniform", accountant)
        assert alone.noise_std.hex() == plain.noise_std.hex()
        assert alone.expected_batch.hex() == plain.expected_batch.hex()
        for name in ("sample_rate", "clip_norm", "weight"):
            assert getattr(alone, name).tobytes() == getattr(plain, name).tobytes()


@every_strategy
def test_the_order_of_the_records_is_irrelevant(strategy):
    budgets = CASES["a delta each"].budgets
    first = epsilons.plan(budgets, CASES["a delta each"].recipe, strategy, "rdp")
    for seed in range(3):
        shuffled = budgets.subset(np.random.default_rng(seed).permutation(len(budgets)))
        again = epsilons.plan(shuffled, CASES["a delta each"].recipe, strategy, "rdp")
        assert again == first
        assert again.to_dict() == first.to_dict()


@every_strategy
def test_a_budget_below_what_rdp_can_certify_is_refused_with_the_smallest_it_can(strategy):
    floor = 0.10287  # ln((63 − 1)/63) − (ln δ + ln 63)/62 at δ = 1e-5: Opacus' largest order, no divergence at all
    for budget in (floor / 1.5, floor * 0.999):
        budgets = Budgets([budget] * 500 + [1.0] * 500, delta=1e-5)
        with pytest.raises(InfeasibleBudgetError) as caught:
            epsilons.plan(budgets, Recipe(100, 20, 1.0), strategy, "rdp")
        named = re.search(r"epsilon = ([\d.]+)", str(caught.value))
        assert named
        assert float(named[1]) == pytest.approx(floor, rel=5e-3)
        assert caught.value.exit_code == 3


@pytest.mark.parametrize("factor", [1.02, 1.2, 1.5])
@every_strategy
def test_a_budget_just_above_what_rdp_can_certify_is_kept(strategy, factor):
    budgets = Budgets([0.10287 * factor] * 500 + [1.0] * 500, delta=1e-5)
    plan = epsilons.plan(budgets, Recipe(100, 20, 1.0), strategy, "rdp")
    assert (plan.epsilon_spent() <= plan.epsilons).all()


@every_strategy
def test_a_group_that_a_strategy_cannot_draw_at_all_is_not_left_out_in_silence(strategy):
    # Among ε = 20 so little noise is shared that RDP certifies ε = 0.12 at no rate above 1e-9.
    budgets = Budgets([0.12] * 5000 + [20.0] * 5000, delta=1e-5)
    try:
        plan = epsilons.plan(budgets, Recipe(200, 100, 1.0), strategy, "rdp")
    except (InfeasibleBudgetError, EpsilonsWarning):  # warnings of this package are errors in these tests
        return
    assert (sum(phase.sample_rate for phase in plan.phases) > 0).all()
