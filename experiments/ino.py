"""Tiers that are tied to content: Scale beside the exact weights of INO-SGD, on handwritten digits.

    python -m experiments.ino [SEEDS]

INO-SGD (arXiv 2605.07930) sorts the records of a batch by loss, and gives those of high loss more weight: with f rising
from 0 to 1, F its integral, and s the sum of the clip norms of the records before it, a record of clip norm c has the
weight (F(s + c) − F(s)) / c ≤ 1. The guarantee is that of Scale. Let a record be taken out: its own contribution is at
most F(s + c) − F(s). Each record after it moves by c towards the beginning, and its weight falls, because F is convex.
These changes are at most F(S) − F(s + c) − (F(S − c) − F(s)) in sum, where S is the sum of all clip norms. Both
together are F(S) − F(S − c) ≤ c. tests/test_ino.py compares this with brute force.

Two kinds of strict people: 30 % whose pictures are rotated by a quarter, and the smaller of two styles of each digit.
Logistic regression on 512 fixed random features. Every way has the settings that are best on a fifth of the training
pictures, by the mean of the accuracies on both kinds of people; all are printed. 10 minutes on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

import epsilons

STEPS, RATE, CLIP_NORM, FEATURES, CLASSES = 100, 256 / 1437, 2.0, 512, 10
STRICT, OTHERS = 1.0, 3.0
RATES, RISES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0), (0.1, 0.25, 0.5, 1.0)

Weights = Callable[[Tensor, Tensor], Tensor]
People = tuple[Tensor, Tensor, Tensor]  # features, classes, who is strict


def exact_weights(rise: float) -> Weights:
    """The weights (records,) of losses and clip norms (records,): f rises to 1 at the sum `rise` of clip norms."""

    def integral(at: Tensor) -> Tensor:
        return torch.where(at < rise, at**2 / (2 * rise), at - rise / 2)

    def weights(losses: Tensor, clip_norms: Tensor) -> Tensor:
        order = torch.argsort(losses, stable=True)
        clips = clip_norms[order].double()
        ends = clips.cumsum(0)
        found = torch.empty_like(clips)
        found[order] = (integral(ends) - integral(ends - clips)) / clips
        return found

    return weights


def all_ones(losses: Tensor, clip_norms: Tensor) -> Tensor:
    """Scale: every record has the weight 1."""
    return torch.ones(len(losses), dtype=torch.float64)


@dataclass(frozen=True)
class Way:
    """One way to train.

    lr          learning rate
    epsilon     of the people who are not strict
    rise        of INO-SGD's weights, as a part of the expected batch; None for weights of 1
    quieter     factor on the clip norms of those who are not strict, at most 1
    louder      factor on the losses of the strict, before clipping
    """

    lr: float
    epsilon: float = OTHERS
    rise: float | None = None
    quieter: float = 1.0
    louder: float = 1.0


WAYS = {
    "Scale": [Way(lr) for lr in RATES],
    "exact INO-SGD": [Way(lr, rise=rise) for lr, rise in product(RATES, RISES)],
    "half the clip norm for others": [Way(lr, quieter=0.5) for lr in RATES],
    "fourfold losses of the strict": [Way(lr, louder=4.0) for lr in RATES],
    "all at 1": [Way(lr, epsilon=STRICT) for lr in RATES],
}


def trained(people: People, way: Way, seed: int) -> Tensor:
    """(features + 1, classes) weights of a model."""
    inputs, targets, strict = people
    budgets = epsilons.Budgets(np.where(strict, STRICT, way.epsilon).tolist(), delta=1e-5)
    batch = RATE * len(targets)
    plan = epsilons.plan(budgets, epsilons.Recipe(STEPS, batch, CLIP_NORM), "scale")
    clip_norms = torch.from_numpy(plan.clip_norm[budgets.group]) * torch.where(strict, 1.0, way.quieter)
    loudness = torch.where(strict, way.louder, 1.0)[:, None]
    weigh = all_ones if way.rise is None else exact_weights(way.rise * batch * CLIP_NORM)
    draw, model = torch.Generator().manual_seed(seed), torch.zeros(inputs.shape[1], CLASSES)
    for _ in range(STEPS):
        drawn = (torch.rand(len(targets), generator=draw) < RATE).nonzero().squeeze(1)
        x, y, clip = inputs[drawn], targets[drawn], clip_norms[drawn]
        chances = (x @ model).softmax(1)
        errors = loudness[drawn] * (chances - one_hot(y, CLASSES))  # a gradient is the outer product of x and this
        norms = (errors.norm(dim=1) * x.norm(dim=1)).double()
        factor = weigh(-chances.gather(1, y[:, None])[:, 0].log(), clip) * (clip / norms).clamp(max=1)
        noise = plan.noise_std * torch.randn(model.shape, generator=draw)
        model = model - way.lr * (x.T @ (factor.float()[:, None] * errors) + noise) / batch
    return model


def accuracies(model: Tensor, people: People) -> tuple[float, float]:
    """(strict, others) in percent."""
    inputs, targets, strict = people
    right = 100 * ((inputs @ model).argmax(1) == targets).double()
    return float(right[strict].mean()), float(right[~strict].mean())


# -- who is strict -----------------------------------------------------------------------------------------------------


def digits(split: str) -> tuple[Tensor, Tensor]:
    found = epsilons.data.load("digits", split)
    return torch.as_tensor(np.asarray(found.inputs)).float(), torch.as_tensor(np.asarray(found.targets)).long()


def features(pictures: Tensor) -> Tensor:
    """(records, 513) random features that depend on no data, and a 1."""
    draw = torch.Generator().manual_seed(0)
    matrix, offset = torch.randn(64, FEATURES, generator=draw) * 3 / 8, torch.randn(FEATURES, generator=draw)
    return torch.cat([torch.relu(pictures @ matrix + offset) / 8, torch.ones(len(pictures), 1)], dim=1)


def rotated() -> tuple[People, People]:
    """Training people, and test people of whom every second is rotated."""
    found = []
    for split, part in (("train", 0.3), ("test", 0.5)):
        x, y = digits(split)
        strict = torch.from_numpy(np.random.default_rng(0).random(len(y)) < part)
        turned = torch.rot90(x.reshape(-1, 8, 8), 1, (1, 2)).reshape(-1, 64)
        found.append((features(torch.where(strict[:, None], turned, x)), y, strict))
    return found[0], found[1]


def styles() -> tuple[People, People]:
    """Of each digit two clusters of the training pictures; people of the smaller one are strict."""
    (x, y), (test_x, test_y) = digits("train"), digits("test")
    strict, test_strict = torch.zeros(len(y), dtype=torch.bool), torch.zeros(len(test_y), dtype=torch.bool)
    for digit in range(CLASSES):
        own = x[y == digit]
        centers = own[torch.tensor([0, int((own - own[0]).norm(dim=1).argmax())])]
        for _ in range(50):
            nearest = torch.cdist(own, centers).argmin(1)
            centers = torch.stack([own[nearest == k].mean(0) for k in (0, 1)])
        small = int(torch.bincount(nearest, minlength=2).argmin())
        strict[y == digit] = nearest == small
        test_strict[test_y == digit] = torch.cdist(test_x[test_y == digit], centers).argmin(1) == small
    return (features(x), y, strict), (features(test_x), test_y, test_strict)


# -- comparison --------------------------------------------------------------------------------------------------------


def score(train: People, held: People, way: Way) -> float:
    """The mean of both accuracies over three seeds, which no later run uses."""
    return float(np.mean([accuracies(trained(train, way, 100 + seed), held) for seed in range(3)]))


def main(seeds: int) -> None:
    for name, (train, test) in {"rotated": rotated(), "styles": styles()}.items():
        held = torch.arange(len(train[1])) % 5 == 0
        inputs, targets, tied = train
        fitted, validation = (inputs[~held], targets[~held], tied[~held]), (inputs[held], targets[held], tied[held])
        print(f"{name}: {tied.double().mean():.0%} strict", flush=True)
        for label, ways in WAYS.items():
            best = ways[int(np.argmax([score(fitted, validation, way) for way in ways]))]
            for way in ways:
                every = np.array([accuracies(trained(train, way, seed), test) for seed in range(seeds)])
                mean, spread = every.mean(0), every.std(0, ddof=1)
                setting = f"{way.lr:g}" + (f", f is 1 from {way.rise:g} of the batch on" if way.rise else "")
                print(
                    f"  {label}, learning rate {setting}: strict {mean[0]:.1f} ± {spread[0]:.1f}, others "
                    f"{mean[1]:.1f} ± {spread[1]:.1f}{', CHOSEN' if way == best else ''}",
                    flush=True,
                )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
