"""Ids of persons: the one place that turns a column of a file, or values in Python, into ids.

An id is the text that is written, without blanks around it. 7 and "7" are one id; "07" and "7.0" are others. A column
of a text file is read as text, whatever else is said of it: its numbers would lose zeros and digits.

Ids that are equal up to case, Unicode form, invisible characters, blanks, zeros in front or a decimal point may be one
person in several spellings, or several people. Only the owner of the data knows, so training needs a statement: a rule.
To add a way to make ids equal, add a function to WAYS.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from ..core.columns import parts, taken
from ..core.disclosure import how_many
from ..core.mechanism import FloatArray, IntArray, Unit, read_only
from ..errors import BudgetError, InputError
from ..tabular import EMPTY, as_text, column_of, is_text, marks_of, resolved

#: How ids are made equal: names of WAYS, and perhaps AS_WRITTEN; nothing was stated if it is empty.
Rule = tuple[str, ...]

#: All other differences make other people.
AS_WRITTEN = "as written"

#: Characters around an id that do not belong to it.
BLANKS = " \t\r\n\v\f\u00a0"

#: Exporting programs keep 15 digits of a number, so larger floats may have lost some, and two ids could be one.
LARGEST_FLOAT = 10**15

#: Numbers as exporting programs round them: 1.23457E+14, 1e+20.
_ROUNDED = re.compile(r"[+-]?[0-9]+(?:[.,][0-9]+e[+-]?|e[+-])[0-9]+", re.IGNORECASE)
_NUMBER = re.compile(r"\+?([0-9]+)(?:e([0-9]{1,2}))?")
#: Texts that only case or leading zeros can make another spelling of something.
_PLAIN = r"\A(?:[0-9]+|[A-Za-z_][A-Za-z0-9_-]*)\z"

SEVERAL_OWNERS = (
    "A row has one person, got {count:,} columns of ids. A row about several people, such as a message with a sender "
    "and a receiver, is not protected for each of them by one id. Name the column of the people that you protect, and "
    "say that the others are not covered; or give linked people one id (of a household, of a conversation) in a new "
    "column, and name that."
)


#: name -> how an id is changed, in this order.
WAYS: dict[str, Callable[[str], str]] = {
    "nfkc": lambda text: unicodedata.normalize("NFKC", text),
    "casefold": str.casefold,
    "strip invisible": lambda text: "".join(c for c in text if unicodedata.category(c) not in ("Cf", "Cc")),
    "strip blanks": lambda text: " ".join(text.split()),
    "strip .0": lambda text: re.sub(r"\A([0-9]+)[.,]0+\Z", r"\1", text),
    "strip leading zeros": lambda text: re.sub(r"\A0+(?=[0-9])", "", text),
}


def as_rule(stated: str | Sequence[str] | None) -> Rule:
    """The rule of these names, in the order of WAYS. Raises BudgetError for an unknown one."""
    names = [stated] if isinstance(stated, str) else list(stated or ())
    known = (*WAYS, AS_WRITTEN)
    if unknown := [name for name in names if name not in known]:
        raise BudgetError(f"Ids are made equal by one or several of {', '.join(map(repr, known))}; got {unknown[0]!r}.")
    return tuple(name for name in known if name in names)


def normalised(text: str, rule: Rule) -> str:
    """An id under a rule; normalised again, it stays as it is.

    >>> normalised("\uff21nn ", ("nfkc", "casefold", "strip blanks")), normalised("007", ("strip leading zeros",))
    ('ann', '7')
    """
    before = None
    while before != text:  # "\ufeff007" and the like: one way may make room for another
        before = text
        for name in rule:
            text = text if name == AS_WRITTEN else WAYS[name](text)
    return text


def ids_in(table: Any, column: str, path: Path, error: type[InputError], rule: Rule = ()) -> Any:
    """(rows,) the ids in a column of a pyarrow.Table that was read from `path`, as `texts_of` gives them."""
    cells = column_of(table, column, path, error)
    assert marks_of(table).separator is None or is_text(cells), "A column of ids in a text file is read as text."
    return texts_of(cells, rule, f" of {path}")


def texts_of(ids: Any, rule: Rule = (), where: str = "") -> Any:
    """pyarrow.Array (rows,) of the ids as texts. Raises BudgetError for empty ids, and for what is no list of ids.

    where  the file, for messages
    """
    import pyarrow
    import pyarrow.compute as pc

    cells = _as_arrow(ids)
    if pyarrow.types.is_integer(cells.type):
        texts = cells.cast(pyarrow.large_string())
    elif pyarrow.types.is_large_string(cells.type):
        texts = pc.utf8_trim(cells, BLANKS)
    else:
        values = cells.to_numpy(zero_copy_only=False) if pyarrow.types.is_floating(cells.type) else cells.to_pylist()
        texts = pyarrow.array([_text(cell) for cell in values], type=pyarrow.large_string())
    if any(name in WAYS for name in rule):
        coded = texts.dictionary_encode()
        new = ["" if text in EMPTY else normalised(text, rule) for text in coded.dictionary.to_pylist()]  # NA is not na
        texts = pyarrow.array(new, pyarrow.large_string()).take(coded.indices)
    nothing = pc.is_in(texts, value_set=pyarrow.array(EMPTY, type=pyarrow.large_string()))
    empty = pc.or_kleene(
        pc.or_(pc.is_null(texts), nothing), pc.match_substring_regex(texts, r"\A[\s\p{Cf}\p{Cc}\p{Z}]*\z")
    )
    if count := int(pc.sum(empty).as_py() or 0):
        raise BudgetError(
            f"{how_many(count, len(texts))} rows{where} have no id of a person: the cell is empty. Every row needs "
            "one. Fill them in, or leave these rows out."
        )
    return texts


def count_unstated(rule: Rule, *texts: Any) -> tuple[int, int]:
    """(ids that a rule leaves open, all ids), of the different ids in these arrays together.

    Open is whether an id is another spelling of another one, and which number it was before a program rounded it.
    """
    import pyarrow
    import pyarrow.compute as pc

    names = pyarrow.chunked_array([part.unique() for part in texts], pyarrow.large_string()).unique()
    if AS_WRITTEN in rule:
        return 0, len(names)
    plain = pc.match_substring_regex(names, _PLAIN)  # most ids, at once
    lower = pc.ascii_ltrim(pc.ascii_lower(names.filter(plain)), "0")
    lower, others = pc.if_else(pc.equal(lower, ""), "0", lower), names.filter(pc.invert(plain)).to_pylist()
    keys = pyarrow.concat_arrays([lower, pyarrow.array([_key(name) for name in others], lower.type)])
    times = keys.value_counts()
    shared = pc.is_in(keys, value_set=times.field(0).filter(pc.greater(times.field(1), 1)))
    are_numbers = pc.all(pc.match_substring_regex(keys, rf"\A(?:{_NUMBER.pattern})\z")).as_py()
    is_open = shared.to_numpy(zero_copy_only=False)
    rounded = [bool(_ROUNDED.fullmatch(n)) or (are_numbers and "e" in n.lower()) for n in others]
    is_open[len(lower) :] |= np.array(rounded, dtype=bool)
    return int(is_open.sum()), len(names)


def check_stated(rule: Rule, *texts: Any) -> None:
    """Raise BudgetError if a rule leaves open which of these ids are of one person."""
    count, names = count_unstated(rule, *texts)
    if count:
        raise BudgetError(unstated(count, names))


def unstated(count: int, names: int) -> str:
    """What to state about ids whose spelling leaves open who they are."""
    return (
        f"{how_many(count, names)} ids of persons may be other spellings of an id: equal up to case, Unicode form, "
        "invisible characters, blanks, zeros in front or a decimal point, or rounded like 1.2E+14. State [data] ids = "
        f'"as written" if these are other people, or how they are made equal, by some of {", ".join(map(repr, WAYS))} '
        "(in Python: spelling=…; for a registry: --ids). Or correct the files."
    )


def _key(text: str) -> str:
    """What all spellings of an id have in common."""
    text = re.sub(r"\A([0-9]+[.,][0-9]*[1-9])0+\Z", r"\1", normalised(text, tuple(WAYS)))
    match = _NUMBER.fullmatch(text)
    return text if match is None else normalised(match[1] + "0" * int(match[2] or 0), tuple(WAYS))


def _as_arrow(ids: Any) -> Any:
    """pyarrow.Array (rows,). Lists of several types become texts. Raises BudgetError if that is impossible."""
    import pyarrow

    if not isinstance(ids, pyarrow.Array | pyarrow.ChunkedArray):
        if isinstance(ids, list) and set(map(type, ids)) == {str}:
            return pyarrow.array(ids, type=pyarrow.large_string())  # as below, without a look at each text
        ids = _as_array(ids)
        if ids.dtype == object:
            ids = pyarrow.array([_text(cell) for cell in ids.tolist()], type=pyarrow.large_string())
        else:
            ids = pyarrow.array(ids)
    ids = resolved(ids)
    if pyarrow.types.is_string(ids.type):
        ids = ids.cast(pyarrow.large_string())  # the texts of one array may take more than 2 GB
    if isinstance(ids, pyarrow.ChunkedArray):
        ids = pyarrow.concat_arrays(ids.chunks) if ids.num_chunks else pyarrow.array([], type=ids.type)
    return ids


def _as_array(ids: Any) -> Any:
    """(rows,) an array; a list keeps the types of its cells, which numpy would turn into one type."""
    try:
        array = np.array(list(ids), dtype=object) if isinstance(ids, list | tuple) else np.asarray(ids)
    except (TypeError, ValueError, RuntimeError):
        raise BudgetError("The ids of persons must be a flat list of texts or whole numbers, one per row.") from None
    if array.ndim == 2 and array.shape[1] > 1:
        raise BudgetError(SEVERAL_OWNERS.format(count=array.shape[1]))
    if array.ndim != 1 or len(array) == 0:
        raise BudgetError(f"The ids of persons must be a flat list, one per row, got shape {array.shape}.")
    if np.ma.is_masked(ids):
        raise BudgetError("Some ids of persons are masked. Every row needs one; fill them in, or leave these rows out.")
    return array


def _text(cell: Any) -> str | None:
    """An id as text; None for an empty one. Raises BudgetError for a value that is no id."""
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):  # pandas' empty cells
        return None
    limit = LARGEST_FLOAT
    if isinstance(cell, np.generic):
        if isinstance(cell, np.floating):
            limit = min(limit, 2 ** (np.finfo(cell.dtype).nmant + 1))  # larger ones do not hold every whole number
        cell = cell.item()
    if isinstance(cell, Decimal):
        text = f"{cell:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    if isinstance(cell, float):
        if np.isnan(cell):
            return None
        if not abs(cell) < limit:
            raise BudgetError(
                "Some ids of persons are infinite, or floats too large to be exact. Read the column as text or as "
                "whole numbers."
            )
    if isinstance(cell, bytes | bytearray | list | tuple | dict | set):
        raise BudgetError(f"The ids of persons must be texts or whole numbers, got a {type(cell).__name__}.")
    return as_text(cell)


# -- Persons: which rows of a table belong to one person, by an id in every row. No message, repr or file holds an id

#: What happens to a person whose rows state different budgets.
Conflict = Literal["refuse", "strictest"]


class Roster:
    """The persons of some budgets: their ids, and the rows that belong to them. Its repr shows neither.

    of_row  (rows,) each row's person, as a position; None after a choice of persons
    rule    how ids are made equal
    """

    def __init__(self, names: Any, of_row: IntArray | None, rule: Rule = ()) -> None:
        self._names = names  # pyarrow.Array of texts, (persons,)
        self.of_row = of_row
        self.rule = rule

    @classmethod
    def of(cls, ids: Any, rule: Rule = ()) -> Roster:
        """The persons of these ids (rows,), in the order of their first row. Raises BudgetError for an empty id."""
        from pyarrow import ArrowNotImplementedError

        cells = _as_arrow(ids)
        with suppress(BudgetError, ArrowNotImplementedError):  # errors count rows, and not different ids
            coded = cells.dictionary_encode()
            names = texts_of(coded.dictionary, rule).dictionary_encode()
            if not coded.null_count:
                places = names.indices.to_numpy().astype(np.int64)
                return cls(names.dictionary, read_only(taken(places, coded.indices.to_numpy())), rule)
        names = texts_of(cells, rule).dictionary_encode()
        return cls(names.dictionary, read_only(names.indices.to_numpy().astype(np.int64)), rule)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def texts(self) -> list[str]:
        """(persons,) their ids. Confidential."""
        names: list[str] = self._names.to_pylist()
        return names

    def positions(self, ids: Any) -> IntArray:
        """(rows,) the position of each id's person. Raises BudgetError for ids that have no budget."""
        import pyarrow.compute as pc

        texts = texts_of(ids, self.rule)
        found = pc.index_in(texts, value_set=self._names)
        if found.null_count:
            strangers = pc.count_distinct(texts.filter(pc.is_null(found))).as_py()
            raise BudgetError(
                f"{how_many(strangers, pc.count_distinct(texts).as_py())} persons have rows without a budget. Every "
                "person needs one: add these persons to the budgets, or leave their rows out."
            )
        return np.asarray(found.to_numpy().astype(np.int64))

    def chosen(self, positions: IntArray) -> Roster:
        """These persons, in this order, without rows. positions: each at most once"""
        return Roster(self._names.take(positions), None, self.rule)

    def check_stated(self) -> None:
        """Raise BudgetError if the rule leaves open which ids are of one person."""
        check_stated(self.rule, self._names)


def per_person(values: FloatArray, of_row: IntArray, persons: int) -> FloatArray:
    """(persons,) the smallest of each person's values (rows,)."""
    smallest = np.full(persons, np.inf)
    np.minimum.at(smallest, of_row, values)
    return smallest


def check_agreement(smallest: Sequence[FloatArray], values: Sequence[FloatArray], of_row: IntArray) -> None:
    """Raise BudgetError if some person's rows state different budgets.

    smallest  (persons,) arrays, the smallest value of each person
    values    (rows,) arrays, in the same order
    """
    differs = np.zeros(len(of_row), dtype=bool)
    for low, value in zip(smallest, values, strict=True):
        for part in parts(len(of_row)):
            differs[part] |= value[part] > low[of_row[part]]
    if differs.any():
        persons, disagree = len(smallest[0]), len(np.unique(of_row[differs]))
        raise BudgetError(
            f"{how_many(disagree, persons)} persons have rows that state different budgets. State one budget for each "
            'person, or pass conflict="strictest" (--conflict, [budgets] conflict), which takes the smallest epsilon '
            "and the smallest delta of each person."
        )


def as_conflict(name: str) -> Conflict:
    """The rule of this name. Raises BudgetError for another name."""
    if name in ("refuse", "strictest"):
        return cast(Conflict, name)
    raise BudgetError(f"conflict must be 'refuse' or 'strictest', got {name!r}.")


def as_unit(name: str) -> Unit:
    """The unit of this name. Raises BudgetError for another name."""
    if name in ("record", "person"):
        return cast(Unit, name)
    raise BudgetError(f"unit must be 'record' or 'person', got {name!r}.")


def one_column(person: Any) -> str:
    """The one column of ids. Raises BudgetError for several: no guarantee covers several owners of a row."""
    if isinstance(person, str):
        return person
    if isinstance(person, list | tuple | set) and len(person) != 1:
        raise BudgetError(SEVERAL_OWNERS.format(count=len(person)))
    raise BudgetError(f"person must be the name of one column, got a {type(person).__name__}.")
