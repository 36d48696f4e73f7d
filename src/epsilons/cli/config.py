"""A training run as a TOML file: what may stand in it, checked before anything is loaded.

`python -m epsilons.cli.config` prints the reference page of the documentation.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..accounting import ACCOUNTANTS
from ..budgets import DEFAULT_DELTA
from ..data.tables import Features
from ..errors import InputError
from ..planning import STRATEGIES, Recipe
from ..tabular import as_text, decimal

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Text = str | int | float | bool


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class DataSection(_Section):
    """The records: one's own table, images, a folder of tensors, or a data set with a name."""

    train: str = Field(
        description="A .csv or .parquet table; a .parquet file of images (`image` or `img`, and `label`); a folder "
        "with `inputs` and `targets` (.npy, .safetensors, .pt); or a name: digits, mnist, fashion-mnist, cifar10, "
        "svhn, or owner/name on the hub. Paths are taken from the config's folder."
    )
    test: str | None = Field(None, description="The same, for evaluation. Named data sets bring their own.")
    test_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Instead of `test`: hold this share of `train` out, at random. It is not trained on."
    )
    test_public: bool = Field(
        False,
        description="True if what the model scores on the test data may be published. Scores on people's data are "
        "not covered by the guarantee, so they stay out of the release report unless you say so here.",
    )
    target: str = Field("label", description="The table's column to predict.")
    classes: Annotated[int, Field(ge=2)] | list[Text] | None = Field(
        None,
        description="The target's classes, in order, or how many there are (called 0, 1, …). Needed for your own data, "
        "unless the target is a number: which classes occur is not read off them.",
    )
    drop: list[str] = Field([], description="The table's columns to leave out, e.g. an identifier.")
    numeric: dict[str, list[float | str]] = Field(
        {},
        description='Column = [low, high] or [low, high, "log"]: scaled to -1..1 and cut off at these bounds. An '
        "empty cell becomes the middle of its range, without a message; any other cell of a .csv file must be a "
        "decimal number. State bounds you know without looking at the "
        "data; bounds read off the data are not covered by the guarantee.",
    )
    categorical: dict[str, Annotated[int, Field(ge=1, le=1024)] | list[Text]] = Field(
        {},
        description="Column = [values] (one input each), or a number of buckets to hash any value into. Texts are "
        'compared as a .csv file spells them ("007", "True"); numbers and true or false by what they mean. Dates are '
        "refused, hashed and as numbers: put a number in their place, or leave them out.",
    )

    @field_validator("numeric")
    @classmethod
    def _bounds(cls, columns: dict[str, list[float | str]]) -> dict[str, list[float | str]]:
        for name, values in columns.items():
            low, high = values[:2] if len(values) in (2, 3) else (math.nan, math.nan)
            numbers = not isinstance(low, str) and not isinstance(high, str) and math.isfinite(low) and low < high
            if not (numbers and math.isfinite(float(high)) and values[2:] in ([], ["log"])):
                raise ValueError(f'{name} needs [low, high] or [low, high, "log"] with low < high')
        return columns

    @field_validator("classes", "categorical")
    @classmethod
    def _distinct(cls, value: Any) -> Any:
        for listed in value.values() if isinstance(value, dict) else [value]:
            if isinstance(listed, list) and (not listed or len({as_text(text) for text in listed}) < len(listed)):
                raise ValueError("a list of values needs at least one, and each only once")
        return value

    @model_validator(mode="after")
    def _one_test(self) -> DataSection:
        if self.test is not None and self.test_share is not None:
            raise ValueError("give either test or test_share, not both")
        if self.test is not None and self.test == self.train:
            raise ValueError("data.test is data.train: hold records out with test_share instead, or name another file")
        kinds = [*self.numeric, *self.categorical, *self.drop]
        twice = sorted({name for name in kinds if kinds.count(name) > 1})
        if twice:
            raise ValueError(f"column {twice[0]!r} stands in more than one of numeric, categorical and drop")
        return self

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The classes as texts."""
        if isinstance(self.classes, int):
            return tuple(map(str, range(self.classes)))
        return None if self.classes is None else tuple(map(as_text, self.classes))

    @property
    def features(self) -> Features:
        """What is said about a table's columns."""
        numeric = {name: (float(v[0]), float(v[1]), len(v) == 3) for name, v in self.numeric.items()}
        categorical = {n: v if isinstance(v, int) else tuple(map(as_text, v)) for n, v in self.categorical.items()}
        listed = {**self.categorical, **({self.target: self.classes} if self.classes else {})}
        written = [n for n, v in listed.items() if isinstance(v, int) or all(isinstance(text, str) for text in v)]
        return Features(numeric, categorical, tuple(self.drop), tuple(written))


class BudgetsSection(_Section):
    """Who asked for what."""

    column: str = Field(
        "epsilon",
        description="The column of budgets, in `file` or else in the training table: decimal numbers, like 0.5 or "
        "1e-5, or names of `tiers`.",
    )
    file: str | None = Field(None, description="A .csv or .parquet file with one row per training record, in order.")
    tiers: dict[str, Positive] | None = Field(
        None, description="If the column holds names: what each stands for, e.g. {strict = 0.5, open = 8}."
    )
    shares: dict[str, Positive] | None = Field(
        None, description='SIMULATED budgets instead, dealt out at random: {"1" = 0.34, "2" = 0.66}.'
    )
    seed: int = Field(0, ge=0, description="Of that deal.")
    delta: float = Field(DEFAULT_DELTA, description="For all records; well below 1 / records.")
    delta_column: str | None = Field(None, description="A column with a delta per record, instead.")

    @model_validator(mode="after")
    def _one_kind(self) -> BudgetsSection:
        if self.shares is not None and (self.file is not None or self.tiers is not None):
            raise ValueError("shares are simulated budgets: leave out file and tiers, or leave out shares")
        if self.shares is not None and self.delta_column is not None:
            raise ValueError("shares are simulated budgets: leave out delta_column, or leave out shares")
        return self

    @field_validator("shares")
    @classmethod
    def _levels(cls, shares: dict[str, float] | None) -> dict[str, float] | None:
        for level in shares or {}:
            if decimal(level) is None:
                raise ValueError(f'{level!r} is no number; shares are written {{"1" = 0.5, "2" = 0.5}}')
        return shares


class ModelSection(_Section):
    """What is trained."""

    name: str = Field(
        "mlp",
        description="logistic, mlp, mnist-cnn, cifar10-cnn, resnet18-gn, or the import path of your own, "
        '"package.module:callable", which is called with the options and returns an nn.Module.',
    )
    options: dict[str, Any] = Field({}, description='E.g. {hidden = [64, 64], activation = "tanh"} for mlp.')


class TrainingSection(_Section):
    """How it is trained."""

    steps: Annotated[int, Field(ge=1)] | None = Field(None, description="Noisy updates. Or else:")
    epochs: Positive | None = Field(None, description="Expected passes over the data.")
    convention: Literal["paper", "authors-code"] = Field(
        "paper",
        description='What an epoch is. "paper": sample_rate = batch_size / N, steps = epochs · N / batch_size. '
        '"authors-code": sample_rate = 1 / ceil(N / batch_size), steps = epochs · ceil(N / batch_size).',
    )
    batch_size: Positive = Field(description="EXPECTED records per update.")
    clip_norm: Positive = Field(1.0, description="L2 norm that the tiers' clip norms average to.")
    loss: Literal["cross_entropy", "mse"] = Field(
        "cross_entropy", description='"mse" if the target is a number; `data.classes` must then be left out.'
    )
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="One of: sgd, adam, adamw; as in torch.optim."
    )
    lr: Positive = Field(0.1, description="Learning rate.")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Of sgd alone; refused beside another optimizer."
    )
    seeds: list[Annotated[int, Field(ge=0)]] = Field(
        [],
        description="Train once per seed, repeatably. Whoever knows a seed can undo the noise, so leave this empty for "
        "anything you will release.",
    )
    device: str = Field("auto", description='"auto", "cpu", "cuda", …')
    randomness: Literal["philox", "secure"] = Field("philox", description='"secure" needs the extra of that name.')
    checkpoint_every: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Steps between checkpoints; by default one about every five minutes, and one at each test."
    )
    eval_every: Annotated[int, Field(ge=1)] | None = Field(None, description="Evaluate every so many steps.")

    @model_validator(mode="after")
    def _one_length(self) -> TrainingSection:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"training.momentum is of sgd; {self.optimizer} has its betas, and would ignore it")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("training.seeds names one seed twice; each trains a run of its own")
        return self

    def recipe(self, records: int) -> Recipe:
        """The recipe for so many training records."""
        batch = float(self.batch_size)
        if self.convention == "authors-code":
            per_epoch = math.ceil(records / batch)
            batch = records / per_epoch
            steps = self.steps or int(self.epochs * per_epoch if self.epochs else 0)
        else:
            # 1e-9: 80 · 60,000 / 512 is 9,375 steps, whatever the last bit of the product says
            steps = self.steps or int(self.epochs * records / batch + 1e-9 if self.epochs else 0)
        return Recipe(steps=max(steps, 1), batch_size=batch, clip_norm=self.clip_norm)


class PrivacySection(_Section):
    """How the budgets are used."""

    strategy: str = Field("scale", description=f"One of: {', '.join(STRATEGIES)}.")
    accountant: str = Field("pld", description=f"One of: {', '.join(ACCOUNTANTS)}.")
    options: dict[str, Text] = Field({}, description="The strategy's own options.")
    public_shares: dict[str, Positive] | None = Field(
        None, description="Shares declared as NOT derived from these data; protects presence, too."
    )
    public_records: Annotated[int, Field(ge=1)] | None = Field(None, description="Their declared number.")

    _levels = field_validator("public_shares")(BudgetsSection._levels.__func__)  # type: ignore[attr-defined]


class PerformanceSection(_Section):
    """How fast it is trained; no effect on privacy."""

    engine: str = Field("auto", description="How gradients per record are computed: auto, loop, vmap or ghost.")
    max_physical_batch: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Records computed at once; by the size of the model, 16 to 256, if left out. It changes results by "
        "rounding alone; docs/limits.md says how far rounding can go.",
    )
    num_workers: Annotated[int, Field(ge=0)] = Field(
        0, description="Processes that read records. A config's data are read into memory, so they are not needed."
    )
    compile: bool = Field(
        False,
        description="true compiles the step: a minute or so first (needs a C++ compiler), then faster for embeddings "
        "and transformers; see docs/engine.md.",
    )
    allocator: bool = Field(
        False, description="true makes glibc keep freed memory in the process, which is faster on some machines."
    )
    channels_last: bool = Field(
        False, description="true stores the weights of convolutions with the channels innermost, faster on CPUs."
    )


class OutputSection(_Section):
    """What is kept."""

    folder: str | None = Field(
        None, description="A new folder, taken from where you are; by default runs/NAME-1, -2, … by the config's name."
    )


class Config(_Section):
    """A whole file."""

    data: DataSection
    budgets: BudgetsSection = BudgetsSection()
    model: ModelSection = ModelSection()
    training: TrainingSection
    privacy: PrivacySection = PrivacySection()
    performance: PerformanceSection = PerformanceSection()
    output: OutputSection = OutputSection()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        own = self.budgets.file is None and self.budgets.shares is None
        if own and self.data.target == self.budgets.column:
            raise ValueError(f"{self.data.target!r} cannot be both data.target and budgets.column; name two columns")
        if self.training.loss == "mse" and self.data.classes is not None:
            raise ValueError('training.loss = "mse" predicts a number: leave out data.classes, or set "cross_entropy"')
        return self


def read(path: Path) -> Config:
    """The config in this file. Raises InputError, naming the key that is wrong and the one that may be meant."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"No config at {path}. Draft one from your data with: epsilons init DATA.csv") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not TOML: {error}. A config is drafted by: epsilons init DATA.csv") from None
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        more = f" ({len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise InputError(f"{path}: {_explained(problems[0])}{more}.") from None


def _explained(problem: Any) -> str:
    """One problem that pydantic found, in a sentence."""
    where = [str(part) for part in problem["loc"]]
    name = ".".join(where) or "the config"
    if problem["type"] == "extra_forbidden":
        known = list(_section_at(where[:-1]).model_fields)
        close = difflib.get_close_matches(where[-1], known, n=1)
        place = f"[{'.'.join(where[:-1])}]" if where[:-1] else "A config"
        meant = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"
        return f"{place} has no key {where[-1]!r}; {meant}"
    if problem["type"] == "missing":
        return f"{name} is missing"
    words: str = problem["msg"].removeprefix("Value error, ")
    arrived = problem["input"]
    if not where:
        return words
    shown = f" ({_shortened(arrived)} arrived)" if isinstance(arrived, str | int | float | bool) else ""
    return f"{name}: {words[:1].lower()}{words[1:]}{shown}"


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"


def _section_at(where: list[str]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for part in where:
        annotation = section.model_fields[part].annotation if part in section.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        section = annotation
    return section


def reference() -> str:
    """Every section and key, as a page of the documentation."""
    lines = [
        "# Config files",
        "",
        "What may stand in the file that `epsilons train` reads. `epsilons init` drafts one from your data. This page",
        "is printed by `python -m epsilons.cli.config`.",
    ]
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type)
        assert issubclass(section, _Section)
        lines += ["", f"## [{name}]", "", section.__doc__ or "", "", "| key | default | |", "|---|---|---|"]
        for key, value in section.model_fields.items():
            lines.append(f"| `{key}` | {_default(value)} | {value.description} |".replace("\\|", "|"))
    return "\n".join(lines) + "\n"


def _default(value: Any) -> str:
    if value.is_required():
        return "required"
    if isinstance(value.default, bool):
        return f"`{str(value.default).lower()}`"
    return f"`{value.default}`" if value.default not in (None, [], {}) else ""


if __name__ == "__main__":
    print(reference(), end="")
