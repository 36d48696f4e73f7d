"""Ghost: one forward pass, one backward pass through activations alone, and per-record gradients never written out
where their norms and weighted sum can be had without.

The recorded graph is walked from the losses down (see `tracing`). Where an operator's weight sums over the records, the
gradient that arrives there and what the operator saved tell every record's own part (see `families`). All uses of a
parameter are added before its norm is taken. The walk is a proof for this very chunk: lanes rest on what
operators are, not on guesses from shapes, modules or names.

What the walk cannot see are hooks that alter gradients on their way, and what rounding to 16 bits does to them. So at
the first chunk of every pattern of operators, and at every AUDIT_EVERY-th after, the sum is taken with random factors
too and compared with autograd's own gradient of the same combination of losses, as `vmap` does for each chunk. A graph
that proves nothing, or a pattern that disagrees, is left to `vmap`, which has its own proof.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..engine import NonFiniteGradientError, clip_factors
from ..loop import Loop, dense
from ..precision import full_precision
from ..straight import EveryToken, read, straight
from ..vmap import AGREEMENT, ROUNDING, Vmap
from ..ways import Given, Ways
from .batch_axis import Unproven, operator, shape_into, shape_out
from .graph import Edge, Place, Trace, trace
from .layers import family, needs_the_graph
from .lstm import at_input
from .per_sample_grads import Dense, Outer, Piece, Tokens

AUDIT_EVERY = 64

_log = logging.getLogger(__name__)


class Ghost:
    """Norms without gradients where that is cheaper; every chunk proved on its graph; the default engine."""

    def __init__(self, ways: Given = "rule") -> None:
        self.ways = Ways(ways)

    def attach(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._model, self._parameters = model, list(parameters)
        self._place = {id(p): k for k, p in enumerate(self._parameters)}
        self._alone = Loop()
        self._alone.attach(model, parameters)
        self._other: Vmap | None = None  # for graphs that prove nothing
        self._records = 0
        self._seen: dict[int, int] = {}  # how many chunks of each pattern there were
        self._refused: dict[int, str] = {}  # patterns that disagreed with autograd, and what may be why
        self._factors = torch.Generator().manual_seed(0)  # the audit needs factors that data do not choose, not secrets

    @property
    def is_proven(self) -> bool:
        """False once a chunk had to be left to another engine."""
        return self._other is None

    def fall_back(self) -> Vmap:
        """The engine for what cannot be proved; from now on it notes what goes through the model."""
        if self._other is None:
            self._other = Vmap()
            self._other.attach(self._model, self._parameters)
        return self._other

    def begin(self, records: int) -> None:
        self._records = records
        if self._other is not None:
            self._other.begin(records)

    def detach(self) -> None:
        if self._other is not None:
            self._other.detach()

    def clipped_sum(self, losses: Tensor, clip_norm: Tensor, weight: Tensor) -> list[Tensor]:
        if len(losses) <= 1:
            return self._alone.clipped_sum(losses, clip_norm, weight)
        with full_precision():
            try:
                return self._proven(losses, clip_norm, weight)
            except Unproven as reason:
                return self._elsewhere(str(reason), losses, clip_norm, weight)

    def _proven(self, losses: Tensor, clip_norm: Tensor, weight: Tensor) -> list[Tensor]:
        if any(p._backward_hooks for p in self._parameters):
            raise Unproven("a hook on a parameter")
        found = trace(losses, self._place, len(losses))
        if found.pattern in self._refused:
            raise Unproven(self._refused[found.pattern])
        count = self._seen[found.pattern] = self._seen.get(found.pattern, -1) + 1
        is_audited = count % AUDIT_EVERY == 0
        pieces = self._pieces(found, losses, keep_graph=is_audited)
        with torch.no_grad():
            self._decide(pieces)
            squared, total = _norms(pieces, losses)
            factor = clip_factors(total, clip_norm, weight)
            broken = ~torch.isfinite(total)
            if bool(broken.any()):
                if is_audited:
                    self._seen[found.pattern] = count - 1
                    raise NonFiniteGradientError(broken.nonzero()[:, 0].tolist())  # nothing could be compared
                pieces = {k: piece.blank(~broken) for k, piece in pieces.items()}
        if is_audited and not self._agrees(pieces, squared, factor, losses):
            self._refused[found.pattern] = reason = _why_it_disagrees(losses)
            raise Unproven(reason)
        with torch.no_grad():
            return self._sums(pieces, factor)

    def straight(self, losses: Tensor, clip_norm: Tensor, weight: Tensor) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """(the clipped sum, whether all of it is finite, what norms and sums were taken of), without a look at values.

        So it can be recorded for chunks to come (see `compiling`). Raises Unproven; hooks are the caller's business.
        """
        found = trace(losses, self._place, len(losses))
        pieces = self._pieces(found, losses, keep_graph=False, notes={Tokens: EveryToken})
        with torch.no_grad():
            self._decide(pieces)
            pieces = {k: straight(piece) for k, piece in pieces.items()}
            _, total = _norms(pieces, losses)
            sums = self._sums(pieces, clip_factors(total, clip_norm, weight))
            return sums, torch.isfinite(total).all(), [tensor for piece in pieces.values() for tensor in read(piece)]

    def _decide(self, pieces: dict[int, Piece]) -> None:
        for piece in pieces.values():
            if isinstance(piece, Outer):
                piece.decide(self.ways)

    def _sums(self, pieces: dict[int, Piece], factor: Tensor) -> list[Tensor]:
        return [
            pieces[k].weighted(factor) if k in pieces else torch.zeros_like(p, dtype=torch.float64)
            for k, p in enumerate(self._parameters)
        ]

    def _pieces(
        self, found: Trace, losses: Tensor, keep_graph: bool, notes: Mapping[Any, Any] | None = None
    ) -> dict[int, Piece]:
        """{parameter: the gradients of all records by it}. notes: for the families"""
        notes = {Ways: self.ways, **(notes or {})}
        finish = [family(place, len(losses), notes) for place in found.places]
        at = _backward(found, losses, notes, keep_graph or any(needs_the_graph(place) for place in found.places))
        with torch.no_grad():
            pieces = []
            for place, made in zip(found.places, finish, strict=True):
                gradients = [at.get((id(place.node), k)) for k in range(len(place.lanes))]
                if all(g is None for g in gradients):
                    continue  # nothing of the losses came here
                if gradients[0] is None:
                    gradients[0] = losses.new_zeros(shape_into(place.node, 0))
                pieces.append((place.target, made(gradients)))
        return self._by_parameter(pieces)

    def _by_parameter(self, pieces: Sequence[tuple[Edge, Piece]]) -> dict[int, Piece]:
        """All uses of one parameter, added."""
        found: dict[int, Piece] = {}
        later: list[tuple[Edge, Dense]] = []
        with torch.no_grad():
            for target, piece in pieces:
                node, carried = _through_views(target[0], piece)
                k = self._place.get(id(getattr(node, "variable", None)))
                if k is None:
                    later.append(((node, 0) if node is not target[0] else target, carried.dense()))
                else:
                    found[k] = carried if k not in found else _sum(found[k], carried)
        for k, gradients in _derived(later, self._parameters):
            found[k] = Dense(gradients) if k not in found else _sum(found[k], Dense(gradients))
        return found

    def _agrees(self, pieces: dict[int, Piece], squared: dict[int, Tensor], factor: Tensor, losses: Tensor) -> bool:
        """Whether a random combination is what autograd finds for it."""
        random = torch.randn(len(losses), generator=self._factors, dtype=torch.float64).to(losses.device)
        mixed = random * factor
        whole = torch.autograd.grad(
            (mixed.to(losses.dtype) * losses).sum(), self._parameters, retain_graph=True, allow_unused=True
        )
        sizes = {k: float((mixed.square() * s).sum().sqrt()) for k, s in squared.items()}
        # Autograd's own rounding grows with what cancels in its products.
        spreads = [p.spread for p in pieces.values() if isinstance(p, Outer) and p.spread is not None]
        cancelled = [float((mixed.square() * s).nan_to_num().sum().sqrt()) for s in spreads]
        rounding = ROUNDING * math.hypot(*sizes.values(), *cancelled)
        with torch.no_grad():
            for k, its in enumerate(whole):
                right = 0.0 if its is None else dense(its).double()
                left = pieces[k].weighted(mixed) if k in pieces else torch.zeros((), dtype=torch.float64)
                difference = torch.as_tensor(left - right)
                # Negated, so that NaN disagrees.
                if not float(difference.norm()) <= AGREEMENT * sizes.get(k, 0.0) + rounding:
                    return False
        return True

    def _elsewhere(self, reason: str, losses: Tensor, clip_norm: Tensor, weight: Tensor) -> list[Tensor]:
        if self._other is None:
            _log.warning("This model, or a part of it, is clipped by the engine vmap, which is slower: %s.", reason)
            self.fall_back().begin(self._records)
        return self.fall_back().clipped_sum(losses, clip_norm, weight)


def _backward(
    found: Trace, losses: Tensor, notes: dict[Any, Any], keep_graph: bool
) -> dict[tuple[int, int], Tensor | None]:
    """{(id of an operator, output): the gradient that arrives there}, for all places: one pass, stage by stage."""
    at: dict[tuple[int, int], Tensor | None] = {}
    outputs: list[Any] = [losses]
    gradients = [torch.ones_like(losses)]
    for stage in range(max(found.stages, default=-1) + 1):
        places = [place for place, own in zip(found.places, found.stages, strict=True) if own == stage]
        cuts = [cut for cut in found.cuts if cut.stage == stage]
        wanted = [(place.node, k) for place in places for k in _lanes_of(place)]
        wanted += [(cut.node, k) for cut in cuts for k in cut.outputs]
        edges = list({(id(node), k): (node, k) for node, k in wanted}.values())
        arrived = torch.autograd.grad(
            outputs, [GradientEdge(*edge) for edge in edges], gradients, retain_graph=keep_graph, allow_unused=True
        )
        at |= {(id(node), k): g for (node, k), g in zip(edges, arrived, strict=True)}
        # On from what was differentiated here.
        further = [cut.node for cut in cuts if cut.node.next_functions[0][0] is not None]
        outputs = [GradientEdge(*node.next_functions[0]) for node in further]
        gradients = [at_input(node, [at.get((id(node), k)) for k in range(3)], notes) for node in further]
    return at


def _norms(pieces: dict[int, Piece], losses: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    """{parameter: every record's squared norm}, and of all parameters together."""
    squared = {k: piece.squared_norm() for k, piece in pieces.items()}
    return squared, sum(squared.values(), torch.zeros(len(losses), dtype=torch.float64, device=losses.device))


def _why_it_disagrees(losses: Tensor) -> str:
    """The likely cause why a graph that was proved does not give autograd's sum."""
    seen: set[Any] = set()
    stack: list[Any] = [losses.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(m.dtype in (torch.float16, torch.bfloat16) for m in getattr(node, "_input_metadata", ())):
            return "it computes in 16 bits, which the engine cannot compare closely enough with autograd"
        stack += [after for after, _ in node.next_functions]
    return "a hook that alters gradients"


def _lanes_of(place: Place) -> list[int]:
    return [k for k, lane in enumerate(place.lanes) if lane is not None]


def _through_views(node: Any, piece: Piece) -> tuple[Any, Piece]:
    """Follow a gradient through transpositions and reshapes, which change neither norms nor sums."""
    while len(getattr(node, "next_functions", ())) == 1:
        name = operator(node)
        if name == "T":
            piece = piece.transposed()
        elif name in ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze"):
            piece = piece.dense().reshaped(shape_out(node, 0))
        else:
            break
        (node, _), *_ = node.next_functions
    return node, piece


def _sum(one: Piece, other: Piece) -> Piece:
    if isinstance(one, Outer) and isinstance(other, Outer):
        return one.followed_by(other)
    return one.dense().plus(other.dense())


def _derived(targets: Sequence[tuple[Edge, Dense]], parameters: Sequence[nn.Parameter]) -> list[tuple[int, Tensor]]:
    """Gradients by parameters of which weights were computed (weight norm, merged adapters, tables looked up)."""
    if not targets:
        return []
    edges = [GradientEdge(*edge) for edge, _ in targets]
    rows = [piece.rows for _, piece in targets]

    def back(gradients: list[Tensor], batched: bool) -> Sequence[Tensor | None]:
        return torch.autograd.grad(
            edges, list(parameters), gradients, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )

    try:
        found: Sequence[Tensor | None] = back(rows, batched=True)
    except (RuntimeError, NotImplementedError):
        each = [back([r[i] for r in rows], batched=False) for i in range(len(rows[0]))]
        found = [
            None if column[0] is None else torch.stack([dense(g) for g in column if g is not None])
            for column in zip(*each, strict=True)
        ]
    return [(k, dense(g)) for k, g in enumerate(found) if g is not None]


__all__ = ["AUDIT_EVERY", "Ghost"]
