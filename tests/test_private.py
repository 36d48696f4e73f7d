"""Private: each update is plain DP-SGD on its draw, in the one order that keeps the accounting true.

What shows from outside (divisor, noise, clip norm of each record, charge before update) is examined in conformance/.
"""

from __future__ import annotations

import copy
import json
import random
import stat
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import epsilons
from epsilons.clipping import ENGINES
from epsilons.errors import CallOrderError, LedgerError, RunError
from epsilons.planning import STRATEGIES
from functional import Model, Records
from shares import share
from small_runs import (
    CLASSES,
    FEATURES,
    RECORDS,
    Listed,
    a_model,
    close,
    everyone,
    lines,
    losses_of,
    of_phases,
    one_update,
    parameters_of,
    private_over,
    same,
    some_budgets,
    some_data,
    some_plan,
    train,
    trained,
    without_times,
)
from sums import OVERSTATED

pytestmark = pytest.mark.usefixtures("one_thread")


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
                factor = phase.weight[group[i]] * min(1.0, phase.clip_norm[group[i]] / (OVERSTATED * norm))
                total_weight += factor * np.outer(share, x)
                total_bias += factor * share
            noise = phase.noise_std * private._draws.randomness.noise(number, step, weight.size + bias.size)
            weight -= lr * (total_weight + noise[: weight.size].reshape(weight.shape)) / phase.expected_batch
            bias -= lr * (total_bias + noise[weight.size :]) / phase.expected_batch
    return weight, bias


def check_plain_dpsgd(plan: epsilons.Plan, within: float = 1e-6, **options: Any) -> None:
    model = a_model()
    private = private_over(model, plan=plan, lr=0.5, **options)
    budgets = some_budgets(tuple(plan.epsilons.tolist()))
    expected = plain_dpsgd(model, some_data(), plan, budgets.group, private, lr=0.5)
    with private:
        train(private, model)
        assert private.ledger.charged == tuple(phase.steps for phase in plan.phases)
    for ours, its in zip(parameters_of(model), expected, strict=True):
        assert np.abs(ours.numpy() - its).max() <= within


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_is_plain_dpsgd_on_its_draws_and_noise(strategy, engine):
    check_plain_dpsgd(some_plan(strategy, steps=3), engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("randomness", ["chacha20", "secure"])
def test_several_phases_run_in_order_each_with_its_own_table(engine, randomness):
    first = {"sample_rate": [0.3, 0.0], "clip_norm": [0.2, 0.4], "weight": [1.0, 2.0], "noise_std": 0.5}
    second = {"sample_rate": [0.1, 0.5], "clip_norm": [0.1, 0.9], "weight": [0.5, 1.0], "noise_std": 1.5}
    plan = of_phases(first | {"steps": 2, "expected_batch": 9.0}, second | {"steps": 3, "expected_batch": 18.0})
    check_plain_dpsgd(plan, engine=engine, randomness=randomness)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("hidden", [0, 8])
def test_the_size_of_physical_batches_makes_no_difference(engine, hidden):
    whole = trained(hidden=hidden, engine=engine)
    for largest in (1, 2, 3, 7):
        assert close(trained(hidden=hidden, engine=engine, max_physical_batch=largest), whole)


def test_no_physical_batch_exceeds_its_limit_and_together_they_are_the_draw():
    model = a_model()
    indices = torch.arange(RECORDS)
    with private_over(model, (*some_data(), indices), max_physical_batch=5) as private:
        seen, step = [], 0
        for inputs, targets, index in private.batches:
            assert 1 <= len(index) <= 5
            assert index.tolist() == private._issued.indices.tolist()
            if not private.is_check:
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

    weight = nn.Parameter(torch.ones(FEATURES, CLASSES, dtype=torch.complex64))
    model = Model(lambda m, x: (x.to(torch.complex64) @ m.weight).abs(), weight=weight)
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


def test_zero_grad_between_physical_batches_loses_nothing():
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
    """The ledger's lines without hashes of noisy updates and of lines, and without the key's place on disk."""
    return [{k: v for k, v in line.items() if k not in ("prev", "hash", "update", "file")} for line in lines(run)]


NULLS = ("weight of zero", "features not a number", "features infinite")


@pytest.mark.parametrize(
    ("strategy", "null", "largest", "engine"), share(product(["scale", "sample"], NULLS, ["auto", 3], ENGINES), 8)
)
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
        expected = [g.double() * (min(1.0, clip_norm / (OVERSTATED * norm)) if drawn[step] else 0.0) for g in gradient]
        assert close(difference, expected, within=1e-6)
        assert float(torch.cat([d.flatten() for d in difference]).norm()) <= clip_norm * (1 + 1e-6)
        if null == "weight of zero" and not drawn[step]:
            assert same(sums[step], without[step])
    for name in ("plan.json", "run.json"):
        files = [json.loads((tmp_path / folder / name).read_text()) for folder in ("whole", "emptied")]
        assert without_times(files[0]) == without_times(files[1])
    assert lines_but_updates(tmp_path / "whole") == lines_but_updates(tmp_path / "emptied")
    names = [sorted(p.name for p in (tmp_path / folder).iterdir()) for folder in ("whole", "emptied")]
    assert names[0] == names[1]


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


def test_a_physical_batch_takes_one_backward_and_then_one_step():
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
            with pytest.raises(CallOrderError, match="twice on one physical batch"):
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
        words = rf"went on to the next physical batch without private.{forgotten}"
        with pytest.raises(CallOrderError, match=words) as caught:
            next(loop)
        assert all(p.grad is None for p in model.parameters())
    shown = [line.split("#")[0].strip() for line in str(caught.value).splitlines()]
    assert shown[-3:] == ["for batch in private.batches:", "private.backward(losses)", "private.step()"]


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
            one_update(private, model, private.batches)
            updates += 1
        assert updates == 6
        assert private.ledger.charged == (6,)
        assert list(private.batches) == []
    assert same(parameters_of(model), trained(hidden=4, max_physical_batch=5))


def test_an_older_loop_cannot_go_on_beside_a_newer_one():
    model = a_model()
    with private_over(model) as private:
        older, newer = private.batches, private.batches
        one_update(private, model, older)
        one_update(private, model, newer)
        with pytest.raises(CallOrderError):
            next(older)
        one_update(private, model, newer)
        assert private.ledger.charged == (3,)


@pytest.mark.parametrize("after", ["yield", "backward", "step", "step of a broken batch"])
def test_an_older_loop_hands_out_nothing_while_a_newer_one_is_at_work(after):
    """Were it to, records of an earlier draw would enter this one, which is no longer a Poisson sample."""
    model = a_model()
    inputs, targets = some_data()
    if after == "step of a broken batch":
        inputs[:30] = float("nan")  # each draw's first batch is played again, record by record; its last is not
    with private_over(model, (inputs, targets), everyone(), max_physical_batch=30, engine="loop") as private:
        older = private.batches
        one_update(private, model, older)
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
        one_update(private, model, private.batches)
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
            one_update(private, model, private.batches)
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
    """An engine that fails on one physical batch, as a large draw may."""

    def __init__(self, number: int) -> None:
        self.inner, self.left = ENGINES["loop"](), number
        self.attach, self.begin, self.detach = self.inner.attach, self.inner.begin, self.inner.detach

    def clipped_sum(self, *given: Any) -> list[Tensor]:
        if self.left == 0:
            raise torch.OutOfMemoryError("no memory left")
        self.left -= 1
        return self.inner.clipped_sum(*given)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_physical_batch_with_a_failed_backward_cannot_be_passed_over(number):
    """The other records drawn must not decide if a batch counts: the draw is finished whole, or not at all."""
    model = a_model()
    with private_over(model, plan=everyone(), max_physical_batch=15, engine=_OutOfMemory(number)) as private:
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
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    names = [f"_{kind}{more}" for kind in kinds for more in (("", "_with_kwargs") if "forward" in kind else ("",))]
    return [hook for module in model.modules() for name in names for hook in getattr(module, name).values()]


@pytest.mark.parametrize("engine", ENGINES)
def test_close_leaves_model_and_optimizer_as_they_were(engine):
    model = nn.ModuleDict({"body": a_model(hidden=4), "lstm": nn.LSTM(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = private_over(model, optimizer=optimizer, engine=engine)
    train(private, model["body"], until=1)
    private.close()
    private.close()
    assert all_hooks(model) == []
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
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
    one_update(private, model, loop)
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
        one_update(second, model, second.batches)
    assert same(parameters_of(model), before)


# -- empty draws --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tensors", "data set", "data set, two workers"])
def test_empty_draws_are_charged_noised_and_applied_and_never_handed_out(kind):
    plan = some_plan("uniform", steps=30, batch_size=0.5)
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    updates: list[bool] = []
    optimizer.register_step_pre_hook(lambda o, *_: updates.append(all(p.grad.any() for p in _held(o))))
    num_workers = 2 if kind.endswith("workers") else 0
    data = some_data() if kind == "tensors" else Listed()
    private = private_over(model, data, plan, optimizer=optimizer, num_workers=num_workers)
    expected = plain_dpsgd(model, some_data(), plan, some_budgets().group, private, lr=0.5)
    sizes = [len(private._draws.at(0, step)) for step in range(plan.steps)]
    assert sizes.count(0) > 10
    counts: list[int] = []
    private.on_update(lambda known: counts.append(sum(known.ledger.charged)))
    with private:
        completed = 0
        for batch in private.batches:
            losses = losses_of(model, batch)
            assert len(losses) > 0
            private.backward(losses)
            completed += private.step()
        assert private.is_finished
        assert private.ledger.charged == (plan.steps,)
    assert updates == [True] * plan.steps
    assert counts == list(range(1, plan.steps + 1))
    assert completed == plan.steps - sizes.count(0)
    for ours, its in zip(parameters_of(model), expected, strict=True):
        assert np.abs(ours.numpy() - its).max() <= 5e-6  # after 30 updates of noise, the parameters are large


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("rates", [[0.0, 0.02], [0.02, 0.0], [0.0, 0.0]])
def test_a_phase_with_empty_draws_alone_is_run_through_all_the_same(rates, num_workers):
    plan = of_phases({"steps": 5, "sample_rate": rates}, {"steps": 5, "sample_rate": rates[::-1]})
    model = a_model()
    with private_over(model, Listed(), plan, num_workers=num_workers) as private:
        train(private, model)
        assert private.is_finished
        assert private.ledger.charged == (5, 5)


# -- where records come from --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("largest", ["auto", 4])
def test_a_data_set_and_its_tensors_train_alike(num_workers, largest):
    expected = trained(hidden=4, max_physical_batch=largest)
    for data in (TensorDataset(*some_data()), list(some_data())):
        assert same(trained(data, hidden=4, max_physical_batch=largest), expected)
    assert same(trained(Listed(), hidden=4, num_workers=num_workers, max_physical_batch=largest), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_record_keeps_its_index_and_its_budget_through_workers_and_batches(num_workers):
    """Each group has its own rate, 0 or 1: each record that is handed out belongs to the group that is drawn."""
    plan = of_phases({"steps": 2, "sample_rate": [1.0, 0.0]}, {"steps": 2, "sample_rate": [0.0, 1.0]})
    data, model = Listed(), a_model()
    with private_over(model, data, plan, num_workers=num_workers, max_physical_batch=7) as private:
        seen: list[list[int]] = [[]]
        for batch in private.batches:
            if not private.is_check:
                assert torch.equal(batch["features"], data.inputs[batch["index"]])
                seen[-1] += batch["index"].tolist()
            private.backward(losses_of(model, batch))
            if private.step():
                seen.append([])
    strict, loose = (np.flatnonzero(some_budgets((500.0, 1000.0)).group == g).tolist() for g in (0, 1))
    assert seen == [strict, strict, loose, loose, []]


def augmented(index: int) -> tuple[Tensor, int, int]:
    """A record read with fresh random numbers from all three generators."""
    drawn = [float(torch.rand(())), float(np.random.rand()), random.random()]
    return torch.tensor(drawn, dtype=torch.float64), 0, index


def augmentations(num_workers: int, **options: Any) -> dict[tuple[int, int, int], list[float]]:
    """{(phase, step, record): what was drawn for it}."""
    plan = of_phases({"steps": 3, "sample_rate": [0.3, 0.3]}, {"steps": 2, "sample_rate": [0.3, 0.3]})
    model, found = nn.Linear(3, CLASSES).double(), {}
    with private_over(model, Records(augmented, RECORDS), plan, num_workers=num_workers, **options) as private:
        for drawn, targets, index in private.batches:
            issued = private._issued
            if not private.is_check:
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


@pytest.mark.parametrize("is_broken", [False, True])
def test_batches_keep_the_structure_of_a_collate_function_also_when_cut(is_broken):
    """Texts stay lists of strings: a record that broke the batch must be left alone with its own text."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {"x": torch.stack([r["features"] for r in rows]), "names": [f"record {r['index']}" for r in rows]}

    model, data = a_model(), Listed()
    if is_broken:
        data.inputs[5:20] = float("nan")
    with private_over(model, data, collate_fn=collate) as private:
        for batch in private.batches:
            assert batch["names"] == [f"record {i}" for i in private._issued.indices]
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
    assert epsilons.ledger.ledger.read_charges(run_dir / "ledger.jsonl", some_plan()) == (6,)


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
        one_update(private, model, private.batches)
        assert (run_dir / "secret" / "key").exists()
        if for_good:
            private.finish()
    assert (run_dir / "secret" / "key").exists() is not for_good
    assert 1 <= epsilons.ledger.ledger.read_charges(run_dir / "ledger.jsonl", some_plan())[0] <= 6
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
        one_update(private, model, private.batches)
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
                private.backward(losses_of(model, batch))
                private.step()
        return found

    checked = states()
    monkeypatch.setattr("epsilons.training.microbatches.Issuer._checks", lambda *_: iter(()))
    assert checked == states()
