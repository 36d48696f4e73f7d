"""The registry of lifetime budgets: nobody over, nothing lost, nothing altered unseen."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import stat
import threading
from dataclasses import dataclass

import numpy as np
import pytest

import epsilons
from adversaries import DELTA, EPSILON, conversion, costs, divergence, exact_delta, random_tree, sharpest
from epsilons.accounting import filter as filter_
from epsilons.errors import RegistryError, RegistryRefusedError
from epsilons.registry import Registry, Roster, Table, cohorts, databases
from epsilons.registry.cohorts import move
from epsilons.registry.databases import PAGE, refuse_network
from epsilons.registry.rosters import MOST, MOST_ROWS, UNIT
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


def test_a_quota_bounds_what_one_project_uses_of_anybody(registry):
    registry.set_quota("cardiology", 0.5)
    reserve(registry, "one", IDS, np.zeros(40, dtype=int), using(0.3), project="cardiology")
    used = registry.account(IDS).used_share.max()
    assert 0.25 < used < 0.5
    with pytest.raises(RegistryRefusedError, match="quota"):
        reserve(registry, "two", IDS, np.zeros(40, dtype=int), using(0.3), project="cardiology")
    reserve(registry, "two", IDS, np.zeros(40, dtype=int), using(0.3), project="oncology")


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


@pytest.mark.parametrize("at_once", [cohorts.PAIRS_AT_ONCE, 1])
@pytest.mark.parametrize("few", [cohorts.FEW_PAIRS, 0], ids=["counted in an array", "sorted"])
def test_people_on_every_page_are_charged_their_own_row(many, few, at_once, monkeypatch):
    """However the pairs of cohorts and rows are found, and however many of them are charged at once."""
    monkeypatch.setattr(cohorts, "FEW_PAIRS", few)
    monkeypatch.setattr(cohorts, "PAIRS_AT_ONCE", at_once)
    rows = np.arange(len(MANY)) % 2
    rows[PAGE:] = 2  # a row that only the last page has
    reserve(many, "one", MANY, rows, table([30.0, 40.0, 50.0]))
    orders = epsilons.accounting.filter.ORDERS
    by_hand = np.array([100 * epsilons.accounting.rdp.divergence(0.02, noise, orders) for noise in (30.0, 40.0, 50.0)])
    assert many.account(MANY).spent == pytest.approx(by_hand[rows], abs=2e-12)
    stored = many._database.run("select * from cohort")
    with pytest.raises(RegistryRefusedError):  # the last row's people have too little: all of it is undone
        reserve(many, "two", MANY, rows, table([30.0, 40.0, 0.5]))
    assert many._database.run("select * from cohort") == stored
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


def test_a_wish_that_no_row_has_is_refused_and_no_neighbours_caps_are_used(registry):
    wishes = cohorts.Wishes(registry._database)
    stored = wishes.ids
    assert (wishes.places(stored) == np.arange(len(stored))).all()
    for missing in (0, int(stored[-1]) + 1):
        with pytest.raises(RegistryError, match="altered"):
            wishes.caps(np.array([missing]))


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


# -- bad inputs and bad moments: nobody pays too little, and nothing is half done ------------------------------------


@pytest.mark.parametrize(
    ("rates", "noises", "steps"),
    [
        ([[0.1]], [[np.nan]], (10,)),
        ([[0.1]], [[-np.inf]], (10,)),
        ([[0.1]], [[-1.0]], (10,)),
        ([[0.1]], [[0.0]], (10,)),
        ([[np.nan]], [[1.0]], (10,)),
        ([[-0.1]], [[1.0]], (10,)),
        ([[1.1]], [[1.0]], (10,)),
        ([[0.1]], [[1.0]], (-10,)),
        ([[0.1]], [[1.0]], (1.5,)),
        ([[0.1]], [[1.0]], (np.nan,)),
        ([[0.1]], [[1.0]], ()),
        ([[0.1, 0.1]], [[1.0]], (10,)),
        ([0.1], [1.0], (10,)),
        (np.zeros((1, 0)), np.zeros((1, 0)), (10,)),
        (np.zeros((0, 1)), np.zeros((0, 1)), ()),
        (np.full((1, MOST_ROWS + 1), 0.1), np.full((1, MOST_ROWS + 1), 9.0), (1,)),
    ],
)
def test_a_table_that_costs_nothing_by_mistake_is_refused(rates, noises, steps):
    with pytest.raises(RegistryError):
        Table(np.array(rates), np.array(noises), steps)


@pytest.mark.parametrize(
    ("numbers", "rows"),
    [
        ([0, 1], [0, -1]),
        ([0, 1], [0, -2]),
        ([-1, 1], [0, 0]),
        ([0, 0], [0, 0]),
        ([0, 1], [0]),
        ([0, 1], [0, MOST_ROWS]),
        ([0, 1], [0, 2**16]),
        ([0.5, 1.0], [0, 0]),
        ([0, 1], [0.2, 0.9]),
        ([], []),
    ],
)
def test_a_roster_that_leaves_somebody_out_by_mistake_is_refused(numbers, rows):
    with pytest.raises(RegistryError):
        Roster(np.array(numbers), np.array(rows))


class Given:
    """A roster of these pages; other ones each time they are asked for, if there are several."""

    def __init__(self, *pages):
        self._pages, self._asked = pages, -1

    def pages(self):
        self._asked += 1
        yield from self._pages[min(self._asked, len(self._pages) - 1)]


def page(rows, size=PAGE, dtype=np.int16):
    made = np.full(size, -1, dtype=dtype)
    made[: len(rows)] = rows
    return made


@pytest.mark.parametrize(
    "pages",
    [
        [],
        [(0, page([-2, 0]))],
        [(0, page([0, 1]))],
        [(0, page([0], size=PAGE - 1))],
        [(0, page([0], dtype=np.int64))],
        [(0, page([0])), (0, page([0]))],
        [(1, page([])), (0, page([0]))],
        [(-1, page([0]))],
        [(0, page([]))],
        [(0, page([0] * 41))],
        [(5, page([0]))],
    ],
)
@only_sqlite
def test_pages_of_another_form_or_of_strangers_are_refused_whole(registry, pages):
    with pytest.raises(RegistryError):
        registry.reserve_table("one", table([20.0]), Given(pages))
    assert (registry.account(IDS).spent == 0).all()
    assert registry.verify().is_right


def test_who_is_stored_is_who_is_charged_whatever_a_roster_gives_next_time(registry):
    registry.reserve_table("one", table([20.0]), Given([(0, page([0] * 30))], [(0, page([0]))]))
    assert (registry.account(IDS).spent[:, 5] > 0).sum() == 30
    assert registry.verify().is_right


def test_empty_pages_and_page_borders_change_nothing(place):
    with Registry.create(*place) as registry:
        for count in (PAGE - 1, 1, 1, 2):
            first = registry.verify().people
            registry.enrol(range(first, first + count), 1.0)
        people = PAGE + 3
        border = [PAGE - 2, PAGE - 1, PAGE, PAGE + 1]
        reserve(registry, "border", border, [0, 1, 0, 1], table([20.0, 10.0]))
        spent = registry.account(range(people)).spent[:, 5]
        assert np.flatnonzero(spent).tolist() == border
        assert spent[PAGE - 2] == spent[PAGE] < spent[PAGE - 1] == spent[PAGE + 1]
        empty, row = page([]), page([0])
        registry.reserve_table("x", table([20.0]), Given([(0, empty), (1, row), (2, empty)]))
        registry.reserve_table("x", table([20.0]), Given([(1, row)]))  # the same people: nothing is charged
        registry.cancel("x")
        assert (registry.account(range(people)).spent[:, 5] == spent).all()
        assert registry.verify().is_right


@only_sqlite
def test_all_32768_rows_of_a_table_can_be_used(registry):
    noises = np.linspace(20.0, 90.0, MOST_ROWS)
    rows = np.linspace(0, MOST_ROWS - 1, 40).astype(int)
    registry.reserve_table("wide", table(noises.tolist()), Roster(registry.numbers(IDS), rows))
    spent = registry.account(IDS).spent[:, 5]
    assert (np.diff(spent) < 0).all()
    assert registry.verify().is_right


def test_sums_that_would_overflow_are_refused(registry, monkeypatch):
    # Almost nothing at order 2, and beyond every cap at order 96.
    registry.enrol(["rich"], 900.0)
    costs = np.full((1, 16), MOST)
    costs[0, 0] = 1
    monkeypatch.setattr(Table, "costs", lambda self, steps=None: 1000 * costs)
    for run in range(8):
        reserve(registry, f"{run}", ["rich"], [0], table([20.0]))
    with pytest.raises(RegistryRefusedError):
        reserve(registry, "9", ["rich"], [0], table([20.0]))
    assert (registry.account(["rich"]).spent[0, 1:] == 8000 * MOST / UNIT).all()
    assert registry.verify().wrong == 1, "the verifier computes the costs itself"


@pytest.mark.parametrize("name", ["x" * 10_000, "a\nb", "a\0b", "\x1b[31m", "\u202eabc", "\ud800", 7])
def test_names_that_do_not_print_are_refused(registry, name):
    for call in (
        lambda: reserve(registry, name, IDS[:2], [0, 0], table([20.0])),
        lambda: reserve(registry, "one", IDS[:2], [0, 0], table([20.0]), project=name),
        lambda: registry.release(name, 1.0, ids=IDS, sensitivity=1.0, noise_multiplier=50.0),
        lambda: registry.set_quota(name, 0.5),
    ):
        with pytest.raises(RegistryError, match="printable"):
            call()
    assert (registry.account(IDS).spent == 0).all()


@pytest.mark.parametrize("name", ["'; drop table run; --", '"%s" %(x)s {} \\', "ключ 鍵 é", "run%20one", " ", "?1"])
def test_every_other_name_is_only_a_name(registry, name):
    registry.set_quota(name, 0.9)
    for _ in range(2):
        reserve(registry, name, IDS, np.zeros(40, dtype=int), table([20.0]), project=name)
    settle(registry, name, [3])
    assert registry.verify().runs == 1
    assert registry.verify().is_right


def test_nobody_is_changed_twice_by_one_list(registry):
    for call in (
        lambda: registry.change(["p1", " p1"], [2.0, 9.0]),
        lambda: registry.withdraw(["p1", "p1"]),
        lambda: registry.enrol(["new", "new "], 1.0),
        lambda: registry.release("mean", 1.0, ids=["p1", "p1"], sensitivity=1.0, noise_multiplier=50.0),
    ):
        with pytest.raises(RegistryError, match="twice"):
            call()
    assert registry.verify().events == registry.head[0]
    assert registry.verify().people == 40


def test_steps_that_are_no_whole_numbers_give_nothing_back(registry):
    reserve(registry, "one", IDS, np.zeros(40, dtype=int), table([20.0]))
    begin(registry, "one")
    before = registry.account(IDS).spent
    for charged in ([1.5], [-1], ["3"], [np.nan], [], [1, 1], [None]):
        with pytest.raises((RegistryError, TypeError)):
            registry.settle("one", charged, LAST_LINE, KEY)
    assert (registry.account(IDS).spent == before).all()


def test_more_different_budgets_than_can_be_stored_are_refused(registry):
    people = MOST_ROWS + 10
    with pytest.raises(RegistryError, match="Round them"):
        registry.enrol(range(people), np.linspace(1.0, 2.0, people))
    assert registry.verify().people == 40


def test_two_registries_can_share_a_pepper_and_are_two(place, tmp_path, registry):
    with Registry.create(f"sqlite:///{tmp_path}/second.db", place[1]) as second:
        assert second.id != registry.id
        second.enrol(IDS[:3], 1.0)
        reserve(second, "one", IDS[:3], [0, 0, 0], table([20.0]))
    assert (registry.account(IDS).spent == 0).all()


# -- bad moments -------------------------------------------------------------------------------------------------


@only_sqlite
def test_a_full_disk_loses_nothing(registry):
    reserve(registry, "one", IDS, np.zeros(40, dtype=int), table([20.0]))
    before = registry.account(IDS).spent
    ((pages,),) = registry._database.run("pragma page_count")
    registry._database.run(f"pragma max_page_count = {pages}")
    rng = np.random.default_rng(0)
    with pytest.raises(RegistryError, match="full"):
        registry.enrol(range(5000), 1.0)
    assert (registry.account(IDS).spent == before).all()
    registry._database.run(f"pragma max_page_count = {pages + 100_000}")
    registry.enrol(range(100), rng.choice([1.0, 2.0], 100))
    assert registry.verify().is_right


@only_sqlite
def test_a_file_that_cannot_be_written_is_said(registry):
    registry._database.run("pragma query_only = 1")
    with pytest.raises(RegistryError, match="readonly"):
        reserve(registry, "one", IDS, np.zeros(40, dtype=int), table([20.0]))
    assert registry.verify().is_right


def test_a_lock_that_is_never_released_ends_with_an_error(place, registry, monkeypatch):
    monkeypatch.setattr(databases, "PATIENCE", 0.3)
    monkeypatch.setattr(databases, "SETTINGS", ("set lock_timeout = '300ms'",))
    held, done = threading.Event(), threading.Event()

    def hold():
        with Registry(*place) as other:
            other._database.transaction(lambda: (held.set(), done.wait(20)))

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(20)
    with Registry(*place) as waiting:
        with pytest.raises(RegistryError, match="failed"):
            waiting.withdraw(["p1"])
        assert not waiting.account(IDS).withdrawn.any(), "readers do not wait"
        assert waiting.verify().is_right
    done.set()
    holder.join()
    registry.withdraw(["p1"])
    assert registry.verify().is_right


def test_a_connection_that_was_lost_is_made_again(place, registry):
    if place[0].startswith("sqlite"):
        pytest.skip("a file has no connection to lose")
    import psycopg

    reserve(registry, "one", IDS, np.zeros(40, dtype=int), table([20.0]))
    begin(registry, "one")
    ((process,),) = registry._database.run("select pg_backend_pid()")
    with psycopg.connect(place[0], autocommit=True) as other:
        other.execute("select pg_terminate_backend(%s)", (process,))
    with contextlib.suppress(RegistryError):
        registry.settle("one", [10], LAST_LINE, KEY)
    registry.settle("one", [10], LAST_LINE, KEY)
    assert registry.verify().is_right


def test_a_registry_is_made_whole_or_not_at_all(place, monkeypatch):

    with monkeypatch.context() as patch:
        patch.setattr(databases, "add", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Registry.create(*place)
    with Registry.create(*place) as made:
        assert made.verify().is_right


def test_a_file_that_is_no_database_is_refused(tmp_path):
    file = tmp_path / "people.db"
    file.write_bytes(b"not a database" * 1000)
    file.chmod(0o600)
    with pytest.raises(RegistryError):
        Registry(f"sqlite:///{file}")


@only_sqlite
def test_a_cohort_that_is_missing_stops_a_charge(tmp_path, registry):
    reserve(registry, "one", IDS[:30], np.zeros(30, dtype=int), using(0.4))
    with sqlite3.connect(tmp_path / "people.db") as outside:
        outside.execute("delete from cohort where id = 1")
    with pytest.raises(RegistryError, match="altered"):
        reserve(registry, "two", IDS, np.zeros(40, dtype=int), table([20.0]))


# -- adversaries against whole-number caps, rounded costs and refusals -----------------------------------------------


#: One lifetime budget: every branch of every tree is a person of their own.
PEOPLE = 3000


class Against:
    """A registry whose people all have the same lifetime budget, and the next of them to whom nothing happened."""

    def __init__(self, registry, epsilon):
        registry.enrol(range(PEOPLE), epsilon, DELTA)
        self.registry, self._next = registry, 0

    def person(self, history=()):
        self._next += 1
        person = Person(self, self._next - 1, [])
        for channel_costs in history:
            person.pay(channel_costs)
        return person


@dataclass
class Person:
    """Somebody on one branch of a tree. history: costs of the channels so far"""

    house: Against
    number: int
    history: list

    @property
    def left(self):
        accounts = self.house.registry.account([self.number])
        return accounts.epsilon[0] - accounts.starts[0]

    def pay(self, channel_costs):
        """Reserve one mechanism of these Rényi divergences. Raises RegistryRefusedError."""
        change = np.ceil(np.minimum(channel_costs * UNIT, MOST)).astype(np.int64)[None]
        database, roster = self.house.registry._database, Roster(np.array([self.number]), np.array([0]))
        database.transaction(lambda: move(database, roster, change, is_charge=True))
        self.history.append(channel_costs)

    def charge(self, channel_costs):
        other = self.house.person(self.history)
        for one in (self, other):
            one.pay(channel_costs)
        return self, other


def against_new(folder, epsilon):
    return Against(Registry.create(f"sqlite:///{folder}/people.db"), epsilon)


#: 10 trees per seed: 200 in all.
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_random_adversaries_stay_below_delta(tmp_path, seed):
    rng, epsilon = np.random.default_rng(seed), [EPSILON, 1.0, 8.0][seed % 3]
    against = against_new(tmp_path, epsilon)
    reached = []
    for _ in range(10):
        leaves = random_tree(rng, against.person(), int(rng.integers(1, 5)), epsilon, caution=1e-9)
        assert sum(x for x, _ in leaves) == pytest.approx(1)
        reached.append(exact_delta(leaves, epsilon))
    assert 0.001 * DELTA < max(reached) <= DELTA


def two_stages(against, caps, orders, first=(0.1, 0.1 / 1.2)):
    """The leaves of the adversary of docs/registry.md, who asks for what these caps allow; None where it is refused."""
    leaves = []
    for order, (p, q) in zip(orders, [first, (1 - first[0], 1 - first[1])], strict=True):
        person = against.person([costs(*first)])
        x, y = sharpest(order, caps[order] - divergence(order, *first), EPSILON - math.log(p / q), points=400)
        person.pay(costs(x, y))
        leaves += [(p * x, q * y), (p * (1 - x), q * (1 - y))]
    return leaves


def test_the_adversary_that_exceeds_delta_under_plain_rdp_is_refused(tmp_path):
    caps = {order: EPSILON - conversion(order, DELTA) for order in (4, 32)}
    with pytest.raises(RegistryRefusedError):
        two_stages(against_new(tmp_path, EPSILON), caps, (32, 4))


def test_the_same_adversary_stays_below_delta_with_what_the_registry_allows(tmp_path):
    against = against_new(tmp_path, EPSILON)
    caps = dict(zip(filter_.ORDERS, against.person().left - 1e-9, strict=True))
    usable = [order for order in (4, 5, 6, 8, 32) if caps[order] > 0.2]
    reached = [exact_delta(two_stages(against, caps, (a, b))) for a in usable for b in usable]
    assert 0.2 * DELTA < max(reached) <= DELTA


@pytest.mark.parametrize("order", [6, 8, 32])
def test_a_pico_nat_too_much_is_refused(tmp_path, order):
    against = against_new(tmp_path, EPSILON)
    place = list(filter_.ORDERS).index(order)
    cost = np.full(16, 1e6)
    cost[place] = against.person().left[place] - 2.5 / UNIT
    against.person([cost])
    cost[place] += 3 / UNIT
    with pytest.raises(RegistryRefusedError):
        against.person([cost])
