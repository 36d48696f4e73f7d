"""Columns of .csv, .tsv and .parquet files, with errors that quote no row: a row is one person's data."""

from __future__ import annotations

from .cells import (
    EMPTY,
    are_decimal,
    as_text,
    by_meaning,
    column_of,
    decimal,
    different,
    emptied,
    encoded,
    is_text,
    numbers,
    resolved,
)
from .dates import DateRule, days, holds_dates, is_day_first
from .files import TABLES, is_parquet, is_table, not_utf8, stem
from .left_out import meanings
from .marks import SEPARATORS, UNSTATED, Decimal, Marks, Separator, marks_of
from .parts import read_parts, slices
from .reading import read_table

__all__ = [
    "EMPTY",
    "SEPARATORS",
    "TABLES",
    "UNSTATED",
    "DateRule",
    "Decimal",
    "Marks",
    "Separator",
    "are_decimal",
    "as_text",
    "by_meaning",
    "column_of",
    "days",
    "decimal",
    "different",
    "emptied",
    "encoded",
    "holds_dates",
    "is_day_first",
    "is_parquet",
    "is_table",
    "is_text",
    "marks_of",
    "meanings",
    "not_utf8",
    "numbers",
    "read_parts",
    "read_table",
    "resolved",
    "slices",
    "stem",
]
