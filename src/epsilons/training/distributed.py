"""Ranks: the processes that train one model together, as one of them sees the others. Alone, nothing here acts.

Coins and noise are functions of (key, phase, step). So every rank computes the whole draw and takes its own part of it,
and every rank adds the same noise to the same sum: neither records nor coins, noise or parameters travel. What does
travel is the key (once), the clipped sums, and a note at every meeting of what each rank takes for granted. Notes must
be equal, or all ranks stop. A rank that fails goes to the next meeting to say so, so that no other waits for it; one
that is gone is missed by the process group, at once or after its timeout.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError, RankError

T = TypeVar("T")
DIGEST_BYTES = 16
_WORD, _LEFT = "where they are", "left"


class Ranks:
    """The default process group, from this rank. Rank 0 leads: it alone owns the run's folder."""

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        self._has_left = False
        started = launched_processes()
        if not joined and started > 1:
            raise RankError(
                f"torchrun started {started} processes, but they know nothing of each other: each would train on "
                'everybody and release noise of its own. Call torch.distributed.init_process_group("gloo") (or "nccl" '
                "on GPUs) before make_private."
            )

    @property
    def leads(self) -> bool:
        """True for rank 0, and for a process alone."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """True if there are others."""
        return self.size > 1

    @property
    def has_left(self) -> bool:
        """True once this rank has told the others that it goes no further, or has heard so from one of them."""
        return self._has_left

    def part(self, drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """This rank's records of a draw: every record falls to exactly one rank. It may be none."""
        return np.array_split(drawn, self.size)[self.rank]

    def number(self, chunk: int) -> int:
        """A number for this rank's chunk that no other rank's chunk of the same draw bears."""
        return chunk * self.size + self.rank

    # -- what travels ------------------------------------------------------------------------------

    def meet(self, where: str, facts: Mapping[str, Any] | None = None) -> None:
        """Wait until every rank is here, and go on if all take the same facts for granted.

        Facts are compared by ==; in the message, those given as bytes are named and never shown. Raises RankError, on
        every rank, if one disagrees, stopped, or cannot be reached.
        """
        if not self.several:
            return
        if self._has_left:
            raise RankError("This rank has left the others. Call make_private again, on all of them.")
        note = {_WORD: where, **(facts or {})}
        if self._all_say(repr(note)):
            return
        trouble = self._trouble(self._gather(note))
        if trouble:
            self._has_left = True
            raise RankError(trouble)

    def add(self, sums: Sequence[Tensor], where: str, facts: Mapping[str, Any]) -> None:
        """Meet, and replace each tensor by its sum over all ranks."""
        if not self.several:
            return
        flat = torch.cat([part.reshape(-1) for part in sums])  # what may fail comes before all rely on this rank
        with self._reaching():
            self.meet(where, facts)
            dist.all_reduce(flat)
        for part, total in zip(sums, torch.split(flat, [part.numel() for part in sums]), strict=True):
            part.copy_(total.reshape(part.shape))

    def first(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if not self.several:
            return value
        values = [value if self.leads else None]
        with self._reaching():
            dist.broadcast_object_list(values)
        return values[0]  # type: ignore[return-value]  # rank 0's

    # -- when something fails --------------------------------------------------------------------------

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others of an error in the body."""
        try:
            yield
        except GeneratorExit:  # a loop that was left: no error yet
            raise
        except BaseException as error:
            self.leave(f"{type(error).__name__}: {error}")
            raise

    @contextmanager
    def together(self, where: str) -> Iterator[None]:
        """All ranks do the body, and go on once it succeeded on all of them."""
        with self.telling():
            yield
        self.meet(where)

    def leave(self, reason: str = "") -> None:
        """Come to the next meeting only to say that there will be no other; nothing if this rank did so already."""
        if self.several and not self._has_left:
            self._has_left = True
            with suppress(RankError):
                self._all_say("")
                self._gather({_LEFT: reason})

    def _trouble(self, notes: Sequence[Mapping[str, Any]]) -> str:
        stopped = {rank: note[_LEFT] for rank, note in enumerate(notes) if _LEFT in note}
        for rank, reason in stopped.items():
            if reason:
                return f"Rank {rank} stopped, and so must the others. It said: {reason}"
        if stopped:
            return f"{_named(stopped)} closed the run before its end while others went on. Close it on all, or on none."
        names = [name for name in _union(notes) if any(note.get(name) != notes[0].get(name) for note in notes)]
        if not names:
            return ""
        if _WORD in names:
            names = [_WORD]
        return f"The ranks disagree on {'; '.join(_difference(name, notes) for name in names)}. " + (
            "Start every rank with the same script, data, settings and first weights (torch.manual_seed), and lead all "
            "of them through the same steps."
        )

    def _all_say(self, words: str) -> bool:
        """True if all ranks say the same: one small message. If not, all of them know that notes come next."""
        digest = hashlib.blake2b(words.encode(), digest_size=DIGEST_BYTES).digest()
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        own = torch.tensor(list(digest), dtype=torch.uint8, device=device)
        said = [torch.empty_like(own) for _ in range(self.size)]
        with self._reaching():
            dist.all_gather(said, own)
        return all(torch.equal(one, own) for one in said)

    def _gather(self, note: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        notes: list[Any] = [None] * self.size
        with self._reaching():
            dist.all_gather_object(notes, dict(note))
        return notes

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._has_left = True
            raise RankError(
                "Another rank cannot be reached: it ended, hangs, or took longer than the process group's timeout "
                f"({str(error).strip().splitlines()[0]}). Nothing of this step was applied here. With a folder, take "
                "the run up again with resume=True, on as many ranks."
            ) from error
        except BaseException:
            self._has_left = True  # interrupted in the middle: what the others wait for by now, nobody knows
            raise


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


def check_sum(tensors: Iterable[Tensor]) -> int:
    """A number that shows when values have drifted apart by a bit. Quick, and not a hash: some changes cancel in it."""
    total = 0
    for tensor in tensors:
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size(), torch.uint8)
        total = 31 * total + int(tensor.detach().contiguous().view(whole).sum(dtype=torch.int64))
    return total % 2**64


def hash_of(tensors: Iterable[Tensor]) -> str:
    """A name for these values: the same for the same bits, for no others."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _union(notes: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for note in notes for name in note))


def _difference(name: str, notes: Sequence[Mapping[str, Any]]) -> str:
    values = [note.get(name) for note in notes]
    if any(isinstance(value, bytes) for value in values):
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        return f"{name} ({_named(odd).lower()} from rank 0)"
    return f"{name} ({', '.join(f'rank {rank}: {value}' for rank, value in enumerate(values))})"


def _named(ranks: Iterable[int]) -> str:
    listed = [str(rank) for rank in ranks]
    return f"Rank{'s' if len(listed) > 1 else ''} {', '.join(listed)}"
