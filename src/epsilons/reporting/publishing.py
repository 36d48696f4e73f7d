"""What of a run may be published, in sentences: the report, the model, the folder."""

from __future__ import annotations

from .audited import Audited
from .load_run import RunRecord
from .origins import Origins

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
