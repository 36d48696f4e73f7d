"""How long one step of an engine takes beside plain SGD, interleaved in one process, medians of paired ratios.

    python benchmarks/step.py --models mnist cifar --rounds 7 --threads 1 --out benchmarks/results/step.json
    python benchmarks/step.py --models mnist --engines plain{c} ghost{c} opacus-hooks{c} opacus-ew-own-cl@64
    python benchmarks/step.py --memory cifar:ghost@32        # peak memory of one engine, in a process of its own
    python benchmarks/step.py --growth --models mnist lstm   # batch and width 1, 2 and 4 times as large
    python benchmarks/step.py --plot benchmarks/results      # step.png and growth.png from the results kept there

Engines are named kind[-own][-cl][@records]: plain, ghost, vmap, opacus-hooks, -functorch, -ew, -ghost; own: Opacus with
a clip norm per record, by subclasses (ours always has one); cl: channels_last; @: records in a physical batch.
Every private step clips, adds noise to every parameter and updates; plain ones update. The allocator keeps its memory
(mallopt) for all, so that page faults are in no measurement. With one thread, seconds are the processor's: others
on the machine do not lengthen them, though they share its caches; with more, they are the clock's.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
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
#: {c} is replaced by @ and the model's physical batch.
DEFAULT = ["plain{c}", "ghost{c}"]
PICTURES = ["plain-cl{c}", "ghost-cl{c}"]

Step = Callable[[], None]


def tune_allocator() -> bool:
    """glibc: large tensors stay with the process (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)."""
    try:
        libc = ctypes.CDLL(None)
        return bool(libc.mallopt(-3, 1 << 30)) and bool(libc.mallopt(-1, 2**31 - 1))
    except (OSError, AttributeError):
        return False


def split(x: Tensor, y: Tensor, physical_batch: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(physical_batch), y.split(physical_batch), strict=True))


def build(task: Task, name: str, wider: int = 1) -> Step:
    """One step of this engine on this task, ready to be called again and again."""
    base, _, size = name.partition("@")
    is_last = base.endswith("-cl")
    kind = base.removesuffix("-cl")
    physical_batch = int(size) if size else task.records
    torch.manual_seed(0)
    model = task.model(kind.startswith("opacus"), wider)
    x, y = task.batch(task.records)
    if is_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    parts = split(x, y, physical_batch)
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


def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def ours(model: nn.Module, parts: list[tuple[Tensor, Tensor]], records: int, which: str) -> Step:
    from epsilons.clipping import engine

    parameters = list(model.parameters())
    made = engine(which)
    made.attach(model, parameters)
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    bounds = {len(y): CLIP_NORM * torch.linspace(0.5, 1.5, len(y), dtype=torch.float64) for _, y in parts}
    weights = {n: torch.ones(n, dtype=torch.float64) for n in bounds}

    def clipped(x: Tensor, y: Tensor) -> list[Tensor]:
        made.begin(len(y))
        return made.clipped_sum(losses_of(model, (x, y)), bounds[len(y)], weights[len(y)])

    def step() -> None:
        total: list[Tensor] = []
        for x, y in parts:
            found = clipped(x, y)
            total = found if not total else [t.add_(f) for t, f in zip(total, found, strict=True)]
        for p, t in zip(parameters, total, strict=True):
            p.grad = t.to(p.dtype).add_(torch.normal(0.0, NOISE * CLIP_NORM, p.shape)).div_(records)
        optimizer.step()
        optimizer.zero_grad()

    return step


def per_record(model: nn.Module, optimizer: torch.optim.Optimizer, mode: str) -> None:
    """A clip norm per record in Opacus: its formulas broadcast, or read off one method."""
    if mode == "ghost":

        class Clipped(type(model)):  # type: ignore[misc]
            def get_clipping_coef(self) -> Tensor:
                norm = self.get_norm_sample()
                return (CLIP_NORM * torch.linspace(0.5, 1.5, len(norm)) / (norm + 1e-6)).clamp(max=1.0)

        model.__class__ = Clipped
        return

    class Optimizer(type(optimizer)):  # type: ignore[misc]
        def clip_and_accumulate(self) -> None:
            scalar = self.max_grad_norm
            self.max_grad_norm = scalar * torch.linspace(0.5, 1.5, len(self.grad_samples[0]))
            try:
                super().clip_and_accumulate()
            finally:
                self.max_grad_norm = scalar  # the noise is scaled by it

    optimizer.__class__ = Optimizer


def opacus(model: nn.Module, parts: list[tuple[Tensor, Tensor]], records: int, mode: str) -> Step:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    mode, is_own = mode.removesuffix("-own"), mode.endswith("-own")
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
    if is_own:
        per_record(model, optimizer, mode)

    def step() -> None:
        for number, (x, y) in enumerate(parts):
            if len(parts) > 1:
                optimizer.signal_skip_step(do_skip=number < len(parts) - 1)
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    return step


def measure(task: Task, names: list[str], rounds: int, wider: int = 1) -> dict[str, list[float]]:
    """{engine: seconds per step, a value per round}; those that cannot run are left out and said."""
    steps: dict[str, Step] = {}
    for name in names:
        try:
            step = build(task, name, wider)
            step()
            step()
            steps[name] = step
        except Exception as e:  # peers fail in many ways; that is a result, too
            print(f"  {name}: {type(e).__name__}: {str(e)[:100]}", flush=True)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = clock()
            step()
            found[name].append(clock() - start)
    return found


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def growth(task: Task, rounds: int) -> dict[str, dict[str, list[float]]]:
    """{"batch 2": {engine: seconds}}: one size at a time, 1, 2 and 4 times as large."""
    names, found = [f"plain@{task.physical_batch}", f"ghost@{task.physical_batch}"], {}
    for times in (1, 2, 4):
        found[f"batch {times}"] = measure(dataclasses.replace(task, records=times * task.records), names, rounds)
        found[f"width {times}"] = measure(task, names, rounds, wider=times)
        print({key: round(1e3 * statistics.median(v)) for key, v in found[f"batch {times}"].items()}, "batch", times)
        print({key: round(1e3 * statistics.median(v)) for key, v in found[f"width {times}"].items()}, "width", times)
    return found


def plot(folder: Path) -> None:
    """What each engine costs over plain steps, and how cost grows, from the results kept in this folder."""
    from matplotlib import pyplot

    steps = json.loads((folder / "step.json").read_text())["seconds"]
    grown = json.loads((folder / "growth.json").read_text())["growth"]
    figure, axes = pyplot.subplots(1, len(steps), figsize=(3.2 * len(steps), 4.8), layout="constrained")
    for axis, (model, found) in zip(axes, steps.items(), strict=True):
        twins = {n: n.replace(n.partition("@")[0].removesuffix("-cl"), "plain", 1) for n in found}
        bars = {n: ratio(found[n], found[t]) for n, t in twins.items() if t in found and not n.startswith("plain")}
        axis.barh(list(bars), list(bars.values()), color=["C0" if n.startswith("ghost") else "C7" for n in bars])
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(title=model, xlabel="× plain SGD, same physical batches")
        axis.invert_yaxis()
    figure.savefig(folder / "step.png", dpi=110)
    figure, axes = pyplot.subplots(2, len(grown), figsize=(3.2 * len(grown), 5.6), layout="constrained", squeeze=False)
    for column, (model, found) in zip(axes.T, grown.items(), strict=True):
        for axis, what in zip(column, ("batch", "width"), strict=True):
            for kind in ("plain", "ghost"):
                sizes = [int(key.split()[1]) for key in found if key.startswith(what)]
                seconds = [next(v for n, v in found[f"{what} {s}"].items() if n.startswith(kind)) for s in sizes]
                axis.plot(sizes, [1e3 * statistics.median(s) for s in seconds], "o-", label=kind)
            axis.set(title=model, xlabel=f"{what}, times the usual", ylabel="ms a step", xlim=(0, None), ylim=(0, None))
            axis.set_xticks(sizes)
            axis.legend()
    figure.savefig(folder / "growth.png", dpi=110)


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the paired ratios."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def names_of(task: Task, given: list[str] | None) -> list[str]:
    names = given or [*DEFAULT, *(PICTURES if task.is_image else [])]
    return [name.format(c=f"@{task.physical_batch}") for name in names]


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
    rows = [
        "| model | engine | ms | / plain, same physical batches and layout | / plain as is |",
        "|---|---|---|---|---|",
    ]
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
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FOLDER")
    parser.add_argument("--note", default="", help="kept with the results: what else ran on the machine")
    given = parser.parse_args()
    if given.plot:
        plot(given.plot)
        return
    torch.set_num_threads(given.threads)
    if given.memory:
        print(f"{given.memory}: {peak_memory(given.memory):.0f} MB above the model")
        return
    is_tuned = tune_allocator()
    before = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}  # of other models
    commands = [*before.get("command", []), " ".join(sys.argv)]
    kept = {"machine": machine(), "note": given.note, "allocator_tuned": is_tuned, "command": commands}
    if given.growth:
        models = [model for model in given.models if model != "head"]  # which has one width
        kept["growth"] = {model: growth(TASKS[model], given.rounds) for model in models}
        if given.out:
            given.out.write_text(json.dumps(kept, indent=1) + "\n")
        return
    results = before.get("seconds", {})
    for model in given.models:
        print(model, flush=True)
        results[model] = measure(TASKS[model], names_of(TASKS[model], given.engines), given.rounds)
        print(table({model: results[model]}), flush=True)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps({**kept, "seconds": results}, indent=1) + "\n")
        given.out.with_suffix(".md").write_text(f"{machine()}. {given.note}\n\n{table(results)}\n")


if __name__ == "__main__":
    main()
