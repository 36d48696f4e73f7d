"""Families: what each operator's weights contribute, from what the recorded graph saved.

Before the backward pass a family reads what it needs from the graph; afterwards it turns the gradients that arrived
at the operator's outputs into a Piece. To add one: a function (place, records) -> Finish, and a line in FAMILIES.
Whatever is not listed is differentiated by the operator's own backward, one record at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .batch_axis import ELEMENTWISE, Lane, operator, shape_into, shape_out, signed
from .conv import convolution
from .graph import Place
from .lstm import recurrent
from .per_sample_grads import Dense, Outer, Piece, Rows, Tokens

Arrived = Sequence[Tensor | None]  # the gradients at the operator's outputs
Finish = Callable[[Arrived], Piece]
#: (place, records, notes) -> Finish; notes are shared by all places of one chunk.
Family = Callable[[Place, int, dict[Any, Any]], Finish]


def lane_of(place: Place) -> Lane:
    lane = place.lanes[0]
    assert lane is not None  # the rules of these operators ask for it
    return lane


def the_first(arrived: Arrived) -> Tensor:
    first = arrived[0]
    assert first is not None  # filled in by the engine
    return first


def folded(gradient: Tensor, lane: Lane, shape: tuple[int, ...], records: int) -> Tensor:
    """(records, *shape) of an entry-by-entry gradient: what broadcasting spread out is summed within each record."""
    missing = gradient.ndim - len(shape)
    rows = lane.by_record(gradient, records).sum(1)  # (records, *all axes but the lane's)
    kept = [axis for axis in range(gradient.ndim) if axis != lane.axis]
    spread = [
        1 + i
        for i, axis in enumerate(kept)
        if axis < missing or (shape[axis - missing] == 1 and gradient.shape[axis] != 1)
    ]
    if spread:
        rows = rows.sum(spread, keepdim=True)
    return rows.reshape(records, *shape)


# -- families -----------------------------------------------------------------------------------------------


def matrix(place: Place, records: int, notes: dict[Any, Any]) -> Finish:
    """self @ mat2, plus a bias: linear layers."""
    node, lane = place.node, lane_of(place)
    has_bias = operator(node) == "Addmm"
    if has_bias and place.index == 0:
        return broadcast(place, records, notes)
    scale = float(node._saved_alpha) if has_bias else 1.0
    first_is_data = lane.axis == 0
    data = (node._saved_mat1 if has_bias else node._saved_self) if first_is_data else node._saved_mat2

    def finish(arrived: Arrived) -> Piece:
        gradient = the_first(arrived)
        if scale != 1.0:
            gradient = gradient * scale
        if first_is_data:  # (rows, k) @ (k, p)
            return Outer(Rows(lane.by_record(data, records)), Rows(lane.by_record(gradient, records)))
        across = Lane(0, lane.inner)  # (n, k) @ (k, rows)
        return Outer(Rows(across.by_record(gradient.T, records)), Rows(across.by_record(data.T, records)))

    return finish


def fused_linear(place: Place, records: int, notes: dict[Any, Any]) -> Finish:
    """input, weight, bias in one operator."""
    node, lane = place.node, lane_of(place)
    data = node._saved_input if place.index == 1 else None

    def finish(arrived: Arrived) -> Piece:
        gradient = lane.by_record(the_first(arrived), records).flatten(1, -2)
        if data is None:
            return Dense(gradient.sum(1))
        return Outer(Rows(gradient), Rows(lane.by_record(data, records).flatten(1, -2)))

    return finish


def embedding(place: Place, records: int, notes: dict[Any, Any]) -> Finish:
    node, lane = place.node, lane_of(place)
    index, padding = node._saved_indices, signed(node._saved_padding_idx)
    size = shape_out(node, 0)[0]
    kind: type[Tokens] = notes.get(Tokens, Tokens)

    def finish(arrived: Arrived) -> Piece:
        rows = lane.by_record(the_first(arrived), records).flatten(1, -2)
        return kind(lane.by_record(index, records).flatten(1), rows, size, padding)

    return finish


def layer_norm(place: Place, records: int, notes: dict[Any, Any]) -> Finish:
    node, lane = place.node, lane_of(place)
    shape = shape_out(node, place.index)
    if place.index == 2:
        return lambda arrived: Dense(folded(the_first(arrived), lane, shape, records))
    data, mean, scale = node._saved_input, node._saved_result1, node._saved_result2

    def finish(arrived: Arrived) -> Piece:
        normal = (data.to(mean.dtype) - mean) * scale
        return Dense(folded(the_first(arrived) * normal, lane, shape, records))

    return finish


def group_norm(place: Place, records: int, notes: dict[Any, Any]) -> Finish:
    node, lane = place.node, lane_of(place)
    data, mean, scale = node._saved_input, node._saved_result1, node._saved_result2
    index, groups = place.index, node._saved_group

    def finish(arrived: Arrived) -> Piece:
        gradient = the_first(arrived)
        gradient = gradient.reshape(*gradient.shape[:2], -1)  # (batch, features) has no third axis
        if index == 1:
            spread = [t.reshape(len(data), groups, 1, 1) for t in (mean, scale)]
            grouped = data.reshape(len(data), groups, data.shape[1] // groups, -1)
            gradient = gradient * ((grouped - spread[0]) * spread[1]).reshape(gradient.shape)
        return Dense(lane.by_record(gradient.sum(2), records).sum(1))

    return finish


def broadcast(place: Place, records: int, notes: dict[Any, Any]) -> Finish:
    """Entry-by-entry operators: a bias, a scale, a position, a gate."""
    node, index = place.node, place.index
    lane, shape = lane_of(place), shape_out(place.node, place.index)
    scale = _linear_factor(node, index)

    def finish(arrived: Arrived) -> Piece:
        gradient = the_first(arrived)
        if scale is None:
            found = node(gradient)
            each = found[index] if isinstance(found, tuple) else found
            if each.shape != gradient.shape:
                return one_by_one(place, records, notes)(arrived)
        else:
            each = gradient * scale if scale != 1 else gradient
        return Dense(folded(each, lane, shape, records))

    return finish


def _linear_factor(node: Any, index: int) -> float | None:
    """What the gradient is multiplied by, where that is a number."""
    name = operator(node)
    if name in ("Expand", "Clone"):
        return 1.0
    if name == "Add":
        return float(node._saved_alpha) if index == 1 else 1.0
    if name == "Addmm" and index == 0:
        return float(node._saved_beta)
    return None


def repeated(place: Place, records: int, notes: dict[Any, Any]) -> Finish:
    """Tiles along one axis, each within one record."""
    lane, shape = lane_of(place), shape_out(place.node, 0)

    def finish(arrived: Arrived) -> Piece:
        gradient = the_first(arrived)
        if gradient.ndim != 1:
            return one_by_one(place, records, notes)(arrived)
        tiles = lane.by_record(gradient, records).reshape(records, -1, shape[0])
        return Dense(tiles.sum(1))

    return finish


def one_by_one(place: Place, records: int, notes: dict[Any, Any]) -> Finish:
    """Any operator: its own backward, once per record, with every other record's part blanked. Slow and certain."""
    node, index, shape = place.node, place.index, shape_out(place.node, place.index)

    def finish(arrived: Arrived) -> Piece:
        rows = []
        for record in range(records):
            own = []
            for k, gradient in enumerate(arrived):
                lane = place.lanes[k]
                if gradient is None or lane is None:
                    given = next(g for g in arrived if g is not None)
                    own.append(given.new_zeros(shape_into(node, k)))
                    continue
                ids = torch.arange(gradient.shape[lane.axis], device=gradient.device) // lane.inner % records
                own.append(gradient.movedim(lane.axis, -1).where(ids == record, 0.0).movedim(-1, lane.axis))
            found = node(*own)
            gradient = found[index] if isinstance(found, tuple) else found
            rows.append(gradient.to_dense().sum_to_size(shape))
        return Dense(torch.stack(rows))

    return finish


FAMILIES: dict[str, Family] = {
    **dict.fromkeys(ELEMENTWISE, broadcast),
    **dict.fromkeys(["Mm", "Addmm"], matrix),
    "Linear": fused_linear,
    "Convolution": convolution,
    "Embedding": embedding,
    "NativeLayerNorm": layer_norm,
    "NativeGroupNorm": group_norm,
    "MkldnnRnnLayer": recurrent,
    "Repeat": repeated,
}

#: These read all they need beforehand; the others call the operator again, so the graph is kept for them.
_READ_BEFORE = {"Mm", "Linear", "Convolution", "Embedding", "NativeLayerNorm", "NativeGroupNorm", "MkldnnRnnLayer"}


def family(place: Place, records: int, notes: dict[Any, Any]) -> Finish:
    """How to get this place's Piece."""
    return FAMILIES.get(operator(place.node), one_by_one)(place, records, notes)


def needs_the_graph(place: Place) -> bool:
    if operator(place.node) == "Addmm":
        return False
    return operator(place.node) not in _READ_BEFORE and _linear_factor(place.node, place.index) is None
