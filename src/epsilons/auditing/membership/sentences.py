"""The outcome in sentences, and the statements that are on every output."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...planning.display import round_up
from .outcomes import Difference, FoundAt, GroupAttack, GroupRow
from .statistics import Estimate

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
        f"{_signed(one.of_others)}, above 0 in {one.ordered:.0%} of the targets; p = {one.p_value:.2g}."
    )


def placebo(same: Difference) -> str:
    """The same difference where all records have one budget."""
    return f"With one budget for all, the same groups differ by {_signed(same.of_others)}."


def against_placebo(attack: str, differences: Sequence[Estimate], rows: Sequence[GroupRow]) -> str:
    """The effect of individual budgets on each row, against one budget for all."""
    each = "; ".join(f"epsilon {row.label}: {_signed(one)}" for row, one in zip(rows, differences, strict=True))
    return f"{attack}: AUC minus that with one budget for all, paired by target: {each}."


def _signed(estimate: Estimate) -> str:
    if math.isnan(estimate.low):
        return f"{estimate.value:+.4f}"
    return f"{estimate.value:+.4f} ({estimate.low:+.4f} to {estimate.high:+.4f})"
