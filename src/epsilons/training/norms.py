"""The layers that `mend` puts in the place of BatchNorm: none of them mixes records."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F


class FrozenNorm(nn.Module):
    """A BatchNorm with constant statistics: (x - running_mean) / sqrt(running_var + eps) * weight + bias, per channel.

    The statistics are buffers that no forward pass changes, in either mode. Weight and bias are those of the layer
    that is frozen, and are trained if they were trained before. The names of parameters and buffers are those of
    BatchNorm, so the same state_dict can be loaded.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: nn.modules.batchnorm._NormBase) -> None:
        super().__init__()
        self.num_features, self.eps = norm.num_features, norm.eps
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, …) -> the same shape."""
        weight, bias = cast("Tensor | None", self.weight), cast("Tensor | None", self.bias)
        return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, False, 0.0, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"


class Activated(nn.Module):
    """Adds the dropout and the activation of a layer of timm, under the names that they have there."""

    drop: nn.Module
    act: nn.Module

    def activate_as(self, norm: nn.Module) -> None:
        self.drop = getattr(norm, "drop", None) or nn.Identity()
        self.act = getattr(norm, "act", None) or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.act(self.drop(super().forward(x))))


class GroupNormAct(Activated, nn.GroupNorm):
    """GroupNorm, then dropout and activation."""


class FrozenNormAct(Activated, FrozenNorm):
    """FrozenNorm, then dropout and activation."""
