"""Invert an accountant: the least noise, or the highest rate, that still keeps a budget.

Both searches return an end that was itself evaluated and found to spend at most the budget; an accountant
that is a little rough (PLD's grid moves with its arguments) can only make them stop early, on the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..errors import OutOfReach
from ..mechanism import SMALLEST_NOISE, SampledGaussian
from . import Accountant

#: Calibrate to this part of a budget, so that a plan still verifies after a patch release of a library
#: that moves an epsilon in its seventh digit.
TARGET = 1 - 1e-6
#: Stop once at most this part of the budget is left over.
TOLERANCE = 1e-5
LARGEST_NOISE = 1e7
SMALLEST_RATE = 1e-9


def noise_for(
    epsilon: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: Accountant,
    history: Sequence[SampledGaussian] = (),
) -> float:
    """The smallest noise multiplier found that spends at most `epsilon` at `delta`, from above.

    history: what the record went through before. Raises OutOfReach if no noise is enough.

    >>> from epsilons.accounting import rdp
    >>> round(noise_for(1.0, 1 / 49, 1470, 1e-5, rdp.epsilon), 3)
    3.293
    """

    def spends(log_quietness: float) -> float:
        return accountant([*history, SampledGaussian(sample_rate, math.exp(-log_quietness), steps)], delta)

    quietness = _largest_safe(
        spends,
        epsilon,
        start=-math.log(_clt_noise(epsilon, sample_rate, steps, delta)),
        lowest=-math.log(LARGEST_NOISE),
        highest=-math.log(SMALLEST_NOISE),
    )
    if quietness is None:
        floor = accountant([*history, SampledGaussian(sample_rate, LARGEST_NOISE, steps)], delta)
        raise OutOfReach(
            "A budget is out of reach: whatever the noise, this accountant cannot certify less than epsilon = "
            f"{floor:.3g} at delta = {delta:g}. Ask for at least that, choose a larger delta, or use "
            'accountant="pld", which reaches lower than "rdp".'
        )
    return math.exp(-quietness)


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

    def spends(log_rate: float) -> float:
        return accountant([SampledGaussian(math.exp(log_rate), noise_multiplier, steps)], delta)

    log_rate = _largest_safe(
        spends,
        epsilon,
        start=math.log(min(max(start, SMALLEST_RATE), 1.0)),
        lowest=math.log(SMALLEST_RATE),
        highest=0.0,
    )
    return 0.0 if log_rate is None else math.exp(log_rate)


def _clt_noise(epsilon: float, sample_rate: float, steps: int, delta: float) -> float:
    """A first guess: Gaussian differential privacy's central limit, inverted roughly (Dong et al., 1905.02383v3)."""
    tail = math.log(1 / delta)
    mu = 2 * epsilon / (math.sqrt(2 * (tail + epsilon)) + math.sqrt(2 * tail))
    log_ratio = 2 * (math.log(mu) - math.log(max(sample_rate, 1e-300))) - math.log(steps)
    noise = 1 / math.sqrt(math.log1p(math.exp(min(max(log_ratio, -60.0), 60.0))))
    return min(max(noise, SMALLEST_NOISE), LARGEST_NOISE)


def _largest_safe(
    spends: Callable[[float], float], budget: float, *, start: float, lowest: float, highest: float
) -> float | None:
    """The largest u in [lowest, highest] found with spends(u) <= budget·TARGET, or None. spends must grow with u."""
    target = budget * TARGET
    safe: tuple[float, float] | None = None  # (u, excess <= 0)
    over: tuple[float, float] | None = None  # (u, excess > 0)
    u, stride = min(max(start, lowest), highest), 0.25
    for attempt in range(80):
        spent = spends(u)
        # Logs make both searches nearly straight lines; bounded, so that 0 and inf stay usable.
        excess = min(max(math.log(max(spent, 1e-300)) - math.log(target), -5.0), 5.0)
        if spent <= target:
            safe = (u, excess)
            if u >= highest or excess >= -TOLERANCE:
                break
        else:
            over = (u, excess)
            if u <= lowest:
                break
        if safe and over:
            if over[0] - safe[0] < 1e-12:
                break
            u = _between(safe, over, bisect=attempt % 4 == 3)
        else:
            # First as far as a straight line asks for, then, where the curve has gone flat, in ever longer strides.
            stride *= 2 if attempt > 3 else 1
            jump = stride if attempt > 3 else max(abs(excess), 1e-4) * 1.2
            u = min(max(u + (jump if safe else -jump), lowest), highest)
    return safe[0] if safe else None


def _between(safe: tuple[float, float], over: tuple[float, float], bisect: bool) -> float:
    """Where the chord meets a point just on the safe side; now and then the middle, which always gains a bit."""
    (a, fa), (b, fb) = safe, over
    if bisect:
        return (a + b) / 2
    u = a + (b - a) * (-TOLERANCE / 2 - fa) / (fb - fa)
    margin = 1e-3 * (b - a)
    return min(max(u, a + margin), b - margin)
