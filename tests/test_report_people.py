"""What a report says to officers: odds, who and when, rows or persons, origins, audit, other runs, withdrawal."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import epsilons
from epsilons import Budgets, Plan, Recipe, plan
from epsilons.errors import UNPRINTABLE, EpsilonsWarning, RunError
from epsilons.ledger import plan_folder
from epsilons.planning import risk_profile
from epsilons.reporting import dumps, html
from epsilons.reporting.html import labelled
from epsilons.reporting.statements import about_of, origins_of, period_of
from test_reporting import Page, make_run

MEASURED = {
    "eval_data": {"data": "private", "records": 200, "classes": ["no", "yes"]},
    "metrics": {"step": 20, "accuracy": 0.8, "per_class": [[70, 80], [90, 120]], "per_group": [[70, 80], [90, 120]]},
}
RECIPE = Recipe(steps=20, batch_size=100, clip_norm=1.0)
EACH_ROW = "each row is one person"


@pytest.fixture(scope="module")
def two() -> Plan:
    return plan(Budgets.from_shares({0.5: 0.4, 2.0: 0.6}, records=1000), RECIPE, "sample", "rdp")


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
        for right, sentence in zip(expected, values["odds"], strict=True):
            assert f"whether your data were used, is right at most {right} of 100 times; 50 by tossing" in sentence
    for page in pages(tmp_path / "run"):
        assert all(f"at most {right} of 100 right" in page for right in expected)


def test_odds_for_release_do_not_depend_on_what_fewer_than_20_chose(tmp_path):
    shown = []
    for few in (2.5, 3.5):
        made = plan(Budgets([1.0] * 600 + [few] * 3 + [4.0] * 380), RECIPE, "sample", "rdp")
        path = make_run(tmp_path / str(few), made)
        inside, outside = both(path)
        assert [row["right_guesses"] for row in inside["groups"]] == risk_profile.right_guesses(made).tolist()
        shown.append([(row["label"], row["right_guesses"]) for row in outside["groups"]])
        assert "it would depend on what fewer than 20 people chose" in pages(path)[1]
    assert shown[0] == shown[1]
    assert [right for _, right in shown[0]] == [risk_profile.right_of_promise(1.0, 1e-5), None]


def test_under_declared_shares_the_guess_is_about_presence(tmp_path):
    budgets = Budgets.from_shares({1.0: 1.0}, records=1000)
    made = plan(budgets, RECIPE, "scale", "rdp", public_shares={1.0: 1.0}, public_records=900)
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
    guarantee = two.guarantee_of_run("philox", None, stated.get("person"))
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
    made = plan(budgets, RECIPE, "scale", "rdp")
    guarantee = made.guarantee_of_run("philox", None, "patient_id")
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
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("purpose", "responsible", "contact"), texts)))
def test_hostile_texts_about_a_run_are_text_and_never_markup(about_page, values):
    content, plain = about_page
    changed = html.page(replaced(content, about_of(values)))
    assert tags(changed) <= tags(plain)
    assert not UNPRINTABLE.search(changed.replace("\n", ""))
    assert len(changed) < len(plain) + 3 * 2_100 * 6 * 5 + 40_000


def replaced(content: Any, about: Any) -> Any:
    from dataclasses import replace

    return replace(content, about=about)


def tags(page: str) -> set[tuple[str, tuple[str, ...]]]:
    return {(tag, tuple(attributes)) for tag, attributes in Page(page).tags}


@pytest.fixture(scope="module")
def about_page(tmp_path_factory, two) -> tuple[Any, str]:
    path = make_run(tmp_path_factory.mktemp("about") / "run", two, metadata={"about": {"purpose": "a\nb"}})
    content = epsilons.report(path).content
    return content, html.page(content)


def test_texts_about_a_run_are_in_both_versions_and_whole_in_the_json(tmp_path, two):
    about = {"purpose": "Triage <of> visits\nnot billing", "responsible": "x" * 10_000, "contact": 7}
    path = make_run(tmp_path / "run", two, metadata={"about": about})
    for values, page in zip(both(path), pages(path), strict=True):
        assert values["about"] == {"purpose": about["purpose"], "responsible": "x" * 10_000, "contact": None}
        assert "Triage <of> visits not billing" in page
        assert "the JSON holds the whole" in page


@pytest.mark.parametrize("about", [None, "a text", 3, [], {}, {"purpose": ""}, {"purpose": ["x"]}, {"other": "x"}])
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
    inside, outside = both(make_run(tmp_path / "run", two, **MEASURED))
    assert "200 test records" in inside["tested"][0]
    assert "200" not in " ".join(outside["tested"])
    assert "private data" in inside["tested"][1]
    assert "This version contains none of them." in outside["tested"][1]
    assert "stays covered" in inside["withdrawal"][0]
    assert "later run leaves them out" in inside["withdrawal"][2]
    assert "registry" not in " ".join(inside["withdrawal"]).lower()
    silent, _ = both(make_run(tmp_path / "silent", two))
    assert silent["tested"] == ["The run had no test data."]


def test_every_special_word_of_the_page_is_explained_at_its_end(tmp_path, two):
    page = pages(make_run(tmp_path / "run", two))[0]
    _, _, words = page.rpartition(" Words ")
    for word in ("RDP", "Philox", "sample_rate", "clip_norm", "noise", "influence", "Pr[M(D)∈S]", "ε", "δ", "ledger"):
        assert word in page.partition(words)[0], word
        assert f"{word} " in words, word
    before_specialists = page.partition("For specialists")[0]
    for word in ("RDP", "Philox", "Pr[", "sample_rate", "noise_multiplier"):
        assert word not in before_specialists


def test_every_cell_knows_its_column_on_narrow_screens(tmp_path, two):
    page = Page(epsilons.report(make_run(tmp_path / "run", two, **MEASURED)).to_html())
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
    good = MEASURED | {"metrics": MEASURED["metrics"] | {"per_class": [[70, 80], [90, 120]]}}
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
        ({"metadata": {"provenance": []}}, "The model may be published, with the claim"),
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
    versions = zip(both(made), pages(made), ("may not be", "may be"), strict=True)
    for values, page, verb in versions:
        assert values["publish"][0].startswith(f"This version of the report {verb} published.")
        assert values["publish"][1].startswith(words)
        assert all(sentence in page for sentence in values["publish"])


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


def test_odds_of_the_plan_are_told_from_those_of_the_limit(tmp_path, two):
    """57 of 100 in the table, 74 of 100 in the guarantee: both are right, and the page says why."""
    for page in pages(make_run(tmp_path / "run", two)):
        assert "The limit ε alone would allow more" in page


def test_a_page_about_persons_speaks_of_no_record(tmp_path):
    of_persons = plan(Budgets([0.5] * 400 + [2.0] * 600, unit="person"), RECIPE, "sample", "rdp")
    made = make_run(tmp_path / "run", of_persons, **MEASURED)
    audited(made, of_persons.digest)
    for page in pages(made):
        assert "sample_rate: a person’s chance of being drawn" in page
        assert "how far one person of the group" in page
    assert "Rows of one person are alike" in pages(made)[0]
    assert "synthetic persons certified" in pages(made)[0]
