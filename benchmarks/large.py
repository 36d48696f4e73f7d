"""What a step costs as a model or its batches grow: seconds, a parameter's nanoseconds, memory, and growth exponents.

    python benchmarks/large.py [parameters | frozen | batch | sequence | vocabulary | ranks …] [--rounds 7] [--folder]

Each row is a process of its own, with one thread. It trains one model by plain SGD, by a loop of ours and by Opacus
(ghost clipping, and hooks where that is not possible), interleaved: a round makes one update of each. Times are medians
of processor seconds, ratios are medians of paired ratios. Memory is the peak of a process that trains by ours alone,
over what it held before the model, in multiples of the model. The exponent of growth is the slope of log(seconds) over
log(size) from all rows: 1 is linear.

    parameters   four square layers with 1e6 to 1e8 numbers, 16 records
    frozen       adapters of rank 8 beside 1e6 to 1e8 frozen numbers, 64 records
    batch        a transformer block of width 256, 64 steps, 16 to 256 records
    sequence     the same with 32 records of 32 to 256 steps
    vocabulary   a trained embedding of 1e3 to 1e5 tokens, width 64, 64 records of 32 tokens
    ranks        two and four processes with the layers of 1e7 numbers; seconds by the clock, of all cores
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = {
    "parameters": [1e6, 1e7, 5e7, 1e8],
    "frozen": [1e6, 1e7, 1e8],
    "batch": [16, 64, 256],
    "sequence": [32, 64, 128, 256],
    "vocabulary": [1e3, 1e4, 1e5],
    "ranks": [1, 2, 4],
}
#: Updates before the first that is measured: steps 0, 1 and 10 are checked.
BEFORE = 12

Update = Callable[[], None]


class Adapted(nn.Module):
    """A frozen table and a frozen layer with an adapter."""

    def __init__(self, frozen: int, width: int = 64, rank: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(frozen // width, width).requires_grad_(False)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        made: Tensor = self.head(torch.relu(self.frozen(x) + self.up(self.down(x))).mean(1))
        return made


class Pooled(nn.Module):
    """The same operators around layers of sequences."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.body(x).mean(1))
        return made


def task(what: str, size: int) -> tuple[nn.Module, Tensor, int]:
    """(model, the records' inputs, records of a draw)."""
    torch.manual_seed(0)
    if what in ("parameters", "ranks"):
        width = int(math.sqrt((size if what == "parameters" else 1e7) / 4))
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(width, 2)), torch.randn(1_000, width), 16
    if what == "frozen":
        return Adapted(size), torch.randint(size // 64, (2_000, 32)), 64
    if what == "vocabulary":
        return Pooled(nn.Embedding(size, 64), 64), torch.randint(size, (2_000, 32)), 64
    block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    records, steps = (size, 64) if what == "batch" else (32, size)
    return Pooled(block, 256), torch.randn(8 * records, steps, 256), records


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def plain(what: str, size: int) -> Update:
    model, inputs, records = task(what, size)
    targets = torch.randint(2, (len(inputs),))
    optimizer = torch.optim.SGD(trained(model), lr=1e-3)

    def update() -> None:
        rows = torch.randint(len(inputs), (records,))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()

    return update


def ours(what: str, size: int, folder: str | None) -> Update:
    import epsilons

    model, inputs, records = task(what, size)
    targets = torch.randint(2, (len(inputs),))
    optimizer = torch.optim.SGD(trained(model), lr=1e-3)
    budgets = epsilons.Budgets([1.0, 3.0] * (len(inputs) // 2), delta=1e-5)
    plan = epsilons.plan(budgets, epsilons.Recipe(1000, records, 1.0), accountant="rdp")
    performance = epsilons.Performance(max_physical_batch=2 * records)  # a draw is one batch, as in the others
    private = epsilons.make_private(
        model, optimizer, (inputs, targets), plan, budgets=budgets, run_dir=folder, performance=performance
    )
    batches: Iterator[Any] = iter(private.batches)

    def update() -> None:
        while True:
            x, y = next(batches)
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            if private.step():
                return

    return update


def opacus(what: str, size: int) -> Update:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    model, inputs, records = task(what, size)
    data = TensorDataset(inputs, torch.randint(2, (len(inputs),)))
    optimizer: Any = torch.optim.SGD(trained(model), lr=1e-3)
    has_attention = any(isinstance(m, nn.MultiheadAttention) for m in model.modules())
    named = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "data_loader": DataLoader(data, batch_size=records)}
    if has_attention:
        from opacus.validators import ModuleValidator

        model = ModuleValidator.fix(model)
        optimizer = torch.optim.SGD(trained(model), lr=1e-3)
        model, optimizer, loader = PrivacyEngine().make_private(module=model, optimizer=optimizer, **named)
        criterion: Any = nn.CrossEntropyLoss()
    else:
        model, optimizer, criterion, loader = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, criterion=nn.CrossEntropyLoss(), grad_sample_mode="ghost", **named
        )

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    batches = endless()

    def update() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return update


def seconds(update: Update) -> float:
    begin = time.process_time()
    update()
    return time.process_time() - begin


def measure(what: str, size: int, rounds: int, folder: bool) -> dict[str, float]:
    """Times of one row, in this process."""
    with tempfile.TemporaryDirectory() as place:
        sides = {"plain": plain(what, size), "ours": ours(what, size, f"{place}/run" if folder else None)}
        try:
            sides["opacus"] = opacus(what, size)
        except Exception as error:
            print(f"opacus: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
        for update in sides.values():
            for _ in range(BEFORE):
                update()
        times = {name: [] for name in sides} | dict[str, list[float]]()
        for _ in range(rounds):
            for name, update in sides.items():
                times[name].append(seconds(update))
    found = {name: statistics.median(own) for name, own in times.items()}
    ratios = {
        f"{name} / plain": statistics.median(a / b for a, b in zip(own, times["plain"], strict=True))
        for name, own in times.items()
    }
    numbers = sum(p.numel() for p in trained(task(what, size)[0]))
    return found | ratios | {"trained": numbers}


def resident() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


def memory(what: str, size: int, folder: bool) -> dict[str, float]:
    """The peak of ours over what the process held before, as a multiple of the model's size; in this process."""
    import epsilons  # noqa: F401  # what is imported is not counted

    before = resident()
    with tempfile.TemporaryDirectory() as place:
        update = ours(what, size, f"{place}/run" if folder else None)
        for _ in range(BEFORE):
            update()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"memory": (peak - before) / sum(4 * p.numel() for p in task(what, size)[0].parameters())}


def rank(size: int, rounds: int) -> dict[str, float]:
    """One of the processes that torchrun started: seconds by the clock."""
    import torch.distributed as dist

    if size > 1:
        dist.init_process_group("gloo")
    update = ours("ranks", size, None)
    for _ in range(BEFORE):
        update()
    begin = time.perf_counter()
    for _ in range(rounds):
        update()
    return {"seconds": (time.perf_counter() - begin) / rounds}


def in_process(*words: str, ranks: int = 1) -> dict[str, float]:
    """What this program prints in another process, as the last line."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    made = subprocess.run(
        [sys.executable, *launcher, __file__, "--row", *words], capture_output=True, text=True, check=False
    )
    lines = [line for line in made.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"failed": 1.0} | dict.fromkeys([made.stderr.strip().splitlines()[-1][:120]], 1.0)
    found: dict[str, float] = json.loads(lines[0])
    return found


def exponent(sizes: list[float], times: list[float]) -> float:
    """The slope of log(time) over log(size), by least squares."""
    x, y = [math.log(s) for s in sizes], [math.log(t) for t in times]
    middle_x, middle_y = statistics.mean(x), statistics.mean(y)
    across = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return across / sum((a - middle_x) ** 2 for a in x)


def table(what: str, rounds: int, folder: bool, most: float) -> None:
    flags = ["--rounds", str(rounds), *(["--folder"] if folder else [])]
    sizes = [size for size in SIZES[what] if size <= most]
    if what == "ranks":
        print("| ranks | seconds an update, by the clock |\n|---|---|")
        for size in sizes:
            found = in_process(what, str(int(size)), *flags, ranks=int(size))
            print(f"| {int(size)} | {found.get('seconds', math.nan):.3f} |", flush=True)
        return
    print(f"| {what} | plain, ms | ours, ms | ours / plain | Opacus / plain | ns a trained number | memory / model |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for size in sizes:
        row = in_process(what, str(int(size)), *flags)
        if "failed" in row:
            print(f"| {size:g} | {' '.join(row)} |", flush=True)
            continue
        row |= in_process(what, str(int(size)), *flags, "--memory")
        rows.append(row | {"size": size})
        print(
            f"| {size:g} | {1e3 * row['plain']:.1f} | {1e3 * row['ours']:.1f} | {row['ours / plain']:.2f} | "
            f"{row.get('opacus / plain', math.nan):.2f} | {1e9 * row['ours'] / row['trained']:.1f} | "
            f"{row.get('memory', math.nan):.1f} |",
            flush=True,
        )
    if len(rows) > 1:
        grown = {s: exponent([r["size"] for r in rows], [r[s] for r in rows]) for s in ("plain", "ours")}
        print(f"growth exponents: plain {grown['plain']:.2f}, ours {grown['ours']:.2f}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help=", ".join(SIZES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", action="store_true", help="with a run's folder")
    parser.add_argument("--most", type=float, default=math.inf, help="leave out larger sizes")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not asked.row:
        for what in asked.what or SIZES:
            table(what, asked.rounds, asked.folder, asked.most)
        return
    what, size = asked.what[0], int(asked.what[1])
    if what == "ranks":
        found = rank(size, asked.rounds)
        if os.environ.get("RANK", "0") == "0":  # lines of several processes may mix
            print(json.dumps(found), flush=True)
    else:
        print(
            json.dumps(
                memory(what, size, asked.folder) if asked.memory else measure(what, size, asked.rounds, asked.folder)
            )
        )


if __name__ == "__main__":
    main()
