"""Tracing: from the losses down the recorded graph to every place where a sum over records begins.

What is found holds for this very graph, whatever module, function or view recorded it: a weight used by two layers, or
outside its own, has a place per use. Only operators with a rule in `lanes` are passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....errors import ModelError
from .batch_axis import End, Handed, Lane, Unproven, handed_on, operator

#: Operators whose family finds the gradient of their first input on the way, so that theirs need not run.
OWN_BACKWARD = {"MkldnnRnnLayer"}

Edge = tuple[Any, int]  # a node, and which of its outputs


@dataclass(frozen=True)
class Place:
    """One input of one operator whose gradient is a sum over records.

    node, index  the operator and which of its inputs
    lanes        of the operator's outputs
    target       where the gradient would go on
    """

    node: Any
    index: int
    lanes: tuple[Lane | None, ...]
    target: Edge


@dataclass(frozen=True)
class Cut:
    """An operator whose backward need not run, the outputs that gradients arrive at, and its stage."""

    node: Any
    outputs: tuple[int, ...]
    stage: int


@dataclass(frozen=True)
class Trace:
    """All places of one graph, and the shape of the graph as far as it was walked.

    stages  per place: how many operators with a backward of our own lie between it and the losses
    cuts    those operators; none where paths around them would make stages ambiguous
    """

    places: tuple[Place, ...]
    pattern: int
    stages: tuple[int, ...]
    cuts: tuple[Cut, ...]


def trace(losses: Tensor, parameters: Mapping[int, int], records: int) -> Trace:
    """Walk down from `losses` (records,). parameters: id of a trained parameter -> its place in the caller's order.

    Raises Unproven where an operator without a rule lies on the way to a trained parameter, and ModelError where no way
    leads to any.
    """
    order = _from_the_losses_down(losses.grad_fn, parameters)
    if not order:
        raise _disconnected(len(parameters))
    number = {node: i for i, node in enumerate(order)}
    lanes: dict[Any, dict[int, Lane]] = {losses.grad_fn: {0: Lane(0)}}
    places: list[Place] = []
    summed: set[Any] = set()  # nodes that a sum over records arrives at
    pattern: list[Any] = []
    stage: dict[Any, set[int]] = {losses.grad_fn: {0}}
    cuts: list[tuple[Any, tuple[int, ...]]] = []
    for node in order:
        own = lanes.get(node)
        if node in summed:
            if own is not None:
                raise Unproven(f"{node.name()} takes part both record by record and as a whole")
            pattern.append((type(node), *(number.get(after, -1) for after, _ in node.next_functions)))
            summed.update(after for after, _ in node.next_functions if after in number)
            continue
        if own is None or hasattr(node, "variable"):
            raise Unproven(node.name())
        outputs = [own.get(k) for k in range(max(len(getattr(node, "_input_metadata", ())), max(own) + 1))]
        handed = handed_on(node, outputs, records)
        pattern.append((type(node), *(number.get(after, -1) for after, _ in node.next_functions), *handed))
        is_cut = operator(node) in OWN_BACKWARD and all(not isinstance(lane, Lane) for lane in handed[1:])
        if is_cut:
            cuts.append((node, tuple(own)))
        for i, (lane, (after, k)) in enumerate(zip(handed, node.next_functions, strict=True)):
            if after not in number:
                continue  # leads to nothing that is trained
            if isinstance(lane, End):
                places.append(Place(node, i, tuple(outputs), (after, k)))
                summed.add(after)
            else:
                _join(lanes, after, k, lane)
                stage.setdefault(after, set()).update(s + is_cut for s in stage[node])
    if any(len(found) > 1 for found in stage.values()):
        return Trace(tuple(places), hash(tuple(pattern)), (0,) * len(places), ())
    at = {node: found.pop() for node, found in stage.items()}
    return Trace(
        tuple(places),
        hash(tuple(pattern)),
        tuple(at[place.node] for place in places),
        tuple(Cut(node, outputs, at[node]) for node, outputs in cuts),
    )


def check_connected(losses: Tensor, parameters: Iterable[Tensor]) -> None:
    """Raises ModelError where the losses depend on none of these parameters: noise alone would be trained."""
    known = {id(p): k for k, p in enumerate(parameters)}
    if id(losses) not in known and not _from_the_losses_down(losses.grad_fn, known):
        raise _disconnected(len(known))


def _disconnected(count: int) -> ModelError:
    return ModelError(
        f"The losses depend on none of the {count} trained parameters, so noise alone would be trained. Compute them "
        "from the model that was made private: not from a copy of it (copy.deepcopy), nor from a wrapped or compiled "
        "clone that has parameters of its own."
    )


def _join(lanes: dict[Any, dict[int, Lane]], node: Any, output: int, lane: Handed) -> None:
    if not isinstance(lane, Lane):
        raise Unproven(node.name())
    if lanes.setdefault(node, {}).setdefault(output, lane) != lane:
        raise Unproven(f"{node.name()} is reached on two ways that disagree about the records")


def _from_the_losses_down(root: Any, parameters: Mapping[int, int]) -> list[Any]:
    """Every node that leads to a trained parameter, each before all those it hands gradients to."""
    leads: dict[Any, bool] = {}
    order: list[Any] = []
    stack = [(root, False)] if root is not None else []
    while stack:
        node, is_done = stack.pop()
        if is_done:
            variable = getattr(node, "variable", None)
            leads[node] = (
                id(variable) in parameters
                if variable is not None
                else any(leads.get(after, False) for after, _ in node.next_functions)
            )
            if leads[node]:
                order.append(node)
        elif node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack.extend((after, False) for after, _ in node.next_functions if after is not None)
    order.reverse()
    return order
