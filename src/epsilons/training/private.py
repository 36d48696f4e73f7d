"""Private: draw, clip, noise, charge. One object owns all four, so that they cannot drift apart.

Paper Alg. 1 with a rate, a clip norm and a weight per group, in physical chunks. The order per draw:

    charge the ledger → for each chunk: yield it, take its losses, add its clipped gradients → noise → update

Un-noised sums stay in here and never reach p.grad, so no optimizer, scheduler or average of weights sees one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..errors import OutOfTurn
from ..ledger import Ledger
from ..planning import Plan
from ..runs import RunFolder
from . import checks
from .clipping import Contaminated, Engine
from .records import Address, Records
from .sampling import Draws, chunks

#: Chunks are cut so that per-record gradients of one chunk stay near this many values, unless told otherwise.
VALUES_PER_CHUNK = 2**26
LARGEST_CHUNK = 512

Turn = Literal["draw", "backward", "step"]
Part = Literal["rehearsal", "whole", "single"]

_ORDER = "The order is: for batch in private.batches → private.backward(losses) → private.step()."


@dataclass(frozen=True)
class _Handed:
    """What the loop holds in its hands: these records of this chunk, as this part of the work."""

    address: Address
    indices: npt.NDArray[np.int64]
    part: Part
    is_last: bool


class Private:
    """A training loop made private; built by `make_private`. One of the two objects that hold state.

    batches        physical chunks of Poisson draws, on the model's device
    backward(…)    clip each record's gradient to its own norm and add it up
    step()         on the draw's last chunk: noise, average, update, and True
    ledger         charged / allowed steps
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        draws: Draws,
        records: Records,
        engine: Engine,
        ledger: Ledger,
        folder: RunFolder | None = None,
        max_physical_batch: int | None = None,
    ) -> None:
        checks.check_layers(model)
        self.model, self.optimizer, self.plan, self.ledger = model, optimizer, plan, ledger
        self._draws, self._records, self._engine, self.folder = draws, records, engine, folder
        self._parameters = checks.check_optimizer(optimizer, model)
        self._known = {id(p) for p in self._parameters}
        self._device = self._parameters[0].device
        size = sum(p.numel() for p in self._parameters)
        self._largest = max_physical_batch or max(1, min(LARGEST_CHUNK, VALUES_PER_CHUNK // size))
        self._phase, self._step = 0, 0
        self._turn: Turn = "draw"
        self._in_draw = False
        self._loops = 0
        self._handed: _Handed | None = None
        self._sum: list[Tensor] = []
        self._contaminated = False
        self._rehearsed = False
        self._rehearsal: tuple[Tensor, int] | None = None  # losses with one record exchanged, and which one
        self._fingerprint: list[tuple[int, int]] = []
        self._stepping = False
        self._closed = False
        engine.attach(model, self._parameters)
        self._handles = [
            optimizer.register_step_pre_hook(
                lambda *_: None if self._stepping or self._closed else checks.refuse_step()
            ),
            *checks.refuse_time_first(model, lambda: len(self._handed.indices) if self._handed else 0),
        ]

    # -- the loop ----------------------------------------------------------------------------------

    @property
    def batches(self) -> Iterator[Any]:
        """The chunks of every remaining draw, in the data set's own structure.

        Leaving the loop after a completed update and entering it again goes on with the next draw. The first chunk of
        a run is handed out twice: first as a rehearsal with one record exchanged, whose losses are only compared.
        Raises OutOfTurn when a draw was left unfinished.
        """
        if self._closed:
            raise OutOfTurn("This run is closed. Call make_private again for another one.")
        return self._run()

    def _run(self) -> Iterator[Any]:
        if self._in_draw:
            raise OutOfTurn(
                "The loop over private.batches was left in the middle of a draw and entered again. A draw must be "
                "finished: "
                "drawing again after looking at it would not be Poisson sampling. " + _ORDER
            )
        self._loops += 1
        own = self._loops
        for address, batch in self._records.stream(self._addresses(), self._device):
            if own != self._loops or (address.phase, address.step) != (self._phase, self._step):
                # An older loop's next draw may be made already: its noise must never hide a second sum.
                raise OutOfTurn("Another loop over private.batches was begun since; go on with that one.")
            if address.number == 0:
                self.ledger.charge(address.phase, address.step)
                self._sum = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]
                self._in_draw = True
            if batch is None:
                self._update()
            else:
                yield from self._present(address, batch)
        self._finish()

    def _addresses(self) -> Iterator[Address]:
        """Every chunk from the present position on."""
        nobody = np.empty(0, dtype=np.int64)
        for phase in range(self._phase, len(self.plan.phases)):
            first = self._step if phase == self._phase else 0
            for step in range(first, self.plan.phases[phase].steps):
                pieces = chunks(self._draws.at(phase, step), self._largest) or [nobody]
                for number, piece in enumerate(pieces):
                    yield Address(phase, step, number, len(pieces), piece)

    def _present(self, address: Address, batch: Any) -> Iterator[Any]:
        """Hand out one chunk: rehearsed if it is the first, and record by record if it turns out contaminated."""
        indices, count = address.indices, len(address.indices)
        if not self._rehearsed and (twin := checks.exchanged(batch, count)) is not None:
            exchanged, record = twin
            self._rehearsal = (torch.empty(0), record)
            yield self._hand_out(_Handed(address, indices, "rehearsal", is_last=False), exchanged)
            self._taken_back()
            self._rehearsed = True
        yield self._hand_out(_Handed(address, indices, "whole", is_last=address.is_last), batch)
        self._taken_back()
        if self._contaminated:
            self._contaminated = False
            for i in range(count):
                last = address.is_last and i == count - 1
                one = checks.take(batch, [i], count)
                yield self._hand_out(_Handed(address, indices[i : i + 1], "single", is_last=last), one)
                self._taken_back()

    def _hand_out(self, handed: _Handed, batch: Any) -> Any:
        self._handed, self._turn = handed, "backward"
        self._fingerprint = checks.fingerprint(self.model)
        self._engine.begin(len(handed.indices))
        # Dropout is part of the sum that the noise hides: replayed with the step, and alike in rehearsal and play.
        address = handed.address
        which = int(handed.indices[0]) if handed.part == "single" else -1
        torch.manual_seed(self._draws.randomness.seed("torch", address.phase, address.step, address.number, which))
        return batch

    def _taken_back(self) -> None:
        if self._turn != "draw":
            missing = "private.backward(losses)" if self._turn == "backward" else "private.step()"
            raise OutOfTurn(f"The loop went on to the next chunk without {missing}. {_ORDER}")

    def backward(self, losses: Tensor) -> None:
        """Clip each record's gradient to its own norm and add it to the draw's sum.

        losses: (batch,), one per record of the chunk, in order, from the recorded graph.
        Raises OutOfTurn, ModelError for losses that are not one per record, MixedRecords, UnsupportedLayer.
        """
        if self._turn != "backward" or self._handed is None:
            raise OutOfTurn(f"private.backward was called {self._where()}. {_ORDER}")
        handed = self._handed
        losses = checks.check_losses(losses, len(handed.indices))
        checks.check_layers(self.model)
        checks.check_unchanged(self._fingerprint, self.model)
        self._turn = "step"
        if handed.part == "rehearsal":
            assert self._rehearsal is not None
            self._rehearsal = (losses.detach().clone(), self._rehearsal[1])
            return
        if self._rehearsal is not None:
            checks.check_untouched(self._rehearsal[0], losses.detach(), self._rehearsal[1])
            self._rehearsal = None
        phase = self.plan.phases[handed.address.phase]
        group = self._draws.group[handed.indices]
        clip_norm = torch.from_numpy(phase.clip_norm[group]).to(self._device)
        weight = torch.from_numpy(phase.weight[group]).to(self._device)
        try:
            clipped = self._engine.clipped_sum(losses, clip_norm, weight)
        except Contaminated:
            # Alone, such a record contributes nothing. Among others, it is played again alone.
            self._contaminated = len(handed.indices) > 1
            return
        for total, part in zip(self._sum, clipped, strict=True):
            total += part

    def step(self) -> bool:
        """On the draw's last chunk: add noise, divide by the expected batch, update, and return True; else False."""
        if self._turn != "step" or self._handed is None:
            raise OutOfTurn(f"private.step was called {self._where()}. {_ORDER}")
        handed, self._handed, self._turn = self._handed, None, "draw"
        if self._contaminated or not handed.is_last:
            return False
        self._update()
        return True

    def _where(self) -> str:
        if self._turn == "draw":
            return "outside a chunk, or twice on one"
        return "twice on one chunk" if self._turn == "step" else "before private.backward"

    def _update(self) -> None:
        """Noise the sum, average by the plan's constant, let the optimizer apply it, and move on to the next draw."""
        phase = self.plan.phases[self._phase]
        checks.check_strangers(self.optimizer, self._known)
        count = sum(p.numel() for p in self._parameters)
        noise = torch.from_numpy(self._draws.randomness.noise(self._phase, self._step, count)).to(self._device)
        start = 0
        for p, total in zip(self._parameters, self._sum, strict=True):
            own = noise[start : start + p.numel()].reshape(p.shape)
            # The divisor is public and fixed: the drawn number of records is itself private.
            p.grad = ((total + phase.noise_std * own) / phase.expected_batch).to(p.dtype)
            start += p.numel()
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False
            for p in self._parameters:
                p.grad = None
        self._sum = []
        self._in_draw = False
        self._step += 1
        if self._step == phase.steps:
            self._phase, self._step = self._phase + 1, 0

    # -- the end -----------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """True once every step of the plan was made."""
        return self._phase == len(self.plan.phases)

    def _finish(self) -> None:
        self.ledger.close()
        if self.folder:
            self.folder.destroy_key()

    def close(self) -> None:
        """Hooks off, ledger closed; model and optimizer are as they were, but for what was learnt."""
        if not self._closed:
            self._closed = True
            self._engine.detach()
            for handle in self._handles:
                handle.remove()
            self.ledger.close()
            self._sum = []

    def __enter__(self) -> Private:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Private({sum(self.ledger.charged):,} of {self.plan.steps:,} steps, {len(self._records):,} records)"
