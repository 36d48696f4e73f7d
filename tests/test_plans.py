"""Plans: what they hold, what they cost, what they refuse, and what they show to whom."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest

import oracles
from by_hand import a_phase, by_hand
from epsilons import Budgets, Plan, Recipe, SampledGaussian, plan
from epsilons.accounting import ACCOUNTANTS, pld, rdp
from epsilons.errors import BudgetError, BudgetExceededError, EpsilonsError, PlanError
from epsilons.planning.plan_numbers import SHARES

TIERS = {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}
RECIPE = Recipe(steps=200, batch_size=120, clip_norm=0.2)
BUDGETS = Budgets.from_shares(TIERS, records=6000)


@functools.cache
def small(strategy: str = "scale", accountant: str = "rdp") -> Plan:
    return plan(BUDGETS, RECIPE, strategy, accountant)


# -- the telling case: what the paper prints for MNIST under Scale -------------------------------------------------


#: (rate, steps): as the text states them, B/N and 9,375; and as its numbers come about, 1/⌈N/B⌉ and 80·⌈N/B⌉.
STATED, USED = (512 / 60_000, 9375), (1 / 118, 9440)


def printed_in_the_paper(accountant: str, rate: float, steps: int) -> Plan:
    """The paper's MNIST row as printed: σ = 2.063, c_p = 0.129, 0.216, 0.274 (for c = 0.2); 34, 43 and 23 %."""
    row = a_phase(
        steps=steps,
        sample_rate=[rate] * 3,
        clip_norm=[0.129, 0.216, 0.274],
        weight=[1.0] * 3,
        noise_std=2.063 * 0.2,
        expected_batch=60_000 * rate,
    )
    return by_hand(
        row,
        accountant=accountant,
        epsilons=(1.0, 2.0, 3.0),
        batch_size=60_000 * rate,
        counts=[20_400, 25_800, 13_800],
    )


@pytest.mark.parametrize(
    ("convention", "epsilon_spent", "over"),
    [(USED, [1.082, 2.013, 2.768], "8.17%"), (STATED, [1.086, 2.020, 2.779], "8.59%")],
    ids=["as used", "as stated"],
)
def test_the_paper_s_printed_mnist_row_overspends_and_is_refused(convention, epsilon_spent, over):
    made = printed_in_the_paper("rdp", *convention)
    np.testing.assert_allclose(made.epsilon_spent(), epsilon_spent, atol=1e-3)
    with pytest.raises(BudgetExceededError, match=f"some budgets allow, by up to {over}") as caught:
        made.verify()
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("convention", "epsilon_spent"),
    [(USED, [0.989, 1.848, 2.545]), (STATED, [0.993, 1.855, 2.555])],
    ids=["as used", "as stated"],
)
def test_the_printed_row_keeps_its_promise_under_pld(convention, epsilon_spent):
    made = printed_in_the_paper("pld", *convention)
    np.testing.assert_allclose(made.epsilon_spent(), epsilon_spent, atol=1e-3)
    assert made.verify() is made


def test_the_golden_reference_says_the_same_of_every_printed_scale_row(golden):
    for setting in golden["published"]:
        literal, used = setting["published_scale_row_eps_if_used_literally"], setting["computed_rdp_reproduction"]
        for noise, recorded in zip(literal["effective_sigma"], literal["eps_rdp"], strict=True):
            spent = rdp.epsilon([SampledGaussian(used["q"], noise, used["steps"])], 1e-5)
            assert spent == pytest.approx(recorded, rel=1e-6), setting["dataset"]


# -- spends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_spends_are_the_accountant_s_for_each_group_s_row(accountant):
    made = small("scale", accountant)
    for group in range(3):
        row = SampledGaussian(float(made.sample_rate[group]), float(made.noise_multiplier[group]), made.steps)
        assert made.epsilon_spent()[group] == ACCOUNTANTS[accountant]([row], 1e-5)
        assert made.epsilon_spent(delta=1e-7)[group] == ACCOUNTANTS[accountant]([row], 1e-7)
    assert (made.epsilon_spent(delta=1e-7) > made.epsilon_spent()).all()


def test_weight_and_clip_norm_only_count_by_their_product():
    clipped = by_hand(a_phase(clip_norm=[0.5, 1.0], weight=[1.0, 1.0]))
    weighted = by_hand(a_phase(clip_norm=[1.0, 1.0], weight=[0.5, 1.0]))
    np.testing.assert_array_equal(clipped.epsilon_spent(), weighted.epsilon_spent())
    assert clipped != weighted


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_two_identical_halves_spend_what_the_whole_spends(accountant):
    whole = by_hand(a_phase(steps=100), accountant=accountant)
    halves = by_hand(a_phase(steps=50), a_phase(steps=50), accountant=accountant)
    np.testing.assert_allclose(halves.epsilon_spent(), whole.epsilon_spent(), rtol=1e-6)
    np.testing.assert_allclose(halves.influence, whole.influence, rtol=1e-12)
    assert halves.steps == whole.steps


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_phases_compose_and_are_never_below_the_two_step_quadrature(accountant):
    first = a_phase(steps=1, sample_rate=[0.3, 1.0], clip_norm=[1.0, 0.5], noise_std=1.5)
    second = a_phase(steps=1, sample_rate=[0.05, 0.5], clip_norm=[1.0, 0.5], noise_std=2.5)
    made = by_hand(first, second, accountant=accountant, epsilons=(9.0, 10.0))
    for group, spent in enumerate(made.epsilon_spent()):
        rows = [(float(p.sample_rate[group]), float(p.noise_multiplier[group])) for p in (first, second)]
        exact = max(oracles.two_steps(*rows, 1e-5, direction) for direction in oracles.DIRECTIONS)
        assert spent >= exact * (1 - 1e-8)
        assert accountant != "pld" or spent <= exact * 1.01


def test_a_group_that_sits_a_phase_out_pays_for_the_other_alone():
    made = by_hand(a_phase(sample_rate=[0.0, 0.02]), a_phase(sample_rate=[0.02, 0.0]))
    alone = by_hand(a_phase())
    np.testing.assert_array_equal(made.epsilon_spent(), alone.epsilon_spent())


@pytest.mark.parametrize(
    "name", ["sample_rate", "clip_norm", "weight", "noise_multiplier", "noise_std", "expected_batch"]
)
def test_a_plan_shows_the_numbers_of_its_only_phase_or_points_to_its_phases(name):
    np.testing.assert_array_equal(getattr(small(), name), getattr(small().phases[0], name))
    made = by_hand(a_phase(steps=50), a_phase(steps=50))
    with pytest.raises(PlanError, match=r"2 phases .* plan\.phases"):
        getattr(made, name)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize("steps", [1, 7, 20, 21, 200])
def test_what_is_shown_as_spent_so_far_grows_and_is_never_below_the_truth(accountant, steps):
    made = by_hand(a_phase(steps=steps), accountant=accountant)
    shown = np.array([made.spent_after([done]) for done in range(steps + 1)])  # (steps + 1, groups)
    assert (np.diff(shown, axis=0) >= 0).all()
    np.testing.assert_array_equal(shown[0], 0)
    np.testing.assert_array_equal(shown[-1], made.epsilon_spent())
    for done in range(0, steps + 1, 3):
        for group in range(2):
            row = SampledGaussian(0.02, float(made.noise_multiplier[group]), done)
            assert shown[done, group] >= ACCOUNTANTS[accountant]([row], 1e-5)


def test_what_is_shown_as_spent_grows_over_phases_too():
    made = by_hand(a_phase(steps=30), a_phase(steps=45, sample_rate=[0.05, 0.01]), accountant="pld")
    path = [(done, 0) for done in range(31)] + [(30, done) for done in range(1, 46)]
    shown = np.array([made.spent_after(done) for done in path])
    # The grid of a history is fitted to all of it, so it moves once, where the second phase begins.
    assert (shown[1:] >= shown[:-1] * (1 - 5e-4)).all()
    np.testing.assert_array_equal(shown[-1], made.epsilon_spent())
    truth = [pld.epsilon([made.phases[0].history(0), made.phases[1].history(0, 10)], 1e-5)]
    assert made.spent_after((30, 10))[0] >= truth[0]


def test_what_is_shown_as_spent_can_be_asked_for_some_groups():
    np.testing.assert_array_equal(small().spent_after([77], groups=[2, 0]), small().spent_after([77])[[2, 0]])


@pytest.mark.parametrize("accountant", ["pld", "rdp", lambda history, delta: 0.5])
def test_of_no_group_nothing_is_read_off(accountant):
    # What a run asks for where every group is too small to be shown alone.
    made = plan(Budgets([1.0, 2.0, 3.0], delta=1e-5), Recipe(20, 1, 1.0), "scale", accountant)
    assert made.spent_after([7], groups=[]).shape == (0,)
    assert made.spent_after([7], groups=[0]).shape == (1,)


# -- verification --------------------------------------------------------------------------------------------------


def test_a_plan_that_overspends_is_refused_without_naming_anyone_s_budget():
    made = by_hand(a_phase(noise_std=0.5), epsilons=(0.77717, 3.33313))
    with pytest.raises(BudgetExceededError) as caught:
        made.verify()
    assert caught.value.exit_code == 3
    for value in ("0.777", "3.333", *(f"{spent:.3f}" for spent in made.epsilon_spent())):
        assert value not in str(caught.value)


def test_an_accountant_that_fails_never_passes_for_a_budget_kept():
    for failure in (math.nan, math.inf):
        made = by_hand(a_phase(), accountant="broken", accountant_fn=lambda history, delta, failure=failure: failure)
        with pytest.raises(EpsilonsError):
            made.verify()


def test_a_plan_by_an_unknown_accountant_asks_for_its_function():
    with pytest.raises(PlanError, match="mine"):
        by_hand(a_phase(), accountant="mine")


def test_a_plan_that_says_pld_is_held_to_pld_whatever_function_is_passed():
    made = by_hand(a_phase(), accountant="pld", accountant_fn=lambda history, delta: 0.0)
    np.testing.assert_array_equal(made.epsilon_spent(), by_hand(a_phase(), accountant="pld").epsilon_spent())


# -- making plans -----------------------------------------------------------------------------------------------------


def test_a_strategy_of_one_s_own_is_checked_like_the_others():
    def mine(budgets, recipe, accountant, boost=1.0):
        made = plan(budgets, recipe, "scale", "rdp")
        changed = dataclasses.replace(made.phases[0], clip_norm=made.clip_norm * boost)
        return Plan.of(budgets, recipe, accountant, changed, strategy="any name")

    made = plan(BUDGETS, RECIPE, mine, "rdp", boost=0.9)
    assert made.strategy == "mine"
    assert made.options == {"boost": 0.9}
    with pytest.raises(BudgetExceededError):
        plan(BUDGETS, RECIPE, mine, "rdp", boost=1.1)
    with pytest.raises(PlanError, match="boost"):
        plan(BUDGETS, RECIPE, mine, "rdp", bost=1.1)


def test_a_strategy_cannot_choose_a_laxer_accountant_than_the_one_asked_for():
    def lax(budgets, recipe, accountant):
        return plan(budgets, recipe, "scale", "pld")

    with pytest.raises(EpsilonsError):
        plan(BUDGETS, RECIPE, lax, "rdp")


def test_a_strategy_that_answers_for_other_budgets_is_refused():
    other = Budgets.from_shares({1.0: 0.5, 4.0: 0.5}, records=6000)
    for answer in (other, Budgets.from_shares(TIERS, records=6000, delta=1e-4)):
        with pytest.raises(PlanError, match="other budgets"):
            plan(BUDGETS, RECIPE, lambda *_, answer=answer: plan(answer, RECIPE, "scale", "rdp"), "rdp")


def test_an_accountant_of_one_s_own_may_be_passed():
    def doubled(history, delta):
        return 2 * rdp.epsilon(history, delta)

    made = plan(BUDGETS, RECIPE, "scale", doubled)
    assert "doubled" in made.accountant
    assert (made.epsilon_spent() <= made.epsilons).all()
    np.testing.assert_allclose(made.epsilon_spent() / 2, made.epsilons / 2, rtol=1e-4)
    assert (made.noise_multiplier > small().noise_multiplier).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": "fair"}, "uniform, sample, scale"),
        ({"accountant": "zcdp"}, "pld, rdp"),
        ({"weight": 0.5}, "no option 'weight'"),
        ({"public_shares": TIERS}, "belong together"),
        ({"public_records": 6000}, "belong together"),
    ],
)
def test_unknown_names_and_options_are_refused_with_the_ones_there_are(arguments, words):
    with pytest.raises(PlanError, match=words):
        plan(BUDGETS, RECIPE, **arguments)


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(PlanError, match="larger than the data"):
        plan(Budgets.from_shares(TIERS, records=100, delta=1e-5), RECIPE)


def each(**wrong) -> list[dict]:
    """One changed value at a time."""
    return [{name: value} for name, values in wrong.items() for value in values]


NUMBERS = [0.0, -1.0, math.nan, math.inf]


@pytest.mark.parametrize(
    "values",
    each(steps=[0, -1, 1.5, math.nan, math.inf, 10**12], batch_size=NUMBERS, clip_norm=NUMBERS),
)
def test_a_recipe_that_cannot_be_followed_is_refused(values):
    with pytest.raises(PlanError):
        Recipe(**({"steps": 10, "batch_size": 5.0, "clip_norm": 1.0} | values))


@pytest.mark.parametrize(
    "values",
    each(
        sample_rate=[[0.1, 1.1], [-0.1, 0.1], [math.nan, 0.1], [0.1], 0.1],
        clip_norm=[[0.0, 1.0], [math.inf, 1.0]],
        weight=[[-1.0, 1.0]],
        steps=[0, 2.5, math.nan],
        noise_std=NUMBERS,
        expected_batch=NUMBERS,
    ),
)
def test_a_phase_that_is_no_table_is_refused(values):
    with pytest.raises(PlanError):
        a_phase(**values)


@pytest.mark.parametrize(
    "values",
    each(
        epsilons=[(2.0, 1.0), (1.0, 1.0), (1.0, math.inf), (0.0, 1.0)],
        delta=[[1e-5, 0.0], [1e-5, 1e-10], [1e-5]],
        counts=[[1000, 0], [1000]],
        adjacency=["substitution"],
    ),
)
def test_a_plan_whose_groups_make_no_sense_is_refused(values):
    with pytest.raises(PlanError):
        by_hand(a_phase(), **values)


def test_a_plan_needs_a_phase_with_a_row_for_every_group():
    with pytest.raises(PlanError, match="phase"):
        by_hand()
    with pytest.raises(PlanError, match="2 groups"):
        by_hand(a_phase(sample_rate=[0.1], clip_norm=[1.0], weight=[1.0]))


def test_what_a_plan_holds_cannot_be_changed_afterwards():
    made = small()
    arrays = [getattr(made, name) for name in ("epsilons", "delta", "counts", "sample_rate", "clip_norm", "weight")]
    for array in (*arrays, made.epsilon_spent()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


# -- equality --------------------------------------------------------------------------------------------------------


def test_plans_are_equal_when_their_numbers_are_and_differ_when_one_differs():
    same, again = by_hand(a_phase()), by_hand(a_phase())
    assert same == again
    assert hash(same) == hash(again)
    others = [
        by_hand(a_phase(steps=99)),
        by_hand(a_phase(noise_std=math.nextafter(2.0, 3.0))),
        by_hand(a_phase(clip_norm=[0.5, math.nextafter(1.0, 2.0)])),
        by_hand(a_phase(), counts=[401, 599]),
        by_hand(a_phase(), epsilons=(1.0, 4.1)),
        by_hand(a_phase(), delta=[1e-5, 1e-6]),
        by_hand(a_phase(), accountant="pld"),
        by_hand(a_phase(), adjacency=SHARES),
        by_hand(a_phase(steps=50), a_phase(steps=50)),
    ]
    assert len({same.digest, *(other.digest for other in others)}) == 1 + len(others)


# -- declared shares -----------------------------------------------------------------------------------------------


def test_a_plan_from_declared_shares_is_identical_whatever_the_data_hold():
    declared = {"public_shares": {1.0: 0.5, 2.0: 0.3, 4.0: 0.2}, "public_records": 6000}
    data = [
        Budgets.from_shares({1.0: 0.34, 2.0: 0.43, 4.0: 0.23}, records=5987),
        Budgets.from_shares({1.0: 0.9, 2.0: 0.1}, records=150),
        Budgets([4.0] * 7000, delta=1e-5),
    ]
    for strategy in ("scale", "sample"):
        plans = [plan(budgets, RECIPE, strategy, "rdp", **declared) for budgets in data]
        assert len({made.digest for made in plans}) == 1
        assert plans[0].to_dict() == plans[1].to_dict() == plans[2].to_dict()
        assert plans[0].records == 6000
        np.testing.assert_array_equal(plans[0].counts, [3000, 1800, 1200])
        assert plans[0].expected_batch == pytest.approx(RECIPE.batch_size, rel=1e-4)


def test_declared_shares_change_what_is_promised_and_the_roster_says_the_other():
    declared = plan(BUDGETS, RECIPE, "scale", "rdp", public_shares=TIERS, public_records=6000)
    roster = small()
    assert declared.adjacency == "add-or-remove, shares declared"
    assert roster.adjacency == "zero-out, roster public"
    assert "D′ be the data without record i" in declared.guarantee
    assert "covered only at the sum of both" in declared.guarantee
    assert "replaced by an empty record of the same budget" in roster.guarantee
    assert "the list of budgets" in roster.guarantee
    assert declared != roster
    np.testing.assert_array_equal(declared.noise_multiplier, roster.noise_multiplier)


def test_a_budget_that_was_not_declared_is_refused_without_naming_it():
    budgets = Budgets([1.0] * 5000 + [7.7777], delta=1e-5)
    with pytest.raises(BudgetError, match="not among the declared") as caught:
        plan(budgets, RECIPE, "scale", "rdp", public_shares=TIERS, public_records=6000)
    assert "7.7" not in str(caught.value)


def test_declared_shares_need_one_delta():
    budgets = Budgets([1.0, 2.0] * 3000, delta=[1e-5, 1e-6] * 3000)
    with pytest.raises(BudgetError, match="one delta"):
        plan(budgets, RECIPE, "scale", "rdp", public_shares=TIERS, public_records=6000)


# -- what is shown --------------------------------------------------------------------------------------------------


def test_the_summary_shows_each_large_group_and_the_guarantee():
    text = str(small("scale", "pld"))
    for words in ("scale", "6,000 records", "200 steps", "2,040", "2,580", "1,380", "This run alone", "Not covered"):
        assert words in text, words
    assert "PLD, both directions" in text


def test_what_is_shown_as_spent_is_rounded_up_and_not_above_the_promise():
    made = small("scale", "rdp")
    rows = [line.split() for line in made.summary().splitlines()[-3:]]
    for row, level, spent in zip(rows, made.epsilons, made.epsilon_spent(), strict=True):
        assert float(row[0]) == level
        assert spent <= float(row[3]) <= level


def test_plans_for_the_same_groups_are_compared_side_by_side():
    text = small("scale").compare(small("uniform"), small("sample"))
    for words in ("scale: epsilon_spent", "uniform: epsilon_spent", "sample: influence", "2,040"):
        assert words in text
    with pytest.raises(PlanError, match="same groups"):
        small().compare(by_hand(a_phase()))


def test_influence_is_steps_times_rate_over_noise_added_over_phases():
    made = by_hand(a_phase(steps=30), a_phase(steps=45, sample_rate=[0.05, 0.01], noise_std=4.0))
    expected = [
        sum(p.steps * p.sample_rate[g] * p.weight[g] * p.clip_norm[g] / p.noise_std for p in made.phases)
        for g in range(2)
    ]
    np.testing.assert_allclose(made.influence, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("randomness", "words"),
    [
        (None, "named when training starts"),
        ("chacha20", "ChaCha20"),
        ("secure", "ChaCha20"),
        ("philox", "Philox"),
        ("seeded", "no guarantee"),
    ],
)
def test_the_guarantee_of_a_run_names_its_randomness(randomness, words):
    assert words in small().guarantee_of_run(randomness)


def test_the_guarantee_of_a_run_names_what_computed_its_inputs():
    words = small().guarantee_of_run("chacha20", "an encoder trained on \x1b[2Jpublic books")
    assert "Inputs: an encoder trained on " in words
    assert "\x1b" not in words
    assert "Inputs:" not in small().guarantee_of_run("chacha20")
