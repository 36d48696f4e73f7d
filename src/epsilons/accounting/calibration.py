"""Invert an accountant: the least noise, or the highest rate, that still keeps a budget; for any number of budgets.

Every search returns an end that was itself evaluated and found to spend at most the budget; an accountant that is a
little rough (PLD's grid moves with its arguments) can only make it stop early, on the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.interpolate import PchipInterpolator

from ..errors import InfeasibleBudgetError
from ..mechanism import SMALLEST_NOISE, SampledGaussian
from . import Accountant
from .batched import Columns, FloatArray, coarse, epsilons, wary

#: Calibrate to this part of a budget, so that a plan still verifies after a patch release of a library
#: that moves an epsilon in its seventh digit.
TARGET = 1 - 1e-6
#: Stop once at most this part of the budget is left over; for more budgets than FEW, the second.
TOLERANCE, TOLERANCE_OF_MANY = 1e-5, 3e-4
FEW = 64
LARGEST_NOISE = 1e7
#: A multiplier comes back from clip norms and noise_std with other last bits, and must not fall below SMALLEST_NOISE.
_QUIETEST = SMALLEST_NOISE * (1 + 1e-9)
SMALLEST_RATE = 1e-9

#: Nodes of a curve, per e-fold of its argument: the curves are nearly straight in logs.
_NODES = 5


def noise_for(
    epsilon: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: Accountant,
    history: Sequence[SampledGaussian] = (),
) -> float:
    """The smallest noise multiplier found that spends at most `epsilon` at `delta`, from above.

    history: what the record went through before. Raises InfeasibleBudgetError if no noise is enough.

    >>> from epsilons.accounting import rdp
    >>> round(noise_for(1.0, 1 / 49, 1470, 1e-5, rdp.epsilon), 3)
    3.293
    """
    past = Columns(
        np.array([[m.sample_rate] for m in history]).reshape(-1, 1),
        np.array([[m.noise_multiplier] for m in history]).reshape(-1, 1),
        tuple(m.steps for m in history),
    )
    return float(noises_for(np.array([epsilon]), sample_rate, steps, np.array([delta]), accountant, past)[0])


def rate_for(
    epsilon: float,
    noise_multiplier: float,
    steps: int,
    delta: float,
    accountant: Accountant,
    start: float = 0.01,
) -> float:
    """The highest sampling rate found that spends at most `epsilon` at `delta`, from below; at most 1.

    start: a guess that saves evaluations. Returns 0 if not even a rate of 1e-9 keeps the budget.

    >>> from epsilons.accounting import rdp
    >>> round(rate_for(2.0, 1.9637, 1470, 1e-5, rdp.epsilon), 4)
    0.0217
    """
    guess, one = np.array([start]), np.array([epsilon])
    return float(rates_for(one, noise_multiplier, steps, np.array([delta]), accountant, guess)[0])


def noises_for(
    epsilon: FloatArray,
    sample_rate: npt.ArrayLike,
    steps: int,
    delta: FloatArray,
    accountant: Accountant,
    past: Columns | None = None,
) -> FloatArray:
    """(groups,) for each budget the smallest noise multiplier found that keeps it, from above.

    sample_rate: one for all or one per group; past: what each group went through before.
    Raises InfeasibleBudgetError if for any budget no noise is enough; the message has numbers only where all share a
    delta.
    """
    rate = np.broadcast_to(np.asarray(sample_rate, dtype=np.float64), epsilon.shape)
    before = Columns.none(len(epsilon)) if past is None else past
    cautious = wary(accountant)
    start = -np.log(_clt_noise(epsilon, rate, steps, delta))

    def spends(quietness: FloatArray, rows: npt.NDArray[np.int64]) -> FloatArray:
        return epsilons(cautious, before.then(rate[rows], np.exp(-quietness), steps, rows), delta[rows])

    if len(epsilon) > FEW and past is None and np.ptp(rate) == 0:

        def curve(quietness: FloatArray, at: FloatArray) -> FloatArray:
            return epsilons(accountant, Columns.none(len(at)).then(rate[0], np.exp(-quietness), steps), at)

        nodes = _nodes(start.min() - 0.5, start.max() + 0.5)
        start = _read_off(curve, nodes, epsilon * (1 - TOLERANCE_OF_MANY / 3), delta, start)
    quietness = _largest_safe(spends, epsilon, start, -math.log(LARGEST_NOISE), -math.log(_QUIETEST))
    out_of_reach = np.isnan(quietness)
    if out_of_reach.any():
        told = "so little as it asks for. Ask for more, choose a larger delta"
        if np.ptp(delta) == 0 and not before.steps:  # else the delta, or what was spent before, may be one person's
            rows = np.flatnonzero(out_of_reach)
            floor = epsilons(accountant, before.then(rate[rows], LARGEST_NOISE, steps, rows), delta[rows]).max()
            told = (
                f"less than epsilon = {floor:.3g} at delta = {delta[0]:g}. Ask for at least that, choose a larger delta"
            )
        raise InfeasibleBudgetError(
            f"A budget is out of reach: whatever the noise, this accountant cannot certify {told}, or use "
            'accountant="pld", which reaches lower than "rdp".'
        )
    return np.exp(-quietness)


def rates_for(
    epsilon: FloatArray,
    noise_multiplier: float,
    steps: int,
    delta: FloatArray,
    accountant: Accountant,
    start: FloatArray,
    past: Columns | None = None,
) -> FloatArray:
    """(groups,) for each budget the highest sampling rate found that keeps it, from below; 0 where none does.

    start: (groups,) guesses that save evaluations, e.g. `rates_near`'s.
    """
    before = Columns.none(len(epsilon)) if past is None else past
    cautious = wary(accountant)

    def spends(log_rate: FloatArray, rows: npt.NDArray[np.int64]) -> FloatArray:
        return epsilons(cautious, before.then(np.exp(log_rate), noise_multiplier, steps, rows), delta[rows])

    near = np.log(np.clip(start, SMALLEST_RATE, 1.0))
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
    """(groups,) about those rates, read off one curve: the price does not depend on the number of groups."""

    rough = coarse(accountant)

    def curve(log_rate: FloatArray, at: FloatArray) -> FloatArray:
        return epsilons(rough, Columns.none(len(at)).then(np.exp(log_rate), noise_multiplier, steps), at)

    low, high = math.log(max(start.min() / 1.5, SMALLEST_RATE)), math.log(min(start.max() * 1.5, 1.0))
    aims = epsilon * (1 - TOLERANCE_OF_MANY / 3) if len(epsilon) > FEW else epsilon * TARGET
    while True:
        read = _read_off(curve, np.minimum(_nodes(low, high), 0.0), aims, delta, np.full(len(epsilon), np.nan))
        short, long = np.isneginf(read), np.isposinf(read)
        if short.any() and low > math.log(SMALLEST_RATE):
            low = max(low - 2.0, math.log(SMALLEST_RATE))
        elif long.any() and high < 0:
            high = min(high + 2.0, 0.0)
        else:
            return np.where(short, 0.0, np.exp(np.where(long, 0.0, np.where(short, 0.0, read))))


def _clt_noise(epsilon: FloatArray, sample_rate: FloatArray, steps: int, delta: FloatArray) -> FloatArray:
    """A first guess: Gaussian differential privacy's central limit, inverted roughly (Dong et al., 1905.02383v3)."""
    mu = gaussian_strength(epsilon, delta)
    log_ratio = 2 * (np.log(mu) - np.log(np.maximum(sample_rate, 1e-300))) - math.log(steps)
    noise = 1 / np.sqrt(np.log1p(np.exp(np.clip(log_ratio, -60.0, 60.0))))
    return np.asarray(np.clip(noise, _QUIETEST, LARGEST_NOISE), dtype=np.float64)


def gaussian_strength(epsilon: FloatArray, delta: FloatArray) -> FloatArray:
    """(groups,) about the μ of the Gaussian mechanism that spends epsilon at delta: √(2(L + ε)) − √(2L), L = ln 1/δ."""
    tail = -np.log(delta)
    return np.asarray(2 * epsilon / (np.sqrt(2 * (tail + epsilon)) + np.sqrt(2 * tail)), dtype=np.float64)


def _nodes(low: float, high: float) -> FloatArray:
    """Evenly spaced ones around [low, high], the same wherever two ranges overlap: what was evaluated stays known."""
    return np.arange(math.floor(low * _NODES), max(math.ceil(high * _NODES), math.floor(low * _NODES) + 3) + 1) / _NODES


def _read_off(
    curve: Callable[[FloatArray, FloatArray], FloatArray],
    nodes: FloatArray,
    aims: FloatArray,
    delta: FloatArray,
    otherwise: FloatArray,
) -> FloatArray:
    """(groups,) where a growing curve reaches each aim; beyond the nodes `otherwise`, or ∓inf where that is NaN.

    Only ever a guess: whatever is read here is evaluated again before it is used.
    """
    out = otherwise.copy()
    deltas, which = np.unique(delta, return_inverse=True)
    values = curve(np.repeat(nodes, len(deltas)), np.tile(deltas, len(nodes))).reshape(len(nodes), len(deltas))
    for number in range(len(deltas)):
        rows = which == number
        log_spent = np.log(np.clip(values[:, number], 1e-300, 1e300))
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
    spends: Callable[[FloatArray, npt.NDArray[np.int64]], FloatArray],
    budget: FloatArray,
    start: FloatArray,
    lowest: float,
    highest: float,
) -> FloatArray:
    """(groups,) the largest u in [lowest, highest] found with spends(u) <= budget·TARGET, or NaN; spends grow with u.

    Many secants at once, each inside its own bracket; a group leaves as soon as little of its budget is left over.
    """
    groups = len(budget)
    tolerance = TOLERANCE if groups <= FEW else TOLERANCE_OF_MANY
    target = budget * TARGET
    safe, over = np.full(groups, np.nan), np.full(groups, np.nan)
    safe_excess, over_excess = np.full(groups, np.nan), np.full(groups, np.nan)
    u = np.clip(start, lowest, highest)
    stride = 0.25
    active = np.arange(groups)
    for attempt in range(80):
        spent = spends(u[active], active)
        # Logs make both searches nearly straight lines; bounded, so that 0 and inf stay usable.
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = np.clip(np.log(np.maximum(spent, 1e-300) / target[active]), -5.0, 5.0)
        keeps = spent <= target[active]  # NaN keeps nothing
        excess = np.where(np.isnan(excess), 5.0, excess)
        here, there = active[keeps], active[~keeps]
        safe[here], safe_excess[here] = u[here], excess[keeps]
        over[there], over_excess[there] = u[there], excess[~keeps]
        done = np.where(keeps, (u[active] >= highest) | (excess >= -tolerance), u[active] <= lowest)
        bracketed = ~np.isnan(safe[active]) & ~np.isnan(over[active])
        done |= bracketed & (over[active] - safe[active] < 1e-12)
        excess, bracketed, active = excess[~done], bracketed[~done], active[~done]
        if len(active) == 0:
            break
        between = _between(
            safe[active], safe_excess[active], over[active], over_excess[active], tolerance, bisect=attempt % 4 == 3
        )
        # First as far as a straight line asks for, then, where the curve has gone flat, in ever longer strides.
        stride *= 2 if attempt > 3 else 1
        jump = np.full(len(active), stride) if attempt > 3 else np.maximum(np.abs(excess), 1e-4) * 1.2
        onwards = np.clip(u[active] + np.where(np.isnan(over[active]), jump, -jump), lowest, highest)
        u[active] = np.where(bracketed, between, onwards)
    return safe


def _between(
    a: FloatArray, fa: FloatArray, b: FloatArray, fb: FloatArray, tolerance: float, bisect: bool
) -> FloatArray:
    """Where the chord meets a point just on the safe side; now and then the middle, which always gains a bit."""
    if bisect:
        return (a + b) / 2
    with np.errstate(invalid="ignore"):
        u = a + (b - a) * (-tolerance / 2 - fa) / (fb - fa)
        margin = 1e-3 * (b - a)
        return np.asarray(np.clip(u, a + margin, b - margin), dtype=np.float64)
