"""Audits: an attack on the library's own training path, bounds, hypothesis tests and a verdict.

To add an attack: write a function `(plan, config) -> AttackResult` in a new file, and add a line to ATTACKS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..accounting import Accountant
from ..clipping import ENGINES
from ..core.disclosure import SMALLEST_SHOWN, has_small_cells
from ..core.mechanism import Groups
from ..draws.randomness import SOURCES
from ..errors import InputError, RunError, named
from ..ledger.run_folder import RunFolder
from ..planning import Plan
from ..planning.display import number
from ..reporting.load_run import load_run
from ..training import Performance
from . import bounds
from .audit_result import AuditResult, GroupResult, draw
from .bounds import CanaryScores, planned_moments, run_tests
from .canaries import AttackConfig, AttackResult, canaries
from .recorder import Trace, reestimate

#: An attack makes scores and a recorded run from a plan and a config.
Attack = Callable[[Plan, AttackConfig], AttackResult]

ATTACKS: Mapping[str, Attack] = {"canaries": canaries}

#: Of more groups, this many are audited by default, evenly spaced from the strictest to the loosest.
MOST_GROUPS = 8


def audit(
    run: str | Path | Plan,
    attack: str | Attack = "canaries",
    *,
    alpha: float = 0.05,
    groups: Sequence[int] | None = None,
    accountant: Accountant | None = None,
    performance: Performance | None = None,
    randomness: str | None = None,
    **options: Any,
) -> AuditResult:
    """Audit a plan or a run: train once more under its plan, with canaries, and test their scores and the training.

    run         a run's folder (audit.json and audit.svg are written into it), a saved plan, or a Plan
    attack      a name in ATTACKS, or a function
    alpha       probability of calling an honest run violated; each bound has confidence 1 − alpha
    groups      indices of the plan's groups to audit; by default up to 8 of those with 20 or more records
    accountant  the function that certified the plan, if it is not one of the library's
    performance as in make_private; by default with the run's engine
    randomness  as in make_private; by default the run's
    options     the other fields of `AttackConfig`:
                canaries     number per group; on average half of them are in
                canary_rows  under a plan of persons, how many rows each canary owns, all of which are read when it is
                             drawn: 10 by default. The canary is in or out as a whole
                model        trained on the real records; a copy is trained and thrown away. By default logistic
                             regression
                dataset      the real records, (inputs, targets), (records, …) each; by default the embedded digits. The
                             plan's promise depends on neither, and the result does not depend on the values of real
                             records
                loss         "cross_entropy" or another name that `fit` knows, or a function (outputs, targets) ->
                             (batch,)
                seed         makes the audit repeatable
                progress     show progress on stderr

    Of a plan for several runs, one run is audited, against the epsilon that one of them spends by itself. The audit
    takes as long as training that model for the plan's steps. It can show that a promise is broken, never
    that it is kept. Methods and papers: docs/audit.md.

    Nothing is charged to a budget or to a registry. With `dataset` the result stays internal: the given records are
    trained on again, in groups that are dealt at random.

    Raises InputError for arguments or a plan that cannot be audited, DataError or ModelError for a dataset or model
    that do not fit, RunError for a folder without a complete run, LedgerError for a ledger that was altered.

    >>> import epsilons
    >>> budgets = epsilons.Budgets.from_shares({1.0: 0.5, 4.0: 0.5}, records=1_000, seed=0)
    >>> plan = epsilons.plan(budgets, epsilons.Recipe(steps=5, batch_size=60, clip_norm=1.0), accountant="rdp")
    >>> epsilons.audit(plan, canaries=20, seed=0).verdict
    'consistent'
    """
    made, folder, default_engine, default_randomness = _load(run, accountant)
    if folder is not None:
        from ..ledger.signatures import warn_of_change  # needs the extra `app`, as signatures do

        warn_of_change(folder.path, "audit.json")
    plan = _by_itself(made)  # the audit trains once, so its scores are tested against what one run may spend
    if not 0 < alpha < 0.5:
        raise InputError(f"alpha must be between 0 and 0.5, got {alpha}.")
    chosen = _chosen_groups(plan, groups)
    config = AttackConfig(
        performance=performance or Performance(engine=default_engine),
        randomness=randomness or default_randomness,
        **options,
    )
    run_attack = attack if callable(attack) else named(ATTACKS, attack, "attack")
    outcome = run_attack(_restricted(plan, chosen), config)
    result = AuditResult(
        attack=attack if isinstance(attack, str) else str(getattr(attack, "__name__", type(attack).__name__)),
        plan=made.digest,
        alpha=alpha,
        setting={
            "trained": outcome.description,
            "steps": plan.steps,
            **({"runs": made.runs} if made.runs > 1 else {}),
            **({"canary_rows": config.rows_under(plan)} if plan.unit == "person" else {}),
            **({"on_accounts": True} if made.groups.starts is not None else {}),
            **({"real_records": True} if config.dataset is not None else {}),
            "engine": config.engine_name,
            "randomness": config.randomness,
            "seeded": config.seed is not None,
        },
        groups=_group_results(outcome, plan, chosen, alpha),
        reestimate=reestimate(outcome.trace),
        not_audited=len(plan.epsilons) - len(chosen),
        suppressed=has_small_cells(plan.groups),
    )
    if folder is not None:
        result.save(folder.audit)
        draw(result, folder.path / "audit.svg")
    return result


def _by_itself(plan: Plan) -> Plan:
    """What one run of the plan spends by itself. Canaries have no earlier runs, whatever people were charged before."""
    one = plan.of_one_run
    return one if one.groups.starts is None else replace(one, groups=replace(one.groups, starts=None))


def _load(run: str | Path | Plan, accountant: Accountant | None) -> tuple[Plan, RunFolder | None, str, str]:
    """(plan, the run's folder if there is one, default engine, default source of randomness)."""
    if isinstance(run, Plan):
        return run.verify(), None, "auto", "chacha20"
    path = Path(run)
    if path.is_file():
        return Plan.load(path, accountant), None, "auto", "chacha20"
    if not path.is_dir():
        raise RunError(f"{path} is neither a run's folder nor a saved plan.")
    record = load_run(path, accountant)
    engine, randomness = record.settings.performance.engine, record.settings.randomness
    return (
        record.plan,
        RunFolder(path),
        engine if engine in ENGINES else "auto",
        randomness if randomness in SOURCES else "chacha20",
    )


def _chosen_groups(plan: Plan, groups: Sequence[int] | None) -> list[int]:
    if groups is not None:
        wrong = [g for g in groups if not 0 <= g < len(plan.epsilons)]
        if wrong or not len(groups):
            raise InputError(f"The plan has groups 0 to {len(plan.epsilons) - 1}, got {list(groups)}.")
        return sorted(set(map(int, groups)))
    large = np.flatnonzero(plan.counts >= SMALLEST_SHOWN)
    if not len(large):
        raise InputError(
            f"No budget of this plan is shared by {SMALLEST_SHOWN} or more {plan.unit}s, so the result would reveal "
            "budgets of single people. Name the groups to audit (groups=[0, …], or --groups 0,1), and keep the result "
            "secret."
        )
    chosen = np.unique(np.linspace(0, len(large) - 1, min(len(large), MOST_GROUPS)).round().astype(int))
    return [int(group) for group in large[chosen]]


def _restricted(plan: Plan, groups: list[int]) -> Plan:
    """The plan's rows of these groups. A group's mechanism does not depend on the rows of other groups."""
    phases = tuple(
        replace(phase, **{name: getattr(phase, name)[groups] for name in ("sample_rate", "clip_norm", "weight")})
        for phase in plan.phases
    )
    rows = {name: getattr(plan.groups, name)[groups] for name in ("epsilons", "deltas", "counts")}
    return replace(plan, groups=Groups(**rows), phases=phases)


def _group_results(outcome: AttackResult, plan: Plan, chosen: list[int], alpha: float) -> tuple[GroupResult, ...]:
    audited, scores = outcome.trace.plan, outcome.scores
    histories = [[phase.history(group) for phase in audited.phases] for group in range(len(chosen))]
    epsilon_spent = [float(value) for value in plan.epsilon_spent()[chosen]]
    tests = [
        run_tests(scores, group, history, epsilon_spent[group], float(audited.delta[group]))
        for group, history in enumerate(histories)
    ]
    number_of_tests = sum(map(len, tests))
    results = []
    for group, history in enumerate(histories):
        score, included = scores.of(group)
        delta = float(audited.delta[group])
        fit = bounds.fit_gaussian(score[included], score[~included], alpha)
        planned_in, planned_out = planned_moments(history)
        gap, variance = planned_in.mean - planned_out.mean, (planned_in.variance + planned_out.variance) / 2
        p_value = min([1.0, *(number_of_tests * test.p_value for test in tests[group])])
        index = chosen[group]
        is_large = plan.counts[index] >= SMALLEST_SHOWN
        results.append(
            GroupResult(
                group=index,
                label=number(plan.epsilons[index]) if is_large else f"that of group {index}",
                epsilon=float(audited.epsilons[group]),
                delta=delta,
                epsilon_spent=epsilon_spent[group],
                canaries=len(score),
                included=int(included.sum()),
                one_run=bounds.one_run_bound(score, included, delta, alpha),
                one_run_fdp=bounds.fdp_bound(score, included, delta, alpha),
                gaussian_estimate=bounds.gaussian_epsilon(fit.mu, delta),
                gaussian_bound=bounds.gaussian_epsilon(fit.mu_bound, delta),
                mu=fit.mu,
                planned_mu=gap / math.sqrt(variance) if variance > 0 else 0.0,
                tests=tests[group],
                p_value=p_value,
                violated=p_value < alpha,
            )
        )
    return tuple(results)


__all__ = [
    "ATTACKS",
    "Attack",
    "AttackConfig",
    "AttackResult",
    "AuditResult",
    "CanaryScores",
    "GroupResult",
    "Trace",
    "audit",
    "draw",
]
