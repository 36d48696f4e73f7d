"""The recorded graph behind tensors, node by node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
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


def check_graph(losses: Tensor) -> None:
    """Raise UnsupportedLayerError for a graph that cannot be differentiated as it should.

    Where a part is recorded in the backward pass only, the gradients of its parameters cannot be clipped, so noise
    alone would train them. Another would end the process (`ends_the_process`).
    """
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_of([losses])):
        raise UnsupportedLayerError(
            "A part of the model is in torch.utils.checkpoint with use_reentrant=True. Its parameters are not in the "
            "graph of the losses, so their gradients cannot be clipped, and noise alone would train them. Pass "
            "use_reentrant=False."
        )
    if ends_the_process([losses]):
        raise UnsupportedLayerError(
            "A GroupNorm has an input with the channels innermost (channels_last) that needs no gradient: it is data, "
            "or comes from frozen layers. Torch's backward pass ends the process there. Leave out channels_last, or "
            "call .contiguous() on the input of the GroupNorm."
        )


def ends_the_process(tensors: Sequence[Tensor]) -> bool:
    """Whether torch's backward pass would be a segmentation fault: seen in torch 2.13, on CPUs.

    GroupNorm reads a null pointer if its input has the channels innermost and needs no gradient (it is data, or comes
    from frozen layers).
    """
    return any(
        type(node).__name__.startswith("NativeGroupNormBackward")
        and node.next_functions[0][0] is None
        and _has_channels_innermost(node._saved_input)
        for node in nodes_of(tensors)
    )


def _has_channels_innermost(tensor: Tensor) -> bool:
    from torch._prims_common import suggest_memory_format  # torch has no public function for what operators go by

    return tensor.device.type == "cpu" and suggest_memory_format(tensor) != torch.contiguous_format
