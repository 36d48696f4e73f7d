"""What a notebook shows: progress, a plan, a ledger, a run and an audit; and the notebooks in examples/notebooks."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn

import epsilons
from epsilons import Budgets, Ledger, Recipe, Run, plan
from epsilons.auditing.audit_result import AuditResult, GroupResult
from epsilons.auditing.bounds import HypothesisTest
from epsilons.auditing.recorder import Measure, Reestimate
from epsilons.planning import display
from epsilons.training.fitting import progress
from notebooks import Displays, in_a_notebook, run_cells
from options import fit_flat
from pages import ROOT
from small_runs import FEATURES, some_budgets, some_data, some_plan


def fitted(**options) -> epsilons.Run:
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 3)
    return fit_flat(model, some_data(), some_plan(), budgets=some_budgets(), lr=0.5, seed=1, **options)


@pytest.fixture
def displays(monkeypatch) -> Displays:
    return in_a_notebook(monkeypatch)


def test_a_notebook_shows_progress_by_default_in_one_display(displays, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_PER_DISPLAY", 0.0)
    fitted()
    assert len(displays.shown) == 1
    pages = [bundle["text/html"] for bundle in displays.shown[0]]
    done = [int(re.match(r'<progress value="(\d+)" max="6"></progress> charged \1/6', page)[1]) for page in pages]
    assert done == [0, 1, 2, 3, 4, 5, 6, 6]
    assert capsys.readouterr() == ("", "")


def test_the_last_display_has_what_the_terminal_shows(displays):
    """The groups' spends, by the disclosure rules, and the same words as plain text. No loss, no accuracy."""
    x, y = some_data()
    fitted(eval_data=(x, y), eval_every=1)
    last = displays.shown[0][-1]
    assert last["text/plain"] == "charged 6/6  0:00:00 left  ε 1.00/1  2.00/2  4.00/4"
    assert last["text/html"] == f'<progress value="6" max="6"></progress> {last["text/plain"]}'


def test_few_records_with_some_budget_have_no_spend_in_a_notebook(displays):
    x, y = some_data()
    budgets = epsilons.Budgets([1.0] * 50 + [2.0] * 10)
    plan = epsilons.plan(budgets, epsilons.Recipe(4, 12, 0.5), accountant="rdp")
    epsilons.fit(nn.Linear(FEATURES, 3), (x, y), plan, budgets=budgets, training=epsilons.Training(lr=0.5))
    assert "charged 4/4" in displays.shown[0][-1]["text/html"]
    assert not any("ε" in bundle[kind] for bundle in displays.shown[0] for kind in bundle)


def test_a_notebook_gets_few_messages_however_fast_the_steps_are(displays, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_PER_DISPLAY", 1e9)
    fitted()
    assert len(displays.shown[0]) == 3  # at the start, after the last update, on leaving


def test_an_interrupted_run_leaves_what_was_charged_in_the_notebook(displays, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_PER_DISPLAY", 1e9)

    def interrupt(private: epsilons.Private) -> None:
        if private.updates == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(callbacks=[interrupt])
    assert 'value="4"' in displays.shown[0][-1]["text/html"]


def test_nothing_is_displayed_if_progress_is_off_or_no_kernel_serves(monkeypatch, capsys):
    displays = in_a_notebook(monkeypatch)
    fitted(progress=False)
    in_a_terminal = in_a_notebook(monkeypatch, kernel=None)
    fitted()
    assert displays.shown == in_a_terminal.shown == []
    assert capsys.readouterr() == ("", "")


def test_progress_changes_no_bit_of_a_run(displays):
    shown, quiet = nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3)
    quiet.load_state_dict(shown.state_dict())
    for model, progress_shown in [(shown, True), (quiet, False)]:
        options = {"budgets": some_budgets(), "seed": 1, "progress": progress_shown}
        fit_flat(model, some_data(), some_plan(), **options)
    assert len(displays.shown) == 1
    assert torch.equal(shown.weight, quiet.weight)


def test_details_of_progress_are_escaped_in_a_notebook(displays):
    private = SimpleNamespace(ledger=SimpleNamespace(charged=(0,)), plan=SimpleNamespace(steps=2))
    private.on_update = lambda tick: None
    with progress.watched(private, details=lambda _: "<b>\x1b"):
        pass
    assert displays.shown[0][-1]["text/html"].endswith("&lt;b&gt;\\x1b")


@pytest.mark.slow
def test_a_real_kernel_shows_progress(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [
        "import torch, epsilons\n"
        "budgets = epsilons.Budgets([1.0, 2.0] * 50, delta=1e-3)\n"
        "plan = epsilons.plan(budgets, epsilons.Recipe(4, 10, 1.0), accountant='rdp')\n"
        "data = torch.randn(100, 3), torch.arange(100) // 50\n"
        "run = epsilons.fit(torch.nn.Linear(3, 2), data, plan, budgets=budgets)"
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output for output in notebook.cells[0].outputs if output.output_type == "display_data"]
    assert len(outputs) == 1
    assert outputs[0]["data"]["text/html"].startswith('<progress value="4" max="4"></progress> charged 4/4')


# ==== Plans, ledgers, runs and audits: the printed text, escaped, by the disclosure rules


RECIPE = Recipe(20, 50, 1.0)


class Shown(HTMLParser):
    """The tables, the text and the tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.text, self.tags = "", set()
        self.feed(page)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.add(tag)
        assert not attrs, f"<{tag}> has {attrs}: nothing is fetched, nothing runs"
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])

    def handle_data(self, data) -> None:
        self.text += data + "\n"
        if self.tables and self.tables[-1] and self.get_starttag_text() in ("<td>", "<th>"):
            self.tables[-1][-1].append(data)


def shown(thing) -> Shown:
    return Shown(thing._repr_html_())


def as_rows(table: display.Table) -> list[list[str]]:
    return [list(table[0]), *table[1]]


def of_large_groups(**options) -> epsilons.Plan:
    return plan(Budgets([0.7] * 40 + [2.0] * 60, 1e-3), RECIPE, "sample", "rdp", **options)


def of_one_person(alone: float, strategy: str = "uniform") -> epsilons.Plan:
    """One of 1,000 people has a budget of their own; under uniform all spend what this person does."""
    return plan(Budgets([alone] + [2.0] * 999, 1e-4), RECIPE, strategy, "rdp")


def charged(made: epsilons.Plan, steps: int = 3) -> Ledger:
    ledger = Ledger(made)
    for step in range(steps):
        ledger.charge(0, step)
    return ledger


def audit(suppressed: bool) -> AuditResult:
    """As an audit of two groups would leave it, the first of one person."""
    test = HypothesisTest("curve", 0.5)
    numbers = {"canaries": 250, "included": 125, "one_run": 0.111, "one_run_fdp": 0.222, "gaussian_estimate": 0.333}
    numbers |= {"gaussian_bound": 0.444, "mu": 0.1, "planned_mu": 0.1, "tests": (test,), "p_value": 0.5}
    groups = tuple(
        GroupResult(i, label, epsilon, 1e-4, 0.99 * epsilon, violated=False, **numbers)
        for i, (label, epsilon) in enumerate([("group 0" if suppressed else "0.3171", 0.3171), ("2", 2.0)])
    )
    measure = Measure("sample_rate", 0, 0, None, 0.0517, 0.0518, 0.001, "as planned")
    again = Reestimate((measure,), np.array([0.3169, 1.98]))
    return AuditResult("dirac", "0" * 64, 0.05, {}, groups, again, suppressed=suppressed)


# -- the same as in print ----------------------------------------------------------------------------------------------


def test_a_plan_shows_its_title_its_tables_its_notes_and_its_guarantee():
    made = of_large_groups()
    page = shown(made)
    assert page.tables == [as_rows(table) for _, table in display.phase_tables(made)]
    for line in [made.title, *made.notes, *made.guarantee.split("\n")]:
        assert line in page.text


def test_a_plan_of_several_phases_shows_a_table_for_each():
    made = plan(Budgets([0.7] * 40 + [2.0] * 60, 1e-3), RECIPE, "sequential", "rdp")
    assert len(made.phases) > 1
    assert len(shown(made).tables) == len(made.phases)


def test_a_ledger_and_a_run_show_what_was_charged_and_what_to_claim():
    made = of_large_groups()
    ledger = charged(made)
    run = Run(None, made, ledger.charged, ({"step": 3, "accuracy": 0.8765},))
    for thing in (ledger, run):
        page = shown(thing)
        assert page.tables == [as_rows(display.spend_table(made, (3,)))]
        assert "3 of 20 steps charged" in page.text
        assert display.CLAIM in page.text
    assert str(ledger).endswith(display.CLAIM)
    assert "8765" not in run._repr_html_()  # a metric, maybe of private data


def test_a_run_of_several_says_that_the_epsilons_are_of_all_together():
    run = Run(None, of_large_groups(runs=3), (20,), ())
    assert "those of all 3 runs of the plan together" in shown(run).text
    assert "together" not in shown(Run(None, of_large_groups(), (20,), ())).text


def test_an_audit_shows_its_tables_and_its_sentences():
    result = audit(suppressed=False)
    page = shown(result)
    assert page.tables == [as_rows(result.table()), as_rows(result.trace_table())]
    assert all(sentence in page.text for sentence in result.sentences)


# -- nothing else ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [lambda made: made, charged, lambda made: Run(None, made, (3,), ())])
def test_a_page_is_the_same_whatever_one_person_chose(view):
    """0.31 and 0.47 are both at most 0.5, so the rows are the same; all numbers of the plans differ."""
    first, second = of_one_person(0.31), of_one_person(0.47)
    assert first.noise_std != second.noise_std
    assert view(first)._repr_html_() == view(second)._repr_html_()


@pytest.mark.parametrize("strategy", ["uniform", "sample", "scale"])
def test_no_page_has_a_number_of_a_group_below_20(strategy):
    made = of_one_person(0.3171, strategy)
    page = made._repr_html_() + charged(made)._repr_html_() + Run(None, made, (3,), ())._repr_html_()
    numbers = [made.epsilons[0], *made.epsilon_spent(), *made.sample_rate, *made.clip_norm, *made.noise_multiplier]
    written = {shown for value in numbers for shown in (f"{value:.3g}", f"{value:.5g}") if len(shown) > 3}
    assert "0.317" in written
    assert not {number for number in written if re.search(rf"(?<![\d.]){re.escape(number)}", page)}
    assert not re.search(r"<td>1</td>|<td>999</td>", page)  # nor its size, by itself or by what is left
    assert "Suppressed" in page


def test_a_page_of_a_suppressed_audit_has_no_number_of_its_small_group():
    page = audit(suppressed=True)._repr_html_()
    assert not re.search(r"0\.3171|0\.31|0\.99|0\.0517|0\.0518|0\.3169|0\.111|0\.222|0\.444", page)
    assert "0.3169" in audit(suppressed=False)._repr_html_()


def test_text_from_elsewhere_is_escaped_and_runs_nothing():
    def named(budgets, recipe, accountant):
        return epsilons.planning.STRATEGIES["uniform"](budgets, recipe, accountant)

    named.__name__ = "<script>alert(1)</script>\x1b[31m"
    made = plan(Budgets([0.7] * 40 + [2.0] * 60, 1e-3), RECIPE, named, "rdp")
    page = shown(made)
    assert "script" not in page.tags
    assert "\x1b" not in page.text
    assert "<script>alert(1)</script>\\x1b[31m" in page.text
    for thing in (charged(of_large_groups()), audit(suppressed=False)):
        assert shown(thing).tags <= {"div", "p", "strong", "table", "caption", "thead", "tbody", "tr", "th", "td"}


def test_the_repr_of_a_run_shows_no_metrics(tmp_path):
    """Metrics hold counts per class and per group, which may be of private data and of fewer than 20 records."""
    made = plan(Budgets([1.0] * 100, 1e-3), RECIPE, accountant="rdp")
    metrics = ({"step": 7, "loss": 0.123, "accuracy": 0.456, "per_class": [[3, 11]], "per_group": [[5, 13]]},)
    run = Run(tmp_path / "a\x1b[31m", made, (7,), metrics)
    assert repr(run) == f"Run('{tmp_path}/a\\x1b[31m', 7 of 20 steps charged)"
    assert repr(Run(None, made, (20,), metrics)) == "Run(20 of 20 steps charged)"
    assert str([run]) == f"[{run!r}]"


# ==== Plans, ledgers, runs and audits: the printed text, escaped, by the disclosure rules


NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
FIRST_RUN = ROOT / "examples" / "notebooks" / "first_run.ipynb"

every_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)


def cells_of(notebook: Path) -> list[dict]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


@every_notebook
def test_a_notebook_is_kept_without_outputs(notebook):
    """Outputs may hold numbers of somebody's data, and paths of somebody's machine."""
    for cell in cells_of(notebook):
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
        assert cell["metadata"] == {}
        assert "attachments" not in cell
    metadata = json.loads(notebook.read_text(encoding="utf-8"))["metadata"]
    assert set(metadata) == {"kernelspec", "language_info"}
    assert metadata["language_info"] == {"name": "python"}


@every_notebook
def test_every_link_of_a_notebook_leads_to_a_file(notebook):
    text = "".join("".join(cell["source"]) for cell in cells_of(notebook) if cell["cell_type"] == "markdown")
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert targets
    assert [target for target in targets if not (notebook.parent / target).exists()] == []


def test_the_first_run_shows_plan_spends_pictures_and_reports(monkeypatch, capsys):
    plt.switch_backend("agg")  # before IPython looks loaded: pyplot would connect to it
    displays = in_a_notebook(monkeypatch)
    monkeypatch.setattr(plt, "show", lambda: pictures.append([len(axes.get_lines()) for axes in plt.gcf().axes]))
    pictures: list[list[int]] = []
    monkeypatch.setenv("EPSILONS_TINY", "1")
    names, results = run_cells(FIRST_RUN)
    assert [type(result) for result in results] == [epsilons.Plan, epsilons.Run]
    assert pictures == [[0] * 8, [0, 2]]  # digits; bars, and a curve for each run
    plt.close("all")
    plan, run = names["plan"], names["run"]
    assert all(f"<td>{level:g}" in plan._repr_html_() for level in (0.5, 1, 2))
    assert run.charged == (3,)
    assert [bundles[-1]["text/plain"].split("  ")[0] for bundles in displays.shown] == ["charged 3/3"] * 2
    pages = [Path(line) for line in capsys.readouterr().out.splitlines() if line.endswith(".html")]
    assert [page.name for page in pages] == ["internal.html", "release.html"]
    assert all("<html" in page.read_text(encoding="utf-8") for page in pages)


@pytest.mark.slow
def test_the_first_run_executes_in_a_real_kernel(monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(FIRST_RUN, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    kinds = {kind for output in shown for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= kinds
    assert not [output for output in shown if output.output_type == "error"]
