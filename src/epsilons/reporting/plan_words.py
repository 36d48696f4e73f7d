"""The sentences of the page of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from ..disclosure import DisplayRow, of_unit
from ..planning import Advice, Plan
from ..planning.plan_numbers import SHARES
from .sentences import MOST_LISTED, listed

SPENT = "The most that the training can spend of a budget in this row, certified before it begins."
GUESSES = (
    "The odds of the first table, under each strategy: 50 is a toss of a coin, 100 is certainty. Smaller protects more."
)
INFLUENCE = "How far one record can move the model during the whole training. 0: the record is not used."
SHARE = (
    "How much of what a step learns comes from each tier, if all gradients are clipped and point alike. Under uniform "
    "it is the tier's share of the records. Far below it, the model learns little from these records, and loses "
    "accuracy."
)
NOISE = (
    "The noise of a step over the largest contribution of one record. More noise hides a record better, and the model "
    "learns less from it."
)
MODEL = (
    "Signal is that of one step over its noise, relative to uniform. It is a model, computed without any training: it "
    "ranks ways to divide budgets, and is no forecast of accuracy."
)

SUPPRESSED = (
    "Fewer than 20 records hold some of these budgets. Rates, clip norms, noise and exact spends were computed from "
    "all budgets together, so they would show what these few chose. They are left out here, and so is the comparison "
    "of strategies. For internal use, plan.json and epsilons advise --json hold the numbers."
)
#: The name of a plan with options, or of a strategy of the caller's, at the top of narrow columns.
THIS_PLAN = "this plan"

_EXPLAINED = {
    "uniform": "Everyone gets the protection that the strictest budget asks for. Larger budgets stay unused.",
    "exclude": "Records with a budget below the threshold are left out. All others get the protection of the strictest "
    "budget among them.",
    "scale": "A larger budget lets a record's contribution be longer. Everyone is drawn equally often.",
    "scale-arithmetic": "Scale as published: a larger budget lets a record's contribution be longer.",
    "sample": "A larger budget lets a record be drawn more often.",
    "mix": "Between Scale and Sample: a larger budget lets a record be drawn more often, and its contribution be "
    "longer.",
    "sequential": "In each phase, only records that have budget left are drawn.",
}


def named(plan: Plan) -> str:
    """The strategy of a plan with its options."""
    options = ", ".join(f"{name} = {value}" for name, value in plan.options.items())
    return plan.strategy + (f" ({options})" if options else "")


def short_name(plan: Plan) -> str:
    """The name of a plan's strategy where there is little room."""
    return THIS_PLAN if plan.options or plan.strategy not in _EXPLAINED else plan.strategy


def explained(name: str, plan: Plan) -> str:
    """What a strategy does with budgets."""
    text = _EXPLAINED.get(plan.strategy, "A strategy of your own. Its plan is certified like the others.")
    return of_unit(f"{named(plan)}: {text}" if name == THIS_PLAN else text, plan.unit)


def lead(plan: Plan, rows: Sequence[DisplayRow]) -> tuple[str, ...]:
    """The first paragraphs."""
    one, many = plan.unit, f"{plan.unit}s"
    declared = plan.adjacency == SHARES
    source = "the declared shares" if declared else "the list of budgets"
    counts = [row.records for row in rows if row.records is not None]
    total = f"{sum(counts):,} {many}" if len(counts) == len(rows) else f"fewer than 20 {many}"
    first = f"A plan to train on {total}. Nothing was trained yet: this page follows from {source} alone."
    second = (
        f"Each {one} has a privacy budget ε: a limit on how much anyone can learn about this one {one} from everything "
        "that the training will release. A smaller ε protects more."
    )
    if len(rows) <= MOST_LISTED and not any(row.merged for row in rows):
        second += f" {_promises(rows)}."
    runs = f"{plan.runs:,} runs would follow the plan, each with" if plan.runs > 1 else "The training would make"
    third = (
        f"{runs} {plan.steps:,} steps, each on {plan.batch_size:,.6g} {many} in expectation, drawn at random. The plan "
        f"is certified: under the strategy {named(plan)} no {one} can spend more than promised, however the training "
        "goes."
    )
    return first, second, third


def _promises(rows: Sequence[DisplayRow]) -> str:
    parts = [
        f"{row.records:,} are promised ε\u00a0=\u00a0{row.label}" + (f" (“{row.tier}”)" if row.tier else "")
        for row in rows
    ]
    return listed(parts)


def lost(advice: Advice) -> tuple[str, ...]:
    """Where accuracy is lost, as far as it can be said without training."""
    return f"{advice.verdict} Accuracy is lost where noise is large against the signal.", MODEL


def not_covered(plan: Plan, read_off: str | None, seeded: bool) -> tuple[str, ...]:
    """What the guarantee will not cover, one point each."""
    one, many = plan.unit, f"{plan.unit}s"
    points = [
        f"Other runs on the same {many}"
        + (f" than the {plan.runs:,} of this plan." if plan.runs > 1 else ", tuning among them. Their ε add up."),
        f"What many {many} share: a model can learn that, with or without any one of them.",
        f"Scores on private data, and telling one content of a {one} from another, which costs twice the ε.",
    ]
    if plan.adjacency == SHARES:
        points.append("The declared shares and their number: they were declared as not derived from these data.")
    else:
        points.append(f"That a {one} took part: the number of {many} and the list of budgets count as public.")
    if one == "record":
        points.append("Several rows of one person: each row is protected separately, and their ε add up.")
    if read_off:
        points.append(f"What was read off the data: {read_off}. Replace it by what is known without looking.")
    if seeded:
        points.append("Anyone who knows the seed of the config: it undoes the noise.")
    return tuple(points)
