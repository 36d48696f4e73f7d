"""Planted privacy bugs: does the suite notice? Each is a change to one or two functions, made in memory only.

    python -m tests.conformance.mutants [NAME …] [--jobs 2] [--results found.json]

runs the suite against each, in a process of its own, and prints what catches what (docs/conformance.md); with a file
for results, one that was stopped goes on where it was. Every mutant also names one test that must fail; pytest checks
those alone (test_mutants.py).

An edit names the function it changes, and the text in it. When either is gone, LookupError says so: mend the mutant.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import resource
import signal
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

INDEPENDENCE = "epsilons.training.independence."
CHECK = f"{INDEPENDENCE}check:IndependenceCheck."
PRIVATE = "epsilons.training.private:Private."
RANDOM = "epsilons.training.randomness:Randomness."
LOOP = "epsilons.training.clipping.loop:Loop.clipped_sum"
VMAP = "epsilons.training.clipping.vmap:"
GHOST = "epsilons.training.clipping.ghost.engine:Ghost."
CLIP = "epsilons.training.clipping.engine:clip_factors"
PIECES = "epsilons.training.clipping.ghost.per_sample_grads:"
SUMMING = "epsilons.training.clipping.summing:"
TRACING = "epsilons.training.clipping.ghost.graph:"
DRAWS = "epsilons.training.sampling:Draws.by_coins"
PLANS = "epsilons.planning.plans:Plan."
REPLAYS = ("epsilons.ledger:Ledger.record", "return known == update", "return True")
TRUST = (f"{PLANS}verify", "if over.any():", "if False:")


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    bug     what is wrong, in words
    killer  a test that must fail: file::function, below tests/conformance unless it says otherwise
    edits   (module:function, text in its source without the class's indentation, other text), each
    """

    bug: str
    killer: str
    edits: tuple[tuple[str, str, str], ...]


def _m(bug: str, killer: str, *edits: tuple[str, str, str]) -> Mutant:
    return Mutant(bug, killer, edits)


_NOISE = "phase.noise_std * own"
_RATES = "thresholds(self.plan.phases[phase].sample_rate)"
_DRAWN = "self._draws.at(self._phase, self._step)"
_SPENT = "self.delta[chosen] if delta is None"

MUTANTS: dict[str, Mutant] = {
    # -- noise
    "no-noise": _m(
        "no noise at all",
        "test_noise.py::test_a_parameter_of_two_layers_is_noised_once",
        (f"{PRIVATE}_update", _NOISE, "0 * own"),
    ),
    "noise-3-percent-small": _m(
        "noise × 0.97",
        "test_noise.py::test_a_parameter_of_two_layers_is_noised_once",
        (f"{PRIVATE}_update", _NOISE, "0.97 * phase.noise_std * own"),
    ),
    "one-tensor-without-noise": _m(
        "the first parameter tensor gets no noise",
        "test_noise.py::test_the_noise_of_every_tensor_is_as_large_as_stated",
        (f"{PRIVATE}_update", _NOISE, "phase.noise_std * (start > 0) * own"),
    ),
    "last-tensor-without-noise": _m(
        "the last parameter tensor gets no noise",
        "test_noise.py::test_the_noise_of_every_tensor_is_as_large_as_stated",
        (f"{PRIVATE}_update", _NOISE, "phase.noise_std * (start + p.numel() < count) * own"),
    ),
    "noise-of-step-0-again": _m(
        "the same noise at every step (its key does not know the step)",
        "test_noise.py::test_the_noise_of_an_update_tells_nothing_about_another_updates",
        (f"{PRIVATE}_update", "noise(self._phase, self._step, count)", "noise(self._phase, 0, count)"),
    ),
    "noise-shared-by-tensors": _m(
        "every tensor gets the beginning of the same noise",
        "test_noise.py::test_the_noise_of_a_tensor_tells_nothing_about_another_tensors",
        (f"{PRIVATE}_update", "noise[start : start + p.numel()]", "noise[: p.numel()]"),
    ),
    "noise-averaged-twice": _m(
        "noise divided by the batch before the average is",
        "test_noise.py::test_the_noise_of_every_tensor_is_as_large_as_stated",
        (f"{PRIVATE}_update", _NOISE, "phase.noise_std / phase.expected_batch * own"),
    ),
    "noise-shared-by-chunks": _m(
        "noise divided by √(number of chunks)",
        "test_noise.py::test_the_noise_of_every_tensor_is_as_large_as_stated",
        (f"{PRIVATE}_update", _NOISE, f"phase.noise_std / max(1, len(chunks({_DRAWN}, self._largest))) ** 0.5 * own"),
    ),
    "noise-for-every-chunk": _m(
        "noise added once per chunk instead of once per draw",
        "test_noise.py::test_the_noise_of_every_tensor_is_as_large_as_stated",
        (f"{PRIVATE}_update", _NOISE, f"phase.noise_std * max(1, len(chunks({_DRAWN}, self._largest))) ** 0.5 * own"),
    ),
    "noise-by-drawn-batch": _m(
        "noise scaled with the drawn number of records",
        "test_noise.py::test_the_noise_of_every_tensor_is_as_large_as_stated",
        (f"{PRIVATE}_update", _NOISE, f"phase.noise_std * len({_DRAWN}) / phase.expected_batch * own"),
    ),
    "noise-only-over-somebody": _m(
        "a sum of nothing is released without noise",
        "test_noise.py::test_a_draw_of_nobody_is_noised_like_any_other",
        (f"{PRIVATE}_update", _NOISE, "phase.noise_std * any(bool(t.any()) for t in self._sum) * own"),
    ),
    "empty-draws-skipped": _m(
        "a draw of nobody makes no update",
        "test_noise.py::test_a_draw_of_nobody_is_noised_like_any_other",
        (
            f"{PRIVATE}_until_the_end",
            "if batch is None:\n                self._update()\n",
            "if batch is None:\n"
            "                self._in_draw, self._step = False, self._step + 1\n"
            "                self._skip_what_is_over()\n",
        ),
    ),
    "noise-of-phase-1-again": _m(
        "the same noise in every phase of a plan (its key does not know the phase)",
        "test_noise.py::test_the_noise_of_an_update_tells_nothing_about_another_updates",
        (f"{PRIVATE}_update", "noise(self._phase, self._step, count)", "noise(0, self._step, count)"),
    ),
    "noise-from-the-coins": _m(
        "noise is made from the stream that the coins came from",
        "tests/test_randomness.py::test_noise_is_never_the_coins_stream_read_again",
        (f"{RANDOM}noise", '"noise"', '"coins"'),
    ),
    "one-key-for-all-runs": _m(
        "the run's key is a constant",
        "test_noise.py::test_runs_without_a_seed_never_share_noise",
        (f"{RANDOM}fresh", "secrets.token_bytes(KEY_BYTES)", "bytes(KEY_BYTES)"),
    ),
    # -- the average
    "divisor-drawn": _m(
        "divided by the drawn number of records",
        "test_divisor.py::test_a_record_is_worth_the_same_however_many_others_are_drawn",
        (f"{PRIVATE}_update", "/ phase.expected_batch", f"/ max(1, len({_DRAWN}))"),
    ),
    # -- draws
    "shuffled-batches": _m(
        "batches of fixed size instead of coins",
        "test_draws.py::test_the_size_of_a_draw_varies_as_independent_coins_make_it",
        (
            DRAWS,
            "    return ",
            "    rates = self.plan.phases[phase].sample_rate[self.group]\n"
            "    dice = np.random.default_rng(self.randomness.seed('shuffle', phase, step))\n"
            "    return np.sort(dice.choice(len(rates), round(rates.sum()), replace=False, p=rates / rates.sum()))\n"
            "    return ",
        ),
    ),
    "once-per-epoch": _m(
        "every record once per epoch, at a random place in it",
        "test_draws.py::test_the_counts_of_records_spread_as_independent_steps_make_them",
        (
            DRAWS,
            "    return ",
            "    rates = self.plan.phases[phase].sample_rate[self.group]\n"
            "    epoch = np.maximum(1, np.round(1 / np.maximum(rates, 1e-9))).astype(np.uint64)\n"
            "    first = self.randomness.coins(phase, 0, len(self.group)) % epoch\n"
            "    return np.flatnonzero((np.uint64(step) + first) % epoch == 0)\n"
            "    return ",
        ),
    ),
    "coins-for-two-steps": _m(
        "coins are tossed at every other step only",
        "test_draws.py::test_having_been_drawn_says_nothing_about_the_next_steps",
        (DRAWS, "coins(phase, step, ", "coins(phase, step // 2, "),
    ),
    "coins-of-phase-1-again": _m(
        "the same coins in every phase of a plan",
        "test_draws.py::test_a_new_phase_draws_anew",
        (DRAWS, "coins(phase, step, ", "coins(0, step, "),
    ),
    "one-coin-per-group": _m(
        "one coin for a whole group",
        "test_draws.py::test_no_two_records_are_drawn_together_more_or_less_often_than_chance",
        (DRAWS, "coins(phase, step, len(self.group))", "coins(phase, step, len(self.group))[self.group]"),
    ),
    "rate-squared": _m(
        "q_p used twice",
        "test_draws.py::test_every_record_is_drawn_at_its_own_rate",
        (DRAWS, _RATES, "thresholds(self.plan.phases[phase].sample_rate ** 2)"),
    ),
    "rate-of-the-mean": _m(
        "everyone drawn at the mean rate",
        "test_draws.py::test_every_record_is_drawn_at_its_own_rate",
        (
            DRAWS,
            _RATES,
            "thresholds(0 * self.plan.phases[phase].sample_rate + self.plan.phases[phase].sample_rate.mean())",
        ),
    ),
    "rates-swapped": _m(
        "the table of rates read from its other end",
        "test_draws.py::test_every_record_is_drawn_at_its_own_rate",
        (DRAWS, _RATES, f"{_RATES}[::-1]"),
    ),
    "rate-rounded-up": _m(
        "rates rounded up to 20 bits",
        "test_draws.py::test_a_rate_beyond_single_precision_is_kept",
        (
            "epsilons.training.randomness:thresholds",
            "np.floor(np.asarray(rates, dtype=np.float64) * 2.0**COIN_BITS)",
            "(np.ceil(np.asarray(rates, dtype=np.float64) * 2.0**20) * 2.0 ** (COIN_BITS - 20))",
        ),
    ),
    "threshold-rounded-up": _m(
        "thresholds rounded up in their 53rd bit",
        "tests/test_randomness.py::test_a_threshold_is_the_rate_rounded_down_never_up",
        ("epsilons.training.randomness:thresholds", "np.floor(", "np.ceil("),
    ),
    "float32-coins": _m(
        "coins of 24 bits, as torch.rand gives them",
        "test_draws.py::test_a_rate_beyond_single_precision_is_kept",
        (
            f"{RANDOM}coins",
            ">> np.uint64(64 - COIN_BITS)",
            ">> np.uint64(40) << np.uint64(COIN_BITS - 24)",
        ),
    ),
    # -- clipping
    "clipping-forgotten": _m(
        "gradients added as they are",
        "test_contributions.py::test_a_contribution_is_the_gradient_cut_to_the_bound_and_never_longer",
        (CLIP, ".clamp_max(1.0) * SHRINK", " * 0 + 1.0"),
    ),
    "clipped-a-thousandth-long": _m(
        "contributions 0.1 % longer than allowed",
        "test_contributions.py::test_a_contribution_is_the_gradient_cut_to_the_bound_and_never_longer",
        (CLIP, "* SHRINK", "* 1.001"),
    ),
    "everyone-normalised": _m(
        "short gradients stretched to the clip norm",
        "test_contributions.py::test_a_contribution_is_the_gradient_cut_to_the_bound_and_never_longer",
        (CLIP, ".clamp_max(1.0)", ""),
    ),
    "sum-clipped-instead-of-records": _m(
        "the chunk's sum is clipped, not each record",
        "test_contributions.py::test_records_are_clipped_one_by_one_and_not_their_mean_or_sum",
        (
            f"{PRIVATE}_add",
            "clipped = self._engine.clipped_sum(losses, *self._bounds(handed))",
            "clip_norm, weight = self._bounds(handed)\n"
            "        clipped = self._engine.clipped_sum(losses, 0 * clip_norm + 1e300, weight)\n"
            "        length = sum(float(t.square().sum()) for t in clipped) ** 0.5\n"
            "        clipped = [t * min(1.0, float(clip_norm.sum()) / max(length, 1e-300)) for t in clipped]",
        ),
    ),
    "clip-norms-swapped": _m(
        "the table of clip norms read from its other end",
        "test_records.py::test_each_record_is_clipped_to_the_norm_of_its_own_budget",
        (f"{PRIVATE}_bounds", "phase.clip_norm[group]", "phase.clip_norm[::-1][group]"),
    ),
    "clip-norm-of-the-loosest": _m(
        "everyone clipped to the largest clip norm",
        "test_records.py::test_each_record_is_clipped_to_the_norm_of_its_own_budget",
        (f"{PRIVATE}_bounds", "phase.clip_norm[group]", "phase.clip_norm.max() + 0 * phase.clip_norm[group]"),
    ),
    "weights-ignored": _m(
        "a group's weight is left out",
        "test_contributions.py::test_a_groups_weight_is_part_of_its_bound",
        (f"{PRIVATE}_bounds", "phase.weight[group]", "1 + 0 * phase.weight[group]"),
    ),
    "norm-of-the-largest-tensor": _m(
        "clipped by the norm of one parameter tensor, not of all (engine loop)",
        "test_contributions.py::test_a_contribution_is_the_gradient_cut_to_the_bound_and_never_longer",
        (LOOP, "clip_factors(squared.sum()[None]", "clip_factors(squared.max()[None]"),
    ),
    "norm-without-biases": _m(
        "biases left out of the norm (engine vmap)",
        "test_gradients.py::test_a_records_contribution_is_its_own_gradient_clipped",
        (f"{VMAP}_squared_norms", "if g is not None:", "if g is not None and g.ndim > 2:"),
    ),
    "second-use-forgotten": _m(
        "of a parameter used twice only one use counts, and the check of gradients is off (engine vmap)",
        "test_gradients.py::test_a_records_contribution_is_its_own_gradient_clipped",
        (f"{VMAP}Vmap._by_module", "gradient if before is None else before + gradient", "gradient"),
        (f"{VMAP}Vmap._disagreeing", "    # Factors in", "    return []\n    # Factors in"),
    ),
    "ghost-norm-without-biases": _m(
        "biases left out of the norm (engine ghost)",
        "test_gradients.py::test_a_records_contribution_is_its_own_gradient_clipped",
        (
            "epsilons.training.clipping.ghost.engine:_norms",
            "piece.squared_norm() for",
            "piece.squared_norm() * (piece.dense().rows.ndim > 2) for",
        ),
    ),
    "ghost-clips-every-use": _m(
        "a parameter used twice is clipped by the norms of its uses, not of its gradient (engine ghost)",
        "test_contributions.py::test_a_parameter_in_two_layers_counts_once_in_the_norm_with_its_whole_gradient",
        (
            f"{GHOST}_by_parameter",
            "found[k] = carried if k not in found else _sum(found[k], carried)",
            "uses = [found[k].squared_norm(), carried.squared_norm()] if k in found else None\n"
            "                found[k] = carried if k not in found else _sum(found[k], carried)\n"
            "                if uses:\n"
            "                    found[k].squared_norm = lambda uses=uses: uses[0] + uses[1]",
        ),
    ),
    "ghost-guard-off": _m(
        "what rounding may hide of a norm from Gram matrices is not allowed for (engine ghost)",
        "tests/test_ghost.py::test_no_contribution_is_above_its_clip_norm_however_much_cancels",
        ("epsilons.training.clipping.ghost.per_sample_grads:Outer._from_grams", "(bound > right)", "(bound < 0)"),
        (
            "epsilons.training.clipping.ghost.per_sample_grads:Outer._from_grams",
            "(root + self._of_product * size + self._lost_by_product).square()",
            "squared.clamp_min(0.0)",
        ),
    ),
    "broken-records-added": _m(
        "a gradient that is not a number is added (engine loop)",
        "test_contributions.py::test_a_gradient_that_is_not_finite_contributes_nothing_and_spoils_nobodys",
        (
            CLIP,
            "torch.where(torch.isfinite(norm) & (factor >= tiny), factor, torch.zeros_like(factor))",
            "factor.nan_to_num(1.0)",
        ),
        (LOOP, "raise NonFiniteGradientError(broken(losses))", "pass"),
    ),
    "broken-record-silences-chunk": _m(
        "a record that is not finite takes its whole chunk along",
        "test_contributions.py::test_a_gradient_that_is_not_finite_contributes_nothing_and_spoils_nobodys",
        (f"{PRIVATE}_add", "self._contaminated = contaminated", "pass"),
    ),
    "stand-in-counted": _m(
        "the record that stands in for a broken one is counted once more",
        "test_contributions.py::test_a_gradient_that_is_not_finite_contributes_nothing_and_spoils_nobodys",
        (f"{PRIVATE}_bounds", "    weight[list(handed.silent)] = 0.0\n", ""),
    ),
    "norms-vanish-in-32-bits": _m(
        "squares that vanish in 32 bits are not allowed for in norms",
        "tests/test_compiling.py::test_no_norm_vanishes_where_32_bits_end",
        ("epsilons.training.clipping.ghost.per_sample_grads:squares", "flat.shape[1] * LOST", "0.0"),
        (
            "epsilons.training.clipping.ghost.per_sample_grads:Outer._from_grams",
            "lost = time * LOST * (",
            "lost = 0.0 * (",
        ),
        ("epsilons.training.clipping.ghost.per_sample_grads:Outer._from_grams", "+ k * LOST", ""),
        ("epsilons.training.clipping.ghost.per_sample_grads:Outer._from_grams", "+ p * LOST", ""),
        ("epsilons.training.clipping.ghost.per_sample_grads:Outer._lost_by_product", "* LOST", "* 0.0"),
    ),
    # -- whose budget is whose
    "group-by-place-in-chunk": _m(
        "a record's group looked up by its place in the chunk",
        "test_records.py::test_each_record_is_clipped_to_the_norm_of_its_own_budget",
        (f"{PRIVATE}_bounds", "self._draws.group[handed.indices]", "self._draws.group[: len(handed.indices)]"),
    ),
    "group-off-by-one": _m(
        "a record gets its neighbour's group",
        "test_records.py::test_each_record_is_clipped_to_the_norm_of_its_own_budget",
        (f"{PRIVATE}_bounds", "self._draws.group[handed.indices]", "self._draws.group[handed.indices - 1]"),
    ),
    "groups-of-another-plan": _m(
        "the plan's groups numbered from the other end",
        "test_records.py::test_each_record_is_drawn_at_the_rate_of_its_own_budget",
        (
            "epsilons.training.validation:groups_of",
            "return budgets.group\n",
            "return budgets.group.max() - budgets.group\n",
        ),
    ),
    "subset-shifted": _m(
        "a subset takes the budgets of the first records",
        "tests/test_budgets.py::test_a_subset_keeps_each_record_s_budget_and_delta",
        (
            "epsilons.budgets:Budgets.subset",
            "Budgets(self._epsilon[chosen], self._delta[chosen])",
            "Budgets(self._epsilon[: len(chosen)], self._delta[: len(chosen)])",
        ),
    ),
    "records-out-of-order": _m(
        "a chunk's records are read in another order than their indices",
        "test_records.py::test_each_record_is_clipped_to_the_norm_of_its_own_budget",
        (
            "epsilons.training.datasets:_places",
            "int(i)) for i in address.indices]",
            "int(i)) for i in address.indices[::-1]]",
        ),
    ),
    "tensors-out-of-order": _m(
        "the same, for tensors",
        "test_records.py::test_each_record_is_clipped_to_the_norm_of_its_own_budget",
        (
            "epsilons.training.datasets:TensorRecords.stream",
            "torch.from_numpy(address.indices)",
            "torch.from_numpy(address.indices[::-1].copy())",
        ),
    ),
    # -- one sum, one draw
    "chunks-overlap": _m(
        "a chunk begins with the last record of the one before",
        "test_sums.py::test_nobody_is_twice_in_one_noisy_sum",
        (
            "epsilons.training.sampling:chunks",
            "    return np.array_split(drawn, -(-len(drawn) // largest))",
            "    pieces = np.array_split(drawn, -(-len(drawn) // largest))\n"
            "    return [pieces[0], *(np.append(a[-1:], b) for a, b in zip(pieces, pieces[1:]))]",
        ),
    ),
    "checks-added": _m(
        "what is only tried is learnt from, too",
        "test_sums.py::test_nobody_is_twice_in_one_noisy_sum",
        (f"{PRIVATE}backward", "if handed.variant is None:", "if True:"),
    ),
    "sum-not-emptied": _m(
        "a draw's sum begins with a tenth of the last one, un-noised (momentum before the noise)",
        "test_draws.py::test_every_record_is_drawn_at_its_own_rate",
        (
            f"{PRIVATE}_begin_draw",
            "self._sum = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]",
            "self._sum = [torch.zeros_like(p, dtype=torch.float64) + 0.1 * getattr(p, 'kept', 0) "
            "for p in self._parameters]",
        ),
        (
            f"{PRIVATE}_update",
            "    self._sum = []\n",
            "    for p, total in zip(self._parameters, self._sum):\n        p.kept = total\n    self._sum = []\n",
        ),
    ),
    "draw-drawn-again": _m(
        "a draw may be left unfinished and drawn again",
        "tests/test_private.py::test_a_draw_left_unfinished_cannot_be_drawn_again",
        (f"{PRIVATE}_run", "if self._in_draw:", "if False:"),
    ),
    # -- several processes
    "everyone-on-every-rank": _m(
        "of several processes, each puts the whole draw into the sum",
        "test_ranks.py::test_two_processes_make_the_updates_of_one",
        ("epsilons.training.distributed:Ranks.part", "np.array_split(drawn, self.size)[self.rank]", "drawn"),
    ),
    "noise-shared-by-ranks": _m(
        "each process adds its share of the noise, the same on all",
        "test_ranks.py::test_two_processes_make_the_updates_of_one",
        (f"{PRIVATE}_update", _NOISE, "phase.noise_std / self.ranks.size**0.5 * own"),
    ),
    # -- charges
    "charge-after-update": _m(
        "a step is charged after its update",
        "test_charges.py::test_an_update_is_on_the_books_before_it_is_made",
        (f"{PRIVATE}_begin_draw", "self.ledger.charge(self._phase, self._step)", "pass"),
        (
            f"{PRIVATE}_update",
            "        self.optimizer.step()\n",
            "        self.optimizer.step()\n        self.ledger.charge(self._phase, self._step)\n",
        ),
    ),
    "charge-not-durable": _m(
        "a charge is not synced to disk before the update",
        "tests/test_checkpoints.py::test_a_run_whose_power_is_cut_comes_out_the_same_to_the_bit_and_is_charged_once",
        ("epsilons.ledger:Ledger.charge", "            self._sync()\n", "            pass\n"),
    ),
    "empty-draws-free": _m(
        "a draw of nobody is not charged",
        "test_charges.py::test_an_update_is_on_the_books_before_it_is_made",
        (
            f"{PRIVATE}_begin_draw",
            "self.ledger.charge(self._phase, self._step)",
            f"len({_DRAWN}) and self.ledger.charge(self._phase, self.ledger.charged[self._phase])",
        ),
    ),
    "one-step-more": _m(
        "training makes one step more than the plan, unpaid",
        "test_charges.py::test_as_many_updates_are_made_and_charged_as_the_plan_has_steps",
        (
            f"{PRIVATE}_addresses",
            "range(first, self.ledger.end(phase))",
            "range(first, self.ledger.end(phase) + 1)",
        ),
        (
            f"{PRIVATE}_skip_what_is_over",
            "self._step >= self.ledger.end(self._phase)",
            "self._step > self.ledger.end(self._phase)",
        ),
        (
            f"{PRIVATE}_begin_draw",
            "self.ledger.charge(self._phase, self._step)",
            "self.ledger.charge(self._phase, min(self._step, self.ledger.allowed[self._phase] - 1))",
        ),
    ),
    # -- stop and go on
    "fresh-coins": _m(
        "a run that goes on tosses fresh coins, free of charge",
        "test_resuming.py::test_no_more_is_released_than_is_charged",
        (
            "epsilons.training.private_setup:make_private",
            "if key is None else replace(source, key=key)",
            "if True else None",
        ),
        (f"{PRIVATE}take_up", "if not same or self._draws.randomness.commitment != self.ledger.key:", "if not same:"),
        REPLAYS,
    ),
    "replay-not-compared": _m(
        "a step that is made again is applied whatever came of it",
        "test_resuming.py::test_over_other_data_other_noise_is_laid_and_paid_for",
        REPLAYS,
    ),
    "changes-not-noticed": _m(
        "the same, and the key is kept whatever changed while the run stood still",
        "test_resuming.py::test_over_other_data_other_noise_is_laid_and_paid_for",
        (f"{PRIVATE}take_up", 'state["fingerprint"] == self._fingerprint_of_run and', ""),
        REPLAYS,
    ),
    "epoch-forgets-charges": _m(
        "a new key begins with nothing charged",
        "test_resuming.py::test_over_other_data_other_noise_is_laid_and_paid_for",
        ("epsilons.account:Account._key", "self.previous_keys = list(self.charged)", "pass"),
    ),
    "epoch-under-the-old-key": _m(
        "a new key is the old one",
        "test_resuming.py::test_over_other_data_other_noise_is_laid_and_paid_for",
        (f"{RANDOM}renewed", "    if not self.seeded:", "    return self\n    if not self.seeded:"),
    ),
    "checkpoint-after-release": _m(
        "a score is written down before its checkpoint is durable",
        "tests/test_checkpoints.py::test_no_score_is_written_before_its_checkpoint_is_durable",
        ("epsilons.training.fit_loop:fit", "private.checkpoint()  # nothing of a step gets out", "# nothing of a step"),
        (
            "epsilons.training.fit_loop:fit",
            "folder.append_metrics(row)\n",
            "folder.append_metrics(row)\n            private.checkpoint()\n",
        ),
    ),
    "key-kept": _m(
        "the key stays in the folder of a finished run",
        "tests/test_fitting.py::test_a_run_leaves_plan_ledger_metrics_and_model_and_no_key",
        (f"{PRIVATE}_settle", "self.folder.destroy_key()", "pass"),
    ),
    "ledger-allows-one-more": _m(
        "the ledger allows one step more than the plan",
        "tests/test_ledger.py::test_exactly_the_certified_steps_are_allowed_and_not_one_more",
        ("epsilons.ledger:Ledger.charge", "if left < 1:", "if left < 0:"),
        ("epsilons.ledger:Ledger.charge", "min(self._block, left)", "min(self._block, max(left, 1))"),
    ),
    # -- escapes
    "guard-gone": _m(
        "optimizer.step() by hand is not refused",
        "test_escapes.py::test_the_habit_of_backward_and_step_does_not_train_without_noise",
        (
            "epsilons.training.validation:refuse_step",
            "    raise CallOrderError(",
            "    return\n    raise CallOrderError(",
        ),
    ),
    "raw-gradient-in-sight": _m(
        "the un-noised sum lies in p.grad between backward and step",
        "test_escapes.py::test_no_gradient_is_in_sight_between_backward_and_step",
        (
            f"{PRIVATE}_add_to_sum",
            "        total += part",
            "        total += part\n"
            "    for p, total in zip(self._parameters, self._sum, strict=True):\n"
            "        p.grad = total.to(p.dtype)",
        ),
    ),
    "update-adds-to-what-lies-there": _m(
        "the noisy gradient is added to whatever is in p.grad",
        "test_escapes.py::test_a_gradient_put_in_by_hand_adds_nothing",
        (f"{PRIVATE}_update", "p.grad = gradient", "p.grad = gradient + (0 if p.grad is None else p.grad)"),
    ),
    "mixing-not-looked-for": _m(
        "batch statistics and losses across records are let pass",
        "test_mixing.py::test_one_record_cannot_move_the_others",
        ("epsilons.training.validation:check_layers", "    for name, module", "    return\n    for name, module"),
        (f"{CHECK}observe", "self._check_operators(watched)", "return"),
    ),
    "single-records-not-checked": _m(
        "state from record to record is let pass where each physical batch is one record",
        "tests/test_checks.py::test_state_from_record_to_record_is_refused_where_every_chunk_is_a_record_alone",
        (
            f"{PRIVATE}_present",
            "(count == 1 or batches.has_different(batch, count))",
            "count > 1 and batches.has_different(batch, count)",
        ),
    ),
    "collating-not-tried": _m(
        "collate functions that mix records are let pass",
        "tests/test_checks.py::test_a_collate_function_that_mixes_is_refused",
        (
            f"{PRIVATE}_checks",
            "gathered = self._records.gather(address, self._device, self._draws.randomness)",
            "gathered = Gathered(lambda places, whole=batch: batches.take(whole, places, count))",
        ),
    ),
    "writing-models-let-pass": _m(
        "a forward pass may write to its parameters",
        "test_mixing.py::test_a_forward_pass_that_writes_to_its_parameters_is_refused",
        ("epsilons.training.validation:check_unchanged", "if before != after:", "if False:"),
        (f"{INDEPENDENCE}writes:check_contents", "if changed:", "if False:"),
        (f"{PRIVATE}_check_held", "if self._held_values is not None:", "if False:"),
        ("epsilons.training.validation:check_outside", "if before != after:", "if False:"),
    ),
    "operators-not-read": _m(
        "what operators compute across records is let pass where losses agree",
        "tests/test_batch_independence.py::test_a_gate_of_tensors_that_never_fired_is_refused",
        (f"{CHECK}_check_operators", "isinstance(losses, Mixed)", "False"),
    ),
    "number-of-records-not-compared": _m(
        "what depends on the number of records is let pass where losses agree",
        "tests/test_batch_independence.py::test_the_number_of_records_in_the_gradient_alone_is_refused",
        (f"{CHECK}observe", 'variant.kind == "resized" and', "False and"),
    ),
    "pairs-not-separated": _m(
        "where operators tell nothing, records are not set apart from each other",
        "tests/test_batch_independence.py::test_a_few_records_that_meet_through_values_python_reads_are_found",
        (f"{CHECK}_begin", "is_open and self._is_thorough", "False"),
    ),
    "rare-decisions-let-pass": _m(
        "a decision by values of several records is let pass if it was always the same",
        "tests/test_batch_independence.py::test_a_decision_by_several_records_is_refused_though_it_was_always_the_same",
        (f"{CHECK}_conclude", "if read.is_decision:", "if False:"),
    ),
    "later-padding-not-looked-for": _m(
        "padding is looked for at the first draw alone",
        "tests/test_batch_independence.py::test_padding_is_noticed_at_the_first_draw_in_which_lengths_differ",
        (f"{PRIVATE}_present", "self._records.varies and", "False and"),
    ),
    "outside-writes-let-pass": _m(
        "what else writes to the parameters between updates is let pass",
        "test_escapes.py::test_what_else_writes_to_the_parameters_between_updates_is_noticed",
        (f"{PRIVATE}_check_held", "if self._held_values is not None:", "if False:"),
    ),
    # -- what it costs
    "delta-ignored": _m(
        "every group's spend taken at the largest delta, in calibration and afterwards",
        "test_spends.py::test_no_group_spends_more_than_its_budget",
        (f"{PLANS}_spent", _SPENT, "0 * self.delta[chosen] + self.delta.max() if delta is None"),
        (
            "epsilons.planning.strategies.scale:own_multipliers",
            "budgets.delta,",
            "0 * budgets.delta + budgets.delta.max(),",
        ),
    ),
    "delta-ignored-by-spends": _m(
        "plan.epsilon_spent() takes the largest delta",
        "test_spends.py::test_no_group_spends_more_than_its_budget",
        (f"{PLANS}_spent", _SPENT, "0 * self.delta[chosen] + self.delta.max() if delta is None"),
    ),
    "add-direction-only": _m(
        "PLD accountant looks at one direction only",
        "test_spends.py::test_no_group_spends_more_than_its_budget",
        ("epsilons.accounting.pld:epsilons", "for losses in directions]", "for losses in directions[1:]]"),
    ),
    "pld-from-below": _m(
        "PLD's losses rounded down to the grid, not up",
        "test_spends.py::test_no_group_spends_more_than_its_budget",
        ("epsilons.accounting.pld:_connect_the_dots", "Losses(spacing, lowest,", "Losses(spacing, lowest - 1,"),
    ),
    "accountant-one-step-short": _m(
        "PLD accountant composes one step too few",
        "test_spends.py::test_no_group_spends_more_than_its_budget",
        (
            "epsilons.accounting.pld:_composed",
            "spacing), mechanism.steps)",
            "spacing), max(1, mechanism.steps - 1))",
        ),
    ),
    "rdp-forgets-steps": _m(
        "RDP accountant counts each history as one step",
        "test_spends.py::test_no_group_spends_more_than_its_budget",
        ("epsilons.accounting.rdp:epsilons", "count * divergences(", "divergences("),
    ),
    "arithmetic-with-harmonic": _m(
        "Scale: clip norms by the arithmetic mean, noise by the harmonic one, and the plan not verified",
        "test_spends.py::test_no_group_spends_more_than_its_budget",
        (
            "epsilons.planning.strategies.scale:_plan",
            "clip_norm=shared * recipe",
            "clip_norm=float(budgets.shares @ own) * recipe",
        ),
        TRUST,
    ),
    "unsafe-end": _m(
        "calibration returns the end that overspends, and the plan is not verified",
        "test_spends.py::test_no_group_spends_more_than_its_budget",
        (
            "epsilons.accounting.calibration:_largest_safe",
            "return safe\n",
            "return np.where(np.isnan(over), safe, over)\n",
        ),
        TRUST,
    ),
    "pld-slack-gone": _m(
        "nothing is allowed for the rounding of PLD's transforms",
        "tests/test_accounting_pld.py::test_what_rounding_takes_off_a_tail_stays_within_the_slack",
        (
            "epsilons.accounting.pld:slack",
            "return FLOAT_SLACK + times * FLOAT_SLACK_PER_STEP",
            "return 0.0 * FLOAT_SLACK",
        ),
    ),
    "weight-kept-from-the-plan": _m(
        "Scale by weight leaves the weights out of its plan, and the plan is not verified",
        "test_spends.py::test_no_group_spends_more_than_its_budget",
        (
            "epsilons.planning.strategies.scale:scale",
            "clip_norm=even, weight=phase.clip_norm / recipe.clip_norm",
            "clip_norm=even * phase.clip_norm.max() / recipe.clip_norm",
        ),
        TRUST,
    ),
    "weight-not-accounted": _m(
        "the accountant is told nothing of weights",
        "test_spends.py::test_no_group_spends_more_than_its_budget",
        ("epsilons.planning.recipe:Phase.noise_multiplier", "(self.weight * self.clip_norm)", "self.clip_norm"),
    ),
    "overspending-plans-loaded": _m(
        "a plan that overspends is let pass",
        "tests/test_plan_file.py::test_a_file_edited_consistently_so_that_it_overspends_is_refused",
        TRUST,
    ),
    # -- files, names and numbers
    "declared-by-epsilon-alone": _m(
        "under declared shares a record's group is found by epsilon alone: a stricter delta trains in the looser row",
        "tests/test_checks.py::test_under_declared_shares_a_record_of_another_delta_is_refused_though_its_epsilon_is_declared",
        (
            "epsilons.training.validation:groups_of",
            "pairs = list(zip(budgets.epsilons.tolist(), budgets.delta.tolist(), strict=True))",
            "pairs = [next((p for p in place if p[0] == level), level) for level in budgets.epsilons.tolist()]",
        ),
    ),
    "folder-keeps-its-mode": _m(
        "a run's folder that existed keeps its mode, for others to read",
        "tests/test_modes.py::test_a_folder_that_exists_is_closed_whoever_made_it_and_on_resume_again",
        ("epsilons.run_folder:RunFolder.create", "close_folder(folder.path)", "pass"),
    ),
    "folder-open-on-resume": _m(
        "the folder of a run that goes on keeps the mode that it was given meanwhile",
        "tests/test_modes.py::test_a_folder_that_exists_is_closed_whoever_made_it_and_on_resume_again",
        ("epsilons.run_folder:RunFolder.reopen", "close_folder(folder.path)", "pass"),
    ),
    "internal-files-readable": _m(
        "plans, findings and internal reports are for whom the umask says",
        "tests/test_modes.py::test_a_file_is_its_owner_s_from_the_first_byte_unless_for_release",
        ("epsilons.files:write_bytes", "None if release else for_owner", "None"),
    ),
    "expected-batch-not-checked": _m(
        "a plan's expected batch need not be what its rates come to",
        "tests/test_plan_edits.py::test_an_expected_batch_that_the_rates_do_not_give_is_refused",
        (f"{PLANS}_divides_as_it_draws", "return False", "return True"),
    ),
    "hand-edits-let-pass": _m(
        "a plan file that was changed by hand is loaded without a word",
        "tests/test_plan_edits.py::test_a_file_changed_by_hand_is_refused_or_warned_about_or_promises_what_its_numbers_give",
        (f"{PLANS}load", "and not as_saved", "and False"),
    ),
    "declared-shares-not-told": _m(
        "a plan file whose adjacency claims declared shares is loaded without a word",
        "tests/test_plan_edits.py::test_a_roster_made_into_declared_shares_is_refused_and_of_one_who_means_it_warned_about",
        (f"{PLANS}_doubts", "if self.adjacency == SHARES:", "if False:"),
    ),
    "large-delta-not-told": _m(
        "a plan file with a delta of 1/records or more is loaded without a word",
        "tests/test_plan_edits.py::test_a_delta_that_permits_to_publish_a_record_is_warned_about",
        (f"{PLANS}_doubts", "if is_large(self.delta, self.records):", "if False:"),
    ),
    "control-characters-in-messages": _m(
        "control characters in names from data reach messages and tables as they are",
        "tests/test_plain.py::test_budgets_and_tables_tell_names_without_control_characters",
        ("epsilons.escaping:printable", "return UNPRINTABLE.sub", "return str(text) or UNPRINTABLE.sub"),
    ),
    "control-characters-on-pages": _m(
        "control characters in names from data reach pages as they are",
        "tests/test_plain.py::test_reports_tell_names_without_control_characters_and_their_json_keeps_them",
        ("epsilons.reporting.html:_without_control_characters", "printable(value) if", "value if"),
    ),
    "hexadecimal-budgets": _m(
        "the budget 0x10 is taken for 16",
        "tests/test_numbers.py::test_a_whole_column_of_hexadecimals_is_not_taken_for_integers",
        ("epsilons.budgets:Budgets.from_csv", "texts=[column, *([delta_column] if delta_column else [])]", "texts=[]"),
    ),
    # -- what a loop is told, and what it leaves behind
    "checks-not-told": _m(
        "the loop is told of no check that it is one",
        "tests/test_loops.py::test_batches_that_are_no_checks_are_the_draws_and_nothing_else",
        (f"{PRIVATE}_hand_out", "self._is_check = handed.variant is not None", "self._is_check = False"),
    ),
    "closing-passes-over-a-draw": _m(
        "a run that is closed in the middle of a draw goes on after it, as if it had been made",
        "tests/test_leaving.py::test_in_the_middle_of_a_draw_nothing_is_kept_but_the_state_at_its_start",
        (f"{PRIVATE}_leave_checkpoint", "self._save(state)", 'self._save(state | {"step": state["step"] + 1})'),
    ),
    "closing-keeps-the-sum": _m(
        "a run that is closed in the middle of a draw leaves its un-noised sum in a checkpoint",
        "tests/test_leaving.py::test_in_the_middle_of_a_draw_nothing_is_kept_but_the_state_at_its_start",
        (f"{PRIVATE}_leave_checkpoint", "self._save(state)", 'self._save(state | {"sum": list(self._sum)})'),
    ),
    "spend-of-the-few-told": _m(
        "epsilon_spent() tells the spends of groups that are too small to be shown",
        "tests/test_loops.py::test_the_epsilon_spent_is_empty_where_a_group_is_too_small_to_be_shown",
        (f"{PRIVATE}epsilon_spent", "if hides(self.plan):", "if False:"),
    ),
    "draws-past-a-stop": _m(
        "after private.stop() the loop draws on",
        "tests/test_leaving.py::test_a_draw_is_finished_before_a_stop_and_later_loops_draw_nobody",
        (f"{PRIVATE}_begin_draw", "if self._is_stopped:", "if False:"),
    ),
    # -- locks, ledgers that are lost, copies, keys of seeds
    "later-hashes-forgotten": _m(
        "after the first key epoch hashes of updates are not remembered",
        "tests/test_ledger.py::test_the_hash_of_every_update_is_remembered_under_every_key",
        (
            "epsilons.account:Account._update",
            'self.updates[phase, step] = line["update"]',
            'self.updates.update({(phase, step): line["update"]} if self.epoch == 0 else {})',
        ),
    ),
    "only-first-tensor-hashed": _m(
        "only the first tensor of an update is hashed, so a replay that differs elsewhere passes",
        "tests/test_checkpoints.py::test_a_replay_that_differs_in_any_tensor_of_its_update_is_not_applied",
        (f"{PRIVATE}_update", "hash_of(update)", "hash_of(update[:1])"),
    ),
    "folder-not-locked": _m(
        "a run's folder is looked at without a lock",
        "tests/test_locks.py::test_nothing_of_a_held_folder_is_looked_at_or_cleared_away",
        ("epsilons.training.private_setup:make_private", "lock = RunFolder(Path(out)).lock()", "lock = None"),
    ),
    "lock-let-go-early": _m(
        "the lock is let go when training begins",
        "tests/test_locks.py::test_a_run_holds_its_folder_from_make_private_until_it_is_closed_or_done",
        (f"{PRIVATE}_until_the_end", "    self._loops += 1\n", "    self._loops += 1\n    self._release()\n"),
    ),
    "removed-lock-taken": _m(
        "a lock whose file was removed in the meantime counts",
        "tests/test_locks.py::test_a_lock_that_its_holder_removed_after_it_was_opened_here_is_not_taken_for_the_folder_s",
        (
            "epsilons.locks:FolderLock._is_current",
            "os.path.samestat(os.fstat(handle), os.stat(self._file))",
            "True",
        ),
    ),
    "lost-ledger-not-noticed": _m(
        "a ledger that was removed or replaced is written to on and on",
        "tests/test_locks.py::test_a_run_whose_ledger_is_lost_applies_no_update_more",
        ("epsilons.ledger:Ledger._refuse_lost", "if not is_there:", "if False:"),
    ),
    "lost-ledger-noticed-at-charges-only": _m(
        "a ledger that was lost after a step's charge is not noticed before the step's update",
        "tests/test_locks.py::test_a_run_whose_ledger_is_lost_applies_no_update_more",
        ("epsilons.ledger:Ledger.record", "self._refuse_lost()", "pass"),
    ),
    "copy-keeps-the-key": _m(
        "a copied folder goes on under the original's key",
        "tests/test_checkpoints.py::test_a_copied_folder_goes_on_under_another_key_and_the_original_to_the_same_bits",
        ("epsilons.training.private_setup:make_private", "folder.key_file() == ledger.key_file", "True"),
    ),
    "key-file-by-inode-alone": _m(
        "a key that was linked, written again or brought back to its inode counts as the original",
        "tests/test_checkpoints.py::test_a_key_that_is_no_longer_the_file_that_was_written_is_not_used_again",
        ("epsilons.run_folder:RunFolder.key_file", "{of.st_ctime_ns}", ""),
    ),
    "copies-meet-under-one-key": _m(
        "copies of a seeded run go on under one new key, whatever their data",
        "tests/test_checkpoints.py::test_copies_of_one_run_on_other_data_share_no_key",
        (f"{PRIVATE}_begin_epoch", 'f"{self.ledger.last_line} {self._fingerprint_of_run}"', '""'),
        ("epsilons.training.private_setup:make_private", "source = source.bound_to(", "str("),
    ),
    "seed-forgets-data": _m(
        "a seed's key does not know the data",
        "tests/test_seeds.py::test_two_seeded_runs_on_neighbouring_data_or_at_another_rate_share_no_noise",
        ("epsilons.training.private_setup:_computed", '"data": contents,', ""),
    ),
    "seed-forgets-learning-rate": _m(
        "a seed's key does not know the optimizer's settings",
        "tests/test_seeds.py::test_two_seeded_runs_on_neighbouring_data_or_at_another_rate_share_no_noise",
        ("epsilons.training.private_setup:_computed", "optimizer.state_dict())", 'optimizer.state_dict()["state"])'),
    ),
    "seed-forgets-table": _m(
        "a seed's key does not know the plan",
        "tests/test_seeds.py::test_seeded_runs_that_differ_in_anything_have_keys_of_their_own",
        ("epsilons.training.private_setup:_computed", "for p in plan.phases", "for p in plan.phases[:0]"),
    ),
    "seed-forgets-groups": _m(
        "a seed's key does not know who is in which group",
        "tests/test_seeds.py::test_seeded_runs_that_differ_in_anything_have_keys_of_their_own",
        ("epsilons.training.private_setup:_computed", '"roster": roster,', ""),
    ),
    "seed-forgets-run-index": _m(
        "a seed's key does not know the run's index",
        "tests/test_seeds.py::test_seeded_runs_that_differ_in_anything_have_keys_of_their_own",
        ("epsilons.training.private_setup:make_private", "{run} {int(run_index)}", "{run}"),
    ),
    "records-not-in-fingerprint": _m(
        "no record of a map-style data set is in its fingerprint",
        "tests/test_fingerprints.py::test_a_change_of_a_record_that_is_read_changes_the_name",
        (
            "epsilons.training.datasets:LoadedRecords.fingerprint",
            'f"{name}, {fingerprints.of(once)}" if once == again else name',
            "name",
        ),
    ),
    # -- sensitivity of the sum
    "rows-added-in-32-bits": _m(
        "gradients written out are added in 32 bits (engine ghost)",
        "test_sensitivity.py::test_no_layers_sum_moves_by_more_than_the_bound_of_the_record_left_out",
        (
            f"{SUMMING}added",
            "    if rows.dtype == torch.float64:\n",
            "    if rows.dtype != torch.float64:\n"
            "        return (factor.to(rows.dtype) @ rows).double()\n"
            "    if rows.dtype == torch.float64:\n",
        ),
    ),
    "products-added-in-32-bits": _m(
        "a linear layer's products are added in 32 bits (engine ghost)",
        "test_sensitivity.py::test_a_sum_moves_by_no_more_than_the_bound_of_the_record_left_out",
        (
            f"{SUMMING}_in_64_bits",
            "(scaled.double() * its[:, None, None])",
            "(scaled * its.to(scaled.dtype)[:, None, None])",
        ),
        (f"{SUMMING}_in_64_bits", "plain.double()", "plain"),
        (
            f"{SUMMING}_in_64_bits",
            "total.addmm_(*((first.T, second) if k <= p else (second.T, first)))",
            "total += first.T @ second if k <= p else second.T @ first",
        ),
    ),
    "rows-of-tables-added-in-32-bits": _m(
        "a table's gradients are added in 32 bits (engine ghost)",
        "test_sensitivity.py::test_no_layers_sum_moves_by_more_than_the_bound_of_the_record_left_out",
        (f"{PIECES}Tokens.weighted", "self._sums.double() * factor", "self._sums * factor.to(self._sums.dtype)"),
    ),
    "factors-in-32-bits": _m(
        "clip factors are rounded to the nearest number of 32 bits",
        "test_sensitivity.py::test_gradients_near_the_largest_number_keep_the_bound",
        (
            CLIP,
            "torch.where(torch.isfinite(norm) & (factor >= tiny), factor, torch.zeros_like(factor))",
            "torch.where(torch.isfinite(norm), factor, torch.zeros_like(factor)).float().double()",
        ),
    ),
    "gram-rounding-not-allowed-for": _m(
        "inner products in 32 bits are taken for exact (engine ghost)",
        "test_sensitivity.py::test_no_norm_is_understated_where_squares_or_products_are_lost",
        (f"{PIECES}Outer._from_grams", "(squared + hidden + lost)", "(squared + lost)"),
    ),
    "cancelling-records-added-with-others": _m(
        "a record whose steps cancel is added up with all others (engine ghost)",
        "test_sensitivity.py::test_what_cancels_within_one_record_spoils_no_others",
        (f"{PIECES}Outer.weighted", "if self._risky is None:", "if True:"),
    ),
    "losses-of-another-model": _m(
        "losses that depend on no trained parameter are accepted",
        "test_sensitivity.py::test_at_every_physical_batch_losses_of_other_parameters_are_refused",
        (f"{TRACING}trace", "    if not order:\n        raise _disconnected(len(parameters))\n", ""),
        (f"{TRACING}check_connected", "raise _disconnected(len(known))", "pass"),
    ),
}

#: Those whose killers are checked in every run of pytest: one or two of each kind, the quick ones.
ALWAYS = (
    "no-noise",
    "noise-3-percent-small",
    "empty-draws-skipped",
    "divisor-drawn",
    "clip-norms-swapped",
    "clipped-a-thousandth-long",
    "group-by-place-in-chunk",
    "charge-after-update",
    "charge-not-durable",
    "one-step-more",
    "guard-gone",
    "mixing-not-looked-for",
)


# -- switching one on -------------------------------------------------------------------------------------------


def apply(mutant: Mutant) -> None:
    """Change the library that this process has loaded, for good. Raises LookupError if it no longer fits."""
    for where, old, new in mutant.edits:
        _edit(where, old, new)
    for thing in [v for n, m in sys.modules.items() if n.split(".")[0] == "epsilons" for v in vars(m).values()]:
        if hasattr(thing, "cache_clear"):  # what was found before the change
            thing.cache_clear()


def _edit(where: str, old: str, new: str) -> None:
    module_name, _, path = where.partition(":")
    module = importlib.import_module(module_name)
    *outer, name = path.split(".")
    owner: Any = module
    for part in outer:
        owner = getattr(owner, part)
    if name not in vars(owner):
        raise LookupError(f"{where} is gone: the mutant that changes it must be mended.")
    original = vars(owner)[name]
    edited = getattr(_function(original), "__edited__", None)  # a second edit of one function goes on from the first
    source = edited or textwrap.dedent(inspect.getsource(_function(original)))
    if source.count(old) != 1:
        raise LookupError(f"{where} holds {old!r} {source.count(old)} times, not once: mend the mutant.")
    source = source.replace(old, new)
    made: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + source, f"<mutant of {where}>", "exec"), vars(module), made)
    changed = made[name]
    _function(changed).__edited__ = source
    setattr(owner, name, changed)
    if owner is module:  # others have imported it by name, or list it in a table
        for other in [m for n, m in sys.modules.items() if n.split(".")[0] == "epsilons"]:
            for key, value in list(vars(other).items()):
                if value is original:
                    setattr(other, key, changed)
                elif isinstance(value, dict) and not key.startswith("__"):
                    value.update({k: changed for k, v in value.items() if v is original})


def _function(thing: Any) -> Any:
    """The plain function inside a property, a class method or a cache."""
    thing = thing.fget if isinstance(thing, property) else thing
    return inspect.unwrap(getattr(thing, "__func__", thing))


# -- finding out what notices -----------------------------------------------------------------------------------


class _Failures:
    """A pytest plugin that writes down what failed.

    whole  the test that is run with all of its parameters; of others the first two sets do, without workers. None: all
    """

    def __init__(self, path: Path, whole: str | None = None) -> None:
        self.path, self.whole, self.failed, self.passed, self.why = path, whole, [], 0, ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.whole is None:
            return
        seen: Counter[tuple[str, Any]] = Counter()
        kept = []
        for item in items:
            parameters = getattr(getattr(item, "callspec", None), "params", {})
            function = item.nodeid.partition("[")[0]
            kind = (function, parameters.get("each"))
            if function == self.whole or (seen[kind] < 2 and not parameters.get("num_workers")):
                seen[kind] += 1
                kept.append(item)
        items[:] = kept

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
            crash = getattr(report.longrepr, "reprcrash", None)
            self.why = self.why or " ".join(str(crash.message if crash else report.longrepr).split())[:160]
        self.passed += report.when == "call" and report.passed

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps({"failed": self.failed, "passed": self.passed, "why": self.why}))


@dataclass(frozen=True)
class Child:
    """A process of its own, with a mutant in it and tests to run. It may use so much of a processor and no more."""

    pid: int
    report: Path

    def result(self) -> dict[str, Any] | None:
        """{"failed": […], "passed": n, "why": what the first failure said}; None while it runs.

        Raises RuntimeError if it brought nothing home.
        """
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return None
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            return {"failed": ["(stopped: it did not come to an end)"], "passed": 0, "why": "no end"}
        text = self.report.read_text()
        if not text:
            raise RuntimeError(f"The tests did not come to an end, status {status}; run them by hand.")
        found: dict[str, Any] = json.loads(text)
        return found


def start(
    mutant: Mutant | None, tests: Sequence[str], *, limit: int, stop_at_first: bool = False, whole: str | None = None
) -> Child:
    """Run these tests in a copy of this process, with this mutant in it (None: none). No tests: only plant it.

    limit: seconds of a processor's time, whatever else the machine has to do
    """
    import pytest
    import torch

    importlib.import_module("epsilons.training")
    torch.set_num_threads(1)  # a copy of a process has none of its threads
    handle, name = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            os.chdir(ROOT)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            if mutant:
                apply(mutant)
            failures = _Failures(Path(name), whole)
            if not tests:
                failures.pytest_sessionfinish()
                os._exit(0)
            options = ["-q", "--no-header", "-p", "no:cacheprovider", *(["-x"] if stop_at_first else [])]
            pytest.main([*options, *tests], plugins=[failures])
            status = 0
        except LookupError as error:
            Path(name).write_text(json.dumps({"failed": [], "passed": 0, "why": "", "unfit": str(error)}))
        finally:
            os._exit(status)
    return Child(pid, Path(name))


def finish(child: Child) -> dict[str, Any]:
    """Wait for it. Raises LookupError if the mutant did not fit the library."""
    while (found := child.result()) is None:
        time.sleep(0.02)
    child.report.unlink()
    if "unfit" in found:
        raise LookupError(found["unfit"])
    return found


def node(killer: str) -> str:
    """The killer as pytest takes it, from the repository's root."""
    return killer if killer.startswith("tests/") else f"tests/conformance/{killer}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Which planted bugs does the suite notice, and by what?")
    parser.add_argument("names", nargs="*", choices=[*MUTANTS, []], help="default: all")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, help="keep what was found here, and do not look for it again")
    given = parser.parse_args()
    names = list(given.names or MUTANTS)
    suite = sorted(str(p.relative_to(ROOT)) for p in HERE.glob("test_*.py") if p.name != "test_mutants.py")
    # What is planted in training is out of the planner's sight, and the probes' plans are made by no planner.
    planning = [path for path in suite if path.endswith("test_spends.py")]
    training = [path for path in suite if path not in planning]
    running: dict[str, Child] = {}
    found: dict[str, dict[str, Any]] = {}
    if given.results and given.results.is_file():
        found = json.loads(given.results.read_text())
    waiting = [name for name in names if name not in found]
    while waiting or running:
        while waiting and len(running) < given.jobs:
            name = waiting.pop(0)
            mutant = MUTANTS[name]
            where = [place.partition(":")[0] for place, _, _ in mutant.edits]
            in_training = all(place.startswith(("epsilons.training", "epsilons.ledger")) for place in where)
            in_planning = all(place.startswith(("epsilons.planning", "epsilons.accounting")) for place in where)
            tests = [
                *(training if in_training else planning if in_planning else suite),
                *([mutant.killer] if mutant.killer.startswith("tests/") else []),
            ]
            running[name] = start(mutant, tests, limit=600, whole=node(mutant.killer))
        for name, child in list(running.items()):
            result = child.result()
            if result is not None:
                if "unfit" in result:
                    raise LookupError(result["unfit"])
                child.report.unlink()
                found[name] = result
                del running[name]
                if given.results:
                    given.results.write_text(json.dumps(found))
                print(
                    f"{name}: {len(result['failed'])} fail, the first with: {result['why']}",
                    file=sys.stderr,
                    flush=True,
                )
        time.sleep(0.1)
    survivors = [name for name in names if not found[name]["failed"]]
    print("| planted bug | noticed by (tests that fail in each file) |\n|---|---|")
    for name in names:
        tests = {re.sub(r"^tests/(conformance/)?|\[.*$", "", failed) for failed in found[name]["failed"]}
        count = Counter(test.partition(".py::")[0] for test in tests)
        seen = ", ".join(f"`{file}` {n}" for file, n in sorted(count.items(), key=lambda pair: (-pair[1], pair[0])))
        print(f"| {MUTANTS[name].bug} | {seen or '**nothing**'} |")
    print(f"\n{len(names) - len(survivors)} of {len(names)} planted bugs are noticed.")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
