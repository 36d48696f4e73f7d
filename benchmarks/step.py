"""How long one step takes: ours, plain SGD and Opacus, interleaved in one process, medians of paired ratios.

    python benchmarks/step.py --models mnist cifar --rounds 7 --threads 1 --out benchmarks/results/step.json
    python benchmarks/step.py --memory cifar:ghost@32        # peak memory of one engine, in a process of its own

Engines are named kind[-cl][@chunk]: plain, ghost, vmap, opacus-hooks, opacus-functorch, opacus-ew, opacus-ghost; cl:
channels_last; @: records computed at once. Every private step clips, adds noise to every parameter and updates; plain
ones update. The allocator keeps its memory (mallopt) for all, so that nobody is measured by page faults.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from models import TASKS, Task
from torch import Tensor, nn
from torch.nn import functional as F

CLIP_NORM, NOISE, RATE = 1.0, 1.0, 0.05
DEFAULT = ["plain", "plain{c}", "ghost{c}", "opacus-hooks{c}", "opacus-ghost{c}", "opacus-ew{c}", "opacus-functorch{c}"]
PICTURES = ["plain-cl{c}", "ghost-cl{c}", "opacus-hooks-cl{c}", "opacus-ew-cl{c}", "opacus-ghost-cl{c}"]

Step = Callable[[], None]


def tune_allocator() -> bool:
    """glibc: large tensors stay with the process (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)."""
    try:
        libc = ctypes.CDLL(None)
        return bool(libc.mallopt(-3, 1 << 30)) and bool(libc.mallopt(-1, 2**31 - 1))
    except (OSError, AttributeError):
        return False


def pieces(task: Task, x: Tensor, y: Tensor, chunk: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(chunk), y.split(chunk), strict=True))


def build(task: Task, name: str) -> Step:
    """One step of this engine on this task, ready to be called again and again."""
    base, _, size = name.partition("@")
    is_last = base.endswith("-cl")
    kind = base.removesuffix("-cl")
    chunk = int(size) if size else task.records
    torch.manual_seed(0)
    model = task.model(kind.startswith("opacus"))
    x, y = task.batch(task.records)
    if is_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    parts = pieces(task, x, y, chunk)
    if kind == "plain":
        return plain(model, parts, task.records)
    if kind.startswith("opacus"):
        return opacus(model, parts, task.records, kind.removeprefix("opacus-"))
    return ours(model, parts, task.records, kind)


def plain(model: nn.Module, parts: list[tuple[Tensor, Tensor]], records: int) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> None:
        for x, y in parts:
            (F.cross_entropy(model(x), y, reduction="sum") / records).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(model: nn.Module, parts: list[tuple[Tensor, Tensor]], records: int, which: str) -> Step:
    from epsilons.training.clipping import engine

    parameters = list(model.parameters())
    made = engine(which)
    made.attach(model, parameters)
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    bounds = {len(y): CLIP_NORM * torch.linspace(0.5, 1.5, len(y), dtype=torch.float64) for _, y in parts}
    weights = {n: torch.ones(n, dtype=torch.float64) for n in bounds}

    def step() -> None:
        total: list[Tensor] = []
        for x, y in parts:
            made.begin(len(y))
            losses = F.cross_entropy(model(x), y, reduction="none")
            found = made.clipped_sum(losses, bounds[len(y)], weights[len(y)])
            total = found if not total else [t.add_(f) for t, f in zip(total, found, strict=True)]
        for p, t in zip(parameters, total, strict=True):
            p.grad = t.to(p.dtype).add_(torch.normal(0.0, NOISE * CLIP_NORM, p.shape)).div_(records)
        optimizer.step()
        optimizer.zero_grad()

    return step


def opacus(model: nn.Module, parts: list[tuple[Tensor, Tensor]], records: int, mode: str) -> Step:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x0, y0 = parts[0]
    loader = DataLoader(TensorDataset(x0, y0), batch_size=len(y0))
    criterion: nn.Module = nn.CrossEntropyLoss(reduction="mean")
    made = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, criterion=criterion, data_loader=loader, noise_multiplier=NOISE,
        max_grad_norm=CLIP_NORM, poisson_sampling=False, grad_sample_mode=mode,
    )  # fmt: skip
    if mode == "ghost":
        model, optimizer, criterion, _ = made
    else:
        model, optimizer, _ = made
    optimizer.expected_batch_size = records
    model.train()

    def step() -> None:
        for number, (x, y) in enumerate(parts):
            if len(parts) > 1:
                optimizer.signal_skip_step(do_skip=number < len(parts) - 1)
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    return step


def measure(task: Task, names: list[str], rounds: int) -> dict[str, list[float]]:
    """{engine: seconds per step, a value per round}; those that cannot run are left out and said."""
    steps: dict[str, Step] = {}
    for name in names:
        try:
            step = build(task, name)
            step()
            step()
            steps[name] = step
        except Exception as e:  # peers fail in many ways; that is a result, too
            print(f"  {name}: {type(e).__name__}: {str(e)[:100]}", flush=True)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - start)
    return found


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the paired ratios."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def names_of(task: Task) -> list[str]:
    at = f"@{task.chunk}"
    names = [*DEFAULT, *(PICTURES if task.is_image else [])]
    return [name.format(c=at) for name in names]


def peak_memory(which: str) -> float:
    """MB above what the process holds once the model is built and warmed up on two records."""
    model, _, name = which.partition(":")
    task = TASKS[model]
    base = name.partition("@")[0]
    small = Task(task.model, task.batch, 2, 2, task.is_image)
    build(small, base)()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = build(task, name)
    step()
    step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def machine() -> str:
    found = subprocess.run(["lscpu"], capture_output=True, text=True).stdout
    lines = dict(line.split(":", 1) for line in found.splitlines() if ":" in line)
    cpu = lines.get("Model name", platform.processor()).strip()
    return f"{cpu}, {torch.get_num_threads()} thread(s), torch {torch.__version__}, Python {platform.python_version()}"


def table(results: dict[str, dict[str, list[float]]]) -> str:
    rows = ["| model | engine | ms | / plain, same chunks and layout | / plain as is |", "|---|---|---|---|---|"]
    for model, found in results.items():
        for name, seconds in found.items():
            base, _, size = name.partition("@")
            twin = ("plain-cl" if base.endswith("-cl") else "plain") + (f"@{size}" if size else "")
            against = f"{ratio(seconds, found[twin]):.2f}" if twin in found else ""
            as_is = f"{ratio(seconds, found['plain']):.2f}" if "plain" in found else ""
            rows.append(f"| {model} | {name} | {1e3 * statistics.median(seconds):.1f} | {against} | {as_is} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--engines", nargs="+")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", metavar="MODEL:ENGINE")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.memory:
        print(f"{given.memory}: {peak_memory(given.memory):.0f} MB above the model")
        return
    is_tuned = tune_allocator()
    results = {}
    for model in given.models:
        print(model, flush=True)
        results[model] = measure(TASKS[model], given.engines or names_of(TASKS[model]), given.rounds)
        print(table({model: results[model]}), flush=True)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        kept = {"machine": machine(), "allocator_tuned": is_tuned, "command": sys.argv, "seconds": results}
        given.out.write_text(json.dumps(kept, indent=1) + "\n")
        given.out.with_suffix(".md").write_text(f"{machine()}\n\n{table(results)}\n")


if __name__ == "__main__":
    main()
