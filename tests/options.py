"""Options of a run in one flat dict, as tests write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from epsilons import Performance

_FIELDS = {field.name for field in fields(Performance)}


def split(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options for `make_private` or `fit`, with those of Performance gathered under performance=."""
    chosen = {name: value for name, value in options.items() if name in _FIELDS}
    rest = {name: value for name, value in options.items() if name not in _FIELDS}
    return rest | ({"performance": Performance(**chosen)} if chosen else {})
