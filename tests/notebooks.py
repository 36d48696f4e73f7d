"""Notebooks in the tests: a stand-in for IPython's display, and a runner of a notebook's cells without a kernel."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass
class Displays:
    """What IPython.display.display was given: one list of bundles {MIME type: text} per display, newest last."""

    shown: list[list[dict[str, str]]] = field(default_factory=list)

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> SimpleNamespace:
        assert raw
        assert display_id  # IPython returns a handle only then
        versions = [bundle]
        self.shown.append(versions)

        def update(newer: dict[str, str], *, raw: bool) -> None:
            assert raw
            versions.append(newer)

        return SimpleNamespace(update=update)


def in_a_notebook(monkeypatch: Any, kernel: object = "a kernel") -> Displays:
    """Make IPython look loaded, with this kernel; None is IPython in a terminal."""
    displays = Displays()
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=kernel)  # type: ignore[attr-defined]
    ipython.version_info = (9, 0, 0)  # type: ignore[attr-defined]  # matplotlib asks for it
    display.display = displays.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return displays


def code_cells(notebook: Path) -> list[str]:
    """The sources of the code cells, in order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_cells(notebook: Path) -> tuple[dict[str, Any], list[Any]]:
    """Run all cells in one namespace. Returns its names, and the values of last expressions, which Jupyter displays."""
    names: dict[str, Any] = {"__name__": "__main__"}
    results = [_run_cell(source, f"{notebook.name}, cell {number}", names) for number, source in _numbered(notebook)]
    return names, [result for result in results if result is not None]


def _numbered(notebook: Path) -> list[tuple[int, str]]:
    return list(enumerate(code_cells(notebook), start=1))


def _run_cell(source: str, name: str, names: dict[str, Any]) -> Any:
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    return eval(compile(ast.Expression(last.value), name, "eval"), names) if last else None
