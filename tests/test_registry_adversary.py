"""Adversaries against the registry itself: its whole-number caps, its rounded costs, its refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from adversaries import DELTA, EPSILON, conversion, costs, divergence, exact_delta, random_tree, sharpest
from epsilons.accounting import filter as filter_
from epsilons.errors import RegistryRefusedError
from epsilons.registry import Registry, Roster
from epsilons.registry.cohorts import move
from epsilons.registry.rosters import MOST, UNIT

#: One lifetime budget: every branch of every tree is a person of their own.
PEOPLE = 3000


class House:
    """A registry whose people all have the same lifetime budget, and the next of them to whom nothing happened."""

    def __init__(self, registry, epsilon):
        registry.enrol(range(PEOPLE), epsilon, DELTA)
        self.registry, self._next = registry, 0

    def person(self, history=()):
        self._next += 1
        person = Person(self, self._next - 1, [])
        for channel_costs in history:
            person.pay(channel_costs)
        return person


@dataclass
class Person:
    """Somebody on one branch of a tree. history: costs of the channels so far"""

    house: House
    number: int
    history: list

    @property
    def left(self):
        accounts = self.house.registry.account([self.number])
        return accounts.epsilon[0] - accounts.starts[0]

    def pay(self, channel_costs):
        """Reserve one mechanism of these Rényi divergences. Raises RegistryRefusedError."""
        change = np.ceil(np.minimum(channel_costs * UNIT, MOST)).astype(np.int64)[None]
        database, roster = self.house.registry._database, Roster(np.array([self.number]), np.array([0]))
        database.transaction(lambda: move(database, roster, change, is_charge=True))
        self.history.append(channel_costs)

    def charge(self, channel_costs):
        other = self.house.person(self.history)
        for one in (self, other):
            one.pay(channel_costs)
        return self, other


def house(folder, epsilon):
    return House(Registry.create(f"sqlite:///{folder}/people.db"), epsilon)


#: 10 trees per seed: 200 in all.
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_random_adversaries_stay_below_delta(tmp_path, seed):
    rng, epsilon = np.random.default_rng(seed), [EPSILON, 1.0, 8.0][seed % 3]
    against = house(tmp_path, epsilon)
    reached = []
    for _ in range(10):
        leaves = random_tree(rng, against.person(), int(rng.integers(1, 5)), epsilon, caution=1e-9)
        assert sum(x for x, _ in leaves) == pytest.approx(1)
        reached.append(exact_delta(leaves, epsilon))
    assert 0.001 * DELTA < max(reached) <= DELTA


def two_stages(against, caps, orders, first=(0.1, 0.1 / 1.2)):
    """The leaves of the adversary of docs/registry.md, who asks for what these caps allow; None where it is refused."""
    leaves = []
    for order, (p, q) in zip(orders, [first, (1 - first[0], 1 - first[1])], strict=True):
        person = against.person([costs(*first)])
        x, y = sharpest(order, caps[order] - divergence(order, *first), EPSILON - math.log(p / q), points=400)
        person.pay(costs(x, y))
        leaves += [(p * x, q * y), (p * (1 - x), q * (1 - y))]
    return leaves


def test_the_adversary_that_exceeds_delta_under_plain_rdp_is_refused(tmp_path):
    caps = {order: EPSILON - conversion(order, DELTA) for order in (4, 32)}
    with pytest.raises(RegistryRefusedError):
        two_stages(house(tmp_path, EPSILON), caps, (32, 4))


def test_the_same_adversary_stays_below_delta_with_what_the_registry_allows(tmp_path):
    against = house(tmp_path, EPSILON)
    caps = dict(zip(filter_.ORDERS, against.person().left - 1e-9, strict=True))
    usable = [order for order in (4, 5, 6, 8, 32) if caps[order] > 0.2]
    reached = [exact_delta(two_stages(against, caps, (a, b))) for a in usable for b in usable]
    assert 0.2 * DELTA < max(reached) <= DELTA


@pytest.mark.parametrize("order", [6, 8, 32])
def test_a_pico_nat_too_much_is_refused(tmp_path, order):
    against = house(tmp_path, EPSILON)
    place = list(filter_.ORDERS).index(order)
    cost = np.full(16, 1e6)
    cost[place] = against.person().left[place] - 2.5 / UNIT
    against.person([cost])
    cost[place] += 3 / UNIT
    with pytest.raises(RegistryRefusedError):
        against.person([cost])
