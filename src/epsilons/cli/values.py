"""Values as people type them: shares, options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from ..errors import BudgetError, PlanError
from ..planning import plan
from ..tabular import decimal


def parse_shares(text: str) -> dict[float, float]:
    """{epsilon: share} from "1:34%,2:43%,3:23%" or "1:.34, 2:.43, 3:.23". Raises BudgetError.

    >>> parse_shares("1:34%,2:66%")
    {1.0: 0.34, 2.0: 0.66}
    """
    shares: dict[float, float] = {}
    for part in text.split(","):
        level, colon, share = (piece.strip() for piece in part.partition(":"))
        epsilon, value = decimal(level), decimal(share.removesuffix("%"))
        if not colon or epsilon is None or value is None:
            raise BudgetError(f'Shares are written epsilon:share, e.g. "1:34%,2:43%,3:23%"; {part.strip()!r} is not.')
        if epsilon in shares:
            raise BudgetError(f"The shares name epsilon {level} twice.")
        shares[epsilon] = value / (100 if share.endswith("%") else 1)
    return shares


def parse_tiers(text: str) -> dict[str, float]:
    """{name: epsilon} from "strict:0.5,open:8". Raises BudgetError.

    >>> parse_tiers("strict:0.5, open:8")
    {'strict': 0.5, 'open': 8.0}
    """
    tiers: dict[str, float] = {}
    for part in text.split(","):
        name, colon, written = (piece.strip() for piece in part.rpartition(":"))
        epsilon = decimal(written)
        if not colon or not name or epsilon is None:
            raise BudgetError(f'Tiers are written name:epsilon, e.g. "strict:0.5,open:8"; {part.strip()!r} is not.')
        tiers[name] = epsilon
    return tiers


def parse_options(texts: list[str]) -> dict[str, Any]:
    """{"weight": 0.5} from ["weight=.5"]; numbers become numbers. Raises PlanError.

    >>> parse_options(["weight=.5", "mean=harmonic"])
    {'weight': 0.5, 'mean': 'harmonic'}
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise PlanError(f"Options are written name=value, e.g. weight=.5; {text!r} arrived.")
        options[name.strip().replace("-", "_")] = _number_or_text(value.strip())
    return options


def strategy_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, unless one of them is a parameter of every plan. Raises PlanError."""
    taken = sorted(set(options) & set(inspect.signature(plan).parameters))
    if taken:
        raise PlanError(f"{taken[0]!r} is not a strategy's option; it has a flag, or in a config a key, of its own.")
    return dict(options)


def _number_or_text(value: str) -> float | int | str:
    number = decimal(value)
    if number is None:
        return value
    return int(value) if re.fullmatch(r"[+-]?[0-9]{1,15}", value) else number
