"""Graph: from the losses down the recorded autograd graph to every use of a trained parameter.

What is found holds for this very graph, whatever module, function or view recorded it. A weight used by two layers, or
outside its module, has one entry per use. Only operators with a rule in `operator_rules` are passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelError
from .operator_rules import BatchAxis, InputAxis, Summed, UnsupportedOp, operator, propagate

#: Operators with a sampler that also computes the gradient of their first input, so that torch's backward need not run.
OWN_BACKWARD = {"MkldnnRnnLayer"}

Edge = tuple[Any, int]  # a node, and which of its outputs


@dataclass(frozen=True)
class ParameterUse:
    """One input of one operator, with a gradient that is a sum over the records.

    node, index  the operator, and which of its inputs
    axes         the batch axes of the operator's outputs
    target       where autograd would send the input's gradient
    depth        how many operators with a backward pass of our own lie between it and the losses
    """

    node: Any
    index: int
    axes: tuple[BatchAxis | None, ...]
    target: Edge
    depth: int

    @property
    def batch(self) -> BatchAxis:
        """The batch axis of the first output, which the rules of most operators with weights require."""
        batch = self.axes[0]
        assert batch is not None
        return batch


@dataclass(frozen=True)
class CustomBackward:
    """An operator with a backward pass of our own, the outputs that gradients reach, and its depth."""

    node: Any
    outputs: tuple[int, ...]
    depth: int


@dataclass(frozen=True)
class Trace:
    """All uses of trained parameters in one graph.

    pattern  a hash of the graph, as far as it was walked
    dtypes   of the gradients in it
    custom   operators with a backward of our own; none where paths around them would make depths ambiguous
    readers  {operator: the operators that read its outputs, each with the number of the input}
    """

    uses: tuple[ParameterUse, ...]
    pattern: int
    dtypes: frozenset[torch.dtype]
    custom: tuple[CustomBackward, ...]
    readers: Mapping[Any, Sequence[Edge]]


def trace(losses: Tensor, parameters: Mapping[int, int]) -> Trace:
    """Walk down from `losses` (records,). parameters: {id of a trained parameter: its place in the caller's order}.

    Raises UnsupportedOp where an operator without a rule lies between the losses and a trained parameter, and
    ModelError where the losses depend on none of them.
    """
    walk = _Walk(losses, parameters)
    for node in walk.order:
        walk.visit(node, len(losses))
    return walk.result()


class _Walk:
    """The state of one walk, from the losses down.

    axes    {node: {output: its batch axis}}
    summed  nodes that only a sum over the records reaches
    depths  {node: its depth on each way that leads to it}
    """

    def __init__(self, losses: Tensor, parameters: Mapping[int, int]) -> None:
        root = losses.grad_fn
        self.order, self._dtypes = _from_the_losses_down(root, parameters)
        if not self.order:
            raise _disconnected(len(parameters))
        self._number = {node: i for i, node in enumerate(self.order)}
        self._axes: dict[Any, dict[int, BatchAxis]] = {root: {0: BatchAxis(0)}}
        self._summed: set[Any] = set()
        self._depths: dict[Any, set[int]] = {root: {0}}
        self._uses: list[tuple[Any, int, tuple[BatchAxis | None, ...], Edge]] = []
        self._custom: list[tuple[Any, tuple[int, ...]]] = []
        self._pattern: list[Any] = []
        self._readers: dict[Any, list[Edge]] = {}

    def visit(self, node: Any, records: int) -> None:
        axes = self._axes.get(node)
        if node in self._summed:
            if axes is not None:
                raise UnsupportedOp(f"{node.name()} is used both record by record and in a sum over records")
            self._note(node)
            self._summed.update(source for source, _ in node.next_functions if source in self._number)
            return
        if axes is None or hasattr(node, "variable"):
            raise UnsupportedOp(node.name())
        outputs = [axes.get(k) for k in range(max(len(getattr(node, "_input_metadata", ())), max(axes) + 1))]
        inputs = propagate(node, outputs, records)
        self._note(node, *inputs)
        is_custom = operator(node) in OWN_BACKWARD and not any(isinstance(axis, BatchAxis) for axis in inputs[1:])
        if is_custom:
            self._custom.append((node, tuple(axes)))
        for i, (axis, (source, k)) in enumerate(zip(inputs, node.next_functions, strict=True)):
            if source not in self._number:
                continue  # leads to no trained parameter
            self._readers.setdefault(source, []).append((node, i))
            if isinstance(axis, Summed):
                self._uses.append((node, i, tuple(outputs), (source, k)))
                self._summed.add(source)
            else:
                self._join(source, k, axis)
                self._depths.setdefault(source, set()).update(depth + is_custom for depth in self._depths[node])

    def _note(self, node: Any, *inputs: InputAxis) -> None:
        self._pattern.append(
            (type(node), *(self._number.get(source, -1) for source, _ in node.next_functions), *inputs)
        )

    def _join(self, node: Any, output: int, axis: BatchAxis | None) -> None:
        if axis is None:
            raise UnsupportedOp(node.name())
        if self._axes.setdefault(node, {}).setdefault(output, axis) != axis:
            raise UnsupportedOp(f"{node.name()} is reached on two paths that disagree about the records")

    def result(self) -> Trace:
        if any(len(depths) > 1 for depths in self._depths.values()):
            depth_of: dict[Any, int] = dict.fromkeys(self._depths, 0)
            custom = []
        else:
            depth_of = {node: depth for node, (depth,) in self._depths.items()}
            custom = [CustomBackward(node, outputs, depth_of[node]) for node, outputs in self._custom]
        uses = [ParameterUse(*use, depth_of[use[0]]) for use in self._uses]
        return Trace(tuple(uses), hash(tuple(self._pattern)), self._dtypes, tuple(custom), self._readers)


def leaf_of(node: Any) -> Tensor | None:
    """The only leaf that this node leads to; None where there are several."""
    while len(node.next_functions) == 1:
        ((node, _),) = node.next_functions
    leaf: Tensor | None = getattr(node, "variable", None)
    return leaf


def check_connected(losses: Tensor, parameters: Iterable[Tensor]) -> frozenset[torch.dtype]:
    """The types of the gradients on the way from the losses to these parameters.

    Raises ModelError where the losses depend on none of them: the updates would be noise alone.
    """
    known = {id(p): k for k, p in enumerate(parameters)}
    order, dtypes = _from_the_losses_down(losses.grad_fn, known)
    if id(losses) not in known and not order:
        raise _disconnected(len(known))
    return dtypes


def _disconnected(count: int) -> ModelError:
    return ModelError(
        f"The losses depend on none of the {count} trained parameters, so every update would be noise alone. Compute "
        "them from the model that was made private: not from a copy of it (copy.deepcopy), nor from a wrapped or "
        "compiled clone that has parameters of its own."
    )


def _from_the_losses_down(root: Any, parameters: Mapping[int, int]) -> tuple[list[Any], frozenset[torch.dtype]]:
    """(every node that leads to a trained parameter, each before all nodes that it sends gradients to; the types of
    their gradients)."""
    leads: dict[Any, bool] = {}
    dtypes: set[torch.dtype] = set()
    order: list[Any] = []
    stack = [(root, False)] if root is not None else []
    while stack:
        node, is_done = stack.pop()
        if is_done:
            variable = getattr(node, "variable", None)
            leads[node] = (
                id(variable) in parameters
                if variable is not None
                else any(leads.get(source, False) for source, _ in node.next_functions)
            )
            if leads[node]:
                order.append(node)
                for gradient in getattr(node, "_input_metadata", ()):
                    dtypes.add(gradient.dtype)
        elif node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack.extend((source, False) for source, _ in node.next_functions if source is not None)
    order.reverse()
    return order, frozenset(dtypes)
