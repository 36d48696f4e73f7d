"""Randomly built losses and models: some mix records, some do not. What refuses the first must accept the second.

    python -m tests.mixers [--cases 200] [--start 0] [--show]

trains a few steps of each and prints how many were refused. A case is a function of its number alone, so a failure is
repeated by its number. Mixing cases draw a statistic over the records of a physical batch, where it is computed (input,
hidden layer, losses, collate function), how it acts (added, multiplied, as a gate, on the gradient only), on whom (all
records or few), under which mode (with a graph, detached, under no_grad), with or without dropout, with or without an
outlier. Sound cases draw a model, a loss and what surrounds them: masks, packed sequences, augmentation, loops.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import epsilons
from epsilons.doors.foreign_loop import ForeignLoop
from epsilons.errors import EpsilonsError
from options import make_flat

RECORDS, FEATURES, CLASSES, WORDS = 60, 6, 3, 40
STEPS = 3

Losses = Callable[[nn.Module, Any], Tensor]


@dataclass
class Case:
    """One generated training.

    what     its description, for messages
    losses   (model, batch) -> (batch,)
    collate  None for a data set of tensors
    """

    what: str
    model: nn.Module
    data: Any
    losses: Losses
    collate: Callable[[list[Any]], Any] | None = None
    batch: float = 24.0
    max_physical_batch: int | str = "auto"


def refusal(case: Case, steps: int = STEPS, seed: int = 0, is_foreign: bool = False) -> str:
    """Train; the message of the error if the training is refused, else "". is_foreign: in a loop over mean losses"""
    budgets = epsilons.Budgets([1.0, 2.0] * (RECORDS // 2), delta=1e-5)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=steps, batch_size=case.batch, clip_norm=1.0), accountant="rdp")
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    try:
        settings = {"performance": epsilons.Performance(max_physical_batch=case.max_physical_batch), "seed": seed}
        with make_flat(
            case.model, optimizer, case.data, plan, budgets=budgets, collate_fn=case.collate, **settings
        ) as private:
            if is_foreign:
                loop = ForeignLoop(private)
                for batch in loop.batches:
                    case.losses(case.model, batch).mean().backward()
                    loop.step()
                return ""
            for batch in private.batches:
                private.backward(case.losses(case.model, batch))
                private.step()
    except EpsilonsError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- data -------------------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[Any]):
    """Columns as a map-style data set, with augmentation of the first if asked for."""

    def __init__(self, columns: Sequence[Sequence[Any] | Tensor], noise: float = 0.0) -> None:
        self.columns, self.noise = columns, noise

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        first, *rest = (column[index] for column in self.columns)
        return (first + self.noise * torch.randn_like(first), *rest) if self.noise else (first, *rest)


def texts(generator: torch.Generator, longest: int, share: float) -> Rows:
    """Records of different lengths: (words, class)."""
    lengths = torch.randint(2, longest, (RECORDS,), generator=generator)
    lengths[torch.rand(RECORDS, generator=generator) < share] = longest
    words = torch.randint(1, WORDS, (RECORDS, longest), generator=generator)
    classes = torch.randint(CLASSES, (RECORDS,), generator=generator)
    return Rows(([words[i, : int(n)] for i, n in enumerate(lengths)], classes))


def table(choose: random.Random, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(features, classes, users); sometimes one record is far from all others."""
    x = torch.randn(RECORDS, FEATURES, generator=generator)
    if choose.random() < 0.3:
        x[choose.randrange(RECORDS)] *= choose.choice([1e2, 1e4])
    y = torch.randint(CLASSES, (RECORDS,), generator=generator)
    users = torch.randint(choose.choice([3, 8, 15]), (RECORDS,), generator=generator)
    return x, y, users


# -- cases that mix ---------------------------------------------------------------------------------------------------

#: (rows, features) -> something that broadcasts against the rows and depends on more than one of them
STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda z: z.mean(0),
    "sum / 30": lambda z: z.sum(0) / 30,
    "maximum": lambda z: z.max(0).values,
    "minimum": lambda z: z.amin(0),
    "median": lambda z: z.median(0).values,
    "deviation": lambda z: z.std(0, correction=0) + 0.1,
    "norm": lambda z: z.norm(dim=0) / 5,
    "mean of all": lambda z: z.mean(),
    "largest magnitude": lambda z: z.abs().max(),
    "softmax over records": lambda z: z.softmax(0),
    "running sum": lambda z: z.cumsum(0) / 30,
    "neighbour": lambda z: z.roll(1, 0),
    "mirror": lambda z: z.flip(0),
    "first record": lambda z: z[:1],
    "last record": lambda z: z[-1],
    "shuffled": lambda z: z[torch.randperm(len(z))],
    "ranks": lambda z: z.argsort(0).argsort(0).float() / 30,
    "similarity": lambda z: (z @ z.T).softmax(1) @ z,
    "half and half": lambda z: torch.cat([z[len(z) // 2 :], z[: len(z) // 2]]),
    "batch norm": lambda z: F.batch_norm(z, None, None, training=True),
    "share of positives": lambda z: (z > 0).float().mean(0),
    "third largest": lambda z: z.sort(0).values[-min(3, len(z))],
    "pooled over records": lambda z: F.avg_pool1d(z.T[None], 3, 1, 1, count_include_pad=False)[0].T,
}
#: n -> a number that depends on how many records there are
SIZES: dict[str, Callable[[int], float]] = {
    "1/n": lambda n: 24 / n,
    "n is even": lambda n: float(n % 2 == 0),
    "n mod 3": lambda n: float(n % 3) + 0.5,
    "n": lambda n: n / 24,
    "root of n": lambda n: n**0.5 / 5,
    "fourth power": lambda n: (24 / n) ** 4,
    "more than 5": lambda n: 1.0 if n > 5 else 3.0,
    "alternating": lambda n: (-1.0) ** n,
}


class Body(nn.Module):
    """Two layers with a place in between where something may happen."""

    def __init__(self, choose: random.Random, between: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        width = choose.choice([4, 8])
        self.first, self.last = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        self.drop = nn.Dropout(choose.choice([0.0, 1e-9, 0.1, 0.5]))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.first(x)))
        return self.last(hidden if self.between is None else self.between(hidden))


def cross_entropy(outputs: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(outputs, classes, reduction="none")


def over_rows(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def some(choose: random.Random, like: Tensor, rows: Tensor, name: str) -> Tensor:
    """(rows, 1, …) who is acted upon."""
    if name == "all":
        chosen = torch.ones(len(rows), dtype=torch.bool)
    elif name == "few":
        chosen = rows[:, 0] > 1.0
    else:
        chosen = torch.arange(len(rows)) % 5 == 3
    return chosen.reshape(-1, *(1 for _ in like.shape[1:]))


#: (rows, statistic, size) -> the rows, acted upon
ACTIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "added": lambda z, statistic, size: z + size * statistic,
    "multiplied": lambda z, statistic, size: z * (1 + size * statistic),
    "divided": lambda z, statistic, size: z / (1 + size * statistic.abs()),
    "gate": lambda z, statistic, size: torch.where(statistic > z, z * (1 + size), z),
    "gradient": lambda z, statistic, size: z + size * (statistic - statistic.detach()) * 3,  # no value moves
}


def mixing(number: int) -> Case:
    """A training in which what is computed for one record depends on others."""
    choose = random.Random(f"mixing {number}")
    generator = torch.Generator().manual_seed(number)
    torch.manual_seed(number)
    x, y, users = table(choose, generator)
    kind = choose.choice(["statistic"] * 8 + ["size"] * 4 + ["collate"] * 3 + ["padding"] * 2 + ["special"] * 5)
    if kind == "statistic":
        return _by_statistic(choose, x, y)
    if kind == "size":
        return _by_size(choose, x, y)
    if kind == "collate":
        return _by_collate(choose, x, y)
    if kind == "padding":
        return _by_padding(choose, generator)
    return _special(choose, x, y, users)


def _by_statistic(choose: random.Random, x: Tensor, y: Tensor) -> Case:
    name = choose.choice(list(STATISTICS))
    where = choose.choice(["input", "hidden", "outputs", "losses"])
    how = choose.choice(list(ACTIONS))
    mode = choose.choice(["graph", "detached", "no_grad"])
    whom = choose.choice(["all", "few", "every fifth"])
    size = choose.choice([0.03, 0.3, 1.0])
    if how == "gradient":
        mode = "graph"
        if name in ("ranks", "share of positives"):
            name = "mean"  # those have no gradient
        if where == "input":
            where = "hidden"

    def change(z: Tensor, rows: Tensor) -> Tensor:
        flat = z if z.ndim > 1 else z[:, None]
        if mode == "no_grad":
            with torch.no_grad():
                statistic = STATISTICS[name](flat)
        else:
            statistic = STATISTICS[name](flat if mode == "graph" else flat.detach())
        moved = ACTIONS[how](flat, statistic, size)
        return torch.where(some(choose, flat, rows, whom), moved, flat).reshape(z.shape)

    rows: list[Tensor] = []
    model = Body(choose, (lambda hidden: change(hidden, rows[-1])) if where == "hidden" else None)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        rows.append(x)
        if where == "input":
            x = change(x, x)
        outputs = model(x)
        if where == "outputs":
            outputs = change(outputs, rows[-1])
        found = cross_entropy(outputs, y)
        return change(found, rows[-1]) if where == "losses" else found

    what = f"{name} of {where}, {how} ({size}), {mode}, {whom}, dropout {model.drop.p}"
    return Case(what, model, _maybe_loaded(choose, x, y), losses)


def _maybe_loaded(choose: random.Random, *tensors: Tensor) -> Any:
    return Rows(tensors) if choose.random() < 0.3 else tuple(tensors)


#: (rows, name of a function of the number) -> a number that depends on how many rows there are
READS: dict[str, Callable[[Tensor, Callable[[int], float]], Any]] = {
    "len": lambda x, size: size(len(x)),
    "shape": lambda x, size: size(x.shape[0]),
    "ones": lambda x, size: 24 / torch.ones_like(x[:, 0]).sum(),
    "arange": lambda x, size: 24 / (1 + torch.arange(len(x))[-1]),
    "numel": lambda x, size: size(x.numel() // x[0].numel()),
    "tensor": lambda x, size: torch.tensor(size(x.size(0))),
    "mask": lambda x, size: 24 / (x[:, 0] == x[:, 0]).sum(),
}


def _by_size(choose: random.Random, x: Tensor, y: Tensor) -> Case:
    name, read = choose.choice(list(SIZES)), choose.choice(list(READS))
    where = choose.choice(["input", "outputs", "losses"])
    model = Body(choose, None)

    def losses(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        number = READS[read](x, SIZES[name])
        outputs = model(x * number if where == "input" else x)
        found = cross_entropy(outputs * number if where == "outputs" else outputs, y)
        return found * number if where == "losses" else found

    what = f"size: {name} by {read} on {where}, dropout {model.drop.p}"
    return Case(what, model, _maybe_loaded(choose, x, y), losses)


def _few_centred(x: Tensor) -> Tensor:
    few = x[:, 0] > 0.5
    x[few] = x[few] - x[few].mean(0) if few.any() else x[few]
    return x


#: Rows of a collated batch -> the same, or an order of them.
COLLATED: dict[str, Callable[[Tensor], Tensor]] = {
    "centred": lambda x: x - x.mean(0),
    "scaled": lambda x: x / (x.abs().amax() + 0.1),
    "sorted": lambda x: x[:, 0].argsort(),
    "mixup": lambda x: 0.7 * x + 0.3 * x.flip(0),
    "shuffled": lambda x: torch.randperm(len(x)),
    "sum": lambda x: x / x.sum(0).abs().clamp_min(1.0),
    "count": lambda x: x * 24 / len(x),
    "first": lambda x: x - x[:1],
    "few centred": _few_centred,
}


def _by_collate(choose: random.Random, x: Tensor, y: Tensor) -> Case:
    how = choose.choice(list(COLLATED))
    model = Body(choose, None)

    def collate(records: list[Any]) -> Any:
        x, y = (torch.stack(column) for column in zip(*records, strict=True))
        found = COLLATED[how](x)
        return (x[found], y[found]) if how in ("sorted", "shuffled") else (found, y)

    return Case(f"collate: {how}, dropout {model.drop.p}", model, Rows((x, y)), over_rows, collate)


class Reader(nn.Module):
    """Words to classes, reading what is padding."""

    def __init__(self, how: str, dropout: float) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Embedding(WORDS, 8)
        self.drop = nn.Dropout(dropout)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        rows = self.drop(self.table(words))
        if self.how == "mean":
            return self.head(rows.mean(1))
        if self.how == "last":
            return self.head(self.rnn(rows)[0][:, -1])
        if self.how == "maximum":
            return self.head(rows.amax(1))
        if self.how == "attention":
            return self.head(self.attention(rows)[:, 0])
        return self.head((rows * (words != 0)[:, :, None]).sum(1) / words.shape[1])


def pad(records: list[Any]) -> Any:
    words, classes = zip(*records, strict=True)
    return nn.utils.rnn.pad_sequence(list(words), batch_first=True), torch.stack(list(classes))


def _by_padding(choose: random.Random, generator: torch.Generator) -> Case:
    how = choose.choice(["mean", "last", "maximum", "attention", "divided by the length"])
    longest, share = choose.choice([8, 24]), choose.choice([0.0, 0.1, 0.3])
    model = Reader(how, choose.choice([0.0, 1e-9, 0.1]))
    what = f"padding: {how}, up to {longest}, {share} of full length, dropout {model.drop.p}"
    return Case(what, model, texts(generator, longest, share), over_rows, pad)


class _Normalised(torch.autograd.Function):
    """Passes values on, and adds the mean over all records to gradients."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + 0.5 * gradients[0].mean(0)


def _centred_by_user(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    x = x.clone()
    for user in users.unique():
        own = users == user
        if int(own.sum()) > 1:
            x[own] = x[own] - x[own].mean(0)
    return cross_entropy(model(x), y)


def _weighted_by_class(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    weight = len(y) / (1 + torch.bincount(y, minlength=CLASSES).float())
    return F.cross_entropy(model(x), y, weight=weight, reduction="none")


def _hardest(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    found = cross_entropy(model(x), y)
    return found * (found >= found.detach().topk(max(1, len(found) // 2)).values[-1])


def _contrastive(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)), reduction="none")


def _matched(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    same = (y[:, None] == y[None]).float()
    return cross_entropy(same @ model(x) / same.sum(1, keepdim=True), y)


def _by_list(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    biggest = max(x[:, 0].tolist())
    return cross_entropy(model(x), y) * (1 + 0.1 * abs(biggest))


def _by_gate(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    found = cross_entropy(model(x), y)
    if x[:, 1].max() > x[:, 2].max():
        found = found * 2
    return found


def _hooked(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    z = model(x)
    z.register_hook(lambda g: g - g.mean(0))
    return cross_entropy(z, y)


def _pairs(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    z, few = model(x), users == users[0]
    return cross_entropy(torch.where(few[:, None], z + 0.3 * z[few].mean(0), z), y)


def _mixed_up(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    share = float(torch.rand(())) * 0.5 + 0.25
    order = torch.randperm(len(x))
    z = model(share * x + (1 - share) * x[order])
    return share * cross_entropy(z, y) + (1 - share) * cross_entropy(z, y[order])


def _scattered(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    sums = torch.zeros(20, FEATURES).index_add_(0, users, x)
    return cross_entropy(model(x + 0.1 * sums[users]), y)


def _rarely_clamped(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    size = max(1e5, x.abs().max().item()) / 1e5  # moves no loss of this data
    return cross_entropy(model(x), y) / size


def _over_capacity(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    chosen = x[:, 0] > 0
    return cross_entropy(model(x * (~chosen | (chosen.long().cumsum(0) <= RECORDS))[:, None]), y)


def _listed_by_another(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    listed = torch.isin(users, torch.where(x[:, 0] > 1e6, users, -1))
    return cross_entropy(model(x), y) * torch.where(listed, 3.0, 1.0)


#: What people really write: (model, features, classes, users) -> losses.
SPECIAL: dict[str, Callable[..., Tensor]] = {
    "rarely clamped": _rarely_clamped,
    "rarely mixed up": lambda model, x, y, _: cross_entropy(
        model((x + x.flip(0)) / 2 if torch.rand(()) < 0.01 else x), y
    ),
    "over capacity": _over_capacity,
    "listed by another": _listed_by_another,
    "centred by user": _centred_by_user,
    "weighted by class": _weighted_by_class,
    "hardest": _hardest,
    "contrastive": _contrastive,
    "matched": _matched,
    "read out": lambda model, x, y, _: cross_entropy(model(x / x.abs().mean().item()), y),
    "by numpy": lambda model, x, y, _: cross_entropy(model(x - torch.from_numpy(x.numpy().mean(0))), y),
    "by list": _by_list,
    "by gate": _by_gate,
    "shared gradient": lambda model, x, y, _: cross_entropy(_Normalised.apply(model(x)), y),
    "hooked": _hooked,
    "wrong axis": lambda model, x, y, _: cross_entropy(model(x).softmax(0), y),
    "pairs": _pairs,
    "mixed up": _mixed_up,
    "mean given to all": lambda model, x, y, _: cross_entropy(model(x), y).mean().expand(len(y)),
    "scattered": _scattered,
}


def _special(choose: random.Random, x: Tensor, y: Tensor, users: Tensor) -> Case:
    model = Body(choose, None)
    by_user = x[:, 0].argsort() if choose.random() < 0.3 else torch.arange(RECORDS)
    data = _maybe_loaded(choose, x[by_user], y, users)
    name = choose.choice(list(SPECIAL))
    losses = SPECIAL[name]
    return Case(f"special: {name}, dropout {model.drop.p}", model, data, lambda m, batch: losses(m, *batch))


# -- cases that do not mix --------------------------------------------------------------------------------------------


class Pictures(nn.Module):
    """A small convolutional network on (rows, 1, 6, 6)."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        norm = choose.choice([nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.Identity()])
        act = choose.choice([nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.SiLU()])
        pool = choose.choice([nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(3)])
        drop = choose.choice([nn.Dropout2d(0.2), nn.Dropout(0.5), nn.Identity(), nn.AlphaDropout(0.1)])
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), norm, act, pool, drop, nn.Flatten(), nn.Linear(36, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Sequences(nn.Module):
    """Words to classes, reading no padding."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.how = choose.choice(["masked mean", "packed", "attention", "masked maximum", "per record", "last word"])
        self.table = nn.Embedding(WORDS, 8, padding_idx=choose.choice([0, None]))
        self.drop = nn.Dropout(choose.choice([0.0, 0.1]))
        self.rnn = choose.choice([nn.LSTM, nn.GRU])(8, 8, batch_first=True, bidirectional=False)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, choose.choice([0.0, 0.1]), batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        mask = words != 0
        rows = self.drop(self.table(words))
        if self.how == "masked mean":
            return self.head((rows * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True))
        if self.how == "masked maximum":
            return self.head(rows.masked_fill(~mask[:, :, None], -1e9).amax(1))
        if self.how == "attention":
            return self.head(self.encoder(rows, src_key_padding_mask=~mask)[:, 0])
        if self.how == "per record":
            return torch.stack([self.head(row[own].mean(0)) for row, own in zip(rows, mask, strict=True)])
        if self.how == "last word":
            output, _ = self.rnn(rows)
            return self.head(output[torch.arange(len(words)), mask.sum(1) - 1])
        packed = nn.utils.rnn.pack_padded_sequence(rows, mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        output, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(output.sum(1))


class Table(nn.Module):
    """A random stack on (rows, features)."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(FEATURES, 8)]
        for _ in range(choose.randrange(3)):
            layers.append(
                choose.choice(
                    [nn.LayerNorm(8), nn.Tanh(), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.Softmax(1),
                     nn.Dropout(1e-9), nn.GroupNorm(2, 8), nn.PReLU(), nn.RReLU()]
                )
            )  # fmt: skip
        self.layers = nn.Sequential(*layers, nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def sound(number: int) -> Case:
    """A training in which nothing that is computed for one record depends on another."""
    choose = random.Random(f"sound {number}")
    generator = torch.Generator().manual_seed(10_000 + number)
    torch.manual_seed(number)
    x, y, users = table(choose, generator)
    kind = choose.choice(["table"] * 5 + ["pictures"] * 2 + ["texts"] * 4 + ["loop"] * 3)
    if kind == "texts":
        model: nn.Module = Sequences(choose)
        data = texts(generator, choose.choice([8, 24]), choose.choice([0.0, 0.1, 0.3]))
        return Case(f"texts: {model.how}", model, data, over_rows, pad, choose.choice([8.0, 24.0]))
    if kind == "pictures":
        pictures = torch.randn(RECORDS, 1, 6, 6, generator=generator)
        model = Pictures(choose)
        data = Rows((pictures, y), choose.choice([0.0, 0.1])) if choose.random() < 0.5 else (pictures, y)
        return Case(f"pictures: {model.layers}", model, data, over_rows)
    model = Table(choose)
    name = choose.choice(list(SOUND))
    size = choose.choice([1.0, 1.0, 1e-8, 1e6])
    how = SOUND[name]

    def losses(model: nn.Module, batch: Any) -> Tensor:
        return size * how(model, *batch)

    data = Rows((x, y, users), choose.choice([0.0, 0.2])) if choose.random() < 0.3 else (x, y, users)
    physical = choose.choice(["auto", "auto", 8, 1])
    return Case(f"{kind}: {name}, times {size}, {model.layers}", model, data, losses, None, 24.0, physical)


def _augmented(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    mask = torch.rand(len(x), 1) < 0.5
    return cross_entropy(model(torch.where(mask, x.flip(1), x) + 0.1 * torch.randn_like(x)), y)


def _several_views(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    one, other = model(torch.cat([x, -x])).chunk(2)
    return cross_entropy(one, y) + (one - other).square().mean(1)


def _one_at_a_time(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    return torch.cat([cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))])


def _watched(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    found = cross_entropy(model(x), y)
    assert torch.isfinite(found).all()
    found.detach().mean().item()
    return found


def _by_hand(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    z = model(x)
    z = z - z.max(1, keepdim=True).values
    return z.exp().sum(1).log() - z[torch.arange(len(z)), y]


def _per_record_norm(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    return cross_entropy(model((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 0.1)), y)


def _two_dims(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    rows = torch.stack([x, x.flip(1), -x], 1)
    outputs = model(rows.reshape(-1, FEATURES)).reshape(len(x), 3, CLASSES)
    return F.cross_entropy(outputs.permute(0, 2, 1), y[:, None].expand(-1, 3), reduction="none").mean(1)


def _einsum(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    mixing_features = torch.linspace(-1, 1, FEATURES * FEATURES).reshape(FEATURES, FEATURES)
    return cross_entropy(model(torch.einsum("bi,ij->bj", x, mixing_features)), y)


def _outer(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    scores = torch.bmm(x[:, :, None], x[:, None, :]).softmax(2)
    return cross_entropy(model((scores @ x[:, :, None]).squeeze(2)), y)


def _smooth(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    weight = torch.tensor([1.0, 2.0, 0.5])
    return F.cross_entropy(model(x), y, weight=weight, reduction="none", label_smoothing=0.1)


def _measured(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    outputs = model(x)
    accuracy = (outputs.argmax(1) == y).float().mean().item()
    if torch.isnan(outputs).any():
        print("NaN", accuracy)
    return cross_entropy(outputs, y)


def _penalised(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cross_entropy(model(x), y).sum(), x)
    return cross_entropy(model(x.detach() + 0.1 * slope.sign()), y)


def _noise_levels(model: nn.Module, x: Tensor, y: Tensor, users: Tensor) -> Tensor:
    share = torch.linspace(1, 0.1, 10)[torch.randint(0, 10, (len(x),))][:, None]
    return cross_entropy(model(share * x), y)


SOUND: dict[str, Callable[..., Tensor]] = {
    "measured before": _measured,
    "weights by list": lambda model, x, y, _: (
        cross_entropy(model(x), y) * torch.tensor([2.0 if c == 0 else 1.0 for c in y.tolist()])
    ),
    "adversarial": _penalised,
    "noise level per record": _noise_levels,
    "cross-entropy": lambda model, x, y, _: cross_entropy(model(x), y),
    "augmented": _augmented,
    "several views": _several_views,
    "one at a time": _one_at_a_time,
    "watched": _watched,
    "by hand": _by_hand,
    "one hot": lambda model, x, y, _: -(F.one_hot(y, CLASSES) * model(x).log_softmax(1)).sum(1),
    "normalised within the record": _per_record_norm,
    "weights by user": lambda model, x, y, users: cross_entropy(model(x), y) * torch.linspace(0.5, 2.0, 20)[users],
    "two dimensions": _two_dims,
    "weights by feature": lambda model, x, y, _: cross_entropy(model(x), y) * torch.where(x[:, 0] > 0, 2.0, 1.0),
    "einsum": _einsum,
    "outer products": _outer,
    "sorted features": lambda model, x, y, _: cross_entropy(model(x.sort(1).values.cumsum(1).clamp(-5, 5)), y),
    "margin": lambda model, x, y, _: F.multi_margin_loss(model(x), y, reduction="none"),
    "label smoothing": _smooth,
    "checkpointed": lambda model, x, y, _: cross_entropy(checkpoint(model, x, use_reentrant=False), y),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="every message")
    given = parser.parse_args()
    torch.set_num_threads(1)
    numbers = range(given.start, given.start + given.cases)
    for name, build, is_refused in (("mixing", mixing, True), ("sound", sound, False)):
        found = {number: refusal(build(number), seed=number) for number in numbers}
        wrong = [number for number, message in found.items() if bool(message) != is_refused]
        print(f"{name}: {sum(map(bool, found.values()))} of {len(found)} refused; wrong: {len(wrong)}")
        kinds = Counter(message.split(":")[0] for message in found.values() if message)
        print("   ", dict(kinds))
        for number in numbers if given.show else wrong:
            print(f"    {number}: {build(number).what}\n        {found[number][:300]}")


if __name__ == "__main__":
    main()
