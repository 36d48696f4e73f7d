"""Lanes: which record each entry of a tensor's gradient belongs to, and how operators hand that on.

Start at the losses, whose i-th entry belongs to record i, and walk the recorded graph backwards. An operator
that never mixes entries of different lanes hands the lane on to its inputs; where an input has no room for the
records (a weight, a bias, a position embedding), its gradient is a sum over them, and the lane *ends* there. These
rules are facts about operators, not guesses from shapes: an operator, or a use of one, without a rule proves nothing.

To teach an operator: a function (node, lanes of its outputs) -> lane per input, and a line in RULES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Unproven(Exception):
    """Nothing is known about this operator, or about this use of it."""


@dataclass(frozen=True)
class Lane:
    """Entry p of this axis belongs to record (p // inner) % records; every other axis stays within a record."""

    axis: int
    inner: int = 1

    def by_record(self, tensor: Tensor, records: int) -> Tensor:
        """(records, outer·inner, *other axes) of a tensor of this lane."""
        front = tensor.movedim(self.axis, 0) if self.axis else tensor
        outer = front.shape[0] // (records * self.inner)
        split = front.reshape(outer, records, self.inner, *front.shape[1:])
        if outer == 1:
            return split[0]
        return split.movedim(1, 0).reshape(records, outer * self.inner, *front.shape[1:])


@dataclass(frozen=True)
class End:
    """The lane ends here: this input's gradient is a sum over the records."""


END = End()
Handed = Lane | End | None  # None: no gradient is wanted there, or none of it arrives
Rule = Callable[[Any, "list[Lane | None]", int], "list[Handed]"]


#: (tensor, a test of its values) -> whether it holds. For a program that is recorded: in every chunk to come.
holds: ContextVar[Callable[[Tensor, Callable[[], Tensor]], bool]] = ContextVar(
    "holds", default=lambda on, test: bool(test())
)


def shape_into(node: Any, index: int) -> Shape:
    """Shape of the gradient that arrives at this node's index-th output."""
    metadata = getattr(node, "_input_metadata", None)
    if metadata is None:
        return tuple(node.variable.shape)
    return tuple(metadata[index].shape)


def shape_out(node: Any, index: int) -> Shape:
    """Shape of the gradient that this node hands to its index-th input."""
    after, number = node.next_functions[index]
    return shape_into(after, number)


def signed(value: int) -> int:
    """Saved dimensions are unsigned 64-bit: -1 comes as 2**64 - 1."""
    return value - 2**64 if value >= 2**63 else value


def dims_of(value: Any, ndim: int) -> tuple[int, ...]:
    """A saved dimension, or several, as axes from 0."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return tuple(signed(v) % max(ndim, 1) for v in values)


def wanted(node: Any) -> list[bool]:
    return [after is not None for after, _ in node.next_functions]


def only(lanes: Sequence[Lane | None]) -> Lane:
    """The lane of the one output that matters."""
    first = lanes[0]
    if first is None or any(lane is not None for lane in lanes[1:]):
        raise Unproven
    return first


# -- moving a lane through shapes ---------------------------------------------------------------------------


def reshaped(lane: Lane, before: Shape, after: Shape, records: int) -> Lane:
    """The same entries in the same order under another shape."""
    step = lane.inner * math.prod(before[lane.axis + 1 :])  # entries from one record to the next
    beyond = math.prod(after)
    if beyond != math.prod(before):
        raise Unproven
    for axis, size in enumerate(after):
        around, beyond = beyond, beyond // max(size, 1)
        # All the records side by side within this one axis, or not at all.
        if beyond <= step and step % beyond == 0 and step * records <= around and around % (step * records) == 0:
            return Lane(axis, step // beyond)
    raise Unproven


def narrowed(lane: Lane, before: Shape, after: Shape) -> Handed:
    """What broadcasting did, undone: axes that are missing or 1 are summed over."""
    axis = lane.axis - (len(before) - len(after))
    if axis < 0 or (after[axis] == 1 and before[lane.axis] != 1):
        return END
    if after[axis] != before[lane.axis]:
        raise Unproven
    return Lane(axis, lane.inner)


def widened(lane: Lane, dims: Sequence[int], keepdim: bool) -> Lane:
    """Axes that a reduction took away, put back."""
    axis = lane.axis
    if not keepdim:
        for dim in sorted(dims):
            axis += dim <= axis
    elif axis in dims:
        raise Unproven
    return Lane(axis, lane.inner)


# -- rules --------------------------------------------------------------------------------------------------


def elementwise(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """Entry by entry, with broadcasting."""
    lane, shape = only(lanes), shape_into(node, 0)
    return [narrowed(lane, shape, shape_out(node, i)) if want else None for i, want in enumerate(wanted(node))]


def loss_by_entry(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    if node._saved_reduction != 0:
        raise Unproven
    return elementwise(node, lanes, records)


def view(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    return [reshaped(only(lanes), shape_into(node, 0), shape_out(node, 0), records)]


def restrided(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """What adaptive pooling to one position does to channels_last pictures: (n, c, 1, 1) stays what it is."""
    lane, shape = only(lanes), shape_into(node, 0)
    before, _ = node.next_functions[0]
    is_pooled = operator(before) == "Mean" and before._saved_keepdim and all(size == 1 for size in shape[2:])
    if not is_pooled or lane.axis != 0 or shape != shape_out(node, 0) or node._saved_storage_offset not in (None, 0):
        raise Unproven
    if tuple(node._saved_stride[:2]) != (shape[1], 1):
        raise Unproven
    return [lane]


def transpose(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    lane, ndim = only(lanes), len(shape_into(node, 0))
    if hasattr(node, "_saved_dim0"):
        one, other = dims_of((node._saved_dim0, node._saved_dim1), ndim)
    else:
        one, other = 0, ndim - 1
    axis = {one: other, other: one}.get(lane.axis, lane.axis)
    return [Lane(axis, lane.inner)]


def permute(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    lane = only(lanes)
    dims = dims_of(node._saved_dims, len(shape_into(node, 0)))
    return [Lane(dims[lane.axis], lane.inner)]


def reduction(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """A sum, mean, maximum, norm … over some axes: what went into an entry belongs to it."""
    before = shape_out(node, 0)
    given = node._saved_dim
    dims = dims_of(given, len(before)) if given is not None and given != () else tuple(range(len(before)))
    return [widened(only(lanes), dims, node._saved_keepdim)]


def along(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """Mixes along one saved axis, e.g. softmax: not the records' own. Shapes may differ there only."""
    lane, shape = only(lanes), shape_into(node, 0)
    saved = getattr(node, "_saved_dim", None)
    dims = dims_of(node._saved_dims if saved is None else saved, len(shape))
    return [same_axis(lane, shape, shape_out(node, i), dims) if want else None for i, want in enumerate(wanted(node))]


def same_axis(lane: Lane, before: Shape, after: Shape, mixed: Sequence[int]) -> Lane:
    if lane.axis in mixed or len(before) != len(after) or before[lane.axis] != after[lane.axis]:
        raise Unproven
    return lane


def leading(mixed: int) -> Rule:
    """Mixes the last `mixed` axes in any way: pooling, padding, interpolation."""

    def rule(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
        lane, shape = only(lanes), shape_into(node, 0)
        last = tuple(range(len(shape) - mixed, len(shape)))
        return [same_axis(lane, shape, shape_out(node, 0), last)]

    return rule


def sliced(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    if shape_into(node, 0) == shape_out(node, 0) and node._saved_step == 1:
        return [only(lanes)]  # all of it
    return along(node, lanes, records)


def rolled(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    if len(node._saved_dims) == 0:
        raise Unproven  # rolled as one long row
    return along(node, lanes, records)


def padded(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    ndim = len(shape_into(node, 0))
    touched = [ndim - 1 - i for i in range(len(node._saved_pad) // 2)]
    return [same_axis(only(lanes), shape_into(node, 0), shape_out(node, 0), touched)]


def select(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    return [widened(only(lanes), dims_of(node._saved_dim, len(shape_out(node, 0))), keepdim=False)]


def parts(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """Split and chunk: several outputs along one axis."""
    before = shape_out(node, 0)
    (dim,) = dims_of(node._saved_dim, len(before))
    found = {same_axis(lane, shape_into(node, k), before, (dim,)) for k, lane in enumerate(lanes) if lane is not None}
    if len(found) != 1:
        raise Unproven
    return [found.pop()]


def unbind(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    dims = dims_of(node._saved_dim, len(shape_out(node, 0)))
    found = {widened(lane, dims, keepdim=False) for lane in lanes if lane is not None}
    if len(found) != 1:
        raise Unproven
    return [found.pop()]


def cat(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """Along another axis than the records'."""
    lane, shape = only(lanes), shape_into(node, 0)
    dims = dims_of(node._saved_dim, len(shape))
    return [same_axis(lane, shape, shape_out(node, i), dims) if want else None for i, want in enumerate(wanted(node))]


def stack(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    lane = only(lanes)
    (dim,) = dims_of(node._saved_dim, len(shape_into(node, 0)))
    if lane.axis == dim:
        raise Unproven
    return [Lane(lane.axis - (lane.axis > dim), lane.inner) if want else None for want in wanted(node)]


def repeat(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """A tensor laid side by side: along the records' axis, its gradient sums over them."""
    lane, before, after = only(lanes), shape_into(node, 0), shape_out(node, 0)
    axis = lane.axis - (len(before) - len(after))
    if axis < 0:
        return [END]
    if before[lane.axis] == after[axis]:
        return [Lane(axis, lane.inner)]
    if lane.inner % after[axis] == 0:
        return [END]
    raise Unproven


def index(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """x[arange(records), …]: every record picks from itself, in order."""
    lane, indices = only(lanes), node._saved_indices
    if lane != Lane(0) or indices[0] is None or shape_out(node, 0)[0] != records:
        raise Unproven
    first = indices[0]
    if first.dtype in (torch.bool, torch.uint8) or any(i is None for i in indices):
        raise Unproven
    shape = torch.broadcast_shapes(*(i.shape for i in indices))  # type: ignore[no-untyped-call]
    if shape[0] != records or not holds.get()(first, lambda: _is_in_order(first.expand(shape))):
        raise Unproven
    return [Lane(0)]


def _is_in_order(index: Tensor) -> Tensor:
    own = torch.arange(len(index), device=index.device).reshape(-1, *(1 for _ in index.shape[1:]))
    return (index == own).all()


def mm(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    lane = only(lanes)
    sides: list[Handed] = [lane, END] if lane.axis == 0 else [END, lane]
    return [side if want else None for side, want in zip(sides, wanted(node), strict=True)]


def addmm(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    lane = only(lanes)
    sides: list[Handed] = [lane, END] if lane.axis == 0 else [END, lane]
    bias = narrowed(lane, shape_into(node, 0), shape_out(node, 0)) if wanted(node)[0] else None
    return [bias, *(side if want else None for side, want in zip(sides, wanted(node)[1:], strict=True))]


def bmm(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    sides = _sides_of_bmm(only(lanes))
    return [side if want else None for side, want in zip(sides, wanted(node), strict=True)]


def baddbmm(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    lane = only(lanes)
    bias = narrowed(lane, shape_into(node, 0), shape_out(node, 0)) if wanted(node)[0] else None
    sides = zip(_sides_of_bmm(lane), wanted(node)[1:], strict=True)
    return [bias, *(side if want else None for side, want in sides)]


def _sides_of_bmm(lane: Lane) -> tuple[Handed, Handed]:
    """(batch, n, k) @ (batch, k, p): batches never meet, rows end the right side, columns the left."""
    if lane.axis == 0:
        return lane, lane
    return (lane, END) if lane.axis == 1 else (END, lane)


def batched(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """Input, weight, bias; records in the first axis only: convolutions."""
    lane = only(lanes)
    if lane.axis != 0 or shape_into(node, 0)[0] != shape_out_or(node, 0, shape_into(node, 0))[0]:
        raise Unproven
    return [(lane if i == 0 else END) if want else None for i, want in enumerate(wanted(node))]


def trilinear(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """As nn.Bilinear uses it: (rows, n), (out, n, m), (rows, m) -> (rows, out)."""
    expands = [tuple(getattr(node, f"_saved_expand{i}")) for i in (1, 2, 3)]
    if only(lanes).axis != 0 or expands != [(1, 3), (0,), (1, 2)]:
        raise Unproven
    handed: list[Handed] = [lanes[0], END, lanes[0]]
    return [lane if want else None for lane, want in zip(handed, wanted(node), strict=True)]


def shape_out_or(node: Any, index: int, otherwise: Shape) -> Shape:
    return shape_out(node, index) if wanted(node)[index] else otherwise


def linear(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """A fused linear layer: input, weight, bias."""
    lane = only(lanes)
    if lane.axis == len(shape_into(node, 0)) - 1:
        raise Unproven
    return [(lane if i == 0 else END) if want else None for i, want in enumerate(wanted(node))]


def layer_norm(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    lane = only(lanes)
    if lane.axis >= len(shape_into(node, 0)) - len(node._saved_normalized_shape):
        raise Unproven
    return [(lane if i == 0 else END) if want else None for i, want in enumerate(wanted(node))]


def group_norm(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    return batched(node, [lanes[0]], records)


def batch_norm(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """Channels in axis 1 never meet (instance norm puts the records there); the others do, while training."""
    lane = lanes[0]
    if lane is None or (lane.axis != 1 and node._saved_training):
        raise Unproven
    rest: Handed = Lane(0, lane.inner) if lane.axis == 1 else END
    return [(lane if i == 0 else rest) if want else None for i, want in enumerate(wanted(node))]


def attention(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """Query, key, value (batch, heads, time, features): batch and heads never meet."""
    lane, shape = lanes[0], shape_into(node, 0)
    if lane is None or lane.axis >= len(shape) - 2:
        raise Unproven
    handed: list[Handed] = []
    for i, want in enumerate(wanted(node)):
        handed.append(narrowed(lane, shape, shape_out(node, i)) if want else None)
    return handed


def nll(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    lane = only(lanes)
    if node._saved_reduction != 0:
        raise Unproven
    return [Lane(lane.axis + (lane.axis > 0), lane.inner)]


def embedding(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    if only(lanes).axis == len(shape_into(node, 0)) - 1 or node._saved_scale_grad_by_freq:
        raise Unproven
    return [END]


def bag(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    lane = lanes[0]
    if lane != Lane(0) or node._saved_scale_grad_by_freq or wanted(node)[1]:
        raise Unproven
    return [END, None]


def recurrent(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """One layer of oneDNN's LSTM: outputs (time, batch, hidden), (batch, hidden) twice."""
    axes = [1, 0, 0]
    if any(lane not in (None, Lane(axis)) for lane, axis in zip(lanes, axes, strict=False)):
        raise Unproven
    handed: list[Handed] = [Lane(1), *(END for _ in range(4)), Lane(0), Lane(0)]
    return [lane if want else None for lane, want in zip(handed, wanted(node), strict=True)]


#: Entry by entry, whatever broadcasting does.
ELEMENTWISE: tuple[str, ...] = tuple(
    name
    for line in (
        "Abs Acos Add Addcdiv Addcmul Alias Angle Asin Atan Celu Clamp Clamp0 Clamp1 ClampMax ClampMin Clone ",
        "Copysign Cos Cosh Div Elu Erf Erfc Exp Exp2 Expand Expm1 Gelu Hardshrink Hardsigmoid Hardswish ",
        "Hardtanh LeakyRelu Lerp Log Log10 Log1P Log2 LogSigmoid Logaddexp MaskedFill Maximum Minimum Mish ",
        "Mul NativeDropout Neg PreluKernel Pow Reciprocal Relu Rsqrt Rsub Sgn Sigmoid Sign Silu Sin Sinh ",
        "Softplus Softshrink Sqrt Sub Tan Tanh Threshold ToCopy Where Xlogy Zero ",
    )
    for name in line.split()
)
_LOSSES = "MseLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss SmoothL1Loss"
_VIEWS = "View UnsafeView ReshapeAlias Squeeze Unsqueeze"
_REDUCTIONS = "Sum Mean Amax Amin Max Min Logsumexp LinalgVectorNorm Norm Var Std Prod Median"
_ALONG = "Softmax LogSoftmax SafeSoftmax Cumsum Gather IndexSelect Flip Sort Topk Glu LogCumsumExp"
_LEADING = {
    1: "ReflectionPad1D ReplicationPad1D UpsampleNearest1D UpsampleLinear1D",
    2: """MaxPool2DWithIndices MkldnnMaxPool2D AvgPool2D AdaptiveAvgPool2D AdaptiveMaxPool2D ReflectionPad2D
        ReplicationPad2D UpsampleNearest2D UpsampleBilinear2D UpsampleBicubic2D Tril Triu""",
    3: "MaxPool3DWithIndices AvgPool3D AdaptiveAvgPool3D ReplicationPad3D UpsampleNearest3D UpsampleTrilinear3D",
}

#: By the operator's name without "Backward" and its number, e.g. AddmmBackward0.
RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(_LOSSES.split(), loss_by_entry),
    **dict.fromkeys(_VIEWS.split(), view),
    **dict.fromkeys(_REDUCTIONS.split(), reduction),
    **dict.fromkeys(_ALONG.split(), along),
    **{name: leading(mixed) for mixed, names in _LEADING.items() for name in names.split()},
    **dict.fromkeys(["T", "Transpose"], transpose),
    **dict.fromkeys(["Split", "SplitWithSizes", "UnsafeSplit"], parts),
    **dict.fromkeys(["NllLoss", "NllLoss2D"], nll),
    **dict.fromkeys(["CudnnConvolution", "Convolution"], batched),
    **dict.fromkeys(["NativeLayerNorm", "FusedRmsNorm"], layer_norm),
    **{
        f"ScaledDotProduct{kind}": attention
        for kind in ("FlashAttentionForCpu", "FlashAttention", "EfficientAttention", "CudnnAttention")
    },
    "Slice": sliced,
    "Roll": rolled,
    "AsStrided": restrided,
    "Permute": permute,
    "ConstantPadNd": padded,
    "Select": select,
    "Unbind": unbind,
    "Cat": cat,
    "Stack": stack,
    "Repeat": repeat,
    "Index": index,
    "Mm": mm,
    "Addmm": addmm,
    "Bmm": bmm,
    "Baddbmm": baddbmm,
    "Linear": linear,
    "Trilinear": trilinear,
    "NativeGroupNorm": group_norm,
    "NativeBatchNorm": batch_norm,
    "Embedding": embedding,
    "EmbeddingBag": bag,
    "MkldnnRnnLayer": recurrent,
}


def operator(node: Any) -> str:
    """The operator's name: "Addmm" for AddmmBackward0, "" for what is no operator of torch's own."""
    kind: type = type(node)
    return _name_of(kind)


@cache
def _name_of(kind: type) -> str:
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        return ""  # somebody's own Function, whatever it calls itself
    name, found, number = kind.__name__.partition("Backward")
    return name if found and number.isdigit() else ""


def handed_on(node: Any, lanes: list[Lane | None], records: int) -> list[Handed]:
    """The lane of every input. Raises Unproven."""
    rule, name = RULES.get(operator(node)), operator(node) or node.name()
    if rule is None:
        raise Unproven(f"{name} has no rule")
    try:
        return rule(node, lanes, records)
    except Unproven as e:
        raise Unproven(str(e) or f"{name}, in a use of it that is not proved") from e
    except (AttributeError, ArithmeticError, IndexError, ValueError, TypeError, RuntimeError) as e:
        raise Unproven(f"{name}, in a use of it that is not proved") from e
