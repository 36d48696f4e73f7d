"""What a search or a cross-validation costs: every fit spends the budgets of its records again.

Under basic composition epsilons add up, and so do deltas (Dwork and Roth, The Algorithmic Foundations of Differential
Privacy, 2014, Theorem 3.16). With k folds, a record is in candidates · (k - 1) + 1 fits of a search that refits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import clone, is_classifier
from sklearn.model_selection import GridSearchCV, ParameterGrid, ParameterSampler, RandomizedSearchCV, check_cv
from sklearn.pipeline import Pipeline
from sklearn.utils import get_tags

from ..budgets.budgets import Budgets
from ..core.disclosure import display_rows, has_small_cells
from ..core.mechanism import Groups
from ..errors import EpsilonsWarning, InputError
from ..ledger.plan_folder import PlanFolder
from ..planning.display import aligned
from . import inputs
from .estimators import _Private, delta_of, folder_of

FloatArray = npt.NDArray[np.float64]

NOT_COVERED = (
    "Not covered: scores on private records, and a choice by such scores, as GridSearchCV makes it. A choice by public "
    "records is covered."
)
STRATIFIED = (
    "Not covered: the folds of {}, which depend on the classes. Another class of one record moves other records "
    "between folds. Pass folds that depend on positions alone, such as cv=KFold(5)."
)


@dataclass(frozen=True)
class Cost:
    """What all fits together cost, by basic composition; printed by the disclosure rules.

    fits            number of fits
    fits_of_record  the most fits that one record is in; a record that is twice in one fit counts twice
    total           the epsilon and delta of all fits together, one per record
    notes           what the total does not cover
    """

    fits: int
    fits_of_record: int
    total: Budgets
    notes: tuple[str, ...] = (NOT_COVERED,)

    def __str__(self) -> str:
        head = f"{self.fits:,} fits; one record is in at most {self.fits_of_record:,} of them."
        return "\n".join(
            [head, aligned((["epsilon in all", "delta", "records"], _rows(self.total.groups))), *self.notes]
        )


@dataclass(frozen=True)
class _Fit:
    """One fit: rows of its records in X, what it spends of each, and the folder of its plan if others share it."""

    rows: npt.NDArray[np.int64]
    epsilon: FloatArray
    delta: FloatArray
    folder: PlanFolder | None = None


@dataclass(frozen=True)
class _Data:
    """What splitters and budgets are taken from; all (records,) or None."""

    y: npt.NDArray[Any] | None
    epsilon: Any
    groups: npt.NDArray[Any] | None
    records: int


def total_cost(
    estimator: Any, X: Any, y: Any = None, *, epsilon: Any = None, cv: Any = None, groups: Any = None
) -> Cost:
    """What all fits of a search or of a cross-validation cost together.

    estimator       a PrivateClassifier or PrivateRegressor, a Pipeline that ends in one, or a GridSearchCV or another
                    search over one, fitted or not
    X, y, epsilon   as they are passed to its `fit`
    cv              how cross_validate splits; None for a single `fit`. (cross_validate itself means 5 by None.)
    groups          (records,) as for the splitter

    Fits that share one plan (plan=) cost its budgets once. If splits are random, every record is counted in all of
    them. Raises InputError for another estimator, for a search with several rounds that is not fitted yet, and for more
    fits than a shared plan certifies.

    >>> import numpy as np
    >>> from epsilons.sklearn import PrivateClassifier
    >>> search = GridSearchCV(PrivateClassifier(), {"lr": [0.1, 0.5]}, cv=3)
    >>> cost = total_cost(search, np.zeros((300, 2)), np.arange(300) % 2, epsilon=np.full(300, 0.5))
    >>> cost.fits, cost.fits_of_record, cost.total.epsilons  # 2 candidates · (3 - 1) folds + 1
    (7, 5, array([2.5]))
    """
    records = len(X) if hasattr(X, "__len__") else X.shape[0]
    classes, parts = (None if values is None else np.asarray(values) for values in (y, groups))
    data = _Data(classes, epsilon, parts, records)
    everyone = np.arange(records)
    trains = [everyone] if cv is None else _trains(cv, estimator, data, everyone)
    fits = [one for rows in trains for one in _fits(estimator, data, rows)]
    count = np.zeros(records, dtype=np.int64)
    for one in fits:
        np.add.at(count, one.rows, 1)
    total, delta = _spent(fits, records)
    trained = count > 0
    notes = tuple(dict.fromkeys([NOT_COVERED, *_by_classes(cv, estimator, data), *_fitted_before(estimator)]))
    return Cost(len(fits), int(count.max()), Budgets(total[trained], delta[trained]), notes)


def _spent(fits: list[_Fit], records: int) -> tuple[FloatArray, FloatArray]:
    """(records,) epsilon and delta of all fits together. Raises InputError for fits that a shared plan lacks."""
    total, delta = np.zeros(records), np.zeros(records)
    for one in (one for one in fits if one.folder is None):
        np.add.at(total, one.rows, one.epsilon)
        np.add.at(delta, one.rows, one.delta)
    for path in {one.folder.path for one in fits if one.folder is not None}:
        shared = [one for one in fits if one.folder is not None and one.folder.path == path]
        _check_shared(shared)
        once = np.zeros((2, records))
        for one in shared:
            once[:, one.rows] = one.epsilon, one.delta
        total, delta = total + once[0], delta + once[1]
    return total, delta


def _check_shared(fits: list[_Fit]) -> None:
    """Refuse fits that their shared plan does not certify."""
    assert fits[0].folder is not None
    runs = fits[0].folder.plan.runs
    if len(fits) > runs:
        raise InputError(
            f"There are {len(fits):,} fits, and the shared plan certifies {runs:,} runs. Make a plan with "
            f"runs={len(fits)} before the first of them."
        )
    if any(len(np.unique(one.rows)) < len(one.rows) for one in fits):
        raise InputError("Some fit has a record twice, which a shared plan does not certify. Use folds such as KFold.")


# -- which fits there are ------------------------------------------------------------------------------------------


def _fits(estimator: Any, data: _Data, rows: npt.NDArray[np.int64]) -> Iterator[_Fit]:
    """Every fit that estimator.fit makes on these rows."""
    if isinstance(estimator, Pipeline):
        yield from _fits(estimator.steps[-1][1], data, rows)
    elif isinstance(estimator, _Private):
        yield _fit(estimator, data, rows)
    elif hasattr(estimator, "cv") and hasattr(estimator, "refit") and hasattr(estimator, "estimator"):
        yield from _fits_of_search(estimator, data, rows)
    else:
        raise InputError(
            f"total_cost cannot count the fits of a {type(estimator).__name__}. It knows PrivateClassifier, "
            "PrivateRegressor, pipelines that end in one, and searches such as GridSearchCV."
        )


def _fit(estimator: _Private, data: _Data, rows: npt.NDArray[np.int64]) -> _Fit:
    with warnings.catch_warnings(action="ignore", category=EpsilonsWarning):  # of a large delta: the fit itself warns
        folder = folder_of(estimator.plan)
        budgets = inputs.as_budgets(data.epsilon, estimator.epsilon, delta_of(estimator, folder), data.records)
    return _Fit(rows, budgets.epsilons[budgets.group][rows], budgets.delta[budgets.group][rows], folder)


def _fits_of_search(search: Any, data: _Data, rows: npt.NDArray[np.int64]) -> Iterator[_Fit]:
    candidates = [clone(search.estimator).set_params(**parameters) for parameters in _candidates(search)]
    trains = _trains(search.cv, search.estimator, data, rows)
    for candidate in candidates:
        for train in trains:
            yield from _fits(candidate, data, train)
    if search.refit:
        best = getattr(search, "best_params_", None)
        last = candidates if best is None else [clone(search.estimator).set_params(**best)]
        for same in zip(*(_fits(candidate, data, rows) for candidate in last), strict=True):
            yield _costliest(same)


def _costliest(fits: Iterable[_Fit]) -> _Fit:
    """Of a refit, before it is known which candidate is chosen."""
    several = list(fits)
    epsilon = np.max([one.epsilon for one in several], axis=0)
    return _Fit(several[0].rows, epsilon, np.max([one.delta for one in several], axis=0), several[0].folder)


def _candidates(search: Any) -> list[dict[str, Any]]:
    """The settings that a search tries."""
    if hasattr(search, "cv_results_"):
        return list(search.cv_results_["params"])
    if isinstance(search, GridSearchCV):
        return list(ParameterGrid(search.param_grid))
    if isinstance(search, RandomizedSearchCV):
        return list(ParameterSampler(search.param_distributions, search.n_iter, random_state=search.random_state))
    raise InputError(
        f"Which settings a {type(search).__name__} tries is known only after its fit. Pass the fitted one."
    )


def _trains(cv: Any, estimator: Any, data: _Data, rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """The rows of each training fold; all rows for each, if the splits are random."""
    y, groups = (None if part is None else part[rows] for part in (data.y, data.groups))
    splitter = check_cv(cv, y, classifier=is_classifier(estimator))
    first, second = (_split(splitter, rows, y, groups) for _ in range(2))
    return first if _same(first, second) else [rows] * len(first)


def _split(splitter: Any, rows: npt.NDArray[np.int64], y: Any, groups: Any) -> list[npt.NDArray[np.int64]]:
    return [rows[train] for train, _ in splitter.split(np.zeros((len(rows), 1)), y, groups)]


def _same(first: list[npt.NDArray[np.int64]], second: list[npt.NDArray[np.int64]]) -> bool:
    return len(first) == len(second) and all(map(np.array_equal, first, second))


def _by_classes(cv: Any, estimator: Any, data: _Data) -> Iterator[str]:
    """A note if folds depend on the classes: one record's class then moves other records between folds."""
    if data.y is None:
        return
    used = [(cv, estimator)] if cv is not None else []
    while hasattr(estimator, "estimator") or isinstance(estimator, Pipeline):
        if hasattr(estimator, "cv"):
            used.append((estimator.cv, estimator.estimator))
        estimator = estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator.estimator
    for each, of in used:
        splitter = check_cv(each, data.y, classifier=is_classifier(of))
        if _depends_on_classes(splitter, data):
            yield STRATIFIED.format(type(splitter).__name__)


def _depends_on_classes(splitter: Any, data: _Data) -> bool:
    if "Stratified" in type(splitter).__name__:
        return True
    assert data.y is not None
    rows = np.arange(data.records)
    first, again, other = (_split(splitter, rows, y, data.groups) for y in (data.y, data.y, data.y[::-1]))
    return _same(first, again) and not _same(first, other)


# -- what is printed -----------------------------------------------------------------------------------------------


def _fitted_before(estimator: Any) -> Iterator[str]:
    """What a pipeline fits to the records before the private estimator."""
    while not isinstance(estimator, Pipeline):
        if not hasattr(estimator, "estimator"):
            return
        estimator = estimator.estimator
    for _, step in estimator.steps[:-1]:
        if hasattr(step, "fit") and get_tags(step).requires_fit:
            yield (
                f"Not covered: what {type(step).__name__} learns from the records. Declare bounds= in place of a "
                "fitted scaler, and transform by public constants alone."
            )


def _rows(groups: Groups) -> list[list[str]]:
    return [
        [
            row.label,
            "merged" if row.delta is None else f"{row.delta:.5g}",
            "fewer than 20" if row.records is None else f"{row.records:,}",
        ]
        for row in display_rows(groups, None, release=has_small_cells(groups))
    ]
