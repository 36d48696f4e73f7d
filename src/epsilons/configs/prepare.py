"""What a config needs for training: records, budgets, a recipe. Everything wrong in a config is found here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..accounting.selection import Selection
from ..budgets.budgets import BudgetColumns, Budgets
from ..budgets.ids import Roster
from ..budgets.risk import as_contract
from ..core.disclosure import has_small_cells, how_many
from ..core.mechanism import IntArray, Unit
from ..data import Arrays, Source, sources
from ..data.images import is_image_table
from ..data.infer import names_persons, repeated_identifiers
from ..data.tables import Columns, Kept, chosen
from ..errors import BudgetError, DataError, EpsilonsWarning, InputError
from ..planning import Plan, Recipe, plan
from ..planning.guarantee import EACH_ROW
from ..tabular import ByColumn, column_of, days, is_table, open_table
from .config import BudgetsSection, Config, date_rule
from .config_file import strategy_options
from .config_training import column_of_persons
from .consent import Consent, Mask, are_in, check_names, consent, stated

if TYPE_CHECKING:
    from ..training.features import FixedFeatures
    from .registry_train import Members


# -- The budgets that a config names, and the rows that belong to each of them

#: The keys of [budgets] that are also arguments of `Budgets.from_csv`.
COLUMN_KEYS = {"column", "delta", "delta_column", "tiers", "tail"}


@dataclass(frozen=True, eq=False)
class Owned:
    """Budgets, and which rows of the data they are of. Ids are not kept: from here on, positions count.

    person  (rows,) each row's person, as a position in the budgets; None if each row has a budget of its own
    """

    budgets: Budgets
    person: IntArray | None = None

    def part(self, positions: IntArray) -> tuple[IntArray, Owned]:
        """(the rows of these records or persons, in data-set order, and their budgets)."""
        chosen = self.budgets.subset(positions)
        if self.person is None:
            return positions, Owned(chosen)
        place = np.full(len(self.budgets), -1, dtype=np.int64)
        place[positions] = np.arange(len(positions))
        rows = np.flatnonzero((place >= 0)[self.person])
        return rows, Owned(chosen, place[self.person[rows]])

    def of(self, rows: IntArray, everyone: bool = False) -> Owned:
        """The same of these rows alone. everyone: True to keep the budgets of persons without such rows."""
        if self.person is None:
            return Owned(self.budgets.subset(rows))
        present = np.arange(len(self.budgets)) if everyone else np.unique(self.person[rows])
        return Owned(self.budgets.subset(present), np.searchsorted(present, self.person[rows]))


def owned(config: Config, table: Any, rows: int, folder: Path, where: str, found: Consent | None) -> Owned:
    """The budgets of all training records, and their persons.

    table  the pyarrow.Table of the training data; None if they are none
    rows   number of training records
    where  the training data, for messages
    found  who takes part, and the entries of the file of budgets

    Raises BudgetError for budgets that do not fit the data, DataError for data that need a statement about persons.
    """
    column = column_of_persons(config.data.person_stated)
    if table is not None and config.budgets.file is None and config.budgets.shares is None:
        check_names(table.column_names, config.budgets, folder / where, column, False)
    if column is None:
        if config.data.person_stated is None:
            _check_stated(table, where)
        return Owned(_of_records(config, table, rows, folder, where, found))
    check_persons(config, table, where, None if found is None else found.rows)
    assert found is not None
    section = config.budgets
    if section.shares is not None:
        roster = Roster.of(found.rows)
        return Owned(_simulated(section, len(roster), "person"), roster.of_row)
    source, path = (table, where) if section.file is None else (found.usable, section.file)
    budgets = Budgets.from_table(source, folder / path, _columns(config, found))
    owner = Owned(budgets.without_ids(), budgets.persons_of(found.rows))
    return owner.of(np.arange(len(found.rows)), section.without_rows is not None)


def _columns(config: Config, found: Consent) -> BudgetColumns:
    """The columns with budgets of persons."""
    columns = _columns_in(config.budgets)
    person = column_of_persons(config.data.person_stated)
    return columns._replace(conflict=config.budgets.conflict, person=person, spelling=found.rule)


def _columns_in(section: BudgetsSection) -> BudgetColumns:
    """The columns with budgets of records."""
    columns = BudgetColumns(**section.model_dump(include=COLUMN_KEYS))
    return columns if section.risks is None else columns._replace(tiers=section.risks)


def check_persons(config: Config, table: Any, where: str, ids: Any) -> None:
    """Raise DataError if no column holds the id of each row's person; warn if another one may do so.

    ids  (rows,) as the join read them; None without persons
    """
    column = column_of_persons(config.data.person_stated)
    if column is None or ids is None:
        raise DataError(
            f"data.person must name the column with the id of each row's person, and {where} has none called "
            f'{column!r}. Name it, or write person = "{EACH_ROW}".'
        )
    _warn_of_other_ids(table, column, where)


def _of_records(config: Config, table: Any, rows: int, folder: Path, where: str, found: Consent | None) -> Budgets:
    """One budget per row: simulated, from a file, or from a column of the table."""
    section = config.budgets
    if section.shares is not None:
        return _simulated(section, rows, "record")
    columns = _columns_in(section)
    if section.file is not None:
        assert found is not None  # it has as many entries as there are records
        return Budgets.from_table(found.usable, folder / section.file, columns)
    if table is None:
        raise BudgetError(
            f"{where} has no columns to read budgets from. Give [budgets] file = … with one row per record, or "
            "simulate budgets with [budgets] shares."
        )
    return Budgets.from_table(table, folder / where, columns)


def _simulated(section: BudgetsSection, count: int, unit: Any) -> Budgets:
    assert section.shares is not None
    if section.risks is not None:
        contract, delta = as_contract(section.risks, section.tail, section.delta)
        shares = contract.shares(section.shares)
        return Budgets.from_shares(shares, records=count, delta=delta, seed=section.seed, unit=unit).limited(contract)
    shares = {float(level): share for level, share in section.shares.items()}
    return Budgets.from_shares(shares, records=count, delta=section.delta, seed=section.seed, unit=unit)


def _check_stated(table: Any, where: str) -> None:
    """Raise DataError if some column looks like ids of persons with several rows, and the config says nothing."""
    repeated = [] if table is None else repeated_identifiers(table)
    if repeated:
        name = repeated[0]
        raise DataError(
            f"Column {name!r} of {where} looks like the id of a person, and its values repeat: several rows may belong "
            "to one person, and a budget per row would not cover them together. Write in [data]: person = "
            f'"{name}" for one budget per person, with all rows of the person; or person = "{EACH_ROW}" if no person '
            "has several."
        )


def _warn_of_other_ids(table: Any, column: str, where: str) -> None:
    """Warn if every row has a person of its own, and another column looks like ids of persons with several rows."""
    repeated = repeated_identifiers(table)
    others = [name for name in repeated if names_persons(name)]
    if others and column not in repeated:
        warnings.warn(
            f"Every row of {where} has its own id in {column!r}, which data.person names, and the values of "
            f"{others[0]!r} repeat. If that is the id of a person, name it: otherwise a budget covers one row.",
            EpsilonsWarning,
            stacklevel=2,
        )


#: What contradicts a config whose held-out rows have budgets.
PUBLIC_ROWS = (
    "data.test_public = true lets scores be published, and the rows to test on are held out of {where}: people with "
    "budgets, whose scores no budget covers. Leave it out; or name public data in data.test. It is right only if all "
    "rows of {where} are public, such as those of a benchmark."
)


def check_public(config: Config) -> None:
    """Warn if scores on people with budgets may be published."""
    data, is_real = config.data, config.budgets.shares is None
    if data.test_public and is_real and (data.test_share is not None or data.test_after):
        warnings.warn(PUBLIC_ROWS.format(where=data.train), EpsilonsWarning, stacklevel=3)


def apart(config: Config, of_train: Any, of_test: Any, rows: int, members: Members | None) -> tuple[Mask, str | None]:
    """(rows,) which test rows are tested on, and how many persons are not because they also train.

    Those who withdrew from a registry are not. Those who also train are not if data.test_people says so; else there is
    a warning about them: scores are then too high.

    of_train, of_test  the ids of the rows; None without persons
    """
    kept, is_new = np.ones(rows, dtype=bool), config.data.test_people is not None
    if of_train is None or of_test is None:
        if is_new:
            raise DataError("data.test_people needs the column of data.person in the training and the test data.")
        return kept, None
    shared, persons = are_in(of_test, of_train), of_test.unique()
    if members is not None:
        kept = ~are_in(of_test, persons, members.withdrawn(persons.to_pylist()))
    if not shared.any():
        return kept, None
    found = f"{how_many(int(are_in(persons, of_train).sum()), len(persons))} persons of the test data"
    if is_new:
        return kept & ~shared, f"{found} also train: their rows are not tested on."
    warnings.warn(
        f"{found} have rows in the training data, too. Their scores are too high, and say little of others. Leave "
        'them out with data.test_people = "new", or hold persons out with data.test_share.',
        EpsilonsWarning,
        stacklevel=2,
    )
    return kept, None


def test_owned(config: Config, table: Any, path: Path, found: Consent | None, ids: Any) -> Owned | None:
    """The budgets of the records of another file: from their own table, or by their persons from the file of budgets.

    A person of the test data who is not in that file has no budget: position -1. None if there are no budgets.

    found  who of the test data takes part, and the entries of the file of budgets
    ids    (rows,) their persons; None without persons
    """
    section, columns = config.budgets, [] if table is None else table.column_names
    if section.shares is None and section.column in columns:
        if found is None or ids is None:
            return Owned(Budgets.from_table(table, path, _columns_in(section)))
        budgets = Budgets.from_table(table, path, _columns(config, found))
        return Owned(budgets.without_ids(), budgets.person)
    if section.file is None or found is None or ids is None or found.entries is None:
        return None  # simulated, or not known
    person = np.full(len(ids), -1, dtype=np.int64)
    known = np.flatnonzero(are_in(ids, found.entries.ids, found.entries.used))
    if not len(known):
        return None
    budgets = Budgets.from_table(found.usable, path.parent / section.file, _columns(config, found))
    present, person[known] = np.unique(budgets.persons_of(ids.take(known)), return_inverse=True)
    return Owned(budgets.subset(present).without_ids(), person)


# -- What a config needs for training: records, budgets, a recipe. Everything wrong in a config is found here

_SPLIT_SEED = 0  # the held-out records (or persons) depend on this and on their number alone


NEEDS_REGISTRY = (
    "The config has a section [registry]: its budgets are in a registry, and only epsilons train and plan "
    "read them, with --registry URL. Nothing was charged. Elsewhere, leave the section out."
)


@dataclass(frozen=True, eq=False)
class Prepared:
    """The data and budgets that a config names.

    train, test    records; test is None if there is no evaluation
    classes        names of the classes; None if the target is a number
    budgets        of the training records, or of the persons that they belong to
    test_owned     budgets of the test records; None if they are not known
    test_persons   how many persons the test records are of; None likewise, or without persons
    recipe         steps, batch size, clip norm
    features       what computed the inputs; None if they are those of the data
    persons        (training records,) each record's person, as a position in the budgets; None if each has a budget
    left_out       how many the config leaves out, in words by the rule of 20; None if none
    consent        who takes part and who does not, as `consent.stated` says it; None for records
    held_out       records that runs are scored on, for a selection; None without one
    judges         budgets of these
    """

    config: Config
    train: Arrays
    test: Arrays | None
    classes: tuple[str, ...] | None
    budgets: Budgets
    test_owned: Owned | None
    test_persons: int | None
    recipe: Recipe
    features: FixedFeatures | None = None
    persons: IntArray | None = None
    left_out: str | None = None
    consent: dict[str, Any] | None = None
    held_out: Arrays | None = None
    judges: Owned | None = None

    @property
    def outputs(self) -> int:
        """How many numbers a model must return for each record: one per class, or one."""
        return 1 if self.classes is None else len(self.classes)

    def plan(self) -> Plan:
        """The plan that the config asks for."""
        return plan_for(self.config, self.budgets, self.recipe)

    def test_groups(self, plan: Plan) -> IntArray | None:
        """(test records,) the plan's group of each record, -1 for a budget that no training record has.

        None also if the groups could be published (`data.test_public`) and one has fewer than 20 test persons.
        """
        if self.test_owned is None:
            return None
        budgets, person = self.test_owned.budgets, self.test_owned.person
        if person is not None and self.config.data.test_public and has_small_cells(budgets.groups):
            return None
        group = {pair: g for g, pair in enumerate(zip(plan.epsilons.tolist(), plan.delta.tolist(), strict=True))}
        pairs = zip(budgets.epsilons.tolist(), budgets.delta.tolist(), strict=True)
        groups = np.array([group.get(pair, -1) for pair in pairs], dtype=np.int64)[budgets.group]
        return groups if person is None else np.append(groups, -1)[person]  # -1: a person without a budget


def plan_for(config: Config, budgets: Budgets, recipe: Recipe, strategy: str | None = None) -> Plan:
    """The plan that a config asks for, or another strategy's, without options, in its place."""
    privacy = config.privacy
    shares: Mapping[Any, float] | None = privacy.public_shares
    if shares is not None and budgets.contract is None:
        shares = {float(level): share for level, share in shares.items()}
    return plan(
        budgets,
        recipe,
        strategy or privacy.strategy,
        privacy.accountant if budgets.groups.starts is None else "filter",  # the only one that adds up over runs
        runs=privacy.runs,
        select=None if privacy.select is None else Selection.of(privacy.select),
        class_noise=privacy.class_noise,
        public_shares=shares,
        public_records=privacy.public_records,
        **({} if strategy else strategy_options(privacy.options)),
    )


def recipe_for(config: Config, budgets: Budgets) -> Recipe:
    """Steps, batch and clip norm; under declared shares, epochs are of the declared number of records."""
    return config.training.recipe(config.privacy.public_records or len(budgets))


def budgets_to_train(config: Config, folder: Path) -> Budgets:
    """The budgets of the records that a config trains on, for a plan: of a table only their column is read.

    Raises InputError, but not for everything that `prepare` would find wrong in the data.
    """
    data = config.data
    if config.registry is not None:
        raise InputError(NEEDS_REGISTRY)
    check_public(config)
    chooser = consent(config, folder, data.train)
    if is_table(folder / data.train) and not is_image_table(folder / data.train):
        texts = [*_aside(config), *data.test_after]
        table = open_table(folder / data.train, "training data", DataError, texts, data.marks)
        table = table if chooser is None else chosen(table, chooser(table), folder / data.train)
        rows = len(table)
    else:
        source = _read(config, folder, data.train, "train", data.class_names, chooser)
        table, rows = source.table, len(source)
    owner = owned(config, table, rows, folder, data.train, chooser)
    if data.test_after:
        owner = owner.of(np.flatnonzero(_by_date(config, table)[0]), config.budgets.without_rows is not None)
    kept = owner.budgets
    held_out = None if config.privacy.select is None else config.privacy.held_out
    for share in filter(None, (data.test_share, held_out)):
        kept = kept.subset(split(share, len(kept), kept.unit)[1])
    return kept


def joined(config: Config, folder: Path, members: Members | None, with_test: bool = True) -> list[Consent]:
    """Who of the tables takes part, and what is not decided. Of the tables only ids and budgets are looked at."""
    found: list[Consent] = []
    for where in filter(None, (config.data.train, config.data.test if with_test else None)):
        chooser = consent(config, folder, where, members, trained=found[0] if found else None, is_check=True)
        if chooser is not None and is_table(folder / where):
            chooser(open_table(folder / where, "data", DataError, _aside(config), config.data.marks))
            found.append(chooser)
    return found


def split(share: float, count: int, unit: Unit, key: str = "data.test_share") -> tuple[IntArray, IntArray]:
    """(those to hold out, those to train on), in order, of records or persons. Raises DataError if none is left."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(count)
    held = max(1, round(share * count))
    if held == count:
        raise DataError(f"{key} = {share:g} leaves none of the {held:,} {unit}s to train on.")
    return np.sort(order[:held]), np.sort(order[held:])


def prepare(config: Config, folder: Path, run: Path | None = None, members: Members | None = None) -> Prepared:
    """Read the data and budgets that a config names; paths are taken from `folder`. Raises InputError.

    run      the folder of a run of this config, whose features are used again
    members  the people of a run that is charged to a registry, which has their budgets
    """
    data = config.data
    if config.registry is not None and members is None:
        raise InputError(NEEDS_REGISTRY)
    check_public(config)
    chooser = consent(config, folder, data.train, members)
    choice = None if members is not None else _Choice(config, folder, chooser)
    source = _read(config, folder, data.train, "train", data.class_names, chooser, choice)
    _check_loss(config, source)
    sides = _sides(config, folder, source, chooser, members)
    kept, shared = np.ones(0, dtype=bool), None
    if sides.test is not None:
        kept, shared = apart(config, sides.ids, sides.test_ids, len(sides.test), members)
        sides = replace(sides, test=sides.test.chosen(kept), test_ids=_some(sides.test_ids, kept))
    if members is not None:
        train, owner, held, test_persons = _charged(config, sides.train, sides.ids, members)
        test, tested = held or sides.test, None
    else:
        assert choice is not None
        owner = choice.budgets_of(source)  # all rows state budgets
        train, owner, test, tested = _with_budgets(config, folder, source, owner, sides, kept)
        test_persons = _persons_of(tested)
    scored, judges = None, None
    if config.privacy.select is not None and members is None:
        train, owner, scored, judges = _split(train, owner, config.privacy.held_out, "privacy.held_out")
    features = _features(config, folder, train, run)
    words = (
        None if chooser is None else chooser.words,
        None if members is None else members.left_out,
        sides.undated,
        shared,
    )
    return Prepared(
        config,
        train=_computed(features, train),
        test=None if test is None else _computed(features, test),
        classes=source.classes,
        budgets=owner.budgets,
        test_owned=tested,
        test_persons=test_persons,
        recipe=recipe_for(config, owner.budgets),
        features=features,
        persons=owner.person,
        left_out=" ".join(filter(None, words)) or None,
        consent=stated(config, *filter(None, (chooser, sides.chooser))),
        held_out=None if scored is None else _computed(features, scored),
        judges=judges,
    )


def _check_loss(config: Config, source: Source) -> None:
    if (source.classes is None) != (config.training.loss == "mse"):
        kind, loss = ("numbers", "mse") if source.classes is None else ("classes", "cross_entropy")
        raise DataError(f'The targets of {config.data.train} are {kind}; set training.loss = "{loss}".')


@dataclass(eq=False)
class _Choice:
    """Chooses the records of a table, and reads their budgets before the inputs take memory.

    owner  the budgets; None if they are refused: `budgets_of` says why, after what is wrong with other columns
    """

    config: Config
    folder: Path
    chooser: Consent | None
    owner: Owned | None = None

    def __call__(self, table: Any) -> Mask:
        """(rows,) which records are used."""
        used = np.ones(len(table), dtype=bool) if self.chooser is None else self.chooser(table)
        if used.any():
            some = chosen(table, used, self.folder / self.config.data.train)
            with suppress(InputError):
                self.owner = self._owned(some, len(some))
        return used

    def budgets_of(self, source: Source) -> Owned:
        """The budgets of these records, which were chosen."""
        return self._owned(source.table, len(source)) if self.owner is None else self.owner

    def _owned(self, table: Any, rows: int) -> Owned:
        return owned(self.config, table, rows, self.folder, self.config.data.train, self.chooser)


@dataclass(frozen=True, eq=False)
class _Sides:
    """The records to train on and to test on, before budgets are looked at.

    ids, test_ids  the persons of their rows; None without persons
    rows           (rows of the one, rows of the other) in the training data, if data.test_after cuts them
    undated        how many rows are neither, in words
    chooser        who of a file of test data takes part
    """

    train: Source
    test: Source | None
    ids: Any
    test_ids: Any = None
    rows: tuple[IntArray, IntArray] | None = None
    undated: str | None = None
    chooser: Consent | None = None


def _sides(config: Config, folder: Path, source: Source, chooser: Consent | None, members: Members | None) -> _Sides:
    """What data.test_after, data.test or a data set with a name say is for the test."""
    data, ids = config.data, None if chooser is None else chooser.rows
    if data.test_after:
        before, after, undated = _by_date(config, source.table)
        train, test = source.chosen(before), source.chosen(after)
        rows = np.flatnonzero(before), np.flatnonzero(after)
        return _Sides(train, test, _some(ids, before), _some(ids, after), rows, undated)
    where = data.test or data.train  # a data set with a name has its own test data
    if data.test is None and (data.test_share is not None or not sources.is_named(where, folder)):
        return _Sides(source, None, ids)
    test_chooser = consent(config, folder, where, members, trained=chooser)
    test = _read(config, folder, where, "test", source.classes, test_chooser)
    shapes = [part.arrays.inputs.shape[1:] for part in (source, test)]
    if shapes[0] != shapes[1]:
        raise DataError(f"Records must have one shape, got {shapes[0]} in {data.train} and {shapes[1]} in {where}.")
    return _Sides(source, test, ids, None if test_chooser is None else test_chooser.rows, chooser=test_chooser)


def _with_budgets(
    config: Config, folder: Path, source: Source, owner: Owned, sides: _Sides, kept: Mask
) -> tuple[Source, Owned, Source | None, Owned | None]:
    """Training and test data with their budgets. kept: (test rows,) which of them are tested on."""
    data = config.data
    if sides.rows is not None:
        trained = owner.of(sides.rows[0], config.budgets.without_rows is not None)
        return sides.train, trained, sides.test, owner.of(sides.rows[1][kept])
    if data.test_share is not None:
        if isinstance(source.table, ByColumn):
            source.table.forget()
        return _split(source, owner, data.test_share)
    if sides.test is None:
        return source, owner, None, None
    path = folder / (data.test or data.train)
    return source, owner, sides.test, test_owned(config, sides.test.table, path, sides.chooser, sides.test_ids)


def _by_date(config: Config, table: Any) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], str | None]:
    """(rows,) which rows are trained on, which are tested on by test_after, and how many are neither. Raises DataError.

    It looks at each row alone. Which people are trained on then depends on the dates of their rows.
    """
    data, path = config.data, Path(config.data.train)
    ((name, values),) = data.test_after.items()
    if table is None:
        raise DataError(f"{path} is no table, and data.test_after names a column of dates.")
    rule = date_rule([values[0], *values])
    day = days(column_of(table, name, path, DataError), name, path, DataError, rule, data.columns.rule(name))
    before, after = day <= 0, day > 0
    if not (before.any() and after.any()):
        raise DataError(f"data.test_after leaves no rows of {path} to train on, or none to test on.")
    undated = int(np.isnan(day).sum())
    words = f"{how_many(undated, len(day))} rows have no date in {name!r}: they are neither trained nor tested on."
    return before, after, words if undated else None


def _split(
    source: Source, owner: Owned, share: float, key: str = "data.test_share"
) -> tuple[Source, Owned, Source, Owned]:
    """Training and test data with their budgets. All rows of one person are on one side. Raises DataError."""
    held, kept = split(share, len(owner.budgets), owner.budgets.unit, key)
    (test_rows, tested), (rows, trained) = owner.part(held), owner.part(kept)
    if not (len(test_rows) and len(rows)):
        raise DataError(f"{key} = {share:g} leaves no rows to train on, or none to test on.")
    return source.subset(rows), trained, source.subset(test_rows), tested


def _some(ids: Any, rows: npt.NDArray[np.bool_]) -> Any:
    """The ids of these rows; None without persons."""
    return None if ids is None else ids.take(np.flatnonzero(rows))


def _charged(
    config: Config, source: Source, ids: Any, members: Members
) -> tuple[Source, Owned, Source | None, int | None]:
    """Training data of the people who take part, their budgets, test data of others if a share is held out, and how
    many people these are."""
    check_persons(config, source.table, config.data.train, ids)
    roster = Roster.of(ids)  # (persons,) in the order of first rows
    person, texts = roster.of_row, roster.texts
    assert person is not None
    share, kept = config.data.test_share, np.arange(len(texts))
    if share is not None:  # before anybody is left out, so that who is tested on stays the same from run to run
        held, kept = split(share, len(texts), "person")
    takes_part, budgets = members.choose([texts[i] for i in kept.tolist()])
    place = np.full(len(texts), -1, dtype=np.int64)
    place[kept[takes_part]] = np.arange(len(budgets))
    rows = np.flatnonzero(place[person] >= 0)
    owner = Owned(budgets.without_ids(), place[person[rows]])
    if share is None:
        return source.subset(rows), owner, None, None
    stays = ~members.withdrawn([texts[i] for i in held.tolist()])
    tested = np.flatnonzero(np.isin(person, held[stays]))
    if not len(tested):
        raise DataError(f"data.test_share = {share:g} leaves no rows to test on.")
    return source.subset(rows), owner, source.subset(tested), len(np.unique(person[tested]))


def _persons_of(owner: Owned | None) -> int | None:
    """How many persons the records are of; None without persons."""
    return None if owner is None or owner.person is None else len(np.unique(owner.person))


def _computed(features: FixedFeatures | None, source: Source) -> Arrays:
    """Features in the place of the inputs; with texts, beside them."""
    inputs, targets = source.arrays
    if features is None:
        return source.arrays
    return Arrays(features.in_place_of(np.asarray(inputs), source.texts), targets)


def _read(
    config: Config,
    folder: Path,
    where: str,
    split: str,
    classes: tuple[str, ...] | None,
    chooser: Consent | None,
    kept: Kept | None = None,
) -> Source:
    """The records of a file that `chooser` chooses; of a table, `kept` calls it."""
    data, aside = config.data, _aside(config)
    is_plain_table = is_table(folder / where) and not is_image_table(folder / where)
    features = replace(data.columns, texts=(*data.columns.texts, *aside, *({*data.test_after} & {*data.drop})))
    source = sources.read_source(
        where,
        split,
        folder,
        classes=classes,
        number=config.training.loss == "mse",
        pixels=data.features is not None,
        columns=Columns(data.target, features, aside, kept or chooser),
    )
    if chooser is None or is_plain_table:
        return source
    return source.chosen(chooser.of_rows(source.table, len(source)))


def _aside(config: Config) -> dict[str, str]:
    """Column -> the key that names it, of the columns of a table that are never inputs."""
    keys: dict[str | None, str] = dict.fromkeys(config.budgets.columns, "[budgets]")
    keys |= {column_of_persons(config.data.person_stated): "data.person"}
    return {name: key for name, key in keys.items() if name is not None}


def _features(config: Config, folder: Path, source: Source, run: Path | None) -> FixedFeatures | None:
    """The features that a config names, with the constants of a run if it has kept them."""
    section = config.data.features
    if section is None:
        return None
    from ..training.features import FEATURES, features_of_run
    from ..training.features.fixed import FILE, fixed

    options = dict(section.options)
    if isinstance(options.get("model"), str) and (folder / options["model"]).is_dir():
        options["model"] = str((folder / options["model"]).resolve())  # paths are relative to the config's folder
    if run is not None and (run / FILE).is_file():
        return replace(features_of_run(run), options=options)
    found = fixed(FEATURES, section.name, options, source.arrays.inputs)
    if found.kind.of_texts != (source.texts is not None):
        needed = (
            "texts: name their columns in data.text" if found.kind.of_texts else "images, and data.text names texts"
        )
        raise DataError(f"The features {section.name!r} are of {needed}.")
    if source.texts is None or not source.arrays.inputs.shape[1]:
        return found
    return replace(found, origin=f"{found.origin}; beside them other columns of the record")
