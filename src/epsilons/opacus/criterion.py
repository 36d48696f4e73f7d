"""The criterion of grad_sample_mode="ghost": a loss per record, reduced over the records."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import InputError


class Criterion:
    """A criterion that returns the mean (or the sum) over the records, whatever the weights of their classes.

    criterion       a module of torch.nn with a `reduction`, or any function (outputs, targets) -> loss
    loss_reduction  "mean" or "sum"

    Opacus computes per-record losses in this mode, and so does this class. Call `backward` on what it returns.
    Raises InputError if the criterion has another reduction.

    >>> import torch
    >>> outputs, targets = torch.zeros(3, 2), torch.tensor([0, 1, 1])
    >>> weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    >>> round(Criterion(weighted)(outputs, targets).item(), 4)  # the mean of log(2) times 1, 2 and 2
    1.1552
    """

    def __init__(self, criterion: Callable[..., Tensor], loss_reduction: str = "mean") -> None:
        reduction = getattr(criterion, "reduction", loss_reduction)
        if reduction != loss_reduction:
            raise InputError(
                f"The criterion's reduction is {reduction!r} and loss_reduction={loss_reduction!r}. Make them the same."
            )
        self.criterion, self.loss_reduction = criterion, loss_reduction
        self._by_record = criterion
        if isinstance(criterion, nn.Module):
            single: Any = copy.copy(criterion)
            single.reduction = "none"
            self._by_record = single

    def __call__(self, *args: Any, shape: tuple[int, ...] | None = None, **kwargs: Any) -> Tensor:
        """The loss of a batch.

        shape  (batch, tokens, …) of the outputs before they were flattened to one row per token: the loss of a record
               is then the mean (or sum) of its tokens, without those of the criterion's ignore_index
        """
        losses: Tensor = self._by_record(*args, **kwargs)
        if shape is not None and losses.ndim and len(losses) == shape[0] * shape[1]:
            targets = kwargs.get("target", args[1] if len(args) > 1 else None)
            losses = self._of_sequences(losses.view(shape[0], shape[1]), targets)
        return losses.mean() if self.loss_reduction == "mean" else losses.sum()

    def _of_sequences(self, losses: Tensor, targets: Tensor | None) -> Tensor:
        """(batch, tokens) -> (batch,)."""
        ignored = getattr(self.criterion, "ignore_index", None)
        if self.loss_reduction == "sum" or ignored is None or targets is None:
            return losses.sum(1) if self.loss_reduction == "sum" else losses.mean(1)
        counted: Tensor = (targets.view(losses.shape) != ignored).sum(1).clamp(min=1)
        return losses.sum(1) / counted

    def __repr__(self) -> str:
        return f"Criterion({self.criterion!r}, {self.loss_reduction!r})"
