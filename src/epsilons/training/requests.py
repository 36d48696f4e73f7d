"""What make_private was asked for, and what is known once it was checked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ..budgets import Budgets
from ..errors import InputError, RunError
from ..plan_folder import PlanFolder
from ..planning import Plan
from ..registry import Reservation
from .clipping import Engine
from .datasets import Source
from .performance import Decided, Performance
from .persons import Persons
from .randomness import Randomness


@dataclass(frozen=True)
class Request:
    """The arguments of make_private; has_classes: None if unknown.

    is_whole_loop: True if the library runs the loop, and may set up the process.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any
    plan: Plan
    budgets: Budgets
    performance: Performance
    plan_folder: PlanFolder | None = None
    run_dir: str | Path | None = None
    seed: int | None = None
    run_index: int = 0
    key: bytes | None = None
    randomness: str = "philox"
    resume: bool = False
    checkpoint_every: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    persons: Any = None
    rows_per_person: int = 1
    views: int = 1
    reservation: Reservation | None = None
    metadata: Mapping[str, Any] | None = None
    has_classes: bool | None = None
    is_whole_loop: bool = False

    def __post_init__(self) -> None:
        if self.resume and self.run_dir is None:
            raise RunError("resume=True needs run_dir=, the folder of the run to resume.")
        if self.reservation is not None and self.run_dir is None:
            raise RunError("reservation= needs run_dir=: the ledger there is the evidence of what the run was charged.")
        if self.run_index and self.key is not None:
            raise InputError(
                "run_index= has no effect on an explicit key=. Leave one out, or give every run another key."
            )

    @property
    def is_subset(self) -> bool:
        """True if these are some of the plan's records."""
        return self.plan_folder is not None and self.plan_folder.is_subset

    @property
    def training(self) -> dict[str, Any]:
        """Settings of training that the key of a seed depends on."""
        return dict((self.metadata or {}).get("training") or {})


@dataclass(frozen=True)
class Inputs:
    """What is known once the inputs were checked.

    performance   what was chosen
    group         (persons,) each person's group in the plan; without persons, each record's
    persons       whose rows are whose
    largest       number of rows in a physical batch, at most
    contents      fingerprint of the data; "" if nothing is compared with it
    fingerprint   everything that may change a sum though key and state are the same
    """

    source: Source
    performance: Decided
    group: npt.NDArray[np.int64]
    persons: Persons
    randomness: Randomness
    parameters: list[nn.Parameter]
    engine: Engine
    largest: int
    contents: str
    fingerprint: dict[str, Any]

    def budgets_of(self, plan: Plan) -> tuple[bytes, bytes]:
        """Epsilon and delta of every record, in order, as bytes."""
        return plan.epsilons[self.group].tobytes(), plan.delta[self.group].tobytes()

    @property
    def roster(self) -> str:
        """A hash of the groups of all persons; without persons, of all records. Whose rows are whose is no part of it.

        It is in files of the run, and the number of a person's rows is private.
        """
        return hash_of_groups(self.group)


def hash_of_groups(group: npt.NDArray[np.int64]) -> str:
    """What run.json has of the groups of all persons, or of all records."""
    return hashlib.blake2b(group.tobytes(), digest_size=16).hexdigest()
