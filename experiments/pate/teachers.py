"""Data, and teachers: softmax regressions on fixed features, each one trained on records of one privacy group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from epsilons.core.mechanism import IntArray

from ..individual_accounting.cells import features

CLASSES = 10
#: The first records of a fixed permutation are private, the others public.
SPLIT_SEED = 0
#: Factor on the features, which have norm 1.
SCALE = 8.0
#: Full-batch gradient descent of teachers and students.
STEPS, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 300, 0.2, 0.9, 1e-3
#: Teachers that are trained at the same time.
BLOCK = 50


@dataclass(frozen=True)
class Data:
    """inputs (records, features) with a last column of ones, and (records,) classes."""

    inputs: Tensor
    targets: Tensor

    def subset(self, rows: Tensor) -> Data:
        return Data(self.inputs[rows], self.targets[rows])


def splits(dataset: str, private: int) -> tuple[Data, Data, Data]:
    """Private records, public records (the rest of the training data) and test records."""
    train, test = (Data(SCALE * records.inputs, records.targets) for records in features(dataset))
    order = torch.randperm(len(train.targets), generator=torch.Generator().manual_seed(SPLIT_SEED))
    return train.subset(order[:private]), train.subset(order[private:]), test


@dataclass(frozen=True)
class Part:
    """Teachers of one group, which together have each of its records at most once.

    group  index of the privacy group    rows  (teachers, records) of the private data
    """

    group: int
    rows: Tensor


def partition(group: IntArray, teachers: int, copies: list[int], seed: int) -> list[Part]:
    """One part for each copy of each group; teachers are shared out by records, by largest remainders.

    group   (records,) privacy groups; a teacher has records of one group only
    copies  (groups,) how many teachers have a record of this group

    All teachers of a part have equally many records, so a part may leave out fewer records than it has teachers.
    """
    coins = np.random.default_rng(seed)
    owners = [p for p, count in enumerate(copies) for _ in range(count)]
    sizes = np.array([(group == p).sum() for p in owners])
    parts = []
    for p, count in zip(owners, shared_out(teachers, sizes), strict=True):
        rows = coins.permutation(np.flatnonzero(group == p))
        parts.append(Part(p, torch.from_numpy(rows[: len(rows) // count * count].reshape(count, -1))))
    return parts


def shared_out(total: int, sizes: IntArray) -> list[int]:
    """`total` in proportion to the sizes, in whole numbers of at least 1, by largest remainders.

    >>> shared_out(250, np.array([17_000, 21_500, 11_500]))
    [85, 108, 57]
    """
    wanted = total * sizes / sizes.sum()
    whole = np.maximum(np.floor(wanted), 1)
    for part in np.argsort(whole - wanted, kind="stable")[: max(0, total - int(whole.sum()))]:
        whole[part] += 1
    return [int(count) for count in whole]


def fit(inputs: Tensor, targets: Tensor) -> Tensor:
    """(models, features, classes) weights of many softmax regressions.

    inputs (models, records, features), targets (models, records)
    """
    models, records, width = inputs.shape
    weights = torch.zeros(models, width, CLASSES)
    velocity, wanted = torch.zeros_like(weights), F.one_hot(targets, CLASSES).float()
    for _ in range(STEPS):
        errors = torch.bmm(inputs, weights).softmax(2) - wanted
        gradient = torch.bmm(inputs.transpose(1, 2), errors) / records + WEIGHT_DECAY * weights
        velocity = MOMENTUM * velocity + gradient
        weights = weights - LEARNING_RATE * velocity
    return weights


def votes_of(part: Part, private: Data, public: Data) -> Tensor:
    """(teachers, public records) the class that each teacher of a part votes for."""
    found = []
    for rows in torch.split(part.rows, BLOCK):
        weights = fit(private.inputs[rows], private.targets[rows])  # (block, features, classes)
        flat = weights.permute(1, 0, 2).reshape(weights.shape[1], -1)
        found.append((public.inputs @ flat).reshape(-1, len(rows), CLASSES).argmax(2).T)
    return torch.cat(found)


def accuracy(weights: Tensor, data: Data) -> float:
    """Share of the records that one softmax regression, (features, classes), classifies correctly."""
    return float(((data.inputs @ weights).argmax(1) == data.targets).double().mean())
