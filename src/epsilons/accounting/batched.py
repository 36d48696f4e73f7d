"""Many histories at once: the epsilon of every group of a plan costs little more than that of the distinct histories.

All groups share a plan's phases, so a history is one column: a rate and a noise multiplier per phase. Each distinct
column is computed once: RDP for all columns together, PLD for all deltas of a column together, any other accountant
one history at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import PlanError
from ..mechanism import FloatArray, IntArray, SampledGaussian
from . import filter, pld, rdp
from .repeated import Repeated

#: epsilon(history, delta): an upper bound on the epsilon that a record with this history has spent.
Accountant = Callable[[Sequence[SampledGaussian], float], float]


class Histories(NamedTuple):
    """The histories of many records (rows), phase by phase.

    rates   (phases, rows)  probability of being drawn in one step
    noises  (phases, rows)  noise multiplier
    steps   (phases,)       the same for all rows
    """

    rates: FloatArray
    noises: FloatArray
    steps: tuple[int, ...]

    @classmethod
    def one_phase(cls, rates: npt.ArrayLike, noises: npt.ArrayLike, steps: int, rows: int) -> Histories:
        """Histories of a single phase; rates and noises are one number for all rows, or one per row."""
        rate, noise = (np.broadcast_to(np.asarray(value, dtype=np.float64), (1, rows)) for value in (rates, noises))
        return cls(rate, noise, (steps,))


def batch_epsilon(accountant: Accountant, histories: Histories, claims: FloatArray) -> FloatArray:
    """(rows,) upper bounds on epsilon at each row's claim: its delta, or for accounts what was spent before.

    claims: (rows,) or (rows, orders), as `Groups.claims`. Raises PlanError for accounts with another accountant than
    the filter.
    """
    rates, noises, steps = histories
    if isinstance(accountant, Repeated):
        many = Histories(rates, noises, tuple(count * accountant.runs for count in steps))
        return batch_epsilon(accountant.accountant, many, claims)
    function, options = _unwrapped(accountant)
    if claims.ndim > 1 and function is not filter.epsilon:
        raise PlanError('Budgets on accounts of a registry need accountant="filter"; others do not add up over runs.')
    if function is filter.epsilon:
        of_accounts = claims.ndim > 1
        return filter.batch_epsilon(
            rates, noises, steps, claims[:, 0] if of_accounts else claims, claims if of_accounts else None
        )
    deltas = claims
    distinct, column = _distinct(np.concatenate([rates, noises]))
    rates, noises = distinct[: len(rates)], distinct[len(rates) :]
    pairs, pair = _distinct(np.stack([column.astype(np.float64), deltas]))
    column, deltas = pairs[0].astype(np.int64), pairs[1]
    if function is rdp.epsilon and set(options) <= {"orders"}:
        return rdp.batch_epsilon(rates[:, column], noises[:, column], steps, deltas, **options)[pair]
    out = np.empty(len(deltas))
    ends = np.searchsorted(column, np.arange(distinct.shape[1] + 1))  # pairs are sorted by column
    for i in range(distinct.shape[1]):
        here = slice(ends[i], ends[i + 1])
        history = [
            SampledGaussian(float(q), float(s), n) for q, s, n in zip(rates[:, i], noises[:, i], steps, strict=True)
        ]
        if function is pld.epsilon and set(options) <= {"grid", "points", "slacks"} and here.stop - here.start > 1:
            out[here] = pld.epsilon_at(history, deltas[here], **options)
        else:
            out[here] = [accountant(history, float(delta)) for delta in deltas[here]]
    return out[pair]


def fast(accountant: Accountant) -> Accountant:
    """For guesses: PLD on grids of at most 100,000 points, a tenth of the usual; other accountants unchanged."""
    if isinstance(accountant, Repeated):
        return replace(accountant, accountant=fast(accountant.accountant))
    function, options = _unwrapped(accountant)
    return functools.partial(pld.epsilon, points=1e5) if function is pld.epsilon and not options else accountant


def conservative(accountant: Accountant) -> Accountant:
    """For searches: PLD with twice the slack per step, so that what is found verifies under other rounding, too.

    Other accountants are unchanged.
    """
    if isinstance(accountant, Repeated):
        return replace(accountant, accountant=conservative(accountant.accountant))
    function, options = _unwrapped(accountant)
    return functools.partial(pld.epsilon, **{"slacks": 2.0} | options) if function is pld.epsilon else accountant


def _unwrapped(accountant: Callable[..., float]) -> tuple[Callable[..., float], dict[str, Any]]:
    """The function behind `functools.partial(rdp.epsilon, orders=…)`, and its fixed arguments."""
    if isinstance(accountant, functools.partial) and not accountant.args:
        return accountant.func, dict(accountant.keywords)
    return accountant, {}


def _distinct(columns: FloatArray) -> tuple[FloatArray, IntArray]:
    """Distinct columns in rising order, and for each column its index among them."""
    order = np.lexsort(columns[::-1])
    ordered = columns[:, order]
    is_new = np.ones(len(order), dtype=bool)  # also right for no column at all
    is_new[1:] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
    index = np.empty(len(order), dtype=np.int64)
    index[order] = np.cumsum(is_new) - 1
    return ordered[:, is_new], index
