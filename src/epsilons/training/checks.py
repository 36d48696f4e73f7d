"""What cannot be trained record by record, and data, budgets and plan that do not belong together.

Layers that mix records are refused by type where the type tells, because then the message can name the mend. What
types miss (losses, reshapes, home-made mixing) is found numerically: one record is exchanged, and no other
record's loss may move (`moved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.hooks import RemovableHandle

from ..budgets import Budgets
from ..errors import DataError, MixedRecords, ModelError, OutOfTurn, UnsupportedLayer
from ..planning import Plan
from ..planning.plans import SHARES

#: A loss that moved by more than this, relative to max(1, |loss|), was moved by another record.
TOUCHED = 1e-5


def groups_of(budgets: Budgets, plan: Plan, records: int) -> npt.NDArray[np.int64]:
    """(records,) each record's group in the plan. Raises DataError if data, budgets and plan do not fit."""
    if budgets.records != records:
        raise DataError(
            f"{budgets.records:,} budgets arrived for a data set of {records:,} records. One budget per record, in "
            "data-set order, is needed; for part of the data use budgets.subset(indices)."
        )
    if plan.adjacency != SHARES:
        same = np.array_equal(budgets.levels, plan.levels) and np.array_equal(budgets.delta, plan.delta)
        if plan.records != records or not same or not np.array_equal(budgets.counts, plan.counts):
            raise DataError(
                f"The plan was made for {plan.records:,} records in {len(plan.levels):,} groups and does not fit these "
                f"{records:,} budgets in {len(budgets.levels):,} groups. Plan again with these budgets."
            )
        return budgets.group
    place = {pair: g for g, pair in enumerate(zip(plan.levels.tolist(), plan.delta.tolist(), strict=True))}
    pairs = list(zip(budgets.levels.tolist(), budgets.delta.tolist(), strict=True))
    if any(pair not in place for pair in pairs):
        raise DataError(
            "Some records carry a budget that is not among the plan's declared shares. Declare every level that people "
            "could choose from, whether or not anyone did."
        )
    return np.array([place[pair] for pair in pairs], dtype=np.int64)[budgets.group]


def check_layers(model: nn.Module) -> None:
    """Refuse layers whose type says that they mix records, as the model stands now."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or not module.track_running_stats):
            raise UnsupportedLayer(
                f"{type(module).__name__} ({name or 'the model itself'}) mixes records in training, so no one's "
                "gradient "
                f"can be clipped alone. Swap it for GroupNorm, e.g. nn.GroupNorm(8, {module.num_features}), or "
                "freeze it "
                "with .eval()."
            )


def refuse_time_first(model: nn.Module, records: Callable[[], int]) -> list[RemovableHandle]:
    """Hooks that refuse recurrent and attention layers about to read the records as time steps.

    records: tells the size of the current chunk, 0 outside one.
    """

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        count = records()
        given = next((leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)), None)
        if count and given is not None and given.ndim == 3 and given.shape[0] == count != given.shape[1]:
            raise UnsupportedLayer(
                f"{type(module).__name__} expects time first, but an input of shape {tuple(given.shape)} with {count} "
                "records in front arrived: it would read the records as time steps and mix them. Build it with "
                "batch_first=True."
            )

    kinds = (nn.RNNBase, nn.MultiheadAttention)
    layers = [m for m in model.modules() if isinstance(m, kinds) and not m.batch_first]
    return [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]


def check_losses(losses: object, records: int) -> Tensor:
    """Refuse losses that are not one number per record of the chunk."""
    if not isinstance(losses, Tensor):
        raise ModelError(f"private.backward takes the tensor of per-record losses; a {type(losses).__name__} arrived.")
    if losses.ndim == 0:
        raise ModelError(
            "private.backward needs one loss per record, but a single number arrived: a mean or sum over the batch "
            'cannot be clipped record by record. Compute the loss with reduction="none".'
        )
    if losses.shape != (records,):
        raise ModelError(
            f"private.backward needs one loss per record, shape ({records},) for this chunk; shape "
            f"{tuple(losses.shape)} "
            "arrived. Reduce everything but the first dimension, e.g. losses.flatten(1).mean(1)."
        )
    if not losses.requires_grad:
        raise ModelError(
            "The losses do not depend on any trainable parameter. Compute them inside the loop, with gradients "
            "enabled, "
            "from the model that was made private."
        )
    return losses


def fingerprint(model: nn.Module) -> list[tuple[int, int]]:
    """Which tensors the model holds, and how often each was written to."""
    return [(id(t), t._version) for t in (*model.parameters(), *model.buffers())]


def check_unchanged(before: list[tuple[int, int]], model: nn.Module) -> None:
    """Refuse a forward pass that wrote to parameters or buffers: what it wrote was neither clipped nor noised."""
    if before != fingerprint(model):
        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        after = fingerprint(model)
        changed = [n for n, a, b in zip(names, before, after, strict=False) if a != b] or ["a buffer"]
        raise UnsupportedLayer(
            f"The forward pass changed {', '.join(changed[:3])}: values computed from the data enter the model without "
            "clipping or noise. Typical causes are running statistics, Embedding(max_norm=…) and spectral norm; "
            "replace "
            "or freeze that layer."
        )


def take(batch: Any, rows: Sequence[int], records: int) -> Any:
    """These records of a collated batch: the same structure, with every tensor and list of `records` items cut."""

    def is_listed(node: Any) -> bool:  # such as the texts of a chunk, which no tensor holds
        return isinstance(node, list) and len(node) == records and not any(isinstance(item, Tensor) for item in node)

    def cut(leaf: Any) -> Any:
        if is_listed(leaf):
            return [leaf[i] for i in rows]
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == records:
            return leaf[torch.as_tensor(rows, device=leaf.device)]
        return leaf

    return tree_map(cut, batch, is_leaf=is_listed)


def exchanged(batch: Any, records: int) -> tuple[Any, int] | None:
    """(the batch with one record replaced by a different one of it, which one), or None if all are the same."""
    if records < 2:
        return None
    tensors = [t for t in tree_flatten(batch)[0] if isinstance(t, Tensor) and t.ndim and len(t) == records]
    middle = records // 2  # so that mixing that runs forwards or backwards through the chunk both show
    for other in [*range(middle), *range(middle + 1, records)]:
        if any(not torch.equal(t[other], t[middle]) for t in tensors):
            rows = list(range(records))
            rows[middle] = other
            return take(batch, rows, records), middle
    return None


def check_untouched(before: Tensor, after: Tensor, record: int) -> None:
    """Raise MixedRecords if exchanging `record` moved another record's loss."""
    moved = ~torch.isclose(before, after, rtol=TOUCHED, atol=TOUCHED, equal_nan=True)
    moved[record] = False
    if moved.any():
        raise MixedRecords(
            "Exchanging one record of a batch moved the losses of others, so no one's gradient can be clipped alone. "
            "Usual causes: a layer or loss that looks across the batch (normalisation, contrastive losses, MixUp, "
            'reduction="mean"), a recurrent layer without batch_first=True, a reshape that runs records together, or '
            "random numbers drawn in the loop from another source than torch."
        )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[nn.Parameter]:
    """The parameters to be trained, in the optimizer's order. Raises ModelError if there is nothing to train."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [p for p in held if p.requires_grad]
    if not trained:
        raise ModelError("The optimizer holds no parameter that requires a gradient, so there is nothing to train.")
    if not {id(p) for p in trained} & {id(p) for p in model.parameters()}:
        raise ModelError("The optimizer holds none of the model's parameters. Build it from model.parameters().")
    return trained


def check_strangers(optimizer: torch.optim.Optimizer, known: Iterable[int]) -> None:
    """Refuse gradients in the optimizer that were not noised here."""
    known = set(known)
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in known and p.grad is not None:
                raise OutOfTurn(
                    "The optimizer holds a gradient for a parameter that was added after make_private, so it was "
                    "neither clipped nor noised. Add all parameters before make_private."
                )


def refuse_step(*_: object) -> None:
    """What an optimizer.step() called by hand runs into."""
    raise OutOfTurn(
        "optimizer.step() was called by hand, which would apply a gradient without clipping and noise. Call "
        "private.step() instead; it updates on the last chunk of each draw."
    )
