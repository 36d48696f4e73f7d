"""One attack with its arguments checked: train the arms, attack them, analyse, and keep the result in a folder."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import EpsilonsWarning
from ...planning import Plan
from ...training import fingerprints
from . import saved
from .analysis import analyse
from .attacks import Attack
from .blocks import ShadowSetting
from .folder import AttackFolder
from .result import MembershipResult
from .sentences import NOT_COVERED
from .shadows import Shadows, placebo_plan, shadow_plan, train_shadows
from .watching import watched


@dataclass(frozen=True)
class Task:
    """What `attack` was asked for.

    plan         the plan under attack
    setting      of the shadows
    description  what is trained and how, in words; a part of the result
    others       the arguments of `attack` with these names
    """

    plan: Plan
    setting: ShadowSetting
    description: Mapping[str, Any]
    attacks: Mapping[str, Attack]
    shadows: int
    placebo: bool
    dealt_at_random: bool
    keep_scores: bool
    jobs: int | None
    progress: bool

    def run_in(self, path: Path, resume: bool) -> MembershipResult:
        """Run with a folder. A finished attack is read from its folder; it is not repeated."""
        folder = AttackFolder(path, self.setting.plan, self.compared(), self.notes(), resume)
        try:
            if folder.is_finished(self.asked()):
                found = saved.load(folder.result)
            else:
                found = self.run(folder)
                folder.finish(found, self.asked())
            if not self.keep_scores:
                folder.remove_secrets()
            return found
        finally:
            folder.close()

    def run(self, folder: AttackFolder | None = None) -> MembershipResult:
        """Train the shadows that the folder does not hold, and attack all."""
        placebo = self._arm("placebo", self._placebo(), folder, None) if self.placebo else None
        return self._arm("shadows", self.setting, folder, placebo)

    def _arm(
        self, name: str, setting: ShadowSetting, folder: AttackFolder | None, placebo: MembershipResult | None
    ) -> MembershipResult:
        trained = self._trained(name, setting, folder)
        scores = {attack: function(trained.signals) for attack, function in self.attacks.items()}
        if folder is not None and self.keep_scores:
            folder.save_scores(name, member=trained.signals.member, **scores)
        measured = {"member_accuracy": float(trained.member_accuracy.mean())}
        return analyse(
            trained.signals,
            scores,
            setting.plan,
            setting.group,
            dealt_at_random=self.dealt_at_random,
            placebo=placebo,
            accuracy=None if setting.population is None else float(trained.accuracy.mean()),
            setting={**self.description, **measured},
        )

    def _trained(self, name: str, setting: ShadowSetting, folder: AttackFolder | None) -> Shadows:
        store = None if folder is None else folder.blocks(name)
        with watched(self.shadows, f"{name}, {setting.method}", self.progress) as watch:
            return train_shadows(setting, self.shadows, store, self.jobs, watch)

    def _placebo(self) -> ShadowSetting:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EpsilonsWarning)  # planning has warned
            return replace(self.setting, plan=shadow_plan(placebo_plan(self.plan), self.setting.records))

    # -- what the folder notes -------------------------------------------------------------------------------

    def asked(self) -> dict[str, Any]:
        """What may differ between two calls that continue one attack."""
        return {
            "shadows": self.shadows,
            "attacks": list(self.attacks),
            "placebo": self.placebo,
            "dealt_at_random": self.dealt_at_random,
        }

    def notes(self) -> dict[str, Any]:
        """What attack.json says beside the compared settings."""
        return {
            "not_covered": NOT_COVERED.format(shadows=self.shadows),
            **self.asked(),
            "setting": dict(self.description),
        }

    def compared(self) -> dict[str, str]:
        """What decides the bits of a block."""
        setting, of = self.setting, fingerprints.of
        return {
            "plan": setting.plan.digest,
            "data": of((setting.inputs, setting.targets)),
            "budgets": of(setting.group),
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
