"""Private selection: runs of one plan, as many as a secret number says, of which only the best is kept.

    tuning/
      plan.json, slots/   as in every `PlanFolder`
      secret/key          from which the number of runs, the settings of each, and the noise of the scores follow
      selection.json      how far it is; in the end, what was selected
      current/, best/     the run that is made, and the best run before it

After each run the worse of the two is destroyed. In the end the key, the slots and how many runs there were are
destroyed, too: what is left is what the plan certifies (`accounting.selection`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ...accounting.calibration import noises_for
from ...budgets.budgets import Budgets
from ...core.files import FolderLock, sync_folder, write_json
from ...draws import fingerprints
from ...draws.randomness import COIN_BITS, Randomness
from ...errors import InputError, PlanError, RunError
from ...ledger.account import read_account
from ...ledger.plan_folder import PlanFolder
from ...ledger.run_folder import RunFolder
from ...planning import Plan
from .. import values

Candidate = TypeVar("Candidate")
#: train(candidate, plan, folder): make one run under the plan, in the folder, and return the trained model.
Train = Callable[[Candidate, PlanFolder, values.RunFolder], nn.Module]
#: score(model) -> (held-out members,) numbers from 0 to 1, one for each, in the order of their budgets.
Score = Callable[[nn.Module], npt.ArrayLike]


@dataclass(frozen=True)
class Tuned:
    """What a selection releases.

    path       the folder of the selected run; None if the number of runs was 0, as "poisson" allows
    candidate  the place of its settings in the list; None likewise
    score      its share of right answers among the held-out, with noise and weighted by tiers; None likewise
    """

    path: Path | None
    candidate: int | None
    score: float | None


def tune(
    folder: PlanFolder,
    candidates: Sequence[Candidate],
    train: Train[Candidate],
    score: Score,
    *,
    held_out: Budgets,
    seed: int | None = None,
) -> Tuned:
    """Make the runs of a selection, and release the best. Called again after an interruption, it goes on.

    folder      of a plan with `select`
    candidates  settings to choose from. Each run draws one, so a mean of three runs per candidate tries most of them.
                The list must not depend on the data
    train       train(candidate, plan, run_dir) -> model: makes a run, `fit(…, plan, run_dir=run_dir)`. torch is seeded
                before each call, so that a resumed run begins with the same weights. No call may use what earlier ones
                found
    score       score(model) -> (held-out,) one number from 0 to 1 for each record, or person, that was held out: 1 if
                the model is right about them. It must compute each number from this one's data alone
    held_out    their budgets, in the same order. None of them may be in the training data, and who is held out must not
                depend on the data
    seed        makes coins of the selection repeatable, and gives no guarantee to a person who knows it

    A score is the sum of these numbers, each times a weight of its tier, plus Gaussian noise of one standard deviation:
    every held-out member goes through a Gaussian mechanism with the noise multiplier that uses up the own budget over
    the whole selection. Raises PlanError for a plan without `select`, InputError for other candidates than before,
    RunError if the key is lost, or a run was not made in the folder that `train` got.
    """
    plan = folder.plan
    if plan.select is None:
        raise PlanError("This plan selects nothing. Make it with plan(…, select=Selection(…)).")
    if held_out.unit != plan.unit:
        raise InputError(f"The plan is about {plan.unit}s, and the held-out budgets are of {held_out.unit}s.")
    noise = noises_for(held_out.epsilons, 1.0, 1, held_out.groups.terms, plan.certify)
    weights = (noise.min() / noise)[held_out.group]
    lock = FolderLock(folder.path)
    try:
        state = _State(folder, _digest(candidates, held_out), seed)
        runs = 0 if state.is_finished else plan.select.number(_uniform(state.randomness.stream("runs")))
        for number in range(state.done + 1, runs + 1):
            candidate = int(state.randomness.stream("candidate", number).integers(1)[0] % len(candidates))
            torch.manual_seed(state.randomness.seed("initial values", number))
            run = values.RunFolder(folder.path / "current", resume=True)
            claim = f"{state.randomness.seed('claim', number):016x}"
            model = train(candidates[candidate], folder.for_selection(number, claim), run)
            _check_made(RunFolder(folder.path / "current"), plan, claim)
            right = np.nan_to_num(np.asarray(score(model), dtype=np.float64), nan=0.0).clip(0.0, 1.0)
            if right.shape != weights.shape:
                raise InputError(f"score(model) must give {len(weights):,} numbers, got shape {right.shape}.")
            normal = state.randomness.stream("score", number).normals(1)[0]
            state.settle(number, candidate, float(weights @ right + noise.min() * normal) / float(weights.sum()))
        state.finish()
        best = folder.path / "best"
        return Tuned(best if state.candidate is not None else None, state.candidate, state.score)
    finally:
        lock.release()


class _State:
    """How far a selection is, on disk. A run that lost is destroyed as soon as the file says that it lost."""

    def __init__(self, folder: PlanFolder, digest: str, seed: int | None) -> None:
        self.folder, self.digest, self.key = folder.path, digest, RunFolder(folder.path)
        self.candidate: int | None = None
        self.score: float | None = None
        self.done, self.pending, self.is_finished = 0, "", False
        file = self.folder / "selection.json"
        if file.is_file():
            found = RunFolder.read_json(file)
            if found.get("digest") != digest:
                raise InputError(
                    f"The selection in {self.folder} began with other candidates or other held-out budgets. Restore "
                    "them, or make a new plan in a new folder: what was made here is charged."
                )
            for name in ("candidate", "score", "is_finished"):
                setattr(self, name, found.get(name))
            self.done, self.pending = found.get("done", 0), found.get("pending", "")
        elif self.key.read_key() is None:
            self.key.write_key(Randomness.fresh(seed).key)
        key = self.key.read_key()
        if key is None and not self.is_finished:
            raise RunError(f"The key of the selection in {self.folder} is lost, and with it the number of runs.")
        self.randomness = Randomness(key or bytes(32), seeded=seed is not None)
        self._settle()
        if self.is_finished:
            self.finish()

    def settle(self, number: int, candidate: int, score: float) -> None:
        """Keep the better of the two runs."""
        self.done, self.pending = number, "destroy"
        if self.score is None or score > self.score:
            self.candidate, self.score, self.pending = candidate, score, "keep"
        self._write(done=self.done, pending=self.pending)
        self._settle()

    def _settle(self) -> None:
        current, best = self.folder / "current", self.folder / "best"
        if not self.pending:
            return
        if current.exists():  # otherwise this was done, and then interrupted
            loser = best if self.pending == "keep" else current
            if loser.exists():
                shutil.rmtree(loser)
            if self.pending == "keep":
                current.rename(best)
        sync_folder(self.folder)
        self.pending = ""
        self._write(done=self.done)

    def finish(self) -> None:
        """Destroy all that says how many runs there were."""
        self.is_finished = True
        self._write()
        for slot in (self.folder / "slots").iterdir():
            slot.unlink()
        self.key.destroy_key()

    def _write(self, **progress: Any) -> None:
        found = {"digest": self.digest, "candidate": self.candidate, "score": self.score, **progress}
        write_json(self.folder / "selection.json", found | {"is_finished": self.is_finished})


def _uniform(stream: Any) -> float:
    return float(stream.integers(1)[0] >> np.uint64(64 - COIN_BITS)) / 2.0**COIN_BITS


def _digest(candidates: Sequence[Any], held_out: Budgets) -> str:
    """A fingerprint of what must stay the same until the end."""
    if not len(candidates):
        raise InputError("A selection needs at least one candidate.")
    return fingerprints.of([list(candidates), held_out.epsilons[held_out.group], held_out.delta[held_out.group]])


def _check_made(run: RunFolder, plan: Plan, claim: str) -> None:
    """Raise RunError unless the run in this folder is the one that was asked for, and is finished."""
    account = read_account(run.ledger, plan) if run.ledger.is_file() else None
    slot = None if account is None or account.closed is None else (account.rests_on or {}).get("plan_slot")
    if slot is None or slot["claim"] != claim:
        raise RunError(
            f"train(…) made no run in {run.path}, or did not finish it. Pass the plan and run_dir that it gets "
            "to `fit` or make_private."
        )
