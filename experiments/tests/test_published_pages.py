"""The numbers on experiments/pages are those of the finished runs, and no run was above a budget."""

from __future__ import annotations

import re
import statistics
from typing import Any

import pytest

from experiments.comparing import expected, runs_of
from experiments.individual_accounting import page as accounting_page
from experiments.pate import page as pate_page
from experiments.settings import HERE
from pages import assert_page_says, rows, section
from runs import DONE, TABLES, gain, lines, mean, scores, spread


def shown(page: str) -> dict[str, list[str]]:
    return rows((HERE / "pages" / f"{page}.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("page", "count"), [("pate", 12), ("individual-accounting", 14)])
def test_a_row_that_names_its_runs_has_their_numbers(page, count):
    """A difference, the two models of one cell, or one mean for each cell; – has no run."""
    table, checked = page.replace("-", "_"), 0
    for label, (*numbers, runs) in shown(page).items():
        names = [name.strip("`") for name in re.findall(r"`[\w-]+`|–", runs)]
        if "−" in runs:
            assert numbers == ["{:+.2f} ± {:.2f}".format(*gain(table, *names))], label
        elif len(names) == 1:
            assert numbers == [spread(scores(table, names[0], run).values()) for run in (0, 1)], label
        elif names:
            assert numbers == ["–" if name == "–" else spread(scores(table, name).values()) for name in names], label
        checked += bool(names)
    assert checked == count


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
    assert shown("pate")["the paper, weighting"][:3] == [f"{row.mean:.2f} ± {row.sd:.2f}" for row in printed]


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
    assert_page_says("docs/results-paper.md", f"{a:+.2f} and {b:+.2f} points above PATE at ε = 1")
    words = f"gain {b:.0f} to {a:.0f} points over PATE at ε = 1 (ten draws of votes), and Sample and Scale are "
    assert_page_says("docs/results-baselines.md", f"{words}{min(above):.0f} to {max(above):.0f} points above them")


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
    table = TABLES["individual_accounting"]
    means = {cell.name: mean(table.name, cell.name) for cell in table.cells if runs_of(cell, DONE)}
    for plain, filtered in (
        ("full-plain", "full-filter"), ("sampled-rdp", "sampled-renyi-182"), ("tiers-rdp", "tiers-renyi-182"),
    ):  # fmt: skip
        assert -0.25 < means[filtered] - means[plain] < 0.05  # "equal or 0.1 to 0.2 points lower"
    assert means["sampled-pld"] > max(means[f"sampled-renyi-{n}"] for n in (182, 160, 133))
    assert means["tiers-pld"] > means["tiers-renyi-182"]
    gained = means["full-assigned"] - means["full-filter"]
    assert 0 < gained < 0.1
    assert_page_says("docs/results-paper.md", f"0.31 for half of the records is worth {gained:+.2f} points")
    assert all(line["part_spent"][1] < 0.5 for line in lines("individual_accounting", "full-filter").values())


def test_what_two_models_on_one_budget_gain_and_lose():
    cells = ("full-two-split", "full-two-left")
    split, left = ([mean("individual_accounting", cell, run) for run in (0, 1)] for cell in cells)
    words = f"the first model gains {left[0] - split[0]:.1f} points, and the second one loses {split[1] - left[1]:.1f}"
    assert_page_says("experiments/pages/individual-accounting.md", words)
