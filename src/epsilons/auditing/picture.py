"""Picture: promise, spend and bounds of every audited group, on one axis."""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError
from ..files import write_text
from ..planning.display import number
from .result import AuditResult

_MARKS = (
    ("gaussian_bound", "Gaussian bound", "o", "#1f5fa8"),
    ("one_run_fdp", "one run, f-DP", "s", "#6a3d9a"),
    ("one_run", "one run", "D", "#444444"),
)

#: Marks beyond this many times the loosest promise are drawn at the edge.
_WIDEST = 4.0


def draw(findings: AuditResult, path: str | Path) -> Path:
    """Write the picture as .svg. Raises InputError for another ending."""
    from io import StringIO

    from matplotlib.figure import Figure

    file = Path(path)
    if file.suffix != ".svg":
        raise InputError(f"An audit's picture ends in .svg; {file.name!r} arrived.")
    groups = findings.groups
    figure = Figure(figsize=(8, 1.3 + 0.62 * len(groups)), layout="constrained")
    axes = figure.subplots()
    highest = [max(g.epsilon, g.gaussian_estimate, *(getattr(g, name) for name, *_ in _MARKS)) for g in groups]
    edge = min(max(highest), _WIDEST * max(g.epsilon for g in groups))
    for row, g in enumerate(groups):
        first = row == 0  # one entry per mark in the legend
        axes.barh(row, g.epsilon, height=0.62, color="none", edgecolor="#888888", label="promised" if first else None)
        axes.barh(row, g.epsilon_spent, height=0.5, color="#dbe6f2", label="spent, by the plan" if first else None)
        bound, estimate = min(g.gaussian_bound, edge), min(g.gaussian_estimate, edge)
        axes.plot([bound, estimate], [row, row], color="#1f5fa8", lw=1.2)
        axes.plot(estimate, row, "|", color="#1f5fa8", ms=12, label="Gaussian estimate" if first else None)
        for name, label, mark, color in _MARKS:
            axes.plot(min(getattr(g, name), edge), row, mark, color=color, ms=5, label=label if first else None)
        if g.violated:
            beside = axes.get_yaxis_transform()
            axes.text(1.02, row, "violated", va="center", color="#b00020", weight="bold", transform=beside)
    axes.set_yticks(range(len(groups)), [f"ε = {number(g.epsilon)}" for g in groups])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05 * edge)
    axes.set_xlabel(f"ε at the group's δ; bounds from below, {1 - findings.alpha:.0%} confidence each")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22 - 0.2 / len(groups)), ncols=3, frameon=False, fontsize=8)
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return write_text(file, text.getvalue())
