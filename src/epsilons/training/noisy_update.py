"""The noisy update of one draw: the sum of clipped gradients, noise, average, and its application.

The sum without noise stays in here. The model is checked: only these updates may write to parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ledger import Ledger
from ..planning import Plan
from . import contents, model_checks
from .distributed import Ranks, check_sum, hash_of
from .randomness import Randomness
from .resume import Position


class NoisyUpdate:
    """The updates of one run.

    sum   one float64 tensor per parameter: clipped gradients of the current draw, on this rank
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        plan: Plan,
        ledger: Ledger,
        ranks: Ranks,
    ) -> None:
        self._model, self._optimizer, self._parameters = model, optimizer, parameters
        self._plan, self._ledger, self._ranks = plan, ledger, ranks
        self._trained = model_checks.Trained.of(parameters, model)
        self._contents: contents.Contents | None = None  # of parameters and buffers after the last update
        self._is_stepping = False
        self._guard = optimizer.register_step_pre_hook(
            lambda *_: None if self._is_stepping else model_checks.refuse_step()
        )
        self.sum: list[Tensor] = []

    def begin_sum(self) -> None:
        self.sum = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]

    def drop_sum(self) -> None:
        self.sum = []

    def add(self, clipped: Sequence[Tensor]) -> None:
        """Add the clipped gradients of one physical batch."""
        for total, part in zip(self.sum, clipped, strict=True):
            total += part

    def noisy_average(self, at: Position, randomness: Randomness) -> list[Tensor]:
        """One gradient per parameter: the sum over all ranks plus noise, divided by the expected batch size.

        Rank 0 adds up only after its charge is durable, and so do all ranks.
        """
        if self._ranks.is_distributed:
            step = {"the step": (at.phase, at.step)}
            self._ranks.all_reduce(self.sum, "at the end of a draw", step | self.shared_facts(randomness))
        phase = self._plan.phases[at.phase]
        sizes = [p.numel() for p in self._parameters]
        noise = torch.from_numpy(randomness.noise(at.phase, at.step, sum(sizes))).to(self._parameters[0].device)
        average = []
        for p, total, part in zip(self._parameters, self.sum, torch.split(noise, sizes), strict=True):
            noisy = total + phase.noise_std * part.reshape(p.shape)
            # The divisor is public and fixed: the drawn number of records is itself private.
            average.append((noisy / phase.expected_batch).to(p.dtype))
        return average

    def is_first_release(self, update: Sequence[Tensor], at: Position) -> bool:
        """Record the update in the ledger. False if this step's noise was added to another sum before."""
        digest = hash_of(update) if self._ledger.durable or self._ranks.is_distributed else ""
        is_first = self._ledger.record(at.phase, at.step, digest)
        facts = {"the update's values": digest.encode(), "the ledger's answer": is_first}
        self._ranks.check_agreement("before the update", facts)
        return is_first

    def apply(self, update: Sequence[Tensor]) -> None:
        """Let the optimizer apply the update, and forget the sum."""
        for p, gradient in zip(self._parameters, update, strict=True):
            p.grad = gradient
        self._is_stepping = True
        try:
            self._optimizer.step()
        finally:
            self._is_stepping = False
            for p in self._parameters:
                p.grad = None
        self._contents = contents.Contents.of(self._model, self._parameters)
        self.sum = []

    def shared_facts(self, randomness: Randomness) -> dict[str, Any]:
        """What must be equal on all ranks."""
        return {
            "what was charged": self._ledger.charged,
            "the key": randomness.commitment.encode(),
            "the parameters' values": str(check_sum(self._parameters)).encode(),
        }

    # -- nothing else writes to the model ----------------------------------------------------------------

    def check_trained(self) -> None:
        """Refuse other trained parameters than at the start."""
        self._trained.check(self._optimizer, self._model)

    def note_contents(self) -> None:
        """Before the first draw: what is in the model now was there before training."""
        if self._contents is None:
            self._contents = contents.Contents.of(self._model, self._parameters)

    def check_contents(self) -> None:
        """Refuse anything that was written to parameters or buffers since the last update."""
        if self._contents is not None:
            self._contents.check(contents.Contents.of(self._model, self._parameters))

    @property
    def is_unchanged(self) -> bool:
        """True if nothing was written to parameters and buffers since the last update."""
        return self._contents == contents.Contents.of(self._model, self._parameters)

    def remove_guard(self) -> None:
        """Allow optimizer.step() again."""
        self._guard.remove()
