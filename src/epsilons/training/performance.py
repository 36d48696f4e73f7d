"""Performance: the settings that make training faster or smaller, and leave plan and accounting as they are."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import DataError, InputError
from .clipping import Engine

#: The default physical batch is so large that its per-record gradients, where an engine writes them out, have about
#: this many values: 64 MB take about one cache's time, and larger physical batches were no faster.
VALUES_PER_BATCH = 2**24
SMALLEST_BATCH, LARGEST_BATCH = 16, 256

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


@dataclass(frozen=True)
class Performance:
    """How sums are computed. No field changes the plan or what is charged; most change results by rounding alone.

    The guarantee depends on no field, given each record's computed gradient (docs/engine.md#norms bounds the rounding).
    With more than one record in a physical batch, a record can change how the gradients of others are computed:
    docs/limits.md has an example, which max_physical_batch=1 prevents.

    engine              "auto", "loop" (the reference), "vmap", "ghost", or an object that implements clipping.Engine.
                        Engines differ by rounding
    max_physical_batch  largest number of records that are computed at once; None derives 16 to 256 from the size of
                        the model. It changes rounding (docs/engine.md#norms has bounds). 1 computes every record alone
    num_workers         processes that read a map-style data set, as in torch.utils.data.DataLoader. Same bits
    compile             True compiles the step on its first physical batch: up to a minute, worth it for embeddings and
                        transformers. CPUs with a C++ compiler and the engine ghost only; `fit` and configs only. It
                        changes rounding
    allocator           True makes glibc keep freed memory in the process, for the whole process until it ends. Same
                        bits
    channels_last       True stores the weights of 2-D convolutions with the channels innermost, which convolutions on
                        CPUs compute faster. It changes rounding

    A run that is resumed under another engine, max_physical_batch, compile or channels_last begins a new key epoch,
    because rounding may change a sum. The key of a seeded run does not depend on any field.

    Raises DataError if max_physical_batch is not positive.

    >>> Performance(engine="vmap", max_physical_batch=64).max_physical_batch
    64
    """

    engine: str | Engine = "auto"
    max_physical_batch: int | None = None
    num_workers: int = 0
    compile: bool = False
    allocator: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        if self.max_physical_batch is not None and self.max_physical_batch < 1:
            raise DataError(f"max_physical_batch must be at least 1, got {self.max_physical_batch}.")

    def as_settings(self, engine: Engine) -> dict[str, Any]:
        """The fields as JSON values for run.json, with the name of the engine that was chosen."""
        return asdict(replace(self, engine=type(engine).__name__.lower()))

    def apply(self, model: nn.Module) -> None:
        """Set up the process's allocator and the model's memory layout, as far as the fields ask for it."""
        if self.allocator:
            use_allocator()
        if self.channels_last:
            to_channels_last(model)


def default_physical_batch(model: nn.Module, parameters: Sequence[nn.Parameter]) -> int:
    """How many records are computed at once by default. Tables that one lookup uses count with their used rows."""
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    tables = {
        id(m.weight)
        for m in model.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and uses[id(m.weight)] == 1
    }
    size = sum(p.numel() for p in parameters if id(p) not in tables)
    return max(SMALLEST_BATCH, min(LARGEST_BATCH, VALUES_PER_BATCH // max(size, 1)))


def use_allocator() -> None:
    """Have glibc's malloc keep large blocks (mallopt(3)). Raises InputError where there is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
        is_set = mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError, TypeError):
        is_set = False
    if not is_set:
        raise InputError("allocator=True sets up glibc's malloc, and this process does not use glibc. Leave it out.")


def to_channels_last(model: nn.Module) -> None:
    """Store the weights of 2-D convolutions with the channels innermost, in place; activations follow."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs
