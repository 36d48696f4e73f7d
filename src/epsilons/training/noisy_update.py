"""The noisy update of one draw: the sum of clipped gradients, noise, average, and its application.

The sum without noise stays in here. The model is checked: only these updates may write to parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..core.modules import local, names_of, tensors_of, writes
from ..draws.randomness import Randomness
from ..errors import ModelError
from ..independence import messages
from ..models import model_checks
from .distributed import Ranks, as_integers, check_sum, hash_of
from .turns import Position

# -- Checksums of what is in a model: they show writes that change no version, such as `tensor.data[0] = x`
#
# Such a write to a parameter or a buffer is not clipped and gets no noise. So what is there after an update is compared
# with what is there before the next one.

#: Words of 64 bits that are so far apart are added: a prime, unlike the widths of layers.
COLUMNS = 4093


@dataclass(frozen=True)
class Contents:
    """Checksums of a model's tensors; they change if anything writes there. sums: in the order of `tensors_of`"""

    sums: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module, parameters: Sequence[nn.Parameter]) -> Contents:
        """The checksums of all parameters and buffers, and of trained parameters outside the model."""
        return cls(tuple(_check_sums(_all_tensors(model, parameters))))

    def check(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Raise ModelError with the names of the tensors that changed since."""
        now = Contents.of(model, parameters)
        if self == now:
            return
        names = names_of(model)
        names += ["a parameter outside the model"] * (len(now.sums) - len(names))
        changed = [name for name, b, a in zip(names, self.sums, now.sums, strict=False) if a != b]
        is_other = len(self.sums) != len(now.sums)
        raise ModelError(written_outside(["a tensor that was added or removed"] if is_other else changed))


def _all_tensors(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    inside = tensors_of(model)
    ids = {id(t) for t in inside}
    return inside + [p for p in parameters if id(p) not in ids]


def _check_sums(tensors: Sequence[Tensor]) -> list[int]:
    """A number for each, from all bits.

    It changes with any one of them. Of several changes of a large tensor, those may cancel that lie a multiple of
    COLUMNS words apart.
    """
    tensors = [local(t) for t in tensors]
    large = iter(_on_cpu([_columns(_words(t)) for t in tensors if not _is_small(t)]))
    return [hash(as_integers(t).numpy().tobytes() if _is_small(t) else next(large).tobytes()) for t in tensors]


def _is_small(tensor: Tensor) -> bool:
    """Whether it is hashed whole, which then takes no longer than to add its words first."""
    return tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() < 16 * COLUMNS


def _columns(words: Tensor) -> Tensor:
    """(COLUMNS,) or fewer sums of (n,) words, modulo 2⁶⁴."""
    whole = len(words) - len(words) % COLUMNS
    if not whole:
        return words
    columns = words[:whole].view(-1, COLUMNS).sum(0)
    columns[: len(words) - whole] += words[whole:]
    return columns


def _on_cpu(columns: Sequence[Tensor]) -> list[npt.NDArray[np.int64]]:
    """Those of a GPU are copied together, because each copy waits for it."""
    if all(each.device.type == "cpu" for each in columns):
        return [each.numpy() for each in columns]
    sizes = [len(each) for each in columns]
    together = torch.cat([each.to(columns[0].device) for each in columns]).cpu()
    return [each.numpy() for each in torch.split(together, sizes)]


def _words(tensor: Tensor) -> Tensor:
    """(n,) the bits of the values as 64-bit words, filled up with zeros."""
    bits = as_integers(tensor).reshape(-1)
    each = 8 // bits.element_size()
    if len(bits) % each or bits.storage_offset() % each:
        bits = torch.cat([bits, bits.new_zeros(-len(bits) % each)])
    return bits.view(torch.int64)


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
        self._contents: Contents | None = None  # of parameters and buffers after the last update
        self._versions: list[tuple[int, int]] = []  # of parameters and buffers at the start of the draw
        self._is_stepping = False
        self._guard = optimizer.register_step_pre_hook(
            lambda *_: None if self._is_stepping else model_checks.refuse_step()
        )
        self._was_scaling = vars(optimizer).get(SCALING) is True
        vars(optimizer)[SCALING] = model_checks.NoScaler()
        self._shards = ranks.shards
        self._sum: list[Tensor] = []  # empty before the first physical batch of a draw

    @property
    def sum(self) -> list[Tensor]:
        """One float64 tensor per parameter: clipped gradients of the current draw, on this rank."""
        if not self._sum:
            self._sum = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]
        return self._sum

    def begin_sum(self) -> None:
        self._sum = []
        if self._shards:
            self._shards.begin_sum()
        self._versions = _versions(self._model)

    def drop_sum(self) -> None:
        self._sum = []

    def add(self, clipped: Sequence[Tensor]) -> None:
        """Add the clipped gradients of one physical batch. They are copied, because an engine may use them again."""
        if self._shards:
            self._shards.add(clipped)
            return
        if not self._sum:
            twins = zip(self._parameters, clipped, strict=True)
            self._sum = [torch.empty_like(p, dtype=torch.float64).copy_(part) for p, part in twins]
            return
        for total, part in zip(self._sum, clipped, strict=True):
            total += part

    def noisy_average(self, randomness: Randomness) -> list[Tensor]:
        """One gradient per parameter: the sum over all ranks plus noise, divided by the expected batch size.

        It is made in place of the sum, which is gone after this call. Rank 0 adds up only after its charge is durable,
        and so do all ranks.
        """
        at, ranks = self._position, self._ranks
        if ranks.is_distributed:
            facts = {"the step": (at.phase, at.step)} | self.shared_facts(randomness)
            if self._shards:
                ranks.check_agreement("at the end of a draw", facts)
            else:
                ranks.all_reduce(self.sum, "at the end of a draw", facts)
        if self._shards:
            self._sum = self._shards.whole_sum()
        phase, held = at.plan.phases[at.phase], [local(p) for p in self._parameters]
        sizes = [p.numel() for p in held]
        if self._shards:
            values = self._shards.noise(randomness, at.phase, at.step)
        else:
            values = randomness.noise(at.phase, at.step, sum(sizes), torch.get_num_threads())
        noise = torch.from_numpy(values).to(held[0].device)
        noise *= phase.noise_std
        average = []
        for p, total, part in zip(held, self.sum, torch.split(noise, sizes), strict=True):
            total += part.view(p.shape)
            # The divisor is public and fixed: the drawn number of records is itself private.
            total /= phase.expected_batch
            average.append(total.to(p.dtype))
        self._sum = []
        return average

    def is_first_release(self, update: Sequence[Tensor]) -> bool:
        """Record the update in the ledger. False if this step's noise was added to another sum before."""
        at, ledger, ranks = self._position, self._ledger, self._ranks
        digest = hash_of(update) if ledger.durable or ranks.is_distributed else ""
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
                self.check_contents()
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
        self._contents = Contents.of(self._model, self._parameters)

    def check_contents(self) -> None:
        """Refuse anything that was written to parameters or buffers since the last update."""
        if self._contents is not None:
            self._contents.check(self._model, self._parameters)

    def forget_contents(self) -> None:
        """After the last update: what is written from now on is not trained further."""
        self._contents = None

    @property
    def is_unchanged(self) -> bool:
        """True if nothing was written to parameters and buffers since the last update."""
        return self._contents == Contents.of(self._model, self._parameters)

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
        vars(self._optimizer).pop(SCALING, None)
        if self._was_scaling:
            vars(self._optimizer)[SCALING] = True


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
