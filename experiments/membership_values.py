"""What is kept of a membership attack: statistics of groups and targets, and the paper's own test."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from epsilons import Budgets, Plan
from epsilons.auditing.membership import ATTACKS
from epsilons.auditing.membership.analysis import analyse
from epsilons.auditing.membership.attacks import Signals
from epsilons.auditing.membership.outcomes import roc
from epsilons.core.mechanism import IntArray
from epsilons.reporting.membership import FoundAt, MembershipResult

from .settings import MembershipSettings

#: The attack of the paper's code, and the same with the margin; the paper tests the scores of the first.
PAPER_ATTACKS = ("lira-raw", "lira")

#: The paper shows five target models.
TARGETS = 5


def attacked(settings: MembershipSettings, signals: Signals, plan: Plan, dealt: Budgets) -> dict[str, Any]:
    """All statistics as JSON values. No value belongs to one record."""
    scores = {name: ATTACKS[name](signals) for name in settings.attacks}
    result = analyse(signals, scores, plan, dealt.group, dealt_at_random=True, groups=dealt.groups)
    first = settings.attacks[0]
    return {
        **values_of(result),
        "target_curves": [
            [_curve(roc(s[None, of], m[None, of], np.random.default_rng(0))) for of in _columns(dealt.group)]
            for s, m in zip(scores[first][:TARGETS], signals.member[:TARGETS], strict=True)
        ],
        "paper_test": {
            name: paper_test(scores[name], signals.member, dealt.group) for name in PAPER_ATTACKS if name in scores
        },
    }


def values_of(result: MembershipResult) -> dict[str, Any]:
    """The statistics of a result, rounded: AUCs of targets to 5 digits, as differences between arms need them.

    auc           {attack: [by group]} value, low and high over targets; low and high for other records
    found         {attack: [by group]} true-positive rates: at, value, low, high, certified
    share         {attack: [by group]} part of the certified advantage that was reached
    difference    {attack: …} between the groups, with the share of ordered targets and p of the randomisation test
    curve         {attack: [by group]} the ROC of the first two attacks
    target_auc    {attack: [by group: [by target]]}
    """
    each = {name: [result.of(name, row) for row in range(len(result.groups))] for name in result.names}
    return {
        "certified_auc": [_rounded(row.certified_auc) for row in result.groups],
        "certified_curve": [_rounded(row.certified.power) for row in result.groups],
        "auc": {
            name: [_interval(one.auc) + _interval(one.auc_of_others)[1:] for one in ones] for name, ones in each.items()
        },
        "found": {name: [[_found(at) for at in one.found] for one in ones] for name, ones in each.items()},
        "share": {
            name: [None if one.share_of_certified is None else _rounded(one.share_of_certified) for one in ones]
            for name, ones in each.items()
        },
        "exceeds_certified": [name for name, ones in each.items() if any(one.exceeds_certified for one in ones)],
        "difference": {
            one.attack: {
                "auc": _interval(one.auc),
                "of_others": _interval(one.of_others)[1:],
                "ordered": _rounded(one.ordered),
                "p": _rounded(one.p_value),
            }
            for one in result.differences
        },
        "curve": {name: [_curve(one.roc) for one in each[name]] for name in result.names[:2]},
        "target_auc": {name: _rounded(aucs.T) for name, aucs in result.target_auc.items()},
    }


def paper_test(scores: npt.NDArray[Any], member: npt.NDArray[np.bool_], group: IntArray) -> dict[str, Any]:
    """The paper's Student t-test by target: all scores of the looser group against all of the stricter one.

    Members and non-members are together, so t grows with any difference between the two sets of records, of either
    sign. Members alone (Welch's test) compare what the claim is about.

    quantiles     5, 50 and 95 % of t over targets     targets       [t, p] of the first targets
    significant   share of targets with p < .05        members_only  the same for members alone
    """
    strict, loose = _columns(group)
    student = stats.ttest_ind(scores[:, loose], scores[:, strict], axis=1)
    welch = [
        stats.ttest_ind(s[loose][m[loose]], s[strict][m[strict]], equal_var=False).pvalue
        for s, m in zip(scores, member, strict=True)
    ]
    return {
        "quantiles": _rounded(np.quantile(student.statistic, [0.05, 0.5, 0.95])),
        "significant": _rounded(np.mean(student.pvalue < 0.05)),
        "targets": _rounded(np.stack([student.statistic, student.pvalue], 1)[:TARGETS]),
        "members_only": _rounded(np.mean(np.array(welch) < 0.05)),
    }


def _columns(group: IntArray) -> list[IntArray]:
    return [np.flatnonzero(group == index) for index in range(int(group.max()) + 1)]


def _found(at: FoundAt) -> list[Any]:
    found = [None] * 3 if at.found is None else _interval(at.found)
    return [at.rate, *found, _rounded(at.certified)]


def _curve(curve: Any) -> dict[str, Any]:
    return {name: _rounded(getattr(curve, name)) for name in ("rate", "found", "low", "high")}


def _interval(estimate: Any) -> list[Any]:
    return [_rounded(value) for value in (estimate.value, estimate.low, estimate.high)]


def _rounded(values: Any) -> Any:
    """Python numbers with 5 digits, small ones with 3 significant digits; None for a number that is not finite."""
    if np.ndim(values):
        return [_rounded(value) for value in values]
    number = float(values)
    if not np.isfinite(number):
        return None
    return round(number, 5) if abs(number) >= 0.01 else float(f"{number:.3g}")
