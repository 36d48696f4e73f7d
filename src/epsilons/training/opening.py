"""Open the folder and the ledger of a run: of a new one, which claims its slot in the plan's folder, or a resumed one.

Nothing is charged here. A claim is durable before the ledger exists, and so before the first charge.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..budgets.budgets import Budgets
from ..clipping import Engine
from ..core.columns import Codes, hashed, taken
from ..core.files import FolderLock
from ..draws.persons_rows import Persons
from ..draws.randomness import Randomness
from ..errors import DataError, LedgerError, RegistryError, RunError
from ..ledger import plan_folder, run_folder
from ..ledger.ledger import Ledger
from ..ledger.plan_folder import PlanFolder, Slot
from ..ledger.run_folder import RunFolder
from ..planning import Plan
from ..registry.registry import roster_digest
from . import checkpoints, validation, values
from .datasets import Source
from .distributed import Ranks
from .performance import Decided, Performance
from .values import Records

#: Settings that a run may have, and no entry of the metadata may be called.
_OF_RUN = ("plan_slot", "registry", "lifetimes", "limits", "subset_records", "counted", "rows_per_person", "views")
OPTIONAL = (*_OF_RUN, *run_folder.TIMES)


@dataclass(frozen=True, repr=False)
class Request:
    """What make_private or fit was asked for; has_classes: None if unknown.

    is_whole_loop: True if the library runs the loop, and may set up the process.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    records: Records
    plan: Plan
    plan_folder: PlanFolder | None
    budgets: Budgets
    folder: values.RunFolder
    randomness: values.Randomness
    performance: Performance
    has_classes: bool | None = None
    is_whole_loop: bool = False

    @property
    def is_subset(self) -> bool:
        """True if these are some of the plan's records."""
        return self.plan_folder is not None and self.plan_folder.is_subset


@dataclass(frozen=True, repr=False)
class Inputs:
    """What is known once a request was checked.

    performance   what was chosen
    group         (persons,) each person's group in the plan; without persons, each record's. Of any type of integers
    persons       whose rows are whose
    largest       number of rows in a physical batch, at most
    contents      fingerprint of the data; "" if nothing is compared with it
    fingerprint   everything that may change a sum though key and state are the same
    is_divided    True if `fully_shard` has divided the model among the ranks
    """

    source: Source
    performance: Decided
    group: Codes
    persons: Persons
    randomness: Randomness
    parameters: list[nn.Parameter]
    engine: Engine
    largest: int
    contents: str
    fingerprint: dict[str, Any]
    is_divided: bool = False

    def budgets_of(self, plan: Plan) -> Iterator[bytes]:
        """Epsilon and delta of every record, in order, as bytes."""
        return (taken(column, self.group).tobytes() for column in (plan.epsilons, plan.delta))

    @property
    def roster(self) -> str:
        """A hash of the groups of all persons; without persons, of all records. Whose rows are whose is no part of it.

        It is in files of the run, and the number of a person's rows is private.
        """
        return hash_of_groups(self.group)


def hash_of_groups(group: Codes) -> str:
    """What run.json has of the groups of all persons, or of all records."""
    return hashed(hashlib.blake2b(digest_size=16), group)


@dataclass
class OpenRun:
    """The folder and ledger of a run while it is set up.

    state   the checkpoint to resume from
    """

    randomness: Randomness
    is_resumed: bool = False
    state: dict[str, Any] | None = None
    ledger: Ledger | None = None
    folder: RunFolder | None = None
    lock: FolderLock | None = None

    def abandon(self, error: BaseException) -> None:
        """After an error before the first draw."""
        if self.folder and not self.is_resumed and isinstance(error, Exception):
            with suppress(RunError):  # the first error says why; nothing was released under the key
                self.folder.destroy_key()
        if self.ledger:  # the file is free again for this process, too
            self.ledger.suspend()
        if self.lock:
            self.lock.release()


def open_run(run: OpenRun, request: Request, inputs: Inputs, ranks: Ranks) -> None:
    """Rank 0 opens folder and ledger; the other ranks get a mirror of the ledger."""
    with ranks.collective("opening the run"):
        _check_reservation(request, inputs)
        if ranks.is_main and request.folder.path is not None:
            _open_folder(run, request.folder.path, request, inputs)
        elif ranks.is_main:
            slot = _claimed(request)
            run.randomness = _of_slot(run.randomness, slot)
            run.ledger = Ledger(request.plan, key=run.randomness.commitment, settings=_settings_of(slot))
    shared = run.randomness, run.is_resumed, run.state, run.ledger.mirror() if run.ledger else None
    run.randomness, run.is_resumed, run.state, mirror = ranks.broadcast(shared)
    run.ledger = run.ledger or mirror


def _check_reservation(request: Request, inputs: Inputs) -> None:
    """Raise RegistryError if a plan on accounts has no reservation, or one for another plan or other people."""
    reservation, plan = request.folder.reservation, request.plan
    if reservation is None and plan.groups.starts is not None:
        raise RegistryError(
            "This plan was made on accounts of a registry, and its run must be charged there first. Pass "
            "run_dir=RunFolder(path, reservation=registry.reserve(…))."
        )
    if reservation is not None and (reservation.plan, reservation.roster) != (plan.digest, roster_digest(inputs.group)):
        raise RegistryError(
            "The reservation is for another plan or other people. Reserve this run: registry.reserve(…)."
        )


def _open_folder(run: OpenRun, run_dir: str | Path, request: Request, inputs: Inputs) -> None:
    plan = request.plan
    settings: dict[str, Any] = {
        **_without(request.folder.metadata or {}, OPTIONAL),  # first, so that no entry replaces a setting of the run
        "performance": asdict(inputs.performance),
        "randomness": run.randomness.label,
        "roster": inputs.roster,
        "guarantee": plan.guarantee_of_run(
            run.randomness.label,
            validation.stated_text(request.folder.metadata, "features"),
            validation.stated_text(request.folder.metadata, "person"),
            _registry(request),
        ),
    }
    if request.budgets.unit == "person" or request.records.views > 1:  # public, whatever the rows are
        settings |= {"rows_per_person": int(request.records.rows_per_person), "views": int(request.records.views)}
    if request.folder.reservation is not None:
        settings["registry"] = request.folder.reservation.settings
        settings["lifetimes"] = request.folder.reservation.lifetimes
    settings |= _limits(request.budgets)
    if request.is_subset:
        settings["subset_records"] = len(inputs.group)
    run.lock = RunFolder(Path(run_dir)).lock()  # before anything in it is read
    run.is_resumed = request.folder.resume and RunFolder(Path(run_dir)).has_begun
    if run.is_resumed:
        folder = run.folder = _reopened(run_dir, plan, settings)
        ledger = run.ledger = Ledger.resume(plan, folder.ledger)
        _check_claim(request, ledger, folder)
        run.randomness = _of_slot(run.randomness, ledger.slot)
        run.state = checkpoints.latest(
            folder.checkpoints, lambda: checkpoints.frozen_of(request.model, inputs.parameters)
        )
        _check_left(ledger, run.state, folder.checkpoints)
        _check_lines(ledger, run.state)
        _check_persons(run_dir, run.state, inputs)
        ledger.check(folder.read_settings(), folder.settings)
        if folder.key_file() not in ("", ledger.key_file):
            _counted(plan, inputs)  # what a copy goes on with is another run
        # No key if it was lost, or if this folder is a copy.
        key = folder.read_key() if folder.key_file() == ledger.key_file else None
        run.randomness = run.randomness.renewed(ledger.epoch) if key is None else replace(run.randomness, key=key)
    else:
        RunFolder.prepare(run_dir, settings)  # a claim stays, so the folder is checked first
        slot = _claimed(request)
        run.randomness = _of_slot(run.randomness, slot)
        settings |= _settings_of(slot) | {"counted": _counted(plan, inputs)}
        folder = run.folder = RunFolder.create(run_dir, plan, settings)
        folder.write_key(run.randomness.key)  # before the ledger, which records the key's file
        key_file = folder.key_file()
        run.ledger = Ledger(plan, folder.ledger, run.randomness.commitment, settings=settings, key_file=key_file)
    folder.claim.unlink(missing_ok=True)  # the ledger has it from now on
    if request.folder.reservation is not None:
        run.ledger.tie(request.folder.reservation)  # after the key is on disk, and before the first charge
    if run.ledger.is_closed and folder.key.exists():
        folder.end()  # of a run that was killed after its ledger's last line


def _limits(budgets: Budgets) -> dict[str, Any]:
    """What tiers by risk declare, held or not; None for infinity."""
    if budgets.contract is None:
        return {}
    rows = ((epsilon, *one) for epsilon, one in budgets.contract.limits.items())
    return {"limits": [[value if math.isfinite(value) else None for value in row] for row in rows]}


def _counted(plan: Plan, inputs: Inputs) -> dict[str, str]:
    if plan.select is not None:
        return {"reason": plan_folder.SELECTED}
    return plan_folder.begin(inputs.budgets_of(plan), inputs.contents)


def _registry(request: Request) -> str | None:
    return None if request.folder.reservation is None else request.folder.reservation.registry.id


def _check_left(ledger: Ledger, state: Mapping[str, Any] | None, checkpoints: Path) -> None:
    """Raise RunError if no checkpoint is left, and no step either: the model would stay as it was given."""
    steps = [phase.steps for phase in ledger.plan.phases]
    if state is None and not ledger.is_closed and list(ledger.charged) == steps:
        raise RunError(
            f"{checkpoints} holds no checkpoint, and all steps of the plan are charged, so no training is left. "
            "Restore the checkpoints from a backup, or begin a new run in another folder; what was charged stays "
            "charged."
        )


def _check_lines(ledger: Ledger, state: Mapping[str, Any] | None) -> None:
    """Raise LedgerError if the ledger lacks the line that was its last one when the checkpoint was saved.

    Earlier versions named no line in a checkpoint, and no file of the key in a ledger, which gets another key anyway.
    """
    last = None if state is None else state.get("ledger")
    if last is not None and ledger.key_file and not ledger.has_line(last):
        raise LedgerError(
            f"{ledger.path} lacks lines that it had when the last checkpoint was saved: it was cut, replaced, or set "
            "back to an older copy. Then charges are missing, and it cannot be known which updates were released. "
            "Restore the ledger. If it is lost, count all steps of the plan as charged, and start a new run."
        )


def _check_persons(run_dir: str | Path, state: Mapping[str, Any] | None, inputs: Inputs) -> None:
    """Raise DataError if rows belong to other persons than in the checkpoint."""
    if state is not None and state.get("fingerprint", {}).get("persons") != inputs.fingerprint.get("persons"):
        raise DataError(
            f"The rows belong to other persons than when the run in {run_dir} began: rows that were trained on at one "
            "person's budget would be charged to another. Resume with the same data set and the same persons=, or "
            "begin a run in a new folder."
        )


def _claimed(request: Request) -> Slot | None:
    """The slot of a new run, claimed durably; None for a plan for one run without a folder. Raises RunError."""
    if request.plan_folder is not None:
        return request.plan_folder.claim(request.folder.path)
    if request.plan.select is not None:
        raise RunError("This plan selects among a secret number of runs: pass its PlanFolder to epsilons.tune.")
    if request.plan.runs > 1:
        raise RunError(
            f"This plan is for {request.plan.runs:,} runs together, and they must be counted. Keep it in a folder: "
            "folder = epsilons.PlanFolder.create(path, plan). Then pass the folder in place of the plan."
        )
    return None


def _check_claim(request: Request, ledger: Ledger, folder: RunFolder) -> None:
    """Raise RunError if a run to be resumed has no slot, or one of another folder than the one given."""
    if ledger.slot is not None and request.plan_folder is not None:
        request.plan_folder.check(ledger.slot, folder.path)
    if request.plan.select is not None and request.plan_folder is None:
        raise RunError("A run of a selection goes on in epsilons.tune alone.")
    if ledger.slot is None and (request.plan.runs > 1 or request.plan_folder is not None):
        raise RunError(
            f"The run in {folder.path} has claimed no slot among its plan's runs, so it is not one of them. Begin a "
            "run in a new folder."
        )


def _without(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _of_slot(randomness: Randomness, slot: Slot | None) -> Randomness:
    """Randomness of this run alone: two runs of a plan never share a key, whatever seed or key they were given."""
    name = "" if slot is None else f"slot {slot.number}" if slot.of else f"selection {slot.claim}"
    return randomness if slot is None or slot.of == 1 else randomness.bound_to(name)


def _settings_of(slot: Slot | None) -> dict[str, Any]:
    return {} if slot is None else {"plan_slot": slot.to_dict()}


def _reopened(run_dir: str | Path, plan: Plan, settings: Mapping[str, Any]) -> RunFolder:
    """The folder of a resumed run. Raises DataError if the budgets, RunError if the randomness is another one."""
    folder = RunFolder.reopen(run_dir, plan)
    before = folder.read_settings()
    if before.get("roster") != settings["roster"]:
        raise DataError(
            f"The budgets belong to other records than when the run in {run_dir} began: a record would be charged at "
            "one budget and trained at another. Use the same budgets, in the same order."
        )
    if before.get("randomness") != settings["randomness"]:
        raise RunError(
            f"The run in {run_dir} began with randomness {before.get('randomness')!r}, which its guarantee states, got "
            f"{settings['randomness']!r}. Use the same, with the same seed if there was one."
        )
    return folder
