"""The runs of the table pate: acceptance of exact costs, and the numbers of pate.md and docs/paper.md."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

pytest.importorskip("torch")

from experiments.comparing import expected, runs_of
from experiments.individual_accounting.page import interval
from experiments.pate import page
from experiments.results import finished
from experiments.settings import PateSettings, tables
from pages import ROOT, assert_page_says, rows

DONE, TABLE = finished(), tables()["pate"]
EXACT = tuple(
    cell.name
    for cell in TABLE.cells
    if isinstance(cell.settings, PateSettings) and cell.settings.kind == "pate" and cell.settings.noise_std is None
)


def lines(cell: str) -> dict[int, Any]:
    return runs_of(TABLE.by_name[cell], DONE)


def students(cell: str) -> dict[int, float]:
    return {seed: 100 * line["accuracy"] for seed, line in lines(cell).items()}


def spread(cell: str) -> str:
    found = list(students(cell).values())
    return f"{statistics.fmean(found):.2f} ± {statistics.stdev(found):.2f}"


def gain(cell: str, other: str) -> tuple[float, float]:
    """Mean difference over common seeds, and half the width of its 95 % interval."""
    ours, theirs = students(cell), students(other)
    return interval([ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))])


def mean(cell: str, key: str, group: int | None = None) -> float:
    found = [line[key] if group is None else line[key][group] for line in lines(cell).values()]
    return statistics.fmean(found)


def test_with_exact_costs_weighting_gains_four_points_and_setup_a_is_not_below_b():
    for cell in ("baseline", "weighting-a", "weighting-b"):
        assert len(students(cell)) == 10
    assert [TABLE.by_name[name].settings.steps for name in ("baseline", "weighting-a", "weighting-b")] == [
        100,
        400,
        200,
    ]
    assert gain("weighting-a", "baseline")[0] >= 4
    assert gain("weighting-b", "baseline")[0] >= 4
    difference, half = gain("weighting-a", "weighting-b")
    assert difference + half >= 0


def test_idp_sgd_on_the_same_features_is_above_pate():
    for setup in "ab":
        for method in ("sample", "scale"):
            assert min(students(f"sgd-{method}-{setup}").values()) > max(students(f"weighting-{setup}").values())
    assert min(students("sgd-dpsgd").values()) > max(students("weighting-a").values())


def test_no_group_of_any_exact_run_spent_more_than_its_budget():
    found = [line["largest_part"] for name in EXACT for line in lines(name).values()]
    assert len(found) > 60
    assert 0.999 < max(found) <= 1


def test_the_order_of_the_setups_turns_round_with_the_weights_of_the_code():
    own, code = gain("published-a", "published-b"), gain("code-a", "code-b")
    assert own[0] - own[1] > 0 > code[0] + code[1]
    assert expected("pate").cells["weighting-a"][0].mean < expected("pate").cells["weighting-b"][0].mean  # the paper's


def test_the_accuracies_on_the_page_are_those_of_the_results():
    shown = rows((ROOT / "experiments" / "pages" / "pate.md").read_text(encoding="utf-8"), cells=4)
    for label, names in {
        "weighting, exact costs, 100 / 400 / 200 votes": ("baseline", "weighting-a", "weighting-b"),
        "as published, weights by budget (no promise)": ("published-baseline", "published-a", "published-b"),
        "as published, weights of the code (no promise)": (None, "code-a", "code-b"),
        "Scale, same features and private records": ("sgd-dpsgd", "sgd-scale-a", "sgd-scale-b"),
        "Sample, same features and private records": (None, "sgd-sample-a", "sgd-sample-b"),
    }.items():
        assert shown[label] == ["–" if name is None else spread(name) for name in names]
    printed = expected("pate").cells
    theirs = [printed[name][0] for name in ("baseline", "weighting-a", "weighting-b")]
    assert shown["the paper, weighting"] == [f"{row.mean:.2f} ± {row.sd:.2f}" for row in theirs]


def test_the_differences_on_the_page_are_those_of_the_results():
    shown = rows((ROOT / "experiments" / "pages" / "pate.md").read_text(encoding="utf-8"), cells=2)
    for label, (cell, other) in {
        "weighting, setup A, above ε = 1 for all": ("weighting-a", "baseline"),
        "weighting, setup B, above ε = 1 for all": ("weighting-b", "baseline"),
        "weighting, setup A above B": ("weighting-a", "weighting-b"),
        "as published, setup A above B, weights by budget": ("published-a", "published-b"),
        "as published, setup A above B, weights of the code": ("code-a", "code-b"),
        "upsampling, setup A, 100 votes, above ε = 1 for all": ("upsampling-a", "baseline"),
        "vanishing, setup A, 100 votes, above ε = 1 for all": ("vanishing-a", "baseline"),
    }.items():
        found, half = gain(cell, other)
        assert shown[label] == [f"{found:+.2f} ± {half:.2f}"], label


def test_the_weights_and_what_they_cost_are_those_of_the_results():
    shown = rows((ROOT / "experiments" / "pages" / "pate.md").read_text(encoding="utf-8"), cells=5)
    for setup in "ab":
        line, own = (lines(f"{kind}-{setup}")[0] for kind in ("code", "published"))
        weights = [own["weights"]["voted"], line["weights"]["voted"], line["weights"]["charged"]]
        assert shown[f"setup {setup.upper()}"] == [
            *(" / ".join(f"{w:.3f}" for w in three) for three in weights),
            " / ".join(f"{e:.2f}" for e in line["exact_at"]["voted"]),
        ]
        assert all(charged <= level for charged, level in zip(line["exact_at"]["charged"], (1, 2, 3), strict=True))
    assert lines("code-b")[0]["exact_at"]["voted"][0] == pytest.approx(2, abs=0.01)


def test_how_many_labels_the_data_dependent_cost_pays_for():
    labels = {
        name: round(mean(name, "steps")) for name in ("published-baseline", "published-a", "published-b", "code-b")
    }
    assert_page_says(
        "experiments/pages/pate.md",
        f"pays for {labels['published-baseline']:,} labels in the place of 100 at ε = 1, and for "
        f"{labels['published-a']:,} in setup A",
        f"cost ε = {mean('published-baseline', 'exact', 0):.1f} and "
        + " / ".join(f"{mean('published-a', 'exact', group):.1f}" for group in range(3)),
        f"gets more labels: {labels['code-b']:,} in place of {labels['published-b']:,}",
    )
    for name in ("published-baseline", "published-a", "published-b", "code-a", "code-b"):
        levels = (1, 1, 1) if name == "published-baseline" else (1, 2, 3)
        assert max(mean(name, "exact", group) / levels[group] for group in range(3)) > 1.5


def test_the_rows_on_pate_are_those_of_the_results():
    (a, wide_a), (b, wide_b) = gain("weighting-a", "baseline"), gain("weighting-b", "baseline")
    assert_page_says("docs/paper.md", f"+{a:.1f} and +{b:.1f} points above PATE at ε = 1")
    assert max(wide_a, wide_b) < min(a, b)
    least = min(gain(f"sgd-{m}-{s}", f"weighting-{s}")[0] for m in ("sample", "scale") for s in "ab")
    most = max(gain(f"sgd-{m}-{s}", f"weighting-{s}")[0] for m in ("sample", "scale") for s in "ab")
    assert_page_says("docs/paper.md", f"by {least:.1f} to {most:.1f} points on the same features")


def test_every_comparison_of_the_page_is_between_cells_of_the_table():
    assert {name for pair in page.PAIRS for name in pair[:2]} <= set(TABLE.by_name)


def test_the_page_has_a_row_for_each_cell_that_was_run_and_for_no_other():
    assert page.page(TABLE, {}) == ""
    text = page.page(TABLE, DONE)
    for cell in TABLE.cells:
        if cell.settings.kind == "pate":
            assert (f"| {cell.title} |" in text) == bool(lines(cell.name))
    assert not math.isinf(gain("weighting-a", "weighting-b")[1])
