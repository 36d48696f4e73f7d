"""The command line in this process, and a table of people with a config to use it on."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from epsilons import cli

CONFIG = """
[data]
train = "people.csv"
test_share = 0.25
target = "label"
classes = ["no", "yes"]
drop = ["id"]
[data.numeric]
age = [0, 100]
income = [0, 100000, "log"]
[data.categorical]
town = ["north", "south"]
job = 4
[budgets]
column = "epsilon"
delta = 1e-3
[model]
name = "mlp"
options = { hidden = [4] }
[training]
steps = 4
batch_size = 10
lr = 0.2
[privacy]
strategy = "scale"
accountant = "rdp"
"""


def people(records: int = 80, seed: int = 0) -> str:
    """A .csv file of people: id, age, income, town, job, label, epsilon."""
    rng = np.random.default_rng(seed)
    lines = ["id,age,income,town,job,label,epsilon"]
    for i in range(records):
        town, job = rng.choice(["north", "south", "east"]), rng.choice(["smith", "baker", "clerk"])
        label, epsilon = rng.choice(["no", "yes"]), rng.choice([1, 4])
        lines.append(f"{i},{rng.integers(18, 90)},{rng.integers(0, 10**5)},{town},{job},{label},{epsilon}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    def succeeded(self, *words: str) -> None:
        """Assert that the command succeeded and printed these words."""
        assert self.code == 0, self.err + self.out
        printed = " ".join(self.out.split())
        for word in words:
            assert word in printed, self.out

    def is_refused(self, code: int, *words: str) -> None:
        """Assert that the command ended with this code and one short message that holds these words."""
        assert self.code == code, self.err + self.out
        assert self.err.startswith("epsilons: "), self.err
        assert self.err.count("\n") == 1, self.err
        assert len(self.err) < 600, self.err
        for word in words:
            assert word in self.err, self.err


def epsilons(*arguments: object) -> Outcome:
    """Run `epsilons ARGUMENTS` in this process."""
    out, err = io.StringIO(), io.StringIO()
    argv, path, show = sys.argv, list(sys.path), warnings.showwarning
    is_safe = os.environ.get("PYTHONSAFEPATH")
    sys.argv = ["epsilons", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("default")
            cli.main()
    except SystemExit as ended:
        return Outcome(int(ended.code or 0), out.getvalue(), err.getvalue())
    finally:
        sys.argv, sys.path[:], warnings.showwarning = argv, path, show
        os.environ.pop("PYTHONSAFEPATH", None)
        os.environ.update({} if is_safe is None else {"PYTHONSAFEPATH": is_safe})
    raise AssertionError("main() returned")


def change(old: str, new: str, file: str = "people.toml") -> None:
    """Replace a text that the file must hold, once."""
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new, 1))


def files(folder: Path) -> set[str]:
    """All files below a folder, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def python(code: str, cwd: Path | None = None, **environment: str) -> str:
    """What Python code prints in a process of its own, in which it must succeed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
