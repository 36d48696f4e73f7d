"""What a foreign loop does with the outputs of its model: means that must not mix records, and calls of backward.

A mean over the records of a batch divides by their number, which is no record's. torch's losses divide by other sums in
two cases: the weights of the classes that occur, and the number of targets that are not ignored. Both depend on all
records, so both are refused, in every batch. Everything else is left to the batch-independence check, which follows the
loss and its gradient operator by operator. For it, torch's losses are computed record by record, and averaged after.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp import grad_scaler
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import BatchDependenceError, ModelError
from ..independence import watch

#: torch's losses that average over all values if reduction="mean".
_AVERAGED: set[Callable[..., Tensor]] = {
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.poisson_nll_loss,
    F.gaussian_nll_loss,
    F.hinge_embedding_loss,
    F.margin_ranking_loss,
    F.soft_margin_loss,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss,
    F.cosine_embedding_loss,
    F.triplet_margin_loss,
}
#: Those of them whose mean divides by other sums.
_OF_CLASSES = {F.cross_entropy, F.nll_loss}

_SIGNATURES = {loss: inspect.signature(loss) for loss in _AVERAGED}

Backward = Callable[..., Any]


class LossMode(TorchFunctionMode):
    """Sees a loop compute its loss, from the first output of the model to the end of the batch.

    code       the caller's code that the batch was handed to; once it is left, nothing is changed
    is_inside  whether a call of the model is running, in which nothing is changed
    backward   takes the place of Tensor.backward, and gets torch's own as its first argument
    grad       the same for torch.autograd.grad
    """

    def __init__(
        self, code: FrameType | None, is_inside: Callable[[], bool], backward: Backward, grad: Backward
    ) -> None:
        super().__init__()
        self._code, self._is_inside, self._backward, self._grad = code, is_inside, backward, grad

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_running:
            return func(*args, **kwargs)
        if sys._getframe(1).f_globals is grad_scaler.__dict__:
            raise ModelError(
                "The loss is scaled by a GradScaler, which is for 16-bit gradients of a whole batch. Here each one "
                "is clipped by itself, and sums have 64 bits. Leave the scaler out; with autocast use torch.bfloat16."
            )
        if func in _AVERAGED:
            return averaged(func, args, kwargs)
        if func is Tensor.backward:
            return self._backward(func, *args, **kwargs)
        if func is torch.autograd.grad:
            return self._grad(func, *args, **kwargs)
        return func(*args, **kwargs)

    @property
    def _is_running(self) -> bool:
        return not self._is_inside() and (self._code is None or watch.is_run_by(self._code))


def averaged(loss: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """One of torch's losses; a mean is computed from the losses of all values.

    Raises BatchDependenceError for a mean that divides by a sum over records.
    """
    bound = _SIGNATURES[loss].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    reduction = given["reduction"]
    is_old = given.get("size_average") is not None or given.get("reduce") is not None
    if is_old or reduction not in ("mean", "batchmean"):
        return loss(*args, **kwargs)
    if loss in _OF_CLASSES:
        _check_mean(given)
    given["reduction"] = "none"
    values = loss(*bound.args, **bound.kwargs)
    return values.sum() / len(values) if reduction == "batchmean" else values.mean()


def _check_mean(given: Mapping[str, Any]) -> None:
    target = given["target"]
    if target.is_floating_point():
        return  # probabilities of classes: the mean divides by the number of records
    if given["weight"] is not None:
        raise BatchDependenceError(
            "The loss is a mean with a weight for each class. It divides by the weights of all classes in the batch, "
            "so each record's share depends on the classes of others. Weight the records' own losses: "
            '(weight[y] * F.cross_entropy(model(x), y, reduction="none")).mean().'
        )
    with torch._C.DisableTorchFunction():
        is_ignored = bool((target == given["ignore_index"]).any())
    if is_ignored:
        raise BatchDependenceError(
            "The loss is a mean over all targets but the ignored ones (ignore_index) of the batch. It divides by the "
            "number of targets that all records have together, so each record's share depends on others. Average over "
            "each record's own targets first, and then over the records."
        )
