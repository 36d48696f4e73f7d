"""Losses by name, one value per record, and the module that computes them from a model and a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import DataError, InputError, named
from . import validation
from .evaluation import Loss


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def _binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    flat = outputs.reshape(len(targets), -1)
    targets = targets.reshape(flat.shape).to(flat.dtype)
    return F.binary_cross_entropy_with_logits(flat, targets, reduction="none").mean(1)


def _mse(outputs: Tensor, targets: Tensor) -> Tensor:
    flat = outputs.reshape(len(targets), -1)
    return (flat - targets.reshape(flat.shape)).square().mean(1)


LOSSES: dict[str, Loss] = {
    "cross_entropy": _cross_entropy,
    "binary_cross_entropy": _binary_cross_entropy,
    "mse": _mse,
}

#: Losses whose targets are classes.
OF_CLASSES = ("cross_entropy", "binary_cross_entropy")


class Losses(nn.Module):
    """(model, (inputs, targets)) -> (batch,) losses; a module, so that a loss that is a module becomes its part."""

    class_weights: Tensor | None

    def __init__(self, compute: Loss, is_of_classes: bool = False, class_weights: Tensor | None = None) -> None:
        super().__init__()
        self.compute, self._is_of_classes = compute, is_of_classes
        self.register_buffer("class_weights", class_weights, persistent=False)

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = validation.check_pair(batch, "data")
        try:
            losses: Tensor = self.compute(model(inputs), targets)
            return losses if self.class_weights is None else losses * self._weights_of(targets, losses)
        except RuntimeError:
            validation.check_dtype(inputs, model)
            if self._is_of_classes and isinstance(targets, Tensor):
                validation.check_classes(targets[0])
                if targets.shape[1:] == (1,):
                    raise DataError(
                        'loss="cross_entropy" needs one class per record, got a column with rows of one value. Pass '
                        "targets[:, 0]."
                    ) from None
            raise

    def _weights_of(self, targets: Tensor, losses: Tensor) -> Tensor:
        """(batch,) the weight of each record's class. Raises DataError if a record has several classes."""
        assert self.class_weights is not None
        if targets.numel() != losses.numel():
            raise DataError(
                f"class_weights need one class per record, got targets of shape {tuple(targets.shape)}. Leave "
                "class_weights out, or weigh the losses in a function of your own."
            )
        return self.class_weights.to(losses.dtype)[targets.reshape(losses.shape).long()]


def checked_weights(class_weights: Sequence[float] | None, loss: Any) -> Tensor | None:
    """(classes,) the weights as a tensor. Raises InputError for weights that are not positive, and for other losses."""
    if class_weights is None:
        return None
    if loss not in OF_CLASSES:
        raise InputError(f"class_weights are for losses of classes, {' and '.join(OF_CLASSES)}; leave them out.")
    weights = torch.tensor([float(weight) for weight in class_weights])
    if len(weights) < 2 or not bool((torch.isfinite(weights) & (weights > 0)).all()):
        raise InputError("class_weights need one positive, finite number per class. Correct them, or leave them out.")
    return weights


def by_name(known: Mapping[str, Any], which: Any, what: str) -> Any:
    """A function as it is, or the one with this name. Raises InputError for an unknown name."""
    return which if callable(which) else named(known, which, what, more=", or pass a function")
