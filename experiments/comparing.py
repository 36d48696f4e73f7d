"""The paper's number, ours, and whether they differ by more than chance (Welch's t-test, from means and spreads)."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    cells        numbers by the cell's name     not_printed  why a cell has none
    claims       {"say", "cell"} and one of "within" (points of the paper), "above" (another cell,
                 seed by seed), "at_most" (a number); of "quantity", by default the accuracy. On membership attacks:
                 "between" (two numbers), with the keys of membership_claims.measured. On one class with another budget:
                 "moves" (the keys of classes.moved, and at_least: points)
    """

    source: str
    unit: str
    cells: Mapping[str, tuple[Printed, ...]]
    not_printed: Mapping[str, str]
    claims: Sequence[Mapping[str, Any]]


def expected(name: str, folder: Path = EXPECTED) -> Expected:
    """The content of expected/<name>.json."""
    values = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    cells = {cell: tuple(Printed(**row) for row in rows) for cell, rows in values["cells"].items()}
    return Expected(values["source"], values["unit"], cells, values["not_printed"], values["claims"])


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
        return float(values[int(inside[2])] if isinstance(values, list) else values[inside[2]])
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
    def p(self) -> float | None:
        """Welch's two-sided p for equal means; None if a spread or a number of trials is missing."""
        theirs = self.printed
        if self.sd is None or theirs.sd is None or theirs.trials is None or self.sd + theirs.sd == 0:
            return None
        return float(
            stats.ttest_ind_from_stats(
                self.mean, self.sd, len(self.values), theirs.mean, theirs.sd, theirs.trials, equal_var=False
            ).pvalue
        )

    @property
    def agrees(self) -> bool:
        """For a printed parameter: ours rounds to it, within the precision of the paper's searches."""
        half = 0.5 * 10.0 ** -(self.printed.digits or 0)
        return abs(self.difference) <= half + PAPER_PRECISION * abs(self.printed.mean)


def runs_of(cell: Cell, done: Mapping[str, Line]) -> dict[int, Line]:
    """Finished runs of a cell, by seed."""
    return {seed: done[cell.settings.named(seed)] for seed in cell.seeds if cell.settings.named(seed) in done}


@dataclass(frozen=True)
class Verdict:
    """Whether one claim holds.

    held    None if seeds are missing
    so_far  whether it holds for the seeds that were run
    found   the numbers, in words
    seeds   number of seeds, or of pairs of runs
    """

    say: str
    held: bool | None
    found: str
    so_far: bool = False
    seeds: int = 0


def verdict(claim: Mapping[str, Any], table: Table, theirs: Expected, done: Mapping[str, Line]) -> Verdict:
    """Whether one claim holds in these runs."""
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
        gains = ", ".join(f"{gain:+.2f}" for _, gain in sorted(pairs.items()))
        found = f"{sum(gain > 0 for gain in pairs.values())} of {len(pairs)} pairs ({gains})"
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
    found = f"{right.sum()} of {points.size} classes ({points.min():+.2f} to {points.max():+.2f} points)"
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
