"""The sentences of the page of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..core.disclosure import MOST_ROWS, DisplayRow, of_unit, risk_of
from ..core.mechanism import Unit
from ..planning import Plan, display
from ..planning.plan_numbers import CURVE_POINTS, SHARES
from .sentences import MOST_LISTED, listed, strategy

#: The name of a plan with options, or of a strategy of the caller's, at the top of narrow columns.
THIS_PLAN = "this plan"

_EXPLAINED = {
    "uniform": "Everyone gets the protection that the strictest budget asks for. Larger budgets stay unused.",
    "exclude": "Records with a budget below the threshold are left out. All others get the protection of the strictest "
    "budget among them.",
    "scale": "A larger budget lets a record's contribution be longer. Everyone is drawn equally often.",
    "scale-arithmetic": "Scale as published: a larger budget lets a record's contribution be longer.",
    "sample": "A larger budget lets a record be drawn more often.",
    "mix": "Between Scale and Sample: a larger budget lets a record be drawn more often, and its contribution be "
    "longer.",
    "sequential": "In each phase, only records that have budget left are drawn.",
}


def short_name(plan: Plan) -> str:
    """The name of a plan's strategy where there is little room."""
    return THIS_PLAN if plan.options or plan.strategy not in _EXPLAINED else plan.strategy


def explained(name: str, plan: Plan) -> str:
    """What a strategy does with budgets."""
    text = _EXPLAINED.get(plan.strategy, "A strategy of your own. Its plan is certified like the others.")
    return of_unit(f"{strategy(plan)}: {text}" if name == THIS_PLAN else text, plan.unit)


def lead(plan: Plan, rows: Sequence[DisplayRow], counted: bool = False) -> tuple[str, ...]:
    """The first paragraphs. counted: the page also says who of the data takes part"""
    one, many = plan.unit, f"{plan.unit}s"
    declared = plan.adjacency == SHARES
    source = "the declared shares" if declared else "the list of budgets"
    counts = [row.records for row in rows if row.records is not None]
    total = f"{sum(counts):,} {many}" if len(counts) == len(rows) else f"fewer than 20 {many}"
    source += ". Counts of who takes part are of the ids in the data" if counted else " alone"
    first = f"A plan to train on {total}. Nothing was trained yet: this page follows from {source}."
    second = (
        f"Each {one} has a privacy budget ε: a limit on how much anyone can learn about this one {one} from everything "
        "that the training will release. A smaller ε protects more."
    )
    if len(rows) <= MOST_LISTED and not any(row.merged for row in rows):
        second += f" {_promises(rows)}."
    runs = f"{plan.runs:,} runs would follow the plan, each with" if plan.runs > 1 else "The training would make"
    if plan.select is not None:
        runs = (
            f"A secret number of runs, {plan.select.mean:g} in expectation, would be made, and the best kept; each has"
        )
    third = (
        f"{runs} {plan.steps:,} steps, each on {plan.batch_size:,.6g} {many} in expectation, drawn at random. The plan "
        f"is certified: under the strategy {strategy(plan)} no {one} can spend more than promised, however the "
        "training goes."
    )
    return first, second, third


def _promises(rows: Sequence[DisplayRow]) -> str:
    parts = [
        f"{row.records:,} are promised ε\u00a0=\u00a0{row.label}" + (f" (“{row.tier}”)" if row.tier else "")
        for row in rows
    ]
    return listed(parts)


def not_covered(plan: Plan, read_off: str | None, seeded: bool) -> tuple[str, ...]:
    """What the guarantee will not cover, one point each."""
    one, many = plan.unit, f"{plan.unit}s"
    points = [
        f"Other runs on the same {many}"
        + (f" than the {display.runs_of(plan)} of this plan." if display.runs_of(plan) else ", tuning among them. ")
        + "Their ε add up.",
        f"What many {many} share: a model can learn that, with or without any one of them.",
        f"Scores on private data, and telling one content of a {one} from another, which costs twice the ε.",
    ]
    if plan.adjacency == SHARES:
        points.append("The declared shares and their number: they were declared as not derived from these data.")
    else:
        points.append(f"That a {one} is on the list: the number of {many} and the list of budgets count as public.")
    if one == "record":
        points.append("Several rows of one person: each row is protected separately, and their ε add up.")
    if read_off:
        points.append(f"What was read off the data: {read_off}. Replace it by what is known without looking.")
    if seeded:
        points.append("Anyone who knows the seed of the config: it undoes the noise.")
    return tuple(points)


# -- Several plans side by side: what differs, read off the cells that are shown

PROMISED, COUNT, SHARE, NOISE = "Promised ε", "How many", "Share of the signal", "Noise"
INFLUENCE = "Influence"
BY_PLAN, BY_PROMISE = "Right guesses of 100 under the plan", "Right guesses of 100 by the promise"
HIDDEN = (
    "Rare tiers are hidden, and so is all noise that was computed with them: fewer than 20 records hold some budget. "
    "For internal use, plan.json and epsilons compare --json hold the numbers."
)


#: Of each plan: title -> tier -> cell.
Columns: TypeAlias = Sequence[Mapping[str, Mapping[str, str]]]


def compared(names: Sequence[str], columns: Columns, unit: Unit) -> str:
    """Which plan protects each tier best, or costs the strictest and the smallest tier most, by what is shown."""
    tiers = [tier for tier in columns[0][COUNT] if all(tier in column[COUNT] for column in columns)]
    sizes = {tier: min(_numbers([column[COUNT][tier] for column in columns]), default=0.0) for tier in tiers}
    smallest = min(filter(sizes.__getitem__, tiers), key=sizes.__getitem__, default=None)
    hidden = "" if all(NOISE in column for column in columns) else of_unit(HIDDEN, unit)
    if smallest is None:
        return f"{hidden} The plans have no tier in common that is shown.".lstrip()
    said = [hidden, _least_odds(names, columns, tiers)]
    strictest = tiers[0]  # rows are strictest first
    if strictest != smallest:
        costs = "; ".join(_costs(names, columns, strictest))
        said.append(
            f"The strictest tier{' that is shown' if hidden else ''} is {_called(strictest, columns)}: {costs}."
        )
    said.append(f"The smallest tier{' that is shown' if hidden else ''} is {_called(smallest, columns)}")
    costs = "; ".join(_costs(names, columns, smallest))
    more = " or more" if len({column[COUNT][smallest] for column in columns}) > 1 else ""
    return f"{' '.join(filter(None, said))} ({sizes[smallest]:,.0f} {unit}s{more}): {costs}."


def _called(tier: str, columns: Columns) -> str:
    """A tier by its name; without one it is its epsilon."""
    return tier if any(column.get(PROMISED, {}).get(tier, tier) != tier for column in columns) else f"ε = {tier}"


def _least_odds(names: Sequence[str], columns: Columns, tiers: Sequence[str]) -> str:
    """The plan under which guesses about a tier are right least often, for each tier; "" where no odds are shown."""
    least: dict[str, list[str]] = {}
    for tier in tiers:
        odds = (_extreme(names, columns, title, tier, min) for title in (BY_PLAN, BY_PROMISE))
        if found := next(filter(None, odds), None):
            how = f"under {found[0]}" if found[0] else "the same under all"
            least.setdefault(how, []).append(_called(tier, columns))
    said = "; ".join(f"{how} for {listed(those)}" for how, those in least.items())
    return f"Right guesses of 100, in whole numbers, are fewest: {said}." if said else ""


def _costs(names: Sequence[str], columns: Columns, tier: str) -> Iterator[str]:
    """Under which plan a tier is guessed most often, and where its influence and its share of a signal are smallest."""
    odds = (_extreme(names, columns, title, tier, max) for title in (BY_PLAN, BY_PROMISE))
    if found := next(filter(None, odds), None):
        how = f"most under {found[0]}" if found[0] else "as many under all"
        yield f"right guesses about it, in whole numbers, are {how} ({found[1]})"
    for title, what in ((INFLUENCE, "influence over all steps"), (SHARE, "share of the signal of its plan")):
        if found := _extreme(names, columns, title, tier, min):
            how = f"is smallest under {found[0]}" if found[0] else "is the same under all"
            yield f"its {what} {how} ({found[1]})"


def _extreme(
    names: Sequence[str], columns: Columns, title: str, tier: str, pick: Callable[[list[float]], float]
) -> tuple[str, str] | None:
    """The plans with the smallest or largest number, "" for all, and the cells; None where a number is missing."""
    cells = [column.get(title, {}).get(tier, "–") for column in columns]
    found = _numbers(cells)
    if len(found) < len(names):
        return None
    those = [name for name, one in zip(names, found, strict=True) if one == pick(found)]
    shown = ", ".join(f"{name} {cell}" for name, cell in zip(names, cells, strict=True))
    return "" if len({*found}) == 1 else listed(those), f"{title[0].lower()}{title[1:]}: {shown}"


def _numbers(cells: Sequence[str]) -> list[float]:
    """Those of the cells that hold one."""
    found = [cell.removesuffix("\u00a0%").replace(",", "") for cell in cells]
    return [float(cell) for cell in found if cell.replace(".", "").isdigit()]


# -- A plan's spend over steps and its tables, as values for the page and the JSON

#: Number of lines in the picture, and of groups in the plan's table if there are very many.
MOST_LINES = 6


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


def _sampled_groups(plan: Plan, most: int) -> list[int]:
    """All groups, or a few evenly spaced ones if there are more than `most`."""
    groups = len(plan.epsilons)
    if groups <= most:
        return list(range(groups))
    return [round(i * (groups - 1) / (MOST_LINES - 1)) for i in range(MOST_LINES)]


def _label(plan: Plan, group: int) -> str:
    epsilon = plan.epsilons[group]
    is_shared = int((plan.epsilons == epsilon).sum()) > 1  # by groups with another delta
    further = f" (δ = {plan.delta[group]:g})" if is_shared else risk_of(plan.groups, group)
    return display.number(epsilon) + further


def curve_of(plan: Plan) -> Curve:
    """Upper bounds at as many steps as the plan's own spend curve has."""
    groups = _sampled_groups(plan, MOST_LINES)
    done = [0] * len(plan.phases)
    steps, points = [0], [plan.spent_after(done, groups)]
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


def phases_of(plan: Plan, labels: Sequence[str] | None = None) -> tuple[PhaseTable, ...]:
    """labels: names of the groups, if they are not their budgets."""
    tables = []
    for phase in plan.phases:
        table_rows = []
        for group in _sampled_groups(plan, MOST_ROWS):
            rate, noise = float(phase.sample_rate[group]), float(phase.noise_multiplier[group])
            table_rows.append(
                PhaseRow(
                    label=_label(plan, group) if labels is None else labels[group],
                    sample_rate=rate,
                    clip_norm=float(phase.clip_norm[group]),
                    weight=float(phase.weight[group]),
                    noise_multiplier=noise if rate > 0 else None,
                    influence=phase.steps * rate / noise,
                )
            )
        tables.append(PhaseTable(phase.steps, float(phase.expected_batch), float(phase.noise_std), tuple(table_rows)))
    return tuple(tables)
