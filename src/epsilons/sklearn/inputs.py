"""What the estimators are given: budgets, bounds, the seed, the module. All of it is checked before a fit begins."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils import check_random_state
from torch import Tensor, nn

from ..budgets.budgets import Budgets
from ..errors import BudgetError, InputError, ModelError

MakeModule = Callable[[int, int], nn.Module]
FloatArray = npt.NDArray[np.float64]


class UnknownArgumentError(InputError, TypeError):
    """An InputError that scikit-learn's tools know as a TypeError."""


_SAMPLE_WEIGHT = (
    "sample_weight is not supported: a weight would multiply what a record may contribute, and with it the noise that "
    "hides it. To let some records count for more, give them a larger epsilon: fit(X, y, epsilon=…)."
)


_PERSONS = (
    "Persons with several rows are not supported here: folds and searches split rows, and what they cost is counted by "
    "record. Train with epsilons.fit on epsilons.Records((X, y), persons=ids, rows_per_person=…)."
)


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Raise UnknownArgumentError for any further keyword argument of `fit`."""
    for name in ("person", "persons"):
        if name in given:
            raise UnknownArgumentError(f"fit takes no {name}=. {_PERSONS}")
    if "sample_weight" in given:
        raise UnknownArgumentError(_SAMPLE_WEIGHT)
    if given:
        raise UnknownArgumentError(f"fit takes X, y and epsilon=, got {', '.join(map(repr, given))}.")


# -- budgets ---------------------------------------------------------------------------------------------------


def check_index(epsilon: Any, X: Any, y: Any) -> None:
    """Refuse budgets with another pandas index than the inputs or targets: their rows may be in another order."""
    for name, values in (("X", X), ("y", y)):
        if not (hasattr(values, "iloc") and hasattr(epsilon, "iloc")):
            continue
        if not np.array_equal(np.asarray(epsilon.index), np.asarray(values.index)):
            raise BudgetError(
                f"epsilon and {name} have different indices, so a record may get the budget of another one. Select the "
                "same rows of both, or pass epsilon.to_numpy() if the rows are in the same order."
            )


def as_budgets(epsilon: object, otherwise: object, delta: float, records: int) -> Budgets:
    """The budgets of a fit.

    epsilon    None, one number for all, (records,), or Budgets
    otherwise  the estimator's own epsilon: one number for all records, used if epsilon is None

    Raises BudgetError.
    """
    if epsilon is None:
        if not _is_number(otherwise):
            raise BudgetError(
                "fit needs budgets: fit(X, y, epsilon=…), or the estimator's epsilon=, one number for all records, got "
                f"a {type(otherwise).__name__}. A search passes on fit(X, y, epsilon=…), cross_validate "
                "params={'epsilon': …}; ensembles need sklearn.set_config(enable_metadata_routing=True)."
            )
        epsilon = otherwise
    if isinstance(epsilon, Budgets):
        if epsilon.unit == "person":
            raise BudgetError(f"fit takes Budgets of records, got Budgets of persons. {_PERSONS}")
        budgets = epsilon
    elif _is_number(epsilon):
        budgets = Budgets(np.full(records, epsilon, dtype=np.float64), delta)
    else:
        budgets = Budgets(epsilon, delta)  # type: ignore[arg-type]  # it raises BudgetError for what is no array
    if len(budgets) != records:
        raise BudgetError(
            f"fit needs one epsilon, or one per record: got {len(budgets):,} for {records:,} records. In a search or a "
            "cross-validation pass one for each record of the whole X."
        )
    return budgets


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_)


# -- what the fits of this process have spent -------------------------------------------------------------------

#: By the folder of a shared plan, None for all other fits: rows, as rising hashes, and (rows, 2) epsilon and delta.
SPENT: dict[Path | None, tuple[npt.NDArray[np.int64], FloatArray]] = {}
_LOCK = threading.Lock()


def fingerprints(X: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """(records,) a number for each row of X (records, features) in 32 bits, under a secret of this process."""
    with np.errstate(over="ignore"):
        return np.array([hash(row.tobytes()) for row in X.astype(np.float32) + 0])  # -0 is 0


def spent_before(rows: npt.NDArray[np.int64], spent: FloatArray, shared: Path | None) -> FloatArray:
    """(records, 2) epsilon and delta that earlier fits of this process have spent of these rows. Counts this fit, too.

    rows    (records,) fingerprints; equal rows are counted as one record, with the largest of their budgets
    spent   (records, 2) epsilon and delta of this fit
    shared  the folder of a plan, whose other fits cost nothing more; None for a plan of this fit alone

    Epsilons add up, and so do deltas (basic composition).
    """
    result = np.zeros_like(spent)
    with _LOCK:
        for known, sums in (SPENT[folder] for folder in SPENT if shared is None or folder != shared):
            at = np.searchsorted(known[:-1], rows)
            result += np.where((known[at] == rows)[:, None], sums[at], 0)
        known, sums = SPENT.get(shared, (rows[:0], spent[:0]))
        merged = np.union1d(known, rows)
        old, new = np.zeros((2, len(merged), 2))
        old[np.searchsorted(merged, known)] = sums
        np.maximum.at(new, np.searchsorted(merged, rows), spent)
        SPENT[shared] = merged, old + new if shared is None else np.maximum(old, new)
    return result


# -- numbers ---------------------------------------------------------------------------------------------------


def check_positive(**numbers: object) -> None:
    """Raise InputError unless each is a positive, finite number."""
    for name, value in numbers.items():
        if not (_is_number(value) and 0 < float(value) < np.inf):  # type: ignore[arg-type]
            shown = repr(value) if _is_number(value) else f"a {type(value).__name__}"
            raise InputError(f"{name} must be a positive, finite number, got {shown}.")


def check_bounds(bounds: object, name: str, columns: int | None = None) -> tuple[FloatArray, FloatArray]:
    """(low, high), each () or (columns,). Raises InputError.

    columns   number of features for which there may be bounds of their own; None: one pair only
    """
    shapes = {(), (columns,)} if columns is not None else {()}
    try:
        low, high = (np.asarray(bound, dtype=np.float64) for bound in bounds)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise InputError(f"{name} must be a pair (low, high) of numbers, got a {type(bounds).__name__}.") from None
    if not {low.shape, high.shape} <= shapes:
        per = f", or one for each of the {columns:,} features" if columns is not None else ""
        raise InputError(f"{name} must be a pair of numbers{per}, got shapes {low.shape} and {high.shape}.")
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise InputError(f"{name} must be finite, with low below high.")
    return low, high


def scaled(values: npt.NDArray[Any], low: FloatArray, high: FloatArray) -> FloatArray:
    """Values clipped to the bounds and mapped to [-1, 1].

    >>> scaled(np.array([-3.0, 0.0, 4.0, 8.0, 1e300]), np.float64(0), np.float64(8)).tolist()
    [-1.0, -1.0, 0.0, 1.0, 1.0]
    """
    clipped = np.clip(np.asarray(values, dtype=np.float64), low, high)
    # Halves, because high - low may overflow.
    return np.asarray((clipped / 2 - low / 2) / (high / 2 - low / 2) * 2 - 1, dtype=np.float64)


def as_seed(random_state: object) -> int | None:
    """The seed of a fit; None for a secret key."""
    return None if random_state is None else int(check_random_state(random_state).randint(2**31))


# -- the network -----------------------------------------------------------------------------------------------


def network(features: int, outputs: int, hidden: tuple[int, ...]) -> nn.Sequential:
    """A linear layer, or several with Tanh between them.

    >>> network(3, 2, (5,))
    Sequential(
      (0): Linear(in_features=3, out_features=5, bias=True)
      (1): Tanh()
      (2): Linear(in_features=5, out_features=2, bias=True)
    )
    """
    layers: list[nn.Module] = []
    for inputs, width in zip((features, *hidden), hidden, strict=False):
        layers += [nn.Linear(inputs, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear((features, *hidden)[-1], outputs))


def check_hidden(hidden: object) -> tuple[int, ...]:
    """The widths of the hidden layers. Raises InputError."""
    widths = tuple(hidden) if isinstance(hidden, tuple | list | np.ndarray) else (0,)
    if not all(isinstance(width, int | np.integer) and width > 0 for width in widths):
        raise InputError(f"hidden must be a tuple of positive widths, such as (32,) or (), got {hidden!r}.")
    return tuple(map(int, widths))


def build(module: object, hidden: object, features: int, outputs: int) -> nn.Module:
    """A new module, and a check that it maps (records, features) to (records, outputs).

    Raises InputError for settings that cannot be used, ModelError for another shape of its result.
    """
    widths = check_hidden(hidden)
    if module is None:
        return network(features, outputs, widths)
    if isinstance(module, nn.Module) or not callable(module):
        raise InputError(
            "module must be a function (features, outputs) -> a new torch module, because every fit begins with new "
            f"weights; got a {type(module).__name__}."
        )
    if widths:
        raise InputError("Got module= and hidden=, and each of them determines the network. Leave one out.")
    built = module(features, outputs)
    if not isinstance(built, nn.Module):
        raise InputError(f"module must return a torch module, got a {type(built).__name__}.")
    shape = tuple(forward(built, torch.zeros(2, features)).shape)
    if shape != (2, outputs):
        raise ModelError(
            f"The module must map 2 records of {features:,} features to shape (2, {outputs}), got shape {shape}."
        )
    return built


def forward(module: nn.Module, inputs: Tensor, at_once: int = 4096) -> Tensor:
    """(records, outputs) of the module in evaluation mode, which is left on.

    In 64 bits: in 32, a record's outputs would change visibly with the number of records.
    """
    exact = copy.deepcopy(module.eval()).double()
    with torch.no_grad():
        return torch.cat([exact(part.double()) for part in torch.split(inputs, at_once)])
