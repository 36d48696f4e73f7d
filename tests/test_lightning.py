"""The Lightning door: the module stays as it is, and the weights are those of a loop of our own at the same key."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import epsilons
from epsilons.errors import (
    BatchDependenceError,
    CallOrderError,
    EpsilonsError,
    EpsilonsWarning,
    InputError,
    ModelError,
)
from epsilons.training import Performance
from options import grouped, make_flat
from pages import ROOT
from small_runs import close, of_phases, parameters_of, same, some_budgets, some_data, some_plan

L = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")
door = pytest.importorskip("epsilons.lightning")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

KEY = bytes(range(32))
DATA = TensorDataset(*some_data())
HELD_OUT = TensorDataset(DATA.tensors[0].flip(1) + 1, DATA.tensors[1])
EPOCHS, DRAWS = 2, 5  # 60 records, 12 expected in a draw


class Module(L.LightningModule):
    """A module with a metric of training, a schedule by step, and dropout."""

    def __init__(self, loss: str = "mean", dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.encoder, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.dropout, self.loss = nn.Dropout(dropout), loss
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.encoder(x).tanh()))

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        self.sizes.append(len(x))
        outputs = self.head(self.encoder(x).tanh()) if self.loss == "apart" else self(x)
        self.accuracy(outputs, y)
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("loss", F.cross_entropy(outputs, y).detach())
        if self.loss == "weighted":
            return F.cross_entropy(outputs, y, weight=torch.tensor([1.0, 2.0, 3.0]))
        losses = F.cross_entropy(outputs, y, reduction="none")
        return losses if self.loss == "by record" else {"loss": losses.mean()} if self.loss == "dict" else losses.mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("valid", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, EPOCHS * DRAWS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def a_strategy(**options: Any) -> Any:
    usual = {"clip_norm": 0.5, "accountant": "rdp", "performance": Performance(max_physical_batch=5)}
    key = {} if "seed" in options else {"key": KEY}
    budgets = options.pop("budgets", some_budgets())
    given = grouped(None, usual | key | options)
    return door.PrivateStrategy(budgets, records=given.pop("data"), **given)


def a_trainer(strategy: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    usual = {"max_epochs": EPOCHS, "accelerator": "cpu", "enable_model_summary": False, "num_sanity_val_steps": 0}
    return L.Trainer(strategy=strategy, **quiet | usual | options)


def a_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **{"batch_size": 12, "shuffle": True} | options)


def fitted(module: Any, strategy: Any = None, ckpt_path: Any = None, **options: Any) -> tuple[Any, Any]:
    strategy = strategy or a_strategy()
    trainer = a_trainer(strategy, **options)
    trainer.fit(module, a_loader(), DataLoader(HELD_OUT, 12), ckpt_path=ckpt_path)
    return trainer, strategy


def own(**options: Any) -> list[Tensor]:
    """A loop of our own with the same plan, key, optimizer and schedule."""
    module = Module()
    [optimizer], [schedule] = module.configure_optimizers()
    private = make_flat(
        module,
        optimizer,
        DATA,
        options.pop("plan", some_plan(steps=EPOCHS * DRAWS)),
        performance=Performance(max_physical_batch=5),
        **({"key": KEY, "budgets": some_budgets()} | options),
    )
    private.on_update(lambda _: schedule["scheduler"].step())
    with private:
        for x, y in private.batches:
            private.backward(F.cross_entropy(module(x), y, reduction="none"))
            private.step()
    return parameters_of(module)


@pytest.mark.parametrize("rows", [1, 3])
def test_persons_are_drawn_and_the_loader_s_batch_size_is_their_expected_number(rows):
    """20 persons of the 60 rows, 12 expected in a draw, so 2 draws in an epoch: the number of rows is private."""
    person = torch.arange(60).numpy() % 20
    ids = [f"id {p}" for p in person]
    people = epsilons.Budgets.by_person(1.0 + person % 2, ids, delta=1e-3)
    module = Module()
    strategy = a_strategy(budgets=people, strategy="scale", persons=ids, rows_per_person=rows)
    trainer, _ = fitted(module, strategy)
    assert trainer.global_step == 2 * EPOCHS
    plan = epsilons.plan(people, epsilons.Recipe(2 * EPOCHS, 12, 0.5), "scale", accountant="rdp")
    assert strategy.plan.digest == plan.digest
    assert close(parameters_of(module), own(plan=plan, budgets=people, rows_per_person=rows), within=1e-6)


@pytest.mark.parametrize("loss", ["mean", "by record", "apart", "dict"])
def test_the_trainer_gives_the_weights_of_our_own_loop(loss):
    module = Module(loss)
    trainer, strategy = fitted(module)
    assert close(parameters_of(module), own(), within=1e-6)
    assert trainer.global_step == strategy.private.updates == EPOCHS * DRAWS
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)
    assert strategy.private.ledger.charged == (EPOCHS * DRAWS,)
    assert "valid" in trainer.callback_metrics
    assert all(p.grad is None for p in module.parameters())


def test_a_seed_gives_the_key_of_our_own_loop():
    """The trainer that a module is attached to is no part of what is computed."""
    module = Module()
    fitted(module, a_strategy(seed=7))
    assert close(parameters_of(module), own(key=None, seed=7), within=1e-6)


def test_one_step_of_the_trainer_is_one_draw_also_if_it_is_empty():
    plan = of_phases(
        {"steps": 4, "sample_rate": [0.2, 0.1]},
        {"steps": 2, "sample_rate": [0.0, 0.0]},
        {"steps": 4, "sample_rate": [0.05, 0.2]},
    )
    budgets = some_budgets(tuple(plan.epsilons.tolist()))
    trainer, strategy = fitted(Module(), a_strategy(budgets=budgets, plan=plan))
    assert trainer.global_step == strategy.private.updates == 10
    assert strategy.private.is_finished


def test_training_step_is_called_for_each_draw_and_for_no_check():
    class Counting(Module):
        logged = 0

        def log(self, name: str, value: Any, **options: Any) -> None:
            Counting.logged += name == "loss"
            super().log(name, value, **options)

    module, updated = Counting(), []
    module.accuracy.update = lambda *_: updated.append(module.trainer.strategy.private.is_check)
    trainer, _ = fitted(module)
    assert Counting.logged == len(updated) >= trainer.global_step
    assert not any(updated)


@pytest.mark.parametrize("stop", [3, 7])
def test_a_run_that_is_resumed_has_the_same_bits(tmp_path, stop):
    def run(folder: Path, **options: Any) -> list[Tensor]:
        module = Module(dropout=0.3)
        strategy = a_strategy(seed=5, run_dir=folder / "private", resume=(folder / "private").exists())
        saved = L.pytorch.callbacks.ModelCheckpoint(folder / "saved", save_top_k=-1, every_n_train_steps=1)
        path = options.pop("ckpt_path", None)
        fitted(module, strategy, path, enable_checkpointing=True, callbacks=[saved, *options.pop("callbacks", [])])
        return parameters_of(module)

    class Stop(L.pytorch.callbacks.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == stop:
                raise ZeroDivisionError

    whole = run(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "parts", callbacks=[Stop()])
    newest = max((tmp_path / "parts" / "saved").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    with pytest.raises(InputError, match=rf"is at update {stop}, and the Trainer begins at step 0"):
        run(tmp_path / "parts")
    assert same(run(tmp_path / "parts", ckpt_path=newest), whole)
    assert not list((tmp_path / "parts" / "saved").rglob("*key*"))


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.encoder.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)]


class OwnBackward(Module):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Plateau(Module):
    def configure_optimizers(self) -> Any:
        [optimizer], _ = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "valid"}}


class StepsTwice(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure)
        optimizer.step(closure=closure)


def test_a_module_that_steps_twice_is_refused_at_its_second_draw():
    strategy = a_strategy()
    with pytest.raises(CallOrderError, match="Each call is another draw"):
        fitted(StepsTwice(), strategy)
    assert strategy.private.updates == sum(strategy.private.ledger.charged) == 1


@pytest.mark.parametrize(
    ("make", "options", "error", "words"),
    [
        (Manual, {}, InputError, "automatic_optimization=False"),
        (TwoOptimizers, {}, Exception, "one optimizer|multiple optimizers"),
        (OwnBackward, {}, InputError, "overrides backward"),
        (Plateau, {}, InputError, "ReduceLROnPlateau"),
        (Module, {"gradient_clip_val": 1.0}, InputError, "gradient_clip_val=1.0.*clip_norm"),
        (Module, {"accumulate_grad_batches": 2}, InputError, "accumulate_grad_batches=2.*max_physical_batch"),
        (Module, {"precision": "bf16-true"}, InputError, "precision='bf16-true'.*bf16-mixed"),
        (Module, {"limit_train_batches": 2}, InputError, "limit_train_batches=2.*max_steps"),
        (Module, {"overfit_batches": 2}, InputError, "overfit_batches|limit_train_batches"),
        (Module, {"reload_dataloaders_every_n_epochs": 1}, InputError, "reload_dataloaders_every_n_epochs"),
        (Module, {"max_epochs": -1}, InputError, "fixed number of steps"),
        (Module, {"callbacks": [L.pytorch.callbacks.LearningRateFinder()]}, InputError, "LearningRateFinder.*search"),
        (lambda: Module("weighted"), {}, BatchDependenceError, "a weight for each class"),
    ],
)
def test_settings_under_which_something_else_would_train_are_refused(make, options, error, words):
    module = make()
    before = parameters_of(module)
    with pytest.raises(error, match=words):
        fitted(module, **options)
    assert same(parameters_of(module), before)


def test_a_second_fit_with_one_strategy_is_refused():
    trainer, _ = fitted(Module())
    with pytest.raises(InputError, match="has trained a run already"):
        trainer.fit(Module(), a_loader())


def test_a_plan_of_another_length_is_refused():
    with pytest.raises(InputError, match="The plan has 6 steps, and the Trainer makes 10"):
        fitted(Module(), a_strategy(plan=some_plan(steps=6)))


def test_a_plan_for_several_runs_is_counted_in_its_folder(tmp_path):
    made = epsilons.plan(some_budgets(), epsilons.Recipe(EPOCHS * DRAWS, 12.0, 0.5), accountant="rdp", runs=2)
    folder = epsilons.PlanFolder.create(tmp_path / "plan", made)
    fitted(Module(), a_strategy(plan=folder))
    assert folder.begun == 1
    with pytest.raises(InputError, match="takes a Plan or a PlanFolder, got a str"):
        a_strategy(plan="plan.json")


AVERAGES = {
    "EMA": lambda: L.pytorch.callbacks.EMAWeightAveraging(decay=0.5),
    "mean": lambda: L.pytorch.callbacks.WeightAveraging(),
    "SWA": lambda: L.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=0.5),
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_of_weights_may_take_their_place_at_the_end(tmp_path, kind):
    if not hasattr(L.pytorch.callbacks, "EMAWeightAveraging"):
        pytest.skip("this version of Lightning has no averages of weights")
    module = Module()
    _, strategy = fitted(module, a_strategy(run_dir=tmp_path / "run"), callbacks=[AVERAGES[kind]()])
    assert not close(parameters_of(module), own(), within=1e-3)
    assert strategy.private.ledger.charged == (EPOCHS * DRAWS,)
    assert strategy.private.ledger.is_closed
    assert not list((tmp_path / "run").glob("*key*"))


def test_the_key_never_lies_where_a_logger_or_a_checkpoint_is(tmp_path):
    logger = L.pytorch.loggers.CSVLogger(tmp_path, name="log", version="1")
    with pytest.raises(InputError, match="secret key"):
        fitted(Module(), a_strategy(run_dir=tmp_path / "log" / "1" / "private"), logger=logger)
    saved = L.pytorch.callbacks.ModelCheckpoint(tmp_path / "saved")
    with pytest.raises(InputError, match="secret key"):
        fitted(Module(), a_strategy(run_dir=tmp_path / "saved"), callbacks=[saved], enable_checkpointing=True)


def test_validation_and_tests_run_without_a_private_run():
    strategy = a_strategy()
    (scores,) = a_trainer(strategy).validate(Module(), a_loader(shuffle=False), verbose=False)
    assert scores["valid"] > 0
    assert strategy.private is None


def test_a_model_that_does_not_train_by_record_is_refused():
    class Normed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))

    with pytest.raises(ModelError, match="BatchNorm1d"):
        fitted(Normed())
    assert issubclass(ModelError, EpsilonsError)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"records": epsilons.Records([1.0])}, "loader has the data"),
        ({"run_dir": epsilons.RunFolder("run", checkpoint_every=5)}, "Leave out checkpoint_every"),
    ],
)
def test_what_the_strategy_would_not_use_is_refused(options, words):
    with pytest.raises(InputError, match=words):
        door.PrivateStrategy(some_budgets(), **options)


def test_the_number_of_batches_is_known_in_configure_optimizers():
    class Warm(Module):
        def configure_optimizers(self) -> Any:
            found.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    found: list[int] = []
    trainer, strategy = fitted(Warm())
    assert found == [trainer.global_step] == [strategy.private.plan.steps]


class Frozen(L.pytorch.callbacks.BaseFinetuning):
    """Freezes the encoder before the run."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.encoder)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None: ...


class Written(L.pytorch.callbacks.BasePredictionWriter): ...


#: Every callback that Lightning ships: how it is made, and whether the weights may differ from those without it.
CALLBACKS: dict[str, tuple[Any, bool]] = {
    "BackboneFinetuning": (lambda c, d: c.BackboneFinetuning(), False),
    "BaseFinetuning": (lambda c, d: Frozen(), True),
    "BasePredictionWriter": (lambda c, d: Written("epoch"), False),
    "BatchSizeFinder": (lambda c, d: c.BatchSizeFinder(), False),
    "Callback": (lambda c, d: c.Callback(), False),
    "Checkpoint": (lambda c, d: c.Checkpoint(), False),
    "DeviceStatsMonitor": (lambda c, d: c.DeviceStatsMonitor(cpu_stats=False), False),
    "EMAWeightAveraging": (lambda c, d: c.EMAWeightAveraging(), True),
    "EarlyStopping": (lambda c, d: c.EarlyStopping("valid", patience=9), False),
    "GradientAccumulationScheduler": (lambda c, d: c.GradientAccumulationScheduler({1: 2}), False),
    "LambdaCallback": (lambda c, d: c.LambdaCallback(on_train_start=lambda *_: None), False),
    "LearningRateFinder": (lambda c, d: c.LearningRateFinder(), False),
    "LearningRateMonitor": (lambda c, d: c.LearningRateMonitor(), False),
    "ModelCheckpoint": (lambda c, d: c.ModelCheckpoint(d, monitor="valid"), False),
    "ModelPruning": (lambda c, d: c.ModelPruning("l1_unstructured", amount=0.3), False),
    "ModelSummary": (lambda c, d: c.ModelSummary(), False),
    "OnExceptionCheckpoint": (lambda c, d: c.OnExceptionCheckpoint(d), False),
    "ProgressBar": (lambda c, d: c.ProgressBar(), False),
    "RichModelSummary": (lambda c, d: c.RichModelSummary(), False),
    "RichProgressBar": (lambda c, d: c.RichProgressBar(), False),
    "SpikeDetection": (lambda c, d: c.SpikeDetection(), False),
    "StochasticWeightAveraging": (lambda c, d: c.StochasticWeightAveraging(0.01, swa_epoch_start=1), True),
    "TQDMProgressBar": (lambda c, d: c.TQDMProgressBar(), False),
    "ThroughputMonitor": (lambda c, d: c.ThroughputMonitor(batch_size_fn=len, window_size=3), False),
    "Timer": (lambda c, d: c.Timer("00:01:00:00"), False),
    "WeightAveraging": (lambda c, d: c.WeightAveraging(), True),
}


def test_every_callback_of_lightning_is_tried():
    assert set(CALLBACKS) == set(L.pytorch.callbacks.__all__)


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_of_lightning_runs_or_is_in_the_page_s_table(name, tmp_path, plain):
    make, may_differ = CALLBACKS[name]
    callback, module = make(L.pytorch.callbacks, tmp_path), Module()
    options: dict[str, Any] = {"callbacks": [callback], "enable_checkpointing": True, "default_root_dir": tmp_path}
    options |= {"enable_progress_bar": "Bar" in name, "enable_model_summary": "Summary" in name}
    options |= {"logger": L.pytorch.loggers.CSVLogger(tmp_path), "log_every_n_steps": 1}
    if name in {kind.__name__ for kind in door.REFUSED_CALLBACKS}:
        module.backbone, module.train_dataloader = module.encoder, a_loader
        module.batch_size = 12  # which some of them ask for
        with pytest.raises(InputError, match=f"{name} cannot be used"):
            a_trainer(a_strategy(), **options).fit(module)
        assert f"`{name}`" in (ROOT / "docs" / "doors" / "lightning.md").read_text()
        return
    trainer, _ = fitted(module, **options)
    assert trainer.global_step == EPOCHS * DRAWS
    assert may_differ or same(parameters_of(module), plain)


@pytest.fixture(scope="module")
def plain() -> list[Tensor]:
    module = Module()
    fitted(module)
    return parameters_of(module)


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("frequency", [1, 2])
def test_a_schedule_gives_the_learning_rates_of_plain_lightning(interval, frequency):
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": schedule, "interval": interval, "frequency": frequency}]

    class Rates(L.pytorch.callbacks.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    found = []
    for strategy in (a_strategy(), "auto"):
        rates: list[float] = []
        fitted(Scheduled(), strategy, callbacks=[Rates()])
        found.append(rates)
    assert len(found[0]) == EPOCHS * DRAWS
    assert found[0] == found[1]


@pytest.mark.parametrize("is_said", [False, True])
def test_what_training_step_logs_reaches_no_logger_unless_it_is_said(is_said, tmp_path):
    class Logging(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            self.log_dict({"first": 1.0, "second": 2.0}, prog_bar=True, logger=True)
            self.log("epoch", 3.0, on_epoch=True, on_step=True)
            return super().training_step(batch, index)

    class Seen(L.pytorch.callbacks.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            seen.append((float(outputs["loss"]), trainer.progress_bar_metrics["first"]))

    seen: list[tuple[float, float]] = []
    logger = L.pytorch.loggers.CSVLogger(tmp_path)
    with nullcontext() if is_said else pytest.warns(EpsilonsWarning, match="sent to no logger"):
        fitted(Logging(), a_strategy(log_private_loss=is_said), logger=logger, log_every_n_steps=1, callbacks=[Seen()])
    names = set((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(","))
    sent = {"first", "second", "epoch_step", "epoch_epoch", "loss"} if is_said else set()
    assert names >= sent
    assert is_said or names == {"epoch", "step", "valid"}
    assert {shown for _, shown in seen} == {1.0}
    assert any(loss for loss, _ in seen) is is_said


OTHERS = {
    "the training data": lambda: DATA,
    "a copy": lambda: TensorDataset(*(t.clone() for t in DATA.tensors)),
    "a part": lambda: torch.utils.data.Subset(DATA, range(10, 40)),
    "another order": lambda: TensorDataset(*(t.flip(0) for t in DATA.tensors)),
}


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("kind", ["EarlyStopping", "ModelCheckpoint", "none"])
@pytest.mark.parametrize("data", OTHERS)
def test_validation_on_training_records_is_refused(data, kind, sanity, tmp_path):
    selects = [getattr(L.pytorch.callbacks, kind)(monitor="valid")] if kind != "none" else []
    options = {"callbacks": selects, "enable_checkpointing": True, "default_root_dir": tmp_path}
    trainer = a_trainer(a_strategy(log_private_loss=bool(selects)), num_sanity_val_steps=sanity, **options)
    with pytest.raises(InputError, match=f"{kind} would choose" if selects else "would go to the loggers"):
        trainer.fit(Module(), a_loader(), DataLoader(OTHERS[data](), 12))


def test_validation_on_training_records_is_shown_to_people_who_say_so():
    trainer = a_trainer(a_strategy(log_private_loss=True))
    trainer.fit(Module(), a_loader(), a_loader(shuffle=False))
    assert trainer.global_step == EPOCHS * DRAWS


@pytest.mark.parametrize("kind", ["EarlyStopping", "ModelCheckpoint"])
def test_a_callback_that_follows_what_training_logs_is_refused(kind, tmp_path):
    callback = getattr(L.pytorch.callbacks, kind)(monitor="loss")
    with pytest.raises(InputError, match="follows 'loss', which training_step logs"):
        fitted(Module(), callbacks=[callback], enable_checkpointing=True, default_root_dir=tmp_path)
