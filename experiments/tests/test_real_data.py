"""Cells of the tables run on the real data, with few steps."""

from __future__ import annotations

import os

import numpy as np
import pytest

from runs import TABLES, run_cell

FEW = {"epochs": None, "steps": 3, "evaluations": 1}
ARM = {"epochs": None, "steps": 3, "pool": 200, "batch_size": 20.0, "population": 50, "shadows": 8}
FILTER = {"steps": 3, "options": {"filter": "gdp", "nominal": 2}}


@pytest.mark.slow
@pytest.mark.skipif("EPSILONS_DATA" not in os.environ, reason="needs the real data")
@pytest.mark.parametrize(
    ("table", "cell", "fewer"),
    [
        ("table_2", "mnist-scale-a", FEW),
        ("table_untuned", "cifar10-sample-a", FEW),
        ("lira_cifar10_cnn", "sample", ARM),
        ("lira_cifar10", "scale", ARM),
        ("lira_mnist", "dpsgd-20", ARM),
        ("individual_accounting", "full-filter", FILTER),
    ],
)
def test_a_cell_of_a_table_runs_on_the_real_data(table, cell, fewer):
    line = run_cell(TABLES[table].by_name[cell].settings.model_copy(update=fewer))
    assert line["steps"] == 3
    if fewer is FEW:
        assert line["charged"] == 3
        assert sum(n for _, n in line["per_class"]) == 10_000
    elif fewer is ARM:
        assert np.shape(line["target_auc"]["rmia"]) == (2, 8)
    else:
        assert line["accuracy"] > 0.5
        assert line["largest_part"] == pytest.approx(1, rel=1e-4)
