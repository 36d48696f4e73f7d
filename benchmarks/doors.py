"""How long an update takes through each door, over a loop of our own and over the framework's own privacy.

    python benchmarks/doors.py --rounds 40 --out benchmarks/results/doors.json

All train the CNN of the MNIST benchmark on the same tensors, on one thread, interleaved in one process. A round makes
one update through each: draw, read, forward, backward, clip, noise, update. Updates whose physical batch is checked
(steps 0, 1, 10 and 100) are made before. The table has medians of processor seconds, and medians of paired ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import TASKS
from step import CLIP_NORM, NOISE, RATE, machine, ratio, tune_allocator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import epsilons

#: Updates before the first that is measured; none of those after it is checked, up to step 1000.
BEFORE = 102

Update = Callable[[], None]


def data(records: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    return torch.randn(records, 1, 28, 28, generator=made), torch.randint(10, (records,), generator=made)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = TASKS["mnist"].model(False, 1)
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def loader(records: int, batch: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data(records)), batch_size=batch, shuffle=True)


def updates(batches: Iterator[Any], step: Callable[[Any], bool]) -> Update:
    """One update: steps until one of them was an update."""

    def update() -> None:
        while not step(next(batches)):
            pass

    return update


def endless(batches: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def own(records: int, batch: int, by_record: bool = False) -> Update:
    """A loop of our own. by_record: on a map-style data set, as transformers has it, and not on tensors."""
    model, optimizer = model_and_optimizer()
    budgets = epsilons.Budgets([8.0] * records, delta=1e-6)
    plan = epsilons.plan(budgets, epsilons.Recipe(1000, batch, CLIP_NORM), accountant="rdp")
    largest = epsilons.Performance(max_physical_batch=records)  # as in the doors: a draw is one batch
    columns = data(records)
    given = list(zip(*columns, strict=True)) if by_record else columns
    private = epsilons.make_private(model, optimizer, given, plan, budgets=budgets, performance=largest)

    def step(pair: tuple[Tensor, Tensor]) -> bool:
        x, y = pair
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        return private.step()

    return updates(private.batches, step)


def opacus_door(records: int, batch: int) -> Update:
    """epsilons.opacus."""
    from epsilons.opacus import PrivacyEngine

    engine = PrivacyEngine(accountant="rdp")
    module, optimizer = model_and_optimizer()
    model, optimizer, given = engine.make_private(
        module=module, optimizer=optimizer, data_loader=loader(records, batch), noise_multiplier=NOISE,
        max_grad_norm=CLIP_NORM,
    )  # fmt: skip

    def step(pair: tuple[Tensor, Tensor]) -> bool:
        before = given.private.updates
        opacus_loop(model, optimizer, pair)
        return bool(given.private.updates > before)

    return updates(endless(given), step)


def huggingface_door(records: int, batch: int) -> Update:
    """epsilons.huggingface: transformers' whole loop, in a thread that waits before each step."""
    from transformers import TrainerCallback, TrainingArguments

    from epsilons.huggingface import PrivateTrainer

    class Paused(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step:
                done.release()
            go.acquire()

    class Digits(PrivateTrainer):
        def record_losses(self, model: nn.Module, inputs: Any) -> Tensor:
            return F.cross_entropy(model(inputs["x"]), inputs["labels"], reduction="none")

    def train() -> None:
        torch.set_num_threads(1)
        trainer.train()

    go, done = threading.Semaphore(0), threading.Semaphore(0)
    model, optimizer = model_and_optimizer()
    out = Path(tempfile.mkdtemp()) / "out"
    args = TrainingArguments(
        str(out), per_device_train_batch_size=batch, max_steps=1000, save_strategy="no", logging_strategy="no",
        lr_scheduler_type="constant", remove_unused_columns=False, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Digits(
        model,
        args,
        train_dataset=[{"x": x, "labels": y} for x, y in zip(*data(records), strict=True)],
        budgets=epsilons.Budgets([8.0] * records, delta=1e-6),
        accountant="rdp",
        clip_norm=CLIP_NORM,
        performance=epsilons.Performance(max_physical_batch=records),
        optimizers=(optimizer, None),
        callbacks=[Paused()],
    )
    threading.Thread(target=train, daemon=True).start()

    def update() -> None:
        go.release()
        done.acquire()

    return update


def opacus_itself(records: int, batch: int) -> Update:
    """Opacus, with its default engine."""
    from opacus import PrivacyEngine

    module, optimizer = model_and_optimizer()
    model, optimizer, given = PrivacyEngine(accountant="rdp").make_private(
        module=module, optimizer=optimizer, data_loader=loader(records, batch), noise_multiplier=NOISE,
        max_grad_norm=CLIP_NORM,
    )  # fmt: skip

    def step(pair: tuple[Tensor, Tensor]) -> bool:
        opacus_loop(model, optimizer, pair)
        return True

    return updates(endless(given), step)


def opacus_loop(model: nn.Module, optimizer: torch.optim.Optimizer, pair: tuple[Tensor, Tensor]) -> None:
    x, y = pair
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


#: Name -> (what makes it, the name that its time is compared with).
DOORS: dict[str, tuple[Callable[[int, int], Update], str]] = {
    "own loop": (own, "own loop"),
    "epsilons.opacus": (opacus_door, "own loop"),
    "own loop by record": (partial(own, by_record=True), "own loop"),
    "epsilons.huggingface": (huggingface_door, "own loop by record"),
    "Opacus": (opacus_itself, "epsilons.opacus"),
}


def measure(records: int, batch: int, rounds: int) -> dict[str, list[float]]:
    """{door: processor seconds per update}."""
    made = {name: build(records, batch) for name, (build, _) in DOORS.items()}
    for update in made.values():
        for _ in range(BEFORE):
            update()
    found: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, update in made.items():
            start = time.process_time()
            update()
            found[name].append(time.process_time() - start)
    return found


def table(found: dict[str, list[float]]) -> str:
    rows = ["| door | ms per update | over | ratio |", "|---|---|---|---|"]
    for name, (_, other) in DOORS.items():
        over = f"{ratio(found[name], found[other]):.2f}"
        rows.append(f"| {name} | {1e3 * statistics.median(found[name]):.1f} | {other} | {over} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tune_allocator()
    kept: dict[str, Any] = {"machine": machine(), "command": sys.argv, "seconds": {}}
    for batch in given.batch:
        found = kept["seconds"][f"expected batch {batch}"] = measure(given.records, batch, given.rounds)
        print(f"expected batch {batch}\n{table(found)}", flush=True)
    if given.out:
        given.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
