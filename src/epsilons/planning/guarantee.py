"""The guarantee in words: one text for plans, runs, reports and documentation.

The first paragraph is for readers without mathematics; the formal statement follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..accounting import DESCRIPTIONS
from ..accounting.selection import Selection
from ..core.mechanism import Unit
from ..errors import printable

RANDOMNESS = {
    "chacha20": "the ChaCha20 cipher under a secret 256-bit key",
    "secure": "the ChaCha20 cipher under a secret 256-bit key",
    "philox": "Philox counters under a secret 256-bit key",  # of earlier versions
    "seeded": "seeded: no guarantee towards anyone who knows the seed",
}

#: The statement that no person has several rows.
EACH_ROW = "each row is one person"

_NOISE = {
    "chacha20": "a 64-bit floating-point one, not hardened against attacks on its last bits",
    "secure": "half the sum of four 64-bit floating-point ones, against attacks that invert one; nothing is proved "
    "about its last bits",
}

_AT_ONE = (
    " A smaller ε is a stronger limit. At ε = 1, a guess between the two cases, at even odds, is right at most 74 "
    "times in 100 instead of 50. Patterns that many {unit}s share are not hidden."
)

_IN_WORDS: dict[Unit, str] = {
    "record": "In words: every record has a limit ε on how much anyone can learn about it from what the training "
    "releases, whatever else they know. With {neighbour}, the training would have released the same results with "
    "nearly the same probability." + _AT_ONE.format(unit="record"),
    "person": "In words: every person has a limit ε on how much anyone can learn about them from what the training "
    "releases, however many rows of the data are theirs, and whatever else is known. With {neighbour}, the training "
    "would have released the same results with nearly the same probability." + _AT_ONE.format(unit="person"),
}


_BY_RISK = (
    "Risks: the tier of i may declare more than (ε_i, δ_i), for the same D, D′ and M. Where it declares n_i of 100: a "
    "guess between D and D′ from what M releases, at even odds, is right at most n_i times in 100 (true-positive minus "
    "false-positive rate at most 2n_i/100 − 1). Where it declares t_i at f_i: a test with the false-positive rate f_i "
    "recognises the {unit} with probability at most t_i. The plan states n_i, t_i and f_i of each tier, and what is "
    "certified of them. They hold whatever others chose.\n"
)


@dataclass(frozen=True)
class _Neighbours:
    """What two data sets differ in.

    in_words  what one of them has in place of the record or person
    formal    the same as a definition
    public    what is not protected
    extra     what is covered besides
    """

    in_words: str
    formal: str
    public: str
    extra: str = ""


_LABELS = (
    " Presence, including the budget label, is covered at ε_i; telling two labels of a present {unit} apart is covered "
    "only at the sum of both. The shares and the number of {unit}s were declared by the caller as not derived from "
    "these data."
)
_ROSTER: dict[Unit, _Neighbours] = {
    "record": _Neighbours(
        "an empty record in its place",
        "let D′ be the data with i replaced by an empty record of the same budget, which contributes nothing",
        "the number of records, the list of budgets, group sizes, the recipe",
    ),
    "person": _Neighbours(
        "none of their rows",
        "let D′ be the data with all rows of person i removed; i keeps the place in the list of budgets and "
        "contributes nothing",
        "the number of persons, the list of budgets, group sizes, the recipe",
        " The number of rows, in all and of every person, is protected.",
    ),
}
_SHARES: dict[Unit, _Neighbours] = {
    "record": _Neighbours(
        "the record left out",
        "let D′ be the data without record i",
        "the declared shares and number of records, the recipe",
        _LABELS.format(unit="record"),
    ),
    "person": _Neighbours(
        "the person and all their rows left out",
        "let D′ be the data without person i and all rows of i",
        "the declared shares and number of persons, the recipe",
        _LABELS.format(unit="person") + " The number of rows, in all and of every person, is protected.",
    ),
}
_OTHER_ROWS: dict[Unit, str] = {
    "record": "several records of one person; exchanging one record's content for another's",
    "person": "rows of a person under another id, rows about other persons than the one they have the id of; "
    "exchanging one person's rows for others",
}


class OfRun(NamedTuple):
    """What the guarantee of a run says beside that of its plan.

    randomness  "chacha20", "secure" or "seeded"; None for a plan
    features    what computed the inputs before training, and where its constants come from
    person      the column of the persons' ids, or EACH_ROW; None if it is not stated
    registry    id of the registry that the run is charged to; None if it is not named yet, or for other runs
    """

    randomness: str | None = None
    features: str | None = None
    person: str | None = None
    registry: str | None = None


def words(
    accountant: str,
    *,
    shares_declared: bool,
    steps: int,
    runs: int = 1,
    unit: Unit = "record",
    on_accounts: bool = False,
    by_risk: bool = False,
    select: Selection | None = None,
    class_noise: float | None = None,
    run: OfRun | None = None,
) -> str:
    """The guarantee of a plan, or of a run of it.

    runs         how many runs of so many steps the promise is about: all of them together
    unit         what has a budget: a record, or a person with all their rows
    on_accounts  True if the plan was made on accounts of a registry
    by_risk      True if tiers declare limits beside (epsilon, delta)
    select       how the run that is released is selected; None without a selection
    class_noise  noise of the counts of classes that are charged with the steps; None without counts
    """
    randomness, features, person, registry = run or OfRun()
    scope, releases, public_runs, uncovered, length = (
        _of_runs(runs, steps, unit) if select is None else _of_selection(select, steps, unit)
    )
    if class_noise is not None:
        releases += f", how many people of each class each tier has (with Gaussian noise of {class_noise:g} people),"
    if on_accounts:
        scope, releases, uncovered = _of_registry(registry)
        length += ", after all that was charged before"
    bound = DESCRIPTIONS.get(accountant, f"the accountant {accountant!r}")
    source = RANDOMNESS.get(randomness or "", "named when training starts")
    case = (_SHARES if shares_declared else _ROSTER)[unit]
    risks, at_other = _BY_RISK.format(unit=unit) if by_risk else "", "risk at other δ"
    if by_risk:
        at_other = "beyond it and the declared limits, risk"
    inputs = ""
    if features:
        inputs = f"Inputs: {printable(features)}. Computed before training, from one record at a time.\n"
    return (
        f"{_IN_WORDS[unit].format(neighbour=case.in_words)}\n"
        f"{scope} For every {unit} i with budget ε_i: {case.formal}. For every set S of outputs, "
        "Pr[M(D)∈S] ≤ e^{ε_i}·Pr[M(D′)∈S] + δ_i, and likewise with D and D′ exchanged. M releases all noisy updates"
        f"{releases} and whatever is computed from them without looking at the data again.{case.extra}\n{risks}"
        f"Public, not protected: {case.public}{public_runs}.\n"
        f"Not covered: {uncovered}, preprocessing fitted on the data, metrics on private data, {_OTHER_ROWS[unit]} "
        "costs (2ε_i, (1+e^{ε_i})δ_i).\n"
        f"{inputs}{_persons(unit, person, is_run=randomness is not None)}"
        f"ε is an upper bound from {bound} for Poisson sampling and {length}, in real arithmetic; floating "
        "point: coins compare 53-bit integers, rates rounded down; sums are added in 64 bits; the Gaussian noise is "
        f"{_NOISE.get(randomness or '', _NOISE['chacha20'])}.\n"
        f"Randomness: {source}.\n"
        f"Under Sample and Mix ε_i holds at δ_i only; {at_other} depends on other people's budgets "
        "(plan.epsilon_spent(delta=…) shows it)."
    )


def _of_registry(registry: str | None) -> tuple[str, str, str]:
    """Scope, releases, and what is not covered, of a run that is charged to a registry.

    A level is what an odometer shows: where outputs choose the runs, only the lifetime budget is a promise (Rogers,
    Roth, Ullman, Vadhan, arXiv 1605.08294).
    """
    name = registry or "named when training starts"
    return (
        f"All runs and statistics that are charged to the registry {name}, together. Where they may be chosen from "
        "the outputs of others, ε_i below is the lifetime budget of person i there, for everything that is ever "
        "charged. The ε_i of this plan are levels of it: they hold for all that is charged up to the end of this run, "
        "if none of it was chosen from outputs.",
        " of all these runs, the statistics",
        "whatever was not charged to this registry, a choice among runs by scores on private records",
    )


def _persons(unit: Unit, person: str | None, is_run: bool) -> str:
    """What a run states about persons, as a line; "" for a plan, which is made before the data are named."""
    if not is_run:
        return ""
    if unit == "person":
        by = "as the caller gave them" if person is None else f"in the column {printable(repr(person))}"
        return f"Persons: all rows with one id are one person; ids {by}.\n"
    if person == EACH_ROW:
        return f"Persons: {EACH_ROW}, as stated; this was not checked.\n"
    return "Persons: whether each row is one person is not stated.\n"


def _of_selection(select: Selection, steps: int, unit: Unit) -> tuple[str, str, str, str, str]:
    """What a guarantee says about a run that was selected among a secret number of them, as `_of_runs`."""
    return (
        f"One run that was selected: the best of a secret number of runs ({select.distribution}, {select.mean:g} in "
        f"expectation), each of at most {steps:,} steps under this one table, with settings drawn from a public list, "
        f"and each with a score on held-out {unit}s. A held-out {unit} takes part in the scores alone.",
        " of the run that is released, its settings, its score with noise,",
        f", the list of settings, the choice of held-out {unit}s, made without looking at data",
        "the number of runs, anything about the others, how long they took, other runs, tuning",
        f"{steps:,} steps, and for the selection (Papernot and Steinke, arXiv 2110.03620; with PLD also Koskela, "
        "Redberg and Wang, arXiv 2402.06701)",
    )


def _of_runs(runs: int, steps: int, unit: Unit) -> tuple[str, str, str, str, str]:
    """What a guarantee says about one run, or about several together.

    Its scope, which updates are released, what else is public, what runs are not covered, and the steps.
    """
    if runs == 1:
        return "This run alone.", "", "", "other runs, tuning", f"{steps:,} steps"
    return (
        f"These {runs:,} runs together, each of at most {steps:,} steps under this one table. Model, loss, optimizer "
        "and a smaller number of steps may differ between them, and may be chosen by what earlier runs released.",
        f" of all {runs:,} runs",
        f", the choice of each run's {unit}s, made without looking at data",
        "other runs than these, a choice among them by scores on private records",
        f"{runs:,} runs of {steps:,} steps",
    )
