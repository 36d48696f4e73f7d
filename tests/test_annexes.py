"""Annexes: every question is answered or for the authors, rare budgets stay hidden, entries fit the registry's form."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epsilons import Budgets, Recipe, plan, report
from epsilons.data.tables import Features
from epsilons.errors import PromiseError, RunError
from epsilons.ledger import model_file, signatures
from epsilons.reporting import annex, sheets
from epsilons.reporting.load_run import load_run
from program import CONFIG, change, epsilons, people
from test_operate import SCHEMAS, problems
from test_reporting import MEASURED, audited
from test_sheets import of, run

FORMS = sorted(file.stem for file in annex.FORMS.glob("*.toml"))
STATED = {
    "reasons": "δ is a tenth of 1 in the number of people.",
    "purpose": "To plan calls.",
    "responsible": "Dr. Weber",
    "contact": "data@st-anna.example",
    "legal_basis": "Consent, Art. 9(2)(a).",
    "necessity": "Calls follow from visits.",
    "recipients": "The planners of the ward.",
    "retention": "Five years.",
    "residual_risk": "Low, and accepted by the board.",
    "tiers_decided_by": "The ethics committee",
    "tiers_decided_on": "2030-01-05",
    "approvers": ["The board, vote 12/30"],
}
#: What no run answers, by form, of one with all of [about], scores on public data, an audit, a model and signatures.
FOR_AUTHORS = {
    "gdpr": [
        "Which of these data are special categories?",
        "Are data transferred to third countries?",
        "How are people informed, and how do they use their rights?",
        "Were other models trained on these people?",
        "What can go wrong for people if the model is wrong or unfair?",
        "How are data, run folder and keys secured?",
        "What did the data protection officer advise?",
        "What are the views of the people concerned?",
        "When is this assessment reviewed?",
    ],
    "nist": [
        "How are the data collected, stored and protected before training?",
        "Does noise or clipping harm some groups more?",
    ],
    "ai-act": [
        "How much computing did it take?",
        "How do people oversee it?",
        "Where do the data come from, and what were they collected for?",
        "Where do bounds, categories and classes of the preprocessing come from?",
        "How were they cleaned and labelled?",
        "Are they enough, and suitable?",
        "Which biases were found, and what was done about them?",
        "Are there special categories of personal data?",
        "Which wrong results are foreseeable, and whom do they harm?",
    ],
}
COMPLETED = {
    "url_slug": "calls",
    "deployment.basic.name": "Calls",
    "deployment.basic.data_curators.0.data_curator_type": "Nonprofit",
    "deployment.basic.data_product_region": "Austria",
    "deployment.basic.data_product_sector": "Healthcare",
    "deployment.implementation.post_processing": "None.",
    "deployment.administrative.registry_authors.0": "Dr. Weber",
}
#: Then a release shows the plan.
SIMULATED = {"simulated": True}


def questions(form: str) -> list[dict[str, Any]]:
    return [
        one for part in tomllib.loads((annex.FORMS / f"{form}.toml").read_text())["part"] for one in part["question"]
    ]


def saved(path: Path) -> dict[str, Any]:
    """File name -> text of a page, values of a JSON."""
    files = annex.save_annexes(path, path.with_name(f"{path.name}-annexes"))
    return {f.name: json.loads(f.read_text()) if f.suffix == ".json" else f.read_text() for f in files}


def leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of an entry by its path."""
    inner = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else None
    for name, one in inner or ():
        yield from leaves(one, f"{path}.{name}")
    if inner is None:
        yield path[1:], values


def complete(path: Path) -> Path:
    """A run with all that can answer questions."""
    measured = {"eval_data": {"data": "public", "records": 200}, "metrics": {"step": 20, "loss": 0.5, "accuracy": 0.8}}
    run(path, of(200, 300, 100), metadata={"about": STATED}, **measured)
    features = Features(numeric={"age": (0, 120, False)}, categorical={"town": ("a", "b")})
    outputs = model_file.Outputs(kind="classes", target="called")
    model_file.ModelFile(model=None, inputs=model_file.TableInputs(features=features), outputs=outputs).write(path)
    audited(path, load_run(path).plan.digest)
    signatures.new_key(path.with_name("officer.pem"))
    signatures.sign(path, path.with_name("officer.pem"), "A. Meyer", "data protection officer")
    return path


# -- every question -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("about", [None, {"purpose": "To plan calls."}, STATED])
def test_every_question_is_answered_from_the_run_or_marked_for_the_authors(tmp_path, about):
    found = saved(run(tmp_path / "run", of(200, 300, 100), metadata={"about": about}))
    assert set(found) == {f"{form}.{ending}" for form in FORMS for ending in ("html", "json")}
    for form in FORMS:
        asked, page = questions(form), found[f"{form}.html"]
        assert page.count('class="question"') == len(asked) == len({one["asks"] for one in asked})
        open_ones = page.count('class="open"')
        assert f"{open_ones} of {len(asked)} questions are for the authors" in page
        if form != "registry":
            values = found[f"{form}.json"]
            assert [one["asks"] for one in values["questions"]] == [one["asks"] for one in asked]
            assert all(bool(one["answer"]) != bool(one["for_the_authors"]) for one in values["questions"])
            assert values["open"] == open_ones
        else:
            assert sum(annex.OPEN in str(value) for _, value in leaves(found["registry.json"])) == open_ones


def test_what_a_complete_run_leaves_open_is_known(tmp_path):
    found = saved(complete(tmp_path / "run"))
    left = {
        form: [one["asks"] for one in found[f"{form}.json"]["questions"] if one["for_the_authors"]]
        for form in FOR_AUTHORS
    }
    assert left == FOR_AUTHORS
    for form in FOR_AUTHORS:
        for text in ("To plan calls.", "Dr. Weber"):
            assert form == "nist" or text in found[f"{form}.html"]
    assert "A. Meyer (data protection officer) signed the run" in found["gdpr.html"]
    assert "numbers: age" in found["ai-act.html"]
    assert "accuracy 80.0 %" in found["nist.html"]
    assert "found no contradiction" in found["nist.html"]
    assert "contact: data@st-anna.example" in found["gdpr.html"]


@pytest.mark.parametrize("data", ["private", "public"])
def test_people_who_were_kept_back_for_the_test_are_data_subjects_too(tmp_path, data):
    """Their number is in an annex only where the report for release shows it."""
    row = {"step": 20, "accuracy": 0.8}
    path = run(tmp_path / "run", of(200, 300, 100), eval_data={"data": data, "records": 123}, metrics=row)
    found = {one["asks"]: " ".join(one["answer"]) for one in saved(path)["gdpr.json"]["questions"]}
    whose = found["Whose data are they, and how many people?"]
    assert "kept back for the test. They were read without noise, and counted" in whose
    assert ("123 test records" in whose) == (data == "public")
    assert ("123" in " ".join(found.values())) == (data == "public")


@pytest.mark.parametrize("recipients", [None, "Nobody else."])
def test_the_model_may_be_published_only_as_far_as_budgets_go_where_recipients_are_named(tmp_path, recipients):
    about = {"purpose": "x"} | ({"recipients": recipients} if recipients else {})
    path = run(tmp_path / "run", of(200, 300, 100), metadata={"about": about})
    [said] = [one for one in annex.facts(load_run(path))["publish"] if "model may be" in one]
    assert said.startswith("As far as these budgets go, ") == bool(recipients)
    assert ("depends on the recipients named above" in said) == bool(recipients)


def test_an_approver_is_not_told_as_a_fact_where_nobody_signed(tmp_path):
    found = saved(run(tmp_path / "run", of(200, 300, 100), metadata={"about": STATED}))
    answers = {one["asks"]: one["answer"] for one in found["gdpr.json"]["questions"]}
    assert answers["Who approved the run?"] == ["The board, vote 12/30 (named in the config, not signed)"]
    assert answers["Who signed it?"] == []


def test_the_worst_served_group_is_an_answer(tmp_path):
    row = {
        "step": 20,
        "accuracy": 0.8,
        "per_group": [[20, 40], [80, 100], [55, 60]],
        "per_class": [[75, 100], [80, 100]],
    }
    data = {"data": "public", "records": 200, "classes": ["no", "yes"]}
    made = run(tmp_path / "run", of(200, 300, 100), metadata=SIMULATED, eval_data=data, metrics=row)
    found = saved(made)["nist.json"]["questions"]
    [answer] = [one["answer"] for one in found if one["asks"] == "Does noise or clipping harm some groups more?"]
    assert (
        answer[0]
        .replace("\u00a0", " ")
        .startswith("Served worst, of those with 20 test records or more: budget strict (0.5), 50.0 %")
    )


def test_every_key_of_a_form_is_known_and_a_wrong_one_is_an_error(tmp_path):
    known = annex.facts(load_run(run(tmp_path / "run", of(200, 300, 100))))
    for name in ("abuot.purpose", "unit.sentense"):
        with pytest.raises((KeyError, AttributeError)):
            annex.answered({"asks": "?", "source": "", "from": [name]}, known)
    for form in FORMS:
        for one in questions(form):
            assert one.keys() <= {"asks", "source", "from", "says", "authors", "field"}
            assert one.keys() & {"from", "says", "authors"}
            annex.answered(one, known)


def test_another_annex_is_one_more_file(tmp_path, monkeypatch):
    shutil.copytree(annex.FORMS, tmp_path / "forms")
    text = 'title = "Own"\nform = "ours"\nnote = "n"\n[[part]]\ntitle = "p"\n[[part.question]]\nasks = "Why?"\n'
    (tmp_path / "forms/own.toml").write_text(text + 'source = "s"\nfrom = ["about.purpose"]\n')
    monkeypatch.setattr(annex, "FORMS", tmp_path / "forms")
    found = saved(run(tmp_path / "run", of(200, 300, 100)))
    assert found["own.json"]["questions"][0]["answer"] == ["To plan calls."]
    assert "Why?" in found["own.html"]


# -- what must stay hidden ---------------------------------------------------------------------------------------------


def test_annexes_are_the_same_whatever_fewer_than_20_people_chose(tmp_path):
    """Where they chose, and where tiers are simulated as long as the rows of a report for release are the same."""
    for counts, metadata in (((1, 7, 19), SIMULATED), ((0, 19, 20, 150), {})):
        metadata = {"about": STATED, **metadata}
        seen = [
            saved(run(tmp_path / f"{few}{len(counts)}", of(few, 300 - few, 100), metadata=metadata)) for few in counts
        ]
        assert all(one == seen[0] for one in seen)
        merged = "(“strict, middle”): 300 records; merged because fewer than 20 records share"
        assert (merged in seen[0]["gdpr.html"]) == (len(counts) == 3)
        assert ("(“middle”): δ" in seen[0]["gdpr.html"].replace("\u00a0", " ")) == (len(counts) == 4)
    exact = saved(run(tmp_path / "exact", of(20, 280, 100), metadata=SIMULATED))["gdpr.html"]
    assert "20 records" in exact
    assert "280 records" in exact


def test_an_annex_says_in_a_sentence_that_exact_spends_are_not_shown(tmp_path):
    found = saved(run(tmp_path / "run", of(200, 300, 5), metadata=SIMULATED))
    for name in ("gdpr", "nist"):
        assert "The exact spends are not shown. Some budgets are shared by fewer than 20" in found[f"{name}.html"]
        assert "epsilon spent:" not in found[f"{name}.html"]
    many = run(tmp_path / "many", of(200, 300, 50), metadata=SIMULATED)
    assert "exact spends are not shown" not in saved(many)["gdpr.html"]


def test_few_people_are_not_counted(tmp_path):
    few = plan(Budgets([0.5] * 3 + [2.0] * 8 + [8.0] * 6, delta=1e-4), Recipe(20, 5, 1.0), "scale", "rdp")
    found = saved(run(tmp_path / "run", few))
    assert "trained on fewer than 20 records" in found["gdpr.html"]
    for name, one in found.items():
        shown = one if isinstance(one, str) else json.dumps(one)
        assert not re.search(r"\b(3|8|6|17|11|14) (records|were)", shown), name
    loss = found["registry.json"]["deployment"]["privacy_loss"]
    assert annex.OPEN in str(loss["number_of_privacy_units"])
    assert loss["privacy_parameters"]["epsilon"] == 30.0  # of the declared tiers


def test_nothing_internal_is_in_an_annex(tmp_path):
    private = MEASURED | {"eval_data": MEASURED["eval_data"] | {"data": "private"}}
    path = run(tmp_path / "run", of(200, 300, 100), metadata={"config": {"data": {"path": "secret.csv"}}}, **private)
    record = load_run(path)
    for name, one in saved(path).items():
        shown = one if isinstance(one, str) else json.dumps(one)
        for secret in (
            "secret.csv",
            str(path),
            record.plan.digest,
            record.last_hash,
            record.hashes["plan.json"],
            "80.0",
        ):
            assert secret not in shown, (name, secret)
        assert "first table" not in shown


def test_a_run_that_was_changed_after_it_was_signed_has_no_annexes(tmp_path):
    path = complete(tmp_path / "run")
    (path / "audit.json").unlink()
    with pytest.raises(PromiseError, match=r"audit\.json is missing since"):
        annex.save_annexes(path, tmp_path / "out")
    for read in (report, lambda path: sheets.save_sheets(path, tmp_path / "out")):
        with pytest.raises(PromiseError, match=r"audit\.json is missing since"):
            read(path)
    assert not (tmp_path / "out").exists()


def test_texts_of_the_caller_are_text(tmp_path):
    about = {"purpose": "<script>alert(1)</script> {x} \u202e", "responsible": '"><img src=x>'}
    for name, page in saved(run(tmp_path / "run", of(200, 300, 100), metadata={"about": about})).items():
        if name.endswith("html"):
            assert not re.search("<script|<img|\u202e", page)
            assert "default-src 'none'" in page


def test_no_file_is_replaced_because_authors_complete_them(tmp_path):
    path = run(tmp_path / "run", of(200, 300, 100))
    saved(path)
    with pytest.raises(RunError, match="Authors complete annexes"):
        saved(path)


# -- the forms of the JSON -----------------------------------------------------------------------------------------


def test_annexes_are_as_their_schema_says(tmp_path):
    found = saved(complete(tmp_path / "run"))
    for form in FOR_AUTHORS:
        assert problems(found[f"{form}.json"], SCHEMAS["$defs"]["annex"]) == []


def test_an_entry_fits_the_registry_once_its_authors_completed_it(tmp_path):
    schema, entry = SCHEMAS["$defs"]["registry_entry"], saved(complete(tmp_path / "run"))["registry.json"]
    assert {path for path, value in leaves(entry) if str(value).startswith(annex.OPEN)} == set(COMPLETED)
    assert len(problems(entry, schema)) == 2  # kinds of institution and sectors that there are not
    for path, value in COMPLETED.items():
        at: Any = entry
        *parents, last = [int(name) if name.isdigit() else name for name in path.split(".")]
        for name in parents:
            at = at[name]
        at[last] = value
    assert problems(entry, schema) == []
    assert entry["deployment"]["privacy_loss"]["number_of_privacy_units"] == 600
    assert entry["deployment"]["privacy_loss"]["privacy_parameters"] == {"epsilon": 30.0, "delta": 1e-4}


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_writes_annexes_of_a_trained_run(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text(people())
    Path("people.toml").write_text(CONFIG)
    change('drop = ["id"]', 'drop = ["id"]\nread_off = []')
    epsilons("train", "people.toml", "-q").succeeded()
    epsilons("report", "runs/people-1", "--annexes", "out").succeeded("out/gdpr.html", "out/registry.json")
    assert not Path("runs/people-1/report.html").exists()
    assert "target: label" in Path("out/ai-act.html").read_text()
    epsilons("report", "runs/people-1", "--annexes", "out").is_refused(2, "exists already")
    epsilons("report", "runs/people-1", "--annexes", "other", "--json").is_refused(2, "leave out --json")
