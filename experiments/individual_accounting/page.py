"""The tables of the results page, and the figure of active records."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from ..comparing import by_seed, differences, runs_of, titled
from ..results import Line
from ..settings import Table

#: (cell, the cell that it is compared with, what the difference shows)
PAIRS = (
    ("full-filter", "full-plain", "filter"),
    ("full-filter-40", "full-plain", "filter, less noise"),
    ("full-filter-30", "full-plain", "filter, still less noise"),
    ("full-filter-wide", "full-plain-wide", "filter, clip norm not tuned"),
    ("full-assigned", "full-filter", "0.31 for half of the records, with the filter"),
    ("full-plain-assigned", "full-plain", "0.31 for half of the records, without a filter"),
    ("full-two-left", "full-two-split", "two models: the first, on one budget"),
    ("cnn-filter", "cnn-plain", "network: filter"),
    ("cnn-assigned", "cnn-filter", "network: 0.31 for half of the records, with the filter"),
    ("sampled-renyi-182", "sampled-rdp", "filter, same accountant"),
    ("sampled-renyi-160", "sampled-rdp", "filter, less noise, same accountant"),
    ("sampled-renyi-133", "sampled-rdp", "filter, still less noise, same accountant"),
    ("sampled-renyi-182", "sampled-pld", "filter, against the tighter accountant"),
    ("sampled-count-182", "sampled-pld", "count, same accountant"),
    ("sampled-pld-31", "sampled-pld", "0.31 for half of the records, without a filter"),
    ("sampled-renyi-31", "sampled-renyi-182", "0.31 for half of the records, with the filter"),
    ("tiers-renyi-182", "tiers-rdp", "filter, same accountant"),
    ("tiers-renyi-182", "tiers-pld", "filter, against the tighter accountant"),
    ("tiers-count-182", "tiers-pld", "count, same accountant"),
)


def page(table: Table, done: Mapping[str, Line]) -> str:
    """Differences with the same seeds, and what the records spent; "" without any run."""
    parts = [differences(table, done, PAIRS, "accuracies[0]"), _second_models(table, done), _hindsight(table, done)]
    return "\n\n".join(part for part in parts if part)


def _second_models(table: Table, done: Mapping[str, Line]) -> str:
    rows = []
    for cell in table.cells:
        if cell.settings.options.get("runs", 1) > 1 and runs_of(cell, done):
            scores = [list(by_seed(cell, done, f"accuracies[{run}]").values()) for run in (0, 1)]
            rows.append([cell.title, *(f"{statistics.fmean(run):.2f}" for run in scores), str(len(scores[0]))])
    return titled("A cap across two runs", ["two models on one budget", "first", "second", "seeds"], rows)


def _hindsight(table: Table, done: Mapping[str, Line]) -> str:
    rows = []
    for cell in table.cells:
        lines = [line for line in runs_of(cell, done).values() if "part_spent" in line]
        if lines:
            parts = [f"{statistics.fmean(line['part_spent'][i] for line in lines):.2f}" for i in range(3)]
            out = 100 * statistics.fmean(line["used_up"] for line in lines)
            most = max(line["largest_part"] for line in lines)
            rows.append([cell.title, *parts, f"{out:.1f} %", f"{most:.5f}"])
    head = ["part of the own ε spent", "10 % of records below", "median", "90 % below", "used up", "largest"]
    return titled("What the records spent, in hindsight", head, rows)


def active_records(table: Table, done: Mapping[str, Line], axes: Any) -> None:
    """The part of the records that still contribute, over the steps: the paper's figure. Means over seeds."""
    for colour, name in (("C0", "full-filter"), ("C1", "full-assigned")):
        cell = table.by_name[name]
        lines = list(runs_of(cell, done).values())
        levels = lines[0]["levels"] if lines else []
        for group, (level, style) in enumerate(zip(levels, ("-", "--"), strict=False)):
            whole = 100 / statistics.fmean(line["active"][0][group] for line in lines)
            steps = range(len(lines[0]["active"]))
            parts = [whole * statistics.fmean(line["active"][step][group] for line in lines) for step in steps]
            others = ", 0.3 and 0.31 given" if len(levels) > 1 else " for all"
            label = f"ε = {level:g}{others} ({len(lines)} of {len(cell.seeds)} seeds)"
            axes.plot([step + 1 for step in steps], parts, style, color=colour, label=label)
    axes.set(xlabel="steps", ylabel="% of the records active", ylim=(85, 101))
    axes.legend(loc="lower left")
