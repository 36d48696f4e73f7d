"""Many small models under one plan as one batched program: the shadow models of a membership attack.

Logistic regression and multilayer perceptrons. Model k is trained on its own members, with the draws, clip norms and
noise that `make_private` would use under its randomness, and ends at the same parameters up to rounding.

No guarantee covers a stack: it is trained on real records, many times, with known seeds, to measure what an attacker
learns. So there is no ledger, and sums are in the precision of the model. Only norms are computed in 64 bits.

To add an activation: a function (module) -> Activation, and a line in ACTIVATIONS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..clipping.engine import clip_factors
from ..clipping.summing import full_precision
from ..core.mechanism import IntArray
from ..core.modules import is_on_cpu
from ..draws.persons_rows import Draws
from ..draws.randomness import Randomness, thresholds
from ..errors import DataError, InputError, ModelError
from ..planning import Phase, Plan
from ..training.fitting.losses import MakeOptimizer

# -- Which models and optimizers can be trained as a stack, and the layers of such a model. Everything else is refused,
# with a reason: a stack does not call the model, so it would leave out what it does not know


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
    has_others = len(list(model.parameters())) != len(own) or any(True for _ in model.buffers())
    has_hook = any(vars(p).get("_backward_hooks") or p._backward_hooks for p in own)
    has_one_type = {p.dtype for p in own} in ({torch.float32}, {torch.float64})
    has_ties = len({id(p) for p in own}) < len(own)
    reasons = {
        "A stack gives every layer parameters of its own; two layers of the model share some.": has_ties,
        "A stack holds the parameters of Linear layers only; the model has other parameters or buffers.": has_others,
        "A stack trains all parameters; some of the model's are frozen.": not all(p.requires_grad for p in own),
        "A stack does not call hooks; a parameter of the model has one.": has_hook,
        "A stack needs parameters of one type, float32 or float64; the model has others.": not has_one_type,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


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


# -- The draws of many models under one plan, each among its own members


@dataclass(frozen=True, eq=False)
class MemberDraws:
    """What `Draws` gives each model, without the records that are not its members.

    group       (records,) each record's group
    member      (models, records) which records each model is trained on
    randomness  (models,) source of each model's coins and noise
    """

    plan: Plan
    group: IntArray = field(repr=False)
    member: npt.NDArray[np.bool_] = field(repr=False)
    randomness: Sequence[Randomness] = field(repr=False)

    def check(self, records: int) -> None:
        """Raises InputError unless there is a group per record, and a row of members and a randomness per model.

        Also for a plan of persons: a stack draws and clips each record by itself.
        """
        group, member, sources = self.group, self.member, self.randomness
        if self.plan.unit == "person":
            raise InputError(
                "A stack draws and clips records, and the plan is for persons. Train such models one by one, with fit."
            )
        if group.shape != (records,) or not ((group >= 0) & (group < len(self.plan.groups))).all():
            raise InputError(
                f"group needs one of the plan's {len(self.plan.groups):,} groups per record; got {group.shape} for "
                f"{records:,} records, or groups that the plan does not have."
            )
        if member.dtype != np.bool_ or member.ndim != 2 or member.shape[1] != records or len(member) == 0:
            raise InputError(
                f"member needs True or False per model and record; got {member.dtype} {member.shape} for {records:,} "
                "records."
            )
        if len(sources) != len(member):
            raise InputError(f"Every model needs a randomness of its own; got {len(sources)} for {len(member)} models.")
        if len({source.key for source in sources}) < len(sources):
            raise InputError("Two models have the same key, so they would get the same noise. Pass different ones.")

    def at(self, phase: int, step: int) -> list[IntArray]:
        """(models,) indices of the records that each model draws at this step, ascending."""
        if self._draws[0].method == "coins":
            limits, records = self._limits[phase], len(self.group)
            pairs = zip(self.randomness, self.member, strict=True)
            return [np.flatnonzero((source.coins(phase, step, records) < limits) & row) for source, row in pairs]
        drawn = [draws.at(phase, step) for draws in self._draws]
        return [indices[row[indices]] for indices, row in zip(drawn, self.member, strict=True)]

    @cached_property
    def _draws(self) -> list[Draws]:
        return [Draws(self.plan, self.group, source) for source in self.randomness]

    @cached_property
    def _limits(self) -> list[npt.NDArray[np.uint64]]:
        """Per phase the limit of each record's coin, which is the same for all models."""
        return [thresholds(phase.sample_rate)[self.group] for phase in self.plan.phases]


# -- Sums of clipped gradients of many models at once, each over the records that it draws
#
# Paper Alg. 1 line 6 with a rate, a clip norm and a weight per group. A layer with input a and gradient g at its output
# has the gradient g·aᵀ for its weights and g for its bias. So its squared norm is |g|²·(|a|² + 1), and no gradient of
# one record is ever formed (Goodfellow, "Efficient Per-Example Gradient Computations", arXiv 1510.01799v2).
#
# Values are (models, units, records): with the records last, products take half as long as with the units last, and a
# softmax over 10 classes a tenth (benchmarks/stacked.py).

#: Bytes of values that are computed at once: on a CPU, they should stay in its cache.
BYTES_AT_ONCE, BYTES_ON_A_GPU = 2**22, 2**30

#: Numbers of a layer's width that are held per record: before and after the activation, gradient, and its square twice.
HELD = 5

#: Records whose squared norms are computed at once.
RECORDS_AT_ONCE = 2**14


@dataclass(frozen=True, eq=False)
class Records:
    """The data of all models.

    inputs         (records, features)
    squared_norms  (records,) of the inputs, 64-bit
    targets        (records,) classes
    """

    inputs: Tensor
    squared_norms: Tensor
    targets: Tensor

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> Records:
        """Computes the squared norms."""
        parts = [_squares(part) for part in torch.split(inputs, RECORDS_AT_ONCE)]
        return cls(inputs, torch.cat(parts), targets.long())


@dataclass(frozen=True, eq=False)
class Bounds:
    """The clip norm and the weight of each record in one phase. (records,) each, 64-bit."""

    clip_norm: Tensor
    weight: Tensor

    @classmethod
    def of(cls, phase: Phase, group: IntArray, device: torch.device) -> Bounds:
        return cls(*(torch.from_numpy(values[group]).to(device) for values in (phase.clip_norm, phase.weight)))


class ClippedSums:
    """The sums of a stack.

    gradients   (models, …) one per parameter: the last sums, overwritten by the next
    """

    def __init__(self, layers: Sequence[Layer], records: Records) -> None:
        self._layers, self._records = layers, records
        self._by_layer = [[torch.zeros_like(p) for p in layer.parameters] for layer in layers]
        self.gradients = [gradient for sums in self._by_layer for gradient in sums]
        self._room = records.inputs.new_empty(0)

    def add_up(self, drawn: Sequence[IntArray], bounds: Bounds) -> None:
        """Compute `gradients`. drawn: (models,) indices of the records that each model draws."""
        at_once = self._models_at_once(max(map(len, drawn)))
        for first in range(0, len(drawn), at_once):
            models = slice(first, first + at_once)
            self._add_up(models, drawn[models], bounds)

    def _models_at_once(self, most: int) -> int:
        inputs = self._records.inputs
        width = inputs.shape[1] + HELD * sum(layer.weight.shape[1] for layer in self._layers)
        at_once = BYTES_AT_ONCE if is_on_cpu(inputs) else BYTES_ON_A_GPU
        return max(1, at_once // max(1, most * width * inputs.element_size()))

    def _add_up(self, models: slice, drawn: Sequence[IntArray], bounds: Bounds) -> None:
        index, is_drawn = (torch.from_numpy(part).to(self._room.device) for part in _padded(drawn))  # (models, most)
        records, layers = self._records, [layer.of(models) for layer in self._layers]
        values, before = _forward(layers, self._inputs(index))
        deltas = _backward(layers, values, before, _loss_gradient(before[-1], _of(records.targets, index)))
        squares = [_of(records.squared_norms, index), *map(_squares, values[1:])]
        squared_norm = torch.zeros_like(squares[0])  # (models, most)
        for layer, square, delta in zip(layers, squares, deltas, strict=True):
            squared_norm += _squares(delta) * (square + (layer.bias is not None))
        factor = clip_factors(squared_norm, _of(bounds.clip_norm, index), _of(bounds.weight, index) * is_drawn)
        _blank(~torch.isfinite(squared_norm), [*values, *deltas])
        for sums, value, delta in zip(self._by_layer, values, deltas, strict=True):
            _weighted_sums([part[models] for part in sums], value, delta.mul_(factor.to(delta.dtype)[:, None]))

    def _inputs(self, index: Tensor) -> Tensor:
        """(models, features, most) of these records, in memory that is kept: new memory is slower to write."""
        inputs, rows = self._records.inputs, index.numel()
        size = rows * inputs.shape[1]
        if self._room.numel() < size:
            self._room = inputs.new_empty(size + size // 8)
        room = self._room[:size].view(rows, inputs.shape[1])
        torch.index_select(inputs, 0, index.flatten(), out=room)
        return room.view(*index.shape, inputs.shape[1]).transpose(1, 2)


def _of(values: Tensor, index: Tensor) -> Tensor:
    """The values of these records; (records,) and (models, most) -> (models, most)."""
    return values.index_select(0, index.flatten()).view(index.shape)


def _loss_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """(models, classes, most) the gradient of the cross-entropy: softmax minus one at the target."""
    minus_one = logits.new_full((), -1.0).expand(len(targets), 1, targets.shape[1])
    return logits.softmax(1).scatter_add_(1, targets[:, None], minus_one)


def _padded(drawn: Sequence[IntArray]) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """(models, most) indices and whether they were drawn; draws are filled up with record 0."""
    counts = np.array([len(indices) for indices in drawn])
    is_drawn = np.arange(counts.max()) < counts[:, None]
    index = np.zeros(is_drawn.shape, dtype=np.int64)
    index[is_drawn] = np.concatenate(drawn)
    return index, is_drawn


def _forward(layers: Sequence[Layer], inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's inputs, and its outputs before the activation; the last of these are the logits."""
    values, before = [inputs], [layers[0].outputs(inputs)]
    for lower, layer in pairwise(layers):
        values.append(lower.activation.forward(before[-1]))
        before.append(layer.outputs(values[-1]))
    return values, before


def _backward(
    layers: Sequence[Layer], values: Sequence[Tensor], before: Sequence[Tensor], gradient: Tensor
) -> list[Tensor]:
    """The gradient of each record's loss at each layer's outputs before the activation; gradient: at the logits."""
    deltas = [gradient]
    for place in reversed(range(1, len(layers))):
        at_values = torch.bmm(layers[place].weight.transpose(1, 2), deltas[0])
        deltas.insert(0, layers[place - 1].activation.backward(at_values, before[place - 1], values[place]))
    return deltas


def _blank(columns: Tensor, tensors: Sequence[Tensor]) -> None:
    """Zeros for these (models, most) records: their factors are 0, but 0·NaN is NaN."""
    if columns.any():
        for tensor in tensors:
            tensor.masked_fill_(columns[:, None], 0)


def _weighted_sums(sums: Sequence[Tensor], values: Tensor, deltas: Tensor) -> None:
    """Over the records, for the weight and the bias of one layer."""
    weight, *biases = sums
    torch.bmm(deltas, values.transpose(1, 2), out=weight)
    for bias in biases:
        torch.sum(deltas, 2, out=bias)


def _squares(values: Tensor) -> Tensor:
    """Squared norms of the records over dimension 1, 64-bit."""
    return values.double().square_().sum(1)


# -- Training of a stack: each step draws, clips, adds noise and updates, for all models at once


@dataclass(frozen=True, eq=False)
class StackedModel:
    """Models of one architecture, each with parameters of its own.

    layers    their weights (models, outputs, inputs) and biases (models, outputs)
    flattens  True if the models flatten records of several dimensions
    """

    layers: tuple[Layer, ...] = field(repr=False)
    flattens: bool

    @classmethod
    def of(cls, model: nn.Module, starts: Sequence[Sequence[Tensor]], device: torch.device) -> StackedModel:
        """One model per start: its parameters, in the order of model.parameters()."""
        stacks = iter([torch.stack([p.detach().to(device) for p in each]) for each in zip(*starts, strict=True)])
        return cls(tuple(layer.with_parameters(stacks) for layer in layers_of(model)), flattens(model))

    @property
    def models(self) -> int:
        """How many models there are."""
        return len(self.layers[0].weight)

    @property
    def classes(self) -> int:
        """How many logits each model computes for a record."""
        return self.layers[-1].weight.shape[1]

    @property
    def parameters(self) -> list[Tensor]:
        """(models, …) each, in the order of the model's own parameters."""
        return [p for layer in self.layers for p in layer.parameters]

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.layers[0].weight.device

    def logits(self, inputs: Tensor) -> Tensor:
        """(models, records, classes) on the inputs' device. Memory grows with models · records."""
        first, *others = self.layers
        x = self.rows(inputs)
        # All models read the same inputs, so their first layers are one product of matrices.
        values = (first.weight.flatten(0, 1) @ x.T).view(self.models, -1, len(x))
        values = first.activation.forward(values if first.bias is None else values + first.bias[..., None])
        for layer in others:
            values = layer.activation.forward(layer.outputs(values))
        return values.transpose(1, 2).to(inputs.device)

    def rows(self, inputs: Tensor) -> Tensor:
        """(records, features) on the models' device."""
        return (inputs.flatten(1) if self.flattens else inputs).to(self.device)


def train_stacked(
    model: nn.Module,
    optimizer: MakeOptimizer,
    data: tuple[Tensor, Tensor],
    draws: MemberDraws,
    *,
    starts: Sequence[Sequence[Tensor]] | None = None,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
) -> StackedModel:
    """Train one model per row of `draws.member` with the cross-entropy loss; `model` itself stays as it is.

    model       logistic regression or a multilayer perceptron (see `unstackable`); its parameters are the common start
    optimizer   parameters -> SGD, Adam or AdamW
    data        inputs (records, …) and classes (records,)
    draws       the plan, and whom each model is trained on
    starts      (models,) initial parameters of each model, in the order of model.parameters(), if they differ
    progress    called after every step with the number of steps made

    Raises ModelError for a model or an optimizer that cannot be stacked, DataError or InputError for arguments that do
    not fit together.

    >>> import epsilons
    >>> budgets = epsilons.Budgets([1.0, 2.0] * 50, delta=1e-3)
    >>> plan = epsilons.plan(budgets, epsilons.Recipe(steps=2, batch_size=10, clip_norm=1.0), accountant="rdp")
    >>> data = torch.ones(100, 3), torch.zeros(100, dtype=torch.long)
    >>> everyone, four = np.ones((4, 100), dtype=bool), [Randomness.fresh(model) for model in range(4)]
    >>> draws = MemberDraws(plan, budgets.group, everyone, four)
    >>> train_stacked(nn.Linear(3, 2), torch.optim.SGD, data, draws).logits(data[0]).shape
    torch.Size([4, 100, 2])
    """
    if reason := unstackable(model, optimizer=optimizer):
        raise ModelError(reason)
    draws.check(len(data[0]))
    plan, own = draws.plan, list(model.parameters())
    stack = StackedModel.of(model, checked_starts(starts, own, len(draws.member)), torch.device(device))
    check_data(data, stack.layers[0].weight, stack.classes, stack.flattens)
    with torch.no_grad(), full_precision():
        sums = ClippedSums(stack.layers, Records.of(stack.rows(data[0]), data[1].to(stack.device)))
        update = _NoisyUpdate(_on_stack(optimizer, own, stack.parameters, sums.gradients), draws.randomness)
        for made, (number, phase, step) in enumerate(_steps(plan)):
            if step == 0:
                bounds = Bounds.of(phase, draws.group, stack.device)
            sums.add_up(draws.at(number, step), bounds)
            update.apply(number, phase, step)
            if progress is not None:
                progress(made + 1)
    return stack


def _steps(plan: Plan) -> Iterator[tuple[int, Phase, int]]:
    """(number of the phase, phase, step in it) of every step."""
    return ((number, phase, step) for number, phase in enumerate(plan.phases) for step in range(phase.steps))


def _on_stack(
    make: MakeOptimizer, own: Sequence[nn.Parameter], stacked: Sequence[Tensor], gradients: Sequence[Tensor]
) -> torch.optim.Optimizer:
    """The optimizer of the model, with the stacked parameters in place of the model's own.

    It is made from the model's own, because its function may group parameters by their shapes.
    """
    optimizer = make(iter(own))
    twins = {id(p): twin for p, twin in zip(own, stacked, strict=True)}
    for twin, gradient in zip(stacked, gradients, strict=True):
        twin.grad = gradient
    for group in optimizer.param_groups:
        group["params"] = [twins[id(p)] for p in group["params"]]
    return optimizer


class _NoisyUpdate:
    """Noise, average and update of all models, by the rules of `noisy_update.py`."""

    def __init__(self, optimizer: torch.optim.Optimizer, randomness: Sequence[Randomness]) -> None:
        self._optimizer, self._randomness = optimizer, randomness
        # As in a run of one model, noise is split in the optimizer's order of parameters.
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._sizes = [p[0].numel() for p in self._parameters]
        first = self._parameters[0]
        self._noise = first.new_empty(len(randomness), sum(self._sizes), device="cpu").numpy()

    def apply(self, number: int, phase: Phase, step: int) -> None:
        """Turn the sums in p.grad into noisy averages, and let the optimizer apply them."""
        for row, source in zip(self._noise, self._randomness, strict=True):
            row[:] = source.noise(number, step, len(row))
        noise = torch.from_numpy(self._noise).to(self._parameters[0].device)
        for p, part in zip(self._parameters, torch.split(noise, self._sizes, 1), strict=True):
            assert p.grad is not None
            # The divisor is public and fixed: the drawn number of records is itself private.
            p.grad.add_(part.view(p.shape), alpha=phase.noise_std).div_(phase.expected_batch)
        self._optimizer.step()
