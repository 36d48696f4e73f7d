"""The contents of a model's parameters and buffers: only noisy updates may write to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .independence import messages

#: The weights in a checksum repeat after this many values: a prime, unlike the widths of layers.
COLUMNS = 4093


def versions(model: nn.Module) -> list[tuple[int, int]]:
    """(id, version) of every parameter and buffer; the version counts writes."""
    return [(id(t), t._version) for t in (*model.parameters(), *model.buffers())]


def check_unchanged(before: list[tuple[int, int]], model: nn.Module) -> None:
    """Refuse a forward pass that wrote to parameters or buffers: what it wrote was not clipped and got no noise."""
    if changed := _changed(before, model):
        raise messages.writes(changed)


def check_outside(before: list[tuple[int, int]], model: nn.Module) -> None:
    """Refuse parameters or buffers that were written to between two physical batches of one draw."""
    if changed := _changed(before, model):
        raise ModelError(written_outside(changed))


def _changed(before: list[tuple[int, int]], model: nn.Module) -> list[str]:
    """Names of the tensors that were written to since."""
    after = versions(model)
    if before == after:
        return []
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    changed = [name for name, b, a in zip(names, before, after, strict=False) if a != b]
    return changed or ["a tensor that was added or removed"]


@dataclass(frozen=True)
class Contents:
    """Checksums of a model's and its optimizer's tensors; they change if anything but an update writes there."""

    names: tuple[str, ...]
    sums: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module, parameters: Sequence[nn.Parameter]) -> Contents:
        """The checksums of all parameters and buffers, and of trained parameters outside the model."""
        named = {id(t): (name, t) for name, t in (*model.named_parameters(), *model.named_buffers())}
        named |= {id(p): ("a parameter outside the model", p) for p in parameters if id(p) not in named}
        checksums = [(name, _check_sum(t)) for name, t in named.values() if t.numel()]
        if not checksums:
            return cls((), ())
        sums = torch.stack([total.to(checksums[0][1].device) for _, total in checksums]).tolist()
        return cls(tuple(name for name, _ in checksums), tuple(sums))

    def check(self, now: Contents) -> None:
        """Raise ModelError with the names of the tensors that changed since."""
        if self == now:
            return
        before = dict(zip(self.names, self.sums, strict=True))
        changed = [name for name, total in zip(now.names, now.sums, strict=True) if before.get(name) != total]
        raise ModelError(written_outside(changed or ["a tensor that was added or removed"]))


def _check_sum(tensor: Tensor) -> Tensor:
    """One number from all bits, weighted by position, so that exchanged values change it."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size(), torch.uint8)
    bits = tensor.detach().contiguous().view(integer).reshape(-1)
    columns = min(COLUMNS, len(bits))
    rows = len(bits) // columns
    sums = bits[: rows * columns].view(rows, columns).sum(0, dtype=torch.int64)
    weights = torch.arange(1, columns + 1, device=bits.device)
    return (sums * weights).sum() + 3 * bits[rows * columns :].sum(dtype=torch.int64)


def written_outside(names: Sequence[str]) -> str:
    """The message for parameters or buffers that something but a noisy update has changed."""
    return (
        f"{', '.join(names[:3])} changed between two updates, by something else than private.step(): a second "
        "optimizer, a write to .data, load_state_dict, or a callback. Such a change is not clipped and gets no noise. "
        "Leave parameters and buffers to private.step(). A change that must follow each update and uses no data, such "
        "as a projection, belongs in optimizer.register_step_post_hook."
    )
