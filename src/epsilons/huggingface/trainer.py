"""PrivateTrainer: transformers' Trainer with a budget for every record of its training data."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset
from transformers import DataCollatorWithFlattening, EarlyStoppingCallback, Seq2SeqTrainer, Trainer, TrainerCallback
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from ..budgets.budgets import DEFAULT_DELTA, Budgets
from ..doors.foreign_loop import WrappedOptimizer
from ..errors import BudgetError, CallOrderError, InputError, RunError
from ..ledger.plan_folder import PlanFolder, opened
from ..planning import Plan, Recipe
from ..planning import plan as make_plan
from ..training import Performance, Private, RunFolder, make_private
from ..training import Records as TrainedRecords
from . import model_losses, training_arguments

# -- One step of the Trainer is one draw: the part before `optimizer.step()`, the update in it, and nothing else
#
# A draw has several physical batches, after those that are only checked, or none. All of them are computed within
# `training_step`. The update waits for `optimizer.step()`, so that callbacks, schedules, logs and saves see what they
# see in any training. The update of an empty draw is made within `training_step`.


class Steps:
    """The draws of a run, one for each step of the Trainer.

    private   the run
    schedule  of learning rates
    losses    batch -> (batch,) losses, one per record
    """

    def __init__(self, private: Private, schedule: Any, losses: Callable[[Any], Tensor]) -> None:
        self.private, self.schedule, self._losses = private, schedule, losses
        self._draws: Iterator[Iterator[Any]] | None = None
        self._draw: Iterator[Any] = iter(())
        self._is_open, self._is_due = False, False

    def begin(self, is_counted: bool) -> float:
        """Compute a draw, up to its update. Returns the mean loss of its records if it is counted, otherwise 0."""
        if self._is_open:
            raise CallOrderError("The Trainer began a step before optimizer.step() of the last one.")
        if self._draws is None:
            self._draws = self.private.draws
        self._draw, self._is_open = next(self._draws), True
        return self._compute(is_counted)

    def _compute(self, is_counted: bool) -> float:
        total, records = 0.0, 0
        for batch in self._draw:
            losses = self._losses(batch)
            self.private.backward(losses)
            if is_counted and not self.private.is_check:
                total, records = total + float(losses.detach().sum()), records + len(losses)
            if self._completes_draw:
                self._is_due = True
                break
            self.private.step()
        return total / max(records, 1)

    @property
    def _completes_draw(self) -> bool:
        return self.private.is_last and self.private._issuer.non_finite is None

    def end(self) -> None:
        """Add noise, and update. For `optimizer.step()`."""
        if not self._is_open:
            raise CallOrderError(
                "optimizer.step() was called without a training step of PrivateTrainer before. Override record_losses, "
                "and not training_step."
            )
        while self._is_due:
            self._is_due = False
            self.private.step()
            # Under a new key, the draw is made again. Otherwise nothing is left of it.
            self._compute(is_counted=False)
        self._is_open = False


class StepOptimizer(WrappedOptimizer):
    """What the Trainer takes for its optimizer: `step` adds noise and updates."""

    #: accelerate puts no optimizer of its own around this one: it would search for a package twice in every step.
    _is_accelerate_prepared = True
    #: As accelerate's has it.
    step_was_skipped = False

    def __init__(self, optimizer: Optimizer, steps: Steps) -> None:
        super().__init__(optimizer)
        self._steps = steps

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise InputError("optimizer.step takes no closure here: the losses are computed in the training step.")
        self._steps.end()


def zero(device: torch.device, value: float = 0.0) -> Tensor:
    """A loss for the Trainer to sum."""
    return torch.tensor(value, device=device)


# -- The training data: without the column of budgets, read by index; and the loader that the Trainer gets


class Records(Dataset[Any]):
    """A data set that is read record by record.

    without   name of a column that is left out
    """

    def __init__(self, dataset: Any, without: str | None = None) -> None:
        self._dataset, self._without = dataset, without

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        record = self._dataset[index]
        if self._without is None:
            return record
        return {name: value for name, value in record.items() if name != self._without}


def budgets_in(dataset: Any, budgets: Budgets | str, person: Any, delta: float) -> tuple[Any, Budgets, Any]:
    """The data set without the columns of budgets and ids, the budgets, and (rows,) the persons of the rows or None.

    dataset   of the library datasets, or any map-style data set of dicts
    budgets   Budgets, or the name of the column of epsilons
    person    the name of the column of ids, (rows,) ids, or None

    Raises BudgetError if there is no such column, and what Budgets raises.
    """
    ids = person
    if isinstance(person, str):
        dataset, ids = _taken(dataset, person, f"person={person!r} must be a column of train_dataset with ids, or ids")
    if not isinstance(budgets, str):
        return dataset, budgets, ids
    what = f"budgets={budgets!r} must be a column of train_dataset with each record's epsilon, or Budgets"
    dataset, values = _taken(dataset, budgets, what)
    epsilons = np.asarray(values)
    if ids is None:
        return dataset, Budgets(epsilons, delta=delta), None
    return dataset, Budgets.by_person(epsilons, ids, delta=delta), ids


def _taken(dataset: Any, column: str, what: str) -> tuple[Any, list[Any]]:
    """The data set without a column, and the column. what: the beginning of the message if there is none"""
    if hasattr(dataset, "column_names"):
        if column not in dataset.column_names:
            raise BudgetError(_no_column(what, dataset.column_names))
        return dataset.remove_columns(column), dataset[column][:]
    values = [_value(dataset[i], column, what) for i in range(len(dataset))]
    return Records(dataset, column), values


def _value(record: Any, column: str, what: str) -> Any:
    if not hasattr(record, "items") or column not in record:
        raise BudgetError(_no_column(what, list(record) if hasattr(record, "items") else []))
    return record[column]


def _no_column(what: str, names: list[str]) -> str:
    return f"{what}; the columns are {', '.join(map(str, names)) or 'unknown: its records are no dicts'}."


class Tickets:
    """What the Trainer takes for its data loader: one empty batch for each draw of an epoch.

    Who is in a draw is read in the Trainer's step. In a resumed run, the first epoch has the draws that are left of it.

    dataset  the training data
    draws    draws per epoch
    steps    draws in all
    made     () -> how many draws were made
    """

    def __init__(self, dataset: Any, draws: int, steps: int, made: Callable[[], int]) -> None:
        self.dataset, self.batch_size = dataset, None
        self._draws, self._steps, self._made = draws, steps, made

    def __len__(self) -> int:
        return self._draws

    def __iter__(self) -> Iterator[dict[str, Any]]:
        end = min((self._made() // self._draws + 1) * self._draws, self._steps)
        while self._made() < end:
            yield {}


#: What the Trainer logs of the training records without noise.
PRIVATE_LOGS = ("loss", "train_loss")


class PrivateTrainer(Trainer):
    """transformers' Trainer. Each step is one Poisson draw, clipped by record, with noise, charged to every budget.

    model, args, data_collator, train_dataset   as for Trainer. A draw is expected to have per_device_train_batch_size ×
                       gradient_accumulation_steps records, of which the first number are computed at once, at most
    budgets            Budgets, one per record in the data set's order; or the name of a column of train_dataset that
                       has each record's epsilon. The column is removed before anything else sees it
    person             for budgets of persons: the name of the column of ids, which is removed as well, or (rows,) ids.
                       A draw is then expected to have so many persons, and an epoch has draws for all persons
    rows_per_person, views   as for epsilons.make_private
    plan               Plan or PlanFolder, in place of clip_norm, delta, strategy and accountant
    clip_norm          mean clip norm of a record's gradient
    delta              of all records, if budgets is a column's name
    strategy, accountant   as for epsilons.plan
    performance        engine and so on. max_physical_batch is per_device_train_batch_size unless it is set, the workers
                       are those of args
    private_seed       makes the run repeatable, for tests: it gives no guarantee to a person who knows it. args.seed
                       has no effect on coins and noise
    private_dir        folder of the run: plan, ledger, key, checkpoints. By default <output_dir>-private. It must be
                       outside of output_dir, which push_to_hub uploads
    log_private_loss   True logs the training loss, which has no noise: to callbacks, trainer_state.json, the console
    trainer            all other arguments of Trainer; compute_loss_func(outputs, labels) must return (batch,) losses

    private            the run, once train() was called: its ledger and plan

    Raises InputError for arguments that a private run cannot follow, BudgetError for a missing column,
    InfeasibleBudgetError for budgets that no noise meets.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        *,
        budgets: Budgets | str,
        person: Any = None,
        rows_per_person: int = 1,
        views: int = 1,
        plan: Plan | PlanFolder | None = None,
        clip_norm: float = 1.0,
        delta: float = DEFAULT_DELTA,
        strategy: str = "scale",
        accountant: Any = "pld",
        performance: Performance | None = None,
        private_seed: int | None = None,
        private_dir: str | Path | None = None,
        log_private_loss: bool = False,
        compute_loss_func: Callable[..., Tensor] | None = None,
        **trainer: Any,
    ) -> None:
        own = training_arguments.checked(args)
        training_arguments.check_model(model)
        columns = [name for name in (budgets, person) if isinstance(name, str)]
        training_arguments.check_data(train_dataset)
        self._evaluations = training_arguments.Evaluations(train_dataset, columns, log_private_loss)
        self._evaluations.check(trainer.get("eval_dataset"), chooses=False)
        _check_methods(type(self))
        if getattr(args, "predict_with_generate", False) and not isinstance(self, Seq2SeqTrainer):
            raise InputError("predict_with_generate has no effect here. Use PrivateSeq2SeqTrainer.")
        if isinstance(data_collator, DataCollatorWithFlattening):
            raise InputError(
                "DataCollatorWithFlattening packs several records into one row, so a batch has no record in its first "
                "dimension, and no gradient belongs to one record. Pad each record with a mask: "
                "DataCollatorForSeq2Seq, DataCollatorWithPadding."
            )
        self.private_dir = training_arguments.folder(private_dir, own.output_dir)
        train_dataset, budgets, persons = budgets_in(train_dataset, budgets, person, delta)
        self.budgets, self.log_private_loss = budgets, log_private_loss
        self._of_persons = {"persons": persons, "rows_per_person": rows_per_person, "views": views}
        # Of persons, the number of rows is private: no number of steps may depend on it.
        self._units = len(budgets) if budgets.unit == "person" else len(train_dataset)
        self._expected = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._epoch = math.ceil(self._units / self._expected)  # draws
        steps = own.max_steps if own.max_steps > 0 else math.ceil(own.num_train_epochs * self._epoch)
        if plan is None:
            plan = make_plan(budgets, Recipe(steps, self._expected, clip_norm), strategy, accountant)
        _check_plan(opened(plan)[0], steps, self._expected)
        self.plan, self._private_seed = plan, private_seed
        performance = performance or Performance()
        largest = performance.max_physical_batch
        self._performance = replace(
            performance,
            max_physical_batch=args.per_device_train_batch_size if largest == "auto" else largest,
            num_workers=args.dataloader_num_workers,
        )
        self.private: Private | None = None
        self._steps: Steps | None = None
        self._resumes = False
        loss = None if compute_loss_func is None else _OfRecords(compute_loss_func)
        super().__init__(model, own, data_collator, train_dataset, compute_loss_func=loss, **trainer)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled or self.is_model_parallel:
            training_arguments.refuse("fsdp")
        self.callback_handler.callbacks.insert(0, _Epochs(self._epoch))

    # -- what a subclass may override ----------------------------------------------------------------

    def record_losses(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """(batch,) losses, one per record, of a batch as the collator made it. Override it for a loss of your own.

        By default: compute_loss_func(outputs, labels), or the model's own loss (`per_record_loss`).
        """
        labels = {name: inputs[name] for name in model_losses.LABELS if name in inputs}
        config = getattr(model, "config", None)  # of transformers' models
        seen = inputs if getattr(config, "is_encoder_decoder", False) else _without(inputs, labels)
        outputs = model(**seen)
        if self.compute_loss_func is not None:
            return self.compute_loss_func(outputs, labels.get("labels", labels))  # type: ignore[no-any-return]
        return model_losses.per_record_loss(
            self.accelerator.unwrap_model(model), outputs, labels, self.args.label_smoothing_factor
        )

    # -- training --------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train, or go on with an interrupted run: resume_from_checkpoint=True, or a checkpoint of output_dir.

        The run goes on from `private_dir`, which is as far as the checkpoint or farther. Raises RunError if it holds
        another run or none, CallOrderError for a second run.
        """
        if self.private is not None:
            raise CallOrderError(
                "This PrivateTrainer has trained already. Each run spends the budgets: make another PrivateTrainer, "
                "with another output_dir, and count what both spend together. A plan for several runs is an option."
            )
        self._evaluations.check(self.eval_dataset, self._chooses)
        self._resumes = bool(resume_from_checkpoint)
        if self._resumes and not self.private_dir.exists():
            raise RunError(
                f"There is no private run in {str(self.private_dir)!r} to resume. To begin from the weights of a "
                "checkpoint load them into the model and call train(); the new run spends the budgets again."
            )
        if resume_from_checkpoint is True and get_last_checkpoint(self.args.output_dir) is None:  # type: ignore[no-untyped-call]
            resume_from_checkpoint = None  # interrupted before the first one
        try:
            return self._without_loss(super().train(resume_from_checkpoint, *args, **kwargs))
        finally:
            if self.private is not None:
                self.private.close()

    @property
    def _chooses(self) -> bool:
        """Whether scores of evaluations choose weights or the end of training."""
        stops = any(isinstance(callback, EarlyStoppingCallback) for callback in self.callback_handler.callbacks)
        return stops or self.args.load_best_model_at_end or self.args.metric_for_best_model is not None

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As Trainer's. Raises InputError for training records: scores have no noise, and get to the logs."""
        own: Any = self.eval_dataset
        data = own if eval_dataset is None else own[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        self._evaluations.check(data, self._chooses)
        return super().evaluate(eval_dataset, *args, **kwargs)

    def _without_loss(self, output: TrainOutput) -> TrainOutput:
        if self.log_private_loss:
            return output
        return TrainOutput(output.global_step, math.nan, _without(output.metrics, PRIVATE_LOGS))

    def get_train_dataloader(self) -> Any:
        return Tickets(self.train_dataset, self._epoch, opened(self.plan)[0].steps, lambda: self._run.updates)

    @property
    def _run(self) -> Private:
        assert self.private is not None
        return self.private

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Where to begin: with transformers' state, but at the step up to which the private run has come."""
        super()._init_training_state(max_steps, *args, **kwargs)
        self._open(max_steps)
        if self.state.global_step > self._run.updates:
            raise RunError(
                f"The checkpoint is at step {self.state.global_step:,}, and the run in {str(self.private_dir)!r} at "
                f"step {self._run.updates:,}: one of them is an older copy. Resume with the latest of both."
            )
        self.state.global_step = self._run.updates
        return self._run.updates // self._epoch, 0

    def _open(self, max_steps: int) -> None:
        """Make model and optimizer private. The schedule goes first: to build one sets learning rates."""
        optimizer: Optimizer = self.create_optimizer()
        schedule = super().create_scheduler(max_steps, optimizer)
        data, collate = self._data_and_collator()
        assert self.model is not None
        metadata = {"training": {"label_smoothing": self.args.label_smoothing_factor}}
        self.private = make_private(
            self.model,
            optimizer,
            TrainedRecords(data, collate, **self._of_persons),
            self.plan,
            budgets=self.budgets,
            run_dir=RunFolder(self.private_dir, self._resumes, metadata=metadata),
            seed=self._private_seed,
            performance=self._performance,
        )
        self.private.register_for_checkpointing(schedule=schedule)
        self._steps = Steps(self.private, schedule, self._losses)
        self.optimizer = StepOptimizer(optimizer, self._steps)

    def _data_and_collator(self) -> tuple[Any, Any]:
        if hasattr(self.train_dataset, "column_names"):
            return Records(self._remove_unused_columns(self.train_dataset, "training")), self.data_collator
        collate: Any = self._get_collator_with_removed_columns(self.data_collator, "training")
        if collate is not self.data_collator:
            given = self.data_collator
            collate.__qualname__ = getattr(given, "__qualname__", type(given).__name__)  # the name in messages
        return Records(self.train_dataset), collate

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """The schedule, of which there is one in a run."""
        if self._steps is None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = self._steps.schedule
        return self.lr_scheduler

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One draw, up to its update, which `optimizer.step()` makes. Returns the mean loss if it is logged, or 0."""
        assert self._steps is not None
        model.train()
        self._model = model
        return zero(self.args.device, self._steps.begin(self.log_private_loss))

    def _losses(self, batch: Any) -> Tensor:
        with self.compute_loss_context_manager():
            return self.record_losses(self._model, self._prepare_inputs(batch))

    # -- what is logged and saved ------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, without the training loss unless log_private_loss is True."""
        super().log(logs if self.log_private_loss else _without(logs, PRIVATE_LOGS), start_time)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_evaluate or self.control.should_save:
            self._run.checkpoint()  # nothing of a step gets out before it is durable
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """The private run ends first: the Trainer may now load the best of its checkpoints into the model."""
        self._run.checkpoint()
        self._run.close()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[no-untyped-call]

    def floating_point_ops(self, inputs: Any) -> int:
        """0: the true number depends on the lengths of the records that were drawn."""
        return 0

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> None:
        """Between steps there are no gradients here."""

    def num_examples(self, dataloader: Any) -> int:
        """How many records are trained on, or persons, for the log and its records per second."""
        return self._units if isinstance(dataloader, Tickets) else int(super().num_examples(dataloader))

    def get_total_train_batch_size(self, args: Any) -> int:
        """How many records a draw is expected to have."""
        return int(self._expected)

    def _save_rng_state(self, output_dir: str) -> None:
        """Not saved: how far the generators have come depends on who was drawn. private_dir has their states."""
        Path(output_dir).mkdir(parents=True, exist_ok=True)

    # private_dir has all of these.
    def _load_rng_state(self, checkpoint: str | None) -> None: ...

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None: ...

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None: ...

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: each trial would spend the budgets again."""
        raise InputError(
            "hyperparameter_search trains once for each trial, and each run spends the budgets again. Make a plan for "
            "several runs (epsilons.plan(…, runs=n)) and one PrivateTrainer for each, with plan=PlanFolder."
        )


class PrivateSeq2SeqTrainer(PrivateTrainer, Seq2SeqTrainer):
    """PrivateTrainer that evaluates and predicts as transformers' Seq2SeqTrainer does, by generated texts.

    args    Seq2SeqTrainingArguments, with predict_with_generate=True for texts

    All other arguments are those of PrivateTrainer.
    """


class _OfRecords:
    """compute_loss_func(outputs, labels) under the signature that Trainer calls."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        # As Trainer passes it: a loss of one record must not depend on it.
        self._more = {name: None for name in ("num_items_in_batch",) if name in inspect.signature(function).parameters}

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        return self._function(outputs, labels, **self._more)


class _Epochs(TrainerCallback):
    """Sets state.epoch by the number of steps: a resumed epoch has fewer batches than the Trainer counts on."""

    def __init__(self, draws: int) -> None:
        self._draws = draws

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.epoch = state.global_step / self._draws


def _without(named: Mapping[str, Any], names: Any) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name not in names}


def _check_methods(cls: type) -> None:
    for name in ("get_train_dataloader", "_get_train_sampler"):
        if getattr(cls, name) not in (getattr(Trainer, name), PrivateTrainer.__dict__.get(name)):
            raise InputError(
                f"{cls.__name__} overrides {name}. Who is drawn follows from the budgets, by a coin for each record. "
                "Leave it out, and prepare records in train_dataset or data_collator."
            )
    if cls.compute_loss is not Trainer.compute_loss:  # type: ignore[attr-defined]
        raise InputError(
            f"{cls.__name__} overrides compute_loss, which returns one number for a batch. Override "
            "record_losses(model, inputs) -> (batch,), one loss per record."
        )


def _check_plan(plan: Plan, steps: int, expected: int) -> None:
    if plan.steps != steps:
        raise InputError(
            f"The plan has {plan.steps:,} steps, and args ask for {steps:,}. Set max_steps={plan.steps} in "
            "TrainingArguments."
        )
    if plan.expected_batch != expected:
        raise InputError(
            f"The plan expects {plan.expected_batch:g} {plan.unit}s in a draw, and args ask for {expected:,}: "
            "per_device_train_batch_size × gradient_accumulation_steps."
        )
