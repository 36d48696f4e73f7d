"""Signals without training, for tests of the attacks on them, and the AUC that the attacks reach."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from epsilons.auditing.membership import Signals

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

#: A generator of coins: (shadows, records), generator -> which records each shadow has.
Coins = Callable[[tuple[int, int], np.random.Generator], BoolArray]


def fair_coins(shape: tuple[int, int], rng: np.random.Generator) -> BoolArray:
    """Independent fair coins, as the shadows have them."""
    return rng.random(shape) < 0.5


def balanced_halves(shape: tuple[int, int], rng: np.random.Generator) -> BoolArray:
    """A mistake: every record is in exactly half of the shadows."""
    return np.argsort(rng.random(shape), axis=0) < shape[0] // 2


def signals_of(margin: npt.ArrayLike, member: BoolArray, population: npt.ArrayLike) -> Signals:
    """Signals of two classes with these margins, (shadows, records); population (shadows, population) margins, too."""
    margin = np.asarray(margin, np.float32)
    return Signals(member, margin, margin / 2 + 1, _log_p(margin), _log_p(np.asarray(population, np.float32)))


def made_up(
    shadows: int, records: int, shift: float = 0.0, population: int = 50, seed: int = 0, coins: Coins = fair_coins
) -> Signals:
    """Normal margins about a level of each record, and larger by `shift` standard deviations where the record is in."""
    rng = np.random.default_rng(seed)
    member = coins((shadows, records), rng)
    margin = rng.normal(0.5, 0.5, records) + rng.normal(size=member.shape) + shift * member
    return signals_of(margin, member, rng.normal(0.5, 0.5, population) + rng.normal(size=(shadows, population)))


def target_auc(scores: npt.NDArray[np.float32], member: BoolArray) -> FloatArray:
    """The AUC of each target, (shadows,), by ranks; ties count one half."""
    ranks = rankdata(scores, axis=1)
    ins, outs = member.sum(axis=1), (~member).sum(axis=1)
    return ((ranks * member).sum(axis=1) - ins * (ins + 1) / 2) / (ins * outs)


def null_deviation(scores: npt.NDArray[np.float32], member: BoolArray) -> float:
    """How many standard errors the mean AUC lies from one half, if scores are independent of the coins."""
    ins, outs = member.sum(axis=1), (~member).sum(axis=1)
    error = np.sqrt(((ins + outs + 1) / (12 * ins * outs)).sum()) / len(member)
    return float(abs(target_auc(scores, member).mean() - 0.5) / error)


def _log_p(margin: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return (-np.logaddexp(0, -margin.astype(np.float64))).astype(np.float32)
