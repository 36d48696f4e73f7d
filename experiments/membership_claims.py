"""Claims on membership attacks: a number of an arm, or of two arms paired by target, lies in a range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from epsilons.auditing.membership.outcomes import over_targets
from epsilons.reporting.membership import Estimate

from .results import Line
from .settings import Cell, MembershipSettings, Table

#: By group, the arm in which all records have its budget: the placebos.
PLAIN = ("dpsgd-10", "dpsgd-20")


def is_membership(table: Table) -> bool:
    """True for a table of membership attacks."""
    return isinstance(table.cells[0].settings, MembershipSettings)


def run_of(cell: Cell | None, done: Mapping[str, Line]) -> Line | None:
    """The finished run of an arm, maybe with fewer shadows than wanted."""
    return None if cell is None else done.get(cell.settings.named(0))


@dataclass(frozen=True)
class Measured:
    """The number that a claim is about; shadows: of the arm with the fewest, wanted: how many it should have."""

    found: Estimate
    shadows: int
    wanted: int

    def __str__(self) -> str:
        return f"{with_interval(self.found)} ({self.shadows} of {self.wanted} shadows)"


def measured(claim: Mapping[str, Any], table: Table, done: Mapping[str, Line]) -> Measured | None:
    """The number of a claim {"cell", "attack", "quantity"}; None if an arm was not run, or not as long as the other.

    quantity  "auc[0]" or "auc[1]" by group, "difference", "low" (its lower limit, minus the placebos), "ordered" or "p"
    minus     another arm: the difference of the AUCs, paired by target
    """
    arms = [table.by_name[claim[key]] for key in ("cell", "minus") if key in claim]
    lines = [line for arm in arms if (line := run_of(arm, done)) is not None]
    if len(lines) < len(arms) or len({line["shadows"] for line in lines}) > 1:
        return None
    wanted = max(arm.settings.shadows for arm in arms if isinstance(arm.settings, MembershipSettings))
    if claim["quantity"] == "low":
        every = {cell.name: line for cell in table.cells if (line := run_of(cell, done)) is not None}
        found = minus_placebo(claim["cell"], every, claim["attack"])
        return None if found is None else Measured(Estimate(found.low, np.nan, np.nan), lines[0]["shadows"], wanted)
    return Measured(_found(claim, *lines), min(line["shadows"] for line in lines), wanted)


def _found(claim: Mapping[str, Any], line: Line, other: Line | None = None) -> Estimate:
    attack, quantity = claim["attack"], claim["quantity"]
    if other is not None:
        return paired(line, other, attack, _group(quantity))
    difference = line["difference"][attack]
    if quantity in ("ordered", "p"):
        return Estimate(difference[quantity], np.nan, np.nan)
    values = difference["auc"] if quantity == "difference" else line["auc"][attack][_group(quantity)]
    return Estimate(*values[:3])


def _group(quantity: str) -> int:
    return int(quantity.removeprefix("auc[").removesuffix("]"))


def paired(line: Line, other: Line, attack: str, group: int) -> Estimate:
    """AUC of an arm minus that of another for the same records and targets; NaN if their shadows are not as many.

    A target's AUC grows with the number of references, so targets of 64 and of 128 shadows are not compared.
    """
    if line["shadows"] != other["shadows"]:
        return Estimate(np.nan, np.nan, np.nan)
    one, two = (np.array(each["target_auc"][attack][group], dtype=np.float64) for each in (line, other))
    return over_targets(one - two)


def minus_placebo(name: str, arms: Mapping[str, Line], attack: str) -> Estimate | None:
    """The difference between the groups minus the mean of that of the placebos, target by target.

    The placebos are the arms of DP-SGD with as many shadows; None without one.
    """
    effects = {
        arm: np.subtract(*line["target_auc"][attack][::-1])
        for arm, line in arms.items()
        if line["shadows"] == arms[name]["shadows"] and attack in line["target_auc"]
    }
    placebos = [effects[plain] for plain in PLAIN if plain in effects]
    return over_targets(effects[name] - np.mean(placebos, axis=0)) if placebos and name in effects else None


def with_interval(found: Estimate) -> str:
    """The value, with its interval if it has one."""
    if np.isnan(found.low):
        return f"{found.value:.4g}"
    return f"{found.value:.4f} [{found.low:.4f}, {found.high:.4f}]"
