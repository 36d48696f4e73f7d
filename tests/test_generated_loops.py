"""Loops as scripts for Opacus have them, generated: the same batches, updates, rates and epsilon as Opacus gives.

And generated losses within such loops: those that keep the records apart are taken, and those that mix them refused.
"""

from __future__ import annotations

import copy
import importlib
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset

from epsilons.errors import EpsilonsError
from opacus_loops import make, train
from shares import share

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDS, DELTA = 60, 1e-3

# -- scripts -------------------------------------------------------------------------------------------------------

#: (optimizer, steps in all) -> a schedule.
SCHEDULES: dict[str, Callable[[Any, int], Any]] = {
    "none": lambda o, n: None,
    "step": lambda o, n: schedules.StepLR(o, 3, gamma=0.5),
    "cosine": lambda o, n: schedules.CosineAnnealingLR(o, T_max=n),
    "one cycle": lambda o, n: schedules.OneCycleLR(o, max_lr=0.3, total_steps=n, cycle_momentum=False),
    "linear": lambda o, n: schedules.LinearLR(o, 0.1, total_iters=n),
    "warm-up": lambda o, n: schedules.LambdaLR(o, lambda step: min(1.0, (step + 1) / 4)),
    "restarts": lambda o, n: schedules.CosineAnnealingWarmRestarts(o, T_0=max(1, n // 2)),
    "two in turn": lambda o, n: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.2, total_iters=2), schedules.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "milestones": lambda o, n: schedules.MultiStepLR(o, [2, 4]),
    "polynomial": lambda o, n: schedules.PolynomialLR(o, total_iters=n),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 3)),
    "pictures": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)
    ),
}
PLACES = ("nowhere", "before backward", "after backward", "after the step", "printed", "kept for the epoch")


@dataclass(frozen=True)
class Script:
    """What a script does. physical: of BatchMemoryManager, 0 without it; limit: batches per epoch, 0 for all of them"""

    model: str
    optimizer: str
    schedule: str
    by_batch: bool
    batch: int
    epochs: int
    physical: int
    limit: int
    metrics: str
    average: str
    has_other: bool
    evaluates: str
    is_autocast: bool
    zeroes: str
    form: str


def script(seed: int) -> Script:
    """A random one. Under BatchMemoryManager, schedules step by epoch: the number of physical batches is private."""
    choose = random.Random(seed)
    physical = choose.choice([0, 0, 0, 4, 7])
    return Script(
        choose.choice(list(MODELS)),
        choose.choice(list(OPTIMIZERS)),
        choose.choice(list(SCHEDULES)),
        not physical and choose.random() < 0.6,
        choose.choice([2, 5, 12, 20, 30, 60]),
        choose.randint(1, 3),
        physical,
        0 if physical else choose.choice([0, 0, 0, 1, 2]),
        choose.choice(PLACES),
        choose.choice(["none", "none", "copy", "swa"]),
        choose.random() < 0.3,
        choose.choice(["never", "by epoch", "within"]),
        choose.random() < 0.2,
        choose.choice(["first", "last", "in place"]),
        choose.choice(["for", "enumerate", "iter"]),
    )


@dataclass
class Seen:
    """What a run of a script shows. rates: after each epoch; steps: calls of the schedule"""

    batches: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    steps: int = 0
    updates: int = 0
    epsilon: float = 0.0


def run(what: Script, package: str) -> Seen:
    """Train by the library of this name, "opacus" or "epsilons.opacus"."""
    engines = importlib.import_module(package)
    manager = importlib.import_module(f"{package}.utils.batch_memory_manager").BatchMemoryManager
    torch.manual_seed(0)
    made, other = MODELS[what.model](), nn.Linear(3, 3)
    x, y = torch.randn(RECORDS, 16), torch.randint(3, (RECORDS,))
    engine = engines.PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=made,
        optimizer=OPTIMIZERS[what.optimizer](made.parameters()),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=what.batch, shuffle=True),
        noise_multiplier=1.1,
        max_grad_norm=1.0,
    )
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    per_epoch = min(what.limit or len(loader), len(loader))
    schedule = SCHEDULES[what.schedule](optimizer, what.epochs * (per_epoch if what.by_batch else 1))
    average = torch.optim.swa_utils.AveragedModel(made) if what.average == "swa" else copy.deepcopy(made)
    seen, shown = Seen(), 0.0
    for _ in range(what.epochs):
        model.train()
        count, kept = 0, []
        context: AbstractContextManager[Any] = nullcontext(loader)
        if what.physical:
            context = manager(data_loader=loader, max_physical_batch_size=what.physical, optimizer=optimizer)
        with context as batches:
            for inputs, targets in form(what.form, batches):
                if what.zeroes != "last":
                    optimizer.zero_grad(set_to_none=what.zeroes == "first")
                with torch.autocast("cpu", torch.bfloat16, enabled=what.is_autocast):
                    outputs = model(inputs)
                    loss = F.cross_entropy(outputs.float(), targets)
                shown += metrics(what.metrics == "before backward", outputs, targets, loss)
                loss.backward()
                shown += metrics(what.metrics == "after backward", outputs, targets, loss)
                optimizer.step()
                if what.zeroes == "last":
                    optimizer.zero_grad()
                shown += metrics(what.metrics == "after the step", outputs, targets, loss)
                if what.metrics == "printed":
                    assert f"{loss:.3f} {loss.item()}"
                kept += [loss.detach()] if what.metrics == "kept for the epoch" else []
                learn_beside(what, made, average, other, of_other)
                if what.evaluates == "within" and count % 2 == 0:
                    evaluate(model, x[:10])
                if what.by_batch and schedule is not None:
                    schedule.step()
                    seen.steps += 1
                count += 1
                if count == what.limit:
                    break
        if what.evaluates == "by epoch":
            evaluate(model, x[:10])
        if not what.by_batch and schedule is not None:
            schedule.step()
        shown += float(torch.stack(kept).nanmean()) if kept else 0.0
        seen.batches.append(-1 if what.physical else count)
        seen.rates.append(optimizer.param_groups[0]["lr"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loop was left
        seen.epsilon = engine.get_epsilon(DELTA)
    seen.updates = sum(steps for _, _, steps in engine.accountant.history)
    if package != "opacus":
        engine.close()
    return seen


def form(kind: str, batches: Any) -> Iterator[Any]:
    if kind == "iter":
        iterator = iter(batches)
        while (batch := next(iterator, None)) is not None:
            yield batch
    elif kind == "enumerate":
        for _, batch in enumerate(batches):
            yield batch
    else:
        yield from batches


def metrics(is_here: bool, outputs: Tensor, targets: Tensor, loss: Tensor) -> float:
    """Accuracy by NumPy, and the loss as a number."""
    if not is_here or not len(targets):
        return 0.0
    right = np.argmax(outputs.detach().float().cpu().numpy(), axis=1) == targets.numpy()
    return float(right.mean()) + loss.item() + float((outputs.argmax(1) == targets).sum()) / len(targets)


def learn_beside(what: Script, model: nn.Module, average: Any, other: nn.Module, optimizer: Any) -> None:
    """An average of weights, and a second model that sees no record."""
    if what.average == "swa":
        average.update_parameters(model)
    elif what.average == "copy":
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
    if what.has_other:
        optimizer.zero_grad()
        other(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()


def evaluate(model: nn.Module, x: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(x).argmax(1)
    model.train()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", share(range(400), 16))
def test_a_generated_loop_sees_what_it_sees_in_opacus(seed: int):
    what = script(seed)
    ours, theirs = run(what, "epsilons.opacus"), run(what, "opacus")
    assert (ours.batches, ours.steps, ours.updates) == (theirs.batches, theirs.steps, theirs.updates)
    assert ours.rates == pytest.approx(theirs.rates, rel=1e-12, abs=1e-12)
    assert ours.epsilon == pytest.approx(theirs.epsilon, rel=1e-3)


# -- losses --------------------------------------------------------------------------------------------------------

Change = Callable[[Tensor], Tensor]

#: Of each record alone: (records, 3) -> (records, 3).
APART: dict[str, Change] = {
    "as it is": lambda z: z,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "scaled": lambda z: 0.3 * z + 0.1,
    "clamped": lambda z: z.clamp(-1, 1),
    "softmax": lambda z: z.softmax(1),
    "sorted": lambda z: z.sort(1).values,
    "added up": lambda z: z.cumsum(1),
    "of length one": lambda z: F.normalize(z, dim=1),
    "layer norm": lambda z: F.layer_norm(z, (3,)),
    "less its mean": lambda z: z - z.mean(1, keepdim=True),
    "less its detached mean": lambda z: z - z.mean(1, keepdim=True).detach(),
    "times a matrix": lambda z: z @ torch.arange(9.0).view(3, 3).div(9),
    "masked": lambda z: z * (z > -0.5),
    "turned": lambda z: z.flip(1),
    "as rows of one": lambda z: z.view(-1, 1, 3).squeeze(1),
    "noisy": lambda z: z + 0.01 * torch.randn_like(z),
}
#: In which records meet: (records, k) -> (records, k).
MIXERS: dict[str, Change] = {
    "centred": lambda z: z - z.mean(0),
    "less a detached mean": lambda z: z - z.mean(0).detach(),
    "less a mean of NumPy": lambda z: z - torch.from_numpy(z.detach().numpy().mean(0)),
    "less a number": lambda z: z - z.mean().item(),
    "over a deviation": lambda z: z / (1 + z.std(0)),
    "over a norm": lambda z: z / (1 + z.norm()),
    "over the largest": lambda z: z / (1 + z.abs().max()),
    "softmax over records": lambda z: z.softmax(0),
    "added up": lambda z: z.cumsum(0),
    "sorted": lambda z: z.sort(0).values,
    "turned": lambda z: z.flip(0),
    "rolled": lambda z: z.roll(1, 0),
    "shuffled": lambda z: z[torch.randperm(len(z))],
    "neighbours": lambda z: torch.cat([z[1:], z[:1]]) + z,
    "differences": lambda z: z.diff(dim=0, append=z[:1]),
    "kernel": lambda z: z @ z.T @ z / 10,
    "distances": lambda z: torch.cdist(z, z.detach() + 1) @ z / 10,
    "attention": lambda z: F.scaled_dot_product_attention(z[None], z[None], z[None])[0],
    "batch norm": lambda z: F.batch_norm(z, None, None, training=True),
    "a norm of all": lambda z: F.layer_norm(z, tuple(z.shape)),
    "normalised over records": lambda z: F.normalize(z, dim=0),
    "clamped at the mean": lambda z: torch.minimum(z, z.mean(0)),
    "masked by the median": lambda z: z * (z > z.median(0).values),
    "masked by a quantile": lambda z: torch.where(z > z.quantile(0.7), z, 0.1 * z),
    "times the sum": lambda z: z * z.sum(),
    "times n": lambda z: z * len(z) / 20,
    "over a root of n": lambda z: z / z.shape[0] ** 0.5,
    "a convolution": lambda z: F.conv1d(z.T[:, None], torch.ones(1, 1, 3), padding=1)[:, 0].T,
    "frequencies": lambda z: torch.fft.fft(z, dim=0).real,
    "the largest so far": lambda z: z.cummax(0).values,
    "columns as rows": lambda z: z.T.reshape(z.shape) + 0,
    "mixed up": lambda z: 0.8 * z + 0.2 * z.flip(0),
    "with the first": lambda z: z + z[:1],
    "with a detached last": lambda z: z + z[-1].detach(),
    "gathered": lambda z: z.gather(0, z.argsort(0)),
    "scattered": lambda z: z + torch.zeros_like(z).scatter_add(0, torch.zeros_like(z, dtype=torch.int64), z),
    "by a list": lambda z: z - torch.tensor(np.median(z.detach().flatten().tolist())),
}
#: (records, 3) outputs, (records,) classes, (records, 3) targets -> (records,) losses
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda o, y, t: F.cross_entropy(o, y, reduction="none"),
    "squares": lambda o, y, t: F.mse_loss(o, t, reduction="none").mean(1),
    "huber": lambda o, y, t: F.smooth_l1_loss(o, t, reduction="none").sum(1),
    "binary": lambda o, y, t: F.binary_cross_entropy_with_logits(o, t.sigmoid(), reduction="none").mean(1),
    "divergence": lambda o, y, t: F.kl_div(o.log_softmax(1), t.softmax(1), reduction="none").sum(1),
    "likelihood": lambda o, y, t: (
        -torch.distributions.Normal(o[:, 0], 1.0).log_prob(t[:, 0]) + o[:, 1:].square().sum(1)
    ),
    "margins": lambda o, y, t: F.multi_margin_loss(o, y, reduction="none"),
    "cosine": lambda o, y, t: 1 - F.cosine_similarity(o, t),
}
#: (records,) losses -> their mean, in several ways.
MEANS: dict[str, Change] = {
    "mean": lambda each: each.mean(),
    "sum over len": lambda each: each.sum() / len(each),
    "sum over shape": lambda each: each.sum().div(each.shape[0]),
    "weighted": lambda each: (each * each.detach().sigmoid()).mean(),
    "mean of shares": lambda each: (each / each.numel()).sum(),
    "focal": lambda each: (each * (1 - (-each).exp()) ** 2).mean(),
    "a mean that is scaled": lambda each: 0.5 * each.mean() + 0.1,
    "a mean of columns": lambda each: torch.stack([each, 2 * each], 1).mean(),
}
#: (records,) losses -> a number in which they meet.
MEETINGS: dict[str, Change] = {
    "the hardest": lambda each: each.topk(3).values.mean(),
    "the largest": lambda each: each.max(),
    "the median": lambda each: each.median(),
    "a square of the mean": lambda each: each.mean() ** 2,
    "a root of the mean": lambda each: (each.mean().abs() + 1).sqrt(),
    "log-sum-exp": lambda each: each.logsumexp(0),
    "weighted by softmax": lambda each: (each.detach().softmax(0) * each).sum(),
    "weighted by shares": lambda each: (each * each.detach().abs()).sum() / each.detach().abs().sum(),
    "a sum": lambda each: each.sum(),
    "a sum over a constant": lambda each: each.sum() / 24,
    "half of them": lambda each: each[: len(each) // 2].mean(),
    "times a number": lambda each: each.mean() * (1 + abs(each.mean().item())),
    "mean and spread": lambda each: each.mean() + each.var(),
    "those above the mean": lambda each: each[each > each.mean()].mean(),
    "flooding": lambda each: (each.mean() - 1).abs() + 1,
    "a bound on the mean": lambda each: each.mean().clamp(max=0.9),
    "over its own size": lambda each: each.mean() / (1 + each.detach().mean().abs()),
    "a product": lambda each: (1 + each.abs()).log().sum().exp(),
    "more if it is large": lambda each: each.mean() * (2 if each.mean() > 1 else 1),
    "more if a number is large": lambda each: each.mean() * (2 if each.mean().item() > 1 else 1),
    "more if there are many": lambda each: each.mean() * (2 if len(each) > 24 else 1),
    "without the last": lambda each: each[:-1].mean(),
    "every second": lambda each: each[::2].mean(),
    "sorted by NumPy": lambda each: each[torch.from_numpy(each.detach().numpy().argsort()[:9].copy())].mean(),
}


def loss_of(seed: int, is_mixing: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A random mean over records of random losses of random outputs. Mixing: records meet in one place of it."""
    choose = random.Random(seed)
    before, after = choose.choice(list(APART.values())), choose.choice(list(APART.values()))
    losses, mean = choose.choice(list(LOSSES.values())), choose.choice(list(MEANS.values()))
    mixer, place = choose.choice(list(MIXERS.values())), choose.choice(["outputs", "losses", "mean"])
    if not is_mixing:
        return lambda o, y, t: mean(losses(after(before(o)), y, t))
    if place == "outputs":
        return lambda o, y, t: mean(losses(after(mixer(before(o))), y, t))
    if place == "losses":
        # A plain mean of records that changed places, or less a constant, would still be sound.
        return lambda o, y, t: mean(
            t[:, 0].exp() * F.softplus(mixer(losses(after(before(o)), y, t)[:, None].expand(-1, 2))[:, 0])
        )
    meeting = choose.choice(list(MEETINGS.values()))
    return lambda o, y, t: meeting(losses(after(before(o)), y, t))


def refusal(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> str:
    """The message of the error that ends an epoch with this loss; "" if it ends well."""

    def step(made: Any, batch: Any) -> None:
        x, y = batch
        made.optimizer.zero_grad()
        loss(made.module(x), y, x[:, :3]).backward()
        made.optimizer.step()

    made = make()
    try:
        train(made, 1, step)
    except EpsilonsError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        made.engine.close()
    return ""


@pytest.mark.parametrize("seed", share(range(200), 12))
def test_a_generated_loss_that_keeps_records_apart_is_taken(seed: int):
    assert refusal(loss_of(seed, is_mixing=False)) == ""


@pytest.mark.parametrize("seed", share(range(200), 16))
def test_a_generated_loss_in_which_records_meet_is_refused(seed: int):
    assert refusal(loss_of(seed, is_mixing=True)) != ""
