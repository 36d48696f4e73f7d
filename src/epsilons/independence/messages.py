"""What is refused, and what is said then: the cause, its line, and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from ..errors import BatchDependenceError, UnsupportedLayerError
from .states import Mixed

if TYPE_CHECKING:
    from .check import Collated
    from .watch import Read, Step

WAY_OUT = "Or set Performance(max_physical_batch=1), which computes every record alone."

_ALTERED = {
    "exchanged": "Exchanging some records of a physical batch moved the {} of others",
    "resized": "Leaving out some records of a physical batch, or adding copies, moved the {} of others",
    "copied": "Adding copies of the only record of a physical batch moved its {}",
    "alone": "Leaving out all others of a physical batch moved the {} of the one that was left",
    "earlier": "Setting numbers in attributes of modules to what they were before in a draw moved the {} of records",
}


def mixed_losses(losses: Mixed, model: nn.Module) -> BatchDependenceError:
    operator = losses.cause.operator
    advice = _time_first(model) or (
        "Use a norm within each record, e.g. nn.GroupNorm."
        if "batch_norm" in operator
        else "Compute along a record's own dimensions, or with constants fixed beforehand."
    )
    return BatchDependenceError(
        f"The losses of a physical batch depend on one another: {losses.cause} computes across records, so no "
        f"gradient can be clipped alone. {advice} {WAY_OUT}"
    )


def unproven_padding(shape: tuple[int, ...]) -> BatchDependenceError:
    return BatchDependenceError(
        f"The collate function pads records to the longest of the batch, and an input of the model, shape {shape}, is "
        "computed in the loop. So it cannot be seen whether the model reads the padding. Give the model tensors of the "
        "batch as they are, and compute masks in the model or the collate function; or pad all records to one length."
    )


def unproven(cause: object) -> BatchDependenceError:
    return BatchDependenceError(
        f"It cannot be proven that the loss keeps the records of a batch apart: {cause} moves or joins records in a "
        "way that is not known. Compute each record's loss from its own outputs, or write a loop of your own with "
        "epsilons.make_private, which may try more."
    )


def not_repeated(step: Step, difference: str, one: int, other: int) -> BatchDependenceError:
    where = f" at {step.line}" if step.line else ""
    return BatchDependenceError(
        f"The loop does not compute the same of every batch: the operator {step.operator}{where} {difference} ({one} "
        f"and {other} records). So the loss may depend on the number of records, or on values of several that Python "
        "read. Both change with every record. The model is as it was before. Use a mean over the records, and "
        "constants; a weight that follows a schedule belongs into nn.Parameter(…, requires_grad=False)."
    )


def other_batch() -> BatchDependenceError:
    return BatchDependenceError(
        "The losses do not depend on the batch that the loop was handed, or depend on the batch before, which they did "
        "not in checks (private.is_check). Compute the losses of every batch from that batch alone, as in checks."
    )


def unordered_losses(model: nn.Module) -> BatchDependenceError:
    return BatchDependenceError(
        "The losses are not in the order of the records in the physical batch, so each would be clipped by "
        f"another record's clip norm. {_time_first(model) or 'Return one loss per record, in order.'} {WAY_OUT}"
    )


def depends_on_number(step: Step, difference: str, one: int, other: int) -> BatchDependenceError:
    where = f" at {step.line}" if step.line else ""
    return BatchDependenceError(
        f"The losses depend on the number of records in the physical batch: the operator {step.operator}{where} "
        f"{difference} ({one} and {other} records). That number changes with every record, and is not public. Use "
        "a constant, e.g. the plan's expected batch; private.step() takes the average."
    )


def decision(read: Read) -> BatchDependenceError:
    if isinstance(read.state, Mixed) and read.state.cause.operator == "size":
        return BatchDependenceError(
            f"The code at {read.line} decides by the number of records in the batch what is computed next, and that "
            f"number changes with every record. {WAY_OUT}"
        )
    if isinstance(read.state, Mixed) and read.state.cause.operator == "random":
        return BatchDependenceError(
            f"The code at {read.line} decides by a random number what is computed for the whole batch, so only one "
            f"side of it was seen. Decide for each record, with torch.where, or in the data set. {WAY_OUT}"
        )
    return BatchDependenceError(
        f"The code at {read.line} decides by values of several records what is computed next, so one "
        "record can move the losses of others, and this check saw one outcome only. Decide per record "
        f"with torch.where, or after the backward pass. {WAY_OUT}"
    )


def moved(what: str, kind: str, collated: Collated | None, model: nn.Module) -> BatchDependenceError:
    """Losses or gradients of the kept records differ between two forms. collated: what may be its cause."""
    same = "Computing the same records of a physical batch again moved the {} of some"
    start = f"{_ALTERED.get(kind, same).format(what)}, so no gradient can be clipped alone."
    if collated is not None and collated.lengths is not None:
        return BatchDependenceError(
            f"{start} Your collate function {collated.name} pads {collated.lengths[0]} → {collated.lengths[1]}, and "
            "the model or the loss reads the padding: mask it (attention_mask, packed sequences, a mean over the "
            f"record's own length), or pad all records to one length. {WAY_OUT}"
        )
    if collated is not None and collated.is_moved:
        return collate(collated.name, "changes")
    if kind == "earlier":
        return BatchDependenceError(
            f"{start} The loop changes them with every batch, such as a counter, and how many batches a draw has is "
            "private. Set them in a function that is given to private.on_update, from private.updates."
        )
    if kind == "as it is":
        return BatchDependenceError(
            f"{start} Usual causes: state that a forward pass leaves for the next one, or random numbers from "
            "another source than torch."
        )
    causes = _time_first(model) or (
        "Usual causes: a layer, loss or collate function that combines records (normalisation, MixUp, division by "
        "their number, unmasked padding) or reads them as time (batch_first=True), a reshape that joins records, "
        f"state that a forward pass leaves, or random numbers from another source than torch. {WAY_OUT}"
    )
    return BatchDependenceError(f"{start} {causes}")


_COLLATE = {
    "computes": "computes across records, by {}, so no gradient can be clipped alone. Compute with one record at a "
    "time, or with constants fixed beforehand.",
    "decides": "decides by values of several records what it does with all, at {}, so one record can move the losses "
    "of others. Decide for each record alone.",
    "is not repeatable": "makes another batch of the same records when it is called again, so it cannot be seen what "
    "one record does to others. Keep no state between calls, and draw from the global generators of torch, NumPy or "
    "random: they are seeded for every physical batch.",
    "changes": "gives a record other values, or another place, when it is collated with other records. Records must "
    "not meet there, and losses must be in the order of the records: each is clipped by its own clip norm. Normalise "
    "and mix nothing across records, and sort inside the model, or sort the losses back.",
}


def collate(name: str, problem: str, where: object = "") -> BatchDependenceError:
    """name: of the caller's function; problem: a name in _COLLATE"""
    return BatchDependenceError(f"Your collate function {name} {_COLLATE[problem].format(where)} {WAY_OUT}")


def writes(names: Sequence[str]) -> UnsupportedLayerError:
    """A forward pass wrote to these tensors of its model."""
    return UnsupportedLayerError(
        f"The forward pass changed {', '.join(names[:3])}: values computed from the data enter the model without "
        "clipping or noise. Typical causes are running statistics, Embedding(max_norm=…) and spectral norm; replace "
        "or freeze that layer."
    )


def _time_first(model: nn.Module) -> str:
    suspects = [
        f"{name or 'the model'} ({type(module).__name__} without batch_first=True)"
        for name, module in model.named_modules()
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first
    ]
    return f"Look first at {', '.join(suspects[:3])}: it reads the first dimension as time." if suspects else ""
