"""The verdict of a run's latest audit, as a report shows it. The audit's file is audit.json in the run's folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from ..core.disclosure import of_unit
from ..errors import RunError, parsed_json
from ..ledger.run_json import Strict
from .load_run import RunRecord
from .statements import Origins

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


def publish(record: RunRecord, release: bool, origins: Origins, audited: Audited | None) -> tuple[str, ...]:
    """What may be published, and what not."""
    page = (
        "This version of the report may be published."
        if release
        else "This version of the report may not be published. Its version for release may be."
    )
    return page, model(record, origins, audited), FOLDER


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
        "the claim that is certified for the whole plan"
        if record.settings.registry_id is None
        else "the lifetime budgets in the registry as the claim"
    )
    return f"The model may be published, with {claim}. `epsilons release` writes a folder that holds nothing else."
