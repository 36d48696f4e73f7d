"""A plan: who is drawn how often, clipped how hard, under how much noise. The only thing training is told.

A phase is one such table with a number of steps, a plan a short list of phases. Nothing outside this folder
asks which strategy made it; whoever made it, `verify` recomputes what every group would spend.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .. import accounting
from .._version import __version__
from ..accounting import ACCOUNTANTS, Accountant, name_of
from ..budgets import LARGE_DELTA, SMALLEST_DELTA, Budgets, FloatArray, IntArray, how_many, is_large
from ..disclosure import hides
from ..errors import BudgetExceededError, EpsilonsWarning, PlanError
from ..escaping import printable
from ..files import write_json
from . import display, guarantee, plan_file
from .recipe import Phase, Recipe
from .replanning import Replanned, replanned

Adjacency = Literal["zero-out, roster public", "add-or-remove, shares declared"]
ROSTER: Adjacency = "zero-out, roster public"
SHARES: Adjacency = "add-or-remove, shares declared"

#: Epsilons shown during training are read off the spend curve at this many points per phase, rounded up.
CURVE_POINTS = 20

#: What rounding may change in a sum over all groups.
ROUNDING = 1e-6

#: By so much less may a saved spend be than what this version computes of the same numbers.
OTHER_VERSIONS = 1e-3

ODD_DIVISOR = (
    "some phase's expected_batch, by which updates are divided, is not what its rates come to, the sum of records · "
    "sample_rate"
)

#: A budget of which more than this part is left over is worth a word.
UNUSED = 0.002


@dataclass(frozen=True, eq=False)
class Plan:
    """What will be done to every group, fixed before training, with what it costs each.

    strategy, options  how it was made; nothing depends on them later
    accountant         name of the accountant that certifies it
    adjacency          which data sets count as neighbours (see `guarantee`)
    records            records it was made for (declared ones under public shares)
    batch_size         expected batch of the recipe
    levels, delta      (groups,) budgets, strictest first
    counts             (groups,) records in each group
    phases             the tables, in the order they are used
    certify            the accountant's function, where it is not one of ACCOUNTANTS
    charged_before     steps at its beginning that a run was charged before the plan was changed (`replan`); 0 for a
                       plan to train under
    """

    strategy: str
    accountant: str
    adjacency: str
    records: int
    batch_size: float
    epsilons: FloatArray
    delta: FloatArray
    counts: IntArray
    phases: tuple[Phase, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    certify: Accountant | None = field(default=None, repr=False)
    charged_before: int = 0

    def __post_init__(self) -> None:
        for name, dtype in (("epsilons", np.float64), ("delta", np.float64), ("counts", np.int64)):
            array = np.array(getattr(self, name), dtype=dtype)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        object.__setattr__(self, "phases", tuple(self.phases))
        groups = self.epsilons.shape
        if len(groups) != 1 or groups[0] == 0 or self.delta.shape != groups or self.counts.shape != groups:
            raise PlanError("A plan needs one epsilon, delta and number of records per group, and at least one group.")
        if not self.phases:
            raise PlanError("A plan needs at least one phase.")
        if any(phase.sample_rate.shape != groups for phase in self.phases):
            raise PlanError(f"Every phase of a plan needs one row per group; this plan has {groups[0]:,} groups.")
        if not (
            (np.isfinite(self.epsilons) & (self.epsilons > 0)).all()
            and ((self.delta >= SMALLEST_DELTA) & (self.delta < 1)).all()
        ):
            raise PlanError(
                f"A plan's budgets must be positive and finite, its deltas at least {SMALLEST_DELTA:g} and below 1."
            )
        looser, same = np.diff(self.epsilons) > 0, np.diff(self.epsilons) == 0
        # After a change of plans, people with the same budget may have different pasts.
        apart = np.diff(self.delta) > 0 if len(self.phases) == 1 else np.diff(self.delta) >= 0
        if not (looser | (same & apart)).all():
            raise PlanError("A plan's groups must be distinct and stand strictest first.")
        if (self.counts < 1).any() or self.counts.sum() != self.records:
            raise PlanError(
                f"A plan's groups must hold at least one record each and {self.records:,} together; they hold "
                f"{self.counts.sum():,}."
            )
        if self.adjacency not in (ROSTER, SHARES):
            raise PlanError(f"A plan's adjacency is {ROSTER!r} or {SHARES!r}; {self.adjacency!r} arrived.")
        if self.charged_before not in (0, self.steps - self.phases[-1].steps):
            raise PlanError(
                "A plan's charged_before is 0 or the steps of all phases but the last, "
                f"{self.steps - self.phases[-1].steps:,}; {self.charged_before} arrived."
            )
        object.__setattr__(self, "charged_before", int(self.charged_before))

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
            epsilons=budgets.epsilons,
            delta=budgets.delta,
            counts=budgets.counts,
            phases=phases,
        )

    # -- what it holds -----------------------------------------------------------------------------

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

    def epsilon_spent(self, delta: float | None = None) -> FloatArray:
        """(groups,) upper bound on epsilon after all steps, at each group's own delta (or at `delta` for all)."""
        everyone = range(len(self.epsilons))
        return self._certified if delta is None else self._spent(self._all_steps, everyone, delta)

    def spent_after(self, steps: Sequence[int], groups: Sequence[int] | None = None) -> FloatArray:
        """(groups,) upper bound on epsilon after `steps[i]` steps of phase i, of all groups or of these.

        Read off the spend curve: the steps are rounded up to one of CURVE_POINTS points per phase, so the
        result is never below the truth and watching a run costs a few evaluations, not one per step.
        """
        rounded = []
        for phase, done in zip(self.phases, steps, strict=True):
            stride = -(-phase.steps // CURVE_POINTS)
            rounded.append(min(-(-int(done) // stride) * stride, phase.steps))
        chosen = range(len(self.epsilons)) if groups is None else groups
        return self._spent(tuple(rounded), chosen)

    def verify(self) -> Plan:
        """Recompute every group's spend; raises BudgetExceededError if any is above its budget. Returns the plan."""
        over = ~(self.epsilon_spent() <= self.epsilons)  # negated, so that NaN is refused
        if over.any():
            worst = float((self.epsilon_spent() / self.epsilons).max()) - 1
            raise BudgetExceededError(
                f"This plan would spend more than {over.sum():,} of {len(over):,} groups allow, by up to {worst:.2%} "
                f"(accountant {self.accountant!r}). It is refused: make a new plan with epsilons.plan, or lower its "
                "rates, clip norms or steps, or raise its noise."
            )
        return self

    def check_can_begin(self) -> None:
        """Raise PlanError for a changed plan: a run that began with it would make its first steps a second time."""
        if self.charged_before:
            raise PlanError(
                f"This plan was changed after {self.charged_before:,} steps of an earlier run, and what it certifies "
                "contains them: training under it would make them twice and spend beyond budgets. It shows what "
                "everyone would have spent; a run cannot go on under it. To train, make a new plan with epsilons.plan, "
                "and release nothing of the earlier run."
            )

    @cached_property
    def _certified(self) -> FloatArray:
        return self._spent(self._all_steps, range(len(self.epsilons)))

    @property
    def _all_steps(self) -> tuple[int, ...]:
        return tuple(phase.steps for phase in self.phases)

    @property
    def accounts(self) -> Accountant:
        """The accountant's function. A named one is never replaced: a plan that says "pld" is held to PLD."""
        certify = ACCOUNTANTS.get(self.accountant, self.certify)
        if certify is None:
            raise PlanError(
                f"This plan was certified by {self.accountant!r}, which is not one of {', '.join(ACCOUNTANTS)}; pass "
                "that function as accountant=…, to Plan.load, report or audit."
            )
        return certify

    def _spent(self, steps: tuple[int, ...], groups: Sequence[int], delta: float | None = None) -> FloatArray:
        chosen = np.asarray(groups, dtype=np.int64)
        rates = np.array(
            [
                phase.sample_rate[chosen] if done else 0.0 * chosen
                for phase, done in zip(self.phases, steps, strict=True)
            ]
        )
        noises = np.array([phase.noise_multiplier[chosen] for phase in self.phases])
        deltas = self.delta[chosen] if delta is None else np.full(len(chosen), delta)
        spent = accounting.epsilons(self.accounts, accounting.Columns(rates, noises, steps), deltas)
        spent.setflags(write=False)
        return spent

    def replan(
        self,
        *,
        after: int,
        budgets: Budgets,
        was: Budgets | IntArray,
        withdrawn: Sequence[int] | IntArray | npt.NDArray[np.bool_] = (),
        independent: bool = False,
    ) -> Replanned:
        """From step `after` on, other budgets, for reasons that depend on nothing this run has released.

        after        steps charged so far, within the last phase
        budgets      the new budget of every record, in data-set order; of withdrawn ones it does not matter
        was          the budgets this plan was made for, or the (records,) rows of an earlier replanning
        withdrawn    records that are drawn no more: indices, each once, or a (records,) mask of True and False
        independent  say True: you state that the change would be the same whatever the run had released

        Whoever does not change keeps the very row; the noise stays, the divisor follows the new rates, or stays where
        nobody is drawn any more. Whoever changes gets another rate where the plan's clip norms are all alike, else
        another clip norm; whose budget is nearly used up and is raised by next to nothing keeps the row, too.

        Raises PlanError if independence is not stated or `after` is not within the last phase, BudgetError if the
        records do not fit, InfeasibleBudgetError if a new budget that was not overspent cannot be met.

        The plan that comes of it says what everyone would have spent. It contains the steps charged so far, so nothing
        can be trained under it: make_private, fit, ledgers and run folders refuse it.
        """
        return replanned(self, after=after, budgets=budgets, was=was, withdrawn=withdrawn, independent=independent)

    # -- how it is kept ----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """What a saved plan holds, as JSON values; see docs/concepts.md for every key."""
        groups = [
            {"epsilon": float(e), "delta": float(d), "records": int(n), "epsilon_spent": float(s)}
            for e, d, n, s in zip(self.epsilons, self.delta, self.counts, self.epsilon_spent(), strict=True)
        ]
        phases = [phase.to_dict() for phase in self.phases]
        values: dict[str, Any] = {
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
            **self._change,
        }
        if len(phases) == 1:
            values |= {"noise_std": phases[0]["noise_std"], "expected_batch": phases[0]["expected_batch"]}
            for row, numbers in zip(groups, phases[0]["groups"], strict=True):
                row.update(numbers)
        return plan_file.sealed(values)

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON, whole or not at all, for its owner's eyes alone (mode 0600)."""
        return write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path, accountant: Accountant | None = None) -> Plan:
        """Read a saved plan and verify it again: raises PlanError if it is not a plan, BudgetExceededError if it
        overspends.

        Raises PlanError, too, for a file that was changed by hand. Warns of what its numbers cannot show: declared
        shares, a delta of 1/records or more, a file without a digest.
        """
        file, as_saved = plan_file.read(Path(path))
        plan = cls(
            strategy=file.strategy,
            options=file.options,
            accountant=file.accountant,
            certify=accountant,
            adjacency=file.adjacency,
            records=file.records,
            batch_size=file.batch_size,
            epsilons=np.array([row.epsilon for row in file.groups]),
            delta=np.array([row.delta for row in file.groups]),
            counts=np.array([row.records for row in file.groups]),
            phases=tuple(Phase.from_file(phase) for phase in file.phases),
            charged_before=file.charged_before,
        )
        plan._agrees_with(file)
        plan.verify()
        plan._is_as_planned(file)
        if file.digest is not None and not as_saved:
            raise PlanError(
                f"{path} was changed by hand: its digest is not that of what it holds. Make a new plan with "
                "epsilons.plan, or epsilons plan … -o."
            )
        for doubt in plan._doubts(file):
            warnings.warn(f"{path}: {doubt}", EpsilonsWarning, stacklevel=2)
        return plan

    @property
    def _divides_as_it_draws(self) -> bool:
        """Whether every phase's expected batch, the divisor of its updates, is what its rates come to."""
        divisor = self.batch_size
        for phase in self.phases:
            expected = float(self.counts @ phase.sample_rate)
            if expected == 0:  # nobody is drawn (any more), and the divisor stays what it was
                expected = divisor
            if not math.isclose(phase.expected_batch, expected, rel_tol=ROUNDING):
                return False
            divisor = phase.expected_batch
        return True

    def _is_as_planned(self, file: plan_file.PlanFile) -> None:
        """Refuse a file whose numbers keep the budgets, but are none that planning gives."""
        from . import STRATEGIES  # which knows plans

        if self.strategy in STRATEGIES and not self._divides_as_it_draws:
            raise PlanError(f"This plan file contradicts itself: {ODD_DIVISOR}. It was edited; make a new plan.")
        if not self.batch_size <= self.records:
            raise PlanError("This plan's batch_size is larger than its number of records: no sampling rate is above 1.")
        for row, own in zip(file.groups, self.epsilon_spent(), strict=True):
            if not own * (1 - OTHER_VERSIONS) <= row.epsilon_spent <= row.epsilon * (1 + ROUNDING):
                raise PlanError(
                    "This plan file contradicts itself: some group's spends are not what its phases come to. It was "
                    "edited; make a new plan with epsilons plan."
                )
        if self.adjacency == SHARES and (len(np.unique(self.delta)) > 1 or self.charged_before):
            raise PlanError(
                f"This plan file claims {SHARES!r}, but such a plan has one delta for all and is never changed midway. "
                "It was edited; make a new plan with public_shares and public_records."
            )

    def _doubts(self, file: plan_file.PlanFile) -> Iterator[str]:
        """What the numbers in a file cannot show."""
        if file.digest is None:
            yield (
                "this plan file holds no digest, so a change by hand would not be seen; an earlier version or another "
                "program wrote it. No budget is overspent. To add one, save it again once you have looked through it."
            )
        if not self._divides_as_it_draws:
            yield f"{ODD_DIVISOR}. A strategy of one's own may want that; privacy does not depend on it."
        if self.adjacency == SHARES:
            yield (
                "this plan promises that presence is protected, too, because its shares and number of records were "
                "declared by the caller as not derived from the data. Nothing in the file can show that they were; "
                "rely on it only if you know who made it."
            )
        if is_large(self.delta, self.records):
            yield LARGE_DELTA.format(1 / self.records)

    def _agrees_with(self, file: plan_file.PlanFile) -> None:
        """Refuse a file whose repeated or derived numbers contradict its phases: someone edited half of it."""
        claims: list[tuple[str, float | None, float]] = [("steps", file.steps, self.steps)]
        for phase, written in zip(self.phases, file.phases, strict=True):
            for own, row in zip(phase.noise_multiplier, written.groups, strict=True):
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
        """SHA-256 of all numbers that define the plan, in hex: what a ledger is bound to.

        Spends are left out, because a library's patch release may move their last digits.
        """
        numbers = {
            "accountant": self.accountant,
            "adjacency": self.adjacency,
            "records": self.records,
            "groups": [self.epsilons.tolist(), self.delta.tolist(), self.counts.tolist()],
            "phases": [phase.to_dict() for phase in self.phases],
            **self._change,
        }
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()

    @property
    def _change(self) -> dict[str, int]:
        """Absent from plans that were never changed: their files and digests are what they always were."""
        return {"charged_before": self.charged_before} if self.charged_before else {}

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
        """An aligned table of this plan beside others for the same groups: what each gives and gets."""
        for other in others:
            if not (np.array_equal(self.epsilons, other.epsilons) and np.array_equal(self.counts, other.counts)):
                raise PlanError("Plans can be compared only when they were made for the same groups of records.")
        below = display.WITHHELD if hides(self) else display.INFLUENCE
        return display.aligned(display.comparison_table((self, *others))) + "\n\n" + below

    @property
    def influence(self) -> FloatArray:
        """(groups,) steps · sample_rate / noise_multiplier, added over phases: how hard a record can steer the run."""
        each = [phase.steps * phase.sample_rate / phase.noise_multiplier for phase in self.phases]
        return np.asarray(np.sum(each, axis=0), dtype=np.float64)

    def __str__(self) -> str:
        return self.summary() + "\n\n" + self.guarantee

    def __repr__(self) -> str:
        return f"Plan({self.strategy!r}, {self.steps:,} steps, {self.records:,} records, {len(self.epsilons):,} groups)"

    @property
    def title(self) -> str:
        """The plan in one line."""
        return (
            f"{printable(self.strategy)}: {self.records:,} records, {self.steps:,} steps, certified by "
            f"{printable(self.accountant)}, "
            f"{self.adjacency}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What the table alone does not make plain: who takes no part, and who cannot use up a budget. Counts only.

        Where few hold some budget, only that numbers are withheld: these counts may change with what one person chose.
        """
        if hides(self):
            return (display.WITHHELD,)
        rates = np.array([phase.sample_rate for phase in self.phases])
        left_out = (rates == 0).all(axis=0)
        short = ~left_out & (self.epsilon_spent() < self.epsilons * (1 - UNUSED))
        always = short & (rates.min(axis=0) == 1)
        told = []
        if left_out.any():
            told.append(f"{self._how_many(left_out)} records take no part and spend nothing.")
        if always.any():
            told.append(
                f"{self._how_many(always)} records are drawn in every step and still leave part of their budgets "
                "unused; mix or scale would use it."
            )
        if (short & ~always).any():
            some = self._how_many(short & ~always)
            told.append(f"{some} records leave more than {UNUSED:.1%} of their budgets unused.")
        return tuple(told)

    def _how_many(self, groups: npt.NDArray[np.bool_]) -> str:
        return how_many(int(self.counts[groups].sum()), self.records)

    def summary(self) -> str:
        """The plan as aligned tables, one per phase; what fewer than 20 records hold is shown merged."""
        blocks = [f"{title}\n{display.aligned(table)}" for title, table in display.phase_tables(self)]
        return "\n".join([self.title, *blocks, *self.notes])
