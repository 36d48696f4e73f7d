"""One step of the Trainer is one draw: the part before `optimizer.step()`, the update in it, and nothing else.

A draw has several physical batches, after those that are only checked, or none. All of them are computed within
`training_step`. The update waits for `optimizer.step()`, so that callbacks, schedules, logs and saves see what they see
in any training. The update of an empty draw is made within `training_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import CallOrderError, InputError
from ..training import Private
from ..training.wrapped_optimizer import WrappedOptimizer


class Steps:
    """The draws of a run, one for each step of the Trainer.

    private   the run
    schedule  of learning rates
    losses    batch -> (batch,) losses, one per record
    """

    def __init__(self, private: Private, schedule: Any, losses: Callable[[Any], Tensor]) -> None:
        self.private, self.schedule, self._losses = private, schedule, losses
        self._draws: Iterator[Iterator[Any]] | None = None
        self._draw: Iterator[Any] = iter(())
        self._is_open, self._is_due = False, False

    def begin(self, is_counted: bool) -> float:
        """Compute a draw, up to its update. Returns the mean loss of its records if it is counted, otherwise 0."""
        if self._is_open:
            raise CallOrderError("The Trainer began a step before optimizer.step() of the last one.")
        if self._draws is None:
            self._draws = self.private.draws
        self._draw, self._is_open = next(self._draws), True
        return self._compute(is_counted)

    def _compute(self, is_counted: bool) -> float:
        total, records = 0.0, 0
        for batch in self._draw:
            losses = self._losses(batch)
            self.private.backward(losses)
            if is_counted and not self.private.is_check:
                total, records = total + float(losses.detach().sum()), records + len(losses)
            if self._completes_draw:
                self._is_due = True
                break
            self.private.step()
        return total / max(records, 1)

    @property
    def _completes_draw(self) -> bool:
        return self.private.is_last and self.private._issuer.non_finite is None

    def end(self) -> None:
        """Add noise, and update. For `optimizer.step()`."""
        if not self._is_open:
            raise CallOrderError(
                "optimizer.step() was called without a training step of PrivateTrainer before. Override record_losses, "
                "and not training_step."
            )
        while self._is_due:
            self._is_due = False
            self.private.step()
            # Under a new key, the draw is made again. Otherwise nothing is left of it.
            self._compute(is_counted=False)
        self._is_open = False


class StepOptimizer(WrappedOptimizer):
    """What the Trainer takes for its optimizer: `step` adds noise and updates."""

    #: accelerate puts no optimizer of its own around this one: it would search for a package twice in every step.
    _is_accelerate_prepared = True
    #: As accelerate's has it.
    step_was_skipped = False

    def __init__(self, optimizer: Optimizer, steps: Steps) -> None:
        super().__init__(optimizer)
        self._steps = steps

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise InputError("optimizer.step takes no closure here: the losses are computed in the training step.")
        self._steps.end()


def zero(device: torch.device, value: float = 0.0) -> Tensor:
    """A loss for the Trainer to sum."""
    return torch.tensor(value, device=device)
