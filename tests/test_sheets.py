"""Sheets for people: from what was declared alone, no numbers but odds and dates, readable, on 390 px and one page."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from html import escape, unescape
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np
import pytest

from epsilons import Budgets, Plan, Recipe, Risk, plan, report
from epsilons.accounting import filter as filter_
from epsilons.errors import RunError
from epsilons.planning.risk_profile import right_of_promise, right_over_lifetime
from epsilons.registry import Accounts
from epsilons.reporting import sheets
from epsilons.reporting.content import make_content
from epsilons.reporting.load_run import load_run
from program import CONFIG, change, epsilons, people
from test_reporting import audited, make_run, of_cells

TIERS = {"strict": 0.5, "middle": 2.0, "open": 30.0}
ABOUT = {"purpose": "To plan calls.", "responsible": "Dr. Weber", "contact": "data@st-anna.example"}
MORE = {
    "legal_basis": "Your consent.",
    "recipients": "The planners of the ward, and nobody outside of the hospital.",
    "retention": "Data and model are kept for five years after your stay, and are then deleted, also in all copies.",
}
STATED = {"tiers": TIERS, "about": ABOUT, "provenance": [], "person": "each row is one person"}
NEEDED = {"person": "each row is one person", "ended": "2030-01-12T10:00:00Z"}
LANGUAGES = sorted(file.stem for file in sheets.LANGUAGES.glob("*.toml"))


def of(*counts: int, **settings: Any) -> Plan:
    levels = [level for level, count in zip(TIERS.values(), counts, strict=True) for _ in range(count)]
    return plan(Budgets(levels, delta=1e-4), Recipe(20, 50, 1.0), "scale", "rdp", **settings)


def run(path: Path, made: Plan, **changes: Any) -> Path:
    metadata = {"simulated": False} | STATED | changes.pop("metadata", {})
    settings = NEEDED | {"guarantee": made.guarantee_of_run("chacha20", None, NEEDED["person"])} | changes
    return make_run(path, made, metadata=metadata, **settings)


def pages(path: Path, **changes: Any) -> dict[str, str]:
    folder = path.with_name(f"{path.name}-sheets")
    return {file.name: text(file.read_text()) for file in sheets.save_sheets(path, folder)}


def text(page: str) -> str:
    body = page[page.index("<body>") :]
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", body, flags=re.S)).split())


@pytest.fixture
def made(tmp_path) -> dict[str, str]:
    return pages(run(tmp_path / "run", of(200, 300, 100)))


# -- what a sheet says -------------------------------------------------------------------------------------------------


def test_there_is_one_sheet_for_each_tier_and_language(made):
    assert set(made) == {f"{n}-{name}.{lang}.html" for n, name in enumerate(TIERS, 1) for lang in LANGUAGES}
    assert {"de", "en"} <= set(LANGUAGES)
    english = made["1-strict.en.html"]
    for words in ("You chose “strict”", "To plan calls.", "data@st-anna.example", "Dr. Weber", "this one model"):
        assert words in english
    assert "12 January 2030" in english
    assert "12. Januar 2030" in made["1-strict.de.html"]
    assert "project" not in made["1-strict.de.html"]
    assert "we use your data for no new model." in english, "with a list of budgets, the rows may stay"
    assert "Sagen Sie Nein, nutzen wir Ihre Daten für kein neues Modell." in made["1-strict.de.html"]


def test_no_number_is_on_a_sheet_but_odds_and_dates(made):
    for name, words in made.items():
        right = {"strict": 63, "middle": 89, "open": 100}[name.split(".")[0][2:]]
        assert right in (right_of_promise(one, 1e-4) for one in TIERS.values())
        without_dates = re.sub(r"\d+\.? \w+ 20\d\d", "", words)
        found = {int(number) for number in re.findall(r"\d+", without_dates)}
        of_others = {63, 89}
        assert found <= of_others | ({50, 100} if right == 100 else {50, 100, right, right - 50, 100 - right})
        assert right in found
        assert "ε" not in words


@pytest.mark.parametrize("left_out", [None, *MORE])
def test_legal_basis_recipients_and_retention_are_on_a_sheet_where_they_are_stated(tmp_path, left_out):
    about = ABOUT | {name: text for name, text in MORE.items() if name != left_out}
    for name, words in pages(run(tmp_path / "run", of(200, 300, 100), metadata={"about": about})).items():
        for key, text in MORE.items():
            told = texts(name.split(".")[1])["done"][key]
            assert (told.replace(f"{{{key}}}", text) in words) == (key != left_out)
            assert (told.split("{")[0] in words) == (key != left_out)


@pytest.mark.parametrize(("data", "told"), [("public", "test_public"), ("private", "test_private"), (None, None)])
def test_a_sheet_says_that_no_limit_applied_to_the_result_of_the_test(tmp_path, data, told):
    """And whether it may be published; nothing if there were no test data. No sheet says that every limit was kept."""
    score = {"step": 20, "loss": 0.5, "accuracy": 0.75}
    measured = {"eval_data": {"records": 80, "data": data}, "metrics": score} if data else {}
    path = run(tmp_path / "run", of(200, 300, 100), **measured)
    for name, words in pages(path).items():
        for key in ("test_public", "test_private"):
            said = " ".join(texts(name.split(".")[1])["done"][key].split())
            assert (said in words) == (key == told), name
    english = pages(path)["1-strict.en.html"]
    assert "Your limit was kept" not in english
    assert "The training kept your limit." in english
    assert ("only used to test the model, your limit did not apply" in english) == bool(data)


def test_the_odds_of_a_sheet_are_called_the_promise_and_are_those_that_the_report_calls_so(tmp_path, made):
    assert "at most 63 of 100 guesses are right. This number is our promise to you" in made["1-strict.en.html"]
    assert "höchstens 63 von 100 Mal richtig. Diese Zahl ist unser Versprechen" in made["1-strict.de.html"]
    path = run(tmp_path / "other", of(200, 300, 100))
    internal, released = (make_content(load_run(path), release=release).odds for release in (False, True))
    assert internal[0].endswith("The promise allows 63.")
    assert "is right at most 63 of 100" in released[0]


def test_names_of_tiers_are_shown_as_words(tmp_path):
    found = pages(run(tmp_path / "run", of(200, 300, 100), metadata={"tiers": {"strict_2": 0.5, "__": 2.0}}))
    assert "You chose “strict 2”." in found["1-strict_2.en.html"]
    assert "Sie haben „strict 2“ gewählt." in found["1-strict_2.de.html"]
    assert "strict_2" not in "".join(found.values())
    assert "You chose “__”." in found["2-__.en.html"]


def test_a_choice_that_allows_everything_says_so_and_has_no_picture(tmp_path):
    path = run(tmp_path / "run", of(200, 300, 100))
    for file in sheets.save_sheets(path, tmp_path / "sheets"):
        assert ("<figure" in file.read_text()) == ("open" not in file.name)
        wide = "only a very wide limit" if ".en." in file.name else "nur eine sehr weite Grenze"
        assert (wide in text(file.read_text())) == ("open" in file.name)
    assert "no limit that you could see" in text((tmp_path / "sheets/3-open.en.html").read_text())


def test_sheets_are_the_same_whoever_chose_what_and_however_few(tmp_path, made):
    for number, counts in enumerate([(200, 300, 1), (1, 1, 598), (0, 600, 0), (19, 0, 50)]):
        assert pages(run(tmp_path / str(number), of(*counts))) == made


def test_a_tier_by_risk_has_the_odds_that_it_declares_also_if_nobody_holds_it(tmp_path):
    risks = {"strict": Risk(odds=55), "open": Risk(tpr=0.05, at_fpr=0.01)}
    budgets = Budgets.by_risk(risks, {"strict": 0.5, "open": 0.5}, tail=(4.0, 1e-5), records=400)
    by_risk = plan(budgets, Recipe(20, 50, 1.0))
    asked = budgets.contract
    assert asked is not None
    tiers = asked.levels
    limits = [[epsilon, *(value if value < 2 else None for value in row)] for epsilon, row in asked.limits.items()]
    path = run(tmp_path / "run", by_risk, metadata={"tiers": tiers}, limits=limits)
    assert "at most 55 of 100" in pages(path)["1-strict.en.html"]
    assert f"at most {right_of_promise(4.0, 1e-5)} of 100" in pages(path)["2-open.en.html"]
    section = {"risks": {"strict": {"odds": 55}, "new": {"odds": 60}}, "tail": [4.0, 1e-5], "delta": 1e-5}
    levels = {"strict": budgets.epsilons[0], "new": 4.0}
    other = run(tmp_path / "other", by_risk, metadata={"tiers": levels, "config": {"budgets": section}})
    assert "at most 60 of 100" in pages(other)["2-new.en.html"]


def test_a_run_of_a_registry_speaks_of_a_lifetime(tmp_path):
    """With its odds, whatever the person used before, and whatever delta another one has."""
    epsilon, delta = np.repeat([*TIERS.values()], [200, 300, 100]), np.full(600, 1e-4)
    delta[0] = 1e-5
    homes, nothing = filter_.home_orders(epsilon, delta), np.zeros((600, 16))
    accounts = Accounts([*map(str, range(600))], np.arange(600), epsilon, delta, homes, nothing, np.zeros(600, bool))
    budgets = accounts.budgets(0.25)
    made = plan(budgets, Recipe(20, 50, 1.0), accountant="filter")
    guarantee = made.guarantee_of_run("chacha20", None, "id", "R1")
    stated = {"registry": {"id": "R1", "run": "a"}, "lifetimes": accounts.lifetimes(budgets.group), "person": "id"}
    path = run(tmp_path / "run", made, metadata={"person": "id"}, guarantee=guarantee, **stated)
    for number, (tier, epsilon) in enumerate(TIERS.items(), start=1):
        right = right_over_lifetime(epsilon, 1e-4)
        assert right == 100 or f"at most {right} of 100" in pages(path)[f"{number}-{tier}.en.html"]
    english, german = pages(path)["1-strict.en.html"], pages(path)["1-strict.de.html"]
    for words in (
        "for your whole life",
        "no new project that we count for your limit",
        "all projects together that we count",
        "stays used up",
    ):
        assert words in english
    assert "one project" not in english
    assert "A project that we do not count for it has a limit of its own, or none." in english
    assert "all our projects" not in english.lower()  # another run on these people may be outside the registry
    assert "Ihr Leben lang" in german
    assert "alle unsere projekte" not in german.lower()
    other = run(
        tmp_path / "other", made, metadata={"person": "id", "tiers": {"none": 7.0}}, guarantee=guarantee, **stated
    )
    with pytest.raises(RunError, match="tiers are not those of the registry"):
        sheets.save_sheets(other, tmp_path / "none")


@pytest.mark.filterwarnings("ignore::epsilons.errors.EpsilonsWarning")
def test_declared_shares_hide_who_took_part_and_what_is_not_stated_is_left_blank(tmp_path):
    declared = of(200, 300, 100, public_shares={0.5: 0.3, 2.0: 0.5, 30.0: 0.2}, public_records=600)
    english = pages(run(tmp_path / "run", declared, metadata={"about": None}, ended=None))["1-strict.en.html"]
    assert "also hides that you took part" in english
    assert english.count(sheets.BLANK) == 4  # purpose, responsible, contact, and when it ended


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("states no tiers", {"metadata": {"tiers": None}}),
        ("simulated", {"metadata": {"simulated": True}}),
        ("of rows", {"person": None, "guarantee": None, "metadata": {"person": None}}),
        ("not finished", {"close": False}),
        ("seeded", {"randomness": "seeded", "guarantee": None}),
        ("read off", {"metadata": {"provenance": [{"column": "a", "what": "bounds", "source": "read off the data"}]}}),
        ("not stated where", {"metadata": {"provenance": [{"column": "a", "what": "bounds", "source": "not stated"}]}}),
    ],
)
def test_a_run_that_a_sheet_would_say_too_much_about_has_none(tmp_path, words, changes):
    path = run(tmp_path / "run", of(200, 300, 100), **changes)
    with pytest.raises(RunError, match=words):
        sheets.save_sheets(path, tmp_path / "sheets")
    assert not (tmp_path / "sheets").exists()


def test_a_run_with_several_deltas_has_none(tmp_path):
    """The largest of them may be what one person chose."""
    few = plan(Budgets([0.5] * 60 + [2.0] * 60, delta=[1e-4] * 100 + [1e-5] * 20), Recipe(20, 50, 1.0), "scale", "rdp")
    with pytest.raises(RunError, match="several deltas"):
        sheets.save_sheets(run(tmp_path / "run", few), tmp_path / "sheets")


def test_a_run_whose_audit_contradicts_it_has_none(tmp_path):
    path = run(tmp_path / "run", of(200, 300, 100))
    audited(path, load_run(path).plan.digest, verdict="violated", violated=True)
    with pytest.raises(RunError, match="audit contradicts"):
        sheets.save_sheets(path, tmp_path / "sheets")


def test_texts_of_the_caller_are_text_and_file_names_are_plain(tmp_path):
    tiers = dict(zip(["../<b>Ä</b> {right} \u202e", "///", "x" * 300], TIERS.values(), strict=True))
    about = {"purpose": "<script>alert(1)</script> {tier}", "contact": '"><img src=x>'}
    path = run(tmp_path / "run", of(200, 300, 100), metadata={"tiers": tiers, "about": about})
    files = sheets.save_sheets(path, tmp_path / "sheets")
    assert {file.name for file in files if file.name.endswith("en.html")} == {
        "1-b-ä-b-right.en.html",
        "2-tier.en.html",
        f"3-{'x' * 40}.en.html",
    }
    for file in files:
        page = file.read_text()
        assert "<script>" not in page.lower()
        assert "<img" not in page
        assert "<b>" not in page
        assert "\u202e" not in page
        assert "{tier}" in page
        assert "default-src 'none'" in page


# -- languages ---------------------------------------------------------------------------------------------------------


def texts(language: str) -> dict[str, Any]:
    return tomllib.loads((sheets.LANGUAGES / f"{language}.toml").read_text(encoding="utf-8"))


def shape(values: Any) -> Any:
    """Keys and names between braces."""
    if isinstance(values, dict):
        return {key: shape(value) for key, value in values.items()}
    return len(values) if isinstance(values, list) else {name for _, name, *_ in Formatter().parse(values) if name}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_has_the_same_texts_with_the_same_names(language):
    assert shape(texts(language)) == shape(texts("en"))
    assert [list(texts(language)[name]) for name in sheets.SECTIONS] == [list(texts("en")[n]) for n in sheets.SECTIONS]


def test_a_third_language_is_one_more_file(tmp_path, monkeypatch):
    shutil.copytree(sheets.LANGUAGES, tmp_path / "languages")
    english = (tmp_path / "languages/en.toml").read_text()
    (tmp_path / "languages/fr.toml").write_text(english.replace("What you chose", "Votre choix"))
    monkeypatch.setattr(sheets, "LANGUAGES", tmp_path / "languages")
    found = pages(run(tmp_path / "run", of(200, 300, 100)))
    assert "Votre choix" in found["2-middle.fr.html"]
    assert len(found) == 9


def syllables(word: str) -> int:
    """Groups of vowels; a final e is silent in English, unless it is the only one."""
    return max(1, len(re.findall(r"[aeiouyäöü]+", word.lower())))


def readability(words_of: list[str], language: str) -> float:
    """Flesch's reading ease for English (70: seventh grade), the first Wiener Sachtextformel for German (a grade).

    Flesch 1948; Bamberger and Vanecek 1984.
    """
    sentences = [s for text in words_of for s in re.split(r"[.!?:]\s|[.!?:]$", text.replace("\n", " ")) if s.strip()]
    words = [word for s in sentences for word in re.findall(r"[^\W\d_]+", s)]
    counts = [max(1, syllables(w) - (language == "en" and w.endswith("e") and not w.endswith("le"))) for w in words]
    per_sentence = len(words) / len(sentences)
    if language == "en":
        return 206.835 - 1.015 * per_sentence - 84.6 * sum(counts) / len(words)
    part = 100 / len(words)
    long, few = part * sum(c >= 3 for c in counts), part * sum(c == 1 for c in counts)
    six = part * sum(len(w) > 6 for w in words)
    return 0.1935 * long + 0.1672 * per_sentence + 0.1297 * six - 0.0327 * few - 0.875


def test_the_indices_are_those_of_known_texts():
    """One word of one syllable, and one of five, by hand; and the words of offices, which are far from school level."""
    assert readability(["Go."], "en") == pytest.approx(206.835 - 1.015 - 84.6)
    assert readability(["Universitäten."], "de") == pytest.approx(19.35 + 0.1672 + 12.97 - 0.875)
    office = "Die Verarbeitung personenbezogener Daten erfolgt auf Grundlage der Einwilligung der betroffenen Personen."
    assert readability([office], "de") > 12
    office = (
        "The processing of personal information necessitates documented authorisation by participating individuals."
    )
    assert readability([office], "en") < 30


@pytest.mark.parametrize("language", LANGUAGES)
def test_sheets_are_readable_at_school_level(language):
    written = [part for name in sheets.SECTIONS for part in texts(language)[name].values()]
    found = readability([re.sub(r"\{\w+\}|\d+", "x", part) for part in written], language)
    assert found >= 80 if language == "en" else found <= 5


# -- in a browser ------------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")


def chromium(*arguments: str) -> str:
    flags = ("--headless", "--no-sandbox", "--disable-gpu")
    return subprocess.run([str(CHROMIUM), *flags, *arguments], capture_output=True, text=True, timeout=120).stdout


@needs_chromium
def test_a_sheet_is_one_page_on_paper_and_no_wider_than_a_small_screen(tmp_path):
    measured_on = {"eval_data": {"records": 80, "data": "private"}, "metrics": {"step": 20, "accuracy": 0.75}}
    path = run(tmp_path / "run", of(200, 300, 100), metadata={"about": ABOUT | MORE}, **measured_on)
    for file in sheets.save_sheets(path, tmp_path / "sheets"):
        if "middle" in file.name:
            chromium("--no-pdf-header-footer", f"--print-to-pdf={tmp_path}/sheet.pdf", f"file://{file}")
            assert b"/Count 1" in (tmp_path / "sheet.pdf").read_bytes()
            assert 300 < measured(tmp_path, file.read_text(), 390, "document.documentElement.scrollWidth") <= 390


def measured(folder: Path, page: str, width: int, what: str) -> int:
    """The value of an expression of JavaScript in the frame of a page of this width, in pixels."""
    inside = f'<iframe style="width: {width}px; height: 800px; border: 0" srcdoc="{escape(page)}"></iframe>'
    script = f"onload = () => {{ const {{document}} = frames[0]; document.defaultView.parent.document.title = {what} }}"
    (folder / "frame.html").write_text(f"<title></title>{inside}<script>{script}</script>")
    shown = chromium("--dump-dom", f"--window-size={width + 40},900", f"file://{folder}/frame.html")
    return int(re.findall(r"<title>(\d+)</title>", shown)[0])


#: By how many pixels the widest table of a page is wider than what is shown of it.
CUT_OFF = "Math.max(...[...document.querySelectorAll('.scroll')].map(one => one.scrollWidth - one.clientWidth))"


@needs_chromium
def test_no_table_of_a_report_is_cut_off(tmp_path):
    """By class and budget, of twelve budgets with names, and of four classes."""
    tiers = {f"tier_{number}": 0.5 * number for number in range(1, 13)}
    made = plan(Budgets(np.repeat([*tiers.values()], 50), delta=1e-4), Recipe(20, 50, 1.0), "scale", "rdp")
    path = of_cells(tmp_path / "run", made, [[[100, 111]] * 12] * 4, metadata={"tiers": tiers})
    page = report(path).to_html()
    assert page.count("of 111") == 48
    for width in (1280, 390):
        assert measured(tmp_path, page, width, CUT_OFF) == 0
        assert measured(tmp_path, page, width, "document.documentElement.scrollWidth") <= width
    uncut = page.replace(".cells small { display: block; }", "").replace(".cells th:not(", ".none th:not(")
    assert measured(tmp_path, uncut.replace(".cells td {", ".none td {"), 1280, CUT_OFF) > 0


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_sheets_of_a_trained_run_and_replaces_nothing_else(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text(people())
    Path("people.toml").write_text(CONFIG)
    change('drop = ["id"]', 'drop = ["id"]\nread_off = []\nperson = "each row is one person"')
    change('column = "epsilon"', 'column = "epsilon"\ntiers = {"1" = 1, "4" = 4, "none of us" = 2}')
    epsilons("train", "people.toml", "-q").succeeded()
    epsilons("report", "runs/people-1", "--for-people", "out").succeeded("out/1-1.de.html", "out/3-none-of-us.en.html")
    epsilons("report", "runs/people-1", "--for-people", "out").succeeded()
    assert not Path("runs/people-1/report.html").exists()
    Path("out/1-1.en.html").write_text("mine")
    epsilons("report", "runs/people-1", "--for-people", "out").is_refused(2, "not a sheet for people")
    epsilons("report", "runs/people-1", "--for-people", "out", "--json").is_refused(2, "leave out --json")
