"""Plans from the arguments of Opacus: q = 1 / number of batches, steps = epochs times number of batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from ..accounting import Accountant
from ..budgets import DEFAULT_DELTA, Budgets
from ..disclosure import how_many
from ..errors import BudgetError, InputError
from ..mechanism import SMALLEST_DELTA, SampledGaussian
from ..plan_folder import PlanFolder, opened
from ..planning import Phase, Plan, Recipe, plan
from ..training.loaders import draws_of

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
