"""How often the canary audit is right: training under the paper's CIFAR10 A plan, correct and with planted bugs.

    python experiments/audit_power.py [--runs 20] [--canaries 2000] [--kinds honest,noise=0.5,clip=2] [-o runs.jsonl]

Every run trains logistic regression on the handwritten digits with canaries of three groups under Scale, epsilon 1, 2
and 3 at delta 1e-5, sampling rate 1/49, 1,470 steps: the plan's privacy does not depend on model or data. `noise=0.5`
halves the noise, `clip=2` doubles the clip norm of one group, each in turn. Prints a line per run, a summary per kind.
With glibc, MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=10000000000 saves much of the time.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from epsilons import Budgets, Plan, Recipe, audit
from epsilons import plan as make_plan
from epsilons.auditing import AuditResult
from epsilons.clipping.ghost import ghost
from epsilons.draws.randomness import Randomness

SHARES = {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}
RECORDS, STEPS = 50_000, 1_470


def cifar10_a() -> Plan:
    """30 epochs of 49 draws, clip norm 0.4 (paper, Table of hyperparameters), certified by PLD."""
    budgets = Budgets.from_shares(SHARES, records=RECORDS, seed=0)
    return make_plan(budgets, Recipe(steps=STEPS, batch_size=RECORDS / 49, clip_norm=0.4), strategy="scale")


@contextmanager
def planted(kind: str, plan: Plan, group: int) -> Iterator[None]:
    """The library with this bug, such as "noise=0.5"."""
    name, _, factor = kind.partition("=")
    true_noise, true_factors = Randomness.noise, ghost.clip_factors  # type: ignore[attr-defined]

    def noise(self: Randomness, phase: int, step: int, count: int) -> npt.NDArray[np.float64]:
        return float(factor) * true_noise(self, phase, step, count)

    def factors(squared_norm: Tensor, clip_norm: Tensor, weight: Tensor) -> Tensor:
        mine = torch.isclose(clip_norm, torch.tensor(plan.clip_norm[group], dtype=clip_norm.dtype))
        return true_factors(squared_norm, torch.where(mine, clip_norm * float(factor), clip_norm), weight)

    if name == "noise":
        with mock.patch.object(Randomness, "noise", noise):
            yield
    elif name == "clip":
        with mock.patch.object(ghost, "clip_factors", factors):
            yield
    else:
        yield


def row(kind: str, run: int, group: int, result: AuditResult) -> dict[str, Any]:
    """The result of one run, as JSON values."""
    return {
        "kind": kind,
        "run": run,
        "wrong_group": group if kind.startswith("clip") else None,
        "verdict": result.verdict,
        "violated": [g.group for g in result.violated],
        "gaussian_bound": [g.gaussian_bound for g in result.groups],
        "gaussian_estimate": [g.gaussian_estimate for g in result.groups],
        "one_run": [g.one_run for g in result.groups],
        "one_run_fdp": [g.one_run_fdp for g in result.groups],
        "p_value": [g.p_value for g in result.groups],
        "accounted_again": result.reestimate.epsilon.tolist(),
        "trace": [[m.what, m.group, m.tensor, m.status] for m in result.reestimate.deviations],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--canaries", type=int, default=2_000)
    parser.add_argument("--kinds", default="honest,noise=0.5,clip=2")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plan, rows = cifar10_a(), defaultdict(list)
    for run in range(arguments.first, arguments.first + arguments.runs):
        for number, kind in enumerate(arguments.kinds.split(",")):
            group = run % len(SHARES)
            with planted(kind, plan, group):
                result = audit(plan, canaries=arguments.canaries, seed=1_000 * (number + 1) + run)
            rows[kind].append(row(kind, run, group, result))
            line = json.dumps(rows[kind][-1])
            print(line, flush=True)
            if arguments.output:
                with arguments.output.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    for kind, results in rows.items():
        named = sum(r["wrong_group"] in r["violated"] for r in results)
        traced = sum(bool(r["trace"]) for r in results)
        print(f"\n{kind}: {len(results)} runs, violated in {sum(r['verdict'] == 'violated' for r in results)}", end="")
        print(f", the wrong group named in {named}" if kind.startswith("clip") else "", f"; trace differs in {traced}")
        for name in ("gaussian_estimate", "gaussian_bound", "one_run", "one_run_fdp", "accounted_again"):
            print(f"  mean {name:18}", np.round(np.mean([r[name] for r in results], axis=0), 3))


if __name__ == "__main__":
    main()
