"""Many histories at once: what every group of a plan has spent, for little more than what the distinct ones cost.

Groups share phases, so a history is a column: one rate and one noise multiplier per phase. Distinct columns are
accounted once, RDP all together, PLD at all deltas of a column together, a caller's own function one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..mechanism import SampledGaussian
from . import pld, rdp

FloatArray = npt.NDArray[np.float64]


def epsilons(
    accountant: Callable[[Sequence[SampledGaussian], float], float],
    rates: FloatArray,
    noises: FloatArray,
    steps: Sequence[int],
    deltas: FloatArray,
) -> FloatArray:
    """(rows,) upper bounds on epsilon: rates and noises (phases, rows), steps (phases,), deltas (rows,)."""
    own, options = _unwrapped(accountant)
    columns, column = _distinct(np.concatenate([rates, noises]))
    rates, noises = columns[: len(rates)], columns[len(rates) :]
    pairs, pair = _distinct(np.stack([column.astype(np.float64), deltas]))
    column, deltas = pairs[0].astype(np.int64), pairs[1]
    if own is rdp.epsilon and set(options) <= {"orders"}:
        return rdp.epsilons(rates[:, column], noises[:, column], steps, deltas, **options)[pair]
    out = np.empty(len(deltas))
    ends = np.searchsorted(column, np.arange(columns.shape[1] + 1))  # pairs come sorted by column
    for which in range(columns.shape[1]):
        here = slice(ends[which], ends[which + 1])
        history = [
            SampledGaussian(float(q), float(s), n)
            for q, s, n in zip(rates[:, which], noises[:, which], steps, strict=True)
        ]
        if own is pld.epsilon and set(options) <= {"grid"} and here.stop - here.start > 1:
            out[here] = pld.epsilons(history, deltas[here], **options)
        else:
            out[here] = [accountant(history, float(delta)) for delta in deltas[here]]
    return out[pair]


def _unwrapped(accountant: Callable[..., float]) -> tuple[Callable[..., float], dict[str, Any]]:
    """The function behind `functools.partial(rdp.epsilon, orders=…)`, and what was fixed."""
    if isinstance(accountant, functools.partial) and not accountant.args:
        return accountant.func, dict(accountant.keywords)
    return accountant, {}


def _distinct(columns: FloatArray) -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """Distinct columns in rising order, and which of them each column is."""
    order = np.lexsort(columns[::-1])
    ordered = columns[:, order]
    new = np.concatenate([[True], (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)])
    which = np.empty(len(order), dtype=np.int64)
    which[order] = np.cumsum(new) - 1
    return ordered[:, new], which
