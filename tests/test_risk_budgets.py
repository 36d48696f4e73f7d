"""Budgets by risk: every certified value lies at or below what its tier declares, by dp-accounting and closed forms."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.stats import norm
from typer.testing import CliRunner

import oracles
from epsilons import Budgets, Plan, Recipe, Risk, SampledGaussian, plan
from epsilons.accounting import noise_for, pld
from epsilons.accounting.calibration import noises_for
from epsilons.auditing.membership import MembershipResult, Signals
from epsilons.auditing.membership.analysis import analyse
from epsilons.cli import app
from epsilons.configs.config import BudgetsSection
from epsilons.core.disclosure import display_rows, tier_of
from epsilons.core.files import as_json
from epsilons.errors import BudgetError, BudgetExceededError, DataError, InfeasibleBudgetError, PlanError
from epsilons.planning import advise, risk, risk_profile
from epsilons.planning.display import comparison_table, phase_tables, spend_table, spent_bound
from epsilons.planning.plan_file import sealed
from epsilons.reporting.html import attack_page, roc_picture
from epsilons.reporting.membership import DECLARED, load
from epsilons.reporting.plan_page import About, make_page
from epsilons.reporting.plan_words import curve_of
from epsilons.training.validation import groups_of

DELTA = 1e-5
RISKS = {"strict": Risk(odds=55), "both": Risk(odds=60, tpr=0.03, at_fpr=0.01), "open": Risk(tpr=0.05, at_fpr=0.01)}
RECIPE = Recipe(steps=100, batch_size=100, clip_norm=1.0)
SHARES = {"strict": 0.3, "both": 0.2, "open": 0.5}

#: The points at which the oracle looks for the most powerful test.
EVERYWHERE = np.unique(np.concatenate([np.linspace(-12, 12, 6001), *np.outer([-1, 1], np.geomspace(1e-5, 1, 4000))]))


def budgets(tail: tuple[float, float] = (4.0, DELTA), **risks: Risk) -> Budgets:
    return Budgets.by_risk(
        risks or RISKS, SHARES if not risks else dict.fromkeys(risks, 1 / len(risks)), tail=tail, records=1000
    )


# -- random rosters and risks, and an oracle that shares nothing with the library -----------------------


def some_risk(draw: np.random.Generator) -> Risk:
    """Odds, an advantage, true positives at a rate, or two of them, with a tail of its own or not."""
    kind = int(draw.integers(4))
    values: dict[str, float] = {}
    if kind in (0, 3):
        values["odds"] = float(draw.uniform(51, 75))
    if kind == 1:
        values["advantage"] = float(draw.uniform(0.02, 0.5))
    if kind in (2, 3):
        rate = float(draw.choice([1e-3, 1e-2, 0.05]))
        values |= {"at_fpr": rate, "tpr": rate + float(draw.uniform(0.5, 5)) * rate}
    return Risk(**values, **({"epsilon": float(draw.uniform(0.3, 5))} if draw.random() < 0.3 else {}))


def some_plan(seed: int) -> Plan:
    """A plan that its strategy finds; whether one is refused as infeasible is no part of these tests."""
    draw = np.random.default_rng(seed)
    while True:
        risks = {str(i): some_risk(draw) for i in range(draw.integers(2, 5))}
        shares = draw.dirichlet(np.full(len(risks), 3.0)) * 0.8 + 0.2 / len(risks)
        records = int(draw.integers(300, 5000))
        shares_of = dict(zip(risks, shares, strict=True))
        made = Budgets.by_risk(risks, shares_of, tail=(float(draw.uniform(1, 8)), DELTA), records=records, seed=seed)
        full = draw.random() < 0.15
        recipe = Recipe(int(draw.integers(5, 200)), records if full else records * float(draw.uniform(0.01, 0.4)), 1.0)
        strategy = "scale" if full else ("scale", "sample", "mix")[seed % 3]
        try:
            return plan(made, recipe, strategy)
        except InfeasibleBudgetError:
            continue


def found(q: float, sigma: float, steps: int, rate: float) -> tuple[float, float, float]:
    """Epsilon at DELTA, advantage, and power at this false-positive rate: closed forms, or dp-accounting's."""
    if q == 1:
        mu = math.sqrt(steps) / sigma
        power = norm.cdf(norm.ppf(rate) + mu) if rate else 0.0
        return oracles.gaussian(sigma, steps, DELTA), 2 * norm.cdf(mu / 2) - 1, float(power)
    twin = oracles.dp_accounting_pld(q, sigma, steps, pld.fitted_grid(SampledGaussian(q, sigma, steps)) / 4)
    ways = [way.get_delta_for_epsilon(EVERYWHERE) for way in (twin._pmf_remove, twin._pmf_add)]
    power = max(float((np.asarray(way) + np.exp(EVERYWHERE) * rate).min()) for way in ways)
    return twin.get_epsilon_for_delta(DELTA), twin.get_delta_for_epsilon(0.0), power


def check(made: Plan) -> list[float]:
    """Compare every group with the oracle, and return the part of its binding limit that each uses."""
    used, (phase,) = [], made.phases
    for group, (advantage, rate, power) in enumerate(made.groups.limits.tolist()):
        q, sigma = float(phase.sample_rate[group]), float(phase.noise_multiplier[group])
        reached = found(q, sigma, made.steps, rate)
        limits = np.array([made.epsilons[group], advantage, power])
        certified = np.array([made.epsilon_spent()[group], *made.certified_limits[group]])
        assert (reached <= limits).all()
        assert (certified <= limits).all()
        declared = np.isfinite(limits)
        assert (certified[declared] >= np.array(reached)[declared] * (1 - 1e-9)).all()
        np.testing.assert_allclose(certified[declared], np.array(reached)[declared], rtol=5e-3)
        used.append(float((np.array(reached) / limits).max()))
    return used


@pytest.mark.parametrize("seed", range(6))
def test_every_certified_value_is_at_most_the_declared_one_and_the_binding_one_is_used_up(seed):
    assert min(check(some_plan(seed))) >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 200))
def test_the_same_for_many(seed):
    assert min(check(some_plan(seed))) >= 0.99


def test_full_batches_have_the_noise_of_the_closed_form():
    for odds, steps in product((52, 55, 65, 80), (1, 30)):
        one = Budgets.by_risk({"": Risk(odds=odds)}, {"": 1.0}, tail=(50.0, DELTA), records=1000)
        exact = math.sqrt(steps) / (2 * norm.ppf(odds / 100))
        made = plan(one, Recipe(steps, 1000, 1.0))
        assert exact <= made.noise_multiplier[0] <= exact * 1.002


SETTINGS = [(8192 / 50_000, 200), (512 / 60_000, 9375), (256 / 1437, 100)]


@pytest.mark.parametrize(("q", "steps", "advantage"), [(*SETTINGS[0], 0.05), (*SETTINGS[2], 0.3), (*SETTINGS[2], 0.1)])
def test_the_noise_is_a_quarter_of_what_an_epsilon_that_implies_the_odds_needs(q, steps, advantage):
    # An (epsilon, delta) promise implies an advantage of (e^epsilon - 1 + 2 delta)/(e^epsilon + 1).
    implied = math.log((1 - 2 * DELTA + advantage) / (1 - advantage))
    terms = np.array([[DELTA, 50.0, advantage, 0.0, math.inf]])
    direct = float(noises_for(np.array([50.0]), q, steps, terms, pld.epsilon)[0])
    assert noise_for(implied, q, steps, DELTA, pld.epsilon) >= 3.8 * direct


# -- which limit binds, several runs, and other people's choices -----------------------------------------


def test_each_limit_binds_where_it_is_the_narrowest_and_the_tail_binds_in_every_tier():
    tiers = {"odds": Risk(odds=53), "rate": Risk(odds=90, tpr=0.02, at_fpr=0.01), "far": Risk(odds=90, epsilon=0.4)}
    made = plan(budgets(**tiers), RECIPE)
    place = {tier: made.epsilons.tolist().index(level) for tier, level in budgets(**tiers).contract.levels.items()}
    parts = np.column_stack([made.epsilon_spent() / made.epsilons, made.certified_limits / made.groups.limits[:, ::2]])
    assert [parts[place[tier]].argmax() for tier in tiers] == [1, 2, 0]
    np.testing.assert_allclose(parts.max(axis=1), 1, atol=2e-5)
    np.testing.assert_allclose(made.part_used, parts.max(axis=1))
    assert "unused" not in made.summary()


def test_all_runs_together_keep_the_declared_risk():
    made = plan(budgets(), RECIPE, runs=3)
    (phase,) = made.phases
    for group, (_, rate, _) in enumerate(made.groups.limits.tolist()):
        reached = found(float(phase.sample_rate[group]), float(phase.noise_multiplier[group]), 300, rate)
        assert (reached[1:] <= made.groups.limits[group, ::2]).all()
        assert max(reached[1:] / made.groups.limits[group, ::2]) >= 0.99


def test_others_cannot_push_a_tier_beyond_what_it_declares():
    for loosest in (0.06, 0.3, 0.9):
        tiers = RISKS | {"open": Risk(tpr=loosest, at_fpr=0.01)}
        for strategy in ("sample", "mix"):
            made = plan(Budgets.by_risk(tiers, SHARES, tail=(8.0, DELTA), records=1000), RECIPE, strategy)
            assert (made.certified_limits <= made.groups.limits[:, ::2]).all()
            assert sorted(risk_profile.right_guesses(made))[0] == 55


def test_sample_and_mix_take_a_cap_on_the_excess():
    skewed = Budgets.from_shares({0.5: 0.5, 8.0: 0.5}, records=1000)
    free = plan(skewed, RECIPE, "sample")
    worst = max(risk_profile.excess(risk(free)))
    assert worst > 0.01
    with pytest.raises(PlanError, match=r"max_excess = 0\.01"):
        plan(skewed, RECIPE, "sample", max_excess=0.01)
    assert plan(skewed, RECIPE, "sample", max_excess=worst) == free
    with pytest.raises(PlanError, match="at least 0"):
        plan(skewed, RECIPE, "sample", max_excess=-1.0)


@pytest.mark.parametrize("strategy", ["uniform", "sequential", "scale-arithmetic", "exclude"])
def test_every_strategy_keeps_risks(strategy):
    made = plan(budgets(), RECIPE, strategy)
    for group, limits in enumerate(made.groups.limits):
        profile = risk_profile.Profile(made.history(group))
        assert profile.advantage <= limits[0]
        assert profile.power(limits[1]) <= limits[2] * 1.01  # on a coarser grid


# -- budgets ---------------------------------------------------------------------------------------------


def test_tiers_with_one_tail_stay_apart_and_none_is_told_more_than_the_tail():
    made = budgets()
    assert len(made.groups) == 3
    assert (made.epsilons <= 4).all()
    np.testing.assert_allclose(made.epsilons, 4, rtol=1e-14)
    assert made.groups.limits[0].tolist()[0] == pytest.approx(0.1)
    same = Budgets.by_risk({"a": Risk(odds=55), "b": Risk(odds=55)}, ["a", "b"] * 20, tail=(4, DELTA))
    assert len(same.groups) == 1


def test_a_tier_of_each_record_a_file_and_a_subset_give_the_same_groups(tmp_path):
    rows = ["open", "strict", "open", "both"] * 10
    made = Budgets.by_risk(RISKS, rows, tail=(4.0, DELTA))
    (tmp_path / "wishes.csv").write_text("who,tier\n" + "".join(f"{i},{row}\n" for i, row in enumerate(rows)))
    with_tails = {name: replace(one, epsilon=4.0) for name, one in RISKS.items()}
    read = Budgets.from_csv(tmp_path / "wishes.csv", column="tier", tiers=with_tails, delta=DELTA)
    persons = Budgets.from_csv(tmp_path / "wishes.csv", column="tier", tiers=with_tails, delta=DELTA, person="who")
    for other in (read, persons, persons.without_ids(), made.subset(np.arange(40)), Budgets.of_groups(made.groups)):
        assert other.groups == made.groups
    assert made.subset([1, 5]).groups.limits.tolist() == made.groups.limits[:1].tolist()
    assert made.groups != Budgets(made.epsilons[made.group], DELTA).groups


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Risk(odds=50), "odds must be"),
        (lambda: Risk(odds=100), "odds must be"),
        (lambda: Risk(advantage=math.nan), "advantage must be"),
        (lambda: Risk(odds=55, advantage=0.1), "one of them"),
        (lambda: Risk(tpr=0.05), "both"),
        (lambda: Risk(at_fpr=0.05), "both"),
        (lambda: Risk(tpr=0.01, at_fpr=0.01), "above"),
        (lambda: Budgets.by_risk(RISKS, ["open"], tail=(4.0,)), "one epsilon at one delta"),
        (lambda: Budgets.by_risk(RISKS, ["open"], tail=4.0), "one epsilon at one delta"),
        (lambda: Budgets.by_risk(RISKS, ["shut"], tail=(4.0, DELTA)), "tier without a risk"),
        (lambda: Budgets.by_risk(RISKS, {"shut": 1.0}, tail=(4.0, DELTA), records=9), "'shut' is not"),
        (lambda: Budgets.by_risk({"a": {"odd": 55}}, ["a"], tail=(4.0, DELTA)), "has no 'odd'"),
        (lambda: Budgets.by_risk(RISKS, ["open", "both"], tail=(4.0, DELTA), ids=["ann", "ann"]), "budgets"),
    ],
)
def test_what_is_no_risk_is_refused(make, words):
    with pytest.raises(BudgetError, match=words):
        make()


def test_tiers_in_a_file_need_a_tail_one_delta_and_no_order(tmp_path):
    (tmp_path / "wishes.csv").write_text("who,tier,delta\n1,open,1e-5\n2,strict,1e-5\n")
    tails = {name: replace(one, epsilon=4.0) for name, one in RISKS.items()}
    for options in ({"tiers": RISKS}, {"tiers": tails, "delta_column": "delta"}, {"tiers": tails, "delta": [1e-5] * 2}):
        with pytest.raises(BudgetError, match="delta"):
            Budgets.from_csv(tmp_path / "wishes.csv", column="tier", **options)
    with pytest.raises(BudgetError, match="conflict"):
        Budgets.from_csv(tmp_path / "wishes.csv", column="tier", tiers=tails, person="who", conflict="strictest")


@pytest.mark.parametrize("accountant", ["rdp", "filter", lambda history, delta: pld.epsilon(history, delta)])
def test_other_accountants_take_epsilon_and_delta_only(accountant):
    with pytest.raises(PlanError, match=r"\(epsilon, delta\) only"):
        plan(budgets(), RECIPE, accountant=accountant)
    with pytest.raises(PlanError, match=r"\(epsilon, delta\) only"):
        replace(plan(budgets(), RECIPE), accountant="rdp", accountant_fn=None)


def test_declared_shares_are_of_tiers_and_name_everyone_s():
    some = budgets().subset(np.flatnonzero(budgets().group < 2))
    declared = plan(some, RECIPE, public_shares=SHARES, public_records=1000)
    assert declared.counts.tolist() == budgets().counts.tolist()
    assert declared.phases[0].to_dict() == plan(budgets(), RECIPE).phases[0].to_dict()
    assert set(groups_of(some, declared, len(some))) == {0, 1}
    with pytest.raises(BudgetError, match="not among the declared"):
        plan(budgets(), RECIPE, public_shares={"strict": 1.0}, public_records=1000)


def test_a_plan_is_for_budgets_that_declare_the_same():
    made = plan(budgets(), RECIPE)
    assert groups_of(budgets(), made, 1000).tolist() == budgets().group.tolist()
    narrower = Budgets.by_risk(RISKS | {"strict": Risk(odds=54)}, SHARES, tail=(4.0, DELTA), records=1000)
    with pytest.raises(DataError, match="risks"):
        groups_of(narrower, made, 1000)
    with pytest.raises(DataError, match="risks"):
        groups_of(budgets(), plan(Budgets(budgets().epsilons[budgets().group], DELTA), RECIPE), 1000)


# -- files, words, the command line ----------------------------------------------------------------------


def test_a_plan_file_states_and_verifies_what_is_declared(tmp_path):
    made = plan(budgets(), RECIPE, "mix")
    path = made.save(tmp_path / "plan.json")
    assert Plan.load(path) == made
    values = json.loads(path.read_text())
    assert values["schema"] == 6
    assert [sorted(row["risk"]) for row in values["groups"]] == [
        ["advantage", "advantage_certified"],
        ["advantage", "advantage_certified", "at_fpr", "tpr", "tpr_certified"],
        ["at_fpr", "tpr", "tpr_certified"],
    ]

    def edited(group: int, **risk: float) -> None:
        rows = json.loads(json.dumps(values))
        rows["groups"][group]["risk"] |= risk
        path.write_text(json.dumps(sealed(rows)))

    edited(0, advantage=0.09)
    with pytest.raises(BudgetExceededError, match="risk"):
        Plan.load(path)
    edited(2, tpr=0.049)
    with pytest.raises(BudgetExceededError, match="risk"):
        Plan.load(path)
    for group, claim in (
        (0, {"advantage_certified": 0.08}),
        (2, {"tpr_certified": 0.04}),
        (2, {"tpr_certified": 0.06}),
    ):
        edited(group, **claim)
        with pytest.raises(PlanError, match="certified risk"):
            Plan.load(path)
    rows = json.loads(json.dumps(values))
    del rows["groups"][1]["risk"]
    path.write_text(json.dumps(sealed(rows)))
    with pytest.raises(PlanError, match="each group"):
        Plan.load(path)
    path.write_text(json.dumps(sealed(values | {"schema": 2})))
    with pytest.raises(PlanError, match="contradicts itself"):
        Plan.load(path)


def test_the_digest_knows_risks_and_that_of_other_plans_stays():
    made = plan(budgets(), RECIPE)
    assert replace(made, groups=replace(made.groups, limits=None)).digest != made.digest
    usual = plan(Budgets.from_shares({1.0: 0.5, 2.0: 0.5}, records=1000), Recipe(20, 100, 1.0), accountant="rdp")
    assert "risk" not in json.dumps(usual.to_dict()["groups"])
    assert usual.to_dict()["schema"] == 2


def test_a_plan_above_its_risks_is_refused_though_epsilon_is_kept():
    made = plan(budgets(), RECIPE)
    (phase,) = made.phases
    for lower in (0.999, 0.9):
        louder = replace(made, phases=(replace(phase, noise_std=phase.noise_std * lower),))
        assert (louder.epsilon_spent() <= louder.epsilons).all()
        with pytest.raises(BudgetExceededError, match="risk"):
            louder.verify()


def check_limits(made: Plan, limits: list[list[dict[str, float | str | None]]]) -> None:
    """What a row states is what its group declares, and what the plan certifies of it."""
    for row, (advantage, rate, power), (reached, found) in zip(
        limits, made.groups.limits.tolist(), made.certified_limits.tolist(), strict=True
    ):
        wanted = [("right of 100", None, 50 + 50 * advantage, 50 + 50 * reached), ("TPR", rate, power, found)]
        rows = [[one[name] for name in ("what", "at_fpr", "declared", "certified")] for one in row]
        for one, other in zip(rows, [limit for limit in wanted if limit[2] < math.inf], strict=True):
            assert one[:2] == list(other[:2])
            assert one[2:] == pytest.approx(other[2:])


def test_tiers_of_one_tail_are_told_apart_by_what_they_declare():
    names = ["4, odds 55", "4, odds 60, TPR 0.03 at 0.01", "4, TPR 0.05 at 0.01"]
    wishes = budgets()
    made, advice = plan(wishes, RECIPE), advise(wishes, RECIPE)
    headers, rows = advice.table()
    assert [header for header in headers if "weight" in header] == [f"weight of {name}" for name in names]
    assert len({row[0] for row in rows}) == len(rows)
    assert "exclude below 4, TPR 0.05 at 0.01" in {row[0] for row in rows}
    tables = [table for _, table in phase_tables(made)[:1]]
    tables += [comparison_table([made]), spend_table(made, [1]), risk_profile.risk_table(made, risk(made))]
    for _, cells in tables:
        assert [row[0] for row in cells] == names
    assert [line.label for line in curve_of(made).lines] == names
    for release in (False, True):
        assert [row.label for row in display_rows(made.groups, None, release)] == names
        named = display_rows(made.groups, dict(zip(RISKS, made.epsilons.tolist(), strict=True)), release)
        assert [(row.label, row.tier) for row in named] == [("4", name) for name in RISKS]
    assert spent_bound(made, display_rows(made.groups, None, True)[0]) == "≤ 4"


def test_pages_show_what_is_declared_and_hide_what_is_certified_beside_a_rare_tier():
    made = plan(budgets(), RECIPE)
    shown = [as_json(tier.limits) for tier in make_page(made, About()).tiers]
    check_limits(made, shown)
    few = plan(Budgets.by_risk(RISKS, ["strict"] * 500 + ["open"] * 500 + ["both"], tail=(4.0, DELTA)), RECIPE)
    limits = [tier.limits for tier in make_page(few, About()).tiers]
    assert [len(one) for one in limits] == [1, 0]  # the rare tier is merged with the one after it
    assert limits[0][0].cells == ["right of 100", "55", "–"]


def test_an_attack_is_compared_with_what_its_tier_declares(tmp_path):
    wishes = Budgets.by_risk(RISKS, ["strict"] * 150 + ["both"] * 100 + ["open"] * 150, tail=(4.0, DELTA))
    made = plan(wishes, Recipe(10, 100, 1.0))
    member = np.random.default_rng(1).random((40, 400)) < 0.5
    noise = np.random.default_rng(2).normal(size=member.shape)
    signals = Signals(member, *(np.zeros(member.shape, np.float32) for _ in range(3)), np.zeros((40, 0), np.float32))

    def outcome(gain: float) -> MembershipResult:
        scores = {"one": np.float32(noise + gain * member)}
        return analyse(signals, scores, made, wishes.group, dealt_at_random=True)

    quiet, loud = outcome(0.0), outcome(9.0)
    for row, group in zip(quiet.groups, range(3), strict=True):
        curve = row.declared
        assert (row.certified.power <= curve.power).all()
        advantage, rate, power = made.groups.limits[group]
        assert (curve.power <= curve.rate + advantage).all()
        assert (curve.power[curve.rate <= rate] <= power).all()
        assert (curve.power <= math.exp(4) * curve.rate + DELTA + 1e-12).all()
        assert (np.diff(curve.power) >= 0).all()
        assert (np.diff(curve.power / curve.rate) <= 1e-12).all()  # no concave curve is cut off
    assert [sentence for sentence in quiet.sentences if "declared" in sentence] == [DECLARED]
    roc, curve = quiet.attacks[0].roc, quiet.groups[0].declared
    on_it = curve.power[np.isin(curve.rate, roc.rate)]
    assert [curve.is_exceeded_by(replace(roc, found=on_it + above)) for above in (0, 1e-9)] == [False, True]
    assert DECLARED not in loud.sentences
    assert any("one on 4, odds 55, one on 4, odds 60" in sentence for sentence in loud.sentences)
    read = load(quiet.save(tmp_path / "membership.json"))
    assert read.sentences == quiet.sentences
    np.testing.assert_array_equal(read.groups[1].declared.power, quiet.groups[1].declared.power)
    assert [bool(line.declared) for line in roc_picture(quiet).lines] == [True] * 3
    assert "declared: the promise of the tier" in attack_page(quiet)
    usual = Budgets(np.repeat([1.0, 4.0], 200), delta=DELTA)
    plain = analyse(signals, {"one": np.float32(noise)}, plan(usual, RECIPE), usual.group, dealt_at_random=True)
    assert "declare" not in " ".join(plain.sentences)
    assert "the promise of the tier" not in attack_page(plain)


def test_plan_and_guarantee_state_both():
    made = plan(budgets(), RECIPE)
    assert "right of 100" in made.summary()
    assert "0.05 at 0.01" in made.summary()
    assert "right at most n_i times in 100" in made.guarantee
    assert "Pr[M(D)∈S] ≤ e^{ε_i}" in made.guarantee
    usual = plan(Budgets.from_shares({1.0: 1.0}, records=1000), RECIPE)
    assert "n_i" not in usual.guarantee
    few = plan(Budgets.by_risk(RISKS, ["strict"] * 500 + ["open"] * 500 + ["both"], tail=(4.0, DELTA)), RECIPE)
    assert "right of 100" not in few.summary()
    _, rows = risk_profile.risk_table(few, ())
    assert "≤ 55" in [row[-1] for row in rows]


def test_the_command_line_and_a_config_take_risks(tmp_path):
    tiers = ["strict"] * 300 + ["both"] * 200 + ["open"] * 500
    (tmp_path / "wishes.csv").write_text("tier\n" + "\n".join(tiers) + "\n")
    given = ["--risks", "strict:odds=55,both:odds=60+tpr=0.03@0.01,open:tpr=0.05@0.01", "--tail", "4,1e-5"]
    recipe = ["--batch-size", "100", "--steps", "100", "--json"]
    expected = plan(budgets(), RECIPE).to_dict()["groups"]
    by_file = ["--budgets", str(tmp_path / "wishes.csv"), "--column", "tier"]
    simulated, declared = (
        (["--shares", "strict:30%,both:20%,open:50%", "--records", "1000"]),
        (["--public-shares", "strict:30%,both:20%,open:50%", "--public-records", "1000"]),
    )
    for source in (by_file, simulated, declared):
        shown = CliRunner().invoke(app, ["plan", *source, *given, *recipe])
        assert shown.exit_code == 0, shown.output
        assert json.loads(shown.output)["groups"] == expected
    shown = CliRunner().invoke(app, ["advise", *by_file, *given, "--batch-size", "100", "--steps", "100"])
    assert shown.exit_code == 0, shown.output
    for wrong in (["--risks", "strict:odds"], given[:2], ["--risks", "strict:luck=3", "--tail", "4,1e-5"]):
        assert CliRunner().invoke(app, ["plan", *by_file, *wrong, *recipe]).exit_code != 0

    risks = {
        "strict": {"odds": 55.0},
        "both": {"odds": 60.0, "tpr": 0.03, "at_fpr": 0.01},
        "open": {"tpr": 0.05, "at_fpr": 0.01},
    }
    section = BudgetsSection(column="tier", risks=risks, tail=[4.0, 1e-5])
    assert [tier_of(section.levels, level) for level in budgets().epsilons] == ["strict", "both", "open"]
    for wrong in ({"risks": risks}, {"tail": [4.0, 1e-5]}, {"risks": risks, "tail": [4.0, 1e-5], "tiers": {"a": 1.0}}):
        with pytest.raises(ValueError, match="risk"):
            BudgetsSection(**wrong)


CONFIG = """
[data]
train = "people.csv"
target = "label"
classes = ["no", "yes"]
person = "who"
[budgets]
column = "tier"
risks = {strict = {odds = 55}, open = {tpr = 0.05, at_fpr = 0.01}}
tail = [4.0, 1e-5]
[model]
name = "logistic"
[training]
steps = 20
batch_size = 20
[data.numeric]
age = [0, 100]
"""


def test_a_config_of_risks_trains_and_no_registry_takes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{i},{i % 90},{'yes' if i % 2 else 'no'},{'strict' if i % 4 else 'open'}" for i in range(200)]
    (tmp_path / "people.csv").write_text("\n".join(["who,age,label,tier", *rows]) + "\n")
    (tmp_path / "people.toml").write_text(CONFIG)
    trained = CliRunner().invoke(app, ["train", "people.toml", "-o", "run", "--quiet"])
    assert trained.exit_code == 0, trained.output
    saved = Plan.load(tmp_path / "run" / "plan.json")
    assert saved.unit == "person"
    assert len(saved.groups.declared) == 2
    assert CliRunner().invoke(app, ["report", "run"]).exit_code == 0
    inside, report = (json.loads((tmp_path / f"run/{name}.json").read_text()) for name in ("report", "report-release"))
    assert [row["tier"] for row in report["groups"]] == ["strict", "open"]
    assert report["groups"][0]["right_guesses"] == 55
    check_limits(saved, [row["limits"] for row in inside["groups"]])
    declared = [[{**limit, "certified": None} for limit in row["limits"]] for row in inside["groups"]]
    assert [row["limits"] for row in report["groups"]] == declared
    page = (tmp_path / "run" / "report-release.html").read_text()
    assert '<td data-label="limit">right of 100</td><td data-label="declared">55</td>' in page
    assert '<th scope="row" data-label="promised\u00a0ε">4 <span class="tier">open</span></th>' in page
    assert "right at most n_i times" in report["guarantee"]
    (tmp_path / "people.toml").write_text(CONFIG + "[registry]\nshare = 0.5\n")
    refused = CliRunner().invoke(app, ["train", "people.toml", "--registry", "sqlite:///people.db"])
    assert refused.exit_code != 0
    assert "tiers of (epsilon, delta) only" in str(refused.exception)
