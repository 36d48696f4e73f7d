"""Replanning: what was charged stays, nobody exceeds the new promise, and whoever does not change keeps the row."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from epsilons import Budgets, Plan, Recipe, SampledGaussian, plan
from epsilons.accounting import ACCOUNTANTS
from epsilons.errors import BudgetError, DataError, InfeasibleBudgetError, PlanError
from epsilons.ledger import Ledger
from epsilons.run_folder import RunFolder

LEVELS = np.repeat([1.0, 2.0, 3.0], [340, 430, 230])
OLD = Budgets(LEVELS)
RECIPE = Recipe(400, 50, 1.0)


def changed(epsilon, **changes):
    made = plan(OLD, RECIPE, changes.pop("strategy", "sample"), changes.pop("accountant", "pld"))
    return made, made.replan(after=200, budgets=Budgets(epsilon), was=OLD, independent=True, **changes)


@pytest.mark.parametrize("strategy", ["sample", "scale"])
@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_whoever_does_not_change_keeps_the_very_row_and_spends_the_same(strategy, accountant):
    made, after = changed(LEVELS, strategy=strategy, accountant=accountant)
    assert [phase.steps for phase in after.plan.phases] == [200, 200]
    for phase in after.plan.phases:
        np.testing.assert_array_equal(phase.sample_rate, made.sample_rate)
        np.testing.assert_array_equal(phase.clip_norm, made.clip_norm)
    np.testing.assert_allclose(after.plan.epsilon_spent(), made.epsilon_spent(), rtol=1e-9)
    assert after.notes == ()


def test_a_withdrawn_record_has_spent_what_it_was_charged_and_no_more():
    made, after = changed(LEVELS, withdrawn=range(40))
    row = after.group[0]
    assert after.withdrawn[row]
    assert after.plan.counts[row] == 40
    assert after.plan.phases[1].sample_rate[row] == 0
    assert after.plan.epsilon_spent()[row] == pytest.approx(made.spent_after([200])[0], rel=1e-9)
    assert any("40 of 1,000 records withdrew" in note for note in after.notes)
    # And the 300 who stay with the same budget are another group.
    assert (after.group[40:340] != row).all()


def test_withdrawals_may_be_given_as_a_mask_and_name_the_same_people_as_indices():
    mask = np.zeros(1000, dtype=bool)
    mask[700:740] = True
    _, masked = changed(LEVELS, withdrawn=mask, accountant="rdp")
    _, listed = changed(LEVELS, withdrawn=list(range(700, 740)), accountant="rdp")
    assert masked.plan == listed.plan
    np.testing.assert_array_equal(masked.group, listed.group)
    np.testing.assert_array_equal(masked.withdrawn[masked.group], mask)
    # Those at 0 and 1, as which a mask was read once, stay.
    assert (masked.plan.phases[1].sample_rate[masked.group] > 0).tolist() == (~mask).tolist()


@pytest.mark.parametrize(
    ("withdrawn", "told"),
    [
        (np.ones(999, dtype=bool), r"bool of shape \(999,\)"),
        (np.ones(1001, dtype=bool), r"bool of shape \(1001,\)"),
        (np.ones((1000, 1), dtype=bool), "flat list"),
        ([0.0, 1.0], "float64"),
        (np.array(["3"]), "flat list"),
        ({1, 2}, "flat list"),
        ([[1], [2, 3]], "flat list"),
        (7, "flat list"),
        ([-1], r"0\.\.999; 1 of 1"),
        ([3, 1000], r"0\.\.999; 1 of 2 .* place 1"),
        (np.arange(1000) // 500, "True and False"),
        ([5, 6, 5], "1 of its 3 records again"),
    ],
)
def test_withdrawals_that_are_neither_indices_nor_a_mask_are_refused(withdrawn, told):
    with pytest.raises(BudgetError, match=told):
        changed(LEVELS, withdrawn=withdrawn, accountant="rdp")


@pytest.mark.parametrize("strategy", ["sample", "scale"])
def test_raised_and_lowered_budgets_are_used_up_and_never_exceeded(strategy):
    wishes = LEVELS.copy()
    wishes[:100], wishes[400:500] = 2.0, 1.7
    _, after = changed(wishes, strategy=strategy)
    np.testing.assert_array_equal(after.plan.epsilons[after.group], wishes)
    assert (after.plan.epsilon_spent() <= after.plan.epsilons).all()
    np.testing.assert_allclose(after.plan.epsilon_spent(), after.plan.epsilons, rtol=1e-4)
    # Same budget, different pasts: the raised ones were drawn less so far, and are drawn more, or clipped less, now.
    raised, always = after.group[0], after.group[600]
    future = after.plan.phases[1]
    assert (
        future.sample_rate[raised] / future.noise_multiplier[raised]
        > future.sample_rate[always] / (future.noise_multiplier[always])
    )


def test_a_budget_below_what_was_charged_is_told_and_nothing_further_is_drawn():
    wishes = LEVELS.copy()
    wishes[:50] = 0.3
    _, after = changed(wishes)
    row = after.group[0]
    assert after.unmet[row]
    assert after.unmet.sum() == 1
    assert after.plan.phases[1].sample_rate[row] == 0
    assert after.plan.epsilons[row] == 1.0
    assert 0.3 < after.plan.epsilon_spent()[row] <= 1.0
    assert any("50 of 1,000 records ask for less" in note for note in after.notes)


def test_who_withdrew_is_not_said_to_be_drawn_in_every_step():
    budgets = Budgets(np.repeat([1.0, 2.0], 50), delta=1e-5)
    made = plan(budgets, Recipe(steps=20, batch_size=100, clip_norm=1.0), "uniform", "rdp")
    after = made.replan(after=5, budgets=budgets, was=budgets, withdrawn=np.arange(50), independent=True)
    assert (after.plan.phases[0].sample_rate == 1).all()
    assert not any("drawn in every step" in note and "100 of 100" in note for note in after.plan.notes)


def test_notes_do_not_tell_how_many_when_they_are_few():
    wishes = LEVELS.copy()
    wishes[500:519] = 0.3
    _, after = changed(wishes, withdrawn=[0], accountant="rdp")
    assert [note.split(":")[0] for note in after.notes] == [
        "Fewer than 20 records withdrew",
        "Fewer than 20 records ask for less than they were already charged",
    ]


def test_a_group_whose_phase_is_over_is_not_unmet_when_it_changes_nothing_or_asks_for_more():
    made = plan(OLD, RECIPE, "sequential", "rdp")
    wishes = LEVELS.copy()
    wishes[:100], wishes[980:] = 1.5, 4.0  # of the strictest, whose phase is over; of the loosest, in whose phase it is
    after = made.replan(after=300, budgets=Budgets(wishes), was=OLD, independent=True)
    assert not after.unmet.any()
    assert after.notes == ()
    np.testing.assert_array_equal(after.plan.epsilons[after.group], wishes)
    assert after.plan.phases[-1].sample_rate[after.group[0]] == 0
    for phase, before in zip(after.plan.phases, [*made.phases, made.phases[-1]], strict=True):
        np.testing.assert_array_equal(phase.sample_rate[after.group][100:980], before.sample_rate[OLD.group][100:980])


@pytest.mark.parametrize("factor", [1.0, 1 + 1e-6])
@pytest.mark.parametrize("strategy", ["sample", "scale", "sequential"])
def test_whoever_has_used_nearly_all_and_asks_for_no_less_keeps_the_very_row(strategy, factor):
    made = plan(OLD, Recipe(20_000, 50, 1.0), strategy, "rdp")
    after = made.replan(after=19_999, budgets=Budgets(LEVELS * factor), was=OLD, independent=True)
    assert not after.unmet.any()
    assert after.notes == ()
    np.testing.assert_array_equal(after.plan.epsilons, made.epsilons * factor)
    for name in ("sample_rate", "clip_norm", "weight"):
        np.testing.assert_array_equal(getattr(after.plan.phases[-1], name), getattr(made.phases[-1], name))
    assert after.plan.phases[-1].expected_batch == pytest.approx(made.phases[-1].expected_batch, rel=1e-9)
    assert (after.plan.epsilon_spent() <= after.plan.epsilons).all()


@pytest.mark.parametrize(("wishes", "withdrawn"), [(LEVELS, np.ones(1000, dtype=bool)), (np.full(1000, 0.1), ())])
def test_where_nobody_is_drawn_any_more_the_divisor_stays(wishes, withdrawn):
    made, after = changed(wishes, withdrawn=withdrawn, accountant="rdp")
    assert (after.plan.phases[-1].sample_rate == 0).all()
    assert (after.withdrawn | after.unmet).all()
    assert after.plan.phases[-1].expected_batch == made.expected_batch
    # And again, from there.
    again = after.plan.replan(
        after=300, budgets=Budgets(after.plan.epsilons[after.group]), was=after.group, independent=True
    )
    assert again.plan.phases[-1].expected_batch == made.expected_batch
    assert again.notes == ()


def test_whoever_asks_for_less_at_a_stricter_delta_keeps_the_old_promise_whole():
    made = plan(OLD, RECIPE, "sample", "rdp")
    delta = np.where(np.arange(1000) < 50, 1e-9, 1e-5)
    wishes = np.where(np.arange(1000) < 50, 1.1, LEVELS)  # more epsilon, but at a delta at which more was charged
    after = made.replan(after=390, budgets=Budgets(wishes, delta), was=OLD, independent=True)
    row = after.group[0]
    assert after.unmet[row]
    assert (after.plan.epsilons[row], after.plan.delta[row]) == (1.0, 1e-5)


def test_changes_that_may_depend_on_what_was_released_are_refused_with_the_reason():
    made = plan(OLD, RECIPE, "sample", "rdp")
    with pytest.raises(PlanError, match="Rényi filter"):
        made.replan(after=200, budgets=OLD, was=OLD)


@pytest.mark.parametrize("after", [0, 400, 500, -1])
def test_a_change_before_the_first_or_after_the_last_step_is_refused(after):
    made = plan(OLD, RECIPE, "sample", "rdp")
    with pytest.raises(PlanError, match="within its last phase"):
        made.replan(after=after, budgets=OLD, was=OLD, independent=True)


def test_budgets_of_other_records_are_refused():
    made = plan(OLD, RECIPE, "sample", "rdp")
    with pytest.raises(BudgetError, match="1,000 records; 999"):
        made.replan(after=9, budgets=Budgets(LEVELS[1:]), was=OLD, independent=True)
    with pytest.raises(BudgetError, match="levels differ"):
        made.replan(after=9, budgets=OLD, was=Budgets(LEVELS * 2), independent=True)
    for places in (np.zeros(1000, dtype=int), OLD.group - 1, OLD.group + 0.5, OLD.group[:, None], OLD.group == 0):
        with pytest.raises(BudgetError, match="do not fit"):
            made.replan(after=9, budgets=OLD, was=places, independent=True)


def test_plans_for_declared_shares_are_not_changed():
    declared = {"public_shares": {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, "public_records": 1000}
    made = plan(OLD, RECIPE, "sample", "rdp", **declared)
    with pytest.raises(PlanError, match="declared shares"):
        made.replan(after=9, budgets=OLD, was=OLD, independent=True)


def test_a_changed_plan_says_what_was_charged_before_and_so_does_its_file(tmp_path):
    wishes = np.where(LEVELS == 1.0, 1.5, LEVELS)
    made, after = changed(wishes, accountant="rdp")
    assert (made.charged_before, after.plan.charged_before) == (0, 200)
    again = after.plan.replan(after=300, budgets=Budgets(wishes), was=after.group, independent=True)
    assert again.plan.charged_before == 300
    loaded = Plan.load(after.plan.save(tmp_path / "plan.json"))
    assert loaded == after.plan
    assert loaded.charged_before == 200
    # The same tables are another plan where nothing was charged before: what a ledger is bound to tells them apart.
    fresh = dataclasses.replace(after.plan, charged_before=0)
    assert fresh != after.plan
    for wrong in (-1, 1, 199, 200.5, 400):
        with pytest.raises(PlanError, match="all phases but the last, 200;"):
            dataclasses.replace(after.plan, charged_before=wrong)


def test_no_run_begins_under_a_changed_plan_for_it_would_make_the_first_steps_twice(tmp_path):
    wishes = np.where(LEVELS == 1.0, 1.5, LEVELS)  # all levels distinct: nothing but charged_before tells it apart
    made, after = changed(wishes, accountant="rdp")
    row = after.group[0]
    whole = [made.phases[0].history(0, 200), *(phase.history(row) for phase in after.plan.phases)]
    assert (
        ACCOUNTANTS["rdp"](whole, 1e-5) > 1.05 * after.plan.epsilons[row]
    )  # what was made, then the plan from its start

    folder = RunFolder.create(tmp_path / "run", made, {})
    Ledger(made, folder.ledger).suspend()
    for begin in (
        lambda: Ledger(after.plan),
        lambda: Ledger(after.plan, tmp_path / "ledger.jsonl"),
        lambda: Ledger.resume(after.plan, folder.ledger),
        lambda: RunFolder.create(tmp_path / "new", after.plan, {}),
        lambda: RunFolder.reopen(folder.path, after.plan),
    ):
        with pytest.raises(PlanError, match=r"changed after 200 steps of an earlier run.*epsilons\.plan"):
            begin()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("resume", [False, True])
def test_neither_make_private_nor_fit_trains_under_a_changed_plan(tmp_path, resume):
    torch = pytest.importorskip("torch")
    from epsilons import fit, make_private

    wishes = np.where(LEVELS == 1.0, 1.5, LEVELS)
    _, after = changed(wishes, accountant="rdp")
    model, data = torch.nn.Linear(2, 2), (torch.zeros(1000, 2), torch.arange(1000) % 2)
    optimizer, options = torch.optim.SGD(model.parameters(), lr=0.1), {"budgets": Budgets(wishes)}
    if resume:
        options |= {"resume": True, "run_dir": tmp_path / "run"}
    with pytest.raises(PlanError, match="changed after 200 steps"):
        make_private(model, optimizer, data, after.plan, **options)
    with pytest.raises(PlanError, match="changed after 200 steps"):
        fit(model, data, after.plan, lr=0.1, **options)
    assert not list(tmp_path.iterdir())


def test_training_refuses_a_plan_in_which_two_pasts_share_a_budget():
    checks = pytest.importorskip("epsilons.training.validation")
    wishes = LEVELS.copy()
    wishes[:100] = 2.0
    _, after = changed(wishes)
    with pytest.raises(DataError, match="does not fit"):
        checks.groups_of(Budgets(wishes), after.plan, 1000)


def check(after, wishes):
    """Nobody above the promise by Opacus' PRV, which shares nothing with the planner."""
    for row in set(after.group.tolist()):
        history = tuple(
            (float(p.sample_rate[row]), float(p.noise_multiplier[row]), p.steps)
            for p in after.plan.phases
            if p.sample_rate[row] > 0
        )
        lower, estimate, _ = oracles.prv(history, 1e-5, error=0.02)
        assert lower <= after.plan.epsilons[row]
        assert estimate <= after.plan.epsilons[row] * (1 + 5e-5)
    kept = ~(after.withdrawn | after.unmet)[after.group]
    np.testing.assert_array_equal(after.plan.epsilons[after.group][kept], wishes[kept])


CHANGES = given(
    st.sampled_from(["sample", "scale", "mix"]),
    st.integers(1, 398),
    st.lists(st.sampled_from([0.4, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0]), min_size=10, max_size=10),
    st.sets(st.integers(0, 9)),
    st.integers(1, 50),
)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@settings(max_examples=3)
@CHANGES
def test_random_histories_and_changes_keep_every_new_promise(accountant, strategy, when, tenths, leaving, again):
    keeps_every_promise(accountant, strategy, when, tenths, leaving, again)


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@settings(max_examples=40)
@CHANGES
def test_many_more_histories_and_changes(accountant, strategy, when, tenths, leaving, again):
    keeps_every_promise(accountant, strategy, when, tenths, leaving, again)


def keeps_every_promise(accountant, strategy, when, tenths, leaving, again):
    made = plan(OLD, RECIPE, strategy, accountant)
    wishes = np.repeat(tenths, 100)
    gone = [i for tenth in leaving for i in range(100 * tenth, 100 * tenth + 30)]
    try:
        first = made.replan(after=when, budgets=Budgets(wishes), was=OLD, withdrawn=gone, independent=True)
    except InfeasibleBudgetError:  # not overspent yet, but this accountant certifies no more steps under the new budget
        return
    assert (first.plan.epsilon_spent() <= first.plan.epsilons).all()
    check(first, wishes)
    for row in np.flatnonzero(first.withdrawn):
        history = [
            SampledGaussian(float(p.sample_rate[row]), float(p.noise_multiplier[row]), p.steps)
            for p in first.plan.phases[:1]
        ]
        assert first.plan.epsilon_spent()[row] == pytest.approx(ACCOUNTANTS[accountant](history, 1e-5), rel=1e-9)
    # And once more, from where the first change left everyone; who left stays away.
    later = min(when + again, 399)
    if later > when:
        stays = first.plan.epsilons[first.group]
        second = first.plan.replan(
            after=later, budgets=Budgets(stays), was=first.group, withdrawn=gone, independent=True
        )
        assert (second.plan.epsilon_spent() <= second.plan.epsilons).all()
        np.testing.assert_array_equal(second.plan.epsilons[second.group], stays)
