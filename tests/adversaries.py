"""Adversaries that choose each mechanism from the outputs of those before, small enough for an exact delta.

Mechanisms are binary channels: under data D they answer "yes" with probability x, under D′ with probability y. A tree
of them has few leaves, so its delta is computed from the raw probabilities alone.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq

from epsilons.accounting import filter as filter_

EPSILON, DELTA = 4.0, 1e-5


def divergence(order, x, y):
    """The Rényi divergence of a binary channel, in the worse direction."""
    return divergence_of_logs(order, math.log(x), math.log(y))


def costs(x, y):
    return np.array([divergence(order, x, y) for order in filter_.ORDERS])


def divergence_of_logs(order, log_x, log_y):
    """The same of the logarithms: probabilities may be far below 1."""

    def one_way(a, b):
        rest = order * math.log1p(-math.exp(a)) + (1 - order) * math.log1p(-math.exp(b))
        return float(np.logaddexp(order * a + (1 - order) * b, rest)) / (order - 1)

    return max(one_way(log_x, log_y), one_way(log_y, log_x))


def conversion(order, delta):
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def exact_delta(leaves, epsilon=EPSILON):
    """The hockey-stick divergence at epsilon, in the worse direction. leaves: (probability under D, under D′)"""
    e = math.exp(epsilon)
    return max(sum(max(x - e * y, 0) for x, y in leaves), sum(max(y - e * x, 0) for x, y in leaves))


def sharpest(order, left, epsilon, points=1500):
    """The channel with the largest x − e^ε·y among those whose divergence at this order is `left`."""
    best, channel = 0.0, (0.5, 0.5)
    for log_x in np.linspace(math.log(1e-8), math.log(0.95), points):
        least = max(log_x - (left + 5) * order / (order - 1) - 60, -700)
        log_y = brentq(lambda y, x=log_x: divergence_of_logs(order, x, y) - left, least, log_x - 1e-13)
        gain = math.exp(log_x) - math.exp(epsilon + log_y)
        if gain > best:
            best, channel = gain, (math.exp(log_x), math.exp(log_y))
    return channel


def two_stages(caps, first=(0.1, 0.1 / 1.2), orders=(32, 4)):
    """The leaves of: one informative bit, and then on each branch what another order still allows."""
    leaves = []
    for order, (p, q) in zip(orders, [first, (1 - first[0], 1 - first[1])], strict=True):
        left = caps[order] - divergence(order, *first)
        x, y = sharpest(order, left, EPSILON - math.log(p / q))
        leaves += [(p * x, q * y), (p * (1 - x), q * (1 - y))]
    return leaves


def channel_with(order, x, left):
    """y < x at which the divergence at this order is `left`."""
    log_x = math.log(x)
    least = max(log_x - (left + 5) * order / (order - 1) - 60, -700)
    return math.exp(brentq(lambda y: divergence_of_logs(order, log_x, y) - left, least, log_x - 1e-13))


def random_tree(rng, account, depth, epsilon=EPSILON, p=1.0, q=1.0, caution=1e-6):
    """The leaves of a tree of channels that uses up what is left at a random order, with the sharpest channel last.

    account  has `left`, (orders,) nats, and `charge(costs) -> (account after "yes", account after "no")`
    """
    usable = np.flatnonzero(account.left > 1e-5)
    if depth == 0 or len(usable) == 0:
        return [(p, q)]
    place = rng.choice(usable)
    order, left = filter_.ORDERS[place], account.left[place]
    if depth == 1:
        x, y = sharpest(order, left * (1 - caution), epsilon - math.log(p / q), points=60)
    else:
        x = rng.uniform(0.001, 0.9)
        y = channel_with(order, x, left * rng.uniform(0.001, 0.2))
    yes, no = account.charge(costs(x, y))
    return random_tree(rng, yes, depth - 1, epsilon, p * x, q * y) + random_tree(
        rng, no, depth - 1, epsilon, p * (1 - x), q * (1 - y)
    )
