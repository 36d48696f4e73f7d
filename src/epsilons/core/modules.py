"""Walks over a model's modules and tensors, which checks take several times in each step.

torch's own (named_modules, parameters, buffers) are nested generators: on a model of 40 modules they take five times as
long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch

from ..errors import UnsupportedLayerError


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name with a dot at its end, module): each module once, the model first, under an empty name."""
    found, seen = [("", model)], {model}
    for prefix, module in found:  # grows while it is walked
        for name, child in module._modules.items():
            if child is not None and child not in seen:
                seen.add(child)
                found.append((f"{prefix}{name}.", child))
    return found


def tensors_of(model: nn.Module) -> list[Tensor]:
    """All parameters and buffers, each once, in a fixed order."""
    held = [tensors for _, m in named_modules(model) for tensors in (m._parameters, m._buffers)]
    found = list({id(t): t for tensors in held for t in tensors.values() if t is not None}.values())
    return [sharded(t) for t in found] if PAIRS else found


def names_of(model: nn.Module) -> list[str]:
    """The names of `tensors_of`, in its order; of a tensor with several names, the last one."""
    held = [(prefix, tensors) for prefix, m in named_modules(model) for tensors in (m._parameters, m._buffers)]
    named = {id(t): prefix + name for prefix, tensors in held for name, t in tensors.items() if t is not None}
    return list(named.values())


# -- Kernels for a CPU, and kernels for a GPU

#: Tests set it, so that every branch for GPUs runs on a CPU.
AS_ON_GPU = False


def is_on_cpu(tensor: Tensor) -> bool:
    """Whether kernels and sizes for a CPU are chosen. On a GPU each read of a value waits for all kernels before it."""
    return tensor.device.type == "cpu" and not AS_ON_GPU


# -- Parameters that torch's `fully_shard` has divided: each process holds some rows (training/sharded.py)
#
# Such a parameter is a DTensor. While a module computes, another parameter with all rows, its twin, is in its place.

#: (the sharded parameter, its twin) by the id of either, of models that are being trained.
PAIRS: dict[int, tuple[Tensor, Tensor]] = {}


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds a part of it. By name, because DTensor's module takes long to import."""
    return type(tensor).__name__ == "DTensor"


def is_divided(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on the model or a part of it. Afterwards no module holds all rows."""
    found: list[Any] = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    for module in found:
        module.reshard()
    return bool(found) or any(map(is_sharded, model.parameters()))


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: its rows of a sharded one, otherwise the tensor itself."""
    return tensor._local_tensor if type(tensor).__name__ == "DTensor" else tensor  # type: ignore[attr-defined]


def sharded(tensor: Tensor) -> Tensor:
    """The sharded parameter of a twin; any other tensor itself."""
    return PAIRS[id(tensor)][0] if id(tensor) in PAIRS else tensor


def twin(tensor: Tensor) -> Tensor:
    """The twin of a sharded parameter; any other tensor itself."""
    return PAIRS[id(tensor)][1] if id(tensor) in PAIRS else tensor


def writes(tensor: Tensor) -> int:
    """A number that grows with every write to the tensor; of a sharded parameter, to its rows here and to its twin."""
    if id(tensor) in PAIRS:
        return local(sharded(tensor))._version + twin(tensor)._version
    return tensor._version


# -- Modes of torch (`with` blocks that see every function or operator) that begin and end in different functions


def leave(mode: Any) -> None:
    """Remove a mode from the stack of active modes, at any depth. Nothing happens if it is not there."""
    kind, stack = (
        (overrides, overrides._get_current_function_mode_stack)
        if isinstance(mode, TorchFunctionMode)
        else (_python_dispatch, _python_dispatch._get_current_dispatch_mode_stack)
    )
    if not any(other is mode for other in stack()):
        return
    above = []
    while stack()[-1] is not mode:
        above.append(kind._pop_mode())
    mode.__exit__(None, None, None)
    for other in reversed(above):
        kind._push_mode(other)


# -- The recorded graph behind tensors, node by node


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


# -- The memory layout of convolutions: channels innermost, where a model takes it and a CPU computes faster with it
#
# A layout changes no value and no gradient but by rounding. A model may still depend on it: `x.view(n, -1)` behind a
# convolution is an error with channels innermost. So the layout is tried before training.

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def convolutions(model: nn.Module) -> list[nn.Module]:
    """The 2-D convolutions with their weights in the usual layout."""
    found = (module for module in model.modules() if isinstance(module, _CONVOLUTIONS))
    return [module for module in found if module.weight.is_contiguous()]


def lay_out(modules: Sequence[nn.Module], form: torch.memory_format) -> None:
    """Store the weights of these convolutions in this layout, in place; activations follow."""
    for module in modules:
        module.to(memory_format=form)  # type: ignore[call-overload]  # missing in torch's stubs


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Store its state in the layout of the parameters: fused optimizers pair numbers by their places in memory."""
    for p, state in optimizer.state.items():
        for name, held in state.items() if isinstance(p, Tensor) and isinstance(state, dict) else ():
            if isinstance(held, Tensor) and held.shape == p.shape and held.stride() != p.stride():
                state[name] = torch.empty_like(p.detach(), dtype=held.dtype, device=held.device).copy_(held)


def prefers_channels_last(model: nn.Module) -> bool:
    """True if all convolutions are 32-bit and on a CPU, where channels_last is faster or costs a few percent at most.

    Max pooling gains most (docs/engine.md#allocator-and-memory-layout).
    """
    found = [module for module in model.modules() if isinstance(module, _CONVOLUTIONS)]
    is_fast = all(m.weight.dtype == torch.float32 and m.weight.device.type == "cpu" for m in found)
    return bool(found) and is_fast and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def note(error: BaseException | None, changed: Sequence[nn.Module]) -> None:
    """Add to an error of a loop what to do if the layout caused it."""
    if changed and isinstance(error, RuntimeError) and "view" in str(error) and "stride" in str(error):
        error.add_note(
            "epsilons stores the weights of this model's convolutions with the channels innermost, which is faster on "
            "CPUs. Use .reshape or .flatten, or set Performance(channels_last=False)."
        )
