"""How rules are built: entries that meet along some axes, and products that are summed over an index."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..states import FREE, Call, Rows, State, axes, unless

#: A rule gives the state of all results, or of each. `result_of` calls it only if no argument is mixed or unknown.
Rule = Callable[[Call], State | list[State]]
Axes = Callable[[Call, Tensor], Collection[int]]


def lines(rule: Rule, names: str) -> dict[str, Rule]:
    """The same rule for operators of these names."""
    return dict.fromkeys(names.split(), rule)


def dim(call: Call, x: Tensor) -> tuple[int, ...]:
    """The axes that the operator was called with."""
    return axes(call["dims"] if "dims" in call.arguments else call["dim"], x.ndim)


def every_axis(call: Call, x: Tensor) -> range:
    return range(x.ndim)


def all_but_the_first(call: Call, x: Tensor) -> range:
    return range(1, x.ndim)


def last(count: int) -> Axes:
    return lambda call, x: range(x.ndim - count, x.ndim)


def meet(
    along: Axes,
    otherwise: Callable[[Call], State] = Call.mixed,
    data: str = "",
    others: Callable[[Call], State] = Call.unknown,
) -> Callable[[Call], State]:
    """Entries of `data` meet along some axes, and nowhere else.

    otherwise  the state of the result if the records lie along one of these axes
    data       names of the arguments that hold records; the first tensor if none is given
    others     the state of the result if another argument depends on records
    """

    def rule(call: Call) -> State:
        parts = call.given(data) if data else call.tensors[:1]
        if any(call.state(t) != FREE for t in call.tensors if all(t is not part for part in parts)):
            return others(call)
        return unless(call.joined([call.state(part) for part in parts]), along(call, parts[0]), otherwise(call))

    return rule


def first_only(rule: Callable[[Call], State]) -> Rule:
    """The rule for the first result; nothing is known of the others."""
    return lambda call: [rule(call), *(call.unknown() for _ in call.results[1:])]


def contraction(names: str, spec: str) -> Callable[[Call], State]:
    """A product that is summed over every index that the result lacks, as `torch.einsum` writes it.

    Axes in front of those in `spec` are broadcast. Arguments may have fewer axes than their term.

    >>> rule = contraction("self mat2", "nk,kp->np")  # records along n or p stay apart; along k they meet
    """
    inputs, result = spec.split("->")

    def index(argument: Any, term: str, axis: int) -> tuple[str, int]:
        """The letter of an axis, or how many axes in front of the term it lies."""
        place = axis - argument.ndim + len(term)
        return (term[place], 0) if place >= 0 else ("", place)

    def rule(call: Call) -> State:
        states: list[State] = []
        for name, term in zip(names.split(), inputs.split(","), strict=True):
            state = call.state(call[name])
            if isinstance(state, Rows) and state.axis is not None:
                letter, before = index(call[name], term, state.axis)
                if letter and letter not in result:
                    return call.mixed()
                place = result.index(letter) if letter else before
                state = replace(state, axis=call.results[0].ndim - len(result) + place)
            states.append(state)
        return call.joined(states)

    return rule
