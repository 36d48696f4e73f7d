"""The branches for GPUs run on a CPU, give the sums of those for CPUs, and keep to a number of kernels and reads.

tests/test_gpu.py is for the day when there is a GPU.
"""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epsilons
from conformance.adverse import KINDS, LAYERS, attack, near_a_power
from conformance.test_sensitivity import attack_sum
from epsilons import Budgets, Performance, Recipe
from epsilons.clipping import summing
from epsilons.clipping.ghost import outer_products
from epsilons.clipping.ghost.ghost import add_weighted, squared_norms
from epsilons.clipping.ghost.outer_products import JoinedGrad, OuterProductGrad, ProductSide, joined
from epsilons.clipping.ghost.per_sample_grads import DenseGrad
from epsilons.core import modules
from epsilons.core.checksums import CheckSums, check_sum, tree_hash
from epsilons.training.microbatches import usual
from kernels import Kernels, counting_copies
from sums import CLOSE, any_case, attached, away, common_mode, compared, length, share
from zoo import MORE, ZOO, build, clip_norms

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "AS_ON_GPU", True)


# -- both branches give the definition's sum --------------------------------------------------------------------------


@pytest.mark.parametrize("name", share([*MORE, *(name for name in ZOO if not build(name).random)], every=2))
def test_the_sum_on_a_gpu_is_the_definitions(name, monkeypatch):
    """In the second physical batch, which is not checked, gradients are joined. And the sum is that of the CPU."""
    case = any_case(name)
    engine = attached("ghost", case)
    for seed in range(2):
        on_cpu, _ = compared(case, attached("ghost", case), 7, seed)
        monkeypatch.setattr(modules, "AS_ON_GPU", True)
        ours, theirs = compared(case, engine, 7, seed)
        monkeypatch.setattr(modules, "AS_ON_GPU", False)
        assert [part.shape for part in ours] == [p.shape for p in case.parameters]
        assert away(ours, theirs) <= CLOSE * length(theirs)
        assert away(ours, on_cpu) <= CLOSE * length(on_cpu)


#: Numbers that decide which kernels are used: (module, name, value).
LIMITS = {
    "products in groups": [(summing, "FEW_ROWS", 0), (summing, "FEW_ENTRIES", 0), (outer_products, "MOST_ENTRIES", 0)],
    "small groups": [
        (summing, "FEW_ROWS", 0),
        (summing, "FEW_ENTRIES", 0),
        (outer_products, "MOST_ENTRIES", 0),
        (summing, "MOST_AT_ONCE", 60),
    ],
    "Gram matrices": [(outer_products, "MOST_ENTRIES", 0), (outer_products, "PRODUCTS_AT_ONCE", 3)],
    "Gram matrices in 32 bits": [
        (outer_products, "MOST_ENTRIES", 0),
        (outer_products, "PRODUCTS_AT_ONCE", 3),
        (outer_products, "NARROW", 0),
    ],
    "parts of Gram matrices": [
        (outer_products, "MOST_ENTRIES", 0),
        (outer_products, "PRODUCTS_AT_ONCE", 2),
        (outer_products, "NARROW", 0),
        (summing, "MOST_AT_ONCE", 1),
    ],
    "nothing joined": [(outer_products, "FEW_ENTRIES", 0)],
    "a few joined": [(outer_products, "FEW_ENTRIES", 10)],
}
MODELS = ["linear on sequences", "transformer", "embedding", "positions", "called twice", "tied weights"]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("as_on_gpu")
def test_every_kernel_on_a_gpu_gives_the_definitions_sum(name, limit, monkeypatch):
    for module, constant, value in LIMITS[limit]:
        monkeypatch.setattr(module, constant, value)
    case = build(name)
    engine = attached("ghost", case)
    for seed in range(2):
        ours, theirs = compared(case, engine, 7, seed)
        assert away(ours, theirs) <= CLOSE * length(theirs)
    assert engine.is_proven


@pytest.mark.parametrize("limit", [None, "products in groups", "Gram matrices in 32 bits"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("as_on_gpu")
def test_persons_on_a_gpu_contribute_what_the_definition_says(name, limit, monkeypatch):
    for module, constant, value in LIMITS.get(limit, []):
        monkeypatch.setattr(module, constant, value)
    case, sizes = build(name), [3, 1, 2, 2, 1]
    loop, ghost = attached("loop", case), attached("ghost", case)
    weight = torch.tensor([1.0, 0.5, 0.0, 1.5, 1.0], dtype=torch.float64)
    for seed in range(2):
        sums = []
        for engine in (loop, ghost):
            inputs, targets = case.batch(sum(sizes), seed)
            engine.begin(sum(sizes))
            sums.append(engine.clipped_sum(case.loss_of(inputs, targets), clip_norms(5, 0.3), weight, sizes))
        assert away(*sums) <= 1e-5 * 0.6


@pytest.mark.usefixtures("as_on_gpu")
@pytest.mark.parametrize("name", ["linear on sequences", "two layers", "layer norm", "conv"])
def test_a_record_that_is_not_finite_contributes_nothing_on_a_gpu(name):
    case = build(name)
    loop, ghost = attached("loop", case), attached("ghost", case)
    clip_norm, ones = torch.full((6,), 0.3, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    for seed in range(2):
        (x, *_), targets = case.batch(6, seed)
        ghost.begin(6)
        if seed == 0:
            ghost.clipped_sum(case.loss_of((x,), targets), clip_norm, ones)  # the one that is checked
            continue
        x[2] = torch.nan
        ours = ghost.clipped_sum(case.loss_of((x,), targets), clip_norm, ones)
        x[2], ones[2] = 0.0, 0.0
        theirs = loop.clipped_sum(case.loss_of((x,), targets), clip_norm, ones)
        assert away(ours, theirs) <= 1e-5


# -- bounds hold in the branches for GPUs ------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer not in ("one record at a time", "bag")])
@pytest.mark.parametrize("kind", [KINDS[1], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[2:])])
@pytest.mark.usefixtures("as_on_gpu")
def test_no_sum_on_a_gpu_moves_by_more_than_the_bound_of_the_record_left_out(kind, layer):
    case = attack(layer, near_a_power(1024, kind))
    weight = torch.full((1024,), 0.5, dtype=torch.float64)
    bounds = torch.full((1024,), case.bound, dtype=torch.float64)
    rows = torch.arange(1024)
    full, rest = (attack_sum("ghost", case, some, weight, 1024, bounds) for some in (rows, rows[1:]))
    assert away(full, rest) <= 0.5 * case.bound


def joined_parts(records: int) -> dict[int, DenseGrad | OuterProductGrad]:
    """Gradients of several shapes and layouts, all with few entries."""
    make = torch.Generator().manual_seed(0)
    shapes = {0: (3, 5), 2: (7,), 3: (70,), 5: (2, 3, 4)}
    parts = {k: DenseGrad(torch.randn(records, *shape, generator=make)) for k, shape in shapes.items()}
    parts[7] = DenseGrad(torch.randn(records, 4, 6, generator=make).transpose(1, 2))
    parts[8] = DenseGrad(torch.randn(records, generator=make))  # by one number
    left, right = torch.randn(records, 20, 3, generator=make), torch.randn(records, 20, 4, generator=make)
    parts[9] = OuterProductGrad(ProductSide(left), ProductSide(right), (4, 3), (1, 0))
    assert parts[9].is_dense
    return parts


@pytest.mark.usefixtures("as_on_gpu")
def test_joined_gradients_have_the_norms_and_sums_of_their_parts():
    parts, factor = joined_parts(6), torch.linspace(0.5, 2.0, 6, dtype=torch.float64)
    units = joined(parts, factor)
    (unit,) = units.values()
    assert isinstance(unit, JoinedGrad)
    every = {k: part.dense().rows.double() for k, part in parts.items()}
    exact = torch.stack([rows.reshape(6, -1).square().sum(1) for rows in every.values()]).sum(0)
    torch.testing.assert_close(squared_norms(units, factor), exact, rtol=2.0**-17, atol=0.0)
    for keep in (torch.ones(6, dtype=torch.bool), torch.arange(6) != 3):
        sums = [torch.zeros(every[k].shape[1:] if k in every else (2,), dtype=torch.float64) for k in range(10)]
        add_weighted({k: grad.blank(keep) for k, grad in units.items()}, factor, sums)
        for k, total in enumerate(sums):
            own = torch.einsum("r,r...->...", factor * keep, every[k]) if k in every else torch.zeros(2)
            torch.testing.assert_close(total, own.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("as_on_gpu")
def test_how_gradients_are_joined_does_not_depend_on_the_number_of_records():
    """So the same record has the same norm, to the bit, among any number of others."""
    many = squared_norms(joined(joined_parts(600), torch.zeros(600)), torch.zeros(600))
    few = {k: DenseGrad(part.dense().rows[:3]) for k, part in joined_parts(600).items()}
    assert torch.equal(squared_norms(joined(few, torch.zeros(3)), torch.zeros(3)), many[:3])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_record_that_cancels_in_one_weight_is_found_among_all_weights(place):
    """Their norms are computed together. One weight has another number of rows, one cancels."""
    sides = [common_mode(8, 1.0, time, 512, 512) for time in (64, 40, 64)]
    sides[place] = common_mode(8, 1e-4, sides[place][0].shape[1], 512, 512)
    together, alone = ([OuterProductGrad(*map(ProductSide, pair)) for pair in sides] for _ in range(2))
    total = squared_norms(dict(enumerate(together)), torch.zeros(8))
    assert [len(grad.cancelling) > 0 for grad in together] == [k == place for k in range(3)]
    for grad, own in zip(together, alone, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(grad.bound, own.bound, strict=True))
    assert torch.equal(total, torch.stack([own.squared_norm() for own in alone]).sum(0))


# -- padding follows from public settings ------------------------------------------------------------------------------


def test_groups_have_about_the_size_of_a_usual_physical_batch():
    """32 records were padded to 1,024."""
    assert usual(32, 512) == 55
    assert usual(512, 512) == 512
    assert usual(600, 512) == 370  # two physical batches of 300
    assert usual(600, 16) == 16


@pytest.mark.usefixtures("as_on_gpu")
def test_in_a_run_products_are_of_a_public_number_of_records(monkeypatch):
    monkeypatch.setattr(summing, "FEW_ROWS", 0)
    monkeypatch.setattr(summing, "FEW_ENTRIES", 0)
    monkeypatch.setattr(outer_products, "MOST_ENTRIES", 0)
    at_once, drawn, multiply = set[int](), set[int](), torch.bmm

    def bmm(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        if out is not None:
            at_once.add(len(left))
        return multiply(left, right, out=out) if out is not None else multiply(left, right)

    monkeypatch.setattr(torch, "bmm", bmm)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(200, 5, 4), torch.randint(0, 3, (200,))
    budgets = Budgets([1.0] * 200, delta=1e-4)
    plan = epsilons.plan(budgets, Recipe(steps=6, batch_size=16, clip_norm=1.0), accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    performance = Performance(max_physical_batch=64)
    with epsilons.make_private(
        model, optimizer, (x, y), plan, budgets=budgets, seed=1, performance=performance
    ) as private:
        for inputs, targets in private.batches:
            if not private.is_check:
                drawn.add(len(inputs))
            private.backward(F.cross_entropy(model(inputs).mean(1), targets, reduction="none"))
            private.step()
    assert len(drawn) > 2
    assert at_once == {usual(16, 64)}


# -- kernels and reads of a step ---------------------------------------------------------------------------------------

#: Operators with a kernel, of one step of a transformer of 12 layers and 148 tensors, 32 records in a draw. Plain SGD
#: has 550 if it updates all tensors in one call, as on a GPU. Before anything was joined, this step had 3,035.
MOST_KERNELS = 900
#: Of these, in the noisy update: noise, average, checksums.
MOST_OF_THE_UPDATE = 35
MOST_IN_64_BITS = 70
#: Reads of a step: whether norms are finite, whether any record cancels, and one for each table.
MOST_READS = 4
MOST_COPIES = 4


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int, time: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(100, width), nn.Embedding(time, width)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        make = partial(nn.TransformerEncoderLayer, width, 2, 4 * width, **options)
        self.layers = nn.ModuleList([make() for _ in range(layers)])
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@cache
def counted_steps(
    layers: int, width: int = 32, time: int = 16, batch: int = 32, has_folder: bool = False
) -> dict[int, Kernels]:
    """{records: what is counted} of two steps with one physical batch each, which are neither checked nor audited."""
    torch.manual_seed(0)
    model, x, y = Transformer(layers, width, time), torch.randint(0, 100, (400, time)), torch.randint(0, 10, (400,))
    budgets = Budgets([1.0, 3.0] * 200, delta=1e-4)
    plan = epsilons.plan(budgets, Recipe(steps=5, batch_size=batch, clip_norm=1.0), accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    found = list[tuple[int, Kernels]]()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(modules, "AS_ON_GPU", True)
        options = {"budgets": budgets, "seed": 1, "run_dir": Path(folder) / "run" if has_folder else None}
        performance = Performance(max_physical_batch=96)
        with epsilons.make_private(model, optimizer, (x, y), plan, performance=performance, **options) as private:
            batches = iter(private.batches)
            while not private.is_finished:
                with Kernels() as counted, counting_copies(counted):
                    inputs, targets = next(batches)
                    private.backward(F.cross_entropy(model(inputs), targets, reduction="none"))
                    is_updated = private.step()
                found += [(len(inputs), counted)] if is_updated else []
    return dict(found[3:])


def test_a_transformer_of_12_layers_has_few_kernels_in_a_step():
    for counted in counted_steps(12).values():
        assert counted.kernels.total() <= MOST_KERNELS, counted.kernels
        assert counted.update["kernels"] <= MOST_OF_THE_UPDATE
        assert counted.in_64_bits <= MOST_IN_64_BITS


@pytest.mark.parametrize("sizes", [{}, {"width": 128, "time": 20, "batch": 8}], ids=["entries", "Gram matrices"])
def test_no_layer_makes_the_host_wait(sizes):
    """As many reads and copies to the host with 2 layers as with 4, and few."""
    few, more = (next(iter(counted_steps(layers, **sizes).values())) for layers in (2, 4))
    assert few.reads == more.reads
    assert more.reads.total() <= MOST_READS, more.reads
    assert few.copies == more.copies
    per_layer = (more.kernels.total() - few.kernels.total() - more.update["kernels"] + few.update["kernels"]) / 2
    assert per_layer <= (150 if sizes else 60)


def test_the_number_of_kernels_does_not_depend_on_the_number_of_records():
    one, other = counted_steps(12).values()  # of two numbers of records
    assert one.kernels == other.kernels


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_step_copies_little_to_the_host(has_folder):
    """Checksums before and after the update; with a folder, the hash of the update for the ledger."""
    for counted in counted_steps(12, has_folder=has_folder).values():
        assert counted.copies.total() <= MOST_COPIES, counted.copies
        assert counted.copies["numpy"] == 0  # of a tensor that would be on the GPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_checksums_and_hashes_on_a_gpu_are_those_of_the_cpu(dtype, monkeypatch):
    make = torch.Generator().manual_seed(0)
    shapes = [(), (3,), (7, 5), (100_000,), (200, 333), (33_000, 4), (0,)]
    tensors = [(10 * torch.randn(shape, generator=make)).to(dtype) for shape in shapes]
    tensors.append(tensors[4].T)
    on_cpu = CheckSums.of(tensors, []).sums, tree_hash(tensors), check_sum(tensors)
    monkeypatch.setattr(modules, "AS_ON_GPU", True)
    assert (CheckSums.of(tensors, []).sums, tree_hash(tensors), check_sum(tensors)) == on_cpu
    tensors[4][0, 0] = tensors[4][0, 0] == 0
    changed = CheckSums.of(tensors, []).sums, tree_hash(tensors), check_sum(tensors)
    assert all(one != other for one, other in zip(changed, on_cpu, strict=True))


def test_a_run_on_a_gpu_ends_with_the_weights_of_the_cpu(monkeypatch, tmp_path):
    """Draws, noise and updates, in a folder."""
    ends = []
    for is_on_gpu in (False, True):
        monkeypatch.setattr(modules, "AS_ON_GPU", is_on_gpu)
        torch.manual_seed(0)
        model, x, y = Transformer(1, 8, 4), torch.randint(0, 100, (60, 4)), torch.randint(0, 10, (60,))
        budgets = Budgets([1.0, 3.0] * 30, delta=1e-3)
        plan = epsilons.plan(budgets, Recipe(steps=4, batch_size=12, clip_norm=1.0), accountant="rdp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with epsilons.make_private(
            model, optimizer, (x, y), plan, budgets=budgets, seed=1, run_dir=tmp_path / f"{is_on_gpu}"
        ) as private:
            for inputs, targets in private.batches:
                private.backward(F.cross_entropy(model(inputs), targets, reduction="none"))
                private.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert float((ends[0] - ends[1]).norm()) <= 1e-6 * float(ends[0].norm())
