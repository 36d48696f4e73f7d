"""The cost of votes as published: Rényi divergence that depends on the votes.

Papernot et al., arXiv 1802.08908v1: Proposition 7 bounds the probability q that a vote ends with another class than
the one with the largest count, Theorem 6 bounds the Rényi divergence by q and by the mechanism's bounds at two higher
orders, and Proposition 10 gives these orders for Gaussian noise. For weighted votes q depends on the noise σ, and the
mechanism's bounds of a record of weight w are those of noise σ/w: λ·w²/σ² at order λ (Proposition 8).

The bound holds for these votes alone. So the epsilon is private itself, and where it stops depends on private data:
neither may be released without a further cost (the same paper, Section 5, smooth sensitivity).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, logsumexp

from epsilons.accounting import rdp
from epsilons.core.mechanism import FloatArray

BoolArray = npt.NDArray[np.bool_]

ORDERS: FloatArray = np.arange(2.0, 101.0)


def log_other(counted: FloatArray, noise_std: float) -> FloatArray:
    """(votes,) ln of a bound on the probability of another class than the top one (Proposition 7).

    counted (votes, classes). Two noisy counts differ by noise of standard deviation √2·noise_std.
    """
    gaps = np.sort(counted, axis=1)[:, -1:] - np.sort(counted, axis=1)[:, :-1]
    return np.asarray(logsumexp(log_ndtr(-gaps / (math.sqrt(2) * noise_std)), axis=1), dtype=np.float64)


def divergences(log_q: FloatArray, noise: float, orders: FloatArray = ORDERS) -> FloatArray:
    """(votes, orders) bounds on the Rényi divergence of each vote, for a record of weight w with noise = σ/w.

    The bound of Theorem 6 where its conditions hold and it is smaller, and λ/noise² elsewhere.
    """
    independent = np.broadcast_to(orders / noise**2, (len(log_q), len(orders)))
    second = noise * np.sqrt(np.maximum(-log_q, 0.0))  # (votes,) the orders of Proposition 10
    first = second + 1
    holds = _holds(log_q, first, second, noise)
    if not holds.any():
        return independent.copy()
    log_q, first, second = log_q[holds], first[holds], second[holds]
    log_1q = np.log1p(-np.exp(log_q))
    log_a = log_1q - np.log(-np.expm1((log_q + second / noise**2) * (second - 1) / second))  # (votes,)
    log_b = first / noise**2 - log_q / (first - 1)
    above = orders[None, :] - 1  # (1, orders)
    bound = np.logaddexp((log_1q[:, None] + above * log_a[:, None]), log_q[:, None] + above * log_b[:, None]) / above
    found = independent.copy()
    found[holds] = np.where(orders <= first[:, None], np.minimum(found[holds], bound), found[holds])
    return found


def _holds(log_q: FloatArray, first: FloatArray, second: FloatArray, noise: float) -> BoolArray:
    """(votes,) whether both orders are above 1, A is positive, and the bound rises with q up to this q."""
    with np.errstate(divide="ignore", invalid="ignore"):
        limit = (second - 1) * second / noise**2
        limit -= second * (np.log(first / (first - 1)) + np.log(second / (second - 1)))
        holds = np.isfinite(log_q) & (second > 1) & (log_q < -second / noise**2) & (log_q <= limit)
    return np.asarray(holds, dtype=np.bool_)


def spent_after(counted: FloatArray, noise_std: float, weight: FloatArray, deltas: FloatArray) -> FloatArray:
    """(votes, groups) epsilon after each vote, by the library's conversion. It is private."""
    log_q = log_other(counted, noise_std)
    spent = []
    for w, delta in zip(weight.tolist(), deltas.tolist(), strict=True):
        total = divergences(log_q, noise_std / w).cumsum(axis=0)
        spent.append(rdp.converted(total, np.full(len(total), delta), ORDERS))
    return np.stack(spent, axis=1)


def affordable(spent: FloatArray, budgets: FloatArray) -> int:
    """How many votes keep every group's epsilon at or below its budget. Stopping there leaks."""
    over = (spent > budgets).any(axis=1)
    return int(over.argmax()) if over.any() else len(spent)
