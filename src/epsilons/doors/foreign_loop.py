"""ForeignLoop: private training inside a loop that knows one mean loss and `loss.backward()`.

The doors (`epsilons.opacus`, `epsilons.huggingface`, `epsilons.lightning`) are written against this interface:

    loop = ForeignLoop(private)              # hooks on the model; reduction="mean" or "sum" over the records of a batch
    for batch in loop.batches:               # or: for draw in loop.draws: for batch in draw
        loss = criterion(model(x), y)        # the foreign code: one number, or one loss per record
        loss.backward()                      # seen in the foreign code; a door may call loop.backward(loss) itself
        loop.step()                          # True after the draw's update; for optimizer.step()
    loop.close()                             # hooks off, and private.close()

    loop.zero_grad()                         # for optimizer.zero_grad(), wherever the foreign code calls it
    loop.clip()                              # the first half of step(): clip and add this batch. True if the draw's
                                             # update is due, so that a door can leave step() to its framework
    loop.is_open                             # True from the issue of a batch until its step
    private.is_last                          # this batch is meant to complete its draw
    private.max_physical_batch = 32          # for the draws after this one

One batch is one physical batch: a draw has one or several. None is only for checks: see `loop_proof`, and `check_calls`
below. A door that shows its framework one step per draw goes through `next(loop.draws)` inside that step.

How it works. Let the loss be L = (1/n) Σ l_i(o_i), with o_i the outputs of the model for record i. Then n · ∂L/∂o_i is
the gradient of l_i by o_i. The outermost calls of modules with trained parameters return copies of leaves
(`cut_calls`), so L ends there: L.backward() computes ∂L/∂o, and no parameter gets a gradient. <o_i, n · ∂L/∂o_i> is
then a loss per record, with exactly l_i's gradient by the parameters. `private.backward` takes these losses as any
others: the batch-independence check follows both halves, the engine clips, the ledger charges. A second backward pass
for the same batch is added to the first.

Whatever does not have that form is refused: a mean that divides by a sum over records (`mean_losses`), a loss that uses
parameters outside a call, outputs without records in the first dimension, gradients of gradients, scaled losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..core.modules import leave
from ..draws import batches
from ..draws.batches import Gathered
from ..errors import BatchDependenceError, CallOrderError, InputError, ModelError
from ..independence import messages, watch
from ..training import checkpoints
from ..training.datasets import seed_torch
from ..training.microbatches import Issued
from ..training.private import Private
from .cut_calls import Cut, CutCalls
from .loop_proof import LoopProof
from .mean_losses import LossMode

# -- The batch-independence check of a model's calls, where the loop around them is not to see altered batches
#
# Each outermost call of the batch is made again with its inputs in the altered forms. A random combination of each
# record's outputs takes the place of its loss. What the loop does with the outputs is not seen.


@dataclass(frozen=True)
class Call:
    """One call of a module."""

    module: nn.Module
    args: Any
    kwargs: Any


def check_calls(private: Private, issued: Issued, batch: Any, calls: Sequence[Call], is_first: bool) -> None:
    """Check every call of a physical batch. Raises BatchDependenceError and UnsupportedLayerError."""
    generators = checkpoints.of_generators()
    try:
        for call in calls:
            _check(private, issued, batch, call, is_first)
    finally:
        checkpoints.into_generators(generators)


def _check(private: Private, issued: Issued, batch: Any, call: Call, is_first: bool) -> None:
    count = len(issued.indices)
    inputs = batches.mapped((call.args, call.kwargs), lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
    gathered = Gathered(lambda rows: batches.take(inputs, rows, count))
    if private._source.varies and (again := private._issuer.gathered) is not None:
        gathered = Gathered(_padded_again(inputs, batch, again, count), again.records)
    check = private._issuer.new_check(gathered, issued.physical, is_first)
    for variant, (args, kwargs) in check.forms():
        try:
            seed_torch(0, private._device)
            losses = _combined(call.module(*args, **kwargs), len(variant.rows))
        finally:
            check.stop()
        check.observe(losses)


def _padded_again(inputs: Any, batch: Any, again: Gathered, count: int) -> Callable[[Sequence[int]], Any]:
    """The inputs of a call for other records: where they are tensors of the batch, collated again.

    Raises BatchDependenceError if others have a place for padding, too: their loop alone can pad them again.
    """
    whole = batches.tensors(batch)
    found: dict[int, int] = {}  # the id of an input -> its number in the batch
    for tensor in batches.tensors(inputs):
        same = (n for n, t in enumerate(whole) if t.shape == tensor.shape and bool((t.to(tensor) == tensor).all()))
        if (number := next(same, None)) is not None:
            found[id(tensor)] = number
        elif tensor.ndim > 1 and len(tensor) == count:
            raise messages.unproven_padding(tuple(tensor.shape))

    def built(rows: Sequence[int]) -> Any:
        part = batches.tensors(again.calm(rows))

        def chosen(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return part[found[id(leaf)]].to(leaf) if id(leaf) in found else batches.take(leaf, rows, count)

        return batches.mapped(inputs, chosen)

    return built


def _combined(outputs: Any, records: int) -> Tensor:
    """(records,) a combination of each record's outputs, with the same random weights in every form."""
    total: Tensor | None = None
    for number, output in enumerate(t for t in batches.tensors(outputs) if t.requires_grad and t.ndim):
        if len(output) != records:
            continue  # refused if the loss uses it
        shape = output.shape[1:]
        weights = torch.from_numpy(np.random.default_rng(number).standard_normal(shape)).to(output)
        product = (output * weights).reshape(records, -1).sum(1).float()
        total = product if total is None else total + product
    assert total is not None
    return total


# -- ForeignLoop: private training inside a loop that knows one mean loss and `loss.backward()`

_ORDER = "The order for each batch is: loss.backward(), then optimizer.step()."


class ForeignLoop:
    """Turns a foreign loop's backward passes into losses per record for `private`.

    reduction   how the loop reduces the records of a batch: "mean" or "sum"

    The model's calls are checked in altered forms, and what the loop computes around them by `LoopProof`.
    Raises InputError for another reduction.
    """

    def __init__(self, private: Private, reduction: Literal["mean", "sum"] = "mean") -> None:
        if reduction not in ("mean", "sum"):
            raise InputError(f'reduction must be "mean" or "sum" over the records of a batch, got {reduction!r}.')
        self.private, self.reduction = private, reduction
        private._issuer.is_foreign = True
        self._proof = LoopProof(private)
        private._issuer.is_wanted = self._proof.is_wanted
        self._batch: Any = None  # as it was handed out
        self._given: list[tuple[int, list[Tensor]]] = []  # number of the call -> its inputs, of a watched batch
        self._to_check: list[Call] = []
        self.calls = CutCalls(private._parameters, self._on_cut, self._on_call)
        self.calls.attach(private.model)
        self._mode: LossMode | None = None
        self._callers: list[FrameType] = []  # the caller's code that was run when the batch was handed to it
        # A gradient of anything else by these parameters, such as of a validation loss, is dropped at once.
        self._guards: list[Any] = [
            p.register_post_accumulate_grad_hook(self._drop)  # type: ignore[no-untyped-call]
            for p in private._parameters
        ]
        self._leaked, self._is_ours = False, False
        self.losses: list[tuple[Tensor, int]] | None = None  # those of backward passes, with their numbers of records
        self._empty: Callable[[], Any] | None = None
        self._is_empty = False

    @property
    def batches(self) -> Iterator[Any]:
        """The physical batches of all remaining draws. Raises what `private.batches` raises.

        A draw that an earlier loop was left in is over, as in the loop's own library. Its charge stays.
        """
        self.private._abandon_draw()
        return self._each(self.private.batches)

    @property
    def draws(self) -> Iterator[Iterator[Any]]:
        """The physical batches of all remaining draws, one iterable per draw. Otherwise as `batches`."""
        self.private._abandon_draw()
        return map(self._each_of_draw, self.private.draws)

    def hand_out_empty(self, batch: Callable[[], Any]) -> None:
        """Hand out this batch in `draws` after the update of an empty draw. No call for it has an effect."""
        self._empty, self.private._settings.sees_every_draw = batch, True

    def _each_of_draw(self, batches: Iterator[Any]) -> Iterator[Any]:
        is_empty = True
        for batch in self._each(batches):
            is_empty = False
            yield batch
        if is_empty and self._empty is not None:
            self.private._settings.begin_body()
            self._is_empty = True
            try:
                yield self._empty()
            finally:
                self._is_empty = False
            self.private._settings.compare()

    def _each(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            for batch in batches:
                self._begin(batch)
                yield batch
                if self.is_open:
                    self.private._turns.turn = "broken"
                    raise CallOrderError(
                        f"The loop went on to the next batch without optimizer.step(). {_ORDER} To evaluate, use your "
                        "own data loader: each batch of this one is a draw, and charged."
                    )
        finally:
            self._end()

    @property
    def is_open(self) -> bool:
        """True from the issue of a batch until it was clipped."""
        return self.calls.is_on

    def _begin(self, batch: Any) -> None:
        self._leave_mode()
        self._batch = batch
        self._leaked, self._callers = False, list(watch.own_frames())
        self.calls.begin()
        if (seen := self._watch) is not None:
            seen.is_elsewhere = lambda: self.calls.is_inside

    def _end(self) -> None:
        self._leave_mode()
        self._callers, self._to_check, self._given, self._batch = [], [], [], None
        self.calls.end()

    def _leave_mode(self) -> None:
        if self._mode is not None:
            mode, self._mode = self._mode, None
            leave(mode)

    def _on_cut(self, leaf: Tensor) -> None:
        if (seen := self._watch) is not None and leaf.ndim and len(leaf) == self._records:
            seen.is_cut(leaf)

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.private._issuer.calls_are_due:
            self._to_check.append(Call(module, args, kwargs))
        if self._watch is not None:
            self._given.append((self.calls.calls - 1, batches.tensors((args, kwargs))))
        if self._mode is None:
            # Iterators that handed the batch on are not run any more, or not at the moment.
            code = next((frame for frame in self._callers if watch.is_run_by(frame)), None)
            self._mode = LossMode(code, lambda: self.calls.is_inside, self._seen_backward, self._seen_grad)
            self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _drop(self, parameter: Tensor) -> None:
        parameter.grad = None
        self._leaked |= self.is_open

    # -- what the foreign code calls -----------------------------------------------------------------

    def _seen_backward(
        self,
        torchs: Any,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """loss.backward(), as the foreign code calls it."""
        if not self.calls.used_by(loss):
            torchs(loss, gradient, retain_graph, create_graph, inputs)
            return
        if create_graph:
            raise ModelError(_GRADIENTS_OF_GRADIENTS)
        if gradient is not None or inputs is not None or loss.numel() != 1:
            raise ModelError(
                "loss.backward() needs one number, the mean or sum over the records of the batch, and neither "
                f"gradient= nor inputs=; got a loss of shape {tuple(loss.shape)}."
            )
        self._backward(loss, bool(retain_graph))

    def _seen_grad(self, torchs: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """torch.autograd.grad, as the foreign code calls it."""
        if self._is_ours:
            return torchs(outputs, *args, **kwargs)
        given = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if any(self.calls.used_by(tensor) for tensor in given):
            raise ModelError(_GRADIENTS_OF_GRADIENTS)
        return torchs(outputs, *args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Take the loss of this batch: one number, reduced over the records, or (batch,) losses, one per record.

        Raises CallOrderError outside a batch, ModelError for a loss that does not depend on the model's outputs for
        this batch, or depends on parameters in another way.
        """
        if not self.is_open:
            raise CallOrderError(f"The loss came outside a batch, or after its step. {_ORDER}")
        if not isinstance(loss, Tensor) or loss.shape not in ((), (1,), (self._records,)):
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ModelError(
                f"The loss must be one number, or one per record, shape ({self._records},) here; got {got}."
            )
        if not self.calls.used_by(loss):
            raise ModelError(_IGNORES_THE_MODEL)
        self._backward(loss, retain_graph)

    def _backward(self, loss: Tensor, retain_graph: bool) -> None:
        cuts = self.calls.used_by(loss)
        for cut in cuts:
            self._check_output(cut.output)
        if self.losses is not None:
            self.losses.append((loss.detach(), self._records))
        if (seen := self._watch) is not None:
            seen.begins_backward(loss)
        is_per_record = loss.ndim > 0 and len(loss) == self._records > 1
        # The scale goes in from above: behind a mean, the number of records has then cancelled out.
        scale = self._records if self.reduction == "mean" and not is_per_record else 1
        start = torch.full(loss.shape, float(scale), dtype=loss.dtype, device=loss.device)
        self._is_ours = True
        try:
            gradients = torch.autograd.grad(
                loss, [cut.leaf for cut in cuts], start, retain_graph=retain_graph, allow_unused=True
            )
        finally:
            self._is_ours = False
        for cut, gradient in zip(cuts, gradients, strict=True):
            cut.add(gradient)
        if seen is not None:
            seen.has_gradients()

    @property
    def _watch(self) -> watch.OperatorWatch | None:
        """Of the batch at hand, if it is watched."""
        return self.private._issuer.watch

    @property
    def _records(self) -> int:
        issued = self.private._issued
        return 0 if issued is None else len(issued.indices)

    def _check_output(self, output: Tensor) -> None:
        if output.ndim == 0:
            raise ModelError(
                "The loss depends on an output of the model that is a single number, which has mixed the records "
                "already: a model that computes its loss itself, or a penalty. Return the outputs of each record, and "
                "compute the loss from them in the loop."
            )
        if len(output) != self._records:
            raise ModelError(
                f"The loss depends on an output of the model of shape {tuple(output.shape)}, in a batch of "
                f"{self._records} records. The first dimension must be the records of this batch: no other inputs, "
                "no time first (batch_first=True), no views that join records."
            )
        if not output.is_floating_point():
            raise ModelError("The loss depends on a complex output of the model. Return its real and imaginary parts.")

    def zero_grad(self) -> None:
        """Forget the backward passes of this batch; its outputs stay."""
        for cut in self.calls.cuts:
            cut.gradient = None

    # -- clip and step ---------------------------------------------------------------------------------

    def clip(self) -> bool:
        """Clip this batch's records and add them to the draw. True if the update is due, which `step` then makes.

        Raises CallOrderError without a backward pass, and what `private.backward` raises.
        """
        self._leave_mode()
        if not self.is_open:
            raise CallOrderError(f"optimizer.step() was called outside a batch, or twice. {_ORDER}")
        before = self.calls.is_called_elsewhere  # engines and checks call the model, too
        try:
            losses, calls, batch = self._losses(), self._calls_to_check(), self._batch
            self._end()
            self.private.backward(losses)
        except BatchDependenceError as error:
            self.private._turns.turn = "broken"
            raise BatchDependenceError(f"{error} {self._advice}") from error
        if calls:
            self._check_calls(batch, calls)
        self.calls.is_called_elsewhere = before
        return self.private.is_last and self.private._issuer.non_finite is None

    def _calls_to_check(self) -> list[Call]:
        """Those calls of the batch that the loss depends on."""
        used = {cut.call for cut in self.calls.cuts if cut.gradient is not None}
        return [call for number, call in enumerate(self._to_check) if number in used]

    def _check_calls(self, batch: Any, calls: Sequence[Call]) -> None:
        """Before the draw is released: the engine is done with the batch's own calls."""
        private = self.private
        assert private._issued is not None
        private._turns.turn = "broken"
        check_calls(private, private._issued, batch, calls, private._issuer.checks_made == 1)
        private._turns.turn = "step"

    @property
    def _advice(self) -> str:
        return (
            f"In this loop the loss must be the {self.reduction} over the records of the batch, as "
            f'reduction="{self.reduction}" computes it, and nothing else in it may depend on several records.'
        )

    def _losses(self) -> Tensor:
        """(batch,) losses, one per record, with the gradients of the records' own losses."""
        if self._leaked:
            raise ModelError(_UNSEEN)
        if any(cut.leaf.grad is not None for cut in self.calls.cuts):
            raise ModelError(_UNSEEN)
        if all(cut.gradient is None for cut in self.calls.cuts):
            raise CallOrderError(f"optimizer.step() was called before loss.backward(). {_ORDER}")
        self.calls.is_on = False  # a checkpointed module is called again
        self._prove()
        self.calls.link(is_thorough=self._watch is not None)
        used = [cut for cut in self.calls.cuts if cut.gradient is not None]
        for cut in used:
            self._check_output(cut.output)
        total = _share(used[0])
        for cut in used[1:]:
            total = total + _share(cut)
        return total

    def _prove(self) -> None:
        """Check what the loop computed, if this batch is watched."""
        if (seen := self._watch) is not None:
            used = [cut for cut in self.calls.cuts if cut.gradient is not None]
            numbers = {cut.call for cut in used}
            given = [tensor for number, tensors in self._given if number in numbers for tensor in tensors]
            self._proof.check(seen, given, [cut.gradient for cut in used if cut.gradient is not None])

    def step(self) -> bool:
        """Clip this batch, unless `clip` has; on the draw's last one add noise, update, and return True."""
        if self._is_empty:
            return True  # its update was made
        if self.is_open or self.private._issued is None:
            self.clip()
        return self.private.step()

    def until_closed(self, hook: Any) -> None:
        """Remove this hook, too, on closing. hook: what torch returned for it"""
        self._guards.append(hook)

    def close(self) -> None:
        """Remove hooks, and close the run."""
        self._leave_mode()
        self.calls.detach()
        for guard in self._guards:
            guard.remove()
        self.private.close()

    def __enter__(self) -> ForeignLoop:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _share(cut: Cut) -> Tensor:
    """(batch,) the inner product of each record's outputs and their gradient."""
    assert cut.gradient is not None
    gradient = cut.gradient.to(torch.promote_types(cut.gradient.dtype, torch.float32))
    output = cut.output.to(gradient.dtype)
    # An output may be infinite where the loss does not look, such as at masked places.
    product = output.masked_fill(gradient == 0, 0.0) * gradient
    return product.reshape(len(product), -1).sum(1)


_IGNORES_THE_MODEL = (
    "The loss depends on no output that the model gave for this batch. Compute it inside the loop, with gradients "
    "enabled, from the model that was made private."
)
_UNSEEN = (
    "A backward pass was made that this loop does not see: of parameters alone, of outputs in an object that is no "
    "tuple, list, dict or dataclass, by torch.autograd.backward, or in another thread. Call loss.backward() in the "
    "loop, on a loss of the model's outputs for this batch."
)
_GRADIENTS_OF_GRADIENTS = (
    "The loop differentiates the model's outputs by itself: a gradient penalty, or gradients by the inputs "
    "(torch.autograd.grad, create_graph=True). The graph of a foreign loop ends at the model's outputs. Write a loop "
    "of your own with epsilons.make_private, and compute one loss per record there."
)


# -- An optimizer around the caller's own: `step` is another one, and everything else is the caller's


class WrappedOptimizer(Optimizer):
    """Shares groups, state and defaults with `original_optimizer`, so schedules of either work. Subclasses step."""

    def __init__(self, optimizer: Optimizer) -> None:
        # Not Optimizer.__init__: everything that it sets up is the original optimizer's.
        self.original_optimizer = optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.original_optimizer.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.original_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original_optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        raise InputError("Parameters cannot be added to a private run. Give them to the optimizer before it begins.")

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        return self.original_optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        return self.original_optimizer.register_step_post_hook(hook)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.original_optimizer!r})"
