"""Load a run's folder and check it. A report contains nothing that was not checked here.

The plan is verified again, the ledger's chain of hashes is followed from its first line, and settings and metrics must
have the shape that a run writes. The facts that the guarantee depends on must be those of the ledger's first line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .._version import __version__
from ..accounting import Accountant
from ..core.files import sha256_of
from ..errors import RunError
from ..ledger import signatures
from ..ledger.account import read
from ..ledger.model_file import is_release
from ..ledger.run_folder import SCHEMA, RunFolder, read_metrics
from ..ledger.run_json import MetricsRow, PlanSlot, RunSettings
from ..planning import Plan
from .membership import MembershipResult, load

#: The hashed files of a run, in the order shown.
HASHED = ("plan.json", "ledger.jsonl", "model.safetensors", "features.safetensors")


@dataclass(frozen=True)
class RunRecord:
    """The checked content of a run's folder.

    charged     (phases,) steps that the ledger shows as charged
    made        (phases,) steps made, at most; None if the ledger was never closed
    key_epochs  number of keys that the run had; with each but the first, steps were charged again
    metrics     one row per evaluation, in order
    membership  the latest attack on membership, if its file is as it was written
    hashes      file name -> SHA-256, of the files that exist
    last_hash   of the ledger's chain
    key_left    True if the run's secret key still exists
    is_bound    True if the ledger repeats what the guarantee depends on; ledgers of earlier versions do not
    signed      signatures of the run and of its plan, which fit
    released    signatures of the release in the folder, whether they fit or not
    """

    path: Path
    plan: Plan
    settings: RunSettings
    charged: tuple[int, ...]
    made: tuple[int, ...] | None
    key_epochs: int
    metrics: tuple[MetricsRow, ...]
    membership: MembershipResult | None
    hashes: Mapping[str, str]
    last_hash: str
    key_left: bool
    is_bound: bool
    signed: tuple[signatures.Signature, ...] = ()
    released: tuple[signatures.Signature, ...] = ()

    @property
    def signers(self) -> dict[str, str]:
        """Each "NAME" and "NAME, ROLE" in the signatures, by the holder of the key -> "plan", "run" or both."""
        found: dict[str, set[str]] = {}
        for one in self.signed:
            for name in (one.values["name"], f"{one.values['name']}, {one.values['role']}"):
                found.setdefault(name, set()).add(one.values["of"])
        return {name: " and the ".join(sorted(of)) for name, of in found.items()}


def load_run(path: str | Path, accountant: Accountant | None = None) -> RunRecord:
    """Load and check a run's folder. accountant: the function that certified the plan, if not one of the library's.

    Raises RunError if the folder holds no run or its files are damaged or contradict one another, BudgetExceededError
    if its plan exceeds the budgets, LedgerError if its ledger was altered or belongs to another plan, PromiseError if
    it was changed after it, or its plan, was signed.
    """
    folder = RunFolder(Path(path))
    _check_folder(folder)
    plan = Plan.load(folder.plan, accountant)
    account, chain, _ = read(folder.ledger, plan)
    settings = settings_of(folder)
    _check_guarantee(settings, plan, folder.settings)
    account.check(settings.model_dump(), folder.settings)
    _check_slot(settings.plan_slot, plan, folder)
    signed = (*signatures.signatures(folder.path), *signatures.of_run(folder, plan))
    signatures.check_signed(signed, [], folder.path)
    return RunRecord(
        path=folder.path,
        plan=plan,
        settings=settings,
        charged=account.charged,
        key_epochs=account.epoch + 1,
        made=account.closed,
        metrics=_metrics(folder, plan, settings),
        membership=_membership(folder, settings),
        hashes={name: sha256_of(folder.path / name) for name in HASHED if (folder.path / name).is_file()},
        last_hash=chain.hash,
        key_left=folder.key.exists(),
        is_bound=account.rests_on is not None,
        signed=signed,
        released=_of_release(folder.path / "release"),
    )


def _of_release(path: Path) -> tuple[signatures.Signature, ...]:
    """The signatures of a release; its files are read only if there are any."""
    return signatures.signatures(path) if any(path.glob(f"*{signatures.SUFFIX}")) and is_release(path) else ()


def _check_folder(folder: RunFolder) -> None:
    path = folder.path
    if not path.is_dir():
        what = "is a file, not a run's folder" if path.exists() else "does not exist"
        raise RunError(f"{path} {what}. Give the folder of one run, e.g. runs/first.")
    needed = (folder.plan, folder.settings, folder.ledger)
    missing = [file.name for file in needed if not file.is_file()]
    if len(missing) == len(needed):
        inside = sorted(ledger.parent.name for ledger in path.glob(f"*/{folder.ledger.name}"))
        if inside:
            raise RunError(
                f"{path} is not a run's folder, but holds {len(inside)}: {', '.join(inside)}. A report is about one "
                f"run: give one of them, e.g. {path / inside[0]}."
            )
        raise RunError(
            f"{path} holds no run: {', '.join(missing)} are missing. Give the folder that epsilons train or fit wrote."
        )
    if missing:
        raise RunError(
            f"{path} is not a complete run: {' and '.join(missing)} missing. Restore the folder: without this file "
            "promise and spend are unknown."
        )


def settings_of(folder: RunFolder) -> RunSettings:
    """run.json, checked. Raises RunError."""
    path, values = folder.settings, folder.read_settings()
    schema = values.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise RunError(
            f"{path} was written by a newer epsilons (schema {schema}; this one reads up to {SCHEMA}). Upgrade it."
        )
    return _validated(RunSettings, values, str(path))


def _check_guarantee(settings: RunSettings, plan: Plan, path: Path) -> None:
    """The guarantee in run.json must be that of this plan and randomness, unless another version worded it."""
    is_comparable = settings.schema_ == SCHEMA and settings.versions.get("epsilons") == __version__
    promised = plan.guarantee_of_run(settings.randomness, settings.features, settings.person, settings.registry_id)
    if settings.guarantee and is_comparable and settings.guarantee != promised:
        raise RunError(
            f"{path} contradicts itself: its guarantee is not that of this plan and this source of randomness. It was "
            "edited, or belongs to another run. Restore the file."
        )


def _check_slot(slot: PlanSlot | None, plan: Plan, folder: RunFolder) -> None:
    """A run of a plan for several must be one of them."""
    of = plan.runs if plan.select is None else 0
    if (of != 1 and slot is None) or (slot is not None and not slot.number <= slot.of == of):
        raise RunError(
            f"{folder.settings} contradicts {folder.plan.name}: it does not say which of the plan's {plan.runs:,} runs "
            "this is. The file was edited, or belongs to another run. Restore it."
        )


def _metrics(folder: RunFolder, plan: Plan, settings: RunSettings) -> tuple[MetricsRow, ...]:
    rows = []
    for number, values in enumerate(read_metrics(folder), start=1):
        where = f"Line {number} of {folder.metrics}"
        row = _validated(MetricsRow, values, where)
        classes = settings.eval_data.classes
        for what, cells, expected in (
            ("per_group", row.per_group, len(plan.epsilons)),
            ("per_class", row.per_class, len(classes) if classes is not None else None),
            ("per_class_group", row.per_class_group, len(row.per_class or ())),
            *(("each class of per_class_group", one, len(plan.epsilons)) for one in row.per_class_group or ()),
        ):
            if cells is not None and expected is not None and len(cells) != expected:
                raise RunError(f"{where} must have {expected:,} cells in {what}, got {len(cells):,}.")
        rows.append(row)
    return tuple(rows)


def _membership(folder: RunFolder, settings: RunSettings) -> MembershipResult | None:
    """The result of the latest attack; None if there was none. Raises RunError if its file was changed since."""
    digest, path = settings.attacked.digest, folder.membership
    if digest is None or not path.is_file():
        return None
    if sha256_of(path) != digest:
        raise RunError(f"{path} was changed since the attack that wrote it. Restore it, attack again, or remove it.")
    return load(path)


_Shape = TypeVar("_Shape", bound=BaseModel)


def _validated(shape: type[_Shape], values: Mapping[str, Any], where: str) -> _Shape:
    try:
        return shape.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise RunError(f"{where} does not have the shape that a run writes: {key}: {first['msg'].lower()}.") from None
