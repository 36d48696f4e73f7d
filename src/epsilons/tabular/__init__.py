"""Columns of .csv, .tsv and .parquet files, with errors that quote no row: a row is one person's data."""

from __future__ import annotations

from .by_column import ByColumn, open_table, release
from .cells import (
    EMPTY,
    alike,
    are_decimal,
    as_text,
    column_of,
    decimal,
    emptied,
    encoded,
    is_text,
    meanings,
    numbers,
    resolved,
    speller,
)
from .dates import DateRule, days, holds_dates
from .reading import read_table
from .table_files import SEPARATORS, UNSTATED, Decimal, Marks, Separator, is_parquet, is_table, marks_of, not_utf8, stem

__all__ = [
    "EMPTY",
    "SEPARATORS",
    "UNSTATED",
    "ByColumn",
    "DateRule",
    "Decimal",
    "Marks",
    "Separator",
    "alike",
    "are_decimal",
    "as_text",
    "column_of",
    "days",
    "decimal",
    "emptied",
    "encoded",
    "holds_dates",
    "is_parquet",
    "is_table",
    "is_text",
    "marks_of",
    "meanings",
    "not_utf8",
    "numbers",
    "open_table",
    "read_table",
    "release",
    "resolved",
    "speller",
    "stem",
]
