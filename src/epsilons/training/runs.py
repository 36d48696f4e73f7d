"""A run as a value: its plan, what was charged, its metrics, and predictions by its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from .. import release_folder
from ..account import read_account
from ..accounting import Accountant
from ..errors import RunError
from ..planning import Plan, notebook_views
from ..run_folder import RunFolder, read_metrics
from .predicting import Predictions, Predictor


@dataclass(frozen=True)
class Run:
    """A finished or interrupted run, as `fit` returns it.

    path     the run's folder, or None if nothing was written
    plan     the plan that the run followed
    charged  (phases,) steps charged so far
    metrics  one mapping per evaluation, in order: step, loss, accuracy, …

    >>> from epsilons import Budgets, Recipe, plan
    >>> made = plan(Budgets([1.0] * 500), Recipe(steps=2, batch_size=50, clip_norm=1.0), accountant="rdp")
    >>> run = Run(path=None, plan=made, charged=(2,), metrics=())
    >>> bool((run.epsilon_spent() <= 1.0).all())
    True
    """

    path: Path | None
    plan: Plan
    charged: tuple[int, ...]
    metrics: tuple[Mapping[str, Any], ...]

    @classmethod
    def load(cls, path: str | Path, accountant: Accountant | None = None) -> Run:
        """The run in a folder that `epsilons train`, `fit` or `make_private` wrote. Plan and ledger are verified again.

        accountant  the function that certified the plan, if it is not one of the library's

        Raises RunError if the folder holds no run or its files are damaged, LedgerError if its ledger was altered.
        """
        folder = RunFolder(Path(path))
        if release_folder.is_release(folder.path):
            raise RunError(
                f"{path} is a release, which holds no plan and no ledger. Predict with: epsilons.Predictor.load("
                f"{str(path)!r})."
            )
        missing = [file.name for file in (folder.plan, folder.ledger) if not file.is_file()]
        if missing:
            raise RunError(
                f"{path} holds no run: {' and '.join(missing)} missing. Give a run's folder, e.g. runs/first."
            )
        plan = Plan.load(folder.plan, accountant)
        return cls(folder.path, plan, read_account(folder.ledger, plan).charged, read_metrics(folder))

    def predict(self, table: Any, model: nn.Module | None = None) -> Predictions:
        """Predict every row of a table by the run's trained model, as `Predictor.predict` does.

        table  a path, a pyarrow.Table, a dict of columns, or a DataFrame
        model  your own network of the trained class, which gets the weights; None for models of the library's table

        Raises RunError if the run kept no folder or has no trained model, DataError for a table that does not fit.
        """
        if self.path is None:
            raise RunError("This run kept no files. Give `fit` a run_dir, and predict from there.")
        return Predictor.load(self.path, model).predict(table)

    def epsilon_spent(self) -> npt.NDArray[np.float64]:
        """(groups,) epsilon certified for the whole plan, with all its runs. Claim this, however early the run stopped.

        A claim for the charged steps alone is valid only if the stop was chosen without looking at data or outputs.
        """
        return self.plan.epsilon_spent()

    def __repr__(self) -> str:
        """The folder and what was charged, without the metrics: they may be of private data, and of small groups."""
        folder = "" if self.path is None else f"{str(self.path)!r}, "
        return f"Run({folder}{sum(self.charged):,} of {self.plan.steps:,} steps charged)"

    def _repr_html_(self) -> str:
        """In a notebook: what was charged. It leaves out the metrics, which may be of private data."""
        title = f"{sum(self.charged):,} of {self.plan.steps:,} steps charged"
        together = f"The epsilons are those of all {self.plan.runs:,} runs of the plan together."
        return notebook_views.of_charges(self.plan, self.charged, title, [together] if self.plan.runs > 1 else [])
