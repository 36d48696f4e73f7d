"""The lines of a ledger, and the account that they add up to.

{"kind": "open", "schema": 2, "plan": <digest>, "allowed": [9375],
 "rests_on": {"randomness": "chacha20", "roster": <digest>, "guarantee": <words>}, "prev": …, "hash": …}
{"kind": "key", "epoch": 0, "key": <commitment>, "start": [0], "file": <hash of its place on disk>, …}
{"kind": "reserve", "epoch": 0, "phase": 0, "from": 0, "to": 64, …}
{"kind": "mask", "epoch": 0, "phase": 0, "from": 64, "places": <who is left out from there on>, …}
"<hash of the noisy update>"
{"kind": "update", "epoch": 0, "phase": 0, "step": 0, "update": <hash of the noisy update>, …}
{"kind": "sync", "epoch": 0, …}
{"kind": "round", "epoch": 0, "of": <federated run>, "round": 1, …}  # before the first charge of a federated round
{"kind": "close", "epoch": 0, "charged": [9375], …}

A line that is only a hash is the update of the step after the last one, in the phase of the last block. It has no hash
of its own, since a run may take a million steps: `prev` of the next other line is the hash of the line before these
updates and of their text. A checkpoint names such a line, "sync" if there is no other. An update that is out of order,
and each one before schema 2, has a line of kind "update".
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..core.mechanism import IntArray
from ..errors import LedgerError, RunError, parsed_json
from ..planning import Plan

SCHEMA = 2
#: The hash that comes before the first line.
NO_LINE = "0" * 64
#: The line of an update. Its hash has so many bytes.
UPDATE = re.compile('"[0-9a-f]{32}"\n')
BYTES = 16


@dataclass
class Chain:
    """What the next line continues: the last line with a hash of its own, and the lines of updates after it."""

    last_line: str = NO_LINE
    updates: bytearray = field(default_factory=bytearray)

    @property
    def hash(self) -> str:
        """Of all lines."""
        return hashlib.sha256(self.last_line.encode() + self.updates).hexdigest() if self.updates else self.last_line

    def follow(self, line_hash: str) -> None:
        """Add a line with a hash of its own."""
        self.last_line, self.updates = line_hash, bytearray()


class Account:
    """The state that a ledger's lines add up to.

    first_line     hash of the first line
    rests_on       what the first line repeats from run.json; None in ledgers of earlier versions
    epoch          index of the present key; -1 before the first
    key            commitment to the present key
    key_file       name of the file that the key was written to; "" in memory and in ledgers of earlier versions
    previous_keys  (phases,) steps charged under earlier keys
    epoch_start    (phases,) first step of the present epoch
    reserved       (phases,) the present epoch has paid for the steps before this one
    updates        (phases,) hashes of the noisy updates in the present epoch, one after the other
    other_updates  (phase, step) -> hash, of updates out of order
    phase          of the last block in the present epoch; -1 before the first
    masks          (phase, step, places) from which step of the present epoch on which people are left out, rising
    rounds         federated run -> its last round that was begun
    closed         (phases,) steps charged, once the ledger is closed
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.first_line = ""
        self.rests_on: dict[str, Any] | None = None
        self.epoch, self.key, self.key_file = -1, "", ""
        self.previous_keys, self.epoch_start, self.reserved = ([0] * len(plan.phases) for _ in range(3))
        self.updates = [bytearray() for _ in plan.phases]
        self.other_updates: dict[tuple[int, int], str] = {}
        self.phase = -1
        self.masks: list[tuple[int, int, IntArray]] = []
        self.rounds: dict[str, int] = {}
        self.closed: tuple[int, ...] | None = None

    def left_out(self, phase: int, step: int) -> IntArray:
        """(people,) places of those who are left out of this step, rising."""
        masks = [places for at, start, places in self.masks if (at, start) <= (phase, step)]
        return masks[-1] if masks else np.empty(0, dtype=np.int64)

    @property
    def charged(self) -> tuple[int, ...]:
        """(phases,) steps charged; reserved blocks count in full."""
        return self.charged_up_to(self.reserved)

    def charged_up_to(self, steps: Sequence[int]) -> tuple[int, ...]:
        """(phases,) steps charged if the present epoch is charged for the steps before these."""
        return tuple(p + s - e for p, s, e in zip(self.previous_keys, steps, self.epoch_start, strict=True))

    def end(self, phase: int) -> int:
        """The step before which this phase must end, so that no more steps are charged than the plan certifies."""
        steps = self.plan.phases[phase].steps
        return min(steps, self.epoch_start[phase] + steps - self.previous_keys[phase])

    def update(self, phase: int, step: int) -> str | None:
        """Hash of a step's noisy update in the present epoch; None if there is none yet."""
        place = BYTES * (step - self.epoch_start[phase])
        if 0 <= place < len(self.updates[phase]):
            return self.updates[phase][place : place + BYTES].hex()
        return self.other_updates.get((phase, step))

    def check_paid(self, phase: int, step: int) -> None:
        """Raise ValueError if the present epoch has not paid for this step."""
        if not (phase >= 0 and self.epoch_start[phase] <= step < self.reserved[phase]):
            raise ValueError

    def next_step(self, phase: int) -> int:
        """The step whose update comes next, if all come in order."""
        return self.epoch_start[phase] + len(self.updates[phase]) // BYTES

    def apply_updates(self, text: bytes | bytearray) -> None:
        """Add lines of updates. Raises ValueError for other text, and for steps that are not paid for."""
        if not text:
            return
        hashes = bytes.fromhex(text.translate(None, b'"\n').decode())
        count, rest = divmod(len(hashes), BYTES)
        is_whole = rest == 0 and len(text) == count * (2 * BYTES + len('""\n'))
        if not is_whole or self.phase < 0 or self.closed is not None:
            raise ValueError
        if self.next_step(self.phase) + count > self.reserved[self.phase]:
            raise ValueError
        self.updates[self.phase] += hashes

    def apply(self, line: dict[str, Any]) -> None:
        """Add another line. Raises ValueError, KeyError, TypeError or IndexError for a line that no ledger writes."""
        kind = line["kind"]
        if kind == "open":
            self.rests_on = dict(line["rests_on"]) if "rests_on" in line else None
            return
        if self.closed is not None or line["epoch"] != self.epoch + (kind == "key"):
            raise ValueError
        {
            "key": self._key,
            "mask": self._mask,
            "reserve": self._reserve,
            "update": self._update,
            "sync": lambda line: None,
            "round": self._round,
            "close": self._close,
        }[kind](line)

    def _key(self, line: dict[str, Any]) -> None:
        start = [int(step) for step in line.get("start", [0] * len(self.reserved))]
        if any(not 0 <= step <= phase.steps for step, phase in zip(start, self.plan.phases, strict=True)):
            raise ValueError
        self.epoch, self.key, self.key_file = line["epoch"], line["key"], str(line.get("file", ""))
        self.previous_keys = list(self.charged)
        self.epoch_start, self.reserved, self.phase = list(start), list(start), -1
        self.updates, self.other_updates = [bytearray() for _ in start], {}
        self.masks = [(-1, 0, places) for _, _, places in self.masks[-1:]]  # who left stays out

    def _mask(self, line: dict[str, Any]) -> None:
        phase, start, places = line["phase"], line["from"], unpacked(line["places"], self.plan.records)
        if not (phase >= 0 and start == self.reserved[phase]) or (np.diff(places) <= 0).any():
            raise ValueError
        self.masks.append((phase, start, places))

    def _reserve(self, line: dict[str, Any]) -> None:
        phase, start, end = line["phase"], line["from"], line["to"]
        if not (phase >= 0 and start == self.reserved[phase] < end <= self.end(phase)):
            raise ValueError
        self.reserved[phase], self.phase = end, phase

    def _update(self, line: dict[str, Any]) -> None:
        phase, step = line["phase"], line["step"]
        self.check_paid(phase, step)
        update = str(line["update"])
        if step == self.next_step(phase) and UPDATE.fullmatch(f'"{update}"\n'):
            self.updates[phase] += bytes.fromhex(update)
        else:
            self.other_updates[phase, step] = update

    def _round(self, line: dict[str, Any]) -> None:
        if not self.rounds.get(line["of"], 0) < int(line["round"]):
            raise ValueError
        self.rounds[line["of"]] = int(line["round"])

    def _close(self, line: dict[str, Any]) -> None:
        if any(used > paid for used, paid in zip(line["charged"], self.charged, strict=True)):
            raise ValueError
        self.closed = tuple(line["charged"])

    def check(self, settings: Mapping[str, Any], path: Path) -> None:
        """Raise RunError if these settings, read from `path`, contradict the first line."""
        others = [name for name, value in (self.rests_on or {}).items() if settings.get(name) != value]
        if others:
            raise RunError(
                f"{path} contradicts the ledger: its {others[0]} differs from the ledger's first line. The file was "
                "edited, or belongs to another run. Restore it."
            )


def packed(places: IntArray) -> str:
    """Places as text."""
    return base64.b64encode(zlib.compress(places.astype("<i8").tobytes())).decode()


def unpacked(text: str, most: int) -> IntArray:
    """The places in this text. Raises ValueError for other texts, and for more places than `most`."""
    try:
        places = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), 8 * most + 1)
        return np.frombuffer(places, dtype="<i8").astype(np.int64)
    except zlib.error:
        raise ValueError from None


def line_hash(line: dict[str, Any]) -> str:
    """SHA-256 of a line without its hash; `prev` in the line makes the chain."""
    body = {key: value for key, value in line.items() if key != "hash"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_charges(path: Path, plan: Plan) -> tuple[int, ...]:
    """(phases,) steps that a ledger on disk shows as charged for this plan; reserved blocks count in full.

    An incomplete last line was never durable, so it paid for nothing. Lines that were altered, left out or inserted are
    detected. Complete lines that were cut off at the end are not, nor are updates altered after the last other line: a
    replay that differs from them is not applied.
    Raises LedgerError if the file is missing, altered, or made for another plan.
    """
    return read_account(path, plan).charged


def read_account(path: Path, plan: Plan) -> Account:
    """The account of a ledger on disk, as `read_charges` reads it."""
    return read(path, plan)[0]


def read(path: Path, plan: Plan) -> tuple[Account, Chain, int]:
    """(account, the chain of the intact lines, their length in bytes). No more than a block is in memory at once."""
    chain, length, account, number = Chain(), 0, Account(plan), 0
    try:
        with path.open("rb") as lines:
            for number, text in enumerate(lines, start=1):
                if text.startswith(b'"'):
                    chain.updates += text
                    continue
                if not text.endswith(b"\n"):
                    break  # an incomplete line
                line = _intact(text)
                if line is None or line.get("prev") != chain.hash:
                    raise LedgerError(f"{path} was altered: line {number} does not continue the chain of hashes.")
                if number == 1 and (line.get("kind") != "open" or line.get("plan") != plan.digest):
                    raise LedgerError(f"{path} belongs to another plan than the one given.")
                account.apply_updates(chain.updates)
                account.apply(line)
                account.first_line = account.first_line or line["hash"]
                length += len(chain.updates) + len(text)
                chain.follow(line["hash"])
            del chain.updates[chain.updates.rfind(b"\n") + 1 :]  # an incomplete line
            account.apply_updates(chain.updates)
    except OSError as error:
        raise LedgerError(f"{path} cannot be read as a ledger: {error}.") from None
    except (KeyError, TypeError, IndexError, ValueError):
        raise LedgerError(f"{path} was altered: line {number} is not a line that a ledger writes there.") from None
    if chain.last_line == NO_LINE:
        raise LedgerError(f"{path} is empty; a ledger begins with an opening line.")
    return account, chain, length + len(chain.updates)


def _intact(text: bytes) -> dict[str, Any] | None:
    """The line in this text, if its hash is right."""
    try:
        line: dict[str, Any] = parsed_json(text.decode("utf-8"))
        return line if line["hash"] == line_hash(line) else None
    except (ValueError, KeyError, TypeError):
        return None
