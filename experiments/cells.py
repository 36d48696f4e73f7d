"""The kinds of cell. To add one: a function (settings, seed, label, device) -> JSON values, and a line in KINDS."""

from __future__ import annotations

import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import epsilons
from epsilons.errors import EpsilonsError

from .alternatives import alternatives
from .evaluation_bug import evaluation_bug
from .individual_accounting.cells import individual_accounting
from .measures import consumption, parameters, planning_time, step_time
from .membership import membership
from .pate.cells import pate, pate_sgd
from .results import DRAWS_VERSION
from .settings import Settings
from .training import on_gpu, train
from .visits import visits

KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "train": train,
    "features": train,
    "text": train,
    "membership": membership,
    "parameters": parameters,
    "consumption": consumption,
    "planning-time": planning_time,
    "step-time": step_time,
    "individual-accounting": individual_accounting,
    "alternatives": alternatives,
    "pate": pate,
    "pate-sgd": pate_sgd,
    "visits": visits,
    "evaluation-bug": evaluation_bug,
}

#: Libraries whose versions the numbers may depend on.
LIBRARIES = ("torch", "numpy", "scipy", "scikit-learn")

#: Kinds that need the machine for themselves.
TIMED = ("planning-time", "step-time")


def run(table: str, cell: str, settings: Settings, seed: int, device: str = "auto", threads: int = 1) -> dict[str, Any]:
    """One line of results: settings, code, machine and values; or {"error": …}."""
    torch.set_num_threads(threads)
    started, code = time.perf_counter(), code_version()
    line: dict[str, Any] = {
        "id": settings.named(seed),
        "table": table,
        "cell": cell,
        "seed": seed,
        "settings": settings.model_dump(),
    }
    try:
        values = KINDS[settings.kind](settings, seed, f"{cell} seed {seed}", device)
    except EpsilonsError as error:
        return {**line, "error": str(error)}
    except Exception:  # the other cells go on
        return {**line, "error": traceback.format_exc()}
    wall = round(time.perf_counter() - started, 2)
    return {
        **line,
        "code": code,
        "draws_version": DRAWS_VERSION,
        "machine": machine(device),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_seconds": wall,
        **values,
    }


def code_version() -> str:
    """The package's version and, in a checkout, its commit, with "-dirty" if library or experiments were edited.

    Without a checkout, EXPERIMENTS_COMMIT names the commit.
    """
    here = Path(__file__).resolve().parent
    watched = ["src", "experiments/*.py", "experiments/tables"]
    try:
        commit = _git(here, "rev-parse", "--short=12", "HEAD")
        dirty = "-dirty" if _git(here.parent, "status", "--porcelain", "--", *watched) else ""
    except (OSError, subprocess.CalledProcessError):
        commit, dirty = os.environ.get("EXPERIMENTS_COMMIT", "unknown"), ""
    return f"{epsilons.__version__}+{commit}{dirty}"


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def machine(device: str) -> dict[str, Any]:
    """The parts of the machine that the numbers may depend on. No host names."""
    return {
        "processor": torch.cuda.get_device_name() if on_gpu(device) else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        **{name: version(name) for name in LIBRARIES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
