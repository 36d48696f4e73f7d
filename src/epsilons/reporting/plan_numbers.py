"""A plan's spend over steps and its tables, as values for the page and the JSON."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..disclosure import MOST_ROWS
from ..planning import Plan, display
from ..planning.plan_numbers import CURVE_POINTS

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
    return display.number(epsilon) + (f" (δ = {plan.delta[group]:g})" if is_shared else "")


def curve_of(plan: Plan) -> Curve:
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


def phases_of(plan: Plan) -> tuple[PhaseTable, ...]:
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
