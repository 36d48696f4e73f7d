"""Fit: the whole loop in one call learns, keeps its run, and repeats itself to the bit."""

from __future__ import annotations

import importlib.metadata
import json
import re
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import epsilons
from epsilons.core import progress_line
from epsilons.data import load
from epsilons.draws.randomness import key_from_seed
from epsilons.errors import DataError, EpsilonsError, InputError, ModelError, RunError
from epsilons.ledger.ledger import read_account
from epsilons.training import EvalData
from epsilons.training.fitting import progress
from epsilons.training.fitting.evaluation import evaluate
from epsilons.training.fitting.losses import LOSSES, OPTIMIZERS
from functional import Model, Records
from options import fit_flat

RECORDS, FEATURES, CLASSES = 80, 6, 3


pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def some_budgets(records: int = RECORDS) -> epsilons.Budgets:
    return epsilons.Budgets(np.resize([4.0, 8.0], records))


@cache
def some_plan(
    records: int = RECORDS, steps: int = 12, batch_size: float = 20.0, clip_norm: float = 1.0, strategy: str = "scale"
) -> epsilons.Plan:
    recipe = epsilons.Recipe(steps=steps, batch_size=batch_size, clip_norm=clip_norm)
    return epsilons.plan(some_budgets(records), recipe, strategy=strategy, accountant="rdp")


def points(records: int = RECORDS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points around three corners, easily separated."""
    make = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (records,), generator=make)
    return 3 * F.one_hot(targets, FEATURES) + torch.randn(records, FEATURES, generator=make), targets


def a_model(outputs: int = CLASSES, inputs: int = FEATURES) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def fitted(model: nn.Module | None = None, data: Any = None, plan: epsilons.Plan | None = None, **options: Any):
    """(model, run) of a small fit."""
    model = model or a_model()
    plan = plan or some_plan()
    one_key = {} if "seed" in options else {"key": key_from_seed(0)}  # data, model and settings are what differs here
    options = {**one_key, "budgets": some_budgets(plan.records), "lr": 0.5, "progress": False, **options}
    return model, fit_flat(model, points() if data is None else data, plan, **options)


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


# -- it learns ----------------------------------------------------------------------------------------------


@cache
def digits() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return tuple(tuple(torch.from_numpy(a) for a in load("digits", split)) for split in ("train", "test"))  # type: ignore[return-value]


@pytest.mark.parametrize("engine", ["auto", "vmap"])
def test_digits_are_learnt_under_individual_budgets(engine):
    """Well above the 10 % of guessing; 87 % is usual here."""
    train, test = digits()
    records = len(train[0])
    options = {"eval_data": test, "eval_every": 50, "lr": 1.0, "engine": engine}
    _, run = fitted(a_model(10, 64), train, some_plan(records, 150, 128.0), **options)
    assert run.metrics[-1]["accuracy"] > 0.6
    assert run.metrics[-1]["loss"] < 1.6
    assert run.charged == (150,)
    assert (run.epsilon_spent() <= some_budgets(records).epsilons).all()


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.5), ("adam", 0.05), ("adamw", 0.05)])
def test_every_named_optimizer_learns(optimizer, lr):
    _, run = fitted(plan=some_plan(steps=40), optimizer=optimizer, lr=lr, eval_data=points(seed=1))
    assert run.metrics[-1]["accuracy"] > 0.6


def test_the_tests_above_name_every_optimizer_and_loss():
    assert set(OPTIMIZERS) == {"sgd", "adam", "adamw"}
    assert set(LOSSES) == {"cross_entropy", "binary_cross_entropy", "mse"}


def test_momentum_is_the_optimizers():
    model, _ = fitted(momentum=0.9)
    own, _ = fitted(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9), lr=None)
    assert same(model, own)
    assert same(model, fitted(optimizer=torch.optim.SGD, momentum=0.9)[0])
    assert not same(model, fitted()[0])


def of_lr(*rates: float) -> Any:
    """A function that makes SGD with a group of parameters per learning rate."""
    return lambda parameters: torch.optim.SGD(
        [{"params": [p], "lr": rates[i % len(rates)]} for i, p in enumerate(parameters)], lr=9.0
    )


SGD, ADAM, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({}, {"optimizer": "sgd", "lr": 0.1, "momentum": 0.0}),
        ({"lr": 0.5}, {"optimizer": "sgd", "lr": 0.5, "momentum": 0.0}),
        ({"optimizer": "adam"}, {"optimizer": "adam", "lr": 0.1}),
        ({"optimizer": "adamw", "lr": 0.02, "momentum": 0.0}, {"optimizer": "adamw", "lr": 0.02}),
        ({"optimizer": SGD}, {"optimizer": "SGD", "lr": 0.001, "momentum": 0.0}),
        ({"optimizer": SGD, "lr": 0.5}, {"optimizer": "SGD", "lr": 0.5, "momentum": 0.0}),
        ({"optimizer": SGD, "lr": 0.5, "momentum": 0.9}, {"optimizer": "SGD", "lr": 0.5, "momentum": 0.9}),
        ({"optimizer": RMSPROP, "momentum": 0.3}, {"optimizer": "RMSprop", "lr": 0.01, "momentum": 0.3}),
        ({"optimizer": ADAM, "lr": 0.02}, {"optimizer": "Adam", "lr": 0.02}),
        ({"optimizer": of_lr(0.25)}, {"lr": 0.25, "momentum": 0.0}),
        ({"optimizer": of_lr(0.25, 0.5)}, {"lr": [0.25, 0.5, 0.25, 0.5], "momentum": 0.0}),
    ],
)
def test_the_optimizer_trains_with_what_was_given_and_the_run_says_so(options, recorded, tmp_path, monkeypatch):
    """What is recorded is held to the groups of the very optimizer that makes the updates."""
    seen: list[dict[str, Any]] = []

    def look(private: epsilons.Private) -> None:
        groups = private.optimizer.param_groups
        for name in ("lr", "momentum"):
            values = [group[name] for group in groups if name in group]
            if values:
                seen.append({name: values[0] if len(set(values)) == 1 else values})

    fitted(run_dir=tmp_path / "run", callbacks=[look], **{"lr": None, **options})
    written = json.loads((tmp_path / "run" / "run.json").read_text())["training"]
    assert {name: written[name] for name in recorded} == recorded
    assert ("momentum" in written) is ("momentum" in recorded)
    assert seen
    assert all(written[name] == value for row in seen for name, value in row.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adam", "momentum": 0.9}, "Adam has no momentum, got momentum=0.9.*betas"),
        ({"optimizer": "adamw", "momentum": 0.9}, "betas"),
        ({"optimizer": torch.optim.Adam, "momentum": 0.9}, "betas"),
        ({"optimizer": of_lr(0.1), "lr": 0.5}, "lr=0.5 and a function that makes"),
        ({"optimizer": of_lr(0.1), "lr": 0.5, "momentum": 0.9}, "lr=0.5 and momentum=0.9 and a function that makes"),
        ({"optimizer": [torch.optim.SGD]}, r"got an optimizer \(list\)"),
        ({"optimizer": None}, r"got an optimizer \(NoneType\)"),
    ],
)
def test_a_setting_that_the_optimizer_would_ignore_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        fitted(**{"lr": None, **options})


@pytest.mark.parametrize("stop_at", [1, 5, 12])
@pytest.mark.parametrize("folder", [False, True])
def test_a_callback_ends_training_and_the_run_is_finished(stop_at, folder, tmp_path):
    def enough(private: epsilons.Private) -> None:
        if private.updates == stop_at:
            private.stop()

    run_dir = tmp_path / "run" if folder else None
    model, run = fitted(callbacks=[enough], run_dir=run_dir, eval_data=points(seed=1), eval_every=4)
    assert sum(run.charged) == stop_at
    assert [row["step"] for row in run.metrics] == sorted({*range(4, stop_at, 4), stop_at})
    if run_dir is not None:
        assert read_account(run_dir / "ledger.jsonl", run.plan).closed == (stop_at,)
        assert not (run_dir / "secret").exists()
        assert not (run_dir / "checkpoints").exists()
        again, its = fitted(callbacks=[enough], run_dir=run_dir, eval_data=points(seed=1), eval_every=4, resume=True)
        assert same(again, model)
        assert its.charged == run.charged


def one_class(kind: str, records: int = RECORDS) -> Any:
    inputs, targets = points(records)[0], torch.ones(records, dtype=torch.int64)
    if kind == "arrays":
        return inputs.numpy(), targets.numpy()
    return TensorDataset(inputs, targets) if kind == "data set" else (inputs, targets)


@pytest.mark.parametrize("kind", ["tensors", "arrays", "data set"])
@pytest.mark.parametrize(("loss", "classes"), [("cross_entropy", 3), ("binary_cross_entropy", 2)])
@pytest.mark.parametrize("where", ["training", "test"])
def test_targets_of_one_class_are_refused(kind, loss, classes, where):
    model = a_model(CLASSES if classes == 3 else 1)
    whole = points()[0], points()[1] % classes
    data, test = (one_class(kind), whole) if where == "training" else (whole, one_class(kind))
    with pytest.raises(DataError, match=f"All 80 targets of the {where} data are of one class"):
        fitted(model, data, loss=loss, eval_data=test)
    _, run = fitted(model, whole, loss=loss, eval_data=one_class(kind, 19))
    assert run.charged == (12,)  # so few may well be alike


def test_numbers_that_are_all_the_same_are_no_classes():
    assert fitted(a_model(1), (points()[0], torch.ones(RECORDS)), loss="mse")[1].charged == (12,)


# -- losses -------------------------------------------------------------------------------------------------


def test_a_loss_may_be_a_function_of_ones_own():
    def mine(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    assert same(fitted(loss=mine)[0], fitted(loss="cross_entropy")[0])


def test_cross_entropy_of_many_places_is_their_mean_per_record():
    outputs, targets = torch.randn(5, CLASSES, 4), torch.randint(CLASSES, (5, 4))
    ours = LOSSES["cross_entropy"](outputs, targets)
    each = [F.cross_entropy(outputs[i : i + 1], targets[i : i + 1]) for i in range(5)]
    assert torch.allclose(ours, torch.stack(each))


@pytest.mark.parametrize("shape", [(5, 1), (5,)])
@pytest.mark.parametrize("wanted", [(5, 1), (5,)])
def test_binary_and_squared_losses_are_one_number_per_record_whatever_the_shape(shape, wanted):
    """A (5, 1) output against (5,) targets must not be spread out to (5, 5)."""
    outputs, targets = torch.randn(shape), torch.randint(2, wanted)
    for name, each in [
        ("mse", lambda o, t: (o - t) ** 2),
        ("binary_cross_entropy", lambda o, t: F.binary_cross_entropy_with_logits(o, t.float(), reduction="none")),
    ]:
        ours = LOSSES[name](outputs, targets)
        assert ours.shape == (5,)
        assert torch.allclose(ours, each(outputs.flatten(), targets.flatten()))


def test_a_regression_is_fitted_and_has_a_loss_but_no_accuracy():
    x, _ = points()
    y = x @ torch.linspace(-0.3, 0.3, FEATURES)
    _, run = fitted(a_model(1), (x, y), some_plan(steps=60), loss="mse", lr=0.1, eval_data=(x, y), eval_every=20)
    assert [sorted(row) for row in run.metrics] == [["loss", "mean_absolute_error", "r2", "rmse", "step"]] * 3
    assert run.metrics[-1]["loss"] < float(y.square().mean())


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_regression_by_a_loss_of_ones_own_can_be_evaluated(outputs):
    """Targets that are not whole numbers are no classes, whatever the loss is called."""
    x, _ = points()
    y = x[:, :outputs] * 0.3

    def squared(predicted: Tensor, wanted: Tensor) -> Tensor:
        return (predicted - wanted).square().mean(1)

    _, run = fitted(a_model(outputs), (x, y), loss=squared, eval_data=(x, y))
    assert sorted(run.metrics[-1]) == ["loss", "step"]


def test_two_classes_are_fitted_by_one_output_and_by_two():
    x, y = points()
    binary = (y == 0).long()
    for outputs, loss in [(1, "binary_cross_entropy"), (2, "cross_entropy")]:
        _, run = fitted(a_model(outputs), (x, binary), some_plan(steps=40), loss=loss, eval_data=(x, binary))
        assert run.metrics[-1]["accuracy"] > 0.8


def test_several_labels_per_record_can_be_fitted_and_evaluated():
    x, _ = points()
    labels = (x[:, :CLASSES] > 1).float()
    _, run = fitted(a_model(), (x, labels), some_plan(steps=40), loss="binary_cross_entropy", eval_data=(x, labels))
    assert 0.6 < run.metrics[-1]["accuracy"] <= 1


# -- what it reports ----------------------------------------------------------------------------------------


def test_metrics_are_taken_as_often_as_asked_and_at_the_end():
    for options, steps in (({"eval_every": 5}, [5, 10, 12]), ({"eval_every": 6}, [6, 12]), ({}, [12])):
        _, run = fitted(eval_data=points(seed=1), **options)
        assert [row["step"] for row in run.metrics] == steps
    assert fitted()[1].metrics == ()


def test_an_evaluation_changes_nothing_of_what_is_learnt():
    model = nn.Sequential(a_model(), nn.Dropout(0.5))
    with_tests, _ = fitted(model, eval_data=points(seed=1), eval_every=1)
    without, _ = fitted(nn.Sequential(a_model(), nn.Dropout(0.5)))
    assert same(with_tests, without)
    assert not with_tests.training


def test_evaluate_is_the_mean_over_records_whatever_the_batch():
    model, (x, y) = a_model().eval(), points()
    losses = F.cross_entropy(model(x), y, reduction="none")
    for batch in (1, 7, 1024):
        found = evaluate(model, EvalData((x, y)), LOSSES["cross_entropy"], batch=batch)
        assert found["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        assert found["accuracy"] == float((model(x).argmax(1) == y).double().mean())
        assert found["per_class"] == [
            [int(((model(x).argmax(1) == c) & (y == c)).sum()), int((y == c).sum())] for c in range(3)
        ]
    for persons in (0, len(x) + 1):
        with pytest.raises(InputError, match="cannot be of"):
            EvalData((x, y), persons=persons)
    whole = EvalData(TensorDataset(x, y), groups=np.arange(len(x)) % 3 - 1)
    again = evaluate(model, whole, LOSSES["cross_entropy"])
    assert again["accuracy"] == found["accuracy"]
    right = (model(x).argmax(1) == y).numpy()
    assert again["per_group"] == [[int(right[g::3].sum()), len(right[g::3])] for g in (1, 2)]
    assert again["per_class_group"] == [
        [[int(right[g::3][y[g::3] == c].sum()), int((y[g::3] == c).sum())] for g in (1, 2)] for c in range(3)
    ]
    of_three = evaluate(model, whole, LOSSES["cross_entropy"], groups=3)  # the last has no test records
    assert of_three["per_group"] == [*again["per_group"], [0, 0]]
    assert of_three["per_class_group"] == [[*cells, [0, 0]] for cells in again["per_class_group"]]
    with pytest.raises(InputError, match="nothing to evaluate on"):
        evaluate(model, EvalData((x[:0], y[:0])), LOSSES["cross_entropy"])


def test_callbacks_are_called_after_every_update_and_see_the_private():
    seen: list[int] = []
    first: list[Tensor] = []
    model = a_model()

    def note(private: epsilons.Private) -> None:
        assert isinstance(private, epsilons.Private)
        seen.append(sum(private.ledger.charged))
        first.append(model[0].weight.detach().clone())

    fitted(model, callbacks=[note, lambda private: seen.append(-1)])
    assert seen == [i for step in range(1, 13) for i in (step, -1)]
    assert all(not torch.equal(a, b) for a, b in pairwise(first))


def test_data_that_the_model_cannot_be_tested_on_are_found_before_any_charge(tmp_path):
    x, y = points()
    with pytest.raises(DataError, match="cannot be tested on the first record of the test data"):
        fitted(eval_data=(torch.cat([x, x], 1), y), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_classes_in_a_column_are_refused_with_what_to_pass():
    x, y = points()
    with pytest.raises(DataError, match=r"Pass targets\[:, 0\]"):
        fitted(data=(x, y[:, None]))


def test_callbacks_and_metrics_do_not_show_which_draws_were_empty():
    """The drawn records are secret: an update on noise alone is reported like any other."""
    plan, steps = some_plan(steps=40, batch_size=0.5), []
    options = {"callbacks": [lambda private: steps.append(sum(private.ledger.charged))], "eval_every": 1}
    _, run = fitted(plan=plan, eval_data=points(seed=1), **options)
    assert run.charged == (40,)
    assert steps == list(range(1, 41))
    assert [row["step"] for row in run.metrics] == list(range(1, 41))


def test_progress_is_silent_unless_asked_and_shows_no_single_budget(capfd):
    fitted(progress=False)
    assert capfd.readouterr() == ("", "")
    fitted(progress=True)
    assert capfd.readouterr().out == ""


def test_progress_says_no_spend_where_it_would_show_one_person_s_budget():
    for levels, words in (([1.0] * 30 + [2.0] * 70, "ε 1.00/1  1.00/2"), ([0.37] + [1.0] * 30 + [2.0] * 69, "")):
        plan = epsilons.plan(epsilons.Budgets(levels), epsilons.Recipe(20, 10, 1.0), "uniform", "rdp")
        private = SimpleNamespace(plan=plan, ledger=SimpleNamespace(charged=(20,)))
        assert progress.spent(private) == words


# -- the run's folder ---------------------------------------------------------------------------------------


def test_a_run_leaves_plan_ledger_metrics_and_model_and_no_key(tmp_path):
    run_dir = tmp_path / "runs" / "first"
    model, run = fitted(run_dir=run_dir, eval_data=points(seed=1), eval_every=5)
    assert run.path == run_dir
    names = ["ledger.jsonl", "metrics.jsonl", "model.json", "model.safetensors", "plan.json", "run.json"]
    assert sorted(p.name for p in run_dir.iterdir()) == names
    kept = load_file(run_dir / "model.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert rows == [dict(row) for row in run.metrics]
    assert epsilons.Plan.load(run_dir / "plan.json") == run.plan
    assert epsilons.ledger.ledger.read_charges(run_dir / "ledger.jsonl", run.plan) == run.charged == (12,)
    settings = json.loads((run_dir / "run.json").read_text())
    assert settings["randomness"] == "seeded"
    assert "no guarantee towards anyone who knows the seed" in settings["guarantee"]
    assert settings["versions"]["torch"] == importlib.metadata.version("torch")


def test_a_run_that_is_interrupted_keeps_its_charges_and_what_it_needs_to_go_on(tmp_path):
    def stop(private: epsilons.Private) -> None:
        if sum(private.ledger.charged) == 5:
            raise KeyboardInterrupt

    model = a_model()
    with pytest.raises(KeyboardInterrupt):
        fitted(model, run_dir=tmp_path / "run", callbacks=[stop])
    kept = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert kept == ["checkpoints", "ledger.jsonl", "plan.json", "run.json", "secret"]
    assert epsilons.ledger.ledger.read_charges(tmp_path / "run" / "ledger.jsonl", some_plan())[0] >= 5
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_cannot_be_evaluated_is_saved_all_the_same(tmp_path):
    """What was paid for with privacy is not lost to a mistake in the test data."""
    x, y = points(seed=1)
    y[-1] = CLASSES  # the first is tried beforehand
    with pytest.raises(IndexError, match="out of bounds"):
        fitted(run_dir=tmp_path / "run", eval_data=(x, y))
    assert (tmp_path / "run" / "model.safetensors").exists()


# -- repeatability ------------------------------------------------------------------------------------------


def pair(index: int) -> tuple[Tensor, int]:
    x, y = points()
    return x[index], int(y[index])


def dicts(*keys: str) -> Records:
    return Records(lambda index: dict.fromkeys(keys, pair(index)[0]), RECORDS)


def test_a_seed_repeats_a_run_to_the_bit():
    def run(**options: Any) -> Any:
        torch.rand(3)
        return fitted(nn.Sequential(a_model(), nn.Dropout(0.3)), eval_data=points(seed=1), eval_every=4, **options)

    (first, its), (second, again) = run(), run()
    assert same(first, second)
    assert its.metrics == again.metrics
    assert not same(first, run(seed=1)[0])


def test_the_secure_source_trains_too():
    first, _ = fitted(randomness="secure")
    assert same(first, fitted(randomness="secure")[0])
    assert not same(first, fitted()[0])


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "error", "phrase"),
    [
        (
            {"loss": "hinge"},
            InputError,
            "No loss is called 'hinge'; there are: cross_entropy, binary_cross_entropy, mse",
        ),
        ({"optimizer": "lion"}, InputError, "No optimizer is called 'lion'; there are: sgd, adam, adamw"),
        ({"resume": True}, RunError, "needs a path"),
        ({"loss": F.cross_entropy}, ModelError, 'reduction="none"'),
        ({"budgets": epsilons.Budgets([4.0] * 3)}, DataError, "one budget per record"),
        ({"optimizer": SGD(a_model().parameters())}, InputError, r"'sgd'.*lambda.*got an optimizer \(SGD\)"),
        ({"eval_data": DataLoader(TensorDataset(*points()))}, DataError, r"as test data.*loader\.dataset"),
        ({"eval_data": iter([points()])}, DataError, "map-style data set"),
        ({"eval_data": (*points(), points()[1])}, DataError, "test data of .inputs, targets.*3 parts"),
        ({"data": dicts("x", "y")}, DataError, "a dict of 2 parts.*make_private and your own loop"),
        ({"data": dicts("x", "y", "z")}, DataError, "a dict of 3 parts"),
        ({"data": dicts("x", "y", "z"), "num_workers": 1}, DataError, "a dict of 3 parts"),
        ({"data": TensorDataset(points()[0])}, DataError, "a tuple of 1 parts"),
        ({"data": points()[0]}, DataError, "got a Tensor"),
        ({"data": (points()[0].double(), points()[1])}, DataError, r"torch\.float64.*parameters torch\.float32"),
        ({"data": (points()[0].numpy().astype(float), points()[1].numpy())}, DataError, r'astype\("float32"\)'),
        ({"data": (points()[0], points()[1].float())}, DataError, r"torch\.int64, got targets of torch\.float32"),
        ({"data": (points()[0], points()[1].int())}, DataError, r"torch\.int64, got targets of torch\.int32"),
        ({"data": (points()[0].numpy(), np.array(["a"] * RECORDS))}, DataError, "Convert them to numbers"),
    ],
)
def test_what_does_not_exist_or_fit_is_refused_and_nothing_is_learnt(option, error, phrase):
    model = a_model()
    with pytest.raises(error, match=phrase) as caught:
        fitted(model, **option)
    assert isinstance(caught.value, EpsilonsError)
    assert len(str(caught.value)) < 500
    assert same(model, a_model())


@pytest.mark.parametrize("where", ["layer", "hook"])
def test_a_type_that_only_the_forward_pass_could_mend_is_named_where_it_does_not(where):
    def casting(cast: bool) -> nn.Module:
        return Model(lambda m, x: m.inner(x.float() if cast else x), inner=a_model())

    x, y = points()
    model: nn.Module = casting(cast=True)
    if where == "hook":
        model = a_model()
        model.register_forward_pre_hook(lambda module, given: (given[0].float(),))
    fitted(model, data=(x.double(), y))
    assert same(model, fitted()[0])
    with pytest.raises(DataError, match=r"torch\.float64.*parameters torch\.float32"):
        fitted(casting(cast=False), data=(x.double(), y))


def test_arrays_are_taken_like_tensors():
    x, y = points()
    backwards = np.ascontiguousarray(x.numpy()[::-1])[::-1]
    backwards.flags.writeable = False
    ours, run = fitted(data=(backwards, y.numpy()), eval_data=(x.numpy(), y.numpy()))
    theirs, its = fitted(eval_data=(x, y))
    assert same(ours, theirs)
    assert run.metrics == its.metrics


def test_reading_the_first_record_keeps_generators_and_hides_no_error():
    def noisy(index: int) -> tuple[Tensor, int]:
        if len(asked) < 1:
            asked.append(index)
            torch.rand(3)
            raise LookupError
        return pair(index)

    asked: list[int] = []
    before = torch.get_rng_state()
    with pytest.raises(InputError, match="No engine"):
        fitted(data=Records(noisy, RECORDS), engine="fast")
    assert asked == [0]
    assert torch.equal(torch.get_rng_state(), before)


def test_probabilities_of_classes_are_targets_too():
    x, y = points()
    fitted(data=(x, F.one_hot(y, CLASSES).float()))


def test_the_time_left_follows_from_the_updates_of_this_process(monkeypatch, capsys):
    """Before the first: what is done once, or steps of a process that was cut off. A last block is charged at once."""
    clock, ticks = [0.0], []
    monkeypatch.setattr(progress_line, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(progress, "spent", lambda private: "ε")
    private = SimpleNamespace(ledger=SimpleNamespace(charged=(0,)), plan=SimpleNamespace(steps=100))
    private.on_update, private.folder = ticks.append, SimpleNamespace(path="runs/june")
    with progress.watched(private):
        for now, done in [(40.0, 61), (45.0, 66), (51.0, 72), (53.0, 100), (79.0, 100)]:
            clock[0], private.ledger.charged, private.is_finished = now, (done,), now == 79.0
            ticks[0](private)
    stamped = [line.split("  ", 2) for line in capsys.readouterr().err.splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", when) for when, _, _ in stamped)
    assert {run for _, run, _ in stamped} == {"runs/june"}
    lines = [line for _, _, line in stamped]
    assert lines == ["charged 61/100  ε", "charged 72/100  0:00:28 left  ε", "charged 100/100  0:00:00 left  ε"]


# -- schedules, and layers that stand still -----------------------------------------------------------------


class Cut(Exception):
    pass


@pytest.mark.parametrize("kind", ["callback", "scheduler"])
def test_a_run_with_a_schedule_goes_on_to_the_same_bits(kind, tmp_path):
    """Scores force checkpoints between updates, and a checkpoint must hold the rate for the next one."""

    def trained(run_dir: str, until: int | None = None, resume: bool = False) -> nn.Module:
        def rate(private: epsilons.Private) -> None:
            if kind == "callback":  # a function of the number of updates alone
                for group in private.optimizer.param_groups:
                    group["lr"] = 0.5 * 0.7**private.updates
            if private.updates == until:
                raise Cut

        def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
            return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

        options = {"callbacks": [rate], "scheduler": halved if kind == "scheduler" else None, "resume": resume}
        model, run = fitted(eval_data=points(seed=1), eval_every=4, run_dir=tmp_path / run_dir, **options)
        assert run.charged == (12,)
        return model

    whole = trained("whole")
    with pytest.raises(Cut):
        trained("cut", until=6)
    assert same(trained("cut", resume=True), whole)
    assert not same(fitted()[0], whole)  # the schedule moved something


def test_a_layer_that_was_frozen_stays_frozen():
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))
    model[1].eval()
    model[1].requires_grad_(False)
    before = model[1].running_mean.clone()
    options = {"optimizer": lambda p: SGD([q for q in p if q.requires_grad], lr=0.1), "lr": None}
    fitted(model, eval_data=points(seed=1), **options)
    assert torch.equal(model[1].running_mean, before)
    model.eval()  # all of it: as evaluation left it, so it is trained
    with pytest.raises(EpsilonsError, match="BatchNorm"):
        fitted(model)
