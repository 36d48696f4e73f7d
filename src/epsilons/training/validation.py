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
from torch.utils.data import Subset, TensorDataset

from ..budgets.budgets import Budgets
from ..clipping.engine import is_covered
from ..core.columns import Codes, ranked, taken
from ..core.disclosure import in_groups
from ..draws.persons_rows import Persons
from ..errors import DataError, EpsilonsWarning, InputError, ModelError
from ..independence.fixed_draws import ROOTS
from ..planning import Plan
from ..planning.plan_numbers import SHARES
from . import checkpoints

# -- Data sets that are read by column: DataFrames of pandas or polars, and dicts of tensors or arrays
#
# Alone, such a data set gives batches {name: (batch, …)}, as torch's default_collate makes of records that are dicts.
# In a tuple, (frame, series), a frame is the matrix of its columns.

#: Kinds of arrays that become tensors: booleans, integers, floats.
_NUMBERS = "biuf"
_MOST_NAMED = 4


def is_frame(data: object) -> bool:
    """True for a DataFrame of pandas, polars, modin or cudf."""
    return hasattr(data, "columns") and hasattr(data, "to_numpy") and hasattr(data, "__getitem__")


def is_series(data: object) -> bool:
    """True for one column of a DataFrame."""
    return hasattr(data, "to_numpy") and hasattr(data, "dtype") and not isinstance(data, Tensor | np.ndarray)


def named_columns(data: object) -> dict[Any, Tensor] | None:
    """The columns of a DataFrame or of a dict of columns; None for other data. Raises DataError if one has no numbers.

    A dict of records by number, {0: record, 1: …}, is a data set of records.
    """
    if is_frame(data):
        return _tensors(_of_frame(data), f"this {type(data).__name__}")
    if not isinstance(data, Mapping) or not data or set(data) == set(range(len(data))):
        return None
    columns = {name: column.to_numpy() if is_series(column) else column for name, column in data.items()}
    if not all(isinstance(column, Tensor | np.ndarray) for column in columns.values()):
        raise DataError(
            f"Got a {type(data).__name__} of {len(data):,} entries ({listed(data)}), which are not all tensors or "
            "arrays. Make each an array with one row per record, e.g. numpy.asarray(values), or pass a data set of "
            "which each record is a dict."
        )
    return _tensors(columns, f"this {type(data).__name__}")


def matrix(frame: Any) -> npt.NDArray[Any]:
    """(rows, columns) the numbers of a DataFrame. Raises DataError for other columns."""
    columns = _of_frame(frame)
    _check_numbers(columns, f"this {type(frame).__name__}")
    return np.stack(list(columns.values()), axis=1) if columns else np.empty((len(frame), 0))


def as_tensor(array: Any) -> Tensor:
    """A tensor as it is, and an array, frame or series as a tensor; read-only and reversed arrays are copied."""
    if isinstance(array, Tensor):
        return array
    values = matrix(array) if is_frame(array) else array.to_numpy() if is_series(array) else array
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def listed(names: Mapping[Any, Any] | Sequence[Any]) -> str:
    """The first few names, for a message."""
    few = list(names)[:_MOST_NAMED]
    return ", ".join(map(repr, few)) + (", …" if len(names) > _MOST_NAMED else "")


def _of_frame(frame: Any) -> dict[Any, npt.NDArray[Any]]:
    names = list(frame.columns)
    if len(set(names)) < len(names):
        raise DataError(f"This {type(frame).__name__} has two columns with one name. Rename one of them.")
    return {name: np.asarray(frame[name].to_numpy()) for name in names}


def _tensors(columns: Mapping[Any, Any], what: str) -> dict[Any, Tensor]:
    _check_numbers(columns, what)
    return {name: as_tensor(column) for name, column in columns.items()}


def _check_numbers(columns: Mapping[Any, Any], what: str) -> None:
    others = [
        name
        for name, column in columns.items()
        if not isinstance(column, Tensor) and np.asarray(column).dtype.kind not in _NUMBERS
    ]
    if others:
        raise DataError(
            f"{len(others):,} of {len(columns):,} columns of {what} hold no numbers: {listed(others)}. Leave them out, "
            "or replace them by numbers. Categories, dates and empty cells of a table are read by a config: epsilons "
            "init."
        )


# -- Checks of data, budgets, plan and losses: do they belong together, and is there one value per record?

#: Fewer targets than this may well be all of one class.
FEWEST_TARGETS = 20


def groups_of(budgets: Budgets, plan: Plan, records: int, is_subset: bool = False) -> Codes:
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
    _check_declared(budgets, plan)
    if plan.adjacency != SHARES and not is_subset:
        same = np.array_equal(budgets.epsilons, plan.epsilons) and np.array_equal(budgets.delta, plan.delta)
        if plan.records != records or not same or not np.array_equal(budgets.counts, plan.counts):
            raise DataError(
                f"The plan was made for {plan.records:,} {plan.unit}s{in_groups(plan.groups)}, and does not fit "
                f"these {records:,} budgets{in_groups(budgets.groups)}. Plan again with these budgets. "
                f"For some of the plan's {plan.unit}s, such as a fold, pass PlanFolder.for_subset() as the plan."
            )
        return budgets._codes
    place = {pair: g for g, pair in enumerate(zip(plan.epsilons.tolist(), plan.delta.tolist(), strict=True))}
    pairs = list(zip(budgets.epsilons.tolist(), budgets.delta.tolist(), strict=True))
    if plan.adjacency != SHARES:
        _check_subset(budgets, plan, [place.get(pair) for pair in pairs])
    elif any(pair not in place for pair in pairs):
        raise DataError(
            f"Some {plan.unit}s carry a budget that is not among the plan's declared shares. Declare every epsilon "
            "that people could choose from, whether or not anyone did."
        )
    places = np.array([place[pair] for pair in pairs], dtype=np.min_scalar_type(len(place)))
    return taken(places, budgets._codes)


def _check_declared(budgets: Budgets, plan: Plan) -> None:
    if not budgets.groups.declared.items() <= plan.groups.declared.items():
        raise DataError("These budgets declare risks that the plan was not made for. Plan again with these budgets.")


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
                "See: epsilons docs concepts",
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
    except DataError:
        raise
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


# -- A note on budgets that follow from the classes of the records, and so publish them

_PAGE = "See: epsilons docs choosing-budgets"
ROSTER_NOTE = (
    "The budgets differ, and each class has one. The list of budgets is public, so it publishes the class of a record: "
    f"the guarantee protects the input, not the class. Declare shares if classes are confidential. {_PAGE}"
)
SHARES_NOTE = (
    "The budgets differ, and each class has one. The declared shares protect the class of a record only if the shares "
    f"of the classes were declared, not counted in these data. {_PAGE}"
)


def warn_if_classes_show_budgets(
    dataset: Any, budgets: Budgets, persons: Persons, plan: Plan, has_classes: bool | None
) -> None:
    """Warn once if budgets differ and all records of each class have one budget.

    has_classes   whether the targets are classes; None if that is unknown: then whole numbers are taken as classes

    A data set without columns and without `targets` is not checked, because it would have to be read as a whole.
    """
    if len(budgets.epsilons) == 1 or has_classes is False:
        return
    targets = targets_of(dataset)
    group = budgets._codes if persons.person is None else taken(budgets._codes, persons.person)  # (rows,)
    if targets is None or targets.shape != group.shape or (has_classes is None and targets.is_floating_point()):
        return
    if one_group_each(targets.detach().cpu().numpy(), group):
        note = SHARES_NOTE if plan.adjacency == SHARES else ROSTER_NOTE
        warnings.warn(note, EpsilonsWarning, stacklevel=5)


def one_group_each(classes: np.ndarray[Any, Any], group: Codes) -> bool:
    """Whether all records of each class are in one group. classes: (records,), group: (records,)

    >>> one_group_each(np.array([3, 4, 5, 3]), np.array([0, 1, 1, 0]))
    True
    >>> one_group_each(np.array([3, 4, 5, 3]), np.array([0, 1, 1, 1]))
    False
    """
    return len(ranked([classes, group])[1]) == len(ranked([classes])[1])  # pairs of class and group, and classes


def targets_of(dataset: Any) -> Tensor | None:
    """(records,) the targets of (input, target) data, if they can be known without reading every record; else None.

    They are the second of two columns, or the attribute `targets` (as in torchvision), also of a Subset.
    """
    if isinstance(dataset, TensorDataset):
        dataset = dataset.tensors
    if are_columns(dataset):
        return _flat(columns(dataset)[1]) if len(dataset) == 2 else None
    with suppress(Exception):  # a custom data set may hold anything under these names
        if isinstance(dataset, Subset):
            whole = targets_of(dataset.dataset)
            return None if whole is None else whole[torch.as_tensor(dataset.indices)]
        return _flat(torch.as_tensor(dataset.targets))
    return None


def _flat(targets: Tensor) -> Tensor:
    """A column with rows of one value as a flat one."""
    return targets.flatten() if targets.shape[1:].numel() == 1 else targets
