"""Checks of model and optimizer before training: what cannot be trained record by record.

Layers that mix records are refused by their type where it shows, because then the message can name the replacement.
What types do not show (losses, reshapes, custom mixing) is found by trying: see `independence`.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from ..clipping.summing import in_use
from ..core.modules import named_modules, tensors_of
from ..draws.randomness import sample_hash
from ..errors import CallOrderError, ModelError, UnsupportedLayerError


def check_whole(model: nn.Module) -> None:
    """Refuse wrappers that average gradients before clipping, and wrappers that keep a part of each parameter."""
    for module in model.modules():
        name = type(module).__name__
        if name in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise ModelError(
                f"Got a model wrapped in {name}, which averages raw gradients over processes. Pass the model itself "
                "(wrapped.module), on every rank: make_private adds up the clipped sums."
            )
        if name == "OptimizedModule":
            raise ModelError(
                "Got a model from torch.compile, which hides the layers in the backward pass. Pass the model itself."
            )
        hooks = (*module._forward_hooks.values(), *(module._backward_hooks or {}).values())
        if name.startswith("GradSampleModule") or any(_is_of_opacus(hook) for hook in hooks):
            raise ModelError(
                "Got a model with Opacus' hooks (GradSampleModule), which collect gradients that are never used "
                "here. Call model.remove_hooks() on what Opacus returned, then pass the model itself (model._module), "
                "and optimizer.original_optimizer."
            )


def check_tensors(model: nn.Module) -> None:
    """Refuse parameters and buffers without values, and sparse ones."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ModelError(
                f"{name} has no values yet: its layer is lazy. Call the model once, then build the optimizer."
            )
        if tensor.layout is not torch.strided:
            raise ModelError(f"{name} is a sparse tensor, got layout {tensor.layout}. Register {name}.to_dense().")


def _is_of_opacus(hook: object) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("opacus.")


def check_layers(model: nn.Module) -> None:
    """Refuse layers that mix records by their type, in the modes that the model is in now."""
    for name, module in named_modules(model):
        if problem := _mixing(module):
            where = name.removesuffix(".") or "the model itself"
            raise UnsupportedLayerError(f"{type(module).__name__} ({where}) {problem}")


def _mixing(module: nn.Module) -> str:
    """How this layer mixes records, and what to do; "" if its type does not."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or not module.track_running_stats):
        return (
            "mixes records in training, so no record's gradient can be clipped alone. "
            "epsilons.mend(model) replaces it in place by GroupNorm, and "
            'epsilons.mend(model, batch_norm="freeze") by constants, for statistics of public data.'
        )
    if module.training and keeps_statistics(module):
        return (
            "collects running statistics of records, without noise. epsilons.mend(model) replaces it in place by "
            "one with track_running_stats=False."
        )
    if module.training and is_batchwise_depth(module):
        return (
            "drops a layer for all records of a batch at once, so the sum depends on which records share "
            'a batch. Use mode="row", which epsilons.mend(model) sets in place.'
        )
    return ""


def keeps_statistics(module: nn.Module) -> bool:
    """True for an InstanceNorm with running statistics: in training it normalises each record, and adds it to them."""
    return isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats


def is_batchwise_depth(module: nn.Module) -> bool:
    """True for torchvision's StochasticDepth, and its copies, where one coin decides for a whole batch."""
    return type(module).__name__ == "StochasticDepth" and getattr(module, "mode", "") == "batch"


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[nn.Parameter]:
    """The parameters to be trained, in the optimizer's order. Raises ModelError for what cannot be trained."""
    if "DPOptimizer" in {kind.__name__ for kind in type(optimizer).__mro__}:
        raise ModelError(
            f"Got Opacus' {type(optimizer).__name__}, which clips and adds noise. Pass the optimizer that it wraps "
            "(optimizer.original_optimizer)."
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ModelError(_not_an_optimizer(optimizer))
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError("LBFGS looks at the data several times per step. Use an optimizer that takes one gradient.")
    trained = trainable(optimizer)
    if not trained:
        raise ModelError("The optimizer holds no parameter that requires a gradient, so there is nothing to train.")
    if not all(p.is_floating_point() for p in trained):
        raise ModelError("Only real floating-point parameters can be trained, got a complex one. Split it in two.")
    if not {id(p) for p in trained} & {id(p) for p in model.parameters()}:
        raise ModelError("The optimizer holds none of the model's parameters. Build it from model.parameters().")
    return trained


def _not_an_optimizer(value: object) -> str:
    """The message for a wrapper of an optimizer, for several optimizers, and for anything else."""
    kind = type(value).__name__
    for name in ("optimizer", "original_optimizer", "base_optimizer", "optim", "_optimizer"):
        if isinstance(getattr(value, name, None), torch.optim.Optimizer):
            return (
                f"Got a {kind}, which wraps an optimizer. Pass the optimizer itself (.{name}); make_private does "
                "scaling, accumulation and synchronisation."
            )
    if isinstance(value, list | tuple | dict):
        return (
            f"Got a {kind} of {len(value)} optimizers. Pass one optimizer, with several groups of parameters, e.g. "
            "SGD([{'params': body}, {'params': head, 'lr': 0.1}], lr=0.01)."
        )
    return f"Got a {kind} in place of an optimizer. Pass one of torch.optim, e.g. SGD(model.parameters(), lr=0.1)."


def trainable(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The optimizer's parameters that require a gradient, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@dataclass(frozen=True)
class Trained:
    """The ids of the trained parameters, in the optimizer's order, and how many of them are in the model."""

    ids: tuple[int, ...]
    in_model: int

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], model: nn.Module) -> Trained:
        held = set(map(id, tensors_of(model)))
        return cls(tuple(map(id, parameters)), sum(id(p) in held for p in parameters))

    def check(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Raise ModelError for other parameters than at the start: they would get no noise, or no training."""
        now = Trained.of(trainable(optimizer), model)
        own = set(self.ids)
        others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
        if now != self or any(p.grad is not None for p in others):
            raise ModelError(
                "The trained parameters changed since make_private: some were added, frozen, thawed or replaced (as "
                "load_state_dict(assign=True) does). Change them before make_private."
            )


def refuse_step() -> None:
    """Raise CallOrderError: optimizer.step() was called by hand."""
    raise CallOrderError(
        "optimizer.step() was called outside private.step(), which would apply a gradient without clipping and "
        "noise. Call private.step() instead; it updates on the last physical batch of each draw. (If an earlier "
        "make_private holds this optimizer, close it first.)"
    )


class NoScaler:
    """torch's GradScaler asks for the truth of this attribute of an optimizer before it steps.

    Without it, a scaler ends with "No inf checks were recorded": no gradient is in p.grad before private.step.
    """

    def __bool__(self) -> NoReturn:
        raise CallOrderError(
            "A GradScaler was asked to step. It scales losses for 16-bit gradients of a whole batch; here each "
            "gradient is clipped by itself, and a scaled loss makes all of them too long. Leave the scaler out: "
            "private.backward(losses), then private.step(). With torch.autocast use dtype=torch.bfloat16."
        )


#: Arguments of a scheduler's step that take a measured value.
METRICS = ("metrics", "metric", "loss", "losses", "val_loss", "score")


def check_kept(name: str, thing: object) -> None:
    """Raise ModelError for a scheduler that takes a metric: with raw losses it would leak data without noise."""
    takes: Collection[str] = ()
    with suppress(TypeError, ValueError):  # it has no step, or one without a signature
        takes = inspect.signature(getattr(thing, "step", None)).parameters  # type: ignore[arg-type]
    if isinstance(thing, torch.optim.lr_scheduler.ReduceLROnPlateau) or any(word in takes for word in METRICS):
        raise ModelError(
            f"{name} ({type(thing).__name__}) takes a metric at each step. Raw losses are not private, and a learning "
            "rate that follows them reveals records without noise. Use a schedule that is fixed beforehand, "
            "e.g. CosineAnnealingLR(optimizer, plan.steps). See: epsilons docs concepts"
        )


def machine(device: torch.device, source: str) -> dict[str, Any]:
    """The properties of machine and libraries that may change the last bits of a sum, or of noise from this source."""
    on_gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {on_gpu}",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "noise": sample_hash(source),
        "threads": torch.get_num_threads(),
        "device": device.type,
        "precision": f"{in_use()} {torch.are_deterministic_algorithms_enabled()}",
    }
