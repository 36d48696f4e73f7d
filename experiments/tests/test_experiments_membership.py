"""Membership attacks in experiments/: arms that can be compared, blocks that are not trained twice, honest tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from epsilons.auditing.membership import shadows
from epsilons.auditing.membership.outcomes import over_targets
from epsilons.data.images import CIFAR10
from experiments import membership, reporting, running, training
from experiments.comparing import Verdict, expected, verdict
from experiments.membership_claims import measured, minus_placebo, paired, with_interval
from experiments.membership_figures import draw_membership, membership_pictures
from experiments.membership_values import TARGETS, paper_test
from experiments.results import finished
from experiments.settings import Cell, MembershipSettings, Table
from runs import DONE, TABLES, run_cell

TINY = {
    "dataset": "digits", "model": "logistic", "inputs": "pixels", "pool": 120, "population": 40, "shadows": 72,
    "attacks": ["lira-shrunk", "rmia", "lira-raw"], "steps": 3, "batch_size": 20, "clip_norm": 1.0, "lr": 1.0,
    "shares": {"10": 0.5, "20": 0.5},
}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "sample": {"strategy": "sample"},
    "scale": {"strategy": "scale"},
    "dpsgd-10": {"strategy": "uniform", "epsilon": 10.0},
    "dpsgd-20": {"strategy": "uniform", "epsilon": 20.0},
}


def arm(name: str, **changes: Any) -> MembershipSettings:
    return MembershipSettings(**TINY | ARMS[name] | changes)


def table_of(*settings: MembershipSettings) -> Table:
    arms = zip(ARMS, settings, strict=False)
    found = [Cell(name=name, title=f"Arm {name}", settings=each, seeds=(0,)) for name, each in arms]
    return Table(name="tiny", title="Tiny", note="", cells=tuple(found))


def statistics_of(line: dict[str, Any]) -> dict[str, Any]:
    return {key: line[key] for key in ("auc", "found", "difference", "target_auc", "paper_test", "accuracy")}


# -- an arm --------------------------------------------------------------------------------------------------------


def test_an_arm_keeps_statistics_of_groups_and_targets_and_nothing_of_one_record():
    settings = arm("sample", shadows=64)
    line = run_cell(settings)
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    assert MembershipSettings(**line["settings"]) == settings
    assert np.shape(line["target_auc"]["rmia"]) == (2, 64)
    by_target = np.array(line["target_auc"]["rmia"])
    assert [value for value, *_ in line["auc"]["rmia"]] == pytest.approx(by_target.mean(axis=1), abs=1e-5)
    assert 0 <= line["difference"]["lira-shrunk"]["ordered"] <= 1
    assert len(line["target_curves"]) == TARGETS
    of_one_record = {settings.pool, settings.pool // 2}
    assert not of_one_record & set(lengths({key: value for key, value in line.items() if key != "settings"}))


def lengths(value: Any) -> Iterator[int]:
    """Of all lists and tables in a value."""
    if isinstance(value, dict | list):
        yield len(value)
        for part in value.values() if isinstance(value, dict) else value:
            yield from lengths(part)


def test_all_arms_have_the_same_groups_coins_keys_records_and_start():
    dealt = {name: training.budgets_of(arm(name), TINY["pool"], 0) for name in ARMS}
    every = {name: membership.shadow_setting(arm(name), dealt[name], 0, "cpu") for name in ARMS}
    first = every["sample"]
    assert dealt["sample"].counts.tolist() == [60, 60]
    for name, other in every.items():
        assert (dealt[name].group == dealt["sample"].group).all()
        assert (other.inputs == first.inputs).all()
        for shadow in (0, 7):
            assert (other.member(shadow) == first.member(shadow)).all()
            assert other.randomness(shadow).key == first.randomness(shadow).key
        for one, two in zip(other.model.parameters(), first.model.parameters(), strict=True):
            assert torch.equal(one, two)
    assert not (first.member(0) == first.member(1)).all()


def test_a_plan_is_made_for_half_of_the_pool_and_dp_sgd_has_one_budget():
    for name in ARMS:
        dealt = training.budgets_of(arm(name), TINY["pool"], 0)
        plan = membership.plan_of(arm(name), dealt)
        assert (plan.records, plan.steps, plan.expected_batch) == (60, 3, pytest.approx(20, rel=1e-3))
        assert plan.epsilons.tolist() == {"dpsgd-10": [10], "dpsgd-20": [20]}.get(name, [10, 20])
        assert (plan.epsilon_spent() >= 0.99 * plan.epsilons).all()


def test_pixels_are_what_they_were_before_the_data_set_was_normalised():
    images = torch.rand(2, 3, 4, 4)
    mean, std = (torch.tensor(v)[:, None, None] for v in (CIFAR10.mean, CIFAR10.std))
    torch.testing.assert_close(membership.pixels("cifar10", (images - mean) / std), images)
    assert membership.pixels("digits", images) is images


# -- blocks --------------------------------------------------------------------------------------------------------


def test_an_interrupted_arm_continues_with_the_missing_block_to_the_same_numbers(monkeypatch):
    settings, trained = arm("scale"), []
    whole = run_cell(settings)
    training.forget(whole)
    train_block = shadows.train_block

    def stops_at_the_second(setting, block, progress=None):
        trained.append(block.first)
        if trained == [0, 64]:
            raise KeyboardInterrupt
        return train_block(setting, block, progress)

    monkeypatch.setattr(shadows, "train_block", stops_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        membership.membership(settings, 0, device="cpu")
    continued = membership.membership(settings, 0, device="cpu")
    assert trained == [0, 64, 64]
    assert statistics_of(continued) == statistics_of(whole)


def test_an_arm_with_fewer_shadows_is_continued_and_its_result_replaced(tmp_path, unfinished):
    table, folder = table_of(arm("sample")), tmp_path / "results"

    def left(limit: int | None) -> int:
        return len(running.missing([table], done=finished(folder), shadows=limit))

    assert running.run_tables([table], shadows=64, device="cpu", folder=folder) == []
    (line,) = finished(folder).values()
    assert (line["shadows"], left(64), left(None)) == (64, 0, 1)
    assert len(list(unfinished.glob("*/*.npz"))) == 1  # for the next call
    assert running.run_tables([table], device="cpu", folder=folder) == []
    (line,) = finished(folder).values()
    assert (line["shadows"], left(None)) == (72, 0)
    assert not list(unfinished.glob("*"))


def test_the_number_of_shadows_for_now_is_not_part_of_an_arm_s_name():
    assert arm("sample", at_most=8).named(0) == arm("sample").named(0)
    assert arm("sample", shadows=64).named(0) != arm("sample").named(0)
    assert arm("sample", at_most=500).wanted == 72


# -- claims, tests, pages ------------------------------------------------------------------------------------------


def test_a_claim_on_two_arms_is_judged_target_by_target_and_never_with_shadows_missing():
    settings = [arm(name) for name in ARMS]
    table, coins = table_of(*settings), np.random.default_rng(0)
    aucs = {name: 0.6 + 0.05 * coins.normal(size=(2, 72)) for name in ARMS}
    aucs["dpsgd-10"] = aucs["sample"] + 0.02 + 0.001 * coins.normal(size=(2, 72))
    done = {
        each.named(0): {"shadows": 72, "target_auc": {"rmia": aucs[name].tolist()}}
        for name, each in zip(ARMS, settings, strict=True)
    }
    claim = {"say": "so", "cell": "sample", "minus": "dpsgd-10", "attack": "rmia", "quantity": "auc[0]"}
    theirs = expected("lira_digits")

    def judged(low: float, high: float) -> Verdict:
        return verdict({**claim, "between": [low, high]}, table, theirs, done)

    good = judged(-1, -0.01)
    assert (good.held, good.so_far, good.seeds) == (True, True, 72)
    assert judged(-0.01, 1).held is False
    lines = done[settings[0].named(0)], done[settings[2].named(0)]
    oracle = over_targets(aucs["sample"][0] - aucs["dpsgd-10"][0])
    assert paired(*lines, "rmia", 0) == oracle
    assert oracle.high - oracle.low < 0.001  # unpaired, it would be .02
    assert np.isnan(paired(lines[0], {**lines[1], "shadows": 64}, "rmia", 0).value)
    done[settings[0].named(0)]["shadows"] = 64
    assert judged(-1, -0.01).found == "not run"  # with other references, targets differ
    done[settings[2].named(0)]["shadows"] = 64
    assert judged(-1, -0.01).held is None
    del done[settings[0].named(0)]
    assert judged(-1, -0.01).found == "not run"


def test_the_paper_s_test_is_student_s_and_finds_groups_without_any_signal_of_membership():
    coins = np.random.default_rng(0)
    member, group = coins.random((60, 400)) < 0.5, np.arange(400) % 2
    scores = coins.normal(size=(60, 400)) + coins.normal(size=(60, 1)) * group  # of members and others alike
    found = paper_test(scores, member, group)
    t, p = stats.ttest_ind(scores[0, group == 1], scores[0, group == 0])
    assert found["targets"][0] == pytest.approx([t, p], rel=1e-2)
    assert found["significant"] > 0.5
    assert found["quantiles"][0] < -2
    assert found["quantiles"][2] > 2
    null = paper_test(coins.normal(size=(60, 400)), member, group)
    assert null["significant"] < 0.2
    assert null["members_only"] < 0.2


def test_the_digits_hold_every_claim_but_one():
    """With Sample, the risk at ε = 20 is not that of DP-SGD: the looser group pays for the noise that is saved."""
    table, theirs = TABLES["lira_digits"], expected("lira_digits")
    verdicts = [verdict(claim, table, theirs, DONE) for claim in theirs.claims]
    (broken,) = [v for v in verdicts if not v.held]
    assert "roughly the same" in broken.say
    assert broken.word == "not seen on a linear model"
    for cell in table.cells:
        line = DONE[cell.settings.named(0)]
        assert line["shadows"] == 512
        assert line["exceeds_certified"] == []


def test_the_page_says_how_many_shadows_an_arm_has_and_what_the_paper_s_test_is():
    table = TABLES["lira_digits"]
    first, second = (cell.settings.named(0) for cell in table.cells[:2])
    done = {first: {**DONE[first], "shadows": 64}, second: DONE[second]}
    every = reporting.pages({"lira_digits": table}, done)
    page = every["results-membership-linear"]
    assert next(row for row in page.splitlines() if row.startswith("| Sample | 10 |")).endswith("| 64 of 512 |")
    assert "| DP-SGD, ε = 10 |  | **not run** |" in page
    assert "This test is not valid for the claim." in page
    (rest,) = [row for row in every["results-paper"].splitlines() if "run lira_digits`" in row]
    assert rest.split(" | ")[2] == "3"  # Scale has all of its shadows


def test_each_effect_is_also_shown_without_that_of_the_placebo():
    table = TABLES["lira_digits"]
    arms = {cell.name: DONE[cell.settings.named(0)] for cell in table.cells}
    effect = {name: np.subtract(*line["target_auc"]["lira-shrunk"][::-1]) for name, line in arms.items()}
    oracle = over_targets(effect["scale"] - (effect["dpsgd-10"] + effect["dpsgd-20"]) / 2)
    found = minus_placebo("scale", arms, "lira-shrunk")
    assert found == oracle
    assert f"| {with_interval(found)} |" in reporting.pages({"lira_digits": table}, DONE)["results-membership-linear"]
    low = {"cell": "scale", "attack": "lira-shrunk", "quantity": "low"}
    assert measured(low, table, DONE).found.value == oracle.low
    assert oracle.value == pytest.approx(arms["scale"]["difference"]["lira-shrunk"]["auc"][0] - 0.0038, abs=1e-4)
    fewer = {**arms["dpsgd-20"], "shadows": 64}  # with other references, targets differ
    one = {"scale": arms["scale"], "dpsgd-20": fewer}
    assert minus_placebo("scale", one, "lira-shrunk") is None


def test_figures_of_an_attack_are_drawn_and_name_the_arms_that_were_not_run(tmp_path):
    table = TABLES["lira_digits"]
    sample = table.by_name["sample"].settings.named(0)
    draw_membership({"lira_digits": table}, {sample: DONE[sample]}, tmp_path)
    made = [file for file, _ in membership_pictures(table, {sample: DONE[sample]})]
    assert sorted(made) == sorted(path.name for path in tmp_path.iterdir())
    assert len(made) == 4
    for name in ("roc", "targets", "dpsgd"):
        assert "Scale (not run)" in (tmp_path / f"lira_digits_{name}.svg").read_text()
    assert "Scale" not in (tmp_path / "lira_digits_arms.svg").read_text()  # no empty row
    assert membership_pictures(table, {}) == []
