"""Plans by hand: phases with given numbers, for two groups unless more are given."""

from __future__ import annotations

from typing import Any

from epsilons import Phase, Plan
from epsilons.core.mechanism import Groups
from epsilons.planning.plan_numbers import ROSTER


def a_phase(**changes: Any) -> Phase:
    values = {"steps": 100, "sample_rate": [0.02, 0.02], "clip_norm": [0.5, 1.0], "weight": [1.0, 1.0]}
    return Phase(**(values | {"noise_std": 2.0, "expected_batch": 20.0} | changes))


def by_hand(
    *phases: Phase, epsilons: Any = (1.0, 4.0), delta: Any = None, counts: Any = (400, 600), **changes: Any
) -> Plan:
    """A plan of these phases, which need not keep these epsilons."""
    groups = Groups(epsilons, delta or [1e-5] * len(epsilons), counts)
    values = {"strategy": "by hand", "accountant": "rdp", "adjacency": ROSTER, "batch_size": 20.0}
    return Plan(**(values | {"groups": groups, "phases": phases} | changes))
