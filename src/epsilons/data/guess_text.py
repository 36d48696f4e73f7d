"""Which columns of a table hold texts, for the draft that `epsilons init` writes: a guess, by names and cells."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

#: Words in the names of columns of texts. They make texts of a few words, such as titles, recognised.
NAMES = re.compile(
    "texts?|reviews?|comments?|notes?|messages?|descriptions?|summary|sentences?|premise|hypothesis|questions?|answers?"
    "|abstract|body|content|feedback|titles?|headlines?|tweets?|posts?|utterances?|remarks?|complaints?|narrative"
    "|transcript"
)
#: Words in the names of columns that say who or where somebody is, or where something is stored. They are no texts.
CONTACTS = re.compile("address|addresses|street|e?mails?|phone|urls?|uri|links?|files?|paths?|authors?|username")
#: The first cells of a column that are examined.
SAMPLE = 10_000
#: A text has this many words; fewer, down to one, in a column with a name in NAMES.
LEAST_WORDS = 5
#: In scripts that have no spaces between words, a text has this many characters.
LEAST_CHARACTERS = 12
_WORD = re.compile(r"[^\W\d_]{2,}")
_WITHOUT_SPACES = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u3040-\u30ff\u3400-\u9fff]")


def holds_texts(name: str, cells: Sequence[str | None]) -> bool:
    """Whether a column seems to hold texts: mostly different cells, of several words.

    >>> holds_texts("note", ["a cough for two weeks", "pain in the left knee", None])
    True
    >>> holds_texts("note", ["A17-003", "B22-901", "C03-117"]), holds_texts("street", ["12 High Street, Old Town"] * 2)
    (False, False)
    """
    filled = [cell for cell in cells[:SAMPLE] if cell and cell.strip()]
    different = len(set(filled))
    if different <= max(0.1 * len(filled), min(50, 0.5 * len(filled))) or _has_word(name, CONTACTS):
        return False
    if _has_word(name, NAMES) and not _are_codes(filled):
        return True
    return median(map(_size, filled)) >= LEAST_WORDS


def are_short(cells: Sequence[str | None]) -> bool:
    """Whether texts are so short that their characters say more than their words: names, titles."""
    filled = [cell for cell in cells[:SAMPLE] if cell and cell.strip()]
    return bool(filled) and median(map(_size, filled)) < LEAST_WORDS


def _has_word(name: str, words: re.Pattern[str]) -> bool:
    return any(words.fullmatch(word) for word in re.split(r"[^a-z]+", name.lower()))


def _size(cell: str) -> float:
    """Pieces between spaces that hold a word. In scripts without spaces, characters count as parts of words."""
    start = cell[:1000]
    characters = len(_WITHOUT_SPACES.findall(start))
    return max(
        sum(_WORD.search(piece) is not None for piece in start.split()), LEAST_WORDS * characters / LEAST_CHARACTERS
    )


def _are_codes(filled: Sequence[str]) -> bool:
    """Whether most cells are one piece with a digit in it, or have no word."""
    codes = [not _WORD.search(cell) or (len(cell.split()) == 1 and bool(re.search(r"\d", cell))) for cell in filled]
    return sum(codes) > len(codes) / 2
