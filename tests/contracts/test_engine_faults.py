"""A record that is not finite contributes nothing, and changes nothing for others, with every engine."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

import epsilons
from epsilons.clipping import ENGINES, NonFiniteGradientError
from epsilons.draws.randomness import key_from_seed
from sums import attached, share
from sums import away as distance
from zoo import Case, build, clip_norms

from .test_engines import CLOSE, clipped

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("bad", share([float("nan"), float("inf"), 1e30], every=3))
@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("name", ["linear", "two layers", "conv", "layer norm", "attention", "gru", "time-first lstm"])
def test_a_broken_record_is_never_added_up_silently(name, which, bad):
    """An engine gives the sum of the others, or asks to repeat the physical batch record by record."""
    case = build(name)
    reference, made = attached("loop", case), attached(which, case)
    for number in range(3):
        inputs, targets = case.batch(4, seed=number)
        clip_norm, weight = clip_norms(4, 0.3), torch.ones(4)
        others = [0, 1, 3]
        expected = clipped(
            reference, case, tuple(t[others] for t in inputs), targets[others], clip_norm[others], weight[others]
        )
        if number:  # the first batch is clean, so that its pattern is known
            inputs = tuple(t.clone() for t in inputs)
            inputs[0][2] = bad
        try:
            ours = clipped(made, case, inputs, targets, clip_norm, weight)
        except NonFiniteGradientError:
            continue
        if number and not math.isfinite(bad):
            assert distance(ours, expected) <= CLOSE * float(clip_norm.max())
        limit = float((weight * clip_norm).sum())
        assert distance(ours, [torch.zeros_like(o) for o in ours]) <= limit


@pytest.mark.parametrize("which", ENGINES)
def test_a_broken_record_alone_contributes_nothing_or_is_reported(which):
    case = build("two layers")
    made = attached(which, case)
    inputs, targets = (torch.full((1, 6), float("nan")),), torch.tensor([0])
    for _ in range(2):
        try:
            ours = clipped(made, case, inputs, targets, torch.ones(1), torch.ones(1))
        except NonFiniteGradientError:
            continue
        assert all(not o.any() for o in ours)


def _plan(records: int) -> tuple[epsilons.Budgets, epsilons.Plan]:
    budgets = epsilons.Budgets([1.0, 2.0, 4.0, 8.0] * (records // 4))
    recipe = epsilons.Recipe(steps=4, batch_size=records * 0.4, clip_norm=0.3)
    return budgets, epsilons.plan(budgets, recipe, accountant="rdp")


def _train(
    which: str, case: Case, inputs: tuple[Tensor, ...], targets: Tensor, counts: Tensor, largest: int | None
) -> list[Tensor]:
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    budgets, plan = _plan(len(targets))
    data, settings = (*inputs, targets, counts), epsilons.Performance(engine=which, max_physical_batch=largest)
    with epsilons.make_private(
        model, optimizer, data, plan, budgets=budgets, key=key_from_seed(3), performance=settings
    ) as private:
        for *given, wanted, counted in private.batches:
            private.backward(case.losses(model(*given), wanted) * counted)
            private.step()
        assert private.is_finished
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("largest", share([3, None, 1], every=3))
@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize(
    "name", share(["two layers", "conv", "lstm, last output", "time-first lstm", "gate", "attention"], every=2)
)
def test_a_broken_record_contributes_nothing_and_spoils_nobody(name, which, largest):
    """The oracle: the same run in which that record is whole and its loss is multiplied by 0."""
    case = build(name)
    inputs, targets = case.batch(24, seed=5)
    whole = torch.ones(24)
    silent = whole.clone()
    silent[5] = silent[6] = 0.0
    expected = _train(which, case, inputs, targets, silent, largest)
    broken = tuple(t.clone() for t in inputs)
    broken[0][5] = float("nan")
    broken[0][6] = float("inf")
    ours = _train(which, case, broken, targets, whole, largest)
    for a, b in zip(ours, expected, strict=True):
        assert torch.isfinite(a).all()
        assert (a - b).abs().max() <= 1e-6
