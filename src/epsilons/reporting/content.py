"""The content of a report, as values. The HTML page and the JSON show the same content.

The version for release is made from fewer inputs; it is not censored afterwards. If a budget is shared by fewer than 20
records, nothing is included that was computed from all budgets together: rates and clip norms average to the recipe's,
so missing ones could be computed from the others. What remains depends on the suppressed budgets only through the
rows (`disclosure`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import numpy as np

from .._version import __version__
from ..accounting import DESCRIPTIONS
from ..disclosure import HASHES_SUPPRESSED, MOST_ROWS, SOLVED_SUPPRESSED, DisplayRow, display_rows, has_small_cells
from ..planning import Plan, display
from ..planning.guarantee import RANDOMNESS
from ..planning.plan_numbers import CURVE_POINTS
from . import sentences
from .accuracy import Evaluation, last_evaluation
from .load_run import RunRecord, RunSettings
from .membership import Result

SCHEMA = 2

#: Number of lines in the picture, and of groups in the plan's table if there are very many.
MOST_LINES = 6

#: Names of models, losses, optimizers and versions that may be released; anything else might be a path or a note.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,39}")
_VERSIONED = ("epsilons", "python", "torch", "numpy", "scipy", "dp-accounting")  # the last in older runs only


@dataclass(frozen=True)
class Status:
    """Steps of the run.

    state             "finished"; "stopped" before its end; "open" if the ledger was never closed
    charged, allowed  steps charged, and steps of the plan
    made              steps made, at most; None while open
    key_epochs        number of keys that the run had
    """

    state: Literal["finished", "stopped", "open"]
    charged: int
    allowed: int
    made: int | None
    key_epochs: int


@dataclass(frozen=True)
class Runs:
    """The run among those of its plan.

    number, of  this is run `number` of `of`
    records     how many of the plan's records it trained on; None if all
    """

    number: int
    of: int
    records: int | None


@dataclass(frozen=True)
class Group:
    """A row of promises and spends, as in `disclosure.DisplayRow`; epsilon_spent and charged are None if suppressed."""

    label: str
    tier: str | None
    epsilon: float | None
    at_least: float | None
    at_most: float | None
    delta: float | None
    records: int | None
    merged: bool
    epsilon_spent: float | None
    charged: float | None


@dataclass(frozen=True)
class Line:
    """One group's upper bound on its spend at each of the curve's steps."""

    label: str
    epsilon_spent: tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """steps (points,) counted over all phases; one line per group shown; the last step of each phase."""

    steps: tuple[int, ...]
    lines: tuple[Line, ...]
    phase_ends: tuple[int, ...]


@dataclass(frozen=True)
class PhaseRow:
    """One group in one phase; noise_multiplier is None if the group is never drawn."""

    label: str
    sample_rate: float
    clip_norm: float
    weight: float
    noise_multiplier: float | None
    influence: float


@dataclass(frozen=True)
class PhaseTable:
    """One phase of the plan."""

    steps: int
    expected_batch: float
    noise_std: float
    rows: tuple[PhaseRow, ...]

    @property
    def is_weighted(self) -> bool:
        """True if a weight has an effect."""
        return any(row.weight != 1 for row in self.rows)


@dataclass(frozen=True)
class Content:
    """All that a report says; the fields are the keys of the JSON, and `note` is on the page only.

    summary     the first paragraphs
    runs        None for the only run of a plan, on all of its records
    membership  the latest attack on membership; internal only
    suppressed  section -> why it, or a part of it, is not in this version
    made_with   name -> value, in the order shown
    """

    version: Literal["internal", "release"]
    run: str | None
    summary: tuple[str, ...]
    status: Status
    runs: Runs | None
    randomness: str | None
    simulated: bool
    key_left: bool
    groups: tuple[Group, ...]
    note: str | None
    curve: Curve | None
    phases: tuple[PhaseTable, ...] | None
    accuracy: Evaluation | None
    membership: Result | None
    guarantee: str
    not_covered: tuple[str, ...]
    made_with: Mapping[str, str | int | float]
    versions: Mapping[str, str]
    hashes: Mapping[str, str]
    suppressed: Mapping[str, str]
    config: Mapping[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """The content as JSON values; docs/report.md describes every key."""
        values: dict[str, Any] = _json_value(self)
        del values["note"]
        about = {"schema": SCHEMA, "document": "epsilons report", "version": values.pop("version")}
        return about | {"epsilons_version": __version__} | values


def _json_value(value: Any) -> Any:
    """Dataclasses and mappings as dicts, sequences as lists."""
    if isinstance(value, Result):
        return value.model_dump()
    if is_dataclass(value):
        return {field.name: _json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _json_value(item) for key, item in value.items()}
    return [_json_value(item) for item in value] if isinstance(value, list | tuple) else value


def make_content(record: RunRecord, release: bool) -> Content:
    """The content of the report of a run, internal or for release."""
    plan, settings = record.plan, record.settings
    shown = display_rows(plan.groups, settings.metadata.tiers, release)
    is_suppressed = release and has_small_cells(plan.groups)
    is_seeded = settings.randomness == "seeded"
    status, runs = _status(record), _runs(settings)
    accuracy, suppressed = last_evaluation(record, shown, release)
    if is_suppressed:
        suppressed |= dict.fromkeys(("epsilon_spent", "curve", "phases"), SOLVED_SUPPRESSED)
    if release:
        suppressed["hashes"] = HASHES_SUPPRESSED
    return Content(
        version="release" if release else "internal",
        run=None if release else record.path.resolve().name,
        status=status,
        runs=runs,
        randomness=settings.randomness if not release or settings.randomness in RANDOMNESS else None,
        simulated=settings.metadata.simulated,
        key_left=record.key_left,
        summary=(
            sentences.promise(plan, shown, settings.subset_records),
            *([sentences.one_of_several(runs.number, runs.of)] if runs is not None and runs.of > 1 else []),
            sentences.kept(is_seeded, record.is_bound),
            sentences.finished(status.charged, status.allowed, status.made),
            *([sentences.resumed(status.key_epochs)] if status.key_epochs > 1 else []),
        ),
        groups=_groups(record, shown, is_suppressed),
        note=sentences.summary_of_many(plan) if not is_suppressed and len(plan.epsilons) > MOST_ROWS else None,
        curve=None if is_suppressed else _curve(plan),
        phases=None if is_suppressed else _phases(plan),
        accuracy=accuracy,
        membership=None if release else record.membership,
        guarantee=(None if release else settings.guarantee)
        or plan.guarantee_of_run(settings.randomness, settings.features, settings.person),
        not_covered=sentences.not_covered(
            plan, accuracy is not None and accuracy.data == "private", is_seeded, is_suppressed
        ),
        made_with=_made_with(record, release, is_suppressed),
        versions=_versions(settings.versions, release),
        hashes=_hashes(record, release),
        suppressed=suppressed,
        config=None if release else settings.metadata.config,
    )


def _status(record: RunRecord) -> Status:
    charged, allowed = sum(record.charged), record.plan.steps
    if record.made is None:
        return Status("open", charged, allowed, None, record.key_epochs)
    made = sum(record.made)
    return Status("finished" if made == allowed else "stopped", charged, allowed, made, record.key_epochs)


def _runs(settings: RunSettings) -> Runs | None:
    slot, records = settings.plan_slot, settings.subset_records
    if slot is None:
        return None if records is None else Runs(1, 1, records)
    return Runs(slot.number, slot.of, records)


def _groups(record: RunRecord, shown: Sequence[DisplayRow], is_suppressed: bool) -> tuple[Group, ...]:
    epsilon_spent, charged = record.plan.epsilon_spent(), record.plan.spent_after(record.charged)
    charged = np.minimum(charged, epsilon_spent)  # fewer steps never cost more, also on an accountant's grid
    groups = []
    for row in shown:
        group = Group(  # fields by name, so that a new field of a row is not published by accident
            label=row.label,
            tier=row.tier,
            epsilon=row.epsilon,
            at_least=row.at_least,
            at_most=row.at_most,
            delta=row.delta,
            records=row.records,
            merged=row.merged,
            # With small cells no spend is shown: under uniform, every spend is the strictest record's budget.
            epsilon_spent=None if is_suppressed else float(epsilon_spent[row.groups].max()),
            charged=None if is_suppressed else float(charged[row.groups].max()),
        )
        groups.append(group)
    return tuple(groups)


def _sampled_groups(plan: Plan, most: int) -> list[int]:
    """All groups, or a few evenly spaced ones if there are more than `most`."""
    groups = len(plan.epsilons)
    if groups <= most:
        return list(range(groups))
    return [round(i * (groups - 1) / (MOST_LINES - 1)) for i in range(MOST_LINES)]


def _label(plan: Plan, group: int) -> str:
    epsilon = plan.epsilons[group]
    is_shared = int((plan.epsilons == epsilon).sum()) > 1  # by groups with another delta
    return display.number(epsilon) + (f" (δ = {plan.delta[group]:g})" if is_shared else "")


def _curve(plan: Plan) -> Curve:
    """Upper bounds at as many steps as the plan's own spend curve has."""
    groups = _sampled_groups(plan, MOST_LINES)
    done = [0] * len(plan.phases)
    begin = np.zeros(len(groups)) if plan.runs == 1 else plan.spent_after(done, groups)
    steps, points = [0], [begin]
    for number, phase in enumerate(plan.phases):
        stride = -(-phase.steps // CURVE_POINTS)
        for step in [*range(stride, phase.steps, stride), phase.steps]:
            done[number] = step
            steps.append(sum(done))
            points.append(plan.spent_after(done, groups))
    # Fewer steps never cost more than more steps, so the smallest later bound holds here, too.
    epsilon_spent = np.minimum.accumulate(np.array(points)[::-1], axis=0)[::-1]  # (points, groups shown)
    lines = (Line(_label(plan, group), tuple(epsilon_spent[:, i].tolist())) for i, group in enumerate(groups))
    ends = np.cumsum([phase.steps for phase in plan.phases])
    return Curve(tuple(steps), tuple(lines), tuple(map(int, ends)))


def _phases(plan: Plan) -> tuple[PhaseTable, ...]:
    tables = []
    for phase in plan.phases:
        table_rows = []
        for group in _sampled_groups(plan, MOST_ROWS):
            rate, noise = float(phase.sample_rate[group]), float(phase.noise_multiplier[group])
            table_rows.append(
                PhaseRow(
                    label=_label(plan, group),
                    sample_rate=rate,
                    clip_norm=float(phase.clip_norm[group]),
                    weight=float(phase.weight[group]),
                    noise_multiplier=noise if rate > 0 else None,
                    influence=phase.steps * rate / noise,
                )
            )
        tables.append(PhaseTable(phase.steps, float(phase.expected_batch), float(phase.noise_std), tuple(table_rows)))
    return tuple(tables)


def _made_with(record: RunRecord, release: bool, is_suppressed: bool) -> dict[str, str | int | float]:
    plan, settings, training = record.plan, record.settings, record.settings.training
    hide_options = release and (is_suppressed or not _are_numbers(plan.options))
    facts: dict[str, str | int | float | None] = {
        "strategy": plan.strategy if hide_options else sentences.strategy(plan),
        "accountant": DESCRIPTIONS.get(plan.accountant, plan.accountant).rstrip(","),
        "neighbours": plan.adjacency,
        "sampler": "Poisson: an independent coin for each record at every step",
        "expected batch": plan.batch_size,
        "randomness": RANDOMNESS.get(settings.randomness or "", None if release else settings.randomness),
        "secret key": "still in the run’s folder" if record.key_left else "destroyed",
        "engine": settings.performance.engine,
        "model": training.model,
        "parameters": training.parameters,
        "loss": training.loss,
        "optimizer": training.optimizer,
        "learning rate": training.lr,
        "momentum": training.momentum,
        "device": training.device,
    }
    if release:
        for name in ("engine", "model", "loss", "optimizer"):
            if not _NAME.fullmatch(str(facts[name])):
                facts[name] = None
        if not _NAME.fullmatch(plan.strategy):
            facts["strategy"] = None
        del facts["device"]
    return {name: value for name, value in facts.items() if value is not None}


def _are_numbers(options: Mapping[str, Any]) -> bool:
    return all(_NAME.fullmatch(name) and isinstance(value, int | float) for name, value in options.items())


def _versions(versions: Mapping[str, str], release: bool) -> dict[str, str]:
    if not release:
        return dict(versions)
    return {name: versions[name] for name in _VERSIONED if _NAME.fullmatch(versions.get(name, ""))}


def _hashes(record: RunRecord, release: bool) -> dict[str, str]:
    if release:
        return {name: value for name, value in record.hashes.items() if name == "model.safetensors"}
    return {**record.hashes, "plan digest": record.plan.digest, "last line of the ledger": record.last_hash}
