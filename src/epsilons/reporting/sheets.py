"""Sheets for the people in the data: one for each declared tier and language, without numbers but odds and dates.

A sheet follows from what was declared (tiers, delta, [about]) and from the days of the training. It does not depend on
any person's choice, so there is nothing in it that the rule of 20 must hide. Its odds are those of the promise: at
least as high as those that a report computes from the plan. A language is one file in `languages/`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..accounting import Accountant
from ..core.files import write_text
from ..errors import RunError
from ..ledger.run_folder import now
from ..planning.plan_numbers import SHARES
from .content import Content, declared_tiers, make_content
from .html import check_marked, sheet_page
from .load_run import load_run

LANGUAGES = Path(__file__).parent / "languages"
SECTIONS = ("chosen", "odds", "done", "withdraw", "stays", "signed")
#: At the beginning of every sheet.
MARK = '<meta name="generator" content="epsilons sheet">'
BLANK = "_" * 24  # what is not stated, to be written by hand


def save_sheets(path: str | Path, folder: Path, accountant: Accountant | None = None) -> list[Path]:
    """Write a sheet for each declared tier of a run in each language, as NUMBER-TIER.LANGUAGE.html.

    Raises RunError for a run of which no sheet can say that a limit was chosen, promised to a person, and kept.
    """
    record = load_run(path, accountant)
    content, tiers = make_content(record, release=True), record.settings.metadata.tiers or {}
    promised = {group.epsilon: group.right_guesses for _, group in declared_tiers(record)}
    if reasons := _reasons(content, tiers, promised, len(set(record.plan.delta.tolist()))):
        raise RunError(f"{path} has no sheets for people: {'; '.join(reasons)}.")
    pages = {}
    for number, (tier, epsilon) in enumerate(tiers.items(), start=1):
        name = re.sub(r"\W+", "-", tier).strip("-").lower()[:40] or "tier"
        others = {_words(name): promised[value] for name, value in tiers.items() if name != tier}
        values = {"tier": _words(tier), "right": promised[epsilon], "others": others, "today": now()[:10]}
        for file in sorted(LANGUAGES.glob("*.toml")):
            pages[folder / f"{number}-{name}.{file.stem}.html"] = _page(file, content, values)
    for target in pages:
        check_marked(target, (MARK,), "a sheet for people")
    return [write_text(target, page, release=True) for target, page in pages.items()]


def _words(tier: str) -> str:
    """
    >>> _words("for_all")
    'for all'
    """
    return " ".join(tier.replace("_", " ").split()) or tier


def _reasons(
    content: Content, tiers: Mapping[str, float], promised: Mapping[float | None, int | None], deltas: int
) -> list[str]:
    """promised: {epsilon: right guesses} of the tiers as they were declared; deltas: how many there are"""
    stated, audited, charged = content.origins, content.audited, content.registry is not None
    held = {*tiers.values()} <= {*promised}
    found = {
        "it states no tiers ([budgets] tiers)": not tiers,
        "its people have several deltas, so no tier promises one": deltas > 1 and not charged,
        "its tiers are not those of the registry": charged and not held,
        "its tiers are not those that most of its people hold": tiers and not (charged or held),
        "its tiers are simulated, so nobody chose them": content.simulated,
        "its budgets are of rows, and a person may have several (data.person)": not content.unit.is_person,
        "it is not finished": content.status.state == "open" or content.key_left,
        "it was seeded, and with the seed the noise can be removed": content.randomness == "seeded",
        "an audit contradicts its promise": audited is not None and not audited.holds,
        f"{stated.read_off} were read off the data": stated.read_off,
        f"it is not stated where {stated.not_stated} come from (data.read_off)": stated.not_stated,
    }
    return [reason for reason, holds in found.items() if holds]


def _page(file: Path, content: Content, values: Mapping[str, Any]) -> str:
    texts = tomllib.loads(file.read_text(encoding="utf-8"))
    days = {"today": values["today"], "started": content.period.started, "ended": content.period.ended}
    named = {**values, **{name: _day(day, texts) for name, day in days.items()}}
    for name in ("purpose", "responsible", "contact"):
        named[name] = getattr(content.about, name, None) or BLANK
    stated = {name: getattr(content.about, name, None) for name in ("legal_basis", "recipients", "retention")}
    stated["others"] = "; ".join(_choice(name, right, texts) for name, right in values["others"].items())
    named |= stated
    holds = {
        "always",
        "rights",
        *(name for name, text in stated.items() if text),
        *_conditions(content, values["right"]),
    }
    shown = {name: [text for key, text in texts[name].items() if key in holds] for name in SECTIONS}
    filled = {name: "\n\n".join(map(str.strip, parts)).format_map(named) for name, parts in shown.items()}
    sections = {name: text.split("\n\n") for name, text in filled.items()}
    heads = {name: texts[name].format_map(named) for name in ("title", "audience", "made")}
    return sheet_page(MARK, file.stem, values["right"], {**texts, **heads}, sections)


def _choice(tier: str, right: int, texts: Mapping[str, Any]) -> str:
    filled: str = texts["no_limit" if right == 100 else "choice"].format(tier=tier, right=right)
    return filled


def _conditions(content: Content, right: int) -> Iterator[str]:
    """Those that hold for a tier of this run; none of the test without test data."""
    yield "once" if content.registry is None else "lifetime"
    yield "open" if right == 100 else "limit"
    yield "hidden" if content.made_with["neighbours"] == SHARES else "listed"
    yield "day" if content.period.started == content.period.ended else "days"
    if len(content.tested) > 1:
        yield "test_private" if content.accuracy is None else "test_public"


def _day(day: str | None, texts: Mapping[str, Any]) -> str:
    if day is None:
        return BLANK
    year, month, number = map(int, day.split("-"))
    filled: str = texts["date"].format(day=number, month=texts["months"][month - 1], year=year)
    return filled
