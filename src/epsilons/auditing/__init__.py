"""Auditing: does the promise hold in practice? An attack on the library's own path, bounds, tests and a verdict.

To add an attack: a file with a function `(plan, setting) -> Evidence`, and a line in ATTACKS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from ..accounting import Accountant
from ..errors import InputError
from ..planning import Plan
from ..training import Performance
from .canaries import Evidence, Loss, Setting, canaries
from .concluding import conclude
from .picture import draw
from .recorder import Trace
from .result import AuditResult, GroupFinding
from .scores import Scores
from .subjects import chosen_groups, only, subject_of

#: From a plan and a setting to scores and a recorded run.
Attack = Callable[[Plan, Setting], Evidence]

ATTACKS: Mapping[str, Attack] = {"canaries": canaries}


def audit(
    run: str | Path | Plan,
    attack: str | Attack = "canaries",
    *,
    canaries: int = 1000,
    model: nn.Module | None = None,
    dataset: tuple[Tensor, Tensor] | None = None,
    loss: str | Loss = "cross_entropy",
    performance: Performance | None = None,
    randomness: str | None = None,
    seed: int | None = None,
    alpha: float = 0.05,
    groups: Sequence[int] | None = None,
    accountant: Accountant | None = None,
    progress: bool = False,
) -> AuditResult:
    """Audit a plan, or a run: train once more under its plan, with canaries, and test what comes of it.

    run         a run's folder (audit.json and audit.svg are written into it), a saved plan, or a Plan
    attack      a name in ATTACKS, or a function
    canaries    per group; half of them are in, on average
    model, dataset, loss
                the real records trained along, (inputs, targets), and what learns from them: a copy of the model,
                thrown away afterwards. By default logistic regression on the embedded digits: what the plan promises
                does not depend on either. AuditResult do not depend on the values of real records
    performance as in make_private; by default with the run's engine
    randomness  as in make_private; by default the run's
    seed        repeats the audit
    alpha       chance of calling an honest run violated; bounds have confidence 1 − alpha each
    groups      indices of the plan's groups to audit; by default up to 8 of those that 20 or more records share
    accountant  the function that certified the plan, if it is not one of the library's

    Costs as much time as training that model for the plan's steps. Raises InputError for what cannot be audited.
    """
    plan, folder, own_engine, own_randomness = subject_of(run, accountant)
    if not 0 < alpha < 0.5:
        raise InputError(f"alpha must lie between 0 and 0.5; {alpha} arrived.")
    chosen = chosen_groups(plan, groups)
    audited = only(plan, chosen)
    setting = Setting(
        canaries=canaries,
        model=model,
        dataset=dataset,
        loss=loss,
        performance=performance or Performance(engine=own_engine),
        randomness=randomness or own_randomness,
        seed=seed,
        progress=progress,
    )
    name = attack if isinstance(attack, str) else str(getattr(attack, "__name__", type(attack).__name__))
    found = _attack(attack)(audited, setting)
    findings = conclude(
        found,
        attack=name,
        alpha=alpha,
        chosen=chosen,
        whole=plan,
        setting={
            "trained": found.words,
            "steps": plan.steps,
            "engine": setting.engine_name,
            "randomness": setting.randomness,
            "seeded": seed is not None,
        },
    )
    if folder is not None:
        findings.save(folder.findings)
        draw(findings, folder.path / "audit.svg")
    return findings


def _attack(which: str | Attack) -> Attack:
    if callable(which):
        return which
    if which not in ATTACKS:
        raise InputError(f"No attack is called {which!r}; there are: {', '.join(ATTACKS)}.")
    return ATTACKS[which]


__all__ = [
    "ATTACKS",
    "Attack",
    "AuditResult",
    "Evidence",
    "GroupFinding",
    "Scores",
    "Setting",
    "Trace",
    "audit",
    "draw",
]
