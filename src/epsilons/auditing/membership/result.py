"""MembershipResult: what an attacker learned about members of each group, as values, tables, sentences and JSON.

No value belongs to one record or to fewer than 20. The AUCs of single targets are kept for paired differences, and are
in no text: together with the coins they would show how exposed single records are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..._version import __version__
from ...disclosure import PLAN_SUPPRESSED
from ...errors import InputError
from ...escaping import printable
from ...files import write_json
from ...mechanism import FloatArray
from ...planning.display import Table, aligned, round_up
from . import sentences
from .outcomes import Difference, FoundAt, GroupAttack, GroupRow
from .statistics import Estimate, over_targets

SCHEMA = 1


@dataclass(frozen=True)
class MembershipResult:
    """What attackers learned about members of each group. `print(result)` shows tables and sentences.

    plan             digest of the plan of all shadows
    strategy         name of its strategy
    shadows          number of shadow models; each is the target of all others
    records          number of records
    dealt_at_random  True if chance, and not the records, decided the groups
    rows             groups, strictest first
    attacks          one outcome per attack and row
    differences      between neighbouring rows, and between the strictest and the loosest
    accuracy         mean accuracy of the shadows on the population, if there is one
    setting          what was trained and how, as the caller describes it
    placebo          the same groups, all trained with one budget: differences that the budgets do not cause
    minus_placebo    {attack: (rows,)} AUC minus that of the placebo, paired by target, with 95 % intervals
    suppressed       True if the text leaves out numbers of the plan, because some group has fewer than 20 records
    target_auc       {attack: (shadows, rows)} for paired differences; secret, because it depends on single records
    """

    plan: str
    strategy: str
    shadows: int
    records: int
    dealt_at_random: bool
    rows: tuple[GroupRow, ...]
    attacks: tuple[GroupAttack, ...] = field(repr=False)
    differences: tuple[Difference, ...] = field(repr=False)
    accuracy: float | None = None
    setting: Mapping[str, Any] = field(default_factory=dict, repr=False)
    placebo: MembershipResult | None = field(default=None, repr=False)
    minus_placebo: Mapping[str, tuple[Estimate, ...]] = field(default_factory=dict, repr=False)
    suppressed: bool = False
    target_auc: Mapping[str, FloatArray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The attacks, in the order in which they were given."""
        return tuple(dict.fromkeys(one.attack for one in self.attacks))

    def of(self, attack: str, row: int) -> GroupAttack:
        """The outcome of an attack on a row. Raises InputError if there is none."""
        for one in self.attacks:
            if (one.attack, one.row) == (attack, row):
                return one
        raise InputError(
            f"There are {len(self.rows)} rows and the attacks {', '.join(self.names)}, got row {row} of {attack!r}."
        )

    @property
    def exceeds_certified(self) -> tuple[GroupAttack, ...]:
        """The outcomes above the certified curve, beyond chance. They show that something is wrong."""
        return tuple(one for one in self.attacks if one.exceeds_certified)

    # -- as text -----------------------------------------------------------------------------------

    def table(self) -> Table:
        """One line per attack and group: AUC, what the plan certifies, and the share of it that the attack reaches."""
        headers = ["attack", "epsilon", "records", "AUC", "95 %"]
        if self.suppressed:
            return headers, [self._cells(one) for one in self.attacks]
        rows = [
            [
                *self._cells(one),
                f"≤ {math.ceil(1000 * self.rows[one.row].certified.area) / 1000:.3f}",
                "unclear" if one.share is None else f"{max(one.share, 0.0):.0%}",
            ]
            for one in self.attacks
        ]
        return [*headers, "certified", "share"], rows

    def rate_table(self) -> Table:
        """One line per attack and group: true-positive rates at low false-positive rates, in percent."""
        rates = [f"TPR at {100 * at.rate:g} %" for at in self.attacks[0].found]
        headers = ["attack", "epsilon"]
        if self.suppressed:
            return [*headers, *rates], [[*self._names(one), *map(_found, one.found)] for one in self.attacks]
        rows = [
            [
                *self._names(one),
                *(cell for at in one.found for cell in (_found(at), f"≤ {round_up(100 * at.certified, 3):.3g}")),
            ]
            for one in self.attacks
        ]
        return [*headers, *(header for rate in rates for header in (rate, "certified"))], rows

    def _cells(self, one: GroupAttack) -> list[str]:
        row, auc = self.rows[one.row], one.auc_of_others
        return [*self._names(one), f"{row.records:,}", f"{auc.value:.4f}", _interval(auc)]

    def _names(self, one: GroupAttack) -> list[str]:
        return [one.attack, self.rows[one.row].label]

    def difference_table(self) -> Table:
        """One line per attack and pair of groups: difference of AUCs, interval, p-value, difference of the placebo."""
        headers = ["attack", "epsilons", "AUC difference", "95 %", "ordered targets", "p"]
        rows = [
            [
                one.attack,
                f"{self.rows[one.loose].label} − {self.rows[one.strict].label}",
                f"{one.auc.value:+.4f}",
                _interval(one.of_others),
                f"{one.ordered:.0%}",
                f"{one.p_value:.2g}",
            ]
            for one in self.differences
        ]
        if self.placebo is None:
            return headers, rows
        placebos = [_signed(self.placebo.difference(one.attack, one.strict, one.loose)) for one in self.differences]
        return [*headers, "placebo"], [[*row, placebo] for row, placebo in zip(rows, placebos, strict=True)]

    def difference(self, attack: str, strict: int, loose: int) -> Difference | None:
        """The difference between two rows; None if it was not computed."""
        wanted = (attack, strict, loose)
        return next((one for one in self.differences if (one.attack, one.strict, one.loose) == wanted), None)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The outcome in sentences, and what holds for every result of this kind."""
        widest = [self.difference(name, 0, len(self.rows) - 1) for name in self.names]
        by_row = [[one for one in self.attacks if one.row == row] for row in range(len(self.rows))]
        strongest = [max(attacks, key=lambda one: one.auc.value) for attacks in by_row]
        above = dict.fromkeys(f"{one.attack} on {self.rows[one.row].label}" for one in self.exceeds_certified)
        lines = [
            *(sentences.recognised(row, one, self.suppressed) for row, one in zip(self.rows, strongest, strict=True)),
            *(sentences.difference(one, self.rows) + self._placebo_sentence(one) for one in widest if one),
            *(sentences.against_placebo(name, rows, self.rows) for name, rows in self.minus_placebo.items()),
            sentences.CHOSEN if self.differences and not self.dealt_at_random else "",
            sentences.PLACEBO_HELPS if self.differences and not (self.dealt_at_random or self.placebo) else "",
            sentences.EXCEEDS.format(attacks=", ".join(above)) if above else sentences.BELOW,
            PLAN_SUPPRESSED if self.suppressed else "",
            sentences.ONE_OF.format(runs=self.setting["runs"]) if "runs" in self.setting else "",
            sentences.LIMITS,
            self.not_covered,
        ]
        return tuple(filter(None, lines))

    @property
    def not_covered(self) -> str:
        """The statement that must be on every output."""
        return sentences.NOT_COVERED.format(shadows=self.shadows)

    def _placebo_sentence(self, one: Difference) -> str:
        same = self.placebo.difference(one.attack, one.strict, one.loose) if self.placebo else None
        return " " + sentences.placebo(same) if same else ""

    def __str__(self) -> str:
        tables = [self.table(), self.rate_table(), *([self.difference_table()] if self.differences else [])]
        return "\n\n".join([*map(aligned, tables), "\n".join(map(printable, self.sentences))])

    # -- as JSON -----------------------------------------------------------------------------------

    def to_dict(self, targets: bool = False) -> dict[str, Any]:
        """The JSON values; null replaces numbers that are not finite. docs/membership.md describes every key.

        targets  True: also the AUC of each target, for paired differences; keep it as secret as scores
        """
        values = {
            "schema": SCHEMA,
            "document": "epsilons attack",
            "epsilons_version": __version__,
            "plan": self.plan,
            "strategy": self.strategy,
            "shadows": self.shadows,
            "records": self.records,
            "dealt_at_random": self.dealt_at_random,
            "suppressed": self.suppressed,
            "accuracy": self.accuracy,
            "setting": dict(self.setting),
            "sentences": list(self.sentences),
            "not_covered": self.not_covered,
            "groups": [row.to_dict() for row in self.rows],
            "attacks": [one.to_dict() for one in self.attacks],
            "differences": [one.to_dict() for one in self.differences],
            "placebo": self.placebo.to_dict(targets) if self.placebo else None,
            "minus_placebo": {name: [vars(one) for one in rows] for name, rows in self.minus_placebo.items()},
        }
        if targets:
            values["target_auc"] = {name: auc.tolist() for name, auc in self.target_auc.items()}
        finite: dict[str, Any] = _finite(values)
        return finite

    def save(self, path: str | Path, targets: bool = False) -> Path:
        """Write the JSON, whole or not at all. Only the owner may read the file. Raises RunError if that fails."""
        return write_json(Path(path), self.to_dict(targets))


def paired(a: MembershipResult, b: MembershipResult, attack: str, row_a: int, row_b: int | None = None) -> Estimate:
    """AUC of a minus AUC of b, with a 95 % interval over targets; both with the same coins.

    row_a, row_b  indices of the rows that are compared, by default the same

    Raises InputError where one of them has no such attack, or their numbers of shadows differ.
    """
    columns = []
    for result, row in ((a, row_a), (b, row_a if row_b is None else row_b)):
        if attack not in result.target_auc or not 0 <= row < len(result.rows):
            raise InputError(
                f"A result with {len(result.rows)} groups and the attacks {', '.join(result.target_auc)} has no row "
                f"{row} of {attack!r}."
            )
        columns.append(result.target_auc[attack][:, row])
    if len(columns[0]) != len(columns[1]):
        raise InputError(f"Both results need the same targets, got {len(columns[0])} and {len(columns[1])}.")
    return over_targets(columns[0] - columns[1])


# -- cells and values ------------------------------------------------------------------------------


def _interval(estimate: Estimate) -> str:
    return "none" if math.isnan(estimate.low) else f"{estimate.low:.4f} to {estimate.high:.4f}"


def _signed(difference: Difference | None) -> str:
    return "" if difference is None else f"{difference.auc.value:+.4f}"


def _found(at: FoundAt) -> str:
    if at.found is None:
        return "too few false alarms"
    value, low, high = (f"{100 * part:.3g}" for part in (at.found.value, at.found.low, at.found.high))
    return f"{value} [{low}, {high}]"


def _finite(value: Any) -> Any:
    """The same JSON value with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value
