"""Scores on test data beside the accuracy, and weights of classes in training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch.nn import functional as F

import epsilons
from epsilons.errors import DataError, InputError
from epsilons.training import EvalData
from epsilons.training.fitting.evaluation import Scale, evaluate
from epsilons.training.fitting.losses import LOSSES
from options import fit_flat
from program import CONFIG, change, people
from program import epsilons as command

RNG = np.random.default_rng(0)


def scored(outputs, targets, loss="cross_entropy", **settings):
    """The scores of a model that returns these outputs."""
    model = torch.nn.Linear(outputs.shape[1], outputs.shape[1], bias=False, dtype=torch.float64)
    torch.nn.init.eye_(model.weight)
    data = EvalData((torch.from_numpy(outputs), torch.from_numpy(targets)), **settings)
    kinds = {"binary": loss == "binary_cross_entropy", "numbers": loss == "mse"}
    return evaluate(model, data, LOSSES[loss], batch=7, **kinds)


@pytest.mark.parametrize("classes", [2, 4])
def test_recall_balanced_accuracy_and_auc_are_those_of_scikit_learn(classes):
    logits = np.round(4 * RNG.normal(size=(200, classes))) / 4  # with ties
    targets = RNG.integers(0, classes, 200)
    found = scored(logits, targets)
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    shares = logits[:, 1] - logits[:, 0] if classes == 2 else shifted / shifted.sum(1, keepdims=True)
    wanted = metrics.roc_auc_score(targets, shares, multi_class="ovr")
    assert found["auc"] == pytest.approx(wanted, abs=1e-12)
    assert found["recall"] == pytest.approx(metrics.recall_score(targets, logits.argmax(1), average=None))
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(targets, logits.argmax(1)))
    assert found["majority"] == np.bincount(targets).max() / 200


def test_a_model_that_names_one_class_alone_is_balanced_at_chance():
    found = scored(np.tile([1.0, 0.0], (50, 1)), np.arange(50) // 48)
    assert (found["accuracy"], found["balanced_accuracy"], found["auc"]) == (0.96, 0.5, 0.5)


def test_one_output_for_two_classes_is_scored_like_two_outputs():
    logits, targets = RNG.normal(size=(50, 1)), RNG.integers(0, 2, 50)
    one = scored(logits, targets.astype(np.float64), "binary_cross_entropy")
    two = scored(np.hstack([np.zeros_like(logits), logits]), targets)
    for name in ("accuracy", "per_class", "recall", "balanced_accuracy", "auc"):
        assert one[name] == two[name]


def test_a_class_without_test_records_has_no_recall_and_no_part_in_the_means():
    logits, targets = RNG.normal(size=(60, 3)), RNG.integers(0, 2, 60)
    found = scored(logits, targets)
    assert found["recall"][2] is None
    assert found["balanced_accuracy"] == pytest.approx(np.mean(found["recall"][:2]))
    assert 0 <= found["auc"] <= 1
    assert scored(logits, np.zeros(60, dtype=np.int64))["auc"] is None


@pytest.mark.parametrize("scale", [None, Scale(0.0, 200.0), Scale(0.0, 1e5, log=True)])
def test_errors_of_numbers_are_in_the_unit_of_the_target(scale):
    own, predicted = RNG.uniform(1, 150, 80), RNG.uniform(1, 150, 80)

    def scaled(values):
        if scale is None:
            return values
        low, high = (np.arcsinh(e) if scale.log else e for e in (scale.low, scale.high))
        return 2 * ((np.arcsinh(values) if scale.log else values) - low) / (high - low) - 1

    found = scored(scaled(predicted)[:, None], scaled(own)[:, None], "mse", scale=scale)
    assert found["mean_absolute_error"] == pytest.approx(metrics.mean_absolute_error(own, predicted))
    assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(own, predicted))
    assert found["r2"] == pytest.approx(metrics.r2_score(own, predicted))
    assert "accuracy" not in found


# -- weights of classes ----------------------------------------------------------------------------------------------


def fitted(**options):
    budgets = epsilons.Budgets([1.0, 1.0, 4.0, 4.0] * 20, delta=1e-3)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=3, batch_size=20, clip_norm=0.5), accountant="rdp")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    data = torch.randn(80, 3, generator=torch.Generator().manual_seed(1)), torch.arange(80) % 2
    fit_flat(model, data, plan, budgets=budgets, **options)
    return [p.detach() for p in model.parameters()]


def test_weights_of_classes_multiply_the_losses_before_clipping():
    weights = torch.tensor([1.0, 0.01])

    def weighed(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none") * weights[targets]

    plain, by_name, by_hand = (
        fitted(key=b"k" * 32, **options) for options in ({}, {"class_weights": [1.0, 0.01]}, {"loss": weighed})
    )
    assert all(torch.equal(one, other) for one, other in zip(by_name, by_hand, strict=True))
    assert not torch.equal(plain[0], by_name[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"class_weights": [1.0, 0.0]}, "one positive"),
        ({"class_weights": [1.0, float("nan")]}, "one positive"),
        ({"class_weights": [1.0, 2.0], "loss": "mse"}, "losses of classes"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(options, words):
    with pytest.raises((InputError, DataError), match=words):
        fitted(**options)


# -- configs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text(people(120))
    Path("people.toml").write_text(CONFIG)


def test_class_weights_of_a_config_name_every_class(folder):
    change("steps = 4", "steps = 4\nclass_weights = { no = 1, yes = 5.5 }")
    command("train", "people.toml").succeeded("balanced", "AUC")
    assert '"class_weights": [' in Path("runs/people-1/run.json").read_text()
    change("yes = 5.5", "maybe = 5.5")
    command("train", "people.toml").is_refused(2, "class_weights", "no, yes", "maybe")


def test_a_model_no_better_than_the_most_frequent_class_is_warned_of(folder):
    rows = people(400).splitlines()
    few = [row.replace(",yes,", ",no,") if i % 40 else row.replace(",no,", ",yes,") for i, row in enumerate(rows)]
    Path("people.csv").write_text("\n".join(few) + "\n")
    command("train", "people.toml").succeeded("WARNING: the test accuracy", "not above 96.0%", "most frequent class")


def test_a_regression_says_its_errors_and_their_unit(folder):
    change('target = "label"\nclasses = ["no", "yes"]', 'target = "age"')
    change('drop = ["id"]', 'drop = ["id", "label"]')
    change("steps = 4", 'steps = 4\nloss = "mse"')
    command("train", "people.toml").succeeded("mean absolute error", "unit of the target", "R²")
