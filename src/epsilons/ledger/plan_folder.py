"""The folder of a plan for several runs. It counts the runs, so that no more are made than the plan certifies.

    tuning/
      plan.json     the plan, as `Plan.save` writes it
      slots/1, 2, … one file for each run that has begun, mode 0600

A run claims a slot before its first charge: it creates the file of the next number, which only one process can do, and
makes it durable. A slot is never given back, because a run that was interrupted may have released something; if its run
had not begun, the next run in the same folder goes on with it. It names the claim of its run, and only the folder with
this claim can resume the run. A copy of the folder counts its own runs: copying cannot be detected.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..accounting import Accountant
from ..core import files
from ..core.files import close_folder, sync_folder
from ..errors import PlanError, RunError, parsed_json, printable
from ..planning import Plan
from .run_folder import RunFolder

SCHEMA = 1


@dataclass(frozen=True)
class Slot:
    """The place of one run among all runs of a plan.

    number  from 1; 0 for a run of a selection, in which the numbers of runs are secret
    of      number of runs of the plan; 0 likewise
    claim   a random text that only this run has
    """

    number: int
    of: int
    claim: str = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """As in run.json and in the first line of the ledger."""
        return {"number": self.number, "of": self.of, "claim": self.claim}

    def __str__(self) -> str:
        return f"run {self.number:,} of {self.of:,}" if self.of else "one run of a selection"


class PlanFolder:
    """A plan and the slots of its runs, in a folder. Pass it to `fit` or `make_private` in place of the plan.

    path        a folder that `PlanFolder.create` made
    accountant  the function of the plan's accountant, if that is not one of accounting.ACCOUNTANTS
    is_subset   True if its runs may train on some of the plan's records (`for_subset`)

    It holds no open file, so it can be copied, pickled and used by several processes at once. Raises PlanError if there
    is no plan in the folder, or what Plan.load raises.

    >>> import epsilons, tempfile
    >>> budgets = epsilons.Budgets([1.0] * 500)
    >>> plan = epsilons.plan(budgets, epsilons.Recipe(2, 50, 1.0), accountant="rdp", runs=3)
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     PlanFolder.create(f"{parent}/tuning", plan)
    PlanFolder(0 of 3 runs have begun)
    """

    def __init__(self, path: str | Path, accountant: Accountant | None = None) -> None:
        self.path, self.is_subset = Path(path).absolute(), False  # absolute, because the working folder may change
        self._selected: tuple[int, str] | None = None
        if not (self.path / "plan.json").is_file():
            raise PlanError(
                f"{path} holds no plan. Make the folder with PlanFolder.create(path, plan), or with epsilons plan "
                "--runs … -o."
            )
        if not (self.path / "slots").is_dir():
            raise PlanError(
                f"{path} holds a plan, but not the slots of its runs: it may be the folder of one run. Give the folder "
                "that PlanFolder.create or epsilons plan --runs … -o made."
            )
        self.plan = Plan.load(self.path / "plan.json", accountant)

    @classmethod
    def create(cls, path: str | Path, plan: Plan, tiers: Mapping[str, float] | None = None) -> PlanFolder:
        """A new folder for the runs of this plan. Raises RunError if the folder exists and is not empty.

        tiers  {name: epsilon}, as for `Plan.save`

        Make it once for each plan: every folder allows all runs of its plan.
        """
        folder = Path(path)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            if any(folder.iterdir()):
                raise RunError(
                    f"{path} is not empty. The slots of a plan's runs need a folder of their own: choose one that does "
                    f"not exist yet. To go on with the plan that is in a folder, use PlanFolder({str(path)!r})."
                )
            close_folder(folder)
            (folder / "slots").mkdir(mode=0o700)
        except OSError as error:
            raise RunError(f"{path} cannot be used as a plan's folder: {error.strerror or error}.") from None
        plan.save(folder / "plan.json", tiers)
        return cls(folder, plan.accountant_fn)

    def for_subset(self) -> PlanFolder:
        """The same folder, for runs on some of the plan's records, such as a fold.

        Each record takes its group's row of the plan, and the divisor stays the plan's. Which records these are must
        not depend on the data.
        """
        folder = copy(self)
        folder.is_subset = True
        return folder

    def for_selection(self, number: int, claim: str) -> PlanFolder:
        """The same folder, for this run of its selection alone; the run names this claim in place of its number."""
        folder = copy(self)
        folder._selected = number, claim
        return folder

    @property
    def begun(self) -> int:
        """Number of runs that have begun: finished, running or interrupted."""
        return max(self._numbers(), default=0)

    @property
    def left(self) -> int:
        """Number of runs that can still begin."""
        return max(self.plan.runs - self.begun, 0)

    def claim(self, run_dir: str | Path | None = None) -> Slot:
        """Claim the next slot, durably; `make_private` does it for each run that begins.

        run_dir  the run's folder, noted in the slot for people who look for it

        Raises RunError if all runs have begun, if the slots are those of another plan, or if the claim cannot be made
        durable.
        """
        self._check_slots()
        if self.plan.select is not None:
            return self._claim_selected(run_dir)
        if (unused := self.unused(run_dir)) is not None:
            return unused
        for number in range(self.begun + 1, self.plan.runs + 1):
            slot = Slot(number, self.plan.runs, secrets.token_hex(16))
            if self._create(number, slot, run_dir):
                return slot
        raise RunError(
            f"All {self.plan.runs:,} runs that the plan in {self.path} certifies have begun; one more would spend "
            "beyond the budgets. An interrupted run can be resumed in its own folder. For more runs on the same "
            "records, the budgets must be divided: make a plan for all of them before the first."
        )

    def _claim_selected(self, run_dir: str | Path | None) -> Slot:
        """Of a selection, `tune` decides which runs are made; each of them begins once."""
        if self._selected is None:
            raise RunError(
                "The runs of a selection are made by epsilons.tune: it keeps their number secret, and destroys all but "
                "the best."
            )
        number, claim = self._selected
        slot = Slot(0, 0, claim)
        if self.unused(run_dir) != slot and not self._create(number, slot, run_dir):
            raise RunError(
                "This run of the selection has begun elsewhere. Each call of train(…) makes one run, in the folder "
                "that it gets."
            )
        return slot

    def unused(self, run_dir: str | Path | None) -> Slot | None:
        """The slot of a run in this folder that was cut off before it had a ledger; None without one, and in a copy."""
        run = None if run_dir is None else RunFolder(Path(run_dir))
        if run is None or run.has_ledger or not run.claim.is_file():
            return None
        noted = Slot(**run.read_json(run.claim))
        values = self._read(noted.number if self._selected is None else self._selected[0])
        if values is None or (values.get("claim"), values.get("run_dir")) != (noted.claim, str(run.path.absolute())):
            return None  # of a copy: the slot belongs to the folder that claimed it
        return noted

    def check(self, slot: Slot, run_dir: str | Path) -> None:
        """Raise RunError if this slot, of the run in `run_dir`, was not claimed in this folder."""
        values = self._read(slot.number if self._selected is None else self._selected[0])
        if values is None or values.get("claim") != slot.claim:
            raise RunError(
                f"The run in {run_dir} is {slot} of a plan, and its slot was not claimed in {self.path}. Resume it "
                "with the plan's folder in which it began."
            )

    # -- files ---------------------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        try:
            return [int(file.name) for file in (self.path / "slots").iterdir() if file.name.isdecimal()]
        except OSError as error:
            raise RunError(
                f"The slots in {self.path} cannot be read: {error.strerror or error}. Without them, the number of runs "
                "that have begun is unknown. Restore the folder."
            ) from None

    def _create(self, number: int, slot: Slot, run_dir: str | Path | None) -> bool:
        """Note a slot in the run's folder, and create its file, durably. False if another process was first."""
        file, where = self.path / "slots" / str(number), None if run_dir is None else str(Path(run_dir).absolute())
        values = {"schema": SCHEMA, **slot.to_dict(), "plan": self.plan.digest, "run_dir": where}
        text = json.dumps(values, indent=1) + "\n"
        if run_dir is not None and Path(run_dir).is_dir():
            files.write_json(RunFolder(Path(run_dir)).claim, slot.to_dict())
        try:
            files.create(file, text.replace("\n", os.linesep).encode())
            sync_folder(file.parent)
        except FileExistsError:
            return False
        except OSError as error:
            raise RunError(
                f"A slot in {self.path} cannot be claimed: {error.strerror or error}. No step was made."
            ) from None
        return True

    def _read(self, number: int) -> dict[str, Any] | None:
        """What a slot holds; None if it is missing or was not written completely."""
        try:
            values = parsed_json((self.path / "slots" / str(number)).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return values if isinstance(values, dict) else None

    def _check_slots(self) -> None:
        for number in self._numbers():
            values = self._read(number)
            if values is not None and values.get("plan") != self.plan.digest:
                raise RunError(
                    f"{self.path} holds slots of another plan than its plan.json: one of them was exchanged. Restore "
                    "the folder."
                )

    def __repr__(self) -> str:
        return f"PlanFolder({self._state})"

    def __str__(self) -> str:
        return f"{printable(self.path)}: {self._state}\n{self.plan}"

    @property
    def _state(self) -> str:
        if self.plan.select is not None:
            return "a selection"
        return f"{self.begun:,} of {self.plan.runs:,} runs have begun"


def opened(plan: Plan | PlanFolder) -> tuple[Plan, PlanFolder | None]:
    """The plan, and the folder that counts its runs if it was given."""
    return (plan.plan, plan) if isinstance(plan, PlanFolder) else (plan, None)


# -- How many runs of this machine and user began with the same budgets, or on the same data. Internal reports say
# it
#
# Each new run in a folder adds one line to runs.jsonl in the user's state folder: $XDG_STATE_HOME/epsilons, by default
# ~/.local/state/epsilons (XDG Base Directory Specification 0.8). A line holds HMACs (RFC 2104, with SHA-256) under a
# random secret of the same folder. Without the secret, nobody can check a guessed list of budgets against a line; equal
# lists have equal HMACs. Both files have mode 0600, and no report for release depends on them.
#
# Counting never stops a run: what fails is stated, and the run is not counted. EPSILONS_COUNT_RUNS=0 turns counting
# off.
# Runs that overlap in some people are not found, and neither are runs of other users, machines or libraries.

#: Set to 0, this turns counting off.
VARIABLE = "EPSILONS_COUNT_RUNS"

#: What kept a run from being counted.
OFF = f"counting was turned off by {VARIABLE}=0"
UNUSABLE = "the state folder could not be used"
SELECTED = "the number of runs of a selection is secret"
DAMAGED = "the secret in the state folder is damaged; remove it to begin again"
EXPOSED = "others may read the secret in the state folder; remove it to begin again"

_SECRET_BYTES = 32
#: Where the files are opened, a link or a pipe in their place is refused and never waited for.
_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class _NotCountedError(Exception):
    """Why a run is not counted, in words."""


@dataclass(frozen=True)
class Count:
    """Runs of this machine and user, this one included.

    same_roster   begun with exactly this list of budgets, in this order
    same_data     of these, on exactly these data
    other_roster  with another list, on exactly these data
    unreadable    lines that are damaged, or were written under another secret: any of them may be one of these runs
    """

    same_roster: int
    same_data: int
    other_roster: int
    unreadable: int


def begin(roster: Iterable[bytes], contents: str) -> dict[str, str]:
    """Count a new run, and return its entry for run.json: its tags, or {"reason": why it was not counted}.

    roster    the budgets of all records, in their order, as bytes
    contents  a fingerprint of the data
    """
    try:
        if os.environ.get(VARIABLE) == "0":
            raise _NotCountedError(OFF)
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        secret = _secret(folder / "secret")
        tags = {
            "run": secrets.token_hex(16),
            "key": _tag(secret, "key", []),
            "roster": _tag(secret, "roster", roster),
            "data": _tag(secret, "data", [contents.encode()]),
        }
        _append(folder / "runs.jsonl", tags)
    except _NotCountedError as error:
        return {"reason": str(error)}
    except (OSError, RuntimeError, ValueError):  # RuntimeError: no home folder; ValueError: a path with a null byte
        return {"reason": UNUSABLE}
    return tags


def count(tags: Mapping[str, Any]) -> Count | None:
    """The runs with the tags that `begin` returned; None if this run was not counted here."""
    try:
        lines = [_parsed(line) for line in _read(_folder() / "runs.jsonl").split(b"\n") if line.strip()]
    except (OSError, RuntimeError, ValueError):
        return None
    known: dict[str, Mapping[str, Any]] = {line["run"]: line for line in lines if line is not None}
    if "run" not in tags or tags["run"] not in known:
        return None
    same = [line for line in known.values() if line["roster"] == tags["roster"]]
    same_data = sum(line["data"] == tags["data"] for line in same)
    return Count(
        same_roster=len(same),
        same_data=same_data,
        other_roster=sum(line["data"] == tags["data"] for line in known.values()) - same_data,
        unreadable=lines.count(None) + sum(line["key"] != tags["key"] for line in known.values()),
    )


def _folder() -> Path:
    """The state folder; a relative XDG_STATE_HOME is ignored, as its specification demands."""
    stated = os.environ.get("XDG_STATE_HOME", "")
    parent = Path(stated) if os.path.isabs(stated) else Path.home() / ".local" / "state"
    return parent / "epsilons"


def _secret(path: Path) -> bytes:
    """The secret, made on first use. Of several processes that make it at once, all get the same one."""
    if not path.exists():
        unique = path.with_name(f".secret.{secrets.token_hex(8)}")
        try:
            files.create(unique, secrets.token_bytes(_SECRET_BYTES))
            with suppress(FileExistsError):  # another process was first
                os.link(unique, path)
        finally:
            unique.unlink(missing_ok=True)
    secret = _read(path)
    if len(secret) != _SECRET_BYTES:
        raise _NotCountedError(DAMAGED)
    if os.name != "nt" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise _NotCountedError(EXPOSED)
    return secret


def _tag(secret: bytes, kind: str, parts: Iterable[bytes]) -> str:
    """An HMAC of these parts; the kind and the length of each part keep different inputs apart."""
    made = hmac.new(secret, f"epsilons {kind}\0".encode(), hashlib.sha256)
    for part in parts:
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.hexdigest()


def _append(path: Path, line: Mapping[str, str]) -> None:
    """Add a line in one write, so that processes do not mix theirs. The first break ends a line that was cut off."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _CAREFUL, 0o600)
    try:
        text = f"\n{json.dumps(line)}\n".encode()
        if not stat.S_ISREG(os.fstat(handle).st_mode) or os.write(handle, text) != len(text):
            raise _NotCountedError(UNUSABLE)
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | _CAREFUL)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("not a plain file")
        return file.read()


def _parsed(line: bytes) -> Mapping[str, str] | None:
    """A line of the file; None if it is damaged."""
    try:
        values = parsed_json(line)
    except ValueError:
        return None
    names = ("run", "key", "roster", "data")
    return values if isinstance(values, dict) and all(isinstance(values.get(name), str) for name in names) else None
