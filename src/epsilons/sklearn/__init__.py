"""scikit-learn: classifiers and regressors of which every record has its own epsilon.

    PrivateClassifier(bounds=(0, 16), classes=range(10)).fit(X, y, epsilon=budgets)

To be imported explicitly, as `epsilons.sklearn`: `import epsilons` loads neither scikit-learn nor torch.
"""

from ..errors import app_packages

with app_packages():
    from .cost import Cost, total_cost
    from .estimators import PrivateClassifier, PrivateRegressor

__all__ = ["Cost", "PrivateClassifier", "PrivateRegressor", "total_cost"]
