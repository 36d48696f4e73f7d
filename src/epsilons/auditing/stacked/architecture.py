"""Which models and optimizers can be trained as a stack, and the layers of such a model.

Everything else is refused, with a reason: a stack does not call the model, so it would leave out what it does not know.

To add an activation: a function (module) -> Activation, and a line in ACTIVATIONS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...core.mechanism import IntArray
from ...draws.randomness import Randomness
from ...errors import DataError, InputError, ModelError
from ...planning import Plan
from ...training.fitting.losses import MakeOptimizer


@dataclass(frozen=True)
class Activation:
    """An elementwise function.

    forward   values -> values
    backward  (gradient at the output, values before, values after) -> gradient at the input
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]


def _tanh(_: nn.Module) -> Activation:
    return Activation(torch.tanh, lambda gradient, _, after: torch.ops.aten.tanh_backward(gradient, after))


def _relu(_: nn.Module) -> Activation:
    return Activation(torch.relu, lambda gradient, _, after: torch.ops.aten.threshold_backward(gradient, after, 0))


def _gelu(module: nn.Module) -> Activation:
    kind = str(module.approximate)

    def backward(gradient: Tensor, before: Tensor, _: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.gelu_backward(gradient, before, approximate=kind)
        return found

    return Activation(lambda values: nn.functional.gelu(values, approximate=kind), backward)


#: After the last layer.
IDENTITY = Activation(lambda values: values, lambda gradient, *_: gradient)

ACTIVATIONS: dict[type[nn.Module], Callable[[nn.Module], Activation]] = {
    nn.Tanh: _tanh,
    nn.ReLU: _relu,
    nn.GELU: _gelu,
}

#: Optimizers that treat every element alone, so that stacked parameters are updated as each model's own would be.
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer and the activation after it, of one model or stacked.

    weight      ([models,] outputs, inputs)
    bias        ([models,] outputs), or None
    activation  IDENTITY after the last layer
    """

    weight: Tensor
    bias: Tensor | None
    activation: Activation = IDENTITY

    @property
    def parameters(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def outputs(self, inputs: Tensor) -> Tensor:
        """(models, outputs, records) before the activation; inputs (models, inputs, records)."""
        if self.bias is None:
            return torch.bmm(self.weight, inputs)
        return torch.baddbmm(self.bias[..., None], self.weight, inputs)

    def with_parameters(self, values: Iterator[Tensor]) -> Layer:
        """The same layer with the next of these values as weight, and as bias if it has one."""
        return replace(self, weight=next(values), bias=None if self.bias is None else next(values))

    def of(self, models: slice) -> Layer:
        """The same layer of some of the stacked models."""
        return replace(self, weight=self.weight[models], bias=None if self.bias is None else self.bias[models])


def unstackable(model: nn.Module, loss: str = "cross_entropy", optimizer: MakeOptimizer | None = None) -> str | None:
    """Why the model cannot be trained as a stack, in one sentence; None if it can.

    >>> unstackable(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))) is None
    True
    >>> unstackable(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2)))
    'A stack holds Flatten, Linear, Tanh, ReLU and GELU only; the model has a Dropout.'
    """
    if loss != "cross_entropy":
        return f'A stack is trained with loss="cross_entropy" only; got {loss!r}.'
    reasons = [_changed(model), _other_order(model), _parameters(model)]
    first = next((reason for reason in reasons if reason), None)
    return first or (None if optimizer is None else _optimizer(model, optimizer))


def flattens(model: nn.Module) -> bool:
    """Whether the model's first module is a Flatten."""
    return type(next(_modules(model))) is nn.Flatten


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of a model that can be stacked. Raises ModelError for other models."""
    if reason := unstackable(model):
        raise ModelError(reason)
    layers: list[Layer] = []
    for module in _modules(model):
        if isinstance(module, nn.Linear):
            layers.append(Layer(module.weight, module.bias))
        elif type(module) in ACTIVATIONS:
            layers[-1] = replace(layers[-1], activation=ACTIVATIONS[type(module)](module))
    return layers


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules in the order of their calls; a Sequential is replaced by what is in it."""
    if type(model) is not nn.Sequential:
        yield model
        return
    for module in model:
        yield from _modules(module)


def _other_order(model: nn.Module) -> str | None:
    """Flatten?, Linear, (activation, Linear)*, and nothing else."""
    modules = list(_modules(model))
    known = (nn.Flatten, nn.Linear, *ACTIVATIONS)
    for module in modules:
        if type(module) not in known:
            names = ", ".join(kind.__name__ for kind in known[:-1]) + f" and {known[-1].__name__}"
            return f"A stack holds {names} only; the model has a {type(module).__name__}."
    if modules and type(modules[0]) is nn.Flatten:
        if (modules[0].start_dim, modules[0].end_dim) != (1, -1):
            return "A stack flattens whole records; the model's Flatten keeps some dimensions."
        modules = modules[1:]
    linear = [type(module) is nn.Linear for module in modules]
    if not linear or linear != [place % 2 == 0 for place in range(len(linear))] or not linear[-1]:
        return "A stack needs Linear layers with one activation between two of them; the model has another order."
    if any(type(module) is nn.Flatten for module in modules):
        return "A stack flattens before the first Linear layer; the model flattens after it."
    return None


def _changed(model: nn.Module) -> str | None:
    """Hooks and methods that were set on a module: the stack would not call them."""
    for module in model.modules():
        hooks = [value for name, value in vars(module).items() if name.endswith("_hooks") and value]
        if hooks or "forward" in vars(module):
            what = "a hook" if hooks else "a forward of its own"
            return f"A stack does not call the model's modules; a {type(module).__name__} of the model has {what}."
    return None


def _parameters(model: nn.Module) -> str | None:
    linear = [module for module in _modules(model) if isinstance(module, nn.Linear)]
    own = [p for module in linear for p in module.parameters()]
    if len({id(p) for p in own}) < len(own):
        return "A stack gives every layer parameters of its own; two layers of the model share some."
    if len(list(model.parameters())) != len(own) or any(True for _ in model.buffers()):
        return "A stack holds the parameters of Linear layers only; the model has other parameters or buffers."
    if not all(p.requires_grad for p in own):
        return "A stack trains all parameters; some of the model's are frozen."
    if any(vars(p).get("_backward_hooks") or p._backward_hooks for p in own):
        return "A stack does not call hooks; a parameter of the model has one."
    if {p.dtype for p in own} not in ({torch.float32}, {torch.float64}):
        return "A stack needs parameters of one type, float32 or float64; the model has others."
    return None


def _optimizer(model: nn.Module, make: MakeOptimizer) -> str | None:
    optimizer = make(model.parameters())
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        return f"A stack needs an optimizer that treats every element alone ({names}); got {type(optimizer).__name__}."
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "A stack does not call hooks of an optimizer; got one with a hook."
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if sorted(held) != sorted(id(p) for p in model.parameters()):
        return "A stack trains all parameters; the optimizer does not hold exactly the model's."
    return None


# -- Checks of what a stack is trained on: do plan, groups, members, starts and data belong together?


def check_members(
    plan: Plan, records: int, group: IntArray, member: npt.NDArray[np.bool_], randomness: Sequence[Randomness]
) -> None:
    """Raises InputError unless there is a group per record, and a row of members and a randomness per model.

    Also for a plan of persons: a stack draws and clips each record by itself.
    """
    if plan.unit == "person":
        raise InputError(
            "A stack draws and clips records, and the plan is for persons. Train such models one by one, with fit."
        )
    if group.shape != (records,) or not ((group >= 0) & (group < len(plan.groups))).all():
        raise InputError(
            f"group needs one of the plan's {len(plan.groups):,} groups per record; got {group.shape} for {records:,} "
            "records, or groups that the plan does not have."
        )
    if member.dtype != np.bool_ or member.ndim != 2 or member.shape[1] != records or len(member) == 0:
        raise InputError(
            f"member needs True or False per model and record; got {member.dtype} {member.shape} for {records:,} "
            "records."
        )
    if len(randomness) != len(member):
        raise InputError(f"Every model needs a randomness of its own; got {len(randomness)} for {len(member)} models.")
    if len({source.key for source in randomness}) < len(randomness):
        raise InputError("Two models have the same key, so they would get the same noise. Pass different ones.")


def checked_starts(
    starts: Sequence[Sequence[Tensor]] | None, own: Sequence[Tensor], models: int
) -> Sequence[Sequence[Tensor]]:
    """(models,) initial parameters: `starts`, or the model's own for all. Raises InputError for other shapes."""
    if starts is None:
        return [own] * models
    expected = [(p.shape, p.dtype) for p in own]
    if len(starts) != models or any([(p.shape, p.dtype) for p in start] != expected for start in starts):
        raise InputError(
            f"starts needs the parameters of {models} models, with the shapes and types of model.parameters(); got "
            f"{len(starts)} starts."
        )
    return starts


def check_data(data: tuple[Tensor, Tensor], first_weight: Tensor, classes: int, flattens: bool) -> None:
    """Raises DataError unless inputs fit the first layer, and targets are classes of the last one.

    first_weight   (models, outputs, features)
    """
    inputs, targets = data
    features, dtype = first_weight.shape[2], first_weight.dtype
    shape_fits = inputs.ndim >= 2 if flattens else inputs.ndim == 2
    if not shape_fits or inputs[:1].numel() != features or inputs.dtype != dtype:
        raise DataError(
            f"The stack needs inputs of {features:,} features per record in {dtype}, got {tuple(inputs.shape)} in "
            f"{inputs.dtype}."
        )
    if targets.dtype not in (torch.int64, torch.uint8) or targets.shape != inputs.shape[:1]:
        raise DataError(
            f"The stack needs one class per record as torch.int64, got {tuple(targets.shape)} in {targets.dtype}."
        )
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        raise DataError(f"The targets must be classes from 0 to {classes - 1}; at least one is not.")
