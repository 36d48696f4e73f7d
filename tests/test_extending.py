"""The examples of docs/extending.md pass the contract tests that their kind must pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(("options", "least"), [([], 60), pytest.param(["--slow"], 300, marks=pytest.mark.slow)])
def test_the_new_strategy_accountant_and_engine_of_the_page_keep_their_contracts(options, least):
    """In a separate process: contract tests read the tables when they are collected (see newcomers.py)."""
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "newcomers", "-p", "no:cacheprovider", f"{HERE / 'contracts'}"]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [*command, *options], cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > least  # were nothing selected, nothing would fail
