"""Progress in a notebook: shown by default, rewritten in place, and no more than a terminal shows."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import epsilons
from epsilons.training.fitting import progress
from notebooks import Displays, in_a_notebook
from small_runs import FEATURES, some_budgets, some_data, some_plan


def fitted(**options) -> epsilons.Run:
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 3)
    return epsilons.fit(model, some_data(), some_plan(), budgets=some_budgets(), lr=0.5, seed=1, **options)


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
    epsilons.fit(nn.Linear(FEATURES, 3), (x, y), plan, budgets=budgets, lr=0.5)
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
        epsilons.fit(model, some_data(), some_plan(), **options)
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
