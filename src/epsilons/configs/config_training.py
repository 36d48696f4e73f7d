"""The sections of a config that say how to train, and under which plan: they do not depend on the data."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..accounting import ACCOUNTANTS
from ..accounting.selection import Selection
from ..data.texts import Tokens
from ..planning import STRATEGIES, Recipe
from ..planning.guarantee import EACH_ROW
from ..tabular import decimal

# -- What the sections of a config are made of: their base, types of values, fixed features, ids of tokens, [about]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = str | int | float | bool


def check_levels(shares: dict[str, float]) -> None:
    """Raise ValueError for shares by epsilon with a key that is no number."""
    for level in shares:
        if decimal(level) is None:
            raise ValueError(f'an epsilon must be a number, got {level!r}; write {{"1" = 0.5, "2" = 0.5}}')


#: Of every section: its keys have one type each, and others are refused.
STRICT = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)


class _InputSection(BaseModel):
    model_config = STRICT


class FeaturesSection(_InputSection):
    """Fixed features in the place of the inputs."""

    name: str
    options: dict[str, Any] = {}


class TokensSection(_InputSection):
    """How the texts of a column become ids of tokens."""

    kind: Literal["words", "bytes"] = "words"
    length: Annotated[int, Field(ge=1, le=65_536)] = 256
    buckets: Annotated[int, Field(ge=2, le=2**20)] | None = None

    @model_validator(mode="after")
    def _no_buckets_of_bytes(self) -> TokensSection:
        if self.kind == "bytes" and self.buckets is not None:
            raise ValueError('buckets are for words: leave them out for kind = "bytes", which has 257 ids')
        return self

    @property
    def tokens(self) -> Tokens:
        """The same, with defaults."""
        return Tokens(self.kind, self.length) if self.buckets is None else Tokens(self.kind, self.length, self.buckets)


# -- The sections of a config that say how to train, and under which plan: they do not depend on the data


class _Section(BaseModel):
    model_config = STRICT


class ModelSection(_Section):
    """The model."""

    name: str = "mlp"
    """logistic, mlp, mnist-cnn, cifar10-cnn, resnet18-gn, embedding-bag, lstm, or the import path of your own model,
    "package.module:callable", with --trust ([Trust](trust.md)). The callable gets the options and returns an
    nn.Module."""
    options: dict[str, Any] = {}
    """E.g. {hidden = [64, 64], activation = "tanh"} for mlp."""


class TrainingSection(_Section):
    """Steps, batches and optimizer."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Number of noisy updates. Give either this or `epochs`."""
    epochs: Positive | None = None
    """Expected number of passes over the data."""
    convention: Literal["paper", "authors-code"] = "paper"
    """What an epoch is. "paper": sample_rate = batch_size / N, steps = epochs · N / batch_size. "authors-code":
    sample_rate = 1 / ceil(N / batch_size), steps = epochs · ceil(N / batch_size)."""
    batch_size: Positive
    """EXPECTED number of records per update; with `data.person`, of persons."""
    rows_per_person: Annotated[int, Field(ge=1)] = 1
    """Number of rows that a drawn person contributes, at most ([Persons](persons.md)). Needs `data.person`."""
    views: Annotated[int, Field(ge=1)] = 1
    """How often each of these rows is read in one step: random augmentations differ, and their gradients are averaged.
    It changes nothing else for data without random augmentation."""
    clip_norm: Positive = 1.0
    """L2 norm that the tiers' clip norms average to."""
    loss: Literal["cross_entropy", "mse"] = "cross_entropy"
    """Use "mse" if the target is a number, and leave out `data.classes`."""
    class_weights: dict[str, Positive] | None = None
    """Class = number, for every class: the loss of a record is multiplied by that of its class, e.g. {no = 1, yes = 5}.
    Declare them without looking at the data: weights that were counted are not covered by the guarantee."""
    balance: bool = False
    """Train on a loss that makes up for budgets that are tied to classes, by `budgets.classes`. No rate, noise or
    epsilon changes. It needs a clip_norm that most gradients exceed
    ([Choosing budgets](choosing-budgets.md#when-the-people-of-one-class-are-strict))."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """One of: sgd, adam, adamw, as in torch.optim."""
    lr: Positive = 0.1
    """Learning rate."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """For sgd only; refused with another optimizer."""
    seeds: list[Annotated[int, Field(ge=0)]] = []
    """Train once per seed, repeatably. With the seed, the noise can be removed, so leave this empty for a model that
    you will release."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, …"""
    randomness: Literal["chacha20", "secure"] = "chacha20"
    """chacha20, or secure: each value half the sum of four, against attacks on its last bits."""
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between checkpoints. Default: about every five minutes, and at each evaluation."""
    eval_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between evaluations."""

    @model_validator(mode="after")
    def _one_length(self) -> TrainingSection:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"training.momentum is for sgd; {self.optimizer} has betas in its place")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("training.seeds names one seed twice; each seed trains one run")
        return self

    def recipe(self, records: int) -> Recipe:
        """The recipe for this number of training records."""
        made = Recipe.of_epochs(
            self.epochs or 1,
            records=records,
            batch_size=self.batch_size,
            clip_norm=self.clip_norm,
            convention=self.convention,
        )
        return made if self.steps is None else replace(made, steps=self.steps)


OWN_STRATEGY = (
    'the import path of one of your own, "package.module:function" ([Extending](extending.md#a-strategy)), also beside '
    "the config, with --trust ([Trust](trust.md))"
)


class PrivacySection(_Section):
    """How the budgets become a plan."""

    strategy: str = Field("scale", description=f"One of: {', '.join(STRATEGIES)}; or {OWN_STRATEGY}.")
    accountant: str = Field("pld", description=f"One of: {', '.join(ACCOUNTANTS)}.")
    options: dict[str, Text] = {}
    """Options of the strategy."""
    runs: Annotated[int, Field(ge=1)] = 1
    """Number of runs that share the budgets ([Tuning](tuning.md)). More than one need `plan_folder`."""
    plan_folder: str | None = None
    """The folder that keeps the plan and counts its runs, relative to the config. The first run makes it. Configs that
    name one folder share its runs."""
    select: str | None = None
    """For `epsilons tune` alone: how many runs are made in secret, of which the best is kept, logarithmic:10 or
    poisson:10 ([Tuning](tuning.md#private-selection))."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The part of the people that `epsilons tune` does not train on: the runs are scored on them, with noise."""
    class_noise: Positive | None = None
    """In place of `budgets.classes`, for `training.balance`: the classes in each tier are counted once, with noise of
    this standard deviation in people. The plan charges it."""
    public_shares: dict[str, Positive] | None = None
    """Shares declared as NOT derived from these data. This also protects presence."""
    public_records: Annotated[int, Field(ge=1)] | None = None
    """The declared number of records."""
    signed_by: list[Annotated[str, Field(pattern=r"^([A-Za-z0-9+/]{43}=|[0-9a-f]{32})$")]] = []
    """Public keys, or their fingerprints, as `epsilons sign --new-key` prints them. Without a plan (--plan, or
    `plan_folder`) that is signed with each of them, training is refused ([Signatures](report.md#signatures))."""

    @model_validator(mode="after")
    def _counted(self) -> PrivacySection:
        if (self.runs > 1) != (self.plan_folder is not None):
            raise ValueError("privacy.runs > 1 and privacy.plan_folder, which counts the runs, belong together")
        if self.select is not None:
            Selection.of(self.select)
            if self.runs > 1 or self.public_shares is not None:
                raise ValueError("privacy.select needs no runs, and no public_shares")
        return self


#: The environment variable with the URL of the registry, for configs with a section [registry].
VARIABLE = "EPSILONS_REGISTRY"


class RegistrySection(_Section):
    """A run that is charged to lifetime budgets ([One lifetime, many runs](registry.md)).

    Persons come from `data.person`, and budgets from the registry in place of `[budgets]`. Its URL is given by
    `epsilons train --registry URL`, or by the environment variable EPSILONS_REGISTRY.
    """

    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """The part of what each person has left that this run may use. 1 leaves nothing for later runs."""
    project: str = ""
    """The project whose quota counts."""


class PerformanceSection(_Section):
    """Speed and memory. Without effect on privacy. "auto" decides by the model and the machine, never by timing."""

    engine: str = "auto"
    """How per-record gradients are computed: auto, loop, vmap or ghost."""
    max_physical_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Largest number of records computed at once; auto: by the size of the model, its memory and the expected draw. It
    changes results by rounding errors alone ([Limits](concepts.md#what-no-check-can-see))."""
    allocator: bool | Literal["auto"] = "auto"
    """Whether glibc keeps freed memory in the process; auto: where there is glibc."""
    channels_last: bool | Literal["auto"] = "auto"
    """Whether convolutions store their weights channels last; auto: on CPUs, for models that take it
    ([The engine](engine.md#allocator-and-memory-layout))."""
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Number of threads of torch; auto: torch's own number, or the CPUs of the container if those are fewer."""


class OutputSection(_Section):
    """Where the run is saved."""

    folder: str | None = None
    """A new folder, relative to the current one. Default: runs/NAME-1, -2, … for NAME.toml."""


# -- The person of a row in a config: data.person, and what must go with it

#: What being left out means for the guarantee.
ROSTER = (
    "Who is left out is a part of the list of budgets, so while the roster is public, the guarantee does not hide it."
)


def column_of_persons(person: str | None) -> str | None:
    """The column of ids that data.person names; None if it names none."""
    return None if person == EACH_ROW else person
