"""PrivacyEngine: the entry of Opacus, with a budget for every record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ..budgets.budgets import Budgets
from ..core.disclosure import has_small_cells
from ..doors.foreign_loop import ForeignLoop
from ..draws.persons_rows import check_number
from ..errors import CallOrderError, EpsilonsError, InputError
from ..ledger.plan_folder import PlanFolder
from ..models import model_checks
from ..planning import Plan
from ..training import Performance, Private, make_private
from ..training.values import Randomness, Records, RunFolder, as_records, draws_of
from . import accountant, arguments
from .accountant import create_accountant
from .arguments import Request
from .loader import PrivateLoader
from .validators import ModuleValidator
from .wrappers import Criterion, PrivateModule, PrivateOptimizer

#: What make_private returns; with grad_sample_mode="ghost" there is a criterion before the data loader.
Made = (
    tuple[PrivateModule, PrivateOptimizer, PrivateLoader]
    | tuple[PrivateModule, PrivateOptimizer, Criterion, PrivateLoader]
)


class PrivacyEngine:
    """Makes a model, an optimizer and a data loader private, as Opacus' class of this name does.

    accountant   "prv" (the default; computed by our PLD) or "rdp"
    secure_mode  True makes each noise value half the sum of four, against attacks on its last bits
    most_epochs  make_private has no number of epochs: so many are certified, and no more can be trained
    checks       has no effect: there is one kind of check, and the loop sees none of its batches

    An engine has one run. Raises InputError for another accountant.
    """

    def __init__(
        self,
        *,
        accountant: str = "prv",
        secure_mode: bool = False,
        most_epochs: float = 200,
        checks: str | None = None,
    ) -> None:
        self.accountant = create_accountant(accountant)
        self.secure_mode, self._most_epochs = secure_mode, most_epochs
        self.private: Private | None = None
        self._module: PrivateModule | None = None

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        run_dir: str | Path | None = None,
        resume: bool = False,
        performance: Performance | None = None,
        seed: int | None = None,
        **others: Any,
    ) -> Any:
        """Train with one noise multiplier for all records, for at most `most_epochs` epochs.

        module, optimizer   as for epsilons.make_private; the returned objects take their places in the loop
        criterion           for grad_sample_mode="ghost" alone; by default nn.CrossEntropyLoss()
        data_loader         its data set, batch size, workers and collate function are used: every record is drawn
                            with probability 1 / len(data_loader) at each step
        noise_multiplier    noise / max_grad_norm
        max_grad_norm       clip norm of each record's gradient
        loss_reduction      how the loop reduces the losses of a batch; "sum" leaves updates undivided
        grad_sample_mode    "hooks", "functorch", "ew": the same; "ghost" returns a criterion, too
        wrap_model          without effect: model and returned module may both be called
        rand_on_empty       True: a batch of an empty draw has one record of zeros, not none; it has no effect
        batch_first, poisson_sampling, clipping, noise_generator   as by default; others are refused or have no effect
        run_dir, resume, performance, seed   as for epsilons.make_private

        Returns (module, optimizer, data_loader), or (module, optimizer, criterion, data_loader). Raises InputError
        for arguments that are not supported, and what epsilons.make_private raises.
        """
        request = Request(
            module, optimizer, criterion, data_loader, max_grad_norm, batch_first, loss_reduction, poisson_sampling,
            clipping, noise_generator, grad_sample_mode, run_dir, resume, performance, seed, others,
        )  # fmt: skip
        _refuse_persons(others)
        self._check(request)
        plan, budgets = arguments.with_noise(
            request.loader, noise_multiplier, max_grad_norm, self._most_epochs, self.accountant.function
        )
        made = self._begin(request, plan, budgets, has_budgets=False)
        made[-1].rand_on_empty = rand_on_empty
        return made

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        target_epsilon: Any,
        target_delta: Any,
        epochs: float,
        max_grad_norm: float,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        tiers: Sequence[Any] | None = None,
        persons: Any = None,
        rows_per_person: int = 1,
        views: int = 1,
        strategy: str = "scale",
        plan: Plan | PlanFolder | None = None,
        run_dir: str | Path | None = None,
        resume: bool = False,
        performance: Performance | None = None,
        seed: int | None = None,
        **others: Any,
    ) -> Any:
        """Train so that every record spends its own budget in `epochs` epochs.

        target_epsilon  a number for all; (records,), one per record in data-set order; {tier: epsilon}; or Budgets
        target_delta    a number for all, or (records,); None with Budgets
        epochs          how many epochs the loop trains; more are refused
        max_grad_norm   mean clip norm of the records
        tiers           (records,) the name of each record's tier, for {tier: epsilon}
        persons, rows_per_person, views
                        as for epsilons.make_private, with Budgets of persons: a draw is expected to have batch_size
                        persons, and an epoch has persons / batch_size draws
        strategy        of epsilons.plan, which computes rates, clip norms and noise
        plan            a plan of your own for these budgets, or the PlanFolder of several runs, which counts this run;
                        max_grad_norm and strategy then have no effect

        All other arguments and results are those of `make_private`. Raises BudgetError for budgets that cannot be
        used, InfeasibleBudgetError for budgets that no noise meets.
        """
        request = Request(
            module, optimizer, criterion, data_loader, max_grad_norm, batch_first, loss_reduction, poisson_sampling,
            clipping, noise_generator, grad_sample_mode, run_dir, resume, performance, seed, others,
        )  # fmt: skip
        self._check(request)
        loader = request.loader
        budgets = arguments.budgets_of(target_epsilon, target_delta, arguments.records(loader), tiers)
        if plan is None:
            plan = arguments.with_epsilon(loader, budgets, epochs, max_grad_norm, strategy, self.accountant.function)
        else:
            arguments.check_given(plan, loader, epochs, budgets)
        check_number("rows_per_person", rows_per_person)
        check_number("views", views)
        given = {"persons": persons, "rows_per_person": rows_per_person, "views": views}
        return self._begin(request, plan, budgets, has_budgets=True, given=given)

    def _check(self, request: Request) -> None:
        if self.private is not None:
            raise CallOrderError(
                "This engine has made a model private already. An engine has one run, and each run spends a budget of "
                "its own: make another PrivacyEngine, and count what both spend together."
            )
        request.check()

    def _begin(
        self,
        request: Request,
        plan: Plan | PlanFolder,
        budgets: Budgets,
        has_budgets: bool,
        given: Mapping[str, Any] | None = None,
    ) -> Made:
        model, optimizer, loader = request.model, request.plain_optimizer, request.loader
        persons, rows = arguments.persons_in(budgets), given or {"rows_per_person": 1, "views": 1}
        read, performance = as_records(loader)
        data = read.data
        self.accountant.begin(has_budgets)
        private = make_private(
            model,
            optimizer,
            Records(data if type(data) is TensorDataset else _Records(data), read.collate_fn, **rows),
            plan,
            budgets=budgets,
            run_dir=RunFolder(
                request.run_dir, request.resume, metadata={"training": {"loss_reduction": request.loss_reduction}}
            ),
            seed=Randomness("secure" if self.secure_mode else "chacha20", request.seed),
            # A draw is one batch, as in Opacus, unless the caller or BatchMemoryManager says otherwise.
            performance=request.performance
            or replace(performance, max_physical_batch=_largest(len(data), persons, rows)),
        )
        try:
            loop = ForeignLoop(private, request.loss_reduction)  # type: ignore[arg-type]  # checked before
        except EpsilonsError:
            private.close()
            raise
        if request.loss_reduction == "sum":
            loop.until_closed(optimizer.register_step_pre_hook(_undivided(private.plan)))
        self.accountant.watch(private)
        self.private, self._module = private, PrivateModule(model, loop)
        made = (
            self._module,
            PrivateOptimizer(optimizer, loop),
            PrivateLoader(loader, loop, self.accountant, draws_of(loader, budgets)),
        )
        if request.grad_sample_mode != "ghost":
            return made
        return *made[:2], Criterion(request.criterion or nn.CrossEntropyLoss(), request.loss_reduction), made[2]

    def close(self) -> None:
        """End the run, and remove all hooks from model and optimizer."""
        if self._module is not None:
            self._module.remove_hooks()

    # -- what was spent ----------------------------------------------------------------------------

    def get_epsilon(self, delta: float) -> float:
        """Epsilon of the records that have spent most: see `Accountant.get_epsilon`."""
        return self.accountant.get_epsilon(delta)

    def get_epsilons(self, delta: float) -> dict[float, float]:
        """{epsilon of the budget: epsilon spent so far, at this delta}; empty if some group is too small to be shown.

        Budgets of one epsilon at several deltas share an entry, with the largest spend.
        """
        if self.private is None or has_small_cells(self.private.plan.groups):
            return {}
        spent: dict[float, float] = {}
        for budget, epsilon in zip(self.private.plan.epsilons, self.accountant.epsilons(delta), strict=True):
            spent[float(budget)] = max(float(epsilon), spent.get(float(budget), 0.0))
        return spent

    # -- checks of models --------------------------------------------------------------------------

    def validate(
        self, *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[Any] | None = None
    ) -> None:
        """Raise an error for a model, optimizer or data loader that cannot be made private."""
        model_checks.check_whole(module)
        model_checks.check_layers(module)
        if optimizer is not None:
            model_checks.check_optimizer(optimizer, module)
        if data_loader is not None:
            arguments.check_loader(data_loader)

    def is_compatible(
        self, *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[Any] | None = None
    ) -> bool:
        """True if `validate` raises nothing."""
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except EpsilonsError:
            return False
        return True

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy of the model that can be trained: see `ModuleValidator.fix`."""
        return ModuleValidator.fix(module)

    # -- checkpoints -------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        *,
        path: accountant.Path,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
        module_state_dict_kwargs: Mapping[str, Any] | None = None,
        torch_save_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Save weights, the optimizer's state and what was spent, in the format of Opacus.

        To continue an interrupted run use make_private(…, run_dir=…, resume=True) instead. Raises InputError if fewer
        than 20 records hold some budget, because the file says what was spent.
        """
        _refuse_schedulers(noise_scheduler, grad_clip_scheduler)
        accountant.save(
            path, module, optimizer, self.accountant, checkpoint_dict, module_state_dict_kwargs, torch_save_kwargs
        )

    def load_checkpoint(
        self,
        *,
        path: accountant.Path,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: Mapping[str, Any] | None = None,
        torch_load_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint of `save_checkpoint` or of Opacus, and count what it has spent.

        After it, make_private may go on, and get_epsilon counts both; make_private_with_epsilon is refused, because
        its plan would spend the budgets a second time. Raises InputError for other files.
        """
        _refuse_schedulers(noise_scheduler, grad_clip_scheduler)
        return accountant.load(path, module, optimizer, self.accountant, module_load_dict_kwargs, torch_load_kwargs)


class _Records(Dataset[Any]):
    """A data set that is read record by record, as a DataLoader reads it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def _largest(rows: int, persons: int | None, given: Mapping[str, Any]) -> int:
    """A physical batch that holds any draw. With persons, it does not depend on the number of rows, which is private.

    rows     of the data set
    persons  how many persons have budgets; None for budgets of records
    """
    most = rows if persons is None else persons * int(given["rows_per_person"])
    return max(1, most * int(given["views"]))


def _refuse_persons(others: Mapping[str, Any]) -> None:
    """Raise InputError for arguments of persons beside a noise multiplier."""
    for name in ("persons", "rows_per_person", "views"):
        if name in others:
            raise InputError(
                f"make_private has one noise multiplier and no budgets, so it takes no {name}=. Use "
                "make_private_with_epsilon with target_epsilon=Budgets.by_person(epsilon, ids), or "
                "epsilons.make_private."
            )


def _undivided(plan: Plan) -> Callable[..., None]:
    """A hook that multiplies the noisy average by its constant divisor: Opacus does not divide sums."""

    def multiply(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(plan.expected_batch)

    return multiply


def _refuse_schedulers(noise_scheduler: Any, grad_clip_scheduler: Any) -> None:
    if noise_scheduler is not None or grad_clip_scheduler is not None:
        raise InputError(
            "Schedulers of noise or of clip norms are not supported: the plan fixes both before training, and "
            "certifies them. Leave the scheduler out."
        )
