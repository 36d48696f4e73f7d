"""Persons with several rows: every engine clips the gradient of the mean of a person's losses, and gives loop's sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import epsilons
from epsilons.clipping import ENGINES, Engine, NonFiniteGradientError, check_takes_persons
from epsilons.clipping.engine import Persons
from epsilons.clipping.ghost.outer_products import OuterProductGrad, ProductSide
from epsilons.errors import InputError
from sums import OVERSTATED, any_case, attached, away, common_mode, length, share
from zoo import MORE, ZOO, Case, build, clip_norms, flat

from .test_engines import norm_of

pytestmark = pytest.mark.usefixtures("one_thread")

#: As for records: relative to the largest contribution allowed.
CLOSE = 1e-5
#: Rows of each person: equal and not, as many as time steps (4) and features (6), and up to 50.
SIZES = [[4, 4, 4], [1, 3, 2, 1, 6], [2, 2], [50, 1, 7], [5]]
#: Engines of the library, which check their arguments.
OURS = ["loop", "vmap", "ghost"]
OTHERS = [name for name in ENGINES if name != "loop"]
ALIKE = [name for name in ZOO if not build(name).random]


def clipped(
    made: Engine, case: Case, sizes: Sequence[int] | None, clip_norm: Tensor, weight: Tensor, seed: int = 0
) -> list[Tensor]:
    """One physical batch of persons; the same data and dropout for the same seed and number of rows."""
    rows = len(clip_norm) if sizes is None else sum(sizes)
    inputs, targets = case.batch(rows, seed)
    made.begin(rows)
    torch.manual_seed(rows)
    return made.clipped_sum(case.loss_of(inputs, targets), clip_norm, weight, sizes)


def bounds(case: Case, sizes: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """(clip norms below and above the gradients of persons, weights of which one is 0)."""
    count = len(sizes)
    huge = torch.full((count,), 1e9, dtype=torch.float64)
    total = clipped(attached("loop", case), case, sizes, huge, torch.ones(count), seed)
    weight = torch.linspace(1.5, 0.5, count, dtype=torch.float64)
    weight[1 : 2 if count > 2 else 1] = 0.0
    return clip_norms(count, length(total) / math.sqrt(count)), weight


# -- what is computed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", share(ALIKE, every=4))
def test_the_definition_is_the_gradient_of_each_persons_mean_clipped_and_added(name):
    """The oracle: a forward pass on a person's rows alone, `backward` from their mean."""
    case, sizes = build(name), [1, 3, 2, 4]
    clip_norm, weight = bounds(case, sizes)
    inputs, targets = case.batch(sum(sizes), 0)
    expected = [np.zeros(p.shape) for p in case.parameters]
    first = 0
    for i, size in enumerate(sizes):
        rows = slice(first, first + size)
        case.loss_of(tuple(t[rows] for t in inputs), targets[rows]).mean().backward()
        gradient = [
            np.zeros(p.shape) if p.grad is None else p.grad.to_dense().double().numpy() for p in case.parameters
        ]
        case.model.zero_grad()
        factor = float(weight[i]) * min(1.0, float(clip_norm[i]) / (OVERSTATED * norm_of(gradient)))
        expected = [e + factor * g for e, g in zip(expected, gradient, strict=True)]
        first += size
    ours = clipped(attached("loop", case), case, sizes, clip_norm, weight)
    assert away(ours, [torch.as_tensor(e) for e in expected]) <= CLOSE * float(clip_norm.max())


@pytest.mark.parametrize("which", OTHERS)
@pytest.mark.parametrize("name", share([*ZOO, *MORE], every=3))
def test_every_engine_gives_the_definitions_sum_for_persons(which, name):
    case = any_case(name)
    loop, other = attached("loop", case), attached(which, case)
    for seed, sizes in enumerate(SIZES):
        clip_norm, weight = bounds(case, sizes, seed)
        expected = clipped(loop, case, sizes, clip_norm, weight, seed)
        ours = clipped(other, case, sizes, clip_norm, weight, seed)
        assert [o.shape for o in ours] == [p.shape for p in case.parameters]
        assert away(ours, expected) <= CLOSE * float((weight * clip_norm).max()), sizes
    assert getattr(other, "is_proven", True)


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("name", share([*ZOO, *MORE], every=4))
def test_persons_with_one_row_each_are_records_to_the_bit(which, name):
    case = any_case(name)
    clip_norm, weight = bounds(case, [1] * 5)
    as_persons, as_records = (clipped(attached(which, case), case, s, clip_norm, weight) for s in ([1] * 5, None))
    assert all(torch.equal(a, b) for a, b in zip(as_persons, as_records, strict=True))


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("name", ["two layers", "conv", "embedding", "lstm, last output", "tied weights"])
def test_the_order_of_a_persons_rows_does_not_matter(which, name):
    case, sizes = build(name), [3, 1, 5]
    clip_norm, weight = bounds(case, sizes)
    inputs, targets = case.batch(9, seed=0)
    sums = []
    for order in ([0, 1, 2, 3, 4, 5, 6, 7, 8], [2, 0, 1, 3, 8, 6, 7, 4, 5]):
        made = attached(which, case)
        made.begin(9)
        sums.append(
            made.clipped_sum(case.loss_of(tuple(t[order] for t in inputs), targets[order]), clip_norm, weight, sizes)
        )
    assert away(*sums) <= 1e-6 * length(sums[0])


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("name", ["layer norm", "embedding", "conv"])
def test_no_persons_are_a_sum_of_zeros(which, name):
    case = build(name)
    none = torch.ones(0, dtype=torch.float64)
    assert not any(t.any() for t in clipped(attached(which, case), case, [], none, none))


# -- how long a contribution may be -------------------------------------------------------------------------


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("name", ["two layers", "conv", "embedding", "attention", "lstm, last output", "tied weights"])
@pytest.mark.parametrize("sizes", [[4, 4], [2, 9]], ids=["equal", "mixed"])
def test_a_person_contributes_no_more_than_their_clip_norm_however_many_rows(which, name, sizes):
    """Exactly at most: norms are added up without rounding. A sum of clipped rows is up to 9 times as long."""
    case = build(name)
    made = attached(which, case)
    for seed, clip_norm in enumerate([1e-6, 0.01, 1 / 3, 3.0]):
        for weight in (1.0, 0.3):
            found = clipped(made, case, sizes, torch.full((2,), clip_norm), torch.tensor([0.0, weight]), seed)
            assert norm_of([t.numpy() for t in found]) <= float(torch.tensor(weight)) * float(torch.tensor(clip_norm))


@pytest.mark.parametrize("which", ENGINES)
def test_short_gradients_of_persons_are_added_as_they_are(which):
    """The mean, not the sum: a person with the same row five times contributes what a person with one row does."""
    case = build("two layers")
    inputs, targets = case.batch(2, seed=0)
    huge, ones = torch.full((2,), 1e9), torch.ones(2)
    sums = []
    for sizes in ([1, 1], [5, 1], [5, 5]):
        rows = torch.repeat_interleave(torch.arange(2), torch.tensor(sizes))
        made = attached(which, case)
        made.begin(len(rows))
        sums.append(made.clipped_sum(case.loss_of((inputs[0][rows],), targets[rows]), huge, ones, sizes))
    assert all(away(found, sums[0]) <= CLOSE * length(sums[0]) for found in sums)


@pytest.mark.parametrize("noise", [1.0, 1e-2, 1e-4, 0.0])
@pytest.mark.parametrize("sizes", [[16] * 8, [16, 1, 47, 64]], ids=["equal", "mixed"])
def test_norms_of_merged_products_are_never_understated_however_much_cancels(noise, sizes):
    """128 rows of 4 steps: persons of up to 256 steps, with products that cancel between rows and within."""
    features, gradients = (t.flatten(0, 1).reshape(128, 4, 512) for t in common_mode(8, noise, 64, 512, 512))
    persons = Persons(sizes, features.device)
    grad = OuterProductGrad(ProductSide(features), ProductSide(gradients)).of_persons(persons)
    norm = grad.squared_norm().sqrt()
    for i in range(len(sizes)):
        own = persons.owner == i
        left, right = (t[own].flatten(0, 1).double() for t in (features, gradients))
        exact = (left.T @ right).norm()
        only = torch.zeros(len(sizes), dtype=torch.float64)
        only[i] = 1.0
        assert OVERSTATED * float(norm[i]) >= float(grad.weighted(only).norm())
        # Products over so many steps that all entries are computed round in 32 bits, in norm and sum alike.
        assert float(norm[i]) == pytest.approx(float(exact), rel=1e-5, abs=1e-4)


def test_a_persons_norm_does_not_depend_on_how_many_rows_others_have():
    """By more than the last bits of 64."""
    torch.manual_seed(0)
    grad = OuterProductGrad(*(ProductSide(torch.randn(12, 5, 64)) for _ in range(2)))
    of_first = []
    for sizes in ([3, 3, 3, 3], [3, 9], [3, 1, 1, 7], [3] + [1] * 9):
        squared = grad.of_persons(Persons(sizes, torch.device("cpu"))).squared_norm()
        of_first.append(float(squared[0]))
    assert of_first == pytest.approx([of_first[0]] * 4, rel=1e-14)


def test_persons_with_rows_that_cancel_are_no_reason_to_leave_the_graph():
    """What rounding leaves of rows with opposite gradients differs from autograd's, and is no error."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    made = attached("ghost", Case(model, flat))
    x = torch.randn(8, 6).repeat_interleave(3, 0)
    made.begin(24)
    found = made.clipped_sum(
        (model(x)[:, 0] * torch.tensor([1.0, 1.0, -2.0] * 8)), torch.ones(8), torch.ones(8), [3] * 8
    )
    assert made.is_proven
    assert length(found) <= 1e-5


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("name", ["two layers", "conv", "gru"])
def test_a_broken_row_silences_its_person_and_is_named_by_row(which, name, bad):
    case, sizes = build(name), [2, 3, 1]
    made = attached(which, case)
    ones = torch.ones(3, dtype=torch.float64)
    clipped(made, case, sizes, ones, ones)  # so that its pattern is known
    inputs, targets = case.batch(6, seed=1)
    only = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    inputs[0][3] = bad
    made.begin(6)
    try:
        ours = made.clipped_sum(case.loss_of(inputs, targets), ones, only, sizes)
    except NonFiniteGradientError as error:
        named: set[int] | None = set(error.records)
    else:
        named = None
    assert length(ours) == 0 if named is None else named <= {2, 3, 4}


@pytest.mark.parametrize("which", OURS)
@pytest.mark.parametrize("sizes", [[2, 3], [2, 2, 2, 0], [6], [2, 2, 3], [7, -1, 0], [2.0, 2.0, 2.0], [[2, 2, 2]]])
def test_sizes_that_do_not_fit_the_losses_and_clip_norms_are_refused(which, sizes):
    case = build("linear")
    made = attached(which, case)
    inputs, targets = case.batch(6, seed=0)
    made.begin(6)
    with pytest.raises(InputError, match="Expected one whole number of rows, at least 1, for each of 3 persons"):
        made.clipped_sum(case.loss_of(inputs, targets), torch.ones(3), torch.ones(3), sizes)


@pytest.mark.parametrize("which", OURS)
def test_clip_norms_of_persons_without_sizes_are_refused(which):
    case = build("linear")
    made = attached(which, case)
    for persons in (1, 3):
        inputs, targets = case.batch(6, seed=0)
        made.begin(6)
        with pytest.raises(InputError, match=f"a clip norm for each of 6 losses, got {persons}"):
            made.clipped_sum(case.loss_of(inputs, targets), torch.ones(persons), torch.ones(persons))


class RecordsOnly:
    """An engine written before there were persons."""

    def clipped_sum(self, losses: Tensor, clip_norm: Tensor, weight: Tensor) -> list[Tensor]:
        return []


def test_an_engine_without_sizes_is_refused_for_persons_with_what_to_add():
    for made in ENGINES.values():
        check_takes_persons(made())
    with pytest.raises(
        epsilons.errors.InputError, match="RecordsOnly, with a clipped_sum that has no argument `sizes`"
    ):
        check_takes_persons(RecordsOnly())
