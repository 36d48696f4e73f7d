"""The ROC of each group on logarithmic axes, beside what the plan certifies."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...errors import InputError
from ...figures import new_figure, save_figure
from .intervals import RATES
from .outcomes import GroupRow
from .result import MembershipResult

#: More groups than this are not drawn: evenly spaced ones are, from the strictest to the loosest.
MOST_DRAWN = 6

_COLOURS = ("#1f5fa8", "#c2571a", "#3a7d44", "#6a3d9a", "#8c6d1f", "#444444")


def draw(result: MembershipResult, path: str | Path, attack: str | None = None) -> Path:
    """Draw the ROC of each group: the attack's with its 95 % intervals, the certified curve, and guessing.

    path    of an .svg, .png or .pdf file; only its owner may read it
    attack  by default the first one of the result

    A rate with fewer than 10 false alarms is not drawn. Where some group has fewer than 20 records, the certified
    curves are not drawn, because they were computed from all budgets together.

    Raises InputError for another ending or attack, RunError if the file cannot be written.
    """
    attack = result.names[0] if attack is None else attack
    if attack not in result.names:
        raise InputError(f"The result has the attacks {', '.join(result.names)}, got {attack!r}.")
    figure, axes = new_figure(6.4, 4.8)
    lowest = 1.0
    count = len(result.rows)
    chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_DRAWN)).round().astype(int))
    for row, colour in zip(chosen.tolist(), _COLOURS, strict=False):
        roc, shown = result.of(attack, row).roc, result.rows[row]
        if len(roc.rate):
            lowest = min(lowest, float(roc.rate[0]))
        axes.fill_between(roc.rate, roc.low, roc.high, color=colour, alpha=0.2, lw=0)
        axes.plot(roc.rate, roc.found, color=colour, label=_label(shown))
        if not result.suppressed:
            axes.plot(RATES, shown.certified.power, color=colour, ls="--", lw=1.2)
    lowest = min(lowest, 0.1)
    axes.plot([lowest, 1], [lowest, 1], color="#888888", lw=0.9, label="guessing")
    if not result.suppressed:
        axes.plot([], [], color="#444444", ls="--", lw=1.2, label="no attack above (certified)")
    axes.set(xscale="log", yscale="log", xlim=(lowest, 1), ylim=(lowest, 1.1))
    axes.set_xlabel("false-positive rate")
    axes.set_ylabel("true-positive rate")
    axes.set_title(f"{attack}, {result.shadows:,} shadow models; shaded: 95 % intervals", fontsize=10, loc="left")
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    return save_figure(figure, Path(path))


def _label(row: GroupRow) -> str:
    return f"ε {row.label}" if row.epsilon is None else f"ε = {row.label}"
