"""Accounts: what the people of one list have left, and the budgets to plan the next run with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..accounting.filter import ORDERS, offsets
from ..budgets.budgets import Budgets
from ..budgets.ids import Rule
from ..core.disclosure import how_many
from ..core.mechanism import FloatArray, IntArray
from ..errors import EpsilonsWarning, RegistryError, RegistryRefusedError
from ..planning import Plan
from .cohorts import Wishes, of_people
from .databases import PAGE, Database
from .rosters import NO_PERSON, UNIT, Pages

#: Less than this part of the lifetime budget is nothing: planning leaves up to about 1e-5 of it unused.
LEAST_LEFT = 1e-4


@dataclass(frozen=True, repr=False, eq=False)
class Accounts:
    """The accounts of some people, as they were at one moment, in the order of the list.

    ids        (people,) as they were given
    numbers    (people,) in the registry
    epsilon    (people,) lifetime budgets
    delta      (people,)
    home       (people,) index of the home order
    spent      (people, orders) nats spent and reserved at each order
    withdrawn  (people,) True for those who withdrew
    rule       how the registry makes ids equal

    All of it is confidential: it is not for logs or reports.
    """

    ids: Sequence[Any]
    numbers: IntArray
    epsilon: FloatArray
    delta: FloatArray
    home: IntArray
    spent: FloatArray
    withdrawn: npt.NDArray[np.bool_] = field(repr=False)
    rule: Rule = ()

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"Accounts({len(self):,} people)"

    @property
    def starts(self) -> FloatArray:
        """(people, orders) what was spent plus the conversion of each order, as the accountant `filter` takes it."""
        return np.asarray(self.spent + offsets(self.delta, self.home), dtype=np.float64)

    @property
    def used_share(self) -> FloatArray:
        """(people,) the part of each lifetime budget spent or reserved, at the home order; inf if there is none.

        There is none where a budget was lowered below what the home order can certify.
        """
        rows = np.arange(len(self))
        capacity = self.epsilon - offsets(self.delta, self.home)[rows, self.home]
        spent = self.spent[rows, self.home]
        share: FloatArray = np.divide(spent, capacity, out=np.full(len(self), np.inf), where=capacity > 0)
        return share

    @property
    def can_take_part(self) -> npt.NDArray[np.bool_]:
        """(people,) True for those who have something left and did not withdraw."""
        return np.asarray((self.used_share < 1 - LEAST_LEFT) & ~self.withdrawn)

    def lifetimes(self, rows: IntArray) -> list[list[float]]:
        """[lifetime epsilon, home order] of the people in each row of a plan, as run.json keeps it for reports.

        rows: (people,) the row of each person; people of one row have one lifetime budget and one home order.
        """
        _, first = np.unique(rows, return_index=True)
        found: list[list[float]] = np.stack([self.epsilon[first], ORDERS[self.home[first]]], axis=1).tolist()
        return found

    def subset(self, chosen: npt.ArrayLike) -> Accounts:
        """The accounts of these people: a mask of True and False, such as `can_take_part`, or positions."""
        places = np.arange(len(self))[np.asarray(chosen)]
        some = [self.ids[i] for i in places.tolist()]
        names = ("numbers", "epsilon", "delta", "home", "spent", "withdrawn")
        return replace(self, ids=some, **{name: getattr(self, name)[places] for name in names})

    def are_those_of(self, budgets: Budgets) -> bool:
        """Whether these budgets are of the same people in the same order, as far as ids and what was spent show it."""
        if len(budgets) != len(self):
            return False
        starts = budgets.groups.starts
        if starts is not None and not np.array_equal(starts[budgets.group], self.starts):
            return False
        texts = self.ids if isinstance(self.ids, list) else list(self.ids)
        return not budgets.has_ids or np.array_equal(budgets.persons_of(texts), np.arange(len(self)))

    def budgets(self, share: float = 1.0) -> Budgets:
        """Budgets of persons for the next run, which may use this part of what each of them has left.

        share  in (0, 1]. 1 uses all that is left, so that no later run includes these people

        A plan needs accountant="filter". Its epsilons are levels of the lifetime budgets: what a person will have
        spent at most when the run is over.

        Raises RegistryRefusedError if some withdrew or have nothing left: `subset(accounts.can_take_part)` leaves them
        out.
        """
        if not (math.isfinite(share) and 0 < share <= 1):
            raise RegistryError(f"A share is a part of what is left, above 0 and at most 1, got {share}.")
        out = int((~self.can_take_part).sum())
        if out:
            raise RegistryRefusedError(
                f"{how_many(out, len(self))} people of this list withdrew or have nothing left. Leave them out: "
                "accounts.subset(accounts.can_take_part)."
            )
        starts = self.starts
        begin = starts[np.arange(len(self)), self.home]
        levels = begin + share * (self.epsilon - begin)
        if not (levels > 0).all():
            raise RegistryRefusedError("The share is too small for some people: no run, however noisy, fits into it.")
        return _budgets(levels, self.delta, starts, self.ids, self.rule)


def _budgets(levels: FloatArray, delta: FloatArray, starts: FloatArray, ids: Sequence[Any], rule: Rule) -> Budgets:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EpsilonsWarning)
        return Budgets(levels, delta, unit="person", starts=starts, ids=ids, spelling=rule)


def again(
    roster: Pages, plan: Plan, ids: Sequence[Any], numbers: IntArray, rule: Rule
) -> tuple[npt.NDArray[np.bool_], Budgets]:
    """Who takes part in a run that is reserved, and their budgets, as when it was reserved (`Registry.again`).

    numbers  (people,) of these ids, −1 for those who are not enrolled
    """
    rows, people = np.full(len(numbers), NO_PERSON, dtype=np.int64), 0
    for page, of_page in roster.pages():
        here = (numbers // PAGE == page) & (numbers >= 0)
        rows[here] = of_page[numbers[here] % PAGE]
        people += int((of_page != NO_PERSON).sum())
    takes_part, groups = rows != NO_PERSON, plan.groups
    if int(takes_part.sum()) != people:
        raise RegistryRefusedError(
            "The data lack people who take part in this run. It continues with the data that it began with."
        )
    rows, chosen = rows[takes_part], [ids[i] for i in np.flatnonzero(takes_part).tolist()]
    assert groups.starts is not None
    return takes_part, _budgets(groups.epsilons[rows], groups.deltas[rows], groups.starts[rows], chosen, rule)


def accounts_of(database: Database, ids: Sequence[Any], numbers: IntArray, rule: Rule) -> Accounts:
    """The accounts of the people with these numbers, read in one transaction."""
    (rows, which), wishes = of_people(database, numbers), Wishes(database)
    wish = wishes.places(rows.wishes)[which]
    return Accounts(
        ids=list(ids),
        numbers=numbers,
        epsilon=wishes.epsilon[wish],
        delta=wishes.delta[wish],
        home=wishes.home[wish],
        spent=(rows.sums / UNIT)[which].reshape(-1, len(ORDERS)),
        withdrawn=rows.withdrawn[which],
        rule=rule,
    )
