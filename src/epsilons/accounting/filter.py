"""Filter: the accountant of people who go through many runs, each planned after the outputs of those before.

The rule is the weighted-orders filter (docs/registry.md#the-filter has the proof). A person has one lifetime budget
(ε, δ) and a weight w_α for each of 16 Rényi orders, Σ w_α = 1, fixed when the budget is first stated. Whatever is
computed may go on while at some order

    Σ of the Rényi divergences of all steps so far  ≤  ε − c(α, w_α·δ),

c the conversion of Balle et al., arXiv 1905.09982v2, Theorem 21. At each single order this is the Rényi filter of
Feldman and Zrnic, arXiv 2008.11193v4, which allows parameters that are chosen from earlier outputs.

`rdp.epsilon` of past and run together is not such a rule: it takes the best order afterwards, at the whole δ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..core.mechanism import FloatArray, IntArray, SampledGaussian
from ..errors import PlanError
from . import rdp

#: The Rényi orders of every account, fixed for all time: stored sums are sums at these orders.
ORDERS: FloatArray = np.array([2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15, 18, 24, 32, 44, 64, 96])
ORDERS.setflags(write=False)

#: The weight of a person's home order; the others share the rest equally.
HOME_WEIGHT = 0.9


def conversion(weighted_deltas: npt.ArrayLike) -> FloatArray:
    """(…, orders) what is added to a Rényi divergence at each order to get an epsilon at that delta.

    weighted_deltas: (…, orders) the part w_α·δ of delta that each order may use.

    Balle et al., arXiv 1905.09982v2, Theorem 21: ln(1 − 1/α) − (ln δ + ln α)/(α − 1).
    """
    logs = np.log(np.asarray(weighted_deltas, dtype=np.float64))
    return np.asarray(np.log1p(-1 / ORDERS) - (logs + np.log(ORDERS)) / (ORDERS - 1), dtype=np.float64)


def home_orders(epsilon: npt.ArrayLike, delta: npt.ArrayLike) -> IntArray:
    """(people,) the index in ORDERS of each person's home order, from their first budget; it never changes.

    It is the order at which a Gaussian mechanism of the least noise fits the budget. Its divergence at order α is
    proportional to α, so the order maximises (ε − c(α, 0.9·δ))/α.

    >>> ORDERS[home_orders([0.3, 1.0, 3.0, 10.0], 1e-5)]
    array([44., 18.,  8.,  4.])
    """
    epsilons, deltas = np.broadcast_arrays(np.atleast_1d(epsilon), np.atleast_1d(delta))
    caps = np.asarray(epsilons, dtype=np.float64)[:, None] - conversion(HOME_WEIGHT * deltas[:, None])
    return np.asarray((caps / ORDERS).argmax(axis=1), dtype=np.int64)


def offsets(delta: npt.ArrayLike, home: npt.ArrayLike) -> FloatArray:
    """(people, orders) c(α, w_α·δ): the epsilon of a person of whom nothing was computed yet, at each order.

    delta  (people,) or one for all
    home   (people,) from `home_orders`
    """
    homes = np.atleast_1d(np.asarray(home, dtype=np.int64))
    return conversion(_weights(homes) * np.broadcast_to(np.asarray(delta, dtype=np.float64), homes.shape)[:, None])


def lifetime_deltas(epsilon: float, delta: float, at: npt.ArrayLike) -> FloatArray:
    """(points,) delta at each epsilon of `at`, up to `epsilon`, of all that is ever computed from one person.

    epsilon, delta  the lifetime budget; the result holds whatever the home order is, so it follows from these alone

    At each order ρ_α stays within ε − c(α, w_α·δ), so the part of the outputs that this order vouches for has a delta
    of at most w_α·δ·e^{(α − 1)(ε − at)} (Theorem 21, solved for δ), and the parts add up (docs/registry.md#the-filter).
    An order at which not even nothing fits vouches for none.

    >>> lifetime_deltas(1.0, 1e-5, [1.0, 0.95, 0.9]).round(5).tolist()
    [1e-05, 0.00104, 0.12028]
    """
    weighted = delta * _weights(np.arange(len(ORDERS)))  # (home orders, orders)
    usable = np.where(conversion(weighted) < epsilon, weighted, 0.0)
    exponents = np.maximum(epsilon - np.asarray(at, dtype=np.float64)[:, None], 0.0) * (ORDERS - 1)
    deltas = np.exp(np.minimum(exponents, 700.0)) @ usable.T
    return np.asarray(np.minimum(deltas.max(axis=1), 1.0), dtype=np.float64)


def _weights(homes: IntArray) -> FloatArray:
    """(people, orders) the part of delta that each order may use. homes: (people,) from `home_orders`"""
    weights = np.full((len(homes), len(ORDERS)), (1 - HOME_WEIGHT) / (len(ORDERS) - 1))
    weights[np.arange(len(homes)), homes] = HOME_WEIGHT
    return weights


def epsilon(history: Sequence[SampledGaussian], delta: float, start: npt.ArrayLike | None = None) -> float:
    """The lifetime epsilon at `delta` that this history needs, after what `start` says.

    history  the mechanisms that the record goes through next
    delta    the lifetime delta; it is not spent run by run
    start    (orders,) what was spent so far plus `offsets`, from an account of the registry. None: nothing was spent,
             and all orders have the same weight

    >>> from epsilons.accounting import rdp
    >>> history = [SampledGaussian(512 / 60_000, 3.4358, 9375)]
    >>> round(epsilon(history, 1e-5), 3), round(epsilon(history, 1e-5, offsets(1e-5, home_orders(1.0, 1e-5))[0]), 3)
    (1.163, 1.006)
    """
    parts = [m for m in history if not m.is_silent]
    rates, noises = (np.array([[getattr(m, name)] for m in parts]) for name in ("sample_rate", "noise_multiplier"))
    starts = None if start is None else np.asarray(start, dtype=np.float64)[None]
    return float(batch_epsilon(rates, noises, [m.steps for m in parts], np.array([delta]), starts)[0])


def batch_epsilon(
    rates: FloatArray, noises: FloatArray, steps: Sequence[int], deltas: FloatArray, starts: FloatArray | None = None
) -> FloatArray:
    """(rows,) the same for many histories: rates and noises (phases, rows), steps (phases,), starts (rows, orders).

    A row that takes no part spends nothing: 0 without `starts`, and with them the epsilon that it began at.
    """
    if starts is None:
        begin = conversion(np.repeat(deltas[:, None], len(ORDERS), axis=1) / len(ORDERS))
    elif starts.shape == (len(deltas), len(ORDERS)):
        begin = starts
    else:
        raise PlanError(f"Each account needs {len(ORDERS)} numbers, one per Rényi order, got shape {starts.shape}.")
    total = begin + sums(rates, noises, steps, len(deltas))
    spent = np.maximum(total.min(axis=1), 0.0)
    drawn = (np.asarray(rates) > 0).any(axis=0) if len(steps) else np.zeros(len(deltas), dtype=bool)
    return np.asarray(np.where(drawn, spent, 0.0) if starts is None else spent, dtype=np.float64)


def sums(rates: FloatArray, noises: FloatArray, steps: Sequence[int], rows: int) -> FloatArray:
    """(rows, orders) Rényi divergences of all steps of each history, rounded up."""
    total = np.zeros((rows, len(ORDERS)))
    for rate, noise, count in zip(rates, noises, steps, strict=True):
        pairs, row = np.unique(np.stack([rate, noise]), axis=1, return_inverse=True)
        once = np.zeros((pairs.shape[1], len(ORDERS)))
        drawn = (pairs[0] > 0) & np.isfinite(pairs[1]) & (count > 0)
        once[drawn] = count * _of_one_step(pairs[:, drawn].tobytes())
        total += once[row.reshape(-1)]
    return total


@lru_cache(maxsize=8)  # a run is reserved and settled with one table
def _of_one_step(pairs: bytes) -> FloatArray:
    """(pairs, orders) Rényi divergences; pairs: the rates, and then the noise multipliers."""
    rates, noises = np.frombuffer(pairs).reshape(2, -1)
    return rdp.divergences(rates, noises, ORDERS)
