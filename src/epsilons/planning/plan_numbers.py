"""The numbers of a plan and what they cost: groups, phases, and the epsilon that each group spends.

`plans.Plan` adds how a plan is saved and shown. No strategy is known here: `verify` recomputes the epsilon of every
group, whichever function made the plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np

from ..accounting import ACCOUNTANTS, Accountant
from ..accounting.calibration import Histories, batch_epsilon, noises_for
from ..accounting.profile import used
from ..accounting.selection import Selected, Selection
from ..core.disclosure import has_small_cells
from ..core.mechanism import Counted, FloatArray, Groups, IntArray, SampledGaussian, Unit, read_only
from ..errors import BudgetExceededError, PlanError
from . import guarantee

# -- Recipe, the input of a strategy, and Phase, the table that it computes
#
# Accountant, training loop and ledger need nothing but phases: σ_p = noise_std / (weight_p · c_p), and in each step a
# record of group p goes through the sampled Gaussian mechanism SGM(q_p, σ_p).

Convention = Literal["paper", "authors-code"]

#: The accountants do not finish in reasonable time beyond this many steps.
MOST_STEPS = 10**9


@dataclass(frozen=True)
class Recipe:
    """Length and size of a training run, chosen without the budgets.

    steps       noisy updates, 1 to MOST_STEPS
    batch_size  expected records per update, > 0; need not be a whole number
    clip_norm   mean over records of the groups' clip norms, an L2 norm in gradient units, > 0

    Raises PlanError for values outside these ranges.

    >>> Recipe(steps=9_375, batch_size=512, clip_norm=0.2)
    Recipe(steps=9375, batch_size=512, clip_norm=0.2)
    """

    steps: int
    batch_size: float
    clip_norm: float

    def __post_init__(self) -> None:
        _check_steps("recipe", self.steps)
        object.__setattr__(self, "steps", int(self.steps))
        for name in ("batch_size", "clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"A recipe's {name} must be a positive, finite number, got {value}.")

    @classmethod
    def of_epochs(
        cls, epochs: float, *, records: int, batch_size: float, clip_norm: float, convention: Convention = "paper"
    ) -> Recipe:
        """The recipe with the length of an expected number of passes over the data, at least one step.

        records     number of records of the plan; the declared number under public shares
        convention  "paper": steps = epochs · records / batch_size. "authors-code": steps = epochs · ceil(records /
                    batch_size), and the batch becomes records / ceil(records / batch_size)

        >>> Recipe.of_epochs(80, records=60_000, batch_size=512, clip_norm=0.2)
        Recipe(steps=9375, batch_size=512.0, clip_norm=0.2)
        """
        batch = float(batch_size)
        for name, value in (("epochs", epochs), ("records", records), ("batch_size", batch)):
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"A recipe's {name} must be a positive, finite number, got {value}.")
        per_epoch = records / batch
        if convention == "authors-code":
            per_epoch = math.ceil(per_epoch)
            batch = records / per_epoch
        # 1e-9: 80 · 60,000 / 512 is 9,375 steps in spite of rounding errors
        return cls(steps=max(int(epochs * per_epoch + 1e-9), 1), batch_size=batch, clip_norm=clip_norm)


#: What a phase has of each group.
COLUMNS = ("sample_rate", "clip_norm", "weight")


@dataclass(frozen=True, eq=False)
class Phase:
    """One table and a number of steps.

    steps           number of updates that use it
    sample_rate     (groups,)  probability that a record is drawn in one step
    clip_norm       (groups,)  L2 bound on one record's gradient
    weight          (groups,)  factor on the clipped gradient, 1 unless a strategy says otherwise
    noise_std       scalar     noise added once to each step's summed gradient, in gradient units
    expected_batch  scalar     expected records per step; the divisor of every update

    Raises PlanError for values outside their ranges.
    """

    steps: int
    sample_rate: FloatArray
    clip_norm: FloatArray
    weight: FloatArray
    noise_std: float
    expected_batch: float

    def __post_init__(self) -> None:
        for name in COLUMNS:
            object.__setattr__(self, name, read_only(np.array(getattr(self, name), dtype=np.float64)))
        if not (self.sample_rate.ndim == 1 and self.sample_rate.shape == self.clip_norm.shape == self.weight.shape):
            raise PlanError(
                f"A phase needs one sample_rate, clip_norm and weight per group, got shapes {self.sample_rate.shape}, "
                f"{self.clip_norm.shape}, {self.weight.shape}."
            )
        if not ((self.sample_rate >= 0) & (self.sample_rate <= 1)).all():
            raise PlanError("A phase's sampling rates must be probabilities between 0 and 1; at least one is not.")
        for name in ("clip_norm", "weight"):
            values = getattr(self, name)
            if not (np.isfinite(values) & (values > 0)).all():
                raise PlanError(f"A phase's {name} must be positive and finite in every group; at least one is not.")
        _check_steps("phase", self.steps)
        object.__setattr__(self, "steps", int(self.steps))
        for name in ("noise_std", "expected_batch"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"A phase's {name} must be positive and finite, got {value}.")

    @property
    def noise_multiplier(self) -> FloatArray:
        """(groups,) noise standard deviation / largest L2 norm of one record's contribution."""
        return self.noise_std / (self.weight * self.clip_norm)

    def __repr__(self) -> str:
        return f"Phase({self.steps:,} steps)"

    @property
    def title(self) -> str:
        """The phase in one line."""
        return f"{self.steps:,} steps, expected batch {self.expected_batch:.6g}, noise_std {self.noise_std:.6g}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; a group that is never drawn has no noise multiplier (null)."""
        columns = {name: getattr(self, name).tolist() for name in COLUMNS}
        noises = zip(self.sample_rate, self.noise_multiplier.tolist(), strict=True)
        columns["noise_multiplier"] = [noise if rate > 0 else None for rate, noise in noises]
        return {
            "steps": self.steps,
            "noise_std": float(self.noise_std),
            "expected_batch": float(self.expected_batch),
            "groups": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
        }

    def history(self, group: int, steps: int | None = None) -> SampledGaussian:
        """The mechanism of one record of this group in the first `steps` steps (default: all)."""
        return SampledGaussian(
            float(self.sample_rate[group]),
            float(self.noise_multiplier[group]),
            self.steps if steps is None else min(steps, self.steps),
        )


def unweighted(
    steps: int, sample_rate: FloatArray, clip_norm: float | FloatArray, noise_std: float, expected_batch: float
) -> Phase:
    """The phase with a weight of 1 in every group. clip_norm: (groups,), or one for all"""
    ones = np.ones(len(sample_rate))
    return Phase(steps, sample_rate, clip_norm * ones, ones, noise_std, expected_batch)


def check_runs(runs: int, steps: int) -> None:
    """Raise PlanError for a number of runs that no plan has, with so many steps each."""
    if isinstance(runs, bool) or not (math.isfinite(runs) and runs == int(runs) and runs >= 1):
        raise PlanError(f"A plan is for a whole number of runs, at least 1, got {runs}.")
    if runs * steps > MOST_STEPS:
        raise PlanError(
            f"A plan has at most {MOST_STEPS:,} steps in all its runs together, got {runs:,} runs of {steps:,} steps."
        )


def _check_steps(what: str, steps: int) -> None:
    if not (math.isfinite(steps) and steps == int(steps) and 1 <= steps <= MOST_STEPS):
        raise PlanError(f"A {what} needs a whole number of steps, at least 1 and at most {MOST_STEPS:,}, got {steps}.")


# -- The numbers of a plan and what they cost: groups, phases, and the epsilon that each group spends

Adjacency = Literal["zero-out, roster public", "add-or-remove, shares declared"]
ROSTER: Adjacency = "zero-out, roster public"
SHARES: Adjacency = "add-or-remove, shares declared"

#: Epsilons shown during training are read off the spend curve at this many points per phase, rounded up.
CURVE_POINTS = 20


@dataclass(frozen=True, eq=False)
class PlanNumbers:
    """What happens to every group, fixed before training, and what it costs each group.

    strategy       name of the strategy; no result depends on it
    accountant     name of the accountant that certifies the plan
    adjacency      which data sets count as neighbours (see `guarantee`)
    batch_size     expected batch of the recipe
    groups         budgets and sizes of the groups (declared ones under public shares)
    phases         the tables, in the order of their use
    options        options of the strategy
    runs           runs that may follow the plan; the epsilons are those of all of them together
    unit           "record", or "person": groups count persons, each of them drawn and clipped with all their rows
    select         how many runs are made in secret, of which the best is released; the epsilons are those of the whole
                   selection. None without one
    class_noise    noise of the counts of classes in each group that each run may release (`class_counts`), in people;
                   the epsilons include them. None without counts
    accountant_fn  the accountant's function; may be left out if `accountant` is a name in ACCOUNTANTS, and is then
                   always the function of that name
    """

    strategy: str
    accountant: str
    adjacency: str
    batch_size: float
    groups: Groups
    phases: tuple[Phase, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    accountant_fn: Accountant = field(default=None, repr=False)  # type: ignore[assignment]  # set in __post_init__
    runs: int = 1
    unit: Unit = "record"
    select: Selection | None = None
    class_noise: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(self.phases))
        object.__setattr__(self, "accountant_fn", ACCOUNTANTS.get(self.accountant, self.accountant_fn))
        if self.accountant_fn is None:
            raise PlanError(
                f"This plan was certified by {self.accountant!r}, which is not one of {', '.join(ACCOUNTANTS)}; pass "
                "that function as accountant=…, to Plan.load, report or audit."
            )
        if not self.phases:
            raise PlanError("A plan needs at least one phase.")
        if self.groups.limits is not None and self.accountant != "pld":
            raise PlanError('Budgets by risk need accountant="pld"; others take tiers of (epsilon, delta) only.')
        check_runs(self.runs, self.steps)
        object.__setattr__(self, "runs", int(self.runs))
        if self.select is not None and not self._may_select:
            raise PlanError(
                'A selection is certified by "pld" or "rdp", counts its own runs and no classes, and needs a public '
                "roster and budgets of (epsilon, delta): no declared shares, budgets by risk or accounts of a registry."
            )
        if any(len(phase.sample_rate) != len(self.groups) for phase in self.phases):
            raise PlanError(
                f"Every phase of a plan needs one row per group; this plan has {len(self.groups):,} groups."
            )
        if self.adjacency not in (ROSTER, SHARES):
            raise PlanError(f"A plan's adjacency is {ROSTER!r} or {SHARES!r}, got {self.adjacency!r}.")
        if self.unit not in ("record", "person"):
            raise PlanError(f"A plan's unit is 'record' or 'person', got {self.unit!r}.")

    # -- what it holds -----------------------------------------------------------------------------

    @property
    def epsilons(self) -> FloatArray:
        """(groups,) budget of each group in nats, strictest first."""
        return self.groups.epsilons

    @property
    def delta(self) -> FloatArray:
        """(groups,) delta of each group."""
        return self.groups.deltas

    @property
    def counts(self) -> IntArray:
        """(groups,) records (or persons) in each group."""
        return self.groups.counts

    @property
    def records(self) -> int:
        """Records (or persons) the plan was made for; declared ones under public shares."""
        return self.groups.records

    @property
    def steps(self) -> int:
        """Updates of one run, over all phases."""
        return sum(phase.steps for phase in self.phases)

    @property
    def of_one_run(self) -> Self:
        """The same table for one run alone: what one of the runs spends by itself. Attacks on one run need it.

        A claim needs the whole plan: each of the others spends as much.
        """
        return self if self.runs == 1 and self.select is None else replace(self, runs=1, select=None)

    @property
    def _may_select(self) -> bool:
        is_plain = self.groups.starts is None and self.groups.limits is None and self.adjacency == ROSTER
        return is_plain and self.runs == 1 and self.class_noise is None and self.accountant in ("pld", "rdp")

    @property
    def certify(self) -> Accountant:
        """The plan's own accountant, of all that is released beside the steps, too."""
        return self.certified_by(self.accountant_fn)

    def certified_by(self, accountant: Accountant) -> Accountant:
        """This accountant with the counts of classes, or, of a selection, for the run that is released."""
        if self.class_noise is not None:
            return Counted(accountant, self.class_noise, self.runs)
        return accountant if self.select is None else Selected(self.select, accountant)

    @property
    def beside(self) -> tuple[SampledGaussian, ...]:
        """What a member of any group goes through in one run beside its steps: the counts of classes."""
        return () if self.class_noise is None else (SampledGaussian(1.0, self.class_noise, 1),)

    @cached_property
    def score_noise(self) -> FloatArray:
        """(groups,) for a selection, the noise of each score, in right answers of one held-out member of the group."""
        return noises_for(self.epsilons, 1.0, 1, self.groups.claims, self.certify)

    @property
    def sample_rate(self) -> FloatArray:
        """(groups,) probability of being drawn in one step, of the only phase; PlanError if there are several."""
        return self._only.sample_rate

    @property
    def clip_norm(self) -> FloatArray:
        """(groups,) L2 bound on one record's gradient, of the only phase; PlanError if there are several."""
        return self._only.clip_norm

    @property
    def weight(self) -> FloatArray:
        """(groups,) factor on the clipped gradient, of the only phase; PlanError if there are several."""
        return self._only.weight

    @property
    def noise_multiplier(self) -> FloatArray:
        """(groups,) noise_std / (weight · clip_norm), of the only phase; PlanError if there are several."""
        return self._only.noise_multiplier

    @property
    def noise_std(self) -> float:
        """Noise in gradient units, of the only phase; PlanError if there are several."""
        return self._only.noise_std

    @property
    def expected_batch(self) -> float:
        """Expected records per step, of the only phase; PlanError if there are several."""
        return self._only.expected_batch

    @property
    def _only(self) -> Phase:
        if len(self.phases) != 1:
            raise PlanError(
                f"This plan has {len(self.phases)} phases with a table each; read them from plan.phases[0], [1], …"
            )
        return self.phases[0]

    @property
    def influence(self) -> FloatArray:
        """(groups,) steps · sample_rate / noise_multiplier, added over phases: how far a record can move one run."""
        by_phase = [phase.steps * phase.sample_rate / phase.noise_multiplier for phase in self.phases]
        return np.asarray(np.sum(by_phase, axis=0), dtype=np.float64)

    # -- what it costs -----------------------------------------------------------------------------

    def epsilon_spent(self, delta: float | None = None) -> FloatArray:
        """(groups,) upper bound on epsilon after all steps of all runs, at each group's delta (or at `delta`)."""
        return self._certified if delta is None else self._spent(self._all_steps, range(len(self.groups)), delta)

    def spent_after(self, steps: Sequence[int], groups: Sequence[int] | None = None) -> FloatArray:
        """(groups,) upper bound on epsilon after `steps[i]` steps of phase i, of all groups or of these (by index).

        The steps are those of one run. Of a plan for several runs, all others count in full, whether or not they were
        made, because one run does not show how far the others are.

        A selection counts in full from the beginning: what was made of it is secret.

        The steps are rounded up to one of CURVE_POINTS points per phase. The result is therefore never too low, and
        watching a run costs a few evaluations and not one per step.
        """
        if self.select is not None:
            return self._certified if groups is None else self._certified[np.asarray(groups, dtype=np.int64)]
        rounded = []
        for phase, done in zip(self.phases, steps, strict=True):
            stride = -(-phase.steps // CURVE_POINTS)
            rounded.append(min(-(-int(done) // stride) * stride, phase.steps) + (self.runs - 1) * phase.steps)
        return self._spent(tuple(rounded), range(len(self.groups)) if groups is None else groups)

    def verify(self) -> Self:
        """Recompute the epsilon and limits of every group. Raises BudgetExceededError if any is above its budget."""
        over = ~(self.epsilon_spent() <= self.epsilons)  # negated, so that NaN is refused
        limits = self.groups.limits
        if limits is not None and not (self.certified_limits <= limits[:, ::2]).all():
            raise BudgetExceededError(
                "This plan would exceed the risk that some tier declares. It is refused: make a new plan with "
                "epsilons.plan, or lower its rates, clip norms or steps, or raise its noise."
            )
        if over.any():
            worst = float((self.epsilon_spent() / self.epsilons).max()) - 1
            by = "" if has_small_cells(self.groups) else f", by up to {worst:.2%}"  # it would show a rare budget
            raise BudgetExceededError(
                f"This plan would spend more than some budgets allow{by} (accountant "
                f"{self.accountant!r}). It is refused: make a new plan with epsilons.plan, or lower its rates, clip "
                "norms or steps, or raise its noise."
            )
        return self

    @cached_property
    def certified_limits(self) -> FloatArray:
        """(groups, 2) certified advantage, and true-positive rate at the false-positive rate of its limit.

        0 where no limit is declared. Raises PlanError for budgets that are not by risk.
        """
        if self.groups.limits is None:
            raise PlanError(
                "These budgets declare no limits but (epsilon, delta); epsilons.planning.risk shows the rest."
            )
        rows = [used(self.history(group), limits) for group, limits in enumerate(self.groups.limits)]
        certified: FloatArray = read_only(np.array(rows))
        return certified

    @property
    def part_used(self) -> FloatArray:
        """(groups,) the part of its budget that each group uses; of budgets by risk, of the limit that binds."""
        parts: FloatArray = self.epsilon_spent() / self.epsilons
        if self.groups.limits is None:
            return parts
        of_limits: FloatArray = (self.certified_limits / self.groups.limits[:, ::2]).max(axis=1)
        return np.maximum(parts, of_limits)

    def history(self, group: int) -> tuple[SampledGaussian, ...]:
        """What a group goes through in all runs."""
        phases = (phase.history(group) for phase in self.phases)
        return tuple(replace(one, steps=self.runs * one.steps) for one in (*phases, *self.beside))

    @cached_property
    def _certified(self) -> FloatArray:
        return self._spent(self._all_steps, range(len(self.groups)))

    @property
    def _all_steps(self) -> tuple[int, ...]:
        return tuple(self.runs * phase.steps for phase in self.phases)

    def _spent(self, steps: tuple[int, ...], groups: Sequence[int], delta: float | None = None) -> FloatArray:
        chosen = np.asarray(groups, dtype=np.int64)
        rates = np.array(
            [
                phase.sample_rate[chosen] if done else 0.0 * chosen
                for phase, done in zip(self.phases, steps, strict=True)
            ]
        )
        noises = np.array([phase.noise_multiplier[chosen] for phase in self.phases])
        if delta is not None and self.groups.starts is not None:
            raise PlanError("A plan on accounts has an epsilon at each account's own delta only.")
        claims = self.groups.claims[chosen] if delta is None else np.full(len(chosen), delta)
        spent = batch_epsilon(self.certify, Histories(rates, noises, steps), claims)
        if delta is None:
            above = np.flatnonzero(~(spent <= self.epsilons[chosen]))  # chords are a little above the accountant itself
            few = Histories(rates[:, above], noises[:, above], steps, way="composed")
            spent[above] = batch_epsilon(self.certify, few, claims[above])
        certain: FloatArray = read_only(spent)
        return certain

    # -- what it promises --------------------------------------------------------------------------

    @property
    def guarantee(self) -> str:
        """The promise of this plan, in the words of the documentation."""
        return self.guarantee_of_run(None)

    def guarantee_of_run(
        self,
        randomness: str | None,
        features: str | None = None,
        person: str | None = None,
        registry: str | None = None,
    ) -> str:
        """The promise of a run of this plan.

        randomness  "chacha20", "secure" or "seeded"
        features    what computed the inputs before training, and where its constants come from
        person      the column of the persons' ids, or "each row is one person"; None if it is not stated
        registry    id of the registry that the run is charged to
        """
        return guarantee.words(
            self.accountant,
            shares_declared=self.adjacency == SHARES,
            steps=self.steps,
            runs=self.runs,
            unit=self.unit,
            on_accounts=self.groups.starts is not None,
            by_risk=self.groups.limits is not None,
            select=self.select,
            class_noise=self.class_noise,
            run=guarantee.OfRun(randomness, features, person, registry),
        )
