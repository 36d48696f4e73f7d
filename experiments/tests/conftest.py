"""No test of an experiment writes into the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import training


@pytest.fixture(autouse=True)
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of runs that are not finished."""
    monkeypatch.setattr(training, "UNFINISHED", tmp_path / "unfinished")
    return training.UNFINISHED
