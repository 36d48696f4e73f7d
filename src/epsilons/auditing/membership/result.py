"""MembershipResult: what an attacker learned about members of each group, as values, tables, sentences and JSON.

No value belongs to one record or to fewer than 20. The AUCs of single targets are kept for paired differences, and are
in no text: together with the coins they would show how exposed single records are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..._version import __version__
from ...core.disclosure import PLAN_SUPPRESSED
from ...core.files import write_json
from ...core.mechanism import FloatArray
from ...core.notebook import new_figure, save_figure
from ...errors import InputError, RunError, json_text, parsed_json, printable
from ...planning.display import Table, aligned, round_up
from .outcomes import RATES, Certified, Difference, Estimate, FoundAt, GroupAttack, GroupRow, Roc, over_targets

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
ONE_OF = (
    "The plan is for {runs:,} runs, and this is about one of them: what is certified here is that of one run. Who sees "
    "the models of all runs may learn more, up to what the plan certifies for all."
)
EXCEEDS = (
    "{attacks}: the ROC is above the certified curve, beyond chance. The plan does not allow that, so look for an "
    "error: noise that was not added, records in the wrong group, coins that are not independent."
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
    most = "" if suppressed else f"; no attack is right more than {math.ceil(1000 * row.certified.area) / 10} times"
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


# -- MembershipResult: what an attacker learned about members of each group, as values, tables, sentences and JSON

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
            *(recognised(row, one, self.suppressed) for row, one in zip(self.rows, strongest, strict=True)),
            *(difference(one, self.rows) + self._placebo_sentence(one) for one in widest if one),
            *(against_placebo(name, rows, self.rows) for name, rows in self.minus_placebo.items()),
            CHOSEN if self.differences and not self.dealt_at_random else "",
            PLACEBO_HELPS if self.differences and not (self.dealt_at_random or self.placebo) else "",
            EXCEEDS.format(attacks=", ".join(above)) if above else BELOW,
            PLAN_SUPPRESSED if self.suppressed else "",
            ONE_OF.format(runs=self.setting["runs"]) if "runs" in self.setting else "",
            LIMITS,
            self.not_covered,
        ]
        return tuple(filter(None, lines))

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


# -- Read membership.json again, as `MembershipResult.save` wrote it

_COLUMNS = ("rate", "found", "low", "high", "band")


def load(path: Path) -> MembershipResult:
    """The result in this file, without the AUCs of single targets. Raises RunError if it is damaged."""
    try:
        result = _result(parsed_json(path.read_bytes()))
        json_text([result.table(), result.rate_table(), result.difference_table(), result.to_dict()])  # what is shown
        return result
    except Exception:  # a damaged value may raise anything
        raise RunError(f"{path} is damaged: it holds no result of an attack. Restore it, or attack again.") from None


def _result(values: Mapping[str, Any]) -> MembershipResult:
    same = ("plan", "strategy", "shadows", "records", "dealt_at_random", "accuracy", "setting", "suppressed")
    return MembershipResult(
        **{name: values[name] for name in same},
        rows=tuple(map(_row, values["groups"])),
        attacks=tuple(map(_attack, values["attacks"])),
        differences=tuple(map(_difference, values["differences"])),
        placebo=None if values["placebo"] is None else _result(values["placebo"]),
        minus_placebo={name: tuple(map(_estimate, rows)) for name, rows in values["minus_placebo"].items()},
    )


def _row(values: Mapping[str, Any]) -> GroupRow:
    certified = Certified(values["certified_auc"], np.array(values["certified"]["power"], dtype=np.float64))
    if certified.power.shape != RATES.shape:
        raise ValueError
    return GroupRow(values["label"], values["epsilon"], values["records"], certified)


def _attack(values: Mapping[str, Any]) -> GroupAttack:
    return GroupAttack(
        attack=values["attack"],
        row=values["group"],
        auc=_estimate(values["auc"]),
        auc_of_others=_estimate(values["auc_of_others"]),
        found=tuple(map(_read_found, values["found"])),
        share=values["share_of_certified"],
        exceeds_certified=values["exceeds_certified"],
        roc=_roc(values["roc"]),
    )


def _roc(values: Mapping[str, Any]) -> Roc:
    columns: dict[str, FloatArray] = {name: np.array(values[name], dtype=np.float64) for name in _COLUMNS}
    if {column.shape for column in columns.values()} != {(len(values["rate"]),)}:
        raise ValueError
    return Roc(**columns, false_alarms=np.array(values["false_alarms"], dtype=np.int64), auc_variance=math.nan)


def _read_found(values: Mapping[str, Any]) -> FoundAt:
    return FoundAt(**{**values, "found": _estimate(values["found"]) if values["found"] else None})


def _difference(values: Mapping[str, Any]) -> Difference:
    estimates = {name: _estimate(values[name]) for name in ("auc", "of_others")}
    numbers = {name: _number(values[name]) for name in ("ordered", "p_value")}
    return Difference(**{**values, **estimates, **numbers})


def _estimate(values: Mapping[str, Any]) -> Estimate:
    return Estimate(*(_number(values[name]) for name in ("value", "low", "high")))


def _number(value: float | None) -> float:
    """JSON has null for numbers that are not finite."""
    return math.nan if value is None else value


# -- The ROC of each group on logarithmic axes, beside what the plan certifies

#: More groups than this are not drawn: evenly spaced ones are, from the strictest to the loosest.
MOST_DRAWN = 6

_COLOURS = ("#1f5fa8", "#c2571a", "#3a7d44", "#6a3d9a", "#8c6d1f", "#444444")


def draw(result: MembershipResult, path: str | Path, attack: str | None = None) -> Path:
    """Draw the ROC of each group: the attack's with its 95 % intervals, the certified curve, and guessing.

    path    of an .svg, .png or .pdf file; only its owner may read it
    attack  by default the first one of the result

    A rate with fewer than 10 false alarms is not drawn. Where some group has fewer than 20 records, the certified
    curves are not drawn, because they were computed from all budgets together.

    Raises InputError for another ending or attack, RunError if the file cannot be written.
    """
    attack = result.names[0] if attack is None else attack
    if attack not in result.names:
        raise InputError(f"The result has the attacks {', '.join(result.names)}, got {attack!r}.")
    figure, axes = new_figure(6.4, 4.8)
    lowest = 1.0
    count = len(result.rows)
    chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_DRAWN)).round().astype(int))
    for row, colour in zip(chosen.tolist(), _COLOURS, strict=False):
        roc, shown = result.of(attack, row).roc, result.rows[row]
        if len(roc.rate):
            lowest = min(lowest, float(roc.rate[0]))
        axes.fill_between(roc.rate, roc.low, roc.high, color=colour, alpha=0.2, lw=0)
        axes.plot(roc.rate, roc.found, color=colour, label=_label(shown))
        if not result.suppressed:
            axes.plot(RATES, shown.certified.power, color=colour, ls="--", lw=1.2)
    lowest = min(lowest, 0.1)
    axes.plot([lowest, 1], [lowest, 1], color="#888888", lw=0.9, label="guessing")
    if not result.suppressed:
        axes.plot([], [], color="#444444", ls="--", lw=1.2, label="no attack above (certified)")
    axes.set(xscale="log", yscale="log", xlim=(lowest, 1), ylim=(lowest, 1.1))
    axes.set_xlabel("false-positive rate")
    axes.set_ylabel("true-positive rate")
    axes.set_title(f"{attack}, {result.shadows:,} shadow models; shaded: 95 % intervals", fontsize=10, loc="left")
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    return save_figure(figure, Path(path))


def _label(row: GroupRow) -> str:
    return f"ε {row.label}" if row.epsilon is None else f"ε = {row.label}"
