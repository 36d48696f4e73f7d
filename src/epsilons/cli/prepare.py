"""What a config needs for training: records, budgets, a recipe. Everything wrong in a config is found here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..budgets import Budgets
from ..data import Arrays, Source, sources
from ..data.images import is_image_table
from ..errors import BudgetError, DataError
from ..mechanism import IntArray
from ..planning import Plan, Recipe, plan
from ..tabular import TABLES, read_table
from .config import BudgetsSection, Config
from .options import strategy_options

if TYPE_CHECKING:
    from ..training.features import FixedFeatures

#: The keys of [budgets] that are also arguments of `Budgets.from_csv` and `Budgets.from_table`.
COLUMN_KEYS = {"column", "delta", "delta_column", "tiers"}

_SPLIT_SEED = 0  # the held-out records depend on this and on the number of records alone


@dataclass(frozen=True, eq=False)
class Prepared:
    """The data and budgets that a config names.

    train, test    records; test is None if there is no evaluation
    classes        names of the classes; None if the target is a number
    budgets        of the training records
    test_budgets   of the test records; None if they are not known
    recipe         steps, batch size, clip norm
    features       what computed the inputs; None if they are those of the data
    """

    config: Config
    train: Arrays
    test: Arrays | None
    classes: tuple[str, ...] | None
    budgets: Budgets
    test_budgets: Budgets | None
    recipe: Recipe
    features: FixedFeatures | None = None

    @property
    def outputs(self) -> int:
        """How many numbers a model must return for each record: one per class, or one."""
        return 1 if self.classes is None else len(self.classes)

    def plan(self) -> Plan:
        """The plan that the config asks for."""
        return plan_for(self.config, self.budgets, self.recipe)

    def test_groups(self, plan: Plan) -> IntArray | None:
        """(test records,) the plan's group of each record, -1 for a budget that no training record has."""
        budgets = self.test_budgets
        if budgets is None:
            return None
        group = {pair: g for g, pair in enumerate(zip(plan.epsilons.tolist(), plan.delta.tolist(), strict=True))}
        pairs = zip(budgets.epsilons.tolist(), budgets.delta.tolist(), strict=True)
        return np.array([group.get(pair, -1) for pair in pairs], dtype=np.int64)[budgets.group]


def plan_for(config: Config, budgets: Budgets, recipe: Recipe, strategy: str | None = None) -> Plan:
    """The plan that a config asks for, or another strategy's, without options, in its place."""
    privacy = config.privacy
    shares = privacy.public_shares
    return plan(
        budgets,
        recipe,
        strategy or privacy.strategy,
        privacy.accountant,
        runs=privacy.runs,
        public_shares=None if shares is None else {float(level): share for level, share in shares.items()},
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
    if (folder / data.train).suffix in TABLES and not is_image_table(folder / data.train):
        aside = [config.budgets.column, *([config.budgets.delta_column] if config.budgets.delta_column else [])]
        table = read_table(folder / data.train, "training data", DataError, texts=aside)
        budgets = _budgets(config.budgets, len(table), table, folder, data.train)
    else:
        source = _read(config, folder, data.train, "train", data.class_names)
        budgets = _budgets(config.budgets, len(source), source.table, folder, data.train)
    return budgets if data.test_share is None else budgets.subset(split(data.test_share, len(budgets))[1])


def split(share: float, records: int) -> tuple[IntArray, IntArray]:
    """(the records to hold out, those to train on), in order. Raises DataError if none is left to train on."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(records)
    held = max(1, round(share * records))
    if held == records:
        raise DataError(f"data.test_share = {share:g} leaves none of the {held:,} records to train on.")
    return np.sort(order[:held]), np.sort(order[held:])


def prepare(config: Config, folder: Path, run: Path | None = None) -> Prepared:
    """Read the data and budgets that a config names; paths are taken from `folder`. Raises InputError.

    run  the folder of a run of this config, whose features are used again
    """
    data = config.data
    source = _read(config, folder, data.train, "train", data.class_names)
    if (source.classes is None) != (config.training.loss == "mse"):
        kind, loss = ("numbers", "mse") if source.classes is None else ("classes", "cross_entropy")
        raise DataError(f'The targets of {data.train} are {kind}; set training.loss = "{loss}".')
    budgets = _budgets(config.budgets, len(source), source.table, folder, data.train)
    train, test, test_budgets = source, None, None
    test_name = data.test
    if test_name is None and sources.is_named(data.train, folder):
        test_name = data.train
    if data.test_share is not None:
        held_out, rest = split(data.test_share, len(source))
        test, test_budgets = source.subset(held_out), budgets.subset(held_out)
        train, budgets = source.subset(rest), budgets.subset(rest)
    elif test_name is not None:
        test = _read(config, folder, test_name, "test", source.classes)
        shapes = [part.arrays.inputs.shape[1:] for part in (train, test)]
        if shapes[0] != shapes[1]:
            raise DataError(
                f"Training and test records must have one shape, got {shapes[0]} in {data.train} and {shapes[1]} in "
                f"{test_name}."
            )
        columns = [] if test.table is None else test.table.column_names
        if config.budgets.column in columns and config.budgets.shares is None:
            test_budgets = _from_table(config.budgets, test.table, folder / test_name)
    recipe = recipe_for(config, budgets)
    features = _features(config, folder, train, run)
    inputs = _computed(features, train)
    tested = None if test is None else _computed(features, test)
    return Prepared(config, inputs, tested, source.classes, budgets, test_budgets, recipe, features)


def _computed(features: FixedFeatures | None, source: Source) -> Arrays:
    """Features in the place of the inputs; with texts, beside them."""
    inputs, targets = source.arrays
    if features is None:
        return source.arrays
    if source.texts is None:
        return Arrays(features(as_tensor(inputs)).numpy(), targets)
    computed = features(_records_of(source.texts)).numpy()
    return Arrays(np.concatenate([computed, inputs], axis=1) if inputs.shape[1] else computed, targets)


def _records_of(texts: Any) -> Any:
    """A list of texts (records,), or of tuples of texts if there are several columns."""
    return texts[:, 0].tolist() if texts.shape[1] == 1 else [tuple(row) for row in texts.tolist()]


def _read(config: Config, folder: Path, where: str, split: str, classes: tuple[str, ...] | None) -> Source:
    data, budgets = config.data, config.budgets
    aside = [budgets.column, *([budgets.delta_column] if budgets.delta_column else [])]
    return sources.read_source(
        where,
        split,
        folder,
        target=data.target,
        classes=classes,
        number=config.training.loss == "mse",
        features=replace(data.columns, texts=(*data.columns.texts, *aside)),
        aside=aside,
        pixels=data.features is not None,
    )


def _features(config: Config, folder: Path, source: Source, run: Path | None) -> FixedFeatures | None:
    """The features that a config names, with the constants of a run if it has kept them."""
    section = config.data.features
    if section is None:
        return None
    from ..training.features import FEATURES, features_of_run  # only here, because they import torch
    from ..training.features.fixed import FILE, fixed

    options = dict(section.options)
    if isinstance(options.get("model"), str) and (folder / options["model"]).is_dir():
        options["model"] = str(folder / options["model"])  # paths are relative to the config's folder
    if run is not None and (run / FILE).is_file():
        return replace(features_of_run(run), options=options)
    found = fixed(FEATURES, section.name, options, as_tensor(source.arrays.inputs))
    if found.kind.of_texts != (source.texts is not None):
        needed = (
            "texts: name their columns in data.text" if found.kind.of_texts else "images, and data.text names texts"
        )
        raise DataError(f"The features {section.name!r} are of {needed}.")
    if source.texts is None or not source.arrays.inputs.shape[1]:
        return found
    return replace(found, origin=f"{found.origin}; beside them other columns of the record")


def as_tensor(inputs: Any) -> Any:
    """An array of numbers as a tensor."""
    from torch import from_numpy

    return from_numpy(inputs)


def _budgets(section: BudgetsSection, records: int, table: Any, folder: Path, where: str) -> Budgets:
    """The budgets of all records of the training data: simulated, from a file, or from a column of the table."""
    if section.shares is not None:
        shares = {float(level): share for level, share in section.shares.items()}
        return Budgets.from_shares(shares, records=records, delta=section.delta, seed=section.seed)
    if section.file is not None:
        file = folder / section.file
        budgets = Budgets.from_csv(file, **section.model_dump(include=COLUMN_KEYS))
        if len(budgets) != records:
            raise BudgetError(
                f"{file} holds {len(budgets):,} budgets for the {records:,} records of {where}. It needs one row "
                "per record, in the same order."
            )
        return budgets
    if table is None:
        raise BudgetError(
            f"{where} has no columns to read budgets from. Give [budgets] file = … with one row per record, or "
            "simulate budgets with [budgets] shares."
        )
    return _from_table(section, table, folder / where)


def _from_table(section: BudgetsSection, table: Any, path: Path) -> Budgets:
    return Budgets.from_table(table, path, **section.model_dump(include=COLUMN_KEYS))
