"""How long an update takes through each door, over a loop of our own and over the framework's own privacy.

    python benchmarks/doors.py

All train the CNN of the MNIST benchmark on the same tensors, on one thread, interleaved in one process. A round makes
one update through each: draw, read, forward, backward, clip, noise, update. Updates whose physical batch is checked
(steps 0, 1, 10 and 100) are made before. The table has medians of processor seconds, and medians of paired ratios.
"""

from __future__ import annotations

import argparse
import json
import logging
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
    """epsilons.huggingface: transformers' whole loop, in a thread that waits after each step."""
    from transformers import TrainerCallback, TrainingArguments

    from epsilons.huggingface import PrivateTrainer

    class Paused(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.wait()

    class Digits(PrivateTrainer):
        def record_losses(self, model: nn.Module, inputs: Any) -> Tensor:
            return F.cross_entropy(model(inputs["x"]), inputs["labels"], reduction="none")

    turns = Turns()
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
    return turns.run(trainer.train)


def lightning_door(records: int, batch: int) -> Update:
    """epsilons.lightning: Lightning's whole loop, in a thread that waits after each step."""
    import lightning

    from epsilons.lightning import PrivateStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Digits(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self._optimizer = model_and_optimizer()

        def forward(self, x: Tensor) -> Any:  # with it, the memory layout is tried
            return self.model(x)

        def training_step(self, pair: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return F.cross_entropy(self(pair[0]), pair[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self._optimizer

    class Paused(lightning.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            turns.wait()

    turns = Turns()
    strategy = PrivateStrategy(
        epsilons.Budgets([8.0] * records, delta=1e-6), clip_norm=CLIP_NORM, accountant="rdp",
        performance=epsilons.Performance(max_physical_batch=records),
    )  # fmt: skip
    trainer = lightning.Trainer(
        max_steps=1000, strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Paused()],
    )  # fmt: skip
    return turns.run(lambda: trainer.fit(Digits(), loader(records, batch)))


def sklearn_door(records: int, batch: int) -> Update:
    """epsilons.sklearn: fit of a PrivateClassifier, in a thread that waits after each update."""
    from epsilons.sklearn import PrivateClassifier, estimators

    class Pictures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, _ = model_and_optimizer()

        def forward(self, x: Tensor) -> Any:
            return self.model(x.view(-1, 1, 28, 28))

    turns = Turns()
    # The estimator takes no callbacks and no physical batch.
    largest = epsilons.Performance(max_physical_batch=records)
    estimators.fit = partial(epsilons.fit, callbacks=[lambda _: turns.wait()], performance=largest)
    x, y = (column.numpy() for column in data(records))
    door = PrivateClassifier(
        8.0, delta=1e-6, batch_size=batch, epochs=1000 * batch / records, lr=RATE, clip_norm=CLIP_NORM,
        module=lambda features, classes: Pictures(), random_state=0,
    )  # fmt: skip
    return turns.run(lambda: door.fit(x.reshape(records, -1), y))


class Turns:
    """A training in a thread of its own, which makes one update when it is its turn."""

    def __init__(self) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)

    def run(self, train: Callable[[], Any]) -> Update:
        def trained() -> None:
            torch.set_num_threads(1)
            self._go.acquire()
            train()

        threading.Thread(target=trained, daemon=True).start()

        def update() -> None:
            self._go.release()
            self._done.acquire()

        return update

    def wait(self) -> None:
        """After an update."""
        self._done.release()
        self._go.acquire()


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


#: Name -> (what makes it, the names that its time is compared with).
DOORS: dict[str, tuple[Callable[[int, int], Update], tuple[str, ...]]] = {
    "own loop": (own, ()),
    "epsilons.opacus": (opacus_door, ("own loop", "Opacus")),
    "own loop by record": (partial(own, by_record=True), ("own loop",)),
    "epsilons.huggingface": (huggingface_door, ("own loop by record",)),
    "epsilons.lightning": (lightning_door, ("own loop",)),
    "epsilons.sklearn": (sklearn_door, ("own loop",)),
    "Opacus": (opacus_itself, ()),
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
    rows = ["| door | ms per update | ratios |", "|---|---|---|"]
    for name, (_, others) in DOORS.items():
        ratios = ", ".join(f"{ratio(found[name], found[other]):.2f} of {other}" for other in others)
        rows.append(f"| {name} | {1e3 * statistics.median(found[name]):.1f} | {ratios} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "doors.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tune_allocator()
    kept: dict[str, Any] = {"machine": machine(), "command": sys.argv, "seconds": {}}
    for batch in given.batch:
        found = kept["seconds"][f"expected batch {batch}"] = measure(given.records, batch, given.rounds)
        print(f"expected batch {batch}\n{table(found)}", flush=True)
        given.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
