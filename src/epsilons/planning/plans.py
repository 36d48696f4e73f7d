"""A plan: who is drawn how often, clipped how hard, under how much noise. The only thing training is told.

A phase is one such table with a number of steps, a plan a short list of phases. Nothing outside this folder
asks which strategy made it; whoever made it, `verify` recomputes what every group would spend.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .._version import __version__
from ..accounting import ACCOUNTANTS, Accountant, name_of
from ..budgets import Budgets, merge_small
from ..errors import Overspend, PlanError
from ..mechanism import SampledGaussian
from . import guarantee, plan_file
from .text import table

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]

Adjacency = Literal["replace-by-null, roster public", "add-or-remove, shares declared"]
ROSTER: Adjacency = "replace-by-null, roster public"
SHARES: Adjacency = "add-or-remove, shares declared"

#: Epsilons shown during training are read off the spend curve at this many points per phase, rounded up.
CURVE_POINTS = 20


@dataclass(frozen=True)
class Recipe:
    """How long and how large, before anyone's budget is looked at.

    steps       noisy updates, >= 1
    batch_size  EXPECTED records per update, > 0; need not be whole
    clip_norm   L2 norm, in gradient units, that the groups' clip norms average to, > 0

    >>> Recipe(steps=9_375, batch_size=512, clip_norm=0.2)
    Recipe(steps=9375, batch_size=512, clip_norm=0.2)
    """

    steps: int
    batch_size: float
    clip_norm: float

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or self.steps != int(self.steps) or self.steps < 1:
            raise PlanError(f"A recipe needs a whole number of steps, at least 1; {self.steps} arrived.")
        for name in ("batch_size", "clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"A recipe's {name} must be a positive, finite number; {value} arrived.")


@dataclass(frozen=True, eq=False)
class Phase:
    """One table and a number of steps.

    steps           how many updates use it
    sample_rate     (groups,)  chance that a record is drawn in one step
    clip_norm       (groups,)  L2 bound on one record's gradient
    weight          (groups,)  factor on the clipped gradient, 1 unless a strategy says otherwise
    noise_std       scalar     noise added once to each step's summed gradient, in gradient units
    expected_batch  scalar     records per step in expectation; the divisor of every update
    """

    steps: int
    sample_rate: FloatArray
    clip_norm: FloatArray
    weight: FloatArray
    noise_std: float
    expected_batch: float

    def __post_init__(self) -> None:
        for name in ("sample_rate", "clip_norm", "weight"):
            array = np.array(getattr(self, name), dtype=np.float64)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if not (self.sample_rate.ndim == 1 and self.sample_rate.shape == self.clip_norm.shape == self.weight.shape):
            raise PlanError(
                "A phase needs one sample_rate, clip_norm and weight per group; shapes "
                f"{self.sample_rate.shape}, {self.clip_norm.shape}, {self.weight.shape} arrived."
            )
        if not ((self.sample_rate >= 0) & (self.sample_rate <= 1)).all():
            raise PlanError("A phase's sampling rates must be probabilities between 0 and 1; at least one is not.")
        for name in ("clip_norm", "weight"):
            values = getattr(self, name)
            if not (np.isfinite(values) & (values > 0)).all():
                raise PlanError(f"A phase's {name} must be positive and finite in every group; at least one is not.")
        if self.steps != int(self.steps) or self.steps < 1:
            raise PlanError(f"A phase needs a whole number of steps, at least 1; {self.steps} arrived.")
        for name in ("noise_std", "expected_batch"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"A phase's {name} must be positive and finite; {value} arrived.")

    @property
    def noise_multiplier(self) -> FloatArray:
        """(groups,) noise standard deviation over a record's own largest contribution."""
        return self.noise_std / (self.weight * self.clip_norm)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; a group that is never drawn has no noise multiplier (null)."""
        rows = zip(self.sample_rate, self.clip_norm, self.weight, self.noise_multiplier, strict=True)
        return {
            "steps": int(self.steps),
            "noise_std": float(self.noise_std),
            "expected_batch": float(self.expected_batch),
            "groups": [
                {
                    "sample_rate": float(q),
                    "clip_norm": float(c),
                    "weight": float(w),
                    "noise_multiplier": float(s) if q > 0 else None,
                }
                for q, c, w, s in rows
            ],
        }

    @classmethod
    def from_file(cls, phase: plan_file.PhaseTable) -> Phase:
        """The phase a plan file holds."""
        return cls(
            steps=phase.steps,
            sample_rate=np.array([row.sample_rate for row in phase.groups]),
            clip_norm=np.array([row.clip_norm for row in phase.groups]),
            weight=np.array([row.weight for row in phase.groups]),
            noise_std=phase.noise_std,
            expected_batch=phase.expected_batch,
        )

    def history(self, group: int, steps: int | None = None) -> SampledGaussian:
        """What a record of this group goes through in the first `steps` steps (default: all)."""
        return SampledGaussian(
            float(self.sample_rate[group]),
            float(self.noise_multiplier[group]),
            self.steps if steps is None else min(steps, self.steps),
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """What will be done to every group, fixed before training, with what it costs each.

    strategy, options  how it was made; nothing depends on them later
    accountant         name of the accountant that certifies it
    adjacency          which data sets count as neighbours (see `guarantee`)
    records            records it was made for (declared ones under public shares)
    batch_size         expected batch of the recipe
    epsilon, delta     (groups,) budgets, strictest first
    counts             (groups,) records in each group
    phases             the tables, in the order they are used
    certify            the accountant's function, where it is not one of ACCOUNTANTS
    """

    strategy: str
    accountant: str
    adjacency: str
    records: int
    batch_size: float
    epsilon: FloatArray
    delta: FloatArray
    counts: IntArray
    phases: tuple[Phase, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    certify: Accountant | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, dtype in (("epsilon", np.float64), ("delta", np.float64), ("counts", np.int64)):
            array = np.array(getattr(self, name), dtype=dtype)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        object.__setattr__(self, "phases", tuple(self.phases))
        groups = self.epsilon.shape
        if len(groups) != 1 or groups[0] == 0 or self.delta.shape != groups or self.counts.shape != groups:
            raise PlanError("A plan needs one epsilon, delta and number of records per group, and at least one group.")
        if not self.phases:
            raise PlanError("A plan needs at least one phase.")
        if any(phase.sample_rate.shape != groups for phase in self.phases):
            raise PlanError(f"Every phase of a plan needs one row per group; this plan has {groups[0]:,} groups.")
        if not ((np.isfinite(self.epsilon) & (self.epsilon > 0)).all() and ((self.delta > 0) & (self.delta < 1)).all()):
            raise PlanError("A plan's budgets must be positive and finite, and its deltas between 0 and 1.")
        if (self.counts < 1).any() or self.counts.sum() != self.records:
            raise PlanError(
                f"A plan's groups must hold at least one record each and {self.records:,} together; "
                f"they hold {self.counts.sum():,}."
            )
        if self.adjacency not in (ROSTER, SHARES):
            raise PlanError(f"A plan's adjacency is {ROSTER!r} or {SHARES!r}; {self.adjacency!r} arrived.")

    @classmethod
    def of(
        cls,
        budgets: Budgets,
        recipe: Recipe,
        accountant: Accountant,
        *phases: Phase,
        strategy: str,
        options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """The plan a strategy returns: these phases, for these budgets."""
        name = name_of(accountant)
        return cls(
            strategy=strategy,
            options=dict(options or {}),
            accountant=name,
            certify=None if ACCOUNTANTS.get(name) is accountant else accountant,
            adjacency=ROSTER,
            records=budgets.records,
            batch_size=float(recipe.batch_size),
            epsilon=budgets.levels,
            delta=budgets.delta,
            counts=budgets.counts,
            phases=phases,
        )

    # -- what it holds -----------------------------------------------------------------------------

    @property
    def levels(self) -> FloatArray:
        """(groups,) the budgets, as `Budgets.levels`."""
        return self.epsilon

    @property
    def steps(self) -> int:
        """Updates over all phases."""
        return sum(phase.steps for phase in self.phases)

    @property
    def sample_rate(self) -> FloatArray:
        """(groups,) of the only phase; PlanError if there are several."""
        return self._only.sample_rate

    @property
    def clip_norm(self) -> FloatArray:
        """(groups,) of the only phase; PlanError if there are several."""
        return self._only.clip_norm

    @property
    def weight(self) -> FloatArray:
        """(groups,) of the only phase; PlanError if there are several."""
        return self._only.weight

    @property
    def noise_multiplier(self) -> FloatArray:
        """(groups,) of the only phase; PlanError if there are several."""
        return self._only.noise_multiplier

    @property
    def noise_std(self) -> float:
        """Of the only phase; PlanError if there are several."""
        return self._only.noise_std

    @property
    def expected_batch(self) -> float:
        """Of the only phase; PlanError if there are several."""
        return self._only.expected_batch

    @property
    def _only(self) -> Phase:
        if len(self.phases) != 1:
            raise PlanError(
                f"This plan has {len(self.phases)} phases with a table each; read them from plan.phases[0], [1], …"
            )
        return self.phases[0]

    # -- what it costs -----------------------------------------------------------------------------

    def spends(self, delta: float | None = None) -> FloatArray:
        """(groups,) upper bound on epsilon after all steps, at each group's own delta (or at `delta` for all)."""
        return self._certified if delta is None else self._spent_after(self._all_steps, delta)

    def spent_after(self, steps: Sequence[int]) -> FloatArray:
        """(groups,) upper bound on epsilon after `steps[i]` steps of phase i.

        Read off the spend curve: the steps are rounded up to one of CURVE_POINTS points per phase, so the
        result is never below the truth and watching a run costs a few evaluations, not one per step.
        """
        rounded = []
        for phase, done in zip(self.phases, steps, strict=True):
            stride = -(-phase.steps // CURVE_POINTS)
            rounded.append(min(-(-int(done) // stride) * stride, phase.steps))
        if tuple(rounded) == self._all_steps:
            return self._certified
        if tuple(rounded) not in self._curve:
            self._curve[tuple(rounded)] = self._spent_after(tuple(rounded))
        return self._curve[tuple(rounded)]

    def verify(self) -> Plan:
        """Recompute every group's spend; raises Overspend if any is above its budget. Returns the plan."""
        over = self.spends() > self.epsilon
        if over.any():
            worst = float((self.spends() / self.epsilon).max()) - 1
            raise Overspend(
                f"This plan would spend more than {over.sum():,} of {len(over):,} groups allow, by up to "
                f"{worst:.2%} (accountant {self.accountant!r}). It is refused: make a new plan with epsilons.plan, or "
                "lower its rates, clip norms or steps, or raise its noise."
            )
        return self

    @cached_property
    def _certified(self) -> FloatArray:
        return self._spent_after(self._all_steps)

    @cached_property
    def _curve(self) -> dict[tuple[int, ...], FloatArray]:
        return {}

    @property
    def _all_steps(self) -> tuple[int, ...]:
        return tuple(phase.steps for phase in self.phases)

    def _spent_after(self, steps: tuple[int, ...], delta: float | None = None) -> FloatArray:
        certify = self.certify or ACCOUNTANTS.get(self.accountant)
        if certify is None:
            raise PlanError(
                f"This plan was certified by {self.accountant!r}, which is not one of {', '.join(ACCOUNTANTS)}; pass "
                "that function: Plan.load(path, accountant=…)."
            )
        spent = np.empty(len(self.epsilon))
        known: dict[tuple[tuple[SampledGaussian, ...], float], float] = {}
        for group, own_delta in enumerate(self.delta):
            case = (
                tuple(phase.history(group, done) for phase, done in zip(self.phases, steps, strict=True)),
                float(own_delta if delta is None else delta),
            )
            if case not in known:
                known[case] = certify(*case)
            spent[group] = known[case]
        spent.setflags(write=False)
        return spent

    # -- how it is kept ----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """What a saved plan holds, as JSON values; see docs/concepts.md for every key."""
        groups = [
            {"epsilon": float(e), "delta": float(d), "records": int(n), "spends": float(s)}
            for e, d, n, s in zip(self.epsilon, self.delta, self.counts, self.spends(), strict=True)
        ]
        phases = [phase.to_dict() for phase in self.phases]
        values = {
            "schema": plan_file.SCHEMA,
            "epsilons_version": __version__,
            "strategy": self.strategy,
            "options": dict(self.options),
            "accountant": self.accountant,
            "adjacency": self.adjacency,
            "records": self.records,
            "batch_size": self.batch_size,
            "steps": self.steps,
            "groups": groups,
            "phases": phases,
            "guarantee": self.guarantee,
        }
        if len(phases) == 1:
            values |= {"noise_std": phases[0]["noise_std"], "expected_batch": phases[0]["expected_batch"]}
            for row, numbers in zip(groups, phases[0]["groups"], strict=True):
                row.update(numbers)
        return values

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON, whole or not at all."""
        return plan_file.write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path, accountant: Accountant | None = None) -> Plan:
        """Read a saved plan and verify it again: raises PlanError if it is not a plan, Overspend if it overspends."""
        file = plan_file.read(Path(path))
        plan = cls(
            strategy=file.strategy,
            options=file.options,
            accountant=file.accountant,
            certify=accountant,
            adjacency=file.adjacency,
            records=file.records,
            batch_size=file.batch_size,
            epsilon=np.array([row.epsilon for row in file.groups]),
            delta=np.array([row.delta for row in file.groups]),
            counts=np.array([row.records for row in file.groups]),
            phases=tuple(Phase.from_file(phase) for phase in file.phases),
        )
        plan._agrees_with(file)
        return plan.verify()

    def _agrees_with(self, file: plan_file.PlanFile) -> None:
        """Refuse a file whose repeated or derived numbers contradict its phases: someone edited half of it."""
        claims: list[tuple[str, float | None, float]] = [("steps", file.steps, self.steps)]
        for phase, table_ in zip(self.phases, file.phases, strict=True):
            for own, row in zip(phase.noise_multiplier, table_.groups, strict=True):
                claims.append(("noise_multiplier", row.noise_multiplier, float(own)))
        if len(self.phases) == 1:
            only = self.phases[0]
            claims.append(("noise_std", file.noise_std, only.noise_std))
            claims.append(("expected_batch", file.expected_batch, only.expected_batch))
            for group, repeated in enumerate(file.groups):
                for name in ("sample_rate", "clip_norm", "weight", "noise_multiplier"):
                    claims.append((name, getattr(repeated, name), float(getattr(only, name)[group])))
        for name, claimed, own in claims:
            if claimed is not None and not math.isclose(claimed, own, rel_tol=1e-9):
                raise PlanError(
                    f"This plan file contradicts itself: {name} is not what its phases come to. It was edited; make a "
                    "new plan with epsilons plan."
                )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan's numbers, in hex: what a ledger is bound to."""
        numbers = {k: v for k, v in self.to_dict().items() if k not in {"epsilons_version", "guarantee"}}
        for row in numbers["groups"]:
            del row["spends"]  # a library's patch release may move its last digits
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    # -- how it is shown ---------------------------------------------------------------------------

    @property
    def guarantee(self) -> str:
        """What this plan promises, in the words of the documentation."""
        return self.guarantee_of_run(None)

    def guarantee_of_run(self, randomness: str | None) -> str:
        """The same for a run of it, naming where its coins and noise come from: "philox", "secure" or "seeded"."""
        declared = self.adjacency == SHARES
        return guarantee.words(self.accountant, shares_declared=declared, steps=self.steps, randomness=randomness)

    def compare(self, *others: Plan) -> str:
        """An aligned table of this plan beside others for the same budgets: what each group gives and gets."""
        plans = (self, *others)
        if any(
            not np.array_equal(self.epsilon, p.epsilon) or not np.array_equal(self.counts, p.counts) for p in others
        ):
            raise PlanError("Plans can be compared only when they were made for the same groups of records.")
        headers = ["promised", "records"]
        for p in plans:
            headers += [f"{p.strategy}: spends", "pull"]
        rows = []
        for run in merge_small(self.counts):
            row = [span(self.epsilon[run]), f"{self.counts[run].sum():,}"]
            for p in plans:
                row += [span(p.spends()[run], up=True), span(p.pull[run])]
            rows.append(row)
        return (
            table(headers, rows)
            + "\n\npull: how hard one record of the group can steer the whole run: steps · sample_rate / noise_multiplier"
        )

    @property
    def pull(self) -> FloatArray:
        """(groups,) steps · sample_rate / noise_multiplier, added over phases: how hard a record can steer the run."""
        total = sum((p.steps * p.sample_rate / p.noise_multiplier for p in self.phases), np.zeros(len(self.epsilon)))
        return total

    def __str__(self) -> str:
        return self.summary() + "\n\n" + self.guarantee

    def __repr__(self) -> str:
        return f"Plan({self.strategy!r}, {self.steps:,} steps, {self.records:,} records, {len(self.epsilon):,} groups)"

    def summary(self) -> str:
        """The plan as an aligned table; groups of fewer than 20 records are shown merged upwards."""
        lines = [
            f"Plan {self.strategy!r} for {self.records:,} records: {self.steps:,} steps, certified by {self.accountant!r}, "
            f"adjacency {self.adjacency!r}"
        ]
        for i, phase in enumerate(self.phases):
            title = f"phase {i + 1}: " if len(self.phases) > 1 else ""
            lines.append(
                f"{title}{phase.steps:,} steps, expected batch {phase.expected_batch:.6g}, noise_std {phase.noise_std:.6g}"
            )
            rows = [
                [
                    span(self.epsilon[run]),
                    span(self.delta[run]),
                    f"{self.counts[run].sum():,}",
                    span(self.spends()[run], up=True),
                    span(phase.sample_rate[run]),
                    span(phase.clip_norm[run]),
                    *([span(phase.weight[run])] if (phase.weight != 1).any() else []),
                    span(np.where(phase.sample_rate > 0, phase.noise_multiplier, np.inf)[run]),
                ]
                for run in merge_small(self.counts)
            ]
            weight = ["weight"] if (phase.weight != 1).any() else []
            headers = [
                "epsilon",
                "delta",
                "records",
                "spends",
                "sample_rate",
                "clip_norm",
                *weight,
                "noise_multiplier",
            ]
            lines.append(table(headers, rows))
        return "\n".join(lines)


def span(values: FloatArray, up: bool = False) -> str:
    """One number, or the range of a merged row; `up` rounds away from zero, as a spend must."""

    def show(value: float) -> str:
        if not (up and math.isfinite(value) and value > 0):
            return f"{value:.5g}"
        scale = 10.0 ** (4 - math.floor(math.log10(value)))
        return f"{math.ceil(value * scale) / scale:.5g}"

    low, high = show(float(values.min())), show(float(values.max()))
    return low if low == high else f"{low}–{high}"
