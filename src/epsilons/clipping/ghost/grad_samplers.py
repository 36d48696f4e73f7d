"""Grad samplers: per-record weight gradients of each operator, from what the recorded graph saved.

Before the backward pass a sampler reads what it needs from the graph. Afterwards the function it returned turns the
gradients of the operator's outputs into a PerSampleGrad. To add one: a function with the signature `GradSampler`, and a
line in GRAD_SAMPLERS. Operators that are not listed are differentiated by torch's own backward, one record at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..engine import to_32_bits
from .conv import convolution
from .embeddings import embedding_grad
from .graph import ParameterUse
from .lstm import recurrent
from .operator_rules import ELEMENTWISE, BatchAxis, UnsupportedOp, grad_shape, input_shape, operator, signed
from .outer_products import OuterProductGrad, ProductSide
from .per_sample_grads import Cache, DenseGrad, OutputGrads, PerSampleGrad, PerSampleGradFn, first

#: (use, records, cache) -> function from output gradients to the weight's gradients
GradSampler = Callable[[ParameterUse, int, Cache], PerSampleGradFn]


def folded(gradient: Tensor, batch: BatchAxis, shape: tuple[int, ...], records: int) -> Tensor:
    """(records, *shape) of an entry-by-entry gradient: axes that broadcasting added are summed within each record."""
    missing = gradient.ndim - len(shape)
    rows = batch.by_record(gradient, records)  # (records, parts, *all axes but the batch axis)
    rows = rows[:, 0] if rows.shape[1] == 1 else rows.sum(1)
    kept = [axis for axis in range(gradient.ndim) if axis != batch.axis]
    summed_axes = [
        1 + i
        for i, axis in enumerate(kept)
        if axis < missing or (shape[axis - missing] == 1 and gradient.shape[axis] != 1)
    ]
    if summed_axes:
        rows = rows.sum(summed_axes, keepdim=True)
    return rows.reshape(records, *shape)


# -- samplers -----------------------------------------------------------------------------------------------


def matrix(use: ParameterUse, records: int, cache: Cache) -> PerSampleGradFn:
    """self @ mat2, plus a bias: linear layers."""
    node, batch = use.node, use.batch
    has_bias = operator(node) == "Addmm"
    if has_bias and use.index == 0:
        return broadcast(use, records, cache)
    scale = float(node._saved_alpha) if has_bias else 1.0
    is_left_data = batch.axis == 0
    data = (node._saved_mat1 if has_bias else node._saved_self) if is_left_data else node._saved_mat2

    def per_sample_grad(output_grads: OutputGrads) -> PerSampleGrad:
        gradient = first(output_grads)
        if scale != 1.0:
            gradient = gradient * scale
        if is_left_data:  # (rows, k) @ (k, p)
            left, right, axis = data, gradient, batch
        else:  # (n, k) @ (k, rows)
            left, right, axis = gradient.T, data.T, BatchAxis(0, batch.inner)
        return OuterProductGrad(ProductSide(axis.by_record(left, records)), ProductSide(axis.by_record(right, records)))

    return per_sample_grad


def vector(use: ParameterUse, records: int, cache: Cache) -> PerSampleGradFn:
    """matrix @ vector."""
    data, batch = use.node._saved_self, use.batch
    return lambda output_grads: DenseGrad(batch.by_record(data * first(output_grads)[:, None], records).sum(1))


def fused_linear(use: ParameterUse, records: int, cache: Cache) -> PerSampleGradFn:
    """Input, weight and bias in one operator."""
    batch = use.batch
    data = use.node._saved_input if use.index == 1 else None

    def per_sample_grad(output_grads: OutputGrads) -> PerSampleGrad:
        gradient = batch.by_record(first(output_grads), records).flatten(1, -2)
        if data is None:
            return DenseGrad(gradient.sum(1))
        return OuterProductGrad(ProductSide(gradient), ProductSide(batch.by_record(data, records).flatten(1, -2)))

    return per_sample_grad


def embedding(use: ParameterUse, records: int, cache: Cache) -> PerSampleGradFn:
    node, batch = use.node, use.batch
    index, padding = node._saved_indices, signed(node._saved_padding_idx)
    size = input_shape(node, 0)[0]

    def per_sample_grad(output_grads: OutputGrads) -> PerSampleGrad:
        rows = batch.by_record(first(output_grads), records).flatten(1, -2)
        return embedding_grad(batch.by_record(index, records).flatten(1), rows, size, padding)

    return per_sample_grad


def layer_norm(use: ParameterUse, records: int, cache: Cache) -> PerSampleGradFn:
    node, batch, shape = use.node, use.batch, input_shape(use.node, use.index)
    if use.index == 2:
        return lambda output_grads: DenseGrad(folded(first(output_grads), batch, shape, records))
    data, mean, scale = _saved_by_norm(node)

    def per_sample_grad(output_grads: OutputGrads) -> PerSampleGrad:
        by_entry = (data - mean).mul_(scale).mul_(first(output_grads))
        return DenseGrad(folded(by_entry, batch, shape, records))

    return per_sample_grad


def group_norm(use: ParameterUse, records: int, cache: Cache) -> PerSampleGradFn:
    node, batch = use.node, use.batch
    data, mean, scale = _saved_by_norm(node)
    is_weight, groups = use.index == 1, node._saved_group

    def per_sample_grad(output_grads: OutputGrads) -> PerSampleGrad:
        gradient = first(output_grads)
        gradient = gradient.reshape(*gradient.shape[:2], -1)  # (batch, features) has no third axis
        if not is_weight:
            return DenseGrad(batch.by_record(gradient.sum(2), records).sum(1))
        each = data.shape[1] // groups
        by_channel, scales = (t.view(len(data), groups).repeat_interleave(each, 1) for t in (mean, scale))
        by_entry = (data.reshape(gradient.shape) - by_channel[:, :, None]).mul_(gradient)
        return DenseGrad(batch.by_record(by_entry.sum(2).mul_(scales), records).sum(1))

    return per_sample_grad


def _saved_by_norm(node: Any) -> Sequence[Tensor]:
    """Input, mean and reciprocal deviation."""
    return [to_32_bits(t) for t in (node._saved_input, node._saved_result1, node._saved_result2)]


def broadcast(use: ParameterUse, records: int, cache: Cache) -> PerSampleGradFn:
    """Entry-by-entry operators: a bias, a scale, a position, a gate."""
    node, batch, shape = use.node, use.batch, input_shape(use.node, use.index)
    scale = _linear_factor(node, use.index)

    def per_sample_grad(output_grads: OutputGrads) -> PerSampleGrad:
        gradient = first(output_grads)
        if scale is None:
            assert output_grads[0] is not None
            by_entry = to_32_bits(_own_backward(use, output_grads[0]))
            if by_entry.shape != gradient.shape:
                return one_by_one(use, records, cache)(output_grads)
        else:
            by_entry = gradient * scale if scale != 1 else gradient
        return DenseGrad(folded(by_entry, batch, shape, records))

    return per_sample_grad


def _own_backward(use: ParameterUse, *output_grads: Tensor) -> Tensor:
    """This input's gradient by torch's own backward."""
    gradients = use.node(*output_grads)
    gradient: Tensor = gradients[use.index] if isinstance(gradients, tuple) else gradients
    return gradient


def _linear_factor(node: Any, index: int) -> float | None:
    """The number that the gradient is multiplied by, where it is a number."""
    name = operator(node)
    if name in ("Expand", "Clone"):
        return 1.0
    if name == "Add":
        return float(node._saved_alpha) if index == 1 else 1.0
    if name == "Addmm" and index == 0:
        return float(node._saved_beta)
    return None


def repeated(use: ParameterUse, records: int, cache: Cache) -> PerSampleGradFn:
    """Copies along one axis, each within one record."""
    batch, shape = use.batch, input_shape(use.node, 0)

    def per_sample_grad(output_grads: OutputGrads) -> PerSampleGrad:
        gradient = first(output_grads)
        if gradient.ndim != 1:
            return one_by_one(use, records, cache)(output_grads)
        return DenseGrad(batch.by_record(gradient, records).reshape(records, -1, shape[0]).sum(1))

    return per_sample_grad


def one_by_one(use: ParameterUse, records: int, cache: Cache) -> PerSampleGradFn:
    """Any operator: its own backward, once per record, with zeros for all other records. Slow.

    0·inf is NaN, so a value of another record may make this record's gradient NaN. `cache` has a note that it may.
    """
    shape = input_shape(use.node, use.index)
    cache[one_by_one] = True

    def of_record(record: int, output_grads: OutputGrads) -> Tensor:
        masked = []
        for k, (gradient, batch) in enumerate(zip(output_grads, use.axes, strict=True)):
            if gradient is None or batch is None:
                like = next(g for g in output_grads if g is not None)
                masked.append(like.new_zeros(grad_shape(use.node, k)))
                continue
            ids = torch.arange(gradient.shape[batch.axis], device=gradient.device) // batch.inner % records
            masked.append(gradient.movedim(batch.axis, -1).where(ids == record, 0.0).movedim(-1, batch.axis))
        return _own_backward(use, *masked).to_dense().sum_to_size(shape)

    return lambda output_grads: DenseGrad(torch.stack([of_record(i, output_grads) for i in range(records)]))


GRAD_SAMPLERS: dict[str, GradSampler] = {
    **dict.fromkeys(ELEMENTWISE.split(), broadcast),
    **dict.fromkeys(["Mm", "Addmm"], matrix),
    "Mv": vector,
    "Linear": fused_linear,
    "Convolution": convolution,
    "Embedding": embedding,
    "NativeLayerNorm": layer_norm,
    "NativeGroupNorm": group_norm,
    "MkldnnRnnLayer": recurrent,
    "Repeat": repeated,
}

#: These samplers read all they need beforehand. The others call the operator's backward again, so the graph is kept.
_READ_BEFORE = {
    *("Mm", "Addmm", "Mv", "Linear", "Convolution"),
    *("Embedding", "NativeLayerNorm", "NativeGroupNorm", "MkldnnRnnLayer"),
}


def grad_sampler(use: ParameterUse, records: int, cache: Cache) -> PerSampleGradFn:
    """The sampler for this use, with what it reads from the graph."""
    made = GRAD_SAMPLERS.get(operator(use.node), one_by_one)
    return (one_by_one if _is_complex(use) else made)(use, records, cache)


def _is_complex(use: ParameterUse) -> bool:
    """Products of complex numbers need conjugates, which torch's own backward takes."""
    return any(m.dtype.is_complex for m in getattr(use.node, "_input_metadata", ()))


def may_mix_what_is_not_finite(cache: Cache) -> bool:
    """Whether a gradient that is not finite may come from another record: some gradients are computed `one_by_one`."""
    return one_by_one in cache


def reads_no_weights(use: ParameterUse) -> bool:
    """Whether the sampler needs the graph before the backward pass only, and the values of no weights."""
    if needs_the_graph(use) or operator(use.node) == "MkldnnRnnLayer":
        return False
    with _NoOperators():  # type: ignore[no-untyped-call]
        try:
            kind: type = type(use.node)
            for name in _saved_by(kind):
                getattr(use.node, name)
        except UnsupportedOp:
            return False
    return True


class _NoOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:  # of a result that a node saved
            raise UnsupportedOp("what was saved is computed again, from weights")  # torch.utils.checkpoint
        return func(*args)


@cache
def _saved_by(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_")]


def needs_the_graph(use: ParameterUse) -> bool:
    is_read = operator(use.node) in _READ_BEFORE or _linear_factor(use.node, use.index) is not None
    return _is_complex(use) or not is_read
