"""The data loader that a loop written for Opacus gets: Poisson draws in place of shuffled batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from ..doors.foreign_loop import ForeignLoop
from ..draws import batches
from ..errors import CallOrderError, ModelError
from ..training import within_draws
from .accountant import Accountant


class PrivateLoader(DataLoader[Any]):
    """Each pass makes as many draws as the caller's loader has batches; with persons, one for batch_size of them.

    given    the caller's data loader
    draws    of each pass
    private  the run; `private.is_check` is True for batches that are only checked

    A draw is one batch, or several of BatchMemoryManager; an empty draw is one batch without records, for which no call
    has an effect: its update was made before. If a run was resumed, the passes that it made before are empty, so that a
    loop over epochs goes on in its epoch.
    """

    #: A batch of an empty draw has one record of zeros, for models that take no batch of 0.
    rand_on_empty = False

    def __init__(self, given: DataLoader[Any], loop: ForeignLoop, accountant: Accountant, draws: int) -> None:
        super().__init__(given.dataset, batch_size=given.batch_size, collate_fn=given.collate_fn)
        self.given, self.private, self._loop = given, loop.private, loop
        self._accountant, self._draws = accountant, draws
        self._draws_before = loop.private.updates
        self._passes = 0
        self._plateaus: list[tuple[ReduceLROnPlateau, int]] = []  # with how many steps each had made
        loop.losses = []
        loop.hand_out_empty(self._empty)

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
        self._check_plateaus(self._found())
        self._loop.losses = []
        number = self._passes
        try:
            for draw in self._loop.draws:
                for batch in draw:
                    yield batch
                    if self._plateaus:
                        self._check_plateaus(self._plateaus)
                draws -= 1
                if draws == 0:
                    return
        finally:
            if number == self._passes:  # not of an iterator that is closed during a later pass
                if draws > 1 or self.private._turns.in_draw:  # the loop was left
                    self.private._cut_short()
                self.private._settings.leave()

    def _empty(self) -> Any:
        """A batch as those of the data set, without records."""
        assert self.collate_fn is not None
        records = int(self.rand_on_empty)

        def of(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.ndim:
                return leaf
            return leaf.new_zeros((records, *leaf.shape[1:]), device=self.private._device)

        return batches.mapped(self.collate_fn([self.dataset[0]]), of)

    def _draws_of_next_pass(self) -> int:
        self._passes += 1
        return min(len(self), max(0, self._passes * len(self) - self._draws_before))

    # -- learning rates that follow a metric -----------------------------------------------------------

    def _found(self) -> list[tuple[ReduceLROnPlateau, int]]:
        known = {id(scheduler): steps for scheduler, steps in self._plateaus}
        found = within_draws.schedulers_of(self.private.optimizer)
        return [(s, known.get(id(s), 0)) for s in found if isinstance(s, ReduceLROnPlateau)]

    def _check_plateaus(self, plateaus: list[tuple[ReduceLROnPlateau, int]]) -> None:
        """Raise ModelError for one that follows losses of private batches, before any update uses its rate."""
        for scheduler, steps in plateaus:
            if scheduler.last_epoch == steps:
                continue
            is_seen = any(math.isclose(abs(scheduler.best), abs(value), rel_tol=1e-6) for value in self._raw())
            if is_seen or not self._loop.calls.is_called_elsewhere:
                raise ModelError(_FOLLOWS)
            self._loop.calls.is_called_elsewhere = False
        self._plateaus = [(scheduler, scheduler.last_epoch) for scheduler, _ in plateaus]

    def _raw(self) -> list[float]:
        """The last loss, and the means and sums of a pass's losses."""
        losses = [(float(loss.sum()), records) for loss, records in self._loop.losses or []]
        if not losses:
            return []
        total, weighted = sum(loss for loss, _ in losses), sum(loss * records for loss, records in losses)
        drawn, rows = sum(records for _, records in losses), len(self.dataset)  # type: ignore[arg-type]  # see check_loader
        of_total = [total / count for count in (1, len(losses), len(self), drawn, rows)]
        return [losses[-1][0], *of_total, weighted, weighted / drawn, weighted / rows]


_FOLLOWS = (
    "ReduceLROnPlateau followed a loss of private batches, or was stepped though the model was called for nothing but "
    "private batches. Raw losses are not private, and a learning rate that follows them reveals records without noise. "
    "Give it a metric of public records, or use a schedule that is fixed beforehand. See: epsilons docs concepts"
)


def _more_epochs(steps: int, draws: int) -> str:
    return (
        f"All {steps:,} steps of the plan were made ({steps / draws:g} epochs of {draws:,}), and the loop asks for "
        "more. Give make_private_with_epsilon the number of epochs that you train. For make_private raise "
        "PrivacyEngine(most_epochs=…). To evaluate, use your own data loader: each pass over this one is charged."
    )
