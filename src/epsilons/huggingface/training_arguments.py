"""TrainingArguments that a private run cannot follow, and where its folder may be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import InputError
from ..training.datasets import shares_records

#: max_grad_norm of TrainingArguments, if the caller sets none.
DEFAULT_NORM = 1.0


_ONE_PROCESS = (
    "it averages raw gradients, or holds parts of parameters. Train in one process on one device; for several see "
    "epsilons.make_private."
)
_SMALLER = "Lower per_device_train_batch_size, and raise gradient_accumulation_steps by the same factor."

#: The column that TRL adds to rows that it has packed.
PACKED = "seq_lengths"

#: Settings that are refused, as the caller knows them: why, and what to do instead.
REFUSALS = {
    "fp16": "its GradScaler rescales losses by a factor that depends on the data. Use bf16=True, which needs no "
    "scaling.",
    "deepspeed": _ONE_PROCESS,
    "fsdp": _ONE_PROCESS,
    "several processes": _ONE_PROCESS,
    "several devices in one process (n_gpu > 1)": f"{_ONE_PROCESS} CUDA_VISIBLE_DEVICES=0 chooses one.",
    "parallelism_config": _ONE_PROCESS,
    "max_grad_norm": "it clips the mean gradient of a batch, which bounds no record. Set clip_norm= of PrivateTrainer, "
    "which clips each record's, and max_grad_norm=0.",
    "auto_find_batch_size": "it repeats training at other batch sizes, which spends the budgets again. " + _SMALLER,
    "train_sampling_strategy": "who is drawn follows from the budgets, by a coin for each record. Leave it out.",
    "neftune_noise_alpha": "the size of its noise depends on the longest record of the batch, which mixes records. "
    "Leave it out.",
    "gradient_checkpointing": "layers that are computed again draw their dropout outside of the batch-independence "
    "check. " + _SMALLER,
    "torch_compile": "a compiled model has no layers whose gradients can be clipped by record. Leave it out.",
    "use_liger_kernel": "its fused losses mix records, and give no outputs by record. Leave it out.",
    "include_num_input_tokens_seen": "the number of tokens shows who was drawn, without noise. Leave it out.",
    "skip_memory_metrics=False": "peaks of memory show how many records were drawn, without noise. Leave it out.",
    "this optimizer (optim)": "it updates during the backward pass, or keeps a second copy of the weights. Use an "
    'ordinary one, such as "adamw_torch".',
    "this schedule (lr_scheduler_type)": "it follows a metric, so it cannot be replayed. Use one that follows the "
    "number of steps.",
    "enable_jit_checkpoint": "it saves in the middle of a draw. An interrupted run resumes from private_dir in any "
    "case.",
}


def _names(value: object, *parts: str) -> bool:
    return any(part in str(value).lower() for part in parts)


#: Whether a setting is set: those that are no argument of this name, or are refused at some values only.
_IS_SET: dict[str, Callable[[Any], bool]] = {
    "several processes": lambda args: args.world_size > 1,
    "several devices in one process (n_gpu > 1)": lambda args: args.n_gpu > 1,
    "parallelism_config": lambda args: args.parallelism_config is not None,
    "max_grad_norm": lambda args: args.max_grad_norm not in (None, 0, DEFAULT_NORM),
    "train_sampling_strategy": lambda args: args.train_sampling_strategy != "random",
    "neftune_noise_alpha": lambda args: args.neftune_noise_alpha is not None,
    "gradient_checkpointing": lambda args: (
        args.gradient_checkpointing or getattr(args, "activation_checkpointing", False)
    ),
    "include_num_input_tokens_seen": lambda args: args.include_num_input_tokens_seen not in ("no", False),
    "skip_memory_metrics=False": lambda args: not args.skip_memory_metrics,
    "this optimizer (optim)": lambda args: _names(args.optim, "lomo", "layerwise", "schedule_free"),
    "this schedule (lr_scheduler_type)": lambda args: _names(args.lr_scheduler_type, "plateau", "greedy"),
}


def refuse(name: str) -> NoReturn:
    """Raise InputError for a setting of REFUSALS."""
    raise InputError(f"PrivateTrainer does not support {name}: {REFUSALS[name]}")


def checked(args: Any) -> Any:
    """A copy of TrainingArguments, by which transformers' Trainer makes one step per draw.

    Raises InputError for settings under which something else would scale, split, sample or apply gradients.
    """
    if args is None:
        raise InputError("PrivateTrainer needs args=TrainingArguments(…): the length of training is fixed beforehand.")
    for name in REFUSALS:
        if _IS_SET[name](args) if name in _IS_SET else getattr(args, name):
            refuse(name)
    own = copy.copy(args)
    own.gradient_accumulation_steps, own.max_grad_norm, own.ignore_data_skip = 1, 0.0, True
    return own


def check_model(model: Any) -> None:
    """Raises InputError for a model that was changed as a refused argument changes it."""
    if getattr(model, "is_gradient_checkpointing", False):
        refuse("gradient_checkpointing")
    if isinstance(model, torch._dynamo.OptimizedModule):
        refuse("torch_compile")


def check_data(train: Any) -> None:
    """Raises InputError for data sets that cannot be drawn from."""
    if train is None:
        raise InputError("PrivateTrainer needs train_dataset=, the records that the budgets belong to.")
    if not hasattr(train, "__getitem__") or not hasattr(train, "__len__"):
        raise InputError(
            f"train_dataset is a {type(train).__name__}, which cannot be read by index. Each record is drawn by its "
            "own coin, which needs a map-style data set, with __len__ and __getitem__."
        )
    if PACKED in (getattr(train, "column_names", None) or ()):
        raise InputError(
            f"train_dataset has a column {PACKED!r}: its rows are packed from several texts, which may be of different "
            "persons. Leave packing=True out of SFTConfig."
        )


class Evaluations:
    """Whether evaluations are on training records, which is allowed with log_private_loss only, and may choose nothing.

    train    the training data
    columns  of budgets and persons, which both may have
    """

    def __init__(self, train: Any, columns: Sequence[str], logs_loss: bool) -> None:
        self._train, self._columns, self._logs_loss = train, columns, logs_loss
        self._seen: list[Any] = []
        self._are_of_training = False

    def check(self, data: Any, chooses: bool) -> None:
        """Raise InputError for scores of training records that get to logs, or decide what is released.

        data     a data set, a dict of several, or None
        chooses  whether scores choose weights or the end of training
        """
        for one in data.values() if isinstance(data, dict) else [data]:
            if one is None or any(one is known for known in self._seen):
                continue
            self._seen.append(one)
            self._are_of_training |= one is self._train or shares_records(self._train, one, self._columns)
        if self._are_of_training and not self._logs_loss:
            raise InputError(
                "The evaluation data are train_dataset, or hold records of it: their scores would be written to the "
                "logs without noise. Pass records that have no budget, or log_private_loss=True if the logs stay "
                "private."
            )
        if self._are_of_training and chooses:
            raise InputError(
                "The evaluation data hold records of train_dataset, and their scores choose the weights or the end of "
                'training (load_best_model_at_end, metric_for_best_model, save_strategy="best", '
                "EarlyStoppingCallback): raw scores of private records would decide what is released. Choose by "
                "records that have no budget."
            )


def folder(given: str | Path | None, output_dir: str | Path) -> Path:
    """The folder of the run: `given`, or <output_dir>-private.

    It holds the key of the noise, and who has which budget. Raises InputError for a folder within output_dir, which
    push_to_hub uploads.
    """
    public = Path(output_dir).resolve()
    private = public.with_name(f"{public.name}-private") if given is None else Path(given).resolve()
    if private == public or public in private.parents:
        raise InputError(
            f"private_dir={str(given)!r} is within output_dir={str(output_dir)!r}, which push_to_hub uploads. The "
            "folder holds the key of the noise, and which record has which budget: choose one outside of output_dir."
        )
    return private
