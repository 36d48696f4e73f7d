"""The arguments of make_private: what is refused, and what to do instead."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from ..accounting import Accountant
from ..budgets.budgets import DEFAULT_DELTA, Budgets
from ..core.disclosure import how_many
from ..core.mechanism import SMALLEST_DELTA, SampledGaussian
from ..errors import BudgetError, CallOrderError, DataError, EpsilonsWarning, InputError, ModelError
from ..ledger.plan_folder import PlanFolder, opened
from ..planning import Phase, Plan, Recipe, plan
from ..training import Performance
from ..training.values import as_records, draws_of
from .loader import PrivateLoader
from .wrappers import PrivateModule, PrivateOptimizer

#: All are computed by the same engines here; "ghost" also returns a criterion, as in Opacus.
MODES = ("hooks", "functorch", "ew", "ghost")


@dataclass(frozen=True)
class Request:
    """The arguments of make_private and make_private_with_epsilon that both have.

    others   arguments that Opacus hands on to its optimizer or accountant
    """

    module: nn.Module
    optimizer: Optimizer
    criterion: Any
    data_loader: DataLoader[Any]
    max_grad_norm: float
    batch_first: bool
    loss_reduction: str
    poisson_sampling: bool
    clipping: str
    noise_generator: Any
    grad_sample_mode: str
    run_dir: str | Path | None
    resume: bool
    performance: Performance | None
    seed: int | None
    others: Mapping[str, Any]

    @property
    def model(self) -> nn.Module:
        """The caller's model. Raises CallOrderError for the model of a run that is not closed."""
        if not isinstance(self.module, PrivateModule):
            return self.module
        if not self.module.is_closed:
            raise CallOrderError(
                "This model belongs to a private run already. Call its remove_hooks() first to end that run; a second "
                "run on the same records spends a second budget."
            )
        return self.module._module

    @property
    def plain_optimizer(self) -> Optimizer:
        """The caller's optimizer."""
        given = self.optimizer
        return given.original_optimizer if isinstance(given, PrivateOptimizer) else given

    @property
    def loader(self) -> DataLoader[Any]:
        """The caller's data loader."""
        return self.data_loader.given if isinstance(self.data_loader, PrivateLoader) else self.data_loader

    def check(self) -> None:
        """Raise InputError for what is not supported, DataError for a data loader that cannot be replaced."""
        self._check_settings()
        _check_model(self.model, self.plain_optimizer)
        check_loader(self.loader)
        if not self.poisson_sampling:
            warnings.warn(
                "poisson_sampling=False has no effect. The guarantee holds for Poisson sampling, so records are drawn "
                "in that way, and batches vary in size.",
                EpsilonsWarning,
                stacklevel=4,
            )
        if self.loader.generator is not None:
            warnings.warn(
                "The generator of the data loader has no effect: records are drawn with the run's secret key. For a "
                "repeatable run give seed=, and leave the generator out.",
                EpsilonsWarning,
                stacklevel=4,
            )

    def _check_settings(self) -> None:
        if self.others:
            raise InputError(
                f"make_private has no argument {', '.join(self.others)}. Opacus hands it on to adaptive clipping, "
                "which is not supported, or to its accountant. Leave it out."
            )
        if not self.batch_first:
            raise InputError(
                "batch_first=False is not supported. Give the model its batch dimension first (batch_first=True in "
                "recurrent layers)."
            )
        if self.clipping != "flat" or not isinstance(self.max_grad_norm, int | float):
            raise InputError(
                f"clipping={self.clipping!r} is not supported: a budget bounds the norm of a record's whole gradient. "
                "Leave clipping out, and give max_grad_norm as one number."
            )
        if self.noise_generator is not None:
            raise InputError(
                "noise_generator is not supported: noise is made from the run's secret key. For a repeatable run give "
                "seed=."
            )
        if self.grad_sample_mode not in MODES:
            raise InputError(
                f"grad_sample_mode={self.grad_sample_mode!r} is not supported; use one of {', '.join(MODES)}. "
                "For gradients of your own use epsilons.make_private with losses per record."
            )
        if self.loss_reduction not in ("mean", "sum"):
            raise InputError(f"loss_reduction must be 'mean' or 'sum', got {self.loss_reduction!r}.")


def _check_model(model: nn.Module, optimizer: Optimizer) -> None:
    name = type(model).__name__
    if name == "DifferentiallyPrivateDistributedDataParallel":
        raise ModelError(
            f"Got a model wrapped in {name}. Pass the model itself (model.module) on every rank: the clipped sums are "
            "added up here."
        )
    held = {id(p) for p in model.parameters()}
    foreign = sum(id(p) not in held for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ModelError(
            f"The optimizer holds {foreign} parameters that are not the model's. One run has one model and one "
            "optimizer: put several models into one nn.Module, or train each in a run of its own, with a budget of "
            "its own."
        )


def check_loader(loader: DataLoader[Any]) -> None:
    """Raise DataError for a data loader that does more than to shuffle records or to go through them."""
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            "The data loader has an IterableDataset. Each record is drawn by its own coin, which needs a map-style "
            "data set, with __len__ and __getitem__."
        )
    as_records(loader)


# -- Plans from the arguments of Opacus: q = 1 / number of batches, steps = epochs times number of batches

#: A plan for one noise multiplier is certified for a little more than its spend, so that it verifies.
MARGIN = 1 + 1e-9


def records(loader: DataLoader[Any]) -> int:
    """How many records its data set has."""
    return len(loader.dataset)  # type: ignore[arg-type]  # map-style: checked before


def persons_in(budgets: Budgets | None) -> int | None:
    """How many persons have budgets; None for budgets of records."""
    return len(budgets) if budgets is not None and budgets.unit == "person" else None


def recipe_of(loader: DataLoader[Any], epochs: float, max_grad_norm: float, budgets: Budgets | None = None) -> Recipe:
    """A draw is expected to have records / draws records, or persons / draws persons (`draws_of`)."""
    if not (math.isfinite(epochs) and epochs > 0):
        raise InputError(f"epochs must be a positive number, got {epochs}.")
    draws = draws_of(loader, budgets)
    count = persons_in(budgets) or records(loader)
    return Recipe(math.ceil(epochs * draws), count / draws, max_grad_norm)


def with_epsilon(
    loader: DataLoader[Any],
    budgets: Budgets,
    epochs: float,
    max_grad_norm: float,
    strategy: str,
    accountant: Accountant,
) -> Plan:
    """The plan that spends these budgets in so many epochs."""
    return plan(budgets, recipe_of(loader, epochs, max_grad_norm, budgets), strategy, accountant)


def check_given(
    given: Plan | PlanFolder, loader: DataLoader[Any], epochs: float, budgets: Budgets | None = None
) -> Plan:
    """The caller's own plan. Raises InputError if it is for other draws than the loop makes."""
    if not isinstance(given, Plan | PlanFolder):
        raise InputError(f"plan= takes a Plan or a PlanFolder, got a {type(given).__name__}. For a file: Plan.load.")
    own, recipe = opened(given)[0], recipe_of(loader, epochs, 1.0, budgets)
    if own.steps != recipe.steps:
        raise InputError(
            f"The plan has {own.steps:,} steps, and {epochs:g} epochs of {draws_of(loader, budgets):,} "
            f"{'batches' if own.unit == 'record' else 'draws'} have {recipe.steps:,}. Plan as many "
            "steps as the loop makes."
        )
    if not math.isclose(own.expected_batch, recipe.batch_size):
        raise InputError(
            f"The plan expects {own.expected_batch:g} {own.unit}s in a draw, and the data loader has "
            f"{recipe.batch_size:g} in a batch on average. Plan with Recipe(steps, {own.unit}s / batches, clip_norm)."
        )
    return own


def with_noise(
    loader: DataLoader[Any], noise_multiplier: float, max_grad_norm: float, most_epochs: float, accountant: Accountant
) -> tuple[Plan, Budgets]:
    """The plan of one noise multiplier for all records, certified at what `most_epochs` epochs spend."""
    recipe = recipe_of(loader, most_epochs, max_grad_norm)
    count = records(loader)
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise InputError(
            f"noise_multiplier must be a positive number, got {noise_multiplier}. Without noise no finite epsilon can "
            "be promised. To train without privacy leave the engine out."
        )
    delta = max(SMALLEST_DELTA, min(DEFAULT_DELTA, 0.1 / count))
    rate = 1 / len(loader)
    epsilon = accountant([SampledGaussian(rate, noise_multiplier, recipe.steps)], delta)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise InputError(
            f"noise_multiplier={noise_multiplier:g} has no finite epsilon over {recipe.steps:,} steps "
            f"(most_epochs={most_epochs:g}). Raise the noise, or give PrivacyEngine(most_epochs=…) the epochs that "
            "you train at most."
        )
    budgets = Budgets(np.full(count, epsilon * MARGIN), delta=delta)  # get_epsilon takes a delta of the caller
    one = np.ones(1)
    phase = Phase(
        steps=recipe.steps,
        sample_rate=rate * one,
        clip_norm=max_grad_norm * one,
        weight=one,
        noise_std=noise_multiplier * max_grad_norm,
        expected_batch=recipe.batch_size,
    )
    return Plan.of(budgets, recipe, accountant, phase, strategy="uniform").verify(), budgets


def budgets_of(target: Any, delta: Any, count: int, tiers: Sequence[Any] | None = None) -> Budgets:
    """One budget per record.

    target  epsilon: a number for all, (records,), {tier: epsilon}, or Budgets
    delta   a number for all, or (records,); None for Budgets
    count   number of records
    tiers   (records,) the name of each record's tier

    Raises BudgetError for anything else, without naming a budget.

    >>> budgets_of({"strict": 1.0, "open": 4.0}, 1e-3, 3, ["open", "strict", "open"]).counts
    array([1, 2])
    """
    if tiers is not None and not isinstance(target, Mapping):
        raise BudgetError("tiers= belongs to target_epsilon={tier: epsilon}. Give both, or leave tiers= out.")
    if isinstance(target, Budgets):
        return _with_own_delta(target, delta)
    if isinstance(target, Mapping):
        target = _of_tiers(target, tiers, count)
    values = np.asarray(target, dtype=np.float64)
    return Budgets(np.full(count, float(values)) if values.ndim == 0 else values, delta=delta)


def _with_own_delta(budgets: Budgets, delta: Any) -> Budgets:
    if delta is not None and not np.array_equal(np.broadcast_to(delta, len(budgets)), budgets.delta[budgets.group]):
        raise BudgetError("target_epsilon is a Budgets with deltas of its own, got another target_delta. Give None.")
    return budgets


def _of_tiers(target: Mapping[Any, float], tiers: Sequence[Any] | None, count: int) -> list[float]:
    if tiers is None:
        raise BudgetError(
            "target_epsilon={tier: epsilon} needs tiers=, the name of each record's tier, in data-set order."
        )
    if len(tiers) != count:
        raise BudgetError(f"tiers= needs one name per record, {count:,}, got {len(tiers):,}.")
    unknown = sum(tier not in target for tier in tiers)
    if unknown:
        raise BudgetError(f"{how_many(unknown, count)} records have a tier without an epsilon. Give one for each tier.")
    return [target[tier] for tier in tiers]
