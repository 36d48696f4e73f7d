"""Banded noise with cyclic Poisson draws under Scale's clip norms: few epochs, correlated noise.

The noise of step t is row t of C⁻¹ Z, where C is lower triangular and Toeplitz, with b bands and columns of norm 1 at
most, and Z is independent noise. Errors of successive steps then partly cancel. Records are divided at random, whatever
they contain, into b blocks. Block k takes part only in the steps t with t mod b = k, and is sampled there at rate b·q.

Choquette-Choo et al., "(Amplified) Banded Matrix Factorization", arXiv 2306.08153, Algorithm 2 and Theorem 4: this has
any guarantee of ⌈T/b⌉ steps of a Gaussian sampled at rate b·q. It holds with an own clip norm c_p for each group, too:

    Updates are a function of C·G + Z, where row t of G is the sum of the clipped gradients of step t. A record that
    takes part in step t adds column t of C times its gradient, and that is zero outside of the rows t … t+b-1. Its
    next step is t+b or later, so its parts are in disjoint rows. What other records add to these rows is a function
    of earlier rows and of their own draws. Given the rows before t, the rows of one part are a Gaussian of standard
    deviation noise_std, and with probability b·q the record moves its mean by at most c_p, by a vector that is fixed
    by then. This is one sampled Gaussian with noise multiplier noise_std / c_p, and the parts compose.

So the plan of Scale at rate b·q and ⌈T/b⌉ steps has the clip norms and the noise. The error of a mechanism is the root
mean square, over steps, of the noise that the weights have at that step (learning rate 1):
noise_std · ‖A C⁻¹‖ / √T, where A adds up the updates of SGD with momentum.

    python -m experiments banded      trains, and writes results/banded.json
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.signal import lfilter
from torch import Tensor
from torch.nn import functional as F

import epsilons
from epsilons import Budgets, Recipe
from epsilons.accounting import noise_for, pld
from epsilons.core.mechanism import FloatArray
from epsilons.training.features import FEATURES

from .results import RESULTS
from .texts import TEXT_SETS

FILE = RESULTS / "banded.json"
#: Numbers of bands. A plan uses the one with the least error, which depends on no record.
BANDS = (2, 4, 8, 16, 32, 64)
DELTA, EPOCHS, CLIP_NORM = 1e-5, 4, 0.1

#: The budgets: shares of records by epsilon.
TIERS: dict[str, dict[float, float]] = {"1 / 2 / 3": {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, "8": {8.0: 1.0}}
RECORDS = {"mnist": 60_000, "cifar10": 50_000, "imdb": 25_000}

#: The trials of a method: every expected batch and momentum with every travel. The travel lr · clip_norm · steps /
#: (1 - momentum) is how far a run can move the weights, so that its values mean the same in all trials.
BATCHES, MOMENTA = (128, 512, 2048, 8192), (0.0, 0.9)
TRAVELS = {
    data: tuple(least * 2.0**i for i in range(9))
    for data, least in (("mnist", 62.5), ("cifar10", 62.5), ("imdb", 250.0))
}
#: The part of the training data that scores trials, and the seeds of a trial. The best few trials get more seeds.
VALIDATION, TRIAL_SEEDS, FINALISTS, FINAL_SEEDS = 0.2, (100, 101), 4, (102, 103, 104, 105, 106)
#: The seeds of the chosen trial.
SEEDS = (0, 1, 2, 3, 4)

#: Rows of the table of errors: epochs and epsilon, with one budget for all.
ERRORS = tuple(itertools.product((1, 4, 16), (1.0, 2.0, 3.0, 8.0)))


# -- the noise -------------------------------------------------------------------------------------------------------


def correlated(normals: Iterable[Tensor], bands: Sequence[float]) -> Iterator[Tensor]:
    """The rows of C⁻¹ Z, one after another, from the rows of Z. `bands` is the first column of C, without its zeros."""
    rows: deque[Tensor] = deque(maxlen=len(bands) - 1)
    for normal in normals:
        row = normal.clone()
        for band, earlier in zip(bands[1:], rows, strict=False):
            row -= band * earlier
        row /= bands[0]
        rows.appendleft(row)
        yield row


def error(bands: Sequence[float], steps: int, momentum: float) -> float:
    """‖A C⁻¹‖ / √T of a C with these bands, divided by their norm.

    Both matrices are Toeplitz, so the product is, and its first column is C⁻¹ times that of A.
    """
    return math.exp(_log_error(np.asarray(bands, dtype=np.float64), steps, momentum)[0])


def _log_error(bands: FloatArray, steps: int, momentum: float) -> tuple[float, FloatArray]:
    """The logarithm of `error`, and its gradient by the bands."""
    moved = np.cumsum(momentum ** np.arange(steps))  # how far an update has moved the weights k steps later
    column = lfilter([1.0], bands, moved)
    often = np.arange(steps, 0, -1) / steps
    if not np.abs(column).max() < 1e100:  # the inverse of such bands grows without limit
        return 1e3, np.zeros(len(bands))
    square = float(often @ column**2)
    back = lfilter([1.0], bands, (often * column)[::-1])[::-1]
    slope = np.array([back[j:] @ column[: steps - j] for j in range(len(bands))])
    norm = float(bands @ bands)
    return math.log(square * norm) / 2, bands / norm - slope / square


@cache
def best_bands(count: int, steps: int, momentum: float) -> tuple[float, ...]:
    """The bands of norm 1 with the least error, found from (1 - x)^(-1/2) onwards."""
    start = np.cumprod([1.0, *((2 * j - 1) / (2 * j) for j in range(1, count))])
    found = minimize(_log_error, start, (steps, momentum), jac=True, method="L-BFGS-B").x
    return tuple((found / np.linalg.norm(found)).tolist())


# -- the mechanisms --------------------------------------------------------------------------------------------------


class Mechanism(NamedTuple):
    """Draws and noise of a run.

    bands        of C; one band is independent noise and plain Poisson draws
    sample_rate  chance that a record is drawn in a step of its block
    noise_std    of Z, in gradient units
    clip_norm    (groups,) bounds on the norm of a record's gradient
    error        of the weights at learning rate 1, in gradient units
    """

    steps: int
    bands: tuple[float, ...]
    sample_rate: float
    noise_std: float
    clip_norm: tuple[float, ...]
    error: float


@cache
def mechanism(data: str, tiers: str, batch: int, momentum: float, count: int) -> Mechanism | None:
    """Scale with so many bands, by its certified plan; None if a block has fewer records than a batch."""
    records = RECORDS[data]
    steps = round(EPOCHS * records / batch)
    if batch * count > records or count > steps:
        return None
    budgets = Budgets.from_shares(TIERS[tiers], records=records, delta=DELTA)
    recipe = Recipe(steps=math.ceil(steps / count), batch_size=batch * count, clip_norm=CLIP_NORM)
    (phase,) = epsilons.plan(budgets, recipe, "scale", "pld").phases
    bands = best_bands(count, steps, momentum)
    size = phase.noise_std * error(bands, steps, momentum)
    return Mechanism(steps, bands, float(phase.sample_rate[0]), phase.noise_std, tuple(phase.clip_norm), size)


def methods(data: str, tiers: str, batch: int, momentum: float) -> dict[str, Mechanism]:
    """Scale with independent noise, and with the bands of the least error."""
    every = [mechanism(data, tiers, batch, momentum, count) for count in BANDS]
    plain = mechanism(data, tiers, batch, momentum, 1)
    assert plain is not None
    return {"independent": plain, "banded": min((one for one in every if one), key=lambda one: one.error)}


def ratios(records: int, batch: int, epochs: int, epsilon: float) -> dict[int, float]:
    """Bands -> error over that of independent noise, where everyone has this epsilon; without momentum."""
    steps = round(epochs * records / batch)
    errors = {}
    for count in (1, *BANDS):
        if batch * count <= records and count <= steps:
            noise = noise_for(epsilon, batch * count / records, math.ceil(steps / count), DELTA, pld.epsilon)
            errors[count] = noise * error(best_bands(count, steps, 0.0), steps, 0.0)
    return {count: found / errors[1] for count, found in errors.items()}


# -- training --------------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """inputs (records, features), the last feature is constant; targets (records,)."""

    inputs: Tensor
    targets: Tensor

    def at(self, rows: Tensor) -> Data:
        return Data(self.inputs[rows], self.targets[rows])


def drawn(records: int, blocks: int, rate: float, steps: int, coins: torch.Generator) -> Iterator[Tensor]:
    """The drawn records of each step: of block t mod `blocks`, each at this rate. Blocks are random, of equal size."""
    members = torch.randperm(records, generator=coins).tensor_split(blocks)
    for step in range(steps):
        there = members[step % blocks]
        yield there[torch.rand(len(there), generator=coins) < rate]


def clipped_sums(weights: Tensor, data: Data, clip_norm: Tensor) -> Tensor:
    """(models, classes, features) the sums of the clipped gradients of the cross entropy of linear models.

    weights    (models, classes, features)
    clip_norm  (records,)

    A record's gradient is the outer product of its error and its inputs, so its norm is the product of theirs.
    """
    (models, classes, features), (x, y) = weights.shape, data
    wrong = (x @ weights.reshape(-1, features).T).reshape(len(x), models, classes).softmax(2)
    wrong[torch.arange(len(x)), :, y] -= 1
    norms = wrong.norm(dim=2) * x.norm(dim=1)[:, None]
    wrong *= (clip_norm[:, None] / norms.clamp(min=1e-12)).clamp(max=1.0)[:, :, None]
    return (wrong.reshape(len(x), -1).T @ x).reshape(weights.shape)


def train(data: Data, groups: Tensor, how: Mechanism, lr: Tensor, momentum: float, seed: int, classes: int) -> Tensor:
    """(models, classes, features) models that differ in their learning rate, with the same draws and Z.

    groups  (records,) index of each record's budget
    lr      (models,)
    """
    coins = torch.Generator().manual_seed(seed)
    clip_norm = torch.tensor(how.clip_norm)[groups]
    weights = torch.zeros(len(lr), classes, data.inputs.shape[1])
    velocity = torch.zeros_like(weights)
    blocks = len(how.bands)
    batch = how.sample_rate * len(groups) / blocks
    draws = drawn(len(groups), blocks, how.sample_rate, how.steps, coins)
    normals = (how.noise_std * torch.randn(weights.shape[1:], generator=coins) for _ in range(how.steps))
    for rows, noise in zip(draws, correlated(normals, how.bands), strict=True):
        total = clipped_sums(weights, data.at(rows), clip_norm[rows]) + noise
        velocity = momentum * velocity + total / batch
        weights -= lr[:, None, None] * velocity
    return weights


def accuracies(weights: Tensor, data: Data) -> list[float]:
    """% of the records that each model classifies right."""
    right = (data.inputs @ weights.transpose(1, 2)).argmax(2) == data.targets
    found: list[float] = (100 * right.double().mean(1)).tolist()
    return found


def run(
    train_on: Data, test_on: Data, tiers: str, how: Mechanism, momentum: float, travels: Sequence[float], seed: int
) -> list[float]:
    """The accuracies of models that differ in their travel, with budgets at random."""
    budgets = Budgets.from_shares(TIERS[tiers], records=len(train_on.targets), delta=DELTA, seed=seed)
    lr = torch.tensor(travels) * (1 - momentum) / (CLIP_NORM * how.steps)
    classes = int(train_on.targets.max()) + 1
    models = train(train_on, torch.tensor(budgets.group), how, lr, momentum, seed, classes)
    return accuracies(models, test_on)


# -- data ------------------------------------------------------------------------------------------------------------


def features(data: str, split: str) -> Data:
    """Scattering coefficients of pictures, averaged over squares; hashed n-grams of texts. Public constants only.

    The last feature is constant, and a tenth or less of a record's norm.
    """
    if data in TEXT_SETS:
        texts, targets = TEXT_SETS[data](split)
        found, constant = FEATURES["hashed-text"](texts, buckets=2048), 0.1
    else:
        images = epsilons.data.load(data, split, pixels=True)
        channels, side = 81 * images.inputs.shape[1], 3 if data == "mnist" else 2
        parts, targets, constant = [], images.targets, 1.0
        for start in range(0, len(targets), 500):
            there = FEATURES["scattering"](torch.from_numpy(images.inputs[start : start + 500]))
            width = math.isqrt(there.shape[1] // channels)
            parts.append(F.adaptive_avg_pool2d(there.reshape(-1, channels, width, width), side).flatten(1))
        found = torch.cat(parts)
    return Data(F.pad(found.float(), (0, 1), value=constant), torch.from_numpy(np.asarray(targets)).long())


# -- the experiment --------------------------------------------------------------------------------------------------


Point = dict[str, Any]


def compared(data: str, tiers: str, known: Data, test: Data) -> Point:
    """Each method's trials, and the test accuracies of the best; only this one reads the test data."""
    order = torch.randperm(len(known.targets), generator=torch.Generator().manual_seed(0))
    held = round(VALIDATION * len(order))
    validation, fitted = known.at(order[:held]), known.at(order[held:])
    trials: dict[str, list[Point]] = {"independent": [], "banded": []}
    for batch, momentum in itertools.product(BATCHES, MOMENTA):
        for method, how in methods(data, tiers, batch, momentum).items():
            travels = TRAVELS[data]
            scores = np.mean([run(fitted, validation, tiers, how, momentum, travels, s) for s in TRIAL_SEEDS], axis=0)
            for travel, score in zip(travels, scores.tolist(), strict=True):
                point = {"batch": batch, "momentum": momentum, "travel": travel, "bands": len(how.bands)}
                trials[method].append(point | {"error": how.error, "validation": score})

    def repeated(method: str, point: Point, train_on: Data, test_on: Data, seeds: Sequence[int]) -> list[float]:
        how = methods(data, tiers, point["batch"], point["momentum"])[method]
        travels = [point["travel"]]
        return [run(train_on, test_on, tiers, how, point["momentum"], travels, seed)[0] for seed in seeds]

    chosen = {}
    for method, points in trials.items():
        finalists = sorted(points, key=lambda point: -point["validation"])[:FINALISTS]
        for point in finalists:
            point["final"] = float(np.mean(repeated(method, point, fitted, validation, FINAL_SEEDS)))
        best = max(finalists, key=lambda point: point["final"])
        steps = methods(data, tiers, best["batch"], best["momentum"])[method].steps
        lr = best["travel"] * (1 - best["momentum"]) / (CLIP_NORM * steps)
        chosen[method] = best | {"lr": lr, "steps": steps, "test": repeated(method, best, known, test, SEEDS)}
    return {"data": data, "tiers": tiers, "torch": torch.__version__, "chosen": chosen, "trials": trials}


def experiment(file: Path = FILE, sets: Sequence[str] = tuple(RECORDS)) -> None:
    """Compute and train what is missing in the file, and write it after every part."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"errors": [], "runs": []}

    def keep(part: str, row: Mapping[str, Any]) -> None:
        found[part].append(row)
        parts = [f'"{name}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for name, rows in found.items()]
        file.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")

    for data, batch, (epochs, epsilon) in itertools.product(sets, BATCHES, ERRORS):
        row = {"data": data, "batch": batch, "epochs": epochs, "epsilon": epsilon}
        if not any(row.items() <= one.items() for one in found["errors"]):
            keep("errors", row | {"ratios": ratios(RECORDS[data], batch, epochs, epsilon)})
    for data in sets:
        missing = [t for t in TIERS if not any((one["data"], one["tiers"]) == (data, t) for one in found["runs"])]
        splits = [features(data, split) for split in ("train", "test") if missing]
        for tiers in missing:
            start = time.perf_counter()
            keep("runs", compared(data, tiers, *splits) | {"wall_seconds": round(time.perf_counter() - start)})
