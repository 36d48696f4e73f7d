"""One trial: a random model, data and settings, the sum of one draw of every record without noise, and its slow twin.

The twin: each record or person alone by autograd in 64 bits, clipped, weighted and added, and what may differ.

**Rule.** With g the gradient of one unit in 64 bits and c, w its clip norm and weight, its contribution is
w·min(1, c/‖g‖)·g, and nothing where ‖g‖ is above 2**60, or not finite in 32 bits. A sum is right if it is

    Σ (1 − s)·contribution + rounding,   −1e-6 ≤ s ≤ 0.002 for each unit,

that is: no contribution is longer than its clip norm allows, and none is shorter by more than 0.2 %. Rounding is at
most the sum over the units of

    FLOOR·‖contribution‖ + SPREAD·(the largest change of the contribution if its gradient is computed by autograd in 32
    bits, alone, from the loss times each of SCALES, or in 64 bits from inputs and parameters that were changed in their
    last of 24 bits).

The second term is what arithmetic in 32 bits explains: the error of another order of operations is of its size. Engines
differentiate a share or a multiple of a loss: where a softmax is saturated, a third of the loss has a third of the
gradient only up to rounding, which large features multiply. A unit with a gradient that is finite in 64 bits only, or
of a norm within 1 % of 2**60, may contribute or not.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
from scipy.optimize import lsq_linear
from torch import Tensor, nn

import epsilons
from epsilons.training.noisy_update import NoisyUpdate
from options import make_flat

from .families import CLASSES, Drawn, draw_model, sample

UNITS = 12  # records or persons
LEVELS = (0.4, 2.0, 30.0, 3000.0)
ENGINES = ("auto", "vmap", "loop")


@dataclass(frozen=True)
class Trial:
    """What one seed stands for.

    unit     (rows,) the record or person of each row
    clip_norm, weight  (units,)
    removed  the unit that the neighbour lacks
    """

    seed: int
    drawn: Drawn
    data: str
    inputs: Tensor
    targets: Tensor
    unit: np.ndarray
    plan: epsilons.Plan
    levels: tuple[float, ...]
    is_by_person: bool
    largest: int
    removed: int

    @property
    def clip_norm(self) -> np.ndarray:
        return self._of_units(self.plan.phases[0].clip_norm)

    @property
    def weight(self) -> np.ndarray:
        return self._of_units(self.plan.phases[0].weight)

    @property
    def neighbour(self) -> Trial:
        """Without the rows of one unit."""
        kept = self.unit != self.removed
        return replace(self, inputs=self.inputs[kept], targets=self.targets[kept], unit=self.unit[kept])

    def _of_units(self, by_group: Any) -> np.ndarray:
        order = sorted(set(self.levels))
        return np.array([float(by_group[order.index(level)]) for level in self.levels])

    def __str__(self) -> str:
        model = f"{self.drawn.takes} {self.drawn.sizes}, {' '.join(str(self.drawn.model).split())}, {self.drawn.loss}"
        who = "persons" if self.is_by_person else "records"
        norms = ", ".join(f"{norm:.3g}" for norm in sorted({*self.clip_norm.tolist()}))
        return f"{model}; {self.data}; {who}, physical batches of {self.largest}, clip norms {norms}"


# -- data --------------------------------------------------------------------------------------------------------------


def _set(rows: Sequence[int], change: Callable[[Tensor], Tensor | float]) -> Callable[[Tensor], None]:
    def apply(x: Tensor) -> None:
        for row in rows:
            x[row] = change(x[row])

    return apply


def _first(value: float) -> Callable[[Tensor], Tensor]:
    return lambda row: torch.cat([torch.tensor([value]), row.flatten()[1:]]).view(row.shape)


def _sizes(*by_row: tuple[int, float]) -> Callable[[Tensor], None]:
    def apply(x: Tensor) -> None:
        for row, size in by_row:
            x[row] *= size

    return apply


def _nearly_cancelling(x: Tensor) -> None:
    """Features that all steps share, with signs that alternate."""
    if x.ndim > 2:
        sign = torch.where(torch.arange(x.shape[1]) % 2 == 0, 1.0, -1.0).view(-1, *(1 for _ in x.shape[2:]))
        x[::2] = x[::2, :1] * sign + 1e-4 * x[::2]


def _mixed(x: Tensor) -> None:
    x[1] *= 1e30
    x[2] = _first(math.nan)(x[2])
    x[3] = 0
    x[4] = x[5]


DATA: dict[str, Callable[[Tensor], None]] = {
    "normal": lambda x: None,
    "zeros": _set(range(0, UNITS, 2), torch.zeros_like),
    "tiny": _sizes((1, 1e-20), (2, 1e-30), (3, 1e-12)),
    "subnormal": _sizes((1, 1e-39), (2, 1e-42), (3, 1e-44)),
    "big": _sizes((1, 1e6), (4, 1e12), (7, 1e18)),
    "huge": _sizes((1, 1e30), (6, 1e37)),
    "mixed magnitudes": lambda x: x.mul_(10.0 ** (torch.arange(len(x)) % 13 - 6).view(-1, *(1 for _ in x.shape[1:]))),
    "repeated rows": _set((1, 5), lambda row: torch.full_like(row, 0.7)),
    "infinite": _set((2,), _first(math.inf)),
    "not a number": _set((3,), _first(math.nan)),
    "nearly all not numbers": _set([*range(5), *range(6, UNITS)], lambda row: torch.full_like(row, math.nan)),
    "nearly cancelling": _nearly_cancelling,
    "mixed": _mixed,
}  # fmt: skip
_USUAL = ["normal"] * 4 + ["mixed magnitudes", "repeated rows", "nearly cancelling"]


@functools.cache
def _plan(levels: tuple[float, ...], clip_norm: float, unit: str) -> epsilons.Plan:
    budgets = epsilons.Budgets(levels, delta=1e-5, unit=unit)
    recipe = epsilons.Recipe(steps=1, batch_size=UNITS, clip_norm=clip_norm)
    shares = {level: levels.count(level) / UNITS for level in set(levels)}
    return epsilons.plan(
        budgets, recipe, strategy="scale", accountant="rdp", public_shares=shares, public_records=UNITS
    )


def draw_trial(seed: int) -> Trial:
    """All of it depends on the seed alone."""
    pick = Random(f"epsilons {seed}")
    torch.manual_seed(pick.getrandbits(32))
    drawn = draw_model(pick)
    is_by_person = pick.random() < 0.35
    sizes = [pick.randint(1, 4) if is_by_person else 1 for _ in range(UNITS)]
    unit = np.repeat(np.arange(UNITS), sizes)
    if pick.random() < 0.5:
        order = list(range(len(unit)))
        pick.shuffle(order)
        unit = unit[order] if is_by_person else unit  # a record is its row
    inputs, targets = sample(drawn.takes, drawn.sizes, len(unit)), torch.randint(CLASSES, (len(unit),))
    data = pick.choice([*DATA, *_USUAL])
    if not inputs.is_floating_point():
        data = pick.choice(["normal", "repeated rows"])
        inputs[1] = inputs[5] if data == "repeated rows" else inputs[1]
    else:
        DATA[data](inputs)
    levels = LEVELS * (UNITS // len(LEVELS)) if pick.random() < 0.5 else (2.0,) * UNITS
    clip_norm = pick.choice([0.02, 0.2, 1.0, 30.0])
    return Trial(
        seed=seed,
        drawn=drawn,
        data=data,
        inputs=inputs,
        targets=targets,
        unit=unit,
        plan=_plan(levels, clip_norm, "person" if is_by_person else "record"),
        levels=levels,
        is_by_person=is_by_person,
        largest=pick.choice([4 if is_by_person else 1, 5, UNITS, 64]),
        removed=pick.randrange(UNITS),
    )


# -- what the library does ---------------------------------------------------------------------------------------------


@contextmanager
def captured() -> Iterator[list[list[Tensor]]]:
    """The sums of all draws, before noise is added."""
    sums: list[list[Tensor]] = []
    original = NoisyUpdate.noisy_average

    def noted(self: NoisyUpdate, randomness: Any) -> list[Tensor]:
        sums.append([part.clone() for part in self.sum])
        return original(self, randomness)

    NoisyUpdate.noisy_average = noted  # type: ignore[method-assign]
    try:
        yield sums
    finally:
        NoisyUpdate.noisy_average = original  # type: ignore[method-assign]


def sum_of(trial: Trial, engine: Any) -> Tensor:
    """The un-noised sum of one draw of all rows, as one 64-bit vector. Raises what the run raises."""
    model = copy.deepcopy(trial.drawn.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    present = np.unique(trial.unit)
    levels = trial.levels if trial.is_by_person else [trial.levels[unit] for unit in present]
    options: dict[str, Any] = {"persons": trial.unit, "rows_per_person": 4} if trial.is_by_person else {}
    private = make_flat(
        model,
        optimizer,
        (trial.inputs, trial.targets),
        trial.plan,
        budgets=epsilons.Budgets(levels, delta=1e-5, unit="person" if trial.is_by_person else "record"),
        key=bytes(range(32)),
        performance=epsilons.Performance(engine=engine, max_physical_batch=trial.largest),
        **options,
    )
    with captured() as sums, private:
        for inputs, targets in private.batches:
            private.backward(trial.drawn.losses(model(inputs), targets))
            private.step()
    (only,) = sums
    return torch.cat([part.flatten() for part in only])


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


# -- the slow twin ----------------------------------------------------------------------------------------------------

LARGEST = 2.0**60
SHORTER, LONGER = 2e-3, 1e-6
FLOOR, SPREAD = 2.0**-20, 3.0
SCALES = (1.0, 1 / 3, 0.7)


@dataclass(frozen=True)
class Twin:
    """What a trial's sum should be.

    contributions  (units, values) in 64 bits
    rounding       (units,) by how much each may differ
    is_open        (units,) whether it may also be left out
    """

    contributions: np.ndarray
    rounding: np.ndarray
    is_open: np.ndarray

    def only(self, kept: np.ndarray) -> Twin:
        return Twin(self.contributions[kept], self.rounding[kept], self.is_open[kept])

    def distance(self, found: np.ndarray) -> float:
        """How far a sum is from a right one, in units of the rounding that is allowed: at most 1 is right."""
        unit = max(float(self.rounding.sum()), 1e-30)
        lengths = np.linalg.norm(self.contributions, axis=1) / unit
        columns = (self.contributions / unit / np.maximum(lengths, 1e-300)[:, None]).T
        bounds = -LONGER * lengths - 1e-300, np.where(self.is_open, 1.0, SHORTER) * lengths + 1e-300
        missing = (self.contributions.sum(0) - found) / unit
        nearest = float(np.linalg.norm(missing))
        for method in ("bvls", "trf"):  # one may stop early, and any point in the bounds will do
            if nearest > 1 and lengths.any():
                short = lsq_linear(columns, missing, bounds, method=method, tol=1e-14).x
                nearest = min(nearest, float(np.linalg.norm(missing - columns @ short)))
        return nearest


def twin_of(trial: Trial) -> Twin:
    """Raises what the model itself raises."""
    exact, nearby = (copy.deepcopy(trial.drawn.model).double() for _ in range(2))
    _change(nearby)
    in_32_bits = copy.deepcopy(trial.drawn.model)
    x = trial.inputs.double() if trial.inputs.is_floating_point() else trial.inputs
    contributions, rounding, is_open = [], [], []
    for unit in range(len(trial.clip_norm)):
        rows = np.flatnonzero(trial.unit == unit)
        bound = float(trial.clip_norm[unit]), float(trial.weight[unit])
        gradient = _gradient(exact, trial, x, rows)
        others = [_gradient(in_32_bits, trial, trial.inputs, rows, scale) for scale in SCALES]
        others.append(_gradient(nearby, trial, _changed(x), rows))
        right = clipped(gradient, *bound)
        apart = max(float((clipped(other, *bound) - right).norm()) for other in others)
        norm, is_finite = float(gradient.norm()), bool(torch.isfinite(others[0]).all())
        is_open.append(bool(right.any()) and (not is_finite or abs(norm / LARGEST - 1) < 0.01))
        apart = 0.0 if is_open[-1] and not is_finite else apart
        rounding.append(FLOOR * float(right.norm()) + SPREAD * apart)
        contributions.append(right.numpy())
    return Twin(np.stack(contributions), np.array(rounding), np.array(is_open))


def clipped(gradient: Tensor, clip_norm: float, weight: float) -> Tensor:
    norm = float(gradient.norm())
    if not norm <= LARGEST:  # NaN is not
        return torch.zeros_like(gradient)
    return weight * min(1.0, clip_norm / max(norm, 1e-300)) * gradient


def _gradient(model: nn.Module, trial: Trial, inputs: Tensor, rows: np.ndarray, scale: float = 1.0) -> Tensor:
    """Of the mean of these rows' losses, each row computed alone: one vector in 64 bits.

    scale   what the loss is multiplied by before it is differentiated, and the gradient divided by
    """
    parameters = trained(model)
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for row in rows:
        for p in parameters:
            p.grad = None
        losses = trial.drawn.losses(model(inputs[row : row + 1].clone()), trial.targets[row : row + 1])
        (losses[0] * scale).backward()  # not autograd.grad, which reentrant checkpoints do not support
        total += torch.cat([_dense(p).double().flatten() for p in parameters])
    return total / len(rows) / scale


def _dense(p: nn.Parameter) -> Tensor:
    if p.grad is None:
        return torch.zeros_like(p)
    return p.grad.to_dense() if p.grad.is_sparse else p.grad


def _change(model: nn.Module) -> None:
    """All parameters changed in their last of 24 bits."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(_changed(p))


def _changed(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    generator = torch.Generator().manual_seed(0)
    return x * (1 + 2.0**-24 * (2.0 * torch.randint(2, x.shape, generator=generator) - 1))
