"""The ledger: the steps that a run was charged, and whether the next step is allowed.

The plan certifies how many steps each phase may take; the ledger allows a step if fewer were charged. It counts
integers and computes no epsilon. On disk every line carries the hash of the line before it. Steps are reserved in
blocks, because an fsync costs as much as a small step: a block is durable before the first update it pays for. The
hashes have no key: they detect accidents and partial edits, but not a ledger that was rewritten completely.

After a crash, steps are replayed under the same key: the release is the same, and is charged once. The ledger holds the
hash of every noisy update, so a replay with a different result is detected before it is applied. Such a replay needs
another key, and so does a run that lost its key: a new key epoch. All steps that earlier epochs reserved stay charged,
and the repeated steps are charged again. It is unknown which of its reserved steps an interrupted process made, so all
of them stay charged when the run is resumed.

A copy of a run's folder contains the key, too. The line of a key therefore names the file on disk that holds the key
(`RunFolder.key_file`), and a run with its key in another file begins a new key epoch. If a ledger is removed, renamed
or replaced while a run writes to it, the run stops before its next update. If it was cut or replaced while the run was
stopped, the run is not resumed: a checkpoint holds the hash of the ledger's last line. A process that was forked from
the one that made the ledger charges nothing, because both would add the same noise to different sums.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from ..core import files
from ..core.disclosure import PLAN_SUPPRESSED, has_small_cells, of_unit
from ..core.files import for_owner, sync_folder
from ..core.mechanism import IntArray
from ..errors import BudgetExceededError, EpsilonsError, EpsilonsWarning, LedgerError, RunError, printable
from ..planning import Plan, display
from . import account
from .account import SCHEMA, UPDATE, Account, Chain, line_hash, read, read_account, read_charges
from .plan_folder import Slot

# -- How a ledger is printed: the steps that are charged, and what they spend


def text(plan: Plan, charged: Sequence[int], slot: Slot | None, path: Path | None) -> list[str]:
    """The lines of a terminal."""
    suppressed = [of_unit(PLAN_SUPPRESSED, plan.unit)] if has_small_cells(plan.groups) else []
    table = display.aligned(display.spend_table(plan, charged))
    return [
        *_of_several(slot),
        _title(plan, charged, path),
        table,
        *suppressed,
        *display.levels_note(plan),
        display.CLAIM,
    ]


def html(plan: Plan, charged: Sequence[int], slot: Slot | None, path: Path | None) -> str:
    """The same for a notebook."""
    return display.of_charges(plan, charged, _title(plan, charged, path), _of_several(slot))


def _title(plan: Plan, charged: Sequence[int], path: Path | None) -> str:
    where = printable(path) if path else "in memory, not durable"
    return f"{sum(charged):,} of {plan.steps:,} steps charged ({where})"


def _of_several(slot: Slot | None) -> list[str]:
    """A note if this is one of several runs of a plan."""
    if slot is None or slot.of == 1:
        return []
    return [
        f"This is {slot} of its plan. The epsilons are those of all runs together, and “so far” counts the others in "
        "full."
    ]


# -- What a ledger needs of a registry: a reservation, which the run is tied to while it trains
#
# A registry that cannot be reached stops no run: all its steps are paid for.


class Reservation(Protocol):
    """The right to make the steps of one run (`registry.Reservation`)."""

    def begin(self, key: str, previous: str | None, ledger: str) -> None: ...

    def settle(self, charged: Sequence[int], ledger: str, key: str) -> None: ...

    def leavers(self) -> IntArray: ...


def settle(reservation: Reservation, charged: Sequence[int], last_line: str, key: str) -> None:
    """Give back what a closed ledger did not charge. All stays charged while the registry cannot be reached."""
    try:
        reservation.settle(charged, last_line, key)
    except Exception as error:  # a database may raise anything, and the run itself is over
        what = str(error) if isinstance(error, EpsilonsError) else f"Its registry failed: {type(error).__name__}."
        warnings.warn(
            f"The run is over, and was not settled, so all its steps stay charged in the registry. {what} Settle it "
            "later: epsilons registry settle URL RUN.",
            EpsilonsWarning,
            stacklevel=2,
        )


# -- The ledger: the steps that a run was charged, and whether the next step is allowed

BLOCK = 64  # steps per fsync
#: Facts besides the plan that the guarantee depends on. The first line repeats them from run.json.
RESTS_ON = ("randomness", "roster", "guarantee", "plan_slot", "registry", "lifetimes")


class Ledger:
    """Authorises the steps of a run, and records them. Training makes it: `private.ledger`.

    plan      certifies how many steps each phase may take
    path      the ledger's file; None keeps the ledger in memory, so a crash loses it
    key       commitment to the run's key. Steps under another key are other releases, and are charged again
    block     number of steps to reserve per fsync
    settings  of the run, as in run.json; the first line repeats those that the guarantee depends on, among them
              "plan_slot", which run of its plan it is
    key_file  names the file that holds the key (`RunFolder.key_file`)

    Raises LedgerError if the file exists or cannot be written.

    >>> from epsilons import Budgets, Recipe, plan
    >>> ledger = Ledger(plan(Budgets([1.0] * 500), Recipe(steps=2, batch_size=50, clip_norm=1.0), accountant="rdp"))
    >>> ledger.charge(phase=0, step=0)
    >>> ledger
    Ledger(1 of 2 steps charged)
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
            self._add(line)
        elif settings is not None:
            self._account.rests_on = {name: settings[name] for name in RESTS_ON if name in settings}
        self._add({"kind": "key", "epoch": 0, "key": key, "start": [0] * len(plan.phases), "file": key_file})
        self._sync(folder=True)

    def _prepare(self, plan: Plan, path: Path | None, block: int) -> None:
        if block < 1:
            raise LedgerError(f"A ledger reserves at least one step at a time, got {block}.")
        self.plan = plan
        self.path = path
        self._absolute_path = path.absolute() if path else None  # the working folder may change
        self._block = block if path else 1
        self._account = Account(plan)
        self._used = [0] * len(plan.phases)  # steps before these may have been made in this epoch
        self._chain = Chain()
        self._length = 0  # bytes of the lines in the account
        self._file: IO[str] | None = None
        self._closed = False
        self._process = os.getpid()
        self._reservation: Reservation | None = None

    @classmethod
    def resume(cls, plan: Plan, path: Path, block: int = BLOCK) -> Ledger:
        """Open a ledger on disk again; an incomplete last line is removed.

        Raises LedgerError if the ledger was altered or belongs to another plan, RunError if another process holds it.
        """
        ledger = cls.__new__(cls)
        ledger._prepare(plan, path, block)
        ledger._open("r+")
        assert ledger._file is not None
        ledger._account, ledger._chain, ledger._length = read(path, plan)
        account = ledger._account
        if account.closed is not None:  # it can be shown, and nothing more can be charged
            ledger._file.close()
            ledger._closed = True
            account.previous_keys, account.reserved = list(account.closed), list(account.epoch_start)
        else:
            ledger._truncate()
            ledger._sync(folder=True)
        ledger._used = list(account.reserved)  # a crash may have lost the lines of updates
        return ledger

    def tie(self, reservation: Reservation) -> None:
        """Tie a run to its reservation in a registry; a closed ledger is settled, if it was not settled before."""
        if self._account.closed is not None:
            reservation.settle(self.charged, self.last_line, self.key)
        else:
            reservation.begin(self.key, None, self._account.first_line)
        self._reservation = reservation

    def new_epoch(self, key: str, start: Sequence[int], key_file: str = "") -> None:
        """Continue under another key from step start[i] of phase i. All reserved steps stay charged."""
        self._refuse_closed()
        self._refuse_lost()
        line = {"kind": "key", "epoch": self.epoch + 1, "key": key, "start": list(start), "file": key_file}
        copy.deepcopy(self._account, {id(self.plan): self.plan}).apply(line)  # refuse a wrong line before it is written
        if self._reservation is not None:  # of two copies of a folder, only one gets another key
            self._reservation.begin(key, self.key, self._account.first_line)
        self._add(line, is_durable=True)
        self._used = list(start)

    def check(self, settings: Mapping[str, Any], path: Path) -> None:
        """Raise RunError if these settings, read from `path`, are not those that the run began with."""
        self._account.check(settings, path)

    def mirror(self) -> Ledger:
        """A copy for another process: it allows and refuses what this ledger does, and writes nothing."""
        mirror = copy.copy(self)
        mirror._file, mirror._used, mirror._reservation = None, list(self._used), None
        mirror._account = copy.deepcopy(self._account, {id(self.plan): self.plan})
        return mirror

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _process=os.getpid())  # a mirror belongs to the process that gets it

    @property
    def is_closed(self) -> bool:
        """True if nothing more can be charged, here in this process."""
        return self._closed or self._process != os.getpid()

    @property
    def is_untouched(self) -> bool:
        """True if no step was ever reserved."""
        return not any(self._account.charged)

    @property
    def epoch(self) -> int:
        """Number of keys before the present one."""
        return self._account.epoch

    @property
    def key(self) -> str:
        """Commitment to the present key."""
        return self._account.key

    @property
    def key_file(self) -> str:
        """Name of the file that the present key was written to (`RunFolder.key_file`)."""
        return self._account.key_file

    @property
    def rests_on(self) -> Mapping[str, Any]:
        """Facts besides the plan that the guarantee depends on, as in the first line."""
        return self._account.rests_on or {}

    @property
    def slot(self) -> Slot | None:
        """Which run of its plan this is; None for the only one."""
        values = self.rests_on.get("plan_slot")
        return None if values is None else Slot(**values)

    @property
    def last_line(self) -> str:
        """Hash of all lines: of the last one, after `sync`. Constant in memory."""
        return self._chain.hash

    def has_line(self, line_hash: str) -> bool:
        """True if the file has a line with this hash."""
        assert self.path is not None
        with self.path.open(encoding="utf-8") as lines:
            return any(f'"hash": "{line_hash}"' in line for line in lines)

    @property
    def allowed(self) -> tuple[int, ...]:
        """(phases,) steps that the plan certifies."""
        return tuple(phase.steps for phase in self.plan.phases)

    @property
    def charged(self) -> tuple[int, ...]:
        """(phases,) steps charged by this object, and steps reserved before the ledger was resumed."""
        return self._account.charged_up_to(self._used)

    def end(self, phase: int) -> int:
        """The step before which this phase must end: its number of steps, or earlier after a new key epoch."""
        return self._account.end(phase)

    @property
    def durable(self) -> bool:
        """True if the charges are on disk and survive a crash."""
        return self.path is not None

    def leavers(self, phase: int, step: int) -> IntArray | None:
        """Places of those who left the registry, if a block begins with this step: within a block nobody leaves."""
        if self._reservation is None or step != self._account.reserved[phase]:
            return None
        try:
            return np.sort(self._reservation.leavers())
        except Exception as error:  # a database may raise anything; who left before stays out
            warnings.warn(
                f"The registry cannot be reached ({type(error).__name__}). The run is paid for and goes on; people who "
                "withdraw now take effect when it is reached again.",
                EpsilonsWarning,
                stacklevel=2,
            )
            return self.left_out(phase, step)

    def left_out(self, phase: int, step: int) -> IntArray:
        """(people,) places of those who are not part of this step's sum although they may be drawn, rising."""
        return self._account.left_out(phase, step)

    def charge(self, phase: int, step: int, leavers: IntArray | None = None) -> None:
        """Charge step `step` of phase `phase`, durably, before its update.

        leavers  what `leavers` gave, here or in the process that this ledger mirrors

        A step that this key has paid for costs nothing: it is the same release.
        Raises BudgetExceededError if all certified steps are charged, LedgerError for a step out of order, for a closed
        ledger, and if the file is no longer at its path.
        """
        self._refuse_closed()
        self._refuse_lost()
        if not 0 <= phase < len(self._used):
            raise LedgerError(f"The plan has phases 0 to {len(self._used) - 1}, got {phase}.")
        first, reserved = self._account.epoch_start[phase], self._account.reserved[phase]
        if not first <= step <= reserved:
            raise LedgerError(
                f"Under this key, steps {first:,} to {reserved:,} of phase {phase} can be charged, got {step:,}."
            )
        if step == reserved:
            left = self.end(phase) - reserved
            if left < 1:
                raise BudgetExceededError(
                    f"All {self.allowed[phase]:,} steps that the plan certifies for phase {phase + 1} are charged; "
                    "one more would spend beyond the budgets. To train longer, make a plan with more steps."
                )
            if leavers is not None and not np.array_equal(leavers, self.left_out(phase, step)):
                mask = {"phase": phase, "from": step, "places": account.packed(leavers)}
                self._add({"kind": "mask", "epoch": self.epoch, **mask})  # durable with the next line
            block = {"from": step, "to": step + min(self._block, left)}
            self._add({"kind": "reserve", "epoch": self.epoch, "phase": phase, **block}, is_durable=True)
        self._used[phase] = max(self._used[phase], step + 1)

    def record(self, phase: int, step: int, update: str) -> bool:
        """Record the hash of a step's noisy update. False if this key gave another one before.

        After False the update must not be applied: two different sums under the same noise reveal their difference.
        Raises LedgerError for a closed ledger, and if the file is no longer at its path.
        """
        self._refuse_closed()
        self._refuse_lost()
        if not self.durable:  # in memory nothing is ever replayed
            self._account.check_paid(phase, step)
            return True
        known = self._account.update(phase, step)
        if known is not None:
            return known == update
        text = f'"{update}"\n'
        is_next = (phase, step) == (self._account.phase, self._account.next_step(phase))
        if is_next and UPDATE.fullmatch(text):
            self._add_update(text)
        else:
            self._add({"kind": "update", "epoch": self.epoch, "phase": phase, "step": step, "update": update})
        return True

    def is_new_round(self, of: str, number: int) -> bool:
        """True if no round of this federated run with this number, or a later one, was begun; they count from 1."""
        return number > self._account.rounds.get(of, 0)

    def begin_round(self, of: str, number: int) -> None:
        """Note that a round of a federated run begins, before its first charge, and durable with it.

        Raises LedgerError for a round that is not new, and for a closed ledger.
        """
        self._refuse_closed()
        self._refuse_lost()
        if not self.is_new_round(of, number):
            raise LedgerError(f"Round {number:,} of this federated run was begun before, or a later one was.")
        self._add({"kind": "round", "epoch": self.epoch, "of": of, "round": number})

    def paid(self, phase: int) -> int:
        """The present key has paid for the steps of this phase before this one, and may have made them."""
        return self._account.reserved[phase]

    def reserve_at_most(self, steps: int) -> None:
        """Reserve so many steps per fsync from now on; a process that is killed leaves no more of them unused."""
        self._block = steps

    def sync(self) -> None:
        """Make every line durable, the last one with a hash of its own."""
        if not self._closed:
            self._refuse_lost()
            if self._chain.updates:
                self._add({"kind": "sync", "epoch": self.epoch})
            self._sync()

    def suspend(self) -> None:
        """Close the file and leave the run open, to be resumed."""
        if self._file and not self._closed:
            self._sync()
        self._end()

    def close(self) -> None:
        """Write what was charged, and close the file. Further charges are refused."""
        if self._file and not self._closed:
            self._refuse_lost()
            if self._account.closed is None:
                self._add({"kind": "close", "epoch": self.epoch, "charged": list(self.charged)}, is_durable=True)
                if self._reservation is not None:
                    settle(self._reservation, self.charged, self.last_line, self.key)
        self._end()

    def _end(self) -> None:
        self._closed = True
        if self._file:
            self._file.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise LedgerError("This ledger is closed; nothing more can be charged to it.")

    def _refuse_lost(self) -> None:
        """Raise LedgerError if the open file is no longer the one at the ledger's path: its lines would be lost.

        And in another process than the one that made the ledger.

        An interrupt (Ctrl-C) may fall between writing a line and adding it to the account. Then the file is read again.
        """
        if self._process != os.getpid():
            raise LedgerError(
                "This run was begun by another process, from which this one was forked. Both would add the same noise "
                "to different sums, and their difference has none. Call make_private in the process that trains."
            )
        if self._file is None:
            return
        assert self._absolute_path is not None
        try:
            state = os.fstat(self._file.fileno())
            is_there = os.path.samestat(state, os.stat(self._absolute_path))
        except OSError:
            is_there = False
        if not is_there:
            self._closed = True
            self._file.close()
            raise LedgerError(
                f"The ledger {self.path} was removed, renamed or replaced while the run wrote to it. The run stops, "
                "because its charges would be lost. If you moved the folder, move it back and resume. If the ledger is "
                "lost, count all steps of the plan as charged, and start a new run."
            )
        if state.st_size != self._length:
            self._account, self._chain, self._length = read(self._absolute_path, self.plan)
            self._truncate()
            self._sync()

    def _truncate(self) -> None:
        """Remove what follows the last complete line."""
        assert self._file is not None
        with self._closed_on_failure():
            self._file.seek(self._length)
            self._file.truncate()

    def _open(self, mode: str) -> None:
        assert self.path is not None
        try:
            # Line by line, so that a killed process loses no update's hash. A power cut may lose lines since the last
            # sync; nothing is released before that sync (`Private.checkpoint`).
            self._file = open(self.path, mode, buffering=1, encoding="utf-8", opener=for_owner)  # noqa: SIM115
        except OSError as error:
            what = "opened as a new ledger" if mode == "x" else "resumed"
            raise LedgerError(f"{self.path} cannot be {what}: {error.strerror or error}.") from None
        try:
            files.hold(self._file.fileno(), self.path.parent)
        except RunError:
            self._file.close()
            raise

    def _add(self, line: dict[str, Any], is_durable: bool = False) -> None:
        """Write a line if there is a file, and add it to the account. Only the last statement marks it as added."""
        last_line, length = self._chain.last_line, self._length
        if self._file:
            linked = line | {"prev": self._chain.hash}
            last_line = linked["hash"] = line_hash(linked)
            text = json.dumps(linked) + "\n"  # ASCII, so as many bytes as characters
            length += len(text)
            self._write(text)
        if is_durable:
            self._sync()
        self._account.apply(line)
        self._account.first_line = self._account.first_line or last_line
        self._chain.follow(last_line)
        self._length = length

    def _add_update(self, text: str) -> None:
        """The same for the line of the next step's update."""
        if self._file:
            self._write(text)
            self._chain.updates += text.encode()
        self._account.apply_updates(text.encode())
        self._length += len(text) if self._file else 0

    def _write(self, text: str) -> None:
        assert self._file is not None
        with self._closed_on_failure():
            self._file.write(text)

    def _sync(self, folder: bool = False) -> None:
        if self._file is None:
            return
        assert self.path is not None
        with self._closed_on_failure():
            self._file.flush()
            os.fsync(self._file.fileno())
            if folder:
                sync_folder(self.path.parent)

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """After a failed write the content of the disk is unknown, so nothing more is charged to this ledger."""
        try:
            yield
        except OSError as error:
            self._closed = True
            raise LedgerError(
                f"The ledger cannot be made durable: {error.strerror or error}. No step was made, and none can follow. "
                "Make room and start a new run."
            ) from None

    def __str__(self) -> str:
        return "\n".join(text(self.plan, self.charged, self.slot, self.path))

    def _repr_html_(self) -> str:
        """In a notebook: the same as a table."""
        return html(self.plan, self.charged, self.slot, self.path)

    def __repr__(self) -> str:
        return f"Ledger({sum(self.charged):,} of {sum(self.allowed):,} steps charged)"


__all__ = ["BLOCK", "Account", "Ledger", "line_hash", "read_account", "read_charges"]
