"""Plans side by side: each as its own page shows it, in the terminal, on a page and as JSON."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from epsilons import Budgets, Plan, Recipe, plan
from epsilons.errors import PlanError
from epsilons.planning import risk_profile
from epsilons.reporting.html import compare_page
from epsilons.reporting.plan_page import About, make_page, side_by_side
from program import epsilons
from test_plan_page import cells, text

RECIPE = Recipe(40, 100, 1.0)


def of(shares: dict[float, float], strategy: str = "scale", steps: int = 40, **more: Any) -> Plan:
    return plan(Budgets.from_shares(shares, records=1000, **more), Recipe(steps, 100, 1.0), strategy, "rdp")


THREE = {
    "careful": of({0.5: 0.4, 2.0: 0.6}),
    "bold": of({1.0: 0.4, 2.0: 0.6}, "sample", steps=80),
    "mixed": of({0.5: 0.4, 2.0: 0.6}, "mix"),
}


@pytest.fixture(autouse=True)
def saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, made in THREE.items():
        made.save(f"{name}.json")


def test_every_cell_is_that_of_the_page_of_its_plan():
    content = side_by_side(THREE)
    tables = {table.title: dict(table.rows) for table in content.tables}
    for column, made in enumerate(THREE.values()):
        page = make_page(made, About())
        rights = risk_profile.right_guesses(made)
        for tier, right, count in zip(page.tiers, rights, made.counts, strict=True):
            assert tables["Right guesses of 100"][tier.label][column] == str(right)
            assert tables["How many"][tier.label][column] == str(count)
            for title in ("Influence", "Noise", "ε spent"):
                assert tables[title][tier.label][column] == cells(page, title)[tier.label][0]
    assert list(tables["Noise"]) == ["0.5", "1", "2"]
    assert tables["Noise"]["1"][0] == "–"
    facts = dict(content.facts.rows)
    assert facts["strategy"] == ("scale", "sample", "mix")
    assert facts["steps"] == ("40", "80", "40")
    assert facts["accountant"] == ("RDP",) * 3


def test_the_page_shows_what_the_terminal_shows_and_loads_nothing():
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


def test_the_json_has_the_numbers_of_each_plan():
    values = json.loads(epsilons("compare", "careful.json", "bold.json", "--json").out)
    assert values["document"] == "epsilons comparison"
    for (name, made), shown in zip(THREE.items(), values["plans"], strict=False):
        assert shown["name"] == name
        assert shown["verdict"].startswith("Individual budgets")
        assert [group["epsilon_spent"] for group in shown["groups"]] == made.epsilon_spent().tolist()
        assert [group["noise_multiplier"] for group in shown["groups"]] == made.noise_multiplier.tolist()
        assert [group["influence"] for group in shown["groups"]] == made.influence.tolist()
        assert [g["right_guesses"] for g in shown["groups"]] == risk_profile.right_guesses(made).tolist()


def test_a_plan_with_few_people_is_shown_by_its_promises_alone():
    def page_of(rare: float) -> str:
        few = plan(Budgets([0.5] * 500 + [2.0] * 495 + [rare] * 5), RECIPE, "scale", "rdp")
        content = side_by_side({"few": few, "careful": THREE["careful"]})
        influence = next(dict(table.rows) for table in content.tables if table.title == "Influence")
        assert {row[0] for row in influence.values()} == {"–"}
        return compare_page(content)

    assert page_of(7.123) == page_of(6.5)
    assert "few: rare budgets." in text(page_of(6.5))
    plan(Budgets([0.5] * 500 + [7.123] * 5), RECIPE, "scale", "rdp").save("few.json")
    done = epsilons("compare", "careful.json", "few.json")
    done.succeeded("few: Suppressed: fewer than 20")
    assert "7.1" not in done.out


def test_folders_that_hold_a_plan_are_compared_and_named_apart():
    for name in ("a", "b"):
        Path(name).mkdir()
        THREE["careful"].save(f"{name}/plan.json")
    epsilons("compare", "a", "b").succeeded("a b")
    epsilons("compare", "a/plan.json", "b/plan.json").succeeded("a/plan.json b/plan.json")


def test_what_cannot_be_compared_is_refused():
    epsilons("compare", "careful.json").is_refused(2, "two or three")
    epsilons("compare", "careful.json", "careful.json").is_refused(2, "two or three")
    epsilons("compare", *["careful.json", "bold.json", "mixed.json", "other.json"]).is_refused(2, "two or three")
    epsilons("compare", "careful.json", "none.json").is_refused(2, "none.json")
    with pytest.raises(PlanError, match="no epsilons in common"):
        side_by_side({"a": THREE["careful"], "b": of({1.0: 1.0}, unit="person")})
