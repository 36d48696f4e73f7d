"""Runs trials, and says what was found: python -m tests.fuzzing [--slow] [--first N --last M]."""

from __future__ import annotations

import logging
import secrets
import sys
import time
import traceback
import warnings
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import epsilons

from .trials import ENGINES, Trial, draw_trial, sum_of, twin_of

#: Without one record a sum may move by so many times its bound, and by so much of the lengths of all other
#: contributions together: kernels round a record's gradient in its last bit if they are given another number of rows.
MOST, KERNELS = 1 + 1e-5, 2.0**-24
#: Seeds of every run of the tests, and how many --slow draws.
FIXED, MANY = 10, 3_000


@dataclass
class Found:
    """What trials said.

    counts    by engine: accepted, or the error's type
    messages  the first of each
    findings  lines, each with the command that repeats it
    ratios    (ratio, seed, engine) of the neighbours' difference to the bound
    distances (distance, seed, engine) of the sums to the twin, in units of the rounding that is allowed
    """

    models: int = 0
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    ratios: list[tuple[float, int, str]] = field(default_factory=list)
    distances: list[tuple[float, int, str]] = field(default_factory=list)

    def note(self, trial: Trial, engine: str, what: str) -> None:
        command = f"python -m tests.fuzzing --first {trial.seed} --last {trial.seed}"
        self.findings.append(f"{what} [{engine}; {trial}] {command}")

    def table(self) -> str:
        lines = [f"| {'engine':6} | {'result':40} | trials |", "|---|---|---|"]
        lines += [f"| {e:6} | {how:40} | {n:6,} |" for (e, how), n in sorted(self.counts.items())]
        lines += [f"first {how}: {message}" for how, message in sorted(self.messages.items())]
        above = sorted((r for r in self.ratios if r[0] > MOST), reverse=True)
        largest = max(self.ratios, default=(0.0, 0, ""))
        right = [d for d in self.distances if d[0] <= 1]
        bare = sum(n for (_, how), n in self.counts.items() if how.startswith("bare"))
        accepted = sum(n for (_, how), n in self.counts.items() if how == "accepted")
        lines += [
            f"models {self.models:,}, with engines {accepted:,}, bare errors {bare}, findings {len(self.findings)}",
            f"largest ratio of a neighbour's difference to the bound: {largest}",
            f"above 1 + 1e-5, last bits of other records included: {len(above)} {above[:20]}",
            f"largest distance to the twin that is right: {max(right, default=None)}",
        ]
        return "\n".join(lines)


def run(seeds: Iterable[int], engines: Mapping[str, Any] | None = None, tell: Callable[[str], None] = print) -> Found:
    """engines: by name, as `Performance` takes them, or functions that make one"""
    found = Found()
    for seed in seeds:
        trial = draw_trial(seed)
        before = len(found.findings)
        _try(trial, engines or {name: name for name in ENGINES}, found)
        found.models += 1
        for line in found.findings[before:]:
            tell(line)
    return found


def _try(trial: Trial, engines: Mapping[str, Any], found: Found) -> None:
    twin = twin_of(trial)
    kept = np.arange(len(trial.clip_norm)) != trial.removed
    bound = float(trial.weight[trial.removed] * trial.clip_norm[trial.removed])
    others = float(np.linalg.norm(twin.contributions[kept], axis=1).sum())
    for name, engine in engines.items():
        sums = []
        for variant in (trial, trial.neighbour):
            try:
                sums.append(sum_of(variant, engine() if callable(engine) else engine).numpy())
            except epsilons.errors.EpsilonsError as refusal:
                how = f"refused {type(refusal).__name__}"
                found.messages.setdefault(how, f"(seed {trial.seed}) {' '.join(str(refusal).split())}")
                found.counts[name, how] += 1
                break
            except Exception as error:
                how = f"bare {type(error).__name__}"
                where = traceback.extract_tb(error.__traceback__)[-1]
                found.messages.setdefault(how, f"(seed {trial.seed}) {error} at {where.filename}:{where.lineno}")
                found.counts[name, how] += 1
                found.note(trial, name, f"{how}: {' '.join(str(error).split())[:150]}")
                break
        for total, right, which in zip(sums, (twin, twin.only(kept)), ("sum", "neighbour's sum"), strict=False):
            if not np.isfinite(total).all():
                found.note(trial, name, f"the {which} is not finite")
                continue
            distance = right.distance(total)
            found.distances.append((distance, trial.seed, name))
            if distance > 1:
                found.note(
                    trial, name, f"the {which} is {distance:.3g} times as far from the twin as rounding explains"
                )
        if len(sums) == 2:
            found.counts[name, "accepted"] += 1
            moved = float(np.linalg.norm(sums[0] - sums[1]))
            found.ratios.append((moved / bound, trial.seed, name))
            if moved > bound * MOST + others * KERNELS:
                found.note(trial, name, f"without {trial.removed} the sum moves by {moved / bound:.9f} of the bound")


def main() -> None:
    parser = ArgumentParser(prog="python -m tests.fuzzing", description="Random models against the slow twin.")
    parser.add_argument("--slow", action="store_true", help=f"{MANY:,} new seeds")
    parser.add_argument("--first", type=int, help="the first seed")
    parser.add_argument("--last", type=int, help="the last seed")
    parser.add_argument("--engines", nargs="*", default=ENGINES)
    given = parser.parse_args()
    first = given.first if given.first is not None else secrets.randbelow(10**9) * 10_000 if given.slow else 0
    last = given.last if given.last is not None else first + (MANY if given.slow else FIXED) - 1
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    print(f"epsilons {epsilons.__file__}, seeds {first} to {last}", flush=True)
    start, whole = time.monotonic(), Found()
    for at in range(first, last + 1, 50):
        until = min(at + 49, last)
        part = run(range(at, until + 1), {name: name for name in given.engines}, lambda line: print(line, flush=True))
        whole.models += part.models
        whole.counts += part.counts
        whole.messages = part.messages | whole.messages
        whole.findings += part.findings
        whole.ratios += part.ratios
        whole.distances += part.distances
        print(f"# {time.monotonic() - start:,.0f} s; the rest: --first {until + 1} --last {last}", flush=True)
    print(whole.table())
    sys.exit(bool(whole.findings))
