"""The whole step (draw, read, forward, clip, noise, sum, update) of each library, by its public interface.

    python benchmarks/whole_step.py --rounds 9 --threads 1 --out benchmarks/results/whole_step.json
    python benchmarks/whole_step.py --memory --out …             # peak memory of each side, in a process of its own
    python benchmarks/whole_step.py --device cuda                # absolute times on a GPU
    python benchmarks/whole_step.py --plot benchmarks/results    # the picture of the docs from the results kept there

Out of the box, nothing is set: ours is make_private with its defaults, Opacus is PrivacyEngine().make_private with each
of its modes, and plain is SGD on the whole batch. glibc is as it is. Tuned, physical batches, memory layout and
allocator are set on both sides; Opacus' physical batches come from its BatchMemoryManager. Steps of all sides are
interleaved in one process for each table, and ratios are medians of paired ratios. Ours has three groups with a clip
norm each, Opacus one clip norm. Draws are Poisson draws in both; plain takes a fixed number of random records. Numbers
drawn differ by chance, so a step's seconds are multiplied by expected / drawn.

With one thread, seconds are the processor's; with more, and on a GPU, they are the clock's.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models import TASKS, Task
from step import machine, ratio, tune_allocator
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons

MODES = ["hooks", "functorch", "ew", "ghost"]
BOX = ["plain", "ours", *(f"opacus-{mode}" for mode in MODES)]
TUNED = ["plain-tuned", "ours-tuned", *(f"opacus-{mode}-tuned" for mode in MODES)]
#: Modes that take more than a few minutes for one step at these sizes, or more memory than a laptop has.
LEFT_OUT = {("imdb", "functorch"), ("imdb", "ew"), ("imdb", "hooks"), ("lstm", "functorch"), ("lstm", "ew")}
CLIP_NORM, NOISE, RATE, PEOPLE, STEPS = 1.0, 1.0, 0.05, 20_000, 10_000

Step = Callable[[], int]  # the number of records drawn
Data = tuple[Tensor, Tensor]


def steps_of(name: str, task: Task, data: Data, device: torch.device) -> Step:
    """One whole step of this side, ready to be called again and again."""
    torch.manual_seed(0)
    kind, is_tuned = name.removesuffix("-tuned"), name.endswith("-tuned")
    model = task.model(kind.startswith("opacus"), 1).to(device)
    if is_tuned and task.is_image:
        model = model.to(memory_format=torch.channels_last)
    largest = task.physical_batch if is_tuned else None
    if kind == "plain":
        return plain(model, data, task.records, largest or task.records, task.is_image and is_tuned)
    if kind == "ours":
        return ours(model, data, task.records, largest)
    return opacus(model, data, task.records, kind.removeprefix("opacus-"), largest)


def plain(model: nn.Module, data: Data, records: int, largest: int, is_last: bool) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x, y = data

    def step() -> int:
        for part in torch.randint(len(y), (records,), device=y.device).split(largest):
            inputs = x[part]
            if is_last and inputs.ndim == 4:
                inputs = inputs.to(memory_format=torch.channels_last)
            (F.cross_entropy(model(inputs), y[part], reduction="sum") / records).backward()
        optimizer.step()
        optimizer.zero_grad()
        return records

    return step


def ours(model: nn.Module, data: Data, records: int, largest: int | None) -> Step:
    budgets = epsilons.Budgets.from_shares({1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, records=PEOPLE, delta=1e-5, seed=0)
    recipe = epsilons.Recipe(steps=STEPS, batch_size=records, clip_norm=CLIP_NORM)
    plan = epsilons.plan(budgets, recipe, strategy="scale", accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    performance = epsilons.Performance() if largest is None else epsilons.Performance(max_physical_batch=largest)
    private = epsilons.make_private(model, optimizer, data, plan, budgets=budgets, performance=performance)
    batches = private.batches

    def step() -> int:
        drawn = 0
        for x, y in batches:
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            drawn += len(y)
            if private.step():
                break
        return drawn

    return step


def opacus(model: nn.Module, data: Data, records: int, mode: str, largest: int | None) -> Step:
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from torch.utils.data import DataLoader, TensorDataset

    warnings.filterwarnings("ignore")  # about hooks, and that secure_mode is off
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    criterion: nn.Module = nn.CrossEntropyLoss(reduction="mean")
    made = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, criterion=criterion, noise_multiplier=NOISE, max_grad_norm=CLIP_NORM,
        data_loader=DataLoader(TensorDataset(*data), batch_size=records), grad_sample_mode=mode,
    )  # fmt: skip
    if mode == "ghost":
        model, optimizer, criterion, loader = made
    else:
        model, optimizer, loader = made
    model.train()

    def all_batches() -> Iterator[Data]:
        while True:
            if largest is None:
                yield from loader
            else:
                with BatchMemoryManager(
                    data_loader=loader, max_physical_batch_size=largest, optimizer=optimizer
                ) as parts:
                    yield from parts

    batches = all_batches()

    def step() -> int:
        drawn = 0
        for x, y in batches:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            is_last = not optimizer._step_skip_queue or not optimizer._step_skip_queue[0]
            optimizer.step()
            drawn += len(y)
            if is_last:
                break
        return drawn

    return step


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def measure(model: str, names: list[str], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """{side: seconds per step, a value per round}; sides that cannot run are left out, with the reason printed."""
    task = TASKS[model]
    torch.manual_seed(1)
    x, y = task.batch(PEOPLE)
    data, steps = (x.to(device), y.to(device)), {}
    for name in names:
        if is_left_out(model, name):
            continue
        try:
            step = steps_of(name, task, data, device)
            step(), step()  # the second step is checked as the first
            steps[name] = step
        except Exception as e:  # peers fail in many ways; that is a result, too
            print(f"  {name}: {type(e).__name__}: {str(e)[:100]}", flush=True)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = clock(device)
            drawn = step()
            found[name].append((clock(device) - start) * task.records / max(drawn, 1))
    return found


def is_left_out(model: str, name: str) -> bool:
    return (model, name.removeprefix("opacus-").removesuffix("-tuned")) in LEFT_OUT


def peak_memory(model: str, name: str, device: torch.device) -> float:
    """MB above what the process holds with the data, in three steps; of the GPU, all that is held."""
    task = TASKS[model]
    torch.manual_seed(1)
    x, y = task.batch(PEOPLE)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = steps_of(name, task, (x.to(device), y.to(device)), device)
    for _ in range(3):
        step()
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated()) / 2**20
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def best(found: dict[str, list[float]], suffix: str) -> str | None:
    """Opacus' fastest mode."""
    modes = [name for name in found if name.startswith("opacus") and name.endswith("-tuned") == bool(suffix)]
    return min(modes, key=lambda name: statistics.median(found[name]), default=None)


def table(results: dict[str, dict[str, list[float]]], memory: dict[str, dict[str, float]]) -> str:
    rows = ["| model | | plain ms | ours ms | ours / plain | Opacus' best mode | Opacus / ours | MB: ours, Opacus |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for model, found in results.items():
        for suffix, words in (("", "as it is"), ("-tuned", "tuned")):
            ours, plain_, peer = found.get(f"ours{suffix}"), found.get(f"plain{suffix}"), best(found, suffix)
            if ours is None or plain_ is None:
                continue
            against = "" if peer is None else f"{ratio(found[peer], ours):.2f}"
            held = memory.get(model, {})
            sizes = f"{held[f'ours{suffix}']:.0f}, {held[peer]:.0f}" if peer in held else ""
            rows.append(
                f"| {model} | {words} | {1e3 * statistics.median(plain_):.1f} | {1e3 * statistics.median(ours):.1f} | "
                f"{ratio(ours, plain_):.2f} | {peer or ''} | {against} | {sizes} |"
            )
        if "ours" in found and "plain-tuned" in found:
            rows.append(f"| {model} | ours as it is / plain tuned | | | {_across(found):.2f} | | | |")
    return "\n".join(rows)


def _across(found: dict[str, list[float]]) -> float:
    """Ours with nothing set against tuned plain SGD; both were measured with the tuned allocator, interleaved."""
    name = "ours-allocator" if "ours-allocator" in found else "ours"
    return ratio(found[name], found["plain-tuned"])


def plot(folder: Path) -> None:
    """Milliseconds of a step with nothing set, from the results kept in this folder."""
    from matplotlib import pyplot

    kept = json.loads((folder / "whole_step.json").read_text())["seconds"]
    figure, axes = pyplot.subplots(2, -(-len(kept) // 2), figsize=(9.6, 4.4), layout="constrained", squeeze=False)
    for axis, (model, found) in zip(axes.flat, kept.items(), strict=False):
        names = [name for name in BOX if name in found]
        values = [1e3 * statistics.median(found[name]) for name in names]
        colors = ["C0" if name == "ours" else "C2" if name == "plain" else "C7" for name in names]
        axis.barh([name.removeprefix("opacus-") for name in names], values, color=colors)
        axis.set(title=model, xlabel="ms a step")
        axis.invert_yaxis()
    figure.savefig(Path(__file__).parents[1] / "docs" / "assets" / "whole_step.png", dpi=110)


def in_process(arguments: list[str]) -> str:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-500:], flush=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--sides", nargs="+", help="only these, in one process, as they are")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--allocator", action="store_true", help="with --sides: tune it")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    if given.plot:
        plot(given.plot)
        return
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    common = ["--threads", str(given.threads), "--device", given.device]
    if given.sides:
        if given.allocator:
            tune_allocator()
        (model,) = given.models
        if given.memory:
            print(json.dumps({name: peak_memory(model, name, device) for name in given.sides}))
        else:
            print(json.dumps(measure(model, given.sides, given.rounds, device)))
        return
    kept: dict[str, dict[str, dict[str, Any]]] = {"seconds": {}, "memory": {}}
    if given.out and given.out.exists():
        kept |= json.loads(given.out.read_text())
    for model in given.models:
        one = ["--models", model, "--rounds", str(given.rounds), *common]
        if given.memory:
            kept["memory"][model] = memory_of(one)
        else:
            kept["seconds"][model] = seconds_of(one)
        words = table({model: kept["seconds"].get(model, {})}, kept["memory"])
        print(json.dumps(kept["memory"][model]) if given.memory else words, flush=True)
        if given.out:
            about = {"machine": machine(), "command": [*kept.get("command", []), " ".join(sys.argv)]}
            given.out.write_text(json.dumps(kept | about, indent=1) + "\n")
            given.out.with_suffix(".md").write_text(f"{machine()}.\n\n{table(kept['seconds'], kept['memory'])}\n")


def seconds_of(one: list[str]) -> dict[str, list[float]]:
    """Of all sides of one model: out of the box in one process, tuned in another."""
    found = {}
    for sides, more in ((BOX, []), (["ours", *TUNED], ["--allocator"])):
        lines = in_process([*one, "--sides", *sides, *more]).splitlines()
        print("\n".join(lines[:-1]), end="\n" * (len(lines) > 1), flush=True)
        for name, seconds in json.loads(lines[-1] if lines else "{}").items():
            found["ours-allocator" if more and name == "ours" else name] = seconds
    return found


def memory_of(one: list[str]) -> dict[str, float]:
    """Of all sides of one model, each in a process of its own."""
    found: dict[str, float] = {}
    for name in (name for name in (*BOX, *TUNED) if not is_left_out(one[1], name)):
        lines = in_process([*one, "--memory", "--sides", name]).splitlines()
        found |= json.loads(lines[-1] if lines else "{}")
    return found


if __name__ == "__main__":
    main()
