"""The data loader that a loop written for Opacus gets: Poisson draws in place of shuffled batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from ..doors.foreign_loop import ForeignLoop
from ..errors import CallOrderError
from .accountant import Accountant


class PrivateLoader(DataLoader[Any]):
    """Each pass makes as many draws as the caller's loader has batches; with persons, one for batch_size of them.

    given    the caller's data loader
    draws    of each pass
    private  the run; `private.is_check` is True for batches that are only checked

    A draw is one batch, or several of BatchMemoryManager; an empty draw is charged and has no batch. If a run was
    resumed, the passes that it made before are empty, so that a loop over epochs goes on in its epoch.
    """

    def __init__(self, given: DataLoader[Any], loop: ForeignLoop, accountant: Accountant, draws: int) -> None:
        super().__init__(given.dataset, batch_size=given.batch_size, collate_fn=given.collate_fn)
        self.given, self.private, self._loop = given, loop.private, loop
        self._accountant, self._draws = accountant, draws
        self._draws_before = loop.private.updates
        self._passes = 0

    @property
    def sample_rate(self) -> float:
        """The mean rate at which records, or persons, are drawn: 1 / number of draws."""
        return 1 / len(self)

    def __len__(self) -> int:
        return self._draws

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._accountant.check_unspent()
        draws = self._draws_of_next_pass()
        if draws == 0:
            return
        if self.private.is_finished:
            raise CallOrderError(_more_epochs(self.private.plan.steps, len(self)))
        for draw in self._loop.draws:
            yield from draw
            draws -= 1
            if draws == 0:
                return

    def _draws_of_next_pass(self) -> int:
        self._passes += 1
        return min(len(self), max(0, self._passes * len(self) - self._draws_before))


def _more_epochs(steps: int, draws: int) -> str:
    return (
        f"All {steps:,} steps of the plan were made ({steps / draws:g} epochs of {draws:,}), and the loop asks for "
        "more. Give make_private_with_epsilon the number of epochs that you train. For make_private raise "
        "PrivacyEngine(most_epochs=…)."
    )
