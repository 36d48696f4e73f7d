"""Rules by operator: how the batch axis of an operator's outputs determines that of its inputs.

The losses have one entry per record. From there the recorded graph is walked backwards. An operator that never mixes
entries of different records passes the batch axis on to its inputs. An input without room for the records (a weight, a
bias, a position embedding) has a gradient that is a sum over them: SUMMED. Rules are facts about operators, not guesses
from shapes. An operator without a rule, or a use that its rule does not cover, raises UnsupportedOp.

To add an operator: a function with the signature `Rule`, and a line in RULES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

# -- The batch axis of a tensor: which record each entry belongs to, and how that axis moves through shapes
#
# The rules in `shape_rules` and `layer_rules` use these values; `rules` lists the rules by operator.

Shape = tuple[int, ...]


class UnsupportedOp(Exception):
    """There is no rule for this operator, or for this use of it."""


@dataclass(frozen=True)
class BatchAxis:
    """Entry p of this axis belongs to record (p // inner) % records. All other axes stay within a record."""

    axis: int
    inner: int = 1

    def by_record(self, tensor: Tensor, records: int) -> Tensor:
        """(records, outer·inner, *other axes) of a tensor with this batch axis."""
        front = tensor.movedim(self.axis, 0) if self.axis else tensor
        outer = front.shape[0] // (records * self.inner)
        split = front.reshape(outer, records, self.inner, *front.shape[1:])
        if outer == 1:
            return split[0]
        return split.movedim(1, 0).reshape(records, outer * self.inner, *front.shape[1:])


@dataclass(frozen=True)
class Summed:
    """This input has no batch axis: its gradient is a sum over the records."""


SUMMED = Summed()
#: Of one input of an operator. None: no gradient is wanted there, or none reaches it.
InputAxis = BatchAxis | Summed | None
OutputAxes = list[BatchAxis | None]
#: (node, batch axes of its outputs, records) -> one entry per input.
Rule = Callable[[Any, OutputAxes, int], Sequence[InputAxis]]


# -- nodes of the recorded graph ----------------------------------------------------------------------------


def operator(node: Any) -> str:
    """The operator's name, such as "Addmm" for AddmmBackward0; "" for nodes that are not torch's operators."""
    kind: type = type(node)
    return _name_of(kind)


@cache
def _name_of(kind: type) -> str:
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        return FULLY_SHARD if _is_of_fully_shard(kind) else ""  # a user's autograd.Function may have any name
    name, separator, number = kind.__name__.partition("Backward")
    return name if separator and number.isdigit() else ""


#: The node that torch's `fully_shard` puts before a module, to free its weights after the backward pass.
FULLY_SHARD = "FullyShard"


def _is_of_fully_shard(kind: type) -> bool:
    if kind.__name__ != "RegisterPostBackwardFunctionBackward":
        return False
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction

    return kind is RegisterPostBackwardFunction._backward_cls


def grad_shape(node: Any, index: int) -> Shape:
    """Shape of the gradient of this node's index-th output."""
    metadata = getattr(node, "_input_metadata", None)
    if metadata is None:
        return tuple(node.variable.shape)
    return tuple(metadata[index].shape)


def input_shape(node: Any, index: int) -> Shape:
    """Shape of this node's index-th input."""
    source, number = node.next_functions[index]
    return grad_shape(source, number)


def wanted(node: Any) -> list[bool]:
    """For each input, whether its gradient is computed."""
    return [source is not None for source, _ in node.next_functions]


def signed(value: int) -> int:
    """Saved dimensions are unsigned 64-bit numbers: -1 is saved as 2**64 - 1."""
    return value - 2**64 if value >= 2**63 else value


def dims_of(value: Any, ndim: int) -> tuple[int, ...]:
    """One saved dimension or several, as axes from 0."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return tuple(signed(v) % max(ndim, 1) for v in values)


def only(axes: Sequence[BatchAxis | None]) -> BatchAxis:
    """The batch axis of the first output, the only one that may have one."""
    first = axes[0]
    if first is None or any(axis is not None for axis in axes[1:]):
        raise UnsupportedOp
    return first


# -- moving the batch axis through shapes -------------------------------------------------------------------


def reshaped(batch: BatchAxis, before: Shape, after: Shape, records: int) -> BatchAxis:
    """The same entries in the same order, in another shape."""
    step = batch.inner * math.prod(before[batch.axis + 1 :])  # entries from one record to the next
    beyond = math.prod(after)
    if beyond != math.prod(before):
        raise UnsupportedOp
    for axis, size in enumerate(after):
        around, beyond = beyond, beyond // max(size, 1)
        # All records must lie side by side within this one axis.
        if beyond <= step and step % beyond == 0 and step * records <= around and around % (step * records) == 0:
            return BatchAxis(axis, step // beyond)
    raise UnsupportedOp


def narrowed(batch: BatchAxis, before: Shape, after: Shape) -> BatchAxis | Summed:
    """Undo broadcasting: axes that are missing or 1 are summed over."""
    axis = batch.axis - (len(before) - len(after))
    if axis < 0 or (after[axis] == 1 and before[batch.axis] != 1):
        return SUMMED
    if after[axis] != before[batch.axis]:
        raise UnsupportedOp
    return BatchAxis(axis, batch.inner)


def broadcast_input(node: Any, batch: BatchAxis, index: int) -> InputAxis:
    """Of an input that broadcasts to the output's shape."""
    return narrowed(batch, grad_shape(node, 0), input_shape(node, index)) if wanted(node)[index] else None


def widened(batch: BatchAxis, dims: Sequence[int], keepdim: bool) -> BatchAxis:
    """Put back the axes that a reduction removed."""
    axis = batch.axis
    if not keepdim:
        for dim in sorted(dims):
            axis += dim <= axis
    elif axis in dims:
        raise UnsupportedOp
    return BatchAxis(axis, batch.inner)


def same_axis(batch: BatchAxis, before: Shape, after: Shape, mixed: Sequence[int]) -> BatchAxis:
    """The axis where it was, for an operator that mixes entries along the axes `mixed` only."""
    if batch.axis in mixed or len(before) != len(after) or before[batch.axis] != after[batch.axis]:
        raise UnsupportedOp
    return batch


# -- Rules for operators with weights: products, convolutions, lookups, norms, attention, recurrent layers
#
# Inputs that want no gradient may get any entry: `propagate` removes it.
#
# Each rule has the signature `batch_axis.Rule`. Inputs that want no gradient may get any entry: `rules.propagate`
# removes it.

# -- products -----------------------------------------------------------------------------------------------


def product(spec: str, is_added: bool = False) -> Rule:
    """A product of two factors, as `torch.einsum` writes it: a factor without the records' index has a summed gradient.

    is_added  whether another input comes first, to which the product is added
    """
    factors, result = spec.split("->")

    def rule(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
        batch = only(axes)
        index = result[batch.axis]
        added = [broadcast_input(node, batch, 0)] if is_added else []
        return added + [batch if index in factor else SUMMED for factor in factors.split(",")]

    return rule


def linear(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """A fused linear layer: input, weight, bias."""
    batch = only(axes)
    if batch.axis == len(grad_shape(node, 0)) - 1:
        raise UnsupportedOp
    return _weighted(node, batch)


def trilinear(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """As nn.Bilinear uses it: (rows, n), (out, n, m), (rows, m) -> (rows, out)."""
    batch = only(axes)
    expands = [tuple(getattr(node, f"_saved_expand{i}")) for i in (1, 2, 3)]
    if batch.axis != 0 or expands != [(1, 3), (0,), (1, 2)]:
        raise UnsupportedOp
    return [batch, SUMMED, batch]


# -- convolutions, norms ------------------------------------------------------------------------------------


def convolution(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Input, weight, bias; records in the first axis only."""
    batch, shape = only(axes), grad_shape(node, 0)
    if batch.axis != 0 or (wanted(node)[0] and shape[0] != input_shape(node, 0)[0]):
        raise UnsupportedOp
    return _weighted(node, batch)


def group_norm(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    return convolution(node, [axes[0]], records)


def layer_norm(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    batch = only(axes)
    if batch.axis >= len(grad_shape(node, 0)) - len(node._saved_normalized_shape):
        raise UnsupportedOp
    return _weighted(node, batch)


def batch_norm(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Channels in axis 1 are never mixed, and instance norm has the records there. Training mode mixes the others."""
    batch = axes[0]
    if batch is None or (batch.axis != 1 and node._saved_training):
        raise UnsupportedOp
    return _weighted(node, batch, BatchAxis(0, batch.inner) if batch.axis == 1 else SUMMED)


def _weighted(node: Any, batch: BatchAxis, weights: InputAxis = SUMMED) -> list[InputAxis]:
    return [batch, *(weights for _ in node.next_functions[1:])]


# -- lookups, losses, sequences -----------------------------------------------------------------------------


def nll(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    batch = only(axes)
    if node._saved_reduction != 0:
        raise UnsupportedOp
    return [BatchAxis(batch.axis + (batch.axis > 0), batch.inner)]


def embedding(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    if only(axes).axis == len(grad_shape(node, 0)) - 1 or node._saved_scale_grad_by_freq:
        raise UnsupportedOp
    return [SUMMED]


def bag(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    if axes[0] != BatchAxis(0) or node._saved_scale_grad_by_freq or wanted(node)[1]:
        raise UnsupportedOp
    return [SUMMED, None]


def attention(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Query, key, value (batch, heads, time, features): batch and heads are never mixed."""
    batch, shape = axes[0], grad_shape(node, 0)
    if batch is None or batch.axis >= len(shape) - 2:
        raise UnsupportedOp
    return [narrowed(batch, shape, input_shape(node, i)) if want else None for i, want in enumerate(wanted(node))]


def recurrent(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """One layer of oneDNN's LSTM: outputs (time, batch, hidden), (batch, hidden), (batch, hidden)."""
    if any(batch not in (None, BatchAxis(axis)) for batch, axis in zip(axes, (1, 0, 0), strict=False)):
        raise UnsupportedOp
    return [BatchAxis(1), *(SUMMED for _ in range(4)), BatchAxis(0), BatchAxis(0)]


# -- Rules for operators without weights: entry by entry, views, reductions, and parts of tensors
#
# Each rule has the signature `batch_axis.Rule`. Inputs that want no gradient may get any entry: `rules.propagate`
# removes it.


def elementwise(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Entry by entry, with broadcasting."""
    batch = only(axes)
    return [broadcast_input(node, batch, i) for i in range(len(node.next_functions))]


def loss_by_entry(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    if node._saved_reduction != 0:
        raise UnsupportedOp
    return elementwise(node, axes, records)


# -- views --------------------------------------------------------------------------------------------------


def view(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    return [reshaped(only(axes), grad_shape(node, 0), input_shape(node, 0), records)]


def restrided(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Adaptive pooling of channels_last images to one position ends with it: (n, c, 1, 1) stays the same."""
    batch, shape = only(axes), grad_shape(node, 0)
    source, _ = node.next_functions[0]
    is_pooled = operator(source) == "Mean" and source._saved_keepdim and all(size == 1 for size in shape[2:])
    if not is_pooled or batch.axis != 0 or shape != input_shape(node, 0) or node._saved_storage_offset not in (None, 0):
        raise UnsupportedOp
    if tuple(node._saved_stride[:2]) != (shape[1], 1):
        raise UnsupportedOp
    return [batch]


def transpose(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    batch, ndim = only(axes), len(grad_shape(node, 0))
    if hasattr(node, "_saved_dim0"):
        one, other = dims_of((node._saved_dim0, node._saved_dim1), ndim)
    else:
        one, other = 0, ndim - 1
    return [BatchAxis({one: other, other: one}.get(batch.axis, batch.axis), batch.inner)]


def permute(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    batch = only(axes)
    dims = dims_of(node._saved_dims, len(grad_shape(node, 0)))
    return [BatchAxis(dims[batch.axis], batch.inner)]


# -- along one axis -----------------------------------------------------------------------------------------


def reduction(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """A sum, mean, maximum, norm … over some axes: the entries it reduces belong to the record of the result."""
    before = input_shape(node, 0)
    saved = node._saved_dim
    dims = dims_of(saved, len(before)) if saved is not None and saved != () else tuple(range(len(before)))
    return [widened(only(axes), dims, node._saved_keepdim)]


def along(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Mixes along one saved axis (softmax, cat …), which must not be the batch axis. Shapes may differ there only."""
    batch, shape = only(axes), grad_shape(node, 0)
    saved = getattr(node, "_saved_dim", None)
    dims = dims_of(node._saved_dims if saved is None else saved, len(shape))
    return [
        same_axis(batch, shape, input_shape(node, i), dims) if want else None for i, want in enumerate(wanted(node))
    ]


def leading(mixed: int) -> Rule:
    """Mixes the last `mixed` axes in any way: pooling, padding, interpolation."""

    def rule(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
        batch, shape = only(axes), grad_shape(node, 0)
        last = tuple(range(len(shape) - mixed, len(shape)))
        return [same_axis(batch, shape, input_shape(node, 0), last)]

    return rule


def last_axis(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """One axis more at the end, or one less: windows along one axis; complex numbers as pairs."""
    batch, shape, before = only(axes), grad_shape(node, 0), input_shape(node, 0)
    ndim = min(len(shape), len(before))
    mixed = dims_of(node._saved_dimension, ndim) if operator(node) == "Unfold" else ()
    return [same_axis(batch, shape[:ndim], before[:ndim], mixed)]


def first_axis(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """The first axis of all inputs and outputs holds the records, and everything else is mixed."""
    batch, size = only(axes), grad_shape(node, 0)[0]
    if batch.axis != 0 or any(want and input_shape(node, i)[0] != size for i, want in enumerate(wanted(node))):
        raise UnsupportedOp
    return [batch for _ in node.next_functions]


def sliced(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    if grad_shape(node, 0) == input_shape(node, 0) and node._saved_step == 1:
        return [only(axes)]  # nothing is cut off
    return along(node, axes, records)


def rolled(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    if len(node._saved_dims) == 0:
        raise UnsupportedOp  # rolls the flattened tensor
    return along(node, axes, records)


def padded(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    ndim = len(grad_shape(node, 0))
    changed = [ndim - 1 - i for i in range(len(node._saved_pad) // 2)]
    return [same_axis(only(axes), grad_shape(node, 0), input_shape(node, 0), changed)]


# -- parts --------------------------------------------------------------------------------------------------


def select(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    return [widened(only(axes), dims_of(node._saved_dim, len(input_shape(node, 0))), keepdim=False)]


def split(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Several outputs side by side along one axis."""
    before = input_shape(node, 0)
    dims = dims_of(node._saved_dim, len(before))
    return [
        _common({same_axis(axis, grad_shape(node, k), before, dims) for k, axis in enumerate(axes) if axis is not None})
    ]


def unbind(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    dims = dims_of(node._saved_dim, len(input_shape(node, 0)))
    return [_common({widened(axis, dims, keepdim=False) for axis in axes if axis is not None})]


def _common(candidates: set[BatchAxis]) -> BatchAxis:
    if len(candidates) != 1:
        raise UnsupportedOp
    return candidates.pop()


def stack(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    batch = only(axes)
    (dim,) = dims_of(node._saved_dim, len(grad_shape(node, 0)))
    if batch.axis == dim:
        raise UnsupportedOp
    return [BatchAxis(batch.axis - (batch.axis > dim), batch.inner) for _ in node.next_functions]


def repeat(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Copies side by side. Along the batch axis, the gradient sums over the records."""
    batch, before, after = only(axes), grad_shape(node, 0), input_shape(node, 0)
    axis = batch.axis - (len(before) - len(after))
    if axis < 0:
        return [SUMMED]
    if before[batch.axis] == after[axis]:
        return [BatchAxis(axis, batch.inner)]
    if batch.inner % after[axis] == 0:
        return [SUMMED]
    raise UnsupportedOp


def index(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """x[arange(records), …]: record i picks from row i. x[:, places]: the same places of each record."""
    indices = node._saved_indices
    given = [axis for axis, i in enumerate(indices) if i is not None]
    is_one_block = given == list(range(given[0], given[-1] + 1))  # otherwise the picked axes come first
    if is_one_block and only(axes).axis < given[0]:
        return [only(axes)]
    if only(axes) != BatchAxis(0) or indices[0] is None or input_shape(node, 0)[0] != records:
        raise UnsupportedOp
    first = indices[0]
    if first.dtype in (torch.bool, torch.uint8) or any(i is None for i in indices):
        raise UnsupportedOp
    shape = torch.broadcast_shapes(*(i.shape for i in indices))  # type: ignore[no-untyped-call]
    if shape[0] != records or not _is_in_order(first.expand(shape)):
        raise UnsupportedOp
    return [BatchAxis(0)]


def unchanged(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Each output is the input of the same number."""
    return list(axes)


def _is_in_order(index: Tensor) -> bool:
    in_order = torch.arange(len(index), device=index.device).reshape(-1, *(1 for _ in index.shape[1:]))
    return bool((index == in_order).all())


# -- Rules by operator: how the batch axis of an operator's outputs determines that of its inputs

#: Entry by entry, with or without broadcasting.
ELEMENTWISE = """
    Abs Acos Acosh Add Addcdiv Addcmul Alias Angle Asin Asinh Atan Atan2 Atanh Ceil Celu Clamp Clamp0 Clamp1
    ClampMax ClampMin Clone Conj Copysign Cos Cosh Digamma Div Elu Erf Erfc Erfinv Exp Exp2 Expand Expm1 Floor
    Fmax Fmin Fmod Frac Gelu Hardshrink Hardsigmoid Hardswish Hardtanh Hypot LeakyRelu Lerp Lgamma Log Log10
    Log1P Log2 LogSigmoid Logaddexp Logaddexp2 Logit MaskedFill Maximum Minimum Mish Mul NanToNum NativeDropout
    Neg PreluKernel Pow Reciprocal Relu Remainder Round RreluWithNoise Rsqrt Rsub Sgn Sigmoid Sign Silu Sin Sinc
    Sinh Softplus Softshrink Sqrt Sub Tan Tanh Threshold ToCopy Trunc Where Xlogy Zero
"""

_RULES: dict[Rule, str] = {
    elementwise: ELEMENTWISE,
    loss_by_entry: """
        MseLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss SmoothL1Loss SoftMarginLoss
    """,
    view: "View UnsafeView ReshapeAlias Squeeze Unsqueeze",
    restrided: "AsStrided",
    transpose: "T Transpose",
    permute: "Permute",
    reduction: "Sum Mean Amax Amin Max Min Logsumexp LinalgVectorNorm Norm Var Std Prod Median Nansum",
    along: """
        Softmax LogSoftmax SafeSoftmax Cumsum Logcumsumexp Cumprod Cummax Cummin Gather IndexSelect Flip Sort Topk Glu
        Cat Scatter ScatterAdd ScatterReduce IndexAdd IndexCopy IndexFill FftR2C FftC2C FftC2R
    """,
    last_axis: "Unfold ViewAsReal ViewAsComplex",
    first_axis: "Im2Col Col2Im ChannelShuffle GridSampler2D GridSampler3D AffineGridGenerator",
    leading(1): "ReflectionPad1D ReplicationPad1D UpsampleNearest1D UpsampleNearestExact1D UpsampleLinear1D",
    leading(2): """
        MaxPool2DWithIndices MkldnnMaxPool2D AvgPool2D AdaptiveAvgPool2D AdaptiveMaxPool2D FractionalMaxPool2D
        ReflectionPad2D ReplicationPad2D UpsampleNearest2D UpsampleNearestExact2D UpsampleBilinear2D
        UpsampleBilinear2DAa UpsampleBicubic2D UpsampleBicubic2DAa MaxUnpool2D Tril Triu
    """,
    leading(3): """
        MaxPool3DWithIndices AvgPool3D AdaptiveAvgPool3D AdaptiveMaxPool3D FractionalMaxPool3D ReflectionPad3D
        ReplicationPad3D UpsampleNearest3D UpsampleNearestExact3D UpsampleTrilinear3D MaxUnpool3D PixelShuffle
        PixelUnshuffle
    """,
    sliced: "Slice",
    rolled: "Roll",
    padded: "ConstantPadNd",
    select: "Select",
    split: "Split SplitWithSizes UnsafeSplit",
    unbind: "Unbind",
    stack: "Stack",
    repeat: "Repeat",
    index: "Index",
    product("nk,kp->np"): "Mm",
    product("nk,k->n"): "Mv",
    product("nk,kp->np", is_added=True): "Addmm",
    product("bnk,bkp->bnp"): "Bmm",
    product("bnk,bkp->bnp", is_added=True): "Baddbmm",
    linear: "Linear",
    trilinear: "Trilinear",
    convolution: "CudnnConvolution Convolution",
    group_norm: "NativeGroupNorm",
    layer_norm: "NativeLayerNorm FusedRmsNorm",
    batch_norm: "NativeBatchNorm",
    nll: "NllLoss NllLoss2D MultiMarginLoss MultilabelMarginLoss",
    embedding: "Embedding",
    bag: "EmbeddingBag",
    attention: """
        ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention ScaledDotProductEfficientAttention
        ScaledDotProductCudnnAttention
    """,
    recurrent: "MkldnnRnnLayer",
    unchanged: FULLY_SHARD,
}

#: By the operator's name without "Backward" and its number: "Addmm" for AddmmBackward0.
RULES: dict[str, Rule] = {name: rule for rule, names in _RULES.items() for name in names.split()}


def propagate(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """One entry per input of this node, from the batch axes of its outputs. Raises UnsupportedOp."""
    rule, name = RULES.get(operator(node)), operator(node) or node.name()
    if rule is None:
        raise UnsupportedOp(f"{name} has no rule")
    try:
        inputs = rule(node, axes, records)
        return [axis if want else None for axis, want in zip(inputs, wanted(node), strict=True)]
    except UnsupportedOp as e:
        raise UnsupportedOp(str(e) or f"{name} is used in a way that its rule does not cover") from e
    except (AttributeError, ArithmeticError, IndexError, ValueError, TypeError, RuntimeError) as e:
        raise UnsupportedOp(f"{name} is used in a way that its rule does not cover") from e
