"""Many histories at once: what every group of a plan has spent, for little more than what the distinct ones cost.

Groups share phases, so a history is a column: one rate and one noise multiplier per phase. Distinct columns are
accounted once, RDP all together, PLD at all deltas of a column together, a caller's own function one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..mechanism import SampledGaussian
from . import pld, rdp

FloatArray = npt.NDArray[np.float64]
Spends = Callable[[Sequence[SampledGaussian], float], float]


class Columns(NamedTuple):
    """What each of many records went through, phase by phase.

    rates   (phases, rows)  chance of being drawn in one step
    noises  (phases, rows)  noise multiplier
    steps   (phases,)       the same for all rows
    """

    rates: FloatArray
    noises: FloatArray
    steps: tuple[int, ...]

    @classmethod
    def none(cls, rows: int) -> Columns:
        """No phase at all."""
        return cls(np.empty((0, rows)), np.empty((0, rows)), ())

    def then(self, rates: npt.ArrayLike, noises: npt.ArrayLike, steps: int, rows: Any = slice(None)) -> Columns:
        """These rows with one more phase at their end."""
        past = self.rates[:, rows]
        last = [np.broadcast_to(np.asarray(new, dtype=np.float64), past.shape[1:])[None] for new in (rates, noises)]
        return Columns(
            np.concatenate([past, last[0]]), np.concatenate([self.noises[:, rows], last[1]]), (*self.steps, steps)
        )


def epsilons(accountant: Spends, columns: Columns, deltas: FloatArray) -> FloatArray:
    """(rows,) upper bounds on epsilon at each row's delta."""
    rates, noises, steps = columns
    own, options = _unwrapped(accountant)
    distinct, column = _distinct(np.concatenate([rates, noises]))
    rates, noises = distinct[: len(rates)], distinct[len(rates) :]
    pairs, pair = _distinct(np.stack([column.astype(np.float64), deltas]))
    column, deltas = pairs[0].astype(np.int64), pairs[1]
    if own is rdp.epsilon and set(options) <= {"orders"}:
        return rdp.epsilons(rates[:, column], noises[:, column], steps, deltas, **options)[pair]
    out = np.empty(len(deltas))
    ends = np.searchsorted(column, np.arange(distinct.shape[1] + 1))  # pairs come sorted by column
    for which in range(distinct.shape[1]):
        here = slice(ends[which], ends[which + 1])
        history = [
            SampledGaussian(float(q), float(s), n)
            for q, s, n in zip(rates[:, which], noises[:, which], steps, strict=True)
        ]
        if own is pld.epsilon and set(options) <= {"grid", "points", "slacks"} and here.stop - here.start > 1:
            out[here] = pld.epsilons(history, deltas[here], **options)
        else:
            out[here] = [accountant(history, float(delta)) for delta in deltas[here]]
    return out[pair]


def coarse(accountant: Spends) -> Spends:
    """For guesses: PLD on grids of at most 100,000 points, a tenth of what counts; others as they are."""
    own, options = _unwrapped(accountant)
    return functools.partial(pld.epsilon, points=1e5) if own is pld.epsilon and not options else accountant


def wary(accountant: Spends) -> Spends:
    """For searches: PLD with twice the slack per step, so that another rounding keeps what they find; others as is."""
    own, options = _unwrapped(accountant)
    return functools.partial(pld.epsilon, **{"slacks": 2.0} | options) if own is pld.epsilon else accountant


def _unwrapped(accountant: Callable[..., float]) -> tuple[Callable[..., float], dict[str, Any]]:
    """The function behind `functools.partial(rdp.epsilon, orders=…)`, and what was fixed."""
    if isinstance(accountant, functools.partial) and not accountant.args:
        return accountant.func, dict(accountant.keywords)
    return accountant, {}


def _distinct(columns: FloatArray) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """Distinct columns in rising order, and which of them each column is."""
    order = np.lexsort(columns[::-1])
    ordered = columns[:, order]
    new = np.ones(len(order), dtype=bool)  # also right for no column at all
    new[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
    which = np.empty(len(order), dtype=np.int64)
    which[order] = np.cumsum(new) - 1
    return ordered[:, new], which
