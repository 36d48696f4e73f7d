"""Runs that are charged to a registry: fit, reservations, resumed and copied runs, statistics; what is uncharged."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import epsilons
from epsilons.accounting import filter as filter_
from epsilons.errors import LedgerError, RegistryError, RegistryRefusedError
from epsilons.ledger.ledger import text
from epsilons.registry import Registry
from epsilons.reporting import report
from epsilons.reporting.html import compare_page
from epsilons.reporting.plan_page import side_by_side
from options import fit_flat
from registries import reserve, table

IDS = [f"p{i}" for i in range(40)]


@pytest.fixture
def registry(tmp_path):
    with Registry.create(f"sqlite:///{tmp_path}/people.db") as made:
        made.enrol(IDS, [1.0, 3.0] * 20)
        yield made


def planned(registry, steps=30, batch_size=8, share=0.5):
    """(accounts, budgets, plan) of a run of everybody."""
    accounts = registry.account(IDS)
    budgets = accounts.budgets(share)
    recipe = epsilons.Recipe(steps=steps, batch_size=batch_size, clip_norm=1.0)
    return accounts, budgets, epsilons.plan(budgets, recipe, accountant="filter")


def run_of(registry, name, folder, share, stop_after=None):
    accounts, budgets, plan = planned(registry, share=share)
    reservation = registry.reserve(name, plan, accounts, budgets=budgets)
    torch.manual_seed(0)
    data = torch.randn(40, 3), torch.arange(40) % 3 % 2
    stop = [lambda private: private.stop() if private.updates == stop_after else None]
    return epsilons.fit(
        torch.nn.Linear(3, 2),
        epsilons.Records(data, persons=IDS),
        plan,
        budgets=budgets,
        callbacks=stop,
        run_dir=epsilons.RunFolder(folder, reservation=reservation),
    )


def test_three_runs_use_up_every_lifetime_budget(tmp_path, registry):
    for number, share in enumerate([1 / 3, 1 / 2, 1.0]):
        run_of(registry, f"run {number}", tmp_path / f"{number}", share)
    accounts = registry.account(IDS)
    assert (accounts.used_share > 0.999).all()
    assert (accounts.used_share <= 1).all()
    assert not accounts.can_take_part.any()
    assert registry.verify().is_right


def test_a_run_that_stops_early_is_given_back_the_steps_it_did_not_charge(tmp_path, registry):
    run = run_of(registry, "one", tmp_path / "one", 0.5, stop_after=4)
    reserved = registry.account(IDS)
    assert run.charged[0] < 30
    with Registry.create(f"sqlite:///{tmp_path}/other.db") as other:
        other.enrol(IDS, [1.0, 3.0] * 20)
        run_of(other, "one", tmp_path / "two", 0.5)
        whole = other.account(IDS)
    assert reserved.spent[:, 5] == pytest.approx(whole.spent[:, 5] * run.charged[0] / 30, rel=1e-6)


def test_a_plan_on_accounts_needs_its_reservation(tmp_path, registry):
    accounts, budgets, plan = planned(registry)
    recipe = epsilons.Recipe(steps=30, batch_size=8, clip_norm=1.0)
    data = torch.zeros(40, 3), torch.arange(40) % 3 % 2
    with pytest.raises(RegistryError, match="charged there first"):
        epsilons.fit(
            torch.nn.Linear(3, 2), epsilons.Records(data, persons=IDS), plan, budgets=budgets, run_dir=tmp_path / "a"
        )
    other = epsilons.plan(budgets, recipe, "uniform", "filter")
    reservation = registry.reserve("one", other, accounts, budgets=budgets)
    with pytest.raises(RegistryError, match="another plan"):
        epsilons.fit(
            torch.nn.Linear(3, 2),
            epsilons.Records(data, persons=IDS),
            plan,
            budgets=budgets,
            run_dir=epsilons.RunFolder(tmp_path / "b", reservation=reservation),
        )
    with pytest.raises(epsilons.errors.PlanError, match='accountant="filter"'):
        epsilons.plan(budgets, recipe)


def test_a_copied_run_cannot_go_on_beside_the_first(tmp_path, registry):
    import shutil

    class Stop(Exception):
        pass

    def leave(private):
        if private.updates in (5, 9):
            raise Stop

    accounts, budgets, plan = planned(registry, 140)
    reservation = registry.reserve("one", plan, accounts, budgets=budgets)
    data = torch.randn(40, 3), torch.arange(40) % 3 % 2

    def train(folder, **options):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return fit_flat(
            model,
            data,
            plan,
            budgets=budgets,
            persons=IDS,
            reservation=reservation,
            run_dir=folder,
            resume=True,
            **options,
        )

    with pytest.raises(Stop):
        train(tmp_path / "first", callbacks=[leave])
    for copy in ("second", "third"):
        shutil.copytree(tmp_path / "first", tmp_path / copy)
    with pytest.raises(Stop):
        train(tmp_path / "second", callbacks=[leave])  # another file of the key: a new key epoch
    for folder in ("first", "third"):
        with pytest.raises((RegistryRefusedError, LedgerError)):
            train(tmp_path / folder)


def test_a_plan_on_accounts_is_saved_whole(tmp_path, registry):
    reserve(registry, "one", IDS[:25], np.zeros(25, dtype=int), table([8.0]))
    budgets = registry.account(IDS).budgets(0.5)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=30, batch_size=8, clip_norm=1.0), accountant="filter")
    assert len(plan.groups) == 4
    path = Path(plan.save(tmp_path / "plan.json"))
    loaded = epsilons.Plan.load(path)
    assert loaded == plan
    assert (loaded.groups.starts == plan.groups.starts).all()
    assert "registry" in plan.guarantee


def test_a_statistic_is_charged_once_and_noised(registry):
    noised = [
        registry.release(f"mean {i}", np.full(1000, 5.0), ids=IDS, sensitivity=0.1, noise_multiplier=30.0)
        for i in range(2)
    ]
    assert np.std(noised[0]) == pytest.approx(3.0, rel=0.1)
    assert abs(np.corrcoef(noised[0], noised[1])[0, 1]) < 0.15
    with pytest.raises(RegistryError, match="another name"):
        registry.release("mean 0", 5.0, ids=IDS, sensitivity=0.1, noise_multiplier=30.0)
    by_hand = 2 * epsilons.accounting.filter.ORDERS / (2 * 30.0**2)
    assert registry.account(IDS).spent[0] == pytest.approx(by_hand, rel=1e-6)


def train_and_withdraw(registry, folder, who=(), at=70, steps=140, lower=False):
    """(weights after each update, the run's Private) of a run during which some people leave after `at` updates."""
    accounts, budgets, plan = planned(registry, steps, 10)
    reservation = registry.reserve("one", plan, accounts, budgets=budgets)
    torch.manual_seed(0)
    data, model, weights = (torch.randn(40, 3), torch.arange(40) % 3 % 2), torch.nn.Linear(3, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with epsilons.make_private(
        model,
        optimizer,
        epsilons.Records(data, persons=IDS),
        plan,
        budgets=budgets,
        run_dir=epsilons.RunFolder(folder, reservation=reservation),
        seed=epsilons.Randomness.with_key(bytes(32)),
    ) as private:
        private.on_update(lambda private: weights.append(model.weight.detach().clone()))
        for x, y in private.batches:
            private.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
            private.step()
            if who and private.updates == at:
                registry.change(who, 0.2) if lower else registry.withdraw(who)
    return weights, private


@pytest.mark.parametrize("lower", [False, True])
def test_who_leaves_a_running_job_is_in_no_further_block(tmp_path, lower):
    runs = []
    for name, who in (("stays", ()), ("leaves", ["p3", "p8"])):
        with Registry.create(f"sqlite:///{tmp_path}/{name}.db") as registry:
            registry.enrol(IDS, [1.0, 3.0] * 20)
            runs.append(train_and_withdraw(registry, tmp_path / name, who, lower=lower))
            assert registry.verify().is_right
    (stays, _), (leaves, private) = runs
    same = [bool((a == b).all()) for a, b in zip(stays, leaves, strict=True)]
    assert all(same[:128]), "steps of blocks that were charged before stay as they were"
    assert not any(same[135:]), "from the next block on they contribute nothing"
    assert private.ledger.left_out(0, 127).tolist() == []
    assert private.ledger.left_out(0, 128).tolist() == [3, 8]


def test_leaving_changes_the_leavers_contribution_and_nothing_else(tmp_path):
    sums = {}
    for name, who in (("stays", ()), ("leaves", ["p3"])):
        with Registry.create(f"sqlite:///{tmp_path}/{name}.db") as registry:
            registry.enrol(IDS, 3.0)
            sums[name] = train_and_withdraw(registry, tmp_path / name, who, at=1, steps=120)[0]
    # Both runs have the same weights before step 64, so the first different update differs by one clipped vector.
    first = next(i for i, (a, b) in enumerate(zip(sums["stays"], sums["leaves"], strict=True)) if not torch.equal(a, b))
    assert first >= 64
    difference = (sums["stays"][first] - sums["leaves"][first]).norm() * 10 / 0.1
    assert 0 < difference <= 1.0 + 1e-5


def test_a_resumed_block_is_replayed_without_those_who_left_before_it_and_with_the_others(tmp_path):
    """Two sums under one noise, with and without a person, would give that person's gradient away."""
    with Registry.create(f"sqlite:///{tmp_path}/people.db") as registry:
        registry.enrol(IDS, 3.0)
        folder = tmp_path / "run"
        accounts, budgets, plan = planned(registry, 140, 10)
        reservation = registry.reserve("one", plan, accounts, budgets=budgets)
        data = torch.randn(40, 3), torch.arange(40) % 3 % 2

        def train(folder, leave_at, reservation, key=bytes(32)):
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 2)
            with epsilons.make_private(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                epsilons.Records(data, persons=IDS),
                plan,
                budgets=budgets,
                run_dir=epsilons.RunFolder(folder, resume=True, checkpoint_every=5, reservation=reservation),
                seed=epsilons.Randomness.with_key(key),
            ) as private:
                for x, y in private.batches:
                    private.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
                    if private.step() and private.updates in leave_at:
                        registry.withdraw(leave_at[private.updates])
                        if private.updates == 100 and folder.name == "run":
                            private.stop()
            return model.weight.detach(), private.ledger

        train(folder, {10: ["p3"], 100: ["p8"]}, reservation)
        resumed, ledger = train(folder, {}, reservation)
    assert ledger.left_out(0, 100).tolist() == [3]
    assert ledger.left_out(0, 128).tolist() == [3, 8]
    with Registry.create(f"sqlite:///{tmp_path}/other.db") as registry:
        registry.enrol(IDS, 3.0)
        other = registry.reserve("one", plan, registry.account(IDS), budgets=budgets)
        straight, _ = train(tmp_path / "straight", {10: ["p3"], 100: ["p8"]}, other)
    assert torch.equal(resumed, straight)


def test_budgets_of_other_people_or_of_another_order_are_not_reserved(registry):
    _, budgets, plan = planned(registry)
    swapped = [IDS[2], IDS[1], IDS[0], *IDS[3:]]  # people of one group, so that no number differs
    for others in (registry.account(swapped), registry.account(IDS[:39])):
        with pytest.raises(RegistryError, match="do not belong together"):
            registry.reserve("one", plan, others, budgets=budgets)
    reserve(registry, "before", IDS[:2], [0, 0], table([20.0]))
    with pytest.raises(RegistryError, match="do not belong together"):  # other sums than the plan was made on
        registry.reserve("one", plan, registry.account(IDS), budgets=budgets)
    assert registry.verify().runs == 1


# -- what is not charged says so: audits, plans for several runs; levels are no promises -----------------------------


FIFTY = [f"p{i}" for i in range(50)]
RECIPE = epsilons.Recipe(steps=10, batch_size=10, clip_norm=1.0)
DATA = torch.randn(len(FIFTY), 3), torch.arange(len(FIFTY)) % 3 % 2


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """(folder, plan) of the second run on the same people, who have one lifetime budget or the other."""
    folder = tmp_path_factory.mktemp("second")
    with Registry.create(f"sqlite:///{folder}/people.db") as registry:
        registry.enrol(FIFTY, [1.0, 4.0] * 25)
        for name in ("first", "second"):
            accounts = registry.account(FIFTY)
            budgets = accounts.budgets(0.5)
            plan = epsilons.plan(budgets, RECIPE, accountant="filter")
            reservation = registry.reserve(name, plan, accounts, budgets=budgets)
            epsilons.fit(
                torch.nn.Linear(3, 2),
                epsilons.Records(DATA, persons=FIFTY),
                plan,
                budgets=budgets,
                run_dir=epsilons.RunFolder(folder / name, reservation=reservation),
            )
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
        registry.enrol(FIFTY, 1.0)
        budgets = registry.account(FIFTY).budgets(0.5)
        with pytest.raises(epsilons.errors.PlanError, match="for one run"):
            epsilons.plan(budgets, RECIPE, accountant="filter", runs=2)


def test_plans_on_accounts_are_compared_by_lifetime_level(second):
    page = compare_page(side_by_side({"a": second[1], "b": second[1]}))
    assert "lifetime\u00a0level" in page
    assert not re.search(r"promised(\u00a0| )ε", page)


def test_tables_of_a_plan_on_accounts_show_levels_and_say_what_they_are(second):
    folder, plan = second
    for shown in (plan.summary(), plan._repr_html_(), "\n".join(text(plan, (10,), None, None))):
        assert "lifetime level" in shown
        assert ("level charged so far" in shown) is ("charged so far" in shown), "no share of a lifetime budget"
        assert "The promise is the lifetime budget" in shown
        assert "it is not the level divided by the budget" in " ".join(shown.split())
    for release in (False, True):
        page = report(folder, release).to_html()
        assert "Promise and use over a lifetime" in page
        assert not re.search(r"promised\u00a0ε|ε promised|>promised", page)
