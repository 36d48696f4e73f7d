"""Canary scores, one number per canary, and the moments that a plan gives them.

The score of a canary in group p is the log-likelihood ratio of "in" against "out" after all updates,

    Σ_t log(1 + q_p·(e^{(2·z_t − 1)/2σ_p²} − 1)),   z_t its coordinate of the noisy sum, in units of weight_p · c_p

(Mironov, Talwar, Zhang, arXiv 1908.10530v1, Section 3: in is (1−q)·N(0, σ²) + q·N(1, σ²), out is N(0, σ²)). By the
Neyman-Pearson lemma no other test of the same numbers separates in from out better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..mechanism import SampledGaussian

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Range (standard deviations beyond both means) and number of points of the integral over one step's score.
_TAIL, _POINTS = 12.0, 20_001


@dataclass(frozen=True, eq=False)
class CanaryScores:
    """The scores of an attack, one per canary. A higher score is evidence for "in".

    group     (canaries,) index into the plan's groups
    included  (canaries,) True for in
    score     (canaries,) finite numbers
    """

    group: IntArray = field(repr=False)
    included: BoolArray = field(repr=False)
    score: FloatArray = field(repr=False)

    def of(self, group: int) -> tuple[FloatArray, BoolArray]:
        """Scores of one group's canaries, and which of them are in."""
        members = self.group == group
        return self.score[members], self.included[members]


def log_likelihood_ratio(z: npt.ArrayLike, sample_rate: npt.ArrayLike, noise_multiplier: npt.ArrayLike) -> FloatArray:
    """One step's part of the score. The three arguments are broadcast; the result does not overflow.

    z: in units of the record's largest contribution.
    """
    q = np.asarray(sample_rate, dtype=np.float64)
    exponent = (2 * np.asarray(z, dtype=np.float64) - 1) / (2 * np.square(noise_multiplier))
    with np.errstate(divide="ignore"):  # log 0 is −inf for q = 0 and q = 1, as it should be
        ratio: FloatArray = np.logaddexp(np.log1p(-q), np.log(q) + exponent)
    return ratio


@dataclass(frozen=True)
class Moments:
    """The first four cumulants of a score."""

    mean: float
    variance: float
    third: float
    fourth: float


def planned_moments(history: Sequence[SampledGaussian]) -> tuple[Moments, Moments]:
    """Cumulants of the score of a canary that is in, and of one that is out, under `history`. Steps add up."""
    inside, outside = np.zeros(4), np.zeros(4)
    for mechanism in history:
        if mechanism.is_silent:
            continue
        step_in, step_out = _one_step(mechanism.sample_rate, mechanism.noise_multiplier)
        inside, outside = inside + mechanism.steps * step_in, outside + mechanism.steps * step_out
    return Moments(*map(float, inside)), Moments(*map(float, outside))


def _one_step(q: float, s: float) -> tuple[FloatArray, FloatArray]:
    z = np.linspace(-_TAIL * s, 1 + _TAIL * s, _POINTS)
    score = log_likelihood_ratio(z, q, s)
    density = np.exp(-0.5 * np.square(z / s)) / (s * math.sqrt(2 * math.pi)) * (z[1] - z[0])
    present = np.exp(-0.5 * np.square((z - 1) / s)) / (s * math.sqrt(2 * math.pi)) * (z[1] - z[0])
    return _cumulants(score, (1 - q) * density + q * present), _cumulants(score, density)


def _cumulants(values: FloatArray, mass: FloatArray) -> FloatArray:
    mean = float(values @ mass)
    second, third, fourth = (float((values - mean) ** k @ mass) for k in (2, 3, 4))
    return np.array([mean, second, third, fourth - 3 * second**2])
