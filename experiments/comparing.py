"""The paper's number, ours, whether they differ by more than chance, and what that says of the paper's claims."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from scipy import stats

from .classes import CLASSES, QUANTITIES, moved, of_classes
from .membership_claims import measured
from .results import Line
from .settings import HERE, Cell, Table

EXPECTED = HERE / "expected"

#: Relative width of the searches behind the paper's printed parameters: two nested ones, each to 1e-3.
PAPER_PRECISION = 2e-3

NOT_RUN = "not run"
NETWORK = "the paper's network"

#: The least number of seeds with which a p-value, a spread or an interval of our runs is printed.
SEEDS = 3
FEW = {1: "one seed", 2: "two seeds"}


@dataclass(frozen=True)
class Printed:
    """A number of the paper: sd and trials are None if it prints none; digits is given for parameters, not scores."""

    quantity: str
    mean: float
    label: str = ""
    sd: float | None = None
    trials: int | None = None
    digits: int | None = None
    contradicts: str | None = None


@dataclass(frozen=True)
class Expected:
    """The paper's numbers and claims for one table.

    items        numbers of the paper's tables and figures, such as "Table 3"; none if the table is not in the paper
    measured_on  pattern of cells -> the model of our runs; other cells have the paper's network
    costs        pattern of cells -> {"hours" of one core for a run, "why" it was not run, "options" of the command}
    cells        numbers by the cell's name     not_printed  why a cell has none
    claims       {"say", "cell"} and one of "within" (points of the paper), "above" (another cell,
                 seed by seed), "at_most" (a number); of "quantity", by default the accuracy. On membership attacks:
                 "between" (two numbers), with the keys of membership_claims.measured. On one class with another budget:
                 "moves" (the keys of classes.moved, and at_least: points)
    """

    source: str = "nothing"
    unit: str = "% of test records right"
    items: tuple[str, ...] = ()
    measured_on: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cells: Mapping[str, tuple[Printed, ...]] = field(default_factory=dict)
    not_printed: Mapping[str, str] = field(default_factory=dict)
    claims: Sequence[Mapping[str, Any]] = ()

    def model(self, cell: str) -> str:
        """What the runs of a cell were measured on."""
        return next((model for pattern, model in self.measured_on.items() if fnmatchcase(cell, pattern)), NETWORK)


def expected(name: str, folder: Path = EXPECTED) -> Expected:
    """The content of expected/<name>.json; of a table without this file, that nothing of it is in the paper."""
    path = folder / f"{name}.json"
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    cells = {cell: tuple(Printed(**row) for row in rows) for cell, rows in values.pop("cells", {}).items()}
    return Expected(**values, cells=cells)


def value(line: Line, quantity: str) -> float:
    """One number of a run: a key, key[index], or key@part for the strictest group's score after that part of the steps.

    class_accuracy[index] is the test accuracy of one class, others_accuracy[index] that of all other classes together,
    and gap the difference between the best and the worst class.

    Accuracies are in %. Raises KeyError or IndexError if the run has no such number.
    """
    at = re.fullmatch(r"group_(loss|accuracy)@([\d.]+)", quantity)
    if at:
        step = float(at[2]) * line["steps"]
        row = min(line["groups"], key=lambda row: abs(row["step"] - step))
        return float(row[at[1]][0]) * (100 if at[1] == "accuracy" else 1)
    inside = re.fullmatch(r"(\w+)\[(\w+)\]", quantity)
    name = inside[1] if inside else quantity
    if name in QUANTITIES:
        return of_classes(line, name, int(inside[2]) if inside else 0)
    if inside:
        values = line[inside[1]]
        found = values[int(inside[2])] if isinstance(values, list) else values[inside[2]]
        return float(found) * (100 if name == "accuracies" else 1)
    return float(line[quantity]) * (100 if quantity == "accuracy" else 1)


@dataclass(frozen=True)
class Compared:
    """values: ours, one per seed that was run."""

    printed: Printed
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float | None:
        """Sample standard deviation over seeds; None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float:
        return self.mean - self.printed.mean

    @property
    def half(self) -> float | None:
        """Half the width of the 95 % interval of the difference; None if the paper prints no spread or trials.

        Student's t with the spread pooled over the paper's trials and our seeds, so one seed is enough.
        """
        theirs, count = self.printed, len(self.values)
        if theirs.sd is None or theirs.trials is None:
            return None
        free = count + theirs.trials - 2
        pooled = math.sqrt(((count - 1) * (self.sd or 0.0) ** 2 + (theirs.trials - 1) * theirs.sd**2) / free)
        return float(stats.t.ppf(0.975, free)) * pooled * math.sqrt(1 / count + 1 / theirs.trials)

    @property
    def p(self) -> float | None:
        """The two-sided p of this test for equal means; None below three seeds, as its spread is the paper's."""
        half, free = self.half, len(self.values) + (self.printed.trials or 0) - 2
        if not half or len(self.values) < SEEDS:
            return None
        return 2 * float(stats.t.sf(abs(self.difference) * stats.t.ppf(0.975, free) / half, free))

    @property
    def agrees(self) -> bool:
        """For a printed parameter: ours rounds to it, within the precision of the paper's searches."""
        half = 0.5 * 10.0 ** -(self.printed.digits or 0)
        return abs(self.difference) <= half + PAPER_PRECISION * abs(self.printed.mean)


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of the 95 % t-interval; inf for one difference.

    >>> mean, half = interval([0.1, 0.2, 0.3])
    >>> round(mean, 2), round(half, 2)
    (0.2, 0.25)
    """
    count = len(differences)
    if count < 2:
        return differences[0], math.inf
    quantile = float(stats.t.ppf(0.975, count - 1))
    return statistics.fmean(differences), quantile * statistics.stdev(differences) / math.sqrt(count)


def gained(differences: Sequence[float]) -> str:
    """The mean difference, with its 95 % interval from three seeds on; with fewer it says how few.

    >>> gained([0.1, 0.2, 0.3]), gained([0.5])
    ('+0.20 ± 0.25', '+0.50 (one seed)')
    """
    if len(differences) < SEEDS:
        return f"{statistics.fmean(differences):+.2f} ({FEW[len(differences)]})"
    return "{:+.2f} ± {:.2f}".format(*interval(differences))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The mean ± the standard deviation, from three seeds on; of two seeds both values.

    >>> spread([1.0, 2.0, 3.0]), spread([1.0, 2.0]), spread([1.0])
    ('2.00 ± 1.00', '1.50 (1.00, 2.00)', '1.00')
    """
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) < SEEDS:
        return mean + (f" ({', '.join(f'{one:.{digits}f}' for one in values)})" if len(values) > 1 else "")
    return f"{mean} ± {statistics.stdev(values):.{digits}f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def runs_of(cell: Cell, done: Mapping[str, Line]) -> dict[int, Line]:
    """Finished runs of a cell, by seed."""
    return {seed: done[cell.settings.named(seed)] for seed in cell.seeds if cell.settings.named(seed) in done}


def by_seed(cell: Cell, done: Mapping[str, Line], quantity: str = "accuracy") -> dict[int, float]:
    """One number of the finished runs of a cell, by seed."""
    return {seed: value(line, quantity) for seed, line in runs_of(cell, done).items()}


def pairs(cell: Cell, other: Cell, done: Mapping[str, Line], quantity: str = "accuracy") -> list[float]:
    """The differences of two cells, over the seeds that both have."""
    ours, theirs = by_seed(cell, done, quantity), by_seed(other, done, quantity)
    return [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]


def differences(
    table: Table, done: Mapping[str, Line], compared: Sequence[tuple[str, str, str]], quantity: str = "accuracy"
) -> str:
    """Markdown: (cell, the cell that it is compared with, what this shows), for those with runs of the same seeds."""
    rows = []
    for name, other, shows in compared:
        if {name, other} <= set(table.by_name):
            one, two = table.by_name[name], table.by_name[other]
            if found := pairs(one, two, done, quantity):
                rows.append([shows, one.title, two.title, gained(found), str(len(found))])
    return titled("Differences, seed by seed", ["what", "cell", "minus", "points, ± 95 % interval", "seeds"], rows)


def titled(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown under a heading; "" without rows."""
    return f"### {title}\n\n{markdown(header, rows)}" if rows else ""


#: (it holds for the seeds that were run, on the paper's network) -> what this says of the claim.
WORDS = {
    (True, True): "reproduced",
    (True, False): "same direction on another model",
    (False, False): "not seen on a linear model",
    (False, True): "contradicted on the paper's network",
}


@dataclass(frozen=True)
class Verdict:
    """Whether one claim holds.

    held    None if seeds are missing
    so_far  whether it holds for the seeds that were run
    found   the numbers, in words
    seeds   number of seeds, or of pairs of runs
    model   what it was measured on
    """

    say: str
    held: bool | None
    found: str
    so_far: bool = False
    seeds: int = 0
    model: str = NETWORK

    @property
    def word(self) -> str:
        """One of WORDS."""
        if self.found == NOT_RUN:
            return NOT_RUN
        return WORDS[self.so_far, self.model.startswith(NETWORK)]


def verdict(claim: Mapping[str, Any], table: Table, theirs: Expected, done: Mapping[str, Line]) -> Verdict:
    """Whether one claim holds in these runs."""
    return replace(_verdict(claim, table, theirs, done), model=theirs.model(claim["cell"]))


def _verdict(claim: Mapping[str, Any], table: Table, theirs: Expected, done: Mapping[str, Line]) -> Verdict:
    if "between" in claim:
        return _between(claim, table, done)
    if "moves" in claim:
        return _moves(claim, table, done)
    cell = table.by_name[claim["cell"]]
    runs = runs_of(cell, done)
    if not runs:
        return Verdict(claim["say"], None, NOT_RUN)
    seeds, quantity = f"{len(runs)} of {len(cell.seeds)} seeds", claim.get("quantity", "accuracy")
    complete = len(runs) == len(cell.seeds)
    if "within" in claim:
        compared = Compared(theirs.cells[cell.name][0], tuple(value(line, quantity) for line in runs.values()))
        good = abs(compared.difference) <= claim["within"]
        found = f"{compared.mean:.2f} against {compared.printed.mean:.2f}: {compared.difference:+.2f} ({seeds})"
    elif "above" in claim:
        others = runs_of(table.by_name[claim["above"]], done)
        pairs = {seed: value(runs[seed], quantity) - value(others[seed], quantity) for seed in runs if seed in others}
        if not pairs:
            return Verdict(claim["say"], None, NOT_RUN)
        good = all(gain > 0 for gain in pairs.values())
        complete = len(pairs) == min(len(cell.seeds), len(table.by_name[claim["above"]].seeds))
        gains = sorted(pairs.values()) if len(pairs) > SEEDS else [pairs[seed] for seed in sorted(pairs)]
        shown = (f"{gain:+.2f}" for gain in (gains if len(gains) <= SEEDS else (gains[0], gains[-1])))
        listed = (", " if len(gains) <= SEEDS else " to ").join(shown)
        found = f"{sum(gain > 0 for gain in gains)} of {len(gains)} pairs ({listed})"
        return Verdict(claim["say"], (None if good and not complete else good), found, good, len(pairs))
    else:
        worst = max(value(line, quantity) for line in runs.values())
        good, found = worst <= claim["at_most"], f"{worst:.3f} ({seeds})"
    return Verdict(claim["say"], good if complete else None, found, good, len(runs))


def _between(claim: Mapping[str, Any], table: Table, done: Mapping[str, Line]) -> Verdict:
    """A claim on membership attacks; its `seeds` are shadows."""
    number = measured(claim, table, done)
    if number is None:
        return Verdict(claim["say"], None, NOT_RUN)
    low, high = claim["between"]
    good = bool(low <= number.found.value <= high)
    return Verdict(claim["say"], good if number.shadows >= number.wanted else None, str(number), good, number.shadows)


def _moves(claim: Mapping[str, Any], table: Table, done: Mapping[str, Line]) -> Verdict:
    """A claim on the direction in which classes move, with one seed."""
    points, that_way = moved(claim["moves"], table, done)
    if not points.size:
        return Verdict(claim["say"], None, NOT_RUN)
    least = claim["moves"].get("at_least", 0.0)
    right = (that_way >= least) & (that_way > 0)
    good = bool(right.all())
    found = f"{right.sum()} of {points.size} classes ({points.min():+.2f} to {points.max():+.2f} points); one seed"
    return Verdict(claim["say"], good if points.size == CLASSES else None, found, good, 1)


def ledger(line: Line) -> tuple[float, float] | None:
    """(largest, smallest) part spent of the target of a group; None for a line without a ledger.

    None also for uniform over rows that divide budgets: their deltas differ, so the common target is no group's.

    The target is the epsilon of the group; under uniform and exclude it is the strictest epsilon that takes part.
    """
    if "charged" not in line:
        return None
    settings = line["settings"]
    if settings.get("budget_of") == "row, divided" and settings["strategy"] == "uniform":
        return None
    levels, spent = line["levels"], line["spent"]
    least = settings.get("options", {}).get("threshold", 0.0) if settings["strategy"] == "exclude" else 0.0
    taking_part = [(level, used) for level, used in zip(levels, spent, strict=True) if level >= least]
    if settings["strategy"] in ("uniform", "exclude"):
        strictest = taking_part[0][0]
        taking_part = [(strictest, used) for _, used in taking_part]
    over = max(used / level for level, used in zip(levels, spent, strict=True))
    parts = [used / level for level, used in taking_part]
    return max(over, *parts), min(parts)
