"""What a round of federated training costs at a site, over local training: one draw of each, in turn.

    python benchmarks/federated.py [--draws 10]

Local training is a loop of our own in a run folder that stays open. A site that stays open adds, per round: two lines
of the ledger and a checkpoint on disk, and copies of the weights. A site that is opened for every round, as Flower's
processes are, also checks its inputs, hashes its data and follows a first batch through the operators. Seconds of the
clock on one thread, medians over rounds; the ratio is the median of ratios of neighbours. Flower itself is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from models import TASKS
from step import CLIP_NORM, RATE, machine
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from epsilons.flower import Site

STEPS = 100_000


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return TASKS["mnist"].model(False, 1)


def table_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 2))


def images(records: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    return torch.randn(records, 1, 28, 28, generator=made), torch.randint(10, (records,), generator=made)


def rows(records: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    return torch.randn(records, 100, generator=made), torch.randint(2, (records,), generator=made)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "CNN of 26,010 parameters, images": (cnn, images),
    "MLP of 6,594 parameters, a table": (table_model, rows),
}


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def a_site(folder: Path, kind: str, records: int, batch: int, draws: int) -> Site:
    budgets = epsilons.Budgets([8.0] * records, delta=1e-6)
    plan = epsilons.plan(budgets, epsilons.Recipe(STEPS, batch, CLIP_NORM), accountant="rdp")
    model, data = KINDS[kind]
    optimizer = partial(torch.optim.SGD, lr=RATE, momentum=0.9)
    return Site(folder, model, losses, optimizer, data(records), plan, budgets, draws=draws)


def local(site: Site) -> Callable[[], None]:
    """So many draws of a run of its own, as in a round."""
    private = site.run()
    loop = private.draws

    def draws() -> None:
        for draw in islice(loop, site.draws):
            for batch in draw:
                private.backward(losses(private.model, batch))
                private.step()

    return draws


def answering(site: Any, model: nn.Module) -> Callable[[], None]:
    """A round, each from the weights of the one before."""
    state = {"number": 0, "weights": {name: p.detach().numpy().copy() for name, p in model.named_parameters()}}

    def answer() -> None:
        state["number"] += 1
        state["weights"] = site.answer("run", state["number"], state["weights"]).weights

    return answer


def measured(kind: str, records: int, batch: int, draws: int, rounds: int, folder: Path) -> dict[str, Any]:
    made = [a_site(folder / name, kind, records, batch, draws) for name in ("local", "open", "opened each round")]
    names = [str(Path(str(site.run_dir)).name) for site in made]
    ways = [local(made[0]), answering(made[1].kept_open(), made[1].model()), answering(made[2], made[2].model())]
    seconds: list[list[float]] = [[] for _ in ways]
    warm = min(12, 110 // draws + 1)  # rounds before the first that is measured: checks are due at steps 0, 1, 10, 100
    for number in range(warm + rounds):
        for way, found in zip(ways, seconds, strict=True):
            start = time.perf_counter()
            way()
            if number >= warm:
                found.append((time.perf_counter() - start) / draws)
    median = {name: statistics.median(found) for name, found in zip(names, seconds, strict=True)}
    ratio = {
        name: statistics.median(a / b for a, b in zip(found, seconds[0], strict=True))
        for name, found in zip(names[1:], seconds[1:], strict=True)
    }
    return {"kind": kind, "records": records, "batch": batch, "draws": draws, "seconds": median, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="of the runs: what is durable depends on the disk")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    print("| model | draws per round | local, ms per draw | stays open | opened each round |\n|---|--:|--:|--:|--:|")
    for kind in KINDS:
        for draws in given.draws:
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                one = measured(kind, given.records, given.batch, draws, given.rounds, Path(folder))
            found.append(one)
            milliseconds, ratio = 1000 * one["seconds"]["local"], one["ratio"]
            print(
                f"| {kind} | {draws} | {milliseconds:.1f} | {ratio['open']:.3f} | {ratio['opened each round']:.2f} |",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps({"machine": machine(), "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
