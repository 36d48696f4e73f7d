"""What the tests of compiled steps share."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from epsilons.errors import InputError
from epsilons.training.clipping.compiled import Compiled, check_compiler, programs
from zoo import Case

RECORDS = 33


def has_compiler() -> bool:
    try:
        check_compiler(torch.device("cpu"))
    except InputError:
        return False
    return True


#: The condition is looked up in the test's module, and only where a test runs.
needs_compiler = pytest.mark.skipif("not has_compiler()", reason="NO C++ COMPILER: compiled steps were not tested")


def compiled(case: Case, records: int = RECORDS) -> Compiled:
    def losses(model: nn.Module, batch: tuple[tuple[Tensor, ...], Tensor]) -> Tensor:
        inputs, targets = batch
        return case.losses(model(*inputs), targets)

    return Compiled(case.model, case.parameters, losses, records)


def of_model(model: nn.Module, losses, records: int) -> Compiled:
    return Compiled(model, list(model.parameters()), losses, records)


def bounds_of(records: int, clip_norm: float) -> Tensor:
    return torch.full((records,), clip_norm, dtype=torch.float64)


def one_of(records: int, record: int) -> Tensor:
    """Weight 1 for this record, 0 for all others."""
    return (torch.arange(records) == record).double()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Those of the library."""
    records = [r for r in caplog.records if r.name.startswith("epsilons.") and r.levelno >= logging.WARNING]
    return [r.getMessage() for r in records]


@pytest.fixture(params=["recorded", pytest.param("compiled", marks=pytest.mark.slow)])
def quick(request, monkeypatch) -> None:
    """In every run what was recorded is not compiled."""
    if request.param == "recorded":
        monkeypatch.setattr(programs, "compile_graph", lambda graph, example: graph)
