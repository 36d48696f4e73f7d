"""What the caller of a run stated: who is responsible and what for, and where bounds, categories and classes come from.

Bounds, categories and classes are declared, or read off the data, which no budget covers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from ..core.disclosure import of_unit
from ..data.arrays import Provenance, in_words, undeclared
from ..errors import RunError, parsed_json
from ..ledger.run_json import About, Strict
from .load_run import RunRecord
from .sentences import listed

# -- Who is responsible for a run and what it is for, and when it was trained

_TIME = "%Y-%m-%dT%H:%M:%SZ"

#: Longer texts are shown up to here on the page. The JSON holds them whole.
MOST_CHARACTERS = 2000


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

    >>> about_of({"purpose": "triage", "approvers": ["board", 7]})
    About(purpose='triage', ..., approvers=['board'])
    """
    found = values if isinstance(values, Mapping) else {}
    texts: dict[str, Any] = {name: text for name in About.model_fields if _is_text(text := found.get(name))}
    approvers = found.get("approvers")
    texts["approvers"] = list(filter(_is_text, approvers if isinstance(approvers, list) else [approvers]))
    return About.model_construct(**texts) if any(texts.values()) else None


def approved(about: About | None, signers: Mapping[str, str] | None) -> About | None:
    """The same, with what is known of each approver: a name in the config is no proof.

    signers  "NAME" or "NAME, ROLE" of a signature -> what was signed; None where no signature was read
    """
    unsigned = "named in the config" + (", not signed" if signers is not None else "; signatures are not read here")
    signed = {
        name: f"a signature of the {of} has this name; it proves the key, and not the name"
        for name, of in (signers or {}).items()
    }
    named = [f"{one} ({signed.get(one, unsigned)})" for one in (about.approvers if about else ())]
    return about and about.model_copy(update={"approvers": named})


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def stated(about: About | None) -> dict[str, list[str]]:
    """Name -> paragraphs, for the page: of what is stated."""
    texts = {name.replace("_", " "): text for name, text in about or () if text}
    lists = {name: text if isinstance(text, list) else [str(text)] for name, text in texts.items()}
    return {name: [part for text in found for part in _paragraphs(text)] for name, found in lists.items()}


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


# -- Where bounds, categories and classes come from

_ONE = {"bounds": "the bounds of one column", "categories": "the categories of one column", "classes": "the classes"}
_MANY = {"bounds": "the bounds of {} columns", "categories": "the categories of {} columns", "classes": "the classes"}


@dataclass(frozen=True)
class Origins:
    """What preprocessing depends on.

    read_off    what was read off the data, in words; None if nothing was
    not_stated  what may have been: its origin is not stated; None if all is stated
    recorded    False if the run says nothing about it
    sentences   the same for readers
    """

    read_off: str | None
    not_stated: str | None
    recorded: bool
    sentences: tuple[str, ...]


def origins_of(entries: Any, release: bool) -> Origins:
    """From the entries in run.json. A report for release names no columns."""
    if not isinstance(entries, list):
        return Origins(None, None, False, (_NOT_RECORDED,))
    open_ones = [_plain(entry) for entry in undeclared(entries)]
    read_off = [entry for entry in open_ones if entry.source == "read off the data"]
    others = [entry for entry in open_ones if entry.source != "read off the data"]
    name = _counted if release else in_words
    first, second = (name(some) if some else None for some in (read_off, others))
    return Origins(first, second, True, tuple(_sentences(first, second, len(entries))))


_NOT_RECORDED = (
    "This run did not record where the bounds, categories and classes of its preprocessing come from. They are covered "
    "only if they were not read off these data."
)


def _sentences(read_off: str | None, not_stated: str | None, entries: int) -> list[str]:
    sentences = []
    if read_off:
        sentences.append(
            f"NOT COVERED: {read_off} were read off the private data, without noise and outside of every budget. They "
            "may show what single people have, such as the highest income. To be covered, replace them by values that "
            "are known without looking at the data, and train again."
        )
    if not_stated:
        sentences.append(
            f"Not stated: where {not_stated} come from. They are covered only if they were not read off these data."
        )
    if not sentences and entries:
        sentences.append(
            "All bounds, categories and classes of the preprocessing were declared: the run’s config states that they "
            "were not read off the data. Nothing checked this statement."
        )
    return sentences


def _plain(entry: Provenance) -> Provenance:
    """The entry, with the kind of its values among those that are known."""
    return entry if str(entry.what) in _ONE else replace(entry, what="bounds")


def _counted(entries: Sequence[Provenance]) -> str:
    """
    >>> _counted([Provenance("age", "bounds", "declared"), Provenance("fee", "bounds", "declared")])
    'the bounds of 2 columns'
    """
    counts = Counter(entry.what for entry in entries)
    return listed([_ONE[what] if count == 1 else _MANY[what].format(count) for what, count in counts.items()])


# -- The verdict of a run's latest audit, as a report shows it. The audit's file is audit.json in the run's folder

VERDICTS = {
    True: "An audit attacked the training with synthetic records and found no contradiction to the promise. An audit "
    "can show that a promise is broken, never that it is kept.",
    False: "CONTRADICTED: an audit found what the plan cannot explain. Do not rely on the promise before this is "
    "explained, and do not publish the model.",
}


class AuditedGroup(Strict):
    """One audited budget.

    epsilon        promised
    epsilon_spent  certified by the plan, of one run
    canaries       number of synthetic records
    at_least       lower bound of one run, which holds for any mechanism; None if it is not finite
    estimate       an estimate, which is no bound and may be above the truth; None if not finite
    violated       True if the scores cannot come from the plan
    """

    epsilon: float
    epsilon_spent: float
    canaries: int
    at_least: float | None = Field(alias="one_run")
    estimate: float | None = Field(alias="gaussian_estimate")
    violated: bool


class _File(Strict):
    """audit.json, as far as it is shown."""

    document: Literal["epsilons audit"]
    attack: str
    plan: str
    alpha: float
    setting: dict[str, Any]
    verdict: Literal["consistent", "violated"]
    holds: bool
    sentences: list[str]
    groups: list[AuditedGroup]


@dataclass(frozen=True)
class Audited:
    """The latest audit.

    verdict, holds  as in audit.json
    words           the verdict for readers
    confidence      of each bound
    on_records      True if it trained on records that its caller gave. Then it is left out of a report for release,
                    unless it found a contradiction
    groups          audited budgets; None for release
    sentences       of the audit; None for release
    """

    verdict: Literal["consistent", "violated"]
    holds: bool
    words: str
    attack: str
    confidence: float
    on_records: bool
    groups: tuple[AuditedGroup, ...] | None
    sentences: tuple[str, ...] | None


def audit_of(record: RunRecord, release: bool) -> Audited | None:
    """The audit in a run's folder; None without one, and for release if it is internal.

    Raises RunError if it is damaged or of another plan.
    """
    path = record.path / "audit.json"
    if not path.is_file():
        return None
    advice = "Audit the run again, or remove the file."
    try:
        found = _File.model_validate(parsed_json(path.read_bytes()))
    except (OSError, ValueError):
        raise RunError(f"{path} is not what an audit writes. {advice}") from None
    if found.plan != record.plan.digest:
        raise RunError(f"{path} is about another plan than this run's. {advice}")
    on_records = bool(found.setting.get("real_records"))
    holds = found.holds and found.verdict == "consistent" and not any(group.violated for group in found.groups)
    if release and on_records and holds:
        return None  # no guarantee covers a training on records outside of the run
    return Audited(
        verdict=found.verdict,
        holds=holds,
        words=of_unit(VERDICTS[holds], record.plan.unit),
        attack=found.attack if not release or found.attack == "canaries" else "a custom attack",
        confidence=1 - found.alpha,
        on_records=on_records,
        groups=None if release else tuple(found.groups),
        sentences=None if release else tuple(found.sentences),
    )


# -- What of a run may be published, in sentences: the report, the model, the folder

FOLDER = (
    "The run’s folder is internal as a whole: plan.json and ledger.jsonl hold every budget, and metrics.jsonl holds "
    "scores."
)


PAGES = (
    "Internal, too: plans, their pages and comparisons, pages of attacks, and what epsilons consent check, registry "
    "show and verify print. Sheets for people, the model card, and annexes that their authors completed may be given "
    "away."
)
AUDIT = "Of the audit, the version for release has the verdict at most. Its numbers are internal."


def publish(record: RunRecord, release: bool, origins: Origins, audited: Audited | None) -> tuple[str, ...]:
    """What may be published, and what not."""
    if not release:
        closed = "may be" if record.made is not None else "is a draft until the run is closed"
        page = f"This version of the report may not be published. Its version for release {closed}."
    elif record.made is not None:
        page = "This version of the report may be published."
    else:
        page = "This version of the report is a draft for internal use until the run is closed. Then make it again."
    others = [] if release else [PAGES, *([] if audited is None else [AUDIT])]
    return page, model(record, origins, audited), FOLDER, *others


def model(record: RunRecord, origins: Origins, audited: Audited | None) -> str:
    """Whether the model may be published. `releasing.release` refuses by the same rules, but reads no audit."""
    if record.made is None or record.key_left:
        return "The model may not be published yet: the run is not finished, and its secret key may still exist."
    if record.settings.randomness == "seeded":
        return "The model may not be published: the run was seeded, and with the seed the noise can be removed."
    if audited is not None and not audited.holds:
        return "The model may not be published as long as the contradiction that the audit found is not explained."
    if origins.read_off:
        return (
            f"The model may not be published as covered by the guarantee, because {origins.read_off} were read off the "
            "data. Declare them and train again."
        )
    if origins.not_stated or not origins.recorded:
        what = origins.not_stated or "the bounds, categories and classes of its preprocessing"
        return f"The model may be published only if {what} were not read off the data. This run does not state it."
    claim = (
        "the promised budgets as the claim"
        if record.settings.registry_id is None
        else "the lifetime budgets in the registry as the claim"
    )
    writes = "epsilons release writes a folder that holds nothing else."
    about = about_of(record.settings.about) or about_of(record.settings.metadata.about)
    if about is None or not about.recipients:
        return f"The model may be published, with {claim}. {writes}"
    return (
        f"As far as these budgets go, the model may be published, with {claim}. Whether it is published depends "
        f"on the recipients named above. {writes}"
    )
