"""The notebooks in examples/notebooks run from top to bottom, show what they promise, and are kept without outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

import epsilons
from notebooks import in_a_notebook, run_cells
from pages import ROOT

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
