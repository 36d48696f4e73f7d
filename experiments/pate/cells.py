"""The kinds "pate" and "pate-sgd": teachers and votes, and IDP-SGD on the same features and private records.

Settings of "pate": `steps` votes, decided before any vote; `strategy` "uniform", "scale" (weighting), "upsampling" with
`options` = {copies}, or "vanishing". With `noise_std` the votes are released as published: under this noise, until the
data-dependent epsilon of a group is above its budget; `steps` is not used then. A seed chooses the public records and
the noise; teachers and budgets have their own, `teacher_seed`.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import epsilons
from epsilons import Budgets, EvalData
from epsilons.core.mechanism import FloatArray, IntArray
from epsilons.draws.randomness import key_from_seed
from epsilons.errors import InputError
from epsilons.models import build

from ..settings import PateSettings
from ..training import budgets_of, charges_of, plan_of
from .costs import vote_plan, weights
from .data_dependent import affordable, spent_after
from .published import code_weights, exact_spends, spends_of
from .teachers import CLASSES, Data, accuracy, fit, partition, splits, votes_of
from .votes import counts, planned_counts, released_labels


def pate(settings: PateSettings, seed: int, label: str = "", device: str = "") -> dict[str, Any]:
    """The labels that the teachers give away, what they cost, and how good a student trained on them is."""
    settings = _with_teachers(settings, seed)
    if settings.noise_std is not None:
        return _as_published(settings, seed)
    budgets = _budgets(settings)
    plan = vote_plan(budgets, settings.steps or 0, settings.strategy, settings.accountant, **settings.options)
    order, coins = _draw(settings, seed)
    votes, own = ensemble(settings)
    counted, noise = planned_counts(votes[:, order], own, plan, copies_of(settings), CLASSES)
    spent = plan.epsilon_spent()
    return {
        "plan": plan.digest,
        "steps": plan.steps,
        "levels": plan.epsilons.tolist(),
        "spent": spent.tolist(),
        "largest_part": float((spent / plan.epsilons).max()),
        "weights": [weights(phase).tolist() for phase in plan.phases],
        "votes": [sum(phase.steps for phase in plan.phases if phase.sample_rate[p] > 0) for p in range(len(spent))],
        "noise": plan.phases[0].noise_std,
        **_student(settings, order[: plan.steps], released_labels(counted, noise, coins)),
    }


def _as_published(settings: PateSettings, seed: int) -> dict[str, Any]:
    """Labels until the data-dependent epsilon of some group is above its budget: private itself, like their number."""
    budgets = _budgets(settings)
    voted, charged = published_weights(settings, budgets)
    sigma = settings.noise_std or 0.0
    order, coins = _draw(settings, seed)
    votes, own = ensemble(settings)
    counted = counts(votes[:, order], voted[own], CLASSES)
    limits = budgets.epsilons if settings.strategy != "uniform" else np.full(len(voted), budgets.epsilons.min())
    after = spent_after(counted, sigma, charged, budgets.delta)
    number, deltas = affordable(after, limits), budgets.delta.tolist()
    if number == 0:
        raise InputError(f"Under noise {sigma:g} a single vote is above the budget of a group. Raise noise_std.")
    return {
        "steps": number,
        "levels": budgets.epsilons.tolist(),
        "data_dependent": after[number - 1].tolist(),
        "with_voted_weights": spent_after(counted[:number], sigma, voted, budgets.delta)[-1].tolist(),
        "exact": exact_spends(voted, sigma, deltas, number).tolist(),
        "weights": {"voted": voted.tolist(), "charged": charged.tolist()},
        "exact_at": {
            "charged": spends_of(charged, charged, budgets, settings.steps or 0).tolist(),
            "voted": spends_of(voted, charged, budgets, settings.steps or 0).tolist(),
        },
        **_student(settings, order[:number], released_labels(counted[:number], np.full(number, sigma), coins)),
    }


def published_weights(settings: PateSettings, budgets: Budgets) -> tuple[FloatArray, FloatArray]:
    """(groups,) weights that the teachers vote with, and (groups,) weights that the groups are charged for."""
    if settings.code_weights:
        return code_weights(budgets)
    own = weights(vote_plan(budgets, settings.steps or 0, settings.strategy, settings.accountant).phases[0])
    return own, own


def _with_teachers(settings: PateSettings, seed: int) -> PateSettings:
    return settings.model_copy(update={"teacher_seed": seed}) if settings.own_teachers else settings


def _budgets(settings: PateSettings) -> Budgets:
    return budgets_of(settings, settings.private, settings.teacher_seed)


def _draw(settings: PateSettings, seed: int) -> tuple[IntArray, np.random.Generator]:
    """An order of the public records, the same one for all cells, and coins for the noise."""
    coins = np.random.default_rng([seed, 1])
    public = len(splits_of(settings.dataset, settings.private)[1].targets)
    return np.random.default_rng([seed, 0]).permutation(public), coins


def _student(settings: PateSettings, rows: IntArray, labels: IntArray) -> dict[str, Any]:
    """A student on the labelled public records, and how many of the labels are right."""
    _, public, test = splits_of(settings.dataset, settings.private)
    chosen = public.subset(torch.from_numpy(rows))
    weight = fit(chosen.inputs[None], torch.from_numpy(labels)[None])[0]
    votes, _ = ensemble(settings)
    return {
        "accuracy": accuracy(weight, test),
        "labels_right": float((labels == chosen.targets.numpy()).mean()),
        "teachers_right": float((votes == public.targets.numpy()).mean()),
        "teachers": len(votes),
    }


def ensemble(settings: PateSettings) -> tuple[IntArray, IntArray]:
    """(teachers, public records) votes of the teachers, and (teachers,) the groups of their records."""
    key = json.dumps([settings.shares, settings.delta, copies_of(settings)])
    return _ensemble(settings.dataset, settings.private, settings.teachers, settings.teacher_seed, key)


def copies_of(settings: PateSettings) -> list[int]:
    """(groups,) how many teachers have a record of this group."""
    return list(settings.options.get("copies", [1] * len(settings.shares)))


@lru_cache(maxsize=8)
def _ensemble(dataset: str, private: int, teachers: int, seed: int, key: str) -> tuple[IntArray, IntArray]:
    shares, delta, copies = json.loads(key)
    levels = {float(level): share for level, share in shares.items()}
    budgets = Budgets.from_shares(levels, records=private, delta=delta, seed=seed)
    ours, public, _ = splits_of(dataset, private)
    parts = partition(budgets.group, teachers, copies, seed)
    votes = torch.cat([votes_of(part, ours, public) for part in parts]).numpy()
    return votes, np.repeat([part.group for part in parts], [len(part.rows) for part in parts])


@lru_cache(maxsize=2)
def splits_of(dataset: str, private: int) -> tuple[Data, Data, Data]:
    """The same as `splits`, kept in memory."""
    return splits(dataset, private)


def pate_sgd(settings: PateSettings, seed: int, label: str = "", device: str = "") -> dict[str, Any]:
    """Softmax regression by the library's own `fit`, on the private records, with the same features and budgets."""
    settings = _with_teachers(settings, seed)
    private, _, test = splits_of(settings.dataset, settings.private)
    budgets = _budgets(settings)
    plan = plan_of(settings, budgets)
    torch.manual_seed(seed)
    model = build("logistic", (private.inputs.shape[1] - 1,), CLASSES)
    run = epsilons.fit(
        model,
        _records(private),
        plan,
        budgets=budgets,
        training=epsilons.Training(lr=settings.lr, momentum=settings.momentum, device="cpu", progress=False),
        evaluation=EvalData(_records(test), public=True, every=plan.steps),
        seed=epsilons.Randomness.with_key(key_from_seed(seed)),
    )
    return {
        **charges_of(plan, budgets, run.charged),
        "accuracy": run.metrics[-1]["accuracy"],
    }


def _records(data: Data) -> tuple[Tensor, Tensor]:
    """Features of norm 1 without the column of ones, which a model's bias replaces."""
    features = data.inputs[:, :-1]
    return features / features.norm(dim=1, keepdim=True), data.targets
