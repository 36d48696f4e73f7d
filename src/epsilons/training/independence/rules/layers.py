"""Layers and losses with rules of their own: batch norm, embeddings, losses of classes."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..states import FREE, Call, Rows, State
from .general import Rule, all_but_the_first, every_axis, lines, meet


def batch_norm(call: Call) -> State | list[State]:
    """Channels in axis 1 never meet, and instance norm puts the records there; the others do, while training."""
    x = call["input"]
    state, rest = call.state(x), [call.state(t) for t in call.tensors if t is not x]
    statistics = replace(state, axis=0) if isinstance(state, Rows) and state.axis == 1 else FREE
    if any(s not in (FREE, statistics) for s in rest):
        return call.unknown()
    is_frozen = call["training"] is False or call.name.endswith(("no_training", "no_update"))
    if isinstance(state, Rows) and state.axis != 1 and not is_frozen:
        return call.mixed()
    return [state, *(statistics for _ in call.results[1:])]


def bag(call: Call) -> State | list[State]:
    """Bags of equal size, one or more per record."""
    indices, offsets = call["indices"], call["offsets"]
    state = call.state(indices)
    if not isinstance(state, Rows) or any(call.state(t) != FREE for t in call.tensors if t is not indices):
        return call.unknown()
    size = len(indices) // max(len(offsets), 1)
    is_even = torch.equal(offsets, torch.arange(len(offsets), device=offsets.device) * size)
    if state.axis != 0 or not is_even or len(offsets) * size != len(indices) or state.inner % max(size, 1):
        return call.unknown()
    return [replace(state, inner=state.inner // size), *(call.unknown() for _ in call.results[1:])]


_of_classes = meet(all_but_the_first, Call.unknown, data="grad_output self target", others=Call.mixed)
_of_all = meet(every_axis, data="self target", others=Call.mixed)


def class_loss(call: Call) -> State | list[State]:
    """(n, classes, …) and (n, …). The total weight goes beyond a record."""
    if call["reduction"] != 0:
        return _of_all(call)
    return [_of_classes(call), *(call.mixed() for _ in call.results[1:])]


def class_loss_backward(call: Call) -> State:
    """The total weight counts for means only."""
    unused = () if call["reduction"] == 1 else ("total_weight",)
    return _of_classes(replace(call, arguments={k: v for k, v in call.arguments.items() if k not in unused}))


RULES: dict[str, Rule] = {
    **lines(
        batch_norm,
        """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional cudnn_batch_norm
        _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update""",
    ),
    "embedding": meet(lambda call, x: (), data="indices"),
    **lines(bag, "_embedding_bag _embedding_bag_forward_only"),
    **lines(class_loss, "nll_loss_forward nll_loss2d_forward multi_margin_loss multilabel_margin_loss_forward"),
    **lines(class_loss_backward, "nll_loss_backward nll_loss2d_backward"),
}
