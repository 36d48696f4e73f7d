"""Tables of budgets per class: budgets follow from the classes; pages, claims and figures show who gains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot as plt
from pydantic import ValidationError

from epsilons.core.mechanism import FloatArray
from epsilons.errors import InputError
from experiments import balance, classes, per_class, reporting, training
from experiments.comparing import Verdict, expected, runs_of, value, verdict
from experiments.results import Line
from experiments.settings import FeatureSettings, Settings, Table
from runs import DONE, TABLES

TABLE = TABLES["per_class"]
THEIRS = expected("per_class")
BALANCE = TABLES["class_balance"]
STRATEGIES = ("sample", "scale")
BALANCED = ("all-3", *STRATEGIES)


def line(right: list[int], sizes: list[int] | None = None) -> dict[str, Any]:
    sizes = sizes or [100] * len(right)
    return {"per_class": [list(pair) for pair in zip(right, sizes, strict=True)], "accuracy": sum(right) / sum(sizes)}


def results(table: Table = TABLE, **right: list[int]) -> dict[str, Any]:
    """Finished runs by id; names with _ in place of -."""
    return {table.by_name[name.replace("_", "-")].settings.named(0): line(hits) for name, hits in right.items()}


BEFORE = [50] * 10
RAISED = [49, 49, 49, 61, 49, 49, 49, 49, 49, 49]  # class 3 up by 11, each other class down by 1


def moved_by(points: Callable[[int], int], others: int) -> dict[str, list[int]]:
    """Runs of Sample at ε = 3: class k moves by points(k), and each other class by `others`."""
    return {f"sample_{k}_at_3": [50 + (points(k) if other == k else others) for other in range(10)] for k in range(10)}


# -- budgets -------------------------------------------------------------------------------------------------------


PAPERS = [0.75, 0.5, 2.0, 2.6, 4.1, 2.1, 2.05, 3.0, 3.1, 6.1]
#: cell -> the epsilon of each class
OWN = {"sample-3-at-1": 3 * [2.0] + [1.0] + 6 * [2.0], "cnn-sample": PAPERS, "features-scale": PAPERS}


@pytest.mark.parametrize("cell", OWN)
def test_all_records_of_a_class_have_its_epsilon(cell):
    targets = np.arange(40) % 10
    budgets = training.budgets_by_class((TABLE.by_name | BALANCE.by_name)[cell].settings, targets)
    assert budgets is not None
    np.testing.assert_array_equal(budgets.epsilons[budgets.group], np.array(OWN[cell])[targets])
    assert training.budgets_by_class(TABLE.by_name["all-2"].settings, targets) is None


@pytest.mark.parametrize(
    ("cell", "epsilons", "error"),
    [
        ("cnn-sample", {"0": 1.0, "1": 2.0}, "class"),  # and no epsilon for the others
        ("sample-3-at-1", {"12": 1.0}, "class 12, which no record of cifar10 has"),
    ],
)
def test_budgets_of_classes_fit_the_classes_of_the_data(cell, epsilons, error):
    settings = (TABLE.by_name | BALANCE.by_name)[cell].settings.model_copy(update={"class_epsilon": epsilons})
    with pytest.raises(InputError, match=error):
        training.budgets_by_class(settings, np.arange(40) % 10)


@pytest.mark.parametrize("name", ["per_class", "per_class_mnist"])
def test_every_class_strategy_and_epsilon_has_a_cell(name):
    baseline, *cells = TABLES[name].cells
    assert not baseline.settings.class_epsilon
    made = {cell.name: (cell.settings.strategy, cell.settings.class_epsilon) for cell in cells}
    assert made == {
        classes.cell_name(strategy, number, epsilon): (strategy, {str(number): epsilon})
        for strategy in STRATEGIES
        for number in range(10)
        for epsilon in (1, 3)
    }


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"shares": {"1": 0.5, "2": 0.5}}, "one epsilon for the other classes"),
        ({"shares": {}, "uniform": [1, 2, 3]}, "one epsilon for the other classes"),
        ({"class_epsilon": {"cat": 1.0}}, "classes as whole numbers, .*got 'cat'"),
        ({"class_epsilon": {"03": 1.0, "3": 2.0}}, "got '03'"),
        ({"kind": "parameters"}, "kinds train and features, got kind 'parameters'"),
    ],
)
def test_wrong_epsilons_of_classes_are_refused_when_a_table_is_read(changes, error):
    settings = TABLE.by_name["sample-3-at-1"].settings.model_dump()
    with pytest.raises(ValidationError, match=error):
        FeatureSettings.model_validate(settings | changes)


def test_the_epsilon_of_a_class_is_part_of_a_run_s_name_only_if_given():
    plain = {"dataset": "digits", "steps": 6, "batch_size": 64, "clip_norm": 1.0, "strategy": "scale"}
    one = Settings(**plain, shares={"2": 1.0})
    assert "class_epsilon" not in one.model_dump(exclude_defaults=True)
    assert one.named(0) != one.model_copy(update={"class_epsilon": {"3": 1.0}}).named(0)


# -- numbers of classes --------------------------------------------------------------------------------------------


def test_accuracies_of_classes_are_those_of_their_own_test_records():
    found = line([10, 30, 90], [100, 50, 100])
    assert value(found, "class_accuracy[1]") == 60
    assert value(found, "others_accuracy[1]") == 50  # 100 of 200 records, and not the mean of 10 % and 90 %
    assert value(found, "others_accuracy[0]") == 80
    assert value(found, "gap") == 80


def claim(epsilon: int, who: str, at_least: float = 0.0) -> dict[str, Any]:
    moves = {"strategy": "sample", "epsilon": epsilon, "who": who, "at_least": at_least}
    return {"say": "x", "cell": "all-2", "moves": moves}


def found(done: dict[str, Line], *wanted: Any) -> Verdict:
    return verdict(claim(*wanted), TABLE, THEIRS, done)


def test_a_claim_on_classes_is_broken_by_one_class_that_moves_the_other_way():
    done = results(all_2=BEFORE, **moved_by(lambda k: 2 + k, -1))
    assert [found(done, 3, "itself", least).held for least in (0.0, 2.0, 2.5)] == [True, True, False]
    assert found(done, 3, "others").held
    assert found(done, 3, "itself").found == "10 of 10 classes (+2.00 to +11.00 points); one seed"
    one_back = found(results(all_2=BEFORE, **moved_by(lambda k: k, -1)), 3, "itself")  # class 0 does not move
    assert one_back.found.startswith("9 of 10 classes")
    assert one_back.held is False
    assert found(results(all_2=BEFORE, **moved_by(lambda k: 2, 1)), 3, "others").held is False


def test_a_claim_on_classes_at_a_lower_epsilon_has_the_opposite_sign():
    lowered = {name.replace("at_3", "at_1"): hits for name, hits in moved_by(lambda k: -8, 1).items()}
    done = results(all_2=BEFORE, **lowered)
    assert [found(done, 1, "itself", least).held for least in (7.0, 9.0)] == [True, False]
    assert found(done, 1, "others").held


def test_a_claim_on_classes_waits_for_all_of_them_and_rests_on_one_seed():
    some = found(results(all_2=BEFORE, sample_3_at_3=RAISED), 3, "itself")
    assert (some.held, some.so_far, some.seeds) == (None, True, 1)
    assert found({}, 3, "itself").found == "not run"


# -- pages ---------------------------------------------------------------------------------------------------------


def test_the_page_shows_what_the_class_and_the_others_gain_beside_the_paper_s_subgroups():
    done = results(all_2=BEFORE, sample_3_at_3=RAISED)
    matrix = classes.changes(TABLE, done, "sample", 3)
    assert classes.own(matrix)[3] == pytest.approx(11)
    assert classes.others(matrix)[3] == pytest.approx(-9 / 9)
    assert np.isnan(matrix[:, 2]).all()
    page = per_class.body(TABLE, THEIRS, done).replace("**not run**", "–")
    for row in (
        "| 3 | +11.0 (-1.00) | – | – | – |",
        "| 3 | 52.88 ± 2.6 | 61.0 | – | 32.64 ± 1.91 | 50.0 | 6.67 ± 1.09 | – | – |",
        "| all but 3 | 54.62 ± 2.42 | 49.0 | – | 57.23 ± 2.5 | 50.0 | 58.75 ± 2.42 | – | – |",
    ):
        assert row in page
    assert "### " not in per_class.body(TABLE, THEIRS, results(all_2=BEFORE))


def test_a_table_without_printed_numbers_has_ours_only():
    mnist = TABLES["per_class_mnist"]
    page = per_class.body(mnist, expected("per_class_mnist"), results(mnist, all_2=BEFORE))
    assert "| class | ε = 3, Sample | ε = 3, Scale | ε = 2 | ε = 1, Sample | ε = 1, Scale |" in page
    assert "| all but 3 | **not run** | **not run** | 50.0 | **not run** | **not run** |" in page


def test_the_gap_of_the_balance_table_is_that_of_the_mean_accuracies():
    cell = BALANCE.by_name["features-sample"].settings
    done = {cell.named(0): line([90] + [50] * 9), cell.named(1): line([50] * 9 + [90])}
    page = balance.body(BALANCE, expected("class_balance"), done)
    halves = " | ".join(["70.00", *["50.00"] * 8, "70.00"])
    assert f"| Features, Sample, ten budgets | {halves} | 20.00 | 2 of 3 |" in page
    assert "| the ten budgets | 0.75 | 0.5 | 2 | 2.6 | 4.1 | 2.1 | 2.05 | 3 | 3.1 | 6.1 |" in page
    assert page.count("**not run**") == 5
    assert "| Sample, ten budgets: paper | 98.16 | 98.09 |" in page


def test_the_paper_s_gaps_are_those_of_its_accuracies():
    for rows in expected("class_balance").cells.values():
        means = [row.mean for row in rows]
        assert max(means[:10]) - min(means[:10]) == pytest.approx(means[10])


def span(points: FloatArray) -> str:
    """The smallest and the largest change, without its sign."""
    least, most = sorted((abs(float(points.min())), abs(float(points.max()))))
    return f"{least:.1f} to {most:.1f}"


def test_the_explanation_has_the_numbers_of_the_runs():
    text = " ".join((reporting.DOCS / "results-per-class.md").read_text(encoding="utf-8").split())
    found = {panel: classes.changes(TABLE, DONE, *panel) for panel in per_class.PANELS}
    up, down = (
        " and ".join(
            f"{span(classes.own(found[strategy, e]))} points with {strategy.title()}" for strategy in STRATEGIES
        )
        for e in (3, 1)
    )
    assert f"At ε = 3 among others at 2 a class gains {up}, at ε = 1 it loses {down}" in text
    theirs = np.concatenate([abs(classes.others(matrix)) for matrix in found.values()])
    assert f"the nine others change by {span(theirs)} points on average" in text
    gaps = [balance.gap(list(runs_of(BALANCE.by_name[f"features-{name}"], DONE).values())) for name in BALANCED]
    assert "from {:.2f} points to {:.2f} with Sample and {:.2f} with Scale".format(*gaps) in text


# -- figures -------------------------------------------------------------------------------------------------------


def test_the_heat_maps_have_the_changed_class_in_columns():
    figure, axes = plt.subplots()
    per_class.heat_maps(TABLE, results(all_2=BEFORE, sample_3_at_3=RAISED), axes)
    first = figure.axes[0].images[0].get_array()
    assert first[3, 3] == pytest.approx(11)
    assert first[0, 3] == pytest.approx(-1)
    assert figure.axes[0].get_title() == "Sample, ε = 3 (1 of 10; grey: not run)"
    plt.close(figure)


def test_the_histories_have_a_curve_per_class_and_a_panel_per_cell():
    cell = BALANCE.by_name["features-sample"].settings
    curve = [{"step": step, **line([step + number for number in range(10)])} for step in (10, 20, 30)]
    figure, axes = plt.subplots()
    balance.histories(BALANCE, {cell.named(0): line(BEFORE) | {"curve": curve}}, axes)
    panels = {panel.get_title(): panel for panel in figure.axes}
    assert len(panels) == 3
    assert len(panels["Features\nScale, ten budgets (not run)"].lines) == 0
    curves = panels["Features\nSample, ten budgets (1 of 3 seeds)"].lines
    np.testing.assert_array_equal(curves[7].get_data(), [[10, 20, 30], [17, 27, 37]])
    plt.close(figure)
