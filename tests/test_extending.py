"""The examples of docs/extending.md pass the contract tests that their kind must pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("options", [[], pytest.param(["--slow"], marks=pytest.mark.slow)], ids=["", "slow"])
def test_the_new_strategy_accountant_and_engine_of_the_page_keep_their_contracts(options):
    """In a process of its own: contract tests read the tables when they are collected (see newcomers.py)."""
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "newcomers",
        "-p",
        "no:cacheprovider",
        str(HERE / "contracts"),
        *options,
    ]
    done = subprocess.run(
        command, cwd=HERE.parent, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) > 300  # were nothing selected, nothing would fail
