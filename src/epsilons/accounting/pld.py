"""PLD: numerical composition of privacy loss distributions, in both directions, always from above.

dp-accounting composes "remove" and "add" apart and reports the larger delta; connect-the-dots rounds so that
every discretised distribution dominates the true one (Doroshenko et al., "Connect the Dots: Tighter Discrete
Approximations of Privacy Loss Distributions", arXiv 2207.04380v1). Two things are added here: a grid fitted
to each mechanism, and delta − 1e-12, because the FFT's own rounding reaches that far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..budgets import SMALLEST_DELTA
from ..errors import BudgetError
from ..mechanism import SMALLEST_NOISE, SampledGaussian

#: Grid spacing as a fraction of one step's standard deviation of the loss: costs about 2e-4 of epsilon.
FINENESS = 0.05
WIDEST = 0.02  # nats
MOST_POINTS = 1e6
FLOAT_SLACK = 1e-12


def epsilon(history: Sequence[SampledGaussian], delta: float, grid: float | None = None) -> float:
    """Upper bound on epsilon at `delta` for a record that went through `history`.

    grid: spacing of the discretised privacy loss, in nats; by default fitted to the mechanisms.
    Returns inf where no finite epsilon can be certified, and 0 for a record that never takes part.

    >>> round(epsilon([SampledGaussian(512 / 60_000, 3.4358, 9375)], 1e-5), 4)
    0.9141
    """
    parts = tuple(sorted((m for m in history if not m.is_silent), key=lambda m: (m.sample_rate, m.noise_multiplier)))
    if not SMALLEST_DELTA <= delta < 1:
        raise BudgetError(f"delta must lie between {SMALLEST_DELTA:g} and 1: a smaller one is beyond double precision.")
    if not parts:
        return 0.0
    if min(m.noise_multiplier for m in parts) < SMALLEST_NOISE:
        return math.inf
    return _epsilon(parts, float(delta), grid)


def fitted_grid(mechanism: SampledGaussian) -> float:
    """Spacing that keeps the discretisation near 2e-4 of epsilon, capped so that at most ~1e6 points arise.

    One step's loss has standard deviation about q·sqrt(e^{1/σ²} − 1); its range is about (17σ + 1)/2σ² + ln q.
    The cap only ever coarsens the grid, and a coarser grid only ever raises the bound.
    """
    q, s = mechanism.sample_rate, mechanism.noise_multiplier
    deviation = q * math.sqrt(math.expm1(min(1 / s**2, 600.0)))
    return max(min(FINENESS * deviation, WIDEST), _reach(mechanism) / MOST_POINTS)


@lru_cache(maxsize=4096)
def _epsilon(history: tuple[SampledGaussian, ...], delta: float, grid: float | None) -> float:
    # Imported here: it takes a second, which `epsilons --help` and the RDP accountant need not wait for.
    from dp_accounting.pld import privacy_loss_distribution as distributions

    # One grid for all: the finest that any of them asks for, but none finer than the widest range allows.
    coarsest = max(map(_reach, history)) / MOST_POINTS
    spacing = grid if grid is not None else max(min(map(fitted_grid, history)), coarsest)
    composed: Any = None
    try:
        for mechanism in history:
            one: Any = distributions.from_gaussian_mechanism(
                standard_deviation=mechanism.noise_multiplier,
                sampling_prob=mechanism.sample_rate,
                value_discretization_interval=spacing,
                pessimistic_estimate=True,
                use_connect_dots=True,
            )
            many = one.self_compose(mechanism.steps)
            composed = many if composed is None else composed.compose(many)
        bound = float(composed.get_epsilon_for_delta(delta - FLOAT_SLACK))
    except (ArithmeticError, ValueError, MemoryError):
        return math.inf  # where the library gives up, nothing is certified
    return math.inf if math.isnan(bound) else max(bound, 0.0)


def _reach(mechanism: SampledGaussian) -> float:
    """How far one step's privacy loss ranges, in nats, to within dp-accounting's truncated tails."""
    s = mechanism.noise_multiplier
    return max(1.0, (17 * s + 1) / (2 * s * s) + math.log(mechanism.sample_rate))
