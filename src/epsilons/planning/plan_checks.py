"""Checks of a plan that was read from a file: its numbers must agree, and be ones that planning gives."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..budget_checks import is_large, large_delta
from ..errors import PlanError
from .plan_file import PlanFile
from .plan_numbers import SHARES, PlanNumbers

#: Relative difference that rounding may cause in a sum over all groups.
ROUNDING = 1e-6

#: A saved epsilon_spent may be lower by this part than what this version computes from the same numbers.
OTHER_VERSIONS = 1e-3

#: Names of the strategies of this package; planning.strategies adds them. They divide by what their rates come to.
REGISTERED: set[str] = set()

ODD_DIVISOR = (
    "some phase's expected_batch, by which updates are divided, is not what its rates come to, the sum of records · "
    "sample_rate"
)


def check(plan: PlanNumbers, file: PlanFile) -> None:
    """Raise PlanError for a file that contradicts itself, BudgetExceededError for a plan that overspends."""
    _check_repeated(plan, file)
    plan.verify()
    if plan.strategy in REGISTERED and not _divides_as_it_draws(plan):
        raise PlanError(f"This plan file contradicts itself: {ODD_DIVISOR}. It was edited; make a new plan.")
    if not plan.batch_size <= plan.records:
        raise PlanError("This plan's batch_size is larger than its number of records: no sampling rate is above 1.")
    for row, spent in zip(file.groups, plan.epsilon_spent(), strict=True):
        if not spent * (1 - OTHER_VERSIONS) <= row.epsilon_spent <= row.epsilon * (1 + ROUNDING):
            raise PlanError(
                "This plan file contradicts itself: some group's epsilon_spent is not what its phases come to. It was "
                "edited; make a new plan with epsilons plan."
            )
    if plan.adjacency == SHARES and len(np.unique(plan.delta)) > 1:
        raise PlanError(
            f"This plan file claims {SHARES!r}, but such a plan has one delta for all. It was edited; make a new plan "
            "with public_shares and public_records."
        )


def doubts(plan: PlanNumbers, file: PlanFile) -> Iterator[str]:
    """What the numbers in a file cannot show, as warnings."""
    if file.digest is None:
        yield (
            "this plan file holds no digest, so a change by hand would not be seen; an earlier version or another "
            "program wrote it. No budget is overspent. To add one, save it again once you have looked through it."
        )
    if not _divides_as_it_draws(plan):
        yield f"{ODD_DIVISOR}. A custom strategy may intend that; privacy does not depend on it."
    if plan.adjacency == SHARES:
        yield (
            "this plan promises that presence is protected, too, because its shares and number of records were "
            "declared by the caller as not derived from the data. Nothing in the file can show that they were; "
            "rely on it only if you know who made it."
        )
    if is_large(plan.delta, plan.records):
        yield large_delta(plan.records, plan.unit)


def _divides_as_it_draws(plan: PlanNumbers) -> bool:
    """Whether every phase's expected batch, the divisor of its updates, is what its rates come to."""
    return all(
        math.isclose(phase.expected_batch, float(plan.counts @ phase.sample_rate), rel_tol=ROUNDING)
        for phase in plan.phases
    )


def _check_repeated(plan: PlanNumbers, file: PlanFile) -> None:
    """Refuse a file if repeated or derived numbers contradict its phases: it was edited in some places only."""
    claims: list[tuple[str, float | None, float]] = [
        ("steps", file.steps, plan.steps),
        ("records", file.records, plan.records),
    ]
    for phase, table in zip(plan.phases, file.phases, strict=True):
        for value, row in zip(phase.noise_multiplier, table.groups, strict=True):
            claims.append(("noise_multiplier", row.noise_multiplier, float(value)))
    if len(plan.phases) == 1:
        phase = plan.phases[0]
        claims.append(("noise_std", file.noise_std, phase.noise_std))
        claims.append(("expected_batch", file.expected_batch, phase.expected_batch))
        for i, repeated in enumerate(file.groups):
            for name in ("sample_rate", "clip_norm", "weight", "noise_multiplier"):
                claims.append((name, getattr(repeated, name), float(getattr(phase, name)[i])))
    for name, claimed, value in claims:
        tolerance = 0.0 if isinstance(claimed, int) else 1e-9
        if claimed is not None and not math.isclose(claimed, value, rel_tol=tolerance):
            raise PlanError(
                f"This plan file contradicts itself: {name} is not what its phases come to. It was edited; make a new "
                "plan with epsilons plan."
            )
