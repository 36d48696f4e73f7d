"""Attacks on membership of persons: in or out as a whole, the same as records where each has one row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import epsilons
from epsilons.auditing.membership.shadows import Block, ShadowSetting, any_counts, one_thread, shadow_plan, train_block
from epsilons.errors import InputError
from epsilons.registry import Registry
from program import epsilons as program
from small_attacks import RECORDS, a_plan, a_setting, attack, budgets, dropping, linear, some_data
from test_person_configs import CONFIG, visits

IDS = [f"p{i}" for i in range(RECORDS)]


def of_persons() -> epsilons.Budgets:
    """The budgets of `small_attacks`, of persons with ids."""
    each = budgets()
    return epsilons.Budgets.by_person(each.epsilons[each.group], IDS, delta=1e-3, spelling="as written")


def a_person_plan(**options: Any) -> epsilons.Plan:
    return epsilons.plan(
        of_persons(), epsilons.Recipe(steps=4, batch_size=20, clip_norm=0.5), "sample", "rdp", **options
    )


def several(seed: int = 4) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Data of RECORDS persons with 1 to 4 rows, and (rows,) the person of each, in any order; the last has no row."""
    rng = np.random.default_rng(seed)
    owner = rng.permutation(np.repeat(np.arange(RECORDS - 1), rng.integers(1, 5, RECORDS - 1)))
    return some_data(len(owner)), owner


def values_of(found: Any) -> dict[str, Any]:
    """All numbers of a result, without its words and what names the plan."""
    values = found.to_dict()
    placebo = values.pop("placebo")
    kept = {name: one for name, one in values.items() if name not in ("plan", "sentences", "setting")}
    rest = {} if placebo is None else {name: placebo[name] for name in ("attacks", "differences", "groups")}
    return kept | {"placebo": rest, "accuracy": values["setting"]["member_accuracy"], "of_all": values["accuracy"]}


def shuffled(data: tuple[np.ndarray, np.ndarray]) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    order = np.random.default_rng(0).permutation(RECORDS)
    return (data[0][order], data[1][order]), order


# -- one row each ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["stacked", "alone"])
@pytest.mark.parametrize("in_order", [True, False])
def test_persons_with_one_row_each_are_attacked_as_records_to_the_bit(method, in_order):
    """Mutants: other coins or keys for persons, a sum in place of a mean, rows left in the order of the table."""
    data, order = (some_data(), np.arange(RECORDS)) if in_order else shuffled(some_data())
    records = epsilons.Records(data, persons=[IDS[i] for i in order], rows_per_person=3)
    of_records = attack(method=method, attacks=["lira", "rmia"], placebo=True)
    found = attack(
        dataset=records,
        budgets=of_persons(),
        plan=a_person_plan(),
        method=method,
        attacks=["lira", "rmia"],
        placebo=True,
    )
    assert values_of(found) == values_of(of_records)
    assert (found.unit, of_records.unit) == ("person", "record")
    for name, auc in of_records.target_auc.items():
        assert np.array_equal(found.target_auc[name], auc)


# -- several rows ------------------------------------------------------------------------------------------------------


def setting_of(**changes: Any) -> ShadowSetting:
    (inputs, targets), owner = several()
    order = np.argsort(owner, kind="stable")
    usual: dict[str, Any] = {
        "inputs": inputs[order],
        "targets": targets[order],
        "owner": owner[order],
        "rows_per_person": 2,
        "budgets": of_persons().without_ids(),
        "plan": shadow_plan(a_person_plan(), RECORDS),
        "method": "alone",
    }
    return a_setting(**usual | changes)


def test_a_person_is_in_or_out_with_all_rows_and_the_signal_is_the_mean_over_them():
    """The slow twin: make_private on the rows of the members, and a loop over persons."""
    setting, number = setting_of(), 3
    arrays = train_block(setting, Block(number, number + 1))
    member, model = setting.member(number), linear()
    rows = [row for row, person in enumerate(setting.owner) if member[person]]
    names = {person: place for place, person in enumerate(np.flatnonzero(member).tolist())}
    with one_thread():
        private = epsilons.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            epsilons.Records(
                (torch.from_numpy(setting.inputs[rows]), torch.from_numpy(setting.targets[rows])),
                persons=[names[person] for person in setting.owner[rows].tolist()],
                rows_per_person=2,
            ),
            any_counts(setting.plan),
            budgets=setting.budgets.subset(member),
            seed=epsilons.Randomness.with_key(setting.randomness(number).key),
        )
        with private:
            for x, y in private.batches:
                private.backward(F.cross_entropy(model(x), y, reduction="none"))
                private.step()
        with torch.no_grad():
            log_p = model(torch.from_numpy(setting.inputs)).log_softmax(1).numpy()
    own = log_p[np.arange(len(log_p)), setting.targets]
    means = [own[setting.owner == person].mean() for person in range(RECORDS - 1)]
    assert arrays["log_p"].shape == (1, RECORDS - 1), "the person without rows has no signal"
    assert np.abs(arrays["log_p"][0] - means).max() < 1e-6
    assert np.array_equal(arrays["member"][0], member[:-1])
    right = [label == np.argmax(row) for row, label in zip(log_p[rows], setting.targets[rows], strict=True)]
    assert arrays["member_accuracy"] == pytest.approx([np.mean(right)])


def test_a_planted_leak_is_found_person_by_person():
    """Without noise and with many steps, members are recognised; with the coins of rows in their place, no one is."""
    data, owner = several()
    loud = epsilons.Budgets(np.full(RECORDS, 60.0), delta=1e-3, unit="person")
    plan = epsilons.plan(loud, epsilons.Recipe(steps=60, batch_size=40, clip_norm=1.0), "uniform", "rdp")
    found = attack(
        dataset=epsilons.Records(data, persons=owner, rows_per_person=4), budgets=loud, plan=plan, shadows=32, lr=2.0
    )
    best = max(found.attacks, key=lambda one: one.auc.value)
    assert best.auc.low > 0.55
    assert not found.exceeds_certified
    assert found.records == RECORDS - 1
    assert "random half" not in str(found)
    assert "with all of their rows" in str(found)
    assert "persons" in found.table()[0]
    assert "over records" not in str(found)


def test_persons_of_several_rows_are_trained_alone_and_a_stack_says_why():
    data, owner = several()
    records = epsilons.Records(data, persons=owner)
    named = {"dataset": records, "budgets": of_persons().without_ids(), "plan": a_person_plan()}
    assert "clips each row by itself" in attack(**named).setting["why"]
    with pytest.raises(InputError, match="clips each row by itself"):
        attack(**named, method="stacked")


def test_an_attack_on_persons_continues_only_with_the_same_persons(tmp_path):
    data, owner = several()
    named = {"budgets": of_persons().without_ids(), "plan": a_person_plan(), "keep_scores": True}
    attack(tmp_path / "a", dataset=epsilons.Records(data, persons=owner), **named)
    attack(tmp_path / "a", dataset=epsilons.Records(data, persons=owner), **named, resume=True)
    others = epsilons.Records(data, persons=np.where(owner == 0, 1, owner))
    with pytest.raises(epsilons.errors.RunError, match=r"other settings: .*persons"):
        attack(tmp_path / "a", dataset=others, **named, resume=True)


def test_accounts_of_a_registry_are_refused(tmp_path):
    with Registry.create(f"sqlite:///{tmp_path}/people.db") as registry:
        registry.enrol(IDS, 2.0)
        accounts = registry.account(IDS).budgets(0.5)
    plan = epsilons.plan(accounts, epsilons.Recipe(steps=4, batch_size=20, clip_norm=0.5), accountant="filter")
    with pytest.raises(InputError, match="lifetime budgets in a registry"):
        attack(dataset=epsilons.Records(some_data(), persons=IDS), budgets=accounts, plan=plan)


def test_a_hospital_attacks_its_config_and_its_run(tmp_path, monkeypatch):
    """The shadows read as many rows of a person as the run does, and the page counts persons."""
    monkeypatch.chdir(tmp_path)
    Path("visits.csv").write_text(visits())
    Path("visits.toml").write_text(
        CONFIG.replace("steps = 4", "steps = 4\nrows_per_person = 2").replace(
            'drop = ["note"]', 'drop = ["note"]\nread_off = []'
        )
    )
    program("attack", "visits.toml", "--shadows", "8", "--jobs", "1", "-o", "a").succeeded("persons", "one by one")
    program("train", "visits.toml", "-q", "-o", "run").succeeded()
    program("attack", "run", "--shadows", "8", "--jobs", "1", "-o", "b").succeeded()
    of_config, of_run = (json.loads(Path(f"{name}/membership.json").read_text()) for name in "ab")
    assert of_config["attacks"] == of_run["attacks"]
    assert of_config["setting"]["unit"] == "person"
    assert of_config["records"] == 45
    page = Path("a/attack.html").read_text()
    assert "a random half of 45 persons" in page
    assert ">persons</th>" in page
    program("report", "run").succeeded()
    report = Path("run/report.html").read_text()
    assert "with all of their rows" in report
    odds = report[report.index('id="odds"') :]
    odds = odds[: odds.index("<figure>")]
    assert "where yes and no are equally likely" in odds
    assert "The bounds under Membership inference are of other games" in odds
    assert "however they attack" not in report, "a bound on another game, on the same page, is larger"
    assert "are of other games" not in Path("run/report-release.html").read_text(), "it has no attack"
    assert (
        "membership" not in json.loads(Path("run/report-release.json").read_text())
        or not json.loads(Path("run/report-release.json").read_text())["membership"]
    )


def test_dropping_models_of_persons_are_shadows_too():
    data, owner = several()
    records = epsilons.Records(data, persons=owner)
    found = attack(dataset=records, budgets=of_persons().without_ids(), plan=a_person_plan(), model=dropping())
    assert found.unit == "person"
    assert a_plan().unit == "record"
