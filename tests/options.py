"""Options of a run in one flat dict, as tests write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from epsilons import Performance, Plan, Private
from epsilons.training.private_setup import set_up
from epsilons.training.requests import Request

_FIELDS = {field.name for field in fields(Performance)}


def split(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options for `make_private` or `fit`, with those of Performance gathered under performance=."""
    chosen = {name: value for name, value in options.items() if name in _FIELDS}
    rest = {name: value for name, value in options.items() if name not in _FIELDS}
    return rest | ({"performance": Performance(**chosen)} if chosen else {})


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, plan: Plan, **options: Any) -> Private:
    """A run whose loop calls `private._clip(batch)`, as `fit` does. loss: a function (model, batch) -> (batch,)."""
    return set_up(Request(model, optimizer, data, plan, **split({"compile": True} | options)))
