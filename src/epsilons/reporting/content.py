"""Contents: what a report says, as values; the page and the JSON are two settings of it.

A report for release is made from less, not made and then censored: where a budget is shared by fewer than 20
records, nothing that was solved from all budgets together goes in, for rates and clip norms average to the recipe's
and the missing ones could be worked out from the others. What is in then does not depend on the hidden levels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from .._version import __version__
from ..accounting import DESCRIPTIONS
from ..budgets import SMALLEST_SHOWN
from ..disclosure import MOST_ROWS, Row, rows
from ..planning import Plan, display
from ..planning.guarantee import RANDOMNESS
from ..planning.plans import CURVE_POINTS
from . import words
from .load_run import Evidence
from .load_run import Row as Metrics
from .scores import Score

SCHEMA = 1

#: As many lines fit into one picture, and as many groups stand for the others where there are very many.
MOST_LINES = 6

#: Names of models, losses, optimizers and versions that may leave the house; anything else might be a path or a note.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,39}")
_VERSIONED = ("epsilons", "python", "torch", "numpy", "scipy", "dp-accounting")  # the last in older runs only


@dataclass(frozen=True)
class Group:
    """A row of promises and spends; `spends` and `charged` are None where they are not told."""

    row: Row
    epsilon_spent: float | None
    charged: float | None


@dataclass(frozen=True)
class Line:
    """One group's spend over the steps: an upper bound at each of the curve's steps."""

    label: str
    epsilon_spent: tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """steps (points,) done, counted over all phases; lines (groups shown) upper bounds at these steps."""

    steps: tuple[int, ...]
    lines: tuple[Line, ...]
    phase_ends: tuple[int, ...]


@dataclass(frozen=True)
class PhaseRow:
    """What one group gives and gets in one phase; noise_multiplier is None where it is never drawn."""

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
    def weighted(self) -> bool:
        """True if a weight does anything."""
        return any(row.weight != 1 for row in self.rows)


@dataclass(frozen=True)
class Accuracy:
    """What was measured at the end, and on whose data."""

    step: int
    data: Literal["public", "private"]
    declared: bool
    loss: float | None
    overall: Score
    classes: tuple[Score, ...]
    groups: tuple[Score, ...]


@dataclass(frozen=True)
class Contents:
    """All that a report says.

    state      "finished"; "stopped" before its end; "open" if the ledger was never closed
    summary    the first paragraph, sentence by sentence
    withheld   section -> why it, or a part of it, is not in this version
    made_with  name -> value, in the order shown
    """

    release: bool
    name: str | None
    state: Literal["finished", "stopped", "open"]
    charged: int
    allowed: int
    made: int | None
    epochs: int
    randomness: str | None
    simulated: bool
    key_left: bool
    summary: tuple[str, ...]
    groups: tuple[Group, ...]
    note: str | None
    curve: Curve | None
    phases: tuple[PhaseTable, ...]
    accuracy: Accuracy | None
    guarantee: str
    not_covered: tuple[str, ...]
    made_with: Mapping[str, str | int | float]
    versions: Mapping[str, str]
    hashes: Mapping[str, str]
    withheld: Mapping[str, str]
    config: Mapping[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; docs/report.md names every key."""
        groups = []
        for group in self.groups:
            row = asdict(group.row)
            del row["groups"]
            groups.append(
                row | {"merged": group.row.merged, "epsilon_spent": group.epsilon_spent, "charged": group.charged}
            )
        values = {
            "schema": SCHEMA,
            "document": "epsilons report",
            "version": "release" if self.release else "internal",
            "epsilons_version": __version__,
            "run": self.name,
            "summary": self.summary,
            "status": {"state": self.state, "charged": self.charged, "allowed": self.allowed, "made": self.made}
            | {"key_epochs": self.epochs},
            "randomness": self.randomness,
            "simulated": self.simulated,
            "key_left": self.key_left,
            "groups": groups,
            "curve": asdict(self.curve) if self.curve else None,
            "phases": [asdict(phase) for phase in self.phases] or None,
            "accuracy": asdict(self.accuracy) if self.accuracy else None,
            "guarantee": self.guarantee,
            "not_covered": self.not_covered,
            "made_with": self.made_with,
            "versions": self.versions,
            "hashes": self.hashes,
            "withheld": self.withheld,
            "config": self.config,
        }
        return {key: _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def contents(found: Evidence, release: bool) -> Contents:
    """What a report about this run says, for internal use or for release."""
    plan, settings = found.plan, found.settings
    shown = rows(plan, settings.metadata.tiers, release)
    hidden = release and any(row.merged for row in shown)
    seeded = settings.randomness == "seeded"
    charged, allowed = sum(found.charged), plan.steps
    made = None if found.made is None else sum(found.made)
    withheld: dict[str, str] = {}
    accuracy = _accuracy(found, shown, release, withheld)
    if hidden:
        withheld |= {
            "epsilon_spent": words.SOLVED_WITHHELD,
            "curve": words.SOLVED_WITHHELD,
            "phases": words.SOLVED_WITHHELD,
        }
    if release:
        withheld["hashes"] = words.HASHES_WITHHELD
    return Contents(
        release=release,
        name=None if release else found.path.resolve().name,
        state="open" if made is None else "finished" if made == allowed else "stopped",
        charged=charged,
        allowed=allowed,
        made=made,
        randomness=settings.randomness if not release or settings.randomness in RANDOMNESS else None,
        simulated=settings.metadata.simulated,
        key_left=found.key_left,
        epochs=found.epochs,
        summary=(
            words.promise(plan, shown),
            words.kept(seeded, found.bound),
            words.finished(charged, allowed, made),
            *([words.taken_up(found.epochs)] if found.epochs > 1 else []),
        ),
        groups=_groups(found, shown, hidden),
        note=words.summary_of_many(plan) if not release and len(plan.epsilons) > MOST_ROWS else None,
        curve=None if hidden else _curve(plan),
        phases=() if hidden else _phases(plan),
        accuracy=accuracy,
        guarantee=(None if release else settings.guarantee) or plan.guarantee_of_run(settings.randomness),
        not_covered=tuple(words.not_covered(plan, accuracy is not None and accuracy.data == "private", seeded)),
        made_with=_made_with(found, release, hidden),
        versions=_versions(settings.versions, release),
        hashes=_hashes(found, release),
        withheld=withheld,
        config=None if release else settings.metadata.config,
    )


def _groups(found: Evidence, shown: Sequence[Row], hidden: bool) -> tuple[Group, ...]:
    if hidden:  # under uniform, everyone's spend is the strictest record's budget
        return tuple(Group(row, None, None) for row in shown)
    epsilon_spent, charged = found.plan.epsilon_spent(), found.plan.spent_after(found.charged)
    charged = np.minimum(charged, epsilon_spent)  # fewer steps never cost more, whatever an accountant's grid does
    return tuple(Group(row, float(epsilon_spent[row.groups].max()), float(charged[row.groups].max())) for row in shown)


def _chosen(plan: Plan, most: int) -> list[int]:
    """All groups, or where there are more than `most`, a few that stand for the others, evenly spaced."""
    groups = len(plan.epsilons)
    return list(range(groups)) if groups <= most else [round(i * (groups - 1) / (MOST_LINES - 1)) for i in range(6)]


def _name(plan: Plan, group: int) -> str:
    level = plan.epsilons[group]
    twice = int((plan.epsilons == level).sum()) > 1
    return display.number(level) + (f" (δ = {plan.delta[group]:g})" if twice else "")


def _curve(plan: Plan) -> Curve:
    """Upper bounds after as many steps as the plan's own spend curve has points."""
    chosen = _chosen(plan, MOST_LINES)
    steps, points = [0], [np.zeros(len(chosen))]
    done = [0] * len(plan.phases)
    for number, phase in enumerate(plan.phases):
        stride = -(-phase.steps // CURVE_POINTS)
        for step in [*range(stride, phase.steps, stride), phase.steps]:
            done[number] = step
            steps.append(sum(done))
            points.append(plan.spent_after(done, chosen))
    # Fewer steps never cost more than more steps, so the smallest bound from here on holds here, too.
    epsilon_spent = np.minimum.accumulate(np.array(points)[::-1], axis=0)[::-1]  # (points, chosen)
    lines = tuple(
        Line(_name(plan, group), tuple(map(float, epsilon_spent[:, place]))) for place, group in enumerate(chosen)
    )
    ends = np.cumsum([phase.steps for phase in plan.phases])
    return Curve(tuple(steps), lines, tuple(map(int, ends)))


def _phases(plan: Plan) -> tuple[PhaseTable, ...]:
    chosen = _chosen(plan, MOST_ROWS)
    found = []
    for phase in plan.phases:
        lines = []
        for group in chosen:
            rate, noise = float(phase.sample_rate[group]), float(phase.noise_multiplier[group])
            lines.append(
                PhaseRow(
                    label=_name(plan, group),
                    sample_rate=rate,
                    clip_norm=float(phase.clip_norm[group]),
                    weight=float(phase.weight[group]),
                    noise_multiplier=noise if rate > 0 else None,
                    influence=phase.steps * rate / noise,
                )
            )
        found.append(PhaseTable(phase.steps, float(phase.expected_batch), float(phase.noise_std), tuple(lines)))
    return tuple(found)


def _accuracy(found: Evidence, shown: Sequence[Row], release: bool, withheld: dict[str, str]) -> Accuracy | None:
    if not found.metrics:
        withheld["accuracy"] = words.NOTHING_MEASURED
        return None
    last, test = found.metrics[-1], found.settings.eval_data
    public = test.data == "public"
    if release and not public:
        withheld["accuracy"] = words.PRIVATE_WITHHELD
        return None
    overall = _overall(last, test.records)
    classes = _per_class(last, test.classes)
    groups = _per_group(last, shown)
    if release:
        if overall.records is None or overall.records < SMALLEST_SHOWN:
            withheld["accuracy"] = words.SMALL_WITHHELD
            return None
        # One small cell is the rest of the sum, so the whole table goes.
        if _is_small(classes):
            classes, withheld["accuracy_per_class"] = (), words.SMALL_WITHHELD
        if _is_small(groups):
            groups, withheld["accuracy_per_group"] = (), words.SMALL_WITHHELD
    return Accuracy(
        step=last.step,
        data="public" if public else "private",
        declared=test.data is not None,
        loss=last.loss,
        overall=overall,
        classes=classes,
        groups=groups,
    )


def _is_small(scores: Sequence[Score]) -> bool:
    return any((score.records or 0) < SMALLEST_SHOWN for score in scores)


def _overall(last: Metrics, records: int | None) -> Score:
    if last.per_class is not None:
        right, total = (sum(column) for column in zip(*last.per_class, strict=True))
        return Score.of("all", right, total)
    if last.accuracy is None or records is None:
        return Score("all", records, last.accuracy, None, None)
    return Score.of("all", last.accuracy * records, records)


def _per_class(last: Metrics, names: Sequence[str] | None) -> tuple[Score, ...]:
    cells = last.per_class or []
    labels = names if names is not None else [f"class {number}" for number in range(len(cells))]
    return tuple(Score.of(label, *cell) for label, cell in zip(labels, cells, strict=True)) if cells else ()


def _per_group(last: Metrics, shown: Sequence[Row]) -> tuple[Score, ...]:
    if last.per_group is None:
        return ()
    cells = np.array(last.per_group)  # (groups, 2) right, records
    return tuple(Score.of(row.label, *map(int, cells[row.groups].sum(axis=0))) for row in shown)


def _made_with(found: Evidence, release: bool, hidden: bool) -> dict[str, str | int | float]:
    plan, settings, training = found.plan, found.settings, found.settings.training
    facts: dict[str, str | int | float | None] = {
        "strategy": plan.strategy if release and (hidden or not _is_plain(plan.options)) else words.strategy(plan),
        "accountant": DESCRIPTIONS.get(plan.accountant, plan.accountant).rstrip(","),
        "neighbours": plan.adjacency,
        "sampler": "Poisson: at every step a coin of its own decides for each record",
        "expected batch": plan.batch_size,
        "randomness": RANDOMNESS.get(settings.randomness or "", None if release else settings.randomness),
        "secret key": "still in the run’s folder" if found.key_left else "destroyed",
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


def _is_plain(options: Mapping[str, Any]) -> bool:
    return all(_NAME.fullmatch(name) and isinstance(value, int | float) for name, value in options.items())


def _versions(versions: Mapping[str, str], release: bool) -> dict[str, str]:
    if not release:
        return dict(versions)
    return {name: versions[name] for name in _VERSIONED if _NAME.fullmatch(versions.get(name, ""))}


def _hashes(found: Evidence, release: bool) -> dict[str, str]:
    if release:
        return {name: value for name, value in found.hashes.items() if name == "model.safetensors"}
    return {**found.hashes, "plan digest": found.plan.digest, "last line of the ledger": found.last_hash}
