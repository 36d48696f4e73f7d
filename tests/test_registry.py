"""The registry of lifetime budgets: nobody over, nothing lost, nothing altered unseen."""

from __future__ import annotations

import contextlib
import stat

import numpy as np
import pytest

import epsilons
from epsilons.errors import RegistryError, RegistryRefusedError
from epsilons.registry import Registry, cohorts, databases
from epsilons.registry.databases import PAGE, refuse_network
from registries import (
    KEY,
    LAST_LINE,
    OTHER_KEY,
    THIRD_KEY,
    Twin,
    begin,
    only_sqlite,
    outside,
    reserve,
    settle,
    table,
    using,
)

IDS = [f"p{i}" for i in range(40)]


@pytest.fixture
def registry(place):
    with Registry.create(*place) as made:
        made.enrol(IDS, [1.0, 3.0] * 20)
        yield made


# -- charges -----------------------------------------------------------------------------------------------------


def test_a_reservation_charges_everybody_in_full(registry):
    reserve(registry, "one", IDS[:10], np.arange(10) % 2, table([20.0, 10.0]))
    spent = registry.account(IDS).spent
    by_hand = [
        100 * epsilons.accounting.rdp.divergence(0.02, noise, epsilons.accounting.filter.ORDERS)
        for noise in (20.0, 10.0)
    ]
    assert spent[:10] == pytest.approx(np.array(by_hand * 5), abs=2e-12)
    assert (spent[10:] == 0).all()


def test_what_was_not_made_is_given_back_exactly(registry):
    before = registry.account(IDS).spent
    reserve(registry, "kept", IDS, np.zeros(40, dtype=int), table([30.0]))
    kept = registry.account(IDS).spent
    reserve(registry, "cut", IDS[5:20], np.zeros(15, dtype=int), table([15.0]))
    settle(registry, "cut", [0])
    assert (registry.account(IDS).spent == kept).all()
    registry.cancel("kept")
    assert (registry.account(IDS).spent == before).all()


def test_a_roster_is_charged_whole_or_not_at_all(registry):
    reserve(registry, "large", IDS[:1], [0], using(0.6))
    before = registry.account(IDS).spent
    with pytest.raises(RegistryRefusedError, match="Nothing was charged") as refused:
        reserve(registry, "all", IDS, np.zeros(40, dtype=int), using(0.6))
    assert (registry.account(IDS).spent == before).all()
    assert not any(character.isdigit() for character in str(refused.value)), "a refusal counts nobody"


def test_every_call_can_be_repeated(registry):
    for _ in range(2):
        reserve(registry, "one", IDS, np.zeros(40, dtype=int), table([20.0]))
        begin(registry, "one")
    for _ in range(2):
        registry.settle("one", [50], LAST_LINE, KEY)
    once = 50 * epsilons.accounting.rdp.divergence(0.02, 20.0, epsilons.accounting.filter.ORDERS)
    assert registry.account(IDS).spent == pytest.approx(np.tile(once, (40, 1)), abs=2e-12)
    assert registry.verify().is_right


@pytest.mark.parametrize(
    "again",
    [
        lambda r: reserve(r, "one", IDS[:39], np.zeros(39, dtype=int), table([20.0])),
        lambda r: reserve(r, "one", IDS, np.zeros(40, dtype=int), table([21.0])),
        lambda r: reserve(r, "one", IDS, np.zeros(40, dtype=int), table([20.0]), project="other"),
        lambda r: reserve(r, "one", IDS, np.zeros(40, dtype=int), table([20.0]), kind="audit"),
        lambda r: begin(r, "one", OTHER_KEY),
        lambda r: begin(r, "one", THIRD_KEY, previous=OTHER_KEY),
        lambda r: r.begin("one", KEY, None, LAST_LINE),
    ],
)
def test_a_run_is_one_plan_people_project_and_key(registry, again):
    reserve(registry, "one", IDS, np.zeros(40, dtype=int), table([20.0]))
    begin(registry, "one")
    with pytest.raises(RegistryRefusedError):
        again(registry)


def test_of_two_copies_of_a_run_one_gets_a_new_key(registry):
    reserve(registry, "one", IDS, np.zeros(40, dtype=int), table([20.0]))
    begin(registry, "one")
    begin(registry, "one", OTHER_KEY, previous=KEY)
    with pytest.raises(RegistryRefusedError, match="another key"):
        begin(registry, "one", THIRD_KEY, previous=KEY)


def test_a_settled_run_never_begins_again(registry):
    reserve(registry, "one", IDS, np.zeros(40, dtype=int), table([20.0]))
    settle(registry, "one", [10])
    with pytest.raises(RegistryRefusedError, match="settled"):
        begin(registry, "one")
    with pytest.raises(RegistryRefusedError, match="another number of steps"):
        registry.settle("one", [9], LAST_LINE, KEY)
    reserve(registry, "two", IDS, np.zeros(40, dtype=int), table([20.0]))
    with pytest.raises(RegistryError, match="More steps"):
        settle(registry, "two", [101])


def test_the_unit_is_a_person(registry):
    with pytest.raises(RegistryError, match="twice"):
        registry.account(["p1", "p2", " p1 "])
    with pytest.raises(RegistryRefusedError, match="not enrolled") as refused:
        registry.account(["p1", "nobody"])
    assert "nobody" not in str(refused.value)
    with pytest.raises(RegistryRefusedError, match="already"):
        registry.enrol(["new", "p1"], 2.0)


# -- many people -------------------------------------------------------------------------------------------------

#: More than a page of cohorts holds, and than one statement asks for.
MANY = [f"p{i}" for i in range(PAGE + 40)]
#: At the ends of both pages.
GONE = [0, 5, PAGE - 1, PAGE, PAGE + 39]


@pytest.fixture
def many(tmp_path):
    with Registry.create(f"sqlite:///{tmp_path}/many.db", tmp_path / "pepper") as made:
        made.enrol(MANY, np.resize([1.0, 2.0, 3.0], len(MANY)))
        yield made


@pytest.mark.parametrize("few", [cohorts.FEW_PAIRS, 0], ids=["counted in an array", "sorted"])
def test_people_on_every_page_are_charged_their_own_row(many, few, monkeypatch):
    """However the pairs of cohorts and rows are found."""
    monkeypatch.setattr(cohorts, "FEW_PAIRS", few)
    rows = np.arange(len(MANY)) % 2
    rows[PAGE:] = 2  # a row that only the last page has
    reserve(many, "one", MANY, rows, table([30.0, 40.0, 50.0]))
    orders = epsilons.accounting.filter.ORDERS
    by_hand = np.array([100 * epsilons.accounting.rdp.divergence(0.02, noise, orders) for noise in (30.0, 40.0, 50.0)])
    assert many.account(MANY).spent == pytest.approx(by_hand[rows], abs=2e-12)
    many.cancel("one")
    assert (many.account(MANY).spent == 0).all()


def test_those_who_leave_a_running_job_are_found_on_every_page_and_stay_away(many):
    """Also after the job gave back what it did not use, and in any order of the people."""
    reserve(many, "one", MANY, np.zeros(len(MANY), dtype=int), table([30.0]))
    many.withdraw([MANY[place] for place in GONE])
    order = np.random.default_rng(0).permutation(len(MANY))
    numbers = many.numbers(MANY)[order]
    left = many.leavers(numbers)
    assert sorted(order[left].tolist()) == GONE
    settle(many, "one", [10])
    assert np.flatnonzero(~many.account(MANY).can_take_part).tolist() == GONE


def test_more_different_people_than_one_statement_asks_for_keep_their_own_sums(many):
    """Each has a wish of their own, and so a cohort of their own."""
    some = MANY[: 2 * databases.AT_ONCE + 1]
    wishes = np.linspace(1.0, 3.0, len(some))
    many.change(some, wishes)
    for name, row in (("one", 0), ("two", 1)):
        reserve(many, name, some, np.full(len(some), row), table([30.0, 40.0]))
    account = many.account(some)
    assert account.epsilon.tolist() == pytest.approx(wishes.tolist(), abs=1e-9)
    orders = epsilons.accounting.filter.ORDERS
    both = sum(100 * epsilons.accounting.rdp.divergence(0.02, noise, orders) for noise in (30.0, 40.0))
    assert account.spent == pytest.approx(np.tile(both, (len(some), 1)), abs=2e-12)
    assert many.verify().is_right


# -- wishes ------------------------------------------------------------------------------------------------------


def test_a_raised_budget_keeps_its_home_order_and_its_spends(registry):
    reserve(registry, "one", IDS, np.zeros(40, dtype=int), table([20.0]))
    before = registry.account(IDS)
    registry.change(IDS[:3], 8.0)
    after = registry.account(IDS)
    assert (after.home == before.home).all()
    assert (after.spent == before.spent).all()
    assert after.epsilon[:4].tolist() == [8.0, 8.0, 8.0, 3.0]
    assert registry.verify().is_right


def test_who_withdrew_or_lowered_below_their_spends_is_in_no_further_run(registry):
    reserve(registry, "one", IDS, np.zeros(40, dtype=int), using(0.6))
    registry.withdraw(["p1"])
    registry.change(["p3"], 0.3)
    for one in ("p1", "p3"):
        with pytest.raises(RegistryRefusedError):
            reserve(registry, f"run of {one}", [one], [0], table([1000.0], steps=1))
    accounts = registry.account(IDS)
    assert np.flatnonzero(~accounts.can_take_part).tolist() == [1, 3]
    with pytest.raises(RegistryRefusedError, match="Fewer than 20 people"):
        accounts.budgets()
    assert len(accounts.subset(accounts.can_take_part).budgets(0.5)) == 38
    assert registry.verify().is_right


@pytest.mark.parametrize("epsilon", [0.0, -1.0, np.nan, np.inf, 2000.0, 0.01])
def test_budgets_that_no_account_can_keep_are_refused(registry, epsilon):
    with pytest.raises(RegistryError):
        registry.enrol(["new"], epsilon)
    assert registry.verify().people == 40


def test_a_quota_bounds_what_one_project_uses_of_anybody(registry):
    registry.set_quota("cardiology", 0.5)
    reserve(registry, "one", IDS, np.zeros(40, dtype=int), using(0.3), project="cardiology")
    used = registry.account(IDS).used_share.max()
    assert 0.25 < used < 0.5
    with pytest.raises(RegistryRefusedError, match="quota"):
        reserve(registry, "two", IDS, np.zeros(40, dtype=int), using(0.3), project="cardiology")
    reserve(registry, "two", IDS, np.zeros(40, dtype=int), using(0.3), project="oncology")


# -- a slow twin -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_agree_with_the_slow_twin(place, seed):
    check_history(place, seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_500_random_histories_agree_with_the_slow_twin(tmp_path, block):
    for seed in range(50 * block, 50 * block + 50):
        check_history((f"sqlite:///{tmp_path}/{seed}.db",), seed)


@pytest.mark.slow
def test_30_random_histories_on_postgresql_agree_with_the_slow_twin(tmp_path, postgres):
    for seed in range(500, 530):
        check_history((postgres.place(), tmp_path / f"{seed}.pepper"), seed)


def check_history(place, seed):
    """Twelve runs of two projects, some with quotas, with cut-offs, raises, lowers and withdrawals between them.

    Then one run that uses what everybody has left.
    """
    rng = np.random.default_rng(seed)
    twin, ids = Twin(), [f"p{i}" for i in range(60)]
    budgets = rng.choice([0.5, 1.0, 4.0], 60)
    with Registry.create(*place) as registry:
        registry.enrol(ids, budgets)
        twin.enrol(ids, budgets, 1e-5)
        for run in range(12):
            history_run(registry, twin, rng, f"{run}", ids)
            if rng.random() < 0.3:
                history_statement(registry, twin, rng, ids)
            if rng.random() < 0.2:
                project, share = str(rng.choice(["a", "b"])), float(rng.uniform(0.05, 1))
                registry.set_quota(project, share)
                twin.quotas[project] = share
        spent = registry.account(ids).spent
        theirs = np.array([sum(twin.people[one][4].values(), np.zeros(16)) for one in ids])
        assert spent == pytest.approx(theirs, abs=1e-10)
        verdict = registry.verify()
        assert verdict.is_right
        assert verdict.people == 60
        use_all(registry, ids)
        assert registry.verify().is_right


def history_run(registry, twin, rng, run, ids):
    who = [ids[i] for i in np.flatnonzero(rng.random(60) < rng.uniform(0.1, 1))] or ids[:1]
    rows = rng.integers(0, 2, len(who))
    of = table(rng.uniform(1.0, 9.0, 2).tolist(), steps=int(rng.integers(50, 400)))
    project = str(rng.choice(["a", "b"]))
    if not twin.reserve(run, who, rows, of, project):
        with pytest.raises(RegistryRefusedError):
            reserve(registry, run, who, rows, of, project=project)
        return
    reserve(registry, run, who, rows, of, project=project)
    if rng.random() < 0.7:
        steps = int(rng.integers(0, of.steps[0] + 1))
        settle(registry, run, [steps])
        twin.settle(run, steps)


def history_statement(registry, twin, rng, ids):
    some = [ids[i] for i in rng.choice(60, 5, replace=False)]
    if rng.random() < 0.5:
        registry.withdraw(some)
        for one in some:
            twin.people[one][3] = True
    else:
        new = float(rng.choice([0.4, 2.0, 6.0]))
        registry.change(some, new)
        for one in some:
            twin.people[one][0], twin.people[one][3] = new, False


def use_all(registry, ids):
    """Everybody with something left is in one more run, which uses every one of these budgets."""
    accounts = registry.account(ids)
    accounts = accounts.subset(accounts.can_take_part)
    if len(accounts) == 0:
        return
    left = accounts.budgets(share=1.0)
    recipe = epsilons.Recipe(steps=20, batch_size=len(accounts) / 10, clip_norm=1.0)
    plan = epsilons.plan(left, recipe, accountant="filter")
    registry.reserve("the last", plan, accounts, budgets=left)
    assert (registry.account(accounts.ids).used_share >= 0.999).all()


# -- tampering ---------------------------------------------------------------------------------------------------

TAMPERINGS = {
    "an event's words": "update event set body = replace(body, '20', '19') where number = 3",
    "an event is removed": "delete from event where number = 5",
    "the last event is removed": "delete from event where number = (select max(number) from event)",
    "a run's plan": "update run set plan = replace(plan, '20.0', '90.0')",
    "a run's project": "update run set project = 'other'",
    "a run's charged steps": "update run set charged = '[1]', state = 'settled'",
    "a run is removed": "delete from run",
    "a roster": "update part set rows = (select rows from statement limit 1)",
    "a statement": "update statement set rows = (select rows from part limit 1)",
    "a wish": "update wish set epsilon = 9.0 where id = 1",
    "a pseudonym": "update person set number = 1 - number where number < 2",
    "a quota": "update quota set share = 1.0",
    "a cohort's sums": "update cohort set sums = ZEROED where id = (select max(id) from cohort)",
    "a cohort's wish": "update cohort set wish = 3 - wish where id = (select max(id) from cohort)",
    "who is in which cohort": "update page set cohorts = (select rows from part limit 1)",
}


@pytest.mark.parametrize("statement", TAMPERINGS.values(), ids=TAMPERINGS)
def test_tampering_is_found(place, registry, statement):
    registry.set_quota("", 0.9)
    reserve(registry, "one", IDS, np.arange(40) % 2, table([20.0, 30.0]))
    assert registry.verify().is_right
    assert outside(place, statement) > 0
    with contextlib.suppress(RegistryError):
        assert not registry.verify().is_right


# -- files and databases -----------------------------------------------------------------------------------------


@only_sqlite
def test_only_the_owner_reads_the_files(tmp_path, registry):
    reserve(registry, "one", IDS, np.zeros(40, dtype=int), table([20.0]))
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    (tmp_path / "people.db").chmod(0o644)
    with pytest.raises(RegistryError, match="0600"):
        Registry(f"sqlite:///{tmp_path}/people.db")


@only_sqlite
def test_a_registry_is_made_once_and_found_with_its_own_pepper(tmp_path, registry):
    url = f"sqlite:///{tmp_path}/people.db"
    with pytest.raises(RegistryError, match="exists already"):
        Registry.create(url)
    with pytest.raises(RegistryError, match="no registry"):
        Registry(f"sqlite:///{tmp_path}/other.db")
    (tmp_path / "people.db.pepper").write_bytes(bytes(32))
    with pytest.raises(RegistryError, match="not the pepper"):
        Registry(url)


@only_sqlite
def test_no_id_is_in_the_database(tmp_path, registry):
    registry.enrol(["Someone With A Long Name"], 1.0)
    registry.close()
    assert all(b"Long Name" not in file.read_bytes() for file in tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "refused"), [("nfs4", True), ("cifs", True), ("ext4", False), ("overlay", False)])
def test_a_network_drive_is_refused(tmp_path, kind, refused):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 8:1 / / rw - ext4 /dev/x rw\n2 1 0:5 / {tmp_path} rw,x - {kind} server:/x rw\n")
    if refused:
        with pytest.raises(RegistryError, match=kind):
            refuse_network(tmp_path / "deep", mounts)
    else:
        refuse_network(tmp_path / "deep", mounts)
