"""The ledger: what a run has been charged, and whether the next step may happen.

The plan certifies how many steps each phase may take; the ledger allows a step iff fewer were charged. It
counts integers and computes no epsilon. On disk every line carries the hash of the one before it, and steps
are reserved in blocks, because one fsync costs as much as a small step: a block is durable before the first
update it pays for. The hashes have no key: they show accidents and edits of a part, not a ledger that somebody
has written anew from its first line to its last.

After a crash, steps are replayed under the same key: the same release, not a second one, and charged once. The
hash of every noisy update stands in the ledger, so that a replay which comes out differently is noticed before it
is applied. It then needs another key, as does a run whose key is lost: a new key epoch. All that earlier epochs
reserved stays charged, and the re-run steps are charged again. Nor does anyone know which of its reserved steps a
process made before it ended, so all of them stay charged in a run that is taken up again, replayed or not.

A copy of a run's folder holds the key, too. The line of a key therefore notes which file on which disk holds it
(`RunFolder.key_file`), and a run whose key is in another file begins a new key epoch. A ledger that is removed,
renamed or replaced while a run writes to it stops the run before its next update.

    {"kind": "open", "schema": 1, "plan": <digest>, "allowed": [9375],
     "rests_on": {"randomness": "philox", "roster": <digest>, "guarantee": <words>}, "prev": …, "hash": …}
    {"kind": "key", "epoch": 0, "key": <commitment>, "start": [0], "file": <hash of its place on disk>, …}
    {"kind": "reserve", "epoch": 0, "phase": 0, "from": 0, "to": 64, …}
    {"kind": "update", "epoch": 0, "phase": 0, "step": 0, "update": <hash of the noisy update>, …}
    {"kind": "close", "epoch": 0, "charged": [9375], …}
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from . import locks
from .disclosure import PLAN_SUPPRESSED, has_small_cells
from .errors import BudgetExceededError, LedgerError, RunError
from .escaping import printable
from .files import for_owner, sync_folder
from .planning import Plan, display

SCHEMA = 1
BLOCK = 64  # steps per fsync
#: What the guarantee rests on beside the plan: of these, the first line repeats what run.json says.
RESTS_ON = ("randomness", "roster", "guarantee")
_START = "0" * 64


class Account:
    """What a ledger's lines come to, one after the other.

    rests_on  what the first line repeats from run.json; None in ledgers of earlier versions
    epoch     of the present key; -1 before the first
    key       commitment to it
    key_file  which file on which disk it was written to; "" in memory and in ledgers of earlier versions
    base      (phases,) steps that earlier epochs were charged
    first     (phases,) the step at which this epoch begins
    reserved  (phases,) the step up to which this epoch has paid
    updates   (phase, step) -> hash of this epoch's noisy update
    closed    (phases,) steps charged, once the run is finished
    """

    def __init__(self, plan: Plan) -> None:
        zero = [0] * len(plan.phases)
        self.plan = plan
        self.rests_on: dict[str, Any] | None = None
        self.epoch, self.key, self.key_file = -1, "", ""
        self.base, self.first, self.reserved = list(zero), list(zero), list(zero)
        self.updates: dict[tuple[int, int], str] = {}
        self.closed: tuple[int, ...] | None = None

    @property
    def charged(self) -> tuple[int, ...]:
        """(phases,) steps charged; all of a reserved block counts."""
        return tuple(b + r - f for b, r, f in zip(self.base, self.reserved, self.first, strict=True))

    def end(self, phase: int) -> int:
        """The step before which this phase must end, lest more steps are charged than the plan certifies."""
        steps = self.plan.phases[phase].steps
        return min(steps, self.first[phase] + steps - self.base[phase])

    def follow(self, line: dict[str, Any]) -> None:
        """Take a line into account. Raises ValueError (or what indexing raises) if no ledger would have written it."""
        kind = line["kind"]
        if kind == "open":
            self.rests_on = dict(line["rests_on"]) if "rests_on" in line else None
            return
        if kind == "key":
            start = line.get("start", [0] * len(self.base))
            if line["epoch"] != self.epoch + 1 or len(start) != len(self.base) or self.closed is not None:
                raise ValueError
            self._begin(line["key"], [int(step) for step in start])
            self.key_file = str(line.get("file", ""))
            return
        if line["epoch"] != self.epoch or self.closed is not None:
            raise ValueError
        if kind == "reserve":
            phase, start, end = line["phase"], line["from"], line["to"]
            if not (0 <= phase < len(self.base) and start == self.reserved[phase] < end <= self.end(phase)):
                raise ValueError
            self.reserved[phase] = end
        elif kind == "update":
            phase, step = line["phase"], line["step"]
            if not (0 <= phase < len(self.base) and self.first[phase] <= step < self.reserved[phase]):
                raise ValueError
            self.updates[phase, step] = line["update"]
        elif kind == "close":
            if any(used > paid for used, paid in zip(line["charged"], self.charged, strict=True)):
                raise ValueError
            self.closed = tuple(line["charged"])
        else:
            raise ValueError

    def check(self, settings: Mapping[str, Any], path: Path) -> None:
        """Raises RunError if these settings, read from `path`, are not those that the first line repeats."""
        others = [name for name, value in (self.rests_on or {}).items() if settings.get(name) != value]
        if others:
            raise RunError(
                f"{path} contradicts the ledger: its {others[0]} is not what the ledger's first line says. It was "
                "edited, or belongs to another run; bring the file back from where it was written."
            )

    def _begin(self, key: str, start: list[int]) -> None:
        if any(not 0 <= step <= phase.steps for step, phase in zip(start, self.plan.phases, strict=True)):
            raise ValueError
        self.base = list(self.charged)
        self.epoch, self.key = self.epoch + 1, key
        self.first, self.reserved, self.updates = list(start), list(start), {}


class Ledger:
    """Authorises steps. One of the two objects that hold state.

    plan      what is allowed
    path      where to keep it; None keeps it in memory, which a crash loses
    key       commitment to the run's key; steps under another key are other releases, and are charged again
    block     steps to reserve per fsync
    settings  of the run, as run.json has them: what the guarantee rests on goes into the first line
    key_file  which file holds the key, as `RunFolder.key_file` names it

    Raises LedgerError if `path` exists already or cannot be written.
    """

    def __init__(
        self,
        plan: Plan,
        path: Path | None = None,
        key: str = "",
        block: int = BLOCK,
        settings: Mapping[str, Any] | None = None,
        key_file: str = "",
    ) -> None:
        self._prepare(plan, path, block)
        if path:
            self._open("x")
            line = {"kind": "open", "schema": SCHEMA, "plan": plan.digest, "allowed": list(self.allowed)}
            if settings is not None:
                line["rests_on"] = {name: settings[name] for name in RESTS_ON if name in settings}
            self._append(line)
        self._append({"kind": "key", "epoch": 0, "key": key, "start": [0] * len(plan.phases), "file": key_file})
        if path:
            self._sync(directory=True)

    def _prepare(self, plan: Plan, path: Path | None, block: int) -> None:
        if block < 1:
            raise LedgerError(f"A ledger reserves at least one step at a time; {block} arrived.")
        self.plan = plan
        self.path = path
        self._place = path.absolute() if path else None  # wherever the program's working folder goes
        self._block = block if path else 1
        self._account = Account(plan)
        self._used = [0] * len(plan.phases)  # this epoch's steps that may have been made, never more than paid for
        self._last = _START
        self._length = 0  # bytes of the lines that were noted here
        self._file: IO[str] | None = None
        self._closed = False

    @classmethod
    def resume(cls, plan: Plan, path: Path, block: int = BLOCK) -> Ledger:
        """Take up a ledger on disk again; a last line that was cut off is removed.

        Raises LedgerError if it was altered, belongs to another plan, or is closed; RunError if another process holds
        it.
        """
        ledger = cls.__new__(cls)
        ledger._prepare(plan, path, block)
        ledger._open("r+")
        assert ledger._file is not None
        ledger._account, ledger._last, ledger._length = _read(path, plan)
        if ledger._account.closed is not None:  # finished: it can be shown, and no more charged
            ledger._file.close()
            ledger._closed = True
            ledger._account.reserved = list(ledger._account.first)
            ledger._account.base, ledger._used = list(ledger._account.closed), list(ledger._account.first)
            return ledger
        ledger._cut_off()
        ledger._sync(directory=True)
        ledger._used = list(ledger._account.reserved)  # updates may have been made whose lines were lost in a crash
        return ledger

    def new_epoch(self, key: str, start: Sequence[int], key_file: str = "") -> None:
        """Go on under another key from step start[i] of phase i; all that was reserved so far stays charged."""
        self._refuse_closed()
        self._refuse_lost()
        line = {"kind": "key", "epoch": self._account.epoch + 1, "key": key, "start": list(start), "file": key_file}
        copy.deepcopy(self._account, {id(self.plan): self.plan}).follow(line)  # refused before it is written
        self._append(line, is_durable=True)
        self._used = list(start)

    def check(self, settings: Mapping[str, Any], path: Path) -> None:
        """Raises RunError if these settings, read from `path`, are not those that the run began with."""
        self._account.check(settings, path)

    def mirror(self) -> Ledger:
        """Its double for another process: allows and refuses what this one does, and writes nothing."""
        double = copy.copy(self)
        double._file, double._used = None, list(self._used)
        double._account = copy.deepcopy(self._account, {id(self.plan): self.plan})
        return double

    @property
    def is_closed(self) -> bool:
        """True if nothing more can be charged."""
        return self._closed

    @property
    def is_untouched(self) -> bool:
        """True if no step was ever reserved."""
        return not any(self._account.charged)

    @property
    def epoch(self) -> int:
        """How many keys there were before the present one."""
        return self._account.epoch

    @property
    def key(self) -> str:
        """Commitment to the present key."""
        return self._account.key

    @property
    def key_file(self) -> str:
        """Which file the present key was written to, as `RunFolder.key_file` names it."""
        return self._account.key_file

    @property
    def last_line(self) -> str:
        """Hash of the last line, and so of all before it; in memory always the same."""
        return self._last

    @property
    def allowed(self) -> tuple[int, ...]:
        """(phases,) steps the plan certifies."""
        return tuple(phase.steps for phase in self.plan.phases)

    @property
    def charged(self) -> tuple[int, ...]:
        """(phases,) steps charged: asked for here, or reserved before this ledger was taken up again."""
        account = self._account
        return tuple(b + u - f for b, u, f in zip(account.base, self._used, account.first, strict=True))

    def end(self, phase: int) -> int:
        """The step before which this phase must end: its number of steps, or earlier after a new key epoch."""
        return self._account.end(phase)

    @property
    def durable(self) -> bool:
        """True if a crash leaves the charges on disk."""
        return self.path is not None

    def charge(self, phase: int, step: int) -> None:
        """Pay for step `step` of phase `phase`, durably, before its update. Raises BudgetExceededError if all are
        used up.

        Asking again for a step that this key has paid for costs nothing: it is the same release.
        Raises LedgerError if the file is no longer at its place on disk.
        """
        self._refuse_closed()
        self._refuse_lost()
        if not 0 <= phase < len(self._used):
            raise LedgerError(f"Phase {phase} was asked for; the plan has phases 0..{len(self._used) - 1}.")
        first, reserved = self._account.first[phase], self._account.reserved[phase]
        if not first <= step <= reserved:
            raise LedgerError(
                f"Step {step:,} of phase {phase} was asked for; under this key, steps {first:,} to {reserved:,} can be."
            )
        if step == reserved:
            left = self.end(phase) - reserved
            if left < 1:
                raise BudgetExceededError(
                    f"All {self.allowed[phase]:,} steps that the plan certifies for phase {phase + 1} are charged; "
                    "one more would spend beyond the budgets. To train longer, make a plan with more steps."
                )
            line = {
                "kind": "reserve",
                "epoch": self.epoch,
                "phase": phase,
                "from": step,
                "to": step + min(self._block, left),
            }
            self._append(line, is_durable=True)
        self._used[phase] = max(self._used[phase], step + 1)

    def record(self, phase: int, step: int, update: str) -> bool:
        """Note the hash of a step's noisy update; False if this key gave another one before, which may be out.

        False means that the update must not be applied: under the same noise, two different sums give their
        difference away. Raises LedgerError if the file is no longer at its place on disk.
        """
        self._refuse_closed()
        self._refuse_lost()
        known = self._account.updates.get((phase, step))
        if known is not None:
            return known == update
        line = {"kind": "update", "epoch": self.epoch, "phase": phase, "step": step, "update": update}
        self._append(line)
        if not self.durable:
            self._account.updates.clear()  # in memory nothing is ever replayed
        return True

    def sync(self) -> None:
        """Make every line durable."""
        if self._file and not self._closed:
            self._refuse_lost()
            self._sync()

    def suspend(self) -> None:
        """Close the file and leave the run open, to be taken up again."""
        if self._file and not self._closed:
            self._sync()
        self._end()

    def close(self) -> None:
        """Write down what was charged and close the file; further charges are refused."""
        if self._file and not self._closed:
            self._refuse_lost()
            if self._account.closed is None:
                self._append({"kind": "close", "epoch": self.epoch, "charged": list(self.charged)})
            self._sync()
        self._end()

    def _end(self) -> None:
        self._closed = True
        if self._file:
            self._file.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise LedgerError("This ledger is closed; nothing more can be charged to it.")

    def _refuse_lost(self) -> None:
        """Nothing is written to a file that has lost its name. A line that was written but not noted here is read.

        An interrupt (Ctrl-C) may fall between the two.
        """
        if self._file is None:
            return
        assert self._place is not None
        try:
            state = os.fstat(self._file.fileno())
            is_there = os.path.samestat(state, os.stat(self._place))
        except OSError:
            is_there = False
        if not is_there:
            self._closed = True
            self._file.close()
            raise LedgerError(
                f"The ledger {self.path} was removed, renamed or replaced while the run wrote to it. The run stops, "
                "for its charges would be lost. If you moved the folder, put it back and resume. If the ledger is "
                "lost, take all steps that the plan allows as charged, and start a new run."
            )
        if state.st_size != self._length:
            self._account, self._last, self._length = _read(self._place, self.plan)
            self._cut_off()
            self._sync()

    def _cut_off(self) -> None:
        """Remove what follows the last whole line."""
        assert self._file is not None
        with self._giving_up():
            self._file.seek(self._length)
            self._file.truncate()

    def _open(self, mode: str) -> None:
        assert self.path is not None
        try:
            # Line by line: a process that is killed takes no update's hash with it. A power cut may, back to the last
            # sync; nothing leaves the house before that (`Private.checkpoint`).
            self._file = open(self.path, mode, buffering=1, encoding="utf-8", opener=for_owner)  # noqa: SIM115
        except OSError as error:
            what = "opened as a new ledger" if mode == "x" else "taken up again"
            raise LedgerError(f"{self.path} cannot be {what}: {error.strerror or error}.") from None
        try:
            locks.hold(self._file.fileno(), self.path.parent)
        except RunError:
            self._file.close()
            raise

    def __str__(self) -> str:
        done, allowed = sum(self.charged), sum(self.allowed)
        kept = printable(self.path) if self.path else "in memory, not durable"
        return (
            f"{done:,} of {allowed:,} steps charged ({kept})\n"
            + display.aligned(display.spend_table(self.plan, self.charged))
            + (f"\n{PLAN_SUPPRESSED}" if has_small_cells(self.plan.groups) else "")
            + "\nClaim the last column, however early you stop: the charge so far holds only if the stop was chosen "
            "without looking at data or outputs."
        )

    def __repr__(self) -> str:
        return f"Ledger({sum(self.charged):,} of {sum(self.allowed):,} steps charged)"

    def _append(self, line: dict[str, Any], is_durable: bool = False) -> None:
        """Write a line, if there is a file, and take it into account. The last statement notes that all was done."""
        last, length = self._last, self._length
        if self._file:
            linked = line | {"prev": last}
            last = linked["hash"] = line_hash(linked)
            text = json.dumps(linked) + "\n"  # ASCII: as many bytes as characters
            length += len(text)
            with self._giving_up():
                self._file.write(text)
            if is_durable:
                self._sync()
        self._account.follow(line)
        self._last, self._length = last, length

    def _sync(self, directory: bool = False) -> None:
        assert self._file is not None
        assert self.path is not None
        with self._giving_up():
            self._file.flush()
            os.fsync(self._file.fileno())
            if directory:
                sync_folder(self.path.parent)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """After a failed write nobody knows what is on disk, so nothing more is charged to this ledger."""
        try:
            yield
        except OSError as error:
            self._closed = True
            raise LedgerError(
                f"The ledger cannot be made durable: {error.strerror or error}. No step was made, and none can follow; "
                "make room and start a new run."
            ) from None


def line_hash(line: dict[str, Any]) -> str:
    """SHA-256 of a line without its own hash; `prev` inside it makes the chain."""
    body = {key: value for key, value in line.items() if key != "hash"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_charges(path: Path, plan: Plan) -> tuple[int, ...]:
    """(phases,) steps that a ledger on disk shows as charged for this plan; all of a reserved block counts.

    A last line that is neither whole nor continues the chain was never durable, so it paid for nothing. Lines altered,
    left out or put in are found; whole lines cut off at the end are not, for nothing after them is there to miss them.
    Raises LedgerError if the file is missing, altered, or made for another plan.
    """
    return read_account(path, plan).charged


def read_account(path: Path, plan: Plan) -> Account:
    """The same, with key epochs and hashes of updates."""
    return _read(path, plan)[0]


def _read(path: Path, plan: Plan) -> tuple[Account, str, int]:
    """(account, hash of the last intact line, length of the intact lines in bytes)."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise LedgerError(f"{path} cannot be read as a ledger: {error}.") from None
    last, length, account = _START, 0, Account(plan)
    for place, text in enumerate(lines):
        try:
            line = json.loads(text.decode("utf-8"))
            intact = line["prev"] == last and line["hash"] == line_hash(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            intact = False
        if place == len(lines) - 1:
            break  # nothing after the last newline, or a line that was cut off while it was written
        if not intact:
            raise LedgerError(f"{path} was altered: line {place + 1} does not continue the chain of hashes.")
        if place == 0 and (line.get("kind") != "open" or line.get("plan") != plan.digest):
            raise LedgerError(f"{path} belongs to another plan than the one given.")
        last, length = line["hash"], length + len(text) + 1
        try:
            account.follow(line)
        except (KeyError, TypeError, IndexError, ValueError):
            raise LedgerError(f"{path} was altered: line {place + 1} does not say what a ledger says there.") from None
    if last == _START:
        raise LedgerError(f"{path} is empty; a ledger begins with an opening line.")
    return account, last, length


def read_last(path: Path) -> dict[str, Any]:
    """The last whole line of a ledger that `read_charges` has found intact; {} if there is none."""
    for text in reversed(path.read_text(encoding="utf-8").split("\n")):
        try:
            line: dict[str, Any] = json.loads(text)
            if line["hash"] == line_hash(line):
                return line
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return {}
