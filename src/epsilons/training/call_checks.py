"""The batch-independence check of a model's calls, where the loop around them is not to see altered batches.

Each outermost call of the batch is made again with its inputs in the altered forms. A random combination of each
record's outputs takes the place of its loss. What the loop does with the outputs is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import batches, checkpoints
from .batches import Gathered
from .datasets import seed_torch
from .independence.check import IndependenceCheck
from .microbatches import Issued
from .parts import Parts


@dataclass(frozen=True)
class Call:
    """One call of a module."""

    module: nn.Module
    args: Any
    kwargs: Any


def check_calls(parts: Parts, issued: Issued, calls: Sequence[Call], is_first: bool) -> None:
    """Check every call of a physical batch. Raises BatchDependenceError and UnsupportedLayerError."""
    generators = checkpoints.of_generators()
    try:
        for call in calls:
            _check(parts, issued, call, is_first)
    finally:
        checkpoints.into_generators(generators)


def _check(parts: Parts, issued: Issued, call: Call, is_first: bool) -> None:
    count = len(issued.indices)
    inputs = batches.mapped((call.args, call.kwargs), lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
    gathered = Gathered(lambda rows: batches.take(inputs, rows, count))
    most = min(parts.largest, len(parts.source) * parts.persons.views)
    check = IndependenceCheck(gathered, count, most, issued.physical.step, parts.model, parts.parameters, is_first)
    for variant, (args, kwargs) in check.forms():
        try:
            seed_torch(0, parts.device)
            losses = _combined(call.module(*args, **kwargs), len(variant.rows))
        finally:
            check.stop()
        check.observe(losses)


def _combined(outputs: Any, records: int) -> Tensor:
    """(records,) a combination of each record's outputs, with the same random weights in every form."""
    total: Tensor | None = None
    for number, output in enumerate(t for t in batches.tensors(outputs) if t.requires_grad and t.ndim):
        if len(output) != records:
            continue  # refused if the loss uses it
        shape = output.shape[1:]
        weights = torch.from_numpy(np.random.default_rng(number).standard_normal(shape)).to(output)
        product = (output * weights).reshape(records, -1).sum(1).float()
        total = product if total is None else total + product
    assert total is not None
    return total
