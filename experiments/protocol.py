"""One protocol of tuning for every method: the same trials, chosen on validation data, then the test data once.

The trials of a data set are points of one grid, drawn at random and equally for all methods: half of them without
momentum, half with. Each is trained on a part of the training data and scored on the rest (`validation`). The best few
of each half get more seeds; the best mean is chosen. The chosen settings are trained on all training data, with the
same steps and batch, and only these runs read the test data. To add a data set: a section of protocol.toml.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field
from scipy import stats

from .results import RESULTS, Line, finished, is_current
from .running import run_tables
from .settings import HERE, OWN_SETTINGS, Cell, Frozen, Settings, Table, tables

PROTOCOL = HERE / "protocol.toml"
#: Seeds of trials. Those of the chosen settings begin at 0.
FIRST_SEED = 100
#: A half of the trials -> whether it has momentum.
HALVES = {"without": False, "with": True}
#: The names of chosen settings: a method's own best, or those of another run that stands beside them.
BEST, BESIDE = "best", "beside"


class Protocol(Frozen):
    """The protocol of one data set.

    settings  those that all runs have          methods  method -> its own settings
    grid      setting -> its values. `length` is lr · clip_norm / (1 − momentum): how far one clipped record moves the
              weights, so that the points mean the same at each momentum and clip norm
    trials    points per method                 finalists  points of each half that get more seeds
    validation_seeds  seeds of a finalist       seeds      seeds of the chosen settings
    beside    method -> "table cell", whose runs stand beside: the paper's own settings, or ours from before
    """

    name: str
    title: str
    note: str = ""
    settings: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    grid: dict[str, list[float]]
    trials: int
    finalists: int = 2
    validation: float = 0.2
    validation_seeds: int = 3
    seeds: int = 5
    beside: dict[str, str] = Field(default_factory=dict)

    @property
    def halves(self) -> dict[str, list[dict[str, float]]]:
        """The drawn points of each half; only one half if the grid has no momentum."""
        points = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        every = {half: [p for p in points if bool(p.get("momentum")) == moves] for half, moves in HALVES.items()}
        filled = {half: found for half, found in every.items() if found}
        coins = np.random.default_rng(0)
        drawn = {}
        for half, found in filled.items():
            rows = coins.choice(len(found), min(self.trials // len(filled), len(found)), replace=False)
            drawn[half] = [found[row] for row in sorted(rows)]
        return drawn

    @property
    def needed(self) -> int:
        """The number of runs: trials, more seeds of the finalists, and the chosen settings."""
        groups = len(self.methods) * len(self.halves)
        points = len(self.methods) * sum(map(len, self.halves.values()))
        return points + groups * (self.finalists * (self.validation_seeds - 1) + self.seeds)

    def runs(self, done: Mapping[str, Line]) -> dict[str, Settings]:
        """The runs whose settings are known already, by their names."""
        cells = (cell for stage in STAGES for cell in stage(self, done))
        return {cell.settings.named(seed): cell.settings for cell in cells for seed in cell.seeds}

    def trial(self, method: str, point: Mapping[str, float]) -> Settings:
        """The settings of one point, scored on validation data."""
        chosen = dict(point)
        if "length" in chosen:
            chosen["lr"] = chosen.pop("length") * (1 - chosen.get("momentum", 0.0)) / chosen["clip_norm"]
            chosen["lr"] = float(f"{chosen['lr']:.3g}")
        return _settings(self.settings | self.methods[method] | chosen | {"validation": self.validation})

    def table(self, cells: Iterator[Cell]) -> Table:
        return Table(name=f"protocol_{self.name}", title=self.title, note=self.note, cells=tuple(cells))


def _settings(values: dict[str, Any]) -> Settings:
    return OWN_SETTINGS.get(values.get("kind", ""), Settings).model_validate(values)


@cache
def protocols(path: Path = PROTOCOL) -> dict[str, Protocol]:
    """All protocols, by the name of their table."""
    read = tomllib.loads(path.read_text(encoding="utf-8"))
    return {f"protocol_{name}": Protocol(name=name, **values) for name, values in read.items()}


# -- stages: each depends on the results of those before -----------------------------------------------------------


def trials(protocol: Protocol, done: Mapping[str, Line]) -> Iterator[Cell]:
    """Every point with one seed."""
    for method, (half, points) in itertools.product(protocol.methods, protocol.halves.items()):
        for number, point in enumerate(points):
            yield _cell(f"{method}-{half}-{number}", protocol.trial(method, point), (FIRST_SEED,))


def finalists(protocol: Protocol, done: Mapping[str, Line]) -> Iterator[Cell]:
    """The best points of each half, with more seeds."""
    seeds = tuple(FIRST_SEED + i for i in range(protocol.validation_seeds))
    for _, cells in _ranked(trials(protocol, done), done):
        yield from (_cell(cell.name, cell.settings, seeds) for cell in cells[: protocol.finalists])


def finals(protocol: Protocol, done: Mapping[str, Line]) -> Iterator[Cell]:
    """The settings that were chosen for each half, on all training data."""
    for name, cells in _ranked(finalists(protocol, done), done):
        yield _cell(name, cells[0].but(validation=0.0).settings, tuple(range(protocol.seeds)))


STAGES: tuple[Callable[[Protocol, Mapping[str, Line]], Iterator[Cell]], ...] = (trials, finalists, finals)


def _cell(name: str, settings: Settings, seeds: tuple[int, ...]) -> Cell:
    return Cell(name=name, title=name, settings=settings, seeds=seeds)


def _ranked(cells: Iterator[Cell], done: Mapping[str, Line]) -> Iterator[tuple[str, list[Cell]]]:
    """("method-half", its cells, best first), for those of which no run is missing."""
    for name, group in itertools.groupby(cells, key=lambda cell: cell.name.rpartition("-")[0]):
        found = list(group)
        if all(len(_by_seed(cell, done)) == len(cell.seeds) for cell in found):
            yield name, sorted(found, key=lambda cell: -_score(cell, done))


def _by_seed(cell: Cell, done: Mapping[str, Line]) -> dict[int, float]:
    found = {seed: done.get(cell.settings.named(seed)) for seed in cell.seeds}
    return {seed: 100 * line["accuracy"] for seed, line in found.items() if line is not None}


def _score(cell: Cell, done: Mapping[str, Line]) -> float:
    return statistics.fmean(_by_seed(cell, done).values())


def current(folder: Path = RESULTS) -> dict[str, Line]:
    """Finished runs with the coins and noise of this version: only these are compared with each other."""
    return {name: line for name, line in finished(folder).items() if is_current(line)}


def run_protocol(protocol: Protocol, folder: Path = RESULTS, **how: Any) -> list[str]:
    """Run what is missing, stage by stage; returns one sentence per run that failed."""
    for stage in STAGES:
        table = protocol.table(stage(protocol, current(folder)))
        if failures := run_tables([table], outdated=True, folder=folder, **how):
            return failures
    return []


# -- what came out -------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A mean over pairs with the same seed, and half the width of its 95 % t interval: None below three pairs."""

    mean: float
    half: float | None
    pairs: int


def outcome(protocol: Protocol, done: Mapping[str, Line]) -> dict[tuple[str, str], dict[int, float]]:
    """(method, "without" | "with" | "best" | "beside") -> seed -> test accuracy in %.

    The best of a method is that of its halves whose chosen settings have the higher validation accuracy.
    """
    scores: dict[tuple[str, str], dict[int, float]] = {}
    validated = {name: _score(cells[0], done) for name, cells in _ranked(finalists(protocol, done), done)}
    for cell in sorted(finals(protocol, done), key=lambda cell: validated[cell.name]):
        method, _, half = cell.name.rpartition("-")
        scores[method, half] = scores[method, BEST] = _by_seed(cell, done)  # the best comes last
    for method, where in protocol.beside.items():
        table, name = where.split()
        scores[method, BESIDE] = _by_seed(tables()[table].by_name[name], done)
    return scores


def contrast(
    weights: Mapping[tuple[str, str], float], scores: Mapping[tuple[str, str], Mapping[int, float]]
) -> Interval | None:
    """The weighted sum of some rows of `outcome`, seed by seed; None without a seed that all have.

    best against best:           {("scale", "best"): 1, ("dpsgd", "best"): -1}
    more than half is momentum:  above 0 is {("scale", "beside"): .5, ("dpsgd", "beside"): -.5,
                                 ("scale", "without"): -1, ("dpsgd", "without"): 1}
    """
    rows = [scores.get(row, {}) for row in weights]
    seeds = sorted(set.intersection(*(set(row) for row in rows)))
    if not seeds:
        return None
    values = [sum(w * row[seed] for w, row in zip(weights.values(), rows, strict=True)) for seed in seeds]
    if len(values) < 3:
        return Interval(statistics.fmean(values), None, len(values))
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.fmean(values), float(half), len(values))
