"""The figures of the paper on membership inference, from our runs: ROC curves on logarithmic axes, and AUCs by arm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from epsilons.auditing.membership.outcomes import RATES

from .figures import STYLE
from .membership_claims import PLAIN, is_membership, run_of
from .membership_report import INDIVIDUAL, attacks_of, label_of
from .results import Line
from .settings import Table

COLOURS, PLAIN_COLOURS = ("#1f5fa8", "#c2571a"), ("#b03060", "#7a7a2a")

Arms = Mapping[str, Line]


def membership_pictures(table: Table, done: Mapping[str, Line]) -> list[tuple[str, str]]:
    """(file name, caption) of each figure of a table with a run of Sample."""
    if not is_membership(table) or run_of(table.by_name.get("sample"), done) is None:
        return []
    return [(f"{table.name}_{name}.svg", caption) for name, (_, caption) in PICTURES.items()]


def draw_membership(all_tables: Mapping[str, Table], done: Mapping[str, Line], folder: Path) -> None:
    """Write the figures of every table with runs of Sample."""
    with plt.rc_context(STYLE):
        for table in all_tables.values():
            arms = {c.name: line for c in table.cells if is_membership(table) and (line := run_of(c, done)) is not None}
            for (file, _), (panels, _) in zip(membership_pictures(table, done), PICTURES.values(), strict=False):
                _save(panels, table, arms, folder / file)


def _save(panels: tuple[Callable[[Table, Arms, Axes], None], ...], table: Table, arms: Arms, path: Path) -> None:
    size = 6.4 if len(panels) == 1 else 3.9 * len(panels), 3.8
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for panel, place in zip(panels, axes[0], strict=True):
        panel(table, arms, place)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


# -- panels ----------------------------------------------------------------------------------------


def _all_targets(name: str) -> Callable[[Table, Arms, Axes], None]:
    """The ROC of each group over all targets, with its 95 % intervals, beside what the plan certifies."""

    def panel(table: Table, arms: Arms, axes: Axes) -> None:
        if _prepared(axes, table, arms, name, "all targets"):
            _groups(table, arms[name], name, axes)
            for group, power in enumerate(arms[name]["certified_curve"]):
                axes.plot(RATES, power, color=COLOURS[group], ls="--", lw=1, label=None if group else "certified")
            axes.legend(loc="lower right", fontsize=7)

    return panel


def _beside_plain(name: str) -> Callable[[Table, Arms, Axes], None]:
    """The same beside DP-SGD for the same records, all at one budget."""

    def panel(table: Table, arms: Arms, axes: Axes) -> None:
        if _prepared(axes, table, arms, name, "and DP-SGD"):
            _groups(table, arms[name], name, axes)
            for group, plain in enumerate(PLAIN):
                if plain in arms:
                    curve, auc = _curve(table, arms[plain], group)
                    label = f"{table.by_name[plain].title} (AUC {auc:.3f})"
                    axes.plot(curve["rate"], curve["found"], color=PLAIN_COLOURS[group], ls="-.", label=label)
            axes.legend(loc="lower right", fontsize=7)

    return panel


def _one_target(name: str) -> Callable[[Table, Arms, Axes], None]:
    """The ROC of each group for the first target alone."""

    def panel(table: Table, arms: Arms, axes: Axes) -> None:
        if _prepared(axes, table, arms, name, "one target"):
            _targets(arms[name], 1, axes)

    return panel


def _five_targets(table: Table, arms: Arms, axes: Axes) -> None:
    if _prepared(axes, table, arms, "sample", "five targets"):
        _targets(arms["sample"], 5, axes)


def _aucs(table: Table, arms: Arms, axes: Axes) -> None:
    """One row per arm, both groups, with intervals over targets."""
    ran = [cell for cell in table.cells if cell.name in arms]
    names = [f"{cell.title} ({arms[cell.name]['shadows']} shadows)" for cell in ran]
    for y, cell in enumerate(ran):
        line = arms[cell.name]
        for group, level in enumerate(line["levels"]):
            value, low, high = line["auc"][attacks_of(cell)[0]][group][:3]
            label = None if y else f"records of ε = {level:g}"
            bar = [[value - low], [high - value]]
            axes.errorbar(value, -y - 0.12 + 0.24 * group, xerr=bar, fmt="os"[group], color=COLOURS[group], label=label)
    axes.set_yticks([-y for y in range(len(names))], names)
    axes.set(xlabel=f"AUC of {attacks_of(table.cells[0])[0]}, 95 % over targets", ylim=(0.6 - len(names), 0.6))
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize=8)


PICTURES: dict[str, tuple[tuple[Callable[[Table, Arms, Axes], None], ...], str]] = {
    "roc": (tuple(map(_all_targets, INDIVIDUAL)), "Figure 2: ROC by group, with what the plan certifies"),
    "targets": (
        (*map(_one_target, INDIVIDUAL), _five_targets),
        "Figures 8 and 9: one target of Sample and of Scale, five of Sample",
    ),
    "dpsgd": (tuple(map(_beside_plain, INDIVIDUAL)), "Figure 10: individual budgets against DP-SGD"),
    "arms": ((_aucs,), "AUC by arm"),
}


# -- parts -----------------------------------------------------------------------------------------


def _prepared(axes: Axes, table: Table, arms: Arms, name: str, what: str) -> bool:
    """Logarithmic axes with the line of guessing; False for an arm that was not run."""
    title = table.by_name[name].title
    axes.set_title(f"{title}, {what}" if name in arms else f"{title} (not run)", loc="left", fontsize=9)
    axes.set(xscale="log", yscale="log", xlim=(1e-3, 1), ylim=(1e-3, 1.1))
    axes.set(xlabel="false-positive rate", ylabel="true-positive rate")
    axes.plot([1e-3, 1], [1e-3, 1], color="0.6", lw=0.8)
    return name in arms


def _groups(table: Table, line: Line, name: str, axes: Axes) -> None:
    for group, colour in enumerate(COLOURS):
        curve, auc = _curve(table, line, group)
        axes.fill_between(curve["rate"], curve["low"], curve["high"], color=colour, alpha=0.2, lw=0)
        label = f"ε = {label_of(table.by_name[name], line, group)} (AUC {auc:.3f})"
        axes.plot(curve["rate"], curve["found"], color=colour, label=label)


def _curve(table: Table, line: Line, group: int) -> tuple[dict[str, Any], float]:
    attack = attacks_of(table.cells[0])[0]
    return line["curve"][attack][group], line["auc"][attack][group][0]


def _targets(line: Line, count: int, axes: Axes) -> None:
    """The curves of single targets; a rate with fewer than 10 false alarms of a target is not drawn."""
    for number, target in enumerate(line["target_curves"][:count]):
        for group, (colour, curve) in enumerate(zip(COLOURS, target, strict=True)):
            label = None if number else f"ε = {line['levels'][group]:g}"
            axes.plot(curve["rate"], curve["found"], color=colour, lw=1.2 if count == 1 else 0.8, label=label)
            if count == 1:
                axes.fill_between(curve["rate"], curve["low"], curve["high"], color=colour, alpha=0.15, lw=0)
    axes.legend(loc="lower right", fontsize=7)
