"""The tables of the results page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ..comparing import differences, runs_of, spread, titled
from ..results import Line
from ..settings import Cell, Table

#: (cell, the cell that it is compared with, what the difference shows)
PAIRS = (
    ("weighting-a", "baseline", "weighting, A"),
    ("weighting-b", "baseline", "weighting, B"),
    ("weighting-a", "weighting-b", "A − B"),
    ("weighting-a-200", "baseline-200", "weighting, A, equally many votes"),
    ("weighting-b", "baseline-200", "weighting, B, equally many votes"),
    ("weighting-a-200", "weighting-b", "A − B, equally many votes"),
    ("weighting-a", "weighting-b-400", "A − B, equally many votes"),
    ("weighting-a-teachers", "baseline-teachers", "weighting, A, new teachers for each seed"),
    ("weighting-b-teachers", "baseline-teachers", "weighting, B, new teachers for each seed"),
    ("weighting-a-teachers", "weighting-b-teachers", "A − B, new teachers for each seed"),
    ("upsampling-a", "baseline", "upsampling, A"),
    ("vanishing-a", "baseline", "vanishing, A"),
    ("published-a", "published-b", "A − B as published, own weights"),
    ("code-a", "code-b", "A − B as published, weights of the code"),
    ("sgd-scale-a", "weighting-a", "Scale, A"),
    ("sgd-scale-b", "weighting-b", "Scale, B"),
    ("sgd-dpsgd", "weighting-a", "DP-SGD at ε = 1 against weighting, A"),
)

PUBLISHED_WARNING = """The noise is 40, and labels are given until the data-dependent ε of a group is used up (Papernot
et al., arXiv 1802.08908v1, Theorem 6). **That ε follows from the votes, so it is private, and so is the place where it
stops.** The last column is what the same votes cost whatever the teachers say."""

CODE_NOTE = """The published code gives a group the weight (share of the records) × ε, divided by the mean. It then
assigns the sorted weights to the sorted budgets, and charges for those. ε is exact, of 400 votes under the noise that
suits the charged weights."""


def page(table: Table, done: Mapping[str, Line]) -> str:
    """Exact costs, differences with the same seeds, costs as published, and the code's weights; "" without any run."""
    parts = [
        _exact(table, done),
        differences(table, done, PAIRS),
        _as_published(table, done),
        _of_the_code(table, done),
    ]
    return "\n\n".join(part for part in parts if part)


def _exact(table: Table, done: Mapping[str, Line]) -> str:
    rows = []
    for cell, lines in _runs(table, done, "noise"):
        rows.append(
            [cell.title, _weights(lines[0]), f"{lines[0]['noise']:.1f}", *_labels(lines), _three(lines, "spent")]
        )
    head = ["exact costs", "weights of ε = 1 / 2 / 3", "noise", "labels right", "student", "ε spent"]
    return titled("Costs that do not depend on the votes", head, rows)


def _weights(line: Line) -> str:
    """Weights of the groups, or the votes in which a group of weight 1 takes part."""
    phases = line["weights"]
    if len(phases) == 1:
        return " / ".join(f"{weight:.3f}" for weight in phases[0])
    last = " / ".join(str(votes) for votes in line["votes"])
    return f"1, in the first {last} votes"


def _as_published(table: Table, done: Mapping[str, Line]) -> str:
    rows = []
    for cell, lines in _runs(table, done, "data_dependent"):
        votes = f"{statistics.fmean(line['steps'] for line in lines):,.0f}"
        rows.append([cell.title, votes, *_labels(lines), _three(lines, "data_dependent"), _three(lines, "exact")])
    head = ["as published", "labels", "labels right", "student", "data-dependent ε (private)", "exact ε"]
    return titled(f"As published\n\n{PUBLISHED_WARNING}", head, rows)


def _of_the_code(table: Table, done: Mapping[str, Line]) -> str:
    rows = []
    for name, own in (("code-a", "published-a"), ("code-b", "published-b")):
        lines, right = (list(runs_of(table.by_name[which], done).values()) for which in (name, own))
        if lines and right:
            weights = [right[0]["weights"]["voted"], lines[0]["weights"]["voted"], lines[0]["weights"]["charged"]]
            charged, spent = ([{"ε": lines[0]["exact_at"][key]}] for key in ("charged", "voted"))
            shown = [" / ".join(f"{weight:.3f}" for weight in three) for three in weights]
            truth = _three(lines, "with_voted_weights")
            rows.append([table.by_name[name].title, *shown, _three(charged, "ε"), _three(spent, "ε"), truth])
    head = ["weights of ε = 1 / 2 / 3", "own (Scale)", "voted", "charged", "ε charged", "ε spent"]
    head += ["data-dependent ε of the votes as published, with the voted weights"]
    return titled(f"The weights of the published code\n\n{CODE_NOTE}", head, rows)


def _runs(table: Table, done: Mapping[str, Line], key: str) -> list[tuple[Cell, list[Line]]]:
    """Cells with finished runs that have this key."""
    found = [(cell, [line for line in runs_of(cell, done).values() if key in line]) for cell in table.cells]
    return [(cell, lines) for cell, lines in found if lines]


def _labels(lines: list[Line]) -> list[str]:
    """How many of the labels are right, and the student's accuracy, in %."""
    students = [100 * line["accuracy"] for line in lines]
    right = 100 * statistics.fmean(line["labels_right"] for line in lines)
    return [f"{right:.1f}", spread(students)]


def _three(lines: Sequence[Mapping[str, list[float]]], key: str) -> str:
    """Means over runs, by group."""
    groups = range(len(lines[0][key]))
    return " / ".join(f"{statistics.fmean(line[key][group] for line in lines):.3f}" for group in groups)
