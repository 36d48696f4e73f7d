"""One arm of a membership attack: data, groups, plan, shadow models, attacks, statistics.

All arms of a table deal the groups in the same way and toss the same coins under the same keys, so that they are
compared target by target. Finished blocks of shadows stay in `unfinished` until the result is written.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import epsilons
from epsilons import Budgets, Performance, Plan
from epsilons.auditing.membership.folder import BlockFiles
from epsilons.auditing.membership.shadows import ShadowSetting, train_shadows
from epsilons.auditing.stacked import unstackable
from epsilons.core.files import close_folder
from epsilons.data.images import CIFAR10, MNIST
from epsilons.models import build
from epsilons.training.features import FEATURES
from epsilons.training.fitting.losses import optimizer_maker

from . import training
from .membership_values import attacked
from .settings import MembershipSettings, Settings

Records = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]

#: Options of features, beside their defaults in the library.
FEATURE_OPTIONS: dict[str, dict[str, Any]] = {"scattering": {"normalisation": "groups", "pooled": 2, "unit": True}}


def membership(settings: Settings, seed: int, label: str = "", device: str = "auto") -> dict[str, Any]:
    """Train the shadows that are missing, attack all, and return the values of one result.

    Shadows are trained in as many processes as this run has threads.
    """
    assert isinstance(settings, MembershipSettings)
    started = time.process_time()
    dealt = training.budgets_of(settings, settings.pool, seed)
    setting = shadow_setting(settings, dealt, seed, device)
    folder = training.UNFINISHED / f"{settings.named(seed)}-{setting.plan.digest[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    close_folder(folder)
    watch = _Watch(label, settings.wanted)
    trained = train_shadows(setting, settings.wanted, BlockFiles(folder, "arm"), torch.get_num_threads(), watch)
    return {
        "plan": setting.plan.digest,
        "steps": setting.plan.steps,
        "levels": dealt.epsilons.tolist(),
        "spent": setting.plan.epsilon_spent().tolist(),
        "shadows": settings.wanted,
        "accuracy": float(trained.accuracy.mean()),
        "member_accuracy": float(trained.member_accuracy.mean()),
        **attacked(settings, trained.signals, setting.plan, dealt),
        "processor_seconds": round(time.process_time() - started, 1),
    }


class _Watch:
    """Prints the number of shadows that are trained, every SECONDS_PER_LINE seconds."""

    def __init__(self, label: str, wanted: int) -> None:
        self._label, self._wanted, self._printed = label, wanted, time.monotonic()

    def __call__(self, done: float) -> None:
        if self._label and time.monotonic() - self._printed >= training.SECONDS_PER_LINE:
            self._printed = time.monotonic()
            print(f"  {self._label}: {done:.1f}/{self._wanted} shadows", file=sys.stderr, flush=True)


def shadow_setting(settings: MembershipSettings, dealt: Budgets, seed: int, device: str) -> ShadowSetting:
    """What all shadows of this arm depend on; dealt: the groups of the records."""
    inputs, targets = records_of(settings, "train", settings.pool)
    torch.manual_seed(seed)
    model = build(settings.model, inputs.shape[1:], int(targets.max()) + 1)
    gpu = training.on_gpu(device)
    return ShadowSetting(
        model=model,
        optimizer=optimizer_maker("sgd", settings.lr, settings.momentum),
        loss="cross_entropy",
        inputs=inputs,
        targets=targets,
        plan=plan_of(settings, dealt),
        budgets=trained_budgets(settings, dealt),
        population=records_of(settings, "test", settings.population),
        seed=seed,
        method="stacked" if unstackable(model) is None else "alone",
        performance=Performance(max_physical_batch=training.GPU_BATCH if gpu else "auto", channels_last=True),
        device="cuda" if gpu else "cpu",
    )


def trained_budgets(settings: MembershipSettings, dealt: Budgets) -> Budgets:
    """The budgets under which the shadows are trained: those that were dealt, or one for all (DP-SGD)."""
    if settings.epsilon is None:
        return dealt
    return Budgets(np.full(len(dealt), settings.epsilon), settings.delta)


def plan_of(settings: MembershipSettings, dealt: Budgets) -> Plan:
    """One plan for all shadows, for the declared shares of half of the pool: never for a shadow's members."""
    shares = {settings.epsilon: 1.0} if settings.epsilon else {float(e): s for e, s in settings.shares.items()}
    return epsilons.plan(
        trained_budgets(settings, dealt),
        settings.recipe(settings.pool),
        settings.strategy,
        accountant=settings.accountant,
        public_shares=shares,
        public_records=settings.pool // 2,
        **settings.options,
    )


def records_of(settings: MembershipSettings, split: str, count: int) -> Records:
    """The first records of a split, as the models read them."""
    data = epsilons.data.load(settings.dataset, split)
    inputs, targets = torch.from_numpy(data.inputs[:count]), data.targets[:count]
    if settings.inputs != "normalised":
        inputs = pixels(settings.dataset, inputs)
        inputs = (
            inputs
            if settings.inputs == "pixels"
            else FEATURES[settings.inputs](inputs, **FEATURE_OPTIONS[settings.inputs])
        )
    return (settings.input_scale * inputs).numpy(), targets


def pixels(dataset: str, inputs: Tensor) -> Tensor:
    """Pixels from 0 to 1. The constants that images were normalised with depend on the data."""
    for which in (MNIST, CIFAR10):
        if which.name == dataset:
            mean, std = (torch.tensor(values)[:, None, None] for values in (which.mean, which.std))
            return (inputs * std + mean).clamp(0, 1)
    return inputs
