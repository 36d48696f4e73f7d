"""Backups, restoring, and repair: whole or nothing, on both databases, and never a copy that forgets charges."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import old_registries
import program
from epsilons.errors import RegistryError, RegistryRefusedError
from epsilons.registry import Registry, copies, databases, evidence
from epsilons.registry.databases import database
from epsilons.registry.requests import roles_script
from houses import build
from registries import Twin, only_sqlite, outside, reserve, settle, table

IDS = [f"zz{i:03d}" for i in range(60)]
TABLES = ["fact", "wish", "cohort", "person", "page", "quota", "run", "part", "statement", "event", "head"]
OWN = ["member", "subject", "request"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fill(registry):
    """Everything that a registry can hold; what people spent, by a twin."""
    twin = Twin()
    registry.enrol(IDS, [1.0, 4.0] * 30)
    twin.enrol(IDS, [1.0, 4.0] * 30, 1e-5)
    registry.set_quota("cardiology", 0.7)
    for run, ids, steps in (("one", IDS, 100), ("two", IDS[:30], None), ("three", IDS[7:50], 40)):
        of = table([30.0, 60.0])
        rows = [i % 2 for i in range(len(ids))]
        reserve(registry, run, ids, rows, of, project="cardiology")
        assert twin.reserve(run, ids, rows, of)
        if steps is not None:
            settle(registry, run, [steps])
            twin.settle(run, steps)
    registry.withdraw(IDS[3:6])
    registry.change(IDS[10:12], 2.0)
    return twin


def is_twin(registry, twin):
    """Whether every person's sums are what the twin added up, to a step of rounding per run."""
    spent = registry.account(IDS).spent
    exact = np.array([sum(twin.people[one][4].values(), np.zeros(16)) for one in IDS])
    return np.allclose(spent, exact, rtol=1e-9, atol=1e-10)


def rows(url, names=TABLES):
    """All rows of all tables, sorted."""
    with closing(database(url)) as opened:
        columns = {"request": "id, role, epsilon, delta, applied"}
        return {name: sorted(opened.run(f"select {columns.get(name, '*')} from {name}"), key=repr) for name in names}


@pytest.fixture
def target(request, tmp_path):
    """The URL of an empty place on either database."""
    return f"sqlite:///{tmp_path}/new.db" if request.param == "sqlite" else request.getfixturevalue("postgres").place()


either = pytest.mark.parametrize("target", ["sqlite", "postgresql"], indirect=True)


def connect(url):
    import psycopg

    return psycopg.connect(url)


def exists(url):
    if url.startswith("sqlite"):
        return Path(url.removeprefix("sqlite:///")).exists()
    with connect(url) as connection:
        return connection.execute("select count(*) from pg_tables where schemaname = current_schema()").fetchone() != (
            0,
        )


def command(*arguments):
    return program.epsilons("registry", *arguments)


@either
def test_a_restored_backup_is_the_same_registry_on_any_database(place, target):
    with Registry.create(*place) as registry:
        twin = fill(registry)
    command("export", place[0], "-o", "a.json", "--pepper", place[1]).succeeded()
    command("backup", place[0], "-o", "copy.db", "--pepper", place[1]).succeeded("Copied")
    assert rows("sqlite:///copy.db") == rows(place[0])
    command("restore", "copy.db", target, "--since", "a.json").succeeded("Restored")
    assert rows(target) == rows(place[0])
    with Registry(target, place[1]) as restored:
        assert restored.verify().is_right
        assert is_twin(restored, twin)
        with pytest.raises(RegistryRefusedError):
            reserve(restored, "too much", IDS[:3], [0] * 3, table([0.5]))
        reserve(restored, "more", IDS[20:40], [0] * 20, table([60.0]))
        settle(restored, "two", [5])
        restored.enrol(["zz900"], 3.0)
        assert restored.verify().is_right
        evidence.compare(restored, evidence.read_export(Path("a.json")))


def test_a_backup_is_one_file_for_its_owner_alone_whatever_the_umask(place):
    with Registry.create(*place) as registry:
        fill(registry)
        before = os.umask(0)
        try:
            registry.copy("sqlite:///copy.db")
        finally:
            os.umask(before)
    assert stat.S_IMODE(Path("copy.db").stat().st_mode) == 0o600
    assert {path.name for path in Path().iterdir() if "copy" in path.name} == {"copy.db"}
    assert place[1].read_bytes() not in Path("copy.db").read_bytes()
    command("verify", "sqlite:///copy.db").succeeded("replayed")
    command("backup", "sqlite:///copy.db", "-o", "copy.db").is_refused(2, "exists already")


@either
@pytest.mark.parametrize("dies", ["first table", "last table", "before it is there"])
@only_sqlite
def test_a_copy_that_is_killed_leaves_nothing_and_is_repeated(place, target, dies):
    with Registry.create(*place) as registry:
        fill(registry)
    pid = os.fork()
    if pid == 0:
        loads = []
        load = copies._load

        def killed_load(*arguments):
            load(*arguments)
            loads.append(1)
            if dies != "before it is there" and len(loads) == (1 if dies == "first table" else len(TABLES)):
                os.kill(os.getpid(), signal.SIGKILL)

        copies._load = killed_load
        os.link = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        if dies == "before it is there" and target.startswith("postgres"):
            copies._fill = (lambda fill: lambda *a: (fill(*a), os.kill(os.getpid(), signal.SIGKILL)))(copies._fill)
        try:
            with Registry(*place) as registry:
                registry.copy(target)
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert not exists(target)
    with Registry(*place) as registry:
        registry.copy(target)
    assert rows(target) == rows(place[0])


@only_sqlite
def test_a_new_registry_that_is_killed_leaves_nothing_and_is_made_again(place):
    pid = os.fork()
    if pid == 0:
        os.link = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        try:
            Registry.create(*place)
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    with Registry.create(*place) as registry:
        assert registry.verify().is_right


def test_two_new_registries_at_the_same_moment_are_one(tmp_path, monkeypatch):
    link, url = os.link, f"sqlite:///{tmp_path}/people.db"

    def slow(old, new):
        monkeypatch.setattr(os, "link", link)
        Registry.create(url).close()
        return link(old, new)

    monkeypatch.setattr(os, "link", slow)
    with pytest.raises(RegistryError, match="cannot be made: File exists"):
        Registry.create(url)
    with Registry(url) as registry:
        assert registry.verify().is_right
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_backup_during_writes_is_of_one_moment(place, monkeypatch):
    load = copies._load
    with Registry.create(*place) as registry, Registry(*place) as other:
        fill(registry)
        before = registry.head

        def loading(source, target, statement, name):
            load(source, target, statement, name)
            other.withdraw([IDS[len(name)]])

        monkeypatch.setattr(copies, "_load", loading)
        registry.copy("sqlite:///copy.db")
        assert registry.head != before
    with Registry("sqlite:///copy.db", place[1]) as copy:
        assert copy.head == before
        assert copy.verify().is_right


# -- copies that are not restored --------------------------------------------------------------------------------------


@pytest.fixture
def backup():
    """people.db, copy.db of it, and a.json, an export after one more charge."""
    with Registry.create("sqlite:///people.db") as registry:
        fill(registry)
        registry.copy("sqlite:///copy.db")
        reserve(registry, "later", IDS[20:], [0] * 40, table([90.0]))
    command("export", "sqlite:///people.db", "-o", "a.json").succeeded()


@either
def test_a_copy_that_is_older_than_the_export_is_not_restored(backup, target):
    found = command("restore", "copy.db", target, "--since", "a.json")
    found.is_refused(3, "older copy")
    assert found.out.startswith("Nobody vouches")
    assert not exists(target)
    command("backup", "sqlite:///people.db", "-o", "new.copy").succeeded()
    command("restore", "new.copy", target, "--since", "a.json").succeeded("Restored")


@either
def test_a_copy_with_another_history_is_not_restored(backup, target):
    shutil.copy("people.db.pepper", "copy.db.pepper")
    with Registry("sqlite:///copy.db") as registry:
        registry.withdraw(IDS[50:51])
        registry.withdraw(IDS[51:52])
    command("restore", "copy.db", target, "--since", "a.json").is_refused(3, "rewritten")
    with Registry.create("sqlite:///other.db") as registry:
        registry.copy("sqlite:///other.copy")
    command("restore", "other.copy", target, "--since", "a.json").is_refused(3, "another registry")
    assert not exists(target)


ALTERED = {
    "a sum": "update cohort set sums = ZEROED",
    "a wish": "update wish set epsilon = 9 where id = 1",
    "an event": "update event set body = replace(body, 'two', 'six')",
    "a quota": "update quota set share = 1",
    "a person": "delete from person where number = 1",
    "a run": "update run set project = 'x'",
    "a part": "delete from part where run = 'two'",
    "the head": "update head set number = number - 1",
    "a statement": "delete from statement where event = (select max(event) from statement)",
}


@pytest.mark.parametrize("statement", ALTERED.values(), ids=ALTERED)
def test_a_copy_that_was_altered_is_not_restored(backup, statement):
    assert outside(("sqlite:///copy.db", None), statement) > 0
    found = command("restore", "copy.db", "sqlite:///new.db", "--since", "none")
    assert found.code in (2, 3)
    found.is_refused(found.code)
    assert not Path("new.db").exists()


def test_without_an_export_the_first_line_warns(backup):
    assert command("restore", "copy.db", "sqlite:///new.db").code == 2
    found = command("restore", "copy.db", "sqlite:///new.db", "--since", "none", "-q")
    assert found.code == 0
    assert (found.out + found.err).startswith("--since none: nobody checks that this is the newest backup")
    command("restore", "copy.db", "sqlite:///new.db", "--since", "none").is_refused(2, "exists already")
    command("restore", "copy.db", "sqlite:///x.db", "--since", "none", "--signer", "k").is_refused(2, "--signer")


def test_files_that_are_no_backup_are_refused_in_one_line(backup, tmp_path):
    Path("text.db").write_text("no database")
    Path("empty.db").touch()
    with closing(sqlite3.connect("other.db")) as connection:
        connection.execute("create table fact (name, value)")
    shutil.copy("copy.db", "open.db")
    for name in ("text.db", "empty.db", "other.db"):
        os.chmod(name, 0o600)
    os.chmod("open.db", 0o644)
    for name in ("text.db", "empty.db", "other.db", "open.db", "none.db", "."):
        command("restore", name, "sqlite:///new.db", "--since", "none").is_refused(2)
    assert not Path("new.db").exists()


# -- what waits, and who may -------------------------------------------------------------------------------------------


def test_what_subjects_stated_and_who_they_are_goes_along(postgres, tmp_path):
    house = build(postgres, tmp_path / "pepper")
    house.sql("sue", "insert into request (epsilon, delta) values (2, 1e-5)")
    with house.registry("otto") as registry:
        registry.carry_out()
    house.sql("sam", "insert into request default values")
    with house.registry("rita", pepper=False) as registry:
        registry.copy("sqlite:///copy.db")
    url = postgres.place()
    with Registry("sqlite:///copy.db") as copy:
        copy.copy(url)
    old = postgres.url(house.schema)
    assert rows(url, OWN) == rows("sqlite:///copy.db", OWN) == rows(old, OWN)
    times = "select time from request order by id"
    with connect(url) as new, connect(old) as connection:
        assert new.execute(times).fetchall() == connection.execute(times).fetchall()
        new.execute(roles_script())
    house.schema = url.rpartition("%3D")[2]
    with house.registry("otto") as registry:
        assert registry.carry_out() == 1, "a withdrawal that waited is not lost"
        assert registry.account(["p4"]).withdrawn.all()
        assert registry.verify().is_right
    house.sql("sue", "insert into request default values")
    assert house.sql("sue", "select count(*) from request") == [(2,)]


@pytest.mark.parametrize("login", ["anna", "sue", "nick"])
def test_who_may_not_read_everything_makes_no_backup(postgres, tmp_path, login):
    house = build(postgres, tmp_path / "pepper")
    url = postgres.url(house.schema, user=login)
    found = command("backup", url, "-o", "copy.db", "--pepper", house.pepper)
    found.is_refused(found.code)
    assert found.code in (2, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["pepper"]


# -- repair ------------------------------------------------------------------------------------------------------------


def overwrite(place, cohorts):
    """Write the only page as a runner's raw SQL could."""
    stored = databases.packed(np.asarray(cohorts, dtype=np.int32))
    if place[0].startswith("sqlite"):
        with closing(sqlite3.connect(place[0].removeprefix("sqlite:///"))) as connection, connection:
            connection.execute("update page set cohorts = ?", (stored,))
        return
    with connect(place[0]) as connection:
        connection.execute("update page set cohorts = %s", (stored,))


DAMAGE = {
    "zeroed": lambda cohorts: np.zeros_like(cohorts),
    "swapped": lambda cohorts: np.concatenate([cohorts[1:2], cohorts[:1], cohorts[2:]]),
    "all alike": lambda cohorts: np.full_like(cohorts, cohorts[40]),
    "unknown": lambda cohorts: cohorts + 1000,
    "negative": lambda cohorts: -cohorts,
    "short": lambda cohorts: cohorts[:100],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_repair_computes_pages_again_that_were_overwritten(place, damage):
    with Registry.create(*place) as registry:
        twin = fill(registry)
        (stored,) = registry._database.run("select cohorts from page")[0]
        cohorts = np.frombuffer(zlib.decompress(stored), dtype=np.int32)
        head, use = registry.head, registry.summary()
        overwrite(place, damage(cohorts))
        assert not right(registry)
        command("repair", place[0], "--pepper", place[1]).succeeded("computed again")
        assert right(registry)
        assert registry.head == head, "a repair is no event"
        assert registry.summary() == use
        assert is_twin(registry, twin)
        reserve(registry, "more", IDS[20:40], [0] * 20, table([60.0]))
        assert right(registry)


def right(registry):
    try:
        return registry.verify().is_right
    except (RegistryError, ValueError):
        return False


LAST = "where id = (select max(id) from cohort)"


@pytest.mark.parametrize(
    "statement",
    [
        "delete from page",
        "delete from cohort",
        "update cohort set sums = ZEROED",
        f"update cohort set wish = 1 {LAST}",
        f"update cohort set withdrawn = 1 {LAST}",
    ],
)
def test_repair_computes_sums_again_that_were_altered(place, statement):
    with Registry.create(*place) as registry:
        twin = fill(registry)
        outside(place, statement)
        assert not right(registry)
        registry.repair()
        assert right(registry)
        assert is_twin(registry, twin)


def test_repair_of_a_right_registry_changes_no_account(place):
    with Registry.create(*place) as registry:
        registry.repair()
        twin = fill(registry)
        before = registry.account(IDS)
        registry.repair()
        assert (registry.account(IDS).spent == before.spent).all()
        assert is_twin(registry, twin)
        assert registry.verify().is_right


@only_sqlite
@pytest.mark.parametrize("name", ["an event", "a run", "a part", "a statement"])
def test_repair_is_refused_where_the_events_are_wrong(place, name):
    with Registry.create(*place) as registry:
        fill(registry)
        registry.copy("sqlite:///copy.db")
    outside(("sqlite:///copy.db", None), ALTERED[name])
    before = rows("sqlite:///copy.db")
    found = command("repair", "sqlite:///copy.db")
    assert found.code in (2, 3)
    found.is_refused(found.code, "altered")
    assert rows("sqlite:///copy.db") == before


def test_only_the_owner_repairs(postgres, tmp_path):
    house = build(postgres, tmp_path / "pepper")
    for login in ("anna", "otto", "rita"):
        with house.registry(login) as registry, pytest.raises(RegistryRefusedError, match="right"):
            registry.repair()
    with house.registry("owner") as registry:
        registry.repair()
        assert registry.verify().is_right


# -- registries with a past --------------------------------------------------------------------------------------------


@either
def test_a_migrated_registry_with_a_quarantine_is_copied_with_its_rules(place, target):
    old_registries.build(place, [old_registries.REPLAYED])
    Registry.migrate(place[0])
    with Registry(*place) as registry:
        registry.quarantine([registry.head[0] - 1], "written by hand")
        registry.limit_refunds(0.5)
        before = registry.verify()
        assert before.is_right
        registry.copy("sqlite:///copy.db")
    with Registry("sqlite:///copy.db") as copy:
        copy.copy(target)
    assert rows(target) == rows("sqlite:///copy.db") == rows(place[0])
    with Registry(target, place[1]) as restored:
        assert restored.verify() == before
        restored.repair()
        assert restored.verify() == before
        with pytest.raises(RegistryRefusedError, match="approval"):
            settle(restored, "reserved", [0])
        with pytest.raises(RegistryRefusedError, match="wish"):
            restored._database.transaction(lambda: restored._database.run("update wish set epsilon = 9"))
        assert restored.verify().is_right
