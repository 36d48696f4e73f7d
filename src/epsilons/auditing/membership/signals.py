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
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError

BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Signals:
    """The signals of all shadow models. Every shadow is the target of all others.

    member              (shadows, records) which records each shadow was trained on
    margin, raw, log_p  (shadows, records) each
    population          (shadows, population) log_p of records that no shadow was trained on; 0 columns without any
    """

    member: BoolArray = field(repr=False)
    margin: Float32Array = field(repr=False)
    raw: Float32Array = field(repr=False)
    log_p: Float32Array = field(repr=False)
    population: Float32Array = field(repr=False)

    def __post_init__(self) -> None:
        if self.member.ndim != 2 or self.member.dtype != np.bool_:
            raise InputError(
                f"member has one row per shadow and one column per record, of type bool; got shape {self.member.shape} "
                f"of type {self.member.dtype}."
            )
        for name in ("margin", "raw", "log_p"):
            if getattr(self, name).shape != self.member.shape:
                raise InputError(
                    f"{name} must have the shape of member, {self.member.shape}; got {getattr(self, name).shape}."
                )
        if self.population.ndim != 2 or len(self.population) != len(self.member):
            raise InputError(
                f"population has one row per shadow, so {len(self.member)} rows; got shape {self.population.shape}."
            )

    def checked(self, name: str) -> Float32Array:
        """The signal `name` ("margin", "raw", "log_p", "population") of two or more shadows, all numbers finite.

        Raises InputError for a single shadow, which has no references, and for shadows that diverged in training.
        """
        values: Float32Array = getattr(self, name)
        if len(values) < 2:
            raise InputError(
                f"Every shadow is attacked with the others as its references, so it takes 2 or more; got {len(values)}."
            )
        diverged = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(diverged):
            raise InputError(
                f"The signal {name} must be finite; got others for {len(diverged)} of {len(values)} "
                f"shadows (the first is shadow {diverged[0]}). Their training diverged: lower the learning rate."
            )
        return values


def read_signals(logits: Tensor, targets: Tensor) -> dict[str, Float32Array]:
    """The three signals of each record, (…, records) each; logits (…, records, classes), targets (records,).

    >>> read_signals(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))["margin"]
    array([2., 0.], dtype=float32)
    """
    if logits.shape[-1] < 2:
        raise InputError(f"Signals need the logits of 2 or more classes, got {logits.shape[-1]}.")
    if logits.dim() == 2:
        return _read_model(logits.detach(), targets.to(logits.device).long())
    models = [read_signals(model, targets) for model in logits]  # one by one, because 64-bit copies of all are large
    return {name: np.stack([model[name] for model in models]) for name in ("margin", "raw", "log_p")}


def _read_model(logits: Tensor, targets: Tensor) -> dict[str, Float32Array]:
    true = targets[:, None]
    raw = logits.gather(-1, true)[:, 0].double()
    others = logits.double().scatter(-1, true, -torch.inf).logsumexp(-1)
    margin = raw - others
    values = {"margin": margin, "raw": raw, "log_p": F.logsigmoid(margin)}
    return {name: value.float().cpu().numpy() for name, value in values.items()}
