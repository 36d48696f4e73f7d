"""From scores to a result: every statistic of every attack and group, in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from ...core.disclosure import SMALLEST_SHOWN, DisplayRow, display_rows, has_small_cells
from ...core.mechanism import FloatArray, Groups, IntArray
from ...errors import InputError
from ...planning import Plan
from ...reporting.membership import Difference, Estimate, FoundAt, GroupAttack, GroupRow, MembershipResult, Power, Roc
from .attacks import BoolArray, Float32Array, Signals
from .outcomes import RATES, certified, declared, over_targets, roc, student_quantile, target_auc

# -- Test of whether groups differ, by relabeling records
#
# The test is exact if groups were dealt at random: under the hypothesis that the group of a record has no effect, every
# relabeling is equally likely, and p = (1 + number at least as extreme)/(1 + relabelings) (Phipson and Smyth,
# "Permutation p-values should never be zero", arXiv 1603.05766). Its statistic is Welch's t between groups of each
# record's mean score as a member minus its mean score as a non-member. The AUC of one record is no statistic here:
# references by leave-one-out bias it, to about .45 without any signal.

RELABELINGS = 9_999
#: Labels that are shuffled at once.
_AT_ONCE = 2**22


def record_gaps(scores: Float32Array, member: BoolArray) -> FloatArray:
    """(records,) mean score as a member minus mean score as a non-member; NaN where a record was never one of them.

    scores, member: (shadows, records) each. The result names the most exposed people: it must not be shown.
    """
    inside = member.sum(axis=0)
    outside = len(member) - inside
    of_members = np.einsum("tr,tr->r", scores, member, dtype=np.float64)
    of_others = scores.sum(axis=0, dtype=np.float64) - of_members
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps: FloatArray = of_members / inside - of_others / outside
    return gaps


def randomisation_test(
    gaps: FloatArray, is_looser: BoolArray, rng: np.random.Generator, relabelings: int = RELABELINGS
) -> FloatArray:
    """(attacks,) two-sided p-values of a difference between two groups.

    gaps       (attacks, records) of `record_gaps`; records with a NaN are left out
    is_looser  (records,) which of the two groups each record is in

    NaN where a group has fewer than two records left.
    """
    kept = ~np.isnan(gaps).any(axis=0)
    labels, values = is_looser[kept], gaps[:, kept]
    if min(labels.sum(), (~labels).sum()) < 2:
        return np.full(len(gaps), math.nan)
    values = values - values.mean(axis=1, keepdims=True)
    observed = np.abs(_welch(labels[None], values))
    extreme = np.zeros(len(values))
    for block in _shuffled(labels, relabelings, rng):
        extreme += (np.abs(_welch(block, values)) >= observed * (1 - 1e-9)).sum(axis=0)
    p_values: FloatArray = (1 + extreme) / (1 + relabelings)
    return p_values


def _shuffled(labels: BoolArray, relabelings: int, rng: np.random.Generator) -> Iterator[BoolArray]:
    size = max(1, _AT_ONCE // len(labels))
    for start in range(0, relabelings, size):
        yield rng.permuted(np.tile(labels, (min(size, relabelings - start), 1)), axis=1)


def _welch(labels: BoolArray, values: FloatArray) -> FloatArray:
    """(relabelings, attacks) Welch's t of values (attacks, records) under labels (relabelings, records)."""
    weights, n = labels.astype(np.float64), int(labels[0].sum())
    m = labels.shape[1] - n
    sums, squares = weights @ values.T, weights @ np.square(values).T
    others, other_squares = values.sum(axis=1) - sums, np.square(values).sum(axis=1) - squares
    error = (squares / n - (sums / n) ** 2) / (n - 1) + (other_squares / m - (others / m) ** 2) / (m - 1)
    gap = sums / n - others / m
    t: FloatArray = np.divide(gap, np.sqrt(np.maximum(error, 0.0)), out=np.zeros_like(gap), where=error > 0)
    return t


# -- From scores to a result: every statistic of every attack and group, in one pass

#: False-positive rates in the table; both are in RATES.
SHOWN_RATES = (0.01, 0.001)
#: More groups than this are merged.
MOST_ROWS = 8

#: The share of the certified advantage is read off where its 95 % interval is at most so wide to either side.
MOST_DOUBT = 0.2
#: A certified advantage below this is rounding.
_NO_ADVANTAGE = 1e-6

#: Random numbers of intervals and tests, so that a result repeats to the bit. No guarantee depends on them.
_SEED = 20_230_317


def analyse(
    signals: Signals,
    scores: Mapping[str, Float32Array],
    plan: Plan,
    group: IntArray,
    *,
    dealt_at_random: bool,
    groups: Groups | None = None,
    placebo: MembershipResult | None = None,
) -> MembershipResult:
    """All statistics of the scores of some attacks, without the accuracy and the setting of the shadows.

    signals          its coins are used, (shadows, records)
    scores           {attack: (shadows, records)}, larger for a likely member
    plan             the plan of all shadows
    group            (records,) index of each record's group
    dealt_at_random  True if chance, and not the records, decided the groups
    groups           the groups of the records, if the plan has one group for all of them (DP-SGD with one budget)
    placebo          a result for the same groups where all records have one budget

    Groups of fewer than 20 records are merged, and so are more than 8 groups. Takes about 20 s of processor time for
    512 shadows and 50,000 records. Raises InputError for shapes that do not fit, scores that are not numbers, or
    fewer than 20 records.
    """
    member, of_records = signals.member, groups or plan.groups
    _check(member, scores, plan, group, of_records)
    rows, columns, suppressed = _rows(plan, group, of_records)
    if placebo and [row.label for row in placebo.groups] != [row.label for row in rows]:
        raise InputError(f"The placebo needs the same {len(rows)} groups, got {len(placebo.groups)} or other ones.")
    row_of_record = np.empty(len(group), dtype=np.int64)
    for index, records in enumerate(columns):
        row_of_record[records] = index
    aucs = {name: target_auc(one, member, row_of_record, range(len(rows))) for name, one in scores.items()}
    rocs = {name: [_roc(one, member, records) for records in columns] for name, one in scores.items()}
    return MembershipResult(
        plan=plan.digest,
        strategy=plan.strategy,
        shadows=len(member),
        records=len(group),
        dealt_at_random=dealt_at_random,
        groups=rows,
        attacks=tuple(
            _outcome(name, index, aucs[name][:, index], rocs[name][index], row.certified)
            for name in scores
            for index, row in enumerate(rows)
        ),
        differences=_differences(scores, member, columns, aucs, rocs),
        accuracy=None,
        setting={},
        placebo=placebo,
        minus_placebo=_minus(aucs, placebo),
        suppressed=suppressed,
        target_auc=aucs,
    )


def _check(member: BoolArray, scores: Mapping[str, Float32Array], plan: Plan, group: IntArray, groups: Groups) -> None:
    if not scores:
        raise InputError("There is nothing to analyse: name at least one attack.")
    for name, one in scores.items():
        if one.shape != member.shape:
            raise InputError(
                f"The scores of {name!r} must have the shape of the coins, {member.shape}, got {one.shape}."
            )
        if np.isnan(one).any():
            raise InputError(f"The scores of {name!r} must be numbers; some are not.")
    if len(group) < SMALLEST_SHOWN:
        raise InputError(
            f"The result would show what fewer than {SMALLEST_SHOWN} records share, got {len(group)} records."
        )
    if group.shape != member.shape[1:] or group.min() < 0 or group.max() >= len(groups):
        raise InputError(
            f"Each of {member.shape[1]:,} records needs the index of one of {len(groups):,} groups, got "
            f"{len(group):,} indices from {group.min()} to {group.max()}."
        )
    if len(plan.groups) not in (1, len(groups)):
        raise InputError(
            f"The plan needs one group, or one row for each of {len(groups)} groups, got {len(plan.groups)}."
        )


def _rows(plan: Plan, group: IntArray, groups: Groups) -> tuple[tuple[GroupRow, ...], list[IntArray], bool]:
    """Rows of 20 or more records, the indices of their records, and True if the plan's numbers must be suppressed."""
    present, counts = np.unique(group, return_counts=True)
    limits = None if groups.limits is None else groups.limits[present]
    shown_groups = Groups(groups.epsilons[present], groups.deltas[present], counts, limits=limits)
    small = has_small_cells(shown_groups) or has_small_cells(groups)
    shown = display_rows(shown_groups, None, small, MOST_ROWS)
    members = [present[row.groups] for row in shown]
    columns = [np.flatnonzero(np.isin(group, one)) for one in members]
    bounds = [certified(plan, one if len(plan.groups) > 1 else np.zeros(1, dtype=np.int64)) for one in members]
    rows = []
    for label, row, records, bound in zip(_labels(shown), shown, columns, bounds, strict=True):
        promise = None if limits is None or row.merged else declared(shown_groups, row.groups.start)
        # The plan was verified on a finer grid, so what is declared bounds the curve, too.
        power = bound.power if promise is None else np.minimum(bound.power, promise)
        curve = None if promise is None else Power(RATES, promise)
        rows.append(GroupRow(label, row.epsilon, len(records), bound.area, Power(RATES, power), curve))
    return tuple(rows), columns, small


def _labels(shown: Sequence[DisplayRow]) -> list[str]:
    """The rows' labels; with delta where groups of one epsilon have several."""
    labels = [row.label for row in shown]
    several = [labels.count(row.label) > 1 and row.delta is not None for row in shown]
    return [f"{row.label} (δ = {row.delta:g})" if s else row.label for row, s in zip(shown, several, strict=True)]


def _rng(*address: int) -> np.random.Generator:
    return np.random.default_rng([_SEED, *address])


def _roc(scores: Float32Array, member: BoolArray, records: IntArray) -> Roc:
    return roc(scores[:, records], member[:, records], _rng(0))


def _outcome(attack: str, row: int, auc: FloatArray, curve: Roc, bound: Power) -> GroupAttack:
    over = over_targets(auc)
    power = bound.power[np.isin(RATES, curve.rate)]
    return GroupAttack(
        attack=attack,
        group=row,
        auc=over,
        auc_of_others=_widened(over, curve.auc_variance, len(auc)),
        found=tuple(_found(curve, rate, bound) for rate in SHOWN_RATES),
        share_of_certified=_share(curve, power),
        exceeds_certified=bool((curve.band > power).any()),
        roc=curve,
    )


def _minus(aucs: Mapping[str, FloatArray], placebo: MembershipResult | None) -> dict[str, tuple[Estimate, ...]]:
    """{attack: (rows,)} AUC minus that of the placebo, where both have the attack and the same targets."""
    others = placebo.target_auc if placebo else {}
    same = [name for name, auc in aucs.items() if name in others and others[name].shape == auc.shape]
    return {name: tuple(map(over_targets, (aucs[name] - others[name]).T)) for name in same}


def _share(curve: Roc, power: FloatArray) -> float | None:
    """The largest part of the certified advantage that was reached; None where no rate determines it."""
    allowed = power - curve.rate
    read = (allowed > _NO_ADVANTAGE) & ((curve.high - curve.low) / 2 <= MOST_DOUBT * allowed)
    return float(((curve.found - curve.rate)[read] / allowed[read]).max()) if read.any() else None


def _widened(over: Estimate, variance: float, targets: int) -> Estimate:
    """The interval with another variance added to that over targets."""
    if variance == 0:
        return over
    quantile = student_quantile(targets)
    half = math.hypot(over.high - over.value, quantile * math.sqrt(variance))
    return Estimate(over.value, over.value - half, over.value + half)


def _found(curve: Roc, rate: float, bound: Power) -> FoundAt:
    found = curve.at(rate)
    alarms = int(curve.false_alarms[np.isclose(curve.rate, rate)][0]) if found else None
    return FoundAt(rate, found, alarms, float(bound.power[np.isclose(RATES, rate)][0]))


def _differences(
    scores: Mapping[str, Float32Array],
    member: BoolArray,
    columns: list[IntArray],
    aucs: Mapping[str, FloatArray],
    rocs: Mapping[str, list[Roc]],
) -> tuple[Difference, ...]:
    gaps = np.stack([record_gaps(one, member) for one in scores.values()])  # (attacks, records)
    pairs = list(pairwise(range(len(columns))))
    if len(columns) > 2:
        pairs.append((0, len(columns) - 1))
    found = []
    for strict, loose in pairs:
        records = np.concatenate([columns[strict], columns[loose]])
        is_looser = np.arange(len(records)) >= len(columns[strict])
        p_values = randomisation_test(gaps[:, records], is_looser, _rng(1, strict, loose))
        for name, p_value in zip(scores, p_values, strict=True):
            by_target = aucs[name][:, loose] - aucs[name][:, strict]
            over = over_targets(by_target)
            variance = rocs[name][strict].auc_variance + rocs[name][loose].auc_variance
            others = _widened(over, variance, len(by_target))
            ordered = float(np.mean(by_target[~np.isnan(by_target)] > 0))
            found.append(Difference(name, strict, loose, over, others, ordered, float(p_value)))
    return tuple(sorted(found, key=lambda one: list(scores).index(one.attack)))


def paired(a: MembershipResult, b: MembershipResult, attack: str, row_a: int, row_b: int | None = None) -> Estimate:
    """AUC of a minus AUC of b, with a 95 % interval over targets; both with the same coins.

    row_a, row_b  indices of the rows that are compared, by default the same

    Raises InputError where one of them has no such attack, or their numbers of shadows differ.
    """
    columns = []
    for result, row in ((a, row_a), (b, row_a if row_b is None else row_b)):
        if attack not in result.target_auc or not 0 <= row < len(result.groups):
            raise InputError(
                f"A result with {len(result.groups)} groups and the attacks {', '.join(result.target_auc)} has no row "
                f"{row} of {attack!r}."
            )
        columns.append(result.target_auc[attack][:, row])
    if len(columns[0]) != len(columns[1]):
        raise InputError(f"Both results need the same targets, got {len(columns[0])} and {len(columns[1])}.")
    return over_targets(columns[0] - columns[1])
