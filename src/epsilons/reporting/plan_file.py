"""Where the page of a plan is written: a new file, or in the place of another such page."""

from __future__ import annotations

from pathlib import Path

from ..errors import RunError
from ..files import write_text
from ..planning import Plan
from .html import PLAN_MARK, plan_page
from .plan_page import About, make_page


def save_page(plan: Plan, about: About, path: Path) -> Path:
    """Write the page, whole or not at all, readable by its owner alone.

    Raises RunError for another ending, if the file cannot be written, and if it would replace something else.
    """
    check_replaceable(path)
    return write_text(path, plan_page(make_page(plan, about)))


def check_replaceable(path: Path) -> None:
    """Raise RunError unless the page of a plan may be written to this file."""
    if path.suffix != ".html":
        raise RunError(f"The page of a plan is saved as .html, got {path.name!r}.")
    try:
        with path.open(encoding="utf-8") as opened:
            beginning = opened.read(400)
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError):
        beginning = ""
    if PLAN_MARK not in beginning:
        raise RunError(f"{path} exists and is not the page of a plan, so it is not replaced. Choose another name.")
