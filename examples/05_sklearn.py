"""scikit-learn: a pipeline, a cross-validation and a search, each with one budget per record, and what they cost."""

import tempfile
import warnings
from pathlib import Path

import numpy as np
import sklearn
from sklearn.model_selection import GridSearchCV, KFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import epsilons
from epsilons import data
from epsilons.sklearn import PrivateClassifier, total_cost

X, y = data.load("digits", "train")
X_test, y_test = data.load("digits", "test")
epsilon = np.where(np.arange(len(X)) % 3, 0.5, 2.0)  # one per record, in the order of the rows

# Bounds and classes are declared: nothing but the weights is learnt from the records.
sklearn.set_config(enable_metadata_routing=True)
model = PrivateClassifier(bounds=(0, 1), classes=range(10), clip_norm=2.0, epochs=10)
pipe = make_pipeline(FunctionTransformer(np.sqrt), model)
pipe.fit(X, y, epsilon=epsilon)
print(f"accuracy {pipe.score(X_test, y_test):.3f}, epsilon spent {pipe[-1].epsilon_spent_.round(3)}")
assert pipe.score(X_test, y_test) > 0.6

# Each fit spends the budgets of its records again. Folds by position: those by class would depend on private records.
warnings.filterwarnings("ignore", "Some of these rows")  # else each of these fits says that it is not the first
done = cross_validate(pipe, X, y, cv=KFold(3), params={"epsilon": epsilon})
print(f"\ncross-validation: {total_cost(pipe, X, y, epsilon=epsilon, cv=KFold(3))}")

search = GridSearchCV(pipe, {"privateclassifier__lr": [0.25, 1.0]}, cv=KFold(3))
search.fit(X, y, epsilon=epsilon)
cost = total_cost(search, X, y, epsilon=epsilon)
print(f"\nsearch: {cost}")
assert cost.fits_of_record == 2 * (3 - 1) + 1
assert cost.total.epsilons.tolist() == [5 * 0.5, 5 * 2.0]

# One plan for all seven fits: together they spend the budgets once.
recipe = epsilons.Recipe(steps=50, batch_size=256, clip_norm=2.0)
plan = epsilons.plan(epsilons.Budgets(epsilon, delta=1e-5), recipe, runs=2 * 3 + 1)
with tempfile.TemporaryDirectory() as parent:
    folder = epsilons.PlanFolder.create(Path(parent) / "tuning", plan)
    tuned = PrivateClassifier(plan=folder, bounds=(0, 1), classes=range(10))
    search = GridSearchCV(tuned, {"lr": [0.25, 1.0]}, cv=KFold(3), error_score="raise")
    cost = total_cost(search, X, y, epsilon=epsilon)
    search.fit(X, y, epsilon=epsilon)
    print(f"\nsearch under one plan: {cost}")
    print(f"accuracy {search.score(X_test, y_test):.3f}, {folder.left} runs left")
    assert cost.total.epsilons.tolist() == [0.5, 2.0]
    assert folder.left == 0
