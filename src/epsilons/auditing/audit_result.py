"""AuditResult: the outcome of an audit, as values, tables, JSON and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from ..core import notebook
from ..core.disclosure import AUDIT_SUPPRESSED, of_unit
from ..core.files import UNWRITTEN, as_json, write_json
from ..core.notebook import new_figure, save_figure
from ..errors import printable
from ..planning.display import Table, aligned, number
from .bounds import HypothesisTest
from .recorder import Measure, Reestimate

SCHEMA = 2

LIMITS = (
    "An audit can show that a promise is broken, never that it is kept. Bounds hold with {confidence:.0%} confidence "
    "each; the verdict calls an honest run violated with a chance of at most {alpha:.0%}."
)

_OF_PERSONS = (
    "Each canary is a person who owns {rows:,} rows, and is in or out with all of them: bounds and verdict are of a "
    "person and of all their rows."
)

_ON_ACCOUNTS = (
    "The plan counts what people were charged before, and canaries were charged nothing: they are compared with what "
    "this run spends by itself."
)
_NO_CHARGE = (
    "Nothing was charged to a registry for this audit: it trained on synthetic records and on digits that come with "
    "the library, and on no data of people with accounts."
)
_NO_CHARGE_FOR_RECORDS = (
    "Nothing was charged to a budget or to a registry for this audit, which trained again on the given records, in "
    "groups that were dealt at random. No guarantee covers that: the result stays internal."
)

#: Lower bounds in the picture: attribute, label, marker, colour. The markers point to where the truth may be.
_MARKS = (
    ("gaussian_bound", "at least: Gaussian bound", 9, "#1f5fa8"),  # 9: a caret that points right
    ("one_run_fdp", "at least: one run, f-DP", 9, "#6a3d9a"),
    ("one_run", "at least: one run", 9, "#444444"),
)
#: Bounds beyond this many times the largest promise are drawn at the edge of the picture.
_WIDEST = 4.0


@dataclass(frozen=True)
class GroupResult:
    """The outcome for one group.

    group                   index in the plan
    label                   name in print: the group's epsilon, or its index if fewer than 20 records share it
    epsilon, delta          the promise
    epsilon_spent           certified by the plan
    canaries, included      number of canaries, and how many of them were in
    one_run                 lower bound on epsilon for any mechanism and any scores
    one_run_fdp             lower bound on epsilon for mechanisms with a Gaussian's trade-off curve
    gaussian_estimate       epsilon at delta of two normal distributions as far apart as the scores
    gaussian_bound          its lower confidence bound
    mu, planned_mu          distance of in and out in standard deviations: measured, and by the plan
    p_value                 the smallest of the tests', after Bonferroni over all tests of all groups
    violated                p_value is below alpha
    tests                   of the plan's trade-off curve and of the certified epsilon, with their p-values
    """

    group: int
    label: str = field(metadata=UNWRITTEN)
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
    p_value: float
    violated: bool
    tests: tuple[HypothesisTest, ...]

    @property
    def verdict(self) -> str:
        return "VIOLATED" if self.violated else "consistent"


@dataclass(frozen=True)
class AuditResult:
    """The outcome of an audit. `print(result)` shows tables and sentences; `save` writes JSON.

    attack       name of the attack
    plan         digest of the audited plan
    alpha        probability of calling an honest run violated; 1 − alpha is the confidence of each bound
    setting      what was trained: "trained", "steps", "engine", "randomness", "seeded"; "runs" of a plan for several,
                 of which one was audited; "canary_rows" under a plan of persons; "on_accounts" of a plan on accounts of
                 a registry; "real_records" if the caller gave the records
    groups       one result per audited group, strictest first
    reestimate   measures of the recorded run, and epsilon computed from them
    not_audited  number of the plan's groups that were not audited
    suppressed   True if tables and sentences leave out numbers that would reveal budgets of fewer than 20 records;
                 the JSON is always complete
    """

    attack: str
    plan: str
    alpha: float
    setting: dict[str, Any]
    groups: tuple[GroupResult, ...] = field(repr=False)
    reestimate: Reestimate = field(repr=False)
    not_audited: int = 0
    suppressed: bool = False

    @property
    def violated(self) -> tuple[GroupResult, ...]:
        """The groups with scores that cannot come from the plan."""
        return tuple(group for group in self.groups if group.violated)

    @property
    def verdict(self) -> str:
        """ "violated" if any group's scores cannot come from the plan, else "consistent"."""
        return "violated" if self.violated else "consistent"

    @property
    def holds(self) -> bool:
        """True if neither the scores nor the recorded run contradict the plan."""
        return not self.violated and self.reestimate.holds

    def table(self) -> Table:
        """Promise, spend, bounds and verdict of each group."""
        if self.suppressed:
            rows = [[g.label, f"{g.canaries:,}", f"{g.p_value:.2g}", g.verdict] for g in self.groups]
            return [self._promised, "canaries", "p", "verdict"], rows
        bounds = ["one run ≥", "f-DP ≥", "Gaussian ≥", "estimate"]
        rows = [
            [
                g.label,
                number(g.epsilon_spent),
                f"{g.canaries:,}",
                *(f"{value:.3f}" for value in (g.one_run, g.one_run_fdp, g.gaussian_bound, g.gaussian_estimate)),
                f"{g.p_value:.2g}",
                g.verdict,
            ]
            for g in self.groups
        ]
        return [self._promised, "epsilon_spent", "canaries", *bounds, "p", "verdict"], rows

    def trace_table(self) -> Table:
        """Planned value, measured value, error and status of each measure of the recorded run."""
        measures = self.reestimate.measures
        if self.suppressed:
            return ["of the recorded run", "status"], [[self._name(m), m.status] for m in measures]
        headers = ["of the recorded run", "planned", "measured", "± s.e.", "status"]
        return headers, [[self._name(m), *_numbers(m), m.status] for m in measures]

    def _name(self, measure: Measure) -> str:
        of = f" of {measure.tensor}" if measure.tensor else ""
        if measure.group is not None:
            of = f" of epsilon = {self.groups[measure.group].label}"
        several_phases = len({m.phase for m in self.reestimate.measures}) > 1
        return measure.what + of + (f", phase {measure.phase + 1}" if several_phases else "")

    @property
    def sentences(self) -> tuple[str, ...]:
        """The outcome in sentences."""
        violated = ", ".join(g.label for g in self.violated)
        above = ", ".join(g.label for g in self.groups if g.one_run > g.epsilon_spent and not g.violated)
        deviations = ", ".join(f"{self._name(m)} ({m.status})" for m in self.reestimate.deviations)
        spent = ", ".join(f"{value:.4g}" for value in self.reestimate.epsilon)
        sentences = [
            f"VIOLATED: the scores of epsilon = {violated} cannot come from the plan."
            if violated
            else "The scores are consistent with the plan.",
            f"The one-run bound of epsilon = {above} is above what the plan certifies. By chance alone that happens to "
            f"an honest group in at most {self.alpha:.0%} of audits: audit again, with more canaries."
            if above
            else "",
            f"The recorded run is not as planned: {deviations}."
            if deviations
            else "The recorded run is as planned, as far as it could be measured.",
            f"The plan is for {self.setting['runs']:,} runs: one was made, and compared with what one run may spend."
            if "runs" in self.setting
            else "",
            _OF_PERSONS.format(rows=self.setting["canary_rows"]) if "canary_rows" in self.setting else "",
            _ON_ACCOUNTS if "on_accounts" in self.setting else "",
            of_unit(AUDIT_SUPPRESSED, "person" if "canary_rows" in self.setting else "record")
            if self.suppressed
            else f"Epsilon computed from these measurements, with their errors: {spent}.",
            self._uncharged,
            LIMITS.format(confidence=1 - self.alpha, alpha=self.alpha),
        ]
        return tuple(filter(None, sentences))

    @property
    def _uncharged(self) -> str:
        if "real_records" in self.setting:
            return _NO_CHARGE_FOR_RECORDS
        return _NO_CHARGE if "on_accounts" in self.setting else ""

    @property
    def _promised(self) -> str:
        return "lifetime level" if "on_accounts" in self.setting else "epsilon"

    def __str__(self) -> str:
        sentences = "\n".join(map(printable, self.sentences))
        return "\n\n".join([aligned(self.table()), aligned(self.trace_table()), sentences])

    def _repr_html_(self) -> str:
        """In a notebook: the same as tables."""
        sentences = notebook.paragraphs(self.sentences)
        title = notebook.heading(f"Audit by {self.attack}: {self.verdict}")
        return notebook.document(title, notebook.table(*self.table()), notebook.table(*self.trace_table()), sentences)

    def to_dict(self) -> dict[str, Any]:
        """The JSON values; null replaces numbers that are not finite. docs/audit.md describes every key."""
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
                as_json(g) | {"accounted_again": as_json(epsilon)}
                for g, epsilon in zip(self.groups, self.reestimate.epsilon, strict=True)
            ],
            "trace": as_json(self.reestimate.measures),
        }

    def save(self, path: str | Path) -> Path:
        """Write the JSON, whole or not at all. Only the owner may read the file. Raises RunError if that fails."""
        return write_json(Path(path), self.to_dict())


def _numbers(measure: Measure) -> list[str]:
    error = f"{measure.standard_error:.2g}" if measure.standard_error else "exact"
    return [f"{measure.planned:.6g}", f"{measure.measured:.6g}", error]


def draw(result: AuditResult, path: str | Path) -> Path:
    """Draw promise, spend and what was measured for every audited group, and its verdict in words.

    The promise is a line, lower bounds are carets that point to where the truth may be, and the estimate is hollow,
    because it is no bound. Each row says its verdict: no mark beyond a promise decides it.

    path  of an .svg file; only its owner may read it

    Raises InputError for another ending, RunError if the file cannot be written.
    """
    groups = result.groups
    figure, axes = new_figure(8.5, 1.9 + 0.75 * len(groups))
    highest = max(
        value for g in groups for value in (g.epsilon, g.gaussian_estimate, *(getattr(g, name) for name, *_ in _MARKS))
    )
    edge = min(highest, _WIDEST * max(g.epsilon for g in groups))
    rows = np.arange(len(groups))
    axes.barh(rows, [g.epsilon_spent for g in groups], height=0.62, color="#dbe6f2", label="spent at most, by the plan")
    promised = [g.epsilon for g in groups]
    axes.vlines(promised, rows - 0.38, rows + 0.38, color="#222222", lw=2.5, label="promised at most")
    for place, (name, label, mark, color) in zip((-0.2, 0.0, 0.2), _MARKS, strict=True):
        bounds = [min(getattr(g, name), edge) for g in groups]
        axes.plot(bounds, rows + place, linestyle="", marker=mark, color=color, ms=7, label=label)
    estimates = [min(g.gaussian_estimate, edge) for g in groups]
    edge_of_mark = "#8a5a00"
    axes.plot(
        estimates, rows, linestyle="", marker="o", ms=6, mfc="white", mec=edge_of_mark, label="estimate, no bound"
    )
    for row, g in enumerate(groups):
        color, weight = ("#b00020", "bold") if g.violated else ("#2e6b34", "normal")
        words = "VIOLATED" if g.violated else "consistent with\nthe promise"
        right = axes.get_yaxis_transform()
        axes.text(1.02, row, words, va="center", fontsize=8, color=color, weight=weight, transform=right)
    axes.set_yticks(rows, [f"ε = {number(g.epsilon)}" for g in groups])
    axes.set_ylim(len(groups) - 0.45, -0.55)
    axes.set_xlim(0, 1.05 * edge)
    axes.set_xlabel(
        f"ε at the group's δ. Each lower bound holds with {1 - result.alpha:.0%} confidence; the verdict allows for "
        "chance in all of them.",
        fontsize=8,
    )
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return save_figure(figure, Path(path), (".svg",))
