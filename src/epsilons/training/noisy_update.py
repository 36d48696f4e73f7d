"""The noisy update of one draw: the sum of clipped gradients, noise, average, and its application.

The sum without noise stays in here. The model is checked: only these updates may write to parameters and buffers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..clipping.engine import Clipped
from ..core.checksums import CheckSums, check_sum, tree_hash
from ..core.modules import is_on_cpu, lay_out_state, local, names_of, tensors_of, writes
from ..draws.randomness import Randomness
from ..errors import ModelError
from ..independence import messages
from ..independence.check import is_due
from ..models import model_checks
from .distributed import Ranks
from .within_draws import Position

# -- Checksums of what is in a model
#
# What something else writes to a parameter or a buffer is not clipped and gets no noise. So what is there after an
# update is compared with what is there before the next one. Weights that no update writes to (frozen ones, and buffers)
# may be most of a model: storage and version tell whether torch wrote to them, and their bits are read where a state is
# saved, where the run ends, and at every CHECK_EVERY-th update, for writes that change no version.

#: Updates.
CHECK_EVERY = 64


def written_outside(names: Sequence[str]) -> str:
    """The message for parameters or buffers that something but a noisy update has changed."""
    return (
        f"{', '.join(names[:3])} changed between two updates, by something else than private.step(): a second "
        "optimizer, a write to .data, load_state_dict, a callback, or a hook of the optimizer. Such a change is not "
        "clipped and gets no noise. Leave parameters and buffers to private.step(). A projection that uses no data "
        "belongs in a parametrization (torch.nn.utils.parametrize), or in the step of an optimizer of your own: "
        "epsilons docs concepts"
    )


# -- The noisy update of one draw: the sum of clipped gradients, noise, average, and its application

#: Of an optimizer, by their numbers.
Hooks = dict[int, Callable[..., Any]]
#: What a GradScaler asks of an optimizer; fused ones have it.
SCALING = "_step_supports_amp_scaling"


class NoisyUpdate:
    """The updates of one run."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        position: Position,
        ranks: Ranks,
    ) -> None:
        self._model, self._optimizer, self._parameters = model, optimizer, parameters
        self._position, self._ledger, self._ranks = position, position.ledger, ranks
        self._trained = model_checks.Trained.of(parameters, model)
        self._contents: CheckSums | None = None  # of parameters and buffers after the last update
        self._versions: list[tuple[int, int]] = []  # of parameters and buffers at the start of the draw
        self._unread = CHECK_EVERY  # updates since all bits were read
        self._is_stepping = False
        self._guard = optimizer.register_step_pre_hook(
            lambda *_: None if self._is_stepping else model_checks.refuse_step()
        )
        self._relaying = optimizer.register_load_state_dict_post_hook(lay_out_state)
        self._was_scaling = vars(optimizer).get(SCALING) is True
        vars(optimizer)[SCALING] = model_checks.NoScaler()
        self._shards = ranks.shards
        # (P,) float64, the sum of the current draw, then the update; of shards, of their rows here
        self._total: Tensor | None = None
        self._left = 0  # so many of them, the first ones, may not be 0

    @property
    def sum(self) -> list[Tensor]:
        """One float64 tensor per parameter: clipped gradients of the current draw, on this rank."""
        if self._total is None:
            numbers = sum(local(p).numel() for p in self._parameters)
            self._total = torch.zeros(numbers, dtype=torch.float64, device=self._parameters[0].device)
        self._left = len(self._total)
        return self._by_parameter(self._total)

    def _by_parameter(self, flat: Tensor) -> list[Tensor]:
        held = [local(p) for p in self._parameters]
        parts = torch.split(flat, [p.numel() for p in held])
        return [part.view(p.shape) for p, part in zip(held, parts, strict=True)]

    def begin_sum(self) -> None:
        if self._total is not None and is_shared(self._total):
            self._total = None  # an optimizer keeps a part of the last update
        elif self._total is not None:
            self._total[: self._left].zero_()
        if self._shards:
            self._shards.begin_sum()
        self._versions = _versions(self._model)

    def drop_sum(self) -> None:
        """Free the memory, too: a check needs it, and so does a checkpoint."""
        self._total = None

    def add(self, clipped: Clipped) -> None:
        """Add the clipped gradients of one physical batch."""
        if self._shards:
            self._shards.add(clipped)
        else:
            clipped(self.sum)

    def noisy_average(self, randomness: Randomness) -> list[Tensor]:
        """One gradient per parameter: the sum over all ranks plus noise, divided by the expected batch size.

        The sum is gone after this call. Rank 0 adds up only after its charge is durable, and so do all ranks.
        """
        at, ranks = self._position, self._ranks
        self.sum  # noqa: B018  # of an empty draw, zeros
        total = self._total
        assert total is not None
        if ranks.is_distributed:
            facts = {"the step": (at.phase, at.step)} | self.shared_facts(randomness)
            if self._shards:
                ranks.check_agreement("at the end of a draw", facts)
            else:
                ranks.all_reduce(total, "at the end of a draw", facts)
        if self._shards:
            for own, part in zip(self.sum, self._shards.whole_sum(), strict=True):
                own.copy_(part)
        self._total = None  # an interrupted average leaves a part of the update, which must not be taken for a sum
        update = self._averaged(total, randomness)
        self._total = total
        parts = zip(map(local, self._parameters), self._by_parameter(update), strict=True)
        return [part if p.is_contiguous() and part.dtype == p.dtype else _like(p, part) for p, part in parts]

    def _averaged(self, total: Tensor, randomness: Randomness) -> Tensor:
        """(P,) the sum plus noise, divided by the expected batch, in the parameters' type; no sum is left in `total`.

        On a CPU block by block, so that no memory holds all noise, and in the memory of the sum: a rounded block lies
        where sums were that are read already. `Randomness.noise` gives the same values at once.
        """
        (dtype, *others) = {p.dtype for p in self._parameters}
        dtype = total.dtype if others else dtype
        at, phase = self._position, self._position.plan.phases[self._position.phase]
        # The divisor is public and fixed: the drawn number of records is itself private.
        std, divisor, threads = phase.noise_std, phase.expected_batch, torch.get_num_threads()
        self._left = len(total)
        if self._shards or not is_on_cpu(total):
            if self._shards:
                noise = torch.from_numpy(self._shards.noise(randomness, at.phase, at.step))
            else:
                noise = torch.from_numpy(randomness.noise(at.phase, at.step, len(total), threads))
            return total.add_(noise.to(total.device).mul_(std)).div_(divisor).to(dtype)
        sums, update = total.numpy(), total.view(dtype)[: len(total)]
        self._left = -(-update.nbytes // total.itemsize)

        def average(start: int, noise: npt.NDArray[np.float64]) -> None:
            part = sums[start : start + len(noise)]
            noise *= std
            noise += part
            noise /= divisor
            part[:] = 0.0  # whoever saves a gradient saves all of this memory
            update[start : start + len(noise)].copy_(torch.from_numpy(noise))

        randomness.each_block(at.phase, at.step, len(total), average, threads)
        return update

    def is_first_release(self, update: Sequence[Tensor]) -> bool:
        """Record the update in the ledger. False if this step's noise was added to another sum before."""
        at, ledger, ranks = self._position, self._ledger, self._ranks
        digest = tree_hash(update) if ledger.durable or ranks.is_distributed else ""
        digest = self._shards.hash_of_all(digest) if self._shards else digest
        is_first = ledger.record(at.phase, at.step, digest)
        facts = {"the update's values": digest.encode(), "the ledger's answer": is_first}
        ranks.check_agreement("before the update", facts)
        return is_first

    def apply(self, update: Sequence[Tensor]) -> None:
        """Let the optimizer apply the update. What its hooks write to the model is not part of it, and is refused."""
        optimizer = self._optimizer
        before = _global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks
        after = optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks
        update = self._shards.as_gradients(update) if self._shards else update
        for p, gradient in zip(self._parameters, update, strict=True):
            p.grad = gradient
        self._is_stepping = True
        try:
            if sum(map(len, before)) > 1:  # the guard is one of them
                _call(before, optimizer)
                self.check_contents(whole=False)
            # Within the step they would run twice if it is a subclass's: in that of its parent, too.
            with _emptied(*before, *after):
                optimizer.step()
            self._note_contents()
            _call(after, optimizer)
        finally:
            self._is_stepping = False
            for p in self._parameters:
                p.grad = None

    def shared_facts(self, randomness: Randomness) -> dict[str, Any]:
        """What must be equal on all ranks."""
        # Of a sharded parameter, every rank has other values.
        held = "" if self._shards else str(check_sum(self._parameters))
        return {
            "what was charged": self._ledger.charged,
            "the key": randomness.commitment.encode(),
            "the parameters' values": held.encode(),
        }

    # -- nothing else writes to the model ----------------------------------------------------------------

    def check_trained(self) -> None:
        """Refuse other trained parameters than at the start."""
        self._trained.check(self._optimizer, self._model)

    def note_contents(self) -> None:
        """Before the first draw: what is in the model now was there before training."""
        if self._contents is None:
            self._note_contents()

    def _note_contents(self) -> None:
        self._contents = self._now()

    def _now(self, whole: bool = False) -> CheckSums:
        """Of what the model holds. whole: what no update writes to is read, too"""
        held = self._held()
        # What needs a gradient may be trained by something else: fused optimizers raise no version.
        always = [*self._parameters, *(t for t in held if t.requires_grad)]
        return CheckSums.of(held, always, None if whole else self._contents)

    def _held(self) -> list[Tensor]:
        """All parameters and buffers, and trained parameters outside the model."""
        inside = tensors_of(self._model)
        ids = {id(t) for t in inside}
        return inside + [p for p in self._parameters if id(p) not in ids]

    def check_contents(self, whole: bool = True) -> None:
        """Refuse anything that was written to parameters or buffers since the last update.

        whole   False: what no update writes to is read at every CHECK_EVERY-th call only
        """
        if self._contents is None:
            return
        is_read = whole or self._unread >= CHECK_EVERY or is_due(self._position.step)
        if not whole:
            self._unread = 0 if is_read else self._unread + 1
        changed = self._contents.changed(self._now(is_read))
        if changed is None:
            raise ModelError(written_outside(["a tensor that was added or removed"]))
        if changed:
            names = [*names_of(self._model), "a parameter outside the model"]
            raise ModelError(written_outside([names[min(k, len(names) - 1)] for k in changed]))

    def forget_contents(self) -> None:
        """After the last update: what is written from now on is not trained further."""
        self._contents = None

    def changes(self) -> tuple[bool, bool]:
        """Whether something else than an update wrote to parameters or buffers: to any, and to those rarely read."""
        before = self._contents
        if before is None:
            return True, True
        changed = before.changed(self._now(whole=True))
        return changed != [], changed is None or any(before.aliases[k] is not None for k in changed)

    def check_forward(self) -> None:
        """Refuse a forward pass that wrote to parameters or buffers: what it wrote was not clipped and got no noise."""
        if changed := _changed(self._versions, self._model):
            raise messages.writes(changed)

    def check_between_batches(self) -> None:
        """Refuse parameters or buffers that were written to between two physical batches of one draw."""
        if changed := _changed(self._versions, self._model):
            raise ModelError(written_outside(changed))

    def remove_guard(self) -> None:
        """Allow optimizer.step() again."""
        self._guard.remove()
        self._relaying.remove()
        vars(self._optimizer).pop(SCALING, None)
        if self._was_scaling:
            vars(self._optimizer)[SCALING] = True


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    """A copy of the values in the parameter's type and memory layout."""
    return torch.empty_like(parameter).copy_(part)


def is_shared(tensor: Tensor) -> bool:
    """Whether a view of this tensor, or its storage, is still in use."""
    return _uses(tensor) != _uses(torch.empty(1))


def _uses(tensor: Tensor) -> tuple[int, int]:
    """Of its storage, by tensors and by names in Python."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _call(hooks: Sequence[Hooks], optimizer: torch.optim.Optimizer) -> None:
    for hook in [hook for some in hooks for hook in some.values()]:
        hook(optimizer, (), {})


@contextmanager
def _emptied(*hooks: Hooks) -> Iterator[None]:
    """Run the body without these hooks."""
    kept = [dict(some) for some in hooks]
    for some in hooks:
        some.clear()
    try:
        yield
    finally:
        for some, own in zip(hooks, kept, strict=True):
            some.update(own)


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """(id, version) of every parameter and buffer; the version counts writes."""
    return [(id(t), writes(t)) for t in tensors_of(model)]


def _changed(before: list[tuple[int, int]], model: nn.Module) -> list[str]:
    """Names of the tensors that were written to since."""
    after = _versions(model)
    if before == after:
        return []
    changed = [name for name, b, a in zip(names_of(model), before, after, strict=False) if a != b]
    return changed or ["a tensor that was added or removed"]
