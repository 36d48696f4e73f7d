"""RMIA, the robust membership inference attack, on every shadow as the target of all others.

Zarifzadeh, Liu, Shokri, "Low-Cost High-Power Membership Inference Attacks", arXiv 2312.03262v3. A record x is compared
with records z of a population that no model was trained on. With p the target's probability of the true class and p̄
its mean over reference models, the score is the share of the population with

    (p(x)/p̄(x)) / (p(z)/p̄(z)) ≥ γ

    online   p̄(x) = (mean in + mean out)/2; of a population record, the mean over all references, which are all out
    offline  p̄ = ((1 + a)·mean out + 1 − a)/2, for mean in is put at a·(mean out) + 1 − a

γ is 1 here: under one target the score is a monotone function of p(x)/p̄(x) whatever γ is, so γ only moves the
threshold. For the same reason the population does not change the order of records under one target, and makes the
scores of different targets comparable. A share has ties, without which no false positive rate below 1/population could
be measured: the share is therefore interpolated linearly in log(p/p̄) between the population's records, and continues
with slope 1 beyond them. p is the plain softmax probability.

The offline constant a is not tuned on the target: it is (1 − p in)/(1 − p out), each averaged over records, among the
target's references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ...errors import InputError
from .references import FloatArray, Moments, collect, leave_one_out
from .signals import Float32Array, Signals

#: Added to p and to p̄, so that a probability that vanishes has a finite ratio.
_LEAST = 1e-12

#: From a target's references: p̄ of the records, (records,), and p̄ of the population from its mean, (population,).
_Reference = Callable[[Moments, Moments, FloatArray], tuple[FloatArray, FloatArray]]


def rmia(signals: Signals) -> Float32Array:
    """Online RMIA, with references in and out."""
    return _attack(signals, _online)


def rmia_offline(signals: Signals) -> Float32Array:
    """Offline RMIA, with references out and one constant for the members."""
    return _attack(signals, _offline)


def _attack(signals: Signals, reference: _Reference) -> Float32Array:
    log_p, population = signals.checked("log_p"), signals.checked("population")
    if not population.shape[1]:
        raise InputError(
            "RMIA compares records with a population that no shadow is trained on; got no population. Give one, such "
            "as test data, or choose other attacks."
        )

    def rows() -> Iterator[FloatArray]:
        targets = zip(leave_one_out(log_p, signals.member, np.exp), _population(population), strict=True)
        for (own, inside, outside), (own_z, mean_z) in targets:
            mean, mean_z = reference(inside, outside, mean_z)
            yield _share(_log_ratio(own, mean), np.sort(_log_ratio(own_z, mean_z)))

    return collect(rows(), log_p.shape)


def _population(log_p: Float32Array) -> Iterator[tuple[FloatArray, FloatArray]]:
    """For each target its own p of the population, and the mean p of the other shadows, (population,) each."""
    out = np.zeros((1, log_p.shape[1]), np.bool_).repeat(len(log_p), axis=0)
    return ((own, outside.mean) for own, _, outside in leave_one_out(log_p, out, np.exp))


def _online(inside: Moments, outside: Moments, population: FloatArray) -> tuple[FloatArray, FloatArray]:
    mean_in, mean_out = _means(inside, outside)
    return (mean_in + mean_out) / 2, population


def _offline(inside: Moments, outside: Moments, population: FloatArray) -> tuple[FloatArray, FloatArray]:
    a, (_, mean_out) = _constant(inside, outside), _means(inside, outside)
    return ((1 + a) * mean_out + 1 - a) / 2, ((1 + a) * population + 1 - a) / 2


def _means(inside: Moments, outside: Moments) -> tuple[FloatArray, FloatArray]:
    """Means in and out. Where there are references of one kind only, their mean is both."""
    mean_in = np.where(inside.count > 0, inside.mean, outside.mean)
    return mean_in, np.where(outside.count > 0, outside.mean, inside.mean)


def _constant(inside: Moments, outside: Moments) -> float:
    """a, between 0 and 1, from the records that have references of both kinds; 1 if there are none."""
    both = np.minimum(inside.count, outside.count) >= 1
    missing_in, missing_out = 1 - inside.mean[both], 1 - outside.mean[both]
    return float(np.clip(missing_in.sum() / missing_out.sum(), 0, 1)) if missing_out.sum() > 0 else 1.0


def _log_ratio(own: FloatArray, mean: FloatArray) -> FloatArray:
    ratio: FloatArray = np.log((own + _LEAST) / (np.maximum(mean, 0) + _LEAST))
    return ratio


def _share(ratio: FloatArray, population: FloatArray) -> FloatArray:
    """The share of `population` (sorted) that is at most `ratio`, interpolated between and continued beyond."""
    ranks = np.arange(1, len(population) + 1) / len(population)
    beyond = ratio - np.clip(ratio, population[0], population[-1])
    share: FloatArray = np.interp(ratio, population, ranks) + beyond
    return share
