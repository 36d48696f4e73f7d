"""`attack`: train shadow models under a plan, attack them, and compare the outcome with what is certified."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ...budgets.budgets import Budgets
from ...draws.persons_rows import persons_of
from ...errors import DataError, EpsilonsWarning, InputError, ModelError
from ...planning import Plan
from ...reporting.membership import MembershipResult
from ...training import Performance, Records
from ...training.fitting.losses import optimizer_maker
from ...training.validation import are_columns, columns
from ..stacked import unstackable
from .attacks import ATTACKS, DEFAULT_ATTACKS, POPULATION_ATTACKS, Attack
from .folder import AttackSettings, Task
from .shadows import BLOCK_SIZES, METHODS, ShadowSetting, as_tensor, shadow_plan

#: With fewer shadows, some record has no shadow that it is out of, or none that it is in.
FEWEST_SHADOWS = 8

KNOWN_POPULATION = (
    "More than half of the population's records equal training records. If they are the same records, attacks that use "
    "a population take members for non-members, and their results are wrong. Give records that are not trained on."
)

WITHOUT_POPULATION = (
    "RMIA compares records with a population that no shadow was trained on. Give population= (in a config, data.test "
    "or data.test_share)."
)


def attack(
    model: nn.Module,
    dataset: Any,
    plan: Plan,
    *,
    budgets: Budgets,
    population: Any = None,
    folder: str | Path | None = None,
    resume: bool = False,
    **options: Any,
) -> MembershipResult:
    """Attack membership: train shadow models, each on a random half of the records, and recognise the members.

    model            the common start of all shadows; copies of it are trained
    dataset          (inputs, targets) as tensors or arrays, (records, …) and (records,); targets are classes. For
                     budgets of persons `Records` of them, which says whose rows they are; a person is in or out as a
                     whole
    plan, budgets    the plan under attack, and the budgets that it was made for. Every shadow is trained under this
                     plan; only the divisor of its updates is halved, because half of the records are in
    population       (inputs, targets) of records that are not trained on, such as test data; RMIA needs them
    folder           a new folder for the result and for finished blocks; None keeps nothing
    resume           continue the attack in `folder`, with the same settings; more shadows need keep_scores
    options          the fields of `AttackSettings`: shadows=64, attacks=["rmia"], placebo=True, …

    No guarantee covers the shadows, their scores or the result: docs/membership.md.

    Raises InputError for settings that do not fit together, DataError or ModelError for data or a model that cannot be
    attacked, RunError for a folder that is occupied or holds an attack with other settings.
    """
    if plan.select is not None:
        raise InputError(
            "Shadows are single runs, and a run that was selected may show more than a single one. To attack one run "
            "of this selection: attack(…, plan.of_one_run)."
        )
    if plan.groups.starts is not None:
        raise InputError(
            "These people have lifetime budgets in a registry. Shadows train on their records outside of every "
            "guarantee, so the registry cannot charge them. To test the plan, audit it: epsilons.audit(plan)."
        )
    asked = AttackSettings(**options)
    chosen = _chosen(asked.attacks, population is not None)
    if asked.shadows < FEWEST_SHADOWS:
        raise InputError(f"shadows must be at least {FEWEST_SHADOWS}, got {asked.shadows}. Useful are 64 or more.")
    if folder is None and (resume or asked.keep_scores):
        raise InputError("resume and keep_scores need folder=, the folder of the attack.")
    make = optimizer_maker(asked.optimizer, asked.lr, asked.momentum)
    loss = asked.loss
    inputs, targets, owner, rows_per_person = _owned(dataset, budgets)
    reason = unstackable(model, _loss(loss), make) if isinstance(loss, str) else "The loss is a function."
    reason = reason if owner is None else "A stack clips each row by itself, and persons have several or none."
    method, why = _method(asked.method, reason)
    setting = ShadowSetting(
        model=copy.deepcopy(model),
        optimizer=make,
        loss=loss,
        inputs=inputs,
        targets=targets,
        plan=shadow_plan(plan, len(budgets)),
        budgets=budgets.without_ids(),
        population=None if population is None else _records(population, "population"),
        seed=int(asked.seed),
        method=method,
        performance=asked.performance or Performance(),
        device=_device(asked.device),
        owner=owner,
        rows_per_person=rows_per_person,
    )
    _check_model(setting)
    _warn_of_known_population(setting)
    assert setting.group is not None  # raises an error if records, budgets and plan do not fit
    description = {
        "model": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": plan.steps,
        **({"runs": plan.runs} if plan.runs > 1 else {}),
        "unit": plan.unit,
        "method": method,
        "why": why,
        "seed": setting.seed,
        "population": setting.population_size,
    }
    task = Task(plan, setting, description, chosen, asked)
    return task.run() if folder is None else task.run_in(Path(folder), resume)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _chosen(attacks: Sequence[str] | Mapping[str, Attack] | None, has_population: bool) -> Mapping[str, Attack]:
    """{name: attack}. Raises InputError for an unknown name, and for one that needs a population that is missing."""
    if isinstance(attacks, Mapping):
        return dict(attacks)
    if attacks is None:
        names = [name for name in DEFAULT_ATTACKS if has_population or name not in POPULATION_ATTACKS]
        if len(names) < len(DEFAULT_ATTACKS):
            warnings.warn(f"{WITHOUT_POPULATION} It is left out.", EpsilonsWarning, stacklevel=3)
    else:
        names = list(dict.fromkeys(attacks))
    unknown = [name for name in names if name not in ATTACKS]
    if unknown or not names:
        got = repr(unknown[0]) if unknown else "none"
        raise InputError(
            f"Attacks are named as in {','.join(DEFAULT_ATTACKS)}; there are: {', '.join(ATTACKS)}; got {got}."
        )
    needing = [name for name in names if name in POPULATION_ATTACKS and not has_population]
    if needing:
        raise InputError(f"{WITHOUT_POPULATION} Or leave out {needing[0]}.")
    return {name: ATTACKS[name] for name in names}


def _method(method: str, reason: str | None) -> tuple[str, str]:
    """(the method, how and why in words); reason: why the shadows cannot be stacked. Raises InputError."""
    if method not in ("auto", *METHODS):
        raise InputError(f"No method is called {method!r}; there are: auto, {', '.join(METHODS)}.")
    if method == "stacked" and reason is not None:
        raise InputError(f'These shadows cannot be stacked. {reason} Use method="alone" (--method alone).')
    if method == "alone" or reason is not None:
        how = ", as asked." if reason is None else f", on all cores. {reason}"
        return "alone", f"They are trained one by one{how}"
    return "stacked", f"{BLOCK_SIZES['stacked']} of them are trained at a time, as one program."


def _loss(loss: str) -> str:
    """The same name. Raises InputError for losses of other targets than classes."""
    if loss != "cross_entropy":
        raise InputError(
            f'Membership inference reads the probability of a record\'s class, so loss must be "cross_entropy" or a '
            f"function; got {loss!r}."
        )
    return loss


def _records(data: Any, what: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(inputs, classes) as arrays. Raises DataError for other data."""
    if not are_columns(data) or len(data) != 2:
        raise DataError(f"Give the {what} as (inputs, targets), two tensors or arrays; got a {type(data).__name__}.")
    inputs, targets = (column.detach().cpu().numpy() for column in columns(data))
    if targets.ndim != 1 or len(inputs) != len(targets) or not np.issubdtype(targets.dtype, np.integer):
        raise DataError(
            f"The {what} need one class per record, whole numbers of shape ({len(inputs)},); got {targets.dtype} of "
            f"shape {targets.shape}."
        )
    return inputs, targets.astype(np.int64)


def _owned(
    dataset: Any, budgets: Budgets
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.int64] | None, int]:
    """Inputs and classes by person; the person of each row, None if each has one row; rows in a draw, at most."""
    given = dataset if isinstance(dataset, Records) else Records(dataset)
    inputs, targets = _records(given.data, "records")
    persons = persons_of(budgets, len(inputs), given.persons, given.rows_per_person)
    if persons.person is None:
        return inputs, targets, None, 1
    order = np.argsort(persons.person, kind="stable")
    owner, inputs, targets = persons.person[order], inputs[order], targets[order]
    has_one_each = np.array_equal(owner, np.arange(len(budgets)))
    return inputs, targets, None if has_one_each else owner, persons.rows_per_person


def _warn_of_known_population(setting: ShadowSetting) -> None:
    if setting.population is None:
        return
    trained = set(_digests(setting.inputs, setting.targets))
    known = [digest in trained for digest in _digests(*setting.population)]
    if sum(known) > len(known) / 2:
        warnings.warn(KNOWN_POPULATION, EpsilonsWarning, stacklevel=3)


def _digests(inputs: npt.NDArray[Any], targets: npt.NDArray[Any]) -> Iterator[bytes]:
    """A digest of each record."""
    for row, target in zip(inputs, targets, strict=True):
        yield hashlib.blake2b(
            row.tobytes(), salt=int(target).to_bytes(8, "little", signed=True), digest_size=16
        ).digest()


def _device(name: str) -> str:
    """ "auto" resolved. Raises InputError for a device that is not on this machine."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(f'device must be on this machine, got {name!r}; "auto" uses a GPU if there is one.') from None
    return device


def _check_model(setting: ShadowSetting) -> None:
    """Raise ModelError unless the model returns one number per class."""
    model = copy.deepcopy(setting.model).to(setting.device).eval()
    with torch.no_grad():
        outputs = model(as_tensor(setting.inputs[:2]).to(setting.device))
    classes = int(max(setting.targets.max(), 1)) + 1
    if outputs.ndim != 2 or outputs.shape[1] < classes:
        raise ModelError(
            f"The model must return a number for each of {classes:,} classes, got shape {tuple(outputs.shape)} for two "
            "records."
        )
