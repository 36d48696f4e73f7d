"""Tables of visits: public tables whose rows are shared out among persons, with a config that declares every bound.

    python -m experiments visits FOLDER      # adult-visits.csv and .toml, credit-visits.csv and .toml

The rows are real, the persons are not: rows that are alike in attributes that change slowly are given to one person,
three to most of them and one to 30 %. Budgets are simulated: 34 % of the persons at ε = 1, 43 % at 2, 23 % at 3.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import epsilons
from epsilons import Budgets, EvalData, Plan
from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import Prepared, prepare
from epsilons.core.mechanism import IntArray
from epsilons.draws.randomness import key_from_seed
from epsilons.errors import InputError
from epsilons.models import build

from .settings import VisitSettings
from .strategies import STRATEGIES
from .training import charges_of

#: Part of the persons with one row; the others have ROWS.
ALONE, ROWS = 0.3, 3
SHARES = {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}
SEED = 0


@dataclass(frozen=True)
class Visits:
    """A public table and what is declared about it, from its documentation.

    file         in the folder EPSILONS_DATA
    slow         columns that change slowly: rows of one person are alike in them
    classes      names of the classes 0 and 1 of the column label
    numeric      column -> bounds
    categorical  column -> values, or a number of buckets
    drop         columns that are left out
    """

    file: str
    slow: Sequence[str]
    classes: Sequence[str]
    numeric: Mapping[str, str]
    categorical: Mapping[str, str]
    drop: Sequence[str] = ()


_MONEY = '[-200000, 1000000, "log"]'
_PAID = '[0, 1000000, "log"]'

VISITS = {
    "adult": Visits(
        "adult-train.parquet",
        ("education_num", "occupation", "sex", "race", "marital_status", "age"),
        ("<=50K", ">50K"),
        {
            "age": "[0, 100]",
            "education_num": "[1, 16]",
            "capital_gain": '[0, 100000, "log"]',
            "capital_loss": '[0, 5000, "log"]',
            "hours_per_week": "[0, 100]",
        },
        {
            "workclass": "16",
            "marital_status": "16",
            "occupation": "32",
            "relationship": "16",
            "race": "16",
            "sex": '["Female", "Male"]',
            "native_country": "32",
        },
        ("fnlwgt", "education"),
    ),
    "credit": Visits(
        "credit-default.parquet",
        ("education", "marriage", "sex", "limit_bal", "age"),
        ("paid", "default"),
        {
            "limit_bal": "[0, 1000000]",
            "age": "[0, 100]",
            **{f"pay_{month}": "[-2, 9]" for month in (0, 2, 3, 4, 5, 6)},
            **{f"bill_amt{month}": _MONEY for month in range(1, 7)},
            **{f"pay_amt{month}": _PAID for month in range(1, 7)},
        },
        {"sex": '["1", "2"]', "education": '["1", "2", "3", "4"]', "marriage": '["1", "2", "3"]'},
    ),
}

_CONFIG = """# {rows:,} rows of {persons:,} persons, made by: python -m experiments visits FOLDER
[data]
train = "{name}-visits.csv"
test_share = 0.2                      # of the persons
test_public = true                    # public benchmark data
target = "label"
classes = [{classes}]
person = "patient_id"
drop = [{drop}]
read_off = []                         # all bounds and values below are declared

[data.numeric]
{numeric}

[data.categorical]
{categorical}

[budgets]
column = "epsilon"
delta = 1e-5

[model]
name = "mlp"
options = {{ hidden = [64] }}

[training]
steps = 400
batch_size = 512
clip_norm = 1.0
lr = 1.0

[privacy]
strategy = "scale"
"""


def persons_of_rows(rows: int, coins: np.random.Generator) -> IntArray:
    """(rows,) a person for each of the sorted rows: neighbours belong together, ROWS or 1 to a person."""
    sizes = np.where(coins.random(rows) < ALONE, 1, ROWS)
    return np.repeat(np.arange(rows), sizes)[:rows]


def write(name: str, folder: Path) -> Path:
    """Write the table of visits and its config; returns the config. Raises InputError without the public table."""
    import pyarrow
    import pyarrow.compute as pc
    from pyarrow import csv, parquet

    visits = VISITS[name]
    source = Path(os.environ.get("EPSILONS_DATA", ".")) / visits.file
    if not source.is_file():
        raise InputError(f"No {visits.file} in the folder EPSILONS_DATA, which holds the public tables.")
    table = parquet.read_table(source).replace_schema_metadata(None)
    coins = np.random.default_rng(SEED)
    table = table.take(pc.sort_indices(table, sort_keys=[(column, "ascending") for column in visits.slow]))
    person = persons_of_rows(len(table), coins)
    persons = int(person[-1]) + 1
    budgets = Budgets.from_shares(SHARES, records=persons, seed=SEED, unit="person")
    numbers = coins.permutation(persons)[person]
    classes = pyarrow.array(visits.classes).take(table.column("label").combine_chunks())
    table = table.drop_columns(["label"]).append_column("label", classes)
    table = table.append_column("patient_id", pyarrow.array([f"P{number:05}" for number in numbers]))
    table = table.append_column("epsilon", pyarrow.array(budgets.epsilons[budgets.group][person]))
    folder.mkdir(parents=True, exist_ok=True)
    csv.write_csv(table.take(coins.permutation(len(table))), folder / f"{name}-visits.csv")
    text = _CONFIG.format(
        rows=len(table),
        persons=persons,
        name=name,
        classes=", ".join(f'"{one}"' for one in visits.classes),
        drop=", ".join(f'"{one}"' for one in visits.drop),
        numeric="\n".join(f"{column} = {bounds}" for column, bounds in visits.numeric.items()),
        categorical="\n".join(f"{column} = {values}" for column, values in visits.categorical.items()),
    )
    config = folder / f"{name}-visits.toml"
    config.write_text(text, encoding="utf-8")
    return config


@lru_cache(maxsize=2)
def prepared(name: str) -> Prepared:
    """Training and test rows of this table, split by person as its config says."""
    with tempfile.TemporaryDirectory() as folder:
        config = write(name, Path(folder))
        return prepare(read_config(config), config.parent)


def budgets_of(settings: VisitSettings, person: IntArray, persons: int, seed: int) -> Budgets:
    """Budgets of persons, or of their rows; person: (rows,) each row's person.

    "rows, divided": all rows of one person together spend the person's (epsilon, delta), by group privacy: k rows at
    (epsilon / k, delta / (k · e^{(k-1) · epsilon / k})) give (epsilon, delta) for all (Vadhan, "The Complexity of
    Differential Privacy", 2017, Lemma 2.2).
    """
    shares = {float(level): share for level, share in settings.shares.items()}
    of_persons = Budgets.from_shares(shares, records=persons, delta=settings.delta, seed=seed, unit="person")
    if settings.budget_of == "person":
        return of_persons
    epsilon = of_persons.epsilons[of_persons.group][person]
    if settings.budget_of == "row":
        return Budgets(epsilon, settings.delta)
    rows = np.bincount(person, minlength=persons)[person]
    return Budgets(epsilon / rows, settings.delta / (rows * np.exp((rows - 1) * epsilon / rows)))


def visits(settings: VisitSettings, seed: int, label: str = "", device: str = "auto") -> dict[str, Any]:
    """Train once on a table of visits; returns the values of one result."""
    data = prepared(settings.dataset)
    if data.persons is None or data.test is None:
        raise InputError(f"The config of {settings.dataset} names no persons, or no test data.")
    budgets = budgets_of(settings, data.persons, len(data.budgets), seed)
    plan = _plan_of(settings, budgets)
    torch.manual_seed(seed)
    model = build(settings.model, data.train.inputs.shape[1:], data.outputs, hidden=[64])
    inputs, targets = map(torch.from_numpy, data.train)
    tests, answers = map(torch.from_numpy, data.test)
    records = epsilons.Records((inputs, targets))
    if budgets.unit == "person":
        records = replace(records, persons=data.persons, rows_per_person=settings.rows_per_person)
    run = epsilons.fit(
        model,
        records,
        plan,
        budgets=budgets,
        training=epsilons.Training(
            lr=settings.lr,
            momentum=settings.momentum,
            device="cuda" if device == "cuda" else "cpu",
            progress=False,
        ),
        evaluation=EvalData((tests, answers), public=True, every=math.ceil(plan.steps / settings.evaluations)),
        seed=epsilons.Randomness.with_key(key_from_seed(seed)),
    )
    last = run.metrics[-1]
    return {
        **charges_of(plan, budgets, run.charged),
        "accuracy": last["accuracy"],
        "per_class": last["per_class"],
    }


def _plan_of(settings: VisitSettings, budgets: Budgets) -> Plan:
    strategy = STRATEGIES.get(settings.strategy, settings.strategy)
    recipe = settings.recipe(len(budgets))
    return epsilons.plan(budgets, recipe, strategy, accountant=settings.accountant, **settings.options)
