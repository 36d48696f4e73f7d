"""What is not charged to a registry says so: audits, plans for several runs. And levels are not called promises."""

from __future__ import annotations

import json
import re

import pytest
import torch

import epsilons
from epsilons.accounting import filter as filter_
from epsilons.ledger.ledger import text
from epsilons.registry import Registry
from epsilons.reporting import report

IDS = [f"p{i}" for i in range(50)]
RECIPE = epsilons.Recipe(steps=10, batch_size=10, clip_norm=1.0)
DATA = torch.randn(len(IDS), 3), torch.arange(len(IDS)) % 3 % 2


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """(folder, plan) of the second run on the same people, who have one lifetime budget or the other."""
    folder = tmp_path_factory.mktemp("second")
    with Registry.create(f"sqlite:///{folder}/people.db") as registry:
        registry.enrol(IDS, [1.0, 4.0] * 25)
        for name in ("first", "second"):
            accounts = registry.account(IDS)
            budgets = accounts.budgets(0.5)
            plan = epsilons.plan(budgets, RECIPE, accountant="filter")
            reservation = registry.reserve(name, plan, accounts, budgets=budgets)
            epsilons.fit(
                torch.nn.Linear(3, 2), DATA, plan, budgets=budgets, persons=IDS, reservation=reservation,
                run_dir=folder / name,
            )  # fmt: skip
    return folder / "second", plan


def reports(folder):
    """The internal report, and the one for release, as JSON values."""
    return [report(folder, release).to_dict() for release in (False, True)]


def audit(run, **options):
    return epsilons.audit(run, canaries=20, seed=0, **options)


def test_an_audit_compares_with_what_the_run_spends_by_itself(second):
    folder, plan = second
    result = audit(folder)
    alone = [filter_.epsilon([plan.phases[0].history(g)], 1e-5) for g in range(2)]
    assert [g.epsilon_spent for g in result.groups] == pytest.approx(alone, rel=1e-9)
    assert (plan.epsilon_spent() > 1.2 * torch.tensor(alone).numpy()).all(), "the first run counts in the plan"
    assert result.reestimate.epsilon == pytest.approx(alone, rel=0.1)


def test_an_audit_of_a_charged_run_says_that_nothing_was_charged(second):
    folder, _ = second
    result = audit(folder)
    assert "Nothing was charged to a registry" in str(result)
    assert "no data of people" in " ".join(result.to_dict()["sentences"])
    assert result.table()[0][0] == "lifetime level"
    for found in reports(folder):
        assert "For the audit nothing was charged" in " ".join(found["summary"])
        assert found["audited"]["verdict"] == "consistent"


def test_an_audit_on_given_records_is_uncharged_and_internal(second):
    folder, _ = second
    result = audit(folder, model=torch.nn.Linear(3, 2), dataset=DATA)
    assert "trained again on the given records" in str(result)
    inside, outside = reports(folder)
    assert "trained again on records" in " ".join(inside["summary"])
    assert inside["audited"]["on_records"]
    assert outside["audited"] is None
    assert "audit" not in " ".join(outside["summary"])


def test_a_contradiction_found_on_given_records_is_in_both_reports(second):
    folder, _ = second
    audit(folder, model=torch.nn.Linear(3, 2), dataset=DATA)
    found = json.loads((folder / "audit.json").read_text())
    (folder / "audit.json").write_text(json.dumps({**found, "verdict": "violated", "holds": False}))
    assert [found["audited"]["holds"] for found in reports(folder)] == [False, False]


def test_an_audit_of_an_ordinary_plan_says_nothing_of_registries():
    plan = epsilons.plan(epsilons.Budgets([1.0] * 100), RECIPE, accountant="rdp")
    assert "registry" not in str(audit(plan))
    assert "stays internal" in str(audit(plan, model=torch.nn.Linear(3, 2), dataset=DATA))


def test_a_plan_for_several_runs_is_not_made_on_accounts(tmp_path):
    with Registry.create(f"sqlite:///{tmp_path}/people.db") as registry:
        registry.enrol(IDS, 1.0)
        budgets = registry.account(IDS).budgets(0.5)
        with pytest.raises(epsilons.errors.PlanError, match="for one run"):
            epsilons.plan(budgets, RECIPE, accountant="filter", runs=2)


def test_tables_of_a_plan_on_accounts_show_levels_and_say_what_they_are(second):
    folder, plan = second
    for shown in (plan.summary(), plan._repr_html_(), "\n".join(text(plan, (10,), None, None))):
        assert "lifetime level" in shown
        assert "The promise is the lifetime budget" in shown
    for release in (False, True):
        page = report(folder, release).to_html()
        assert "lifetime\u00a0level" in page
        assert not re.search(r"promised(\u00a0| )ε|ε promised|>promised", page)
