"""Which record each entry of an operator's result depends on, given the same of its arguments.

The rules are facts about ATen operators, grouped by kind:

    pointwise    entry by entry; copies and new tensors
    reductions   sums, softmax, sorting, pooling, norms: entries meet along some axes
    products     matrix products, attention, convolutions, recurrent layers
    indexing     picking, writing, joining by places
    layers       batch norm, embeddings, losses of classes

To add an operator: give a rule (`general` builds most of them) and add its name to the table of that file. Without a
rule, the result is unknown, which refuses nothing: losses and gradients are then compared in more forms. For some
operators with a rule, only the use that keeps records apart is known; every other use of those is mixed or unknown.
"""

from __future__ import annotations

from ..states import FREE, Call, Free, Rows, State, worst
from . import indexing, layers, pointwise, products, reductions
from .general import Rule

RULES: dict[str, Rule] = {
    **pointwise.RULES,
    **reductions.RULES,
    **products.RULES,
    **indexing.RULES,
    **layers.RULES,
}
#: These do not use all of their arguments.
_PARTIAL = (pointwise.from_nothing, pointwise.copied, layers.class_loss_backward)
#: These may give another result than unknown where an argument is unknown.
_OWN_JUDGEMENT = (*_PARTIAL, pointwise.pointwise, pointwise.loss_by_entry)


def no_rule(call: Call) -> State:
    return call.unknown()


def result_of(call: Call, is_pointwise: bool) -> list[State]:
    """The state of every result. is_pointwise: what torch itself says of an operator without a rule here."""
    rule = RULES.get(call.name) or (pointwise.pointwise if is_pointwise else no_rule)
    state = _by_arguments([s for s in call.states.values() if not isinstance(s, Free)], rule)
    if state is not None:
        return [state] * len(call.results)
    try:
        result = rule(call)
    except Exception:  # a use that the rule was not written for
        result = call.unknown()
    if isinstance(result, list):
        return (result + [call.unknown()] * len(call.results))[: len(call.results)]
    return [result] * len(call.results)


def _by_arguments(states: list[State], rule: Rule) -> State | None:
    """The state of all results where the states of the arguments settle it; states: of those that are not free."""
    if not states:
        return FREE
    if rule not in _PARTIAL and all(isinstance(s, Rows) and s.axis is None and s == states[0] for s in states):
        return states[0]  # whatever an operator does to values of one record alone, its results are that record's
    return None if rule in _OWN_JUDGEMENT else worst(states)
