"""Loop: the reference for all engines. One autograd call per record or person on the recorded graph, clip, add.

Slow and simple. It differentiates what the caller computed, whatever the model consists of. One thing is changed: a few
operators of torch add the rows of a gradient in 16 bits if their inputs have 16, which was wrong by 15 % for layer
normalisation of 16,384 rows. All engines let them add in 32 (`added_in_32_bits`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .engine import (
    HALF,
    NonFiniteGradientError,
    clip_factors,
    no_bare_errors,
    non_finite_losses,
    persons_in,
    to_32_bits,
)
from .ghost.graph import check_connected


class Loop:
    """One autograd call per record, for every model with losses that each depend on one record alone.

    With persons, one call by the mean of each person's losses.
    """

    def attach(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    def begin(self, records: int) -> None:
        pass

    @no_bare_errors()
    def clipped_sum(
        self, losses: Tensor, clip_norm: Tensor, weight: Tensor, sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        total = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]
        dtypes = check_connected(losses, self._parameters) if len(losses) else ()
        persons = persons_in(losses, clip_norm, sizes)
        means = losses if persons is None else persons.means(losses)
        for i in range(len(means)):
            with added_in_32_bits(dtypes):
                gradient = record_gradient(means, i, self._parameters, keep_graph=i < len(means) - 1)
            squared = torch.stack([g.double().square().sum() for g in gradient if g is not None] or [total[0].sum()])
            # A backward pass through the physical batch multiplies values of other records by 0, and 0·NaN is NaN. So
            # another record may have caused a gradient that is not finite.
            if not torch.isfinite(squared.sum()) and len(means) > 1:
                raise NonFiniteGradientError(non_finite_losses(losses))
            factor = clip_factors(squared.sum()[None], clip_norm[i : i + 1], weight[i : i + 1], dtypes)[0]
            for sum_, g in zip(total, gradient, strict=True):
                if g is not None and factor > 0:
                    sum_.add_(g.double() * factor)
        return total

    def detach(self) -> None:
        pass


def record_gradient(
    losses: Tensor, record: int, parameters: Sequence[nn.Parameter], keep_graph: bool
) -> list[Tensor | None]:
    """The gradient of one record's loss by each parameter; None where the loss does not depend on it."""
    return gradient_of(losses[record], parameters, keep_graph)


def gradient_of(total: Tensor, parameters: Sequence[nn.Parameter], keep_graph: bool = True) -> list[Tensor | None]:
    """By each parameter; None where this number does not depend on it."""
    gradients = torch.autograd.grad(total, list(parameters), retain_graph=keep_graph, allow_unused=True)
    return [None if g is None else strided(g) for g in gradients]


def strided(gradient: Tensor) -> Tensor:
    """Sparse gradients (Embedding(sparse=True)) as ordinary tensors."""
    return gradient if gradient.layout is torch.strided else to_32_bits(gradient).to_dense()


# -- 16 bits ------------------------------------------------------------------------------------------------

#: Operators of a backward pass that add rows in the type of their inputs, not in 32 bits (torch 2.13, on some CPUs or
#: all). Those of layers have a list of three results that are wanted as their last argument: by input, weight and bias.
_OF_LAYERS = {torch.ops.aten.native_layer_norm_backward.default, torch.ops.aten.convolution_backward.default}
_ADDING = {
    *_OF_LAYERS,
    torch.ops.aten.embedding_dense_backward.default,
    torch.ops.aten._embedding_bag_backward.default,
    torch.ops.aten.index_put.default,
}


def added_in_32_bits(dtypes: Collection[torch.dtype]) -> AbstractContextManager[Any]:
    """For backward passes in which gradients have these types: all operators add in 32 bits at least."""
    return nullcontext() if HALF.isdisjoint(dtypes) else _AddedIn32Bits()  # type: ignore[no-untyped-call]


class _AddedIn32Bits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The gradients by weights have 32 bits here; autograd rounds each once to the type that it expects."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _ADDING or args[0].dtype not in HALF:
            return func(*args, **kwargs)
        wide = tree_map_only(Tensor, to_32_bits, args)
        if func not in _OF_LAYERS:
            return func(*wide, **kwargs)
        # The gradient by the input is no sum over rows: it stays as it is without this mode.
        *rest, (by_input, *others) = args
        by_weights = func(*wide[:-1], [False, *others], **kwargs)[1:]
        return func(*rest, [by_input, False, False], **kwargs)[0], *by_weights
