"""The weighted-orders filter against adversaries that choose each mechanism from the outputs of those before.

Mechanisms are binary channels: under data D they answer "yes" with probability x, under D′ with probability y. A tree
of them has few leaves, so its delta is computed from the raw probabilities alone.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq

from epsilons import SampledGaussian
from epsilons.accounting import filter as filter_
from epsilons.accounting import rdp

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


def exact_delta(leaves):
    """The hockey-stick divergence at EPSILON, in the worse direction. leaves: (probability under D, under D′)"""
    e = math.exp(EPSILON)
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


def caps_of(orders, offsets):
    return {order: EPSILON - offset for order, offset in zip(orders, offsets, strict=True)}


def test_the_best_order_afterwards_is_no_filter():
    # What rdp.epsilon(past + run) <= epsilon would allow: the whole delta at each of two orders.
    leaves = two_stages(caps_of((32, 4), [conversion(order, DELTA) for order in (32, 4)]))
    assert sum(x for x, _ in leaves) == pytest.approx(1)
    assert exact_delta(leaves) == pytest.approx(1.76e-5, rel=0.01)


def test_the_same_adversary_stays_below_delta_under_the_filter():
    offsets = filter_.offsets(DELTA, filter_.home_orders(EPSILON, DELTA))[0]
    caps = caps_of(filter_.ORDERS, offsets)
    reached = [
        exact_delta(two_stages(caps, orders=(a, b)))
        for a in (4, 5, 6, 8, 32)
        for b in (4, 5, 6, 8)
        if min(caps[a], caps[b]) > 0.2
    ]
    assert 0.2 * DELTA < max(reached) <= DELTA


def random_tree(rng, sums, caps, p, q, depth):
    """The leaves of a tree of channels that uses up what is left at a random order, with the sharpest channel last."""
    usable = np.flatnonzero(caps - sums > 1e-6)
    if depth == 0 or len(usable) == 0:
        return [(p, q)]
    place = rng.choice(usable)
    order, left = filter_.ORDERS[place], (caps - sums)[place]
    if depth == 1:
        x, y = sharpest(order, left * (1 - 1e-6), EPSILON - math.log(p / q), points=60)
    else:
        x = rng.uniform(0.001, 0.9)
        y = channel_with(order, x, left * rng.uniform(0.001, 0.2))
    after = sums + costs(x, y)
    assert (after <= caps).any(), "the filter would refuse this channel"
    yes = random_tree(rng, after, caps, p * x, q * y, depth - 1)
    return yes + random_tree(rng, after, caps, p * (1 - x), q * (1 - y), depth - 1)


def channel_with(order, x, left):
    """y < x at which the divergence at this order is `left`."""
    log_x = math.log(x)
    least = max(log_x - (left + 5) * order / (order - 1) - 60, -700)
    return math.exp(brentq(lambda y: divergence_of_logs(order, log_x, y) - left, least, log_x - 1e-13))


def reached(caps, trees, seed):
    rng = np.random.default_rng(seed)
    for _ in range(trees):
        leaves = random_tree(rng, np.zeros(16), caps, 1.0, 1.0, int(rng.integers(1, 5)))
        assert sum(x for x, _ in leaves) == pytest.approx(1)
        yield exact_delta(leaves)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_random_adversaries_stay_below_delta(seed):
    caps = EPSILON - filter_.offsets(DELTA, filter_.home_orders(EPSILON, DELTA))[0]
    assert max(reached(caps, 20, seed)) <= DELTA


def test_random_adversaries_exceed_delta_where_the_best_order_counts_afterwards():
    caps = EPSILON - np.array([conversion(order, DELTA) for order in filter_.ORDERS])
    assert max(reached(caps, 40, seed=1)) > 1.1 * DELTA


def test_the_weights_of_all_orders_add_up_to_one():
    home = filter_.home_orders(np.geomspace(0.2, 12, 30), 1e-5)
    weighted = (
        np.exp(-(filter_.offsets(1e-5, home) - np.log1p(-1 / filter_.ORDERS)) * (filter_.ORDERS - 1)) / filter_.ORDERS
    )
    assert np.allclose(weighted.sum(axis=1), 1e-5, rtol=1e-9)
    assert np.allclose(weighted.max(axis=1), 0.9e-5, rtol=1e-9)


def test_an_epsilon_is_what_the_best_order_leaves():
    start = filter_.offsets(1e-5, [5])[0] + np.linspace(0, 1, 16)
    history = [SampledGaussian(0.01, 1.3, 200), SampledGaussian(0.5, 20.0, 3)]
    by_hand = min(
        start[i] + sum(m.steps * rdp.divergence(m.sample_rate, m.noise_multiplier, order)[0] for m in history)
        for i, order in enumerate(filter_.ORDERS)
    )
    assert filter_.epsilon(history, 1e-5, start) == pytest.approx(by_hand, rel=1e-12)


def test_a_history_of_two_runs_costs_what_both_cost_one_after_the_other():
    first, second = SampledGaussian(0.02, 2.0, 100), SampledGaussian(0.05, 3.0, 50)
    start = filter_.offsets(1e-5, filter_.home_orders(2.0, 1e-5))
    spent = filter_.sums(np.array([[0.02]]), np.array([[2.0]]), [100], 1)
    assert filter_.epsilon([first, second], 1e-5, start[0]) == pytest.approx(
        filter_.epsilon([second], 1e-5, (start + spent)[0]), rel=1e-12
    )
