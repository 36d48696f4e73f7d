"""What `fit` knows about a trained model, for its model.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationError
from torch import nn

from ..errors import InputError
from ..model_file import ArrayInputs, ModelFile, Origin, Outputs
from .evaluation import Loss
from .models import name_of

Kind = Literal["classes", "binary", "number", "raw"]
KINDS: dict[str, Kind] = {"cross_entropy": "classes", "binary_cross_entropy": "binary", "mse": "number"}

#: The caller computed the inputs, and did not say how.
UNKNOWN = Origin(column="(all inputs)", what="preprocessing", source="not stated")


def describe(
    model: nn.Module, loss: str | Loss, classes: Sequence[str] | None, metadata: Mapping[str, Any]
) -> ModelFile:
    """The description of a model that `fit` trained on the caller's arrays.

    classes   their names, if test data named them
    metadata  the caller's; "provenance" says what was read off the data
    """
    kind = KINDS.get(loss, "raw") if isinstance(loss, str) else "raw"
    names = tuple(map(str, classes)) if classes is not None and kind == "classes" else None
    return ModelFile(
        model=name_of(model),
        inputs=ArrayInputs(),
        outputs=Outputs(kind=kind, classes=names),
        provenance=stated_provenance(metadata),
    )


def stated_provenance(metadata: Mapping[str, Any] | None) -> tuple[Origin, ...]:
    """metadata["provenance"], or that it is unknown. Raises InputError if it is no list of such entries."""
    try:
        entries = (metadata or {}).get("provenance")
        return (UNKNOWN,) if entries is None else tuple(Origin.model_validate(entry) for entry in entries)
    except (ValidationError, TypeError, AttributeError):
        raise InputError(
            'metadata["provenance"] must be a list of {"column": …, "what": …, "source": …}. what: bounds, categories, '
            "classes or preprocessing; source: declared, read off the data, or not stated."
        ) from None
