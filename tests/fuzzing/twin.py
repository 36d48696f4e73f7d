"""The slow twin: each record or person alone by autograd in 64 bits, clipped, weighted and added, and what may differ.

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
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import lsq_linear
from torch import Tensor, nn

from .trials import Trial, trained

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
