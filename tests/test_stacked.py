"""A stack of models: each ends where make_private ends under the same key, and what cannot be stacked is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import epsilons
from epsilons.auditing import stacked as stacking
from epsilons.auditing.stacked import MemberDraws, StackedModel, train_stacked, unstackable
from epsilons.draws.persons_rows import Draws
from epsilons.draws.randomness import Randomness, key_from_seed
from epsilons.errors import DataError, InputError, ModelError
from epsilons.planning import STRATEGIES
from shares import share
from small_runs import (
    CLASSES,
    FEATURES,
    RECORDS,
    everyone,
    of_phases,
    parameters_of,
    private_over,
    same,
    some_budgets,
    some_data,
    some_plan,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, MODELS = 25, 3
BUDGETS = (4.0, 8.0, 32.0)


def linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def perceptron(*hidden: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    width = FEATURES
    for units in hidden:
        layers += [nn.Linear(width, units), activation()]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def started(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.8, nesterov=True, weight_decay=0.01)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def backwards(parameters: Any) -> torch.optim.Optimizer:
    """Biases first, at another rate: noise is split in the optimizer's order."""
    weights, biases = [], []
    for p in parameters:
        (weights if p.ndim == 2 else biases).append(p)
    return torch.optim.AdamW([{"params": biases, "lr": 0.1}, {"params": weights, "weight_decay": 0.1}], lr=0.05)


@cache
def members(models: int = MODELS) -> np.ndarray:
    coins = np.random.default_rng(5).random((models, RECORDS)) < 0.5
    coins[:, :3] = False  # records that no model is trained on
    return coins


def key(model: int) -> bytes:
    return key_from_seed(100 + model)


def stacked(
    model: nn.Module, plan: epsilons.Plan, make: Any = sgd, data: Any = None, models: int = MODELS, **options: Any
) -> StackedModel:
    given = {
        "group": some_budgets(tuple(plan.epsilons.tolist())).group,
        "member": members(models),
        "randomness": [Randomness.fresh(key=key(k)) for k in range(models)],
    }
    draws = MemberDraws(plan, **{name: options.pop(name, value) for name, value in given.items()})
    return train_stacked(model, make, some_data() if data is None else data, draws, **options)


def alone(
    make_model: Callable[[], nn.Module], plan: epsilons.Plan, make: Any, k: int, data: Any = None, engine: str = "auto"
) -> list[Tensor]:
    """The slow twin: make_private over all records, with zero losses for those that are no members."""
    model = started(make_model)
    member = torch.from_numpy(members()[k].astype(np.float32))
    data = (*(some_data() if data is None else data), member)
    optimizer = make(model.parameters())
    with private_over(model, data, plan, optimizer=optimizer, seed=None, key=key(k), engine=engine) as private:
        train(private, model)
    return [p.detach() for p in model.parameters()]


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative difference of a parameter tensor."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def largest_difference(make_model: Callable[[], nn.Module], plan: epsilons.Plan, make: Any = sgd) -> float:
    found = stacked(started(make_model), plan, make).parameters
    return max(difference([p[k] for p in found], alone(make_model, plan, make, k)) for k in (0, 2))


@pytest.mark.parametrize(("strategy", "hidden"), share(product(STRATEGIES, [(), (5,)]), 6))
def test_a_stacked_model_is_the_one_trained_alone(strategy, hidden):
    plan = some_plan(strategy, steps=STEPS, levels=BUDGETS)
    assert largest_difference(lambda: perceptron(*hidden), plan) <= 1e-5


@pytest.mark.parametrize("make", [momentum, adam, backwards])
@pytest.mark.parametrize("make_model", [linear, lambda: perceptron(7, 5)], ids=["linear", "two hidden layers"])
def test_every_optimizer_updates_a_stack_as_it_updates_one_model(make, make_model):
    assert largest_difference(make_model, some_plan("mix", steps=STEPS, levels=BUDGETS), make) <= 1e-5


@pytest.mark.parametrize(
    "make_model",
    [
        lambda: perceptron(6, activation=nn.ReLU),
        lambda: perceptron(6, activation=nn.GELU),
        lambda: perceptron(6, activation=lambda: nn.GELU(approximate="tanh")),
        lambda: nn.Sequential(nn.Linear(FEATURES, 4, bias=False), nn.Sequential(nn.Tanh(), nn.Linear(4, CLASSES))),
        lambda: nn.Linear(FEATURES, CLASSES, bias=False),
    ],
    ids=["relu", "gelu", "gelu by tanh", "nested, one bias", "no bias"],
)
def test_every_layer_that_a_stack_holds_gives_the_gradients_of_autograd(make_model):
    assert largest_difference(make_model, some_plan("scale", steps=STEPS, levels=BUDGETS)) <= 1e-5


# -- the plan's table ------------------------------------------------------------------------------------------


def tabled(**table: Any) -> epsilons.Plan:
    """Two phases: only the first group, then both with other clip norms, weights, noise and divisor."""
    first = {"steps": 12, "sample_rate": [0.4, 0.0], "clip_norm": [0.3, 0.9]}
    second = {"steps": 13, "sample_rate": [0.1, 0.3], "weight": [0.5, 2.0], "noise_std": 0.7, "expected_batch": 11.0}
    return of_phases(first | table, second | table)


def test_every_phase_has_its_own_rates_norms_weights_noise_and_divisor():
    assert largest_difference(lambda: perceptron(5), tabled(), momentum) <= 1e-5


def test_draws_without_any_member_are_noise_alone():
    plan = tabled(sample_rate=[0.03, 0.02])
    group = some_budgets(tuple(plan.epsilons.tolist())).group
    draws = MemberDraws(plan, group, members(), [Randomness.fresh(key=key(k)) for k in range(MODELS)])
    counts = [[len(drawn) for drawn in draws.at(0, step)] for step in range(12)]
    assert any(max(row) == 0 for row in counts)
    assert any(0 == min(row) < max(row) for row in counts)
    assert largest_difference(lambda: perceptron(5), plan) <= 1e-5


@pytest.mark.parametrize("method", ["coins", "counts"])
def test_the_members_draws_are_the_draws_of_a_run_without_the_others(method, monkeypatch):
    if method == "counts":
        monkeypatch.setattr("epsilons.draws.persons_rows.MOST_COINS", 10)
    plan = tabled()
    group, sources = some_budgets(tuple(plan.epsilons.tolist())).group, [Randomness.fresh(k) for k in range(MODELS)]
    draws = MemberDraws(plan, group, members(), sources)
    for phase in range(2):
        for k, (source, found) in enumerate(zip(sources, draws.at(phase, 3), strict=True)):
            own = Draws(plan, group, source)
            assert own.method == method
            assert found.tolist() == [i for i in own.at(phase, 3) if members()[k][i]]


def test_a_model_without_members_gets_noise_alone():
    member = np.zeros((2, RECORDS), dtype=bool)
    plan = everyone(1)
    model = started(linear)
    found = stacked(model, plan, models=2, member=member).parameters
    for k in range(2):
        noise = torch.from_numpy(Randomness.fresh(key=key(k)).noise(0, 0, CLASSES * (FEATURES + 1))).float()
        weight = noise[: CLASSES * FEATURES].view(CLASSES, FEATURES) * plan.noise_std / plan.expected_batch
        torch.testing.assert_close(model.weight - found[0][k], weight, rtol=1e-4, atol=1e-6)


# -- numbers that are not finite -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e25])
@pytest.mark.parametrize("hidden", [(), (5,)], ids=["linear", "perceptron"])
def test_a_record_contributes_nothing_if_its_gradient_is_not_finite(value, hidden):
    """Nor if it is finite and too large: 1e25."""
    x, y = some_data()
    spoiled = x.clone()
    spoiled[0::4, 2] = value  # record 0, too, which fills up shorter draws
    plan = some_plan("sample", steps=STEPS, levels=BUDGETS)

    def make_model() -> nn.Module:
        return perceptron(*hidden, activation=nn.ReLU)

    found = stacked(started(make_model), plan, data=(spoiled, y)).parameters
    assert difference([p[0] for p in found], alone(make_model, plan, sgd, 0, (spoiled, y), "loop")) <= 1e-5
    others = members().copy()
    others[:, 0::4] = False
    without = stacked(started(make_model), plan, data=(x, y), member=others).parameters
    if not np.isfinite(value) or not hidden:  # behind a ReLU, the gradient of 1e25 may be 0 by the weights in front
        assert difference(found, without) <= 1e-5


# -- what a stack is -------------------------------------------------------------------------------------------


def test_a_model_is_the_same_in_a_stack_of_one_and_of_five():
    plan, model = some_plan("sample", steps=STEPS, levels=BUDGETS), started(lambda: perceptron(5))
    five = stacked(model, plan, models=5)
    for k in range(5):
        options = {"member": members(5)[[k]], "randomness": [Randomness.fresh(key=key(k))]}
        one = stacked(model, plan, **options)
        assert difference([p[k] for p in five.parameters], [p[0] for p in one.parameters]) <= 1e-5


def test_a_stack_computed_model_by_model_is_the_same(monkeypatch):
    plan, model = some_plan("sample", steps=STEPS, levels=BUDGETS), started(lambda: perceptron(5))
    at_once = stacked(model, plan).parameters
    monkeypatch.setattr(stacking, "BYTES_AT_ONCE", 1)
    assert difference(stacked(model, plan).parameters, at_once) <= 1e-5


def test_the_same_call_gives_the_same_bits_and_leaves_the_model_as_it_is():
    plan, model = some_plan("scale", steps=STEPS, levels=BUDGETS), started(lambda: perceptron(5))
    before = parameters_of(model)
    assert same(stacked(model, plan, adam).parameters, stacked(model, plan, adam).parameters)
    assert same(parameters_of(model), before)
    assert all(p.grad is None for p in model.parameters())


def test_models_may_start_from_different_parameters():
    plan = some_plan("scale", steps=STEPS, levels=BUDGETS)
    torch.manual_seed(7)
    models = [perceptron(5) for _ in range(MODELS)]
    found = stacked(models[0], plan, starts=[list(model.parameters()) for model in models]).parameters
    for k, model in enumerate(models):
        one = {"member": members()[[k]], "randomness": [Randomness.fresh(key=key(k))]}
        assert difference([p[k] for p in found], [p[0] for p in stacked(model, plan, **one).parameters]) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_logits_are_those_of_each_model(dtype):
    x, y = some_data()
    data = x.to(dtype).view(RECORDS, 2, 3), y
    model = started(lambda: perceptron(5, 4, activation=nn.GELU)).to(dtype)
    stack = stacked(model, some_plan("scale", levels=BUDGETS), adam, data)
    logits = stack.logits(data[0])
    assert (stack.models, logits.shape, logits.dtype) == (MODELS, (MODELS, RECORDS, CLASSES), dtype)
    for k in range(MODELS):
        torch.nn.utils.vector_to_parameters(torch.cat([p[k].flatten() for p in stack.parameters]), model.parameters())
        torch.testing.assert_close(logits[k], model(data[0]).detach())


def test_progress_counts_the_steps_of_all_phases():
    made: list[int] = []
    stacked(started(linear), tabled(), progress=made.append)
    assert made == list(range(1, 26))


# -- what is refused -------------------------------------------------------------------------------------------


def changed(change: Callable[[nn.Sequential], Any]) -> nn.Module:
    model = square(nn.Tanh())
    change(model)
    return model


class Own(nn.Linear):
    """A subclass may do anything in its forward."""


def square(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), *between, nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (changed(lambda model: model[0].register_forward_hook(lambda *_: None)), "a Linear of the model has a hook"),
        (
            changed(lambda model: model[0].weight.register_hook(lambda gradient: 2 * gradient)),
            "a parameter of the model has one",
        ),
        (changed(lambda model: setattr(model[0], "forward", lambda values: values)), "a forward of its own"),
        (changed(lambda model: model[0].bias.requires_grad_(False)), "frozen"),
        (changed(lambda model: setattr(model[2], "weight", model[0].weight)), "share some"),
        (changed(lambda model: model.register_buffer("mean", torch.zeros(3))), "other parameters or buffers"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), "ParametrizedLinear of the model"),
        (square(nn.Tanh()).half(), "float32 or float64"),
        (square(nn.Dropout()), "has a Dropout"),
        (square(nn.Sigmoid()), "has a Sigmoid"),
        (nn.Conv2d(1, 1, 3), "has a Conv2d"),
        (Own(3, 3), "has a Own"),
        (square(nn.Tanh(), nn.ReLU()), "another order"),
        (square(), "another order"),
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh()), "another order"),
        (nn.Sequential(), "another order"),
        (nn.Sequential(nn.Flatten()), "another order"),
        (square(nn.Flatten()), "flattens after it"),
        (nn.Sequential(nn.Flatten(2), nn.Linear(3, 3)), "keeps some dimensions"),
    ],
)
def test_what_a_stack_would_compute_wrongly_is_refused(model, reason):
    assert reason in unstackable(model)
    with pytest.raises(ModelError, match=reason):
        stacked(model, some_plan("scale", levels=BUDGETS))


@pytest.mark.parametrize("loss", ["mse", "binary_cross_entropy"])
def test_other_losses_are_refused(loss):
    assert repr(loss) in unstackable(linear(), loss)
    assert unstackable(linear(), "cross_entropy") is None


def with_step_hook(parameters: Any) -> torch.optim.Optimizer:
    optimizer = sgd(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "got LBFGS"),
        (torch.optim.Adagrad, "got Adagrad"),
        (lambda parameters: torch.optim.SGD(list(parameters)[:1], lr=0.1), "exactly the model's"),
        (with_step_hook, "hook"),
    ],
)
def test_optimizers_that_a_stack_would_use_wrongly_are_refused(make, reason):
    assert reason in unstackable(linear(), optimizer=make)
    with pytest.raises(ModelError, match=reason):
        stacked(linear(), some_plan("scale", levels=BUDGETS), make)


X, Y = some_data()
NONE = np.zeros((MODELS, RECORDS), dtype=bool)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"data": (X[:, :4], Y)}, DataError, "6 features per record"),
        ({"data": (X.double(), Y)}, DataError, "got .* in torch.float64"),
        ({"data": (X.view(RECORDS, 1, FEATURES), Y)}, DataError, "got .*1, 6"),
        ({"data": (X, Y.float())}, DataError, "torch.float32"),
        ({"data": (X, Y[:, None])}, DataError, "60, 1"),
        ({"data": (X, torch.full_like(Y, -100))}, DataError, "classes from 0 to 2"),
        ({"data": (X, Y + 1)}, DataError, "classes from 0 to 2"),
        ({"data": (X[:50], Y[:50])}, InputError, "50 records"),
        ({"member": NONE.astype(int)}, InputError, "member needs"),
        ({"member": NONE[0]}, InputError, "member needs"),
        ({"member": NONE[:2]}, InputError, "3 for 2 models"),
        ({"randomness": [Randomness.fresh(1)] * MODELS}, InputError, "same key"),
        ({"starts": [[torch.zeros(3, 6), torch.zeros(4)]] * MODELS}, InputError, "starts needs"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        stacked(linear(), some_plan("scale", levels=BUDGETS), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [sgd, momentum, adam])
def test_a_gpu_trains_the_models_of_the_cpu(make):
    plan, model = some_plan("mix", steps=STEPS, levels=BUDGETS), started(lambda: perceptron(7, 5))
    stack = stacked(model, plan, make, device="cuda")
    assert difference([p.cpu() for p in stack.parameters], stacked(model, plan, make).parameters) <= 1e-5
    assert stack.logits(X).device.type == "cpu"
