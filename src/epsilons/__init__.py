"""epsilons: train PyTorch models under individualized differential privacy.

    budgets = epsilons.Budgets([1.0, 3.0, 2.0, …], delta=1e-5)                # one epsilon per record
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=9_375, batch_size=512, clip_norm=0.2))
    private = epsilons.make_private(model, optimizer, data, plan, budgets=budgets)

Planning needs no torch: the modules for training are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors
from ._version import __version__
from .errors import EpsilonsError

if TYPE_CHECKING:
    from . import data
    from .accounting.selection import Selection
    from .auditing import audit
    from .budgets.budgets import Budgets
    from .budgets.risk import Risk
    from .core.mechanism import SampledGaussian
    from .ledger.ledger import Ledger
    from .ledger.plan_folder import PlanFolder
    from .planning import Phase, Plan, Recipe, advise, plan
    from .registry import Registry
    from .reporting import Report, release, report
    from .training import (
        EvalData,
        Performance,
        Private,
        Randomness,
        Records,
        RunFolder,
        Training,
        features,
        fit,
        make_private,
        mend,
    )
    from .training.fitting.fit_loop import Run
    from .training.fitting.losses import balanced_loss, class_counts
    from .training.fitting.tuning import Tuned, tune
    from .training.predicting import Predictions, Predictor

#: Module -> names, loaded on first use: planning needs no torch, `epsilons --help` not even numpy.
_LAZY = {
    ".accounting.selection": ("Selection",),
    ".auditing": ("audit",),
    ".budgets.budgets": ("Budgets",),
    ".budgets.risk": ("Risk",),
    ".core.mechanism": ("SampledGaussian",),
    ".ledger.ledger": ("Ledger",),
    ".ledger.plan_folder": ("PlanFolder",),
    ".planning": ("Phase", "Plan", "Recipe", "advise", "plan"),
    ".registry": ("Registry",),
    ".reporting": ("Report", "release", "report"),
    ".training": (
        "EvalData",
        "Performance",
        "Private",
        "Randomness",
        "Records",
        "RunFolder",
        "Training",
        "fit",
        "make_private",
        "mend",
    ),
    ".training.fitting.fit_loop": ("Run",),
    ".training.fitting.losses": ("balanced_loss", "class_counts"),
    ".training.predicting": ("Predictions", "Predictor"),
    ".training.fitting.tuning": ("Tuned", "tune"),
}
_MODULES = {name: f".{name}" for name in ("accounting", "budgets", "core", "data", "planning", "tabular")}
_MODULES["features"] = ".training.features"


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            with errors.app_packages():
                return getattr(import_module(module, __name__), name)
    if name not in _MODULES:
        raise AttributeError(f"module 'epsilons' has no attribute {name!r}")
    with errors.app_packages():
        return import_module(_MODULES[name], __name__)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "Budgets",
    "EpsilonsError",
    "EvalData",
    "Ledger",
    "Performance",
    "Phase",
    "Plan",
    "PlanFolder",
    "Predictions",
    "Predictor",
    "Private",
    "Randomness",
    "Recipe",
    "Records",
    "Registry",
    "Report",
    "Risk",
    "Run",
    "RunFolder",
    "SampledGaussian",
    "Selection",
    "Training",
    "Tuned",
    "__version__",
    "advise",
    "audit",
    "balanced_loss",
    "class_counts",
    "data",
    "errors",
    "features",
    "fit",
    "make_private",
    "mend",
    "plan",
    "release",
    "report",
    "tune",
]
