"""The door for Lightning: `Trainer(strategy=PrivateStrategy(budgets))`. The LightningModule stays as it is.

One step of the Trainer is one draw. Its loader gives tickets; the records of the draw are read inside `training_step`,
which is called for each physical batch. So `global_step`, schedules,
validation and checkpoints count noisy updates. See docs/doors/lightning.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    SpikeDetection,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from .budgets.budgets import Budgets
from .doors.foreign_loop import ForeignLoop
from .errors import CallOrderError, EpsilonsWarning, InputError
from .ledger.plan_folder import PlanFolder, opened
from .planning import Plan, Recipe, plan
from .training import Performance, Private, make_private
from .training.datasets import shares_records
from .training.values import Randomness, Records, RunFolder, as_folder, draws_of

__all__ = ["PrivateStrategy"]

#: Precisions of the Trainer that need no scaled loss.
PRECISIONS = ("32-true", "64-true", "bf16-mixed")
#: Methods of a LightningModule that this door does not call, and what to do instead.
NOT_CALLED = {
    "backward": "The backward pass ends at the outputs of the model. Leave the method out.",
    "configure_gradient_clipping": "Each record's gradient is clipped by itself. Leave the method out.",
    "on_before_batch_transfer": "The Trainer's batches are tickets. Put this into the data set or its collate_fn.",
}

#: Settings of the Trainer that are refused where they are not the usual ones, and what to do instead.
REFUSED = {
    "accumulate_grad_batches": "A draw is divided by Performance(max_physical_batch=…). Leave it at 1",
    "gradient_clip_val": "Each record's gradient is clipped by clip_norm. Leave it out",
    "precision": f"Use one of {', '.join(PRECISIONS)}",
    "devices": "PrivateStrategy trains on one device",
    "limit_train_batches": "A plan's draws are whole. Use max_steps for a shorter run",
    "overfit_batches": "Each draw is random. Leave it out",
    "reload_dataloaders_every_n_epochs": "Budgets belong to the records of one data set. Leave it out",
}

_SEARCHES = "A search trains on the records before the run, and would spend its budgets. Choose on public data"
REFUSED_CALLBACKS: dict[type[Callback], str] = {
    LearningRateFinder: _SEARCHES,
    BatchSizeFinder: _SEARCHES,
    GradientAccumulationScheduler: REFUSED["accumulate_grad_batches"],
    BackboneFinetuning: "The trained parameters are fixed when the run begins. Freeze them before, or train two runs",
    ModelPruning: "It writes to weights during training. Prune a model before the run, or after it",
    SpikeDetection: "It follows raw losses, and would decide by them what is released. Leave it out",
}


class PrivateStrategy(SingleDeviceStrategy):
    """A Lightning strategy that trains under budgets, on one device.

    budgets        one epsilon per record of the training data, in the data set's order; or of persons
    records        Records(None, persons=…), for budgets of persons, whose rows are read; batch_size then counts persons
    plan           a Plan, or the PlanFolder of several runs, of as many steps as the Trainer makes; by default planned
                   with the loader's batch_size as the expected batch, clip_norm, strategy and accountant
    seed, performance   as of `make_private`; the loader's workers and collate_fn are used
    run_dir        a folder for plan, ledger and key, outside the folders of loggers and checkpoints; None keeps the
                   ledger in memory. RunFolder(path, resume=True) continues a run; pass the newest checkpoint as
                   ckpt_path to `Trainer.fit`
    log_private_loss   True sends what training_step logs, which has no noise, to the loggers, and its loss to callbacks
    options        as of SingleDeviceStrategy: device

    After fit, `strategy.private` has the ledger. The strategy trains one run. `fit` raises InputError for settings of
    the Trainer or the module that would scale, split, clip or apply gradients in another way.
    """

    def __init__(
        self,
        budgets: Budgets,
        *,
        records: Records | None = None,
        plan: Plan | PlanFolder | None = None,
        clip_norm: float = 1.0,
        strategy: str = "scale",
        accountant: str = "pld",
        run_dir: str | Path | RunFolder | None = None,
        seed: int | Randomness | None = None,
        performance: Performance | None = None,
        log_private_loss: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**{"device": "cpu"} | options)
        self._logs_loss = log_private_loss
        self.budgets, self.private = budgets, None
        self.plan, self._plan_folder = _opened(plan)
        self._recipe = clip_norm, strategy, accountant
        self._records, self._seed, self._performance = records or Records(None), seed, performance
        folder = as_folder(run_dir)
        if self._records.data is not None:
            raise InputError("The Trainer's loader has the data: Records(None, persons=…) says whose they are.")
        if folder.checkpoint_every is not None:
            raise InputError("A run's checkpoints are Lightning's own here. Leave out checkpoint_every.")
        self._folder = replace(folder, checkpoint_every=10**9)  # only together with Lightning's
        self._loader: DataLoader[Any] | None = None
        self._evaluated: list[Any] = []  # data sets
        self._loop: ForeignLoop | None = None
        self._draws: Iterator[Iterator[Any]] = iter(())
        self._draw: Iterator[Any] = iter(())

    plan: Plan | None
    private: Private | None

    # -- beginning and end -----------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        is_fit = trainer.state.fn == "fit"
        if is_fit and self.private is not None:
            raise InputError(
                "This PrivateStrategy has trained a run already, and another one spends the budgets again. Build a "
                "new PrivateStrategy for it. (A search for a learning rate or a batch size is such a run.)"
            )
        if is_fit:
            check_trainer(trainer, self.precision_plugin.precision, self._folder.path)
        super().setup(trainer)
        if is_fit:
            check_module(self._module, self.optimizers, self.lr_scheduler_configs)
            if self._loader is not None:
                self._begin(trainer, self._loader)

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self._module.trainer
        if trainer.state.fn == "fit" and trainer.state.stage in ("validate", "sanity_check"):
            self._evaluated.append(getattr(dataloader, "dataset", None))
            self._check_evaluated(trainer)
        if trainer.state.fn != "fit" or trainer.state.stage != "train" or self.private is not None:
            return dataloader
        if not isinstance(dataloader, DataLoader):
            raise InputError(f"Training needs one torch DataLoader, got a {type(dataloader).__name__}.")
        self._loader = dataloader
        self._check_evaluated(trainer)
        if self.optimizers:  # configure_optimizers may ask for the number of batches before there is an optimizer
            self._begin(trainer, dataloader)
        return Tickets(self, draws_of(dataloader, self.budgets), dataloader.dataset)

    def _check_evaluated(self, trainer: Trainer) -> None:
        """Raise InputError for an evaluation on training records that selects weights, or goes to loggers."""
        monitors = [c for c in trainer.callbacks if getattr(c, "monitor", None) is not None]  # type: ignore[attr-defined]
        if self._loader is None or (self._logs_loss and not monitors):
            return
        train = self._loader.dataset
        if any(data is train or (data is not None and shares_records(train, data)) for data in self._evaluated):
            raise InputError(
                "A validation loader has records of the training data. Their scores have no noise, and "
                + (f"{type(monitors[0]).__name__} would choose by them." if monitors else "would go to the loggers.")
                + " Validate on records that have no budget."
                + ("" if monitors else " If the logs stay private: PrivateStrategy(log_private_loss=True).")
            )

    def _begin(self, trainer: Trainer, loader: DataLoader[Any]) -> None:
        clip_norm, strategy, accountant = self._recipe
        draws = draws_of(loader, self.budgets)
        steps = steps_of(trainer, draws)
        if self.plan is None:
            recipe = Recipe(steps, loader.batch_size or 1, clip_norm)
            self.plan = plan(self.budgets, recipe, strategy=strategy, accountant=accountant)
        if self.plan.steps != steps:
            what = f"The plan has {self.plan.steps:,} steps, and the Trainer makes {steps:,}"
            raise InputError(f"{what}. Plan as many steps as max_steps, or max_epochs times {draws:,} draws.")
        module, (optimizer,) = self._module, self.optimizers
        with without_trainer(module):  # what a seed's key depends on is the module, and not its trainer
            self.private = make_private(
                module,
                optimizer,
                replace(self._records, data=loader),
                self._plan_folder or self.plan,
                budgets=self.budgets,
                run_dir=self._folder,
                seed=self._seed,
                performance=self._performance,
            )
        self._check_position(trainer, self.private.updates)
        self._loop = ForeignLoop(self.private)
        self._draws = self._loop.draws

    def _check_position(self, trainer: Trainer, updates: int) -> None:
        if updates != trainer.global_step:
            assert self.private is not None
            self.private._checkpointer.forget()
            self.private.close()
            raise InputError(
                f"The run in {self._folder.path} is at update {updates:,}, and the Trainer begins at step "
                f"{trainer.global_step:,}. Resume both together: pass the checkpoint that was saved last as ckpt_path "
                "to fit, and RunFolder(path, resume=True) of that run to PrivateStrategy."
            )

    def teardown(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            if loop.private.is_finished:
                # All updates are made: from now on the weights may be exchanged, as averages of weights do.
                loop.private._noisy_update.forget_contents()
                next(self._draws, None)  # settles the ledger
            loop.private._checkpointer.forget()  # a run continues from Lightning's last checkpoint
            loop.close()
        super().teardown()

    # -- one step of the Trainer -----------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, Ticket) else super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, ticket: Any, *args: Any, **kwargs: Any) -> Any:
        """One draw, up to its last batch; returns that batch's loss if it is logged, otherwise 0."""
        if not isinstance(ticket, Ticket):
            raise InputError("Training needs one DataLoader; got several, or a batch of another loader.")
        ticket.use()
        loop = self._open_loop
        self._draw = next(self._draws)
        for batch in self._draw:
            output = self._step_of(batch, *args, **kwargs)
            loss = output["loss"] if isinstance(output, dict) else output
            if loss is None:
                raise InputError("training_step returned None. No batch may be skipped; return its loss.")
            loop.backward(loss)
            if loop.clip():
                shown = loss.detach().mean() if self._logs_loss else torch.zeros((), device=loss.device)
                shown.requires_grad_()
                return output | {"loss": shown} if isinstance(output, dict) else shown
            loop.step()
        return torch.zeros((), device=self.root_device, requires_grad=True)  # an empty draw, which was noise alone

    def _step_of(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        batch = self.batch_to_device(self.precision_plugin.convert_input(batch))
        with self.precision_plugin.train_step_context(), nullcontext() if self._logs_loss else without_loggers(module):
            return module.training_step(batch, *args, **kwargs)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return closure_loss  # training_step has made it

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        value = closure()
        check_monitors(self._module.trainer)
        if self._open_loop.private.is_last:
            self._open_loop.step()
            next(self._draw, None)  # the draw ends
        return value

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """The run's own checkpoint comes first, so that nothing of a step gets out before it is durable."""
        if self._loop is not None:
            self._loop.private.checkpoint()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _open_loop(self) -> ForeignLoop:
        if self._loop is None:
            raise CallOrderError("The run is closed: training steps belong to Trainer.fit.")
        return self._loop


class Ticket(Tensor):
    """What the Trainer gets for a batch. It counts as one record, because the number drawn is not public."""

    is_used = False

    def use(self) -> None:
        """Make its draw. Raises CallOrderError the second time."""
        if self.is_used:
            raise CallOrderError(
                "optimizer.step was called twice in one step of the Trainer. Each call is another draw, which the "
                "Trainer would not count. Call it once in optimizer_step of the module, or leave that method out."
            )
        self.is_used = True


class Tickets:
    """A loader of as many tickets as an epoch has draws."""

    def __init__(self, strategy: PrivateStrategy, draws: int, dataset: Any) -> None:
        self._strategy, self._draws, self.dataset = strategy, draws, dataset

    def __len__(self) -> int:
        return self._draws

    def __iter__(self) -> Iterator[Tensor]:
        private = self._strategy.private
        assert private is not None
        for _ in range(self._draws - private.updates % self._draws):
            yield torch.zeros(1).as_subclass(Ticket)


# -- checks --------------------------------------------------------------------------------------------------------


def _opened(given: object) -> tuple[Plan | None, PlanFolder | None]:
    if given is None:
        return None, None
    if not isinstance(given, Plan | PlanFolder):
        raise InputError(f"plan= takes a Plan or a PlanFolder, got a {type(given).__name__}. For a file: Plan.load.")
    return opened(given)


def check_module(module: LightningModule, optimizers: Sequence[Optimizer], schedules: Sequence[Any]) -> None:
    """Refuse a module that would compute or apply gradients in another way. Raises InputError."""
    if not module.automatic_optimization:
        raise InputError(
            "automatic_optimization=False: the module steps by itself. Leave it at True, or use "
            "epsilons.make_private in a loop of your own."
        )
    if len(optimizers) != 1:
        raise InputError(
            f"Training needs one optimizer, and configure_optimizers gave {len(optimizers)}. Use one with "
            "several groups of parameters."
        )
    for name, advice in NOT_CALLED.items():
        if is_overridden(name, module):
            raise InputError(f"{type(module).__name__} overrides {name}, which is not called here. {advice}")
    for config in schedules:
        if config.reduce_on_plateau:
            raise InputError(
                "A scheduler follows a metric (ReduceLROnPlateau). Metrics on private records are not private, and "
                "would steer training. Use a schedule that is fixed beforehand."
            )


def check_trainer(trainer: Any, precision: str, run_dir: Any) -> None:
    """Refuse settings that would scale, split or clip gradients, or draw other records. Raises InputError."""
    for callback in trainer.callbacks:
        for kind, advice in REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                raise InputError(f"{kind.__name__} cannot be used with PrivateStrategy. {advice}.")
    shown = {"precision": repr(precision), "devices": trainer.num_devices}
    is_wrong = {
        "accumulate_grad_batches": trainer.accumulate_grad_batches != 1,
        "precision": precision not in PRECISIONS,
        "devices": trainer.num_devices > 1,
        "limit_train_batches": trainer.limit_train_batches != 1.0 and not trainer.fast_dev_run,
    }
    for name, advice in REFUSED.items():
        value = shown.get(name, getattr(trainer, name, None))
        if is_wrong.get(name, bool(value)):
            raise InputError(f"Trainer({name}={value}) cannot be used with PrivateStrategy. {advice}.")
    _check_folders(trainer, run_dir)


def _check_folders(trainer: Trainer, run_dir: Any) -> None:
    """The key of a run must not lie where loggers upload from."""
    if run_dir is None:
        return
    public = [logger.log_dir for logger in trainer.loggers] + [
        getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks
    ]
    own = Path(run_dir).resolve()
    for folder in filter(None, public):
        if own.is_relative_to(Path(folder).resolve()):
            raise InputError(
                f"run_dir={str(run_dir)!r} lies in {folder}, where a logger or ModelCheckpoint keeps files that may be "
                "uploaded. run_dir holds the secret key of the run. Choose a folder outside."
            )


def steps_of(trainer: Trainer, draws: int) -> int:
    """How many steps the Trainer makes in all. Raises InputError if that is not fixed."""
    epochs = trainer.max_epochs if trainer.max_epochs is not None else -1
    limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
    limits += [epochs * draws] if epochs >= 0 else []
    if not limits or min(limits) < 1:
        raise InputError(
            "A plan needs a fixed number of steps. Give the Trainer max_epochs or max_steps, of at least one step."
        )
    return min(limits)


def check_monitors(trainer: Trainer) -> None:
    """Raise InputError if a callback stops training, or chooses weights, by what `training_step` has logged."""
    logged = {key.split(".")[1] for key in trainer._results or {} if key.startswith("training_step.")}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        if monitor in logged | {f"{name}{end}" for name in logged for end in ("_step", "_epoch")}:
            raise InputError(
                f"{type(callback).__name__} follows {monitor!r}, which training_step logs: a loss or score of private "
                "records, without noise, would decide what is released. Monitor a metric of public data."
            )


@contextmanager
def without_loggers(module: LightningModule) -> Iterator[None]:
    """What the module logs reaches the progress bar, and no logger."""
    log = module.log

    def shown(name: str, value: Any, prog_bar: bool = False, logger: bool | None = None, **options: Any) -> None:
        if logger is not False and module.trainer.loggers:
            warnings.warn(_WITHHELD, EpsilonsWarning, stacklevel=2)
        log(name, value, prog_bar=prog_bar, logger=False, **options)

    vars(module)["log"] = shown
    try:
        yield
    finally:
        del vars(module)["log"]


_WITHHELD = (
    "What training_step logs has no noise, so it is shown on the progress bar and sent to no logger. If the logs stay "
    "private: PrivateStrategy(log_private_loss=True). To log in silence: self.log(…, logger=False)."
)


@contextmanager
def without_trainer(module: LightningModule) -> Iterator[None]:
    trainer, module._trainer = module._trainer, None
    try:
        yield
    finally:
        module._trainer = trainer
