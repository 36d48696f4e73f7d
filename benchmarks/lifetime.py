"""The price of a lifetime: noise under the accountant `filter`, over that of everything known beforehand under PLD.

    python benchmarks/lifetime.py --out benchmarks/results/lifetime.json

A person of lifetime budget ε at δ = 1e-5 goes through 1, 4 or 16 runs of equal length. PLD gets all steps of all runs
as one history, which no adaptive plan can. Lines of Markdown go to the standard output.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from epsilons.accounting import filter as filter_
from epsilons.accounting import pld
from epsilons.accounting.calibration import noise_for, noises_for

DELTA = 1e-5
EPSILONS = (0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 8.0, 10.0)
RUNS = (1, 4, 16)
#: Sampling rate, steps of one run.
SETTINGS = ((0.02, 1465), (0.001, 20_000))
#: First budget and a later one, stated before any run.
CHANGES = ((1.0, 2.0), (1.0, 4.0), (1.0, 8.0), (2.0, 4.0), (2.0, 8.0), (4.0, 2.0), (4.0, 1.0))


def lifetime_noise(epsilon: float, first: float, rate: float, steps: int) -> float:
    """The noise multiplier at which this many steps use up the lifetime budget of a person who stated `first` first."""
    start = filter_.offsets(DELTA, filter_.home_orders(first, DELTA))
    return float(noises_for(np.array([epsilon]), rate, steps, start, filter_.epsilon)[0])


def ratio(epsilon: float, rate: float, steps: int) -> float:
    return lifetime_noise(epsilon, epsilon, rate, steps) / noise_for(epsilon, rate, steps, DELTA, pld.epsilon)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for rate, steps in SETTINGS:
        print(f"\n| ε | {' | '.join(f'{runs} runs' for runs in RUNS)} |   rate {rate}, {steps:,} steps per run")
        for epsilon in EPSILONS:
            ratios = [ratio(epsilon, rate, steps * runs) for runs in RUNS]
            found += [
                {"epsilon": epsilon, "sample_rate": rate, "steps": steps * runs, "runs": runs, "noise_over_pld": value}
                for runs, value in zip(RUNS, ratios, strict=True)
            ]
            print(f"| {epsilon:g} | {' | '.join(f'{100 * (value - 1):.1f} %' for value in ratios)} |", flush=True)
    changed = []
    for first, later in CHANGES:
        value = lifetime_noise(later, first, 0.02, 4 * 1465) / lifetime_noise(later, later, 0.02, 4 * 1465)
        changed.append({"first": first, "later": later, "noise_over_stated_at_once": value})
        print(f"{first:g} -> {later:g}: {100 * (value - 1):.1f} %")
    if options.out:
        options.out.write_text(json.dumps({"delta": DELTA, "prices": found, "changes": changed}, indent=1) + "\n")


if __name__ == "__main__":
    main()
