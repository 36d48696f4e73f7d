"""Which records a config leaves out, because their budget is missing and the config says what that means."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..budget_columns import epsilon_column, tier_column
from ..disclosure import how_many
from ..errors import BudgetError
from ..persons import texts_of
from ..tabular import Marks, is_text, kept_rows, read_table
from .config import BudgetsSection, Config
from .config_persons import column_of_persons

#: What being left out means for the guarantee.
ROSTER = (
    "Who is left out is a part of the list of budgets, so while the roster is public, the guarantee does not hide it."
)


@dataclass(eq=False)
class Consent:
    """Chooses the records of a data set that are used, by their column of budgets.

    path    the data
    person  the column of persons: if one row is left out, all rows of its person are
    listed  the file of budgets; None if the data hold them
    """

    section: BudgetsSection
    path: Path
    person: str | None
    listed: Any = None
    _counted: tuple[int, int] | None = field(default=None, init=False)

    def __call__(self, table: Any) -> npt.NDArray[np.bool_]:
        """(rows,) which records of the data are used."""
        kept = self._by_file(table) if self.listed is not None else self._by_column(table)
        self._counted = self._count(table, kept)
        return kept

    def of_rows(self, table: Any, rows: int) -> npt.NDArray[np.bool_]:
        """The same for data that may have no table."""
        if table is not None:
            return self(table)
        if self.listed is None or self.person is not None:
            return np.ones(rows, dtype=bool)  # the readers of budgets and ids refuse such data
        kept = self._file_rows()
        self._check_length(len(kept), rows)
        self._counted = int((~kept).sum()), len(kept)
        return kept

    @property
    def words(self) -> str | None:
        """How many are left out, by the rule of 20; None if none is."""
        if self._counted is None or not self._counted[0]:
            return None
        unit = "records" if self.person is None else "persons"
        return f"{how_many(*self._counted)} {unit} are left out, as [budgets] says. {ROSTER}"

    def _by_column(self, table: Any) -> npt.NDArray[np.bool_]:
        if self.section.column not in table.column_names:  # reading the budgets refuses that
            return np.ones(len(table), dtype=bool)
        return _kept(table, self.section, self.path, self.person)

    def _by_file(self, table: Any) -> npt.NDArray[np.bool_]:
        kept = self._file_rows()
        if self.person is None:
            self._check_length(len(kept), len(table))
            return kept
        if self.person not in table.column_names:
            return np.ones(len(table), dtype=bool)
        return ~_are_in(texts_of(table.column(self.person)), texts_of(self.listed.column(self.person)), ~kept)

    def _file_rows(self) -> npt.NDArray[np.bool_]:
        return _kept(self.listed, self.section, self.path.parent / (self.section.file or ""), self.person)

    def _check_length(self, budgets: int, rows: int) -> None:
        if budgets != rows:
            raise BudgetError(
                f"{self.section.file} holds {budgets:,} budgets for the {rows:,} records of {self.path}. It needs one "
                "row per record, in the same order; or name the column of ids of both files in data.person."
            )

    def _count(self, table: Any, kept: npt.NDArray[np.bool_]) -> tuple[int, int]:
        """(left out, all) of records, or of persons."""
        import pyarrow

        if self.person is None or self.person not in table.column_names:
            return int((~kept).sum()), len(kept)
        ids = texts_of(table.column(self.person))
        return len(ids.filter(pyarrow.array(~kept)).unique()), len(ids.unique())


def _kept(table: Any, section: BudgetsSection, path: Path, person: str | None) -> npt.NDArray[np.bool_]:
    """(rows,) False for rows that are left out; with persons, for all rows of a person of whom one row is."""
    kept = kept_rows(table, section.column, path, BudgetError, section.missing)
    _check_others(table, section, path, kept)
    if person is None or person not in table.column_names or kept.all():
        return kept
    ids = texts_of(table.column(person))
    return ~_are_in(ids, ids, ~kept)


def _check_others(table: Any, section: BudgetsSection, path: Path, kept: npt.NDArray[np.bool_]) -> None:
    """Raise BudgetError, with rows counted in the file, if a cell of a record that is used is no budget."""
    import pyarrow
    import pyarrow.compute as pc

    if not kept.any():
        return  # there is nothing to train on, which is refused
    place = table.column_names.index(section.column)
    cells = table.column(place)
    usable: Any = 1 if section.tiers is None else next(iter(section.tiers))
    filler = pyarrow.scalar(str(usable) if is_text(cells) else usable, cells.type)
    whole = table.set_column(place, section.column, pc.if_else(pyarrow.array(kept), cells.combine_chunks(), filler))
    if section.tiers is None:
        epsilon_column(whole, section.column, path)
    else:
        tier_column(whole, section.column, path, section.tiers)


def _are_in(ids: Any, others: Any, where: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """(rows,) which ids are among the others, of those where `where` is True."""
    import pyarrow
    import pyarrow.compute as pc

    return np.asarray(pc.is_in(ids, value_set=others.filter(pyarrow.array(where))))


def consent(config: Config, folder: Path, where: str, is_test: bool = False) -> Consent | None:
    """What chooses the records of a file; None if the config leaves out none.

    is_test  True for a file of test data, to which a file of budgets in the order of the training records says nothing
    """
    section, person = config.budgets, column_of_persons(config.data.person_stated)
    if not section.missing or section.shares is not None:
        return None
    if section.file is None:
        return Consent(section, folder / where, person)
    return None if is_test and person is None else Consent(section, folder / where, person, listed(config, folder))


def listed(config: Config, folder: Path) -> Any:
    """The pyarrow.Table in the config's file of budgets."""
    section, person = config.budgets, column_of_persons(config.data.person_stated)
    assert section.file is not None
    texts = [name for name in (section.column, section.delta_column, person) if name]
    return read_table(folder / section.file, "budgets", BudgetError, texts, Marks(section.separator, section.decimal))


def offered(config: Config, folder: Path) -> Any:
    """The rows in the config's file of budgets, without those that leave their records out."""
    import pyarrow

    section, table = config.budgets, listed(config, folder)
    if not section.missing or section.column not in table.column_names:
        return table
    kept = _kept(table, section, folder / str(section.file), column_of_persons(config.data.person_stated))
    return table.filter(pyarrow.array(kept))
