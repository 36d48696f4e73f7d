"""Compiled runs: they learn what eager ones do, and go on to the same bits."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from compiling import has_compiler, needs_compiler, quick  # noqa: F401
from epsilons.errors import InputError
from epsilons.training import microbatches
from epsilons.training.clipping.compiled import Compiled
from functional import Model
from options import compiled as compiled_run
from options import split
from ranked import Processes
from small_runs import lines, parameters_of, same

pytestmark = [pytest.mark.usefixtures("one_thread"), needs_compiler]


def reader(dropout: float) -> nn.Module:
    """Tokens and numbers per record; dropout."""

    def compute(model: nn.Module, tokens: Tensor, numbers: Tensor) -> Tensor:
        return model.head(model.dropout(torch.cat([model.table(tokens).mean(1), model.dropout(numbers)], 1)))

    return Model(compute, table=nn.Embedding(9, 4), head=nn.Linear(6, 2), dropout=nn.Dropout(dropout))


def batch_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    tokens, numbers, targets = batch
    return F.cross_entropy(model(tokens, numbers), targets, reduction="none")


BUDGETS = epsilons.Budgets(np.resize([1.0, 4.0], 60), delta=1e-3)
STEPS, UNTIL = 8, 5


def made(run_dir: Path | None = None, nan: int | None = None, dropout: float = 0.2, **options):
    budgets, recipe = options.get("budgets", BUDGETS), epsilons.Recipe(steps=STEPS, batch_size=12, clip_norm=0.5)
    plan = epsilons.plan(budgets, recipe, "sample", "rdp")
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(60, 2, generator=generator)
    if nan is not None:
        numbers[nan] = float("nan")
    targets = torch.randint(0, 2, (60,), generator=generator)
    data = (torch.randint(0, 9, (60, 5), generator=generator), numbers, targets)
    torch.manual_seed(0)
    model = reader(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"seed": 3, "budgets": BUDGETS, "run_dir": run_dir, **options}
    if options.pop("is_compiled", True):
        return model, compiled_run(model, optimizer, data, plan, loss=batch_loss, **options)
    return model, epsilons.make_private(model, optimizer, data, plan, **split(options))


def trained(**options) -> list[Tensor]:
    model, private = made(**options)
    with private:
        for batch in private.batches:
            if options.get("is_compiled", True):
                private._clip(batch)
            else:
                private.backward(batch_loss(model, batch))
            private.step()
    return parameters_of(model)


@pytest.fixture
def counted(monkeypatch) -> list[int]:
    """The records of each physical batch that was not left to the engine."""
    counts: list[int] = []
    real = Compiled.sums

    def sums(self, batch, count, *bounds):
        result = real(self, batch, count, *bounds)
        if result is not None:
            counts.append(count)
        return result

    monkeypatch.setattr(Compiled, "sums", sums)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("largest", [5, "auto"])
def test_a_compiled_run_learns_what_an_eager_one_does(largest, counted):
    # Without dropout: masks are drawn for the physical batch as it is filled up.
    theirs = trained(is_compiled=False, max_physical_batch=largest, dropout=0.0)
    assert not counted
    ours = trained(max_physical_batch=largest, dropout=0.0)
    assert len(counted) >= STEPS - 1  # all but draws of one record, or of none
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("quick")
def test_a_record_that_is_not_finite_adds_nothing_in_a_compiled_run_either(counted):
    # Without dropout: which batches are repeated record by record, with other masks, differs between the two.
    ours, theirs = trained(nan=7, dropout=0.0), trained(nan=7, dropout=0.0, is_compiled=False)
    assert counted
    assert all(torch.isfinite(a).all() for a in ours)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def killed(run_dir: Path) -> None:
    """A run whose process is gone after an update between two checkpoints."""
    torch.set_num_threads(1)
    _, private = made(run_dir=run_dir, checkpoint_every=3)
    private.on_update(lambda p: os.kill(os.getpid(), signal.SIGKILL) if p.updates == UNTIL else None)
    for batch in private.batches:
        private._clip(batch)
        private.step()


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_is_the_same_to_the_bit(tmp_path, counted):
    """By another process, which compiles for itself, and replays what came after the last checkpoint under one key."""
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(tmp_path / "run",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    expected = trained()
    before = len(counted)
    resumed = trained(run_dir=tmp_path / "run", resume=True, checkpoint_every=3)
    assert len(counted) > before
    assert same(resumed, expected)
    settings = json.loads((tmp_path / "run" / "run.json").read_text())
    assert settings["performance"]["compile"] is True
    epochs = [line["epoch"] for line in lines(tmp_path / "run") if line["kind"] in ("key", "update")]
    assert len(epochs) > STEPS
    assert set(epochs) == {0}  # one key: what was replayed had the same hashes


def test_a_run_that_goes_on_without_its_compiler_begins_another_key(tmp_path):
    _, private = made(run_dir=tmp_path / "run")
    described = private._parts.fingerprint
    private.close()
    _, other = made(run_dir=tmp_path / "other", is_compiled=False)
    assert described == {**other._parts.fingerprint, "compile": True} != other._parts.fingerprint
    other.close()


def compiled_values() -> tuple[list[np.ndarray], int]:
    """The parameters after a run of this rank, and how many physical batches were compiled."""
    torch.set_num_threads(1)
    model, private = made(dropout=0.0)
    with private:
        for batch in private.batches:
            private._clip(batch)
            private.step()
    return [p.detach().numpy() for p in model.parameters()], sum(
        p.runs for p in private._clipper._compiled._programs.values()
    )


@pytest.mark.slow
def test_two_processes_train_one_model_compiled():
    processes = Processes()
    try:
        (first, runs), (second, more) = processes.together(compiled_values)
    finally:
        processes.end()
    alone, _ = compiled_values()
    assert min(runs, more) >= STEPS // 2
    for a, b, c in zip(first, second, alone, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("quick")
def test_fit_compiles(tmp_path, counted):
    plan = epsilons.plan(BUDGETS, epsilons.Recipe(steps=3, batch_size=12, clip_norm=0.5), "sample", "rdp")
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(60, 4, generator=generator), torch.randint(0, 2, (60,), generator=generator)
    parameters = []
    for number, compile in enumerate([True, False]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        epsilons.fit(
            model, data, plan, budgets=BUDGETS, seed=1, **split({"compile": compile}), run_dir=tmp_path / str(number)
        )
        parameters.append(parameters_of(model))
        assert json.loads((tmp_path / str(number) / "run.json").read_text())["performance"]["compile"] is compile
    assert len(counted) >= 2
    torch.testing.assert_close(*parameters, atol=1e-6, rtol=1e-5)


def test_compiled_batches_are_no_larger_than_draws():
    """512 records at once would be filled up from a dozen."""
    _, private = made(max_physical_batch=512)
    assert private._clipper._compiled.records == int(np.ceil(12 + microbatches.COMPILED_ROOTS * np.sqrt(12)))
    private.close()
    _, private = made(max_physical_batch=7)
    assert private._clipper._compiled.records == 7
    private.close()


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_other_engines_are_not_compiled(engine):
    with pytest.raises(InputError, match="compile=True records the engine ghost"):
        made(engine=engine)


def test_a_machine_without_a_compiler_is_refused_at_once(monkeypatch):
    from torch._inductor import cpp_builder, exc

    def nothing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", nothing)
    with pytest.raises(InputError, match="needs a C\\+\\+ compiler"):
        made()


@pytest.mark.usefixtures("quick")
def test_a_loss_that_is_a_module_is_a_part_of_the_step_in_fit_too():
    def annealed(loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=loss.smoothing)

    def trained_with(**options) -> Tensor:
        torch.manual_seed(0)
        model, loss = nn.Linear(4, 3), Model(annealed, smoothing=0.0)
        budgets = epsilons.Budgets([4.0] * 40)
        plan = epsilons.plan(budgets, epsilons.Recipe(steps=6, batch_size=20, clip_norm=1.0), accountant="rdp")
        data = torch.randn(40, 4), torch.randint(0, 3, (40,))

        def anneal(private: epsilons.Private) -> None:
            loss.smoothing = 0.0 if private.updates < 3 else 0.6

        epsilons.fit(model, data, plan, budgets=budgets, loss=loss, seed=0, callbacks=[anneal], **split(options))
        return model.weight.detach()

    torch.testing.assert_close(trained_with(compile=True), trained_with(), atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("quick")
def test_views_of_records_are_compiled_and_learn_what_eager_ones_do(counted):
    ours, eager = (trained(is_compiled=is_compiled, views=3, dropout=0.0) for is_compiled in (True, False))
    assert len(counted) > UNTIL
    assert all(count % 3 == 0 for count in counted)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, eager, strict=True))


def test_persons_with_a_choice_of_rows_are_not_compiled_to_the_bit_and_this_is_logged(counted, caplog):
    people = epsilons.Budgets(np.resize([1.0, 4.0], 30), delta=1e-3, unit="person")
    options = {"budgets": people, "persons": np.resize(np.arange(30), 60), "rows_per_person": 2, "dropout": 0.0}
    ours, eager = (trained(is_compiled=is_compiled, **options) for is_compiled in (True, False))
    assert counted == []
    assert same(ours, eager)
    assert "persons contribute up to 2 rows, and programs need equally many of each" in caplog.text
