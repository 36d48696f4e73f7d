"""What torch says of an ATen operator: its name, and the names and types of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

#: Defaults of these types are numbers in the schema, and mean the same as none.
_TYPES = ("ScalarType", "Optional[ScalarType]", "Layout", "Optional[Layout]")
#: Arguments of these types are sizes and places: they may grow with the number of records.
_SIZES = ("int", "Optional[int]", "List[int]", "Optional[List[int]]")


@dataclass(frozen=True)
class Schema:
    """One overload of an operator.

    name          without the underscore of the version that works in place
    names         of all arguments
    defaults      by name
    sizes         names of arguments that are sizes or places
    written       names of arguments that are written to
    is_pointwise  whether torch calls it entry by entry
    is_view       whether it only changes how a tensor shows its storage
    """

    name: str
    names: tuple[str, ...]
    defaults: dict[str, Any]
    sizes: frozenset[str]
    written: tuple[str, ...]
    is_pointwise: bool
    is_view: bool

    def named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, those given first, then defaults."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        return given | {name: value for name, value in self.defaults.items() if name not in given}


@cache
def schema_of(func: Any) -> Schema:
    name = func._schema.name.split("::")[-1]
    arguments = func._schema.arguments
    sizes = {a.name for a in arguments if str(a.type) in _SIZES} | ({"end"} if name == "arange" else set())
    return Schema(
        name[:-1] if name.endswith("_") and not name.endswith("__") else name,
        tuple(a.name for a in arguments),
        {a.name: a.default_value for a in arguments if a.has_default_value() and str(a.real_type) not in _TYPES},
        frozenset(sizes),
        tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        torch.Tag.pointwise in func.tags,
        torch.Tag.inplace_view in func.tags,
    )
