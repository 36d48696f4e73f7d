"""Checksums of tensors: whether something wrote to them, and whether an update is the one that was released before.

CheckSums   in one process: what is in a model before and after; of weights that no update writes to, rarely read
hash_of     for other processes, and for keys that follow from a seed: BLAKE2b of all bits
tree_hash   for the ledger: of an update, in a fraction of the time
check_sum   for other processes: one number, fast, and no hash
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .modules import is_on_cpu, local
from .threads import for_each

# -- Checksums in one process: they show writes that change no version, such as `tensor.data[0] = x`

#: Words of 64 bits that are so far apart are added: a prime, unlike the widths of layers.
COLUMNS = 4093


def is_small(tensor: Tensor) -> bool:
    """Whether it is hashed whole, which then takes no longer than to add its words first."""
    return local(tensor).numel() * tensor.element_size() < 16 * COLUMNS


def storage_of(tensor: Tensor) -> int:
    """Where the memory begins that this tensor lies in."""
    return local(tensor).untyped_storage().data_ptr()


@dataclass(frozen=True, eq=False)
class CheckSums:
    """What some tensors hold.

    sums      one number for each tensor, from all bits. It changes with any one of them. Of several changes of a large
              tensor, those may cancel that lie a multiple of COLUMNS words apart
    aliases   of tensors that are rarely read: the same storage (which cannot be used for another tensor meanwhile);
              None for all others
    marks     of these tensors: where they are, how often torch wrote to them, and how they are read
    """

    sums: tuple[int, ...]
    aliases: tuple[Tensor | None, ...] = ()
    marks: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls,
        tensors: Sequence[Tensor],
        always: Iterable[Tensor],
        before: CheckSums | None = None,
    ) -> CheckSums:
        """Of these tensors, in order.

        always    those that are read in any case, as are small ones, and all that share memory with these
        before    of the same tensors: where storage and version of others are the same, the sum is taken from there
        """
        read, written = {id(t) for t in always}, {storage_of(t) for t in always}
        aliases = tuple(
            None if id(t) in read or storage_of(t) in written or is_small(t) else local(t).detach() for t in tensors
        )
        marks = tuple(None if a is None else (a.data_ptr(), a._version, a.shape, a.stride(), a.dtype) for a in aliases)
        earlier = {} if before is None else dict(zip(enumerate(before.marks), before.sums, strict=True))
        known = [None if m is None else earlier.get((k, m)) for k, m in enumerate(marks)]
        others = iter(_sums([t for t, total in zip(tensors, known, strict=True) if total is None]))
        return cls(tuple(next(others) if total is None else total for total in known), aliases, marks)

    def changed(self, now: CheckSums) -> list[int] | None:
        """The places of tensors that changed; None if tensors were added or removed."""
        if len(self.sums) != len(now.sums):
            return None
        return [place for place, (b, a) in enumerate(zip(self.sums, now.sums, strict=True)) if a != b]


def _sums(tensors: Sequence[Tensor]) -> list[int]:
    return [hash(part.tobytes()) for part in _on_cpu([as_integers(t) if is_small(t) else _columns(t) for t in tensors])]


def _columns(tensor: Tensor) -> Tensor:
    """(COLUMNS + a few,) sums of the bits as 64-bit words, modulo 2⁶⁴, and the words that fill no row."""
    bits = as_integers(tensor).reshape(-1)
    each = 8 // bits.element_size()
    whole = len(bits) - len(bits) % (COLUMNS * each)
    if bits.storage_offset() % each:
        bits = bits.clone()
    rest = torch.cat([bits[whole:], bits.new_zeros(-(len(bits) - whole) % each)]).view(torch.int64)
    return torch.cat([bits[:whole].view(torch.int64).view(-1, COLUMNS).sum(0), rest])


def _on_cpu(numbers: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Their bytes, in some type. Those of a GPU are copied together, because each copy waits for it."""
    if all(is_on_cpu(each) for each in numbers):
        return [each.numpy() for each in numbers]
    parts = [each.reshape(-1).view(torch.uint8).to(numbers[0].device) for each in numbers]
    return [part.numpy() for part in torch.split(torch.cat(parts).cpu(), [len(part) for part in parts])]


def as_integers(tensor: Tensor) -> Tensor:
    """The bits of the values, as integers of the same size (bytes for a type without such integers)."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size(), torch.uint8)
    return local(tensor).detach().contiguous().view(integer)


def check_sum(tensors: Iterable[Tensor]) -> int:
    """A checksum that differs if one bit differs. It is fast and no hash: some changes cancel."""
    total = 0
    for one in _on_cpu([as_integers(tensor).sum(dtype=torch.int64) for tensor in tensors]):
        total = 31 * total + int.from_bytes(one.tobytes(), sys.byteorder, signed=True)
    return total % 2**64


def hash_of(tensors: Iterable[Tensor]) -> str:
    """A hash of the bits of these tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(local(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# -- A fast hash: a tree of fixed blocks
#
# The bits of a large tensor are words of 32 bits, in blocks. The sum of a block is Σ_i weight_i·word_i modulo 2⁶⁴, and
# the hash is BLAKE2b of all sums. With weights of random bits, two different blocks have one sum with probability 2⁻³²
# at most: the family is universal (Carter and Wegman, J. Comput. Syst. Sci. 18, 1979, and Lemire and Kaser, "Strongly
# universal string hashing is fast", Comput. J. 57(11), 2014: sums modulo 2^k of words of fewer bits). The weights are
# public and odd, so one changed word always changes the sum. It shows other values, and is no proof against a person
# who searches for a collision: who can write an update can write a ledger.

#: Words of one block: 128 kB, which stay in cache with their weights and products.
WORDS = 2**15
#: So many blocks are added by one thread at a time.
BLOCKS = 64


@cache
def _weights() -> npt.NDArray[np.uint64]:
    """(WORDS,) odd numbers, always the same."""
    drawn = np.random.Philox(key=[0, 0]).random_raw(WORDS).astype(np.uint64, copy=False)
    return drawn | np.uint64(1)


def tree_hash(tensors: Iterable[Tensor]) -> str:
    """A hash of the bits of these tensors, in order; of small ones by BLAKE2b alone."""
    digest = hashlib.blake2b(digest_size=16)
    listed = list(tensors)
    parts = _on_cpu([as_integers(t) if is_small(t) else _block_sums(t) for t in listed])
    for tensor, part in zip(listed, parts, strict=True):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(part.tobytes())
    return digest.hexdigest()


def _block_sums(tensor: Tensor) -> Tensor:
    """(blocks,) the sum of each block; the last one is filled up with zeros."""
    bits = as_integers(tensor).reshape(-1)
    if len(bits) * bits.element_size() % 4:
        bits = torch.cat([bits, bits.new_zeros(4 // bits.element_size() - len(bits) % (4 // bits.element_size()))])
    if not is_on_cpu(bits):
        return _block_sums_by_torch(bits)
    words, weights = bits.numpy().view(np.uint32), _weights()
    sums = np.empty(-(-len(words) // WORDS), dtype=np.uint64)

    def add(first: int) -> None:
        products = np.empty(WORDS, dtype=np.uint64)
        for block in range(first, min(first + BLOCKS, len(sums))):
            some = words[block * WORDS : (block + 1) * WORDS]
            np.multiply(some, weights[: len(some)], out=products[: len(some)])
            sums[block] = products[: len(some)].sum()

    for_each(range(0, len(sums), BLOCKS), add, torch.get_num_threads())
    return torch.from_numpy(sums.view(np.int64))


def _block_sums_by_torch(bits: Tensor) -> Tensor:
    """The same on a GPU, for all blocks at once."""
    if bits.storage_offset() * bits.element_size() % 4:
        bits = bits.clone()
    words = bits.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    words = torch.cat([words, words.new_zeros(-len(words) % WORDS)]).view(-1, WORDS)
    return (words * torch.from_numpy(_weights().view(np.int64)).to(words.device)).sum(1)
