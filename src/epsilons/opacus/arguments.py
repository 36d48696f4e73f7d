"""The arguments of make_private: what is refused, and what to do instead."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from ..errors import CallOrderError, DataError, EpsilonsWarning, InputError, ModelError
from ..training import Performance
from ..training.loaders import without_loader
from .loader import PrivateLoader
from .wrappers import PrivateModule, PrivateOptimizer

#: All are computed by the same engines here; "ghost" also returns a criterion, as in Opacus.
MODES = ("hooks", "functorch", "ew", "ghost")


@dataclass(frozen=True)
class Request:
    """The arguments of make_private and make_private_with_epsilon that both have.

    others   arguments that Opacus hands on to its optimizer or accountant
    """

    module: nn.Module
    optimizer: Optimizer
    criterion: Any
    data_loader: DataLoader[Any]
    max_grad_norm: float
    batch_first: bool
    loss_reduction: str
    poisson_sampling: bool
    clipping: str
    noise_generator: Any
    grad_sample_mode: str
    run_dir: str | Path | None
    resume: bool
    performance: Performance | None
    seed: int | None
    others: Mapping[str, Any]

    @property
    def model(self) -> nn.Module:
        """The caller's model. Raises CallOrderError for the model of a run that is not closed."""
        if not isinstance(self.module, PrivateModule):
            return self.module
        if not self.module.is_closed:
            raise CallOrderError(
                "This model belongs to a private run already. Call its remove_hooks() first to end that run; a second "
                "run on the same records spends a second budget."
            )
        return self.module._module

    @property
    def plain_optimizer(self) -> Optimizer:
        """The caller's optimizer."""
        given = self.optimizer
        return given.original_optimizer if isinstance(given, PrivateOptimizer) else given

    @property
    def loader(self) -> DataLoader[Any]:
        """The caller's data loader."""
        return self.data_loader.given if isinstance(self.data_loader, PrivateLoader) else self.data_loader

    def check(self) -> None:
        """Raise InputError for what is not supported, DataError for a data loader that cannot be replaced."""
        self._check_settings()
        _check_model(self.model, self.plain_optimizer)
        check_loader(self.loader)
        if not self.poisson_sampling:
            warnings.warn(
                "poisson_sampling=False has no effect. The guarantee holds for Poisson sampling, so records are drawn "
                "in that way, and batches vary in size.",
                EpsilonsWarning,
                stacklevel=4,
            )
        if self.loader.generator is not None:
            warnings.warn(
                "The generator of the data loader has no effect: records are drawn with the run's secret key. For a "
                "repeatable run give seed=, and leave the generator out.",
                EpsilonsWarning,
                stacklevel=4,
            )

    def _check_settings(self) -> None:
        if self.others:
            raise InputError(
                f"make_private has no argument {', '.join(self.others)}. Opacus hands it on to adaptive clipping, "
                "which is not supported, or to its accountant. Leave it out."
            )
        if not self.batch_first:
            raise InputError(
                "batch_first=False is not supported. Give the model its batch dimension first (batch_first=True in "
                "recurrent layers)."
            )
        if self.clipping != "flat" or not isinstance(self.max_grad_norm, int | float):
            raise InputError(
                f"clipping={self.clipping!r} is not supported: a budget bounds the norm of a record's whole gradient. "
                "Leave clipping out, and give max_grad_norm as one number."
            )
        if self.noise_generator is not None:
            raise InputError(
                "noise_generator is not supported: noise is made from the run's secret key. For a repeatable run give "
                "seed=."
            )
        if self.grad_sample_mode not in MODES:
            raise InputError(
                f"grad_sample_mode={self.grad_sample_mode!r} is not supported; use one of {', '.join(MODES)}. "
                "For gradients of your own use epsilons.make_private with losses per record."
            )
        if self.loss_reduction not in ("mean", "sum"):
            raise InputError(f"loss_reduction must be 'mean' or 'sum', got {self.loss_reduction!r}.")


def _check_model(model: nn.Module, optimizer: Optimizer) -> None:
    name = type(model).__name__
    if name == "DifferentiallyPrivateDistributedDataParallel":
        raise ModelError(
            f"Got a model wrapped in {name}. Pass the model itself (model.module) on every rank: the clipped sums are "
            "added up here."
        )
    held = {id(p) for p in model.parameters()}
    foreign = sum(id(p) not in held for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ModelError(
            f"The optimizer holds {foreign} parameters that are not the model's. One run has one model and one "
            "optimizer: put several models into one nn.Module, or train each in a run of its own, with a budget of "
            "its own."
        )


def check_loader(loader: DataLoader[Any]) -> None:
    """Raise DataError for a data loader that does more than to shuffle records or to go through them."""
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            "The data loader has an IterableDataset. Each record is drawn by its own coin, which needs a map-style "
            "data set, with __len__ and __getitem__."
        )
    without_loader(loader, Performance(), None)
