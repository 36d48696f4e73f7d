"""Gradients by tables in the engine ghost: lookups, their means and weighted sums, bags."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from epsilons.clipping.ghost import embeddings
from epsilons.clipping.ghost.backward import per_sample_grads
from epsilons.clipping.ghost.embeddings import PooledGrad, TableGrad, Texts, embedding_grad, in_order, weights_of
from epsilons.clipping.ghost.graph import trace
from functional import Model
from sums import CLOSE, any_case, attached, away, compared, length
from zoo import MORE, Case

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("size", [2, 300, 2**20, 2**55])
@pytest.mark.parametrize("count", [0, 1, 40, 600])
@pytest.mark.parametrize("padding", [-1, 0, 1])
def test_tokens_are_ordered_as_by_a_stable_sort_without_padding(size, count, padding):
    token = torch.randint(min(size, 5), (count,)) * max(size // 5, 1)
    values, places = torch.sort(token, stable=True)
    kept = values != padding
    ours, our_places = in_order(token, size, padding)
    assert torch.equal(ours.long(), values[kept])
    assert torch.equal(our_places.long(), places[kept])


# -- rows that are only added up ----------------------------------------------------------------------------


def kind_of(compute, records: int = 6, tokens: int = 4) -> type:
    """The kind of gradient that the engine forms by a table whose rows this function of (table's rows, model) reads."""
    torch.manual_seed(0)
    model = Model(
        lambda m, x: m.head(compute(m.table(x), m)),
        table=nn.Embedding(11, 5),
        head=nn.Linear(5, 1),
        gate=nn.Linear(5, 1),
    )
    losses = model(torch.randint(11, (records, tokens))).squeeze(-1)
    parameters = list(model.parameters())
    found = trace(losses, {id(p): k for k, p in enumerate(parameters)})
    grads = per_sample_grads(found, losses, parameters, keep_graph=False)
    return type(grads[[id(p) for p in parameters].index(id(model.table.weight))])


@pytest.mark.parametrize(
    "compute",
    [
        lambda rows, m: rows.mean(1),
        lambda rows, m: rows.sum(1, keepdim=True).squeeze(1),
        lambda rows, m: (0.5 * rows * torch.rand(6, 4, 1)).mean(-2),
        lambda rows, m: (torch.rand(4, 1) * rows).sum(1),
        lambda rows, m: (rows * torch.softmax(m.gate(torch.ones(6, 4, 5)), 1)).sum(1),
    ],
)
def test_rows_that_are_only_weighted_and_added_up_have_one_gradient_per_record(compute):
    assert kind_of(compute) is PooledGrad


@pytest.mark.parametrize(
    "compute",
    [
        lambda rows, m: (rows * torch.rand(5)).sum(1),  # weights by feature
        lambda rows, m: (rows * rows).sum(1),
        lambda rows, m: (rows * torch.softmax(m.gate(rows), 1)).sum(1),  # read twice
        lambda rows, m: rows.mean(1) + rows[:, 0],
        lambda rows, m: torch.tanh(rows).mean(1),
        lambda rows, m: rows.sum(2).unsqueeze(2).expand(-1, -1, 5).mean(1),  # over features
        lambda rows, m: rows.amax(1),
        lambda rows, m: (rows.unsqueeze(1) * torch.rand(6, 3, 4, 1)).sum((1, 2)),
    ],
)
def test_rows_that_are_used_otherwise_have_gradients_by_token(compute):
    assert kind_of(compute) is TableGrad


def test_bags_are_not_differentiated_record_by_record():
    table = nn.EmbeddingBag(11, 5)
    losses = table(torch.randint(11, (6, 4))).sum(1)
    found = trace(losses, {id(table.weight): 0})
    assert type(per_sample_grads(found, losses, [table.weight], keep_graph=False)[0]) is PooledGrad


@pytest.mark.parametrize("name", ["two lookups", "two means"])
def test_several_lookups_of_one_table_are_added_without_all_entries(name):
    case = any_case(name)
    inputs, targets = case.batch(7, seed=0)
    losses = case.loss_of(inputs, targets)
    found = trace(losses, {id(p): k for k, p in enumerate(case.parameters)})
    grads = per_sample_grads(found, losses, case.parameters, keep_graph=False)
    assert type(grads[0]) is TableGrad
    assert isinstance(case.model.table, nn.Embedding)


TABLES = ["two lookups", "two means", "masked mean", "learnt weights", "bags"]
assert set(TABLES) <= set(MORE)


@pytest.mark.parametrize("name", [*TABLES, "embedding", "tied weights"])
def test_the_sum_of_persons_is_the_definitions(name):
    case = any_case(name)
    sizes = [1, 3, 2, 3, 4]
    inputs, targets = case.batch(sum(sizes), seed=3)
    clip_norm, weight = 0.1 * torch.arange(1.0, 6.0), torch.linspace(0.5, 1.5, 5)
    sums = []
    for which in ("ghost", "loop"):
        engine = attached(which, case)
        engine.begin(sum(sizes))
        sums.append(engine.clipped_sum(case.loss_of(inputs, targets), clip_norm, weight, sizes))
    assert away(*sums) <= CLOSE * length(sums[1])


@pytest.mark.parametrize("name", ["masked mean", "two lookups", "bags"])
def test_tokens_of_32_bits_give_the_same_sum(name):
    case = any_case(name)
    narrow = Case(case.model, lambda n: tuple(t.int() for t in case.inputs(n)), case.losses)
    sums = [compared(c, attached("ghost", c), 5, seed=1)[0] for c in (case, narrow)]
    assert away(*sums) == 0


# -- norms and sums -----------------------------------------------------------------------------------------

VALUES = {
    "usual": [1.0, -0.3, 0.7],
    "huge": [3e38, -2e38, 1e38],
    "tiny": [1e-38, 3e-40, -1e-45],
    "both": [3e38, 1e-45, -1e20],
    "squares vanish": [1e-23, -3e-24, 2e-30],
}
WEIGHTS = {
    "whole": [1.0, 1.0, 1.0, 1.0, 1.0],
    "thirds": [1 / 3, 0.1, -0.7, 1e-3, 2.0],
    "cancelling": [1.0, -1.0, 1.0 + 2.0**-23, 1e-7, -1e-7],
    "huge": [3e38, -3e38, 1e30, 1e38, 1.0],
    "tiny": [1e-45, -1e-45, 1e-40, 3e-39, 1e-45],
}


def pooled(values: list[float], weights: list[float], token: list[int]) -> PooledGrad:
    """Of two records: one with these weights and this gradient, one with usual ones."""
    own = torch.tensor([*weights, *([1.0] * len(token))], dtype=torch.float32).double()
    owner = torch.arange(2).repeat_interleave(len(token))
    texts = Texts(torch.tensor(token * 2), owner, own, torch.tensor(1.0, dtype=torch.float64))
    rows = torch.tensor([values, VALUES["usual"]], dtype=torch.float32).double()
    return PooledGrad(weights_of(texts, 7, -1), rows, 7, torch.float32)


def exact_square(total: Tensor) -> Fraction:
    return sum((Fraction(float(v)) ** 2 for v in total.flatten()), Fraction(0))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_no_pooled_contribution_is_above_its_clip_norm(values, weights):
    """In exact arithmetic on what is added: the norm is an upper bound, and not far above."""
    grad = pooled(VALUES[values], WEIGHTS[weights], [1, 4, 1, 1, 0])
    squared = Fraction(float(grad.squared_norm()[0]))
    whole = grad.weighted(torch.tensor([1.0, 0.0], dtype=torch.float64))
    exact = exact_square(whole)
    assert squared * (1 + Fraction(1, 2**21)) >= exact
    assert squared <= exact * (1 + Fraction(1, 10**9)) + Fraction(1, 10**150)
    for clip_norm in (1.0, 1e-9):
        norm = float(squared) ** 0.5
        factor = torch.tensor([min(1.0, clip_norm / max(norm, 2.0**-1022)) * (1 - 2.0**-20), 0.0], dtype=torch.float64)
        assert exact_square(grad.weighted(factor)) <= Fraction(clip_norm) ** 2


@pytest.mark.parametrize("values", VALUES)
def test_no_contribution_by_token_is_above_its_clip_norm(values):
    rows = torch.tensor(VALUES[values]).repeat(2, 4, 1)
    rows[:, 1] *= -1  # cancels
    rows[:, 3] *= 0.3
    grad = embedding_grad(torch.tensor([[1, 1, 4, 1], [1, 0, 4, 1]]), rows, 7, padding=0)
    for record, squared in enumerate(grad.squared_norm().tolist()):
        if squared == float("inf"):
            continue  # too large for 32 bits
        only = torch.zeros(2, dtype=torch.float64).index_fill_(0, torch.tensor(record), 1.0)
        exact = exact_square(grad.weighted(only))
        assert (
            exact * (1 - Fraction(1, 2**17))
            <= Fraction(squared)
            <= exact * (1 + Fraction(1, 2**17)) + Fraction(1, 2**119)
        )


def test_padding_adds_nothing_even_if_its_gradients_are_not_finite():
    rows = torch.ones(2, 3, 4)
    rows[0, 1] = float("nan")
    grad = embedding_grad(torch.tensor([[5, 0, 5], [0, 0, 0]]), rows, 7, padding=0)
    total = grad.weighted(torch.ones(2, dtype=torch.float64))
    assert torch.equal(total, 2.0 * F.one_hot(torch.tensor(5), 7).double()[:, None].expand(7, 4))
    assert torch.allclose(grad.squared_norm(), torch.tensor([16.0, 0.0], dtype=torch.float64), atol=1e-30, rtol=1e-5)


def test_a_hook_on_rows_that_are_only_added_up_is_part_of_the_definition():
    def compute(model: nn.Module, x: Tensor) -> Tensor:
        rows = model.table(x)
        rows.register_hook(lambda gradient: gradient * torch.arange(4.0)[:, None].to(gradient))
        return model.head(rows.mean(1))

    model = Model(compute, table=nn.Embedding(11, 5), head=nn.Linear(5, 3))
    case = Case(model, lambda n: (torch.randint(11, (n, 4)),))
    engine = attached("ghost", case)
    ours, theirs = compared(case, engine, 6, seed=0)
    assert away(ours, theirs) <= CLOSE * length(theirs)
    assert not engine.is_proven


def test_a_record_that_is_not_finite_contributes_nothing_and_changes_no_other():
    grad = pooled([float("nan"), 1.0, float("inf")], [float("inf"), 0.0, 1.0, 1.0, 1.0], [1, 4, 1, 1, 0])
    is_finite = torch.isfinite(grad.squared_norm())
    assert is_finite.tolist() == [False, True]
    other = pooled(VALUES["usual"], WEIGHTS["whole"], [1, 4, 1, 1, 0])
    ours = grad.blank(is_finite).weighted(torch.tensor([0.0, 0.7], dtype=torch.float64))
    assert torch.equal(ours, other.weighted(torch.tensor([0.0, 0.7], dtype=torch.float64)))


def test_a_tables_sum_is_the_same_in_parts(monkeypatch):
    torch.manual_seed(0)
    index, rows = torch.randint(50, (40, 30)).square() % 61, torch.randn(40, 30, 5)
    factor = torch.rand(40, dtype=torch.float64)
    whole = embedding_grad(index, rows, 61, -1).weighted(factor)
    exact = F.one_hot(index, 61).double().mT @ rows.double()
    assert torch.allclose(whole, torch.einsum("b,bvd->vd", factor, exact), atol=1e-5)
    for values in (1, 60, 5000):
        monkeypatch.setattr(embeddings, "VALUES_AT_ONCE", values)
        assert torch.equal(embedding_grad(index, rows, 61, -1).weighted(factor), whole)


def test_other_records_do_not_change_a_records_norm_or_contribution():
    torch.manual_seed(0)
    index, rows = torch.randint(9, (20, 7)), torch.randn(20, 7, 5)
    alone = embedding_grad(index[3:4], rows[3:4], 9, -1)
    among = embedding_grad(index, rows, 9, -1)
    one = torch.ones(1, dtype=torch.float64)
    assert torch.equal(among.squared_norm()[3:4], alone.squared_norm())
    assert torch.equal(among.weighted(F.one_hot(torch.tensor(3), 20).double()), alone.weighted(one))


def test_a_physical_batch_of_padding_alone_adds_nothing_to_a_table():
    grad = embedding_grad(torch.zeros(3, 4, dtype=torch.int64), torch.randn(3, 4, 5), 2, 0)
    assert grad.squared_norm().tolist() == [0.0, 0.0, 0.0]
    assert torch.equal(grad.weighted(torch.ones(3, dtype=torch.float64)), torch.zeros(2, 5, dtype=torch.float64))
