"""pyarrow, which is imported when a table is first read: it is in the extra `app`."""

from __future__ import annotations

from ..errors import Package

pyarrow, pc, types = Package("pyarrow"), Package("pyarrow.compute"), Package("pyarrow.types")
csv, parquet = Package("pyarrow.csv"), Package("pyarrow.parquet")
