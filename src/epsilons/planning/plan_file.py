"""A plan as a file: what JSON it is, and how it is read with suspicion.

The keys are a public contract (docs/concepts.md). Readers of other programs need only `groups` and `phases`;
for one-phase plans the phase's numbers stand in the top-level rows too, and must agree with it here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import PlanError

#: Raised by one when a key changes its meaning; a reader refuses newer ones.
SCHEMA = 1

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=10**15)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class GroupRow(_Strict):
    """One group's budget and what it spends; for one-phase plans, also its row of the table."""

    epsilon: Positive
    delta: Annotated[float, Field(gt=0, lt=1)]
    records: Count
    spends: Annotated[float, Field(ge=0)]
    sample_rate: Probability | None = None
    clip_norm: Positive | None = None
    weight: Positive | None = None
    noise_multiplier: Positive | None = None


class PhaseRow(_Strict):
    """One group's row of a phase's table."""

    sample_rate: Probability
    clip_norm: Positive
    weight: Positive
    noise_multiplier: Positive | None


class PhaseTable(_Strict):
    """One phase."""

    steps: Count
    noise_std: Positive
    expected_batch: Positive
    groups: list[PhaseRow]


class PlanFile(_Strict):
    """A whole plan, as read."""

    schema_: Annotated[int, Field(alias="schema")]
    epsilons_version: str
    strategy: str
    options: dict[str, Any]
    accountant: str
    adjacency: str
    records: Count
    batch_size: Positive
    steps: Count
    groups: list[GroupRow]
    phases: list[PhaseTable]
    noise_std: Positive | None = None
    expected_batch: Positive | None = None
    charged_before: Annotated[int, Field(ge=0, le=10**15)] = 0


def read(path: Path) -> PlanFile:
    """The plan in this file, checked for its shape. Raises PlanError, saying what is wrong and where."""
    values = read_json(path)
    schema = values.get("schema")
    if isinstance(schema, int) and schema < 1:
        raise PlanError(f"{path} claims to be of schema {schema}, which never was. Make it again with epsilons plan.")
    if isinstance(schema, int) and schema > SCHEMA:
        raise PlanError(
            f"{path} was written by a newer epsilons (schema {schema}; this one reads up to {SCHEMA}): upgrade "
            "epsilons."
        )
    try:
        return PlanFile.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise PlanError(
            f"{path} is not a plan this program can read: {where}: {first['msg'].lower()} ({error.error_count()} such "
            f"problems). Make it again with epsilons plan … -o {path.name}."
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in this file. Raises PlanError if there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"No plan at {path}. Make one with: epsilons plan … -o {path.name}") from None
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise PlanError(f"{path} is not whole JSON; it may be cut off. Make it again with epsilons plan.") from None
    if not isinstance(values, dict):
        raise PlanError(f"{path} holds JSON, but not a plan: expected an object with keys such as groups and phases.")
    return values
