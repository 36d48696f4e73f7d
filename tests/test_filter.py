"""The weighted-orders filter against adversaries that choose each mechanism from the outputs of those before."""

from __future__ import annotations

import numpy as np
import pytest

from adversaries import DELTA, EPSILON, conversion, exact_delta, random_tree, two_stages
from epsilons import SampledGaussian
from epsilons.accounting import filter as filter_
from epsilons.accounting import rdp


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


class Account:
    """What is left under these caps, in floating point."""

    def __init__(self, caps, sums=0.0):
        self.left = caps - sums

    def charge(self, channel_costs):
        assert (channel_costs <= self.left).any(), "the filter would refuse this channel"
        return Account(self.left, channel_costs), Account(self.left, channel_costs)


def reached(caps, trees, seed):
    rng = np.random.default_rng(seed)
    for _ in range(trees):
        leaves = random_tree(rng, Account(caps), int(rng.integers(1, 5)))
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


@pytest.mark.parametrize("is_begun", [True, False], ids=["from accounts", "from nothing"])
def test_many_histories_at_once_cost_what_each_costs_by_itself(is_begun):
    """Groups of one rate under other noise (Scale), and those that some phases never draw (Sequential).

    From nothing, each of 16 orders may use a sixteenth of delta.
    """
    rates = np.array([[0.02, 0.02, 0.02, 0.0, 0.0], [0.05, 0.05, 0.0, 0.05, 0.0]])  # (phases, rows)
    noises = np.array([[1.5, 3.0, 1.5, np.inf, np.inf], [2.0, 2.0, np.inf, 4.0, np.inf]])
    steps, deltas = [100, 40], np.array([1e-5, 1e-5, 1e-6, 1e-5, 1e-5])
    starts = filter_.offsets(deltas, [3, 5, 7, 5, 5]) + np.linspace(0, 1, 16) if is_begun else None
    expected = []
    for row in range(5):
        costs = []
        for place, order in enumerate(filter_.ORDERS):
            begin = conversion(order, deltas[row] / 16) if starts is None else starts[row, place]
            costs.append(
                begin
                + sum(
                    count * rdp.divergence(rate, noise, order)[0]
                    for rate, noise, count in zip(rates[:, row], noises[:, row], steps, strict=True)
                    if rate > 0
                )
            )
        expected.append(min(costs))
    if not is_begun:
        expected[-1] = 0.0  # never drawn
    got = filter_.batch_epsilon(rates, noises, steps, deltas, starts)
    assert got == pytest.approx(expected, rel=1e-12)
    assert len(set(np.round(got, 9))) == 5
