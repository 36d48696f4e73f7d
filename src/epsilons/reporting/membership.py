"""The result of a membership attack as a report shows it: checked values, a picture and rows of text.

The result is a file of JSON (`auditing.membership`). It is shown in internal pages only: in that of the attack, and in
the internal report of the attacked run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..ledger.run_folder import Strict
from ..planning import display

#: More groups than this are not drawn: evenly spaced ones are, from the strictest to the loosest.
MOST_DRAWN = 4

#: How a sentence about one group begins.
GROUP = "epsilon "

HEIGHT = 320  # pixels of the plot


class Estimate(Strict):
    """A value and its 95 % interval; low and high are None where nothing can be said."""

    value: float | None
    low: float | None
    high: float | None


class Found(Strict):
    """The true-positive rate at one false-positive rate; None if there were too few false alarms."""

    rate: float
    found: Estimate | None
    certified: float


class Roc(Strict):
    """Points of an ROC, with 95 % intervals."""

    rate: list[float]
    found: list[float]
    low: list[float]
    high: list[float]


class Curve(Strict):
    """Points of a certified curve: no attack has a higher power."""

    rate: list[float]
    power: list[float]


class Outcome(Strict):
    """One attack on one group."""

    attack: str
    group: int
    auc: Estimate
    auc_of_others: Estimate
    found: list[Found]
    share_of_certified: float | None
    exceeds_certified: bool
    roc: Roc


class Group(Strict):
    """A group of records, or several merged."""

    label: str
    records: int
    certified_auc: float
    certified: Curve


class Difference(Strict):
    """AUC of a looser group minus that of a stricter group."""

    attack: str
    strict: int
    loose: int
    auc: Estimate
    of_others: Estimate
    ordered: float | None
    p_value: float | None


class Result(Strict):
    """membership.json, as far as it is shown."""

    shadows: int
    records: int
    dealt_at_random: bool
    accuracy: float | None
    suppressed: bool
    setting: dict[str, Any]
    sentences: list[str]
    not_covered: str
    groups: list[Group]
    attacks: list[Outcome]
    differences: list[Difference]
    placebo: Result | None

    @property
    def names(self) -> list[str]:
        """The attacks, in their order."""
        return list(dict.fromkeys(one.attack for one in self.attacks))

    @property
    def of_groups(self) -> list[str]:
        """The sentences that are about one group each."""
        return [_symbol(sentence) for sentence in self.sentences if sentence.startswith(GROUP)]

    @property
    def further(self) -> list[str]:
        """The other sentences, without the one that is shown apart."""
        rest = [sentence for sentence in self.sentences if not sentence.startswith(GROUP)]
        return [_symbol(sentence) for sentence in rest if sentence != self.not_covered]

    def placebo_of(self, wanted: Difference) -> Estimate | None:
        """The same difference where all records have one budget."""
        pairs = self.placebo.differences if self.placebo else []
        same = (one.auc for one in pairs if (one.attack, one.strict, one.loose) == _key(wanted))
        return next(same, None)


def _symbol(sentence: str) -> str:
    return sentence.replace(GROUP, "ε ")


def _key(one: Difference) -> tuple[str, int, int]:
    return one.attack, one.strict, one.loose


# -- the picture -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A tick: its place in percent of the width, or in pixels from the top, and its text."""

    at: float
    text: str


@dataclass(frozen=True)
class Drawn:
    """One group's lines, as paths in a box of 1000 x 1000. certified is "" where it is suppressed."""

    label: str
    attacked: str
    interval: str
    certified: str


@dataclass(frozen=True)
class Picture:
    """ROCs of one attack on logarithmic axes."""

    attack: str
    lines: tuple[Drawn, ...]
    x_ticks: tuple[Mark, ...]
    y_ticks: tuple[Mark, ...]
    guessing: str
    height: int = HEIGHT


def picture(result: Result, attack: str | None = None) -> Picture:
    """The ROC of each group under one attack (the first by default), beside its certified curve."""
    attack = attack or result.names[0]
    outcomes = [one for one in result.attacks if one.attack == attack]
    outcomes = [outcomes[index] for index in _spread(len(outcomes))]
    lowest = min((rate for one in outcomes for rate in one.roc.rate), default=0.1)
    powers = math.floor(math.log10(min(lowest, 0.1)))
    axes = _Axes(float(powers))
    lines = tuple(_drawn(one, result.groups[one.group], axes, result.suppressed) for one in outcomes)
    ticks = [(power / powers, _percent(10.0**power)) for power in range(powers, 1)]
    return Picture(
        attack=attack,
        lines=lines,
        x_ticks=tuple(Mark(100 * (1 - part), text) for part, text in ticks),
        y_ticks=tuple(Mark(HEIGHT * part, text) for part, text in ticks),
        guessing=axes.path([10.0**powers, 1.0], [10.0**powers, 1.0]),
    )


@dataclass(frozen=True)
class _Axes:
    """Both axes from 10^power to 1."""

    power: float

    def path(self, rates: Sequence[float], values: Sequence[float]) -> str:
        points = [self._point(rate, value) for rate, value in zip(rates, values, strict=True)]
        return "M" + "L".join(points) if points else ""

    def band(self, rates: Sequence[float], low: Sequence[float], high: Sequence[float]) -> str:
        there, back = self.path(rates, high), self.path(rates[::-1], low[::-1])
        return f"{there}L{back[1:]}Z" if there else ""

    def _point(self, rate: float, value: float) -> str:
        return f"{1000 * (1 - self._part(rate)):.1f},{1000 * self._part(value):.1f}"

    def _part(self, value: float) -> float:
        """0 at 1, 1 at the lowest value of the axis."""
        lowest = 10.0**self.power
        return math.log10(min(max(value, lowest), 1.0)) / self.power


def _drawn(one: Outcome, group: Group, axes: _Axes, suppressed: bool) -> Drawn:
    roc, curve = one.roc, group.certified
    lowest = 10.0**axes.power
    inside = [(rate, power) for rate, power in zip(curve.rate, curve.power, strict=True) if rate >= lowest * 0.999]
    return Drawn(
        label=group.label,
        attacked=axes.path([*roc.rate, 1.0], [*roc.found, 1.0]) if roc.rate else "",
        interval=axes.band(roc.rate, roc.low, roc.high),
        certified="" if suppressed else axes.path(*(zip(*[*inside, (1.0, 1.0)], strict=True))),
    )


def _spread(count: int) -> list[int]:
    """All indices, or MOST_DRAWN of them, evenly spaced."""
    most = min(count, MOST_DRAWN)
    return sorted({round(index * (count - 1) / max(most - 1, 1)) for index in range(most)})


def _percent(value: float) -> str:
    return f"{100 * value:g} %"


# -- text of the tables ------------------------------------------------------------------------------------------------


def number(value: float | None, places: int = 4) -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else f"{value:.{places}f}"


def signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.4f}".replace("-", "−")


def interval(estimate: Estimate, show: Callable[[float | None], str] = number) -> str:
    """The interval of an estimate in words."""
    if estimate.low is None or estimate.high is None:
        return "no interval"
    return f"{show(estimate.low)} to {show(estimate.high)}"


def percent(value: float | None) -> str:
    """A rate in percent, with three digits."""
    return "–" if value is None else f"{100 * value:.3g} %"


def bound(value: float) -> str:
    """An upper bound between 0 and 1, rounded up to three places.

    >>> bound(0.5401), bound(1.0)
    ('0.541', '1.000')
    """
    return f"{math.ceil(1000 * value - 1e-9) / 1000:.3f}"


def bound_percent(rate: float) -> str:
    """An upper bound on a rate in percent, rounded up to three digits.

    >>> bound_percent(0.0843123), bound_percent(0.0)
    ('8.44 %', '0 %')
    """
    return f"{display.round_up(100 * rate, 3):.3g} %"


def facts(result: Result) -> Mapping[str, str]:
    """How the shadows were made, by name."""
    setting = result.setting
    budgets = "assigned at random" if result.dealt_at_random else "chosen, or not known to be assigned at random"
    named = {
        "shadow models": f"{result.shadows:,}, each trained on a random half of {result.records:,} records",
        "how": setting.get("why"),
        "model": setting.get("model"),
        "steps": setting.get("steps"),
        "seed": setting.get("seed"),
        "population": setting.get("population"),
        "mean accuracy": None if result.accuracy is None else f"{percent(result.accuracy)} on the population",
        "budgets": budgets,
        "placebo": None if result.placebo is None else "DP-SGD at the strictest budget, with the same coins",
    }
    return {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in named.items() if value}
