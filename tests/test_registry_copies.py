"""Copies, exports, migration and repair: whole or nothing, on both databases, and never a copy that forgets charges."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import stat
import zlib
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

import program
from epsilons.errors import EpsilonsError, RegistryError, RegistryRefusedError
from epsilons.ledger import signatures
from epsilons.registry import Registry, Roster, copies, databases, evidence
from epsilons.registry.databases import database
from epsilons.registry.people import roles_script
from registries import FORTY as FORTY
from registries import (
    GHOST,
    KEY,
    LAST_LINE,
    OTHER_KEY,
    REPLAYED,
    Twin,
    begin,
    build_house,
    build_old,
    only_sqlite,
    outside,
    reserve,
    settle,
    table,
    write_history,
)
from shares import share

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
    "an event": "update event set body = replace(body, 'two', 'six')",
    "a run": "update run set project = 'x'",
    "a part": "delete from part where run = 'two'",
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
    house = build_house(postgres, tmp_path / "pepper")
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
    house = build_house(postgres, tmp_path / "pepper")
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


@pytest.mark.parametrize("damage", share(DAMAGE.values(), 3))
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
    house = build_house(postgres, tmp_path / "pepper")
    for login in ("anna", "otto", "rita"):
        with house.registry(login) as registry, pytest.raises(RegistryRefusedError, match="right"):
            registry.repair()
    with house.registry("owner") as registry:
        registry.repair()
        assert registry.verify().is_right


# -- registries with a past --------------------------------------------------------------------------------------------


@either
def test_a_migrated_registry_with_a_quarantine_is_copied_with_its_rules(place, target):
    build_old(place, [REPLAYED])
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


# -- exports: the head alone, coarse numbers on demand, and who vouches for them -------------------------------------


URL = "sqlite:///people.db"
GRID = [step * 10**power for power in range(1, 6) for step in (1, 2, 5)][1:]
BOUNDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]
EPSILONS = [0.9, 1.0, 1.7, 2.0, 2.5, 4.0, 7.0]


@pytest.fixture
def people():
    with Registry.create(URL) as registry_command:
        registry_command.enrol([f"zz{i}" for i in range(60)], 3.0)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two key pairs: officer.pem and other.pem, and their public halves."""
    from cryptography.hazmat.primitives import serialization as ser
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    folder = tmp_path_factory.mktemp("keys")
    for name in ("officer", "other"):
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption())
        public = key.public_key().public_bytes(ser.Encoding.PEM, ser.PublicFormat.SubjectPublicKeyInfo)
        (folder / f"{name}.pem").write_bytes(private)
        (folder / f"{name}-public.pem").write_bytes(public)
    return folder


def registry_command(*arguments):
    return program.epsilons("registry", arguments[0], URL, *arguments[1:])


def on_grid(count):
    """The slow obvious grid: the largest of 20, 50, 100, … that is not above the count."""
    below = [one for one in GRID if one <= count]
    return f"{below[-1]:,} or more" if below else "fewer than 20"


def expected(budgets, runs):
    """What the counts must be, of id -> epsilon."""
    classes = Counter(next(bound for bound in BOUNDS if bound >= epsilon) for epsilon in budgets.values())
    return {
        "people": on_grid(len(budgets)),
        "runs": on_grid(runs),
        "epsilon_at_most": {f"{bound:g}": on_grid(classes[bound]) for bound in BOUNDS if classes[bound] >= 20},
    }


def change_one(opened, rng, budgets, runs):
    """One person's change, return, withdrawal, enrolment, or run; how many runs there are then."""
    one = str(rng.choice(list(budgets)))
    kind = rng.choice(["change", "withdraw", "enrol", "run"])
    if kind == "change":
        budgets[one] = float(rng.choice(EPSILONS))
        opened.change([one], budgets[one])
    elif kind == "withdraw":
        opened.withdraw([one])
    elif kind == "enrol":
        budgets[f"new{len(budgets)}"] = float(rng.choice(EPSILONS))
        opened.enrol([f"new{len(budgets) - 1}"], budgets[f"new{len(budgets) - 1}"])
    else:
        of_one = Roster(np.array([rng.integers(len(budgets))]), np.array([0]))
        with suppress(RegistryRefusedError):  # who withdrew
            opened.reserve_table(f"run {runs}", table([500.0]), of_one, project=f"only {runs}")
            return runs + 1
    return runs


def test_an_export_is_the_head_and_nothing_else(people):
    registry_command("export", "-o", "a.json").succeeded()
    values = json.loads(Path("a.json").read_text())
    assert set(values) == {"document", "schema", "registry", "time", "head"}
    with Registry(URL) as opened:
        assert (values["head"]["number"], values["head"]["hash"]) == opened.head
        assert (values["schema"], values["registry"]) == (2, opened.id)


@pytest.mark.parametrize("seed", range(3))
def test_no_coarse_number_shows_what_one_person_did(seed):
    """Exact counts stay away from the grid by more than the steps of the walk: no export may differ."""
    rng = np.random.default_rng(seed)
    budgets = {f"p{i}": 1.0 for i in range(30)} | {f"q{i}": 2.0 for i in range(70)} | {f"r{i}": 4.0 for i in range(35)}
    with Registry.create(URL) as opened:
        opened.enrol(list(budgets), list(budgets.values()))
        before, runs = evidence.export(opened, counts=True), 0
        for _ in range(9):
            runs = change_one(opened, rng, budgets, runs)
            after = evidence.export(opened, counts=True)
            different = {name for name in before if before[name] != after[name]}
            assert different <= {"head", "time"}
        assert before["counts"] == expected(budgets, runs)
        assert after["head"]["number"] > before["head"]["number"]


@pytest.mark.parametrize("seed", range(2))
def test_coarse_numbers_are_exact_ones_rounded_down_to_the_grid(seed):
    rng = np.random.default_rng(seed)
    budgets = {f"p{i}": float(rng.choice(EPSILONS[:4])) for i in range(98)}
    runs = 0
    with Registry.create(URL) as opened:
        assert opened.counts() == {"people": "fewer than 20", "runs": "fewer than 20", "epsilon_at_most": {}}
        opened.enrol(list(budgets), list(budgets.values()))
        seen = set()
        for _ in range(30):
            runs = change_one(opened, rng, budgets, runs)
            found = opened.counts()
            assert found == expected(budgets, runs)
            seen.add(json.dumps(found))
        assert len(seen) > 1, "the walk crosses the grid, where one person does show"


def test_the_statement_about_people_who_withdrew_is_coarse(people):
    with Registry(URL) as opened:
        opened.withdraw([f"zz{i}" for i in range(23)])
    for name, more in (("a.json", []), ("b.json", ["zz30"])):
        with Registry(URL) as opened:
            opened.withdraw(more or ["zz0"])
        registry_command("export", "-o", name, "--excluded", "2100-01-01").succeeded()
    first, second = (json.loads(Path(name).read_text())["excluded"] for name in ("a.json", "b.json"))
    assert first == second == {"withdrew_before": "2100-01-01", "people": "20 or more", "in_later_rosters": 0}


# -- who vouches -------------------------------------------------------------------------------------------------------


def first_line(outcome):
    return (outcome.out or outcome.err).splitlines()[0]


def test_without_a_signer_the_first_line_says_that_nobody_vouches(people, keys):
    registry_command("export", "-o", "plain.json").succeeded()
    registry_command("export", "-o", "signed.json", "--sign", keys / "other.pem").succeeded()
    for name, words in (("plain.json", "is not signed"), ("signed.json", "nothing here confirms")):
        found = registry_command("verify", "--since", name)
        found.succeeded("continues the export")
        assert first_line(found).startswith("Nobody vouches for this export: ")
        assert words in first_line(found)
        for flag in ("--json", "-q"):
            quiet = registry_command("verify", "--since", name, flag)
            assert quiet.code == 0
            assert quiet.err.startswith("Nobody vouches for this export: ")
        assert json.loads(registry_command("verify", "--since", name, "--json").out)["signer"] is False
    found = registry_command("verify", "--since", "signed.json", "--signer", keys / "other-public.pem")
    found.succeeded("continues the export")
    assert "Nobody" not in found.out + found.err
    registry_command("verify", "--since", "signed.json", "--signer", keys / "officer-public.pem").is_refused(
        3, "another key"
    )


def test_a_signer_is_a_key_a_fingerprint_or_a_file_here_and_for_a_run(people, keys):
    registry_command("export", "-o", "signed.json", "--sign", keys / "other.pem").succeeded()
    given = {}
    for name in ("other", "officer"):
        file = keys / f"{name}-public.pem"
        key = signatures.private_key(keys / f"{name}.pem")[1]
        assert signatures.signer(str(file)) == key
        given[name] = (str(file), key, signatures.fingerprint(key))
    for right, wrong in zip(given["other"], given["officer"], strict=True):
        registry_command("verify", "--since", "signed.json", "--signer", right).succeeded("continues the export")
        registry_command("verify", "--since", "signed.json", "--signer", wrong).is_refused(3, "another key")
    for odd in ("none.pem", "people.db", ".", given["other"][1][:-2]):
        refused = registry_command("verify", "--since", "signed.json", "--signer", odd)
        refused.is_refused(2, "--signer takes a public key or fingerprint")


def test_a_signed_export_cannot_be_changed(people, keys):
    registry_command("export", "-o", "a.json", "--sign", keys / "officer.pem").succeeded()
    values = json.loads(Path("a.json").read_text())
    Path("b.json").write_text(json.dumps(values | {"people": "61"}))
    registry_command("verify", "--since", "b.json").is_refused(3, "changed after it was signed")
    del values["signature"]
    Path("c.json").write_text(json.dumps(values))
    officer = ["--signer", keys / "officer-public.pem"]
    registry_command("verify", "--since", "c.json", *officer).is_refused(3, "not signed")
    refused = registry_command("export", "-o", "d.json", "--sign", keys / "officer-public.pem")
    refused.is_refused(2, "private Ed25519 key")


def test_a_forged_export_is_said_to_be_vouched_for_by_nobody(people, keys):
    """The registry is rolled back, and its owner signs an export of the old copy with a key of their own."""
    shutil.copy("people.db", "old.db")
    with Registry(URL) as opened:
        opened.withdraw(["zz3"])
    registry_command("export", "-o", "honest.json", "--sign", keys / "officer.pem").succeeded()
    shutil.copy("old.db", "people.db")
    registry_command("export", "-o", "forged.json", "--sign", keys / "other.pem").succeeded()
    officer = ["--signer", keys / "officer-public.pem"]
    registry_command("verify", "--since", "honest.json", *officer).is_refused(3, "older copy")
    registry_command("verify", "--since", "forged.json", *officer).is_refused(3, "another key")
    assert first_line(registry_command("verify", "--since", "forged.json")).startswith("Nobody vouches")


# -- other exports, and files that are none ----------------------------------------------------------------------------


def test_an_export_of_the_first_version_is_still_compared(people):
    with Registry(URL) as opened:
        use, (number, last) = opened.summary().to_dict(), opened.head
        identity = {"document": "epsilons registry", "registry": opened.id, "time": "2026-01-01T00:00:00+00:00"}
        old = identity | {"schema": 1, "head": {"number": number, "hash": last}}
        old |= {name: use[name] for name in ("people", "wishes", "projects", "runs")}
        opened.withdraw(["zz1"])
    Path("old.json").write_text(json.dumps(old))
    registry_command("verify", "--since", "old.json").succeeded("continues the export of 2026-01-01")
    Path("old.json").write_text(json.dumps(old | {"head": {"number": number, "hash": "0" * 64}}))
    registry_command("verify", "--since", "old.json").is_refused(3, "rewritten")


BAD_VALUES = [None, True, False, 1.5, 1.0, -1, 2**31, 10**30, "1", [], {}, float("nan"), float("inf"), "\ud800"]
BAD = {
    **{f"head {i}": {"head": value} for i, value in enumerate(BAD_VALUES)},
    **{f"number {i}": {"head": {"number": value, "hash": "0" * 64}} for i, value in enumerate([*BAD_VALUES, 0])},
    **{f"hash {i}": {"head": {"number": 1, "hash": value}} for i, value in enumerate(BAD_VALUES)},
    **{f"schema {i}": {"schema": value} for i, value in enumerate([*BAD_VALUES, 0, 3]) if value not in (True, 1.0)},
    **{f"registry {i}": {"registry": value} for i, value in enumerate(BAD_VALUES)},
    **{f"excluded {i}": {"excluded": value} for i, value in enumerate(BAD_VALUES[1:])},
    **{f"day {i}": {"excluded": {"withdrew_before": value}} for i, value in enumerate(BAD_VALUES)},
    **{f"signature {i}": {"signature": value} for i, value in enumerate(BAD_VALUES)},
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template")
    with Registry.create(f"sqlite:///{folder}/people.db") as opened:
        opened.enrol(["zz0"], 3.0)
        return folder, evidence.export(opened)


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_an_export_with_a_bad_value_is_refused_in_one_line(exported, change):
    folder, good = exported
    Path("bad.json").write_text(json.dumps(good | change))
    found = program.epsilons("registry", "verify", f"sqlite:///{folder}/people.db", "--since", "bad.json")
    assert found.code in (2, 3)
    found.is_refused(found.code)


TEXTS = {
    "deep": '{"head": ' * 100_000 + "1" + "}" * 100_000,
    "deep beside": '{"document": "epsilons registry", "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "long number": '{"head": {"number": ' + "9" * 100_000 + ', "hash": ""}}',
    "a list": "[1]",
    "empty": "",
    "no text": "\udcff",
    "a text": '"epsilons registry"',
    "twice": '{"head": {"number": 1, "number": -1}}',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_file_that_is_no_export_is_refused_in_one_line(exported, text):
    Path("bad.json").write_bytes(text.encode(errors="surrogateescape"))
    found = program.epsilons("registry", "verify", f"sqlite:///{exported[0]}/people.db", "--since", "bad.json")
    found.is_refused(2, "no export")


# -- registries of earlier versions, and wrong events taken out of the account ---------------------------------------


def facts(place):
    """Everything that is stored, but the schema's own columns and times."""
    base = databases.database(place[0])
    found = {
        name: sorted(map(repr, base.run(f"select {columns} from {name}")))
        for name, columns in {
            "run": "id, kind, project, digest, plan, charged, key, ledger",
            "part": "*",
            "statement": "*",
            "person": "*",
            "page": "*",
            "cohort": "*",
            "wish": "*",
            "quota": "*",
        }.items()
    }
    base.close()
    return found


def test_an_earlier_registry_says_that_it_is_to_be_migrated(place):
    build_old(place)
    with pytest.raises(RegistryError, match="epsilons registry migrate URL"):
        Registry(*place)


def test_a_migrated_registry_has_lost_nothing_and_goes_on(place):
    build_old(place)
    before = facts(place)
    Registry.migrate(place[0])
    assert facts(place) == before
    Registry.migrate(place[0])  # nothing more to do
    with Registry(*place) as registry:
        states = {run.run: run.state for run in registry.summary().runs}
        assert states == {
            "reserved": "reserved", "running": "running", "settled": "settled", "cancelled": "cancelled",
            "mean": "settled",
        }  # fmt: skip
        assert registry.verify().is_right
        begin(registry, "reserved", OTHER_KEY)
        begin(registry, "running")  # again
        registry.settle("running", [7], LAST_LINE, KEY)
        registry.settle("settled", [10], LAST_LINE, KEY)  # again
        registry.cancel("cancelled")  # again
        reserve(registry, "new", FORTY[5:], np.zeros(35, dtype=int), table([60.0]))
        registry.withdraw(["p7"])
        registry.limit_refunds(0.5)
        assert registry.verify().is_right


def statements_of(place, monkeypatch):
    """How many statements a migration has."""
    count = [0]
    with monkeypatch.context() as patch:
        for kind in (databases.Sqlite, databases.Postgres):
            patch.setattr(kind, "run", counting(kind.run, count))
        Registry.migrate(place[0])
    return count[0]


def counting(run, count, kill_at=None):
    def counted(self, *arguments):
        if count[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count[0] += 1
        return run(self, *arguments)

    return counted


@pytest.mark.parametrize("each", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_migration_that_is_killed_at_any_statement_is_whole_or_not_at_all(
    place, tmp_path, monkeypatch, request, each
):
    build_old(place)
    before = facts(place)
    other = (f"sqlite:///{tmp_path}/other.db", tmp_path / "pepper")
    if not place[0].startswith("sqlite"):
        other = (request.getfixturevalue("postgres").place(), tmp_path / "pepper")
    build_old(other)
    statements = statements_of(other, monkeypatch)
    assert statements > 40
    for at in [*range(0, statements, each), statements - 1]:
        pid = os.fork()
        if pid == 0:
            for kind in (databases.Sqlite, databases.Postgres):
                setattr(kind, "run", counting(kind.run, [0], at))  # noqa: B010
            try:
                Registry.migrate(place[0])
            finally:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        with pytest.raises(RegistryError, match="migrate URL"):
            Registry(*place)
    assert facts(place) == before
    Registry.migrate(place[0])
    with Registry(*place) as registry:
        assert registry.verify().is_right


@pytest.mark.parametrize("rule", ["event", "part", "statement", "head"])
def test_a_migrated_registry_has_the_rules_of_a_new_one(place, tmp_path, rule, request):
    """The names of all triggers, views and indexes are the same."""
    build_old(place)
    Registry.migrate(place[0])
    new = f"sqlite:///{tmp_path}/new.db"
    if not place[0].startswith("sqlite"):
        new = request.getfixturevalue("postgres").place()
    Registry.create(new, tmp_path / "new.pepper").close()
    assert rules_of(place[0], rule) == rules_of(new, rule) != []


def rules_of(url, name):
    base = databases.database(url)
    found = base.run(
        "select name from sqlite_master where type = 'trigger' and tbl_name = %s order by 1"
        if url.startswith("sqlite")
        else "select tgname from pg_trigger where tgrelid = %s::regclass and not tgisinternal order by 1",
        name,
    )
    base.close()
    return found


def quarantined(place, wrong, run=None):
    """A registry with wrong events, migrated, in which the owner takes them out."""
    build_old(place, wrong)
    if run is not None:
        outside(place, run)
    Registry.migrate(place[0])
    with Registry(*place) as registry:
        last = registry.head[0] - 1  # the last one is the migration
        before = registry.account(FORTY).spent
        registry.quarantine(range(last - len(wrong) + 1, last + 1), "written by hand")
        assert (registry.account(FORTY).spent == before).all()
        assert registry.verify().is_right
        reserve(registry, "new", FORTY[5:], np.zeros(35, dtype=int), table([60.0]))
        return json.loads(registry._database.run("select body from event where number = %s", last + 2)[0][0]), {
            run.id: run for run in map(registry.run, ("settled", "running"))
        }, registry._database.run("select id from run order by id")  # fmt: skip


def test_a_replayed_settlement_is_quarantined_and_everyone_goes_on(place):
    event, runs, _ = quarantined(place, [REPLAYED])
    assert event["kind"] == "quarantine"
    assert event["reason"] == "written by hand"
    assert len(event["events"]) == 1
    assert (runs["settled"].state, runs["settled"].charged, runs["settled"].key) == ("settled", (10,), KEY)


def test_a_run_without_a_reservation_is_quarantined_with_its_rows(place):
    ghost = "insert into run (id, state, kind, project, digest, plan) values ('ghost', 'running', '', '', '', '{}')"
    _, _, names = quarantined(place, [GHOST], ghost)
    assert [name for (name,) in names] == ["cancelled", "mean", "new", "reserved", "running", "settled"]


def test_a_settlement_at_too_many_steps_is_quarantined_and_the_run_goes_on(place):
    wrong = REPLAYED | {"run": "running", "charged": [2000]}
    _, runs, _ = quarantined(
        place, [wrong], "update run set state = 'settled', charged = '[2000]', ledger = 'x' where id = 'running'"
    )
    assert (runs["running"].state, runs["running"].charged, runs["running"].ledger) == ("running", None, None)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([2], "why"),
        ([], "why"),
        ([10**6], "why"),
        ([0], "why"),
        ([2], ""),
        ([2], "x" * 501),
        ([2], "two\nlines"),
        ([-1, 2], "why"),
    ],
)
def test_a_quarantine_names_events_and_a_reason(place, events, reason):
    with Registry.create(*place) as registry:
        registry.enrol(FORTY, 1.0)
        with pytest.raises(EpsilonsError):
            registry.quarantine(events, reason)
        assert registry.head[0] == 3


@pytest.mark.parametrize(
    "kind", ["create", "wish", "enrol", "withdraw", "change", "quota", "reserve", "begin", "settle"]
)
def test_no_legal_event_is_quarantined_whatever_its_kind(place, kind):
    """Its own rows, such as a person's withdrawal, are not what makes it wrong."""
    with Registry.create(*place) as registry:
        write_history(registry)
        registry.change(["p1"], 2.0)
        bodies = registry._database.run("select number, body from event")
        number = max(number for number, body in bodies if json.loads(body)["kind"] == kind)
        head = registry.head
        with pytest.raises(RegistryRefusedError, match="Name every event that is wrong, and no other"):
            registry.quarantine([number], "why")
        assert registry.head == head
        assert registry.verify().is_right


def test_a_statement_that_cannot_be_read_is_quarantined_with_its_rows(place):
    """Of an officer, by hand: the database cannot unpack it."""
    with Registry.create(*place) as registry:
        registry.enrol(FORTY, 1.0)
        base = registry._database

        def work():
            databases.add(
                base, "enrol", digest="0" * 64, first=40, people=1, names=hashlib.sha256(bytes(16)).hexdigest()
            )
            base.run("insert into statement select number, 0, %s from head", b"nothing")
            base.load("person", [(bytes(16), 40)])

        base.transaction(work)
        number = registry.head[0]
        assert registry.verify().first.number == number
        registry.quarantine([number], "cannot be read")
        assert registry.verify().is_right
        assert registry.enrol(["new"], 1.0) == 1
        assert registry.verify().people == 41


def test_only_wrong_events_are_quarantined_and_all_of_them_at_once(place):
    build_old(place, [REPLAYED, REPLAYED])
    Registry.migrate(place[0])
    with Registry(*place) as registry:
        head = registry.head
        second = head[0] - 1
        wrong = [second - 1, second]
        for events in (wrong[:1], wrong[1:], [1, *wrong], [*wrong, head[0]], [5]):
            with pytest.raises(RegistryRefusedError, match="Name every event that is wrong, and no other"):
                registry.quarantine(events, "why")
        assert registry.head == head
        assert registry.verify().first.number == wrong[0]
        registry.quarantine(wrong, "why")
        verdict = registry.verify()
        assert verdict.is_right
        assert verdict.quarantined == tuple((number, "why") for number in wrong)
        for events in (wrong, [head[0] + 1]):
            with pytest.raises(EpsilonsError):
                registry.quarantine(events, "again")
        assert registry.verify() == verdict
