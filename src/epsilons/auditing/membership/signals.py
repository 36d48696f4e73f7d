"""What an attacker reads off a model: one number per record, in three forms, and the shadows they come from.

    margin  log p/(1 − p) of the true class (Carlini et al., "Membership Inference Attacks From First Principles",
            arXiv 2112.03570v2, section IV-C)
    raw     the logit of the true class, which the paper's own code attacks
    log_p   log p of the true class

All three are computed from logits by logsumexp, so that a probability near 1 loses no bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Signals:
    """The signals of all shadow models. Every shadow is the target of all others.

    member              (shadows, records) which records each shadow was trained on
    margin, raw, log_p  (shadows, records) each
    population          (shadows, population) log_p of records that no shadow was trained on; 0 columns without
    """

    member: BoolArray = field(repr=False)
    margin: Float32Array = field(repr=False)
    raw: Float32Array = field(repr=False)
    log_p: Float32Array = field(repr=False)
    population: Float32Array = field(repr=False)


def read_signals(logits: Tensor, targets: Tensor) -> dict[str, Float32Array]:
    """The three signals of each record, (…, records) each; logits (…, records, classes), targets (records,)."""
    true = targets.long().expand(logits.shape[:-1])[..., None]
    raw = logits.gather(-1, true)[..., 0].double()
    others = logits.double().scatter(-1, true, -torch.inf).logsumexp(-1)
    both = torch.logaddexp(raw, others)
    values = {"margin": raw - others, "raw": raw, "log_p": raw - both}
    return {name: value.float().numpy() for name, value in values.items()}
