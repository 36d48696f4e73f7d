"""Concluding: from scores and a recorded run to findings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..budgets import SMALLEST_SHOWN
from ..planning import Plan
from ..disclosure import hides
from ..planning.display import number
from . import gaussian, one_run, hypothesis_tests
from .canaries import Evidence
from .result import Findings, GroupFinding
from .reestimate import retell
from .scores import planned_moments


def conclude(
    found: Evidence, *, attack: str, alpha: float, chosen: Sequence[int], whole: Plan, setting: dict[str, Any]
) -> Findings:
    """From scores and a recorded run to findings; `chosen` are the indices of its groups in the whole plan."""
    plan, scores = found.trace.plan, found.scores
    histories = [[phase.history(group) for phase in plan.phases] for group in range(len(plan.levels))]
    spends = [float(value) for value in whole.spends()[list(chosen)]]
    tests = [
        hypothesis_tests.tests(scores, group, history, spends[group], float(plan.delta[group]))
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
                epsilon=float(plan.levels[group]),
                delta=delta,
                spends=spends[group],
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
    return Findings(
        attack=attack,
        plan=whole.digest,
        alpha=alpha,
        setting=setting,
        groups=tuple(rows),
        retelling=retell(found.trace),
        not_audited=len(whole.levels) - len(chosen),
        withheld=hides(whole),
    )


def _label(plan: Plan, group: int) -> str:
    return number(plan.levels[group]) if plan.counts[group] >= SMALLEST_SHOWN else f"that of group {group}"
