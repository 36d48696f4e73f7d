"""The numbers on experiments/pages are those of the finished runs, and no run was above a budget."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from experiments.comparing import expected, runs_of
from experiments.individual_accounting import page as accounting_page
from experiments.pate import page as pate_page
from experiments.settings import HERE
from pages import assert_page_says, rows, section
from runs import DONE, TABLES, gain, lines, mean, scores, spread

#: page -> first cell of a row -> cells of its table, by column; None: this column has none
MEANS: dict[str, dict[str, tuple[str | None, ...]]] = {
    "pate": {
        "weighting, exact costs, 100 / 400 / 200 votes": ("baseline", "weighting-a", "weighting-b"),
        "as published, weights by budget (no promise)": ("published-baseline", "published-a", "published-b"),
        "as published, weights of the code (no promise)": (None, "code-a", "code-b"),
        "Scale, same features and private records": ("sgd-dpsgd", "sgd-scale-a", "sgd-scale-b"),
        "Sample, same features and private records": (None, "sgd-sample-a", "sgd-sample-b"),
    },
    "individual-accounting": {
        "full batch, ε = 0.3": ("full-plain", "full-filter", "full-assigned"),
        "rate 0.1, ε = 0.3, RDP": ("sampled-rdp", "sampled-renyi-182", "sampled-renyi-31"),
        "rate 0.1, setup A, RDP": ("tiers-rdp", "tiers-renyi-182", None),
    },
}
DIFFERENCES = {
    "pate": {
        "weighting, setup A, above ε = 1 for all": ("weighting-a", "baseline"),
        "weighting, setup B, above ε = 1 for all": ("weighting-b", "baseline"),
        "weighting, setup A above B": ("weighting-a", "weighting-b"),
        "as published, setup A above B, weights by budget": ("published-a", "published-b"),
        "as published, setup A above B, weights of the code": ("code-a", "code-b"),
        "upsampling, setup A, 100 votes, above ε = 1 for all": ("upsampling-a", "baseline"),
        "vanishing, setup A, 100 votes, above ε = 1 for all": ("vanishing-a", "baseline"),
    },
    "individual-accounting": {
        "filter, full batch, paid for 50 of 60": ("full-filter", "full-plain"),
        "filter, full batch, paid for 40 of 60": ("full-filter-40", "full-plain"),
        "the first one with a clip norm and a learning rate that are too large": (
            "full-filter-wide",
            "full-plain-wide",
        ),
        "filter, rate 0.1, paid for 182 of 200": ("sampled-renyi-182", "sampled-rdp"),
        "filter, rate 0.1, setup A, paid for 182 of 200": ("tiers-renyi-182", "tiers-rdp"),
        "the same against PLD without a filter": ("tiers-renyi-182", "tiers-pld"),
        "count, rate 0.1, setup A, both by PLD": ("tiers-count-182", "tiers-pld"),
        "0.31 for half of the records, full batch, with the filter": ("full-assigned", "full-filter"),
        "0.31 for half of the records, full batch, without a filter": ("full-plain-assigned", "full-plain"),
    },
}
TWO = {"budget split in halves": "full-two-split", "the second on what is left": "full-two-left"}


def shown(page: str) -> dict[str, list[str]]:
    return rows((HERE / "pages" / f"{page}.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", MEANS)
def test_the_accuracies_on_a_page_are_those_of_the_results(page):
    found, table = shown(page), page.replace("-", "_")
    for label, cells in MEANS[page].items():
        assert found[label] == ["–" if cell is None else spread(scores(table, cell).values()) for cell in cells]
    for label, (cell, other) in DIFFERENCES[page].items():
        assert found[label] == ["{:+.2f} ± {:.2f}".format(*gain(table, cell, other))], label


@pytest.mark.parametrize(("table", "page"), [("pate", pate_page), ("individual_accounting", accounting_page)])
def test_a_page_compares_cells_of_its_table_and_every_one_with_a_filter(table, page):
    compared = {name for pair in page.PAIRS for name in pair[:2]}
    assert compared <= set(TABLES[table].by_name)
    assert {cell.name for cell in TABLES[table].cells if "filter" in cell.settings.options} <= compared


def test_no_group_or_record_of_any_exact_run_was_above_its_budget():
    for table, least in (("pate", 60), ("individual_accounting", 30)):
        found = [run for cell in TABLES[table].cells for run in runs_of(cell, DONE).values()]
        parts = [run["largest_part"] for run in found if "largest_part" in run]
        assert len(parts) > least
        assert 0.999 < max(parts) <= 1


# -- PATE ------------------------------------------------------------------------------------------------------------


def run_means(cell: str, key: str) -> Any:
    """The mean over runs of a number, or of the numbers of the groups."""
    found = [line[key] for line in lines("pate", cell).values()]
    return (
        [statistics.fmean(group) for group in zip(*found, strict=True)]
        if isinstance(found[0], list)
        else (statistics.fmean(found))
    )


def test_with_exact_costs_weighting_gains_four_points_and_setup_a_is_not_below_b():
    for cell, steps in (("baseline", 100), ("weighting-a", 400), ("weighting-b", 200)):
        assert len(scores("pate", cell)) == 10
        assert TABLES["pate"].by_name[cell].settings.steps == steps
        assert cell == "baseline" or gain("pate", cell, "baseline")[0] >= 4
    assert sum(gain("pate", "weighting-a", "weighting-b")) >= 0


def test_idp_sgd_on_the_same_features_is_above_pate():
    least = {cell: min(scores("pate", f"sgd-{cell}").values()) for cell in ("dpsgd", "sample-a", "scale-a")}
    most = {setup: max(scores("pate", f"weighting-{setup}").values()) for setup in "ab"}
    assert min(least.values()) > most["a"]
    assert min(min(scores("pate", f"sgd-{method}-b").values()) for method in ("sample", "scale")) > most["b"]


def test_the_order_of_the_setups_turns_round_with_the_weights_of_the_code():
    own, code = gain("pate", "published-a", "published-b"), gain("pate", "code-a", "code-b")
    assert own[0] - own[1] > 0 > code[0] + code[1]
    printed = [expected("pate").cells[name][0] for name in ("baseline", "weighting-a", "weighting-b")]
    assert printed[1].mean < printed[2].mean
    assert shown("pate")["the paper, weighting"] == [f"{row.mean:.2f} ± {row.sd:.2f}" for row in printed]


def test_the_weights_and_what_they_cost_are_those_of_the_results():
    for setup in "ab":
        line, own = (lines("pate", f"{kind}-{setup}")[0] for kind in ("code", "published"))
        weights = [own["weights"]["voted"], line["weights"]["voted"], line["weights"]["charged"]]
        assert shown("pate")[f"setup {setup.upper()}"] == [
            *(" / ".join(f"{w:.3f}" for w in three) for three in weights),
            " / ".join(f"{e:.2f}" for e in line["exact_at"]["voted"]),
        ]
        assert all(charged <= level for charged, level in zip(line["exact_at"]["charged"], (1, 2, 3), strict=True))
    assert lines("pate", "code-b")[0]["exact_at"]["voted"][0] == pytest.approx(2, abs=0.01)


def test_how_many_labels_the_data_dependent_cost_pays_for():
    names = ("published-baseline", "published-a", "published-b", "code-a", "code-b")
    labels = {name: round(run_means(name, "steps")) for name in names}
    exact = {name: run_means(name, "exact") for name in names}
    assert_page_says(
        "experiments/pages/pate.md",
        f"pays for {labels['published-baseline']:,} labels in the place of 100 at ε = 1, and for "
        f"{labels['published-a']:,} in setup A",
        f"cost ε = {exact['published-baseline'][0]:.1f} and " + " / ".join(f"{e:.1f}" for e in exact["published-a"]),
        f"gets more labels: {labels['code-b']:,} in place of {labels['published-b']:,}",
    )
    for name in names:
        levels = (1, 1, 1) if name == "published-baseline" else (1, 2, 3)
        assert max(spent / level for spent, level in zip(exact[name], levels, strict=True)) > 1.5


def test_the_rows_on_pate_are_those_of_the_results():
    found = [gain("pate", f"weighting-{setup}", "baseline") for setup in "ab"]
    (a, wide_a), (b, wide_b) = found
    assert max(wide_a, wide_b) < min(a, b)
    above = [gain("pate", f"sgd-{m}-{s}", f"weighting-{s}")[0] for m in ("sample", "scale") for s in "ab"]
    assert_page_says(
        "docs/paper.md",
        f"+{a:.1f} and +{b:.1f} points above PATE at ε = 1",
        f"by {min(above):.1f} to {max(above):.1f} points on the same features",
    )


def test_the_page_has_a_row_for_each_cell_that_was_run_and_for_no_other():
    table = TABLES["pate"]
    assert pate_page.page(table, {}) == ""
    text = pate_page.page(table, DONE)
    for cell in table.cells:
        assert cell.settings.kind != "pate" or (f"| {cell.title} |" in text) == bool(runs_of(cell, DONE))


# -- alternatives ----------------------------------------------------------------------------------------------------


def test_the_pulls_on_the_page_are_those_of_the_results():
    mnist, cifar10, strict = (lines("alternatives", cell)[0] for cell in ("mnist-a", "cifar10-a", "mnist-b"))
    for name in set(mnist["ratio"]) - {"uniform"}:
        row = shown("alternatives")[name.capitalize() if name in ("scale", "sample") else name]
        assert row[:2] == [f"{line['ratio'][name]:.2f}" for line in (mnist, cifar10)]
    assert_page_says(
        "experiments/pages/alternatives.md",
        f"the pull is {strict['ratio']['one group a step']:.2f}, below DP-SGD",
        f"grows to {mnist['ratio']['larger batch']:.2f} times its size",
        f"the run takes {mnist['longer']:.1f} times the steps",
        f"{mnist['ratio']['one group a step'] - 1:.2f} of the {mnist['ratio']['scale'] - 1:.2f} that Scale gains",
    )


def test_the_costs_of_copies_on_the_page_are_those_of_the_results():
    found = rows(section("experiments/pages/alternatives.md", "Copies of data points (F.2)"))
    line = lines("alternatives", "mnist-a")[0]
    for label, key in {
        "exact": "copies",
        "as the appendix argues": "as_argued",
        "one copy, n times the rate (Sample)": "by_rate",
        "one copy, n times the weight (Scale)": "by_weight",
    }.items():
        assert found[label] == [f"{line[key][str(n)]:.3f}" for n in range(1, 6)]
    assert 0.2 < max(100 * (line["copies"][str(n)] / line["by_rate"][str(n)] - 1) for n in range(1, 6)) < 0.3
    assert_page_says("experiments/pages/alternatives.md", "up to 0.3 % of ε")
    assert_page_says("docs/paper.md", f"spend {line['copies']['2']:.3f}, not {line['as_argued']['2']:.3f}")


# -- individual accounting -------------------------------------------------------------------------------------------


def test_what_the_pages_say_about_filters_follows_from_the_results():
    means = {cell.name: mean("individual_accounting", cell.name) for cell in TABLES["individual_accounting"].cells}
    for plain, filtered in (
        ("full-plain", "full-filter"), ("sampled-rdp", "sampled-renyi-182"), ("tiers-rdp", "tiers-renyi-182"),
    ):  # fmt: skip
        assert -0.25 < means[filtered] - means[plain] < 0.05  # "equal or 0.1 to 0.2 points lower"
    assert means["sampled-pld"] > max(means[f"sampled-renyi-{n}"] for n in (182, 160, 133))
    assert means["tiers-pld"] > means["tiers-renyi-182"]
    gained = means["full-assigned"] - means["full-filter"]
    assert 0 < gained < 0.1
    assert_page_says("docs/paper.md", f"0.31 for half of the records is worth {gained:+.2f} ±")
    assert all(line["part_spent"][1] < 0.5 for line in lines("individual_accounting", "full-filter").values())


def test_what_two_models_on_one_budget_gain_and_lose():
    for label, cell in TWO.items():
        both = [scores("individual_accounting", cell, run).values() for run in (0, 1)]
        assert shown("individual-accounting")[label] == [spread(model) for model in both]
    split, left = ([mean("individual_accounting", cell, run) for run in (0, 1)] for cell in TWO.values())
    words = f"the first model gains {left[0] - split[0]:.1f} points, and the second one loses {split[1] - left[1]:.1f}"
    assert_page_says("experiments/pages/individual-accounting.md", words)
