"""The audit, end to end: honest runs pass, planted bugs are named, and nothing of it needs a switch in the library."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import nn
from typer.testing import CliRunner

import epsilons
from epsilons import auditing
from epsilons.auditing import reestimate
from epsilons.cli import app
from epsilons.errors import DataError, InputError, ModelError
from epsilons.training import private as private_module
from epsilons.training.clipping import loop, vmap
from epsilons.training.clipping.engine import clip_factors
from epsilons.training.clipping.ghost import engine as ghost_engine
from epsilons.training.randomness import Randomness

LEVELS = {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}
STEPS, RATE = 40, 0.05


def plan_of(strategy: str = "scale", steps: int = STEPS, accountant: str = "pld") -> epsilons.Plan:
    budgets = epsilons.Budgets.from_shares(LEVELS, records=2_000, seed=0)
    recipe = epsilons.Recipe(steps=steps, batch_size=RATE * 2_000, clip_norm=0.5)
    return epsilons.plan(budgets, recipe, strategy, accountant)


@pytest.fixture(scope="module")
def plan() -> epsilons.Plan:
    return plan_of()


def audited(plan: epsilons.Plan, seed: int = 0, canaries: int = 250, **more) -> auditing.AuditResult:
    return epsilons.audit(plan, canaries=canaries, seed=seed, **more)


@pytest.fixture(scope="module")
def honest(plan) -> auditing.AuditResult:
    return audited(plan)


def named(findings: auditing.AuditResult, status: str = "too much") -> set[tuple[str, int | None, str | None]]:
    return {(m.what, m.group, m.tensor) for m in findings.retelling.measures if m.status == status}


# -- planted bugs: each is put into a copy of the library, not switched on in it -------------------------------------


def plant_noise(monkeypatch, by: float) -> None:
    true = Randomness.noise
    monkeypatch.setattr(Randomness, "noise", lambda self, *address: by * true(self, *address))


def plant_clip(monkeypatch, plan: epsilons.Plan, group: int, by: float) -> None:
    true, own = clip_factors, plan.clip_norm[group]

    def wrong(squared_norm, clip_norm, weight):
        mine = torch.isclose(clip_norm, torch.tensor(own, dtype=clip_norm.dtype))
        return true(squared_norm, torch.where(mine, clip_norm * by, clip_norm), weight)

    for module in (loop, vmap, ghost_engine):
        monkeypatch.setattr(module, "clip_factors", wrong)


# -- honest runs -----------------------------------------------------------------------------------------------------


def test_an_honest_run_is_consistent_and_accounts_for_what_was_planned(plan, honest):
    assert honest.verdict == "consistent"
    assert honest.holds
    assert honest.retelling.deviations == ()
    np.testing.assert_allclose(honest.retelling.epsilon, plan.epsilons, rtol=0.06)
    assert [g.epsilon for g in honest.groups] == list(plan.epsilons)
    for g in honest.groups:
        assert g.canaries == 250
        assert 80 < g.included < 170  # 5.7 standard deviations of a fair coin's count
        assert 0 <= g.one_run <= g.epsilon
        assert g.one_run_fdp <= g.epsilon
        assert g.gaussian_bound <= g.gaussian_estimate
        # ± 4.5 standard errors of the distance between 250 canaries
        assert g.mu == pytest.approx(g.planned_mu, abs=4.5 * np.sqrt(4 / 250))


@pytest.mark.parametrize("strategy", ["uniform", "sample", "scale"])
def test_every_strategy_is_found_as_planned(strategy):
    findings = audited(plan_of(strategy, accountant="rdp"), seed=1, canaries=60)
    assert findings.holds
    assert findings.retelling.deviations == ()


def test_no_canary_knows_its_coin_from_anything_but_the_run(plan):
    """With the noise drowned in more noise, nothing is left: the bounds of no signal are 0."""
    with pytest.MonkeyPatch.context() as patch:
        plant_noise(patch, 300.0)
        findings = audited(plan, seed=2, alpha=1e-4)
    for g in findings.groups:
        assert g.one_run == g.one_run_fdp == 0.0
        assert abs(g.mu) < 4.5 * np.sqrt(4 / 250)
    assert findings.verdict == "consistent"
    assert named(findings) == set()
    assert {("noise_std", None, "block.weight")} <= named(findings, "differs")


def test_a_bound_above_what_is_certified_is_told_even_where_the_verdict_lets_it_pass(honest):
    assert not any("lies above" in sentence for sentence in honest.sentences)
    one, *others = honest.groups
    above = replace(honest, groups=(replace(one, one_run=one.epsilon_spent + 0.01), *others))
    assert above.verdict == "consistent"
    (told,) = [sentence for sentence in above.sentences if "lies above" in sentence]
    assert told.startswith("The one-run bound of epsilon = 1 lies above what the plan certifies.")


def test_an_attack_of_ones_own_that_finds_few_canaries_in_the_clear_is_called_violated(plan):
    """Its scores are on a scale of their own, and say nothing of 24 canaries in 25."""

    def few(plan: epsilons.Plan, setting: auditing.Setting) -> auditing.Evidence:
        found = auditing.ATTACKS["canaries"](plan, replace(setting, canaries=30))
        rng = np.random.default_rng(0)
        group = np.repeat(np.arange(3), 1000)
        included = rng.random(3000) < 0.5
        score = rng.uniform(0, 0.01, 3000)
        clear = (group == 0) & (rng.random(3000) < 0.04)
        score[clear] = np.where(included[clear], 1.0, -1.0)
        return replace(found, scores=auditing.Scores(group, included, score))

    findings = epsilons.audit(plan, few, seed=0)
    assert [g.group for g in findings.violated] == [0]
    assert findings.groups[0].one_run > findings.groups[0].epsilon_spent


def test_an_audit_is_repeated_by_its_seed_and_differs_without(plan, honest):
    again = audited(plan)
    assert again.to_dict() == honest.to_dict()
    other = audited(plan, seed=7)
    assert other.to_dict()["groups"] != honest.to_dict()["groups"]


def test_the_engines_agree_on_the_scores(plan):
    setting = {"canaries": 30, "seed": 3}
    short = replace(plan, phases=(replace(plan.phases[0], steps=8),))
    ghostly, fast, slow = (
        auditing.ATTACKS["canaries"](
            short, auditing.Setting(performance=epsilons.Performance(engine=engine), **setting)
        ).scores
        for engine in ("ghost", "vmap", "loop")
    )
    np.testing.assert_allclose(fast.score, slow.score, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ghostly.score, slow.score, rtol=1e-5, atol=1e-6)


# -- planted bugs ----------------------------------------------------------------------------------------------------


def test_half_the_noise_is_called_violated_and_every_tensor_named(plan, monkeypatch):
    plant_noise(monkeypatch, 0.5)
    findings = audited(plan)
    assert findings.verdict == "violated"
    assert {("noise_std", None, name) for name in ("body.weight", "body.bias", "block.weight")} <= named(findings)
    assert (findings.retelling.epsilon > 1.8 * plan.epsilons).all()


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_clip_norm_three_times_too_large_is_called_violated_in_that_group_alone(plan, monkeypatch, group):
    plant_clip(monkeypatch, plan, group, 3.0)
    findings = audited(plan)
    assert [g.group for g in findings.violated] == [group]
    assert named(findings) == {("contribution", group, None)}


@pytest.mark.parametrize(("group", "seed"), [(0, 0), (1, 1), (2, 2), (0, 3)])
def test_a_clip_norm_one_percent_too_large_is_named_by_the_trace(plan, monkeypatch, group, seed):
    plant_clip(monkeypatch, plan, group, 1.01)
    findings = audited(plan, seed, canaries=30)
    assert named(findings) == {("contribution", group, None)}
    assert not findings.holds


@pytest.mark.parametrize("seed", range(3))
def test_noise_three_percent_too_small_is_named_by_the_trace(plan, monkeypatch, seed):
    """40 steps resolve the noise on the block's 750 coordinates to 0.41 %: 3 % are seven standard errors."""
    plant_noise(monkeypatch, 0.97)
    findings = audited(plan, seed)
    assert ("noise_std", None, "block.weight") in named(findings)


def test_a_rate_one_third_too_high_is_named_by_the_trace(plan, monkeypatch):
    from epsilons.training import sampling

    true = sampling.thresholds
    monkeypatch.setattr(sampling, "thresholds", lambda rates: true(np.asarray(rates) * np.array([1, 4 / 3, 1])))
    findings = audited(plan)
    assert named(findings) == {("sample_rate", 1, None), ("drawn_twice", 1, None)}


def test_a_missing_noise_on_one_tensor_is_named_and_accounted(plan, monkeypatch):
    """The tensor's part of the noise is blanked: nobody's budget is finite any more."""
    true = Randomness.noise

    def gap(self, *address):
        values = true(self, *address)
        values[:640] = 0.0
        return values

    monkeypatch.setattr(Randomness, "noise", gap)
    findings = audited(plan)
    assert named(findings) == {("noise_std", None, "body.weight")}
    assert (findings.retelling.epsilon > 100 * plan.epsilons).all()


def antithetic(true):
    """Every other step's noise is the last one's, sign flipped: two updates add up to bare sums."""

    def noise(self, phase, step, count):
        return true(self, phase, step, count) if step % 2 == 0 else -true(self, phase, step - 1, count)

    return noise


def periodic(true):
    return lambda self, phase, step, count: np.repeat(true(self, phase, step, -(-count // 3)), 3)[:count]


def the_same_for_every_tensor(true):
    def noise(self, phase, step, count):
        values = true(self, phase, step, count)
        values[650:] = values[: count - 650]  # body.weight and body.bias are 650
        return values

    return noise


@pytest.mark.parametrize(
    ("bug", "what"),
    [
        (antithetic, "noise_step_to_step"),
        (periodic, "noise_place_to_place"),
        (the_same_for_every_tensor, "noise_tensor_to_tensor"),
    ],
)
def test_noise_of_the_right_size_that_is_not_fresh_is_named_by_the_trace(plan, monkeypatch, bug, what):
    monkeypatch.setattr(Randomness, "noise", bug(Randomness.noise))
    findings = audited(plan, canaries=50)
    assert (what, None, None) in named(findings)
    assert not findings.holds


@pytest.mark.parametrize("values", [2, 50, reestimate.FEWEST_PAIRS + 1])
def test_fresh_noise_is_called_alike_as_rarely_as_promised_from_the_fewest_pairs_on(values):
    """Of neighbouring values, whose pairs overlap, in as many steps as it takes."""
    rng = np.random.default_rng(values)
    steps = math.ceil(reestimate.FEWEST_PAIRS / (values - 1))
    runs, found = 20_000, []
    for _ in range(20):
        noise = rng.standard_normal((runs // 20, steps, values), dtype=np.float32)
        one, other = noise[..., :-1], noise[..., 1:]
        products = [np.einsum("rsv,rsv->r", a, b) for a, b in ((one, other), (one, one), (other, other))]
        likeness = products[0] / np.sqrt(products[1] * products[2])
        pairs = steps * (values - 1)
        found += [reestimate.likeness_p_value(float(one), pairs) for one in likeness]
    for level in (5e-2, 5e-3, 5e-4):
        alarms = np.count_nonzero(np.array(found) < level)
        assert binom.isf(1 - 1e-5, runs, 0.8 * level) <= alarms <= binom.isf(1e-5, runs, level), level


def test_coins_that_fall_alike_in_every_step_are_named_by_the_trace(plan, monkeypatch):
    from epsilons.training.sampling import Draws

    true = Draws.at
    monkeypatch.setattr(Draws, "at", lambda self, phase, step: true(self, phase, 0))
    findings = audited(plan, canaries=50)
    assert {("drawn_twice", group, None) for group in range(3)} <= named(findings)


def test_records_found_in_more_sums_than_there_are_have_spent_without_bound(plan):
    trace = auditing.ATTACKS["canaries"](plan, auditing.Setting(canaries=20, seed=0)).trace
    every = replace(trace, drawn=trace.records[None] * trace.updates[:, None] + 1)
    assert np.isinf(reestimate.retell(every).epsilon).all()


def test_a_sum_that_is_applied_twice_is_named_by_the_trace(monkeypatch):
    plan = plan_of(steps=150)
    true = private_module.Private._update

    def twice(self):
        self._noisy_update.sum = [2 * part for part in self._noisy_update.sum]
        true(self)

    monkeypatch.setattr(private_module.Private, "_update", twice)
    findings = audited(plan)
    assert {("arrival", 0, None), ("arrival", 1, None), ("arrival", 2, None)} <= named(findings)
    assert (findings.retelling.epsilon > 1.7 * plan.epsilons).all()


def test_steps_beyond_the_plan_would_be_counted(honest, plan):
    """The library refuses them; a trace that has them says so."""
    trace = auditing.ATTACKS["canaries"](plan, auditing.Setting(canaries=20, seed=0)).trace
    more = replace(trace, updates=trace.updates + 1)
    assert ("updates", "too much") in {(m.what, m.status) for m in reestimate.retell(more).measures}


# -- the paper's CIFAR10 A plan ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["none", "noise", "clip"])
def test_audits_of_the_paper_s_cifar10_plan_come_out_right(bug, monkeypatch):
    """PLD, Scale, rate 1/49, 1,470 steps, 1,000 canaries per group; experiments/audit_power.py repeats it 20 times."""
    budgets = epsilons.Budgets.from_shares(LEVELS, records=50_000, seed=0)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=1_470, batch_size=50_000 / 49, clip_norm=0.4))
    if bug == "noise":
        plant_noise(monkeypatch, 0.5)
    if bug == "clip":
        plant_clip(monkeypatch, plan, 1, 2.0)
    findings = audited(plan, canaries=1_000)
    assert [g.group for g in findings.violated] == {"none": [], "noise": [0, 1, 2], "clip": [1]}[bug]
    if bug == "none":
        np.testing.assert_allclose(findings.retelling.epsilon, plan.epsilons, rtol=0.03)
        # four standard errors of the distance
        for g in findings.groups:
            assert g.mu == pytest.approx(g.planned_mu, abs=4 * np.sqrt(4 / 1_000))


# -- several phases, few groups, own models ----------------------------------------------------------------------------


def test_phases_are_measured_apart(plan):
    """Two phases, the second without the strictest group; half the steps each, so that nobody overspends."""
    first = replace(plan.phases[0], steps=STEPS // 2)
    second = replace(first, sample_rate=np.array([0.0, RATE, RATE]))
    findings = audited(replace(plan, phases=(first, second)), canaries=60)
    assert findings.holds
    assert findings.retelling.deviations == ()
    rates = {(m.phase, m.group): m.measured for m in findings.retelling.measures if m.what == "sample_rate"}
    assert rates[1, 0] == 0.0
    assert rates[0, 0] > 0.04
    assert findings.retelling.epsilon[0] < 0.85 * findings.retelling.epsilon[1]


def test_groups_can_be_chosen_and_rare_ones_are_left_out():
    budgets = epsilons.Budgets(np.array([1.0] * 300 + [2.0] * 5 + [3.0] * 300), delta=1e-5)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=20, batch_size=30, clip_norm=1.0), "scale", "rdp")
    common = audited(plan, canaries=20)
    assert [g.epsilon for g in common.groups] == [1.0, 3.0]
    assert common.not_audited == 1
    rare = audited(plan, canaries=20, groups=[1])
    assert [g.epsilon for g in rare.groups] == [2.0]
    assert "that of group 1" in str(rare)
    assert "epsilon = 2" not in str(rare)
    with pytest.raises(InputError, match="groups 0 to 2"):
        audited(plan, groups=[3])
    everyone_alone = epsilons.Budgets(np.linspace(1, 2, 25), delta=1e-5)
    singles = epsilons.plan(everyone_alone, epsilons.Recipe(steps=5, batch_size=3, clip_norm=1.0), "uniform", "rdp")
    with pytest.raises(InputError, match="20 or more records"):
        audited(singles)


def test_what_gives_away_budgets_that_few_hold_is_saved_but_not_printed(tmp_path):
    """Under uniform everybody spends what the strictest asked for, so any spend, noise or bound may tell it."""
    budgets = epsilons.Budgets(np.array([0.7] * 3 + [2.0] * 300 + [3.0] * 300), delta=1e-5)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=20, batch_size=60, clip_norm=1.0), "uniform", "rdp")
    findings = audited(plan, canaries=20)
    saved = plan.save(tmp_path / "plan.json")
    arguments = ["audit", str(saved), "--canaries", "20", "--seed", "0"]
    printed = CliRunner().invoke(app, arguments)
    assert printed.exit_code == 0
    inside = json.loads(CliRunner().invoke(app, [*arguments, "--json", "--quiet"]).output)
    assert [g["epsilon_spent"] for g in inside["groups"]] == [pytest.approx(0.7, rel=1e-4)] * 2
    assert all(measure["planned"] is not None for measure in inside["trace"])
    for text in (str(findings), printed.output):
        assert "fewer than 20 records share some budget" in text
        numbers = re.findall(r"\d[\d.,:]*", text.split("The scores are")[0])
        p_values = [f"{g.p_value:.2g}" for g in findings.groups]
        # Levels, canaries and steps, digits, the model's parameters, and progress on stderr with its time left.
        assert set(numbers) - set(p_values) <= {"2", "3", "20", "1,437", "650", "20/20", "0:00:00"}


def test_a_model_and_data_of_one_s_own_are_trained_along_and_left_as_they_were(plan):
    rng = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(400, 6, generator=rng), torch.randint(0, 3, (400,), generator=rng)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    before = [p.clone() for p in model.parameters()]
    findings = audited(plan, canaries=40, model=model, dataset=(inputs, targets))
    assert findings.holds
    assert "400 real records" in findings.setting["trained"]
    assert {m.tensor for m in findings.retelling.measures if m.tensor} == {
        "body.0.weight",
        "body.0.bias",
        "body.2.weight",
        "body.2.bias",
        "block.weight",
    }
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_findings_do_not_depend_on_the_values_of_real_records(plan):
    model = nn.Linear(6, 3)
    targets = torch.arange(400) % 3
    found = [
        audited(plan, canaries=40, model=model, dataset=(scale * torch.ones(400, 6), targets)).to_dict()
        for scale in (1.0, -50.0)
    ]
    for one, other in zip(*(f["groups"] for f in found), strict=True):
        assert one["tests"] == other["tests"]
        assert (one["mu"], one["one_run"]) == (other["mu"], other["one_run"])


def test_what_cannot_be_audited_is_refused(plan, tmp_path):
    with pytest.raises(InputError, match="at least 10 canaries"):
        audited(plan, canaries=5)
    with pytest.raises(InputError, match="No attack is called 'guessing'"):
        audited(plan, attack="guessing")
    with pytest.raises(InputError, match="No loss is called"):
        audited(plan, loss="hinge")
    with pytest.raises(InputError, match="alpha must lie"):
        audited(plan, alpha=0.7)
    with pytest.raises(DataError, match="needs a dataset"):
        audited(plan, model=nn.Linear(2, 2))
    with pytest.raises(ModelError, match="needs a model"):
        audited(plan, dataset=(torch.zeros(4, 2), torch.zeros(4)))
    with pytest.raises(InputError, match="neither a run's folder nor a saved plan"):
        epsilons.audit(tmp_path / "nowhere")


def test_an_attack_of_one_s_own_is_judged_alike(plan):
    def boast(plan, setting):
        evidence = auditing.ATTACKS["canaries"](plan, setting)
        known = evidence.scores
        return replace(evidence, scores=replace(known, score=known.included * 100.0))

    findings = audited(plan, attack=boast, canaries=200)
    assert findings.attack == "boast"
    assert len(findings.violated) == 3
    assert all(g.one_run > 1 for g in findings.groups)


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    plan = plan_of(steps=10)
    folder = tmp_path_factory.mktemp("runs") / "first"
    rng = np.random.default_rng(0)
    inputs, targets = torch.from_numpy(rng.normal(size=(2_000, 4))).float(), torch.arange(2_000) % 2
    budgets = epsilons.Budgets.from_shares(LEVELS, records=2_000, seed=0)
    epsilons.fit(
        nn.Linear(4, 2),
        (inputs, targets),
        plan,
        budgets=budgets,
        run_dir=folder,
        performance=epsilons.Performance(engine="loop"),
        seed=0,
    )
    return folder


def test_findings_go_into_the_run_s_folder_under_its_own_engine(run):
    findings = epsilons.audit(run, canaries=20, seed=0)
    assert findings.setting["engine"] == "loop"
    written = json.loads((run / "audit.json").read_text())
    assert written == json.loads(json.dumps(findings.to_dict()))
    assert written["schema"] == 1
    assert written["plan"] == epsilons.Plan.load(run / "plan.json").digest
    assert {g["epsilon"] for g in written["groups"]} == set(LEVELS)
    assert (run / "audit.svg").read_text().startswith("<?xml")
    epsilons.report(run)  # a report of an audited run is made as before


def test_the_command_prints_the_findings_and_says_by_its_code_what_came_of_it(plan, tmp_path, monkeypatch):
    saved = plan.save(tmp_path / "plan.json")
    arguments = ["audit", str(saved), "--canaries", "40", "--seed", "0"]
    result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "f.json"), "--picture", str(tmp_path / "f.svg")])
    assert result.exit_code == 0
    assert "consistent with the plan" in result.output
    assert json.loads((tmp_path / "f.json").read_text())["verdict"] == "consistent"
    assert "promised" in (tmp_path / "f.svg").read_text()
    plant_noise(monkeypatch, 0.3)
    broken = CliRunner().invoke(app, [*arguments, "--json"])
    assert isinstance(broken.exception, epsilons.errors.PromiseError)
    assert broken.exception.exit_code == 3
    assert "noise_std of block.weight (too much)" in str(broken.exception)


def test_a_picture_is_an_svg(honest, tmp_path):
    assert auditing.draw(honest, tmp_path / "a.svg").read_text().count("<path") > 10
    with pytest.raises(InputError, match=r"ends in \.svg"):
        auditing.draw(honest, tmp_path / "a.png")


def test_findings_print_as_tables_and_never_in_a_repr(honest):
    text = str(honest)
    for word in ("Gaussian ≥", "noise_std of block.weight", "never that it is kept"):
        assert word in text
    assert "epsilon=" not in repr(honest)
