"""Ghost: one forward pass, one backward pass through activations alone, and entries of per-record gradients only where
norms and weighted sums need them.

The recorded graph is walked from the losses down (see `graph`). Where the gradient of an operator's weight is a sum
over the records, the gradient of its output and what the operator saved give each record's part (`grad_samplers`). All
uses of a parameter are added before its norm is computed. The walk is a proof for this physical batch: it rests on
rules about operators, not on guesses from shapes, modules or names.

The walk does not see hooks that change gradients. So the first physical batch of each pattern of operators, and every
64th after it, passes the random check. A graph without proof, or in 32 bits a physical batch that failed the check, is
left to `vmap`.

Where gradients have 16 bits, the check is still one of rules, not of rounding. It begins with powers of two, and a
product with a power of two is exact. So autograd's gradients of all activations are those that the rules were given,
times these powers, to the bit. What may differ is rounding at the parameters, a few units of the type: a wrong factor,
axis or padding changes more (docs/engine.md#proof-on-the-graph). The gradients that are clipped are computed in 32 bits
or more from the 16-bit numbers, and norms are norms of these.

One record can make the check fail: its gradient is only rounding. In 32 bits its own physical batch is then left to
`vmap`, and no later draw may depend on it. So a pattern is left to `vmap` for good only after 64 failures in a row. In
16 bits another engine rounds every gradient by up to 0.5 %, so no other engine takes over. If one record alone fails,
all are clipped as always; if more fail, the physical batch is refused.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ...errors import ModelError
from ..engine import (
    HALF,
    Clipped,
    NonFiniteGradientError,
    Persons,
    add_each,
    clip_factors,
    in_words,
    is_meant,
    non_finite_losses,
    persons_in,
)
from ..loop import Loop
from ..summing import AGREEMENT, RandomCheck, agree, full_precision, rounding_in_16_bits, rounding_of, size_of
from ..vmap import Vmap
from .backward import Grads, is_direct, per_sample_grads
from .grad_samplers import may_mix_what_is_not_finite, reads_no_weights
from .graph import Trace, leaf_of, trace
from .operator_rules import UnsupportedOp, operator
from .outer_products import JoinedGrad, OuterProductGrad, joined, set_bounds, without_bounds
from .per_sample_grads import Cache, ClippableGrad, squares_in_64_bits

#: A hook that appears later is found after this many physical batches at most. The check costs about one more backward
#: pass, so one in 64 costs less than 1 %.
AUDIT_EVERY = 64
#: So many parameters are named where a check fails.
MOST_NAMES = 4
#: Numbers below 6e-5 have fewer bits there, so that not even doubling is exact.
HALF_ENDS = ", or the smallest number of float16 (bfloat16 has smaller ones),"

#: In 16 bits, where more than one record fails the check.
_NOT_PROVEN = (
    "The gradients in 16 bits could not be proven ({}). No other engine may take over, because it rounds the gradients "
    'of all other records otherwise. Train in 32 bits, or with performance=Performance(engine="vmap") from the start.'
)

_log = logging.getLogger(__name__)


class Ghost:
    """Norms without gradients where that is cheaper. Every physical batch is proved on its graph. The default.

    spare   the engine for graphs without proof
    """

    spare: type[Vmap | Loop] = Vmap

    def attach(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._model, self._parameters = model, list(parameters)
        self._place = {id(p): k for k, p in enumerate(self._parameters)}
        self._loop = Loop()
        self._loop.attach(model, parameters)
        self._vmap: Vmap | Loop | None = None  # for graphs without proof
        self._records = 0
        self._seen: dict[int, int] = {}  # how many physical batches of each pattern there were
        self._refused: dict[int, str] = {}  # patterns that failed so many checks in a row, and the likely reason
        self._failures: dict[int, int] = {}  # of each pattern's checks, in a row
        self._due: dict[int, int] = {}  # how many physical batches are all checked after a failure
        self._pattern = 0  # of the present physical batch, once it is known
        self._check = RandomCheck(self._parameters)

    @property
    def is_proven(self) -> bool:
        """False once a physical batch was left to another engine."""
        return self._vmap is None

    def fall_back(self) -> Vmap | Loop:
        """The engine for graphs without proof. From now on it records the model's calls."""
        if self._vmap is None:
            self._vmap = self.spare()
            self._vmap.attach(self._model, self._parameters)
        return self._vmap

    def begin(self, records: int) -> None:
        self._records = records
        if self._vmap is not None:
            self._vmap.begin(records)

    def detach(self) -> None:
        if self._vmap is not None:
            self._vmap.detach()

    def clipped_sum(
        self, losses: Tensor, clip_norm: Tensor, weight: Tensor, sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        totals = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]
        self.clipped(losses, clip_norm, weight, sizes)(totals)
        return totals

    def clipped(self, losses: Tensor, clip_norm: Tensor, weight: Tensor, sizes: Sequence[int] | None = None) -> Clipped:
        """What adds `clipped_sum` to given totals, without memory for another sum. The errors are raised here."""
        if len(clip_norm) <= 1:
            return partial(add_each, self._loop.clipped_sum(losses, clip_norm, weight, sizes))
        persons = persons_in(losses, clip_norm, sizes)
        with full_precision():
            try:
                return partial(add_weighted, *self._proven(losses, clip_norm, weight, persons))
            except UnsupportedOp as reason:
                cause = str(reason)
            except Exception as error:
                if is_meant(error):
                    raise
                cause = in_words(error)
                self._note(self._pattern, cause)
            return partial(add_each, self._by_vmap(cause, losses, clip_norm, weight, sizes))

    # -- where weights are kept in parts: one backward pass, in which each part is gathered once -------------

    def takes_one_pass(self, losses: Tensor, clip_norm: Tensor) -> bool:
        """Whether `one_pass` clips this batch: it is proven, not checked, and no weights are read beside the pass."""
        if len(clip_norm) <= 1:
            return True
        try:
            found = trace(losses, self._place)
        except (UnsupportedOp, ModelError):
            return False
        seen = self._seen.get(found.pattern, -1) + 1
        is_checked = seen % AUDIT_EVERY == 0 or self._due.get(found.pattern, 0) > 0 or found.pattern in self._refused
        is_altered = bool(found.custom) or any(p._backward_hooks for p in self._parameters)
        return not (is_checked or is_altered) and all(is_direct(u.target) and reads_no_weights(u) for u in found.uses)

    def one_pass(
        self, losses: Tensor, clip_norm: Tensor, weight: Tensor, sizes: Sequence[int] | None = None
    ) -> Iterable[Tensor]:
        """What `clipped_sum` returns, each tensor made when it is taken; the backward pass is made by the call."""
        if len(clip_norm) <= 1:
            return self._loop.clipped_sum(losses, clip_norm, weight, sizes)
        with full_precision():
            proven = self._proven(losses, clip_norm, weight, persons_in(losses, clip_norm, sizes))
            return weighted_sums(*proven, self._parameters)

    def _proven(
        self, losses: Tensor, clip_norm: Tensor, weight: Tensor, persons: Persons | None
    ) -> tuple[Mapping[int, ClippableGrad], Tensor]:
        """({parameter: gradients}, (records,) their factors)."""
        self._pattern = 0
        if any(p._backward_hooks for p in self._parameters):
            raise UnsupportedOp("a hook on a parameter")
        found = trace(losses, self._place)
        is_checked = self._is_due(found.pattern)
        self._pattern = found.pattern
        shares = None if persons is None else persons.shares(losses)
        cache: Cache = {}
        rows = per_sample_grads(found, losses, self._parameters, keep_graph=is_checked, cache=cache, shares=shares)
        with torch.no_grad():
            uncancelled = _squared_lengths(rows, losses, persons) if is_checked else {}
            each: Mapping[int, ClippableGrad] = (
                rows if persons is None else {k: grad.of_persons(persons) for k, grad in rows.items()}
            )
            del rows  # only what was merged is kept
            grads = joined(each, losses)
            total, broken = _norms_and_broken(grads, clip_norm)
            factor = clip_factors(total, clip_norm, weight, found.dtypes)
            if broken is not None:
                is_mixed = may_mix_what_is_not_finite(cache)
                if is_checked:
                    self._seen[found.pattern] -= 1  # nothing can be compared
                if is_checked or is_mixed:
                    raise NonFiniteGradientError(non_finite_losses(losses) if is_mixed else _rows_of(broken, persons))
                grads = {k: grad.blank(~broken) for k, grad in grads.items()}
        if is_checked:
            self._audit(found, each, factor, losses if persons is None else persons.means(losses), persons, uncancelled)
        return grads, factor

    def _is_due(self, pattern: int) -> bool:
        """Whether this physical batch is checked. Raises UnsupportedOp for a pattern that is left to vmap for good."""
        if pattern in self._refused:
            raise UnsupportedOp(self._refused[pattern])
        self._seen[pattern] = self._seen.get(pattern, -1) + 1
        return self._seen[pattern] % AUDIT_EVERY == 0 or self._due.get(pattern, 0) > 0

    def _note(self, pattern: int, reason: str) -> None:
        """What a check of this pattern said: why it failed, or "". An error counts as a failed check."""
        if not reason:
            self._failures[pattern], self._due[pattern] = 0, max(0, self._due.get(pattern, 0) - 1)
            return
        self._failures[pattern], self._due[pattern] = self._failures.get(pattern, 0) + 1, AUDIT_EVERY
        if self._failures[pattern] == AUDIT_EVERY:
            self._refused[pattern] = reason

    def _audit(
        self,
        found: Trace,
        grads: Mapping[int, ClippableGrad],
        factor: Tensor,
        means: Tensor,
        persons: Persons | None,
        uncancelled: Mapping[int, Tensor],
    ) -> None:
        """Raise UnsupportedOp, with the likely reason, where gradients are not autograd's; ModelError in 16 bits."""

        def agrees(places: Tensor) -> bool:
            some = torch.zeros_like(factor).index_copy(0, places, factor[places])
            return self._agrees(found, grads, some, means, persons, uncancelled)

        every = torch.arange(len(factor), device=factor.device)
        is_right, is_half = agrees(every), not HALF.isdisjoint(found.dtypes)
        if is_half and not is_right and one_at_most(agrees, every):
            self._due[found.pattern] = AUDIT_EVERY
            return
        reason = "" if is_right else self._why_it_disagrees(found, grads, factor, means)
        if reason and is_half:
            raise ModelError(_NOT_PROVEN.format(reason))
        self._note(found.pattern, reason)
        if reason:
            raise UnsupportedOp(reason)

    def _agrees(
        self,
        found: Trace,
        grads: Mapping[int, ClippableGrad],
        clip_factor: Tensor,
        means: Tensor,
        persons: Persons | None,
        uncancelled: Mapping[int, Tensor],
    ) -> bool:
        """Whether a random combination is equal to autograd's. uncancelled: as `_squared_lengths`"""
        factor, autograds = self._check.combination(means, clip_factor, found.dtypes)
        uses = Counter(id(leaf_of(use.target[0])) for use in found.uses)
        by_row = factor.square() if persons is None else factor.square()[persons.owner]
        lengths = {k: float((by_row * s).nan_to_num().sum().sqrt()) for k, s in uncancelled.items()}
        with torch.no_grad():
            # Where the factor is 0, the squares may be infinite, and 0·inf is NaN.
            squares = {k: torch.where(factor == 0, 0.0, factor.square() * g.squared_norm()) for k, g in grads.items()}
            sizes = {k: float(square.sum().sqrt()) for k, square in squares.items()}
            rounding = rounding_of([*sizes.values(), *lengths.values()])
            for k, (p, autograd) in enumerate(zip(self._parameters, autograds, strict=True)):
                size, number = sizes.get(k, 0.0), uses[id(p)]
                added = lengths.get(k, 0.0) if number > 1 else 0.0  # uses, which autograd adds in 16 bits, may cancel
                allowed = rounding + rounding_in_16_bits(found.dtypes, number) * math.hypot(size, added)
                if not agree(grads[k].weighted(factor) if k in grads else None, autograd, size, allowed):
                    return False
        return True

    def _why_it_disagrees(
        self, found: Trace, grads: Mapping[int, ClippableGrad], clip_factor: Tensor, means: Tensor
    ) -> str:
        """Which gradients are not autograd's, and the likely reason; shorter once it was logged."""
        if self._vmap is not None:
            return "as logged"
        factor, autograds = self._check.combination(means, clip_factor, found.dtypes)
        with torch.no_grad():
            apart = {k: size_of(grads[k].weighted(factor) if k in grads else None, g) for k, g in enumerate(autograds)}
        allowed = AGREEMENT + rounding_in_16_bits(found.dtypes)
        wrong = [k for k, difference in apart.items() if difference > allowed * size_of(autograds[k], None)]
        where = self._where(found, wrong or [max(apart, key=apart.__getitem__)])
        # Doubling is exact. Multiplied by 3, everything is rounded otherwise.
        twice, thrice = (self._check.gradients(means, n * factor, found.dtypes) for n in (2, 3))
        if any(size_of(twice[k], autograds[k], 2.0) > 0 for k in wrong):
            what = "a hook that is not linear" + HALF_ENDS * (torch.float16 in found.dtypes)
            return f"{what} alters the gradients of {where}"
        if all(10 * size_of(thrice[k], autograds[k], 3.0) > 3 * apart[k] for k in wrong):
            return f"the gradients of {where} are mostly rounding"
        return f"a hook mixes the records' gradients of {where}"

    def _where(self, found: Trace, wrong: Sequence[int]) -> str:
        """The names of these parameters, with the operators that read them."""
        own = {id(p): name for name, p in self._model.named_parameters()}
        readers = [(leaf_of(use.target[0]), operator(use.node)) for use in found.uses]
        texts = []
        for k in wrong[:MOST_NAMES]:
            by = sorted({name for leaf, name in readers if leaf is self._parameters[k]})
            texts.append(own.get(id(self._parameters[k]), f"parameter {k}") + (f" ({', '.join(by)})" if by else ""))
        more = len(wrong) - len(texts)
        return ", ".join(texts) + (f" and {more} more" if more else "")

    def _by_vmap(
        self, reason: str, losses: Tensor, clip_norm: Tensor, weight: Tensor, sizes: Sequence[int] | None
    ) -> list[Tensor]:
        if self._vmap is None:
            name = self.spare.__name__.lower()
            _log.warning("This model, or a part of it, is clipped by the engine %s, which is slower: %s.", name, reason)
            self.fall_back().begin(self._records)
        try:
            return self.fall_back().clipped_sum(losses, clip_norm, weight, sizes)
        except ModelError as error:  # an ordinary step frees the graph
            raise ModelError(
                f"The engine ghost cannot clip this physical batch ({reason}), and its graph could not be used again. "
                f'Train with performance=Performance(engine="vmap"), or with engine="loop". {error}'
            ) from error


def one_at_most(agrees: Callable[[Tensor], bool], places: Tensor) -> bool:
    """Whether all of these records are right, but for one. Two checks for each halving.

    agrees: whether a check of the records at these places passes
    """
    while len(places) > 1:
        wrong = [half for half in places.tensor_split(2) if not agrees(half)]
        if len(wrong) != 1:
            return not wrong
        places = wrong[0]
    return True


def squared_norms(grads: Mapping[int, ClippableGrad], like: Tensor) -> Tensor:
    """(records,) each record's squared norm of all parameters together, 64-bit. like: (records,)"""
    if missing := without_bounds(grads.values()):
        set_bounds(missing)
    zeros = torch.zeros(len(like), dtype=torch.float64, device=like.device)
    return torch.stack([zeros, *(grad.squared_norm() for grad in grads.values())]).sum(0)


def _norms_and_broken(grads: Mapping[int, ClippableGrad], like: Tensor) -> tuple[Tensor, Tensor | None]:
    """(`squared_norms`, in 64 bits where they are not finite in 32; which are not finite even then, or None)."""
    total = squared_norms(grads, like)
    broken = _not_finite(total)
    if broken is not None:
        with squares_in_64_bits():
            total = torch.where(broken, squared_norms(grads, like), total)
        broken = _not_finite(total)
    return total, broken


def _squared_lengths(rows: Grads, losses: Tensor, persons: Persons | None) -> dict[int, Tensor]:
    """(rows,) squared sizes of what may cancel: autograd's rounding grows with them.

    In products over time, by parameter, and at -1 between the rows of one person.
    """
    products = {k: grad for k, grad in rows.items() if isinstance(grad, OuterProductGrad) and grad.time > 1}
    lengths = {k: grad.squared_lengths for k, grad in products.items()}
    return lengths if persons is None else lengths | {-1: squared_norms(rows, losses)}


def _not_finite(norms: Tensor) -> Tensor | None:
    """(records,) which of these are not finite; None for none. Nearly always, their sum decides."""
    if math.isfinite(float(norms.sum())):
        return None
    broken = ~torch.isfinite(norms)
    return broken if bool(broken.any()) else None


def _rows_of(is_chosen: Tensor, persons: Persons | None) -> Sequence[int]:
    return is_chosen.nonzero()[:, 0].tolist() if persons is None else persons.rows_of(is_chosen)


def add_weighted(grads: Mapping[int, ClippableGrad], factor: Tensor, totals: Sequence[Tensor]) -> None:
    """Add Σ factor·gradient by each parameter to its total. factor: (records,) 64-bit"""
    with torch.no_grad(), full_precision():
        for k, grad in grads.items():
            if isinstance(grad, JoinedGrad):
                sums = grad.sums(factor)
                torch._foreach_add_([totals[k] for k in sums], [*sums.values()])
            else:
                grad.add_weighted(factor, totals[k])


def weighted_sums(
    grads: Mapping[int, ClippableGrad], factor: Tensor, parameters: Sequence[nn.Parameter]
) -> Iterator[Tensor]:
    """Σ factor·gradient by each parameter, 64-bit, one after the other. factor: (records,) 64-bit"""
    joined = {k: t for grad in grads.values() if isinstance(grad, JoinedGrad) for k, t in grad.sums(factor).items()}
    for k, p in enumerate(parameters):
        if k in joined:
            yield joined[k]
        else:
            yield grads[k].weighted(factor) if k in grads else torch.zeros_like(p, dtype=torch.float64)
