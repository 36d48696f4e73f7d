"""Backward: from a traced graph to the per-record gradients of every parameter, by one pass through activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..engine import is_meant
from ..loop import strided
from .embeddings import TableGrad, embedding_grad, pooled
from .grad_samplers import grad_sampler, needs_the_graph
from .graph import Edge, ParameterUse, Trace
from .lstm import input_grad
from .operator_rules import grad_shape, input_shape, operator, signed
from .outer_products import OuterProductGrad, fast_products
from .per_sample_grads import Cache, DenseGrad, PerSampleGrad, PerSampleGradFn

Grads = dict[int, PerSampleGrad]  # {place of a parameter: the gradients of all records by it}


class _Prepared(NamedTuple):
    """Where the gradient is read that a use needs, its sampler, and whether that needs the graph again."""

    use: ParameterUse
    per_sample_grad: PerSampleGradFn
    needs_graph: bool


def per_sample_grads(
    found: Trace,
    losses: Tensor,
    parameters: Sequence[nn.Parameter],
    keep_graph: bool,
    cache: Cache | None = None,
    shares: Tensor | None = None,
) -> Grads:
    """The gradients of all rows by each parameter; none for parameters that the losses do not depend on.

    cache   shared by the samplers, for one physical batch
    shares  (rows,) factors on the losses; None for 1
    """
    cache = {} if cache is None else cache
    # Samplers read what the graph saved, so they come before the pass that frees it.
    prepared = [_prepared(use, found, len(losses), cache) for use in found.uses]
    found = dataclasses.replace(found, uses=tuple(one.use for one in prepared))
    keep_graph = keep_graph or any(one.needs_graph for one in prepared)
    with fast_products(found, losses):
        reached = _output_grads(found, losses, torch.ones_like(losses) if shares is None else shares, cache, keep_graph)
    grads: list[tuple[Edge, PerSampleGrad]] = []
    with torch.no_grad():
        for use, per_sample_grad, _ in prepared:
            output_grads = [reached.get((id(use.node), k)) for k in range(len(use.axes))]
            if all(g is None for g in output_grads):
                continue  # no gradient of the losses reaches this operator
            with named(use.node):
                if output_grads[0] is None:
                    output_grads[0] = losses.new_zeros(grad_shape(use.node, 0))
                grads.append((use.target, per_sample_grad(output_grads)))
    return _by_parameter(grads, parameters)


@contextmanager
def named(node: Any) -> Iterator[None]:
    """Errors in here get the operator's name as a note."""
    try:
        yield
    except Exception as error:
        error.add_note(operator(node) or node.name())
        raise


def _prepared(use: ParameterUse, found: Trace, records: int, cache: Cache) -> _Prepared:
    with named(use.node):
        together = pooled(use, found.readers, records)
        if together is not None:
            return _Prepared(*together, needs_graph=False)
        return _Prepared(use, grad_sampler(use, records, cache), needs_the_graph(use))


def _output_grads(
    found: Trace, losses: Tensor, shares: Tensor, cache: Cache, keep_graph: bool
) -> dict[tuple[int, int], Tensor | None]:
    """{(id of an operator, output): the output's gradient}, for all uses: one pass, depth by depth."""
    reached: dict[tuple[int, int], Tensor | None] = {}
    outputs: list[Any] = [losses]
    gradients = [shares]
    for depth in range(max((use.depth for use in found.uses), default=-1) + 1):
        custom = [op for op in found.custom if op.depth == depth]
        wanted = [
            (use.node, k)
            for use in found.uses
            if use.depth == depth
            for k, axis in enumerate(use.axes)
            if axis is not None
        ]
        wanted += [(op.node, k) for op in custom for k in op.outputs]
        edges = list({(id(node), k): (node, k) for node, k in wanted}.values())
        results = torch.autograd.grad(
            outputs, [GradientEdge(*edge) for edge in edges], gradients, retain_graph=keep_graph, allow_unused=True
        )
        reached |= {(id(node), k): g for (node, k), g in zip(edges, results, strict=True)}
        # The next depth begins at the inputs of the operators that are differentiated here.
        further = [op.node for op in custom if op.node.next_functions[0][0] is not None]
        outputs = [GradientEdge(*node.next_functions[0]) for node in further]
        gradients = [input_grad(node, [reached.get((id(node), k)) for k in range(3)], cache) for node in further]
    return reached


def _by_parameter(grads: Sequence[tuple[Edge, PerSampleGrad]], parameters: Sequence[nn.Parameter]) -> Grads:
    """All uses of one parameter, added."""
    place = {id(p): k for k, p in enumerate(parameters)}
    total: Grads = {}
    derived: list[tuple[Edge, DenseGrad]] = []
    with torch.no_grad():
        for target, use_grad in grads:
            with named(target[0]):
                edge, grad = _through_views(target, use_grad)
                k = place.get(id(getattr(edge[0], "variable", None)))
                if k is None:
                    derived.append((edge, grad.dense()))
                else:
                    add(total, k, grad)
    for k, rows in _of_derived_weights(derived, parameters).items():
        add(total, k, DenseGrad(rows))
    return total


def add(total: Grads, k: int, grad: PerSampleGrad) -> None:
    """Add one more use of the k-th parameter."""
    before = total.get(k)
    if before is None:
        total[k] = grad
    elif isinstance(before, OuterProductGrad) and isinstance(grad, OuterProductGrad):  # noqa: SIM114  # for mypy
        total[k] = before.followed_by(grad)
    elif isinstance(before, TableGrad) and isinstance(grad, TableGrad):
        total[k] = before.followed_by(grad)
    else:
        total[k] = before.dense().plus(grad.dense())


#: Views that show the same values in another shape.
_RESHAPED = ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze")


def is_direct(edge: Edge) -> bool:
    """Whether `_through_views` leads to a parameter, and not to what a weight was computed by."""
    node, _ = edge
    while operator(node) in ("T", *_RESHAPED):
        ((node, _),) = node.next_functions
    return hasattr(node, "variable")


def _through_views(edge: Edge, grad: PerSampleGrad) -> tuple[Edge, PerSampleGrad]:
    """Follow a gradient through transpositions, reshapes, casts and lookups that all records have in common."""
    node, k = edge
    while len(getattr(node, "next_functions", ())) == 1:
        name = operator(node)
        if name == "T":
            grad = grad.transposed()
        elif name == "ToCopy" and _is_cast(node):
            pass  # as autocast does with weights: the gradient has 32 bits or more in any case
        elif name in _RESHAPED:
            grad = grad.dense().reshaped(grad_shape(*node.next_functions[0]))
        elif name == "Embedding" and not node._saved_scale_grad_by_freq:  # of positions: all records have the same
            rows = grad.dense().rows.flatten(1, -2)
            index = node._saved_indices.flatten().expand(len(rows), -1)
            grad = embedding_grad(index, rows, input_shape(node, 0)[0], signed(node._saved_padding_idx))
        else:
            break
        ((node, k),) = node.next_functions
    return (node, k), grad


def _is_cast(node: Any) -> bool:
    """Whether this copy is only one to another floating-point type."""
    ((source, k),) = node.next_functions
    ends = [node._input_metadata[0], source._input_metadata[k]]
    return ends[0].device == ends[1].device and all(end.dtype.is_floating_point for end in ends)


def _of_derived_weights(
    targets: Sequence[tuple[Edge, DenseGrad]], parameters: Sequence[nn.Parameter]
) -> Mapping[int, Tensor]:
    """Gradients by parameters from which weights were computed (weight norm, merged adapters, tables looked up)."""
    if not targets:
        return {}
    edges = [GradientEdge(*edge) for edge, _ in targets]
    rows = [grad.rows for _, grad in targets]

    def back(gradients: list[Tensor], batched: bool) -> Sequence[Tensor | None]:
        return torch.autograd.grad(
            edges, list(parameters), gradients, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )

    try:
        results: Sequence[Tensor | None] = back(rows, batched=True)
    except Exception as error:
        if is_meant(error):
            raise
        by_record = [back([r[i] for r in rows], batched=False) for i in range(len(rows[0]))]
        results = [
            None if column[0] is None else torch.stack([strided(g) for g in column if g is not None])
            for column in zip(*by_record, strict=True)
        ]
    return {k: strided(g) for k, g in enumerate(results) if g is not None}
