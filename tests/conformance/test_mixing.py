"""Promise: where one record can move another's gradient, training is refused, for no clipping bounds what it does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from functional import Model, Records

from .adapters import Table, Trainer, record
from .probes import ALMOST_NO_NOISE, mixed

RECORDS, FEATURES, CLASSES = 24, 6, 3


def centred() -> nn.Module:
    """Home-made normalisation, of a type that no list knows."""
    return Model(lambda m, x: m.head(x - x.mean(0)), head=nn.Linear(FEATURES, CLASSES))


def per_record(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def contrastive(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Each record against all others of the physical batch."""
    outputs = model(batch[0])
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="none")


def mixup(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Each record blended with its neighbour in the physical batch."""
    return F.cross_entropy(model((batch[0] + batch[0].flip(0)) / 2), batch[1], reduction="none")


def linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, tuple[Tensor, ...]], Tensor]]] = {
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), linear()), per_record),
    "batch norm without running statistics": (
        lambda: nn.Sequential(nn.BatchNorm1d(FEATURES, track_running_stats=False).eval(), linear()),
        per_record,
    ),
    "a home-made mean": (centred, per_record),
    "a contrastive loss": (linear, contrastive),
    "mixup in the loop": (linear, mixup),
}


@pytest.mark.parametrize("case", CASES)
def test_one_record_cannot_move_the_others(trainer: Trainer, case: str, seed: int):
    """Everyone is drawn and one record exchanged: the sum may move by twice its own bound, or there is no sum."""
    make, losses = CASES[case]
    everyone = Table(3, mixed(RECORDS, 2), (1.0, 1.0), (0.01, 0.02), ALMOST_NO_NOISE, float(RECORDS))
    table = trainer.express(everyone)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(RECORDS, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (RECORDS,), generator=generator)
    other = x.clone()
    other[5] = 300.0
    sums = []
    for data in (x, other):
        with suppress(Exception):  # refused, in whatever way
            torch.manual_seed(4)
            sums.append(record(trainer, make(), (data, y), losses, table, seed=seed).sums[0])
    if len(sums) == 2:
        moved = np.sqrt(sum(float((a - b).square().sum()) for a, b in zip(*sums, strict=True)))
        assert moved <= 2 * table.bounds[5] * (1 + 1e-3)


def test_a_forward_pass_that_writes_to_its_parameters_is_refused(trainer: Trainer, seed: int):
    """Embedding(max_norm) rescales the rows it looks up, so the parameters show without noise who was drawn."""
    table = trainer.express(Table(3, mixed(RECORDS, 2), (0.5, 0.5), (0.5, 1.0), 0.7, 12.0))
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(RECORDS, 4, max_norm=0.1), nn.Flatten(), nn.Linear(4, CLASSES))
    before = [p.detach().clone() for p in model.parameters()]
    data = (torch.arange(RECORDS)[:, None], torch.arange(RECORDS) % CLASSES)
    finished = None
    with suppress(Exception):
        finished = record(trainer, model, data, per_record, table, seed=seed)
    if finished is not None:  # with lr 0, no update moves anything
        assert all(torch.equal(a, b) for a, b in zip(before, finished.parameters, strict=True))


# -- a record that leaves moves the sum by no more than its own bound ------------------------------------------------


def long(dropout: float | None) -> nn.Module:
    """Gradients that are all clipped: the record itself, far beyond its bound. Dropout of no effect, if asked for."""
    drop, head = nn.Identity() if dropout is None else nn.Dropout(dropout), nn.Linear(FEATURES, 1, bias=False)
    nn.init.zeros_(head.weight)
    return nn.Sequential(drop, head, nn.Flatten(0))


def _own(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0])


def _users_centred(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The last six records meet; one other's loss is so large that nothing of theirs shows beside it."""
    x = batch[0]
    own = x[:, 1] == 7
    mean = (x * own[:, None]).sum(0) / own.sum().clamp_min(1)
    found = model(torch.where(own[:, None], x - mean, x))
    return found + torch.where(x[:, 1] == 99, 1e10, 0.0)


#: What depends on the number of records, or on few of them.
LEAVING: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Tensor]] = {
    "divided by the number drawn": lambda m, b: _own(m, b) / len(b[0]),
    "divided by a mask's sum": lambda m, b: _own(m, b) / (b[0][:, 0].abs() < 1e9).sum(),
    "a power of the number drawn": lambda m, b: _own(m, b) * (RECORDS / len(b[0])) ** 8,
    "even numbers only": lambda m, b: _own(m, b) * (len(b[0]) % 2 == 0),
    "by place": lambda m, b: _own(m, b) * (torch.arange(len(b[0])) % 2 * 2 - 1),
    "a mean without a gradient": lambda m, b: _own(m, (b[0] - b[0].mean(0).detach() * 2,)),
    "a mean in the gradient alone": lambda m, b: _own(m, b) + (s := _own(m, b).sum() * 0.3) - s.detach(),
    "a few, beside an outlier": _users_centred,
}


def _leaving(
    trainer: Trainer, make: Callable[[], nn.Module], losses: Any, data: Any, fewer: Any, seed: int, **options: Any
) -> float:
    """By how many of its bounds the last record moves the sum; 0 where training is declined."""
    sums = []
    for given, records in ((data, RECORDS), (fewer, RECORDS - 1)):
        whole = Table(1, (0,) * records, (1.0,), (1.0,), ALMOST_NO_NOISE, float(RECORDS))
        table = trainer.express(whole)
        with suppress(Exception):
            sums.append(record(trainer, make(), given, losses, table, seed=seed, **options).sums[0])
    if len(sums) < 2:
        return 0.0
    return float(np.sqrt(sum(float((a - b).square().sum()) for a, b in zip(*sums, strict=True))))


@pytest.mark.parametrize("dropout", [None, 1e-9])
@pytest.mark.parametrize("case", LEAVING)
def test_a_record_that_leaves_moves_the_sum_by_its_own_bound_at_most(
    trainer: Trainer, case: str, dropout: float | None, seed: int
):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(RECORDS, FEATURES, generator=generator)
    x[:, 0] = 0.97 * RECORDS  # a mean over the batch brings each just below its bound
    x[-6:, 1] = 7.0
    x[3, 1] = 99.0
    x[-1, 0] = -4.0 * RECORDS  # against all others
    moved = _leaving(trainer, lambda: long(dropout), LEAVING[case], (x,), (x[:-1],), seed)
    assert moved <= 1 + 1e-3


def words(records: int) -> Records:
    """Texts of four words, and one of twelve at the end."""
    generator = torch.Generator().manual_seed(3)
    lengths = [4] * (records - 1) + [12 if records == RECORDS else 4]
    texts = [torch.randint(1, 20, (n,), generator=generator) for n in lengths]
    return Records(lambda index: (texts[index], index % CLASSES), records)


def _padded(rows: list[Any]) -> tuple[Tensor, Tensor]:
    texts = nn.utils.rnn.pad_sequence([text for text, _ in rows], batch_first=True)
    return texts, torch.tensor([target for _, target in rows])


def mean_of_words() -> nn.Module:
    """Reads padding as words."""
    torch.manual_seed(4)
    layers = {"table": nn.Embedding(20, 8), "head": nn.Linear(8, CLASSES)}
    return Model(lambda m, texts: m.head(m.table(texts).mean(1)), **layers)


def test_padding_to_the_longest_record_moves_no_other(trainer: Trainer, seed: int):
    """All texts but the last are of one length; with the last, the others are padded to three times that."""
    moved = _leaving(trainer, mean_of_words, per_record, words(RECORDS), words(RECORDS - 1), seed, collate=_padded)
    assert moved <= 1 + 1e-3
