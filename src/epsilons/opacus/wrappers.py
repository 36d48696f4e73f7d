"""The model and the optimizer that a loop written for Opacus gets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..doors.foreign_loop import ForeignLoop, WrappedOptimizer
from ..errors import InputError


class PrivateModule(nn.Module):
    """The model, under the names that Opacus' GradSampleModule has: `_module`, and "_module.…" in state_dict.

    The model itself is changed in nothing but hooks, and may be called directly.
    """

    def __init__(self, module: nn.Module, loop: ForeignLoop) -> None:
        super().__init__()
        self._module = module
        self.training = module.training
        self._loop, self.is_closed = loop, False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights that this class, Opacus' GradSampleModule or the bare model saved."""
        if any(key.startswith("_module.") for key in state_dict):
            return super().load_state_dict(state_dict, strict, assign)
        return self._module.load_state_dict(state_dict, strict, assign)

    def remove_hooks(self) -> None:
        """End the run, and remove all hooks from model and optimizer."""
        self.is_closed = True
        self._loop.close()

    def cleanup(self) -> None:
        """The same as `remove_hooks`."""
        self.remove_hooks()

    def to_standard_module(self) -> nn.Module:
        """The model itself, after `remove_hooks`."""
        self.remove_hooks()
        return self._module

    def forbid_grad_accumulation(self) -> None:
        """Does nothing: one batch of the data loader belongs to one call of step, always."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivateModule:
        """A copy of the weights, such as for an average of them, beside the same run."""
        copied = PrivateModule(copy.deepcopy(self._module, memo), self._loop)
        copied.train(self.training)
        return copied

    def __repr__(self) -> str:
        return f"PrivateModule({self._module!r})"


class PrivateOptimizer(WrappedOptimizer):
    """The caller's optimizer, with a `step` that clips each record's gradient, adds noise, charges and updates.

    original_optimizer  the caller's; its groups, state and hooks are shared, so schedulers of either work
    """

    def __init__(self, optimizer: Optimizer, loop: ForeignLoop) -> None:
        super().__init__(optimizer)
        self._loop, self._plan = loop, loop.private.plan
        self._after_update: list[Callable[[PrivateOptimizer], None]] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Use the gradients of the batch. On the last batch of a draw: noise, average, update.

        closure  computes the loss, and calls backward on it

        Raises CallOrderError outside the loop over the private data loader, ModelError for a loss that has no
        per-record losses, BatchDependenceError for one that mixes records.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        if self._loop.step():
            for hook in self._after_update:
                hook(self)
        return value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the batch; the forward pass before it stays."""
        self._loop.zero_grad()
        super().zero_grad(set_to_none)

    def attach_step_hook(self, fn: Callable[[PrivateOptimizer], None]) -> None:
        """Call `fn(optimizer)` after every update that a batch ended. (An empty draw has no batch.)"""
        self._after_update.append(fn)

    # -- what the original optimizer has -----------------------------------------------------------

    @property
    def params(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    # -- what the plan has fixed -------------------------------------------------------------------

    @property
    def noise_multiplier(self) -> Any:
        """Noise / clip norm: a number, or (groups,) under several budgets. Fixed by the plan."""
        return self._fixed("noise_multiplier")

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        raise InputError(_fixed_by_the_plan("noise_multiplier", "A noise scheduler of Opacus"))

    @property
    def max_grad_norm(self) -> Any:
        """Clip norm: a number, or (groups,) under several budgets. Fixed by the plan."""
        return self._fixed("clip_norm")

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        raise InputError(_fixed_by_the_plan("max_grad_norm", "A clipping scheduler of Opacus"))

    @property
    def expected_batch_size(self) -> float:
        """The divisor of every update: records / batches, not rounded."""
        return self._plan.expected_batch

    @expected_batch_size.setter
    def expected_batch_size(self, value: float) -> None:
        raise InputError(_fixed_by_the_plan("expected_batch_size", "Another divisor"))

    def _fixed(self, name: str) -> Any:
        values = getattr(self._plan, name)
        return float(values[0]) if len(values) == 1 else values

    # -- what cannot be done -----------------------------------------------------------------------

    def signal_skip_step(self, do_skip: bool = True) -> NoReturn:
        raise InputError(
            "signal_skip_step would end draws at other batches than those that were drawn. Leave it out: the data "
            "loader knows the last batch of each draw. For smaller batches use BatchMemoryManager."
        )

    @property
    def grad_samples(self) -> list[Tensor]:
        raise InputError(
            "There are no per-record gradients here (grad_samples): they are clipped and added up where they are "
            "computed."
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch's GradScaler asks for this before it calls step."""
        raise InputError(
            "GradScaler rescales losses by a factor that depends on the data. Leave it out: with torch.autocast use "
            "dtype=torch.bfloat16, which needs no scaling."
        )


def _fixed_by_the_plan(name: str, who: str) -> str:
    return (
        f"{name} is fixed by the plan, which certified it before training. {who} cannot change it. For several phases "
        "make a plan of your own (epsilons.Plan) and use epsilons.make_private."
    )


# -- The criterion of grad_sample_mode="ghost": a loss per record, reduced over the records


class Criterion:
    """A criterion that returns the mean (or the sum) over the records, whatever the weights of their classes.

    criterion       a module of torch.nn with a `reduction`, or any function (outputs, targets) -> loss
    loss_reduction  "mean" or "sum"

    Opacus computes per-record losses in this mode, and so does this class. Call `backward` on what it returns.
    Raises InputError if the criterion has another reduction.

    >>> import torch
    >>> outputs, targets = torch.zeros(3, 2), torch.tensor([0, 1, 1])
    >>> weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    >>> round(Criterion(weighted)(outputs, targets).item(), 4)  # the mean of log(2) times 1, 2 and 2
    1.1552
    """

    def __init__(self, criterion: Callable[..., Tensor], loss_reduction: str = "mean") -> None:
        reduction = getattr(criterion, "reduction", loss_reduction)
        if reduction != loss_reduction:
            raise InputError(
                f"The criterion's reduction is {reduction!r} and loss_reduction={loss_reduction!r}. Make them the same."
            )
        self.criterion, self.loss_reduction = criterion, loss_reduction
        self._by_record = criterion
        if isinstance(criterion, nn.Module):
            single: Any = copy.copy(criterion)
            single.reduction = "none"
            self._by_record = single

    def __call__(self, *args: Any, shape: tuple[int, ...] | None = None, **kwargs: Any) -> Tensor:
        """The loss of a batch.

        shape  (batch, tokens, …) of the outputs before they were flattened to one row per token: the loss of a record
               is then the mean (or sum) of its tokens, without those of the criterion's ignore_index
        """
        losses: Tensor = self._by_record(*args, **kwargs)
        if shape is not None and losses.ndim and len(losses) == shape[0] * shape[1]:
            targets = kwargs.get("target", args[1] if len(args) > 1 else None)
            losses = self._of_sequences(losses.view(shape[0], shape[1]), targets)
        return losses.mean() if self.loss_reduction == "mean" else losses.sum()

    def _of_sequences(self, losses: Tensor, targets: Tensor | None) -> Tensor:
        """(batch, tokens) -> (batch,)."""
        ignored = getattr(self.criterion, "ignore_index", None)
        if self.loss_reduction == "sum" or ignored is None or targets is None:
            return losses.sum(1) if self.loss_reduction == "sum" else losses.mean(1)
        counted: Tensor = (targets.view(losses.shape) != ignored).sum(1).clamp(min=1)
        return losses.sum(1) / counted

    def __repr__(self) -> str:
        return f"Criterion({self.criterion!r}, {self.loss_reduction!r})"
