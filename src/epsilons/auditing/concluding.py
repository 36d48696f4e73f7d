"""Concluding: from scores and a recorded run to findings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..disclosure import SMALLEST_SHOWN, has_small_cells
from ..planning import Plan
from ..planning.display import number
from . import gaussian, hypothesis_tests, one_run
from .canaries import Evidence
from .reestimate import retell
from .result import AuditResult, GroupFinding
from .scores import planned_moments


def conclude(
    found: Evidence, *, attack: str, alpha: float, chosen: Sequence[int], whole: Plan, setting: dict[str, Any]
) -> AuditResult:
    """From scores and a recorded run to findings; `chosen` are the indices of its groups in the whole plan."""
    plan, scores = found.trace.plan, found.scores
    histories = [[phase.history(group) for phase in plan.phases] for group in range(len(plan.epsilons))]
    epsilon_spent = [float(value) for value in whole.epsilon_spent()[list(chosen)]]
    tests = [
        hypothesis_tests.tests(scores, group, history, epsilon_spent[group], float(plan.delta[group]))
        for group, history in enumerate(histories)
    ]
    together = sum(map(len, tests))
    rows = []
    for group, history in enumerate(histories):
        inside, outside = scores.of(group)
        mine = scores.group == group
        score, included, delta = scores.score[mine], scores.included[mine], float(plan.delta[group])
        fit = gaussian.fit_gaussian(inside, outside, alpha)
        planned_in, planned_out = planned_moments(history)
        gap, variance = planned_in.mean - planned_out.mean, (planned_in.variance + planned_out.variance) / 2
        p_value = min([1.0, *(together * test.p_value for test in tests[group])])
        rows.append(
            GroupFinding(
                group=int(chosen[group]),
                label=_label(whole, chosen[group]),
                epsilon=float(plan.epsilons[group]),
                delta=delta,
                epsilon_spent=epsilon_spent[group],
                canaries=len(score),
                included=int(included.sum()),
                one_run=one_run.bound(score, included, delta, alpha),
                one_run_fdp=one_run.fdp_bound(score, included, delta, alpha),
                gaussian_estimate=gaussian.epsilon_of(fit.mu, delta),
                gaussian_bound=gaussian.epsilon_of(fit.mu_bound, delta),
                mu=fit.mu,
                planned_mu=gap / math.sqrt(variance) if variance > 0 else 0.0,
                tests=tests[group],
                p_value=p_value,
                violated=p_value < alpha,
            )
        )
    return AuditResult(
        attack=attack,
        plan=whole.digest,
        alpha=alpha,
        setting=setting,
        groups=tuple(rows),
        retelling=retell(found.trace),
        not_audited=len(whole.epsilons) - len(chosen),
        suppressed=has_small_cells(whole.groups),
    )


def _label(plan: Plan, group: int) -> str:
    return number(plan.epsilons[group]) if plan.counts[group] >= SMALLEST_SHOWN else f"that of group {group}"
