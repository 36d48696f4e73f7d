"""Rules in the database: raw SQL of any role writes no event, and no row, that does not follow from those before it."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from epsilons.errors import EpsilonsError, RegistryError, RegistryRefusedError
from epsilons.registry import Registry, Roster, databases
from epsilons.registry.databases import PAGE, packed
from epsilons.registry.rosters import HeldRoster
from registries import FIRST_LINE, KEY, LAST_LINE, OTHER_KEY, THIRD_KEY, begin, build_house, reserve, settle, table
from registries import FORTY as IDS

ALL = Roster(np.arange(40), np.zeros(40, dtype=int))
PLAN = table([200.0])
TEXT = json.dumps(PLAN.to_dict(), sort_keys=True)
ROWS = packed(next(iter(ALL.pages()))[1])
DIGEST = hashlib.sha256(json.dumps([TEXT, HeldRoster.of(ALL).digest, "train", "cardiology"]).encode()).hexdigest()
NEW = (
    "insert into run (id, state, kind, project, digest, plan) values (%s, 'reserved', 'train', 'cardiology', %s, %s)",
    "new",
    DIGEST,
    TEXT,
)
PART = ("insert into part values (%s, 0, %s)", "new", ROWS)
RUN = "update run set state = 'settled', charged = '[0]', ledger = repeat('f', 64) where id = 'running'"
NAN = float("nan")


def said(kind, **facts):
    """An event that is added as the library does it."""
    return lambda database: databases.add(database, kind, **facts)


def written(body, at=1):
    """An event with this text (or what a function returns when it is written), correct hashes, and the head behind."""

    def write(database):
        text = body() if callable(body) else body
        ((number, last),) = database.run("select number, hash from head")
        new = databases._hash(last, text)
        database.run("insert into event values (%s, %s, %s, %s)", number + at, last, new, text)
        database.run("update head set number = %s, hash = %s", number + at, new)

    return write


def body(kind, **facts):
    return json.dumps({"kind": kind, "time": "2999-01-01T00:00:00+00:00", **facts}, sort_keys=True)


def now(kind, **facts):
    """The text of an event of this second. Made earlier than it is written, it may be older than the event before."""
    import datetime

    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return json.dumps({"kind": kind, "time": time, **facts}, sort_keys=True)


def attempt(registry, steps):
    """Do all this in one transaction."""

    def work():
        for step in steps:
            step(registry._database) if callable(step) else registry._database.run(*step)

    registry._database.transaction(work)


def beginning(run, key, previous):
    return said("begin", run=run, key=key, previous=previous, ledger=FIRST_LINE)


def settled_at(charged):
    """The event and the row of a settlement at these steps."""
    return [said("settle", **SETTLE | {"charged": charged}), (RUN.replace("[0]", json.dumps(charged)),)]


def wish(stated, stored):
    """The event of a wish, and its row."""
    event = dict(zip(("id", "epsilon", "delta", "home"), stated, strict=True))
    return [said("wish", **event), (f"insert into wish values {stored}",)]


def enrolment(first):
    """The event of one more person, who has this number, with the rows, and digests of nothing."""
    event = said("enrol", digest="0" * 64, first=first, people=1, names="0" * 64)
    return [event, STATED, ("insert into person values (%s, %s)", bytes(16), first)]


RESERVE = said("reserve", run="new", digest=DIGEST, what="train", project="cardiology")
BEGIN = beginning("reserved", OTHER_KEY, None)
BEGUN = (f"update run set state = 'running', key = '{OTHER_KEY}', begun = '{FIRST_LINE}' where id = 'reserved'",)
STATED = ("insert into statement select number, 0, %s from head", ROWS)
SETTLE = {"run": "running", "charged": [0], "ledger": LAST_LINE, "key": KEY}

#: What a runner writes in one transaction, to runs of the own project.
RUNNER = {
    "a settlement again": [said("settle", run="settled", charged=[10], ledger=LAST_LINE, key=KEY)],
    "a settlement at other steps": [said("settle", run="settled", charged=[0], ledger=LAST_LINE, key=KEY)],
    "a settlement of a run that never began": [said("settle", run="reserved", charged=[0], ledger=LAST_LINE, key=KEY)],
    "a settlement under another key": [said("settle", **SETTLE | {"key": OTHER_KEY}), (RUN,)],
    "a settlement without the key": [said("settle", run="running", charged=[0], ledger=LAST_LINE), (RUN,)],
    "a settlement without a ledger": [
        said("settle", **SETTLE | {"ledger": ""}),
        (RUN.replace("repeat('f', 64)", "''"),),
    ],
    "a settlement at more steps than reserved": settled_at([101]),
    "a settlement of two phases": [said("settle", **SETTLE | {"charged": [0, 0]}), (RUN.replace("[0]", "[0, 0]"),)],
    "a settlement at half a step": [said("settle", **SETTLE | {"charged": [0.5]}), (RUN.replace("[0]", "[0.5]"),)],
    "a settlement at fewer than no steps": settled_at([-1]),
    "a settlement without its row": [said("settle", **SETTLE)],
    "a settlement with another row": [said("settle", **SETTLE | {"charged": [1]}), (RUN,)],
    "a settlement, twice at once": [said("settle", **SETTLE), (RUN,), said("settle", **SETTLE)],
    "a settlement, twice, the first in a transaction inside": [
        ("savepoint one",),
        said("settle", **SETTLE),
        ("release one",),
        said("settle", **SETTLE | {"charged": [1]}),
        (RUN.replace("[0]", "[1]"),),
    ],
    "a settlement that is checked before it is changed": [
        said("settle", **SETTLE),
        (RUN,),
        ("set constraints all immediate",),
        ("set constraints all deferred",),
        ("update run set charged = '[1]' where id = 'running'",),
    ],
    "a row that settles without its event": [(RUN,)],
    "a settlement and a beginning after it": [said("settle", **SETTLE), (RUN,), beginning("running", THIRD_KEY, KEY)],
    "a beginning under a second key": [beginning("running", OTHER_KEY, None)],
    "a beginning that replaces another key": [beginning("running", THIRD_KEY, OTHER_KEY)],
    "a beginning under the same key": [beginning("running", KEY, KEY)],
    "a beginning with another ledger": [said("begin", run="running", key=OTHER_KEY, previous=KEY, ledger=LAST_LINE)],
    "a beginning after the end": [beginning("settled", OTHER_KEY, KEY)],
    "a beginning after it was given back": [beginning("cancelled", OTHER_KEY, None)],
    "two beginnings at once": [BEGIN, beginning("reserved", KEY, None), BEGUN],
    "a beginning without its row": [BEGIN],
    "a beginning with another row": [
        BEGIN,
        ("update run set state = 'running', key = 'x', begun = repeat('a', 64) where id = 'reserved'",),
    ],
    "the row of another run": [
        said("settle", **SETTLE),
        (RUN,),
        ("update run set state = 'settled' where id = 'reserved'",),
    ],
    "a cancellation of a run that began": [
        said("cancel", run="running"),
        ("update run set state = 'cancelled' where id = 'running'",),
    ],
    "a cancellation of a settled run": [said("cancel", run="settled")],
    "a cancellation again": [said("cancel", run="cancelled")],
    "a cancellation without its row": [said("cancel", run="reserved")],
    "a reservation again": [said("reserve", run="running", digest=DIGEST, what="train", project="cardiology")],
    "a reservation without a run": [RESERVE],
    "a reservation without a roster": [NEW, RESERVE],
    "a run without a reservation": [NEW, PART],
    "a run without a reservation that begins": [NEW, PART, beginning("new", OTHER_KEY, None)],
    "a roster that grows later": [("insert into part values ('reserved', 1, %s)", ROWS)],
    "a roster that grows after its event": [NEW, PART, RESERVE, ("insert into part values ('new', 1, %s)", ROWS)],
    "a roster of 50,000 bytes": [NEW, ("insert into part values ('new', 0, %s)", bytes(50_000)), RESERVE],
    "a reservation of another kind": [
        NEW,
        PART,
        said("reserve", run="new", digest=DIGEST, what="x", project="cardiology"),
    ],
    "a reservation of another digest": [
        NEW,
        PART,
        said("reserve", run="new", digest="0" * 64, what="train", project="cardiology"),
    ],
    "a run that is settled from the start": [
        (
            "insert into run (id, state, kind, project, digest, plan, charged) "
            "values ('new', 'settled', 'train', 'cardiology', %s, %s, '[0]')",
            DIGEST,
            TEXT,
        ),
        PART,
        RESERVE,
    ],
    "an event before the last one": [written(lambda: now("cancel", run="reserved"), at=0)],
    "an event after the next one": [written(lambda: now("cancel", run="reserved"), at=2)],
    "an event without the head": [
        lambda d: d.run(
            "insert into event select number + 1, hash, encode(sha256(convert_to(hash || %s, 'UTF8')), 'hex'), "
            "%s from head",
            *[now("cancel", run="reserved")] * 2,
        )
    ],
    "an event of the future": [written(body("cancel", run="reserved"))],
    "an event of the past": [written(lambda: now("cancel", run="reserved").replace('"time": "20', '"time": "19'))],
    "an event at 24 o'clock": [written('{"kind": "cancel", "run": "reserved", "time": "2026-11-25T24:00:00+00:00"}')],
    "an event without a time": [written('{"kind": "cancel", "run": "reserved"}')],
    "an event with another field": [said("cancel", run="reserved", more=1)],
    "an event with a field twice": [written(lambda: now("cancel", run="reserved")[:-1] + ', "run": "reserved"}')],
    "an event in another order": [
        written(lambda: json.dumps(dict(reversed(json.loads(now("cancel", run="reserved")).items()))))
    ],
    "an event with other blanks": [written(lambda: now("cancel", run="reserved").replace(": ", ":"))],
    "an event with another escape": [
        written(lambda: now("cancel", run="reserved").replace("reserved", "\\u0072eserved"))
    ],
    "an event of another kind": [said("give", run="reserved")],
    "an event that is no object": [written("[1]")],
    "an event that is no JSON": [written("{")],
    "an event that is deep": [written("[" * 30_000 + "]" * 30_000)],
    "an event of 70,000 characters": [said("cancel", run="reserved", more="x" * 70_000)],
    "a creation": [said("create", schema="3", id="0" * 32, pepper="0" * 64)],
    "a migration": [said("migrate", schema="3", was="1")],
    "a limit": [said("limit", refund=1.0), ("update fact set value = '1.0' where name = 'refund'",)],
    "an approval": [said("approve", run="running", charged=[0], ledger=LAST_LINE)],
    "a quota": [said("quota", project="cardiology", share=1.0)],
    "a quarantine": [said("quarantine", events=[3], reason="why")],
}

#: Tables that are no tables.
PLANS = [
    "{}",
    "[]",
    "1",
    "null",
    '"x"',
    "{",
    TEXT[:-1],
    TEXT.replace("noises", "noise"),
    TEXT.replace("[100]", "[]"),
    TEXT.replace("[100]", "[-1]"),
    TEXT.replace("[100]", "[1.5]"),
    TEXT.replace("[100]", '["1"]'),
    TEXT.replace("[100]", "[100, 100]"),
    TEXT.replace("[100]", "[1e3]"),
    TEXT.replace("0.02", "1.5"),
    TEXT.replace("0.02", "-0.5"),
    TEXT.replace("0.02", "null"),
    TEXT.replace("0.02", "NaN"),
    TEXT.replace("0.02", '"0.02"'),
    TEXT.replace("[0.02]", "0.02"),
    TEXT.replace("[0.02]", "[0.02, 0.02]"),
    TEXT.replace("[0.02]", "[]"),
    TEXT.replace("[[0.02]]", "[]"),
    TEXT.replace("200.0", "0"),
    TEXT.replace("200.0", "-1"),
    TEXT.replace("200.0", "1e999"),
    TEXT.replace("200.0", "[]"),
    TEXT.replace("200.0", "true"),
    TEXT.replace("[200.0]", "null"),
    "[" * 9000 + "]" * 9000,
]

#: What an officer writes in one transaction.
OFFICER = {
    "a wish again": wish((3, 1.0, 1e-5, 18.0), (3, 1.0, 1e-5, 10)),
    "a wish with another number": wish((9, 2.0, 1e-5, 24.0), (9, 2.0, 1e-5, 11)),
    "a wish of another order": wish((3, 2.0, 1e-5, 25.0), (3, 2.0, 1e-5, 11)),
    "a wish with another row": wish((3, 2.0, 1e-5, 24.0), (3, 9.0, 1e-5, 11)),
    "a wish with another home": wish((3, 2.0, 1e-5, 24.0), (3, 2.0, 1e-5, 10)),
    "a wish without its row": [said("wish", id=3, epsilon=2.0, delta=1e-5, home=24.0)],
    "a wish without its event": [("insert into wish values (3, 2.0, 1e-5, 11)",)],
    "a wish that no account keeps": wish((3, 0.001, 1e-5, 96.0), (3, 0.001, 1e-5, 15)),
    "a wish above the largest": wish((3, 1001.0, 1e-5, 24.0), (3, 1001.0, 1e-5, 11)),
    "a wish of 1e-12": wish((3, 2.0, 1e-12, 24.0), (3, 2.0, 1e-12, 11)),
    "a wish in whole numbers": wish((3, 2, 1e-5, 24.0), (3, 2.0, 1e-5, 11)),
    "an enrolment without people": [said("enrol", digest="0" * 64, first=40, people=1, names="0" * 64), STATED],
    "an enrolment of other people": [*enrolment(40)],
    "an enrolment from another number": [*enrolment(41)],
    "a person without an enrolment": [("insert into person values (%s, 40)", bytes(16))],
    "a statement without its event": [("insert into statement values (3, 5, %s)", ROWS)],
    "a statement later than its event": [STATED],
    "a change without a statement": [said("change", digest="0" * 64, people=1)],
    "a change of nobody": [said("change", digest="0" * 64, people=0), STATED],
    "a statement of 50,000 bytes": [
        said("change", digest="0" * 64, people=1),
        ("insert into statement select number, 0, %s from head", bytes(50_000)),
    ],
    "a quota without its row": [said("quota", project="x", share=0.5)],
    "a quota with another row": [said("quota", project="x", share=0.5), ("insert into quota values ('x', 1.0)",)],
    "a quota of another project": [
        said("quota", project="x", share=0.5),
        ("update quota set share = 0.5 where project = 'oncology'",),
    ],
    "a quota without its event": [("update quota set share = 1.0",)],
    "a quota above 1": [said("quota", project="x", share=1.5), ("insert into quota values ('x', 1.5)",)],
    "a quota of 0": [said("quota", project="x", share=0.0), ("insert into quota values ('x', 0)",)],
    "a name that does not print": [
        said("quota", project="a\u202eb", share=0.5),
        ("insert into quota values (%s, 0.5)", "a\u202eb"),
    ],
    "a name of 201 characters": [
        said("quota", project="x" * 201, share=0.5),
        ("insert into quota values (%s, 0.5)", "x" * 201),
    ],
    "an approval of a settled run": [said("approve", run="settled", charged=[0], ledger=LAST_LINE)],
    "an approval of no run": [said("approve", run="none", charged=[0], ledger=LAST_LINE)],
    "an approval of more steps": [said("approve", run="running", charged=[101], ledger=LAST_LINE)],
    "a limit": [said("limit", refund=1.0), ("update fact set value = '1.0' where name = 'refund'",)],
    "a settlement": [said("settle", **SETTLE)],
    "a quarantine": [said("quarantine", events=[3], reason="why")],
}

#: What the owner does not write either, while the rules are there.
OWNER = {
    "a second migration": [said("migrate", schema="3", was="1")],
    "a second creation": [said("create", schema="3", id="0" * 32, pepper="0" * 64)],
    "a limit above 1": [said("limit", refund=1.5), ("insert into fact values ('refund', '1.5')",)],
    "a limit without its row": [said("limit", refund=0.5)],
    "a limit with another row": [said("limit", refund=0.5), ("insert into fact values ('refund', '1.0')",)],
    "a fact": [("update fact set value = 'x' where name = 'id'",)],
    "another fact": [("insert into fact values ('x', 'y')",)],
    "a fact less": [("delete from fact where name = 'pepper'",)],
    "a roster": [("update part set rows = ''",)],
    "a roster less": [("delete from part",)],
    "a run less": [("delete from run where id = 'settled'",)],
    "a run's plan": [("update run set plan = '{}'",)],
    "a statement less": [("delete from statement",)],
    "a statement": [("update statement set rows = ''",)],
    "a person": [("update person set number = 7 where number = 8",)],
    "a person less": [("delete from person where number = 39",)],
    "a wish": [("update wish set epsilon = 9",)],
    "a wish less": [("delete from wish where id = 2",)],
    "a quota less": [("delete from quota",)],
    "a quarantine of a later event": [said("quarantine", events=[10**6], reason="why")],
    "a quarantine twice in one": [said("quarantine", events=[3, 3], reason="why")],
    "a quarantine of nothing": [said("quarantine", events=[], reason="why")],
    "everything": [("truncate run",)],
    "all people": [("truncate person",)],
    "the head": [("truncate head",)],
}


@pytest.fixture(scope="module")
def house(postgres, tmp_path_factory):
    made = build_house(postgres, tmp_path_factory.mktemp("house") / "pepper")
    with made.registry("anna") as registry:
        for name in ("reserved", "running", "settled", "cancelled"):
            reserve(registry, name, IDS, np.zeros(40, dtype=int), PLAN, project="cardiology")
        begin(registry, "running")
        settle(registry, "settled", [10])
        registry.cancel("cancelled")
    return made


def refused(house, login, steps, match=None):
    """All of it is refused, nothing is changed, and the registry is right."""
    before = house.sql("owner", "select number, hash from head")
    with house.registry(login) as registry, pytest.raises(EpsilonsError, match=match):
        attempt(registry, steps)
    assert house.sql("owner", "select number, hash from head") == before


@pytest.mark.parametrize("steps", RUNNER.values(), ids=RUNNER)
def test_a_runner_writes_nothing_that_does_not_follow(house, steps):
    refused(house, "anna", steps)


@pytest.mark.parametrize("plan", PLANS)
def test_a_runner_reserves_no_table_that_is_none(house, plan):
    refused(house, "anna", [(NEW[0], "new", DIGEST, plan), PART, RESERVE])


@pytest.mark.parametrize("steps", OFFICER.values(), ids=OFFICER)
def test_an_officer_writes_nothing_that_does_not_follow(house, steps):
    refused(house, "otto", steps)


@pytest.mark.parametrize("steps", OWNER.values(), ids=OWNER)
def test_the_owner_writes_nothing_that_does_not_follow(house, steps):
    refused(house, "owner", steps)


def test_what_follows_is_written_by_the_same_statements(house):
    """So the statements above are refused for what they say, and not for a mistake in them."""
    with house.registry("anna") as registry:
        for steps in (
            [NEW, PART, RESERVE],
            [BEGIN, BEGUN],
            [beginning("reserved", THIRD_KEY, OTHER_KEY),
             (BEGUN[0].replace(OTHER_KEY, THIRD_KEY),)],
            [written(lambda: now("settle", **SETTLE)), (RUN,)],
            [said("cancel", run="new"),
             ("update run set state = 'cancelled', charged = '[0]', ledger = '' where id = 'new'",)],
        ):  # fmt: skip
            attempt(registry, steps)
    with house.registry("otto") as registry:
        attempt(registry, wish((3, 2.0, 1e-5, 24.0), (3, 2.0, 1e-5, 11)))
        attempt(registry, [said("quota", project="x é", share=0.5), ("insert into quota values ('x é', 0.5)",)])
        attempt(registry, [said("approve", run="reserved", charged=[0], ledger=LAST_LINE)])
    with house.registry("owner") as registry:
        attempt(registry, [said("limit", refund=0.5), ("insert into fact values ('refund', '0.5')",)])


def test_a_settlement_above_the_limit_needs_an_officer(place):
    """The one who settles reads who must do what; below the limit, and when it is approved, nothing is asked."""
    with Registry.create(*place) as registry:
        registry.enrol(IDS, 1.0)
        registry.limit_refunds(0.25)
        for name in ("little", "much", "none", "other"):
            reserve(registry, name, IDS, np.zeros(40, dtype=int), PLAN)
            begin(registry, name) if name != "none" else None
        full = registry.account(IDS).spent
        registry.settle("little", [75], LAST_LINE, KEY)
        with pytest.raises(RegistryRefusedError, match=r"An officer approves it: epsilons registry approve URL RUN"):
            registry.settle("much", [74], LAST_LINE, KEY)
        with pytest.raises(RegistryRefusedError, match="An officer approves it"):
            registry.cancel("none")
        for charged, ledger in (([75], LAST_LINE), ([74], FIRST_LINE)):  # of another settlement
            registry.approve("much", charged, ledger)
        registry.approve("other", [74], LAST_LINE)
        with pytest.raises(RegistryRefusedError, match="An officer approves it"):
            registry.settle("much", [74], LAST_LINE, KEY)
        registry.approve("much", [74], LAST_LINE)
        registry.settle("much", [74], LAST_LINE, KEY)
        registry.approve("none")
        registry.cancel("none")
        assert (registry.account(IDS).spent < full).all()
        registry.limit_refunds(1.0)
        registry.settle("other", [0], LAST_LINE, KEY)
        with pytest.raises(RegistryRefusedError):
            registry.approve("other", [0], LAST_LINE)
        for share in (-0.1, 1.1, NAN):
            with pytest.raises(RegistryError, match="from 0 to 1"):
                registry.limit_refunds(share)
        assert registry.verify().is_right


def test_only_an_officer_approves_and_only_the_owner_limits(house):
    with house.registry("anna") as registry, pytest.raises(RegistryRefusedError, match="right"):
        registry.approve("reserved", [0], LAST_LINE)
    for login in ("anna", "otto"):
        with house.registry(login) as registry:
            for call in (lambda: registry.limit_refunds(1.0), lambda: registry.quarantine([3], "why")):
                with pytest.raises(RegistryRefusedError, match="right"):
                    call()


def test_an_event_is_never_earlier_than_the_one_before(place, monkeypatch):
    """The clock of this machine is behind the one of another."""
    import datetime

    class Behind(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.now(tz) - datetime.timedelta(days=1)

    with Registry.create(*place) as registry:
        monkeypatch.setattr(databases, "datetime", Behind)
        registry.enrol(IDS, 1.0)
        times = [
            json.loads(text)["time"] for (text,) in registry._database.run("select body from event order by number")
        ]
        assert times == [times[0]] * 3
        assert registry.verify().is_right


@pytest.mark.parametrize(
    "steps",
    [
        *(RUNNER[name] for name in RUNNER if name not in {
            "an event without the head", "a settlement without its row", "a settlement, twice at once",
            "a settlement and a beginning after it", "a beginning without its row", "two beginnings at once",
            "a cancellation without its row", "a run without a reservation", "an approval", "a quota", "a limit",
            "a run without a reservation that begins", "an event in another order", "an event with other blanks",
            "an event with another escape", "a quarantine", "a beginning with another row", "a roster that grows later",
        } and not name.startswith(("an event that is", "an event of the future", "an event at"))),
    ],
)  # fmt: skip
def test_sqlite_refuses_what_it_can_see(tmp_path, steps):
    with Registry.create(f"sqlite:///{tmp_path}/people.db") as registry:
        registry.enrol(IDS, 1.0)
        for name in ("reserved", "running", "settled", "cancelled"):
            reserve(registry, name, IDS, np.zeros(40, dtype=int), PLAN, project="cardiology")
        begin(registry, "running")
        settle(registry, "settled", [10])
        registry.cancel("cancelled")
        before = registry.head
        with pytest.raises(EpsilonsError):
            attempt(registry, steps)
        assert registry.head == before


def test_pages_are_packed_in_less_than_the_limits():
    """A page that does not compress is the largest."""
    rng = np.random.default_rng(0)
    assert len(packed(rng.integers(0, 2**15, PAGE).astype(np.int16))) < 40_000
    assert len(packed(rng.integers(0, 2**31, PAGE).astype(np.int32))) < 80_000
