"""Checksums of what is in a model: they show writes that change no version, such as `tensor.data[0] = x`.

Such a write to a parameter or a buffer is not clipped and gets no noise. So what is there after an update is compared
with what is there before the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from .._links import docs_page
from ..errors import ModelError
from .distributed import as_integers
from .modules import names_of, tensors_of

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
        + docs_page("pitfalls", "a-projection-after-each-update")
    )
