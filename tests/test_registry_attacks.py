"""Bad inputs and bad moments: whatever is given to a registry, nobody pays too little and nothing is half done."""

from __future__ import annotations

import contextlib
import sqlite3
import threading

import numpy as np
import pytest

from epsilons.errors import RegistryError, RegistryRefusedError
from epsilons.registry import Registry, Roster, Table, databases
from epsilons.registry.databases import PAGE
from epsilons.registry.rosters import MOST, MOST_ROWS, UNIT
from registries import KEY, LAST_LINE, begin, only_sqlite, reserve, settle, table, using

IDS = [f"p{i}" for i in range(40)]


@pytest.fixture
def registry(place):
    with Registry.create(*place) as made:
        made.enrol(IDS, [1.0, 3.0] * 20)
        yield made


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
