"""Every coin and every noise value, as a function of (key, phase, step).

Replaying a step under the same key gives the same draw and the same noise: the same release, not a second one.
A stream is addressed by BLAKE2b of its name under the run's 256-bit key. Its words are those of the ChaCha20 cipher
(RFC 8439) under a 256-bit subkey. The sources differ in what they make of them:

    chacha20 two normals of two words, as `fill` describes
    secure   each normal is half the sum of four, so that the floating-point result does not reveal which uniforms it
             was made of (Holohan and Braghin, ESORICS 2021, arXiv 2107.10138; Opacus' secure mode does the same)

The noise of a step is made in blocks, each from a stream of its own, by one thread or several: its bits do not depend
on how many.

To add a source: a function `(subkey: bytes) -> Stream`, and a line in SOURCES.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..core.threads import for_each
from ..errors import InputError, named
from ..ledger.run_folder import KEY_BYTES

# -- Standard normal values from uniform 64-bit words, by the transform of Box and Muller, vectorised

#: A number that changes whenever a key gives other coins or other noise (by more than rounding).
DRAWS_VERSION = 3

#: The values of one stream.
BLOCK = 2**16
#: The pairs that are computed together: few enough for the cache, and enough to hide what a call costs.
AT_ONCE = 2**13

Words = npt.NDArray[np.uint64]
Values = npt.NDArray[np.float64]


class _Scratch(threading.local):
    """Memory of one thread, from torch: aligned, because the last bits of vectorised functions may depend on it."""

    def __init__(self) -> None:
        import torch

        self.tensors = torch.empty((4, AT_ONCE), dtype=torch.float64, device="cpu")
        self.arrays = self.tensors.numpy()


@cache
def _scratch() -> _Scratch:
    return _Scratch()


def fill(words: Words, values: Values) -> None:
    """Fill `values` (count,) with standard normal values from words (2 · pairs,), with pairs = ⌈count / 2⌉.

    words  uniform and independent; they are overwritten. `values` may be in the same memory

    Box and Muller (Ann. Math. Statist. 29(2), 1958): with u uniform in (0, 1] and an angle uniform on the circle,
    √(−2 ln u)·cos(angle) and √(−2 ln u)·sin(angle) are independent standard normal values. One word gives u, with 63
    bits rounded to a 64-bit float; another gives the angle, with 64 bits rounded. The logarithm is
    NumPy's; root, cosine and sine are torch's, which are faster.

    The largest value that can occur is √(126 ln 2) = 9.345: u is at least 2⁻⁶³. A normal value is beyond it with
    probability 9·10⁻²¹. For the guarantee this is a property of 64-bit floating-point noise, as the gaps between its
    values are: proofs are about real numbers. It is also far below any δ. If one record moves coordinate j of the sum
    by Δ_j noise standard deviations, an output that only one of two data sets allows needs noise beyond 9.345 − |Δ_j|
    in some coordinate j. For a noise multiplier of 1 that has probability below 10⁻¹⁶ per step if one coordinate takes
    all of the record's norm, and below 10⁻¹⁵ if a million share it.
    """
    pairs = len(words) // 2
    for start in range(0, pairs, AT_ONCE):
        stop = min(start + AT_ONCE, pairs)
        second = values[pairs + start : pairs + stop]  # one less at the end, if the count is odd
        _fill_pairs(words[start:stop], words[pairs + start : pairs + stop], values[start:stop], second)


def _fill_pairs(radii: Words, angles: Words, first: Values, second: Values) -> None:
    """As `fill`, for (pairs,) words each. The memory of what is between is used again: new memory costs more."""
    import torch

    own, pairs = _scratch(), len(radii)
    radius, angle, cosine, sine = own.arrays[:, :pairs]
    tensors = own.tensors[:, :pairs]
    # √(−2 ln u), u = (the first 63 bits of the word + 1)·2⁻⁶³.
    np.right_shift(radii, np.uint64(1), out=radii)
    radius[:] = radii.view(np.int64)
    radius += 1.0
    radius *= 2.0**-63
    np.log(radius, out=radius)
    radius *= -2.0
    # The word as a signed number of turns, times 2⁶⁴.
    angle[:] = angles.view(np.int64)
    angle *= 2 * np.pi * 2.0**-64
    with torch.inference_mode():  # no graph, and no version of `out`
        torch.sqrt(tensors[0], out=tensors[0])
        torch.cos(tensors[1], out=tensors[2])
        torch.sin(tensors[1], out=tensors[3])
    np.multiply(radius, cosine, out=first)
    np.multiply(radius[: len(second)], sine[: len(second)], out=second)


# -- Every coin and every noise value, as a function of (key, phase, step)

#: A coin is an integer below 2**53, so that every rate has a threshold that a double holds exactly.
COIN_BITS = 53


class Stream(Protocol):
    """An endless sequence of independent values, always the same from its beginning."""

    def integers(self, count: int) -> npt.NDArray[np.uint64]:
        """(count,) uniform 64-bit integers."""

    def normals(self, count: int) -> npt.NDArray[np.float64]:
        """(count,) standard normal values, 64-bit."""


_ZEROS = memoryview(bytes(8 * BLOCK))


@cache
def _cipher() -> tuple[Any, Any]:
    """Imported where it is first used: planning needs no cipher."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    return Cipher, algorithms.ChaCha20


class _ChaCha20:
    def __init__(self, subkey: bytes) -> None:
        cipher, chacha20 = _cipher()
        # Every subkey is used for one stream only, so the nonce may be constant.
        self._keystream = cipher(chacha20(subkey[:32], bytes(16)), mode=None).encryptor()

    def integers(self, count: int) -> Words:
        words = np.empty(count, dtype="<u8")
        for start in range(0, count, BLOCK):
            part = words[start : start + BLOCK].view(np.uint8)
            self._keystream.update_into(_ZEROS[: len(part)], part.data)
        return words.astype(np.uint64, copy=False)

    def normals(self, count: int) -> Values:
        words = self.integers(count + count % 2)
        values = words.view(np.float64)[:count]  # in place of the words
        fill(words, values)
        return values


class _Summed(_ChaCha20):
    def normals(self, count: int) -> Values:
        """Half the sums of four normals each, of two pairs that no other value is made of."""
        values = np.empty(count)
        for start in range(0, count, BLOCK // 4):
            part = values[start : start + BLOCK // 4]
            np.sum(super().normals(4 * len(part)).reshape(4, -1), axis=0, out=part)
            part /= 2
        return values


SOURCES: dict[str, Callable[[bytes], Stream]] = {"chacha20": _ChaCha20, "secure": _Summed}


@dataclass(frozen=True)
class Randomness:
    """All randomness of one run.

    key     32 secret bytes
    source  a name in SOURCES
    seeded  True if the key was given, or derived from a seed: a person may know it

    Raises InputError for an unknown source.
    """

    key: bytes
    source: str = "chacha20"
    seeded: bool = False

    def __post_init__(self) -> None:
        if self.source == "philox":
            raise InputError(
                "chacha20, a cipher, replaced philox. Continue a run of philox with the version that began it."
            )
        named(SOURCES, self.source, "source of randomness")

    @classmethod
    def fresh(cls, seed: int | None = None, source: str = "chacha20", key: bytes | None = None) -> Randomness:
        """A key from the operating system; for experiments, a key derived from `seed` alone, or `key`."""
        if seed is not None and key is not None:
            raise InputError("Got seed= and key=, and each of them determines the run's key. Leave one out.")
        if key is not None:
            return cls(_checked(key), source, seeded=True)
        if seed is None:
            return cls(secrets.token_bytes(KEY_BYTES), source)
        return cls(key_from_seed(seed), source, seeded=True)

    def bound_to(self, run: str) -> Randomness:
        """A key that depends on this text, too; for the run that the text describes."""
        return Randomness(self._subkey("run", run), self.source, self.seeded)

    def renewed(self, epoch: int, history: str = "") -> Randomness:
        """Another key for the same run: from the operating system, or, for a seeded run, derived from the first.

        history  text about the run's past and its settings: copies of one run that continue differently must not get
                 the same key
        """
        if not self.seeded:
            return Randomness.fresh(None, self.source)
        return Randomness(self._subkey("epoch", epoch, history), self.source, seeded=True)

    @property
    def label(self) -> str:
        """The name of the randomness in the guarantee."""
        return "seeded" if self.seeded else self.source

    @property
    def commitment(self) -> str:
        """A public hash of the key; the key cannot be found from it."""
        return hashlib.blake2b(b"commitment", key=self.key, digest_size=32).hexdigest()

    def coins(self, phase: int, step: int, records: int) -> npt.NDArray[np.uint64]:
        """(records,) one uniform integer below 2**53 per record, by the record's index."""
        coins = self.stream("coins", phase, step).integers(records)
        coins >>= np.uint64(64 - COIN_BITS)
        return coins

    def noise(self, phase: int, step: int, count: int, threads: int = 1) -> npt.NDArray[np.float64]:
        """(count,) standard normal values for one update; the same for any number of threads."""
        values = np.empty(count)

        def put(start: int, block: Values) -> None:
            values[start : start + len(block)] = block

        self.each_block(phase, step, count, put, threads)
        return values

    def each_block(
        self, phase: int, step: int, count: int, use: Callable[[int, Values], None], threads: int = 1
    ) -> None:
        """Call use(start, values) for the blocks of `noise`, in the threads that make them: block k after block k // 2.

        values  (at most BLOCK,) which may be changed
        """
        blocks, first = -(-count // BLOCK), 0

        def make(block: int) -> None:
            use(block * BLOCK, self._block(phase, step, block, count))

        while first < blocks:
            for_each(range(first, min(2 * first or 1, blocks)), make, threads)
            first = 2 * first or 1

    def noise_at(
        self, phase: int, step: int, ranges: Sequence[tuple[int, int]], count: int, threads: int = 1
    ) -> npt.NDArray[np.float64]:
        """The values of `noise(phase, step, count)` at these ranges of places, one range after the other.

        Only blocks that a range touches are made.
        """
        begins = np.cumsum([0, *(last - first for first, last in ranges)])
        values = np.empty(begins[-1])
        touched: dict[int, list[tuple[int, int, int]]] = {}
        for (first, last), begin in zip(ranges, begins.tolist(), strict=False):
            for block in range(first // BLOCK, -(-last // BLOCK) if last > first else 0):
                touched.setdefault(block, []).append((first, last, begin - first))

        def fill(block: int) -> None:
            start, made = block * BLOCK, self._block(phase, step, block, count)
            for first, last, shift in touched[block]:
                low, high = max(first, start), min(last, start + len(made))
                values[low + shift : high + shift] = made[low - start : high - start]

        for_each(sorted(touched), fill, threads)
        return values

    def _block(self, phase: int, step: int, block: int, count: int) -> Values:
        return self.stream("noise", phase, step, block).normals(min(BLOCK, count - block * BLOCK))

    def seed(self, purpose: str, *address: int) -> int:
        """A 63-bit seed for generators that the guarantee does not depend on: dropout, augmentation."""
        return _as_seed(self._subkey(purpose, *address))

    def seeds(self, purpose: str, *address: int, endings: Iterable[str]) -> Iterator[int]:
        """One seed for each ending: `seed(purpose, *address, 7, 1)` for "7/1". The beginning is hashed once."""
        begun = hashlib.blake2b(_name(purpose, *address, ""), key=self.key, digest_size=32)
        for ending in endings:
            whole = begun.copy()
            whole.update(ending.encode())
            yield _as_seed(whole.digest())

    def stream(self, purpose: str, *address: int) -> Stream:
        """The stream with this name, from its beginning; every name must be used for one purpose only."""
        return SOURCES[self.source](self._subkey(purpose, *address))

    def _subkey(self, purpose: str, *address: int | str) -> bytes:
        return hashlib.blake2b(_name(purpose, *address), key=self.key, digest_size=32).digest()

    def __repr__(self) -> str:
        return f"Randomness({self.label})"


def _name(purpose: str, *address: int | str) -> bytes:
    return "/".join([purpose, *map(str, address)]).encode()


def _as_seed(subkey: bytes) -> int:
    return int.from_bytes(subkey[:8], "little") >> 1


@cache
def sample_hash(source: str) -> str:
    """A hash of a block of this source's noise under a key that everyone knows.

    The last bits of logarithm and cosine depend on the versions of NumPy and torch, and on the processor. A run that is
    resumed where this hash is another one gets a new key: otherwise the same sum could be released twice, with noise
    that differs by rounding.
    """
    values = Randomness(bytes(KEY_BYTES), source).noise(0, 0, BLOCK)
    return hashlib.blake2b(values.data, digest_size=16).hexdigest()


def key_from_seed(seed: int) -> bytes:
    """32 bytes that depend on the seed alone, for Randomness.with_key(…): several runs then share coins and noise.

    It gives no guarantee: anyone can compute it, and in the difference of two sums the shared noise cancels. For tests,
    comparisons of methods under equal coins, and replays on data with one record changed.

    >>> len(key_from_seed(0)), key_from_seed(0) == key_from_seed(1)
    (32, False)
    """
    return hashlib.blake2b(f"epsilons seed {int(seed)}".encode(), digest_size=KEY_BYTES).digest()


def _checked(key: object) -> bytes:
    if not isinstance(key, bytes):
        raise InputError(f"key= takes {KEY_BYTES} bytes; got a {type(key).__name__}.")
    if len(key) != KEY_BYTES:
        raise InputError(
            f"key= takes {KEY_BYTES} bytes; got {len(key)}. For instance: secrets.token_bytes({KEY_BYTES})."
        )
    return key


def thresholds(rates: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """A record is drawn if its coin is below: rate·2**53 rounded down, so that none is drawn more often than planned.

    >>> thresholds([0.0, 0.5, 1.0]).tolist() == [0, 2**52, 2**53]
    True
    """
    return np.floor(np.asarray(rates, dtype=np.float64) * 2.0**COIN_BITS).astype(np.uint64)
