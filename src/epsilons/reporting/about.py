"""Who is responsible for a run and what it is for, as its caller wrote, and when it was trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

_TIME = "%Y-%m-%dT%H:%M:%SZ"

#: Longer texts are shown up to here on the page. The JSON holds them whole.
MOST_CHARACTERS = 2000


@dataclass(frozen=True)
class About:
    """Free texts of the caller; None where not stated."""

    purpose: str | None
    responsible: str | None
    contact: str | None

    @property
    def stated(self) -> dict[str, list[str]]:
        """Name -> paragraphs, for the page: of the texts that are stated."""
        texts = {"purpose": self.purpose, "responsible": self.responsible, "contact": self.contact}
        return {name: _paragraphs(text) for name, text in texts.items() if text and text.strip()}


@dataclass(frozen=True)
class Period:
    """Begin and end of training in UTC: days for release, seconds in the internal version; None if not recorded."""

    started: str | None
    ended: str | None

    @property
    def in_words(self) -> str:
        """For the page."""
        if self.started is None:
            return "not recorded: the run was made by an earlier version"
        if self.ended is None:
            return f"from {_readable(self.started)}; it has not ended, or its end was not recorded"
        if _readable(self.started) == _readable(self.ended):
            return _readable(self.started)
        return f"from {_readable(self.started)} to {_readable(self.ended)}"


def about_of(values: Any) -> About | None:
    """What the caller wrote. Values of another form are ignored: metadata may hold anything.

    >>> about_of({"purpose": "triage"})
    About(purpose='triage', responsible=None, contact=None)
    """
    if not isinstance(values, Mapping):
        return None
    purpose, responsible, contact = (
        text if isinstance(text := values.get(name), str) and text.strip() else None
        for name in ("purpose", "responsible", "contact")
    )
    return About(purpose, responsible, contact) if purpose or responsible or contact else None


def period_of(started: str | None, ended: str | None, release: bool) -> Period:
    """The times of a run; what is not a time in UTC counts as not recorded."""
    times = [time if time is not None and _is_time(time) else None for time in (started, ended)]
    first, last = ((time[:10] if release else time) if time else None for time in times)
    return Period(first, last)


def _is_time(text: str) -> bool:
    try:
        return datetime.strptime(text, _TIME).strftime(_TIME) == text
    except ValueError:
        return False


def _readable(time: str) -> str:
    """
    >>> _readable("2026-11-23T16:12:51Z"), _readable("2026-11-23")
    ('2026-11-23 16:12 UTC', '2026-11-23')
    """
    return f"{time[:10]} {time[11:16]} UTC" if len(time) > 10 else time


def _paragraphs(text: str) -> list[str]:
    """The lines of a text that are not empty; a long text is cut."""
    cut = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} … (cut here; the JSON holds the whole)"
    return [line.strip() for line in re.split(r"\r\n|\n|\r", cut) if line.strip()]
