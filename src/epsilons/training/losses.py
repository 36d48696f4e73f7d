"""Losses by name, one value per record, and the module that computes them from a model and a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import DataError, named
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

    def __init__(self, compute: Loss, is_of_classes: bool = False) -> None:
        super().__init__()
        self.compute, self._is_of_classes = compute, is_of_classes

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = validation.check_pair(batch, "data")
        try:
            return self.compute(model(inputs), targets)
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


def by_name(known: Mapping[str, Any], which: Any, what: str) -> Any:
    """A function as it is, or the one with this name. Raises InputError for an unknown name."""
    return which if callable(which) else named(known, which, what, more=", or pass a function")
