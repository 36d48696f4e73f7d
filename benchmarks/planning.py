"""How long planning takes beside the authors' published search, and beside Opacus' own noise search.

    python benchmarks/planning.py                 # three levels and 128, a few minutes; writes benchmarks/planning.md
    python benchmarks/planning.py --quick         # three levels only

The peer is the published search (paper, Alg. 2 and 3 and getNoise/getSampleRate in the appendix; reference code
github.com/fraboeni/idp-sgd), written out on Opacus' own RDP accountant: Scale doubles and bisects each group's noise
to a precision; Sample walks the shared noise down and bisects each group's rate. Everything runs in one process, turn
by turn; medians of ratios are shown. Needs the `opacus` extra.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from opacus.accountants.rdp import RDPAccountant
from opacus.accountants.utils import get_noise_multiplier

import epsilons
from epsilons.accounting import pld

N, B, STEPS, DELTA = 50_000, 1024, 1465, 1e-5
ORDERS = RDPAccountant.DEFAULT_ALPHAS


def opacus_epsilon(rate: float, noise: float) -> float:
    rdp = compute_rdp(q=rate, noise_multiplier=noise, steps=STEPS, orders=ORDERS)
    return float(get_privacy_spent(orders=ORDERS, rdp=rdp, delta=DELTA)[0])


def published_noise(epsilon: float, rate: float, precision: float) -> float:
    """getNoise: double until the budget is kept, then bisect until ε is within `precision` of it."""
    low, high = 0.0, 10.0
    while opacus_epsilon(rate, high) > epsilon:
        high *= 2
    spent = opacus_epsilon(rate, high)
    while epsilon - spent > precision:
        middle = (low + high) / 2
        value = opacus_epsilon(rate, middle)
        if value < epsilon:
            high, spent = middle, value
        else:
            low = middle
    return high


def published_rate(epsilon: float, noise: float, precision: float) -> float:
    """getSampleRate, with its branches put right: bisect the rate until ε is within `precision` below the budget."""
    low, high = 0.0, 1.0
    spent = 0.0
    while epsilon - spent > precision and high - low > 1e-12:
        middle = (low + high) / 2
        value = opacus_epsilon(middle, noise)
        if value <= epsilon:
            low, spent = middle, value
        else:
            high = middle
    return low


def published_scale(levels: np.ndarray, shares: np.ndarray, precision: float) -> np.ndarray:
    return np.array([published_noise(float(level), B / N, precision) for level in levels])


def published_sample(levels: np.ndarray, shares: np.ndarray, precision: float) -> np.ndarray:
    """Alg. 2: from the strictest group's noise downwards, by a factor, until the rates average to q."""
    noise = published_noise(float(levels[0]), B / N, precision)
    high, low = noise, 0.0
    while True:
        rates = np.array([published_rate(float(level), noise, precision) for level in levels])
        mean = float(shares @ rates)
        if abs(mean / (B / N) - 1) <= precision:
            return rates
        if mean > B / N:
            high = noise
        else:
            low = noise
        noise = (low + high) / 2 if low else noise * 0.7


def timed(run: Callable[[], object]) -> float:
    pld._one.cache_clear()
    pld._composed.cache_clear()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three levels only")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    quick = parser.parse_args()
    warnings.simplefilter("ignore")
    recipe = epsilons.Recipe(STEPS, B, 1.0)
    rows, curve = [], []
    cases = [(3, 0.01, 3), (3, 0.001, 3), (3, 1e-4, 3)] + ([] if quick.quick else [(128, 0.001, 1)])
    for groups, precision, rounds in cases:
        levels = np.linspace(1, 3, groups)
        shares = np.array([0.34, 0.43, 0.23]) if groups == 3 else np.full(groups, 1 / groups)
        budgets = epsilons.Budgets(np.repeat(levels, np.round(shares * N).astype(int)), DELTA)
        for strategy, peer in (("scale", published_scale), ("sample", published_sample)):
            taken: dict[str, list[float]] = {"peer": [], "rdp": [], "pld": []}
            for _ in range(rounds):
                for accountant in ("rdp", "pld"):
                    taken[accountant].append(
                        timed(lambda a=accountant, s=strategy, b=budgets: epsilons.plan(b, recipe, s, a))
                    )
                taken["peer"].append(timed(lambda p=peer, le=levels, sh=shares, pr=precision: p(le, sh, pr)))
            median = {name: statistics.median(values) for name, values in taken.items()}
            ratio = {
                name: statistics.median(p / o for p, o in zip(taken["peer"], taken[name], strict=True))
                for name in ("rdp", "pld")
            }
            rows.append(
                f"| {groups} | {strategy} | {precision:g} | {median['peer']:.2f} | {median['rdp']:.4f} | "
                f"{median['pld']:.3f} | {ratio['rdp']:,.0f}x | {ratio['pld']:,.1f}x |"
            )
            print(rows[-1], flush=True)
            curve.append((groups, strategy, precision, median))
    one = epsilons.Budgets([1.0] * 100, DELTA)
    one_recipe = epsilons.Recipe(STEPS, 100 * B / N, 1.0)
    pairs = []
    for _ in range(5):
        ours = timed(lambda: epsilons.plan(one, one_recipe, "uniform", "rdp"))
        theirs = timed(
            lambda: get_noise_multiplier(
                target_epsilon=1.0, target_delta=DELTA, sample_rate=B / N, steps=STEPS, accountant="rdp"
            )
        )
        pairs.append((theirs, ours))
    theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    single = f"One level: Opacus' get_noise_multiplier (tolerance 0.01) {theirs:.3f} s, here {ours:.4f} s, "
    single += f"{statistics.median(t / o for t, o in pairs):,.0f}x."
    print(single)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    head = "| levels | strategy | precision | published search, s | rdp, s | pld, s | rdp ratio | pld ratio |"
    quick.out.write_text(
        "\n".join(
            [
                "# Planning beside the published search",
                "",
                "`python benchmarks/planning.py`: CIFAR-10's setting (50,000 records, batch 1,024, 1,465 steps, delta "
                f"1e-5), one process, one thread, turn by turn. Machine: {machine}.",
                "",
                head,
                "|---|---|---|---|---|---|---|---|",
                *rows,
                "",
                single,
                "",
            ]
        ),
        encoding="utf-8",
    )
    _plot(curve, quick.out.with_suffix(".png"))


def _plot(curve: list[tuple[int, str, float, dict[str, float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in ("peer", "rdp", "pld"):
        points = sorted((groups, median[name]) for groups, s, p, median in curve if s == "sample" and p == 0.001)
        axes.loglog(
            *zip(*points, strict=True), "o-", label={"peer": "published search (RDP)"}.get(name, f"here, {name}")
        )
    axes.set_xlabel("levels")
    axes.set_ylabel("seconds to plan Sample")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
