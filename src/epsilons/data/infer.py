"""Guesses about a table's columns, for the draft that `epsilons init` writes.

Bounds and lists of values are read off the data here, so no guarantee covers them; the draft says so.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..core.disclosure import SMALLEST_SHOWN, how_many
from ..errors import DataError
from ..tabular import (
    UNSTATED,
    Marks,
    are_decimal,
    column_of,
    emptied,
    encoded,
    holds_dates,
    is_parquet,
    is_text,
    marks_of,
    read_table,
)
from ..tabular.cells import BLANKS, PLAIN, THOUSANDS, CellRule, bare
from ..tabular.dates import DateRule, days, is_date, is_day_first
from ..tabular.table_files import pc, pyarrow
from .guess_values import Values, are_short, decimal_mark, holds_texts, is_number, values_of
from .images import image_labels, is_image_table
from .sources import tensor_targets
from .tables import check_texts

# -- Bounds for the draft that `epsilons init` writes: round values beyond the smallest and the largest cell

_EPOCH = date(1970, 1, 1)


def number_bounds(values: Values) -> tuple[float, float, bool]:
    """(low, high, log): round numbers beyond the smallest and largest cell."""
    cells, counts = values.numbers, values.counts
    is_finite = np.isfinite(cells)
    cells, counts = cells[is_finite], counts[is_finite]
    if not len(cells):
        return 0.0, 1.0, False
    low, high = float(cells.min()), float(cells.max())
    log = max(abs(low), abs(high)) > 20 * (float(np.quantile(np.repeat(np.abs(cells), counts), 0.9)) + 1)
    low, high = outward(low, down=True), outward(high, down=False)
    return low, high if low < high else low + 1, log


def outward(value: float, down: bool) -> float:
    """The next round number (1, 2, 3, 5, 10 times a power of ten) away from the data.

    >>> outward(17, down=True), outward(90, down=False), outward(-8, down=True), outward(0, down=True)
    (10.0, 100.0, -10.0, 0.0)
    """
    if value == 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(abs(value)))
    sizes = [factor * power for factor in (1, 2, 3, 5, 10)]
    if (value < 0) == down:  # away from zero
        size = next(size for size in sizes if size >= abs(value) * (1 - 1e-12))
    else:
        size = next(size for size in reversed(sizes) if size <= abs(value) * (1 + 1e-12))
    return math.copysign(size, value)


def date_bounds(values: Values) -> tuple[str, ...]:
    """(first, last) day of whole years around a column's dates, and the order of day and month where it must be stated.

    Empty if the dates cannot be read: an order that the cells do not show, or years of two digits.
    """
    order = is_day_first(values.cells)
    try:
        found = days(values.cells, values.name, Path(), DataError, DateRule(_EPOCH, _EPOCH, order))
    except DataError:
        return ()
    if np.isnan(found).all():
        return ()
    first, last = (np.datetime64(int(end), "D").astype(date) for end in (np.nanmin(found), np.nanmax(found)))
    bounds = date(first.year, 1, 1).isoformat(), date(last.year, 12, 31).isoformat()
    return bounds if order is None else (*bounds, "day first" if order else "month first")


# -- What the other cells are in a column of numbers or dates, for the draft that `epsilons init` writes
#
# Marks of missing values, units and marks between thousands are read off the data here. The draft states them, and
# training reads cells by what is stated alone (`tabular.numbers`).

#: A column of numbers has them in this share of its filled cells. With fewer, but half of them, the draft says so.
MOST, HALF = 0.9, 0.5
#: Letters and digits of usual marks of missing values, such as n.b., and of units, such as g/dl, in lower case.
MISSING = "na nb nd ka km su nv x div none value wert missing unknown unbekannt fehlt entfällt keineangabe notdone"
UNITS = "g kg mg µg l ml cm mm h min bpm gl gdl mgl mgdl µgl ngml pgml mmoll µmoll nmoll ul iul mmhg 109l 1012l fl pg"
#: A number, and a unit that begins with no digit, or with 10^.
_CELL = re.compile(rf"[-+0-9.,'’{BLANKS}]*?[0-9.,][{BLANKS}]*((?![eE][+-]?[0-9])[^\s0-9.,+'’-].{{0,15}}|10\^.{{0,13}})")


@dataclass(frozen=True, eq=False)
class Dirty:
    """A column of texts in which at least half of the filled cells are numbers or dates.

    cells  the column with the numbers or dates alone, if they are MOST of the filled cells; others are empty
    rule   how its cells are read
    said   what its cells are, by the rule of 20
    """

    cells: Any
    rule: CellRule
    said: str


def dirty(column: Any, decimal: str | None) -> Dirty | None:
    """What a column of texts holds; None if it is clean, or holds no numbers or dates in half of its cells.

    decimal  the mark that is stated, if one is
    """
    texts, codes = encoded(column.cast(pyarrow.string()))
    counts, cells = np.bincount(codes, minlength=len(texts)), bare(texts, PLAIN)
    filled = int(counts[np.asarray(pc.is_valid(cells))].sum())
    plain = [_are(cells, mark) for mark in ".,"]
    if not filled or any(counts[is_number].sum() == filled for is_number in plain):
        return None
    rule, good = _rule(cells, counts, decimal)
    if holds_dates(column):
        rule, good = PLAIN, np.array([is_date(text or "") for text in cells.to_pylist()])
    read = int(counts[good].sum())
    if read < MOST * filled:
        said = f"{how_many(read, filled).lower()} are numbers or dates"
        return Dirty(column, PLAIN, said) if read >= HALF * filled else None
    rest = {c: n for c, n, is_good in zip(cells.to_pylist(), counts.tolist(), good, strict=True) if c and not is_good}
    usual = {cell: n for cell, n in rest.items() if _is_usual(cell, n)}
    beside, marked = " or ".join(map(repr, filter(None, (rule.unit, rule.thousands)))), sum(usual.values())
    found = {
        f"have {beside} beside their digits": int(counts[good & ~(plain[0] | plain[1])].sum()) if beside else 0,
        f"are marks of missing values ({', '.join(usual)})": marked,
        "cannot be read, and training refuses them unless data.missing names them": sum(rest.values()) - marked,
    }
    said = "; ".join(f"{how_many(n, filled).lower()} {what}" for what, n in found.items() if n)
    clean = pc.if_else(pyarrow.array(good), bare(cells, rule), "").take(pyarrow.array(codes))
    return Dirty(clean, replace(rule, missing=tuple(usual)), said) if said else None


def _rule(cells: Any, counts: npt.NDArray[np.int64], decimal: str | None) -> tuple[CellRule, npt.NDArray[np.bool_]]:
    """The unit and the mark between thousands that read the most cells, and (cells,) which these are."""
    units = Counter(form[1] for cell in cells.to_pylist() if (form := _CELL.fullmatch(cell or "")))
    unit = next((u for u, n in units.most_common(1) if n >= SMALLEST_SHOWN or _is_usual(u, n)), None)
    rules = [(CellRule((), unit, t), m) for t in (None, *THOUSANDS) for m in (decimal or ".,").replace(t or " ", "")]
    found = [(rule, _are(bare(cells, rule), mark)) for rule, mark in rules]
    plain = np.any([read for rule, read in found if rule.thousands is None], axis=0)
    # 1.234 may have three decimals, 1.234,5 has not.
    shown = [(rule, read) for rule, read in found if rule.thousands is None or (read & ~plain).any()]
    return max(shown, key=lambda one: int(counts[one[1]].sum()))


def _are(cells: Any, mark: str) -> npt.NDArray[np.bool_]:
    return np.asarray(are_decimal(cells, mark).fill_null(False), dtype=bool)


def _is_usual(text: str, count: int) -> bool:
    """Whether a text is a usual mark or unit, has no letter or digit, or is in many cells and has no digit."""
    letters = re.sub(r"[\W_]", "", text.lower())
    is_common = count >= SMALLEST_SHOWN and not re.search("[0-9]", text)
    return is_common or not letters or letters in f"{MISSING} {UNITS}".split()


# -- Guesses about a table's columns, for the draft that `epsilons init` writes

#: Usual names of the column to predict, and of the column of budgets.
TARGETS = ("label", "target", "class", "outcome", "y")
BUDGETS = ("epsilon", "eps", "budget", "privacy", "consent", "tier")

MOST_CLASSES = 100
MOST_VALUES = 50  # a text column with more values is hashed
BUCKETS = 64

#: Names of columns that identify a person or a record. They are dropped.
IDENTIFIERS = re.compile(
    r"(.*[_\W])?(ids?|mrn|ssn|uuid|guid|pid|uid)"
    r"|(pat|patient(en)?|person(en)?|people|subject|participant|respondent|member|customer|client|user|employee|student"
    r"|pupil|individual|household|nhs|proband(en|in)?|versicherten?|teilnehmer|kunden?|mitglied)s?"
    r"([_\W]*(ids?|no|nr|num|number|nummer|key|code|ref|name|kennung))?\W*"
)
#: Names of columns of digits that are codes, and not quantities: a larger one is not more of anything.
CODES = re.compile(r"(.*[_\W])?(zip|zip_?codes?|postal|postal_?codes?|post_?codes?|plz|codes?)([_\W]?[45])?")
_HAS_ID = re.compile(r".*(ids?|mrn|ssn|uuid|guid|no|nr|num|number|nummer|key|code|ref|name|kennung)\W*")
_PERSONS = re.compile(
    r"person|people|patient|subject|participant|respondent|member|customer|client|user|employee|student|pupil"
    r"|proband|versicherte|teilnehmer|kunde|mitglied|mrn|nhs|\bpat(?![a-z])|\bpat(id|no|nr|num)"
)
_ROW_NUMBERS = re.compile(r"(.*[_\W])?(no|nr|number|index|key)")
#: Fewer values than this, in a column such as `member` or `customer`, are kinds of persons, and no ids.
FEWEST_PERSONS = 20
#: This many different whole numbers, in more than half of the rows, may be codes or quantities.
MANY_NUMBERS = 1000


@dataclass(frozen=True)
class Column:
    """How one column may become an input.

    kind    "numeric", "dates", "categorical", "text" or "drop"
    bounds  (low, high, log) of a numeric column; log if a few numbers are far larger than most
    values  of a categorical column: those that at least 20 records hold; empty if the column should be hashed
    code    for numbers: "code" if they look like codes, "either" if they may be codes or quantities
    days    (first, last) as texts, and perhaps the order of day and month, of a column of dates
    dates   True if the column holds dates
    repeats (values, filled cells) of an identifier that several records share
    short   True for texts of few words, such as names
    dirty   what the cells are, if only some are numbers or dates
    """

    name: str
    kind: Literal["numeric", "dates", "categorical", "text", "drop"]
    bounds: tuple[float, float, bool] | None = None
    values: tuple[Any, ...] = ()
    code: Literal["code", "either"] | None = None
    days: tuple[str, ...] = ()
    dates: bool = False
    repeats: tuple[int, int] | None = None
    short: bool = False
    dirty: Dirty | None = None


@dataclass(frozen=True)
class TableGuess:
    """What the columns of a table may be for.

    records  rows of the table
    target   the column to predict
    classes  its values; None if it is a number
    budget   the column of budgets; None if there is none
    tiers    the values of the column of budgets, if they are names; None if they are numbers
    columns  all other columns, in the table's order, and then the target if it is a number
    marks    the separator and the decimal mark of a text file; None where a draft need not state them
    missing  what cells without a budget hold: "blank", "zero", "infinite"
    """

    records: int
    target: str
    classes: tuple[Any, ...] | None
    budget: str | None
    tiers: tuple[Any, ...] | None
    columns: tuple[Column, ...]
    marks: Marks = UNSTATED
    missing: tuple[str, ...] = ()

    def names(self, kind: str) -> list[str]:
        """The columns of this kind."""
        return [column.name for column in self.columns if column.kind == kind]

    @property
    def read_off(self) -> list[str]:
        """The columns whose bounds, values or classes were read off the table; the target last."""
        listed = [column.name for column in self.columns if column.bounds or column.values or column.days]
        return listed if self.classes is None else [*listed, self.target]


def guess_table(path: Path, target: str | None, budget: str | None, marks: Marks = UNSTATED) -> TableGuess:
    """What the columns of the table at `path` may be for.

    target, budget  the columns of these roles; None to guess them by their names
    marks           the separator and the decimal mark of a text file, where they are stated

    Raises DataError if the table cannot be used, or a named column is not there.
    """
    table = read_table(path, "data", DataError, marks=marks, as_written=True)
    if table.num_rows == 0:
        raise DataError(f"{path} has a header but no rows.")
    names: list[str] = list(table.column_names)
    for name in names:
        column_of(table, name, path, DataError)  # refuses two columns of one name
    if not is_parquet(path):  # in a .parquet file, columns of bytes are allowed and dropped
        check_texts(table, names, path)
    target, budget = _roles(names, target, budget, path)
    check_texts(table, [target, *([budget] if budget else [])], path)
    texts = [name for name in names if name != budget and not is_identifier(name) and is_text(table.column(name))]
    found = {name: one for name in texts if (one := dirty(table.column(name), marks.decimal))}
    if target in found and len(found[target].cells.unique()) <= 21:  # classes
        del found[target]
    for name, one in found.items():
        table = table.set_column(names.index(name), name, one.cells)
    marks = Marks(marks_of(table).separator, marks.decimal or decimal_mark(table, path))  # texts of .parquet files, too
    guess = _guess(table, target, budget, path, marks)
    return replace(guess, columns=tuple(replace(column, dirty=found.get(column.name)) for column in guess.columns))


def _roles(names: list[str], target: str | None, budget: str | None, path: Path) -> tuple[str, str | None]:
    """The columns to predict and of the budgets: those that are requested, or those that their names suggest."""
    budget = _choose(budget, names, BUDGETS, path, "--budget")
    if target is not None and target == budget:
        raise DataError(f"Column {target!r} of {path} cannot be both --target and --budget; name two columns.")
    target = _choose(target, [name for name in names if name != budget], TARGETS, path, "--target")
    if target is None:  # most tables have their target in the last column
        others = [name for name in reversed(names) if name != budget]
        if not others:
            raise DataError(f"{path} has no column to predict besides that of the budgets, {budget!r}.")
        target = next((name for name in others if not is_identifier(name)), others[0])
    return target, budget


def _guess(table: Any, target: str, budget: str | None, path: Path, marks: Marks) -> TableGuess:
    others = [name for name in table.column_names if name not in (target, budget)]
    columns = [_guess_column(values_of(table, name, path, marks), table) for name in others]
    goals = values_of(table, target, path, marks)
    classes = None if goals.kind == "number" and len(goals) > 20 else _names(goals, path, "--target")
    if len(goals) < 2:
        raise DataError(
            f"Column {target!r} of {path} holds {'one value' if len(goals) else 'no value'} in all rows, so there is "
            "nothing to learn. Name another --target."
        )
    if classes is None:
        columns.append(Column(target, "numeric", number_bounds(goals)))
    tiers: tuple[Any, ...] | None = None
    missing: tuple[str, ...] = ()
    if budget is not None:
        offered = values_of(table, budget, path, marks, budgets=True)
        tiers = None if offered.kind == "number" else _names(offered, path, "--budget")
        missing = offered.missing
    is_usual = marks.separator in (None, ",") and marks.decimal != ","
    stated = UNSTATED if is_usual else marks
    return TableGuess(table.num_rows, target, classes, budget, tiers, tuple(columns), stated, missing)


def repeated_identifiers(table: Any) -> list[str]:
    """The columns of a pyarrow.Table that identify persons or records, by their names, and hold repeated values.

    Those with the name of persons are first.
    """
    names: list[str] = sorted(dict.fromkeys(table.column_names), key=lambda name: not names_persons(name))
    return [name for name in names if _repeats(table, name) is not None]


def names_persons(name: str) -> bool:
    """Whether the name of a column says that it is about persons, and not about other things with ids.

    >>> [name for name in ("Patient", "customer_id", "visit_id", "id") if names_persons(name)]
    ['Patient', 'customer_id']
    """
    return _PERSONS.search(name.lower()) is not None


def count_classes(path: Path) -> int | None:
    """The number of classes in an image file or a folder of tensors; None if the target is a number."""
    targets = image_labels(path) if is_image_table(path) else tensor_targets(path, "training data")
    is_number = np.issubdtype(targets.dtype, np.floating) or targets.size == 0
    return None if is_number else max(2, int(targets.max()) + 1)


def _choose(requested: str | None, names: Sequence[str], usual: Sequence[str], path: Path, flag: str) -> str | None:
    """The requested column, or the first with a usual name, or with a usual word in its name."""
    if requested is not None:
        if requested not in names:
            raise DataError(f"{path} has no column {requested!r} for {flag}; it has: {', '.join(map(repr, names))}.")
        return requested
    lower = {name.lower(): name for name in reversed(names)}
    exact = [lower[name] for name in usual if name in lower]
    partly = [name for name in names for word in usual if len(word) > 2 and word in re.split(r"[^a-z]+", name.lower())]
    return (exact + partly + [None])[0]


def _names(values: Values, path: Path, flag: str) -> tuple[Any, ...]:
    """The values of a column of classes or tiers."""
    cells = values.sample if values.kind == "text" else []
    if len(values) > MOST_CLASSES or (cells and holds_texts(values.name, cells)):
        raise DataError(f"Column {values.name!r} of {path} holds {len(values):,} different texts; name another {flag}.")
    return tuple(values.sorted())


def _guess_column(values: Values, table: Any) -> Column:
    name, rows = values.name, table.num_rows
    if values.kind == "date" and not is_identifier(name) and (days := date_bounds(values)):
        return Column(name, "dates", days=days, dates=True)
    if len(values) <= 1 or is_identifier(name) or values.kind in ("bytes", "date"):
        return Column(name, "drop", dates=values.kind == "date", repeats=_repeats(table, name))
    if values.kind == "number":
        if len(values) == rows and _ROW_NUMBERS.fullmatch(name.lower()):
            return Column(name, "drop")
        code = _likely_code(values, rows)
        if code == "code":
            return Column(name, "categorical", code=code)
        return Column(name, "numeric", number_bounds(values), code=code)
    if values.kind == "text" and holds_texts(name, values.sample):
        return Column(name, "text", short=are_short(values.sample))
    if len(values) > max(MOST_VALUES, 0.5 * rows):
        return Column(name, "drop")
    common = tuple(values.sorted(SMALLEST_SHOWN)) if values.common(SMALLEST_SHOWN) <= MOST_VALUES else ()
    return Column(name, "categorical", values=common)


def is_identifier(name: str) -> bool:
    """Whether the name of a column says that it identifies a person or a record.

    >>> [name for name in ("mrn", "Patient", "patientId", "visit_id", "aid", "subjective") if is_identifier(name)]
    ['mrn', 'Patient', 'patientId', 'visit_id']
    """
    return IDENTIFIERS.fullmatch(name.strip().lower()) is not None


def _likely_code(values: Values, rows: int) -> Literal["code", "either"] | None:
    """Whether the numbers of a column are codes: by the column's name, by leading zeros, or perhaps by their count."""
    if not values.are_whole:
        return None
    if values.has_leading_zeros or CODES.fullmatch(values.name.strip().lower()):
        return "code"
    if (values.numbers < 0).any():  # no code has a sign
        return None
    return "either" if len(values) >= MANY_NUMBERS and len(values) > rows / 2 else None


def _repeats(table: Any, name: str) -> tuple[int, int] | None:
    """(values, filled cells) if the column is an identifier that several records share.

    Blanks around a value do not make another one.
    """
    if not is_identifier(name):
        return None
    cells = table.column(table.column_names.index(name))
    if not (is_number(cells.type) or is_text(cells)):
        return None
    if is_text(cells):
        cells = pc.utf8_trim(emptied(cells.cast("string")), " \t")
    filled = pc.drop_null(cells)
    values = pc.count_distinct(filled).as_py()
    fewest = 2 if _HAS_ID.fullmatch(name.strip().lower()) else FEWEST_PERSONS
    return (values, len(filled)) if fewest <= values < len(filled) else None
