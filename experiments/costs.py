"""What a missing run costs, from the recorded seconds of runs like it: hours of one core."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from .protocol import protocols
from .results import RESULTS, Line, finished, is_complete, is_current
from .settings import RECORDS, MembershipSettings, Settings, tables


class Listed(NamedTuple):
    """One table, and what its missing runs cost.

    done     runs that are finished         current  of these, runs with the coins and noise of this version
    needed   all runs
    hours    of one core, that the missing runs take
    unknown  missing runs that no finished run is like; `hours` is without them
    """

    table: str
    title: str
    done: int
    current: int
    needed: int
    hours: float
    unknown: int


def listed(folder: Path = RESULTS) -> list[Listed]:
    """All tables and protocols."""
    done = finished(folder)
    rates = speeds(done.values())
    rows = []
    for table in tables().values():
        runs = {cell.settings.named(seed): cell.settings for cell in table.cells for seed in cell.seeds}
        rows.append(_listed(table.name, table.title, runs, len(runs), done, rates))
    for name, protocol in protocols().items():
        runs = protocol.runs(done)
        rows.append(_listed(name, protocol.title, runs, protocol.needed, done, rates))
    return rows


def _listed(
    name: str,
    title: str,
    runs: Mapping[str, Settings],
    needed: int,
    done: Mapping[str, Line],
    rates: Mapping[tuple[str, ...], float],
) -> Listed:
    complete = {run for run in runs if run in done and is_complete(done[run])}
    seconds = [hours_of(settings, rates) for run, settings in runs.items() if run not in complete]
    known = [one for one in seconds if one is not None]
    current = sum(is_current(done[run]) for run in complete)
    later = needed - len(runs) if known else 0  # runs of a protocol whose settings are not chosen yet
    hours = sum(known) + (later * statistics.fmean(known) if later else 0.0)
    return Listed(name, title, len(complete), current, needed, hours, len(seconds) - len(known))


def speeds(lines: Iterable[Line]) -> dict[tuple[str, ...], float]:
    """(data set, model, kind) -> median seconds of one core per record of an expected batch."""
    found: dict[tuple[str, ...], list[float]] = {}
    for line in lines:
        settings, threads = line["settings"], line["machine"].get("threads") or 1
        size = line.get("steps", 0) * settings["batch_size"] * max(line.get("shadows", 1), 1)
        if size and "updates_timed" in line and line["updates_timed"] < line["steps"]:
            continue  # continued after an interruption
        if size:
            seconds = threads * line["wall_seconds"]
            for key in _keys(settings["kind"], settings["dataset"], settings["model"]):
                found.setdefault(key, []).append(seconds / size)
    return {key: statistics.median(values) for key, values in found.items()}


def _keys(kind: str, dataset: str, model: str) -> list[tuple[str, ...]]:
    """What runs have in common that cost about as much per record, closest first."""
    return [(dataset, model, kind), (dataset, model)]


def hours_of(settings: Settings, rates: Mapping[tuple[str, ...], float]) -> float | None:
    """Hours of one core; None if no finished run is like these settings."""
    recipe = settings.recipe(RECORDS.get(settings.dataset, 25_000))
    shadows = settings.shadows if isinstance(settings, MembershipSettings) else 1
    for key in _keys(settings.kind, settings.dataset, settings.model):
        if key in rates:
            return rates[key] * recipe.steps * recipe.batch_size * shadows / 3600
    return None
