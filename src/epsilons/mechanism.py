"""What one record goes through: a Gaussian mechanism on a Poisson sample, repeated.

Mironov, Talwar, Zhang, "Rényi Differential Privacy of the Sampled Gaussian Mechanism",
arXiv 1908.10530v1, Definition 1. A history of these is all an accountant is ever told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import PlanError

#: Below this noise multiplier one step spends hundreds of nats on whoever is drawn; no accountant here goes lower.
SMALLEST_NOISE = 0.05


@dataclass(frozen=True)
class SampledGaussian:
    """`steps` releases of a sum in which this record takes part with chance `sample_rate`.

    sample_rate       chance of being drawn in one step, in [0, 1]
    noise_multiplier  noise standard deviation / largest L2 norm of this record's own contribution, > 0
    steps             how many times, >= 0

    Raises PlanError for values outside these ranges.

    >>> SampledGaussian(sample_rate=0.01, noise_multiplier=1.1, steps=1000)
    SampledGaussian(sample_rate=0.01, noise_multiplier=1.1, steps=1000)
    """

    sample_rate: float
    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.sample_rate <= 1.0:
            raise PlanError(f"A sampling rate must be a probability between 0 and 1; {self.sample_rate} arrived.")
        if not self.noise_multiplier > 0.0:
            raise PlanError(
                f"A noise multiplier must be positive; {self.noise_multiplier} arrived. Without noise no finite "
                "epsilon can be promised."
            )
        if not (math.isfinite(self.steps) and self.steps == int(self.steps) and self.steps >= 0):
            raise PlanError(f"The number of steps must be a whole number, 0 or more; {self.steps} arrived.")

    @property
    def is_silent(self) -> bool:
        """True if the record never takes part, so that nothing about it is released."""
        return self.sample_rate == 0.0 or self.steps == 0 or math.isinf(self.noise_multiplier)
