"""Private: each update is plain DP-SGD on its draw, in the one order that keeps the accounting true.

What shows from outside (divisor, noise, clip norm of each record, charge before update) is examined in conformance/.
"""

from __future__ import annotations

import copy
import json
import random
import stat
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import epsilons
from epsilons.errors import CallOrderError, LedgerError, RunError
from epsilons.planning import STRATEGIES
from epsilons.training.clipping import ENGINES
from epsilons.training.randomness import key_from_seed
from options import split

RECORDS, FEATURES, CLASSES = 60, 6, 3
LEVELS = (1.0, 2.0, 4.0)


pytestmark = pytest.mark.usefixtures("one_thread")


# -- what is trained, and how -------------------------------------------------------------------------------


@cache
def some_budgets(levels: tuple[float, ...] = LEVELS, records: int = RECORDS) -> epsilons.Budgets:
    """Every level equally often, in an order that has nothing to do with the data's."""
    return epsilons.Budgets(np.random.default_rng(1).permutation(np.resize(levels, records)))


@cache
def some_plan(
    strategy: str = "scale",
    steps: int = 6,
    batch_size: float = 12.0,
    clip_norm: float = 0.5,
    levels: tuple[float, ...] = LEVELS,
) -> epsilons.Plan:
    recipe = epsilons.Recipe(steps=steps, batch_size=batch_size, clip_norm=clip_norm)
    return epsilons.plan(some_budgets(levels), recipe, strategy=strategy, accountant="rdp")


def some_data(records: int = RECORDS) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(2)
    return torch.randn(records, FEATURES, generator=make), torch.randint(CLASSES, (records,), generator=make)


def a_model(hidden: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if not hidden:
            return nn.Linear(FEATURES, CLASSES)
        return nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES))


def private_over(
    model: nn.Module, data: Any = None, plan: epsilons.Plan | None = None, lr: float = 0.5, **options: Any
):
    """make_private with SGD and what the tests here share."""
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr)
    budgets = options.pop("budgets", some_budgets())
    one_key = {} if "seed" in options else {"key": key_from_seed(4)}  # data, plan and model are what differs here
    options = {**one_key, **options}
    data = some_data() if data is None else data
    return epsilons.make_private(model, optimizer, data, plan or some_plan(), budgets=budgets, **split(options))


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of (inputs, targets) or (inputs, targets, weights)."""
    inputs, targets, *weight = batch
    losses = F.cross_entropy(model(inputs), targets, reduction="none")
    return losses * weight[0] if weight else losses


def checking(private: epsilons.Private) -> bool:
    """True if what the loop holds is only tried, not learnt from."""
    return private._issued.variant is not None


def train(private: epsilons.Private, model: nn.Module) -> epsilons.Private:
    for batch in private.batches:
        private.backward(losses_of(model, batch))
        private.step()
    return private


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def trained(data: Any = None, plan: epsilons.Plan | None = None, hidden: int = 0, **options: Any) -> list[Tensor]:
    """The parameters at the end of a whole run."""
    model = a_model(hidden)
    with private_over(model, data, plan, **options) as private:
        train(private, model)
        assert private.is_finished
    return parameters_of(model)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def close(ours: list[Tensor], theirs: list[Tensor], within: float = 1e-5) -> bool:
    return all((a - b).abs().max() <= within for a, b in zip(ours, theirs, strict=True))


def of_phases(*tables: dict[str, Any], levels: tuple[float, ...] = (500.0, 1000.0)) -> epsilons.Plan:
    """A plan with these tables; budgets so large that nearly any table keeps them."""

    def tabled(budgets, recipe, accountant):
        phases = [epsilons.Phase(**table) for table in tables]
        return epsilons.Plan.of(budgets, recipe, accountant, *phases, strategy="tabled")

    recipe = epsilons.Recipe(steps=sum(t["steps"] for t in tables), batch_size=12.0, clip_norm=0.5)
    return epsilons.plan(some_budgets(levels), recipe, strategy=tabled, accountant="rdp")


def everyone(steps: int = 3, **changes: Any) -> epsilons.Plan:
    """A plan that draws every record at every step."""
    table = {
        "steps": steps,
        "sample_rate": [1.0, 1.0],
        "clip_norm": [0.3, 0.6],
        "weight": [1.0, 1.0],
        "noise_std": 1.0,
        "expected_batch": float(RECORDS),
    }
    return of_phases(table | changes)


# -- the update ---------------------------------------------------------------------------------------------


def plain_dpsgd(
    model: nn.Linear, data: tuple[Tensor, Tensor], plan: epsilons.Plan, group: np.ndarray, private: Any, lr: float
) -> tuple[np.ndarray, np.ndarray]:
    """The oracle: softmax regression by DP-SGD in NumPy, 64 bits, its gradient by the textbook's formula."""
    weight, bias = (p.detach().double().numpy().copy() for p in model.parameters())
    features, targets = (t.numpy() for t in data)
    for number, phase in enumerate(plan.phases):
        for step in range(phase.steps):
            total_weight, total_bias = np.zeros_like(weight), np.zeros_like(bias)
            for i in private._draws.at(number, step):
                x = features[i].astype(np.float64)
                scores = weight @ x + bias
                share = np.exp(scores - scores.max())
                share /= share.sum()
                share[targets[i]] -= 1  # the loss's gradient by the scores
                norm = np.sqrt((np.outer(share, x) ** 2).sum() + (share**2).sum())
                factor = phase.weight[group[i]] * min(1.0, phase.clip_norm[group[i]] / norm)
                total_weight += factor * np.outer(share, x)
                total_bias += factor * share
            noise = phase.noise_std * private._draws.randomness.noise(number, step, weight.size + bias.size)
            weight -= lr * (total_weight + noise[: weight.size].reshape(weight.shape)) / phase.expected_batch
            bias -= lr * (total_bias + noise[weight.size :]) / phase.expected_batch
    return weight, bias


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_is_plain_dpsgd_on_its_draws_and_noise(strategy, engine):
    plan, model = some_plan(strategy, steps=3), a_model()
    private = private_over(model, plan=plan, engine=engine, lr=0.5)
    expected = plain_dpsgd(model, some_data(), plan, some_budgets().group, private, lr=0.5)
    with private:
        train(private, model)
    for ours, its in zip(parameters_of(model), expected, strict=True):
        assert np.abs(ours.numpy() - its).max() <= 1e-6


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("randomness", ["philox", "secure"])
def test_several_phases_run_in_order_each_with_its_own_table(engine, randomness):
    first = {
        "steps": 2,
        "sample_rate": [0.3, 0.0],
        "clip_norm": [0.2, 0.4],
        "weight": [1.0, 2.0],
        "noise_std": 0.5,
        "expected_batch": 9.0,
    }
    second = {
        "steps": 3,
        "sample_rate": [0.1, 0.5],
        "clip_norm": [0.1, 0.9],
        "weight": [0.5, 1.0],
        "noise_std": 1.5,
        "expected_batch": 18.0,
    }
    plan = of_phases(first, second)
    budgets = some_budgets((500.0, 1000.0))
    model = a_model()
    private = private_over(model, plan=plan, budgets=budgets, engine=engine, randomness=randomness, lr=0.5)
    expected = plain_dpsgd(model, some_data(), plan, budgets.group, private, lr=0.5)
    with private:
        train(private, model)
        assert private.ledger.charged == (2, 3)
    for ours, its in zip(parameters_of(model), expected, strict=True):
        assert np.abs(ours.numpy() - its).max() <= 1e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_level_is_plain_dpsgd_to_the_bit_whatever_the_strategy(strategy):
    budgets = some_budgets((2.0,))
    ours = trained(plan=some_plan(strategy, levels=(2.0,)), budgets=budgets)
    assert same(ours, trained(plan=some_plan("uniform", levels=(2.0,)), budgets=budgets))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("hidden", [0, 8])
def test_the_size_of_physical_chunks_makes_no_difference(engine, hidden):
    whole = trained(hidden=hidden, engine=engine)
    for largest in (1, 2, 3, 7):
        assert close(trained(hidden=hidden, engine=engine, max_physical_batch=largest), whole)


def test_no_chunk_is_larger_than_asked_for_and_together_they_are_the_draw():
    model = a_model()
    indices = torch.arange(RECORDS)
    with private_over(model, (*some_data(), indices), max_physical_batch=5) as private:
        seen, step = [], 0
        for inputs, targets, index in private.batches:
            assert 1 <= len(index) <= 5
            assert index.tolist() == private._issued.indices.tolist()
            if not checking(private):
                seen += index.tolist()
            private.backward(losses_of(model, (inputs, targets)))
            if private.step():
                assert seen == private._draws.at(0, step).tolist()
                seen, step = [], step + 1
        assert step == 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_of_other_precisions_are_trained_and_keep_their_type(engine, dtype):
    inputs, targets = some_data()
    model = a_model(hidden=8).to(dtype)
    with private_over(model, (inputs.to(dtype), targets), engine=engine) as private:
        train(private, model)
    assert all(p.dtype == dtype and torch.isfinite(p).all() for p in model.parameters())
    within = 1e-5 if dtype == torch.float64 else 0.1
    assert close([p.float() for p in parameters_of(model)], trained(hidden=8, engine=engine), within)


def test_complex_parameters_are_clipped_and_trained_whole_or_refused():
    """Half a gradient must not be dropped in silence."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(FEATURES, CLASSES, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.weight).abs()

    model = Spectral()
    try:
        with private_over(model) as private:
            train(private, model)
    except epsilons.errors.ModelError:
        return
    assert model.weight.real.std() > 0
    assert model.weight.imag.std() > 0


def test_momentum_adam_and_weight_decay_act_after_the_noise():
    """The oracle: the same optimizer fed by hand with the noisy averages that each update was given."""
    makers = [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.SGD([{"params": [q]} for q in p], lr=0.1),
    ]
    for make in makers:
        model, twin = a_model(hidden=4), a_model(hidden=4)
        optimizer, by_hand = make(list(model.parameters())), make(list(twin.parameters()))
        given: list[list[Tensor]] = []
        optimizer.register_step_pre_hook(lambda o, *_: given.append([p.grad.clone() for p in _held(o)]))  # noqa: B023
        with private_over(model, optimizer=optimizer) as private:
            train(private, model)
        assert len(given) == 6
        for gradients in given:
            for p, g in zip(twin.parameters(), gradients, strict=True):
                p.grad = g
            by_hand.step()
        assert same(parameters_of(model), parameters_of(twin))


def _held(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def test_no_gradient_is_in_sight_outside_the_update():
    model = a_model(hidden=4)
    with private_over(model, max_physical_batch=4) as private:
        for batch in private.batches:
            losses = losses_of(model, batch)
            assert all(p.grad is None for p in model.parameters())
            private.backward(losses)
            assert all(p.grad is None for p in model.parameters())
            private.step()
            assert all(p.grad is None for p in model.parameters())


def test_zero_grad_between_chunks_loses_nothing():
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with private_over(model, optimizer=optimizer, max_physical_batch=4) as private:
        for batch in private.batches:
            optimizer.zero_grad()
            private.backward(losses_of(model, batch))
            optimizer.zero_grad(set_to_none=False)
            private.step()
    assert same(parameters_of(model), trained(max_physical_batch=4))


def test_frozen_parameters_stay_as_they_are():
    model = a_model(hidden=4)
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    with private_over(model) as private:
        train(private, model)
    assert torch.equal(model[0].weight, before)
    assert not model[0].weight.requires_grad


def test_a_seed_repeats_a_run_to_the_bit_and_another_seed_does_not():
    assert same(trained(hidden=4, seed=4), trained(hidden=4, seed=4))
    assert not same(trained(hidden=4, seed=4), trained(hidden=4, seed=5))
    assert not same(trained(hidden=4, seed=None), trained(hidden=4, seed=None))


def test_dropout_is_a_function_of_the_key_and_the_step_whatever_was_drawn_before():
    def run(disturbed: bool) -> list[Tensor]:
        model = nn.Sequential(a_model(hidden=8), nn.Dropout(0.5))
        with private_over(model) as private:
            for batch in private.batches:
                private.backward(losses_of(model, batch))
                private.step()
                if disturbed:
                    torch.rand(17)
        return parameters_of(model)

    assert same(run(False), run(True))


# -- neighbours ---------------------------------------------------------------------------------------------


def sums_of(data: Any, plan: epsilons.Plan, **options: Any) -> tuple[list[list[Tensor]], epsilons.Private]:
    """The un-noised sum before every update of a run that learns nothing (lr 0), so that all steps compare."""
    model = a_model(hidden=4)
    before = parameters_of(model)
    private = private_over(model, data, plan, lr=0.0, **options)
    sums: list[list[Tensor]] = []
    update = private._update

    def spied() -> None:
        sums.append([t.clone() for t in private._noisy_update.sum])
        update()

    private._update = spied
    with private:
        train(private, model)
    assert same(parameters_of(model), before)
    return sums, private


def lines_but_updates(run) -> list[dict]:
    """What a ledger says, but for hashes of noisy updates, of lines, and of the key's place on disk."""
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("prev", "hash", "update", "file")} for line in lines]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("largest", [None, 3])
@pytest.mark.parametrize("null", ["weight of zero", "features not a number", "features infinite"])
@pytest.mark.parametrize("strategy", ["scale", "sample"])
def test_a_record_adds_its_clipped_gradient_where_drawn_and_nothing_elsewhere(
    strategy, null, largest, engine, tmp_path
):
    """D against D with record x emptied, the same key: what a null record means, seen in the sums."""
    x, plan = 17, some_plan(strategy, steps=20, clip_norm=0.2)
    inputs, targets = some_data()
    counted = torch.ones(RECORDS)
    emptied, silenced = inputs.clone(), counted.clone()
    if null == "weight of zero":
        silenced[x] = 0.0
    else:
        emptied[x] = float("nan") if null == "features not a number" else float("inf")
    options = {"engine": engine, "max_physical_batch": largest}
    sums, private = sums_of((inputs, targets, counted), plan, run_dir=tmp_path / "whole", **options)
    without, _ = sums_of((emptied, targets, silenced), plan, run_dir=tmp_path / "emptied", **options)

    model, group = a_model(hidden=4), some_budgets().group
    gradient = torch.autograd.grad(losses_of(model, (inputs[x : x + 1], targets[x : x + 1])).sum(), model.parameters())
    norm = float(torch.cat([g.flatten() for g in gradient]).double().norm())
    clip_norm = plan.phases[0].clip_norm[group[x]]
    drawn = [x in private._draws.at(0, step) for step in range(plan.steps)]
    assert any(drawn)
    assert not all(drawn)
    assert all(t.dtype == torch.float64 for total in sums for t in total)  # 32 bits lose up to 1e-3 of a clip norm
    for step in range(plan.steps):
        difference = [a - b for a, b in zip(sums[step], without[step], strict=True)]
        expected = [g.double() * (min(1.0, clip_norm / norm) if drawn[step] else 0.0) for g in gradient]
        assert close(difference, expected, within=1e-6)
        assert float(torch.cat([d.flatten() for d in difference]).norm()) <= clip_norm * (1 + 1e-6)
        if null == "weight of zero" and not drawn[step]:
            assert same(sums[step], without[step])
    for name in ("plan.json", "run.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "emptied" / name).read_bytes()
    assert lines_but_updates(tmp_path / "whole") == lines_but_updates(tmp_path / "emptied")
    assert sorted(p.name for p in (tmp_path / "whole").iterdir()) == sorted(
        p.name for p in (tmp_path / "emptied").iterdir()
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_data_set_without_a_finite_record_runs_to_the_end_on_noise_alone(engine):
    inputs, targets = some_data()
    ended = trained((torch.full_like(inputs, float("nan")), targets), engine=engine)
    assert all(torch.isfinite(p).all() for p in ended)
    sums, _ = sums_of((torch.full_like(inputs, float("nan")), targets), some_plan(), engine=engine)
    assert all(not t.any() for total in sums for t in total)


# -- the order ----------------------------------------------------------------------------------------------


def test_the_optimizer_cannot_be_stepped_by_hand():
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = parameters_of(model)
    with private_over(model, optimizer=optimizer) as private:
        for batch in private.batches:
            losses_of(model, batch).mean().backward()
            with pytest.raises(CallOrderError, match=r"optimizer.step\(\) was called outside private.step\(\)"):
                optimizer.step()
            break
        assert same(parameters_of(model), before)
    optimizer.step()
    assert not same(parameters_of(model), before)


def test_each_chunk_takes_one_backward():
    model = a_model()
    with private_over(model) as private:
        for batch in private.batches:
            private.backward(losses_of(model, batch))
            with pytest.raises(CallOrderError, match="twice on one physical batch"):
                private.backward(losses_of(model, batch))
            private.step()


def test_a_step_needs_a_backward_and_comes_once():
    model = a_model()
    with private_over(model) as private:
        with pytest.raises(CallOrderError, match="outside a physical batch"):
            private.step()
        with pytest.raises(CallOrderError, match="outside a physical batch"):
            private.backward(torch.zeros(1, requires_grad=True))
        for batch in private.batches:
            with pytest.raises(CallOrderError, match=r"before private.backward"):
                private.step()
            private.backward(losses_of(model, batch))
            private.step()
            with pytest.raises(CallOrderError, match="twice on one"):
                private.step()
            with pytest.raises(CallOrderError, match="twice on one"):
                private.backward(losses_of(model, batch))


@pytest.mark.parametrize("forgotten", ["backward", "step"])
def test_the_loop_does_not_go_on_without_backward_and_step(forgotten):
    model = a_model()
    with private_over(model) as private:
        loop = private.batches
        batch = next(loop)
        if forgotten == "step":
            private.backward(losses_of(model, batch))
        with pytest.raises(CallOrderError, match=rf"went on to the next physical batch without private.{forgotten}"):
            next(loop)
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("after", ["yield", "backward", "step"])
def test_a_draw_left_unfinished_cannot_be_drawn_again(after):
    model = a_model()
    with private_over(model, max_physical_batch=3) as private:
        for batch in private.batches:
            if after == "yield":
                break
            private.backward(losses_of(model, batch))
            if after == "backward":
                break
            assert not private.step()
            break
        for _ in range(2):
            with pytest.raises(CallOrderError, match="left in the middle of a draw"):
                next(iter(private.batches))


def test_leaving_after_a_complete_update_and_coming_back_goes_on():
    model, updates = a_model(hidden=4), 0
    with private_over(model, max_physical_batch=5) as private:
        while not private.is_finished:
            for batch in private.batches:
                private.backward(losses_of(model, batch))
                if private.step():
                    updates += 1
                    break
        assert updates == 6
        assert private.ledger.charged == (6,)
        assert list(private.batches) == []
    assert same(parameters_of(model), trained(hidden=4, max_physical_batch=5))


def _one_update(private: epsilons.Private, model: nn.Module, loop: Any) -> None:
    for batch in loop:
        private.backward(losses_of(model, batch))
        if private.step():
            return


def test_an_older_loop_cannot_go_on_beside_a_newer_one():
    model = a_model()
    with private_over(model) as private:
        older, newer = private.batches, private.batches
        _one_update(private, model, older)
        _one_update(private, model, newer)
        with pytest.raises(CallOrderError):
            next(older)
        _one_update(private, model, newer)
        assert private.ledger.charged == (3,)


@pytest.mark.parametrize("after", ["yield", "backward", "step", "step of a broken chunk"])
def test_an_older_loop_hands_out_nothing_while_a_newer_one_is_at_work(after):
    """Were it to, records of an earlier draw would enter this one, which is no longer a Poisson sample."""
    model = a_model()
    inputs, targets = some_data()
    plan, budgets = everyone(), some_budgets((500.0, 1000.0))
    if after == "step of a broken chunk":
        inputs[:30] = float("nan")  # each draw's first chunk is played again, record by record; its last is not
    data = inputs, targets
    with private_over(model, data, plan, budgets=budgets, max_physical_batch=30, engine="loop") as private:
        older = private.batches
        _one_update(private, model, older)
        newer = private.batches
        batch = next(newer)
        if after != "yield":
            private.backward(losses_of(model, batch))
        if after.startswith("step"):
            private.step()
        with pytest.raises(CallOrderError):
            next(older)


@pytest.mark.parametrize("change", ["added", "added with a gradient", "frozen", "thawed", "replaced", "taken away"])
def test_parameters_that_change_later_are_refused_before_the_next_update(change):
    """Whatever is trained without noise, or not at all though noise is paid for, is refused."""
    model, stranger = a_model(hidden=4), nn.Parameter(torch.zeros(2))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with private_over(model, optimizer=optimizer) as private:
        _one_update(private, model, private.batches)
        if change.startswith("added"):
            optimizer.add_param_group({"params": [stranger]})
            stranger.grad = torch.ones(2) if "gradient" in change else None
        elif change == "frozen":
            model[0].weight.requires_grad_(False)
        elif change == "thawed":
            model[0].bias.requires_grad_(True)
        elif change == "replaced":
            model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        else:
            optimizer.param_groups[0]["params"].pop()
        before = parameters_of(model)
        with pytest.raises(epsilons.errors.ModelError, match="trained parameters changed since make_private"):
            _one_update(private, model, private.batches)
        assert same(parameters_of(model), before)
        assert not stranger.any()


def test_an_error_of_the_optimizer_does_not_let_the_same_draw_happen_twice():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("out of memory")

    model = a_model()
    with private_over(model, optimizer=Failing(model.parameters(), lr=0.1)) as private:
        with pytest.raises(RuntimeError, match="out of memory"):
            train(private, model)
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(CallOrderError, match="middle of a draw"):
            next(private.batches)


class _OutOfMemory:
    """An engine that fails on one chunk, as a large draw may."""

    def __init__(self, chunk: int) -> None:
        self.inner, self.left = ENGINES["loop"](), chunk

    def attach(self, *given: Any) -> None:
        self.inner.attach(*given)

    def begin(self, records: int) -> None:
        self.inner.begin(records)

    def clipped_sum(self, *given: Any) -> list[Tensor]:
        if self.left == 0:
            raise torch.OutOfMemoryError("no memory left")
        self.left -= 1
        return self.inner.clipped_sum(*given)

    def detach(self) -> None:
        self.inner.detach()


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_a_chunk_whose_backward_failed_cannot_be_passed_over(chunk):
    """Whoever else is drawn must not decide whether a chunk counts: the draw is finished whole, or not at all."""
    model = a_model()
    plan, budgets = everyone(), some_budgets((500.0, 1000.0))
    with private_over(model, plan=plan, budgets=budgets, max_physical_batch=15, engine=_OutOfMemory(chunk)) as private:
        before = parameters_of(model)
        for batch in private.batches:
            try:
                private.backward(losses_of(model, batch))
            except torch.OutOfMemoryError:
                with pytest.raises(CallOrderError):
                    private.step()
                break
            private.step()
        assert same(parameters_of(model), before)


# -- the end ------------------------------------------------------------------------------------------------


def all_hooks(model: nn.Module) -> list[Any]:
    return [
        hook
        for module in model.modules()
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_pre_hooks_with_kwargs,
        )
        for hook in hooks.values()
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_close_leaves_model_and_optimizer_as_they_were(engine):
    model = nn.ModuleDict({"body": a_model(hidden=4), "lstm": nn.LSTM(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = private_over(model, optimizer=optimizer, engine=engine)
    for batch in private.batches:
        private.backward(losses_of(model["body"], batch))
        if private.step():
            break
    private.close()
    private.close()
    assert all_hooks(model) == []
    assert not optimizer._optimizer_step_pre_hooks
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    losses_of(model["body"], some_data()).mean().backward()
    optimizer.step()
    with pytest.raises(CallOrderError, match="closed"):
        next(private.batches)
    assert copy.deepcopy(model) is not model


def test_closing_in_the_middle_of_a_draw_updates_nothing():
    model = a_model()
    private = private_over(model)
    loop = private.batches
    _one_update(private, model, loop)
    before = parameters_of(model)
    private.backward(losses_of(model, next(loop)))
    private.close()
    with pytest.raises(CallOrderError):
        private.step()
    with pytest.raises(CallOrderError):
        next(loop)
    assert same(parameters_of(model), before)
    assert all(p.grad is None for p in model.parameters())


def test_an_error_inside_the_loop_closes_what_the_with_statement_opened():
    model = a_model()

    def interrupted() -> None:
        with private_over(model) as private:
            for batch in private.batches:
                private.backward(losses_of(model, batch))
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all_hooks(model) == []


def test_a_second_private_may_follow_the_first_on_the_same_model():
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for seed in (1, 2):
        with private_over(model, optimizer=optimizer, seed=seed) as private:
            train(private, model)
            assert private.is_finished


def test_two_open_privates_do_not_share_an_optimizer():
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = parameters_of(model)
    with (
        private_over(model, optimizer=optimizer),
        private_over(model, optimizer=optimizer) as second,
        pytest.raises(CallOrderError, match="close it first"),
    ):
        _one_update(second, model, second.batches)
    assert same(parameters_of(model), before)


# -- empty draws --------------------------------------------------------------------------------------------


class Listed(Dataset):
    """A map-style data set of dictionaries."""

    def __init__(self) -> None:
        self.inputs, self.targets = some_data()

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"features": self.inputs[index], "wanted": {"class": int(self.targets[index])}, "index": index}


def _pair_of(batch: Any) -> tuple[Tensor, Tensor]:
    return (batch["features"], batch["wanted"]["class"]) if isinstance(batch, dict) else tuple(batch)


@pytest.mark.parametrize("kind", ["tensors", "data set", "data set, two workers"])
def test_draws_of_nobody_are_charged_noised_and_applied_and_never_handed_out(kind):
    plan = some_plan("uniform", steps=30, batch_size=0.5)
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    updates: list[bool] = []
    optimizer.register_step_pre_hook(lambda o, *_: updates.append(all(p.grad.any() for p in _held(o))))
    num_workers = 2 if kind.endswith("num_workers") else 0
    data = some_data() if kind == "tensors" else Listed()
    private = private_over(model, data, plan, optimizer=optimizer, num_workers=num_workers)
    expected = plain_dpsgd(model, some_data(), plan, some_budgets().group, private, lr=0.5)
    sizes = [len(private._draws.at(0, step)) for step in range(plan.steps)]
    assert sizes.count(0) > 10
    told: list[int] = []
    private.on_update(lambda known: told.append(sum(known.ledger.charged)))
    with private:
        completed = 0
        for batch in private.batches:
            inputs, targets = _pair_of(batch)
            assert len(inputs) > 0
            private.backward(losses_of(model, (inputs, targets)))
            completed += private.step()
        assert private.is_finished
        assert private.ledger.charged == (plan.steps,)
    assert updates == [True] * plan.steps
    assert told == list(range(1, plan.steps + 1))
    assert completed == plan.steps - sizes.count(0)
    for ours, its in zip(parameters_of(model), expected, strict=True):
        assert np.abs(ours.numpy() - its).max() <= 5e-6  # after 30 updates of noise, the parameters are large


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("rates", [[0.0, 0.02], [0.02, 0.0], [0.0, 0.0]])
def test_a_phase_that_draws_nobody_is_run_through_all_the_same(rates, num_workers):
    table = {"clip_norm": [0.5, 0.5], "weight": [1.0, 1.0], "noise_std": 1.0, "expected_batch": 6.0}
    plan = of_phases({"steps": 5, "sample_rate": rates, **table}, {"steps": 5, "sample_rate": rates[::-1], **table})
    model = a_model()
    with private_over(model, Listed(), plan, budgets=some_budgets((500.0, 1000.0)), num_workers=num_workers) as private:
        for batch in private.batches:
            private.backward(losses_of(model, _pair_of(batch)))
            private.step()
        assert private.is_finished
        assert private.ledger.charged == (5, 5)


# -- where records come from --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("largest", [None, 4])
def test_a_data_set_and_its_tensors_train_alike(num_workers, largest):
    expected = trained(hidden=4, max_physical_batch=largest)
    assert same(trained(TensorDataset(*some_data()), hidden=4, max_physical_batch=largest), expected)
    assert same(trained(list(some_data()), hidden=4, max_physical_batch=largest), expected)
    model = a_model(hidden=4)
    with private_over(model, Listed(), num_workers=num_workers, max_physical_batch=largest) as private:
        for batch in private.batches:
            private.backward(losses_of(model, _pair_of(batch)))
            private.step()
    assert same(parameters_of(model), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_record_keeps_its_index_and_its_budget_through_workers_and_chunks(num_workers):
    """Each group has its own rate: 0 or 1. Whoever is handed out belongs to the group that is drawn."""
    table = {"clip_norm": [0.5, 0.5], "weight": [1.0, 1.0], "noise_std": 1.0, "expected_batch": 6.0}
    plan = of_phases({"steps": 2, "sample_rate": [1.0, 0.0], **table}, {"steps": 2, "sample_rate": [0.0, 1.0], **table})
    budgets, data = some_budgets((500.0, 1000.0)), Listed()
    model = a_model()
    with private_over(model, data, plan, budgets=budgets, num_workers=num_workers, max_physical_batch=7) as private:
        seen: list[list[int]] = [[]]
        for batch in private.batches:
            if not checking(private):
                assert torch.equal(batch["features"], data.inputs[batch["index"]])
                seen[-1] += batch["index"].tolist()
            private.backward(losses_of(model, _pair_of(batch)))
            if private.step():
                seen.append([])
    strict, loose = (np.flatnonzero(budgets.group == g).tolist() for g in (0, 1))
    assert seen == [strict, strict, loose, loose, []]


class Augmented(Dataset):
    """Every record read with fresh random numbers from all three generators."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        drawn = [float(torch.rand(())), float(np.random.rand()), random.random()]
        return torch.tensor(drawn, dtype=torch.float64), 0, index


def augmentations(num_workers: int, **options: Any) -> dict[tuple[int, int, int], list[float]]:
    """{(phase, step, record): what was drawn for it}."""
    table = {"clip_norm": [0.5, 0.5], "weight": [1.0, 1.0], "noise_std": 1.0, "expected_batch": 6.0}
    plan = of_phases({"steps": 3, "sample_rate": [0.3, 0.3], **table}, {"steps": 2, "sample_rate": [0.3, 0.3], **table})
    model, found = nn.Linear(3, CLASSES).double(), {}
    budgets = some_budgets((500.0, 1000.0))
    with private_over(model, Augmented(), plan, budgets=budgets, num_workers=num_workers, **options) as private:
        for drawn, targets, index in private.batches:
            issued = private._issued
            if not checking(private):
                for i, row in zip(index.tolist(), drawn.tolist(), strict=True):
                    found[issued.physical.phase, issued.physical.step, i] = row
            private.backward(losses_of(model, (drawn, targets)))
            private.step()
    return found


def test_augmentation_depends_on_key_phase_step_and_record_alone():
    expected = augmentations(0)
    assert len({tuple(row) for row in expected.values()}) == len(expected)
    assert augmentations(2) == expected
    assert augmentations(2, max_physical_batch=4) == expected
    random.seed(1)
    assert augmentations(0, max_physical_batch=1) == expected
    other = augmentations(0, seed=5)
    assert all(other[address] != row for address, row in expected.items() if address in other)


def test_batches_keep_the_structure_that_a_collate_function_gives_them():
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"x": torch.stack([r["features"] for r in rows]), "names": [f"record {r['index']}" for r in rows]}

    model, targets = a_model(), some_data()[1]
    with private_over(model, Listed(), collate_fn=collate) as private:
        for batch in private.batches:
            assert batch["names"] == [f"record {i}" for i in private._issued.indices]
            of_names = targets[[int(name.split()[1]) for name in batch["names"]]]
            private.backward(losses_of(model, (batch["x"], of_names)))
            private.step()
        assert private.is_finished


def test_lists_in_a_batch_are_cut_with_its_tensors_record_by_record():
    """Texts stay lists of strings: the record that broke the chunk must be left alone with its own."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"x": torch.stack([r["features"] for r in rows]), "names": [f"record {r['index']}" for r in rows]}

    model, data = a_model(), Listed()
    data.inputs[5:20] = float("nan")
    with private_over(model, data, collate_fn=collate) as private:
        for batch in private.batches:
            assert len(batch["names"]) == len(batch["x"])
            of_names = data.targets[[int(name.split()[1]) for name in batch["names"]]]
            private.backward(losses_of(model, (batch["x"], of_names)))
            private.step()
        assert private.is_finished


# -- the run's folder ---------------------------------------------------------------------------------------


def test_a_run_folder_holds_plan_ledger_and_a_key_that_only_its_owner_reads(tmp_path):
    run_dir, model = tmp_path / "run", a_model()
    with private_over(model, run_dir=run_dir, seed=None) as private:
        key = run_dir / "secret" / "key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
        assert len(key.read_bytes()) == 32
        secret = key.read_bytes()
        assert private.ledger.durable
        train(private, model)
        assert not key.exists()
    assert sorted(p.name for p in run_dir.iterdir()) == ["checkpoints", "ledger.jsonl", "plan.json", "run.json"]
    for file in run_dir.rglob("*"):
        assert file.is_dir() or (secret not in file.read_bytes() and secret.hex().encode() not in file.read_bytes())
    assert epsilons.Plan.load(run_dir / "plan.json") == some_plan()
    assert epsilons.ledger.read_charges(run_dir / "ledger.jsonl", some_plan()) == (6,)


def test_the_key_is_gone_after_the_last_update_even_if_the_loop_is_left_there(tmp_path):
    run_dir, model, updates = tmp_path / "run", a_model(), 0
    with private_over(model, run_dir=run_dir) as private:
        for batch in private.batches:
            private.backward(losses_of(model, batch))
            updates += private.step()
            if updates == private.plan.steps:
                break
        assert private.is_finished
    assert not (run_dir / "secret").exists()


@pytest.mark.parametrize("for_good", [False, True])
def test_closing_early_keeps_the_charges_and_the_key_of_a_run_that_can_resume(tmp_path, for_good):
    run_dir, model = tmp_path / "run", a_model()
    with private_over(model, run_dir=run_dir) as private:
        _one_update(private, model, private.batches)
        assert (run_dir / "secret" / "key").exists()
        if for_good:
            private.finish()
    assert (run_dir / "secret" / "key").exists() is not for_good
    assert 1 <= epsilons.ledger.read_charges(run_dir / "ledger.jsonl", some_plan())[0] <= 6
    with pytest.raises(LedgerError, match="closed"):
        private.ledger.charge(0, 1)


def test_an_occupied_folder_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="not empty"):
        private_over(a_model(), run_dir=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_private_shows_progress_and_no_budget():
    model = a_model()
    with private_over(model) as private:
        _one_update(private, model, private.batches)
        assert repr(private) == "Private(1 of 6 steps)"
        assert "1 of 6 steps charged (in memory, not durable)" in str(private.ledger)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_check_leaves_no_trace_in_the_generators(workers, monkeypatch):
    """Records and batches are read again for it, and reading seeds them."""

    def states() -> list[Any]:
        found = []
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        model, plan = a_model(), some_plan()
        with private_over(model, Listed(), plan, num_workers=workers) as private:
            for batch in private.batches:
                if not private.is_check:
                    found.append((random.getstate(), np.random.rand(), torch.rand(())))
                losses = F.cross_entropy(model(batch["features"]), batch["wanted"]["class"], reduction="none")
                private.backward(losses)
                private.step()
        return found

    checked = states()
    monkeypatch.setattr("epsilons.training.microbatches.Issuer._checks", lambda *_: iter(()))
    assert checked == states()
