"""Data for which sums and norms in 32 bits go wrong, and layers to send them through.

Partial sums are near a power of two, on one side of it with the first record and on the other without, while thousands
of small values follow that only one side rounds away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from functional import Model

#: What epsilons shrinks factors by, so that data made for 32-bit sums meet the very numbers they were made for.
SHRINK = 1 - 2.0**-20
ONE = 1 - 2.0**-12  # contributions just below the clip norm


def near_a_power(records: int, kind: str, seed: int = 0) -> Tensor:
    """(records,) contributions to one coordinate, each at most 1 in size; the first is the record to leave out.

    steady       all of one sign: sums of 32 bits end far from the true one
    there, back  the second half takes back what the first half added, so that the sum itself is small
    alternating  signs alternate, with partial sums near a power of two throughout
    huge, tiny   a few large ones among many below half of the last bit
    """
    make = np.random.default_rng(seed)
    if kind == "huge, tiny":
        values = np.where(np.arange(records) % 64 == 1, ONE, make.uniform(0.3, 0.7) * records * 2.0**-31)
        values[0] = ONE
        return torch.tensor(values, dtype=torch.float32)
    share = 2 if kind == "steady" else 4
    power = 2.0 ** math.floor(math.log2(records / share))
    up = int((power - 0.5) / ONE)
    fill = power - 0.5 - up * ONE
    last_bit = power * 2.0**-23
    back = 0 if kind == "steady" else up
    rest = records - 2 - up - back
    small = np.tile([0.6 * last_bit, -0.4 * last_bit], rest // 2 + 1)[:rest]
    if kind == "alternating":
        small[0::2] += 2.0**-6
        small[1::2] -= 2.0**-6
    return torch.tensor(np.concatenate([[ONE], np.full(up, ONE), [fill], small, np.full(back, -ONE)]) / SHRINK).float()


KINDS = ("steady", "there, back", "alternating", "huge, tiny")


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def scaled() -> nn.Module:
    """A scale and a shift: broadcast over records."""
    parts = {"scale": nn.Parameter(torch.randn(5)), "shift": nn.Parameter(torch.randn(1, 5))}
    return Model(lambda m, x: x * m.scale + m.shift, **parts)


def derived() -> nn.Module:
    """A weight computed from parameters."""
    parts = {"a": nn.Parameter(torch.randn(4, 2)), "b": nn.Parameter(torch.randn(2, 5))}
    return Model(lambda m, x: x @ (m.a @ m.b).T, **parts)


def untaught() -> nn.Module:
    """A parameter in an operator that is differentiated one record at a time."""
    return Model(lambda m, x: torch.atan2(x[:, None], m.weight), weight=nn.Parameter(torch.rand(3, 5) + 0.5))


def averaged(is_weighted: bool) -> nn.Module:
    """The mean of a text's embeddings, or a sum with weights that are no whole numbers."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        rows = model.table(x)
        return (
            (rows * torch.tensor([[0.3], [-1.7], [0.0], [2e-3], [11.0]]).to(rows)).sum(1)
            if is_weighted
            else rows.mean(1)
        )

    return Model(compute, table=nn.Embedding(7, 4))


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def tokens(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(7, shape)


#: module, and one record's input; what they exercise: how the engine `ghost` forms norm and sum
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(5, 4), normal(5)),
    "linear without bias": (lambda: nn.Linear(5, 4, bias=False), normal(5)),
    "linear over a few steps, written": (lambda: nn.Linear(3, 2), normal(6, 3)),
    "linear over a few steps, by Gram matrices": (lambda: nn.Linear(40, 30), normal(6, 40)),
    "linear over many steps, by Gram matrices": (lambda: nn.Linear(64, 64), normal(20, 64)),
    "convolution, windows": (lambda: nn.Conv2d(2, 3, 3), normal(2, 5, 5)),
    "convolution, grouped": (lambda: nn.Conv2d(6, 4, 3, padding=1, groups=2), normal(6, 9, 9)),
    "embedding": (lambda: nn.Embedding(7, 4), tokens(5)),
    "mean of an embedding": (lambda: averaged(False), tokens(5)),
    "weighted embedding": (lambda: averaged(True), tokens(5)),
    "bag": (lambda: nn.EmbeddingBag(7, 4), tokens(5)),
    "layer norm": (lambda: nn.LayerNorm(6), normal(3, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), normal(4, 5)),
    "lstm": (lambda: Recurrent(5, 6, batch_first=True), normal(4, 5)),
    "used twice": (lambda: Twice(5, 5), normal(5)),
    "scale and shift": (scaled, normal(5)),
    "derived weight": (derived, normal(5)),
    "one record at a time": (untaught, normal(5)),
}


@dataclass(frozen=True)
class Attack:
    """Records of one input, with losses of made-up sizes: their gradients are those sizes times one direction.

    direction  the gradient of a record of size 1
    bound      so that the sizes are clipped where they exceed 1 in the direction's largest coordinate
    """

    model: nn.Module
    x: Tensor
    sizes: Tensor
    heads: Tensor
    bound: float

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def losses(self, rows: Tensor) -> Tensor:
        """(rows,) losses of these records."""
        outputs = self.model(self.x.expand(len(rows), *self.x.shape[1:]).contiguous())
        return (outputs * self.heads).flatten(1).sum(1) * self.sizes[rows]


def attack(layer: str, sizes: Tensor, dtype: torch.dtype = torch.float32, seed: int = 0) -> Attack:
    make, input_of_one = LAYERS[layer]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, x = make(), input_of_one()[None]
        heads = torch.randn_like(model(x))
    model = model.to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    one = Attack(model, x, torch.ones(1, dtype=dtype), heads.to(dtype), 1.0)
    gradient = torch.autograd.grad(one.losses(torch.zeros(1, dtype=torch.long))[0], one.parameters)
    direction = torch.cat([g.double().flatten() for g in gradient])
    largest = float(direction.abs().max())
    own = (sizes.double() / largest).to(dtype)
    return Attack(model, x, own, heads.to(dtype), float(direction.norm()) / largest)
