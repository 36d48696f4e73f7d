"""Fit: the whole loop in one call, for data of (input, target) pairs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_model, save_model
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ...accounting import Accountant
from ...budgets.budgets import Budgets
from ...core.files import sync_folder
from ...draws import fingerprints
from ...errors import DataError, EpsilonsError, InputError, RunError, app_packages
from ...ledger import run_folder
from ...ledger.account import read_account
from ...ledger.plan_folder import PlanFolder, opened
from ...ledger.run_folder import read_metrics
from ...models import model_checks, name_of
from ...planning import Plan, display
from .. import checkpoints, validation
from ..opening import Request
from ..performance import Performance
from ..private import Private
from ..private_setup import set_up
from ..values import Randomness, Records, RunFolder, as_folder, as_randomness, as_records
from .evaluation import EvalData, Loss, evaluate
from .losses import (
    LOSSES,
    OF_CLASSES,
    Losses,
    MakeOptimizer,
    by_name,
    checked_weights,
    optimizer_maker,
    optimizer_settings,
    training_loss,
)
from .progress import is_live, watched

if TYPE_CHECKING:
    from ...ledger.model_file import ModelFile, Origin
    from ..predicting import Predictions

# -- What `fit` knows about a trained model, for its model.json

Kind = Literal["classes", "binary", "number", "raw"]
KINDS: dict[str, Kind] = {"cross_entropy": "classes", "binary_cross_entropy": "binary", "mse": "number"}


def describe(
    model: nn.Module, loss: str | Loss, classes: Sequence[str] | None, metadata: Mapping[str, Any]
) -> ModelFile:
    """The description of a model that `fit` trained on the caller's arrays.

    classes   their names, if test data named them
    metadata  the caller's; "provenance" says what was read off the data
    """
    from ...ledger.model_file import ArrayInputs, ModelFile, Outputs

    kind = KINDS.get(loss, "raw") if isinstance(loss, str) else "raw"
    names = tuple(map(str, classes)) if classes is not None and kind == "classes" else None
    return ModelFile(
        model=name_of(model),
        inputs=ArrayInputs(),
        outputs=Outputs(kind=kind, classes=names),
        provenance=stated_provenance(metadata),
    )


def stated_provenance(metadata: Mapping[str, Any] | None) -> tuple[Origin, ...]:
    """metadata["provenance"], or that it is unknown. Raises InputError if it is no list of such entries."""
    with app_packages():
        from pydantic import ValidationError

        from ...ledger.model_file import Origin
    unknown = {"column": "(all inputs)", "what": "preprocessing", "source": "not stated"}
    try:
        entries = (metadata or {}).get("provenance")
        return tuple(Origin.model_validate(entry) for entry in ([unknown] if entries is None else entries))
    except (ValidationError, TypeError, AttributeError):
        raise InputError(
            'metadata["provenance"] must be a list of {"column": …, "what": …, "source": …}. what: bounds, categories, '
            "classes or preprocessing; source: declared, read off the data, or not stated."
        ) from None


# -- A run as a value: its plan, what was charged, its metrics, and predictions by its model


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
        with app_packages():
            from ...ledger import model_file
        folder = run_folder.RunFolder(Path(path))
        if model_file.is_release(folder.path):
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
        from ..predicting import Predictor

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
        return display.of_charges(self.plan, self.charged, title, [together] if self.plan.runs > 1 else [])


# -- Fit: the whole loop in one call, for data of (input, target) pairs

Callback = Callable[[Private], None]


@dataclass(frozen=True)
class Training:
    """How `fit` trains: what is neither privacy nor speed.

    loss           a name in LOSSES, or a function (outputs, targets) -> (batch,)
    optimizer      "sgd" (lr 0.1, momentum 0, unless given), "adam", "adamw" (lr 0.1), a class of optimizers (lr and
                   momentum are passed on if given), or a function parameters -> optimizer (which sets both)
    scheduler      optimizer -> a scheduler of torch.optim.lr_scheduler, stepped after every update and checkpointed
    class_weights  one number per class: the loss of each record is multiplied by that of its class, before clipping.
                   Declare them; numbers that were counted in the data are not covered by the guarantee. For losses of
                   classes by name
    balance        how budgets and classes go together, as `classes` of `balanced_loss`, which is then trained on. For
                   cross_entropy. Scores, and the loss on test data, are of the logits as they are
    device         "auto" (a GPU if there is one), or any torch device
    progress       live in a terminal or a notebook, elsewhere a line on stderr now and then; by default only where it
                   is live

    >>> Training(lr=0.5).loss
    'cross_entropy'
    """

    loss: str | Loss = "cross_entropy"
    optimizer: str | type[torch.optim.Optimizer] | MakeOptimizer = "sgd"
    lr: float | None = None
    momentum: float | None = None
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None
    class_weights: Sequence[float] | None = None
    balance: Mapping[float, Sequence[float]] | None = None
    device: str | torch.device = "auto"
    progress: bool | None = None


def fit(
    model: nn.Module,
    data: Any,
    plan: Plan | PlanFolder,
    *,
    budgets: Budgets,
    training: Training | None = None,
    evaluation: Any = None,
    callbacks: Iterable[Callback] = (),
    run_dir: str | Path | RunFolder | None = None,
    seed: int | Randomness | None = None,
    performance: Performance | None = None,
) -> Run:
    """Train `model` in place under `plan`, and return the run.

    data        (inputs, targets) as tensors, arrays, or a DataFrame and a column, or a map-style data set of such
                pairs; or Records of them
    training    loss, optimizer and so on: see Training
    evaluation  data to evaluate on at the end: like `data`, or an EvalData that says more about them. Metrics of
                private data are not covered by the guarantee
    callbacks   called with the Private after every update. A callback that calls private.stop() ends training: the run
                is finished, with what was charged until then. On resuming, a callback's state must follow from
                private.updates (else use make_private and private.register_for_checkpointing)
    run_dir     a new folder: plan, ledger, metrics, key and, at the end, model.safetensors; None keeps nothing. Of the
                metadata of a RunFolder, "features" says in words what computed the inputs before training, and where
                its constants come from; "person" names the column of the persons' ids, or says "each row is one
                person". The guarantee repeats both. "provenance" lists what was read off the data (docs/predict.md);
                [] says that nothing was

    plan, seed and performance are as in `make_private`.
    Raises what make_private raises, and DataError for a first record that does not fit the model or the loss. If
    several processes train, rank 0 evaluates and writes the run.

    >>> import torch, epsilons
    >>> budgets = epsilons.Budgets([1.0, 2.0] * 50, delta=1e-3)
    >>> plan = epsilons.plan(budgets, epsilons.Recipe(steps=2, batch_size=10, clip_norm=1.0), accountant="rdp")
    >>> data = torch.randn(100, 3), torch.arange(100) // 50
    >>> epsilons.fit(torch.nn.Linear(3, 2), data, plan, budgets=budgets).charged
    (2,)
    """
    how, folder = training or Training(), as_folder(run_dir)
    loss = how.loss
    compute = by_name(LOSSES, loss, "loss")
    make = optimizer_maker(how.optimizer, how.lr, how.momentum)
    held_out = evaluation if evaluation is None or isinstance(evaluation, EvalData) else EvalData(evaluation)
    dataset = data.data if isinstance(data, Records) else data
    _check_data(model, dataset, loss, held_out, performance or Performance())
    is_auto = how.device == "auto"
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if is_auto else how.device)
    model.to(where)
    updates = make(model.parameters())
    model_checks.check_optimizer(updates, model)
    evaluated = _Evaluation(model, held_out, compute, loss == "binary_cross_entropy", loss == "mse")
    trained_on = training_loss(compute, loss, opened(plan)[0], how.balance)
    losses = Losses(trained_on, loss == "cross_entropy", checked_weights(how.class_weights, loss)).to(where)
    settings = _settings(model, how, updates, where) | _settings_of(held_out) | _stated(folder)
    records, performance = as_records(data, performance)
    request = Request(
        model, updates, records, *opened(plan), budgets, replace(folder, metadata=settings), as_randomness(seed),
        performance, has_classes=loss in OF_CLASSES if isinstance(loss, str) else None, is_whole_loop=True,
    )  # fmt: skip
    private = set_up(request)
    evaluated.read_metrics(private)
    if private.ledger.durable and private.is_finished and private.updates == 0:
        return _finished_before(private, evaluated)
    _listen(private, how.scheduler, callbacks, evaluated)
    _train(private, losses, how.progress)
    return _finished(private, evaluated, loss)


# -- before training ---------------------------------------------------------------------------------------------------


def _check_data(
    model: nn.Module, dataset: Any, loss: str | Loss, held_out: EvalData | None, performance: Performance
) -> None:
    """Check the first record before a run is begun. If workers read the records, the first batch is checked instead."""
    if not isinstance(dataset, DataLoader) and (performance.num_workers == 0 or validation.are_columns(dataset)):
        _check_first(model, dataset, loss)
    if held_out is not None:
        validation.check_pairs(held_out.data, "test data")
        if loss in OF_CLASSES:
            validation.check_several_classes(held_out.data, "test data")


def _check_first(model: nn.Module, dataset: Any, loss: str | Loss) -> None:
    if loss in OF_CLASSES:
        validation.check_several_classes(dataset, "training data")
    first = validation.check_pairs(dataset, "a data set")
    if first is None:
        return
    layer = validation.first_layer(model)
    if layer is not None and not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        validation.check_dtype(first[0], layer)
    if loss == "cross_entropy":
        validation.check_classes(first[1])


def _settings(model: nn.Module, how: Training, updates: torch.optim.Optimizer, device: torch.device) -> dict[str, Any]:
    """Settings of training for run.json."""
    # Two functions may have one name; the key of a seed and the comparison on resuming depend on their code.
    functions = [part for part in (how.loss, how.scheduler) if callable(part)]
    weights = how.class_weights
    return {
        "training": {
            "model": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "loss": _label(how.loss),
            "optimizer": _label(how.optimizer),
            **optimizer_settings(updates),
            **({"functions": fingerprints.of(functions)} if functions else {}),
            "device": str(device),
            **({} if weights is None else {"class_weights": [float(weight) for weight in weights]}),
            **({} if how.balance is None else {"balance": [list(row) for _, row in sorted(how.balance.items())]}),
        }
    }


def _settings_of(held_out: EvalData | None) -> dict[str, Any]:
    """What run.json says about the test data."""
    if held_out is None:
        return {}
    return {
        "eval_data": {
            "data": "public" if held_out.public else "private",
            "records": len(held_out),
            **({} if held_out.persons is None else {"persons": held_out.persons}),
            "classes": None if held_out.classes is None else list(held_out.classes),
        }
    }


def _stated(folder: RunFolder) -> dict[str, Any]:
    """What run.json says in the caller's words. Raises InputError for statements that cannot be read."""
    metadata = folder.metadata
    if metadata or folder.path is not None:
        stated_provenance(metadata)  # checked before a step is made
    texts = {name: validation.stated_text(metadata, name) for name in validation.STATED}
    stated: dict[str, Any] = {name: text for name, text in texts.items() if text}
    return stated if metadata is None else stated | {"metadata": dict(metadata)}


def _label(which: Any) -> str:
    return which if isinstance(which, str) else str(getattr(which, "__name__", type(which).__name__))


# -- evaluation --------------------------------------------------------------------------------------------------------


class _Evaluation:
    """Evaluates the model during training, and keeps the metrics.

    The model is set to training mode, or left as it is if parts of it were frozen by .eval(); every evaluation restores
    these modes.
    """

    def __init__(
        self, model: nn.Module, held_out: EvalData | None, compute: Loss, is_binary: bool, is_number: bool
    ) -> None:
        self.model, self.held_out, self._compute = model, held_out, compute
        self._kind = {"binary": is_binary, "numbers": is_number}
        self.metrics: list[Mapping[str, Any]] = []
        if not model.training:
            model.train()
        self._modes = [(module, module.training) for module in model.modules()]
        if held_out is not None:
            self._try(held_out)
            self._restore_modes()

    def _try(self, held_out: EvalData) -> None:
        """Evaluate on one record, so that no budget is spent on a model that cannot be evaluated. Raises DataError."""
        if len(held_out) == 0:
            return  # `evaluate` raises the error
        try:
            with checkpoints.same_generators():
                evaluate(self.model, held_out.first(), self._compute, **self._kind)
        except EpsilonsError:
            raise
        except Exception as error:  # custom models, losses and data may raise anything
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(
                f"The model cannot be tested on the first record of the test data: {reason}. No step was made."
            ) from error

    def read_metrics(self, private: Private) -> None:
        """The metrics of a resumed run."""
        if private.folder:
            self.metrics = list(read_metrics(private.folder))

    def note(self, private: Private) -> None:
        """Evaluate after this update, unless a resumed run did so before. On rank 0; the others wait in their draw."""
        step = private.updates
        if self.held_out is None or not private.ranks.is_main:
            return
        if self.metrics and self.metrics[-1]["step"] >= step:
            return
        private.checkpoint()  # release nothing of a step before its checkpoint is durable
        groups = len(private.plan.groups)
        row = {"step": step, **evaluate(self.model, self.held_out, self._compute, **self._kind, groups=groups)}
        self.metrics.append(row)
        if private.folder:
            private.folder.append_metrics(row)

    def after_update(self, private: Private) -> None:
        step, every = private.updates, None if self.held_out is None else self.held_out.every
        if every and step % every == 0 and step < private.plan.steps:
            self.note(private)
            self._restore_modes()

    def _restore_modes(self) -> None:
        for module, is_training in self._modes:
            module.training = is_training


# -- training ----------------------------------------------------------------------------------------------------------


def _listen(
    private: Private,
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None,
    callbacks: Iterable[Callback],
    evaluation: _Evaluation,
) -> None:
    """Register everything that follows an update; evaluation last, so that its checkpoint contains all the others."""
    if scheduler is not None:
        schedule = scheduler(private.optimizer)
        private.register_for_checkpointing(scheduler=schedule)
        private.on_update(lambda _: schedule.step())
    for callback in callbacks:
        private.on_update(callback)
    private.on_update(evaluation.after_update)


def _train(private: Private, losses: Losses, progress: bool | None) -> None:
    shown = private.ranks.is_main and (is_live() if progress is None else progress)
    with private, watched(private, shown):
        for batch in private.batches:
            private.backward(losses(private.model, batch))
            private.step()
        if not private.is_finished:  # a callback stopped it
            private.finish()


def _finished(private: Private, evaluation: _Evaluation, loss: str | Loss) -> Run:
    """Save and evaluate the trained model."""
    private.model.eval()
    folder = private.folder
    if folder:
        metadata = folder.read_settings().get("metadata") or {}
        classes = None if evaluation.held_out is None else evaluation.held_out.classes
        describe(private.model, loss, classes, metadata).write(folder.path)
        save_whole(private.model, folder.path / "model.safetensors")
    evaluation.note(private)
    if folder:
        checkpoints.remove(folder.checkpoints)
    return _run(private, evaluation)


def _finished_before(private: Private, evaluation: _Evaluation) -> Run:
    """A resumed run that was finished before: only its model is loaded."""
    private.close()
    with private.ranks.collective("loading a finished run"):
        if private.folder:
            with checkpoints.restoring(f"The weights in {private.folder.path} cannot be loaded"):
                load_model(private.model, private.folder.path / "model.safetensors")
    if private.ranks.is_distributed:
        private.model.load_state_dict(private.ranks.broadcast(private.model.state_dict()))
    return _run(private, evaluation)


def _run(private: Private, evaluation: _Evaluation) -> Run:
    path = private.folder.path if private.folder else None
    return Run(path, private.plan, private.ledger.charged, tuple(evaluation.metrics))


def save_whole(model: nn.Module, path: Path) -> None:
    """Write the model's weights as safetensors, completely or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    save_model(model, str(temporary))
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
