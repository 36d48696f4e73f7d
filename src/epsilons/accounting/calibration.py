"""Invert an accountant: the least noise, or the highest rate, that keeps a budget; for many budgets at once.

Every search returns a value that the accountant evaluated and that keeps the budget. An accountant that is not exactly
monotone (PLD's grid moves with its arguments) can only stop the search early, at a stricter value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.interpolate import PchipInterpolator
from scipy.special import ndtri

from ..core.mechanism import SMALLEST_NOISE, Counted, FloatArray, IntArray, Repeated, SampledGaussian
from ..errors import InfeasibleBudgetError, PlanError
from . import chords, filter, pld, rdp
from .profile import TERMS, usage
from .selection import Selected

# -- Many histories at once: the epsilon of every group of a plan costs little more than that of the distinct
# histories
#
# All groups share a plan's phases, so a history is one column: a rate and a noise multiplier per phase. Each distinct
# column is computed once: RDP for all columns together, PLD for all deltas of a column together, any other accountant
# one history at a time.

#: epsilon(history, delta): an upper bound on the epsilon that a record with this history has spent.
Accountant = Callable[[Sequence[SampledGaussian], float], float]


class Histories(NamedTuple):
    """The histories of many records (rows), phase by phase.

    rates   (phases, rows)  probability of being drawn in one step
    noises  (phases, rows)  noise multiplier
    steps   (phases,)       the same for all rows
    way     how they are computed; None: as takes least time
    """

    rates: FloatArray
    noises: FloatArray
    steps: tuple[int, ...]
    way: chords.Way | None = None


def batch_epsilon(accountant: Accountant, histories: Histories, claims: FloatArray) -> FloatArray:
    """(rows,) upper bounds on epsilon at each row's claim: its delta, or for accounts what was spent before.

    claims: (rows,), (rows, orders) or (rows, TERMS), as `Groups.terms`; for terms of budgets by risk it is the part of
    them that is used (`profile.usage`). Raises PlanError for accounts with another accountant than the filter, and for
    budgets by risk with another one than PLD.
    """
    rates, noises, steps, way = histories
    if isinstance(accountant, Repeated):
        repeated = Histories(rates, noises, tuple(count * accountant.runs for count in steps), way)
        return batch_epsilon(accountant.accountant, repeated, claims)
    if isinstance(accountant, Counted):
        count, one = accountant.mechanism, np.ones((1, len(claims)))
        added = np.vstack([rates, one]), np.vstack([noises, count.noise_multiplier * one])
        both = Histories(*added, (*steps, count.steps))
        return batch_epsilon(accountant.accountant, both, claims)
    if isinstance(accountant, Selected) and claims.ndim > 1:
        raise PlanError("A selection takes budgets of (epsilon, delta) only: neither by risk nor of a registry.")
    return _of_histories(accountant, histories, claims)


def _of_histories(accountant: Accountant, histories: Histories, claims: FloatArray) -> FloatArray:
    rates, noises, steps, way = histories
    function, options = _unwrapped(accountant)
    _check_claims(function, claims)
    if is_by_risk(claims):
        return _usages(options, histories, claims)
    if function is filter.epsilon:
        of_accounts = claims.ndim > 1
        return filter.batch_epsilon(
            rates, noises, steps, claims[:, 0] if of_accounts else claims, claims if of_accounts else None
        )
    deltas = claims
    distinct, column = _distinct(np.concatenate([rates, noises]))
    rates, noises = distinct[: len(rates)], distinct[len(rates) :]
    pairs, pair = _distinct(np.stack([column.astype(np.float64), deltas]))
    column, deltas = pairs[0].astype(np.int64), pairs[1]
    if function is rdp.epsilon and set(options) <= {"orders"}:
        return rdp.batch_epsilon(rates[:, column], noises[:, column], steps, deltas, **options)[pair]
    out = np.full(len(deltas), np.nan)
    if function is pld.epsilon and set(options) <= {"points", "slacks"}:
        out = _together(Histories(rates, noises, steps, way), column, deltas, options)
    ends = np.searchsorted(column, np.arange(distinct.shape[1] + 1))  # pairs are sorted by column
    for i in np.unique(column[np.isnan(out)]):
        here = slice(ends[i], ends[i + 1])
        history = [
            SampledGaussian(float(q), float(s), n) for q, s, n in zip(rates[:, i], noises[:, i], steps, strict=True)
        ]
        if function is pld.epsilon and set(options) <= {"grid", "points", "slacks"} and here.stop - here.start > 1:
            out[here] = pld.epsilon_at(history, deltas[here], **options)
        else:
            out[here] = [accountant(history, float(delta)) for delta in deltas[here]]
    return out[pair]


def _together(distinct: Histories, column: IntArray, deltas: FloatArray, options: Mapping[str, Any]) -> FloatArray:
    """(pairs,) bounds from few transforms; NaN where a history has to be composed. column: (pairs,) of each."""
    rates, noises, steps, way = distinct
    way = way or chords.way(rates[0], noises[0])
    if len(steps) > 1 or way == "composed" or rates.min() <= 0:
        return np.full(len(deltas), np.nan)
    common = chords.line(rates[0], noises[0], steps[0]) if way == "chords" else None
    mechanisms = [SampledGaussian(*one, steps[0]) for one in zip(rates[0].tolist(), noises[0].tolist(), strict=True)]
    return chords.epsilons(mechanisms, column, deltas, common, **options)


def _check_claims(function: Accountant, claims: FloatArray) -> None:
    if is_by_risk(claims) and function is not pld.epsilon:
        raise PlanError(
            'Budgets by risk need accountant="pld". All other accountants, and the registry, take tiers of '
            "(epsilon, delta) only: they do not know the rest of the privacy profile."
        )
    if claims.ndim > 1 and not is_by_risk(claims) and function is not filter.epsilon:
        raise PlanError('Budgets on accounts of a registry need accountant="filter"; others do not add up over runs.')


def _usages(options: Mapping[str, Any], histories: Histories, terms: FloatArray) -> FloatArray:
    columns = zip(histories.rates.T.tolist(), histories.noises.T.tolist(), strict=True)
    rows = ([SampledGaussian(*one) for one in zip(*column, histories.steps, strict=True)] for column in columns)
    return np.array([usage(history, row, **options) for history, row in zip(rows, terms, strict=True)])


def is_by_risk(claims: FloatArray) -> bool:
    """Whether claims are terms of budgets by risk; those of accounts have more columns."""
    return claims.shape[1:] == (TERMS,)


def _of_one_phase(
    accountant: Accountant,
    rates: npt.ArrayLike,
    noises: npt.ArrayLike,
    steps: int,
    claims: FloatArray,
    way: chords.Way | None = None,
) -> FloatArray:
    """The same for one phase; rates and noises are one number for all rows, or one per row."""
    rate, noise = (np.broadcast_to(np.asarray(value, np.float64), (1, len(claims))) for value in (rates, noises))
    return batch_epsilon(accountant, Histories(rate, noise, (steps,), way), claims)


def fast(accountant: Accountant) -> Accountant:
    """For guesses: PLD on grids of at most 100,000 points, a tenth of the usual; other accountants unchanged."""
    return _with_options(accountant, lambda options: options or {"points": 1e5})


def conservative(accountant: Accountant) -> Accountant:
    """For searches: PLD with twice the slack per step, so that what is found verifies under other rounding, too.

    Other accountants are unchanged.
    """
    return _with_options(accountant, lambda options: {"slacks": 2.0} | options)


def _with_options(accountant: Accountant, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> Accountant:
    if isinstance(accountant, Repeated | Counted | Selected):
        return replace(accountant, accountant=_with_options(accountant.accountant, changed))
    function, options = _unwrapped(accountant)
    return functools.partial(pld.epsilon, **changed(options)) if function is pld.epsilon else accountant


def _unwrapped(accountant: Callable[..., float]) -> tuple[Callable[..., float], dict[str, Any]]:
    """The function behind `functools.partial(rdp.epsilon, orders=…)`, and its fixed arguments."""
    if isinstance(accountant, functools.partial) and not accountant.args:
        return accountant.func, dict(accountant.keywords)
    return accountant, {}


def _distinct(columns: FloatArray) -> tuple[FloatArray, IntArray]:
    """Distinct columns in rising order, and for each column its index among them."""
    order = np.lexsort(columns[::-1])
    ordered = columns[:, order]
    is_new = np.ones(len(order), dtype=bool)  # also right for no column at all
    is_new[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
    index = np.empty(len(order), dtype=np.int64)
    index[order] = np.cumsum(is_new) - 1
    return ordered[:, is_new], index


# -- Invert an accountant: the least noise, or the highest rate, that keeps a budget; for many budgets at once

#: Searches aim at this part of a budget. A plan then still verifies after a patch release of a library that moves an
#: epsilon in its seventh digit.
TARGET = 1 - 1e-6
#: A search stops once at most this part of the budget is unused; for more budgets than FEW, the second part.
TOLERANCE, TOLERANCE_OF_MANY = 1e-5, 3e-4
FEW = chords.FEW
LARGEST_NOISE = 1e7
#: Above SMALLEST_NOISE, because a multiplier is recomputed from clip norms and noise_std with other last bits.
_LEAST_NOISE = SMALLEST_NOISE * (1 + 1e-9)
SMALLEST_RATE = 1e-9

#: Nodes of a curve, per e-fold of its argument: the curves are nearly straight in logs.
_NODES = 5

Spends = Callable[[FloatArray, IntArray], FloatArray]


def bisected(
    is_below: Callable[[float], bool], low: float, high: float, *, width: float = 0, part: float = 0, times: int = 1000
) -> tuple[float, float]:
    """The ends of an interval in which a condition that holds from `low` on, but not at `high`, stops to hold.

    width, part  halving ends where the interval is at most `width`, or this part of its upper end
    times        or after so many halvings

    >>> bisected(lambda x: x < 0.3, 0.0, 1.0, width=0.1)
    (0.25, 0.3125)
    """
    for _ in range(times):
        if high - low <= max(width, part * high):
            break
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low, high


def noise_for(epsilon: float, sample_rate: float, steps: int, delta: float, accountant: Accountant) -> float:
    """The smallest noise multiplier found that spends at most `epsilon` at `delta`, approached from above.

    epsilon      budget in nats
    sample_rate  probability of being drawn in one step
    steps        number of steps
    delta        probability, at least 1e-9
    accountant   a function (history, delta) -> epsilon

    Raises InfeasibleBudgetError if no noise is enough.

    >>> from epsilons.accounting import rdp
    >>> round(noise_for(1.0, 1 / 49, 1470, 1e-5, rdp.epsilon), 3)
    3.293
    """
    return float(noises_for(np.array([epsilon]), sample_rate, steps, np.array([delta]), accountant)[0])


def rate_for(
    epsilon: float,
    noise_multiplier: float,
    steps: int,
    delta: float,
    accountant: Accountant,
    start: float = 0.01,
) -> float:
    """The highest sampling rate found that spends at most `epsilon` at `delta`, approached from below; at most 1.

    start: a guess that saves evaluations; the other arguments are those of `noise_for`. Returns 0 if not even a rate
    of 1e-9 keeps the budget.

    >>> from epsilons.accounting import rdp
    >>> round(rate_for(2.0, 1.9637, 1470, 1e-5, rdp.epsilon), 4)
    0.0217
    """
    guess, budget = np.array([start]), np.array([epsilon])
    return float(rates_for(budget, noise_multiplier, steps, np.array([delta]), accountant, guess)[0])


def noises_for(
    epsilon: FloatArray, sample_rate: npt.ArrayLike, steps: int, delta: FloatArray, accountant: Accountant
) -> FloatArray:
    """(groups,) for each budget the smallest noise multiplier found that keeps it, approached from above.

    sample_rate: one for all or one per group; delta: the budgets' deltas, or for accounts
    `Groups.claims`. Raises InfeasibleBudgetError if for any budget no noise is enough; the message has numbers only
    where all budgets share a delta.
    """
    rate = np.broadcast_to(np.asarray(sample_rate, dtype=np.float64), epsilon.shape)
    verified = conservative(accountant)
    runs = accountant.runs if isinstance(accountant, Repeated) else 1
    start = -np.log(_clt_noise(epsilon, rate, runs * steps, delta))  # searches use -ln(noise): epsilon grows with it

    def spends(log_quiet: FloatArray, rows: IntArray) -> FloatArray:
        return _of_one_phase(verified, rate[rows], np.exp(-log_quiet), steps, delta[rows], way)

    if len(epsilon) > FEW and np.ptp(rate) == 0 and delta.ndim == 1:

        def curve(log_quiet: FloatArray, at: FloatArray) -> FloatArray:
            return _of_one_phase(accountant, rate[0], np.exp(-log_quiet), steps, at, "each")

        nodes = _nodes(start.min() - 0.5, start.max() + 0.5)
        start = _read_off(curve, nodes, epsilon * (1 - TOLERANCE_OF_MANY / 3), delta, start)
    way = chords.way(rate, np.exp(-start))
    log_quiet = _largest_safe(spends, epsilon, start, -math.log(LARGEST_NOISE), -math.log(_LEAST_NOISE))
    infeasible = np.flatnonzero(np.isnan(log_quiet))
    if len(infeasible):
        limit = "so little as it asks for. Ask for more, choose a larger delta"
        if delta.ndim == 1 and np.ptp(delta) == 0:  # otherwise the delta may be that of one person
            floor = _of_one_phase(accountant, rate[infeasible], LARGEST_NOISE, steps, delta[infeasible]).max()
            at_least = f"less than epsilon = {floor:.3g} at delta = {delta[0]:g}. Ask for at least that"
            limit = f"{at_least}, choose a larger delta"
        raise InfeasibleBudgetError(
            f"A budget is out of reach: whatever the noise, this accountant cannot certify {limit}, or use "
            'accountant="pld", which reaches lower than "rdp".'
        )
    return np.exp(-log_quiet)


def rates_for(
    epsilon: FloatArray,
    noise_multiplier: float,
    steps: int,
    delta: FloatArray,
    accountant: Accountant,
    start: FloatArray,
) -> FloatArray:
    """(groups,) for each budget the highest sampling rate found that keeps it, approached from below; 0 if none does.

    start: (groups,) guesses that save evaluations, for example those of `rates_near`.
    """
    verified = conservative(accountant)

    def spends(log_rate: FloatArray, rows: IntArray) -> FloatArray:
        return _of_one_phase(verified, np.exp(log_rate), noise_multiplier, steps, delta[rows], way)

    near = np.log(np.clip(start, SMALLEST_RATE, 1.0))
    way = chords.way(np.exp(near), np.full(len(near), noise_multiplier))
    log_rate = _largest_safe(spends, epsilon, near, math.log(SMALLEST_RATE), 0.0)
    return np.where(np.isnan(log_rate), 0.0, np.exp(log_rate))


def rates_near(
    epsilon: FloatArray,
    noise_multiplier: float,
    steps: int,
    delta: FloatArray,
    accountant: Accountant,
    start: FloatArray,
) -> FloatArray:
    """(groups,) approximations of those rates, read off one curve: the cost does not depend on the number of groups."""
    approximate = fast(accountant)
    if delta.ndim > 1:  # each account has a curve of its own, and each group by risk
        return rates_for(epsilon, noise_multiplier, steps, delta, approximate, start)

    def curve(log_rate: FloatArray, at: FloatArray) -> FloatArray:
        return _of_one_phase(approximate, np.exp(log_rate), noise_multiplier, steps, at, way)

    way: chords.Way = "each" if len(epsilon) > FEW else "composed"
    low, high = math.log(max(start.min() / 1.5, SMALLEST_RATE)), math.log(min(start.max() * 1.5, 1.0))
    aims = epsilon * (1 - TOLERANCE_OF_MANY / 3) if len(epsilon) > FEW else epsilon * TARGET
    while True:
        read = _read_off(curve, np.minimum(_nodes(low, high), 0.0), aims, delta, np.full(len(epsilon), np.nan))
        below, beyond = np.isneginf(read), np.isposinf(read)
        if below.any() and low > math.log(SMALLEST_RATE):
            low = max(low - 2.0, math.log(SMALLEST_RATE))
        elif beyond.any() and high < 0:
            high = min(high + 2.0, 0.0)
        else:
            return np.where(below, 0.0, np.exp(np.where(beyond, 0.0, np.where(below, 0.0, read))))


def _clt_noise(epsilon: FloatArray, sample_rate: FloatArray, steps: int, delta: FloatArray) -> FloatArray:
    """A first guess by the central limit of Gaussian differential privacy (Dong et al., arXiv 1905.02383v3)."""
    mu = gaussian_strength(epsilon, delta)
    log_ratio = 2 * (np.log(mu) - np.log(np.maximum(sample_rate, 1e-300))) - math.log(steps)
    noise = 1 / np.sqrt(np.log1p(np.exp(np.clip(log_ratio, -60.0, 60.0))))
    return np.asarray(np.clip(noise, _LEAST_NOISE, LARGEST_NOISE), dtype=np.float64)


def gaussian_strength(epsilon: FloatArray, delta: FloatArray) -> FloatArray:
    """(groups,) approximate μ of the Gaussian mechanism that spends ε at δ: √(2(L + ε)) − √(2L), L = ln 1/δ.

    For accounts, μ of the one that spends what is left at the best order; for budgets by risk, of the one that meets
    the narrowest limit.
    """
    if is_by_risk(delta):
        tails, _, advantage, rate, power = delta.T
        by_advantage, by_power = (
            2 * ndtri((1 + np.minimum(advantage, 1)) / 2),
            ndtri(np.minimum(power, 1)) - ndtri(rate),
        )
        return np.asarray(np.minimum(gaussian_strength(epsilon, tails), np.minimum(by_advantage, by_power)))
    if delta.ndim > 1:  # a Gaussian's divergence at order α is α·μ²/2
        square = 2 * ((epsilon[:, None] - delta) / filter.ORDERS).max(axis=1)
        return np.asarray(np.sqrt(np.maximum(square, 1e-12)), dtype=np.float64)
    tail = -np.log(delta)
    return np.asarray(2 * epsilon / (np.sqrt(2 * (tail + epsilon)) + np.sqrt(2 * tail)), dtype=np.float64)


def _nodes(low: float, high: float) -> FloatArray:
    """Evenly spaced nodes around [low, high]; where two ranges overlap they are the same, so caches are used."""
    return np.arange(math.floor(low * _NODES), max(math.ceil(high * _NODES), math.floor(low * _NODES) + 3) + 1) / _NODES


def _read_off(
    curve: Callable[[FloatArray, FloatArray], FloatArray],
    nodes: FloatArray,
    aims: FloatArray,
    delta: FloatArray,
    otherwise: FloatArray,
) -> FloatArray:
    """(groups,) where a growing curve reaches each aim; beyond the nodes `otherwise`, or ∓inf where that is NaN.

    The result is a guess: callers evaluate it again before they use it.
    """
    out = otherwise.copy()
    deltas, which = np.unique(delta, return_inverse=True)
    values = curve(np.repeat(nodes, len(deltas)), np.tile(deltas, len(nodes))).reshape(len(nodes), len(deltas))
    for i in range(len(deltas)):
        rows = which == i
        log_spent = np.log(np.clip(values[:, i], 1e-300, 1e300))
        rising = np.concatenate([[True], np.diff(np.maximum.accumulate(log_spent)) > 1e-9])
        x, y = log_spent[rising], nodes[rising]
        aim = np.log(aims[rows])
        inside = (aim >= x[0]) & (aim <= x[-1])
        beyond = np.where(np.isnan(out[rows]), np.where(aim < x[0], -np.inf, np.inf), out[rows])
        if len(x) > 1 and inside.any():
            beyond[inside] = PchipInterpolator(x, y)(aim[inside])
        out[rows] = beyond
    return out


def _largest_safe(
    spends: Spends,
    budget: FloatArray,
    start: FloatArray,
    lowest: float,
    highest: float,
) -> FloatArray:
    """(groups,) the largest u in [lowest, highest] found with spends(u) <= budget·TARGET, or NaN; spends grow with u.

    One secant per group, each inside its bracket; a group is done as soon as little of its budget is unused.
    """
    groups = len(budget)
    tolerance = TOLERANCE if groups <= FEW else TOLERANCE_OF_MANY
    target = budget * TARGET
    safe, over = np.full(groups, np.nan), np.full(groups, np.nan)
    safe_excess, over_excess = np.full(groups, np.nan), np.full(groups, np.nan)
    u = np.clip(start, lowest, highest)
    step = 0.25
    active = np.arange(groups)
    for attempt in range(80):
        spent = spends(u[active], active)
        # In logs both searches are nearly straight lines; the clip keeps 0 and inf usable.
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.clip(np.log(np.maximum(spent, 1e-300) / target[active]), -5.0, 5.0)
        keeps = spent <= target[active]  # NaN does not keep the budget
        excess = np.where(np.isnan(excess), 5.0, excess)
        below, above = active[keeps], active[~keeps]
        safe[below], safe_excess[below] = u[below], excess[keeps]
        over[above], over_excess[above] = u[above], excess[~keeps]
        done = np.where(keeps, (u[active] >= highest) | (excess >= -tolerance), u[active] <= lowest)
        bracketed = ~np.isnan(safe[active]) & ~np.isnan(over[active])
        done |= bracketed & (over[active] - safe[active] < 1e-12)
        excess, bracketed, active = excess[~done], bracketed[~done], active[~done]
        if len(active) == 0:
            break
        between = _between(
            safe[active], safe_excess[active], over[active], over_excess[active], tolerance, bisect=attempt % 4 == 3
        )
        # Without a bracket: first a straight line's step, then, where the curve is flat, longer and longer steps.
        step *= 2 if attempt > 3 else 1
        jump = np.full(len(active), step) if attempt > 3 else np.maximum(np.abs(excess), 1e-4) * 1.2
        outside = np.clip(u[active] + np.where(np.isnan(over[active]), jump, -jump), lowest, highest)
        u[active] = np.where(bracketed, between, outside)
    return safe


def _between(
    a: FloatArray, fa: FloatArray, b: FloatArray, fb: FloatArray, tolerance: float, bisect: bool
) -> FloatArray:
    """The point on the chord just below the target; with `bisect` the middle, which always halves the bracket."""
    if bisect:
        return (a + b) / 2
    with np.errstate(invalid="ignore"):
        u = a + (b - a) * (-tolerance / 2 - fa) / (fb - fa)
        margin = 1e-3 * (b - a)
        return np.asarray(np.clip(u, a + margin, b - margin), dtype=np.float64)
