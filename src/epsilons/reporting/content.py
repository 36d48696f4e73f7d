"""The content of a report, as values. The HTML page and the JSON show the same content.

The version for release is made from fewer inputs; it is not censored afterwards. Where people chose their budgets, it
shows the tiers as they were declared, and nothing that depends on how many people hold which. Where nobody chose, since
the budgets are simulated or their shares declared, it shows the plan. If then a budget is shared by fewer than 20
records, nothing is included that was computed from all budgets together: rates and clip norms average to the recipe's,
so missing ones could be computed from the others. What remains depends on the suppressed budgets only through the
rows (`disclosure`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from .._version import __version__
from ..accounting import DESCRIPTIONS
from ..budgets.risk import as_contract
from ..core import disclosure
from ..core.files import UNWRITTEN, as_json
from ..ledger.run_json import About, RunSettings
from ..ledger.signatures import Signature, fingerprint
from ..planning import Plan, display, risk_profile
from ..planning.guarantee import RANDOMNESS
from ..planning.plan_numbers import SHARES
from . import lifetimes, population, sentences
from .load_run import RunRecord
from .membership import MembershipResult, shown
from .plan_words import Curve, PhaseTable, curve_of, phases_of
from .population import Evaluation, RosterRuns, Unit, last_evaluation
from .statements import Audited, Origins, Period, about_of, approved, audit_of, origins_of, period_of
from .statements import publish as what_to_publish

SCHEMA = 2

#: Names of models, losses, optimizers and versions that may be released; anything else might be a path or a note.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,39}")
_SOLVED = ("epsilon_spent", "curve", "phases")  # what depends on all budgets together
_OF_ALL = (*_SOLVED, "records", "accuracy_per_group")  # and what depends on how many hold which
#: Fields of a row that are shown: by name, so that a new one is not published by accident.
_OF_ROW = ("label", "tier", "epsilon", "at_least", "at_most", "delta", "records", "merged")
_VERSIONED = ("epsilons", "python", "torch", "numpy", "scipy", "dp-accounting")  # the last in older runs only


@dataclass(frozen=True)
class Status:
    """Steps of the run.

    state             "finished"; "stopped" before its end; "open" if the ledger was never closed
    charged, allowed  steps charged, and steps of the plan
    made              steps made, at most; None while open
    key_epochs        number of keys that the run had
    """

    state: Literal["finished", "stopped", "open"]
    charged: int
    allowed: int
    made: int | None
    key_epochs: int


@dataclass(frozen=True)
class Runs:
    """The run among those of its plan.

    number, of  this is run `number` of `of`
    records     how many of the plan's records it trained on; None if all
    """

    number: int
    of: int
    records: int | None


@dataclass(frozen=True)
class Signed:
    """A signature: who signed the "plan", "run" or "release" on which day, and whether it fits what is there now.

    date  a day for release, else a minute in UTC
    key   fingerprint of the key, which is proven; name and role are what its holder wrote. None if the file is damaged
    """

    of: str
    name: str | None
    role: str | None
    date: str | None
    key: str | None
    valid: bool


@dataclass(frozen=True)
class Group:
    """A row of promises and spends, as in `disclosure.DisplayRow`; epsilon_spent and charged are None if suppressed.

    right_guesses  at most so many of 100 guesses about a member are right (`planning.odds`); None if suppressed
    limits         declared and certified limits of a tier by risk; () for other budgets, and for merged rows
    lifetime       of a run that is charged to a registry, whose rows are lifetime budgets without a spend; else None
    bounds         of a merged row without right_guesses: what its promises allow, in words; else ""
    """

    label: str
    tier: str | None
    epsilon: float | None
    at_least: float | None
    at_most: float | None
    delta: float | None
    records: int | None
    merged: bool
    epsilon_spent: float | None
    charged: float | None
    right_guesses: int | None
    limits: tuple[display.Limit, ...]
    lifetime: lifetimes.Lifetime | None = None
    bounds: str = field(default="", metadata=UNWRITTEN)

    @property
    def odds_of(self) -> str:
        """Of what `right_guesses` is: a key of sentences.ODDS_OF."""
        if self.lifetime is not None:
            return "over a lifetime"
        return "by the promise" if self.epsilon_spent is None else "in this run"


@dataclass(frozen=True, kw_only=True)
class Content:
    """All that a report says; the fields are the keys of the JSON, and `note` is on the page only.

    about       what the caller wrote about the run, and which approvers signed; None if nothing
    period      when the model was trained
    summary     the first paragraphs
    odds        how often a guess about one member of each row is right, in sentences
    unit        what has one budget
    left_out    how many were left out for their budgets, by the rule of 20; internal only, None if none
    joined      how people, entries and rows were joined, and the counts; these are internal
    publish     what may be published, and what not
    signatures  of the plan, the run and its release
    origins     where bounds, categories and classes come from
    audited     the latest audit; None without one
    roster_runs how many runs had the same budgets; internal only
    tested, withdrawal  what holds for the people of the test data, and for those who withdraw
    runs        None for the only run of a plan, on all of its records
    membership  the latest attack on membership; internal only
    registry    id of the registry that the run is charged to; None for a run on its own
    balanced    True if it was trained with the balanced loss
    declared_shares  (classes, groups) as declared for it, what part of a class holds each budget; internal only
    suppressed  section -> why it, or a part of it, is not in this version
    made_with   name -> value, in the order shown
    """

    version: Literal["internal", "release"]
    run: str | None = None
    about: About | None
    period: Period
    summary: tuple[str, ...]
    status: Status
    runs: Runs | None
    randomness: str | None
    simulated: bool
    key_left: bool
    groups: tuple[Group, ...]
    note: str | None = field(default=None, metadata=UNWRITTEN)
    curve: Curve | None = None
    phases: tuple[PhaseTable, ...] | None = None
    odds: tuple[str, ...]
    unit: Unit
    left_out: str | None = None
    joined: tuple[str, ...]
    publish: tuple[str, ...]
    signatures: tuple[Signed, ...]
    origins: Origins
    accuracy: Evaluation | None
    balanced: bool
    declared_shares: list[list[float]] = field(default_factory=list)
    audited: Audited | None
    membership: MembershipResult | None = None
    roster_runs: RosterRuns | None = None
    registry: str | None
    tested: tuple[str, ...]
    withdrawal: tuple[str, ...]
    guarantee: str
    not_covered: tuple[str, ...]
    made_with: Mapping[str, str | int | float]
    versions: Mapping[str, str]
    hashes: Mapping[str, str]
    suppressed: Mapping[str, str]
    config: Mapping[str, Any] | None = None

    @property
    def is_draft(self) -> bool:
        """True for the version for release of a run that is not closed: it may not be published yet."""
        return self.version == "release" and self.status.state == "open"

    def to_dict(self) -> dict[str, Any]:
        """The content as JSON values; docs/report.md describes every key."""
        values: dict[str, Any] = as_json(self) | {
            "membership": None if self.membership is None else shown(self.membership.to_dict())
        }
        about = {"schema": SCHEMA, "document": "epsilons report", "version": values.pop("version")}
        return about | {"epsilons_version": __version__} | values


def make_content(record: RunRecord, release: bool) -> Content:
    """The content of the report of a run, internal or for release."""
    plan, settings = record.plan, record.settings
    shown, groups, hidden = _rows(record, release)
    is_seeded = settings.randomness == "seeded"
    status, runs, unit = _status(record), _runs(settings), population.unit_of(plan, settings)
    audited, stated = audit_of(record, release), origins_of(settings.metadata.provenance, release)
    accuracy, suppressed = last_evaluation(record, () if "records" in hidden else shown, release)
    suppressed |= hidden
    if release:
        suppressed["hashes"] = disclosure.HASHES_SUPPRESSED
    promised = plan.guarantee_of_run(
        settings.randomness, settings.features, population.stated(plan, settings, release), settings.registry_id
    )
    is_private = accuracy is not None and accuracy.data == "private"
    by_person = population.is_split_by_person(plan, settings)
    return Content(
        version="release" if release else "internal",
        status=status,
        runs=runs,
        randomness=settings.randomness if not release or settings.randomness in RANDOMNESS else None,
        simulated=settings.metadata.simulated,
        key_left=record.key_left,
        summary=(
            sentences.promise(plan, shown, settings.subset_records, settings.registry_id, _are_declared(settings)),
            *_conditions(settings, runs, audited),
            sentences.kept(plan.unit, is_seeded, record.is_bound, stated.read_off, stated.not_stated),
            sentences.finished(status.charged, status.allowed, status.made),
            *([sentences.resumed(status.key_epochs)] if status.key_epochs > 1 else []),
        ),
        about=approved(about_of(settings.about) or about_of(settings.metadata.about), record.signers),
        period=period_of(settings.started, settings.ended, release or plan.select is not None),
        groups=groups,
        odds=_odds(plan, groups, unit, is_seeded),
        unit=unit,
        joined=population.joined(settings.metadata.consent, release),
        publish=what_to_publish(record, release, stated, audited),
        signatures=_signatures(record, release),
        origins=stated,
        audited=audited,
        registry=settings.registry_id,
        tested=population.tested(settings.eval_data, bool(record.metrics), by_person, release),
        withdrawal=population.withdrawal(plan, unit, settings.registry_id, settings.metadata.config),
        accuracy=accuracy,
        balanced=settings.training.balance is not None,
        guarantee=promised if release else settings.guarantee or promised,
        not_covered=sentences.not_covered(plan, is_private, is_seeded, hidden, stated.read_off),
        made_with=_made_with(record, release, bool(hidden)),
        versions=_versions(settings.versions, release),
        hashes=_hashes(record, release),
        suppressed=suppressed,
        **({} if hidden else _solved(plan, lifetimes.labels(record))),
        **({} if release else _internal(record)),
    )


def _signatures(record: RunRecord, release: bool) -> tuple[Signed, ...]:
    """Of the plan, the run and its release; with the minute in UTC, for release with the day."""
    return tuple(_signed(one, release) for one in (*record.signed, *record.released))


def _signed(one: Signature, release: bool) -> Signed:
    name, role, date, key = (one.values.get(what) for what in ("name", "role", "date", "public_key"))
    of = one.values.get("of", "release")  # a damaged one of plan or run is refused
    when = date and (date[:10] if release else f"{date[:10]} {date[11:16]} UTC")
    return Signed(of, name, role, when, key and fingerprint(key), not one.wrong)


def _rows(
    record: RunRecord, release: bool
) -> tuple[tuple[disclosure.DisplayRow, ...], tuple[Group, ...], dict[str, str]]:
    """The rows, what the report says of them, and why it leaves out what was solved from all budgets together."""
    plan = record.plan
    if release and is_chosen(record):
        rows, declared = zip(*declared_tiers(record), strict=True)
        return rows, declared, dict.fromkeys(_OF_ALL, disclosure.CHOSEN_SUPPRESSED)
    if record.settings.registry_id is not None:
        tiers = lifetimes.tiers_of(record, release)
        return tuple(row for row, _ in tiers), tuple(_of_lifetime(*one) for one in tiers), {}
    shown = disclosure.display_rows(plan.groups, record.settings.metadata.tiers, release)
    is_suppressed = release and disclosure.has_small_cells(plan.groups)
    why = disclosure.of_unit(disclosure.SOLVED_SUPPRESSED, plan.unit)
    return shown, _groups(record, shown, is_suppressed), dict.fromkeys(_SOLVED, why) if is_suppressed else {}


def _solved(plan: Plan, labels: Sequence[str] | None) -> dict[str, Any]:
    """What was solved from all budgets together. labels: of the groups of a plan on accounts, which has no spend."""
    if plan.groups.starts is not None:
        return {"phases": phases_of(plan, labels)}
    note = sentences.summary_of_many(plan) if len(plan.epsilons) > disclosure.MOST_ROWS else None
    return {"note": note, "curve": curve_of(plan), "phases": phases_of(plan)}


def _internal(record: RunRecord) -> dict[str, Any]:
    """What only the internal version has."""
    settings = record.settings
    return {
        "run": record.path.resolve().name,
        "left_out": population.left_out(settings.metadata.left_out),
        "roster_runs": population.roster_runs(settings.counted, settings.registry_id),
        "membership": record.membership,
        "declared_shares": population.declared_shares(record.plan, settings.training.balance),
        "config": settings.metadata.config,
    }


def _conditions(settings: RunSettings, runs: Runs | None, audited: Audited | None) -> Iterator[str]:
    """What the promise depends on: the registry, the other runs of the plan, and an audit that contradicts it."""
    if settings.registry_id is not None:
        yield from sentences.charged(settings.registry_id, None if audited is None else audited.on_records)
    if settings.plan_slot is not None and not settings.plan_slot.of:
        yield sentences.SELECTED
    if runs is not None and runs.of > 1:
        yield sentences.one_of_several(runs.number, runs.of)
    if audited is not None and not audited.holds:
        yield audited.words


def _status(record: RunRecord) -> Status:
    charged, allowed = sum(record.charged), record.plan.steps
    if record.made is None:
        return Status("open", charged, allowed, None, record.key_epochs)
    made = sum(record.made)
    return Status("finished" if made == allowed else "stopped", charged, allowed, made, record.key_epochs)


def _runs(settings: RunSettings) -> Runs | None:
    slot, records = settings.plan_slot, settings.subset_records
    if slot is None or not slot.of:
        return None if records is None else Runs(1, 1, records)
    return Runs(slot.number, slot.of, records)


def _are_declared(settings: RunSettings) -> bool:
    """Whether the config takes each budget from a tier, with one delta: then nobody can have another one."""
    budgets = (settings.metadata.config or {}).get("budgets") or {}
    is_named = bool(budgets.get("tiers") or budgets.get("risks")) and not budgets.get("delta_column")
    return settings.registry_id is None and is_named


def is_chosen(record: RunRecord) -> bool:
    """Whether people chose their budgets, so that a release must not show how many chose which."""
    is_public = record.plan.adjacency == SHARES or record.settings.metadata.simulated
    return record.settings.registry_id is not None or not is_public


def declared_tiers(record: RunRecord) -> list[tuple[disclosure.DisplayRow, Group]]:
    """The tiers as they were declared: the same, whatever people chose (`disclosure.declared_rows`)."""
    if record.settings.registry_id is not None:
        return [(row, _of_lifetime(row, lifetime)) for row, lifetime in lifetimes.tiers_of(record, True)]
    plan, limits = record.plan, stated_limits(record)
    rows = disclosure.declared_rows(plan.epsilons, plan.delta, plan.counts, record.settings.metadata.tiers or {})
    values = ((risk_profile.of_promise(row, limits), limits.get(row.epsilon or 0.0, ())) for row in rows)
    return [
        (row, _without_spend(row, right_guesses=right, limits=display.declared_limits(*limit)))
        for row, (right, limit) in zip(rows, values, strict=True)
    ]


def _of_lifetime(row: disclosure.DisplayRow, lifetime: lifetimes.Lifetime) -> Group:
    return _without_spend(row, right_guesses=lifetime.right_guesses, limits=(), lifetime=lifetime)


def _without_spend(row: disclosure.DisplayRow, **values: Any) -> Group:
    return Group(**{name: getattr(row, name) for name in _OF_ROW}, epsilon_spent=None, charged=None, **values)


def _groups(record: RunRecord, shown: Sequence[disclosure.DisplayRow], is_suppressed: bool) -> tuple[Group, ...]:
    epsilon_spent, charged = record.plan.epsilon_spent(), record.plan.spent_after(record.charged)
    delta, declared = disclosure.shown_delta(record.plan.groups), stated_limits(record)
    charged = np.minimum(charged, epsilon_spent)  # fewer steps never cost more, also on an accountant's grid
    groups = []
    for row, right in zip(shown, risk_profile.of_rows(record.plan, shown, is_suppressed), strict=True):
        group = Group(
            **{name: getattr(row, name) for name in _OF_ROW},
            # With small cells no spend is shown: under uniform, every spend is the strictest record's budget.
            epsilon_spent=None if is_suppressed else float(epsilon_spent[row.groups].max()),
            charged=None if is_suppressed else float(charged[row.groups].max()),
            right_guesses=right,
            limits=() if row.merged else display.limits_of(record.plan, row.groups.start, is_suppressed),
            bounds=risk_profile.of_merged(row, delta, declared) if right is None else "",
        )
        groups.append(group)
    return tuple(groups)


def stated_limits(record: RunRecord) -> Mapping[float, Sequence[float]]:
    """{epsilon: limits} of the tiers by risk, held or not, as in `Groups`; of earlier versions those of the config."""
    if rows := record.settings.limits:
        values = [[math.inf if value is None else value for value in row] for row in rows]
        return {epsilon: limits for epsilon, *limits in values}
    budgets = (record.settings.metadata.config or {}).get("budgets") or {}
    risks = budgets.get("risks")
    return as_contract(risks, budgets["tail"], budgets["delta"])[0].limits if risks else {}


def _odds(plan: Plan, groups: Sequence[Group], unit: Unit, is_seeded: bool) -> tuple[str, ...]:
    """One sentence per row, of many rows one, about the largest number; of merged rows; and of what these odds are."""
    merged = [group for group in groups if group.bounds]
    known = [group for group in groups if group.right_guesses is not None]
    if len(groups) > sentences.MOST_LISTED:
        known = sorted(known, key=lambda group: group.right_guesses or 0)[-1:]
    whose = "person" if unit.is_person else "record"
    texts = [
        sentences.odds_of(
            group.label,
            group.tier,
            risk_profile.sentence(group.right_guesses or 100, shares_declared=plan.adjacency == SHARES, unit=whose)
            + sentences.of_lifetime(group.lifetime)
            + _of_promise(plan, group),
        )
        for group in known
    ]
    texts += [sentences.odds_of(one.label, one.tier, sentences.of_merged(one.bounds)) for one in merged]
    of = dict.fromkeys(sentences.ODDS_OF[group.odds_of] for group in (*known, *merged))
    return (*texts, *of, *([sentences.ODDS_SEEDED] if is_seeded else []))


def _of_promise(plan: Plan, group: Group) -> str:
    """What the promise of a row alone allows, beside odds of this run; "" for merged rows."""
    if group.epsilon is None or group.delta is None or group.odds_of != "in this run":
        return ""
    return f" The promise allows {risk_profile.right_of_tier(group.epsilon, group.delta, plan.groups.declared)}."


def _made_with(record: RunRecord, release: bool, is_suppressed: bool) -> dict[str, str | int | float]:
    plan, settings, training = record.plan, record.settings, record.settings.training
    hide_options = release and (is_suppressed or not _are_numbers(plan.options))
    facts: dict[str, str | int | float | None] = {
        "strategy": plan.strategy if hide_options else sentences.strategy(plan),
        "accountant": DESCRIPTIONS.get(plan.accountant, plan.accountant).rstrip(","),
        "neighbours": plan.adjacency,
        "sampler": f"Poisson: an independent coin for each {plan.unit} at every step",
        "expected batch": plan.batch_size,
        "randomness": RANDOMNESS.get(settings.randomness or "", None if release else settings.randomness),
        "secret key": "still in the run’s folder" if record.key_left else "destroyed",
        "engine": settings.performance.engine,
        "model": training.model,
        "parameters": training.parameters,
        "loss": training.loss,
        "optimizer": training.optimizer,
        "learning rate": training.lr,
        "momentum": training.momentum,
        "device": training.device,
        **_changes(settings, release, plan.select is not None),
    }
    if release:
        for name in ("engine", "model", "loss", "optimizer"):
            if not _NAME.fullmatch(str(facts[name])):
                facts[name] = None
        if not _NAME.fullmatch(plan.strategy):
            facts["strategy"] = None
        del facts["device"]
    return {name: value for name, value in facts.items() if value is not None}


def _changes(settings: RunSettings, release: bool, is_selected: bool) -> dict[str, str]:
    """From which step on which keys of the config had other values; for release, without names of tiers and columns."""
    found: dict[str, list[str]] = {}
    for one in settings.changes:
        when = "during the run" if release and is_selected else f"after step {one.step:,}"
        keys = [".".join(key.split(".")[:2]) for key in one.keys] if release else one.keys
        found.setdefault(f"changed {when}", []).extend(keys)
    beginning = "here are the values of the beginning"
    return {name: f"{', '.join(dict.fromkeys(keys))} ({beginning})" for name, keys in found.items()}


def _are_numbers(options: Mapping[str, Any]) -> bool:
    return all(_NAME.fullmatch(name) and isinstance(value, int | float) for name, value in options.items())


def _versions(versions: Mapping[str, str], release: bool) -> dict[str, str]:
    if not release:
        return dict(versions)
    return {name: versions[name] for name in _VERSIONED if _NAME.fullmatch(versions.get(name, ""))}


def _hashes(record: RunRecord, release: bool) -> dict[str, str]:
    if release:
        return {name: value for name, value in record.hashes.items() if name == "model.safetensors"}
    return {**record.hashes, "plan digest": record.plan.digest, "last line of the ledger": record.last_hash}
