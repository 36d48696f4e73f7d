"""Performance: the settings that make training faster or smaller, and leave plan and accounting as they are."""

from __future__ import annotations

import copy
import ctypes
import logging
import math
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..clipping import Engine
from ..core.modules import convolutions, ends_the_process, lay_out, prefers_channels_last
from ..draws.batches import tensors
from ..errors import DataError, InputError

# -- What is found out about a model before training, on a copy of it and zeros in the shape of the first record

#: A larger model is not copied: 512 MB of 32-bit parameters.
LARGEST_COPY = 2**27
#: Two computations of one model on zeros may differ by rounding alone.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Trial:
    """What a model did with zeros; nothing is known of a model that could not be tried.

    saved                bytes per record that the forward pass keeps for the backward pass
    takes_channels_last  True if it computes the same with this layout, can be differentiated, and returns no picture
    """

    saved: int | None = None
    takes_channels_last: bool = False

    @classmethod
    def of(cls, model: nn.Module, batch: Any) -> Trial:
        """Try the model on two records in the shapes of this batch; it is called with the batch's first tensor.

        False for a model that returns pictures, because a loop may depend on their layout.
        """
        shapes = tensors(batch)
        if not shapes or sum(p.numel() for p in model.parameters()) > LARGEST_COPY:
            return cls()
        try:
            tried = copy.deepcopy(model).eval()
            inputs = _inputs(tried, shapes[0])
            return cls() if inputs is None else cls(_saved(tried, inputs), _takes_channels_last(tried, inputs))
        except Exception:  # a custom model may raise anything; then the settings do not depend on it
            return cls()


def _inputs(model: nn.Module, like: Tensor) -> Tensor | None:
    """Zeros that the model takes; loops often convert 8-bit pictures themselves. None if it takes neither."""
    zeros = torch.zeros_like(like)
    for inputs in (zeros, zeros.float()):
        try:
            _outputs(model, inputs)
        except Exception:
            continue
        return inputs
    return None


def _outputs(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return tensors(model(inputs))


def _saved(model: nn.Module, inputs: Tensor) -> int:
    """Bytes per record that are kept for the backward pass, besides parameters and inputs."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), inputs)}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return storage  # the tensor knows the graph, which would keep itself in memory for ever

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda storage: storage):
        _ = model(inputs)
    return sum(sizes.values()) // len(inputs)


def _takes_channels_last(model: nn.Module, inputs: Tensor) -> bool:
    if not (found := convolutions(model)):
        return False
    usual = _outputs(model, inputs)
    lay_out(found, torch.channels_last)
    with torch.enable_grad():
        ours = tensors(model(inputs))
    return not ends_the_process(ours) and _is_alike(usual, [t.detach() for t in ours])


def _is_alike(usual: Sequence[Tensor], ours: Sequence[Tensor]) -> bool:
    return len(usual) == len(ours) > 0 and all(
        a.ndim != 4 and a.shape == b.shape and torch.allclose(a, b, _ROUNDING, _ROUNDING)
        for a, b in zip(usual, ours, strict=True)
    )


# -- Performance: the settings that make training faster or smaller, and leave plan and accounting as they are

#: The default physical batch is so large that its per-record gradients, where an engine writes them out, have about
#: this many values. That is 128 MB; larger physical batches were no faster.
VALUES_PER_BATCH = 2**25
#: Larger models have more, because small physical batches are slow: up to 1 GB for 32 records, and then 16 records.
MOST_VALUES, SMALL_BATCH, SMALLEST_BATCH = 2**28, 32, 16
LARGEST_BATCH = 512
#: The activations of a physical batch take so many bytes at most.
MOST_SAVED = 2**30
#: Of large draws, smaller physical batches leave room for rounding (docs/engine.md#norms).
LARGE_DRAW, LARGEST_OF_LARGE = 2**14, 256

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
#: "quota period" in microseconds, of the control group of this process (Linux' cgroup v2); "max" is no limit.
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")

Auto = Literal["auto"]
#: More threads than any machine has CPUs. A process that asks for a million ends, and others cannot start meanwhile.
MOST_THREADS = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Performance:
    """How sums are computed. No field changes the plan or what is charged; most change results by rounding alone.

    Fields that are "auto" are decided by rules before the first step, from the model, the shapes of the records and the
    machine; no timing is involved, so a run that is resumed decides the same. run.json has what was chosen.

    The guarantee depends on no field, given each record's computed gradient (docs/engine.md#norms bounds the rounding).
    With more than one record in a physical batch, a record can change how the gradients of others are computed:
    docs/concepts.md#what-no-check-can-see has an example, which max_physical_batch=1 prevents.

    engine              "auto", "loop" (the reference), "vmap", "ghost", or an object that implements training.Engine.
                        These names differ by rounding; an object may compute another sum
    max_physical_batch  largest number of records that are computed at once; "auto" derives it from the size of the
                        model, the memory of a forward pass and the expected draw: 16 to about 600. It changes rounding
                        (docs/engine.md#norms has bounds). 1 computes every record alone
    num_workers         processes that read a map-style data set, as in torch.utils.data.DataLoader. Same bits
    allocator           True makes glibc keep freed memory in the process, for the whole process until it ends. "auto"
                        does so in `fit` and on the command line, where there is glibc. Same bits
    channels_last       True stores the weights of 2-D convolutions with the channels innermost, which convolutions on
                        CPUs compute faster, and leaves them so. "auto" does so on a CPU for a model that was tried with
                        this layout on zeros, and restores the usual layout at the end. It changes rounding
    threads             number of threads of torch in this process, until it ends. "auto" leaves torch's, but in `fit`
                        and on the command line lowers it to the CPUs that a container may use. It changes rounding

    A run that is resumed under another engine, max_physical_batch, channels_last or number of threads begins a
    new key epoch, because rounding may change a sum. The key of a seeded run does not depend on any field.

    Raises DataError if max_physical_batch or threads is out of range, InputError for other words than "auto".

    >>> Performance(engine="vmap", max_physical_batch=64).max_physical_batch
    64
    """

    engine: str | Engine = "auto"
    max_physical_batch: int | Auto = "auto"
    num_workers: int = 0
    allocator: bool | Auto = "auto"
    channels_last: bool | Auto = "auto"
    threads: int | Auto = "auto"

    def __post_init__(self) -> None:
        for name in ("max_physical_batch", "threads"):
            number = getattr(self, name)
            if number != "auto" and (isinstance(number, bool) or not isinstance(number, int)):
                raise InputError(f'{name} must be a whole number or "auto", got {number!r}.')
            if number != "auto" and number < 1:
                raise DataError(f"{name} must be at least 1, got {number}.")
        if self.threads != "auto" and self.threads > MOST_THREADS:
            raise DataError(f"threads must be at most {MOST_THREADS}, got {self.threads}.")
        for name in ("allocator", "channels_last"):
            if getattr(self, name) not in (True, False, "auto"):
                raise InputError(f'{name} must be True, False or "auto", got {getattr(self, name)!r}.')

    def decided(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        engine: Engine,
        expected: float,
        trial: Trial,
        is_whole_loop: bool = False,
    ) -> Decided:
        """What "auto" stands for here.

        expected       number of rows in the largest expected draw
        trial          what the model did with zeros
        is_whole_loop  True for `fit` and the command line, which may set up the process
        """
        takes = trial.takes_channels_last and prefers_channels_last(model)
        largest = self.max_physical_batch
        if largest == "auto":
            largest = default_physical_batch(model, parameters, expected, trial.saved)
        return Decided(
            engine=type(engine).__name__.lower(),
            max_physical_batch=largest,
            num_workers=self.num_workers,
            allocator=is_whole_loop and has_glibc() if self.allocator == "auto" else self.allocator,
            channels_last=takes if self.channels_last == "auto" else self.channels_last,
            threads=self._threads(is_whole_loop),
        )

    def _threads(self, is_whole_loop: bool) -> int:
        if self.threads != "auto":
            return self.threads
        return min(torch.get_num_threads(), cpu_limit()) if is_whole_loop else torch.get_num_threads()

    @property
    def needs_trial(self) -> bool:
        """True if something depends on what the model does with a record."""
        return self.max_physical_batch == "auto" or self.channels_last == "auto"


@dataclass(frozen=True)
class Decided:
    """The fields of Performance, with nothing left to decide; engine is its name. They are in run.json."""

    engine: str
    max_physical_batch: int
    num_workers: int
    allocator: bool
    channels_last: bool
    threads: int

    def set_up_process(self) -> None:
        """The allocator and the number of threads, and a line of the log about all fields."""
        if self.allocator:
            use_allocator()
        if self.threads != torch.get_num_threads():
            torch.set_num_threads(self.threads)
        _log.info("Performance: %s.", self)

    def __str__(self) -> str:
        parts = [
            f"engine {self.engine}",
            f"physical batches of up to {self.max_physical_batch:,} rows",
            f"{self.threads} thread{'s' * (self.threads > 1)}",
            "channels last" if self.channels_last else "",
            "freed memory is kept" if self.allocator else "",
            f"{self.num_workers} workers" if self.num_workers else "",
        ]
        return ", ".join(part for part in parts if part)


def default_physical_batch(
    model: nn.Module, parameters: Sequence[nn.Parameter], expected: float = 1.0, saved: int | None = None
) -> int:
    """How many rows are computed at once by default. Tables that one lookup uses count with their used rows.

    expected  rows in the largest expected draw; usual draws are divided into parts of nearly this size
    saved     bytes per row that a forward pass keeps
    """
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    tables = {
        id(m.weight)
        for m in model.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and uses[id(m.weight)] == 1
    }
    size = max(1, sum(p.numel() for p in parameters if id(p) not in tables))
    by_gradients = max(SMALLEST_BATCH, min(SMALL_BATCH, MOST_VALUES // size), VALUES_PER_BATCH // size)
    largest = min(LARGEST_OF_LARGE if expected > LARGE_DRAW else LARGEST_BATCH, by_gradients)
    if expected <= LARGE_DRAW:
        parts = max(1, round(expected / largest))
        largest = max(largest, math.ceil((expected + 4 * math.sqrt(expected)) / parts))
    return max(1, min(largest, MOST_SAVED // saved if saved else largest))


def use_allocator() -> None:
    """Have glibc's malloc keep large blocks (mallopt(3)). Raises InputError where there is no glibc."""
    mallopt = _mallopt()
    if mallopt is None or not (mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)):
        raise InputError("allocator=True sets up glibc's malloc, and this process does not use glibc. Leave it out.")


def has_glibc() -> bool:
    """True if this process uses glibc's malloc."""
    return _mallopt() is not None


def _mallopt() -> Any:
    """glibc's function; None elsewhere. (musl has no mallopt.)"""
    with suppress(OSError, AttributeError, TypeError):
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018
        return libc.mallopt
    return None


def cpu_limit() -> int:
    """The number of CPUs that this process's container may use, rounded up; without a limit, more than there are."""
    with suppress(OSError, ValueError):
        quota, period = CPU_QUOTA.read_text().split()
        return max(1, math.ceil(int(quota) / int(period)))  # "max" is no number
    return sys.maxsize
