"""The appendix' alternatives: exact epsilons against slow ones, and the numbers on the pages about them."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

pytest.importorskip("torch")

from scipy import stats
from scipy.optimize import brentq
from scipy.stats import binom, norm

import epsilons
from epsilons import SampledGaussian
from epsilons.accounting import pld
from epsilons.accounting.profile import Profile
from experiments import alternatives, cells
from experiments.comparing import runs_of
from experiments.individual_accounting.page import PAIRS
from experiments.results import finished
from experiments.settings import Settings, tables
from pages import ROOT, assert_page_says, rows, section

DONE, TABLES = finished(), tables()


def line_of(table: str, cell: str) -> dict:
    return next(iter(runs_of(TABLES[table].by_name[cell], DONE).values()))


# -- the computation ---------------------------------------------------------------------------------------------------


def slow_delta(epsilon: float, noise: float, rate: float, count: int) -> float:
    """δ of one step for binomially many copies, by sums over a fine grid, in the worse direction."""
    x = np.linspace(-12 * noise, count + 12 * noise, 20_001)
    without = norm.pdf(x, 0, noise)
    present = sum(p * norm.pdf(x, k, noise) for k, p in enumerate(binom.pmf(range(count + 1), count, rate)))
    pairs = ((present, without), (without, present))
    return max(float(np.maximum(a - math.exp(epsilon) * b, 0).sum() * (x[1] - x[0])) for a, b in pairs)


@pytest.mark.parametrize("count", [1, 3])
def test_copies_cost_what_a_slow_sum_over_the_mixture_says(count):
    exact = brentq(lambda e: slow_delta(e, 3.0, 0.4, count) - 1e-3, 1e-3, 20)
    found = alternatives.copies(3.0, 0.4, steps=1, delta=1e-3, count=count)
    assert exact * (1 - 1e-4) <= found <= exact * 1.02


def test_copies_cost_more_than_a_higher_rate_and_less_than_a_larger_weight():
    for n in (2, 3):
        exact = alternatives.copies(4.0, 0.1, 50, 1e-5, n)
        assert pld.epsilon([SampledGaussian(n * 0.1, 4.0, 50)], 1e-5) < exact * 1.001
        assert exact < pld.epsilon([SampledGaussian(0.1, 4.0 / n, 50)], 1e-5)
        assert exact < alternatives.as_argued(4.0, 0.1, 50, 1e-5, n)


def test_a_cell_uses_up_the_budgets_of_every_way(monkeypatch):
    monkeypatch.setattr(alternatives, "COPIES", (1,))
    shares = {"1": 0.5, "3": 0.5}
    settings = Settings(
        kind="alternatives", dataset="digits", steps=400, batch_size=64, clip_norm=1.0, strategy="uniform",
        accountant="pld", shares=shares,
    )  # fmt: skip
    line = cells.run("x", "y", settings, 0)
    assert "error" not in line, line
    assert line["ratio"]["uniform"] == 1
    assert line["ratio"]["larger batch"] > line["ratio"]["sample"] > 1 > line["ratio"]["one record a step"]
    rate, steps = 64 / 1437, round(400 * line["longer"])
    budgets = epsilons.Budgets.from_shares({1.0: 0.5, 3.0: 0.5}, records=1437, delta=1e-5)
    assert alternatives.larger_batch(budgets, line["noise_multiplier"], steps) == pytest.approx(rate, rel=0.02)
    assert alternatives.larger_batch(budgets, line["noise_multiplier"], 400) > rate
    assert line["copies"]["1"] == pytest.approx(1, rel=2e-3)


# -- alternatives.md ---------------------------------------------------------------------------------------------------


def test_the_pulls_on_the_page_are_those_of_the_results():
    page = rows((ROOT / "experiments" / "pages" / "alternatives.md").read_text(encoding="utf-8"), cells=4)
    lines = [line_of("alternatives", f"{data}-a")["ratio"] for data in ("mnist", "cifar10")]
    names = [name for name in lines[0] if name != "uniform"]
    for name in names:
        row = page[name.capitalize() if name in ("scale", "sample") else name]
        assert row[:2] == [f"{line[name]:.2f}" for line in lines]
    strict = line_of("alternatives", "mnist-b")["ratio"]["one group a step"]
    mnist = line_of("alternatives", "mnist-a")
    assert_page_says(
        "experiments/pages/alternatives.md",
        f"the pull is {strict:.2f}, below DP-SGD",
        f"grows to {mnist['ratio']['larger batch']:.2f} times its size",
        f"the run takes {mnist['longer']:.1f} times the steps",
        f"{mnist['ratio']['one group a step'] - 1:.2f} of the {mnist['ratio']['scale'] - 1:.2f} that Scale gains",
    )


def test_the_costs_of_copies_on_the_page_are_those_of_the_results():
    page = rows(section("experiments/pages/alternatives.md", "Copies of data points (F.2)"))
    line = line_of("alternatives", "mnist-a")
    keys = {"exact": "copies", "as the appendix": "as_argued", "one copy, n times the rate": "by_rate"}
    for start, key in {**keys, "one copy, n times the weight": "by_weight"}.items():
        (row,) = [row for name, row in page.items() if name.startswith(start)]
        assert row == [f"{line[key][str(n)]:.3f}" for n in range(1, 6)]
    above = max(line["copies"][str(n)] / line["by_rate"][str(n)] - 1 for n in range(1, 6))
    assert 0.2 < 100 * above < 0.3
    assert_page_says("experiments/pages/alternatives.md", "up to 0.3 % of ε")
    both = f"spend {line['copies']['2']:.3f}, not {line['as_argued']['2']:.3f}"
    assert_page_says("docs/paper.md", both)


# -- choosing-budgets.md -----------------------------------------------------------------------------------------------


def test_what_a_randomly_drawn_budget_is_worth():
    budgets = epsilons.Budgets.from_shares({1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, records=60_000, delta=1e-5)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=9_375, batch_size=512, clip_norm=0.2))
    (phase,) = plan.phases
    profiles = [
        Profile((SampledGaussian(float(q), float(s), plan.steps),), grid=np.linspace(0, 4, 81))
        for q, s in zip(phase.sample_rate, phase.noise_multiplier, strict=True)
    ]
    curves = np.stack([profile.divergence for profile in profiles])  # (levels, directions, points)

    def worth(*weights: float) -> float:
        mixture = np.tensordot(weights, curves, axes=1).max(axis=0)
        return float(np.interp(-math.log(1e-5), -np.log(mixture), profiles[0].grid))

    assert worth(0, 0, 1) == pytest.approx(3, abs=0.01)
    assert_page_says(
        "docs/choosing-budgets.md",
        f"is worth ε = {worth(1 / 3, 1 / 3, 1 / 3):.2f}",
        f"0.05 each, it is worth {worth(0.9, 0.05, 0.05):.2f}",
    )


# -- individual-accounting.md ------------------------------------------------------------------------------------------

ACCOUNTING = TABLES["individual_accounting"]

#: first cell of a row of the page -> cells of the table, in the order of the columns
MEANS = {
    "full batch, ε = 0.3": ("full-plain", "full-filter", "full-assigned"),
    "rate 0.1, ε = 0.3, RDP": ("sampled-rdp", "sampled-renyi-182", "sampled-renyi-31"),
    "rate 0.1, setup A, RDP": ("tiers-rdp", "tiers-renyi-182"),
}
DIFFERENCES = {
    "filter, full batch, paid for 50 of 60": ("full-filter", "full-plain"),
    "filter, full batch, paid for 40 of 60": ("full-filter-40", "full-plain"),
    "the first one with a clip norm and a learning rate that are too large": ("full-filter-wide", "full-plain-wide"),
    "filter, rate 0.1, paid for 182 of 200": ("sampled-renyi-182", "sampled-rdp"),
    "filter, rate 0.1, setup A, paid for 182 of 200": ("tiers-renyi-182", "tiers-rdp"),
    "the same against PLD without a filter": ("tiers-renyi-182", "tiers-pld"),
    "count, rate 0.1, setup A, both by PLD": ("tiers-count-182", "tiers-pld"),
    "0.31 for half of the records, full batch, with the filter": ("full-assigned", "full-filter"),
    "0.31 for half of the records, full batch, without a filter": ("full-plain-assigned", "full-plain"),
}
TWO = {"budget split in halves": "full-two-split", "the second on what is left": "full-two-left"}


def accuracies(cell: str, run: int = 0) -> list[float]:
    """By seed, in order."""
    runs = runs_of(ACCOUNTING.by_name[cell], DONE)
    return [100 * runs[seed]["accuracies"][run] for seed in sorted(runs)]


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"


def test_the_accuracies_under_filters_are_those_of_the_results():
    page = rows((ROOT / "experiments" / "pages" / "individual-accounting.md").read_text(encoding="utf-8"))
    for label, names in MEANS.items():
        assert page[label][: len(names)] == [spread(accuracies(name)) for name in names]
    for label, name in TWO.items():
        assert page[label] == [spread(accuracies(name, run)) for run in (0, 1)]
    for label, (cell, other) in DIFFERENCES.items():
        gains = [a - b for a, b in zip(accuracies(cell), accuracies(other), strict=True)]
        half = stats.t.ppf(0.975, len(gains) - 1) * statistics.stdev(gains) / math.sqrt(len(gains))
        assert page[label] == [f"{statistics.fmean(gains):+.2f} ± {half:.2f}"], label


def test_what_the_pages_say_about_filters_follows_from_the_results():
    means = {cell.name: statistics.fmean(accuracies(cell.name)) for cell in ACCOUNTING.cells}
    for names in (
        ("full-plain", "full-filter"),
        ("sampled-rdp", "sampled-renyi-182"),
        ("tiers-rdp", "tiers-renyi-182"),
    ):
        assert -0.25 < means[names[1]] - means[names[0]] < 0.05  # "equal or 0.1 to 0.2 points lower"
    assert means["sampled-pld"] > max(means[f"sampled-renyi-{n}"] for n in (182, 160, 133))
    assert means["tiers-pld"] > means["tiers-renyi-182"]
    gain = means["full-assigned"] - means["full-filter"]
    assert 0 < gain < 0.1
    assert_page_says("docs/paper.md", f"0.31 for half of the records is worth {gain:+.2f} ±")
    medians = [line["part_spent"][1] for line in runs_of(ACCOUNTING.by_name["full-filter"], DONE).values()]
    assert max(medians) < 0.5
    split, left = ([statistics.fmean(accuracies(name, run)) for run in (0, 1)] for name in TWO.values())
    gained, lost = left[0] - split[0], split[1] - left[1]
    assert_page_says(
        "experiments/pages/individual-accounting.md",
        f"the first model gains {gained:.1f} points, and the second one loses {lost:.1f}",
    )


def test_every_comparison_of_the_results_page_is_between_cells_of_the_table():
    assert {name for pair in PAIRS for name in pair[:2]} <= set(ACCOUNTING.by_name)
    cells_with_a_filter = {cell.name for cell in ACCOUNTING.cells if "filter" in cell.settings.options}
    assert cells_with_a_filter == {name for pair in PAIRS for name in pair[:2]} & cells_with_a_filter


def test_no_record_of_any_run_was_above_its_budget():
    parts = [line["largest_part"] for cell in ACCOUNTING.cells for line in runs_of(cell, DONE).values()
             if "largest_part" in line]  # fmt: skip
    assert len(parts) >= 30
    assert 0.999 < max(parts) <= 1
