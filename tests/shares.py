"""A share of long families of cases in every run, and all of them with --slow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest


def share(cases: Iterable[Any], few: int) -> list[Any]:
    """Cases for parametrize: `few` of them in every run, from the first to the last, the others with --slow."""
    listed = list(cases)
    kept = {round(i * (len(listed) - 1) / max(few - 1, 1)) for i in range(few)}
    return [
        case if i in kept else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for i, case in enumerate(listed)
    ]


def examples(few: int, many: int) -> hypothesis.settings:
    """Settings of a property test: `few` examples in every run, `many` with --slow."""
    return hypothesis.settings(max_examples=few if hypothesis.settings().derandomize else many)
