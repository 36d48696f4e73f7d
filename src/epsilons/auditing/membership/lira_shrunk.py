"""Shrunk LiRA: the online likelihood ratio with few references, by empirical Bayes. It is ours, and the default.

With 60 references a record's own variance and its own shift (mean in minus mean out) are mostly noise, and one variance
for all records (Carlini et al., arXiv 2112.03570v2) is wrong for most. Both are shrunk here: the estimate of each
record moves towards the mean over records, the further the noisier it is. For one record under one target, with n_in
and n_out references, means m_in and m_out, and s² the variance about them, on ν = n_in + n_out − 2 degrees of freedom:

1. Scale, one for in and out. If signals are normal with variance σ², then ℓ = log s² − ψ(ν/2) + log(ν/2) has mean
   log σ² and variance τ = ψ'(ν/2) (digamma and trigamma; Smyth, Statistical Applications in Genetics and Molecular
   Biology 3(1), 2004, article 3, section 6.2). Let log σ² vary over records with mean g and variance A. By moments,
   g = mean of ℓ and A = max(0, variance of ℓ − mean of τ), over records. The best linear estimate is

       log σ̂² = g + (ℓ − g)·A/(A + τ)

2. Shift. d = (m_in − m_out)/σ̂ has variance t = 1/n_in + 1/n_out about the record's shift. Let shifts vary with mean μ
   and variance B = max(0, variance of d − mean of t). Then

       δ = μ + (d − μ)·B/(B + t)

3. Score. Location comes from all references: their mean m is estimated from n_in + n_out numbers, not from half of
   them. With x = (s − m)/σ̂ for the target's signal s, and the share r = n_in/(n_in + n_out), the shift puts the means
   in and out at (1 − r)·δ and −r·δ, so the log likelihood ratio of unit normals is

       δ·(x − (½ − r)·δ)

g, A, μ, B are moments over all records of one target's references, so they do not depend on the target either. Where a
record has no usable estimate (ν = 0, s² = 0, or no reference of one kind), it gets the mean over records.
"""

from __future__ import annotations

import numpy as np
from scipy.special import digamma, polygamma

from .references import FloatArray, Moments, score_targets
from .signals import BoolArray, Float32Array, Signals


def lira_shrunk(signals: Signals) -> Float32Array:
    """Online LiRA on the margin with scales and shifts shrunk to their means over records."""
    return score_targets(signals.checked("margin"), signals.member, _rule)


def _rule(own: FloatArray, inside: Moments, outside: Moments) -> FloatArray:
    scale = _scale(inside, outside)
    shift = _shift(inside, outside, scale)
    total = inside.count + outside.count
    location = (inside.count * inside.mean + outside.count * outside.mean) / total
    return shift * ((own - location) / scale - shift * (0.5 - inside.count / total))


def _scale(inside: Moments, outside: Moments) -> FloatArray:
    """σ̂ of each record, (records,)."""
    freedom = inside.freedom + outside.freedom
    within = inside.freedom * inside.variance + outside.freedom * outside.variance
    usable = within > 0
    half = np.where(usable, freedom, 1.0) / 2
    levels, place = np.unique(half, return_inverse=True)  # few: all references are in or out
    log_variance = np.log(np.where(usable, within, 1.0) / (2 * half)) - (digamma(levels) - np.log(levels))[place]
    return np.exp(shrink(log_variance, polygamma(1, levels)[place], usable) / 2)


def _shift(inside: Moments, outside: Moments, scale: FloatArray) -> FloatArray:
    """δ of each record, (records,)."""
    usable = np.minimum(inside.count, outside.count) >= 1
    noise = 1 / np.maximum(inside.count, 1) + 1 / np.maximum(outside.count, 1)
    return shrink((inside.mean - outside.mean) / scale, noise, usable)


def shrink(estimate: FloatArray, noise: FloatArray, usable: BoolArray) -> FloatArray:
    """Each estimate moved towards the mean by the share of noise in its variance; the mean itself where not usable.

    estimate, noise  (records,) estimates and their variances
    usable           (records,) which estimates count; without any, the result is 0
    """
    if not usable.any():
        return np.zeros(len(estimate))
    mean = float(estimate[usable].mean())
    spread = max(0.0, float(estimate[usable].var() - noise[usable].mean()))
    return np.where(usable, mean + (estimate - mean) * spread / (spread + noise), mean)
