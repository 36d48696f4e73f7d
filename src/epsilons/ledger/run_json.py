"""run.json and the lines of metrics.jsonl, as they are read: checked by pydantic, of the extra `app`.

They are written as plain JSON by `RunFolder`, because training needs no pydantic.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(allow_inf_nan=False, ge=0)]
Lifetime = Annotated[list[NotNegative], Field(min_length=2, max_length=2)]  # epsilon, home order


def _possible(cell: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= cell[0] <= cell[1]:
        raise ValueError("more right than records")
    return cell


Cell = Annotated[tuple[int, int], Field(strict=False), AfterValidator(_possible)]  # right, records


class Strict(BaseModel):
    """Values of a file, checked when they are read. Other keys are left out."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Training(Strict):
    """The model and how it was trained."""

    model: str | None = None
    parameters: int | None = None
    loss: str | None = None
    optimizer: str | None = None
    lr: Finite | None = None
    momentum: Finite | None = None
    device: str | None = None
    balance: list[list[Finite]] | None = None


class EvalData(Strict):
    """The data of the evaluations; "public" and "private" are the caller's declaration."""

    data: Literal["private", "public"] | None = None
    records: Annotated[int, Field(ge=1)] | None = None
    persons: Annotated[int, Field(ge=1)] | None = None
    classes: list[str] | None = None


Words = Annotated[str, Field(max_length=10_000)]


class About(BaseModel):
    """What a reader must know about the run. The page of the plan and both versions of the report show it."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)
    purpose: Words | None = None
    """What the model is for, in your own words."""
    responsible: Words | None = None
    """Who is responsible for the run: a person, a team or an institution."""
    contact: Words | None = None
    """Where people can ask questions, or withdraw."""
    legal_basis: Words | None = None
    """What permits the use of these data, e.g. consent (GDPR Art. 6(1)(a), 9(2)(a))."""
    necessity: Words | None = None
    """Why the purpose needs these data, and no less of them would do."""
    recipients: Words | None = None
    """Who gets the model, or what it predicts."""
    retention: Words | None = None
    """How long data, run and model are kept."""
    residual_risk: Words | None = None
    """Which risk is left, and why it is accepted."""
    reasons: Words | None = None
    """Why these tiers, this delta, this strategy and these steps."""
    tiers_decided_by: Words | None = None
    """Who decided what the tiers promise."""
    tiers_decided_on: date | Words | None = None
    """The day of that decision, e.g. 2030-01-31."""
    approvers: list[Words] = []
    """Who approved the run, e.g. ["Ethics committee, vote 12/30"]. A [signature](report.md#signatures) proves it."""


class Metadata(Strict):
    """The caller's notes on the run. What others may have called by these names has any form."""

    about: Any = None
    person: Any = None
    provenance: Any = None
    config: dict[str, Any] | None = None
    tiers: dict[str, Finite] | None = None
    simulated: bool = False
    left_out: Any = None
    consent: Any = None


class Performance(Strict):
    """The performance settings that a report shows."""

    engine: str | None = None


class Attacked(Strict):
    """The latest attack on membership; digest is the SHA-256 of its result."""

    date: Any = None
    shadows: Any = None
    seed: Any = None
    folder: Any = None
    digest: str | None = None


class PlanSlot(Strict):
    """Which run of its plan a run is, 0 of 0 in a selection; claim is the text that its slot there has, too."""

    number: Annotated[int, Field(ge=0)]
    of: Annotated[int, Field(ge=0)]
    claim: str


class Charged(Strict):
    """The registry that a run is charged to: its id, and the name of the run there."""

    id: str
    run: str


class Change(Strict):
    """Keys of the config that had other values after a step of a run that continued, than before it."""

    step: Annotated[int, Field(ge=0)]
    keys: list[str]


class RunSettings(Strict):
    """run.json; runs of other versions may lack every key but the schema."""

    schema_: Annotated[int, Field(alias="schema")]
    performance: Performance = Performance()
    randomness: str | None = None
    roster: str | None = None
    guarantee: str | None = None
    features: str | None = None
    person: str | None = None
    versions: dict[str, str] = {}
    training: Training = Training()
    eval_data: EvalData = EvalData()
    metadata: Metadata = Metadata()
    about: Any = None
    started: Any = None
    ended: Any = None
    counted: Any = None
    attacked: Attacked = Attacked()
    plan_slot: PlanSlot | None = None
    subset_records: Annotated[int, Field(ge=1)] | None = None
    registry: Charged | None = None
    lifetimes: list[Lifetime] = []
    limits: list[list[Finite | None]] = []
    changes: list[Change] = []

    @property
    def registry_id(self) -> str | None:
        """Id of the registry that the run is charged to."""
        return None if self.registry is None else self.registry.id


class MetricsRow(Strict):
    """One line of metrics.jsonl."""

    step: Annotated[int, Field(ge=0)]
    loss: Finite | None = None
    accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
    auc: Annotated[float, Field(ge=0, le=1)] | None = None
    mean_absolute_error: NotNegative | None = None
    rmse: NotNegative | None = None
    r2: Annotated[float, Field(allow_inf_nan=False, le=1)] | None = None
    per_class: list[Cell] | None = None
    per_group: list[Cell] | None = None
    per_class_group: list[list[Cell]] | None = None
