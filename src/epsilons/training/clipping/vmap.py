"""Vmap: one backward pass for the whole chunk, then per-record gradients module by module.

Forward hooks note what went into each unit, a module that owns trainable parameters, and where its output
enters the graph. One backward pass through activations alone gives the gradient at every output; `torch.func`
then differentiates each unit record by record. A module with parameters of its own is one unit with all
its children (nn.MultiheadAttention never calls its out_proj, so hooks there would never fire).

Whether that is right is not taken on trust. For every new pattern of calls, the gradients of a first chunk are
compared with the definition (`loop`), in sum and for single records; parameters that disagree, or whose unit
torch.func cannot handle (dropout inside, weights used outside their module, time-first layouts), are from
then on differentiated on the recorded graph, as the definition does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .engine import Contaminated, clip_factors
from .loop import record_gradient

#: How far a gradient may be from the definition's, relative to its norm: far above rounding, far below a mix-up.
AGREEMENT = 1e-2

PerRecord = list[Tensor | None]  # one (batch, *shape) tensor per parameter


@dataclass(frozen=True)
class _Tap:
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

    @property
    def pattern(self) -> tuple[Any, ...]:
        return (self.unit, self.in_dims, self.out_dims)


class Vmap:
    """Per-record gradients by torch.func, checked against the definition; the default engine."""

    def attach(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        place = {id(p): k for k, p in enumerate(self._parameters)}
        self._units = list({id(unit): unit for unit in _units(model, set(place))}.values())
        #: Per unit: its trainable parameters by name, and where each stands in the caller's order.
        self._names = [
            {name: place[id(p)] for name, p in unit.named_parameters() if id(p) in place} for unit in self._units
        ]
        self._records = 0
        self._taps: list[_Tap] = []
        self._recording = False
        #: Per pattern of calls: the parameters to differentiate on the recorded graph.
        self._on_graph: dict[tuple[Any, ...], frozenset[int]] = {}
        self._handles = [
            unit.register_forward_hook(self._hook(number, unit), with_kwargs=True)
            for number, unit in enumerate(self._units)
        ]

    def begin(self, records: int) -> None:
        self._records, self._taps, self._recording = records, [], True

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._recording = False

    def clipped_sum(self, losses: Tensor, clip_norm: Tensor, weight: Tensor) -> list[Tensor]:
        self._recording = False  # torch.func calls the modules again below
        taps, self._taps = self._taps, []
        pattern = tuple(tap.pattern for tap in taps)
        if pattern not in self._on_graph:
            self._on_graph[pattern] = self._check(taps, losses)
        by_graph = self._on_graph[pattern]
        try:
            gradients = self._by_module(taps, losses, by_graph, keep_graph=bool(by_graph))
        except _Unsupported:  # a module may fail on one chunk and not on another
            by_graph = self._on_graph[pattern] = frozenset(range(len(self._parameters)))
            gradients = [None] * len(self._parameters)
        if by_graph:
            self._by_graph(losses, by_graph, gradients)
        return _add_up(gradients, self._parameters, clip_norm, weight)

    # -- recording ---------------------------------------------------------------------------------

    def _hook(self, number: int, unit: nn.Module) -> Callable[..., None]:
        # A closure: a deep copy of the model (for an average of weights, say) shares it, and is told apart.
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._recording and module is unit and torch.is_grad_enabled():
                tap = self._tap(number, args, kwargs, output)
                if tap is not None:
                    self._taps.append(tap)

        return hook

    def _tap(self, number: int, args: Any, kwargs: Any, output: Any) -> _Tap | None:
        leaves, spec = tree_flatten((args, kwargs))
        out_leaves, _ = tree_flatten(output)
        places = tuple(i for i, leaf in enumerate(out_leaves) if isinstance(leaf, Tensor) and leaf.requires_grad)
        if not places:
            return None
        return _Tap(
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

    def _by_module(self, taps: Sequence[_Tap], losses: Tensor, skip: frozenset[int], keep_graph: bool) -> PerRecord:
        gradients: PerRecord = [None] * len(self._parameters)
        wanted = [tap for tap in taps if not skip.issuperset(self._names[tap.unit].values())]
        if not wanted:
            return gradients
        edges = [edge for tap in wanted for edge in tap.edges]
        found = iter(torch.autograd.grad(losses.sum(), edges, retain_graph=keep_graph, allow_unused=True))
        for tap in wanted:
            at_outputs = [next(found) for _ in tap.edges]
            if all(g is None for g in at_outputs):
                continue  # a call that the losses do not depend on
            filled = [torch.zeros_like(like) if g is None else g for g, like in zip(at_outputs, tap.likes, strict=True)]
            for name, gradient in self._unit_gradients(tap, filled).items():
                k = self._names[tap.unit][name]
                if k not in skip:
                    before = gradients[k]
                    gradients[k] = gradient if before is None else before + gradient
        return gradients

    def _unit_gradients(self, tap: _Tap, at_outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """{parameter: (batch, *shape)} for one call of one unit. Raises _Unsupported if torch.func cannot."""
        if any(dim is None for dim in tap.out_dims):
            raise _Unsupported
        changed = (
            leaf._version != v for leaf, v in zip(tap.leaves, tap.versions, strict=True) if isinstance(leaf, Tensor)
        )
        if any(changed):
            raise _Unsupported  # an input was overwritten after the call
        unit = self._units[tap.unit]
        parameters = {name: self._parameters[k].detach() for name, k in self._names[tap.unit].items()}
        batched = [i for i, dim in enumerate(tap.in_dims) if dim is not None]
        in_dims = tuple(tap.in_dims[i] for i in batched)

        def one_record(at_output: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
            leaves = list(tap.leaves)
            for i, value in zip(batched, inputs, strict=True):
                leaves[i] = value.unsqueeze(tap.in_dims[i])  # type: ignore[arg-type]  # batched: not None
            args, kwargs = tree_unflatten(leaves, tap.spec)

            def forward(values: dict[str, Tensor]) -> tuple[Tensor, ...]:
                out_leaves, _ = tree_flatten(functional_call(unit, values, args, kwargs))
                return tuple(out_leaves[i] for i in tap.out_places)

            pull_back = vjp(forward, parameters)[1]
            cotangents = tuple(
                g.unsqueeze(dim)  # type: ignore[arg-type]  # checked above
                for g, dim in zip(at_output, tap.out_dims, strict=True)
            )
            gradient: dict[str, Tensor] = pull_back(cotangents)[0]
            return gradient

        if not batched:
            raise _Unsupported
        try:
            return dict(
                vmap(one_record, in_dims=(tap.out_dims, in_dims), randomness="error")(
                    tuple(at_outputs), tuple(tap.leaves[i] for i in batched)
                )
            )
        except torch.OutOfMemoryError:
            raise
        except (
            RuntimeError,
            NotImplementedError,
            TypeError,
            ValueError,
            IndexError,
            AttributeError,
        ) as error:
            raise _Unsupported from error

    def _by_graph(self, losses: Tensor, which: frozenset[int], gradients: PerRecord) -> None:
        """Fill in the gradients of these parameters, record by record, as the definition does."""
        order = sorted(which)
        parameters = [self._parameters[k] for k in order]
        rows = [record_gradient(losses, i, parameters, keep_graph=i < len(losses) - 1) for i in range(len(losses))]
        for place, k in enumerate(order):
            column = [row[place] for row in rows]
            if any(g is not None for g in column):
                zero = torch.zeros_like(self._parameters[k])
                stacked = torch.stack([zero if g is None else g for g in column])
                if len(losses) > 1 and not torch.isfinite(stacked).all():
                    raise Contaminated  # 0·NaN: whose it was cannot be told from here
                gradients[k] = stacked

    # -- checking ----------------------------------------------------------------------------------

    def _check(self, taps: Sequence[_Tap], losses: Tensor) -> frozenset[int]:
        """The parameters that must be differentiated on the recorded graph, for chunks that look like this one."""
        failed: set[int] = set()
        while True:
            try:
                ours = self._by_module(taps, losses, frozenset(failed), keep_graph=True)
                break
            except _Unsupported:
                failed |= self._unsupported(taps, losses, failed)
        rows = [g.double().flatten(1).norm(dim=1) for g in ours if g is not None]  # each (batch,)
        size = torch.stack(rows).square().sum(0).sqrt() if rows else torch.zeros(len(losses))
        if not (torch.isfinite(losses).all() and torch.isfinite(size).all()):
            raise Contaminated  # nothing can be compared in a chunk that holds a non-finite value
        whole = torch.autograd.grad(losses.sum(), self._parameters, retain_graph=True, allow_unused=True)
        for k, (own, expected) in enumerate(zip(ours, whole, strict=True)):
            if not _agree(None if own is None else own.sum(0), expected, rounding=1e-5 * float(size.sum())):
                failed.add(k)
        for i in sorted({0, len(losses) - 1, int(size.argmax())}):
            one = record_gradient(losses, i, self._parameters, keep_graph=True)
            for k, (own, its) in enumerate(zip(ours, one, strict=True)):
                if not _agree(None if own is None else own[i], its, rounding=1e-5 * float(size[i])):
                    failed.add(k)
        return frozenset(failed)

    def _unsupported(self, taps: Sequence[_Tap], losses: Tensor, known: set[int]) -> set[int]:
        """The parameters of the first unit that torch.func cannot handle."""
        for tap in taps:
            own = set(self._names[tap.unit].values())
            if own <= known:
                continue
            try:
                self._by_module([tap], losses, frozenset(known), keep_graph=True)
            except _Unsupported:
                return own
        raise AssertionError("no unit fails alone, yet together they do")


class _Unsupported(Exception):
    """This unit cannot be differentiated record by record with torch.func."""


def _units(module: nn.Module, wanted: set[int]) -> Iterator[nn.Module]:
    """Modules with trainable parameters of their own, each with everything below it."""
    if any(id(p) in wanted for p in module.parameters(recurse=False)):
        yield module
        return
    for child in module.children():
        yield from _units(child, wanted)


def _agree(own: Tensor | None, expected: Tensor | None, rounding: float) -> bool:
    if own is None or expected is None:
        present = own if expected is None else expected
        return present is None or not bool(_dense(present).any())
    expected = _dense(expected).double()
    distance = (own.double() - expected).norm()
    return bool(distance <= AGREEMENT * expected.norm() + rounding)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _add_up(
    gradients: PerRecord, parameters: Sequence[nn.Parameter], clip_norm: Tensor, weight: Tensor
) -> list[Tensor]:
    """Clip every record's whole gradient and add: one 64-bit tensor per parameter."""
    squared = torch.zeros(len(clip_norm), dtype=torch.float64, device=clip_norm.device)
    for g in gradients:
        if g is not None:
            squared += g.double().flatten(1).square().sum(1)
    factor = clip_factors(squared, clip_norm, weight)  # (batch,)
    total = []
    for g, p in zip(gradients, parameters, strict=True):
        if g is None:
            total.append(torch.zeros_like(p, dtype=torch.float64))
        else:
            # A zero factor is not enough: 0·NaN is NaN, so the row itself is blanked.
            rows = torch.where((factor > 0)[:, None], g.double().flatten(1), 0.0)
            total.append((factor @ rows).reshape(p.shape))
    return total
