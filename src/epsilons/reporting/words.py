"""Words: what a report says in plain sentences, in the order in which one would read them aloud."""

from __future__ import annotations

from collections.abc import Sequence

from ..disclosure import DisplayRow
from ..planning import Plan, display
from ..planning.plan_numbers import SHARES

#: How many promises are told in the first paragraph before the table must do.
MOST_TOLD = 4

CAVEAT = (
    "Claim what is certified for the whole plan, however early the training stopped. The charge so far holds only if "
    "the stop was chosen without looking at the data or at anything the training had released."
)

CURVE = (
    "The most that may have been spent after each step. The lines are upper bounds: within each stair the value of "
    "its end is shown."
)

UNKNOWN_DATA = "Nobody declared the test data public, so they count as private."

NOTHING_MEASURED = "Nothing was measured: the run was given no test data, or it ended before it was evaluated."


def promise(plan: Plan, rows: Sequence[DisplayRow]) -> str:
    """Who was promised what."""
    hidden = any(row.merged for row in rows)
    records = [row.records for row in rows if row.records is not None]
    whom = f"{sum(records):,} records" if len(records) == len(rows) else "fewer than 20 records"
    first = (
        f"This model was trained on {whom}. Each record came with a privacy budget of its own, ε: a limit on how much "
        "anyone can learn about that one record from all that the training released. A smaller ε protects more."
    )
    if hidden or len(rows) > MOST_TOLD:
        told = "The budgets that were promised stand in the first table"
        return f"{first} {told}{'; some are shown together there.' if hidden else '.'}"
    parts = [
        f"{row.records:,} were promised ε\u00a0=\u00a0{row.label}" + (f" (“{row.tier}”)" if row.tier else "")
        for row in rows
    ]
    deltas = {row.delta for row in rows}
    slack = (
        f", each with δ\u00a0=\u00a0{deltas.pop():g}, the slack that such a limit leaves" if len(deltas) == 1 else ""
    )
    return f"{first} Of these records, {listed(parts)}{slack}."


def kept(seeded: bool, bound: bool) -> str:
    """Was it kept?"""
    words = (
        "The promise was kept: certified for the whole plan, no record spends more than its own budget. For this "
        "report the plan was accounted again, and the ledger of all training steps was checked line by line."
    )
    if not bound:
        words += " How coins and noise were drawn is what run.json says; a ledger of this earlier version does not."
    return words + (
        " This holds only towards those who do not know the seed, for the run was seeded." if seeded else ""
    )


def finished(charged: int, allowed: int, made: int | None) -> str:
    """Was it finished?"""
    if made == allowed:
        return f"The training is finished: all {allowed:,} planned steps were made."
    if made is not None:
        return (
            f"The training was stopped early: at most {made:,} of {allowed:,} planned steps were made, and {charged:,} "
            "are charged, for steps are paid for in blocks. What is claimed is the whole plan all the same."
        )
    return (
        f"The training is not finished, or was cut off: its ledger was never closed. {charged:,} of {allowed:,} "
        "planned steps are charged. What is claimed is the whole plan all the same."
    )


def taken_up(epochs: int) -> str:
    """That steps were charged more than once, each time under another key."""
    times = "once" if epochs == 2 else f"{epochs - 1} times"
    return (
        f"The training was interrupted and taken up again under another key {times}: its settings, data or machine had "
        "changed, or its key was lost. The steps from there on were charged again, so the model learnt from fewer "
        "updates than were charged."
    )


def not_covered(plan: Plan, private_metrics: bool, seeded: bool) -> list[str]:
    """What the guarantee says nothing about, one point each."""
    public = (
        "The declared shares of the budgets, the declared number of records and the recipe: they count as public. They "
        "were declared as not derived from these data."
        if plan.adjacency == SHARES
        else "The number of records, the list of budgets, the sizes of the groups and the recipe: they count as "
        "public. That a record took part at all is not hidden by this guarantee."
    )
    points = [
        public,
        "Other runs on the same records. Several runs add up; this report is about one.",
        "Choosing settings by trying them on these data.",
        "Preprocessing that was fitted on these data, such as means, vocabularies or feature selection.",
        "Measurements on private data" + (", among them the accuracy in this report." if private_metrics else "."),
        "Several records of one person: each record is protected for itself.",
        "Telling one content of a record from another: exchanging them costs twice the ε, (2ε_i, (1+e^{ε_i})δ_i).",
    ]
    if plan.adjacency == SHARES:
        points.append("Telling two budget labels of a present record apart: that is covered only at the sum of both.")
    if seeded:
        points.append("Anyone who knows or guesses the seed of this run.")
    return points


def strategy(plan: Plan) -> str:
    """How the plan came about, in one line."""
    options = ", ".join(f"{name} = {value}" for name, value in plan.options.items())
    return plan.strategy + (f" ({options})" if options else "")


def listed(parts: Sequence[str]) -> str:
    """
    >>> listed(["one", "two", "three"])
    'one, two and three'
    """
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def summary_of_many(plan: Plan) -> str:
    """Many groups in one sentence, for internal use."""
    parts = plan.epsilon_spent() / plan.epsilons
    used = [f"{100 * part:.4g} %" for part in (parts.min(), parts.max())]
    low, high = display.number(plan.epsilons[0]), display.number(plan.epsilons[-1])
    return (
        f"There are {len(plan.epsilons):,} different budgets, from ε = {low} to {high}; neighbouring ones are merged "
        f"here. At the end the least used one is spent to {used[0]} and the most used one to {used[1]}. Every group's "
        "own row stands in plan.json."
    )
