"""Stand-ins for MLflow and W&B with the calls of docs/recipes.md; the real packages where they are installed."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

Logged = list[tuple[int, dict[str, float]]]


def install(monkeypatch: Any) -> dict[str, Logged]:
    """Put a stand-in, or a recorder around the real calls, in place. Returns what each tracker is given."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    logged: dict[str, Logged] = {"mlflow": [], "wandb": []}
    if not find_spec("mlflow"):
        monkeypatch.setitem(sys.modules, "mlflow", _mlflow())
    if not find_spec("wandb"):
        monkeypatch.setitem(sys.modules, "wandb", _wandb())
    import mlflow
    import wandb

    _record(monkeypatch, mlflow, "log_metrics", logged["mlflow"])
    start = wandb.init

    def init(**options: Any) -> Any:
        tracker = start(**options)
        _record(monkeypatch, tracker, "log", logged["wandb"])
        return tracker

    monkeypatch.setattr(wandb, "init", init)
    return logged


def _record(monkeypatch: Any, where: Any, name: str, logged: Logged) -> None:
    real = getattr(where, name)

    def recorded(values: dict[str, float], step: int) -> None:
        logged.append((step, dict(values)))
        real(values, step=step)

    monkeypatch.setattr(where, name, recorded)


def _mlflow() -> ModuleType:
    module: Any = ModuleType("mlflow")
    module.set_tracking_uri = lambda uri: None
    module.start_run = nullcontext
    module.log_params = lambda params: None
    module.log_metrics = lambda metrics, step: None
    module.end_run = lambda: None
    return module


def _wandb() -> ModuleType:
    module: Any = ModuleType("wandb")
    module.init = lambda project, mode, config: SimpleNamespace(log=lambda values, step: None, finish=lambda: None)
    return module
