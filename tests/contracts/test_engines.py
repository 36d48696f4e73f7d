"""Every engine gives the definition's sum: compared with `loop` on the zoo, and `loop` with each record alone.

An engine in ENGINES and a model in the zoo are tested here once they are listed.
"""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import epsilons
from epsilons.clipping import ENGINES, Engine, NonFiniteGradientError, engine
from epsilons.clipping.loop import record_gradient
from epsilons.draws.randomness import key_from_seed
from functional import Model
from sums import OVERSTATED, attached, share
from sums import away as distance
from zoo import TIME, ZOO, Case, build, clip_norms, flat, positions, time_first

pytestmark = pytest.mark.usefixtures("one_thread")


#: How far an engine's sum may be from the definition's, relative to the largest contribution allowed.
CLOSE = 1e-5

#: Sizes of physical batches, in order: alone, few, as many as time steps (4), layers (2), features (5, 6); twice each.
SIZES = [3, 1, 4, 5, 2, 6, 3, 1, 4, 7, 2, 5]
ALONE_FIRST = [1, 4, 2, 5, 6]

#: Engines that are compared with the definition.
OTHERS = [name for name in ENGINES if name != "loop"]

ALIKE = [name for name in ZOO if not build(name).random]  # a record alone is what it is among others
RANDOM = [name for name in ZOO if build(name).random]


def weights(records: int) -> Tensor:
    return torch.linspace(1.5, 0.5, records + 1, dtype=torch.float64)[:-1]


def alone(case: Case, inputs: tuple[Tensor, ...], targets: Tensor) -> list[list[np.ndarray]]:
    """Each record's gradient, from a forward pass on that record alone, by plain `backward`."""
    found = []
    for i in range(len(targets)):
        for p in case.parameters:
            p.grad = None
        case.loss_of(tuple(t[i : i + 1] for t in inputs), targets[i : i + 1]).sum().backward()
        found.append(
            [np.zeros(p.shape) if p.grad is None else p.grad.to_dense().double().numpy() for p in case.parameters]
        )
    for p in case.parameters:
        p.grad = None
    return found


def norm_of(gradient: list[np.ndarray]) -> float:
    return math.sqrt(math.fsum(float(v) ** 2 for g in gradient for v in g.ravel()))


def clipped(
    made: Engine, case: Case, inputs: tuple[Tensor, ...], targets: Tensor, clip_norm: Tensor, weight: Tensor
) -> list[Tensor]:
    """One physical batch through an engine; the same dropout for the same number of records."""
    made.begin(len(targets))
    torch.manual_seed(len(targets))
    return made.clipped_sum(case.loss_of(inputs, targets), clip_norm, weight)


def error(other: Engine, loop: Engine, case: Case, records: int, number: int, typical: float = 0.3) -> float:
    """How far an engine's sum is from the definition's, relative to the largest clip norm; its shapes are checked."""
    inputs, targets = case.batch(records, seed=number)
    clip_norm, weight = clip_norms(records, typical), torch.ones(records)
    expected = clipped(loop, case, inputs, targets, clip_norm, weight)
    ours = clipped(other, case, inputs, targets, clip_norm, weight)
    assert [o.shape for o in ours] == [e.shape for e in expected]
    return distance(ours, expected) / float(clip_norm.max())


# -- what is computed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", share(ALIKE, every=2))
def test_the_definition_is_each_record_alone_clipped_and_added(name):
    case = build(name)
    loop = attached("loop", case)
    for number, records in enumerate(SIZES[:6]):
        inputs, targets = case.batch(records, seed=number)
        gradients = alone(case, inputs, targets)
        norms = np.array([norm_of(g) for g in gradients])
        clip_norm, weight = clip_norms(records, float(np.median(norms))), weights(records)
        factors = weight.numpy() * np.minimum(1, clip_norm.numpy() / (OVERSTATED * norms))
        expected = [
            torch.as_tensor(sum(f * g[k] for f, g in zip(factors, gradients, strict=True)))
            for k in range(len(case.parameters))
        ]
        ours = clipped(loop, case, inputs, targets, clip_norm, weight)
        assert all(o.dtype == torch.float64 for o in ours)
        assert distance(ours, expected) <= CLOSE * float((weight * clip_norm).max())


@pytest.mark.parametrize("which", OTHERS)
@pytest.mark.parametrize("name", share(list(ZOO), every=3))
@pytest.mark.parametrize("sizes", share([SIZES[:6], SIZES, ALONE_FIRST], every=3), ids=["few", "many", "one first"])
def test_every_engine_gives_the_definitions_sum_whatever_came_before(which, name, sizes):
    case = build(name)
    loop, other = attached("loop", case), attached(which, case)
    for number, records in enumerate(sizes):
        inputs, targets = case.batch(records, seed=number)
        huge = torch.full((records,), 1e9, dtype=torch.float64)
        total = clipped(loop, case, inputs, targets, huge, torch.ones(records))
        typical = distance(total, [torch.zeros_like(t) for t in total]) / math.sqrt(records)
        clip_norm, weight = clip_norms(records, typical), weights(records)
        expected = clipped(loop, case, inputs, targets, clip_norm, weight)
        ours = clipped(other, case, inputs, targets, clip_norm, weight)
        assert [o.shape for o in ours] == [p.shape for p in case.parameters]
        assert distance(ours, expected) <= CLOSE * float((weight * clip_norm).max()), f"{records} records"


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("name", ["two layers", "prelu", "embedding", "layer norm", "weight norm", "tied weights"])
def test_no_records_are_a_sum_of_zeros(which, name):
    case = build(name)
    made = attached(which, case)
    inputs, targets = case.batch(3, seed=0)
    for _ in range(2):
        inputs, targets = tuple(t[:0] for t in inputs), targets[:0]
        found = clipped(made, case, inputs, targets, torch.ones(0, dtype=torch.float64), torch.ones(0))
        assert [f.shape for f in found] == [p.shape for p in case.parameters]
        assert all(f.dtype == torch.float64 and not f.any() for f in found)


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("name", RANDOM)
def test_the_dropout_mask_that_was_used_is_the_one_differentiated(which, name):
    """The oracle: central differences in 64 bits of the same losses, with the same seed before each forward pass."""
    case = build(name)
    case.model.double()
    made = attached(which, case)
    inputs, targets = case.batch(5, seed=0)
    inputs = tuple(t.double() for t in inputs)
    direction = [torch.randn(p.shape, dtype=torch.float64) for p in case.parameters]

    def loss_at(shift: float, record: int) -> float:
        with torch.no_grad():
            for p, d in zip(case.parameters, direction, strict=True):
                p += shift * d
            torch.manual_seed(7)
            loss = float(case.loss_of(inputs, targets)[record])
            for p, d in zip(case.parameters, direction, strict=True):
                p -= shift * d
        return loss

    for _ in range(2):  # the second time, patterns are known
        for record in range(5):
            only = torch.zeros(5, dtype=torch.float64)
            only[record] = 1.0
            made.begin(5)
            torch.manual_seed(7)
            ours = made.clipped_sum(case.loss_of(inputs, targets), torch.full((5,), 1e9), only)
            slope = sum(float((o * d).sum()) for o, d in zip(ours, direction, strict=True))
            expected = (loss_at(1e-5, record) - loss_at(-1e-5, record)) / 2e-5
            assert slope == pytest.approx(expected, rel=1e-4, abs=1e-6)


# -- how long a contribution may be -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", share([torch.float32, torch.float64, torch.bfloat16], every=3), ids=str)
@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("name", ["two layers", "conv", "embedding", "attention", "lstm, last output", "tied weights"])
def test_no_contribution_is_longer_than_its_own_clip_norm_allows(name, which, dtype):
    """Exactly at most, not about: norms are added up without rounding (math.fsum).

    Of two records one has weight 0: a record alone would go to `loop`, with every engine.
    """
    case = build(name)
    case.model.to(dtype)
    made = attached(which, case)
    clips = [1e-6, 0.01, 0.1, 1 / 3, 0.7, 1.0, 3.0]
    for number, clip_norm in enumerate(clips):
        for weight in (1.0, 0.3, 2.5):
            inputs, targets = case.batch(2, seed=number)
            inputs = tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs)
            bounds, factors = torch.full((2,), clip_norm, dtype=torch.float64), torch.tensor([0.0, weight])
            ours = clipped(made, case, inputs, targets, bounds, factors)
            allowed = float(factors[1].double()) * clip_norm
            assert norm_of([o.numpy() for o in ours]) <= allowed


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("name", share(ALIKE, every=4))
def test_no_contribution_is_longer_among_others_than_alone(name, which):
    """With every weight but one at 0, the sum is one record's contribution, from a full physical batch."""
    case = build(name)
    made = attached(which, case)
    for number, records in enumerate([4, 5, 2]):
        inputs, targets = case.batch(records, seed=number)
        norms = [norm_of(g) for g in alone(case, inputs, targets)]
        clip_norm = clip_norms(records, float(np.median(norms)))
        for i in range(records):
            weight = torch.zeros(records, dtype=torch.float64)
            weight[i] = 0.7
            ours = clipped(made, case, inputs, targets, clip_norm, weight)
            length = norm_of([o.numpy() for o in ours])
            assert length <= 0.7 * float(clip_norm[i])
            assert length == pytest.approx(0.7 * min(float(clip_norm[i]) / OVERSTATED, norms[i]), rel=1e-4)


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("name", share(ALIKE, every=4))
def test_one_record_moves_the_sum_by_no_more_than_its_own_clip_norm(name, which):
    """The sensitivity itself: the sum with a record, and with an empty one in its place, whatever was seen before."""
    case = build(name)
    made = attached(which, case)
    last = case.parameters[-2]  # of a head, in most of the zoo
    kept = last.detach().clone()
    for number in range(3):
        with torch.no_grad():  # a head of zeros at first, so that nothing below it has a gradient; then a large one
            last.copy_(10 * number * kept)
        inputs, targets = case.batch(TIME, seed=number)
        clip_norm, ones = clip_norms(TIME, 0.1), torch.ones(TIME)
        whole = clipped(made, case, inputs, targets, clip_norm, ones)
        for i in range(TIME):
            counted = ones.clone()
            counted[i] = 0.0
            made.begin(TIME)
            without = made.clipped_sum(case.loss_of(inputs, targets) * counted, clip_norm, ones)
            assert distance(whole, without) <= float(clip_norm[i])


@pytest.mark.parametrize("which", ENGINES)
def test_gradients_too_small_or_too_large_to_square_stay_within_their_clip_norm(which):
    case = build("linear")
    made = attached(which, case)
    ones, weight = torch.ones(2, dtype=torch.float64), torch.tensor([0.0, 1.0])
    for size in (0.0, 1e-44, 1e-30, 1e-20, 1e18, 1e30, 1e38):
        inputs, targets = (torch.full((2, 6), size),), torch.tensor([1, 1])
        ours = clipped(made, case, inputs, targets, ones, weight)
        assert all(torch.isfinite(o).all() for o in ours)
        assert norm_of([o.numpy() for o in ours]) <= 1.0


# -- what a pattern once seen may not hide ------------------------------------------------------------------


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("make", [positions, time_first], ids=["positions", "time-first lstm"])
def test_nothing_is_certified_while_its_gradient_is_zero(which, make):
    """A head of zeros hides every layer below it at first; rows that are time steps must not pass for records later."""
    torch.manual_seed(0)
    model = make()
    nn.init.zeros_(model.head.weight)
    tokens = make is positions
    case = Case(
        model, lambda records: (torch.randint(11, (records, TIME)) if tokens else torch.randn(records, TIME, 6),)
    )
    loop, other = attached("loop", case), attached(which, case)
    for number in range(4):
        assert error(other, loop, case, TIME, number, 0.1) <= CLOSE  # as many records as time steps
        with torch.no_grad():
            model.head.weight += torch.randn_like(model.head.weight)


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("make", [positions, time_first], ids=["positions", "time-first lstm"])
def test_nothing_is_certified_on_one_record_of_one_time_step(which, make):
    """Padded to the longest of the batch, texts vary in length; where all is 1, records and time look alike."""
    torch.manual_seed(0)
    tokens = make is positions
    case = Case(make(), lambda records: ())
    loop, other = attached("loop", case), attached(which, case)
    for number, (records, time) in enumerate([(1, 1), (3, 3), (3, 2), (4, 4), (1, 3)]):
        torch.manual_seed(number)
        inputs = (torch.randint(11, (records, time)) if tokens else torch.randn(records, time, 6),)
        targets = torch.randint(3, (records,))
        clip_norm, weight = clip_norms(records, 0.3), torch.ones(records)
        expected = clipped(loop, case, inputs, targets, clip_norm, weight)
        ours = clipped(other, case, inputs, targets, clip_norm, weight)
        assert distance(ours, expected) <= CLOSE * float(clip_norm.max()), f"{records} records of {time} steps"


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("name", RANDOM)
def test_dropout_may_be_switched_on_in_the_middle_of_a_run(name, which):
    case = build(name)
    loop, other = attached("loop", case), attached(which, case)
    for number in range(4):
        case.model.train(number >= 2)
        assert error(other, loop, case, 3, number) <= CLOSE


def normalised_backwards(model: nn.Module, x: Tensor) -> Tensor:
    """A hook that rescales the gradient of the whole batch: harmless in the losses, mixing in the backward pass."""
    hidden = torch.tanh(model.first(x))
    if hidden.requires_grad:
        hidden.register_hook(lambda g: g / (1e-3 + g.norm()))
    return model.head(hidden)


@pytest.mark.parametrize("which", ENGINES)
def test_gradients_that_a_hook_mixes_are_taken_record_by_record(which):
    torch.manual_seed(0)
    case = Case(Model(normalised_backwards, first=nn.Linear(6, 6), head=nn.Linear(6, 3)), flat)
    loop, other = attached("loop", case), attached(which, case)
    for number, records in enumerate([1, 4, 4, 6]):
        assert error(other, loop, case, records, number) <= CLOSE, f"{records} records"


# -- what is left behind ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("name", share(list(ZOO), every=4))
def test_an_engine_leaves_no_gradient_no_hook_and_nothing_thawed_behind(which, name):
    case = build(name)
    needed = [p.requires_grad for p in case.model.parameters()]
    made = attached(which, case)
    inputs, targets = case.batch(3, seed=0)
    clipped(made, case, inputs, targets, torch.ones(3), torch.ones(3))
    assert all(p.grad is None for p in case.model.parameters())
    made.detach()
    assert [p.requires_grad for p in case.model.parameters()] == needed
    for module in case.model.modules():
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        assert not any(hooks)


@pytest.mark.parametrize("which", ENGINES)
def test_a_copy_of_the_model_is_not_taken_for_the_model(which):
    """An average of weights is a deep copy, and is evaluated inside the loop."""
    case = build("two layers")
    loop, other = attached("loop", case), attached(which, case)
    average = copy.deepcopy(case.model)
    inputs, targets = case.batch(4, seed=0)
    clip_norm, weight = clip_norms(4, 0.3), torch.ones(4)
    expected = clipped(loop, case, inputs, targets, clip_norm, weight)
    other.begin(4)
    average(*inputs)
    losses = case.loss_of(inputs, targets)
    average(*inputs)
    with torch.no_grad():
        case.model(inputs[0] + 1)
    ours = other.clipped_sum(losses, clip_norm, weight)
    assert distance(ours, expected) <= CLOSE * float(clip_norm.max())


@pytest.mark.parametrize("which", ENGINES)
def test_the_parameters_may_come_in_any_order_and_be_part_of_the_model_only(which):
    case = build("two layers")
    chosen = list(case.model.parameters())
    random.Random(0).shuffle(chosen)
    chosen = chosen[:3]
    loop, other = ENGINES["loop"](), ENGINES[which]()
    loop.attach(case.model, chosen)
    other.attach(case.model, chosen)
    for number in range(2):
        assert error(other, loop, case, 4, number) <= CLOSE


def test_a_gradient_of_one_record_is_dense_and_none_where_nothing_depends_on_it():
    case = build("sparse embedding")
    inputs, targets = case.batch(3, seed=0)
    stranger = nn.Parameter(torch.zeros(2))
    found = record_gradient(case.loss_of(inputs, targets), 1, [*case.parameters, stranger], keep_graph=False)
    assert found[-1] is None
    assert all(g.layout is torch.strided for g in found[:-1])


def test_an_engine_is_found_by_name_auto_or_as_an_object():
    for name in ENGINES:
        assert isinstance(engine(name), ENGINES[name])
    assert isinstance(engine("auto"), tuple(ENGINES.values()))
    own = ENGINES["loop"]()
    assert engine(own) is own
    with pytest.raises(epsilons.errors.InputError, match="No engine is called 'fast'; there are: auto, loop"):
        engine("fast")


# -- a record that is not finite contributes nothing, and changes nothing for others ----------------------------------


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
    which: str, case: Case, inputs: tuple[Tensor, ...], targets: Tensor, counts: Tensor, largest: Any
) -> list[Tensor]:
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    budgets, plan = _plan(len(targets))
    data, settings = (*inputs, targets, counts), epsilons.Performance(engine=which, max_physical_batch=largest)
    with epsilons.make_private(
        model,
        optimizer,
        data,
        plan,
        budgets=budgets,
        seed=epsilons.Randomness.with_key(key_from_seed(3)),
        performance=settings,
    ) as private:
        for *given, wanted, counted in private.batches:
            private.backward(case.losses(model(*given), wanted) * counted)
            private.step()
        assert private.is_finished
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("largest", share([3, "auto", 1], every=3))
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
