"""Forward passes that write to their model: values computed from the data would enter it without clipping or noise.

And numbers in attributes of modules, which a loop may write to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..modules import named_modules
from . import messages

#: Numbers in attributes of modules, by module and name.
Numbers = dict[tuple[nn.Module, str], float]


def contents(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all tensors that a model keeps: parameters, buffers, and plain attributes outside any graph."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and not value.requires_grad:
                tensors[f"{name}.{attribute}".strip(".")] = value
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def check_contents(before: dict[str, Tensor], model: nn.Module) -> None:
    """Refuse a model that a forward pass wrote to, by whatever way. Raises UnsupportedLayerError."""
    after = contents(model)
    changed = [
        name
        for name in sorted({*before, *after})
        if name not in before
        or name not in after
        or before[name].shape != after[name].shape
        or not torch.allclose(before[name], after[name], rtol=0.0, atol=0.0, equal_nan=True)
    ]
    if changed:
        raise messages.writes(changed)


def numbers_in(model: nn.Module) -> Numbers:
    return {
        (module, name): value
        for _, module in named_modules(model)
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


@contextmanager
def set_to(numbers: Numbers) -> Iterator[None]:
    """Set these attributes inside. Afterwards they are as before."""
    before = {(module, name): getattr(module, name) for module, name in numbers}
    try:
        for (module, name), value in numbers.items():
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)
