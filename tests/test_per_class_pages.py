"""The table per_class: its budgets follow from the classes, and its page and figure show who gains and who loses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot as plt
from pydantic import ValidationError

from experiments import per_class, training
from experiments.comparing import value
from experiments.settings import FeatureSettings, tables

TABLE = tables()["per_class"]


def line(right: list[int]) -> dict[str, Any]:
    return {"per_class": [[hits, 100] for hits in right], "accuracy": sum(right) / 1_000}


def results(**right: list[int]) -> dict[str, Any]:
    """Finished runs by id; names with _ in place of -."""
    return {TABLE.by_name[name.replace("_", "-")].settings.named(0): line(hits) for name, hits in right.items()}


BEFORE = [50] * 10
RAISED = [49, 49, 49, 61, 49, 49, 49, 49, 49, 49]  # class 3 up by 11, each other class down by 1


def test_one_class_has_its_own_epsilon_and_all_others_have_the_other():
    targets = np.arange(40) % 10
    budgets = training.budgets_by_class(TABLE.by_name["sample-3-at-1"].settings, targets)
    assert budgets is not None
    np.testing.assert_array_equal(budgets.epsilons[budgets.group], np.where(targets == 3, 1.0, 2.0))
    assert training.budgets_by_class(TABLE.by_name["all-2"].settings, targets) is None


def test_every_class_strategy_and_epsilon_has_a_cell():
    cells = {
        (cell.settings.strategy, *next(iter(cell.settings.class_epsilon.items())))
        for cell in TABLE.cells
        if isinstance(cell.settings, FeatureSettings) and cell.settings.class_epsilon
    }
    assert cells == {(s, str(k), e) for s in ("sample", "scale") for k in range(10) for e in (1.0, 3.0)}
    assert len(TABLE.cells) == 41


def test_the_epsilon_of_a_class_needs_one_epsilon_for_the_others():
    settings = TABLE.by_name["sample-3-at-1"].settings.model_dump()
    with pytest.raises(ValidationError, match="one epsilon for the other classes"):
        FeatureSettings.model_validate(settings | {"shares": {"1": 0.5, "2": 0.5}})


def test_the_page_shows_what_the_class_and_the_others_gain_and_lose():
    done = results(all_2=BEFORE, sample_3_at_3=RAISED)
    matrix = per_class.changes(TABLE, done, "sample", 3)
    assert per_class.own(matrix)[3] == pytest.approx(11)
    assert per_class.others(matrix)[3] == pytest.approx(-9 / 9)
    assert np.isnan(matrix[:, 2]).all()
    page = per_class.page(TABLE, done)
    assert "| 3 | +11.0 (-1.0) | **not run** | **not run** | **not run** |" in page
    assert "* Sample, ε = 3: the class itself is up in 1 of 1 runs (by 11.0 to 11.0 points), the mean" in page
    assert per_class.page(TABLE, results(all_2=BEFORE)) == ""


def test_a_class_that_moves_against_its_budget_is_counted():
    done = results(all_2=BEFORE, scale_3_at_1=RAISED, scale_4_at_1=[51] * 4 + [40] + [51] * 5)
    assert "down in 1 of 2 runs (by -11.0 to 10.0 points)" in per_class.page(TABLE, done)


def test_the_accuracy_of_one_class_is_a_quantity():
    assert value(line(RAISED), "class_accuracy[3]") == 61


def test_the_heat_maps_have_the_changed_class_in_columns():
    figure, axes = plt.subplots()
    per_class.heat_maps(TABLE, results(all_2=BEFORE, sample_3_at_3=RAISED), axes)
    first = figure.axes[0].images[0].get_array()
    assert first[3, 3] == pytest.approx(11)
    assert first[0, 3] == pytest.approx(-1)
    assert figure.axes[0].get_title() == "Sample, ε = 3 (1 of 10)"
    plt.close(figure)
