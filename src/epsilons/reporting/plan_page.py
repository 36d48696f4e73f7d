"""The page of a plan, for those who decide before training: what each tier costs under each strategy.

It follows from the plan alone. Where fewer than 20 records hold some budget, it shows promises and bounds that follow
from them, and nothing that was solved from all budgets together (`disclosure`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from .._version import __version__
from ..accounting import DESCRIPTIONS
from ..budgets.budgets import Budgets, is_large
from ..core.disclosure import DisplayRow, display_rows, has_small_cells, shown_delta
from ..core.mechanism import FloatArray
from ..errors import PlanError
from ..ledger import run_json
from ..planning import Advice, Plan, Recipe, advise, balance, display, risk_profile
from ..planning.class_balance import TIED, Classes
from ..planning.plan_numbers import SHARES
from . import plan_words as words
from .sentences import strategy

#: More tiers than this are merged into so many rows.
MOST_ROWS = 8
RIGHT = "Right guesses of 100"
#: With more groups than this, merged rows have bounds that follow from their promises: a profile takes 0.02 s.
MOST_PROFILES = 40


@dataclass(frozen=True)
class About:
    """What the plan does not know: its name, the names of tiers, what a config states, facts for the last section."""

    name: str | None = None
    tiers: Mapping[str, float] | None = None
    simulated: bool = False
    seeded: bool = False
    stated: run_json.About | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    read_off: str | None = None
    counted: bool = False  # facts count who of the data takes part


@dataclass(frozen=True)
class Tier:
    """One row: a tier, or several merged.

    most     epsilon
    right    of 100 guesses under the plan, by the promise where that is not shown; None where the row shows no bound
    promise  the same by the promise alone
    limits   of a tier by risk
    advantage  delta of the plan's profile at epsilon 0, which right follows from; None where it is not shown
    bounds   of merged tiers that the row names: what each promise allows, in words, in the place of right and promise
    """

    label: str
    most: float
    name: str | None
    count: int | None
    spent: str
    right: int | None
    promise: int | None
    sentence: str | None
    limits: tuple[display.Limit, ...]
    bounds: str = ""
    advantage: float | None = None

    @property
    def promised(self) -> str:
        """Right guesses by the promise, in a table; "" where there are none."""
        return self.bounds or ("" if self.promise is None else str(self.promise))

    @property
    def key(self) -> str:
        """What tables of several plans call it: its name, as far as it has one."""
        return self.name or self.label


@dataclass(frozen=True)
class Comparison:
    """A table of tiers by strategies; rows: the tier's label, one cell per strategy."""

    title: str
    rows: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Bar:
    """A strategy's signal, relative to uniform, and how much of it comes from each tier, in percent of the widest."""

    name: str
    signal: float
    parts: tuple[float, ...]


@dataclass(frozen=True)
class PlanPage:
    """All that the page says."""

    about: About
    plan: Plan
    date: str
    lead: tuple[str, ...]
    tiers: tuple[Tier, ...]
    strategies: tuple[str, ...]
    explained: Mapping[str, str]
    comparisons: tuple[Comparison, ...]
    bars: tuple[Bar, ...]
    verdict: str | None
    is_suppressed: bool
    not_covered: tuple[str, ...]
    facts: Mapping[str, str]

    @property
    def promised(self) -> str:
        """The header of the tiers."""
        return "promised\u00a0ε" if self.plan.groups.starts is None else "lifetime\u00a0level"


@dataclass(frozen=True)
class _Way:
    """A strategy on the page. signals: (groups,) the part of its signal to noise that comes from each group."""

    name: str
    plan: Plan
    signals: FloatArray


def make_page(plan: Plan, about: About, *, alone: bool = False) -> PlanPage:
    """The content of the page of a plan. Takes a second or two: five more plans are made for comparison.

    alone  True leaves the other strategies out of the tables; the verdict still compares them
    """
    is_suppressed = has_small_cells(plan.groups)
    rows = display_rows(plan.groups, about.tiers, release=is_suppressed, most=MOST_ROWS)
    advice = None if is_suppressed else _advice(plan)
    ways = [] if advice is None else _ways(plan, advice)[: 1 if alone else None]
    return PlanPage(
        about=about,
        plan=plan,
        date=datetime.now(UTC).date().isoformat(),
        lead=words.lead(plan, rows, about.counted),
        tiers=_tiers(plan, rows, is_suppressed),
        strategies=tuple(way.name for way in ways),
        explained={way.name: words.explained(way.name, way.plan) for way in ways},
        comparisons=_comparisons(ways, rows) if ways else (),
        bars=_bars(ways, rows),
        verdict=None if advice is None else _verdict(plan, advice),
        is_suppressed=is_suppressed,
        not_covered=words.not_covered(plan, about.read_off, about.seeded),
        facts=_facts(plan) | dict(about.facts),
    )


# -- Several plans, each as its page shows it


@dataclass(frozen=True)
class SideBySide:
    """Plans beside one another. In facts and tables: one cell per plan, "–" where it has none.

    verdict  what differs between the plans
    says     of ways to use the same budgets, what the advisor says of all of them
    """

    names: tuple[str, ...]
    pages: tuple[PlanPage, ...]
    facts: Comparison
    tables: tuple[Comparison, ...]
    verdict: str
    says: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        """The header of the tiers."""
        return "tier" if self.tables[0].title == words.PROMISED else self.pages[0].promised


def advised(
    advice: Advice, classes: Classes | None, names: Sequence[str], proxy: Mapping[float, float] | None
) -> SideBySide:
    """Every way to use these budgets side by side: noise, odds, signal, the worst class, and what tuning costs.

    classes, names  how tiers and classes go together, as for `balance`, and the names of the classes
    proxy           {signal: accuracy} of public data in the place of the private, for an expected accuracy
    """
    found = side_by_side({way.name: plan for way, plan in zip(advice.ways, advice.plans, strict=True)})
    facts = [row for row in found.facts.rows if len(set(row[1])) > 1 and row[0] != "strategy"]
    facts.append(("signal, relative to uniform", tuple(f"{way.signal:.2f}" for way in advice.ways)))
    says = [advice.verdict, advice.of_tuning]
    if classes is not None:
        parts = [balance(plan, classes).relative for plan in advice.plans]
        worst = tuple(f"{names[int(part.argmin())]}: {part.min():.2f}" for part in parts)
        facts.append(("the class with the lowest weight / people", worst))
        says.append(f"Weight / people: {TIED}.")
    if proxy:
        signals, scores = zip(*sorted(proxy.items()), strict=True)
        expected = np.interp([way.signal for way in advice.ways], signals, scores)
        facts.append(("expected accuracy, from the public proxy", tuple(f"{one:.1%}" for one in expected)))
    return replace(found, facts=Comparison("", tuple(facts)), verdict="", says=tuple(filter(None, says)))


def side_by_side(plans: Mapping[str, Plan], tiers: Mapping[str, Mapping[str, float]] | None = None) -> SideBySide:
    """Plans by name, with one row for each tier of any of them. Raises PlanError if units differ.

    tiers  the tiers of a plan, {name: epsilon}; a plan without any takes those of the first plan that has some
    """
    _check_kinds(plans)
    given = dict(tiers or {})
    known = dict.fromkeys(plans, next(iter(given.values()), {})) | given
    pages = tuple(make_page(plan, About(name=name, tiers=known[name])) for name, plan in plans.items())
    most = {tier.key: tier.most for page in reversed(pages) for tier in page.tiers}
    facts, columns = [of_plan(page) for page in pages], [of_tiers(page) for page in pages]
    tables = [
        _beside(title, [column.get(title, {}) for column in columns], sorted(most, key=most.__getitem__))
        for title in dict.fromkeys(title for column in columns for title in column)
    ]
    rows = _beside("", facts, dict.fromkeys(name for one in facts for name in one))
    verdict, steps = words.compared(tuple(plans), columns, pages[0].plan.unit), [one["steps"] for one in facts]
    if len({*steps}) > 1:
        verdict += f" Steps: {', '.join(map(' '.join, zip(plans, steps, strict=True)))}."
    return SideBySide(tuple(plans), pages, rows, tuple(tables), verdict)


def _check_kinds(plans: Mapping[str, Plan]) -> None:
    kinds = {
        name: f"of {plan.unit}s" if plan.groups.starts is None else "on accounts of a registry"
        for name, plan in plans.items()
    }
    if len({*kinds.values()}) > 1:
        which = ", ".join(f"{name} is a plan {kind}" for name, kind in kinds.items())
        raise PlanError(f"Plans of different kinds have no epsilons in common: {which}.")


def _beside(title: str, columns: Sequence[Mapping[str, str]], labels: Iterable[str]) -> Comparison:
    return Comparison(title, tuple((label, tuple(column.get(label, "–") for column in columns)) for label in labels))


def of_plan(page: PlanPage) -> dict[str, str]:
    """What a comparison shows of a plan: text by name."""
    found = {f"{page.plan.unit}s": f"{page.plan.records:,}", **page.facts}
    if page.bars:
        found["signal over noise, uniform is 1"] = f"{page.bars[0].signal:.2f}"
    return {name: text for name, text in found.items() if name != "made by" and "digest" not in name}


def of_tiers(page: PlanPage) -> dict[str, dict[str, str]]:
    """What a comparison shows of its tiers: title -> name or label -> text."""
    rights = [None if page.is_suppressed else tier.right for tier in page.tiers]
    columns: dict[str, Iterable[Any]] = {
        words.PROMISED: [tier.label for tier in page.tiers],
        words.COUNT: ["<20" if tier.count is None else f"{tier.count:,}" for tier in page.tiers],
        "ε spent": [tier.spent for tier in page.tiers],
        words.BY_PLAN: rights,
        words.BY_PROMISE: [tier.promised for tier in page.tiers],
    }
    if not any(tier.name for tier in page.tiers):
        del columns[words.PROMISED]
    others = (table for table in page.comparisons if table.title != RIGHT)
    columns |= {table.title: [cells[0] for _, cells in table.rows] for table in others}
    return {
        title: {tier.key: _cell(cell) for tier, cell in zip(page.tiers, cells, strict=True)}
        for title, cells in columns.items()
    }


def _cell(value: object) -> str:
    return "–" if value in (None, "") else str(value)


def _advice(plan: Plan) -> Advice:
    """All strategies for the plan's own groups."""
    budgets = Budgets.of_groups(plan.groups, plan.unit)
    recipe = Recipe(steps=plan.steps, batch_size=plan.batch_size, clip_norm=1.0)
    shared = {"runs": plan.runs, "select": plan.select, "class_noise": plan.class_noise}
    return advise(budgets, recipe, plan.accountant_fn, **shared, excesses=False)  # type: ignore[arg-type]


def _verdict(plan: Plan, advice: Advice) -> str:
    """What the strategies are worth, and which of them the plan has, if it is another one than the best."""
    best = advice.best
    if best is None or best.name == plan.strategy:
        return advice.verdict
    return f"{advice.verdict} This plan is made by {strategy(plan)}: {best.name} would be another plan."


def _ways(plan: Plan, advice: Advice) -> list[_Way]:
    """The plan first, then the other strategies; of those that exclude, the one with the most signal."""
    excluding = [way.signal for way in advice.ways if way.name.startswith("exclude")]
    others = [
        _Way(way.name, made, way.signal * np.array(way.weight))
        for way, made in zip(advice.ways, advice.plans, strict=True)
        if not (made.strategy == plan.strategy and not plan.options)
        and not (way.name.startswith("exclude") and way.signal < max(excluding))
    ]
    return [_Way(words.short_name(plan), plan, _signals(plan) / _signals(advice.plan).sum()), *others]


def _signals(plan: Plan) -> FloatArray:
    """(groups,) records · rate / noise multiplier of a step, averaged over phases."""
    by_phase = [phase.steps * phase.sample_rate / phase.noise_multiplier for phase in plan.phases]
    return np.asarray(plan.counts * np.sum(by_phase, axis=0) / plan.steps, dtype=np.float64)


# -- rows --------------------------------------------------------------------------------------------------------------


def _tiers(plan: Plan, rows: Sequence[DisplayRow], is_suppressed: bool) -> tuple[Tier, ...]:
    advantages, promises = _advantages(plan, rows, is_suppressed), _promises(plan, rows)
    rights = _rights(plan, rows, is_suppressed, advantages)
    return tuple(
        Tier(
            label=row.label,
            most=math.inf if row.at_most is None else row.at_most,
            name=row.tier,
            count=row.records,
            spent=_spent(plan, row, is_suppressed),
            right=right,
            promise=None if plan.groups.starts is not None else promise,  # that of an account is over its lifetime
            sentence=None
            if right is None
            else risk_profile.sentence(right, shares_declared=plan.adjacency == SHARES, unit=plan.unit),
            limits=() if row.merged else display.limits_of(plan, row.groups.start, is_suppressed),
            bounds=risk_profile.of_merged(row, shown_delta(plan.groups), {})
            if row.tiers and plan.groups.starts is None
            else "",
            advantage=advantage,
        )
        for row, right, promise, advantage in zip(rows, rights, promises, advantages, strict=True)
    )


def _advantages(plan: Plan, rows: Sequence[DisplayRow], is_suppressed: bool) -> tuple[float | None, ...]:
    """By profiles; in a merged row the largest of any group. None of many groups, which are bounded by promises."""
    if is_suppressed or len(plan.groups) > MOST_PROFILES:
        return (None,) * len(rows)
    found = risk_profile.advantages(plan)
    return tuple(float(found[row.groups].max()) for row in rows)


def _rights(
    plan: Plan, rows: Sequence[DisplayRow], is_suppressed: bool, advantages: Sequence[float | None]
) -> tuple[int | None, ...]:
    """Right guesses of 100, by advantages where they are known."""
    if is_suppressed:
        return _promises(plan, rows)
    known = [risk_profile.right_of_advantage(one) for one in advantages if one is not None]
    return tuple(known) if known else risk_profile.of_rows(plan, rows, False)


def _promises(plan: Plan, rows: Sequence[DisplayRow]) -> tuple[int | None, ...]:
    """By each row's own promise; of merged rows without tiers by the epsilon and the delta that they show."""
    delta = shown_delta(plan.groups)
    return tuple(
        risk_profile.right_of_promise(row.at_most, delta)
        if promise is None and row.at_most is not None and delta is not None and not row.tiers
        else promise
        for row, promise in zip(rows, risk_profile.of_rows(plan, rows, True), strict=True)
    )


def _spent(plan: Plan, row: DisplayRow, is_suppressed: bool) -> str:
    if is_suppressed:
        return display.spent_bound(plan, row)
    spent, promised = plan.epsilon_spent()[row.groups], plan.epsilons[row.groups]
    most = int(np.argmax(spent))
    return display.rounded_spend(float(spent[most]), float(promised[most]))


def _comparisons(ways: Sequence[_Way], rows: Sequence[DisplayRow]) -> tuple[Comparison, ...]:
    labels = [display.named(row.label, row.tier) for row in rows]
    tables: list[tuple[str, Callable[[_Way], Iterable[str]]]] = [  # title, cells of a strategy's column
        ("ε spent", lambda way: [_spent(way.plan, row, False) for row in rows]),
        (RIGHT, lambda way: map(str, _rights(way.plan, rows, False, _advantages(way.plan, rows, False)))),
        (words.INFLUENCE, lambda way: [_short(way.plan.influence[row.groups].max()) for row in rows]),
        (words.SHARE, lambda way: _shares(way, rows)),
        (words.NOISE, lambda way: [_noise(way.plan, row) for row in rows]),
    ]
    return tuple(
        Comparison(
            title,
            tuple(zip(labels, zip(*map(cells, ways), strict=True), strict=True)),
        )
        for title, cells in tables
    )


def _shares(way: _Way, rows: Sequence[DisplayRow]) -> list[str]:
    return [f"{100 * part:.0f}\u00a0%" for part in _parts(way, rows) / way.signals.sum()]


def _parts(way: _Way, rows: Sequence[DisplayRow]) -> FloatArray:
    return np.array([way.signals[row.groups].sum() for row in rows])


def _noise(plan: Plan, row: DisplayRow) -> str:
    """The noise multiplier of a row's groups in the first phase; of several groups the largest."""
    phase = plan.phases[0]
    drawn = phase.sample_rate[row.groups] > 0
    return _short(float(phase.noise_multiplier[row.groups][drawn].max())) if drawn.any() else "–"


def _short(value: float) -> str:
    """Three significant digits, so that five columns fit on a small screen."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _bars(ways: Sequence[_Way], rows: Sequence[DisplayRow]) -> tuple[Bar, ...]:
    widest = max((float(way.signals.sum()) for way in ways), default=1.0)
    return tuple(
        Bar(way.name, float(way.signals.sum()), tuple((100 * _parts(way, rows) / widest).tolist())) for way in ways
    )


def _deltas(plan: Plan) -> str:
    """The delta that all have, as far as it may be shown, and whether it protects little."""
    delta = shown_delta(plan.groups)
    if delta is None:
        return "not the same for all budgets, so it is not shown"
    is_too_large = is_large(np.array([delta]), plan.records)
    return f"{delta:.3g}" + (f": too large, not below 1/{plan.unit}s = {1 / plan.records:.2g}" if is_too_large else "")


#: Not that in plan.json, which is of all that the file says.
DIGEST = "digest of the plan’s numbers, as epsilons sign and verify print it (that in plan.json is of the whole file)"


def _facts(plan: Plan) -> dict[str, str]:
    facts = {
        "strategy": strategy(plan),
        "accountant": DESCRIPTIONS.get(plan.accountant, plan.accountant).rstrip(","),
        "protects": f"one {plan.unit} at a time; {plan.adjacency}",
        "δ": _deltas(plan),
        "steps": f"{plan.steps:,}" + (f" in each of {runs} runs" if (runs := display.runs_of(plan)) else ""),
        "expected batch": f"{plan.batch_size:,.6g} {plan.unit}s",
        "made by": f"epsilons {__version__}",
    }
    return facts if has_small_cells(plan.groups) else facts | {DIGEST: plan.digest}
