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
from scipy import stats
from torch import Tensor

import epsilons
from epsilons import Budgets, Performance, Plan
from epsilons.auditing.membership import ATTACKS
from epsilons.auditing.membership.analysis import analyse
from epsilons.auditing.membership.blocks import ShadowSetting
from epsilons.auditing.membership.folder import BlockFiles
from epsilons.auditing.membership.intervals import roc
from epsilons.auditing.membership.outcomes import FoundAt
from epsilons.auditing.membership.result import MembershipResult
from epsilons.auditing.membership.shadows import train_shadows
from epsilons.auditing.membership.signals import Signals
from epsilons.data.images import CIFAR10, MNIST
from epsilons.files import close_folder
from epsilons.mechanism import IntArray
from epsilons.training.features import FEATURES
from epsilons.training.models import build
from epsilons.training.optimizers import optimizer_maker
from epsilons.training.stacked import unstackable

from . import training
from .settings import MembershipSettings, Settings

Records = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]

#: Options of features, beside their defaults in the library.
FEATURE_OPTIONS: dict[str, dict[str, Any]] = {"scattering": {"normalisation": "groups", "pooled": 2, "unit": True}}
#: The attack of the paper's code, and the same with the margin; the paper tests the scores of the first.
PAPER_ATTACKS = ("lira-raw", "lira")

#: The paper shows five target models.
TARGETS = 5


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
        performance=Performance(max_physical_batch=training.GPU_BATCH if gpu else None, channels_last=True),
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


# -- what is kept ----------------------------------------------------------------------------------


def attacked(settings: MembershipSettings, signals: Signals, plan: Plan, dealt: Budgets) -> dict[str, Any]:
    """All statistics as JSON values. No value belongs to one record."""
    scores = {name: ATTACKS[name](signals) for name in settings.attacks}
    result = analyse(signals, scores, plan, dealt.group, dealt_at_random=True, groups=dealt.groups)
    first = settings.attacks[0]
    return {
        **values_of(result),
        "target_curves": [
            [_curve(roc(s[None, of], m[None, of], np.random.default_rng(0))) for of in _columns(dealt.group)]
            for s, m in zip(scores[first][:TARGETS], signals.member[:TARGETS], strict=True)
        ],
        "paper_test": {
            name: paper_test(scores[name], signals.member, dealt.group) for name in PAPER_ATTACKS if name in scores
        },
    }


def values_of(result: MembershipResult) -> dict[str, Any]:
    """The statistics of a result, rounded: AUCs of targets to 5 digits, as differences between arms need them.

    auc           {attack: [by group]} value, low and high over targets; low and high for other records
    found         {attack: [by group]} true-positive rates: at, value, low, high, certified
    share         {attack: [by group]} part of the certified advantage that was reached
    difference    {attack: …} between the groups, with the share of ordered targets and p of the randomisation test
    curve         {attack: [by group]} the ROC of the first two attacks
    target_auc    {attack: [by group: [by target]]}
    """
    each = {name: [result.of(name, row) for row in range(len(result.rows))] for name in result.names}
    return {
        "certified_auc": [_rounded(row.certified.area) for row in result.rows],
        "certified_curve": [_rounded(row.certified.power) for row in result.rows],
        "auc": {
            name: [_interval(one.auc) + _interval(one.auc_of_others)[1:] for one in ones] for name, ones in each.items()
        },
        "found": {name: [[_found(at) for at in one.found] for one in ones] for name, ones in each.items()},
        "share": {
            name: [None if one.share is None else _rounded(one.share) for one in ones] for name, ones in each.items()
        },
        "exceeds_certified": [name for name, ones in each.items() if any(one.exceeds_certified for one in ones)],
        "difference": {
            one.attack: {
                "auc": _interval(one.auc),
                "of_others": _interval(one.of_others)[1:],
                "ordered": _rounded(one.ordered),
                "p": _rounded(one.p_value),
            }
            for one in result.differences
        },
        "curve": {name: [_curve(one.roc) for one in each[name]] for name in result.names[:2]},
        "target_auc": {name: _rounded(aucs.T) for name, aucs in result.target_auc.items()},
    }


def paper_test(scores: npt.NDArray[Any], member: npt.NDArray[np.bool_], group: IntArray) -> dict[str, Any]:
    """The paper's Student t-test by target: all scores of the looser group against all of the stricter one.

    Members and non-members are together, so t grows with any difference between the two sets of records, of either
    sign. Members alone (Welch's test) compare what the claim is about.

    quantiles     5, 50 and 95 % of t over targets     targets       [t, p] of the first targets
    significant   share of targets with p < .05        members_only  the same for members alone
    """
    strict, loose = _columns(group)
    student = stats.ttest_ind(scores[:, loose], scores[:, strict], axis=1)
    welch = [
        stats.ttest_ind(s[loose][m[loose]], s[strict][m[strict]], equal_var=False).pvalue
        for s, m in zip(scores, member, strict=True)
    ]
    return {
        "quantiles": _rounded(np.quantile(student.statistic, [0.05, 0.5, 0.95])),
        "significant": _rounded(np.mean(student.pvalue < 0.05)),
        "targets": _rounded(np.stack([student.statistic, student.pvalue], 1)[:TARGETS]),
        "members_only": _rounded(np.mean(np.array(welch) < 0.05)),
    }


def _columns(group: IntArray) -> list[IntArray]:
    return [np.flatnonzero(group == index) for index in range(int(group.max()) + 1)]


def _found(at: FoundAt) -> list[Any]:
    found = [None] * 3 if at.found is None else _interval(at.found)
    return [at.rate, *found, _rounded(at.certified)]


def _curve(curve: Any) -> dict[str, Any]:
    return {name: _rounded(getattr(curve, name)) for name in ("rate", "found", "low", "high")}


def _interval(estimate: Any) -> list[Any]:
    return [_rounded(value) for value in (estimate.value, estimate.low, estimate.high)]


def _rounded(values: Any) -> Any:
    """Python numbers with 5 digits, small ones with 3 significant digits; None for a number that is not finite."""
    if np.ndim(values):
        return [_rounded(value) for value in values]
    number = float(values)
    if not np.isfinite(number):
        return None
    return round(number, 5) if abs(number) >= 0.01 else float(f"{number:.3g}")
