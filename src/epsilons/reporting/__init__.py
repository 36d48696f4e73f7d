"""Report: JSON and one self-contained HTML page, made from a run's folder. No torch in here.

    epsilons.report("runs/first").save("report.html")                     # internal: confidential
    epsilons.report("runs/first", release=True).save("report-release.html")

Evidence is read and checked, contents are what of it is said, the page sets them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..accounting import Accountant
from ..errors import RunError
from ..escaping import json_text
from ..files import write_json, write_text
from . import load_run
from .content import SCHEMA, Contents, contents
from .html import MARK, page

#: A report is written over an earlier report only; its first characters tell.
_MARKS = (MARK, '"document": "epsilons report"')


@dataclass(frozen=True)
class Report:
    """What one run promised, spent and reached; made by `report`.

    contents  all that it says
    """

    contents: Contents

    @property
    def release(self) -> bool:
        """True if this version is made to leave the house."""
        return self.contents.release

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; every key is named in docs/report.md."""
        return self.contents.to_dict()

    def to_html(self) -> str:
        """As one page that needs nothing else: no script, no font, no picture from elsewhere."""
        return page(self.contents)

    def save(self, path: str | Path) -> Path:
        """Write x.html or x.json, whole or not at all: the internal version for the owner's eyes alone (mode 0600).

        Raises RunError for another ending, where it cannot be written, and where it would replace a file that is no
        report.
        """
        file = Path(path)
        check_place(file)
        if file.suffix == ".json":
            return write_json(file, self.to_dict(), self.release)
        return write_text(file, self.to_html(), self.release)

    def __repr__(self) -> str:
        return f"Report({'for release' if self.release else 'internal'}, {self.contents.state})"


def report(path: str | Path, release: bool = False, accountant: Accountant | None = None) -> Report:
    """The report about the run in this folder.

    path     one run's folder, as `fit`, `make_private` or `epsilons train` wrote it
    release  False: internal and confidential. True: what fewer than 20 records share is merged, and nothing is in
             that was measured on private data or would let hidden budgets be worked out
    accountant
             the function that certified the plan, if it is not one of the library's

    Raises RunError if the folder holds no whole run, BudgetExceededError if its plan does not keep the budgets,
    LedgerError if its ledger was altered, PlanError if the plan was certified by a function that was not given.
    """
    return Report(contents(load_run.load_run(path, accountant), release))


def check_place(file: Path) -> None:
    """Raise RunError unless a report may be written here."""
    if file.suffix not in (".html", ".json"):
        raise RunError(f"A report is saved as .html or .json; {file.name!r} ends in neither.")
    try:
        with file.open(encoding="utf-8") as opened:
            beginning = opened.read(400)
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError):
        beginning = ""
    if not any(mark in beginning for mark in _MARKS):
        raise RunError(f"{file} is there already and is no report; it is not written over. Choose another name.")


def dumps(made: Report) -> str:
    """The report as strict JSON text."""
    return json_text(made.to_dict())


__all__ = ["SCHEMA", "Contents", "Report", "check_place", "dumps", "report"]
