"""From a config to what training needs: records, budgets, a recipe. Everything that can be wrong is found here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..budgets import Budgets
from ..data import Arrays, Source, sources
from ..errors import BudgetError, DataError
from ..mechanism import IntArray
from ..planning import Plan, Recipe, plan
from .config import BudgetsSection, Config
from .values import strategy_options

_SPLIT_SEED = 0  # who is held out is settled by this and the number of records alone


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a config comes to.

    train, test    records; test is None where nothing is evaluated
    classes        names of the classes; None where the target is a number
    budgets        of the training records
    test_budgets   of the test records, where they are known
    recipe         how long and how large
    """

    config: Config
    train: Arrays
    test: Arrays | None
    classes: tuple[str, ...] | None
    budgets: Budgets
    test_budgets: Budgets | None
    recipe: Recipe

    @property
    def outputs(self) -> int:
        """What a model must return for each record: a score per class, or a number."""
        return 1 if self.classes is None else len(self.classes)

    def plan(self) -> Plan:
        """The plan that the config asks for."""
        privacy = self.config.privacy
        shares = privacy.public_shares
        return plan(
            self.budgets,
            self.recipe,
            privacy.strategy,
            privacy.accountant,
            public_shares=None if shares is None else {float(level): share for level, share in shares.items()},
            public_records=privacy.public_records,
            **strategy_options(privacy.options),
        )

    def test_groups(self, made: Plan) -> IntArray | None:
        """(test records,) each one's group in the plan, -1 for a budget that nobody in training has."""
        if self.test_budgets is None:
            return None
        place = {pair: g for g, pair in enumerate(zip(made.epsilons.tolist(), made.delta.tolist(), strict=True))}
        own = zip(self.test_budgets.epsilons.tolist(), self.test_budgets.delta.tolist(), strict=True)
        return np.array([place.get(pair, -1) for pair in own], dtype=np.int64)[self.test_budgets.group]


def prepare(config: Config, folder: Path) -> Prepared:
    """Read what the config names; paths are taken from `folder`. Raises InputError of some kind."""
    data, asked = config.data, config.budgets
    if data.train and data.test is None and data.test_share is None and sources.is_named(data.train, folder):
        named_test: str | None = data.train
    else:
        named_test = data.test

    aside = [asked.column, *([asked.delta_column] if asked.delta_column else [])]

    def read(where: str, split: str, classes: tuple[str, ...] | None) -> Source:
        return sources.read(
            where,
            split,
            folder,
            target=data.target,
            classes=classes,
            number=config.training.loss == "mse",
            features=replace(data.features, texts=(*data.features.texts, *aside)),
            aside=aside,
        )

    source = read(data.train, "train", data.class_names)
    if (source.classes is None) != (config.training.loss == "mse"):
        kind = "numbers" if source.classes is None else "classes"
        fitting = "mse" if source.classes is None else "cross_entropy"
        raise DataError(f'The targets of {data.train} are {kind}; set training.loss = "{fitting}".')
    budgets = _budgets(asked, source, folder, data.train)
    train, test, test_budgets = source.arrays, None, None
    if data.test_share is not None:
        order = np.random.default_rng(_SPLIT_SEED).permutation(len(source))
        held = max(1, round(data.test_share * len(source)))
        if held == len(source):
            raise DataError(f"data.test_share = {data.test_share:g} leaves none of the {held:,} records to train on.")
        chosen, kept = np.sort(order[:held]), np.sort(order[held:])
        test, test_budgets = train.subset(chosen), budgets.subset(chosen)
        train, budgets = train.subset(kept), budgets.subset(kept)
    elif named_test is not None:
        held_out = read(named_test, "test", source.classes)
        test = held_out.arrays
        if test.inputs.shape[1:] != train.inputs.shape[1:]:
            raise DataError(
                f"The records of {named_test} have shape {test.inputs.shape[1:]}, those of {data.train} "
                f"{train.inputs.shape[1:]}; a model takes one of them."
            )
        if held_out.table is not None and asked.column in held_out.table.column_names and asked.shares is None:
            test_budgets = _from_table(asked, held_out, folder / named_test)
    return Prepared(config, train, test, source.classes, budgets, test_budgets, config.training.recipe(len(budgets)))


def _budgets(asked: BudgetsSection, source: Source, folder: Path, where: str) -> Budgets:
    if asked.shares is not None:
        shares = {float(level): share for level, share in asked.shares.items()}
        return Budgets.from_shares(shares, records=len(source), delta=asked.delta, seed=asked.seed)
    if asked.file is not None:
        budgets = Budgets.from_csv(
            folder / asked.file,
            column=asked.column,
            delta=asked.delta,
            delta_column=asked.delta_column,
            tiers=asked.tiers,
        )
        if len(budgets) != len(source):
            raise BudgetError(
                f"{folder / asked.file} holds {len(budgets):,} budgets for the {len(source):,} records of {where}. One "
                "row per record, in the same order, is needed."
            )
        return budgets
    if source.table is None:
        raise BudgetError(
            f"{where} has no columns to read budgets from. Give [budgets] file = … with one row per record, or "
            "simulate them with [budgets] shares."
        )
    return _from_table(asked, source, folder / where)


def _from_table(asked: BudgetsSection, source: Source, path: Path) -> Budgets:
    return Budgets.from_table(
        source.table,
        path,
        column=asked.column,
        delta=asked.delta,
        delta_column=asked.delta_column,
        tiers=asked.tiers,
    )


__all__ = ["Prepared", "prepare"]
