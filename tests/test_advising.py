"""The advisor: its signals are those found with a separate program, and it says when budgets hardly help."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from epsilons import Budgets, Recipe, advise, plan
from epsilons.cli import app
from epsilons.planning import risk
from epsilons.planning.risk_profile import excess

A, B = (0.34, 0.43, 0.23), (0.54, 0.37, 0.09)
MNIST, SVHN, CIFAR = (60_000, 512, 9375), (73_257, 1024, 2146), (50_000, 1024, 1465)

#: (records, batch, steps), levels, shares; Scale, Sample, full batch, best exclusion: by a separate program.
RECORDED = [
    (MNIST, (1, 2, 3), A, 1.660, 1.693, 1.822, 1.227),
    pytest.param(MNIST, (1, 2, 3), B, 1.417, 1.442, 1.522, 1.0, marks=pytest.mark.slow),
    pytest.param(SVHN, (1, 2, 3), A, 1.604, 1.648, 1.864, 1.218, marks=pytest.mark.slow),
    pytest.param(SVHN, (1, 2, 3), B, 1.383, 1.418, 1.557, 1.0, marks=pytest.mark.slow),
    (CIFAR, (1, 2, 3), A, 1.640, 1.677, 1.844, 1.224),
    pytest.param(CIFAR, (1, 2, 3), B, 1.405, 1.433, 1.540, 1.0, marks=pytest.mark.slow),
    (CIFAR, (1, 5, 10), A, 2.702, 3.028, 4.08, 2.42),
    (CIFAR, (0.5, 8), (0.5, 0.5), 4.155, 5.070, 6.61, 4.93),
    pytest.param((50_000, 50, 20_000), (1, 4, 8), A, 1.480, 1.605, 5.54, 1.48, marks=pytest.mark.slow),
    ((50_000, 10_000, 200), (1, 2, 3), A, 1.747, 1.755, 1.793, 1.24),
]


@pytest.mark.parametrize(("setting", "levels", "shares", "scale", "sample", "full", "drop"), RECORDED)
def test_the_signals_are_the_recorded_ones(setting, levels, shares, scale, sample, full, drop):
    records, batch, steps = setting
    budgets = Budgets.from_shares(dict(zip(map(float, levels), shares, strict=True)), records=records)
    advice = advise(budgets, Recipe(steps, batch, 1.0), "rdp")
    ways = {way.name: way for way in advice.ways}
    assert ways["uniform"].signal == 1
    assert ways["scale"].signal == pytest.approx(scale, rel=0.01)
    assert ways["sample"].signal == pytest.approx(sample, rel=0.01)
    assert advice.full_batch == pytest.approx(full, rel=0.01)
    dropped = max(way.signal for name, way in ways.items() if name == "uniform" or name.startswith("exclude"))
    assert dropped == pytest.approx(drop, rel=0.01)
    assert ways["scale"].signal <= ways["mix"].signal <= ways["sample"].signal


def test_weights_are_parts_of_the_gradient_and_records_are_who_takes_part():
    budgets = Budgets.from_shares({1.0: 0.5, 2.0: 0.5}, records=10_000)
    advice = advise(budgets, Recipe(500, 100, 1.0), "rdp")
    for way in advice.ways:
        assert sum(way.weight) == pytest.approx(1)
    by_name = {way.name: way for way in advice.ways}
    np.testing.assert_allclose(by_name["uniform"].weight, [0.5, 0.5])
    assert by_name["exclude below 2"].records == 5000
    assert by_name["exclude below 2"].weight[0] == 0
    clip_norm = plan(budgets, Recipe(500, 100, 1.0), "scale", "rdp").clip_norm
    np.testing.assert_allclose(by_name["scale"].weight, clip_norm / clip_norm.sum(), rtol=1e-9)


def test_leaving_others_out_has_an_excess():
    budgets, recipe = Budgets.from_shares({1.0: 0.9, 8.0: 0.1}, records=1000), Recipe(40, 20, 1.0)
    ways = {way.name: way for way in advise(budgets, recipe, "rdp").ways}
    (most,) = risk(plan(budgets, recipe, "exclude", "rdp", threshold=8.0))[1:]
    assert ways["exclude below 8"].bayes_excess == pytest.approx(most.bayes_excess, rel=1e-6)
    assert ways["exclude below 8"].bayes_excess > ways["sample"].bayes_excess
    assert ways["uniform"].bayes_excess == 0


def test_it_says_when_individual_budgets_hardly_help_and_when_they_do():
    recipe = Recipe(500, 100, 1.0)
    few = Budgets.from_shares({1.0: 0.97, 2.0: 0.03}, records=10_000)
    assert "hardly help" in advise(few, recipe, "rdp").verdict
    many = Budgets.from_shares({1.0: 0.5, 3.0: 0.5}, records=10_000)
    assert "Individual budgets help" in advise(many, recipe, "rdp").verdict


def test_rare_levels_are_not_named():
    budgets = Budgets([1.0] * 500 + [2.25] * 3 + [4.0] * 500)
    shown = str(advise(budgets, Recipe(100, 50, 1.0), "rdp"))
    assert "2.25" not in shown


def test_the_command_prints_a_table_or_json_and_draws(tmp_path):
    words = ["advise", "--shares", "1:50%,3:50%", "--records", "5000", "--batch-size", "100", "--steps", "200"]
    picture = tmp_path / "advice.png"
    shown = CliRunner().invoke(app, [*words, "--picture", str(picture)])
    assert shown.exit_code == 0, shown.output
    assert "sample" in shown.output
    assert "A model" in shown.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    values = json.loads(CliRunner().invoke(app, [*words, "--accountant", "rdp", "--json"]).output)
    assert values["ways"][0]["name"] == "uniform"
    assert set(values) == {"verdict", "model", "inputs", "full_batch", "epsilon", "ways"}


def test_the_excess_of_many_levels_is_read_off_some_and_close_to_that_of_all():
    budgets = Budgets(np.repeat(np.linspace(0.5, 8, 26), 40), delta=1e-5)
    recipe = Recipe(steps=100, batch_size=60, clip_norm=1.0)
    advice = advise(budgets, recipe, "rdp")
    assert "largest of 20 levels" in str(advice)
    (told,) = [way for way in advice.ways if way.name == "sample"]
    exact = excess(risk(plan(budgets, recipe, "sample", "rdp")))
    np.testing.assert_allclose([told.bayes_excess, told.tail_excess], exact, rtol=0.05)


def test_advice_recommends_fixed_features_for_images_and_texts():
    made = advise(Budgets.from_shares({1.0: 0.5, 4.0: 0.5}, records=1_000, delta=1e-5), Recipe(10, 50, 1.0), "rdp")
    assert "images or texts" in made.inputs
    assert made.inputs in str(made)
    assert made.to_dict()["inputs"] == made.inputs
