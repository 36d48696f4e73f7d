"""Texts of a table: as they are, for fixed features, or as ids of tokens, for models that embed tokens.

No vocabulary is learned from private data. Words are hashed into a stated number of buckets, bytes are what they are,
and every text has the same stated number of ids, so a record's ids depend on no other record. Id 0 is padding, in
front of the tokens; longer texts are cut at the end.

The hash, so that anyone can repeat it: BLAKE2b with 8 bytes of digest, read little-endian, of the UTF-8 bytes of the
word in lower case; the id is 1 plus the rest modulo (buckets - 1). The id of a byte is 1 plus the byte.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DataError

#: A word: letters, digits and underscores, with apostrophes inside. An exclamation or question mark is a word.
WORD = re.compile(r"\w+(?:['’]\w+)*|[!?]")
BYTES = 257  # ids of bytes: 256 and the padding
_REMEMBERED = 2**18  # hashes kept in memory


@dataclass(frozen=True)
class Tokens:
    """How a text becomes ids.

    kind     "words", hashed into buckets, or "bytes" of UTF-8: characters, one by one
    length   ids of each text: shorter texts are padded, longer ones are cut
    buckets  number of ids of words, with the padding; not used for bytes
    """

    kind: Literal["words", "bytes"] = "words"
    length: int = 256
    buckets: int = 16_384

    @property
    def ids(self) -> int:
        """The number of different ids: they are from 0 to ids - 1."""
        return BYTES if self.kind == "bytes" else self.buckets


def token_ids(texts: Sequence[str], tokens: Tokens) -> npt.NDArray[np.int32]:
    """(records, length) ids; only zeros for a text without tokens.

    >>> token_ids(["Hi!", ""], Tokens("bytes", length=4))
    array([[  0,  73, 106,  34],
           [  0,   0,   0,   0]], dtype=int32)
    """
    rows = np.zeros((len(texts), tokens.length), dtype=np.int32)
    for row, text in zip(rows, texts, strict=True):
        found = list(islice(_ids(text, tokens), tokens.length))
        row[len(row) - len(found) :] = found
    return rows


def _ids(text: str, tokens: Tokens) -> Iterator[int]:
    if tokens.kind == "bytes":
        return (1 + byte for byte in text[: tokens.length].encode("utf-8", "surrogatepass"))
    return (_bucket(match[0].lower(), tokens.buckets) for match in WORD.finditer(text))


@lru_cache(maxsize=_REMEMBERED)
def _bucket(word: str, buckets: int) -> int:
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "little") % (buckets - 1)


def texts_of(cells: Any, name: str, path: Path) -> list[str]:
    """The cells of a column of texts; an empty cell is the empty text. Raises DataError for cells that are no texts."""
    values = cells.to_pylist()
    wrong = np.array([value is not None and not isinstance(value, str) for value in values], dtype=bool)
    if wrong.any():
        raise DataError(
            f"Column {name!r} of {path} holds {cells.type}, and data.text needs texts. Convert the column, or list it "
            "in [data.numeric], [data.categorical] or data.drop."
        )
    return ["" if value is None else value for value in values]


# -- Long texts and series as records of equal length, with the person of each
#
# Windows that overlap hold each other's data, so those of one document must belong to one person.


class Windows(NamedTuple):
    """Records that were cut from documents.

    records  (records, length, …)
    persons  (records,) the document of each record, by its place; or its id, if ids were given
    """

    records: npt.NDArray[Any]
    persons: npt.NDArray[Any]


def windows(
    documents: Sequence[Any],
    length: int,
    step: int | None = None,
    ids: Sequence[Any] | None = None,
    pad: float | None = None,
) -> Windows:
    """Cut documents into records of `length` positions.

    documents  token ids, or numbers: lists, arrays or tensors (positions, …)
    step       positions from the start of a record to the next one; `length` if not given. Smaller steps overlap
    ids        (documents,) whose each document is: all records of one person then share a budget. Without ids each
               document is a person
    pad        fills the end of a document up to one more record. Without it, the positions after the last whole record
               are left out, and so is a document that is shorter than a record

    Raises DataError for lengths and steps that are not whole numbers above 0, for other documents, and for no record.

    >>> windows([[1, 2, 3, 4, 5], [6, 7, 8]], length=3, step=2)
    Windows(records=array([[1, 2, 3],
           [3, 4, 5],
           [6, 7, 8]]), persons=array([0, 0, 1]))
    """
    step = length if step is None else step
    _check_count("length", length)
    _check_count("step", step)
    if ids is not None and len(ids) != len(documents):
        raise DataError(f"ids= needs one id per document; got {len(ids):,} for {len(documents):,} documents.")
    arrays = [np.asarray(document) for document in documents]
    if any(a.ndim == 0 or a.dtype.kind not in "biuf" for a in arrays) or len({a.shape[1:] for a in arrays}) > 1:
        raise DataError(
            "Documents must be sequences of token ids or of numbers, all with rows of one shape. Turn texts into token "
            "ids first."
        )
    parts = [_cut(array, length, step, pad) for array in arrays]
    if not sum(map(len, parts)):
        raise DataError(
            f"No document has {length:,} positions, so there is no record. Choose a smaller length, or give pad=."
        )
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    found = np.concatenate(list(filter(len, parts)))  # an empty list has another type
    return Windows(found, owner if ids is None else np.asarray(ids)[owner])


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise DataError(f"{name} must be a whole number of at least 1, got {value!r}.")


def _cut(array: npt.NDArray[Any], length: int, step: int, pad: float | None) -> npt.NDArray[Any]:
    """(records, length, …) of one document."""
    missing = 0 if pad is None or len(array) == 0 else max(length - len(array), (length - len(array)) % step)
    if 0 < missing < length:  # else a record would hold nothing but padding
        array = np.concatenate([array, np.full((missing, *array.shape[1:]), pad, dtype=array.dtype)])
    starts = np.arange(0, len(array) - length + 1, step)
    return np.asarray(array[starts[:, None] + np.arange(length)])
