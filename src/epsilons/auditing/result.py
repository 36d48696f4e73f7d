"""AuditResult: what an audit has to say, as values, as tables and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._version import __version__
from ..disclosure import AUDIT_SUPPRESSED
from ..files import write_json
from ..plain import plain
from ..planning.display import Table, aligned, number
from .hypothesis_tests import Test
from .reestimate import Measure, Retelling

SCHEMA = 1

WHAT_IT_SHOWS = (
    "An audit can show that a promise is broken, never that it is kept. Bounds hold with {confidence:.0%} confidence "
    "each; the verdict calls an honest run violated with a chance of at most {alpha:.0%}."
)


@dataclass(frozen=True)
class GroupFinding:
    """What was found about one group.

    label                   how it is called in print: its epsilon, or its index where fewer than 20 records share it
    epsilon, delta, spends  promised, and certified by the plan
    canaries, included      how many, and how many of them in
    one_run                 epsilon exceeded by any (ε, δ) guarantee, whatever the scores' distribution
    one_run_fdp             the same if the trade-off curve is a Gaussian's
    gaussian_estimate       epsilon at delta of two normal curves as far apart as the scores
    gaussian_bound          its lower confidence bound
    mu, planned_mu          distance of in and out in standard deviations: found, and what the plan should give
    tests                   of the plan's exact curve and of what it certifies, with their p-values
    p_value                 of all tests of all groups together (Bonferroni)
    violated                p_value is below alpha
    """

    group: int
    label: str
    epsilon: float
    delta: float
    epsilon_spent: float
    canaries: int
    included: int
    one_run: float
    one_run_fdp: float
    gaussian_estimate: float
    gaussian_bound: float
    mu: float
    planned_mu: float
    tests: tuple[Test, ...]
    p_value: float
    violated: bool


@dataclass(frozen=True)
class AuditResult:
    """What an audit has to say.

    attack      by name
    plan        digest of the audited plan
    alpha       chance of calling an honest run violated; 1 − alpha is the confidence of each bound
    setting     what was trained, in words and by name
    groups      one finding per audited group, strictest first
    retelling   the recorded run, accounted again
    not_audited groups of the plan that are not among these
    suppressed  whether tables and sentences leave out what would show budgets that few records hold; JSON never does
    """

    attack: str
    plan: str
    alpha: float
    setting: dict[str, Any]
    groups: tuple[GroupFinding, ...] = field(repr=False)
    retelling: Retelling = field(repr=False)
    not_audited: int = 0
    suppressed: bool = False

    @property
    def violated(self) -> tuple[GroupFinding, ...]:
        """The groups whose scores cannot come from the plan."""
        return tuple(group for group in self.groups if group.violated)

    @property
    def verdict(self) -> str:
        """ "violated" if any group's scores cannot come from the plan, else "consistent"."""
        return "violated" if self.violated else "consistent"

    @property
    def holds(self) -> bool:
        """True if neither scores nor the recorded run speak against the plan."""
        return not self.violated and self.retelling.holds

    def table(self) -> Table:
        """Promise, spend, bounds and verdict, group by group."""
        if self.suppressed:
            few = [[g.label, f"{g.canaries:,}", f"{g.p_value:.2g}", _word(g)] for g in self.groups]
            return ["epsilon", "canaries", "p", "verdict"], few
        headers = [
            "epsilon",
            "epsilon_spent",
            "canaries",
            "one run ≥",
            "f-DP ≥",
            "Gaussian ≥",
            "estimate",
            "p",
            "verdict",
        ]
        rows = [
            [
                g.label,
                number(g.epsilon_spent),
                f"{g.canaries:,}",
                *(f"{value:.3f}" for value in (g.one_run, g.one_run_fdp, g.gaussian_bound, g.gaussian_estimate)),
                f"{g.p_value:.2g}",
                _word(g),
            ]
            for g in self.groups
        ]
        return headers, rows

    def trace_table(self) -> Table:
        """The recorded run: planned, measured, and how sure."""
        if self.suppressed:
            return ["of the recorded run", "status"], [[self._name(m), m.status] for m in self.retelling.measures]
        headers = ["of the recorded run", "planned", "measured", "± s.e.", "status"]
        return headers, [[self._name(m), *_numbers(m), m.status] for m in self.retelling.measures]

    def _name(self, measure: Measure) -> str:
        of = f" of {measure.tensor}" if measure.tensor else ""
        if measure.group is not None:
            of = f" of epsilon = {self.groups[measure.group].label}"
        many = len({m.phase for m in self.retelling.measures}) > 1
        return measure.what + of + (f", phase {measure.phase + 1}" if many else "")

    @property
    def sentences(self) -> tuple[str, ...]:
        """The outcome in words."""
        said = []
        if self.violated:
            names = ", ".join(g.label for g in self.violated)
            said.append(f"VIOLATED: the scores of epsilon = {names} cannot come from the plan.")
        else:
            said.append("The scores are consistent with the plan.")
        above = ", ".join(g.label for g in self.groups if g.one_run > g.epsilon_spent and not g.violated)
        if above:
            said.append(
                f"The one-run bound of epsilon = {above} lies above what the plan certifies. By chance alone that "
                f"happens to an honest group in at most {self.alpha:.0%} of audits: audit again, with more canaries."
            )
        named = [f"{self._name(m)} ({m.status})" for m in self.retelling.deviations]
        said.append(
            f"The recorded run is not as planned: {', '.join(named)}."
            if named
            else "The recorded run is as planned, as far as it could be measured."
        )
        spent = ", ".join(f"{value:.4g}" for value in self.retelling.epsilon)
        said.append(
            AUDIT_SUPPRESSED
            if self.suppressed
            else f"Accounted again from these measurements, and as uncertain as they: epsilon = {spent}."
        )
        said.append(WHAT_IT_SHOWS.format(confidence=1 - self.alpha, alpha=self.alpha))
        return tuple(said)

    def __str__(self) -> str:
        return "\n\n".join([aligned(self.table()), aligned(self.trace_table()), "\n".join(map(plain, self.sentences))])

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; null stands for what is not finite. See docs/audit.md for every key."""
        return {
            "schema": SCHEMA,
            "document": "epsilons audit",
            "epsilons_version": __version__,
            "attack": self.attack,
            "plan": self.plan,
            "alpha": self.alpha,
            "setting": self.setting,
            "verdict": self.verdict,
            "holds": self.holds,
            "sentences": list(self.sentences),
            "not_audited": self.not_audited,
            "groups": [
                {
                    **{name: _finite(value) for name, value in vars(g).items() if name not in ("label", "tests")},
                    "tests": [{"name": test.name, "p_value": test.p_value} for test in g.tests],
                    "accounted_again": _finite(float(again)),
                }
                for g, again in zip(self.groups, self.retelling.epsilon, strict=True)
            ],
            "trace": [{name: _finite(value) for name, value in vars(m).items()} for m in self.retelling.measures],
        }

    def save(self, path: str | Path) -> Path:
        """Write them as JSON, whole or not at all."""
        return write_json(Path(path), self.to_dict())


def _word(group: GroupFinding) -> str:
    return "VIOLATED" if group.violated else "consistent"


def _numbers(measure: Measure) -> list[str]:
    error = f"{measure.standard_error:.2g}" if measure.standard_error else "exact"
    return [f"{measure.planned:.6g}", f"{measure.measured:.6g}", error]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
