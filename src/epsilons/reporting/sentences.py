"""The sentences of a report, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Container, Sequence

from ..core.disclosure import SMALLEST_SHOWN, DisplayRow, of_unit
from ..core.mechanism import Unit
from ..planning import Plan, display
from ..planning.plan_numbers import SHARES
from .lifetimes import Lifetime

#: With more rows than this, the first paragraph refers to the table instead of listing the promises.
MOST_LISTED = 4

#: Where the odds of a report come from: in few words, and as the sentence after them.
ODDS_OF = {
    "in this run": "These odds are of this run, from the whole curve that its plan certifies; ε at δ is one point of "
    "it. The promise ε is the upper limit: sheets for people state its odds.",
    "by the promise": "These odds are of the promise ε, which is the upper limit. Those of this run alone are no "
    "higher.",
    "over a lifetime": "These odds are of the lifetime promise, which is the upper limit for all runs together. "
    "They are a little below what ε and δ alone allow, because the account certifies a whole curve.",
}
ODDS_SEEDED = "None of this holds towards anyone who knows or guesses the seed of this run."
NOTHING_MEASURED = "Nothing was measured: the run had no test data, or it ended before the first evaluation."

#: What was charged for an audit, by whether it trained on records that its caller gave.
AUDITED_ON = {
    False: "For the audit nothing was charged: it trained on synthetic records, and on no data of people with "
    "accounts.",
    True: "For the audit nothing was charged to the registry, and it trained again on records that its caller gave. No "
    "guarantee covers that, so its result stays internal.",
}


def promise(
    plan: Plan,
    rows: Sequence[DisplayRow],
    subset: int | None = None,
    registry: str | None = None,
    all_declared: bool = False,
) -> str:
    """The budgets that the records were promised.

    subset    how many of them this run trained on, if not all
    registry  id of the registry that the run is charged to; the budgets are then for lifetimes
    all_declared  True if by the run's config nobody has a budget that it does not declare as a tier
    """
    size = f"{plan.records:,}" if plan.records >= SMALLEST_SHOWN else f"fewer than {SMALLEST_SHOWN}"
    count = f"{size if subset is None else f'{subset:,} of {size}'} records"
    trained = f"The data were declared as {count}" if plan.adjacency == SHARES else f"This model was trained on {count}"
    whose, released = ("", "everything that the training released")
    if registry is not None:
        whose, released = " for their lifetime", "everything that is ever charged for them"
    first = (
        f"{trained}. Each record has {'a' if registry is None else 'one'} privacy budget ε{whose}: a limit on how much "
        f"anyone can learn about that one record from {released}. A smaller ε protects more."
    )
    return of_unit(f"{first}{_budgets(rows, all_declared)}", plan.unit)


def _budgets(rows: Sequence[DisplayRow], all_declared: bool) -> str:
    """The budgets of a few rows, to be put after what a budget is."""
    if all(row.epsilon is None and row.at_most is None and row.records is None for row in rows):
        return ""
    merged = any(row.merged for row in rows)
    if merged or len(rows) > MOST_LISTED:
        return f" The first table lists the budgets{'; some of them are merged.' if merged else '.'}"
    if any(row.records is None for row in rows):
        what = "The tiers are" if any(row.tier for row in rows) else "The promise is"
        other = "" if all_declared else " Other budgets, if any record has one, are not shown."
        return f" {what} {_promises(rows, 'ε')}.{other}"
    return f" Of these records, {_promises(rows)}."


def _promises(rows: Sequence[DisplayRow], what: str = "were promised ε") -> str:
    """How many have which budget, where that is shown, and their delta if it is one for all."""
    parts = [
        f"{'' if row.records is None else f'{row.records:,} '}{what}\u00a0=\u00a0{row.label}"
        + (f" (“{row.tier}”)" if row.tier else "")
        for row in rows
    ]
    deltas = {row.delta for row in rows}
    slack = f", each with δ\u00a0=\u00a0{deltas.pop():g}, the slack of such a limit" if len(deltas) == 1 else ""
    return listed(parts) + slack


def charged(registry: str, audit: bool | None) -> list[str]:
    """What the budgets of a run mean that is charged to a registry of this id.

    audit  whether the latest audit trained on records that its caller gave; None without one
    """
    texts = [
        f"This run is charged to the registry {registry}, which adds up all runs that are made under it. Each person "
        "has one lifetime budget there, and that is the promise: it holds for everything that is ever charged, "
        "however each run was chosen from the outputs of others.",
        "Whatever is computed from these people outside of the registry spends in addition, such as other runs, "
        "attacks on membership and scores on private data. It is not charged, and this report does not know of it.",
    ]
    if audit is not None:
        texts.append(AUDITED_ON[audit])
    return texts


def odds_of(label: str, tier: str | None, sentence: str) -> str:
    """The odds about a member of one row."""
    name = f"ε\u00a0=\u00a0{label}" if not label.startswith(("≤", "below")) and " to " not in label else f"ε {label}"
    return f"{name}{f' (“{tier}”)' if tier else ''}: {sentence[:1].lower()}{sentence[1:]}"


def of_merged(bounds: str) -> str:
    """The odds about a member of a merged row. bounds: by the promises, as `risk_profile.of_merged`"""
    return f"how many of 100 guesses about one member are right, by the promise of each tier or budget: {bounds}."


def of_lifetime(lifetime: Lifetime | None) -> str:
    """What odds over a lifetime count, to be put after them."""
    if lifetime is None:
        return ""
    run = lifetime.right_from_this_run
    alone = "" if run is None else f" From this run alone: at most {run} of 100."
    return f" That counts all that is ever charged for you, now and later.{alone}"


def kept(unit: Unit, is_seeded: bool, is_bound: bool, read_off: str | None, not_stated: str | None) -> str:
    """Whether the promise was kept, and what that depends on.

    unit      of the plan
    read_off, not_stated  what preprocessing took from the data, and what it may have taken, in words
    """
    text = (
        "The training kept its promise: the plan certifies that no record spends more than its budget. For this report "
        "the plan was verified again, and the ledger of all training steps was checked line by line."
    )
    if read_off:
        text = (
            f"The training kept its promise, but NOT EVERYTHING IS COVERED: {read_off} were read off the private data, "
            f"outside of every budget. {text.replace('The training kept its promise: the', 'The')}"
        )
    elif not_stated:
        text += f" It was not stated where {not_stated} come from: the promise covers them only if they were declared."
    else:
        text = text.replace("The training kept its promise", "The promise was kept")
    text = of_unit(text, unit)
    if not is_bound:
        text += " The source of randomness is taken from run.json, because ledgers of this earlier version omit it."
    if is_seeded:
        text += " The promise holds only towards those who do not know the seed, because the run was seeded."
    return text


def one_of_several(number: int, runs: int) -> str:
    """Which run of its plan this is, and that the budgets are those of all runs together."""
    return (
        f"This is run {number:,} of {runs:,} that share the budgets. The plan certifies all {runs:,} together: what is "
        "stated here as certified, and as charged so far, counts the others in full."
    )


#: Of a run that `tune` selected.
SELECTED = (
    "This run was selected: it is the best of a secret number of runs, by a score with noise on people who were held "
    "out. What is stated as certified is for the whole selection. How many runs there were, and how long they took, "
    "must stay secret."
)


def finished(charged: int, allowed: int, made: int | None) -> str:
    """Whether the training was finished."""
    if made == allowed:
        return f"The training is finished: all {allowed:,} planned steps were made."
    if made is not None:
        return (
            f"The training was stopped early: at most {made:,} of {allowed:,} planned steps were made, and {charged:,} "
            "are charged, because steps are charged in blocks. The claim remains that of the whole plan."
        )
    return (
        f"The training is not finished, or was interrupted: its ledger was never closed. {charged:,} of {allowed:,} "
        "planned steps are charged. The claim remains that of the whole plan."
    )


def resumed(epochs: int) -> str:
    """That some steps were charged more than once, under different keys."""
    times = "once" if epochs == 2 else f"{epochs - 1} times"
    return (
        f"The training was interrupted and resumed under another key {times}: its settings, data or machine had "
        "changed, or its key was lost. The steps from there on were charged again, so the model learnt from fewer "
        "updates than were charged."
    )


def not_covered(
    plan: Plan, private_metrics: bool, is_seeded: bool, hidden: Container[str] = (), read_off: str | None = None
) -> tuple[str, ...]:
    """What the guarantee does not cover, one point each.

    hidden    sections that a report for release leaves out because of the budgets
    read_off  what preprocessing took from the data
    """
    public = (
        "The declared shares of the budgets, the declared number of records and the recipe: they count as public. They "
        "were declared as not derived from these data."
        if plan.adjacency == SHARES
        else "The number of records, the list of budgets, the sizes of the groups and the recipe: they count as "
        "public. So it is not hidden that a record is on the list. Whether their data were used is not hidden either, "
        "but bounded: the odds say how often a guess about it is right at most."
    )
    if "records" in hidden:
        public += (
            " They are public for the guarantee; this report nevertheless does not show how many records hold which "
            "budget."
        )
    elif "epsilon_spent" in hidden:
        public += (
            " They are public for the guarantee; this report nevertheless shows neither the budgets that fewer than 20 "
            "records share nor how many records hold them."
        )
    if plan.runs > 1:
        public += " So does the choice of each run's records, which must not be made by looking at data."
    points = [
        of_unit(public, plan.unit),
        *(_other_runs(plan) if plan.groups.starts is None else _UNCHARGED[plan.unit]),
        f"What was read off these data before training: {read_off}."
        if read_off
        else "Preprocessing that was fitted on these data, such as means, vocabularies or feature selection.",
        "Measurements on private data" + (", among them the accuracy in this report." if private_metrics else "."),
        *_OTHER_ROWS[plan.unit],
    ]
    if plan.adjacency == SHARES:
        labels = "Telling two budget labels of a present record apart: that is covered only at the sum of both."
        points.append(of_unit(labels, plan.unit))
    if is_seeded:
        points.append("Anyone who knows or guesses the seed of this run.")
    return tuple(points)


_UNCHARGED: dict[Unit, tuple[str, str]] = {
    unit: (
        f"Runs on the same {unit}s, and attacks on membership, that were not charged to the registry: they spend in "
        "addition.",
        "Choosing among runs by scores on private records. A choice by what charged runs released is covered.",
    )
    for unit in ("record", "person")
}

_OTHER_ROWS: dict[Unit, tuple[str, ...]] = {
    "record": (
        "Several records of one person: each record is protected separately.",
        "Telling one content of a record from another: exchanging them costs twice the ε, (2ε_i, (1+e^{ε_i})δ_i).",
    ),
    "person": (
        "Rows of a person under another id, and what the rows of others say about them.",
        "Telling one content of a person’s rows from another: exchanging them costs twice the ε, "
        "(2ε_i, (1+e^{ε_i})δ_i).",
    ),
}


def _other_runs(plan: Plan) -> tuple[str, str]:
    """Which runs, and which choices between settings, are not covered."""
    runs, unit = plan.runs, plan.unit
    if plan.select is not None:
        return (
            f"Other runs on the same {unit}s than those of this selection. Their epsilons add up.",
            "The number of runs of the selection, and anything about those that lost: they were destroyed.",
        )
    if runs == 1:
        return (
            f"Other runs on the same {unit}s. Several runs add up; this report is about one.",
            "Choosing settings by trying them on these data.",
        )
    return (
        f"Other runs on the same {unit}s than the {runs:,} of this plan. Their epsilons add up.",
        f"Choosing one of the {runs:,} runs, or its settings, by scores on private records, as a search with "
        "cross-validation does. A choice by what the runs released, or by public records, is covered.",
    )


def strategy(plan: Plan) -> str:
    """The plan's strategy and its options, in one line."""
    options = ", ".join(f"{name} = {value}" for name, value in plan.options.items())
    return plan.strategy + (f" ({options})" if options else "")


def listed(parts: Sequence[str]) -> str:
    """
    >>> listed(["one", "two", "three"])
    'one, two and three'
    """
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def summary_of_many(plan: Plan) -> str:
    """A summary of many groups; not for release if any of them is small."""
    shares = plan.epsilon_spent() / plan.epsilons
    low, high = display.number(plan.epsilons[0]), display.number(plan.epsilons[-1])
    return (
        f"There are {len(plan.epsilons):,} different budgets, from ε = {low} to {high}; neighbouring ones are merged "
        f"here. At the end between {100 * shares.min():.4g} % and {100 * shares.max():.4g} % of a budget is spent. "
        "The run’s plan.json has a row for every group."
    )
