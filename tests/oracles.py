"""Slow and obviously right: what the accountants are held to.

Nothing here discretises a privacy loss, and nothing is shared with the library. M is the sampled Gaussian: the
record's presence turns Q = N(0, σ²) into P = (1−q)·N(0, σ²) + q·N(1, σ²) (Mironov, Talwar, Zhang, arXiv 1908.10530v1,
Definition 1 and Section 3). "remove" is the hockey-stick divergence of P from Q, "add" of Q from P; a mechanism has
spent epsilon at delta once both are at most delta.

    one step       closed form                         one_step
    two steps      closed form inside one quadrature   two_steps
    q = 1          Balle & Wang's analytic formula     gaussian
    Rényi          the defining integral, 50 digits    renyi_excess
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import mpmath
import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

Direction = Literal["remove", "add"]
DIRECTIONS: tuple[Direction, ...] = ("remove", "add")
Step = tuple[float, float]  # sample_rate, noise_multiplier

DIGITS = 50


def smallest_epsilon(divergence: Callable[[float], float], delta: float, start: float = 1.0) -> float:
    """The smallest epsilon >= 0 with divergence(epsilon) <= delta, by bisection to 1e-13; divergence falls."""
    if divergence(0.0) <= delta:
        return 0.0
    low, high = 0.0, start
    while divergence(high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-13 * max(high, 1e-3):
        middle = (low + high) / 2
        low, high = (middle, high) if divergence(middle) > delta else (low, middle)
    return (low + high) / 2


# -- one step: closed form ------------------------------------------------------------------------------


def one_step_divergence(sample_rate: float, noise_multiplier: float, epsilon: float, direction: Direction) -> float:
    """Hockey-stick divergence of order e^epsilon of one step, with 50 digits.

    The log-likelihood ratio L(z) = ln(1 − q + q·e^{(2z−1)/2σ²}) grows with z, so the worst event is a half-line:
    "remove" takes z > t with L(t) = ε and gives P(z > t) − e^ε·Q(z > t); "add" takes z < t with L(t) = −ε and gives
    Q(z < t) − e^ε·P(z < t). Definition: Balle & Wang, arXiv 1805.06530v2, Theorem 5 (a mechanism is (ε, δ)-DP iff
    this is at most δ in both directions); the two pairs: Mironov et al., 1908.10530v1, Section 3.
    """
    with mpmath.workdps(DIGITS):
        q, s, e = mpmath.mpf(sample_rate), mpmath.mpf(noise_multiplier), mpmath.mpf(epsilon)
        w = (mpmath.exp(e if direction == "remove" else -e) - (1 - q)) / q  # e^{(2t−1)/2σ²}
        if w <= 0:  # the ratio stays above 1 − q: the half-line is everything ("remove") or nothing ("add")
            return float(1 - mpmath.exp(e)) if direction == "remove" else 0.0
        t = s * s * mpmath.log(w) + mpmath.mpf(1) / 2
        if direction == "remove":
            under_q, shifted = mpmath.ncdf(-t / s), mpmath.ncdf((1 - t) / s)
            return float((1 - q) * under_q + q * shifted - mpmath.exp(e) * under_q)
        under_q, shifted = mpmath.ncdf(t / s), mpmath.ncdf((t - 1) / s)
        return float(under_q - mpmath.exp(e) * ((1 - q) * under_q + q * shifted))


@functools.cache
def one_step(sample_rate: float, noise_multiplier: float, delta: float, direction: Direction) -> float:
    """Exact epsilon at `delta` of one step in one direction: `one_step_divergence` solved by bisection."""
    return smallest_epsilon(
        lambda epsilon: one_step_divergence(sample_rate, noise_multiplier, epsilon, direction), delta
    )


# -- the unsampled Gaussian: closed form for any number of steps ------------------------------------------


@functools.cache
def gaussian(noise_multiplier: float, steps: int, delta: float) -> float:
    """Exact epsilon at `delta` of `steps` unsampled Gaussian steps, with 50 digits.

    δ(ε) = Φ(µ/2 − ε/µ) − e^ε·Φ(−µ/2 − ε/µ), µ = √T/σ: Balle & Wang, "Improving the Gaussian Mechanism for Differential
    Privacy", arXiv 1805.06530v2, Theorem 8; T steps on the same sum are one step with 1/σ multiplied by √T, since
    the losses are Gaussian and add up.
    """

    def divergence(epsilon: float) -> float:
        with mpmath.workdps(DIGITS):
            mu, e = mpmath.sqrt(steps) / mpmath.mpf(noise_multiplier), mpmath.mpf(epsilon)
            return float(mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu))

    return smallest_epsilon(divergence, delta)


# -- two steps: the closed form of the second inside a quadrature over the first ---------------------------


def two_steps_divergence(first: Step, second: Step, epsilon: float, direction: Direction) -> float:
    """Hockey-stick divergence of order e^epsilon of two steps, to about 1e-13 absolute.

    By the definition, with p and r the densities of the first step in the order the direction asks for,

        ∫∫ (p(z)·p'(y) − e^ε·r(z)·r'(y))₊ dy dz  =  ∫ p(z) · D₂(ε − ln(p/r)(z)) dz,

    where D₂(η) is the second step's own one-step closed form at any real η. The outer integral: Gauss-Legendre,
    20 nodes in each of 400 panels, with a panel boundary where D₂ has its kink.
    """
    q, s = first
    kink = _kink(first, second[0], epsilon, direction)
    ends = np.linspace(-11 * s, 1 + 11 * s, 401)
    if kink is not None and ends[0] < kink < ends[-1]:
        ends = np.sort(np.append(ends, kink))
    nodes, weights = np.polynomial.legendre.leggauss(20)
    half = np.diff(ends)[:, None] / 2
    z = (ends[:-1, None] + half * (1 + nodes)).ravel()  # (panels · 20,)
    weight = (half * weights).ravel()
    under_q = np.exp(-0.5 * (z / s) ** 2) / (s * math.sqrt(2 * math.pi))
    under_p = (1 - q) * under_q + q * np.exp(-0.5 * ((z - 1) / s) ** 2) / (s * math.sqrt(2 * math.pi))
    log_ratio = np.log(np.maximum(1 - q, 0) + q * np.exp(np.minimum((2 * z - 1) / (2 * s * s), 700)))
    if direction == "remove":
        return float(weight @ (under_p * _divergence(*second, epsilon - log_ratio, direction)))
    return float(weight @ (under_q * _divergence(*second, epsilon + log_ratio, direction)))


@functools.cache
def two_steps(first: Step, second: Step, delta: float, direction: Direction) -> float:
    """Exact epsilon at `delta` of two steps in one direction, to a relative 1e-13 / delta at worst."""
    return smallest_epsilon(lambda epsilon: two_steps_divergence(first, second, epsilon, direction), delta)


def _divergence(q: float, s: float, epsilon: npt.NDArray[np.float64], direction: Direction) -> npt.NDArray[np.float64]:
    """`one_step_divergence` in double precision at many orders, also negative ones."""
    grown = np.exp(np.clip(epsilon, -700, 700))
    w = ((grown if direction == "remove" else 1 / grown) - (1 - q)) / q
    t = s * s * np.log(np.where(w > 0, w, 1.0)) + 0.5
    if direction == "remove":
        inside = (1 - q - grown) * ndtr(-t / s) + q * ndtr((1 - t) / s)
        return np.where(w > 0, inside, 1 - grown)
    inside = ndtr(t / s) - grown * ((1 - q) * ndtr(t / s) + q * ndtr((t - 1) / s))
    return np.where(w > 0, inside, 0.0)


def _kink(first: Step, second_rate: float, epsilon: float, direction: Direction) -> float | None:
    """z at which the order left to the second step is where its closed form changes branch; None if nowhere."""
    if second_rate == 1:
        return None
    q, s = first
    bound = math.log1p(-second_rate)
    log_ratio = epsilon - bound if direction == "remove" else -bound - epsilon
    w = (math.exp(min(log_ratio, 700)) - (1 - q)) / q
    return s * s * math.log(w) + 0.5 if w > 0 else None


# -- Rényi --------------------------------------------------------------------------------------------------


@functools.cache
def renyi_excess(sample_rate: float, noise_multiplier: float, alpha: float) -> mpmath.mpf:
    """A_α − 1 with A_α = E[(1 − q + q·e^{(2z−1)/2σ²})^α], z ~ N(0, σ²), by Gauss-Legendre with 50 digits.

    Mironov, Talwar, Zhang, arXiv 1908.10530v1, Section 3.3 (the definition that its closed forms for whole α and
    series for other α come from); the Rényi divergence of one step is ln A_α / (α − 1). Plain quadrature of
    the definition, with 50 digits to spare for A_α near 1.
    """
    with mpmath.workdps(DIGITS):
        q, s, a = mpmath.mpf(sample_rate), mpmath.mpf(noise_multiplier), mpmath.mpf(alpha)

        def integrand(y: mpmath.mpf) -> mpmath.mpf:  # z = s·y
            w = mpmath.exp(y / s - 1 / (2 * s * s))
            return ((1 - q + q * w) ** a - 1) * mpmath.npdf(y)

        # The mass lies within 15 deviations of 0 and of α/σ; e^{−15²/2} = 1e-49.
        low, high = -15, float(a / s) + 15
        panels = mpmath.linspace(low, high, max(2, round((high - low) / 3)) + 1)
        return mpmath.quad(integrand, panels, method="gauss-legendre", maxdegree=5)


def renyi_divergence(sample_rate: float, noise_multiplier: float, alpha: float) -> float:
    """ln A_α / (α − 1) of one step, from `renyi_excess`."""
    with mpmath.workdps(DIGITS):
        return float(mpmath.log1p(renyi_excess(sample_rate, noise_multiplier, alpha)) / (mpmath.mpf(alpha) - 1))


def renyi_epsilon(divergence: float, alpha: float, delta: float) -> float:
    """Epsilon at `delta` from a Rényi divergence of order α: Balle et al., arXiv 1905.09982v2, Theorem 21.

    ε = R + ln((α − 1)/α) − (ln δ + ln α)/(α − 1).
    """
    return divergence + math.log((alpha - 1) / alpha) - (math.log(delta) + math.log(alpha)) / (alpha - 1)


# -- another program ------------------------------------------------------------------------------------------


@functools.cache
def prv(steps: tuple[tuple[float, float, int], ...], delta: float, error: float = 0.01) -> tuple[float, float, float]:
    """(lower, estimate, upper) epsilon by Opacus' PRV accountant, in the "remove" direction only.

    Gopi, Lee, Wutschitz, "Numerical Composition of Differential Privacy", arXiv 2106.02848v2; `steps` holds
    (sample_rate, noise_multiplier, steps). The bounds are `error` apart from the estimate; the estimate itself
    is far nearer than that (agreement with the exact Gaussian: 1e-6).
    """
    import warnings

    from opacus.accountants import PRVAccountant

    theirs = PRVAccountant()
    theirs.history = [(noise, rate, count) for rate, noise, count in steps]
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore")
        composed = theirs._get_dprv(eps_error=error, delta_error=delta / 1000)
        lower, estimate, upper = composed.compute_epsilon(delta, delta / 1000, error)
    return float(lower), float(estimate), float(upper)


@functools.cache
def opacus_rdp(steps: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """Epsilon by Opacus' RDP accountant on its default orders; its fractional ones are 2e-6 off at some points."""
    import warnings

    from opacus.accountants import RDPAccountant

    theirs = RDPAccountant()
    theirs.history = [(noise, rate, count) for rate, noise, count in steps]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(theirs.get_epsilon(delta))


# -- discretised: slow twins of accounting/pld.py -------------------------------------------------------


def connected_dots(
    sample_rate: float, noise_multiplier: float, grid: float, lowest: int, points: int
) -> tuple[npt.NDArray[np.float64], float]:
    """Probabilities of losses grid·(lowest + i) of removing a record, and of an infinite one, each with 50 digits.

    Doroshenko et al., arXiv 2207.04380v1, Algorithm 1, from the closed form of one step's divergence.
    """
    with mpmath.workdps(DIGITS):
        q, s, d = mpmath.mpf(sample_rate), mpmath.mpf(noise_multiplier), mpmath.mpf(grid)
        delta = []
        for i in range(points):
            epsilon = d * (lowest + i)
            ratio = 1 + mpmath.expm1(epsilon) / q
            t = s * s * mpmath.log(ratio) + mpmath.mpf(1) / 2 if ratio > 0 else None
            delta.append(
                -mpmath.expm1(epsilon)
                if t is None
                else (1 - q) * mpmath.ncdf(-t / s)
                + q * mpmath.ncdf((1 - t) / s)
                - mpmath.exp(epsilon) * mpmath.ncdf(-t / s)
            )
        step = [b - a for a, b in itertools.pairwise(delta)]
        grow = mpmath.expm1(d)
        inner = [(b - a * mpmath.exp(d)) / grow for a, b in itertools.pairwise(step)]
        probability = [1 - delta[0] + step[0] / grow, *inner, step[-1] / mpmath.expm1(-d)]
        return np.array([float(p) for p in probability]), float(delta[-1])


def dp_accounting_pld(sample_rate: float, noise_multiplier: float, steps: int, grid: float) -> Any:
    """dp-accounting's distribution on this grid, from above: connect-the-dots, both directions."""
    return _dp_accounting(sample_rate, noise_multiplier, steps, grid, pessimistic_estimate=True, use_connect_dots=True)


def optimistic_pld(sample_rate: float, noise_multiplier: float, steps: int, grid: float) -> Any:
    """dp-accounting's distribution on this grid, from below: every loss rounded down, both directions."""
    return _dp_accounting(
        sample_rate, noise_multiplier, steps, grid, pessimistic_estimate=False, use_connect_dots=False
    )


def _dp_accounting(sample_rate: float, noise_multiplier: float, steps: int, grid: float, **estimate: bool) -> Any:
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise_multiplier,
        sampling_prob=sample_rate,
        value_discretization_interval=grid,
        **estimate,
    ).self_compose(steps)
