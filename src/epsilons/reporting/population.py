"""What a report says about the people in it: who counts as one, who else trained on them, tests and withdrawal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

import numpy as np

from ..core.disclosure import PRIVATE_SUPPRESSED, SMALL_SUPPRESSED, SMALLEST_SHOWN, DisplayRow
from ..ledger import plan_folder
from ..ledger.run_json import EvalData, MetricsRow, RunSettings
from ..planning import Plan
from ..planning.guarantee import EACH_ROW
from ..planning.plan_numbers import SHARES
from . import sentences
from .load_run import RunRecord


@dataclass(frozen=True)
class Unit:
    """What has one budget.

    unit      "person" with all their rows, or "record": one row
    stated    "by ids": the budgets name the person of each row; "one row": each row is one person, as the caller
              stated; "not stated"
    sentence  the same for readers
    """

    unit: Literal["record", "person"]
    stated: Literal["by ids", "one row", "not stated"]
    sentence: str

    @property
    def is_person(self) -> bool:
        """True if a limit on a unit is a limit on a person."""
        return self.stated != "not stated"


@dataclass(frozen=True)
class RosterRuns:
    """Runs that were begun by this user on this machine, this one included; None where they cannot be counted.

    same_roster  with exactly this list of budgets, in this order
    same_data    of these, on exactly these data
    other_roster  with another list of budgets, on exactly these data, also those that are charged to a registry
    """

    same_roster: int | None
    same_data: int | None
    other_roster: int | None
    sentences: tuple[str, ...]


def unit_of(plan: Plan, settings: RunSettings) -> Unit:
    """What the run protects, and how its caller stated it."""
    if plan.unit == "person":
        return Unit(
            "person",
            "by ids",
            "Every limit in this report is for one person, with all of their rows: rows with the same id belong to one "
            "person. A person with rows under two ids counts as two.",
        )
    if _states_one_row(settings):
        return Unit(
            "record",
            "one row",
            "Every limit in this report is for one row, and each row is one person: the run states so. Nothing checked "
            "this statement.",
        )
    return Unit(
        "record",
        "not stated",
        "Every limit in this report is for one ROW of the data. It was not stated whether a person can have several "
        "rows. Several rows of one person are not covered together: their limits add up, to k·ε for k rows, at a "
        "larger δ.",
    )


def _states_one_row(settings: RunSettings) -> bool:
    data = (settings.metadata.config or {}).get("data")
    in_config = data.get("person") if isinstance(data, Mapping) else None
    return EACH_ROW in (settings.person, settings.metadata.person, in_config)


def roster_runs(counted: Any, registry: str | None = None) -> RosterRuns:
    """How many runs had the same budgets, from the entry in run.json; for internal reports only.

    registry  id of the registry that the run is charged to
    """
    if registry is not None:
        return RosterRuns(None, None, None, (_IN_REGISTRY.format(id=registry),))
    if not isinstance(counted, Mapping):
        return _uncounted("it was made by an earlier version")
    if "run" not in counted:
        return _uncounted(str(counted.get("reason", plan_folder.UNUSABLE)))
    found = plan_folder.count(counted)
    if found is None:
        return _uncounted("it began on another machine or under another user, or its entry was removed")
    return RosterRuns(found.same_roster, found.same_data, found.other_roster, tuple(_of_count(found)))


def _uncounted(why: str) -> RosterRuns:
    sentence = f"Runs on the same people were not counted for this run: {why}. Ask those who have the data."
    return RosterRuns(None, None, None, (sentence, _ADD_UP))


_IN_REGISTRY = (
    "The registry {id} counts the runs on these people and adds them up, however they overlap: epsilons registry show "
    "lists them. Runs that were not charged there are not found here, and spend in addition."
)
_OF_LEVELS = (
    "Neither accuracy per budget nor per class and budget is shown: the groups of this run are levels of lifetime "
    "budgets, and people of one tier may be in several of them."
)
_ADD_UP = (
    "The epsilons of several runs on the same people add up, unless the runs share one plan. Runs that overlap in some "
    "people only, and runs of other users, machines or programs, are not found here."
)


def _of_count(found: plan_folder.Count) -> list[str]:
    began = "that this user began on this machine with exactly this list of budgets"
    first = f"When this report was made, no other run was known {began}."
    if found.same_roster > 1:
        same = "all" if found.same_data == found.same_roster else f"{found.same_data:,}"
        first = (
            f"When this report was made, this was one of {found.same_roster:,} runs {began}; {same} of them had "
            "exactly these data."
        )
    damaged = (
        f"{found.unreadable:,} more entries cannot be compared, because they are damaged or older than the secret that "
        "they are compared under: each of them may be such a run."
    )
    others = (
        f"Runs that this user began on this machine with exactly these data and another list of budgets: "
        f"{found.other_roster:,}, with a registry or without one."
    )
    return [first, *([others] if found.other_roster else []), *([damaged] if found.unreadable else []), _ADD_UP]


def tested(data: EvalData, has_scores: bool, by_person: bool, release: bool) -> tuple[str, ...]:
    """What holds for the people of the test data.

    by_person  True if all rows of a test person were held out
    """
    if data.records is None and not has_scores:
        return ("The run had no test data.",)
    is_public = data.data == "public"
    sentences = [
        f"The model was measured on {_test_records(data, release)}. Training steps do not read them. The people in "
        "them are concerned, too: their rows were kept back for the test. They were read without noise, and counted in "
        "the scores. "
        + (
            "They were held out by person: no person has rows in both. So more persons may match a list of consent "
            "than were trained on."
            if by_person
            else "Whether a person is both in the training data and in the test data was not checked."
        )
    ]
    if is_public:
        sentences.append("The test data were declared public, so scores on them may be published.")
        return tuple(sentences)
    sentences.append(
        "No budget protects test people: a tier that they chose only sorts the scores, which are exact, without noise. "
        "So scores on them are private data."
        + (
            " This version contains none of them."
            if release
            else " They are in this report, in its JSON and in the run’s folder (metrics.jsonl). The version for "
            "release leaves them out. Choosing among models by these scores is not covered either."
        )
    )
    return tuple(sentences)


def _test_records(data: EvalData, release: bool) -> str:
    if data.records is None or (release and data.data != "public"):
        return "test data"
    if release and data.records < SMALLEST_SHOWN:
        return f"fewer than {SMALLEST_SHOWN} test records"
    of = "" if release or data.persons is None else f" of {data.persons:,} persons"
    return f"{data.records:,} test records{of}"


def stated(plan: Plan, settings: RunSettings, release: bool) -> str | None:
    """What the guarantee repeats about persons; a report for release names no column."""
    return None if release and plan.unit == "person" else settings.person


def is_split_by_person(plan: Plan, settings: RunSettings) -> bool:
    """True if the config held test people out with all of their rows."""
    data = (settings.metadata.config or {}).get("data")
    return plan.unit == "person" and isinstance(data, Mapping) and any(map(data.get, ("test_share", "test_people")))


def left_out(words: object) -> str | None:
    """How many were left out for their budgets, as the config's run recorded it; other notes are ignored."""
    return words if isinstance(words, str) and words.strip() else None


def joined(consent: Any, release: bool) -> tuple[str, ...]:
    """How people, entries and rows were joined, as the run recorded it.

    A version for release has no counts: two of them would tell why a person left.
    """
    if not isinstance(consent, Mapping) or not isinstance(consent.get("ids"), list):
        return ()
    how = " and ".join(map(str, consent["ids"])) or "as written; no two were alike up to spelling"
    day = f" Entries of consent count as of {consent['as_of']}." if consent.get("as_of") else ""
    tables = [] if release else map(consent.get, ("table", "tested"))
    rows = [row for table in tables if isinstance(table, list) for row in table if {"file", "what", "count"} <= {*row}]
    counts = (f"{row['file']}: {row['what']}: {row['count']}" for row in rows)
    return (f"Ids of persons were compared {how}.{day}", *counts)


def withdrawal(plan: Plan, unit: Unit, registry: str | None = None, config: Any = None) -> tuple[str, ...]:
    """What happens if a person withdraws: what holds now.

    registry  id of the one that the run is charged to
    config    of the run, whose [budgets] may let entries leave people out
    """
    deciding = {"left_out", "blank", "zero", "infinite", "unlisted", "withdrawn_on", "valid_until"}
    decides = any(value for key, value in ((config or {}).get("budgets") or {}).items() if key in deciding)
    entry = (
        "the list of budgets says so: their rows may then stay, and are not drawn. Without that, " if decides else ""
    )
    who = "A person" if unit.is_person else "Someone with one row in the data"
    stay = "" if plan.adjacency == SHARES else " That they were on the list is not hidden by this guarantee."
    return (
        f"{who} who withdraws stays covered: their limit ε holds for this model and everything released from its "
        f"training, now and later.{stay}",
        "What this model learnt from their data stays in it, within that limit. Their data cannot be taken out of a "
        "trained model; only training again without them does that.",
        f"A later run leaves them out if {entry}all of their rows {'must be' if decides else 'are'} removed from its "
        "data before it is planned. It is a run of its own, with budgets of its own for those who remain."
        if registry is None
        else "Once they are withdrawn in the registry (epsilons registry withdraw), no run that is reserved later "
        "includes them. What they spent stays on record, so that a second enrolment would not start from nothing.",
    )


# -- Accuracy at the end of a run, with the uncertainty of its test set
#
# Wilson's interval (Wilson 1927, JASA 22(158), 209-212, in the form of Brown, Cai and DasGupta 2001, Statist. Sci.
# 16(2), eq. 4) keeps its coverage near 0 and 1 and in small cells.

#: Two-sided 95 %: the 97.5 % quantile of the standard normal distribution.
Z95 = 1.959963984540054


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on one slice of the test records.

    records    None if it was not recorded; then there is no interval
    accuracy   None if there are no records
    low, high  95 % confidence interval
    """

    label: str
    records: int | None
    accuracy: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def is_few(self) -> bool:
        """True if there are so few records that the accuracy says nothing about others."""
        return self.records is not None and self.records < SMALLEST_SHOWN

    def is_below(self, other: Accuracy) -> bool:
        """True if its interval lies below that of the other one."""
        return self.high is not None and other.low is not None and self.high < other.low

    @classmethod
    def of(cls, label: str, right: float, records: int) -> Accuracy:
        """From counts; `right` may be accuracy · records."""
        return cls(label, records, right / records, *wilson(right, records)) if records else cls(label, 0)


@dataclass(frozen=True)
class Errors:
    """Errors of predicted numbers.

    mean_absolute_error, rmse  in the unit of the target
    r2                         part of the target's variance that is explained, at most 1; None if all targets are equal
    """

    mean_absolute_error: float
    rmse: float
    r2: float | None

    @classmethod
    def of(cls, last: MetricsRow) -> Errors | None:
        """None if no numbers were predicted."""
        if last.mean_absolute_error is None or last.rmse is None:
            return None
        return cls(last.mean_absolute_error, last.rmse, last.r2)


@dataclass(frozen=True)
class Evaluation:
    """The last evaluation of a run, and whether its test data were public.

    balanced_accuracy  mean of the accuracies of the classes that have test records; None if these are not shown
    majority           accuracy of always naming the most frequent class; None likewise
    auc                area under the ROC curve, of several classes the mean of one against the rest; None likewise
    errors             of numbers that were predicted; None for classes
    cells              (classes, groups) of the records of one class and one group; () if these are not shown
    """

    step: int
    data: Literal["public", "private"]
    declared: bool
    loss: float | None
    overall: Accuracy
    classes: tuple[Accuracy, ...]
    groups: tuple[Accuracy, ...]
    balanced_accuracy: float | None = None
    majority: float | None = None
    auc: float | None = None
    errors: Errors | None = None
    cells: tuple[tuple[Accuracy, ...], ...] = ()

    @property
    def is_as_bad_as_the_majority(self) -> bool:
        """True if always naming the most frequent class is as accurate."""
        return self.majority is not None and (self.overall.accuracy or 0.0) <= self.majority

    @property
    def has_few(self) -> bool:
        """True if some table has an accuracy of too few records to tell."""
        return any(one.is_few for one in (*self.classes, *self.groups, *itertools.chain(*self.cells)))

    @property
    def served_worst(self) -> str | None:
        """The lowest accuracy of those with enough test records, in words; None if none is below that of all.

        It names only one whose 95 % interval is below that of all other test records.
        """
        average = 100 * (self.overall.accuracy or 0.0)
        rated = [(100 * (one.accuracy or 0.0), label, one) for label, one in self._rated()]
        if not any(rate < average for rate, *_ in rated):
            return None
        first = f"Served worst, of those with {SMALLEST_SHOWN} test records or more:"
        below = [(rate, label, one) for rate, label, one in rated if one.is_below(self._others(one))]
        if not below:
            return f"{first} not distinguishable. No interval lies below that of all other test records."
        rate, label, worst = min(below, key=itemgetter(0))
        low, high = 100 * (worst.low or 0.0), 100 * (worst.high or 0.0)
        return (
            f"{first} {label}, {rate:.1f}\u00a0% right ({low:.1f} to {high:.1f}\u00a0%), of {worst.records:,}. All: "
            f"{average:.1f}\u00a0%."
        )

    def _others(self, one: Accuracy) -> Accuracy:
        """All test records but these."""
        records = (self.overall.records or 0) - (one.records or 0)
        right = (self.overall.accuracy or 0.0) * (self.overall.records or 0) - (one.accuracy or 0.0) * (
            one.records or 0
        )
        return Accuracy.of("others", min(max(right, 0.0), records), max(records, 0))

    def _rated(self) -> list[tuple[str, Accuracy]]:
        """Labels and accuracies of enough test records."""
        crossed = zip(self.classes, self.cells, strict=False)
        named = [(f"class {one.label}, budget {cell.label}", cell) for one, cells in crossed for cell in cells]
        named += [(f"budget {one.label}", one) for one in self.groups]
        named += [(f"class {one.label}", one) for one in self.classes]
        return [(label, one) for label, one in named if one.accuracy is not None and not one.is_few]


def wilson(right: float, records: int, z: float = Z95) -> tuple[float, float]:
    """(low, high): all p for which `right` of `records` lies within z standard errors of p.

    >>> [round(end, 4) for end in wilson(0, 20)]
    [0.0, 0.1611]
    """
    rate, total = right / records, records + z**2
    middle = (right + z**2 / 2) / total
    half = z * math.sqrt(records) / total * math.sqrt(rate * (1 - rate) + z**2 / (4 * records))
    return max(0.0, middle - half), min(1.0, middle + half)


def last_evaluation(
    record: RunRecord, rows: Sequence[DisplayRow], release: bool
) -> tuple[Evaluation | None, dict[str, str]]:
    """(the last evaluation as far as it may be shown, reasons for what is suppressed by section)."""
    if not record.metrics:
        return None, {"accuracy": sentences.NOTHING_MEASURED}
    last, eval_data = record.metrics[-1], record.settings.eval_data
    is_public = eval_data.data == "public"
    if release and not is_public:
        return None, {"accuracy": PRIVATE_SUPPRESSED}
    overall, classes = _overall(last, eval_data.records), _classes(last, eval_data.classes)
    groups, cells, suppressed = _by_group(last, rows, record.settings.registry_id is not None)
    if release:
        if _is_small(overall, [overall]):
            return None, {"accuracy": SMALL_SUPPRESSED}
        # A single small cell could be computed from the total, so the whole table is suppressed.
        if any(map(_is_small, (*classes, *groups), (*cells, *zip(*cells, strict=True)))):
            cells, suppressed["accuracy_per_class_and_group"] = (), SMALL_SUPPRESSED
        if _is_small(overall, classes):
            classes, suppressed["accuracy_per_class"] = (), SMALL_SUPPRESSED
        if _is_small(overall, groups):
            groups, suppressed["accuracy_per_group"] = (), SMALL_SUPPRESSED
    data: Literal["public", "private"] = "public" if is_public else "private"
    declared = eval_data.data is not None
    auc = last.auc if classes else None  # suppressed with the table of classes: it depends on every class
    balanced, majority = _of_classes(classes)
    found = Evaluation(
        last.step, data, declared, last.loss, overall, classes, groups, balanced, majority, auc, Errors.of(last), cells
    )
    return found, suppressed


def _by_group(
    last: MetricsRow, rows: Sequence[DisplayRow], charged: bool
) -> tuple[tuple[Accuracy, ...], tuple[tuple[Accuracy, ...], ...], dict[str, str]]:
    """Groups, cells, and why they are not shown: those of a run that is charged to a registry are no rows.

    rows  none where it must not be shown which groups there are
    """
    if charged or not (rows and last.per_group):
        return (), (), {"accuracy_per_group": _OF_LEVELS} if charged else {}
    return _groups(last.per_group, rows), tuple(_groups(of_class, rows) for of_class in last.per_class_group or ()), {}


def _is_small(total: Accuracy, cells: Sequence[Accuracy]) -> bool:
    """Whether a cell has fewer than 20 records, or those of the total that are in no cell are so few."""
    counts = [cell.records or 0 for cell in cells]
    rest = (total.records or 0) - sum(counts)
    return bool(counts) and (min(counts) < SMALLEST_SHOWN or 0 < rest < SMALLEST_SHOWN)


def _overall(last: MetricsRow, records: int | None) -> Accuracy:
    if last.per_class is not None:
        right, total = (sum(column) for column in zip(*last.per_class, strict=True))
        return Accuracy.of("all", right, total)
    if last.accuracy is None or records is None:
        return Accuracy("all", records, last.accuracy)
    return Accuracy.of("all", last.accuracy * records, records)


def _classes(last: MetricsRow, names: Sequence[str] | None) -> tuple[Accuracy, ...]:
    if not last.per_class:
        return ()
    labels = names if names is not None else [f"class {number}" for number in range(len(last.per_class))]
    return tuple(Accuracy.of(label, *cell) for label, cell in zip(labels, last.per_class, strict=True))


def _of_classes(classes: Sequence[Accuracy]) -> tuple[float | None, float | None]:
    """Balanced accuracy, and the accuracy of always naming the most frequent class."""
    counts = [one.records or 0 for one in classes]
    rates = [one.accuracy for one in classes if one.accuracy is not None]
    return (sum(rates) / len(rates), max(counts) / sum(counts)) if rates else (None, None)


def declared_shares(plan: Plan, balance: Sequence[Sequence[float]] | None) -> list[list[float]]:
    """(classes, groups) the part of the people of a class that holds each budget; [] for runs that are not balanced.

    balance  for each group, how its people divide into classes, as it was declared for the balanced loss
    """
    if len(balance or ()) != len(plan.groups) or plan.groups.starts is not None:  # groups on accounts are no rows
        return []
    rows = np.array(balance)
    people = plan.counts[:, None] * rows / rows.sum(axis=1, keepdims=True)
    shares: list[list[float]] = (people / people.sum(axis=0)).T.tolist()
    return shares


def _groups(tallies: Sequence[tuple[int, int]] | None, rows: Sequence[DisplayRow]) -> tuple[Accuracy, ...]:
    if tallies is None:
        return ()
    cells = np.array(tallies)  # (groups, 2) right, records
    named = [(f"{row.tier} ({row.label})" if row.tier else row.label, cells[row.groups]) for row in rows]
    return tuple(Accuracy.of(name, *map(int, found.sum(axis=0))) for name, found in named)
