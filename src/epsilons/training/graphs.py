"""The recorded graph behind tensors, node by node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ..errors import UnsupportedLayerError


def nodes_of(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """Every node of the graph that these tensors depend on, once."""
    nodes = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                nodes.append(source)


def leaves_of(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaves that these tensors depend on."""
    yield from (t for t in tensors if t.grad_fn is None and t.requires_grad)
    for node in nodes_of(tensors):
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable


def check_recorded(losses: Tensor) -> None:
    """Raise UnsupportedLayerError if a part of the graph is recorded in the backward pass only.

    The parameters of such a part have no gradient that can be clipped, so noise alone would train them.
    """
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_of([losses])):
        raise UnsupportedLayerError(
            "A part of the model is in torch.utils.checkpoint with use_reentrant=True. Its parameters are not in the "
            "graph of the losses, so their gradients cannot be clipped, and noise alone would train them. Pass "
            "use_reentrant=False."
        )
