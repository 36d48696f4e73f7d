"""The values of a result: rows of groups, one outcome per attack and row, differences between rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .certified import Certified
from .intervals import RATES, Roc
from .statistics import Estimate

#: What the JSON holds of a ROC.
_CURVE = ("rate", "false_alarms", "found", "low", "high", "band")


@dataclass(frozen=True)
class GroupRow:
    """One group, or several merged: those of fewer than 20 records, or the neighbours in a plan with many groups.

    label      name in print: an epsilon, or a range of epsilons
    epsilon    of a single group; None if merged
    records    number of records
    certified  what the plan certifies for every record of the row
    """

    label: str
    epsilon: float | None
    records: int
    certified: Certified = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "epsilon": self.epsilon,
            "records": self.records,
            "certified_auc": self.certified.area,
            "certified": {"rate": RATES.tolist(), "power": self.certified.power.tolist()},
        }


@dataclass(frozen=True)
class FoundAt:
    """A true-positive rate.

    rate          the false-positive rate
    found         with its 95 % interval; None if fewer than 10 false alarms were observed
    false_alarms  number of non-members above the threshold, over all targets; None likewise
    certified     no attack finds more
    """

    rate: float
    found: Estimate | None
    false_alarms: int | None
    certified: float

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"found": vars(self.found) if self.found else None}


@dataclass(frozen=True)
class GroupAttack:
    """The outcome of one attack on one row.

    attack             name of the attack
    row                index of the row, strictest first
    auc                mean over targets, with a 95 % interval for these records (NaN for one target)
    auc_of_others      the same with an interval that holds for other records of the same kind
    found              true-positive rates at false-positive rates of 1 % and .1 %
    share              largest part of the certified advantage (true- minus false-positive rate) that was reached, at
                       any rate that determines it to .2 or better; None if there is none
    exceeds_certified  True if the simultaneous 95 % lower band of the ROC lies above the certified curve somewhere
    roc                the curve, for the picture
    """

    attack: str
    row: int
    auc: Estimate
    auc_of_others: Estimate
    found: tuple[FoundAt, ...]
    share: float | None
    exceeds_certified: bool
    roc: Roc = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "attack": self.attack,
            "group": self.row,
            "auc": vars(self.auc),
            "auc_of_others": vars(self.auc_of_others),
            "found": [at.to_dict() for at in self.found],
            "share_of_certified": self.share,
            "exceeds_certified": self.exceeds_certified,
            "roc": {name: getattr(self.roc, name).tolist() for name in _CURVE},
        }


@dataclass(frozen=True)
class Difference:
    """AUC of a looser row minus that of a stricter row, for one attack.

    attack         name of the attack
    strict, loose  indices of the rows
    auc            difference, paired by target, with a 95 % interval for these records
    of_others      the same with an interval that holds for other records
    ordered        share of the targets with a positive difference
    p_value        of the randomisation test over records; NaN if a row has too few records that were in and out
    """

    attack: str
    strict: int
    loose: int
    auc: Estimate
    of_others: Estimate
    ordered: float
    p_value: float

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"auc": vars(self.auc), "of_others": vars(self.of_others)}
