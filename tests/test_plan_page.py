"""The page of a plan: offline, the numbers of the plan, and the rule of 20."""

from __future__ import annotations

import json
import re
import stat
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epsilons import Budgets, Plan, Recipe, plan
from epsilons.errors import EpsilonsWarning, PlanError
from epsilons.ledger import run_json
from epsilons.planning import advise, risk_profile
from epsilons.reporting.html import compare_page, plan_page
from epsilons.reporting.plan_page import MOST_ROWS, About, PlanPage, make_page, side_by_side
from program import CONFIG, change, epsilons, people, python

RECIPE = Recipe(steps=40, batch_size=100, clip_norm=1.0)
FLAGS = ("--shares", "1:50%,4:50%", "--records", 1000, "--batch-size", 100, "--steps", 40, "--accountant", "rdp")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def three(strategy: str = "scale") -> Plan:
    return plan(Budgets.from_shares({1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, records=1000), RECIPE, strategy, "rdp")


def shown(made: Plan, about: About | None = None) -> str:
    return plan_page(make_page(made, about or About()))


def text(page: str) -> str:
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.S)).split())


def cells(content: PlanPage, title: str) -> dict[str, tuple[str, ...]]:
    (table,) = (one for one in content.comparisons if one.title == title)
    return dict(table.rows)


def test_the_page_loads_nothing_and_runs_nothing():
    page = shown(three())
    assert "default-src 'none'" in page
    for forbidden in ("http:", "https:", "//", "<script", "@import", "url(", "src=", "<link", "javascript"):
        assert forbidden not in page.replace("<!DOCTYPE html>", ""), forbidden
    for needed in ("prefers-color-scheme: dark", "@media print", 'name="viewport"'):
        assert needed in page


def test_no_column_is_hidden_or_scrolled_away_on_a_small_screen():
    page = shown(three())
    body = page[page.index("<body>") :]
    assert 'class="scroll' not in body
    assert "picture" not in body  # the class that is hidden on small screens
    own = page[page.index(".narrow {") : page.index("</style>")]
    assert "display: none" not in own
    assert ".narrow thead { display: table-header-group" in own  # the style sheet stacks other tables


def test_the_page_shows_the_odds_and_certified_spends_of_each_tier():
    made = three("sample")
    content = make_page(made, About())
    rights = risk_profile.right_guesses(made)
    assert [tier.right for tier in content.tiers] == rights.tolist()
    assert [tier.count for tier in content.tiers] == made.counts.tolist()
    page = text(shown(made))
    for right in rights:
        assert risk_profile.sentence(int(right), shares_declared=False) in page
    assert "Every record has a limit" in page
    assert "never shown on their own" in page


def test_strategies_are_compared_by_their_own_plans():
    made = three()
    content = make_page(made, About())
    assert content.strategies == ("scale", "uniform", "exclude below 2", "mix", "sample")
    budgets = Budgets.from_shares({1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, records=1000)
    for column, strategy in ((0, "scale"), (1, "uniform"), (4, "sample")):
        other = plan(budgets, RECIPE, strategy, "rdp")
        influence = [float(row[column]) for row in cells(content, "Influence").values()]
        assert np.allclose(influence, other.influence, rtol=5e-3)
        guesses = [int(row[column]) for row in cells(content, "Right guesses of 100").values()]
        assert guesses == risk_profile.right_guesses(other).tolist()
    assert [row[2] for row in cells(content, "ε spent").values()] == ["0", "2", "2"]


def test_signals_are_those_of_the_advice():
    content = make_page(three("sample"), About())
    advice = advise(Budgets.from_shares({1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, records=1000), RECIPE, "rdp")
    signals = {way.name: way.signal for way in advice.ways}
    assert {bar.name for bar in content.bars} <= set(signals)
    for bar in content.bars:
        assert bar.signal == pytest.approx(signals[bar.name])
    assert advice.verdict in text(shown(three()))


def test_a_plan_with_few_people_shows_only_what_follows_from_the_shown_promises():
    def page_of(rare: float) -> str:
        budgets = Budgets([1.0] * 500 + [2.0] * 300 + [rare] * 5)
        return shown(plan(budgets, RECIPE, "scale", "rdp"))

    page = page_of(7.123)
    assert page == page_of(6.5)
    assert "7.123" not in page
    assert "digest" not in page
    assert "Where accuracy is lost" not in page
    assert "Fewer than 20 records hold some of these budgets" in text(page)
    assert f"at most {risk_profile.right_of_promise(10.0, 1e-5)} of 100" in text(page)


def test_merged_rows_state_the_odds_of_each_declared_tier_and_never_those_of_their_upper_end():
    tiers = {"strict": 1.0, "middle": 3.0, "full": 8.0}
    made = plan(Budgets([1.0] * 500 + [3.0] * 300 + [8.0] * 5), RECIPE, "scale", "rdp")
    words = text(shown(made, About(tiers=tiers)))
    assert "by the promise of each tier: middle: at most 96 of 100; full: no limit (100 of 100)." in words
    assert "may be passed around within the house" in words


def test_the_plan_s_page_calls_approvers_named_and_nothing_more():
    about = run_json.About(purpose="To plan calls.", approvers=["The board"])
    assert "The board (named in the config; signatures are not read here)" in text(shown(three(), About(stated=about)))


def test_many_budgets_are_merged_into_a_few_rows():
    epsilons_ = np.tile(0.5 + 0.25 * np.arange(14), 50)
    content = make_page(plan(Budgets(epsilons_), RECIPE, "scale", "rdp"), About())
    assert len(content.tiers) <= MOST_ROWS
    assert sum(tier.count or 0 for tier in content.tiers) == 700
    made = plan(Budgets(epsilons_), RECIPE, "scale", "rdp")
    assert max(tier.right or 0 for tier in content.tiers) == risk_profile.right_guesses(made).max()


def test_persons_and_declared_shares_are_named():
    budgets = Budgets([1.0] * 300 + [2.0] * 300, unit="person")
    page = text(shown(plan(budgets, RECIPE, "scale", "rdp")))
    assert "600 persons" in page
    assert "whether your data were used" in page
    assert "Several rows of one person" not in page
    declared = plan(budgets, RECIPE, accountant="rdp", public_shares={1.0: 0.5, 2.0: 0.5}, public_records=600)
    page = text(shown(declared))
    assert "whether you are in the data" in page
    assert "follows from the declared shares alone" in page


def test_several_phases_and_runs_and_own_strategies_have_a_page():
    budgets = Budgets.from_shares({1.0: 0.5, 2.0: 0.5}, records=1000)
    assert "phase" in text(shown(plan(budgets, RECIPE, "sequential", "rdp")))
    assert "3 runs would follow" in text(shown(plan(budgets, RECIPE, "scale", "rdp", runs=3)))
    assert "mix (weight = 0.2)" in text(shown(plan(budgets, RECIPE, "mix", "rdp", weight=0.2)))


def test_names_from_data_are_escaped():
    page = shown(three(), About(name="<b>x</b>\x1b[31m", tiers={"<script>alert(1)</script>": 1.0}))
    assert "<script" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;" in page


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_for_its_owner_alone():
    epsilons("plan", *FLAGS, "--html", "plan.html").succeeded("The page is plan.html", "confidential")
    assert stat.S_IMODE(Path("plan.html").stat().st_mode) == 0o600
    assert "SIMULATED tiers" in Path("plan.html").read_text()
    epsilons("plan", *FLAGS, "--html", "plan.html").succeeded()  # it replaces its own page


def test_the_command_replaces_no_other_file():
    Path("notes.html").write_text("<p>mine</p>")
    epsilons("plan", *FLAGS, "--html", "notes.html").is_refused(2, "not replaced")
    epsilons("plan", *FLAGS, "--html", "plan.txt").is_refused(2, ".html")
    assert Path("notes.html").read_text() == "<p>mine</p>"


#: Of the approvers of a config, on the page of its plan.
NAMED = "decided on 2030-01-12 approvers " + " ".join(
    f"{name} (named in the config; signatures are not read here)" for name in ("Board", "A. Meyer")
)


def test_the_page_of_a_config_names_its_tiers_and_purpose_without_torch(tmp_path):
    Path("people.csv").write_text(people(400))
    Path("people.toml").write_text(CONFIG)
    about = 'purpose = "to test"\ntiers_decided_on = 2030-01-12\napprovers = ["Board", "A. Meyer"]'
    change("[budgets]", f"[about]\n{about}\n[budgets]\n" + 'tiers = { "1" = 1, "4" = 4 }')
    change("steps = 4", "steps = 4\nseeds = [1]")
    code = "import sys; from epsilons.cli import app; "
    code += "app(['plan', 'people.toml', '-q', '--html', 'plan.html'], standalone_mode=False); "
    python(code + "assert 'torch' not in sys.modules", tmp_path)
    page = text(Path("plan.html").read_text())
    for words in ("Privacy plan people", "to test", "mlp", "Seeded.", NAMED):
        assert words in page


def test_the_bar_of_odds_begins_at_none_of_100_as_in_a_report():
    """A bar that began at 50 would show 57 of 100 as a seventh of certainty."""
    page = shown(three())
    widths = re.findall(r'<rect class="spent" fill="#0b6170" x="50%" y="2" width="(\d+)%"', page)
    assert [50 + int(width) for width in widths] == risk_profile.right_guesses(three()).tolist()


def test_the_page_says_what_happens_if_a_person_withdraws():
    first = (
        "Before training begins: let the list of budgets leave them out, or remove all of their rows from the data, and"
    )
    assert f"{first} plan again." in text(shown(three()))


def test_a_page_of_persons_names_no_record():
    budgets = Budgets.from_shares({1.0: 0.31, 3.0: 0.49, 8.0: 0.2}, records=720, unit="person")
    words = text(shown(plan(budgets, RECIPE, "scale", "rdp")))
    assert "Persons with a budget below the threshold" in words
    assert not re.search(r"\b[Rr]ecords? with", words)


# -- plans side by side ----------------------------------------------------------------------------------------------


def of(shares: dict[float, float], strategy: str = "scale", steps: int = 40, **more: Any) -> Plan:
    return plan(Budgets.from_shares(shares, records=1000, **more), Recipe(steps, 100, 1.0), strategy, "rdp")


THREE = {
    "careful": of({0.5: 0.4, 2.0: 0.6}),
    "bold": of({1.0: 0.4, 2.0: 0.6}, "sample", steps=80),
    "mixed": of({0.5: 0.4, 2.0: 0.6}, "mix"),
}


@pytest.fixture
def saved():
    for name, made in THREE.items():
        made.save(f"{name}.json")


def test_every_cell_is_that_of_the_page_of_its_plan():
    content = side_by_side(THREE)
    tables = {table.title: dict(table.rows) for table in content.tables}
    for column, made in enumerate(THREE.values()):
        page = make_page(made, About())
        rights = risk_profile.right_guesses(made)
        for tier, right, count in zip(page.tiers, rights, made.counts, strict=True):
            assert tables["Right guesses of 100 under the plan"][tier.label][column] == str(right)
            promise = str(risk_profile.right_of_promise(tier.most, 1e-5))
            assert tables["Right guesses of 100 by the promise"][tier.label][column] == promise
            assert tables["How many"][tier.label][column] == str(count)
            for title in ("Influence", "Noise", "ε spent"):
                assert tables[title][tier.label][column] == cells(page, title)[tier.label][0]
    assert list(tables["Noise"]) == ["0.5", "1", "2"]
    assert tables["Noise"]["1"][0] == "–"
    facts = dict(content.facts.rows)
    assert facts["strategy"] == ("scale", "sample", "mix")
    assert facts["steps"] == ("40", "80", "40")
    assert facts["accountant"] == ("RDP",) * 3


def test_the_page_shows_what_the_terminal_shows_and_loads_nothing(saved):
    done = epsilons("compare", *(f"{name}.json" for name in THREE), "--html", "compare.html")
    done.succeeded("careful: Individual budgets", "Right guesses of 100")
    page = Path("compare.html").read_text()
    assert stat.S_IMODE(Path("compare.html").stat().st_mode) == 0o600
    for table in (content := side_by_side(THREE)).tables:
        for label, row in table.rows:
            shown = " ".join(" ".join((label, *row)).split())
            assert shown in text(page)
            assert shown in " ".join(done.out.split())
    assert all(one.verdict in text(page) for one in content.pages if one.verdict)
    for forbidden in ("http:", "https:", "<script", "@import", "url(", "src=", "<link"):
        assert forbidden not in page
    Path("mine.html").write_text("mine")
    epsilons("compare", "careful.json", "bold.json", "--html", "mine.html").is_refused(2, "not replaced")


def test_the_json_has_the_numbers_of_each_plan(saved):
    values = json.loads(epsilons("compare", "careful.json", "bold.json", "--json").out)
    assert values["document"] == "epsilons comparison"
    for (name, made), shown in zip(THREE.items(), values["plans"], strict=False):
        assert shown["name"] == name
        assert shown["verdict"].startswith("Individual budgets")
        assert [group["epsilon_spent"] for group in shown["groups"]] == made.epsilon_spent().tolist()
        assert [group["noise_multiplier"] for group in shown["groups"]] == made.noise_multiplier.tolist()
        assert [group["influence"] for group in shown["groups"]] == made.influence.tolist()
        assert [g["right_guesses"] for g in shown["groups"]] == risk_profile.right_guesses(made).tolist()


def test_a_plan_with_few_people_is_shown_by_its_promises_alone(saved):
    def page_of(rare: float) -> str:
        few = plan(Budgets([0.5] * 500 + [2.0] * 495 + [rare] * 5), RECIPE, "scale", "rdp")
        content = side_by_side({"few": few, "careful": THREE["careful"]})
        influence = next(dict(table.rows) for table in content.tables if table.title == "Influence")
        assert {row[0] for row in influence.values()} == {"–"}
        return compare_page(content)

    assert page_of(7.123) == page_of(6.5)
    words = text(page_of(6.5))
    assert "few: rare budgets." in words
    for said in (
        "Rare tiers are hidden",
        "epsilons compare --json hold the numbers",
        "The smallest tier that is shown is",
    ):
        assert said in words
    plan(Budgets([0.5] * 500 + [7.123] * 5), RECIPE, "scale", "rdp").save("few.json")
    done = epsilons("compare", "careful.json", "few.json")
    done.succeeded("few: Suppressed: fewer than 20")
    assert "7.1" not in done.out


NAMES = {"strict": 0.5, "open": 2.0}


def test_tiers_are_rows_by_name_also_where_their_epsilons_differ():
    bold = of({1.0: 0.4, 2.0: 0.6}, "sample", steps=80)
    content = side_by_side(
        {"careful": THREE["careful"], "bold": bold}, {"careful": NAMES, "bold": NAMES | {"strict": 1.0}}
    )
    for table in content.tables:
        assert [label for label, _ in table.rows] == ["strict", "open"], table.title
        assert "–" not in [cell for _, cells in table.rows for cell in cells], table.title
    tables = {table.title: dict(table.rows) for table in content.tables}
    assert tables["Promised ε"] == {"strict": ("0.5", "1"), "open": ("2", "2")}
    assert tables["Influence"]["strict"][1] == cells(make_page(bold, About()), "Influence")["1"][0]
    assert [row[0] for row in side_by_side({"a": bold, "b": THREE["careful"]}, {"b": NAMES}).tables[0].rows] == [
        *("strict", "1", "open"),  # a plan without names takes those of the other, where it promises the same
    ]


def test_delta_is_among_the_facts_with_what_a_large_one_means_and_is_none_s_own_choice():
    def fact(deltas: list[float]) -> str:
        made = plan(Budgets([1.0] * 400, deltas), Recipe(20, 50, 1.0), "uniform", "rdp")
        return make_page(made, About(name="plan")).facts["δ"]

    assert fact([1e-4] * 400) == "0.0001"
    assert fact([1e-4] * 399 + [1e-5]) == "0.0001"
    assert fact([1e-4] * 200 + [1e-5] * 200) == "not the same for all budgets, so it is not shown"
    with pytest.warns(EpsilonsWarning, match="delta is not below"):
        assert fact([0.01] * 400) == "0.01: too large, not below 1/records = 0.0025"


def test_the_verdict_names_the_plan_that_protects_each_tier_best_and_what_the_smallest_tier_pays():
    """The oracle: noise, odds and signals of each plan, read off the plans."""
    careful, bold = of({0.5: 0.4, 2.0: 0.6}), of({1.0: 0.4, 2.0: 0.6}, steps=80)
    verdict = side_by_side(
        {"careful": careful, "bold": bold}, {"careful": NAMES, "bold": NAMES | {"strict": 1.0}}
    ).verdict
    assert (careful.noise_multiplier > bold.noise_multiplier).tolist() == [True, False]
    assert "Right guesses of 100, in whole numbers, are fewest: under careful for strict and open." in verdict
    rights = [int(risk_profile.right_guesses(plan)[0]) for plan in (careful, bold)]
    assert rights[0] < rights[1]
    shown = f"(right guesses of 100 under the plan: careful {rights[0]}, bold {rights[1]})"
    worst = "right guesses about it, in whole numbers, are most under bold"
    assert f"The smallest tier is strict (400 records): {worst} {shown}" in verdict
    signals = [plan.counts * plan.sample_rate / plan.noise_multiplier for plan in (careful, bold)]
    parts = [
        f"{name} {100 * one[0] / one.sum():.0f}\u00a0%" for name, one in zip(("careful", "bold"), signals, strict=True)
    ]
    assert (
        f"its share of the signal of its plan is smallest under careful (share of the signal: {', '.join(parts)})"
        in verdict
    )
    assert verdict.endswith(" Steps: careful 40, bold 80.")
    assert "Steps:" not in side_by_side({"a": careful, "b": careful}).verdict
    mirrored = side_by_side({"bold": careful, "careful": bold}).verdict
    assert "ε = 2 (600 records)" in mirrored  # the only tier that both have
    assert "bold for ε = 2" in mirrored
    assert "no tier in common" in side_by_side({"a": careful, "b": of({1.0: 0.5, 3.0: 0.5})}).verdict


def test_a_smaller_share_is_not_said_to_be_a_smaller_influence():
    """Where more steps raise the influence of the smallest tier, and other budgets lower its share of the signal."""
    plans = {"short": of({0.5: 0.4, 1.0: 0.6}, steps=40), "long": of({0.6: 0.4, 8.0: 0.6}, steps=80)}
    tiers = {"short": {"strict": 0.5, "open": 1.0}, "long": {"strict": 0.6, "open": 8.0}}
    influence = [float(plan.influence[0]) for plan in plans.values()]
    signals = [plan.counts * plan.sample_rate / plan.noise_multiplier for plan in plans.values()]
    assert influence[0] < influence[1]
    assert signals[0][0] / signals[0].sum() > signals[1][0] / signals[1].sum()
    verdict = side_by_side(plans, tiers).verdict
    assert "its influence over all steps is smallest under short (influence: short " in verdict
    assert "its share of the signal of its plan is smallest under long (" in verdict


@pytest.mark.parametrize("strategy", ["scale", "sample"])
def test_a_verdict_for_another_strategy_says_that_it_is_another_plan(strategy):
    made = make_page(of({1.0: 0.4, 8.0: 0.6}, strategy), About())
    best = _best_of(made.verdict)
    assert (f"This plan is made by {strategy}: {best} would be another plan." in made.verdict) == (best != strategy)


def _best_of(verdict: str) -> str:
    """The strategy that the verdict speaks of."""
    found = re.search(r"Individual budgets .*?: (\w+) (?:has|is) ", verdict)
    assert found is not None, verdict
    return found[1]


def test_plans_of_configs_and_their_runs_keep_the_names_of_tiers(tmp_path):
    Path("people.csv").write_text(people(400))
    Path("people.toml").write_text(CONFIG)
    change('column = "epsilon"', 'column = "epsilon"\ntiers = { "1" = 1, "4" = 4 }')
    change('"1" = 1, "4" = 4', '"1" = 0.5, "4" = 2')
    for name, strategy in (("a", "scale"), ("b", "sample")):
        epsilons("plan", "people.toml", "--strategy", strategy, "-o", f"{name}.json").succeeded("0.5 (1)", "2 (4)")
    done = epsilons("compare", "a.json", "b.json", "--html", "compare.html")
    done.succeeded("Promised ε", "The smallest tier is", "upper limit")
    assert "ε = 0.5" not in done.out
    epsilons("train", "people.toml", "-q", "--plan", "a.json").succeeded()
    again = epsilons("compare", "runs/people-1", "b.json").out
    assert next(line.split()[0] for line in again.splitlines() if line.split()[1:] == ["0.5", "0.5"]) == "1"
    values = json.loads(epsilons("compare", "a.json", "b.json", "--json").out)
    assert values["verdict"] in done.out


def test_a_name_of_a_tier_in_a_file_cannot_be_changed_by_hand(tmp_path):
    THREE["careful"].save("named.json", NAMES)
    assert Plan.load("named.json") == THREE["careful"]
    Path("named.json").write_text(Path("named.json").read_text().replace('"strict"', '"open "'))
    epsilons("compare", "named.json", "named.json").is_refused(2)
    with pytest.raises(PlanError, match="changed by hand"):
        Plan.load("named.json")


def test_the_page_says_which_odds_are_of_the_plan_and_which_of_the_promise():
    made = three()
    page = text(shown(made))
    assert "right guesses of 100 under this plan right guesses of 100 by the promise" in page
    for tier, right in zip(make_page(made, About()).tiers, risk_profile.right_guesses(made), strict=True):
        assert tier.promise == risk_profile.right_of_promise(tier.most, 1e-5) > right
        assert f"{right} {tier.promise}" in page
    assert "By the promise: the upper limit" in page
    assert "100 of 100 is no limit" not in page
    assert "100 of 100 is no limit" in text(shown(of({1.0: 0.5, 8.0: 0.5})))


def test_folders_that_hold_a_plan_are_compared_and_named_apart():
    for name in ("a", "b"):
        Path(name).mkdir()
        THREE["careful"].save(f"{name}/plan.json")
    epsilons("compare", "a", "b").succeeded("a b")
    epsilons("compare", "a/plan.json", "b/plan.json").succeeded("a/plan.json b/plan.json")


def test_what_cannot_be_compared_is_refused(saved):
    epsilons("compare", "careful.json").is_refused(2, "two or three")
    epsilons("compare", "careful.json", "careful.json").is_refused(2, "two or three")
    epsilons("compare", *["careful.json", "bold.json", "mixed.json", "other.json"]).is_refused(2, "two or three")
    epsilons("compare", "careful.json", "none.json").is_refused(2, "none.json")
    with pytest.raises(PlanError, match="in common: a is a plan of records, b is a plan of persons"):
        side_by_side({"a": THREE["careful"], "b": of({1.0: 1.0}, unit="person")})


def test_the_page_of_advice_has_noise_odds_classes_tuning_and_a_proxy(tmp_path):
    asked = "--shares 1:30%,3:70% --records 10000 --batch-size 512 --steps 40 --accountant rdp --runs 10"
    asked += " --classes 1:80/20,3:10/90 --proxy 1:88%,2:91%,4:95%"
    page = tmp_path / "advice.html"
    assert epsilons("advise", *asked.split(), "--html", str(page)).code == 0
    text = page.read_text()
    for words in (
        "Ways to use these budgets",
        "Right guesses of 100",
        "Noise",
        "0: 0.6",
        "logarithmic:10",
        "training.balance",
    ):
        assert words in text
    advice = advise(Budgets.from_shares({1.0: 0.3, 3.0: 0.7}, records=10_000), Recipe(40, 512, 1.0), "rdp", runs=10)
    for way in advice.ways:
        expected = 0.88 + 0.03 * (way.signal - 1) if way.signal < 2 else 0.91 + 0.02 * (way.signal - 2)
        assert f"{expected:.1%}" in text
    small = ["--shares", "1:1%,3:99%", "--records", "100", "--batch-size", "10", "--steps", "40"]
    refused = epsilons("advise", *small, "--html", str(tmp_path / "small.html"))
    assert refused.code != 0
    assert not (tmp_path / "small.html").exists()
