"""Replanning: budgets change, or people withdraw, in the middle of a run.

What was charged stays charged; what is still to come is solved anew against it, past and future composed in each
direction before the larger one counts. This is ordinary composition only if the change does not depend on anything the
run has released: then past and future are fixed mechanisms of the same record. A change that does depend on it needs
fully adaptive composition, a Rényi filter at one order fixed beforehand (Feldman, Zrnic, arXiv 2008.11193v4; Lécuyer,
arXiv 2103.01379v2), and is refused here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..accounting import Columns, epsilons
from ..accounting.calibration import noises_for, rates_for
from ..budgets import Budgets, IntArray, how_many, indices_of
from ..errors import BudgetError, PlanError

if TYPE_CHECKING:
    from .plans import Plan


@dataclass(frozen=True, eq=False)
class Replanned:
    """A plan from here on, and who stands where in it.

    plan       the steps charged so far (`charged_before`), and a last phase with what is left; its groups are (budget,
               past) pairs, so two may have the same budget. It accounts; nothing can be trained under it
    group      (records,) row of the plan for each record
    withdrawn  (groups,) True where nothing further is drawn because people withdrew
    unmet      (groups,) True where a lowered budget was already spent beyond: nothing further is drawn, and the plan
               keeps to the old budget, for the new one cannot be kept any more
    """

    plan: Plan
    group: IntArray
    withdrawn: npt.NDArray[np.bool_]
    unmet: npt.NDArray[np.bool_]

    @property
    def notes(self) -> tuple[str, ...]:
        """Who is not drawn any more, by count; of few, that they are few."""
        told = []
        if self.withdrawn.any():
            told.append(
                f"{self._how_many(self.withdrawn)} records withdrew: drawn no more; what they were charged stays spent."
            )
        if self.unmet.any():
            told.append(
                f"{self._how_many(self.unmet)} records ask for less than they were already charged: drawn no more, and "
                "their new budgets cannot be kept for this model."
            )
        return tuple(told)

    def _how_many(self, groups: npt.NDArray[np.bool_]) -> str:
        return how_many(int(self.plan.counts[groups].sum()), self.plan.records)


def replanned(
    plan: Plan,
    *,
    after: int,
    budgets: Budgets,
    was: Budgets | IntArray,
    withdrawn: Sequence[int] | IntArray | npt.NDArray[np.bool_] = (),
    independent: bool = False,
) -> Replanned:
    """`plan` with a last phase for new budgets; see Plan.replan."""
    _refuse_unless(independent)
    if plan.adjacency != "zero-out, roster public":
        raise PlanError(
            "Plans for declared shares cannot be changed midway: the changes would be read off the data, which such a "
            "plan promises not to do. Make the plan without public_shares."
        )
    group = _rows_of(plan, was)
    if len(budgets) != plan.records or len(group) != plan.records:
        raise BudgetError(
            f"The plan was made for {plan.records:,} records; {len(budgets):,} new budgets arrived, and {len(group):,} "
            "places in the plan. Give one of each per record, withdrawn ones too."
        )
    current = plan.phases[-1]
    begun = after - (plan.steps - current.steps)
    if not 0 < begun < current.steps:
        raise PlanError(
            f"A plan is changed within its last phase: after {plan.steps - current.steps + 1:,} to {plan.steps - 1:,} "
            f"of its {plan.steps:,} steps; {after:,} arrived."
        )
    gone = np.zeros(plan.records, dtype=bool)
    gone[_leaving(withdrawn, plan.records)] = True

    # One row per (new budget, delta, past row, withdrawn).
    epsilon = np.where(gone, plan.epsilons[group], budgets.epsilons[budgets.group])
    delta = np.where(gone, plan.delta[group], budgets.delta[budgets.group])
    keys = np.stack([epsilon, delta, group.astype(np.float64), gone.astype(np.float64)])
    rows, row, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    level, deltas, old, out = rows[0], rows[1], rows[2].astype(np.int64), rows[3] > 0

    past = [*plan.phases[:-1], dataclasses.replace(current, steps=begun)]
    columns = Columns(
        np.stack([p.sample_rate[old] for p in past]),
        np.stack([p.noise_multiplier[old] for p in past]),
        tuple(p.steps for p in past),
    )
    left = current.steps - begun
    charged = epsilons(plan.accounts, columns, deltas)
    used_up = charged > level * (1 - 1e-4)  # too little is left to solve for
    lowered = (level < plan.epsilons[old]) | (deltas < plan.delta[old])
    same = (level == plan.epsilons[old]) & (deltas == plan.delta[old])
    # Only who asks for less can be unmet; who asks for the same or more is promised no less than before.
    unmet = ~out & lowered & used_up
    # Who was charged more than the new budget keeps the old one, and its delta: it is the promise that still holds.
    level, deltas = np.where(unmet, plan.epsilons[old], level), np.where(unmet, plan.delta[old], deltas)

    rate, size = current.sample_rate[old].copy(), current.weight[old] * current.clip_norm[old]
    rate[out | unmet] = 0.0
    anew = ~(same | out | used_up) & (rate > 0)
    if anew.any():
        before = Columns(columns.rates[:, anew], columns.noises[:, anew], columns.steps)
        if np.ptp(current.clip_norm * current.weight) == 0:  # all alike, as under Sample: the rate is what differs
            noise = float(current.noise_std / size[anew][0])
            rate[anew] = rates_for(level[anew], noise, left, deltas[anew], plan.accounts, rate[anew], before)
        else:
            size[anew] = current.noise_std / noises_for(
                level[anew], rate[anew], left, deltas[anew], plan.accounts, before
            )
    weight, drawn = current.weight[old], float(counts @ rate)
    future = dataclasses.replace(
        current,
        steps=left,
        sample_rate=rate,
        clip_norm=size / weight,
        weight=weight,
        # Where nobody is drawn any more the sums are noise alone: the divisor so far makes updates of it no louder.
        expected_batch=drawn if drawn > 0 else current.expected_batch,
    )
    order = np.lexsort([old, deltas, level])
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    phases = [
        *(
            dataclasses.replace(p, sample_rate=p.sample_rate[old], clip_norm=p.clip_norm[old], weight=p.weight[old])
            for p in past
        ),
        future,
    ]
    made = dataclasses.replace(
        plan,
        epsilons=level[order],
        delta=deltas[order],
        counts=counts[order],
        phases=tuple(
            dataclasses.replace(
                p, sample_rate=p.sample_rate[order], clip_norm=p.clip_norm[order], weight=p.weight[order]
            )
            for p in phases
        ),
        charged_before=sum(p.steps for p in past),
    )
    return Replanned(made.verify(), place[row.reshape(-1)], out[order], unmet[order])


def _refuse_unless(independent: bool) -> None:
    if independent is not True:
        raise PlanError(
            "Replanning is sound only for changes that depend on nothing this run has released (models, losses, "
            "metrics): state so with independent=True. Changes that do depend on it need a Rényi filter whose order is "
            "fixed before training, which this version does not have; until then, start a new run."
        )


def _rows_of(plan: Plan, was: Budgets | IntArray) -> IntArray:
    """(records,) each record's row in the plan."""
    if isinstance(was, Budgets):
        if not (np.array_equal(was.epsilons, plan.epsilons) and np.array_equal(was.delta, plan.delta)):
            raise BudgetError("These are not the budgets that the plan was made for: their levels differ.")
        return was.group
    rows = np.asarray(was)
    whole = rows.ndim == 1 and np.issubdtype(rows.dtype, np.integer) and bool((rows >= 0).all())
    if not (whole and np.array_equal(np.bincount(rows, minlength=len(plan.counts)), plan.counts)):
        raise BudgetError(
            "The places given do not fit the plan: its groups hold other numbers of records. Give each record's row, "
            "as `group` of the earlier replanning has it."
        )
    return rows.astype(np.int64)


def _leaving(withdrawn: Sequence[int] | IntArray | npt.NDArray[np.bool_], records: int) -> IntArray:
    """Who is withdrawn. Indices that stand there twice are refused: a mask written as 0 and 1 looks like that."""
    rows = indices_of(withdrawn, records, "withdrawn")
    twice = len(rows) - len(np.unique(rows))
    if twice:
        raise BudgetError(
            f"withdrawn names {twice:,} of its {len(rows):,} records again. Name each once; a mask of 0 and 1 must be "
            "given as True and False."
        )
    return rows
