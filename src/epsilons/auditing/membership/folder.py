"""The folder of one attack. Only its owner can read it, and nothing in it may be published.

    attacks/first/
      plan.json        the plan of the shadows
      attack.json      what was asked for, versions, and what must be said
      membership.json  the result, without scores of single records
      roc.svg          the picture
      attack.html      the page
      secret/blocks/   signals of every record, a file for each finished block
      secret/scores/   scores of every record, if they are to be kept
      .lock            held by the process that attacks

Scores of single records name the most exposed people. Therefore secret/ is removed at the end, unless the caller keeps
it. With it, an attack can continue with more shadows.
"""

from __future__ import annotations

import re
import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from ...core.files import NAME, FolderLock, close_folder, write_bytes, write_json, write_text
from ...core.notebook import new_figure, save_figure
from ...draws import fingerprints
from ...errors import EpsilonsWarning, InputError, RunError, parsed_json
from ...ledger.run_folder import versions
from ...planning import Plan
from ...reporting.html import attack_page
from ...reporting.membership import NOT_COVERED, GroupRow, MembershipResult, load
from ...training import Performance
from ...training.fitting.evaluation import Loss
from ...training.fitting.losses import MakeOptimizer
from .analysis import analyse
from .attacks import Attack
from .outcomes import RATES
from .shadows import Arrays, Block, Shadows, ShadowSetting, placebo_plan, shadow_plan, train_shadows, watched

SCHEMA = 1


class AttackFolder:
    """The files of one attack, locked until `close`.

    path      a new folder, or with resume the folder of an attack
    plan      the plan of the shadows
    compared  settings that an attack must share with the one that it continues, as texts
    notes     further entries of attack.json

    Raises RunError if the folder is occupied, belongs to another attack, or is used by another process.
    """

    def __init__(
        self, path: Path, plan: Plan, compared: Mapping[str, str], notes: Mapping[str, Any], resume: bool = False
    ) -> None:
        self.path = path
        self.settings, self.result = path / "attack.json", path / "membership.json"
        self.picture, self.page = path / "roc.svg", path / "attack.html"
        self._secret = path / "secret"
        check_outside_of_runs(path)
        self._lock = FolderLock(path)
        try:
            if not self.settings.is_file():
                self._check_new(resume)  # before anything of a folder that is not ours is changed
            close_folder(path)
            self._begin(plan, dict(compared), dict(notes), resume)
        except BaseException:
            self.close()
            raise

    def _begin(self, plan: Plan, compared: dict[str, str], notes: dict[str, Any], resume: bool) -> None:
        if self.settings.is_file():
            if not resume:
                raise RunError(
                    f"{self.path} holds an attack. Continue it with resume (--resume), or name a new folder."
                )
            self._check_same(compared)
        self._remove_unfinished()
        plan.save(self.path / "plan.json")
        values = {"schema": SCHEMA, "document": "epsilons attack", **notes, "compared": compared}
        before = self.read() if self.settings.is_file() else {}
        finished = {"finished": before["finished"]} if "finished" in before else {}
        write_json(self.settings, {**values, "versions": versions(), **finished})

    def _check_new(self, resume: bool) -> None:
        """A folder without attack.json is new, except for what an interrupted beginning left."""
        ours = {NAME, "plan.json"}
        others = [file.name for file in self.path.iterdir() if file.name not in ours and not _is_temporary(file)]
        if others:
            what = "holds no attack to continue" if resume else "is not empty"
            raise RunError(f"{self.path} {what}. Name a folder that does not exist yet.")

    def _check_same(self, compared: dict[str, str]) -> None:
        before = self.read().get("compared")
        differences = [n for n in compared if not isinstance(before, dict) or before.get(n) != compared[n]]
        if differences:
            raise RunError(
                f"{self.path} holds an attack with other settings: {', '.join(differences)}. Blocks of two settings "
                "cannot be mixed. Continue with the settings of that attack, or name a new folder."
            )

    def read(self) -> dict[str, Any]:
        """attack.json. Raises RunError if it is damaged."""
        return _read_json(self.settings)

    def is_finished(self, asked: Mapping[str, Any]) -> bool:
        """True if the result is there. Raises RunError for other shadows or attacks if the signals were removed."""
        if not self.result.is_file():
            return False
        finished = self.read().get("finished")
        if finished == dict(asked):
            return True
        if not self._secret.is_dir():
            raise RunError(
                f"{self.path} holds a finished attack, and the signals of its shadows were removed. For other shadows "
                "or attacks name a new folder, and keep the signals there (keep_scores=True, --keep-scores)."
            )
        return False

    def finish(self, result: MembershipResult, asked: Mapping[str, Any]) -> None:
        """Write the result, the picture and the page; after this the attack is finished."""
        draw(result, self.picture)
        write_text(self.page, attack_page(result))
        result.save(self.result)
        write_json(self.settings, {**self.read(), "finished": dict(asked)})

    def blocks(self, arm: str) -> BlockFiles:
        """The blocks of one arm."""
        folder = self._secret / "blocks"
        for part in (self._secret, folder):
            part.mkdir(mode=0o700, exist_ok=True)
        return BlockFiles(folder, arm)

    def save_scores(self, name: str, **arrays: Any) -> None:
        """Keep the scores of every record, for the owner alone."""
        folder = self._secret / "scores"
        folder.mkdir(mode=0o700, exist_ok=True)
        _write_arrays(folder / f"{name}.npz", arrays)

    def remove_secrets(self) -> None:
        """Remove the signals and scores of single records.

        If the process is killed in between, a hidden folder is left, and the next call removes it.
        """
        if self._secret.is_dir():
            self._secret.rename(self.path / f".secret.{time.time_ns()}")
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Remove what a killed process left: temporary files, and secrets that were to be removed."""
        for folder in self.path.glob(".secret.*"):
            shutil.rmtree(folder)
        for file in list(self.path.rglob(".*")):
            if _is_temporary(file):
                file.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()


class BlockFiles:
    """One .npz file for each finished block of an arm."""

    def __init__(self, folder: Path, arm: str) -> None:
        self._folder, self._arm = folder, arm

    def load(self, block: Block) -> Arrays | None:
        """The arrays of a block; None if it is not there or damaged, and then it is trained again."""
        try:
            with np.load(self._path(block), allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except (OSError, ValueError, EOFError, BadZipFile):
            return None

    def save(self, block: Block, arrays: Arrays) -> None:
        _write_arrays(self._path(block), arrays)

    def _path(self, block: Block) -> Path:
        return self._folder / f"{self._arm}-{block.first:05d}-{block.end - 1:05d}.npz"


def check_outside_of_runs(path: Path) -> None:
    """Raise RunError for a path inside a run's folder, which may be kept and reported on; an attack is secret."""
    for parent in (path.resolve(), *path.resolve().parents):
        if (parent / "ledger.jsonl").is_file():
            raise RunError(f"{path} is inside the run {parent.name}. An attack needs a folder outside of any run.")


def _write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    content = BytesIO()
    np.savez(content, **arrays)
    write_bytes(path, content.getvalue())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = parsed_json(path.read_bytes())
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict):
        raise RunError(f"{path} is damaged: it is not a complete JSON object. Restore it, or start in a new folder.")
    return values


def _is_temporary(file: Path) -> bool:
    """True for a file that `files.write_bytes` did not finish."""
    return re.fullmatch(r"\..+\.[0-9a-f]{8}", file.name) is not None and file.is_file()


# -- One attack with its arguments checked: train the arms, attack them, analyse, and keep the result in a folder


@dataclass(frozen=True, kw_only=True)
class AttackSettings:
    """How an attack on membership is made: the options of `attack`.

    loss, optimizer, lr, momentum, performance, device   as in `fit`
    shadows          number of shadow models. Every shadow is the target of all others
    attacks          names in ATTACKS, or {name: function}; by default LiRA with shrinkage, and RMIA if there is a
                     population
    placebo          also train the same shadows by DP-SGD at the strictest budget. Any difference between groups there
                     does not come from privacy. This doubles the cost
    dealt_at_random  True if budgets were assigned at random, not chosen by people. Only then do the tests show that
                     privacy causes the differences between groups
    tiers            {name: epsilon}; the rows of the result then have these names, too
    seed             of coins, draws and noise. The result is repeatable
    method           "stacked" (64 shadows as one program), "alone" (one by one, on all cores), or "auto"
    keep_scores      keep signals and scores of single records in the folder's secret/. They name the most exposed
                     people
    jobs             number of processes; by default one per core, or what joblib's active backend has (dask, ray)
    progress         show progress on stderr
    """

    loss: str | Loss = "cross_entropy"
    optimizer: str | type[torch.optim.Optimizer] | MakeOptimizer = "sgd"
    lr: float | None = None
    momentum: float | None = None
    shadows: int = 128
    attacks: Sequence[str] | Mapping[str, Attack] | None = None
    placebo: bool = False
    dealt_at_random: bool = False
    tiers: Mapping[str, float] | None = None
    seed: int = 0
    method: str = "auto"
    keep_scores: bool = False
    performance: Performance | None = None
    device: str = "auto"
    jobs: int | None = None
    progress: bool = False


@dataclass(frozen=True)
class Task:
    """What `attack` was asked for.

    plan         the plan under attack
    setting      of the shadows
    description  what is trained and how, in words; a part of the result
    attacks      by name
    asked        the options of `attack`
    """

    plan: Plan
    setting: ShadowSetting
    description: Mapping[str, Any]
    attacks: Mapping[str, Attack]
    asked: AttackSettings

    def run_in(self, path: Path, resume: bool) -> MembershipResult:
        """Run with a folder. A finished attack is read from its folder; it is not repeated."""
        folder = AttackFolder(path, self.setting.plan, self.compared(), self.notes(), resume)
        try:
            if folder.is_finished(self.choices()):
                found = load(folder.result)
            else:
                found = self.run(folder)
                folder.finish(found, self.choices())
            if not self.asked.keep_scores:
                folder.remove_secrets()
            return found
        finally:
            folder.close()

    def run(self, folder: AttackFolder | None = None) -> MembershipResult:
        """Train the shadows that the folder does not hold, and attack all."""
        placebo = self._arm("placebo", self._placebo(), folder, None) if self.asked.placebo else None
        return self._arm("shadows", self.setting, folder, placebo).named(self.asked.tiers)

    def _arm(
        self, name: str, setting: ShadowSetting, folder: AttackFolder | None, placebo: MembershipResult | None
    ) -> MembershipResult:
        trained = self._trained(name, setting, folder)
        scores = {attack: function(trained.signals) for attack, function in self.attacks.items()}
        if folder is not None and self.asked.keep_scores:
            folder.save_scores(name, member=trained.signals.member, **scores)
        measured = {"member_accuracy": float(trained.member_accuracy.mean())}
        result = analyse(
            trained.signals,
            scores,
            setting.plan,
            setting.group[setting.scored],
            dealt_at_random=self.asked.dealt_at_random,
            placebo=placebo,
        )
        accuracy = None if setting.population is None else float(trained.accuracy.mean())
        return replace(result, accuracy=accuracy, setting={**self.description, **measured})

    def _trained(self, name: str, setting: ShadowSetting, folder: AttackFolder | None) -> Shadows:
        store = None if folder is None else folder.blocks(name)
        with watched(self.asked.shadows, f"{name}, {setting.method}", self.asked.progress) as watch:
            return train_shadows(setting, self.asked.shadows, store, self.asked.jobs, watch)

    def _placebo(self) -> ShadowSetting:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EpsilonsWarning)  # planning has warned
            return replace(self.setting, plan=shadow_plan(placebo_plan(self.plan), self.setting.records))

    # -- what the folder notes -------------------------------------------------------------------------------

    def choices(self) -> dict[str, Any]:
        """What may differ between two calls that continue one attack."""
        return {
            "shadows": self.asked.shadows,
            "attacks": list(self.attacks),
            "placebo": self.asked.placebo,
            "dealt_at_random": self.asked.dealt_at_random,
        }

    def notes(self) -> dict[str, Any]:
        """What attack.json says beside the compared settings."""
        return {
            "not_covered": NOT_COVERED.format(shadows=self.asked.shadows),
            **self.choices(),
            "setting": dict(self.description),
        }

    def compared(self) -> dict[str, str]:
        """What decides the bits of a block."""
        setting, of = self.setting, fingerprints.of
        return {
            "plan": setting.plan.digest,
            "data": of((setting.inputs, setting.targets)),
            "budgets": of(setting.group),
            **({} if setting.owner is None else {"persons": of((setting.owner, setting.rows_per_person))}),
            "population": of(setting.population),
            "model": of(setting.model),
            "loss": of(setting.loss),
            "optimizer": of(setting.optimizer),
            "seed": str(setting.seed),
            "method": setting.method,
            "block size": str(setting.block_size),
            "performance": of(setting.performance),
            "device": setting.device,
            "version of torch": torch.__version__,
            "version of numpy": np.__version__,
        }


# -- The ROC of each group on logarithmic axes, beside what the plan certifies

#: More groups than this are not drawn: evenly spaced ones are, from the strictest to the loosest.
MOST_DRAWN = 6

_COLOURS = ("#1f5fa8", "#c2571a", "#3a7d44", "#6a3d9a", "#8c6d1f", "#444444")


def draw(result: MembershipResult, path: str | Path, attack: str | None = None) -> Path:
    """Draw the ROC of each group: the attack's with its 95 % intervals, what is certified and declared, and guessing.

    path    of an .svg, .png or .pdf file; only its owner may read it
    attack  by default the first one of the result

    A rate with fewer than 10 false alarms is not drawn. Where some group has fewer than 20 records, the certified
    curves are not drawn, because they were computed from all budgets together.

    Raises InputError for another ending or attack, RunError if the file cannot be written.
    """
    attack = result.names[0] if attack is None else attack
    if attack not in result.names:
        raise InputError(f"The result has the attacks {', '.join(result.names)}, got {attack!r}.")
    figure, axes = new_figure(6.4, 4.8)
    lowest = 1.0
    count = len(result.groups)
    chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_DRAWN)).round().astype(int))
    for row, colour in zip(chosen.tolist(), _COLOURS, strict=False):
        roc, shown = result.of(attack, row).roc, result.groups[row]
        if len(roc.rate):
            lowest = min(lowest, float(roc.rate[0]))
        axes.fill_between(roc.rate, roc.low, roc.high, color=colour, alpha=0.2, lw=0)
        axes.plot(roc.rate, roc.found, color=colour, label=_label(shown))
        if not result.suppressed:
            axes.plot(RATES, shown.certified.power, color=colour, ls="--", lw=1.2)
        if shown.declared is not None:
            axes.plot(RATES, shown.declared.power, color=colour, ls=":", lw=1.2)
    lowest = min(lowest, 0.1)
    axes.plot([lowest, 1], [lowest, 1], color="#888888", lw=0.9, label="guessing")
    if not result.suppressed:
        axes.plot([], [], color="#444444", ls="--", lw=1.2, label="no attack above (certified)")
    if any(row.declared is not None for row in result.groups):
        axes.plot([], [], color="#444444", ls=":", lw=1.2, label="declared by the tier")
    axes.set(xscale="log", yscale="log", xlim=(lowest, 1), ylim=(lowest, 1.1))
    axes.set_xlabel("false-positive rate")
    axes.set_ylabel("true-positive rate")
    axes.set_title(f"{attack}, {result.shadows:,} shadow models; shaded: 95 % intervals", fontsize=10, loc="left")
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    return save_figure(figure, Path(path))


def _label(row: GroupRow) -> str:
    return f"ε {row.label}" if row.epsilon is None else f"ε = {row.label}"
