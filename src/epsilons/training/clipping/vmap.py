"""Vmap: one backward pass for the whole chunk, then per-record gradients module by module, and a proof.

Forward hooks note what went into each unit, a module that owns trainable parameters, and where its output
enters the graph. One backward pass through activations alone gives the gradient at every output; `torch.func`
then differentiates each unit record by record. A module with parameters of its own is one unit with all
its children (nn.MultiheadAttention never calls its out_proj, so hooks there would never fire).

Which axis carries the records is guessed from shapes, weights may be used outside their module, and a loss may hold
more than the model. So nothing is taken on trust: for every chunk, the gradients are added up with random
factors v and compared with autograd's own gradient of Σ v·losses. Were a single record's gradient wrong, the two would
differ almost surely (Freivalds' check of a product). Parameters that disagree, or whose unit torch.func
cannot handle, are differentiated on the recorded graph, as the definition does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .engine import NonFiniteGradientError, broken, clip_factors
from .ghost.graph import check_connected
from .loop import dense, record_gradient
from .precision import full_precision

#: How far the random sum may be from autograd's: relative to this parameter's part of it, and to all of it. The first
#: is far above 32-bit rounding and far below a mix-up; the second is what rounding leaves where gradients cancel to 0.
AGREEMENT = 1e-3
ROUNDING = 1e-6

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


class Vmap:
    """Per-record gradients by torch.func, checked against the definition for every chunk."""

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
        self._unsupported: set[int] = set()  # units that torch.func was seen to fail on
        self._factors = torch.Generator().manual_seed(0)  # the check needs factors that data do not choose, not secrets
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
        if len(losses) == 0:
            return [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]
        check_connected(losses, self._parameters)
        with full_precision():
            gradients = self._by_module(taps, losses)
            wrong = self._disagreeing(gradients, losses, clip_norm, weight)
            if wrong:
                self._by_graph(losses, wrong, gradients)
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

    def _by_module(self, taps: Sequence[_Tap], losses: Tensor) -> PerRecord:
        gradients: PerRecord = [None] * len(self._parameters)
        wanted = [tap for tap in taps if tap.unit not in self._unsupported]
        edges = [edge for tap in wanted for edge in tap.edges]
        if not edges:
            return gradients
        found = iter(torch.autograd.grad(losses.sum(), edges, retain_graph=True, allow_unused=True))
        for tap in wanted:
            at_outputs = [next(found) for _ in tap.edges]
            if all(g is None for g in at_outputs):
                continue  # a call that the losses do not depend on
            filled = [torch.zeros_like(like) if g is None else g for g, like in zip(at_outputs, tap.likes, strict=True)]
            for name, gradient in self._unit_gradients(tap, filled).items():
                k = self._names[tap.unit][name]
                before = gradients[k]
                gradients[k] = gradient if before is None else before + gradient
        return gradients

    def _unit_gradients(self, tap: _Tap, at_outputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """{parameter: (batch, *shape)} for one call of one unit; none where torch.func cannot."""
        batched = [i for i, dim in enumerate(tap.in_dims) if dim is not None]
        if not batched or any(dim is None for dim in tap.out_dims):
            return {}
        changed = (
            leaf._version != v for leaf, v in zip(tap.leaves, tap.versions, strict=True) if isinstance(leaf, Tensor)
        )
        if any(changed):
            return {}  # an input was overwritten after the call
        unit = self._units[tap.unit]
        parameters = {name: self._parameters[k].detach() for name, k in self._names[tap.unit].items()}
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

        try:
            with warnings.catch_warnings():
                # Operators without a batching rule are looped over: slow, right, and nothing the caller can act on.
                warnings.filterwarnings("ignore", message="There is a performance drop")
                return dict(
                    vmap(one_record, in_dims=(tap.out_dims, in_dims), randomness="error")(
                        tuple(at_outputs), tuple(tap.leaves[i] for i in batched)
                    )
                )
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AttributeError):
            self._unsupported.add(tap.unit)
            return {}

    def _by_graph(self, losses: Tensor, which: Sequence[int], gradients: PerRecord) -> None:
        """Fill in the gradients of these parameters, record by record, as the definition does."""
        parameters = [self._parameters[k] for k in which]
        rows = [record_gradient(losses, i, parameters, keep_graph=i < len(losses) - 1) for i in range(len(losses))]
        for place, k in enumerate(which):
            zero = torch.zeros_like(self._parameters[k])
            gradients[k] = torch.stack([zero if row[place] is None else row[place] for row in rows])  # type: ignore[misc]

    def _disagreeing(self, gradients: PerRecord, losses: Tensor, clip_norm: Tensor, weight: Tensor) -> list[int]:
        """The parameters whose gradients fail the check.

        Raises NonFiniteGradientError where nothing can be compared.
        """
        # Factors in clipped units, so that no record is too small to be seen beside another.
        random = torch.randn(len(losses), generator=self._factors, dtype=torch.float64).to(losses.device)
        factor = random * clip_factors(_squared_norms(gradients, clip_norm), clip_norm, weight)
        whole = torch.autograd.grad(
            (factor.to(losses.dtype) * losses).sum(), self._parameters, retain_graph=True, allow_unused=True
        )
        expected = [None if g is None else dense(g).double() for g in whole]
        if not torch.isfinite(losses).all() or not all(g is None or torch.isfinite(g).all() for g in expected):
            raise NonFiniteGradientError(broken(losses))
        own = [None if g is None else factor[:, None] * g.double().reshape(len(g), -1) for g in gradients]
        sizes = [0.0 if g is None else float(g.norm()) for g in own]
        rounding = ROUNDING * math.hypot(*sizes)
        wrong = []
        for k, (ours, its, size) in enumerate(zip(own, expected, sizes, strict=True)):
            if ours is None and its is None:
                continue
            left = torch.zeros((), dtype=torch.float64) if ours is None else ours.sum(0)
            right = 0.0 if its is None else its.reshape(-1)
            # Negated, so that NaN disagrees.
            if not float((left - right).norm()) <= AGREEMENT * size + rounding:
                wrong.append(k)
        return wrong


def _units(module: nn.Module, wanted: set[int]) -> Iterator[nn.Module]:
    """Modules with trainable parameters of their own, each with everything below it."""
    if any(id(p) in wanted for p in module.parameters(recurse=False)):
        yield module
        return
    for child in module.children():
        yield from _units(child, wanted)


def _squared_norms(gradients: PerRecord, like: Tensor) -> Tensor:
    """(batch,) squared norm of each record's whole gradient, 64-bit."""
    squared = torch.zeros(len(like), dtype=torch.float64, device=like.device)
    for g in gradients:
        if g is not None:
            squared += g.double().reshape(len(g), -1).square().sum(1)
    return squared


def _add_up(
    gradients: PerRecord, parameters: Sequence[nn.Parameter], clip_norm: Tensor, weight: Tensor
) -> list[Tensor]:
    """Clip every record's whole gradient and add: one 64-bit tensor per parameter."""
    factor = clip_factors(_squared_norms(gradients, clip_norm), clip_norm, weight)  # (batch,)
    total = []
    for g, p in zip(gradients, parameters, strict=True):
        if g is None:
            total.append(torch.zeros_like(p, dtype=torch.float64))
        else:
            # A zero factor is not enough: 0·NaN is NaN, so the row itself is blanked.
            rows = torch.where((factor > 0)[:, None], g.double().reshape(len(g), -1), 0.0)
            total.append((factor @ rows).reshape(p.shape))
    return total
