"""Read membership.json again, as `MembershipResult.save` wrote it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import RunError
from ...escaping import json_text, parsed_json
from ...mechanism import FloatArray
from .certified import Certified
from .intervals import RATES, Roc
from .outcomes import Difference, FoundAt, GroupAttack, GroupRow
from .result import MembershipResult
from .statistics import Estimate

_COLUMNS = ("rate", "found", "low", "high", "band")


def load(path: Path) -> MembershipResult:
    """The result in this file, without the AUCs of single targets. Raises RunError if it is damaged."""
    try:
        result = _result(parsed_json(path.read_bytes()))
        json_text([result.table(), result.rate_table(), result.difference_table(), result.to_dict()])  # what is shown
        return result
    except Exception:  # a damaged value may raise anything
        raise RunError(f"{path} is damaged: it holds no result of an attack. Restore it, or attack again.") from None


def _result(values: Mapping[str, Any]) -> MembershipResult:
    same = ("plan", "strategy", "shadows", "records", "dealt_at_random", "accuracy", "setting", "suppressed")
    return MembershipResult(
        **{name: values[name] for name in same},
        rows=tuple(map(_row, values["groups"])),
        attacks=tuple(map(_attack, values["attacks"])),
        differences=tuple(map(_difference, values["differences"])),
        placebo=None if values["placebo"] is None else _result(values["placebo"]),
        minus_placebo={name: tuple(map(_estimate, rows)) for name, rows in values["minus_placebo"].items()},
    )


def _row(values: Mapping[str, Any]) -> GroupRow:
    certified = Certified(values["certified_auc"], np.array(values["certified"]["power"], dtype=np.float64))
    if certified.power.shape != RATES.shape:
        raise ValueError
    return GroupRow(values["label"], values["epsilon"], values["records"], certified)


def _attack(values: Mapping[str, Any]) -> GroupAttack:
    return GroupAttack(
        attack=values["attack"],
        row=values["group"],
        auc=_estimate(values["auc"]),
        auc_of_others=_estimate(values["auc_of_others"]),
        found=tuple(map(_found, values["found"])),
        share=values["share_of_certified"],
        exceeds_certified=values["exceeds_certified"],
        roc=_roc(values["roc"]),
    )


def _roc(values: Mapping[str, Any]) -> Roc:
    columns: dict[str, FloatArray] = {name: np.array(values[name], dtype=np.float64) for name in _COLUMNS}
    if {column.shape for column in columns.values()} != {(len(values["rate"]),)}:
        raise ValueError
    return Roc(**columns, false_alarms=np.array(values["false_alarms"], dtype=np.int64), auc_variance=math.nan)


def _found(values: Mapping[str, Any]) -> FoundAt:
    return FoundAt(**{**values, "found": _estimate(values["found"]) if values["found"] else None})


def _difference(values: Mapping[str, Any]) -> Difference:
    estimates = {name: _estimate(values[name]) for name in ("auc", "of_others")}
    numbers = {name: _number(values[name]) for name in ("ordered", "p_value")}
    return Difference(**{**values, **estimates, **numbers})


def _estimate(values: Mapping[str, Any]) -> Estimate:
    return Estimate(*(_number(values[name]) for name in ("value", "low", "high")))


def _number(value: float | None) -> float:
    """JSON has null for numbers that are not finite."""
    return math.nan if value is None else value
