"""Training of a stack: each step draws, clips, adds noise and updates, for all models at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...errors import ModelError
from ...mechanism import IntArray
from ...planning import Phase, Plan
from ..clipping.precision import full_precision
from ..optimizers import MakeOptimizer
from ..randomness import Randomness
from . import checks
from .architecture import Layer, flattens, layers_of, unstackable
from .draws import MemberDraws
from .sums import Bounds, ClippedSums, Records


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
    plan: Plan,
    *,
    group: IntArray,
    member: npt.NDArray[np.bool_],
    randomness: Sequence[Randomness],
    starts: Sequence[Sequence[Tensor]] | None = None,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
) -> StackedModel:
    """Train one model per row of `member` with the cross-entropy loss; `model` itself stays as it is.

    model       logistic regression or a multilayer perceptron (see `unstackable`); its parameters are the common start
    optimizer   parameters -> SGD, Adam or AdamW
    data        inputs (records, …) and classes (records,)
    group       (records,) each record's group in the plan
    member      (models, records) which records each model is trained on
    randomness  (models,) source of each model's draws and noise
    starts      (models,) initial parameters of each model, in the order of model.parameters(), if they differ
    progress    called after every step with the number of steps made

    Raises ModelError for a model or an optimizer that cannot be stacked, DataError or InputError for arguments that do
    not fit together.

    >>> import epsilons
    >>> budgets = epsilons.Budgets([1.0, 2.0] * 50, delta=1e-3)
    >>> plan = epsilons.plan(budgets, epsilons.Recipe(steps=2, batch_size=10, clip_norm=1.0), accountant="rdp")
    >>> data = torch.ones(100, 3), torch.zeros(100, dtype=torch.long)
    >>> four = {"member": np.ones((4, 100), dtype=bool), "randomness": [Randomness.fresh(k) for k in range(4)]}
    >>> train_stacked(nn.Linear(3, 2), torch.optim.SGD, data, plan, group=budgets.group, **four).logits(data[0]).shape
    torch.Size([4, 100, 2])
    """
    if reason := unstackable(model, optimizer=optimizer):
        raise ModelError(reason)
    checks.check_members(plan, len(data[0]), group, member, randomness)
    own = list(model.parameters())
    stack = StackedModel.of(model, checks.checked_starts(starts, own, len(member)), torch.device(device))
    checks.check_data(data, stack.layers[0].weight, stack.classes, stack.flattens)
    with torch.no_grad(), full_precision():
        sums = ClippedSums(stack.layers, Records.of(stack.rows(data[0]), data[1].to(stack.device)))
        update = _NoisyUpdate(_on_stack(optimizer, own, stack.parameters, sums.gradients), randomness)
        draws = MemberDraws(plan, group, member, randomness)
        for made, (number, phase, step) in enumerate(_steps(plan)):
            if step == 0:
                bounds = Bounds.of(phase, group, stack.device)
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
