"""What cannot be trained record by record, and data, budgets and plan that do not belong together.

Layers that mix records are refused by type where the type tells, because then the message can name the mend. What
types miss (losses, reshapes, home-made mixing) is found by trying: see `batch_independence`.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from .._links import docs_page
from ..budgets import Budgets
from ..errors import CallOrderError, DataError, ModelError, UnsupportedLayerError
from ..planning import Plan
from ..planning.plan_numbers import SHARES
from . import checkpoints
from .clipping.precision import in_use
from .columns import are_columns, columns, refuse_tables
from .independence import messages

#: Fewer targets than this may well be all of one class.
FEWEST_TARGETS = 20


def groups_of(budgets: Budgets, plan: Plan, records: int) -> npt.NDArray[np.int64]:
    """(records,) each record's group in the plan. Raises DataError if data, budgets and plan do not fit."""
    if budgets.records != records:
        raise DataError(
            f"{budgets.records:,} budgets arrived for a data set of {records:,} records. One budget per record, in "
            "data-set order, is needed; for part of the data use budgets.subset(indices)."
        )
    if plan.adjacency != SHARES:
        same = np.array_equal(budgets.epsilons, plan.epsilons) and np.array_equal(budgets.delta, plan.delta)
        if plan.records != records or not same or not np.array_equal(budgets.counts, plan.counts):
            raise DataError(
                f"The plan was made for {plan.records:,} records in {len(plan.epsilons):,} groups and does not fit "
                f"these {records:,} budgets in {len(budgets.epsilons):,} groups. Plan again with these budgets."
            )
        return budgets.group
    place = {pair: g for g, pair in enumerate(zip(plan.epsilons.tolist(), plan.delta.tolist(), strict=True))}
    pairs = list(zip(budgets.epsilons.tolist(), budgets.delta.tolist(), strict=True))
    if any(pair not in place for pair in pairs):
        raise DataError(
            "Some records carry a budget that is not among the plan's declared shares. Declare every level that "
            "people could choose from, whether or not anyone did."
        )
    return np.array([place[pair] for pair in pairs], dtype=np.int64)[budgets.group]


def check_layers(model: nn.Module) -> None:
    """Refuse layers whose type says that they mix records, as the model stands now."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or not module.track_running_stats):
            raise UnsupportedLayerError(
                f"{type(module).__name__} ({name or 'the model itself'}) mixes records in training, so no one's "
                f"gradient can be clipped alone. Swap it for GroupNorm, e.g. nn.GroupNorm(8, {module.num_features}), "
                "or freeze it with .eval()."
            )
        if type(module).__name__ == "StochasticDepth" and module.training and getattr(module, "mode", "") == "batch":
            raise UnsupportedLayerError(
                f"StochasticDepth ({name or 'the model itself'}) drops a layer for all records of a chunk at once, so "
                'who shares a chunk with whom moves the sum. Use mode="row".'
            )


def check_pairs(data: Any, what: str) -> tuple[Any, Any] | None:
    """The first record of (input, target) data, None where there is none to be read. Raises DataError for other data.

    what   the data's name in the message
    """
    refuse_tables(data)
    if are_columns(data):
        tensors = columns(data)
        if any(t.ndim == 0 or len(t) == 0 for t in tensors):
            return None
        return check_pair(tuple(t[0] for t in tensors), what)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or len(data) == 0:
        return None
    generators = checkpoints.of_generators()
    try:
        first = data[0]
    except Exception:  # whatever is wrong with it: it will be met again, and seen whole, where the record is drawn
        return None
    finally:
        checkpoints.into_generators(generators)
    return check_pair(first, what)


def check_pair(record: Any, what: str) -> tuple[Any, Any]:
    """Refuse a record, or a batch of them, that is not (inputs, targets)."""
    if isinstance(record, tuple | list) and len(record) == 2:
        return record[0], record[1]
    size = f"of {len(record)} parts " if isinstance(record, tuple | list | Mapping) else ""
    raise DataError(
        f"fit needs {what} of (inputs, targets); a {type(record).__name__} {size}arrived. "
        "For dicts or more parts use make_private with a loop of your own."
    )


def check_dtype(inputs: Any, model: nn.Module) -> None:
    """Refuse inputs of another floating type than the model's parameters."""
    own = {p.dtype for p in model.parameters() if p.is_floating_point()}
    arrived = _tensor(inputs)
    if arrived is not None and arrived.is_floating_point() and len(own) == 1 and arrived.dtype not in own:
        needed = own.pop()
        raise DataError(
            f"The inputs are {arrived.dtype}, the model's parameters {needed}. Convert the inputs, a tensor by "
            f'.to({needed}) and an array by .astype("{str(needed).removeprefix("torch.")}"), or the model by '
            f".to({arrived.dtype})."
        )


def check_classes(targets: Any) -> None:
    """Refuse a record's targets that the cross-entropy cannot take for a class."""
    arrived = _tensor(targets)
    if arrived is None or arrived.dtype in (torch.int64, torch.uint8):
        return
    if arrived.is_floating_point() and arrived.numel() != 1:
        return  # probabilities of classes
    raise DataError(
        f'loss="cross_entropy" needs classes as torch.int64; targets of {arrived.dtype} arrived. For classes convert '
        'them, a tensor by .long() and an array by .astype("int64"); for numbers there is loss="mse", for one output '
        'per yes or no loss="binary_cross_entropy".'
    )


def check_several_classes(data: Any, what: str) -> None:
    """Refuse columns whose targets are all of one class: a model scores 100 % on them that has learnt nothing.

    A data set that is read record by record is not looked through.
    """
    if isinstance(data, TensorDataset):
        data = data.tensors
    if not are_columns(data) or len(data) != 2:
        return
    targets = columns(data)[1]
    if targets.ndim == 0 or len(targets) < FEWEST_TARGETS:
        return
    if bool((targets == targets.reshape(-1)[0]).all()):
        raise DataError(
            f"All {len(targets):,} targets of the {what} are of one class, so there is nothing to tell apart. Name the "
            "column that is to be predicted, and see that records of each class are among them."
        )


def first_layer(model: nn.Module) -> nn.Module | None:
    """The layer that takes the inputs as they are; None where only the forward pass knows."""
    while type(model) is nn.Sequential and not model._forward_pre_hooks:
        model = next((m for m in model if type(m) not in (nn.Flatten, nn.Identity)), nn.Identity())
    is_plain = type(model) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) and not model._forward_pre_hooks
    return model if is_plain else None


def _tensor(values: Any) -> Tensor | None:
    """A record's values of the type that they have in a batch, if they are numbers."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, bool | int | float | np.ndarray | np.generic):
        with suppress(TypeError, ValueError):
            return torch.tensor(np.asarray(values))
    return None


def check_losses(losses: object, records: int) -> Tensor:
    """Refuse losses that are not one number per record of the chunk."""
    if not isinstance(losses, Tensor):
        raise ModelError(f"private.backward takes the tensor of per-record losses; a {type(losses).__name__} arrived.")
    if losses.ndim == 0 and records == 1 and losses.requires_grad:
        return losses.reshape(1)  # what squeeze() makes of one record
    if losses.ndim == 0:
        raise ModelError(
            "private.backward needs one loss per record, but a single number arrived: a mean or sum over the batch "
            'cannot be clipped record by record. Compute the loss with reduction="none".'
        )
    if losses.shape != (records,):
        raise ModelError(
            f"private.backward needs one loss per record, shape ({records},) for this chunk; shape "
            f"{tuple(losses.shape)} arrived. Reduce everything but the first dimension, e.g. "
            "losses.flatten(1).mean(1)."
        )
    if not losses.requires_grad:
        raise ModelError(
            "The losses do not depend on any trainable parameter. Compute them inside the loop, with gradients "
            "enabled, from the model that was made private."
        )
    return losses


def versions(model: nn.Module) -> list[tuple[int, int]]:
    """Which tensors the model holds, and how often each was written to."""
    return [(id(t), t._version) for t in (*model.parameters(), *model.buffers())]


def check_unchanged(before: list[tuple[int, int]], model: nn.Module) -> None:
    """Refuse a forward pass that wrote to parameters or buffers: what it wrote was neither clipped nor noised."""
    after = versions(model)
    if before != after:
        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        changed = [name for name, b, a in zip(names, before, after, strict=False) if a != b]
        raise messages.writes(changed or ["a tensor that came or went"])


#: A check sum gives weights by place, which repeat after so many: a prime, unlike the widths of layers.
COLUMNS = 4093


@dataclass(frozen=True)
class Contents:
    """Check sums of what a model and its optimizer hold, to see whether anything else than an update wrote there."""

    names: tuple[str, ...]
    sums: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module, parameters: Sequence[nn.Parameter]) -> Contents:
        """Of all parameters, buffers, and trained parameters outside the model."""
        named = {id(t): (name, t) for name, t in (*model.named_parameters(), *model.named_buffers())}
        named |= {id(p): ("a parameter outside the model", p) for p in parameters if id(p) not in named}
        found = [(name, _check_sum(t)) for name, t in named.values() if t.numel()]
        if not found:
            return cls((), ())
        sums = torch.stack([total.to(found[0][1].device) for _, total in found]).tolist()
        return cls(tuple(name for name, _ in found), tuple(sums))

    def check(self, now: Contents) -> None:
        """Raises ModelError, naming what changed since."""
        if self == now:
            return
        before = dict(zip(self.names, self.sums, strict=True))
        changed = [name for name, total in zip(now.names, now.sums, strict=True) if before.get(name) != total]
        raise ModelError(written_outside(changed or ["a tensor that came or went"]))


def _check_sum(tensor: Tensor) -> Tensor:
    """One number over the bits, weighted by place, so that entries that change places show."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size(), torch.uint8)
    bits = tensor.detach().contiguous().view(whole).reshape(-1)
    columns = min(COLUMNS, len(bits))
    rows = len(bits) // columns
    sums = bits[: rows * columns].view(rows, columns).sum(0, dtype=torch.int64)
    weights = torch.arange(1, columns + 1, device=bits.device)
    return (sums * weights).sum() + 3 * bits[rows * columns :].sum(dtype=torch.int64)


def written_outside(names: Sequence[str]) -> str:
    """The lesson for parameters or buffers that something else than a noisy update has changed."""
    return (
        f"{', '.join(names[:3])} changed between two updates, by something else than private.step(): a second "
        "optimizer, a write to .data, load_state_dict, or a callback. What such a change takes from the data is "
        "neither clipped nor noised. Leave parameters and buffers to private.step(); what must follow each update and "
        "looks at no data, such as a projection, belongs in optimizer.register_step_post_hook."
    )


def check_outside(before: list[tuple[int, int]], model: nn.Module) -> None:
    """Refuse parameters or buffers that were written to between two physical batches of one draw."""
    after = versions(model)
    if before != after:
        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        changed = [name for name, b, a in zip(names, before, after, strict=False) if a != b]
        raise ModelError(written_outside(changed or ["a tensor that came or went"]))


def check_kept(name: str, thing: object) -> None:
    """Refuse a scheduler that takes a metric: with raw losses, it decides by data without noise. Raises ModelError."""
    step = getattr(thing, "step", None)
    takes: tuple[str, ...] = ()
    with suppress(TypeError, ValueError):
        takes = tuple(inspect.signature(step).parameters) if callable(step) else ()
    if isinstance(thing, torch.optim.lr_scheduler.ReduceLROnPlateau) or any(word in takes for word in METRICS):
        raise ModelError(
            f"{name} ({type(thing).__name__}) takes a metric at each step. Raw losses are not private, so a learning "
            "rate that follows them tells of records what no noise hides. Use a schedule that is fixed beforehand, "
            "e.g. CosineAnnealingLR(optimizer, plan.steps). See: "
            + docs_page("pitfalls", "raw-losses-that-steer-training")
        )


#: Arguments of a scheduler's step that stand for a measured value.
METRICS = ("metrics", "metric", "loss", "losses", "val_loss", "score")


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[nn.Parameter]:
    """The parameters to be trained, in the optimizer's order. Raises ModelError for what cannot be trained."""
    if "DPOptimizer" in {kind.__name__ for kind in type(optimizer).__mro__}:
        raise ModelError(
            f"Opacus' {type(optimizer).__name__} arrived, which clips and adds noise by itself. Pass the optimizer "
            "that it was made of (optimizer.original_optimizer)."
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ModelError(_not_an_optimizer(optimizer))
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError("LBFGS looks at the data several times per step. Use an optimizer that takes one gradient.")
    trained = trainable(optimizer)
    if not trained:
        raise ModelError("The optimizer holds no parameter that requires a gradient, so there is nothing to train.")
    if not all(p.is_floating_point() for p in trained):
        raise ModelError("Only real floating-point parameters can be trained; a complex one arrived. Split it in two.")
    if not {id(p) for p in trained} & {id(p) for p in model.parameters()}:
        raise ModelError("The optimizer holds none of the model's parameters. Build it from model.parameters().")
    return trained


def _not_an_optimizer(arrived: object) -> str:
    """The lesson for a wrapper of an optimizer, for several, and for what is none."""
    kind = type(arrived).__name__
    for name in ("optimizer", "original_optimizer", "base_optimizer", "optim", "_optimizer"):
        if isinstance(getattr(arrived, name, None), torch.optim.Optimizer):
            return (
                f"A {kind} arrived, which wraps an optimizer. Pass the optimizer itself (.{name}); scaling, "
                "accumulation and synchronisation are done by make_private."
            )
    if isinstance(arrived, list | tuple | dict):
        return (
            f"A {kind} of {len(arrived)} optimizers arrived. One optimizer is needed; give it groups of parameters "
            "with settings of their own, e.g. SGD([{'params': body}, {'params': head, 'lr': 0.1}], lr=0.01)."
        )
    return f"A {kind} arrived in place of an optimizer. Pass one of torch.optim, e.g. SGD(model.parameters(), lr=0.1)."


def trainable(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The optimizer's parameters that require a gradient, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@dataclass(frozen=True)
class Trained:
    """Which parameters are trained, by identity, in the optimizer's order, and how many of them are the model's own."""

    ids: tuple[int, ...]
    in_model: int

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], model: nn.Module) -> Trained:
        held = {id(p) for p in model.parameters()}
        return cls(tuple(map(id, parameters)), sum(id(p) in held for p in parameters))

    def check(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Refuse other parameters than at the start: they would be trained without noise, or not at all."""
        now = Trained.of(trainable(optimizer), model)
        strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in set(self.ids)]
        if now != self or any(p.grad is not None for p in strangers):
            raise ModelError(
                "The trained parameters changed since make_private: some were added, frozen, thawed or replaced (as "
                "load_state_dict(assign=True) does). Settle them before make_private."
            )


def machine(device: torch.device) -> dict[str, Any]:
    """What of machine and libraries may change the last bits of a sum."""
    on_gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {on_gpu}",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "precision": f"{in_use()} {torch.are_deterministic_algorithms_enabled()}",
    }


def check_whole(model: nn.Module) -> None:
    """Refuse wrappers that average gradients, or keep only a part of each parameter, before anything is clipped."""
    for module in model.modules():
        name = type(module).__name__
        if name in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise ModelError(
                f"A model wrapped in {name} arrived, which averages raw gradients over processes. Pass the model "
                "itself (wrapped.module), on every rank: clipped sums are added up here."
            )
        if name == "OptimizedModule":
            raise ModelError(
                "A model from torch.compile arrived, whose backward pass is one sealed function. Pass the model "
                "itself; fit compiles with performance=Performance(compile=True)."
            )
        hooks = (*module._forward_hooks.values(), *(module._backward_hooks or {}).values())
        if name.startswith("GradSampleModule") or any(_is_of_opacus(hook) for hook in hooks):
            raise ModelError(
                "A model with Opacus' hooks arrived (GradSampleModule), which collect gradients that nobody fetches "
                "here. Call model.remove_hooks() on what Opacus returned, then pass the model itself (model._module), "
                "and optimizer.original_optimizer."
            )
    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        raise ModelError(
            "The model's parameters are sharded (fully_shard), so no process sees a record's whole gradient, whose "
            "norm is to be clipped. Pass a model that is whole on every rank."
        )


def _is_of_opacus(hook: object) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("opacus.")


def refuse_step() -> None:
    """What an optimizer.step() called by hand runs into."""
    raise CallOrderError(
        "optimizer.step() was called outside private.step(), which would apply a gradient without clipping and "
        "noise. Call private.step() instead; it updates on the last chunk of each draw. (If an earlier make_private "
        "holds this optimizer, close it first.)"
    )
