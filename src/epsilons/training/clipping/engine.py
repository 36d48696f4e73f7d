"""What every engine is asked for, and the one clipping rule they share.

A record's contribution is weight · min(1, clip_norm / ‖g‖) · g, paper Alg. 1 line 6 with c_p for c. ‖g‖ is an upper
bound on the norm of the very numbers that are added, contributions are added in 64 bits, and the factor is shrunk by
2⁻²⁰ for what 64 bits round. So the sums of two data sets that differ in one record differ by at most its weight ·
clip_norm (docs/engine.md#norms).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

#: For the rounding of sums in 64 bits; enough for draws of 2**16 records in physical batches of any size.
SHRINK = 1 - 2.0**-20


class NonFiniteGradientError(Exception):
    """A gradient is not finite, and this engine cannot keep it to its own record: play the chunk again.

    records   places in the chunk that are known to be at fault: another record stands in for each, at weight 0. Where
              none are known, the chunk is played record by record
    """

    def __init__(self, records: Sequence[int] = ()) -> None:
        super().__init__("a gradient is not finite")
        self.records = tuple(records)


def broken(losses: Tensor) -> tuple[int, ...]:
    """Places whose very losses are not finite."""
    return tuple((~torch.isfinite(losses.detach())).nonzero()[:, 0].tolist())


class Engine(Protocol):
    """Turns the losses of one chunk into a sum of clipped gradients.

    attach       once: the model and the parameters to differentiate by, in order
    begin        before each chunk's forward pass: how many records it holds
    clipped_sum  after it: one 64-bit tensor per parameter. losses, clip_norm, weight: (batch,)
                 Zeros for a chunk of none. Leaves the graph free and no gradient in any p.grad. A record whose
                 gradient is not finite contributes nothing; if it may have spoilt others', raises
                 NonFiniteGradientError. Raises ModelError if the losses depend on no trained parameter at all.
    detach       hooks off
    """

    def attach(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None: ...

    def begin(self, records: int) -> None: ...

    def clipped_sum(self, losses: Tensor, clip_norm: Tensor, weight: Tensor) -> list[Tensor]: ...

    def detach(self) -> None: ...


def clip_factors(squared_norm: Tensor, clip_norm: Tensor, weight: Tensor) -> Tensor:
    """(batch,) 64-bit factors on the gradients; 0 where the norm is not finite, or the factor too small for 64 bits."""
    norm = squared_norm.double().sqrt()
    tiny = torch.finfo(torch.float64).tiny
    factor = weight.double() * (clip_norm.double() / norm.clamp_min(tiny)).clamp_max(1.0) * SHRINK
    # Below `tiny` numbers have fewer bits, and a factor may have been rounded up by much.
    return torch.where(torch.isfinite(norm) & (factor >= tiny), factor, torch.zeros_like(factor))
