"""The losses of transformers' models, one per record.

A model of transformers averages its loss over all records, or over all tokens, of a batch. Here a record's loss is
averaged over its own labels alone: with one label per record this is the same, with one per token a short text counts
as much as a long one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ModelError

#: The places that transformers' losses leave out.
IGNORED = -100

#: Names of inputs that are labels, and are not passed to the model.
LABELS = ("labels", "start_positions", "end_positions")

#: Methods of peft that add a term to the loss.
_OWN_TERMS = {
    "CPT": "peft's context-aware prompt tuning (CPT) weights the tokens of its prompt by a loss of its own",
    "ADALORA": "peft's AdaLoRA adds a penalty on its weights to the loss, and moves its ranks by gradients",
}

Labels = Mapping[str, Tensor]
Loss = Callable[[Any, Any, Labels, float], Tensor]


def per_record_loss(model: nn.Module, outputs: Any, labels: Labels, smoothing: float = 0.0) -> Tensor:
    """(batch,) losses, one per record, as the model would compute them of each record alone.

    model      a model of transformers, or of peft around one; its class says which loss it has
    outputs    what the model returned for the batch, with `logits`
    labels     {"labels": …}, or {"start_positions": …, "end_positions": …}
    smoothing  label smoothing, from 0 to 1; as in transformers' LabelSmoother

    Raises ModelError for a class whose loss is not known, or for a batch without labels.
    """
    get_base_model: Any = getattr(model, "get_base_model", None)  # of peft
    inner = model if get_base_model is None else get_base_model()
    return _loss_of(inner)(inner.config, outputs, _behind_prompt(model, outputs, labels), smoothing)


def _behind_prompt(model: Any, outputs: Any, labels: Labels) -> Labels:
    """The labels, with those that are left out for the virtual tokens which peft puts before each text."""
    config: Any = getattr(model, "active_peft_config", None)
    own = labels.get("labels")
    for kind, why in _OWN_TERMS.items():
        if str(getattr(config, "peft_type", "")).endswith(kind):
            raise ModelError(f"{why}, which is no record's. Use prompt tuning, p-tuning, prefix tuning or LoRA.")
    if own is None or own.ndim != 2 or not getattr(config, "is_prompt_learning", False):
        return labels
    if outputs.logits.shape[1] != own.shape[1] + config.num_virtual_tokens:
        return labels  # no logits for the prompt, as in prefix tuning
    return {**labels, "labels": F.pad(own, (config.num_virtual_tokens, 0), value=IGNORED)}


def _loss_of(model: nn.Module) -> Loss:
    """Of this class. A class outside transformers may compute any loss under any name."""
    name = type(model).__name__
    if type(model).__module__.startswith("transformers."):
        for suffixes, loss in _LOSSES.items():
            if name.endswith(suffixes):
                _refuse_more_terms(model)
                return loss
    raise ModelError(
        f"The loss of {name} for a single record is not known. Pass compute_loss_func=f with f(outputs, labels) -> "
        "(batch,), one loss per record, or override record_losses(model, inputs)."
    )


def _refuse_more_terms(model: nn.Module) -> None:
    if getattr(model.config, "output_router_logits", False):
        raise ModelError(
            "The model adds a loss that balances its experts over the whole batch, which mixes records. Set "
            "model.config.output_router_logits = False."
        )


def _labels(labels: Labels) -> Tensor:
    if "labels" not in labels:
        raise ModelError(
            "The batches have no labels. Add a column `label` or `labels` to the data set, or use a collator that "
            "makes labels."
        )
    return labels["labels"]


def _of_classes(config: Any, outputs: Any, labels: Labels, smoothing: float) -> Tensor:
    """One label per record: a class, a number, or several classes at once."""
    target, logits = _labels(labels), outputs.logits
    if config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1):
        return F.mse_loss(logits.flatten(1), target.reshape(len(target), -1), reduction="none").mean(1)
    if target.is_floating_point():
        return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)
    return _cross_entropy(logits, target.reshape(-1), smoothing)


def _of_choices(config: Any, outputs: Any, labels: Labels, smoothing: float) -> Tensor:
    return _cross_entropy(outputs.logits, _labels(labels).reshape(-1), smoothing)


def _of_tokens(config: Any, outputs: Any, labels: Labels, smoothing: float) -> Tensor:
    return _mean_over_own(outputs.logits, _labels(labels), smoothing)


def _of_next_tokens(config: Any, outputs: Any, labels: Labels, smoothing: float) -> Tensor:
    return _mean_over_own(outputs.logits[:, :-1], _labels(labels)[:, 1:], smoothing)


def _of_spans(config: Any, outputs: Any, labels: Labels, smoothing: float) -> Tensor:
    """Half the loss of the start and half the loss of the end; positions behind the text are left out."""
    if smoothing:
        raise ModelError("Label smoothing of question answering is not supported. Set label_smoothing_factor=0.")
    total = torch.zeros((), device=outputs.start_logits.device)
    for logits, name in ((outputs.start_logits, "start_positions"), (outputs.end_logits, "end_positions")):
        length = logits.shape[1]
        target = labels[name].reshape(-1).clamp(0, length)
        total = total + F.cross_entropy(logits, target, ignore_index=length, reduction="none")
    return total / 2


def _cross_entropy(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(logits.float(), target, reduction="none", label_smoothing=smoothing)


def _mean_over_own(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """(batch,) the mean over those of the record's (batch, length) labels that count; 0 if none does."""
    if logits.shape[:2] != target.shape:
        raise ModelError(
            f"Got logits of {logits.shape[1]} tokens and labels of {target.shape[1]} for each record. Pass "
            "compute_loss_func=f with f(outputs, labels) -> (batch,), one loss per record."
        )
    each = F.cross_entropy(
        logits.transpose(1, 2).float(), target, reduction="none", ignore_index=IGNORED, label_smoothing=smoothing
    )
    return each.sum(1) / (target != IGNORED).sum(1).clamp_min(1)


#: By the end of the class's name.
_LOSSES: dict[tuple[str, ...], Loss] = {
    ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification"): _of_classes,
    ("ForMultipleChoice",): _of_choices,
    ("ForTokenClassification", "ForMaskedLM", "ForConditionalGeneration"): _of_tokens,
    ("ForCausalLM", "LMHeadModel"): _of_next_tokens,
    ("ForQuestionAnswering",): _of_spans,
}
