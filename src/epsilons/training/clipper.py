"""Clipping of one physical batch: the clip norm and weight of each record, and the engine that applies them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..planning import Plan
from .clipping import BatchLoss, Compiled, Engine, Ghost
from .microbatches import Issued
from .sampling import Draws

#: Compiled physical batches hold at most the expected draw plus this many of its square roots: nearly all draws fit.
ROOTS = 4


class Clipper:
    """An engine with the plan's clip norms and weights.

    loss      (model, batch) -> (batch,) losses, if steps are compiled
    largest   number of records in a physical batch, at most
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        engine: Engine,
        plan: Plan,
        draws: Draws,
        loss: BatchLoss | None,
        largest: int,
    ) -> None:
        self._model, self._engine, self._plan, self._group = model, engine, plan, draws.group
        self._device = parameters[0].device
        self._loss, self._compiled = loss, None
        engine.attach(model, parameters)
        if loss is not None:
            assert isinstance(engine, Ghost)  # checked by set_up
            expected = max(phase.expected_batch for phase in plan.phases)
            records = min(largest, math.ceil(expected + ROOTS * math.sqrt(expected)))
            self._compiled = Compiled(model, parameters, loss, records)

    def begin(self, issued: Issued) -> None:
        """Before the forward pass."""
        self._engine.begin(len(issued.indices))

    def clipped_sum(self, issued: Issued, losses: Tensor) -> list[Tensor]:
        """One float64 tensor per parameter. Raises NonFiniteGradientError as the engine does."""
        return self._engine.clipped_sum(losses, *self._bounds(issued))

    def compiled_sum(self, issued: Issued, batch: Any) -> list[Tensor] | None:
        """The same from the batch, compiled; None if the program does not take this batch.

        Programs take whole physical batches of several records whose gradients are finite.
        """
        assert self._compiled is not None
        count = len(issued.indices)
        if not issued.is_whole or not self._compiled.takes(count):
            return None
        return self._compiled.sums(batch, count, *self._bounds(issued))

    def losses(self, batch: Any) -> Tensor:
        assert self._loss is not None
        return self._loss(self._model, batch)

    def _bounds(self, issued: Issued) -> tuple[Tensor, Tensor]:
        """(clip norms, weights) of these records."""
        phase = self._plan.phases[issued.physical.phase]
        group = self._group[issued.indices]
        weight = phase.weight[group]
        weight[list(issued.masked)] = 0.0
        return torch.from_numpy(phase.clip_norm[group]).to(self._device), torch.from_numpy(weight).to(self._device)

    def detach(self) -> None:
        """Remove the engine's hooks."""
        self._engine.detach()
