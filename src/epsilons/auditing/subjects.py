"""Subjects: what is to be audited, and which of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..accounting import Accountant
from ..disclosure import SMALLEST_SHOWN
from ..errors import InputError, RunError
from ..mechanism import Groups
from ..planning import Plan
from ..reporting import load_run
from ..run_folder import RunFolder
from ..training.clipping import ENGINES
from ..training.randomness import SOURCES

#: Of more groups than this, so many are audited, evenly spaced from the strictest to the loosest.
MOST_GROUPS = 8


def subject_of(run: str | Path | Plan, accountant: Accountant | None = None) -> tuple[Plan, RunFolder | None, str, str]:
    """The plan, the run's folder if it is one, and the engine and source of randomness to use."""
    if isinstance(run, Plan):
        return run.verify(), None, "auto", "philox"
    path = Path(run)
    if path.is_file():
        return Plan.load(path, accountant), None, "auto", "philox"
    if not path.is_dir():
        raise RunError(f"{path} is neither a run's folder nor a saved plan.")
    shown = load_run.read(path, accountant)
    engine, randomness = shown.settings.engine, shown.settings.randomness
    return (
        shown.plan,
        RunFolder(path),
        engine if engine in ENGINES else "auto",
        randomness if randomness in SOURCES else "philox",
    )


def chosen_groups(plan: Plan, groups: Sequence[int] | None) -> list[int]:
    if groups is not None:
        wrong = [g for g in groups if not 0 <= g < len(plan.epsilons)]
        if wrong or not len(groups):
            raise InputError(f"The plan has groups 0 to {len(plan.epsilons) - 1}; {list(groups)} arrived.")
        return sorted(set(map(int, groups)))
    large = np.flatnonzero(plan.counts >= SMALLEST_SHOWN)
    if not len(large):
        raise InputError(
            f"No budget of this plan is shared by {SMALLEST_SHOWN} or more records, so that findings would tell single "
            "people's budgets. Say which groups to audit (groups=[0, …], or --groups 0,1), and keep what is found to "
            "yourself."
        )
    places = np.unique(np.linspace(0, len(large) - 1, min(len(large), MOST_GROUPS)).round().astype(int))
    return [int(group) for group in large[places]]


def only(plan: Plan, groups: Sequence[int]) -> Plan:
    """The rows of these groups: what one group goes through does not depend on the others' rows."""
    rows = list(groups)
    phases = tuple(
        replace(
            phase,
            sample_rate=phase.sample_rate[rows],
            clip_norm=phase.clip_norm[rows],
            weight=phase.weight[rows],
        )
        for phase in plan.phases
    )
    return replace(plan, groups=Groups(plan.epsilons[rows], plan.delta[rows], plan.counts[rows]), phases=phases)
