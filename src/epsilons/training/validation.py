"""Checks of data, budgets, plan and losses: do they belong together, and is there one value per record?"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from .._links import docs_page
from ..budgets import Budgets
from ..errors import DataError, EpsilonsWarning, InputError, ModelError
from ..planning import Plan
from ..planning.plan_numbers import SHARES
from . import checkpoints
from .clipping.engine import is_covered
from .independence.variants import ROOTS
from .named_columns import as_tensor, is_frame, is_series, listed, named_columns

#: Fewer targets than this may well be all of one class.
FEWEST_TARGETS = 20


def groups_of(budgets: Budgets, plan: Plan, records: int, is_subset: bool = False) -> npt.NDArray[np.int64]:
    """(records,) each record's group in the plan, or each person's. Raises DataError if they do not fit.

    records     number of records; with budgets of persons, of persons
    is_subset   True if these are some of the plan's records: each takes its group's row of the plan
    """
    if budgets.unit != plan.unit:
        raise DataError(
            f"The plan is for {plan.unit}s and the budgets are of {budgets.unit}s, so the plan's guarantee would name "
            f"another unit than the one that is drawn and clipped. Plan again with these budgets."
        )
    if budgets.records != records:
        raise DataError(
            f"Got {budgets.records:,} budgets for a data set of {records:,} records. Pass one budget per record, in "
            "data-set order; for part of the data use budgets.subset(indices)."
        )
    if plan.adjacency != SHARES and not is_subset:
        same = np.array_equal(budgets.epsilons, plan.epsilons) and np.array_equal(budgets.delta, plan.delta)
        if plan.records != records or not same or not np.array_equal(budgets.counts, plan.counts):
            raise DataError(
                f"The plan was made for {plan.records:,} {plan.unit}s in {len(plan.epsilons):,} groups and does not "
                f"fit these {records:,} budgets in {len(budgets.epsilons):,} groups. Plan again with these budgets. "
                f"For some of the plan's {plan.unit}s, such as a fold, pass PlanFolder.for_subset() as the plan."
            )
        return budgets.group
    place = {pair: g for g, pair in enumerate(zip(plan.epsilons.tolist(), plan.delta.tolist(), strict=True))}
    pairs = list(zip(budgets.epsilons.tolist(), budgets.delta.tolist(), strict=True))
    if plan.adjacency != SHARES:
        _check_subset(budgets, plan, [place.get(pair) for pair in pairs])
    elif any(pair not in place for pair in pairs):
        raise DataError(
            f"Some {plan.unit}s carry a budget that is not among the plan's declared shares. Declare every epsilon "
            "that people could choose from, whether or not anyone did."
        )
    return np.array([place[pair] for pair in pairs], dtype=np.int64)[budgets.group]


def _check_subset(budgets: Budgets, plan: Plan, group: Sequence[int | None]) -> None:
    """Raise DataError unless the plan's records could hold these; group: (groups of the budgets,) in the plan."""
    strangers = sum(int(n) for g, n in zip(group, budgets.counts, strict=True) if g is None)
    more = [g for g, n in zip(group, budgets.counts, strict=True) if g is not None and n > plan.counts[g]]
    if strangers or more:
        what = "budgets that the plan does not have" if strangers else "more records with some budget than the plan has"
        raise DataError(
            f"These are not some of the plan's records: there are {what}. Pass "
            "budgets.subset(indices) of the budgets that the plan was made for."
        )


#: What a caller states in words for the guarantee: what computed the inputs, and the column of the persons' ids.
STATED = {"features": "what computed the inputs", "person": "what a person is"}


def stated_text(metadata: Mapping[str, Any] | None, name: str) -> str | None:
    """One of STATED, as the caller says it. Raises InputError if it is not a text."""
    text = (metadata or {}).get(name)
    if text is not None and (not isinstance(text, str) or not text.strip()):
        raise InputError(
            f'metadata["{name}"] says in words {STATED[name]}, for the guarantee; got '
            f"{'an empty text' if isinstance(text, str) else f'a {type(text).__name__}'}."
        )
    return text


def warn_if_rounding_is_not_covered(plan: Plan, largest: int, rows: int = 1) -> None:
    """Warn once if draws may be too large for the proof that rounding keeps sums within the clip norms.

    largest   number of rows in a physical batch, at most
    rows      number of rows that one person contributes, at most. Then two neighbouring physical batches of whole
              persons hold more than largest / rows persons, and none holds more than `largest`: both ends must have
              half of the range
    """
    for phase in plan.phases:
        records = phase.expected_batch + ROOTS * phase.expected_batch**0.5
        bounds = np.multiply(phase.weight, phase.clip_norm)
        ratio = float(bounds.max() / bounds.min()) * (1 if rows == 1 else 2)
        sizes = [min(largest, records)] if rows == 1 else [min(largest, records), max(1, largest // (2 * rows))]
        if not all(is_covered(records, size, ratio) for size in sizes):
            warnings.warn(
                f"With draws of about {phase.expected_batch:,.0f} records in physical batches of {largest:,}, rounding "
                "in 64 bits is not proven to keep sums within the clip norms: use a smaller "
                f"batch_size (the range is widest with max_physical_batch={phase.expected_batch**0.5:.0f}). "
                f"See {docs_page('limits', 'what-no-check-can-see')}",
                EpsilonsWarning,
                stacklevel=5,
            )
            return


def check_pairs(data: Any, what: str) -> tuple[Any, Any] | None:
    """The first record of (input, target) data; None if it cannot be read. Raises DataError for other data.

    what   name of the data for the message
    """
    refuse_tables(data)
    if are_columns(data):
        tensors = columns(data)
        if any(t.ndim == 0 or len(t) == 0 for t in tensors):
            return None
        return check_pair(tuple(t[0] for t in tensors), what)
    if (named := named_columns(data)) is not None:
        raise DataError(
            f"fit needs {what} of (inputs, targets), got a {type(data).__name__} of {len(named):,} columns "
            f"({listed(named)}). Pass two parts, e.g. (frame[features], frame[target]), or use make_private and your "
            "own loop: its batches are dicts with these names."
        )
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or len(data) == 0:
        return None
    try:
        with checkpoints.same_generators():
            first = data[0]
    except Exception:  # any error: it is raised again, with its whole trace, where the record is drawn
        return None
    return check_pair(first, what)


def check_pair(record: Any, what: str) -> tuple[Any, Any]:
    """Refuse a record, or a batch of them, that is not (inputs, targets)."""
    if isinstance(record, tuple | list) and len(record) == 2:
        return record[0], record[1]
    size = f" of {len(record)} parts" if isinstance(record, tuple | list | Mapping) else ""
    raise DataError(
        f"fit needs {what} of (inputs, targets), got a {type(record).__name__}{size}. For dicts or more parts use "
        "make_private and your own loop."
    )


def check_dtype(inputs: Any, model: nn.Module) -> None:
    """Refuse inputs of another floating type than the model's parameters."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    values = _tensor(inputs)
    if values is not None and values.is_floating_point() and len(dtypes) == 1 and values.dtype not in dtypes:
        needed = dtypes.pop()
        raise DataError(
            f"The inputs are {values.dtype}, the model's parameters {needed}. Convert the inputs, a tensor by "
            f'.to({needed}) and an array by .astype("{str(needed).removeprefix("torch.")}"), or the model by '
            f".to({values.dtype})."
        )


def check_classes(targets: Any) -> None:
    """Refuse a record's targets that are no class for the cross-entropy."""
    values = _tensor(targets)
    if values is None or values.dtype in (torch.int64, torch.uint8):
        return
    if values.is_floating_point() and values.numel() != 1:
        return  # probabilities of classes
    raise DataError(
        f'loss="cross_entropy" needs classes as torch.int64, got targets of {values.dtype}. For classes convert '
        'them, a tensor by .long() and an array by .astype("int64"); for numbers there is loss="mse", for one output '
        'per yes or no loss="binary_cross_entropy".'
    )


def check_several_classes(data: Any, what: str) -> None:
    """Refuse columns whose targets are all of one class: a model that learnt nothing would score 100 % on them.

    A data set that is read record by record is not checked.
    """
    if isinstance(data, TensorDataset):
        data = data.tensors
    if not are_columns(data) or len(data) != 2:
        return
    targets = columns(data)[1]
    if targets.ndim == 0 or len(targets) < FEWEST_TARGETS:
        return
    if bool((targets == targets.reshape(-1)[0]).all()):
        raise DataError(
            f"All {len(targets):,} targets of the {what} are of one class, so there is nothing to learn. Name the "
            "column to predict, and include records of each class."
        )


def first_layer(model: nn.Module) -> nn.Module | None:
    """The layer that gets the inputs unchanged; None if only the forward pass shows it."""
    while type(model) is nn.Sequential and not model._forward_pre_hooks:
        model = next((m for m in model if type(m) not in (nn.Flatten, nn.Identity)), nn.Identity())
    is_plain = type(model) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) and not model._forward_pre_hooks
    return model if is_plain else None


def _tensor(values: Any) -> Tensor | None:
    """A record's values with the type that they have in a batch; None if they are no numbers."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, bool | int | float | np.ndarray | np.generic):
        with suppress(TypeError, ValueError):
            return torch.tensor(np.asarray(values))
    return None


def check_losses(losses: object, records: int) -> Tensor:
    """(records,) the losses. Raises ModelError if they are not one number per record."""
    if not isinstance(losses, Tensor):
        raise ModelError(f"private.backward takes the tensor of per-record losses, got a {type(losses).__name__}.")
    if losses.ndim == 0 and records == 1 and losses.requires_grad:
        return losses.reshape(1)  # as squeeze() returns it
    if losses.ndim == 0:
        raise ModelError(
            "private.backward needs one loss per record, got a single number: a mean or sum over the batch cannot be "
            'clipped record by record. Compute the loss with reduction="none".'
        )
    if losses.shape != (records,):
        raise ModelError(
            f"private.backward needs one loss per record, shape ({records},) for this batch, got shape "
            f"{tuple(losses.shape)}. Reduce everything but the first dimension, e.g. "
            "losses.flatten(1).mean(1)."
        )
    if not losses.requires_grad:
        raise ModelError(
            "The losses do not depend on any trainable parameter. Compute them inside the loop, with gradients "
            "enabled, from the model that was made private."
        )
    return losses


# -- columns ----------------------------------------------------------------------------------------------------


def columns(data: Sequence[Any]) -> tuple[Tensor, ...]:
    """Tensors as they are, and arrays, frames and series as tensors; read-only and reversed arrays are copied.

    Raises DataError for an array of a type that torch does not have.
    """
    try:
        return tuple(map(as_tensor, data))
    except (TypeError, ValueError) as e:
        kinds = ", ".join(str(getattr(t, "dtype", type(t).__name__)) for t in data)
        raise DataError(
            f"Not all of these arrays can become tensors, got the types {kinds}. Convert them to numbers first, e.g. "
            "array.astype(numpy.float32)."
        ) from e


def are_columns(data: object) -> bool:
    """True for tensors, arrays, frames or series with one row per record.

    A list of arrays is a data set instead, one record each.
    """
    if not isinstance(data, tuple | list) or not data:
        return False
    if isinstance(data, list):
        return all(isinstance(t, Tensor) for t in data)
    return all(isinstance(t, Tensor | np.ndarray) or is_frame(t) or is_series(t) for t in data)


def refuse_tables(data: object) -> None:
    """Raise DataError for tables of pyarrow, and for lists of DataFrames."""
    parts = data if isinstance(data, tuple | list) and len(data) < 10 else ()
    is_list = isinstance(data, list) and any(map(is_frame, parts))
    if is_list or any(type(part).__module__.partition(".")[0] == "pyarrow" for part in (data, *parts)):
        raise DataError(
            f"Got a {'list of DataFrames' if is_list else 'pyarrow table'}, which is read by column. Pass its columns "
            "as arrays, (frame[features].to_numpy(), frame[target].to_numpy()), or train on the table itself by a "
            "config: epsilons init."
        )
