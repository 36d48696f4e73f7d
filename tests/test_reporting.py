"""The report says what the run's files say, and the version for release reveals no rare budget."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

import epsilons
from epsilons import Budgets, Plan, Recipe, plan
from epsilons.accounting import rdp
from epsilons.core import disclosure
from epsilons.core.disclosure import SMALLEST_SHOWN
from epsilons.core.mechanism import Groups, SampledGaussian
from epsilons.errors import (
    UNPRINTABLE,
    BudgetExceededError,
    EpsilonsError,
    EpsilonsWarning,
    LedgerError,
    PlanError,
    RunError,
)
from epsilons.ledger import model_file, plan_folder, signatures
from epsilons.ledger.ledger import Ledger
from epsilons.ledger.run_folder import RunFolder, versions
from epsilons.planning import risk_profile
from epsilons.reporting import annex, dumps, releasing
from epsilons.reporting import html as pages_of
from epsilons.reporting.content import make_content
from epsilons.reporting.html import drawn, labelled
from epsilons.reporting.load_run import load_run
from epsilons.reporting.population import wilson
from epsilons.reporting.statements import about_of, origins_of, period_of
from program import epsilons as program
from program import python

A_MODEL = model_file.ModelFile(model=None, inputs=model_file.ArrayInputs(), outputs=model_file.Outputs(kind="classes"))
RECIPE = Recipe(steps=60, batch_size=100, clip_norm=1.0)
TIERS = {"strict": 0.5, "standard": 1.0, "open": 2.0}


def make_run(
    path: Path,
    plan: Plan,
    *,
    steps: int | None = None,
    close: bool = True,
    randomness: str = "chacha20",
    bound: bool = True,
    metrics: dict[str, Any] | None = None,
    metadata: Any = None,
    **more: Any,
) -> Path:
    """A run's folder as training writes it, without training. Its budgets are simulated, unless metadata say otherwise:
    a release then shows the plan."""
    values: dict[str, Any] = {
        "performance": {"engine": "loop"},
        "randomness": randomness,
        "roster": "people and their budgets",
        "guarantee": plan.guarantee_of_run(randomness),
        "metadata": {"simulated": True, **(metadata or {})},
        **more,
    }
    folder = RunFolder.create(path, plan, values)
    ledger = Ledger(plan, folder.ledger, key="C0MM17MENT", settings=values if bound else None)
    left = plan.steps if steps is None else steps
    for number, phase in enumerate(plan.phases):
        for step in range(min(left, phase.steps)):
            ledger.charge(number, step)
        left -= min(left, phase.steps)
    if close:
        ledger.close()
    elif ledger._file:
        ledger._file.close()
    if metrics:
        folder.append_metrics(metrics)
    if steps is None:
        (path / "model.safetensors").write_bytes(b"weights")
    return path


@pytest.fixture(scope="module")
def three() -> Plan:
    budgets = Budgets.from_shares({0.5: 0.34, 1.0: 0.43, 2.0: 0.23}, records=1000)
    return plan(budgets, RECIPE, "scale", "rdp")


MEASURED = {
    "eval_data": {"data": "public", "records": 200, "classes": ["a<b>", "c & d"]},
    "metrics": {
        "step": 60,
        "loss": 0.5,
        "accuracy": 0.8,
        "per_class": [[70, 80], [90, 120]],
        "per_group": [[30, 40], [80, 100], [50, 60]],
    },
}
SHARES_OF_CLASSES = [[2.0, 2.0], [1.0, 3.0], [0.0, 5.0]]
CELLS = [[[10, 20], [35, 40], [15, 20]], [[20, 20], [45, 60], [35, 40]]]
PRIVATE = MEASURED | {"eval_data": MEASURED["eval_data"] | {"data": "private"}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, three) -> Path:
    """A finished run; tests only read it."""
    metadata = {"tiers": TIERS, "config": {"train": "/home/me/x.csv"}}
    return make_run(tmp_path_factory.mktemp("runs") / "run", three, metadata=metadata, **MEASURED)


@pytest.fixture
def run(tmp_path, finished) -> Path:
    """A copy of it to change or to write into."""
    return shutil.copytree(finished, tmp_path / "run")


def strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# -- what is said is what the files say ----------------------------------------------------------------------------


def test_promises_and_spends_are_the_plan_s(finished, three):
    values = epsilons.report(finished).to_dict()
    columns = {name: [row[name] for row in values["groups"]] for name in values["groups"][0]}
    assert columns["epsilon"] == [0.5, 1.0, 2.0]
    assert columns["records"] == [340, 430, 230]
    assert columns["tier"] == list(TIERS)
    np.testing.assert_array_equal(columns["epsilon_spent"], three.epsilon_spent())
    np.testing.assert_array_equal(columns["charged"], three.epsilon_spent())
    table = values["phases"][0]
    assert table["noise_std"] == three.noise_std
    np.testing.assert_array_equal([row["clip_norm"] for row in table["rows"]], three.clip_norm)
    np.testing.assert_allclose([row["influence"] for row in table["rows"]], three.influence)
    assert values["guarantee"] == three.guarantee_of_run("chacha20")
    assert values["status"] == {"state": "finished", "charged": 60, "allowed": 60, "made": 60, "key_epochs": 1}


def test_hashes_are_those_of_the_files(finished, three):
    hashes = epsilons.report(finished).to_dict()["hashes"]
    for name in ("plan.json", "ledger.jsonl", "model.safetensors"):
        assert hashes[name] == hashlib.sha256((finished / name).read_bytes()).hexdigest()
    assert hashes["plan digest"] == three.digest
    last_line = (finished / "ledger.jsonl").read_text().splitlines()[-1]
    assert hashes["last line of the ledger"] == json.loads(last_line)["hash"]


def test_a_stopped_run_says_so_and_claims_the_whole_plan(tmp_path, three):
    made = epsilons.report(make_run(tmp_path / "run", three, steps=10))
    values, html = made.to_dict(), made.to_html()
    stopped = {"state": "stopped", "charged": 60, "allowed": 60, "made": 10, "key_epochs": 1}  # one block is charged
    assert values["status"] == stopped
    assert "stopped early: at most 10 of 60" in html
    assert "The claim remains that of the whole plan" in html
    assert "without looking at the data" in html
    np.testing.assert_array_equal([row["epsilon_spent"] for row in values["groups"]], three.epsilon_spent())


def test_a_run_with_an_open_ledger_is_not_called_finished(tmp_path, three):
    made = epsilons.report(make_run(tmp_path / "run", three, close=False))
    assert made.to_dict()["status"]["state"] == "open"
    assert made.to_dict()["status"]["made"] is None
    assert "never closed" in made.to_html()


def test_what_is_charged_is_never_below_the_true_spend(tmp_path):
    long = plan(Budgets.from_shares({1.0: 0.5, 3.0: 0.5}, records=1000), Recipe(200, 100, 1.0), "scale", "rdp")
    values = epsilons.report(make_run(tmp_path / "run", long, steps=70)).to_dict()
    assert values["status"]["charged"] == 128
    truth = [long.phases[0].history(group, 128) for group in range(2)]
    for row, history in zip(values["groups"], truth, strict=True):
        true = epsilons.accounting.rdp.epsilon([history], 1e-5)
        assert true <= row["charged"] < row["epsilon_spent"]


def test_the_curve_is_above_the_truth_at_every_step_and_ends_at_the_certificate(tmp_path, three):
    first = three.phases[0]
    rates = first.sample_rate * [0, 0.5, 0.2]
    again = dataclasses.replace(first, steps=25, sample_rate=rates, expected_batch=float(three.counts @ rates))
    two = dataclasses.replace(three, phases=(dataclasses.replace(first, steps=33), again)).verify()
    curve = epsilons.report(make_run(tmp_path / "run", two)).to_dict()["curve"]
    assert curve["phase_ends"] == [33, 58]
    for group, line in enumerate(curve["lines"]):
        assert line["epsilon_spent"] == sorted(line["epsilon_spent"])
        assert line["epsilon_spent"][-1] == two.epsilon_spent()[group]
        for step in range(1, 59):
            shown = next(s for s, at in zip(line["epsilon_spent"], curve["steps"], strict=True) if at >= step)
            history = [first.history(group, min(step, 33)), again.history(group, max(0, step - 33))]
            assert epsilons.accounting.rdp.epsilon(history, 1e-5) <= shown * (1 + 1e-12)


def test_the_drawn_stairs_are_an_upper_envelope(finished):
    curve = epsilons.report(finished).content.curve
    picture = drawn(curve, None)
    moves = re.findall(r"V([\d.]+)H([\d.]+)", picture.lines[0].path)  # up first, so the later bound holds in between
    assert len(moves) == len(curve.steps) - 1
    top = max(float(tick.text) for tick in picture.y_ticks)
    assert top <= 2.0
    heights = [float(y) for y, _ in moves]
    assert heights == sorted(heights, reverse=True)


@given(st.integers(1, 3000), st.data())
def test_intervals_are_wilson_s(records, data):
    right = data.draw(st.integers(0, records))
    theirs = binomtest(right, records).proportion_ci(method="wilson")
    np.testing.assert_allclose(wilson(right, records), (theirs.low, theirs.high), atol=1e-12)


@pytest.mark.parametrize("marked", ["public", "private"])
def test_accuracy_comes_with_counts_and_the_declaration_of_its_data(tmp_path, three, marked):
    measured = MEASURED | {"eval_data": MEASURED["eval_data"] | {"data": marked}}
    made = epsilons.report(make_run(tmp_path / marked, three, **measured))
    accuracy = made.to_dict()["accuracy"]
    assert accuracy["data"] == marked
    groups = [(s["label"], s["records"], s["accuracy"]) for s in accuracy["groups"]]
    assert groups == [("0.5", 40, 0.75), ("1", 100, 0.8), ("2", 60, 50 / 60)]
    assert [s["label"] for s in accuracy["classes"]] == ["a<b>", "c & d"]
    assert (accuracy["overall"]["low"], accuracy["overall"]["high"]) == wilson(160, 200)
    assert made.to_html().count(f"on {marked.upper()} data") == 3


def test_undeclared_test_data_count_as_private(tmp_path, three):
    path = make_run(tmp_path / "run", three, metrics={"step": 60, "loss": 0.5, "accuracy": 0.8})
    internal, release = epsilons.report(path), epsilons.report(path, release=True)
    assert internal.to_dict()["accuracy"]["data"] == "private"
    assert internal.to_dict()["accuracy"]["overall"]["low"] is None  # no counts, no interval
    assert "The test data were not declared public" in internal.to_html()
    assert release.to_dict()["accuracy"] is None


def test_runs_without_the_optional_keys_are_reported(tmp_path, three):
    path = make_run(tmp_path / "run", three, bound=False)
    (path / "run.json").write_text('{"schema": 1}')
    (path / "model.safetensors").unlink()
    for release in (False, True):
        made = epsilons.report(path, release=release)
        strict_json(dumps(made))
        assert "Nothing was measured" in made.to_html()


def test_a_seed_and_simulated_tiers_are_named_at_the_top(tmp_path, three):
    path = make_run(tmp_path / "run", three, randomness="seeded", metadata={"simulated": True})
    for release in (False, True):
        top = epsilons.report(path, release=release).to_html().partition('id="promise"')[0]
        assert "no guarantee towards anyone who knows the seed" in top
        assert "SIMULATED tiers" in top
    chosen = make_run(tmp_path / "chosen", three, metadata={"simulated": False})
    other = epsilons.report(chosen).to_html().partition('id="promise"')[0]
    assert "seed" not in other
    assert "SIMULATED" not in other


def test_a_key_that_still_exists_is_mentioned(tmp_path, three, finished):
    path = make_run(tmp_path / "run", three, close=False)
    RunFolder(path).write_key(bytes(range(32)))
    made = epsilons.report(path)
    assert "secret key still exists" in made.to_html()
    assert bytes(range(32)).hex() not in made.to_html() + dumps(made)
    assert "secret key still exists" not in epsilons.report(finished).to_html()


def test_many_groups_are_merged_with_a_summary(tmp_path):
    levels = np.round(np.geomspace(0.5, 8, 200), 4)
    many = plan(Budgets(np.repeat(levels, 5)), RECIPE, "scale", "rdp")
    made = epsilons.report(make_run(tmp_path / "run", many))
    values = made.to_dict()
    assert sum(row["records"] for row in values["groups"]) == 1000
    assert 10 <= len(values["groups"]) <= 50
    assert "200 different budgets, from ε = 0.5 to 8" in made.to_html()
    assert len(values["phases"][0]["rows"]) == len(values["curve"]["lines"]) == 6


# -- for release ---------------------------------------------------------------------------------------------------


def of_levels(levels: list[float], counts: list[int], strategy: str = "scale", delta: Any = 1e-5) -> Plan:
    recipe = Recipe(steps=30, batch_size=10, clip_norm=1.0)
    return plan(Budgets(np.repeat(levels, counts), delta), recipe, strategy, "rdp")


def released(path: Path) -> str:
    made = epsilons.report(path, release=True)
    return made.to_html() + dumps(made)


@pytest.mark.parametrize("strategy", ["uniform", "scale", "sample"])
def test_no_rare_budget_is_in_a_report_for_release_in_any_digits(tmp_path, strategy):
    rare = [0.7123, 3.3771, 7.7321]
    made = of_levels([rare[0], 1.0, 2.0, *rare[1:]], [1, 600, 380, 3, 2], strategy)
    tiers = {"soloist": rare[0], "plain": 1.0, "rarity": rare[2]}
    path = make_run(tmp_path / "run", made, metadata={"tiers": tiers})
    inside, outside = dumps(epsilons.report(path)), released(path)
    for version in versions().values():
        outside = outside.replace(version, "")
    for value in rare:
        assert str(value) in inside  # the internal report does show it
        for digits in range(2, 6):  # also as the beginning of a longer number, such as a spend a little below
            assert not re.search(rf"(?<![\w.]){re.escape(f'{value:.{digits}g}')}", outside)
            assert not re.search(rf"(?<![\w.]){re.escape(f'{value:.12f}'[: digits + 1])}", outside)
    assert "soloist" in inside


NAMES = ["none", "rare", "rarer", "plain"]


@pytest.mark.parametrize(("levels", "counts"), [([0.5, 1, 2], [9, 600, 380]), ([0.7, 1, 2], [9, 600, 380])])
def test_a_merged_row_names_the_declared_tiers_and_not_which_of_them_is_held(tmp_path, levels, counts):
    tiers = {"none": 0.2, "rare": 0.5, "rarer": 0.7, "plain": 1.0, "open": 2.0, "beyond": 4.0}
    path = make_run(tmp_path / "run", of_levels(levels, counts), metadata={"tiers": tiers, "provenance": []})
    values, page = both(path)[1], pages(path)[1]
    named = [("≤ 1", ", ".join(NAMES)), ("2", "open")]
    assert [(row["label"], row["tier"]) for row in values["groups"]] == named
    assert "≤ 1 none, rare, rarer, plain" in page
    assert "merged because fewer than 20 records share a budget in them" in page
    card = releasing.card(make_content(load_run(path), release=True), A_MODEL, "record", False)
    odds = "; ".join(f"{name}: at most {risk_profile.right_of_promise(tiers[name], 1e-5)} of 100" for name in NAMES)
    assert f"| none, rare, rarer, plain | ≤ 1 | not shown | 609 | {odds} |" in card
    assert "The table under Privacy lists the budgets" in card
    assert "The first table" not in card
    assert "merged because fewer than 20 records share" in card
    assert "merged because" not in pages(make_run(tmp_path / "plain", of_levels([1, 2], [600, 380])))[1]


def test_a_merged_row_states_the_odds_of_each_of_its_tiers_or_of_its_largest_epsilon(tmp_path):
    tiers = {"strict": 1.0, "middle": 3.0, "full": 8.0}
    made = of_levels([1, 3, 8], [600, 5, 300])
    path = make_run(tmp_path / "run", made, metadata={"tiers": tiers, "provenance": []})
    strict, rare = make_content(load_run(path), release=True).groups
    assert (strict.bounds, rare.tier, rare.right_guesses) == ("", "middle, full", None)
    assert rare.bounds == "middle: at most 96 of 100; full: no limit (100 of 100)"
    assert [risk_profile.right_of_promise(tiers[name], 1e-5) for name in ("middle", "full")] == [96, 100]
    values, page = both(path)[1], pages(path)[1]
    assert [rare.bounds in one for one in values["odds"]] == [False, True, False]
    assert rare.bounds in page
    assert f"right guesses by the promise: {rare.bounds}" in annex.facts(load_run(path))["rows"][1]
    plain = make_run(tmp_path / "plain", of_levels([1, 2, 2.5], [600, 300, 5]))
    [_, row] = make_content(load_run(plain), release=True).groups
    assert row.bounds == "at most those of ε\u00a0=\u00a05: no limit (100 of 100)"
    assert risk_profile.right_of_promise(5.0, 1e-5) == 100


@settings(max_examples=200)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(0, 2**32))
def test_every_tier_that_a_merged_row_holds_is_among_its_names(counts, seed):
    generator = np.random.default_rng(seed)
    levels = np.sort(generator.choice(np.arange(50, 800), len(counts) + 4, replace=False)) / 100
    held = np.sort(generator.choice(levels, len(counts), replace=False))
    asked = Groups(held, np.full(len(counts), 1e-5), counts)
    tiers = {f"t{level}": float(level) for level in levels}
    rows = disclosure.display_rows(asked, tiers, release=True)
    exact = {row.tier for row in rows if not row.merged}
    for row in rows:
        names = set(str(row.tier).split(", "))
        assert {f"t{level}" for level in held[row.groups]} <= names
        assert not row.merged or not names & exact
        assert row.at_most is None or all(tiers[name] <= row.at_most for name in names)


@pytest.mark.parametrize(
    "strategy", ["uniform", "scale", "sample", pytest.param("scale-arithmetic", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("one", "other", "counts"),
    [
        ([0.7123, 1.0, 2.0], [0.5501, 1.0, 2.0], [1, 600, 380]),  # below all others
        ([1.0, 1.7, 2.0], [1.0, 1.3, 2.0], [600, 3, 380]),  # in between
        ([1.0, 2.0, 7.7321], [1.0, 2.0, 5.5], [600, 380, 2]),  # above
        ([1.0, 1.2, 2.0, 6.0], [1.0, 1.9, 2.0, 9.9], [600, 7, 380, 19]),
    ],
)
def test_a_report_for_release_does_not_depend_on_rare_budgets(tmp_path, strategy, one, other, counts):
    texts = []
    for name, levels in (("one", one), ("other", other)):
        path = make_run(tmp_path / name, of_levels(levels, counts, strategy), **(MEASURED | {"metrics": None}))
        texts.append(released(path))
        inside = epsilons.report(path)
        assert len(inside.to_dict()["groups"]) == len(levels)
    assert texts[0] == texts[1]


def test_it_does_not_depend_on_the_number_of_rare_budgets_or_their_deltas(tmp_path):
    texts = []
    for name, levels, counts, delta in (
        ("one", [0.7, 1.0], [10, 600], 1e-5),
        ("five", [0.6, 0.7, 0.8, 0.85, 0.9, 1.0], [2, 2, 2, 2, 2, 600], 1e-5),
        ("delta", [0.7, 1.0], [10, 600], np.repeat([1e-6, 1e-5], [10, 600])),
    ):
        texts.append(released(make_run(tmp_path / name, of_levels(levels, counts, delta=delta))))
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("two", "three"),
    [
        (([0.6, 1.0], [5, 600]), ([0.6, 0.7, 1.0], [1, 4, 600])),  # below: one person leaves the level of four others
        (([1.0, 1.3, 2.0], [600, 5, 380]), ([1.0, 1.3, 1.4, 2.0], [600, 1, 4, 380])),  # in between
        (([1.0, 2.0, 7.7], [600, 380, 5]), ([1.0, 2.0, 5.5, 7.7], [600, 380, 1, 4])),  # above
        (([1.0, 1.1], [9, 8]), ([1.0, 1.1, 1.2], [9, 7, 1])),  # all of them
    ],
    ids=["below", "between", "above", "all"],
)
def test_it_does_not_show_how_many_budgets_a_row_merges(tmp_path, two, three):
    texts = [released(make_run(tmp_path / str(len(run[0])), of_levels(*run))) for run in (two, three)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("smallest", [20, 19])
def test_many_budgets_suppress_nothing_unless_one_is_rare(tmp_path, smallest):
    levels = np.round(np.geomspace(0.5, 8, 60), 3).tolist()
    path = make_run(tmp_path / "run", of_levels(levels, [smallest] + [30] * 59))
    report = epsilons.report(path, release=True)
    values, html = report.to_dict(), report.to_html()
    is_rare = smallest < SMALLEST_SHOWN
    assert len(values["groups"]) <= disclosure.MOST_ROWS
    for row in values["groups"]:
        assert row["merged"]
        assert (row["epsilon_spent"] is None) == (row["charged"] is None) == is_rare
    for section in ("curve", "phases"):
        assert (values[section] is None) == is_rare
    assert (set(values["suppressed"]) == {"accuracy", "hashes"}) == (not is_rare)
    assert ("There are 60 different budgets" in html) == (not is_rare)
    assert ("6 of the groups are shown" in html) == (not is_rare)
    assert ("fewer than 20 records share" in html) == is_rare


def test_a_row_for_release_has_these_keys_and_no_other(tmp_path):
    path = make_run(tmp_path / "run", of_levels([0.7, 1.0, 2.0], [3, 500, 300]))
    fields = "label tier epsilon at_least at_most delta records merged epsilon_spent charged right_guesses"
    fields += " limits lifetime"
    for release in (True, False):
        for row in epsilons.report(path, release=release).to_dict()["groups"]:
            assert list(row) == fields.split()


def test_what_is_public_for_the_guarantee_is_nevertheless_not_shown(tmp_path):
    path = make_run(tmp_path / "run", of_levels([0.7, 1.0], [3, 500]))
    words = "public for the guarantee; this report nevertheless shows neither the budgets"
    assert words in epsilons.report(path, release=True).to_html()
    assert words not in epsilons.report(path).to_html()


@settings(max_examples=200)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=90), st.integers(0, 2**32))
def test_no_row_for_release_and_no_difference_has_fewer_than_20_records(counts, seed):
    generator = np.random.default_rng(seed)
    levels = np.sort(generator.choice(np.arange(50, 3000), len(counts), replace=False)) / 100
    asked = Groups(levels, np.full(len(counts), 1e-5), counts)
    shown = disclosure.display_rows(asked, None, release=True)  # all that rows look at
    assert shown[0].groups.start == 0
    assert shown[-1].groups.stop == len(counts)
    for before, after in itertools.pairwise(shown):
        assert before.groups.stop == after.groups.start
        assert before.label != after.label
    inside = [int(np.sum(counts[row.groups])) for row in shown]
    for row, held in zip(shown, inside, strict=True):
        assert held >= SMALLEST_SHOWN or (len(shown) == 1 and row.records is None)
        if row.epsilon is not None:
            assert counts[row.groups.start] >= SMALLEST_SHOWN
            assert row.groups.stop == row.groups.start + 1
        if row.at_most is not None:
            assert (levels[row.groups] <= row.at_most).all()
            on_grid = row.at_most in {float(f"{m}e{e}") for m in (1, 2, 5) for e in range(-2, 4)}
            many = {float(level) for level, count in zip(levels, counts, strict=True) if count >= SMALLEST_SHOWN}
            assert on_grid or row.at_most in many
        assert row.at_least is None or counts[row.groups.start] >= SMALLEST_SHOWN


def test_the_release_names_no_path_no_config_no_key_and_no_digest(tmp_path, three):
    path = make_run(
        tmp_path / "ward-7-smith",
        three,
        metadata={"tiers": TIERS, "config": {"train": "/home/me/patients.csv"}},
        training={"model": "clinic.models:Net", "loss": "/srv/loss.py", "optimizer": "sgd", "device": "cuda:host9"},
        **PRIVATE,
    )
    inside, outside = dumps(epsilons.report(path)), released(path)
    ledger = (path / "ledger.jsonl").read_text()
    hashes = [value for name, value in epsilons.report(path).to_dict()["hashes"].items() if "model" not in name]
    assert len(hashes) == 4
    for secret in ("ward-7-smith", "patients.csv", "clinic.models", "cuda:host9", *hashes):
        assert secret in inside
        assert secret not in outside
    for secret in (str(tmp_path), "/srv", "/home", "C0MM17MENT"):
        assert secret not in outside
    assert "C0MM17MENT" in ledger
    assert "C0MM17MENT" not in inside


def test_nothing_measured_on_private_data_is_released(tmp_path, three):
    one = released(make_run(tmp_path / "one", three, **PRIVATE))
    other = PRIVATE | {"metrics": {"step": 60, "loss": 9.0, "accuracy": 0.1, "per_class": [[1, 30], [2, 170]]}}
    assert one == released(make_run(tmp_path / "other", three, **other))
    assert "data that were not declared public" in one


def test_public_measurements_are_released_if_every_cell_has_20_records(tmp_path, three):
    made = epsilons.report(make_run(tmp_path / "large", three, **MEASURED), release=True).to_dict()["accuracy"]
    assert len(made["classes"]) == 2
    assert len(made["groups"]) == 3
    small = MEASURED["metrics"] | {"per_class": [[10, 19], [90, 181]], "per_group": [[5, 7], [80, 100], [50, 93]]}
    path = make_run(tmp_path / "small", three, **(MEASURED | {"metrics": small}))
    values = epsilons.report(path, release=True).to_dict()
    assert values["accuracy"]["classes"] == []
    assert values["accuracy"]["groups"] == []  # a single cell could be computed from the others
    assert values["accuracy"]["overall"]["records"] == 200
    assert {"accuracy_per_class", "accuracy_per_group"} <= set(values["suppressed"])
    few = MEASURED | {"eval_data": {"data": "public", "records": 19}, "metrics": {"step": 60, "accuracy": 0.5}}
    assert epsilons.report(make_run(tmp_path / "few", three, **few), release=True).to_dict()["accuracy"] is None


def test_accuracy_per_class_and_budget_is_shown_with_its_interval(tmp_path, three):
    crossed = MEASURED | {"metrics": MEASURED["metrics"] | {"per_class_group": CELLS}}
    trained = {"training": {"balance": [[1.0, 2.0]] * 3}}
    made = epsilons.report(make_run(tmp_path / "run", three, **crossed, **trained), release=True)
    values, page = made.to_dict(), " ".join(re.sub(r"<[^>]*>", " ", made.to_html()).split())
    found = values["accuracy"]["cells"]
    assert [[(round(one["accuracy"] * one["records"]), one["records"]) for one in row] for row in found] == [
        [tuple(cell) for cell in row] for row in CELLS
    ]
    assert [one["label"] for one in found[0]] == ["0.5", "1", "2"]
    assert "class 0.5 1 2 a&lt;b&gt; 50.0 % 29.9 to 70.1 %, of 20 87.5 %" in page
    assert values["balanced"]
    assert "Trained with the balanced loss" in page
    assert values["declared_shares"] == []
    untied = MEASURED | {"metrics": {name: one for name, one in MEASURED["metrics"].items() if name != "per_group"}}
    without = epsilons.report(make_run(tmp_path / "without", three, **untied, training={"balance": SHARES_OF_CLASSES}))
    people = three.counts[:, None] * np.array([[0.5, 0.5], [0.25, 0.75], [0.0, 1.0]])
    np.testing.assert_allclose(without.to_dict()["declared_shares"], (people / people.sum(0)).T)
    page = " ".join(re.sub(r"<[^>]*>", " ", without.to_html()).split())
    assert "class accuracy 0.5 1 2 a&lt;b&gt; 87.5 % 61.3 % 38.7 % 0.0 %" in page
    assert "who holds which budget" not in epsilons.report(tmp_path / "without", release=True).to_html()
    plain = epsilons.report(make_run(tmp_path / "plain", three, **MEASURED))
    assert not plain.to_dict()["balanced"]
    assert "Trained without the balanced loss" in plain.to_html()


@pytest.mark.parametrize(
    ("classes", "groups", "cells", "hidden"),
    [
        (
            [60, 140],
            [100, 60, 40],
            [[41, 0, 19], [59, 60, 21]],
            {"class_and_group"},
        ),  # a cell that is small, and one of 0
        ([60, 140], [80, 60, 40], [[20, 20, 20], [60, 40, 20]], set()),  # 20 of one class have no known budget
        ([61, 139], [80, 60, 40], [[20, 20, 20], [60, 40, 20]], {"class_and_group"}),  # 1 and 19 have none
        ([60, 121], [80, 60, 40], [[20, 20, 20], [60, 40, 20]], {"class_and_group", "group"}),  # 1 has none
        ([60, 110], [80, 60, 40], [[20, 20, 20], [50, 40, 20]], {"class_and_group"}),  # 10 have no known class
    ],
)
def test_no_cell_of_fewer_than_20_can_be_computed_from_the_totals(tmp_path, three, classes, groups, cells, hidden):
    row = {"step": 60, "loss": 0.5, "accuracy": 1.0, "per_class": [[n, n] for n in classes]}
    row |= {"per_group": [[n, n] for n in groups], "per_class_group": [[[n, n] for n in line] for line in cells]}
    data = {"data": "public", "records": sum(classes), "classes": ["a", "b"]}
    path = make_run(tmp_path / "run", three, eval_data=data, metrics=row)
    made, inside = (epsilons.report(path, release=release).to_dict() for release in (True, False))
    assert {key for key in made["suppressed"] if key.startswith("accuracy")} == {
        f"accuracy_per_{one}" for one in hidden
    }
    assert [[one["records"] for one in line] for line in inside["accuracy"]["cells"]] == cells
    assert (made["accuracy"]["cells"] == []) == ("class_and_group" in hidden)
    assert (made["accuracy"]["groups"] == []) == ("group" in hidden)


def test_public_accuracy_of_merged_groups_is_merged(tmp_path):
    made = of_levels([0.7, 1.0, 2.0], [3, 500, 300])
    cells = {"step": 30, "accuracy": 0.8, "per_group": [[1, 1], [70, 99], [80, 100]]}
    path = make_run(tmp_path / "run", made, eval_data={"data": "public", "records": 200}, metrics=cells)
    groups = epsilons.report(path, release=True).to_dict()["accuracy"]["groups"]
    assert [(s["label"], s["records"], s["accuracy"]) for s in groups] == [("≤ 1", 100, 0.71), ("2", 100, 0.8)]


def test_a_run_of_fewer_than_20_records_does_not_show_their_number(tmp_path):
    texts = [released(make_run(tmp_path / str(n), of_levels([level], [n]))) for n, level in ((17, 1.0), (19, 1.3))]
    assert "trained on fewer than 20 records" in texts[0]
    assert texts[0] == texts[1]


# -- the page ------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The tags of a page, which must be closed in order."""

    VOID = frozenset({"meta", "br", "line", "rect", "circle", "path"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag in names]


@pytest.fixture(params=["internal", "release", "merged", "stopped"])
def html(request, finished, tmp_path, three) -> str:
    if request.param == "merged":
        return epsilons.report(make_run(tmp_path / "m", of_levels([0.7, 1.0], [3, 500])), release=True).to_html()
    if request.param == "stopped":
        return epsilons.report(make_run(tmp_path / "s", three, steps=1, close=False)).to_html()
    return epsilons.report(finished, release=request.param == "release").to_html()


def test_the_page_loads_nothing_and_runs_nothing(html):
    assert "http:" not in html
    assert "https:" not in html
    assert not re.search(r"url\(|@import|@font-face|javascript:|\bon\w+=", html)
    page = Page(html)
    assert not page.all("script", "link", "img", "iframe", "object", "embed", "base", "form", "video", "audio", "use")
    assert not [a for _, a in page.tags if {"src", "href", "srcset", "xlink:href", "data", "action"} & set(a)]
    policy = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_the_page_can_be_read_by_a_screen_reader(html):
    page = Page(html)
    assert page.all("html")[0]["lang"] == "en"
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))
    names = [a["id"] for _, a in page.tags if "id" in a]
    assert len(names) == len(set(names))
    pictures = [a for a in page.all("svg") if a.get("role") == "img"]
    assert pictures
    for picture in pictures:
        assert set(str(picture["aria-labelledby"]).split()) <= set(names)
    assert len(page.all("desc")) == len(pictures)


def contrast(one: str, other: str) -> float:
    """WCAG 2.1, relative luminance and contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_text_has_enough_contrast_in_light_and_dark(finished):
    html = epsilons.report(finished).to_html()
    schemes = [
        dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in re.findall(r":root \{(.*?)\}", html, re.S)
    ]
    assert len([scheme for scheme in schemes if "ink" in scheme]) == 2
    for scheme in schemes:
        if "ink" in scheme:
            for text, ground in (("ink", "paper"), ("soft", "paper"), ("accent", "paper"), ("ink", "warn")):
                assert contrast(scheme[text], scheme[ground]) >= 4.5
            assert contrast(scheme["accent"], scheme["tint"]) >= 3


def test_names_from_a_run_s_files_are_text_never_markup(tmp_path, three):
    evil = "<script>alert(1)</script>"
    measured = MEASURED | {"eval_data": MEASURED["eval_data"] | {"classes": [evil, "b"]}}
    path = make_run(tmp_path / "run", three, metadata={"tiers": {evil: 0.5}}, training={"model": evil}, **measured)
    for release in (False, True):
        html = epsilons.report(path, release=release).to_html()
        assert evil not in html
        assert "&lt;script&gt;" in html


def test_the_internal_page_says_first_that_it_is_confidential(finished):
    body = epsilons.report(finished).to_html().partition("<body>")[2]
    assert "Internal, confidential" in body[:200]
    assert "For release" in epsilons.report(finished, release=True).to_html().partition("<body>")[2][:200]


# -- saving --------------------------------------------------------------------------------------------------------


def test_a_report_is_saved_and_saved_again(finished, tmp_path):
    made = epsilons.report(finished)
    for _ in range(2):
        assert made.save(tmp_path / "a" / "x.html").read_text(encoding="utf-8") == made.to_html()
        assert strict_json(made.save(str(tmp_path / "a" / "x.json")).read_text(encoding="utf-8")) == strict_json(
            dumps(made)
        )


@pytest.mark.parametrize("name", ["plan.json", "run.json", "precious.html"])
def test_only_a_report_is_replaced(run, name):
    (run / "precious.html").write_text("precious")
    before = (run / name).read_bytes()
    with pytest.raises(RunError, match="is not replaced"):
        epsilons.report(run).save(run / name)
    assert (run / name).read_bytes() == before


def test_a_report_that_cannot_be_written_leaves_no_file(finished, tmp_path, monkeypatch):
    made = epsilons.report(finished)
    with pytest.raises(RunError, match=r"got 'x.pdf'"):
        made.save(tmp_path / "x.pdf")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    for name in ("x.html", "x.json"):
        with pytest.raises(RunError, match="No space left"):
            made.save(tmp_path / "new" / name)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_report_s_repr_shows_no_budget(finished):
    assert repr(epsilons.report(finished)) == "Report(internal, finished)"


# -- damaged runs --------------------------------------------------------------------------------------------------


def written(name: str, text: str) -> Any:
    return lambda run: (run / name).write_text(text)


def missing(name: str) -> Any:
    return lambda run: (run / name).unlink()


def replaced(name: str, old: str, new: str) -> Any:
    return lambda run: (run / name).write_text((run / name).read_text().replace(old, new))


def edited(**values: Any) -> Any:
    """Change these keys of run.json; None removes them."""

    def damage(run: Path) -> None:
        known = json.loads((run / "run.json").read_text()) | values
        (run / "run.json").write_text(json.dumps({key: value for key, value in known.items() if value is not None}))

    return damage


def another_ledger(run: Path) -> None:
    other = make_run(run.parent / "other", of_levels([1.0, 4.0], [100, 100]))
    (other / "ledger.jsonl").replace(run / "ledger.jsonl")


#: As a later version might word it, so only the ledger can contradict it.
OTHER_WORDS = {"guarantee": "Nothing is learnt.", "versions": {"epsilons": "99"}}
DAMAGE = {
    "plan cut": (written("plan.json", '{"schema": 2, '), EpsilonsError, "plan.json"),
    "plan overspends": (replaced("plan.json", '"epsilon": 0.5', '"epsilon": 0.1'), BudgetExceededError, "would spend"),
    "plan missing": (missing("plan.json"), RunError, "plan.json missing"),
    "run missing": (missing("run.json"), RunError, "run.json missing"),
    "ledger missing": (missing("ledger.jsonl"), RunError, "ledger.jsonl missing"),
    "ledger forged": (replaced("ledger.jsonl", '"to": 60', '"to": 1'), LedgerError, "altered"),
    "ledger of another plan": (another_ledger, LedgerError, "another plan"),
    "ledger empty": (written("ledger.jsonl", ""), LedgerError, "empty"),
    "run not JSON": (written("run.json", "{"), RunError, "run.json is damaged: it is not a complete JSON object"),
    "run a list": (written("run.json", "[]"), RunError, "run.json"),
    "run newer": (written("run.json", '{"schema": 99}'), RunError, "newer epsilons"),
    "run of wrong types": (written("run.json", '{"schema": 1, "metadata": 3}'), RunError, "metadata"),
    "run edited": (edited(randomness="secure"), RunError, "contradicts itself"),
    "randomness edited": (edited(randomness="secure", guarantee=None), RunError, "the ledger: its randomness"),
    "guarantee left out": (edited(guarantee=None), RunError, "contradicts the ledger: its guarantee"),
    "guarantee exchanged": (edited(**OTHER_WORDS), RunError, "contradicts the ledger: its guarantee"),
    "roster exchanged": (edited(roster="others"), RunError, "contradicts the ledger: its roster"),
    "metrics not JSON": (written("metrics.jsonl", "{\n"), RunError, "Line 1 of"),
    "metrics NaN": (written("metrics.jsonl", '{"step": 1, "accuracy": NaN}\n'), RunError, "damaged"),
    "more right than there are": (
        written("metrics.jsonl", '{"step": 1, "per_class": [[3, 2], [1, 2]]}\n'),
        RunError,
        "more right than records",
    ),
    "too few groups": (written("metrics.jsonl", '{"step": 1, "per_group": [[1, 2]]}\n'), RunError, "got 1"),
    "too few classes": (written("metrics.jsonl", '{"step": 1, "per_class": [[1, 2]]}\n'), RunError, "got 1"),
    "cells of no class": (written("metrics.jsonl", '{"step": 1, "per_class_group": [[[1, 2]]]}\n'), RunError, "got 1"),
    "too few cells": (
        written("metrics.jsonl", '{"step": 1, "per_class": [[1, 2], [1, 2]], "per_class_group": [[[1, 2]], []]}\n'),
        RunError,
        "3 cells in each class of per_class_group, got 1",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_run_gives_one_clear_error_and_no_file(run, what):
    damage, kind, words = DAMAGE[what]
    damage(run)
    before = sorted(run.iterdir())
    with pytest.raises(kind, match=re.escape(words)) as raised:
        epsilons.report(run)
    program("report", run).is_refused(raised.value.exit_code, words)
    assert sorted(run.iterdir()) == before


@pytest.mark.parametrize("release", [True, False])
def test_a_seeded_run_cannot_be_made_to_look_unseeded_by_its_settings(tmp_path, three, release):
    run = make_run(tmp_path / "run", three, randomness="seeded")
    assert "do not know the seed" in epsilons.report(run, release=release).to_dict()["summary"][1]
    for guarantee in (None, three.guarantee_of_run("chacha20")):
        edited(randomness="chacha20", guarantee=guarantee)(run)
        with pytest.raises(RunError, match="contradicts the ledger"):
            epsilons.report(run, release=release)


def test_a_run_of_an_earlier_version_without_settings_in_its_ledger_says_so(tmp_path, three):
    words = "The source of randomness is taken from run.json"
    for release in (True, False):
        bound, unbound = (
            epsilons.report(make_run(tmp_path / f"{known}{release}", three, bound=known), release=release).to_dict()
            for known in (True, False)
        )
        assert words in unbound["summary"][1]
        assert words not in bound["summary"][1]
        assert unbound["guarantee"] == bound["guarantee"]


def test_an_incomplete_last_line_of_the_ledger_is_no_damage(run):
    before = epsilons.report(run).to_dict()
    with (run / "ledger.jsonl").open("a") as file:
        file.write('{"kind": "reserve", "epo')
    after = epsilons.report(run).to_dict()
    for name in ("status", "groups"):
        assert after[name] == before[name]
    assert after["hashes"]["last line of the ledger"] == before["hashes"]["last line of the ledger"]


def test_a_folder_of_several_runs_names_them(tmp_path, three):
    for name in ("b-1", "a-0"):
        make_run(tmp_path / "runs" / name, three)
    with pytest.raises(RunError, match=r"holds 2: a-0, b-1"):
        epsilons.report(tmp_path / "runs")


@pytest.mark.parametrize(
    ("name", "words"), [("nowhere", "does not exist"), ("file", "is a file"), ("", "holds no run")]
)
def test_a_path_that_is_no_run_is_refused(tmp_path, name, words):
    if name == "file":
        (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=words):
        epsilons.report(tmp_path / name)


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_writes_four_files_and_says_which_may_be_published(run):
    result = program("report", run)
    result.succeeded()
    names = ["report.html", "report.json", "report-release.html", "report-release.json"]
    lines = result.out.splitlines()
    assert [Path(line.split("  ")[0]).name for line in lines] == names
    assert ["CONFIDENTIAL" in line for line in lines] == [True, True, False, False]
    for name, release in zip(names, (False, False, True, True), strict=True):
        made = epsilons.report(run, release=release)
        text = (run / name).read_text(encoding="utf-8")
        assert text == (made.to_html() if name.endswith("html") else dumps(made) + "\n")
    assert program("report", run, "--quiet").out == ""  # replaces its files
    program("report", run, "-o", run / "out" / "first.html").succeeded()
    names = ["first-release.html", "first-release.json", "first.html", "first.json"]
    assert sorted(file.name for file in (run / "out").iterdir()) == names


def test_the_command_prints_the_internal_report_as_json_and_writes_nothing(run):
    before = sorted(run.iterdir())
    values = strict_json(program("report", run, "--json").out)
    assert (values["schema"], values["version"]) == (2, "internal")
    assert sorted(run.iterdir()) == before


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["-o", "x.pdf"], "ends in .html"),
        (["--json", "-o", "x.html"], "either"),
        (["-o", "{run}/plan.html"], "is not replaced"),  # its JSON would replace the plan
    ],
)
def test_the_command_refuses_wrong_outputs_and_writes_nothing(run, more, words):
    before = {file: file.read_bytes() for file in run.iterdir()}
    program("report", run, *[part.format(run=run) for part in more]).is_refused(2, words)
    assert {file: file.read_bytes() for file in run.iterdir()} == before


def test_reporting_loads_no_torch(run):
    code = (
        "import sys, epsilons\n"
        f"epsilons.report({str(run)!r}).save({str(run / 'r.html')!r})\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    python(code)


def test_every_key_of_the_json_is_documented(finished):
    page = (Path(__file__).parent.parent / "docs" / "report.md").read_text(encoding="utf-8")

    def keys(values: Any) -> set[str]:
        if isinstance(values, dict):
            return set(values).union(*map(keys, values.values()))
        return set().union(*map(keys, values)) if isinstance(values, list | tuple) else set()

    values = epsilons.report(finished).to_dict()
    free = {"made_with", "versions", "hashes", "suppressed", "config"}  # their keys are names from the run
    named = keys({key: value for key, value in values.items() if key not in free}) | free
    assert len(named) > 40
    assert [key for key in sorted(named) if f"`{key}`" not in page] == []


def doubled(history: Sequence[SampledGaussian], delta: float) -> float:
    """A custom accountant, never below the truth."""
    return 2 * rdp.epsilon(history, delta)


def test_a_run_certified_by_a_custom_accountant_is_reported_with_it(tmp_path):
    made = plan(Budgets(np.repeat([1.0, 2.0], 500), delta=1e-5), RECIPE, "scale", doubled)
    run = make_run(tmp_path / "run", made)
    with pytest.raises(PlanError, match="doubled"):
        epsilons.report(run)
    for release in (False, True):
        made = epsilons.report(run, release, accountant=doubled)
        assert "doubled" in made.to_html()
        assert [row["epsilon_spent"] for row in made.to_dict()["groups"]] == pytest.approx([1.0, 2.0], rel=1e-3)


# ==== What a report says to officers: odds, who and when, rows or persons, origins, audit, other runs, withdrawal.


MEASURED_TWO = {
    "eval_data": {"data": "private", "records": 200, "classes": ["no", "yes"]},
    "metrics": {"step": 20, "accuracy": 0.8, "per_class": [[70, 80], [90, 120]], "per_group": [[70, 80], [90, 120]]},
}
SHORT_RECIPE = Recipe(steps=20, batch_size=100, clip_norm=1.0)
EACH_ROW = "each row is one person"


@pytest.fixture(scope="module")
def two() -> Plan:
    return plan(Budgets.from_shares({0.5: 0.4, 2.0: 0.6}, records=1000), SHORT_RECIPE, "sample", "rdp")


def both(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of the internal version, and of the one for release."""
    return epsilons.report(path).to_dict(), epsilons.report(path, release=True).to_dict()


def pages(path: Path) -> tuple[str, str]:
    """The text of both pages, without tags and line breaks."""
    made = (epsilons.report(path, release=release).to_html() for release in (False, True))
    return tuple(" ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split()) for page in made)  # type: ignore[return-value]


# -- odds ----------------------------------------------------------------------------------------------------------


def test_both_versions_state_the_odds_of_the_certified_profile(tmp_path, two):
    inside, outside = both(make_run(tmp_path / "run", two, metadata={"person": EACH_ROW}))
    expected = risk_profile.right_guesses(two).tolist()
    for values in (inside, outside):
        assert [row["right_guesses"] for row in values["groups"]] == expected
        for right, sentence in zip(expected, values["odds"][:-1], strict=True):
            assert f"whether your data were used, is right at most {right} of 100 times; 50 by tossing" in sentence
    for page in pages(tmp_path / "run"):
        assert all(f"at most {right} of 100 right" in page for right in expected)


def test_odds_for_release_do_not_depend_on_what_fewer_than_20_chose(tmp_path):
    shown = []
    for few in (2.5, 3.5):
        made = plan(Budgets([1.0] * 600 + [few] * 3 + [4.0] * 380), SHORT_RECIPE, "sample", "rdp")
        path = make_run(tmp_path / str(few), made)
        inside, outside = both(path)
        assert [row["right_guesses"] for row in inside["groups"]] == risk_profile.right_guesses(made).tolist()
        shown.append([(row["label"], row["right_guesses"]) for row in outside["groups"]])
        assert "it would depend on what fewer than 20 people chose" in pages(path)[1]
    assert shown[0] == shown[1]
    assert [right for _, right in shown[0]] == [risk_profile.right_of_promise(1.0, 1e-5), None]


def test_under_declared_shares_the_guess_is_about_presence(tmp_path):
    budgets = Budgets.from_shares({1.0: 1.0}, records=1000)
    made = plan(budgets, SHORT_RECIPE, "scale", "rdp", public_shares={1.0: 1.0}, public_records=900)
    with pytest.warns(EpsilonsWarning, match="presence"):
        inside, _ = both(make_run(tmp_path / "run", made, metadata={"person": EACH_ROW}))
    assert "whether you are in the data, is right at most" in inside["odds"][0]
    assert inside["summary"][0].startswith("The data were declared as 900 records.")
    assert "on the list is not hidden" not in " ".join(inside["withdrawal"])


def test_a_seeded_run_s_odds_hold_only_towards_those_without_the_seed(tmp_path, two):
    inside, _ = both(make_run(tmp_path / "run", two, randomness="seeded"))
    assert "knows or guesses the seed" in inside["odds"][-1]


# -- persons or rows -----------------------------------------------------------------------------------------------


def test_a_run_that_states_nothing_says_at_the_top_that_rows_are_protected(tmp_path, two):
    path = make_run(tmp_path / "run", two)
    for values, page in zip(both(path), pages(path), strict=True):
        assert (values["unit"]["unit"], values["unit"]["stated"]) == ("record", "not stated")
        assert "whether your row was used" in values["odds"][0]
        top = page.partition("Promise and spend")[0]
        assert "Several rows of one person are not covered together" in top


@pytest.mark.parametrize(
    "stated",
    [
        {"person": EACH_ROW},
        {"metadata": {"person": EACH_ROW}},
        {"metadata": {"config": {"data": {"person": EACH_ROW}}}},
    ],
    ids=["make_private", "fit", "config"],
)
def test_the_statement_that_each_row_is_one_person_is_repeated_as_a_statement(tmp_path, two, stated):
    guarantee = two.guarantee_of_run("chacha20", None, stated.get("person"))
    inside, _ = both(make_run(tmp_path / "run", two, **stated, guarantee=guarantee))
    assert inside["unit"]["stated"] == "one row"
    assert "Nothing checked" in inside["unit"]["sentence"]
    assert "Rows, not people" not in pages(tmp_path / "run")[0]


@pytest.mark.parametrize("other", ["patient_id", "Each row is one visit", "", 7, ["a", "b"], None])
def test_no_other_word_counts_as_that_statement(tmp_path, two, other):
    inside, _ = both(make_run(tmp_path / "run", two, metadata={"person": other}))
    assert inside["unit"]["stated"] == "not stated"


def test_a_run_of_persons_speaks_of_persons_and_shows_no_number_of_rows(tmp_path):
    budgets = Budgets(np.repeat([0.5, 2.0], [300, 500]), 1e-5, unit="person")
    made = plan(budgets, SHORT_RECIPE, "scale", "rdp")
    guarantee = made.guarantee_of_run("chacha20", None, "patient_id")
    path = make_run(tmp_path / "run", made, person="patient_id", guarantee=guarantee)
    inside, outside = both(path)
    assert inside["unit"]["unit"] == outside["unit"]["unit"] == "person"
    assert "Each person has a privacy budget" in inside["summary"][0]
    assert "whether your data were used" in outside["odds"][0]
    assert "Several records of one person" not in " ".join(inside["not_covered"])
    assert "patient_id" in inside["guarantee"]
    assert "patient_id" not in dumps(epsilons.report(path, release=True))
    assert "300 persons" in pages(path)[1]


# -- bounds, categories, classes -----------------------------------------------------------------------------------


def entry(column: str, what: str, source: str) -> dict[str, str]:
    return {"column": column, "what": what, "source": source}


READ_OFF = [entry("wealth_2024", "bounds", "read off the data"), entry("age", "bounds", "declared")]


def test_where_something_was_read_off_the_data_the_promise_does_not_stand_alone(tmp_path, two):
    path = make_run(tmp_path / "run", two, metadata={"provenance": READ_OFF})
    inside, outside = both(path)
    for values, page in zip((inside, outside), pages(path), strict=True):
        assert "The promise was kept" not in page
        kept = next(sentence for sentence in values["summary"] if "kept its promise" in sentence)
        assert "NOT EVERYTHING IS COVERED" in kept
        assert "Read off the data, so not covered" in page.partition("Promise and spend")[0]
    assert "'wealth_2024'" in inside["summary"][1]
    assert "'age'" not in inside["summary"][1]
    assert "wealth_2024" not in dumps(epsilons.report(path, release=True))  # a column's name
    assert outside["origins"]["read_off"] == "the bounds of one column"


def test_declared_values_leave_the_promise_as_it_was(tmp_path, two):
    inside, _ = both(make_run(tmp_path / "run", two, metadata={"provenance": [entry("age", "bounds", "declared")]}))
    assert inside["summary"][1].startswith("The promise was kept: ")
    assert inside["origins"]["read_off"] is None
    assert "were declared" in inside["origins"]["sentences"][0]


def test_values_of_unknown_origin_are_named(tmp_path, two):
    given = [entry("town", "categories", "not stated")]
    inside, _ = both(make_run(tmp_path / "run", two, metadata={"provenance": given}))
    assert "It was not stated where the categories of 'town' come from" in inside["summary"][1]
    silent, _ = both(make_run(tmp_path / "silent", two))
    assert "did not record where" in silent["origins"]["sentences"][0]


@pytest.mark.parametrize(
    "odd", ["text", 3, {}, [], [None], ["x"], [3], [{"column": "a"}], [[]], [entry("a", "b", "c")]]
)
@pytest.mark.parametrize("release", [False, True])
def test_provenance_of_another_form_is_never_taken_for_a_declaration(odd, release):
    found = origins_of(odd, release)
    if odd and isinstance(odd, list):
        assert found.not_stated
    assert not any("were declared" in sentence for sentence in found.sentences)


# -- about and dates -----------------------------------------------------------------------------------------------


def test_a_run_states_when_it_began_and_ended_and_a_release_in_days(tmp_path, two):
    path = make_run(tmp_path / "run", two, ended="2030-01-02T03:04:05Z")
    (path / "run.json").write_text(
        re.sub(r'"started": "[^"]*"', '"started": "2030-01-01T23:59:58Z"', (path / "run.json").read_text())
    )
    inside, outside = both(path)
    assert inside["period"] == {"started": "2030-01-01T23:59:58Z", "ended": "2030-01-02T03:04:05Z"}
    assert outside["period"] == {"started": "2030-01-01", "ended": "2030-01-02"}
    assert "from 2030-01-01 23:59 UTC to 2030-01-02 03:04 UTC" in pages(path)[0]
    assert "03:04" not in pages(path)[1]


@pytest.mark.parametrize("time", [None, "yesterday", "2030-13-01T00:00:00Z", "2030-01-01", "2030-1-1T00:00:00Z", "<b>"])
def test_what_is_no_time_counts_as_not_recorded(time):
    assert period_of(time, time, False).started is None
    assert "not recorded" in period_of(time, None, True).in_words


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</dd></dl></main><h1>Approved</h1>",
    "{{ 7 * 7 }} {% raw %} ${7*7}",
    "\x1b[2J\x00\x07\u202egnp.exe\u2028\ufeff",
    "&lt;already&gt; &amp; 'quoted'",
    "x" * 10_000,
    "<b>" * 3_333,
    "line\n" * 2_000,
    " \n\t ",
    "\r\n\r\r\n",
    "ε_i ^{x} \\frac",
]
texts = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    st.text("<>&\"'/={}%\x00\x1b\u202e\n", max_size=60),
)


@settings(max_examples=40)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("purpose", "contact", "residual_risk", "approvers"), texts)))
def test_hostile_texts_about_a_run_are_text_and_never_markup(about_page, values):
    content, plain = about_page
    changed = pages_of.page(with_about(content, about_of(values)))
    assert tags(changed) <= tags(plain)
    assert not UNPRINTABLE.search(changed.replace("\n", ""))
    assert len(changed) < len(plain) + 3 * 2_100 * 6 * 5 + 40_000


def with_about(content: Any, about: Any) -> Any:
    from dataclasses import replace

    return replace(content, about=about)


def tags(page: str) -> set[tuple[str, tuple[str, ...]]]:
    return {(tag, tuple(attributes)) for tag, attributes in Page(page).tags}


@pytest.fixture(scope="module")
def about_page(tmp_path_factory, two) -> tuple[Any, str]:
    path = make_run(tmp_path_factory.mktemp("about") / "run", two, metadata={"about": {"purpose": "a\nb"}})
    content = epsilons.report(path).content
    return content, pages_of.page(content)


def test_texts_about_a_run_are_in_both_versions_and_whole_in_the_json(tmp_path, two):
    about = {"purpose": "Triage <of> visits\nnot billing", "responsible": "x" * 10_000, "contact": 7}
    path = make_run(tmp_path / "run", two, metadata={"about": about})
    for values, page in zip(both(path), pages(path), strict=True):
        stated = {name: text for name, text in values["about"].items() if text}
        assert stated == {"purpose": about["purpose"], "responsible": "x" * 10_000}
        assert values["about"]["contact"] is None
        assert "Triage <of> visits not billing" in page
        assert "the JSON holds the whole" in page


def test_taking_part_is_called_bounded_and_not_hidden(tmp_path, two):
    for values in both(make_run(tmp_path / "run", two)):
        first = values["not_covered"][0]
        assert "not hidden that a record is on the list" in first
        assert "Whether their data were used is not hidden either, but bounded" in first


def test_who_decided_and_approved_is_in_both_versions(tmp_path, two):
    about = {"tiers_decided_by": "The council", "tiers_decided_on": "2030-01-12", "approvers": ["Board", 7, "A. Meyer"]}
    path = make_run(tmp_path / "run", two, metadata={"about": about})
    for values, page in zip(both(path), pages(path), strict=True):
        approvers = [f"{name} (named in the config, not signed)" for name in ("Board", "A. Meyer")]
        assert values["about"]["approvers"] == approvers
        for words in (
            "tiers decided by The council",
            "tiers decided on 2030-01-12",
            f"approvers {' '.join(approvers)}",
        ):
            assert words in page


def test_a_model_card_has_what_is_stated_about_the_run_and_leaves_the_rest_to_its_authors(tmp_path, two):
    cards = []
    for name, about in (("bare", None), ("told", {"purpose": "To plan *calls*.", "recipients": "Nobody else."})):
        content = make_content(load_run(make_run(tmp_path / name, two, metadata={"about": about})), release=True)
        cards.append(releasing.card(content, A_MODEL, "record", False))
    left = "For the authors to add: people and groups it was not tested on"
    assert f"{left}, intended use, who is responsible, whom to ask, who gets it." in cards[0]
    assert f"{left}, who is responsible, whom to ask." in cards[1]
    assert "- intended use: To plan \\*calls\\*." in cards[1]
    assert "- who gets it: Nobody else." in cards[1]
    for row, one in zip(content.groups, ("0.5", "2"), strict=True):
        assert re.search(rf"\| {one} \|.* \| at most {row.right_guesses} \|", cards[1])


def test_a_release_shows_declared_tiers_and_no_sizes_where_people_chose(tmp_path, two):
    tiers = {"strict": 0.5, "open": 2.0, "nobody": 5.0}
    measured = MEASURED | {"metrics": MEASURED["metrics"] | {"step": 20, "per_group": [[30, 40], [80, 100]]}}
    path = make_run(tmp_path / "run", two, metadata={"simulated": False, "tiers": tiers, "provenance": []}, **measured)
    internal, release = both(path)
    assert [(row["tier"], row["epsilon"], row["records"]) for row in release["groups"]] == [
        ("strict", 0.5, None), ("open", 2.0, None), ("nobody", 5.0, None)
    ]  # fmt: skip
    rights = [risk_profile.right_of_promise(epsilon, 1e-5) for epsilon in tiers.values()]
    assert [row["right_guesses"] for row in release["groups"]] == rights
    assert [row["tier"] for row in internal["groups"]] == ["strict", "open"]
    counts = [f"{row['records']:,} records" for row in internal["groups"]]
    page, card = pages(path)[1], releasing.card(make_content(load_run(path), release=True), A_MODEL, "record", False)
    held = page + json.dumps(release) + card + json.dumps(annex.annexes(load_run(path)))
    for number in (*counts, f"{two.phases[0].noise_std:.4g}", *(f"{one:.6g}" for one in two.epsilon_spent())):
        assert not re.search(rf"(?<![\d.,]){re.escape(number)}", held), number
    assert "nobody" in page
    assert "| nobody | 5 |" in card
    assert release["accuracy"]["groups"] == []
    assert "show by their difference" in release["suppressed"]["accuracy_per_group"]


@pytest.mark.parametrize("column", [None, "slack"])
def test_a_release_says_that_others_may_have_another_budget_unless_the_config_excludes_it(tmp_path, two, column):
    """With a column of deltas, one person's may be another than the one that is shown."""
    tiers = {"strict": 0.5, "open": 2.0}
    budgets = {"tiers": tiers, "delta": 1e-5, "delta_column": column}
    metadata = {"simulated": False, "tiers": tiers, "config": {"budgets": budgets}}
    said = " ".join(both(make_run(tmp_path / "run", two, metadata=metadata))[1]["summary"])
    assert ("Other budgets, if any record has one, are not shown" in said) == (column is not None)


def test_a_release_of_numbers_shows_one_that_nearly_all_hold_or_none(tmp_path):
    nearly = make_run(tmp_path / "nearly", of_levels([1, 2], [960, 40]), metadata={"simulated": False})
    assert [row["epsilon"] for row in both(nearly)[1]["groups"]] == [1.0]
    mixed = make_run(tmp_path / "mixed", of_levels([1, 2], [940, 60]), metadata={"simulated": False})
    assert [(row["label"], row["epsilon"], row["right_guesses"]) for row in both(mixed)[1]["groups"]] == [
        ("all", None, None)
    ]
    assert "declared none that most of its records hold" in pages(mixed)[1]
    for name in ("nearly", "mixed"):
        assert "1,000 records" in pages(tmp_path / name)[1]


def test_an_approver_whose_name_is_in_a_signature_is_not_called_unsigned(tmp_path, two):
    names = ["A. Meyer, Anna", "A. Meyer", "A. Meyer, officer"]
    path = make_run(tmp_path / "run", two, metadata={"about": {"approvers": names}})
    signatures.new_key(tmp_path / "key.pem")
    signatures.sign(path, tmp_path / "key.pem", "A. Meyer", "officer")
    for values in both(path):
        unsigned, *signed = values["about"]["approvers"]
        assert unsigned == "A. Meyer, Anna (named in the config, not signed)"
        words = "a signature of the run has this name; it proves the key, and not the name"
        assert signed == [f"{name} ({words})" for name in names[1:]]


@pytest.mark.parametrize(
    "about", [None, "a text", 3, [], {}, {"purpose": ""}, {"purpose": ["x"]}, {"approvers": [1]}, {"other": "x"}]
)
def test_metadata_that_say_nothing_about_a_run_are_ignored(tmp_path, two, about):
    inside, _ = both(make_run(tmp_path / "run", two, metadata={"about": about}))
    assert inside["about"] is None


# -- the audit -----------------------------------------------------------------------------------------------------


def audited(path: Path, digest: str, **changes: Any) -> None:
    group = {"epsilon": 0.5, "epsilon_spent": 0.49, "canaries": 100, "one_run": 0.123456, "gaussian_estimate": 0.777}
    values = {
        "document": "epsilons audit",
        "attack": "canaries",
        "plan": digest,
        "alpha": 0.05,
        "setting": {},
        "verdict": "consistent",
        "holds": True,
        "sentences": ["The scores are consistent with the plan."],
        "groups": [group | {"violated": changes.pop("violated", False)}],
    }
    (path / "audit.json").write_text(json.dumps(values | changes))


def test_the_latest_audit_s_verdict_is_in_both_versions_and_its_numbers_in_one(tmp_path, two):
    path = make_run(tmp_path / "run", two)
    assert both(path)[0]["audited"] is None
    audited(path, two.digest)
    inside, outside = both(path)
    assert inside["audited"]["groups"][0]["at_least"] == 0.123456
    assert "0.123 " in pages(path)[0]  # rounded down: it is a lower bound
    assert (outside["audited"]["verdict"], outside["audited"]["groups"]) == ("consistent", None)
    assert "0.777" not in dumps(epsilons.report(path, release=True)) + pages(path)[1]
    assert "never that it is kept" in pages(path)[1]


@pytest.mark.parametrize("change", [{"verdict": "violated"}, {"holds": False}, {"violated": True}])
def test_an_audit_that_contradicts_the_promise_is_at_the_top_of_both_versions(tmp_path, two, change):
    path = make_run(tmp_path / "run", two)
    audited(path, two.digest, **change)
    for values, page in zip(both(path), pages(path), strict=True):
        assert values["audited"]["holds"] is False
        assert any("CONTRADICTED" in sentence for sentence in values["summary"])
        assert "An audit contradicts the promise" in page.partition("Promise and spend")[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not what an audit writes"),
        ("[]", "not what an audit writes"),
        ("[" * 10**5, "not what"),
        (None, "another plan"),
    ],
)
def test_a_damaged_audit_or_one_of_another_plan_is_an_error(tmp_path, two, text, words):
    path = make_run(tmp_path / "run", two)
    if text is None:
        audited(path, "0" * 64)
    else:
        (path / "audit.json").write_text(text)
    with pytest.raises(RunError, match=words):
        epsilons.report(path)


# -- other runs ----------------------------------------------------------------------------------------------------


def counted(path: Path, plan: Plan, roster: bytes, data: str) -> Path:
    return make_run(path, plan, counted=plan_folder.begin((roster,), data))


def test_two_runs_of_one_roster_count_two_and_a_release_shows_nothing(tmp_path, two, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(plan_folder.VARIABLE)
    first, second = (counted(tmp_path / name, two, b"roster", name) for name in ("first", "second"))
    other = counted(tmp_path / "other", two, b"another roster", "first")
    assert "no other run was known that this user began" in pages(other)[0]
    for path in (first, second):
        inside, outside = both(path)
        assert (inside["roster_runs"]["same_roster"], inside["roster_runs"]["same_data"]) == (2, 1)
        assert outside["roster_runs"] is None
        assert "one of 2 runs" in pages(path)[0]
        assert "Other runs on the same people" not in pages(path)[1]
    assert both(other)[0]["roster_runs"]["same_roster"] == 1
    released = dumps(epsilons.report(first, release=True)) + epsilons.report(first, release=True).to_html()
    noted = json.loads((first / "run.json").read_text())["counted"]
    assert not any(tag in released for tag in noted.values())


@pytest.mark.parametrize("odd", [None, "x", {}, {"reason": "counting was turned off"}, {"run": "r"}, {"run": ["x"]}])
def test_a_run_that_was_not_counted_says_so(tmp_path, two, odd, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    inside, _ = both(make_run(tmp_path / "run", two, counted=odd))
    assert inside["roster_runs"]["same_roster"] is None
    assert "were not counted" in inside["roster_runs"]["sentences"][0]


# -- test people, withdrawal, words --------------------------------------------------------------------------------


def test_a_report_says_what_holds_for_test_people_and_on_withdrawal(tmp_path, two):
    inside, outside = both(make_run(tmp_path / "run", two, **MEASURED_TWO))
    assert "200 test records" in inside["tested"][0]
    for values in (inside, outside):
        assert "kept back for the test. They were read without noise, and counted" in values["tested"][0]
        assert "a tier that they chose only sorts the scores" in values["tested"][1]
    assert "have no budget" not in pages(tmp_path / "run")[0]
    assert "200" not in " ".join(outside["tested"])
    assert "private data" in inside["tested"][1]
    assert "This version contains none of them." in outside["tested"][1]
    assert "stays covered" in inside["withdrawal"][0]
    assert inside["withdrawal"][2].startswith("A later run leaves them out if all of their rows are removed from")
    cases = (("left_out", ["no"], True), ("unlisted", "left out", True), ("left_out", [], False))
    for number, (key, value, decides) in enumerate(cases):
        metadata = {"config": {"budgets": {key: value, "column": "tier"}}}
        for values in both(make_run(tmp_path / f"run{number}", two, metadata=metadata)):
            said = values["withdrawal"][2]
            assert ("their rows may then stay, and are not drawn" in said) is decides, key
            assert ("if all of their rows are removed" in said) is not decides, key
    assert "registry" not in " ".join(inside["withdrawal"]).lower()
    silent, _ = both(make_run(tmp_path / "silent", two))
    assert silent["tested"] == ["The run had no test data."]


def test_every_special_word_of_the_page_is_explained_at_its_end(tmp_path, two):
    page = pages(make_run(tmp_path / "run", two))[0]
    _, _, words = page.rpartition(" Words ")
    for word in ("RDP", "ChaCha20", "sample_rate", "clip_norm", "noise", "influence", "Pr[M(D)∈S]", "ε", "δ", "ledger"):
        assert word in page.partition(words)[0], word
        assert f"{word} " in words, word
    before_specialists = page.partition("For specialists")[0]
    for word in ("RDP", "ChaCha20", "Pr[", "sample_rate", "noise_multiplier"):
        assert word not in before_specialists


def test_every_cell_knows_its_column_on_narrow_screens(tmp_path, two):
    page = Page(epsilons.report(make_run(tmp_path / "run", two, **MEASURED_TWO)).to_html())
    cells = [attributes for tag, attributes in page.tags if tag == "td"]
    labels = [cell.get("data-label") for cell in cells]
    assert len(labels) > 20
    assert {"δ", "records", "sample_rate", "influence", "accuracy", "95 % interval"} <= set(labels)
    assert labels.count(None) == 1  # the empty corner of one table
    assert labelled("<p>no table</p>") == "<p>no table</p>"


def test_a_model_no_better_than_the_majority_is_named(tmp_path, two):
    cells = {"step": 20, "accuracy": 4668 / 4723, "per_class": [[4668, 4668], [0, 55]], "loss": 0.1}
    measured = {"eval_data": {"data": "public", "records": 4723}, "metrics": cells, "training": {"loss": "mse"}}
    inside, outside = both(make_run(tmp_path / "run", two, **measured))
    assert inside["accuracy"]["balanced_accuracy"] == outside["accuracy"]["balanced_accuracy"] == 0.5
    for page in pages(tmp_path / "run"):
        assert "No better than naming the most frequent class, which alone is right in 98.8 % of the cases." in page
        assert "mean squared error, of the target as it enters the loss" in page
    good = MEASURED_TWO | {"metrics": MEASURED_TWO["metrics"] | {"per_class": [[70, 80], [90, 120]]}}
    make_run(tmp_path / "good", two, **good)
    assert "No better than" not in pages(tmp_path / "good")[0]
    few = measured | {"metrics": cells | {"per_class": [[4700, 4704], [0, 19]]}}
    assert both(make_run(tmp_path / "few", two, **few))[1]["accuracy"]["majority"] is None


# -- scores beside the accuracy, who was left out, and what may be published ---------------------------------------

LEFT_OUT = "34 of 1,034 records are left out, as [budgets] says."


def measured(data: str, smallest: int = 80, **scores: float) -> dict[str, Any]:
    cells = [[smallest // 2, smallest], [90, 120]]
    row = {"step": 20, "accuracy": 0.8, "per_class": cells, "auc": 0.8125, **scores}
    return {"eval_data": {"data": data, "records": smallest + 120, "classes": ["no", "yes"]}, "metrics": row}


def test_auc_and_balanced_accuracy_are_shown_internally(tmp_path, two):
    made = make_run(tmp_path / "run", two, **measured("private", 10))
    inside, outside = both(made)
    assert inside["accuracy"]["auc"] == 0.8125
    assert inside["accuracy"]["balanced_accuracy"] == pytest.approx((5 / 10 + 90 / 120) / 2)
    assert outside["accuracy"] is None
    assert "AUC: 0.812" in pages(made)[0]
    assert "AUC" not in pages(made)[1]


@pytest.mark.parametrize("smallest", [19, 20])
def test_auc_is_released_only_where_the_table_of_classes_is(tmp_path, two, smallest):
    made = make_run(tmp_path / "run", two, **measured("public", smallest))
    outside = both(made)[1]["accuracy"]
    is_shown = smallest == 20
    assert (outside["auc"], outside["balanced_accuracy"] is not None) == (0.8125 if is_shown else None, is_shown)
    assert ("AUC" in pages(made)[1]) is is_shown
    assert ("0.8125" in json.dumps(both(made)[1])) is is_shown


@pytest.mark.parametrize(("data", "records"), [("private", 200), ("public", 19), ("public", 20)])
def test_errors_of_numbers_have_names_and_units(tmp_path, two, data, records):
    row = {"step": 20, "loss": 0.04, "mean_absolute_error": 3.25, "rmse": 4.75, "r2": 0.625}
    made = make_run(tmp_path / "run", two, eval_data={"data": data, "records": records}, metrics=row)
    inside, outside = both(made)
    errors = {"mean_absolute_error": 3.25, "rmse": 4.75, "r2": 0.625}
    assert inside["accuracy"]["errors"] == errors
    is_shown = (data, records) == ("public", 20)
    assert (outside["accuracy"] or {}).get("errors") == (errors if is_shown else None)
    for page, expected in zip(pages(made), (True, is_shown), strict=True):
        assert ("root mean squared error 4.75, in the unit of the target" in page) is expected
        assert ("R² 0.625" in page) is expected
    assert "Wilson" not in pages(made)[0].split("Words")[0]


def test_r2_of_equal_targets_is_said_to_be_undefined(tmp_path, two):
    row = {"step": 20, "loss": 0.04, "mean_absolute_error": 3.25, "rmse": 4.75, "r2": None}
    made = make_run(tmp_path / "run", two, eval_data={"data": "private", "records": 50}, metrics=row)
    assert "R² not defined: all test targets are equal" in pages(made)[0]


def test_who_was_left_out_is_in_the_internal_version_only(tmp_path, two):
    made = make_run(tmp_path / "run", two, metadata={"left_out": LEFT_OUT})
    assert [values["left_out"] for values in both(made)] == [LEFT_OUT, None]
    inside, outside = pages(made)
    assert LEFT_OUT in inside
    assert "left out" not in outside
    assert both(make_run(tmp_path / "other", two, metadata={"left_out": 5}))[0]["left_out"] is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"metadata": {"provenance": []}}, "The model may be published, with the promised budgets"),
        ({}, "The model may be published only if the bounds"),
        ({"randomness": "seeded"}, "The model may not be published: the run was seeded"),
        ({"close": False}, "The model may not be published yet"),
        (
            {"metadata": {"provenance": [{"column": "age", "what": "bounds", "source": "read off the data"}]}},
            "The model may not be published as covered by the guarantee",
        ),
    ],
)
def test_the_report_says_what_may_be_published(tmp_path, two, more, words):
    made = make_run(tmp_path / "run", two, **more)
    public = "is a draft for internal use" if "close" in more else "may be published."
    versions = zip(both(made), pages(made), ("may not be published.", public), strict=True)
    for values, page, verb in versions:
        assert values["publish"][0].startswith(f"This version of the report {verb}")
        assert values["publish"][1].startswith(words)
        assert all(sentence in page for sentence in values["publish"])


def test_nothing_of_a_report_of_an_open_run_says_that_it_may_be_published(tmp_path, two):
    for name, more in {"open": {"close": False}, "closed": {}}.items():
        made, is_open = make_run(tmp_path / name, two, **more), name == "open"
        inside, outside = pages(made)
        assert ("Draft, internal" in outside, "For release" in outside) == (is_open, not is_open)
        assert ("may not be published yet. Make the report again" in outside) is is_open
        assert "Draft" not in inside
        assert ("Its version for release is a draft until the run is closed." in inside) is is_open
        printed = " ".join(program("report", made).out.split())
        assert (printed.count("may be published"), printed.count("do not publish")) == ((0, 4) if is_open else (2, 2))
        for file in made.glob("report-release.*"):
            assert stat.S_IMODE(file.stat().st_mode) & 0o077 == (0 if is_open else 0o044)
    with pytest.raises(RunError, match="not finished, so it is not released"):
        epsilons.release(tmp_path / "open")


def test_a_model_that_an_audit_contradicts_is_not_called_publishable(tmp_path, two):
    made = make_run(tmp_path / "run", two, metadata={"provenance": []})
    audited(made, two.digest, verdict="violated", holds=False)
    for values in both(made):
        assert values["publish"][1].startswith("The model may not be published as long as the contradiction")


@pytest.mark.parametrize("holds", [True, False])
def test_a_measured_epsilon_above_its_promise_is_explained_where_the_audit_holds(tmp_path, two, holds):
    made = make_run(tmp_path / "run", two)
    said = ["Epsilon computed from these measurements, with their errors: 0.503, 2."]
    audited(made, two.digest, verdict="consistent" if holds else "violated", holds=holds, sentences=said)
    assert ("a value slightly above the promise contradicts nothing by itself" in pages(made)[0]) is holds


def test_odds_of_the_run_are_told_from_those_of_the_promise(tmp_path, two):
    """The run's number and the promise's number are on the page, with which is which; the sheets have the second."""
    path = make_run(tmp_path / "run", two)
    for values, page in zip(both(path), pages(path), strict=True):
        for row, sentence in zip(values["groups"], values["odds"][:-1], strict=True):
            promised = risk_profile.right_of_promise(row["epsilon"], row["delta"])
            assert row["right_guesses"] < promised
            assert sentence.endswith(f" The promise allows {promised}.")
            assert f"at most {row['right_guesses']} of 100 right" in page
        assert "right at most, in this run, whatever they know" in page
        assert "ε at δ is one point of it. The promise ε is the upper limit" in values["odds"][-1]
    merged = make_run(tmp_path / "merged", of_levels([0.7, 1.0, 2.0], [3, 500, 300]))
    values, page = both(merged)[1], pages(merged)[1]
    assert "odds are of the promise ε, which is the upper limit" in values["odds"][-1]
    assert "right at most, by the promise, whatever they know" in page
    assert f"at most {risk_profile.right_of_promise(2.0, 1e-5)} of 100 right" in page
    assert "in this run" not in page


def test_labels_of_bars_are_whole_and_wrap_beside_their_numbers(tmp_path):
    tiers = {"a tier with a long name, in full": 0.5, "b": 2.0}
    path = make_run(tmp_path / "run", of_levels([0.5, 2.0], [600, 300]), metadata={"tiers": tiers, "provenance": []})
    for release in (False, True):
        page = pages_of.page(make_content(load_run(path), release))
        labels = re.findall(r'<p class="label" aria-hidden="true"><span>(.*?)</span>', page)
        assert (
            labels == [f"ε = {one} · {name}" for one, name in ((0.5, "a tier with a long name, in full"), (2, "b"))] * 2
        )
        assert "flex-wrap: wrap" in page.partition(".label {")[2].partition("}")[0]
        assert not re.search(r'<svg class="bar"(?:(?!</svg>).)*<text', page, re.S)


def test_bars_of_promise_and_spend_say_that_they_show_epsilon(tmp_path, two):
    section = pages(make_run(tmp_path / "run", two))[0].partition("Promise and spend")[2].partition("What a guess")[0]
    for words in ("The bars show ε and no risk", "0.5 of 0.5 spent", "ε = 0 ε = 2", "ε spent, certified", "ε promised"):
        assert words in section


# -- few test records, and who is served worst ---------------------------------------------------------------------


def of_cells(path: Path, made: Plan, cells: list[list[list[int]]], data: str = "private", **more: Any) -> Path:
    """A run with these right and test records of each class and budget."""
    table = np.array(cells)
    row = {"step": 20, "accuracy": table[..., 0].sum() / table[..., 1].sum(), "per_class_group": cells}
    row |= {"per_class": table.sum(axis=1).tolist(), "per_group": table.sum(axis=0).tolist()}
    names = [f"class {number}" for number in range(len(cells))]
    return make_run(path, made, eval_data={"data": data, "classes": names}, metrics=row, **more)


def test_fewer_than_20_test_records_are_marked_and_never_called_served_worst(tmp_path, two):
    overlap = of_cells(tmp_path / "overlap", two, [[[0, 3], [50, 60]], [[17, 19], [12, 20]]])
    assert wilson(12, 20)[1] > 79 / 102  # an interval that reaches beyond the accuracy of all says nothing
    said = pages(overlap)[0]
    assert "Served worst, of those with 20 test records or more: not distinguishable." in said
    assert "budget 2, 60.0" not in said
    path = of_cells(tmp_path / "run", two, [[[0, 3], [50, 60]], [[17, 19], [4, 20]]])
    page, html = pages(path)[0], epsilons.report(path).to_html()
    low, high = wilson(4, 20)
    assert f"class class 1, budget 2, 20.0 % right ({100 * low:.1f} to {100 * high:.1f} %), of 20. All: 69.6 %." in page
    assert "fewer than 20 test records, too few to tell" in page
    assert html.count('<td class="few"') == 2  # cells
    assert html.count('<tr class="few"') == 0
    few = epsilons.report(of_cells(tmp_path / "few", two, [[[2, 9], [50, 60]], [[2, 10], [15, 30]]])).to_html()
    assert few.count('<tr class="few"') == 1  # 19 of the stricter budget
    assert re.search('<tr class="few">.*<td data-label="accuracy">', few)
    assert few.count("too few to tell") == 2
    rest = of_cells(tmp_path / "rest", two, [[[47, 50], [47, 50]], [[20, 27], [20, 27]]])
    assert wilson(40, 54)[1] > wilson(134, 154)[0]  # it overlaps that of all, which contains it
    assert "test records or more: class class 1, 74.1 % right" in pages(rest)[0]
    same = of_cells(tmp_path / "same", two, [[[30, 60], [30, 60]], [[30, 60], [30, 60]]])
    assert not {"Served worst", "too few"} & {words for words in ("Served worst", "too few") if words in pages(same)[0]}


def test_a_release_names_the_worst_served_of_what_it_shows(tmp_path, two):
    cells = [[[30, 60], [50, 60]], [[12, 20], [55, 60]]]
    shown, hidden = (
        pages(of_cells(tmp_path / name, two, one, "public"))[1]
        for name, one in (("shown", cells), ("hidden", [[[0, 19], [50, 60]], cells[1]]))
    )
    assert "class class 0, budget 0.5, 50.0 % right" in shown
    assert "budget 0.5, 0.0 %" not in hidden
    assert "Served worst, of those with 20 test records or more: budget 0.5," in hidden


# -- no marks of Markdown on a page --------------------------------------------------------------------------------


def test_no_page_of_a_run_shows_a_backtick(tmp_path, two):
    """Of runs that are open, stopped, seeded or merged, whose sentences differ."""
    runs = {
        "plain": (two, MEASURED_TWO | {"metadata": {"provenance": []}}),
        "open": (two, {"close": False}),
        "seeded": (two, {"randomness": "seeded", "metadata": {"provenance": READ_OFF}}),
        "merged": (of_levels([0.7, 1.0, 2.0], [3, 500, 300]), {"metadata": {"provenance": []}}),
    }
    for name, (made, more) in runs.items():
        path = make_run(tmp_path / name, made, **more)
        found = annex.annexes(load_run(path))
        texts = [*pages(path), *(text for file, text in found.items() if file.endswith("html"))]
        assert len(texts) == 6
        assert [text for text in texts if "`" in text] == [], name
        assert "`" not in json.dumps([*both(path), {file: one for file, one in found.items() if "json" in file}])


def test_a_page_about_persons_speaks_of_no_record(tmp_path):
    of_persons = plan(Budgets([0.5] * 400 + [2.0] * 600, unit="person"), SHORT_RECIPE, "sample", "rdp")
    made = make_run(tmp_path / "run", of_persons, **MEASURED_TWO)
    audited(made, of_persons.digest)
    for page in pages(made):
        assert "sample_rate: a person’s chance of being drawn" in page
        assert "how far one person of the group" in page
    assert "Rows of one person are alike" in pages(made)[0]
    assert "synthetic persons certified" in pages(made)[0]
