"""The result of an attack on membership: values, tables, sentences, and the JSON that is written and read.

No value belongs to one record or to fewer than 20. The AUCs of single targets are kept for paired differences, and are
in no text: together with the coins they would show how exposed single records are. A result is shown in internal pages
only: in that of the attack, and in the internal report of the attacked run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, PlainValidator, TypeAdapter

from .._version import __version__
from ..core.disclosure import PLAN_SUPPRESSED, of_unit, tier_of
from ..core.files import UNWRITTEN, as_json, write_json
from ..core.mechanism import FloatArray, IntArray, Unit
from ..errors import InputError, RunError, json_text, parsed_json, printable
from ..planning import display
from ..planning.display import Table, aligned, round_up

#: JSON has null for numbers that are not finite.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Points = Annotated[FloatArray, PlainValidator(lambda values: np.array(values, dtype=np.float64))]
Counts = Annotated[IntArray, PlainValidator(lambda values: np.array(values, dtype=np.int64))]

#: How a sentence about one group begins.
GROUP = "epsilon "


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; low and high are NaN where nothing can be said."""

    value: Number
    low: Number
    high: Number

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True, eq=False)
class Roc:
    """The ROC of one attack on one group. Arrays are (points,), at those of RATES with 10 or more false alarms.

    rate          false-positive rates
    false_alarms  number of non-members above the threshold, over all targets
    found         true-positive rates
    low, high     their 95 % intervals, each on its own; Clopper-Pearson if there is one target
    band          lower bounds on them that hold together with 95 % confidence
    auc_variance  of the AUC, due to the choice of records
    """

    rate: Points
    false_alarms: Counts
    found: Points
    low: Points = field(repr=False)
    high: Points = field(repr=False)
    band: Points = field(repr=False)
    auc_variance: float = field(default=math.nan, repr=False, metadata=UNWRITTEN)

    def at(self, rate: float) -> Estimate | None:
        """The true-positive rate at one of RATES; None if there are fewer than 10 false alarms."""
        points = np.flatnonzero(np.isclose(self.rate, rate, rtol=1e-9))
        if not len(points):
            return None
        point = points[0]
        return Estimate(float(self.found[point]), float(self.low[point]), float(self.high[point]))


@dataclass(frozen=True, eq=False)
class Power:
    """A certified curve: no attack has a higher true-positive rate, (rates,), at these false-positive rates."""

    rate: Points
    power: Points

    def is_exceeded_by(self, roc: Roc) -> bool:
        """Whether a measured point lies above the curve."""
        return bool((roc.found > self.power[np.isin(self.rate, roc.rate)]).any())


@dataclass(frozen=True)
class GroupRow:
    """One group, or several merged: those of fewer than 20 records, or the neighbours in a plan with many groups.

    label      name in print: an epsilon, or a range of epsilons
    epsilon    of a single group; None if merged
    records    number of records
    certified  what the plan certifies for every record of the row
    declared   what its tier by risk declares, as such a curve; None for other budgets, and for merged rows
    """

    label: str
    epsilon: float | None
    records: int
    certified_auc: float = field(repr=False)
    certified: Power = field(repr=False)
    declared: Power | None = field(default=None, repr=False)


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


@dataclass(frozen=True)
class GroupAttack:
    """The outcome of one attack on one row.

    attack             name of the attack
    group              index of the row, strictest first
    auc                mean over targets, with a 95 % interval for these records (NaN for one target)
    auc_of_others      the same with an interval that holds for other records of the same kind
    found              true-positive rates at false-positive rates of 1 % and .1 %
    share              largest part of the certified advantage (true- minus false-positive rate) that was reached, at
                       any rate that determines it to .2 or better; None if there is none
    exceeds_certified  True if the simultaneous 95 % lower band of the ROC lies above the certified curve somewhere
    roc                the curve, for the picture
    """

    attack: str
    group: int
    auc: Estimate
    auc_of_others: Estimate
    found: tuple[FoundAt, ...]
    share_of_certified: float | None
    exceeds_certified: bool
    roc: Roc = field(repr=False)


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
    ordered: Number
    p_value: Number


# -- The outcome in sentences, and the statements that are on every output

NOT_COVERED = (
    "These shadows were trained on the real records, seeded, {shadows:,} times: no guarantee covers them, their scores "
    "or this result. Nothing is charged to any budget or registry because nothing may be released; publishing these "
    "numbers publishes statistics of private data. Choosing a plan by them is tuning on private data."
)
LIMITS = (
    "This is what these attacks learn, on average over records. It does not prove privacy: another attack may learn "
    "more, up to the certified curve, and single records may be more exposed than their group. It does not notice "
    "missing noise: an attacker who sees only the model may learn little without noise, too. epsilons audit tests that."
)
OF_UNIT: dict[Unit, str] = {
    "record": "",
    "person": "A person is in or out of a shadow with all of their rows. The attacker has these rows, and uses the "
    "mean over them.",
}
ONE_OF = (
    "The plan is for {runs:,} runs, and this is about one of them: what is certified here is that of one run. Who sees "
    "the models of all runs may learn more, up to what the plan certifies for all."
)
EXCEEDS = (
    "{attacks}: the ROC is above the certified curve, beyond chance. The plan does not allow that, so look for an "
    "error: noise that was not added, records in the wrong group, coins that are not independent."
)
OF_RUN = (
    "All numbers here are of one run by this plan. What epsilon promises is the upper limit: it may allow more, and "
    "with a registry it is for a lifetime of runs."
)
DECLARED = (
    "The measured ROC of every attack lies below what each tier declared, at each rate that is shown. Declared is the "
    "smallest of the limits of the tier, its epsilon and delta among them."
)
NOT_DECLARED = (
    "The measured ROC of {attacks} is above what the tier declared at some rate: by chance, unless it is named below."
)
OF_P = (
    "Intervals are of the difference of AUCs. p is of another statistic, the mean score of each record as a member "
    "minus that as a non-member: one may show a difference where the other does not."
)
OTHER_GAME = (
    "To tell which of two people is the member is another game than the odds in a report and on sheets: there, one "
    "person is given, and the guess is whether their data were used."
)
BELOW = "No attack's ROC is above the certified curve, beyond chance. That is expected, and it proves nothing."
CHOSEN = (
    "The groups were not dealt at random, so people who chose different budgets may differ in other ways, too. The "
    "p-values do not separate that from the effect of the budgets."
)
PLACEBO_HELPS = "A placebo arm (--placebo) shows how large it is."


def recognised(row: GroupRow, best: GroupAttack, suppressed: bool) -> str:
    """How well the strongest attack on a row does, for readers who do not know what a ROC is.

    suppressed  True: without the numbers of the plan
    """
    auc = best.auc_of_others
    interval = "" if math.isnan(auc.low) else f", 95 %: {100 * auc.low:.1f} to {100 * auc.high:.1f}"
    bound = math.ceil(1000 * row.certified_auc) / 10
    most = "" if suppressed else f"; in this game, no attack is right more than {bound} times"
    if most and auc.value > row.certified_auc and not best.exceeds_certified:
        most += ", so what was measured above that is chance"
    sentence = (
        f"epsilon {row.label}: an attacker who guesses which of two people is the member is right "
        f"{100 * auc.value:.1f} times in 100 ({best.attack}{interval}). Without the model it is 50 times{most}."
    )
    counted = [at for at in best.found if at.found]
    return sentence + (" " + _alarms(counted[-1], suppressed) if counted else "")


def _alarms(at: FoundAt, suppressed: bool) -> str:
    per = round(1 / at.rate)
    found = at.found.value if at.found else math.nan
    most = "" if suppressed else f"; no attack recognises more than {round_up(per * at.certified, 3):.3g}"
    return (
        f"An attacker who accepts one false alarm in {per:,} non-members recognises {per * found:.3g} of {per:,} "
        f"members{most}."
    )


def difference(one: Difference, rows: Sequence[GroupRow]) -> str:
    """The difference between two rows, with its interval and its p-value."""
    return (
        f"{one.attack}: AUC of epsilon {rows[one.loose].label} minus AUC of epsilon {rows[one.strict].label} is "
        f"{_signed_estimate(one.of_others)}, above 0 in {one.ordered:.0%} of the targets; p = {one.p_value:.2g}."
    )


def placebo(same: Difference) -> str:
    """The same difference where all records have one budget."""
    return f"With one budget for all, the same groups differ by {_signed_estimate(same.of_others)}."


def against_placebo(attack: str, differences: Sequence[Estimate], rows: Sequence[GroupRow]) -> str:
    """The effect of individual budgets on each row, against one budget for all."""
    each = "; ".join(
        f"epsilon {row.label}: {_signed_estimate(one)}" for row, one in zip(rows, differences, strict=True)
    )
    return f"{attack}: AUC minus that with one budget for all, paired by target: {each}."


def _signed_estimate(estimate: Estimate) -> str:
    if math.isnan(estimate.low):
        return f"{estimate.value:+.4f}"
    return f"{estimate.value:+.4f} ({estimate.low:+.4f} to {estimate.high:+.4f})"


# -- MembershipResult

SCHEMA = 1
#: The keys of the JSON, in their order.
_KEYS = (
    *("plan", "strategy", "shadows", "records", "dealt_at_random", "suppressed", "accuracy", "setting", "sentences"),
    *("not_covered", "groups", "attacks", "differences", "placebo", "minus_placebo"),
)
#: Keys that a report leaves out: what is in the file only.
_IN_FILE_ONLY = {"schema", "document", "epsilons_version", "plan", "strategy", "minus_placebo"}
_IN_FILE_ONLY |= {"epsilon", "false_alarms", "band"}


@dataclass(frozen=True)
class MembershipResult:
    """What attackers learned about members of each group. `print(result)` shows tables and sentences.

    plan             digest of the plan of all shadows
    strategy         name of its strategy
    shadows          number of shadow models; each is the target of all others
    records          number of records
    dealt_at_random  True if chance, and not the records, decided the groups
    groups           groups, strictest first
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
    groups: tuple[GroupRow, ...]
    attacks: tuple[GroupAttack, ...] = field(repr=False)
    differences: tuple[Difference, ...] = field(repr=False)
    accuracy: float | None = None
    setting: Mapping[str, Any] = field(default_factory=dict, repr=False)
    placebo: MembershipResult | None = field(default=None, repr=False)
    minus_placebo: Mapping[str, tuple[Estimate, ...]] = field(default_factory=dict, repr=False)
    suppressed: bool = False
    target_auc: Mapping[str, Points] = field(default_factory=dict, repr=False, compare=False)

    @property
    def unit(self) -> Unit:
        """What is in or out of a shadow as a whole."""
        return "person" if self.setting.get("unit") == "person" else "record"

    @property
    def names(self) -> tuple[str, ...]:
        """The attacks, in the order in which they were given."""
        return tuple(dict.fromkeys(one.attack for one in self.attacks))

    def of(self, attack: str, row: int) -> GroupAttack:
        """The outcome of an attack on a row. Raises InputError if there is none."""
        for one in self.attacks:
            if (one.attack, one.group) == (attack, row):
                return one
        raise InputError(
            f"There are {len(self.groups)} rows and the attacks {', '.join(self.names)}, got row {row} of {attack!r}."
        )

    @property
    def exceeds_certified(self) -> tuple[GroupAttack, ...]:
        """The outcomes above the certified curve, beyond chance. They show that something is wrong."""
        return tuple(one for one in self.attacks if one.exceeds_certified)

    def named(self, tiers: Mapping[str, float] | None) -> MembershipResult:
        """The same, with the names of tiers, {name: epsilon}, in the labels of rows that are not merged."""
        labels = [display.named(row.label, tier_of(tiers, row.epsilon)) for row in self.groups]
        rows = tuple(replace(row, label=label) for row, label in zip(self.groups, labels, strict=True))
        return replace(self, groups=rows)

    # -- as text -----------------------------------------------------------------------------------

    def table(self) -> Table:
        """One line per attack and group: AUC, what the plan certifies, and the share of it that the attack reaches."""
        headers = ["attack", "epsilon", f"{self.unit}s", "AUC", "95 %"]
        if self.suppressed:
            return headers, [self._cells(one) for one in self.attacks]
        rows = [
            [
                *self._cells(one),
                f"≤ {math.ceil(1000 * self.groups[one.group].certified_auc) / 1000:.3f}",
                "unclear" if one.share_of_certified is None else f"{max(one.share_of_certified, 0.0):.0%}",
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
        row, auc = self.groups[one.group], one.auc_of_others
        return [*self._names(one), f"{row.records:,}", f"{auc.value:.4f}", _interval(auc)]

    def _names(self, one: GroupAttack) -> list[str]:
        return [one.attack, self.groups[one.group].label]

    def difference_table(self) -> Table:
        """One line per attack and pair of groups: difference of AUCs, interval, p-value, difference of the placebo."""
        headers = ["attack", "epsilons", "AUC difference", "95 %", "ordered targets", "p"]
        rows = [
            [
                one.attack,
                f"{self.groups[one.loose].label} − {self.groups[one.strict].label}",
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
        widest = [self.difference(name, 0, len(self.groups) - 1) for name in self.names]
        by_row = [[one for one in self.attacks if one.group == row] for row in range(len(self.groups))]
        strongest = [max(attacks, key=lambda one: one.auc.value) for attacks in by_row]
        above = dict.fromkeys(f"{one.attack} on {self.groups[one.group].label}" for one in self.exceeds_certified)
        lines = [
            *(recognised(row, one, self.suppressed) for row, one in zip(self.groups, strongest, strict=True)),
            *(difference(one, self.groups) + self._placebo_sentence(one) for one in widest if one),
            OF_P * bool(self.differences),
            *(against_placebo(name, rows, self.groups) for name, rows in self.minus_placebo.items()),
            *(self._of_choice() if self.differences and not self.dealt_at_random else []),
            self._of_declared(),
            EXCEEDS.format(attacks=", ".join(above)) if above else BELOW,
            PLAN_SUPPRESSED if self.suppressed else "",
            OF_RUN,
            OTHER_GAME,
            ONE_OF.format(runs=self.setting["runs"]) if "runs" in self.setting else "",
            OF_UNIT[self.unit],
            LIMITS,
        ]
        return *(of_unit(line, self.unit) for line in filter(None, lines)), self.not_covered

    def _of_declared(self) -> str:
        """Where tiers declare risks: whether every measured point lies below them."""
        rows = [(one, self.groups[one.group]) for one in self.attacks]
        known = [(one, row, row.declared) for one, row in rows if row.declared is not None]
        above = [f"{one.attack} on {row.label}" for one, row, curve in known if curve.is_exceeded_by(one.roc)]
        return (NOT_DECLARED.format(attacks=", ".join(above)) if above else DECLARED) if known else ""

    def _of_choice(self) -> list[str]:
        """Where records chose their groups."""
        return [CHOSEN] if self.placebo else [CHOSEN, PLACEBO_HELPS]

    @property
    def not_covered(self) -> str:
        """The statement that must be on every output."""
        return NOT_COVERED.format(shadows=self.shadows)

    def _placebo_sentence(self, one: Difference) -> str:
        same = self.placebo.difference(one.attack, one.strict, one.loose) if self.placebo else None
        return " " + placebo(same) if same else ""

    def __str__(self) -> str:
        tables = [self.table(), self.rate_table(), *([self.difference_table()] if self.differences else [])]
        return "\n\n".join([*map(aligned, tables), "\n".join(map(printable, self.sentences))])

    # -- on a page ---------------------------------------------------------------------------------

    @property
    def of_groups(self) -> list[str]:
        """The sentences that are about one group each."""
        return [sentence.replace(GROUP, "ε ") for sentence in self.sentences if sentence.startswith(GROUP)]

    @property
    def further(self) -> list[str]:
        """The other sentences, without the one that is shown apart."""
        rest = [sentence for sentence in self.sentences if not sentence.startswith(GROUP)]
        return [sentence.replace(GROUP, "ε ") for sentence in rest if sentence != self.not_covered]

    # -- as JSON -----------------------------------------------------------------------------------

    def to_dict(self, targets: bool = False) -> dict[str, Any]:
        """The JSON values; null replaces numbers that are not finite. docs/membership.md describes every key.

        targets  True: also the AUC of each target, for paired differences; keep it as secret as scores
        """
        own = as_json(self) | {"sentences": list(self.sentences), "not_covered": self.not_covered}
        about = {"schema": SCHEMA, "document": "epsilons attack", "epsilons_version": __version__}
        values = about | {name: own[name] for name in _KEYS}
        if self.placebo:
            values["placebo"] = self.placebo.to_dict(targets)
        return values | ({"target_auc": as_json(self.target_auc)} if targets else {})

    def save(self, path: str | Path, targets: bool = False) -> Path:
        """Write the JSON, whole or not at all. Only the owner may read the file. Raises RunError if that fails."""
        return write_json(Path(path), self.to_dict(targets))


def shown(values: Any) -> Any:
    """The JSON of a result as a report shows it, without what is in the file only."""
    if isinstance(values, dict):
        return {
            name: one if name == "setting" else shown(one) for name, one in values.items() if name not in _IN_FILE_ONLY
        }
    return [shown(one) for one in values] if isinstance(values, list) else values


def load(path: Path) -> MembershipResult:
    """The result in this file, without the AUCs of single targets. Raises RunError if it is damaged."""
    try:
        result = _reader().validate_python(parsed_json(path.read_bytes()))
        json_text([result.table(), result.rate_table(), result.difference_table(), result.to_dict()])  # what is shown
        return result
    except Exception:  # a damaged value may raise anything
        raise RunError(f"{path} is damaged: it holds no result of an attack. Restore it, or attack again.") from None


@cache
def _reader() -> TypeAdapter[MembershipResult]:
    return TypeAdapter(MembershipResult)


# -- cells


def _interval(estimate: Estimate) -> str:
    return "none" if math.isnan(estimate.low) else f"{estimate.low:.4f} to {estimate.high:.4f}"


def _signed(difference: Difference | None) -> str:
    return "" if difference is None else f"{difference.auc.value:+.4f}"


def _found(at: FoundAt) -> str:
    if at.found is None:
        return "too few false alarms"
    value, low, high = (f"{100 * part:.3g}" for part in (at.found.value, at.found.low, at.found.high))
    return f"{value} [{low}, {high}]"
