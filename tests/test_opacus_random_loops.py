"""Random loops as they are written for Opacus: each trains as a loop of our own, or is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from epsilons.errors import EpsilonsError
from epsilons.opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_loops import Made, distance, make, net, own_loop, tensors, train

pytestmark = pytest.mark.usefixtures("one_thread")

TURNS = ("before", "between", "after", "never")


@dataclass(frozen=True)
class Style:
    """How a loop is written; none of it changes what is computed."""

    zero_grad: str  # where optimizer.zero_grad() is called
    of_module: bool  # model.zero_grad() in its place
    forward: str  # "once", "twice", "parts", "bare"
    loss: str  # how the mean is written
    is_closure: bool
    evaluates: bool  # in the middle of a batch, and between steps
    schedules: bool
    physical_batch: int | None
    in_generator: bool  # batches go through a generator of the caller

    @classmethod
    def random(cls, seed: int) -> Style:
        of = random.Random(seed)
        return cls(
            zero_grad=of.choice(TURNS),
            of_module=of.random() < 0.3,
            forward=of.choice(("once", "twice", "parts", "bare")),
            loss=of.choice(tuple(LOSSES)),
            is_closure=of.random() < 0.3,
            evaluates=of.random() < 0.5,
            schedules=of.random() < 0.5,
            physical_batch=of.choice((None, 5, 24)),
            in_generator=of.random() < 0.3,
        )


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "module": nn.CrossEntropyLoss(),
    "function": F.cross_entropy,
    "mean of losses": lambda o, y: F.cross_entropy(o, y, reduction="none").mean(),
    "sum over records": lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(y),
    "nll": lambda o, y: F.nll_loss(F.log_softmax(o, 1), y),
    "by hand": lambda o, y: -(o.log_softmax(1) * F.one_hot(y, 3)).sum() / o.shape[0],
    "two halves": lambda o, y: 0.5 * F.cross_entropy(o, y) + 0.5 * F.cross_entropy(o, y),
    "in two terms": lambda o, y: torch.logsumexp(o, 1).mean() - o.gather(1, y[:, None]).mean(),
}


def outputs_of(made: Made, style: Style, x: Tensor) -> Tensor:
    if style.forward == "bare":
        return made.bare(x)
    if style.forward == "parts":  # encoder and head, called apart
        return made.bare[2](torch.tanh(made.bare[0](x)))
    if style.forward == "twice":
        return 0.5 * made.module(x) + 0.5 * made.module(x)
    return made.module(x)


def run(made: Made, style: Style) -> Made:
    zero: Callable[[], Any] = made.module.zero_grad if style.of_module else made.optimizer.zero_grad
    if style.schedules:
        schedule = torch.optim.lr_scheduler.LambdaLR(made.optimizer, lambda _: 1.0)
        made.loader.private.on_update(lambda _: schedule.step())

    def evaluate() -> None:
        made.module.eval()
        with torch.no_grad():
            F.cross_entropy(made.module(tensors()[0]), tensors()[1])
        made.module.train()

    def gradients(x: Tensor, y: Tensor) -> Tensor:
        if style.zero_grad == "before":
            zero()
        outputs = outputs_of(made, style, x)
        if style.zero_grad == "between":
            zero()
        if style.evaluates:
            evaluate()
        loss = LOSSES[style.loss](outputs, y)
        loss.backward()
        return loss

    def epoch(batches: Any) -> None:
        for x, y in (batch for batch in batches) if style.in_generator else batches:
            if style.is_closure:
                made.optimizer.step(lambda x=x, y=y: gradients(x, y))
            else:
                gradients(x, y)
                made.optimizer.step()
            if style.zero_grad == "after":
                zero()
            if style.evaluates and not made.loader.private.is_check:
                evaluate()

    for _ in range(2):
        if style.physical_batch is None:
            epoch(made.loader)
        else:
            with BatchMemoryManager(
                data_loader=made.loader, max_physical_batch_size=style.physical_batch, optimizer=made.optimizer
            ) as batches:
                epoch(batches)
    return made


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(s, marks=pytest.mark.slow) for s in range(5, 200))])
def test_a_loop_in_any_style_trains_as_our_own(seed):
    style = Style.random(seed)
    made = run(make(), style)
    assert made.loader.private.updates == 10
    assert distance(made.bare, own_loop()) < 1e-6, style


#: Losses that are no mean over the records of the batch.
WRONG: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda o, y: F.cross_entropy(o, y, reduction="sum"),
    "divided by a constant": lambda o, y: F.cross_entropy(o, y, reduction="sum") / 24,
    "weights of classes": lambda o, y: F.cross_entropy(o, y, weight=torch.tensor([1.0, 2.0, 3.0])),
    "ignored class": lambda o, y: F.cross_entropy(o, y, ignore_index=1),
    "largest loss": lambda o, y: F.cross_entropy(o, y, reduction="none").max(),
    "hardest half": lambda o, y: F.cross_entropy(o, y, reduction="none").topk((len(y) + 1) // 2).values.mean(),
    "batch statistics": lambda o, y: F.cross_entropy((o - o.mean(0)) / (o.std(0) + 1), y),
    "softmax over records": lambda o, y: -(o.softmax(0)[range(len(y)), y]).mean(),
    "neighbours": lambda o, y: F.cross_entropy(o + 0.1 * o.roll(1, 0), y),
    "pairs": lambda o, y: (o @ o.T).mean(),
    "root of the mean": lambda o, y: F.cross_entropy(o, y).sqrt(),
    "weights from all losses": lambda o, y: (
        F.cross_entropy(o, y, reduction="none") * F.cross_entropy(o, y, reduction="none").detach().softmax(0)
    ).sum(),
    "scaled by the mean": lambda o, y: F.cross_entropy(o, y) / F.cross_entropy(o, y).detach(),
}


@pytest.mark.parametrize("loss", WRONG.values(), ids=WRONG)
def test_a_loss_that_is_no_mean_over_records_never_trains(loss):
    """Whatever the error is, the weights stay as they were."""

    def one(made: Made, batch: Any) -> None:
        loss(made.module(batch[0]), batch[1]).backward()
        made.optimizer.step()

    made = make()
    with pytest.raises(EpsilonsError):
        train(made, each=one)
    assert distance(made.bare, net()) == 0
