"""Checks of what a stack is trained on: do plan, groups, members, starts and data belong together?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import DataError, InputError
from ...mechanism import IntArray
from ...planning import Plan
from ..randomness import Randomness


def check_members(
    plan: Plan, records: int, group: IntArray, member: npt.NDArray[np.bool_], randomness: Sequence[Randomness]
) -> None:
    """Raises InputError unless there is a group per record, and a row of members and a randomness per model.

    Also for a plan of persons: a stack draws and clips each record by itself.
    """
    if plan.unit == "person":
        raise InputError(
            "A stack draws and clips records, and the plan is for persons. Train such models one by one, with fit."
        )
    if group.shape != (records,) or not ((group >= 0) & (group < len(plan.groups))).all():
        raise InputError(
            f"group needs one of the plan's {len(plan.groups):,} groups per record; got {group.shape} for {records:,} "
            "records, or groups that the plan does not have."
        )
    if member.dtype != np.bool_ or member.ndim != 2 or member.shape[1] != records or len(member) == 0:
        raise InputError(
            f"member needs True or False per model and record; got {member.dtype} {member.shape} for {records:,} "
            "records."
        )
    if len(randomness) != len(member):
        raise InputError(f"Every model needs a randomness of its own; got {len(randomness)} for {len(member)} models.")
    if len({source.key for source in randomness}) < len(randomness):
        raise InputError("Two models have the same key, so they would get the same noise. Pass different ones.")


def checked_starts(
    starts: Sequence[Sequence[Tensor]] | None, own: Sequence[Tensor], models: int
) -> Sequence[Sequence[Tensor]]:
    """(models,) initial parameters: `starts`, or the model's own for all. Raises InputError for other shapes."""
    if starts is None:
        return [own] * models
    expected = [(p.shape, p.dtype) for p in own]
    if len(starts) != models or any([(p.shape, p.dtype) for p in start] != expected for start in starts):
        raise InputError(
            f"starts needs the parameters of {models} models, with the shapes and types of model.parameters(); got "
            f"{len(starts)} starts."
        )
    return starts


def check_data(data: tuple[Tensor, Tensor], first_weight: Tensor, classes: int, flattens: bool) -> None:
    """Raises DataError unless inputs fit the first layer, and targets are classes of the last one.

    first_weight   (models, outputs, features)
    """
    inputs, targets = data
    features, dtype = first_weight.shape[2], first_weight.dtype
    shape_fits = inputs.ndim >= 2 if flattens else inputs.ndim == 2
    if not shape_fits or inputs[:1].numel() != features or inputs.dtype != dtype:
        raise DataError(
            f"The stack needs inputs of {features:,} features per record in {dtype}, got {tuple(inputs.shape)} in "
            f"{inputs.dtype}."
        )
    if targets.dtype not in (torch.int64, torch.uint8) or targets.shape != inputs.shape[:1]:
        raise DataError(
            f"The stack needs one class per record as torch.int64, got {tuple(targets.shape)} in {targets.dtype}."
        )
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        raise DataError(f"The targets must be classes from 0 to {classes - 1}; at least one is not.")
