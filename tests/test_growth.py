"""How calls and memory grow with people, budgets, steps and bytes: counts, so that no machine's speed matters."""

from __future__ import annotations

import gc
import importlib.util
import math
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType

import pytest

from pages import ROOT

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("growth", ROOT / "benchmarks" / "growth.py")
    assert spec
    assert spec.loader
    module = sys.modules["growth"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GROWTH = benchmark()


def counted(name: str, size: int, folder: Path) -> tuple[int, int]:
    """(calls of functions, peak of bytes) of the measured part."""
    folder.mkdir()
    work, calls = GROWTH.ROWS[name].work(size, folder), 0
    next(work)

    def count(frame: object, event: str, _: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    profile = sys.getprofile()
    sys.setprofile(count)
    try:
        next(work, None)
    finally:
        sys.setprofile(profile)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return calls, peak - before


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("pld")) for name in GROWTH.ROWS]
)
def test_calls_and_memory_grow_no_faster_than_they_did(name, tmp_path):
    row = GROWTH.ROWS[name]
    counted(name, row.held, tmp_path / "warm")  # what is cached, for all sizes
    small, large = (counted(name, size, tmp_path / str(size)) for size in (row.held, 4 * row.held))
    found = [math.log(max(b, 1) / max(a, 1), 4) for a, b in zip(small, large, strict=True)]
    assert found[0] <= row.limits[0] + 0.05, f"calls {small[0]:,} -> {large[0]:,}: exponent {found[0]:.2f}"
    assert found[1] <= row.limits[1] + 0.05, f"bytes {small[1]:,} -> {large[1]:,}: exponent {found[1]:.2f}"
