"""PrivateClassifier and PrivateRegressor: a linear model or a small network under individualized differential privacy.

Nothing is fitted to the records but the weights of the network, under noise. Scales and classes are constants that the
caller declares; the number of steps depends on the number of records alone.
"""

from __future__ import annotations

import secrets
import warnings
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from ..accounting import ACCOUNTANTS
from ..budgets.budgets import Budgets
from ..core.disclosure import SMALLEST_SHOWN, has_small_cells, how_many
from ..errors import DataError, EpsilonsWarning, InputError
from ..ledger.plan_folder import PlanFolder
from ..planning import Plan, Recipe, plan
from ..training import Training, fit
from ..training.checkpoints import same_generators
from . import inputs
from .inputs import FloatArray, MakeModule

# -- The plan of a fit: one of its own, or one that several fits share, in a folder that counts them

#: Arguments of an estimator that a shared plan determines.
PLANNED = ("delta", "strategy", "accountant", "epochs", "batch_size", "clip_norm")

AGAIN = (
    "Some of these rows were in an earlier fit of this process: epsilon_spent_ adds up all. See total_cost and plan=."
)
COPIES = (
    "Many rows of this fit are equal. If they are copies of records, they spend more than is shown: bootstrap=False."
)
OF_ONE_FIT = (
    "This is the guarantee of one fit. A search or a cross-validation fits several times, and each fit spends the "
    "budgets of its records again (epsilons.sklearn.total_cost). Scores on private records are not covered, nor is a "
    "choice by such scores, as GridSearchCV makes it."
)
OF_ALL_FITS = (
    "Every fit with the plan's folder is one of its runs, those on folds too. Scores on private records are not "
    "covered, nor is a choice by such scores, as GridSearchCV makes it, nor are folds that depend on the classes."
)


def planned(estimator: BaseEstimator, epsilon: Any, records: int) -> tuple[Plan | PlanFolder, Budgets]:
    """The plan of a fit on so many records, or the folder of the shared plan, and the records' budgets."""
    folder = folder_of(estimator.plan)
    if folder is not None:
        _check_unplanned(estimator)
    budgets = inputs.as_budgets(epsilon, estimator.epsilon, delta_of(estimator, folder), records)
    if folder is not None:
        return folder, budgets
    batch = min(estimator.batch_size, records)
    steps = max(1, int(np.ceil(estimator.epochs * records / batch)))
    recipe = Recipe(steps, batch, estimator.clip_norm)
    return plan(budgets, recipe, estimator.strategy, estimator.accountant), budgets


def folder_of(given: object) -> PlanFolder | None:
    """The folder of a shared plan, from itself or its path; None for None. Raises InputError."""
    if given is None or isinstance(given, PlanFolder):
        return given
    if isinstance(given, str | Path):
        return PlanFolder(given)
    raise InputError(
        f"plan= takes an epsilons.PlanFolder or its path, because the folder counts the fits; got a "
        f"{type(given).__name__}. For a plan: epsilons.PlanFolder.create(path, plan)."
    )


def delta_of(estimator: BaseEstimator, folder: PlanFolder | None) -> float:
    """The delta of budgets that are given as epsilons: that of the shared plan, if it has only one."""
    if folder is None:
        return float(estimator.delta)
    deltas = np.unique(folder.plan.delta)
    if len(deltas) > 1:
        raise InputError(
            f"The shared plan has {len(deltas):,} different deltas, and fit takes one epsilon per record. Make a plan "
            "with one delta."
        )
    return float(deltas[0])


def _check_unplanned(estimator: BaseEstimator) -> None:
    """Raise InputError for arguments that would have no effect beside a shared plan."""
    given = [name for name in PLANNED if getattr(estimator, name) != getattr(type(estimator), name)]
    if given:
        raise InputError(
            f"The shared plan= determines {', '.join(PLANNED)}: leave out {', '.join(given)}, or make a plan with them."
        )


def without_budgets(given: object) -> object:
    """A shared plan for a pickle: its folder's path, if the plan can be loaded from there."""
    is_known = isinstance(given, PlanFolder) and given.plan.accountant in ACCOUNTANTS
    return str(given.path) if is_known and isinstance(given, PlanFolder) else given


# -- PrivateClassifier and PrivateRegressor: a linear model or a small network under individualized differential
# privacy

FEW_CLASSES = "{} needs at least 2 classes, got {}. Declare all classes that there can be: classes=…"
CLASSES_READ = (
    "The list of classes was read off the records, and the guarantee does not cover it: that a rare class is in the "
    "list shows that somebody has it. Declare all classes that there can be: classes=…"
)


@dataclass(eq=False, repr=False)
class _Private(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What both estimators share: settings, planning, training, and what is known after it."""

    #: `fit` requests epsilon wherever metadata is routed; set_fit_request changes it.
    __metadata_request__fit = {"epsilon": True}  # noqa: RUF012  # scikit-learn reads it from the class

    epsilon: float | None = None
    _: KW_ONLY
    delta: float = 1e-5
    strategy: str = "scale"
    accountant: str = "pld"
    epochs: float = 20
    batch_size: float = 256
    lr: float = 0.5
    clip_norm: float = 1.0
    hidden: tuple[int, ...] = ()
    module: MakeModule | None = None
    bounds: Any = None
    plan: PlanFolder | str | Path | None = None
    random_state: Any = None

    # -- training ----------------------------------------------------------------------------------

    def _train(
        self, X: npt.NDArray[Any], targets: Tensor, outputs: int, loss: str, epsilon: Any, notes: list[str]
    ) -> None:
        """Plan and train; X has been validated, and the targets are codes or numbers."""
        inputs.check_positive(delta=self.delta, epochs=self.epochs, batch_size=self.batch_size, lr=self.lr)
        given, budgets = planned(self, epsilon, len(X))
        seed = inputs.as_seed(self.random_state)
        columns = self._scaled(X), targets
        with same_generators():
            torch.manual_seed(secrets.randbits(63) if seed is None else seed)
            module = inputs.build(self.module, self.hidden, X.shape[1], outputs)
            run = fit(
                module,
                columns,
                given.for_subset() if isinstance(given, PlanFolder) else given,  # a fold, or all of the records
                budgets=budgets,
                training=Training(loss, lr=self.lr, device="cpu", progress=False),
                seed=seed,
            )
        module.zero_grad(set_to_none=True)
        self.module_ = module.eval()
        self.plan_ = run.plan
        self.n_iter_ = sum(run.charged)
        self.epsilon_spent_, self.delta_spent_ = self._spent(X, run.plan, budgets, given)
        said = run.plan.guarantee_of_run("chacha20" if seed is None else "seeded")
        self.guarantee_ = "\n".join([said, OF_ALL_FITS if isinstance(given, PlanFolder) else OF_ONE_FIT, *notes])

    def _spent(self, X: npt.NDArray[Any], made: Plan, budgets: Budgets, given: Plan | PlanFolder) -> FloatArray:
        """(2, groups) epsilon and delta of all fits on these rows; (2, 0) if fewer than 20 records share them."""
        folder = given.path if isinstance(given, PlanFolder) else None
        levels = np.arange(len(made.groups)) if folder is None else np.searchsorted(made.epsilons, budgets.epsilons)
        group, spent = levels[budgets.group], np.stack([made.epsilon_spent(), made.delta], axis=1)
        rows = inputs.fingerprints(X)
        before = inputs.spent_before(rows, spent[group], folder)
        for text, is_due in ((AGAIN, before.any()), (COPIES, len(set(rows)) < 0.8 * len(rows))):
            if is_due:
                warnings.warn(text, EpsilonsWarning, stacklevel=4)
        counts = np.unique(np.column_stack([group, before]), axis=0, return_counts=True)[1]
        np.maximum.at(spent, group, before + spent[group])
        return spent.T[:, :0] if has_small_cells(made.groups) or counts.min() < SMALLEST_SHOWN else spent.T

    def _validated(self, X: Any, y: Any = "no_validation", **options: Any) -> Any:
        # Values outside the bounds may be too large for 32 bits, and are clipped before they are converted.
        dtype = np.float32 if self.bounds is None else np.float64
        with np.errstate(over="ignore"):  # an infinity is refused
            return validate_data(self, X, y, dtype=dtype, **options)

    def _scaled(self, X: npt.NDArray[Any]) -> Tensor:
        """(records, features) what the module is given."""
        if self.bounds is not None:
            X = inputs.scaled(X, *inputs.check_bounds(self.bounds, "bounds", X.shape[1]))
        return torch.from_numpy(np.array(X, dtype=np.float32, order="C"))

    # -- after training ----------------------------------------------------------------------------

    def _outputs(self, X: Any) -> npt.NDArray[np.float64]:
        """(records, outputs) of the module, in 64 bits."""
        check_is_fitted(self)
        result: npt.NDArray[np.float64] = inputs.forward(
            self.module_, self._scaled(self._validated(X, reset=False))
        ).numpy()
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Without `plan_` if fewer than 20 records hold some budget: a pickle is often passed on."""
        state = dict(super().__getstate__())
        state["plan"] = without_budgets(state["plan"])
        if "plan_" in state and has_small_cells(state["plan_"].groups):
            del state["plan_"]
        return state

    def _get_fitted_attr_html(self, doc_link: str = "") -> Any:
        """What scikit-learn's HTML shows of a fitted estimator: nothing about budgets."""
        attributes = super()._get_fitted_attr_html(doc_link)
        for name in ("epsilon_spent_", "delta_spent_", "guarantee_", "plan_"):
            attributes.pop(name, None)
        return attributes


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateClassifier(ClassifierMixin, _Private):  # type: ignore[misc]
    """A classifier, linear or a small network, of which every record keeps its own epsilon.

    epsilon       one number for all records, where `fit` is not given epsilon=; without both, `fit` is refused
    delta         one probability for all records
    strategy      name of a strategy of epsilons.plan
    accountant    name of an accountant, "pld" or "rdp"
    epochs        how often a record is drawn on average; steps = epochs · records / batch_size, rounded up
    batch_size    expected records per step; all records if there are fewer
    lr            learning rate of SGD
    clip_norm     mean of the clip norms, an L2 norm in gradient units
    hidden        widths of hidden layers with Tanh; () is a linear model
    module        (features, classes) -> a new torch module, in place of `hidden`
    bounds        (low, high) of the inputs, numbers or (features,) each: values are clipped to them and mapped to
                  [-1, 1]. Constants that you declare without looking at the records, in place of a scaler; a
                  StandardScaler before the estimator is fitted on private records, and is not covered
    plan          an epsilons.PlanFolder, or its path, that all fits of a search share, those on folds too: together
                  they spend the budgets once. Its plan determines delta, strategy, accountant, epochs, batch_size and
                  clip_norm
    classes       all classes that there can be. None reads them off y with a warning: the list is then not covered
    random_state  None: the noise depends on a secret key. A seed makes a fit repeatable, and gives no guarantee to a
                  person who knows it

    After `fit`: classes_, module_, n_features_in_, n_iter_ (steps); plan_, the internal numbers (a pickle lacks it if
    fewer than 20 records hold some budget); epsilon_spent_ and delta_spent_, (groups,) as in plan_, the sums of all
    fits of this process that had the same rows (for each group the largest of a record), empty if fewer than 20 records
    share a budget or a sum; guarantee_, in words.

    A search or a cross-validation trains several times. Each fit spends the budgets of its records again, which a
    warning says, unless all share one `plan`: `total_cost` computes the total beforehand. A choice by scores on private
    records, as GridSearchCV makes it, is not covered.

    >>> import numpy as np
    >>> X, y = np.arange(400.0).reshape(200, 2), np.arange(200) // 100
    >>> epsilon = np.where(np.arange(200) % 2, 1.0, 3.0)  # one per record
    >>> classifier = PrivateClassifier(bounds=(0, 400), classes=[0, 1], epochs=2, batch_size=50, accountant="rdp")
    >>> bool((classifier.fit(X, y, epsilon=epsilon).epsilon_spent_ <= [1.0, 3.0]).all())
    True
    >>> classifier.predict_proba(X[:5]).shape
    (5, 2)
    """

    classes: Any = None

    def fit(self, X: Any, y: Any, *, epsilon: Any = None, **unknown: Any) -> Self:
        """Train on records X (records, features) with classes y (records,).

        epsilon   one number for all, one per record (searches and folds select it along with X), or Budgets

        Raises ValueError for data that scikit-learn refuses, DataError for classes that are not declared, BudgetError
        for budgets that cannot be used, InputError for settings, and what epsilons.plan and epsilons.fit raise.
        """
        inputs.refuse_arguments(unknown)
        inputs.check_index(epsilon, X, y)
        X, y = self._validated(X, y)
        check_classification_targets(y)
        classes = np.unique(y) if self.classes is None else _declared(self.classes)
        if len(classes) < 2:
            got = "1 class" if len(classes) else "none"
            raise DataError(FEW_CLASSES.format(type(self).__name__, got))
        codes = _codes(y, classes)
        notes = [CLASSES_READ] if self.classes is None else []
        for note in notes:
            warnings.warn(note, EpsilonsWarning, stacklevel=2)
        self._train(X, torch.from_numpy(codes), len(classes), "cross_entropy", epsilon, notes)
        self.classes_ = classes
        return self

    def decision_function(self, X: Any) -> npt.NDArray[np.float64]:
        """(records, classes) the scores of the classes; with two classes (records,), positive for the second."""
        scores = self._outputs(X)
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:
        """(records, classes) the probabilities of the classes."""
        probabilities: npt.NDArray[np.float64] = torch.from_numpy(self._outputs(X)).softmax(1).numpy()
        return probabilities

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """(records,) the most probable classes."""
        most = self._outputs(X).argmax(1)
        return np.asarray(self.classes_[most])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # on the few dozen records of scikit-learn's own checks
        return tags


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateRegressor(RegressorMixin, _Private):  # type: ignore[misc]
    """A regressor, linear or a small network, of which every record keeps its own epsilon.

    target_bounds  (low, high) of the targets: targets are clipped to them and mapped to [-1, 1], and predictions are
                   mapped back. Constants that you declare without looking at the records. None uses the targets as they
                   are; targets far from 0 are then hardly learnt

    All other arguments and the attributes after `fit` are those of PrivateClassifier, except the classes. The loss is
    the squared error.

    >>> import numpy as np
    >>> X = np.arange(0, 200, 0.5).reshape(200, 2)
    >>> regressor = PrivateRegressor(bounds=(0, 200), target_bounds=(0, 20), epochs=2, batch_size=50, accountant="rdp")
    >>> regressor.fit(X, X[:, 0] / 10, epsilon=3.0).predict(X[:5]).shape
    (5,)
    """

    lr: float = 0.1
    target_bounds: Any = None

    def fit(self, X: Any, y: Any, *, epsilon: Any = None, **unknown: Any) -> Self:
        """Train on records X (records, features) with targets y (records,).

        epsilon   one number for all, one per record (searches and folds select it along with X), or Budgets

        Raises ValueError for data that scikit-learn refuses, BudgetError for budgets that cannot be used, InputError
        for settings, and what epsilons.plan and epsilons.fit raise.
        """
        inputs.refuse_arguments(unknown)
        inputs.check_index(epsilon, X, y)
        X, y = self._validated(X, y, y_numeric=True)
        if self.target_bounds is not None:
            y = inputs.scaled(y, *inputs.check_bounds(self.target_bounds, "target_bounds"))
        with np.errstate(over="ignore"):
            targets = torch.from_numpy(np.array(y, dtype=np.float32))
        if not bool(torch.isfinite(targets).all()):
            raise DataError("Some targets are too large for 32 bits. Declare target_bounds=(low, high).")
        self._train(X, targets, 1, "mse", epsilon, [])
        return self

    def predict(self, X: Any) -> npt.NDArray[np.float64]:
        """(records,) the predictions, in the unit of the targets."""
        predicted = self._outputs(X)[:, 0]
        if self.target_bounds is None:
            return predicted
        low, high = inputs.check_bounds(self.target_bounds, "target_bounds")
        return np.asarray(low + (predicted + 1) * (high / 2 - low / 2), dtype=np.float64)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags


def _declared(classes: Any) -> npt.NDArray[Any]:
    """(classes,) sorted. Raises InputError."""
    try:
        declared = np.asarray(list(classes))
        if declared.ndim == 1:
            return np.unique(declared)
    except (TypeError, ValueError):
        pass
    raise InputError("classes must be a flat list of all classes, of one type.")


def _codes(y: npt.NDArray[Any], classes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """(records,) the index of each record's class. Raises DataError for a class that is not declared."""
    try:
        codes = np.searchsorted(classes, y)
        unknown = classes[np.minimum(codes, len(classes) - 1)] != y
    except TypeError:  # numbers and texts
        codes, unknown = np.zeros(len(y), dtype=np.int64), np.ones(len(y), dtype=bool)
    count = int(np.sum(unknown))
    if count:
        raise DataError(
            f"{how_many(count, len(y))} records have a class that classes= does not declare. Declare all classes that "
            "there can be, of the type of y."
        )
    return np.asarray(codes, dtype=np.int64)
