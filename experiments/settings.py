"""Settings: everything that a run's numbers depend on. They are read from TOML, and a hash is their name.

The hash leaves out settings with their default values, so that a new setting does not rename earlier runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import epsilons
from epsilons.configs.config_training import TrainingSection
from epsilons.errors import InputError

HERE = Path(__file__).resolve().parent
TABLES = HERE / "tables"

#: Training records of each data set, so that planning needs no data.
RECORDS = {"mnist": 60_000, "fashion-mnist": 60_000, "svhn": 73_257, "cifar10": 50_000, "digits": 1_437}


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Settings(Frozen):
    """The settings of one run, without its seed.

    kind         one of cells.KINDS
    model        a name in epsilons.models.MODELS
    convention   what an epoch is: "paper" or "authors-code" (epsilons.configs.config.TrainingSection)
    shares       epsilon -> share of the records, assigned at random for every seed
    uniform      [low, high, groups]: in place of shares, this number of epsilons, uniform in [low, high]; each record
                 gets one at random
    keep         only the records with these epsilons are used
    strategy     a name in epsilons.planning.STRATEGIES or in strategies.STRATEGIES
    class_epsilon  class -> epsilon of all its records, in place of a random assignment; the other classes have the only
                 epsilon of shares, which may be empty if each class is named. For kinds "train" and "features"
    evaluations  how many times the test data are scored; the last time is the end
    watch        how many times the training records are scored, by group (not private; for figures only)
    validation   this part of the training records is left out and scored in place of the test data, which are not read
    groups       kind "planning-time": number of groups, of one size, epsilons evenly spread over [1, 3]
    """

    kind: str = "train"
    dataset: str
    model: str = ""
    convention: Literal["paper", "authors-code"] = "authors-code"
    epochs: float | None = None
    steps: int | None = None
    batch_size: float
    clip_norm: float
    lr: float = 0.0
    momentum: float = 0.0
    strategy: str
    accountant: str = "rdp"
    options: dict[str, Any] = {}
    shares: dict[str, float] = {}
    uniform: Annotated[list[float], Field(min_length=3, max_length=3)] | None = None
    keep: list[float] | None = None
    class_epsilon: dict[str, float] = {}
    delta: float = 1e-5
    evaluations: int = 16
    watch: int = 4
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    groups: int | None = None

    @model_validator(mode="after")
    def _one_for_the_others(self) -> Self:
        if self.class_epsilon and (len(self.shares) > 1 or self.uniform is not None):
            raise ValueError("class_epsilon needs one epsilon for the other classes, e.g. shares = {'2' = 1.0}")
        if strange := [name for name in self.class_epsilon if not (name.isdecimal() and str(int(name)) == name)]:
            raise ValueError(f"class_epsilon needs classes as whole numbers, e.g. {{'3' = 1.0}}; got {strange[0]!r}")
        if self.class_epsilon and self.kind not in ("train", "features"):
            raise ValueError(f"class_epsilon is for kinds train and features, got kind {self.kind!r}")
        return self

    def recipe(self, records: int) -> epsilons.Recipe:
        """Steps, batch size and clip norm for this number of records."""
        section = TrainingSection(
            steps=self.steps,
            epochs=self.epochs,
            convention=self.convention,
            batch_size=self.batch_size,
            clip_norm=self.clip_norm,
        )
        return section.recipe(records)

    def named(self, seed: int) -> str:
        """16 hex digits: the name of these settings with this seed."""
        chosen = self.model_dump(exclude_defaults=True) | {"seed": seed}
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]


class MembershipSettings(Settings):
    """The settings of one arm of a membership attack. All arms of a table have the same coins, keys and groups.

    shares       epsilon -> share of the records, dealt at random once: the groups that are compared
    epsilon      DP-SGD: all records have this budget, and the groups are labels only
    pool         number of records, the first ones of the training data; a shadow is trained on each with probability
                 1/2. Recipe and plan are made for half of them
    population   number of records that no shadow is trained on, the first ones of the test data
    inputs       "normalised" (as loaded), "pixels" (from 0 to 1) or a name in epsilons.training.features.FEATURES
    input_scale  factor on the inputs
    shadows      number of shadow models
    attacks      names in epsilons.auditing.membership.ATTACKS
    at_most      fewer shadows, for now. It is not part of the name
    """

    kind: str = "membership"
    epsilon: float | None = None
    pool: Annotated[int, Field(ge=40)]
    population: Annotated[int, Field(ge=1)] = 2_000
    inputs: str = "normalised"
    input_scale: float = 1.0
    shadows: Annotated[int, Field(ge=8)]
    attacks: list[str]
    at_most: Annotated[int | None, Field(ge=8, exclude=True)] = None

    def recipe(self, records: int) -> epsilons.Recipe:
        """Steps, batch size and clip norm for half of the pool, whatever the number of records."""
        return super().recipe(self.pool // 2)

    @property
    def wanted(self) -> int:
        """The number of shadows to train now."""
        return min(self.shadows, self.at_most or self.shadows)


class FeatureSettings(Settings):
    """The settings of one run on fixed features, which are computed once.

    features         a name in epsilons.training.features.FEATURES
    feature_options  its options
    """

    kind: str = "features"
    features: str
    feature_options: dict[str, Any] = {}


class TextSettings(FeatureSettings):
    """The settings of one run on records of text: `dataset` is a name in texts.TEXT_SETS.

    features       a name in FEATURES, or "tokens", with the options of epsilons.data.texts.Tokens
    model_options  options of the model
    optimizer      a name in epsilons.training.fitting.losses.OPTIMIZERS
    weights        of features "encoder": file -> SHA-256 of the encoder's files, which no run may differ from
    """

    kind: str = "text"
    model_options: dict[str, Any] = {}
    optimizer: str = "sgd"
    weights: dict[str, str] = {}


class VisitSettings(Settings):
    """The settings of one run on a table of visits, where most persons have three rows: `dataset` is in visits.VISITS.

    budget_of        "person": one epsilon for all rows of a person; "row": each row has the person's epsilon, so that a
                     person with k rows spends k times as much; "row, divided": rows share the person's epsilon
    rows_per_person  rows that a drawn person contributes; for budgets of persons
    """

    kind: str = "visits"
    model: str = "mlp"
    budget_of: Literal["person", "row", "row, divided"]
    rows_per_person: Annotated[int, Field(ge=1)] = 1


class PateSettings(Settings):
    """The settings of one release of labels by an ensemble of teachers, or of IDP-SGD on the same records.

    private       number of private records; the rest of the training data is public
    teachers      number of teachers, each one trained on records of one group
    teacher_seed  chooses the group of each record and the records of each teacher
    own_teachers  each seed has its own budgets and teachers: its number is the teacher_seed
    noise_std     as published: labels under this noise, until the data-dependent epsilon of a group is above its budget
    code_weights  as published: weights of the published code, charged to other groups than those that voted with them
    """

    kind: str = "pate"
    clip_norm: float = math.sqrt(2)
    batch_size: float = 50_000
    private: Annotated[int, Field(ge=1)] = 50_000
    teachers: Annotated[int, Field(ge=1)] = 250
    teacher_seed: int = 0
    own_teachers: bool = False
    noise_std: Annotated[float | None, Field(gt=0)] = None
    code_weights: bool = False


#: Kinds of cell that have settings of their own.
OWN_SETTINGS: dict[str, type[Settings]] = {
    "membership": MembershipSettings,
    "features": FeatureSettings,
    "pate": PateSettings,
    "pate-sgd": PateSettings,
    "text": TextSettings,
    "visits": VisitSettings,
}


class Cell(Frozen):
    """One cell of a table: its name, its settings, and its seeds."""

    name: str
    title: str
    settings: Settings
    seeds: tuple[int, ...]

    def but(self, **settings: Any) -> Cell:
        """The same cell with other settings."""
        return self.model_copy(update={"settings": self.settings.model_copy(update=settings)})


class Table(Frozen):
    """One file of tables/."""

    name: str
    title: str
    note: str
    cells: tuple[Cell, ...]

    @cached_property
    def by_name(self) -> dict[str, Cell]:
        return {cell.name: cell for cell in self.cells}


def read_table(path: Path) -> Table:
    """The table in this file. Raises InputError, naming file, run and key."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path.name} cannot be read as TOML: {error}.") from None
    unknown = set(values) - {"title", "note", "defaults", "run"}
    if unknown or "title" not in values or not values.get("run"):
        raise InputError(
            f"{path.name} needs title, note, [defaults] and one [[run]] per cell; it has "
            f"{', '.join(values) or 'nothing'}."
        )
    cells = tuple(_cell(path, values.get("defaults", {}), run) for run in values["run"])
    names = [cell.name for cell in cells]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{path.name} has two runs called {twice[0]!r}.")
    return Table(name=path.stem, title=values["title"], note=values.get("note", ""), cells=cells)


def _cell(path: Path, defaults: Mapping[str, Any], run: Mapping[str, Any]) -> Cell:
    merged = {**defaults, **run}
    name = merged.pop("name", None)
    if not isinstance(name, str):
        raise InputError(f"A [[run]] of {path.name} has no name.")
    title, seeds = merged.pop("title", name), merged.pop("seeds", 1)
    try:
        settings = OWN_SETTINGS.get(merged.get("kind", ""), Settings).model_validate(merged)
        settings.recipe(RECORDS.get(settings.dataset, 1_000_000))
        return Cell(name=name, title=title, settings=settings, seeds=tuple(range(seeds)))
    except (ValidationError, TypeError) as error:
        problem = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else {"msg": str(error)}
        where = ".".join(map(str, problem.get("loc", ())))
        raise InputError(f"Run {name!r} of {path.name}: {where}: {problem['msg']}.") from None


def tables(folder: Path = TABLES) -> dict[str, Table]:
    """All tables by the names of their files, in order."""
    return {path.stem: read_table(path) for path in sorted(folder.glob("*.toml"))}
