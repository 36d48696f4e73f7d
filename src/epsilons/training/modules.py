"""Walks over a model's modules and tensors, which checks take several times in each step.

torch's own (named_modules, parameters, buffers) are nested generators: on a model of 40 modules they take five times as
long.
"""

from __future__ import annotations

from torch import Tensor, nn


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
    return list({id(t): t for tensors in held for t in tensors.values() if t is not None}.values())


def names_of(model: nn.Module) -> list[str]:
    """The names of `tensors_of`, in its order; of a tensor with several names, the last one."""
    held = [(prefix, tensors) for prefix, m in named_modules(model) for tensors in (m._parameters, m._buffers)]
    named = {id(t): prefix + name for prefix, tensors in held for name, t in tensors.items() if t is not None}
    return list(named.values())
