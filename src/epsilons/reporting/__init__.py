"""Reports: JSON and a self-contained HTML page, made from a run's folder. This package does not import torch.

    epsilons.report("runs/first").save("report.html")                     # internal: confidential
    epsilons.report("runs/first", release=True).save("report-release.html")

`load_run` reads and checks the folder, `content` and `sentences` make what a report says, and `html` renders it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..accounting import Accountant
from ..core.files import write_json, write_text
from ..errors import RunError, app_packages, json_text

with app_packages():
    from .content import Content, make_content
    from .html import MARK, check_marked, page
    from .load_run import load_run
    from .releasing import release

#: The first characters of a report, in HTML and in JSON. No other file is replaced.
_MARKS = (MARK, '"document": "epsilons report"')


@dataclass(frozen=True)
class Report:
    """What one run promised, spent and reached; made by `report`."""

    content: Content

    @property
    def release(self) -> bool:
        """True for the version that may be published, once the run is closed."""
        return self.content.version == "release"

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values; docs/report.md describes every key."""
        return self.content.to_dict()

    def to_html(self) -> str:
        """The report as one HTML page without scripts, fonts or pictures from elsewhere."""
        return page(self.content)

    def save(self, path: str | Path) -> Path:
        """Write the report as .html or .json, whole or not at all.

        Only the owner may read the internal version, and that for release until the run is closed (mode 0600).
        Raises RunError for another ending, if the file cannot be written, and if it would replace a file that is not a
        report.
        """
        file = Path(path)
        check_replaceable(file)
        is_public = self.release and not self.content.is_draft
        if file.suffix == ".json":
            return write_json(file, self.to_dict(), is_public)
        return write_text(file, self.to_html(), is_public)

    def __repr__(self) -> str:
        return f"Report({'for release' if self.release else 'internal'}, {self.content.status.state})"


def report(path: str | Path, release: bool = False, accountant: Accountant | None = None) -> Report:
    """Make the report of a run. The run's plan and ledger are verified again.

    path        folder of one run, as `fit`, `make_private` or `epsilons train` wrote it
    release     False: the internal, confidential version. True: groups of fewer than 20 records are merged, and
                nothing is included that was measured on private data or from which their budgets could be computed
    accountant  the function that certified the plan, if it is not one of the library's

    Raises RunError if the folder holds no complete run, BudgetExceededError if its plan exceeds the budgets,
    LedgerError if its ledger was altered, PlanError if the plan was certified by a function that was not given.

    >>> import epsilons
    >>> epsilons.report("nowhere")
    Traceback (most recent call last):
    epsilons.errors.RunError: nowhere does not exist. Give the folder of one run, e.g. runs/first.
    """
    return Report(make_content(load_run(path, accountant), release))


def check_replaceable(file: Path) -> None:
    """Raise RunError unless a report may be written to this file."""
    if file.suffix not in (".html", ".json"):
        raise RunError(f"A report is saved as .html or .json, got {file.name!r}.")
    check_marked(file, _MARKS, "a report")


def dumps(report: Report) -> str:
    """The report as strict JSON text."""
    return json_text(report.to_dict())


__all__ = ["Report", "check_replaceable", "dumps", "release", "report"]
