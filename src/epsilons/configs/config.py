"""The config file of a training run: its keys, and their checks, which need no data.

A docstring below a key describes it in the documentation (`config_keys`).
"""

from __future__ import annotations

import inspect
import math
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, field_validator, model_validator

from ..budgets.budgets import DEFAULT_DELTA
from ..budgets.ids import SEVERAL_OWNERS, Conflict, Rule, as_rule
from ..budgets.risk import as_contract
from ..data import DATASETS
from ..data.arrays import Provenance, What, provenance_of
from ..data.tables import Features
from ..errors import BudgetError
from ..ledger.run_json import About
from ..planning.guarantee import EACH_ROW
from ..tabular import DateRule, Decimal, Marks, Separator, as_text, decimal, is_table
from .config_training import (
    STRICT,
    FeaturesSection,
    ModelSection,
    NotNegative,
    OutputSection,
    PerformanceSection,
    Positive,
    PrivacySection,
    RegistrySection,
    Text,
    TokensSection,
    TrainingSection,
    check_levels,
    column_of_persons,
)

#: The models of epsilons.models.networks, which take ids of tokens.
TEXT_MODELS = ("embedding-bag", "lstm")


class _Section(BaseModel):
    model_config = STRICT


class DataSection(_Section):
    """The records: a table, images, a folder of tensors, or a data set with a name."""

    train: str
    """A .csv, .tsv (also .csv.gz, .tsv.gz) or .parquet table ([Tables](tables.md)); a .parquet file of images (columns
    `image` or `img`, and `label`); a folder with `inputs` and `targets` (.npy, .safetensors, .pt); or a name: digits,
    mnist, fashion-mnist, cifar10, svhn, or owner/name on the hub. Paths are relative to the config's folder."""
    test: str | None = None
    """The same, for evaluation. A data set with a name has its own test split."""
    test_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """In place of `test`: the share of `train` to hold out, chosen at random. It is not trained on."""
    test_public: bool = False
    """True if the model's scores on the test data may be published. Scores on people's data are not covered by the
    guarantee, so the release report leaves them out unless this is true. Rows that `test_share` or `test_after` hold
    out are of people with budgets: for them it is right only if the whole table is public, and there is a warning."""
    target: str = "label"
    """The column of the table to predict."""
    classes: Annotated[int, Field(ge=2, le=100_000)] | list[Text] | None = None
    """The target's classes, in order, or their number (they are then called 0, 1, …). Needed for your own data unless
    the target is a number: the classes are not read off the data."""
    separator: Separator | None = None
    """What separates the cells of text files: ",", ";", a tab or "|". Without it, the first rows decide, and a file
    that two marks could separate is refused ([Tables](tables.md))."""
    decimal: Decimal | None = None
    """The decimal mark of numbers in text files: "." or ",". Default: a point; numbers like 1.234 are refused if the
    point may be between thousands."""
    thousands: Literal[".", ",", "'", " "] | None = None
    """The mark between groups of three digits in numbers: "." for 1.234,5; then `decimal` is ",". Default: none."""
    missing: list[Text] = []
    """Cells of numbers and dates that count as empty: ["n.b.", -99] ([Tables](tables.md#cells-that-are-no-numbers))."""
    units: dict[str, Annotated[str, Field(min_length=1)]] = {}
    """Column of numbers = the unit that may follow them, e.g. {hb = "g/dl"}. A cell with another unit is refused."""
    test_after: Annotated[dict[str, list[date | str]], Field(max_length=1)] = {}
    """In place of `test`: a column and the last day of training, e.g. {admitted = ["2024-06-30"]}. Later rows are for
    the test, rows without a date are not used. For days like 3/31/2024, add the order as in `dates`."""
    test_people: Literal["new"] | None = None
    """"new" leaves out test rows of people (`person`) who also have rows to train on. Default: a warning about them."""
    person: str | list[str] | None = None
    """The column with the id of each row's person: a budget then covers all rows of one person ([Persons](persons.md)).
    Or the statement "each row is one person". A table with a column of repeated ids needs one of the two. The column is
    never an input; ids are compared as texts. `test_share` is then a share of the persons."""
    ids: str | list[str] | None = None
    """How ids of persons are made equal, in all files and the registry: "as written" (ids that differ are other
    people), or one or several of "nfkc", "casefold", "strip invisible", "strip blanks", "strip .0" (7.0 is 7) and
    "strip leading zeros"; with "as written" beside them, all other differences make other people. Needed if ids are
    equal up to such differences ([Persons](persons.md#ids-in-several-spellings))."""
    drop: list[str] = []
    """The columns of the table to leave out, e.g. an identifier."""
    numeric: dict[str, list[float | str]] = {}
    """Column = [low, high] or [low, high, "log"]: clipped to these bounds and scaled to -1..1. An empty cell becomes
    the middle of its range, without a message; any other cell of a .csv file must be a decimal number. State bounds
    that you know without looking at the data; bounds read off the data are not covered by the guarantee."""
    categorical: dict[str, Annotated[int, Field(ge=1, le=1024)] | list[Text]] = {}
    """Column = [values] (one input each), or a number of buckets to hash any value into. Texts are compared as a .csv
    file spells them ("007", "True"); numbers, true and false by their meaning. Dates are refused, both hashed and as
    numbers: replace them by a number, or leave them out."""
    dates: dict[str, list[date | str]] = {}
    """Column = [first, last], e.g. ["2010-01-01", "2024-12-31"]: the number of days since the first, clipped to these
    bounds and scaled to -1..1. An empty cell becomes the middle. Dates are like 2024-03-31 or 31.3.2024; those like
    3/31/2024 need a third item, "day first" or "month first"."""
    read_off: list[str] | None = None
    """The columns with bounds, values or classes that were read off the data, as `epsilons init` drafts them; the
    target's name is for its classes. The guarantee does not cover them, and no model with such a column is released.
    Remove a column once you have replaced its values; [] says that none was. Without this key it counts as not
    stated."""
    text: list[str] = []
    """The columns of the table that hold texts, for `features` or `tokens` ([Texts](concepts.md#texts)). An empty cell
    is the empty text."""
    tokens: TokensSection | None = None
    """How the texts of the one column in `text` become ids of tokens, for the models embedding-bag and lstm:
    {kind = "words", length = 256, buckets = 16384} hashes words into buckets, {kind = "bytes", length = 16} takes the
    bytes of the text. Each text gets `length` ids: shorter ones are padded in front, longer ones are cut. State them
    without looking at the data."""
    features: FeaturesSection | None = None
    """Fixed features in the place of the inputs, computed once, before training: {name = "scattering"} for images,
    "hashed-text" or "encoder" for texts, with their `options` ([Fixed features](concepts.md#fixed-features)). They look
    at one record at a time and cost no privacy. Images are then not normalised: their pixels are from 0 to 1. Columns
    in [data.numeric] and [data.categorical] stay inputs beside the features of texts."""

    @field_validator("person")
    @classmethod
    def _one_owner(cls, person: str | list[str] | None) -> str | list[str] | None:
        """No guarantee covers several owners of a row."""
        if isinstance(person, list):
            one = f"write person = {person[0]!r}. " if len(person) == 1 else ""
            raise ValueError(one or SEVERAL_OWNERS.format(count=len(person)).rstrip("."))
        if isinstance(person, str) and not person.strip():
            raise ValueError(f'name the column with the id of each row\'s person, or write "{EACH_ROW}"')
        return person

    @field_validator("ids")
    @classmethod
    def _known_rule(cls, stated: str | list[str] | None) -> str | list[str] | None:
        try:
            as_rule(stated)
        except BudgetError as error:
            raise ValueError(str(error).rstrip(".")) from None
        return stated

    @field_validator("numeric")
    @classmethod
    def _bounds(cls, columns: dict[str, list[float | str]]) -> dict[str, list[float | str]]:
        for name, values in columns.items():
            low, high = values[:2] if len(values) in (2, 3) else (math.nan, math.nan)
            numbers = not isinstance(low, str) and not isinstance(high, str) and math.isfinite(low) and low < high
            if not (numbers and math.isfinite(float(high)) and values[2:] in ([], ["log"])):
                raise ValueError(f'{name} needs [low, high] or [low, high, "log"] with low < high')
        return columns

    @field_validator("dates")
    @classmethod
    def _days(cls, columns: dict[str, list[date | str]]) -> dict[str, list[date | str]]:
        for name, values in columns.items():
            try:
                first, last = (date.fromisoformat(str(value)) for value in values[:2])
            except ValueError:
                first = last = date.min
            if first >= last or values[2:] not in ([], ["day first"], ["month first"]):
                words = (
                    'needs [first, last], or one last day, like "2024-12-31", perhaps with "day first" or "month first"'
                )
                raise ValueError(f"{name} {words}")
        return columns

    @field_validator("classes", "categorical")
    @classmethod
    def _distinct(cls, value: Any) -> Any:
        for listed in value.values() if isinstance(value, dict) else [value]:
            if isinstance(listed, list) and (not listed or len({as_text(text) for text in listed}) < len(listed)):
                raise ValueError("a list of values needs at least one, and each only once")
        if isinstance(value, list) and len(value) == 1:
            raise ValueError("a target of one class has nothing to learn from: name all classes that there can be")
        return value

    @model_validator(mode="after")
    def _one_test(self) -> DataSection:
        given = [key for key in ("test", "test_share", "test_after") if getattr(self, key)]
        if len(given) > 1:
            raise ValueError(f"give either {' or '.join(given)}, not both")
        if self.test is not None and self.test == self.train:
            raise ValueError("data.test is data.train: hold records out with test_share instead, or name another file")
        kinds = [*self.numeric, *self.dates, *self.categorical, *self.drop, *self.text]
        twice = sorted({name for name in kinds if kinds.count(name) > 1})
        if twice:
            raise ValueError(f"column {twice[0]!r} is in more than one of numeric, dates, categorical, drop and text")
        return self

    @model_validator(mode="after")
    def _known_columns(self) -> DataSection:
        self._days({name: [date.min, *values] for name, values in self.test_after.items()})
        if self.thousands is not None and self.thousands == self.decimal:
            raise ValueError("data.thousands and data.decimal are two marks of one number, and cannot be equal")
        if unknown := [name for name in self.units if name not in self.numeric]:
            raise ValueError(f"data.units names {unknown[0]!r}, which is not in [data.numeric]")
        known = {*self.numeric, *self.dates, *self.categorical, *self.drop, *self.text, self.target}
        if unknown := [name for name in self.read_off or [] if name not in known]:
            raise ValueError(
                f"data.read_off names {unknown[0]!r}, and no other key does: correct the name, or remove it from there"
            )
        return self

    @model_validator(mode="after")
    def _texts_become_inputs(self) -> DataSection:
        if self.text and (self.tokens is None) == (self.features is None):
            raise ValueError("data.text needs either features, such as hashed-text, or tokens")
        if self.tokens is None:
            return self
        if len(self.text) != 1:
            raise ValueError(f"data.tokens needs one column in data.text, got {len(self.text)}")
        if {*self.numeric, *self.dates, *self.categorical} - {self.target}:
            raise ValueError(
                "data.tokens gives ids, and no other columns can be beside them: move those in [data.numeric], "
                '[data.dates] and [data.categorical] to data.drop, or use features = {name = "hashed-text"}'
            )
        return self

    @property
    def person_stated(self) -> str | None:
        """The column of ids, or the statement in its place."""
        assert not isinstance(self.person, list)  # refused by _one_owner
        return self.person

    @property
    def spelling(self) -> Rule:
        """How ids are made equal."""
        return as_rule(self.ids)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The classes as texts."""
        if isinstance(self.classes, int):
            return tuple(map(str, range(self.classes)))
        return None if self.classes is None else tuple(map(as_text, self.classes))

    @property
    def provenance(self) -> tuple[Provenance, ...]:
        """Where bounds, lists of values and classes come from. Those of data sets with a name are public."""
        stated: dict[str, What] = dict.fromkeys([*self.numeric, *self.dates], "bounds")
        stated |= {name: "categories" for name, values in self.categorical.items() if not isinstance(values, int)}
        stated |= {} if self.classes is None else {self.target: "classes"}
        return provenance_of(stated, () if self.train in DATASETS else self.read_off)

    @property
    def columns(self) -> Features:
        """How the columns of a table become inputs."""
        numeric = {name: (float(v[0]), float(v[1]), len(v) == 3) for name, v in self.numeric.items()}
        categorical = {n: v if isinstance(v, int) else tuple(map(as_text, v)) for n, v in self.categorical.items()}
        listed = {**self.categorical, **({self.target: self.classes} if self.classes else {})}
        written = [n for n, v in listed.items() if isinstance(v, int) or all(isinstance(text, str) for text in v)]
        tokens = None if self.tokens is None else self.tokens.tokens
        dates = {name: date_rule(values) for name, values in self.dates.items()}
        texts = tuple(self.drop), tuple(written), tuple(self.text)
        missing = tuple(map(as_text, self.missing))
        return Features(numeric, categorical, *texts, tokens, dates, self.marks, missing, self.units, self.thousands)

    @property
    def marks(self) -> Marks:
        """The marks of text files."""
        return Marks(self.separator, self.decimal or {".": ",", ",": "."}.get(self.thousands or ""))


def date_rule(values: list[date | str]) -> DateRule:
    """What [first, last] or [first, last, order] means."""
    first, last = (date.fromisoformat(str(value)) for value in values[:2])
    return DateRule(first, last, None if len(values) == 2 else values[2] == "day first")


class BudgetsSection(_Section):
    """The budgets of the records."""

    column: str = "epsilon"
    """The column of budgets, in `file`, or in the training table without `file`: decimal numbers, like 0.5 or 1e-5, or
    names of `tiers`."""
    file: str | None = None
    """A .csv or .parquet file with one row per training record, in order; with `data.person`, with that column and one
    row per person, in any order."""
    tiers: dict[str, Positive] | None = None
    """The epsilon of each tier, if the column holds names, e.g. {strict = 0.5, open = 8}. A name stands for all its
    spellings by case, outer blanks or Unicode form, unless two names differ by these alone."""
    risks: dict[str, dict[str, Positive]] | None = None
    """In place of `tiers`: the largest risk of each tier, e.g. {strict = {odds = 55}, open = {odds = 65}}
    ([Budgets by risk](choosing-budgets.md#budgets-by-risk))."""
    tail: list[Positive] | None = None
    """With `risks`: [epsilon, delta], which every tier keeps, too, and which people are told. It replaces `delta`."""
    blank: Literal["left out"] | None = None
    """"left out" if an empty cell of the column means that its record is neither trained on nor tested on. Without it,
    empty cells are refused ([Tables](tables.md#records-that-are-left-out))."""
    zero: Literal["left out"] | None = None
    """The same for 0."""
    infinite: Literal["left out"] | None = None
    """The same for inf and infinity."""
    left_out: list[Text] = []
    """The same for these names of tiers, e.g. ["none"]. They are not in `tiers`."""
    unlisted: Literal["left out"] | None = None
    """The same for persons without an entry in `file`, or without an account in the registry. Without it, they are
    refused."""
    without_rows: Literal["on the roster"] | None = None
    """"on the roster" if persons in `file` who have no rows in the training table count as well: the guarantee then
    hides who has rows, and the expected batch is not reached ([Persons](persons.md#who-is-on-the-roster)). Default:
    they do not count."""
    as_of: Annotated[date, Field(strict=False)] | None = None
    """The day that decides which entries are in force, e.g. "2026-10-01". Goes with the next three keys."""
    valid_from: str | None = None
    """A column of dates: the entry is in force from this day on. Empty: always."""
    valid_until: str | None = None
    """The same: up to this day, which counts."""
    withdrawn_on: str | None = None
    """The same: the day of withdrawal. From this day on, the record or person is left out."""
    dates: Literal["day first", "month first"] | None = None
    """The order of dates like 3/4/2024 in these columns."""
    separator: Separator | None = None
    """What separates the cells of `file`; that of the training table is `data.separator`."""
    decimal: Decimal | None = None
    """The decimal mark of the numbers in `file`."""
    shares: dict[str, Positive] | None = None
    """SIMULATED budgets, assigned at random, in place of a column: {"1" = 0.34, "2" = 0.66}."""
    seed: Annotated[int, Field(ge=0)] = 0
    """The seed of that assignment."""
    classes: dict[str, dict[str, NotNegative]] | None = None
    """Tier, or epsilon = {class = number}: how the people of each tier divide into the classes, as counts or shares,
    e.g. {strict = {sick = 1}, open = {sick = 1, well = 9}}. `epsilons plan` then says what each class weighs in
    training, and `training.balance` makes up for it
    ([Choosing budgets](choosing-budgets.md#when-the-people-of-one-class-are-strict)). Declare them without looking at
    the data: counted ones are not covered by the guarantee."""
    delta: float = DEFAULT_DELTA
    """The delta of all records; well below 1 / records."""
    delta_column: str | None = None
    """A column with a delta per record, in place of `delta`."""
    conflict: Conflict = "refuse"
    """For a person (`data.person`) with rows that state different budgets: "refuse", or "strictest", the smallest
    epsilon and the smallest delta."""

    @model_validator(mode="after")
    def _one_kind(self) -> BudgetsSection:
        if self.shares is not None and any(one is not None for one in (self.file, self.tiers, self.delta_column)):
            raise ValueError("shares are simulated budgets: leave out delta_column, file, tiers; or leave out shares")
        if self.shares is not None and (self.decides or self.unlisted or self.without_rows):
            raise ValueError("shares are simulated budgets: they leave out no record; remove blank, zero and the like")
        if both := sorted({*map(as_text, self.left_out)} & {*(self.levels or {})}):
            raise ValueError(
                f"{both[0]!r} is both in budgets.tiers and in budgets.left_out; remove it from one of them"
            )
        if (self.as_of is None) != (not self._dated):
            raise ValueError(
                "as_of is the day that decides which entries are in force: give it with valid_from, valid_until or "
                "withdrawn_on, the columns of dates, and those with it"
            )
        return self

    @model_validator(mode="after")
    def _of_risks(self) -> BudgetsSection:
        is_mixed = self.tiers or self.delta_column or self.conflict != "refuse"
        if (self.risks is None and self.tail is not None) or (self.risks is not None and is_mixed):
            raise ValueError("tail goes with risks, and both leave out tiers, delta_column, conflict")
        return self

    @property
    def levels(self) -> dict[str, float] | None:
        """{tier: epsilon}, of `tiers` or `risks`. Raises ValueError for risks that are none."""
        return self.tiers if self.risks is None else as_contract(self.risks, self.tail, self.delta)[0].levels

    @property
    def _dated(self) -> list[str]:
        return [name for name in (self.valid_from, self.valid_until, self.withdrawn_on) if name is not None]

    @property
    def columns(self) -> list[str]:
        """The columns of a list of budgets that are read."""
        return [self.column, *([self.delta_column] if self.delta_column else []), *self._dated]

    @property
    def reasons(self) -> list[str]:
        """Why a record is left out, as `tabular.meanings` calls what cells say; the first that fits counts."""
        stated = [name for name in ("blank", "zero", "infinite") if getattr(self, name) is not None]
        return list(dict.fromkeys([*stated, *(repr(as_text(name)) for name in self.left_out)]))

    @property
    def decides(self) -> bool:
        """Whether entries of a list can leave records out."""
        return bool(self.reasons or self._dated)


class Config(_Section):
    """A config file."""

    data: DataSection
    budgets: BudgetsSection = BudgetsSection()
    model: ModelSection = ModelSection()
    training: TrainingSection
    privacy: PrivacySection = PrivacySection()
    performance: PerformanceSection = PerformanceSection()
    output: OutputSection = OutputSection()
    registry: RegistrySection | None = None
    about: About = About()

    @property
    def model_options(self) -> dict[str, Any]:
        """Options of the model; a model of texts gets the number of ids from data.tokens."""
        if self.data.tokens is None or self.model.name not in TEXT_MODELS:
            return self.model.options
        return {**self.model.options, "buckets": self.data.tokens.tokens.ids}

    @model_validator(mode="after")
    def _model_takes_ids(self) -> Config:
        name, data = self.model.name, self.data
        is_own = ":" in name
        if data.tokens is not None and name not in TEXT_MODELS and not is_own:
            raise ValueError(
                f"data.tokens gives ids, which {name} takes for quantities; use {' or '.join(TEXT_MODELS)}"
            )
        if name in TEXT_MODELS and data.tokens is None and (data.features or is_table(Path(data.train))):
            raise ValueError(f"{name} takes ids of tokens: give data.text and data.tokens, or use another model")
        if name in TEXT_MODELS and data.tokens is not None and "buckets" in self.model.options:
            raise ValueError("model.options has buckets, which data.tokens gives: leave them out of model.options")
        return self

    @model_validator(mode="after")
    def _rows_of_persons(self) -> Config:
        data, budgets = self.data, self.budgets
        uses = {
            "[data.numeric]": [*data.numeric],
            "[data.categorical]": [*data.categorical],
            "data.text": data.text,
            "data.target": [data.target],
            "[budgets] column": [] if budgets.shares else budgets.columns,
        }
        needs = {"budgets.conflict": budgets.conflict != "refuse", "data.ids": data.ids is not None}
        needs |= {f"budgets.{key}": getattr(budgets, key) is not None for key in ("unlisted", "without_rows")}
        needs["data.test_people"] = data.test_people is not None
        needs["training.rows_per_person"] = self.training.rows_per_person > 1
        column = column_of_persons(data.person_stated)
        for key, names in uses.items():
            if column is not None and column in names:
                raise ValueError(
                    f"{column!r} is data.person, and a person's id is never an input or a target: remove it from {key}"
                )
        for key, is_asked in needs.items():
            if is_asked and column is None:
                raise ValueError(
                    f"{key} is about several rows of one person: name the column of their ids in data.person"
                )
        return self

    @model_validator(mode="after")
    def _charged(self) -> Config:
        if self.registry is None:
            return self
        if column_of_persons(self.data.person_stated) is None:
            raise ValueError("[registry] is about people: name the column of their ids in data.person")
        if self.budgets.risks is not None:
            raise ValueError("budgets.risks does not go with [registry], which takes tiers of (epsilon, delta) only")
        given = {
            "budgets.shares": self.budgets.shares is not None,
            "privacy.runs": self.privacy.runs > 1,
            "privacy.select": self.privacy.select is not None,
            "privacy.class_noise": self.privacy.class_noise is not None,
            "privacy.public_shares": self.privacy.public_shares is not None,
            "training.seeds": bool(self.training.seeds),
            "budgets.classes": self.budgets.classes is not None,
        }
        if key := next((key for key, is_given in given.items() if is_given), None):
            raise ValueError(
                f"{key} does not go with [registry]: budgets come from the registry, which adds up unseeded runs one "
                f"by one. Remove {key}, or [registry] (--registry, --share, --project)"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if self.budgets.risks is None:
            check_levels({**(self.budgets.shares or {}), **(self.privacy.public_shares or {})})
        from_table = self.budgets.file is None and self.budgets.shares is None
        if self.data.target in self.data.text:
            raise ValueError(f"{self.data.target!r} is data.target, and cannot be in data.text")
        if from_table and self.data.target == self.budgets.column:
            raise ValueError(f"{self.data.target!r} cannot be both data.target and budgets.column; name two columns")
        self._check_class_weights()
        self._check_tied_classes()
        if self.training.loss == "mse" and self.data.classes is not None:
            raise ValueError('training.loss = "mse" predicts a number: leave out data.classes, or set "cross_entropy"')
        return self

    def _check_class_weights(self) -> None:
        """Raise ValueError if the weights are not of the classes."""
        weights, classes = self.training.class_weights, self.class_names
        if weights is not None and set(weights) != set(classes):
            raise ValueError(
                f"training.class_weights needs a number for each of data.classes ({', '.join(classes) or 'none'}), got "
                f"{', '.join(weights)}"
            )

    def _check_tied_classes(self) -> None:
        """Raise ValueError for names of tiers or classes that do not exist, and for what cannot be balanced."""
        tied, tiers, classes = self.budgets.classes, self.budgets.levels, self.class_names
        for tier, row in (tied or {}).items():
            if tier not in tiers if tiers is not None else decimal(tier) is None:
                raise ValueError(f"budgets.classes has {tier!r}, which is no tier; its keys are those of budgets.tiers")
            if not set(row) <= set(classes):
                raise ValueError(f"budgets.classes has {', '.join(row)}, and not all of them are in data.classes")
        known = (tied is None) != (self.privacy.class_noise is None)
        if self.training.balance and not (known and self.training.loss == "cross_entropy"):
            raise ValueError(
                'training.balance needs budgets.classes or privacy.class_noise, and training.loss = "cross_entropy"'
            )

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes as texts. Data sets with a name have the classes 0 to 9."""
        return self.data.class_names or (tuple("0123456789") if self.data.train in DATASETS else ())

    @property
    def tied_classes(self) -> dict[float, list[float]] | None:
        """budgets.classes as {epsilon: one number per class}; None if they are not declared."""
        tied, tiers, names = self.budgets.classes, self.budgets.levels, self.class_names
        rows = {tier: [row.get(name, 0.0) for name in names] for tier, row in (tied or {}).items()}
        return {float(tier if tiers is None else tiers[tier]): row for tier, row in rows.items()} or None


def config_keys() -> str:
    """Every section and key of a config file, as Markdown."""
    lines = []
    for name, field in Config.model_fields.items():
        # A section that may be missing is a union with None.
        section: Any = next((part for part in get_args(field.annotation) if part is not type(None)), field.annotation)
        lines += ["", f"## [{name}]", "", inspect.cleandoc(section.__doc__ or "")]
        for key, value in section.model_fields.items():
            lines += ["", f"`{key}`{_default(value)}", f":   {' '.join(value.description.split())}"]
    return "\n".join(lines) + "\n"


def _default(value: Any) -> str:
    if value.is_required():
        return ", required"
    if isinstance(value.default, bool):
        return f", default `{str(value.default).lower()}`"
    return f", default `{value.default}`" if value.default not in (None, [], {}, "") else ""
