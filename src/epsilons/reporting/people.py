"""What a report says about the people in it: who counts as one, who else trained on them, tests and withdrawal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .. import run_counts
from ..disclosure import SMALLEST_SHOWN, at_least
from ..planning import Plan
from ..planning.guarantee import EACH_ROW
from ..planning.plan_numbers import SHARES
from .load_run import EvalData, RunSettings


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
    """

    same_roster: int | None
    same_data: int | None
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
        return RosterRuns(None, None, (_IN_REGISTRY.format(id=registry),))
    if not isinstance(counted, Mapping):
        return _uncounted("it was made by an earlier version")
    if "run" not in counted:
        return _uncounted(str(counted.get("reason", run_counts.UNUSABLE)))
    found = run_counts.count(counted)
    if found is None:
        return _uncounted("it began on another machine or under another user, or its entry was removed")
    return RosterRuns(found.same_roster, found.same_data, tuple(_of_count(found)))


def _uncounted(why: str) -> RosterRuns:
    sentence = f"Runs on the same people were not counted for this run: {why}. Ask those who have the data."
    return RosterRuns(None, None, (sentence, _ADD_UP))


_IN_REGISTRY = (
    "The registry {id} counts the runs on these people and adds them up, however they overlap: epsilons registry show "
    "lists them. Runs that were not charged there are not found here, and spend in addition."
)
_ADD_UP = (
    "The epsilons of several runs on the same people add up, unless the runs share one plan. Runs that overlap in some "
    "people only, and runs of other users, machines or programs, are not found here."
)


def _of_count(found: run_counts.Count) -> list[str]:
    if found.same_roster == 1:
        first = "This is the only run that this user began on this machine with exactly this list of budgets."
    else:
        same = "all" if found.same_data == found.same_roster else f"{found.same_data:,}"
        first = (
            f"This is one of {found.same_roster:,} runs that this user began on this machine with exactly this list of "
            f"budgets; {same} of them had exactly these data."
        )
    damaged = (
        f"{found.unreadable:,} more entries cannot be compared, because they are damaged or older than the secret that "
        "they are compared under: each of them may be such a run."
    )
    return [first, *([damaged] if found.unreadable else []), _ADD_UP]


def tested(data: EvalData, has_scores: bool, by_person: bool, release: bool) -> tuple[str, ...]:
    """What holds for the people of the test data.

    by_person  True if all rows of a test person were held out
    """
    if data.records is None and not has_scores:
        return ("The run had no test data.",)
    is_public = data.data == "public"
    sentences = [
        f"The model was measured on {_test_records(data, release)}. Training steps do not read them. "
        + (
            "They were held out by person: no person has rows in both."
            if by_person
            else "Whether a person is both in the training data and in the test data was not checked."
        )
    ]
    if is_public:
        sentences.append("The test data were declared public, so scores on them may be published.")
        return tuple(sentences)
    sentences.append(
        "Test people have no budget, and no noise protects them: a score on them is exact. So scores on them are "
        "private data."
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
    return f"{data.records:,} test records"


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

    A version for release names no file, rounds counts down, and holds none of people who were tested on.
    """
    if not isinstance(consent, Mapping) or not isinstance(consent.get("ids"), list):
        return ()
    how = " and ".join(map(str, consent["ids"])) or "as written; no two were alike up to spelling"
    day = f" Entries of consent count as of {consent['as_of']}." if consent.get("as_of") else ""
    tables = (consent.get(name) for name in ("table", *([] if release else ["tested"])))
    rows = [row for table in tables if isinstance(table, list) for row in table if {"file", "what", "count"} <= {*row}]
    return (f"Ids of persons were compared {how}.{day}", *(_row(row, release) for row in rows))


def _row(row: Mapping[str, Any], release: bool) -> str:
    """A count of people who take part or do not."""
    digits = str(row["count"]).replace(",", "")
    count = at_least(int(digits)) if release and digits.isdecimal() else row["count"]
    return f"{'People' if release else row['file']}: {row['what']}: {count}"


def withdrawal(plan: Plan, unit: Unit, registry: str | None = None) -> tuple[str, ...]:
    """What happens if a person withdraws: what holds now. registry: id of the one that the run is charged to"""
    who = "A person" if unit.is_person else "Someone with one row in the data"
    stay = "" if plan.adjacency == SHARES else " That they were on the list is not hidden by this guarantee."
    return (
        f"{who} who withdraws stays covered: their limit ε holds for this model and everything released from its "
        f"training, now and later.{stay}",
        "What this model learnt from their data stays in it, within that limit. Their data cannot be taken out of a "
        "trained model; only training again without them does that.",
        "A later run leaves them out if all of their rows are removed from its data before it is planned. It is a run "
        "of its own, with budgets of its own for those who remain."
        if registry is None
        else "Once they are withdrawn in the registry (epsilons registry withdraw), no run that is reserved later "
        "includes them. What they spent stays on record, so that a second enrolment would not start from nothing.",
    )
