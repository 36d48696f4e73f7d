"""The ledger: what a run has been charged, and whether the next step may happen.

The plan certifies how many steps each phase may take; the ledger allows a step iff fewer were charged. It
counts integers and computes no epsilon. On disk every line carries the hash of the one before it, and steps
are reserved in blocks, because one fsync costs as much as a small step: a block is durable before the first
update it pays for, and what a crash leaves unused of it is either replayed under the same key (the same
release, not a second one) or stays charged.

    {"kind": "open", "schema": 1, "plan": <digest>, "allowed": [9375], "prev": …, "hash": …}
    {"kind": "key", "epoch": 0, "key": <commitment>, …}
    {"kind": "reserve", "epoch": 0, "phase": 0, "from": 0, "to": 64, …}
    {"kind": "close", "epoch": 0, "charged": [9375], …}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .errors import LedgerError, Overspend
from .planning import Plan, tables

SCHEMA = 1
BLOCK = 64  # steps per fsync
_START = "0" * 64


class Ledger:
    """Authorises steps. One of the two objects that hold state.

    plan   what is allowed
    path   where to keep it; None keeps it in memory, which a crash loses
    key    commitment to the run's key; steps under another key are other releases, and are charged again
    block  steps to reserve per fsync

    Raises LedgerError if `path` exists already or cannot be written.
    """

    def __init__(self, plan: Plan, path: Path | None = None, key: str = "", block: int = BLOCK) -> None:
        if block < 1:
            raise LedgerError(f"A ledger reserves at least one step at a time; {block} arrived.")
        self.plan = plan
        self.path = path
        self._block = block if path else 1
        self._reserved = [0] * len(plan.phases)  # steps paid for
        self._used = [0] * len(plan.phases)  # steps asked for, never more than paid for
        self._last = _START
        self._file: IO[str] | None = None
        self._closed = False
        if path:
            try:
                self._file = path.open("x", encoding="utf-8")
            except OSError as error:
                raise LedgerError(f"{path} cannot be opened as a new ledger: {error.strerror or error}.") from None
            self._append(kind="open", schema=SCHEMA, plan=plan.digest, allowed=list(self.allowed))
            self._append(kind="key", epoch=0, key=key)
            self._sync(directory=True)

    @property
    def allowed(self) -> tuple[int, ...]:
        """(phases,) steps the plan certifies."""
        return tuple(phase.steps for phase in self.plan.phases)

    @property
    def charged(self) -> tuple[int, ...]:
        """(phases,) steps charged for use."""
        return tuple(self._used)

    @property
    def durable(self) -> bool:
        """True if a crash leaves the charges on disk."""
        return self.path is not None

    def charge(self, phase: int, step: int) -> None:
        """Pay for step `step` of phase `phase`, durably, before its update. Raises Overspend if all are used up.

        Asking again for a step that this key has paid for costs nothing: it is the same release.
        """
        if self._closed:
            raise LedgerError("This ledger is closed; nothing more can be charged to it.")
        if not 0 <= phase < len(self._used):
            raise LedgerError(f"Phase {phase} was asked for; the plan has phases 0..{len(self._used) - 1}.")
        if not 0 <= step <= self._reserved[phase]:
            raise LedgerError(f"Step {step:,} of phase {phase} was asked for before step {self._reserved[phase]:,}.")
        if step == self._reserved[phase]:
            left = self.allowed[phase] - self._reserved[phase]
            if left < 1:
                raise Overspend(
                    f"All {self.allowed[phase]:,} steps that the plan certifies for phase {phase + 1} are charged; "
                    "one more would spend beyond the budgets. To train longer, make a plan with more steps."
                )
            until = step + min(self._block, left)
            if self._file:
                self._append(kind="reserve", epoch=0, phase=phase, **{"from": step, "to": until})
                self._sync()
            self._reserved[phase] = until
        self._used[phase] = max(self._used[phase], step + 1)

    def close(self) -> None:
        """Write down what was used and close the file; further charges are refused."""
        if self._file and not self._closed:
            self._append(kind="close", epoch=0, charged=list(self.charged))
            self._sync()
            self._file.close()
        self._closed = True

    def __str__(self) -> str:
        done, allowed = sum(self.charged), sum(self.allowed)
        kept = str(self.path) if self.path else "in memory, not durable"
        return (
            f"{done:,} of {allowed:,} steps charged ({kept})\n"
            + tables.aligned(tables.spend_table(self.plan, self.charged))
            + "\nClaim the last column, however early you stop: the charge so far holds only if the stop was chosen "
            "without looking at data or outputs."
        )

    def __repr__(self) -> str:
        return f"Ledger({sum(self.charged):,} of {sum(self.allowed):,} steps charged)"

    def _append(self, **line: Any) -> None:
        assert self._file is not None
        linked = line | {"prev": self._last}
        self._last = line_hash(linked)
        with self._giving_up():
            self._file.write(json.dumps(linked | {"hash": self._last}) + "\n")

    def _sync(self, directory: bool = False) -> None:
        assert self._file is not None
        assert self.path is not None
        with self._giving_up():
            self._file.flush()
            os.fsync(self._file.fileno())
            if directory:
                handle = os.open(self.path.parent, os.O_RDONLY)
                os.fsync(handle)
                os.close(handle)

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
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LedgerError(f"{path} cannot be read as a ledger: {error}.") from None
    last, charged = _START, [0] * len(plan.phases)
    for place, text in enumerate(lines):
        try:
            line = json.loads(text)
            intact = line["prev"] == last and line["hash"] == line_hash(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            intact = False
        if not intact and place == len(lines) - 1:
            break  # nothing after the last newline, or a line that was cut off while it was written
        if not intact:
            raise LedgerError(f"{path} was altered: line {place + 1} does not continue the chain of hashes.")
        if place == 0 and (line.get("kind") != "open" or line.get("plan") != plan.digest):
            raise LedgerError(f"{path} belongs to another plan than the one given.")
        last = line["hash"]
        try:
            _follow(line, charged, plan)
        except (KeyError, TypeError, IndexError, ValueError):
            raise LedgerError(f"{path} was altered: line {place + 1} does not say what a ledger says there.") from None
    if last == _START:
        raise LedgerError(f"{path} is empty; a ledger begins with an opening line.")
    return tuple(charged)


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


def _follow(line: dict[str, Any], charged: list[int], plan: Plan) -> None:
    """Take one line into account. Raises ValueError (or what indexing raises) if no ledger would have written it."""
    kind = line["kind"]
    if kind == "reserve":
        phase, start, end = line["phase"], line["from"], line["to"]
        if not (0 <= phase < len(charged) and start == charged[phase] < end <= plan.phases[phase].steps):
            raise ValueError
        charged[phase] = end
    elif kind == "close":
        if any(used > reserved for used, reserved in zip(line["charged"], charged, strict=True)):
            raise ValueError
    elif kind not in ("open", "key"):
        raise ValueError
