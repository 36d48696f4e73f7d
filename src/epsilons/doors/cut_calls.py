"""The calls of a model, cut: the caller's graph ends at their outputs, and goes on behind them on demand.

Every tensor that an outermost call of a trained module returns is replaced by a copy of a leaf. A gradient of the
caller's loss by these leaves shows what the loss says of each output, and no gradient reaches a parameter. Where one
call begins from the outputs of another, one vector-Jacobian product carries the gradient on to the earlier leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..core.modules import leaves_of
from ..draws import batches
from ..errors import CallOrderError, InputError, ModelError

#: The name of the attribute by which a leaf of a cut is known, with the number of its batch.
_BATCH = "_epsilons_batch"


@dataclass(eq=False)
class Cut:
    """One output of one call.

    output    with its graph
    leaf      from which the caller's graph begins
    call      number of the call in the batch
    gradient  of the caller's loss by the leaf; None if there is none yet
    """

    output: Tensor
    leaf: Tensor
    call: int
    gradient: Tensor | None = None

    def add(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.gradient = gradient if self.gradient is None else self.gradient + gradient


@dataclass(eq=False)
class CutCalls:
    """The cuts of the batch at hand.

    on_cut    called with each leaf, before it is copied for the caller
    on_call   called with (module, args, kwargs) after each outermost call that was cut
    """

    parameters: Sequence[nn.Parameter]
    on_cut: Callable[[Tensor], None]
    on_call: Callable[[nn.Module, Any, Any], None]
    cuts: list[Cut] = field(default_factory=list)
    is_on: bool = False
    is_called_elsewhere: bool = False
    batch: int = 0
    calls: int = 0
    _depth: int = 0
    _handles: list[Any] = field(default_factory=list)
    _names: dict[int, str] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> CutCalls:
        """The hooks of a copied model do nothing: a copied run would draw with the same key."""
        return CutCalls([], _nothing, _nothing)

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "A model of an open private run cannot be pickled: its hooks hold the run, with its secret key. Save "
            "model.state_dict(), or close the run first."
        )

    def attach(self, model: nn.Module) -> None:
        """Add hooks to every module that holds a trained parameter. Raises ModelError for one that takes no hooks."""
        trained = set(map(id, self.parameters))
        self._names = {id(p): name for name, p in model.named_parameters()}
        for name, module in model.named_modules():
            if any(id(p) in trained for p in module.parameters()):
                try:
                    self._attach(module)
                except RuntimeError as error:
                    self.detach()
                    raise ModelError(
                        f"The module {name or 'itself'} ({type(module).__name__}) takes no hooks: {error}. Train the "
                        "module that was compiled by torch.jit, and script the trained one."
                    ) from error

    def _attach(self, module: nn.Module) -> None:
        self._handles.append(module.register_forward_pre_hook(self._before))
        self._handles.append(module.register_forward_hook(self._after, with_kwargs=True, always_call=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.end()

    def begin(self) -> None:
        """A batch begins. Nothing is left of the one before."""
        self.batch += 1
        self.calls, self._depth, self.is_on = 0, 0, True

    def end(self) -> None:
        self.is_on, self.cuts = False, []

    @property
    def is_inside(self) -> bool:
        """True during a call."""
        return self._depth > 0

    def _before(self, module: nn.Module, args: Any) -> None:
        self._depth += self.is_on
        self.is_called_elsewhere |= not self.is_on

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        if not self.is_on:
            return None
        self._depth -= 1
        if self._depth > 0 or not torch.is_grad_enabled():
            return None
        before = len(self.cuts)
        cut = _mapped(outputs, self._cut)
        if len(self.cuts) == before:
            return None  # nothing in it depends on a parameter
        self._check_inputs(args, kwargs)
        self.calls += 1
        self.on_call(module, args, kwargs)
        return cut

    def _check_inputs(self, args: Any, kwargs: Any) -> None:
        """Refuse inputs that parameters outside of the run have made: they would silently stay as they are."""
        given = [tensor for tensor in batches.tensors((args, kwargs)) if tensor.requires_grad]
        known = {*self._names, *map(id, self.parameters)} if given else set()
        others = [p for p in leaves_of(given) if isinstance(p, nn.Parameter) and id(p) not in known]
        if others:
            shapes = ", ".join(str(tuple(p.shape)) for p in others[:3])
            raise ModelError(
                f"An input of the model depends on parameters that the model does not have (shapes {shapes}), such as "
                "those of an encoder before it. They get no gradient here. To train them, put both into one nn.Module "
                "and make that private. If they are not to be trained, compute the input under torch.no_grad()."
            )

    def _cut(self, node: Any) -> Any:
        if not isinstance(node, Tensor) or not node.requires_grad or node.grad_fn is None:
            return node
        leaf = node.detach().requires_grad_()
        setattr(leaf, _BATCH, self.batch)
        self.cuts.append(Cut(node, leaf, self.calls))
        self.on_cut(leaf)
        return leaf.clone()  # a copy, so that the caller may write to it

    # -- gradients -------------------------------------------------------------------------------------

    def used_by(self, tensor: Tensor) -> list[Cut]:
        """The cuts of this batch that a tensor of the caller depends on.

        Raises ModelError if it also depends on anything else that requires a gradient, CallOrderError if it depends on
        outputs of a former batch.
        """
        found = {id(leaf): leaf for leaf in leaves_of([tensor])}
        known = {id(cut.leaf): cut for cut in self.cuts}
        used = [cut for key, cut in known.items() if key in found]
        self._check_former(found.values())
        others = [leaf for key, leaf in found.items() if key not in known]
        if used and others:
            raise ModelError(self._also_depends_on(others))
        if not used and {id(leaf) for leaf in others} & set(map(id, self.parameters)):
            raise ModelError(self._also_depends_on(others))
        return used

    def _check_former(self, leaves: Any) -> None:
        if any(getattr(leaf, _BATCH, self.batch) != self.batch for leaf in leaves):
            raise CallOrderError(
                "The loss depends on an output that the model gave for a former batch, which is gone. Compute the "
                "loss from the outputs for this batch alone. A state must not be carried from batch to batch, detached "
                "or not: in it, a record would change later updates without noise."
            )

    def _also_depends_on(self, others: Sequence[Tensor]) -> str:
        trained = [p for p in others if any(p is q for q in self.parameters)]
        if trained:
            names = ", ".join(self._names.get(id(p), "a parameter outside the model") for p in trained[:3])
            return (
                f"The loss uses trained parameters ({names}) outside a call of a module: a penalty on weights, a "
                "weight that is used by itself, or an output in an object that is no tuple, list, dict or dataclass. "
                "Such a gradient cannot be clipped by record. Put penalties into the optimizer (weight_decay), use "
                "parameters inside forward, and call the layers as modules."
            )
        shapes = ", ".join(str(tuple(t.shape)) for t in others[:3])
        return (
            f"The loss depends on tensors that require a gradient and are no output of the model (shapes {shapes}): "
            "parameters that the optimizer does not hold, or inputs with requires_grad. They would get no gradient "
            "here. Detach them, or write a loop of your own with epsilons.make_private."
        )

    def link(self, is_thorough: bool) -> None:
        """Carry gradients on from later calls to the earlier calls that they began from.

        is_thorough   also look for outputs of former batches among what a single call began from
        """
        for call in reversed(range(self.calls)):
            used = [cut for cut in self.cuts if cut.call == call and cut.gradient is not None]
            if not used or not (is_thorough or call):
                continue
            found = {id(leaf): leaf for leaf in leaves_of([cut.output for cut in used])}
            self._check_former(found.values())
            earlier = [cut for cut in self.cuts if id(cut.leaf) in found]
            if earlier:
                gradients = torch.autograd.grad(
                    [cut.output for cut in used],
                    [cut.leaf for cut in earlier],
                    [cut.gradient for cut in used],
                    retain_graph=True,
                    allow_unused=True,
                )
                for cut, gradient in zip(earlier, gradients, strict=True):
                    cut.add(gradient)


def _nothing(*given: Any) -> None:
    """For hooks of a copy."""


def _mapped(node: Any, change: Callable[[Any], Any]) -> Any:
    """The structure with every tensor changed; torch's way to rebuild goes first: some classes refuse others."""
    leaves, spec = _pytree.tree_flatten(node)
    if spec.is_leaf():
        if isinstance(node, Tensor) or batches.parts(node) is None:
            return change(node)
        return batches.mapped(node, change)
    return _pytree.tree_unflatten([_mapped(leaf, change) for leaf in leaves], spec)
