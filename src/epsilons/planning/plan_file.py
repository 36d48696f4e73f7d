"""A plan as a file: its JSON keys, its digest, and how it is read.

The keys are a public contract (docs/concepts.md). Readers of other programs need only `groups` and `phases`; for
one-phase plans the phase's numbers are repeated in the top-level rows, and must agree with it.

The digest is the SHA-256 of everything else in the file. It shows that a file was edited by hand, and no more, because
a forger can compute it again. `plan_checks` therefore warns of what the numbers cannot show.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from .._version import __version__
from ..budgets.budgets import is_large, large_delta
from ..errors import PlanError, app_packages, parsed_json
from .plan_numbers import COLUMNS, ROSTER, SHARES, PlanNumbers

if TYPE_CHECKING:
    from .plan_keys import PlanFile

#: Raised by one when a key changes its name or meaning; a reader refuses newer files.
SCHEMA = 7
#: Of plans of a selection, or with counts of classes: an older reader would take their epsilons for those of one run.
SCHEMA_OF_SELECTIONS = 7
#: Of plans of budgets by risk: an older reader would forget what they declare. Of plans on accounts of a registry: it
#: would forget what was spent before.
SCHEMA_OF_RISKS, SCHEMA_OF_ACCOUNTS = 6, 5
#: Of plans of records: their files have not changed since these versions. An older reader must refuse plans of persons,
#: because it would draw and clip their rows one by one.
SCHEMA_OF_PERSONS = 4
SCHEMA_OF_RUNS = 3
SCHEMA_OF_ONE_RUN = 2
#: Of records and of persons.
_SCHEMAS_OF_ALL = (SCHEMA_OF_ACCOUNTS, SCHEMA_OF_RISKS, SCHEMA_OF_SELECTIONS)
#: The adjacency ROSTER in files of schema 1, and in every plan's digest.
ROSTER_IN_SCHEMA_1 = "replace-by-null, roster public"


def to_dict(plan: PlanNumbers, tiers: Mapping[str, float] | None = None) -> dict[str, Any]:
    """What a saved plan holds, as JSON values. tiers: {name: epsilon}"""
    groups: list[dict[str, Any]] = [
        {"epsilon": float(e), "delta": float(d), "records": int(n), "epsilon_spent": float(s)}
        for e, d, n, s in zip(plan.epsilons, plan.delta, plan.counts, plan.epsilon_spent(), strict=True)
    ]
    if plan.groups.starts is not None:
        for row, start in zip(groups, plan.groups.starts.tolist(), strict=True):
            row["start"] = start
    for row, risk in zip(groups, _risks(plan), strict=False):
        row["risk"] = risk
    phases = [phase.to_dict() for phase in plan.phases]
    repeated = ("strategy", "options", "accountant", "adjacency", "records", "batch_size", "steps")
    values: dict[str, Any] = {"schema": _schema(plan), "epsilons_version": __version__}
    values |= {name: getattr(plan, name) for name in repeated} | {"options": dict(plan.options)} | _several(plan)
    values |= {"groups": groups, "phases": phases, "guarantee": plan.guarantee}
    if len(phases) == 1:
        values |= {name: phases[0][name] for name in ("noise_std", "expected_batch")}
        for row, numbers in zip(groups, phases[0]["groups"], strict=True):
            row.update(numbers)
    return sealed(values | ({"tiers": dict(tiers)} if tiers else {}))


def _risks(plan: PlanNumbers) -> list[dict[str, float]]:
    """(groups,) what each tier by risk declares, and what is certified of it; [] for other budgets."""
    if plan.groups.limits is None:
        return []
    names = ("advantage", "at_fpr", "tpr", "advantage_certified", "tpr_certified")
    rows = np.hstack([plan.groups.limits, plan.certified_limits])
    rows[np.isinf(rows[:, 0]), 3] = rows[np.isinf(rows[:, 2]), 1] = rows[np.isinf(rows[:, 2]), 4] = np.inf
    return [{name: one for name, one in zip(names, row, strict=True) if one < np.inf} for row in rows.tolist()]


def _schema(plan: PlanNumbers) -> int:
    if plan.select is not None or plan.class_noise is not None:
        return SCHEMA_OF_SELECTIONS
    if plan.groups.limits is not None:
        return SCHEMA_OF_RISKS
    if plan.groups.starts is not None:
        return SCHEMA_OF_ACCOUNTS
    if plan.unit == "person":
        return SCHEMA_OF_PERSONS
    return SCHEMA_OF_RUNS if plan.runs > 1 else SCHEMA_OF_ONE_RUN


def _several(plan: PlanNumbers) -> dict[str, Any]:
    """Several runs, a selection or counts, and the unit of persons. Older plans of one run have no such key."""
    runs: dict[str, Any] = (
        {"runs": plan.runs} if plan.runs > 1 else {} if plan.select is None else {"select": str(plan.select)}
    )
    runs |= {} if plan.class_noise is None else {"class_noise": plan.class_noise}
    return {**runs, "unit": plan.unit} if plan.unit == "person" else runs


def plan_digest(plan: PlanNumbers) -> str:
    """SHA-256 of all numbers that define a plan, in hex.

    epsilon_spent is left out, because a patch release of a library may move its last digits. The adjacency is spelled
    as in schema 1, so that ledgers of earlier runs still belong to their plans.
    """
    numbers = {
        "accountant": plan.accountant,
        "adjacency": ROSTER_IN_SCHEMA_1 if plan.adjacency == ROSTER else plan.adjacency,
        "records": plan.records,
        "groups": [
            plan.epsilons.tolist(),
            plan.delta.tolist(),
            plan.counts.tolist(),
            *([] if plan.groups.starts is None else [plan.groups.starts.tolist()]),
            *([] if plan.groups.limits is None else [plan.groups.limits.tolist()]),
        ],
        "phases": [phase.to_dict() for phase in plan.phases],
        **_several(plan),
    }
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values with their digest, computed from the values as JSON stores them."""
    return {**values, "digest": digest_of(json.loads(json.dumps(values)))}


def digest_of(values: Mapping[str, Any]) -> str:
    """SHA-256 of all values but the digest, in hex. The order of keys and the spelling of numbers do not count.

    >>> digest_of({"a": 1, "b": 0.5}) == digest_of({"b": 5e-1, "a": 1.0, "digest": "…"})
    True
    """
    content = {key: value for key, value in values.items() if key != "digest"}
    return hashlib.sha256(json.dumps(_canonical(content), sort_keys=True).encode()).hexdigest()


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
    """The plan in this file, its keys and types checked, and whether its digest is that of its content.

    Raises PlanError, saying what is wrong and where.
    """
    with app_packages():
        from pydantic import ValidationError

        from .plan_keys import PlanFile
    values = read_json(path)
    schema = values.get("schema")
    if isinstance(schema, int) and schema < 1:
        raise PlanError(f"{path} claims schema {schema}, which does not exist. Make it again with epsilons plan.")
    if isinstance(schema, int) and schema > SCHEMA:
        raise PlanError(
            f"{path} was written by a newer epsilons (schema {schema}; this one reads up to {SCHEMA}): upgrade "
            "epsilons."
        )
    if "charged_before" in values:
        raise PlanError(
            f"{path} holds a plan that was changed in the middle of a run (charged_before). This version does not read "
            "such plans. Make a new plan with epsilons plan, and release nothing of the earlier run."
        )
    try:
        file = PlanFile.model_validate(_renamed(values) if schema == 1 else values)
        _check_schema(values, file, path)
        return file, file.digest == digest_of(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise PlanError(
            f"{path} is not a plan this program can read: {where}: {first['msg'].lower()} ({error.error_count()} such "
            f"problems). Make it again with epsilons plan … -o {path.name}."
        ) from None


def _check_schema(values: Mapping[str, Any], file: PlanFile, path: Path) -> None:
    """Raise PlanError for keys that files of this schema do not have, or for a missing one."""
    schema = values.get("schema")
    if schema not in (SCHEMA_OF_PERSONS, *_SCHEMAS_OF_ALL) and ("runs" in values) != (schema == SCHEMA_OF_RUNS):
        raise PlanError(
            f"{path} contradicts itself: of files of records, those of schema {SCHEMA_OF_RUNS}, and no others, say for "
            "how many runs their epsilons are. It was edited; make a new plan with epsilons plan."
        )
    if schema not in _SCHEMAS_OF_ALL and (values.get("unit", "record") != "record") != (schema == SCHEMA_OF_PERSONS):
        raise PlanError(
            f'{path} contradicts itself: files of schema {SCHEMA_OF_PERSONS}, and no others, have the unit "person". '
            "It was edited; make a new plan with epsilons plan."
        )
    for own, name, says in (
        (SCHEMA_OF_ACCOUNTS, "start", "what was spent before"),
        (SCHEMA_OF_RISKS, "risk", "what risks are declared"),
        (SCHEMA_OF_SELECTIONS, "added", "how a run is selected, or what is counted"),
    ):
        is_there = any(getattr(part, name, None) is not None for part in (file, *file.groups))
        within = (own, SCHEMA_OF_SELECTIONS) if own == SCHEMA_OF_RISKS else (own,)
        if (schema == own and not is_there) or (schema not in within and is_there):
            raise PlanError(
                f"{path} contradicts itself: files of schema {own}, and no others, say {says}. It was edited; make "
                "a new plan with epsilons plan."
            )


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """The content of a file of schema 1 under the names of schema 2."""
    renamed = dict(values)
    if values.get("adjacency") == ROSTER_IN_SCHEMA_1:
        renamed["adjacency"] = ROSTER
    if isinstance(values.get("groups"), list):
        renamed["groups"] = [
            row | {"epsilon_spent": row["spends"]} if isinstance(row, dict) and "spends" in row else row
            for row in values["groups"]
        ]
    return renamed


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in this file. Raises PlanError if there is none."""
    try:
        text = path.read_text(encoding="utf-8")
        values = parsed_json(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except FileNotFoundError:
        raise PlanError(f"No plan at {path}. Make one with: epsilons plan … -o {path.name}") from None
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValueError:
        raise PlanError(
            f"{path} is not complete JSON: it may be cut off, hold NaN or Infinity, or have a key twice. Make it again "
            "with epsilons plan."
        ) from None
    if not isinstance(values, dict):
        raise PlanError(f"{path} holds JSON, but not a plan: expected an object with keys such as groups and phases.")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values under one key, one reader would use the first and another the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key appears twice")
    return values


# -- Checks of a plan that was read from a file: its numbers must agree, and be ones that planning gives

#: Relative difference that rounding may cause in a sum over all groups.
ROUNDING = 1e-6

#: A saved epsilon_spent may be lower by this part than what this version computes from the same numbers.
OTHER_VERSIONS = 1e-3

#: Names of the strategies of this package; planning.strategies adds them. They divide by what their rates come to.
REGISTERED: set[str] = set()

ODD_DIVISOR = (
    "some phase's expected_batch, by which updates are divided, is not what its rates come to, the sum of records · "
    "sample_rate"
)


def check(plan: PlanNumbers, file: PlanFile) -> None:
    """Raise PlanError for a file that contradicts itself, BudgetExceededError for a plan that overspends."""
    _check_repeated(plan, file)
    plan.verify()
    if plan.strategy in REGISTERED and not _divides_as_it_draws(plan):
        raise PlanError(f"This plan file contradicts itself: {ODD_DIVISOR}. It was edited; make a new plan.")
    if not plan.batch_size <= plan.records:
        raise PlanError("This plan's batch_size is larger than its number of records: no sampling rate is above 1.")
    for row, spent in zip(file.groups, plan.epsilon_spent(), strict=True):
        if not spent * (1 - OTHER_VERSIONS) <= row.epsilon_spent <= row.epsilon * (1 + ROUNDING):
            raise PlanError(
                "This plan file contradicts itself: some group's epsilon_spent is not what its phases come to. It was "
                "edited; make a new plan with epsilons plan."
            )
    for row, risk in zip(file.groups, _risks(plan), strict=False):
        claimed = row.risk or {}
        if not all(math.isclose(claimed.get(name, -1), one, rel_tol=OTHER_VERSIONS) for name, one in risk.items()):
            raise PlanError(
                "This plan file contradicts itself: some certified risk is not what its phases come to. It was edited; "
                "make a new plan with epsilons plan."
            )
    if plan.adjacency == SHARES and len(np.unique(plan.delta)) > 1:
        raise PlanError(
            f"This plan file claims {SHARES!r}, but such a plan has one delta for all. It was edited; make a new plan "
            "with public_shares and public_records."
        )


def doubts(plan: PlanNumbers, file: PlanFile) -> Iterator[str]:
    """What the numbers in a file cannot show, as warnings."""
    if file.digest is None:
        yield (
            "this plan file holds no digest, so a change by hand would not be seen; an earlier version or another "
            "program wrote it. No budget is overspent. To add one, save it again once you have looked through it."
        )
    if not _divides_as_it_draws(plan):
        yield f"{ODD_DIVISOR}. A custom strategy may intend that; privacy does not depend on it."
    if plan.adjacency == SHARES:
        yield (
            "this plan promises that presence is protected, too, because its shares and number of records were "
            "declared by the caller as not derived from the data. Nothing in the file can show that they were; "
            "rely on it only if you know who made it."
        )
    if is_large(plan.delta, plan.records):
        yield large_delta(plan.records, plan.unit)


def _divides_as_it_draws(plan: PlanNumbers) -> bool:
    """Whether every phase's expected batch, the divisor of its updates, is what its rates come to."""
    return all(
        math.isclose(phase.expected_batch, float(plan.counts @ phase.sample_rate), rel_tol=ROUNDING)
        for phase in plan.phases
    )


def _check_repeated(plan: PlanNumbers, file: PlanFile) -> None:
    """Refuse a file if repeated or derived numbers contradict its phases: it was edited in some places only."""
    claims: list[tuple[str, float | None, float]] = [
        ("steps", file.steps, plan.steps),
        ("records", file.records, plan.records),
    ]
    for phase, table in zip(plan.phases, file.phases, strict=True):
        for value, row in zip(phase.noise_multiplier, table.groups, strict=True):
            claims.append(("noise_multiplier", row.noise_multiplier, float(value)))
    if len(plan.phases) == 1:
        phase = plan.phases[0]
        claims.append(("noise_std", file.noise_std, phase.noise_std))
        claims.append(("expected_batch", file.expected_batch, phase.expected_batch))
        for i, repeated in enumerate(file.groups):
            for name in (*COLUMNS, "noise_multiplier"):
                claims.append((name, getattr(repeated, name), float(getattr(phase, name)[i])))
    for name, claimed, value in claims:
        tolerance = 0.0 if isinstance(claimed, int) else 1e-9
        if claimed is not None and not math.isclose(claimed, value, rel_tol=tolerance):
            raise PlanError(
                f"This plan file contradicts itself: {name} is not what its phases come to. It was edited; make a new "
                "plan with epsilons plan."
            )
