"""Texts as hashed n-grams of words and characters: no vocabulary, and no frequencies from private data.

Each n-gram adds +1 or -1 to one of the buckets, both chosen by a public hash (Weinberger et al., "Feature Hashing for
Large Scale Multitask Learning", arXiv 0902.2206v5, section 2). A bucket's sum s becomes sign(s)·log(1 + |s|), and each
record has norm 1.

The hash, so that anyone can repeat it: BLAKE2b with 8 bytes of digest, read little-endian, of the UTF-8 bytes of
salt, a zero byte, "word" or "char", a zero byte, and the n-gram (words are joined by one space). The lowest bit is the
sign (1 is plus); the rest modulo the number of buckets is the bucket.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import InputError
from .fixed import Features, check_texts

#: The same words as scikit-learn's HashingVectorizer: two or more letters, digits or underscores.
WORD = re.compile(r"\w\w+")
MOST_BUCKETS = 2**20
_REMEMBERED = 2**18  # hashes kept in memory


def hashed_text(
    texts: Sequence[str],
    buckets: int = 8192,
    words: Sequence[int] = (1, 2),
    characters: Sequence[int] = (),
    salt: str = "epsilons",
) -> Tensor:
    """(records, buckets) features of norm 1, 32-bit; zeros for a text without n-grams.

    texts       one text for each record; case does not matter
    buckets     number of features, at most 2^20
    words       lengths of the n-grams of words
    characters  lengths of the n-grams of characters, for short texts: [2, 3] for names. A text starts with ^ and ends
                with $
    salt        a public text that the hash depends on

    A record's features depend on no other record. Raises InputError if the inputs are not texts, or an option is out of
    range.

    >>> hashed_text(["a good film", "not a good film"], buckets=64).shape
    torch.Size([2, 64])
    """
    check_texts(texts, "hashed-text")
    _check(buckets, words, characters)
    features = np.zeros((len(texts), buckets), dtype=np.float32)
    for row, text in zip(features, texts, strict=True):
        _add(row, Counter(_n_grams(text.lower(), words, characters)), salt)
    return torch.from_numpy(features)


def _check(buckets: int, words: Sequence[int], characters: Sequence[int]) -> None:
    if not isinstance(buckets, int) or not 1 <= buckets <= MOST_BUCKETS:
        raise InputError(f"buckets must be a whole number from 1 to {MOST_BUCKETS:,}, got {buckets!r}.")
    for name, lengths in (("words", words), ("characters", characters)):
        if isinstance(lengths, str | int) or not all(isinstance(n, int) and 1 <= n <= 20 for n in lengths):
            raise InputError(f"{name} must list lengths of n-grams from 1 to 20, e.g. [1, 2], got {lengths!r}.")
    if not [*words, *characters]:
        raise InputError("hashed-text needs a length of n-grams in words or characters, got none.")


def _n_grams(text: str, words: Sequence[int], characters: Sequence[int]) -> Iterator[tuple[str, str]]:
    """(kind, n-gram), each as often as it occurs."""
    found = WORD.findall(text) if words else []
    for n in words:
        yield from (("word", " ".join(found[i : i + n])) for i in range(len(found) - n + 1))
    marked = f"^{text}$"
    for n in characters:
        yield from (("char", marked[i : i + n]) for i in range(len(marked) - n + 1))


def _add(row: npt.NDArray[np.float32], counts: Counter[tuple[str, str]], salt: str) -> None:
    for (kind, n_gram), count in counts.items():
        value = _hash(salt, kind, n_gram)
        row[(value >> 1) % len(row)] += count if value & 1 else -count
    np.multiply(np.sign(row), np.log1p(np.abs(row)), out=row)
    norm = np.sqrt(np.square(row, dtype=np.float64).sum())
    if norm > 0:
        row /= norm


@lru_cache(maxsize=_REMEMBERED)
def _hash(salt: str, kind: str, n_gram: str) -> int:
    content = "\0".join((salt, kind, n_gram)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _origin(shape: tuple[int, ...], **options: Any) -> str:
    return "hashed n-grams of each record's text; hash and salt are public, and there is no vocabulary"


HASHED_TEXT = Features(hashed_text, _origin, of_texts=True)
