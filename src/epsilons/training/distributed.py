"""The processes (ranks) that train one model together, as one of them sees the others. Alone, nothing here acts.

Coins and noise are functions of (key, phase, step). So every rank computes the whole draw and takes a part of it, and
every rank adds the same noise to the same sum: no record, coin, noise value or parameter is sent. Three things are
sent: the key (once), the clipped sums, and at every collective call the facts that a rank assumes. The facts must be
equal, or all ranks stop. A rank that fails joins the next collective call to report it, so that no other rank waits
for it. If a rank is gone, the process group reports it, at once or after its timeout.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError, ModelError, RankError

T = TypeVar("T")
DIGEST_BYTES = 16
_PLACE, _STOPPED, _VOTE = "where they are", "stopped", "vote"
#: What launchers set to the number of processes: torch, srun, Open MPI, other MPIs. Slurm sets the second one for the
#: tasks of srun, not for a batch script.
SIZES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
#: A rank that stops waits so long for others to learn it, where they may be in a call that the model makes.
SECONDS_TO_ABORT = timedelta(seconds=10)


class Ranks:
    """The default process group, seen from this rank. Rank 0 is the main one: it alone has the run's folder.

    rank, size    number of this rank, and number of ranks; 0 and 1 without a process group
    has_aborted   True after this rank stopped, or learned that another one did
    group         of the collective calls here; None for the default group
    shards        of a model that `fully_shard` has divided among the ranks; None for others
    """

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        self.has_aborted = False
        self.group: dist.ProcessGroup | None = None
        self.shards: Any = None  # a Shards: that module imports this one
        self._wrapper: nn.parallel.DistributedDataParallel | None = None
        started = launched_processes()
        if not joined and started > 1:
            raise RankError(
                f"torchrun started {started} processes without a process group: each would train on all records "
                'and release a sum with other noise. Call torch.distributed.init_process_group("gloo") (or "nccl" '
                "on GPUs) before make_private."
            )

    @property
    def is_main(self) -> bool:
        """True for rank 0, and for a process alone."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """True if there are other ranks."""
        return self.size > 1

    def part(self, drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """(part,) this rank's indices of a draw; every record goes to exactly one rank. It may be none."""
        return np.array_split(drawn, self.size)[self.rank]

    def parts(self, drawn: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """The part of each rank."""
        return np.array_split(drawn, self.size)

    def unwrapped(self, model: nn.Module) -> nn.Module:
        """The model in a DistributedDataParallel; any other model itself.

        Until `rewrap` the wrapper calls the model and nothing else, as in `no_sync`: gradients are summed here, once
        they are clipped. Raises ModelError for settings under which it does more than that.
        """
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            return model
        names = ("find_unused_parameters", "static_graph", "mixed_precision", "_use_python_reducer")
        if given := [name for name in names if getattr(model, name, None)]:
            raise ModelError(
                f"Got a DistributedDataParallel with {given[0].strip('_')}, which alters what the model returns. Pass "
                "the model itself (wrapped.module), on every rank, and call it in the loop: make_private adds up the "
                "clipped sums."
            )
        model.reducer._rebuild_buckets()  # here, where all ranks do it: the next call of the wrapper would
        self._wrapper, model.require_backward_grad_sync, model.require_forward_param_sync = model, False, False
        inner: nn.Module = model.module
        return inner

    def rewrap(self) -> None:
        """Let the wrapper do what it did before."""
        if self._wrapper is not None:
            self._wrapper.require_backward_grad_sync = self._wrapper.require_forward_param_sync = True

    def number(self, batch: int) -> int:
        """A number for this rank's physical batch, different from all others of the same draw."""
        return batch * self.size + self.rank

    # -- collective calls: every rank makes each of them --------------------------------------------------

    def check_agreement(self, where: str, facts: Mapping[str, Any] | None = None) -> None:
        """Wait for every rank, and check that all of them give the same facts.

        Facts are compared by ==. The message shows their values, except those given as bytes. Raises RankError, on
        every rank, if one disagrees, stopped, or cannot be reached.
        """
        if not self.is_distributed:
            return
        if self.has_aborted:
            raise RankError("This rank has stopped. Call make_private again, on all ranks.")
        note = {_PLACE: where, **(facts or {})}
        if self._is_equal_everywhere(repr(note)):
            return
        self._checked(self._gather(note))

    def any(self, where: str, vote: bool) -> bool:
        """Check agreement on the place; True if any rank votes True."""
        if not self.is_distributed:
            return vote
        if self.has_aborted:
            raise RankError("This rank has stopped. Call make_private again, on all ranks.")
        note = {_PLACE: where, _VOTE: vote}
        if self._is_equal_everywhere(repr(note)):
            return vote
        return any(note[_VOTE] for note in self._checked(self._gather(note), _VOTE))

    def gathered(self, where: str, value: T) -> list[T]:
        """Check agreement on the place; the value of each rank, by its number."""
        if not self.is_distributed:
            return [value]
        self.check_agreement(where)
        return [note[_VOTE] for note in self._checked(self._gather({_PLACE: where, _VOTE: value}), _VOTE)]

    def _checked(self, notes: Sequence[Mapping[str, Any]], but: str = "") -> Sequence[Mapping[str, Any]]:
        """Raise RankError where notes differ, without the entry of this name."""
        problem = self._problem([{name: value for name, value in note.items() if name != but} for note in notes])
        if problem:
            self.has_aborted = True
            raise RankError(problem)
        return notes

    def all_reduce(self, total: Tensor, where: str, facts: Mapping[str, Any]) -> None:
        """Check agreement on the facts, and replace a tensor by its sum over all ranks."""
        if self.is_distributed:
            with self._translating_errors():
                self.check_agreement(where, facts)
                dist.all_reduce(total)

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if not self.is_distributed:
            return value
        values = [value if self.is_main else None]
        with self._translating_errors():
            dist.broadcast_object_list(values, group=self.group)
        return values[0]  # type: ignore[return-value]  # rank 0's

    # -- when something fails --------------------------------------------------------------------------

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Report an error in the body to the other ranks."""
        try:
            yield
        except GeneratorExit:  # a loop was left; this is no error yet
            raise
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise

    @contextmanager
    def collective(self, where: str) -> Iterator[None]:
        """All ranks run the body, and continue once it succeeded on all of them."""
        with self.reporting_errors():
            yield
        self.check_agreement(where)

    def abort(self, reason: str = "") -> None:
        """Join the next collective call only to report that this rank stops. The first call counts.

        reason   the error that made it stop; "" if the run was closed without one
        """
        if self.is_distributed and not self.has_aborted:
            self.has_aborted = True
            if self.group is not None:  # the others may wait in a call that only the model makes
                dist.distributed_c10d._set_pg_timeout(SECONDS_TO_ABORT, self.group)
            with suppress(RankError):
                self._is_equal_everywhere("")
                self._gather({_STOPPED: reason})

    def _problem(self, notes: Sequence[Mapping[str, Any]]) -> str:
        stopped = {rank: note[_STOPPED] for rank, note in enumerate(notes) if _STOPPED in note}
        for rank, reason in stopped.items():
            if reason:
                return f"Rank {rank} stopped, and so must the others. Its error: {reason}"
        if stopped:
            return f"{_ranks(stopped)} closed the run before its end while others went on. Close it on all, or on none."
        given = dict.fromkeys(name for note in notes for name in note)
        names = [name for name in given if any(note.get(name) != notes[0].get(name) for note in notes)]
        if not names:
            return ""
        if _PLACE in names:
            names = [_PLACE]
        return f"The ranks disagree on {'; '.join(_difference(name, notes) for name in names)}. " + (
            "Start every rank with the same script, data, settings and initial weights (torch.manual_seed), and make "
            "the same calls on all of them."
        )

    def _is_equal_everywhere(self, text: str) -> bool:
        """True if all ranks pass the same text, by one small message. If not, every rank knows that notes follow."""
        digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
        device = torch.device("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")
        here = torch.tensor(list(digest), dtype=torch.uint8, device=device)
        everywhere = [torch.empty_like(here) for _ in range(self.size)]
        with self._translating_errors():
            dist.all_gather(everywhere, here, group=self.group)
        return all(torch.equal(there, here) for there in everywhere)

    def _gather(self, note: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        notes: list[Any] = [None] * self.size
        with self._translating_errors():
            dist.all_gather_object(notes, dict(note), group=self.group)
        return notes

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.has_aborted = True
            raise RankError(
                "Another rank cannot be reached: it ended, hangs, or took longer than the process group's timeout "
                f"({str(error).strip().splitlines()[0]}). Nothing of this step was applied here. With a folder, "
                "resume the run with RunFolder(path, resume=True), on as many ranks."
            ) from error
        except BaseException:
            self.has_aborted = True  # interrupted: which call the other ranks wait in is unknown
            raise


def check_alone(has_folder: bool) -> None:
    """Raise RankError if this is one of several processes that are in no process group, and each would train alone.

    has_folder: True for a run with a folder of its own: no two runs share one, so these are different runs.
    """
    if has_folder or (dist.is_available() and dist.is_initialized()):
        return
    for name in SIZES:
        if (size := os.environ.get(name, "")).isdigit() and int(size) > 1:
            raise RankError(
                f"{name}={size}: this is one of several processes, and they are in no process group. Each would train "
                "on all records and release a model, and no guarantee covers these models together. If they train one "
                'model, call torch.distributed.init_process_group("gloo") (or "nccl" on GPUs) before make_private. If '
                f"they are different runs, give each a folder of its own (run_dir, --run-dir), or remove {name} from "
                "the environment."
            )


def launched_processes() -> int:
    """The number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


@contextmanager
def process_group(device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun started, for the duration of the body; alone without torchrun.

    device  "auto", "cpu", "cuda", …: on GPUs every process uses the GPU of its local rank, and NCCL; else gloo

    Raises InputError if there is no GPU for each process.
    """
    if launched_processes() == 1 or dist.is_initialized():
        yield Ranks()
        return
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        _use_gpu(device, int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield Ranks()
        dist.barrier()  # a process that ends early would break the connections of the others
    finally:
        dist.destroy_process_group()


def _use_gpu(device: str, local_rank: int, gpus: int) -> None:
    if device not in ("auto", "cuda"):
        raise InputError(
            f'training.device must be "auto" or "cuda" for several processes, got {device!r}; each uses its own GPU.'
        )
    if local_rank >= gpus:
        raise InputError(f"Every process needs a GPU; torchrun started more processes than this machine's {gpus} GPUs.")
    torch.cuda.set_device(local_rank)


def _difference(name: str, notes: Sequence[Mapping[str, Any]]) -> str:
    values = [note.get(name) for note in notes]
    if any(isinstance(value, bytes) for value in values):
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        return f"{name} ({_ranks(odd).lower()} from rank 0)"
    return f"{name} ({', '.join(f'rank {rank}: {value}' for rank, value in enumerate(values))})"


def _ranks(ranks: Iterable[int]) -> str:
    listed = [str(rank) for rank in ranks]
    return f"Rank{'s' if len(listed) > 1 else ''} {', '.join(listed)}"
