"""A plan as a file: what JSON it is, and how it is read with suspicion.

The keys are a public contract (docs/concepts.md). Readers of other programs need only `groups` and `phases`;
for one-phase plans the phase's numbers stand in the top-level rows too, and must agree with it here.

`digest` is the SHA-256 of everything else in the file. It shows that a file was changed by hand, no more: whoever
changes a file on purpose can compute it anew. What does not follow from a plan's numbers (declared shares) is therefore
warned about.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

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
    epsilon_spent: Annotated[float, Field(ge=0)]
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
    digest: str | None = None


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values with their digest, which is of what JSON makes of them: keys are texts."""
    return {**values, "digest": digest_of(json.loads(json.dumps(values)))}


def digest_of(values: Mapping[str, Any]) -> str:
    """SHA-256 of all values but the digest, in hex. The order of keys and the spelling of numbers do not count.

    >>> digest_of({"a": 1, "b": 0.5}) == digest_of({"b": 5e-1, "a": 1.0, "digest": "…"})
    True
    """
    told = {key: value for key, value in values.items() if key != "digest"}
    return hashlib.sha256(json.dumps(_canonical(told), sort_keys=True).encode()).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, bool | str | None):
        return value
    exact = isinstance(value, float) or abs(value) <= 2**53
    return {"number": float(value).hex() if exact else str(value)}


def read(path: Path) -> tuple[PlanFile, bool]:
    """The plan in this file, checked for its shape, and whether its digest is that of what it holds.

    Raises PlanError, saying what is wrong and where.
    """
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
        file = PlanFile.model_validate(values)
        return file, file.digest == digest_of(values)
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
        text = path.read_text(encoding="utf-8")
        values = json.loads(text, parse_constant=_no_number, object_pairs_hook=_each_once)
    except FileNotFoundError:
        raise PlanError(f"No plan at {path}. Make one with: epsilons plan … -o {path.name}") from None
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise PlanError(
            f"{path} is not whole JSON: it may be cut off, hold NaN or Infinity, or a key twice. Make it again with "
            "epsilons plan."
        ) from None
    if not isinstance(values, dict):
        raise PlanError(f"{path} holds JSON, but not a plan: expected an object with keys such as groups and phases.")
    return values


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values under one key, one reader would take the first and another the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key stands there twice")
    return values
