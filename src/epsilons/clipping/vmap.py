"""Vmap: one backward pass for the whole physical batch, then per-record gradients module by module, with a check.

Forward hooks record the inputs of each unit, a module that owns trainable parameters, and where its output enters the
graph. One backward pass through activations alone gives the gradient of every output. `torch.func` then differentiates
each unit record by record. A module with parameters of its own is one unit with all its children (hooks on the
out_proj of nn.MultiheadAttention would never fire, for it is never called).

Which axis holds the records is guessed from shapes, weights may be used outside their module, and a loss may contain
more than the model. So every physical batch passes the random check. Parameters that fail it, or that belong to a unit
torch.func cannot differentiate, are differentiated on the recorded graph, as `loop` does. Then the others are checked
again: a wrong gradient that is huge makes its record's clip factor tiny, and hides what else is wrong with it.

In 16 bits this would round the gradients of all records otherwise, because of one. So there all parameters are
differentiated on the graph, always: `loop` does it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from . import engine
from .ghost.graph import check_connected
from .loop import Loop, record_gradient
from .summing import RandomCheck, agree, full_precision, rounding_of

# -- Replaced: a module called with other tensors in the places of its parameters and buffers


def called_with(
    module: nn.Module, tensors: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """What the module returns with these tensors. Afterwards it has its own again.

    tensors: by name, as in `named_parameters()`; a tensor that other names share is replaced there, too

    Asked to find other names itself (`tie_weights=True`, its default), torch 2.13 does not restore a module that is
    registered under two names: the given tensors stay its parameters. So each place is named here, once.
    """
    own = {id(t): name for name, t in [*module.named_parameters(), *module.named_buffers()]}
    places = {
        f"{prefix}.{name}".lstrip("."): tensors[own[id(t)]]
        for prefix, part in module.named_modules()  # each module once
        for name, t in [*part._parameters.items(), *part._buffers.items()]
        if t is not None and own[id(t)] in tensors
    }
    return functional_call(module, places, tuple(args), dict(kwargs or {}), tie_weights=False)


# -- Vmap: one backward pass for the whole physical batch, then per-record gradients module by module, with a check

PerRecord = list[Tensor | None]  # one (batch, *shape) tensor per parameter


@dataclass(frozen=True)
class ModuleCall:
    """One call of one unit: its inputs, and where its outputs enter the graph."""

    unit: int
    leaves: tuple[Any, ...]
    versions: tuple[int, ...]
    spec: TreeSpec
    in_dims: tuple[int | None, ...]
    out_places: tuple[int, ...]  # which of the output's leaves are differentiated
    out_dims: tuple[int | None, ...]
    edges: tuple[GradientEdge, ...]
    likes: tuple[Tensor, ...]


class Vmap:
    """Per-record gradients by torch.func, with the random check for every physical batch."""

    def attach(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        place = {id(p): k for k, p in enumerate(self._parameters)}
        self._units = list({id(unit): unit for unit in _units(model, set(place))}.values())
        #: Per unit: its trainable parameters by name, and the place of each in the caller's order.
        self._names = [
            {name: place[id(p)] for name, p in unit.named_parameters() if id(p) in place} for unit in self._units
        ]
        self._loop = Loop()  # for 16 bits
        self._loop.attach(model, parameters)
        self._records = 0
        self._calls: list[ModuleCall] = []
        self._recording = False
        self._unsupported: set[int] = set()  # units that torch.func was seen to fail on
        self._check = RandomCheck(self._parameters)
        self._handles: list[Any] = []
        for number, unit in enumerate(self._units):
            if isinstance(unit, torch.jit.ScriptModule):
                continue  # takes no hooks: differentiated on the graph
            self._handles.append(unit.register_forward_hook(self._hook(number, unit), with_kwargs=True))

    def begin(self, records: int) -> None:
        self._records, self._calls, self._recording = records, [], True

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._recording = False

    @engine.no_bare_errors()
    def clipped_sum(
        self, losses: Tensor, clip_norm: Tensor, weight: Tensor, sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        self._recording = False  # torch.func calls the modules again below
        calls, self._calls = self._calls, []
        if len(losses) == 0:
            return [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]
        with full_precision():
            if not engine.HALF.isdisjoint(check_connected(losses, self._parameters)):
                return self._loop.clipped_sum(losses, clip_norm, weight, sizes)
            persons = engine.persons_in(losses, clip_norm, sizes)
            means = losses if persons is None else persons.means(losses)
            rows = self._by_module(calls, means)
            gradients = list(rows) if persons is None else [None if g is None else persons.summed(g) for g in rows]
            numbers = self._check.numbers(means, ())
            by_graph: PerRecord = []  # of all parameters, once some were found wrong
            while True:
                clip_factor = engine.clip_factors(_squared_norms(gradients, clip_norm), clip_norm, weight)
                size = _uncancelled(rows, persons, clip_factor)
                wrong = self._disagreeing(gradients, losses, means, numbers, clip_factor, size)
                if not (wrong := [k for k in wrong if not by_graph or gradients[k] is not by_graph[k]]):
                    return _add_up(gradients, self._parameters, clip_factor)
                by_graph = by_graph or self._by_graph(means)
                for k in wrong:
                    rows[k], gradients[k] = None, by_graph[k]

    # -- recording ---------------------------------------------------------------------------------

    def _hook(self, number: int, unit: nn.Module) -> Callable[..., None]:
        # A closure: a deep copy of the model (for an average of weights, say) shares the hook, and is recognised here.
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._recording and module is unit and torch.is_grad_enabled() and number not in self._unsupported:
                try:
                    call = self._call(number, args, kwargs, output)
                except RuntimeError:  # tensors without sizes, such as nested ones
                    self._unsupported.add(number)
                    return
                if call is not None:
                    self._calls.append(call)

        return hook

    def _call(self, number: int, args: Any, kwargs: Any, output: Any) -> ModuleCall | None:
        leaves, spec = tree_flatten((args, kwargs))
        out_leaves, _ = tree_flatten(output)
        places = tuple(i for i, leaf in enumerate(out_leaves) if isinstance(leaf, Tensor) and leaf.requires_grad)
        if not places:
            return None
        return ModuleCall(
            unit=number,
            leaves=tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            versions=tuple(leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves),
            spec=spec,
            in_dims=tuple(self._batch_dim(leaf) for leaf in leaves),
            out_places=places,
            out_dims=tuple(self._batch_dim(out_leaves[i]) for i in places),
            # Taken now: an in-place activation later would move the tensor to another place in the graph.
            edges=tuple(get_gradient_edge(out_leaves[i]) for i in places),
            likes=tuple(out_leaves[i].detach() for i in places),
        )

    def _batch_dim(self, leaf: Any) -> int | None:
        """Where this tensor seems to carry the records: the first dimension, or the second of a time-first one."""
        if not isinstance(leaf, Tensor):
            return None
        return next((d for d in (0, 1) if leaf.ndim > d and leaf.shape[d] == self._records), None)

    # -- differentiating ---------------------------------------------------------------------------

    def _by_module(self, calls: Sequence[ModuleCall], losses: Tensor) -> PerRecord:
        gradients: PerRecord = [None] * len(self._parameters)
        wanted = [call for call in calls if call.unit not in self._unsupported]
        edges = [edge for call in wanted for edge in call.edges]
        if not edges:
            return gradients
        output_grads = iter(torch.autograd.grad(losses.sum(), edges, retain_graph=True, allow_unused=True))
        for call in wanted:
            at_outputs = [next(output_grads) for _ in call.edges]
            if all(g is None for g in at_outputs):
                continue  # a call that the losses do not depend on
            filled = [
                torch.zeros_like(like) if g is None else g for g, like in zip(at_outputs, call.likes, strict=True)
            ]
            for name, gradient in self._unit_gradients(call, filled).items():
                k = self._names[call.unit][name]
                before = gradients[k]
                gradients[k] = gradient if before is None else before + gradient
        return gradients

    def _unit_gradients(self, call: ModuleCall, at_outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """{parameter: (batch, *shape)} for one call of one unit; none where torch.func cannot."""
        batched = [i for i, dim in enumerate(call.in_dims) if dim is not None]
        if not batched or any(dim is None for dim in call.out_dims):
            return {}
        changed = (
            leaf._version != v for leaf, v in zip(call.leaves, call.versions, strict=True) if isinstance(leaf, Tensor)
        )
        if any(changed):
            return {}  # an input was overwritten after the call
        unit = self._units[call.unit]
        parameters = {name: self._parameters[k].detach() for name, k in self._names[call.unit].items()}
        in_dims = tuple(call.in_dims[i] for i in batched)

        def one_record(at_output: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
            leaves = list(call.leaves)
            for i, value in zip(batched, inputs, strict=True):
                leaves[i] = value.unsqueeze(call.in_dims[i])  # type: ignore[arg-type]  # batched: not None
            args, kwargs = tree_unflatten(leaves, call.spec)

            def forward(values: dict[str, Tensor]) -> tuple[Tensor, ...]:
                out_leaves, _ = tree_flatten(called_with(unit, values, args, kwargs))
                return tuple(out_leaves[i] for i in call.out_places)

            pull_back = vjp(forward, parameters)[1]
            cotangents = tuple(
                g.unsqueeze(dim)  # type: ignore[arg-type]  # checked above
                for g, dim in zip(at_output, call.out_dims, strict=True)
            )
            gradient: dict[str, Tensor] = pull_back(cotangents)[0]
            return gradient

        try:
            with warnings.catch_warnings():
                # Operators without a batching rule are looped over: slow, right, and nothing the caller can act on.
                warnings.filterwarnings("ignore", message="There is a performance drop")
                return dict(
                    vmap(one_record, in_dims=(call.out_dims, in_dims), randomness="error")(
                        tuple(at_outputs), tuple(call.leaves[i] for i in batched)
                    )
                )
        except Exception as error:
            if engine.is_meant(error):
                raise
            self._unsupported.add(call.unit)
            return {}

    def _by_graph(self, losses: Tensor) -> PerRecord:
        """All gradients, record by record or person by person, as `loop` computes them."""
        # By all parameters: GroupNorm's backward pass needs that its input's gradient is asked (`ends_the_process`).
        rows = [record_gradient(losses, i, self._parameters, keep_graph=True) for i in range(len(losses))]
        return [
            torch.stack([torch.zeros_like(p) if g is None else g for g in column])
            for p, column in zip(self._parameters, zip(*rows, strict=True), strict=True)
        ]

    def _disagreeing(
        self,
        gradients: PerRecord,
        losses: Tensor,
        means: Tensor,
        numbers: Tensor,
        clip_factor: Tensor,
        uncancelled: float,
    ) -> list[int]:
        """The parameters with gradients that fail the check.

        means        (records or persons,) what was differentiated
        numbers      (records or persons,) random
        uncancelled  the size of all rows, where the rows of one person were added

        Raises NonFiniteGradientError where nothing can be compared.
        """
        factor, autograds = self._check.combination(means, clip_factor, (), numbers)
        if not torch.isfinite(losses).all() or not all(g is None or torch.isfinite(g).all() for g in autograds):
            raise engine.NonFiniteGradientError(engine.non_finite_losses(losses))
        ours = [None if g is None else factor.reshape(-1, *(1 for _ in g.shape[1:])) * g.double() for g in gradients]
        sizes = [0.0 if g is None else float(g.norm()) for g in ours]
        rounding = rounding_of([*sizes, uncancelled])
        return [
            k
            for k, (g, autograd, size) in enumerate(zip(ours, autograds, sizes, strict=True))
            # Without ours there is no norm, so nothing scales autograd's: a huge record may hide all others.
            if (g is None and autograd is not None)
            or not agree(None if g is None else g.sum(0), autograd, size, rounding)
        ]


def _units(module: nn.Module, wanted: set[int]) -> Iterator[nn.Module]:
    """Modules with trainable parameters of their own, each with everything below it."""
    if any(id(p) in wanted for p in module.parameters(recurse=False)):
        yield module
        return
    for child in module.children():
        yield from _units(child, wanted)


def _uncancelled(rows: PerRecord, persons: engine.Persons | None, clip_factor: Tensor) -> float:
    """The size of all persons' clipped rows, if none cancelled."""
    if persons is None:
        return 0.0
    squared = _squared_norms(rows, persons.owner).nan_to_num()
    return float((clip_factor[persons.owner].square() * squared).sum().sqrt())


def _squared_norms(gradients: PerRecord, like: Tensor) -> Tensor:
    """(batch,) squared norm of each record's gradient by all parameters, 64-bit."""
    squared = torch.zeros(len(like), dtype=torch.float64, device=like.device)
    for g in gradients:
        if g is not None:
            squared += g.double().reshape(len(g), -1).square().sum(1)
    return squared


def _add_up(gradients: PerRecord, parameters: Sequence[nn.Parameter], factor: Tensor) -> list[Tensor]:
    """The clipped gradients of all records, added: one 64-bit tensor per parameter. factor: (batch,)"""
    total = []
    for g, p in zip(gradients, parameters, strict=True):
        if g is None:
            total.append(torch.zeros_like(p, dtype=torch.float64))
        else:
            # A zero factor is not enough: 0·NaN is NaN, so the row itself is blanked.
            rows = torch.where((factor > 0)[:, None], g.double().reshape(len(g), -1), 0.0)
            total.append((factor @ rows).reshape(p.shape))
    return total
