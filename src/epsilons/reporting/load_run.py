"""Evidence: what a run's folder holds, read with suspicion. Nothing is reported that was not checked here.

The plan is verified again, the ledger's chain of hashes is followed from its first line, and the settings and
metrics must have the shape that a run writes. What the guarantee rests on must be what the ledger's first line says.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..accounting import Accountant
from ..errors import RunError
from ..ledger import read_account, read_last
from ..planning import Plan
from ..run_folder import SCHEMA, RunFolder

#: The hashed files of a run, in the order shown.
HASHED = ("plan.json", "ledger.jsonl", "model.safetensors")

Finite = Annotated[float, Field(allow_inf_nan=False)]


def _possible(cell: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= cell[0] <= cell[1]:
        raise ValueError("more right than records")
    return cell


Cell = Annotated[tuple[int, int], Field(strict=False), AfterValidator(_possible)]  # right, records


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Training(_Strict):
    """What was trained, and how."""

    model: str | None = None
    parameters: int | None = None
    loss: str | None = None
    optimizer: str | None = None
    lr: Finite | None = None
    momentum: Finite | None = None
    device: str | None = None


class EvalData(_Strict):
    """What the model was evaluated on; whose data those are is what the caller declared."""

    data: Literal["private", "public"] | None = None
    records: Annotated[int, Field(ge=1)] | None = None
    classes: list[str] | None = None


class Metadata(_Strict):
    """Free notes of who started the run."""

    config: dict[str, Any] | None = None
    tiers: dict[str, Finite] | None = None
    simulated: bool = False


class Performance(_Strict):
    """The performance settings that matter to a reader."""

    engine: str | None = None
    max_physical_batch: int | None = None


class Settings(_Strict):
    """run.json; every key but the schema may be absent in runs of other versions."""

    schema_: Annotated[int, Field(alias="schema")]
    performance: Performance = Performance()
    randomness: str | None = None
    roster: str | None = None
    guarantee: str | None = None
    versions: dict[str, str] = {}
    training: Training = Training()
    eval_data: EvalData = EvalData()
    metadata: Metadata = Metadata()


class Row(_Strict):
    """One line of metrics.jsonl."""

    step: Annotated[int, Field(ge=0)]
    loss: Finite | None = None
    accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
    per_class: list[Cell] | None = None
    per_group: list[Cell] | None = None


@dataclass(frozen=True)
class Evidence:
    """What a run has to show, checked.

    charged    (phases,) steps that the ledger shows as charged
    made       (phases,) steps really made, at most; None where the ledger was never closed
    epochs     keys that the run had; after the first, steps were charged again
    metrics    one row per evaluation, in order
    hashes     file name -> SHA-256, of the files that are there
    last_hash  of the ledger's chain
    key_left   True if the run's secret key still lies in the folder
    bound      True if the ledger says itself what the guarantee rests on; earlier versions left that to run.json
    """

    path: Path
    plan: Plan
    settings: Settings
    charged: tuple[int, ...]
    made: tuple[int, ...] | None
    epochs: int
    metrics: tuple[Row, ...]
    hashes: Mapping[str, str]
    last_hash: str
    key_left: bool
    bound: bool


def load_run(path: str | Path, accountant: Accountant | None = None) -> Evidence:
    """Read and check a run's folder. accountant: the caller's own, if one certified the plan.

    Raises RunError if it is none or its files are damaged or contradict one another, BudgetExceededError if its plan
    does not keep the budgets, LedgerError if its ledger was altered or belongs to another plan.
    """
    folder = RunFolder(Path(path))
    _check_folder(folder)
    plan = Plan.load(folder.plan, accountant)
    account = read_account(folder.ledger, plan)
    last = read_last(folder.ledger)
    settings = _settings(folder.settings)
    _check_words(settings, plan, folder.settings)
    account.check(settings.model_dump(), folder.settings)
    metrics = _metrics(folder.metrics, plan, settings)
    return Evidence(
        path=folder.path,
        plan=plan,
        settings=settings,
        charged=account.charged,
        epochs=account.epoch + 1,
        made=tuple(last["charged"]) if last["kind"] == "close" else None,
        metrics=metrics,
        hashes={name: _sha256(folder.path / name) for name in HASHED if (folder.path / name).is_file()},
        last_hash=last["hash"],
        key_left=folder.key.exists(),
        bound=account.rests_on is not None,
    )


def _check_folder(folder: RunFolder) -> None:
    path = folder.path
    if not path.is_dir():
        what = "is a file, not a run's folder" if path.exists() else "does not exist"
        raise RunError(f"{path} {what}. Give the folder of one run, e.g. runs/first.")
    needed = (folder.plan, folder.settings, folder.ledger)
    missing = [file.name for file in needed if not file.is_file()]
    if len(missing) == len(needed):
        inside = sorted(found.parent.name for found in path.glob(f"*/{folder.ledger.name}"))
        if inside:
            raise RunError(
                f"{path} is not a run's folder, but holds {len(inside)}: {', '.join(inside)}. A report is about one "
                f"run: give one of them, e.g. {path / inside[0]}."
            )
        raise RunError(
            f"{path} holds no run: {', '.join(missing)} are not there. Give the folder that epsilons train or "
            "fit wrote."
        )
    if missing:
        raise RunError(
            f"{path} is not a whole run: {' and '.join(missing)} missing. Without it nothing can be said about what "
            "was promised and spent; bring the folder back from where it was written."
        )


def _settings(path: Path) -> Settings:
    values = _object(_text(path), path.name)
    schema = values.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise RunError(
            f"{path} was written by a newer epsilons (schema {schema}; this one reads up to {SCHEMA}): upgrade "
            "epsilons."
        )
    return _validated(Settings, values, str(path))


def _check_words(settings: Settings, plan: Plan, path: Path) -> None:
    """A run's guarantee names its steps, accountant and randomness: it must be about this plan and this randomness."""
    from .._version import __version__

    same_words = settings.versions.get("epsilons") == __version__
    if settings.guarantee and same_words and settings.guarantee != plan.guarantee_of_run(settings.randomness):
        raise RunError(
            f"{path} contradicts itself: its guarantee is not the one that this plan and this source of randomness "
            "have. It was edited, or belongs to another run; bring the file back from where it was written."
        )


def _metrics(path: Path, plan: Plan, settings: Settings) -> tuple[Row, ...]:
    if not path.exists():
        return ()
    rows = []
    for place, line in enumerate(_text(path).split("\n")[:-1], start=1):  # a last line without its end was cut off
        where = f"line {place} of {path}"
        row = _validated(Row, _object(line, where), where)
        classes = settings.eval_data.classes
        for what, cells, expected in (
            ("per_group", row.per_group, len(plan.epsilons)),
            ("per_class", row.per_class, len(classes) if classes is not None else None),
        ):
            if cells is not None and expected is not None and len(cells) != expected:
                raise RunError(f"{where} has {len(cells):,} cells in {what}; the run has {expected:,}.")
        rows.append(row)
    return tuple(rows)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise RunError(f"{path} is not text; it is damaged. Bring it back from where it was written.") from None


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text, parse_constant=lambda _: math.nan)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise RunError(f"{where} is not a whole JSON object; it is damaged. Bring it back from where it was written.")
    return values


_Shape = TypeVar("_Shape", bound=BaseModel)


def _validated(shape: type[_Shape], values: Mapping[str, Any], where: str) -> _Shape:
    try:
        return shape.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise RunError(f"{where} is not what a run writes: {key}: {first['msg'].lower()}.") from None


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from None
