"""What a LightningModule logs and counts while a batch is only checked: nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric


@contextmanager
def quiet(module: nn.Module, is_check: bool) -> Iterator[None]:
    """In a check nothing is logged, and metrics are afterwards as before."""
    if not is_check:
        yield
        return
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    states = [(metric, {k: v for k, v in vars(metric).items() if k in KEPT}, copied(metric)) for metric in metrics]
    module.__dict__["log"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del module.__dict__["log"]
        for metric, counts, values in states:
            vars(metric).update(counts | values)


#: What a metric keeps besides its states.
KEPT = ("_update_count", "_computed", "_forward_cache", "_update_called")


def copied(metric: Metric) -> dict[str, Any]:
    """Copies of a metric's states, which updates may write to."""
    values = {name: getattr(metric, name) for name in metric._defaults}
    return {name: list(v) if isinstance(v, list) else v.detach().clone() for name, v in values.items()}
