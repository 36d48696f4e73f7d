"""Logistic regression and a multilayer perceptron.

tanh by default: bounded activations keep gradients small, so less of them is clipped away (Papernot et al., Tempered
Sigmoid Activations for Deep Learning with Differential Privacy, AAAI 2021).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from ...errors import InputError, named
from .shapes import MOST_LAYERS

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


def logistic(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One linear layer on the flattened record; linear regression if the target is a number."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


def mlp(shape: tuple[int, ...], outputs: int, hidden: Sequence[int] = (64,), activation: str = "tanh") -> nn.Module:
    """Linear layers with `hidden` units each; activation: "tanh", "relu" or "gelu"."""
    activate = named(ACTIVATIONS, activation, "activation")
    is_list = not isinstance(hidden, str | int | float) and len(hidden) <= MOST_LAYERS
    if not (is_list and all(isinstance(width, int) and width >= 1 for width in hidden)):
        raise InputError(f"hidden lists at most {MOST_LAYERS:,} layer widths, e.g. [64, 64], got {hidden!r:.80}.")
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    for next_width in hidden:
        layers += [nn.Linear(width, next_width), activate()]
        width = next_width
    return nn.Sequential(*layers, nn.Linear(width, outputs))
