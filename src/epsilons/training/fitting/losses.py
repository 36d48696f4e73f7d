"""Losses by name, one value per record, and the module that computes them from a model and a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...budgets.budgets import Budgets
from ...core.files import write_json
from ...draws.randomness import Randomness as Source
from ...errors import DataError, InputError, PlanError, RunError, named
from ...ledger.run_folder import RunFolder
from ...planning import Plan, balance
from .. import validation
from .evaluation import Loss


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def _binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    flat = outputs.reshape(len(targets), -1)
    targets = targets.reshape(flat.shape).to(flat.dtype)
    return F.binary_cross_entropy_with_logits(flat, targets, reduction="none").mean(1)


def _mse(outputs: Tensor, targets: Tensor) -> Tensor:
    flat = outputs.reshape(len(targets), -1)
    return (flat - targets.reshape(flat.shape)).square().mean(1)


LOSSES: dict[str, Loss] = {
    "cross_entropy": _cross_entropy,
    "binary_cross_entropy": _binary_cross_entropy,
    "mse": _mse,
}

#: Losses whose targets are classes.
OF_CLASSES = ("cross_entropy", "binary_cross_entropy")


class _Balanced(nn.Module):
    """(logits, targets) -> (batch,) cross entropies of shifted logits. shift: (classes,)"""

    shift: Tensor

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        if logits.ndim != 2 or logits.shape[1] != len(self.shift):
            wanted, got = f"(records, {len(self.shift)})", tuple(logits.shape)
            raise DataError(f"This balanced_loss takes logits of shape {wanted}, one per class, got {got}.")
        return _cross_entropy(logits + self.shift.to(logits), targets)

    def __repr__(self) -> str:
        """Without the shift, which follows from all budgets together."""
        return f"balanced_loss of {len(self.shift)} classes"


def balanced_loss(plan: Plan, classes: Mapping[float, Sequence[float]]) -> nn.Module:
    """A loss that makes up for budgets that are tied to classes: loss(logits, targets) -> (batch,).

    plan     the plan of the run
    classes  {epsilon: one number per class}: how the people with this budget divide into the classes, as counts or
             shares; each row counts relative to its own sum. Declare them without looking at the data, or take those
             of `class_counts`, which the plan charges: other counts of the data are not covered by the guarantee

    It is the cross entropy of logits to which `planning.balance(plan, classes).shift` was added: a function of one
    record and of constants, so rates, noise and epsilons stay those of the plan. Use it in training alone, and predict
    with the logits as they are. It needs clip norms that most gradients exceed.

    Raises PlanError for classes that do not fit the plan; the loss raises DataError for logits of another shape.

    >>> import epsilons
    >>> budgets = epsilons.Budgets.from_shares({1.0: .5, 3.0: .5}, records=1000)
    >>> plan = epsilons.plan(budgets, epsilons.Recipe(steps=20, batch_size=100, clip_norm=1.0), accountant="rdp")
    >>> loss = balanced_loss(plan, {1.0: [90, 10], 3.0: [20, 80]})
    >>> loss(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0])).shape
    torch.Size([4])
    """
    return _Balanced(torch.from_numpy(balance(plan, classes).shift).float())


def class_counts(
    plan: Plan,
    labels: Any,
    budgets: Budgets,
    file: str | Path,
    *,
    classes: int,
    persons: Any = None,
    seed: int | None = None,
) -> dict[float, list[float]]:
    """How the people with each budget divide into the classes, counted once, with the noise that the plan charges.

    plan     a plan with `class_noise`, whose epsilons include this count
    labels   (records,) the class of each record, from 0
    file     keeps the result. A second call returns it, because a second count would not be charged: each run of a plan
             for several has a file of its own
    persons  (records,) each record's person, as a position in the budgets; each person then counts once, divided among
             the classes of their records
    seed     makes the noise repeatable, and gives no guarantee to a person who knows it

    Returns what `balanced_loss` and `Training(balance=…)` take; no count is below 1. Raises PlanError for a plan that
    charges no counts, InputError for labels that are no classes, RunError for a file of another plan.
    """
    path = Path(file)
    if plan.class_noise is None or plan.groups != budgets.groups:
        raise PlanError("Classes are counted under a plan of these budgets that charges it: plan(…, class_noise=20.0).")
    if not path.exists():
        label = np.asarray(labels).reshape(-1)
        person = np.arange(len(budgets)) if persons is None else np.asarray(persons)
        is_person = (person >= 0) & (person < len(budgets))
        if len(person) != len(label) or not is_person.all() or label.dtype.kind not in "iu":
            raise InputError("class_counts needs one whole number as label, and one person, for each record.")
        if label.min(initial=0) < 0 or label.max(initial=0) >= classes:
            raise InputError(f"Labels must be from 0 to {classes - 1}, the number of classes less 1.")
        part = 1.0 / np.bincount(person, minlength=len(budgets))[person]
        table = np.zeros((len(plan.groups), classes))
        np.add.at(table, (budgets.group[person], label), part)
        noise = Source.fresh(seed).stream("class counts").normals(table.size).reshape(table.shape)
        noisy = np.maximum(table + plan.class_noise * noise, 1.0)
        rows = {str(epsilon): noisy[plan.epsilons == epsilon].sum(0).tolist() for epsilon in plan.epsilons.tolist()}
        write_json(path, {"plan": plan.digest, "counts": rows})
    found = RunFolder.read_json(path)
    if found.get("plan") != plan.digest:
        raise RunError(f"{path} holds counts under another plan. Each run has a file of its own: choose another.")
    return {float(epsilon): row for epsilon, row in found["counts"].items()}


class Losses(nn.Module):
    """(model, (inputs, targets)) -> (batch,) losses; a module, so that a loss that is a module becomes its part."""

    class_weights: Tensor | None

    def __init__(self, compute: Loss, is_of_classes: bool = False, class_weights: Tensor | None = None) -> None:
        super().__init__()
        self.compute, self._is_of_classes = compute, is_of_classes
        self.register_buffer("class_weights", class_weights, persistent=False)

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = validation.check_pair(batch, "data")
        try:
            losses: Tensor = self.compute(model(inputs), targets)
            return losses if self.class_weights is None else losses * self._weights_of(targets, losses)
        except RuntimeError:
            validation.check_dtype(inputs, model)
            if self._is_of_classes and isinstance(targets, Tensor):
                validation.check_classes(targets[0])
                if targets.shape[1:] == (1,):
                    raise DataError(
                        'loss="cross_entropy" needs one class per record, got a column with rows of one value. Pass '
                        "targets[:, 0]."
                    ) from None
            raise

    def _weights_of(self, targets: Tensor, losses: Tensor) -> Tensor:
        """(batch,) the weight of each record's class. Raises DataError if a record has several classes."""
        assert self.class_weights is not None
        if targets.numel() != losses.numel():
            raise DataError(
                f"class_weights need one class per record, got targets of shape {tuple(targets.shape)}. Leave "
                "class_weights out, or weigh the losses in a function of your own."
            )
        return self.class_weights.to(losses.dtype)[targets.reshape(losses.shape).long()]


def checked_weights(class_weights: Sequence[float] | None, loss: Any) -> Tensor | None:
    """(classes,) the weights as a tensor. Raises InputError for weights that are not positive, and for other losses."""
    if class_weights is None:
        return None
    if loss not in OF_CLASSES:
        raise InputError(f"class_weights are for losses of classes, {' and '.join(OF_CLASSES)}; leave them out.")
    weights = torch.tensor([float(weight) for weight in class_weights])
    if len(weights) < 2 or not bool((torch.isfinite(weights) & (weights > 0)).all()):
        raise InputError("class_weights need one positive, finite number per class. Correct them, or leave them out.")
    return weights


def training_loss(compute: Loss, loss: Any, plan: Plan, classes: Mapping[float, Sequence[float]] | None) -> Loss:
    """The loss that is trained on: this one, or with classes the balanced loss. Raises InputError for other losses."""
    if classes is None:
        return compute
    if loss != "cross_entropy":
        raise InputError("balance is for the loss cross_entropy; leave it out, or use balanced_loss in your own loss.")
    return balanced_loss(plan, classes)


def by_name(known: Mapping[str, Any], which: Any, what: str) -> Any:
    """A function as it is, or the one with this name. Raises InputError for an unknown name."""
    return which if callable(which) else named(known, which, what, more=", or pass a function")


# -- Optimizers by name, class or function, and the settings that they are used with

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_NUMBER = (int, float, Tensor)

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}

#: The learning rate of an optimizer with a name, unless another is given.
LEARNING_RATE = 0.1


def optimizer_maker(optimizer: Any, lr: float | None, momentum: float | None) -> MakeOptimizer:
    """A function parameters -> optimizer. Raises InputError for settings that the optimizer would ignore."""
    given = {name: value for name, value in {"lr": lr, "momentum": momentum}.items() if value is not None}
    listed = " and ".join(f"{name}={value:g}" for name, value in given.items())
    if isinstance(optimizer, str):
        kind = by_name(OPTIMIZERS, optimizer, "optimizer")
        given = {"lr": LEARNING_RATE} | given
    elif isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        kind = optimizer
    elif callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        if given:
            raise InputError(
                f"Got {listed} and a function that makes the optimizer, which would ignore it. Set it in the function, "
                "e.g. lambda parameters: torch.optim.SGD(parameters, lr=0.5)."
            )
        make: MakeOptimizer = optimizer
        return make
    else:
        raise InputError(
            f"Pass 'sgd', 'adam' or 'adamw', a class such as torch.optim.SGD, or a function parameters -> optimizer, "
            "e.g. lambda parameters: torch.optim.SGD(parameters, lr=0.1); got an optimizer "
            f"({type(optimizer).__name__})."
        )
    known = inspect.signature(kind).parameters
    if not given.get("momentum", 1) and "momentum" not in known:
        del given["momentum"]  # momentum=0 asks for nothing
    ignored = [name for name in given if name not in known]
    if ignored:
        betas = "Its averages are set by betas: " if "betas" in known else "Pass what it takes: "
        raise InputError(
            f"{kind.__name__} has no {ignored[0]}, got {ignored[0]}={given[ignored[0]]:g}. {betas}"
            f"optimizer=lambda parameters: torch.optim.{kind.__name__}(parameters, …)."
        )
    return lambda parameters: kind(parameters, **given)


def optimizer_settings(optimizer: torch.optim.Optimizer) -> dict[str, float | list[float]]:
    """The optimizer's learning rate and momentum; a list if its groups of parameters differ."""
    settings: dict[str, float | list[float]] = {}
    for name in ("lr", "momentum"):
        values = [float(group[name]) for group in optimizer.param_groups if isinstance(group.get(name), _NUMBER)]
        if values:
            settings[name] = values[0] if len(set(values)) == 1 else values
    return settings
