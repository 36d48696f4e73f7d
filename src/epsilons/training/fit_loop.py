"""Fit: the whole loop in one call, for data of (input, target) pairs."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from ..budgets import Budgets
from ..errors import DataError, EpsilonsError, InputError
from ..files import sync_folder
from ..planning import Plan
from ..run_folder import Run, read_metrics
from . import checkpoints, fingerprints, validation
from .columns import are_columns
from .evaluation import EvalData, Loss, evaluate
from .performance import Performance
from .private import Private
from .private_setup import set_up
from .progress import watched

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
_NUMBER = (int, float, Tensor)
Callback = Callable[[Private], None]


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def _binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    flat = outputs.reshape(len(targets), -1)
    return F.binary_cross_entropy_with_logits(flat, targets.reshape(flat.shape).to(flat.dtype), reduction="none").mean(
        1
    )


def _mse(outputs: Tensor, targets: Tensor) -> Tensor:
    flat = outputs.reshape(len(targets), -1)
    return (flat - targets.reshape(flat.shape)).square().mean(1)


LOSSES: dict[str, Loss] = {
    "cross_entropy": _cross_entropy,
    "binary_cross_entropy": _binary_cross_entropy,
    "mse": _mse,
}

_OF_CLASSES = ("cross_entropy", "binary_cross_entropy")

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}

#: The learning rate of an optimizer with a name, unless another is given.
LEARNING_RATE = 0.1


def fit(
    model: nn.Module,
    dataset: Any,
    plan: Plan,
    *,
    budgets: Budgets,
    loss: str | Loss = "cross_entropy",
    optimizer: str | type[torch.optim.Optimizer] | MakeOptimizer = "sgd",
    lr: float | None = None,
    momentum: float | None = None,
    eval_data: Any = None,
    eval_every: int | None = None,
    device: str | torch.device = "auto",
    performance: Performance | None = None,
    seed: int | None = None,
    run_index: int = 0,
    key: bytes | None = None,
    randomness: str = "philox",
    run_dir: str | Path | None = None,
    resume: bool = False,
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    callbacks: Iterable[Callback] = (),
    checkpoint_every: int | None = None,
    progress: bool | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Run:
    """Train `model` in place under `plan`, and return what the run has to show.

    dataset     (inputs, targets) as tensors or arrays, or a map-style data set of such pairs
    loss        a name in LOSSES, or a function (outputs, targets) -> (batch,)
    optimizer   "sgd" (lr 0.1, momentum 0, unless given), "adam", "adamw" (lr 0.1), a class of optimizers (lr and
                momentum are passed on if given), or a function parameters -> optimizer (which sets both itself)
    test        data to evaluate on at the end, and every `eval_every` steps: like `dataset`, or a EvalData that says
                more about them. Metrics of private data are not covered by the guarantee
    device      "auto" (a GPU if there is one), or any torch device
    out         a new folder: plan, ledger, metrics, key and, at the end, model.safetensors; None keeps nothing
    scheduler   optimizer -> a scheduler of torch.optim.lr_scheduler, stepped after every update and kept in checkpoints
    callbacks   called with the Private after every update; state of their own goes on in a run that is taken up again
                only if it can be told from private.updates (else use make_private and private.keep). One that calls
                private.stop() ends training: the run is finished, with what was charged until then
    resume, checkpoint_every   as in make_private: a run that was cut off goes on from its last checkpoint
    progress    on stderr, live in a terminal and a line now and then elsewhere; by default in a terminal only
    notes       JSON values to keep in run.json

    All else as in `make_private`, and raises what it raises. Of several ranks, the first evaluates and keeps the run.
    """
    compute = _named(LOSSES, loss, "loss")
    make = _maker(optimizer, lr, momentum)
    held_out = eval_data if eval_data is None or isinstance(eval_data, EvalData) else EvalData(eval_data)
    performance = performance or Performance()
    _check_first(model, dataset, loss, performance.num_workers)
    if held_out is not None:
        validation.check_pairs(held_out.data, "test data")
        if loss in _OF_CLASSES:
            validation.check_several_classes(held_out.data, "test data")
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    model.to(where)
    updates = make(model.parameters())
    validation.check_optimizer(updates, model)
    modes = _training_modes(model)
    is_binary = loss == "binary_cross_entropy"
    if held_out is not None:
        _try_test(model, held_out, compute, is_binary)
        _into(modes)
    settings: dict[str, Any] = {
        "training": {
            "model": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "loss": _label(loss),
            "optimizer": _label(optimizer),
            **_settings(updates),
            # two functions may have one name; a seeded run's key, and what it is compared with on resuming, know them
            **({"functions": fingerprints.of(functions)} if (functions := _given(loss, scheduler)) else {}),
            "device": str(where),
        }
    }
    if held_out is not None:
        settings["eval_data"] = {
            "data": "public" if held_out.public else "private",
            "records": len(held_out),
            "classes": None if held_out.classes is None else list(held_out.classes),
        }

    losses = _Losses(compute, is_of_classes=loss == "cross_entropy")
    private = set_up(
        model,
        updates,
        dataset,
        plan,
        budgets=budgets,
        run_dir=run_dir,
        performance=performance,
        seed=seed,
        run_index=run_index,
        key=key,
        randomness=randomness,
        resume=resume,
        checkpoint_every=checkpoint_every,
        loss=losses if performance.compile else None,
        metadata=settings | ({"metadata": dict(metadata)} if metadata is not None else {}),
    )
    folder = private.folder
    metrics: list[Mapping[str, Any]] = list(read_metrics(folder)) if folder else []

    def note(step: int) -> None:
        assert held_out is not None
        if not private.ranks.is_main:
            return  # one is enough; the others wait at the end of their next draw
        if metrics and metrics[-1]["step"] >= step:
            return  # a run that was taken up again has this row already
        private.checkpoint()  # nothing of a step gets out before its checkpoint is durable
        row = {"step": step, **evaluate(model, held_out, compute, is_binary)}
        metrics.append(row)
        if folder:
            folder.append_metrics(row)

    def between(private: Private) -> None:
        step = private.updates
        if held_out is not None and eval_every and step % eval_every == 0 and step < plan.steps:
            note(step)
            _into(modes)

    if private.ledger.durable and private.is_finished and private.updates == 0:  # nothing is left but to show it
        private.close()
        with private.ranks.collective("showing a finished run"):
            if folder:
                load_model(model, folder.path / "model.safetensors")
        if private.ranks.is_distributed:
            model.load_state_dict(private.ranks.broadcast(model.state_dict()))
        return Run(folder.path if folder else None, plan, private.ledger.charged, tuple(metrics))
    if scheduler is not None:
        schedule = scheduler(updates)
        private.register_for_checkpointing(scheduler=schedule)
        private.on_update(lambda _: schedule.step())
    for callback in callbacks:
        private.on_update(callback)
    private.on_update(between)  # last: a checkpoint holds what all others made of this update
    shown = private.ranks.is_main and (sys.stderr.isatty() if progress is None else progress)
    with private, watched(private, shown):
        for batch in private.batches:
            if performance.compile:
                private._clip(batch)
            else:
                private.backward(losses(model, batch))
            private.step()
        if not private.is_finished:  # a callback stopped it
            private.finish()
    model.eval()
    if folder:
        save_whole(model, folder.path / "model.safetensors")
    if held_out is not None:
        note(private.updates)
    if folder:
        checkpoints.remove(folder.checkpoints)
    return Run(folder.path if folder else None, plan, private.ledger.charged, tuple(metrics))


class _Losses(nn.Module):
    """(model, (inputs, targets)) -> (batch,); a module, so that a loss that is one is seen as a part of the step."""

    def __init__(self, compute: Loss, is_of_classes: bool = False) -> None:
        super().__init__()
        self.compute, self._is_of_classes = compute, is_of_classes

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = validation.check_pair(batch, "data")
        try:
            return self.compute(model(inputs), targets)
        except RuntimeError:
            validation.check_dtype(inputs, model)
            if self._is_of_classes and isinstance(targets, Tensor):
                validation.check_classes(targets[0])
                if targets.shape[1:] == (1,):
                    raise DataError(
                        'loss="cross_entropy" needs one class per record; a column arrived, a row of one for each. '
                        "Pass targets[:, 0]."
                    ) from None
            raise


def _maker(optimizer: Any, lr: float | None, momentum: float | None) -> MakeOptimizer:
    """parameters -> the optimizer that was asked for. Raises InputError for settings that it would ignore."""
    given = {name: value for name, value in {"lr": lr, "momentum": momentum}.items() if value is not None}
    listed = " and ".join(f"{name}={value:g}" for name, value in given.items())
    if isinstance(optimizer, str):
        kind = _named(OPTIMIZERS, optimizer, "optimizer")
        given = {"lr": LEARNING_RATE} | given
    elif isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        kind = optimizer
    elif callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        if given:
            raise InputError(
                f"{listed} arrived beside a function that makes the optimizer, and would be ignored. Set it in the "
                "function, e.g. lambda parameters: torch.optim.SGD(parameters, lr=0.5)."
            )
        own: MakeOptimizer = optimizer
        return own
    else:
        raise InputError(
            f"An optimizer ({type(optimizer).__name__}) arrived. Pass 'sgd', 'adam' or 'adamw', a class such as "
            "torch.optim.SGD, or a function parameters -> optimizer, not an optimizer, e.g. "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    known = inspect.signature(kind).parameters
    if not given.get("momentum", 1) and "momentum" not in known:
        del given["momentum"]  # none was asked for, and there is none
    ignored = [name for name in given if name not in known]
    if ignored:
        betas = "Its averages are set by betas: " if "betas" in known else "Pass what it takes: "
        raise InputError(
            f"{ignored[0]}={given[ignored[0]]:g} arrived, and {kind.__name__} has no {ignored[0]}. {betas}"
            f"optimizer=lambda parameters: torch.optim.{kind.__name__}(parameters, …)."
        )
    return lambda parameters: kind(parameters, **given)


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, float | list[float]]:
    """The learning rate and momentum that are trained with, as the optimizer has them; a list where groups differ."""
    found: dict[str, float | list[float]] = {}
    for name in ("lr", "momentum"):
        values = [float(group[name]) for group in optimizer.param_groups if isinstance(group.get(name), _NUMBER)]
        if values:
            found[name] = values[0] if len(set(values)) == 1 else values
    return found


def _check_first(model: nn.Module, dataset: Any, loss: str | Loss, num_workers: int) -> None:
    """Look at the first record before a run is begun; where workers read, the first batch will do."""
    if isinstance(dataset, DataLoader) or (num_workers > 0 and not are_columns(dataset)):
        return
    if loss in _OF_CLASSES:
        validation.check_several_classes(dataset, "training data")
    first = validation.check_pairs(dataset, "a data set")
    if first is None:
        return
    layer = validation.first_layer(model)
    if layer is not None and not any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        validation.check_dtype(first[0], layer)
    if loss == "cross_entropy":
        validation.check_classes(first[1])


def _training_modes(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Every module and whether it is in training mode: all of them, or as they are if some were frozen by .eval()."""
    if not model.training:
        model.train()
    return [(module, module.training) for module in model.modules()]


def _into(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, is_training in modes:
        module.training = is_training


def _try_test(model: nn.Module, eval_data: EvalData, compute: Loss, is_binary: bool) -> None:
    """Evaluate on one record, lest budgets be spent on a model that cannot be tested. Raises DataError."""
    if len(eval_data) == 0:
        return  # evaluate says so
    generators = checkpoints.of_generators()
    try:
        evaluate(model, eval_data.first(), compute, is_binary)
    except EpsilonsError:
        raise
    except Exception as error:  # a model, a loss and data of one's own may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"The model cannot be tested on the first record of the test data: {reason}. No step was made."
        ) from error
    finally:
        checkpoints.into_generators(generators)


def save_whole(model: nn.Module, path: Path) -> None:
    """Write the model's weights as safetensors, whole or not at all."""
    temporary = path.with_name(f".{path.name}.new")
    save_model(model, str(temporary))
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def _given(*parts: Any) -> list[Any]:
    return [part for part in parts if callable(part)]


def _label(which: Any) -> str:
    return which if isinstance(which, str) else str(getattr(which, "__name__", type(which).__name__))


def _named(known: Mapping[str, Any], which: Any, what: str) -> Any:
    if callable(which):
        return which
    if which not in known:
        raise InputError(f"No {what} is called {which!r}; there are: {', '.join(known)}, or pass a function.")
    return known[which]
