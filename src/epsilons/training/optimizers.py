"""Optimizers by name, class or function, and the settings that they are used with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from .losses import by_name

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_NUMBER = (int, float, Tensor)

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}

#: The learning rate of an optimizer with a name, unless another is given.
LEARNING_RATE = 0.1


def optimizer_maker(optimizer: Any, lr: float | None, momentum: float | None) -> MakeOptimizer:
    """A function parameters -> optimizer. Raises InputError for settings that the optimizer would ignore."""
    given = {name: value for name, value in {"lr": lr, "momentum": momentum}.items() if value is not None}
    listed = " and ".join(f"{name}={value:g}" for name, value in given.items())
    if isinstance(optimizer, str):
        kind = by_name(OPTIMIZERS, optimizer, "optimizer")
        given = {"lr": LEARNING_RATE} | given
    elif isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        kind = optimizer
    elif callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        if given:
            raise InputError(
                f"Got {listed} and a function that makes the optimizer, which would ignore it. Set it in the function, "
                "e.g. lambda parameters: torch.optim.SGD(parameters, lr=0.5)."
            )
        make: MakeOptimizer = optimizer
        return make
    else:
        raise InputError(
            f"Pass 'sgd', 'adam' or 'adamw', a class such as torch.optim.SGD, or a function parameters -> optimizer, "
            "e.g. lambda parameters: torch.optim.SGD(parameters, lr=0.1); got an optimizer "
            f"({type(optimizer).__name__})."
        )
    known = inspect.signature(kind).parameters
    if not given.get("momentum", 1) and "momentum" not in known:
        del given["momentum"]  # momentum=0 asks for nothing
    ignored = [name for name in given if name not in known]
    if ignored:
        betas = "Its averages are set by betas: " if "betas" in known else "Pass what it takes: "
        raise InputError(
            f"{kind.__name__} has no {ignored[0]}, got {ignored[0]}={given[ignored[0]]:g}. {betas}"
            f"optimizer=lambda parameters: torch.optim.{kind.__name__}(parameters, …)."
        )
    return lambda parameters: kind(parameters, **given)


def optimizer_settings(optimizer: torch.optim.Optimizer) -> dict[str, float | list[float]]:
    """The optimizer's learning rate and momentum; a list if its groups of parameters differ."""
    settings: dict[str, float | list[float]] = {}
    for name in ("lr", "momentum"):
        values = [float(group[name]) for group in optimizer.param_groups if isinstance(group.get(name), _NUMBER)]
        if values:
            settings[name] = values[0] if len(set(values)) == 1 else values
    return settings
