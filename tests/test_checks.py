"""What is refused at the start or at the first physical batch, with one short lesson; and what is accepted."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import epsilons
from epsilons.draws import batches
from epsilons.errors import (
    BatchDependenceError,
    BudgetExceededError,
    CallOrderError,
    DataError,
    InputError,
    ModelError,
    UnsupportedLayerError,
)
from epsilons.training import validation
from epsilons.training.performance import default_physical_batch
from functional import Model
from options import make_flat
from small_runs import of_phases, parameters_of, rows, same
from small_runs import train as train_small

FEATURES, CLASSES, TIME = 6, 3, 5
LEVELS = (1.0, 2.0)


# Few records: each class may have one budget by chance.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The budgets differ, and each class"),
]


@cache
def everyone(records: int, steps: int = 3) -> tuple[epsilons.Budgets, epsilons.Plan]:
    """Every record in every draw, so that the first physical batch is as large as a test needs it."""
    budgets = epsilons.Budgets(np.resize(LEVELS, records))
    recipe = epsilons.Recipe(steps=steps, batch_size=records, clip_norm=0.5)
    return budgets, epsilons.plan(budgets, recipe, accountant="rdp")


def random_numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_classes(records: int) -> Tensor:
    return torch.randint(CLASSES, (records,), generator=torch.Generator().manual_seed(1))


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def a_model(*layers: nn.Module, width: int = FEATURES) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def train(
    model: nn.Module | None = None,
    x: Tensor | None = None,
    losses_of: Callable[..., Tensor] = cross_entropy,
    during: Callable[[int], None] = lambda step: None,
    extra: tuple[Tensor, ...] = (),
    **options: Any,
) -> epsilons.Private:
    """A whole run over (x, classes, *extra), in which every record is drawn every time."""
    model, x = a_model() if model is None else model, random_numbers(8, FEATURES) if x is None else x
    budgets, plan = everyone(len(x))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    data = options.pop("data", None) or (x, random_classes(len(x)), *extra)
    options = {"model": model, "optimizer": optimizer, "plan": plan, "budgets": budgets, "engine": "loop"} | options
    with start(data, seed=0, **options) as private:
        updates = 0
        during(updates)
        for batch in private.batches:
            given = (batch,) if isinstance(batch, SimpleNamespace) else batch
            private.backward(losses_of(model, *given))
            updates += private.step()
            during(updates)
        assert private.is_finished
    return private


def refused(
    error: type[Exception], phrase: str, model: nn.Module | None = None, x: Tensor | None = None, **options: Any
) -> None:
    """The run is refused with this lesson, before anything is learnt."""
    model = a_model() if model is None else model
    before = parameters_of(model)
    with pytest.raises(error, match=phrase) as caught:
        train(model, x, **options)
    assert len(str(caught.value)) < 500
    assert same(parameters_of(model), before)


# -- layers that mix records --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(FEATURES),
        nn.SyncBatchNorm(FEATURES),
        nn.BatchNorm1d(FEATURES, affine=False),
        nn.BatchNorm1d(FEATURES, track_running_stats=False).eval(),
    ],
)
def test_batch_norm_in_training_is_refused_with_its_mend(layer):
    refused(UnsupportedLayerError, r"mixes records.*epsilons\.mend.*GroupNorm", a_model(layer))


def test_batch_norm_frozen_by_eval_is_trained_around():
    model = a_model(nn.BatchNorm1d(FEATURES))
    model.eval()
    mean = model[0].running_mean.clone()
    train(model)
    assert torch.equal(model[0].running_mean, mean)


def test_batch_norm_set_to_training_later_is_refused_then():
    model = a_model(nn.BatchNorm1d(FEATURES)).eval()
    done: list[int] = []

    def during(updates: int) -> None:
        done.append(updates)
        if updates == 1:
            model.train()

    with pytest.raises(UnsupportedLayerError, match="mixes records"):
        train(model, during=during)
    assert max(done) == 1


def test_layers_that_normalise_within_a_record_are_welcome():
    x = random_numbers(8, 4, FEATURES)
    for layer in (nn.GroupNorm(2, 4), nn.LayerNorm(FEATURES), nn.InstanceNorm1d(4, affine=True)):
        train(a_model(layer, nn.Flatten(), width=4 * FEATURES), x)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (
            a_model(nn.Embedding(20, FEATURES, max_norm=0.5), nn.Flatten(), width=3 * FEATURES),
            torch.arange(24).reshape(8, 3) % 20,
        ),
        (a_model(spectral_norm(nn.Linear(FEATURES, FEATURES))), random_numbers(8, FEATURES)),
        (a_model(parametrizations.spectral_norm(nn.Linear(FEATURES, FEATURES))), random_numbers(8, FEATURES)),
    ],
    ids=["max_norm", "spectral norm", "spectral norm, parametrized"],
)
def test_a_forward_pass_that_changes_weights_or_buffers_is_refused(model, x):
    with pytest.raises(UnsupportedLayerError, match=r"The forward pass changed .*without clipping or noise"):
        train(model, x)


def test_instance_norm_with_running_statistics_is_refused_with_its_mend():
    model = a_model(nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten(), width=4 * FEATURES)
    refused(
        UnsupportedLayerError, r"collects running statistics.*epsilons\.mend", model, random_numbers(8, 4, FEATURES)
    )
    epsilons.mend(model)
    train(model, random_numbers(8, 4, FEATURES))


def test_spectral_norm_that_is_frozen_is_welcome():
    model = a_model(parametrizations.spectral_norm(nn.Linear(FEATURES, FEATURES)))
    model[0].eval()
    train(model)


class _Remembers(nn.Module):
    """Keeps a running mean of what it sees, by putting a new tensor in the buffer's place, once per call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return x


@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_a_buffer_that_is_replaced_is_seen_however_often_it_is_replaced(calls):
    model = a_model(*[_Remembers()] * calls)
    with pytest.raises(UnsupportedLayerError, match=r"The forward pass changed 0\.seen"):
        train(model)


# -- losses that are not one number per record --------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses_of", "phrase"),
    [
        (lambda m, x, y: F.cross_entropy(m(x), y), 'got a single number.*reduction="none"'),
        (lambda m, x, y: cross_entropy(m, x, y).sum(), "got a single number"),
        (lambda m, x, y: cross_entropy(m, x, y)[:, None], r"shape \(8,\) for this batch, got shape \(8, 1\)"),
        (lambda m, x, y: (m(x) - F.one_hot(y, CLASSES)).square(), r"got shape \(8, 3\).*flatten\(1\).mean\(1\)"),
        (lambda m, x, y: cross_entropy(m, x, y)[:-1], r"got shape \(7,\)"),
        (lambda m, x, y: cross_entropy(m, x, y).repeat(2), r"got shape \(16,\)"),
        (lambda m, x, y: cross_entropy(m, x, y).detach(), "do not depend on any trainable parameter"),
        (lambda m, x, y: cross_entropy(m, x, y).tolist(), "got a list"),
        (lambda m, x, y: float(cross_entropy(m, x, y).detach().sum()), "got a float"),
    ],
)
def test_losses_of_another_shape_are_refused(losses_of, phrase):
    refused(ModelError, phrase, losses_of=losses_of)


def test_losses_computed_without_gradients_are_refused():
    @torch.no_grad()
    def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x, y)

    refused(ModelError, "gradients enabled", losses_of=losses_of)


# -- losses and models that mix records, found by exchanging one --------------------------------------------


def mean_for_all(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model, x, y).mean().expand(len(x))


def mixup_by_torch(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    partner = torch.arange(len(x)).roll(1 + int(torch.randint(len(x) - 1, ())))
    return cross_entropy(model, 0.7 * x + 0.3 * x[partner], y)


def centred_layer(detached: bool = False) -> nn.Module:
    return Model(lambda m, x: x - (x.mean(0).detach() if detached else x.mean(0)))


def accumulated() -> nn.Module:
    """Each record sees those before it: reading records as time steps, in its simplest form."""
    return Model(lambda m, x: x.cumsum(0))


@pytest.mark.parametrize("records", [2, 3, 8])
@pytest.mark.parametrize("layer", [centred_layer(), centred_layer(detached=True), accumulated()])
def test_a_home_made_layer_that_looks_across_the_batch_is_refused(layer, records):
    model = a_model(nn.Linear(FEATURES, FEATURES), layer)
    named = r"the operator (mean|cumsum) at test_checks.py:\d+ computes across records"
    refused(BatchDependenceError, named, model, random_numbers(records, FEATURES))


def run_together(model: nn.Module, x: Tensor) -> Tensor:
    """A reshape where a transpose was meant."""
    records, time, features = x.shape
    return x.reshape(time, records, features).mean(0)


def test_a_reshape_that_runs_records_together_is_refused():
    x = random_numbers(8, TIME, FEATURES)
    refused(BatchDependenceError, "a reshape that joins records", a_model(Model(run_together)), x)


def recurrent(layer: nn.Module) -> nn.Module:
    """A recurrent layer or attention as built by default: time first, though records come first."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        outputs = model.layer(x, x, x) if isinstance(model.layer, nn.MultiheadAttention) else model.layer(x)
        return model.head(outputs[0][:, -1])

    return Model(compute, layer=layer, head=nn.Linear(FEATURES, CLASSES))


TIME_FIRST = {
    **{kind: lambda kind=kind, **k: getattr(nn, kind)(FEATURES, FEATURES, **k) for kind in ("LSTM", "GRU", "RNN")},
    "attention": lambda **k: nn.MultiheadAttention(FEATURES, 2, **k),
}


@pytest.mark.parametrize(("records", "time"), [(8, TIME), (3, 7), (2, 2), (3, 3), (TIME, TIME)])
@pytest.mark.parametrize("layer", TIME_FIRST)
def test_time_first_layers_are_refused_even_with_as_many_records_as_time_steps(layer, records, time):
    model = recurrent(TIME_FIRST[layer]())
    refused(ModelError, r"layer \(.*batch_first=True", model, random_numbers(records, time, FEATURES))


@pytest.mark.parametrize("records", [TIME, 8])
@pytest.mark.parametrize("layer", TIME_FIRST)
def test_batch_first_layers_are_welcome(layer, records):
    train(recurrent(TIME_FIRST[layer](batch_first=True)), random_numbers(records, TIME, FEATURES))


def test_random_numbers_from_another_source_in_the_loop_are_refused():
    def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x + torch.from_numpy(np.random.normal(size=x.shape)).float(), y)

    refused(BatchDependenceError, "another source than torch", losses_of=losses_of)


def train_by_group(model: nn.Module, x: Tensor, *rates: list[float]) -> list[int]:
    """Two steps for each pair of rates, the first record alone in its group: the sizes of the draws."""
    budgets = epsilons.Budgets([1.0, *[2.0] * 11])
    table = {"steps": 2, "clip_norm": [1.0, 1.0], "noise_std": 50.0, "expected_batch": 9.0}
    plan, sizes = of_phases(*[table | {"sample_rate": pair} for pair in rates], budgets=budgets), []
    with start((x, random_classes(12)), model=model, plan=plan, budgets=budgets, seed=0, engine="loop") as private:
        for inputs, targets in private.batches:
            if not private.is_check:
                sizes.append(len(inputs))
            private.backward(cross_entropy(model, inputs, targets))
            private.step()
    return sizes


def test_mixing_that_begins_with_a_larger_batch_is_refused():
    """The first draws here are one record alone, in which nothing can mix."""
    x = random_numbers(12, FEATURES)
    assert train_by_group(a_model(), x, [1.0, 0.0], [1.0, 1.0]) == [1, 1, 12, 12]
    with pytest.raises(BatchDependenceError):
        train_by_group(a_model(centred_layer()), x, [1.0, 0.0], [1.0, 1.0])


# What the exchange of one record cannot show at once, and so must be looked for again.


def _blank_head(*layers: nn.Module) -> nn.Module:
    """As classifiers are often begun: a last layer of zeros, under which all records have the same scores."""
    model = a_model(*layers)
    nn.init.zeros_(model[-1].weight)
    return model


def _batch_of(records: list[Any]) -> SimpleNamespace:
    x, y = zip(*records, strict=True)
    return SimpleNamespace(x=torch.stack(x), y=torch.stack(y))


def _lists_of(records: list[Any]) -> tuple[list[list[float]], list[int]]:
    x, y = zip(*records, strict=True)
    return [v.tolist() for v in x], [int(v) for v in y]


def _nearly_all_alike(records: int) -> Tensor:
    """As answers to a few questions are: most of them the same."""
    x = torch.ones(records, FEATURES)
    x[3] = -1.0
    return x


def _with_one_nan(records: int) -> Tensor:
    x = random_numbers(records, FEATURES)
    x[0] = float("nan")
    return x


BLIND: dict[str, Callable[[], Any]] = {
    "a last layer of zeros": lambda: train(_blank_head(centred_layer())),
    "exchanged with a record that differs in its number only": lambda: train(
        a_model(centred_layer()),
        _nearly_all_alike(8),
        lambda m, x, y, index: cross_entropy(m, x, y * 0),
        extra=(torch.arange(8),),
    ),
    "two records, the second after the first": lambda: train(a_model(accumulated()), max_physical_batch=2),
    "a record that is not a number, drawn at first only": lambda: train_by_group(
        a_model(centred_layer()), _with_one_nan(12), [1.0, 1.0], [0.0, 1.0]
    ),
    "a record that is not a number, in the first batch of every draw": lambda: train(
        a_model(centred_layer()), _with_one_nan(12), max_physical_batch=6
    ),
    "batches of lists, made into tensors in the loop": lambda: train(
        a_model(centred_layer()),
        losses_of=lambda m, x, y: cross_entropy(m, torch.tensor(x), torch.tensor(y)),
        data=rows(random_numbers(8, FEATURES), random_classes(8)),
        collate_fn=_lists_of,
    ),
    "a batch of a type that cannot be looked into": lambda: train(
        a_model(centred_layer()),
        losses_of=lambda m, batch: cross_entropy(m, batch.x, batch.y),
        data=rows(random_numbers(8, FEATURES), random_classes(8)),
        collate_fn=_batch_of,
    ),
    "mixing that shows in the gradient only": lambda: train(a_model(_straight_through())),
    "mixing that begins later": lambda: _mixup_after_warming_up(),
}


def _straight_through() -> nn.Module:
    """Adds exactly nothing to the output, and the other records' activations to the gradient."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model.layer(x)
        mean = hidden.mean(0)
        return hidden + (mean - mean.detach())

    return Model(compute, layer=nn.Linear(FEATURES, FEATURES))


def _mixup_after_warming_up() -> None:
    updates = [0]

    def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (mixup_by_torch if updates[0] else cross_entropy)(model, x, y)

    def during(done: int) -> None:
        updates[0] = done

    train(losses_of=losses_of, during=during)


@pytest.mark.parametrize("how", BLIND)
def test_mixing_is_refused_even_where_the_first_exchange_shows_nothing(how):
    with pytest.raises((ModelError, DataError)):
        BLIND[how]()


def test_records_once_seen_to_mix_cannot_be_passed_over():
    """Catching the error does not make the physical batch count."""
    model = a_model()
    before = parameters_of(model)
    with start(model=model, seed=0) as private:
        for x, y in private.batches:
            try:
                private.backward(mean_for_all(model, x, y))
            except BatchDependenceError:
                with pytest.raises(CallOrderError):
                    private.step()
                break
            private.step()
    assert same(parameters_of(model), before)


# -- no false alarms ----------------------------------------------------------------------------------------


#: What to train, and how.
WELCOME: dict[str, Callable[[], dict[str, Any]]] = {
    "dropout": lambda: {"model": a_model(nn.Dropout(0.5))},
    "noise on the features, from torch": lambda: {
        "losses_of": lambda m, x, y: cross_entropy(m, x + torch.randn_like(x), y)
    },
    "a last layer of zeros": lambda: {"model": _blank_head(nn.Linear(FEATURES, FEATURES))},
    "records all alike": lambda: {
        "x": torch.ones(8, FEATURES),
        "losses_of": lambda m, x, y: cross_entropy(m, x, y * 0),
    },
    "losses all zero": lambda: {"losses_of": lambda m, x, y: cross_entropy(m, x, y) * 0},
    "records that are not numbers": lambda: {"x": _with_one_nan(8)},
    "nothing that is a number": lambda: {"x": torch.full((8, FEATURES), float("nan"))},
    "huge losses": lambda: {"x": 1e6 * random_numbers(8, FEATURES)},
    "time first, rightly transposed": lambda: {"model": _transposed(), "x": random_numbers(TIME, TIME, FEATURES)},
    "half precision": lambda: {"model": a_model().bfloat16(), "x": random_numbers(8, FEATURES).bfloat16()},
    "an evaluation inside the loop": lambda: {
        "model": a_model(nn.Linear(FEATURES, FEATURES)),
        "losses_of": _evaluated_inside,
    },
}


def _transposed() -> nn.Module:
    layers = {"lstm": nn.LSTM(FEATURES, FEATURES), "head": nn.Linear(FEATURES, CLASSES)}
    return Model(lambda m, x: m.head(m.lstm(x.transpose(0, 1))[0][-1]), **layers)


def _evaluated_inside(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = cross_entropy(model, x, y)
    with torch.no_grad():
        model.eval()
        model(random_numbers(5, FEATURES))
        model.train()
    return losses


@pytest.mark.parametrize("engine", ["loop", "auto"])
@pytest.mark.parametrize("how", WELCOME)
def test_what_keeps_records_apart_is_not_refused(how, engine):
    train(engine=engine, **WELCOME[how]())


# -- data, budgets and plan that do not belong together -----------------------------------------------------


def start(data: Any = None, **changes: Any) -> epsilons.Private:
    """make_private for a linear model over 40 records, but for these changes."""
    budgets, plan = everyone(40)
    model = changes.pop("model", None) or a_model()
    optimizer = changes.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    data = (random_numbers(40, FEATURES), random_classes(40)) if data is None else data
    changes = {"budgets": budgets, **changes}
    return make_flat(model, optimizer, data, changes.pop("plan", plan), **changes)


@pytest.mark.parametrize("records", [1, 39, 41])
def test_budgets_of_another_length_than_the_data_are_refused(records):
    data = random_numbers(records, FEATURES), random_classes(records)
    with pytest.raises(DataError, match=rf"Got 40 budgets for a data set of {records} records.*budgets.subset"):
        start(data)


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [
        (np.resize([1.37, 2.59], 40), 1e-5),
        (np.r_[np.resize(LEVELS, 38), [1.0, 1.0]], 1e-5),
        (np.resize([1.37, 2.59, 4.0], 40), 1e-5),
        (np.resize(LEVELS, 40), 1e-6),
    ],
    ids=["other levels", "other counts", "one level more", "another delta"],
)
def test_a_plan_for_other_budgets_is_refused_and_none_is_shown(epsilon, delta):
    with pytest.raises(DataError, match=r"does not fit these 40 budgets.*Plan again") as caught:
        start(budgets=epsilons.Budgets(epsilon, delta=delta))
    assert "1.37" not in str(caught.value)
    assert "2.59" not in str(caught.value)


def test_a_plan_for_other_people_with_the_same_counts_keeps_their_order():
    """Budgets travel with the records given here; only how many hold each level is the plan's."""
    budgets = epsilons.Budgets(np.resize(LEVELS[::-1], 40))
    private = start(budgets=budgets)
    assert (private._draws.group == budgets.group).all()
    private.close()


def declared(shares: dict[float, float]) -> epsilons.Plan:
    recipe, people = epsilons.Recipe(steps=3, batch_size=10, clip_norm=0.5), epsilons.Budgets([4.0, 1.0] * 20)
    return epsilons.plan(people, recipe, accountant="rdp", public_shares=shares, public_records=100)


def test_declared_shares_find_each_record_its_own_row():
    plan = declared({1.0: 0.5, 2.0: 0.25, 4.0: 0.25})
    with start(budgets=epsilons.Budgets([4.0, 1.0] * 20), plan=plan) as private:
        assert private._draws.group.tolist() == [2, 0] * 20
    with pytest.raises(DataError, match="not among the plan's declared shares"):
        start(budgets=epsilons.Budgets([4.0, 3.0] * 20), plan=plan)


@pytest.mark.parametrize("seed", range(12))
def test_declared_shares_separate_groups_by_epsilon_and_delta(seed):
    """A record that asked for a smaller delta never trains in the row of a larger one, nor the other way round."""
    chosen = np.random.default_rng(seed)
    pairs = [(epsilon, delta) for epsilon in (1.0, 2.0, 4.0) for delta in (1e-7, 1e-6, 1e-5)]
    declared = [pairs[i] for i in chosen.permutation(9)[: chosen.integers(2, 9)]]
    epsilons_of, deltas = np.array(declared * 8).T
    recipe = epsilons.Recipe(steps=3, batch_size=4, clip_norm=0.5)
    roster = epsilons.plan(epsilons.Budgets(epsilons_of, deltas), recipe, "scale", "rdp")
    plan = dataclasses.replace(roster, adjacency="add-or-remove, shares declared")
    people = [declared[i] for i in chosen.integers(0, len(declared), 40)]
    rows = validation.groups_of(epsilons.Budgets(*np.array(people).T), plan, 40)
    assert [(plan.epsilons[row], plan.delta[row]) for row in rows] == people
    for stranger in [pair for pair in pairs if pair not in declared]:
        people[chosen.integers(40)] = stranger
        with pytest.raises(DataError, match="not among the plan's declared shares"):
            validation.groups_of(epsilons.Budgets(*np.array(people).T), plan, 40)
        people = [pair if pair in declared else declared[0] for pair in people]


@pytest.mark.parametrize("delta", [1e-9, 9.99e-6, 1.01e-5, 1e-3])
def test_under_declared_shares_a_record_of_another_delta_is_refused(delta):
    budgets = epsilons.Budgets([4.0, 1.0] * 20, delta=[delta] + [1e-5] * 39)
    with pytest.raises(DataError, match="not among the plan's declared shares"):
        start(budgets=budgets, plan=declared({1.0: 0.5, 4.0: 0.5}))


@pytest.mark.parametrize("change", [{"noise_std": 0.5}, {"steps": 30}])
def test_a_plan_that_overspends_is_refused_wherever_it_comes_from(change, tmp_path):
    _, plan = everyone(40)
    phase = plan.phases[0]
    value = phase.noise_std * change["noise_std"] if "noise_std" in change else change["steps"]
    edited = dataclasses.replace(plan, phases=(dataclasses.replace(phase, **{next(iter(change)): value}),))
    with pytest.raises(BudgetExceededError):
        start(plan=edited, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    edited.save(tmp_path / "plan.json")
    with pytest.raises(BudgetExceededError):
        epsilons.Plan.load(tmp_path / "plan.json")


class _Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([(random_numbers(FEATURES), torch.tensor(0))] * 40)


@pytest.mark.parametrize(
    ("data", "phrase"),
    [
        (
            DataLoader(
                TensorDataset(random_numbers(40, FEATURES), random_classes(40)),
                sampler=torch.utils.data.WeightedRandomSampler(torch.ones(40), 40),
            ),
            "draws with a WeightedRandomSampler",
        ),
        (_Stream(), "map-style data set"),
        (iter(range(40)), "cannot be read by index"),
        ((random_numbers(40, FEATURES), random_classes(39)), r"one row per record.*\[39, 40\]"),
        ((random_numbers(40, FEATURES), torch.tensor(3.0)), "one row per record"),
        (torch.tensor(3.0), "one row per record"),
        ((), "one row per record|no tensors|0 records"),
    ],
    ids=["DataLoader", "IterableDataset", "iterator", "rows differ", "a number among tensors", "a number", "nothing"],
)
def test_data_that_cannot_be_drawn_record_by_record_are_refused(data, phrase):
    with pytest.raises(DataError, match=phrase):
        start(data)


def test_an_optimizer_with_nothing_of_the_model_to_train_is_refused():
    with pytest.raises(ModelError, match="none of the model's parameters"):
        start(optimizer=torch.optim.SGD(a_model().parameters(), lr=0.1))
    model = a_model()
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="nothing to train"):
        start(model=model)


def test_an_optimizer_that_looks_at_the_data_several_times_per_step_is_refused():
    model = a_model()
    with pytest.raises(ModelError, match="LBFGS"):
        start(model=model, optimizer=torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize(
    ("option", "error", "phrase"),
    [
        ({"max_physical_batch": 0}, DataError, "at least 1, got 0"),
        ({"engine": "fast"}, InputError, "No engine is called 'fast'"),
        ({"randomness": "dice"}, InputError, "No source of randomness is called 'dice'"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_before_a_folder_is_made(option, error, phrase, tmp_path):
    with pytest.raises(error, match=phrase):
        start(**option, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# -- how a batch is taken apart -----------------------------------------------------------------------------


def test_take_cuts_every_tensor_and_list_of_records_and_leaves_the_rest():
    batch = {"x": torch.arange(8).reshape(4, 2), "names": list("abcd"), "scale": torch.tensor(2.0), "note": "all"}
    cut = batches.take(batch, [2, 0], 4)
    assert cut["x"].tolist() == [[4, 5], [0, 1]]
    assert cut["names"] == ["c", "a"]
    assert cut["scale"] == 2.0
    assert cut["note"] == "all"
    assert batches.take(["a", "b", "c"], [1], 3) == ["b"]
    pair = batches.take((torch.arange(3), torch.arange(3)), [1], 3)
    assert [t.tolist() for t in pair] == [[1], [1]]


def test_take_of_two_records_in_two_parts_cuts_the_parts():
    """Two dictionaries of two records each are not a list of two records."""
    batch = [{"x": torch.arange(2)}, {"x": torch.arange(2) + 10}]
    assert [part["x"].tolist() for part in batches.take(batch, [1], 2)] == [[1], [11]]


# -- records alone, and data sets that mix ------------------------------------------------------------------


def less_a_running_mean() -> nn.Module:
    """Less a running mean that is kept in a plain attribute: state goes from one record to the next."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        model.mean = 0.5 * model.mean + 0.5 * x.mean(0).detach()
        return model.layer(x - model.mean)

    return Model(compute, layer=nn.Linear(FEATURES, CLASSES, bias=False), mean=torch.zeros(FEATURES))


def remembering() -> nn.Module:
    """A recurrent layer that continues the last physical batch; its state is in a list, so that no tensor shows it."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        outputs, state = model.layer(x[:, None], model.state[0])
        model.state[0] = state.detach()
        return model.head(outputs[:, -1])

    layers = {"layer": nn.GRU(FEATURES, FEATURES, batch_first=True), "head": nn.Linear(FEATURES, CLASSES)}
    return Model(compute, **layers, state=[None])


@pytest.mark.parametrize(
    ("make", "error"), [(less_a_running_mean, UnsupportedLayerError), (remembering, BatchDependenceError)]
)
def test_state_from_record_to_record_is_refused_in_batches_of_one_record(make, error):
    refused(error, "forward pass", make(), random_numbers(6, FEATURES), max_physical_batch=1)


def test_a_model_without_state_is_trained_record_by_record():
    train(a_model(nn.Dropout(0.5)), random_numbers(6, FEATURES), max_physical_batch=1)


def test_a_batch_of_several_is_checked_though_a_record_alone_came_first():
    less_the_mean = Model(lambda m, x: x - x.mean(0) if len(x) > 1 else x)
    budgets = epsilons.Budgets([1.0] * 30)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=40, batch_size=1.5, clip_norm=0.5), accountant="rdp")
    for seed in range(100):
        model = a_model(less_the_mean)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = random_numbers(30, FEATURES), random_classes(30)
        private = epsilons.make_private(model, optimizer, data, plan, budgets=budgets, seed=seed)
        sizes = [len(private._draws.at(0, step)) for step in range(9)]
        first = next((i for i, size in enumerate(sizes) if size), 9)
        later = next((i for i, size in enumerate(sizes) if size > 1), 9)
        if first < later < 9 and later not in (0, 1):  # at steps where no check would be due
            break
    seen = []

    def loop() -> None:
        for x, y in private.batches:
            seen.append(len(x))
            private.backward(cross_entropy(model, x, y))
            private.step()

    with private, pytest.raises(BatchDependenceError):
        loop()
    assert 1 in seen


@pytest.mark.parametrize("of", [TensorDataset, rows])
def test_a_batch_that_the_loop_writes_to_is_read_again_for_its_replay(of):
    """The first physical batch holds a record that is not finite, and the loop scales in place."""
    x = random_numbers(20, FEATURES)
    x[3] = float("nan")

    def in_place(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x.div_(8), y)

    def beside(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model, x / 8, y)

    ours, theirs = a_model(), a_model()
    for model, losses_of in ((ours, in_place), (theirs, beside)):
        train(model, x, losses_of, data=of(x.clone(), random_classes(20)))
    assert same(parameters_of(ours), parameters_of(theirs))


@pytest.mark.parametrize("which", ["loop", "vmap", "ghost"])
def test_a_record_that_is_not_finite_costs_one_more_turn_and_no_other_mask(which):
    """Played again in one piece, so random numbers fall as they did."""
    x, turns = random_numbers(20, FEATURES), []
    model = a_model(nn.Dropout(0.5))

    def counted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        turns.append(len(x))
        return cross_entropy(model, x, y)

    x[3] = float("nan")
    train(model, x, counted, engine=which)
    assert set(turns) <= {20, 19, 11, 1}  # whole, or the forms of a check
    assert turns.count(1) <= 3  # one for each check; record by record, there would be 20 for each draw


def test_a_model_that_torch_compiled_is_refused_with_what_to_do():
    model = torch.compile(a_model(), backend="eager")
    with pytest.raises(ModelError, match="Pass the model itself"):
        start(model=model)


@pytest.mark.filterwarnings("ignore:Secure RNG turned off")
def test_what_opacus_left_on_a_model_or_optimizer_is_refused_with_what_to_pass():
    """Its hooks stay on the model that was wrapped until they are removed; afterwards all is as before."""
    opacus = pytest.importorskip("opacus")
    inner = a_model()
    plain = torch.optim.SGD(inner.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(random_numbers(40, FEATURES), random_classes(40)), batch_size=4)
    wrapped, theirs, _ = opacus.PrivacyEngine().make_private(
        module=inner, optimizer=plain, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    for model in (wrapped, wrapped._module, nn.Sequential(wrapped)):
        with pytest.raises(ModelError, match=r"remove_hooks.*model\._module.*original_optimizer"):
            start(model=model, optimizer=plain)
    wrapped.remove_hooks()
    with pytest.raises(ModelError, match=r"Got Opacus' DPOptimizer.*optimizer\.original_optimizer"):
        start(model=inner, optimizer=theirs)
    with start(model=wrapped._module, optimizer=theirs.original_optimizer) as private:
        train_small(private, inner)


def test_a_vector_that_was_transposed_is_trained():
    parts = {"head": nn.Linear(FEATURES, CLASSES), "scale": nn.Parameter(torch.ones(FEATURES))}
    ours = Model(lambda m, x: m.head(x * m.scale.t()), **parts)
    theirs = copy.deepcopy(ours)
    train(ours, random_numbers(20, FEATURES), engine="ghost")
    train(theirs, random_numbers(20, FEATURES), engine="loop")
    torch.testing.assert_close(parameters_of(ours), parameters_of(theirs), atol=1e-6, rtol=1e-5)


def test_a_table_that_two_layers_share_counts_where_draws_are_cut():
    sizes = []
    for is_tied in (False, True):
        model = nn.Sequential(nn.Embedding(50_000, 64), nn.Linear(64, 50_000, bias=False))
        model[1].weight.requires_grad_(is_tied)
        if is_tied:
            model[1].weight = model[0].weight
        sizes.append(default_physical_batch(model, [p for p in model.parameters() if p.requires_grad]))
    assert sizes == [512, 32]


class _Checkpointed(nn.Module):
    """A linear model after a layer that torch.utils.checkpoint calls again in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.use_reentrant = nn.Linear(FEATURES, 5), nn.Linear(5, 4), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x.clone().requires_grad_(), use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("engine", ["loop", "vmap", "ghost"])
def test_a_part_whose_graph_is_recorded_in_the_backward_pass_is_refused(engine):
    for use_reentrant in (True, False):
        model = _Checkpointed(use_reentrant)
        with start(model=model, engine=engine) as private:
            x, y = next(iter(private.batches))
            losses = F.cross_entropy(model(x), y, reduction="none")
            if use_reentrant:
                with pytest.raises(UnsupportedLayerError, match="use_reentrant=False"):
                    private.backward(losses)
            else:
                private.backward(losses)
