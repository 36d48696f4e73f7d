"""Registry: one lifetime budget per person, over all runs that are charged to it.

Reservation: the right of one run to make the steps that its people were charged for.
"""

from __future__ import annotations

import hashlib
import operator
import secrets
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..budgets.budgets import Budgets
from ..budgets.ids import AS_WRITTEN, Rule, as_rule
from ..core.columns import Codes, hashed
from ..core.files import write_bytes
from ..core.mechanism import FloatArray, IntArray
from ..errors import EpsilonsError, RegistryError, RegistryRefusedError
from ..planning import Plan
from . import cohorts, copies, databases, people, runs, verifier
from .accounts import Accounts, accounts_of, again
from .databases import SCHEMA, Database, check_name, create, database
from .rosters import Pages, Roster, Table
from .summary import PersonRun, Summary, counts, runs_of_person, summary
from .verifier import Verdict

T = TypeVar("T")
P = ParamSpec("P")

PEPPER_BYTES = 32
NO_PEPPER = "People of a registry are found with its pepper, and there is none. Give its file: --pepper, or pepper=."


class Keeper(Protocol):
    """What a reservation needs of a registry."""

    id: str

    def begin(self, run: str, key: str, previous: str | None, ledger: str) -> None: ...

    def settle(self, run: str, charged: Sequence[int], ledger: str, key: str) -> None: ...

    def leavers(self, numbers: IntArray) -> IntArray: ...


@dataclass(frozen=True)
class Reservation:
    """What `Registry.reserve` gives, for `fit` and `make_private`.

    registry  where it was reserved
    run       its name there
    plan      digest of the plan that was charged
    roster    digest of each person's row, in the order of the list
    numbers   (people,) their numbers in the registry
    lifetimes of each row of the plan, as `Accounts.lifetimes`; [] for a run that is resumed
    """

    registry: Keeper = field(repr=False)
    run: str
    plan: str = field(repr=False)
    roster: str = field(repr=False)
    numbers: IntArray = field(repr=False, compare=False)
    lifetimes: list[list[float]] = field(default_factory=list, repr=False, compare=False)

    def begin(self, key: str, previous: str | None, ledger: str) -> None:
        """Tie the run to the commitment of its key, or of the one that replaces `previous`.

        ledger  the hash of its first line

        Raises RegistryRefusedError if the run has begun under another key, or with another ledger.
        """
        self.registry.begin(self.run, key, previous, ledger)

    @property
    def settings(self) -> dict[str, str]:
        """As in run.json and in the first line of the ledger."""
        return {"id": self.registry.id, "run": self.run}

    def leavers(self) -> IntArray:
        """(leavers,) places in the list of those who withdrew, or lowered their budget below what is spent."""
        return self.registry.leavers(self.numbers)

    def settle(self, charged: Sequence[int], ledger: str, key: str) -> None:
        """Give back the steps that a closed ledger did not charge.

        ledger  the hash of its last line
        key     commitment to its last key
        """
        self.registry.settle(self.run, charged, ledger, key)


def roster_digest(group: Codes) -> str:
    """SHA-256 of each person's row."""
    return hashed(hashlib.sha256(), group)


class Registry:
    """The account of many people: whatever is computed from them reserves first, and is charged for what it did.

    url     sqlite:///people.db, or postgresql://host/database
    pepper  the file with the key of the pseudonyms; by default, for SQLite, beside the database (people.db.pepper).
            Keep it apart from the database where you can, and never lose it: without it no person is found again. Who
            only verifies a registry in PostgreSQL needs none
    spelling  how ids are made equal (`Budgets.by_person`), if that is to be stated again; the registry keeps what it
              was made with. One that was made without compares ids as written

    Raises RegistryError if there is no registry, or if the pepper or the spelling is another one's.
    """

    def __init__(self, url: str, pepper: str | Path | None = None, spelling: str | Sequence[str] | None = None) -> None:
        self._database = database(url)
        try:
            facts = dict(self._database.snapshot(lambda: self._database.run("select name, value from fact")))
            copies.check(facts.get("schema"))
            self.id = str(facts.get("id"))
            path = _pepper_path(url, pepper)
            is_given = path is not None and (pepper is not None or path.exists())
            self._key = _read_pepper(path, str(facts.get("pepper"))) if path is not None and is_given else None
            self.spelling = _spelling(str(facts.get("ids", "")), as_rule(spelling))
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(
        cls, url: str, pepper: str | Path | None = None, spelling: str | Sequence[str] | None = None
    ) -> Registry:
        """Make an empty registry, and its pepper if that file does not exist yet. Raises RegistryError."""
        path, rule = _pepper_path(url, pepper), as_rule(spelling)
        if path is None:
            raise RegistryError(NO_PEPPER)
        if not path.exists():
            write_bytes(path, secrets.token_bytes(PEPPER_BYTES))
        made = database(url, is_new=True)
        try:
            commitment = _commitment(path.read_bytes())

            def work() -> None:
                create(made, lambda: made.run("insert into head values (1, 0, %s)", databases.BEGINNING))
                facts = {"schema": str(SCHEMA), "id": secrets.token_hex(16), "pepper": commitment}
                facts |= {"ids": ", ".join(rule)} if rule else {}
                databases.add(made, "create", **facts)
                made.many("insert into fact values (%s, %s)", list(facts.items()))

            made.build(work)
        finally:
            made.close()
        return cls(url, pepper)

    @staticmethod
    def migrate(url: str) -> None:
        """Bring a registry of an earlier version to the present one, whole or not at all; nothing if it is there.

        The owner of the tables does this. Raises RegistryError.
        """
        with closing(database(url)) as found:
            found.transaction(lambda: copies.migrate(found))

    # -- people ------------------------------------------------------------------------------------

    def enrol(self, ids: Sequence[Any], epsilon: npt.ArrayLike, delta: npt.ArrayLike = 1e-5) -> int:
        """Give people their lifetime budgets; the number of people.

        ids      (people,) whatever identifies a person in all your data, compared as text; each once
        epsilon  (people,) or one for all
        delta    (people,) or one for all

        Raises RegistryRefusedError if some are enrolled already, RegistryError for budgets that no account can keep.
        """
        hashed = self._pseudonyms(ids)
        self._transaction(people.enrol, hashed, *_each(len(hashed), epsilon, delta))
        return len(hashed)

    def change(self, ids: Sequence[Any], epsilon: npt.ArrayLike, delta: npt.ArrayLike = 1e-5) -> None:
        """Give people other lifetime budgets: larger, or smaller ones. What was spent stays spent."""
        hashed = self._pseudonyms(ids)
        budgets = _each(len(hashed), epsilon, delta)
        self._transaction(lambda found: people.change(found, people.enrolled(found, hashed), *budgets))

    def withdraw(self, ids: Sequence[Any]) -> None:
        """No further draws of these people. What was released stays, and what was spent stays spent."""
        hashed = self._pseudonyms(ids)
        self._transaction(lambda found: people.withdraw(found, people.enrolled(found, hashed)))

    def numbers(self, ids: Sequence[Any]) -> IntArray:
        """(people,) their numbers in the registry. Raises RegistryRefusedError if some are not enrolled."""
        return self._reading(people.enrolled, self._pseudonyms(ids))

    def are_enrolled(self, ids: Sequence[Any]) -> npt.NDArray[np.bool_]:
        """(people,) who is enrolled. Confidential."""
        return np.asarray(self._numbers(ids) >= 0)

    def check_wishes(self, epsilon: FloatArray, delta: FloatArray) -> None:
        """Raise RegistryError for lifetime budgets that no account can keep, before a person is enrolled."""
        people.check_wishes(epsilon, delta)

    def account(self, ids: Sequence[Any]) -> Accounts:
        """What these people have left, and the budgets to plan their next run with.

        Raises RegistryRefusedError if some are not enrolled, RegistryError for an id that occurs twice.
        """
        hashed = self._pseudonyms(ids)
        return self._reading(lambda found: accounts_of(found, ids, people.enrolled(found, hashed), self.spelling))

    def admit(self, role: str, one: Any) -> None:
        """Let a role of PostgreSQL state what this person wants (roles.sql). Raises RegistryRefusedError."""
        number = int(self.numbers([one])[0])
        self._transaction(lambda found: found.run("insert into subject values (%s, %s)", role, number))

    def carry_out(self, progress: Callable[[float], None] = lambda part: None) -> int:
        """Carry out what people stated as roles of PostgreSQL, in short transactions; the number of their requests.

        progress  is told the part that is done, after each transaction

        Raises RegistryError where roles.sql was not run.
        """
        return people.carry_out(self._database, progress)

    # -- runs --------------------------------------------------------------------------------------

    def reserve(
        self, run: str, plan: Plan, accounts: Accounts, *, budgets: Budgets, project: str = "", kind: str = "train"
    ) -> Reservation:
        """Charge these people for all steps of the plan, and hand out the right to make them.

        run       its name, once in this registry
        plan      made for `budgets`
        accounts  of the people who take part
        budgets   what `accounts.budgets` gave
        project   whose quota counts
        kind      "train", or another word for what the run is for, such as "tuning"

        Called again with the same arguments it charges nothing. Raises RegistryRefusedError, and charges no person, if
        some person has too little left by now or withdrew, if the project's quota is used up, or if the run is reserved
        for something else.
        """
        if plan.groups != budgets.groups or not accounts.are_those_of(budgets):
            raise RegistryError(
                "The plan, the budgets and the accounts do not belong together. Make all of them from one list."
            )
        if plan.runs > 1 or plan.select is not None or plan.class_noise is not None:
            raise RegistryError(
                "This plan is for several runs, or counts classes. Reserve each run by itself: they are added up there."
            )
        roster = Roster(accounts.numbers, budgets.group)
        self.reserve_table(run, table_of(plan), roster, kind=kind, project=project)
        rows = budgets.group
        return Reservation(self, run, plan.digest, roster_digest(rows), accounts.numbers, accounts.lifetimes(rows))

    def reserve_table(self, run: str, table: Table, roster: Pages, *, kind: str = "train", project: str = "") -> None:
        """Charge all people in the roster for all steps of their row of the table.

        Called again with the same arguments it does nothing. Raises RegistryRefusedError, and charges no person, if
        some person has too little left or withdrew, if the project's quota is used up, or if the run is reserved for
        something else.
        """
        self._transaction(runs.reserve, run, table, roster, kind, project)

    def begin(self, run: str, key: str, previous: str | None, ledger: str) -> None:
        """Tie a reserved run to the commitment of its key, or of the one that replaces `previous`.

        ledger  hash of the first line of its ledger

        Raises RegistryRefusedError if the run has begun under another key, perhaps on another machine, or with another
        ledger.
        """
        self._transaction(runs.begin, run, key, previous, ledger)

    def settle(self, run: str, charged: Sequence[int], ledger: str, key: str) -> None:
        """Give back the steps that were not made; the run ends for good.

        charged  (phases,) steps that the run's closed ledger has charged
        ledger   hash of that ledger's last line
        key      commitment to that ledger's last key

        Raises RegistryRefusedError if the run was settled at other steps, or went on under another key: then this
        ledger does not know what was charged since. And if more is given back than the owner allows without an
        approval.
        """
        steps = tuple(operator.index(n) for n in charged)
        self._transaction(runs.settle, run, steps, ledger, key)

    def cancel(self, run: str, missing_ok: bool = False) -> None:
        """Give back all steps of a run that never began; it never can. Raises RegistryRefusedError if it has begun.

        missing_ok  True: nothing happens if there is no such run
        """
        self._transaction(runs.cancel, run, missing_ok)

    def limit_refunds(self, share: float) -> None:
        """Let a run give back at most this share of its steps, from 0 to 1, unless an officer approves more."""
        self._transaction(runs.limit_refunds, share)

    def approve(self, run: str, charged: Sequence[int] | None = None, ledger: str = "") -> None:
        """Allow a run to be settled like this although it gives back more than the owner's limit.

        charged, ledger  as in `settle`; by default, all steps of a run that never began are given back
        """
        steps = None if charged is None else tuple(operator.index(n) for n in charged)
        self._transaction(runs.approve, run, steps, ledger)

    def quarantine(self, events: Sequence[int], reason: str) -> None:
        """Take wrong events out of the account, so that everyone else goes on. Only the owner can do this.

        events  their numbers, as `verify` tells them
        reason  why, for those who verify

        Raises RegistryRefusedError for an event that is right, or if another one is wrong.
        """
        self._transaction(copies.quarantine, events, reason)

    def check_table(self, run: str, table: Table) -> None:
        """Raise RegistryRefusedError if this run is reserved for another table."""
        if self.run(run).table.to_dict() != table.to_dict():
            raise RegistryRefusedError(f"The run {run!r} was reserved for another plan than the one in its folder.")

    def again(self, run: str, plan: Plan, ids: Sequence[Any]) -> tuple[npt.NDArray[np.bool_], Budgets]:
        """Who of these people takes part in a run that is reserved, and their budgets, as when it was reserved.

        plan  the run's
        ids   (people,) among them all who take part

        Gives (people,) True for those who take part, and the budgets of these. Raises RegistryRefusedError if the run
        is reserved for another plan, or if a person who takes part is not among these people.
        """
        self.check_table(run, table_of(plan))
        numbers = self._numbers(ids)
        return again(runs.held(self._database, run), plan, ids, numbers, self.spelling)

    def reserved(self, run: str, plan: Plan, ids: Sequence[Any]) -> tuple[npt.NDArray[np.bool_], Budgets, Reservation]:
        """What `again` gives, and the reservation: to go on with a run in another process than the one that reserved.

        Raises RegistryRefusedError as `again` does.
        """
        takes_part, budgets = self.again(run, plan, ids)
        rows = roster_digest(budgets.group)
        return takes_part, budgets, Reservation(self, run, plan.digest, rows, self.numbers(budgets.ids))

    def run(self, run: str) -> runs.StoredRun:
        """What is stored of a run. Raises RegistryError if there is none."""
        return runs.stored_run(self._database, run)

    def leavers(self, numbers: IntArray) -> IntArray:
        """Places in a list of numbers of people who may not be drawn any more: they withdrew, or are over their budget.

        A lowered budget puts people over it; what was released under the former one stays.
        """
        return self._reading(cohorts.leavers, numbers)

    def set_quota(self, project: str, share: float) -> None:
        """Allow the runs of a project this part of each lifetime budget, all together."""
        self._transaction(runs.set_quota, project, share)

    # -- evidence ----------------------------------------------------------------------------------

    def verify(self, day: date | None = None) -> Verdict:
        """Replay all events, and compare what is stored with the result.

        day  the result also counts the people who withdrew before it, and stayed so
        """
        return self._reading(lambda found: verifier.verify(found.stream, datetime.now(UTC), str(day or "")))

    def summary(self) -> Summary:
        """Use per wish, project and run, in aggregates by the rule of 20."""
        return self._reading(summary, self.id)

    def counts(self) -> dict[str, Any]:
        """Coarse numbers of people and runs, for an export."""
        return self._reading(counts)

    def runs_of(self, one: Any) -> list[PersonRun]:
        """The runs in which this person takes part. Confidential. Raises RegistryRefusedError if not enrolled."""
        number = int(self.numbers([one])[0])
        return self._reading(runs_of_person, number)

    def hash_at(self, number: int) -> str | None:
        """The hash of this event; None if there are fewer events."""
        return self._reading(databases.hash_at, number)

    def copy(self, url: str) -> None:
        """Copy the whole registry, as of now, into a new and empty database, or raise RegistryError."""
        copies.copy(self._database, url)

    def repair(self) -> None:
        """Compute the sums of all people again from the events. Raises RegistryError if an event is wrong."""
        self._transaction(copies.repair)

    @property
    def head(self) -> tuple[int, str]:
        """(number of events, hash of the last one): keep it elsewhere, to notice a restored backup."""
        return self._reading(databases.head)

    def release(
        self,
        name: str,
        value: npt.ArrayLike,
        *,
        ids: Sequence[Any],
        sensitivity: float,
        noise_multiplier: float,
        project: str = "",
    ) -> FloatArray:
        """A statistic plus Gaussian noise of std noise_multiplier · sensitivity, charged to these people.

        name         of the release; it can be made once
        value        the statistic, a number or an array
        ids          (people,) all people with data that it was computed from
        sensitivity  by how much one person can change it, as an L2 norm. Nothing is clipped here: you state it

        Raises RegistryRefusedError if some person has too little left, or if the name is taken.
        """
        check_name(name)
        exact = np.asarray(value, dtype=np.float64)
        if not (
            np.isfinite(sensitivity) and sensitivity > 0 and np.isfinite(noise_multiplier) and noise_multiplier > 0
        ):
            raise RegistryError("sensitivity and noise_multiplier must be positive numbers.")
        if not np.isfinite(exact).all():
            raise RegistryError("The statistic is not finite, so no noise hides what it was computed from.")
        numbers = self.numbers(ids)
        table = Table(np.ones((1, 1)), np.full((1, 1), float(noise_multiplier)), (1,))

        def work(found: Database) -> None:
            if runs.stored_runs(found, id=name):
                raise RegistryError(f"A run or statistic {name!r} was released before. Choose another name.")
            runs.reserve(found, name, table, Roster(numbers, np.zeros_like(numbers)), "statistic", project)
            key = secrets.token_hex(32)  # of nothing: a statistic is released once
            runs.begin(found, name, key, None, "")
            runs.settle(found, name, (1,), "", key)

        self._transaction(work)  # durable before anything is released
        noise = np.random.Generator(np.random.Philox(key=secrets.randbits(128))).standard_normal(exact.shape)
        return np.asarray(exact + noise_multiplier * sensitivity * noise, dtype=np.float64)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Registry({self.id})"

    def _transaction(self, work: Callable[Concatenate[Database, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do this work with the database in one transaction; its result."""
        return self._database.transaction(lambda: work(self._database, *args, **kwargs))

    def _numbers(self, ids: Sequence[Any]) -> IntArray:
        """(people,) their numbers, −1 for those who are not enrolled."""
        return self._reading(people.numbers_of, self._pseudonyms(ids))

    def _pseudonyms(self, ids: Sequence[Any]) -> list[bytes]:
        return people.pseudonyms(ids, self._pepper, self.spelling)

    @property
    def _pepper(self) -> bytes:
        if self._key is None:
            raise RegistryError(NO_PEPPER)
        return self._key

    def _reading(self, work: Callable[Concatenate[Database, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for work that only reads. Raises RegistryError for values that no registry has."""
        try:
            return self._database.snapshot(lambda: work(self._database, *args, **kwargs))
        except EpsilonsError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, zlib.error):
            raise RegistryError(databases.ALTERED) from None


def table_of(plan: Plan) -> Table:
    """What each group of a plan goes through."""
    rates, noises = (
        np.array([getattr(phase, name) for phase in plan.phases]) for name in ("sample_rate", "noise_multiplier")
    )
    return Table(rates, noises, tuple(phase.steps for phase in plan.phases))


def _spelling(kept: str, stated: Rule) -> Rule:
    """How the ids of a registry are made equal. Raises RegistryError for another statement than the one it keeps."""
    rule = as_rule(kept.split(", ") if kept else None)
    if stated in ((), rule):
        return rule
    if rule or stated != (AS_WRITTEN,):
        raise RegistryError(
            f"This registry compares ids {' and '.join(rule) or AS_WRITTEN}, as it was made, and not "
            f"{' and '.join(stated)}: other people would be found. Make another registry, or state the same."
        )
    return stated


def _each(people: int, epsilon: npt.ArrayLike, delta: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """(people,) numbers each. Raises RegistryError for another number of them."""
    given = [np.asarray(values, dtype=np.float64) for values in (epsilon, delta)]
    if not all(array.shape in ((), (people,)) for array in given):
        raise RegistryError(f"Give one number for all, or one for each of the {people:,} people.")
    epsilons, deltas = (np.array(np.broadcast_to(array, (people,))) for array in given)
    return epsilons, deltas


def _pepper_path(url: str, pepper: str | Path | None) -> Path | None:
    if pepper is not None:
        return Path(pepper)
    if url.startswith("sqlite:///"):
        return Path(url.removeprefix("sqlite:///") + ".pepper")
    return None


def _read_pepper(path: Path, commitment: str) -> bytes:
    try:
        pepper = path.read_bytes()
    except OSError as error:
        raise RegistryError(f"The registry's pepper cannot be read from {path}: {error.strerror or error}.") from None
    if len(pepper) != PEPPER_BYTES or _commitment(pepper) != commitment:
        raise RegistryError(f"{path} is not the pepper of this registry: no person would be found with it.")
    return pepper


def _commitment(pepper: bytes) -> str:
    return hashlib.blake2b(b"pepper", key=pepper, digest_size=32).hexdigest()
