"""How long planning takes beside the authors' published search, and beside Opacus' own noise search.

    python benchmarks/planning.py                 # about ten minutes on one core
    python benchmarks/planning.py --quick         # three levels only
    python benchmarks/planning.py --budgets 1000  # PLD alone, so many budgets between 1 and 3 of a million records

Writes benchmarks/results/planning.json, .md and .png. The peer is the search of the paper's published code
(github.com/sprintml/idp-sgd, opacus/accountants/utils.py), rewritten on Opacus' RDP accountant and its orders. Its
option of searching orders up to 10,000, which is ten times slower, is left out. Everything runs in one process, in
turns, with empty caches; ratios are medians over pairs. Needs the `opacus` extra.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from opacus.accountants import RDPAccountant
from opacus.accountants.utils import get_noise_multiplier

import epsilons
from epsilons.accounting import pld, rdp

RECORDS, BATCH, STEPS, DELTA = 50_000, 1024, 1465, 1e-5
RATE = BATCH / RECORDS
RESULTS = Path(__file__).parent / "results" / "planning.json"

#: Levels, precision of the peer, rounds. 0.001 is the published default.
CASES = [(3, 0.01, 3), (3, 0.001, 3), (3, 1e-4, 3), (8, 0.001, 1), (32, 0.001, 1), (128, 0.001, 1)]
OURS_PER_ROUND = 3


class Peer:
    """The published search; `evaluations` counts its calls of the accountant of Opacus."""

    LARGEST_RATE, SMALLEST_RATE = 0.1, 1e-9

    def __init__(self, precision: float) -> None:
        self.precision = precision
        self.evaluations = 0

    def epsilon(self, noise: float, rate: float) -> float:
        self.evaluations += 1
        accountant = RDPAccountant()
        accountant.history = [(noise, rate, STEPS)]
        return accountant.get_epsilon(DELTA)

    def _bisected(self, low: float, high: float, too_high: Callable[[float], bool]) -> tuple[float, float]:
        while low / high < 1 - self.precision:
            middle = (low + high) / 2
            low, high = (low, middle) if too_high(middle) else (middle, high)
        return low, high

    def _enough_noise(self, level: float) -> float:
        noise = 20.0
        while self.epsilon(noise, RATE) > level:
            noise *= 2
        return noise

    def scale(self, levels: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """(groups,) noise multipliers: doubled from 20 until they meet the budget, then bisected from above."""
        found = []
        for level in levels:
            enough = self._enough_noise(level)
            found.append(self._bisected(0.0, enough, lambda noise, e=level: self.epsilon(noise, RATE) < e)[1])
        return np.array(found)

    def sample(self, levels: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """(groups,) rates: the shared noise bisected in [0.001, enough for everyone], each rate inside of that.

        As published: a sweep over the groups ends as soon as its rates' mean is too high; a group whose rate is not
        within bounds keeps the one it had, at first 0.1.
        """
        rates = np.full(len(levels), self.LARGEST_RATE)

        def mean_is_too_high(noise: float) -> bool:
            mean = 0.0
            for group, level in enumerate(levels):
                rate = self._rate(level, noise)
                if rate is None:
                    continue
                rates[group] = rate
                mean += rate * shares[group]
                if mean > RATE:
                    break
            return bool(rates @ shares > RATE)

        self._bisected(1e-3, max(self._enough_noise(level) for level in levels), mean_is_too_high)
        return rates

    def _rate(self, level: float, noise: float) -> float | None:
        if self.epsilon(noise, self.SMALLEST_RATE) > level or self.epsilon(noise, self.LARGEST_RATE) < level:
            return None
        too_high = lambda rate: self.epsilon(noise, rate) >= level  # noqa: E731
        return self._bisected(self.SMALLEST_RATE, self.LARGEST_RATE, too_high)[0]


@dataclass
class Row:
    """One case: medians of seconds, and of paired ratios."""

    levels: int
    strategy: str
    precision: float
    rounds: int
    evaluations: int
    peer_s: float
    rdp_s: float
    pld_s: float
    rdp_ratio: float
    pld_ratio: float


def timed(run: Callable[[], object]) -> float:
    for cached in (pld._one, pld._composed, rdp._terms):
        cached.cache_clear()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measured(groups: int, strategy: str, precision: float, rounds: int) -> Row:
    levels = np.linspace(1, 3, groups)
    shares = np.array([0.34, 0.43, 0.23]) if groups == 3 else np.full(groups, 1 / groups)
    budgets = epsilons.Budgets(np.repeat(levels, np.round(shares * RECORDS).astype(int)), DELTA)
    recipe = epsilons.Recipe(STEPS, RATE * len(budgets), 1.0)
    taken: dict[str, list[float]] = {"peer": [], "rdp": [], "pld": []}
    peer = Peer(precision)
    for _ in range(rounds):
        peer.evaluations = 0
        taken["peer"].append(timed(lambda: getattr(peer, strategy)(levels, shares)))
        for accountant in ("rdp", "pld"):
            ours = functools.partial(epsilons.plan, budgets, recipe, strategy, accountant)
            taken[accountant].append(statistics.median(timed(ours) for _ in range(OURS_PER_ROUND)))
    median = {name: statistics.median(values) for name, values in taken.items()}
    ratio = {
        name: statistics.median(p / o for p, o in zip(taken["peer"], taken[name], strict=True))
        for name in ("rdp", "pld")
    }
    return Row(groups, strategy, precision, rounds, peer.evaluations, *median.values(), ratio["rdp"], ratio["pld"])


def single_level() -> dict[str, float]:
    """One level: get_noise_multiplier of Opacus, beside a `uniform` plan."""
    budgets, recipe = epsilons.Budgets([1.0] * 100, DELTA), epsilons.Recipe(STEPS, 100 * RATE, 1.0)
    pairs = []
    for _ in range(5):
        theirs = timed(
            lambda: get_noise_multiplier(
                target_epsilon=1.0, target_delta=DELTA, sample_rate=RATE, steps=STEPS, accountant="rdp"
            )
        )
        pairs.append((theirs, timed(lambda: epsilons.plan(budgets, recipe, "uniform", "rdp"))))
    theirs, ours = zip(*pairs, strict=True)
    ratio = statistics.median(t / o for t, o in pairs)
    return {"opacus_s": statistics.median(theirs), "rdp_s": statistics.median(ours), "ratio": ratio}


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return f"{name}, {threads} thread(s) of {os.cpu_count()} cores, Python {platform.python_version()}"


def as_page(rows: list[Row], single: dict[str, float], where: str) -> str:
    table = [
        f"| {r.levels} | {r.strategy} | {r.precision:g} | {r.rounds} | {r.evaluations:,} | {r.peer_s:.2f} | "
        f"{r.rdp_s:.4f} | {r.pld_s:.3f} | {r.rdp_ratio:,.0f} | {r.pld_ratio:,.1f} |"
        for r in rows
    ]
    return "\n".join(
        [
            where,
            "",
            f"CIFAR-10's setting: {RECORDS:,} records, batch {BATCH:,}, {STEPS:,} steps, delta {DELTA:g}; levels from "
            "1 to 3. Peer: the published search on Opacus' RDP accountant, run once where it takes long (rounds). "
            "Ours: whole plans, verified, three runs per round; `python benchmarks/planning.py` repeats it.",
            "",
            "| levels | strategy | peer's precision | rounds | peer's evaluations | peer, s | rdp, s | pld, s | "
            "peer / rdp | peer / pld |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *table,
            "",
            f"One level, Opacus' get_noise_multiplier (tolerance 0.01): {single['opacus_s']:.3f} s; uniform, rdp: "
            f"{single['rdp_s']:.4f} s; ratio {single['ratio']:,.1f}.",
            "",
        ]
    )


def draw(rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    for axes, strategy in zip(figure.subplots(1, 2, sharey=True), ("sample", "scale"), strict=True):
        shown: list[Any] = sorted(
            (r for r in rows if r.strategy == strategy and r.precision == 0.001), key=lambda r: r.levels
        )
        for name, label in (("peer_s", "published search, RDP"), ("pld_s", "here, PLD"), ("rdp_s", "here, RDP")):
            axes.loglog([r.levels for r in shown], [getattr(r, name) for r in shown], "o-", label=label)
        axes.set(title=strategy, xlabel="levels")
    figure.axes[0].set_ylabel("seconds to plan")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


def many_budgets(count: int, records: int = 1_000_000) -> None:
    budgets = epsilons.Budgets(np.linspace(1.0, 3.0, count)[np.arange(records) % count], 9e-7)
    for strategy in ("scale", "sample", "mix"):
        begin = time.process_time()
        epsilons.plan(budgets, epsilons.Recipe(steps=1000, batch_size=1024, clip_norm=1.0), strategy)
        print(f"{strategy}: {time.process_time() - begin:.1f} s of one processor", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three levels only")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--budgets", type=int, help="only print the times of PLD for so many distinct budgets")
    asked = parser.parse_args()
    if asked.budgets:
        many_budgets(asked.budgets)
        return
    warnings.simplefilter("ignore")
    rows = []
    for groups, precision, rounds in CASES:
        if asked.quick and groups > 3:
            continue
        for strategy in ("scale", "sample"):
            rows.append(measured(groups, strategy, precision, rounds))
            print(rows[-1], flush=True)
    single = single_level()
    where = machine()
    page = as_page(rows, single, where)
    print(page)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    values = {"machine": where, "rows": [asdict(r) for r in rows], "single_level": single}
    asked.out.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    asked.out.with_suffix(".md").write_text(page, encoding="utf-8")
    draw(rows, asked.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
