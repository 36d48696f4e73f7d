"""The estimators for scikit-learn: its own checks, our own loop, searches and what they cost, what is refused."""

from __future__ import annotations

import pickle
import re
import struct
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

import epsilons
from epsilons.errors import BudgetError, EpsilonsError, EpsilonsWarning, InputError, ModelError

torch = pytest.importorskip("torch")
sklearn = pytest.importorskip("sklearn")

from sklearn.base import clone  # noqa: E402
from sklearn.calibration import CalibratedClassifierCV  # noqa: E402
from sklearn.ensemble import BaggingClassifier, VotingClassifier  # noqa: E402
from sklearn.model_selection import (  # noqa: E402
    GridSearchCV,
    KFold,
    RandomizedSearchCV,
    ShuffleSplit,
    StratifiedKFold,
    cross_val_score,
    cross_validate,
)
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import FunctionTransformer, StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from epsilons.sklearn import PrivateClassifier, PrivateRegressor, inputs, total_cost  # noqa: E402

RECORDS, STRICT, LOOSE = 240, 0.5, 2.0
FAST = {"epochs": 2, "batch_size": 60, "accountant": "rdp"}
#: These checks need packages that the tests do not install, or a setting of scipy.
SKIPPED = {"check_array_api_input", "check_classifier_data_not_an_array", "check_regressor_data_not_an_array"}


def made_up(records: int = RECORDS, seed: int = 0):
    """X (records, 3) in [-4, 4], y (records,) of two classes, epsilon (records,): every third record is strict."""
    generator = np.random.default_rng(seed)
    X = generator.uniform(-4, 4, (records, 3))
    return X, (X[:, 0] + X[:, 1] > 0).astype(int), np.where(np.arange(records) % 3, LOOSE, STRICT)


def classifier(**options) -> PrivateClassifier:
    return PrivateClassifier(**FAST | {"bounds": (-4, 4), "classes": (0, 1)} | options)


#: Most tests fit the same rows several times.
pytestmark = pytest.mark.filterwarnings("ignore:Some of these rows were in an earlier fit")


@pytest.fixture(autouse=True)
def _as_imported(monkeypatch):
    """A page of the documentation may have switched routing on in this process, and fitted the same rows."""
    monkeypatch.setattr(inputs, "SPENT", {})
    with sklearn.config_context(enable_metadata_routing=False):
        yield


@pytest.fixture
def routing(_as_imported):
    with sklearn.config_context(enable_metadata_routing=True):
        yield


# -- what scikit-learn expects ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PrivateClassifier, PrivateRegressor])
def test_scikit_learn_s_own_checks_pass_without_a_failure(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes= is not declared, and more of scikit-learn's own
        results = check_estimator(kind(1.0, epochs=2, accountant="rdp"), on_fail=None, on_skip=None)
    assert Counter(result["status"] for result in results)["passed"] >= 49
    assert {result["check_name"] for result in results if result["status"] != "passed"} <= SKIPPED


def test_an_estimator_trains_as_fit_does_with_the_same_seed():
    X, y, epsilon = made_up()
    fitted = classifier(random_state=3, hidden=(4,)).fit(X, y, epsilon=epsilon)
    seed = int(np.random.RandomState(3).randint(2**31))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    budgets = epsilons.Budgets(epsilon)
    plan = epsilons.plan(budgets, epsilons.Recipe(8, 60, 1.0), "scale", "rdp")  # 2 epochs of 240 records by 60
    columns = torch.from_numpy(X / 4).float(), torch.from_numpy(y)
    epsilons.fit(model, columns, plan, budgets=budgets, training=epsilons.Training(lr=0.5, device="cpu"), seed=seed)
    for mine, theirs in zip(fitted.module_.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_what_is_learnt_is_better_than_a_guess():
    X, y, _ = made_up(1000)
    assert classifier(epochs=5, random_state=0).fit(X, y, epsilon=3.0).score(X, y) > 0.85
    regressor = PrivateRegressor(**FAST | {"epochs": 10}, bounds=(-4, 4), target_bounds=(90, 110), random_state=0)
    assert regressor.fit(X, 100 + X[:, 0], epsilon=3.0).score(X, 100 + X[:, 0]) > 0.7


def test_scores_probabilities_and_classes_agree():
    X, _, _ = made_up()
    names = np.array(["no", "perhaps", "yes"])
    fitted = classifier(classes=("yes", "no", "perhaps")).fit(X, names[np.digitize(X[:, 0], [-1, 1])], epsilon=3.0)
    assert fitted.classes_.tolist() == names.tolist()
    assert (fitted.predict(X) == names[fitted.decision_function(X).argmax(1)]).all()
    np.testing.assert_allclose(fitted.predict_proba(X).sum(1), 1)
    two = classifier().fit(X, (X[:, 0] > 0).astype(int), epsilon=3.0)
    assert ((two.decision_function(X) > 0) == two.predict(X)).all()


def test_a_seed_repeats_a_fit_and_without_one_no_two_are_equal():
    X, y, epsilon = made_up()
    before = torch.get_rng_state()

    def weights(**options) -> list[float]:
        return classifier(**options).fit(X, y, epsilon=epsilon).module_[0].weight.flatten().tolist()

    assert weights(random_state=0) == weights(random_state=0)
    assert weights() != weights()
    assert torch.equal(torch.get_rng_state(), before)  # of the caller


def test_there_is_no_way_to_go_on_training_a_fitted_estimator():
    assert not hasattr(PrivateClassifier, "partial_fit")
    assert "warm_start" not in PrivateClassifier().get_params()
    assert "sample_weight" not in str(classifier().get_metadata_routing().fit)


# -- budgets reach their records -------------------------------------------------------------------------------------


def test_every_fold_of_a_pipeline_is_planned_for_its_own_records(routing):
    X, y, epsilon = made_up(200)
    pipe = make_pipeline(FunctionTransformer(), classifier())
    done = cross_validate(pipe, X, y, cv=KFold(3), params={"epsilon": epsilon}, return_estimator=True)
    for estimator, (train, _) in zip(done["estimator"], KFold(3).split(X), strict=True):
        plan = estimator[-1].plan_
        assert plan.epsilons.tolist() == [STRICT, LOOSE]
        assert plan.counts.tolist() == [(epsilon[train] == level).sum() for level in (STRICT, LOOSE)]
    assert {tuple(estimator[-1].plan_.counts) for estimator in done["estimator"]} != {(66, 133)}


@pytest.mark.parametrize("is_routed", [True, False])
def test_a_search_gives_each_fit_the_budgets_of_its_records(is_routed):
    X, y, epsilon = made_up()
    with sklearn.config_context(enable_metadata_routing=is_routed):
        search = GridSearchCV(classifier(), {"lr": [0.1, 1.0]}, cv=KFold(3), error_score="raise")
        best = search.fit(X, y, epsilon=epsilon).best_estimator_
    assert best.plan_.counts.tolist() == [80, 160]
    assert best.n_iter_ == best.plan_.steps == 8


def test_budgets_are_not_forgotten_where_metadata_is_routed_and_not_requested(routing):
    X, y, epsilon = made_up()
    pipe = make_pipeline(FunctionTransformer(), classifier().set_fit_request(epsilon=None))
    with pytest.raises(sklearn.exceptions.UnsetMetadataPassedError):
        pipe.fit(X, y, epsilon=epsilon)


def test_one_number_budgets_and_the_estimator_s_own_epsilon_are_all_accepted():
    X, y, epsilon = made_up()
    assert classifier(epsilon=0.7).fit(X, y).plan_.epsilons.tolist() == [0.7]
    assert classifier(epsilon=0.7).fit(X, y, epsilon=0.4).plan_.epsilons.tolist() == [0.4]
    assert classifier().fit(X, y, epsilon=list(epsilon)).plan_.epsilons.tolist() == [STRICT, LOOSE]
    budgets = epsilons.Budgets(epsilon, np.where(epsilon == STRICT, 1e-6, 1e-5))
    assert classifier().fit(X, y, epsilon=budgets).plan_.delta.tolist() == [1e-6, 1e-5]


class Noting(PrivateClassifier):
    """Notes whether every fit gets the budgets of its own records, and learns nothing."""

    fits: list[bool]

    def fit(self, X, y, *, epsilon=None):
        rows = [int(np.flatnonzero((row == X0).all(1))[0]) for row in X]
        type(self).fits.append(np.array_equal(E0[rows], epsilon))
        self.classes_ = np.array([0, 1])
        return self

    def _outputs(self, X):
        return np.zeros((len(X), 2))


#: Tool -> (fit of it with an estimator and a keyword argument or none, number of fits).
TOOLS = {
    "search": (lambda e, **more: GridSearchCV(e, GRID, cv=KFold(3), error_score="raise").fit(X0, Y0, **more), 7),
    "scores": (lambda e, **more: cross_val_score(e, X0, Y0, cv=KFold(3), params=more, error_score="raise"), 3),
    "bagging": (lambda e, **more: BaggingClassifier(e, 4, max_samples=0.5, bootstrap=False).fit(X0, Y0, **more), 4),
    "calibration": (lambda e, **more: CalibratedClassifierCV(e, cv=KFold(3)).fit(X0, Y0, **more), 3),
    "voting": (lambda e, **more: VotingClassifier([("one", e), ("two", e)]).fit(X0, Y0, **more), 2),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_give_every_fit_the_budgets_of_its_records_and_none_trains_without_budgets(tool, routing):
    run, fits = TOOLS[tool]
    Noting.fits = []
    run(Noting(), epsilon=E0)
    assert Noting.fits == [True] * fits
    with pytest.raises(BudgetError, match="fit needs budgets"):
        run(classifier())


class Frame:
    """As much of a pandas object as the check of the index reads."""

    def __init__(self, index, values) -> None:
        self.index, self.values, self.iloc = np.asarray(index), np.asarray(values), None
        self.shape = self.values.shape

    def __array__(self, dtype=None, copy=None):
        return self.values.astype(dtype or self.values.dtype)

    def __len__(self) -> int:
        return len(self.values)


def test_budgets_in_another_order_than_the_inputs_are_refused_if_an_index_shows_it():
    X, y, epsilon = made_up()
    rows = np.arange(RECORDS)
    classifier().fit(Frame(rows, X), y, epsilon=Frame(rows, epsilon))
    with pytest.raises(BudgetError, match="different indices"):
        classifier().fit(Frame(rows, X), y, epsilon=Frame(rows[::-1], epsilon))
    with pytest.raises(BudgetError, match="epsilon and y have different indices"):
        classifier().fit(X, Frame(rows, y), epsilon=Frame(rows[1:], epsilon[1:]))


# -- what is learnt outside the mechanism: nothing ---------------------------------------------------------------------


def test_all_that_is_fitted_but_the_weights_is_the_same_for_other_records():
    X, y, epsilon = made_up()
    other, never = np.random.default_rng(1).uniform(-4, 1, X.shape), np.arange(RECORDS) % 2

    def known(X, y) -> dict[str, object]:
        fitted = classifier(classes=(0, 1, 2)).fit(X, y, epsilon=epsilon)
        shapes = [parameter.shape for parameter in fitted.module_.parameters()]
        rest = {name: value for name, value in vars(fitted).items() if name not in ("module_", "plan_", "classes_")}
        rest |= {name: rest[name].tolist() for name in ("epsilon_spent_", "delta_spent_")}
        return rest | {"shapes": shapes, "digest": fitted.plan_.digest, "classes": fitted.classes_.tolist()}

    assert known(X, y) == known(other, never)


def test_bounds_are_constants_and_clip_whatever_lies_outside():
    X, y, _ = made_up()
    fitted = classifier(bounds=(-4, 4)).fit(np.concatenate([X, [[1e300, -1e300, 0]]]), [*y, 1], epsilon=3.0)
    far, edge = np.array([[1e300, -5, 0]]), np.array([[4, -4, 0]])
    assert (fitted.decision_function(far) == fitted.decision_function(edge)).all()
    own = classifier(bounds=([-4, -4, 0], [4, 4, 1e-3])).fit(X, y, epsilon=3.0)
    assert (own.decision_function([[0, 0, 5.0]]) == own.decision_function([[0, 0, 1e-3]])).all()


def test_targets_outside_their_bounds_are_clipped_and_predictions_are_mapped_back():
    X, _, _ = made_up()
    options = FAST | {"bounds": (-4, 4), "target_bounds": (10, 30), "random_state": 0}
    far, edge = (np.where(X[:, 0] > 0, high, 10.0) for high in (1e30, 30.0))
    predicted = [PrivateRegressor(**options).fit(X, y, epsilon=3.0).predict(X) for y in (far, edge)]
    assert (predicted[0] == predicted[1]).all()
    fitted = PrivateRegressor(**options).fit(X, edge, epsilon=3.0)
    with torch.no_grad():
        fitted.module_[0].weight.zero_()
        fitted.module_[0].bias.fill_(-0.5)  # a quarter of the way from -1 to 1
    assert fitted.predict(X[:2]).tolist() == [15, 15]


def test_a_list_of_classes_read_off_the_records_is_said():
    X, y, _ = made_up()
    with pytest.warns(EpsilonsWarning, match="read off the records"):
        fitted = classifier(classes=None).fit(X, y, epsilon=3.0)
    assert "read off the records" in fitted.guarantee_
    assert "read off the records" not in classifier().fit(X, y, epsilon=3.0).guarantee_


def test_the_guarantee_says_what_a_search_and_a_seed_do_not_keep():
    X, y, _ = made_up()
    said = classifier(random_state=0).fit(X, y, epsilon=3.0).guarantee_
    assert "no guarantee towards anyone who knows the seed" in said
    assert "a choice by such scores, as GridSearchCV makes it" in said
    assert "secret 256-bit key" in classifier().fit(X, y, epsilon=3.0).guarantee_


# -- what is shown -----------------------------------------------------------------------------------------------------

ALONE = 0.7123


def fitted_with_one_person_alone() -> PrivateClassifier:
    X, y, epsilon = made_up()
    epsilon[5] = ALONE
    return classifier().fit(X, y, epsilon=epsilon)


def test_the_budget_of_one_person_is_in_no_repr_no_page_and_no_pickle():
    fitted = fitted_with_one_person_alone()
    assert fitted.plan_.epsilons.tolist() == [STRICT, ALONE, LOOSE]  # internal, while the process runs
    for shown in (repr(fitted), fitted._repr_html_(), fitted.guarantee_, repr(fitted.plan_)):
        assert "0.71" not in shown
    assert fitted.epsilon_spent_.size == 0
    spent = fitted.plan_.epsilon_spent()
    stored = pickle.dumps(fitted)
    assert not any(struct.pack("<d", value) in stored for value in [ALONE, *spent, *fitted.plan_.noise_multiplier])


def test_a_page_of_a_fitted_estimator_shows_no_budgets_of_groups():
    X, y, epsilon = made_up()
    fitted = classifier().fit(X, y, epsilon=epsilon * 1.117)
    assert (fitted.epsilon_spent_ <= [STRICT * 1.117, LOOSE * 1.117]).all()
    page = fitted._repr_html_()
    assert "Fitted attributes" in page
    assert not re.search(r"epsilon_spent_|plan_|guarantee_|0\.55|2\.23", page)


def test_a_pickle_predicts_the_same_and_a_clone_has_the_same_settings():
    X, y, epsilon = made_up()
    fitted = classifier(hidden=(3,)).fit(X, y, epsilon=epsilon)
    again = pickle.loads(pickle.dumps(fitted))
    assert (again.decision_function(X) == fitted.decision_function(X)).all()
    assert again.plan_ == fitted.plan_  # 80 and 160 records
    assert clone(fitted).get_params() == fitted.get_params()
    assert not hasattr(clone(fitted), "module_")


# -- what is refused ---------------------------------------------------------------------------------------------------

X0, Y0, E0 = made_up()


def with_nan(values, what=np.nan):
    values = np.array(values, dtype=float)
    values.flat[3] = what
    return values


def with_batch_norm(features: int, classes: int):
    return torch.nn.Sequential(torch.nn.BatchNorm1d(features), torch.nn.Linear(features, classes))


@pytest.mark.parametrize(
    ("error", "message", "options", "arguments"),
    [
        (TypeError, "sample_weight is not supported", {}, {"sample_weight": np.ones(RECORDS)}),
        (InputError, "takes X, y and epsilon=, got 'epsilons'", {}, {"epsilons": E0}),
        (TypeError, "takes no person=. Persons with several rows", {}, {"person": np.arange(RECORDS) // 2}),
        (BudgetError, "got Budgets of persons", {}, {"epsilon": epsilons.Budgets.by_person(E0, range(RECORDS))}),
        (BudgetError, "flat list", {}, {"epsilon": E0[:, None]}),
        (BudgetError, "got 239 for 240 records", {}, {"epsilon": E0[1:]}),
        (BudgetError, "not positive, finite", {}, {"epsilon": with_nan(E0)}),
        (BudgetError, "not positive, finite", {}, {"epsilon": 0}),
        (BudgetError, "not all numbers", {}, {"epsilon": ["high"] * RECORDS}),
        (BudgetError, "flat list", {}, {"epsilon": True}),
        (BudgetError, "masked", {}, {"epsilon": np.ma.masked_array(E0, np.arange(RECORDS) == 3)}),
        (BudgetError, "not all numbers", {}, {"epsilon": [[1.0], [2.0, 3.0]]}),
        (InputError, "batch_size must be a positive, finite number, got 0", {"batch_size": 0}, {}),
        (InputError, "batch_size must be .* got a str", {"batch_size": "8"}, {}),
        (InputError, "epochs must be a positive, finite number, got nan", {"epochs": np.nan}, {}),
        (InputError, "lr must be a positive, finite number, got -1", {"lr": -1}, {}),
        (InputError, "delta must be .* got a list", {"delta": [1e-5] * RECORDS}, {}),
        (ValueError, "at least 2 classes, got none", {"classes": []}, {}),
        (BudgetError, "one number for all records, got a list", {"epsilon": [1.0] * RECORDS}, {}),
        (BudgetError, "one number for all records, got a str", {"epsilon": "1"}, {}),
        (BudgetError, r"got a NoneType. A search passes on fit\(X, y, epsilon=…\)", {"epsilon": None}, {}),
        (BudgetError, "delta must be between", {"delta": 1e-12}, {}),
        (InputError, "delta must be a positive", {"delta": 0.0}, {}),
        (ValueError, "NaN", {}, {"X": with_nan(X0)}),
        (ValueError, "infinity", {}, {"X": with_nan(X0, np.inf)}),
        (ValueError, "infinity", {"bounds": None}, {"X": with_nan(X0, 1e300)}),
        (ValueError, "convert string to float", {}, {"X": np.full(X0.shape, "old")}),
        (TypeError, "[Ss]parse", {}, {"X": scipy.sparse.csr_array(X0)}),
        (ValueError, "inconsistent numbers of samples", {}, {"y": Y0[1:]}),
        (ValueError, r"\(240, 2\)", {}, {"y": np.stack([Y0, Y0], axis=1)}),
        (ValueError, "NaN", {}, {"y": with_nan(Y0)}),
        (ValueError, "continuous", {}, {"y": X0[:, 0]}),
        (ValueError, "at least 2 classes", {"classes": [0]}, {"y": 0 * Y0}),
        (EpsilonsError, "one class", {}, {"y": 0 * Y0}),
        (ValueError, "Fewer than 20 records have a class", {}, {"y": [7, *Y0[1:]]}),
        (ValueError, "240 of 240 records have a class", {}, {"y": Y0.astype(str)}),
        (InputError, "flat list of all classes", {"classes": 2}, {}),
        (InputError, r"a pair \(low, high\)", {"bounds": 4}, {}),
        (InputError, "low below high", {"bounds": (4, 4)}, {}),
        (InputError, "low below high", {"bounds": (0, np.inf)}, {}),
        (InputError, "each of the 3 features", {"bounds": ([0, 0], [1, 1])}, {}),
        (InputError, "positive widths", {"hidden": 8}, {}),
        (InputError, "positive widths", {"hidden": (8, 0)}, {}),
        (InputError, "got a Linear", {"module": torch.nn.Linear(3, 2)}, {}),
        (InputError, "must return a torch module", {"module": lambda f, c: None}, {}),
        (InputError, "Leave one out", {"module": torch.nn.Linear, "hidden": (3,)}, {}),
        (ModelError, r"got shape \(2, 3\)", {"module": lambda f, c: torch.nn.Linear(f, c + 1)}, {}),
        (ModelError, "BatchNorm", {"module": with_batch_norm}, {}),
        (EpsilonsError, "No strategy is called", {"strategy": "magic"}, {}),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_in_words(error, message, options, arguments):
    arguments = {"X": X0, "y": Y0, "epsilon": E0} | (arguments if "epsilon" not in options else {"epsilon": None})
    with pytest.raises(error, match=message) as raised:
        classifier(**options).fit(**arguments)
    assert not hasattr(classifier(**options), "module_")
    assert not re.search(r"\b0\.5\b|\b2\.0\b", str(raised.value))  # no budget


def test_weights_in_the_place_where_scikit_learn_has_them_are_not_taken_for_budgets():
    with pytest.raises(TypeError, match="positional"):
        classifier().fit(X0, Y0, np.ones(RECORDS))


def test_targets_that_are_too_large_for_the_loss_are_refused():
    with pytest.raises(ValueError, match="Declare target_bounds"):
        PrivateRegressor(**FAST).fit(X0, np.full(RECORDS, 1e300), epsilon=1.0)
    with pytest.raises(ValueError, match=r"\(240, 2\)"):
        PrivateRegressor(**FAST).fit(X0, np.stack([Y0, Y0], axis=1), epsilon=1.0)


# -- one plan for all fits of a search -------------------------------------------------------------------------------


def shared_plan(tmp_path, epsilon=E0, runs: int = 7) -> epsilons.PlanFolder:
    plan = epsilons.plan(epsilons.Budgets(epsilon), epsilons.Recipe(4, 60, 1.0), accountant="rdp", runs=runs)
    return epsilons.PlanFolder.create(tmp_path / "tuning", plan)


def tuned(folder, **options) -> PrivateClassifier:
    return PrivateClassifier(bounds=(-4, 4), classes=(0, 1), plan=folder, **options)


def test_a_search_under_one_plan_spends_the_budgets_once(tmp_path):
    """2 candidates · 3 folds + 1 refit = 7 runs of one table: the eighth is refused."""
    folder = shared_plan(tmp_path)
    search = GridSearchCV(tuned(folder), {"lr": [0.1, 1.0]}, cv=KFold(3), error_score="raise")
    cost = total_cost(search, X0, Y0, epsilon=E0)
    assert (cost.fits, cost.fits_of_record, cost.total.epsilons.tolist()) == (7, 5, [STRICT, LOOSE])
    assert cost.total.delta.tolist() == [1e-5, 1e-5]
    best = search.fit(X0, Y0, epsilon=E0).best_estimator_
    assert (folder.begun, folder.left) == (7, 0)
    assert best.plan_.digest == folder.plan.digest
    assert (best.epsilon_spent_ <= [STRICT, LOOSE]).all()
    # Seven runs by basic composition would spend far more: the shared plan has more noise than one fit's own.
    assert best.plan_.noise_std > classifier(epochs=1).fit(X0, Y0, epsilon=E0).plan_.noise_std
    assert "These 7 runs together" in best.guarantee_
    assert "as GridSearchCV makes it" in best.guarantee_
    with pytest.raises(epsilons.errors.RunError, match="All 7 runs"):
        tuned(folder).fit(X0, Y0, epsilon=E0)


def test_folds_take_each_record_s_row_of_the_shared_plan_and_never_plan_anew(tmp_path):
    folder = shared_plan(tmp_path, runs=3)
    done = cross_validate(
        tuned(folder), X0, Y0, cv=KFold(3), params={"epsilon": E0}, return_estimator=True, error_score="raise"
    )
    assert {estimator.plan_.digest for estimator in done["estimator"]} == {folder.plan.digest}
    assert {estimator.n_iter_ for estimator in done["estimator"]} == {4}
    assert total_cost(tuned(folder), X0, Y0, epsilon=E0, cv=KFold(3)).total.epsilons.tolist() == [STRICT, LOOSE]


def test_more_fits_than_the_shared_plan_certifies_are_refused_before_the_first(tmp_path):
    search = GridSearchCV(tuned(shared_plan(tmp_path, runs=6)), GRID, cv=KFold(3))
    with pytest.raises(InputError, match="There are 7 fits, and the shared plan certifies 6 runs"):
        total_cost(search, X0, Y0, epsilon=E0)
    twice = [(np.zeros(100, dtype=int), np.arange(10))]
    with pytest.raises(InputError, match="a record twice"):
        total_cost(search.estimator, X0, Y0, epsilon=E0, cv=twice)


@pytest.mark.parametrize(
    ("message", "options", "epsilon"),
    [
        ("determines delta, strategy, .* leave out epochs, or", {"epochs": 3}, E0),
        ("leave out strategy, clip_norm", {"strategy": "sample", "clip_norm": 2.0}, E0),
        ("budgets that the plan does not have", {}, 1.0),
        ("more records with some budget", {}, LOOSE),
        ("fit needs budgets", {}, None),
    ],
)
def test_what_does_not_fit_a_shared_plan_is_refused_and_claims_no_run(message, options, epsilon, tmp_path):
    folder = shared_plan(tmp_path)
    with pytest.raises(InputError, match=message):
        tuned(folder, **options).fit(X0, Y0, epsilon=epsilon)
    assert folder.begun == 0


def test_a_shared_plan_must_be_in_a_folder_that_counts_the_fits(tmp_path):
    folder = shared_plan(tmp_path)
    tuned(str(folder.path)).fit(X0, Y0, epsilon=E0)
    assert folder.begun == 1
    with pytest.raises(InputError, match="got a Plan"):
        tuned(folder.plan).fit(X0, Y0, epsilon=E0)


def test_a_pickle_names_the_folder_of_a_shared_plan_and_holds_no_budget(tmp_path):
    epsilon = np.where(np.arange(RECORDS) == 5, ALONE, E0)
    fitted = tuned(shared_plan(tmp_path, epsilon)).fit(X0, Y0, epsilon=epsilon)
    stored = pickle.dumps(fitted)
    assert struct.pack("<d", ALONE) not in stored
    assert pickle.loads(stored).plan == str(tmp_path / "tuning")
    assert "0.71" not in repr(fitted) + fitted._repr_html_()


# -- several fits on the same rows ---------------------------------------------------------------------------------

AGAIN = pytest.warns(EpsilonsWarning, match="in an earlier fit of this process")


@pytest.mark.filterwarnings("error::epsilons.errors.EpsilonsWarning")
def test_a_second_fit_on_some_of_the_rows_warns_and_both_are_counted():
    once = classifier().fit(X0, Y0, epsilon=E0)
    assert once.epsilon_spent_.tolist() == once.plan_.epsilon_spent().tolist()
    classifier().fit(*made_up(seed=1)[:2], epsilon=1.0)  # other rows
    with AGAIN as warned:
        twice = clone(once).fit(X0[::-1][:200], 1 - Y0[:200], epsilon=1.5)  # in another order, with other targets
    assert not re.search(r"\d", str(warned[0].message))
    (spent,) = twice.plan_.epsilon_spent()
    np.testing.assert_allclose(twice.epsilon_spent_, [once.epsilon_spent_[1] + spent])
    np.testing.assert_allclose(twice.delta_spent_, [2e-5])


def test_the_spend_of_a_search_is_that_of_all_its_fits_and_within_its_cost():
    search = GridSearchCV(classifier(), GRID, cv=KFold(3), error_score="raise")
    cost = total_cost(search, X0, Y0, epsilon=E0)
    with AGAIN:
        best = search.fit(X0, Y0, epsilon=E0).best_estimator_
    np.testing.assert_allclose(best.epsilon_spent_, cost.total.epsilons, rtol=0.01)
    assert (best.epsilon_spent_ <= cost.total.epsilons).all()
    np.testing.assert_allclose(best.delta_spent_, 5e-5)


def test_fits_of_one_plan_count_once_and_are_added_to_fits_of_other_plans(tmp_path):
    folder = shared_plan(tmp_path)
    tuned(folder).fit(X0[:160], Y0[:160], epsilon=E0[:160])
    shared = tuned(str(folder.path)).fit(X0, Y0, epsilon=E0)
    assert shared.epsilon_spent_.tolist() == folder.plan.epsilon_spent().tolist()
    with AGAIN:
        own = classifier().fit(X0, Y0, epsilon=E0)
    np.testing.assert_allclose(own.epsilon_spent_, own.plan_.epsilon_spent() + folder.plan.epsilon_spent())


def test_a_sum_that_few_records_share_is_not_shown():
    classifier().fit(X0, Y0, epsilon=np.where(np.arange(RECORDS) == 5, ALONE, 1.0))
    with AGAIN as warned:
        later = classifier().fit(X0, Y0, epsilon=1.0)
    assert later.epsilon_spent_.size == later.delta_spent_.size == 0
    assert "0.71" not in repr(later) + later._repr_html_() + later.guarantee_ + str(warned[0].message)


def test_equal_rows_of_one_fit_are_not_added_up_and_copies_of_a_bootstrap_warn(routing):
    few = np.arange(RECORDS)[:, None] // 2 % 100 / 25.0  # one row for a strict and a loose record
    with pytest.warns(EpsilonsWarning, match="Many rows of this fit are equal"):
        fitted, again = (classifier().fit(few, Y0, epsilon=E0) for _ in range(2))
    spent = fitted.plan_.epsilon_spent()
    assert fitted.epsilon_spent_.tolist() == spent.tolist()
    np.testing.assert_allclose(again.epsilon_spent_, spent + spent[1])  # for each row the largest of its budgets
    with pytest.warns(EpsilonsWarning, match="bootstrap=False"):
        BaggingClassifier(classifier(), 1, random_state=0).fit(X0, Y0, epsilon=E0)


# -- what a search costs -----------------------------------------------------------------------------------------------


class Counting(PrivateClassifier):
    """Notes which records every fit gets, by their first feature, and learns nothing."""

    fits: list[np.ndarray]

    def fit(self, X, y, *, epsilon=None):
        type(self).fits.append(np.asarray(X)[:, 0].astype(int))
        self.classes_, self.spent = np.array([0, 1]), epsilon
        return self

    def predict(self, X):
        return np.zeros(len(X), dtype=int)


GRID = {"lr": [0.1, 0.5]}
NUMBERED = np.arange(RECORDS, dtype=float)[:, None]


def made_fits(run) -> tuple[int, int]:
    """Fits that were made, and the most that one record was in."""
    Counting.fits = []
    run()
    return len(Counting.fits), int(np.bincount(np.concatenate(Counting.fits)).max())


SEARCHES = {
    "grid": (GridSearchCV(Counting(), GRID, cv=KFold(3)), None),
    "grid of 8": (GridSearchCV(Counting(), GRID | {"epochs": [1, 2], "batch_size": [3, 4]}, cv=KFold(5)), None),
    "no refit": (GridSearchCV(Counting(), GRID, cv=KFold(3), refit=False), None),
    "random": (RandomizedSearchCV(Counting(), {"lr": np.linspace(0.1, 1, 9)}, n_iter=4, cv=KFold(2)), None),
    "pipeline": (GridSearchCV(make_pipeline(FunctionTransformer(), Counting()), {"counting__lr": [1, 2]}, cv=3), None),
    "folds": (Counting(), KFold(4)),
    "nested": (GridSearchCV(Counting(), GRID, cv=KFold(3)), KFold(5)),
    "one fit": (Counting(), None),
}  # fmt: skip


@pytest.mark.parametrize("name", SEARCHES)
def test_the_cost_counts_the_fits_that_scikit_learn_makes(name, routing):
    search, cv = SEARCHES[name]
    search = clone(search)

    def run() -> None:
        if cv is None:
            search.fit(NUMBERED, Y0, epsilon=E0)
        else:
            cross_validate(search, NUMBERED, Y0, cv=cv, params={"epsilon": E0})

    for _ in range(2):  # before the search is fitted, and after
        cost = total_cost(search, NUMBERED, Y0, epsilon=E0, cv=cv)
        assert (cost.fits, cost.fits_of_record) == made_fits(run)
        assert cost.total.epsilons.tolist() == pytest.approx([cost.fits_of_record * e for e in (STRICT, LOOSE)])


def test_the_cost_of_a_grid_of_two_in_three_folds_is_that_computed_by_hand():
    """2 candidates · 2 of 3 folds + 1 refit = 5 fits of a record: 5 · 0.5 = 2.5, 5 · 2 = 10, 5 · 1e-5 = 5e-5."""
    cost = total_cost(GridSearchCV(classifier(), GRID, cv=KFold(3)), X0, Y0, epsilon=E0)
    assert (cost.fits, cost.fits_of_record) == (7, 5)
    assert cost.total.epsilons.tolist() == [2.5, 10]
    np.testing.assert_allclose(cost.total.delta, 5e-5)
    assert str(cost).startswith(
        "7 fits; one record is in at most 5 of them.\n"
        "epsilon in all  delta  records\n"
        "           2.5  5e-05       80\n"
        "            10  5e-05      160\n"
        "Not covered: scores on private records"
    )


def test_the_page_shows_the_cost_of_its_search_as_it_is_printed():
    X, y = epsilons.data.load("digits", "train")
    epsilon = np.where(np.arange(len(X)) % 3, STRICT, LOOSE)
    cost = total_cost(GridSearchCV(classifier(), GRID, cv=KFold(3)), X, y, epsilon=epsilon)
    page = Path(__file__).parent.parent / "docs" / "doors" / "sklearn.md"
    assert f"```text\n{cost}\n```" in page.read_text(encoding="utf-8")


def test_a_search_over_epsilons_costs_their_sum_and_the_refit_the_largest():
    cost = total_cost(GridSearchCV(classifier(), {"epsilon": [1.0, 3.0]}, cv=KFold(3)), X0, Y0)
    assert cost.total.epsilons.tolist() == [2 * 1.0 + 2 * 3.0 + 3.0]


def test_under_random_splits_every_record_counts_in_all_of_them():
    cost = total_cost(classifier(), X0, Y0, epsilon=E0, cv=ShuffleSplit(4, test_size=0.5))
    assert (cost.fits, cost.fits_of_record) == (4, 4)
    assert cost.total.epsilons.tolist() == [4 * STRICT, 4 * LOOSE]
    fixed = total_cost(classifier(), X0, Y0, epsilon=E0, cv=ShuffleSplit(4, test_size=0.5, random_state=0))
    assert fixed.total.epsilons.min() == STRICT


def test_the_cost_names_folds_by_class_and_fitted_scalers_which_nothing_covers():
    pipe = make_pipeline(StandardScaler(), classifier())
    said = str(total_cost(GridSearchCV(pipe, {}, cv=3), X0, Y0, epsilon=E0))
    assert "the folds of StratifiedKFold" in said
    assert "what StandardScaler learns" in said
    shuffled = StratifiedKFold(3, shuffle=True)  # other folds each time, so that they cannot be compared
    assert "the folds of StratifiedKFold" in str(total_cost(classifier(), X0, Y0, epsilon=E0, cv=shuffled))
    plain = str(total_cost(make_pipeline(FunctionTransformer(), classifier()), X0, Y0, epsilon=E0, cv=KFold(3)))
    assert "folds of" not in plain
    assert "learns" not in plain


def test_folds_by_class_move_other_records_when_one_record_s_class_changes():
    """Why the cost names them: the fits are then not those on the data with one record replaced."""

    def moved(folds, changed: int) -> set[int]:
        other = np.where(np.arange(RECORDS) == changed, 1 - Y0, Y0)
        pairs = zip(folds.split(X0, Y0), folds.split(X0, other), strict=True)
        return {i for (a, _), (b, _) in pairs for i in set(a) ^ set(b)} - {changed}

    assert any(moved(StratifiedKFold(3), changed) for changed in range(20))
    assert not any(moved(KFold(3), changed) for changed in range(20))


def test_the_printed_cost_merges_groups_of_fewer_than_20_records():
    epsilon = E0.copy()
    epsilon[5] = ALONE
    said = str(total_cost(GridSearchCV(classifier(), GRID, cv=KFold(3)), X0, Y0, epsilon=epsilon))
    assert str(5 * ALONE) not in said
    assert "3.56" not in said


def test_what_the_cost_cannot_count_is_refused():
    with pytest.raises(InputError, match="cannot count the fits of a BaggingClassifier"):
        total_cost(BaggingClassifier(classifier()), X0, Y0, epsilon=E0)
    halving = type("Halving", (), {"cv": 3, "refit": True, "estimator": classifier()})()
    with pytest.raises(InputError, match="Pass the fitted one"):
        total_cost(halving, X0, Y0, epsilon=E0)
    with pytest.raises(BudgetError, match="one for each record of the whole X"):
        total_cost(classifier(), X0, Y0, epsilon=E0[1:])
