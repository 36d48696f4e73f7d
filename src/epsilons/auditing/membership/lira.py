"""LiRA, the likelihood ratio attack, on every shadow as the target of all others.

Carlini, Chien, Nasr, Song, Terzis, Tramèr, "Membership Inference Attacks From First Principles", arXiv 2112.03570v2.
The signal of a record is taken as normal, N(μ_in, σ_in²) over models trained with the record and N(μ_out, σ_out²) over
models trained without it. Its score under a target is

    online   log N(s; μ_in, σ_in²) − log N(s; μ_out, σ_out²)     (Algorithm 1)
    offline  (s − μ_out)/σ_out, increasing in the paper's Pr[N(μ_out, σ_out²) < s], without references in

A variance is the record's own, or fixed (the paper's global variance): one σ_in² and one σ_out² for all records, pooled
about the means of each record. Fixed variances are better with few references. The signal is the margin; `lira_raw`
reads the logit of the true class instead.

Where references in or out are missing, or fewer than the 2 that an own variance needs, the score is 0: no evidence.
"""

from __future__ import annotations

import numpy as np

from .references import FloatArray, Moments, score_targets
from .signals import Float32Array, Signals

#: With so many shadows, 256 in and 256 out on average, own variances find more members at a low false positive rate.
OWN_FROM = 512

#: An own variance is at least this part of the pooled one.
_LEAST_VARIANCE = 1e-6


def lira(signals: Signals) -> Float32Array:
    """Online, with own variances from 512 shadows, with fixed ones from fewer."""
    rule = _online_own if len(signals.member) >= OWN_FROM else _online_fixed
    return score_targets(signals.checked("margin"), signals.member, rule)


def lira_fixed(signals: Signals) -> Float32Array:
    """Online, with fixed variances."""
    return score_targets(signals.checked("margin"), signals.member, _online_fixed)


def lira_offline(signals: Signals) -> Float32Array:
    """Offline, with a fixed variance."""
    return score_targets(signals.checked("margin"), signals.member, _offline)


def lira_raw(signals: Signals) -> Float32Array:
    """Online, on the logit of the true class, with own variances: the code of the paper on Sample and Scale."""
    return score_targets(signals.checked("raw"), signals.member, _online_own)


def _online_fixed(own: FloatArray, inside: Moments, outside: Moments) -> FloatArray:
    ratio = _log_density(own, inside.mean, inside.pooled_variance())
    ratio -= _log_density(own, outside.mean, outside.pooled_variance())
    return np.where(np.minimum(inside.count, outside.count) >= 1, ratio, 0.0)


def _online_own(own: FloatArray, inside: Moments, outside: Moments) -> FloatArray:
    ratio = _log_density(own, inside.mean, _own_variance(inside))
    ratio -= _log_density(own, outside.mean, _own_variance(outside))
    return np.where(np.minimum(inside.count, outside.count) >= 2, ratio, 0.0)


def _offline(own: FloatArray, inside: Moments, outside: Moments) -> FloatArray:
    standardised = (own - outside.mean) / np.sqrt(outside.pooled_variance())
    return np.where(outside.count >= 1, standardised, 0.0)


def _own_variance(moments: Moments) -> FloatArray:
    return np.maximum(moments.variance, _LEAST_VARIANCE * moments.pooled_variance())


def _log_density(value: FloatArray, mean: FloatArray, variance: FloatArray | float) -> FloatArray:
    """log N(value; mean, variance), without the constant that cancels in ratios."""
    density: FloatArray = -0.5 * (np.square(value - mean) / variance + np.log(variance))
    return density
